"""What a simulated disk keeps: files and names, as processes see them and as a power failure would.

A write, or a change of a name, is seen by all processes at once, but is only pending on the medium.
Syncing a file makes its content durable, syncing a folder the changes of its names.
"""

from __future__ import annotations

import os
from collections import Counter
from random import Random
from typing import Any

PAGE_BYTES = 4096
SECTOR_BYTES = 512

Place = tuple["Folder", str]
"""A folder and a name in it."""


class Entry:
    """A file or folder. It has at most one name: there are no links."""

    __slots__ = ("durable_place", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.durable_place: Place | None = None


class Folder(Entry):
    __slots__ = ("durable", "names")

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.names: dict[str, Entry] = {}
        self.durable: dict[str, Entry] = {}


class File(Entry):
    """A file: `data` is what processes read; `durable` is sure to survive a power failure.

    `locks` and `shared` are SQLite's, see `vfs`.
    """

    __slots__ = ("_pending", "data", "durable", "locks", "shared")

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.data = bytearray()
        self.durable = bytearray()
        self._pending: list[tuple[int, bytes | None]] = []  # None: truncated to that size
        self.locks: dict[Any, int] = {}
        self.shared: Any = None

    def content(self) -> bytes:
        return bytes(self.data)

    def size(self) -> int:
        return len(self.data)

    def write(self, at: int, content: bytes) -> None:
        if content:
            write_at(self.data, at, content)
            self._pending.append((at, content))

    def truncate(self, size: int) -> None:
        set_size(self.data, size)
        self._pending.append((size, None))

    def sync(self) -> None:
        apply_writes(self.durable, self._pending)
        self._pending.clear()

    def drop_pending(self) -> None:
        """Forget the pending writes, as a failed sync does: a later one succeeds without them."""
        self._pending.clear()

    def lose_power(self, random: Random) -> None:
        """Let none, all or some of the pending writes reach the medium."""
        if self._pending:
            share = random.random()
            if share < 0.25:
                apply_writes(self.durable, self._pending)
            elif share < 0.75:
                self.durable = mix_writes(self.durable, self._pending, random)
            self._pending.clear()
        self.data = bytearray(self.durable)
        self.locks = {}
        self.shared = None


def write_at(data: bytearray, at: int, content: bytes) -> None:
    if at > len(data):
        data.extend(bytes(at - len(data)))
    data[at : at + len(content)] = content


def set_size(data: bytearray, size: int) -> None:
    del data[size:]
    data.extend(bytes(size - len(data)))


def apply_writes(data: bytearray, writes: list[tuple[int, bytes | None]]) -> None:
    for at, content in writes:
        if content is None:
            set_size(data, at)
        else:
            write_at(data, at, content)


def mix_writes(
    data: bytearray, writes: list[tuple[int, bytes | None]], random: Random
) -> bytearray:
    """Return what `data` may be if only some pages of the writes reach the medium.

    A page is as it was before or after any of the writes to it, whatever the other pages are. The
    size is one that the file had. Truncations happen in their order, and with what follows them.
    """
    cuts = [number for number, (_, content) in enumerate(writes) if content is None]
    end = random.choice([*cuts, len(writes)])
    last = bytearray(data)
    sizes = [len(last)]
    versions: dict[int, list[bytes]] = {}
    for at, content in writes[:end]:
        if content is None:
            set_size(last, at)
            sizes = [at]
            for page, olds in versions.items():
                versions[page] = [old[: max(0, at - page * PAGE_BYTES)] for old in olds]
            continue
        pages = range(at // PAGE_BYTES, (at + len(content) - 1) // PAGE_BYTES + 1)
        for page in pages:
            versions.setdefault(page, [page_of(last, page)])
        write_at(last, at, content)
        sizes.append(len(last))
        for page in pages:
            versions[page].append(page_of(last, page))
    for page, olds in versions.items():
        write_at(last, page * PAGE_BYTES, choose_page(olds, random))
    set_size(last, random.choice(sizes))
    return last


def page_of(data: bytes | bytearray, page: int) -> bytes:
    return bytes(data[page * PAGE_BYTES : (page + 1) * PAGE_BYTES])


def choose_page(versions: list[bytes], random: Random) -> bytes:
    """Return one of a page's versions or, rarely, one with sectors of several."""
    if random.random() < 0.75:
        return random.choice(versions).ljust(PAGE_BYTES, b"\0")
    whole = [version.ljust(PAGE_BYTES, b"\0") for version in versions]
    begins = range(0, PAGE_BYTES, SECTOR_BYTES)
    return b"".join(random.choice(whole)[at : at + SECTOR_BYTES] for at in begins)


class _Change:
    """A change of an entry's name: it moves to `place`; None: it is removed."""

    __slots__ = ("entry", "folders", "keys", "place")

    def __init__(self, entry: Entry, old: Place | None, new: Place | None) -> None:
        self.entry = entry
        self.place = new
        places = [place for place in (old, new) if place is not None]
        self.folders = tuple(dict.fromkeys(folder.number for folder, _ in places))
        # No file system makes a change durable without the earlier ones of the same entry or name.
        self.keys = (entry.number, *((folder.number, name) for folder, name in places))

    def apply(self) -> None:
        entry, old = self.entry, self.entry.durable_place
        if old is not None:
            del old[0].durable[old[1]]
        entry.durable_place = self.place
        if self.place is not None:
            folder, name = self.place
            replaced = folder.durable.get(name)
            if replaced is not None:
                replaced.durable_place = None
            folder.durable[name] = entry


class Names:
    """The changes of names that are not durable yet, in their order."""

    __slots__ = ("_changes",)

    def __init__(self) -> None:
        self._changes: list[_Change] = []

    def set(self, place: Place, entry: Entry) -> None:
        """Give a new entry a name; an entry that has it is replaced."""
        place[0].names[place[1]] = entry
        self._changes.append(_Change(entry, None, place))

    def remove(self, place: Place) -> None:
        entry = place[0].names.pop(place[1])
        self._changes.append(_Change(entry, place, None))

    def move(self, old: Place, new: Place) -> None:
        """Rename an entry, in one step."""
        entry = old[0].names.pop(old[1])
        new[0].names[new[1]] = entry
        self._changes.append(_Change(entry, old, new))

    def sync(self, folder: Folder) -> None:
        """Make the changes in a folder durable, with those on which they depend."""
        number = folder.number
        keys: set[object] = set()
        synced, pending = [], []
        for change in reversed(self._changes):
            if number in change.folders or not keys.isdisjoint(change.keys):
                keys.update(change.keys)
                synced.append(change)
            else:
                pending.append(change)
        for change in reversed(synced):
            change.apply()
        self._changes = pending[::-1]

    def lose_power(self, random: Random) -> None:
        """Keep the first changes of each folder, or, as often, any that depend on no lost one."""
        in_order = random.random() < 0.5
        counts = Counter(number for change in self._changes for number in change.folders)
        left = {number: random.randint(0, count) for number, count in counts.items()}
        lost: set[object] = set()
        for change in self._changes:
            is_lost = (
                not all(left[number] > 0 for number in change.folders)
                if in_order
                else random.random() < 0.5
            )
            if is_lost or not lost.isdisjoint(change.keys):
                lost.update(change.keys)
                left.update(dict.fromkeys(change.folders, 0))
                continue
            change.apply()
            for number in change.folders:
                left[number] -= 1
        self._changes = []


def error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
