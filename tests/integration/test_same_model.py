"""A model is the same model in every process: orders of sets, and structures that change."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import numpy as np
import pytest

import cerebro
from cerebro.errors import RunError

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional


# --- sets -----------------------------------------------------------------------------

PROGRAM = """
import json, sys, warnings
import numpy as np, torch, cerebro
from torch import nn
what, kind, folder = sys.argv[1:4]
workers = int(sys.argv[4])

class Columns(nn.Module):
    def __init__(self):
        super().__init__()
        names = set("alpha beta gamma delta epsilon zeta eta theta".split())
        self.parts = nn.ModuleDict({name: nn.Linear(4, 3) for name in names})
    def forward(self, x):
        return sum(part(x) for part in self.parts.values())

def build(config):
    if kind == "layers":
        net = Columns()
        taken = net.parameters()
    else:
        net = nn.Sequential(*[m for _ in range(5) for m in (nn.Linear(4, 4), nn.Tanh())])
        named = dict(net.named_parameters())
        slim = {name for name in named if name.endswith("bias")}
        both = {"rest": set(named) - slim, "slim": slim}
        decay = {"rest": 0.1, "slim": 0.0}
        taken = [
            {"params": [named[n] for n in both[part]], "weight_decay": decay[part]}
            for part in set(both)
        ]
    optimizer = torch.optim.AdamW(taken, lr=config["lr"])
    return cerebro.torch.Model(net, optimizer=optimizer, loss=nn.functional.cross_entropy)

options = {"workers": workers, "progress": False}
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    if what == "resume":
        result = cerebro.resume(folder + "/half", build, epochs=4, **options)
    elif what == "replay":
        replay = cerebro.replay(folder + "/full", 1, build)
        print(json.dumps([replay.identical, str(replay)]))
        sys.exit()
    else:
        if workers:
            options["live_models"] = 1
        result = cerebro.search(
            build, {"lr": [0.05, 0.01]}, folder + "/data", epochs=2 if what == "half" else 4,
            searcher="grid", batch_size=16, validation=0.25, run=f"{folder}/{what}", **options,
        )
texts = [str(w.message) for w in seen if "another order" in str(w.message)]
print(json.dumps([[t.state_hash for t in result.trials], texts]))
"""


@pytest.fixture
def data(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(160, 4)).astype("f4")
    columns = {"x": x, "y": (x @ rng.normal(size=(4, 3))).argmax(1)}
    return cerebro.shard(columns, tmp_path / "data", shards=4, progress=False)


def run_program(what, kind, folder, workers, seed=None):
    import json

    environment = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
    if seed is not None:
        environment["PYTHONHASHSEED"] = seed
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, what, kind, str(folder), str(workers)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("workers", [0, 2])
def test_parameter_groups_made_from_sets_resume_in_another_process(data, tmp_path, workers):
    """With the head as wide as the layers, moments of other parameters would fit, too."""
    full, _ = run_program("full", "groups", tmp_path, workers, seed="1")
    run_program("half", "groups", tmp_path, workers, seed="2")
    assert run_program("resume", "groups", tmp_path, workers, seed="3") == [full, []]
    assert run_program("replay", "groups", tmp_path, 0, seed="4")[0]


def test_layers_made_from_sets_are_equal_in_all_workers(data, tmp_path):
    full, _ = run_program("full", "layers", tmp_path, 2)
    run_program("half", "layers", tmp_path, 2)
    assert run_program("resume", "layers", tmp_path, 2) == [full, []]
    assert run_program("replay", "layers", tmp_path, 0)[0]


def test_workers_keep_the_hash_seed_of_their_run(data, tmp_path):
    """The user's own seed is recorded, and a resumed run has it, whatever the user's is then."""
    full, _ = run_program("full", "layers", tmp_path, 1, seed="7")
    run_program("half", "layers", tmp_path, 1, seed="7")
    assert run_program("resume", "layers", tmp_path, 1, seed="8") == [full, []]
    recorded = cerebro.open(tmp_path / "half").environment["variables"]
    assert recorded["PYTHONHASHSEED"] == "7"


def test_a_hash_seed_that_cannot_be_kept_warns(data, tmp_path):
    """In the user's process, the first weights and sums depend on its own hash seed."""
    run_program("half", "layers", tmp_path, 0, seed="1")
    _, texts = run_program("resume", "layers", tmp_path, 0, seed="2")
    assert len(texts) == 1
    assert "sort the set" in texts[0]
    run_program("full", "layers", tmp_path, 0)  # with a seed that Python draws
    identical, text = run_program("replay", "layers", tmp_path, 0)
    assert not identical
    assert "the order of a set" in text


# --- structures that change -----------------------------------------------------------


class Changing(cerebro.torch.Model):
    """Unfreezes or adds a layer at the beginning of epoch 2, in different ways."""

    made = kind = None

    def begin_epoch(self, epoch):
        if self.kind == "from" and epoch >= 2 and len(self.made.param_groups) == 1:
            self.unfreeze()
        if self.kind in ("at", "at, without moments") and epoch == 2:
            self.unfreeze()
        if self.kind == "grown" and epoch == 2:
            self.grow()
        if self.kind == "grown twice" and epoch in (1, 3):
            self.grow()

    def end_epoch(self, epoch, metrics):
        found = super().end_epoch(epoch, metrics)
        if self.kind == "end" and epoch == 1:
            self.unfreeze()
        return found

    def train_batch(self, batch):
        if self.kind == "batch":
            self.net.batches += 1
            if int(self.net.batches) == 20:
                self.unfreeze()
        return super().train_batch(batch)

    def unfreeze(self):
        self.net[0].requires_grad_(True)
        self.made.add_param_group({"params": list(self.net[0].parameters()), "lr": 1e-3})

    def grow(self):
        layer = nn.Linear(3, 3)
        with torch.no_grad():
            layer.weight.copy_(torch.eye(3))
        self.net.append(layer)
        self.made.add_param_group({"params": list(layer.parameters())})


