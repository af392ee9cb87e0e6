"""The device layer on a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import cerebro._core as _core
from cerebro.cli import main
from cerebro.machine import cuda

torch = pytest.importorskip("torch")

DESCRIBED = """
from cerebro.machine import cuda
ours = [[name, about] for name, _, about in cuda.describe_as_torch()]
import sys
assert "torch" not in sys.modules
import torch
from cerebro.machine import environment
theirs = []
for index in range(torch.cuda.device_count()):
    torch.cuda.init(), torch.cuda.set_device(index)
    theirs.append([torch.cuda.get_device_name(index), environment.cuda()])
assert ours == theirs and ours, (ours, theirs)
"""


def test_gpus_are_described_as_pytorch_describes_them():
    subprocess.run([sys.executable, "-c", DESCRIBED], check=True)


ALONE = """
import json
from cerebro.machine import cuda

device = cuda.open_device("cuda:0")
device.check()
runtimes = {p for p in open("/proc/self/maps").read().split() if "libcudart" in p}
print(json.dumps([len(runtimes), cuda.open_runtime(), cuda.describe_devices()]))
"""


UNPINNED = """
import json, sys
import numpy as np
import torch
import cerebro
from cerebro.machine import cuda

rows = np.random.default_rng(0).integers(0, 256, (5000, 300), np.uint8)
data = cerebro.shard({"x": rows}, sys.argv[1], shards=3, progress=False)
view = data.with_transforms({"x": [cerebro.transforms.Scale(1 / 255)]})
same = []
for residence in ("resident", "streamed"):
    ours = view.batches(64, device="cuda:0", residence=residence)
    for batch, expected in zip(ours, view.batches(64), strict=True):
        same.append(torch.equal(batch["x"].cpu(), expected["x"]))
print(json.dumps([cuda.open_device("cuda:0").unpinned, all(same), len(same)]))
"""


def test_the_device_check_finds_no_problem() -> None:
    assert cuda.find_problem("cuda:0", anew=True) == ""
    assert cuda.find_problem("cuda:0") == ""


def test_every_gpu_works() -> None:
    devices = cuda.describe_devices()
    assert len(devices) == torch.cuda.device_count()
    for i, about in enumerate(devices):
        assert about["name"] == torch.cuda.get_device_name(i)
        assert about["capability"] == torch.cuda.get_device_capability(i)
        assert about["memory"] == torch.cuda.get_device_properties(i).total_memory
        device = cuda.open_device(f"cuda:{i}")
        device.check()
        free, total = device.memory()
        assert 0 < free <= total <= about["memory"]
        assert set(device.held().values()) == {0}


def test_devices_are_found_without_a_framework() -> None:
    """The runtime comes from NVIDIA's wheels or the system."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    runtimes, runtime, devices = json.loads(done.stdout)
    assert runtimes == 1
    assert runtime["version"] >= 12000 and runtime["driver"] >= 12000
    assert len(devices) == torch.cuda.device_count()


def test_the_cuda_runtime_is_shared_with_the_framework() -> None:
    torch.cuda.init()
    runtime = cuda.open_runtime()
    assert runtime["version"] // 1000 == int(torch.version.cuda.split(".")[0])
    maps = Path("/proc/self/maps").read_text().split()
    runtimes = {path for path in maps if "libcudart" in path}
    assert len(runtimes) <= 1


def test_batches_are_correct_without_pinned_memory(tmp_path: Path) -> None:
    """The runtime but for one call, in front of which there is a library that refuses it."""
    path = cuda.open_runtime()["path"]
    if path is None or shutil.which("cc") is None:
        pytest.skip("needs a compiler, and a runtime that is a file")
    source, library = tmp_path / "refuses.c", tmp_path / "libcudart_refuses.so"
    source.write_text(
        "int cudaHostAlloc(void **out, unsigned long bytes, unsigned flags);\n"
        "int cudaHostAlloc(void **out, unsigned long bytes, unsigned flags)\n"
        "{ (void)bytes, (void)flags; *out = 0; return 2; }\n"
    )
    command = ["cc", "-shared", "-fPIC", str(source), "-Wl,--no-as-needed", path]
    subprocess.run([*command, f"-Wl,-rpath,{Path(path).parent}", "-o", str(library)], check=True)
    done = subprocess.run(
        [sys.executable, "-c", UNPINNED, str(tmp_path / "data")],
        env={**os.environ, cuda.OVERRIDE: str(library)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    unpinned, same, batches = json.loads(done.stdout)
    assert unpinned.startswith("cuda:0: cudaHostAlloc: cudaErrorMemoryAllocation (2): ")
    assert same and batches > 100
    assert done.stderr.count("no pinned host memory") == 1


def test_device_memory_comes_from_pytorch() -> None:
    device = cuda.open_device("cuda:0")
    device.check()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(0)
    torch.cuda.reset_peak_memory_stats(0)
    device.check()
    assert torch.cuda.max_memory_allocated(0) > before
    device.check()  # what had come back is released before more is taken
    assert torch.cuda.memory_allocated(0) <= before


def test_a_device_check_keeps_the_current_device() -> None:
    last = torch.cuda.device_count() - 1
    with torch.cuda.device(last):
        cuda.open_device("cuda:0").check()
        assert torch.cuda.current_device() == last


def test_a_missing_device_is_refused() -> None:
    cuda.open_runtime()
    with pytest.raises(ValueError, match=r"^cuda:999: there are \d+ CUDA devices, counted from 0"):
        _core.Device("cuda:999")


def test_device_calls_do_not_spoil_a_capture_on_another_thread() -> None:
    """Our calls on another thread do not spoil it, though its mode forbids them."""
    cuda.open_runtime()
    device = _core.Device("cuda:0")  # with memory of its own: it allocates and frees
    device.check()
    x = torch.zeros(1000, device="cuda:0")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            device.check()
        except BaseException as error:
            failures.append(error)

    with torch.cuda.graph(graph, capture_error_mode="global"):
        x += 1
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        x += 1
    assert failures == []
    graph.replay()
    torch.cuda.synchronize()
    assert x.eq(2).all()


def test_doctor_reports_every_gpu_as_working(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("gpu")]
    assert len(lines) == torch.cuda.device_count()
    assert all("; works, " in line for line in lines)
