"""A study behind Optuna's gRPC server: the trials are those of the study's own storage."""

from __future__ import annotations

import contextlib
import importlib
import socket
import subprocess
import sys
import warnings

import numpy as np
import pytest
from test_optuna import content, new_study, optimize

import cerebro
from cerebro.errors import RunError
from cerebro.integrations.optuna.terms import storage_errors

optuna = pytest.importorskip("optuna")
grpc = pytest.importorskip("grpc")
pytest.importorskip("sqlalchemy")

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")

SERVER = """
import sys, warnings
from optuna.storages import get_storage, run_grpc_proxy_server
warnings.simplefilter("ignore")
run_grpc_proxy_server(get_storage(sys.argv[1]), host="127.0.0.1", port=int(sys.argv[2]))
"""


class Server:
    """The server of a storage, as a process that may be ended and started again."""

    def __init__(self, storage):
        self._storage = storage
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def start(self):
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER, self._storage, str(self.port)]
        )

    def stop(self):
        self._process.kill()
        self._process.wait()

    @contextlib.contextmanager
    def running(self):
        self.start()
        proxy = optuna.storages.GrpcStorageProxy(host="127.0.0.1", port=self.port)
        try:
            proxy.wait_server_ready(60)
            yield proxy
        finally:
            proxy.close()
            self.stop()
        assert self._process.poll() is not None


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(240, 3))
    y = x @ np.array([1.0, -2.0, 0.5]) + 0.1 * rng.normal(size=240)
    return cerebro.shard({"x": x, "y": y}, tmp_path_factory.mktemp("data") / "set", shards=3)


def pruner():
    return optuna.pruners.PercentilePruner(30.0, n_startup_trials=2)


@pytest.mark.parametrize("workers", [0, 2])
def test_trials_behind_the_server_match_those_of_the_storage(data, tmp_path, workers):
    near = f"sqlite:///{tmp_path / 'near.db'}"
    expected = new_study(pruner(), storage=near)
    optimize(expected, data, n_trials=14, run=tmp_path / "near")
    far = f"sqlite:///{tmp_path / 'far.db'}"
    with Server(far).running() as proxy:
        study = new_study(pruner(), storage=proxy)
        optimize(study, data, n_trials=14, workers=workers, run=tmp_path / "far")
        assert content(study) == content(expected)
    # What the server has stored, once it is gone.
    stored = optuna.load_study(study_name="test", storage=far)
    assert content(stored) == content(expected)
    assert {trial.state.name for trial in stored.trials} == {"COMPLETE", "PRUNED"}


def test_a_search_whose_server_stops_ends_and_can_resume(data, tmp_path):
    expected = new_study(storage=f"sqlite:///{tmp_path / 'near.db'}")
    optimize(expected, data, run=tmp_path / "near")
    server = Server(f"sqlite:///{tmp_path / 'far.db'}")
    epochs = iter(range(100))

    class Stop:
        def on_epoch_end(self, trial, metrics):
            if next(epochs) == 5:
                server.stop()

    with server.running() as proxy:
        study = new_study(storage=proxy)
        with pytest.raises(RunError) as raised:
            optimize(study, data, run=tmp_path / "far", run_callbacks=[Stop()])
        text = str(raised.value)
        assert f"the storage of the study 'test' (127.0.0.1:{server.port}) fails" in text
        assert "run_grpc_proxy_server" in text
        assert "the same call resumes the run" in text
        assert "\n" not in text
        server.start()
        proxy.wait_server_ready(60)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert optimize(study, data, run=tmp_path / "far").status == "finished"
        found = [(t.number, t.params, t.state.name, t.value) for t in study.trials]
    assert found == [(t.number, t.params, t.state.name, t.value) for t in expected.trials]


@pytest.mark.parametrize(
    ("code", "details", "is_gone"),
    [
        ("UNAVAILABLE", "recvmsg:Connection reset by peer", True),
        ("UNKNOWN", "Stream removed (Socket closed)", True),
        ("UNKNOWN", "Exception calling application: no such trial", False),
    ],
)
def test_the_advice_fits_the_servers_failure(code, details, is_gone):
    """Which error a call gets when its server ends depends on the moment."""
    channel = importlib.import_module("grpc._channel")  # which `import grpc` may leave out
    failure = channel._InactiveRpcError(
        channel._RPCState((), (), (), grpc.StatusCode[code], details)
    )
    with pytest.raises(RunError) as raised, storage_errors(optuna, None, "s", kind=RunError):
        raise failure
    assert details in str(raised.value)
    assert ("run_grpc_proxy_server" in str(raised.value)) == is_gone
