"""Check that the disk has enough space for a run's states, once the size of a state is known.

A run writes states in two folders. Every live trial has two slots in ``state_dir``. The run's
folder gets a state per finished epoch; `keep` decides how many of these stay, at least one per
trial. States that are not yet synced or not yet deleted take additional space.

There are two estimates: the least and the likely demand. If the least demand exceeds the free
space, the run does not start; if only the likely demand does, it gets a warning.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path

from cerebro.errors import InputError
from cerebro.machine.files import device_of, free_bytes, is_memory
from cerebro.run.settings import Settings
from cerebro.searchers.base import Searcher, expected_trials

TAIL = 3
"""The live trials per worker near the end of a run, when the last ones run in parallel."""


@dataclass(frozen=True)
class Demand:
    """The least and the likely number of bytes that a run needs in one folder."""

    least: int
    likely: int

    def __add__(self, other: Demand) -> Demand:
        return Demand(self.least + other.least, self.likely + other.likely)


@dataclass(frozen=True)
class StateDemand:
    """What determines how much space a run needs for states.

    `trials` is None if only the time limit ends the search. At most `live` trials have slots at the
    same time. `may_end_early`: before their last epoch.
    """

    state_bytes: int
    trials: int | None
    live: int
    workers: int
    epochs: int
    keep: str
    may_end_early: bool

    def estimate_slots(self) -> Demand:
        """Return the demand of the slots: two for every live trial."""
        least = min(self.workers, self.trials or self.workers)
        return Demand(2 * least * self.state_bytes, 2 * max(least, self.live) * self.state_bytes)

    def estimate_kept(self) -> Demand:
        """Return the demand of kept states and of states in flight."""
        trials = self.trials or 1
        epochs = 1 if self.may_end_early else self.epochs
        least = {"all": epochs, "best": 1, "last": 1}[self.keep]
        likely = {"all": self.epochs, "best": min(2, self.epochs), "last": 1}[self.keep]
        in_flight = Demand(1, 2 * self.workers)
        return Demand(
            (trials * least + in_flight.least) * self.state_bytes,
            (trials * likely + in_flight.likely) * self.state_bytes,
        )


@dataclass(frozen=True)
class _Place:
    """A folder, its demand, its demand with ``keep="last"``, and how to get more space."""

    folder: Path
    needs: Demand
    thrifty: Demand
    cure: str


def check_room(settings: Settings, searcher: Searcher, state_bytes: int) -> None:
    """Raise InputError if a run's states cannot fit on the disk; warn if they might not."""
    plan = _estimate_demand(settings, searcher, state_bytes)
    states, slots = settings.folder / "states", settings.state_dir
    thrifty = replace(plan, keep="last").estimate_kept()
    # If both folders are on one disk, their demands add up, and either fix helps.
    kept, of_slots = plan.estimate_kept(), plan.estimate_slots()
    places = [
        _Place(states, kept, thrifty, "choose a run= on a larger disk"),
        _Place(slots, of_slots, of_slots, "choose a larger state_dir="),
    ]
    if device_of(states) == device_of(slots):
        cure = "put the states of live trials elsewhere with state_dir=, or all with run="
        places = [_Place(states, kept + of_slots, thrifty + of_slots, cure)]
    for place in places:
        free, needs = free_bytes(place.folder), place.needs
        if needs.least > free:
            spared = place.thrifty.least < needs.least
            needed = f"needs at least {_format_megabytes(needs.least)}"
            raise InputError(_format_text(plan, place, free, needed, spared))
        if needs.likely > free:
            spared = place.thrifty.likely < needs.likely
            needed = f"is likely to need {_format_megabytes(needs.likely)}"
            warnings.warn(_format_text(plan, place, free, needed, spared), stacklevel=2)


def _estimate_demand(settings: Settings, searcher: Searcher, state_bytes: int) -> StateDemand:
    limits, strategy = settings.limits, settings.strategy
    expected = expected_trials(searcher, limits.n_trials)
    folds, workers = settings.trials_each, max(1, settings.workers)
    trials = None if expected is None else expected * folds
    live = min(trials or TAIL * workers * folds, TAIL * workers * folds)
    if searcher.adaptive:  # trials that it pauses keep their slots
        live = trials or strategy.width * folds
    may_end_early = searcher.adaptive or strategy.stop is not None
    return StateDemand(
        state_bytes, trials, live, workers, limits.epochs, settings.keep, may_end_early
    )


def _format_text(plan: StateDemand, place: _Place, free: int, needs: str, spared: bool) -> str:
    trials = "only the time limit ends the search"
    if plan.trials is not None:
        trials = f"{plan.trials} trials"
    kind = " of memory, which is the disk there," if is_memory(place.folder) else ""
    keep = ", keep fewer states with keep='last'" if spared else ""
    return (
        f"the run {needs} for states in {place.folder}, and only {_format_megabytes(free)}{kind} "
        f"are free: states of {_format_megabytes(plan.state_bytes)}, {trials}, {plan.workers} "
        f"worker(s), keep={plan.keep!r}; free some{keep}, or {place.cure}"
    )


def _format_megabytes(count: int) -> str:
    value = count / 1e6
    return f"{value:,.0f} MB" if value >= 10 else f"{value:.1f} MB"
