"""The configurations of `SearchCV`: choices of its space, the models that they make, their scores.

A configuration stores a tuple as a list, a mapping or an estimator as its text, so that tables and
plots show what it is. All become the original again before they reach the estimator or the results.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from typing import TYPE_CHECKING, Any

import joblib
import numpy as np
from sklearn import config_context, get_config
from sklearn.base import clone
from sklearn.model_selection._search import _yield_masked_array_for_each_param
from sklearn.utils.class_weight import compute_class_weight

from cerebro.arguments import warn_user
from cerebro.errors import InputError
from cerebro.integrations.sklearn.heads import Rows, split_pipeline, take_rows
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
GRID = "param_grid"  # where a space is a list of grids, the number of a configuration's grid
FAILED = ("failed", "diverged")  # the statuses of trials that have no score
IGNORED = ("max_iter", "validation_fraction")  # parameters that `partial_fit` does not read
IGNORED_BY_LINEAR = ("tol", "n_iter_no_change")
MAX_TRIED = 64  # how many configurations are drawn to find one that learns by batch

Originals = dict[str, dict[str, Any]]
"""Choices by parameter and by the JSON text of the value that stands for them."""

# --- choices that are not JSON --------------------------------------------------


def as_choices(space: Any) -> tuple[Space, Originals]:
    """Return a space whose configurations are JSON, and the choices that its values stand for."""
    originals: Originals = {}
    if isinstance(space, (list, tuple)) and all([space, *(isinstance(g, Mapping) for g in space)]):
        if 0 < sum("batch_size" in grid for grid in space) < len(space):
            raise InputError("space: give batch_size in each grid of the list, or in none")
        grids = {GRID: [*range(len(space))]}
        whens = [When(GRID, number, _sort(grid)) for number, grid in enumerate(space)]
        return as_space(_convert_mapping({**grids, "grids": whens}, originals)), originals
    mapping = space.mapping if isinstance(space, Space) else space
    if isinstance(mapping, Mapping):
        mapping = _convert_mapping(_sort(mapping), originals)
    return as_space(mapping), originals


def _sort(mapping: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return a mapping in the order in which scikit-learn's grids have it."""
    return dict(sorted(mapping.items(), key=lambda item: str(item[0])))


def restore_choices(config: Mapping[str, Any], originals: Originals) -> dict[str, Any]:
    """Return a configuration's parameters, with the choices that its values stand for."""
    values = {name: value for name, value in config.items() if name != GRID}
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
    # Tuples, mappings, estimators, functions, NaN: what JSON has no word for.
    if isinstance(option, (float, np.floating)) and not math.isfinite(option):
        return True
    return option is not None and not isinstance(option, (str, int, float, np.generic))


def _encode_choice(option: Any) -> Any:
    """Return what stands for a choice in configurations; tuples become lists later."""
    if isinstance(option, (list, tuple)):
        return [*map(_encode_choice, option)]
    if not _is_special(option):
        return option
    text = str(_convert_numbers(option))
    # Long lists are shortened, so that different choices may have one text.
    return f"{text} #{joblib.hash(option)[:8]}" if "..." in text else text


def _convert_numbers(value: Any) -> Any:
    """Return a mapping with Python's numbers in place of NumPy's, whose text is easy to read."""
    if isinstance(value, Mapping):
        return {_convert_numbers(key): _convert_numbers(item) for key, item in value.items()}
    return value.item() if isinstance(value, np.generic) else value


# --- models ---------------------------------------------------------------------


class Scoring:
    """The scorers of a search, which count as in the process that called `fit`.

    Parameters
    ----------
    scorer
        ``scorer(estimator, X, y, **metadata)``: returns a number, or a mapping of several.
    refit
        Decides which of several scores ranks configurations.
    takes_rows
        Whether it gets the whole pipeline and rows as given, which scorers with a name do not need.
    train
        Whether training rows are scored, too.
    """

    def __init__(
        self, scorer: Callable[..., Any], refit: Any, *, takes_rows: bool, train: bool
    ) -> None:
        self.scorer, self.refit, self.takes_rows, self.train = scorer, refit, takes_rows, train
        self.config = get_config()

    def measure(
        self, kind: str, estimator: Any, x: Any, y: Any, metadata: Mapping[str, Any]
    ) -> dict[str, float]:
        """Return the scores by the names of their metrics; `kind` is "test" or "train"."""
        with config_context(**self.config):
            score = self.scorer(estimator, x, y, **metadata)
        if not isinstance(score, Mapping):
            return {SCORE if kind == "test" else f"{SCORE}_train_{SCORE}": float(score)}
        best, values = choose_score(self.refit, [*score]), {}
        for name, value in score.items():
            if isinstance(value, str):  # the traceback of this scorer
                error = f"scoring: {name!r} failed: {value.strip().splitlines()[-1]}"
                if name == best and kind == "test":
                    raise InputError(error)
                warn_user(error)
                value = math.nan
            values[f"{SCORE}_{kind}_{name}"] = float(value)
        if kind == "test":
            values[SCORE] = values[f"{SCORE}_test_{best}"]
        return values


