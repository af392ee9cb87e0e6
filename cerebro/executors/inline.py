"""Run units in this process, one after the other (``workers=0``).

Meant for debuggers, notebooks and tests of exactness: the code is the same as in a worker, so the
states have the same bits. A unit runs inside `wait`, which returns when the unit has ended.
"""

from __future__ import annotations

import contextlib
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

from cerebro.executors.base import Wake
from cerebro.machine import generators, guard
from cerebro.machine.devices import use_device
from cerebro.machine.guard import guard_trial
from cerebro.machine.libraries import settings_of_run
from cerebro.machine.local import LOCAL, Machine
from cerebro.worker import jobs
from cerebro.worker.messages import Event, Job, RunContext
from cerebro.worker.runner import UnitRunner


class InlineExecutor:
    """Has a single worker, number 0: the calling thread."""

    def __init__(self, machine: Machine = LOCAL) -> None:
        self._machine = machine
        self._runner: UnitRunner | None = None
        self._next: Job | None = None
        self._settings = contextlib.ExitStack()  # the run's settings in this process

    def start(self, context: RunContext) -> list[int]:
        self._settings.enter_context(settings_of_run(context.libraries))
        self._settings.enter_context(_show_debugger())
        guard.use_program(context.program)
        self._runner = UnitRunner(context, worker=0, machine=self._machine)
        return [0]

    def submit(self, worker: int, task: Job) -> None:
        assert self._next is None, "the inline worker runs one unit at a time"
        self._next = task

    def wait(self, timeout: float | None = None, wake: Wake | None = None) -> list[Event]:
        assert self._runner is not None
        task, self._next = self._next, None
        if task is None:
            return []
        # Trials must not change the caller's random generators and working directory, nor those of
        # a search in another thread.
        device = self._runner.context.device
        keep = generators.reserve_generators("torch" in sys.modules)
        with keep, use_device(device), _keep_directory(), guard_trial():
            return [jobs.execute(self._runner, task)]

    def replace(self, worker: int) -> int:
        raise RuntimeError("the inline worker cannot be lost")

    def close(self, *, kill: bool = False) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None
        guard.use_program(None)
        self._settings.close()


@contextlib.contextmanager
def _keep_directory() -> Iterator[None]:
    """Go back to the working directory: it is this process's, as its generators are."""
    before = os.getcwd()  # noqa: PTH109
    try:
        yield
    finally:
        os.chdir(before)


@contextlib.contextmanager
def _show_debugger() -> Iterator[None]:
    """Have ``breakpoint()`` print to this standard output: what a unit prints goes to its log."""
    stdout, before = sys.stdout, sys.breakpointhook

    def set_trace(*_: Any, **__: Any) -> None:
        import pdb  # rarely needed

        debugger = pdb.Pdb(stdout=stdout)
        # A notebook replaces `input`: its process has no standard input.
        debugger.use_rawinput = not isinstance(input, types.BuiltinFunctionType)
        debugger.set_trace(sys._getframe(1))

    if before is sys.__breakpointhook__ and "PYTHONBREAKPOINT" not in os.environ:
        sys.breakpointhook = set_trace
    try:
        yield
    finally:
        if sys.breakpointhook is set_trace:  # else the user's code has replaced it
            sys.breakpointhook = before
