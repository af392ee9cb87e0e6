"""Fetch states from Ray's object store without waiting for a node that is gone."""

from __future__ import annotations

import time
from collections.abc import Collection
from typing import Any

from cerebro.cluster.states import STATE_SECONDS, StateGone, StoreFull

STEP_SECONDS = 1.0
"""How often to check whether the node is gone; Ray itself needs half a minute to notice."""


def fetch(ref: Any, node: str, gone: Collection[str]) -> Any:
    """Return a packed state as an array of bytes in this node's object store.

    Parameters
    ----------
    ref
        A reference to the state.
    node
        The node that created the state.
    gone
        The lost nodes; other threads add to it meanwhile.

    Raises
    ------
    StateGone
        If the state is lost or does not arrive.
    StoreFull
        If the state does not fit on either node.
    """
    import ray

    end = time.monotonic() + STATE_SECONDS
    while True:
        try:
            return ray.get(ref, timeout=STEP_SECONDS)
        except ray.exceptions.GetTimeoutError:
            if node in gone:
                raise StateGone("the node that made it is gone") from None
            if time.monotonic() >= end:
                raise StateGone(f"it did not arrive within {STATE_SECONDS:g} s") from None
        except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as error:
            raise StoreFull(type(error).__name__) from None
        except ray.exceptions.RayError as error:
            raise StateGone(type(error).__name__) from None
