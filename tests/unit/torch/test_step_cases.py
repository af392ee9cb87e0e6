"""Random networks and data: all settings of `graph` against a plain loop. See `step_cases`."""

from __future__ import annotations

import collections

import pytest

pytest.importorskip("torch")

import step_cases

SEEDS = 300
GROUP = 30


@pytest.mark.parametrize("first", range(0, SEEDS, GROUP))
def test_every_way_of_training_matches_a_plain_loop_bit_for_bit(first):
    taken: collections.Counter[str] = collections.Counter()
    wrong = [line for seed in range(first, first + GROUP) for line in step_cases.check(seed, taken)]
    assert wrong == []
    assert taken["replayed"] > GROUP / 4  # the others are refused, or have longer updates
