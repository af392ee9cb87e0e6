"""Units on a GPU with host memory in its place: all that a worker does differently there.

Tensors in host memory count as a GPU's; what would start CUDA does nothing. The states must be
those of the CPU to the bit, because they are the same arithmetic by other ways.
"""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest

import cerebro
from cerebro.data import batches, depots
from cerebro.data.depots import MovedBatches
from cerebro.machine.local import LOCAL
from cerebro.run.settings import Batches, Exactness, Limits
from cerebro.worker import evaluate as device_values
from cerebro.worker import gpu as device_states
from cerebro.worker import jobs
from cerebro.worker.messages import CheckTask, RunContext, RunFolders, Task, UnitDone
from cerebro.worker.runner import UnitRunner

torch = pytest.importorskip("torch")
SHARDS, EPOCHS = 3, 2


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


def build(config, info):
    net = torch.nn.Sequential(
        torch.nn.Linear(4, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.Dropout(0.2),
        torch.nn.Linear(8, 3),
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=config["lr"])
    return cerebro.torch.Model(
        net,
        optimizer=optimizer,
        loss=torch.nn.functional.cross_entropy,
        metrics={"accuracy": accuracy, "share": lambda o, t: (accuracy(o, t), len(t))},
        scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        scheduler_step="batch",
    )


@pytest.fixture
def context(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 4)).astype(np.float32)
    y = rng.integers(0, 3, size=90)
    data = cerebro.shard({"x": x, "y": y}, tmp_path / "d", shards=SHARDS, progress=False)
    train, valid = data.split(0.8, 0.2)
    folder = str(tmp_path)
    return RunContext(
        build=build, train=train, validation=valid, folders=RunFolders(folder, folder, folder),
        batches=Batches(batch_size=8), limits=Limits(epochs=EPOCHS),
    )  # fmt: skip


@pytest.fixture
def host_as_gpu(monkeypatch):
    def tensor(value):
        return isinstance(value, torch.Tensor)

    def scalar(value):
        return tensor(value) and value.numel() == 1

    def copied(self, tree, device):
        return to_device(self, tree, "cpu")

    to_device = device_states.StateArena.to_device
    monkeypatch.setattr(device_values, "_is_scalar_elsewhere", scalar)
    monkeypatch.setattr(device_states, "_is_away", lambda _, value: tensor(value))
    monkeypatch.setattr(device_states.StateArena, "to_device", copied)
    monkeypatch.setattr(depots, "find_problem", lambda name: "there is no GPU")
    monkeypatch.setattr(
        batches, "MovedBatches", lambda loader, _, why: MovedBatches(loader, "cpu", why)
    )
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(cerebro.torch.model, "place", lambda *_: None)


def train(context, folder):
    """Two trials, unit by unit in turn by a worker that keeps one model; the hashes and sums."""
    folder.mkdir()
    folders = RunFolders(*[str(folder)] * 3)
    runner = UnitRunner(replace(context, folders=folders), worker=0, machine=LOCAL)
    found, dispatch = [], 0
    for position in range(EPOCHS * (SHARDS + 1)):
        epoch, step = divmod(position, SHARDS + 1)
        for trial in (0, 1):
            shard = -1 if step == SHARDS else (trial + epoch + step) % SHARDS
            task = Task(
                trial, {"lr": 0.01 * (trial + 1)}, epoch, step, shard, 0, position, dispatch
            )
            dispatch += 1
            done = runner.run(task)
            assert isinstance(done, UnitDone), done.traceback or done.message
            assert done.loaded or position == 0  # the other trial's model was in between
            found.append((done.state.hash, done.total, done.metrics, done.steps.not_exact))
    runner.close()
    return found


def test_states_and_metrics_are_those_of_the_cpu(context, tmp_path, host_as_gpu):
    on_cpu = train(context, tmp_path / "cpu")
    on_gpu = train(replace(context, device="cuda:0"), tmp_path / "gpu")
    assert on_gpu == on_cpu


class OwnModel:
    """A model of four methods, whose optimizer is PyTorch's as it is."""

    framework = "torch"

    def __init__(self, config):
        self.net = torch.nn.Linear(4, 3)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=config["lr"])

    def loss_of(self, batch):
        return torch.nn.functional.cross_entropy(self.net(batch["x"]), batch["y"])

    def train_batch(self, batch):
        self.optimizer.zero_grad()
        loss = self.loss_of(batch)
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.detach()}

    def eval_batch(self, batch):
        with torch.no_grad():
            return {"loss": self.loss_of(batch)}

    def state_dict(self):
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])  # keeps counts of steps as they are


def test_an_optimizer_may_keep_the_tensors_it_loads(context, tmp_path, host_as_gpu, monkeypatch):
    """Its numbers are not memory that the next state is packed into."""
    # Adam counts its steps in host memory, wherever the parameters are.
    monkeypatch.setattr(
        device_states, "_is_away", lambda _, value: isinstance(value, torch.Tensor) and value.ndim
    )
    own = replace(context, build=OwnModel)
    on_cpu = train(own, tmp_path / "cpu")
    assert train(replace(own, device="cuda:0"), tmp_path / "gpu") == on_cpu


def test_the_check_of_a_first_configuration_finds_nothing(context, host_as_gpu):
    runner = UnitRunner(replace(context, device="cuda:0"), worker=0, machine=LOCAL)
    found = jobs.check(runner, CheckTask({"lr": 0.01}))
    assert (found.problems, found.error) == ((), None)
    assert {"accuracy", "val_loss", "train_share"} <= set(found.model.metrics)
    assert found.model.state_bytes > 0
    assert found.environment["device"] == "cuda"


def varying(operation):
    def build_varying(config, info):
        model = build(config, info)
        net_forward = model.net.forward

        def forward(x):
            if operation:
                torch.zeros(3).put_(torch.tensor([1]), torch.tensor([2.0]))
            return net_forward(x) * (1 + os.urandom(1)[0] / 64)

        model.net.forward = forward
        return model

    return build_varying


@pytest.mark.parametrize(
    ("device", "deterministic", "operation", "fine"),
    [
        ("cpu", "warn", True, False),
        ("cuda:0", "warn", True, True),  # the trials will be marked
        ("cuda:0", "warn", False, False),
        ("cuda:0", False, False, True),
    ],
)
def test_the_check_reports_unexplained_nondeterminism(
    context, host_as_gpu, device, deterministic, operation, fine
):
    exactness = Exactness(deterministic=deterministic)
    the_context = replace(context, device=device, build=varying(operation), exactness=exactness)
    found = jobs.check(UnitRunner(the_context, worker=0, machine=LOCAL), CheckTask({"lr": 0.01}))
    assert found.error is None
    assert (found.problems == ()) is fine
    assert "val_loss" in found.model.metrics


def test_a_unit_reports_nondeterministic_operations(context, tmp_path, host_as_gpu):
    def inexact(config, info):
        model = build(config, info)
        net_forward = model.net.forward

        def forward(x):
            torch.zeros(3).put_(torch.tensor([1]), torch.tensor([2.0]))
            return net_forward(x)

        model.net.forward = forward
        return model

    found = train(replace(context, device="cuda:0", build=inexact), tmp_path / "gpu")
    assert all(not_exact == ("put_",) for *_, not_exact in found)
    assert all(not not_exact for *_, not_exact in train(context, tmp_path / "cpu"))
