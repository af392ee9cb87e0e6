"""Find and use CUDA in this process: its runtime, located on first use, and its devices.

Importing Cerebro does not link, ship or open any part of CUDA. The runtime (12 or 13) is the one
that a framework has loaded, else the one in NVIDIA's wheels, else the system's; a second one is
never loaded. ``CEREBRO_CUDART`` sets a runtime's path, for unusual installations and for tests.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cerebro.errors import InputError

if TYPE_CHECKING:
    import cerebro._core as _core

OVERRIDE = "CEREBRO_CUDART"
"""The environment variable with the path of the CUDA runtime to use."""

CUDNN_OVERRIDE = "CEREBRO_CUDNN"
"""The environment variable with the path of the cuDNN to use."""

# Folders inside NVIDIA's wheels; the first is that of CUDA 13.
WHEEL_FOLDERS = ("nvidia/cu13/lib", "nvidia/cuda_runtime/lib", "nvidia/cudnn/lib")
SYSTEM_FOLDERS = ("/usr/local/cuda/lib64",)
MPS_FOLDER = "/tmp/nvidia-mps"

_log = logging.getLogger("cerebro.machine.cuda")


def list_folders() -> list[str]:
    """Return the existing folders that may contain CUDA's libraries, the best first."""
    candidates = [Path(entry or ".") / inner for entry in sys.path for inner in WHEEL_FOLDERS]
    candidates.append(Path(sys.prefix) / "lib")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            candidates += [Path(os.environ[name]) / "lib64", Path(os.environ[name]) / "lib"]
    candidates += [Path(p) for p in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if p]
    candidates += [Path(folder) for folder in SYSTEM_FOLDERS]
    return [str(folder.absolute()) for folder in dict.fromkeys(candidates) if folder.is_dir()]


def find_preferred_version() -> int:
    """Return the CUDA version (12 or 13) for which the installed framework is built; 0 for either.

    If another version were loaded first, a framework imported later would load its own runtime as a
    second one.
    """
    from importlib import metadata  # slow to import, because it imports the email package

    torch = sys.modules.get("torch")
    if torch is not None and getattr(torch, "version", None) is not None and torch.version.cuda:
        return int(torch.version.cuda.partition(".")[0])
    try:
        tagged = re.search(r"\+cu(\d\d)", metadata.version("torch"))
        if tagged is not None:
            return int(tagged[1])
        for line in metadata.requires("torch") or []:
            needed = re.match(r"nvidia-cuda-runtime-cu(\d+)|cuda-toolkit\b.*?==(\d+)", line)
            if needed is not None:
                return int(needed[1] or needed[2])
    except metadata.PackageNotFoundError:
        pass
    for major in (13, 12):
        try:
            metadata.version(f"jax-cuda{major}-plugin")
        except metadata.PackageNotFoundError:
            continue
        return major
    return 0


def open_runtime() -> dict[str, Any]:
    """Find this process's CUDA runtime, once; return its ``path``, ``version`` and ``driver``.

    The last two are numbers such as 12080 for 12.8. Raises DeviceError if there is no driver, or no
    runtime that it can run; the message says what to install.
    """
    import cerebro._core as _core

    path = os.environ.get(OVERRIDE) or None
    return _core.cuda_open(list_folders(), prefer=find_preferred_version(), path=path)


def describe_devices() -> list[dict[str, Any]]:
    """Describe the GPUs that this process may use, in order, without creating a context.

    Each has ``name``, ``uuid``, ``capability`` (such as ``(9, 0)``), ``multiprocessors``,
    ``memory`` (bytes) and ``mps``. Raises DeviceError if there is no GPU, or CUDA cannot be used.
    """
    import cerebro._core as _core

    open_runtime()
    return _core.cuda_devices()


def find_cudnn() -> dict[str, Any] | None:
    """Return cuDNN 9's ``path``, ``version`` (91300 is 9.13.0) and ``cuda``; None without cuDNN.

    Raises DeviceError if cuDNN exists but cannot be loaded.
    """
    import cerebro._core as _core

    return _core.cudnn_find(list_folders())


