"""Cerebro on Ray, compared with Ray Tune alone: ``python -m benchmarks.bench_ray``.

16 configurations of the MLP of `benchmarks.bench_search` on 100,000 x 128 rows, 2 epochs, two
workers with one thread each, every search in a separate process:

- Cerebro with local workers, on Ray (`cerebro.ray.Executor`), in Ray Tune
  (`cerebro.ray.trainable`), and with Tune's algorithms in one process (`cerebro.ray.fit`);
- Ray Tune with trials that load the data themselves, and with `tune.with_parameters`.

The makespan, from the start of the first unit or epoch to the end of the last, is divided by half
of one local worker's time, measured before and after. Recording the training step makes these units
half as long, so their overhead weighs twice as much; local workers and the executor on Ray are
therefore also compared with ordinary steps. Further figures: the time from the process's
start to the first result and to its end, and the memory of the whole process tree. Then models that
do nothing: milliseconds per unit with local workers and on Ray. Last, 4, 16 and 32 of the models on
two nodes that share nothing, for one epoch: the total memory, the states that agents hold, and the
contents of caches.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cerebro
import cerebro.ray
from benchmarks import bench_search, bench_store, peers
from benchmarks.cluster_soak.nodes import Nodes, cached_bytes, held_bytes
from benchmarks.harness import Bench, parser

MODULE = "benchmarks.bench_ray"
BATCH = 256
HELD_OUT = 0.1
TRIALS = 16
SHARDS = 8


def _configurations() -> list[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return [
        {"lr": float(10 ** rng.uniform(-4, -2)), "width": int(rng.choice([64, 96, 128]))}
        for _ in range(TRIALS)
    ]


CONFIGURATIONS = _configurations()


def build(config: dict[str, Any]) -> cerebro.torch.Model:
    """Make the model of a configuration, given by number."""
    chosen = CONFIGURATIONS[config["index"] % TRIALS]
    return bench_search.build({**chosen, "graph": config.get("graph")})


def save(folder: Path, rows: int) -> None:
    """Write the rows, as arrays and as shards."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, bench_search.FEATURES)).astype("float32")
    y = (x[:, :8].sum(1) + rng.normal(size=rows) > 0).astype("int64")
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    cerebro.shard({"x": x, "y": y}, folder / "data", shards=SHARDS, shuffle=False, progress=False)


class Told:
    """Records when the search received each epoch."""

    def __init__(self, place: Path) -> None:
        self._log = peers.Log(place)

    def on_epoch_end(self, trial: Any, metrics: dict[str, float]) -> None:
        self._log.write("epoch", trial.number)


def note_makespan(place: Path, result: cerebro.Result, **more: int) -> None:
    units = result.units()
    seconds = max(unit["end"] for unit in units) - min(unit["start"] for unit in units)
    peers.write_record(place, makespan=seconds, units=len(units), **more)


def options_of(place: Path, arguments: Any) -> dict[str, Any]:
    """Arguments shared by all of Cerebro's searches."""
    return {
        "data": cerebro.Dataset(Path(arguments.data, "data")),
        "validation": HELD_OUT,
        "batch_size": BATCH,
        "epochs": arguments.epochs,
        "run": place / "run",
    }


def by_cerebro(
    place: Path, arguments: Any, *, workers: int, on_ray: bool = False, recorded: bool = True
) -> None:
    def run(**where: Any) -> None:
        result = cerebro.search(
            build,
            {"index": list(range(TRIALS)), "graph": [None if recorded else False]},
            searcher="grid",
            progress=False,
            callbacks=[Told(place)],
            **options_of(place, arguments),
            **where,
        )
        note_makespan(place, result)

    if on_ray:
        with peers.ray_of(place):
            run(executor=cerebro.ray.Executor(workers=workers))
    else:
        run(workers=workers)


def by_fit(place: Path, arguments: Any) -> None:
    """Let Tune's grid and FIFO scheduler choose the training."""
    from ray import tune

    result = cerebro.ray.fit(
        build,
        param_space={"index": tune.grid_search(list(range(TRIALS)))},
        width=TRIALS,
        workers=peers.CORES,
        progress=False,
        callbacks=[Told(place)],
        **options_of(place, arguments),
    )
    note_makespan(place, result)


