"""Searches on the GPUs of agents: programs, Dask's workers and Spark's tasks.

Agents and workers are real processes. Their GPUs are those of the stand-in for the CUDA runtime, on
which the native network trains.
"""

from __future__ import annotations

import copy
import os
import pickle
import re
import shutil
import subprocess
import sys
from multiprocessing import resource_tracker
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("zmq")

import gpus_by_name
import pictures
from dialing import end_spark

import cerebro
from benchmarks.peers import free_port
from cerebro.cluster import hub
from cerebro.cluster.engine import format_visible_gpu
from cerebro.cluster.keys import read_key_file
from cerebro.errors import InputError
from cerebro.machine import devices


@pytest.fixture(scope="module", autouse=True)
def standin(cudart_standin, cudnn_standin, tmp_path_factory):
    """This machine has two GPUs, for this process and for all that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        gpus_by_name.name_gpus(patch, cudart_standin, cudnn_standin, cache, "GPU-a", "GPU-b")
        patch.setattr(hub, "LATE_SECONDS", 120.0)  # tests say which agents have worked
        yield


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return pictures.shards(tmp_path_factory.mktemp("data") / "pictures")


@pytest.fixture(scope="module")
def expected(data, tmp_path_factory):
    """One local worker on a GPU."""
    run = tmp_path_factory.mktemp("runs") / "here"
    result = pictures.search(data, run, workers=1, devices="cuda:0")
    assert pictures.printed(result) == {"device cuda:0 'GPU-a'"}
    return pictures.hashes(result)


def test_each_agent_of_this_machine_has_its_own_gpu(data, tmp_path, expected):
    executor = cerebro.cluster.Executor(gpus=1)
    assert executor.devices == ("cuda",)
    result = pictures.search(data, tmp_path / "run", executor=executor)
    assert pictures.hashes(result) == expected
    assert pictures.printed(result) == {"device cuda:0 'GPU-a'", "device cuda:0 'GPU-b'"}
    assert result.saved.settings["devices"] == ("cuda",)
    assert {unit["worker"] for unit in result.units()} == {0, 1}


def test_two_agents_share_a_gpu(data, tmp_path, expected, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a")
    executor = cerebro.cluster.Executor(gpus=0.5)
    result = pictures.search(data, tmp_path / "run", executor=executor, devices="cuda")
    assert pictures.hashes(result) == expected
    assert pictures.printed(result) == {"device cuda:0 'GPU-a'"}
    assert {unit["worker"] for unit in result.units()} == {0, 1}


def test_devices_cpu_leaves_the_gpus_of_agents_unused(data, tmp_path):
    """And agents that have GPUs train on the CPU if the executor was not told of them."""
    given = cerebro.cluster.Executor(1, gpus=1)
    on_cpu = pictures.search(data, tmp_path / "run", executor=given, devices="cpu")
    other = pictures.search(data, tmp_path / "other", executor=cerebro.cluster.Executor(1))
    assert pictures.hashes(on_cpu) == pictures.hashes(other)
    lines = pictures.printed(on_cpu) | pictures.printed(other)
    assert {line.split()[1] for line in lines} == {"cpu"}


def test_more_workers_than_gpus_are_refused(data, tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"5 worker.s. with 0.5 GPU each do not fit .* has 2"):
        pictures.search(data, tmp_path / "run", executor=cerebro.cluster.Executor(5, gpus=0.5))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(InputError, match=r"gpus=1: no GPU can be used here \(no NVIDIA driver"):
        pictures.search(data, tmp_path / "run", executor=cerebro.cluster.Executor(gpus=1))


# --- agents that others start -------------------------------------------------------


@pytest.fixture
def start(tmp_path):
    """Starts agents of the command line, and returns what belongs to their executor."""
    address, key = f"127.0.0.1:{free_port()}", tmp_path / "key"
    read_key_file(key, create=True)
    started = []

    def start(*agents):
        command = [sys.executable, "-m", "cerebro", "agent"]
        command += ["--connect", address, "--key", str(key)]
        for visible, *options in agents:
            variables = {**os.environ, "CUDA_VISIBLE_DEVICES": visible}
            started.append(subprocess.Popen([*command, *options], env=variables))
        return {"listen": address, "key": key}

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_agents_use_the_gpu_that_a_batch_system_or_the_command_line_gives(
    data, tmp_path, start, expected
):
    to = start(("GPU-a",), ("GPU-a,GPU-b", "--device", "cuda:1"))
    executor = cerebro.cluster.Executor(2, **to, gpus=1)
    result = pictures.search(data, tmp_path / "run", executor=executor)
    assert pictures.hashes(result) == expected
    assert pictures.printed(result) == {"device cuda:0 'GPU-a'", "device cuda:0 'GPU-b'"}


@pytest.mark.parametrize(
    ("agent", "why"),
    [
        (("GPU-a", "--device", "cpu"), "its agent was started with --device cpu"),
        (("",), "no NVIDIA driver is loaded"),
        (("GPU-a,GPU-b",), "its agent sees 2 GPUs and was not told which one is its own"),
    ],
)
def test_an_agent_without_a_gpu_of_its_own_is_refused_by_name(data, tmp_path, start, agent, why):
    """Also beside one that has a GPU: a trial is not trained on both."""
    executor = cerebro.cluster.Executor(2, **start(("GPU-a",), agent), gpus=1)
    with pytest.raises(InputError, match=rf"node \S+ \(\w+\): each worker is given .*\({why}"):
        pictures.search(data, tmp_path / "run", executor=executor)


def test_an_agent_without_its_gpu_ends_at_once(tmp_path, start):
    (tmp_path / "key").chmod(0o600)
    command = [sys.executable, "-m", "cerebro", "agent", "--connect", "127.0.0.1:9", "--device"]
    for device, says in [
        ("cuda:2", "there is no GPU 2"),
        ("cuda", "sees 2 GPUs and was not told"),
        ("tpu", "--device tpu: give auto, cpu, cuda, or a GPU such as cuda:1"),
    ]:
        command_line = [*command, device, "--key", str(tmp_path / "key")]
        done = subprocess.run(command_line, capture_output=True, text=True, check=False)
        assert done.returncode != 0 and says in done.stderr
        assert "Traceback" not in done.stderr


# --- Dask and Spark -------------------------------------------------------------------


def test_dask_workers_use_their_gpus(data, tmp_path, expected):
    """One has two of them, and two threads."""
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(
            n_workers=1, threads_per_worker=2, dashboard_address=":0", local_directory=tmp_path,
            resources={"GPU": 2},
        ) as cluster,
        distributed.Client(cluster) as client,
    ):  # fmt: skip
        executor = cerebro.dask.Executor(client, gpus=1)
        assert "gpus=1" in repr(copy.deepcopy(executor))
        result = pictures.search(data, tmp_path / "run", executor=executor)
    resource_tracker._resource_tracker._stop()  # Dask's nannies start it
    assert pictures.hashes(result) == expected
    assert pictures.printed(result) == {"device cuda:0 'GPU-a'", "device cuda:0 'GPU-b'"}


@pytest.mark.parametrize(
    ("threads", "resources", "share", "room"),
    [
        (1, {}, 1.0, 1),  # as of dask-cuda: one GPU for each Dask worker
        (4, {}, 1.0, 1),
        (4, {}, 0.5, 2),
        (1, {}, 0.5, 1),
        (4, {"GPU": 3.0}, 1.0, 3),
        (4, {"GPU": 0.0}, 1.0, 0),
        (4, {"GPU": 2.0}, 0.0, 4),
    ],
)
def test_a_dask_worker_has_as_many_agents_as_threads_and_gpus_allow(
    threads, resources, share, room
):
    pytest.importorskip("distributed")
    from cerebro.cluster.engines.dask import LongTasks

    workers = {"tcp://a": {"nthreads": threads, "resources": resources}}
    workers["tcp://b"] = {"nthreads": 1, "resources": {"GPU": 1.0}}
    client = SimpleNamespace(scheduler_info=lambda n_workers: {"workers": workers})
    assert LongTasks(client, None, 1, share).size == room + 1


def test_spark_tasks_use_the_gpu_that_spark_gives_them(data, tmp_path, expected, monkeypatch):
    pytest.importorskip("pyspark")
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.skip("Spark needs Java")
    from pyspark.sql import SparkSession

    found = tmp_path / "gpus"
    answer = '{"name": "gpu", "addresses": ["GPU-a", "GPU-b"]}'
    found.write_text(f"#!/bin/sh\necho '{answer}'\n")
    found.chmod(0o755)
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    monkeypatch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master("local-cluster[1,2,1024]")
    settings = {
        "ui.enabled": "false",
        "driver.host": "127.0.0.1",
        "driver.bindAddress": "127.0.0.1",
        "local.dir": str(tmp_path),
        "worker.dir": str(tmp_path),
        "worker.resource.gpu.amount": "2",
        "worker.resource.gpu.discoveryScript": str(found),
        "executor.resource.gpu.amount": "2",
        "task.resource.gpu.amount": "1",
    }
    for name, value in settings.items():
        builder = builder.config(f"spark.{name}", value)
    spark = builder.getOrCreate()
    try:
        executor = cerebro.spark.Executor(spark, 2, gpus=1)
        result = pictures.search(data, tmp_path / "run", executor=executor)
    finally:
        end_spark(spark)
    assert pictures.hashes(result) == expected
    assert pictures.printed(result) == {"device cuda:0 'GPU-a'", "device cuda:0 'GPU-b'"}


# --- derived datasets ------------------------------------------------------------------


def derived(data, folder, function, program="scores.py", **variables):
    """Run a program: it opens the stand-in, which a process keeps."""
    file = Path(__file__).with_name(program)
    command = [sys.executable, str(file), str(data.path), str(folder), function]
    environment = {k: v for k, v in os.environ.items() if k != devices.CUBLAS_VARIABLE}
    environment |= variables
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


def test_shards_are_made_on_the_gpus_of_agents(data, tmp_path):
    done = derived(data, tmp_path, "Scores")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.glob("GPU-*")) == ["GPU-a", "GPU-b"]


def test_a_gpu_that_computes_different_bits_is_detected(data, tmp_path):
    done = derived(data, tmp_path, "shifted")
    assert "computes other values of column 'scores' than this process" in done.stderr
    assert "the kind of GPU" in done.stderr
    assert not (tmp_path / "made").exists()


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Pictures with colours; the last batch of each shard has to be filled up."""
    x = np.random.default_rng(0).integers(0, 255, (61, 6, 6, 3), np.uint8)
    columns = {"x": x, "y": np.arange(61)}
    return cerebro.shard(columns, tmp_path_factory.mktemp("images") / "set", shards=4)


