"""The states of trials: the slots that keep them, and the part of a state that is Cerebro's.

That part is the progress of the trial's epoch. It is stored in the state, so that the state alone
determines the next unit and the epoch's metrics so far, on any worker.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cerebro._core as _core
from cerebro.errors import CorruptDataError, StateError
from cerebro.machine.disk import Disk
from cerebro.machine.files import explain_storage_errors
from cerebro.run.states import epoch_state_file, read_state, unpublished_name
from cerebro.worker.messages import Sums, Task

MAX_OPEN = 64


class TrialSlots:
    """The slots of a worker's trials, in `folder`. The most recently used ones stay open."""

    def __init__(self, folder: str, disk: Disk) -> None:
        self._folder = folder
        self._disk = disk
        self._open: OrderedDict[int, _core.Slots] = OrderedDict()

    def open(self, trial: int) -> _core.Slots:
        slots = self._open.pop(trial, None)
        if slots is None:
            with explain_storage_errors():
                slots = self._disk.open_slots(self._path_of(trial), create=True)
        self._open[trial] = slots
        if len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)[1].close()
        return slots

    def _path_of(self, trial: int) -> str:
        return f"{self._folder}/{trial}"

    @explain_storage_errors()
    def settle(self, task: Task) -> None:
        """Fence off earlier workers of this unit, and undo a commit that was not reported.

        If a worker died between its commit and its answer, the coordinator does not know the
        committed state, so the unit runs again from the state before it.
        """
        slots = self.open(task.trial)
        slots.fence(task.dispatch)
        if task.position == 0 or task.clone_of is not None or task.origin is not None:
            return  # the unit does not start from a state in the slots
        committed = slots.committed()
        if committed is not None and committed[0] == task.position + 1:
            slots.revert(attempt=task.dispatch, position=task.position)

    @explain_storage_errors()
    def read(self, task: Task) -> Any:
        """Return the packed state before a unit; raise StateError if another one is committed."""
        if task.origin is not None:
            return read_state(task.origin, self._disk)
        slots = self.open(task.trial)
        committed = slots.committed()
        if committed is None or committed[0] != task.position:
            at = "nothing" if committed is None else f"unit {committed[0]}"
            raise StateError(
                f"trial {task.trial}: expected the state of unit {task.position} in "
                f"{self._path_of(task.trial)}, found {at}"
            )
        return slots.view()

    @explain_storage_errors()
    def save(self, task: Task, folder: str, state_hash: str) -> str | None:
        """Save the state of an epoch's end, if asked for; return its name once published."""
        if not task.keep_state:
            return None
        file = epoch_state_file(task.trial, task.epoch)
        self.open(task.trial).save(str(Path(folder, unpublished_name(file, state_hash))))
        return file

    def close(self, trial: int) -> None:
        """Close a trial's slots: a deleted file occupies the disk as long as it is mapped."""
        if trial in self._open:
            self._open.pop(trial).close()

    def close_all(self) -> None:
        for trial in [*self._open]:
            self.close(trial)


@dataclass
class EpochProgress:
    """The position in an epoch, and the epoch's metric sums in visit order."""

    epoch: int = 0
    step: int = 0
    training: Sums = field(default_factory=dict)
    validation: dict[str, float] | None = None

    def begin_unit(self, epoch: int, step: int) -> None:
        if step == 0:
            self.training, self.validation = {}, None
        self.epoch, self.step = epoch, step

    def add_training(self, sums: Sums) -> None:
        for name, (total, weight) in sums.items():
            before = self.training.get(name, (0.0, 0.0))
            self.training[name] = (before[0] + total, before[1] + weight)

    def epoch_metrics(self) -> dict[str, float]:
        """Return ``train_*``, ``val_*`` and short names; these mean validation if there is any."""
        training = {name: mean_of(pair) for name, pair in self.training.items()}
        validation = self.validation or {}
        return {
            **{f"train_{name}": value for name, value in training.items()},
            **{f"val_{name}": value for name, value in validation.items()},
            **training,
            **validation,
        }

    def to_state(self) -> dict[str, Any]:
        training = {name: list(pair) for name, pair in self.training.items()}
        return {**vars(self), "training": training}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> EpochProgress:
        training = {name: (pair[0], pair[1]) for name, pair in state["training"].items()}
        return cls(state["epoch"], state["step"], training, state["validation"])

    @classmethod
    def from_packed(cls, packed: Any) -> EpochProgress:
        """Read the progress from a packed state; raise CorruptDataError if it is not a trial's."""
        try:
            progress = cls.from_state(_core.unpack_state(packed, only="progress"))
            numbers = [number for pair in progress.training.values() for number in pair]
            numbers += (progress.validation or {}).values()
            counts = (progress.epoch, progress.step)
            if not all(type(count) is int and count >= 0 for count in counts) or not all(
                isinstance(number, (int, float)) for number in numbers
            ):
                raise TypeError("its progress is invalid")
        except (CorruptDataError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise CorruptDataError(f"this is not the state of a trial: {error}") from error
        return progress


def mean_of(pair: tuple[float, float]) -> float:
    """Return the mean of a metric from its sum and the sum of its weights; NaN without weight."""
    total, weight = pair
    return total / weight if weight else math.nan
