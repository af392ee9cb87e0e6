"""Progress, tables, plots and HTML, drawn from small made-up runs."""

from __future__ import annotations

import io
import itertools
import math
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.cells import cell_len

from cerebro.errors import InputError
from cerebro.report import block, displays, progress, summary, table
from cerebro.report import format as fmt
from cerebro.report.progress import Snapshot, TrialRow


def make_trial(number: int, values: list[float], **changes: Any) -> Any:
    history = [
        {
            "epoch": e,
            "metrics": {"train_loss": 1.0 / (e + 1), "val_loss": 1.5 - v, "val_accuracy": v},
            "seconds": 0.5,
            "state_hash": f"{number:02d}{e:02d}",
        }
        for e, v in enumerate(values)
    ]
    best = max(range(len(values)), key=values.__getitem__) if values else None
    fields: dict[str, Any] = {
        "number": number,
        "config": {"lr": 10.0 ** -(1 + number % 4), "arch": ["mlp", "cnn"][number % 2], "depth": 3},
        "status": "finished",
        "epoch": len(values),
        "epochs": max(3, len(values)),
        "metrics": history[best]["metrics"] if best is not None else {},
        "history": history,
        "best_epoch": best,
        "error": None,
    }
    return SimpleNamespace(**{"folds": [], **fields, **changes})


def make_result(trials: list[Any], units: list[dict[str, Any]] | None = None) -> Any:
    result = SimpleNamespace(
        trials=trials,
        path="runs/x",
        status="finished",
        metric="accuracy",
        mode="max",
        select="best",
    )
    result.units = lambda: units or []
    result.events = list
    ranked = summary.rank_trials(result)
    result.best = ranked[0] if ranked else None
    return result


def make_units(trials: int, workers: int) -> list[dict[str, Any]]:
    units, clock = [], [0.1 * w for w in range(workers)]
    for epoch in range(2):
        for trial in range(trials):
            worker = trial % workers
            for step in range(4):
                start = clock[worker]
                clock[worker] = start + 0.5
                units.append(
                    {
                        "trial": trial,
                        "epoch": epoch,
                        "step": step,
                        "shard": step if step < 3 else -1,
                        "kind": "train" if step < 3 else "eval",
                        "worker": worker,
                        "attempt": int((trial, epoch, step) == (0, 1, 1)),
                        "start": start,
                        "end": clock[worker],
                        "rows": 100,
                        "hopped": step == 0,
                    }
                )
    return units


@pytest.fixture
def result() -> Any:
    trials = [make_trial(i, [0.5 + 0.01 * i, 0.6 + 0.02 * i, 0.59 + 0.02 * i]) for i in range(6)]
    return make_result(trials, make_units(6, 2))


def snapshot(rows: list[TrialRow], **changes: Any) -> Snapshot:
    fields: dict[str, Any] = {
        "trials": rows,
        "share_done": 0.25,
        "seconds": 10.0,
        "seconds_left": 30.0,
        "busy": 0.9,
        "workers": 2,
        "best": None,
        "metric": "accuracy",
        "mode": "max",
        "path": "runs/x",
    }
    return Snapshot(**{**fields, **changes})


def row(number: int, epoch: int = 0, value: float | None = None, **changes: Any) -> TrialRow:
    metrics = {} if value is None else {"train_loss": 0.5, "val_loss": 0.25, "val_accuracy": value}
    fields: dict[str, Any] = {
        "number": number,
        "config": {"lr": 0.1},
        "status": "running",
        "epoch": epoch,
        "epochs": 4,
        "metrics": metrics,
    }
    return TrialRow(**{**fields, **changes})


