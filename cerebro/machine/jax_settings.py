"""Handle JAX's process-wide settings, which change types, random numbers and errors.

They are often set at the top of a script, which workers do not run. Nothing here imports JAX unless
its settings differ from those with which it begins.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import util
from typing import Any

from cerebro.errors import InputError
from cerebro.machine.whole_modules import whole_module

FIRST_SETTINGS: dict[str, Any] = {
    "enable_x64": False,
    "default_prng_impl": "threefry2x32",
    "threefry_partitionable": True,  # False before JAX 0.5
    "default_matmul_precision": None,
    "numpy_dtype_promotion": "standard",
    "numpy_rank_promotion": "allow",
    "debug_nans": False,
}
"""The settings that are sent to workers, named without ``jax_``; the values of a new process."""

_own: dict[str, Any] = {}
"""The settings of this process before :func:`set_jax` changed any; empty if it has not."""

_begun: dict[str, Any] = {}
"""The settings of the last run in this worker process."""


imported: dict[str, Any] = {}
"""The settings that modules made while a ``build`` of this run imported them."""


def jax_settings() -> dict[str, Any]:
    """Return the JAX settings that change results, as JSON values; empty if JAX is not imported."""
    jax = _jax()
    if jax is None:
        return {}
    names = [name for name in FIRST_SETTINGS if hasattr(jax.config, f"jax_{name}")]
    return {name: _plain(getattr(jax.config, f"jax_{name}")) for name in names}


def _plain(value: Any) -> Any:
    return getattr(value, "value", value)  # of an enumeration, as numpy_dtype_promotion is


def set_jax(settings: Mapping[str, Any]) -> None:
    """Apply settings from `jax_settings`; settings that this JAX lacks are left out.

    A process that has not imported JAX imports it only for settings that differ from those with
    which it would begin: most models do not use JAX, even if it is imported elsewhere. Raises
    InputError if a ``with`` block of this thread fixes a setting that must change.
    """
    if not settings or (_jax() is None and _begins_with(settings)):
        return
    import jax

    now = jax_settings()
    changes = {
        name: value for name, value in settings.items() if name in now and now[name] != value
    }
    if not changes:
        return
    _check_blocks(changes, now)
    if not _own:
        _own.update(now)
    for name, value in changes.items():
        jax.config.update(f"jax_{name}", value)


def begin_jax(settings: Mapping[str, Any]) -> None:
    """Apply the settings of a run that begins in a worker process.

    Without any, the process gets back its own: an earlier run may have changed them. Settings of
    the last run stay as they are: a module of the user may have changed them when it was imported,
    and it is not imported again.
    """
    values = dict(settings or _own)
    set_jax({name: value for name, value in values.items() if _begun.get(name, ...) != value})
    _begun.clear()
    _begun.update(values)


def jax_of_process(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings in which each ``build`` of a run with these `settings` begins."""
    return {**(settings or _own or _first_in_environment()), **imported}


def restore_jax(settings: Mapping[str, Any]) -> None:
    if _jax() is not None:
        set_jax(jax_of_process(settings))


@contextmanager
def jax_of_run(settings: Mapping[str, Any]) -> Iterator[None]:
    """Run a block with the settings of a run, then restore the caller's settings.

    Settings of modules that are first imported in the block stay.
    """
    before, imported_before = jax_settings(), dict(imported)
    try:
        set_jax(settings)
        yield
    finally:
        if _jax() is not None:
            # If the block has imported JAX, the caller has the settings with which JAX began.
            new = {k: v for k, v in imported.items() if imported_before.get(k) != v}
            set_jax({**(before or _own or _first_in_environment()), **new})


def _begins_with(settings: Mapping[str, Any]) -> bool:
    """Return whether JAX would begin with these settings, or cannot be imported."""
    first = _first_settings()
    return first is None or (
        not any(f"JAX_{name.upper()}" in os.environ for name in first)
        and all(first.get(name, value) == value for name, value in settings.items())
    )


def _first_in_environment() -> dict[str, Any]:
    """Return the settings of a new process with this environment; empty if there is no JAX."""
    values = dict(_first_settings() or {})
    for name, value in values.items():
        text = os.environ.get(f"JAX_{name.upper()}")
        if text is not None:  # read as JAX does
            yes = text.lower() in ("y", "yes", "t", "true", "on", "1")
            values[name] = yes if isinstance(value, bool) else text
    return values


@functools.cache
def _first_settings() -> dict[str, Any] | None:
    """Return the settings with which the installed JAX begins; None if there is no JAX."""
    if util.find_spec("jax") is None:
        return None
    from importlib import metadata  # slow to import

    release = tuple(int(part) for part in metadata.version("jax").split(".")[:2])
    return FIRST_SETTINGS | {"threefry_partitionable": release >= (0, 5)}


def _check_blocks(changes: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise InputError if a ``with`` block fixes a setting: changing it would have no effect."""
    with ThreadPoolExecutor(1) as other:  # such blocks are those of one thread
        outside = other.submit(jax_settings).result()
    for name, value in changes.items():
        if outside[name] != now[name]:
            raise InputError(
                f"JAX's {name} is {now[name]!r} here because of a with block, but the run has "
                f"{value!r}: leave the block first (jax.config.update changes a whole process)"
            )


def _jax() -> Any:
    jax = whole_module("jax")
    return jax if hasattr(jax, "config") else None
