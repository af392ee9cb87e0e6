"""One running leg: receives its processes' messages, and strikes on time."""

from __future__ import annotations

import errno
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import cerebro
from benchmarks.faults import oracle, processes
from benchmarks.faults.disks import SmallDisk
from benchmarks.faults.plan import PAUSES, SHIMMED, WORKER_FAULTS, Fault, Leg
from benchmarks.faults.shim import CLASSES, Shim

LEG_SECONDS = 120.0
"""A leg that takes longer counts as hanging."""

CHANGING = CLASSES["create"] | CLASSES["rename"] | CLASSES["unlink"] | CLASSES["folder"]


@dataclass
class Death:
    """A worker that was struck, and the number of units that ran again because of it."""

    kind: str
    pid: int
    nanoseconds: int
    repeated: int = 0
    seconds: float | None = None
    """Time until the same unit ran again; None: no unit had to run again."""


@dataclass
class Report:
    """The report of one run."""

    seed: int
    struck: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    """Faults that did not happen because the leg ended first."""
    problems: list[str] = field(default_factory=list)
    deaths: list[Death] = field(default_factory=list)
    repeated_at_resume: list[int] = field(default_factory=list)
    """Units of a trial that ran again after its coordinator ended."""
    exits: list[float] = field(default_factory=list)
    """Seconds that workers outlived their coordinator."""
    refusals: list[str] = field(default_factory=list)
    """The errors that rejected damaged files."""
    legs: int = 0
    epochs: int = 0
    """Results compared with the fault-free run."""
    seconds: float = 0.0
    story: list[str] = field(default_factory=list)

    def count(self, kind: str, struck: bool) -> None:
        (self.struck if struck else self.missed)[kind] += 1
        self.tell(f"  {'struck by' if struck else 'spared from'} {kind}")

    def blame(self, text: str) -> None:
        self.problems.append(text)
        self.tell(f"  PROBLEM {text}")

    def tell(self, line: str) -> None:
        self.story.append(line)


@dataclass
class Progress:
    """The trials' progress, as reported to the campaign."""

    highest: dict[int, int] = field(default_factory=dict)
    """The last unit of each trial that has begun."""
    floor: dict[int, int] = field(default_factory=dict)
    """Units of each trial that must not be lost when it continues."""
    set_back: set[int] = field(default_factory=set)
    """Trials that may continue from their floor, because files were damaged or power was lost."""

    def take(self, highest: dict[int, int], committed: dict[int, int]) -> None:
        """Add the result of a leg; trials that it did not reach keep their position."""
        for trial, position in highest.items():
            self.highest[trial] = position
            self.floor[trial] = committed.get(trial, 0)
            self.set_back.discard(trial)

    def go_back(self, floor: dict[int, int], trials: Iterable[int] | None = None) -> None:
        """Some or all trials may have lost progress beyond `floor`."""
        for trial in self.highest.keys() & (self.highest if trials is None else trials):
            self.floor[trial] = min(self.floor.get(trial, 0), floor.get(trial, 0))
            self.set_back.add(trial)


class Place(Protocol):
    """A run's environment: its folder, its pipe and the shim or disk."""

    mark: str
    run: Path
    deafen: Path
    clones: bool
    units_per_epoch: int
    shim: Shim | None
    disk: SmallDisk | None

    def lines(self, timeout: float, child: int | None = None) -> list[str]: ...


