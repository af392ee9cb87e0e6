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

    def aside(self, seconds: float) -> AbstractContextManager[None]: ...

    def output_of(self, trial: int | None) -> AbstractContextManager[None]: ...

    def computing(self) -> AbstractContextManager[None]: ...

    def forget_usage(self) -> None: ...

    def free_checked(self) -> None: ...


@contextlib.contextmanager
def aside(runner: Runner) -> Iterator[None]:
    """Leave no trace in the process: neither output and warnings nor random numbers."""
    turns.allow(False)
    with (
        runner.aside(SECONDS),
        runner.output_of(None),
        runner.computing(),
        generators.preserved("torch" in sys.modules),
        _keras_seeds_preserved(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            runner.forget_usage()
            runner.free_checked()


@contextlib.contextmanager
def _keras_seeds_preserved() -> Iterator[None]:
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
