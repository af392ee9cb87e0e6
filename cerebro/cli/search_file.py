"""Read the Python file that ``run`` and ``plan`` take; the file defines a search."""

from __future__ import annotations

import argparse
import difflib
import inspect
import os
import shlex
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from cerebro.cli.options import import_user_file
from cerebro.errors import InputError


def read_search_file(name: str, sought: Sequence[str], command: str) -> ModuleType:
    """Import a file for `command`; raise InputError if it does not define the names `sought`."""
    from cerebro.machine.guard import find_stop

    file = Path(name)
    if not file.is_file():
        raise InputError(f"{file}: there is no such file")
    module = import_user_file(file, *sought)
    stop = find_stop(module)
    if stop is not None:
        warnings.warn(
            f"{stop.where}: the file calls {stop.call} itself. That call is ignored: "
            f"{command} uses build, space, data and settings above it, with the options given "
            "here. For the "
            f"file's own call, run the file: python {shlex.quote(str(file))}",
            stacklevel=1,
        )
    missing = [name for name in sought if not hasattr(module, name)]
    if missing:
        raise InputError(f"{file} does not define {' and '.join(missing)}")
    return module


def data_of(module: ModuleType) -> Any:
    """Return the file's data; if the data is a folder, open it."""
    import cerebro

    data = module.data
    return cerebro.Dataset(os.fspath(data)) if isinstance(data, (str, os.PathLike)) else data


SHUFFLE_HELP = (
    "the order of rows: all rows anew in each epoch, or groups of shards (rows for data up to 4 GB)"
)


def settings_of(module: ModuleType, file: str, options: argparse.Namespace) -> dict[str, Any]:
    """Merge the file's settings with the options, which take precedence."""
    settings = getattr(module, "settings", {})
    if not isinstance(settings, Mapping):
        raise InputError(
            f"{file}: settings must be a dictionary of cerebro.search's keywords, such as "
            f"settings = dict(epochs=10), not {type(settings).__name__}"
        )
    settings = dict(settings)
    _refuse_unknown(settings, file)
    for name, value in vars(options).items():
        if name not in ("command", "file", "progress", "json") and value is not None:
            settings[name] = value
    if isinstance(settings.get("validation"), str):
        settings["validation"] = _parse_validation(settings["validation"])
    if "epochs" not in settings:
        raise InputError(
            f"epochs is missing: give --epochs, or settings = dict(epochs=...) in {file}"
        )
    return settings


def _refuse_unknown(settings: dict[Any, Any], file: str) -> None:
    """Raise InputError, with a suggestion, for a setting that cerebro.search does not accept."""
    from cerebro.api.search import search

    keywords = list(inspect.signature(search).parameters)[3:]
    for name in settings:
        if name not in keywords:
            near = difflib.get_close_matches(str(name), keywords, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"it takes {', '.join(keywords)}"
            raise InputError(f"{file}: settings has {name!r}, which search does not take: {hint}")


def _parse_validation(text: str) -> Any:
    """Read a fraction, or open a data folder."""
    import cerebro

    try:
        return float(text)
    except ValueError:
        return cerebro.Dataset(text)
