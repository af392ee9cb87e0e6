"""One run from its first leg to the end, and the check of its result."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cluster_soak.agents import Agents
from benchmarks.cluster_soak.models import HELD
from benchmarks.cluster_soak.nodes import Cluster, Nodes, is_actor, parent, worker_processes
from benchmarks.cluster_soak.plan import (
    ACTOR,
    ADDED,
    COORDINATOR,
    PROCESS,
    REMOVED,
    Leg,
    Plan,
    Strike,
    draw,
)
from benchmarks.faults import oracle, processes
from benchmarks.faults.models import EVENTS
from benchmarks.faults.oracle import Outcome
from benchmarks.faults.problem import Problem

LEG_SECONDS = 120.0
"""A leg that takes longer counts as hanging."""
GONE_SECONDS = 20.0
"""Time limit for actors and their processes to end after the coordinator."""


ENGINES: dict[str, Callable[[Path, str, Path], Cluster]] = {"ray": Nodes, "agents": Agents}
"""What starts the workers."""


@dataclass
class Report:
    """The report of one run."""

    seed: int
    struck: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    """Faults that did not happen because the leg ended first."""
    problems: list[str] = field(default_factory=list)
    legs: int = 0
    epochs: int = 0
    """Results compared with the fault-free run."""
    repeated: int = 0
    """Units that began more than once."""
    joined: int = 0
    """Workers on nodes that joined during a run."""
    seconds: float = 0.0
    began: float = field(default_factory=time.monotonic)
    gone: list[float] = field(default_factory=list)
    """How long actors outlived a killed coordinator, in seconds."""
    story: list[str] = field(default_factory=list)

    def blame(self, text: str) -> None:
        self.problems.append(text)
        self.tell(f"PROBLEM {text}")

    def tell(self, line: str) -> None:
        self.story.append(f"  {time.monotonic() - self.began:5.1f} s  {line}")


class Oracles(oracle.Oracles):
    """Fault-free results, trained inline."""

    def _train(self, problem: Problem, data: Path) -> Outcome:
        run = data.parent / f"oracle-{problem.name()}"
        subprocess.run(command(Plan(0, problem, False, 1, False, ()), data, run, None), check=True)
        return oracle.read_outcome(run)


def command(
    plan: Plan, data: Path, run: Path, nodes: Cluster | None, *, resume: bool = False
) -> list[str]:
    """The command of a leg; without nodes, that of a fault-free run."""
    spec = {
        "problem": asdict(plan.problem),
        "data": str(data),
        "run": str(run),
        "address": None if nodes is None else nodes.address,
        "key": None if nodes is None or nodes.key is None else str(nodes.key),
        "resume": resume,
        "apart": plan.apart,
        "replicas": plan.replicas,
        "shared": plan.shared,
    }
    return [sys.executable, "-m", "benchmarks.cluster_soak.job", json.dumps(spec)]


class Soak:
    """Runs seeds in a temporary folder on one cluster, of `ENGINES`."""

    def __init__(self, engine: str = "ray") -> None:
        self._engine = ENGINES[engine]
        self._folder = Path(tempfile.mkdtemp(prefix="cerebro-soak-"))
        self._mark = uuid.uuid4().hex
        self._pipe = self._folder / "events"
        self._held = Path(f"{self._pipe}{HELD}")
        self._coordinator_cache = self._folder / "coordinator"
        os.mkfifo(self._pipe)
        self._events = os.open(self._pipe, os.O_RDWR | os.O_NONBLOCK)
        self._rest = b""
        # Nodes and coordinators inherit the checkout and one compute thread.
        os.environ.update(oracle.environment())
        self._oracles = Oracles(self._folder)
        self._nodes: Cluster | None = None

    def run(self, seed: int) -> Report:
        """Run a seed; the report has the problems."""
        report = Report(seed)
        try:
            if self._nodes is None:
                self._nodes = self._engine(self._folder, self._mark, self._pipe)
            self._nodes.restore()
            plan = draw(seed)
            report.tell(repr(plan))
            Run(self, plan, report, self._nodes).go()
        except Exception:
            report.blame(f"broken: {traceback.format_exc()}")
        if report.problems:  # leftovers of this run must not affect the next one
            self._end_cluster()
        report.seconds = time.monotonic() - report.began
        return report

    def _end_cluster(self) -> None:
        nodes, self._nodes = self._nodes, None
        if nodes is not None:
            nodes.close()
        processes.kill_all(self._mark)

    def close(self) -> None:
        self._end_cluster()
        os.close(self._events)
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- used by runs --------------------------------------------------------

    def lines(self, seconds: float, process: int) -> list[str]:
        """Wait for messages or the end of a process; return the messages."""
        poll = select.poll()
        poll.register(self._events, select.POLLIN)
        poll.register(process, select.POLLIN)
        poll.poll(max(0.0, seconds) * 1000)
        return self.lines_now()

    def lines_now(self) -> list[str]:
        """Return the unread messages."""
        try:
            self._rest += os.read(self._events, 1 << 16)
        except BlockingIOError:
            return []
        *lines, self._rest = self._rest.split(b"\n")
        return [line.decode() for line in lines]

    def start(
        self, plan: Plan, run: Path, nodes: Cluster, output: Any, *, resume: bool
    ) -> subprocess.Popen[bytes]:
        """Start a coordinator."""
        data = self._oracles.data(plan.problem)
        variables = {
            processes.MARK: self._mark,
            EVENTS: str(self._pipe),
            "CEREBRO_CACHE": str(self._coordinator_cache),
        }
        return subprocess.Popen(
            command(plan, data, run, nodes, resume=resume),
            env={**os.environ, **variables},
            stdout=output,
            stderr=subprocess.STDOUT,
        )

    def wanted(self, problem: Problem) -> Outcome:
        return self._oracles.of(problem)

    def folder(self, seed: int) -> Path:
        """Return an empty folder for the run of a seed."""
        folder = self._folder / f"run-{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def hold(self, held: bool) -> None:
        """Pause the workers in their units, or let them continue."""
        if held:
            self._held.touch()
        else:
            self._held.unlink(missing_ok=True)

    def processes(self) -> list[int]:
        """Worker processes of this soak's cluster."""
        return worker_processes(self._mark)

    def left_in_cache(self) -> list[str]:
        """Leftovers in the coordinators' cache other than data."""
        cache = self._coordinator_cache
        known = {"data", "scratch", "place"}
        found = [path for path in cache.glob("*") if path.name not in known]
        return [str(path.relative_to(cache)) for path in [*found, *cache.glob("scratch/*")]]


