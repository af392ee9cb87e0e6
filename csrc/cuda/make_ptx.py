"""Makes kernels.ptx of kernels.cu, and C of kernels.ptx, which carries it into the module.

    python csrc/cuda/make_ptx.py            writes kernels.ptx
    python csrc/cuda/make_ptx.py --check    only says whether it is current; 1 if not
    python csrc/cuda/make_ptx.py --c FILE   writes kernels.ptx as C; builds do this, without NVRTC

The compiler is NVRTC 11.8, in NVIDIA's wheel ``nvidia-cuda-nvrtc-cu11==11.8.89`` (x86-64 Linux; no
GPU, driver or toolkit needed). It writes PTX 7.8, which drivers from 520 on translate; a newer one
would ask for a newer driver and give nothing for it. The same sources give the same bytes
everywhere, so that ``--check`` compares them.
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
    "--fmad=false",  # multiply-adds would give other bits than the CPU
    "--device-int128",
]
WHEEL = "nvidia-cuda-nvrtc-cu11==11.8.89"
VERSION = (11, 8)


class MissingCompilerError(Exception):
    """NVRTC 11.8 is not there."""


def find_nvrtc(folder: Path | None = None) -> ctypes.CDLL:
    """Open NVRTC 11.8 in `folder`, or where NVIDIA's wheel has put it."""
    folders = [folder] if folder else [Path(p) / "nvidia/cuda_nvrtc/lib" for p in sys.path]
    for place in folders:
        library = place / "libnvrtc.so.11.2"  # the name of all 11.x from 11.2 on
        if library.exists():
            # Opened first, it is found by its name without a search path.
            ctypes.CDLL(str(place / "libnvrtc-builtins.so.11.8"), ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(str(library))
    raise MissingCompilerError(f"NVRTC 11.8 is not here: pip install {WHEEL}")


def compile_ptx(nvrtc: ctypes.CDLL) -> str:
    """Compile kernels.cu; raises RuntimeError with the compiler's messages."""
    nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    if (major.value, minor.value) != VERSION:
        raise MissingCompilerError(
            f"this is NVRTC {major.value}.{minor.value}, not 11.8: pip install {WHEEL}"
        )
    program = ctypes.c_void_p()
    # The name is in the PTX: without a folder it is the same everywhere.
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
    # Calls are numbered in comments, on from what the process has compiled before.
    return re.sub(r" // callseq \d+(, \d+)?$", "", ptx, flags=re.MULTILINE)


def _text(get_size: object, get: object, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    get_size(program, ctypes.byref(size))  # type: ignore[operator]
    buffer = ctypes.create_string_buffer(size.value)
    get(program, buffer)  # type: ignore[operator]
    return buffer.value.decode()


def c_source(ptx: str) -> str:
    """Return the PTX as one string of C, a line for a line."""
    lines = "\n".join(f'    "{_escaped(line)}\\n"' for line in ptx.splitlines())
    return (
        "/* kernels_ptx.c -- kernels.ptx, word for word; written by make_ptx.py. */\n"
        '#include "kernels_ptx.h"\n'
        "\n"
        "/* Longer than C promises; every compiler that is around takes it. */\n"
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
        print(f"{PTX.name} is not what make_ptx.py makes of kernels.cu", file=sys.stderr)
        return 1
    if _write_if_changed(PTX, ptx):
        print(f"wrote {PTX.name}")
    return 0


def _holds(file: Path, text: str) -> bool:
    return file.exists() and file.read_text(encoding="ascii") == text


def _write_if_changed(file: Path, text: str) -> bool:
    """Keep the time of a file that is current: builds compile what is newer."""
    if _holds(file, text):
        return False
    file.write_text(text, encoding="ascii")
    return True


if __name__ == "__main__":
    sys.exit(main())
