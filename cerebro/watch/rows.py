"""Read the rows of a run's store that are new, and keep them in a compact form."""

from __future__ import annotations

import math
import sqlite3
from array import array
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cerebro.machine.mappings import flatten
from cerebro.run.records import OPEN, STD, mean_and_std, strip_study
from cerebro.run.store import check_rows
from cerebro.run.store.schema import decode

MAX_HELD = 50_000  # units, to draw a run that has ended whole
MAX_EVENTS = 500
MAX_TEXT = 400
"""The most characters of an error, event or setting in an answer; the whole is on request."""


@dataclass(slots=True)
class Line:
    """One trial; with folds, one configuration: its row and its curves."""

    number: int
    config: dict[str, Any]
    row: dict[str, Any] = field(default_factory=dict)
    """What the table of trials says besides metrics."""
    first: int = 0
    """The first epoch that it trains itself; a clone's is not 0."""
    curves: dict[str, array[float]] = field(default_factory=dict)
    """By metric, one value for each of its own epochs; NaN: not reported."""
    ends: dict[int, float] = field(default_factory=dict)
    """By epoch, when its last unit ended."""
    ticks: array[int] = field(default_factory=lambda: array("q"))
    """When each epoch was read."""
    changed: int = 0
    value: float | None = None
    best_epoch: int | None = None

    @property
    def is_open(self) -> bool:
        return self.row.get("status") in OPEN

    def add(self, epoch: int, values: Mapping[str, float], tick: int) -> bool:
        """Add an epoch's metrics; return False if it replaces an epoch that was read before."""
        at = epoch - self.first
        if at < 0:
            return True
        is_new = at >= len(self.ticks)
        while len(self.ticks) <= at:
            self.ticks.append(tick)
        for name, value in values.items():
            curve = self.curves.setdefault(name, array("d"))
            curve.extend([math.nan] * (at + 1 - len(curve)))
            curve[at] = value
        self.changed = tick
        return is_new

    def rank(self, metric: str, mode: str, select: str) -> None:
        """Set the value that ranks the trial, and the epoch that has it."""
        self.value = self.best_epoch = None
        finite = [(v, e) for e, v in enumerate(self.curves.get(metric, ())) if math.isfinite(v)]
        if finite and select == "last":
            last = self.curves[metric]
            if len(last) == len(self.ticks) and math.isfinite(last[-1]):
                self.value, self.best_epoch = last[-1], self.first + len(last) - 1
        elif finite:
            sign = 1 if mode == "min" else -1
            value, at = min(finite, key=lambda pair: (sign * pair[0], pair[1]))
            self.value, self.best_epoch = value, self.first + at


