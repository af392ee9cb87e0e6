"""What a unit takes besides its batches: ``python -m benchmarks.bench_unit``.

A worker's side of the demo's units: 64-64-10 MLP and small CNN, AdamW and OneCycle, shards of five
batches of 32 rows. Each part is a function of the worker, timed as it runs; the figure is the
median over units, and its ratio is to the whole unit. "other" is the rest of the worker's Python.
The table of docs/design/units.md is from here.
"""

from __future__ import annotations

import contextlib
import pickle
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import cerebro
import cerebro._core as _core
from benchmarks.harness import Bench, parser
from cerebro.cli import demo
from cerebro.machine.local import LOCAL
from cerebro.run.settings import Batches, Limits
from cerebro.worker import runner
from cerebro.worker.loaders import Loaders
from cerebro.worker.messages import RunContext, RunFolders, Task, UnitDone
from cerebro.worker.runner import UnitRunner
from cerebro.worker.trial_state import TrialSlots

FUNCTIONS: list[tuple[str, Any, str]] = [
    ("batches", runner, "run_batches"),
    ("batches", runner, "evaluate_model"),
    ("random generators", runner.generators, "capture"),
    ("random generators", runner.generators, "restore"),
    ("random generators", runner.generators, "_seed_started"),
    ("random generators", runner.generators, "make_restorer"),
    ("state_dict()", runner.models, "pack_tree"),
    ("files of the shards", Loaders, "verify"),
    ("memory use", runner.memory, "read_usage"),
    ("model and slots", UnitRunner, "_take_model"),
    ("model and slots", TrialSlots, "settle"),
    ("model and slots", TrialSlots, "open"),
]
CONTEXTS: list[tuple[str, Any, str]] = [
    ("the trial's log", UnitRunner, "redirect_output"),
    ("warnings, settings", UnitRunner, "use_settings"),
    ("warnings, settings", runner.Watch, "collect"),
]
CONFIGS: dict[str, dict[str, Any]] = {
    "MLP": {"arch": "mlp", "hidden": 64},
    "CNN": {"arch": "cnn", "channels": 8},
}


class Timer:
    """The seconds of each part of one unit, without those of parts inside."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inside = [0.0]

    @contextlib.contextmanager
    def of(self, part: str) -> Iterator[None]:
        started = time.perf_counter()
        self._inside.append(0.0)
        try:
            yield
        finally:
            seconds = time.perf_counter() - started
            self.seconds[part] += seconds - self._inside.pop()
            self._inside[-1] += seconds

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            with self.of(part):
                return function(*arguments, **options)

        return call

    def timed_context(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @contextlib.contextmanager
        def call(*arguments: Any, **options: Any) -> Iterator[Any]:
            made = function(*arguments, **options)
            with self.of(part):
                value = made.__enter__()
            try:
                yield value
            finally:
                with self.of(part):
                    made.__exit__(*sys.exc_info())

        return call


class TimedSlots:
    """A trial's slots, whose packs and commits are timed."""

    def __init__(self, timer: Timer, slots: _core.Slots) -> None:
        self._slots = slots
        self.pack = timer.timed("pack", slots.pack)
        self.commit = timer.timed("hash and commit", slots.commit)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slots, name)


@contextlib.contextmanager
def everything_timed(timer: Timer) -> Iterator[None]:
    real = _core.Slots
    with contextlib.ExitStack() as patches:
        for part, owner, name in FUNCTIONS:
            timed = timer.timed(part, getattr(owner, name))
            patches.enter_context(mock.patch.object(owner, name, timed))
        for part, owner, name in CONTEXTS:
            timed = timer.timed_context(part, getattr(owner, name))
            patches.enter_context(mock.patch.object(owner, name, timed))
        patches.enter_context(
            mock.patch.object(_core, "Slots", lambda *given: TimedSlots(timer, real(*given)))
        )
        yield


def measure(context: RunContext, config: dict[str, Any], epochs: int) -> dict[bool, Any]:
    """Return the seconds of each part, of every unit after the first epochs, by its kind."""
    timer = Timer()
    units: dict[bool, dict[str, list[float]]] = {False: defaultdict(list), True: defaultdict(list)}
    shards = context.train.num_shards
    with everything_timed(timer):
        made = UnitRunner(context, worker=0, machine=LOCAL, own_process=True)
        for position in range(epochs * (shards + 1)):
            epoch, step = divmod(position, shards + 1)
            validates = step == shards
            part = -1 if validates else step
            task = Task(0, config, epoch, step, part, 0, position, keep_state=False)
            timer.seconds.clear()
            started = time.perf_counter()
            done = made.run(task)
            whole = time.perf_counter() - started
            if not isinstance(done, UnitDone):
                raise SystemExit(done.traceback or done.message)
            timer.seconds["other"] = whole - sum(timer.seconds.values())
            with timer.of("message"):
                pickle.loads(pickle.dumps(done, pickle.HIGHEST_PROTOCOL))
            if epoch >= 3:
                units[validates]["whole"].append(whole)
                for part, seconds in timer.seconds.items():
                    units[validates][part].append(seconds)
        made.close()
    return units


def main() -> None:
    arguments = parser(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    bench = Bench("bench_unit", arguments.json)
    folder = tempfile.mkdtemp(prefix="cerebro-bench-")
    try:
        pixels = {"x": [cerebro.transforms.Scale(1 / 16)]}
        data = demo.digits(str(Path(folder, "data"))).with_transforms(pixels)
        train, valid, _ = data.split(0.7, 0.15, 0.15)
        for name, kind in CONFIGS.items():
            states = Path(folder, name)
            states.mkdir()
            context = RunContext(
                build=demo.build,
                train=train,
                validation=valid,
                limits=Limits(epochs=1000),
                batches=Batches(eval_batch_size=256),
                folders=RunFolders(*[str(states)] * 3),
            )
            config = {**kind, "lr": 1e-3, "dropout": 0.2, "batch_size": 32}
            found = measure(context, config, 13 if arguments.quick else 13 * arguments.rounds)
            for validates, parts in found.items():
                unit = f"{name}, {'validation' if validates else 'training'}"
                whole = statistics.median(parts.pop("whole"))
                bench.add(f"{unit}: unit", whole * 1e6, "us")
                medians = {part: statistics.median(seconds) for part, seconds in parts.items()}
                for part, seconds in sorted(medians.items(), key=lambda item: -item[1]):
                    bench.add(
                        f"  {part}", seconds * 1e6, "us", reference="unit", ratio=seconds / whole
                    )
        bench.report()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
