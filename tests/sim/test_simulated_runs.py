"""Searches on a simulated machine: with any faults, they end as they do without.

``python -m tests.sim`` simulates many more; docs/design/faults.md has the figures.
"""

from __future__ import annotations

import errno
import json
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import defects
import pytest
import run
import vfs
from faults import Fault, Kind
from problems import COUNT, Problem
from shrinking import shrink
from trainer import right_hash, train_units

from cerebro.executors.local import LocalExecutor
from cerebro.worker.messages import Task

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(not vfs.register(), reason="this Python's SQLite takes no VFS")

CLONES = Problem(
    number=6,
    searcher="pbt",
    trials=2,
    epochs=2,
    shards=1,
    workers=1,
    validates=False,
    folds=0,
    keep="best",
    width=2,
    shuffle="rows",
)
"""A search whose later trials begin with the kept states of earlier ones."""

LONGER = replace(CLONES, searcher="random", epochs=3, shards=2, workers=2, validates=True)
"""A search whose workers have units in their queues."""


@pytest.mark.parametrize("first", range(0, 160, 20))
def test_a_disturbed_search_ends_as_an_undisturbed_one(first: int) -> None:
    for seed in range(first, first + 20):
        problem = Problem.draw(seed)
        run.check(problem, seed, run.draw_faults(problem, seed))


def test_one_seed_decides_everything() -> None:
    for seed in range(1000, 1040):
        problem = Problem.draw(seed)
        faults = run.draw_faults(problem, seed)
        first, again = (run.check(problem, seed, faults) for _ in range(2))
        assert (first.calls, first.struck, first.processes) == (
            (again.calls, again.struck, again.processes)
        )


def test_times_decide_nothing() -> None:
    """Else a run with faults could differ from one without, and still be right."""
    for number in range(COUNT):
        problem = Problem.draw(number)
        expected, other = run.undisturbed(problem), run.SimulatedRun(problem, seed=1).run()
        assert (other.tables, other.files) == (expected.tables, expected.files)


@pytest.mark.parametrize("problem", [CLONES, LONGER, Problem.draw(3), Problem.draw(17)])
def test_the_states_are_right(problem: Problem) -> None:
    """What faults are compared with is itself what the trainer's arithmetic gives."""
    tables = run.undisturbed(problem).tables
    settings = problem.make()[0]
    hashes = {(trial, epoch): state for trial, epoch, state, _ in tables["epochs"]}
    context = run.context_of(problem)
    units = context.units_per_epoch
    models = {}
    for number, config, _, _, _, parent, parent_epoch, _, _ in tables["trials"]:
        start, first = None, 0
        if parent is not None:
            start, first = models[parent, parent_epoch], parent_epoch + 1
        for epoch in [e for t, e in hashes if t == number]:
            count = (epoch + 1 - first) * units
            how = {"validates": settings.validates, "start": start, "first_epoch": first}
            order = context.order(number)
            models[number, epoch] = train_units(json.loads(config), number, order, count, **how)
            right = right_hash(json.loads(config), number, order, count, **how)
            assert hashes[number, epoch] == right


# --- every call --------------------------------------------------------------


def strike_each_call(
    problem: Problem, process: str, kind: Kind, before: Sequence[Fault] = (), **more: int
) -> int:
    """Let the fault strike at each call of a process in turn; return how many there are."""
    calls = run.SimulatedRun(problem, 0, before).run().calls[process]
    for at in range(1, calls + 1):
        run.check(problem, 0, [*before, Fault(process, at, kind, **more)])
    return calls


@pytest.mark.parametrize("process", ["coordinator-0", "worker-0"])
@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("kill", {}),
        ("power", {}),
        ("error", {"errno": errno.EIO}),
        ("error", {"errno": errno.EMFILE}),
    ],
    ids=["killed", "power", "EIO", "EMFILE"],
)
@pytest.mark.parametrize("problem", [CLONES, LONGER], ids=["clones", "longer"])
def test_each_call_may_be_the_last(
    problem: Problem, process: str, kind: Kind, more: dict[str, int]
) -> None:
    """Found so: the journal of a half-made store stayed; a disk that could not tell whether a file
    exists was believed that it does not; a trial failed because its parent's state could not be
    read, or its slots.
    """
    assert strike_each_call(problem, process, kind, **more) > 30


