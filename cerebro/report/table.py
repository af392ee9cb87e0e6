"""Draw the table that a terminal shows during a search, and redraw it in place.

The table fits the window: rows and the least important columns are omitted, so that it never wraps
or scrolls. It is drawn when the run changes, at most five times a second, and when the window is
resized.

Output that a program prints meanwhile appears above the table (`Region`). The cursor is never
hidden and stays below it, so the terminal remains usable even if SIGKILL ends the process. Each
drawing is one write. When a window becomes narrower, terminals wrap the existing lines; the next
drawing replaces the lines with all their wrapped parts.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from cerebro.errors import escape_unprintable
from cerebro.report import format as fmt
from cerebro.report.progress import (
    FAILED,
    MAX_ROWS,
    Output,
    Progress,
    Snapshot,
    TrialRow,
    choose_rows,
    describe_end,
    describe_load,
    is_terminal,
)

DRAW_SECONDS = 0.2
CONFIG_WIDTH = 40  # the largest width of the configuration column
MIN_CONFIG_WIDTH = 12
GAP = 2  # the terminal's columns between two columns of the table
MAX_HEADING = 12

COLOURS = {
    "running": "cyan",
    **dict.fromkeys(("paused", "stopped", "interrupted"), "yellow"),
    "finished": "green",
    **dict.fromkeys(("diverged", "failed"), "red"),
}


class Table(Progress):
    """Redraws one table in place, at most five times a second; tests pass their own clock."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        # Rich lays out the lines for the terminal's encoding; only the region writes to it.
        captured = io.TextIOWrapper(io.BytesIO(), getattr(stream, "encoding", None) or "utf-8")
        self._console = Console(file=captured, force_terminal=True, highlight=False)
        self._region = Region(stream, lambda: window_size(stream)[0])
        self._clock = clock
        self._drawn = float("-inf")
        self._phases: list[str] = []
        self._picture: Callable[[], RenderableType] | None = None
        self._is_drawing = False
        self._is_over = False
        self._before: Any = None  # the earlier handler of the signal for a resized window

    def phase(self, what: str) -> None:
        self._phases.append(f" {what} ...")

        def phases() -> Text:
            width = self._console.size.width - 1
            starts = [
                at for at in range(len(self._phases)) if len("".join(self._phases[at:])) <= width
            ]
            return Text("".join(self._phases[min(starts, default=-1) :]), style="dim")

        self._show(phases)

    def advise(self, text: str) -> None:
        self._region.print_above(f"{text}\n")

    def run_started(self, snapshot: Snapshot) -> None:
        self._draw(snapshot)

    def update(self, snapshot: Snapshot) -> None:
        """Draw the table, unless it was drawn very recently; draw at once if the run is paused."""
        if snapshot.resting or self._clock() - self._drawn >= DRAW_SECONDS:
            self._draw(snapshot)

    def finished(self, snapshot: Snapshot, result: Any) -> None:
        """Draw the final state, which stays on the screen."""
        self._is_over = True
        try:
            self._draw(snapshot)
        finally:
            self.close()
        self._region.print_above(f"{describe_end(snapshot)}\n")

    def ended_early(self, snapshot: Snapshot | None, error: BaseException) -> None:
        if self._is_over:
            return
        self._is_over = True
        if snapshot is not None:
            interrupted = isinstance(error, KeyboardInterrupt)
            self._draw(snapshot, "interrupted" if interrupted else "failed")

    def close(self) -> None:
        """Stop drawing; the last drawing stays on the screen."""
        self._picture = None
        if self._before is not None:
            signal.signal(signal.SIGWINCH, self._before)
            self._before = None
        self._region.close()

    def _draw(self, snapshot: Snapshot, state: str = "") -> None:
        self._show(lambda: make_picture(snapshot, self._console, state=state))

    def _show(self, make: Callable[[], RenderableType]) -> None:
        self._watch_size()
        self._region.open()
        self._picture = make
        self._redraw()
        self._drawn = self._clock()

    def _redraw(self) -> None:
        """Draw the last picture again, for the current size of the window."""
        if self._is_drawing or self._picture is None or self._region.is_broken:
            return  # drawing: a signal arrived meanwhile
        self._is_drawing = True
        try:
            self._console.size = window_size(self._stream)
            with self._console.capture() as captured:
                self._console.print(self._picture(), overflow="crop", no_wrap=True, crop=True)
            height = max(1, self._console.size.height - 1)
            lines = captured.get().split("\n")[:-1][-height:]  # the last are the most informative
            widths = [Text.from_ansi(line).cell_len for line in lines]
            self._region.draw(lines, widths)
        finally:
            self._is_drawing = False

    def _watch_size(self) -> None:
        """Draw again when the window is resized; only the main thread receives signals."""
        main = threading.current_thread() is threading.main_thread()
        if self._before is not None or not main or not hasattr(signal, "SIGWINCH"):
            return
        before = signal.getsignal(signal.SIGWINCH)
        if before is None:  # a handler that Python could not restore
            return

        def resized(number: int, frame: Any) -> None:
            with contextlib.suppress(Exception):
                self._redraw()
            if callable(before):
                before(number, frame)  # such as the handler of a debugger's line editor

        signal.signal(signal.SIGWINCH, resized)
        signal.siginterrupt(signal.SIGWINCH, False)
        self._before = before


