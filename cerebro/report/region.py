"""Redraw lines in place at the bottom of a terminal.

Output that a program prints meanwhile appears above the lines. The cursor is never hidden and stays
below them, so the terminal remains usable even if SIGKILL ends the process. Each drawing is one
write. When a window becomes narrower, terminals wrap the existing lines; the next drawing replaces
the lines with all their wrapped parts.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Sequence
from typing import Any, TextIO

from cerebro.report.output import Output, is_terminal

UP, CLEAR_LINE_END, CLEAR_DOWN = "\x1b[{}A", "\x1b[K", "\x1b[J"


class Region:
    """Draws lines in place on a terminal; `columns` returns its current width."""

    def __init__(self, stream: TextIO, columns: Callable[[], int]) -> None:
        self._stream = stream
        self._output = Output(stream, "replace")  # each character keeps its place
        self._columns = columns
        self._lines: Sequence[str] = ()
        self._widths: Sequence[int] = ()
        self._replaced: dict[str, tuple[Any, Printed]] = {}

    @property
    def is_broken(self) -> bool:
        return self._output.is_broken

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
        self._output.write(f"{self._move_to_top()}{text}{CLEAR_DOWN}")
        self._lines, self._widths = lines, widths

    def print_above(self, text: str) -> None:
        """Write text that ends with a newline above the lines."""
        again = "".join(f"{line}{CLEAR_LINE_END}\n" for line in self._lines)
        self._output.write(f"{self._move_to_top()}{CLEAR_DOWN}{text}{again}")

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
    """Replaces a standard stream: passes whole lines on to a region.

    The replaced stream handles all other requests.
    """

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
