"""Fake GPUs on Ray nodes, to test what actors and workers see of them.

Ray assigns the GPUs that it is configured with. A hook in each process that Ray starts lets an
actor find its assigned GPU.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from cerebro.machine import devices
from cerebro.machine.devices import Device, Found

HOOKS = Path(__file__).parent / "hooks"
LABEL, OTHER, MEMORY = "GPU A", "GPU B", 8 * 10**9


def find() -> Found:
    """Find the devices in ``CUDA_VISIBLE_DEVICES``; those named ``other-`` are of another kind."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    found = tuple(
        Device(f"cuda:{i}", OTHER if name.startswith("other-") else LABEL, MEMORY, name)
        for i, name in enumerate(visible)
    )
    return Found(found, "" if found else "no NVIDIA driver is loaded")


def name_gpus(patch, cudart, cudnn, cache, *names: str) -> None:
    """Give this process and all that it starts these GPUs of the stand-in for the CUDA runtime."""
    patch.setenv("CEREBRO_CUDART", str(cudart))
    patch.setenv("CEREBRO_CUDNN", str(cudnn))
    patch.setenv("CEREBRO_CACHE", str(cache))
    patch.setenv("PYTHONPATH", os.pathsep.join([str(HOOKS), os.environ["PYTHONPATH"]]))
    patch.setenv("CUDA_VISIBLE_DEVICES", ",".join(names))
    patch.setattr(devices, "lookup", find)


def pretend() -> None:
    """The hook."""
    devices.lookup = find


class Model:
    """Fits a number, and prints its device."""

    framework = "numpy"

    def __init__(self, config, info):
        self.rate, self.value = config["rate"], np.zeros(1)
        print("device", info.device, repr(os.environ.get("CUDA_VISIBLE_DEVICES")))
        print("cublas", os.environ.get("CUBLAS_WORKSPACE_CONFIG"))

    def train_batch(self, batch):
        error = self.value - batch["x"].mean()
        self.value = self.value - self.rate * error
        return {"loss": float(error[0] ** 2)}

    def eval_batch(self, batch):
        return {"loss": float((self.value[0] - batch["x"].mean()) ** 2)}

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = np.array(state["value"])


def build(config, info):
    return Model(config, info)