def window_size(stream: TextIO) -> tuple[int, int]:
    """Return the columns and rows of the terminal to which a stream writes."""
    with contextlib.suppress(OSError, ValueError):
        columns, rows = os.get_terminal_size(stream.fileno())
        if columns > 0 and rows > 0:
            return columns, rows
    return shutil.get_terminal_size()


# --- the picture ---------------------------------------------------------------


def make_picture(snapshot: Snapshot, console: Console, state: str = "") -> RenderableType:
    """Lay out the table and the lines below it for the console's size.

    It shows as many trials as fit in the window, up to `MAX_ROWS`. `state` says how the run ended
    early; it is empty if it did not.
    """
    shown = choose_rows(snapshot, min(MAX_ROWS, max(1, console.size.height - 7)))
    hidden = snapshot.count_trials(shown)
    parts: list[RenderableType] = [_make_table(snapshot, shown, console.width)] if shown else []

    def add(text: str, style: str) -> None:
        line = Text(text, style=style)
        line.truncate(console.width - 1, overflow="ellipsis")
        parts.append(line)

    if count := hidden.total():
        some = f" and {count} more {'trials' if count > 1 else 'trial'}: {fmt.states(hidden)}"
        add(some, "dim")
    failed = [row for row in shown if row.status in FAILED and row.error]
    if failed:
        last = failed[-1]
        cause = escape_unprintable(f" trial {last.number} {last.status}: {last.error}")
        add(cause, COLOURS["failed"])
    parts.append(_status_line(snapshot, console.width, state))
    return Group(*parts)


@dataclass
class _Column:
    """A column of the table; in a narrow window, a column with a high rank is omitted first."""

    heading: str
    cells: list[Text]
    rank: int
    left: bool = False

    @property
    def width(self) -> int:
        return max(fmt.width(self.heading), *(cell.cell_len for cell in self.cells))


def _make_columns(snapshot: Snapshot, rows: Sequence[TrialRow]) -> list[_Column]:
    """Return the columns: the metrics of the last epoch, then those of the best epoch."""
    ranked_by = snapshot.metric
    numbers = [Text(f"{'★ ' if row.number == snapshot.best else ''}{row.number}") for row in rows]
    states = [Text(row.status, style=COLOURS.get(row.status, "default")) for row in rows]
    columns = [
        _Column("trial", numbers, 0),
        _Column("state", states, 4, left=True),
        _Column("epoch", [Text(f"{row.epoch}/{row.epochs}") for row in rows], 2),
    ]
    names = snapshot.metric_columns
    key = next((name for name in names if fmt.short_name(name) == fmt.short_name(ranked_by)), None)
    key = f"val_{ranked_by}" if f"val_{ranked_by}" in names else key
    ranks = {"val_loss": 6, "train_loss": 7}
    for name in sorted(names, key=lambda name: name == key):
        heading = fmt.cut_end(fmt.heading(name), MAX_HEADING)
        values = [fmt.metric_value(row.last or row.metrics, name) for row in rows]
        rank = 3 if name == key else ranks.get(name, 8)
        columns.append(_Column(heading, [Text(fmt.metric(value)) for value in values], rank))
    if any(row.best_at is not None for row in rows):
        best = [Text(fmt.metric(fmt.metric_value(row.metrics, ranked_by))) for row in rows]
        at = [Text("-" if row.best_at is None else str(row.best_at)) for row in rows]
        columns += [_Column("best", best, 1), _Column(fmt.BEST_AT, at, 5)]
    rates = [Text(f"{row.rows_per_second:,.0f}" if row.rows_per_second else "-") for row in rows]
    where = [Text("-" if row.worker is None else str(row.worker)) for row in rows]
    return [*columns, _Column("rows/s", rates, 9), _Column("worker", where, 10)]


def _fit_columns(columns: Sequence[_Column], width: int) -> tuple[list[_Column], int]:
    """Return the columns that fit, and the width that remains."""
    fitting: list[_Column] = []
    room = width - 1
    for column in sorted(columns, key=lambda column: column.rank):
        if column.width + GAP * bool(fitting) > room:
            break
        room -= column.width + GAP * bool(fitting)
        fitting.append(column)
    return [column for column in columns if column in fitting], room


def _format_settings(row: TrialRow, width: int) -> Text:
    """Write a configuration in one line of `width` terminal columns."""
    text = Text(" ".join(escape_unprintable(fmt.settings(row.config, width)).split()), style="dim")
    text.truncate(width, overflow="ellipsis")
    return text


