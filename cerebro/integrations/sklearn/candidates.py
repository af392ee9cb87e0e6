"""The configurations of `SearchCV`: choices of its space, the models that they make, their scores.

A configuration stores a tuple as a list, a mapping or an estimator as its text, so that tables and
plots show what it is. All become the original again before they reach the estimator or the results.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import joblib
import numpy as np
from sklearn import get_config
from sklearn.base import clone

from cerebro.arguments import warn_user
from cerebro.errors import InputError
from cerebro.integrations.sklearn.heads import Heads, split_pipeline, take_rows
from cerebro.integrations.sklearn.model import Model
from cerebro.integrations.sklearn.steps import kind_of, learns_by_batch, steps_of
from cerebro.model import Batch
from cerebro.space import Choice, Constant, Space, as_space, path_name
from cerebro.space.dimensions import When, json_value
from cerebro.space.foreign import translate
from cerebro.space.search_space import Compiler, as_dimension

if TYPE_CHECKING:
    from cerebro.results.result import Result

SCORE = "score"  # the metric that ranks configurations
FAILED = ("failed", "diverged")  # the statuses of trials that have no score
MAX_TRIED = 64  # how many configurations are drawn to find one that learns by batch

Originals = dict[str, dict[str, Any]]
"""Choices by parameter and by the JSON text of the value that stands for them."""

# --- choices that are not JSON --------------------------------------------------


def as_choices(space: Any) -> tuple[Space, Originals]:
    """Return a space whose configurations are JSON, and the choices that its values stand for."""
    if isinstance(space, (list, tuple)):
        raise InputError(
            "space must be a mapping, not a list of grids: search each one separately, or use "
            "cerebro.when(...) for parameters that depend on others"
        )
    mapping = space.mapping if isinstance(space, Space) else space
    originals: Originals = {}
    if isinstance(mapping, Mapping):
        mapping = _convert_mapping(mapping, originals)
    return as_space(mapping), originals


def restore_choices(config: Mapping[str, Any], originals: Originals) -> dict[str, Any]:
    """Return a configuration's parameters, with the choices that its values stand for."""
    values = dict(config)
    for name in values.keys() & originals.keys():
        values[name] = deepcopy(originals[name].get(json.dumps(values[name]), values[name]))
    return values


def _convert_mapping(mapping: Mapping[str, Any], originals: Originals) -> dict[Any, Any]:
    result: dict[Any, Any] = {}
    for name, value in mapping.items():
        whens = Compiler.find_whens(value, (str(name),))
        if whens is None:
            result[name] = _convert_dimension(value, name, originals)
        else:
            result[name] = [_convert_condition(item, originals) for item in whens]
    return result


def _convert_condition(item: Any, originals: Originals) -> Any:
    """Return a condition, with its value or list of values as configurations have them."""
    if not isinstance(item.space, Mapping):
        return item  # as_space raises an error
    is_list = isinstance(item.value, list)
    value = [*map(_encode_choice, item.value)] if is_list else _encode_choice(item.value)
    return When(item.name, value, _convert_mapping(item.space, originals))


def _convert_dimension(value: Any, name: Any, originals: Originals) -> Any:
    """Return a value of the space, with JSON in place of its choices."""
    if not isinstance(name, str):
        return value  # as_space raises an error
    if isinstance(value, tuple):  # choices, as in scikit-learn's grids
        value = list(value)
    dimension = translate(value, name)
    if dimension is None:
        if isinstance(value, (Mapping, Space)):
            raise InputError(
                f"space: {name!r} is a mapping, not a list of choices: give "
                f"[{value!r}] for a constant; parameters of a pipeline's steps have names such as "
                "'sgdclassifier__alpha'"
            )
        dimension = as_dimension(value, name)
    if not isinstance(dimension, Choice) or not isinstance(dimension.options, (list, tuple)):
        return value
    special = [option for option in dimension.options if _is_special(option)]
    if not special:
        return value
    for option in special:
        text = json.dumps(json_value(_encode_choice(option), name))
        known = originals.setdefault(name, {}).setdefault(text, option)
        if known is not option and joblib.hash(known) != joblib.hash(option):
            raise InputError(f"space: two different choices of {name!r} have the same text, {text}")
    return type(dimension)([_encode_choice(option) for option in dimension.options])


def _is_special(option: Any) -> bool:
    if isinstance(option, list):
        return any(map(_is_special, option))
    # Tuples, mappings, estimators, functions: what JSON has no word for.
    return option is not None and not isinstance(option, (str, int, float, np.generic))


