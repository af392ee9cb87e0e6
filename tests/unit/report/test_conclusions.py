"""Noise, ties, what more trials would bring and what to try next, on constructed results."""

from __future__ import annotations

import itertools
import math
import re
from statistics import fmean, stdev
from types import SimpleNamespace
from typing import Any

import pytest

from cerebro.report import noise, summary
from cerebro.report.conclusions import (
    Facts,
    conclude,
    expected_best,
    find_end,
    find_separating_settings,
    more_trials,
    name_trials,
)
from cerebro.report.format import Range

ROWS = Facts(train_rows=1000, validation_rows=270, searcher="random")


def trial(number: int, values: list[float], metric: str = "accuracy", **changes: Any) -> Any:
    """Make a trial with these validation metrics after its epochs."""
    history = [{"epoch": e, "metrics": {f"val_{metric}": v}} for e, v in enumerate(values)]
    pick = max if metric == "accuracy" else min
    best = pick(range(len(values)), key=values.__getitem__) if values else None
    fields: dict[str, Any] = {
        "number": number,
        "config": {"lr": 0.01},
        "status": "finished",
        "epoch": len(values),
        "epochs": len(values),
        "metrics": {} if best is None else history[best]["metrics"],
        "history": history,
        "best_epoch": best,
        "error": None,
        "folds": [],
    }
    return SimpleNamespace(**{**fields, **changes})


def of(trials: list[Any], facts: Facts = ROWS, **changes: Any) -> Any:
    fields = {"metric": "accuracy", "mode": "max", "select": "best", "status": "finished"}
    result = SimpleNamespace(**{**fields, "trials": trials, "path": "runs/x", **changes})
    return conclude(result, summary.rank_trials(result), facts)


# --- noise ---


def test_correct_rows_are_counted_from_an_accuracy() -> None:
    assert noise.count_correct_rows("accuracy", [261 / 270, 0.0, 1.0], 270) == [261, 0, 270]
    assert noise.count_correct_rows("top5_accuracy", [0.1], 270) == [27]
    # of float32, which is what models return
    assert noise.count_correct_rows("error", [0.03333333507180214], 270) == [9]
    for name, value in (
        ("accuracy", 0.9665),  # not a whole number of rows: weighted, or over tokens
        ("balanced_accuracy", 0.9),
        ("auc", 0.9),
        ("accuracy", 9.0),  # in percent
    ):
        assert noise.count_correct_rows(name, [value], 270) is None
    assert noise.count_correct_rows("accuracy", [0.5], 0) is None
    # With so many rows, half of all numbers are close to a whole number of them.
    for name in ("mean_absolute_error", "max_error", "token_accuracy", "word_error_rate"):
        assert noise.count_correct_rows(name, [0.5], 10**6) is None
    assert noise.count_correct_rows("top5_error", [0.5], 10**6) == [500_000]


def test_binomial_error_and_interval() -> None:
    assert noise.binomial_error(0.9, 100) == pytest.approx(0.03)
    low, high = noise.wilson_interval(9, 10)
    assert (low, high) == (pytest.approx(0.59585, abs=1e-5), pytest.approx(0.98212, abs=1e-5))
    assert noise.wilson_interval(0, 10)[0] == pytest.approx(0.0, abs=1e-15)
    assert noise.wilson_interval(10, 10)[1] == 1.0
    # The ends are where the score test is just not significant.
    z = 1.959963984540054
    assert abs(0.9 - low) == pytest.approx(z * math.sqrt(low * (1 - low) / 10))


def test_five_rows_never_separate_two_models() -> None:
    assert [noise.is_separable(d) for d in (0, 1, 5, 6, -6)] == [False, False, False, True, True]
    # Rows that only the worse model has right make the p-value larger, never smaller.
    for extra in range(20):
        n = 6 + 2 * extra
        tail = sum(math.comb(n, i) for i in range(extra + 1)) / 2**n
        assert 2 * tail >= 2 * 0.5**6


