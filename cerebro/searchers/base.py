"""What a searcher is: it suggests configurations and hears how they do.

A searcher decides nothing but *which*: which configuration comes next, up to
which epoch, and whether a trial goes on. It holds no models, files or clocks,
so its answers are a pure function of what it was set up with and was told.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

from cerebro.errors import InputError
from cerebro.space import Space, json_value


class _Done(enum.Enum):
    DONE = "done"

    def __repr__(self) -> str:
        return "DONE"


#: Returned by :meth:`Searcher.suggest` when no suggestion will ever come again.
DONE: Final = _Done.DONE


class Decision(enum.Enum):
    """What happens to a trial after an epoch that was reported."""

    CONTINUE = "continue"  # trains on, until the epochs that its suggestion named are done
    PAUSE = "pause"  # waits, at no cost, until it is suggested again; stopped if it never is
    STOP = "stop"  # ends for good


@dataclass(frozen=True)
class Suggestion:
    """What to train next.

    Attributes
    ----------
    config
        The configuration of a new trial, or of a clone.
    epochs
        Train until so many epochs are done; None means the search's epochs. The epochs
        that a resumed trial, or a clone's parent, has done count.
    trial
        The number of a paused trial that is to go on; None starts a new trial.
        `config` is not looked at then.
    parent
        The number of the trial that a new trial is a clone of: it begins with the parent's
        state after the last epoch that was reported, and its epochs count on from there.
    parent_epoch
        An earlier epoch of the parent, of which the clone takes the state: one that the
        searcher has had kept (`pinned`).
    """

    config: dict[str, Any]
    epochs: int | None = None
    trial: int | None = None
    parent: int | None = None
    parent_epoch: int | None = None


def suggestion_problem(suggestion: Any) -> str | None:
    """Say what is wrong with a suggestion, whatever trials there are; None if nothing is."""
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


class Searcher(Protocol):
    """What :func:`cerebro.search` asks of a searcher.

    Trials are numbered from 0 in the order in which they are suggested. All
    state is JSON, so that a run can be resumed.

    Attributes
    ----------
    adaptive
        Whether decisions depend on reports; a searcher that does not say so is taken to
        listen. Reports to an adaptive searcher come in rounds, so that its decisions do not
        depend on timing: the k-th epoch of every live trial, by number. It is asked for
        suggestions at the end of a round, as long as fewer trials than ``width`` are live;
        paused ones are not.

    Notes
    -----
    A searcher may have a method ``dropped() -> list[int]``: the paused trials that it will
    not resume, each told once. They end as stopped, and what is kept for going on is freed;
    those of a searcher without it wait for the end of the run.

    ``shelved() -> list[int]`` names paused trials that will not go on soon: their slots are
    freed, and they go on from the kept state of their last epoch. ``pinned`` is a set of pairs
    (trial, epoch) whose states are kept whatever ``keep`` says, for clones.

    Its state is not recorded with every answer. When a run is resumed it may be told again
    what it was told since, and asked again, and has to say the same; a `suggest` that
    returned None or `DONE` is not repeated. An adaptive searcher that also depends on something
    else has an attribute ``repeatable = False``: then its state is recorded with every answer.

    A searcher with an attribute ``exact_metrics = True`` is told metrics that are not numbers as
    they are, and of a trial that failed or diverged no metrics instead of the worst.

    One that ends although there is more to suggest has an attribute ``cut_short = True`` then: the
    run is stopped, not finished, so that the same call resumes it.

    With an attribute ``expects_failures = True`` a run is not given up because its first trials
    fail alike.

    A configuration is what ``build`` is to get: it need not be inside the space, and several
    trials may have the same.
    """

    adaptive: bool

    def setup(
        self,
        space: Space,
        *,
        seed: int,
        epochs: int,
        n_trials: int | float | None,
        metric: str,
        mode: str,
        points: Sequence[Mapping[str, Any]],
    ) -> None:
        """Prepare for a search; called once, before anything else. May be left out.

        Parameters
        ----------
        n_trials
            The number of trials, None if the user gave none, ``math.inf`` if
            something else (a time limit) ends the search.
        metric, mode
            The metric that trials are compared by, "min" or "max".
        points
            Configurations to try first.
        """
        ...

    def suggest(self) -> Suggestion | Literal[_Done.DONE] | None:
        """Return the next suggestion; None if there is none now, `DONE` if never again.

        After None it is asked again when more has been reported. The search is over when
        no trial is live and there is no suggestion.
        """
        ...

    def report(self, trial: int, epoch: int, metrics: Mapping[str, float]) -> Decision:
        """Hear the metrics of a trial's epoch (from 0) and decide how it goes on.

        A trial that failed or diverged is reported once, with the epoch that it did not
        finish and nothing but the metric that trials are compared by: ``inf``, or ``-inf``
        where more is better. It is over, whatever is decided.

        A trial that `EarlyStopping` has ended is reported on with its last metrics, epoch by
        epoch, until it is paused or stopped or its epochs are over.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return, as JSON, what a fresh searcher after :meth:`setup` needs to go on."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state_dict`; called after :meth:`setup`."""
        ...