def _encode_choice(option: Any) -> Any:
    """Return what stands for a choice in configurations; tuples become lists later."""
    if isinstance(option, (list, tuple)):
        return [*map(_encode_choice, option)]
    return str(_convert_numbers(option)) if _is_special(option) else option


def _convert_numbers(value: Any) -> Any:
    """Return a mapping with Python's numbers in place of NumPy's, whose text is easy to read."""
    if isinstance(value, Mapping):
        return {_convert_numbers(key): _convert_numbers(item) for key, item in value.items()}
    return value.item() if isinstance(value, np.generic) else value


# --- models ---------------------------------------------------------------------


class ScoredModel(Model):
    """An estimator that a scikit-learn scorer validates once, on all rows.

    In the data, classes are the numbers 0, 1, ...; the estimator learns the original `labels`. If
    the columns of a pipeline's head are given, the data has numbers of their rows.
    """

    evaluates_whole = True

    def __init__(
        self,
        estimator: Any,
        scorer: Callable[..., Any],
        labels: Any,
        weight: str | None,
        rows: Any = None,
    ) -> None:
        super().__init__(estimator, classes=labels, weight=weight)
        self._scorer, self._labels, self._rows = scorer, labels, rows

    def _features(self, batch: Batch) -> Any:
        if self._rows is None:
            return super()._features(batch)
        return take_rows(self._rows, batch["x"])

    def _columns(self, batch: Batch) -> tuple[Any, Any]:
        x, y = super()._columns(batch)
        return x, y if self._labels is None else self._labels[y]

    def eval_batch(self, batch: Batch) -> dict[str, Any]:
        return self._measure(batch)[0]  # batches are not scored

    def _measure(self, batch: Batch) -> tuple[dict[str, float], tuple[Any, ...]]:
        means, parts = super()._measure(batch)
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
        weight: str | None,
        originals: Originals,
        balances: Sequence[Mapping[Any, float]],
        heads: Heads | None,
        *,
        keeps_run: bool,
    ) -> None:
        self.estimator, self.scorer, self.labels = estimator, scorer, labels
        self.balances, self.heads = balances, heads  # the last balance is that of all rows
        self.weight, self.originals, self.keeps_run = weight, originals, keeps_run
        self.output = get_config()["transform_output"]
        self.__module__ = type(self).__module__
        self.__qualname__ = type(self).__qualname__

    def __call__(self, config: Mapping[str, Any], info: Any) -> ScoredModel:
        estimator = configure_estimator(self.estimator, config, self.originals)
        if self.output != "default":  # set for this process, but workers are others
            for _, step in steps_of(estimator):
                if hasattr(step, "set_output") and not hasattr(step, "_sklearn_output_config"):
                    step.set_output(transform=self.output)
        rows = None
        if self.heads is not None:
            setting = self._setting_of_head(config)
            head, estimator = split_pipeline(estimator)
            rows = self.heads.transform(head, setting, info.fold)
        balance_classes(estimator, self.balances, info.fold)
        return ScoredModel(estimator, self.scorer, self.labels, self.weight, rows)

    def _setting_of_head(self, config: Mapping[str, Any]) -> str:
        """Return the text of the parameters that do not belong to the last step."""
        last = self.estimator.steps[-1][0] if hasattr(self.estimator, "steps") else ""
        own = {k: v for k, v in config.items() if k.partition("__")[0] not in (last, "batch_size")}
        return json.dumps(own, sort_keys=True)

    def lines_on_interrupt(self, kept: str, path: str) -> list[str]:
        """Return what an interrupted `fit` shows; `kept` is a line on what the run's folder has."""
        # Users do not have this `build`, so they cannot resume the run.
        if not self.keeps_run:
            return ["interrupted: nothing is kept; SearchCV(run=...) keeps the trials"]
        return [
            f"{kept}, but SearchCV cannot resume them",
            f"to see them:  result = cerebro.open({path!r})",
        ]


def balance_classes(
    estimator: Any, balances: Sequence[Mapping[Any, float]], fold: int | None
) -> None:
    """Replace ``class_weight="balanced"`` by the weights of a fold's training rows."""
    final = steps_of(estimator)[-1][1]
    if getattr(final, "class_weight", None) == "balanced":
        final.set_params(class_weight=dict(balances[-1 if fold is None else fold]))