# --- how things are written ---


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.98123, "0.9812"),
        (3.14e-5, "3.14e-5"),
        (1e-4, "1e-4"),
        (50_620.4, "50620"),
        (64, "64"),
        (1_000_000, "1,000,000"),
        (0.0, "0"),
        (math.inf, "inf"),
        (True, "True"),
        ("cnn", "cnn"),
        (None, "None"),
        (np.float64(0.5), "0.5"),
    ],
)
def test_number(value: Any, text: str) -> None:
    assert fmt.number(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (0.98123, "0.9812"),
        (0.0, "0.0000"),
        (5.0001e-4, "5.0001e-4"),
        (5e-4, "5e-4"),
        (50_620.4, "50620"),
        (-123_462.2, "-123462"),
        (1.23456e7, "1.2346e7"),
        (math.nan, "nan"),
        (math.inf, "inf"),
    ],
)
def test_metric(value: float | None, text: str) -> None:
    assert fmt.metric(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.25, "250 ms"),
        (4.21, "4.2 s"),
        (65, "1:05"),
        (7380, "2:03:00"),
        (None, "-"),
        (math.inf, "-"),
    ],
)
def test_duration(seconds: float | None, text: str) -> None:
    assert fmt.duration(seconds) == text


def test_rough_duration() -> None:
    values = [0.2, 4.01, 59.5, 3601, None]
    assert [fmt.rough_duration(v) for v in values] == ["1 s", "5 s", "1:00", "1:00:01", "-"]


@pytest.mark.parametrize(
    ("nbytes", "text"), [(999, "999 bytes"), (1200, "1.2 kB"), (2_500_000_000, "2.5 GB")]
)
def test_size(nbytes: int, text: str) -> None:
    assert fmt.size(nbytes) == text


def test_settings_flatten_and_cut() -> None:
    config = {"lr": 0.01, "augment": {"flip": True}}
    assert fmt.settings(config) == "lr=0.01 augment.flip=True"
    assert fmt.settings(config, 10) == "lr=0.01 a…"


def test_metric_value_prefers_its_own_name_then_validation() -> None:
    metrics = {"train_accuracy": 0.9, "val_accuracy": 0.8}
    assert fmt.metric_value(metrics, "accuracy") == 0.8
    assert fmt.metric_value(metrics, "train_accuracy") == 0.9
    assert fmt.metric_value({"train_accuracy": 0.9}, "accuracy") == 0.9
    assert fmt.metric_value(metrics, "auc") is None


def test_metric_columns() -> None:
    rows = [{"train_loss": 1.0, "val_loss": 1.0, "val_accuracy": 0.5}]
    assert fmt.metric_columns(rows, "accuracy") == ["train_loss", "val_loss", "accuracy"]
    assert fmt.metric_columns(rows, "loss") == ["train_loss", "val_loss", "accuracy"]
    assert fmt.metric_columns([{"train_loss": 1.0}], "loss") == ["train_loss"]
    assert fmt.metric_columns([], "loss") == []


def test_full_names() -> None:
    assert fmt.full_names(["val_loss", "loss", "auc"]) == ["val_loss", "auc"]


# --- progress ---


def test_lines_write_each_epoch_once() -> None:
    out = io.StringIO()
    lines = displays.make_progress("lines", stream=out)
    lines.run_started(snapshot([]))
    lines.update(snapshot([row(0)]))
    done = snapshot([row(0, 1, 0.5, rows_per_second=12345.6)])
    lines.update(done)
    lines.update(done)
    lines.finished(snapshot([row(0, 1, 0.5, status="finished")], share_done=1.0, best=0), None)
    assert out.getvalue().splitlines() == [
        "started with 2 workers, kept in runs/x",
        " 25%, 30 s left: trial 0 epoch 1/4  train loss 0.5000  val loss 0.2500"
        "  accuracy 0.5000  12,346 rows/s",
        "1 finished after 10.0 s; 2 workers 90% busy; best: trial 0",
    ]


def test_lines_say_why_a_trial_failed() -> None:
    out = io.StringIO()
    lines = displays.make_progress("lines", stream=out)
    failed = snapshot([row(3, status="failed", error="ValueError: no such layer")])
    lines.update(failed)
    lines.update(failed)
    assert out.getvalue().splitlines() == [" 25%: trial 3 failed: ValueError: no such layer"]


