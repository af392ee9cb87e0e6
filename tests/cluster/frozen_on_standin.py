"""Features of a network on a GPU, here and by agents or Ray's actors, over the stand-in for CUDA.

As a program: python frozen_on_standin.py DATA FOLDER CASE

PyTorch has no GPU here. So the network only notes where it is, and computes on the host, with
copies of batches that the loader has made in the stand-in's memory. All else is as on a GPU: which
device the network and its batches are sent to, which GPU each worker sees, and what is compared.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import gpus_by_name
import numpy as np
import torch

import cerebro
from cerebro.data import batches
from cerebro.machine import cuda
from cerebro.machine.devices import CUBLAS_VARIABLE

BATCH, SIDE = 8, 6
IS_WORKER = CUBLAS_VARIABLE in os.environ  # of a worker with a GPU; `main` starts without it


def pretend() -> None:
    """Let PyTorch have batches in the stand-in's memory; workers do it when they load this."""
    make_loader, iterate = batches.make_loader, batches.Batches.__iter__

    def make_dlpack(data, size, **options):
        return make_loader(data, size, **(options | {"framework": "dlpack"}))

    def on_host(self):
        for batch in iterate(self):
            yield {name: copied(tensor) for name, tensor in batch.items()}

    batches.make_loader, batches.Batches.__iter__ = make_dlpack, on_host
    # Only there: a device takes its memory from PyTorch if `start_torch` says that it can.
    batches.cuda = SimpleNamespace(start_torch=lambda: True, share_pool=cuda.share_pool)
    torch.cuda.device = lambda _: contextlib.nullcontext()


def copied(tensor):
    """Return a copy on the host; it knows the device of the tensor."""
    copy = torch.from_numpy(np.from_dlpack(tensor, device="cpu").copy())
    copy.was_on = tensor.__dlpack_device__()
    return copy


class Placed:
    """A parameter, as far as its device is asked for."""

    def __init__(self, device):
        self.device = torch.device(device)


class Net(torch.nn.Module):
    """Two layers on a GPU of the stand-in.

    Parameters
    ----------
    folder
        Workers note there, by the name of their GPU, each device that they compute on, and how much
        work the stand-in has been given.
    fault
        What happens in workers: ``"memory"``: PyTorch is out of memory; ``"gpu"``: the worker of
        the first GPU loses it, once; ``"other"``: other values.
    """

    def __init__(self, folder, device, fault=""):
        super().__init__()
        self.folder, self.place, self.fault = Path(folder), device, fault
        self.scale = torch.nn.Flatten()
        self.head = torch.nn.Linear(3 * SIDE * SIDE, 5)

    def parameters(self, recurse=True):
        yield Placed(self.place)

    def to(self, device):
        self.place = str(device)
        return self

    def cpu(self):
        return self.to("cpu")

    def forward(self, x):
        here = 2, int(self.place.removeprefix("cuda:"))
        assert getattr(x, "was_on", here) == here  # a part of a batch does not know
        if IS_WORKER:
            self.note()
        return self.head(self.scale(x)) + (IS_WORKER and self.fault == "other")

    def note(self):
        runtime = ctypes.CDLL(os.environ[cuda.OVERRIDE])
        gpu = os.environ["CUDA_VISIBLE_DEVICES"]
        (self.folder / gpu).write_text(f"{self.place} {runtime.standin_log_lines()}")
        if self.fault == "memory":
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if self.fault == "gpu" and gpu == "GPU-a" and not (self.folder / "lost").exists():
            (self.folder / "lost").touch()
            torch.cuda.is_initialized = lambda: True
            torch.cuda.synchronize = broken
            broken()


def broken():
    raise RuntimeError("CUDA error: unspecified launch failure")


def features(data, path, net, executor=None, **options):
    options = {"layers": ["scale", ""], "batch_size": BATCH, "progress": False} | options
    return cerebro.torch.features(data, net, path=path, executor=executor, **options)


def on_ray(folder):
    """Return an executor of two of Ray's actors, each with a GPU of this machine."""
    import ray

    ray.init(
        address="local", num_cpus=2, num_gpus=2, include_dashboard=False, logging_level="ERROR",
        object_store_memory=100_000_000, log_to_driver=False,
    )  # fmt: skip
    return cerebro.ray.Executor(workers=2, resources={"GPU": 1})


def main(source, folder, case):
    from clusters import content

    gpus_by_name.pretend()
    pretend()
    torch.manual_seed(3)
    data = cerebro.Dataset(source).with_transforms(
        {"x": [cerebro.transforms.Scale(1 / 255), cerebro.transforms.ToCHW()]}
    )
    net = Net(folder, "cuda:1", case)
    made, here = Path(folder) / "made", Path(folder) / "here"
    executor = on_ray(folder) if case == "ray" else cerebro.cluster.Executor(gpus=1)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = features(data, made, net, executor)
    alone = features(data, here, net)
    assert content(made) == content(here)
    assert found.checksum == alone.checksum and found.same_bits == alone.same_bits
    assert net.place == "cuda:1"
    print(*(str(warning.message) for warning in warned), sep="\n")


if __name__ == "__main__":
    import frozen_on_standin  # under its module name, so that workers find it

    frozen_on_standin.main(*sys.argv[1:])
else:
    if IS_WORKER:
        pretend()
