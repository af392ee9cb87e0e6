"""The plot of the metric over each setting."""

from __future__ import annotations

import io
import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from cerebro.errors import InputError
from cerebro.report.format import ABSENT, Range, find_varying
from cerebro.report.plots import plot
from cerebro.report.plots.look import DARK, LIGHT, wrap
from cerebro.report.plots.settings import LEAST_GAP, NOT_USED, _group_values, _position_values

RANGES = {
    "lr": Range(1e-4, 1e-1, is_log=True),
    "momentum": Range(0.0, 1.0),
    "hidden": Range(options=(16, 64, 256), is_log=True),
    "act": Range(options=("tanh", "relu", "boom")),
}


def result(**changes: Any) -> Any:
    trials = []
    for n in range(8):
        status = {5: "stopped", 6: "failed", 7: "diverged"}.get(n, "finished")
        value = [0.5 + n / 20, math.nan][n == 7]
        history = [{"epoch": 0, "metrics": {"val_accuracy": value}}] if n != 6 else []
        config = {
            "lr": 10 ** -(1 + n / 3),
            "momentum": n / 10,
            "hidden": (16, 64, 256)[n % 3],
            "act": "boom" if n == 6 else ("relu", "tanh")[n % 2],
            "depth": 3,
        }
        if n < 2:
            del config["momentum"]
        trials.append(
            SimpleNamespace(number=n, status=status, config=config, history=history, best_epoch=0)
        )
    saved = SimpleNamespace(ranges=lambda: RANGES)
    fields = {"trials": trials, "metric": "accuracy", "mode": "max", "select": "best"}
    return SimpleNamespace(**{**fields, "saved": saved, **changes})


def panels(figure: Any) -> dict[str, Any]:
    return {axes.get_xlabel(): axes for axes in figure.axes if axes.get_visible()}


def test_each_varying_setting_gets_a_panel_with_the_axis_of_the_space() -> None:
    found = panels(plot(result(), kind="slice"))
    assert list(found) == ["lr", "hidden", "act", "momentum"]
    assert found["lr"].get_xscale() == "log" and found["momentum"].get_xscale() == "linear"
    ticks = {name: [t.get_text() for t in found[name].get_xticklabels()] for name in found}
    assert ticks["hidden"] == ["16", "64", "256"]
    assert ticks["act"] == ["tanh", "relu", "boom"]  # in the order of the space
    assert found["momentum"].get_title("right") == "2 trials without it"
    assert found["lr"].get_ylabel() == "validation accuracy"


def test_every_trial_is_drawn_at_its_values() -> None:
    axes = panels(plot(result(), kind="slice"))["lr"]
    marks = [tuple(map(float, p)) for marks in axes.collections for p in marks.get_offsets()]
    expected = [(10 ** -(1 + n / 3), 0.5 + n / 20) for n in range(6)]
    # Failed and diverged trials have no metric: they are on the lower edge.
    expected += [(10 ** -(1 + n / 3), 0.03) for n in (6, 7)]
    for points in (marks, expected):
        points.sort(key=lambda point: -point[0])
    assert marks == [pytest.approx(point) for point in expected]


def test_the_marks_are_explained_if_they_occur() -> None:
    (legend,) = plot(result(), kind="slice").legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == ["best", "finished", "ended early", "failed or diverged"]
    whole = result()
    whole.trials = whole.trials[:5]
    (legend,) = plot(whole, kind="slice").legends
    assert [text.get_text() for text in legend.get_texts()] == ["best", "finished"]


def test_category_marks_are_separate_and_reproducible() -> None:
    from matplotlib.collections import PathCollection

    def places() -> list[float]:
        axes = panels(plot(result(), kind="slice"))["act"]
        # hlines, which mark medians, are not PathCollections
        marks = [m for m in axes.collections if isinstance(m, PathCollection)]
        return [float(x) for m in marks for x, _ in m.get_offsets()]

    assert places() == places()
    assert len(set(places())) == len(places())


def test_without_a_recorded_space_the_values_choose_the_axis() -> None:
    found = panels(plot(result(saved=None), kind="slice"))
    assert found["lr"].get_xscale() == "log" and found["momentum"].get_xscale() == "linear"
    assert found["hidden"].get_xscale() == "linear"


def test_very_bad_trials_make_the_metric_logarithmic() -> None:
    bad = result(metric="loss", mode="min")
    for one in bad.trials:
        for entry in one.history:
            entry["metrics"] = {"val_loss": 10.0**one.number}
    assert panels(plot(bad, kind="slice"))["lr"].get_yscale() == "log"


def test_impossible_slices_raise_an_error() -> None:
    alike = result()
    for one in alike.trials:
        one.config = {"lr": 0.1}
    with pytest.raises(InputError, match="kind='slice': needs two finished trials that differ"):
        plot(alike, kind="slice")
    with pytest.raises(InputError, match="no trial has it yet; available: val_accuracy"):
        plot(result(), "auc", kind="slice")


