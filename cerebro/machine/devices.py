"""Training devices: their names, which ones exist, and which worker uses which.

Nothing here starts CUDA in the calling process: a separate program lists the GPUs, once, and only
if a driver is loaded. A GPU worker sees no other GPU (``CUDA_VISIBLE_DEVICES``), so code that calls
``.cuda()`` cannot pick the wrong one.
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

from cerebro.errors import InputError, one_line
from cerebro.machine.environment import installed
from cerebro.machine.resources import usable_cores

CPU = "cpu"
ALL = "cuda"
"""All GPUs, on any machine: recorded for a run on other machines."""
IN_WORKER = "cuda:0"
"""A worker's name for its GPU, the only one that it sees."""

CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
CUBLAS_WORKSPACE = ":4096:8"
"""Makes cuBLAS give equal bits for equal inputs; read when CUDA starts."""

FIND_SECONDS = 120.0
SIGNS_OF_A_DRIVER = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")
PROGRAM = """
import sys
sys.path[:] = filter(None, sys.path)  # do not import files of the working directory
import json
found, problem = [], ""
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

    Attributes
    ----------
    name
        ``"cuda:0"`` and so on, in this process's order.
    label
        The manufacturer's name for it.
    memory
        Total bytes.
    visible
        ``CUDA_VISIBLE_DEVICES`` of a process that sees this GPU alone.
    about
        A description in the format of `cerebro.machine.environment.cuda`; empty if unknown.
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
    """Return the GPUs that this process may use."""
    return _lookup(os.environ.get("CUDA_VISIBLE_DEVICES"))


def has_driver() -> bool:
    """Whether an NVIDIA driver is loaded; starts nothing."""
    return any(Path(sign).exists() for sign in SIGNS_OF_A_DRIVER)


@functools.cache
def _lookup(visible: str | None) -> Found:
    if not has_driver():
        return Found(problem="no NVIDIA driver is loaded")
    if visible is not None and not visible.strip():
        return Found(problem="CUDA_VISIBLE_DEVICES is empty")
    if not installed("torch"):
        return Found(problem="PyTorch, which is needed to use GPUs, is not installed")
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            capture_output=True,
            text=True,
            timeout=FIND_SECONDS,
            check=True,
        )
        rows, problem = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        return Found(problem=f"looking for GPUs failed: {one_line(str(error), 200)}")
    return Found(
        tuple(
            Device(f"cuda:{index}", str(label), int(memory), visible_alone(index, visible), *about)
            for index, (label, memory, *about) in enumerate(rows)
        ),
        str(problem),
    )


def visible_alone(index: int, visible: str | None) -> str:
    """Return ``CUDA_VISIBLE_DEVICES`` for one of the GPUs that `visible` lists."""
    if visible is None:
        return str(index)
    return [name.strip() for name in visible.split(",")][index]


def is_gpu(name: str) -> bool:
    """Whether a device's name is that of a GPU."""
    return name.startswith("cuda")


def are_gpus(devices: Sequence[str]) -> bool:
    """Whether models are trained on GPUs; GPUs are never combined with the CPU."""
    return is_gpu(devices[0])


def in_worker(devices: Sequence[str]) -> str:
    """Return a worker's name for its device, if models are trained on these."""
    return IN_WORKER if are_gpus(devices) else CPU


# --- choosing ----------------------------------------------------------------


def choose(devices: Any, found: Found | None = None) -> tuple[str, ...]:
    """Return the devices that ``devices=`` selects, ``("cpu",)`` or GPUs.

    Parameters
    ----------
    devices
        ``"auto"`` (or None): all GPUs, or the CPU if there are none; ``"cpu"``; ``"cuda"``: all
        GPUs; ``"cuda:1"``; or a list of GPUs.
    found
        The GPUs that exist; default: those of `lookup`.

    Raises
    ------
    InputError
        A name is not a device, or the device is not here.
    """
    wanted = named(devices)
    if wanted == [CPU]:
        return (CPU,)
    found = lookup() if found is None else found
    if wanted == ["auto"]:
        return tuple(found.names) or (CPU,)
    if not found.devices:
        raise InputError(
            f"devices={devices!r}: no GPU can be used here ({found.problem}); give devices='auto' "
            "or 'cpu', or run `python -m cerebro doctor` to see what is missing"
        )
    if wanted == ["cuda"]:
        return tuple(found.names)
    for name in wanted:
        if name not in found.names:
            raise InputError(
                f"devices={devices!r}: no {name!r} here, only {', '.join(found.names)}"
            )
    return tuple(wanted)


