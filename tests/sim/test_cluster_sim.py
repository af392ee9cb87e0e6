"""Searches on a simulated cluster: with any faults, they end as they do on one machine.

``python -m tests.sim`` simulates many more: a quarter of its problems are on a cluster.
"""

from __future__ import annotations

import errno
import threading
from dataclasses import replace
from itertools import count, islice

import cluster_defects
import pytest

pytest.importorskip("zmq")

import run
import vfs
from faults import Fault, ProcessDied
from fibers import Fiber, SimulatedPool
from network import PORT, Network, SimulatedConnections
from problems import COUNT, Problem
from world import SimulatedTasks, World

pytestmark = pytest.mark.skipif(not vfs.register(), reason="this Python's SQLite takes no VFS")

ON_CLUSTERS = [number for number in range(COUNT) if Problem.draw(number).cluster]


@pytest.mark.parametrize("first", range(0, 30, 5))
def test_a_search_on_a_cluster_gives_what_it_gives_on_one_machine(first: int) -> None:
    for number in ON_CLUSTERS[first : first + 5]:
        problem = Problem.draw(number)
        there, here = run.undisturbed(problem), run.undisturbed(replace(problem, cluster=False))
        assert (there.tables, there.files) == (here.tables, here.files)


@pytest.mark.parametrize("first", range(0, 120, 20))
def test_a_disturbed_search_on_a_cluster_ends_as_an_undisturbed_one(first: int) -> None:
    for number in ON_CLUSTERS[first % 60 : first % 60 + 20]:
        seed = number + COUNT * (1 + first)
        problem = Problem.draw(seed)
        run.check(problem, seed, run.draw_faults(problem, seed))


def test_one_seed_decides_everything_on_a_cluster() -> None:
    for number in ON_CLUSTERS[:20]:
        seed = number + 7 * COUNT
        problem = Problem.draw(seed)
        faults = run.draw_faults(problem, seed)
        first, again = (run.check(problem, seed, faults) for _ in range(2))
        assert (first.calls, first.struck) == (again.calls, again.struck)


KEPT_HERE = (
    Problem(190, "hyperband", 4, 3, 3, 2, False, 0, "best", 4, "shards", cluster=True),
    87998,
    [Fault("agent-1", 95, "cut")],
)
"""A trial goes back to a kept state, on the agent that has made it."""

TOKEN_STAYS = (
    Problem(181, "asha", 3, 3, 1, 3, True, 0, "all", 1, "rows", cluster=True),
    29109,
    [Fault("coordinator-0", 164, "error", errno=errno.EACCES)],
)
"""The folder by which a new agent is recognized cannot be removed."""


@pytest.mark.parametrize("found", [KEPT_HERE, TOKEN_STAYS], ids=["kept here", "token"])
def test_what_was_found_stays_right(found: tuple[Problem, int, list[Fault]]) -> None:
    run.check(*found)


@pytest.mark.parametrize("defect", sorted(cluster_defects.DEFECTS))
def test_a_planted_mistake_of_clusters_is_found(defect: str) -> None:
    turns = (turn * COUNT + number for turn in count() for number in ON_CLUSTERS)
    for seed in islice(turns, 2500):  # within 10,000 runs
        problem = Problem.draw(seed)
        faults = run.draw_faults(problem, seed)
        try:
            with cluster_defects.DEFECTS[defect]():
                run.check(problem, seed, faults)
        except Exception:
            return
    raise AssertionError("it is not found")


# --- threads of a simulated process -------------------------------------------


def test_fibers_run_in_turn_as_threads_of_their_own() -> None:
    world = World(1)
    process = world.start_process("one")
    done: list[tuple[str, float]] = []
    idents = set()

    def work(name: str, seconds: float) -> None:
        idents.add(threading.get_ident())
        process.wait(seconds, lambda: False)
        done.append((name, round(world.now)))

    for name, seconds in (("late", 3.0), ("early", 1.0)):
        Fiber(process, lambda name=name, seconds=seconds: work(name, seconds))
    world.wait(10.0, lambda: not process.fibers)
    assert done == [("early", 1), ("late", 3)]
    assert len(idents) == 2 and threading.get_ident() not in idents


def test_a_fiber_that_is_stopped_under_a_lock_continues_before_others_take_it() -> None:
    world = World(1, [Fault("one", 1, "slow", seconds=5.0)])
    process, lock, done = world.start_process("one"), threading.Lock(), []

    def work(name: str) -> None:
        with lock:
            process.call("send")
            done.append((name, round(world.now)))

    for name in ("first", "second"):
        Fiber(process, lambda name=name: work(name))
    world.wait(10.0, lambda: not process.fibers)
    assert [seconds for _, seconds in done] == [5, 5]


def test_a_fiber_ends_with_its_process() -> None:
    world = World(1)
    process = world.start_process("one")
    ends = []

    def wait_forever() -> None:
        try:
            process.wait(None, lambda: False)
        except ProcessDied:
            ends.append(world.now)
            raise

    Fiber(process, wait_forever)
    world.at(2.0, lambda: process.die(-9))
    world.wait(5.0, lambda: False)
    assert ends == [2.0] and not process.fibers


def test_a_process_that_has_died_does_not_listen() -> None:
    """Its code may go on for a moment: SQLite hides that a call of the disk has ended it."""
    process, network = World(1).start_process("one"), Network(0.0)
    process.die(-9)
    with pytest.raises(ProcessDied):
        SimulatedConnections(process, network).listen("127.0.0.1", PORT)
    assert network.listener is None


def test_an_error_of_a_fiber_ends_the_simulation() -> None:
    world = World(1)
    process = world.start_process("one")
    Fiber(process, lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        world.wait(1.0, lambda: False)


def test_a_pool_makes_so_many_calls_at_a_time() -> None:
    world = World(1)
    process = world.start_process("one")
    tasks = SimulatedTasks(process)
    pool = SimulatedPool(process, 2)
    at_once, most = 0, 0

    def work(number: int) -> int:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        process.wait(1.0, lambda: False)
        at_once -= 1
        return 10 // number

    calls = [pool.submit(work, number) for number in (5, 2, 0)]
    tasks.wait_for(calls, 1.5)
    assert [call.done() for call in calls] == [True, True, False]
    pool.shutdown()
    assert [call.result() for call in calls[:2]] == [2, 5] and most == 2
    assert isinstance(calls[2].exception(), ZeroDivisionError)
    assert not process.fibers
