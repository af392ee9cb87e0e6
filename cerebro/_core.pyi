"""What the C module ``cerebro._core`` offers; its docstrings say the rest.

Private: everything here may change. Arrays at the edges are NumPy's, and dtypes
go by the names of ``csrc/core/dtype.h`` ("float32", "bfloat16", ...).
"""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray
from typing_extensions import Buffer

_Path: TypeAlias = str | PathLike[str]
_Array: TypeAlias = NDArray[Any]

# --- random streams and hashes ------------------------------------------------

def trial_seed(seed: int, trial: int) -> int: ...
def visit_order(trial: int, epoch: int, shards: int, *, stagger: bool = True) -> list[int]: ...
def permutation(
    n: int, seed: int, use: Literal["rows", "write", "split"], a: int = 0, b: int = 0
) -> NDArray[np.uint32]: ...
def random_doubles(
    n: int, seed: int, use: Literal["space", "eval"], a: int = 0, b: int = 0
) -> list[float]: ...
def xxh3_64(buffer: Buffer, /) -> str: ...
def xxh3_128(buffer: Buffer, /) -> str: ...

# --- shards and files ---------------------------------------------------------

class ShardReader:
    """One shard, mapped read-only and checked against its manifest.

    Sizes, ``.npy`` headers and ragged offsets are checked here, bytes by
    :meth:`hashes`. Raises ``OSError`` or ``CorruptDataError`` naming the file.
    """

    def __new__(
        cls,
        directory: _Path,
        rows: int,
        columns: Sequence[tuple[str, str, Sequence[int], bool, dict[str, int]]],
    ) -> ShardReader: ...
    @property
    def rows(self) -> int: ...
    @property
    def directory(self) -> str: ...
    @property
    def column_names(self) -> tuple[str, ...]: ...
    def column(self, name: str, /) -> _Array: ...
    def ragged(self, name: str, /) -> tuple[_Array, NDArray[np.int64]]: ...
    def hashes(self) -> dict[str, str]: ...

class NpyWriter:
    """Streams rows into one new ``.npy`` file and hashes on the way.

    A writer that fails, is aborted or is forgotten removes its file again.
    """

    def __new__(
        cls, path: _Path, dtype: str, row_shape: Sequence[int], rows: int
    ) -> NpyWriter: ...
    def write(self, array: ArrayLike, /) -> None: ...
    def close(self) -> tuple[int, str]: ...
    def abort(self) -> None: ...

def fsync_directory(path: _Path, /) -> None: ...
def replace_file(path: _Path, data: Buffer) -> None: ...
