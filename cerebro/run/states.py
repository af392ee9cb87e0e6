"""State files of a run: their names, their contents, and when they may be deleted.

3-epoch-7.safetensors              the kept state of trial 3 after epoch 7: durable
3-epoch-7.HASH.safetensors.new     the same before it is durable; complete if its hash
                                   is the one in its name
3.a, 3.b, 3.slots                  the slots of trial 3
3.moving.a, 3.moving.slots         slots on their way to a new process
HASH.frozen                        frozen weights that the workers share while the run is open
.mirror-XXXXXXXX/                  second names of states that are being uploaded
.cerebro-ID/                       a cluster's token, while agents are asked for it

A kept state is deleted only after no row of the store names it, slots when their trial has
ended. ``csrc/core/slots.h`` describes the slots, which change while a run is open.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cerebro._core as _core
from cerebro.errors import CorruptDataError
from cerebro.machine.disk import Disk
from cerebro.machine.files import explain_storage_errors
from cerebro.run.records import TrialRecord, strip_study

CLAIM = "cerebro-run"
"""The file in a separate folder for slots that has the id of the run that owns it."""

_KEPT = re.compile(
    r"(\d+)-epoch-(\d+)(?:\.safetensors|(?:\.([0-9a-f]{32}))?(\.safetensors\.new))", re.ASCII
)

_SLOTS = re.compile(r"(\d+)(?:\.moving)?\.(?:a|b|slots)", re.ASCII)

_FROZEN = re.compile(r"[0-9a-f]{32}\.frozen(?:\.\d+-\d+)?", re.ASCII)


@dataclass(frozen=True)
class KeptState:
    file: str
    state_hash: str


@dataclass(frozen=True)
class CloneOf(KeptState):
    """The kept state of a different trial, from which a clone begins, and what built it."""

    trial: int = 0
    config: Mapping[str, Any] = field(default_factory=dict)
    epochs: int | None = None
    """The ``info.epochs`` with which the parent began; None: that of the run."""
    stream: int | None = None
    """The parent's stream if it is not its number."""

    @classmethod
    def of(cls, parent: TrialRecord, file: str, state_hash: str) -> CloneOf:
        epochs = parent.extensions[0][1] if parent.extensions else None
        config = strip_study(parent.config)
        return cls(file, state_hash, parent.number, config, epochs, parent.stream)


@dataclass(frozen=True)
class StateFile:
    """A file of a trial's states, as described by its name."""

    path: Path
    trial: int
    epoch: int | None
    """The epoch of a kept state; None for a file of the trial's slots."""
    state_hash: str | None = None
    """The hash in an unpublished state's name (empty if it has none); None for other files."""


def state_file(path: Path) -> StateFile | None:
    """Parse the name of a state file; return None if the path is not one."""
    if match := _KEPT.fullmatch(path.name):
        state_hash = (match[3] or "") if match[4] else None
        return StateFile(path, int(match[1]), int(match[2]), state_hash)
    if match := _SLOTS.fullmatch(path.name):
        return StateFile(path, int(match[1]), None)
    return None


def find_kept_files(folder: Path, disk: Disk) -> dict[int, list[StateFile]]:
    """Find the kept states in a folder, by trial, with published states last."""
    by_trial: dict[int, list[StateFile]] = defaultdict(list)
    for file in _state_files(folder, disk):
        if file.epoch is not None:
            by_trial[file.trial].append(file)
    for files in by_trial.values():
        files.sort(key=lambda file: (file.state_hash is None, file.path.name))
    return by_trial


def trials_with_slots(folder: Path, disk: Disk) -> set[int]:
    """Return the numbers of the trials that have slots, or parts of slots, in a folder."""
    return {file.trial for file in _state_files(folder, disk) if file.epoch is None}


def _state_files(folder: Path, disk: Disk) -> Iterator[StateFile]:
    return filter(None, (state_file(folder / name) for name in disk.list(folder)))


def epoch_state_file(trial: int, epoch: int) -> str:
    return f"{trial}-epoch-{epoch}.safetensors"


def unpublished_name(file: str, state_hash: str) -> str:
    """Return a kept state's name until it is durable; its hash shows whether it is complete."""
    return f"{file.removesuffix('.safetensors')}.{state_hash}.safetensors.new"


def slots_stem(folder: Path, trial: int) -> Path:
    return folder / str(trial)


def read_claimant(folder: Path, disk: Disk) -> str | None:
    """Return the id of the run that owns a separate folder of slots, or None."""
    try:
        return disk.read(folder / CLAIM, 100).decode("utf-8", "replace")
    except FileNotFoundError:
        return None


HELD = ".mirror-"
"""The prefix of folders that hold states until they are uploaded."""
TOKEN = ".cerebro-"
"""The prefix of folders by which agents of a cluster find out whether they write where it does."""


