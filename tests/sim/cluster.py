"""A simulated cluster: agents that others start, and the real executor, hub and agents above it.

Real are the executor with all that it keeps, the hub, the agents with their lanes, answers and
supervisors, their executors, and the way in which states are fetched. Simulated are the sockets
(`network`), threads (`fibers`), disks, worker processes and machines. All nodes read the data where
they are, so no shards are sent; and no worker writes output.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

from disk import SimulatedDisk
from fibers import Fiber
from network import PORT, Network, SimulatedConnections
from problems import Problem
from processes import make_executor, mount_disk
from world import Process, SimulatedClock, SimulatedTasks, World

from cerebro.cluster import agent as agent_module
from cerebro.cluster import states as states_module
from cerebro.cluster.agent import Agent, run_agents
from cerebro.cluster.engine import Engine
from cerebro.cluster.executor import ClusterExecutor
from cerebro.cluster.hub import Hub
from cerebro.cluster.keys import Keys, Ticket
from cerebro.cluster.messages import Begin, NodeReport
from cerebro.cluster.supervisor import Supervisor
from cerebro.executors import wire
from cerebro.executors.local import LocalExecutor
from cerebro.machine import environment, imports
from cerebro.machine.disk import Disk
from cerebro.machine.local import Machine
from cerebro.worker.messages import RunContext

ADDRESS = f"127.0.0.1:{PORT}"
KEY = bytes(32)
PATIENCE_SECONDS = 40.0  # of an agent
LATE = 0.2  # the probability that an agent is started late
START_SECONDS = 0.05, 1.0
LATE_SECONDS = 1.0, 60.0
AGAIN_SECONDS = (0.0, 0.5, 5.0, 40.0)  # until an agent is started in place of one that has ended
LEAVE_SECONDS = 30.0  # from SIGTERM to SIGKILL

describe_once = cache(environment.describe)  # it asks many files
list_modules_once = cache(imports.list_unfindable_modules)


@dataclass(frozen=True)
class Shape:
    """How a problem's cluster is."""

    workers: int | None
    agents: int
    is_one_machine: bool
    """Whether the agents are on the coordinator's machine, and write into the run's folder."""
    carries: bool
    """Whether states are small enough to travel in messages."""
    latency: float
    """How long a message is under way at most, in seconds."""

    @classmethod
    def draw(cls, problem: Problem) -> Shape:
        choose = random.Random(f"shape {problem.number}")
        return cls(
            workers=choose.choice((None, 1, 2, 2)),
            agents=choose.randint(2, 4),
            is_one_machine=choose.random() < 0.25,
            carries=choose.random() < 0.25,
            latency=choose.choice((0.002, 0.02, 0.5)),
        )


def make_local_executor(
    machine: Machine, mount: Callable[[Process], Disk], workers: int, threads: int, **options: Any
) -> LocalExecutor:
    """Return the executor of an agent."""
    return make_executor(machine, workers, mount, **options)


class Computer:
    """A machine of an agent, other than the coordinator's."""


class Supervising(Supervisor):
    """The real supervisor, which opens the run in simulated folders."""

    def __init__(self, *given: Any, seat: Seat, **options: Any) -> None:
        super().__init__(*given, **options)
        self._seat = seat
        self._folder = Path("/agents", given[0])

    def report(self, threads: int, token: str, data: Any, on_gpu: bool) -> NodeReport:
        return NodeReport(
            node=self._node,
            host="host",
            place=self._node,
            machine=self._node,
            environment=describe_once(threads),
            shares_run=self._seat.cluster.shape.is_one_machine,
            at=("/data",) * len(data),
        )

    def _open_run(self, begin: Begin) -> RunContext:
        own = {"slots": "slots"} if begin.shares_run else {"slots": "slots", "states": "epochs"}
        for name in own.values():
            self._disk.make_folder(self._folder / name)
        places = {name: str(self._folder / folder) for name, folder in own.items()}
        settings = dict(begin.settings)
        settings["folders"] = replace(settings["folders"], **places)
        search = self._seat.cluster.settings
        return RunContext(
            build=search.build,
            train=search.train,
            validation=search.validation,
            folds=search.folds,
            **settings,
        )

    def end(self) -> None:
        super().end()
        self._disk.remove_folder(self._folder)


