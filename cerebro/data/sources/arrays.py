"""A mapping of column names to arrays or lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cerebro.data.columns import ColumnData, from_array, from_list
from cerebro.data.sources.arrow_tables import whole_column
from cerebro.data.sources.base import Source, Table, choose_columns
from cerebro.data.sources.pandas_frames import frame_column, is_frame, series_column
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
