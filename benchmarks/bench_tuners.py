"""The overhead of tuning frameworks without training: ``python -m benchmarks.bench_tuners``.

Searches of 100, 1,000 and 10,000 trials whose models do nothing, every framework in a separate
process on two cores. Milliseconds from the first report to the end of the search:

- without pruning, trials of 1 and of 10 reports: per trial of one report, and per further report;
- with Hyperband (Dask-ML: successive halving) and ASHA, at most 9 reports: per trial, per report.

Bytes per trial are the growth of the whole process tree after the first fifth of the trials
(Dask-ML: from the start), which means little for 100 trials. Optuna works in one process and is
compared with Cerebro's search alone (its record on disk, nothing trained); Ray Tune and Dask-ML
have two training processes, as Cerebro has in the other comparison. A search is stopped after
`--limit` seconds: figures then cover the part it reached, and larger searches are left out.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import cerebro
from benchmarks import peers
from benchmarks.harness import Bench, parser

MODULE = "benchmarks.bench_tuners"
REPORTS = (1, 10)
SMALLEST = 100  # trials of the search whose start-up is shown
MOST, FACTOR = 9, 3  # reports of an unpruned trial; one in FACTOR is promoted
END_SECONDS = 60.0
"""Seconds that a search may take beyond its limit, to start and to end."""


class Progress:
    """Counts trials and reports of a search, and samples the memory between them."""

    def __init__(self, place: Path, trials: int) -> None:
        self._place, self._wanted = place, trials
        self.trials = self.reports = 0
        self._first: float | None = None
        self._mark: tuple[int, int] | None = None

    def report(self, *_: Any, **__: Any) -> None:
        """Record a report."""
        self.reports += 1
        if self.reports == 1:
            self._first = time.time()

    def trial(self, *_: Any, **__: Any) -> None:
        """Record the end of a trial."""
        self.trials += 1
        if self.trials == max(1, self._wanted // 5):
            self.look()

    def look(self) -> None:
        """Use the current memory as the baseline."""
        gc.collect()
        self._mark = self.trials, peers.tree_bytes(os.getpid())

    def over(self) -> None:
        """Write the record."""
        ended = time.time()
        gc.collect()
        memory, grown = peers.tree_bytes(os.getpid()), None
        if self._mark and self.trials > self._mark[0]:
            grown = (memory - self._mark[1]) / (self.trials - self._mark[0])
        peers.write_record(
            self._place,
            first=self._first,
            ended=ended,
            trials=self.trials,
            reports=self.reports,
            grown=grown,
            memory=memory,
        )


class Told:
    """Cerebro's callback."""

    def __init__(self, progress: Progress) -> None:
        self.on_epoch_end, self.on_trial_end = progress.report, progress.trial


def by_cerebro(place: Path, arguments: Any, searcher: Any, *, workers: int) -> None:
    from benchmarks import bench_store

    rows = {"x": np.zeros((64, 2), dtype="float32"), "y": np.zeros(64)}
    data = cerebro.shard(rows, place / "data", shards=1, progress=False)
    progress = Progress(place, arguments.trials)
    warnings.simplefilter("ignore")  # no validation data
    cerebro.search(
        bench_store.build,
        {"lr": cerebro.loguniform(1e-4, 1e-1), "units": [32, 64]},
        data,
        epochs=arguments.reports,
        n_trials=arguments.trials,
        searcher=searcher,
        batch_size=64,
        workers=workers,
        run=place / "run",
        progress=False,
        time_limit=arguments.limit,
        callbacks=[Told(progress)],
        executor=None if workers else bench_store.NothingExecutor(),
    )
    progress.over()


