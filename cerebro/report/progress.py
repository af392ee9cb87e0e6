"""Show the progress of a run as plain lines, and define what all displays share.

The search calls :meth:`Progress.update` for every event, up to thousands of times per second. Each
display decides how often it draws. There are no threads or timers.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any, TextIO

from cerebro.report import format as fmt
from cerebro.report.output import Output
from cerebro.report.snapshot import Snapshot, TrialRow

MAX_ROWS = 12
# The statuses of live trials.
LIVE = ("running", "waiting", "paused")
FAILED = ("failed", "diverged")


class Progress:
    """A display of a search's progress; this base class shows nothing."""

    def phase(self, what: str) -> None:
        """Report the beginning of a phase before training, such as ``starting 2 workers``."""

    def run_started(self, snapshot: Snapshot) -> None:
        """Report the start of training."""

    def update(self, snapshot: Snapshot) -> None:
        """Report changes; called for every event."""

    def finished(self, snapshot: Snapshot, result: Any) -> None:
        """Report the end of the run."""

    def ended_early(self, snapshot: Snapshot | None, error: BaseException) -> None:
        """Report that an error or Ctrl-C ends the run; `snapshot` is None before training."""

    def close(self) -> None:
        """Restore the terminal, even after an error; may be called more than once."""


class Silent(Progress):
    """Shows nothing, so that no snapshots are needed."""


class Lines(Progress):
    """Writes a line when a trial finishes epochs, and when it ends for a different reason.

    The line has the metrics of the last epoch and, if a different epoch is the best, its metric.
    The stream is flushed after each line, so that logs are current.
    """

    def __init__(self, stream: TextIO) -> None:
        self._output = Output(stream)
        self._reported: dict[int, TrialRow] = {}  # none that will not appear in a snapshot again
        self._resting = False

    def phase(self, what: str) -> None:
        self._write(f"{what} ...")

    def run_started(self, snapshot: Snapshot) -> None:
        self._reported = {row.number: row for row in snapshot.trials}  # of an earlier part
        where = f", kept in {snapshot.path}" if snapshot.path else ""
        self._write(f"started with {count_workers(snapshot.workers)}{where}")

    def update(self, snapshot: Snapshot) -> None:
        columns: list[str] | None = None
        for row in snapshot.trials:
            before = self._reported.get(row.number)
            if row.epoch > (0 if before is None else before.epoch):
                if columns is None:
                    columns = fmt.metric_columns(
                        (t.metrics for t in snapshot.trials), snapshot.metric
                    )
                self._write(self._epoch_line(snapshot, row, columns))
            is_new = before is None or row.status != before.status
            if is_new and row.status in (*FAILED, "stopped"):
                cause = f": {row.error}" if row.error else ""
                done = f"{fmt.percent(snapshot.share_done):>4}"
                self._write(f"{done}: trial {row.number} {row.status}{cause}")
        self._reported = {row.number: row for row in snapshot.trials}
        if snapshot.resting != self._resting:
            self._resting = snapshot.resting
            to_continue = f"python -m cerebro continue {shlex.quote(snapshot.path)}"
            what = f"paused; to continue: {to_continue}" if snapshot.resting else "continued"
            self._write(f"{fmt.percent(snapshot.share_done):>4}: {what}")

    def finished(self, snapshot: Snapshot, result: Any) -> None:
        self.update(snapshot)
        self._write(describe_end(snapshot))

    def _epoch_line(self, snapshot: Snapshot, row: TrialRow, columns: Sequence[str]) -> str:
        values = "".join(
            f"  {fmt.heading(name)} {fmt.metric(fmt.metric_value(row.last or row.metrics, name))}"
            for name in columns
        )
        if row.best_at not in (None, row.epoch):
            best = fmt.metric(fmt.metric_value(row.metrics, snapshot.metric))
            name = fmt.heading(snapshot.metric)
            values += f"  best {name} {best} after {fmt.count_noun(row.best_at or 0, 'epoch')}"
        rate = f"  {row.rows_per_second:,.0f} rows/s" if row.rows_per_second else ""
        progress = f"{fmt.percent(snapshot.share_done):>4}"
        return (
            f"{', '.join(filter(None, [progress, snapshot.time_left]))}: trial {row.number} epoch "
            f"{row.epoch}/{row.epochs}{values}{rate}{_best_of_others(snapshot, row)}"
        )

    def _write(self, line: str) -> None:
        self._output.write(f"{line}\n")


def choose_rows(snapshot: Snapshot, max_rows: int = MAX_ROWS) -> list[TrialRow]:
    """Choose the trials that get a row; sort them by number or, at the end, by rank.

    First comes the best trial, then those on a worker, the last failed one, other live trials, and
    the remaining ones by rank.
    """
    sign = -1.0 if snapshot.mode == "max" else 1.0

    def rank(row: TrialRow) -> float:
        value = fmt.metric_value(row.metrics, snapshot.metric)
        return float("inf") if value is None or value != value else sign * value

    failed = [row.number for row in snapshot.trials if row.status in FAILED]

    def key(row: TrialRow) -> tuple[bool, bool, bool, bool, float, int]:
        return (
            row.number != snapshot.best,
            row.worker is None,
            row.number not in failed[-1:],
            row.status not in LIVE or not (row.epoch or row.worker is not None),
            rank(row),
            row.number,
        )

    rows = sorted(snapshot.trials, key=key)[:max_rows]
    over = all(row.status not in LIVE for row in snapshot.trials)
    return sorted(rows, key=lambda row: (rank(row), row.number) if over else (0.0, row.number))


def _best_of_others(snapshot: Snapshot, row: TrialRow) -> str:
    if row.number == snapshot.best:
        return "  (best so far)"
    best = next((other for other in snapshot.trials if other.number == snapshot.best), None)
    if best is None:
        return ""
    value = fmt.metric(fmt.metric_value(best.metrics, snapshot.metric))
    return f"  (best so far: {value}, trial {best.number})"


def describe_end(snapshot: Snapshot) -> str:
    states = fmt.states(snapshot.count_trials()) or "no trials"
    load = describe_load(snapshot)
    text = f"{states} after {fmt.duration(snapshot.seconds)}{load and f'; {load}'}"
    best = next((row for row in snapshot.trials if row.number == snapshot.best), None)
    if best is None:
        return text
    value = fmt.metric_value(best.metrics, snapshot.metric)
    alike = [
        r.number for r in snapshot.trials if fmt.metric_value(r.metrics, snapshot.metric) == value
    ]
    tie = fmt.describe_tie(alike)
    return f"{text}; best: trial {best.number}{tie and f' ({tie})'}"


def count_workers(count: int) -> str:
    return fmt.count_noun(count, "worker") if count else "no worker process"


def describe_load(snapshot: Snapshot) -> str:
    """Return how busy the workers were; empty if none had begun."""
    return f"{count_workers(snapshot.workers)} {snapshot.busy:.0%} busy" if snapshot.workers else ""
