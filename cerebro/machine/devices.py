"""Find and assign training devices: names, which exist, which worker uses which, full memory.

Nothing here starts CUDA in the calling process: a separate program lists the GPUs, once, and only
if a driver is loaded. It asks the CUDA runtime, and PyTorch, whose import takes seconds, only if
this fails. A GPU worker sees no GPU other than its own (``CUDA_VISIBLE_DEVICES``), so
code that calls ``.cuda()`` cannot choose the wrong one.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cerebro.errors import InputError, one_line, text_of
from cerebro.machine.environment import is_importable
from cerebro.machine.imports import PACKAGE, find_whole_module

CPU = "cpu"
ALL = "cuda"
"""All GPUs of any machine; recorded for a run on other machines."""
IN_WORKER = "cuda:0"
"""The name that a worker uses for its GPU, the only one that it sees."""

MAX_WORKERS = 4096

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_WORKSPACE = ":4096:8"
"""Makes cuBLAS return equal bits for equal inputs; cuBLAS reads it when CUDA starts."""

SIGNS_OF_A_DRIVER = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")
PROGRAM = """
import sys
# Do not import files of the working directory, unless Cerebro itself is there.
sys.path[:] = [*filter(None, sys.path), *sys.argv[1:]]
import json
found, problem = [], ""
try:
    from cerebro.machine import cuda
    found = cuda.describe_as_torch()
except Exception:
    pass  # PyTorch says what is missing
if not found:
    try:
        import torch
        if torch.version.cuda is None:
            problem = f"PyTorch {torch.__version__} is built without CUDA: install one that has it"
        else:
            for index in range(torch.cuda.device_count()):
                its = torch.cuda.get_device_properties(index)
                about = {
                    "device": its.name,
                    "capability": f"{its.major}.{its.minor}",
                    "multiprocessors": its.multi_processor_count,
                    "runtime": torch.version.cuda,
                    "cudnn": torch.backends.cudnn.version(),
                }
                found.append([its.name, its.total_memory, about])
            if not found:
                problem = "PyTorch finds no GPU that it can use"
    except Exception as error:
        problem = f"PyTorch cannot use it: {error}"
