"""Warnings about trials: those that trials raise, and one about memory that keeps growing.

`Watch`, in the worker, writes a trial's warnings to the trial's log, once each, and sends them to
the coordinator with the unit's result. The coordinator records them for every trial, and
`ShownWarnings` shows each once per run. The filters of the user's process decide which are shown;
they are sent to the workers (`carry_filters`). See docs/design/workers.md.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from cerebro.machine.imports import module_of
from cerebro.machine.resources import Usage
from cerebro.report.findings import Finding
from cerebro.worker.messages import Warned

EVENT = "warning"  # the kind of the event that records a trial's warning
MAX_TEXTS = 3  # the most texts shown per line of code: texts often differ only by a number
MAX_LENGTH = 2000

GROWING_EPOCHS = 3
LEAST_GROWTH_PER_EPOCH = 8 << 20
LEAST_GROWTH = 64 << 20
LOADED_ALLOWANCE = 32 << 20
LOADED_STATES = 3

Place = tuple[str, str, int]
CarriedFilter = tuple[Any, ...]  # an entry of `warnings.filters`, with its category given by name


# --- in a worker ---------------------------------------------------------------

_carried: list[Any] = []
"""The filters inserted before this process's own; a process serves one run after another."""


class Watch:
    """Collects the warnings of one run's units, also those that Python has shown before.

    `filters` are those of the user's process, from `carry_filters`; empty in that process itself.
    """

    def __init__(self, filters: Sequence[CarriedFilter] = ()) -> None:
        self._filters = filters
        self._open: Sequence[CarriedFilter] = filters  # without an imported category
        self._known: dict[int | None, dict[Place, set[str]]] = {}
        self._put_filters(filters)

    def take_filters(self) -> None:
        """Apply the filters whose categories have been imported in the meantime."""
        if any(_find_category(carried[2]) is not None for carried in self._open):
            self._put_filters(self._filters)

    def _put_filters(self, filters: Sequence[CarriedFilter]) -> None:
        named = [(carried, _find_category(carried[2])) for carried in filters]
        self._open = [carried for carried, category in named if category is None]
        ready = [(*c[:2], category, *c[3:]) for c, category in named if category is not None]
        before: list[Any] = warnings.filters  # type: ignore[assignment]
        others = [entry for entry in before if entry not in _carried and entry not in ready]
        if before != (after := [*ready, *others]):
            before[:] = after
            forget_shown()
        _carried[:] = ready

    @contextlib.contextmanager
    def collect(self, trial: int | None) -> Iterator[list[Warned]]:
        """Collect the warnings of a unit, or of a check (`trial` is None), in the yielded list."""
        warnings_of_unit: list[Warned] = []
        texts_by_place = self._known.setdefault(trial, {})

        def note(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: Any = None,
            line: str | None = None,
        ) -> None:
            names = tuple(_name_of(kind) for kind in category.__mro__ if issubclass(kind, Warning))
            warned = Warned(names, str(message)[:MAX_LENGTH], filename, lineno)
            texts = texts_by_place.setdefault(warned.place, set())
            if warned.text in texts or self._is_ignored(warned):
                return
            texts.add(warned.text)
            with contextlib.suppress(OSError):  # as in Python itself
                stream = sys.stderr if file is None else file
                if stream is not None:
                    stream.write(warnings.formatwarning(message, category, filename, lineno, line))
            if len(texts) <= MAX_TEXTS:
                warnings_of_unit.append(warned)

        self.take_filters()
        forget_shown()
        before = warnings.showwarning
        warnings.showwarning = note
        try:
            yield warnings_of_unit
        finally:
            if warnings.showwarning is note:  # else the user's code has replaced it
                warnings.showwarning = before

    def forget(self, trial: int | None) -> None:
        self._known.pop(trial, None)

    def _is_ignored(self, warned: Warned) -> bool:
        """Return whether the warning is ignored by a filter whose category is not imported here."""
        for action, text, category, module, line in self._open:
            is_here = category in warned.category and module is None and line in (0, warned.line)
            if is_here and (text is None or text.match(warned.text)):
                return bool(action == "ignore")
        return False


def forget_shown() -> None:
    """Make Python show warnings again that it has already shown in this process."""
    with warnings.catch_warnings():  # invalidates every module's list of shown warnings
        pass


# --- filters and categories ----------------------------------------------------


def carry_filters() -> tuple[CarriedFilter, ...]:
    """Return this process's filters for workers; their categories are names, not classes."""
    filters: Sequence[Any] = warnings.filters
    return tuple(
        (*entry[:2], _name_of(category), *entry[3:])
        for entry in filters
        for category in (entry[2] if isinstance(entry[2], tuple) else (entry[2],))
    )


def _find_category(name: str) -> type[Warning] | None:
    """Return a category by its name, or None if its module is not imported here yet."""
    module, _, path = name.partition(":")
    category: Any = sys.modules.get(module)
    for part in path.split("."):
        category = getattr(category, part, None)
    return category if isinstance(category, type) and issubclass(category, Warning) else None


