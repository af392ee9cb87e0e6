"""The stored part of a searcher: how to make it again, its state, and its decisions since.

A run keeps no code: of a searcher it records the class and the arguments that made it,
which are attributes of the same names, as in scikit-learn. What it has learned since is
its `state_dict`.

Every decision is stored at once. The state grows with the trials: saved as often, it would soon
cost more than everything else. So it is saved when the decisions since the last save are as long
as the state was then, which makes the total cost proportional to the number of decisions. When a
run is resumed, the searcher loads its last state and receives again what was reported since; it
must decide the same again, as every searcher does that depends on its seed and its reports alone.
One that does not (``repeatable = False``) is saved with every decision.

No file and no run: `cerebro.coordinator.search_loop` writes, `cerebro.api.resume` reads.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cerebro.coordinator.failures import comparable, worst
from cerebro.errors import InputError
from cerebro.machine.guard import finding
from cerebro.results.saved_run import SavedRun
from cerebro.run.records import Ranking, TrialRecord
from cerebro.run.store import read_decisions, reader
from cerebro.run.store.encoding import decode, encode
from cerebro.searchers.base import DONE, Decision, Searcher, Suggested, Suggestion
from cerebro.searchers.stopping import EarlyStopping


def describe(searcher: Searcher) -> dict[str, Any]:
    """Return ``class``, ``parameters`` and ``adaptive``, as JSON.

    ``parameters`` is None where they are not known: to resume the run, the user then has to
    pass the searcher again.
    """
    kind = type(searcher)
    return {
        "class": f"{kind.__module__}:{kind.__qualname__}",
        "parameters": _parameters(searcher),
        "adaptive": bool(searcher.adaptive),
    }


def _parameters(searcher: Searcher) -> dict[str, Any] | None:
    values = {}
    for name, parameter in inspect.signature(type(searcher)).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            return None
        for attribute in (name, f"_{name}"):
            if _has(searcher, attribute):
                values[name] = getattr(searcher, attribute)
                break
        else:
            return None
    try:
        known = decode(encode(values))
    except InputError:
        return None
    return known if known == values else None


def _has(searcher: Searcher, name: str) -> bool:
    """Whether a searcher has an attribute that is not a default of the base class."""
    is_default = name in vars(Searcher) and name not in getattr(searcher, "__dict__", ())
    return hasattr(searcher, name) and not is_default


def is_describable(description: Mapping[str, Any] | None) -> bool:
    """Whether another process can make the searcher that was described."""
    if not description:
        return False
    module, _, name = description["class"].partition(":")
    return description["parameters"] is not None and module != "__main__" and "<" not in name


def make_again(description: dict[str, Any]) -> Searcher | None:
    """Make the searcher that was described; None if that is not possible."""
    if not is_describable(description):
        return None
    module, _, name = description["class"].partition(":")
    try:
        with finding(name.partition(".")[0], target=module):
            kind: Any = importlib.import_module(module)
        for part in name.split("."):
            kind = getattr(kind, part)
        made: Searcher = kind(**description["parameters"])
        return made
    except (ImportError, AttributeError, TypeError, ValueError):
        return None


class NoSearcher(Searcher):
    """Suggests nothing and lets every trial train to its end; its state is not recorded.

    It takes the place of a searcher that has nothing left to decide: where only some trials of a
    run are resumed, or where all have been suggested.
    """

    adaptive = False
    is_recorded = False
    total = 0

    def suggest(self) -> Suggested:
        """Return `DONE`."""
        return DONE

    def report(self, trial: int, epoch: int, metrics: Mapping[str, float]) -> Decision:
        """Return CONTINUE."""
        return Decision.CONTINUE

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""


OF_REPORTS = tuple(decision.value for decision in Decision)
"""Decisions on a reported epoch; all others are suggestions: ``begin``, ``clone``, ``resume``."""

SMALL_STATE = 1024
"""Characters of a state that is saved with every decision."""

CHARACTERS_PER_DECISION = 256
"""Of a larger state, for each decision or suggestion since it was saved last."""


class StateSaving:
    """Decides when a searcher's state is saved.

    Parameters
    ----------
    decisions
        How many decisions and suggestions are stored.
    """

    def __init__(self, searcher: Searcher, decisions: int = 0) -> None:
        self.decisions = decisions
        self._always = not searcher.adaptive or not searcher.repeatable
        self._saved: int | None = None  # decisions by then; None: not saved by this process
        self._size = 0

    @property
    def is_due(self) -> bool:
        """Whether enough has been decided since the last save."""
        if self._always or self._saved is None or self._size <= SMALL_STATE:
            return True
        return (self.decisions - self._saved) * CHARACTERS_PER_DECISION >= self._size

    @property
    def is_complete(self) -> bool:
        """Whether nothing has been decided since the last save."""
        return self.decisions == self._saved

    def saved(self, size: int) -> None:
        """Note that a state of so many characters has just been saved."""
        self._saved, self._size = self.decisions, size


@dataclass(frozen=True)
class StoredDecision:
    """A decision or a suggestion, as it is stored."""

    trial: int
    epoch: int
    kind: str
    epochs: int | None
    """Of a suggestion: until how many epochs are done."""

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
    """Report to a searcher again what was reported, and check that it decides the same.

    Parameters
    ----------
    reported
        Returns the metrics that were reported of a trial's epoch.
    config_of
        Returns the stored configuration of a trial.
    epochs
        Those of the search.

    Raises
    ------
    InputError
        If it decides otherwise.
    """
    for stored in decisions:
        if stored.kind in OF_REPORTS:
            metrics = reported(stored.trial, stored.epoch)
            now: Any = searcher.report(stored.trial, stored.epoch, metrics)
            same = isinstance(now, Decision) and now.value == stored.kind
            searcher.dropped()  # these trials have ended
        else:
            now = searcher.suggest()
            same = isinstance(now, Suggestion) and _is_same(now, stored, config_of, epochs)
        if not same:
            raise InputError(
                f"the searcher {type(searcher).__name__} does not say again what is on record: "
                f"it said {stored}, and now {now!r}; it must depend on its seed and its reports "
                "alone (cerebro.testing.check_searcher), or have the attribute repeatable = False"
            )


def _is_same(
    suggestion: Suggestion,
    stored: StoredDecision,
    config_of: Callable[[int], Mapping[str, Any]],
    epochs: int,
) -> bool:
    """Whether a suggestion is the stored one."""
    if (suggestion.epochs or epochs) != stored.epochs:
        return False
    if stored.kind == "resume":
        return suggestion.trial == stored.trial
    is_clone = suggestion.parent is not None
    known = config_of(stored.trial)
    same = all(
        known.get(str(name)) == value
        for name, value in suggestion.config.items()
        if _is_stored_as_is(value)
    )
    return suggestion.trial is None and is_clone == (stored.kind == "clone") and same


def _is_stored_as_is(value: Any) -> bool:
    """Whether a value is read back as it was; others may have become lists."""
    return isinstance(value, (bool, int, float, str)) and value == value


def catch_up(saved: SavedRun, searcher: Searcher, by: Ranking, stop: EarlyStopping | None) -> None:
    """Bring a searcher that has loaded its last saved state to where the run was left.

    Raises
    ------
    InputError
        If it decides otherwise than it did.
    """
    at = saved.meta.get("searcher_said")
    if at is None or not searcher.adaptive:  # of an older run: saved with every decision
        return
    with reader(saved.folder) as connection:
        decisions = [StoredDecision(*row) for row in read_decisions(connection, at)]
    if not decisions:
        return
    records = saved.configurations
    replay_decisions(
        *(searcher, decisions),
        reported=lambda trial, epoch: reported(records[trial], epoch, by.metric, by.mode, stop),
        config_of=lambda trial: records[trial].config,
        epochs=saved.settings["epochs"],
    )


def reported(
    record: TrialRecord, epoch: int, metric: str, mode: str, stop: EarlyStopping | None = None
) -> Mapping[str, float]:
    """Return what the search loop reported of a trial's epoch."""
    own = epoch - record.first_epoch
    if own < len(record.epochs):
        return comparable(record.epochs[own].metrics, metric, mode)
    history = [known.to_history() for known in record.epochs]
    if record.status == "stopped" and stop is not None and stop.should_stop(history):
        return comparable(record.epochs[-1].metrics, metric, mode)  # reported again
    return {metric: worst(mode)}  # it failed, or the user stopped it