@pytest.mark.parametrize("kind", ["kill", "power"])
def test_each_call_of_resuming_may_be_the_last(kind: Kind) -> None:
    middle = run.undisturbed(CLONES).calls["coordinator-0"] * 2 // 3
    killed = Fault("coordinator-0", middle, "kill")
    assert strike_each_call(CLONES, "coordinator-1", kind, [killed]) > 100


@pytest.mark.parametrize("problem", [CLONES, LONGER], ids=["clones", "longer"])
def test_any_write_may_fail_before_the_power_does(problem: Problem) -> None:
    """Found so: a state whose sync had failed was taken over by the resumed run, whose own sync of
    it then succeeded without the data.
    """
    later = Fault("coordinator-1", 210, "power")
    assert strike_each_call(problem, "coordinator-0", "error", [later], errno=errno.EIO) > 200


def test_a_unit_sent_by_a_dead_process_is_older_than_any_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of a trial without slots (found so, below), or whose row was lost."""
    sent: dict[Any, list[int]] = {}

    def submit(self: LocalExecutor, worker: int, task: Any) -> None:
        if isinstance(task, Task):
            sent.setdefault(self, []).append(task.dispatch)
        real_submit(self, worker, task)

    real_submit = LocalExecutor.submit
    monkeypatch.setattr(LocalExecutor, "submit", submit)
    half = run.undisturbed(LONGER).calls["coordinator-0"] // 2
    sent.clear()
    kills = [Fault(f"coordinator-{n}", half, "kill") for n in range(3)]
    assert run.check(LONGER, 0, kills).processes == 4
    generations = [{number >> 20 for number in numbers} for numbers in sent.values()]
    assert generations == [{0}, {1}, {2}, {3}]

    seed = 202_056_271
    late = [Fault("coordinator-0", 4, "cut"), Fault("coordinator-0", 98, "kill")]
    run.check(Problem.draw(seed), seed, late)


# --- mistakes are found ------------------------------------------------------


@pytest.mark.parametrize("defect", sorted(defects.DEFECTS.keys() - defects.OF_CLUSTERS.keys()))
def test_a_planted_mistake_is_found(defect: str) -> None:
    """Within 10,000 runs; docs/design/faults.md says in which one."""
    for seed in range(10_000):
        problem = Problem.draw(seed)
        faults = run.draw_faults(problem, seed)
        try:
            with defects.plant(defect):
                run.check(problem, seed, faults)
        except Exception:
            return
    raise AssertionError("it is not found")


def test_a_list_of_faults_is_shrunk_to_what_is_needed() -> None:
    def fails(faults: Sequence[Fault]) -> bool:
        return sum(f.kind == "kill" and f.at > 20 for f in faults) > 0 and any(
            f.kind == "power" for f in faults
        )

    choose = random.Random(1)
    kinds: tuple[Kind, ...] = ("kill", "power", "slow", "kill", "jump")
    faults = [Fault("coordinator-0", choose.randint(50, 500), kind, seconds=9) for kind in kinds]
    power, kill = shrink(faults, fails)  # of two kills, the first can be left out
    assert (kill.kind, kill.at) == ("kill", 21)
    assert (power.kind, power.at) == ("power", 1)
    assert str(kill) == "coordinator-0 is killed at its call 21"


def test_the_command_reports_a_planted_mistake() -> None:
    command = [sys.executable, "-m", "tests.sim", "--runs", "400", "--seed", "1", "--most", "1"]
    defect = ["--defect", "a commit without an answer is not undone"]
    done = subprocess.run(
        [*command, "--processes", "1", *defect],
        capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert re.search(r"seed 1\d+: Problem\(number=", done.stdout)
    assert "the shortest list of faults:\n    1. " in done.stdout
