"""Read what a page shows of a run from its store, a little at each poll.

A `View` keeps the curves of all trials in compact arrays and reads only rows that are new. Each
reading that finds something is a *tick*; an answer has what changed after the tick in the reader's
cursor, for the trials that the page shows: the best, those that are open, and those it asks for.
Nothing here opens the store if its files have not changed, and no answer is made while it is open.
"""

from __future__ import annotations

import bisect
import math
import sqlite3
import time
from array import array
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cerebro.machine.files import is_network_file_system
from cerebro.machine.mappings import flatten
from cerebro.report import format as fmt
from cerebro.report.plots.settings import explained_variance
from cerebro.run.owner import owner_of
from cerebro.run.records import OPEN, STD, mean_and_std, strip_study
from cerebro.run.store import check_meta, check_rows, read_meta, reader
from cerebro.run.store.schema import FILE, decode
from cerebro.space import Space

PAGE = 200
"""The trials that an answer has besides the open ones and those the page asks for."""

MAX_UNITS = 2000
MAX_EVENTS = 500
MAX_TEXT = 400
"""The most characters of an error, event or setting in an answer; the whole is on request."""

MAX_SETTINGS = 40
POLL_SECONDS = 1.0
NETWORK_SECONDS = 5.0
"""The least time between two readings; on a network disk, readers and the writer exclude each
other.
"""
OWNER_SECONDS = 3.0
"""How often to look whether the process that trains the run lives."""

IMPORTANCE_SECONDS = 5.0


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


