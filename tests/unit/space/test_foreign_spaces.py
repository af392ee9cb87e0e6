"""Spaces of other libraries: the same values, bounds above all, or refused by name."""

from __future__ import annotations

import gc
import json
import random
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from cerebro.errors import InputError
from cerebro.searchers.pbt import perturb
from cerebro.space import Space, choice, integer, loguniform, normal, uniform, when


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
        (tune.uniform(-1, 1), uniform(-1, 1)),
        (tune.quniform(0.3, 0.9, 0.1), uniform(0.3, 0.9, step=0.1)),
        (tune.randn(0.0, 0.5), normal(0.0, 0.5)),
    ]:
        assert dimension(theirs) == equal(ours), theirs


@pytest.mark.parametrize(("low", "high", "q"), [(1, 6, None), (0, 9, 3), (2, 9, 3), (5, 8, 1)])
def test_tune_integers_draw_the_values_that_tune_draws(low: int, high: int, q: int | None) -> None:
    """By drawing from Tune itself, so that another version's idea of bounds is noticed."""
    tune = pytest.importorskip("ray.tune")
    theirs = tune.randint(low, high) if q is None else tune.qrandint(low, high, q)
    seen = {int(value) for value in theirs.sample(size=500)}
    assert set(dimension(theirs).values()) == seen


@pytest.mark.parametrize(
    ("kind", "low", "high", "q"),
    [
        ("qloguniform", 0.01, 1.0, 0.01),
        ("qloguniform", 0.3, 0.7, 0.1),
        ("qlograndint", 2, 20, 2),
        ("qlograndint", 3, 50, 5),
        ("qlograndint", 1, 9, 1),
        ("quniform", -0.3, 0.3, 0.1),
    ],
)
def test_quantised_dimensions_end_where_tunes_do(
    kind: str, low: float, high: float, q: float
) -> None:
    """The first and last values that Tune itself gives, from the ends of its own generator."""
    tune = pytest.importorskip("ray.tune")
    theirs, ours = getattr(tune, kind)(low, high, q), dimension(getattr(tune, kind)(low, high, q))
    seen = [theirs.sample(random_state=Ends(at)) for at in (0.0, 1 - 2**-53)]
    assert [ours.draw(0.0), ours.draw(1 - 2**-53)] == pytest.approx(seen, rel=1e-12)
    assert [min(ours.values()), max(ours.values())] == pytest.approx(seen, rel=1e-12)
    assert type(ours.draw(0.3)) is type(theirs.sample())


class Ends(np.random.RandomState):
    """A generator that always draws the same share of what is asked for."""

    def __init__(self, share: float) -> None:
        super().__init__(0)
        self.share = share

    def uniform(self, low: Any = 0.0, high: Any = 1.0, size: Any = None) -> Any:
        return np.full(size or (), low + (high - low) * self.share)

    def randint(self, low: Any, high: Any = None, size: Any = None, dtype: Any = int) -> Any:
        return np.full(size or (), int(low + (high - low) * self.share))


def test_a_quantised_normal_is_the_nearest_multiple() -> None:
    tune = pytest.importorskip("ray.tune")
    ours = dimension(tune.qrandn(1.0, 2.0, 0.5))
    for share in (0.0, 0.1, 0.37, 0.5, 0.99):
        exact = normal(1.0, 2.0).draw(share)
        assert ours.draw(share) == 0.5 * round(exact / 0.5)
    assert ours.count() is None


def test_quantised_dimensions_survive_json() -> None:
    tune = pytest.importorskip("ray.tune")
    space = Space({"lr": tune.qloguniform(1e-3, 1e-1, 1e-3), "n": tune.qlograndint(4, 64, 4)})
    again = Space.from_json(json.loads(json.dumps(space.to_json())))
    assert [again.sample(3, t) for t in range(9)] == [space.sample(3, t) for t in range(9)]


def test_perturbed_quantised_values_stay_within_bounds() -> None:
    tune = pytest.importorskip("ray.tune")
    lr = Space({"lr": tune.qloguniform(1e-3, 1e-1, 1e-3)}).dimensions["lr"]
    assert perturb(lr, 0.1, (0.8, 1.2), up=True) == 0.1
    assert perturb(lr, 0.05, (0.8, 1.2), up=False) == pytest.approx(0.04)


def test_bounds_without_a_multiple_between_them_are_refused() -> None:
    tune = pytest.importorskip("ray.tune")
    with pytest.raises(InputError, match="n: there is no multiple of 10 from 3 to 7"):
        Space({"n": tune.qrandint(3, 7, 10)})


