"""`_core.gather_rows` over host memory; tests/gpu runs it on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cerebro import _core


def gather(column: np.ndarray, rows: np.ndarray, **changes: Any) -> np.ndarray:
    out = np.zeros((len(rows), *column.shape[1:]), column.dtype)
    arguments: dict[str, Any] = {
        "device": _core.Device("cpu"),
        "dst": out.ctypes.data,
        "src": column.ctypes.data,
        "row_bytes": column.strides[0],
        "rows": rows.ctypes.data,
        "n_rows": len(rows),
        "stream": 0,
    }
    _core.gather_rows(*(arguments | changes).values())
    return out


@pytest.mark.parametrize("shape", [(50,), (50, 3), (50, 64), (7, 5000)])
def test_rows_are_copied(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(1)
    column = random.integers(0, 1000, shape, np.int16)
    rows = random.integers(0, len(column), 90).astype(np.uint32)
    np.testing.assert_array_equal(gather(column, rows), column[rows])
    assert gather(column, rows[:0]).size == 0


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"device": "cpu"}, TypeError, "expected a Device, not str"),
        ({"row_bytes": -1}, ValueError, "row_bytes must be a whole number from 0 to 2147483647"),
        ({"n_rows": 1.5}, TypeError, "n_rows must be a whole number, not float"),
        ({"n_rows": 2**32}, ValueError, "n_rows must be a whole number from 0 to 4294967295"),
        ({"stream": None}, TypeError, "stream must be a whole number, not NoneType"),
    ],
)
def test_arguments_are_looked_at(
    changes: dict[str, Any], error: type[Exception], message: str
) -> None:
    column, rows = np.zeros((3, 4), np.float32), np.zeros(2, np.uint32)
    with pytest.raises(error, match=message):
        gather(column, rows, **changes)
