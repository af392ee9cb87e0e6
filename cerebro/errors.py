"""The exceptions that Cerebro raises.

Invalid arguments raise :class:`InputError`, which is a ``ValueError``; files that cannot be read or
written raise ``OSError``; the other exceptions are below. Each message names the file, the trial or
the argument, and the cure.
"""

from __future__ import annotations

from typing import Any

MESSAGE_LIMIT = 500


def one_line(text: str, limit: int = MESSAGE_LIMIT) -> str:
    """Make text one printable line of at most about `limit` characters.

    Line breaks become spaces; control characters and lone surrogates, which terminals and stores
    cannot handle, become escapes.
    """
    joined = " ".join(str.__getitem__(text, slice(20 * limit)).split())
    if len(joined) > limit:
        joined = f"{joined[: 2 * limit // 3]} ... {joined[-limit // 3 :]}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in joined)


def printable(text: str) -> str:
    """Make text safe to print: unprintable characters except newlines and tabs become escapes.

    A store from elsewhere may contain terminal control sequences.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)


def text_of(error: BaseException, limit: int = MESSAGE_LIMIT) -> str:
    """Return an exception's message as `one_line`; never raises."""
    try:
        return one_line(str(error), limit)
    except BaseException:  # its __str__ may raise anything
        return "(its text cannot be shown)"


class CerebroError(Exception):
    """Base class of Cerebro's exceptions."""


class InputError(CerebroError, ValueError):
    """An argument, a configuration or a file given by the user is invalid."""


class CorruptDataError(CerebroError):
    """A data file, a state or a manifest does not match its checksum or header."""


class StateError(CerebroError):
    """A model's state cannot be packed, or does not fit the model it is loaded into."""


class DeviceError(CerebroError):
    """A device or its driver failed."""


class WorkerError(CerebroError):
    """A worker process could not be started, or died and could not be replaced."""


class UnitCancelled(CerebroError):
    """A unit was cancelled; raised inside a worker, never seen by users."""


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
