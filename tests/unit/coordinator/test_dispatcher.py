"""Workers get the units that the scheduler chooses, and are replaced when they are lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cerebro
from cerebro.coordinator.coordinator import RunClock
from cerebro.coordinator.dispatcher import Dispatcher
from cerebro.data.order import POOL
from cerebro.errors import WorkerError
from cerebro.machine.local import LOCAL
from cerebro.run.settings import Batches
from cerebro.worker.messages import (
    CommittedState,
    ProcessNotes,
    RunContext,
    RunFolders,
    Task,
    UnitDone,
    UnitSums,
    WarmTask,
    WorkerLost,
)


class FakeExecutor:
    """Records what workers are sent; their numbers are 10 and up."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.queued: list[Any] = []
        self.new = 10
        self.fails = False

    def submit(self, worker: int, task: Any) -> None:
        self.sent.append((worker, task))

    def queue(self, worker: int, task: Any) -> None:
        self.queued.append((worker, task))

    def replace(self, worker: int) -> int:
        if self.fails:
            raise WorkerError("it cannot fork")
        self.new += 1
        return self.new


@pytest.fixture
def executor() -> FakeExecutor:
    return FakeExecutor()


@pytest.fixture
def dispatcher(executor: FakeExecutor, tmp_path: Path) -> Dispatcher:
    """A run of one trial of one epoch with three units, and of worker 10."""
    data = cerebro.shard({"x": np.zeros(12)}, tmp_path / "data", shards=3, progress=False)
    context = RunContext(build=print, train=data, folders=RunFolders("", "", ""))
    made: Any = Dispatcher(executor, context, lambda: 0.0)  # type: ignore[arg-type]
    made.add(10)
    made.schedule.add_trial(0, epochs=1)
    return made


def begin(dispatcher: Dispatcher) -> Task:
    """Begin the next unit; return its task."""
    unit = dispatcher.next_unit()
    assert unit is not None
    worker, trial, epoch, step, part, attempt = unit
    task = Task(trial, {}, epoch, step, part, attempt, step)
    dispatcher.submit(worker, task)
    return task


def done(worker: int, task: Task, *libraries: str) -> UnitDone:
    total, state = UnitSums(4, 1, {}), CommittedState(0)
    process = ProcessNotes(libraries)
    return UnitDone(worker, task, total, 0.0, 0.1, False, state, process=process)


def test_each_unit_is_sent_once_and_the_next_follows(
    dispatcher: Dispatcher, executor: FakeExecutor
) -> None:
    for step in range(3):
        task = begin(dispatcher)
        assert task.step == step and executor.sent[-1] == (10, task)
        assert dispatcher.next_unit() is None and not dispatcher.is_idle
        assert dispatcher.finish(done(10, task)) is None
    assert dispatcher.is_idle and dispatcher.next_unit() is None


def test_a_queued_unit_begins_when_the_one_before_it_is_done(
    dispatcher: Dispatcher, executor: FakeExecutor
) -> None:
    task = begin(dispatcher)
    assert list(dispatcher.take_begun()) == [(10, task)]
    assert list(dispatcher.take_begun()) == []
    following = dispatcher.next_behind(10)
    assert following is not None and following[1] == 1
    queued = Task(0, {}, *following, 0, 1)
    dispatcher.queue(10, queued)
    assert executor.queued == [(10, queued)]
    assert dispatcher.finish(done(10, task)) is queued
    assert not dispatcher.is_idle and list(dispatcher.take_begun()) == [(10, queued)]


def test_a_lost_worker_is_replaced_once_the_new_one_has_imported(
    dispatcher: Dispatcher, executor: FakeExecutor
) -> None:
    task = begin(dispatcher)
    dispatcher.finish(done(10, task, "torch"))
    task = begin(dispatcher)
    lost = WorkerLost(10, "it was killed")
    unfinished, verdict = dispatcher.remove(lost)
    assert unfinished is task and verdict.error is None
    assert len(dispatcher) == 0 and dispatcher.next_unit() is None
    assert dispatcher.replace(lost) is None
    assert executor.sent[-1] == (11, WarmTask(("torch",)))
    assert dispatcher.awaits_worker and dispatcher.next_unit() is None
    dispatcher.end_warming(11)
    assert not dispatcher.awaits_worker
    again = begin(dispatcher)
    assert executor.sent[-1][0] == 11 and (again.step, again.attempt) == (1, 1)


