"""The cost of recording a run: ``python -m benchmarks.bench_store``.

- Results per second through the store: epochs with six metrics and their unit, committed in
  groups, durable at the end. Reference: a bare sqlite3 loop that inserts the same rows in one
  transaction. Bar: 10,000 per second.
- Searches in which nothing is trained: from the searcher to the durable row, milliseconds per
  trial with 10 reports. Bar: 1 ms.
- The same with models that do nothing, in this process, states and all: milliseconds per epoch
  of a trial. Bar: 1 ms.
- Many trials of one epoch: time per trial in the last fifth over that in the first, bytes of
  memory per trial in the last four fifths, and seconds to open the run, take the best ten, write
  the summary and make a table. Bar: 200 bytes.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import resource
import shutil
import sqlite3
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import cerebro
from benchmarks.harness import Bench, paired_ratio, parser
from cerebro.run.records import EpochRecord, TrialRecord
from cerebro.run.store import FILE, Store
from cerebro.run.store.schema import SCHEMA
from cerebro.worker.messages import (
    CheckDone,
    CheckTask,
    CommittedState,
    Event,
    RunContext,
    Task,
    UnitDone,
    UnitSums,
)

METRICS = ("train_loss", "train_accuracy", "val_loss", "val_accuracy", "loss", "accuracy")


class Nothing:
    """A model without parameters that does not look at its batches."""

    framework = "numpy"

    def train_batch(self, batch: Any) -> dict[str, float]:
        return {"loss": 1.0}

    def eval_batch(self, batch: Any) -> dict[str, float]:
        return {"loss": 1.0}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        pass


def build(config: dict[str, Any]) -> Nothing:
    return Nothing()


class NothingExecutor:
    """An executor that trains nothing: only the search remains."""

    def __init__(self) -> None:
        self._task: Task | CheckTask | None = None
        self._batches = 0

    def start(self, context: RunContext) -> list[int]:
        self._units_per_epoch = context.units_per_epoch
        return [0]

    def submit(self, worker: int, task: Task | CheckTask) -> None:
        self._task = task

    def wait(self, timeout: float | None = None, wake: Any = None) -> list[Event]:
        task, self._task = self._task, None
        if task is None:
            return []
        if isinstance(task, CheckTask):
            return [CheckDone(0, ())]
        done = task.step == self._units_per_epoch - 1
        value = 1.0 / (1 + task.trial + task.epoch)
        return [
            UnitDone(
                worker=0,
                task=task,
                total=UnitSums(1, 1, {"loss": (value, 1.0)}),
                started=time.time(),
                seconds=1e-6,
                loaded=False,
                state=CommittedState(0, "0" * 32),
                metrics={"train_loss": value, "loss": value} if done else None,
            )
        ]

    def replace(self, worker: int) -> int:
        raise RuntimeError("nothing was lost")

    def close(self, *, kill: bool = False) -> None:
        pass


def store_results(folder: Path, count: int) -> None:
    """Through the store: epochs of 100 trials, their units and metrics."""
    store = Store.create(folder, {})
    for number in range(100):
        store.add_trial(TrialRecord(number, {"lr": 0.1}, "running", count))
    for i in range(count):
        trial, epoch = i % 100, i // 100
        store.add_unit(
            trial=trial,
            epoch=epoch,
            step=0,
            part=0,
            worker=0,
            attempt=0,
            started=float(i),
            seconds=0.5,
            rows=100,
            batches=10,
            hopped=False,
            state_bytes=1000,
        )
        metrics = {name: i / (1 + j) for j, name in enumerate(METRICS)}
        store.add_epoch(trial, EpochRecord(epoch, metrics, 0.5, "0" * 32, None), None)
    store.close()
    shutil.rmtree(folder)
    folder.mkdir()


def bare_results(folder: Path, count: int) -> None:
    """The same rows by the simplest program."""
    with contextlib.closing(sqlite3.connect(folder / FILE)) as connection:
        connection.executescript(SCHEMA)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        for number in range(100):
            connection.execute(
                "INSERT INTO trials (number, config, status, epochs) VALUES (?, ?, ?, ?)",
                (number, "{}", "running", count),
            )
        for i in range(count):
            trial, epoch = i % 100, i // 100
            connection.execute(
                "INSERT INTO units VALUES (NULL, ?, ?, 0, 0, 0, 0, ?, 0.5, 100, 10, 0, 1000)",
                (trial, epoch, float(i)),
            )
            connection.execute(
                "INSERT INTO epochs VALUES (?, ?, 0.5, ?, NULL)", (trial, epoch, "0" * 32)
            )
            connection.executemany(
                "INSERT INTO metrics VALUES (?, ?, ?, ?)",
                [(trial, epoch, name, i / (1 + j)) for j, name in enumerate(METRICS)],
            )
        connection.commit()
    shutil.rmtree(folder)
    folder.mkdir()


def search(
    data: cerebro.Dataset, folder: Path, trials: int, epochs: int, **options: Any
) -> cerebro.Result:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no validation data
        return cerebro.search(
            build,
            {"lr": cerebro.loguniform(1e-4, 1e-1), "units": [32, 64]},
            data,
            epochs=epochs,
            n_trials=trials,
            batch_size=64,
            workers=0,
            run=folder,
            progress=False,
            **options,
        )


def seconds_of(
    folder: Path, data: cerebro.Dataset, trials: int, epochs: int, **options: Any
) -> float:
    start = time.perf_counter()
    search(data, folder / "run", trials, epochs, **options)
    seconds = time.perf_counter() - start
    shutil.rmtree(folder / "run")
    return seconds


class Watch:
    """Records time and memory at every fifth of the trials."""

    def __init__(self, trials: int) -> None:
        self._every = trials // 5
        self._ended = 0
        self.marks: list[tuple[float, int]] = [(time.perf_counter(), memory())]

    def on_trial_end(self, trial: Any) -> None:
        self._ended += 1
        if self._ended % self._every == 0:
            self.marks.append((time.perf_counter(), memory()))


def memory() -> int:
    """Bytes of memory that this process uses now."""
    gc.collect()
    try:
        fields = Path("/proc/self/statm").read_text().split()
        return int(fields[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def many_trials(
    bench: Bench, folder: Path, data: cerebro.Dataset, trials: int, what: str, **options: Any
) -> None:
    watch = Watch(trials)
    search(data, folder / "many", trials, 1, callbacks=[watch], **options)
    spans = [b[0] - a[0] for a, b in itertools.pairwise(watch.marks)]
    grown = (watch.marks[-1][1] - watch.marks[1][1]) / (trials * 4 / 5)
    label = f"{trials:,} trials of one epoch, {what}"
    bench.add(
        f"{label}: per trial",
        5e3 * spans[-1] / trials,
        "ms",
        reference="its first fifth",
        ratio=spans[-1] / spans[0],
    )
    bench.add(f"{label}: memory per trial", grown, "bytes", bar="<= 200")
    result = None

    def opened() -> cerebro.Result:
        nonlocal result
        result = cerebro.open(folder / "many")
        return result

    looks: dict[str, Callable[[], object]] = {
        "open": opened,
        "top(10)": lambda: result.top(10),
        "summary": lambda: opened().summary(),
        "to_dataframe": lambda: opened().to_dataframe(),
    }
    for name, look in looks.items():
        start = time.perf_counter()
        look()
        bench.add(f"{label}: {name}", time.perf_counter() - start, "s")
    shutil.rmtree(folder / "many")


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="cerebro-bench-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--only", choices=("rows", "nothing", "models", "many"), help="one part")
    arguments = made.parse_args()
    quick = arguments.quick
    bench = Bench("bench_store: the cost of recording a run", arguments.json)

    def wanted(part: str) -> bool:
        return arguments.only in (None, part)

    with scratch() as folder:
        (folder / "ours").mkdir()
        (folder / "bare").mkdir()
        x = np.zeros((64, 2), dtype="float32")
        data = cerebro.shard({"x": x, "y": np.zeros(64)}, folder / "data", shards=1, progress=False)
        if wanted("rows"):
            count = 2_000 if quick else 50_000
            ratio, ours, _ = paired_ratio(
                lambda: store_results(folder / "ours", count),
                lambda: bare_results(folder / "bare", count),
                1 if quick else arguments.rounds,
            )
            bench.add(
                "results through the store, durable",
                count / ours,
                "1/s",
                reference="bare sqlite3's time",
                ratio=ratio,
                bar=">= 10,000",
            )
        sizes = (10,) if quick else (100, 1_000, 10_000)
        if wanted("nothing"):
            for trials in sizes:
                seconds = seconds_of(folder, data, trials, 10, executor=NothingExecutor())
                bench.add(
                    f"{trials:,} trials, 10 reports each, nothing trained: per trial",
                    1e3 * seconds / trials,
                    "ms",
                    bar="<= 1",
                )
        if wanted("models"):
            for trials in sizes:
                seconds = seconds_of(folder, data, trials, 10)
                bench.add(
                    f"{trials:,} trials of 10 epochs, models that do nothing: per epoch",
                    1e2 * seconds / trials,
                    "ms",
                    bar="<= 1",
                )
        if wanted("many"):
            count = 100 if quick else 100_000
            many_trials(bench, folder, data, count, "nothing trained", executor=NothingExecutor())
            many_trials(bench, folder, data, count // 5, "models that do nothing")
        bench.report()


if __name__ == "__main__":
    sys.exit(main())
