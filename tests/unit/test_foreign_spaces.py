"""Spaces of other libraries: the same values, bounds above all, or refused by name."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from cerebro.errors import InputError
from cerebro.space import Space, choice, integer, loguniform, normal, uniform


def dimension(value: Any) -> Any:
    (found,) = Space({"x": value}).dimensions.values()
    return found


def equal(mine: Any) -> Any:
    return dimension(mine)


def test_tune_dimensions_have_the_same_bounds() -> None:
    tune = pytest.importorskip("ray.tune")
    for theirs, ours in [
        (tune.uniform(0.1, 0.9), uniform(0.1, 0.9)),
        (tune.loguniform(1e-4, 1e-1), loguniform(1e-4, 1e-1)),
        (tune.quniform(0.0, 1.0, 0.25), uniform(0.0, 1.0, step=0.25)),
        (tune.randint(1, 5), integer(1, 4)),  # the upper end is not theirs
        (tune.qrandint(2, 10, 2), integer(2, 10, step=2)),  # but here it is
        (tune.qrandint(3, 9, 2), integer(4, 8, step=2)),
        (tune.qrandint(2, 10, 1), integer(2, 9)),
        (tune.lograndint(1, 10), integer(1, 9, log=True)),
        (tune.qlograndint(2, 10, 1), integer(2, 9, log=True)),
        (tune.randn(1.0, 2.0), normal(1.0, 2.0)),
        (tune.choice(["a", "b"]), choice(["a", "b"])),
        (tune.grid_search([1, 2]), choice([1, 2])),
    ]:
        assert dimension(theirs) == equal(ours), theirs


@pytest.mark.parametrize(("low", "high", "q"), [(1, 6, None), (0, 9, 3), (2, 9, 3), (5, 8, 1)])
def test_tune_integers_draw_the_values_that_tune_draws(low: int, high: int, q: int | None) -> None:
    """By drawing from Tune itself, so that another version's idea of bounds is noticed."""
    tune = pytest.importorskip("ray.tune")
    theirs = tune.randint(low, high) if q is None else tune.qrandint(low, high, q)
    seen = {int(value) for value in theirs.sample(size=500)}
    assert set(dimension(theirs).values()) == seen


def test_tune_dimensions_without_an_equal_are_refused_by_name() -> None:
    tune = pytest.importorskip("ray.tune")
    for value, message in [
        (tune.sample_from(lambda spec: 1), "a.lr: tune.sample_from has no equal"),
        (tune.qloguniform(1e-4, 1e-1, 1e-4), "a.lr: tune's quantised log-uniform"),
        (tune.qlograndint(2, 10, 2), "a.lr: tune.qlograndint has no equal"),
        (tune.qrandn(0, 1, 0.2), "a.lr: tune's quantised normal"),
    ]:
        with pytest.raises(InputError, match=message):
            Space({"a": {"lr": value}})


def test_optuna_distributions_have_the_same_bounds() -> None:
    kinds = pytest.importorskip("optuna").distributions
    for theirs, ours in [
        (kinds.FloatDistribution(0.0, 1.0), uniform(0.0, 1.0)),
        (kinds.FloatDistribution(0.0, 1.0, step=0.1), uniform(0.0, 1.0, step=0.1)),
        (kinds.FloatDistribution(1e-4, 1e-1, log=True), loguniform(1e-4, 1e-1)),
        (kinds.IntDistribution(1, 8), integer(1, 8)),
        (kinds.IntDistribution(1, 9, step=2), integer(1, 9, step=2)),
        (kinds.IntDistribution(1, 64, log=True), integer(1, 64, log=True)),
        (kinds.CategoricalDistribution(["a", None, 3]), choice(["a", None, 3])),
    ]:
        assert dimension(theirs) == equal(ours), theirs


def test_scipy_distributions_have_the_same_bounds() -> None:
    stats = pytest.importorskip("scipy.stats")
    for theirs, ours in [
        (stats.uniform(2, 3), uniform(2, 5)),
        (stats.uniform(loc=-1, scale=2), uniform(-1, 1)),
        (stats.loguniform(1e-4, 1e-1), loguniform(1e-4, 1e-1)),
        (stats.reciprocal(a=1.0, b=10.0), loguniform(1.0, 10.0)),
        (stats.norm(1, 0.5), normal(1, 0.5)),
        (stats.randint(1, 5), integer(1, 4)),
    ]:
        assert dimension(theirs) == equal(ours), theirs.dist.name


def test_scipy_distributions_without_an_equal_are_refused_by_name() -> None:
    stats = pytest.importorskip("scipy.stats")
    with pytest.raises(InputError, match=r"lr: scipy\.stats\.expon has no equal"):
        Space({"lr": stats.expon(scale=0.1)})
    with pytest.raises(InputError, match=r"lr: scipy\.stats\.loguniform with loc=1"):
        Space({"lr": stats.loguniform(1e-4, 1e-1, loc=1)})


def test_a_translated_space_is_stored_like_one_of_ours() -> None:
    kinds = pytest.importorskip("optuna").distributions
    space = Space({"n": {"lr": kinds.FloatDistribution(1e-4, 1e-1, log=True)}})
    assert Space.from_json(space.to_json()).sample(1, 2) == space.sample(1, 2)


def test_none_of_the_libraries_is_imported() -> None:
    code = (
        "import sys, cerebro; cerebro.Space({'x': [1, 2], 'y': cerebro.uniform(0, 1)})\n"
        "found = {'ray', 'optuna', 'scipy'} & set(sys.modules); assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