print(json.dumps([found, problem]))
"""


@dataclass(frozen=True)
class Device:
    """A GPU of this machine.

    `name` is ``"cuda:0"`` and so on, in this process's order; `label` is the manufacturer's. A
    process with ``CUDA_VISIBLE_DEVICES=visible`` sees only this GPU. `memory` is in bytes. `about`
    is as from `cerebro.machine.environment.cuda`; empty if unknown.
    """

    name: str
    label: str = ""
    memory: int = 0
    visible: str = ""
    about: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Found:
    """The usable GPUs of this machine, or why there are none."""

    devices: tuple[Device, ...] = ()
    problem: str = ""

    @property
    def names(self) -> list[str]:
        return [device.name for device in self.devices]


def lookup() -> Found:
    return _lookup(os.environ.get("CUDA_VISIBLE_DEVICES"))


def has_driver() -> bool:
    """Return whether an NVIDIA driver is loaded, without starting anything."""
    return any(Path(sign).exists() for sign in SIGNS_OF_A_DRIVER)


@functools.cache
def _lookup(visible: str | None) -> Found:
    if not has_driver():
        return Found(problem="no NVIDIA driver is loaded")
    if visible is not None and not visible.strip():
        return Found(problem="CUDA_VISIBLE_DEVICES is empty")
    if not is_importable("torch"):
        return Found(problem="PyTorch, which is needed to use GPUs, is not installed")
    command = [sys.executable, "-c", PROGRAM, str(PACKAGE.parent)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120.0, check=True)
        rows, problem = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return Found(problem=f"looking for GPUs failed: {one_line(str(error), 200)}")
    devices = (
        Device(f"cuda:{index}", str(label), int(memory), restrict_visible(index, visible), *about)
        for index, (label, memory, *about) in enumerate(rows)
    )
    return Found(tuple(devices), str(problem))


def restrict_visible(index: int, visible: str | None) -> str:
    """Return ``CUDA_VISIBLE_DEVICES`` for a process that sees only GPU `index` of `visible`."""
    if visible is None:
        return str(index)
    return [name.strip() for name in visible.split(",")][index]


def is_gpu(name: str) -> bool:
    return name.startswith("cuda")


def are_gpus(devices: Sequence[str]) -> bool:
    """Return whether `devices` are GPUs; the list never mixes GPUs and the CPU."""
    return is_gpu(devices[0])


def name_in_worker(devices: Sequence[str]) -> str:
    return IN_WORKER if are_gpus(devices) else CPU


# --- choosing ----------------------------------------------------------------


def choose_devices(devices: Any, found: Found | None = None) -> tuple[str, ...]:
    """Return the devices that ``devices=`` selects: ``("cpu",)`` or GPUs.

    ``"auto"`` (or None) selects all GPUs, or the CPU on a machine without any; ``"cuda"`` selects
    all GPUs. Otherwise `devices` has names. `found` replaces the result of `lookup`. Raises
    InputError if a name is wrong, or this machine does not have the device.
    """
    names = name_devices(devices)
    if names == [CPU]:
        return (CPU,)
    found = lookup() if found is None else found
    if names == ["auto"]:
        return tuple(found.names) or (CPU,)
    if not found.devices:
        raise InputError(
            f"devices={devices!r}: no GPU can be used here ({found.problem}); give devices='auto' "
            "or 'cpu', or run `python -m cerebro doctor` to see what is missing"
        )
    if names == ["cuda"]:
        return tuple(found.names)
    for name in names:
        if name not in found.names:
            raise InputError(
                f"devices={devices!r}: no {name!r} here, only {', '.join(found.names)}"
            )
    return tuple(names)


def name_devices(devices: Any) -> list[str]:
    """Return the names in ``devices=``; raise InputError if one is invalid or occurs twice."""
    several = isinstance(devices, (list, tuple))
    items = devices if several else ["auto" if devices is None else devices]
    if not items:
        raise InputError(
            f"devices={devices!r} names no device: give 'auto', 'cpu', or GPUs such as 'cuda:0'"
        )
    names = [item if isinstance(item, str) else _torch_name(item) for item in items]
    for name in names:
        kind, colon, index = name.partition(":")
        alone = kind in ("auto", CPU, "cuda") and not colon
        is_numbered = kind == "cuda" and index.isascii() and index.isdigit()
        if not (is_numbered or (alone and len(names) == 1)):
            raise InputError(
                f"devices must be 'auto', 'cpu', 'cuda', a GPU such as 'cuda:1' or a list of "
                f"GPUs, not {devices!r}{_suggest_names(devices)}"
            )
    names = [f"cuda:{int(name[5:])}" if ":" in name else name for name in names]
    if len(set(names)) < len(names):
        raise InputError(f"devices={devices!r} must name each device once")
    return names


def _suggest_names(devices: Any) -> str:
    """Return what to give in place of GPUs named as in other libraries; empty if unclear."""
    if isinstance(devices, str):
        if devices.strip().lower() in ("gpu", "gpus"):
            return ": give 'cuda' for all GPUs, or 'cuda:0' for the first"
        devices = devices.split(",")
    several = isinstance(devices, (list, tuple))
    items = list(devices) if several else [devices]
    if not all(_is_index(item) for item in items):
        return ""
    names = [f"cuda:{int(item)}" for item in items]
    if len(names) > 1:
        return f": give {names}"
    count = not several and int(items[0]) > 0  # in Lightning, a number of GPUs
    return f": give {names[0]!r}, the GPU of this number{', or a list of GPUs' if count else ''}"


def _is_index(item: Any) -> bool:
    if isinstance(item, str):
        return item.strip().isascii() and item.strip().isdigit()
    return hasattr(item, "__index__") and not isinstance(item, bool) and int(item) >= 0


def _torch_name(item: Any) -> str:
    """Return the name of a ``torch.device``; empty for anything else."""
    named = type(item).__module__ == "torch" and type(item).__name__ == "device"
    return str(item) if named else ""


def describe_mixed_kinds(devices: Sequence[str]) -> str | None:
    """Return a warning if the GPUs differ in kind, so that the last bits of states differ."""
    if not are_gpus(devices):
        return None
    gpus = lookup().devices
    labels = list(dict.fromkeys(device.label for device in gpus if device.name in devices))
    if len(labels) < 2:
        return None
    return (
        f"the GPUs are of different kinds ({', '.join(labels)}): a trial's states depend on which "
        "of them train it; give devices= of one kind for exact states"
    )


def choose_resume_devices(devices: Sequence[str]) -> tuple[str, ...]:
    """Return the devices on which to resume a run: the same ones, else similar ones."""
    if not are_gpus(devices):
        return (CPU,)
    names = lookup().names
    return tuple(name for name in devices if name in names) or tuple(names) or (CPU,)


def assign_devices(devices: Sequence[str], workers: int) -> list[Device | None]:
    """Return each worker's device, None for the CPU; raise InputError if a GPU is missing."""
    if not are_gpus(devices):
        return [None] * workers
    gpus = {device.name: device for device in lookup().devices}
    if missing := [name for name in devices if name not in gpus]:
        raise InputError(
            f"devices: this machine has no {missing[0]!r}, only {', '.join(gpus) or 'its CPU'}"
        )
    return [gpus[devices[i % len(devices)]] for i in range(workers)]