def has_head(estimator: Any, originals: Originals) -> bool:
    """Return whether a pipeline has, or may have, steps before the last that need all rows."""
    if not hasattr(estimator, "steps"):
        return False
    names = {name for name, _ in estimator.steps[:-1]}
    steps = [step for _, step in estimator.steps[:-1]]
    steps += [step for name in names & originals.keys() for step in originals[name].values()]
    return not all(step in (None, "passthrough") or learns_by_batch(step) for step in steps)


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
            kind_of(candidate, whole=True)
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
            try:
                kind_of(configure_estimator(estimator, {name: option}, originals), whole=True)
            except InputError as error:
                choice = restore_choices({name: option}, originals)[name]
                raise InputError(f"space: {name}={choice!r}: {error}") from None
            except Exception:  # it may depend on other parameters; a trial will report it
                continue


# --- results, as scikit-learn's searches have them --------------------------------


def conclude(result: Result, originals: Originals, refit: Any) -> dict[str, Any]:
    """Return the attributes that `SearchCV` gets from its run; warn of trials without a score."""
    trials = result.trials
    failed = [trial for trial in trials if trial.status in FAILED]
    if failed:
        warn_user(
            f"{len(failed)} of {len(trials)} configurations failed, the first: {failed[0].error}"
        )
    table = cv_results(result, originals)
    means = table["mean_test_score"]
    if not failed and not np.isfinite(means).all():
        warn_user(f"One or more of the test scores are non-finite: {means}")
    if callable(refit):
        index = _check_index(refit(table), len(trials))
    else:
        # `Result.best` may be a configuration that failed later; here it has no score.
        scored = (t.number for t in result.top(len(trials)) if t.status not in FAILED)
        index = next(scored, result.best.number)
    return {
        "cv_results_": table,
        "best_index_": index,
        "best_params_": table["params"][index],
        "best_score_": float(means[index]),
        "best_epochs_": int(table["epochs"][index]),
    }


def cv_results(result: Result, originals: Originals) -> dict[str, Any]:
    """Return a run with folds as scikit-learn's table of a search: one value per configuration."""
    from scipy.stats import rankdata

    trials = result.trials
    scores = np.array([[f.metrics.get(SCORE, math.nan) for f in t.folds] for t in trials], float)
    scores[[trial.status in FAILED for trial in trials]] = math.nan
    params = [restore_choices(trial.config, originals) for trial in trials]
    table: dict[str, Any] = _collect_times(result, scores.shape)
    for name in sorted({name for config in params for name in config}):
        column = np.ma.MaskedArray(np.empty(len(params), object), mask=True)
        for number, config in enumerate(params):
            if name in config:
                column[number] = config[name]
        table[f"param_{name}"] = column
    table["params"] = params
    for fold in range(scores.shape[1]):
        table[f"split{fold}_test_score"] = scores[:, fold]
    table["mean_test_score"] = scores.mean(axis=1)
    table["std_test_score"] = scores.std(axis=1)
    # The highest mean has rank 1, ties share the lowest rank, NaN comes last.
    losses = np.where(np.isnan(table["mean_test_score"]), np.inf, -table["mean_test_score"])
    table["rank_test_score"] = rankdata(losses, method="min").astype(np.int32)
    table["epochs"] = np.array(
        [t.epoch if t.best_epoch is None else t.best_epoch + 1 for t in trials], np.int64
    )
    table["status"] = np.array([trial.status for trial in trials])
    return table


def _collect_times(result: Result, shape: tuple[int, ...]) -> dict[str, Any]:
    seconds = {"train": np.zeros(shape), "eval": np.zeros(shape)}
    for unit in result.units():
        seconds[unit["kind"]][unit["trial"], unit["fold"]] += unit["end"] - unit["start"]
    table = {}
    for name, kind in (("fit", "train"), ("score", "eval")):
        table[f"mean_{name}_time"] = seconds[kind].mean(axis=1)
        table[f"std_{name}_time"] = seconds[kind].std(axis=1)
    return table


def _check_index(index: Any, count: int) -> int:
    """Return `index`, the return value of the function `refit`, as an int after checking it."""
    if isinstance(index, bool) or not isinstance(index, (int, np.integer)):
        raise TypeError(f"refit must return the index of a configuration, an int, not {index!r}")
    if not 0 <= index < count:
        raise IndexError(f"refit returned the index {index}, but there are {count} configurations")
    return int(index)
