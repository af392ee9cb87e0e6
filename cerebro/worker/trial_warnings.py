"""Warnings that trials raise: each is told once in the user's own process, with its trial.

Python shows a warning once for each place in a process, so the check before a search would
use it up for all trials, and a worker's first trial for those after it. In a worker
`Watch` makes Python forget what was shown before every unit, writes what a trial raises
to its log, once, and hands it to the coordinator with the unit's result. There `ShownWarnings`
shows it once for the whole run, and it is recorded for every trial.

What is shown at all is decided where a warning is raised, by the filters of the user's own
process, which travel to the workers (`carried_filters`).
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from cerebro.worker.messages import Warned

EVENT = "warning"
"""What an event is called that records a trial's warning."""
MAX_TEXTS = 3
"""How many different texts of one place are told: a number in a text is no new warning."""
MAX_LENGTH = 2000

Place = tuple[str, str, int]
CarriedFilter = tuple[Any, ...]
"""An entry of `warnings.filters` with its category's name."""


# --- in a worker ---------------------------------------------------------------

_carried: list[Any] = []
"""What was put before this process's own filters: processes are used for run after run."""


class Watch:
    """Notes what the units of one run warn of; see the module's text.

    Parameters
    ----------
    filters
        Of the user's process, as from `carried_filters`; none where this is that process.
    """

    def __init__(self, filters: Sequence[CarriedFilter] = ()) -> None:
        self._filters = filters
        self._open: Sequence[CarriedFilter] = filters  # of categories that are not imported here
        self._known: dict[int | None, dict[Place, set[str]]] = {}
        self._put(filters)

    def take_filters(self) -> None:
        """Use filters whose categories are imported by now."""
        if any(_category(carried[2]) is not None for carried in self._open):
            self._put(self._filters)

    def _put(self, filters: Sequence[CarriedFilter]) -> None:
        named = [(carried, _category(carried[2])) for carried in filters]
        self._open = [carried for carried, category in named if category is None]
        ready = [(*c[:2], category, *c[3:]) for c, category in named if category is not None]
        before: list[Any] = warnings.filters  # type: ignore[assignment]
        own = [entry for entry in before if entry not in _carried and entry not in ready]
        if before != (after := [*ready, *own]):
            before[:] = after
            forget_shown()
        _carried[:] = ready

    @contextlib.contextmanager
    def of(self, trial: int | None) -> Iterator[list[Warned]]:
        """Note the warnings of a unit, or of a check (no trial), in the list that is returned."""
        found: list[Warned] = []
        known = self._known.setdefault(trial, {})

        def note(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: Any = None,
            line: str | None = None,
        ) -> None:
            warned = Warned(_names(category), str(message)[:MAX_LENGTH], filename, lineno)
            texts = known.setdefault(warned.place, set())
            if warned.text in texts or self._is_ignored(warned):
                return
            texts.add(warned.text)
            with contextlib.suppress(OSError):  # as Python does
                stream = sys.stderr if file is None else file
                if stream is not None:
                    stream.write(warnings.formatwarning(message, category, filename, lineno, line))
            if len(texts) <= MAX_TEXTS:
                found.append(warned)

        self.take_filters()
        forget_shown()
        before = warnings.showwarning
        warnings.showwarning = note
        try:
            yield found
        finally:
            if warnings.showwarning is note:  # else the user's code has put its own there
                warnings.showwarning = before

    def forget(self, trial: int | None) -> None:
        """A trial has ended: what it has warned of is needed no more."""
        self._known.pop(trial, None)

    def _is_ignored(self, warned: Warned) -> bool:
        """Whether a filter says so whose category is not, or was not yet, to be found here."""
        for action, text, category, module, line in self._open:
            is_here = category in warned.category and module is None and line in (0, warned.line)
            if is_here and (text is None or text.match(warned.text)):
                return bool(action == "ignore")
        return False


def forget_shown() -> None:
    """Have Python show warnings again that it has shown already in this process."""
    with warnings.catch_warnings():  # it outdates every module's list of them
        pass


# --- filters and categories ----------------------------------------------------


def carried_filters() -> tuple[CarriedFilter, ...]:
    """Return this process's filters, to be used in a worker.

    A category travels by its name: a worker does not import a library for a filter. One filter of
    several categories becomes several filters.
    """
    filters: Sequence[Any] = warnings.filters
    return tuple(
        (*entry[:2], _name(category), *entry[3:])
        for entry in filters
        for category in (entry[2] if isinstance(entry[2], tuple) else (entry[2],))
    )


def _category(name: str) -> type[Warning] | None:
    """Return a category by its name; None while its module is not imported here."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and issubclass(found, Warning) else None


def _name(category: type) -> str:
    return f"{category.__module__}:{category.__qualname__}"


def _names(category: type) -> tuple[str, ...]:
    """Return the names of a category and of those that it is derived from, itself first."""
    return tuple(_name(kind) for kind in category.__mro__ if issubclass(kind, Warning))


# --- in the user's process -----------------------------------------------------


class ShownWarnings:
    """Shows each warning of a run's trials once."""

    def __init__(self) -> None:
        self._texts: dict[Place, set[str]] = {}

    def show(self, warned: Sequence[Warned], raised_by: str) -> None:
        """Show new warnings, with the name of the trial that raised them."""
        for each in warned:
            texts = self._texts.setdefault(each.place, set())
            if each.text not in texts and len(texts) < MAX_TEXTS:
                texts.add(each.text)
                show(each, f"{raised_by}: ")


def show(warned: Warned, said_by: str = "") -> None:
    """Show a warning of another process as if it had been raised here.

    The filters have let it pass where it was raised: here they are not asked again.
    """
    category = next((c for c in map(_category, warned.category) if c is not None), UserWarning)
    text = f"{said_by}{warned.text}"
    try:
        message = category(text)
    except Exception:  # it is made of something else
        message = None
    if message is None or str(message) != text:
        category, message = UserWarning, UserWarning(f"{said_by}{warned.name}: {warned.text}")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn_explicit(message, category, warned.file, warned.line)
