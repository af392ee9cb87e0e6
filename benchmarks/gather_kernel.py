"""Launch the row-gathering kernel directly: compiled from the core and called through ctypes.

Only benchmarks and tests do that, so it is not part of the installed module.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
import sysconfig
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
MESSAGE_BYTES = 512


def build(folder: Path, optimize: str = "-O2") -> Path:
    """Compile benchmarks/c/gather_kernel.c with the core; return the shared library."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")[0]
    own = ROOT / "benchmarks" / "c" / "gather_kernel.c"
    sources = sorted([own, *CSRC.glob("core/*.c"), *CSRC.glob("cuda/*.c")])
    flags = [
        *("-std=c11", "-D_GNU_SOURCE", optimize, "-fPIC", "-ffp-contract=off"),
        "-fno-strict-aliasing",
        *(f"-I{CSRC / name}" for name in ("core", "cuda", "third_party")),
    ]

    def compile_one(source: Path) -> str:
        made = str(folder / f"{source.stem}.o")
        subprocess.run([compiler, *flags, "-c", str(source), "-o", made], check=True)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compile_one, sources))
    library = folder / "gather_kernel.so"
    link = [compiler, "-shared", *objects, "-lm", "-lpthread", "-ldl", "-o", str(library)]
    subprocess.run(link, check=True)
    return library


def part_table(addresses: Sequence[int]) -> list[int]:
    """Return a table of parts at these addresses, multiples of 64, as 64-bit integers."""
    return [word for address in addresses for word in (address, 0, 0)]


class GatherKernel:
    """Copies rows in a device's memory.

    Parameters ---------- library The result of `build`. runtime Path of the open CUDA runtime; None
    for host memory. index The GPU's number.
    """

    def __init__(self, library: Path, runtime: str | None = None, index: int = 0) -> None:
        # A used library is never unloaded: the device stays open.
        self._library = ctypes.CDLL(str(library))
        self._ptx = (CSRC / "cuda" / "kernels.ptx").read_bytes()  # kept alive: it is not copied
        self._device = ctypes.c_void_p()
        self._message = ctypes.create_string_buffer(MESSAGE_BYTES)
        path = None if runtime is None else os.fsencode(runtime)
        opened = self._library.gather_open(
            *(path, ctypes.c_int(index), self._ptx, ctypes.byref(self._device), self._message)
        )
        self._check(opened)

    def __call__(
        self, dst: int, parts: int, row_bytes: int, places: int, n_rows: int, stream: int = 0
    ) -> None:
        """Copy rows of several parts, one after the other, to `dst`, on a stream.

        `dst`, `parts` and `places` are addresses in device memory and `stream` is a
        ``cudaStream_t``: `parts` is the memory of `part_table`, and `places` has a row number and a
        part number for each row, both uint32. Arguments are not checked and must stay valid until
        the stream is done.
        """
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        done = self._library.gather_rows(
            *(self._device, pointer(dst), pointer(parts), size(row_bytes), pointer(places)),
            *(size(n_rows), pointer(stream), self._message),
        )
        self._check(done)

    def _check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError(self._message.value.decode())