def featured(images, folder, case="none", **variables):
    """Run `frozen_on_standin`, whose network is on the second of two GPUs."""
    variables = {"STANDIN_DEVICES": "2"} | variables
    return derived(images, folder, case, "frozen_on_standin.py", **variables)


@pytest.mark.parametrize("case", ["none", "ray"])
def test_features_are_computed_on_the_gpus_of_workers(images, tmp_path, case):
    """The network and its batches are on the only GPU that a worker sees, and the files equal."""
    pytest.importorskip("torch")
    if case == "ray":
        pytest.importorskip("ray")
    done = featured(images, tmp_path, case)
    assert done.returncode == 0, done.stderr[-4000:]
    notes = {path.name: path.read_text().split() for path in tmp_path.glob("GPU-*")}
    assert sorted(notes) == ["GPU-a", "GPU-b"]
    for place, work in notes.values():
        assert place == "cuda:0" and int(work) > 0


def test_out_of_memory_on_a_workers_gpu_names_its_shard_and_node(images, tmp_path):
    """It is named with its shard and its node; the workers are not to blame, so it ends."""
    pytest.importorskip("torch")
    done = featured(images, tmp_path, "memory")
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("cerebro.")]
    assert re.fullmatch(
        r".*InputError: the GPU is out of memory with batch_size=8 \(CUDA out of memory. Tried to "
        r"allocate 2.00 GiB.\): give a smaller batch_size=, .* \(shard \d, node \S+ \(\w+\)\)",
        said,
    ), said
    assert not (tmp_path / "made").exists()


