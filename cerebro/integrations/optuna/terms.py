"""Spaces, configurations and runs in Optuna's terms, and the errors of its storages."""

from __future__ import annotations

import contextlib
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from cerebro.errors import CerebroError, InputError, text_of
from cerebro.machine.imports import import_extra
from cerebro.machine.mappings import flatten
from cerebro.run.records import ENDED
from cerebro.searchers.metrics import EarlyStopping
from cerebro.space import (
    Choice,
    Dimension,
    Integer,
    LogUniform,
    Node,
    Normal,
    Space,
    Uniform,
    iterate_leaves,
    path_name,
    value_at,
)

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

    from cerebro.results.result import Result
    from cerebro.results.trial import Trial

ATTRIBUTE = "cerebro"
"""The attribute of a study's trials with the run's folder and the trial's number there."""


def import_optuna(what: str) -> Any:
    return import_extra("optuna", "optuna", f"{what} needs Optuna")


class Parameters:
    """The varying dimensions of a space, except kinds `left_out`, as Optuna distributions."""

    def __init__(
        self, optuna: Any, space: Space, left_out: tuple[type[Dimension], ...] = ()
    ) -> None:
        varying = (node for node in space.nodes if node.varies)
        self._nodes = [node for node in varying if not isinstance(node.dimension, left_out)]
        self._kinds = {
            id(node): distribution(optuna, path_name(node.path), node.dimension)
            for node in self._nodes
        }
        self._names = {id(node): self._name(node) for node in self._nodes}

    def name(self, node: Node) -> str:
        return self._names[id(node)]

    def _name(self, node: Node) -> str:
        """Return a node's path; add its conditions if the path has several distributions."""
        kind, name = self._kinds[id(node)], path_name(node.path)
        beside = [other for other in self._nodes if other.path == node.path]
        if all(self._kinds[id(other)] == kind for other in beside):
            return name
        conditions = (
            f"{path_name(condition.path)}={' or '.join(map(str, condition.values))}"
            for condition in node.conditions
        )
        return f"{name} if {', '.join(conditions)}"

    def suggest(self, trial: Any, node: Node) -> Any:
        """Let an Optuna trial choose a node's value; return the value for the configuration."""
        name, kind = self.name(node), self._kinds[id(node)]
        dimension = node.dimension
        if isinstance(dimension, Choice):
            option = trial.suggest_categorical(name, kind.choices)
            encoded = {make_storable(o): o for o in dimension.options if make_storable(o) is not o}
            return encoded.get(option, option)
        step = {} if kind.log else {"step": kind.step}
        suggest = trial.suggest_int if isinstance(dimension, Integer) else trial.suggest_float
        value = suggest(name, kind.low, kind.high, log=kind.log, **step)
        if isinstance(dimension, Uniform) and dimension.step is not None:
            return dimension.nearest(value)  # 0.3, not Optuna's 0.30000000000000004
        return value

    def values(self, config: Mapping[str, Any]) -> Iterator[tuple[Node, Any, Any]]:
        """Yield each node in a configuration with its value for Optuna and its distribution."""
        for node in self._nodes:
            there, value = value_at(config, node.path)
            is_alone = self.name(node) == path_name(node.path)
            if there and (is_alone or node.applies(config)):
                yield node, make_storable(value), self._kinds[id(node)]

    def of_config(self, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a configuration's parameters within their bounds, and their distributions."""
        params, kinds = {}, {}
        for node, value, kind in self.values(config):
            if contains(kind, value):
                params[self.name(node)], kinds[self.name(node)] = value, kind
        return params, kinds


def contains(kind: Any, value: Any) -> bool:
    try:
        return bool(kind._contains(kind.to_internal_repr(value)))
    except (TypeError, ValueError):
        return False


def make_storable(value: Any) -> Any:
    """Return a value as Optuna can hold it: JSON for lists, mappings and other objects."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return json.dumps(value, default=repr)


def distribution(optuna: Any, name: str, dimension: Dimension) -> Any:
    """Convert a dimension to an Optuna distribution; raise InputError if Optuna has none for it."""
    kinds = optuna.distributions
    if isinstance(dimension, Uniform):
        # Optuna warns if steps do not reach the end.
        high = dimension.high if dimension.step is None else dimension.nearest(dimension.high)
        return kinds.FloatDistribution(dimension.low, high, step=dimension.step)
    if isinstance(dimension, LogUniform):
        return kinds.FloatDistribution(dimension.low, dimension.high, log=True)
    if isinstance(dimension, Integer):
        high = dimension.nearest(dimension.high)
        return kinds.IntDistribution(dimension.low, high, log=dimension.log, step=dimension.step)
    if isinstance(dimension, Choice):
        return kinds.CategoricalDistribution([*map(make_storable, dimension.options)])
    hint = ", which has no normal distribution: use uniform" * isinstance(dimension, Normal)
    raise InputError(f"{name}: {dimension!r} cannot be searched by Optuna{hint}")


@contextlib.contextmanager
def quiet(optuna: Any) -> Iterator[None]:
    """Silence Optuna's log and its warnings about experimental features."""
    level = optuna.logging.get_verbosity()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        try:
            yield
        finally:
            optuna.logging.set_verbosity(level)


_ADVICE = {
    "locked": (
        "another process holds it: end that process, or wait longer with "
        "RDBStorage(url, engine_kwargs={'connect_args': {'timeout': 60}})"
    ),
    "not a database": "the file is damaged or of a different format: give another storage=",
    "malformed": "the file is damaged: restore it, or give another storage=",
    "readonly": "make it writable, or give another storage=",
    "unable to open": "its folder must exist and be writable",
    "no such table": "not an Optuna storage, or only partly created: give another storage=",
    "table schema": "",  # Optuna names the fix
}


@contextlib.contextmanager
def storage_errors(
    optuna: Any, storage: Any, name: str, *, kind: type[CerebroError] = InputError, more: str = ""
) -> Iterator[None]:
    """Raise storage errors as `kind` in one line: which storage fails, why, and how to fix it."""
    try:
        yield
    except CerebroError:
        raise
    except Exception as error:
        if not _is_of_storage(optuna, error):
            raise
        cause = _describe_cause(error)
        advice = next((text for key, text in _ADVICE.items() if key in cause), "")
        if not advice and _is_disconnected(error):
            advice = "start its server, with optuna.storages.run_grpc_proxy_server"
        failing = f"the storage of the study {name!r} ({describe_storage(storage)}) fails"
        raise kind(": ".join(filter(None, [failing, cause, advice])) + more) from error


def describe_storage(storage: Any) -> str:
    """Return a storage's URL without its password, the address of its server, or its type."""
    backend = getattr(storage, "_backend", storage)
    if type(backend).__name__ == "GrpcStorageProxy":
        return f"{backend._host}:{backend._port}"
    url = backend if isinstance(backend, str) else getattr(backend, "url", None)
    if url is None:
        return type(backend).__name__
    return re.sub(r"://([^:/@]*):[^@]*@", r"://\1:***@", str(url))


def _is_of_storage(optuna: Any, error: BaseException) -> bool:
    if isinstance(error, optuna.exceptions.StorageInternalError):
        return True
    if type(error).__module__.startswith(("sqlalchemy.", "alembic.", "grpc.")):
        return True
    return isinstance(error, RuntimeError) and "table schema" in str(error)


def _is_disconnected(error: BaseException) -> bool:
    """Return whether a gRPC call failed because its server cannot be reached or has ended."""
    inner = _find_innermost(error)
    if not hasattr(inner, "details"):
        return False
    # A server that ends in the middle of a call is reported as an unknown error.
    return inner.code().name == "UNAVAILABLE" or "Stream removed" in (inner.details() or "")


def _find_innermost(error: BaseException) -> Any:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _describe_cause(error: BaseException) -> str:
    """Return the database's own error, without the SQL statement, or that of the connection."""
    inner = _find_innermost(error)
    if hasattr(inner, "details"):  # gRPC's, whose text has many lines
        return text_of(RuntimeError(inner.details()), 300)
    return text_of(getattr(inner, "orig", None) or inner, 300)


# --- runs as studies ------------------------------------------------------------


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
    reported = {e["epoch"]: e["metrics"].get(saved.metric, math.nan) for e in trial.history}
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
        self._parameters = Parameters(optuna, space, left_out=(Normal,))
        self._of_space = set(space.paths)
        normal = (n for n in space.nodes if n.varies and isinstance(n.dimension, Normal))
        self._normal = {node.path for node in normal}
        values: dict[str, list[Any]] = {}
        kinds: dict[str, list[Any]] = {}
        for trial in trials:
            for name, value, kind in self._iterate_values(trial.config):
                values.setdefault(name, []).append(value)
                kinds.setdefault(name, []).append(kind)
        self._kinds = {n: _choose_distribution(optuna, kinds[n], values[n]) for n in values}

    def of_config(self, config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
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
        for node, value, kind in self._parameters.values(config):
            if node.applies(config):
                paths.add(node.path)
                yield self._parameters.name(node), value, kind
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
    numbers: Any = int if isinstance(kind, kinds.IntDistribution) else (int, float)
    is_number = isinstance(value, numbers) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or isinstance(kind, kinds.CategoricalDistribution):
        return None
    log = kind.log and value > 0
    return type(kind)(min(kind.low, value), max(kind.high, value), log=log)
