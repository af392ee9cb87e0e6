"""Provide `Run`: a search that another process trains, which can be watched, steered, awaited."""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import cerebro.control as control
from cerebro.errors import RunError, explain_interrupt, shorten_tracebacks
from cerebro.report import format as fmt
from cerebro.report.block import Block, Notebook, make_block
from cerebro.results.result import Result, note_last
from cerebro.run.folder import BACKGROUND_LOG
from cerebro.run.owner import owner_of
from cerebro.watch.runs import WatchedRuns
from cerebro.watch.server import Server
from cerebro.watch.view import View

LOOK_SECONDS = 0.5
DRAW_SECONDS = 1.0
TAIL_LINES = 20


class Live(Protocol):
    """The process of a search, as far as the one that has started it knows it."""

    @property
    def error(self) -> BaseException | None:
        """What has ended the search, once `wait` has returned True."""

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the process; return whether it has ended."""


class Run:
    """A run that another process trains, such as ``cerebro.search(..., background=True)`` starts.

    It needs nothing but the run's folder: ``cerebro.Run("runs/pets")`` is the same in any process.
    In a notebook it shows the state of the run.

    Parameters
    ----------
    folder
        The run's folder.
    build
        The run's ``build``, if it cannot be imported again.

    Raises
    ------
    InputError
        If the folder does not hold a run.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        build: Callable[..., Any] | None = None,
        live: Live | None = None,
    ) -> None:
        self._result = Result(folder, build=build)
        self._build = build
        self._live = live  # None if another process has started it
        self._guard = threading.Lock()
        self._server: Server | None = None
        self._view = View(self.folder)

    def __reduce__(self) -> tuple[Any, ...]:
        return Run, (self.folder,)

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self._result.saved.folder

    @property
    def is_running(self) -> bool:
        """Whether a process trains the run, or holds it paused."""
        return owner_of(self.folder) is not None

    # --- steering --------------------------------------------------------

    def clone(
        self,
        trial: int,
        changes: Mapping[str, Any] | None = None,
        *,
        after: int | None = None,
        epochs: int | None = None,
        cold: bool = False,
        **settings: Any,
    ) -> int:
        """Clone a trial with some settings changed; return the new trial's number.

        The settings that differ are `changes`, or keywords: ``run.clone(3, lr=0.01)``. The rest is
        as for `cerebro.control.clone`.
        """
        changes = {**(changes or {}), **settings}
        return control.clone(self.folder, trial, changes, after=after, epochs=epochs, cold=cold)

    def add(
        self,
        config: Mapping[str, Any] | None = None,
        *,
        epochs: int | None = None,
        **settings: Any,
    ) -> int:
        """Add a configuration of your own; return its number; see `cerebro.control.add`."""
        return control.add(self.folder, {**(config or {}), **settings}, epochs=epochs)

    def extend(self, trial: int, epochs: int) -> None:
        """Train an open trial until `epochs` are done; see `cerebro.control.extend`."""
        control.extend(self.folder, trial, epochs)

    def stop(self, trial: int | None = None) -> None:
        """Stop the run, or one of its trials; see `cerebro.control.stop`."""
        control.stop(self.folder, trial)

    def pause(self, trial: int | None = None) -> None:
        """Pause the run, or one of its trials, until `unpause`; see `cerebro.control.pause`."""
        control.pause(self.folder, trial)

    def unpause(self, trial: int | None = None) -> None:
        """Continue the paused run, or a paused trial; see `cerebro.control.unpause`."""
        control.unpause(self.folder, trial)

    # --- the end ---------------------------------------------------------

    @shorten_tracebacks
    def result(self, timeout: float | None = None) -> Result:
        """Wait until the run has ended, and return its result.

        Ctrl-C ends the waiting, not the run. `cerebro.open` gives the result so far.

        Parameters
        ----------
        timeout
            The most seconds to wait; None: as long as it takes.

        Raises
        ------
        TimeoutError
            If the run has not ended by then.
        RunError
            If its process has died, with the last lines of its output; or if the run failed. In
            the process that has started it, the search's own exception is raised instead.
        """
        give_up = None if timeout is None else time.monotonic() + timeout
        try:
            while not self._wait(give_up):
                if give_up is not None and time.monotonic() >= give_up:
                    raise TimeoutError(f"{self.folder} has not ended within {timeout:g} s")
        except KeyboardInterrupt as interrupt:
            lines = [
                f"stopped waiting: the search goes on in {self.folder}",
                "to wait again:  run.result()",
                "to stop it:     run.stop()",
            ]
            explain_interrupt(interrupt, lines, "\n".join(lines))
            raise
        result = note_last(Result(self.folder, build=self._build))
        error = None if self._live is None else self._live.error
        if error is not None:
            if isinstance(error, RunError):
                error.result = result
            raise error
        if result.status == "failed":
            raise RunError(str(result.error), result)
        if result.status == "interrupted":
            raise RunError(
                f"the process that trained {self.folder} has died{self._read_tail()}\n"
                f"to resume it: python -m cerebro resume {shlex.quote(str(self.folder))}",
                result,
            )
        return result

    def _wait(self, give_up: float | None) -> bool:
        """Wait a moment, at most until a time; return whether the run has ended."""
        left = LOOK_SECONDS if give_up is None else max(0.0, give_up - time.monotonic())
        seconds = min(LOOK_SECONDS, left)
        if self._live is not None:
            with self._guard:
                if not self._live.wait(seconds):
                    return False
                if self.is_running:  # it has been resumed
                    self._live = None
        elif self.is_running:
            time.sleep(seconds)
        return not self.is_running

    def _read_tail(self) -> str:
        with contextlib.suppress(OSError):
            lines = (self.folder / BACKGROUND_LOG).read_text("utf-8", "replace").splitlines()
            return "; its last lines:\n" + "\n".join(lines[-TAIL_LINES:])
        return ""

    # --- looking at it ---------------------------------------------------

    def watch(self) -> str:
        """Serve the run's page from this process; return its address, which has a token.

        The page is the one of ``python -m cerebro watch``, and ends with this process.
        """
        if self._server is None:
            self._server = Server(WatchedRuns(self.folder))
            threading.Thread(
                target=self._server.serve_forever, name="cerebro-watch", daemon=True
            ).start()
        return self._server.url

    def follow(self, show: Any) -> None:
        """Keep the block of a notebook up to date from now on; do nothing for other displays."""
        if isinstance(show, Notebook):
            threading.Thread(
                target=self._draw, args=(show,), name="cerebro-block", daemon=True
            ).start()

    def _draw(self, show: Notebook) -> None:
        is_over = False
        while not is_over:
            is_over = not self.is_running
            with contextlib.suppress(Exception):  # such as a store that is being replaced
                show.draw(self._make_block())
            time.sleep(0 if is_over else DRAW_SECONDS)

    def _make_block(self) -> Block:
        """Return the run's block, with how much of it is done."""
        with self._guard:
            self._view.refresh()
            share, left = self._view.forecast()
            status, is_live, seconds = self._view.status, self._view.is_live, self._view.now
        result = Result(self.folder)
        block = make_block(result)
        if not is_live:
            notes = [*filter(None, [result.error]), *block.notes]
            return replace(block, state=status, notes=notes)
        facts = [f"{fmt.rough_duration(seconds)} so far"]
        facts += [f"{fmt.rough_duration(left)} left"] if left else []
        done = [] if share is None else [f"{fmt.percent(share)} done"]
        facts = [*done, ", ".join(facts), *block.facts]
        return replace(block, state=status, facts=facts, share_done=share)

    def _repr_html_(self) -> str:
        return self._make_block().to_html()

    def __repr__(self) -> str:
        return f"Run{repr(Result(self.folder)).removeprefix('Result')}"
