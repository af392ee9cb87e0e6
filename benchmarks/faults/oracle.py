"""The expected result of a run, and the comparison with it.

Reads runs with SQLite only. The fault-free result of a problem is trained once, in one process;
every trial, epoch, hash and metric of a disturbed run must equal it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

import cerebro._core as _core
from benchmarks.faults.problem import Problem, to_json
from cerebro.errors import CorruptDataError

ROOT = Path(__file__).parent.parent.parent
SLOTS = (".a", ".b", ".slots")


@dataclass
class EpochOutcome:
    state_hash: str
    metrics: dict[str, float | None]
    file: str | None


@dataclass
class Outcome:
    """The contents of a store."""

    status: str
    trials: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Configuration and status of every trial."""
    epochs: dict[tuple[int, int], EpochOutcome] = field(default_factory=dict)
    units: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """The number of rows per unit."""


def read_outcome(run: Path, patience: float = 60.0) -> Outcome:
    """Read a run's store, even while it runs."""
    # The last connection with write access copies the log into the store on closing; this reader
    # must not.
    mode = "ro" if (run / "run.sqlite-wal").exists() else "rw"
    uri = f"{(run / 'run.sqlite').resolve().as_uri()}?mode={mode}"
    with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=patience)) as store:
        store.execute("BEGIN")
        ok = store.execute("PRAGMA quick_check").fetchone()[0]
        if ok != "ok":
            raise sqlite3.DatabaseError(ok)
        meta = dict(store.execute("SELECT key, value FROM meta"))
        outcome = Outcome(json.loads(meta["status"]))
        for number, config, status in store.execute("SELECT number, config, status FROM trials"):
            outcome.trials[number] = (config, status)
        for trial, epoch, state_hash, file in store.execute(
            "SELECT trial, epoch, state_hash, state_file FROM epochs"
        ):
            outcome.epochs[trial, epoch] = EpochOutcome(state_hash, {}, file)
        for trial, epoch, name, value in store.execute(
            "SELECT trial, epoch, name, value FROM metrics"
        ):
            if (trial, epoch) in outcome.epochs:
                outcome.epochs[trial, epoch].metrics[name] = value
        for trial, epoch, step, count in store.execute(
            "SELECT trial, epoch, step, count(*) FROM units GROUP BY trial, epoch, step"
        ):
            outcome.units[trial, epoch, step] = count
    return outcome


