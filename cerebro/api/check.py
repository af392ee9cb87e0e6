"""Implement `cerebro.check`: test whether a model's state survives a hop.

A model passes if uninterrupted training gives the same result as training, packing the state,
building the model again, unpacking, and continuing the training. The check names each difference: a
tensor in the state, or an attribute that is kept outside ``state_dict``.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cerebro.api.lanes import choose_lanes, usable_memory
from cerebro.api.settings import eval_rows
from cerebro.arguments import check_one_of
from cerebro.data.given_rows import write_given_rows
from cerebro.data.validation import make_validation
from cerebro.errors import InputError, StateError, shorten_tracebacks
from cerebro.executors.local import LocalExecutor
from cerebro.machine.devices import (
    CPU,
    assign_devices,
    choose_devices,
    is_gpu,
    name_devices,
    name_in_worker,
)
from cerebro.machine.guard import refuse
from cerebro.machine.libraries import present_settings
from cerebro.report.findings import Finding, offer_graph
from cerebro.run.recipe import check_build
from cerebro.run.settings import Batches, Exactness
from cerebro.space import as_space
from cerebro.worker.messages import CheckDone, CheckTask, Event, RunContext, RunFolders
from cerebro.worker.trial_warnings import carry_filters, show


@dataclass(frozen=True)
class Check:
    """The outcome of a hop check; true if the configuration's state survives a hop.

    Attributes
    ----------
    problems
        The parts of the state that are lost in a hop, one line each.
    metrics
        The names of the metrics that the model reports.
    config
        The configuration that was tried.
    device
        The device on which the model was tried.
    not_exact
        The names of operations that have no deterministic version on a GPU. Because of them, even
        two runs without a hop differ, so the hop cannot be checked.
    findings
        Likely mistakes in the model or its data, the most certain first; see `Finding`. They do not
        change whether the check is true.
    offer
        What ``graph=True`` would bring, in one line; empty if it is not worth much.
    lanes
        How many trials of this configuration a search trains at once on each GPU by default, if it
        has as many; 1 on the CPU.
    wrapped
        What `build` returned and what trains it, if that was another framework's object.
    unused
        What is not used of a DataLoader, a DataModule or a dict of splits.
    """

    problems: list[str]
    metrics: list[str]
    config: dict[str, Any] = field(default_factory=dict)
    device: str = CPU
    not_exact: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    offer: str = ""
    lanes: int = 1
    wrapped: str = ""
    unused: str = ""

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return not self.problems

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        said = "the state survives a hop"
        if self.not_exact:
            said = (
                f"not exact on {self.device}: no deterministic version of "
                f"{', '.join(self.not_exact)}; cannot check whether the state survives a hop"
            )
        lines = self.problems or [f"{said}; metrics: {', '.join(self.metrics)}"]
        several = f"a search trains up to {self.lanes} trials at once on each GPU"
        lanes = several if self.lanes > 1 else ""
        taken = [self.unused, self.wrapped]
        return "\n".join(
            filter(None, [*taken, *lines, *map(str, self.findings), self.offer, lanes])
        )


@shorten_tracebacks
def check(
    build: Callable[..., Any],
    space: Any,
    data: Any,
    *,
    validation: Any = None,
    batch_size: int | None = None,
    seed: int = 0,
    devices: Any = "auto",
    deterministic: Literal["warn"] | bool = "warn",
) -> Check:
    """Try one configuration: train on a few batches with a hop and without, and compare.

    Parameters
    ----------
    build, space, data, validation
        As for `cerebro.search`. The configuration is the space's first.
    batch_size
        Default: the configuration's, else 32.
    seed, deterministic
        As for `cerebro.search`.
    devices
        As for `cerebro.search`: the model is tried on the first of them.

    Returns
    -------
    Check
        True if the state survives. ``problems`` names the parts that do not survive, and
        ``not_exact`` the operations whose results differ from run to run.

    Raises
    ------
    InputError
        If the configuration cannot be built or trained at all, or if a device does not exist.
    """
    refuse("cerebro.check")
    with tempfile.TemporaryDirectory(prefix="cerebro-check-") as folder:
        unused: list[str] = []
        data, validation = write_given_rows(data, validation, Path(folder), unused.append)
        check_build(build)
        check_one_of("deterministic", deterministic, ("warn", True, False))
        device = choose_devices(devices)[0]
        train, held_out, folds = make_validation(data, validation)
        config = as_space(space).sample(seed, 0)
        if batch_size is None and "batch_size" not in config:
            batch_size = 32
        context = RunContext(
            build=build,
            train=train,
            validation=held_out,
            folds=folds,
            folders=RunFolders(folder, folder, folder),
            batches=Batches(batch_size=batch_size, eval_batch_size=eval_rows(train)),
            exactness=Exactness(seed=seed, deterministic=deterministic),
            device=name_in_worker([device]),
            libraries=present_settings(),
            warning_filters=carry_filters(),
        )
        done = ask_worker(context, device, CheckTask(config, thorough=True))
    if not isinstance(done, CheckDone):
        raise StateError(f"the worker was lost while trying the model: {done}")
    for warned in done.warned:
        show(warned)
    if done.error is not None:
        raise InputError(done.error)
    model = done.model
    if model.cpu_only and name_devices(devices) == ["auto"]:  # the same decision as in a search
        device = CPU
    problems, metrics, operations = map(list, (done.problems, model.metrics, done.not_exact))
    return Check(
        problems,
        metrics,
        dict(config),
        device,
        operations,
        list(done.findings),
        offer_graph(done.gain),
        choose_lanes(model, usable_memory(model, [device]), None) if is_gpu(device) else 1,
        model.wrapped,
        "".join(unused),
    )


def ask_worker(context: RunContext, device: str, task: CheckTask) -> Event:
    """Let one worker carry out a task before a run, then end the worker; return its answer."""
    seats = assign_devices([device], 1)
    executor = LocalExecutor(1, context.exactness.threads, seats=seats)
    try:
        (worker,) = executor.start(context)
        executor.submit(worker, task)
        (event,) = executor.wait(None)
        return event
    finally:
        executor.close()
