"""Dask-ML's ``IncrementalSearchCV``: every call of ``partial_fit`` is an epoch.

ml.dask.org, "Hyper Parameter Searches": models that learn incrementally, ``decay_rate=None`` to
train all to the end. The rows that Dask passes are one row: the model reads the mapped files.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import BaseEstimator

from benchmarks import peers
from benchmarks.comparison.rivals.one_thread import one_thread
from benchmarks.comparison.training import Trial, Work


class Estimator(BaseEstimator):
    """A configuration, with scikit-learn's conventions."""

    def __init__(self, number: int = 0, work: Any = None) -> None:
        self.number, self.work = number, work

    def fit(self, x: Any, y: Any) -> Estimator:
        return self.partial_fit(x, y)

    def partial_fit(self, x: Any, y: Any) -> Estimator:
        one_thread()
        if not hasattr(self, "trial_"):
            self.trial_, self.epochs_ = Trial(Work(*self.work), self.number), 0
        if self.epochs_ < self.trial_.work.epochs:
            self.accuracy_ = self.trial_.epoch(self.epochs_)
        self.epochs_ += 1
        if self.epochs_ == self.trial_.work.epochs:
            self.trial_.work.finished(self.number, self.trial_.net)
        return self

    def score(self, x: Any, y: Any) -> float:
        return self.accuracy_

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        trial = state.pop("trial_", None)
        return {**state, "saved_": trial.state()} if trial else state

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("saved_", None)
        self.__dict__.update(state)
        if saved:  # the rows are mapped again, not sent
            self.trial_ = Trial(Work(*self.work), self.number)
            self.trial_.load(saved)

    def __deepcopy__(self, memo: Any) -> Estimator:
        """Dask-ML copies a model before every call."""
        made = type(self)(self.number, self.work)
        made.__setstate__(self.__getstate__())
        return made


def run(work: Work) -> None:
    """Train every configuration."""
    from dask_ml.model_selection import IncrementalSearchCV

    given = (work.name, work.size, work.data, work.place)
    with peers.dask_of(work.place, work.workers):
        IncrementalSearchCV(
            Estimator(work=given),
            {"number": list(range(work.trials))},
            n_initial_parameters="grid",
            decay_rate=None,
            max_iter=work.epochs,
            test_size=0.5,
        ).fit(np.zeros((2, 1), dtype="float32"), np.zeros(2))
        work.ended()
