"""Define the Ray actor that supervises one worker process; see `cerebro.cluster.supervisor`."""

from __future__ import annotations

from typing import Any

from cerebro.cluster.messages import StateIn
from cerebro.cluster.supervisor import Supervisor
from cerebro.errors import DeviceError
from cerebro.machine import devices
from cerebro.machine.devices import Device
from cerebro.ray.cluster.objects import fetch


class WorkerActor(Supervisor):
    """One worker on a node of a Ray cluster."""

    def _node(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def _fetch(self, state: StateIn) -> Any:
        return fetch(state.refs[0], state.node, self._gone)

    def _given_gpu(self) -> Device:
        return given_gpu()


def given_gpu() -> Device:
    """Return the GPU that Ray has assigned to this actor; Ray usually hides the others.

    Raises
    ------
    DeviceError
        If the GPU cannot be used.
    """
    import ray

    found = devices.lookup()
    given = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
    index = int(given[0]) if len(found.devices) > 1 and given and given[0].isdigit() else 0
    if index >= len(found.devices):
        raise DeviceError(found.problem or f"there is no GPU {index}")
    return found.devices[index]
