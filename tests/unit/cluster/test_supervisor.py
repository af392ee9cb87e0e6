"""What the supervisor of a worker process does, with a stand-in for the process."""

from __future__ import annotations

import os
import tempfile

import pytest

from cerebro.cluster.messages import StateIn
from cerebro.cluster.states import StateGone
from cerebro.cluster.supervisor import Supervisor, TrialFiles, _writes_like_its_owner
from cerebro.run.states import KeptState
from cerebro.worker.messages import CommittedState, Task, UnitDone, UnitFailed, UnitSums


class Process:
    """Fails every task, or does it, and keeps those that it was given."""

    def __init__(self):
        self.tasks = []
        self.passed = []
        self.succeeds = False

    def submit(self, worker, task):
        self.tasks.append(task)

    def queue(self, worker, task):
        self.passed.append(task)

    def wait(self, wake):
        if self.succeeds:
            done = [self.tasks[-1], *self.passed]
            nothing, state = UnitSums(1, 1, {}), CommittedState(0)
            return [UnitDone(0, task, nothing, 0.0, 0.0, False, state) for task in done]
        return [UnitFailed(0, self.tasks[-1], "error", "it fails")]


class Fetcher:
    """Other agents, which have the state that is asked for, or not."""

    has_state = False

    def fetch(self, ref, is_gone):
        if not self.has_state:
            raise StateGone("it is gone")
        return b"state"


class Socket:
    """The agent's, to which no message comes."""

    def borrow(self, seconds=0.0): ...

    def wake(self): ...


class Files(TrialFiles):
    def map_state(self, task):
        self._made[task.trial] = task.position + 1
        return b"packed"


class OneWorker(Supervisor):
    def __init__(self, folder):
        self.others = Fetcher()
        super().__init__("here", self.others, Socket())
        self.local = self.process._local = Process()
        (folder / "slots").mkdir()
        self._files = Files(folder / "slots", None)


@pytest.fixture
def one(tmp_path):
    return OneWorker(tmp_path)


def test_slots_of_ended_trials_are_deleted_once_the_process_knows(one, tmp_path):
    """A task whose state does not come is not passed on: the process keeps its slots."""
    slots = tmp_path / "slots" / "3.slots"
    slots.touch()

    def run(trial, dispatch, ended=()):
        task = Task(trial, {}, 0, 1, 1, 0, position=1, dispatch=dispatch, ended=ended)
        return one.run(task, StateIn(None, "hash"))[0]

    assert run(1, 1, (3, 4)).missing == "it is gone"
    assert slots.exists() and not one.local.tasks
    one.others.has_state = True
    assert run(4, 1).event.message == "it fails"
    assert not slots.exists()
    assert [task.ended for task in one.local.tasks] == [(3,)]  # 4 is here again
    run(1, 2)
    assert one.local.tasks[-1].ended == ()


def test_a_full_disk_is_reported_for_an_incoming_state(one, tmp_path):
    one.others.has_state = True
    (tmp_path / "state.in").symlink_to("/dev/full")
    result, packed = one.run(Task(0, {}, 0, 1, 1, 0, position=1, dispatch=1), StateIn(None, "hash"))
    assert result.is_full and "No space left" in result.missing
    assert result.event is packed is None and not one.local.tasks


def test_a_unit_begins_with_the_kept_state_that_is_sent_even_if_its_slots_have_it(one, tmp_path):
    """The file that the task names is on the coordinator's machine."""
    one.local.succeeds = one.others.has_state = True
    one.run(Task(0, {}, 0, 0, 0, 0, position=0, dispatch=0), None)
    kept = KeptState("/run/states/0-epoch-0.safetensors", "hash")
    one.run(Task(0, {}, 0, 1, 1, 0, position=1, dispatch=1, origin=kept), StateIn(None, "hash"))
    assert one.local.tasks[-1].origin == KeptState(str(tmp_path / "state.in"), "hash")
    assert (tmp_path / "state.in").read_bytes() == b"state"


# --- units that are queued at the agent ----------------------------------------------


def unit(dispatch, after=None, trial=0):
    return Task(trial, {}, 0, dispatch, 1, 0, position=dispatch, dispatch=dispatch, after=after)


def test_a_queued_unit_runs_behind_one_that_is_done(one):
    one.local.succeeds = True
    for task in (unit(0), unit(1, after=0), unit(2, after=1)):
        result, packed = one.run(task, None)
        assert isinstance(result.event, UnitDone) and packed == b"packed"
    # The process may be a new one: the supervisor alone knows what was before.
    assert [task.after for task in one.local.tasks] == [None] * 3