def cudnn_path() -> str | None:
    """Return the path of the cuDNN in ``CEREBRO_CUDNN``, else of the installed one, if any.

    Raises DeviceError if the installed one cannot be loaded.
    """
    named = os.environ.get(CUDNN_OVERRIDE)
    if named:
        return named
    cudnn = find_cudnn()
    return None if cudnn is None else str(cudnn["path"])


@functools.cache
def open_device(name: str) -> _core.Device:
    """Return a device of this process: ``"cpu"`` (host memory) or ``"cuda:0"`` and so on.

    There is one object per name; see `share_pool` for its memory. Raises DeviceError if CUDA cannot
    be used here, InputError if the device does not exist.
    """
    import cerebro._core as _core

    if name != "cpu":
        open_runtime()
    try:
        opened = _core.Device(name)
    except ValueError as error:
        raise InputError(str(error)) from None
    if name != "cpu":
        _opened.append(name)
        _take_from_torch(opened)
    return opened


def share_pool(name: str) -> None:
    """Take a GPU's memory from PyTorch's allocator, if PyTorch is already loaded.

    Otherwise two pools would compete for the memory. Call this before every request for memory,
    because PyTorch may have been imported since the device was opened.
    """
    if name != "cpu":
        _take_from_torch(open_device(name))


def _take_from_torch(opened: _core.Device) -> None:
    if _pooled.get(opened.name) is opened or "torch" not in sys.modules or not start_torch():
        return
    opened.set_allocator(_torch_allocate, _torch_release)
    _pooled[opened.name] = opened


_opened: list[str] = []
_pooled: dict[str, _core.Device] = {}  # devices that take memory from PyTorch


def describe_opened() -> dict[str, Any] | None:
    """Describe the GPU that this process uses without a framework; None if it uses no GPU.

    The format is that of `cerebro.machine.environment.cuda`, which describes PyTorch's CUDA.
    """
    if not _opened:
        return None
    about = describe_devices()[int(_opened[-1].partition(":")[2])]
    cudnn = find_cudnn()
    return {
        "device": about["name"],
        "capability": "{}.{}".format(*about["capability"]),
        "multiprocessors": about["multiprocessors"],
        "runtime": version_text(open_runtime()["version"]),
        "cudnn": None if cudnn is None else cudnn["version"],
    }


def start_torch() -> bool:
    """Initialize PyTorch's CUDA; return whether PyTorch supports CUDA.

    Before the initialization, PyTorch's operations fail on tensors that it received through its C
    table.
    """
    import torch

    if not torch.cuda.is_available():
        return False
    torch.cuda.init()
    return True


def _torch_allocate(nbytes: int, index: int) -> int:
    import torch

    try:
        return int(torch.cuda.caching_allocator_alloc(nbytes, index, 0))
    except torch.cuda.OutOfMemoryError as error:
        raise MemoryError from error


def _torch_release(address: int) -> None:
    import torch

    torch.cuda.caching_allocator_delete(address)


def tell_unpinned(why: str) -> None:
    """Log that host memory cannot be pinned here, once per process; `why` is the system's error."""
    if not _unpinned:
        _unpinned.append(why)
        _log.warning(
            "no pinned host memory (%s): batches that are streamed to the GPU and states of models "
            "are copied through ordinary memory, which is slower and gives the same results. Allow "
            "more locked memory: ulimit -l, in a container --ulimit memlock=-1",
            why,
        )


_unpinned: list[str] = []


def is_mps_running() -> bool:
    """Return whether the Multi-Process Service's control daemon runs here, judging by its pipe."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or MPS_FOLDER
    return (Path(folder) / "control").exists()


def version_text(number: int) -> str:
    """Return CUDA's version number as text: ``12080`` is ``"12.8"``."""
    return f"{number // 1000}.{number % 1000 // 10}"
