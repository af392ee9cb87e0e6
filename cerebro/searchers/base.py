"""Define the interface of searchers, and the base class of Cerebro's adaptive ones.

A searcher decides what to suggest next, until which epoch it trains, and whether a trial continues.
It uses no models, files or clocks: its decisions are a pure function of its setup and its reports.
"""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from cerebro.errors import InputError
from cerebro.model import Info
from cerebro.space import Space, json_value


class _Done(enum.Enum):
    DONE = "done"

    def __repr__(self) -> str:
        return "DONE"


#: Returned by :meth:`Searcher.suggest` when no suggestion will ever come again.
DONE: Final = _Done.DONE


class Decision(enum.Enum):
    """What happens to a trial after a reported epoch."""

    CONTINUE = "continue"  # train on, until the epochs of its suggestion are done
    PAUSE = "pause"  # wait, at no cost, until suggested again; stop if it never is
    STOP = "stop"  # end permanently


@dataclass(frozen=True)
class Suggestion:
    """A trial to train next: new, resumed or cloned.

    Attributes
    ----------
    config
        The configuration of a new trial or of a clone.
    epochs
        The number of epochs until which to train, including those of the resumed trial or of a
        clone's parent; None: the search's epochs.
    trial
        The number of a paused trial to resume; `config` is then ignored. None: start a new trial.
    parent
        The number of the trial to clone. The clone is a new trial that begins with the parent's
        state after its last reported epoch, and continues the parent's epoch numbers.
    parent_epoch
        An earlier epoch of the parent, with whose state the clone begins; it must be in the
        searcher's `pinned`.
    """

    config: dict[str, Any]
    epochs: int | None = None
    trial: int | None = None
    parent: int | None = None
    parent_epoch: int | None = None


Suggested: TypeAlias = Suggestion | Literal[_Done.DONE] | None
"""The result of `Searcher.suggest`."""


def suggestion_problem(suggestion: Any) -> str | None:
    """Return why a suggestion is invalid for any trials; None if it is valid."""
    if not isinstance(suggestion, Suggestion):
        return f"suggests {suggestion!r}: suggest() must return a Suggestion, None or DONE"
    epochs = suggestion.epochs
    if epochs is not None and (type(epochs) is not int or epochs < 1):
        return f"suggests epochs={epochs!r}: it must be a whole number of at least 1, or None"
    for name in ("trial", "parent"):
        number = getattr(suggestion, name)
        if number is not None and type(number) is not int:
            return f"suggests {name}={number!r}: it must be a trial's number, or None"
    config: Any = suggestion.config
    if suggestion.trial is None and not isinstance(config, Mapping):
        return f"suggests the configuration {config!r}: it must be a mapping"
    return None