def _name_of(category: type) -> str:
    return f"{module_of(category)}:{category.__qualname__}"


# --- in the user's process -----------------------------------------------------


class ShownWarnings:
    """Shows the warnings of trials, each once per run."""

    def __init__(self) -> None:
        self._texts: dict[Place, set[str]] = {}

    def show(self, warned: Sequence[Warned], trial: str) -> None:
        """Show the warnings that are new, each prefixed with its trial."""
        for warning in warned:
            texts = self._texts.setdefault(warning.place, set())
            if warning.text not in texts and len(texts) < MAX_TEXTS:
                texts.add(warning.text)
                show(warning, f"{trial}: ")


def show(warned: Warned, prefix: str = "") -> None:
    """Show a warning from another process as if raised here; it has passed the filters there."""
    category = next((c for c in map(_find_category, warned.category) if c is not None), UserWarning)
    text = f"{prefix}{warned.text}"
    try:
        message = category(text)
    except Exception:  # the class takes other arguments
        message = None
    if message is None or str(message) != text:
        category, message = UserWarning, UserWarning(f"{prefix}{warned.name}: {warned.text}")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn_explicit(message, category, warned.file, warned.line)


def show_finding(finding: Finding, build: Callable[..., Any], prefix: str = "") -> None:
    """Warn about a likely mistake, at its own line or at the line of `build`.

    The user's filters may hide the warning, but cannot make it an error that ends the search.
    """
    if not finding.place:
        warn_at_build(f"{prefix}{finding}", build)
        return
    file, _, line = finding.place.rpartition(":")
    _show_text(f"{prefix}{finding}", file, int(line))


def warn_at_build(text: str, build: Callable[..., Any]) -> None:
    """Warn at the line of `build`, as `warn` does."""
    code = getattr(build, "__code__", None)
    line = getattr(code, "co_firstlineno", 1)
    _show_text(text, getattr(code, "co_filename", "cerebro"), line)


def warn(text: str) -> None:
    """Warn of something in a trial that never ends it, even if the filters make warnings errors."""
    caller = sys._getframe(1)
    _show_text(text, caller.f_code.co_filename, caller.f_lineno)


def _show_text(text: str, file: str, line: int) -> None:
    try:
        warnings.warn_explicit(text, UserWarning, file, line)
    except UserWarning:
        show(Warned(("builtins:UserWarning",), text, file, line))


# --- memory that keeps growing -------------------------------------------------


def measure_growth(
    before: Usage | None, after: Usage | None, *, loaded: bool, state_bytes: int
) -> int:
    """Return how many bytes a unit's process grew beyond what is expected.

    `before` is the memory after the model was loaded, `after` that at the unit's end. `loaded` says
    whether the unit had to build and load its model, whose packed state has `state_bytes`. Such a
    unit also keeps gradients and the like, so only growth beyond a few times that size counts.
    """
    if before is None or after is None:
        return 0
    grown = after.private - before.private
    if not loaded:
        return grown
    return max(0, grown - LOADED_ALLOWANCE - LOADED_STATES * state_bytes)


@dataclass
class _Growing:
    in_epoch: int = 0
    ended: int = 0
    epochs: int = 0
    together: int = 0
    is_named: bool = False


class Growth:
    """Finds trials whose memory keeps growing, before they run out of memory.

    With every unit a worker reports how much its private memory (without mapped files) grew. Code
    that keeps nothing has a total growth close to zero over an epoch, whatever it allocates in
    between. The rule: a trial gets a warning if three consecutive epochs, not counting its first,
    each grew by at least 8 MB and together by at least 64 MB. A cache that fills once does not grow
    for that long, but a list of outputs does.
    """

    def __init__(self) -> None:
        self._trials: defaultdict[int, _Growing] = defaultdict(_Growing)

    def add(self, trial: int, grown: int) -> None:
        """Add a unit's unexpected growth, in bytes."""
        self._trials[trial].in_epoch += grown

    def end_epoch(self, trial: int, epoch: int, resident: int) -> str | None:
        """Apply the rule at an epoch's end; return a warning, at most once per trial."""
        its = self._trials[trial]
        grown, its.in_epoch = its.in_epoch, 0
        its.ended += 1
        if its.ended == 1 or grown < LEAST_GROWTH_PER_EPOCH:
            its.epochs = its.together = 0
            return None
        its.epochs += 1
        its.together += grown
        if its.is_named or its.epochs < GROWING_EPOCHS or its.together < LEAST_GROWTH:
            return None
        its.is_named = True
        return (
            f"trial {trial} keeps about {its.together / its.epochs / 1e6:.0f} MB more memory with "
            f"every epoch (its process holds {resident / 1e6:.0f} MB after epoch {epoch}): does "
            "the model, a metric or build keep batches, outputs or losses?"
        )

    def forget(self, trial: int) -> None:
        self._trials.pop(trial, None)
