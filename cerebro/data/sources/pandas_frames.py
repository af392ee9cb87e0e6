"""pandas data frames. The index is not read; ``reset_index()`` makes it a column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cerebro.data.columns import ColumnData, from_array, from_objects, from_text, missing
from cerebro.data.sources.arrow_tables import whole_column
from cerebro.data.sources.base import Source, Table, choose
from cerebro.errors import InputError


class PandasSource(Source):
    """A frame in memory; columns of NumPy types are not copied."""

    kind = "pandas"
    whole = True

    def __init__(self, frame: Any) -> None:
        self.frame = frame

    def chunks(self, wanted: Sequence[str] | None) -> Iterator[Table]:
        names = list(self.frame.columns)
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(f"the frame has two columns named {twice!r}: rename one")
        yield {name: series_column(name, self.frame[name]) for name in choose(names, wanted)}


def series_column(name: str, series: Any) -> ColumnData:
    """Return a series as a column. Raises InputError for missing values and unsuitable types."""
    import numpy as np
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
        raise missing(name, int(absent.argmax()))
    if isinstance(dtype, pd.CategoricalDtype):
        return _categories(name, series)
    if isinstance(dtype, pd.StringDtype):
        return from_text(name, series.tolist())
    if isinstance(dtype, pd.ArrowDtype):
        return _arrow(name, series)
    if dtype == np.dtype(object):
        return from_objects(name, series.tolist())
    if pd.api.types.is_numeric_dtype(dtype) and plain is not None:
        return from_array(name, series.to_numpy(plain))  # Int64, boolean
    raise InputError(
        f"column {name!r} has pandas' type {dtype}: convert it to numbers or strings first, or "
        "leave it out with columns=[...]"
    )


def _categories(name: str, series: Any) -> ColumnData:
    """Return a categorical series as a column.

    Categories that are strings become the column's classes; of others, the values are stored.
    """
    names = series.cat.categories.tolist()
    if all(isinstance(label, str) for label in names):
        return ColumnData(series.cat.codes.to_numpy().astype("int64"), "int64", None, names)
    return from_array(name, series.cat.categories.to_numpy()[series.cat.codes.to_numpy()])


def _arrow(name: str, series: Any) -> ColumnData:
    import pyarrow as pa

    return whole_column(name, pa.array(series))
