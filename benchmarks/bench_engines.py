"""The cost of a unit by engine: ``python -m benchmarks.bench_engines``.

Models that only hold a state of 6 kB, 320 kB or 20 MB, four of them on two workers. The workers are

- local ones, the reference;
- `cerebro.cluster`: agents, as processes of this machine that share nothing;
- `cerebro.ray.Executor` on two nodes of one cluster (`ray.cluster_utils`);
- `cerebro.dask.Executor` on a `LocalCluster` of two processes;
- `cerebro.spark.Executor` on a local-cluster of two executors.

None of the engines' workers sees the files of the run or of the others: each has half of the
shards, and for most units the state is sent from the other worker. Local workers have all shards.
Every engine is measured in a separate process, with all three sizes; local workers before and after
the others. Figures are milliseconds per unit, from the start of the first unit to the end of the
last, the median over rounds; the start of engines and the way of the data are not included. A
further line has the share of units whose state came from the other worker.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import cerebro
from benchmarks import peers
from benchmarks.harness import Bench, parser

MODULE = "benchmarks.bench_engines"
SIZES = {"6 kB": 6_000, "320 kB": 320_000, "20 MB": 20_000_000}
"""Bytes of a state."""
EPOCHS = {"6 kB": 10, "320 kB": 10, "20 MB": 2}
TRIALS, SHARDS, ROWS, BATCH = 4, 8, 64, 64
SPARK_MEMORY_MB = 1024


class Held:
    """A model that trains nothing and has a state of a given size."""

    framework = "numpy"

    def __init__(self, nbytes: int) -> None:
        self.held = np.zeros(nbytes // 8)

    def train_batch(self, batch: Any) -> dict[str, float]:
        self.held[0] += 1.0
        return {"loss": 1.0}

    def eval_batch(self, batch: Any) -> dict[str, float]:
        return {"loss": 1.0}

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held}

    def load_state_dict(self, state: Any) -> None:
        self.held = np.array(state["held"])


def build(config: dict[str, Any]) -> Held:
    return Held(config["nbytes"])


# --- engines ------------------------------------------------------------------

Options = dict[str, Any]
"""Arguments of a search that choose its workers. Each search has its own."""
Engine = Callable[[Path], contextlib.AbstractContextManager[Callable[[], Options]]]


@contextlib.contextmanager
def local(place: Path) -> Iterator[Callable[[], Options]]:
    yield lambda: {"workers": peers.CORES}


@contextlib.contextmanager
def agents(place: Path) -> Iterator[Callable[[], Options]]:
    from cerebro.cluster.connected_executor import EngineExecutor
    from cerebro.cluster.engine import Processes

    class Apart(EngineExecutor):
        def _make_engine(self, context: Any) -> Processes:
            caches = [str(place / f"cache-{number}") for number in range(peers.CORES)]
            return Processes([{"CEREBRO_CACHE": cache} for cache in caches])

    with nothing_shared():
        yield lambda: {"executor": Apart(peers.CORES, 1, None)}


@contextlib.contextmanager
def ray_nodes(place: Path) -> Iterator[Callable[[], Options]]:
    import ray

    import cerebro.ray
    from benchmarks.cluster_soak.nodes import Nodes

    # Socket paths are limited to 107 characters, so it is not in the cell's folder.
    os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="cb-ray-", dir="/tmp")
    Path(place, peers.TEMPORARY).write_text(os.environ["RAY_TMPDIR"])
    os.environ["CEREBRO_CACHE"] = str(place / "coordinator")
    nodes = Nodes(place, "", place / "pipe")
    try:
        with nothing_shared():
            yield lambda: {"executor": cerebro.ray.Executor(nodes.address, peers.CORES)}
    finally:
        ray.shutdown()
        nodes.close()


@contextlib.contextmanager
def dask_workers(place: Path) -> Iterator[Callable[[], Options]]:
    import cerebro.dask

    def separate(folder: str, dask_worker: Any) -> None:
        os.environ["CEREBRO_CACHE"] = f"{folder}/cache-{dask_worker.name}"

    with peers.dask_of(place) as client, nothing_shared():
        client.run(separate, str(place))
        yield lambda: {"executor": cerebro.dask.Executor(client, peers.CORES)}


@contextlib.contextmanager
def spark_executors(place: Path) -> Iterator[Callable[[], Options]]:
    import cerebro.spark

    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        sys.exit("Spark needs Java")
    from pyspark.sql import SparkSession

    os.environ.update(PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1")
    # Relative to the folder of an executor, of which each has its own.
    os.environ["CEREBRO_CACHE"] = "cerebro-cache"
    os.chdir(place)
    spark = (
        SparkSession.builder.master(f"local-cluster[{peers.CORES},1,{SPARK_MEMORY_MB}]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.local.dir", str(place))
        .config("spark.worker.dir", str(place))
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("ERROR")
    try:
        with nothing_shared():
            yield lambda: {"executor": cerebro.spark.Executor(spark, peers.CORES)}
    finally:
        spark.stop()


@contextlib.contextmanager
def nothing_shared() -> Iterator[None]:
    """Have agents on this machine treated as on others, which do not see the run's folder."""
    from cerebro.cluster import admission, hub

    @contextlib.contextmanager
    def no_token(folder: Path, disk: object) -> Iterator[tuple[str, str]]:
        yield "/nowhere", "nothing"

    kept = admission.make_run_token, hub.read_machine_id
    admission.make_run_token, hub.read_machine_id = no_token, lambda: "another one"
    try:
        yield
    finally:
        admission.make_run_token, hub.read_machine_id = kept


