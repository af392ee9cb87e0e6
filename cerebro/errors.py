"""Define the exceptions that Cerebro raises.

Invalid arguments raise :class:`InputError`, which is a ``ValueError``; files that cannot be read or
written raise ``OSError``; the other exceptions are below. Each message names the file, the trial or
the argument, and a fix.

Their tracebacks show the user's code, not Cerebro's, because a message with a fix is easily
overlooked below eighty lines of source. This applies to the exceptions in this module and to an
interrupt of a run; an exception of the user's code keeps its whole traceback. With
``CEREBRO_TRACEBACK=1`` in the environment, all of them keep it.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

__all__ = [
    "CerebroError",
    "CorruptDataError",
    "DeviceError",
    "InputError",
    "RunError",
    "StateError",
    "UnitCancelled",
    "WorkerError",
]

MESSAGE_LIMIT = 500

WHOLE_TRACEBACKS = "CEREBRO_TRACEBACK"
"""The environment variable that keeps Cerebro's own frames in tracebacks."""


def one_line(text: str, limit: int = MESSAGE_LIMIT) -> str:
    """Convert text to one printable line of at most about `limit` characters.

    Line breaks become spaces; control characters and lone surrogates, which terminals and stores
    cannot handle, become escapes.
    """
    joined = " ".join(str.__getitem__(text, slice(20 * limit)).split())
    if len(joined) > limit:
        joined = f"{joined[: 2 * limit // 3]} ... {joined[-limit // 3 :]}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in joined)


def escape_unprintable(text: str) -> str:
    """Make text safe to print: unprintable characters, except newlines and tabs, become escapes.

    A store from elsewhere may contain terminal control sequences.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def text_of(error: BaseException, limit: int = MESSAGE_LIMIT) -> str:
    """Return an exception's message as one line, like `one_line`; never raise."""
    try:
        return one_line(str(error), limit)
    except BaseException:  # the exception's __str__ may raise anything
        return "(its text cannot be shown)"


class CerebroError(Exception):
    """Base class of Cerebro's exceptions."""

    def _render_traceback_(self) -> list[str]:
        """Return the lines that IPython shows: the user's code and the message."""
        from IPython import get_ipython

        shorten_traceback(self)
        lines = get_ipython().InteractiveTB.structured_traceback(
            type(self), self, self.__traceback__
        )
        return list(lines)


class InputError(CerebroError, ValueError):
    """An argument, a configuration or a file given by the user is invalid."""


class CorruptDataError(CerebroError):
    """A data file, a state or a manifest does not match its checksum or header."""


class StateError(CerebroError):
    """A model's state cannot be packed, or does not fit the model into which it is loaded."""


class DeviceError(CerebroError):
    """A device or its driver failed."""


class WorkerError(CerebroError):
    """A worker process could not be started, or died and could not be replaced."""


class UnitCancelled(CerebroError):
    """A unit was cancelled; raised inside a worker and never seen by users."""


class RunError(CerebroError):
    """A run stopped because no trial can continue.

    Parameters
    ----------
    message
        The first cause.
    result
        The run's result so far (a `cerebro.Result`); None if it had not begun.
    """

    def __init__(self, message: str, result: Any = None) -> None:
        super().__init__(message)
        self.result = result


# --- tracebacks --------------------------------------------------------------

P = ParamSpec("P")
R = TypeVar("R")

_OURS = str(Path(__file__).parent) + os.sep
_PYTHONS = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib"))
_PACKAGES = tuple(sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib"))


def shorten_tracebacks(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function so that its errors and interrupts have short tracebacks."""

    @wraps(function)
    def failing_plainly(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (CerebroError, KeyboardInterrupt) as error:
            shorten_traceback(error)
            # Not a bare `raise`, which in Python 3.10 brings back the frames. Users see this line:
            raise error.with_traceback(error.__traceback__)  # CEREBRO_TRACEBACK=1 shows all  # noqa: B904

    return failing_plainly


def shorten_traceback(error: BaseException) -> None:
    """Remove Cerebro's frames from an error's traceback, and causes that have only such frames.

    An interrupt is shortened only if `explain_interrupt` has explained it, because the frames of
    any other interrupt show what was interrupted.
    """
    if os.environ.get(WHOLE_TRACEBACKS):
        return
    if isinstance(error, KeyboardInterrupt) and not hasattr(error, "_render_traceback_"):
        return
    error.__traceback__ = _drop_own_frames(error.__traceback__)
    cause = error.__cause__ or error.__context__
    if cause is not None and _drop_own_frames(cause.__traceback__) is None:  # the message has it
        error.__cause__ = None  # so that the context is not shown either


def _drop_own_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback without Cerebro's frames and the frames of Python's library below them."""
    entries: list[TracebackType] = []
    inside = False
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        is_python = name.startswith(_PYTHONS) and not name.startswith(_PACKAGES)
        inside = name.startswith(_OURS) or (inside and (is_python or name.startswith("<frozen")))
        if not inside:
            entries.append(traceback)
        traceback = traceback.tb_next
    short: TracebackType | None = None
    for entry in reversed(entries):
        short = TracebackType(short, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return short


def explain_interrupt(
    error: KeyboardInterrupt, lines: Sequence[str], message: str = "", result: Any = None
) -> None:
    """Give an interrupt its message and, for IPython, the lines to show and the run's result.

    It remains a plain KeyboardInterrupt, because Python recognizes by this type that Ctrl-C has
    ended a program.
    """
    error.args = (message or lines[0],)
    shown = list(lines)
    vars(error).update(result=result, _render_traceback_=lambda: shown)