@pytest.mark.parametrize("kind", ["curves", "parallel", "importance", "slice"])
def test_plots_have_the_color_of_their_page(kind: str) -> None:
    from matplotlib.colors import to_hex

    for dark, look in ((False, LIGHT), (True, DARK)):
        figure = plot(result(), kind=kind, dark=dark)
        assert to_hex(figure.get_facecolor()) == look.page
        assert {to_hex(a.get_facecolor()) for a in figure.axes if a.get_visible()} == {look.page}


def test_overlapping_axis_labels_are_replaced_by_marks() -> None:
    _, ticks = _position_values([1.0, 1.01, 2.0])
    places = sorted(place for place, _ in ticks)
    gaps = [b - a for a, b in itertools.pairwise(places)]
    assert min(gaps) >= LEAST_GAP and len(ticks) == 5
    assert [text for _, text in _position_values([1.0, 1.5, 2.0])[1]] == ["1", "1.5", "2"]


def test_a_run_with_only_nan_metrics_is_drawn() -> None:
    bad = result()
    for one in bad.trials:
        for entry in one.history:
            entry["metrics"] = {"val_accuracy": math.nan}
    (lr, *_) = panels(plot(bad, kind="slice")).values()
    assert {float(y) for marks in lr.collections for _, y in marks.get_offsets()} == {0.03}


@pytest.mark.parametrize("kind", ["curves", "parallel", "importance", "slice"])
def test_dollar_signs_are_not_read_as_formulas(kind: str) -> None:
    dear = result()
    for one in dear.trials:
        one.config = {"$a_{$": f"${one.number}\\frac$", "lr": one.config["lr"]}
    for entry in (entry for one in dear.trials for entry in one.history):
        entry["metrics"] = {"val_$_{$": entry["metrics"]["val_accuracy"]}
    dear.metric = "$_{$"
    figure = plot(dear, kind=kind)
    figure.savefig(io.BytesIO(), format="png", dpi=20)


@pytest.mark.parametrize(
    ("high", "labels"),
    [(0.008, ["0.001", "0.002", "0.005"]), (0.1, ["0.001", "0.003", "0.01", "0.03", "0.1"])],
)
def test_a_log_axis_has_few_labels(high: float, labels: list[str]) -> None:
    from matplotlib.figure import Figure

    from cerebro.report.plots.settings import _label_few

    axes = Figure().add_subplot()
    axes.set_xscale("log")
    axes.set_xlim(0.0009, 1.1 * high)
    _label_few(axes, [0.001, high])
    shown = axes.get_xticklabels(minor=False) + axes.get_xticklabels(minor=True)
    low, end = axes.get_xlim()
    texts = [text.get_text() for text in shown if low <= text.get_position()[0] <= end]
    assert [text for text in texts if text] == labels


def test_crosses_lie_within_the_axes() -> None:
    apart = result()
    for one, place in zip(apart.trials[6:], (1e-7, 10.0), strict=True):  # failed and diverged
        one.config |= {"lr": place, "momentum": 100 * place}
    found = panels(plot(apart, kind="slice"))
    for name, ends in (("lr", (1e-7, 10.0)), ("momentum", (1e-5, 1000.0))):
        low, high = found[name].get_xlim()
        assert low < ends[0] and ends[1] < high


def test_a_trial_without_a_finite_metric_is_a_cross() -> None:
    bad = result()
    bad.trials = bad.trials[:5]
    bad.trials[4].history[0]["metrics"] = {"val_accuracy": math.nan}
    figure = plot(bad, kind="slice")
    (legend,) = figure.legends
    texts = [text.get_text() for text in legend.get_texts()]
    assert texts == ["best", "finished", "no finite metric"]
    lr = panels(figure)["lr"]
    crosses = [marks for marks in lr.collections if len(marks.get_paths()[0]) == 4]
    points = [tuple(map(float, point)) for marks in crosses for point in marks.get_offsets()]
    assert points == [(pytest.approx(bad.trials[4].config["lr"]), 0.03)]
    assert sum(len(marks.get_offsets()) for marks in lr.collections) == 5


def ticks_of(values: list[Any], options: tuple[Any, ...] = ()) -> list[str]:
    """Draw one trial for each value of a setting; return the ticks of its panel."""
    some = result(saved=SimpleNamespace(ranges=lambda: {"act": Range(options=options)}))
    some.trials = some.trials[:5]
    for one, value in zip(some.trials, values, strict=True):
        one.config = {"act": value}
    axes = panels(plot(some, kind="slice"))["act"]
    marks = [x for m in axes.collections for x, _ in getattr(m, "get_offsets", list)()]
    assert sorted(round(float(x)) for x in marks if x) == list(range(len(values)))
    return [text.get_text() for text in axes.get_xticklabels()]


