"""Which columns of a batch a model is called with, and what its metrics come to.

What models of several frameworks have in common; no framework is imported here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from cerebro.errors import InputError

Batch = dict[str, Any]
Columns = str | Sequence[str] | Mapping[str, str]


def column_names(what: str, columns: Any) -> list[str]:
    """Return the columns that the argument `what` names.

    Raises
    ------
    InputError
        If it is no column's name, list or mapping.
    """
    if isinstance(columns, str):
        return [columns]
    if columns is None and what == "target":
        return []
    names: list[Any] = []
    if isinstance(columns, Mapping):
        names = list(columns.values())
    elif isinstance(columns, (list, tuple)):
        names = list(columns)
    if not names or not all(isinstance(name, str) for name in names):
        raise InputError(f"{what} must be a column's name, a list or a mapping, not {columns!r}")
    return names


def make_getter(columns: Columns) -> Callable[[Batch], Any]:
    """Return the function that takes columns from a batch: one, a tuple, or a dict."""
    if isinstance(columns, str):
        return itemgetter(columns)
    if isinstance(columns, Mapping):
        pairs = list(columns.items())
        return lambda batch: {key: batch[column] for key, column in pairs}
    names = list(columns)
    if len(names) == 1:
        return lambda batch: (batch[names[0]],)
    return itemgetter(*names)


def check_batch(batch: Any, inputs: Columns, target: Columns | None) -> None:
    """Raise InputError if a batch lacks a column that a model's arguments name."""
    wanted = [("inputs", name) for name in column_names("inputs", inputs)]
    wanted += [("target", name) for name in column_names("target", target)]
    for what, name in wanted:
        if isinstance(batch, Mapping) and name not in batch:
            raise InputError(
                f"{what} names the column {name!r}, but the data has {', '.join(batch)}"
            ) from None


def loss_of(output: Any) -> Any:
    """Return the loss that a network has computed: ``output.loss`` or ``output["loss"]``."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None:
        raise InputError(
            f"loss=None takes the loss from the network's output, but a {type(output).__name__} "
            "has none: give loss, or make the network compute it"
        )
    return loss


def named_functions(what: str, functions: Any) -> dict[str, Callable[..., Any]]:
    """Check a mapping of names to functions; None is an empty one."""
    if functions is None:
        return {}
    if not isinstance(functions, Mapping) or not all(callable(f) for f in functions.values()):
        raise InputError(f"{what} must be a mapping of names to functions, not {functions!r}")
    return dict(functions)


def check_metrics(
    loss: Any, step: Any, metrics: Mapping[str, Any], whole: Mapping[str, Any]
) -> None:
    """Refuse metrics that no step returns outputs for, and two of one name."""
    if step is not None and (loss is not None or metrics):
        raise InputError("step replaces loss and metrics: return them from step instead")
    if step is not None and whole:
        raise InputError("epoch_metrics need outputs, which step does not return: give loss")
    both = metrics.keys() & whole.keys()
    if both or "loss" in {**metrics, **whole}:
        raise InputError(f"two metrics are called {next(iter(both), 'loss')!r}")


def rows_of_all(columns: Mapping[str, Any]) -> int:
    """Return the rows that all columns have.

    Raises
    ------
    InputError
        If they differ.
    """
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        raise InputError(f"the columns have different numbers of rows: {lengths}")
    return next(iter(lengths.values()), 0)


class Means:
    """Means of metrics over batches, summed in float64 in their order.

    Parameters
    ----------
    floats
        Reads a list of numbers, wherever they are: once, when all batches are there.
    """

    def __init__(self, floats: Callable[[list[Any]], list[float]]) -> None:
        self._floats = floats
        self._pairs: dict[str, list[tuple[Any, Any]]] = {}

    def add(self, batch: Batch, values: Mapping[str, Any]) -> None:
        """Add a batch's metrics: means over its rows, or ``(mean, weight)``."""
        rows = len(next(iter(batch.values())))
        for name, value in values.items():
            pair = value if isinstance(value, tuple) else (value, rows)
            self._pairs.setdefault(name, []).append(pair)

    def take(self) -> dict[str, float]:
        """Return the means by name.

        Raises
        ------
        InputError
            If there was no batch.
        """
        if not self._pairs:
            raise InputError("there are no rows to evaluate")
        return {name: self._mean(pairs) for name, pairs in self._pairs.items()}

    def _mean(self, pairs: Sequence[tuple[Any, Any]]) -> float:
        total = weights = 0.0
        means, counts = (self._floats(list(numbers)) for numbers in zip(*pairs, strict=True))
        for value, weight in zip(means, counts, strict=True):
            total += value * weight
            weights += weight
        return total / weights if weights else math.nan
