"""Write a display's text to a stream that may fail: a closed pipe, a lost terminal, a full disk.

The search does not depend on its display: if a write fails, a warning says so, and nothing more is
written.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, TextIO

from cerebro.errors import text_of


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
