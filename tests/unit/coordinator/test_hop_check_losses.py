"""The hop check when workers are lost for good, as with a machine of a cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cerebro.coordinator.before_training import check_hop, require_build
from cerebro.errors import InputError, WorkerError
from cerebro.run.records import TrialRecord
from cerebro.worker.messages import CheckDone, CheckTask, ModelFacts, WorkerJoined, WorkerLost

pytestmark = pytest.mark.filterwarnings("ignore:a worker process is missing")


class Shrinking:
    """Workers of which some are lost with their first task, and not replaced."""

    def __init__(self, lost: set[int], order: list[int]) -> None:
        self.lost, self.order = lost, order
        self.given: list[tuple[int, bool]] = []
        self.busy: dict[int, CheckTask] = {}

    def submit(self, worker: int, task: CheckTask) -> None:
        self.given.append((worker, task.build_only))
        self.busy[worker] = task

    def wait(self, timeout: float | None) -> list[Any]:
        worker = min(self.busy, key=self.order.index)
        del self.busy[worker]
        if worker in self.lost:
            return [WorkerLost(worker, "its node is gone", with_machine=True)]
        return [CheckDone(worker, ())]

    def replace(self, worker: int) -> int:
        raise WorkerError(f"node {worker} is gone")


def checked(lost: set[int], order: list[int]) -> tuple[list[int], list[tuple[int, bool]]]:
    executor: Any = Shrinking(lost, order)
    context: Any = SimpleNamespace(check_files=lambda: None)
    found = check_hop(executor, [0, 1, 2], context, {})
    return sorted([*found.workers, *found.starting]), executor.given[3:]


def test_another_worker_takes_over_the_check_of_a_lost_one() -> None:
    assert checked({0}, [1, 2, 0]) == ([1, 2], [(1, False)])  # one that is ready
    assert checked({0}, [0, 1, 2]) == ([1, 2], [(1, False)])  # the first that will be
    assert checked({0, 1}, [0, 1, 2]) == ([2], [(2, False)])
    assert checked({2}, [2, 0, 1]) == ([0, 1], [])


@pytest.mark.parametrize(
    ("order", "starting"), [([0, 1, 2], [1, 2]), ([1, 0, 2], [2]), ([2, 1, 0], [])]
)
def test_training_need_not_wait_for_workers_that_are_starting(order, starting) -> None:
    executor: Any = Shrinking(set(), order)
    found = check_hop(executor, [0, 1, 2], SimpleNamespace(), {})  # type: ignore[arg-type]
    assert found.starting == starting == sorted(executor.busy)
    assert found.workers == [worker for worker in range(3) if worker not in starting]


def test_a_worker_that_joins_during_the_check_is_used() -> None:
    class Growing(Shrinking):
        def wait(self, timeout: float | None) -> list[Any]:
            joined = [WorkerJoined(3)] if len(self.given) == 3 else []
            return [*joined, *super().wait(timeout)]

    context: Any = SimpleNamespace(check_files=lambda: None)
    executor: Any = Growing(set(), [0, 1, 2, 3])
    found = check_hop(executor, [0, 1, 2], context, {})
    assert (found.workers, found.starting) == ([0], [1, 2, 3])
    assert executor.given[3:] == [(3, True)]


def test_lost_workers_warn_and_losing_the_last_one_raises() -> None:
    with pytest.warns(UserWarning, match="missing from now on: node 0 is gone"):
        checked({0}, [0, 1, 2])
    with (
        pytest.warns(UserWarning, match="node 1 is gone"),
        pytest.raises(WorkerError, match="node 2 is gone"),
    ):
        checked({0, 1, 2}, [0, 1, 2])


@pytest.mark.parametrize(("state_bytes", "codes"), [(0, []), (8, ["unchecked-hop"])])
def test_a_check_that_fails_after_the_model_has_trained_is_reported(state_bytes, codes) -> None:
    """A configuration that cannot be trained is reported by its trial."""

    class Failing(Shrinking):
        def wait(self, timeout: float | None) -> list[Any]:
            (done,) = super().wait(timeout)
            error = None if done.worker else "KeyError: 'z'"
            return [
                CheckDone(done.worker, (), error=error, model=ModelFacts(state_bytes=state_bytes))
            ]

    context: Any = SimpleNamespace(check_files=lambda: None)
    executor: Any = Failing(set(), [0, 1, 2])
    found = check_hop(executor, [0, 1, 2], context, {})
    assert found.workers == [0, 1, 2] and found.problems == ()
    assert [finding.code for finding in found.findings_to_show()] == codes
    assert all("failed: KeyError: 'z'" in finding.message for finding in found.findings)


def built(broken: set[int], lost: set[int] = frozenset(), *, spare: bool = True) -> Any:
    """Let worker 0 build the models of three trials, of which some are broken."""

    class Building(Shrinking):
        def wait(self, timeout: float | None) -> list[Any]:
            trial = next(iter(self.busy.values())).number
            (event,) = super().wait(timeout)
            if isinstance(event, WorkerLost):
                return [event]
            done = CheckDone(event.worker, (), error="no" if trial in broken else None)
            return [WorkerJoined(5), done] if trial == 1 else [done]

        def replace(self, worker: int) -> int:
            return 7 if spare else super().replace(worker)

    context: Any = SimpleNamespace(check_files=lambda: None)
    executor: Any = Building(lost, [0, 1, 2])
    trials = [TrialRecord(number, {}) for number in range(3)]
    return require_build(executor, [0, 1], context, trials), len(executor.given)


def test_one_trial_that_can_be_built_is_enough() -> None:
    assert built(set()) == ([0, 1], 1)
    assert built({0, 1}) == ([0, 1, 5], 3)
    with pytest.raises(InputError, match=r"build fails for finished trials .* \(no\)"):
        built({0, 1, 2})
    assert built({0, 1, 2}, lost={0}) == ([1, 7], 1)  # the trial will report it
    assert built(set(), lost={0}, spare=False) == ([1], 1)