def test_error_and_difference_over_folds() -> None:
    values = [0.9, 0.92, 0.94]
    assert noise.fold_error(values, 0.5) == pytest.approx(0.02 * math.sqrt(1 / 3 + 1 / 2))
    # Mean difference 0.1, standard deviation 0.01: t is 10 / sqrt(5 / 6) = 10.95.
    others = [value - d for value, d in zip(values, [0.09, 0.10, 0.11], strict=True)]
    assert noise.differ_over_folds(values, others, 0.5) is True
    assert noise.differ_over_folds(values, [0.88, 0.93, 0.91], 0.5) is False


def test_quantiles_of_students_t() -> None:
    stats = pytest.importorskip("scipy.stats")
    for freedom in (*range(1, 60), 1000):
        exact = float(stats.t.ppf(0.975, freedom))
        assert noise.t_quantile(freedom) == pytest.approx(exact, abs=1e-3)


def test_movement_is_measured_around_the_trend() -> None:
    line = [3.0 - 0.5 * i for i in range(6)]
    assert noise.estimate_movement(line) == pytest.approx(0.0, abs=1e-12)
    zigzag = [v + (0.1 if i % 2 else -0.1) for i, v in enumerate(line)]
    assert noise.estimate_movement(zigzag) == pytest.approx(0.4 / math.sqrt(6))
    assert noise.estimate_movement(line[:4]) is None
    assert noise.estimate_movement([*line, math.nan]) is None


# --- more trials ---


@pytest.mark.parametrize("mode", ["max", "min"])
def test_expected_best_is_the_mean_over_all_choices(mode: str) -> None:
    values = [0.3, 0.9, 0.5, 0.5, 0.7, 0.1]
    pick = max if mode == "max" else min
    for draws in range(1, 7):
        choices = itertools.combinations(values, draws)
        assert expected_best(values, draws, mode) == pytest.approx(fmean(map(pick, choices)))


def test_expected_best_of_many_trials_does_not_overflow() -> None:
    assert expected_best(list(range(3000)), 1500, "max") == pytest.approx(1500 * 3001 / 1501 - 1)


def test_the_chance_of_a_new_best_counts_all_orders() -> None:
    orders = list(itertools.permutations(range(5)))
    later = sum(max(order) in order[3:] for order in orders) / len(orders)
    found = more_trials([0.5, 0.6, 0.7, 0.8], 3, "max")
    assert found is not None and found.more == 2
    assert found.chance == pytest.approx(later)


def test_more_trials() -> None:
    found = more_trials([0.5, 0.6, 0.7, 0.8], 6, "max")
    assert found is not None and (found.more, found.chance) == (2, 0.25)
    pairs = fmean(map(max, itertools.combinations([0.5, 0.6, 0.7, 0.8], 2)))
    assert found.gain == pytest.approx(0.8 - pairs)
    assert more_trials([0.5, 0.6, 0.7], 3, "max") is None


# --- conclusions ---


def test_ties_and_noise_of_an_accuracy() -> None:
    counts = {0: 261, 1: 240, 2: 260, 3: 200, 10: 261, 11: 255}
    trials = [trial(n, [0.5, c / 270]) for n, c in counts.items()]
    found = of(trials)
    assert found.sure[0] == (
        "accuracy 0.9667 is 261 of 270 validation rows: standard error 0.0109 (2.9 rows), "
        "95% interval 0.9379 to 0.9824"
    )
    assert found.sure[1] == (
        "trials 0, 10 and 2 are within 1 of 270 rows: McNemar's test cannot separate them at "
        "the 5% level, whichever rows they differ in"
    )
    values = [count / 270 for count in counts.values()]
    half = fmean(map(max, itertools.combinations(values, 3)))
    assert found.sure[2] == (
        "3 more random trials find a new best with a probability of at most 33%, and gain at most "
        f"{261 / 270 - half:.4f} on average, less than the standard error"
    )
    assert len(found.sure) == 3
    assert found.next == [
        "train longer, because trial 0 was best after its last epoch: "
        "cerebro.resume('runs/x', epochs=4, trials=[0])",
        "to separate trials 0, 10 and 2: more validation rows, or folds "
        "(validation=cerebro.KFold(5))",
        "the best of 6 looks better than it is: cerebro.open('runs/x').best.evaluate(test), on "
        "rows that no trial saw, says how good it is",
    ]
    equal = of([trial(0, [0.9]), trial(1, [0.9])])
    assert "trials 0 and 1 are equal on 270 rows" in equal.sure[1]


