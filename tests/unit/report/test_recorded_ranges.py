"""The range of each setting of a recorded space."""

from __future__ import annotations

import pytest

from cerebro.report.format import Range
from cerebro.results.saved_run import ranges_of
from cerebro.space import Space, as_space

tune = pytest.importorskip("ray.tune")


@pytest.mark.parametrize(
    ("dimension", "expected"),
    [
        (tune.qlograndint(10, 1000, 10), Range(10, 1000, is_log=True)),
        (tune.qrandint(10, 50, 10), Range(10, 50)),
        (tune.qloguniform(1, 100, 0.5), Range(1.0, 100.0, is_log=True)),
        (tune.lograndint(1, 9), Range(1, 8, is_log=True)),
    ],
)
def test_the_range_of_quantized_numbers_is_that_of_their_values(
    dimension: object, expected: Range
) -> None:
    recorded = as_space({"n": dimension}).to_json()
    assert ranges_of(Space.from_json(recorded)) == {"n": expected}