def by_optuna(place: Path, arguments: Any, storage: str, *, hyperband: bool = False) -> None:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    progress = Progress(place, arguments.trials)
    kept: Any = None
    if storage == "journal":
        file = optuna.storages.journal.JournalFileBackend(str(place / "journal"))
        kept = optuna.storages.JournalStorage(file)
    elif storage == "sqlite":
        kept = f"sqlite:///{place / 'study.db'}"
    pruner: Any = optuna.pruners.NopPruner()
    if hyperband:
        pruner = optuna.pruners.HyperbandPruner(1, MOST, FACTOR)
    study = optuna.create_study(
        study_name="nothing",
        storage=kept,
        sampler=optuna.samplers.RandomSampler(seed=0),
        pruner=pruner,
    )

    def objective(trial: Any) -> float:
        trial.suggest_float("lr", 1e-4, 1e-1, log=True)
        trial.suggest_categorical("units", [32, 64])
        value = 0.0
        for epoch in range(arguments.reports):
            value = 1.0 / (1 + trial.number + epoch)
            trial.report(value, epoch)
            progress.report()
            if trial.should_prune():
                raise optuna.TrialPruned
        return value

    study.optimize(
        objective,
        n_trials=arguments.trials,
        timeout=arguments.limit,
        callbacks=[progress.trial],
    )
    progress.over()


def by_tune(place: Path, arguments: Any, scheduler: str = "") -> None:
    from ray import tune
    from ray.tune import schedulers

    made: Any = None
    if scheduler == "HyperBand":
        made = schedulers.HyperBandScheduler(
            "training_iteration", max_t=MOST, reduction_factor=FACTOR
        )
    elif scheduler == "ASHA":
        made = schedulers.ASHAScheduler(
            "training_iteration", max_t=MOST, grace_period=1, reduction_factor=FACTOR
        )
    reports = arguments.reports

    class Nothing(tune.Trainable):
        def setup(self, config: dict[str, Any]) -> None:
            self.lr = config["lr"]

        def reset_config(self, config: dict[str, Any]) -> bool:
            self.setup(config)
            return True

        def step(self) -> dict[str, Any]:
            done = self.iteration + 1 >= reports
            return {"loss": self.lr / (1 + self.iteration), "done": done}

        def save_checkpoint(self, folder: str) -> dict[str, Any]:
            return {}

        def load_checkpoint(self, state: Any) -> None:
            pass

    progress = Progress(place, arguments.trials)

    class Heard(tune.Callback):
        def on_trial_result(self, **_: Any) -> None:
            progress.report()

        def on_trial_complete(self, *, trial: Any, **_: Any) -> None:
            if trial.last_result.get("training_iteration"):  # else the time limit came first
                progress.trial()

    with peers.ray_of(place):
        tune.Tuner(
            Nothing,
            param_space={"lr": tune.loguniform(1e-4, 1e-1), "units": tune.choice([32, 64])},
            tune_config=tune.TuneConfig(
                metric="loss",
                mode="min",
                num_samples=arguments.trials,
                scheduler=made,
                reuse_actors=True,
                time_budget_s=arguments.limit,
            ),
            run_config=tune.RunConfig(
                storage_path=str(place / "tune"), verbose=0, callbacks=[Heard()]
            ),
        ).fit()
        progress.over()


def by_dask(place: Path, arguments: Any, *, halving: bool = False) -> None:
    """Write a record only at the end: Dask-ML has no callback and no limit."""
    import scipy.stats
    from dask_ml.model_selection import IncrementalSearchCV, SuccessiveHalvingSearchCV

    from benchmarks.dask_estimator import Nothing

    space = {"lr": scipy.stats.loguniform(1e-4, 1e-1)}
    model: Any = Nothing(place=str(place))
    trials = arguments.trials
    progress = Progress(place, trials)
    with peers.dask_of(place):
        if halving:
            search = SuccessiveHalvingSearchCV(
                model, space, trials, n_initial_iter=1, max_iter=MOST, aggressiveness=FACTOR,
                test_size=0.5, random_state=0,
            )  # fmt: skip
        else:
            search = IncrementalSearchCV(
                model, space, trials, decay_rate=None, max_iter=arguments.reports,
                test_size=0.5, random_state=0,
            )  # fmt: skip
        progress.look()
        search.fit(np.zeros((64, 2), dtype="float32"), np.zeros(64))
        progress.trials = trials
        progress.over()


@dataclass(frozen=True)
class Framework:
    """A framework's search, and the Cerebro search it is compared with."""

    run: Callable[[Path, Any], None]
    peer: str = ""
    like: str = ""
    prunes: bool = False


