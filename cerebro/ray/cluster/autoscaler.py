"""Ask the cluster's autoscaler for nodes, and take the request back.

Workers are bound to nodes that exist, so the autoscaler sees no demand unless it is asked. A
cluster keeps a single request: a new one replaces the last, even that of another program, and a
request outlives the process that made it. So only ``autoscale=True`` makes one.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence

from cerebro.errors import InputError
from cerebro.ray.cluster.connection import ClusterNode, asked_for

NODE_SECONDS = 900.0
"""The time to wait for the first node with room for a worker: a cloud takes minutes."""
STEP_SECONDS = 1.0


def choose_some(
    nodes: Callable[[], list[ClusterNode]], needs: Mapping[str, float], workers: int
) -> tuple[list[ClusterNode], int]:
    """Return the cluster's nodes, and how many workers fit on them, at least one and at most
    `workers`.

    If there is room for fewer, ask the autoscaler for the rest. If there is no room at all, wait
    until there is.

    Parameters
    ----------
    nodes
        Returns the nodes that answer.
    needs
        The resources of one worker.

    Raises
    ------
    InputError
        If no node with room for a worker joins in time.
    """
    found = nodes()
    room = _room(found, needs)
    if room < workers:
        request([dict(needs)] * workers)
        begins = f"the search begins with {room}" if room else "the search waits for the first"
        warnings.warn(
            f"the cluster has room for {room} of {workers} workers with {asked_for(needs)} each: "
            f"its autoscaler was asked for the others, and {begins} ('ray status' shows the "
            "request)",
            stacklevel=2,
        )
    end = time.monotonic() + NODE_SECONDS
    while room == 0:
        if time.monotonic() >= end:
            raise InputError(
                f"no node with room for a worker with {asked_for(needs)} has joined the cluster in "
                f"{NODE_SECONDS:g} s: does it have an autoscaler, with a type of node that is "
                "large enough? See 'ray status'"
            )
        time.sleep(STEP_SECONDS)
        found = nodes()
        room = _room(found, needs)
    return found, min(room, workers)


def _room(nodes: Sequence[ClusterNode], needs: Mapping[str, float]) -> int:
    return sum(node.room_for(dict(needs)) for node in nodes)


def request(bundles: list[dict[str, float]]) -> None:
    """Ask for nodes with room for all bundles at once; an empty list takes the request back."""
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=bundles)
