"""Trials and a controller as Tune's schedulers know them, with nothing behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Trial:
    """What a scheduler sees of a trial: who it is, how it stands and what it said last."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    TERMINATED = "TERMINATED"
    ERROR = "ERROR"

    is_saving = False

    def __init__(self, trial_id: str, config: dict[str, Any]) -> None:
        self.trial_id = trial_id
        self.config = config
        self.evaluated_params = dict(config)
        self.status = Trial.PENDING
        self.last_result: dict[str, Any] = {}
        self.number: int | None = None
        """Cerebro's number, once it has begun."""

    def is_finished(self) -> bool:
        """Whether it is over."""
        return self.status in (Trial.TERMINATED, Trial.ERROR)

    def __repr__(self) -> str:
        return f"trial_{self.trial_id}"


class Controller:
    """What a scheduler may ask of Tune's controller.

    Parameters
    ----------
    stop
        Ends a trial that is paused or has not begun, because the scheduler says so.
    """

    def __init__(self, stop: Callable[[Trial], None]) -> None:
        self.trials: list[Trial] = []
        self._stop = stop

    def get_trials(self) -> list[Trial]:
        """Return all trials in order of creation; those that are over are forgotten."""
        return self.trials

    def get_live_trials(self) -> list[Trial]:
        """Return the trials that are not over."""
        return [trial for trial in self.trials if not trial.is_finished()]

    def stop_trial(self, trial: Trial) -> None:
        """End a trial for good."""
        self._stop(trial)

    def forget_ended(self) -> None:
        """Drop the trials that are over."""
        self.trials = self.get_live_trials()
