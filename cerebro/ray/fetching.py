"""Gets a state from the object store, and gives up when it is known to be gone."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from cerebro import _core
from cerebro.errors import CorruptDataError
from cerebro.ray.states import HeldState

STATE_SECONDS = 300.0
"""How long a state may take to come from another node."""
STEP_SECONDS = 1.0
"""How often it is asked whether that node is gone: Ray itself takes half a minute to notice."""


class StateGone(Exception):
    """A state cannot be had any more."""


class StoreFull(Exception):
    """There is no room for a state, neither in an object store nor on the disk behind it."""


def fetch(ref: Any, node: str, gone: Collection[str]) -> Any:
    """Return a packed state: an array of bytes, in the object store of this node.

    Parameters
    ----------
    ref
        A reference to it.
    node
        Where it was made.
    gone
        Nodes that are gone; others add to it meanwhile.

    Raises
    ------
    StateGone
        If it is lost, or does not come.
    StoreFull
        If there was no room for it where it was made, or is none here.
    """
    import ray

    end = time.monotonic() + STATE_SECONDS
    while True:
        try:
            return ray.get(ref, timeout=STEP_SECONDS)
        except ray.exceptions.GetTimeoutError:
            if node in gone:
                raise StateGone("the node that it was made on is gone") from None
            if time.monotonic() >= end:
                raise StateGone(f"it did not come in {STATE_SECONDS:g} s") from None
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
            raise StoreFull(type(error).__name__) from None
        except ray.exceptions.RayError as error:
            raise StateGone(type(error).__name__) from None


def fetch_to_file(held: HeldState, gone: Collection[str], path: Path) -> None:
    """Write a state from the object store to a file.

    Raises
    ------
    StateGone, CorruptDataError
        If it is gone, or is not what it was.
    OSError
        If it cannot be written.
    """
    packed = fetch(held.ref, held.node, gone)
    if _core.hash_state(packed) != held.state_hash:
        raise CorruptDataError("its hash is another")
    with path.open("wb") as file:
        file.write(packed)
