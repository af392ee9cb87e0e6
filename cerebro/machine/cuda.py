"""Find and use CUDA in this process: its runtime, located on first use, and its devices.

Importing Cerebro does not link, ship or open any part of CUDA. The runtime (12 or 13) is the one
that a framework has loaded, else the one in NVIDIA's wheels, else the system's; a second one is
never loaded. ``CEREBRO_CUDART`` sets a runtime's path, for unusual installations and for tests.

Before a GPU's first use, `find_problem` checks whether it can be trusted with batches. A device
that fails in a kernel may kill its process or hang, so the check runs in another process. It tests
memory, streams and every kernel (`_core.Device.check`). The result is stored for this GPU, this
driver and these versions of PyTorch, the CUDA runtime and Cerebro, in a separate file in the user's
cache folder. If the file cannot be read or written, the check runs again. `check_early` runs it
while a worker starts, before this worker asks for the result.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import json
import logging
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, NoReturn

import cerebro._core as _core
from cerebro.errors import CorruptDataError, DeviceError, InputError, one_line
from cerebro.machine.durable import replace_file
from cerebro.machine.environment import package_version, version
from cerebro.machine.files import read_bytes
from cerebro.machine.imports import PACKAGE

OVERRIDE = "CEREBRO_CUDART"
"""The environment variable with the path of the CUDA runtime to use."""

CUDNN_OVERRIDE = "CEREBRO_CUDNN"
"""The environment variable with the path of the cuDNN to use."""

# Folders inside NVIDIA's wheels; the first is that of CUDA 13.
WHEEL_FOLDERS = ("nvidia/cu13/lib", "nvidia/cuda_runtime/lib", "nvidia/cudnn/lib")
SYSTEM_FOLDERS = ("/usr/local/cuda/lib64",)

CHECK_SECONDS = 60.0
"""The timeout of a check in seconds; a check takes about one, mostly to start CUDA."""
CACHE_FOLDER = "CEREBRO_CACHE"
"""The environment variable with the folder of stored results; default: the user's cache folder."""
MOST_BYTES = 100_000  # the largest stored result
RESULT_FILES = "device-*.json"
LOOK_SECONDS = 0.02  # between looks for the result of another process's check
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
"""The signals by which a driver's mistakes end a process."""

_IMPORT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from cerebro.machine import cuda; "
)
CHECK_PROGRAM = _IMPORT + "cuda.check_here(sys.argv[2])"
EARLY_PROGRAM = _IMPORT + "cuda.find_problem(sys.argv[2])"

_log = logging.getLogger("cerebro.machine.cuda")


