"""What `begin_epoch` and `end_epoch` set for an epoch survives a hop within the epoch."""

import numpy as np
import pytest

import cerebro
from cerebro.worker.hop_check import BATCHES

torch = pytest.importorskip("torch")
F = torch.nn.functional


@pytest.fixture
def data(tmp_path):
    rng = np.random.default_rng(0)
    columns = {"x": rng.normal(size=(96, 4)).astype("f4"), "y": rng.integers(0, 3, size=96)}
    return cerebro.shard(columns, tmp_path / "data", shards=3, progress=False)


def search(build, data, run, **options):
    return cerebro.search(
        build, {"lr": [0.1, 0.2, 0.3]}, data, epochs=4, batch_size=16, validation=0.25,
        searcher="grid", run=run, progress=False, **options,
    )  # fmt: skip


def hashes(result):
    return [epoch["state_hash"] for trial in result.trials for epoch in trial.history]


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = torch.nn.Linear(4, 8)
        self.out = torch.nn.Linear(8, 3)
        self.beta = 0.0
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        return self.out(self.hidden(x).relu())


def step(net, batch):
    loss = F.cross_entropy(net(batch["x"]), batch["y"])
    return {"loss": loss + net.beta * net.out.weight.pow(2).mean()}


def made(kind, lr, net=None, **options):
    net = net or Net()
    optimizer = torch.optim.SGD(net.parameters(), lr, momentum=0.9)
    return kind(net, optimizer=optimizer, **(options or {"step": step}))


class Annealed(cerebro.torch.Model):
    """Raises a factor of the loss, which is not in the state."""

    def begin_epoch(self, epoch):
        self.net.beta = epoch / 2


class Unfrozen(cerebro.torch.Model):
    """Trains the first layer from the second epoch on."""

    def begin_epoch(self, epoch):
        if epoch == 1:
            self.net.hidden.requires_grad_(True)


class Remembering(cerebro.torch.Model):
    """Depends on earlier epochs, which the state has and a model just built has not."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.betas = []

    def begin_epoch(self, epoch):
        self.betas.append(0.5 if epoch == 0 else self.betas[epoch - 1] / 2)
        self.net.beta = self.betas[-1]

    def state_dict(self):
        return super().state_dict() | {"betas": list(self.betas)}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.betas = list(state["betas"])
        self.net.beta = self.betas[-1]


class Linear:
    """A model with four methods, whose learning rate depends on the epoch."""

    framework = "numpy"

    def __init__(self):
        self.weights, self.rate = np.zeros(4), 1.0

    def begin_epoch(self, epoch):
        self.rate = 0.5**epoch

    def train_batch(self, batch):
        errors = batch["x"] @ self.weights - batch["y"]
        self.weights -= self.rate * 0.1 * batch["x"].T @ errors / len(errors)
        return {"loss": float(np.mean(errors**2))}

    def eval_batch(self, batch):
        errors = batch["x"] @ self.weights - batch["y"]
        return {"loss": self.rate * float(np.mean(errors**2))}

    def state_dict(self):
        return {"weights": self.weights}

    def load_state_dict(self, state):
        self.weights[:] = state["weights"]


def train_step(net, batch, optimizer):
    net.steps += 1
    if net.steps == 7:  # in the middle of an epoch
        net.hidden.requires_grad_(True)
    optimizer.zero_grad()
    loss = F.cross_entropy(net(batch["x"]), batch["y"])
    loss.backward()
    optimizer.step()
    return {"loss": loss.detach()}


def frozen():
    net = Net()
    net.hidden.requires_grad_(False)
    return net


BUILDS = {
    "annealed": lambda config: made(Annealed, config["lr"]),
    "unfrozen": lambda config: made(Unfrozen, config["lr"], frozen()),
    "trainable": lambda config: made(
        Unfrozen, config["lr"], frozen(), loss=F.cross_entropy, state="trainable"
    ),
    "unfrozen in a step": lambda config: made(
        cerebro.torch.Model, config["lr"], frozen(), train_step=train_step, loss=F.cross_entropy
    ),
    "remembering": lambda config: made(Remembering, config["lr"]),
    "four methods": lambda config: Linear(),
}


@pytest.mark.parametrize("name", BUILDS)
def test_a_hop_keeps_changes_made_by_epoch_hooks(data, tmp_path, name):
    build = BUILDS[name]
    straight = search(build, data, tmp_path / "a", workers=0)
    dropped = search(build, data, tmp_path / "b", workers=0, live_models=1)
    hopped = search(build, data, tmp_path / "c", workers=2, live_models=1)
    assert hashes(straight) == hashes(dropped) == hashes(hopped)
    for trial in dropped:
        assert trial.evaluate(build=build)["loss"] == trial.metrics["loss"]


def test_output_of_begin_epoch_is_logged_once(data, tmp_path):
    class Talking(Annealed):
        def begin_epoch(self, epoch):
            print(f"epoch {epoch} begins")

    def build(config):
        return made(Talking, config["lr"])

    result = search(build, data, tmp_path / "a", workers=0, live_models=1)
    assert result[0].log.count("epoch 2 begins") == 1


def test_a_state_stores_requires_grad_only_if_it_differs_from_build(data):
    """And a load restores those of build, also after an epoch has changed them."""
    models = [made(Unfrozen, 0.1, frozen()) for _ in range(2)]
    for model in models:
        model.bind_info(None)
        assert "requires_grad" not in model.state_dict()
    at_first = models[0].state_dict()
    models[1].begin_epoch(1)
    flags = {"hidden.weight": True, "hidden.bias": True}
    assert models[1].state_dict()["requires_grad"] == flags
    models[0].load_state_dict(models[1].state_dict())
    assert models[0].net.hidden.weight.requires_grad
    models[1].load_state_dict(at_first)
    assert not models[1].net.hidden.weight.requires_grad


# --- the hop check ---------------------------------------------------------------------------


class LoweredAtBegin(cerebro.torch.Model):
    def begin_epoch(self, epoch):
        self.net.beta = 0.9 * (self.net.beta or 1.0)


class LoweredAtEnd(cerebro.torch.Model):
    def end_epoch(self, epoch, metrics):
        self.net.beta += 0.5
        return super().end_epoch(epoch, metrics)


class Counting(cerebro.torch.Model):
    """Counts epochs; nothing depends on the count."""

    def begin_epoch(self, epoch):
        self.begun = getattr(self, "begun", 1000) + 1


class Whole(cerebro.torch.Model):
    """Needs the steps of a whole epoch."""

    def begin_epoch(self, epoch):
        self.net.beta += 0.5
        assert epoch == 0 or int(self.net.steps) > 2 * BATCHES


@pytest.mark.parametrize("kind", [LoweredAtBegin, LoweredAtEnd])
def test_the_check_finds_what_epochs_accumulate(data, kind):
    found = cerebro.check(lambda config: made(kind, config["lr"]), {"lr": [0.1]}, data)
    assert found.problems[0].startswith("after a hop training continued differently: state_dict()")
    assert found.problems[1:] == ["model.net.beta is lost by a hop: it is not in state_dict()"]


@pytest.mark.parametrize("kind", [Annealed, Unfrozen, Remembering, Counting, Whole])
def test_the_check_accepts_harmless_epoch_hooks(data, kind):
    found = cerebro.check(lambda config: made(kind, config["lr"], frozen()), {"lr": [0.1]}, data)
    assert found.problems == []
