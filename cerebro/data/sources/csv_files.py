"""``.csv`` files with a header line.

All cells of a column determine its type: int64 for integers, float64 for other numbers, bool for
``true`` and ``false``, categories for anything else, and for all cells of a column that ``dtypes=``
makes "str". The file is therefore read twice, first for the types. An empty cell is a missing
value. Python's own parser is used, so that the result does not depend on the installed packages.
"""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np

from cerebro.data.columns import ColumnData, from_text, missing_value_error
from cerebro.data.sources.base import FileSource, Table, choose_columns
from cerebro.errors import InputError

CHUNK_ROWS = 16_384
_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False,
             "FALSE": False}  # fmt: skip

Cells = Sequence[str]


class CsvSource(FileSource):
    """A file of comma-separated values; tab-separated if the name ends in ``.tsv``."""

    kind = "csv"

    def chunks(self, wanted: Sequence[str] | None) -> Iterator[Table]:
        types: dict[str, str | None] = dict.fromkeys(self.text, "text")
        for _, columns in self._read(wanted):
            for name, cells in columns.items():
                types[name] = _widen_type(types.get(name), cells)
        for first, columns in self._read(wanted):
            yield {
                name: _make_column(name, cells, types[name], first)
                for name, cells in columns.items()
            }

    def _read(self, wanted: Sequence[str] | None) -> Iterator[tuple[int, dict[str, Cells]]]:
        """Yield, for each chunk, the number of its first row and its cells by column."""
        with self.path.open(newline="", encoding="utf-8-sig") as file:
            delimiter = "\t" if self.path.suffix.lower() == ".tsv" else ","
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            try:
                header = next(reader, None)
                if header is None:
                    raise InputError(f"'{self.path}' is empty: it needs a line of column names")
                names = choose_columns(header, wanted, f"'{self.path}'")
                places = {name: header.index(name) for name in names}
                first = 0
                for rows in self._read_runs(reader, len(header)):
                    cells = list(zip(*rows, strict=True))
                    self._refuse_nul(header, cells)
                    yield first, {name: cells[place] for name, place in places.items()}
                    first += len(rows)
            except csv.Error as error:
                line = reader.line_num
                raise InputError(f"'{self.path}', line {line}: {error}") from None
            except UnicodeDecodeError as error:
                raise InputError(f"'{self.path}' is not UTF-8: {error}; convert it") from None

    def _read_runs(self, reader: Iterator[list[str]], width: int) -> Iterator[list[list[str]]]:
        rows: list[list[str]] = []
        for cells in reader:
            if not cells:  # an empty line
                continue
            if len(cells) != width:
                line = reader.line_num  # type: ignore[attr-defined]
                raise InputError(
                    f"'{self.path}', line {line} has {len(cells)} cells, but the header has "
                    f"{width}: quote cells that contain a comma"
                )
            rows.append(cells)
            if len(rows) == CHUNK_ROWS:
                yield rows
                rows = []
        if rows:
            yield rows

    def _refuse_nul(self, header: Sequence[str], columns: Sequence[Cells]) -> None:
        """Raise InputError for a NUL character, which only new Python versions can read."""
        for name, cells in zip(header, columns, strict=True):
            if "\0" in name or "\0" in "".join(cells):
                raise InputError(
                    f"'{self.path}', column {name!r} has a NUL character: is it a CSV file?"
                )


def _widen_type(known: str | None, cells: Cells) -> str | None:
    """Return the narrowest type, at least `known`, that fits all cells; None if all are empty."""
    filled = [cell for cell in cells if cell] if "" in cells else cells
    if not filled:
        return known
    if known in (None, "bool") and all(cell in _BOOLEANS for cell in filled):
        return "bool"
    if known == "bool":  # true and 1 have only text in common
        return "text"
    if known not in ("float64", "text") and _parses(filled, int):
        return "int64"
    return "float64" if known != "text" and _parses(filled, float) else "text"


def _parses(cells: Cells, kind: type[int] | type[float]) -> bool:
    if "_" in "".join(cells):  # 1_000 is a number only in Python
        return False
    try:
        deque(map(kind, cells), maxlen=0)
    except ValueError:
        return False
    return True


def _make_column(name: str, cells: Cells, kind: str | None, first: int) -> ColumnData:
    if "" in cells:
        if kind != "float64":
            raise missing_value_error(name, first + cells.index(""))
        cells = [cell or "nan" for cell in cells]
    if kind == "text":
        return from_text(name, cells, first)
    if kind == "bool":
        return ColumnData(np.array([_BOOLEANS[cell] for cell in cells]), "bool")
    if kind == "float64":
        return ColumnData(np.fromiter(map(float, cells), np.float64, len(cells)), "float64")
    try:
        return ColumnData(np.fromiter(map(int, cells), np.int64, len(cells)), "int64")
    except OverflowError:
        raise InputError(
            f"column {name!r} has integers too large for int64: leave it out with columns=[...]"
        ) from None
