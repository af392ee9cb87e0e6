"""Show the progress of a run: a live table in a terminal, plain lines elsewhere.

The search calls :meth:`Progress.update` for every event, up to thousands of times per second. Each
display decides how often it draws. There are no threads or timers.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from cerebro.errors import InputError
from cerebro.report import format as fmt
from cerebro.report.snapshot import Snapshot, TrialRow

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

MAX_ROWS = 12
DRAW_SECONDS = 0.2
CONFIG_WIDTH = 40  # of the configuration column, at most

# live trials
LIVE = ("running", "waiting", "paused")
COLOURS = {
    "running": "cyan",
    "waiting": "default",
    "paused": "yellow",
    "stopped": "yellow",
    "finished": "green",
    "diverged": "red",
    "failed": "red",
}


class Progress(Protocol):
    """A display of a search's progress."""

    def run_started(self, snapshot: Snapshot) -> None:
        """Report the start of the run."""

    def update(self, snapshot: Snapshot) -> None:
        """Report changes; called for every event."""

    def finished(self, snapshot: Snapshot, result: Any) -> None:
        """Report the end of the run."""

    def close(self) -> None:
        """Restore the terminal, also after an error; may be called more than once."""


class Silent:
    """Shows nothing."""

    def run_started(self, snapshot: Snapshot) -> None:
        """Do nothing."""

    def update(self, snapshot: Snapshot) -> None:
        """Do nothing."""

    def finished(self, snapshot: Snapshot, result: Any) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


def make_progress(kind: str | bool = "auto", *, stream: TextIO | None = None) -> Progress:
    """Return the display for `kind`.

    Parameters
    ----------
    kind
        ``"auto"`` (a table where `stream` is a terminal, else lines), ``"table"``,
        ``"lines"``, or False for nothing.
    stream
        The stream to write to; None: standard output.

    Raises
    ------
    InputError
        If `kind` is none of these.
    """
    if kind is False or kind is None:
        return Silent()
    if kind is True:
        kind = "auto"
    if kind not in ("auto", "table", "lines"):
        raise InputError(f"progress={kind!r}: must be 'auto', 'table', 'lines' or False")
    out = sys.stdout if stream is None else stream
    if kind == "auto":
        terminal = out.isatty() and os.environ.get("TERM") != "dumb"
        kind = "table" if terminal else "lines"
    return Table(out) if kind == "table" else Lines(out)


class Lines:
    """Writes a line when a trial finishes an epoch or ends for a different reason.

    Epochs that a trial finishes between two updates share a line. It shows the metrics of the
    last epoch and, if different, those of the best epoch, which represents the trial.

    Parameters
    ----------
    stream
        The stream to write to; flushed after each line, so that logs are current.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._epochs: dict[int, int] = {}
        self._status: dict[int, str] = {}
        self._resting = False

    def run_started(self, snapshot: Snapshot) -> None:
        """Write the run's folder and the number of workers."""
        self._remember(snapshot)  # do not report trials of an earlier part of the run
        where = f", kept in {snapshot.path}" if snapshot.path else ""
        self._write(f"started with {_workers(snapshot.workers)}{where}")

    def update(self, snapshot: Snapshot) -> None:
        """Write all changes since the last call."""
        columns: list[str] | None = None
        for row in snapshot.trials:
            if row.epoch > self._epochs.get(row.number, 0):
                if columns is None:
                    columns = fmt.metric_columns(
                        (t.metrics for t in snapshot.trials), snapshot.metric
                    )
                self._write(self._epoch_line(snapshot, row, columns))
            is_new = row.status != self._status.get(row.number)
            if is_new and row.status in ("failed", "diverged", "stopped"):
                self._write(self._end_line(snapshot, row))
        self._remember(snapshot)
        if snapshot.resting != self._resting:
            self._resting = snapshot.resting
            self._write(f"{snapshot.share_done:4.0%}: {_rest(snapshot)}")

    def finished(self, snapshot: Snapshot, result: Any) -> None:
        """Write how the run ended."""
        self.update(snapshot)
        self._write(closing(snapshot))

    def close(self) -> None:
        """Do nothing: every line is complete."""

    def _remember(self, snapshot: Snapshot) -> None:
        """Remember the reported trials; forget those that the snapshot leaves out for good."""
        self._epochs = {row.number: row.epoch for row in snapshot.trials}
        self._status = {row.number: row.status for row in snapshot.trials}

    def _epoch_line(self, snapshot: Snapshot, row: TrialRow, columns: Sequence[str]) -> str:
        values = "".join(
            f"  {fmt.heading(name)} {fmt.metric(fmt.metric_value(row.last or row.metrics, name))}"
            for name in columns
        )
        if row.best_at not in (None, row.epoch):
            best = fmt.metric(fmt.metric_value(row.metrics, snapshot.metric))
            name = fmt.heading(snapshot.metric)
            values += f"  best {name} {best} after {fmt.counted(row.best_at or 0, 'epoch')}"
        rate = f"  {row.rows_per_second:,.0f} rows/s" if row.rows_per_second else ""
        left = f", {fmt.about(snapshot.seconds_left)} left" if snapshot.seconds_left else ""
        return (
            f"{snapshot.share_done:4.0%}{left}: trial {row.number} epoch {row.epoch}/{row.epochs}"
            f"{values}{rate}"
        )

    def _end_line(self, snapshot: Snapshot, row: TrialRow) -> str:
        cause = f": {row.error}" if row.error else ""
        return f"{snapshot.share_done:4.0%}: trial {row.number} {row.status}{cause}"

    def _write(self, line: str) -> None:
        print(line, file=self._stream, flush=True)


