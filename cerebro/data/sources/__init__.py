"""Importers, one a file: each makes a `Source` of one kind of thing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cerebro.data.sources.arrays import ArraysSource
from cerebro.data.sources.base import Source
from cerebro.errors import InputError


def open_source(source: Any) -> Source:
    """Return the importer for whatever the user gave.

    Raises InputError, naming what is accepted, for anything else.
    """
    if isinstance(source, Source):
        return source
    if isinstance(source, Mapping):
        return ArraysSource(source)
    raise InputError(f"cannot shard a {type(source).__name__}")
