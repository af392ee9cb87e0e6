"""A mapping of column names to arrays or lists, and pairs ``(x, y)`` and bunches of them.

A bunch is what scikit-learn's ``load_iris()`` and similar functions return. The columns of pairs
and bunches are ``x`` and ``y``. Class names that belong to integer labels are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cerebro.data.columns import ColumnData, from_array, from_list
from cerebro.data.sources.arrow_tables import whole_column
from cerebro.data.sources.base import Source, Table, choose_columns
from cerebro.data.sources.pandas_frames import PandasSource, frame_column, is_frame, series_column
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
