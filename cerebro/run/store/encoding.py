"""Encode values for the store: as JSON, with tagged objects for values that JSON lacks."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from cerebro.errors import InputError, one_line
from cerebro.run.records import NOTHING_RAISED, Raised


def encode(value: Any) -> str:
    """Return JSON in which tuples and non-finite numbers are tagged: {"$float": "nan"}."""
    return _ENCODER.encode(_add_tags(value))


def decode(text: str) -> Any:
    """Return the value that was passed to `encode`."""
    return _DECODER.decode(text)


def _add_tags(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": repr(value)}
    if isinstance(value, dict):
        return {str(key): _add_tags(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return {"$tuple": [_add_tags(item) for item in value]}
    if isinstance(value, list):
        return [_add_tags(item) for item in value]
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    if hasattr(value, "item"):  # NumPy scalars
        return _add_tags(value.item())
    raise InputError(f"cannot record {value!r} in the run store: it is not a JSON value")


def _remove_tags(value: dict[str, Any]) -> Any:
    if len(value) == 1 and "$float" in value:
        return float(value["$float"])
    if len(value) == 1 and "$tuple" in value:
        return tuple(value["$tuple"])
    # The configurations of many trials have the same names.
    return {sys.intern(key): item for key, item in value.items()}


def encode_raised(raised: Raised) -> str | None:
    if not raised.bases:
        return None
    return encode({"bases": list(raised.bases), "place": raised.place})


def decode_raised(text: str | None) -> Raised:
    """Return the exception that `encode_raised` encoded; raise TypeError for invalid text."""
    if text is None:
        return NOTHING_RAISED
    fields = decode(text)
    bases, place = fields["bases"], fields["place"]
    if not isinstance(bases, list) or not all(isinstance(name, str) for name in (*bases, place)):
        raise TypeError(f"the column raised has the invalid value {one_line(text, 100)}")
    return Raised(tuple(map(sys.intern, bases)), place)


_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
_DECODER = json.JSONDecoder(object_hook=_remove_tags)


def escape_surrogates(value: Any) -> Any:
    """Escape lone surrogates, which paths and errors may contain but UTF-8 cannot encode."""
    if not isinstance(value, str) or value.isascii():
        return value
    return value.encode("utf-8", "backslashreplace").decode("utf-8")
