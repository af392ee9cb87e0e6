"""Agents as processes of this machine, which see neither each other's files nor the run's."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
from pathlib import Path

import ballast
import resumable
from clusters import bytes_of, content
from derivable import OPTIONS, norms

import cerebro
from cerebro.cluster.connected_executor import EngineExecutor
from cerebro.cluster.engine import Processes

EPOCHS, TRIALS = 2, 3


class Apart(EngineExecutor):
    """Agents with separate caches below a folder, or with several agents for each."""

    def __init__(self, folder, workers=3, sharing=1):
        super().__init__(workers, 1, None)
        self.caches = [folder / f"cache-{number // sharing}" for number in range(workers)]

    def _make_engine(self, context):
        variables = [{"CEREBRO_CACHE": str(cache), "NODE": cache.name} for cache in self.caches]
        self.processes = Processes(variables)
        return self.processes


class AtUnit:
    """Does something when so many units are done."""

    def __init__(self, unit, do):
        self.left, self.do = unit, do

    def on_unit_end(self, trial, metrics):
        self.left -= 1
        if self.left == 0:
            self.do()


def run_to_the_end(agent):
    """Run an agent and close it; for a thread of this process."""
    try:
        agent.run()
    finally:
        agent.close()


def search(folder, data, executor=None, **options):
    options = {"build": ballast.build, "epochs": EPOCHS, "n_trials": TRIALS} | options
    return resumable.search(folder, data, executor=executor, **options)


def same_derived(path, executor, folder):
    """Derive a dataset here and on a cluster, which makes all of it: the files are the same."""
    source = cerebro.Dataset(path)
    here = source.derive(folder / "here", norms, **OPTIONS)
    made = source.derive(folder / "made", norms, executor=executor, **OPTIONS)
    assert content(made.path) == content(here.path)
    assert executor.traffic.made_bytes == bytes_of(made)


def same(found, expected):
    assert found.status == "finished"
    assert resumable.hashes(found) == resumable.hashes(expected)
    assert [trial.metrics for trial in found.trials] == [t.metrics for t in expected.trials]
    assert found.best.number == expected.best.number


def events(result, kind):
    with sqlite3.connect(result.path / "run.sqlite") as connection:
        rows = connection.execute("SELECT text FROM events WHERE kind = ?", (kind,))
        return [text for (text,) in rows]


# Parts of command lines of agents and of workers; any path may contain the name "cerebro".
OURS = (b"\0-m\0cerebro\0agent\0", b"cerebro: a worker process cannot start")


def left_over(folder):
    """Agents and workers whose caches are below a folder."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes()
            if any(mark in command for mark in OURS):
                environment = (entry / "environ").read_bytes()
                if f"CEREBRO_CACHE={folder}".encode() in environment:
                    found.append(command)
    return found


def strike_busiest(executor, number=signal.SIGKILL):
    """Kill the agent, and so the worker, that has the most states, or send it a signal.

    Returns the worker's number.
    """
    held = [state for states in executor._states._states.values() for state in states]
    workers = executor._members.workers
    busiest = max(workers, key=lambda n: sum(s.worker == n for s in held))
    os.kill(workers[busiest].agent.pid, number)
    return busiest


def end_spark(session):
    """Stop a session with its JVM, which PySpark keeps until this process ends.

    Later tests look for children left over.
    """
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    session.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(60)
    SparkContext._gateway = SparkContext._jvm = None
