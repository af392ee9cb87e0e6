"""Columns that are read from a source and written to files: values, offsets, category names.

Every importer converts its input to `ColumnData`: whole columns or chunks of rows. By these rules,
the same rows get the same bits from any source:

- Arrays, tensors and typed columns keep their type. Python's ``int`` becomes int64, ``float``
  float64, ``bool`` bool; a column that mixes ``int`` and ``float`` becomes float64.
- Strings become categories: the sorted unique names, and int64 codes. But a cell such as "?" among
  numbers raises an error; see `cerebro.data.dtypes`.
- A type that declares categories keeps them, in their order, also those that no row has.
- Lists and tuples, of any length, become rows of a ragged column; the elements of all rows must
  have one shape. So do arrays whose first dimension differs from row to row. Arrays of equal shape
  become rows of a column of that shape, with one exception: in a list passed as a whole column,
  one-dimensional arrays are always ragged.
- An object array of more dimensions is a column of numbers or strings, of fixed shape.
- A missing value (None, null, NA, an empty cell) becomes NaN in a column of floats. In any other
  column it raises an error that names the column, the row and the fix.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np

from cerebro.data.dtypes import (
    Array,
    convert,
    find_bad_cell,
    is_number,
    not_a_number_error,
    promote,
    to_logical_dtype,
)
from cerebro.errors import InputError

_TAG = 0x0112  # of the orientation
_TURNS = {  # Pillow's operation for each orientation; 1 is upright
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


def is_picture(value: object) -> bool:
    """Return whether a value is an image of Pillow, without importing Pillow."""
    kind = getattr(sys.modules.get("PIL.Image"), "Image", None)
    return kind is not None and isinstance(value, kind)


def turn_upright(image: Any) -> Any:
    """Return an image of Pillow, turned as its EXIF orientation says."""
    from PIL import Image

    image.load()  # which turns a TIFF by itself
    try:
        turn = _TURNS.get(image.getexif().get(_TAG))
    except Exception:  # damaged metadata, in many kinds; the pixels are there
        return image
    return image if turn is None else image.transpose(Image.Transpose[turn])


@dataclass(frozen=True)
class ColumnData:
    """Rows of one column."""

    values: Array
    """Storage values of shape ``(rows, *row_shape)``; ``(total, *row_shape)`` if ragged."""
    dtype: str  # the logical type of `values`
    offsets: Array | None = None
    """If ragged: int64 of shape ``(rows + 1,)``; row i is ``values[offsets[i]:offsets[i+1]]``."""
    names: Sequence[str] | None = None
    """If the rows are categories: the names; `values` are int64 indices into this list."""
    ordered: bool = False
    """Whether the source's type declares `names`: then all are kept, in their order. Otherwise the
    names that occur are sorted when the dataset is written.
    """
    absent: int | None = None
    """The row of the first missing value, if a chunk has only integers and missing values. `values`
    are then float64. It is an error unless another chunk has floats; see `check_complete`.
    """
    binary: bool = False
    """Whether the rows are the bytes of binary values, whose content ``dtypes=`` describes."""
    narrow: bool = False
    """Whether float64 becomes float32, also if only all chunks together are float64."""

    @property
    def rows(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.offsets is None else self.offsets.nbytes)

    @property
    def row_shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape[1:])

    def as_ragged(self) -> ColumnData:
        """Return the rows as a ragged column; rows must have at least one dimension."""
        if self.offsets is not None:
            return self
        rows, length, *rest = self.values.shape
        return replace(
            self,
            values=self.values.reshape(rows * length, *rest),
            offsets=np.arange(rows + 1, dtype=np.int64) * length,
        )

    def as_fixed(self) -> ColumnData | None:
        """Return a ragged column as a fixed one if all rows have the same length, else None."""
        if self.offsets is None:
            return self
        lengths = np.diff(self.offsets)
        if len(lengths) == 0 or (lengths != lengths[0]).any():
            return None
        shape = (len(lengths), int(lengths[0]), *self.values.shape[1:])
        return replace(self, values=self.values.reshape(shape), offsets=None)


def from_array(column: str, value: Any, first_row: int = 0) -> ColumnData:
    """Make a column from an array or tensor; its first dimension is the rows."""
    array, dtype = to_storage(column, value)
    if array.ndim == 0:
        kind = type(value).__name__
        if hasattr(value, "toarray"):
            raise InputError(
                f"column {column!r} is sparse ({kind}): give its .toarray(), as datasets hold "
                "dense rows"
            )
        raise InputError(f"column {column!r} is a single value ({kind}): give one for each row")
    if dtype == "object" and array.ndim > 1:
        return _object_rows(column, array, first_row)
    if dtype == "object":
        return from_objects(column, array.tolist())
    return _text_array(column, array) if dtype == "text" else ColumnData(array, dtype)


def from_objects(column: str, items: Sequence[Any]) -> ColumnData:
    """Make a column from an object array, which must hold strings or sequences."""
    first = next((item for item in items if item is not None), None)
    if isinstance(first, str):
        return from_text(column, items)
    if _is_sequence(first):
        return from_list(column, items)
    stray = _find_stray(items)
    if stray is not None:
        raise not_a_number_error(column, stray, items[stray], mixed=True)
    kind = "nothing" if first is None else type(first).__name__
    raise InputError(
        f"column {column!r} has dtype object (of {kind}): give it a numeric dtype, "
        "make all its values strings, or leave it out with columns=[...]"
    )


def from_list(column: str, items: Sequence[Any]) -> ColumnData:
    """Make a whole column from a list: sequences become ragged rows, other items plain rows."""
    flat_rows = items and _is_array(items[0]) and np.ndim(items[0]) == 1
    if flat_rows or (items and isinstance(items[0], (list, tuple))):
        return _from_ragged(column, items)
    return from_rows(column, items)


def from_rows(column: str, items: Sequence[Any], first_row: int = 0) -> ColumnData:
    """Make a column from one Python value per row; messages count rows from `first_row`."""
    if not items:
        raise InputError(f"column {column!r} has no rows")
    first: Any = next((item for item in items if not is_missing(item)), None)
    if isinstance(first, str):
        return from_text(column, items, first_row)
    if isinstance(first, (list, tuple)):
        return _from_ragged(column, items, first_row)
    if _is_array(first) and np.ndim(first) > 0:
        return _array_rows(column, items, first_row)
    return _from_scalars(column, items, first_row)


def from_text(column: str, items: Sequence[Any], first_row: int = 0) -> ColumnData:
    """Make a category column from strings, whose names are in order of first appearance."""
    numbers: dict[str, int] = {}
    codes: list[int] = []
    for row, item in enumerate(items, first_row):
        if not isinstance(item, str):
            if isinstance(item, float) and item != item:  # pandas' None
                raise missing_value_error(column, row)
            if is_missing(item) or not isinstance(item, (int, float, np.number, np.bool_)):
                raise _unlike_row_error(column, row, item, "strings")
            raise _mixed_kinds_error(column, items, first_row)
        codes.append(numbers.setdefault(str(item), len(numbers)))
    return ColumnData(np.array(codes, np.int64), "int64", None, list(numbers))


def check_numbers(column: str, data: ColumnData, cure: str = "") -> None:
    """Raise InputError, ending in `cure`, if text is a column of numbers with other cells."""
    if data.names is None or data.ordered or data.offsets is not None:
        return  # lists of text are tokens, many of which may be numbers
    place = find_bad_cell(data.names, data.values)
    if place is not None:
        raise not_a_number_error(column, *cell_at(data, place), cure)


def cell_at(data: ColumnData, place: int) -> tuple[int, str]:
    """Return the row and the text of a cell of a category column, given its place."""
    assert data.names is not None
    cell = data.names[int(data.values.reshape(-1)[place])]
    element = place // math.prod(data.row_shape)
    return element if data.offsets is None else row_of(data.offsets, element), cell


def missing_value_error(column: str, row: int) -> InputError:
    return InputError(
        f"column {column!r} has a missing value in row {row}: fill it, drop the row, or leave the "
        "column out with columns=[...] (only a column of floats keeps it, as NaN)"
    )


def is_missing(item: object) -> bool:
    """Return whether a Python value stands for a missing value: None, or pandas' NA."""
    return item is None or type(item).__name__ == "NAType"


