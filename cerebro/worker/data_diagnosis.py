"""Find likely mistakes in the rows: labels out of range, leaks, and repeated rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cerebro.data import Column, Dataset
from cerebro.data.dtypes import Array, bfloat16_to_float32
from cerebro.data.validation import describe_other_numbers
from cerebro.errors import InputError
from cerebro.report.findings import Finding

MOST_LABELS = 4_000_000  # the most labels that the hop check before a search reads
SAMPLED_ROWS = 1_000
MANY_SAMPLED_ROWS = 20_000  # the number of rows that `cerebro.check` looks at
LEAST_ROWS = 50  # the fewest rows to compare: with fewer, two columns may be equal by chance
READ_BYTES = 1 << 30  # of all columns together, searched for values that are not finite
MOST_NAMED = 3  # the most columns of such values that are named
SAMPLED_BYTES = 4096  # the row size, in bytes, above which fewer rows are sampled


class LabelUse(NamedTuple):
    """A column of class labels, and the number of model outputs that the labels index."""

    column: str
    classes: int
    ignored: int = -100
    place: str = ""


def check_labels(
    use: LabelUse, train: Dataset, validation: Dataset | None, thorough: bool
) -> Iterator[Finding]:
    """Compare the labels of all rows with the model's number of outputs."""
    if use.column not in train.columns or use.column in train.transforms:
        return
    low, high = 0, 0
    for data in (train, validation):
        if data is None or use.column not in data.columns:
            continue
        column = data.columns[use.column]
        if column.ragged or column.shape or not column.dtype.startswith(("int", "uint")):
            return
        most = data.num_rows if thorough else MOST_LABELS
        for labels in _read_first_rows(data, use.column, most):
            counted = labels[labels != use.ignored]
            if len(counted):
                low, high = min(low, int(counted.min())), max(high, int(counted.max()))
    if low >= 0 and high < use.classes:
        return
    wrong = low if low < 0 else high
    yield Finding(
        "labels-out-of-range",
        f"column {use.column!r} has the label {wrong}, but the model has {use.classes} outputs, "
        f"for the labels 0 to {use.classes - 1}",
        f"number the classes from 0, and give the network info.num_classes({use.column!r}) outputs",
        place=use.place,
    )


def check_columns(
    train: Dataset,
    validation: Dataset | None,
    inputs: Sequence[str],
    target: str | None,
    thorough: bool,
) -> Iterator[Finding]:
    if validation is not None and validation.checksum == train.checksum:
        yield Finding(
            "validation-is-training",
            "the validation rows are the training rows: the metrics say nothing about new rows",
            "give validation=0.2, or one of the parts of data.split(0.8, 0.2)",
        )
    rows = MANY_SAMPLED_ROWS if thorough else SAMPLED_ROWS
    names = [name for name in (*inputs, target) if name is not None]
    others = validation and describe_other_numbers(train, validation, names or train.columns)
    if others:
        yield Finding(
            "other-transforms",
            f"validation: {others}",
            "give it the training data's: validation.with_transforms(train.transforms)",
        )
    sampled = _read_sample(train, names, rows)
    present = [name for name in inputs if name in sampled and name != target]
    if target in sampled:
        yield from _find_leaks(sampled, present, str(target))
    if not thorough:
        return
    yield from _find_constant_columns(sampled, present)
    yield from _find_missing_values(train, names)
    if validation is not None and validation.checksum != train.checksum:
        yield from _find_missing_values(validation, names, "in validation, ")
        yield from _find_repeated_rows(sampled, _read_sample(validation, names, rows), names)


def find_not_finite(data: Dataset, names: Iterable[str]) -> dict[str, str]:
    """Describe NaN and infinite values, by column of floats, in shards that are here already."""
    columns = [data.columns[name] for name in names if name in data.columns]
    floats = [column for column in columns if column.dtype.startswith(("float", "bfloat"))]
    row_bytes = sum(_estimate_row_bytes(data, column) for column in floats)
    most = max(1, int(READ_BYTES / max(1.0, row_bytes)))
    texts = {}
    for column in floats:
        with contextlib.suppress(InputError):  # some rows are on another machine
            if text := _describe_not_finite(data, column, most):
                texts[column.name] = text
    return texts


def summarize_texts(found: Mapping[str, str]) -> str:
    """Return the first texts of `find_not_finite`, and how many more there are; "" if none."""
    more = len(found) - MOST_NAMED
    named = "; ".join([*found.values()][:MOST_NAMED])
    return named + (f"; so have {more} more columns" if more > 0 else "")


def _estimate_row_bytes(data: Dataset, column: Column) -> float:
    if not column.ragged:
        return column.item_bytes
    manifest = data.shards.manifest
    files = [entry.files[name].bytes for entry in manifest.shards for name in column.file_names]
    return float(sum(files)) / max(1, manifest.rows)


