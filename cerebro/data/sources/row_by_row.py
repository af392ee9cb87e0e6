"""Sources that are read row by row: iterables of mappings, PyTorch and Hugging Face datasets.

A value in a row may be a number, a string, an array or tensor (of fixed shape, or ragged if the
first dimension differs from row to row), a PIL image, or a list (ragged).

A sample of a PyTorch dataset may be a mapping, a named tuple, a tuple or a single tensor. The items
of a tuple become the columns ``x``, ``y``, ``column2``, ``column3``, ...; a single tensor becomes
``x``. An item that is itself a tuple, as in ``((a, b), y)``, is one column, so its parts must have
one shape; parts of different shapes need a mapping with a name for each.

Of a Hugging Face dataset, mapped or streaming, columns of numbers, strings and lists are read
directly from Arrow data; images and other features that must be decoded are read row by row. A
``ClassLabel`` column keeps its codes and names; its code -1 is a missing value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cerebro.data.columns import add_classes, check_complete, copy_value, from_rows
from cerebro.data.sources.arrays import ArraysSource
from cerebro.data.sources.arrow_tables import read_tables
from cerebro.data.sources.base import Source, Table, choose_columns
from cerebro.errors import InputError
from cerebro.machine import generators

CHUNK_ROWS = 4096
CHUNK_BYTES = 32 << 20  # of the values that have nbytes
READ_TWICE = 32  # samples; a flip with probability 1/2 is missed once in 2**32 times


class RowsSource(Source):
    """Rows of any iterable, read once, without holding all rows in memory unless it is a list."""

    kind = "rows"

    def __init__(self, rows: Iterable[Any]) -> None:
        self.rows = rows
        self.whole = isinstance(rows, (list, tuple))

    def chunks(self, wanted: Sequence[str] | None) -> Iterator[Table]:
        tables = row_chunks(self.rows, wanted, whole=self.whole)
        return iter([next(tables, {})]) if self.whole else tables


def row_chunks(
    rows: Iterable[Any],
    wanted: Sequence[str] | None,
    classes: Mapping[str, Sequence[str]] | None = None,
    whole: bool = False,
) -> Iterator[Table]:
    """Collect rows into tables, or one if `whole`; `classes` has the names of columns of codes."""
    columns: dict[str, list[Any]] = {}
    names: set[str] = set()
    first = row = held = 0
    for row, mapping in enumerate(rows):
        if not isinstance(mapping, Mapping):
            cure = ""
            if isinstance(rows, tuple) and getattr(mapping, "ndim", 0) > 0:
                cure = "; give whole columns as a mapping of names, or as a pair (x, y)"
            raise InputError(
                f"row {row} is {type(mapping).__name__}: an iterable must give mappings, such as "
                f'{{"x": 1.5, "y": 0}}{cure}'
            )
        if not names:
            columns = {name: [] for name in choose_columns(mapping, wanted)}
            names = set(mapping)
        elif mapping.keys() != names:
            raise InputError(
                f"row {row} has the columns {', '.join(map(str, mapping))}, but rows before it "
                f"have {', '.join(sorted(names))}: give every row the same"
            )
        for name, values in columns.items():
            value = mapping[name] if whole else copy_value(mapping[name])
            values.append(value)
            held += getattr(value, "nbytes", 0)
        if not whole and (row + 1 - first >= CHUNK_ROWS or held >= CHUNK_BYTES):
            yield _make_table(columns, first, classes)
            columns = {name: [] for name in columns}
            first, held = row + 1, 0
    if names and first <= row:
        yield _make_table(columns, first, classes)


def _make_table(
    columns: Mapping[str, list[Any]], first: int, classes: Mapping[str, Sequence[str]] | None
) -> Table:
    table = {name: from_rows(name, values, first) for name, values in columns.items()}
    for name, labels in (classes or {}).items():
        if name in table:
            table[name] = add_classes(name, check_complete(name, table[name]), labels, first)
    return table


# --- PyTorch datasets ---------------------------------------------------------------------------


def torch_source(dataset: Any) -> Source:
    import torch

    if type(dataset) is torch.utils.data.TensorDataset:  # a subclass may change its samples
        tensors = dataset.tensors
        return ArraysSource({_name_column(place): tensor for place, tensor in enumerate(tensors)})
    return TorchSource(dataset)


class TorchSource(Source):
    """The samples of a dataset, read by index if it has a length, otherwise by iteration."""

    kind = "torch"

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def chunks(self, wanted: Sequence[str] | None) -> Iterator[Table]:
        return row_chunks(self._samples(wanted), wanted)

    def _samples(self, wanted: Sequence[str] | None) -> Iterator[Mapping[str, Any]]:
        import torch

        if isinstance(self.dataset, torch.utils.data.IterableDataset):
            yield from map(as_mapping, self.dataset)
            return
        if not hasattr(self.dataset, "__len__"):
            raise InputError(
                f"the {type(self.dataset).__name__} has no length: give it the method __len__, or "
                "make it a torch.utils.data.IterableDataset"
            )
        count = len(self.dataset)
        step = max(1, count // READ_TWICE)
        seen: dict[int, dict[str, Any]] = {}
        for index in range(count):
            sample = as_mapping(self.dataset[index])
            if index % step == 0 and len(seen) < READ_TWICE:
                seen[index] = _read_contents(sample, wanted)
            yield sample
        self._read_again(seen, wanted)

    def _read_again(self, seen: Mapping[int, Mapping[str, Any]], wanted: Any) -> None:
        """Find random columns by reading samples again; done last, as a dataset may count reads."""
        with generators.preserve_generators(True), contextlib.suppress(Exception):
            for index, before in seen.items():
                after = _read_contents(as_mapping(self.dataset[index]), wanted)
                changed = [name for name in before if after.get(name) != before[name]]
                if changed:
                    named = ", ".join(repr(name) for name in changed)
                    self.remark = (
                        f"sample {index} of the {type(self.dataset).__name__} differs when "
                        f"it is read again (column {named}): one draw of a random transform would "
                        "be stored for every epoch. Leave it out of the dataset, and give "
                        "cerebro.transforms.RandomCrop and RandomHorizontalFlip to "
                        "with_transforms, or augment= to cerebro.torch.Model"
                    )
                    return


def _read_contents(sample: Mapping[str, Any], wanted: Sequence[str] | None) -> dict[str, Any]:
    """Return the contents of a sample's columns, without values that cannot be a column."""
    contents: dict[str, Any] = {}
    for name in sample if wanted is None else wanted:
        with contextlib.suppress(Exception):
            column = from_rows(name, [sample[name]], 0)
            contents[name] = (column.dtype, column.values.tobytes(), column.names)
    return contents


