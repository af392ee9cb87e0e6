"""Searches whose workers share a process, over the stand-in; for tests/integration/test_streams.py.

PyTorch has no GPU here. So the model of this module computes in the stand-in's memory, on the
stream of its worker, by copies that are done later; tensors in this memory count as a GPU's. Its
state is made of the batches' bytes, moved around as the random generators of the process say, so
that work in the wrong order, a missing wait or another trial's random numbers give other bytes.
Importing this module in a worker sets it up.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import json
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dlpack_structs import describe

import cerebro
from cerebro.data import batches
from cerebro.machine import cuda, devices, turns
from cerebro.machine.devices import Device, Found
from cerebro.worker import evaluate, gpu

SIZE, SLOTS = 4096, 1024
BATCH, ROWS, SHARDS, EPOCHS = 8, 240, 3, 2
TO_DEVICE, TO_HOST, ON_DEVICE = 1, 2, 3

runtime = ctypes.CDLL(os.environ[cuda.OVERRIDE])
for name in ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaEventDestroy"):
    getattr(runtime, name).argtypes = (ctypes.c_void_p,)
runtime.cudaEventRecord.argtypes = (ctypes.c_void_p, ctypes.c_void_p)
runtime.cudaMemsetAsync.argtypes = (
    *(ctypes.c_void_p, ctypes.c_int),
    *(ctypes.c_size_t, ctypes.c_void_p),
)
runtime.cudaMalloc.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
runtime.cudaHostAlloc.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
runtime.cudaMemcpyAsync.argtypes = (
    *(ctypes.c_void_p, ctypes.c_void_p),
    *(ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p),
)
slots = itertools.count()  # of numbers that a unit reads at its end
delays = random.Random(int(os.environ.get("STANDIN_ODD", "0")))


def checked(code: int) -> None:
    assert code == 0, code


# --- streams and memory ------------------------------------------------------------


class Event:
    """An event that the device reaches late; the host waits for it without its turn."""

    def __init__(self) -> None:
        self._event = ctypes.c_void_p()
        checked(runtime.cudaEventCreateWithFlags(ctypes.byref(self._event), 2))
        checked(runtime.cudaEventRecord(self._event, here.stream()))

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        time.sleep(delays.choice((0.0, 0.0005, 0.002)))
        checked(runtime.cudaEventSynchronize(self._event))

    def __del__(self) -> None:
        runtime.cudaEventDestroy(self._event)


class Stream:
    """The stream of one worker."""

    def __init__(self) -> None:
        self.handle = ctypes.c_void_p()
        checked(runtime.cudaStreamCreateWithFlags(ctypes.byref(self.handle), 1))

    @contextlib.contextmanager
    def make_current(self) -> Iterator[None]:
        here.now = self
        yield
        here.now = None


class Here(threading.local):
    now: Stream | None = None
    flat: Any = None  # where a state is put together

    def stream(self) -> ctypes.c_void_p:
        if self.now is None:
            self.now = Stream()
        return self.now.handle


here = Here()
away: set[int] = set()  # addresses of tensors in device memory


def memory_at(address: ctypes.c_void_p, size: int) -> Any:
    assert address.value is not None
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(address.value), dtype=torch.uint8)


def device_memory(size: int) -> Any:
    """Return memory of the device, which stays: freeing it would do all work at once."""
    address = ctypes.c_void_p()
    checked(runtime.cudaMalloc(ctypes.byref(address), size))
    memory = memory_at(address, size)
    away.add(memory.data_ptr())
    return memory


@functools.cache
def results() -> Any:
    """Return the process's memory for numbers that are read at the end of units."""
    return device_memory(4 * SLOTS)


def put(to: int, source: int, size: int, how: int) -> None:
    checked(runtime.cudaMemcpyAsync(to, source, size, how, here.stream()))


def synchronize(*_: Any) -> None:
    checked(runtime.cudaStreamSynchronize(here.stream()))


# --- the model ---------------------------------------------------------------------


