"""Pieces of memory that are saved, restored and compared at once."""

from __future__ import annotations

import numpy as np
import pytest

import cerebro._core as _core


def regions(*arrays):
    return _core.Regions([(array.ctypes.data, array.nbytes) for array in arrays])


def test_regions_are_saved_restored_and_compared():
    one, two = np.arange(5, dtype=np.uint8), np.arange(3, dtype=np.float32)
    both = regions(one, np.zeros(0), two)
    assert both.nbytes == 17
    buffer = bytearray(17)
    both.save(buffer)
    assert bytes(buffer) == one.tobytes() + two.tobytes()
    assert both.differing(buffer) is None and both.differing(bytes(buffer), buffer) is None
    two[2] = 9
    assert both.differing(buffer) == 2
    one[4] = 9
    assert both.differing(buffer) == 0
    other = np.empty(17, np.uint8)
    both.save(other)
    assert both.differing(other) is None and both.differing(buffer, other) == 0
    both.restore(bytes(buffer))
    assert one.tolist() == [0, 1, 2, 3, 4] and two.tolist() == [0, 1, 2]


def test_large_regions():
    one = np.random.default_rng(1).integers(0, 256, 3 << 20, np.uint8)
    all_of_it, buffer = regions(one), np.empty(3 << 20, np.uint8)
    all_of_it.save(buffer)
    assert all_of_it.differing(buffer) is None and all_of_it.differing(buffer, buffer) is None
    one[-1] ^= 1
    assert all_of_it.differing(buffer) == 0
    all_of_it.restore(buffer)
    assert np.array_equal(one, buffer)


def test_no_regions():
    none = _core.Regions([])
    assert none.nbytes == 0 and none.differing(b"") is None and none.differing(b"", b"") is None
    none.save(bytearray())
    none.restore(b"")


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (3, TypeError, "regions must be a list of tuples"),
        ([3], TypeError, "a region must be a tuple"),
        ([(64,)], TypeError, "takes exactly 2 arguments"),
        ([(64, -1)], ValueError, "a region's size is negative"),
        ([(0, 1)], ValueError, "region 0 has no address"),
        ([(64, 2**63 - 1)] * 3, ValueError, "the regions are too large"),
    ],
)
def test_wrong_regions_are_refused(given, error, words):
    with pytest.raises(error, match=words):
        _core.Regions(given)


def test_wrong_buffers_are_refused():
    four = regions(np.zeros(4, np.uint8))
    for use in (four.save, four.restore, four.differing):
        with pytest.raises(ValueError, match="the buffer has 5 bytes, the regions 4"):
            use(bytearray(5))
        with pytest.raises(TypeError):
            use(3)
    with pytest.raises(ValueError, match="the buffer has 3 bytes"):
        four.differing(bytes(4), bytes(3))
    with pytest.raises(BufferError):
        four.save(bytes(4))