class Rows:
    """What has been read of a run; a trial's epochs and all else know at which tick."""

    def __init__(self) -> None:
        self.tick = 0
        self.lines: dict[int, Line] = {}
        self.units: deque[tuple[int, list[Any]]] = deque(maxlen=MAX_HELD)
        self.events: deque[tuple[int, list[Any]]] = deque(maxlen=MAX_EVENTS)
        self.actions: deque[tuple[int, dict[str, Any]]] = deque(maxlen=MAX_EVENTS)
        self.totals = Counter[str]()
        self.clock = 0.0
        """The end of the last unit or event."""
        self.replaced = 0
        """How often an epoch that had been read was trained again."""
        self._meta: dict[str, Any] = {}
        self._last = Counter[str]()  # the last row read, by table
        self._parts: dict[tuple[int, int], dict[int, dict[str, float]]] = {}

    def read(self, connection: sqlite3.Connection, meta: dict[str, Any]) -> None:
        """Read what is new."""
        self._meta = meta
        self.tick += 1
        self._read_trials(connection)
        self._read_units(connection)
        self._read_metrics(connection)
        self._read_events(connection)

    @property
    def folds(self) -> int:
        folds = self._meta["folds"]
        return 1 if folds is None else len(folds["folds"])

    def _read_trials(self, connection: sqlite3.Connection) -> None:
        """Read every trial's row; only new ones have their configuration decoded."""
        check_rows(connection, "trials")
        folds, group = self.folds, list[sqlite3.Row]()
        for row in connection.execute(
            "SELECT number, status, epochs, parent, parent_epoch, error, origin, began, ended, "
            "CASE WHEN number > ? THEN config END AS config FROM trials ORDER BY number",
            (len(self.lines) * folds - 1,),
        ):
            group.append(row)
            if len(group) == folds:
                self._set_line(group)
                group = []

    def _set_line(self, rows: Sequence[sqlite3.Row]) -> None:
        first, folds = rows[0], len(rows)
        number = first["number"] // folds
        line = self.lines.get(number)
        if line is None:
            config = flatten(strip_study(decode(first["config"])))
            line = self.lines[number] = Line(number, config)
            line.first = 0 if first["parent_epoch"] is None else first["parent_epoch"] + 1
        statuses = [str(row["status"]) for row in rows]
        order = ("running", "paused", "waiting", "failed", "diverged", "stopped")
        parent = first["parent"]
        began = [row["began"] for row in rows if row["began"] is not None]
        ended = [row["ended"] for row in rows]
        now = {
            "status": next((s for s in order if s in statuses), "finished"),
            "target": first["epochs"],
            "parent": None if parent is None else parent // folds,
            "after": None if first["parent_epoch"] is None else first["parent_epoch"] + 1,
            "origin": first["origin"],
            "error": next((row["error"] for row in rows if row["error"]), None),
            "began": min(began, default=None),
            "ended": None if None in ended else max(ended),
        }
        if now != line.row:
            line.row, line.changed = now, self.tick

    def _read_units(self, connection: sqlite3.Connection) -> None:
        folds, last = self.folds, self._last["units"]
        check_rows(connection, "units", where=f"id > {last}")
        for row in connection.execute(
            "SELECT id, trial, epoch, worker, started, seconds, hopped, part FROM units "
            "WHERE id > ? ORDER BY id",
            (last,),
        ):
            identity, trial, epoch, worker, started, seconds, hopped, part = row
            end = started + seconds
            line = self.lines.get(trial // folds)
            if line is not None:
                line.ends[epoch] = max(end, line.ends.get(epoch, 0.0))
            unit = [trial // folds, epoch, worker, round(started, 4), round(end, 4), int(part < 0)]
            self.units.append((self.tick, unit))
            self.totals["units"] += 1
            self.totals["hops"] += bool(hopped)
            self.totals["workers"] = max(self.totals["workers"], worker + 1)
            self.clock = max(self.clock, end)
            self._last["units"] = identity

    def _read_metrics(self, connection: sqlite3.Connection) -> None:
        folds, last = self.folds, self._last["metrics"]
        check_rows(connection, "metrics", where=f"rowid > {last}")
        ranking = tuple(self._meta["settings"][name] for name in ("metric", "mode", "select"))
        found: dict[tuple[int, int], dict[str, float]] = {}
        for rowid, trial, epoch, name, value in connection.execute(
            "SELECT rowid, trial, epoch, name, value FROM metrics WHERE rowid > ? ORDER BY rowid",
            (last,),
        ):
            found.setdefault((trial, epoch), {})[name] = math.nan if value is None else value
            self._last["metrics"] = rowid
        touched, replaced = dict[int, Line](), False
        for (trial, epoch), values in found.items():
            line = self.lines.get(trial // folds)
            if folds > 1:
                values = self._join_folds(trial, epoch, values)
            if line is not None and values:
                replaced |= not line.add(epoch, values, self.tick)
                touched[line.number] = line
        for line in touched.values():
            line.rank(*ranking)
        if replaced:  # readers have other values: they get everything again
            self.replaced += 1

    def _join_folds(self, trial: int, epoch: int, values: dict[str, float]) -> dict[str, float]:
        """Return the means once all folds have the epoch; until then nothing."""
        folds = self.folds
        parts = self._parts.setdefault((trial // folds, epoch), {})
        parts[trial % folds] = values
        if len(parts) < folds:
            return {}
        means: dict[str, float] = {}
        for name in parts[0]:
            column = [parts[fold][name] for fold in range(folds) if name in parts[fold]]
            if len(column) == folds:
                means[name], means[name + STD] = mean_and_std(column)
        return means

    def _read_events(self, connection: sqlite3.Connection) -> None:
        folds = self.folds
        check_rows(connection, "events", where=f"id > {self._last['events']}")
        for identity, when, kind, trial, text in connection.execute(
            "SELECT id, time, kind, trial, text FROM events WHERE id > ? ORDER BY id",
            (self._last["events"],),
        ):
            number = None if trial is None else trial // folds
            self.events.append((self.tick, [when, kind, number, text[:MAX_TEXT]]))
            self.clock = max(self.clock, when)
            self._last["events"] = identity
        for row in connection.execute(
            "SELECT id, time, verb, trial, child, epoch, changes, epochs, sender, outcome "
            "FROM actions WHERE id > ? ORDER BY id",
            (self._last["actions"],),
        ):
            action = dict(row)
            self._last["actions"] = action.pop("id")
            for name in ("trial", "child"):
                if action[name] is not None:
                    action[name] //= folds
            changes = decode(action["changes"] or "{}")
            action["changes"] = plain(flatten(changes)) if isinstance(changes, dict) else {}
            action["outcome"] = str(action["outcome"])[:MAX_TEXT]
            self.actions.append((self.tick, action))


def last_rows(connection: sqlite3.Connection) -> tuple[int, ...]:
    """Return the last row of each table that only grows while one process trains the run."""
    columns = {"metrics": "rowid", "units": "id", "events": "id", "actions": "id"}
    return tuple(
        connection.execute(f"SELECT coalesce(max({column}), 0) FROM {table}").fetchone()[0]
        for table, column in columns.items()
    )


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as JSON has them; long text is cut."""
    return {name[:MAX_TEXT]: _plain_value(value) for name, value in config.items()}


def _plain_value(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int)):
        return value if not isinstance(value, int) or abs(value) < 2**53 else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value)[:MAX_TEXT] if not isinstance(value, str) else value[:MAX_TEXT]
