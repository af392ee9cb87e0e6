"""Compiles kernels.cu to kernels.ptx, and embeds kernels.ptx in the module as a C file.

    python csrc/cuda/make_ptx.py writes kernels.ptx python csrc/cuda/make_ptx.py --check exits 1 if
    it is not current; writes nothing python csrc/cuda/make_ptx.py --c FILE writes kernels.ptx as C,
    for builds; needs no NVRTC

The compiler is NVRTC 11.8, in NVIDIA's wheel ``nvidia-cuda-nvrtc-cu11==11.8.89`` (x86-64 Linux; no
GPU, driver or toolkit needed). It writes PTX 7.8 for drivers from 520 on; a newer PTX would need a
newer driver without any benefit. The same sources give the same bytes everywhere, which ``--check``
compares.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCE = HERE / "kernels.cu"
PTX = HERE / "kernels.ptx"
OPTIONS = [
    "--gpu-architecture=compute_75",
    "--std=c++17",
    "--fmad=false",  # fused multiply-adds would give different bits than the CPU
    "--device-int128",
]
WHEEL = "nvidia-cuda-nvrtc-cu11==11.8.89"
VERSION = (11, 8)


class MissingCompilerError(Exception):
    """NVRTC 11.8 is not installed."""


def find_nvrtc(folder: Path | None = None) -> ctypes.CDLL:
    """Open NVRTC 11.8 from `folder`, or from NVIDIA's wheel."""
    folders = [folder] if folder else [Path(p) / "nvidia/cuda_nvrtc/lib" for p in sys.path]
    for place in folders:
        library = place / "libnvrtc.so.11.2"  # the name of all 11.x from 11.2 on
        if library.exists():
            # Opened first, so that it is found by name without a search path.
            ctypes.CDLL(str(place / "libnvrtc-builtins.so.11.8"), ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(library))
    raise MissingCompilerError(f"NVRTC 11.8 is not installed: pip install {WHEEL}")


def compile_ptx(nvrtc: ctypes.CDLL) -> str:
    """Compile kernels.cu; raise RuntimeError with the compiler's messages."""
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    if (major.value, minor.value) != VERSION:
        raise MissingCompilerError(
            f"this is NVRTC {major.value}.{minor.value}, not 11.8: pip install {WHEEL}"
        )
    program = ctypes.c_void_p()
    # The PTX contains the name; without a folder it is the same everywhere.
    status = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), SOURCE.read_bytes(), b"kernels.cu", 0, None, None
    )
    if status != 0:
        raise RuntimeError(nvrtc.nvrtcGetErrorString(status).decode())
    options = [*OPTIONS, f"-I{HERE}", f"-I{HERE.parent / 'core'}"]
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    status = nvrtc.nvrtcCompileProgram(program, len(options), array)
    messages = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
    if status != 0:
        raise RuntimeError(messages)
    ptx = _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    # Comments number the calls, counting on from earlier compilations in the process.
    return re.sub(r" // callseq \d+(, \d+)?$", "", ptx, flags=re.MULTILINE)


def _text(get_size: object, get: object, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    get_size(program, ctypes.byref(size))  # type: ignore[operator]
    buffer = ctypes.create_string_buffer(size.value)
    get(program, buffer)  # type: ignore[operator]
    return buffer.value.decode()


def c_source(ptx: str) -> str:
    """Return the PTX as one C string, line by line."""
    lines = "\n".join(f'    "{_escaped(line)}\\n"' for line in ptx.splitlines())
    return (
        "/* kernels_ptx.c -- kernels.ptx, word for word; written by make_ptx.py. */\n"
        '#include "kernels_ptx.h"\n'
        "\n"
        "/* Longer than C guarantees; common compilers accept it. */\n"
        '#pragma GCC diagnostic ignored "-Woverlength-strings"\n'
        "\n"
        "/* clang-format off */\n"
        f"const char cer_kernels_ptx[] =\n{lines};\n"
    )


def _escaped(line: str) -> str:
    return line.replace("\\", "\\\\").replace('"', '\\"').replace("\t", "\\t")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if not current")
    parser.add_argument("--nvrtc", type=Path, help="folder of libnvrtc.so.11.2")
    parser.add_argument("--c", type=Path, metavar="FILE", help="write kernels.ptx as C to FILE")
    options = parser.parse_args(arguments)
    if options.c:
        _write_if_changed(options.c, c_source(PTX.read_text(encoding="ascii")))
        return 0
    try:
        ptx = compile_ptx(find_nvrtc(options.nvrtc))
    except (MissingCompilerError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if options.check:
        if _holds(PTX, ptx):
            return 0
        print(f"{PTX.name} is not up to date with kernels.cu: run make_ptx.py", file=sys.stderr)
        return 1
    if _write_if_changed(PTX, ptx):
        print(f"wrote {PTX.name}")
    return 0


def _holds(file: Path, text: str) -> bool:
    return file.exists() and file.read_text(encoding="ascii") == text


def _write_if_changed(file: Path, text: str) -> bool:
    """Leave a current file's time unchanged, because builds recompile newer files."""
    if _holds(file, text):
        return False
    file.write_text(text, encoding="ascii")
    return True


if __name__ == "__main__":
    sys.exit(main())