def _describe_not_finite(data: Dataset, column: Column, most: int) -> str:
    """Return the text of `find_not_finite` for one column's first rows; "" if they are finite."""
    rows, count, first = 0, 0, []
    has_nan = has_infinity = False
    for shard, (start, whole) in enumerate(
        zip(data.shards.first_rows, data.view.parts, strict=True)
    ):
        part = whole[: most - rows]
        if not len(part) or not data.shards.is_here(shard):
            continue
        stored = data.shards.read(column.name, shard, part)
        values = stored.values if column.ragged else stored
        if column.dtype == "bfloat16":
            values = bfloat16_to_float32(values)
        bad = ~np.isfinite(values)
        if bad.any():
            count += int(bad.sum())
            has_nan = has_nan or bool(np.isnan(values).any())
            has_infinity = has_infinity or bool(np.isinf(values).any())
            places = np.flatnonzero(bad.reshape(len(bad), -1).any(axis=1))
            if column.ragged:
                places = np.searchsorted(stored.offsets, places, side="right") - 1
            first.append(start + np.asarray(part, np.int64)[places])
        rows += len(part)
    if not count:
        return ""
    what = " and ".join(
        word for word, there in (("NaN", has_nan), ("infinity", has_infinity)) if there
    )
    row = int(data.shards.number_in_source(np.concatenate(first)).min())
    number = f"{count:,} value{'s' if count > 1 else ''} in {rows:,} rows"
    return f"column {column.name!r} has {what} ({number}, first in row {row})"


def measure_majority_share(train: Dataset, column: str) -> float:
    """Return the share of the most frequent label; 0 if the column does not hold labels."""
    labels_column = train.columns.get(column)
    if labels_column is None or labels_column.ragged or labels_column.shape:
        return 0.0
    if not labels_column.dtype.startswith(("int", "uint", "bool")):
        return 0.0
    labels = np.concatenate([*_read_first_rows(train, column, MOST_LABELS)])
    return float(np.unique(labels, return_counts=True)[1].max()) / len(labels)


def _read_first_rows(data: Dataset, name: str, rows: int) -> Iterator[Array]:
    """Yield a column's first rows as they are stored, one shard after the other."""
    remaining = rows
    for shard, part in enumerate(data.view.parts):
        taken = part[:remaining]
        if len(taken):
            yield data.shards.read(name, shard, taken)
        remaining -= len(taken)


def _read_sample(data: Dataset, names: Sequence[str], rows: int) -> dict[str, Array]:
    """Return the first rows of each column; fewer if the rows are large."""
    samples = {}
    for name in names:
        column = data.columns.get(name)
        if column is None or column.ragged or column.dtype in ("bfloat16", "complex64"):
            continue
        row = 8 * max(1, int(np.prod(column.shape)))
        most = max(1, rows * SAMPLED_BYTES // row)
        samples[name] = np.concatenate([*_read_first_rows(data, name, min(rows, most))])
    return samples


def _find_leaks(sampled: dict[str, Array], inputs: Sequence[str], target: str) -> Iterator[Finding]:
    labels = sampled[target]
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or len(labels) < LEAST_ROWS or bool(np.all(labels == labels[0])):
        return
    labels = labels.astype(np.float64)
    for name in inputs:
        rows = min(len(labels), len(sampled[name]))
        if rows < LEAST_ROWS or bool(np.all(labels[:rows] == labels[0])):
            continue
        features = sampled[name][:rows].reshape(rows, -1)
        # The first rows rule out most features before all rows are compared.
        close = np.all(features[:LEAST_ROWS] == labels[:LEAST_ROWS, None], axis=0)
        same = [i for i in np.flatnonzero(close) if np.array_equal(features[:, i], labels[:rows])]
        if same:
            part = f"column {name!r}" if features.shape[1] == 1 else f"{name!r}, feature {same[0]},"
            yield Finding(
                "target-among-inputs",
                f"{part} is the target {target!r}, so that the model sees the answer",
                "leave it out of the inputs",
            )


def _find_constant_columns(sampled: dict[str, Array], inputs: Sequence[str]) -> Iterator[Finding]:
    for name in inputs:
        values = sampled[name]
        if len(values) >= LEAST_ROWS and bool(np.all(values == values[:1])):
            yield Finding(
                "constant-column",
                f"column {name!r} is the same in all rows that were looked at ({len(values):,})",
                "leave it out of the inputs, or check how it was computed",
                "hint",
            )


def _find_missing_values(data: Dataset, names: Sequence[str], whose: str = "") -> Iterator[Finding]:
    for text in find_not_finite(data, dict.fromkeys(names)).values():
        yield Finding(
            "missing-values",
            f"{whose}{text}",
            "fill them, or drop these rows, or make the network ignore them",
            "hint",
        )


def _find_repeated_rows(
    train: dict[str, Array], held_out: dict[str, Array], names: Sequence[str]
) -> Iterator[Finding]:
    """Find validation rows that are also training rows, unless all columns are discrete."""
    if not any(train[n].dtype.kind == "f" for n in names if n in train and n in held_out):
        return
    seen, rows = _join_bytes_of_rows(train, names), _join_bytes_of_rows(held_out, names)
    if len(rows) < LEAST_ROWS:
        return
    distinct = set(seen)
    repeated = sum(row in distinct for row in rows) / len(rows)
    within = 1 - len(distinct) / max(1, len(seen))
    if repeated > 0.05 and repeated > 2 * within:
        yield Finding(
            "repeated-rows",
            f"{repeated:.0%} of the validation rows that were looked at are training rows, too",
            "remove repeated rows before shard, or split with groups=",
            "hint",
        )


def _join_bytes_of_rows(columns: dict[str, Array], names: Sequence[str]) -> list[bytes]:
    present = [columns[name] for name in names if name in columns]
    rows = min(map(len, present), default=0)
    return [b"".join(column[row].tobytes() for column in present) for row in range(rows)]