def test_a_queued_unit_is_dropped_behind_one_that_fails(one):
    one.run(unit(0), None)
    result, packed = one.run(unit(1, after=0), None)
    assert result.event is packed is None
    assert len(one.local.tasks) == 1
    one.local.succeeds = True
    assert one.run(unit(2), None)[0].event.task.dispatch == 2


@pytest.mark.parametrize("between", [unit(7, trial=1), unit(1)])
def test_a_queued_unit_is_dropped_behind_another_unit(one, between):
    one.local.succeeds = True
    one.run(unit(0), None)
    one.run(between, None)
    assert one.run(unit(2, after=0), None)[0].event is None


def test_no_queued_unit_begins_when_the_agent_leaves(one):
    """It would overwrite the state that is handed over."""
    one.local.succeeds = True
    one.run(unit(0), None)
    one.process.is_leaving = True
    assert one.run(unit(1, after=0), None)[0].event is None


def test_a_queued_unit_is_passed_on_while_the_previous_one_runs(one):
    one.local.succeeds = True
    one.process.offer(unit(1, after=0))
    assert one.run(unit(0), None)[0].event.task.dispatch == 0
    assert one.process.has_queue and one.local.passed == [unit(1, after=0)]
    one.process.offer(unit(2, after=1))
    one.local.passed.clear()
    assert one.run(unit(1, after=0), None)[0].event.task.dispatch == 1
    assert [task.dispatch for task in one.local.tasks] == [0]  # it was not given the unit again
    assert not one.process.has_queue
    assert one.run(unit(2, after=1), None)[0].event.task.dispatch == 2


@pytest.mark.parametrize("offered", [unit(2, after=1), unit(1, after=0, trial=1), unit(1)])
def test_only_the_next_unit_of_the_trial_is_passed_on(one, offered):
    one.process.offer(offered)
    one.run(unit(0), None)
    assert one.local.passed == [] and not one.process.has_queue


def test_nothing_is_passed_on_when_the_agent_leaves(one):
    one.process.is_leaving = True
    one.process.offer(unit(1, after=0))
    one.run(unit(0), None)
    assert one.local.passed == []


def test_a_passed_on_unit_is_dropped_after_a_failed_one(one):
    one.process.offer(unit(1, after=0))
    one.run(unit(0), None)
    assert one.local.passed and not one.process.has_queue
    assert one.run(unit(1, after=0), None)[0].event is None
    assert len(one.local.tasks) == 1


def test_output_of_a_unit_that_has_begun_is_not_lost(one, tmp_path):
    """The process writes on into the file from which the output of the unit before is taken."""
    one._files = Files(tmp_path / "slots", tmp_path)
    one.local.succeeds = True
    with (tmp_path / "0.log").open("ab", buffering=0) as log:
        log.write(b"first, ")
        one.process.offer(unit(1, after=0))
        assert one.run(unit(0), None)[0].log == b"first, "
        log.write(b"second")
        one.local.passed.clear()
        assert one.run(unit(1, after=0), None)[0].log == b"second"
    assert not (tmp_path / "0.log").exists()
    (tmp_path / "0.log").write_bytes(b"third")
    assert one.run(unit(2, after=1), None)[0].log == b"third"


NOBODY = 65534
TEMPORARY = (tempfile.gettempdir(), os.environ.get("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir()))


@pytest.fixture
def as_nobody(tmp_path):
    """Be a user without rights, if this is root, who may write everywhere."""
    is_root = os.geteuid() == 0
    if is_root:
        for parent in (tmp_path, *tmp_path.parents):
            if parent.stat().st_uid == 0 and any(map(parent.is_relative_to, TEMPORARY)):
                parent.chmod(parent.stat().st_mode | 0o011)
        os.seteuid(NOBODY)
    yield is_root
    if is_root:
        os.seteuid(0)


@pytest.mark.parametrize(
    ("mode", "own", "writes"),
    [(0o755, True, True), (0o555, True, False), (0o755, False, False), (0o777, False, False)],
)
def test_a_node_shares_a_folder_if_it_writes_files_as_its_owner(
    tmp_path, as_nobody, mode, own, writes
):
    if not own and not as_nobody:
        pytest.skip("needs root, to be another user")
    if as_nobody:
        os.seteuid(0)
    folder = tmp_path / "run"
    folder.mkdir()
    folder.chmod(mode)
    if as_nobody:
        os.chown(folder, NOBODY if own else 0, -1)
        os.seteuid(NOBODY)
    assert _writes_like_its_owner(str(folder)) is writes
    assert list(folder.iterdir()) == []


def test_a_node_without_the_folder_does_not_share_it(tmp_path):
    assert not _writes_like_its_owner(str(tmp_path / "none"))
    (tmp_path / "file").touch()
    assert not _writes_like_its_owner(str(tmp_path / "file"))
