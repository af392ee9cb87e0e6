"""Devices and the CUDA runtime: over host memory, and over the stand-in of tests/standin."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cerebro._core as _core
import cerebro.data
from cerebro.data import depots
from cerebro.data.batches import make_loader
from cerebro.errors import DeviceError
from cerebro.machine import cuda

HEADER = """
import ctypes, json
import cerebro._core as _core
from cerebro.errors import DeviceError
from cerebro.machine import cuda
"""


def program(body: str, **variables: str) -> Any:
    """Run Python in a process of its own; what it prints, as JSON."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("STANDIN_")}
    done = subprocess.run(
        [sys.executable, "-c", HEADER + body],
        env=environment | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# --- host memory ----------------------------------------------------------------


def test_host_memory_is_a_device() -> None:
    device = _core.Device("cpu")
    assert (device.name, device.index, repr(device)) == ("cpu", 0, "Device('cpu')")
    assert device.held() == {"shards": 0, "batches": 0, "states": 0, "other": 0}
    device.check()
    device.synchronize()
    assert cuda.open_device("cpu") is cuda.open_device("cpu")


@pytest.mark.parametrize("name", ["", "cuda", "cuda:", "cuda:x", "cuda:-1", "cuda:12345", "gpu"])
def test_invalid_device_names_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="a device is 'cpu' or 'cuda:0' and so on, not"):
        _core.Device(name)


def test_allocators_are_functions() -> None:
    with pytest.raises(TypeError, match="allocate and release must be functions"):
        _core.Device("cpu").set_allocator(1, 2)  # type: ignore[arg-type]


@pytest.mark.parametrize(("folders", "error"), [([b"a", 1], TypeError), (["a\0b"], ValueError)])
def test_folders_are_paths(folders: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        _core.cudnn_find(folders)


def test_a_python_allocator_gets_its_memory_back() -> None:
    """Blocks come back in the main thread, soon; each where it came from."""
    found = program("""
device = _core.Device("cpu")
live, log = {}, []

def allocate(nbytes, index):
    memory = ctypes.create_string_buffer(nbytes + 256)
    address = -(-ctypes.addressof(memory) // 256) * 256
    live[address] = memory
    log.append((nbytes, index))
    return address

device.set_allocator(allocate, live.pop)
device.check()
print(json.dumps([log, len(live)]))
""")
    assert len(found[0]) == 1 and found[0][0][1] == 0
    assert found[1] == 0


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        (
            "raise MemoryError",
            "MemoryError: the check of memory failed: out of memory on cpu: 1.6 MB for other; ",
        ),
        (
            "raise KeyError('x')",
            "DeviceError: the check of memory failed: the framework's allocator failed: 'x'",
        ),
        (
            "return 0",
            "DeviceError: the check of memory failed: the framework's allocator gave no memory",
        ),
        (
            "return 'x'",
            "DeviceError: the check of memory failed: the framework's allocator failed: ",
        ),
    ],
)
def test_an_allocator_that_fails(fails: str, message: str) -> None:
    said = program(f"""
device = _core.Device("cpu")

def allocate(nbytes, index):
    {fails}

device.set_allocator(allocate, print)
try:
    device.check()
except Exception as error:
    print(json.dumps(f"{{type(error).__name__}}: {{error}}"))
""")
    assert said.startswith(message)


# --- a GPU ----------------------------------------------------------------------


def test_the_runtime_describes_and_opens_its_devices(cudart_standin: Path) -> None:
    found = program(
        """
runtime = cuda.open_runtime()
devices = cuda.describe_devices()
device = cuda.open_device("cuda:1")
device.check()
free, total = device.memory()
again = cuda.open_runtime() == runtime and cuda.open_device("cuda:1") is device
library = ctypes.CDLL(runtime["path"])
library.standin_fault.restype = ctypes.c_char_p
del device
cuda.open_device.cache_clear()
left = library.standin_left(None)
print(json.dumps([runtime, devices, free, total, again, left, library.standin_fault().decode()]))
""",
        CEREBRO_CUDART=str(cudart_standin),
        STANDIN_DEVICES="2",
        STANDIN_MEMORY="5000000",
    )
    runtime, devices, free, total, again, left, fault = found
    assert runtime == {"path": str(cudart_standin), "version": 13000, "driver": 13000}
    assert devices == [
        {
            "name": f"Stand-in {i}",
            "uuid": f"1{i}" * 16,
            "capability": [8, 6],
            "multiprocessors": 2,
            "memory": 5000000,
            "mps": False,
        }
        for i in range(2)
    ]
    assert free == total == 5000000
    assert (again, left, fault) == (True, 0, "")


