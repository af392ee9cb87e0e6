"""`cerebro.ray.fit`: Tune's algorithms in one process, no cluster."""

from __future__ import annotations

import contextlib
import functools
import json
import random
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tune_models import SPACE_LR, build, build_or_fail, line_data

import cerebro
from cerebro.errors import InputError
from cerebro.machine.imports import install_hint

ray = pytest.importorskip("ray")
tune = pytest.importorskip("ray.tune")
from ray.tune import schedulers, search  # noqa: E402

from cerebro.integrations.ray_tune.searcher import TuneSearcher  # noqa: E402
from cerebro.ray import fit  # noqa: E402

OPTIONS: dict[str, Any] = {"batch_size": 16, "workers": 0, "progress": False, "validation": 0.25}
SPACE = {"lr": tune.loguniform(*SPACE_LR)}


def optuna_search(**options: Any) -> Any:
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return pytest.importorskip("ray.tune.search.optuna").OptunaSearch(**options)


def median() -> Any:
    return schedulers.MedianStoppingRule(time_attr="training_iteration", grace_period=1)


def asha() -> Any:
    return schedulers.ASHAScheduler(max_t=9, grace_period=1, reduction_factor=3)


def hyperband() -> Any:
    return schedulers.HyperBandScheduler(max_t=9, reduction_factor=3)


class Interrupt:
    """Ctrl-C after so many epochs."""

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def on_epoch_end(self, trial: Any, metrics: Any) -> None:
        self.epochs -= 1
        if self.epochs == 0:
            raise KeyboardInterrupt


def outcome(result: cerebro.Result) -> list[Any]:
    return [(t.number, t.config, t.status, t.epoch, t.state_hash) for t in result.trials]


@contextlib.contextmanager
def stored(run: Path, key: str) -> Iterator[dict[str, Any]]:
    """Change what a run's store has under a key."""
    with contextlib.closing(sqlite3.connect(run / "run.sqlite")) as store, store:
        (text,) = store.execute("SELECT value FROM meta WHERE key = ?", [key]).fetchone()
        value = json.loads(text)
        yield value
        store.execute("UPDATE meta SET value = ? WHERE key = ?", [json.dumps(value), key])


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> cerebro.Dataset:
    return line_data(tmp_path_factory.mktemp("line") / "data")


@pytest.mark.parametrize("scheduler", [asha, hyperband, median])
@pytest.mark.parametrize("searcher", [False, True])
def test_the_outcome_does_not_depend_on_workers_or_the_process(
    scheduler: Any, searcher: bool, data: cerebro.Dataset, tmp_path: Path
) -> None:
    found = []
    for workers in (0, 2):
        np.random.seed(workers)
        random.seed(workers)
        result = fit(
            *(build, data),
            param_space=SPACE,
            scheduler=scheduler(),
            searcher=optuna_search(seed=1) if searcher else None,
            num_samples=12,
            epochs=9,
            run=tmp_path / f"{workers}",
            **{**OPTIONS, "workers": workers},
        )
        found.append(outcome(result))
        assert len(result.trials) == 12
        assert any(trial.status == "stopped" for trial in result.trials)
        assert any(trial.status == "finished" and trial.epoch == 9 for trial in result.trials)
    assert found[0] == found[1]


def test_asha_stops_what_tunes_rule_stops(data: cerebro.Dataset, tmp_path: Path) -> None:
    """The rule worked out by hand from the results, in the order of rounds."""
    result = fit(
        *(build, data), param_space=SPACE, scheduler=asha(), num_samples=9, run=tmp_path / "run",
        width=9, **OPTIONS,
    )  # fmt: skip
    left = list(range(9))
    for rung in (1, 3):
        seen: list[float] = []
        for number in list(left):
            value = -result.trials[number].history[rung - 1]["metrics"]["loss"]
            if seen and value < np.nanpercentile(seen, (1 - 1 / 3) * 100):
                assert (result.trials[number].epoch, result.trials[number].status) == (
                    rung,
                    "stopped",
                )
                left.remove(number)
            seen.append(value)
    assert [t.number for t in result.trials if t.status == "finished"] == left


