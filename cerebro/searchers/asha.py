"""Implement ASHA: successive halving that never waits for a rung to fill."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

from cerebro.errors import InputError
from cerebro.searchers.base import (
    DONE,
    AdaptiveSearcher,
    Decision,
    Suggested,
    Suggestion,
    check_rungs,
    decode_value,
    encode_value,
    rung_epochs,
)


class _Rung:
    """The trials that reached a rung, sorted, and which of them have not been promoted."""

    def __init__(self, reduction_factor: int) -> None:
        self._factor = reduction_factor
        self._ranked: list[tuple[float, int]] = []  # value and trial
        self._stayed: list[tuple[float, int]] = []  # a heap of those that may still be promoted

    def __len__(self) -> int:
        return len(self._ranked)

    def add(self, trial: int, value: float, *, moved: bool = False) -> None:
        """Add a trial that reached the rung, or that has ended (infinity) and still counts."""
        insort(self._ranked, (value, trial))
        if math.isfinite(value) and not moved:
            heapq.heappush(self._stayed, (value, trial))

    def is_good(self, value: float, trial: int) -> bool:
        """Return whether a trial is among the rung's best ``1/reduction_factor``."""
        rank = bisect_left(self._ranked, (value, trial))
        return rank < len(self._ranked) // self._factor

    @property
    def moved(self) -> int:
        return bisect_left(self._ranked, (math.inf, -1)) - len(self._stayed)

    @property
    def promotable(self) -> int:
        stayed = set(self._stayed)
        return sum(entry in stayed for entry in self._ranked[: len(self) // self._factor])

    def pop_promoted(self) -> int | None:
        """Remove and return the best trial to promote; None if no trial is good enough."""
        if self._stayed and self.is_good(*self._stayed[0]):
            return heapq.heappop(self._stayed)[1]
        return None

    def state_dict(self) -> list[list[Any]]:
        """Return, as JSON, each trial with its value and with 1 if it was promoted, else 0."""
        stayed = {trial for _, trial in self._stayed}
        return [[trial, encode_value(v), int(trial not in stayed)] for v, trial in self._ranked]

    @classmethod
    def from_state(cls, reduction_factor: int, state: Sequence[Sequence[Any]]) -> _Rung:
        rung = cls(reduction_factor)
        for trial, value, moved in state:
            rung.add(trial, decode_value(value), moved=bool(moved))
        return rung


class ASHA(AdaptiveSearcher):
    """Asynchronous successive halving (Li et al., "A System for Massively Parallel
    Hyperparameter Tuning", MLSys 2020).

    Parameters
    ----------
    min_epochs
        The number of epochs before the first comparison.
    reduction_factor
        One in this many trials is promoted from a rung.
    variant
        ``"promotion"``, as published: a trial pauses at a rung and continues once it is among the
        best ``1/reduction_factor`` of the trials that reached the rung. ``"stopping"``: a trial is
        stopped permanently unless it is among the best when it reaches the rung; the first
        ``reduction_factor - 1`` trials at a rung continue (in Ray Tune and Syne Tune only the
        first). The stopping variant may lose the best trial if that trial reaches a rung early.

    Notes
    -----
    ``n_trials`` or ``time_limit`` limits the number of trials. As with every adaptive searcher,
    reports are delivered in rounds, and the outcome does not depend on timing, unless the search
    has ``asynchronous=True``.
    """

    _endless = "ASHA"
    _shown = ("min_epochs", "reduction_factor", "variant")

    def __init__(
        self,
        min_epochs: int = 1,
        reduction_factor: int = 3,
        variant: Literal["promotion", "stopping"] = "promotion",
    ) -> None:
        if variant not in ("promotion", "stopping"):
            raise InputError(f"variant must be 'promotion' or 'stopping', not {variant!r}")
        self._min_epochs, self._reduction_factor = check_rungs(min_epochs, reduction_factor)
        self._variant = variant

    def _prepare(self) -> None:
        check_rungs(self._min_epochs, self._reduction_factor, self._epochs)
        # The epochs of each rung.
        self._epochs_of = rung_epochs(self._min_epochs, self._reduction_factor, self._epochs)
        self._rungs = [_Rung(self._reduction_factor) for _ in self._epochs_of]
        self._live: set[int] = set()

    def suggest(self) -> Suggested:
        """Return the trial to promote from the highest rung that has one, else a new trial."""
        promotes = self._variant == "promotion"
        for level in range(len(self._rungs) - 2, -1, -1) if promotes else ():
            trial = self._rungs[level].pop_promoted()
            if trial is not None:
                self._live.add(trial)
                return Suggestion({}, self._epochs_of[level + 1], trial=trial)
        if self._next < self._limit:
            self._live.add(self._next)
            return self._suggest_new(self._epochs_of[0] if promotes else self._epochs)
        return None if self._live else DONE

    def _decide(self, trial: int, epoch: int, value: float) -> Decision:
        level = sum(epoch + 1 > epochs for epochs in self._epochs_of)
        if not math.isfinite(value):
            self._rungs[min(level, len(self._rungs) - 1)].add(trial, value)
            self._live.discard(trial)
            return Decision.STOP
        if epoch + 1 != self._epochs_of[level]:
            return Decision.CONTINUE
        rung = self._rungs[level]
        rung.add(trial, value)
        if level == len(self._rungs) - 1:
            self._live.discard(trial)
            return Decision.CONTINUE
        if self._variant == "promotion":
            self._live.discard(trial)
            return Decision.PAUSE
        # The first trials to arrive cannot be compared with others, so they continue.
        if len(rung) < self._reduction_factor or rung.is_good(value, trial):
            return Decision.CONTINUE
        self._live.discard(trial)
        return Decision.STOP

    def epochs_to_come(self) -> float | None:
        if self._variant == "stopping":
            return None
        reach = self._limit
        epochs = (reach - self._next) * self._epochs_of[0]
        for rung, (before, after) in zip(self._rungs, pairwise(self._epochs_of), strict=False):
            more = max(0.0, self._expect_promotions(reach) - self._expect_promotions(len(rung)))
            promoted = rung.promotable + more
            epochs += promoted * (after - before)
            reach = rung.moved + promoted
        return epochs

    def _expect_promotions(self, trials: float) -> float:
        """Return how many of the trials that reach a rung are promoted, on average."""
        if trials < self._reduction_factor:
            return 0.0
        # Trials that were among the best when they arrived count, too. This excess grows with the
        # square root; its factors come from a simulation.
        return trials / self._reduction_factor + max(0.0, 0.4 * math.sqrt(trials) - 0.5)

    def _state(self) -> dict[str, Any]:
        return {"rungs": [rung.state_dict() for rung in self._rungs], "live": sorted(self._live)}

    def _load(self, state: Mapping[str, Any]) -> None:
        factor = self._reduction_factor
        self._rungs = [_Rung.from_state(factor, rung) for rung in state["rungs"]]
        self._live = set(state["live"])
