"""The models of `SearchCV`: its estimator with the parameters of a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from sklearn import get_config
from sklearn.base import clone

from cerebro.errors import InputError
from cerebro.integrations.sklearn.choices import Originals, restore_choices
from cerebro.integrations.sklearn.model import Model
from cerebro.integrations.sklearn.steps import kind_of, steps_of
from cerebro.space import Choice, Constant, Space, path_name

SCORE = "score"
"""The metric that ranks configurations."""

MAX_TRIED = 64
"""How many configurations are drawn to find one that learns by batch."""


class ScoredModel(Model):
    """An estimator that a scikit-learn scorer validates once, on all rows.

    In the data, classes are the numbers 0, 1, ...; the estimator learns the original `labels`.
    """

    evaluates_whole = True

    def __init__(
        self, estimator: Any, scorer: Callable[..., Any], labels: Any, weight: str | None = None
    ) -> None:
        super().__init__(estimator, classes=labels, weight=weight)
        self._scorer = scorer
        self._labels = labels

    def _columns(self, batch: Mapping[str, Any]) -> tuple[Any, Any]:
        x, y = super()._columns(dict(batch))
        return x, y if self._labels is None else self._labels[y]

    def eval_batch(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        return self._measure(batch)[0]  # batches are not scored

    def _measure(self, batch: Mapping[str, Any]) -> tuple[dict[str, float], tuple[Any, ...]]:
        means, parts = super()._measure(dict(batch))
        return means, parts if self._weight is None else (*parts, np.array(batch[self._weight]))

    def _measure_whole(self, parts: Sequence[Any]) -> dict[str, float]:
        x, y, _, *weights = parts
        weighted = bool(weights) and _weights_rows(self._scorer)
        options = {"sample_weight": weights[0]} if weighted else {}
        score = self._scorer(self.estimator, x, y, **options)
        if isinstance(score, Mapping):
            raise InputError(
                f"scoring returned several scores, {', '.join(map(str, score))}: SearchCV takes one"
            )
        return {SCORE: float(score)}


def _weights_rows(scorer: Any) -> bool:
    """Return whether a scorer takes ``sample_weight``, by the rule of scikit-learn's searches."""
    if hasattr(scorer, "_accept_sample_weight"):
        return bool(scorer._accept_sample_weight())
    return "sample_weight" in inspect.signature(scorer).parameters


class BuildEstimator:
    """The search's ``build``: the estimator with a configuration's parameters."""

    unsent = "the estimator, the scoring or a choice of the space"

    def __init__(
        self,
        estimator: Any,
        scorer: Callable[..., Any],
        labels: Any,
        weight: str | None = None,
        originals: Originals | None = None,
        *,
        keeps_run: bool = False,
    ) -> None:
        self.keeps_run = keeps_run
        self.estimator = estimator
        self.scorer = scorer
        self.labels = labels
        self.weight = weight
        self.originals = originals or {}
        self.output = get_config()["transform_output"]
        self.__module__ = type(self).__module__
        self.__qualname__ = type(self).__qualname__

    def __call__(self, config: Mapping[str, Any]) -> ScoredModel:
        estimator = self.configure_estimator(config)
        if self.output != "default":  # set for this process, but workers are others
            for _, step in steps_of(estimator):
                if hasattr(step, "set_output") and not hasattr(step, "_sklearn_output_config"):
                    step.set_output(transform=self.output)
        return ScoredModel(estimator, self.scorer, self.labels, self.weight)

    def lines_on_interrupt(self, kept: str, path: str) -> list[str]:
        """Return what an interrupted `fit` shows; `kept` is a line on what the run's folder has."""
        # Users do not have this `build`, so they cannot resume the run.
        if not self.keeps_run:
            return ["interrupted: nothing is kept; SearchCV(run=...) keeps the trials"]
        return [
            f"{kept}, but SearchCV cannot resume them",
            f"to see them:  result = cerebro.open({path!r})",
        ]

    def configure_estimator(self, config: Mapping[str, Any]) -> Any:
        return configure_estimator(self.estimator, config, self.originals)


def configure_estimator(estimator: Any, config: Mapping[str, Any], originals: Originals) -> Any:
    values = restore_choices(config, originals)
    values.pop("batch_size", None)
    return clone(estimator).set_params(**values)


def find_learning_estimator(estimator: Any, space: Space, originals: Originals) -> Any:
    """Return the estimator, with parameters of the space if it needs them to learn by batch."""
    for number in range(-1, MAX_TRIED):
        try:
            candidate = estimator
            if number >= 0:
                candidate = configure_estimator(estimator, space.sample(0, number), originals)
            kind_of(candidate)
        except Exception:  # also of parameters that the estimator does not have
            continue
        return candidate
    return estimator  # for its own error


def check_choices(estimator: Any, space: Space, originals: Originals) -> None:
    """Raise InputError for a choice with which the estimator cannot learn by batch."""
    for node in space.nodes:
        name, dimension = path_name(node.path), node.dimension
        options = dimension.options if isinstance(dimension, Choice) else ()
        if isinstance(dimension, Constant):
            options = [dimension.value]
        for option in () if name == "batch_size" else options:
            values = restore_choices({name: option}, originals)
            try:
                configured = clone(estimator).set_params(**values)
            except Exception:  # it may depend on other parameters; a trial will report it
                continue
            try:
                kind_of(configured)
            except InputError as error:
                raise InputError(f"space: {name}={values[name]!r}: {error}") from None
