"""What is on record of a searcher: how to make it again, its state, and what was reported since.

A run keeps no code: of a searcher it records the class and the arguments that made it,
which are attributes of the same names, as in scikit-learn. What it has learnt since is
its `state_dict`.

What a searcher says is on record with every answer. Its own state grows with its trials: written
down as often, it would soon cost more than all else. So it is written down when as much
has been said since as it is large, which makes the cost of all of it together proportional to the
conversation. A run that is resumed gives the searcher its last state and tells it again
what it was told since; it must say the same again, as every searcher does that depends on its
seed and what it hears alone. One that does not (``repeatable = False``) is written down always.

No file and no run: `cerebro.search_loop` writes, `cerebro.resume` reads.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cerebro.coordinator.failures import as_told, worst
from cerebro.errors import InputError
from cerebro.machine.guard import finding
from cerebro.results.saved_run import SavedRun
from cerebro.run.records import TrialRecord
from cerebro.run.settings import Settings
from cerebro.run.store import read_decisions, reader
from cerebro.run.store.encoding import decode, encode
from cerebro.searchers.base import DONE, Decision, Searcher, Suggestion
from cerebro.searchers.stopping import EarlyStopping


def describe(searcher: Searcher) -> dict[str, Any]:
    """Return ``class``, ``parameters`` and ``adaptive``, as JSON.

    ``parameters`` is None where they are not known: the searcher has then to be given
    again by whoever resumes the run.
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
            if hasattr(searcher, attribute):
                values[name] = getattr(searcher, attribute)
                break
        else:
            return None
    try:
        known = decode(encode(values))
    except InputError:
        return None
    return known if known == values else None


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


class NoSearcher:
    """Suggests nothing and lets every trial train to its end.

    In the place of a searcher that has nothing to say: where only some trials of a run go on,
    and where all have been suggested. Of what it knows nothing is recorded.
    """

    adaptive = False
    is_recorded = False
    total = 0

    def setup(self, space: Any, **arguments: Any) -> None:
        """Do nothing."""

    def suggest(self) -> Any:
        """Return `DONE`."""
        return DONE

    def report(self, trial: int, epoch: int, metrics: Any) -> Decision:
        """Return CONTINUE."""
        return Decision.CONTINUE

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Do nothing."""


ANSWERS = tuple(decision.value for decision in Decision)
"""What is said of an epoch; all else is a suggestion: ``begin``, ``clone``, ``resume``."""

SMALL_STATE = 1024
"""Characters of a state that is written down whenever something was said."""

CHARACTERS_PER_WORD = 256
"""Of a larger one, for each answer or suggestion since it was written down last."""


class Notes:
    """Says when a searcher's state is to be written down.

    Parameters
    ----------
    said
        How many answers and suggestions are on record.
    """

    def __init__(self, searcher: Searcher, said: int = 0) -> None:
        self.said = said
        self._always = not searcher.adaptive or not getattr(searcher, "repeatable", True)
        self._written: int | None = None  # what had been said then; None: not by this process
        self._size = 0

    @property
    def are_due(self) -> bool:
        """Whether enough has been said since."""
        if self._always or self._written is None or self._size <= SMALL_STATE:
            return True
        return (self.said - self._written) * CHARACTERS_PER_WORD >= self._size

    @property
    def are_complete(self) -> bool:
        """Whether nothing has been said since."""
        return self.said == self._written

    def written(self, size: int) -> None:
        """The state was written down: so many characters."""
        self._written, self._size = self.said, size


@dataclass(frozen=True)
class Word:
    """An answer or a suggestion, as it is on record."""

    trial: int
    epoch: int
    kind: str
    epochs: int | None
    """Of a suggestion: until how many epochs are done."""

    def __str__(self) -> str:
        if self.kind in ANSWERS:
            return f"{self.kind} (trial {self.trial}, epoch {self.epoch})"
        return f"{self.kind} trial {self.trial} until {self.epochs} epochs are done"


def catch_up(
    searcher: Searcher,
    words: Iterable[Word],
    *,
    told: Callable[[int, int], Mapping[str, float]],
    config_of: Callable[[int], Mapping[str, Any]],
    epochs: int,
) -> None:
    """Tell a searcher again what it was told, and check that it says what it said.

    Parameters
    ----------
    told
        What it was told of a trial's epoch.
    config_of
        The configuration of a trial, as it is on record.
    epochs
        Those of the search.

    Raises
    ------
    InputError
        If it says something else.
    """
    for word in words:
        if word.kind in ANSWERS:
            said: Any = searcher.report(word.trial, word.epoch, told(word.trial, word.epoch))
            same = isinstance(said, Decision) and said.value == word.kind
            dropped = getattr(searcher, "dropped", None)
            if callable(dropped):
                dropped()  # which has been carried out
        else:
            said = searcher.suggest()
            same = isinstance(said, Suggestion) and _is(said, word, config_of, epochs)
        if not same:
            raise InputError(
                f"the searcher {type(searcher).__name__} does not say again what is on record: "
                f"it said {word}, and now {said!r}; it must depend on its seed and its reports "
                "alone (cerebro.testing.check_searcher), or have the attribute repeatable = False"
            )


def _is(
    said: Suggestion, word: Word, config_of: Callable[[int], Mapping[str, Any]], epochs: int
) -> bool:
    """Whether a suggestion is the one on record."""
    if (said.epochs or epochs) != word.epochs:
        return False
    if word.kind == "resume":
        return said.trial == word.trial
    clone = said.parent is not None
    known = config_of(word.trial)
    same = all(
        known.get(str(name)) == value for name, value in said.config.items() if _plain(value)
    )
    return said.trial is None and clone == (word.kind == "clone") and same


def _plain(value: Any) -> bool:
    """Whether a value is on record as it is; others may have become lists."""
    return isinstance(value, (bool, int, float, str)) and value == value


def retell(saved: SavedRun, settings: Settings, searcher: Searcher) -> None:
    """Bring a searcher that has its last recorded state to where the run was left.

    Raises
    ------
    InputError
        If it does not say again what it said.
    """
    at = saved.meta.get("searcher_said")
    if at is None or not searcher.adaptive:  # of an older run: written down with every answer
        return
    with reader(saved.folder) as connection:
        words = [Word(*row) for row in read_decisions(connection, at)]
    if not words:
        return
    records = saved.configurations

    def told(trial: int, epoch: int) -> Mapping[str, float]:
        return as_told(
            reported(records[trial], epoch, settings.stop, settings.metric, settings.mode),
            settings.metric,
            settings.mode,
        )

    def config_of(trial: int) -> Mapping[str, Any]:
        return records[trial].config

    epochs = saved.settings["epochs"]
    catch_up(searcher, words, told=told, config_of=config_of, epochs=epochs)


def reported(
    record: TrialRecord, epoch: int, stop: EarlyStopping | None, metric: str, mode: str
) -> Mapping[str, float]:
    """What was reported of a trial's epoch; see `cerebro.coordinator.search_loop`."""
    own = epoch - record.first_epoch
    if own < len(record.epochs):
        return record.epochs[own].metrics
    history = [known.to_history() for known in record.epochs]
    if record.status == "stopped" and stop is not None and stop.should_stop(history):
        return record.epochs[-1].metrics  # it stands for what it was
    return {metric: worst(mode)}  # it failed, or the user stopped it
