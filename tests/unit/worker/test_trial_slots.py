"""What a worker says if its trials' slots cannot be opened."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from cerebro.machine.disk import Disk
from cerebro.machine.files import ExhaustedError, StorageError
from cerebro.worker.messages import Task
from cerebro.worker.trial_state import TrialSlots


class ClosedDisk(Disk):
    """A disk on which no slots can be opened."""

    def __init__(self, code: int) -> None:
        self._code = code

    def open_slots(self, stem: Any, *, create: bool) -> Any:
        raise OSError(self._code, "no slots")


@pytest.mark.parametrize(
    "code, kind", [(errno.EMFILE, ExhaustedError), (errno.ENOSPC, StorageError)]
)
def test_an_error_is_explained_once_by_its_own_reason(code: int, kind: type[StorageError]) -> None:
    task = Task(trial=0, config={}, epoch=0, step=0, part=0, attempt=0, position=0)
    with pytest.raises(StorageError, match="no slots") as raised:
        TrialSlots("/states", ClosedDisk(code)).settle(task)
    assert type(raised.value) is kind
    assert str(raised.value).count("(") == 1