class Mixer:
    """Copies batches into its state, and parts of its state to other parts."""

    framework = "torch"
    overlaps = True
    replays_graphs = True  # as far as the number of lanes is concerned

    def __init__(self, config: dict[str, Any], info: Any) -> None:
        self._on_device = info.device != "cpu"
        self._trial, self._kill = info.trial, config.get("kill")
        self._count = config["first"]
        self._memory = torch.zeros(SIZE, dtype=torch.uint8)
        if self._on_device:
            self._memory = device_memory(SIZE)
            away.add(self._memory[SIZE // 2 :].data_ptr())
            checked(runtime.cudaMemsetAsync(self._memory.data_ptr(), 0, SIZE, here.stream()))

    def _move(self, to: int, source: int, size: int) -> None:
        if self._on_device:
            put(to, source, size, ON_DEVICE)
        else:
            ctypes.memmove(to, source, size)

    def _loss(self, batch: dict[str, Any]) -> Any:
        """Return the batch's first number, in device memory, where it arrives later."""
        if not self._on_device:
            return batch["x"].flatten()[0].clone()
        at = results()[4 * (next(slots) % SLOTS) :][:4]
        away.add(at.data_ptr())
        _, view = describe(capsule := self._asked(batch["x"]))
        put(at.data_ptr(), view.data, 4, ON_DEVICE)
        del capsule
        return at.view(torch.float32)[0]

    def _asked(self, tensor: Any) -> Any:
        return tensor.__dlpack__(stream=here.stream().value, max_version=(1, 0))

    def train_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        x, base = batch["x"], self._memory.data_ptr()
        self._count += 1
        print("trial", self._trial, "batch", self._count, "process", os.getpid(), flush=True)
        if self._kill is not None and self._count == 20 and not Path(self._kill).exists():
            Path(self._kill).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self._on_device:
            size = x.nbytes
            _, view = describe(capsule := self._asked(x))
            self._move(base + random.randrange(SIZE - size), view.data, size)
            del capsule
        else:
            size = x.numel() * 4
            self._move(base + random.randrange(SIZE - size), x.data_ptr(), size)
        half = SIZE // 2
        to, source = np.random.randint(half - 100, size=2)
        self._move(base + int(to), base + half + int(source), 100)
        return {"loss": self._loss(batch)}

    def eval_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        random.random()  # of validation, which must not change the training
        return {"loss": self._loss(batch)}

    def state_dict(self) -> dict[str, Any]:
        halves = list(self._memory.split(SIZE // 2))  # put together on the device
        return {"memory": halves, "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._count = state["count"]
        for half, there in zip(self._memory.split(SIZE // 2), state["memory"], strict=True):
            self._move(half.data_ptr(), there.data_ptr(), SIZE // 2)


def build(config: dict[str, Any], info: Any) -> Mixer:
    return Mixer(config, info)


# --- user code that notes who else is in user code ------------------------------------

inside: list[tuple[int, str]] = []  # the threads that are in user code, and where


def watched(call: Any) -> Any:
    """Note each call in a file of the process, with the calls of other threads it has met."""

    @functools.wraps(call)
    def note(*given: Any, **more: Any) -> Any:
        me = (threading.get_ident(), call.__name__)
        inside.append(me)
        try:
            result = call(*given, **more)
            time.sleep(0.0005)  # so that others come in if they can
            met = [name for thread, name in inside if thread != me[0]]
            with Path(os.environ["WATCHED"]).open("a") as log:
                log.write(json.dumps([os.getpid(), *me, met]) + "\n")
            return result
        finally:
            inside.remove(me)

    return note


class Watched(Mixer):
    """Has every call that Cerebro makes of a user's model."""

    accumulate = 1
    _updates = 1

    def bind_info(self, info: Any) -> None:
        assert info.trial == self._trial

    def begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def end_epoch(self, epoch: int, metrics: dict[str, float]) -> dict[str, float]:
        return {"seen": float(epoch)}

    def begin_unit(self, updates: Any) -> None:
        self._updates = len(updates)

    def end_unit(self) -> None:
        assert self._updates > 0

    def training_metrics(self) -> dict[str, Any]:
        return {"loss": float(self._count)}


for name in ("train_batch", "eval_batch", "state_dict", "load_state_dict"):
    setattr(Watched, name, watched(getattr(Mixer, name)))
for name in (
    *("bind_info", "begin_epoch", "end_epoch", "begin_unit", "end_unit", "training_metrics"),
    "__init__",
):
    setattr(Watched, name, watched(getattr(Watched, name)))


@watched
def build_watched(config: dict[str, Any], info: Any) -> Watched:
    return Watched(config, info)


# --- setting up, in the search's process and in workers ------------------------------


def set_up() -> None:
    make_loader = batches.make_loader
    read = evaluate._read_numbers

    def make_dlpack(data: Any, size: int, **options: Any) -> Any:
        if options.get("device", "cpu") != "cpu":
            options["framework"] = "dlpack"
        return make_loader(data, size, **options)

    def pinned(self: Any, torch_: Any, size: int) -> None:
        if self.nbytes < size:
            address = ctypes.c_void_p()
            checked(runtime.cudaHostAlloc(ctypes.byref(address), size, 1))
            self._memory = memory_at(address, size)
            pinned.kept.append(address)  # type: ignore[attr-defined]

    pinned.kept = []  # type: ignore[attr-defined]

    def copy_out(place: Any, tensor: Any) -> None:
        size = tensor.numel() * tensor.element_size()
        put(place.data_ptr(), tensor.data_ptr(), size, TO_HOST)

    def allocate(_: Any, size: int, device: Any) -> Any:
        if here.flat is None:
            here.flat = device_memory(size)
        return here.flat[:size]

    def copy_together(_: Any, places: Any, tensors: Any) -> None:
        for place, tensor in zip(places, tensors, strict=True):
            put(place.data_ptr(), tensor.data_ptr(), tensor.nbytes, ON_DEVICE)

    def copy_in(memory: Any, _: str) -> Any:
        there = device_memory(len(memory))
        put(there.data_ptr(), memory.data_ptr(), len(memory), TO_DEVICE)
        return there

    def read_waited(tensors: Any) -> Any:
        if not turns.gives_away():
            synchronize()
        return read(tensors)

    def is_away(_: Any, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.data_ptr() in away

    for owner, name, value in (
        (batches, "make_loader", make_dlpack),
        (gpu, "_synchronize", synchronize),
        (gpu, "_copy_out", copy_out),
        (gpu, "_allocate", allocate),
        (gpu, "_copy_together", copy_together),
        (gpu, "_copy_in", copy_in),
        (gpu, "_is_away", is_away),
        (gpu.StateArena, "_reserve", pinned),
        (evaluate, "_is_scalar_elsewhere", lambda v: is_away(None, v)),
        (evaluate, "_read_numbers", read_waited),
        (gpu, "record_event", Event),
        (gpu, "open_stream", lambda _: Stream()),
        (torch.cuda, "init", lambda: None),
    ):
        setattr(owner, name, value)


set_up()


# --- the searches --------------------------------------------------------------------


def search(data: Any, run: Path, device: str, workers: int | None, **more: Any) -> dict[str, Any]:
    space = {"first": [0, 1, 2, 3, 4], **({"kill": [more["kill"]]} if "kill" in more else {})}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = cerebro.search(
            more.get("build", build), space, data, epochs=EPOCHS, validation=0.2, searcher="grid",
            batch_size=BATCH, run=run, progress=False, devices=device, workers=workers,
            live_models=2,
        )  # fmt: skip
    lines = [line.split() for trial in result.trials for line in trial.log.splitlines()]
    units = [(u["start"], u["end"], u["worker"]) for u in result.saved.units()]
    return {
        "status": [trial.status for trial in result.trials],
        "hashes": [[epoch["state_hash"] for epoch in t.history] for t in result.trials],
        "metrics": [[epoch["metrics"] for epoch in t.history] for t in result.trials],
        "foreign": sum(
            line[:2] != ["trial", str(t.number)]
            for t in result.trials
            for line in (text.split() for text in t.log.splitlines())
        ),
        "processes": sorted({line[5] for line in lines if len(line) == 6}),
        "workers": result.saved.settings["workers"],
        "overlaps": sum(
            one[0] < other[0] < one[1] and one[2] != other[2] for one in units for other in units
        ),
    }


WORKERS = {"cpu": 1, "watched-cpu": 1, "one": 1, "two": 2}
"""By the first word of a way; None: as many as a search chooses."""


def main(folder: Path, ways: list[str]) -> None:
    found = Found((Device("cuda:0", "Stand-in 0", 10**9, "0"),))
    setattr(devices, "lookup", lambda: found)  # noqa: B010
    rng = np.random.default_rng(0)
    columns = {"x": rng.normal(size=(ROWS, 5)).astype(np.float32)}
    data = cerebro.shard(columns, folder / "data", shards=SHARDS, progress=False)
    said = {}
    for way in ways:
        os.environ["STANDIN_DEFER"] = "1"
        os.environ["STANDIN_ODD"] = way.partition(" ")[2] or "0"
        kind = way.partition(" ")[0]
        if kind.startswith("watched"):
            os.environ["WATCHED"] = str(folder / f"{way}.calls")
        more: dict[str, Any] = {}
        if kind == "killed":
            more["kill"] = str(folder / "killed")
        elif kind.startswith("watched"):
            more["build"] = build_watched
        device = "cpu" if kind in ("cpu", "watched-cpu") else "cuda:0"
        said[way] = search(data, folder / way, device, WORKERS.get(kind), **more)
        if kind == "watched":
            calls = Path(os.environ["WATCHED"]).read_text()
            said[way]["calls"] = [json.loads(line) for line in calls.splitlines()]
    print(json.dumps(said))


if __name__ == "__main__":
    import streams_on_standin

    streams_on_standin.main(Path(sys.argv[1]), sys.argv[2:])
