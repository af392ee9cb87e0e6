"""Show the progress of a run as plain lines, and define what all displays share.

The search calls :meth:`Progress.update` for every event, up to thousands of times per second, with
a `Snapshot` of the run. Each display decides how often it draws. There are no threads or timers.
The search does not depend on its display: if a write fails, because of a closed pipe, a lost
terminal or a full disk, a warning says so, and nothing more is written.
"""

from __future__ import annotations

import contextlib
import shlex
import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TextIO

from cerebro.errors import text_of
from cerebro.report import format as fmt

MAX_ROWS = 12
LIVE = ("running", "waiting", "paused")  # the statuses of live trials
FAILED = ("failed", "diverged")


@dataclass(frozen=True, slots=True)
class TrialRow:
    """One trial, as displays show it."""

    number: int
    config: Mapping[str, Any]
    status: str
    epoch: int  # finished epochs
    epochs: int  # to train
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The metrics of the epoch that represents the trial: ``train_*`` and ``val_*``."""
    rows_per_second: float | None = None  # in the last training unit
    worker: int | None = None
    error: str | None = None
    best_at: int | None = None
    """The number of epochs after which the trial was best, with these metrics.

    None before the first epoch, or if the last epoch represents the trial.
    """
    last: Mapping[str, float] = field(default_factory=dict)  # metrics of the last epoch
    history: Sequence[Any] = ()
    """Its finished epochs, which have `metrics`; during training, it grows after the snapshot."""


@dataclass(frozen=True)
class Snapshot:
    """A run at one moment."""

    trials: Sequence[TrialRow]
    """The trials begun so far, by number.

    Of many ended trials, it has only the best, the last failed one, and those that ended since the
    last drawing; of many that wait for their first unit, only the first.
    """
    share_done: float | None
    """The finished share of the work or of the time limit, 0 to 1; None while neither is known."""
    seconds: float  # since the run's start
    seconds_left: float | None  # expected
    busy: float  # the share of the workers' time spent in units, 0 to 1
    workers: int
    best: int | None  # the number of the best trial so far
    metric: str
    mode: str
    path: str = ""
    paused: bool = False  # no unit begins until the run is continued
    waits_for: str = ""  # which trials that the user has paused others wait for
    more: Mapping[str, int] = field(default_factory=dict)  # trials without a row, by status

    @cached_property
    def metric_columns(self) -> list[str]:
        return fmt.metric_columns((row.metrics for row in self.trials), self.metric)

    @property
    def best_row(self) -> TrialRow | None:
        return next((row for row in self.trials if row.number == self.best), None)

    @property
    def resting(self) -> bool:
        """Whether the run is paused and the last units in flight are done."""
        return self.paused and all(row.worker is None for row in self.trials)

    @property
    def pause(self) -> str:
        """Return ``"pausing"``, ``"paused"``, or an empty string if the run is not paused."""
        return "" if not self.paused else "paused" if self.resting else "pausing"

    @property
    def time_left(self) -> str:
        """Write the time left, such as ``"1:05 left"``; empty if unknown."""
        return f"{fmt.rough_duration(self.seconds_left)} left" if self.seconds_left else ""

    def count_trials(self, shown: Iterable[TrialRow] = ()) -> Counter[str]:
        """Count all trials by status, except those `shown`."""
        counts = Counter(row.status for row in self.trials)
        counts.update(self.more)
        counts.subtract(Counter(row.status for row in shown))
        return counts


def is_terminal(stream: Any) -> bool:
    """Return whether a stream is a terminal; it may be closed, or None as in a daemon."""
    try:
        return bool(stream.isatty())
    except (AttributeError, OSError, ValueError):  # ValueError: the stream is closed
        return False


class Output:
    """The stream of a display; `errors` is as for `str.encode`."""

    def __init__(self, stream: TextIO, errors: str = "backslashreplace") -> None:
        self._stream = stream
        self._errors = errors
        self.is_broken = False  # whether a write has failed

    def write(self, text: str) -> None:
        """Write and flush text, unless an earlier write has failed."""
        if self.is_broken:
            return
        encoding = getattr(self._stream, "encoding", None)
        if encoding is not None:
            text = text.encode(encoding, self._errors).decode(encoding)
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            self.is_broken = True
            with contextlib.suppress(OSError, ValueError):  # standard error may be lost as well
                warnings.warn(
                    f"the display failed, so the search continues without it: {text_of(error)}",
                    stacklevel=2,
                )


class Progress:
    """A display of a search's progress; this base class shows nothing."""

    def phase(self, what: str) -> None:
        """Report the beginning of a phase before training, such as ``starting 2 workers``."""

    def advise(self, text: str) -> None:
        """Show, before training, a sentence about what would make the search faster."""

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
        self._waits_for: str = ""

    def phase(self, what: str) -> None:
        self._write(f"{what} ...")

    def advise(self, text: str) -> None:
        self._write(text)

    def run_started(self, snapshot: Snapshot) -> None:
        self._reported = {row.number: row for row in snapshot.trials}  # of an earlier part
        where = f", kept in {snapshot.path}" if snapshot.path else ""
        self._write(f"started with {count_workers(snapshot.workers)}{where}")

    def update(self, snapshot: Snapshot) -> None:
        for row in snapshot.trials:
            before = self._reported.get(row.number)
            if row.epoch > (0 if before is None else before.epoch):
                self._write(_epoch_line(snapshot, row))
            is_new = before is None or row.status != before.status
            if is_new and row.status in (*FAILED, "stopped"):
                cause = f": {row.error}" if row.error else ""
                done = f"{fmt.percent(snapshot.share_done):>4}"
                self._write(f"{done}: trial {row.number} {row.status}{cause}")
        self._reported = {row.number: row for row in snapshot.trials}
        if snapshot.waits_for != self._waits_for:
            self._waits_for = snapshot.waits_for
            if snapshot.waits_for:
                self._write(f"{fmt.percent(snapshot.share_done):>4}: {snapshot.waits_for}")
        if snapshot.resting != self._resting:
            self._resting = snapshot.resting
            to_continue = f"python -m cerebro continue {shlex.quote(snapshot.path)}"
            what = f"paused; to continue: {to_continue}" if snapshot.resting else "continued"
            self._write(f"{fmt.percent(snapshot.share_done):>4}: {what}")

    def finished(self, snapshot: Snapshot, result: Any) -> None:
        self.update(snapshot)
        self._write(describe_end(snapshot))

    def _write(self, line: str) -> None:
        self._output.write(f"{line}\n")