def check_complete(column: str, data: ColumnData) -> ColumnData:
    """Return `data`, a whole column; raise InputError if it lacks values and has no floats."""
    if data.absent is not None:
        raise missing_value_error(column, data.absent)
    return data


def to_storage(column: str, value: Any) -> tuple[Array, str]:
    """Return `value` as an array, without a copy if possible, and its logical type.

    The type is ``"text"`` for strings and ``"object"`` for objects, to be examined one by one.
    """
    if isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value):
        if value.dtype.kind != "f":
            raise missing_value_error(column, int(np.argwhere(np.ma.getmaskarray(value))[0][0]))
        value = value.filled(np.nan)
    try:
        array, dtype = _to_array(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise InputError(
            f"column {column!r}: {type(value).__name__} cannot become an array: {error}"
        ) from None
    if array.dtype.kind in "UST":
        return array, "text"
    if array.dtype.kind == "O":
        return array, "object"
    return (array, dtype) if dtype else to_logical_dtype(array, column)


def copy_value(value: Any) -> Any:
    """Return a row's value, copied if a generator may reuse its memory before it is written."""
    if type(value) in _CONSTANT:
        return value
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, (list, tuple)):  # the first element tells the kind of all of them
        plain = not value or type(value[0]) in _CONSTANT
        return list(value) if plain else [copy_value(item) for item in value]
    try:
        if is_picture(value):
            return np.array(turn_upright(value))
        if _is_torch(value):
            return value.detach().clone()
        if isinstance(value, np.generic) or not _is_array(value):
            return value
        value = _open_dlpack(value)
        return value.clone() if _is_torch(value) else np.array(value)
    except Exception:  # the same is raised, with the column's name, when the value is stored
        return value