def list_folders() -> list[str]:
    """Return the existing folders that may contain CUDA's libraries, the best first."""
    candidates = [Path(entry or ".") / inner for entry in sys.path for inner in WHEEL_FOLDERS]
    candidates.append(Path(sys.prefix) / "lib")
    homes = filter(None, (os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")))
    candidates += [Path(home, inner) for home in homes for inner in ("lib64", "lib")]
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
    with contextlib.suppress(metadata.PackageNotFoundError):
        tagged = re.search(r"\+cu(\d\d)", metadata.version("torch"))
        if tagged is not None:
            return int(tagged[1])
        for line in metadata.requires("torch") or []:
            needed = re.match(r"nvidia-cuda-runtime-cu(\d+)|cuda-toolkit\b.*?==(\d+)", line)
            if needed is not None:
                return int(needed[1] or needed[2])
    return next((m for m in (13, 12) if package_version(f"jax-cuda{m}-plugin") is not None), 0)


def open_runtime() -> dict[str, Any]:
    """Find this process's CUDA runtime, once; return its ``path``, ``version`` and ``driver``.

    The last two are numbers such as 12080 for 12.8. Raises DeviceError if there is no driver, or no
    runtime that it can run; the message says what to install.
    """
    path = os.environ.get(OVERRIDE) or None
    return _core.cuda_open(list_folders(), prefer=find_preferred_version(), path=path)


def describe_devices() -> list[dict[str, Any]]:
    """Describe the GPUs that this process may use, in order, without creating a context.

    Each has ``name``, ``uuid``, ``capability`` (such as ``(9, 0)``), ``multiprocessors``,
    ``memory`` (bytes) and ``mps``. Raises DeviceError if there is no GPU, or CUDA cannot be used.
    """
    open_runtime()
    return _core.cuda_devices()


def describe_as_torch() -> list[tuple[str, int, dict[str, Any]]]:
    """Describe the GPUs that PyTorch can use here, in order, without the time of importing it.

    Each has its name, bytes of memory and the record of `environment.cuda`. Empty if only PyTorch
    knows: it is not installed or not built for this runtime, or there is no cuDNN. Raises
    DeviceError as `describe_devices` does.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return []
    built_for = runpy.run_path(str(Path(spec.origin).with_name("version.py"))).get("cuda")
    runtime, cudnn = open_runtime(), find_cudnn()
    if not built_for or cudnn is None or int(built_for.split(".")[0]) != runtime["version"] // 1000:
        return []
    return [
        (about["name"], about["memory"], _record(about, built_for, cudnn["version"]))
        for about in describe_devices()
    ]


def _record(about: Mapping[str, Any], runtime: str, cudnn: int | None) -> dict[str, Any]:
    """Return a GPU's record, as that of `environment.cuda`."""
    return {
        "device": about["name"],
        "capability": "{}.{}".format(*about["capability"]),
        "multiprocessors": about["multiprocessors"],
        "runtime": runtime,
        "cudnn": cudnn,
    }


def find_cudnn() -> dict[str, Any] | None:
    """Return cuDNN 9's ``path``, ``version`` (91300 is 9.13.0) and ``cuda``; None without cuDNN.

    Raises DeviceError if cuDNN exists but cannot be loaded.
    """
    return _core.cudnn_find(list_folders())


def cudnn_path() -> str | None:
    """Return the path in ``CEREBRO_CUDNN``, else that of `find_cudnn`; None without cuDNN."""
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


def find_opened(name: str) -> _core.Device | None:
    """Return a GPU that this process has opened, or None; see `open_device`."""
    return open_device(name) if name in _opened else None


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
    """Describe, like `environment.cuda`, the GPU that is used without a framework; None: no GPU."""
    if not _opened:
        return None
    about = describe_devices()[int(_opened[-1].partition(":")[2])]
    cudnn = find_cudnn()
    runtime = version_text(open_runtime()["version"])
    return _record(about, runtime, None if cudnn is None else cudnn["version"])


def start_torch() -> bool:
    """Initialize PyTorch's CUDA; return whether PyTorch supports CUDA."""
    import torch

    if not torch.cuda.is_available():
        return False
    torch.cuda.init()  # before it, operations fail on tensors received through PyTorch's C table
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
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    return Path(folder, "control").exists()


def version_text(number: int) -> str:
    """Return CUDA's version number as text: ``12080`` is ``"12.8"``."""
    return f"{number // 1000}.{number % 1000 // 10}"


# --- the check -----------------------------------------------------------------


def find_problem(name: str, *, anew: bool = False) -> str:
    """Return the operation that fails on a GPU, in one line; empty if the GPU passes.

    With `anew`, ignore the stored result and check again. If another process checks the GPU, wait
    for its result. Raises DeviceError if CUDA cannot be used in this process, InputError if there
    is no such GPU.
    """
    key = _identify_gpu(name)
    path = _find_result_path(key)
    stored = None if anew else _read_result(path, key)
    if stored is not None:
        return stored
    with _open_lock(path) as lock:
        end = time.monotonic() + CHECK_SECONDS
        while True:
            has_turn = _take_lock(lock) or time.monotonic() > end
            stored = None if anew else _read_result(path, key)  # of a check that has just ended
            if stored is not None:
                return stored
            if has_turn:
                break
            time.sleep(LOOK_SECONDS)
        failure, is_lasting = _run_check(name)
        if is_lasting:
            _write_result(path, key, failure)
        return failure


def check_early(variables: Mapping[str, str]) -> None:
    """Start the check of the GPU that a program with these environment variables sees.

    This does nothing if some GPU was checked with this driver and software: the result is then
    likely to be stored, and a program that looks would only compete with the one that starts. The
    check ends by itself.
    """
    visible = variables.get("CUDA_VISIBLE_DEVICES", "")
    _early[:] = [process for process in _early if process.poll() is None]
    if visible in _checked_early or not _is_first_use():
        return
    _checked_early.add(visible)
    with contextlib.suppress(OSError):  # the worker will check
        process = subprocess.Popen(
            [sys.executable, "-c", EARLY_PROGRAM, _list_paths(), "cuda:0"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=variables,
        )
        _early.append(process)
        threading.Thread(target=process.wait, name="cerebro-card", daemon=True).start()  # reaps it


_early: list[subprocess.Popen[bytes]] = []
_checked_early: set[str] = set()


def _is_first_use() -> bool:
    """Return whether no stored result is of this driver and software, and one can be stored."""
    folder, now = find_folder(), _identify_software()
    if folder is None:
        return False
    records = (_read_record(path) for path in folder.glob(RESULT_FILES))
    return not any(now.items() <= record["of"].items() for record in records if record)


def _open_lock(path: Path | None) -> contextlib.AbstractContextManager[IO[bytes] | None]:
    """Open the lock of a result's check; None if it cannot be locked."""
    with contextlib.suppress(OSError):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.with_suffix(".lock").open("ab")
    return contextlib.nullcontext()


def _take_lock(lock: IO[bytes] | None) -> bool:
    """Return whether this process may check; the system unlocks when it closes the lock or ends."""
    try:
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return True


def _identify_gpu(name: str) -> dict[str, Any]:
    """Return the key of a stored result: this GPU, and all software that computes on it."""
    runtime, devices = open_runtime(), describe_devices()
    index = int(name.partition(":")[2])
    if index >= len(devices):
        raise InputError(
            f"{name}: there are {len(devices)} CUDA devices, counted from 0, that this process may "
            "use"
        )
    return {
        "gpu": devices[index]["name"],
        "uuid": devices[index]["uuid"],
        "driver": version_text(runtime["driver"]),
        "runtime": version_text(runtime["version"]),
        **_identify_software(),
    }


def _identify_software() -> dict[str, Any]:
    """Return the part of a stored result's key that is known without CUDA."""
    core = Path(str(_core.__file__)).stat()
    return {
        "kernel_module": _kernel_module(),
        "torch": package_version("torch"),
        "cerebro": version(),
        "core": [core.st_size, core.st_mtime_ns],  # changes when a clone is rebuilt
    }


def _kernel_module() -> str:
    """Return the version line of the driver's kernel module; empty without the module."""
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text(errors="replace")
        return one_line(text.partition("\n")[0])
    return ""


def find_folder() -> Path | None:
    """Return the folder of stored results; None if this user has no cache folder."""
    if named := os.environ.get(CACHE_FOLDER):
        return Path(named)
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named, "cerebro")
    try:
        return Path.home() / ".cache" / "cerebro"
    except RuntimeError:
        return None


def _find_result_path(key: dict[str, Any]) -> Path | None:
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    folder = find_folder()
    return None if folder is None else folder / RESULT_FILES.replace("*", digest[:20])


def _read_result(path: Path | None, key: dict[str, Any]) -> str | None:
    record = {} if path is None else _read_record(path)
    text = record.get("problem") if record.get("of") == key else None
    return one_line(text) if isinstance(text, str) else None


def _read_record(path: Path) -> dict[str, Any]:
    """Return what a file of a result holds; empty if it is damaged or missing."""
    with contextlib.suppress(OSError, ValueError, RecursionError, CorruptDataError):
        record = json.loads(read_bytes(path, MOST_BYTES))
        if isinstance(record, dict) and isinstance(record.get("of"), dict):
            return record
    return {}


def _write_result(path: Path | None, key: dict[str, Any], problem: str) -> None:
    """Store a result atomically, because other processes may read or write it at the same time."""
    with contextlib.suppress(OSError):
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, json.dumps({"of": key, "problem": problem}).encode())


def _run_check(name: str) -> tuple[str, bool]:
    """Run a check; return what fails, and whether the failure is permanent."""
    variables = dict(os.environ)
    if path := open_runtime()["path"]:
        variables[OVERRIDE] = path  # the runtime used by this process
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", CHECK_PROGRAM, _list_paths(), name],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=variables,
            text=True,
            errors="replace",
        )
    except OSError as error:
        return f"{name}: its check could not be started: {error}", False
    try:
        said, errors = process.communicate(timeout=CHECK_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the driver may keep it alive
            process.communicate(timeout=5.0)
        return f"{name}: its check gave no answer within {CHECK_SECONDS:g} seconds", False
    try:
        failure, is_lasting = json.loads(said.splitlines()[-1])
        return one_line(str(failure)), bool(is_lasting)
    except (ValueError, TypeError, IndexError):
        # Other signals come from the system or a person; an exit status comes from Python.
        return (
            f"{name}: its check ended by {_describe_end(process.returncode, errors)}",
            -process.returncode in CRASHES,
        )


def _list_paths() -> str:
    """Return this process's path for modules as JSON.

    The working directory ("") is left out, because a file there could replace a library. But
    ``python -m cerebro`` may have found this Cerebro there, so its folder comes last.
    """
    return json.dumps([*(str(entry) for entry in sys.path if entry), str(PACKAGE.parent)])


def _describe_end(status: int, errors: str) -> str:
    """Describe how a process ended that printed nothing."""
    if status < 0:
        try:
            return signal.Signals(-status).name
        except ValueError:
            return f"signal {-status}"
    last = errors.strip().rpartition("\n")[2]
    return f"exit status {status}" + (f" ({one_line(last, 200)})" if last else "")


def check_here(name: str) -> NoReturn:
    """Check a GPU in this process, and print what fails and whether the failure is permanent."""
    failure, is_lasting = "", True
    try:
        open_device(name).check()
    except MemoryError as error:
        failure, is_lasting = str(error), False
    except (DeviceError, InputError) as error:
        failure = str(error)
    print(json.dumps([failure, is_lasting]), flush=True)
    os._exit(0)  # skip the driver's own exit handlers