class Table:
    """Redraws one table in place, at most five times a second.

    Parameters
    ----------
    stream
        The terminal.
    clock
        Returns seconds; tests pass their own clock.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console
        from rich.live import Live

        width = None if stream.isatty() else shutil.get_terminal_size().columns
        self._console = Console(file=stream, width=width, force_terminal=True, highlight=False)
        self._live = Live(
            console=self._console,
            auto_refresh=False,  # no thread: updates draw
            redirect_stdout=stream is sys.stdout,
            redirect_stderr=stream is sys.stdout,
            vertical_overflow="crop",
        )
        self._clock = clock
        self._drawn = float("-inf")

    def run_started(self, snapshot: Snapshot) -> None:
        """Begin to draw."""
        self._live.start()
        self._draw(snapshot)

    def update(self, snapshot: Snapshot) -> None:
        """Draw, unless the last drawing was a moment ago and the next will come soon."""
        if snapshot.resting or self._clock() - self._drawn >= DRAW_SECONDS:
            self._draw(snapshot)

    def finished(self, snapshot: Snapshot, result: Any) -> None:
        """Draw the final state, which stays on the screen."""
        try:
            self._draw(snapshot)
        finally:
            self.close()
        self._console.print(closing(snapshot), soft_wrap=True)

    def close(self) -> None:
        """Stop drawing and show the cursor again."""
        self._live.stop()

    def _draw(self, snapshot: Snapshot) -> None:
        self._drawn = self._clock()
        rows = min(MAX_ROWS, max(3, self._console.size.height - 6))
        self._live.update(picture(snapshot, self._console, rows), refresh=True)


def picture(snapshot: Snapshot, console: Console, max_rows: int = MAX_ROWS) -> RenderableType:
    """Lay out the table and the line below it for the console's width."""
    from rich.console import Group
    from rich.text import Text

    shown = choose_rows(snapshot, max_rows)
    hidden = len(snapshot.trials) + sum(snapshot.more.values()) - len(shown)
    parts: list[RenderableType] = [_table(snapshot, shown, console.width)]
    if hidden:
        parts.append(Text(f" and {hidden} more trial{'s' if hidden > 1 else ''}", style="dim"))
    parts.append(_status_line(snapshot, console.width))
    return Group(*parts)


def choose_rows(snapshot: Snapshot, max_rows: int = MAX_ROWS) -> list[TrialRow]:
    """Choose the trials worth a row: the best, those on a worker, other live ones, then by rank."""
    sign = -1.0 if snapshot.mode == "max" else 1.0

    def rank(row: TrialRow) -> float:
        value = fmt.metric_value(row.metrics, snapshot.metric)
        return float("inf") if value is None or value != value else sign * value

    def key(row: TrialRow) -> tuple[bool, bool, bool, float, int]:
        return (
            row.number != snapshot.best,
            row.worker is None,
            row.status not in LIVE,
            rank(row),
            row.number,
        )

    chosen = sorted(snapshot.trials, key=key)[:max_rows]
    over = all(row.status not in LIVE for row in snapshot.trials)
    return sorted(chosen, key=lambda row: (rank(row), row.number) if over else (0.0, row.number))