def tuner(place: Path, trainable: Any) -> Any:
    """A `Tuner` over the configurations that records results as they arrive."""
    from ray import tune

    log = peers.Log(place)

    class Heard(tune.Callback):
        def on_trial_result(self, *, trial: Any, **_: Any) -> None:
            log.write("epoch", trial.trial_id)

    return tune.Tuner(
        trainable,
        param_space={"index": tune.grid_search(list(range(TRIALS)))},
        tune_config=tune.TuneConfig(metric="loss", mode="min", reuse_actors=True),
        run_config=tune.RunConfig(storage_path=str(place / "tune"), verbose=0, callbacks=[Heard()]),
    )


def by_trainable(place: Path, arguments: Any) -> None:
    """Run Cerebro as Tune's trainable."""

    with peers.ray_of(place):
        trainable = cerebro.ray.trainable(
            build, workers=peers.CORES, **options_of(place, arguments)
        )
        tuner(place, trainable).fit()
    note_makespan(place, cerebro.open(place / "run"))


def train(config: dict[str, Any], arrays: Any, epochs: int, place: Path) -> None:
    """Train a configuration as a Ray Tune user would."""
    from ray import tune

    torch.set_num_threads(1)
    log = peers.Log(place)
    log.write("begin", config["index"])
    model = bench_search.build(CONFIGURATIONS[config["index"]])
    net = model.net
    optimizer = torch.optim.Adam(net.parameters(), lr=CONFIGURATIONS[config["index"]]["lr"])
    x, y = (torch.from_numpy(column) for column in arrays())
    rows = len(x) - int(HELD_OUT * len(x))
    loss_of = torch.nn.functional.cross_entropy
    for _ in range(epochs):
        net.train()
        order = torch.randperm(rows)
        for start in range(0, rows, BATCH):
            chosen = order[start : start + BATCH]
            optimizer.zero_grad()
            loss_of(net(x[chosen]), y[chosen]).backward()
            optimizer.step()
        net.eval()
        total = 0.0
        with torch.no_grad():
            for start in range(rows, len(x), BATCH):
                chosen = slice(start, start + BATCH)
                total += loss_of(net(x[chosen]), y[chosen], reduction="sum").item()
        log.write("end", config["index"])
        tune.report({"loss": total / (len(x) - rows)})


def loaded(folder: str) -> tuple[Any, Any]:
    return np.load(Path(folder, "x.npy")), np.load(Path(folder, "y.npy"))


def by_tune(place: Path, arguments: Any, *, shared: bool) -> None:
    from ray import tune

    epochs, folder = arguments.epochs, arguments.data

    def with_arrays(config: dict[str, Any], x: Any, y: Any) -> None:
        train(config, lambda: (x, y), epochs, place)

    def by_itself(config: dict[str, Any]) -> None:
        train(config, lambda: loaded(folder), epochs, place)

    with warnings.catch_warnings(), peers.ray_of(place):
        warnings.simplefilter("ignore")  # the object store's arrays are read-only
        trainable: Any = by_itself
        if shared:
            x, y = loaded(folder)
            trainable = tune.with_parameters(with_arrays, x=x, y=y)
        tuner(place, trainable).fit()


