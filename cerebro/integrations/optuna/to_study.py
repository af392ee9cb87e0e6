"""Convert a run to an Optuna study; see `Result.to_study`."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from cerebro.errors import InputError
from cerebro.integrations.optuna.terms import (
    ATTRIBUTE,
    Parameters,
    contains,
    import_optuna,
    make_storable,
    quiet,
    storage_errors,
)
from cerebro.machine.mappings import flatten
from cerebro.run.records import ENDED
from cerebro.searchers.metrics import EarlyStopping
from cerebro.space import Normal, Space, iterate_leaves, path_name

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

    from cerebro.results.result import Result
    from cerebro.results.trial import Trial


def to_study(result: Result, *, storage: Any = None, study_name: str | None = None) -> Study:
    """Return a run as a study; see `cerebro.Result.to_study`."""
    saved, trials = result.saved, result.trials
    optuna = import_optuna("Result.to_study()")
    name = study_name or saved.folder.name
    with quiet(optuna), storage_errors(optuna, storage, name):
        try:
            study: Study = optuna.create_study(
                storage=storage,
                study_name=name,
                direction="minimize" if saved.mode == "min" else "maximize",
            )
        except optuna.exceptions.DuplicatedStudyError:
            raise InputError(
                f"the storage already has a study {name!r}: choose another study_name="
            ) from None
        try:
            _fill_study(optuna, study, saved, trials)
        except BaseException:
            with contextlib.suppress(Exception):  # else a second attempt would find a part of it
                optuna.delete_study(study_name=name, storage=study._storage)
            raise
    return study


def _fill_study(optuna: Any, study: Study, saved: Any, trials: Sequence[Trial]) -> None:
    study.set_metric_names([saved.metric])
    study.set_user_attr(ATTRIBUTE, {"run": str(saved.folder), "seed": saved.settings["seed"]})
    begun = datetime.fromtimestamp(float(saved.meta["started"]))
    spans = saved.spans()
    parameters = RunParameters(optuna, saved, trials)
    for trial in trials:
        if trial.status in ENDED or trial.history:
            frozen = _freeze_trial(optuna, saved, trial, parameters)
            # Without recorded units, a trial has the run's start for both.
            frozen.datetime_start, frozen.datetime_complete = (
                begun + timedelta(seconds=seconds) for seconds in spans.get(trial.number, (0, 0))
            )
            study.add_trial(frozen)


def _freeze_trial(optuna: Any, saved: Any, trial: Trial, parameters: RunParameters) -> FrozenTrial:
    params, kinds = parameters.of_config(trial.config)
    reported = {
        epoch["epoch"]: epoch["metrics"].get(saved.metric, math.nan) for epoch in trial.history
    }
    state, value = _find_outcome(optuna, saved, trial)
    return optuna.trial.create_trial(  # type: ignore[no-any-return]
        state=state,
        value=value,
        params=params,
        distributions=kinds,
        user_attrs={ATTRIBUTE: _collect_attributes(saved, trial, params)},
        intermediate_values=reported,
    )


def _find_outcome(optuna: Any, saved: Any, trial: Trial) -> tuple[Any, float | None]:
    """Return a trial's Optuna state and value; a trial that a stopping rule ended is complete."""
    states = optuna.trial.TrialState
    value = trial.metrics.get(saved.metric, math.nan)
    if trial.status in ("failed", "diverged") or not math.isfinite(value):
        return states.FAIL, None
    rule = saved.settings["stop"]
    early = rule is not None and EarlyStopping(**rule).should_stop(trial.history)
    if trial.status == "finished" or (trial.status == "stopped" and early):
        return states.COMPLETE, value
    return states.PRUNED, value


def _collect_attributes(saved: Any, trial: Trial, params: Mapping[str, Any]) -> dict[str, Any]:
    facts = {
        "run": str(saved.folder),
        "trial": trial.number,
        "status": trial.status,
        "epochs": trial.epoch,
        "best_epoch": trial.best_epoch,
        "state_hash": trial.state_hash,
        "parent": trial.parent,
        "error": trial.error,
    }
    if flatten(trial.config) != params:
        facts["config"] = trial.config
    return {name: value for name, value in facts.items() if value is not None}


class RunParameters:
    """The parameters of a run's configurations, and their distributions.

    All trials share one distribution per name: otherwise Optuna's samplers and importances would
    not use them together. The space's dimensions keep their bounds, widened for points outside
    them. A dimension that has other values under other conditions is named with its conditions. All
    other names, and normal distributions, which Optuna lacks, have the bounds of the trials'
    values. Constants are not parameters.
    """

    def __init__(self, optuna: Any, saved: Any, trials: Sequence[Trial]) -> None:
        space = Space.from_json(saved.meta["space"])
        self._known = Parameters(optuna, space, left_out=(Normal,))
        self._of_space = set(space.paths)
        self._normal = {
            node.path for node in space.nodes if node.varies and isinstance(node.dimension, Normal)
        }
        values: dict[str, list[Any]] = {}
        kinds: dict[str, list[Any]] = {}
        for trial in trials:
            for name, value, kind in self._iterate_values(trial.config):
                values.setdefault(name, []).append(value)
                kinds.setdefault(name, []).append(kind)
        self._kinds = {
            name: _choose_distribution(optuna, kinds[name], values[name]) for name in values
        }

    def of_config(self, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a configuration's parameters and their distributions."""
        params: dict[str, Any] = {}
        kinds: dict[str, Any] = {}
        for name, value, _ in self._iterate_values(config):
            kind = self._kinds[name]
            if kind is not None and contains(kind, value):
                params[name], kinds[name] = value, kind
        return params, kinds

    def _iterate_values(self, config: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
        """Yield each name with its value and its distribution in the space, None if it has none."""
        paths = set()
        for node, value, kind in self._known.values(config):
            if node.applies(config):
                paths.add(node.path)
                yield self._known.name(node), value, kind
        for path, value in iterate_leaves(config, lambda path: path not in self._of_space):
            if path not in paths and (path not in self._of_space or path in self._normal):
                yield path_name(path), make_storable(value), None


def _choose_distribution(optuna: Any, kinds: Sequence[Any], values: Sequence[Any]) -> Any:
    """Return one distribution for all values of a name; None if Optuna has none.

    `kinds` has the distribution of each value in the space, or None.
    """
    kind = kinds[0]
    if kind is None or any(other != kind for other in kinds):
        return _infer_distribution(optuna, values)
    for value in values:
        if not contains(kind, value):
            kind = _widen_distribution(optuna, kind, value) or kind
    return kind


def _infer_distribution(optuna: Any, values: Sequence[Any]) -> Any:
    """Return a distribution that contains the values; None if Optuna has none."""
    kinds = optuna.distributions
    types = {type(value) for value in values}
    if types == {int}:
        return kinds.IntDistribution(min(values), max(values))
    if types <= {int, float}:
        finite = [float(value) for value in values if math.isfinite(value)]
        return kinds.FloatDistribution(min(finite), max(finite)) if finite else None
    return kinds.CategoricalDistribution(list(dict.fromkeys(values)))


def _widen_distribution(optuna: Any, kind: Any, value: Any) -> Any:
    """Return a numeric distribution widened to include a value; None if that is impossible."""
    kinds = optuna.distributions
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    if isinstance(kind, kinds.CategoricalDistribution):
        return None
    log = kind.log and value > 0
    if isinstance(kind, kinds.IntDistribution):
        if not isinstance(value, int):
            return None
        return kinds.IntDistribution(min(kind.low, value), max(kind.high, value), log=log)
    return kinds.FloatDistribution(min(kind.low, value), max(kind.high, value), log=log)