def named(devices: Any) -> list[str]:
    """Return the names in ``devices=``, checking only their form.

    Raises
    ------
    InputError
        A name is not a device, or occurs twice.
    """
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
        one = kind == "cuda" and index.isascii() and index.isdigit()
        if not (one or (alone and len(names) == 1)):
            raise InputError(
                f"devices must be 'auto', 'cpu', 'cuda', a GPU such as 'cuda:1' or a list of "
                f"GPUs, not {devices!r}"
            )
    names = [f"cuda:{int(name[5:])}" if ":" in name else name for name in names]
    if len(set(names)) < len(names):
        raise InputError(f"devices={devices!r} must name each device once")
    return names


def _torch_name(item: Any) -> str:
    """Return a ``torch.device``'s name; empty for anything else."""
    named = type(item).__module__ == "torch" and type(item).__name__ == "device"
    return str(item) if named else ""


def mixed(devices: Sequence[str]) -> str | None:
    """Warn that GPUs are of different kinds, on which states differ in their last bits."""
    if not are_gpus(devices):
        return None
    known = lookup().devices
    labels = list(dict.fromkeys(device.label for device in known if device.name in devices))
    if len(labels) < 2:
        return None
    return (
        f"the GPUs are of different kinds ({', '.join(labels)}): a trial's states depend on which "
        "of them train it; give devices= of one kind for exact states"
    )


def recorded(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the devices in a run's record; runs of the first version used the CPU."""
    names = settings.get("devices")
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        return (CPU,)
    return tuple(names) or (CPU,)


def here(devices: Sequence[str]) -> tuple[str, ...]:
    """Return where a run that used these devices resumes: on them, or on similar ones."""
    if not are_gpus(devices):
        return (CPU,)
    found = lookup().names
    return tuple(name for name in devices if name in found) or tuple(found) or (CPU,)


def count_workers(
    devices: Sequence[str],
    workers: int | None,
    workers_per_device: int | None,
    threads: int,
) -> int:
    """Return the number of workers: as requested, or derived from the devices.

    Raises
    ------
    InputError
        The arguments contradict each other.
    """
    if not are_gpus(devices):
        return max(1, usable_cores() // threads) if workers is None else workers
    by_device = len(devices) * (workers_per_device or 1)
    if workers is None:
        return by_device
    if workers_per_device is not None and workers != by_device:
        raise InputError(
            f"workers={workers} and workers_per_device={workers_per_device} on {len(devices)} "
            f"device(s), which makes {by_device}: give one of them"
        )
    return workers


def seats(devices: Sequence[str], workers: int) -> list[Device | None]:
    """Return each worker's device, assigned in turn; None: the CPU.

    Raises
    ------
    InputError
        A device is not here.
    """
    if not are_gpus(devices):
        return [None] * workers
    known = {device.name: device for device in lookup().devices}
    for name in devices:
        if name not in known:
            raise InputError(f"no {name!r} here: give devices= that exist")
    return [known[devices[i % len(devices)]] for i in range(workers)]


def variables(device: Device) -> dict[str, str]:
    """Return the environment variables that a worker needs before CUDA starts."""
    return {
        "CUDA_VISIBLE_DEVICES": device.visible,
        CUBLAS_VARIABLE: os.environ.get(CUBLAS_VARIABLE, CUBLAS_WORKSPACE),
    }


def computing_with(devices: Sequence[str]) -> Mapping[str, Any]:
    """Describe the first of these GPUs; empty if unknown here."""
    found = [device.about for device in lookup().devices if device.name == devices[0]]
    return found[0] if found else {}


def memory_of(devices: Sequence[str]) -> int:
    """Return the bytes of the smallest of these GPUs."""
    return min(device.memory for device in lookup().devices if device.name in devices)


@contextmanager
def using(device: str) -> Iterator[None]:
    """Compute on a device in this process, then restore the current device.

    Sets the variable that cuBLAS reads when it starts.

    Warns
    -----
    UserWarning
        CUDA has already started without it.
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
def building_on(device: str) -> Iterator[None]:
    """Call a user's ``build`` in this block; models are made for this device."""
    token = _building.set(device)
    try:
        yield
    finally:
        _building.reset(token)


def build_device() -> str | None:
    """Return the device that a model is being built for; None outside Cerebro's own calls."""
    return _building.get()