@pytest.mark.parametrize(
    ("fail", "message"),
    [
        ("cudaMemcpyAsync:2:700", "cuda:0: cudaMemcpyAsync: cudaErrorIllegalAddress (700): "),
        ("cudaMalloc:1:2", "out of memory on cuda:0: "),
        ("cuModuleLoadDataEx:1:222", "the NVIDIA driver is too old: update it"),
        ("cuLaunchKernel:1:719", "this process can no longer use the device, a new process can"),
        ("cuDevicePrimaryCtxRetain:1:46", "another process uses the device exclusively, or it"),
        ("cuCtxPushCurrent:1:3", "CUDA does not survive a fork"),
    ],
)
def test_calls_that_fail(cudart_standin: Path, fail: str, message: str) -> None:
    said, again = program(
        """
cuda.open_runtime()
said = ""
try:
    cuda.open_device("cuda:0").check()
except (DeviceError, MemoryError) as error:
    said = str(error)
cuda.open_device("cuda:0").check()
print(json.dumps([said, "usable"]))
""",
        CEREBRO_CUDART=str(cudart_standin),
        STANDIN_FAIL=fail,
    )
    assert message in said
    assert again == "usable"


def test_without_pinned_memory(cudart_standin: Path) -> None:
    """Limits of locked memory make copies slower, and fail nothing."""
    before, after, gpus = program(
        """
from cerebro.cli import doctor as diagnosis
cuda.open_runtime()
device = cuda.open_device("cuda:0")
before = device.unpinned
device.check()
print(json.dumps([before, device.unpinned, diagnosis._describe_gpus()[0]]))
""",
        CEREBRO_CUDART=str(cudart_standin),
        STANDIN_FAIL="cudaHostAlloc:0:304",
    )
    assert before is None
    assert after.startswith("cuda:0: cudaHostAlloc: cudaErrorOfTheStandIn (304): ")
    assert "; works, " in gpus[1]
    assert gpus[1].endswith(f"no pinned host memory ({after}): copies are slower")


def test_no_device(cudart_standin: Path) -> None:
    said = program(
        """
try:
    cuda.describe_devices()
except Exception as error:
    print(json.dumps(f"{type(error).__name__}: {error}"))
""",
        CEREBRO_CUDART=str(cudart_standin),
        STANDIN_DEVICES="0",
    )
    assert said.startswith("DeviceError: CUDA: cudaGetDeviceCount: cudaErrorNoDevice (100): ")
    assert said.endswith("see CUDA_VISIBLE_DEVICES and nvidia-smi")


def test_a_gpu_requires_an_open_runtime(cudart_standin: Path) -> None:
    said = program("""
said = []
for action in (lambda: _core.Device("cuda:0"), _core.cuda_devices):
    try:
        action()
    except Exception as error:
        said.append(f"{type(error).__name__}: {error}")
print(json.dumps(said))
""")
    assert said == ["DeviceError: no CUDA runtime is open: call cuda_open first"] * 2


# --- finding it -----------------------------------------------------------------


def test_a_list_of_folders_that_shrinks_while_it_is_read() -> None:
    said = program("""
folders = []
class Emptying:
    def __fspath__(self):
        folders.clear()
        return "/nowhere"
folders += [Emptying(), *(f"/nowhere/{i}" for i in range(50))]
try:
    _core.cuda_open(folders, path="/nowhere/libcudart.so.12")
except DeviceError as error:
    print(json.dumps([len(folders), "/nowhere/libcudart.so.12" in str(error)]))
""")
    assert said == [0, True]


DRIVER = """
#include <stdlib.h>
int cuDriverGetVersion(int *version);
int cuDriverGetVersion(int *version)
{
    *version = atoi(getenv("FAKE_DRIVER"));
    return 0;
}
"""

SEARCH = """
for path in {loaded!r}:
    ctypes.CDLL(path)
try:
    found = _core.cuda_open({folders!r}, prefer={prefer})["path"]
except Exception as error:
    found = f"{{type(error).__name__}}: {{error}}"
maps = open("/proc/self/maps").read().split()
opened = sorted({{path for path in maps if "libcudart" in path}})
print(json.dumps([found, opened]))
"""