def choose_score(refit: Any, names: list[str]) -> str:
    """Return which of several scores ranks configurations, as `SearchCV`'s `refit` says."""
    if refit is False or callable(refit):
        return names[0]
    if refit not in names:
        raise InputError(
            f"refit={refit!r} does not say which of several scores is to be best: give "
            f"{' or '.join(map(repr, names))}, a function of cv_results_, or False"
        )
    return str(refit)


class ScoredModel(Model):
    """An estimator that scikit-learn's scorers validate once, on all rows of a fold.

    In the data, classes are the numbers 0, 1, ...; the estimator learns the original `labels`. If
    `rows` are given, the data has their numbers. `pipeline` is the estimator and its fitted head,
    whose key is `key`.
    """

    evaluates_whole = True

    def __init__(
        self,
        estimator: Any,
        scoring: Scoring,
        labels: Any,
        weight: str | None,
        rows: Rows | None,
        fold: int | None,
        pipeline: Any,
        key: str,
    ) -> None:
        super().__init__(estimator, classes=labels, weight=weight)
        self._scoring, self._labels = scoring, labels
        self._rows, self._fold, self._pipeline, self._key = rows, fold, pipeline, key

    @cached_property
    def _matrix(self) -> Any:
        return self._rows.matrix(self._key) if self._rows is not None else None

    def _features(self, batch: Batch) -> Any:
        if self._rows is None:
            return super()._features(batch)
        return take_rows(self._matrix, batch["x"])

    def _columns(self, batch: Batch) -> tuple[Any, Any]:
        x, y = super()._columns(batch)
        return x, y if self._labels is None else self._labels[y]

    def eval_batch(self, batch: Batch) -> dict[str, Any]:
        return self._measure(batch)[0]  # batches are not scored

    def _measure(self, batch: Batch) -> tuple[dict[str, float], tuple[Any, ...]]:
        means, parts = super()._measure(batch)
        return means, parts if self._rows is None else (parts[1],)

    def _measure_whole(self, parts: Sequence[Any]) -> dict[str, float]:
        if self._rows is None:
            x, y, _ = parts
            return self._scoring.measure("test", self.estimator, x, y, {})
        rows, scoring, estimator = self._rows, self._scoring, self.estimator
        train, test = rows.fold(self._fold)
        if scoring.takes_rows or scoring.train:
            whole = rows.whole(self._pipeline, self._key)
        x, y, metadata = rows.take(test, x=scoring.takes_rows)
        if scoring.takes_rows:
            estimator = whole
        else:
            x = take_rows(self._matrix, test)
        values = scoring.measure("test", estimator, x, y, metadata)
        if scoring.train:
            values |= scoring.measure("train", whole, *rows.take(train, x=True))
        return values


def accepts_weights(scorer: Any) -> bool:
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
        scoring: Scoring,
        labels: Any,
        weight: str | None,
        originals: Originals,
        balances: Sequence[Mapping[Any, float]],
        rows: Rows | None,
        *,
        keeps_run: bool,
    ) -> None:
        self.estimator, self.scoring, self.labels = estimator, scoring, labels
        self.balances, self.rows = balances, rows  # the last balance is that of all rows
        self.weight, self.originals, self.keeps_run = weight, originals, keeps_run
        self.__module__ = type(self).__module__
        self.__qualname__ = type(self).__qualname__

    def __call__(self, config: Mapping[str, Any], info: Any) -> ScoredModel:
        estimator = configure_estimator(self.estimator, config, self.originals)
        output = self.scoring.config["transform_output"]
        if output != "default":  # set for this process, but workers are others
            for _, step in steps_of(estimator):
                if hasattr(step, "set_output") and not hasattr(step, "_sklearn_output_config"):
                    step.set_output(transform=output)
        pipeline, key = estimator, "matrix"
        if self.rows is not None and self.rows.has_heads:
            head, estimator = split_pipeline(estimator)
            key = self.rows.fit_head(head, self._setting_of_head(config), info.fold)
        balance_classes(estimator, self.balances, info.fold)
        given = self.scoring, self.labels, self.weight, self.rows, info.fold
        return ScoredModel(estimator, *given, pipeline, key)

    def _setting_of_head(self, config: Mapping[str, Any]) -> str:
        """Return the text of the parameters that do not belong to the last step."""
        last = self.estimator.steps[-1][0] if hasattr(self.estimator, "steps") else ""
        others = (last, "batch_size", GRID)
        own = {k: v for k, v in config.items() if k.partition("__")[0] not in others}
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