def test_category_labels_stay_distinct() -> None:
    long = [f"resnet_variant_number_{n}" for n in range(5)]
    assert ticks_of(long) == [f"resnet_…mber_{n}" for n in range(5)]
    assert ticks_of([1, "1", True, "True", None]) == ["1", "'1'", "True", "'True'", "None"]
    space = (None, "True", True, "1", 1)
    assert ticks_of([1, "1", True, "True", None], space) == ["None", "'True'", "True", "'1'", "1"]


def test_many_categories_do_not_overlap() -> None:
    many = result(saved=None)
    many.trials *= 15
    many.trials = [
        SimpleNamespace(**{**vars(one), "number": n, "config": {"arch": f"net{n}"}})
        for n, one in enumerate(many.trials)
    ]
    (axes,) = panels(plot(many, kind="slice")).values()
    labels = axes.get_xticklabels()
    assert len(labels) == 24 and {label.get_rotation() for label in labels} == {90.0}
    assert axes.get_xlim() == (-0.5, 119.5)
    places, ticks = _position_values([f"net{n}" for n in range(100)])
    assert len(set(places)) == 100 and len(ticks) == 25


def test_parallel_axes_follow_the_space() -> None:
    numbers = [0.001, 0.002, 0.004, 0.9]
    middle = {known: _position_values(numbers, RANGES[known])[0][2] for known in ("lr", "momentum")}
    assert middle["momentum"] == pytest.approx(0.003 / 0.899)
    assert middle["lr"] == pytest.approx(math.log(4) / math.log(900))
    assert _position_values([0.01, 0.02, 0.03], RANGES["lr"])[0][1] == pytest.approx(
        math.log(2) / math.log(3)
    )
    places, ticks = _position_values(["relu", "tanh", "relu"], RANGES["act"])
    assert places == [1.0, 0.0, 1.0] and ticks == [(0.0, "tanh"), (1.0, "relu")]


def test_none_is_a_value_and_not_an_absent_setting() -> None:
    places, ticks = _position_values(
        ["relu", None, "tanh", ABSENT], Range(options=("relu", "tanh", None))
    )
    assert places == [0.0, 1.0, 0.5, NOT_USED]
    assert ticks == [(0.0, "relu"), (0.5, "tanh"), (1.0, "None"), (NOT_USED, "not used")]
    assert find_varying([{"act": None, "lr": 1}, {"lr": 1}]) == ["act"]
    # Numbers are grouped into four ranges; neither None nor an absent setting belongs to them.
    groups = _group_values([*range(8), None, ABSENT])
    assert groups == [*"00112233", "None", "absent"]


LONG = "a_very_long_name_of_a_setting_that_goes_on_and_on"


@pytest.mark.parametrize("style", ["default", "ggplot"])  # Optuna's plots turn ggplot on
@pytest.mark.parametrize("kind", ["curves", "parallel", "importance", "slice"])
def test_long_names_fit(kind: str, style: str) -> None:
    import matplotlib.style

    with matplotlib.style.context(style, after_reset=True):
        _check_long_names(kind)


def _check_long_names(kind: str) -> None:
    from matplotlib.text import Text

    wide = result(saved=None, metric=f"{LONG}_metric")
    for one in wide.trials:
        one.config = {f"{LONG}_{n}": one.number * (n + 1) % 8 for n in range(4)}
    for entry in (entry for one in wide.trials for entry in one.history):
        entry["metrics"] = {f"val_{LONG}_metric": entry["metrics"]["val_accuracy"]}
    figure = plot(wide, kind=kind)
    figure.savefig(io.BytesIO(), format="png")  # lays out
    texts = []
    for axes in (axes for axes in figure.axes if axes.get_visible()):
        titles = {axes.get_title("left"), axes.get_title("right")}
        texts += [t for t in axes.get_children() if isinstance(t, Text) and t.get_text() in titles]
        texts += [axes.xaxis.label, axes.yaxis.label]
        texts += {"parallel": axes.get_xticklabels, "importance": axes.get_yticklabels}.get(
            kind, list
        )()
    boxes = [text.get_window_extent() for text in texts if text.get_text()]
    for box in boxes:
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1
        assert figure.bbox.y0 <= box.y0 and box.y1 <= figure.bbox.y1
    assert not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_long_names_wrap_between_their_parts() -> None:
    assert wrap("optimizer.weight_decay", 12, 3) == "optimizer.\nweight_decay"
    assert wrap("lr", 12, 3) == "lr"
    text = wrap("x" * 50 + "_1", 10, 3)
    assert text.endswith("xx_1") and "…" in text
    assert max(map(len, text.split("\n"))) == 10 and text.count("\n") == 2