def test_grids_are_enumerated_by_trial_number_and_the_rest_is_drawn() -> None:
    """As many times as Tune's num_samples says, in Tune's order."""
    tune = pytest.importorskip("ray.tune")
    generate = pytest.importorskip("ray.tune.search.variant_generator").generate_variants
    mapping = {
        "net": {"width": tune.grid_search([8, 16, 32]), "depth": 2},
        "act": tune.grid_search(["relu", "tanh"]),
        "lr": tune.loguniform(1e-4, 1e-1),
    }
    theirs = [spec["config"] for _ in range(2) for _, spec in generate({"config": mapping})]
    space = Space(mapping)
    ours = [space.sample(0, trial) for trial in range(12)]
    assert [(c["act"], c["net"]) for c in ours] == [(c["act"], c["net"]) for c in theirs]
    assert len({config["lr"] for config in ours}) == 12
    assert Space.from_json(space.to_json()).sample(0, 5) == ours[5]


def test_grids_are_part_of_a_grid_search_and_of_points() -> None:
    space = Space({"a": {"grid_search": [1, 2]}, "b": [3, 4]})
    assert len(space.grid()) == 4
    assert space.complete({"a": 7}, 0, 0)["a"] == 7


def test_grids_under_different_conditions_may_share_a_name() -> None:
    space = Space(
        {
            "kind": ["a", "b"],
            "options": [
                when("kind", "a", {"m": {"grid_search": [1, 2]}}),
                when("kind", "b", {"m": {"grid_search": [3, 4, 5]}}),
            ],
        }
    )
    for trial in range(60):  # two of the six combinations were beyond the end of the first grid
        config = space.sample(0, trial)
        assert config["m"] in {"a": (1, 2), "b": (3, 4, 5)}[config["kind"]]


def test_sample_from_sees_the_rest_of_the_configuration() -> None:
    tune = pytest.importorskip("ray.tune")
    space = Space(
        {
            "twice": tune.sample_from(lambda spec: 2 * spec.config.net.width),
            "net": {"width": tune.randint(1, 100), "half": tune.sample_from(half)},
            "fourfold": tune.sample_from(lambda config: 2 * config["twice"]),
            "noise": tune.sample_from(lambda _: float(np.random.uniform()) + random.random()),
            "fixed": tune.sample_from(lambda: 7),
        }
    )
    for config in [space.sample(5, trial) for trial in range(4)]:
        width = config["net"]["width"]
        assert config["twice"] == 2 * width and config["fourfold"] == 4 * width
        assert config["net"]["half"] == width / 2 and config["fixed"] == 7
    assert space.sample(5, 1) == space.sample(5, 1)
    assert len({space.sample(5, trial)["noise"] for trial in range(4)}) == 4
    assert Space.from_json(space.to_json()).sample(5, 2) == space.sample(5, 2)


def half(spec: Any) -> float:
    return float(spec.config["net"]["width"] / 2)


def test_sample_from_leaves_the_global_generators_alone() -> None:
    tune = pytest.importorskip("ray.tune")
    space = Space({"x": tune.sample_from(lambda _: float(np.random.uniform()))})
    np.random.seed(3)
    expected = np.random.uniform()
    np.random.seed(3)
    space.sample(0, 0)
    assert np.random.uniform() == expected


def test_sample_from_that_cannot_be_honoured_is_refused_by_name() -> None:
    tune = pytest.importorskip("ray.tune")
    for function, message in [
        (lambda spec: spec.config.width, "a.lr: .* needs 'width', which the configuration"),
        (lambda spec: 1 / 0, "a.lr: .* failed: ZeroDivisionError"),
        (lambda spec: object(), "a.lr: .* cannot be stored as JSON"),
    ]:
        with pytest.raises(InputError, match=message):
            Space({"a": {"lr": tune.sample_from(function)}}).sample(0, 0)
    with pytest.raises(
        InputError, match="a is computed from other values and cannot be a condition"
    ):
        Space({"a": tune.sample_from(lambda spec: 1), "b": when("a", 1, {"c": 2})})
    stored = Space({"a": tune.sample_from(lambda spec: 1)}).to_json()  # the function is gone
    gc.collect()
    with pytest.raises(InputError, match="is not stored: rerun the script"):
        Space.from_json(stored)


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
    with pytest.raises(InputError, match=r"lr: scipy\.stats\.expon has no equivalent"):
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
