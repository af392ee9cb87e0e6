"""Convert nested mappings to flat ones, and to JSON that other programs can read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any


def flatten(mapping: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings into one dictionary; dots join the keys."""
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = value
    return flat


def strict_json(value: Any) -> str:
    """Return a value as indented JSON; paths and other objects that JSON lacks become strings."""
    return json.dumps(_to_plain(value), indent=2, ensure_ascii=False, allow_nan=False)


def _to_plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(name): _to_plain(part) for name, part in value.items()}
    if isinstance(value, (list, tuple, set)):
        return [_to_plain(part) for part in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)
