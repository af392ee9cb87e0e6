"""Joins a Ray cluster or starts one on this machine, and never waits for ever."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from cerebro.errors import InputError, text_of

CONNECT_SECONDS = 10.0


def import_ray() -> Any:
    """Return Ray.

    Raises
    ------
    InputError
        If it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise InputError(
            f"cerebro.ray needs Ray, which cannot be imported here ({error}): "
            'pip install "cerebro[ray]"'
        ) from None
    return ray


@dataclass
class Connection:
    """This process's part in a cluster."""

    ray: Any
    node: str
    """The node that this process is on."""
    is_ours: bool
    """Whether the cluster was started for this search, and ends with it."""

    def close(self) -> None:
        if self.is_ours:
            self.ray.shutdown()


def connect(address: str | None, cpus: float | None) -> Connection:
    """Join the cluster at an address; without one the one that there is, or a new one here.

    Parameters
    ----------
    address
        ``"auto"``, ``"host:port"``, or None: the cluster that this process belongs to already,
        the one in ``$RAY_ADDRESS``, else a new one on this machine.
    cpus
        Of a new one; None: its cores.

    Raises
    ------
    InputError
        If Ray is not installed or there is no cluster.
    """
    ray = import_ray()
    if address is not None and address.startswith("ray://"):
        raise InputError(
            f"address={address!r}: a search cannot run through Ray Client: start it on a node of "
            "the cluster, with address='auto'"
        )
    began = not ray.is_initialized()
    if began:
        address = address or os.environ.get("RAY_ADDRESS") or None
        if address is not None and address != "auto":
            _check_reachable(address)
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if address is None:
            address = "local"
            options |= {"num_cpus": cpus, "include_dashboard": False}
        with _own_signals(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of what later versions of Ray will do
            try:
                ray.init(address=address, **options)
            except (ConnectionError, RuntimeError, ValueError, OSError) as error:
                raise _no_cluster(address, error) from error
    elif address not in (None, "auto") and address != ray.get_runtime_context().gcs_address:
        raise InputError(
            f"address={address!r}, but this process belongs to the Ray cluster at "
            f"{ray.get_runtime_context().gcs_address}: leave address= out, or call ray.shutdown()"
        )
    node = ray.get_runtime_context().get_node_id()
    return Connection(ray, node, began and address == "local")


def _no_cluster(address: str, error: BaseException) -> InputError:
    text = text_of(error)
    if "ersion mismatch" in text:
        return InputError(f"{text}: install the same versions of Ray and Python on every node")
    return InputError(
        f"there is no Ray cluster at address={address!r} ({text}): start one with 'ray start "
        "--head', correct the address, or leave it out to use this machine"
    )


def _check_reachable(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    try:
        number = int(port)
        with socket.create_connection((host.strip("[]"), number), CONNECT_SECONDS):
            return
    except (ValueError, OverflowError):
        raise InputError(
            f"address={address!r} is none: give 'auto' or 'host:port' of the cluster's head node"
        ) from None
    except OSError as error:
        raise _no_cluster(address, error) from None


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's SIGTERM handler: Ray sets one of its own."""
    try:
        before = signal.getsignal(signal.SIGTERM)
        yield
    finally:
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, before)


# --- nodes --------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """A node of the cluster."""

    id: str
    address: str
    resources: dict[str, float] = field(default_factory=dict)

    def room_for(self, needs: dict[str, float]) -> int:
        """How many workers fit."""
        counts = [
            int(self.resources.get(name, 0.0) / need + 1e-9) for name, need in needs.items() if need
        ]
        return min(counts, default=0)


def alive_nodes(ray: Any) -> list[Node]:
    """The nodes that are there, in the order of their numbers."""
    return sorted(
        (
            Node(node["NodeID"], node["NodeManagerAddress"], dict(node["Resources"]))
            for node in ray.nodes()
            if node["Alive"]
        ),
        key=lambda node: node.id,
    )


def is_reachable(ray: Any, node: str) -> bool:
    """Whether a node's raylet still answers; the cluster itself takes longer to notice."""
    for entry in ray.nodes():
        if entry["NodeID"] == node and entry["Alive"]:
            at = entry["NodeManagerAddress"], entry["NodeManagerPort"]
            with contextlib.suppress(OSError), socket.create_connection(at, CONNECT_SECONDS):
                return True
    return False


def spread(
    nodes: list[Node], needs: dict[str, float], workers: int | None, first: str
) -> list[Node]:
    """Deal workers over nodes in turn; return the node of each.

    Parameters
    ----------
    needs
        Resources of one worker.
    workers
        How many; None: all that fit.
    first
        The node that comes first: the coordinator's own, where the data are.

    Raises
    ------
    InputError
        If they do not fit.
    """
    room = {node.id: node.room_for(needs) for node in nodes}
    total = sum(room.values())
    wanted = total if workers is None else workers
    if total == 0 or wanted > total:
        asked = ", ".join(f"{need:g} {name}" for name, need in needs.items())
        there = "; ".join(
            ", ".join(f"{node.resources.get(name, 0.0):g} {name}" for name in needs)
            for node in nodes
        )
        raise InputError(
            f"{max(wanted, 1)} worker(s) with {asked} each do not fit on the cluster, whose "
            f"{len(nodes)} node(s) have {there}: ask for fewer workers= or resources=, or start "
            "more nodes before the search"
        )
    order = sorted(nodes, key=lambda node: node.id != first)
    chosen: list[Node] = []
    while len(chosen) < wanted:
        for node in order:
            if room[node.id] > 0 and len(chosen) < wanted:
                room[node.id] -= 1
                chosen.append(node)
    return chosen
