"""Define the Ray actor that is an agent: it supervises one worker process on a node."""

from __future__ import annotations

from cerebro.cluster.agent import UNHEARD, Agent, AgentSupervisor
from cerebro.cluster.blobs import Fetcher
from cerebro.cluster.engine import PATIENCE_SECONDS
from cerebro.cluster.keys import Ticket
from cerebro.cluster.placement import get_gpu
from cerebro.errors import InputError
from cerebro.machine import devices
from cerebro.machine.devices import Device


class WorkerActor:
    """One worker on a node of a Ray cluster."""

    def serve(self, ticket: str, number: str) -> None:
        """Be an agent until the coordinator ends or closes the connection.

        Raises InputError if the coordinator does not answer.
        """
        import ray

        node = str(ray.get_runtime_context().get_node_id())

        def supervisor(_: str, fetcher: Fetcher) -> ActorSupervisor:
            return ActorSupervisor(node, fetcher)

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


class ActorSupervisor(AgentSupervisor):
    """The supervisor in an actor, which may have a GPU."""

    def _find_gpu(self) -> Device:
        return find_assigned_gpu()


def find_assigned_gpu() -> Device:
    """Return the GPU that Ray has assigned to this actor; Ray usually hides the others.

    Raises DeviceError if the GPU cannot be used.
    """
    import ray

    gpus = devices.lookup()
    ids = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    index = int(ids[0]) if len(gpus.devices) > 1 and ids and ids[0].isdigit() else 0
    return get_gpu(gpus, index)