def test_no_trials_are_compared_at_a_standard_error_of_zero() -> None:
    found = of([trial(n, [0.5 + n / 8]) for n in range(5)], Facts(0, 8, searcher="random"))
    assert found.sure[0].startswith("accuracy 1.0000 is 8 of 8 validation rows: standard error 0.0")
    assert found.sure[-1].endswith("on average")


def test_best_epoch_and_last() -> None:
    found = of([trial(0, [0.6, 0.9, 0.8, 0.7, 0.7])])
    assert found.sure[1:] == [
        "trial 0 was best after 2 of 5 epochs; after the last, accuracy is 0.7000"
    ]
    assert found.next == [
        "train shorter, or regularize: trial 0 was best after 2 of 5 epochs, and became worse"
    ]
    # Within the standard error of 0.0183, the fall may be noise.
    assert of([trial(0, [0.6, 0.9, 243 / 270, 243 / 270, 240 / 270])]).next == []
    last = of([trial(0, [0.6, 0.9, 0.8])], select="last")
    assert not any("was best" in line for line in last.sure)


def test_longer_training_is_not_advised_for_stopped_trials() -> None:
    trials = [trial(0, [0.5, 0.6], status="stopped"), trial(1, [0.1, 0.2, 0.3])]
    assert not any("train longer" in line for line in of(trials).next)


def test_a_loss_has_no_invented_error() -> None:
    values = [1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2]
    trials = [trial(0, values, "loss"), trial(1, [0.9] * 7, "loss"), trial(2, [0.2] * 7, "loss")]
    found = of(trials, metric="loss", mode="min")
    moved = noise.estimate_movement(values[-6:])
    assert moved is not None
    assert found.sure == [
        "loss 0.2000 on 270 validation rows: the noise of these rows is unknown, because a run "
        "records means, not rows",
        f"trial 0 moves around its trend by about {moved:.4f} per epoch (its last 6 epochs)",
        "trials 0 and 2 differ by less than that",
    ]
    assert not any("standard error" in line for line in found.sure)
    short = of([trial(0, [0.5, 0.4], "loss")], metric="loss", mode="min")
    assert len(short.sure) == 1


def test_no_gain_is_estimated_from_very_bad_trials() -> None:
    trials = [trial(n, [v], "loss") for n, v in enumerate([0.3, 0.5, 1e12, 1e13])]
    found = of(trials, metric="loss", mode="min")
    assert (
        found.sure[-1] == "2 more random trials find a new best with a probability of at most 33%"
    )


def with_folds(number: int, values: list[float]) -> Any:
    folds = [trial(3 * number + f, [v], fold=f) for f, v in enumerate(values)]
    whole = trial(number, [fmean(values)], folds=folds)
    whole.metrics = {"accuracy": fmean(values), "accuracy_std": stdev(values)}
    return whole


def test_folds_decide_whether_trials_differ() -> None:
    trials = [
        with_folds(0, [0.90, 0.92, 0.94]),
        with_folds(1, [0.88, 0.93, 0.91]),
        with_folds(2, [0.50, 0.53, 0.54]),
    ]
    found = of(trials, Facts(train_rows=1000, validation_rows=500, searcher="grid"))
    error = 0.02 * math.sqrt(1 / 3 + 1 / 2)
    assert found.sure == [
        "accuracy 0.9200 is the mean of 3 folds, which range from 0.9000 to 0.9400: standard error "
        f"{error:.4f}, corrected for the training rows that folds share",
        "the folds do not separate trials 0 and 1 (t test at 5%)",
    ]
    assert found.next == ["to separate trials 0 and 1: more folds, or more rows"]


