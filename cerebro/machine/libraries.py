"""The settings of PyTorch, Keras and JAX together, by the library's name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from cerebro.machine.flags import TORCH
from cerebro.machine.jax_settings import JAX
from cerebro.machine.keras_settings import KERAS
from cerebro.machine.library_settings import LibrarySettings

LIBRARIES: tuple[LibrarySettings, ...] = (TORCH, KERAS, JAX)

Settings = Mapping[str, Mapping[str, Any]]
"""The settings of each library by its name; a library that was not imported may be missing."""


def present_settings() -> dict[str, dict[str, Any]]:
    """Return the settings of this process."""
    return {library.name: library.present() for library in LIBRARIES}


def recorded_settings(environment: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings in the record of an environment."""
    return {library.name: environment.get(library.name, {}) for library in LIBRARIES}


def apply_settings(settings: Settings) -> None:
    """Apply settings of :func:`present_settings` in this process."""
    for library in LIBRARIES:
        library.apply(settings.get(library.name, {}))


def restore_settings(settings: Settings) -> None:
    """Undo what a ``build`` of a run with these `settings` has changed."""
    for library in LIBRARIES:
        library.restore(settings.get(library.name, {}))


@contextmanager
def settings_of_run(settings: Settings) -> Iterator[None]:
    """Run a block with the settings of a run or a model, then restore the caller's."""
    with ExitStack() as stack:
        for library in reversed(LIBRARIES):
            stack.enter_context(library.of_run(settings.get(library.name, {})))
        yield
