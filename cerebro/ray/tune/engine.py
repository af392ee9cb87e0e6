"""The actor behind `cerebro.ray.trainable`: one for all proxies, with Cerebro's workers.

It belongs to the process that runs the Tuner and ends with it. When the last proxy has left
for a while it closes its run and ends itself, so that its cores are free.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cerebro.errors import CerebroError, InputError, text_of
from cerebro.executors.received import opened
from cerebro.machine.guard import refuse
from cerebro.machine.resources import available_memory
from cerebro.ray.tune.requests import Answer, Point, Request
from cerebro.ray.tune.session import Session, Work

IDLE_SECONDS = 10.0
PROXY_BYTES = 120 << 20
"""What a proxy's process takes."""
CALLS = 10_000
"""Requests that may wait at a time."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Spec:
    """What an engine is made from; the same for whoever makes it.

    Attributes
    ----------
    name
        The actor's.
    work
        A pickled `Work`, which only the engine opens: proxies import nothing for it.
    cpus, gpus
        Cores and GPUs that its workers take.
    folder
        The run's; None: beside Tune's experiment.
    """

    name: str
    work: bytes
    cpus: int
    epochs: int | None
    folder: str | None
    cwd: str
    path: tuple[str, ...]
    variables: dict[str, str | None]
    """Of the environment, those that change bits: Ray sets some of its own."""
    gpus: int = 0
    argv: tuple[str, ...] = ("",)
    """Arguments of the program that runs the Tuner."""


class Engine:
    """What proxies call; an answer ``{"error": ...}`` is for them to raise."""

    def __init__(self, spec: Spec) -> None:
        os.chdir(spec.cwd)
        sys.path[:] = [*dict.fromkeys([*spec.path, *sys.path])]
        sys.argv[:] = spec.argv
        for name, value in spec.variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        self._spec = spec
        self._sessions: dict[Path, Session] = {}
        self._proxies: dict[str, Path] = {}
        self._warned = False
        self._ending: asyncio.Future[None] | None = None

    @cached_property
    def _work(self) -> Work:
        work: Work = opened(self._spec.work)
        return work

    async def enter(self, proxy: str, folder: str) -> None:
        """A proxy is there."""
        self._proxies[proxy] = Path(folder)
        need = len(self._proxies) * PROXY_BYTES
        if not self._warned and available_memory() < need // 2:
            self._warned = True
            logger.warning(
                "%d trials of Tune's are live: each is a process of some 120 MB, and memory is "
                "getting short; limit them with TuneConfig(max_concurrent_trials=), or use "
                "cerebro.ray.fit, which needs none",
                len(self._proxies),
            )

    async def leave(self, proxy: str, trial: int | None) -> None:
        """A proxy ends, or stands for another trial from now on."""
        folder = self._proxies.pop(proxy, None)
        session = None if folder is None else self._sessions.get(folder)
        if session is not None and trial is not None:
            session.shelve(trial)
        if not self._proxies:
            asyncio.get_running_loop().call_later(IDLE_SECONDS, self._end_if_idle)

    async def retire(self) -> None:
        """Make room for another engine, if nobody needs this one."""
        self._end_if_idle()

    async def train(self, proxy: str, folder: str, call: dict[str, Any]) -> dict[str, Any]:
        """Train an epoch, or return it from the record.

        Returns
        -------
        dict
            ``trial``, ``epoch``, ``state_hash`` and ``metrics``; or ``error``.
        """
        self._proxies[proxy] = Path(folder)  # it may have entered before a restart
        try:
            return await self._train(Path(folder), call)
        except CerebroError as error:
            return {"error": text_of(error, 2000)}

    async def keep(self, proxy: str, folder: str, point: dict[str, Any]) -> None:
        """Keep a state for as long as the run's folder lasts."""
        await asyncio.to_thread(self._session(Path(folder)).keep, Point(**point))

    def _end_if_idle(self) -> None:
        if not self._proxies and self._ending is None:
            self._ending = asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        """Close the runs, and end this process unless somebody has come meanwhile."""
        import ray

        await asyncio.to_thread(self._close)
        self._ending = None
        if not self._proxies:
            ray.kill(ray.get_runtime_context().current_actor)

    async def _train(self, folder: Path, call: dict[str, Any]) -> dict[str, Any]:
        session = self._session(folder)
        begin = Point(**call["begin"]) if call["begin"] is not None else None
        if begin is not None:
            await asyncio.to_thread(session.check, begin)
        request = Request(
            call["owner"],
            call["config"],
            trial=call["trial"],
            begin=begin,
            target=call["target"],
        )
        answer = await asyncio.wrap_future(session.ask(request))
        if isinstance(answer, Answer):
            await asyncio.to_thread(session.flush)  # Tune never knows more than the record
        else:
            answer = await asyncio.to_thread(session.recall, answer, request.target - 1)
        return {**vars(answer.point), "metrics": answer.metrics}

    def _session(self, folder: Path) -> Session:
        session = self._sessions.get(folder)
        if session is None or not session.is_open:
            session = self._sessions[folder] = Session(self._work, folder)
        return session

    def _close(self) -> None:
        for folder, session in list(self._sessions.items()):
            session.close()
            del self._sessions[folder]


_held: dict[str, Any] = {}
"""This process's handles: an actor ends with the last one in the process that began it."""


def engine_of(spec: Spec, *, owner: bool) -> Any:
    """Return the engine, and start it if there is none.

    Parameters
    ----------
    owner
        Whether this process is the one that runs the Tuner, where data and run lie.

    Raises
    ------
    InputError
        If it would have more workers than its node has cores, or more GPUs.
    """
    if owner:
        refuse("tune.Tuner(cerebro.ray.trainable(...)).fit")
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    with contextlib.suppress(ValueError):  # there is none, or none any more
        found = ray.get_actor(spec.name)
        return _held.get(spec.name, found)  # what began it must be kept, or it ends
    node = ray.get_runtime_context().get_node_id()
    for name in list(_held):
        try:
            ray.get_actor(name).retire.remote()
        except ValueError:
            del _held[name]
    if owner:
        _check_room(spec, node)
    actor = ray.remote(Engine).options(
        name=spec.name,
        get_if_exists=True,
        num_cpus=spec.cpus,
        num_gpus=spec.gpus,
        max_restarts=3,
        max_task_retries=3,  # a repeated call is answered from the record
        max_concurrency=CALLS,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=not owner),
    )
    engine = _held[spec.name] = actor.remote(spec)
    return engine


def _check_room(spec: Spec, node: str) -> None:
    import ray

    known = [n["Resources"] for n in ray.nodes() if n["NodeID"] == node]
    there = known[0] if known else {"CPU": spec.cpus, "GPU": spec.gpus}
    cores, gpus = (int(there.get(name, 0)) for name in ("CPU", "GPU"))
    if spec.gpus > gpus:
        raise InputError(
            f"cerebro.ray.trainable: its workers are to train on {spec.gpus} GPU(s), and Ray has "
            f"{gpus} on this node: give devices='cpu', or ray.init(num_gpus=)"
        )
    if spec.cpus > cores:
        raise InputError(
            f"cerebro.ray.trainable: its workers need {spec.cpus} CPUs, and Ray has {cores} on "
            f"this node: give workers={max(1, cores)} or less (times threads), or "
            "ray.init(num_cpus=)"
        )
