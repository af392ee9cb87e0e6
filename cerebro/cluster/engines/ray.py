"""Run units on the nodes of a Ray cluster, for `cerebro.ray.Executor`.

Ray starts the agents, as actors on the nodes that the executor chooses, and they connect to the
coordinator over encrypted connections, which also carry calls and states. Ray's fault tolerance is
off, because only the coordinator knows about units: actors are not restarted. See
docs/design/ray.md.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from cerebro.cluster.agent import UNHEARD, Agent
from cerebro.cluster.engine import PATIENCE_SECONDS, Engine, get_gpu
from cerebro.cluster.engines.ray_nodes import (
    ClusterNode,
    Connection,
    Demand,
    alive_nodes,
    connect,
    explain_failure,
    format_needs,
    request_nodes,
    spread_workers,
)
from cerebro.cluster.executor import ClusterExecutor
from cerebro.cluster.hub import AgentError, Hub, Node, RemoteAgent
from cerebro.cluster.keys import Keys, Ticket, find_listening_host, format_address
from cerebro.cluster.supervisor import Supervisor
from cerebro.errors import InputError
from cerebro.machine import devices
from cerebro.machine.devices import Device
from cerebro.worker.messages import RunContext

GPU = "GPU"  # Ray's name for GPUs


class Executor(ClusterExecutor):
    """Runs a search on a Ray cluster; pass it to `cerebro.search` as ``executor=``.

    Parameters
    ----------
    address
        ``"auto"`` or ``"host:port"`` of a cluster. None: the cluster that this process belongs to,
        else the one in ``$RAY_ADDRESS``, else a new one on this machine, which ends with the
        search.
    workers
        The number of workers, spread over the nodes in turn; None: as many as fit. New nodes are
        used when they join, up to this number.
    resources
        The Ray resources of each worker; ``"CPU"`` defaults to the search's ``threads``. With
        ``{"GPU": 1}`` each worker trains on the GPU that Ray assigns to it, and sees only this one,
        as ``cuda:0``. With ``{"GPU": 0.5}`` two workers share a GPU.
    replicas
        The number of nodes that get each shard. With more than one, the loss of a node requires no
        copying, and slow nodes get less work at once.
    shared_path
        As for `cerebro.cluster.Executor`.
    autoscale
        Whether to ask the cluster's autoscaler for nodes if there are too few for `workers`, which
        must be given then. The search begins when there is room for one worker, and uses the others
        when their nodes join. At its end, it takes the request back. A cluster has one request, so
        let only one search at a time make one.

    Attributes
    ----------
    traffic
        The bytes moved so far; see `cerebro.cluster.messages.Traffic`.
    devices
        ``("cuda",)`` if its workers have GPUs, else ``("cpu",)``.

    Raises
    ------
    InputError
        If an argument is invalid. At the start of a search: if Ray is not installed, if there is no
        cluster, if the workers do not fit on it, if nodes would compute different results, or if a
        node cannot read the data.
    """

    public_name = "cerebro.ray.Executor"

    def __init__(
        self,
        address: str | None = None,
        workers: int | None = None,
        resources: Mapping[str, float] | None = None,
        replicas: int = 1,
        shared_path: str | os.PathLike[str] | None = None,
        autoscale: bool = False,
    ) -> None:
        if address is not None and (not isinstance(address, str) or not address):
            raise InputError(f"address must be 'auto', 'host:port' or None, not {address!r}")
        if not isinstance(autoscale, bool):
            raise InputError(f"autoscale must be True or False, not {autoscale!r}")
        if autoscale and workers is None:
            raise InputError("autoscale=True needs workers=: how many to make room for")
        self._address = address
        self._resources = check_resources(resources)
        self._autoscale = autoscale
        super().__init__(workers, replicas, shared_path, self._resources.get(GPU))
        self._arguments |= {
            "address": address,
            "resources": self._resources,
            "autoscale": autoscale,
        }

    def _join(self, context: RunContext) -> RayCluster:
        needs = {"CPU": float(context.exactness.threads), **self._resources}
        cpus = None if self.workers is None else self.workers * needs["CPU"]
        keys = Keys.generate()  # before anything is started: pyzmq may be missing
        connection = connect(self._address, cpus)
        try:
            return RayCluster(connection, keys, needs, autoscale=self._autoscale)
        except BaseException:
            connection.close()
            raise


class RayAgent(RemoteAgent):
    """An agent in an actor; it connects when Ray has started the actor."""

    def __init__(self, hub: Hub, ray: Any, actor: Any) -> None:
        super().__init__(hub, uuid.uuid4().hex)
        self._ray = ray
        self._actor = actor

    def kill(self, trouble: str | None = None) -> None:
        if self._ray.is_initialized():  # else Ray would start a new cluster to kill it in
            self._ray.kill(self._actor, no_restart=True)


class RayCluster(Hub):
    """A Ray cluster, whose nodes have several agents each.

    `needs` are the Ray resources of each worker, including ``"CPU"``. `autoscale` says whether to
    ask the autoscaler for nodes.
    """

    dials_in = False

    def __init__(
        self, connection: Connection, keys: Keys, needs: Mapping[str, float], *, autoscale: bool
    ) -> None:
        self._ray = connection.ray
        self._connection = connection
        self._needs = dict(needs)
        self._autoscale = autoscale and not connection.is_ours  # ours has no autoscaler
        self._demand: Demand | None = None
        self.late_advice = (
            f"is its {format_needs(needs)} in use by others? Ask for fewer workers=, or free some"
        )
        host = "127.0.0.1"
        if not connection.is_ours:  # at which the other nodes reach this one
            nodes = {node.id: node for node in alive_nodes(self._ray)}
            host = nodes[connection.node].address
        listen = find_listening_host(host)
        super().__init__(keys, Engine(), listen)
        self._ticket = Ticket(format_address(host, self.port), keys.key, listen=listen).to_json()

    def choose_nodes(self, workers: int | None) -> Sequence[Node]:
        if self._autoscale and workers is not None:
            self._demand = Demand(self._needs, workers)
            nodes, workers = self._demand.find_room(self._list_reachable)
        else:
            nodes = self._list_reachable()
        return spread_workers(nodes, self._needs, workers, self._connection.node)

    def _list_reachable(self) -> list[ClusterNode]:
        return self.select_reachable(alive_nodes(self._ray))

    def nodes(self) -> Sequence[Node]:
        if self._demand is not None:  # the executor looks for nodes regularly
            self._demand.adjust_request()
        return alive_nodes(self._ray)

    def count_room(self, node: Node) -> int:
        assert isinstance(node, ClusterNode)
        return node.count_room(self._needs)

    def is_here(self, node: Node) -> bool:
        return node.id == self._connection.node

    def acquire_agent(self, node: Node) -> RayAgent:
        ray = self._ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        needs = dict(self._needs)
        options = {"num_cpus": needs.pop("CPU"), "num_gpus": needs.pop(GPU, 0)}
        actor_class = ray.remote(WorkerActor).options(
            **options,
            resources=needs or None,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        )
        actor = actor_class.remote()
        agent = RayAgent(self, ray, actor)
        self.expect(agent)
        serving: Future[None] = actor.serve.remote(self._ticket, agent.id).future()
        serving.add_done_callback(lambda done: self.mark_lost(agent, _explain_end(done)))
        return agent

    def close(self) -> None:
        if self._autoscale:
            # Also a request of a coordinator that was killed, whose run this search may resume.
            with contextlib.suppress(Exception):
                request_nodes([])
        super().close()
        self._connection.close()


class WorkerActor:
    """An agent on a node: it supervises one worker process."""

    def serve(self, ticket: str, number: str) -> None:
        """Be an agent until the run ends; raise InputError if the coordinator does not answer."""
        import ray

        node = str(ray.get_runtime_context().get_node_id())
        supervisor = partial(Supervisor, node=node, find_gpu=find_assigned_gpu)
        parsed = Ticket.from_json(ticket)
        agent = Agent(parsed, PATIENCE_SECONDS, number=number, supervisor=supervisor)
        try:
            status = agent.run()
        finally:
            agent.close()
        if status == UNHEARD:
            raise InputError(
                f"it cannot reach the search at {parsed.address}: nodes must be able to connect to "
                "each other at any port"
            )


def find_assigned_gpu() -> Device:
    """Return the GPU that Ray has given this actor; raise DeviceError if it cannot be used."""
    import ray

    gpus = devices.lookup()
    ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    index = int(ids[0]) if len(gpus.devices) > 1 and ids and ids[0].isdigit() else 0
    return get_gpu(gpus, index)


def _explain_end(serving: Future[None]) -> AgentError:
    """Return the error of an agent whose actor has ended, or never begun."""
    error = serving.exception()
    return AgentError("it has ended" if error is None else explain_failure(error))


def check_resources(resources: Any) -> dict[str, float]:
    """Return the resources; raise InputError unless they map names to positive numbers."""
    if resources is None:
        return {}
    good = isinstance(resources, Mapping) and all(
        isinstance(name, str)
        and isinstance(need, (int, float))
        and not isinstance(need, bool)
        and need > 0
        for name, need in resources.items()
    )
    if not good:
        raise InputError(
            f"resources must be a mapping of Ray's resource names to positive numbers, such as "
            f"{{'GPU': 1}}, not {resources!r}"
        )
    if resources.get(GPU, 0) > 1:
        raise InputError(
            f"resources={resources!r}: a worker uses one GPU, or a fraction of one: give "
            "{'GPU': 1}, and as many workers as there are GPUs"
        )
    return {name: float(need) for name, need in resources.items()}
