"""Handle JAX's process-wide settings, which change types, random numbers and errors.

They are often set at the top of a script, which workers do not run. Nothing here imports JAX unless
its settings differ from those with which it begins.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import util
from typing import Any, ClassVar

from cerebro.errors import InputError
from cerebro.machine.library_settings import LibrarySettings
from cerebro.machine.whole_modules import find_whole_module


class JaxSettings(LibrarySettings):
    """JAX's settings, named without ``jax_``."""

    name = "jax"
    FIRST: ClassVar[Mapping[str, Any]] = {
        "enable_x64": False,
        "default_prng_impl": "threefry2x32",
        "threefry_partitionable": True,  # False before JAX 0.5
        "default_matmul_precision": None,
        "numpy_dtype_promotion": "standard",
        "numpy_rank_promotion": "allow",
        "debug_nans": False,
    }

    def __init__(self) -> None:
        super().__init__()
        self._own: dict[str, Any] = {}
        """The process's settings before `apply` changed any; empty if it has not."""
        self._begun: dict[str, Any] = {}
        """The settings of the last run in this worker process."""

    def is_imported(self) -> bool:
        return _jax() is not None

    def present(self) -> dict[str, Any]:
        jax = _jax()
        if jax is None:
            return {}
        names = [name for name in self.FIRST if hasattr(jax.config, f"jax_{name}")]
        return {name: _to_plain(getattr(jax.config, f"jax_{name}")) for name in names}

    def apply(self, settings: Mapping[str, Any]) -> None:
        """Apply settings of `present`; settings that this JAX lacks are left out.

        Raises
        ------
        InputError
            If a setting must change that a ``with`` block of this thread fixes.
        """
        if not settings or (_jax() is None and self._begins_with(settings)):
            return
        import jax

        now = self.present()
        changes = {
            name: value for name, value in settings.items() if name in now and now[name] != value
        }
        if not changes:
            return
        self._check_blocks(changes, now)
        if not self._own:
            self._own.update(now)
        for name, value in changes.items():
            jax.config.update(f"jax_{name}", value)

    def of_new_process(self) -> dict[str, Any]:
        """Return the process's own settings, or those of a new process; empty without JAX."""
        return self._own or _first_in_environment()

    def enter(self, settings: Mapping[str, Any]) -> None:
        self.apply(settings)  # before arrays are made, which have other types otherwise

    def begin_process(self, settings: Mapping[str, Any]) -> None:
        """Apply the settings of a run that begins in a worker process.

        Without any, the process gets back its own: an earlier run may have changed them. Settings
        that are those of the last run stay as they are, because a module of the user's may have
        changed them when it was imported, and it is not imported again.
        """
        wanted = dict(settings or self._own)
        changed = {name: v for name, v in wanted.items() if self._begun.get(name, ...) != v}
        self.apply(changed)
        self._begun = wanted

    def _begins_with(self, settings: Mapping[str, Any]) -> bool:
        """Return whether JAX would begin with these settings, or cannot be imported."""
        first = _first_settings()
        return first is None or (
            not any(f"JAX_{name.upper()}" in os.environ for name in first)
            and all(first.get(name, value) == value for name, value in settings.items())
        )

    def _check_blocks(self, changes: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Raise InputError if a ``with`` block fixes a setting, which cannot be changed then."""
        with ThreadPoolExecutor(1) as other:  # such blocks are those of one thread
            outside = other.submit(self.present).result()
        for name, value in changes.items():
            if outside[name] != now[name]:
                raise InputError(
                    f"JAX's {name} is {now[name]!r} here because of a with block, but the run has "
                    f"{value!r}: leave the block first (jax.config.update changes a whole process)"
                )


JAX = JaxSettings()


def _to_plain(value: Any) -> Any:
    return getattr(value, "value", value)  # of an enumeration, as numpy_dtype_promotion is


def _first_in_environment() -> dict[str, Any]:
    """Return the settings of a new process with this environment; empty if there is no JAX."""
    found = dict(_first_settings() or {})
    for name, value in found.items():
        text = os.environ.get(f"JAX_{name.upper()}")
        if text is not None:  # read as JAX does
            yes = text.lower() in ("y", "yes", "t", "true", "on", "1")
            found[name] = yes if isinstance(value, bool) else text
    return found


@functools.cache
def _first_settings() -> dict[str, Any] | None:
    """Return the settings of a new process with the installed JAX; None if there is no JAX."""
    if util.find_spec("jax") is None:
        return None
    from importlib import metadata  # slow to import

    release = tuple(int(part) for part in metadata.version("jax").split(".")[:2])
    return {**JaxSettings.FIRST, "threefry_partitionable": release >= (0, 5)}


def _jax() -> Any:
    """Return JAX if it is imported, else None."""
    jax = find_whole_module("jax")
    return jax if hasattr(jax, "config") else None
