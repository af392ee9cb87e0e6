"""One run from its first leg to the end, and the check of its result."""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path

import cerebro
from benchmarks.faults import oracle, power, processes
from benchmarks.faults.disks import SmallDisk
from benchmarks.faults.models import DEAF
from benchmarks.faults.oracle import Oracles, Outcome
from benchmarks.faults.plan import TORN, Fault, Leg, Plan
from benchmarks.faults.problem import to_json
from benchmarks.faults.running import LEG_SECONDS, Progress, Report, Running
from benchmarks.faults.sabotage import spoil
from benchmarks.faults.shim import Shim
from cerebro.run.states import epoch_state_file, unpublished_name

EXIT_SECONDS = 2.0
"""How long workers may outlive their coordinator."""
IMPORT_SECONDS = 20.0
"""The same for workers that have not begun to work: they notice nothing while importing."""
DISK_BYTES = 24 << 20
LAST_LEGS = 3
"""Fault-free legs after the planned ones; the first should finish the run."""


class Disturbed:
    """Runs a plan in a separate folder.

    Parameters ---------- plan The legs and faults. oracles Fault-free results and data. folder
    Created here, for all files of this run. library The compiled shim, if the plan needs it.
    small_disks Whether disks can be mounted; otherwise the shim replaces them. sabotage How to
    corrupt the finished run before the check, which must detect it.
    """

    def __init__(
        self,
        plan: Plan,
        oracles: Oracles,
        folder: Path,
        library: Path | None,
        *,
        small_disks: bool,
        sabotage: str | None = None,
    ) -> None:
        self.plan = plan
        self.report = Report(plan.seed)
        self.mark = f"{os.getpid()}-{plan.seed}-{time.monotonic_ns()}"
        self._oracles = oracles
        self._folder = folder
        self._sabotage = sabotage
        folder.mkdir(parents=True)
        on_disk = plan.disk and small_disks
        self.disk = SmallDisk(folder / "disk", DISK_BYTES) if on_disk else None
        self._root = folder / "disk" / "runs"
        self._root.mkdir(parents=True)
        self.run = self._root / "run"
        self._memory = folder / "memory" if plan.state_dir else None
        self._states = self._memory or self.run / "states"
        self._events = folder / "events"
        self.clones = plan.problem.adaptive
        self.units_per_epoch = plan.problem.units_per_epoch
        self.deafen = folder / ("events" + DEAF)
        os.mkfifo(self._events)
        # Open at both ends, so that writers never wait for a reader and the pipe never ends.
        self._pipe = os.open(self._events, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._rest = b""
        self.shim: Shim | None = None
        if plan.needs_shim or (plan.disk and not small_disks):
            assert library is not None
            self.shim = Shim(library, folder, self._root, self._events)
        if plan.loses_power and self.shim is not None:
            power.begin_shadow(self._root, self.shim.shadow)
            self.shim.keep_shadow()
        # Damaged files and their original bytes, like a user's backup.
        self._torn: dict[Path, dict[Path, bytes]] = {}
        self._problem = plan.problem  # as of the final check
        self._progress = Progress()
        self._hung = False

    def go(self) -> Report:
        """Run until finished, then check; the report has the problems."""
        began = time.monotonic()
        try:
            finished = False
            for leg in (*self.plan.legs, *[Leg("resume", 2, ())] * LAST_LEGS):
                finished = self._leg(leg)
                if finished or self._hung:
                    break
            if finished and hasattr(cerebro, "resume"):
                finished = self._go_on()
            if self._sabotage is not None:
                spoil(self._sabotage, self.run, self.mark)
            self._judge(finished)
        finally:
            processes.kill_all(self.mark)
            self.report.seconds = time.monotonic() - began
            self._close()
        return self.report

    def _close(self) -> None:
        os.close(self._pipe)
        if self.shim is not None:
            if self.shim.trouble:
                self.report.blame("broken: the shim could not keep a file")
            self.shim.close()
        if self.disk is not None:
            self.disk.close()

    # --- a leg -----------------------------------------------------------

    def _leg(self, leg: Leg) -> bool:
        """Run one leg; True if the run is finished."""
        how = leg.how
        if how != "script" and not (self.run / "run.sqlite").exists():
            how = "script"
        self.report.legs += 1
        self.report.tell(f"leg {self.report.legs}: {how}, {leg.workers} workers")
        process = self._start(how, leg.workers)
        running = Running(self, leg, process, self._progress, self.report)
        code = running.watch()
        self._after(running, code)
        self._hung = running.hung
        if code != 0:
            return False
        if running.status is None:
            return oracle.read_outcome(self.run).status == "finished"
        return running.status == "finished"

    def _start(self, how: str, workers: int) -> subprocess.Popen[bytes]:
        problem = self.plan.problem
        if how == "command":
            command = ["-m", "cerebro", "resume", str(self.run), "--workers", str(workers)]
        else:
            text = to_json(
                problem,
                data=str(self._oracles.data(problem)),
                run=str(self.run),
                workers=workers,
                keep=self.plan.keep,
                state_dir=str(self._memory) if self._memory else None,
                how="script" if how == "script" else "resume",
                epochs=problem.epochs + 1 if how == "further" else None,
                if_exists="resume" if hasattr(cerebro, "resume") else "error",
            )
            command = ["-m", "benchmarks.faults.job", text]
        with self._output.open("wb") as log:
            return subprocess.Popen(
                [sys.executable, *command],
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self._folder,
            )

    def _environment(self) -> dict[str, str]:
        more = {processes.MARK: self.mark, "CEREBRO_FAULTS_EVENTS": str(self._events)}
        if self.plan.children:
            more["CEREBRO_FAULTS_CHILDREN"] = "1"
        if self.shim is not None:
            more.update(self.shim.environment())
        return oracle.environment(**more)

    @property
    def _output(self) -> Path:
        return self._folder / f"output-{self.report.legs}"

    def _said(self, size: int = 1500) -> str:
        with suppress(OSError):
            return self._output.read_text(errors="replace")[-size:].strip()
        return ""

    def lines(self, timeout: float, child: int | None = None) -> list[str]:
        """Return the messages, waiting for one or for the end of the child."""
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        if child is not None:
            poll.register(child, select.POLLIN)
        poll.poll(max(0.0, timeout) * 1000)
        with suppress(BlockingIOError):
            while True:
                self._rest += os.read(self._pipe, 1 << 16)
        *whole, self._rest = self._rest.split(b"\n")
        return [line.decode() for line in whole]

    # --- after a leg -----------------------------------------------------

    def _after(self, running: Running, code: int) -> None:
        """Check how a leg ended and that nothing is left of it; repair the damage."""
        self.report.tell(f"  ended with status {code}")
        self._check_processes(running)
        for line in self.lines(0.0):  # the last messages
            running.hear(line)
        self._check_exit(running, code)
        self.report.deaths += running.deaths
        self._mend()
        committed = oracle.committed(self._states)
        for trial, position in running.done.items():
            committed[trial] = max(committed.get(trial, 0), position)
        self._progress.take(running.highest, committed)
        end = running.end
        if end is not None and end.kind == "power loss":
            self._lose_power(end, running)
        elif end is not None and end.kind in TORN:
            self._tear(end)

    def _check_exit(self, running: Running, code: int) -> None:
        """Check that the exit status matches the cause."""
        if running.hung:
            said = self._said(6000)
            self.report.blame(f"hang: a leg took over {LEG_SECONDS:g} seconds; it said: {said}")
            return
        allowed = {0}
        kind = running.end.kind if running.end is not None else ""
        if kind in ("interrupted", "terminated"):
            allowed |= {130, 143, -signal.SIGINT, -signal.SIGTERM}
        elif "killed" in kind or kind in TORN or kind == "power loss":
            allowed |= {-signal.SIGKILL}
        elif kind:
            allowed |= {1}  # the disk's fault
        refused = [file for file in self._torn if file.name in self._said()]
        if kind in ("interrupted", "terminated") and not (self.run / "run.sqlite").exists():
            allowed |= {1}  # while importing: packages turn the interrupt into an ImportError
        if code == 1 and refused:  # the error names a damaged file; the user restores it
            allowed |= {1}
            self.report.refusals.append(self._said().splitlines()[-1])
            for file in refused:
                self._put_back(file)
        if code not in allowed:
            self.report.blame(f"unclean: exit status {code}; it said: {self._said()}")

    def _check_processes(self, running: Running) -> None:
        """Check that workers and their child processes end with the coordinator."""
        began = time.monotonic()
        left = processes.wait_gone(processes.marked(self.mark), EXIT_SECONDS)
        importing = [p for p in left if processes.is_worker(p) and p not in running.begun]
        busy = [p for p in left if p not in importing]
        left = busy + processes.wait_gone(importing, IMPORT_SECONDS - EXIT_SECONDS)
        # A worker's children may survive if it was killed, and its coordinator before noticing
        # that.
        unheard = {death.pid for death in running.deaths if death.seconds is None}
        known = [pid for pid in left if processes.session_of(pid) not in unheard - {pid}]
        if known:
            self.report.blame(f"orphans: {len(known)} processes outlive their coordinator")
            for pid in known:
                self.report.tell(f"  {pid}: {processes.command_of(pid)}")
        processes.kill_all(self.mark)
        if (
            not (left or importing)
            and running.highest
            and running.end
            and "coordinator killed" in running.end.kind
        ):
            self.report.exits.append(time.monotonic() - began)

    def _mend(self) -> None:
        if self.shim is not None:
            self.shim.calm()
        if self.disk is not None:
            self.disk.empty()
            with suppress(OSError):  # it was not read-only
                self.disk.set_read_only(self.run, False)

    # --- faults between legs ----------------------------------------------

    def _lose_power(self, fault: Fault, running: Running) -> None:
        assert self.shim is not None
        rng = random.Random(fault.seed)
        mix = None if rng.random() < 0.4 else rng
        self.report.tell(
            "  power is lost" + ("" if mix is None else "; the disk wrote in any order")
        )
        power.lose_power(self._root, self.shim.shadow, mix)
        if self._memory is not None:
            shutil.rmtree(self._memory, ignore_errors=True)
        # Only rows that a reader saw in the store must be durable.
        units = self.plan.problem.units_per_epoch
        self._progress.go_back({trial: n * units for trial, n in running.durable.items()})

    def _tear(self, fault: Fault) -> None:
        """Damage a file like a bad disk."""
        rng = random.Random(fault.seed)
        patterns = {
            "torn epoch state": (self.run / "states", "*.safetensors"),
            "torn slot page": (self._states, "*.slots"),
            "torn slot": (self._states, "*.[ab]"),
            "torn new file": (self.run / "states", "*.safetensors*"),
            "torn log of the store": (self.run, "run.sqlite-wal"),
            "torn store": (self.run, "run.sqlite"),
        }
        folder, pattern = patterns[fault.kind]
        files = sorted(folder.glob(pattern)) if folder.exists() else []
        if not files:
            self.report.tell("  found no file to tear")
            return
        file = rng.choice(files)
        before = file.read_bytes()
        if fault.kind == "torn new file" and not file.name.endswith(".new"):
            # As if its worker had been interrupted while writing it.
            trial, epoch = rng.randrange(self.plan.problem.trials), rng.randrange(3)
            name = unpublished_name(epoch_state_file(trial, epoch), rng.randbytes(16).hex())
            file = file.with_name(name)
        elif fault.kind == "torn epoch state" and self._is_named(file):
            self._torn.setdefault(file, {file: before})
        elif fault.kind == "torn store":
            parts = sorted(self.run.glob("run.sqlite*"))
            self._torn.setdefault(file, {part: part.read_bytes() for part in parts})
        elif fault.kind == "torn log of the store":
            self._progress.go_back({})
        else:
            # A state whose row was lost with its coordinator may be its trial's only one.
            self._progress.go_back(self._durable_epochs(), [int(file.stem.split("-")[0])])
        after = torn(before, rng)
        while fault.kind == "torn store" and is_whole(after, self._folder):
            after = torn(before, rng)  # SQLite cannot detect a flipped bit of a number
        file.write_bytes(after)
        self.report.tell(f"  {file.name} is torn")

    def _is_named(self, file: Path) -> bool:
        """Whether a row names a state."""
        found = self._read_copy()
        return found is not None and file.name in {row.file for row in found.epochs.values()}

    def _durable_epochs(self) -> dict[int, int]:
        """Where trials may restart after damage: their last epoch with a kept state."""
        units = self.plan.problem.units_per_epoch
        found = self._read_copy()
        return {
            trial: (epoch + 1) * units
            for (trial, epoch), row in sorted(found.epochs.items() if found is not None else ())
            if row.file is not None and self.run / "states" / row.file not in self._torn
        }

    def _read_copy(self) -> Outcome | None:
        """Read the store without changing it; None if it is already damaged."""
        copy = self._folder / "copy"
        copy.mkdir()
        try:
            for part in self.run.glob("run.sqlite*"):
                shutil.copy(part, copy)
            return oracle.read_outcome(copy)
        except sqlite3.Error:
            return None
        finally:
            shutil.rmtree(copy)

    # --- the end ------------------------------------------------------------

    def _go_on(self) -> bool:
        """Follow-ups after the end: none, the same script again, or one more epoch."""
        if self.plan.again:
            self._once_more()
        if not self.plan.further:
            return True
        self._progress = Progress(dict(self._progress.highest), {})
        self._problem = replace(self._problem, epochs=self._problem.epochs + 1)
        # A damaged state is rejected, and restored; a finished trial's is read only here.
        return any(self._leg(Leg("further", 2, ())) for _ in range(LAST_LEGS))

    def _once_more(self) -> None:
        """Check that resuming a finished run does nothing."""
        self.report.legs += 1
        leg = Leg("script", 1, ())
        running = Running(self, leg, self._start("script", 1), self._progress, self.report)
        code = running.watch()
        if code != 0 or running.highest:
            self.report.blame(
                f"unclean: a finished run was resumed: status {code}, units "
                f"{running.highest}; it said: {self._said()}"
            )

    def _judge(self, finished: bool) -> None:
        blame = self.report.blame
        if not finished:
            blame(f"unfinished after {self.report.legs} legs; the last said: {self._said()}")
        left = processes.wait_gone(processes.marked(self.mark), EXIT_SECONDS)
        if left:
            blame(f"orphans: {len(left)} processes are left")
        try:
            found = oracle.read_outcome(self.run)
        except (sqlite3.Error, KeyError, ValueError) as error:
            blame(f"lost: the store cannot be read: {error}")
            return
        self._judge_torn(found)
        wanted = self._oracles.of(self._problem)
        self.report.epochs = len(wanted.epochs)
        problems = oracle.differences(found, wanted)
        problems += oracle.state_problems(self.run, found, self.plan.keep)
        problems += oracle.stray_files(self.run, self._memory, found)
        if not self.plan.goes_back:
            twice = {unit: count for unit, count in found.units.items() if count > 1}
            problems += [f"repeated: {n} rows of unit {unit}" for unit, n in twice.items()]
        for problem in problems:
            blame(problem)

    def _judge_torn(self, found: Outcome) -> None:
        """Check that ``verify`` names a damaged state that is still kept; then restore it."""
        names = {row.file for row in found.epochs.values()}
        for file, before in list(self._torn.items()):
            if file.name not in names or not file.exists() or file.read_bytes() == before[file]:
                continue
            done = subprocess.run(
                [sys.executable, "-m", "cerebro", "verify", str(self.run)],
                env=oracle.environment(),
                capture_output=True,
                text=True,
                check=False,
            )
            if done.returncode != 1 or file.name not in done.stderr:
                self.report.blame(f"wrong: verify passes over {file.name}, which is torn")
            self.report.refusals.append(done.stderr.strip())
            self._put_back(file)

    def _put_back(self, file: Path) -> None:
        """Restore a damaged file; a store with all its files."""
        before = self._torn.pop(file)
        if file.name == "run.sqlite":
            for part in self.run.glob("run.sqlite*"):
                part.unlink()
        for part, data in before.items():
            part.write_bytes(data)


def is_whole(store: bytes, folder: Path) -> bool:
    """Whether SQLite finds a store intact; without its log, which has its own checksums."""
    file = folder / "looked-at.sqlite"
    file.write_bytes(store)
    try:
        with closing(sqlite3.connect(file)) as connection:
            found = connection.execute("PRAGMA integrity_check(1)").fetchone()
            return bool(found == ("ok",) and connection.execute("SELECT 1 FROM meta").fetchone())
    except sqlite3.Error:
        return False
    finally:
        for part in folder.glob("looked-at.sqlite*"):
            part.unlink()


def torn(data: bytes, rng: random.Random) -> bytes:
    """Return a file's bytes after damage: truncated, a page zeroed, a bit flipped, or empty."""
    how = rng.choice(["cut", "zeros", "bit", "bit", "empty"])
    if how == "empty" or not data:
        return b""
    at = rng.randrange(len(data))
    if how == "cut":
        return data[:at]
    if how == "zeros":
        start = at // power.PAGE * power.PAGE
        zeros = bytes(len(data[start : start + power.PAGE]))
        return data[:start] + zeros + data[start + power.PAGE :]
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
