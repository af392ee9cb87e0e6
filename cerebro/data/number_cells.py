"""Find the cells of a column of numbers that are not numbers, such as "?", "1,000" or "5%".

Text becomes categories, so one such cell would turn a column of numbers into codes in alphabetical
order. A column holds numbers if most of its cells, or of its different cells, are numbers or are
written as numbers for readers, and few are not. Many such cells are text, as in a column of
tickets. Categories that the source's type declares are never numbers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from cerebro.data.dtypes import Array
from cerebro.errors import InputError

_FOR_READERS = re.compile(
    r"[+-]?[$€£¥]?\s?[+-]?(\d{1,3}([,'.]\d{3})+|\d+)([.,]\d+)?\s?[%$€£¥]?", re.ASCII
)
"""Numbers with separators of thousands, a comma for the point, a sign of percent or currency."""

_PIECE = 1 << 20  # codes may be memory-mapped
_MOST_SHOWN = 60
_FEW_NAMES = 5
_FEW_SHARE = 0.1
"""This many different cells, or this share of all, may be mistakes in a column of numbers."""


def is_number(cell: str) -> bool:
    """Return whether a cell of text is a number, as in a CSV file."""
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell  # 1_000 is a number only in Python


def quote_cell(cell: object) -> str:
    """Return a cell for an error message, shortened if it is long."""
    text = repr(cell)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."


def find_bad_cell(names: Sequence[str], codes: Array) -> int | None:
    """Return the place of the first cell that is not a number in a column of numbers, or None.

    `codes`, of any shape, has the index of each cell in `names`; places count its elements.
    """
    plain = np.array([is_number(name) for name in names], bool)
    if plain.all():
        return None
    written = np.array([bool(_FOR_READERS.fullmatch(name.strip())) for name in names], bool) | plain
    if not written.any():
        return None
    codes = codes.reshape(-1)
    counts = np.zeros(len(names), np.int64)
    for start in range(0, len(codes), _PIECE):
        counts += np.bincount(codes[start : start + _PIECE], minlength=len(names))
    used = counts > 0
    digits = np.array([any(map(str.isdigit, name)) for name in names], bool)
    numbers = used & written & digits  # "nan" and "inf" are beside numbers and beside text
    others = used & ~written
    of_cells = counts[numbers].sum() > counts[others].sum()
    of_names = numbers.sum() > others.sum()
    few = others.sum() <= _FEW_NAMES or counts[others].sum() <= _FEW_SHARE * counts.sum()
    if not (used & ~plain).any() or not ((of_cells or of_names) and few):
        return None
    return _find_first(~plain, codes)


def find_first_text(names: Sequence[str], codes: Array) -> int:
    """Return the place of the first cell that is not a number; 0 if all are numbers."""
    return (
        _find_first(np.array([not is_number(name) for name in names], bool), codes.reshape(-1)) or 0
    )


def _find_first(wanted: Array, codes: Array) -> int | None:
    for start in range(0, len(codes), _PIECE):
        hits = wanted[codes[start : start + _PIECE]]
        if hits.any():
            return start + int(hits.argmax())
    return None


def not_a_number_error(
    column: str, row: int, cell: object, cure: str = "", *, mixed: bool = False
) -> InputError:
    """Return the error for a cell in a column of numbers.

    `cure` is the end of the message: how to keep the cells as text. With `mixed`, the other cells
    are numbers, not text.
    """
    text = f"column {column!r} holds numbers, but {quote_cell(cell)} in row {row}"
    if mixed:
        text = (
            f"column {column!r}, row {row} is str, but others are numbers: it is {quote_cell(cell)}"
        )
    return InputError(
        f"{text}: correct the cell, make it a missing value (NaN; in CSV, an empty cell), or "
        f"leave the column out{cure}"
    )
