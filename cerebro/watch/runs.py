"""Find the runs in a folder, and keep for each what its readers share."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from cerebro.errors import CerebroError, InputError, text_of
from cerebro.machine.files import open_plain
from cerebro.results.result import Result
from cerebro.run.owner import owner_of
from cerebro.run.records import Ranking
from cerebro.run.settings import read_group
from cerebro.run.store import check_meta, read_meta, reader
from cerebro.run.store.schema import FILE
from cerebro.watch import about
from cerebro.watch.view import View, sign

LOG_BYTES = 64 << 10
MAX_RUNS = 1000


class WatchedRun:
    """One run; its readers share one view and, for the same question, one answer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._view = View(folder)
        self._lock = threading.Lock()
        self._answers: dict[Any, bytes] = {}
        self._about: tuple[str, dict[str, Any]] | None = None
        self._summary: tuple[Any, dict[str, Any]] = (None, {})

    def answer(self, after: str, page: int, pins: tuple[int, ...], proofs: dict[int, Any]) -> bytes:
        """Return the answer to a poll as JSON; raise as `cerebro.run.store.reader` does."""
        with self._lock:
            if self._view.refresh():
                self._answers.clear()
            if self._view.is_known(after):
                told = {"cursor": after, "same": True, "now": round(self._view.now, 3)}
                return _encode(told | {"proofs": proofs, "writable": self.is_writable()})
            key = after, page, pins
            if key not in self._answers:
                # One for each moment that a page has seen; more pages than this are rare.
                if len(self._answers) > 32:
                    self._answers.clear()
                self._answers[key] = _encode(self._view.answer(after, page, pins))[:-1]
            more = _encode({"proofs": proofs, "writable": self.is_writable()})
            return self._answers[key] + b"," + more[1:]

    def describe(self) -> dict[str, Any]:
        """Return the run's name and state for the list of runs, without reading its curves."""
        with self._lock:
            signature = sign(self.folder)
            if signature != self._summary[0] or self._summary[1].get("status") == "running":
                self._summary = signature, self._summarize()
            return self._summary[1]

    def _summarize(self) -> dict[str, Any]:
        name, gone = self.folder.name, False
        try:
            for _ in range(2):  # a run without an owner may have ended since it was read
                with reader(self.folder) as connection:
                    meta = read_meta(connection)
                    check_meta(meta)
                    ranking = read_group(Ranking, meta["settings"])
                    (trials,) = connection.execute("SELECT count(*) FROM trials").fetchone()
                gone = meta["status"] == "running" and owner_of(self.folder) is None
                if not gone:
                    break
        except (CerebroError, OSError) as error:
            return {"name": name, "status": "unreadable", "error": text_of(error)}
        return {
            "name": name,
            "status": "interrupted" if gone else meta["status"],
            "metric": ranking.metric,
            "started": meta.get("started"),
            "trials": trials,
        }

    def is_writable(self) -> bool:
        """Return whether this process may send commands to the run."""
        control = self.folder / "control"
        return os.access(control if control.exists() else self.folder, os.W_OK)

    def about(self) -> dict[str, Any]:
        """Return what `cerebro.watch.about` says of the run, once for each state of its store."""
        with self._lock:
            self._view.refresh()
            cursor = self._view.cursor
            if self._about is None or self._about[0] != cursor:
                self._about = cursor, about.describe(Result(self.folder))
            return self._about[1]

    def describe_trial(self, number: int) -> dict[str, Any]:
        """Return a trial's output, traceback and kept states; with folds, those of all folds."""
        with self._lock:
            self._view.refresh()
            folds, line = self._view.rows.folds, self._view.lines.get(number)
        if line is None:
            raise InputError(f"{self.folder} has no trial {number}")
        numbers = range(number * folds, (number + 1) * folds)
        where = f"BETWEEN {numbers[0]} AND {numbers[-1]}"
        with reader(self.folder) as connection:
            errors = connection.execute(
                f"SELECT number, error, traceback FROM trials WHERE number {where}"
            ).fetchall()
            epochs = connection.execute(
                f"SELECT trial, epoch, seconds, state_hash, state_file IS NOT NULL FROM epochs "
                f"WHERE trial {where} ORDER BY trial, epoch"
            ).fetchall()
        kept = [{epoch for trial, epoch, *_, is_kept in epochs if trial == n and is_kept}
                for n in numbers]  # fmt: skip
        logs = [read_tail(self.folder / "trials" / f"{n}.log", LOG_BYTES // folds) for n in numbers]
        last = [row for row in epochs if row[0] == numbers[0]][-1:]
        return {
            "n": number,
            "error": next((str(row[1])[:LOG_BYTES] for row in errors if row[1]), None),
            "traceback": next((str(row[2])[-LOG_BYTES:] for row in errors if row[2]), None),
            "kept": sorted(epoch + 1 for epoch in set.intersection(*kept)),
            "state_hash": str(last[0][3])[:64] if last and folds == 1 else None,
            "seconds": sum(row[2] for row in epochs),
            "log": logs[0] if folds == 1 else "".join(
                f"--- fold {fold} ---\n{log}" for fold, log in enumerate(logs) if log
            ),
        }  # fmt: skip


def read_tail(file: Path, most: int) -> str:
    """Return the end of a file of text, at most so many bytes; empty if there is none or a link."""
    try:
        descriptor = open_plain(file, os.O_RDONLY)
    except (CerebroError, OSError):
        return ""
    with os.fdopen(descriptor, "rb") as opened:
        opened.seek(max(0, os.fstat(descriptor).st_size - most))
        return opened.read(most).decode("utf-8", "replace")


class WatchedRuns:
    """The runs to serve: one run's folder, or all runs in a folder. Raises InputError if neither.

    A run keeps its index while the server lives; new ones are appended.
    """

    def __init__(self, place: Path) -> None:
        if not place.is_dir():
            raise InputError(f"{place}: there is no such folder")
        self._place = place.absolute()
        self._lock = threading.Lock()
        self._runs: list[WatchedRun] = []
        self._is_run = (place / FILE).exists()
        self._scan()

    def __len__(self) -> int:
        return len(self._runs)

    def get(self, index: int) -> WatchedRun | None:
        with self._lock:
            return self._runs[index] if index < len(self._runs) else None

    def describe(self) -> list[dict[str, Any]]:
        """Return the runs as the page lists them, with their indices."""
        self._scan()
        with self._lock:
            runs = list(self._runs)
        return [{"id": index, **run.describe()} for index, run in enumerate(runs)]

    def _scan(self) -> None:
        if self._is_run:
            found = [self._place]
        else:
            found = sorted(file.parent for file in self._place.glob(f"*/{FILE}"))
        with self._lock:
            known = {run.folder for run in self._runs}
            new = [folder for folder in found if folder not in known]
            self._runs += map(WatchedRun, new[: MAX_RUNS - len(known)])


def _encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