def nothing(place: Path, arguments: Any, *, on_ray: bool) -> None:
    """Search with models that do nothing: all time is overhead."""
    rows = {"x": np.zeros((64 * SHARDS, 2), dtype="float32"), "y": np.zeros(64 * SHARDS)}
    data = cerebro.shard(rows, place / "data", shards=SHARDS, progress=False)

    def run(**where: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no validation data
            result = cerebro.search(
                bench_store.build,
                {"lr": cerebro.loguniform(1e-4, 1e-1)},
                data,
                n_trials=TRIALS,
                epochs=5 * arguments.epochs,
                batch_size=64,
                run=place / "run",
                progress=False,
                **where,
            )
        note_makespan(place, result)

    if on_ray:
        with peers.ray_of(place):
            run(executor=cerebro.ray.Executor(workers=peers.CORES))
    else:
        run(workers=peers.CORES)


class Held:
    """Samples the states that agents hold after every epoch."""

    def __init__(self, nodes: Nodes) -> None:
        self.nodes = nodes
        self.most = 0

    def on_epoch_end(self, trial: Any, metrics: dict[str, float]) -> None:
        self.most = max(self.most, sum(map(held_bytes, self.nodes.actors())))


def on_two_nodes(place: Path, arguments: Any, *, trials: int) -> None:
    """Search on a head without CPUs and two nodes that receive the data."""
    os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="cb-ray-", dir="/tmp")
    Path(place, peers.TEMPORARY).write_text(os.environ["RAY_TMPDIR"])
    os.environ["CEREBRO_CACHE"] = str(place / "coordinator")
    nodes = Nodes(place, "", place / "pipe")
    held = Held(nodes)
    try:
        result = cerebro.search(
            build,
            {"index": list(range(trials))},
            searcher="grid",
            progress=False,
            callbacks=[held],
            executor=cerebro.ray.Executor(nodes.address),
            **{**options_of(place, arguments), "epochs": 1},
        )
        note_makespan(place, result, held=held.most, cached=cached_bytes(place))
    finally:
        import ray

        ray.shutdown()
        nodes.close()


ONE, LOCAL = "Cerebro, 1 local worker", "Cerebro, local workers"
ORDINARY = "ordinary steps"
NOTHING = "models that do nothing"
NODES = "trials on two nodes"
CELLS: dict[str, tuple[str, peers.Cell]] = {
    ONE: ("", partial(by_cerebro, workers=1)),
    LOCAL: ("", partial(by_cerebro, workers=peers.CORES)),
    "cerebro.ray.Executor": ("Ray Tune", partial(by_cerebro, workers=peers.CORES, on_ray=True)),
    "cerebro.ray.trainable": ("Ray Tune", by_trainable),
    "cerebro.ray.fit": ("Ray Tune", by_fit),
    "Ray Tune, trials load the data": ("Ray Tune", partial(by_tune, shared=False)),
    "Ray Tune, with_parameters": ("Ray Tune", partial(by_tune, shared=True)),
    f"{ORDINARY}, 1 local worker": ("", partial(by_cerebro, workers=1, recorded=False)),
    f"{ORDINARY}, local workers": ("", partial(by_cerebro, workers=peers.CORES, recorded=False)),
    f"{ORDINARY}, cerebro.ray.Executor": (
        "Ray Tune",
        partial(by_cerebro, workers=peers.CORES, on_ray=True, recorded=False),
    ),
    f"{NOTHING}, local workers": ("", partial(nothing, on_ray=False)),
    f"{NOTHING}, cerebro.ray.Executor": ("Ray Tune", partial(nothing, on_ray=True)),
    **{
        f"{count} {NODES}": ("Ray Tune", partial(on_two_nodes, trials=count))
        for count in (4, TRIALS, 2 * TRIALS)
    },
}


def makespan_of(outcome: peers.Outcome) -> float | None:
    """Seconds from the start of the first unit or epoch to the end of the last; None if
    unfinished."""
    if outcome.why:
        return None
    if "makespan" in outcome.record:
        return float(outcome.record["makespan"])
    log = outcome.record["log"]
    began = [line[0] for line in log if line[1] == "begin"]
    ended = [line[0] for line in log if line[1] == "end"]
    return max(ended) - min(began) if ended else None


