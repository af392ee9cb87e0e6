"""Whether a trial's slots hold what was sealed in them; nothing is written or fenced.

Slots (their layout is in ``csrc/core/slots.h``) change while a run goes on. Before bytes of
a slot are written the page's head says so, so bytes that do not fit a record are a damage
only if the page still says the same afterwards.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

from cerebro import _core
from cerebro.errors import CorruptDataError
from cerebro.plain_files import LinkError, open_plain, read_bytes

PAGE_BYTES = 4096
_HEAD = struct.Struct("<8sQ48xQ")  # magic, version, head
_RECORD = struct.Struct("<7Q")  # attempt, position, length, check, hash low and high, seal
_RECORDS = 128
_RECORD_BYTES = 64
_PLACES = 31
_ATTEMPTS = 10
"""How often a page is read that changes all the time; then it is not damaged, but in use."""


@dataclass(frozen=True)
class SlotDamage:
    """What is wrong with a trial's slots."""

    path: Path
    what: str


def check_slots(stem: Path) -> SlotDamage | None:
    """Compare a trial's slots with their seals.

    Parameters
    ----------
    stem
        What the names of the slots begin with.

    Returns
    -------
    SlotDamage or None
        None also where the slots are gone, or always about to change.
    """
    page_file = _with(stem, ".slots")
    page = _read_page(page_file)
    for _ in range(_ATTEMPTS):
        damage = _damage(stem, page_file, page)
        before, page = page, _read_page(page_file)
        if damage is None or page == before:
            return damage
    return None


def _damage(stem: Path, page_file: Path, page: bytes | str | None) -> SlotDamage | None:
    if not page:  # gone, or just made
        return None
    if isinstance(page, str):
        return SlotDamage(page_file, page)
    magic, version, head = _HEAD.unpack_from(page) if len(page) == PAGE_BYTES else (b"", 0, 3)
    if not any(page):
        return None
    newest = (head & 3) - 1
    if magic != b"CERSLOTS" or version not in (1, 2) or newest == 2:
        return SlotDamage(page_file, "it is no commit page of slots")
    if version == 1:
        head &= 3  # the other bits were a count
    packed = -1 if not head & 4 else 1 if newest == 0 else 0
    for slot in (0, 1):
        if slot == packed:
            continue
        place = (head >> (3 + 5 * slot) & 31) % _PLACES
        at = _RECORDS + _RECORD_BYTES * (2 * place + slot)
        *state, check, low, high, seal = _RECORD.unpack_from(page, at)
        whole = check == (_hash_of(*state, slot) or 1) and seal == _hash_of(check, low, high)
        if not whole and slot == newest:
            return SlotDamage(page_file, "its record of the newest state is damaged")
        if not whole:  # about to be written again
            continue
        file = _with(stem, (".a", ".b")[slot])
        what = _state_damage(file, state[2], f"{high:016x}{low:016x}")
        if what is not None:
            return SlotDamage(file, what)
    return None


def _state_damage(file: Path, nbytes: int, sealed: str) -> str | None:
    """What is wrong with the state in a slot; None if nothing is.

    It is read, not mapped: a slot may be made shorter meanwhile.
    """
    try:
        fd = open_plain(file, os.O_RDONLY)
    except LinkError:
        return "it is a symbolic link, and those are not followed here"
    except OSError as error:
        return f"it cannot be read ({error.strerror or error})"
    with open(fd, "rb") as opened:  # noqa: PTH123
        if os.fstat(fd).st_size < nbytes:
            return "it is cut"
        if _core.xxh3_128(opened.read(nbytes)) != sealed:
            return "it is damaged: its checksum differs from its seal"
    return None


def _read_page(file: Path) -> bytes | str | None:
    """A page's bytes; None if it is not there, text if it is nothing that can be read."""
    try:
        return read_bytes(file, PAGE_BYTES)
    except FileNotFoundError:
        return None
    except CorruptDataError as error:
        return str(error).removeprefix(f"{file} ").removeprefix("is ") or "it cannot be read"
    except OSError as error:
        return f"it cannot be read ({error.strerror or error})"


def _with(stem: Path, suffix: str) -> Path:
    return stem.with_name(stem.name + suffix)


def _hash_of(*words: int) -> int:
    """XXH3-64 of 64-bit words."""
    return int(_core.xxh3_64(struct.pack(f"<{len(words)}Q", *words)), 16)