ALONE, TWO = "Cerebro, the search alone", "Cerebro, 2 workers"
Hyperband, ASHA = cerebro.searchers.Hyperband, cerebro.searchers.ASHA
CELLS = {
    ALONE: Framework(partial(by_cerebro, searcher="random", workers=0)),
    "Optuna, in memory": Framework(partial(by_optuna, storage=""), "Optuna", ALONE),
    "Optuna, journal": Framework(partial(by_optuna, storage="journal"), "Optuna", ALONE),
    "Optuna, SQLite": Framework(partial(by_optuna, storage="sqlite"), "Optuna", ALONE),
    f"{ALONE}, Hyperband": Framework(
        partial(by_cerebro, searcher=Hyperband(reduction_factor=FACTOR), workers=0), prunes=True
    ),
    "Optuna, in memory, Hyperband": Framework(
        partial(by_optuna, storage="", hyperband=True),
        "Optuna",
        f"{ALONE}, Hyperband",
        prunes=True,
    ),
    "Optuna, journal, Hyperband": Framework(
        partial(by_optuna, storage="journal", hyperband=True),
        "Optuna",
        f"{ALONE}, Hyperband",
        prunes=True,
    ),
    TWO: Framework(partial(by_cerebro, searcher="random", workers=peers.CORES)),
    "Ray Tune": Framework(by_tune, "Ray Tune", TWO),
    "Dask-ML, incremental": Framework(by_dask, "Dask-ML", TWO),
    f"{TWO}, Hyperband": Framework(
        partial(by_cerebro, searcher=Hyperband(reduction_factor=FACTOR), workers=peers.CORES),
        prunes=True,
    ),
    "Ray Tune, HyperBand": Framework(
        partial(by_tune, scheduler="HyperBand"), "Ray Tune", f"{TWO}, Hyperband", prunes=True
    ),
    "Dask-ML, successive halving": Framework(
        partial(by_dask, halving=True), "Dask-ML", f"{TWO}, Hyperband", prunes=True
    ),
    f"{TWO}, ASHA": Framework(
        partial(by_cerebro, searcher=ASHA(reduction_factor=FACTOR), workers=peers.CORES),
        prunes=True,
    ),
    "Ray Tune, ASHA": Framework(
        partial(by_tune, scheduler="ASHA"), "Ray Tune", f"{TWO}, ASHA", prunes=True
    ),
}


@dataclass
class Cost:
    """The cost of one search."""

    start_up: float
    seconds: float
    trials: int
    reports: int
    grown: float | None
    peak: int

    @classmethod
    def of(cls, outcome: peers.Outcome) -> Cost | None:
        """Read a cell's record; None if it has no report."""
        record = outcome.record
        noted = [line[0] for line in record["log"]]  # Dask-ML's reports, from its models
        first = record.get("first") or min(noted, default=0.0)
        if not first:
            return None
        return cls(
            start_up=first - outcome.began,
            seconds=(record.get("ended") or max(noted)) - first,
            trials=record.get("trials", 0),
            reports=record.get("reports") or len(noted),
            grown=record.get("grown"),
            peak=max(outcome.peak, record.get("memory", 0)),
        )


class Table:
    """The lines of all frameworks, and the references of their ratios."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._values: dict[tuple[str, str], float] = {}

    def add(self, name: str, like: str, what: str, value: float | None, unit: str) -> None:
        """Add a figure, with its ratio to Cerebro's for the same search."""
        if value is None:
            return
        self._values[name, what] = value
        base = self._values.get((like, what), 0.0)
        ratio = value / base if base > 0 and value > 0 else None
        self._bench.add(
            f"{name}, {what}",
            value,
            unit,
            reference="Cerebro's" if ratio is not None else "",
            ratio=ratio,
        )