def add_search(
    bench: Bench, outcome: peers.Outcome, ours: peers.Outcome, sequential: float
) -> None:
    """Add a search's lines: ratios of its makespan to `sequential`/2, of the rest to `ours`."""
    makespan = makespan_of(outcome)
    bench.add(
        f"{outcome.name}: makespan",
        makespan or 0.0,
        "s",
        reference="sequential / 2",
        ratio=2 * (makespan or 0.0) / sequential,
    )
    results = [line[0] for line in outcome.record["log"] if line[1] == "epoch"]
    figures = {
        "first result": (min(results) - outcome.began, "s"),
        "whole process": (outcome.seconds, "s"),
        "memory of all, at most": (outcome.peak / 1e6, "MB"),
    }
    bases = (
        min(line[0] for line in ours.record["log"] if line[1] == "epoch") - ours.began,
        ours.seconds,
        ours.peak / 1e6,
    )
    for (what, (value, unit)), base in zip(figures.items(), bases, strict=True):
        bench.add(
            f"{outcome.name}: {what}",
            value,
            unit,
            reference="" if outcome is ours else "local workers",
            ratio=None if outcome is ours else value / base,
        )


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--limit", type=float, default=150.0, help="seconds for one search")
    for name in ("--cell", "--place", "--data"):
        made.add_argument(name, help=argparse.SUPPRESS)
    arguments = made.parse_args()
    arguments.epochs = 1 if arguments.quick else 2
    if arguments.cell:
        CELLS[arguments.cell][1](Path(arguments.place), arguments)
        return
    bench = Bench(f"bench_ray: {TRIALS} MLPs, {arguments.epochs} epochs, 2 workers", arguments.json)
    with peers.scratch() as folder:
        save(folder, 10_000 if arguments.quick else 100_000)
        options = ["--data", str(folder), *(["--quick"] if arguments.quick else [])]

        def run(name: str) -> peers.Outcome | None:
            outcome = peers.run_cell(MODULE, name, folder, arguments.limit, options, CELLS[name][0])
            if makespan_of(outcome) is None:
                bench.note(f"{name}: {outcome.why or 'nothing was trained'}")
                return None
            return outcome

        outcomes = [run(name) for name in [*CELLS, ONE]]
        spans = [makespan_of(found) or 0.0 for found in outcomes if found and found.name == ONE]
        ours = next((found for found in outcomes if found and found.name == LOCAL), None)
        if spans and ours:
            bench.add("one local worker", statistics.mean(spans), "s")
            for found in outcomes:
                others = (ONE, ORDINARY, NOTHING, NODES)
                if found and not any(word in found.name for word in others):
                    add_search(bench, found, ours, statistics.mean(spans))
        add_ordinary(bench, [found for found in outcomes if found and ORDINARY in found.name])
        add_units(bench, [found for found in outcomes if found and NOTHING in found.name])
        add_memory(bench, [found for found in outcomes if found and NODES in found.name])
    bench.report()


def add_ordinary(bench: Bench, outcomes: list[peers.Outcome]) -> None:
    """Add the makespans of searches with ordinary steps, over half of the sequential one."""
    spans = {found.name: makespan_of(found) or 0.0 for found in outcomes}
    sequential = spans.pop(f"{ORDINARY}, 1 local worker", None)
    if sequential is None:
        return
    bench.add(f"{ORDINARY}, one local worker", sequential, "s")
    for name, span in spans.items():
        bench.add(
            f"{name}: makespan",
            span,
            "s",
            reference="sequential / 2",
            ratio=2 * span / sequential,
        )


def add_units(bench: Bench, outcomes: list[peers.Outcome]) -> None:
    """Measure the cost per unit of each executor, the local one first."""
    costs = [1e3 * (makespan_of(found) or 0.0) / found.record["units"] for found in outcomes]
    for found, cost in zip(outcomes, costs, strict=True):
        first = found is outcomes[0]
        bench.add(
            f"{found.name}: per unit",
            cost,
            "ms",
            reference="" if first else "local workers",
            ratio=None if first else cost / costs[0],
        )


def add_memory(bench: Bench, outcomes: list[peers.Outcome]) -> None:
    """Measure the memory of searches of increasing size, relative to the first."""
    for found in outcomes:
        first = outcomes[0]
        figures = {
            "memory of all, at most": (found.peak, first.peak),
            "states at agents": (found.record["held"], first.record["held"]),
            "data in the nodes' caches": (found.record["cached"], first.record["cached"]),
        }
        for what, (value, base) in figures.items():
            bench.add(
                f"{found.name}: {what}",
                value / 1e6,
                "MB",
                reference="" if found is first else first.name,
                ratio=None if found is first else value / max(1, base),
            )


if __name__ == "__main__":
    main()