def test_auto_progress_writes_lines_without_a_terminal() -> None:
    out = io.StringIO()
    display = displays.make_progress("auto", stream=out)
    display.run_started(snapshot([]))
    assert "\x1b" not in out.getvalue()
    assert isinstance(display, progress.Lines)


def test_progress_false_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    silent = displays.make_progress(False)
    silent.run_started(snapshot([]))
    silent.update(snapshot([row(0, 1, 0.5)]))
    silent.finished(snapshot([row(0, 1, 0.5)]), None)
    assert capsys.readouterr() == ("", "")


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(InputError, match="progress='bar'"):
        displays.make_progress("bar")


def test_table_draws_at_most_every_fifth_of_a_second() -> None:
    now = [0.0]
    out = io.StringIO()
    drawing = table.Table(out, clock=lambda: now[0])
    drawing.run_started(snapshot([row(0)]))
    drawn = len(out.getvalue())
    for _ in range(100):
        now[0] += 0.001
        drawing.update(snapshot([row(0)]))
    assert len(out.getvalue()) == drawn
    now[0] += 0.2
    drawing.update(snapshot([row(0)]))
    assert len(out.getvalue()) > drawn
    drawing.finished(snapshot([row(0, 4, 0.5, status="finished")], best=0), None)
    assert "best: trial 0" in out.getvalue()


def render(shot: Snapshot, width: int = 100) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=width)
    console.print(table.make_picture(shot, console))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_a_pause_is_shown_when_the_last_unit_is_done() -> None:
    out, now = io.StringIO(), [0.0]
    lines, drawing = progress.Lines(out), table.Table(io.StringIO(), clock=lambda: now[0])
    drawing.run_started(snapshot([row(0)]))
    pausing = snapshot([row(0, worker=1), row(1)], paused=True)
    resting = snapshot([row(0), row(1)], paused=True)
    for shown in (pausing, resting, resting, snapshot([row(0)])):
        lines.update(shown)
    assert out.getvalue().splitlines() == [
        " 25%: paused; to continue: python -m cerebro continue runs/x",
        " 25%: continued",
    ]
    drawn = table_text(pausing), table_text(resting)
    assert "   pausing   10 s so far" in drawn[0] and "   paused   10 s so far" in drawn[1]
    assert "paus" not in table_text(snapshot([row(0)]))
    before = drawing._drawn
    now[0] += 0.001
    drawing.update(resting)  # nothing else comes, so it is not put off
    assert drawing._drawn > before
    drawing.close()


def table_text(shown: Snapshot) -> str:
    from rich.console import Console

    console = Console(file=io.StringIO(), width=120, height=40)
    with console.capture() as capture:
        console.print(table.make_picture(shown, console))
    return capture.get()


def test_table_has_the_columns_that_matter() -> None:
    text = render(snapshot([row(0, 2, 0.75, rows_per_second=5000.0, worker=1)], best=0), 120)
    for part in ("train loss", "val loss", "accuracy", "rows/s", "worker", "★ 0", "2/4", "0.7500"):
        assert part in text
    for part in ("5,000", "lr=0.1", "25% done", "30 s left", "2 workers 90% busy"):
        assert part in text


def test_table_fits_a_narrow_terminal() -> None:
    text = render(snapshot([row(i, 2, 0.5) for i in range(3)]), 80)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "configuration" not in text


def test_live_trials_come_before_finished_ones_and_the_best_stays() -> None:
    finished = [row(i, 4, 0.5 + i / 100, status="finished") for i in range(20)]
    live = [row(i, 1, 0.1, worker=i - 20) for i in range(20, 22)]
    shown = progress.choose_rows(snapshot([*finished, *live], best=3), 6)
    assert [r.number for r in shown] == [3, 17, 18, 19, 20, 21]
    assert "and 10 more trials" in render(snapshot([*finished, *live], best=3))