class Search:
    """One framework's searches of one kind, in order of size."""

    def __init__(self, name: str, folder: Path, arguments: Any, bench: Bench) -> None:
        self._name, self._folder, self._arguments, self._bench = name, folder, arguments, bench
        self._over: dict[int, int] = {}

    def run(self, trials: int, reports: int) -> Cost | None:
        """Run one, unless a smaller one exceeded the limit."""
        what = f"{self._name}, {trials:,} trials of {reports} reports"
        if reports in self._over:
            self._bench.note(f"{what}: left out, {self._over[reports]:,} were over the limit")
            return None
        limit = self._arguments.limit
        numbers = {"--trials": trials, "--reports": reports, "--limit": limit}
        outcome = peers.run_cell(
            MODULE,
            self._name,
            self._folder,
            limit + END_SECONDS,
            [str(word) for pair in numbers.items() for word in pair],
            CELLS[self._name].peer,
        )
        cost = Cost.of(outcome)
        if cost is None:
            self._over[reports] = trials
            self._bench.note(f"{what}: {outcome.why or 'no report came'}")
        elif outcome.why or cost.trials < trials or cost.seconds > limit:
            self._over[reports] = trials
            reached = f"{cost.trials:,} trials and " if cost.trials else ""
            self._bench.note(
                f"{what}: {outcome.why or f'over {limit:g} s'}, "
                f"{reached}{cost.reports:,} reports reached in {cost.seconds:.1f} s"
            )
        return cost


def add_plain(table: Table, name: str, search: Search, trials: int) -> None:
    """Compare trials of one report to trials of ten."""
    like, label = CELLS[name].like, f"{trials:,} trials"
    one, ten = (search.run(trials, reports) for reports in REPORTS)
    more = REPORTS[1] - REPORTS[0]
    if one and one.trials:
        per_trial = 1e3 * one.seconds / one.trials
        table.add(name, like, f"{label}: per trial of one report", per_trial, "ms")
        table.add(name, like, f"{label}: memory per trial", one.grown, "bytes")
        if ten and ten.trials:
            per_report = (1e3 * ten.seconds / ten.trials - per_trial) / more
            table.add(name, like, f"{label}: per further report", per_report, "ms")
            if one.grown is not None and ten.grown is not None:
                grown = (ten.grown - one.grown) / more
                table.add(name, like, f"{label}: memory per further report", grown, "bytes")
    elif ten and ten.reports:
        per_report = 1e3 * ten.seconds / ten.reports
        table.add(name, like, f"{label}: per report, with its share of a trial", per_report, "ms")
    add_process(table, name, label, one or ten)


def add_pruned(table: Table, name: str, search: Search, trials: int) -> None:
    """Report the cost of a search that prunes."""
    like, label = CELLS[name].like, f"{trials:,} trials"
    cost = search.run(trials, MOST)
    if cost is None:
        return
    if cost.trials:
        table.add(name, like, f"{label}: per trial", 1e3 * cost.seconds / cost.trials, "ms")
    table.add(name, like, f"{label}: per report", 1e3 * cost.seconds / cost.reports, "ms")
    table.add(name, like, f"{label}: memory per trial", cost.grown, "bytes")
    add_process(table, name, label, cost)


def add_process(table: Table, name: str, label: str, cost: Cost | None) -> None:
    """Report the memory of a search's processes."""
    if cost is not None:
        like = CELLS[name].like
        if cost.trials <= SMALLEST:
            table.add(name, like, "start-up", cost.start_up, "s")
        table.add(name, like, f"{label}: memory of all, at most", cost.peak / 1e6, "MB")


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--limit", type=float, default=8.0, help="seconds for one search")
    made.add_argument("--only", metavar="TEXT", default="", help="searches with this in their name")
    made.add_argument("--trials", type=int, action="append", help="how many, instead of all sizes")
    for name, kind in (("--cell", str), ("--place", str), ("--reports", int)):
        made.add_argument(name, type=kind, help=argparse.SUPPRESS)
    arguments = made.parse_args()
    if arguments.cell:
        arguments.trials = arguments.trials[0]
        CELLS[arguments.cell].run(Path(arguments.place), arguments)
        return
    sizes = arguments.trials or ([20] if arguments.quick else [100, 1_000, 10_000])
    bench = Bench("bench_tuners: searches in which nothing is trained", arguments.json)
    table = Table(bench)
    with peers.scratch() as folder:
        for name, framework in CELLS.items():
            if arguments.only not in name:
                continue
            lacking = peers.missing(framework.peer)
            if lacking:
                bench.note(f"{name}: skipped, {lacking} is not installed")
                continue
            search = Search(name, folder, arguments, bench)
            for trials in sizes:
                (add_pruned if framework.prunes else add_plain)(table, name, search, trials)
    bench.report()


if __name__ == "__main__":
    sys.exit(main())
