"""Element types: their names, their storage, and conversion of values; numbers written as text.

A *logical* type is the name that manifests and users see; the *storage* type is the NumPy type of
the bytes. They differ only for bfloat16, which NumPy lacks: it is stored as uint16.

Text becomes categories, so one cell such as "?", "1,000" or "5%" would turn a column of numbers
into codes in alphabetical order. `find_bad_cell` finds it. A column holds numbers if most of its
cells, or of its different cells, are numbers or are written as numbers for readers, and few are
not. Many such cells are text, as in a column of tickets. Categories that the source's type declares
are never numbers.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cerebro.errors import InputError

Array = NDArray[Any]

STORAGE: dict[str, np.dtype[Any]] = {
    "bool": np.dtype("|b1"),
    "int8": np.dtype("|i1"),
    "int16": np.dtype("<i2"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
    "uint8": np.dtype("|u1"),
    "uint16": np.dtype("<u2"),
    "uint32": np.dtype("<u4"),
    "uint64": np.dtype("<u8"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
    "complex64": np.dtype("<c8"),
}


def freeze_array(array: Array) -> Array:
    """Return a copy that cannot be made writable again; the core would copy other arrays."""
    return np.frombuffer(array.tobytes(), array.dtype).reshape(array.shape)


def dtype_name(dtype: object) -> str:
    """Return the logical name of a dtype: a string, or a NumPy, torch or Python type."""
    name = str(dtype) if isinstance(dtype, str) else str(getattr(dtype, "name", dtype))
    name = name.removeprefix("torch.")
    if name not in STORAGE:
        with contextlib.suppress(TypeError):
            name = np.dtype(dtype).name  # type: ignore[call-overload]
    if name not in STORAGE:
        raise InputError(f"unknown dtype {dtype!r}: use one of {', '.join(STORAGE)}")
    return name


TEXT = "str"  # in ``dtypes=``: the column is read as text, also if all its cells are numbers


def parse_dtype(dtype: object) -> tuple[str, tuple[int, ...] | None]:
    """Return the name of a type in ``dtypes=``, or `TEXT`, and the shape of each row, if given."""
    if dtype is str or (isinstance(dtype, str) and dtype in (TEXT, "string")):
        return TEXT, None
    if not isinstance(dtype, (tuple, list)):
        return dtype_name(dtype), None
    shape = dtype[1] if len(dtype) == 2 else None
    sizes: list[Any] = list(shape) if isinstance(shape, (tuple, list)) else [shape]
    if not sizes or not all(type(size) is int and size > 0 for size in sizes):
        raise InputError(
            f'dtypes: {dtype!r} is not a type and a shape: give a pair such as ("float32", (40,))'
        )
    return dtype_name(dtype[0]), tuple(sizes)


def reinterpret(values: Array, dtype: str, shape: tuple[int, ...], column: str) -> Array:
    """Return rows of bytes as little-endian values of this type and shape, without a copy."""
    storage = STORAGE[dtype]
    needed = storage.itemsize * math.prod(shape)
    nbytes = math.prod(values.shape[1:])
    if nbytes != needed:
        raise InputError(
            f"column {column!r} has {nbytes} bytes in each row, but {dtype} of shape {shape} needs "
            f"{needed}"
        )
    return np.ascontiguousarray(values).view(storage).reshape(len(values), *shape)


def to_logical_dtype(array: Array, column: str) -> tuple[Array, str]:
    """Return an array in its little-endian storage type, and the name of its logical type."""
    name = array.dtype.name
    if name == "bfloat16":
        return array.view(np.uint16), name
    if name in STORAGE:
        return array.astype(array.dtype.newbyteorder("<"), copy=False), name
    real = "convert it to float64 or float32 first"
    advice = {
        "M": "convert times to numbers first, such as seconds since a date",
        "m": "convert durations to numbers first, such as seconds",
        "c": "convert it to complex64 first",
        "f": real,
        "i": real,
    }
    other = "convert it to numbers or strings first, or leave it out with columns=[...]"
    raise InputError(f"column {column!r} is {name}: {advice.get(array.dtype.kind, other)}")


def promote(first: str, second: str) -> str | None:
    """Return the type that holds values of both; None if there is no such type."""
    if first == second:
        return first
    if "bfloat16" in (first, second):
        other = second if first == "bfloat16" else first
        return promote("float32", other)
    name = np.promote_types(STORAGE[first], STORAGE[second]).name
    return name if name in STORAGE else None


def convert(values: Array, source: str, target: str, column: str) -> Array:
    """Convert storage of logical type `source` to storage of logical type `target`.

    Floats are rounded to nearest even. Raises InputError if anything else would change a value: a
    fraction or a range that an integer type cannot hold, or a float that overflows.
    """
    if source == target:
        return values
    if source == "bfloat16":
        values, source = bfloat16_to_float32(values), "float32"
    if target == "bfloat16":
        return float32_to_bfloat16(convert(values, source, "float32", column))
    kind = STORAGE[target].kind
    if STORAGE[source].kind == "c" and kind != "c":
        raise InputError(f"column {column!r}: complex values cannot become {target}")
    try:
        with np.errstate(over="raise", invalid="ignore" if kind in "iub" else "raise"):
            result = values.astype(STORAGE[target])
    except FloatingPointError:
        raise InputError(f"column {column!r} has values too large for {target}") from None
    if kind in "iub" and not _are_equal(result, values):
        raise InputError(
            f"column {column!r} has values that {target} cannot hold: round or scale them first, "
            "or choose another dtype"
        )
    return result


def _are_equal(converted: Array, values: Array) -> bool:
    # NumPy 2 compares signed and unsigned by value only if neither is rounded to float.
    if converted.dtype.kind in "iu" and values.dtype.kind in "iu":
        back = converted.astype(values.dtype)
        return bool(np.array_equal(back, values) and np.array_equal(back < 0, converted < 0))
    return bool(np.array_equal(converted.astype(values.dtype), values))


def bfloat16_to_float32(values: Array) -> Array:
    """Widen bfloat16, stored as uint16, to float32 (exact)."""
    bits: Array = values.astype(np.uint32) << np.uint32(16)
    return bits.view(np.float32)


def float32_to_bfloat16(values: Array) -> Array:
    """Round float32 to bfloat16, stored as uint16: to nearest even, NaN stays NaN."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    quiet = bits | np.uint32(0x00400000)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    wide: Array = np.where(nan, quiet, rounded) >> np.uint32(16)
    return wide.astype(np.uint16)


# --- numbers among text ---------------------------------------------------------------

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
    are_text = np.array([not is_number(name) for name in names], bool)
    return _find_first(are_text, codes.reshape(-1)) or 0


def _find_first(are_text: Array, codes: Array) -> int | None:
    for start in range(0, len(codes), _PIECE):
        hits = are_text[codes[start : start + _PIECE]]
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
    text = f"column {column!r}, row {row} is str, but others are numbers: it is {quote_cell(cell)}"
    if not mixed:
        text = f"column {column!r} holds numbers, but {quote_cell(cell)} in row {row}"
    return InputError(
        f"{text}: correct the cell, make it a missing value (NaN; in CSV, an empty cell), or "
        f"leave the column out{cure}"
    )