def check_codes(column: str, data: ColumnData, first_row: int = 0) -> Array:
    """Return the codes of a category column; raise InputError for a code without a name."""
    codes, count = data.values, len(data.names or ())
    if not codes.size or (codes.min() >= 0 and codes.max() < count):
        return codes
    wrong = (codes < 0) | (codes >= count)
    place, code = int(np.argwhere(wrong)[0][0]), int(codes[wrong][0])
    row = first_row + (place if data.offsets is None else row_of(data.offsets, place))
    if code < 0:  # -1 in unlabelled test data; as an index, it would be the last class
        raise missing_value_error(column, row)
    raise InputError(
        f"column {column!r} has the class {code} in row {row}, but the {count} class names are "
        f"for 0 to {count - 1}: correct the code, or name all classes"
    )


def add_classes(
    column: str, data: ColumnData, classes: Sequence[str], first_row: int
) -> ColumnData:
    """Return codes as a column of these classes; raise InputError for a code without a class."""
    named = ColumnData(data.values, data.dtype, data.offsets, classes, ordered=True)
    check_codes(column, named, first_row)
    return named


def merge_codes(column: str, data: ColumnData, names: dict[str, int], first_row: int) -> Array:
    """Return a chunk's codes in the numbers of all chunks' `names`, to which its own are added."""
    table = [names.setdefault(name, len(names)) for name in data.names or ()]
    return np.array(table, np.int64)[check_codes(column, data, first_row)]


def concatenate(column: str, parts: Sequence[ColumnData]) -> ColumnData:
    if len(parts) == 1:
        return parts[0]
    names: dict[str, int] | None = None if parts[0].names is None else {}
    if any((part.names is None) != (names is None) for part in parts):
        raise InputError(f"column {column!r} mixes strings and numbers: make all of them one kind")
    values, lengths, rows, dtype = [], [], 0, parts[0].dtype
    ragged = any(part.offsets is not None for part in parts)
    parts = [part.as_ragged() for part in parts] if ragged else parts
    filled = [part for part in parts if len(part.values)]  # empty lists have no shape
    shape = (filled or parts)[0].row_shape
    for part in parts:
        dtype = promote_dtypes(column, dtype, part.dtype)
        codes = part.values
        if part.row_shape != shape and not ragged:
            raise InputError(
                f"column {column!r} has rows of different shapes: give all rows the same shape"
            )
        if part.row_shape != shape and len(part.values):
            raise InputError(
                f"column {column!r}: rows may differ only in the length of their first "
                f"dimension, but after row {rows} they have a different shape"
            )
        if names is not None:
            codes = merge_codes(column, part, names, rows)
        if len(codes) or not filled:
            values.append((codes, part.dtype))
        rows += part.rows
        if part.offsets is not None:
            lengths.append(np.diff(part.offsets))
    return ColumnData(
        np.concatenate([convert(array, kind, dtype, column) for array, kind in values]),
        dtype,
        offsets_of(np.concatenate(lengths)) if ragged else None,
        None if names is None else list(names),
        parts[0].ordered,
        binary=parts[0].binary,
    )


