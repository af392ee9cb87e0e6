"""Read what a page shows of a run from its store, a little at each poll.

A `View` keeps the curves of all trials in compact arrays and reads only rows that are new. Each
reading that finds something is a *tick*; an answer has what changed after the tick in the reader's
cursor, for the trials that the page shows: the best, those that are open, and those it asks for.
Nothing here opens the store if its files have not changed, and no answer is made while it is open.
"""

from __future__ import annotations

import bisect
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cerebro.machine.files import is_network_file_system
from cerebro.report import format as fmt
from cerebro.report.plots.settings import explained_variance
from cerebro.run.owner import owner_of
from cerebro.run.records import OPEN
from cerebro.run.store import check_meta, read_meta, reader
from cerebro.run.store.schema import FILE
from cerebro.space import Space
from cerebro.watch.rows import MAX_TEXT, Line, Rows, last_rows, plain

PAGE = 200
"""The trials that an answer has besides the open ones and those the page asks for."""

MAX_UNITS = 2000
BARS = 1000  # of each worker in a run that has ended: units closer than this are joined
MAX_SETTINGS = 40
POLL_SECONDS = 1.0
NETWORK_SECONDS = 5.0
"""The least time between two readings; on a network disk, readers and the writer exclude each
other.
"""
OWNER_SECONDS = 3.0
"""How often to look whether the process that trains the run lives."""

IMPORTANCE_SECONDS = 5.0


class View:
    """What a page shows of one run. Not for several threads at once; raises as `reader` does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.meta: dict[str, Any] = {}
        self.status = "unknown"
        self._pause = NETWORK_SECONDS if is_network_file_system(folder) else POLL_SECONDS
        self._read_at = -math.inf
        self._asked_owner = -math.inf
        self._signature: Any = None
        self._mark: tuple[Any, ...] | None = None
        self._restarts = -1
        self._forget()

    def _forget(self) -> None:
        """Start afresh, as for another run in the folder."""
        self.rows = Rows()
        self._restarts += 1
        self._lag = math.inf
        self._shown: dict[Any, dict[int, int]] = {}
        self._names: tuple[int, list[str]] = (-1, [])
        self._space: dict[str, str] | None = None
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
        self._read()
        self._asked_owner = now
        gone = self.status == "running" and owner_of(self.folder) is None
        if gone:
            self._read()  # the run may have ended meanwhile
        self._signature, self._read_at = signature, now  # after an error, the next poll reads again
        if self.status == "running" and gone:
            self.status = "interrupted"
        elif self.status == "running" and self.meta.get("paused"):
            self.status = "paused"
        return True

    def _read(self) -> None:
        with reader(self.folder) as connection:
            meta = read_meta(connection)
            check_meta(meta)
            mark = (meta["id"], meta.get("owner"), *last_rows(connection))
            if self._is_other_run(mark):
                self._forget()
            self._mark, self.meta, self.status = mark, meta, str(meta["status"])
            self.rows.read(connection, meta)

    def _is_other_run(self, mark: tuple[Any, ...]) -> bool:
        before = self._mark
        if before is None or before[:2] != mark[:2]:
            return before is not None
        return any(now < then for now, then in zip(mark[2:], before[2:], strict=True))

    def _owner_may_be_gone(self, now: float) -> bool:
        """Return whether the run's process has ended without saying so in the store."""
        if self.meta.get("status") != "running" or now - self._asked_owner < OWNER_SECONDS:
            return False
        self._asked_owner = now
        return (owner_of(self.folder) is None) != (self.status == "interrupted")

    @property
    def lines(self) -> dict[int, Line]:
        """The trials by number; with folds, the configurations."""
        return self.rows.lines

    # --- answers -----------------------------------------------------------

    @property
    def cursor(self) -> str:
        """Where a reader is who has seen everything."""
        return f"{self._generation}.{self.rows.tick}"

    @property
    def _generation(self) -> str:
        """What makes a reader's earlier cursors worthless when it changes."""
        return f"{str(self.meta['id'])[:8]}.{self._restarts}.{self.rows.replaced}"

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
        begin = f"{self._generation}."
        tick = after.removeprefix(begin) if after.startswith(begin) else ""
        known = (
            int(tick) if tick.isdecimal() and len(tick) < 16 and int(tick) <= self.rows.tick else 0
        )
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
            "units": self._list_units(known),
            "events": [event for tick, event in self.rows.events if tick > known],
            "actions": [action for tick, action in self.rows.actions if tick > known],
            "importance": self._weigh(ranked),
        }

    @property
    def now(self) -> float:
        """The run's clock, in seconds since its start without interruptions."""
        if self.status not in ("running", "paused"):
            return self.rows.clock
        # The clock stood at the last unit's end when this was written, or a little later.
        self._lag = min(self._lag, time.time() - self.rows.clock)
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
        since = {number: before.get(number, self.rows.tick) for number in sorted(chosen)}
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
            "config": plain(line.config),
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
        share, left = self.forecast()
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
            "folds": self.rows.folds,
            "started": meta.get("started"),
            "now": round(self.now, 3),
            "live": self.is_live,
            "counts": {status: n for status, n in counts.items() if n},
            "trials": len(self.lines),
            "best": ranked[0] if ranked else None,
            "ranked": len(ranked),
            "share": share,
            "left": _finite(left),
            "units": self.rows.totals["units"],
            "hops": self.rows.totals["hops"],
            "workers": self.rows.totals["workers"],
        }

    @property
    def is_live(self) -> bool:
        return self.status in ("running", "paused")

    def forecast(self) -> tuple[float | None, float | None]:
        """Return the finished share of the run, 0 to 1, and the seconds left; None if unknown."""
        if self.status == "finished":
            return 1.0, None
        done, goal = self._count_epochs()
        now, limit = self.now, self.meta["settings"].get("time_limit")
        share = min(1.0, done / goal) if goal else None
        left = None if not (self.is_live and share) else now * (1 - share) / share
        if self.is_live and limit:
            share = max(share or 0.0, min(1.0, now / limit))
            left = max(0.0, limit - now) if left is None else min(left, max(0.0, limit - now))
        return share, left

    def _list_units(self, known: int) -> list[list[Any]]:
        """Return the units read after a tick; of a run that has ended, all of them, joined."""
        new = [unit for tick, unit in self.rows.units if tick > known]
        if known or self.status in ("running", "paused"):
            return new[-MAX_UNITS:]
        least = (self.rows.clock - (new[0][3] if new else 0.0)) / BARS
        joined, last = list[list[Any]](), dict[int, list[Any]]()
        for unit in new:
            trial, _, worker, begin, end, _ = unit
            before = last.get(worker)
            if before is not None and before[0] == trial and begin - before[4] < least:
                before[4] = end
            else:
                joined.append(list(unit))
                last[worker] = joined[-1]
        return joined[-2 * MAX_UNITS :]

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

    def _describe_space(self) -> dict[str, str]:
        if self._space is None:
            try:
                lines = Space.from_json(self.meta["space"]).describe().splitlines()
            except Exception:  # a part of it was not recorded
                lines = []
            parts = (line.partition("  ") for line in lines)
            self._space = {name.strip(): text.strip()[:MAX_TEXT] for name, _, text in parts}
        return self._space

    def _weigh(self, ranked: Sequence[int]) -> list[dict[str, Any]]:
        """Return how much of the metric's variance each setting alone explains."""
        when, count, found = self._importance
        now = time.monotonic()
        stays = self.status not in ("running", "paused") and count == self.rows.tick
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
        self._importance = now, self.rows.tick, found
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


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
