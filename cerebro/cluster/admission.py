"""Take agents into a run: ask each for a report, and check that its node computes the same bits.

A node is rejected if it has another version of Cerebro, Python or a library that computes, another
architecture or other vector instructions, or other environment variables by which libraries choose
kernels. Differences that are unlikely to matter are noted, such as another CPU model with the same
instructions.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

from cerebro.cluster.agents import Agent, Cluster, Node
from cerebro.cluster.messages import NodeReport
from cerebro.cluster.supply import Supply
from cerebro.errors import InputError
from cerebro.machine import environment
from cerebro.machine.devices import CUBLAS_VARIABLE, CUBLAS_WORKSPACE, is_gpu
from cerebro.worker.messages import Note, RunContext

START_SECONDS = 120.0
"""The time within which a node must start a worker."""
TOKEN = ".cerebro-"
"""The beginning of a token's name; 32 hexadecimal digits follow."""
OLD_TOKEN_SECONDS = 3600.0
"""The age of a token beside the run's folder at which its coordinator must be gone."""

Hired = Sequence[tuple[Node, Agent]]
"""Agents, each with its node."""


class Hiring:
    """Finds out whether agents can be used for a run.

    `one_kind` is the kind of GPU that all workers must have; empty: that of the first worker. With
    None, GPUs may differ, which is noted.
    """

    def __init__(self, cluster: Cluster, context: RunContext, one_kind: str | None = None) -> None:
        self._cluster = cluster
        self._context = context
        self._one_kind = one_kind

    def collect_reports(self, hired: Hired, supply: Supply) -> list[NodeReport]:
        """Return the reports of new agents: their node, and the datasets that they can read.

        Raises InputError if an agent does not start.
        """
        with make_run_token(Path(self._context.folders.states)) as token:
            asked = [
                agent.call(
                    "report",
                    self._context.exactness.threads,
                    token,
                    supply.list_data_paths(node),
                    is_gpu(self._context.device),
                )
                for node, agent in hired
            ]
            done, _ = wait(asked, timeout=START_SECONDS)
        reports = []
        for (node, _), answer in zip(hired, asked, strict=True):
            name = f"node {node.address} ({node.id[:8]})"
            if answer not in done:
                raise InputError(
                    f"{name} has not started a worker in {START_SECONDS:g} s: "
                    f"{self._cluster.advise_on_late_node(node)}"
                )
            try:
                reports.append(answer.result())
            except self._cluster.errors as error:
                raise InputError(
                    f"{name} cannot start a worker: {self._cluster.describe_cause(error)}: install "
                    "the same Cerebro there as here, and make its cache folder ($CEREBRO_CACHE) "
                    "writable"
                ) from error
        return reports

    def check(self, reports: Sequence[NodeReport]) -> list[Note]:
        """Reject nodes that would compute different bits; note harmless differences.

        Raises InputError, which names the node, the difference and the fix.
        """
        here = _normalize_environment(environment.describe(self._context.exactness.threads))
        notes = self._check_gpus(reports)
        for name, report in {r.name: r for r in reports}.items():
            refused, noted = find_differences(here, _normalize_environment(report.environment))
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
        """Raise InputError if a worker cannot use its GPU."""
        if not is_gpu(self._context.device):
            return []
        for report in reports:
            if report.no_gpu:
                raise InputError(
                    f"node {report.name}: each worker is given a GPU, but it cannot be used there "
                    f"({report.no_gpu}): give devices='cpu', or use only nodes with usable GPUs "
                    "(on Ray, resources= chooses them)"
                )
        if self._one_kind is not None:
            self._one_kind = self._one_kind or reports[0].gpu
            for report in reports:
                if report.gpu != self._one_kind:
                    raise InputError(
                        f"node {report.name} has the GPU {report.gpu!r} and not "
                        f"{self._one_kind!r}, so it may compute other bits: use only nodes with "
                        "the same GPU as this process, or leave out executor="
                    )
            return []
        kinds = sorted({report.gpu for report in reports})
        if len(kinds) < 2:
            return []
        text = (
            f"the GPUs are of different kinds ({', '.join(kinds)}): a trial's states depend on "
            "which of them train it"
        )
        return [Note("node differs", text)]


def _normalize_environment(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return an environment with the variable that workers on GPUs get if their node has none.

    Computing on a GPU here, as for `cerebro.torch.features`, sets the variable in this process;
    Ray's actors start without it. The hash seed is left out: workers on all nodes get the run's.
    """
    variables = {CUBLAS_VARIABLE: CUBLAS_WORKSPACE, **about["variables"]}
    variables.pop(environment.HASH_SEED, None)
    return {**about, "variables": variables}


@contextlib.contextmanager
def make_run_token(folder: Path) -> Iterator[str]:
    """Make a temporary folder beside the run's folder: who can write there can write to the run.

    The run's folder is made later, in the same place, by the same user and with the same rights.
    """
    token = _find_existing_parent(folder) / f"{TOKEN}{uuid.uuid4().hex}"
    try:
        with contextlib.suppress(OSError):
            token.mkdir()
        yield str(token)
    finally:
        shutil.rmtree(token, ignore_errors=True)


def remove_old_tokens(folder: Path) -> None:
    """Remove the tokens of coordinators that were killed before they could.

    Tokens in the run's folder belong to earlier coordinators of this run; those beside it may
    belong to other runs.
    """
    place = _find_existing_parent(folder)
    newest = math.inf if place == folder else time.time() - OLD_TOKEN_SECONDS
    with contextlib.suppress(OSError):
        for token in place.glob(TOKEN + 32 * "[0-9a-f]"):
            if token.lstat().st_mtime < newest:
                shutil.rmtree(token, ignore_errors=True)


def _find_existing_parent(folder: Path) -> Path:
    while not folder.is_dir():
        folder = folder.parent
    return folder


def kill_agents(hired: Hired) -> None:
    for _, agent in hired:
        agent.kill()


COMPUTE = ("numpy", "torch", "jax", "jaxlib", "scikit-learn", "scipy", "mkl", "cloudpickle")

REFUSED = ("cerebro", "python", "system", "cpu.features", "blas", "variables.")

NOTED = ("cpu.model", "libc", "gpu")


def find_differences(
    here: Mapping[str, Any], there: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Compare a node with the coordinator's; see `cerebro.machine.environment.describe`.

    Returns the differences that are rejected and those that are noted, one line each.
    """
    refused, noted = [], []
    for line in environment.list_differences(here, there):
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
