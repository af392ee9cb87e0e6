"""Hyperband on handwritten digits, by Cerebro and others: ``python -m benchmarks.bench_hyperband``.

64 configurations of a small convolutional network (`benchmarks.digits`), at most 27 epochs, one in
three is promoted, two workers with one thread each. All train the same configurations in the same
order, with the same initial weights, rows, batch size and optimizer, except Dask-ML, which draws 49
of the 64 as in Hyperband's table. Every search runs in a separate process.

- Seconds until a model has been seen with the accuracy `--target`, and until the search is over:
  from the first epoch's start, and with all that comes before (imports, starting workers). For
  Cerebro an epoch counts when the search knows of it, for others as soon as it has been scored.
- Epochs trained until then, and in all; the best accuracy; memory of the whole tree of processes.

Ratios are to Cerebro's Hyperband.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
import warnings
from pathlib import Path
from typing import Any

import cerebro
from benchmarks import digits, peers
from benchmarks.harness import Bench, parser

EPOCHS, FACTOR = 27, 3
MODULE = "benchmarks.bench_hyperband"
STUDY = "digits"  # Optuna's brackets depend on the study's name


class Told:
    """Records the results that Cerebro's search receives."""

    def __init__(self, log: peers.Log) -> None:
        self._log = log

    def on_run_start(self, run: cerebro.Result) -> None:
        self.began = time.time()

    def on_epoch_end(self, trial: Any, metrics: dict[str, float]) -> None:
        self._log.write("epoch", trial.number, metrics["val_accuracy"])

    def on_run_end(self, result: cerebro.Result) -> None:
        self._log.write("first", self.began + min(unit["start"] for unit in result.units()))


def options_of(place: Path, arguments: Any) -> dict[str, Any]:
    """Arguments shared by all of Cerebro's searches."""
    return {
        "data": cerebro.Dataset(Path(arguments.data, "train")),
        "validation": cerebro.Dataset(Path(arguments.data, "valid")),
        "batch_size": digits.BATCH,
        "workers": peers.CORES,
        "metric": "accuracy",
        "epochs": arguments.epochs,
        "run": place / "run",
        "progress": False,
    }


def by_cerebro(place: Path, arguments: Any, searcher: Any) -> None:
    cerebro.search(
        digits.build,
        digits.SPACE,
        n_trials=arguments.trials,
        searcher=searcher,
        points=digits.CONFIGURATIONS[: arguments.trials],
        callbacks=[Told(peers.Log(place))],
        **options_of(place, arguments),
    )


def cerebro_hyperband(place: Path, arguments: Any) -> None:
    by_cerebro(place, arguments, cerebro.searchers.Hyperband(reduction_factor=FACTOR))


def cerebro_asha(place: Path, arguments: Any) -> None:
    by_cerebro(place, arguments, cerebro.searchers.ASHA(reduction_factor=FACTOR))


def cerebro_asha_by_halves(place: Path, arguments: Any) -> None:
    """Run ASHA as it is by default."""
    by_cerebro(place, arguments, cerebro.searchers.ASHA())


def cerebro_tune(place: Path, arguments: Any) -> None:
    """Run Ray Tune's HyperBand."""
    from ray import tune

    cerebro.ray.fit(
        digits.build_numbered,
        param_space={"index": tune.grid_search(list(range(arguments.trials)))},
        scheduler=tune_hyperband(arguments.epochs),
        mode="max",
        callbacks=[Told(peers.Log(place))],
        **options_of(place, arguments),
    )


def optuna_study(place: Path, arguments: Any) -> Any:
    """Create the study, or open it."""
    import optuna
    from optuna.storages.journal import JournalFileBackend

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    return optuna.create_study(
        study_name=STUDY,
        direction="maximize",
        sampler=optuna.samplers.RandomSampler(seed=0),
        pruner=optuna.pruners.HyperbandPruner(1, arguments.epochs, FACTOR),
        storage=optuna.storages.JournalStorage(JournalFileBackend(str(place / "journal"))),
        load_if_exists=True,
    )


def cerebro_optuna(place: Path, arguments: Any) -> None:
    """Train an Optuna study with Optuna's Hyperband."""
    import cerebro.optuna

    study = optuna_study(place, arguments)
    for index in range(arguments.trials):
        study.enqueue_trial({"index": index})
    cerebro.optuna.optimize(
        study,
        digits.build_suggested,
        n_trials=arguments.trials,
        run_callbacks=[Told(peers.Log(place))],
        **options_of(place, arguments),
    )


