"""The kernels' sources: the PTX that is shipped is what they give, and CUDA's compilers take both.

That the kernels compute what the loader computes is tests/c/test_kernels.c's, on the CPU, and
tests/gpu/test_kernels.py's, on a GPU.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import cerebro._core as _core

CUDA = Path(__file__).parents[2] / "csrc" / "cuda"
pytestmark = pytest.mark.skipif(not CUDA.exists(), reason="the C sources are not here")


@pytest.fixture(scope="module")
def make_ptx() -> ModuleType:
    """csrc/cuda/make_ptx.py, which is a command and in no package."""
    spec = importlib.util.spec_from_file_location("make_ptx", CUDA / "make_ptx.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_module_carries_the_ptx() -> None:
    ptx = (CUDA / "kernels.ptx").read_bytes()
    module = Path(_core.__file__).read_bytes()
    assert module.count(ptx + b"\0") == 1, "run python setup.py build_ext --inplace"


def test_builds_have_the_ptx_written_as_c(make_ptx: ModuleType, tmp_path: Path) -> None:
    """The current file keeps its time, so that it is not compiled again."""
    file = tmp_path / "kernels_ptx.c"
    file.write_text("old")
    assert make_ptx.main(["--c", str(file)]) == 0
    source = file.read_text()
    _, _, text = source.partition("cer_kernels_ptx[] =")
    # A string of C over many lines is one of Python, in brackets and without the semicolon.
    assert ast.literal_eval(f"({text.rstrip().removesuffix(';')})") == make_ptx.PTX.read_text()
    os.utime(file, ns=(1, 1))
    assert make_ptx.main(["--c", str(file)]) == 0
    assert file.stat().st_mtime_ns == 1 and file.read_text() == source


def test_c_source_escapes_quotes_tabs_and_newlines(make_ptx: ModuleType) -> None:
    _, _, text = make_ptx.c_source('a "b"\t\\\n\nc\n').partition("[] =\n")
    assert text == '    "a \\"b\\"\\t\\\\\\n"\n    "\\n"\n    "c\\n";\n'


def test_the_oldest_driver_and_gpu_are_as_documented() -> None:
    ptx = (CUDA / "kernels.ptx").read_text().splitlines()
    assert ".version 7.8" in ptx  # of CUDA 11.8: drivers from 520 on
    assert ".target sm_75" in ptx


def test_the_ptx_has_no_fused_or_approximate_operations() -> None:
    """A multiply-add rounds once where the CPU rounds twice; division is the exact one.

    One kernel is left out: it calls CUDA's exp and log, which are made of all these.
    """
    ptx = (CUDA / "kernels.ptx").read_text()
    kernels = re.split(r"(?=\.visible \.entry )", ptx)
    (scores,) = [k for k in kernels if k.startswith(".visible .entry cer_native_score_kernel(")]
    own = ptx.replace(scores, "")
    assert "fma." not in own
    assert "div.rn.f32" in own and "div.rn.f64" in own
    assert "div.full" not in own and "div.approx" not in own and ".ftz" not in own


def test_the_ptx_is_current() -> None:
    """In a process of its own: NVRTC leaves the thread that it compiles on in the C locale."""
    command = [sys.executable, str(CUDA / "make_ptx.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    if "NVRTC 11.8 is not installed" in done.stderr:
        pytest.skip(done.stderr.strip())
    assert done.returncode == 0, f"{done.stderr}run python csrc/cuda/make_ptx.py"


def test_a_stale_file_is_found(
    make_ptx: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ptx = "//\n.version 7.8\n"
    monkeypatch.setattr(make_ptx, "find_nvrtc", lambda folder: None)
    monkeypatch.setattr(make_ptx, "compile_ptx", lambda nvrtc: ptx)
    monkeypatch.setattr(make_ptx, "PTX", tmp_path / "kernels.ptx")
    assert make_ptx.main(["--check"]) == 1
    assert make_ptx.main([]) == 0
    assert make_ptx.main(["--check"]) == 0
    (tmp_path / "kernels.ptx").write_text(ptx + "\n")
    capsys.readouterr()
    assert make_ptx.main(["--check"]) == 1
    assert (
        capsys.readouterr().err
        == "kernels.ptx is not up to date with kernels.cu: run make_ptx.py\n"
    )


def test_the_error_for_a_missing_compiler_says_how_to_install_it(
    make_ptx: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert make_ptx.main(["--nvrtc", str(tmp_path)]) == 1
    expected = "error: NVRTC 11.8 is not installed: pip install nvidia-cuda-nvrtc-cu11==11.8.89\n"
    assert capsys.readouterr().err == expected


def compile_with_nvcc(source: str, gpu: str, folder: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not here")
    known = subprocess.run([nvcc, "--list-gpu-code"], check=True, capture_output=True, text=True)
    if gpu not in known.stdout.split():
        pytest.skip(f"this nvcc does not know {gpu}")
    options = ["-std=c++17", "--fmad=false", "-Werror", "all-warnings", f"-arch={gpu}", "-cubin"]
    command = [nvcc, *options, str(CUDA / source), "-o", str(folder / "kernels.cubin")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (folder / "kernels.cubin").read_bytes().startswith(b"\x7fELF")


@pytest.mark.parametrize("gpu", ["sm_75", "sm_80", "sm_90", "sm_100", "sm_120"])
def test_nvcc_compiles_the_kernels(gpu: str, tmp_path: Path) -> None:
    compile_with_nvcc("kernels.cu", gpu, tmp_path)


@pytest.mark.parametrize("gpu", ["sm_75", "sm_90", "sm_120"])
def test_the_ptx_is_translated(gpu: str, tmp_path: Path) -> None:
    compile_with_nvcc("kernels.ptx", gpu, tmp_path)


def test_the_sources_need_no_header_of_cuda() -> None:
    """What a C compiler builds includes our own files only; NVRTC has no others."""
    for file in [CUDA / "kernels.cu", CUDA / "kernels_ptx.h"]:
        assert "#include <" not in file.read_text(), file.name