@pytest.fixture(scope="module")
def machine(cudart_standin: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a driver, ``system/``, and the runtimes of ``12/`` and ``13/``."""
    folder = tmp_path_factory.mktemp("machine")
    for name in ("system", "12", "13"):
        (folder / name).mkdir()
    (folder / "driver.c").write_text(DRIVER)
    command = ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", str(folder / "driver.c")]
    subprocess.run([*command, "-o", str(folder / "system" / "libcuda.so.1")], check=True)
    for major in (12, 13):
        name = f"libcudart.so.{major}"
        # A library that is needed and has the soname: loading it, the stand-in comes along.
        command = ["cc", "-shared", f"-Wl,-soname,{name}", "-Wl,--no-as-needed"]
        rest = [str(cudart_standin), f"-Wl,-rpath,{cudart_standin.parent}", "-o"]
        subprocess.run([*command, *rest, str(folder / str(major) / name)], check=True)
    return folder


def search(
    machine: Path,
    folders: list[str],
    *,
    driver: int = 13000,
    prefer: int = 0,
    loaded: tuple[str, ...] = (),
) -> tuple[str, list[str]]:
    """What is found, and which runtimes are open then, as names within the machine's folder."""
    body = SEARCH.format(
        folders=[str(machine / folder) for folder in folders],
        prefer=prefer,
        loaded=[str(machine / path) for path in loaded],
    )
    variables = {"LD_LIBRARY_PATH": str(machine / "system"), "FAKE_DRIVER": str(driver)}
    found, opened = program(body, **variables)
    inside = [path for path in opened if path.startswith(str(machine))]
    return found, [str(Path(path).relative_to(machine)) for path in inside]


linux = pytest.mark.skipif(sys.platform != "linux", reason="CUDA is looked for on Linux")


@linux
@pytest.mark.parametrize(
    ("driver", "prefer", "loaded", "expected"),
    [
        (13000, 0, (), ["13/libcudart.so.13"]),
        (13000, 12, (), ["12/libcudart.so.12"]),
        (13000, 13, (), ["13/libcudart.so.13"]),
        (12080, 0, (), ["12/libcudart.so.12"]),
        (12080, 13, (), ["12/libcudart.so.12"]),
        # What a framework has loaded already stays the only one.
        (13000, 0, ("12/libcudart.so.12",), ["12/libcudart.so.12"]),
        (13000, 13, ("12/libcudart.so.12",), ["12/libcudart.so.12"]),
        (13000, 0, ("13/libcudart.so.13",), ["13/libcudart.so.13"]),
    ],
)
def test_one_runtime_is_chosen(
    machine: Path, driver: int, prefer: int, loaded: tuple[str, ...], expected: list[str]
) -> None:
    found, opened = search(machine, ["12", "13"], driver=driver, prefer=prefer, loaded=loaded)
    assert opened == expected, found


@linux
def test_a_runtime_that_is_missing(machine: Path) -> None:
    found, opened = search(machine, ["system"], driver=12040)
    assert opened == []
    assert found.startswith(
        "DeviceError: no CUDA runtime (libcudart.so.12) that the driver, of CUDA 12.4, can run: "
    )


@linux
def test_a_driver_that_is_too_old(machine: Path) -> None:
    found, opened = search(machine, ["12", "13"], driver=11040)
    assert opened == []
    assert found == (
        "DeviceError: the NVIDIA driver runs CUDA up to 11.4, and 12.0 or later is needed: "
        "update the driver"
    )


@linux
def test_a_runtime_that_does_not_load(machine: Path, tmp_path: Path) -> None:
    broken = tmp_path / "libcudart.so.13"
    broken.write_bytes(b"not a library")
    found, _ = search(machine, [str(tmp_path), "12"])
    assert found.startswith(f"DeviceError: {broken} does not load: ")


@linux
@pytest.mark.skipif(
    shutil.which("nvidia-smi") is not None or Path("/dev/nvidiactl").exists(),
    reason="there is a driver here",
)
def test_no_driver(machine: Path) -> None:
    body = SEARCH.format(folders=[str(machine / "12")], prefer=0, loaded=[])
    found, opened = program(body)
    assert found == (
        "DeviceError: no NVIDIA driver: libcuda.so.1 is not on this machine or not in this "
        "container"
    )
    assert opened == []


@linux
def test_nothing_of_cuda_is_opened_before_it_is_needed(cudart_standin: Path) -> None:
    opened = program(
        """
import cerebro, cerebro.api.search
device = _core.Device("cpu")
maps = open("/proc/self/maps").read().split()
names = ("libcuda", "libcudnn", "nvidia")
print(json.dumps([path for path in maps if any(name in path for name in names)]))
""",
        CEREBRO_CUDART=str(cudart_standin),
    )
    assert opened == []


@linux
def test_the_module_needs_nothing_of_cuda() -> None:
    if shutil.which("readelf") is None:
        pytest.skip("needs readelf")
    library = str(_core.__file__)
    said = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True)
    needed = [line for line in said.stdout.splitlines() if "NEEDED" in line]
    assert needed and not any("cuda" in line or "cudnn" in line for line in needed)
    assert [p.name for p in Path(library).parent.rglob("*.so*") if not p.match("_core.*")] == []


# --- the folders and the framework ------------------------------------------------


