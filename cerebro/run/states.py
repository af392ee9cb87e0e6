"""State files of a run: their names, the slots of live trials, and what is in them.

3-epoch-7.safetensors              the kept state of trial 3 after epoch 7: durable
3-epoch-7.HASH.safetensors.new     the same, whole but not durable yet, if its hash
                                   is the one in its name
3.a, 3.b, 3.slots                  the slots of trial 3
3.moving.a, 3.moving.slots         slots on their way to a new process

Slots (their layout is in ``csrc/core/slots.h``) change while a run goes on. Before bytes of
a slot are written the page's head says so, so bytes that do not fit a record are a damage
only if the page still says the same afterwards.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import cerebro._core as _core
from cerebro.errors import CorruptDataError
from cerebro.machine.files import LinkError, open_plain, read_bytes

CLAIM = "cerebro-run"
"""The file that says, in a folder for slots that is not in the run's, whose they are."""

_KEPT = re.compile(
    r"(\d+)-epoch-(\d+)(?:\.safetensors|(?:\.([0-9a-f]{32}))?\.safetensors\.new)", re.ASCII
)

_SLOTS = re.compile(r"(\d+)(?:\.moving)?\.(?:a|b|slots)", re.ASCII)


def epoch_state_file(trial: int, epoch: int) -> str:
    """Name of the file that keeps a trial's state after an epoch."""
    return f"{trial}-epoch-{epoch}.safetensors"


def unpublished(file: str, state_hash: str) -> str:
    """Name of a kept state until it is durable: whoever finds it can tell if it is whole."""
    return f"{file.removesuffix('.safetensors')}.{state_hash}.safetensors.new"


@dataclass(frozen=True)
class KeptFile:
    """A file that holds, or was to hold, a trial's state after an epoch."""

    trial: int
    epoch: int
    path: Path
    state_hash: str | None
    """As its name says, while it is not published; empty where it does not say it, None
    for a file that is published."""


def trial_of_kept(name: str) -> int | None:
    """The number of the trial that a file keeps a state of, None for any other file."""
    match = _KEPT.fullmatch(name)
    return None if match is None else int(match[1])


def trial_of_slots(name: str) -> int | None:
    """The number of the trial whose slots a file belongs to, None for any other file."""
    match = _SLOTS.fullmatch(name)
    return None if match is None else int(match[1])


def kept_files(folder: Path) -> dict[int, list[KeptFile]]:
    """Find the kept states in a folder, by trial; those that are published come last."""
    found: dict[int, list[KeptFile]] = defaultdict(list)
    for name in sorted(_names(folder), key=lambda name: (not name.endswith(".new"), name)):
        match = _KEPT.fullmatch(name)
        if match is not None:
            trial, epoch = int(match[1]), int(match[2])
            state_hash = (match[3] or "") if name.endswith(".new") else None
            found[trial].append(KeptFile(trial, epoch, folder / name, state_hash))
    return found


def trials_with_slots(folder: Path) -> set[int]:
    """Return the numbers of the trials of which there are slots, or parts of them."""
    numbers = (trial_of_slots(name) for name in _names(folder))
    return {number for number in numbers if number is not None}


def slots_stem(folder: Path, trial: int) -> Path:
    """What the names of a trial's slots begin with."""
    return folder / str(trial)


def remove_slots(folder: Path, trial: int) -> None:
    """Delete a trial's slots, if there are any."""
    stem = f"{folder}{os.sep}{trial}"  # of strings: a search may have 100,000 trials
    for suffix in (".a", ".b", ".slots", ".moving.a", ".moving.slots"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(stem + suffix)  # noqa: PTH108


def read_state(kept: KeptState) -> bytes:
    """Read a kept state, which may be about to get its final name.

    Raises
    ------
    CorruptDataError
        If it is missing, or not the state that it was.
    """
    path = Path(kept.file)
    for name in (path, path.with_name(unpublished(path.name, kept.state_hash)), path):
        with contextlib.suppress(FileNotFoundError):
            packed = read_bytes(name)
            if _core.hash_state(packed) == kept.state_hash:
                return packed
            raise CorruptDataError(
                f"{name} is damaged: its checksum differs. Delete it, and resume the run: the "
                "trial is then trained again from the state before it"
            )
    raise CorruptDataError(f"{path} is missing: resume the run, and the trial is trained again")


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208
    except FileNotFoundError:
        return []


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


@dataclass(frozen=True)
class KeptState:
    """A state in a file, and its hash."""

    file: str
    state_hash: str


@dataclass(frozen=True)
class CloneOf(KeptState):
    """The kept state, of another trial, that a trial begins with."""
