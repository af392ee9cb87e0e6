"""Take agents into a run: ask each for a report, and check that its node computes the same bits.

A node is rejected if it has another version of Cerebro, Python or a library that computes, another
architecture or other vector instructions, or other environment variables by which libraries choose
kernels. Differences that are unlikely to matter are noted, such as another CPU model with the same
instructions.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from cerebro.cluster.hub import AgentError, Hub, Node, RemoteAgent, describe_cause
from cerebro.cluster.messages import Begin, NodeReport
from cerebro.cluster.supply import Supply
from cerebro.cluster.workers import Membership, RemoteWorker
from cerebro.errors import InputError
from cerebro.executors.wire import pickle_context
from cerebro.machine import environment
from cerebro.machine.devices import CUBLAS_VARIABLE, CUBLAS_WORKSPACE, is_gpu
from cerebro.machine.disk import Disk
from cerebro.machine.local import LOCAL, Machine
from cerebro.run.states import TOKEN
from cerebro.worker.messages import Note, RunContext

START_SECONDS = 120.0  # the time within which a node must start a worker
_TOKENS = re.compile(re.escape(TOKEN) + "[0-9a-f]{32}", re.ASCII)
OLD_TOKEN_SECONDS = 3600.0  # of a token beside the run's folder: its coordinator must be gone


def describe_run(context: RunContext, gpu_share: float) -> Begin:
    """Describe a run without its nodes; raise InputError if ``build`` cannot be sent."""
    left_out = {"build", "train", "validation", "folds", "share"}
    names = [f.name for f in fields(RunContext) if f.name not in left_out]
    return Begin(
        build=pickle_context(context.build),
        settings={name: getattr(context, name) for name in names},
        folds=None if context.folds is None else context.folds.to_json(),
        gpu_share=gpu_share,
        path=tuple(sys.path),
        argv=tuple(sys.argv),
        directory=os.getcwd(),  # noqa: PTH109
    )


class Admission:
    """Takes agents into a run, if they can be used, and tells them what it is.

    `run` is its description, as from `describe_run`. `one_kind` is the kind of GPU that all workers
    must have; empty: that of the first worker. With None, GPUs may differ, which is noted.
    """

    def __init__(
        self,
        hub: Hub,
        supply: Supply,
        context: RunContext,
        run: Begin,
        one_kind: str | None = None,
        disk: Disk = LOCAL.disk,
    ) -> None:
        self.shares_run = False  # whether all workers write states and logs into the run's folder
        self.supply = supply
        self._hub = hub
        self._context = context
        self._run = run
        self._one_kind = one_kind
        self._disk = disk

    def admit(
        self, nodes: Sequence[Node], members: Membership, *, first: bool = False
    ) -> tuple[list[RemoteWorker], list[Note]]:
        """Take an agent on each of these nodes, and send the nodes the data; any thread may call.

        The agents are the run's `first`, or those of one new node. Returns their workers, and
        notes. Raises InputError, after ending all of them, if one cannot be used. An agent that
        dials in and has hung up is left out, unless it is the only one.
        """
        agents = [(node, self._hub.acquire_agent(node)) for node in nodes]
        try:
            present = self._collect_reports(agents)
            reports = [report for _, _, report in present]
            notes = self.check(reports)
            all_share = all(report.shares_run for report in reports)
            if first:
                # The files of derived shards are sent here: nodes need not see the folder.
                self.shares_run = all_share and not self.supply.derives
            elif self.shares_run and not all_share:
                raise InputError(
                    f"node {reports[0].name} cannot write to the run's folder as the other nodes "
                    f"do ({Path(self._context.folders.states).parent}): mount it there, writable, "
                    "and start the worker there as the script's user"
                )
            for report in reports:
                self.supply.check_reads(report)
            # A copy of the workers, because another thread may add some.
            others = [*reports, *(remote.report for remote in list(members.workers.values()))]
            remotes = [
                self._make_worker(node, agent, report, others) for node, agent, report in present
            ]
            if first:
                self.supply.supply_first_nodes(remotes)
            else:
                self.supply.supply_new_node(remotes[0])
            for remote in remotes:
                self.supply.set_data_paths(remote)
                remote.agent.call("begin", remote.begin)
            return remotes, notes
        except BaseException:
            for _, agent in agents:
                agent.kill()
            raise

    def _make_worker(
        self, node: Node, agent: RemoteAgent, report: NodeReport, others: Sequence[NodeReport]
    ) -> RemoteWorker:
        reads_all = None not in report.at
        begin = replace(
            self._run,
            shares_run=self.shares_run,
            workers_here=sum(
                (other.machine, other.host) == (report.machine, report.host) for other in others
            ),
        )
        place = f"{report.node} itself" if reads_all else report.place
        return RemoteWorker(-1, agent, node, report, place, reads_all, begin)

    def _collect_reports(
        self, agents: Sequence[tuple[Node, RemoteAgent]]
    ) -> list[tuple[Node, RemoteAgent, NodeReport]]:
        """Return what new agents say about their nodes; raise InputError if one does not start."""
        with make_run_token(Path(self._context.folders.states), self._disk) as token:
            asked = [
                agent.call(
                    "report",
                    self._context.exactness.threads,
                    token,
                    self.supply.list_data_paths(node),
                    is_gpu(self._context.device),
                )
                for node, agent in agents
            ]
            self._hub.wait_for_calls(asked, START_SECONDS)
            answered = {answer for answer in asked if answer.done()}
        present = []
        gone: InputError | None = None
        for (node, agent), answer in zip(agents, asked, strict=True):
            name = f"node {node.address} ({node.id[:8]})"
            if answer not in answered:
                late = f"{name} has not started a worker in {START_SECONDS:g} s"
                raise InputError(f"{late}: {self._hub.late_advice}")
            try:
                present.append((node, agent, answer.result()))
            except AgentError as error:
                hung_up = agent.is_gone and error.cause is None
                if hung_up and self._hub.dials_in:  # it comes back as a new node, if at all
                    gone = InputError(f"{name} is gone: {describe_cause(error)}")
                    continue
                raise InputError(
                    f"{name} cannot start a worker: {describe_cause(error)}: install "
                    "the same Cerebro there as here, and make its cache folder ($CEREBRO_CACHE) "
                    "writable"
                ) from error
        if not present and gone is not None:
            raise gone
        return present

    def check(self, reports: Sequence[NodeReport]) -> list[Note]:
        """Raise InputError if nodes would compute different bits; note harmless differences."""
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
        text = (
            f"the GPUs are of different kinds ({', '.join(kinds)}): a trial's states depend on "
            "which of them train it"
        )
        return [Note("node differs", text)] if len(kinds) > 1 else []


def _normalize_environment(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return an environment with the variable that workers on GPUs get if their node has none."""
    # Computing on a GPU here, as for `cerebro.torch.features`, sets the variable in this process;
    # Ray's actors start without it.
    variables = {CUBLAS_VARIABLE: CUBLAS_WORKSPACE, **about["variables"]}
    variables.pop(environment.HASH_SEED, None)  # workers on all nodes get the run's
    return {**about, "variables": variables}