def choose_rows(snapshot: Snapshot, max_rows: int = MAX_ROWS) -> list[TrialRow]:
    """Choose the trials that get a row; sort them by number or, at the end, by rank.

    First comes the best trial, then those on a worker, the last failed one, other live trials, and
    the remaining ones by rank.
    """

    def rank(row: TrialRow) -> float:
        return fmt.rank(fmt.metric_value(row.metrics, snapshot.metric), snapshot.mode)

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


def _epoch_line(snapshot: Snapshot, row: TrialRow) -> str:
    values = "".join(
        f"  {fmt.heading(name)} {fmt.metric(fmt.metric_value(row.last or row.metrics, name))}"
        for name in snapshot.metric_columns
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


def _best_of_others(snapshot: Snapshot, row: TrialRow) -> str:
    best = snapshot.best_row
    if best is None:
        return ""
    if row.number == best.number:
        return "  (best so far)"
    value = fmt.metric(fmt.metric_value(best.metrics, snapshot.metric))
    return f"  (best so far: {value}, trial {best.number})"


def describe_end(snapshot: Snapshot) -> str:
    states = fmt.states(snapshot.count_trials()) or "no trials"
    load = describe_load(snapshot)
    text = f"{states} after {fmt.duration(snapshot.seconds)}{load and f'; {load}'}"
    best = snapshot.best_row
    if best is None:
        return text
    tie = fmt.describe_tie(snapshot.trials, best, snapshot.metric)
    return f"{text}; best: trial {best.number}{tie and f' ({tie})'}"


def count_workers(count: int) -> str:
    return fmt.count_noun(count, "worker") if count else "no worker process"


def describe_load(snapshot: Snapshot) -> str:
    """Return how busy the workers were; empty if none had begun."""
    return f"{count_workers(snapshot.workers)} {snapshot.busy:.0%} busy" if snapshot.workers else ""
