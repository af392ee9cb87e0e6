"""Batches on a device: which device is meant, and what its loaders share."""

from __future__ import annotations

import functools
import logging
import re
import sys
from typing import Any

from cerebro import _core, cuda
from cerebro.errors import InputError

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
def _tell(note: str) -> None:
    _log.warning(note)


def tell_note(loader: _core.Loader) -> None:
    """Log why a loader streams what might be resident, each reason once."""
    if loader.note:
        _tell(loader.note)
