"""Ask the cluster's autoscaler for nodes, and take the request back.

Workers are bound to nodes that exist, so the autoscaler sees no demand unless it is asked. A
cluster keeps a single request: a new one replaces the last, even that of another program, and a
request outlives the process that made it. So only ``autoscale=True`` makes one.

Ray has two autoscalers. The first starts as many nodes as it can. The second, KubeRay's, starts
nothing for a request that exceeds a limit on nodes, but publishes that it cannot fulfill the
request. `Demand` then finds the largest request that it can.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from cerebro.cluster.engines.ray.connection import ClusterNode, format_needs
from cerebro.errors import InputError

NODE_SECONDS = 900.0
"""The time to wait for the first node with room for a worker: a cloud takes minutes."""
STEP_SECONDS = 1.0


class Demand:
    """The request of a search: for as many workers as the cluster can have, at most `workers`.

    `needs` are the resources of one worker.
    """

    def __init__(self, needs: Mapping[str, float], workers: int) -> None:
        self._needs = dict(needs)
        self._wanted = workers
        self._fits = 0  # the largest number of workers that the cluster is known to be able to have
        self._exceeds = workers + 1  # the smallest number of workers that it cannot have
        self._asked = 0
        self._since = 0

    def find_room(
        self, list_nodes: Callable[[], list[ClusterNode]]
    ) -> tuple[list[ClusterNode], int]:
        """Return the cluster's nodes, and how many workers fit on them, at least one.

        If not all fit, asks the autoscaler for the rest. Waits if there is no room at all, and
        raises InputError if no node with room joins in time. `list_nodes` returns the nodes that
        answer.
        """
        workers, needs = self._wanted, format_needs(self._needs)
        end = time.monotonic() + NODE_SECONDS
        while True:
            nodes = list_nodes()
            room = sum(node.count_room(self._needs) for node in nodes)
            if room < workers and not self._asked:
                self.make_request(room)
                begins = f"begins with {room}" if room else "waits for the first"
                warnings.warn(
                    f"the cluster has room for {room} of {workers} workers with {needs} each: its "
                    f"autoscaler was asked for the others, and the search {begins} ('ray status' "
                    "shows the request)",
                    stacklevel=2,
                )
            if room:
                return nodes, min(room, workers)
            if time.monotonic() >= end:
                raise InputError(
                    f"no node with room for a worker with {needs} has joined the cluster in "
                    f"{NODE_SECONDS:g} s: does it have an autoscaler, with a type of node that is "
                    "large enough? See 'ray status'"
                )
            time.sleep(STEP_SECONDS)
            self.adjust_request()

    def make_request(self, room: int) -> None:
        """Make the request; the cluster has room for `room` workers already."""
        self._fits = room
        self._request_workers(self._wanted)

    def adjust_request(self) -> None:
        """Make a smaller or a larger request if the autoscaler has judged the last one.

        Call this regularly, after `make_request`. Warns once if there will be fewer workers than
        wanted.
        """
        if not self._asked or self._exceeds - self._fits < 2:
            return
        version, seen, fits = _read_versions()
        if self._since == 0:  # the cluster did not answer after the request
            self._since = version
        if self._since == 0 or seen <= self._since:
            return
        if fits:
            self._fits = self._asked
        else:
            self._exceeds = self._asked
        if self._exceeds - self._fits > 1:
            self._request_workers((self._fits + self._exceeds) // 2)
        elif self._fits < self._wanted:
            # If not even one fits, 'ray status' had better show the request than nothing.
            self._request_workers(self._fits or self._wanted)
            warnings.warn(
                f"the cluster's autoscaler cannot make room for {self._wanted} workers with "
                f"{format_needs(self._needs)} each, only for {self._fits}, for which it was asked: "
                "raise its limit on nodes, or give fewer workers=",
                stacklevel=2,
            )

    def _request_workers(self, workers: int) -> None:
        if workers != self._asked:
            self._asked = workers
            request_nodes([self._needs] * workers)
            self._since = _read_versions()[0]


def _read_versions() -> tuple[int, int, bool]:
    """Return the version of the cluster's state, the version judged last, and the judgment.

    Each call increases the first version. The judgment says whether the autoscaler can fulfill the
    request; the first kind of autoscaler judges none, and its version stays 0.
    """
    try:
        from ray.core.generated.autoscaler_pb2 import GetClusterStatusReply
        from ray.experimental.internal_kv import internal_kv_get_gcs_client

        reply: Any = GetClusterStatusReply()
        reply.ParseFromString(internal_kv_get_gcs_client().get_cluster_status())
        said = reply.autoscaling_state
        return (
            int(reply.cluster_resource_state.cluster_resource_state_version),
            int(said.last_seen_cluster_resource_state_version),
            not said.infeasible_cluster_resource_constraints,
        )
    except Exception:  # a version of Ray without this interface, or a head that is busy
        return 0, 0, True


def request_nodes(bundles: list[dict[str, float]]) -> None:
    """Ask for nodes with room for all bundles at once; an empty list takes the request back."""
    from ray.autoscaler.sdk import request_resources

    request_resources(bundles=bundles)
