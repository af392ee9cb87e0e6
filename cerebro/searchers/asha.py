"""ASHA: successive halving that never waits for a rung to fill."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from cerebro.errors import InputError
from cerebro.searchers.adaptive import (
    AdaptiveSearcher,
    check_rungs,
    decode_value,
    encode_value,
    rung_epochs,
)
from cerebro.searchers.base import DONE, Decision, Suggestion, _Done


class ASHA(AdaptiveSearcher):
    """Asynchronous successive halving (Li et al., "A System for Massively Parallel
    Hyperparameter Tuning", MLSys 2020).

    Parameters
    ----------
    min_epochs
        Epochs before the first comparison.
    reduction_factor
        One in so many goes on from a rung.
    variant
        ``"promotion"``, as published: a trial pauses at a rung and goes on once it is among
        the best ``1/reduction_factor`` of those that have come there. ``"stopping"``, as most
        tools have it: a trial is stopped for good unless it is among the best when it comes;
        the best of all is lost if it comes when few have.

    Notes
    -----
    ``n_trials`` or ``time_limit`` says when to stop beginning trials. Reports come in rounds
    as for every adaptive searcher, so that the outcome does not depend on timing, unless the
    search is told ``asynchronous=True``.
    """

    def __init__(
        self,
        min_epochs: int = 1,
        reduction_factor: int = 3,
        variant: Literal["promotion", "stopping"] = "promotion",
    ) -> None:
        super().__init__()
        check_rungs(min_epochs, reduction_factor)
        if variant not in ("promotion", "stopping"):
            raise InputError(f"variant must be 'promotion' or 'stopping', not {variant!r}")
        self._min_epochs = min_epochs
        self._reduction_factor = reduction_factor
        self._variant = variant
        self._rungs: list[int] = []
        self._values: list[dict[int, float]] = []  # of each rung
        self._moved: list[set[int]] = []  # who has gone on from each rung
        self._live: set[int] = set()

    def _prepare(self) -> None:
        if self._n_trials is None:
            raise InputError(
                "ASHA never ends by itself: give n_trials (how many configurations to try) or "
                "time_limit"
            )
        check_rungs(self._min_epochs, self._reduction_factor, self._epochs)
        self._rungs = rung_epochs(self._min_epochs, self._reduction_factor, self._epochs)
        self._values = [{} for _ in self._rungs]
        self._moved = [set() for _ in self._rungs]
        self._live = set()

    def suggest(self) -> Suggestion | Literal[_Done.DONE] | None:
        """Return the trial to promote in the highest rung that has one, else a new one."""
        promoted = self._promotable()
        if promoted is not None:
            level, trial = promoted
            self._moved[level].add(trial)
            self._live.add(trial)
            return self._again(trial, self._rungs[level + 1])
        assert self._n_trials is not None
        if self._count < self._n_trials:
            self._live.add(self._count)
            promotion = self._variant == "promotion"
            return self._new(self._rungs[0] if promotion else self._epochs)
        return None if self._live else DONE

    def _promotable(self) -> tuple[int, int] | None:
        if self._variant == "stopping":
            return None
        for level in range(len(self._rungs) - 2, -1, -1):
            for trial in self._best(level):
                if trial not in self._moved[level]:
                    return level, trial
        return None

    def _best(self, level: int) -> list[int]:
        """Return the best ``1/reduction_factor`` of those that have come to a rung, best first."""
        ranked = sorted((value, trial) for trial, value in self._values[level].items())
        count = len(ranked) // self._reduction_factor
        return [trial for value, trial in ranked[:count] if math.isfinite(value)]

    def _decide(self, trial: int, epoch: int, value: float) -> Decision:
        level = sum(epoch + 1 > rung for rung in self._rungs)
        if not math.isfinite(value):
            self._values[min(level, len(self._rungs) - 1)][trial] = value
            self._live.discard(trial)
            return Decision.STOP
        if epoch + 1 != self._rungs[level]:
            return Decision.CONTINUE
        self._values[level][trial] = value
        if level == len(self._rungs) - 1:
            self._live.discard(trial)
            return Decision.CONTINUE
        if self._variant == "promotion":
            self._live.discard(trial)
            return Decision.PAUSE
        # The first to come cannot be compared with anybody: it goes on.
        if len(self._values[level]) < self._reduction_factor or trial in self._best(level):
            return Decision.CONTINUE
        self._live.discard(trial)
        return Decision.STOP

    def _state(self) -> dict[str, Any]:
        values = [[[t, encode_value(v)] for t, v in rung.items()] for rung in self._values]
        moved = [sorted(rung) for rung in self._moved]
        return {"values": values, "moved": moved, "live": sorted(self._live)}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._values = [{t: decode_value(v) for t, v in rung} for rung in state["values"]]
        self._moved = [set(rung) for rung in state["moved"]]
        self._live = set(state["live"])

    def __repr__(self) -> str:
        return (
            f"ASHA(min_epochs={self._min_epochs}, reduction_factor={self._reduction_factor}, "
            f"variant={self._variant!r})"
        )