def test_after_the_run_the_best_trial_comes_first() -> None:
    rows = [row(i, 4, 0.5 + i / 100, status="finished") for i in range(3)]
    rows.append(row(3, 1, math.nan, status="diverged"))
    assert [r.number for r in progress.choose_rows(snapshot(rows, best=2))] == [2, 1, 0, 3]


# --- text and HTML ---


def test_summary_lists_the_best_first(result: Any) -> None:
    lines = summary.render(result).splitlines()
    assert lines[0] == "runs/x: finished; 6 finished"
    assert lines[2].split() == ["trial", "status", "epochs", "best", "at", "train", "loss", "val",
                                "loss", "accuracy", "lr", "arch"]  # fmt: skip
    assert lines[3].split()[:4] == ["5", "finished", "3", "2"]
    assert "best: trial 5, accuracy 0.7000 after 2 epochs" in lines
    assert "  lr     0.01" in lines
    assert "  depth  3" in lines


def test_summary_lines_up_whatever_the_settings_are(result: Any) -> None:
    for trial in result.trials:
        trial.config["prompt"] = f"Answer\nbriefly.\n{trial.number}"
        trial.config["语言"] = "中文" if trial.number else "English"
        trial.config["z"] = trial.number
    text = summary.render(result)
    heading, *rows = text.split("\n\n")[1].splitlines()
    assert len(rows) == len(result.trials)
    ends = {cell_len(line) for line in rows}  # z is the last column
    assert ends == {cell_len(heading)}
    assert f"\n  prompt  Answer briefly. {result.best.number}\n" in text


def test_summary_without_trials_and_with_failed_trials() -> None:
    assert summary.render(make_result([])) == "runs/x: finished; no trials"
    error = "Traceback ...\nValueError: no such layer"
    failed = [make_trial(i, [], status="failed", error=error) for i in range(3)]
    text = summary.render(make_result(failed))
    assert "trial 0 and 2 more: ValueError: no such layer" in text
    assert "best:" not in text


def test_summary_leaves_the_rest_out(result: Any) -> None:
    assert "and 4 more" in summary.render(result, 2)


def test_trial_text_has_every_epoch(result: Any) -> None:
    text = summary.render_trial(result.trials[1])
    assert text.startswith("trial 1: finished after 3 epochs")
    assert "2 *" in text and "0102" in text  # counted as in the summary, after so many epochs


def test_html_is_static_and_escaped() -> None:
    trial = make_trial(0, [0.5], config={"name": "<script>alert(1)</script>", "lr": 0.1})
    text = block.render_result(make_result([trial]))
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert text.startswith("<div ") and text.endswith("</div>")
    assert "&lt;script&gt;" in block.render_trial(trial)  # a notebook's view of a Trial


# --- plots ---

from cerebro.report import plots  # noqa: E402
from cerebro.report.plots import gantt, settings  # noqa: E402


@pytest.fixture
def matplotlib() -> Any:
    return pytest.importorskip("matplotlib")


@pytest.mark.parametrize("kind", ["curves", "gantt", "parallel", "importance", "slice"])
def test_every_plot_can_be_saved(result: Any, kind: str, matplotlib: Any) -> None:
    figure = plots.plot(result, kind=kind)
    out = io.BytesIO()
    figure.savefig(out, format="png")
    assert out.getvalue().startswith(b"\x89PNG")
    assert figure.axes[0].get_xlabel() or kind == "parallel"


def test_curves_highlight_the_best(result: Any, matplotlib: Any) -> None:
    axes = plots.plot(result).axes[0]
    assert axes.get_ylabel() == "validation accuracy"
    assert axes.get_legend().get_texts()[0].get_text().startswith("trial 5\n")
    widest = max(axes.get_lines(), key=lambda line: line.get_linewidth())
    np.testing.assert_allclose(widest.get_ydata(), [0.55, 0.70, 0.69])
    np.testing.assert_array_equal(widest.get_xdata(), [1, 2, 3])


