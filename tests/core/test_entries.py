"""Whether a namespace has the same objects."""

from __future__ import annotations

import types
from collections import ChainMap

import pytest

import cerebro._core as _core


class Same:
    def __eq__(self, other):
        return True

    __hash__ = None


@pytest.mark.parametrize("kind", [lambda d: d, lambda d: types.MappingProxyType(d), ChainMap])
def test_entries_are_compared_by_identity(kind):
    one, two = Same(), Same()
    names = {"a": one, "b": two, "c": 3}
    given = kind(names)
    assert _core.has_entries(given, ("a", "b"), (one, two))
    assert _core.has_entries(given, (), ())
    assert not _core.has_entries(given, ("a", "b"), (one, one))
    assert not _core.has_entries(given, ("a", "missing"), (one, two))
    names["b"] = one
    assert not _core.has_entries(given, ("a", "b"), (one, two))
    del names["a"]
    assert not _core.has_entries(given, ("a",), (one,))


def test_lookup_and_argument_errors_are_raised():
    class Broken(dict):
        def __getitem__(self, key):
            raise OSError(key)

    with pytest.raises(OSError, match="a"):
        _core.has_entries(Broken(), ("a",), (1,))
    with pytest.raises(TypeError):
        _core.has_entries({}, ([],), (1,))
    with pytest.raises(TypeError):
        _core.has_entries({}, ["a"], (1,))
    with pytest.raises(ValueError, match="a value for each key"):
        _core.has_entries({}, ("a",), ())