def weigh_classes(target: Any) -> dict[Any, float]:
    """Return the weights of ``class_weight="balanced"``."""
    classes = np.unique(target)
    weights = compute_class_weight("balanced", classes=classes, y=target)
    return dict(zip(classes.tolist(), weights.tolist(), strict=True))


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
    last, final = steps_of(estimator)[-1]
    names = IGNORED if hasattr(final, "hidden_layer_sizes") else (*IGNORED, *IGNORED_BY_LINEAR)
    ignored = [f"{last}__{name}" if last else name for name in names]
    for node in space.nodes:
        name, dimension = path_name(node.path), node.dimension
        if name in ignored:
            warn_user(
                f"space: {name} has no effect, because partial_fit makes one pass for each epoch: "
                "leave it out, and give epochs="
            )
        options = dimension.options if isinstance(dimension, Choice) else ()
        if isinstance(dimension, Constant):
            options = [dimension.value]
        for option in () if name in ("batch_size", GRID) else options:
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
    metrics = {name: None for t in trials for fold in t.folds for name in fold.metrics}
    shown = [name for name in metrics if name.startswith(f"{SCORE}_")]  # not Cerebro's own
    several = any(name.startswith(f"{SCORE}_test_") for name in shown)
    table = cv_results(result, originals, shown if several else [SCORE, *shown])
    for name, means in table.items():
        kind = re.match("mean_(test|train)_", name)
        if kind and not failed and not np.isfinite(means).all():
            warn_user(f"One or more of the {kind[1]} scores are non-finite: {means}")
    found: dict[str, Any] = {"cv_results_": table, "multimetric_": several}
    if callable(refit):
        index = _check_index(refit(table), len(trials))
    elif several and not refit:
        return found
    else:
        # `Result.best` may be a configuration that failed later; here it has no score.
        scored = (t.number for t in result.top(len(trials)) if t.status not in FAILED)
        index = next(scored, result.best.number)
        found["best_score_"] = float(table[f"mean_test_{refit if several else SCORE}"][index])
    return {
        **found,
        "best_index_": index,
        "best_params_": table["params"][index],
        "best_epochs_": int(table["epochs"][index]),
    }


def cv_results(result: Result, originals: Originals, metrics: list[str]) -> dict[str, Any]:
    """Return a run with folds as scikit-learn's table of a search: one value per configuration."""
    trials = result.trials
    params = [restore_choices(trial.config, originals) for trial in trials]
    table: dict[str, Any] = _collect_times(result, (len(trials), len(trials[0].folds)))
    table.update(sorted(_yield_masked_array_for_each_param(params)))
    table["params"] = params
    for metric in metrics:
        name = f"test_{SCORE}" if metric == SCORE else metric.removeprefix(f"{SCORE}_")
        _add_scores(table, name, metric, trials)
    table["epochs"] = np.array(
        [t.epoch if t.best_epoch is None else t.best_epoch + 1 for t in trials], np.int64
    )
    table["status"] = np.array([trial.status for trial in trials])
    return table


def _add_scores(table: dict[str, Any], name: str, metric: str, trials: Sequence[Any]) -> None:
    from scipy.stats import rankdata

    scores = np.array([[f.metrics.get(metric, math.nan) for f in t.folds] for t in trials], float)
    scores[[trial.status in FAILED for trial in trials]] = math.nan
    for fold in range(scores.shape[1]):
        table[f"split{fold}_{name}"] = scores[:, fold]
    means = table[f"mean_{name}"] = scores.mean(axis=1)
    table[f"std_{name}"] = scores.std(axis=1)
    if name.startswith("test_"):
        # The highest mean has rank 1, ties share the lowest rank, NaN comes last.
        losses = np.where(np.isnan(means), np.inf, -means)
        table[f"rank_{name}"] = rankdata(losses, method="min").astype(np.int32)


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
