"""Searchers that listen: the contract of all, and what the papers say of each."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from cerebro.coordinator.simulated_trials import SimulatedTrial
from cerebro.errors import InputError
from cerebro.searchers import (
    ASHA,
    PBT,
    TPE,
    Decision,
    GaussianProcess,
    GridSearch,
    Hyperband,
    MedianStopping,
    QuasiRandomSearch,
    RandomSearch,
    Searcher,
    SuccessiveHalving,
    hyperband_brackets,
    make_searcher,
)
from cerebro.space import Space, choice, integer, loguniform, normal, uniform, when
from cerebro.testing import check_searcher, drive

SEARCHERS: dict[str, Callable[[], Searcher]] = {
    "random": RandomSearch,
    "quasirandom": QuasiRandomSearch,
    "successive halving": SuccessiveHalving,
    "successive halving, by 2 from 2": lambda: SuccessiveHalving(2, 2),
    "hyperband": Hyperband,
    "asha": ASHA,
    "asha stopping": lambda: ASHA(variant="stopping"),
    "median": MedianStopping,
    "pbt": PBT,
    "pbt, every 2": lambda: PBT(2, 0.5, mutate=["lr", "layers", "optimizer"]),
    "tpe": lambda: TPE(startup_trials=3),
}
NEEDS = {"quasirandom": "scipy", "tpe": "optuna"}


def curves(*values: float) -> Callable[[Mapping[str, Any], int, int], float]:
    """Trials whose metric is the same in every epoch."""
    return lambda config, trial, epoch: values[trial]


@pytest.mark.parametrize("name", SEARCHERS)
def test_searchers_keep_the_protocol(name: str) -> None:
    pytest.importorskip(NEEDS.get(name, "cerebro"))
    check_searcher(SEARCHERS[name])


@pytest.mark.parametrize("n_trials", [2, 5, 40])
@pytest.mark.parametrize("name", ["successive halving", "hyperband", "asha", "pbt", "median"])
def test_searchers_keep_the_protocol_with_any_number_of_trials(name: str, n_trials: int) -> None:
    check_searcher(SEARCHERS[name], n_trials=n_trials, width=3)


def test_grid_keeps_the_protocol() -> None:
    check_searcher(GridSearch, space={"lr": [0.1, 0.01], "layers": integer(1, 3)}, n_trials=None)


def test_gaussian_process_keeps_the_protocol() -> None:
    pytest.importorskip("optuna")
    pytest.importorskip("torch")
    space = {"lr": loguniform(1e-4, 1e-1)}
    check_searcher(lambda: GaussianProcess(2), space=space, epochs=2, n_trials=4, width=2)


def test_without_a_number_of_trials_halving_and_hyperband_end_by_themselves() -> None:
    for make, trials in ((SuccessiveHalving, 9), (Hyperband, 17)):
        check_searcher(make, n_trials=None)
        assert len(drive(make(), lambda config, trial, epoch: trial, n_trials=None)) == trials


# --- Hyperband ----------------------------------------------------------------


def test_hyperband_has_the_published_brackets() -> None:
    assert hyperband_brackets(81, 3) == [
        [(81, 1), (27, 3), (9, 9), (3, 27), (1, 81)],
        [(34, 3), (11, 9), (3, 27), (1, 81)],
        [(15, 9), (5, 27), (1, 81)],
        [(8, 27), (2, 81)],
        [(5, 81)],
    ]


def test_hyperband_trains_its_brackets_and_nothing_else() -> None:
    trials = drive(
        Hyperband(), lambda config, trial, epoch: trial, epochs=81, n_trials=None, width=50
    )
    assert len(trials) == 143
    trained: dict[int, int] = {}
    for trial in trials:
        trained[trial.epoch] = trained.get(trial.epoch, 0) + 1
    # Who leaves at a rung: 81 - 27 at epoch 1 of the first bracket, 34 - 11 at 3 of the second...
    assert trained == {
        1: 81 - 27,
        3: 27 - 9 + 34 - 11,
        9: 9 - 3 + 11 - 3 + 15 - 5,
        27: 3 - 1 + 3 - 1 + 5 - 1 + 8 - 2,
        81: 1 + 1 + 1 + 2 + 5,
    }
    first, second = trials[:81], trials[81 : 81 + 34]
    assert [trial.epoch for trial in first[:4]] == [81, 27, 27, 9]  # the lowest value wins
    assert second[0].epoch == 81


def test_hyperband_with_n_trials_cuts_the_last_bracket() -> None:
    trials = drive(Hyperband(), lambda config, trial, epoch: trial, n_trials=11)
    assert len(trials) == 11  # 9 of the first bracket, 2 of the 5 of the second
    assert trials[9].epoch == 9 and trials[10].epoch == 3


def test_brackets_run_side_by_side() -> None:
    searcher = Hyperband()
    searcher.setup(Space({}), seed=0, epochs=9, n_trials=None, metric="loss", mode="min")
    begun = [searcher.suggest() for _ in range(17)]
    assert all(suggestion is not None for suggestion in begun)  # before any report
    assert searcher.suggest() is None


# --- the order of arrival -------------------------------------------------------


def values_in_order(order: str) -> list[float]:
    """27 constant curves; the trials' numbers are the order of arrival."""
    ranked = [float(i) for i in range(27)]
    if order == "worst first":
        return ranked[::-1]
    if order == "random":
        return [float(i * 11 % 27) for i in range(27)]
    return ranked


