"""A search over every kind of setting that a clone may change, a searcher that clones, a user."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import cerebro
from cerebro.searchers import Decision, Searcher

_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(128, 8)).astype("f4")
Y = (X[:, 0] + 0.5 * X[:, 1] > 0).astype("i8")
DATA = (X, Y)
BASE = {
    "lr": 0.05, "width": 4, "dropout": 0.1, "batch_size": 16, "opt": "sgd", "w1": 1.0,
    "schedule": "onecycle", "norm": False,
}  # fmt: skip
EPOCHS = 6

MADE = {}
"""By trial: the network, loss, optimizer and scheduler of its last model in this process."""


class Features(nn.Module):
    """Random features that the seed decides, in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mix", torch.randn(8, 8))

    def forward(self, x):
        return x @ self.mix


def build(config, info):
    """A network in which each setting has its own place."""
    width = config["width"]
    norm = nn.BatchNorm1d(width) if config.get("norm") else nn.Identity()
    first = Features() if config.get("norm") else nn.Identity()
    net = nn.Sequential(
        first, nn.Linear(8, width), norm, nn.ReLU(), nn.Dropout(config["dropout"]),
        nn.Linear(width, 2),
    )  # fmt: skip
    lr = config["lr"]
    optimizer = (
        torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
        if config["opt"] == "sgd"
        else torch.optim.AdamW(net.parameters(), lr=lr)
    )
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, config["w1"]]))
    steps = info.total_steps
    schedulers = torch.optim.lr_scheduler
    scheduler = {
        "onecycle": lambda: schedulers.OneCycleLR(optimizer, lr, total_steps=steps),
        "cosine": lambda: schedulers.CosineAnnealingLR(optimizer, steps),
        "plateau": lambda: schedulers.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5),
    }[config["schedule"]]()
    MADE[info.trial] = net, loss, optimizer, scheduler
    return cerebro.torch.Model(
        net,
        optimizer=optimizer,
        loss=loss,
        scheduler=scheduler,
        scheduler_step="metric" if config["schedule"] == "plateau" else "batch",
        accumulate=config.get("accumulate", 1),
    )


class AtEpoch:
    """Sends requests when trials have finished an epoch: (trial, epochs done) to a call."""

    def __init__(self, calls):
        self.calls = dict(calls)

    def on_epoch_end(self, trial, metrics):
        call = self.calls.pop((trial.number, trial.epoch), None)
        if call is not None:
            call()


class Cloning(Searcher):
    """Trains one trial, clones it with each change after three epochs, and clones its clones."""

    adaptive = True

    def __init__(self, changes, base=None, depth=1):
        self.changes, self.base, self.depth = changes, base, depth
        self.begun, self.ready = 0, False

    def setup(self, space, **more):
        pass

    def suggest(self):
        base = {**BASE, **(self.base or {})}
        if self.begun == 0:
            self.begun = 1
            return cerebro.Suggestion(base, epochs=EPOCHS)
        if not self.ready:
            return None
        if self.begun > len(self.changes):
            return cerebro.DONE
        self.begun += 1
        config = {**base, **self.changes[self.begun - 2]}
        return cerebro.Suggestion(config, epochs=EPOCHS, parent=0)

    def report(self, trial, epoch, metrics):
        if trial == 0 and epoch == 2:
            self.ready = True
            return Decision.STOP
        return Decision.CONTINUE

    def state_dict(self):
        return {"begun": self.begun, "ready": self.ready}

    def load_state_dict(self, state):
        self.__dict__.update(state)


def clone_with(folder, changes, *, base=None, **more):
    """Search with `Cloning`; return the result."""
    given = {"validation": 0.25, "workers": 0, "progress": False, "keep": "all"}
    searcher = Cloning(changes, base)
    options = {**given, "width": 20, "searcher": searcher, "run": folder, "epochs": EPOCHS, **more}
    return cerebro.search(build, {"lr": [0.05]}, DATA, **options)
