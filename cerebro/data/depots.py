"""Batches on a device: which device is meant, and what its loaders share."""

from __future__ import annotations

import functools
import logging
import re
import sys
from typing import Any

import cerebro._core as _core
from cerebro.errors import DeviceError, InputError, one_line
from cerebro.machine import cuda, device_check

RESIDENCES = ("auto", "resident", "streamed")

_log = logging.getLogger("cerebro.data")


def device_name(device: Any) -> str:
    """Return ``"cpu"``, or ``"cuda:0"`` and so on.

    Parameters
    ----------
    device
        Such a name, ``"cuda"`` (PyTorch's current device, the first one without PyTorch), or what
        PyTorch has for a device.

    Raises
    ------
    InputError
        It is none of these.
    """
    name = str(device)
    if name == "cpu" or re.fullmatch(r"cuda:\d{1,4}", name):
        return name
    if name == "cuda":
        torch: Any = sys.modules.get("torch")
        started = torch is not None and torch.cuda.is_initialized()
        return f"cuda:{torch.cuda.current_device() if started else 0}"
    raise InputError(f"device must be 'cpu', 'cuda' or 'cuda:0' and so on, not {device!r}")


@functools.cache
def depot(name: str) -> _core.Depot:
    """Return what this process's loaders of a device share, always the same for a name.

    It holds the shards that are resident: each column of a shard is in the device's memory once,
    whatever the number of loaders, trials and views. ``depot("cuda:0").limit`` is how many bytes of
    them there may be, half of the device's memory to begin with.

    Raises
    ------
    DeviceError
        The device cannot be used; the message says what is missing.
    """
    return _core.Depot(cuda.device(name))


@functools.cache
def problem(name: str) -> str:
    """Return why no batches are made on a device in this process, in one line; empty: they are.

    The first call tries it: in a process of its own, unless the verdict is known, and then here,
    where the kernels are compiled.

    Raises
    ------
    InputError
        There is no such device.
    MemoryError
        The device's memory is short; another call tries it again.
    """
    try:
        found = device_check.problem(name)
        if not found:
            depot(name).device.check()
    except DeviceError as error:
        found = one_line(str(error))
    return found


def moving(why: str) -> str:
    """Say that PyTorch moves batches to a GPU, and what can be done about it."""
    return (
        f"PyTorch moves batches to the GPU, which is slower and gives the same results: {why}. "
        "`python -m cerebro doctor` tries the GPU again"
    )


def limit(loader: Any, nbytes: int) -> None:
    """Say how many bytes of shards may be resident on a loader's device; 0: leave it."""
    where = getattr(loader, "depot", None)
    if where is not None and nbytes:
        where.limit = nbytes


def drop(name: str) -> int:
    """Give back the shards that are resident on a device and not in use; return their bytes."""
    return depot(name).drop() if depot.cache_info().currsize else 0


@functools.cache
def tell(text: str) -> None:
    """Log something about a device, once."""
    _log.warning(text)


def tell_note(loader: Any) -> None:
    """Log why a loader is slower than it might be, each reason once."""
    if note := getattr(loader, "note", ""):
        tell(note)
    if why := getattr(loader, "why", ""):
        tell(moving(why))
    _tell_unpinned(loader)


def _tell_unpinned(loader: Any) -> None:
    depot_of = getattr(loader, "depot", None)
    why = None if depot_of is None else depot_of.device.unpinned
    if why is not None:
        cuda.tell_unpinned(why)


def tell_first_note(loader: Any) -> None:
    """Log the first reason that a worker's loaders have, and no other: each shard has its own."""
    _tell_unpinned(loader)
    note = getattr(loader, "note", "")
    if note and not _noted:
        _noted.append(note)
        tell(note)


_noted: list[str] = []
