"""Sessions of Spark on this machine, whose nodes have GPUs of the stand-in for the CUDA runtime."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import gpus_by_name
import pytest
from dialing import end_spark

from cerebro.machine import devices

HOOKS = Path(__file__).parent / "hooks"
ALL = {"device cuda:0 'GPU-a'", "device cuda:0 'GPU-b'"}


@contextlib.contextmanager
def standing_in(cudart, cudnn, folder):
    """Every process has the GPUs that are named in its variable; this one has one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CEREBRO_CUDART", str(cudart))
        patch.setenv("CEREBRO_CUDNN", str(cudnn))
        patch.setenv("CEREBRO_CACHE", str(folder))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HOOKS), os.environ["PYTHONPATH"]]))
        patch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a")
        patch.setenv("JAVA_TOOL_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        patch.setenv("SPARK_LOCAL_IP", "127.0.0.1")
        patch.setattr(devices, "lookup", gpus_by_name.find)
        yield


def script_in(folder):
    """Write a discovery script: each node has two GPUs."""
    file = folder / "gpus"
    answer = '{"name": "gpu", "addresses": ["GPU-a", "GPU-b"]}'
    file.write_text(f"#!/bin/sh\necho '{answer}'\n")
    file.chmod(0o755)
    return str(file)


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