def promote_dtypes(column: str, dtype: str, *others: str) -> str:
    for other in others:
        wider = promote(dtype, other)
        if wider is None:
            raise InputError(f"column {column!r} mixes {dtype} and {other}: convert it to one type")
        dtype = wider
    return dtype


def final_names(data: ColumnData) -> tuple[tuple[str, ...], Array | None]:
    """Return a category column's names, sorted unless declared, and a table of its new codes."""
    assert data.names is not None
    if data.ordered:
        return tuple(data.names), None
    used = np.zeros(len(data.names), bool)
    for start in range(0, len(data.values), 1 << 20):  # in pieces, because it may be memory-mapped
        used[data.values[start : start + (1 << 20)]] = True
    names = sorted(name for name, is_used in zip(data.names, used, strict=True) if is_used)
    new_codes = {name: code for code, name in enumerate(names)}
    return tuple(names), np.array([new_codes.get(name, -1) for name in data.names], np.int64)


def offsets_of(lengths: Array) -> Array:
    """Return the offsets of rows with these lengths: int64 of shape (rows + 1,), starting at 0."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


_CONSTANT = frozenset({int, float, bool, complex, str, bytes, type(None)})


def _is_array(item: Any) -> bool:
    # Look up __array_interface__ on the type: on a PIL image, the lookup would build the array.
    kind = type(item)
    return any(hasattr(kind, f"__{name}__") for name in ("array", "dlpack", "array_interface"))


def _is_torch(item: Any) -> bool:
    return hasattr(item, "detach") and type(item).__module__.partition(".")[0] == "torch"


def _is_sequence(item: Any) -> bool:
    return isinstance(item, (list, tuple)) or (_is_array(item) and np.ndim(item) > 0)


def _text_array(column: str, array: Array) -> ColumnData:
    if array.dtype.kind == "S":
        try:
            array = np.char.decode(array, "utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"column {column!r} has bytes that are not text: {error}") from None
    if array.dtype.kind == "T":
        data = from_text(column, array.ravel().tolist())
        return replace(data, values=data.values.reshape(array.shape))
    names, codes = np.unique(array, return_inverse=True)
    return ColumnData(codes.reshape(array.shape).astype(np.int64), "int64", None, names.tolist())


def _object_rows(column: str, array: Array, first_row: int) -> ColumnData:
    """Make a column of fixed shape from an object array of rows: numbers or strings."""
    items: list[Any] = array.ravel().tolist()
    if not items:
        return ColumnData(np.zeros(array.shape), "float64")
    width = math.prod(array.shape[1:])
    first = next((item for item in items if not is_missing(item)), None)
    if _is_sequence(first):
        raise InputError(
            f"column {column!r} is an array of {type(first).__name__}: give a list of rows"
        )
    text = isinstance(first, str)
    for place, item in enumerate(items):
        if isinstance(item, str) != text and not is_missing(item):
            if text and item != item:  # pandas' None
                raise missing_value_error(column, first_row + place // width)
            raise _mixed_kinds_error(column, items, first_row, width)
    offsets = np.arange(len(array) + 1, dtype=np.int64) * width
    data = _from_elements(column, items, first_row, offsets)
    return replace(data, values=data.values.reshape(array.shape))


def _from_scalars(column: str, items: Sequence[Any], first_row: int = 0) -> ColumnData:
    """Make a column from numbers, 0-d arrays and tensors; mixed kinds are promoted."""
    if _is_array(items[0]) and not isinstance(items[0], np.generic):
        if any(map(is_missing, items)):
            return _fill_missing(column, items, first_row)
        return _stack(column, [to_storage(column, item) for item in items])
    try:
        array = np.asarray(items)
    except (ValueError, TypeError) as error:
        raise InputError(f"column {column!r}: rows of different kinds ({error})") from None
    if array.dtype.kind in "Ouf" and all(isinstance(item, int) for item in items):
        raise InputError(
            f"column {column!r} has integers too large for int64: give floats, or a NumPy array"
        )
    if array.ndim == 1 and array.dtype.kind in "biufc":
        return from_array(column, array)
    if any(isinstance(item, str) for item in items):
        raise _mixed_kinds_error(column, items, first_row)
    if any(map(is_missing, items)):
        return _fill_missing(column, items, first_row)
    for row, item in enumerate(items, first_row):
        if isinstance(item, bytes):
            raise _unlike_row_error(column, row, item, "numbers")
    if array.ndim != 1:
        raise InputError(f"column {column!r} mixes numbers and sequences: make all rows alike")
    if array.dtype.kind in "OMm":
        name = type(items[0]).__name__
        raise InputError(
            f"column {column!r} has values of type {name}: convert them to numbers or strings, or "
            "leave the column out with columns=[...]"
        )
    return from_array(column, array)


def _fill_missing(column: str, items: Sequence[Any], first_row: int) -> ColumnData:
    """Make a column from numbers with missing values: NaN among floats, otherwise an error.

    A later chunk may have floats, so `check_complete` raises the error after the last chunk.
    """
    present = np.array([not is_missing(item) for item in items])
    row = first_row + int(present.argmin())
    if not present.any():
        return ColumnData(np.full(len(items), np.nan), "float64", absent=row)
    data = _from_scalars(column, [item for item in items if not is_missing(item)])
    if data.row_shape or not data.dtype.startswith(("float", "int", "uint")):
        raise missing_value_error(column, row)
    floats = data.dtype.startswith("float")
    values = np.full(len(items), np.nan, data.values.dtype if floats else np.float64)
    values[present] = data.values
    return ColumnData(values, values.dtype.name, absent=None if floats else row)


def _unlike_row_error(column: str, row: int, item: Any, others: str) -> InputError:
    """Return the error for a row of a different kind than the rows before it."""
    if is_missing(item):
        return missing_value_error(column, row)
    if isinstance(item, (bytes, bytearray)):
        return InputError(
            f"column {column!r}, row {row} is bytes: decode it to a string, or leave the column "
            "out with columns=[...]"
        )
    return InputError(
        f"column {column!r}, row {row} is {type(item).__name__}, but others are {others}: make all "
        "rows alike"
    )


def _mixed_kinds_error(
    column: str, items: Sequence[Any], first_row: int = 0, width: int = 1
) -> InputError:
    """Return the error for a column that mixes numbers and strings, `width` items in each row."""
    stray = _find_stray(items)
    if stray is not None:
        return not_a_number_error(column, first_row + stray // width, items[stray], mixed=True)
    text = isinstance(items[0], str)
    unlike = next(at for at, item in enumerate(items) if isinstance(item, str) != text)
    others = "strings" if text else "numbers"
    return _unlike_row_error(column, first_row + unlike // width, items[unlike], others)


def _find_stray(items: Sequence[Any]) -> int | None:
    """Return the place of the first string that is not a number, if most items are numbers."""
    texts = [place for place, item in enumerate(items) if isinstance(item, str)]
    strays = [place for place in texts if not is_number(items[place])] or texts
    return strays[0] if 0 < 2 * len(strays) < len(items) else None


def _array_rows(column: str, items: Sequence[Any], first_row: int) -> ColumnData:
    """Make a column from array rows: stacked if all shapes are equal, otherwise ragged."""
    _require_sequences(column, items, first_row, "arrays")
    if any(isinstance(item, (list, tuple)) for item in items):
        return _from_ragged(column, items, first_row)
    stored = [to_storage(column, item) for item in items]
    if any(array.shape != stored[0][0].shape for array, _ in stored):
        return _from_ragged(column, items, first_row)
    return _stack(column, stored, first_row)


def _stack(column: str, stored: Sequence[tuple[Array, str]], first_row: int = 0) -> ColumnData:
    kinds = {dtype for _, dtype in stored}
    if any(array.shape != stored[0][0].shape for array, _ in stored):
        raise InputError(f"column {column!r} mixes numbers and arrays: make all rows alike")
    if kinds & {"text", "object"}:
        return from_array(column, np.stack([array for array, _ in stored]), first_row)
    dtype = promote_dtypes(column, *sorted(kinds))
    return ColumnData(
        np.stack([convert(array, kind, dtype, column) for array, kind in stored]), dtype
    )


def _from_ragged(column: str, items: Sequence[Any], first_row: int = 0) -> ColumnData:
    _require_sequences(column, items, first_row, "sequences")
    lengths = np.array([len(item) for item in items], np.int64)
    offsets = offsets_of(lengths)
    if all(isinstance(item, (list, tuple)) for item in items):
        flat = list(chain.from_iterable(items))
        empty = ColumnData(np.zeros(0), "float64")
        data = _from_elements(column, flat, first_row, offsets) if flat else empty
    else:
        data = _joined_rows(column, items, first_row)
    assert len(data.values) == offsets[-1], column
    return ColumnData(data.values, data.dtype, offsets, data.names)


def _require_sequences(column: str, items: Sequence[Any], first_row: int, kind: str) -> None:
    for row, item in enumerate(items, first_row):
        if not _is_sequence(item):
            raise _unlike_row_error(column, row, item, kind)


def row_of(offsets: Array, place: int) -> int:
    return int(np.searchsorted(offsets, place, side="right")) - 1


def _joined_rows(column: str, items: Sequence[Any], first_row: int) -> ColumnData:
    """Join the elements of all rows, some of which are arrays, into one column."""
    parts = []
    for row, item in enumerate(items, first_row):
        if not isinstance(item, (list, tuple)):
            part = from_array(column, item).as_fixed()
            if part is None:
                raise too_ragged_error(column, row)
            parts.append(part)
        elif item:  # an empty list has no element type; an empty array has one
            parts.append(_from_elements(column, item, row, None))
    shapes = {part.row_shape for part in parts}
    if len(shapes) > 1:
        raise InputError(
            f"column {column!r}: rows may differ only in their first dimension; after it they have "
            f"shapes {sorted(shapes)}"
        )
    return concatenate(column, parts)


def _from_elements(
    column: str, items: Sequence[Any], first_row: int, offsets: Array | None
) -> ColumnData:
    """Make a column from elements of rows; without `offsets`, all are of `first_row`."""
    try:
        data = _all_elements(column, items)
        if data is not None:
            return check_complete(column, data)
    except InputError:
        if not any(map(_lacks_value, items)):
            raise
    lacking = next((place for place, item in enumerate(items) if _lacks_value(item)), None)
    unlike = (place for place, item in enumerate(items) if _shape(item) != _shape(items[0]))
    place = next(unlike, 0) if lacking is None else lacking
    row = first_row + (0 if offsets is None else row_of(offsets, place))
    raise too_ragged_error(column, row) if lacking is None else missing_value_error(column, row)


def _lacks_value(item: Any) -> bool:
    return is_missing(item) or (isinstance(item, (list, tuple)) and any(map(_lacks_value, item)))


def _all_elements(column: str, items: Sequence[Any]) -> ColumnData | None:
    """Make a column with one row per element; return None if the elements' shapes differ."""
    if not isinstance(items[0], (list, tuple)):
        return from_rows(column, items).as_fixed()
    try:
        array = np.asarray(items)
    except ValueError:
        return None
    return from_array(column, array)


