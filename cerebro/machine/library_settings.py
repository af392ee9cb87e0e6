"""The process-wide settings of a library that change what a model computes.

A run sends the settings of the user's process to its workers. Each ``build`` begins with them; what
it changes belongs to its model, and what a module changes when it is imported stays in the process.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

from cerebro.machine.imports import find_whole_module


class LibrarySettings:
    """The settings of one library. Nothing here imports it, except `apply` for other settings."""

    name: ClassVar[str]
    """The library's name in records of runs."""
    FIRST: ClassVar[Mapping[str, Any]]
    """The names of the settings, and their values in a new process."""

    def __init__(self) -> None:
        self.imported: dict[str, Any] = {}
        """What modules set while a ``build`` of this run imported them. Python imports a module
        once, so no later ``build`` sets it again."""

    def is_imported(self) -> bool:
        """Return whether the library is completely imported in this process."""
        return find_whole_module(self.name) is not None

    def present(self) -> dict[str, Any]:
        """Return the current settings as JSON values; empty if the library is not imported."""
        raise NotImplementedError

    def apply(self, settings: Mapping[str, Any]) -> None:
        """Apply settings of `present`; import the library only if it would begin with others."""
        raise NotImplementedError

    def of_new_process(self) -> dict[str, Any]:
        """Return the settings with which the library begins."""
        return dict(self.FIRST)

    def of_build(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings in which each ``build`` of a run with these `settings` begins."""
        of_run = {name: settings[name] for name in self.FIRST if name in settings}
        return {**(of_run or self.of_new_process()), **self.imported}

    def restore(self, settings: Mapping[str, Any]) -> None:
        """Undo what a ``build`` of a run with these `settings` has changed."""
        if self.is_imported():
            self.apply(self.of_build(settings))

    def begin_build(self, settings: Mapping[str, Any]) -> None:
        """Prepare the process for a ``build`` of a run with these `settings`."""
        self.restore(settings)

    def enter(self, settings: Mapping[str, Any]) -> None:
        """Apply the settings of a run, unless the library is not imported: see `build_model`."""
        if self.is_imported():
            self.apply(settings)

    @contextmanager
    def of_run(self, settings: Mapping[str, Any]) -> Iterator[None]:
        """Run a block with the settings of a run, then restore the caller's.

        Settings of modules that are first imported in the block stay.
        """
        before, imported_before = self.present(), dict(self.imported)
        try:
            self.enter(settings)
            yield
        finally:
            if self.is_imported():
                new = {k: v for k, v in self.imported.items() if imported_before.get(k) != v}
                self.apply({**(before or self.of_new_process()), **new})