class Oracles:
    """Fault-free results, trained on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._locks: dict[Problem, threading.Lock] = {}
        self._known: dict[Problem, Outcome] = {}

    def data(self, problem: Problem) -> Path:
        with self._lock:
            return problem.data(self._folder)

    def of(self, problem: Problem) -> Outcome:
        data = self.data(problem)
        with self._lock:
            lock = self._locks.setdefault(problem, threading.Lock())
        with lock:
            if problem not in self._known:
                self._known[problem] = self._train(problem, data)
        return self._known[problem]

    def _train(self, problem: Problem, data: Path) -> Outcome:
        run = self._folder / f"oracle-{problem.name()}"
        text = to_json(
            problem,
            data=str(data),
            run=str(run),
            workers=0,
            keep="last",
            state_dir=None,
            how="script",
            epochs=None,
            if_exists="error",
        )
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.faults.job", text],
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"the fault-free run failed:\n{done.stdout}{done.stderr}")
        return read_outcome(run)


def environment(**more: str) -> dict[str, str]:
    """The environment of a child: the importable checkout, one compute thread."""
    path = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    fixed = {"PYTHONPATH": os.pathsep.join(path), "PYTHONDONTWRITEBYTECODE": "1"}
    return {**os.environ, **fixed, **more}


def differences(found: Outcome, wanted: Outcome) -> list[str]:
    """List how a finished run differs from the fault-free one; lines begin with "lost", "wrong",
    ..."""
    lines = []
    if found.status != "finished":
        lines.append(f"unfinished: the run is {found.status}")
    for number, wanted_trial in wanted.trials.items():
        if number not in found.trials:
            lines.append(f"lost: trial {number}")
        elif found.trials[number] != wanted_trial:
            lines.append(f"wrong: trial {number} is {found.trials[number]}, not {wanted_trial}")
    for number in found.trials.keys() - wanted.trials.keys():
        lines.append(f"wrong: unexpected trial {number}")
    for (trial, epoch), right in wanted.epochs.items():
        ours = found.epochs.get((trial, epoch))
        if ours is None:
            lines.append(f"lost: epoch {epoch} of trial {trial}")
        elif ours.state_hash != right.state_hash:
            lines.append(f"wrong: the state of trial {trial} after epoch {epoch}")
        elif ours.metrics != right.metrics:
            lines.append(
                f"wrong: trial {trial} epoch {epoch} has {ours.metrics}, not {right.metrics}"
            )
    for trial, epoch in found.epochs.keys() - wanted.epochs.keys():
        lines.append(f"wrong: unexpected epoch {epoch} of trial {trial}")
    return lines


def kept_epochs(outcome: Outcome, keep: str, metric: str = "loss") -> dict[int, set[int]]:
    """The epochs of each trial whose states are kept: the smallest `metric` is best."""
    kept: dict[int, set[int]] = {number: set() for number in outcome.trials}
    for trial in kept:
        mine = {e: o.metrics[metric] for (t, e), o in outcome.epochs.items() if t == trial}
        finite = {epoch: value for epoch, value in mine.items() if value is not None}
        if keep == "all":
            kept[trial] = set(mine)
        elif mine:
            kept[trial] = {max(mine)}
            if keep == "best" and finite:
                kept[trial].add(min(finite, key=lambda epoch: (finite[epoch], epoch)))
    return kept


def state_problems(run: Path, outcome: Outcome, keep: str) -> list[str]:
    """List the kept states that are missing, damaged or unexpected."""
    lines = []
    wanted = kept_epochs(outcome, keep)
    for (trial, epoch), row in sorted(outcome.epochs.items()):
        if (row.file is not None) != (epoch in wanted.get(trial, ())):
            kept = "is" if row.file is not None else "is not"
            lines.append(f"wrong: the state of trial {trial} after epoch {epoch} {kept} kept")
        if row.file is None:
            continue
        file = run / "states" / row.file
        if not file.exists():
            lines.append(f"lost: {row.file}")
        elif hash_of(file) != row.state_hash:
            lines.append(f"wrong: {row.file} does not match its row")
    return lines


def hash_of(file: Path) -> str:
    return str(_core.hash_state(file.read_bytes()))


def stray_files(run: Path, state_dir: Path | None, outcome: Outcome) -> list[str]:
    """List the files that a finished run should not have left."""
    known = {"run.sqlite", "owner.lock"}
    known.update(f"states/{row.file}" for row in outcome.epochs.values() if row.file)
    known.update(f"trials/{number}.log" for number in outcome.trials)
    lines = []
    for file in sorted(run.rglob("*")):
        name = str(file.relative_to(run))
        if not file.is_dir() and name not in known:
            lines.append(f"stray: {name}")
    if state_dir is not None and state_dir.exists():
        claim = "cerebro-run"  # names the folder's run
        lines += [f"stray: {f}" for f in sorted(state_dir.iterdir()) if f.name != claim]
    return lines


def committed(states: Path) -> dict[int, int]:
    """The committed units of each live trial, from its slots."""
    found = {}
    for page in states.glob("*.slots") if states.exists() else ():
        if not page.stem.isdigit():
            continue
        with contextlib.suppress(CorruptDataError, OSError):
            slots = _core.Slots(str(page.with_suffix("")), False)
            with contextlib.closing(slots):
                newest = slots.committed()
            if newest is not None:
                found[int(page.stem)] = newest[0]
    return found