def _shape(item: Any) -> tuple[int, ...] | None:
    try:
        return tuple(np.shape(item))
    except (ValueError, TypeError, RuntimeError):  # a ragged list, or a list of GPU tensors
        return None


def too_ragged_error(column: str, row: int) -> InputError:
    return InputError(
        f"column {column!r} is ragged in more than one dimension: only the first may vary, but "
        f"row {row} has parts of other lengths: give each part its own column (make each row a "
        'mapping, such as {"a": ..., "b": ...}), or pad the parts'
    )


def _to_array(value: Any) -> tuple[Array, str]:
    """Return an array, and ``"bfloat16"`` if it holds bfloat16 as another dtype, else ``""``."""
    if isinstance(value, np.ndarray):
        return value if type(value) is np.memmap else np.asarray(value), ""
    if is_picture(value):
        return np.asarray(turn_upright(value)), ""
    value = _open_dlpack(value)
    if not _is_torch(value):
        return np.asarray(value), ""
    tensor = value.detach().cpu().resolve_conj().resolve_neg()
    if str(tensor.dtype) != "torch.bfloat16":
        return tensor.numpy(), ""
    return tensor.view(sys.modules["torch"].int16).numpy().view(np.uint16), "bfloat16"


def _open_dlpack(value: Any) -> Any:
    """Return what has only ``__dlpack__`` as an array, or as a tensor if NumPy cannot read it."""
    if not hasattr(value, "__dlpack__") or hasattr(value, "__array__"):
        return value
    try:
        return np.from_dlpack(value)
    except (BufferError, RuntimeError, TypeError):  # bfloat16, or in device memory
        if "torch" not in sys.modules:
            raise
        return sys.modules["torch"].from_dlpack(value)
