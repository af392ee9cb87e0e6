"""Slots on a simulated disk: the real C code, on real files that have the simulated names.

Each simulated folder that has slots has a real one. Whatever C creates or replaces in it gets its
simulated name after the call; simulated renames and removals are done there too. So processes that
have the same slots open share them as real processes do.

Nothing syncs slots: after a power failure each page is as it was after any call since the file was
made, or all zeros.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import Any, Protocol, TypeVar

from faults import ProcessDied
from medium import PAGE_BYTES, File, Folder, Place, choose_page, page_of

import cerebro._core as _core
from cerebro.errors import CerebroError, StateError

T = TypeVar("T")

SUFFIXES = (".a", ".b", ".slots")
HEAD = 64
"""The offset in the commit page of the word whose two low bits name the newest slot."""


class SlotsFile(File):
    """A real file, with all versions of its content since it was made."""

    __slots__ = ("_fd", "_versions", "real_number")

    def __init__(self, number: int, path: str) -> None:
        super().__init__(number)
        self._versions = [b""]
        self._open(path)
        self.record()

    def _open(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.real_number = os.fstat(self._fd).st_ino  # not given to others while it is open

    def close(self) -> None:
        """Let the real file go; what it holds now is its last version."""
        if self._fd >= 0:
            self.record()
            os.close(self._fd)
            self._fd = -1

    def content(self) -> bytes:
        if self._fd < 0:
            return self._versions[-1]
        expected = len(self._versions[-1])
        content = os.pread(self._fd, expected + 1, 0)  # saves asking for the size
        return content if len(content) <= expected else os.pread(self._fd, self.size(), 0)

    def size(self) -> int:
        return len(self._versions[-1]) if self._fd < 0 else os.fstat(self._fd).st_size

    def overwrite(self, content: bytes) -> None:
        os.pwrite(self._fd, content, 0)

    def record(self) -> None:
        content = self.content()
        if content != self._versions[-1]:
            self._versions.append(content)

    def sync(self) -> None:
        self._versions = [self.content()]

    def drop_pending(self) -> None:
        del self._versions[1:]

    def lose_power(self, random: Random) -> None:
        """Choose what is left in `data`; `put_back` writes it to a new real file."""
        self.close()
        versions = self._versions
        if random.random() < 0.5:
            self.data = bytearray(versions[-1])
        else:
            self.data = bytearray(len(random.choice(versions)))
            for page in range(-(-len(self.data) // PAGE_BYTES)):
                chosen = choose_page([page_of(version, page) for version in versions], random)
                begin = page * PAGE_BYTES
                end = min(begin + PAGE_BYTES, len(self.data))
                self.data[begin:end] = chosen[: end - begin]

    def put_back(self, path: str) -> None:
        Path(path).write_bytes(self.data)
        self._open(path)
        self._versions = [bytes(self.data)]


class Owner(Protocol):
    """The part of a mounted disk that slots need."""

    random: Random
    is_mounted: bool
    slots: dict[SimulatedSlots, None]

    def call(self, kind: str, path: str) -> None: ...
    def enter_slots(self, folder: Folder, name: str, suffixes: Iterable[str]) -> None: ...
    def write_new(self, path: str, content: Any) -> None: ...
    def remove(self, path: str) -> None: ...
    @property
    def is_dead(self) -> bool: ...


class SimulatedSlots:
    """`_core.Slots` of a simulated process."""

    def __init__(
        self, disk: Owner, place: Place, stem: str, slots: _core.Slots, real_stem: str
    ) -> None:
        self._disk = disk
        self._folder, self._name = place
        self._stem = stem
        self._slots = slots
        self._real_stem = real_stem
        self._has_failed = False  # the last pack

    # --- packing ---------------------------------------------------------

    def pack(self, state: object, *, attempt: int) -> int:
        return self._pack("slots pack", self._slots.pack, state, attempt)

    def put(self, buffer: Any, *, attempt: int) -> int:
        return self._pack("slots put", self._slots.put, buffer, attempt)

    def _pack(self, kind: str, pack: Callable[..., int], state: Any, attempt: int) -> int:
        self._has_failed = False
        was_dead = self._disk.is_dead
        try:
            self._disk.call(kind, self._stem)
        except (OSError, ProcessDied):
            may_begin = self._disk.is_mounted and not was_dead
            if may_begin and self._disk.random.random() < 2 / 3:
                self._pack_partly(pack, state, attempt)
            raise
        try:
            return self._run(pack, state, attempt=attempt)
        finally:
            self._record_pack()

    def _pack_partly(self, pack: Callable[..., int], state: Any, attempt: int) -> None:
        """Begin a pack, and write a part of the state."""
        self._has_failed = True
        suffix = self._packed_suffix()
        before = self._content(suffix)
        try:
            pack(state, attempt=attempt)
        except (CerebroError, OSError):
            return
        finally:
            self._record_pack()
        packed = self._content(suffix)
        written = self._disk.random.randint(0, len(packed) - 1)
        rest = before[written:].ljust(len(packed) - written, b"\0")
        file = self._file(suffix)
        file.overwrite(packed[:written] + rest[: len(packed) - written])
        file.record()

    def commit(self, position: int, /) -> str:
        self._disk.call("slots commit", self._stem)
        if self._has_failed:
            raise StateError(f"nothing was packed into {self._stem}.slots")
        return self._change(self._slots.commit, position)

    def revert(self, *, attempt: int, position: int) -> None:
        self._disk.call("slots revert", self._stem)
        self._change(self._slots.revert, attempt=attempt, position=position)

    def fence(self, attempt: int, /) -> None:
        self._disk.call("slots fence", self._stem)
        self._change(self._slots.fence, attempt)

    # --- reading -----------------------------------------------------------

    def committed(self) -> tuple[int, int, int] | None:
        self._disk.call("slots committed", self._stem)
        return self._run(self._slots.committed)

    def view(self, position: int | None = None) -> _core.StateBuffer:
        self._disk.call("slots view", self._stem)
        return self._run(self._slots.view, position)

    def hash(self) -> str:
        self._disk.call("slots hash", self._stem)
        return self._run(self._slots.hash)

    def sealed(self) -> tuple[int, int, _core.StateBuffer] | None:
        self._disk.call("slots sealed", self._stem)
        return self._run(self._slots.sealed)

    def attempt(self) -> int:
        self._disk.call("slots attempt", self._stem)
        return self._run(self._slots.attempt)

    def save(self, path: str | os.PathLike[str]) -> None:
        content = bytes(self.view())
        self._disk.remove(os.fspath(path))
        try:
            self._disk.write_new(os.fspath(path), content)
        except OSError:
            self._disk.remove(os.fspath(path))
            raise

    def close(self) -> None:
        self._disk.slots.pop(self, None)
        self.close_real()

    def close_real(self) -> None:
        self._slots.close()

    # --- the real files ------------------------------------------------------

    def _run(self, method: Callable[..., T], *values: Any, **options: Any) -> T:
        return run_core(self._real_stem, self._stem, method, *values, **options)

    def _change(self, method: Callable[..., T], *values: Any, **options: Any) -> T:
        """Call a method that changes only the page."""
        try:
            return self._run(method, *values, **options)
        finally:
            page = self._file(".slots")
            if page is not None:
                page.record()

    def _record_pack(self) -> None:
        """Enter the file of the slot that is packed, which may be new; record it and the page."""
        suffix = self._packed_suffix()
        self._disk.enter_slots(self._folder, self._name, (suffix,))
        for each in (suffix, ".slots"):
            file = self._file(each)
            if file is not None:
                file.record()

    def _packed_suffix(self) -> str:
        page = self._content(".slots")
        return ".b" if len(page) > HEAD and page[HEAD] & 3 == 1 else ".a"

    def _file(self, suffix: str) -> Any:
        return self._folder.names.get(self._name + suffix)

    def _content(self, suffix: str) -> bytes:
        file = self._file(suffix)
        return b"" if file is None else file.content()


def run_core(
    real_stem: str, stem: str, method: Callable[..., T], *values: Any, **options: Any
) -> T:
    """Call C code that has a real path; its errors name the simulated one."""
    try:
        return method(*values, **options)
    except (OSError, CerebroError) as error:
        error.args = tuple(
            value.replace(real_stem, stem) if isinstance(value, str) else value
            for value in error.args
        )
        if isinstance(error, OSError):
            raise OSError(*error.args) from None
        raise
