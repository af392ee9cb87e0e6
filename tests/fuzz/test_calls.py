"""Each fuzzer of the binding, briefly and with the same seeds in every run."""

from __future__ import annotations

import pytest
from calls import FUZZERS, fuzz

RUNS = {"schedule": 150, "loader": 12, "slots": 150, "kills": 2}


@pytest.mark.parametrize("name", FUZZERS)
def test_random_calls_find_nothing(name: str) -> None:
    assert fuzz(name, seed=1, runs=RUNS[name]) > 0