def test_out_of_memory_on_the_gpu_of_this_process_is_reported(images, tmp_path):
    """What runs out of memory is the loader; the first contact with the GPU needs more."""
    pytest.importorskip("torch")
    (tmp_path / "before").mkdir()
    assert featured(images, tmp_path / "before").returncode == 0
    done = featured(images, tmp_path, STANDIN_MEMORY="2000")
    said = done.stderr.splitlines()[-1]
    assert "the GPU is out of memory with batch_size=8 (" in said, said
    assert "out of memory on cuda:1" in said
    assert list(tmp_path.glob("GPU-*")) == []


def test_a_worker_that_loses_its_gpu_is_replaced(images, tmp_path):
    pytest.importorskip("torch")
    done = featured(images, tmp_path, "gpu")
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.search(
        r"CUDA error: unspecified launch failure.*, which was computing shard \d; another worker "
        r"takes its place",
        done.stdout,
    ), done.stdout


@pytest.mark.parametrize(
    ("case", "visible", "says"),
    [
        ("other", "GPU-a,GPU-b", r"computes other values of column 'scale|output' than this"),
        ("none", "GPU-a,other-b", r"node \S+ .* has the GPU 'GPU A' and not 'GPU B'"),
    ],
)
def test_gpus_that_compute_other_features_are_refused(images, tmp_path, case, visible, says):
    pytest.importorskip("torch")
    done = featured(images, tmp_path, case, CUDA_VISIBLE_DEVICES=visible)
    assert re.search(rf"InputError: .*{says}", done.stderr), done.stderr
    assert not (tmp_path / "made").exists()


# --- rules ------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", [0, -1, True, "1", float("nan"), 2, 1.5])
def test_a_worker_has_one_gpu_or_a_part_of_one(gpus):
    with pytest.raises(
        InputError, match=r"gpus(=2|=1.5)?.* give gpus=1|gpus must be 1, or the fraction"
    ):
        cerebro.cluster.Executor(gpus=gpus)


def test_an_executor_is_copied_with_its_gpus():
    made = cerebro.cluster.Executor(2, gpus=0.5)
    assert "gpus=0.5" in repr(pickle.loads(pickle.dumps(made)))
    assert cerebro.cluster.Executor().devices == ("cpu",)


def test_an_agent_without_a_visible_gpu_is_refused():
    assert format_visible_gpu(1) == "GPU-b"
    with pytest.raises(
        InputError, match="no GPU 2 for an agent here: CUDA_VISIBLE_DEVICES is 'GPU"
    ):
        format_visible_gpu(2)