def changing(kind, **options):
    def build(config):
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        net.register_buffer("batches", torch.zeros((), dtype=torch.long))
        net[0].requires_grad_(False)
        optimizer = torch.optim.SGD if kind == "at, without moments" else torch.optim.Adam
        made = optimizer(net[2].parameters(), lr=config["lr"])
        model = Changing(net, optimizer=made, loss=F.cross_entropy, **options)
        model.made, model.kind = made, kind
        return model

    return build


class Plain:
    """A model of the user's own, without the network's class of Cerebro."""

    framework = "torch"

    def __init__(self, rate):
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=rate)

    def begin_epoch(self, epoch):
        if epoch == 2:
            self.net.append(nn.Linear(3, 3))
            self.optimizer.add_param_group({"params": list(self.net[-1].parameters())})

    def train_batch(self, batch):
        loss = F.cross_entropy(self.net(batch["x"]), batch["y"])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.detach()}

    def eval_batch(self, batch):
        with torch.no_grad():
            return {"loss": F.cross_entropy(self.net(batch["x"]), batch["y"])}

    def predict_batch(self, batch):
        with torch.no_grad():
            return self.net(batch["x"])

    def state_dict(self):
        return {"net": dict(self.net.state_dict()), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])


def build_plain(config):
    return Plain(config["lr"])


def build_lightning(config):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)
            self.body.requires_grad_(False)

        def training_step(self, batch, index):
            return F.cross_entropy(self.head(self.body(batch["x"]).relu()), batch["y"])

        def validation_step(self, batch, index):
            self.log("val_loss", self.training_step(batch, index))

        def predict_step(self, batch, index):
            return self.head(self.body(batch["x"]).relu())

        def configure_optimizers(self):
            return torch.optim.Adam(self.head.parameters(), lr=config["lr"])

        def on_train_epoch_start(self):
            if self.current_epoch == 2:
                self.body.requires_grad_(True)
                self.trainer.optimizers[0].add_param_group(
                    {"params": list(self.body.parameters()), "lr": 1e-3}
                )

    return cerebro.torch.from_lightning(Module())


def searched(build, data, run, workers, **options):
    settings = {"searcher": "grid", "epochs": 4, "batch_size": 16, "validation": 0.25} | options
    if workers:
        settings["live_models"] = 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cerebro.search(
            build,
            {"lr": [0.05, 0.02, 0.01]},
            data,
            run=run,
            workers=workers,
            progress=False,
            **settings,
        )


FINISH = {
    "from": changing("from"),
    "at": changing("at"),
    "at, without moments": changing("at, without moments"),
    "grown": changing("grown"),
    "grown twice": changing("grown twice", clip_norm=0.5),
    "grown, gathered": changing("grown", accumulate=2),
    "plain": build_plain,
    "lightning": build_lightning,
}


@pytest.mark.parametrize("kind", FINISH)
def test_a_structure_that_depends_on_the_epoch_can_hop(data, tmp_path, kind):
    build = FINISH[kind]
    here = searched(build, data, tmp_path / "0", 0)
    there = searched(build, data, tmp_path / "2", 2)
    hashes = [[epoch["state_hash"] for epoch in t.history] for t in here.trials]
    assert hashes == [[epoch["state_hash"] for epoch in t.history] for t in there.trials]
    assert [t.status for t in there.trials] == 3 * ["finished"]
    for trial in (*here.trials, *there.trials):
        trial.load(epoch="last", build=build)
    assert len(there.trials[0].predict(data, build=build)) == data.num_rows
    assert cerebro.replay(there, 1, build)


def test_a_structure_that_depends_on_the_epoch_can_be_resumed(data, tmp_path):
    build = FINISH["at"]
    full = searched(build, data, tmp_path / "full", 0, epochs=5)
    searched(build, data, tmp_path / "part", 0, epochs=3)
    resumed = cerebro.resume(tmp_path / "part", build, epochs=5, workers=1, progress=False)
    assert [t.state_hash for t in full.trials] == [t.state_hash for t in resumed.trials]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("kind", "epoch"), [("end", 1), ("batch", 2)])
def test_an_unexpected_structure_change_fails_at_the_first_commit(
    data, tmp_path, kind, epoch, workers
):
    with pytest.raises(RunError, match=f"structure changes at epoch {epoch}: make it depend on"):
        searched(changing(kind), data, tmp_path / "run", workers)
    result = cerebro.open(tmp_path / "run")
    assert all(len(trial.history) == epoch for trial in result.trials)


@pytest.mark.parametrize("clip_norm", [None, 0.01])
def test_added_layers_are_trained_as_in_a_loop(clip_norm):
    """Their gradients do not pile up, and count in the norm."""

    def grown():
        torch.manual_seed(0)
        model = changing("grown", clip_norm=clip_norm)({"lr": 0.1})
        model.grow()
        return model

    rng = np.random.default_rng(0)
    batches = [
        {"x": torch.tensor(rng.normal(size=(8, 4)).astype("f4")), "y": torch.arange(8) % 3}
        for _ in range(5)
    ]
    model, loop = grown(), grown()
    model.begin_unit(len(batches) * [1])
    for batch in batches:
        model.train_batch(batch)
        F.cross_entropy(loop.net(batch["x"]), batch["y"]).backward()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(loop.net.parameters(), clip_norm)
        loop.made.step()
        loop.net.zero_grad()
    model.end_unit()
    found = model.net.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in loop.net.state_dict().items())
