"""The nodes of a Ray cluster: join it or start one, ask its autoscaler for more, spread workers.

Every wait for the cluster has a limit. Workers are bound to nodes that exist, so the autoscaler
sees no demand unless it is asked. A cluster keeps a single request: a new one replaces the last,
even that of another program, and a request outlives the process that made it. So only
``autoscale=True`` makes one.

Ray has two autoscalers. The first starts as many nodes as it can. The second, KubeRay's, starts
nothing for a request that exceeds a limit on nodes, but publishes that it cannot fulfill the
request. `Demand` then finds the largest request that it can.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from cerebro.errors import InputError, text_of
from cerebro.machine.imports import import_extra

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 3.0  # the seconds within which a live node accepts a connection
NODE_SECONDS = 900.0  # to wait for the first node with room for a worker: a cloud takes minutes
STEP_SECONDS = 1.0


def import_ray() -> Any:
    return import_extra("ray", "ray", "cerebro.ray needs Ray on every node of a cluster")


@dataclass
class Connection:
    ray: Any
    node: str  # the id of the node on which this process runs
    is_ours: bool  # whether the cluster was started for this search and ends with it

    def close(self) -> None:
        if self.is_ours:
            self.ray.shutdown()


def connect(address: str | None, cpus: float | None) -> Connection:
    """Join the cluster at an address, or start one on this machine.

    `address` is ``"auto"``, ``"host:port"``, or None: the cluster that this process belongs to,
    else the one in ``$RAY_ADDRESS``, else a new one on this machine, with `cpus` CPUs (None: the
    machine's cores). Raises InputError if Ray is not installed or there is no cluster.
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
        target = _read_stored_address() if address == "auto" else address
        if target is not None:
            _check_reachable(target)
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
        if address is None:
            address = "local"
            options |= {"num_cpus": cpus, "include_dashboard": False}
        with _keep_sigterm_handler(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # about later versions of Ray
            try:
                ray.init(address=address, **options)
            except (ConnectionError, RuntimeError, ValueError, OSError) as error:
                raise _explain_no_cluster(address, error) from error
    elif address is not None and address != "auto":
        joined = ray.get_runtime_context().gcs_address
        if not _is_same(address, joined):
            raise InputError(
                f"address={address!r}, but this process belongs to the Ray cluster at {joined}: "
                "leave address= out, or call ray.shutdown()"
            )
    node = ray.get_runtime_context().get_node_id()
    return Connection(ray, node, began and address == "local")


def _explain_no_cluster(address: str, error: BaseException) -> InputError:
    text = text_of(error)
    if "AuthToken" in f"{error} {error.__cause__}":
        return InputError(
            f"the Ray cluster at address={address!r} requires a token that this process does not "
            "send: set RAY_AUTH_MODE=token for it, where the token of 'ray get-auth-token' or "
            "RAY_AUTH_TOKEN is the cluster's"
        )
    if "ersion mismatch" in text:
        return InputError(f"{text}: install the same versions of Ray and Python on every node")
    return InputError(
        f"there is no Ray cluster at address={address!r} ({text}): start one with 'ray start "
        "--head', correct the address, or leave it out to use this machine"
    )


def _check_reachable(address: str) -> None:
    """Raise InputError if no cluster answers; Ray itself would try for minutes, or forever."""
    host, _, port = address.rpartition(":")
    try:
        at = host.strip("[]"), int(port)
        with socket.create_connection(at, CONNECT_SECONDS) as connection:
            if not os.environ.get("RAY_USE_TLS"):
                _expect_grpc(connection)
    except (ValueError, OverflowError):
        raise InputError(
            f"address={address!r} is not an address: give 'auto' or 'host:port' of the cluster's "
            "head node"
        ) from None
    except OSError as error:
        raise _explain_no_cluster(address, error) from None


def _is_same(address: str, joined: str) -> bool:
    """Return whether an address is that of the joined cluster; Ray replaces ``localhost`` in it."""
    if address == joined:
        return True
    host, _, port = address.rpartition(":")
    joined_host, _, joined_port = joined.rpartition(":")
    return port == joined_port and not _resolve_ips(host).isdisjoint(_resolve_ips(joined_host))


def _resolve_ips(host: str) -> set[str]:
    """Return a host's IP addresses; all addresses of this machine count as one."""
    try:
        entries = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError):
        return {host}
    return {
        "localhost" if _is_here(family, place) else str(place[0])
        for family, _, _, _, place in entries
    }


def _is_here(family: int, place: Any) -> bool:
    """Return whether an IP address belongs to this machine, by binding a socket to it."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as bound:
            bound.bind(place)
    except OSError:
        return False
    return True


def _expect_grpc(connection: socket.socket) -> None:
    """Raise ConnectionError unless the server answers an HTTP/2 preface, as Ray's do."""
    settings = b"\0\0\0\4\0\0\0\0\0"  # an empty frame: length, type, flags, stream
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
    answer = b""
    while len(answer) < len(settings):
        piece = connection.recv(len(settings) - len(answer))
        if not piece:
            raise ConnectionError("the server at this address closes the connection")
        answer += piece
    if answer[3] != settings[3]:
        raise ConnectionError("the server at this address is not a Ray cluster")


def _read_stored_address() -> str | None:
    """Return the address that Ray has stored on this machine; its cluster may be gone."""
    folder = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    try:
        return Path(folder, "ray", "ray_current_cluster").read_text().strip() or None
    except OSError:
        return None


@contextlib.contextmanager
def _keep_sigterm_handler() -> Iterator[None]:
    """Keep this process's own SIGTERM handler, which Ray would replace."""
    try:
        before = signal.getsignal(signal.SIGTERM)
        yield
    finally:
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, before)


