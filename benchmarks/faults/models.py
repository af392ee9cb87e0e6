"""The campaign's models: small, and they report when a unit begins.

They run in the workers. A model counts its units in its own state, so its reports are independent
of Cerebro's records: it writes ``start PID TRIAL POSITION NANOSECONDS`` to the pipe named by
``CEREBRO_FAULTS_EVENTS`` when the first batch of unit POSITION arrives.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from types import FrameType
from typing import Any

import numpy as np

EVENTS = "CEREBRO_FAULTS_EVENTS"
CHILDREN = "CEREBRO_FAULTS_CHILDREN"
"""If set, every worker starts a child process, as user code may."""

DEAF = ".deaf"
"""Suffix of a file named after the pipe: the process that finds it deletes it and blocks for a
while."""
DEAF_SECONDS = 20

SECONDS_PER_BATCH = 0.0004
"""Simulates computing without CPU time, so that faults can strike inside a unit."""

_pipe: list[int] = []
_children: list[subprocess.Popen[bytes]] = []


def tell(line: str) -> None:
    """Write a line to the campaign's pipe; lines are short enough to be atomic.

    OSError if the campaign is gone; otherwise a waiting run would never end.
    """
    path = os.environ.get(EVENTS)
    if path is None:
        return
    if not _pipe:
        _pipe.append(os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        os.set_blocking(_pipe[0], True)
    os.write(_pipe[0], (line + "\n").encode())


def be_deaf_if_told() -> None:
    """On the campaign's request, block in C without releasing the GIL, as user code may."""
    path = os.environ.get(EVENTS, "")
    with contextlib.suppress(OSError):
        os.unlink(path + DEAF)  # noqa: PTH108
        tell(f"deaf {os.getpid()}")
        ctypes.PyDLL(None).sleep(DEAF_SECONDS)


class Teller:
    """Reports when a unit begins; has no ``__dict__``, because it is not part of the model's
    state."""

    __slots__ = ("begun", "checking_hop", "trial")

    def __init__(self, trial: int) -> None:
        self.trial = trial
        self.begun = False
        self.checking_hop: bool | None = None

    def batch(self, position: int) -> None:
        if self.begun:
            return
        self.begun = True
        if self.checking_hop is None:
            self.checking_hop = in_hop_check()
        if not self.checking_hop:
            tell(f"start {os.getpid()} {self.trial} {position} {time.monotonic_ns()}")

    def end(self) -> None:
        self.begun = False


def in_hop_check() -> bool:
    """Whether this is the hop check before the first trial, which is not a unit."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "cerebro.worker.hop_check":
            return True
        frame = frame.f_back
    return False


def in_worker() -> bool:
    """Whether this process is a worker: children of other processes are not cleaned up."""
    main = getattr(sys.modules["__main__"], "__spec__", None)
    return main is not None and main.name == "cerebro._worker"


class Counted:
    """A model that counts its units and grows, so that no two states have the same length."""

    def __init__(self, model: Any, trial: int, framework: str) -> None:
        self.framework = framework
        self.model = model
        self.units = 0
        self.losses: list[float] = []
        self.teller = Teller(trial)
        if CHILDREN in os.environ and not _children and in_worker():
            _children.append(subprocess.Popen(["sleep", "1000"]))

    def train_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        self.teller.batch(self.units)
        be_deaf_if_told()
        time.sleep(SECONDS_PER_BATCH)
        metrics: dict[str, Any] = self.model.train_batch(batch)
        return metrics

    def eval_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        self.teller.batch(self.units)
        time.sleep(SECONDS_PER_BATCH)
        metrics: dict[str, Any] = self.model.eval_batch(batch)
        return metrics

    def end_unit(self) -> None:
        self.units += 1
        self.teller.end()

    def end_epoch(self, epoch: int, metrics: dict[str, float]) -> None:
        self.units += 1  # the validation
        self.losses.append(metrics["loss"])
        self.teller.end()

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "units": self.units, "losses": list(self.losses)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.units = state["units"]
        self.losses = list(state["losses"])


class LeastSquares:
    """Linear regression with momentum and noise from NumPy's generator."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.w = np.zeros(4)
        self.v = np.zeros(4)
        self.trace = np.zeros((config["rows"], 4))  # makes a state several pages long

    def train_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        x, y = batch["x"], batch["y"]
        error = x @ self.w - y
        noise = np.random.normal(0.0, 0.01, 4)
        self.v = 0.9 * self.v - self.config["lr"] * ((x.T @ error) / len(y) + noise)
        self.w = self.w + self.v
        self.trace = np.roll(self.trace, 1, axis=0)
        self.trace[0] = self.w
        return {"loss": float((error**2).mean())}

    def eval_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        error = batch["x"] @ self.w - batch["y"]
        return {"loss": float((error**2).mean()), "mae": float(np.abs(error).mean())}

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.w, "v": self.v, "trace": self.trace}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.w, self.v = np.array(state["w"]), np.array(state["v"])
        self.trace = np.array(state["trace"])


def build_numpy(config: dict[str, Any], info: Any) -> Counted:
    return Counted(LeastSquares(config), info.trial, "numpy")


def build_torch(config: dict[str, Any], info: Any) -> Counted:
    """A network with dropout, whose masks come from PyTorch's generator."""
    import torch

    import cerebro.torch

    net = torch.nn.Sequential(
        torch.nn.Linear(4, 32), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1)
    ).double()
    optimizer = torch.optim.Adam(net.parameters(), lr=config["lr"])

    def loss(output: Any, target: Any) -> Any:
        return torch.nn.functional.mse_loss(output[:, 0], target)

    model = cerebro.torch.Model(net, optimizer=optimizer, loss=loss, inputs="x", target="y")
    return Counted(model, info.trial, "torch")
