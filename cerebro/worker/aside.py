"""Compute beside a trial's units without a trace in the process."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

from cerebro.machine import generators, turns

SECONDS = 60.0
"""How long a comparison may take in addition to the unit's own time limit."""


class Runner(Protocol):
    """What is used of `cerebro.worker.runner.UnitRunner`."""

    def stop_clock(self, seconds: float) -> AbstractContextManager[None]: ...

    def redirect_output(self, trial: int | None) -> AbstractContextManager[None]: ...

    def use_settings(self) -> AbstractContextManager[None]: ...

    def forget_usage(self) -> None: ...

    def free_checked_models(self) -> None: ...


@contextlib.contextmanager
def leave_no_trace(runner: Runner) -> Iterator[None]:
    """Leave no trace in the process: neither output and warnings nor random numbers."""
    turns.allow_giving_away(False)
    with (
        runner.stop_clock(SECONDS),
        runner.redirect_output(None),
        runner.use_settings(),
        generators.preserve_generators("torch" in sys.modules),
        _preserve_keras_seeds(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            runner.forget_usage()
            runner.free_checked_models()


@contextlib.contextmanager
def _preserve_keras_seeds() -> Iterator[None]:
    """Keep Keras's shared random generator, which each build discards."""
    state: Any = sys.modules.get("keras.src.backend.common.global_state")
    seeds: Any = sys.modules.get("keras.src.random.seed_generator")
    if state is None or seeds is None:
        yield
        return
    shared = state.get_global_attribute(seeds.GLOBAL_SEED_GENERATOR)
    try:
        yield
    finally:
        state.set_global_attribute(seeds.GLOBAL_SEED_GENERATOR, shared)
