"""When the state of a searcher that listens is written down, and how it is caught up from there.

What a searcher says is on record with every answer. Its own state grows with its trials: written
down as often, it would soon cost more than all else. So it is written down when as much
has been said since as it is large, which makes the cost of all of it together proportional to the
conversation. A run that is resumed gives the searcher its last state and tells it again
what it was told since; it must say the same again, as every searcher does that depends on its
seed and what it hears alone. One that does not (``repeatable = False``) is written down always.

No file and no run: `cerebro.search_loop` writes, `cerebro.resume` reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cerebro.errors import InputError
from cerebro.searchers.base import Decision, Searcher, Suggestion

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