def test_a_starting_worker_gets_no_unit_that_others_can_run(
    dispatcher: Dispatcher, executor: FakeExecutor
) -> None:
    dispatcher.schedule.add_trial(1, epochs=1)
    dispatcher.expect(20)
    assert len(dispatcher) == 2
    assert begin(dispatcher) == executor.sent[-1][1] and executor.sent[-1][0] == 10
    assert dispatcher.next_unit() is None
    dispatcher.end_warming(20)
    begin(dispatcher)
    assert len(dispatcher) == 2 and executor.sent[-1][0] == 20


class Placed(FakeExecutor):
    """Workers 10 and 20, each the only holder of a pool of shards."""

    def holders(self) -> dict[int, list[int]]:
        return {0: [10], 1: [20]}

    def load(self, worker: int, pool: int) -> None:
        pytest.fail("a pool has moved")


@pytest.fixture
def placed(tmp_path: Path) -> tuple[Dispatcher, Placed]:
    columns = {"x": np.zeros(2 * POOL)}
    data = cerebro.shard(columns, tmp_path / "data", shards=2 * POOL, progress=False)
    batches = Batches(batch_size=1, shuffle="shards")
    context = RunContext(build=print, train=data, folders=RunFolders("", "", ""), batches=batches)
    executor = Placed()
    made = Dispatcher(executor, context, lambda: 0.0)
    made.add(10)
    made.expect(20)
    for trial in range(8):  # some begin with each pool
        made.schedule.add_trial(trial, epochs=1)
    return made, executor


def test_units_on_the_shards_of_a_starting_worker_wait_for_it(placed: Any) -> None:
    dispatcher, executor = placed
    tasks = [begin(dispatcher) for _ in range(2)]
    assert [worker for worker, _ in executor.sent] == [10]
    assert [worker for worker, _ in dispatcher.take_begun()] == [10]
    dispatcher.end_warming(20)
    assert executor.sent[1][0] == 20 and executor.sent[1][1] in tasks
    assert [worker for worker, _ in dispatcher.take_begun()] == [20]


def test_a_unit_that_was_not_sent_is_not_to_blame_for_its_worker(placed: Any) -> None:
    dispatcher, executor = placed
    begin(dispatcher), begin(dispatcher)
    unfinished, verdict = dispatcher.remove(WorkerLost(20, "it was killed", began=True))
    assert unfinished is not None and unfinished not in [task for _, task in executor.sent]
    assert verdict.text == "it was killed, without a unit" and verdict.error is None


def test_a_run_continues_without_a_worker_but_not_without_any(
    dispatcher: Dispatcher, executor: FakeExecutor
) -> None:
    dispatcher.add(20)
    executor.fails = True
    for worker in (10, 20):
        dispatcher.remove(WorkerLost(worker, "it was killed"))
        if worker == 10:
            text = dispatcher.replace(WorkerLost(worker, "it was killed"))
            assert text == "a worker process is missing from now on: it cannot fork"
    with pytest.raises(WorkerError, match="no worker process is left"):
        dispatcher.replace(WorkerLost(20, "it was killed"))


def test_the_clock_goes_on_from_the_process_before_and_its_limit_starts_anew() -> None:
    clock = RunClock(LOCAL.clock, 1000.0, 1e6)
    assert 1000.0 <= clock.now() < 1100.0
    assert not clock.check() and clock.seconds_left() == pytest.approx(1e6, abs=100)
    over = RunClock(LOCAL.clock, 1000.0, 1e-9)
    assert over.check() and over.is_over and not over.check()
    assert over.seconds_left() is None and RunClock(LOCAL.clock, 0.0, None).seconds_left() is None