class Searcher(ABC):
    """The interface that :func:`cerebro.search` uses; subclass it to write a searcher.

    Trials are numbered from 0 in the order in which they are suggested. All state is JSON, so that
    a run can be resumed. A configuration is the argument of ``build``: it may be outside the space,
    and several trials may have the same one.

    A subclass defines `suggest`, `report`, `state_dict` and `load_state_dict`; everything else has
    a default. An object that has these four methods without being a subclass is also accepted; it
    gets the defaults that it lacks.

    Attributes
    ----------
    adaptive
        Whether decisions depend on reports. An adaptive searcher receives its reports in rounds, so
        that its decisions do not depend on timing: in round k, the k-th epoch of every live trial,
        by trial number. At the end of a round it is asked for suggestions while fewer than
        ``width`` trials are live; paused trials do not count.
    repeatable
        Whether an adaptive searcher depends only on its seed and its reports. If True, its state is
        not recorded with every answer. When a run is resumed, the searcher may then receive the
        reports since the recorded state again and be asked again, and it must give the same
        answers; a `suggest` that returned None or `DONE` is not repeated. If False, the state is
        recorded with every answer.
    exact_metrics
        Whether NaN metrics are reported unchanged, and whether a trial that failed or diverged is
        reported without metrics instead of with the worst value.
    expects_failures
        Whether a run continues even if its first trials fail in the same way.
    cut_short
        Whether the search ended although there was more to suggest. The run then counts as stopped,
        not finished, so that the same call resumes it.
    waits
        What happens when no trial is live and `suggest` returns None. If True, the run waits for
        more suggestions, because they come from outside; if False, the run ends.
    is_recorded
        Whether the run's store keeps the searcher's state.
    total
        The number of trials, if `setup` can determine it; for displays.
    steerable
        Whether the user may add trials of their own to its search (`cerebro.control.clone`, `add`).
    pinned
        Pairs (trial, epoch) whose states are kept for clones, regardless of ``keep``.
    """

    adaptive: bool = True
    repeatable: bool = True
    exact_metrics: bool = False
    expects_failures: bool = False
    cut_short: bool = False
    waits: bool = False
    steerable: bool = True
    is_recorded: bool = True
    total: int | None = None
    pinned: Collection[tuple[int, int]] = ()

    def bind_run(self, folder: Path, make_info: Callable[[int, Mapping[str, Any]], Info]) -> None:
        """Receive what a searcher needs that calls ``build`` itself; the default does nothing.

        Called before :meth:`setup`, with the run's folder and a function that returns the `Info` of
        a trial, given its number and the part of its configuration that is known.
        """
        return

    def setup(
        self,
        space: Space,
        *,
        seed: int,
        epochs: int,
        n_trials: int | float | None,
        metric: str,
        mode: str,
        points: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Prepare for a search; called once, before anything else. The default does nothing.

        Parameters
        ----------
        n_trials
            The number of trials; None if the user gave none; ``math.inf`` if something else (a time
            limit) ends the search.
        metric, mode
            The metric by which trials are compared; "min" or "max".
        points
            Configurations to try first.

        Raises
        ------
        InputError
            If the searcher cannot search this space, or if the arguments contradict each other.
        """
        return

    @abstractmethod
    def suggest(self) -> Suggested:
        """Return the next suggestion; None if there is none now, `DONE` if there will be no more.

        After it returned None, the searcher is asked again after further reports. The search is
        over when no trial is live and there is no suggestion.
        """

    @abstractmethod
    def report(self, trial: int, epoch: int, metrics: Mapping[str, float]) -> Decision:
        """Receive the metrics of a trial's epoch (from 0) and decide how the trial proceeds.

        A trial that failed or diverged is reported once, with its unfinished epoch and only the
        metric by which trials are compared: ``inf``, or ``-inf`` if more is better. The trial has
        ended, whatever the decision is.

        After `EarlyStopping` has ended a trial, its last metrics are reported for each further
        epoch, until the searcher pauses or stops it or its epochs are over.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the state, as JSON, from which a new searcher continues after :meth:`setup`."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that :meth:`state_dict` returned; called after :meth:`setup`."""

    def wants_more(
        self, state: Mapping[str, Any], n_trials_before: int | None, n_trials: int | None
    ) -> bool:
        """Return whether the searcher has more to suggest than when a run was begun or resumed.

        Called before :meth:`setup`, with the same call that began the run. If True, the searcher is
        asked again even if the run is finished.

        Parameters
        ----------
        state
            The searcher's last stored state; empty if none was stored.
        n_trials_before, n_trials
            The search's ``n_trials``, before and now. By default, the searcher has more to suggest
            if they differ.

        Raises
        ------
        InputError
            If the searcher cannot suggest as many as it is now asked for.
        """
        return n_trials != n_trials_before

    def epochs_to_come(self) -> float | None:
        """Return how many epochs the searcher will still request, beyond its suggestions so far.

        Displays use it to estimate the time left. None, the default, means that it depends on
        reports.
        """
        return None

    def trials_to_come(self) -> int | None:
        """Return how many new trials will still come, if only the searcher knows; for displays."""
        return None

    def dropped(self) -> list[int]:
        """Return the paused trials that will not be resumed, each only once.

        They end as stopped, and the states kept for resuming them are deleted. By default, paused
        trials wait until the end of the run.
        """
        return []

    def shelved(self) -> list[int]:
        """Return the paused trials that will not be resumed soon, each only once.

        Their slots are freed; the trials resume from the kept state of their last epoch.
        """
        return []


def add_defaults(searcher: Any) -> None:
    """Add the missing defaults to the class of a searcher that does not subclass `Searcher`."""
    for name, default in vars(Searcher).items():
        if not name.startswith("_") and not hasattr(searcher, name):
            setattr(type(searcher), name, default)


class SpaceSearcher(Searcher):
    """A searcher that keeps the arguments of `setup`; the base class of Cerebro's own searchers."""

    select: str = "best"  # set before `setup`: whether the best or the last epoch ranks a trial
    _endless = ""  # what never ends by itself, in words; empty: the searcher does
    _shown: tuple[str, ...] = ()  # the arguments that `repr` shows

    def setup(
        self,
        space: Space,
        *,
        seed: int,
        epochs: int,
        n_trials: int | float | None,
        metric: str,
        mode: str,
        points: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        """Prepare for a search; see `cerebro.searchers.Searcher.setup`."""
        if n_trials is not None:
            if isinstance(n_trials, bool) or n_trials != n_trials or n_trials < 1:
                raise InputError(f"n_trials must be at least 1, not {n_trials!r}")
            if n_trials < len(points):
                raise InputError(
                    f"n_trials={n_trials}, but there are {len(points)} points to try first; points "
                    "count as trials, so raise n_trials or give fewer points"
                )
        self._space, self._seed, self._epochs = space, seed, epochs
        self._n_trials = n_trials
        self._limit: float = math.inf if n_trials is None else n_trials
        self._metric, self._sign = metric, 1.0 if mode == "min" else -1.0
        self._points = [json_value(point, "points") for point in points]
        # The points, with random values where they had none.
        self._completed = [space.complete(p, seed, trial) for trial, p in enumerate(self._points)]
        self._next = 0  # how many trials were suggested: the next trial's number
        if self._endless and n_trials is None:
            raise InputError(
                f"{self._endless} never ends by itself: give n_trials (how many configurations to "
                "try) or time_limit"
            )
        self._prepare()

    def _prepare(self) -> None:
        """Reset the searcher; called at the end of :meth:`setup`."""

    def __repr__(self) -> str:
        shown = (f"{name}={getattr(self, '_' + name)!r}" for name in self._shown)
        return f"{type(self).__name__}({', '.join(shown)})"


def expected_trials(searcher: Searcher, n_trials: int | None) -> int | None:
    """Return the number of trials that a search will have; None if unknown."""
    counts = [n for n in (n_trials, searcher.total) if n is not None]
    return min(counts, default=None)


class AdaptiveSearcher(SpaceSearcher):
    """A searcher whose decisions depend on reports; its new configurations are random."""

    _most: float = math.inf  # trials, without clones, that it begins if it chooses the number

    def report(self, trial: int, epoch: int, metrics: Mapping[str, float]) -> Decision:
        """Decide how a trial proceeds; a metric that is not finite ends it and counts as worst."""
        value = metrics.get(self._metric, math.nan) * self._sign
        return self._decide(trial, epoch, value if math.isfinite(value) else math.inf)

    @abstractmethod
    def _decide(self, trial: int, epoch: int, value: float) -> Decision:
        """Decide by a value to minimize; infinity means that the trial has ended."""

    def _suggest_new(self, epochs: int) -> Suggestion:
        """Suggest the next new trial, as in random search, to be trained until epoch `epochs`."""
        trial = self._next
        # Not in setup: a run that began with n_trials may be resumed without.
        if trial == 0 and len(self._points) > self._most:
            raise InputError(
                f"without n_trials, {type(self).__name__} begins {self._most} trials, but there "
                f"are {len(self._points)} points to try first; points count as trials, so give "
                f"n_trials={len(self._points)} or more, or fewer points"
            )
        point = self._points[trial] if trial < len(self._points) else {}
        self._next += 1
        return Suggestion(self._space.complete(point, self._seed, trial), epochs)

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._next, **self._state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._next = int(state["count"])
        self._load(state)

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """Return the rest of the state."""

    @abstractmethod
    def _load(self, state: Mapping[str, Any]) -> None:
        """Continue from what `_state` returned."""


def encode_value(value: float) -> float | None:
    """Return a value as JSON: infinity becomes null."""
    return value if math.isfinite(value) else None


def decode_value(value: float | None) -> float:
    return math.inf if value is None else float(value)


def encode_values(values: Mapping[int, float]) -> list[list[Any]]:
    return [[trial, encode_value(value)] for trial, value in values.items()]


def decode_values(values: Sequence[Sequence[Any]]) -> dict[int, float]:
    return {trial: decode_value(value) for trial, value in values}