def test_training_metrics_say_nothing_about_new_rows() -> None:
    one = trial(0, [0.9])
    one.metrics = {"train_accuracy": 0.9, "accuracy": 0.9}
    found = of([one], Facts(train_rows=1000))
    assert found.sure == [
        "accuracy is that of rows the trials were trained on: it says nothing about new rows"
    ]
    assert found.next == ["rank trials on rows that they are not trained on: validation=0.2"]


def test_without_validation_the_last_epoch_is_nearly_always_the_best() -> None:
    one = trial(0, [0.7, 0.8, 0.9])
    assert any("train longer" in line for line in of([one], Facts(validation_rows=100)).next)
    one.metrics = {"train_accuracy": 0.9, "accuracy": 0.9}
    assert not any("train longer" in line for line in of([one], Facts(train_rows=1000)).next)


def test_diverged_trials_count_against_a_cause_of_failures() -> None:
    trials = [trial(n, [0.5], config={"lr": 0.1}) for n in range(3)]
    for number, status in ((3, "failed"), (4, "failed"), (5, "diverged")):
        trials.append(trial(number, [], config={"lr": 100.0 + number}, status=status))
    lines = of(trials, Facts(validation_rows=100)).next
    assert not any("all 2 failed trials, and no others, have lr" in line for line in lines)


def test_more_trials_are_predicted_only_from_independent_draws() -> None:
    trials = [trial(n, [0.5 + n / 20]) for n in range(6)]
    adaptive = of(trials[::-1], Facts(validation_rows=20, searcher="hyperband"))
    assert not any("more random" in line for line in adaptive.sure)
    trials[1].metrics = {"val_accuracy": 0.95}
    adaptive = of(trials, Facts(validation_rows=20, searcher="TPE"))
    assert "the best is trial 1 of 6: the 4 trials after it found nothing better" in adaptive.sure
    given = of(trials, Facts(validation_rows=20, searcher="random", points=2))
    line = next(line for line in given.sure if "more random" in line)
    assert line.startswith("2 more random trials find a new best with a probability of at most 33%")
    assert of(trials, status="running").next == []
    assert not any("more random" in line for line in of(trials, status="running").sure)


def test_best_values_at_the_end_of_a_range_are_found() -> None:
    log = Range(1e-4, 1e-1, is_log=True)
    assert find_end(log, [0.09, 0.03, 0.05], [0.09, 0.03, 0.05, 1e-3]) == 1
    assert find_end(log, [1e-4, 2e-4, 5e-4], []) == -1
    assert find_end(log, [0.09, 0.03, 1e-3], []) == 0
    assert find_end(log, [0.09, 0.03], []) == 0
    # Three trials further out were worse: the best value is inside the range.
    assert find_end(log, [0.03, 0.03, 0.03], [0.05, 0.06, 0.07]) == 0
    assert find_end(Range(0.0, 1.0), [0.8, 0.76, 0.9], []) == 1
    assert find_end(Range(options=(16, 64, 256)), [256, 256, 256], []) == 1
    assert find_end(Range(options=(16, 64, 256)), [64, 64, 64], []) == 0
    assert find_end(Range(options=(64, 256)), [256, 256, 256], []) == 0
    assert find_end(Range(options=("a", "b", "c")), [], []) == 0


def test_widening_a_too_narrow_range_is_advised() -> None:
    rates = [0.09, 0.05, 0.04, 0.01, 1e-3, 1e-4]
    trials = [trial(n, [(250 - n) / 270], config={"lr": lr}) for n, lr in enumerate(rates)]
    facts = Facts(validation_rows=270, ranges={"lr": Range(1e-4, 1e-1, is_log=True)})
    assert (
        "widen lr: the best 3 trials have 0.09, 0.05, 0.04, and the range ends at 0.1: try values "
        "above it"
    ) in of(trials, facts).next
    assert not any("widen" in line for line in of(trials[:5], facts).next)  # too few to tell


