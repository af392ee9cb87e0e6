"""The settings of PyTorch, Keras and JAX with which a run or a model computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from cerebro.machine.flags import flags_of_run
from cerebro.machine.jax_settings import jax_of_run
from cerebro.machine.keras_settings import keras_of_run


class HasSettings(Protocol):
    """A run's context or a live model."""

    @property
    def torch_flags(self) -> Mapping[str, Any]: ...
    @property
    def keras(self) -> Mapping[str, Any]: ...
    @property
    def jax(self) -> Mapping[str, Any]: ...


@contextmanager
def settings_of(owner: HasSettings) -> Iterator[None]:
    """Run a block with the settings of a run or a model, then restore the caller's settings."""
    with jax_of_run(owner.jax), keras_of_run(owner.keras), flags_of_run(owner.torch_flags):
        yield