class Seat:
    """A place of an agent, which is started again whenever it has ended."""

    def __init__(self, cluster: SimulatedCluster) -> None:
        self.cluster = cluster
        self._agent: Agent | None = None

    def start(self, seconds: float) -> None:
        self.cluster.world.at(seconds, self._start)

    def _start(self) -> None:
        cluster = self.cluster
        if cluster.is_over:
            return
        self.process = process = cluster.world.start_process(f"agent-{cluster.started}")
        cluster.started += 1
        if not cluster.shape.is_one_machine:
            process.machine = Computer()
        process.on_death.append(self._start_again)
        process.on_leave = self._leave
        self._disk = mount_disk(process, cluster.disk.mount)
        Fiber(process, self._run)

    def _start_again(self) -> None:
        self._agent = None
        self.start(self.cluster.random.choice(AGAIN_SECONDS))

    def _run(self) -> None:
        self.process.die(run_agents(self._make_agent))

    def _make_agent(self) -> Agent:
        process, cluster = self.process, self.cluster
        machine = Machine(SimulatedClock(process), self._disk, SimulatedTasks(process))
        make_local = partial(make_local_executor, machine, cluster.disk.mount)
        cluster.made += 1
        self._agent = Agent(
            Ticket(ADDRESS, KEY, listen="127.0.0.1"),
            PATIENCE_SECONDS,
            number=f"{cluster.made:032x}",
            supervisor=partial(Supervising, seat=self, disk=self._disk, make_local=make_local),
            machine=machine,
            connect=partial(SimulatedConnections, process, cluster.network),
        )
        return self._agent

    def _leave(self) -> None:
        """Be told to end."""
        if self._agent is not None:
            self._agent.leave()
        process = self.process
        process.world.at(LEAVE_SECONDS, partial(process.die, -9), process)


class SimulatedCluster:
    """The agents of a run, and what coordinators need to use them."""

    def __init__(
        self,
        world: World,
        problem: Problem,
        disk: SimulatedDisk,
        real: Path,
    ) -> None:
        self.world = world
        self.shape = shape = Shape.draw(problem)
        self.settings = problem.make()[0]
        self.random = random.Random(f"{world.seed} cluster")
        # Nobody asks for the files of a lost machine again, so one disk stands for all of theirs.
        disks = random.Random(f"{world.seed} disks")
        self.disk = disk if shape.is_one_machine else SimulatedDisk(disks, Path(f"{real}-nodes"))
        self.network = Network(shape.latency)
        self.is_over = False
        self.started = 0  # agents
        self.made = 0  # agents, with those that have come back after they were cut off
        for number in range(shape.agents):
            is_late = number > 0 and self.random.random() < LATE
            first, last = LATE_SECONDS if is_late else START_SECONDS
            Seat(self).start(first + (last - first) * self.random.random())

        self._patches = contextlib.ExitStack()
        self._patches.enter_context(self._patch())

    def make_executor(self, machine: Machine) -> ClusterExecutor:
        return JoinedCluster(self, machine)

    def may_refuse(self, why: str) -> bool:
        """Whether a search may be refused at its start, if there were faults.

        Its message then says that no agent is there, that the only one has gone, or that one does
        not start in time.
        """
        return any(
            each in why for each in ("no agent has connected", " is gone", "has not started")
        )

    def finish(self) -> None:
        """Start no more agents, and let those that are there end without faults.

        A power loss now could bring back names that were removed at the end. The run does not
        sync their removal, because a resumed run removes them again.
        """
        self.is_over = True
        for process in self.world.processes:
            process.forget_faults()

    def close(self) -> None:
        self._patches.close()
        self.disk.close()

    @contextlib.contextmanager
    def _patch(self) -> Iterator[None]:
        """Have agents say nothing, and states be as large as those of this cluster."""
        carried = states_module.CARRIED_BYTES if self.shape.carries else 0
        with (
            mock.patch.object(agent_module, "tell", lambda text: None),
            mock.patch.object(agent_module, "CARRIED_BYTES", carried),
            mock.patch.object(states_module, "CARRIED_BYTES", carried),
            mock.patch.object(environment, "describe", describe_once),
            mock.patch.object(wire, "list_unfindable_modules", list_modules_once),
        ):
            yield


class JoinedCluster(ClusterExecutor):
    def __init__(self, cluster: SimulatedCluster, machine: Machine) -> None:
        super().__init__(cluster.shape.workers, 1, None, machine=machine)
        self._network = cluster.network
        assert isinstance(machine.clock, SimulatedClock)
        self._process = machine.clock.process

    def _join(self, context: RunContext) -> Hub:
        return Hub(
            Keys(KEY),
            Engine(),
            "127.0.0.1",
            PORT,
            machine=self._machine,
            connect=partial(SimulatedConnections, self._process, self._network),
        )
