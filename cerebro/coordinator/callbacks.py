"""The user's callbacks, called in the coordinator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from cerebro.errors import text_of
from cerebro.run.records import TrialRecord


class Hooks:
    """Calls what a run's callbacks have, and knows which of them has failed.

    What a callback raises comes through unchanged; `cause_of` says whose it was.

    Parameters
    ----------
    callbacks
        Objects with any of the hooks.
    view
        Makes of a trial's record what callbacks are given: the trial as it is now.
    """

    def __init__(self, callbacks: Sequence[Any], view: Callable[[TrialRecord], Any]) -> None:
        self._callbacks = callbacks
        self._view = view
        self._failure: tuple[BaseException, str] | None = None
        self._later: list[Callable[[], None]] | None = None
        self.choose: Callable[[TrialRecord, str], TrialRecord | None] = lambda record, _: record
        """Whom callbacks are told of, given a trial and a hook; None: of nobody."""

    @contextmanager
    def later(self) -> Iterator[None]:
        """Keep calls back until the block has ended well: what they are told of is on record."""
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

    def tell_of(self, record: TrialRecord, hook: str, *arguments: Any) -> None:
        """Call a hook with the trial as it is now, which is a copy: made only if one listens."""
        chosen = self.choose(record, hook)
        if chosen is not None and any(
            getattr(callback, hook, None) is not None for callback in self._callbacks
        ):
            self.notify(hook, self._view(chosen), *arguments)

    def cause_of(self, error: BaseException) -> str:
        """One line about an error that ended a run; it names the callback that raised it."""
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
        except KeyboardInterrupt:  # Ctrl-C happened to come just now
            raise
        except BaseException as error:
            cause = f"the callback {name_of(callback)} failed in {hook}"
            self._failure = (error, cause)
            if hasattr(error, "add_note"):  # from Python 3.11 on a traceback shows it
                error.add_note(f"{cause}: the run is over, what was finished is kept")
            raise


def name_of(callback: Any) -> str:
    """Its class, or for a module its name."""
    kind = type(callback)
    return str(callback.__name__ if kind.__name__ == "module" else kind.__qualname__)
