"""Sessions of Spark on this machine, whose nodes have GPUs of the stand-in for the CUDA runtime."""

from __future__ import annotations

import contextlib
import sys

import gpus_by_name
import pictures
import pytest
from dialing import end_spark

from cerebro.cluster import hub

ALL = {"device cuda:0 'GPU-a'", "device cuda:0 'GPU-b'"}


@pytest.fixture(scope="module", autouse=True)
def standin(cudart_standin, cudnn_standin, tmp_path_factory):
    """Every process has the GPUs that are named in its variable; this one has one."""
    with pytest.MonkeyPatch.context() as patch:
        cache = tmp_path_factory.mktemp("cache")
        gpus_by_name.name_gpus(patch, cudart_standin, cudnn_standin, cache, "GPU-a")
        patch.setenv("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        yield


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """A discovery script: each node has two GPUs."""
    file = tmp_path_factory.mktemp("script") / "gpus"
    answer = '{"name": "gpu", "addresses": ["GPU-a", "GPU-b"]}'
    file.write_text(f"#!/bin/sh\necho '{answer}'\n")
    file.chmod(0o755)
    return str(file)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return pictures.shards(tmp_path_factory.mktemp("data") / "pictures")


@pytest.fixture(scope="module")
def expected(data, tmp_path_factory):
    """The hashes of one local worker on a GPU."""
    run = tmp_path_factory.mktemp("runs") / "here"
    return pictures.hashes(pictures.search(data, run, workers=1, devices="cuda:0"))


@pytest.fixture(autouse=True)
def all_come(monkeypatch):
    """A search waits for all its agents, however busy the machine is."""
    monkeypatch.setattr(hub, "LATE_SECONDS", hub.START_SECONDS)


@contextlib.contextmanager
def running(master, folder, settings):
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master)
    own = {
        "ui.enabled": "false",
        "driver.host": "127.0.0.1",
        "driver.bindAddress": "127.0.0.1",
        "local.dir": str(folder),
        "worker.dir": str(folder),
    }
    for name, value in (own | settings).items():
        builder = builder.config(f"spark.{name}", value)
    session = builder.getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        end_spark(session)
