"""What the files in a run's ``states`` folder are called, and what lies there.

3-epoch-7.safetensors              the kept state of trial 3 after epoch 7: durable
3-epoch-7.HASH.safetensors.new     the same, whole but not durable yet, if its hash
                                   is the one in its name
3.a, 3.b, 3.slots                  the slots of trial 3
3.moving.a, 3.moving.slots         slots on their way to a new process
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from cerebro import _core
from cerebro.errors import CorruptDataError
from cerebro.plain_files import read_bytes
from cerebro.unit import KeptState

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