def as_mapping(sample: Any) -> Mapping[str, Any]:
    if isinstance(sample, Mapping):
        return sample
    if hasattr(sample, "_asdict"):
        return dict(sample._asdict())
    if isinstance(sample, (tuple, list)):
        return {_name_column(place): value for place, value in enumerate(sample)}
    return {"x": sample}


def _name_column(place: int) -> str:
    return ("x", "y")[place] if place < 2 else f"column{place}"


# --- Hugging Face datasets ----------------------------------------------------------------------


def is_huggingface(source: Any) -> bool:
    """Return whether `source` is a dataset, or a dict of several, of the ``datasets`` package."""
    kind = type(source)
    return kind.__module__.partition(".")[0] == "datasets" and hasattr(source, "with_format")


class HuggingFaceSource(Source):
    kind = "huggingface"
    declaration = "dataset.class_encode_column({})"

    def __init__(self, dataset: Any) -> None:
        if isinstance(dataset, dict):
            raise InputError(
                f"the dataset has the splits {', '.join(dataset)}: shard one of them, such as "
                f"dataset[{next(iter(dataset))!r}]"
            )
        if (getattr(dataset, "format", None) or {}).get("type") == "custom":
            raise InputError(
                "the dataset has a transform (set_transform), which shard does not apply: apply it "
                "with dataset.map, or remove it with dataset.reset_format()"
            )
        self.dataset = dataset

    def fingerprint(self) -> str | None:
        fingerprint = getattr(self.dataset, "_fingerprint", None)
        return f"huggingface:{fingerprint}" if isinstance(fingerprint, str) else None

    def chunks(self, wanted: Sequence[str] | None) -> Iterator[Table]:
        features = self.dataset.features
        if features is None:  # a stream whose columns are not known in advance
            yield from row_chunks(iter(self.dataset.with_format(None)), wanted)
            return
        names = choose_columns(features, wanted)
        classes = {
            name: features[name].names
            for name in names
            if type(features[name]).__name__ == "ClassLabel"
        }
        dataset = self.dataset.select_columns(names)
        if all(_is_plain(features[name]) for name in names):
            arrow = dataset.with_format("arrow").iter(CHUNK_ROWS)
            batches = (batch for table in arrow for batch in table.combine_chunks().to_batches())
            first = 0
            for table in read_tables(batches, names, self.binary):
                for name, labels in classes.items():
                    table[name] = add_classes(name, table[name], labels, first)
                yield table
                first += next(iter(table.values())).rows
        else:
            types = _types_of({name: features[name] for name in names if name not in classes})
            rows = iter(dataset.with_format(None))
            yield from row_chunks((_give_types(row, types) for row in rows), names, classes)


def _types_of(features: Mapping[str, Any]) -> dict[str, tuple[str, bool]]:
    """Return the types of the features of numbers, and whether all their rows have one shape."""
    types = {}
    for name, feature in features.items():
        inner = getattr(feature, "feature", feature)  # of a list
        dtype = str(getattr(inner, "dtype", ""))
        if dtype.startswith(("int", "uint", "float", "bool")):
            has_shape = inner is feature or getattr(feature, "length", -1) not in (-1, None)
            types[name] = dtype, has_shape
    return types


def _give_types(row: Mapping[str, Any], types: Mapping[str, tuple[str, bool]]) -> dict[str, Any]:
    """Return a row with arrays and numbers of its features' types, which decoding drops."""
    return {**row, **{name: _give_type(row[name], *given) for name, given in types.items()}}


def _give_type(value: Any, dtype: str, has_shape: bool) -> Any:
    if value is None:
        return value
    try:
        array = np.asarray(value, dtype)
    except (TypeError, ValueError):  # lists of lists, gaps
        return value
    if not has_shape:
        return list(array)  # which may differ in length from row to row
    return array if array.ndim else array[()]


def _is_plain(feature: Any) -> bool:
    """Return whether a feature is stored as is: numbers, strings, labels, or lists of them."""
    inner = getattr(feature, "feature", None)
    if inner is not None:
        return _is_plain(inner)
    return type(feature).__name__ in ("Value", "ClassLabel")
