"""The soak notices what it is there for: results spoilt or lost, and what is left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

if not sys.platform.startswith("linux"):
    pytest.skip("the soak needs Linux", allow_module_level=True)

import cerebro
from benchmarks.cluster_soak import models, soak
from benchmarks.cluster_soak.__main__ import summary
from benchmarks.cluster_soak.job import ROWS
from benchmarks.cluster_soak.plan import Leg, Plan
from benchmarks.faults import oracle, processes
from benchmarks.faults.problem import Problem
from benchmarks.faults.sabotage import CAUGHT_AS, spoil

PROBLEM = Problem(trials=3, shards=2, epochs=2)
COUNTED = {
    "lost": "results lost",
    "wrong": "wrong hashes or metrics",
    "stray": "stray files",
    "unfinished": "runs not finished",
}
"""The words of a problem, and the line of the summary that counts it."""
SPOILT = {
    what: COUNTED[word]
    for what, word in CAUGHT_AS.items()
    if word in COUNTED and what != "damaged store"
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that nothing disturbed, and what it has come to."""
    folder = tmp_path_factory.mktemp("soak")
    arguments = PROBLEM.arguments()
    arguments |= {"build": models.build, "space": {**arguments["space"], "rows": ROWS}}
    run = folder / "run"
    cerebro.search(data=PROBLEM.data(folder), run=run, keep="last", workers=0, **arguments)
    return run, oracle.read_outcome(run)


class Nodes:
    """A cluster without nodes; `living` are processes that it counts as actors."""

    address = "127.0.0.1:1"
    key = None

    def __init__(self):
        self.living = {}

    def begin(self):
        pass

    def end(self):
        pass

    def actors(self):
        return self.living


class Stage:
    """A soak whose cluster is not there, and a run of it."""

    def __init__(self):
        self.soak = soak.Soak()
        self.report = soak.Report(1)
        self.nodes = Nodes()
        plan = Plan(1, PROBLEM, False, 1, False, (Leg(None, ()),))
        self.run = soak.Run(self.soak, plan, self.report, self.nodes)

    def judge(self, finished, what=None):
        """Have a copy of a run judged, spoilt or not."""
        run, wanted = finished
        shutil.copytree(run, self.run._run)
        if what is not None:
            spoil(what, self.run._run, "")
        self.run._judge(wanted)

    def leg(self, code):
        """Carry out a leg that is this program."""
        self.soak.start = lambda plan, run, nodes, output, resume: subprocess.Popen(
            [sys.executable, "-c", code], stdout=output, stderr=output
        )
        return self.run._leg(Leg(None, ()), resume=False)

    @property
    def summary(self):
        return summary([self.report], 1.0)

    @property
    def counted(self):
        """The summary's figures, by name."""
        lines = [line for line in self.summary.splitlines() if not line.startswith(" ")]
        rows = [line.rsplit(None, 1) for line in lines]
        return {row[0].strip(): row[1] for row in rows if len(row) == 2}


@pytest.fixture
def stage(monkeypatch):
    monkeypatch.setattr(soak, "GONE_SECONDS", 0.0)
    before = dict(os.environ)
    made = Stage()
    try:
        yield made
    finally:
        made.soak.close()
        os.environ.clear()
        os.environ.update(before)


def test_a_run_that_matches_the_undisturbed_one_passes(stage, finished):
    stage.judge(finished)
    assert stage.report.problems == []
    assert stage.report.epochs == 6
    assert {stage.counted[line] for line in COUNTED.values()} == {"0"}
    assert stage.summary.endswith("1 runs: nothing lost")


@pytest.mark.parametrize("what", SPOILT)
def test_results_that_are_spoilt_are_counted(stage, finished, what):
    stage.judge(finished, what)
    assert int(stage.counted[SPOILT[what]]) >= 1, stage.report.problems
    assert stage.summary.endswith("1 of 1 runs FAILED")


def test_leftover_files_in_the_coordinators_cache_are_counted(stage, finished):
    (stage.soak._coordinator_cache / "scratch" / "worker-1").mkdir(parents=True)
    stage.judge(finished)
    assert stage.counted["stray files"] == "1"


def idle(*words, mark=""):
    """A process that waits, with words in its command line, once it is there."""
    process = subprocess.Popen(
        [sys.executable, "-c", "print('here', flush=True); input()", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, processes.MARK: mark},
    )
    assert process.stdout.readline() == b"here\n"
    return process


def test_actors_and_processes_that_are_left_are_counted(stage):
    stage.run._expect_nobody(False)
    assert stage.report.problems == []
    stage.nodes.living = {1: "ALIVE"}  # the cluster says so
    mark = stage.soak._mark
    with idle("ray::WorkerActor") as actor, idle("cerebro._worker", mark=mark) as worker:
        stage.run._actors = {actor.pid, os.getpid()}
        stage.run._expect_nobody(False)
        for process in (actor, worker):
            process.kill()
    assert stage.counted["actors left"] == "2"
    assert stage.counted["worker processes left"] == "1"


def test_a_coordinator_that_fails_is_counted(stage):
    assert not stage.leg("raise SystemExit('no reason')")
    assert stage.counted["errors not explained"] == "1"
    assert "no reason" in stage.report.problems[0]


def test_a_coordinator_that_hangs_is_counted(stage, monkeypatch):
    monkeypatch.setattr(soak, "LEG_SECONDS", 0.0)
    assert not stage.leg("import signal; signal.pause()")
    assert stage.counted["hangs"] == "1"


def test_a_run_without_an_end_is_counted(stage):
    stage.soak.wanted = lambda problem: None
    stage.run._leg = lambda leg, resume: False
    stage.run.go()
    assert stage.counted["runs not finished"] == "1"