@contextlib.contextmanager
def make_run_token(folder: Path, disk: Disk) -> Iterator[str]:
    """Make a temporary folder beside the run's folder: who can write there can write to the run.

    The run's folder is made later, in the same place, by the same user and with the same rights.
    """
    token = _find_existing_parent(folder, disk) / f"{TOKEN}{uuid.uuid4().hex}"
    try:
        with contextlib.suppress(OSError):
            disk.make_folder(token)
        yield str(token)
    finally:
        disk.remove_folder(token)


def remove_old_tokens(folder: Path, machine: Machine = LOCAL) -> None:
    """Remove the tokens of coordinators that were killed before they could.

    Tokens in the run's folder belong to earlier coordinators of this run; those beside it may
    belong to other runs.
    """
    disk = machine.disk
    place = _find_existing_parent(folder, disk)
    newest = math.inf if place == folder else machine.clock.time() - OLD_TOKEN_SECONDS
    with contextlib.suppress(OSError):
        for name in filter(_TOKENS.fullmatch, disk.list(place)):
            if disk.modified(place / name) < newest:
                disk.remove_folder(place / name)


def _find_existing_parent(folder: Path, disk: Disk) -> Path:
    return next((place for place in (folder, *folder.parents) if disk.exists(place)), folder)


COMPUTE = ("numpy", "torch", "jax", "jaxlib", "scikit-learn", "scipy", "mkl", "cloudpickle")
REFUSED = ("cerebro", "python", "system", "cpu.features", "blas", "variables.")
NOTED = ("cpu.model", "libc", "gpu")


def find_differences(
    here: Mapping[str, Any], there: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Return the differences of a node that are rejected, and those that are noted."""
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
