"""The Python side of shim.c: compiles it, and writes the page that it shares with a run."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import struct
import subprocess
import sysconfig
from pathlib import Path

PATH_MAX = 1024
WORDS = 32  # bytes of the 32-bit words, before countdown and room
PATHS = WORDS + 16
PAGE_BYTES = PATHS + 3 * PATH_MAX

CLASSES = {
    "create": 1,
    "write": 2,
    "resize": 4,
    "rename": 8,
    "unlink": 16,
    "folder": 32,
    "sync": 64,
}
ANY = 127
COORDINATOR, WORKER = 1, 2
ACTIONS = {"nothing": 0, "halt": 1, "fail once": 2, "fail": 3, "short": 4, "slow": 5, "lie": 6}
NAMES = ("classes", "roles", "action", "error", "delay_us", "struck", "shadowed", "trouble")


class CannotCompile(Exception):
    """The C compiler is missing or fails."""


def compile_shim(folder: Path) -> Path:
    """Compile shim.c into `folder` and return the library."""
    library = folder / "shim.so"
    source = Path(__file__).with_name("shim.c")
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    found = shutil.which(compiler) or shutil.which("cc") or shutil.which("gcc")
    if found is None:
        raise CannotCompile("no C compiler found")
    command = [found, "-std=gnu11", "-O1", "-Wall", "-Wextra", "-fPIC", "-shared", "-o"]
    made = subprocess.run(
        [*command, str(library), str(source), "-ldl"], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        raise CannotCompile(made.stderr)
    return library


class Shim:
    """The page of one run: the faults for its files below `root`.

    Parameters ---------- library The compiled shim. folder Where the page and the shadow go; on the
    file system of `root`. root The folder of the watched files. events The pipe that reports halted
    processes.
    """

    def __init__(self, library: Path, folder: Path, root: Path, events: Path) -> None:
        self._library = library
        self._file = folder / "shim.page"
        self.shadow = folder / "shadow"
        self._file.write_bytes(bytes(PAGE_BYTES))
        with self._file.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), PAGE_BYTES)
        for index, path in enumerate((root, self.shadow, events)):
            text = os.fsencode(path.resolve())
            at = PATHS + index * PATH_MAX
            self._page[at : at + len(text)] = text
        self.calm()

    def environment(self) -> dict[str, str]:
        """The environment variables of a watched process."""
        return {"LD_PRELOAD": str(self._library), "CEREBRO_FAULTS_SHIM": str(self._file)}

    def calm(self) -> None:
        """Inject no faults from now on."""
        self._set("classes", 0)
        self._set("struck", 0)
        self.set_room(-1)

    def strike(
        self,
        action: str,
        *,
        after: int,
        classes: int = ANY,
        roles: int = COORDINATOR | WORKER,
        error: int = errno.EIO,
        delay: float = 0.0,
    ) -> None:
        """Strike the `after`-th operation from now (from 1) of some classes and processes."""
        self._set("classes", 0)
        self._set("struck", 0)
        self._set("roles", roles)
        self._set("action", ACTIONS[action])
        self._set("error", error)
        self._set("delay_us", round(delay * 1e6))
        struct.pack_into("<q", self._page, WORDS, after)
        self._set("classes", classes)

    def set_room(self, nbytes: int) -> None:
        """Set the disk's free bytes; -1: the real number."""
        struct.pack_into("<q", self._page, WORDS + 8, nbytes)

    @property
    def struck(self) -> int:
        """The number of strikes since `strike`."""
        return self._get("struck")

    @property
    def trouble(self) -> int:
        """The number of files that could not be kept; if any, power.py's result is invalid."""
        return self._get("trouble")

    def keep_shadow(self) -> None:
        """Start the shadow for a power loss."""
        self._set("shadowed", 1)

    def close(self) -> None:
        self._page.close()

    def _set(self, name: str, value: int) -> None:
        struct.pack_into("<I", self._page, 4 * NAMES.index(name), value)

    def _get(self, name: str) -> int:
        value: int = struct.unpack_from("<I", self._page, 4 * NAMES.index(name))[0]
        return value