@pytest.mark.parametrize("order", ["best first", "worst first", "random"])
def test_exact_halving_keeps_the_best_in_any_order_of_arrival(order: str) -> None:
    values = values_in_order(order)
    trials = drive(
        SuccessiveHalving(), curves(*values), epochs=27, n_trials=27, width=27, order=None
    )
    at_end = [trial.number for trial in trials if trial.epoch == 27]
    assert at_end == [values.index(0.0)]
    assert sorted(values[t.number] for t in trials if t.epoch >= 3) == list(range(9))


def test_stopping_depends_on_the_order_of_arrival() -> None:
    """Why the exact variants are there: the same 27 trials, decided when they arrive."""
    survivors = {}
    for order in ("best first", "worst first"):
        trials = drive(
            ASHA(variant="stopping"),
            curves(*values_in_order(order)),
            epochs=27,
            n_trials=27,
            width=1,
            order=None,
        )
        survivors[order] = sum(trial.epoch >= 3 for trial in trials)
    assert survivors["best first"] < 9 < survivors["worst first"]


def late_winner(ranks: list[float]) -> Callable[[Mapping[str, Any], int, int], float]:
    """The third best at first is the best in the end; nobody else changes places."""

    def curve(config: Mapping[str, Any], trial: int, epoch: int) -> float:
        return -1.0 if ranks[trial] == 2.0 and epoch >= 3 else ranks[trial]

    return curve


@pytest.mark.parametrize("order", ["best first", "worst first", "random"])
def test_exact_halving_finds_the_late_winner_in_any_order_of_arrival(order: str) -> None:
    ranks = values_in_order(order)
    trials = drive(
        SuccessiveHalving(), late_winner(ranks), epochs=27, n_trials=27, width=27, order=None
    )
    assert min(trials, key=last_value).number == ranks.index(2.0)
    assert trials[ranks.index(2.0)].epoch == 27


def test_stopping_loses_the_late_winner() -> None:
    ranks = values_in_order("best first")
    options: dict[str, Any] = {"epochs": 27, "n_trials": 27, "width": 1, "order": None}
    trials = drive(ASHA(variant="stopping"), late_winner(ranks), **options)
    winner = ranks.index(2.0)
    assert (trials[winner].status, trials[winner].epoch) == ("stopped", 1)
    assert min(trials, key=last_value).number != winner


def last_value(trial: SimulatedTrial) -> float:
    return trial.values[-1]


CURVES = json.loads((Path(__file__).parents[2] / "golden/learning-curves.json").read_text())
"""Of real models: the one that is best in the end is the fifth after 3 epochs, third after 9."""


def recorded_in_order(order: str) -> list[list[float]]:
    """The recorded curves in an order of arrival: by what they are at the first comparison."""
    curves = sorted(CURVES["curves"], key=lambda curve: curve[2])
    if order == "worst first":
        return curves[::-1]
    return [curves[i * 11 % 27] for i in range(27)] if order == "random" else curves


