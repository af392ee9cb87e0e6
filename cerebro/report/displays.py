"""Choose how to show a search's progress: a block in a notebook, a table, lines, or nothing."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TextIO, TypeVar

from cerebro.errors import InputError, explain_interrupt
from cerebro.report import format as fmt
from cerebro.report.progress import Lines, Progress, Silent, is_terminal

P = ParamSpec("P")
R = TypeVar("R")


def make_progress(
    kind: str | bool | Progress | None = "auto", *, stream: TextIO | None = None
) -> Progress:
    """Return the display for `kind`; raise InputError if it is invalid.

    ``"auto"`` is a block in a notebook, a table if `stream` is a terminal, else lines; ``"table"``
    is the block in a notebook; False is nothing; and a display is returned unchanged. Without
    `stream`, the display writes to standard output or, in a notebook, to the cell's output.
    """
    if isinstance(kind, Progress):
        return kind
    if kind is False or kind is None:
        return Silent()
    if kind is True:
        kind = "auto"
    if kind not in ("auto", "table", "lines"):
        raise InputError(f"progress={kind!r}: must be 'auto', 'table', 'lines' or False")
    if kind != "lines" and stream is None and in_notebook():
        from cerebro.report.block import Notebook

        return Notebook()
    out = sys.stdout if stream is None else stream
    if out is None or getattr(out, "closed", False):  # as after `>&-` or in pythonw
        return Silent()
    if kind == "auto":
        terminal = is_terminal(out) and os.environ.get("TERM") != "dumb"
        kind = "table" if terminal else "lines"
    if kind == "lines":
        return Lines(out)
    from cerebro.report.table import Table

    return Table(out)


def in_notebook() -> bool:
    """Return whether this process is a notebook kernel, whose output can show HTML."""
    module = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return getattr(shell, "kernel", None) is not None


def shows_progress(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that trains: make its ``progress`` a display, and close the display."""

    @wraps(function)
    def run_with_display(*args: P.args, **kwargs: P.kwargs) -> R:
        kind: Any = kwargs.get("progress", "auto")
        display = kwargs["progress"] = make_progress(kind)
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) and not error.args:
                explain_interrupt(error, ["interrupted before training began"])
            with contextlib.suppress(Exception):
                display.ended_early(None, error)  # no effect if the run itself has reported it
            raise
        finally:
            with contextlib.suppress(Exception):
                display.close()

    return run_with_display


def announce(display: Any, workers: int | None, advice: str | None = None) -> None:
    """Show that workers start, in a display from `shows_progress`; None: an unknown number."""
    if workers != 0:
        count = "workers" if workers is None else fmt.count_noun(workers, "worker")
        more = f" ({advice})" if advice else ""
        display.phase(f"starting {count}{more}")
