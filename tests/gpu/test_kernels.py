"""The kernels on a GPU: the sweep of tests/c/test_cuda_kernels.c, sanitized too; and PyTorch."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks import gather_kernel
from cerebro.machine import cuda
from cerebro.machine.resources import usable_cores

C_TESTS = Path(__file__).parents[1] / "c"
SANITIZED = "600"
"""Cases under a sanitizer, which makes each take many times as long; they use every kernel."""


@pytest.fixture(scope="module")
def runtime() -> str:
    """The CUDA runtime's path, or its name where the system finds it."""
    found = cuda.open_runtime()
    return found["path"] or f"libcudart.so.{found['version'] // 1000}"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    """test_cuda_kernels, built."""
    if shutil.which("make") is None or not C_TESTS.exists():
        pytest.skip("make, or the C tests' sources, are not here")
    build = tmp_path_factory.mktemp("kernels")
    made = build / "test_cuda_kernels"
    command = ["make", "-s", f"-j{usable_cores()}", "-C", str(C_TESTS), f"BUILD={build}"]
    # Another compiler may warn of what ours does not.
    command += ["WARNINGS=", str(made)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return str(made)


def run(command: list[str], runtime: str, **variables: str) -> str:
    environment = os.environ | {"CEREBRO_TEST_CUDART": runtime, **variables}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_gpu_has_the_bits_of_the_cpu(program: str, runtime: str) -> None:
    """3,000 columns and chains of every kind, every conversion of 16 bits, rows of every width."""
    assert run([program], runtime).endswith("3 tests, 0 failures\n")


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_the_sanitizer_finds_nothing(program: str, runtime: str, tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not here")
    options = [sanitizer, f"--tool={tool}", "--error-exitcode=3", "--launch-timeout=300"]
    found = run([*options, program], runtime, CEREBRO_TEST_CASES=SANITIZED)
    assert "3 tests, 0 failures" in found


@pytest.fixture(scope="module")
def gather_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gather_kernel.build(tmp_path_factory.mktemp("gather"))


@pytest.mark.parametrize("width", [1, 4, 156, 512, 4096, 150_528])
def test_rows_are_gathered_on_the_stream_of_a_framework(
    gather_library: Path, runtime: str, width: int
) -> None:
    """Between PyTorch's own work, on its stream, without waiting."""
    torch = pytest.importorskip("torch")
    gather = gather_kernel.GatherKernel(gather_library, runtime)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        column = torch.randint(0, 256, (3000, width), dtype=torch.uint8, device="cuda")
        rows = torch.randperm(3000, device="cuda")[:1001]
        table = torch.tensor(gather_kernel.part_table([column.data_ptr()]), device="cuda")
        places = torch.stack([rows, torch.zeros_like(rows)], dim=1).to(torch.int32)
        out = torch.empty((1001, width), dtype=torch.uint8, device="cuda")
        addresses = (out.data_ptr(), table.data_ptr(), width, places.data_ptr(), 1001)
        gather(*addresses, stream.cuda_stream)
        same = torch.equal(out, column[rows])
    assert same
