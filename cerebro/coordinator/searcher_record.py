"""Store how to recreate a searcher, its state, and its decisions since the state was saved.

A run stores no code, but a searcher's class and the arguments of its constructor, which are
attributes of the same names, as in scikit-learn. The searcher's `state_dict` holds all else. It
grows with the number of trials, so it is saved only once the decisions since the last save are as
long as it was then. A resumed run's searcher loads its last state, receives all later reports again
and must make the same decisions. One that depends on more than its seed and its reports
(``repeatable = False``) is saved with every decision.

This module opens no files: `cerebro.coordinator.search_loop` writes, `cerebro.api.resume` reads.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from cerebro.coordinator.failures import make_comparable, worst_value_of
from cerebro.coordinator.numbering import Numbering
from cerebro.errors import InputError, one_line
from cerebro.machine.guard import guard_import
from cerebro.machine.imports import module_of
from cerebro.results.saved_run import SavedRun
from cerebro.run.records import Ranking, TrialRecord
from cerebro.run.store import read_decisions, reader
from cerebro.run.store.schema import decode, encode
from cerebro.searchers.base import DONE, Decision, Searcher, Suggested, Suggestion
from cerebro.searchers.metrics import EarlyStopping


def describe(searcher: Searcher) -> dict[str, Any]:
    """Return a searcher's ``class``, ``parameters`` (None if unknown) and ``adaptive``, as JSON.

    If its class defines ``__repr__``, ``text`` is the searcher in messages.
    """
    kind = type(searcher)
    description = {
        "class": f"{module_of(kind)}:{kind.__qualname__}",
        "parameters": _find_parameters(searcher),
        "adaptive": bool(searcher.adaptive),
    }
    if description["parameters"] is None and kind.__repr__ is not object.__repr__:
        description["text"] = one_line(repr(searcher), 500)
    return description


def _find_parameters(searcher: Searcher) -> dict[str, Any] | None:
    values = {}
    for name, parameter in inspect.signature(type(searcher)).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            return None
        for attribute in (name, f"_{name}"):
            own = attribute in getattr(searcher, "__dict__", ()) or attribute not in vars(Searcher)
            if own and hasattr(searcher, attribute):  # else it inherits it from the base class
                values[name] = getattr(searcher, attribute)
                break
        else:
            return None
    try:
        decoded = decode(encode(values))
    except InputError:
        return None
    return decoded if decoded == values else None


def is_describable(description: Mapping[str, Any]) -> bool:
    module, _, name = description["class"].partition(":")
    return description["parameters"] is not None and module != "__main__" and "<" not in name


def make_again(description: dict[str, Any]) -> Searcher | None:
    if not is_describable(description):
        return None
    module, _, name = description["class"].partition(":")
    try:
        with guard_import(name.partition(".")[0], target=module):
            imported = importlib.import_module(module)
        searcher: Searcher = attrgetter(name)(imported)(**description["parameters"])
        return searcher
    except (ImportError, AttributeError, TypeError, ValueError):
        return None


class NoSearcher(Searcher):
    """Replaces a searcher that has nothing left to decide: every trial trains to its end."""

    adaptive = False
    is_recorded = False
    total = 0

    def suggest(self) -> Suggested:
        return DONE

    def report(self, trial: int, epoch: int, metrics: Mapping[str, float]) -> Decision:
        return Decision.CONTINUE

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


OF_REPORTS = tuple(decision.value for decision in Decision)
"""Decisions on reported epochs; all others are suggestions: ``begin``, ``clone``, ``resume``."""

SMALL_STATE = 1024
"""A state of at most this many characters is saved with every decision."""

CHARACTERS_PER_DECISION = 256
"""A larger state is saved when later decisions, of this many characters each, are as long."""


class StateSaving:
    """Decides when to save a searcher's state; `decisions` counts those stored so far."""

    def __init__(self, searcher: Searcher, decisions: int = 0) -> None:
        self.decisions = decisions
        self._always = not searcher.adaptive or not searcher.repeatable
        self._saved: int | None = None  # decisions at the last save by this process
        self._size = 0

    @property
    def is_due(self) -> bool:
        if self._always or self._saved is None or self._size <= SMALL_STATE:
            return True
        return (self.decisions - self._saved) * CHARACTERS_PER_DECISION >= self._size

    @property
    def is_complete(self) -> bool:
        return self.decisions == self._saved

    def note_saved(self, size: int) -> None:
        self._saved, self._size = self.decisions, size