class Running:
    """One leg: a process that searches or resumes, until it has ended.

    Parameters ---------- place The run's environment. leg Its faults. process The coordinator, just
    started. progress The progress of earlier legs. report Receives the findings.
    """

    def __init__(
        self,
        place: Place,
        leg: Leg,
        process: subprocess.Popen[bytes],
        progress: Progress,
        report: Report,
    ) -> None:
        self._place = place
        self._process = process
        self._before = progress
        self._report = report
        self._starts = 0
        self._running: dict[int, int] = {}  # worker process: the trial whose unit began last
        self._waiting = [f for f in leg.faults if f.moment.kind == "unit"]
        self._timed = [f for f in leg.faults if f.moment.kind == "start"]
        self._armed = next((f for f in leg.faults if f.moment.kind == "call"), None)
        self._began = time.monotonic()
        self.end: Fault | None = None
        """The fault that ended the leg, or may have."""
        self.highest: dict[int, int] = {}
        self._first: dict[int, int] = {}
        """The first unit of each trial in this leg."""
        self.done: dict[int, int] = {}
        """Units of each trial whose commits the coordinator has received."""
        self.deaths: list[Death] = []
        self.durable: dict[int, int] = {}
        """Epochs of each trial that a reader saw in the store before a power loss."""
        self.status: str | None = None
        """The run's, from the coordinator at its end."""
        self.hung = False
        self._deaf = False
        self._untold: deque[str] = deque()
        self._arm()

    def watch(self) -> int:
        """Inject faults until the coordinator ends; return its exit status."""
        child = os.pidfd_open(self._process.pid)
        try:
            while self._process.poll() is None:
                left = LEG_SECONDS - (time.monotonic() - self._began)
                if left <= 0:
                    self._give_up()
                due = self._timed[0].moment.offset if self._timed else LEG_SECONDS
                wait = min(left, due - (time.monotonic() - self._began))
                self._listen(wait, child)
                if self._timed and time.monotonic() - self._began >= due:
                    self._strike(self._timed.pop(0), None)
        finally:
            os.close(child)
        for fault in (*self._waiting, *self._timed):
            self._report.count(fault.kind, False)
        if self._armed is not None:
            shim = self._place.shim
            self._report.count(self._armed.kind, shim is not None and shim.struck > 0)
        return self._process.wait()

    @property
    def begun(self) -> set[int]:
        """The workers that have reported a unit."""
        return {pid for pid, trial in self._running.items() if trial >= 0}

    def _give_up(self) -> None:
        """Make all processes dump their stacks, then kill them."""
        self.hung = True
        for pid in processes.marked(self._place.mark):
            processes.send(pid, signal.SIGABRT)
            processes.send(pid, signal.SIGCONT)
        time.sleep(1.0)
        processes.kill_all(self._place.mark)

    # --- receiving -----------------------------------------------------------

    def _listen(self, timeout: float, child: int | None = None) -> None:
        """Receive messages; a strike that also receives continues with earlier ones."""
        self._untold.extend(self._place.lines(timeout, child))
        while self._untold:
            self.hear(self._untold.popleft())

    def hear(self, line: str) -> None:
        """Handle a line from a process."""
        word, *rest = line.split()
        if word == "start":
            pid, trial, position, nanoseconds = map(int, rest)
            self._unit_began(pid, trial, position, nanoseconds)
        elif word == "done":
            trial = int(rest[0])  # its next unit may have begun already
            self.done[trial] = self.done.get(trial, self._first.get(trial, 0)) + 1
        elif word == "deaf":
            self._deaf = True
        elif word == "ended":
            self.status = rest[0]
        elif word == "halt":
            self._report.tell(f"  halted in {' '.join(rest[1:])}")
            if self._armed is not None and self._process.poll() is None:
                fault, self._armed = self._armed, None
                processes.wait_stopped(int(rest[0]))  # it reports before it stops
                self._strike(fault, int(rest[0]))

    def _unit_began(self, pid: int, trial: int, position: int, nanoseconds: int) -> None:
        if trial not in self.highest:
            self._first[trial] = position
            self._check_resumed(trial, position)
        else:
            self._check_next(trial, position, nanoseconds)
        self.highest[trial] = max(position, self.highest.get(trial, position))
        self._running[pid] = trial
        self._starts += 1
        while self._waiting and self._waiting[0].moment.count <= self._starts:
            fault = self._waiting.pop(0)
            time.sleep(fault.moment.offset)
            self._strike(fault, pid)

    def _check_resumed(self, trial: int, position: int) -> None:
        """Check that a trial continues with its first uncommitted unit."""
        floor = self._before.floor.get(trial, 0)
        last = self._before.highest.get(trial, -1)
        if position < floor:
            self._report.blame(
                f"lost: trial {trial} continued from unit {position}; {floor} were committed"
            )
        clone = last < 0 and self._place.clones and position % self._place.units_per_epoch == 0
        if position > last + 1 and not clone:
            self._report.blame(f"wrong: trial {trial} began unit {position}, after {last}")
        if trial not in self._before.set_back:
            again = max(0, last - position + 1)
            self._report.repeated_at_resume.append(again)
            if again > 1:
                self._report.blame(f"repeated: {again} units of trial {trial} ran again")

    def _check_next(self, trial: int, position: int, nanoseconds: int) -> None:
        """Check that within a leg only a worker's fault makes a unit run again, and only its
        own."""
        last = self.highest[trial]
        if position > last + 1:
            self._report.blame(f"wrong: trial {trial} began unit {position}, after {last}")
        if position > last:
            return
        # A struck worker was running the unit that it reported last.
        deaths = [d for d in self.deaths if self._running[d.pid] == trial and d.repeated == 0]
        if not deaths:
            self._report.blame(f"repeated: unit {position} of trial {trial} without a fault")
            return
        death = deaths[-1]
        death.repeated = last - position + 1
        death.seconds = (nanoseconds - death.nanoseconds) / 1e9
        if death.repeated > 1:
            self._report.blame(f"repeated: {death.repeated} units of trial {trial} ran again")

    # --- striking ----------------------------------------------------------

    def _arm(self) -> None:
        """Arm the shim."""
        fault, shim = self._armed, self._place.shim
        if shim is None:
            return
        if fault is not None:
            actions = {"sync fails once": "fail once", "syncs fail": "fail"}
            actions |= {"write fails once": "fail once", "writes fail": "fail"}
            actions["short write"] = "short"
            moment = fault.moment
            error = random.Random(fault.seed).choice([errno.EIO, errno.ENOSPC])
            shim.strike(
                actions.get(fault.kind, "halt"),
                after=moment.count,
                classes=moment.classes,
                roles=moment.roles,
                error=errno.EIO if "sync" in fault.kind else error,
            )
            if fault.kind in SHIMMED and fault.kind != "power loss":
                self.end = fault
        for slow in self._waiting:
            if slow.kind == "coordinator killed, disk slow":
                delay = random.Random(slow.seed).uniform(0.02, 0.3)
                shim.strike("slow", after=1, classes=CLASSES["sync"], delay=delay)

    def _strike(self, fault: Fault, pid: int | None) -> None:
        """Inject a fault; `pid` is the process that has just begun a unit or is halted."""
        kind = fault.kind
        rng = random.Random(fault.seed)
        if self._process.poll() is not None:
            self._report.count(kind, False)
            return
        if kind in WORKER_FAULTS:
            self._strike_worker(kind, pid, rng)
            return
        if kind in PAUSES:
            self._pause(kind, pid, rng)
        else:
            self.end = fault
            self._end(kind, pid, rng)
        self._report.count(kind, True)

    def _strike_worker(self, kind: str, pid: int | None, rng: random.Random) -> None:
        mark = self._place.mark
        if pid is None or not processes.has_mark(pid, mark) or not processes.is_worker(pid):
            self._report.count(kind, False)
            return
        others = [p for p in self._running if p != pid and processes.has_mark(p, mark)]
        halted = processes.is_stopped(pid)
        if others and not halted and rng.random() < 0.25:
            pid = rng.choice(others)
        self._running.setdefault(pid, -1)  # halted before its first unit
        self.deaths.append(Death(kind, pid, time.monotonic_ns()))
        struck = True
        if kind == "worker killed":
            processes.send(pid, signal.SIGKILL)
        elif kind == "worker stopped":
            processes.send(pid, signal.SIGSTOP)
        else:
            struck = processes.cut_sockets(pid) > 0
        self._report.count(kind, struck)

    def _pause(self, kind: str, pid: int | None, rng: random.Random) -> None:
        """Stop processes for a moment, which must have no effect."""
        if kind == "second owner":
            self._second_owner(rng)
            return
        paused = [self._process.pid]
        if kind == "worker paused":
            paused = [p for p in [pid] if p is not None]
        elif kind == "all paused":
            paused = processes.marked(self._place.mark)
        rng.shuffle(paused)
        for p in paused:
            processes.send(p, signal.SIGSTOP)
        time.sleep(rng.uniform(0.02, 0.3))
        rng.shuffle(paused)
        for p in paused:
            processes.send(p, signal.SIGCONT)

    def _second_owner(self, rng: random.Random) -> None:
        """Check that a second process is refused, with the owner's name."""
        done = subprocess.run(
            [sys.executable, "-m", "cerebro", "resume", str(self._place.run), "--workers", "1"],
            env=oracle.environment(**{processes.MARK: self._place.mark}),
            capture_output=True,
            text=True,
            check=False,
        )
        alive = self._process.poll() is None
        refused = done.returncode == 1 and str(self._process.pid) in done.stderr
        # The owner may have finished the run meanwhile, and be about to exit. A second process that
        # trained would be noticed by its units.
        over = done.returncode == 0 and cerebro.open(self._place.run).status == "finished"
        if alive and not refused and not over:
            self._report.blame(
                f"wrong: a second process was not refused: status {done.returncode}, {done.stderr}"
            )

    def _end(self, kind: str, pid: int | None, rng: random.Random) -> None:
        coordinator = self._process.pid
        if kind == "coordinator killed, worker stopped" and pid is not None:
            processes.send(pid, signal.SIGSTOP)
            processes.send(coordinator, signal.SIGKILL)
        elif kind == "coordinator killed, worker deaf":
            self._deafen_a_worker()
            processes.send(coordinator, signal.SIGKILL)
        elif kind.startswith("coordinator killed"):
            processes.send(coordinator, signal.SIGKILL)
        elif kind in ("interrupted", "terminated"):
            number = signal.SIGINT if kind == "interrupted" else signal.SIGTERM
            processes.send(coordinator, number)
            for p in processes.marked(self._place.mark):  # halted by the shim
                processes.send(p, signal.SIGCONT)
        elif kind == "disk full":
            self._fill_disk(rng)
        elif kind == "folder read-only":
            self._make_read_only()
        else:
            if kind == "power loss":
                self._read_durable()
            first = [coordinator, *self._running]
            rng.shuffle(first)
            processes.kill_all(self._place.mark, first)

    def _deafen_a_worker(self) -> None:
        """Wait until a worker is inside a C function that holds the GIL."""
        self._deaf = False
        self._place.deafen.touch()
        while not self._deaf and self._process.poll() is None:
            self._listen(0.1)
        self._place.deafen.unlink(missing_ok=True)

    def _fill_disk(self, rng: random.Random) -> None:
        left = rng.choice([0, 4096, 20_000, 100_000])
        if self._place.disk is not None:
            self._place.disk.fill(left)
        elif self._place.shim is not None:
            self._place.shim.set_room(left)

    def _make_read_only(self) -> None:
        if self._place.disk is not None:
            self._place.disk.set_read_only(self._place.run, True)
        elif self._place.shim is not None:
            self._place.shim.strike("fail", after=1, classes=CHANGING, error=errno.EROFS)

    def _read_durable(self) -> None:
        """Rows that a reader sees are already synced, so they must survive a power loss."""
        with suppress(sqlite3.Error, KeyError):
            if (self._place.run / "run.sqlite").exists():
                for trial, _ in oracle.read_outcome(self._place.run, patience=1.0).epochs:
                    self.durable[trial] = self.durable.get(trial, 0) + 1