# --- cells --------------------------------------------------------------------


def measure(place: Path, arguments: Any, *, engine: Engine) -> None:
    """Search with models of each size; record milliseconds per unit, and the share of hops."""
    rows = {"x": np.zeros((ROWS * SHARDS, 2), dtype="float32"), "y": np.zeros(ROWS * SHARDS)}
    data = cerebro.shard(rows, place / "data", shards=SHARDS, progress=False)
    record: dict[str, tuple[float, float]] = {}
    with engine(place) as options:
        for size, nbytes in SIZES.items():
            found = []
            for number in range(arguments.rounds):
                run = place / f"run-{nbytes}-{number}"
                epochs = 1 if arguments.quick else EPOCHS[size]
                found.append(search(data, run, nbytes, epochs, options()))
                shutil.rmtree(run)
            record[size] = tuple(map(statistics.median, zip(*found, strict=True)))
    peers.write_record(place, sizes=record)


def search(
    data: cerebro.Dataset, run: Path, nbytes: int, epochs: int, options: Options
) -> tuple[float, float]:
    """Search once; return milliseconds per unit, and the share of units that begin with a hop."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no validation data
        result = cerebro.search(
            build,
            {"nbytes": [nbytes], "trial": list(range(TRIALS))},
            data,
            searcher="grid",
            epochs=epochs,
            width=TRIALS,
            batch_size=BATCH,
            run=run,
            progress=False,
            **options,
        )
    units = result.units()
    seconds = max(unit["end"] for unit in units) - min(unit["start"] for unit in units)
    return 1e3 * seconds / len(units), sum(bool(unit["hopped"]) for unit in units) / len(units)


LOCAL = "local workers"
AGAIN = f"{LOCAL}, again"
CELLS: dict[str, tuple[str, peers.Cell]] = {
    LOCAL: ("", partial(measure, engine=local)),
    "cerebro.cluster": ("ZeroMQ", partial(measure, engine=agents)),
    "cerebro.ray": ("Ray Tune", partial(measure, engine=ray_nodes)),
    "cerebro.dask": ("Dask", partial(measure, engine=dask_workers)),
    "cerebro.spark": ("Spark", partial(measure, engine=spark_executors)),
    AGAIN: ("", partial(measure, engine=local)),
}


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--limit", type=float, default=600.0, help="seconds for one engine")
    made.add_argument("--only", nargs="+", metavar="ENGINE", help="of: cluster ray dask spark")
    for name in ("--cell", "--place"):
        made.add_argument(name, help=argparse.SUPPRESS)
    arguments = made.parse_args()
    if arguments.quick:
        arguments.rounds = 1
    if arguments.cell:
        CELLS[arguments.cell][1](Path(arguments.place), arguments)
        return
    bench = Bench(f"bench_engines: {TRIALS} models, 2 workers, cost of a unit", arguments.json)
    options = ["--rounds", str(arguments.rounds), *(["--quick"] if arguments.quick else [])]
    chosen = [
        name
        for name in CELLS
        if not arguments.only or LOCAL in name or name.rpartition(".")[2] in arguments.only
    ]
    found: dict[str, dict[str, tuple[float, float]]] = {}
    with peers.scratch() as folder:
        for name in chosen:
            outcome = peers.run_cell(MODULE, name, folder, arguments.limit, options, CELLS[name][0])
            if "sizes" in outcome.record:
                found[name] = outcome.record["sizes"]
            else:
                bench.note(f"{name}: {outcome.why or 'nothing was measured'}")
    references = [found[name] for name in (LOCAL, AGAIN) if name in found]
    for size in SIZES if references else ():
        reference = statistics.mean(record[size][0] for record in references)
        bench.add(f"{size}, {LOCAL}: per unit", reference, "ms")
        for name, record in found.items():
            cost, hops = record[size]
            if name not in (LOCAL, AGAIN):
                ratio = cost / reference
                bench.add(f"{size}, {name}: per unit", cost, "ms", reference=LOCAL, ratio=ratio)
            if name != AGAIN:
                bench.add(f"{size}, {name}: units that begin with a hop", 100 * hops, "%")
    bench.report()


if __name__ == "__main__":
    main()
