"""Open the slots of a worker's trials, and read the states that are committed there."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import cerebro._core as _core
from cerebro.errors import StateError
from cerebro.machine.files import explain_storage_errors
from cerebro.run.states import epoch_state_file, unpublished_name
from cerebro.worker.messages import Task

MAX_OPEN = 64


class TrialSlots:
    """The slots of a worker's trials, in `folder`. The most recently used ones stay open."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._open: OrderedDict[int, _core.Slots] = OrderedDict()

    def open(self, trial: int) -> _core.Slots:
        slots = self._open.pop(trial, None)
        if slots is None:
            with explain_storage_errors():
                slots = _core.Slots(self._path_of(trial), True)
        self._open[trial] = slots
        if len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)[1].close()
        return slots

    def _path_of(self, trial: int) -> str:
        return f"{self._folder}/{trial}"

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

    def read(self, task: Task) -> Any:
        """Return the packed state before a unit; raise StateError if another one is committed."""
        slots = self.open(task.trial)
        committed = slots.committed()
        if committed is None or committed[0] != task.position:
            at = "nothing" if committed is None else f"unit {committed[0]}"
            raise StateError(
                f"trial {task.trial}: expected the state of unit {task.position} in "
                f"{self._path_of(task.trial)}, found {at}"
            )
        return slots.view()

    def save(self, task: Task, folder: str, state_hash: str) -> str | None:
        """Save the state of an epoch's end, if asked for; return its name once published."""
        if not task.keep_state:
            return None
        file = epoch_state_file(task.trial, task.epoch)
        with explain_storage_errors():
            self.open(task.trial).save(str(Path(folder, unpublished_name(file, state_hash))))
        return file

    def close(self, trial: int) -> None:
        """Close a trial's slots: a deleted file occupies the disk as long as it is mapped."""
        if trial in self._open:
            self._open.pop(trial).close()

    def close_all(self) -> None:
        for trial in [*self._open]:
            self.close(trial)
