"""The program under test in the soak: ``python -m benchmarks.cluster_soak.job SPEC``.

SPEC is JSON: the problem, ``data``, ``run``, ``address`` (null: inline, without faults),
``key`` (null: the address is a Ray cluster's), ``resume``, ``apart``, ``replicas`` and ``shared``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import cerebro
from benchmarks.cluster_soak import models
from benchmarks.faults.job import Told
from benchmarks.faults.models import tell
from benchmarks.faults.problem import Problem
from cerebro.cluster import admission, hub
from cerebro.cluster import executor as module
from cerebro.cluster.connected_executor import Executor as AgentsExecutor
from cerebro.cluster.executor import ClusterExecutor
from cerebro.worker.messages import News, Note, WorkerJoined

ROWS = [300, 6000]
"""Of 32 bytes each in a model's state: below and above Ray's limit for inline messages."""
LOOK_SECONDS = 1.0
"""How often the coordinator checks for new nodes: runs are shorter than its usual period."""


class Reporting(ClusterExecutor):
    """Reports joining workers to the soak."""

    def wait(self, *arguments: Any, **options: Any) -> Sequence[News]:
        news = super().wait(*arguments, **options)
        for event in news:
            if isinstance(event, WorkerJoined):
                tell(f"joined {event.worker}")
            elif isinstance(event, Note) and event.kind == "node not used":
                tell("refused")
        return news


class OnAgents(Reporting, AgentsExecutor):
    """On agents that connect."""


@contextlib.contextmanager
def no_token(folder: Path, disk: object) -> Iterator[str]:
    """A folder sought by a node that does not see the run's folder."""
    yield "/nowhere"


def executor(spec: dict[str, Any]) -> Any:
    module.LOOK_SECONDS = LOOK_SECONDS
    if spec["apart"]:
        admission.make_run_token = no_token
        hub.read_machine_id = lambda: "another machine"
    shared = Path(spec["data"]).parent if spec["shared"] else None
    how: dict[str, Any] = {"replicas": spec["replicas"], "shared_path": shared}
    if spec["key"] is not None:
        return OnAgents(listen=spec["address"], key=spec["key"], **how)
    from cerebro.ray import Executor as RayExecutor

    class OnRay(Reporting, RayExecutor):
        """On actors of Ray."""

    return OnRay(spec["address"], **how)


def main(text: str) -> None:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # to dump its stack when it hangs
    spec = json.loads(text)
    how: dict[str, Any] = {"workers": 0}
    if spec["address"] is not None:
        how = {"executor": executor(spec), "callbacks": [Told()]}
    if spec["resume"]:
        cerebro.resume(spec["run"], progress=False, **how)
    else:
        arguments = Problem(**spec["problem"]).arguments()
        arguments |= {"build": models.build, "space": {**arguments["space"], "rows": ROWS}}
        cerebro.search(data=spec["data"], run=spec["run"], keep="last", **arguments, **how)


if __name__ == "__main__":
    main(sys.argv[1])