def _table(snapshot: Snapshot, rows: Sequence[TrialRow], width: int) -> RenderableType:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    columns = fmt.metric_columns((t.metrics for t in snapshot.trials), snapshot.metric)
    table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, header_style="dim", border_style="dim")
    table.add_column("trial", justify="right", no_wrap=True)
    table.add_column("state", no_wrap=True)
    table.add_column("epoch", justify="right", no_wrap=True)
    for name in columns:
        table.add_column(fmt.heading(name), justify="right", no_wrap=True)
    shows_best = any(row.best_at is not None for row in rows)
    if shows_best:
        table.add_column(fmt.BEST_AT, justify="right", no_wrap=True)
    table.add_column("rows/s", justify="right", no_wrap=True)
    table.add_column("worker", justify="right", no_wrap=True)
    room = min(CONFIG_WIDTH, width - 43 - 9 * shows_best - 13 * len(columns))
    if room >= 12:
        table.add_column("configuration", no_wrap=True)
    for row in rows:
        best = row.number == snapshot.best
        cells: list[RenderableType] = [
            f"{'★ ' if best else ''}{row.number}",
            Text(row.status, style=COLOURS.get(row.status, "default")),
            f"{row.epoch}/{row.epochs}",
            *(fmt.metric(fmt.metric_value(row.metrics, name)) for name in columns),
            *(["-" if row.best_at is None else str(row.best_at)] if shows_best else []),
            f"{row.rows_per_second:,.0f}" if row.rows_per_second else "-",
            "-" if row.worker is None else str(row.worker),
        ]
        if room >= 12:
            cells.append(Text(fmt.settings(row.config, room), style="dim"))
        table.add_row(*cells, style="bold" if best else None)
    return table


def _status_line(snapshot: Snapshot, width: int) -> RenderableType:
    from rich.text import Text

    length = max(10, min(30, width - 70))
    full = round(length * min(max(snapshot.share_done, 0.0), 1.0))
    text = Text(" ")
    text.append("━" * full, style="cyan")
    text.append("━" * (length - full), style="bright_black")
    text.append(f" {snapshot.share_done:4.0%} done", style="bold")
    text.append(f"   {fmt.about(snapshot.seconds)} so far")
    if snapshot.seconds_left:
        text.append(f", {fmt.about(snapshot.seconds_left)} left")
    text.append(f"   {_workers(snapshot.workers)} {snapshot.busy:.0%} busy")
    if snapshot.paused:
        text.append("   paused" if snapshot.resting else "   pausing", style=COLOURS["paused"])
    return text


def closing(snapshot: Snapshot) -> str:
    """Describe in one line how a run ended."""
    counts = Counter(row.status for row in snapshot.trials)
    counts.update(snapshot.more)
    states = ", ".join(f"{n} {status}" for status, n in counts.items()) or "no trials"
    text = (
        f"{states} after {fmt.duration(snapshot.seconds)}; "
        f"{_workers(snapshot.workers)} {snapshot.busy:.0%} busy"
    )
    best = next((row for row in snapshot.trials if row.number == snapshot.best), None)
    if best is None:
        return text
    value = fmt.metric_value(best.metrics, snapshot.metric)
    alike = [
        r.number for r in snapshot.trials if fmt.metric_value(r.metrics, snapshot.metric) == value
    ]
    tie = fmt.tie(alike)
    return f"{text}; best: trial {best.number}{tie and f' ({tie})'}"


def _rest(snapshot: Snapshot) -> str:
    if not snapshot.resting:
        return "continued"
    return f"paused; to continue: python -m cerebro continue {shlex.quote(snapshot.path)}"


def _workers(count: int) -> str:
    if count == 0:
        return "no worker process"
    return f"{count} worker{'s' if count > 1 else ''}"
