"""Show the progress of writing a dataset: a bar on a terminal, nothing for small datasets."""

from __future__ import annotations

import sys
from typing import Any

from cerebro.errors import InputError
from cerebro.report.progress import is_terminal

QUIET_BYTES = 128_000_000  # takes about a second


class ByteProgress:
    """A bar of bytes; with ``"auto"`` only for many, and if standard error is a terminal."""

    def __init__(self, progress: str | bool) -> None:
        if progress not in ("auto", True, False):
            raise InputError(f"progress must be 'auto', True or False, not {progress!r}")
        is_open = not getattr(sys.stderr, "closed", False)
        self._shows = is_terminal(sys.stderr) if progress == "auto" else bool(progress) and is_open
        self._quiet = QUIET_BYTES if progress == "auto" else 0
        self._label = ""
        self._total: int | None = None
        self._done = 0
        self._bar: Any = None
        self._task: Any = None

    def begin(self, label: str, total: int | None = None) -> None:
        """Begin a stage of `total` bytes (None: unknown)."""
        self._label, self._total, self._done = label, total, 0
        if self._bar is not None:
            self._bar.update(self._task, description=label, total=total, completed=0)

    def advance(self, count: int) -> None:
        self._done += count
        if not self._shows:
            return
        if self._bar is None and max(self._done, self._total or 0) >= self._quiet:
            self._show()
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)

    def __enter__(self) -> ByteProgress:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task(self._label, total=self._total)
        self._bar.start()