# --- nodes --------------------------------------------------------------------------


@dataclass(frozen=True)
class ClusterNode:
    id: str
    address: str
    port: int = 0  # the port of the node's raylet
    resources: dict[str, float] = field(default_factory=dict)

    def answers(self) -> bool:
        try:
            with socket.create_connection((self.address, self.port), ANSWER_SECONDS):
                return True
        except OSError:
            return False

    def count_room(self, needs: dict[str, float]) -> int:
        rooms = (
            int(self.resources.get(name, 0.0) / need + 1e-9) for name, need in needs.items() if need
        )
        return min(rooms, default=0)


def alive_nodes(ray: Any) -> list[ClusterNode]:
    """Return the nodes that the cluster considers alive, ordered by id."""
    return [
        ClusterNode(
            node["NodeID"],
            node["NodeManagerAddress"],
            int(node["NodeManagerPort"]),
            dict(node["Resources"]),
        )
        for node in sorted(ray.nodes(), key=lambda node: node["NodeID"])
        if node["Alive"]
    ]


def spread_workers(
    nodes: list[ClusterNode], needs: dict[str, float], workers: int | None, first: str
) -> list[ClusterNode]:
    """Spread workers over the nodes in turn; return the node of each worker.

    `needs` are the resources of one worker, `first` is the coordinator's node, which has the data.
    With ``workers=None``, there are as many as fit. Raises InputError if the workers do not fit.
    """
    room = {node.id: node.count_room(needs) for node in nodes}
    total = sum(room.values())
    count = total if workers is None else workers
    if total == 0 or count > total:
        there = "; ".join(
            ", ".join(f"{node.resources.get(name, 0.0):g} {name}" for name in needs)
            for node in nodes
        )
        raise InputError(
            f"{max(count, 1)} worker(s) with {format_needs(needs)} each do not fit on the cluster, "
            f"whose {len(nodes)} node(s) have {there}: ask for fewer workers= or resources=, start "
            "more nodes before the search, or give autoscale=True if the cluster has an autoscaler"
        )
    order = sorted(nodes, key=lambda node: node.id != first)
    turns = range(max(room.values()))
    places = (node for turn in turns for node in order if room[node.id] > turn)
    return list(islice(places, count))  # there may be millions of places for tiny needs


def format_needs(needs: Mapping[str, float]) -> str:
    return ", ".join(f"{need:g} {name}" for name, need in needs.items())


def explain_failure(error: BaseException) -> str:
    """Return an error's cause, without the traceback that Ray adds."""
    cause = getattr(error, "cause", None) or error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    if not isinstance(cause, Exception) or not lines:
        return type(cause).__name__
    named = [line for line in lines if line.startswith(("ModuleNotFoundError", "ImportError"))]
    return text_of(RuntimeError(named[-1] if named else lines[0]))


# --- the autoscaler -----------------------------------------------------------------


class Demand:
    """The request of a search: for as many workers as the cluster can have, at most `workers`."""

    def __init__(self, needs: Mapping[str, float], workers: int) -> None:
        self._needs = dict(needs)  # of one worker
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
