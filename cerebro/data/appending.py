"""Append values to the temporary files in which columns are gathered."""

from __future__ import annotations

from io import FileIO
from pathlib import Path

import numpy as np

from cerebro.data.dtypes import Array


def append(file: FileIO, path: Path, values: Array) -> None:
    """Append values to an unbuffered file; an OSError names the file and what to do."""
    # `ndarray.tofile` would report a full disk without its cause and the file's name.
    remaining = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
    try:
        while remaining:  # a write may store only a part
            remaining = remaining[file.write(remaining) :]
    except OSError as error:
        raise OSError(
            error.errno,
            f"cannot write {path}, a temporary copy of a column: {error.strerror}: free some space "
            "there, choose another path, or leave columns out",
        ) from None