def test_curves_of_a_loss_take_the_smallest(result: Any, matplotlib: Any) -> None:
    axes = plots.plot(result, "val_loss").axes[0]
    assert axes.get_ylabel() == "validation loss"
    assert axes.get_legend().get_texts()[0].get_text().startswith("trial 5\n")


def test_a_cross_ends_the_finite_part_of_a_curve(matplotlib: Any) -> None:
    trials = [
        make_trial(0, [0.5, 0.6]),
        make_trial(1, [0.3, 0.4, math.nan], status="diverged"),
        make_trial(2, [0.2, math.inf, -math.inf], status="failed"),
        make_trial(3, [0.1, 0.2], status="failed"),
        make_trial(4, [math.nan], status="diverged"),
    ]
    figure = plots.plot(make_result(trials))
    figure.savefig(io.BytesIO(), format="png")
    crosses = [line for line in figure.axes[0].get_lines() if line.get_marker() == "x"]
    points = {(*line.get_xdata(), *line.get_ydata()) for line in crosses}
    assert points == {(2, 0.4), (1, 0.2), (2, 0.2)}


def test_curves_of_one_epoch_have_one_tick(matplotlib: Any) -> None:
    axes = plots.plot(make_result([make_trial(n, [0.5 + n / 10]) for n in range(3)])).axes[0]
    low, high = axes.get_xlim()
    assert [float(tick) for tick in axes.get_xticks() if low <= tick <= high] == [1.0]


def test_curves_name_only_trials_with_a_finite_metric(matplotlib: Any) -> None:
    trials = [make_trial(0, [0.5, 0.6]), make_trial(1, [math.nan] * 2), make_trial(2, [math.nan])]
    trials.append(make_trial(3, [math.nan, 0.4]))  # a single point
    axes = plots.plot(make_result(trials)).axes[0]
    assert axes.get_title("right") == "2 trials, best first; 2 trials without a finite metric"
    named = [text.get_text().split("\n")[0] for text in axes.get_legend().get_texts()]
    assert named == ["trial 0", "trial 3"]
    assert {line.get_marker() for line in axes.get_lines() if len(line.get_xdata()) == 2} == {
        "None",
        "o",
    }
    axes = plots.plot(make_result(trials[1:2])).axes[0]
    assert axes.get_title("right") == "1 trial without a finite metric"
    assert axes.get_ylabel() == "validation accuracy" and not axes.get_legend().get_texts()


def test_gantt_draws_each_worker_and_counts(result: Any, matplotlib: Any) -> None:
    axes = plots.plot(result, kind="gantt").axes[0]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["worker 0", "worker 1"]
    assert axes.get_title("right").startswith("48 units, 12 hops")
    assert sum("busy" in text.get_text() for text in axes.texts) == 2


def test_gantt_joins_adjacent_units_of_one_trial_and_kind(matplotlib: Any) -> None:
    from matplotlib.collections import PolyCollection

    def count_bars(units: list[dict[str, Any]]) -> int:
        result = make_result([make_trial(n, [0.5, 0.6]) for n in range(2)], units)
        axes = plots.plot(result, kind="gantt").axes[0]
        bars = [c for c in axes.collections if isinstance(c, PolyCollection)]
        return sum(len(c.get_paths()) for c in bars)

    units = make_units(2, 1)  # for each trial and epoch: three train units, then one eval unit
    assert count_bars(units) == 2 * 2 * 2
    apart = [{**u, "start": u["start"] + i, "end": u["end"] + i} for i, u in enumerate(units)]
    assert count_bars(apart) == len(units)


