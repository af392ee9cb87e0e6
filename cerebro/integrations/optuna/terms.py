"""Convert spaces to Optuna distributions, and report errors of Optuna's storages."""

from __future__ import annotations

import contextlib
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from cerebro.errors import CerebroError, InputError, text_of
from cerebro.machine.imports import import_extra
from cerebro.space import (
    Choice,
    Dimension,
    Integer,
    LogUniform,
    Node,
    Normal,
    Space,
    Uniform,
    path_name,
    value_at,
)

ATTRIBUTE = "cerebro"
"""The attribute of a study's trials with the run's folder and the trial's number there."""


def import_optuna(what: str) -> Any:
    return import_extra("optuna", "optuna", f"{what} needs Optuna")


class Parameters:
    """The varying dimensions of a space, except kinds `left_out`, as Optuna distributions."""

    def __init__(
        self, optuna: Any, space: Space, left_out: tuple[type[Dimension], ...] = ()
    ) -> None:
        self._nodes = [
            node for node in space.nodes if node.varies and not isinstance(node.dimension, left_out)
        ]
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
    """Return the Optuna distribution of a dimension; raise InputError if Optuna has no such one."""
    kinds = optuna.distributions
    if isinstance(dimension, Uniform):
        high = dimension.high
        if dimension.step is not None:  # Optuna warns if steps do not reach the end
            high = dimension.nearest(high)
        return kinds.FloatDistribution(dimension.low, high, step=dimension.step)
    if isinstance(dimension, LogUniform):
        return kinds.FloatDistribution(dimension.low, dimension.high, log=True)
    if isinstance(dimension, Integer):
        high = dimension.nearest(dimension.high)
        return kinds.IntDistribution(dimension.low, high, log=dimension.log, step=dimension.step)
    if isinstance(dimension, Choice):
        return kinds.CategoricalDistribution(
            [make_storable(option) for option in dimension.options]
        )
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
