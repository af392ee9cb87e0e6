"""What we call of CUDA has the prototypes and numbers of CUDA's own headers, where they are."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CALLS = ROOT / "csrc" / "cuda" / "cudart_calls.h"
pytestmark = pytest.mark.skipif(not CALLS.exists(), reason="the C sources are not here")


def find_headers() -> Path:
    """The folder of CUDA's headers: of nvcc, of NVIDIA's wheels, of the usual places."""
    nvcc = shutil.which("nvcc")
    homes = [] if nvcc is None else [Path(nvcc).resolve().parents[1]]
    homes += [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    homes += [Path(p) / inner for p in sys.path for inner in ("nvidia/cu13", "nvidia/cuda_runtime")]
    homes += sorted(Path("/usr/local").glob("cuda*"), reverse=True)
    for folder in (home / "include" for home in homes):
        if (folder / "cuda.h").exists() and (folder / "cuda_runtime_api.h").exists():
            text = (folder / "cuda.h").read_text(errors="replace")
            version = re.search(r"#define CUDA_VERSION (\d+)", text)
            if version is not None and int(version[1]) >= 12050:
                return folder
    pytest.skip("no headers of CUDA 12.5 or later are here")


def compile_against(headers: Path, ours: Path) -> subprocess.CompletedProcess[str]:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler is here")
    options = ["-std=c++17", "-Wno-deprecated-declarations", "-fsyntax-only"]
    folders = [f"-I{ours}", "-isystem", str(headers)]
    source = ROOT / "tests" / "c" / "cuda_headers.cpp"
    command = [compiler, *options, *folders, str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_prototypes_and_constants_match_the_cuda_headers() -> None:
    done = compile_against(find_headers(), CALLS.parent)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("ours", "wrong", "message"),
    [
        ("(void **out, size_t bytes))", "(void **out, int bytes))", "cudaMalloc"),
        ("const void *image", "void *image", "cuModuleLoadDataEx"),
        (
            "(void **out, unsigned flags)",
            "(void *out, unsigned flags)",
            "cudaStreamCreateWithFlags",
        ),
        ("CER_CUDA_MPS, 133", "CER_CUDA_MPS, 134", "cudaDevAttrMpsEnabled"),
    ],
)
def test_a_difference_is_found(ours: str, wrong: str, message: str, tmp_path: Path) -> None:
    headers = find_headers()
    text = CALLS.read_text()
    assert ours in text
    (tmp_path / CALLS.name).write_text(text.replace(ours, wrong, 1))
    done = compile_against(headers, tmp_path)
    assert done.returncode != 0 and message in done.stderr