def test_hyperband_halves_its_brackets(data: cerebro.Dataset, tmp_path: Path) -> None:
    """Its first bracket is one of max_t 9 epochs at once; the next ones halve."""
    result = fit(
        *(build, data), param_space=SPACE, scheduler=hyperband(), num_samples=17,
        run=tmp_path / "run", **OPTIONS,
    )  # fmt: skip
    assert sorted(trial.epoch for trial in result.trials) == [1] * 6 + [3] * 5 + [9] * 6
    statuses = {trial.status for trial in result.trials if trial.epoch < 9}
    assert statuses == {"stopped"}
    store = cerebro.open(tmp_path / "run")
    assert store.status == "finished"


def test_plain_variants_match_those_of_tunes_generator(
    data: cerebro.Dataset, tmp_path: Path
) -> None:
    """Grids times samples, functions, constants (lists too), points: as BasicVariantGenerator."""
    space = {
        "lr": tune.grid_search([0.01, 0.1]),
        "net": {"width": tune.randint(4, 9), "act": "relu", "layers": [8, 8]},
        "twice": tune.sample_from(lambda spec: 2 * spec.config.net.width),
    }
    generator = search.BasicVariantGenerator(points_to_evaluate=[{"lr": 0.05}], random_state=3)
    result = fit(
        *(build, data), param_space=space, searcher=generator, num_samples=3, epochs=1,
        run=tmp_path / "run", **OPTIONS,
    )  # fmt: skip
    configs = [trial.config for trial in result.trials]
    assert [config["lr"] for config in configs] == [0.05, 0.01, 0.1, 0.01, 0.1]
    assert all(c["twice"] == 2 * c["net"]["width"] and 4 <= c["net"]["width"] < 9 for c in configs)
    assert all(c["net"]["act"] == "relu" and c["net"]["layers"] == [8, 8] for c in configs)
    theirs = search.variant_generator.generate_variants({"config": space}, random_state=3)
    drawn = next(theirs)[1]["config"]["net"]["width"]  # with the generator's own random state
    assert configs[0]["net"]["width"] == drawn


def test_tuples_reach_build_as_tuples(data: cerebro.Dataset, tmp_path: Path) -> None:
    seen: list[Any] = []

    def build_with_layers(config: dict[str, Any]) -> Any:
        seen.append(config["net"])
        return build(config)

    nets = [{"layers": (3, 3)}, {"layers": [[5], (5, 5)]}]
    result = fit(
        *(build_with_layers, data), param_space={"lr": 0.1, "net": tune.grid_search(nets)},
        epochs=1, run=tmp_path / "run", **OPTIONS,
    )  # fmt: skip
    assert [trial.config["net"] for trial in result.trials] == nets
    assert all(net in nets for net in seen) and len(seen) >= 2


@pytest.mark.parametrize("stop_after", [3, 9, 14])
def test_an_interrupted_run_resumes(stop_after: int, data: cerebro.Dataset, tmp_path: Path) -> None:
    def again(run: str, **more: Any) -> cerebro.Result:
        return fit(
            *(build, data), param_space=SPACE, searcher=optuna_search(seed=4),
            scheduler=hyperband(), num_samples=10, run=tmp_path / run, **OPTIONS, **more,
        )  # fmt: skip

    with pytest.raises(KeyboardInterrupt):
        again("broken", callbacks=[Interrupt(stop_after)])
    assert outcome(again("broken", if_exists="resume")) == outcome(again("whole"))


def test_resume_refuses_a_searcher_that_does_not_repeat_itself(
    data: cerebro.Dataset, tmp_path: Path
) -> None:
    class Interrupt:
        def on_epoch_end(self, trial: Any, metrics: Any) -> None:
            if trial.number == 2:
                raise KeyboardInterrupt

    arguments: dict[str, Any] = {
        "param_space": SPACE, "scheduler": None, "num_samples": 6, "epochs": 2, **OPTIONS,
        "run": tmp_path / "run",
    }  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        fit(build, data, searcher=optuna_search(seed=1), callbacks=[Interrupt()], **arguments)
    with pytest.raises(InputError, match="does not repeat its suggestion for trial"):
        fit(build, data, searcher=optuna_search(seed=2), if_exists="resume", **arguments)


