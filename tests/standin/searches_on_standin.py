"""Repeated searches on a fake GPU, for tests/integration/test_first_contact.py.

The CUDA runtime is the stand-in of this folder. The model trains on the host, because PyTorch has
no GPU, but gets its batches in the usual way. In each search a different part of the device check
fails, for the reason named in the environment; the search's findings are printed with its warnings.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import cerebro
from cerebro.data import batches, depots
from cerebro.machine import cuda, devices
from cerebro.machine.devices import Device, Found
from cerebro.worker.gpu import StateArena

FAULTS: dict[str, dict[str, str]] = {
    "none": {},
    "copies": {"STANDIN_BREAK": "copy"},
    "fills": {"STANDIN_BREAK": "fill"},
    "waits": {"STANDIN_BREAK": "wait", "STANDIN_DEFER": "1"},
    "events": {"STANDIN_BREAK": "record", "STANDIN_DEFER": "1"},
    "kernels": {"STANDIN_BREAK": "kernel"},
    "memory": {"STANDIN_FAIL": "cudaMalloc:1:2"},
    "streams": {"STANDIN_FAIL": "cudaStreamCreateWithFlags:2:800"},
    "module": {"STANDIN_FAIL": "cuModuleLoadDataEx:1:222"},
    "crash": {"STANDIN_BREAK": "crash"},
    "hang": {"STANDIN_BREAK": "hang"},
}


class Line:
    """Fits a line to batches that may be in the stand-in's memory."""

    framework = "torch"

    def __init__(self, config: dict[str, Any]) -> None:
        self.rate = config["rate"]
        self.w = np.zeros(3)

    def _error(self, batch: dict[str, Any]) -> tuple[Any, Any]:
        x, y = (np.from_dlpack(batch[name], device="cpu") for name in ("x", "y"))
        return x, x @ self.w - y

    def train_batch(self, batch: dict[str, Any]) -> dict[str, float]:
        x, error = self._error(batch)
        self.w = self.w - self.rate * (error @ x) / len(x)
        return {"loss": float((error**2).mean())}

    def eval_batch(self, batch: dict[str, Any]) -> dict[str, float]:
        return {"loss": float((self._error(batch)[1] ** 2).mean())}

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.w}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.w = np.array(state["w"])


def set_up() -> None:
    """Make everything except the batches use the host as PyTorch's GPU."""
    import torch

    to_device, make_loader = StateArena.to_device, batches.make_loader
    setattr(torch.cuda, "init", lambda: None)  # noqa: B010
    setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())  # noqa: B010
    setattr(StateArena, "to_device", lambda self, tree, _: to_device(self, tree, "cpu"))  # noqa: B010
    found = Found((Device("cuda:0", "Stand-in 0", 10**9, "0"),))
    setattr(devices, "lookup", lambda: found)  # noqa: B010

    def make_dlpack(data: Any, size: int, **options: Any) -> Any:
        return make_loader(data, size, **(options | {"framework": "dlpack"}))

    setattr(batches, "make_loader", make_dlpack)  # noqa: B010


def search(data: Any, run: Path, device: str) -> tuple[list[Any], list[str]]:
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        result = cerebro.search(
            Line, {"rate": [0.1, 0.2]}, data, epochs=2, validation=0.2, searcher="grid",
            batch_size=8, run=run, progress=False, workers=0, devices=device,
        )  # fmt: skip
    hashes = [[epoch["state_hash"] for epoch in trial.history] for trial in result.trials]
    texts = [str(warning.message) for warning in given]
    return hashes, [text for text in texts if "moves batches" in text]


def main(folder: Path) -> None:
    set_up()
    runtime = ctypes.CDLL(os.environ[cuda.OVERRIDE])
    random = np.random.default_rng(0)
    columns = {"x": random.normal(size=(120, 3)), "y": random.normal(size=120)}
    data = cerebro.shard(columns, folder / "data", shards=3, progress=False)
    said = {"cpu": [*search(data, folder / "cpu", "cpu"), 0]}
    for name, variables in FAULTS.items():
        os.environ[cuda.CACHE_FOLDER] = str(folder / "cache" / name)
        os.environ.update(variables)
        cuda.CHECK_SECONDS = 3.0 if name == "hang" else 60.0
        runtime.standin_reset()
        depots.find_problem.cache_clear()
        depots.depot.cache_clear()
        before = runtime.standin_log_lines()
        hashes, texts = search(data, folder / name, "cuda")
        said[name] = [hashes, texts, runtime.standin_log_lines() - before]
        for variable in variables:
            del os.environ[variable]
    print(json.dumps(said))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