def survivor(searcher: Searcher, curves: list[list[float]], width: int) -> tuple[int, int]:
    """Who is the best in the end, by its place in the truth, and how many came to the end."""
    trials = drive(
        searcher,
        lambda config, trial, epoch: curves[trial][epoch],
        epochs=27,
        n_trials=27,
        width=width,
        order=None,
    )
    at_end = [trial for trial in trials if trial.epoch == 27]
    truth = sorted(range(27), key=lambda trial: curves[trial][-1])
    return truth.index(min(at_end, key=last_value).number), len(at_end)


@pytest.mark.parametrize("order", ["best first", "worst first", "random"])
@pytest.mark.parametrize("width", [1, 8, 27])
@pytest.mark.parametrize("make", [SuccessiveHalving, ASHA])
def test_on_recorded_curves_exact_variants_keep_the_true_best(
    make: Callable[[int, int], Searcher], width: int, order: str
) -> None:
    best, survivors = survivor(make(3, 3), recorded_in_order(order), width)
    assert best == 0
    if make is not ASHA:  # which promotes before all have come
        assert survivors == 3


@pytest.mark.parametrize("order", ["best first", "worst first", "random"])
@pytest.mark.parametrize("width", [1, 8, 27])
@pytest.mark.parametrize("make", [SuccessiveHalving, Hyperband])
def test_on_recorded_curves_the_best_of_each_rung_advance(
    make: Callable[[], Searcher], width: int, order: str
) -> None:
    """The exact answer is 9, 3 and 1, whoever comes first."""
    curves = recorded_in_order(order)
    trials = drive(
        make(),
        lambda config, trial, epoch: curves[trial][epoch],
        epochs=27,
        n_trials=27,
        width=width,
        order=None,
    )
    left = list(range(27))
    for count, rung in ((9, 1), (3, 3), (1, 9)):
        left = sorted(left, key=lambda trial: curves[trial][rung - 1])[:count]
        assert {trial.number for trial in trials if trial.epoch > rung} == set(left)


def test_on_recorded_curves_stopping_may_lose_the_true_best() -> None:
    found = {
        order: survivor(ASHA(3, variant="stopping"), recorded_in_order(order), 1)
        for order in ("best first", "worst first", "random")
    }
    assert found["best first"][0] > 0  # lost
    assert found["worst first"][0] == 0 and found["worst first"][1] > 9  # at three times the cost
    assert len({survivors for _, survivors in found.values()}) > 1


# --- the others -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("searcher", "left"),
    [(ASHA(), {1: 13, 2: 6, 4: 3, 8: 1}), (ASHA(reduction_factor=3), {1: 9, 3: 3})],
    ids=["the default, a half", "a third"],
)
def test_promotion_never_trains_more_than_its_share_of_a_rung_further(
    searcher: ASHA, left: dict[int, int]
) -> None:
    """Trials come best first, so none is promoted that is not among the best in the end."""
    trials = drive(
        searcher, lambda config, trial, epoch: trial, epochs=9, n_trials=27, width=4, order=1
    )
    assert {at: sum(trial.epoch > at for trial in trials) for at in left} == left


def test_median_stops_trials_worse_than_the_median_average() -> None:
    trials = drive(
        MedianStopping(), curves(1.0, 2.0, 3.0, 9.0, 0.5, 8.0), epochs=5, n_trials=6, order=None
    )
    assert [trial.epoch for trial in trials] == [
        5,
        5,
        5,
        2,
        5,
        2,
    ]  # 2 came before there were three to compare with


def test_median_waits_for_grace_epochs_and_min_trials() -> None:
    trials = drive(
        MedianStopping(grace_epochs=3), curves(1.0, 2.0, 3.0, 9.0), epochs=5, n_trials=4, order=None
    )
    assert trials[3].epoch == 4
    few = drive(MedianStopping(min_trials=4), curves(1.0, 2.0, 3.0, 9.0), epochs=5, n_trials=4)
    assert all(trial.epoch == 5 for trial in few)