class Run:
    """One run: its legs, its faults and its checks."""

    def __init__(self, soak: Soak, plan: Plan, report: Report, nodes: Cluster) -> None:
        self._soak = soak
        self._plan = plan
        self._report = report
        self._nodes = nodes
        self._run = soak.folder(plan.seed)
        self._actors: set[int] = set()  # processes that were our actors
        self._begun: Counter[tuple[str, str]] = Counter()
        self._last = 0  # the process whose unit began last
        self._killed = False

    def go(self) -> None:
        wanted = self._soak.wanted(self._plan.problem)
        is_over = False
        for number, leg in enumerate(self._plan.legs):
            if leg.before is not None and not is_over:
                self._change(leg.before)
            if is_over:
                self._report.missed.update(strike.kind for strike in leg.strikes)
            elif self._leg(leg, resume=number > 0 and self._run.exists()):
                is_over = True
            if self._report.problems:
                return
        if not is_over:
            self._report.blame("unfinished: no leg has come to an end")
            return
        self._judge(wanted)

    def _change(self, kind: str) -> None:
        """Change the number of nodes before a leg."""
        self._report.tell(f"{kind} before the next leg")
        self._report.struck[f"{kind} before a resume"] += 1
        if kind == ADDED:
            self._nodes.add()
        else:
            self._nodes.remove(self._nodes.nodes[0])

    # --- a leg -----------------------------------------------------------------

    def _leg(self, leg: Leg, *, resume: bool) -> bool:
        """Run a leg; return whether the run has finished."""
        self._report.legs += 1
        self._report.tell(f"leg {'resumes' if resume else 'searches'}")
        self._nodes.begin()
        with tempfile.TemporaryFile() as output:
            process = self._soak.start(self._plan, self._run, self._nodes, output, resume=resume)
            try:
                has_ended = self._watch(process, list(leg.strikes))
            finally:
                self._soak.hold(False)
                process.kill()
                status = process.wait()
                self._nodes.end()
            output.seek(0)
            text = output.read().decode(errors="replace")
        was_killed = status == -signal.SIGKILL and self._killed
        if not has_ended:
            self._report.blame(f"hang: a leg took {LEG_SECONDS:g} seconds\n{text[-6000:]}")
        elif status != 0 and not was_killed:
            self._report.blame(f"unclean: exit status {status}\n{text[-6000:]}")
        self._report.tell("its process has ended")
        self._expect_nobody(was_killed)
        return status == 0

    def _watch(self, process: subprocess.Popen[bytes], left: list[Strike]) -> bool:
        """Inject faults on time until the process ends; False: it hangs."""
        self._killed = False
        counts: Counter[str] = Counter()
        end = time.monotonic() + LEG_SECONDS
        handle = os.pidfd_open(process.pid)
        try:
            while True:
                ended = process.poll() is not None
                for line in self._soak.lines(0 if ended else end - time.monotonic(), handle):
                    what, *words = line.split()
                    counts[what] += 1
                    self._hear(what, words)
                    while left and not ended and counts[left[0].event] >= left[0].count:
                        self._strike(left.pop(0), process)
                if ended:
                    break
                if time.monotonic() > end:
                    process.send_signal(signal.SIGUSR1)
                    time.sleep(1.0)  # for its stack dump
                    return False
        finally:
            os.close(handle)
        for strike in left:
            self._report.missed[strike.kind] += 1
            self._report.tell(f"spared from {strike.kind}")
        return True

    def _hear(self, what: str, words: list[str]) -> None:
        if what == "start":
            if not self._begun:
                self._report.tell("the first unit begins")
            pid, trial, position, _ = words
            self._begun[trial, position] += 1
            self._last = int(pid)
            if is_actor(parent(int(pid))):
                self._actors.add(parent(int(pid)))
        elif what in ("joined", "refused"):
            self._report.joined += what == "joined"
            self._report.tell(f"a node has {what}")
            self._soak.hold(False)

    def _strike(self, strike: Strike, process: subprocess.Popen[bytes]) -> None:
        """Strike the worker whose unit began last, or a different one if it is gone."""
        kind = strike.kind
        self._actors.update(self._nodes.actors())
        struck = self._strike_now(kind, process)
        (self._report.struck if struck else self._report.missed)[kind] += 1
        said = "struck by" if struck else "spared from"
        self._report.tell(f"{said} {kind}, {strike.event} {strike.count}")

    def _strike_now(self, kind: str, process: subprocess.Popen[bytes]) -> bool:
        if kind == COORDINATOR:
            self._killed = processes.send(process.pid, signal.SIGKILL)
            return self._killed
        if kind == ADDED:
            self._soak.hold(True)
            self._nodes.add()
            return True
        victims = [pid for pid in [self._last, *self._soak.processes()] if self._is_ours(pid)]
        if not victims:
            return False
        if kind == PROCESS:
            return processes.send(victims[0], signal.SIGKILL)
        actor = parent(victims[0])
        if kind == ACTOR:
            return self._nodes.kill(actor)
        assert kind == REMOVED
        node = self._nodes.of(actor)
        if node is None:
            return False
        self._nodes.remove(node)
        return True

    def _is_ours(self, pid: int) -> bool:
        return processes.is_worker(pid) and is_actor(parent(pid))

    # --- judging ---------------------------------------------------------------

    def _expect_nobody(self, was_killed: bool) -> None:
        """Report leftover actors of a coordinator and their processes."""
        began = time.monotonic()
        if not wait_until(lambda: not self._left(), GONE_SECONDS):
            for text in self._left():
                self._report.blame(text)
        elif was_killed:
            self._report.gone.append(time.monotonic() - began)
        for line in self._soak.lines_now():  # drop ended ones; the next leg counts its own
            what, *words = line.split()
            self._hear(what, words)

    def _left(self) -> list[str]:
        actors = self._nodes.actors()
        lines = [f"actors: {pid} is {state} for the cluster" for pid, state in actors.items()]
        lines += [f"actors: process {pid} lives" for pid in self._actors if is_actor(pid)]
        return lines + [f"processes: worker {pid} lives" for pid in self._soak.processes()]

    def _judge(self, wanted: Outcome) -> None:
        found = oracle.read_outcome(self._run)
        self._report.epochs = len(wanted.epochs)
        self._report.repeated = sum(self._begun.values()) - len(self._begun)
        problems = oracle.differences(found, wanted)
        problems += oracle.state_problems(self._run, found, "last")
        problems += oracle.stray_files(self._run, None, found)
        problems += [
            f"stray: {name} in the coordinator's cache" for name in self._soak.left_in_cache()
        ]
        for problem in problems:
            self._report.blame(problem)


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Poll until a condition holds; False: not within this many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