@pytest.mark.parametrize(
    ("known", "values", "is_named"),
    [
        (Range(0.0, 0.9), [0.01, 0.02, 0.04, 0.5, 0.6, 0.7], False),
        (Range(0.1, 0.9), [0.11, 0.12, 0.14, 0.5, 0.6, 0.7], True),
        (Range(1, 9), [1, 1, 2, 5, 6, 7], False),
        (Range(2, 9), [2, 2, 3, 5, 6, 7], True),
        (Range(options=[0, 0.1, 0.2]), [0, 0, 0, 0.1, 0.2, 0.2], False),
    ],
)
def test_ranges_from_zero_or_one_are_not_widened_downwards(
    known: Range, values: list[float], is_named: bool
) -> None:
    facts = Facts(validation_rows=270, ranges={"dropout": known})
    trials = [
        trial(n, [0.9 - 0.1 * n], config={"dropout": value}) for n, value in enumerate(values)
    ]
    found = [line for line in of(trials, facts).next if line.startswith("widen dropout")]
    assert bool(found) == is_named


def test_trials_that_tie_advise_nothing() -> None:
    facts = Facts(validation_rows=270, ranges={"lr": Range(0.01, 0.1)}, searcher="random")
    trials = [trial(n, [0.1 + 0.2], config={"lr": 0.1 - n / 1000}) for n in range(8)]
    found = of(trials, facts)
    assert not any("widen" in line for line in found.next)
    assert not any("gain" in line for line in found.sure)


def test_settings_common_to_failed_trials_are_found() -> None:
    def made(lr: float, act: str, status: str) -> Any:
        return trial(0, [], config={"lr": lr, "act": act, "depth": 3}, status=status)

    good = [made(0.01 * i, "relu", "finished") for i in range(1, 6)]
    bad = [made(0.1 * i, "boom", "failed") for i in range(1, 4)]
    assert find_separating_settings(bad, good) == {"lr": "of 0.1 or more", "act": "= boom"}
    low = [made(1e-3 * i, "relu", "failed") for i in range(1, 4)]
    assert find_separating_settings(low, good) == {"lr": "of 0.003 or less"}
    # 2 / C(4, 2) = 1/3: such a split is likely by chance.
    assert find_separating_settings(bad[:2], good[:2]) == {}
    assert find_separating_settings([], good) == {} == find_separating_settings(bad, [])
    for number, one in enumerate([*good, *bad]):
        one.number = number
    line = "all 3 failed trials, and no others, have act = boom: change it, or repair build"
    scored = [trial(9, [0.9], config=good[0].config)]
    assert line in of([*good, *bad, *scored]).next


def test_categories_that_separate_by_chance_are_ignored() -> None:
    def trials(values: str) -> list[Any]:
        return [SimpleNamespace(config={"act": value}) for value in values]

    # Any of five pairs could have failed: 5 of C(10, 2) = 45 choices, not 2.
    assert find_separating_settings(trials("aa"), trials("bbccddee")) == {}
    assert find_separating_settings(trials("aa"), trials("bbbbbbbb")) == {"act": "= a"}  # 1 of 45


def test_long_lists_of_trial_names_are_shortened() -> None:
    assert name_trials([3]) == "trial 3"
    assert name_trials([0, 2, 10]) == "trials 0, 2 and 10"
    assert name_trials(list(range(8))) == "trials 0, 1, 2, 3, 4 and 3 more"


def test_the_summary_wraps_and_titles_the_lines() -> None:
    result = SimpleNamespace(
        trials=[trial(0, [0.5, 0.9]), trial(1, [0.2, 0.3])],
        metric="accuracy", mode="max", select="best", status="finished", path="runs/x",
        events=list,
    )  # fmt: skip
    result.best = result.trials[0]
    text = summary.render(result)
    assert (
        "\n\nhow reliable these numbers are\n- accuracy 0.9000: the noise of these rows is unknown"
        in text
    )
    assert "\n\nwhat to try next\n- train longer, because trial 0" in text
    lines = text[text.index("how reliable") :].splitlines()
    assert max(map(len, lines)) <= summary.WIDTH
    assert all(re.match(r"- |  |$|how reliable|what to try", line) for line in lines)


def test_nothing_is_concluded_without_finite_metrics() -> None:
    for trials in ([], [trial(0, [])], [trial(0, [math.nan])]):
        found = of(trials)
        assert (found.sure, found.next) == ((), ())
