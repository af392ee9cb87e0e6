"""Weights for drawing rows: how often each row is drawn in an epoch on average.

A view with sampling draws as many rows as it has, with replacement, in proportion to a column of
weights or with equal shares for all classes: from all of its rows or, with ``shuffle="shards"``,
from each shard as many as it has there. The loader in C draws them from running sums of the
weights, which are computed here. The sums are whole numbers, so that draws are the same on every
machine (docs/design/loader.md, "Weights").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cerebro.data.dtypes import Array, freeze_array
from cerebro.data.manifest import Column
from cerebro.errors import InputError

UNITS = 2.0**53
"""The sum of all weights after scaling; each is rounded down to a whole number."""

_KINDS = {"weights": ("float", "int", "uint", "bool"), "balance": ("int", "uint", "bool")}


@dataclass(frozen=True)
class Sampling:
    """How rows are drawn: by the weights or the classes in a column."""

    kind: Literal["weights", "balance"]  # whether the column has weights or classes
    column: str

    @classmethod
    def from_json(cls, value: Mapping[str, str] | None) -> Sampling | None:
        """Invert `to_json`; raise InputError if the value is damaged."""
        if value is None:
            return None
        try:
            ((kind, column),) = value.items()
        except (AttributeError, TypeError, ValueError):
            kind = column = ""
        if kind not in _KINDS or not isinstance(column, str):
            raise InputError("the dataset's spec is damaged: it does not say how rows are drawn")
        return cls(kind, column)  # type: ignore[arg-type]

    def to_json(self) -> dict[str, str]:
        """Return a JSON value, such as ``{"weights": "w"}``."""
        return {self.kind: self.column}

    def __str__(self) -> str:
        by = "by" if self.kind == "weights" else "with equal classes of"
        return f"rows drawn {by} {self.column!r}"

    def check(self, column: Column) -> None:
        """Raise InputError if the column does not have one weight or class for each row."""
        role = "weights" if self.kind == "weights" else "classes"
        scalar = not column.ragged and not column.shape
        scalar = scalar and column.dtype.startswith(_KINDS[self.kind])
        if not scalar or (self.kind == "weights" and column.classes is not None):
            kind = "number" if self.kind == "weights" else "integer, boolean or category"
            raise InputError(
                f"column {column.name!r} cannot give the {role}: it must have one {kind} for each "
                "row"
            )

    def check_values(self, values: Sequence[Array]) -> None:
        """Raise InputError if a weight is negative, infinite or NaN, or all weights are 0."""
        if self.kind == "balance":
            return
        for shard, of_shard in enumerate(values):
            require_weights(of_shard.astype(np.float64), self.column, shard)
        if not any(of_shard.any() for of_shard in values):
            raise self._no_weight_error()

    def _no_weight_error(self) -> InputError:
        return InputError(f"column {self.column!r}: all weights are 0, so no row can be drawn")

    def sum_weights(self, values: Array, shard: int | None) -> NDArray[np.uint64] | None:
        """Return the running sums of the weights of rows with these values; None without rows.

        The sums are uint64 of shape ``(rows,)``, read-only; row i is drawn with probability
        ``(sums[i] - sums[i - 1]) / sums[-1]``. `shard` is for errors; None: the rows of all shards.
        """
        if len(values) == 0:
            return None
        weights = values.astype(np.float64)
        if self.kind == "weights":
            require_weights(weights, self.column, shard)
        else:
            _, classes, counts = np.unique(values, return_inverse=True, return_counts=True)
            weights = (1.0 / counts)[classes.reshape(-1)]
        most = weights.max()
        if most == 0:
            if shard is None:
                raise self._no_weight_error()
            raise InputError(
                f"column {self.column!r}: all weights in shard {shard} are 0, so no row can be "
                'drawn there: use shuffle="rows", or leave out such rows with select()'
            )
        total = np.cumsum(weights / most)  # in a fixed order, so always the same bits
        return freeze_array(np.floor(total / total[-1] * UNITS).astype(np.uint64))


def require_weights(values: Array, column: str, shard: int | None) -> None:
    """Raise InputError, naming the shard if given, unless all values are finite and at least 0."""
    right = np.isfinite(values) & (values >= 0)
    if not right.all():
        row = int(np.flatnonzero(~right.reshape(-1))[0])
        where = f"row {row}" if shard is None else f"shard {shard}, row {row}"
        raise InputError(
            f"column {column!r}, {where}: {values.reshape(-1)[row]} is not a weight: weights must "
            "be finite and at least 0"
        )


def make_sampling(weights: Any, balance: Any) -> Sampling | None:
    """Check the arguments of `Dataset.with_sampling`; return None if there is no sampling."""
    if weights is not None and balance is not None:
        raise InputError("with_sampling takes weights or balance, not both: choose one")
    for name, value in (("weights", weights), ("balance", balance)):
        if value is not None and not isinstance(value, str):
            raise InputError(
                f"{name} must be the name of a column, not {value!r}: write the values as a column "
                "of the dataset"
            )
    if weights is not None:
        return Sampling("weights", weights)
    return None if balance is None else Sampling("balance", balance)
