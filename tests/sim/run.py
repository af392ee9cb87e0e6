"""Run one search on a simulated machine, resuming it after each fault, and check what is left.

The coordinator, the store, restoring and the executor are the real ones. A process that dies leaves
its disk, its messages and its workers as they are; the next one resumes the run.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args
from unittest import mock

from cluster import SimulatedCluster
from disk import SimulatedDisk
from faults import Fault, Kind, ProcessDied, draw_fault
from problems import FOLDER, Problem, build
from processes import make_executor, start_machine
from world import Process, World

import cerebro._core as _core
from cerebro.api.resume import clean_up, is_over, searcher_of
from cerebro.coordinator.conduct import RunSession, make_run_context
from cerebro.coordinator.coordinator import Coordinator
from cerebro.coordinator.restore import Previous, ResumeRequest, reopen_run
from cerebro.coordinator.user import Hooks
from cerebro.errors import CorruptDataError, InputError, RunError, WorkerError
from cerebro.machine import environment
from cerebro.machine.local import Machine
from cerebro.machine.program import Program
from cerebro.results.saved_run import SavedRun
from cerebro.run.folder import make_run
from cerebro.run.owner import Process as OwnerProcess
from cerebro.run.records import EpochRecord
from cerebro.run.store import FILE, check_whole_store, reader
from cerebro.worker.messages import RunContext

MOST_PROCESSES = 12
"""After so many coordinators, of which the last ones had no fault, a search has to be finished."""

IN_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None  # noqa: PTH112

TABLES = {
    "trials": "SELECT number, config, status, error, epochs, parent, parent_epoch, origin, stream "
    "FROM trials ORDER BY number",
    "epochs": "SELECT trial, epoch, state_hash, state_file FROM epochs ORDER BY trial, epoch",
    "metrics": "SELECT trial, epoch, name, value FROM metrics ORDER BY trial, epoch, name",
    "decisions": "SELECT round, trial, epoch, decision, epochs FROM decisions ORDER BY id",
    "units": "SELECT DISTINCT trial, epoch, step, part FROM units ORDER BY trial, epoch, step",
}
"""What a search decides and computes, without times and places."""

find_version = cache(environment.package_version)  # which reads a file each time


class Wrong(Exception):
    """Raised if a run is not as it has to be."""


@dataclass
class Outcome:
    """What became of one simulated run."""

    tables: dict[str, list[tuple[Any, ...]]]
    files: dict[str, list[str]]
    calls: dict[str, int]
    """By process, the number of its calls of the machine."""
    struck: list[Fault] = field(default_factory=list)
    processes: int = 1


class SimulatedOwner:
    """The right to train a run, which ends with its process."""

    def __init__(self, process: Process) -> None:
        self.process = OwnerProcess(process.pid, "simulated")
        self._process = process

    def keep(self) -> None:
        self._process.call("own")

    def release(self) -> None:
        self._process.call("release")


class SimulatedRun:
    """One search on one machine, from its first process to its last."""

    def __init__(self, problem: Problem, seed: int, faults: Sequence[Fault] = ()) -> None:
        self.problem = problem
        self.world = World(seed, faults)
        self.real = Path(tempfile.mkdtemp(prefix="cerebro-sim-", dir=IN_MEMORY))
        self.disk = SimulatedDisk(random.Random(f"{seed} disk"), self.real)
        self.world.on_power_loss.append(self.disk.lose_power)
        self.random = random.Random(f"{seed} between processes")
        self.committed_epochs: dict[tuple[int, int], str] = {}
        self.committed_units = 0
        self.cluster: SimulatedCluster | None = None
        if problem.cluster:
            self.cluster = SimulatedCluster(self.world, problem, self.disk, self.real)

    def run(self) -> Outcome:
        with mock.patch.object(environment, "package_version", find_version):
            return self._run()

    def _run(self) -> Outcome:
        try:
            for number in range(MOST_PROCESSES):
                if self._run_process(number):
                    break
                self.world.wait(self.random.choice((0.0, 0.01, 1.0, 20.0)), lambda: False)
            else:
                raise Wrong(f"the search is not finished after {MOST_PROCESSES} processes")
            return self._look(number + 1)
        finally:
            self.world.end()
            if self.cluster is not None:
                self.cluster.close()
            self.disk.close()
            shutil.rmtree(self.real, ignore_errors=True)

    # --- one coordinator -----------------------------------------------------

    def _run_process(self, number: int) -> bool:
        """Train until the process ends; return whether the search is finished."""
        machine = start_machine(self.world, f"coordinator-{number}", self.disk.mount)
        process = machine.clock.process
        try:
            try:
                # The next process removes what a failing disk has kept from being removed.
                return self._train(process, machine) and not self._had_error(process)
            finally:  # as Python does before it exits
                process.wait(None, lambda: not process.fibers)
        except (ProcessDied, Exception) as error:
            if not (process.is_dead or self._is_explained(error, process)):
                raise
            return False
        finally:
            process.die(1)

    def _had_error(self, process: Process) -> bool:
        return any(f.kind == "error" for f in self.world.struck if f.process == process.name)

    def _is_explained(self, error: BaseException, process: Process) -> bool:
        """Whether a fault may end a process with this error; resuming must then be possible."""
        if isinstance(error, CorruptDataError):  # SQLite does not say why it cannot read
            return self._had_error(process) and "cannot be read" in str(error)
        if isinstance(error, InputError) and self.cluster is not None:
            return self.cluster.may_refuse(str(error)) and bool(self.world.struck)
        return isinstance(error, (OSError, RunError, WorkerError)) and bool(self.world.struck)

    def _train(self, process: Process, machine: Machine) -> bool:
        settings, searcher = self.problem.make()
        owner: Any = SimulatedOwner(process)
        first = previous = None
        if machine.disk.exists(FOLDER / FILE):
            saved = open_saved(machine)
            check_whole_store(FOLDER, machine.disk)
            self._check_committed(saved)
            request = ResumeRequest(trials_per_config=saved.trials_per_config)
            if is_over(saved, request):
                clean_up(saved, machine)
                return True
            searcher = searcher_of(saved, settings, request, self.problem.make_searcher())
            previous = Previous(saved, owner, request, ())
        else:
            first = searcher.suggest()
        context = context_of(self.problem)
        with RunSession(settings, context, machine) as session:
            session.executor = self._make_executor(machine)
            workers = list(session.executor.start(context))
            restored = None
            if previous is None:
                session.opened = make_run(settings, machine, lambda _: owner)
            else:
                session.opened, restored = reopen_run(previous, settings, context, machine)
            store = session.opened.store
            store.listeners = (lambda: self._note_committed(store),)
            session.hooks = Hooks((), lambda record: record)
            executor, hooks, progress = session.executor, session.hooks, session.progress
            session.coordinator = Coordinator(
                settings, context, searcher, executor, store, hooks, progress, first, restored
            )
            session.coordinator.run(workers)
            status = session.coordinator.status
        return status == "finished"

    def _make_executor(self, machine: Machine) -> Any:
        if self.cluster is not None:
            return self.cluster.make_executor(machine)
        return make_executor(machine, self.problem.workers, self.disk.mount)

    # --- what is committed -----------------------------------------------------

    def _note_committed(self, store: Any) -> None:
        """Note the rows that the writing task has just made durable."""
        connection = store._file.connection
        rows = connection.execute("SELECT trial, epoch, state_hash FROM epochs")
        self.committed_epochs = {(trial, epoch): state for trial, epoch, state in rows}
        (self.committed_units,) = connection.execute("SELECT count(*) FROM units").fetchone()

    def _check_committed(self, saved: SavedRun) -> None:
        """Raise Wrong if a committed epoch is lost, or a state that a row names."""
        found = {}
        for record in saved.records:
            for epoch in record.epochs:
                found[record.number, epoch.epoch] = epoch.state_hash
                if epoch.state_file is not None:
                    self._check_state(epoch)
        for key, state in self.committed_epochs.items():
            if key not in found:
                raise Wrong(f"epoch {key[1]} of trial {key[0]} was committed, and is lost")
            if found[key] != state:
                raise Wrong(f"epoch {key[1]} of trial {key[0]} has changed after its commit")

    def _check_state(self, epoch: EpochRecord) -> None:
        path = FOLDER / "states" / str(epoch.state_file)
        if path.name not in self.disk.names(path.parent):
            raise Wrong(f"a row names {path.name}, which is not there")
        if _core.hash_state(self.disk.content(path)) != epoch.state_hash:
            raise Wrong(f"{path.name} has not the hash of its row")

    # --- the end ---------------------------------------------------------------

    def _look(self, processes: int) -> Outcome:
        """Return what the finished run consists of."""
        if self.cluster is not None:
            self.cluster.finish()
        self.world.wait(150.0, lambda: False)  # until all others have ended
        alive = [process.name for process in self.world.processes if not process.is_dead]
        if alive:
            raise Wrong(f"still there at the end: {', '.join(alive)}")
        if any(fault.kind == "leave" for fault in self.world.struck):
            # Such an agent, if it is cut off then, works on for a while, and may keep a state.
            machine = start_machine(self.world, "cleaner", self.disk.mount)
            clean_up(open_saved(machine), machine)
        disk = start_machine(self.world, "reader", self.disk.mount).disk
        with reader(FOLDER, disk) as connection:
            tables = {
                name: [tuple(row) for row in connection.execute(sql)]
                for name, sql in TABLES.items()
            }
            (units,) = connection.execute("SELECT count(*) FROM units").fetchone()
        if units < self.committed_units:
            raise Wrong(f"{self.committed_units} units were committed, and {units} are left")
        files = {
            name: sorted(self.disk.names(FOLDER / name)) for name in (".", "states", "control")
        }
        calls = {process.name: process.calls for process in self.world.processes}
        return Outcome(tables, files, calls, self.world.struck, processes)


def open_saved(machine: Machine) -> SavedRun:
    return SavedRun(FOLDER, build=build, disk=machine.disk)


@cache
def context_of(problem: Problem) -> RunContext:
    """Return what workers need of a search, without the source of the user's modules."""
    return replace(make_run_context(problem.make()[0]), program=Program({}, {}))