def remove_slots(folder: Path, trial: int, disk: Disk) -> None:
    _remove_parts(folder, trial, (".a", ".b", ".slots", ".moving.a", ".moving.slots"), disk)


def _remove_parts(folder: Path, trial: int, suffixes: Collection[str], disk: Disk) -> None:
    stem = f"{folder}{os.sep}{trial}"  # a str is faster: a search may have 100,000 trials
    for suffix in suffixes:
        disk.remove(stem + suffix)


def remove_unneeded(
    epoch_dir: Path,
    state_dir: Path,
    named: Collection[str],
    is_open: Mapping[int, bool],
    disk: Disk,
) -> list[str]:
    """Delete the state files that a closed run does not need; return their names.

    The run needs the kept states that rows name (`named`), and all files of open trials: one of
    these may belong to an epoch whose row could not be written.
    """
    removed = []
    for folder in dict.fromkeys((epoch_dir, state_dir)):
        for file in _state_files(folder, disk):
            is_slot, name = file.epoch is None, file.path.name
            is_elsewhere = folder != (state_dir if is_slot else epoch_dir)
            if not (is_elsewhere or name in named or is_open.get(file.trial, is_slot)):
                disk.remove(file.path)
                removed.append(name)
    return sorted(removed)


def remove_frozen(state_dir: Path, disk: Disk) -> None:
    """Delete frozen weights, and what killed workers have left of them. No worker may be at work.

    A worker that needs them writes them again.
    """
    for name in disk.list(state_dir):
        if _FROZEN.fullmatch(name):
            disk.remove(state_dir / name)


def remove_temporary(epoch_dir: Path, disk: Disk) -> None:
    """Delete what a killed upload or start of a cluster has left. No process may be at either."""
    for name in disk.list(epoch_dir):
        if name.startswith((HELD, TOKEN)):
            disk.remove_folder(epoch_dir / name)


@explain_storage_errors()
def read_state(kept: KeptState, disk: Disk) -> bytes:
    """Read a kept state, under either name.

    Raise CorruptDataError if it is missing or damaged, and StorageError if it cannot be read.
    """
    path = Path(kept.file)
    for name in (path, path.with_name(unpublished_name(path.name, kept.state_hash)), path):
        with contextlib.suppress(FileNotFoundError):
            packed = disk.read(name)
            if _core.hash_state(packed) == kept.state_hash:
                return packed
            raise CorruptDataError(
                f"{name} is damaged: its checksum differs. Delete it, and resume the run: the "
                "trial is then trained again from the state before it"
            )
    raise CorruptDataError(f"{path} is missing: resume the run, and the trial is trained again")


def write_unpublished(
    folder: Path, file: str, state_hash: str, packed: _core.StateBuffer, disk: Disk
) -> None:
    """Write a kept state under the name that it has until it is published."""
    path = folder / unpublished_name(file, state_hash)
    disk.remove(path)  # a worker may have been killed while writing it
    disk.write_new(path, packed)


def finish_move(folder: Path, trial: int, disk: Disk) -> None:
    """Delete the parts that an interrupted `move_slots` has left."""
    _remove_parts(folder, trial, (".moving.a", ".moving.slots"), disk)


def move_slots(
    folder: Path,
    trial: int,
    packed: _core.StateBuffer,
    position: int,
    *,
    attempt: int,
    disk: Disk,
) -> None:
    """Move a trial's state to new slots, which no other process has open.

    They reject units of lower attempts, which a worker may have been sent before they were there.

    If this process is killed, either the old files or the new ones are valid. Until the page is
    replaced, the new ``.a`` holds the same state or does not match the seal on the old page.
    """
    stem = slots_stem(folder, trial)
    moving = f"{stem}.moving"
    with contextlib.closing(disk.open_slots(moving, create=True)) as fresh:
        fresh.fence(attempt)
        fresh.put(packed, attempt=attempt)
        fresh.commit(position)
    for suffix in (".a", ".slots"):
        disk.rename(moving + suffix, f"{stem}{suffix}")
    _remove_parts(folder, trial, (".b",), disk)


_ATTEMPTS = 10
"""How often to read slots whose page keeps changing, before they count as in use."""


def slot_damage(folder: Path, trial: int, disk: Disk) -> tuple[Path, str] | None:
    """Return the damaged file of a trial's slots and what is wrong; None: nothing is known."""
    stem = slots_stem(folder, trial)
    for _ in range(_ATTEMPTS):
        damage = disk.check_slots(stem)
        if damage is None:
            return None
        suffix, what, in_use = damage
        if not in_use:
            return Path(f"{stem}{suffix}"), what
    return None