def test_pbt_replaces_the_worst_by_clones_of_the_best() -> None:
    trials = drive(
        PBT(interval=2),
        lambda config, trial, epoch: float(trial % 8),
        epochs=6,
        n_trials=8,
        space={"lr": loguniform(1e-4, 1e-1), "layers": integer(1, 4)},
    )
    clones = [trial for trial in trials if trial.parent is not None]
    assert len(clones) == 4  # 2 of 8 after epoch 2 and after epoch 4
    assert {trial.parent for trial in clones[:2]} <= {0, 1}
    assert [trials[n].status for n in (6, 7)] == ["stopped", "stopped"]
    for clone in clones:
        assert clone.parent is not None
        parent = trials[clone.parent]
        assert clone.config["layers"] == parent.config["layers"]  # would not fit the weights
        assert clone.config["lr"] != parent.config["lr"]
        assert 1e-4 <= clone.config["lr"] <= 1e-1


def test_pbt_mutates_only_the_given_dimensions() -> None:
    space = {"lr": loguniform(1e-4, 1e-1), "batch": choice([16, 32, 64]), "n": integer(1, 9)}
    trials = drive(
        PBT(mutate=["batch", "n"], resample=0.0),
        lambda config, trial, epoch: float(trial),
        epochs=4,
        n_trials=4,
        space=space,
    )
    clones = [trial for trial in trials if trial.parent is not None]
    assert clones
    for clone in clones:
        assert clone.parent is not None
        parent = trials[clone.parent].config
        assert clone.config["lr"] == parent["lr"]
        assert abs(clone.config["n"] - parent["n"]) <= 2


def test_clones_of_pbt_have_only_values_of_their_space() -> None:
    width = {"a": uniform(0, 1), "b": integer(16, 100, step=32)}
    space = {
        "kind": ["a", "b"],
        "options": [when("kind", name, {"width": width[name]}) for name in width],
        "units": integer(0, 10, step=3),
    }
    clones = []
    for seed in range(5):
        trials = drive(
            PBT(mutate=["kind", "units"], resample=0.0),
            lambda config, trial, epoch: float(-config["units"]),
            epochs=6,
            n_trials=6,
            seed=seed,
            space=space,
        )
        clones += [trial.config for trial in trials if trial.parent is not None]
    assert {config["units"] for config in clones} == {6, 9}  # 10 is not reached by steps of 3
    for config in clones:
        if config["kind"] == "a":
            assert 0 <= config["width"] <= 1
        else:
            assert config["width"] in (16, 48, 80)


def test_samplers_learn_where_the_good_values_are() -> None:
    pytest.importorskip("optuna")
    space = {"lr": loguniform(1e-4, 1e-1)}

    def curve(config: Mapping[str, Any], trial: int, epoch: int) -> float:
        return (math.log10(config["lr"]) + 2) ** 2

    trials = drive(TPE(5), curve, space=space, epochs=1, n_trials=40, width=1)
    early = sorted(last_value(trial) for trial in trials[:10])[5]
    late = sorted(last_value(trial) for trial in trials[30:])[5]
    assert late < early / 4


def test_samplers_take_conditions_options_of_any_kind_and_points() -> None:
    pytest.importorskip("optuna")
    space = Space(
        {
            "shape": [[1, 2], [3]],
            "kind": ["a", "b"],
            "if a": when("kind", "a", {"size": integer(1, 8, log=True)}),
        }
    )
    searcher = TPE(2)
    points = [{"shape": [3], "kind": "a"}]
    searcher.setup(space, seed=0, epochs=1, n_trials=9, metric="loss", mode="min", points=points)
    configs = []
    for trial in range(9):
        suggestion = searcher.suggest()
        assert suggestion is not None
        configs.append(suggestion.config)  # type: ignore[union-attr]
        assert searcher.report(trial, 0, {"loss": float(trial)}) is Decision.CONTINUE
    assert configs[0]["shape"] == [3] and configs[0]["kind"] == "a"
    assert all(("size" in config) == (config["kind"] == "a") for config in configs)
    assert {tuple(config["shape"]) for config in configs} == {(1, 2), (3,)}


