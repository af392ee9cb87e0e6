"""The kernel that gathers rows, over host memory; tests/gpu runs it on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

kernels = pytest.importorskip(
    "benchmarks.gather_kernel", reason="the benchmarks, which have this kernel, are not here"
)


@pytest.fixture(scope="module")
def gather(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder: Path = tmp_path_factory.mktemp("gather")
    return kernels.GatherKernel(kernels.build(folder, "-O0"))


@pytest.mark.parametrize("shape", [(50,), (50, 3), (50, 64), (7, 5000)])
def test_rows_are_copied(gather: Any, shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(1)
    columns = [aligned(random.integers(0, 1000, shape, np.int16)) for _ in range(3)]
    rows = random.integers(0, len(columns[0]), 90)
    parts = random.integers(0, len(columns), 90)
    places = np.stack([rows, parts], axis=1).astype(np.uint32)
    table = np.array(kernels.part_table([column.ctypes.data for column in columns]), np.uint64)
    out = np.zeros((len(rows), *shape[1:]), np.int16)
    arguments = (out.ctypes.data, table.ctypes.data, columns[0].strides[0], places.ctypes.data)
    gather(*arguments, 0)
    assert not out.any()
    gather(*arguments, len(rows))
    wanted = [columns[part][row] for row, part in zip(rows, parts, strict=True)]
    np.testing.assert_array_equal(out, np.array(wanted))


def aligned(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same array at a multiple of 64."""
    memory = np.zeros(array.nbytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def test_oversized_rows_are_refused(gather: Any) -> None:
    with pytest.raises(RuntimeError, match="larger than a kernel supports"):
        gather(0, 0, 2**40, 0, 1)
