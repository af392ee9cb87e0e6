"""Call the user's callbacks, in the coordinator's process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from cerebro.errors import text_of
from cerebro.run.records import TrialRecord


class Hooks:
    """Calls the hooks of a run's callbacks, and remembers the callback that failed.

    Exceptions of callbacks propagate unchanged; `cause_of` names the callback.

    Parameters
    ----------
    callbacks
        Objects with any of the hooks.
    view
        Makes the `Trial` that callbacks get from a record: the trial as it is now.
    """

    def __init__(self, callbacks: Sequence[Any], view: Callable[[TrialRecord], Any]) -> None:
        self._callbacks = callbacks
        self._view = view
        self._failure: tuple[BaseException, str] | None = None
        self._later: list[Callable[[], None]] | None = None

    @contextmanager
    def later(self) -> Iterator[None]:
        """Postpone calls until the block has ended without error and the store has its rows."""
        self._later = []
        try:
            yield
            calls, self._later = self._later, None
            for call in calls:
                call()
        finally:
            self._later = None

    def notify(self, hook: str, *arguments: Any) -> None:
        """Call a hook of every callback that has it."""
        for callback in self._callbacks:
            method = getattr(callback, hook, None)
            if method is None:
                continue
            if self._later is None:
                self._call(callback, hook, method, arguments)
            else:
                self._later.append(partial(self._call, callback, hook, method, arguments))

    def notify_of(self, record: TrialRecord, hook: str, *arguments: Any) -> None:
        """Call a hook with a copy of the trial as it is now, if any callback has the hook."""
        if any(getattr(callback, hook, None) is not None for callback in self._callbacks):
            self.notify(hook, self._view(record), *arguments)

    def cause_of(self, error: BaseException) -> str:
        """Describe an error that ended a run in one line, with the callback that raised it."""
        text = text_of(error, 2000)
        if self._failure is None or self._failure[0] is not error:
            return text
        kind = type(error).__name__
        return f"{self._failure[1]}: {kind}: {text}" if text else f"{self._failure[1]}: {kind}"

    def _call(
        self, callback: Any, hook: str, method: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        try:
            method(*arguments)
        except KeyboardInterrupt:  # Ctrl-C, not the callback's error
            raise
        except BaseException as error:
            cause = f"the callback {name_of(callback)} failed in {hook}"
            self._failure = (error, cause)
            if hasattr(error, "add_note"):  # shown in tracebacks from Python 3.11 on
                error.add_note(f"{cause}: the run has ended, and all finished work is kept")
            raise


def name_of(callback: Any) -> str:
    """Return the name of a callback's class or, if it is a module, of the module."""
    kind = type(callback)
    return str(callback.__name__ if kind.__name__ == "module" else kind.__qualname__)