def test_gantt_of_a_long_run_has_few_artists(matplotlib: Any) -> None:
    def drawn(epochs: int) -> tuple[int, int]:
        places = itertools.product(range(epochs), range(40), range(9))
        units = [
            {"trial": trial, "epoch": epoch, "step": step, "worker": 0, "rows": 10, "hopped": False,
             "kind": "eval" if step == 8 else "train", "attempt": int(step == 3),
             "start": 1.0 * place, "end": place + 1.0}
            for place, (epoch, trial, step) in enumerate(places)
        ]  # fmt: skip
        result = make_result([make_trial(n, [0.5]) for n in range(40)], units)
        axes = plots.plot(result, kind="gantt").axes[0]
        bars = [c for c in axes.collections if isinstance(c, PolyCollection)]
        return len(axes.get_children()), sum(len(c.get_paths()) for c in bars)

    from matplotlib.collections import PolyCollection

    artists, bars = drawn(1)
    assert artists < 80 and bars == 80
    artists, bars = drawn(30)  # 10,800 units
    assert artists < 80 and 1000 < bars < 2500


def test_gantt_joins_bars_too_narrow_to_see() -> None:
    narrow = [{"trial": n, "kind": "train", "start": n / 4, "end": (n + 1) / 4}
              for n in range(8)]  # fmt: skip
    wide = {"trial": 3, "kind": "eval", "start": 2.0, "end": 500.0}
    late = {"trial": 4, "kind": "train", "start": 999.9, "end": 1000.0}
    bars = gantt._bars([*narrow, wide, late], 0, 1000.0)
    pairs = [(n, "train", n / 4, n / 4 + 0.5) for n in (0, 2, 4, 6)]
    assert [(bar.trial, bar.kind, bar.start, bar.stop) for bar in bars] == [
        *pairs,
        (3, "eval", 2.0, 500.0),
        (4, "train", 999.9, 1000.0),
    ]
    longest = [{"trial": 0, "kind": "train", "start": 0.0, "end": 0.1},
               {"trial": 1, "kind": "eval", "start": 0.1, "end": 0.4}]  # fmt: skip
    (bar,) = gantt._bars(longest, 2, 1000.0)
    assert (bar.row, bar.trial, bar.kind, bar.start, bar.stop) == (2, 1, "eval", 0.0, 0.4)


def test_chosen_trials_only(result: Any, matplotlib: Any) -> None:
    axes = plots.plot(result, trials=[0, 1]).axes[0]
    assert axes.get_title("right") == "2 trials, best first"
    with pytest.raises(InputError, match="no trial 77"):
        plots.plot(result, trials=[0, 77])


def test_impossible_plots_raise_an_error(result: Any, matplotlib: Any) -> None:
    with pytest.raises(InputError, match="kind='pie'"):
        plots.plot(result, kind="pie")
    with pytest.raises(InputError, match="available: train_loss, val_accuracy, val_loss"):
        plots.plot(result, "auc")
    with pytest.raises(InputError, match="no unit has finished"):
        plots.plot(make_result([make_trial(0, [0.5])]), kind="gantt")
    with pytest.raises(InputError, match="two finished trials that differ"):
        plots.plot(make_result([make_trial(0, [0.5])]), kind="importance")


def test_colours_differ() -> None:
    assert len({tuple(round(part, 3) for part in c) for c in gantt.trial_colours(64)}) == 64


def test_explained_variance() -> None:
    metric = np.array([0.1, 0.1, 0.9, 0.9])
    assert settings.explained_variance(["a", "a", "b", "b"], metric).share == pytest.approx(1.0)
    assert settings.explained_variance(["a", "b", "a", "b"], metric).share == 0.0
    assert settings.explained_variance(["a", "a", "a", "a"], metric) is None
    assert settings.explained_variance([1.0, 2.0, 3.0, 4.0], metric) is None  # a group for each
    assert settings.explained_variance([1, 1, 2, 2], np.ones(4)) is None


