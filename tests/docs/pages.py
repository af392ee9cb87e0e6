"""A process that runs pages of the documentation; see `kernel`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path
    for path in sorted(
        [
            ROOT / "README.md",
            *(ROOT / "docs").glob("*.md"),
            *(ROOT / "docs" / "guide").glob("*.md"),
            *(ROOT / "docs" / "tutorials").glob("*.md"),
            *(ROOT / "docs" / "coming-from").glob("*.md"),
            *(ROOT / "docs" / "design").glob("*.md"),
        ]
    )
    if "```python" in path.read_text(encoding="utf-8")
}
# These start a Ray cluster, which takes longer than all of the others' searches.
WITH_RAY = {"docs/guide/cluster.md", "docs/guide/ray-tune.md", "docs/tutorials/cluster.md"}


class Kernel:
    """Runs one page after another."""

    def __init__(self, process: subprocess.Popen[str], output: IO[str]) -> None:
        self._process, self._output = process, output

    def run(self, name: str) -> dict[str, Any]:
        """Run a page; return its answer, with what it printed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._output.seek(0)
        self._output.truncate()
        print(PAGES[name], file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        self._output.seek(0)
        printed = self._output.read()
        assert answer, f"{name} ended the process:\n{printed[-5000:]}"
        return {**json.loads(answer), "printed": printed}


@contextmanager
def kernel(folder: Path) -> Iterator[Kernel]:
    """Start the process in an empty folder."""
    environment = {**os.environ, "KERAS_BACKEND": "torch", "MPLBACKEND": "agg"}
    environment.setdefault("XDG_CACHE_HOME", str(Path.home() / ".cache"))  # matplotlib's fonts
    environment["HOME"] = str(folder)  # where Ray Tune writes
    command = [sys.executable, str(Path(__file__).parent / "kernel.py")]
    with (folder / "printed").open("a+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
        )
        try:
            yield Kernel(process, output)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)


def check(kernel: Kernel, name: str) -> None:
    """Run a page; fail with its traceback and the end of what it printed."""
    answer = kernel.run(name)
    print(f"{name}: {answer['seconds']:.1f} s")
    assert answer["error"] is None, f"{answer['error']}\n{answer['printed'][-3000:]}"
