"""Call the user's callbacks, in the coordinator's process."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from cerebro.callbacks.observer import Observer
from cerebro.errors import text_of
from cerebro.run.records import TrialRecord


class Hooks:
    """Calls the hooks of a run's callbacks; their exceptions propagate unchanged.

    An observer that fails is not called again. `view` makes a `Trial`, a copy as it is now.
    """

    def __init__(self, callbacks: Sequence[Any], view: Callable[[TrialRecord], Any]) -> None:
        self._callbacks = list(callbacks)
        self._view = view
        self._failure: tuple[BaseException, str] | None = None
        self._later: list[Callable[[], None]] | None = None

    @contextlib.contextmanager
    def postpone_calls(self) -> Iterator[None]:
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
        for callback in list(self._callbacks):
            method = getattr(callback, hook, None)
            if method is None:
                continue
            if self._later is None:
                self._call(callback, hook, method, arguments)
            else:
                self._later.append(partial(self._call, callback, hook, method, arguments))

    def notify_of(self, record: TrialRecord, hook: str, *arguments: Any) -> None:
        """Call a hook with a copy of the current trial, if any callback has the hook."""
        if any(getattr(callback, hook, None) is not None for callback in self._callbacks):
            self.notify(hook, self._view(record), *arguments)

    @property
    def _observers(self) -> list[Any]:
        return [callback for callback in self._callbacks if isinstance(callback, Observer)]

    @property
    def of_commits(self) -> list[Callable[[], None]]:
        """What observers have called after each commit of the store."""
        return [each.on_commit for each in self._observers if hasattr(each, "on_commit")]

    def notify_closed(self) -> None:
        """Tell the observers that the run's folder is complete and released."""
        for observer in self._observers:
            if hasattr(observer, "on_run_closed"):
                self._call(observer, "on_run_closed", observer.on_run_closed, ())

    def close(self) -> None:
        """Close the observers; called once when the run ends, with or without an error."""
        for observer in self._observers:
            self._call(observer, "close", observer.close, ())

    def cause_of(self, error: BaseException) -> str:
        """Return one line with the error that ended a run and the callback that raised it."""
        text = text_of(error, 2000)
        if self._failure is None or self._failure[0] is not error:
            return text
        kind = type(error).__name__
        return f"{self._failure[1]}: {kind}: {text}" if text else f"{self._failure[1]}: {kind}"

    def _call(
        self, callback: Any, hook: str, method: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        if all(callback is not other for other in self._callbacks):
            return  # an observer that failed after the call was postponed
        try:
            method(*arguments)
        except KeyboardInterrupt:  # Ctrl-C is not the callback's error
            raise
        except BaseException as error:
            is_fenced = isinstance(callback, Observer) and not callback.strict
            if is_fenced and isinstance(error, Exception):
                self._leave_out(callback, hook, error)
                return
            cause = f"the callback {name_of(callback)} failed in {hook}"
            self._failure = (error, cause)
            if hasattr(error, "add_note"):  # shown in tracebacks from Python 3.11 on
                error.add_note(f"{cause}: the run has ended, and all finished work is kept")
            raise

    def _leave_out(self, observer: Observer, hook: str, error: Exception) -> None:
        self._callbacks = [callback for callback in self._callbacks if callback is not observer]
        warnings.warn(
            f"the observer {name_of(observer)} failed in {hook} ({type(error).__name__}: "
            f"{text_of(error, 500)}): the run continues without it; give strict=True to end the "
            "run instead",
            stacklevel=2,
        )
        if hook != "close":
            with contextlib.suppress(Exception):  # usually for the same cause
                observer.close()


def name_of(callback: Any) -> str:
    """Return the name of a callback's class or, if it is a module, of the module."""
    kind = type(callback)
    return str(callback.__name__ if kind.__name__ == "module" else kind.__qualname__)
