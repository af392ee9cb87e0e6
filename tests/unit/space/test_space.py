"""Search spaces: values, streams, conditions, grids and what is refused."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from cerebro.errors import InputError
from cerebro.space import (
    Space,
    as_space,
    choice,
    integer,
    loguniform,
    normal,
    uniform,
    when,
)

FULL = {
    "lr": loguniform(1e-4, 1e-1),
    "batch_size": [32, 256],
    "layers": integer(1, 4),
    "width": integer(8, 512, log=True),
    "dropout": uniform(0.0, 0.5, step=0.1),
    "noise": normal(0.0, 2.0),
    "momentum": uniform(0.5, 0.99),
    "augment": {"crop": [0, 2, 4], "lr": loguniform(1e-4, 1e-1), "empty": {}},
    "epochs_warm": 1,
    "betas": [(0.9, 0.999)],
}


def draws(dimension, n=2000):
    space = Space({"x": dimension})
    return [space.sample(3, trial)["x"] for trial in range(n)]


def test_a_sample_is_a_pure_function_of_seed_and_trial():
    one, two = Space(FULL), Space(FULL)
    assert one.sample(7, 3) == two.sample(7, 3)
    assert one.sample(7, 3) != one.sample(7, 4) != one.sample(8, 4)
    assert json.loads(json.dumps(one.sample(7, 3))) == one.sample(7, 3)
    assert one.sample(7, 3)["betas"] == [0.9, 0.999]
    assert one.sample(7, 3)["augment"]["empty"] == {}


RECORDED = [
    {"a": 0.2750989552503319, "b": {"a": 12}, "c": "y"},
    {"a": 0.807102112037575, "b": {"a": 40}, "c": "y"},
]


def test_recorded_samples_never_change():
    space = Space({"a": uniform(0, 1), "b": {"a": integer(0, 99)}, "c": ["x", "y", "z"]})
    assert [space.sample(0, trial) for trial in range(2)] == RECORDED


def test_every_dimension_has_a_stream_of_its_own():
    smaller = {key: FULL[key] for key in ("momentum", "noise", "lr")}
    large, small = Space(FULL).sample(1, 5), Space(smaller).sample(1, 5)
    assert small == {key: large[key] for key in smaller}
    assert large["lr"] != large["augment"]["lr"]
    keys = Space({"a/b": uniform(0, 1), "a": {"b": uniform(0, 1)}}).sample(0, 0)
    assert keys["a/b"] != keys["a"]["b"]


def test_values_stay_in_their_bounds_and_reach_the_ends():
    assert all(0.5 <= value <= 0.99 for value in draws(uniform(0.5, 0.99)))
    assert all(1e-4 <= value <= 1e-1 for value in draws(loguniform(1e-4, 1e-1)))
    assert set(draws(integer(1, 4))) == {1, 2, 3, 4}
    assert set(draws(integer(0, 10, step=4))) == {0, 4, 8}
    assert set(draws(uniform(0.0, 0.5, step=0.1))) == {0.0, 0.1, 0.2, 0.3, 0.4, 0.5}
    assert set(draws(["a", None, 3.5])) == {"a", None, 3.5}
    assert set(draws(uniform(2, 2))) == {2.0}


def test_distributions_have_the_shape_they_claim():
    assert abs(np.mean(draws(uniform(0, 1))) - 0.5) < 0.02
    assert abs(np.mean(np.log10(draws(loguniform(1e-4, 1)))) + 2) < 0.1
    values = np.array(draws(normal(5, 2)))
    assert abs(values.mean() - 5) < 0.15 and abs(values.std() - 2) < 0.1
    logs = np.array(draws(integer(1, 100, log=True)))
    assert set(logs) >= {1, 2, 3, 4, 5} and logs.max() <= 100 and np.median(logs) < 20


def test_a_sample_shares_nothing_with_the_space_or_another_sample():
    space = Space({"layers": [[64, 64]], "opt": {"betas": [[0.9, 0.99]]}})
    space.sample(0, 0)["layers"].append(1)
    space.grid()[0]["opt"]["betas"].append(1)
    assert space.sample(0, 1) == {"layers": [64, 64], "opt": {"betas": [0.9, 0.99]}}


def test_conditions_merge_their_entries_where_they_hold():
    space = Space(
        {
            "optimizer": ["sgd", "adam", "adamw"],
            "sgd options": when("optimizer", "sgd", {"momentum": uniform(0, 1)}),
            "decays": [
                when("optimizer", ["adam", "adamw"], {"beta": {"one": uniform(0, 1)}}),
                when("optimizer", "adamw", {"decay": [0.1, 0.2]}),
            ],
        }
    )
    wanted = {
        "sgd": {"optimizer", "momentum"},
        "adam": {"optimizer", "beta"},
        "adamw": {"optimizer", "beta", "decay"},
    }
    samples = [space.sample(0, trial) for trial in range(50)]
    assert {config["optimizer"] for config in samples} == set(wanted)
    assert all(set(config) == wanted[config["optimizer"]] for config in samples)


def test_conditions_nest_and_look_outwards():
    space = Space(
        {
            "net": ["mlp", "cnn"],
            "head": {"pool": when("net", "cnn", {"pool": ["max", "mean"]}), "bias": True},
            "cnn": when(
                "net",
                "cnn",
                {"norm": [True, False], "n": when("norm", True, {"eps": [1e-5, 1e-3]})},
            ),
        }
    )
    assert space.grid() == [
        {"net": "mlp", "head": {"bias": True}},
        *[
            {"net": "cnn", "head": {"bias": True, "pool": pool}, "norm": norm, **eps}
            for pool in ("max", "mean")
            for norm in (True, False)
            for eps in ([{"eps": 1e-5}, {"eps": 1e-3}] if norm else [{}])
        ],
    ]


def test_exclusive_conditions_may_set_the_same_name():
    space = Space(
        {
            "optimizer": ["sgd", "adam"],
            "a": when("optimizer", "sgd", {"lr": loguniform(0.01, 1), "x": {"y": 1}}),
            "b": when("optimizer", "adam", {"lr": loguniform(1e-5, 1e-3), "x": {"z": 2}}),
            "x": {"w": 0},
        }
    )
    for trial in range(20):
        config = space.sample(0, trial)
        sgd = config["optimizer"] == "sgd"
        assert (config["lr"] >= 0.01) == sgd
        assert config["x"] == ({"w": 0, "y": 1} if sgd else {"w": 0, "z": 2})
    with pytest.raises(InputError, match="lr is defined twice"):
        Space({"o": ["a", "b"], "lr": 1, "w": when("o", "a", {"lr": 2})})
    with pytest.raises(InputError, match="lr is defined twice"):
        Space({"o": ["a", "b"], "w": [when("o", v, {"lr": 2}) for v in ("a", ["a", "b"])]})


def test_a_grid_is_nested_loops_in_the_order_written():
    space = Space({"b": [1, 2], "a": {"c": integer(0, 1)}, "u": uniform(0, 0.3, step=0.1), "k": 5})
    assert space.grid() == [
        {"b": b, "a": {"c": c}, "u": u, "k": 5}
        for b in (1, 2)
        for c in (0, 1)
        for u in (0.0, 0.1, 0.2, 0.3)
    ]
    assert Space({}).grid() == [{}] == [Space({}).sample(0, 0)]


@pytest.mark.parametrize("dimension", [uniform(0, 1), loguniform(1, 2), normal(0, 1)])
def test_a_grid_names_the_dimension_it_cannot_enumerate(dimension):
    with pytest.raises(InputError, match=r"opt\.lr: .*grid"):
        Space({"opt": {"lr": dimension}}).grid()


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (np.logspace(-4, -1, 4), np.logspace(-4, -1, 4).tolist()),
        (np.array([True, False]), [True, False]),
        (np.array(["sgd", "adam"]), ["sgd", "adam"]),
        (range(1, 8, 3), [1, 4, 7]),
        (np.arange(3, dtype=np.int32), [0, 1, 2]),
    ],
)
def test_arrays_and_ranges_are_choices(given, options):
    for space in ({"a": given}, {"in": {"a": given}}, {"b": 1, "if": when("b", 1, {"a": given})}):
        listed = {**space, "a": options} if "a" in space else space
        assert {len(list(Space(space).grid())), len(list(Space(listed).grid()))} == {len(options)}
    assert Space({"a": given}).to_json() == Space({"a": options}).to_json()
    assert type(Space({"a": given}).sample(0, 0)["a"]) is type(options[0])
    assert Space({"a": choice(given)}).to_json() == Space({"a": options}).to_json()


def test_series_and_tensors_are_choices():
    pandas, torch = pytest.importorskip("pandas"), pytest.importorskip("torch")
    for given in (
        pandas.Series([1, 2], index=["a", "b"]),
        pandas.Index([1, 2]),
        torch.arange(1, 3),
    ):
        assert Space({"a": given}).to_json() == Space({"a": [1, 2]}).to_json()


def test_numpy_scalars_are_constants():
    assert Space({"a": np.float32(0.5), "b": np.int64(3)}).sample(0, 0) == {"a": 0.5, "b": 3}


def test_a_grid_without_end_is_refused():
    with pytest.raises(InputError, match="more than"):
        Space({str(i): integer(0, 10**9) for i in range(3)}).grid()


@pytest.mark.parametrize(
    ("dimension", "message"),
    [
        (uniform(1.0, 0.1), "low is above high"),
        (loguniform(0.1, 0.01), "low is above high"),
        (integer(5, 1), "low is above high"),
        (loguniform(0, 1), "low must be above 0"),
        (loguniform(-4, -1), "not their logarithms"),
        (integer(0, 8, log=True), "low must be above 0"),
        (integer(1, 8, step=2, log=True), "cannot be combined"),
        (integer(0, 8, step=0), "step must be above 0"),
        (uniform(0, 8, step=-1), "step must be above 0"),
        (uniform(0, math.inf), "finite"),
        (uniform(math.nan, 1), "finite"),
        (normal(0, 0), "std must be above 0"),
        (normal(0, math.inf), "finite"),
        (integer(0.5, 8), "whole number"),
        (uniform("0", 8), "must be a number"),
        (uniform(True, 8), "must be a number"),
        (choice([]), "at least one option"),
        ([], "at least one option"),
        (choice("abc"), "must be a list"),
        (choice(3), "must be a list"),
        ([1, math.inf], "finite"),
        ([max, min], "use a name"),
        (np.ones((2, 2)), r"give a list \(\.tolist\(\)\)"),
        ([np.arange(3)], r"give a list \(\.tolist\(\)\)"),
        (np.arange(0), "at least one option"),
        (range(0), "at least one option"),
        ((1e-4, 1e-1), r"give a list to choose .*, cerebro.uniform\(0.0001, 0.1\) for a range"),
        ((1, 2, 3), r"give a list to choose .*, cerebro.uniform\(low, high\) for a range"),
        ([uniform(0, 1)], "is nested inside another value"),
        ([{1: 2}], "must be strings"),
    ],
)
def test_errors_name_the_invalid_dimension(dimension, message):
    for space in ({"lr": dimension}, {"opt": {"lr": dimension}}):
        with pytest.raises(InputError, match=message) as caught:
            as_space(space)
        assert str(caught.value).startswith("opt.lr:" if "opt" in space else "lr:")


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"a": [1], "w": when("b", 1, {})}, "no 'b'"),
        ({"a": ["sgd"], "w": when("a", "sdg", {})}, "never holds"),
        ({"a": [1], "w": [when("a", 1, {}), 2]}, "either conditions"),
        ({1: [2]}, "non-empty strings"),
        ([1, 2], "must be a mapping"),
        ({"a": [1], "w": when("a", 1, 3)}, "must be a mapping"),
    ],
)
def test_badly_made_spaces(space, message):
    with pytest.raises(InputError, match=message):
        Space(space)


def test_numpy_numbers_become_plain_ones():
    config = Space({"a": [np.int64(3)], "b": np.float32(0.5), "c": integer(np.int64(1), 1)}).grid()
    assert config == [{"a": 3, "b": 0.5, "c": 1}]
    assert [type(value) for value in config[0].values()] == [int, float, int]


def test_a_point_is_completed():
    space = Space(FULL)
    point = {"lr": 5.0, "augment": {"crop": 3}}
    config, plain = space.complete(point, 2, 0), space.sample(2, 0)
    assert config["lr"] == 5.0 and config["augment"]["crop"] == 3
    assert config["augment"]["lr"] == plain["augment"]["lr"]
    assert config["batch_size"] == plain["batch_size"]
    conditional = Space({"o": ["a", "b"], "w": when("o", "a", {"m": [1]})})
    assert conditional.complete({"o": "a", "m": 9}, 0, 0) == {"o": "a", "m": 9}
    for bad in ({"lrr": 1}, {"augment": {"crap": 1}}):
        with pytest.raises(InputError, match="not in the space"):
            space.complete(bad, 0, 0)
    with pytest.raises(InputError, match="does not hold"):
        conditional.complete({"o": "b", "m": 9}, 0, 0)
    with pytest.raises(InputError, match="must be a mapping"):
        conditional.complete([1], 0, 0)


def test_a_space_survives_json():
    mapping = {**FULL, "w": [when("batch_size", 32, {"x": [1], "n": {"y": uniform(0, 1)}})]}
    mapping["v"] = when("layers", [1, 2], {"z": choice([[1], [2, 3]])})
    space = Space(mapping)
    again = Space.from_json(json.loads(json.dumps(space.to_json())))
    assert [again.sample(4, t) for t in range(20)] == [space.sample(4, t) for t in range(20)]
    assert again.describe() == space.describe()
    for bad in ({"entries": [["a", {"type": "nope"}]]}, [], {"type": "constant", "value": 1}):
        with pytest.raises(InputError, match="not a search space"):
            Space.from_json(bad)


def test_describe_and_repr():
    space = Space({"lr": loguniform(1e-4, 0.1), "o": ["a", "b"], "w": when("o", "a", {"m": 1})})
    assert space.describe().splitlines() == [
        "lr  loguniform(0.0001, 0.1)",
        "o   choice(['a', 'b'])",
        "m   1   if o = 'a'",
    ]
    assert list(space.dimensions) == ["lr", "o"]
    assert repr(integer(1, 9, step=2)) == "integer(1, 9, step=2)"
    assert "loguniform(0.0001, 0.1)" in repr(space)