def _make_table(snapshot: Snapshot, rows: Sequence[TrialRow], width: int) -> RenderableType:
    columns, room = _fit_columns(_make_columns(snapshot, rows), width)
    if room - GAP >= MIN_CONFIG_WIDTH:
        room = min(CONFIG_WIDTH, room - GAP)
        configs = [_format_settings(row, room) for row in rows]
        columns.append(_Column("configuration", configs, 11, left=True))
    table = RichTable(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0, 0, 1),  # with the divider, a gap of two
        show_edge=False,
        header_style="dim",
        border_style="dim",
    )
    for column in columns:
        justify: Any = "left" if column.left else "right"
        table.add_column(column.heading, justify=justify, no_wrap=True)
    for at, row in enumerate(rows):
        style = "bold" if row.number == snapshot.best else None
        table.add_row(*(column.cells[at] for column in columns), style=style)
    return table


def _status_line(snapshot: Snapshot, width: int, state: str) -> RenderableType:
    """Return the progress bar and as many of the most important figures as fit."""
    length = max(6, min(30, width - 70))
    done = snapshot.share_done
    full = round(length * min(max(done or 0.0, 0.0), 1.0))
    text = Text(" ", no_wrap=True, overflow="crop")
    text.append("━" * full, style="cyan")
    text.append("━" * (length - full), style="bright_black")
    if done is not None:
        text.append(f" {fmt.percent(done):>4} done", style="bold")
    so_far = f"{fmt.rough_duration(snapshot.seconds)} so far"
    remaining = "" if state else snapshot.time_left
    times = f"{so_far}, {remaining}" if remaining else so_far
    if state or snapshot.paused:
        style = COLOURS.get(state or "paused", "default")
        text.append(f"   {state or snapshot.pause}", style=style)
    elif snapshot.waits_for:
        text.append(f"   {snapshot.waits_for}", style=COLOURS.get("paused", "default"))
    for whole, short in ((times, remaining or so_far), (describe_load(snapshot), "")):
        for part in (whole, short):
            if part and text.cell_len + 3 + len(part) < width:
                text.append(f"   {part}")
                break
    return text


# --- lines in place ------------------------------------------------------------

UP, CLEAR_LINE_END, CLEAR_DOWN = "\x1b[{}A", "\x1b[K", "\x1b[J"


class Region(Output):
    """Draws lines in place on a terminal; `columns` returns its current width."""

    def __init__(self, stream: TextIO, columns: Callable[[], int]) -> None:
        super().__init__(stream, "replace")  # each character keeps its place
        self._columns = columns
        self._lines: Sequence[str] = ()
        self._widths: Sequence[int] = ()
        self._replaced: dict[str, tuple[Any, Printed]] = {}

    def open(self) -> None:
        """Show printed output above the lines, if they are written to standard output."""
        if self._stream is not sys.stdout or self._replaced or self.is_broken:
            return
        for name in ("stdout", "stderr"):
            before = getattr(sys, name)
            if name == "stdout" or is_terminal(before):
                self._replaced[name] = before, Printed(before, self)
                setattr(sys, name, self._replaced[name][1])

    def draw(self, lines: Sequence[str], widths: Sequence[int]) -> None:
        """Replace the lines, which may contain escape sequences; `widths` are their columns."""
        text = "".join(f"{line}{CLEAR_LINE_END}\n" for line in lines)
        self.write(f"{self._move_to_top()}{text}{CLEAR_DOWN}")
        self._lines, self._widths = lines, widths

    def print_above(self, text: str) -> None:
        """Write text that ends with a newline above the lines."""
        again = "".join(f"{line}{CLEAR_LINE_END}\n" for line in self._lines)
        self.write(f"{self._move_to_top()}{CLEAR_DOWN}{text}{again}")

    def close(self) -> None:
        """Leave the lines on the screen; later text is written below them."""
        replaced, self._replaced = self._replaced, {}
        for name, (before, printed) in replaced.items():
            if getattr(sys, name) is printed:
                setattr(sys, name, before)
            printed.flush()
        self._lines, self._widths = (), ()

    def _move_to_top(self) -> str:
        """Return the escape sequence that moves from below the lines to the first line."""
        columns = max(1, self._columns())
        rows = sum(-(-max(1, width) // columns) for width in self._widths)
        return "\r" + (UP.format(rows) if rows else "")


class Printed(io.TextIOBase):
    """Replaces a standard stream: passes whole lines on to a region, the rest to the stream."""

    def __init__(self, stream: Any, region: Region) -> None:
        self._stream = stream
        self._region = region
        self._rest = ""

    def write(self, text: str) -> int:
        lines, newline, self._rest = (self._rest + text).rpartition("\n")
        if newline:
            self._pass_on(lines + newline)
        return len(text)

    def flush(self) -> None:
        rest, self._rest = self._rest, ""
        if rest:
            self._pass_on(rest + "\n")

    def _pass_on(self, text: str) -> None:
        if not self._region.is_broken:
            self._region.print_above(text)
            return
        with contextlib.suppress(OSError, ValueError):  # standard error may still be there
            self._stream.write(text)

    def isatty(self) -> bool:
        return bool(self._stream.isatty())

    def fileno(self) -> int:
        return int(self._stream.fileno())

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return str(self._stream.encoding)

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return getattr(self._stream, "errors", None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
