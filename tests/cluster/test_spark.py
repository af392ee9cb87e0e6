"""A search over Spark's executors gives what it gives here; they may be killed and come back.

Executors are processes of their own: Spark's local-cluster mode starts a master and workers.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import signal
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("zmq")
pytest.importorskip("pyspark")
if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
    pytest.skip("Spark needs Java", allow_module_level=True)

from clusters import wait_until
from dialing import AtUnit, end_spark, events, left_over, same, same_derived, search

import cerebro
from cerebro.errors import InputError

# The JVM compiles less and uses one thread to collect garbage: it starts in half the time.
FAST_START = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"


@pytest.fixture(scope="module")
def caches(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spark")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CEREBRO_CACHE", str(folder / "cache"))
        patch.setenv("JAVA_TOOL_OPTIONS", FAST_START)
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        yield folder


@pytest.fixture(scope="module")
def spark(caches):
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master("local-cluster[2,1,1024]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.adaptive.enabled", "false")
        .config("spark.local.dir", str(caches))
        .config("spark.worker.dir", str(caches))
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    known = session.sparkContext._jsc.sc().getExecutorMemoryStatus  # the driver's is one of them
    wait_until(lambda: known().size() == 3)  # a search counts the slots that there are
    yield session
    end_spark(session)


@pytest.fixture(scope="module")
def expected(data, spark, tmp_path_factory):
    return search(tmp_path_factory.mktemp("runs") / "here", data)


def active_jobs(spark):
    return list(spark.sparkContext.statusTracker().getActiveJobsIds())


def test_states_match_those_of_a_single_process(data, tmp_path, caches, spark, expected):
    result = search(tmp_path / "run", data, cerebro.spark.Executor(spark))
    same(result, expected)
    assert {unit["worker"] for unit in result.units()} == {0, 1}
    wait_until(lambda: not left_over(caches) and not active_jobs(spark))
    assert spark.range(5).count() == 5  # the session is still the user's


def test_a_derived_dataset_has_the_files_of_one_process(data, tmp_path, caches, spark):
    same_derived(data, cerebro.spark.Executor(spark), tmp_path)
    wait_until(lambda: not left_over(caches) and not active_jobs(spark))


def executors():
    """The processes of Spark's executors, which are descendants of this one."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (entry / "cmdline").exists():
            command = (entry / "cmdline").read_bytes()
            if b"CoarseGrainedExecutorBackend" in command:
                found.append(int(entry.name))
    return sorted(found)


def test_an_executor_that_is_killed_comes_back(data, tmp_path, caches, spark, expected):
    executor = cerebro.spark.Executor(spark, 2)
    joined = []

    def strike():
        before = {node.id for node in executor._cluster.nodes()}
        os.kill(executors()[0], signal.SIGKILL)
        wait_until(lambda: {node.id for node in executor._cluster.nodes()} - before)
        joined.append(True)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = search(tmp_path / "run", data, executor, callbacks=[AtUnit(8, strike)])
    same(result, expected)
    assert joined
    assert len(events(result, "worker lost")) == 1
    wait_until(lambda: not left_over(caches) and not active_jobs(spark))


def test_a_search_that_is_interrupted_leaves_no_job(data, tmp_path, caches, spark):
    def interrupt():
        raise KeyboardInterrupt

    executor = cerebro.spark.Executor(spark, 2)
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path / "run", data, executor, callbacks=[AtUnit(5, interrupt)])
    assert cerebro.open(tmp_path / "run").status == "stopped"
    wait_until(lambda: not left_over(caches) and not active_jobs(spark))


def test_unusable_sessions_and_worker_counts_are_refused(spark):
    with pytest.raises(InputError, match=r"must be a pyspark.sql.SparkSession, not str"):
        cerebro.spark.Executor("spark://10.0.0.1:7077")
    with pytest.raises(InputError, match="workers"):
        cerebro.spark.Executor(spark, 0)
    connect = type("SparkSession", (), {"__module__": "pyspark.sql.connect.session"})()
    with pytest.raises(InputError, match=r"Spark Connect session.*classic session"):
        cerebro.spark.Executor(connect)