def prepare(searcher: Searcher, space: Space, **arguments: Any) -> None:
    """Set a searcher up; one that has no ``setup`` needs none."""
    if hasattr(searcher, "setup"):
        searcher.setup(space, **arguments)


class SequenceSearcher:
    """A searcher whose configurations are known beforehand, one by one.

    Subclasses say how many there are and which; every trial trains to the end.
    """

    adaptive = False

    def __init__(self) -> None:
        self._points: list[dict[str, Any]] = []
        self._epochs: int | None = None
        self._next = 0

    def _start(
        self, space: Space, seed: int, epochs: int, points: Sequence[Mapping[str, Any]]
    ) -> None:
        self._points = [space.complete(point, seed, trial) for trial, point in enumerate(points)]
        self._epochs = epochs
        self._next = 0

    def _count(self) -> int | float:
        """Return how many configurations there are, points included."""
        raise NotImplementedError

    def _config(self, trial: int) -> dict[str, Any]:
        """Return the configuration of trial `trial`, which is not a point."""
        raise NotImplementedError

    @property
    def total(self) -> int | None:
        """How many trials there will be; None if something else ends the search."""
        count = self._count()
        return None if count == math.inf else int(count)

    def suggest(self) -> Suggestion | Literal[_Done.DONE] | None:
        """Return the next configuration, or `DONE`."""
        trial = self._next
        if trial >= self._count():
            return DONE
        config = (
            json_value(self._points[trial], "points")
            if trial < len(self._points)
            else self._config(trial)
        )
        self._next += 1
        return Suggestion(config, self._epochs)

    def report(self, trial: int, epoch: int, metrics: Mapping[str, float]) -> Decision:
        """Return CONTINUE: every trial trains to the end."""
        return Decision.CONTINUE

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the trial that is suggested next."""
        return {"next": self._next}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the trial after the last one that was suggested."""
        self._next = int(state["next"])


def expected_trials(searcher: Searcher, n_trials: int | None) -> int | None:
    """How many trials a search will have, None if that is not known."""
    counts = [n for n in (n_trials, getattr(searcher, "total", None)) if n is not None]
    return min(counts, default=None)


def needs_end(title: str, n_trials: int | float | None) -> int | float:
    """Return the number of trials of a searcher that has no end of its own.

    Raises
    ------
    InputError
        If there is none.
    """
    if n_trials is None:
        raise InputError(
            f"{title} never ends by itself: give n_trials (how many configurations to try) or "
            "time_limit"
        )
    return n_trials


def check_n_trials(n_trials: int | float | None, points: Sequence[object]) -> None:
    """Raise InputError if `n_trials` is no positive number or below the number of points."""
    if n_trials is None:
        return
    if isinstance(n_trials, bool) or n_trials != n_trials or n_trials < 1:
        raise InputError(f"n_trials must be at least 1, not {n_trials!r}")
    if n_trials < len(points):
        raise InputError(
            f"n_trials={n_trials}, but there are {len(points)} points to try first; points count "
            "as trials, so raise n_trials or give fewer points"
        )
