"""pandas data frames. The index is not read; ``reset_index()`` makes it a column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cerebro.data.columns import (
    ColumnData,
    cell_at,
    check_complete,
    check_numbers,
    from_array,
    from_objects,
    from_rows,
    from_text,
    missing_value_error,
)
from cerebro.data.dtypes import find_first_text, quote_cell
from cerebro.data.sources.arrow_tables import whole_column
from cerebro.data.sources.base import Source, Table, choose_columns
from cerebro.errors import InputError


class PandasSource(Source):
    """A frame in memory; columns of NumPy types are not copied."""

    kind = "pandas"
    whole = True
    declaration = "frame[{}].astype('category')"

    def __init__(self, frame: Any) -> None:
        self.frame = frame

    def chunks(self, wanted: Sequence[str] | None) -> Iterator[Table]:
        names = choose_columns(self.frame.columns, wanted, "the frame")
        yield {name: series_column(name, self.frame[name]) for name in names}


def is_frame(value: Any) -> bool:
    """Return whether this is a table with `to_numpy`, as of pandas, and not an array."""
    return getattr(value, "ndim", 0) == 2 and hasattr(value, "to_numpy")


def frame_column(name: str, frame: Any) -> ColumnData:
    """Return a frame as one column, whose rows are vectors: the frame's rows.

    Its type is the common one of the frame's columns, by NumPy's rules. pandas would make objects
    of numbers and booleans together, and NaN of missing integers.
    """
    dtypes = list(getattr(frame, "dtypes", ()))  # an xarray.DataArray has none
    if all(isinstance(dtype, np.dtype) for dtype in dtypes):
        array = frame.to_numpy()
        if array.dtype.kind != "O" or not dtypes:
            return from_array(name, array)
    labels = [str(label) for label in frame.columns]
    parts = [_read_part(name, label, frame.iloc[:, at]) for at, label in enumerate(labels)]
    for label, part in zip(labels, parts, strict=True):
        check_numbers(
            label,
            part,
            "; if its cells are names or codes, give the frame itself as the source, with "
            f"{PandasSource.declaration.format(repr(label))}",
        )
    if all(part.names is not None for part in parts):
        return _join_classes(name, frame, labels, parts)
    for label, part in zip(labels, parts, strict=True):
        if part.names is not None or part.values.ndim > 1 or part.offsets is not None:
            kind, where = "sequences", ""
            if part.names is not None:
                row, cell = cell_at(part, find_first_text(part.names, part.values))
                kind, where = "text", f" ({quote_cell(cell)} in row {row})"
            raise InputError(
                f"column {name!r} is a frame of numbers, but the frame's column {label!r} has "
                f"{kind}: convert it to numbers{where}, or give the frame itself as the source, "
                "which keeps its columns apart"
            )
    values = np.empty(frame.shape, np.result_type(*(part.values.dtype for part in parts)))
    for at, part in enumerate(parts):
        values[:, at] = part.values
    return from_array(name, values)


def _join_classes(
    name: str, frame: Any, labels: Sequence[str], parts: Sequence[ColumnData]
) -> ColumnData:
    """Return a frame of text or categories as one column, whose rows share their classes."""
    first = parts[0]
    if all(part.ordered and part.names == first.names for part in parts):
        return replace(first, values=np.stack([part.values for part in parts], axis=1))
    for label, series in zip(labels, (frame.iloc[:, at] for at in range(len(labels))), strict=True):
        if getattr(series.dtype, "ordered", False):
            raise InputError(
                f"column {name!r} is a frame, whose column {label!r} has ordered categories of its "
                "own: give the frame itself as the source, which keeps its columns apart"
            )
    return from_array(name, frame.to_numpy())


def _read_part(name: str, label: str, series: Any) -> ColumnData:
    if type(series.dtype).__name__ == "SparseDtype":
        series = series.sparse.to_dense()
    try:
        if series.dtype == object:  # numbers too, which series_column does not take as objects
            return check_complete(label, from_rows(label, series.tolist()))
        return series_column(label, series)
    except InputError as error:
        text = str(error).replace(" with columns=[...]", "")  # it knows only the whole frame
        raise InputError(f"column {name!r}: the frame's {text}") from None


def series_column(name: str, series: Any) -> ColumnData:
    """Return a series as a column. Raises InputError for missing values and unsuitable types."""
    import pandas as pd

    series = pd.Series(series)  # also accepts a pandas array, such as a Categorical
    dtype = series.dtype
    if isinstance(dtype, np.dtype) and dtype.kind != "O":
        return from_array(name, series.to_numpy())  # NaN in a float column is a value
    plain = getattr(dtype, "numpy_dtype", None)
    if plain is not None and np.dtype(plain).kind == "f":  # Float32, Arrow's float
        return from_array(name, series.to_numpy(plain, na_value=np.nan))
    absent = series.isna().to_numpy()
    if absent.any():
        raise missing_value_error(name, int(absent.argmax()))
    if isinstance(dtype, pd.CategoricalDtype):
        return _categories(name, series)
    if isinstance(dtype, pd.StringDtype):
        return from_text(name, series.tolist())
    if isinstance(dtype, pd.ArrowDtype):
        import pyarrow as pa

        return whole_column(name, pa.array(series))
    if dtype == np.dtype(object):
        return from_objects(name, series.tolist())
    if pd.api.types.is_numeric_dtype(dtype) and plain is not None:
        return from_array(name, series.to_numpy(plain))  # Int64, boolean
    raise InputError(
        f"column {name!r} has pandas' type {dtype}: convert it to numbers or strings first, or "
        "leave it out with columns=[...]"
    )


def _categories(name: str, series: Any) -> ColumnData:
    """Return a categorical series: classes in their order if they are strings, else the values."""
    names = series.cat.categories.tolist()
    if all(isinstance(label, str) for label in names):
        codes = series.cat.codes.to_numpy().astype("int64")
        return ColumnData(codes, "int64", None, names, ordered=True)
    return from_array(name, series.cat.categories.to_numpy()[series.cat.codes.to_numpy()])