class View:
    """What a page shows of one run. Not for several threads at once; raises as `reader` does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta: dict[str, Any] = {}
        self.lines: dict[int, Line] = {}
        self.status = "unknown"
        self._pause = NETWORK_SECONDS if is_network_file_system(folder) else POLL_SECONDS
        self._read_at = -math.inf
        self._asked_owner = -math.inf
        self._signature: Any = None
        self._forget()

    def _forget(self) -> None:
        """Start afresh, as for a run that has been resumed: rows may have been replaced."""
        self.lines = {}
        self._tick = 0
        self._last = Counter[str]()  # the last row read, by table
        self._parts: dict[tuple[int, int], dict[int, dict[str, float]]] = {}
        self._units: deque[tuple[int, list[Any]]] = deque(maxlen=MAX_UNITS)
        self._events: deque[tuple[int, list[Any]]] = deque(maxlen=MAX_EVENTS)
        self._actions: deque[tuple[int, dict[str, Any]]] = deque(maxlen=MAX_EVENTS)
        self._totals = Counter[str]()
        self._clock = 0.0
        self._lag = math.inf
        self._shown: dict[Any, dict[int, int]] = {}
        self._importance: tuple[float, int, list[dict[str, Any]]] = (-math.inf, -1, [])

    # --- reading -----------------------------------------------------------

    def refresh(self, *, now: float | None = None) -> bool:
        """Read what is new, unless the last reading was just now; return whether anything was."""
        now = time.monotonic() if now is None else now
        if now - self._read_at < self._pause:
            return False
        signature = sign(self.folder)
        if signature == self._signature and not self._owner_may_be_gone(now):
            self._read_at = now
            return False
        with reader(self.folder) as connection:
            meta = read_meta(connection)
            check_meta(meta)
            mark = (meta["id"], meta.get("owner"), *_last_rows(connection))
            if self._is_other_run(mark):
                self._forget()
            self._mark, self.meta = mark, meta
            self._tick += 1
            self._read_trials(connection)
            self._read_units(connection)
            self._read_metrics(connection)
            self._read_events(connection)
        self._signature, self._read_at = signature, now  # after an error, the next poll reads again
        self._set_status(now)
        return True

    def _is_other_run(self, mark: tuple[Any, ...]) -> bool:
        before = getattr(self, "_mark", None)
        if before is None or before[:2] != mark[:2]:
            return before is not None
        return any(now < then for now, then in zip(mark[2:], before[2:], strict=True))

    def _owner_may_be_gone(self, now: float) -> bool:
        """Return whether the run's process has ended without saying so in the store."""
        if self.meta.get("status") != "running" or now - self._asked_owner < OWNER_SECONDS:
            return False
        self._asked_owner = now
        return (owner_of(self.folder) is None) != (self.status == "interrupted")

    def _set_status(self, now: float) -> None:
        self.status = str(self.meta["status"])
        if self.status != "running":
            return
        self._asked_owner = now
        if owner_of(self.folder) is None:
            self.status = "interrupted"
        elif self.meta.get("paused"):
            self.status = "paused"

    @property
    def folds(self) -> int:
        folds = self.meta["folds"]
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
            line.row, line.changed = now, self._tick

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
            self._units.append((self._tick, unit))
            self._totals["units"] += 1
            self._totals["hops"] += bool(hopped)
            self._totals["workers"] = max(self._totals["workers"], worker + 1)
            self._clock = max(self._clock, end)
            self._last["units"] = identity

    def _read_metrics(self, connection: sqlite3.Connection) -> None:
        folds, last = self.folds, self._last["metrics"]
        check_rows(connection, "metrics", where=f"rowid > {last}")
        ranking = tuple(self.meta["settings"][name] for name in ("metric", "mode", "select"))
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
                replaced |= not line.add(epoch, values, self._tick)
                touched[line.number] = line
        for line in touched.values():
            line.rank(*ranking)
        if replaced:  # readers have other values: they get everything again
            self._generation += 1

    _generation = 0

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
            self._events.append((self._tick, [when, kind, number, text[:MAX_TEXT]]))
            self._clock = max(self._clock, when)
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
            action["changes"] = _plain(flatten(changes)) if isinstance(changes, dict) else {}
            action["outcome"] = str(action["outcome"])[:MAX_TEXT]
            self._actions.append((self._tick, action))

    # --- answers -----------------------------------------------------------

    @property
    def cursor(self) -> str:
        """Where a reader is who has seen everything."""
        return f"{str(self.meta['id'])[:8]}.{self._generation}.{self._tick}"

    def is_known(self, after: str) -> bool:
        """Return whether a reader with this cursor has seen everything."""
        return after == self.cursor

    def answer(
        self, after: str = "", page: int = 0, pins: Iterable[int] = (), size: int = PAGE
    ) -> dict[str, Any]:
        """Return what has changed after a cursor, or everything if the cursor is not of this view.

        `page` says which of the ranked trials are wanted, `size` at a time; `pins` are further
        trials. Numbers that JSON lacks are None.
        """
        pins = tuple(sorted({number for number in pins if number in self.lines})[:PAGE])
        begin = f"{str(self.meta['id'])[:8]}.{self._generation}."
        tick = after.removeprefix(begin) if after.startswith(begin) else ""
        known = int(tick) if tick.isdecimal() and len(tick) < 16 and int(tick) <= self._tick else 0
        ranked = self.rank()
        shown = self._choose((page, pins, size), ranked)
        trials = [
            self._describe(self.lines[number], 0 if entered > known else known)
            for number, entered in shown.items()
            if entered > known or self.lines[number].changed > known
        ]
        return {
            "cursor": self.cursor,
            "full": not known,
            "run": self.describe_run(ranked),
            "shown": list(shown),
            "trials": trials,
            "units": [unit for tick, unit in self._units if tick > known],
            "events": [event for tick, event in self._events if tick > known],
            "actions": [action for tick, action in self._actions if tick > known],
            "importance": self._weigh(ranked),
        }

    @property
    def now(self) -> float:
        """The run's clock, in seconds since its start without interruptions."""
        if self.status not in ("running", "paused"):
            return self._clock
        # The clock stood at the last unit's end when this was written, or a little later.
        self._lag = min(self._lag, time.time() - self._clock)
        return time.time() - self._lag

    def rank(self) -> list[int]:
        """Return the numbers of the trials that have the metric, best first."""
        sign = 1 if self.meta["settings"]["mode"] == "min" else -1
        valued = [
            (sign * line.value, n) for n, line in self.lines.items() if line.value is not None
        ]
        return [number for _, number in sorted(valued)]

    def _choose(self, wanted: tuple[int, Any, int], ranked: Sequence[int]) -> dict[int, int]:
        """Return the trials to show, and since which tick this selection has each of them."""
        page, pins, size = wanted
        chosen = dict.fromkeys([*ranked[:5], *ranked[page * size : (page + 1) * size]])
        others = [n for n, line in self.lines.items() if line.is_open]
        chosen |= dict.fromkeys([*others[: 2 * size], *pins])
        if len(self.lines) <= size:
            chosen |= dict.fromkeys(self.lines)
        elif page >= len(ranked) // size:  # after those with a metric come those without
            rest = [n for n, line in self.lines.items() if line.value is None]
            begin = max(0, page * size - len(ranked))
            chosen |= dict.fromkeys(rest[begin : begin + size])
        before = self._shown.pop(wanted, {})
        if len(self._shown) > 16:
            self._shown.pop(next(iter(self._shown)))
        since = {number: before.get(number, self._tick) for number in sorted(chosen)}
        self._shown[wanted] = since
        return since

    def _describe(self, line: Line, known: int) -> dict[str, Any]:
        """Return a trial's row and the epochs read after the tick `known`."""
        begin = bisect.bisect_right(line.ticks, known)
        count = len(line.ticks)
        row = dict(line.row)
        if row["error"]:
            row["error"] = str(row["error"])[:MAX_TEXT]
        if self.status == "interrupted" and line.is_open:
            row["status"] = "stopped"
        return {
            "n": line.number,
            **row,
            "config": _plain(line.config),
            "done": line.first + count,
            "value": _finite(line.value),
            "best": line.best_epoch,
            "from": line.first + begin,
            "times": [_round(line.ends.get(line.first + i)) for i in range(begin, count)],
            "curves": {
                name: [_finite(value) for value in curve[begin:]]
                for name, curve in line.curves.items()
            },
        }

    def describe_run(self, ranked: Sequence[int]) -> dict[str, Any]:
        """Return what is true of the run as a whole."""
        meta, settings = self.meta, self.meta["settings"]
        counts = Counter(line.row["status"] for line in self.lines.values())
        if self.status == "interrupted":
            counts["stopped"] += sum(counts.pop(status, 0) for status in OPEN)
        done, goal = self._count_epochs()
        now = self.now
        live = self.status in ("running", "paused")
        limit = settings.get("time_limit")
        share = min(1.0, done / goal) if goal else None
        left = None if not (live and share) else now * (1 - share) / share
        if live and limit:
            share = max(share or 0.0, min(1.0, now / limit))
            left = max(0.0, limit - now) if left is None else min(left, max(0.0, limit - now))
        return {
            "path": str(self.folder),
            "name": self.folder.name,
            "status": self.status,
            "error": None if meta.get("error") is None else str(meta["error"])[:MAX_TEXT],
            "metric": settings["metric"],
            "mode": settings["mode"],
            "select": settings["select"],
            "adaptive": meta["searcher_class"]["adaptive"],
            "metrics": self._list_metrics(),
            "settings": self._list_settings(),
            "space": self._describe_space(),
            "epochs": settings["epochs"],
            "folds": self.folds,
            "started": meta.get("started"),
            "now": round(now, 3),
            "live": live,
            "counts": {status: n for status, n in counts.items() if n},
            "trials": len(self.lines),
            "best": ranked[0] if ranked else None,
            "ranked": len(ranked),
            "share": 1.0 if self.status == "finished" else share,
            "left": _finite(left),
            "units": self._totals["units"],
            "hops": self._totals["hops"],
            "workers": self._totals["workers"],
        }

    def _count_epochs(self) -> tuple[int, int]:
        """Return how many epochs are done, and how many there will be; 0: not known yet."""
        settings = self.meta["settings"]
        done = goal = begun = 0
        for line in self.lines.values():
            done += len(line.ticks)
            begun += line.row["origin"] == "searcher"
            goal += max(0, line.row["target"] - line.first) if line.is_open else len(line.ticks)
        missing = (settings.get("n_trials") or begun) - begun
        if self.meta["searcher_class"]["adaptive"] and self.status not in ("finished", "stopped"):
            return done, 0 if missing > 0 else goal
        return done, goal + max(0, missing) * settings["epochs"]

    def _list_metrics(self) -> list[str]:
        """List the metrics: first the one that ranks, without short names of those in full."""
        seen = dict.fromkeys(name for line in self.lines.values() for name in line.curves)
        ranks = str(self.meta["settings"]["metric"])
        others = [n for n in fmt.full_names(seen) if n not in (ranks, f"val_{ranks}")]
        return [ranks, *others] if seen else []

    def _list_settings(self) -> list[str]:
        """List the settings that differ, in the order of the space; without any, all."""
        if self._names[0] != len(self.lines):
            configs = [line.config for line in self.lines.values()]
            self._names = len(self.lines), fmt.choose_settings(configs)[:MAX_SETTINGS]
        return self._names[1]

    _names: tuple[int, list[str]] = (-1, [])

    def _describe_space(self) -> dict[str, str]:
        if self._space is None:
            try:
                lines = Space.from_json(self.meta["space"]).describe().splitlines()
            except Exception:  # a part of it was not recorded
                lines = []
            parts = (line.partition("  ") for line in lines)
            self._space = {name.strip(): text.strip()[:MAX_TEXT] for name, _, text in parts}
        return self._space

    _space: dict[str, str] | None = None

    def _weigh(self, ranked: Sequence[int]) -> list[dict[str, Any]]:
        """Return how much of the metric's variance each setting alone explains."""
        when, count, found = self._importance
        now = time.monotonic()
        stays = self.status not in ("running", "paused") and count == self._tick
        if stays or now - when < IMPORTANCE_SECONDS:
            return found
        lines = [self.lines[n] for n in ranked if self.lines[n].row["parent"] is None]
        values = [line.value for line in lines]
        found = []
        for name in self._list_settings():
            column = [line.config.get(name, fmt.ABSENT) for line in lines]
            share = explained_variance(column, values) if len(lines) > 2 else None
            if share is not None:
                parts = (share.share, share.low, share.high, share.by_chance)
                found.append({"name": name, "shares": [round(part, 4) for part in parts]})
        found.sort(key=lambda one: -one["shares"][0])
        self._importance = now, self._tick, found
        return found


def sign(folder: Path) -> tuple[Any, ...]:
    """Return what changes whenever the store is written: sizes and times of its files."""
    found = []
    for name in (FILE, f"{FILE}-wal"):
        try:
            info = (folder / name).lstat()
            found.append((info.st_ino, info.st_size, info.st_mtime_ns))
        except FileNotFoundError:
            found.append((0, 0, 0))
    return tuple(found)


def _last_rows(connection: sqlite3.Connection) -> tuple[int, ...]:
    """Return the last row of each table that only grows while one process trains the run."""
    columns = {"metrics": "rowid", "units": "id", "events": "id", "actions": "id"}
    return tuple(
        connection.execute(f"SELECT coalesce(max({column}), 0) FROM {table}").fetchone()[0]
        for table, column in columns.items()
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as JSON has them; long text is cut."""
    return {name[:MAX_TEXT]: _plain_value(value) for name, value in config.items()}


def _plain_value(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int)):
        return value if not isinstance(value, int) or abs(value) < 2**53 else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return str(value)[:MAX_TEXT] if not isinstance(value, str) else value[:MAX_TEXT]
