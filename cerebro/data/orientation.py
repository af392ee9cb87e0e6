"""Turn images as their EXIF orientation says; cameras store it with pixels that are not turned."""

from __future__ import annotations

import sys
from typing import Any

_TAG = 0x0112

_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""Pillow's operation for each orientation; 1 is upright."""


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
