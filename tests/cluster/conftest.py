"""Shared by the cluster tests. The folder is not named ray, or `import ray` would find it."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from clusters import running

import cerebro
from cerebro.cluster.workers import Pace

INTEGRATION = Path(__file__).parent.parent / "integration"
sys.path.insert(0, str(INTEGRATION))
# Processes of a cluster must find the models of these tests.
HERE = Path(__file__).parent
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), str(INTEGRATION), os.environ["PYTHONPATH"]])

SHARDS = 6


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Three nodes for a module's tests, which do not change them."""
    with running(tmp_path_factory.mktemp("cluster")) as made:
        yield made


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """The path of a small dataset with unequal shards."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(607, 3))
    y = x @ [1.0, -2.0, 0.5] + 0.1 * rng.normal(size=607)
    return cerebro.shard(
        {"x": x, "y": y}, tmp_path_factory.mktemp("data") / "set", shards=SHARDS
    ).path


@pytest.fixture(scope="module")
def many_shards(data, tmp_path_factory):
    """The same rows in three pools, which are dealt to the agents."""
    whole = cerebro.Dataset(data)
    rows = {
        name: np.concatenate([whole.shard(s)[name] for s in range(SHARDS)])
        for name in whole.columns
    }
    return cerebro.shard(rows, tmp_path_factory.mktemp("many") / "set", shards=100).path


@pytest.fixture(autouse=True)
def even_pace(monkeypatch):
    """Do not drop nodes because this machine is briefly busy; return the messages that would
    report it."""
    measured = Pace.speeds
    monkeypatch.setattr(Pace, "speeds", lambda pace: {})
    return measured


@pytest.fixture
def frequent_looks(monkeypatch):
    """Look for new and lost nodes often, but give a silent agent as long as ever: this machine may
    be busy."""
    from cerebro.cluster import executor as module

    seconds = 0.2
    looks = round(module.LOOK_SECONDS * module.SILENT_LOOKS / seconds)
    monkeypatch.setattr(module, "LOOK_SECONDS", seconds)
    monkeypatch.setattr(module, "SILENT_LOOKS", looks)


@pytest.fixture
def apart(monkeypatch):
    """Nodes do not see the run's folder, as if they were separate machines."""
    from cerebro.cluster import admission as module

    @contextlib.contextmanager
    def no_token(folder, disk):
        yield "/nowhere"

    monkeypatch.setattr(module, "make_run_token", no_token)


@pytest.fixture
def elsewhere(monkeypatch, apart, tmp_path):
    """Agents are on machines of their own: the data, the run and the states are sent.

    All of them must be there when the run begins, however busy this machine is.
    """
    from cerebro.cluster import hub as module

    monkeypatch.setattr(module, "LATE_SECONDS", module.START_SECONDS)
    monkeypatch.setattr(module, "read_machine_id", lambda: "another one")
    monkeypatch.setenv("CEREBRO_CACHE", str(tmp_path / "coordinator"))