def test_folders_that_exist_best_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, home, listed = tmp_path / "site", tmp_path / "home", tmp_path / "listed"
    expected = [
        site / "nvidia" / "cu13" / "lib",
        site / "nvidia" / "cudnn" / "lib",
        home / "lib64",
        listed,
    ]
    for folder in expected:
        folder.mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(site), str(tmp_path / "absent")])
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "absent"))
    monkeypatch.setattr(cuda, "SYSTEM_FOLDERS", ())
    monkeypatch.setenv("CUDA_HOME", str(home))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{listed}:{tmp_path / 'absent'}:{listed}")
    assert cuda.list_folders() == [str(folder) for folder in expected]


@pytest.mark.parametrize(
    ("version", "requires", "expected"),
    [
        ("2.9.0+cu128", [], 12),
        ("2.13.0+cu130", [], 13),
        ("2.8.0", ["numpy", "nvidia-cuda-runtime-cu12==12.8.90; platform_system == 'Linux'"], 12),
        ("2.13.0", ["cuda-toolkit[cudart,nvrtc]==13.0.2; platform_system == 'Linux'"], 13),
        ("2.13.0+cpu", ["filelock"], 0),
    ],
)
def test_the_runtime_that_a_framework_would_bring(
    monkeypatch: pytest.MonkeyPatch, version: str, requires: list[str], expected: int
) -> None:
    def version_of(name: str) -> str:
        if name != "torch":
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(metadata, "version", version_of)
    monkeypatch.setattr(metadata, "requires", lambda name: requires)
    assert cuda.find_preferred_version() == expected


def test_the_runtime_of_a_framework_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Torch:
        class version:
            cuda: str | None = "13.0"

    installed = {"torch": "2.13.0+cpu", "jax-cuda12-plugin": "0.10"}

    def version_of(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(metadata, "version", version_of)
    monkeypatch.setattr(metadata, "requires", lambda name: [])
    monkeypatch.setitem(sys.modules, "torch", Torch)  # type: ignore[arg-type]
    assert cuda.find_preferred_version() == 13
    monkeypatch.setattr(Torch.version, "cuda", None)
    assert cuda.find_preferred_version() == 12  # JAX's, which is not loaded yet
    del installed["jax-cuda12-plugin"]
    assert cuda.find_preferred_version() == 0


def test_version_text() -> None:
    assert [cuda.version_text(n) for n in (12000, 12080, 13010)] == ["12.0", "12.8", "13.1"]


# --- doctor -----------------------------------------------------------------------


def doctor(**variables: str) -> dict[str, str]:
    """What ``doctor`` prints, by the first word of the line."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("STANDIN_")}
    done = subprocess.run(
        [sys.executable, "-m", "cerebro", "doctor"],
        env=environment | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if " " in line.strip())


def test_doctor_tries_each_gpu(cudart_standin: Path, tmp_path: Path) -> None:
    (tmp_path / "control").touch()
    rows = doctor(CEREBRO_CUDART=str(cudart_standin), CUDA_MPS_PIPE_DIRECTORY=str(tmp_path))
    assert rows["gpu"] == (
        "cuda:0, Stand-in 0, 1 GB, compute capability 8.6, 2 multiprocessors; works, 1 GB free"
    )
    assert rows["cuda"] == f"runtime 13.0 ({cudart_standin}), driver for 13.0"
    assert rows["mps"].startswith("running: ")


def test_doctor_reports_a_gpu_that_does_not_work(cudart_standin: Path, tmp_path: Path) -> None:
    rows = doctor(
        CEREBRO_CUDART=str(cudart_standin),
        CUDA_MPS_PIPE_DIRECTORY=str(tmp_path),
        STANDIN_FAIL="cuLaunchKernel:1:719",
    )
    assert (
        "2 multiprocessors; DOES NOT WORK: the check of kernels failed: cuda:0: cuLaunchKernel: "
        in rows["gpu"]
    )
    assert rows["mps"].startswith("not running: ")


def test_doctor_without_a_runtime(tmp_path: Path) -> None:
    rows = doctor(CEREBRO_CUDART=str(tmp_path / "absent.so"))
    assert rows["gpu"].startswith(f"not usable: {tmp_path / 'absent.so'} does not load: ")
    assert "cuda" not in rows


def test_pytorch_starts_before_it_gets_tensors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And before the depot takes memory, which is to be PyTorch's."""
    torch = pytest.importorskip("torch")
    data = cerebro.data.shard({"x": np.zeros((4, 2), np.float32)}, tmp_path / "d")
    called: list[str] = []

    def no_depot(name: str) -> None:
        called.append(f"depot {name}")
        raise DeviceError("none here")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "init", lambda: called.append("torch"))
    monkeypatch.setattr(depots, "depot", no_depot)
    for framework, before in (("torch", ["torch"]), ("dlpack", [])):
        called.clear()
        with pytest.raises(DeviceError, match="none here"):
            make_loader(data, 2, seed=0, framework=framework, device="cuda:0")
        assert called == [*before, "depot cuda:0"]
