"""Grid and random search, points, and searchers by name."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from cerebro.errors import InputError
from cerebro.searchers import DONE, Decision, GridSearch, RandomSearch, Suggestion, make_searcher
from cerebro.space import Space, integer, loguniform, uniform, when

SPACE = Space({"lr": uniform(0, 1), "layers": integer(1, 4)})
GRID = Space({"a": [1, 2], "b": ["x", "y", "z"]})


def ready(searcher, space=SPACE, n_trials=5, seed=3, epochs=4, points=()):
    searcher = make_searcher(searcher)
    searcher.setup(
        space,
        seed=seed,
        epochs=epochs,
        n_trials=n_trials,
        metric="loss",
        mode="min",
        points=points,
    )
    return searcher


def drain(searcher):
    suggestions = []
    while (suggestion := searcher.suggest()) is not DONE:
        assert isinstance(suggestion, Suggestion)
        suggestions.append(suggestion)
    assert searcher.suggest() is DONE
    return suggestions


def test_random_search_is_the_space_sampled_by_trial_number():
    suggestions = drain(ready("random"))
    assert [s.config for s in suggestions] == [SPACE.sample(3, trial) for trial in range(5)]
    assert {(s.epochs, s.trial, s.parent) for s in suggestions} == {(4, None, None)}
    longer = drain(ready(RandomSearch(), n_trials=8))
    assert [s.config for s in longer[:5]] == [s.config for s in suggestions]


def test_the_dimensions_of_random_search_are_independent():
    """No dimension tells of another, and another dimension leaves a dimension's draws alone."""
    space = Space({name: uniform(0, 1) for name in "abcd"})
    draws = np.array(
        [list(s.config.values()) for s in drain(ready("random", space=space, n_trials=2000))]
    )
    correlation = np.corrcoef(draws.T) - np.eye(4)
    assert abs(correlation).max() < 4 / math.sqrt(2000)
    cells = np.histogram2d(draws[:, 0], draws[:, 1], bins=4, range=[[0, 1], [0, 1]])[0]
    assert ((cells - 125) ** 2 / 125).sum() < 37.7  # chi squared, 15 degrees of freedom, 0.1 %
    alone = drain(ready("random", space=Space({"a": uniform(0, 1)}), n_trials=50))
    assert [s.config["a"] for s in alone] == draws[:50, 0].tolist()


@pytest.mark.parametrize("name", ["random", "quasirandom"])
def test_logarithmic_bounds_are_the_values_themselves(name):
    if name == "quasirandom":
        pytest.importorskip("scipy")
    space = Space({"lr": loguniform(1e-4, 1e-1), "units": integer(1, 1000, log=True)})
    configs = [s.config for s in drain(ready(name, space=space, n_trials=1024))]
    rates = sorted(config["lr"] for config in configs)
    assert 1e-4 <= rates[0] < 1.1e-4 and 0.09 < rates[-1] <= 1e-1
    assert rates[512] == pytest.approx(10**-2.5, rel=0.3)  # as many below as above, in decades
    assert {min(c["units"] for c in configs), max(c["units"] for c in configs)} <= {
        1,
        *range(950, 1001),
    }


def test_points_come_first_and_count_as_trials():
    suggestions = drain(ready("random", points=[{"lr": 9.0}, {"lr": 0.1, "layers": 2}]))
    configs = [s.config for s in suggestions]
    assert configs[0] == {"lr": 9.0, "layers": SPACE.sample(3, 0)["layers"]}
    assert configs[1] == {"lr": 0.1, "layers": 2}
    assert configs[2:] == [SPACE.sample(3, trial) for trial in (2, 3, 4)]
    configs[1]["lr"] = None
    with pytest.raises(InputError, match="2 points"):
        ready("random", n_trials=1, points=[{}, {}])
    with pytest.raises(InputError, match="not in the space"):
        ready("random", points=[{"rl": 1}])


def test_grid_search_goes_through_the_grid():
    assert [s.config for s in drain(ready("grid", GRID, None))] == GRID.grid()
    assert [s.config for s in drain(ready("grid", GRID, 4))] == GRID.grid()[:4]
    assert len(drain(ready("grid", GRID, math.inf))) == 6
    with_points = [s.config for s in drain(ready(GridSearch, GRID, None, points=[GRID.grid()[4]]))]
    assert with_points[0] == GRID.grid()[4]
    assert len(with_points) == 6 and all(config in GRID.grid() for config in with_points)
    with pytest.raises(InputError, match="lr"):
        ready("grid")


@pytest.mark.parametrize("name", ["random", "grid"])
def test_a_search_resumes_from_its_state(name):
    whole = [s.config for s in drain(ready(name, GRID, 6, points=[{"a": 7}]))]
    searcher = ready(name, GRID, 6, points=[{"a": 7}])
    head = [searcher.suggest().config for _ in range(3)]
    again = ready(name, GRID, 6, points=[{"a": 7}])
    again.load_state_dict(json.loads(json.dumps(searcher.state_dict())))
    assert head + [s.config for s in drain(again)] == whole


def test_random_and_grid_search_continue_every_trial():
    for name in ("random", "grid"):
        searcher = ready(name, GRID)
        assert searcher.adaptive is False
        assert searcher.report(0, 0, {"loss": math.nan}) is Decision.CONTINUE