def test_a_less_important_setting_keeps_a_nonzero_share() -> None:
    accuracies = np.array([0.9219, 0.8364, 0.9405, 0.8810])  # a grid of h and lr
    hidden = settings.explained_variance([16, 16, 32, 32], accuracies)
    rate = settings.explained_variance([0.01, 0.001, 0.01, 0.001], accuracies)
    assert hidden.share == pytest.approx(4 * 0.0158**2 / 0.00642413, rel=1e-4)  # 16 %
    assert rate.share == pytest.approx(4 * 0.03625**2 / 0.00642413, rel=1e-4)  # 82 %
    assert hidden.by_chance == rate.by_chance == pytest.approx(1 / 3)
    for found in (hidden, rate):
        assert found.low <= found.share <= found.high
        assert found.high - found.low > 0.5  # four trials know next to nothing
    assert settings.explained_variance([16, 16, 32, 32], accuracies) == hidden  # no luck in it


def test_more_trials_narrow_the_importance_interval() -> None:
    rng = np.random.default_rng(0)
    kinds, noise = rng.integers(0, 2, 400), rng.normal(size=400)
    found = settings.explained_variance(kinds.tolist(), kinds + noise)
    # Of a variance of 1 + 1/4, a quarter lies between two kinds that are 1 apart.
    assert found.low < 0.2 < found.high
    assert found.high - found.low < 0.12
    nothing = settings.explained_variance(rng.permutation(kinds).tolist(), kinds + noise)
    assert nothing.share < 0.01 and nothing.by_chance == pytest.approx(1 / 399)


def test_importance_reports_too_few_trials(matplotlib: Any) -> None:
    few = [make_trial(n, [0.5 + 0.01 * n]) for n in range(6)]
    axes = plots.plot(make_result(few), kind="importance").axes[0]
    assert axes.get_title("left") == "What mattered: too few trials to tell"
    assert axes.get_title("right") == "6 trials, 20 would do"
    texts = [text.get_text() for text in axes.texts]
    assert all(re.fullmatch(r"\d+% \(\d+ to \d+\)", text) for text in texts) and len(texts) == 2
    many = [make_trial(n, [0.5 + 0.01 * n]) for n in range(20)]
    axes = plots.plot(make_result(many), kind="importance").axes[0]
    assert axes.get_title("left") == "What mattered"
    each = [make_trial(n, [0.5 + 0.01 * n], config={"name": f"n{n}"}) for n in range(4)]
    axes = plots.plot(make_result(each), kind="importance").axes[0]
    assert [text.get_text() for text in axes.texts] == ["unknown"]
    assert axes.get_ylim() == (-0.5, 0.5)


def test_plots_show_the_epoch_that_stands_for_a_trial(matplotlib: Any) -> None:
    trials = [make_trial(0, [0.5, 0.9, 0.6]), make_trial(1, [0.5, 0.7, 0.8])]
    result = make_result(trials)
    accuracies = settings.table_of(result, "accuracy", trials)[1]
    assert accuracies.tolist() == [0.9, 0.8]
    losses = settings.table_of(result, "val_loss", trials)[1]
    assert losses.tolist() == [t.history[t.best_epoch]["metrics"]["val_loss"] for t in trials]
    assert plots.plot(result).axes[0].texts[0].get_text() == "0.9000"
    result.select = "last"
    assert settings.table_of(result, "accuracy", trials)[1].tolist() == [0.8, 0.6]
    assert plots.plot(result).axes[0].texts[0].get_text() == "0.8000"


def test_parallel_axes_show_unused_settings(matplotlib: Any) -> None:
    trials = [make_trial(i, [0.5 + i / 10]) for i in range(4)]
    for trial in trials[:2]:
        trial.config["width"] = 8 * (trial.number + 1)
    axes = plots.plot(make_result(trials), kind="parallel").axes[0]
    assert "not used" in [text.get_text() for text in axes.texts]


def test_a_summary_needs_no_finite_metric():
    nothing = make_trial(0, [math.nan, math.nan])
    assert summary.best_lines(make_result([nothing])) == []
    assert "nan" in summary.render(make_result([nothing]))


