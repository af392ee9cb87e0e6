"""The user's callbacks, called in the coordinator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cerebro.trial import TrialRecord


class Hooks:
    """Calls what a run's callbacks have.

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

    def tell(self, hook: str, *arguments: Any) -> None:
        """Call a hook of every callback that has it."""
        for method in self._methods(hook):
            method(*arguments)

    def tell_of(self, record: TrialRecord, hook: str, *arguments: Any) -> None:
        """Call a hook with the trial as it is now, which is a copy: made only if one listens."""
        methods = self._methods(hook)
        if methods:
            view = self._view(record)
            for method in methods:
                method(view, *arguments)

    def _methods(self, hook: str) -> list[Callable[..., None]]:
        found = (getattr(callback, hook, None) for callback in self._callbacks)
        return [method for method in found if method is not None]