def make_variables(device: Device) -> dict[str, str]:
    """Return the environment variables that a worker needs before CUDA starts."""
    return {
        "CUDA_VISIBLE_DEVICES": device.visible,
        CUBLAS_VARIABLE: os.environ.get(CUBLAS_VARIABLE, CUBLAS_WORKSPACE),
    }


def describe_device(devices: Sequence[str]) -> Mapping[str, Any]:
    """Describe the first of `devices`; empty if this machine does not have it."""
    return next((gpu.about for gpu in lookup().devices if gpu.name == devices[0]), {})


def memory_of(devices: Sequence[str]) -> int:
    return min(device.memory for device in lookup().devices if device.name in devices)


@contextmanager
def use_device(device: str) -> Iterator[None]:
    """Compute on a device in this process, then restore the current device.

    Sets the variable that cuBLAS reads when it starts; warns if CUDA has started without it.
    """
    if not is_gpu(device):
        yield
        return
    import torch

    if CUBLAS_VARIABLE not in os.environ:
        if torch.cuda.is_initialized():
            warnings.warn(
                f"CUDA has started in this process without {CUBLAS_VARIABLE}={CUBLAS_WORKSPACE}, "
                "which workers have: matrix products may differ from theirs in the last bits. "
                "Set it before anything is computed on a GPU to get the same bits",
                stacklevel=4,
            )
        os.environ[CUBLAS_VARIABLE] = CUBLAS_WORKSPACE
    with torch.cuda.device(device):
        yield


# --- what is being built where -----------------------------------------------

_building: ContextVar[str | None] = ContextVar("cerebro_building", default=None)


@contextmanager
def set_build_device(device: str) -> Iterator[None]:
    """Let `build_device` return `device` in this block, which calls a user's ``build``."""
    token = _building.set(device)
    try:
        yield
    finally:
        _building.reset(token)


def build_device() -> str | None:
    """Return the device for which a model is being built; None outside Cerebro's own calls."""
    return _building.get()


class GpuMemoryError(InputError):
    """A batch does not fit in the memory of the GPU; the cause is the library's error."""


def is_short_of_gpu_memory(error: BaseException) -> bool:
    """Return whether PyTorch, one of its libraries, or the loader ran out of GPU memory.

    A `MemoryError` counts: ask only where it must be the loader's.
    """
    torch = find_whole_module("torch")
    # CUDA, cuBLAS and cuDNN also allocate memory outside PyTorch's allocator.
    texts = ("CUDA error: out of memory", "STATUS_ALLOC_FAILED")
    return (
        isinstance(error, MemoryError)
        or (torch is not None and isinstance(error, torch.cuda.OutOfMemoryError))
        or (isinstance(error, RuntimeError) and any(text in str(error) for text in texts))
    )


@contextmanager
def explain_gpu_memory_errors(device: str, batch_size: int) -> Iterator[None]:
    """Raise GpuMemoryError, which says what to do, if a GPU runs out of memory in this block.

    `device` is that of the batches. On the CPU, the block may still compute on a GPU.
    """
    try:
        yield
    except Exception as error:
        if not is_short_of_gpu_memory(error):
            raise
        if isinstance(error, MemoryError) and not (is_gpu(device) or "on cuda:" in str(error)):
            raise  # of this machine
        raise GpuMemoryError(
            f"the GPU is out of memory with batch_size={batch_size} ({text_of(error, 300)}): give "
            "a smaller batch_size=, or leave the GPU to this work alone (on a cluster: one worker "
            "for each GPU)"
        ) from error
