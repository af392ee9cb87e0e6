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
    column = random.integers(0, 1000, shape, np.int16)
    rows = random.integers(0, len(column), 90).astype(np.uint32)
    out = np.zeros((len(rows), *shape[1:]), column.dtype)
    arguments = (out.ctypes.data, column.ctypes.data, column.strides[0], rows.ctypes.data)
    gather(*arguments, 0)
    assert not out.any()
    gather(*arguments, len(rows))
    np.testing.assert_array_equal(out, column[rows])


def test_what_the_core_refuses_is_said(gather: Any) -> None:
    with pytest.raises(RuntimeError, match="larger than a kernel supports"):
        gather(0, 0, 2**40, 0, 1)