def optuna_worker(place: Path, arguments: Any) -> None:
    """Run one Optuna process: trials until all have been started."""
    import optuna
    from optuna.trial import TrialState

    log = peers.Log(place)

    def objective(trial: Any) -> float:
        model = digits.ByHand(digits.suggested(trial), arguments.data)
        score = 0.0
        for epoch in range(arguments.epochs):
            log.write("begin", trial.number)
            model.train()
            score = model.score()
            log.write("epoch", trial.number, score)
            trial.report(score, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned
        return score

    begun = (TrialState.RUNNING, TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
    all_begun = optuna.study.MaxTrialsCallback(arguments.trials, states=begun)
    optuna_study(place, arguments).optimize(objective, callbacks=[all_begun])


def optuna_hyperband(place: Path, arguments: Any) -> None:
    study = optuna_study(place, arguments)
    for index in range(arguments.trials):
        study.enqueue_trial({"index": index})
    spawn = multiprocessing.get_context("spawn")
    workers = [
        spawn.Process(target=optuna_worker, args=(place, arguments)) for _ in range(peers.CORES)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        if worker.exitcode != 0:
            raise SystemExit(f"a process of Optuna's ended with {worker.exitcode}")


def tune_hyperband(epochs: int) -> Any:
    from ray.tune.schedulers import HyperBandScheduler

    return HyperBandScheduler("training_iteration", max_t=epochs, reduction_factor=FACTOR)


def tune_asha(epochs: int) -> Any:
    from ray.tune.schedulers import ASHAScheduler

    return ASHAScheduler(
        "training_iteration", max_t=epochs, grace_period=1, reduction_factor=FACTOR
    )


def by_tune(place: Path, arguments: Any, scheduler: Any) -> None:
    """Search with Ray Tune: one actor per core, reused for the next trial."""
    import torch
    from ray import tune

    log, data, epochs = peers.Log(place), arguments.data, arguments.epochs

    class Trainable(tune.Trainable):
        def setup(self, config: dict[str, Any]) -> None:
            self.model = digits.ByHand(digits.CONFIGURATIONS[config["index"]], data)

        def reset_config(self, config: dict[str, Any]) -> bool:
            self.setup(config)
            return True

        def step(self) -> dict[str, Any]:
            log.write("begin", self.trial_id)
            self.model.train()
            score = self.model.score()
            log.write("epoch", self.trial_id, score)
            return {"accuracy": score, "done": self.iteration + 1 >= epochs}

        def save_checkpoint(self, folder: str) -> None:
            torch.save(self.model.state_dict(), Path(folder, "state.pt"))

        def load_checkpoint(self, folder: str) -> None:
            self.model.load_state_dict(torch.load(Path(folder, "state.pt")))

    with peers.ray_of(place):
        tune.Tuner(
            Trainable,
            param_space={"index": tune.grid_search(list(range(arguments.trials)))},
            tune_config=tune.TuneConfig(
                metric="accuracy", mode="max", scheduler=scheduler, reuse_actors=True
            ),
            run_config=tune.RunConfig(storage_path=str(place / "tune"), verbose=0),
        ).fit()


def ray_hyperband(place: Path, arguments: Any) -> None:
    by_tune(place, arguments, tune_hyperband(arguments.epochs))


def ray_asha(place: Path, arguments: Any) -> None:
    by_tune(place, arguments, tune_asha(arguments.epochs))


def dask_hyperband(place: Path, arguments: Any) -> None:
    """Search with Dask-ML: the training rows are one chunk, so a call is an epoch."""
    from dask_ml.model_selection import HyperbandSearchCV

    from benchmarks.dask_estimator import Digits

    x, y = (column.numpy() for column in digits.rows(arguments.data, "train"))
    with peers.dask_of(place):
        search = HyperbandSearchCV(
            Digits(data=arguments.data, place=str(place)),
            {"index": list(range(arguments.trials))},
            max_iter=arguments.epochs,
            aggressiveness=FACTOR,
            test_size=1 / len(x),  # models are scored on the common validation rows
            random_state=0,
        )
        search.fit(x, y)


OURS = "Cerebro, Hyperband"
CELLS: dict[str, tuple[str, peers.Cell]] = {
    OURS: ("", cerebro_hyperband),
    "Cerebro, ASHA": ("", cerebro_asha),
    "Cerebro, ASHA by halves": ("", cerebro_asha_by_halves),
    "Cerebro, Optuna's Hyperband": ("Optuna", cerebro_optuna),
    "Cerebro, Ray Tune's HyperBand": ("Ray Tune", cerebro_tune),
    "Optuna, Hyperband, 2 processes": ("Optuna", optuna_hyperband),
    "Ray Tune, HyperBand": ("Ray Tune", ray_hyperband),
    "Ray Tune, ASHA": ("Ray Tune", ray_asha),
    "Dask-ML, Hyperband": ("Dask-ML", dask_hyperband),
}


def described(outcome: peers.Outcome, target: float) -> dict[str, float]:
    """Return a search's figures: seconds and epochs to the target, and in total."""
    log = sorted(outcome.record["log"])
    begins = [line[0] for line in log if line[1] == "begin"]
    first = begins[0] if begins else next(line[2] for line in log if line[1] == "first")
    trained = [line[0] for line in log if line[1] == "epoch"]
    scores = [(line[0], line[3]) for line in log if len(line) == 4]
    reached = next((when for when, score in scores if score >= target), None)
    figures = {
        "start-up": first - outcome.began,
        "epochs": len(trained),
        "best": max(score for _, score in scores),
        "over": scores[-1][0] - first,
        "peak": outcome.peak / 1e6,
    }
    if reached is not None:
        figures["target"] = reached - first
        figures["target epochs"] = sum(when <= reached for when in trained)
    return figures


def add_lines(bench: Bench, name: str, figures: dict[str, float], ours: dict[str, float]) -> None:
    """Add a search's lines, with ratios to Cerebro's Hyperband."""

    def add(what: str, value: float, base: float | None, unit: str) -> None:
        base = None if figures is ours else base
        bench.add(
            f"{name}: {what}",
            value,
            unit,
            reference="Cerebro's Hyperband" if base else "",
            ratio=value / base if base else None,
        )

    def add_known(what: str, key: str, unit: str) -> None:
        add(what, figures[key], ours.get(key), unit)

    if "target" in figures:
        add_known("to the accuracy", "target", "s")
        base = ours["start-up"] + ours["target"] if "target" in ours else None
        with_start = figures["start-up"] + figures["target"]
        add("to the accuracy, with start-up", with_start, base, "s")
        add_known("epochs until then", "target epochs", "epochs")
    else:
        bench.note(f"{name}: the accuracy was not reached")
    add_known("until all has been trained", "over", "s")
    add_known("start-up", "start-up", "s")
    add_known("epochs trained", "epochs", "epochs")
    add_known("best accuracy", "best", "")
    add_known("memory of all its processes, at most", "peak", "MB")


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--target", type=float, default=0.99, help="accuracy to reach")
    made.add_argument("--limit", type=float, default=120.0, help="seconds for one search")
    made.add_argument("--only", metavar="TEXT", default="", help="searches with this in their name")
    for name in ("--cell", "--place", "--data"):
        made.add_argument(name, help=argparse.SUPPRESS)
    arguments = made.parse_args()
    arguments.trials = 9 if arguments.quick else len(digits.CONFIGURATIONS)
    arguments.epochs = 3 if arguments.quick else EPOCHS
    if arguments.cell:
        CELLS[arguments.cell][1](Path(arguments.place), arguments)
        return
    bench = Bench(
        f"bench_hyperband: {arguments.trials} configurations of digits, {arguments.epochs} epochs "
        f"at most, accuracy {arguments.target}",
        arguments.json,
    )
    with peers.scratch() as folder:
        digits.save(folder)
        options = ["--data", str(folder), *(["--quick"] if arguments.quick else [])]
        ours: dict[str, float] = {}
        for name, (peer, _) in CELLS.items():
            if arguments.only not in name:
                continue
            outcome = peers.run_cell(MODULE, name, folder, arguments.limit, options, peer)
            try:
                figures = described(outcome, arguments.target)
            except (StopIteration, IndexError, ValueError):
                bench.note(f"{name}: {outcome.why or 'no epoch was trained'}")
                continue
            if outcome.why:
                bench.note(f"{name}: {outcome.why}; figures are of what it did until then")
            if name == OURS:
                ours = figures
            add_lines(bench, name, figures, ours)
    bench.report()


if __name__ == "__main__":
    main()