def selected_row(number: int, **changes: Any) -> TrialRow:
    """A trial that was best after two of three epochs."""
    last = {"train_loss": 0.1, "val_loss": 0.9, "val_accuracy": 0.6}
    return row(number, 3, 0.75, best_at=2, last=last, **changes)


def test_displays_show_the_selected_epoch_and_its_number() -> None:
    text = render(snapshot([selected_row(0, status="finished")], best=0), 120)
    heading, cells = text.splitlines()[0], text.splitlines()[2]
    assert heading.split()[-6:-3] == ["best", "best", "at"]
    # The last epoch's metrics, then the best epoch's.
    assert cells.split()[2:9] == ["finished", "3/4", "0.1000", "0.9000", "0.6000", "0.7500", "2"]
    assert "best at" not in render(snapshot([row(0, 3, 0.5)]), 120)  # the last epoch stands for it
    narrow = render(snapshot([selected_row(n) for n in range(3)]), 80)
    assert max(len(line) for line in narrow.splitlines()) <= 80

    out = io.StringIO()
    lines = progress.Lines(out)
    lines.update(snapshot([selected_row(0)], seconds_left=None))
    lines.update(snapshot([row(1, 1, 0.5, best_at=1)], seconds_left=None))
    assert out.getvalue().splitlines() == [
        " 25%: trial 0 epoch 3/4  train loss 0.1000  val loss 0.9000  accuracy 0.6000"
        "  best accuracy 0.7500 after 2 epochs",
        " 25%: trial 1 epoch 1/4  train loss 0.5000  val loss 0.2500  accuracy 0.5000",
    ]


def test_a_tie_is_reported() -> None:
    trials = [make_trial(n, values) for n, values in enumerate([[0.5], [0.7], [0.6], [0.7, 0.6]])]
    tied = make_result(trials)
    said = "trials 1 and 3 tie: the lowest number is taken"
    assert summary.best_lines(tied)[-1] == said
    assert said in summary.render(tied) and said in block.render_result(tied)
    rows = [row(n, 1, value) for n, value in enumerate([0.5, 0.7, 0.6, 0.7])]
    assert progress.describe_end(snapshot(rows, best=1)).endswith(f"best: trial 1 ({said})")
    assert progress.describe_end(snapshot(rows[:3], best=1)).endswith("best: trial 1")
    four = [make_trial(n, [0.7]) for n in (4, 0, 9, 2)]
    many = [make_trial(n, [0.7]) for n in range(3, 10)]
    assert [fmt.describe_tie(tying, tying[0], "accuracy") for tying in (four, many)] == [
        "trials 0, 2, 4 and 9 tie: the lowest number is taken",
        "trials 3, 4, 5, 6 and 3 others tie: the lowest number is taken",
    ]
    assert "tie" not in summary.render(make_result(trials[:3]))


def test_workers_are_not_mentioned_before_any_exist():
    nobody = snapshot([], workers=0)
    assert progress.describe_load(nobody) == "" and "worker" not in progress.describe_end(nobody)
    assert progress.describe_load(snapshot([], busy=0.5)) == "2 workers 50% busy"


def test_the_summary_names_the_epoch_that_ranks_the_best_trial():
    result = make_result([make_trial(0, [0.5, 0.7, 0.6])])
    assert summary.best_lines(result)[0].endswith("after 2 epochs")
    result.select = "last"
    assert summary.best_lines(result)[0].endswith("after 3 epochs")


def test_units_that_ran_again_are_marked():
    pytest.importorskip("matplotlib")
    from cerebro.report import plots

    def marks(units: list[dict[str, Any]]) -> int:
        figure = plots.plot(make_result([make_trial(0, [0.5])], units), kind="gantt")
        return sum(line.get_marker() == "v" for line in figure.axes[0].lines)

    units = make_units(1, 1)
    assert marks(units) == 1
    assert marks([{**unit, "attempt": 0} for unit in units]) == 0
