"""Start actors on nodes, and check that each node computes the same bits.

A node is refused for different versions of Cerebro, Python or a library that computes; for a
different architecture or different vector instructions, by which libraries choose their kernels;
and for different environment variables that choose kernels. Differences that are unlikely to matter
are noted, such as a different CPU model with the same instructions.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cerebro.errors import InputError
from cerebro.machine import environment
from cerebro.machine.devices import is_gpu
from cerebro.ray.cluster.actor import WorkerActor
from cerebro.ray.cluster.connection import ClusterNode, asked_for, cause_of
from cerebro.ray.cluster.messages import NodeReport
from cerebro.ray.cluster.supply import Supply
from cerebro.worker.messages import Note, RunContext

GPU = "GPU"
"""Ray's name for GPUs."""

START_SECONDS = 120.0
"""The time within which a node must start a worker."""

Hired = Sequence[tuple[ClusterNode, Any]]
"""Actors, each with its node."""


class Hiring:
    """Finds workers for a run.

    Parameters
    ----------
    needs
        Ray resources of each worker, ``"CPU"`` among them.
    """

    def __init__(self, ray: Any, context: RunContext, needs: Mapping[str, float]) -> None:
        self._ray = ray
        self._context = context
        self._needs = needs

    def hire(self, node: ClusterNode) -> Any:
        """Start an actor on a node; return before it is ready."""
        ray = self._ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        needs = dict(self._needs)
        options = {"num_cpus": needs.pop("CPU"), "num_gpus": needs.pop(GPU, 0)}
        actor = ray.remote(concurrency_groups={"control": 2})(WorkerActor).options(
            **options,
            resources=needs or None,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        )
        return actor.remote()

    def dismiss(self, hired: Hired) -> None:
        """End unused actors."""
        for _, actor in hired:
            self._ray.kill(actor, no_restart=True)

    def reports(self, hired: Hired, supply: Supply) -> list[NodeReport]:
        """Return the reports of new actors: their node, and the data sets that they can read.

        Raises
        ------
        InputError
            If one does not start.
        """
        ray = self._ray
        with run_token(Path(self._context.epoch_dir)) as token:
            asked = [
                actor.report.remote(
                    self._context.threads, token, supply.asked(node), is_gpu(self._context.device)
                )
                for node, actor in hired
            ]
            _, late = ray.wait(asked, num_returns=len(asked), timeout=START_SECONDS)
        if late:
            node = hired[asked.index(late[0])][0]
            raise InputError(
                f"node {node.address} ({node.id[:8]}) has not started a worker in "
                f"{START_SECONDS:g} s: is its {asked_for(self._needs)} in use by others? Ask for "
                "fewer workers=, or free some"
            )
        reports = []
        for (node, _), answer in zip(hired, asked, strict=True):
            try:
                reports.append(ray.get(answer))
            except ray.exceptions.RayError as error:
                raise InputError(
                    f"node {node.address} ({node.id[:8]}) cannot start a worker: "
                    f"{cause_of(error)}: install the same Cerebro there as here, and make its "
                    f"cache folder ($CEREBRO_CACHE) writable"
                ) from error
        return reports

    def check(self, reports: Sequence[NodeReport]) -> list[Note]:
        """Refuse nodes that would compute different bits; note harmless differences.

        Raises
        ------
        InputError
            If a node is refused; the message names the node, the difference and the cure.
        """
        here = environment.describe(self._context.threads)
        notes = self._check_gpus(reports)
        for name, report in {r.name: r for r in reports}.items():
            refused, noted = differences(here, report.environment)
            if refused:
                raise InputError(
                    f"node {name} would compute different results: {'; '.join(refused)}. "
                    "Install the same on every node, or choose nodes of one kind with resources="
                )
            if noted:
                text = f"node {name} differs slightly from this one: {'; '.join(noted)}"
                notes.append(Note("node differs", text))
        return notes

    def _check_gpus(self, reports: Sequence[NodeReport]) -> list[Note]:
        """Raise InputError if a worker cannot use the GPU that Ray has given it."""
        if not is_gpu(self._context.device):
            return []
        for report in reports:
            if report.no_gpu:
                raise InputError(
                    f"node {report.name}: Ray gives each worker a GPU, but it cannot be used there "
                    f"({report.no_gpu}): give devices='cpu', or resources= of nodes that have some"
                )
        kinds = sorted({report.gpu for report in reports})
        if len(kinds) < 2:
            return []
        text = (
            f"the GPUs are of different kinds ({', '.join(kinds)}): a trial's states depend on "
            "which of them train it"
        )
        return [Note("node differs", text)]


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
            f"resources={resources!r}: a worker uses one GPU, or a part of one: give {{'GPU': 1}}, "
            "and as many workers as there are GPUs"
        )
    return {name: float(need) for name, need in resources.items()}


@contextlib.contextmanager
def run_token(folder: Path) -> Iterator[tuple[str, str]]:
    """Write a temporary file beside the run's folder: a node that reads it sees the folder."""
    while not folder.is_dir():
        folder = folder.parent
    text = uuid.uuid4().hex
    file = folder / f".cerebro-{text}"
    try:
        with contextlib.suppress(OSError):
            file.write_text(text)
        yield str(file), text
    finally:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)


COMPUTE = ("numpy", "torch", "jax", "jaxlib", "scikit-learn", "scipy", "mkl", "cloudpickle")

REFUSED = ("cerebro", "python", "system", "cpu.features", "blas", "variables.")

NOTED = ("cpu.model", "libc", "gpu")


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Compare a node with the coordinator's; see `cerebro.machine.environment.describe`.

    Returns
    -------
    tuple of two lists
        The refused and the noted differences, one line each.
    """
    refused, noted = [], []
    for line in environment.differences(here, there):
        key = line.split(" ", 1)[0]
        text = line.replace(" was ", " is ", 1).replace(", is ", " here and ", 1) + " there"
        if key.removeprefix("variables.") in environment.THREAD_VARIABLES:
            continue  # worker processes get their own
        package = key.removeprefix("packages.")
        if package in COMPUTE or key.startswith(REFUSED):
            refused.append(text)
        elif key.startswith(NOTED):
            noted.append(text)
    return refused, noted