@dataclass(frozen=True)
class StoredDecision:
    """A stored decision or suggestion."""

    trial: int
    epoch: int
    kind: str
    epochs: int | None
    """The target epochs, if it is a suggestion."""

    def __str__(self) -> str:
        if self.kind in OF_REPORTS:
            return f"{self.kind} (trial {self.trial}, epoch {self.epoch})"
        return f"{self.kind} trial {self.trial} until {self.epochs} epochs are done"


def replay_decisions(
    searcher: Searcher,
    decisions: Iterable[StoredDecision],
    *,
    reported: Callable[[int, int], Mapping[str, float]],
    config_of: Callable[[int], Mapping[str, Any]],
    epochs: int,
) -> None:
    """Repeat all reports to a searcher; raise InputError if it makes other decisions."""
    for stored in decisions:
        if stored.kind in OF_REPORTS:
            metrics = reported(stored.trial, stored.epoch)
            now: Any = searcher.report(stored.trial, stored.epoch, metrics)
            same = isinstance(now, Decision) and now.value == stored.kind
            searcher.dropped()  # the run has already ended these trials
        else:
            now = searcher.suggest()
            same = isinstance(now, Suggestion) and _is_same(now, stored, config_of, epochs)
        if not same:
            raise InputError(
                f"the searcher {type(searcher).__name__} does not repeat its stored decisions: "
                f"it decided {stored}, and now {now!r}; it must depend only on its seed and its "
                "reports (cerebro.testing.check_searcher), or have the attribute repeatable = False"
            )


def _is_same(
    suggestion: Suggestion,
    stored: StoredDecision,
    config_of: Callable[[int], Mapping[str, Any]],
    epochs: int,
) -> bool:
    if (suggestion.epochs or epochs) != stored.epochs:
        return False
    if stored.kind == "resume":
        return suggestion.trial == stored.trial
    is_clone = suggestion.parent is not None
    stored_config = config_of(stored.trial)
    same = all(
        stored_config.get(str(name)) == value
        for name, value in suggestion.config.items()
        if isinstance(value, (bool, int, float, str)) and value == value  # as it was stored
    )
    return suggestion.trial is None and is_clone == (stored.kind == "clone") and same


def catch_up(saved: SavedRun, searcher: Searcher, by: Ranking, stop: EarlyStopping | None) -> None:
    """Bring a searcher from its last saved state to the run's end, or raise InputError."""
    if not searcher.adaptive:
        return
    with reader(saved.folder, saved.disk) as connection:
        after = saved.meta["searcher_said"]
        rows = read_decisions(connection, after)
    records = saved.configurations
    numbering = Numbering(records)
    decisions = [StoredDecision(numbering.own(trial), *rest) for trial, *rest in rows]
    replay_decisions(
        searcher,
        decisions,
        reported=lambda trial, epoch: find_reported(
            records[numbering.of_run(trial)], epoch, by, stop
        ),
        config_of=lambda trial: records[numbering.of_run(trial)].config,
        epochs=saved.settings["epochs"],
    )


def find_reported(
    record: TrialRecord, epoch: int, by: Ranking, stop: EarlyStopping | None = None
) -> Mapping[str, float]:
    """Return the metrics that the search loop reported for an epoch of a trial."""
    index = epoch - record.first_epoch
    if index < len(record.epochs):
        return make_comparable(record.epochs[index].metrics, by)
    history = [done.to_history() for done in record.epochs]
    if record.status == "stopped" and stop is not None and stop.should_stop(history):
        return make_comparable(record.epochs[-1].metrics, by)  # reported again
    return {by.metric: worst_value_of(by.mode)}  # the trial failed, or the user stopped it