def test_samplers_suggest_the_values_of_a_step_as_written() -> None:
    pytest.importorskip("optuna")
    searcher = TPE(40)
    space = Space({"rate": uniform(0, 1, step=0.1), "late": uniform(0.05, 1, step=0.3)})
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of Optuna: steps of 0.3 do not reach 1
        searcher.setup(space, seed=0, epochs=1, n_trials=40, metric="loss", mode="min")
        suggestions: list[Any] = [searcher.suggest() for _ in range(40)]
    configs = [suggestion.config for suggestion in suggestions]
    rates, lates = ({config[name] for config in configs} for name in ("rate", "late"))
    assert rates == {0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0}
    assert lates == {0.05, 0.35, 0.65, 0.95}


def test_resumed_samplers_report_the_selected_epoch() -> None:
    pytest.importorskip("optuna")

    def ready() -> TPE:
        searcher = TPE(2)
        searcher.select = "last"
        space = Space({"lr": loguniform(1e-4, 1e-1)})
        searcher.setup(space, seed=0, epochs=2, n_trials=2, metric="loss", mode="min")
        return searcher

    searcher = ready()
    for trial in range(2):
        searcher.suggest()
        searcher.report(trial, 0, {"loss": 1.0})
    state = json.loads(json.dumps(searcher.state_dict()))
    searcher = ready()
    searcher.load_state_dict(state)
    searcher.report(0, 1, {"loss": 3.0})
    searcher.report(1, 1, {"loss": math.inf})
    assert searcher.state_dict()["log"][2:] == [["tell", 0, 3.0], ["tell", 1, None]]


# --- the number of trials -----------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "size"),
    [(PBT, 8), (lambda: PBT(population=3), 3), (SuccessiveHalving, 9), (Hyperband, 17)],
)
def test_no_point_is_left_out(make: Callable[[], Searcher], size: int) -> None:
    """The size that a searcher has without `n_trials` takes as many points, and no more."""

    def ready(n_points: int, n_trials: float | None) -> Searcher:
        searcher = make()
        searcher.setup(
            Space({"lr": uniform(0, 1)}), seed=0, epochs=9, n_trials=n_trials, metric="loss",
            mode="min", points=[{"lr": i / 100} for i in range(n_points)],
        )  # fmt: skip
        return searcher

    fits = ready(size, None)
    suggestions: list[Any] = [fits.suggest() for _ in range(size - 1)]
    state = json.loads(json.dumps(fits.state_dict()))
    suggestions.append(fits.suggest())
    assert fits.suggest() is None
    assert [s.config["lr"] for s in suggestions] == [i / 100 for i in range(size)]
    with pytest.raises(
        InputError,
        match=rf"begins {size} trials, but there are {size + 1} points.* n_trials={size + 1} or",
    ):
        ready(size + 1, None).suggest()
    given: Any = ready(size + 1, size + 1).suggest()
    assert given.config == {"lr": 0.0}
    # Only the beginning is refused: a run that began with n_trials may be resumed without.
    resumed = ready(size + 1, None)
    resumed.load_state_dict(state)
    assert resumed.suggest() == suggestions[-1]
    assert resumed.suggest() is None


def test_points_beyond_the_population_are_refused_in_a_timed_search() -> None:
    points = [{"lr": i / 100} for i in range(9)]
    for searcher, fits in ((PBT(), False), (SuccessiveHalving(), True), (Hyperband(), True)):
        searcher.setup(
            Space({"lr": uniform(0, 1)}), seed=0, epochs=1, n_trials=math.inf, metric="loss",
            mode="min", points=points,
        )  # fmt: skip
        if fits:  # brackets follow each other
            assert searcher.suggest() is not None
            continue
        with pytest.raises(InputError, match="PBT begins 8 trials, but there are 9 points"):
            searcher.suggest()


