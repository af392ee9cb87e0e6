"""The rows of an epoch: their order, the parts that units train on, and weights to draw them by.

``"rows"`` is one permutation of all rows for each (seed, epoch), as a PyTorch ``DataLoader`` with
``shuffle=True`` draws it; a part is a slice of the epoch's batches. ``"shards"`` is for data larger
than memory: a part is a group of four shards whose rows are shuffled together, and the groups are
drawn anew for each epoch. docs/design/loader.md says why.

Shards are grouped only within their *pool*, a fixed set of at least 32 shards. A machine that
does not have all shards has whole pools, so the order depends on the data and never on machines.

A view with sampling draws as many rows as it has, with replacement, in proportion to a column of
weights or with equal shares for all classes: from all of its rows or, with ``"shards"``, from each
shard as many as it has there. The loader in C draws them from running sums of the weights, which
are computed here. The sums are whole numbers, so that draws are the same on every machine
(docs/design/loader.md, "Weights").
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import cerebro._core as _core
from cerebro.data.dtypes import Array, freeze_array
from cerebro.data.manifest import Column
from cerebro.errors import InputError

Shuffle = Literal["rows", "shards"]

Mix = tuple[int, ...]  # shards whose rows are shuffled together, in ascending order

MOST_BYTES = 4_000_000_000  # the size of the largest data whose default is "rows"
GROUP = 4  # the most shards of a part; four random ones showed no loss of accuracy against "rows"
POOL = 32  # the fewest shards of a pool, if the dataset has as many


@dataclass(frozen=True)
class Cut:
    """How the rows of a part are cut into batches, and these into updates."""

    batch_size: int
    drop_last: bool = False
    accumulate: int = 1
    """The batches of an update. Updates are cut as evenly as batches, and end with their part."""

    def count(self, rows: int) -> int:
        """Return the number of batches of so many rows."""
        return _core.batch_count(rows, self.batch_size, self.drop_last)


@dataclass(frozen=True)
class Part:
    """The batches of a unit: `count` batches of a mix, from `start` on."""

    mix: Mix
    start: int
    count: int
    updates: tuple[int, ...]  # the number of batches of each update


@dataclass(frozen=True)
class EpochOrder:
    """How a view's rows are ordered in each epoch."""

    shuffle: Shuffle
    shard_rows: tuple[int, ...]  # the view's rows in each shard
    seed: int  # keys the order, together with the epoch
    stagger: bool = True  # as for `cerebro.search`: False starts all trials at the same part

    @cached_property
    def pools(self) -> list[list[int]]:
        """The shards of each pool."""
        shards = range(len(self.shard_rows))
        return _split_evenly(shards, 1 if self.shuffle == "rows" else max(1, len(shards) // POOL))

    @cached_property
    def _places(self) -> list[tuple[int, int]]:
        """Each part's pool and its group's number in that pool. Parts take the pools in turn."""
        groups = [-(-len(pool) // GROUP) for pool in self.pools]
        if self.shuffle == "rows":
            groups = [len(self.shard_rows)]
        turns = range(max(groups))
        return [(pool, turn) for turn in turns for pool, n in enumerate(groups) if turn < n]

    @cached_property
    def pool_of_part(self) -> list[int]:
        return [pool for pool, _ in self._places]

    @property
    def num_parts(self) -> int:
        """The number of parts of an epoch: the training units of a trial."""
        return len(self._places)

    @property
    def pool_rows(self) -> list[int]:
        return [sum(self.shard_rows[shard] for shard in pool) for pool in self.pools]

    @property
    def part_rows(self) -> list[float]:
        """The number of rows of each part; with ``"shards"``, the mean over epochs."""
        parts = Counter(self.pool_of_part)
        means = [rows / parts[pool] for pool, rows in enumerate(self.pool_rows)]
        return [means[pool] for pool in self.pool_of_part]

    def visits(self, trial: int, epoch: int) -> list[int]:
        """Return the parts of an epoch in the order in which a trial visits them."""
        if self.shuffle == "rows":
            return list(range(self.num_parts))
        return _core.visit_order(trial, epoch, self.num_parts, stagger=self.stagger)

    def mixes(self, epoch: int) -> list[Mix]:
        groups = [self._groups(pool, epoch) for pool in range(len(self.pools))]
        return [groups[pool][group] for pool, group in self._places]

    def mix(self, part: int, epoch: int) -> Mix:
        pool, group = self._places[part]
        return self._groups(pool, epoch)[group]

    def pass_of(self, trial: int, epoch: int) -> list[Mix]:
        """Return the mixes of a trial's whole epoch, each once, in their order."""
        mixes = self.mixes(epoch)
        if self.shuffle == "rows":
            return mixes[:1]
        return [mixes[part] for part in self.visits(trial, epoch)]

    def part(self, part: int, epoch: int, cut: Cut) -> Part:
        mix = self.mix(part, epoch)
        batches = self.count_batches([mix], cut)
        updates = _core.batch_count(batches, cut.accumulate, False)
        first, end = 0, updates
        if self.shuffle == "rows":
            parts = self.num_parts
            first, end = part * updates // parts, (part + 1) * updates // parts
        # The first updates have one batch more than the others.
        size, longer = divmod(batches, updates) if updates else (0, 0)
        more = max(0, min(longer, end) - first)
        sizes = (size + 1,) * more + (size,) * (end - first - more)
        start = _core.batch_start(batches, cut.accumulate, False, first)
        return Part(mix, start, sum(sizes), sizes)

    def count_batches(self, mixes: Sequence[Mix], cut: Cut) -> int:
        return sum(cut.count(sum(self.shard_rows[shard] for shard in mix)) for mix in mixes)

    def steps(self, epoch: int, cut: Cut) -> int:
        """Return the number of batches of an epoch."""
        return self.count_batches(self.pass_of(0, epoch), cut)

    def steps_of(self, epochs: int, cut: Cut) -> list[int]:
        """Return the number of batches of each of so many epochs."""
        if self.shuffle == "rows" or len(set(self.shard_rows)) == 1:
            return [self.steps(0, cut)] * epochs
        counted = self._steps.setdefault((cut.batch_size, cut.drop_last), [])
        counted += [self.steps(epoch, cut) for epoch in range(len(counted), epochs)]
        return counted[:epochs]

    @cached_property
    def _steps(self) -> dict[tuple[int, bool], list[int]]:
        return {}  # every model that is built asks for them

    def batches_before(self, trial: int, epoch: int, step: int, cut: Cut) -> int:
        """Return the number of a trial's batches in an epoch before those of a step."""
        visited = self.visits(trial, epoch)[:step]
        return sum(self.part(part, epoch, cut).count for part in visited)

    def _groups(self, pool: int, epoch: int) -> list[Mix]:
        shards = self.pools[pool]
        if self.shuffle == "rows":
            return [tuple(shards)] * self.num_parts
        permutation = _core.permutation(len(shards), self.seed, "groups", epoch, pool)
        groups = _split_evenly([shards[i] for i in permutation], -(-len(shards) // GROUP))
        return [tuple(sorted(group)) for group in groups]


def make_order(data: Any, shuffle: Shuffle, seed: int, *, stagger: bool = True) -> EpochOrder:
    return EpochOrder(shuffle, tuple(data.view.shard_rows), seed, stagger)


def mix_in_order(data: Any) -> list[Mix]:
    """Return the mixes of a pass over all rows in order: one, unless there are 2**32 rows."""
    mixes: list[list[int]] = [[]]
    rows = 0
    for shard, more in enumerate(data.view.shard_rows):
        if rows + more >= 2**32:
            mixes.append([])
            rows = 0
        mixes[-1].append(shard)
        rows += more
    return [tuple(mix) for mix in mixes]


def resolve_shuffle(shuffle: Any, data: Any, *, stagger: bool = True) -> Shuffle:
    """Check the argument `shuffle` of a search; replace None by the default for the data's size."""
    if shuffle not in ("rows", "shards", None):
        raise InputError(f'shuffle must be "rows", "shards" or None, not {shuffle!r}')
    if shuffle == "rows" and not stagger:
        raise InputError(
            'stagger=False keeps at most two groups of shards open, which needs shuffle="shards": '
            "leave out one of them"
        )
    if shuffle is None:
        shuffle = "rows" if stagger and data.view.stored_bytes <= MOST_BYTES else "shards"
    rows = data.view.num_rows
    if shuffle == "rows" and rows >= 2**32:
        raise InputError(
            f'shuffle="rows" orders at most {2**32 - 1:,} rows, not {rows:,}: use "shards"'
        )
    return "rows" if shuffle == "rows" else "shards"


def _split_evenly(items: Sequence[int], runs: int) -> list[list[int]]:
    """Return the items in runs that differ by at most one item."""
    bounds = [run * len(items) // runs for run in range(runs + 1)]
    return [list(items[a:b]) for a, b in pairwise(bounds)]


# --- weights ------------------------------------------------------------------------------------

_UNITS = 2.0**53  # the sum of all weights after scaling; each is rounded down to a whole number
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
        return freeze_array(np.floor(total / total[-1] * _UNITS).astype(np.uint64))


def require_weights(values: Array, column: str, shard: int | None) -> None:
    """Raise InputError unless all weights are finite and at least 0; name `shard` if given."""
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