def test_an_executor_can_be_copied_and_shows_its_arguments(spark):
    executor = cerebro.spark.Executor(spark, 2, replicas=2)
    assert "workers=2, replicas=2" in repr(executor)
    assert repr(copy.deepcopy(executor)) == repr(executor)


def rows(spark):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1000, 3))
    frame = spark.createDataFrame(
        [(i, [float(v) for v in x[i]], i % 3) for i in range(len(x))],
        "id long, x array<double>, y int",
    )
    return x, frame.repartition(4)


def test_frames_and_folders_of_parts_become_shards(spark, tmp_path):
    """A frame has no order: `orderBy` gives one, which the parts of a written frame keep."""
    x, frame = rows(spark)
    ordered = frame.orderBy("id")
    arrays = {"x": x, "y": np.arange(len(x), dtype=np.int32) % 3}
    options = {"dtypes": {"x": ("float64", (3,))}, "seed": 3, "shards": 4}
    whole = cerebro.shard(arrays, tmp_path / "arrays", **options)
    direct = cerebro.shard(ordered.select("x", "y"), tmp_path / "frame", **options)
    ordered.select("x", "y").write.parquet(str(tmp_path / "parts"))
    assert len(list((tmp_path / "parts").glob("part-*.parquet"))) > 1
    parts = cerebro.shard(tmp_path / "parts", tmp_path / "from-parts", **options)
    assert whole.checksum == direct.checksum == parts.checksum


def test_vectors_of_spark_ml_are_refused_with_the_cure(spark, tmp_path):
    from pyspark.ml.functions import vector_to_array
    from pyspark.ml.linalg import Vectors

    frame = spark.createDataFrame(
        [(Vectors.dense([1.0, 2.0]), 0), (Vectors.dense([3.0, 4.0]), 1)], ["x", "y"]
    )
    with pytest.raises(InputError, match=r"'x'.*vector_to_array"):
        cerebro.shard(frame, tmp_path / "vectors")
    data = cerebro.shard(frame.select(vector_to_array("x").alias("x"), "y"), tmp_path / "arrays")
    assert len(data) == 2


def test_a_saved_folder_predicts_a_frame(spark, tmp_path):
    """The program of docs/coming-from/cerebro-dl.md, on the session's executors."""
    pandas = pytest.importorskip("pandas")
    torch = pytest.importorskip("torch")
    page = Path(__file__).parents[2] / "docs" / "coming-from" / "cerebro-dl.md"
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    program = next(block for block in blocks if "def transform(" in block)
    call = next(block for block in blocks if "mapInPandas" in block)

    random = np.random.default_rng(0)
    x, y = random.random((40, 8)).astype("float32"), np.arange(40) % 3

    def build(config):
        net = torch.nn.Linear(8, 3)
        return cerebro.torch.Model(
            net,
            optimizer=torch.optim.SGD(net.parameters(), lr=config["lr"]),
            loss=torch.nn.functional.cross_entropy,
            inputs="features",
            target="label",
        )

    rows = {"features": x, "label": y}
    result = cerebro.search(
        build, {"lr": 0.1}, rows, epochs=1, n_trials=1, batch_size=8, workers=0,
        run=tmp_path / "run", progress=False,
    )  # fmt: skip
    result.best.save(tmp_path / "model")
    table = pandas.DataFrame({"features": x.astype("float64").tolist(), "label": y})
    names = {"df": spark.createDataFrame(table)}
    exec(program.replace('"model"', repr(str(tmp_path / "model"))) + call, names)
    predicted = names["predicted"].toPandas()
    wanted = np.asarray(result.best.predict({"features": x})).argmax(1)
    assert predicted["prediction"].tolist() == wanted.tolist()
