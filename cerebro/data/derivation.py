"""A function of batches, and the batches that it is called with, for `Dataset.derive`.

Each call gets exactly `batch_size` rows: the last batch of a shard is filled up with rows of the
shard that were computed before, and their second results are dropped. The bits of a result
therefore do not depend on where a shard ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import cerebro._core as _core
from cerebro.arguments import check_whole_number
from cerebro.data.batches import FRAMEWORKS, Batches
from cerebro.data.columns import to_storage
from cerebro.data.dtypes import STORAGE, Array, convert, dtype_name
from cerebro.data.manifest import Column, checksum_of
from cerebro.data.rows import Part, part_rows
from cerebro.data.shards import MAX_COPIES
from cerebro.errors import InputError
from cerebro.machine.devices import explain_gpu_memory_errors
from cerebro.transforms import compile as compile_transforms

Function = Callable[[Mapping[str, Any]], Mapping[str, Any]]


@dataclass(frozen=True)
class Probe:
    """The function's result for the first rows: its columns, and a hash of their bits."""

    columns: tuple[Column, ...]
    digest: str


@dataclass(frozen=True)
class Derivation:
    """A function and the batches that it is called with."""

    data: Any  # a `cerebro.Dataset` with the rows and the transforms of the batches
    function: Function
    reads: Sequence[str] | None  # the columns of the function's batches; None: all
    batch_size: int
    framework: str
    device: str
    copies: int  # with random transforms, besides the values without them
    seed: int  # keys the random transforms
    dtypes: Mapping[str, str]  # the types to store, by column; other columns keep their types

    def batches(self, rows: Sequence[Part], shard: int, copy: int | None) -> Batches:
        """Return batches of these rows of a shard, in order; not augmented if `copy` is None."""
        return Batches(
            self.data._with_rows(rows, {}),
            self.batch_size,
            shard=shard,
            shuffle=False,
            seed=self.seed,
            epoch=copy or 0,
            augment=copy is not None,
            framework=self.framework,
            device=self.device,
            residence="streamed",  # a pass reads each row once: the GPU's memory is the function's
            columns=self.reads,
        )

    def results(self, shard: int, copy: int | None) -> Iterator[dict[str, tuple[Array, str]]]:
        """Yield storage values and types by column, for each batch, without the filled-up rows."""
        filled = list(self.data.view.parts)
        rows = part_rows(filled[shard])
        batches = -(-rows // self.batch_size)
        filled[shard] = repeat_rows(filled[shard], batches * self.batch_size)
        with explain_gpu_memory_errors(self.device, self.batch_size):
            for batch in self.batches(filled, shard, copy):
                columns = self.call(batch)
                count = min(rows, self.batch_size)
                yield {name: (values[:count], dtype) for name, (values, dtype) in columns.items()}
                rows -= count

    def call(self, batch: Mapping[str, Any]) -> dict[str, tuple[Array, str]]:
        """Call the function; return storage values and types by column.

        Raises InputError if it did not return a mapping of columns with a value for each row.
        """
        columns = self.function(batch)
        if not isinstance(columns, Mapping) or not columns:
            raise InputError(
                "derive: the function must return a mapping of column names to arrays, not "
                f"{type(columns).__name__}"
            )
        rows = len(next(iter(batch.values())))
        converted = {}
        for name, value in columns.items():
            if not isinstance(name, str):
                raise InputError(
                    f"derive: the function must use strings as column names, not {name!r}"
                )
            array, dtype = to_storage(name, value)
            if dtype not in STORAGE or array.ndim == 0 or len(array) != rows:
                raise InputError(
                    f"derive: column {name!r} has the shape {tuple(array.shape)} and the type "
                    f"{dtype} for a batch of {rows} rows: make one row of numbers for each row"
                )
            if name in self.dtypes:
                array, dtype = convert(array, dtype, self.dtypes[name], name), self.dtypes[name]
            converted[name] = (np.ascontiguousarray(array), dtype)
        return converted

    def probe(self) -> Probe:
        """Call the function twice with the first rows; return the result as a `Probe`.

        Raises InputError if it returns different bits for the same rows.
        """
        shard = next(shard for shard, rows in enumerate(self.data.view.shard_rows) if rows)
        digests: list[list[str]] = []
        columns: tuple[Column, ...] = ()
        for _ in range(2):
            results = next(self.results(shard, None))
            digests.append([_core.xxh3_128(_view_bytes(array)) for array, _ in results.values()])
            columns = tuple(
                Column(str(name), dtype, tuple(array.shape[1:]))
                for name, (array, dtype) in results.items()
            )
        for column, first, second in zip(columns, *digests, strict=True):
            if first != second:
                raise InputError(
                    f"derive: column {column.name!r} differs when it is computed again from the "
                    "same rows: leave out random numbers, dropout and counters"
                )
        names = [column.to_json() for column in columns]
        return Probe(columns, checksum_of([names, digests[0]]))


def make_derivation(
    data: Any,
    function: Function,
    *,
    reads: Collection[str] | None,
    batch_size: int,
    framework: str,
    device: str = "cpu",
    copies: int | None,
    seed: int,
    dtypes: Mapping[str, Any] | None,
) -> Derivation:
    """Check the arguments of `Dataset.derive` and return them as a `Derivation`."""
    if not callable(function):
        raise InputError(f"derive: function must be callable, not {function!r}")
    if framework not in FRAMEWORKS:
        raise InputError(f"framework must be one of {', '.join(FRAMEWORKS)}, not {framework!r}")
    for shard, rows in enumerate(data.view.shard_rows):
        if rows == 0:
            raise InputError(
                f"derive: the view has no rows of shard {shard}: derive from the whole dataset "
                "and make the view afterwards"
            )
    if data.shards.copied:
        raise InputError("derive: the dataset has augmented copies: derive from its source")
    if isinstance(reads, str):
        raise InputError(f'reads={reads!r}: give a list of columns, such as ["{reads}"]')
    names = list(data.columns if reads is None else reads)
    for name in names:
        data.view.column(name)
    return Derivation(
        data,
        function,
        None if reads is None else names,
        min(check_whole_number("batch_size", batch_size, 1), max(data.view.shard_rows)),
        framework,
        device,
        _check_copies(data, names, copies),
        check_whole_number("seed", seed, 0, 2**64 - 1),
        {name: dtype_name(dtype) for name, dtype in (dtypes or {}).items()},
    )


def _check_copies(data: Any, reads: Sequence[str], copies: int | None) -> int:
    """Return the number of copies; raise InputError unless it suits the view's transforms."""
    number = check_whole_number("copies", copies, 0, MAX_COPIES, optional=True)
    augmented, plain = (
        compile_transforms(data.columns, data.transforms, augment=augment)
        for augment in (True, False)
    )
    pairs = zip(augmented, plain, strict=True)
    random = [a["name"] for a, b in pairs if a != b and a["name"] in reads]
    if random and number is None:
        raise InputError(
            f"derive: the transforms of column {random[0]!r} draw random numbers, but derived "
            "columns are computed once: copies=4 stores four augmented copies, of which epoch e "
            "reads copy e % 4; copies=0 stores the values without augmentation"
        )
    if number and not random:
        raise InputError(
            f"copies={number}: the view has no random transforms, so all copies would be equal: "
            "leave out copies, or add RandomCrop or RandomHorizontalFlip"
        )
    return number or 0


def repeat_rows(part: Part, size: int) -> Array:
    """Return the part's row numbers, repeated from the start until there are `size`."""
    rows = np.arange(*part) if isinstance(part, tuple) else part
    filled = np.resize(rows, size).astype(np.uint32)
    filled.setflags(write=False)
    return filled


def _view_bytes(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
