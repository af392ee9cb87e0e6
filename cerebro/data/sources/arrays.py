"""Columns in memory: mappings of names to arrays or lists, pairs, bunches, and pandas frames.

A bunch is what scikit-learn's ``load_iris()`` and similar functions return. The columns of pairs
``(x, y)`` and of bunches are ``x`` and ``y``. Class names that belong to integer labels are kept.
The index of a frame is not read; ``reset_index()`` makes it a column.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cerebro.data.columns import (
    ColumnData,
    cell_at,
    check_complete,
    check_numbers,
    from_array,
    from_list,
    from_objects,
    from_rows,
    from_text,
    missing_value_error,
)
from cerebro.data.dtypes import find_first_text, quote_cell
from cerebro.data.sources.arrow_tables import whole_column
from cerebro.data.sources.base import Source, Table, choose_columns
from cerebro.errors import InputError


class ArraysSource(Source):
    """Columns in memory. Arrays are not copied; memory-mapped ones are read during the writing."""

    kind = "arrays"
    whole = True
    declaration = "{}: pandas.Categorical(...)"

    def __init__(self, columns: Mapping[Any, Any]) -> None:
        if not columns:
            raise InputError('the source has no columns: give at least one, such as {"x": array}')
        self.columns = columns

    def chunks(self, wanted: Sequence[str] | None) -> Iterator[Table]:
        yield {name: self._column(name) for name in choose_columns(self.columns, wanted)}

    def _column(self, name: str) -> ColumnData:
        value = self.columns[name]
        if value is None or isinstance(value, (str, bytes, Mapping)):
            raise InputError(
                f"column {name!r} is {type(value).__name__}: give an array or a list with one "
                "value for each row, or leave it out with columns=[...]"
            )
        if isinstance(value, (list, tuple)):
            return from_list(name, value)
        if is_frame(value):
            return frame_column(name, value)
        package = type(value).__module__.partition(".")[0]
        if package == "pyarrow":  # an array would have NaN for nulls
            return whole_column(name, value)
        if package == "pandas" and hasattr(value, "isna"):
            return series_column(name, value)
        return from_array(name, value)


def is_pair(source: Any) -> bool:
    """Return whether this is ``(x, y)``: two arrays, tables or lists."""
    return (
        type(source) is tuple
        and len(source) == 2
        and all(isinstance(item, list) or getattr(item, "ndim", 0) > 0 for item in source)
    )


def is_bunch(source: Any) -> bool:
    return isinstance(source, Mapping) and type(source).__name__ == "Bunch"


def bunch_source(bunch: Mapping[str, Any]) -> Source:
    """Return the importer for a ``Bunch`` with ``data`` and ``target``."""
    x, y = bunch.get("data"), bunch.get("target")
    if x is None or y is None or np.ndim(y) == 0:
        raise InputError(
            f"the Bunch has {', '.join(bunch)}, but not data and target: name the arrays that you "
            'need, such as {"x": bunch.images}'
        )
    array = x.to_numpy() if is_frame(x) else x
    is_mixed = getattr(array, "dtype", np.dtype(float)).kind == "O"
    if bunch.get("frame") is not None and is_mixed:
        return PandasSource(bunch["frame"])  # columns of several kinds keep their names
    return _Bunch(x, y, bunch.get("target_names"))


class _Bunch(ArraysSource):
    def __init__(self, x: Any, y: Any, names: Any) -> None:
        super().__init__({"x": x, "y": y})
        self._names = None if names is None else list(names)

    def chunks(self, wanted: Sequence[str] | None) -> Iterator[Table]:
        for table in super().chunks(wanted):
            if "y" in table and self._are_classes(table["y"]):
                names = [str(name) for name in self._names or ()]
                codes = table["y"].values.astype(np.int64)
                table["y"] = ColumnData(codes, "int64", None, names, ordered=True)
            yield table

    def _are_classes(self, data: ColumnData) -> bool:
        names = self._names
        if not names or not all(isinstance(name, str) for name in names):
            return False
        plain = data.names is None and data.offsets is None and not data.row_shape
        if not plain or not data.dtype.startswith(("int", "uint")) or not data.rows:
            return False
        return bool(data.values.min() >= 0 and data.values.max() < len(names))


# --- pandas frames ------------------------------------------------------------------------------


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
        return _join_classes(name, frame, parts)
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
    return from_array(name, np.stack([part.values for part in parts], axis=1))


def _join_classes(name: str, frame: Any, parts: Sequence[ColumnData]) -> ColumnData:
    """Return a frame of text or categories as one column, whose rows share their classes."""
    first = parts[0]
    if all(part.ordered and part.names == first.names for part in parts):
        return replace(first, values=np.stack([part.values for part in parts], axis=1))
    for label, series in frame.items():
        if getattr(series.dtype, "ordered", False):
            raise InputError(
                f"column {name!r} is a frame, whose column {str(label)!r} has ordered categories "
                "of its own: give the frame itself as the source, which keeps its columns apart"
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