ASHA = schedulers.ASHAScheduler


@pytest.mark.parametrize(
    ("before", "now", "message"),
    [
        (
            lambda: ASHA(max_t=9, reduction_factor=2),
            lambda: ASHA(max_t=9, reduction_factor=8),
            r"scheduler was Async.*\(reduction_factor=2\), is .*\(reduction_factor=8\): make it",
        ),
        (
            lambda: ASHA(max_t=9, grace_period=4),
            lambda: ASHA(max_t=9, grace_period=1),
            r"scheduler was .*\(grace_period=4\), is .*\(grace_period=1\): ",
        ),
        (
            hyperband,
            lambda: schedulers.HyperBandScheduler(max_t=9, reduction_factor=2),
            r"scheduler was HyperBandS.*\(reduction_factor=3\), is .*\(reduction_factor=2\): ",
        ),
        (median, asha, r"scheduler was MedianStoppingRule\(.*, is AsyncHyperBandScheduler\("),
        (
            asha,
            lambda: None,
            r"searcher was TuneSearcher\(searcher=BasicVariantGenerator, scheduler=AsyncHyperBandS"
            r".*, is TuneSearcher\(.*, scheduler=FIFOScheduler\(\)\)",
        ),
    ],
)
def test_a_run_resumes_only_with_the_same_scheduler(
    before: Any, now: Any, message: str, data: cerebro.Dataset, tmp_path: Path
) -> None:
    again = functools.partial(
        *(fit, build, data), param_space=SPACE, num_samples=12, epochs=9, run=tmp_path / "run",
        if_exists="resume", **OPTIONS,
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        again(scheduler=before(), callbacks=[Interrupt(12)])
    with pytest.raises(InputError, match=message):
        again(scheduler=now())
    assert len(again(scheduler=before()).trials) == 12


def test_a_scheduler_that_decides_differently_is_named(
    data: cerebro.Dataset, tmp_path: Path
) -> None:
    again = functools.partial(
        *(fit, build, data), param_space=SPACE, num_samples=12, epochs=9, run=tmp_path / "run",
        if_exists="resume", **OPTIONS,
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        again(scheduler=ASHA(max_t=9, grace_period=4), callbacks=[Interrupt(30)])
    with stored(tmp_path / "run", "searcher") as state:
        state["scheduler"][1].clear()  # as if another version of Ray showed none of them
    named = "the scheduler AsyncHyperBandScheduler does not repeat its decision about trial"
    with pytest.raises(InputError, match=named):
        again(scheduler=ASHA(max_t=9, grace_period=1))
    assert len(again(scheduler=ASHA(max_t=9, grace_period=4)).trials) == 12


def test_one_scheduler_serves_several_searches(data: cerebro.Dataset, tmp_path: Path) -> None:
    scheduler = asha()
    first, second = (
        fit(
            *(build, data), param_space=SPACE, scheduler=scheduler, num_samples=9,
            run=tmp_path / run, **OPTIONS,
        )
        for run in ("first", "second")
    )  # fmt: skip
    assert outcome(first) == outcome(second)


@pytest.mark.parametrize("searcher", [False, True])
@pytest.mark.parametrize("scheduler", [lambda: None, asha, median])
@pytest.mark.parametrize("stop_after", [None, 4])
def test_more_samples_are_added_to_a_run(
    scheduler: Any, searcher: bool, stop_after: int | None, data: cerebro.Dataset, tmp_path: Path
) -> None:
    """The run, finished or interrupted, becomes that of one call, if no trial had ended early."""

    def again(run: str, num_samples: int, **more: Any) -> cerebro.Result:
        return fit(
            *(build, data), param_space=SPACE, searcher=optuna_search(seed=4) if searcher else None,
            scheduler=scheduler(), num_samples=num_samples, epochs=4, width=3, run=tmp_path / run,
            **OPTIONS, **more,
        )  # fmt: skip

    if stop_after is None:
        again("run", 3)
    else:
        with pytest.raises(KeyboardInterrupt):
            again("run", 3, callbacks=[Interrupt(stop_after)])
    result = again("run", 7, if_exists="resume")
    assert result.status == "finished" and len(result.trials) == 7
    if stop_after is not None or scheduler() is None:
        assert outcome(result) == outcome(again("whole", 7))
    units = len(result.units())
    assert len(again("run", 7, if_exists="resume").units()) == units
    with pytest.raises(InputError, match=r"num_samples was 7 and is now 6 \(it can only be incr"):
        again("run", 6, if_exists="resume")


def test_more_samples_of_a_grid_are_added_in_tunes_order(
    data: cerebro.Dataset, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {
        "param_space": {"lr": tune.grid_search([0.01, 0.1]), "x": tune.uniform(0, 1)}, "epochs": 1,
        **OPTIONS,
    }  # fmt: skip
    whole = fit(build, data, num_samples=3, run=tmp_path / "whole", **arguments)
    assert len(fit(build, data, num_samples=1, run=tmp_path / "run", **arguments).trials) == 2
    more = fit(build, data, num_samples=3, run=tmp_path / "run", if_exists="resume", **arguments)
    assert outcome(more) == outcome(whole) and len(more.trials) == 6


@pytest.mark.parametrize(
    ("scheduler", "name"),
    [
        (hyperband, "HyperBandScheduler"),
        (
            lambda: schedulers.MedianStoppingRule(
                time_attr="training_iteration", grace_period=1, hard_stop=False
            ),
            "MedianStoppingRule",
        ),
    ],
)
def test_a_run_with_a_pausing_scheduler_cannot_be_given_more_trials(
    scheduler: Any, name: str, data: cerebro.Dataset, tmp_path: Path
) -> None:
    def again(**more: Any) -> cerebro.Result:
        arguments = {"num_samples": 4, "n_trials": 8, "epochs": 9, "if_exists": "resume", **more}
        return fit(
            *(build, data), param_space=SPACE, scheduler=scheduler(), run=tmp_path / "run",
            **OPTIONS, **arguments,
        )  # fmt: skip

    expected = outcome(again())
    for more in ({"num_samples": 6}, {"n_trials": 9}):
        with pytest.raises(InputError, match=rf"was ., is .: {name} pauses trials"):
            again(**more)
    assert outcome(again()) == expected


def test_failed_trials_are_reported_to_the_searcher_as_errors(
    data: cerebro.Dataset, tmp_path: Path
) -> None:
    told: list[tuple[str, bool]] = []

    class Fixed(search.Searcher):  # type: ignore[misc]
        def suggest(self, trial_id: str) -> Any:
            number = int(trial_id)
            return {"lr": [0.01, 0.3, 0.02][number]} if number < 3 else search.Searcher.FINISHED

        def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
            told.append((trial_id, error))

    result = fit(
        *(build_or_fail, data), param_space={}, searcher=Fixed(), scheduler=hyperband(),
        num_samples=-1, time_limit=600, run=tmp_path / "run", **OPTIONS,
    )  # fmt: skip
    assert [trial.status for trial in result.trials] == ["finished", "failed", "finished"]
    assert sorted(told) == [("00000", False), ("00001", True), ("00002", False)]


def test_a_concurrency_limiter_limits_live_trials(data: cerebro.Dataset, tmp_path: Path) -> None:
    class Watch:
        live: set[int] = set()  # noqa: RUF012
        most = 0

        def on_trial_start(self, trial: Any) -> None:
            self.live.add(trial.number)
            self.most = max(self.most, len(self.live))

        def on_trial_end(self, trial: Any) -> None:
            self.live.discard(trial.number)

    watch = Watch()
    limited = search.ConcurrencyLimiter(optuna_search(seed=0), max_concurrent=2, batch=True)
    result = fit(
        *(build, data), param_space=SPACE, searcher=limited, num_samples=6, epochs=2,
        run=tmp_path / "run", callbacks=[watch], **OPTIONS,
    )  # fmt: skip
    assert len(result.trials) == 6 and watch.most == 2


def test_the_metric_is_taken_from_the_scheduler(data: cerebro.Dataset, tmp_path: Path) -> None:
    scheduler = schedulers.ASHAScheduler(metric="train_loss", mode="min", max_t=2)
    result = fit(
        *(build, data), param_space=SPACE, scheduler=scheduler, num_samples=2, run=tmp_path / "a",
        **OPTIONS,
    )  # fmt: skip
    assert result.saved.settings["metric"] == "train_loss"
    other = schedulers.ASHAScheduler(metric="train_loss", mode="min", max_t=2)
    with pytest.raises(InputError, match="metric='loss', but the scheduler was made with"):
        fit(
            *(build, data), param_space=SPACE, scheduler=other, metric="loss", mode="min",
            num_samples=2, run=tmp_path / "b", **OPTIONS,
        )  # fmt: skip


class Own(schedulers.FIFOScheduler):  # type: ignore[misc]
    pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: {"scheduler": schedulers.PopulationBasedTraining(
                hyperparam_mutations={"lr": [0.1, 0.2]})},
            r"PopulationBasedTraining cannot be driven .*cerebro\.PBT",
        ),
        (lambda: {"scheduler": schedulers.HyperBandForBOHB()}, "HyperBandForBOHB cannot be driven"),
        (
            lambda: {"scheduler": schedulers.ResourceChangingScheduler()},
            "ResourceChangingScheduler cannot be driven",
        ),
        (lambda: {"scheduler": Own()}, r"Own cannot be driven .*tune\.Tuner\(cerebro\.ray"),
        (
            lambda: {"scheduler": schedulers.MedianStoppingRule()},
            "decides by the clock.*time_attr='training_iteration'",
        ),
        (lambda: {"scheduler": "asha"}, "is not a scheduler of ray.tune"),
        (lambda: {"searcher": "optuna"}, "is not a search algorithm of ray.tune"),
        (
            lambda: {"searcher": optuna_search(), "epochs": 1},
            "never ends by itself: give num_samples",
        ),
        (
            lambda: {"searcher": optuna_search(metric=["a", "b"], mode=["min", "max"]),
                     "num_samples": 2, "epochs": 1},
            "several objectives",
        ),
        (dict, "epochs is missing"),
        (lambda: {"epochs": 1, "num_samples": 0}, "num_samples=0 trains nothing"),
        (lambda: {"epochs": 1, "param_space": [1]}, "param_space must be a dictionary"),
        (
            lambda: {"epochs": 1, "num_samples": 2, "points": [{"lr": 1}],
                     "searcher": optuna_search()},
            "give it points_to_evaluate",
        ),
        (
            lambda: {"epochs": 1, "num_samples": 2,
                     "searcher": optuna_search(space={"lr": tune.uniform(0, 1)})},
            "was made with its own space",
        ),
    ],
)  # fmt: skip
def test_unsupported_arguments_are_refused(
    make: Any, message: str, data: cerebro.Dataset, tmp_path: Path
) -> None:
    arguments = {"param_space": SPACE, **make()}
    with pytest.raises(InputError, match=message):
        fit(build, data, run=tmp_path / "run", **arguments, **OPTIONS)
    assert not (tmp_path / "run").exists()


def test_global_generators_are_left_alone(data: cerebro.Dataset, tmp_path: Path) -> None:
    searcher = TuneSearcher(SPACE, search.BasicVariantGenerator(), asha(), 3)
    searcher.setup(
        cerebro.Space({}), seed=0, epochs=9, n_trials=None, metric="loss", mode="min", points=()
    )
    np.random.seed(11)
    expected = np.random.uniform()
    np.random.seed(11)
    searcher.suggest()
    assert np.random.uniform() == expected


def test_nothing_of_ray_is_imported_before_it_is_used() -> None:
    code = (
        "import sys, cerebro, cerebro.ray; from cerebro.ray import fit\n"
        "assert 'ray' not in sys.modules, 'imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_ray_the_error_says_what_to_install(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['ray'] = None\nimport cerebro\n"
        "for name, more in (('fit', {'param_space': {}}), ('trainable', {})):\n"
        "    try: getattr(cerebro.ray, name)(print, 'data', **more)\n"
        "    except cerebro.InputError as error: print(error)"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout.count(f"): {install_hint('ray')}\n") == 2