def test_halving_opens_a_bracket_of_the_trials_that_are_added() -> None:
    """Also if the first rung of the earlier bracket is not full yet."""
    for before in (2, 4):
        earlier, later = (SuccessiveHalving(reduction_factor=2) for _ in range(2))
        for searcher, n_trials in ((earlier, 4), (later, 12)):
            searcher.setup(
                Space({"lr": uniform(0, 1)}), seed=0, epochs=4, n_trials=n_trials, metric="loss",
                mode="min",
            )  # fmt: skip
        for _ in range(before):
            earlier.suggest()
        later.load_state_dict(json.loads(json.dumps(earlier.state_dict())))
        # Rungs of 4, 2 and 1 trials, and of 8, 4 and 2, at epochs 1, 2 and 4.
        to_begin = 4 - before + 8
        assert later.epochs_to_come() == to_begin + (2 + 4) * 1 + (1 + 2) * 2
        suggestions: list[Any] = [later.suggest() for _ in range(to_begin)]
        assert [(s.trial, s.epochs) for s in suggestions] == [(None, 1)] * to_begin
        assert later.suggest() is None
        assert later.epochs_to_come() == (2 + 4) * 1 + (1 + 2) * 2
        for trial in range(12):
            later.report(trial, 0, {"loss": float(trial)})
        again: list[Any] = [later.suggest() for _ in range(6)]
        assert [(s.trial, s.epochs) for s in again] == [(t, 2) for t in (0, 1, 4, 5, 6, 7)]


def test_resumed_hyperband_beyond_its_brackets_ends_without_n_trials() -> None:
    earlier, later = Hyperband(), Hyperband()
    for searcher, n_trials in ((earlier, 40), (later, None)):
        searcher.setup(
            Space({"lr": uniform(0, 1)}), seed=0, epochs=9, n_trials=n_trials, metric="loss",
            mode="min",
        )  # fmt: skip
    for _ in range(40):
        earlier.suggest()
    later.load_state_dict(earlier.state_dict())
    assert later.suggest() is None


def test_quasi_random_covers_the_space_evenly() -> None:
    pytest.importorskip("scipy")
    trials = drive(
        QuasiRandomSearch(),
        lambda config, trial, epoch: 0.0,
        space={"a": uniform(0, 1), "b": uniform(0, 1)},
        epochs=1,
        n_trials=64,
    )
    for name in "ab":
        cells = sorted(int(trial.config[name] * 64) for trial in trials)
        assert cells == list(range(64))  # one in each 64th, which chance would not give


# --- bad input --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SuccessiveHalving(min_epochs=0), "min_epochs must be a whole number"),
        (lambda: Hyperband(reduction_factor=1), "reduction_factor must be a whole number"),
        (lambda: ASHA(variant="other"), "variant must be 'promotion' or 'stopping'"),  # type: ignore[arg-type]
        (lambda: MedianStopping(min_trials=0), "min_trials must be a whole number"),
        (lambda: PBT(quantile=0.6), "quantile must be above 0 and at most 0.5"),
        (lambda: PBT(mutate="lr"), "mutate must be a list of names"),
        (lambda: make_searcher("bayes"), "searcher='bayes' is not known"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


@pytest.mark.parametrize(
    ("searcher", "space", "n_trials", "message"),
    [
        (Hyperband(min_epochs=10), {}, None, "min_epochs=10 is above epochs=9"),
        (SuccessiveHalving(min_epochs=10), {}, None, "give search\\(\\) more epochs"),
        (ASHA(), {}, None, "ASHA never ends by itself"),
        (MedianStopping(), {}, None, "median stopping never ends by itself"),
        (PBT(mutate=["depth"]), {"lr": uniform(0, 1)}, 4, "'depth' does not vary in the space"),
        (PBT(), {"lr": uniform(0, 1)}, 1, "n_trials=2 or more"),
        (TPE(), {"lr": normal(0, 1)}, 4, "lr: normal.* cannot be searched by Optuna"),
    ],
)
def test_searches_that_make_no_sense_are_refused(
    searcher: Searcher, space: dict[str, Any], n_trials: int | None, message: str
) -> None:
    if isinstance(searcher, TPE):
        pytest.importorskip("optuna")
    with pytest.raises(InputError, match=message):
        searcher.setup(
            Space(space), seed=0, epochs=9, n_trials=n_trials, metric="loss", mode="min", points=()
        )