@pytest.mark.parametrize("n_trials", [0, -1, True, math.nan])
def test_n_trials_is_positive(n_trials):
    for name in ("random", "grid"):
        with pytest.raises(InputError, match="n_trials must be at least 1"):
            ready(name, GRID, n_trials)


def test_random_search_needs_an_end():
    with pytest.raises(InputError, match=r"n_trials .* or time_limit"):
        ready("random", n_trials=None)
    endless = ready("random", n_trials=math.inf)
    assert [endless.suggest().config for _ in range(50)][49] == SPACE.sample(3, 49)


def test_searchers_by_name():
    assert isinstance(make_searcher("Random"), RandomSearch)
    assert isinstance(make_searcher(GridSearch), GridSearch)
    searcher = RandomSearch()
    assert make_searcher(searcher) is searcher
    with pytest.raises(InputError, match=r"'bayes' is not known; there are 'random', 'grid'"):
        make_searcher("bayes")
    with pytest.raises(InputError, match=r"no suggest\(\) method"):
        make_searcher(3)


def test_random_search_repeats_nothing_before_a_finite_space_is_used_up():
    space = Space({"a": [1, 2, 3, 4], "b": integer(1, 3)})
    configs = [str(s.config) for s in drain(ready("random", space=space, n_trials=24))]
    assert len(set(configs[:12])) == len(set(configs[12:])) == 12
    assert configs[:7] == [str(s.config) for s in drain(ready("random", space=space, n_trials=7))]


def test_points_of_a_finite_space_are_not_drawn_again():
    space = Space({"a": [1, 2, 3, 4]})
    points = [{"a": 3}, {"a": 1}]
    configs = [
        s.config["a"] for s in drain(ready("random", space=space, n_trials=4, points=points))
    ]
    assert configs[:2] == [3, 1]
    assert sorted(configs) == [1, 2, 3, 4]


def test_random_search_of_a_finite_space_is_resumed():
    space = Space({"a": list(range(9)), "b": [1, 2]})
    whole = [s.config for s in drain(ready("random", space=space, n_trials=18))]
    first = ready("random", space=space, n_trials=18)
    for _ in range(7):
        first.suggest()
    second = ready("random", space=space, n_trials=18)
    second.load_state_dict(first.state_dict())
    assert [s.config for s in drain(second)] == whole[7:]


def test_a_finite_space_that_is_too_large_to_enumerate_is_drawn_from():
    space = Space({"a": integer(0, 10**9), "b": integer(0, 10**9)})
    configs = [s.config for s in drain(ready("random", space=space, n_trials=50))]
    assert configs == [space.sample(3, trial) for trial in range(50)]


# --- grids of Ray Tune ---------------------------------------------------------


def turns(a, b):
    """A space in which trials take `a` values in turn, and `b` are drawn."""
    return Space({"a": {"grid_search": list(range(a))}, "b": list(range(b))})


@pytest.mark.parametrize(("a", "b"), [(2, 3), (3, 4), (4, 3), (3, 1), (2, 40)])
def test_random_search_redraws_within_the_grid_turn_of_the_trial(a, b):
    for seed in range(20):
        suggestions = drain(ready("random", space=turns(a, b), n_trials=2 * a * b, seed=seed))
        assert [s.config["a"] for s in suggestions] == list(range(a)) * 2 * b
        configs = [str(s.config) for s in suggestions]
        assert len(set(configs[: a * b])) == len(set(configs[a * b :])) == a * b


def test_a_trial_whose_grid_turn_is_used_up_takes_any_configuration():
    """Both trials of `a = 0` have the same configuration; a point takes the turn of another."""
    if_one = {"a": {"grid_search": [0, 1]}, "if": when("a", 1, {"b": [0, 1, 2]})}
    configs = [s.config for s in drain(ready("random", space=Space(if_one), n_trials=4))]
    assert [config["a"] for config in configs] == [0, 1, 1, 1]
    assert sorted(config["b"] for config in configs[1:]) == [0, 1, 2]
    points = [{"a": 1}]
    configs = [
        s.config["a"] for s in drain(ready("random", space=turns(2, 1), n_trials=2, points=points))
    ]
    assert configs == [1, 0]
    large = {"a": {"grid_search": [0, 1]}, "if": when("a", 1, {"b": integer(0, 10**9)})}
    configs = [str(s.config) for s in drain(ready("random", space=Space(large), n_trials=6))]
    assert len(set(configs)) == 6


def test_random_search_with_grids_is_resumed_in_turn():
    whole = [s.config for s in drain(ready("random", space=turns(3, 3), n_trials=9))]
    first = ready("random", space=turns(3, 3), n_trials=9)
    for _ in range(4):
        first.suggest()
    second = ready("random", space=turns(3, 3), n_trials=9)
    second.load_state_dict(first.state_dict())
    assert [s.config for s in drain(second)] == whole[4:]


def test_quasi_random_search_takes_grids_in_turn_and_the_rest_from_the_sequence():
    pytest.importorskip("scipy")
    space = Space({"a": {"grid_search": [1, 2, 3]}, "lr": uniform(0, 1)})
    configs = [s.config for s in drain(ready("quasirandom", space=space, n_trials=64))]
    assert [config["a"] for config in configs] == ([1, 2, 3] * 22)[:64]
    assert sorted(int(config["lr"] * 64) for config in configs) == list(range(64))
