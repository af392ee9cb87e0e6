"""Check in a separate process, before a GPU's first use, whether it can be trusted with batches.

A device that fails in a kernel may kill its process or hang, so the check runs in another process.
It tests memory, streams and every kernel (`_core.Device.check`). The result is stored for this GPU,
this driver and these versions of PyTorch, the CUDA runtime and Cerebro, in a separate file in the
user's cache folder. If the file cannot be read or written, the check runs again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from cerebro.errors import DeviceError, InputError, one_line
from cerebro.machine import cuda
from cerebro.machine.environment import package_version, version

SECONDS = 60.0
"""The timeout of a check in seconds; a check takes about one, mostly to start CUDA."""
END_SECONDS = 5.0
FOLDER = "CEREBRO_CACHE"
"""The environment variable with the folder of stored results; default: the user's cache folder."""
KERNEL_MODULE = Path("/proc/driver/nvidia/version")
MOST_BYTES = 100_000  # the largest stored result
OURS = Path(__file__).parents[2]
"""The folder that contains this package."""
CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE)
"""The signals by which a driver's mistakes end a process."""

PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from cerebro.machine import device_check; device_check.main(sys.argv[2])"
)


def find_problem(name: str, *, anew: bool = False) -> str:
    """Return the operation that fails on a GPU, in one line; empty if the GPU passes.

    With `anew`, ignore the stored result and check again. Raises DeviceError if CUDA cannot be used
    in this process, InputError if there is no such GPU.
    """
    of = identify_gpu(name)
    path = _find_result_path(of)
    stored = None if anew else _read(path, of)
    if stored is not None:
        return stored
    failure, is_lasting = _run_check(name)
    if is_lasting:
        _write(path, of, failure)
    return failure


def identify_gpu(name: str) -> dict[str, Any]:
    """Return the key of a stored result: this GPU, and all software that computes on it."""
    import cerebro._core as _core

    runtime, devices = cuda.open_runtime(), cuda.describe_devices()
    index = int(name.partition(":")[2])
    if index >= len(devices):
        raise InputError(
            f"{name}: there are {len(devices)} CUDA devices, counted from 0, that this process may "
            "use"
        )
    core = Path(str(_core.__file__)).stat()
    return {
        "gpu": devices[index]["name"],
        "uuid": devices[index]["uuid"],
        "driver": cuda.version_text(runtime["driver"]),
        "kernel_module": _kernel_module(),
        "runtime": cuda.version_text(runtime["version"]),
        "torch": package_version("torch"),
        "cerebro": version(),
        "core": [core.st_size, core.st_mtime_ns],  # changes when a clone is rebuilt
    }


def _kernel_module() -> str:
    """Return the version line of the driver's kernel module; empty without the module."""
    try:
        return one_line(KERNEL_MODULE.read_text(errors="replace").partition("\n")[0])
    except OSError:
        return ""


# --- the file ------------------------------------------------------------------


def find_folder() -> Path | None:
    """Return the folder of stored results; None if this user has no cache folder."""
    if named := os.environ.get(FOLDER):
        return Path(named)
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named, "cerebro")
    try:
        return Path.home() / ".cache" / "cerebro"
    except RuntimeError:
        return None


def _find_result_path(of: dict[str, Any]) -> Path | None:
    digest = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()
    inside = find_folder()
    return None if inside is None else inside / f"device-{digest[:20]}.json"


def _read(path: Path | None, of: dict[str, Any]) -> str | None:
    try:
        if path is None or not path.is_file():
            return None
        with path.open("rb") as file:
            record = json.loads(file.read(MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or record.get("of") != of:
        return None
    text = record.get("problem")
    return one_line(text) if isinstance(text, str) else None


def _write(path: Path | None, of: dict[str, Any], found: str) -> None:
    """Store a result atomically, because other processes may read or write it at the same time."""
    if path is None:
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix="device-", dir=path.parent)
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump({"of": of, "problem": found}, file)
            Path(name).replace(path)
        except OSError:
            Path(name).unlink()


# --- the process ---------------------------------------------------------------


def _run_check(name: str) -> tuple[str, bool]:
    """Run a check; return what fails, and whether the failure is permanent."""
    variables = dict(os.environ)
    if path := cuda.open_runtime()["path"]:
        variables[cuda.OVERRIDE] = path  # the runtime used by this process
    # The working directory ("") is left out, because a file there could replace a library. But
    # `python -m cerebro` may have found this Cerebro there, so its folder comes last.
    folders = json.dumps([*(str(entry) for entry in sys.path if entry), str(OURS)])
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, folders, name],
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
        said, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # the driver may keep it alive
            process.communicate(timeout=END_SECONDS)
        return f"{name}: its check gave no answer within {SECONDS:g} seconds", False
    try:
        failure, is_lasting = json.loads(said.splitlines()[-1])
        return one_line(str(failure)), bool(is_lasting)
    except (ValueError, TypeError, IndexError):
        # Other signals come from the system or a person; an exit status comes from Python.
        return (
            f"{name}: its check ended by {_describe_end(process.returncode, errors)}",
            -process.returncode in CRASHES,
        )


def _describe_end(status: int, errors: str) -> str:
    """Describe how a process ended that printed nothing."""
    if status < 0:
        try:
            return signal.Signals(-status).name
        except ValueError:
            return f"signal {-status}"
    last = errors.strip().rpartition("\n")[2]
    return f"exit status {status}" + (f" ({one_line(last, 200)})" if last else "")


def main(name: str) -> NoReturn:
    """Check a GPU in this process, and print what fails and whether the failure is permanent."""
    failure, is_lasting = "", True
    try:
        cuda.open_device(name).check()
    except MemoryError as error:
        failure, is_lasting = str(error), False
    except (DeviceError, InputError) as error:
        failure = str(error)
    print(json.dumps([failure, is_lasting]), flush=True)
    os._exit(0)  # skip the driver's own exit handlers
