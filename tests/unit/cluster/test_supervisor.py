"""What the supervisor of a worker process does, with a stand-in for the process."""

from __future__ import annotations

import pytest

from cerebro.cluster.messages import StateIn
from cerebro.cluster.states import StateGone
from cerebro.cluster.supervisor import Supervisor
from cerebro.worker.messages import Task, UnitFailed


class Process:
    """Fails every task, and keeps those that it was given."""

    def __init__(self):
        self.tasks = []

    def submit(self, worker, task):
        self.tasks.append(task)

    def wait(self):
        return [UnitFailed(0, self.tasks[-1], "error", "it fails")]


class OneWorker(Supervisor):
    def __init__(self, folder):
        super().__init__()
        self._local = self.process = Process()
        self._folder = self._state_dir = folder
        self.has_state = False

    def _node(self):
        return "here"

    def _fetch(self, state):
        if not self.has_state:
            raise StateGone("it is gone")
        return b"state"


@pytest.fixture
def one(tmp_path):
    return OneWorker(tmp_path)


def test_a_trial_is_forgotten_when_the_process_is_told(one, tmp_path):
    """A task whose state does not come is not passed on: the process keeps its slots."""
    slots = tmp_path / "3.slots"
    slots.touch()

    def run(trial, dispatch, ended=()):
        task = Task(trial, {}, 0, 1, 1, 0, position=1, dispatch=dispatch, ended=ended)
        return one.run(task, StateIn(None, "hash"))[0]

    assert run(1, 1, (3, 4)).missing == "it is gone"
    assert slots.exists() and not one.process.tasks
    one.has_state = True
    assert run(4, 1).event.message == "it fails"
    assert not slots.exists()
    assert [task.ended for task in one.process.tasks] == [(3,)]  # 4 is here again
    run(1, 2)
    assert one.process.tasks[-1].ended == ()


def test_a_state_for_which_the_disk_has_no_room_is_told(one, tmp_path):
    one.has_state = True
    (tmp_path / "state.in").symlink_to("/dev/full")
    result, packed = one.run(Task(0, {}, 0, 1, 1, 0, position=1, dispatch=1), StateIn(None, "hash"))
    assert result.is_full and "No space left" in result.missing
    assert result.event is packed is None and not one.process.tasks