@cache
def undisturbed(problem: Problem) -> Outcome:
    """Return what a search gives without faults."""
    return SimulatedRun(problem, seed=0).run()


OF_CLUSTERS: tuple[Kind, ...] = get_args(Kind)
KINDS = tuple(kind for kind in OF_CLUSTERS if kind != "leave")
ENDS: tuple[Kind, ...] = ("kill", "power", "error")
"""The faults that end a process, at least often: without them, there is nothing to resume."""


def draw_faults(problem: Problem, seed: int) -> list[Fault]:
    """Draw the faults of a run: one that ends a process in most runs, and up to three others."""
    choose = random.Random(f"faults {seed}")
    calls = {k: n for k, n in undisturbed(problem).calls.items() if k != "reader"}
    workers = sum(name.startswith("worker") for name in calls)
    most = max(calls.values())
    later = [f"coordinator-{n}" for n in (1, 2)]
    calls |= dict.fromkeys(later, most)
    calls |= {f"worker-{workers + n}": most // 2 for n in range(workers)}
    coordinator = {"coordinator-0": calls["coordinator-0"]}
    if problem.cluster:
        return draw_faults_of_cluster(choose, calls)
    faults = [draw_fault(choose, choose.choice((coordinator, calls)), ENDS)]
    faults += [draw_fault(choose, calls, KINDS) for _ in range(choose.randint(0, 3))]
    return faults


def draw_faults_of_cluster(choose: random.Random, calls: dict[str, int]) -> list[Fault]:
    """Draw one fault of an agent, its worker or the coordinator, and up to four others."""
    agents = {name: count for name, count in calls.items() if name.startswith("agent")}
    most = max(agents.values())
    calls |= {f"agent-{n}": most for n in range(len(agents), 2 * len(agents))}
    names = choose.choice((agents, calls, {"coordinator-0": calls["coordinator-0"]}))
    faults = [draw_fault(choose, names, (*ENDS, "leave", "leave", "cut"))]
    faults += [draw_fault(choose, calls, OF_CLUSTERS) for _ in range(choose.randint(0, 4))]
    # Only agents can be told to end.
    return [f for f in faults if f.kind != "leave" or f.process.startswith("agent")]


def check(problem: Problem, seed: int, faults: Sequence[Fault]) -> Outcome:
    """Run a search with faults; raise Wrong, or what it raised, unless it is as without them."""
    expected = undisturbed(problem)
    outcome = SimulatedRun(problem, seed, faults).run()
    for name, rows in expected.tables.items():
        found = outcome.tables[name]
        if name == "units":  # a row that was not committed is not written again
            rows = [row for row in rows if row in found]
        if found != rows:
            raise Wrong(f"its {name} differ: {first_difference(rows, found)}")
    if outcome.files != expected.files:
        raise Wrong(f"its files are {outcome.files}, and should be {expected.files}")
    return outcome


def first_difference(expected: Sequence[Any], found: Sequence[Any]) -> str:
    for a, b in itertools.zip_longest(expected, found):
        if a != b:
            return f"{b} instead of {a}"
    return "none"
