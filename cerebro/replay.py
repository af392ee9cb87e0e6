"""`cerebro.replay`: train a trial again, alone, and compare its states bit for bit."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cerebro import _core, environment
from cerebro.data import Dataset
from cerebro.errors import CorruptDataError, InputError, RunError
from cerebro.executors.local import LocalExecutor
from cerebro.result import Result
from cerebro.saved_trial import Trial
from cerebro.settings import whole_number
from cerebro.unit import RunContext, Task, UnitDone, UnitFailed


@dataclass(frozen=True)
class ReplayedEpoch:
    """One epoch's state hash as recorded and as trained again."""

    epoch: int
    recorded: str
    replayed: str

    @property
    def identical(self) -> bool:
        return self.recorded == self.replayed


@dataclass(frozen=True)
class Replay:
    """What `replay` found; true if every epoch's state was the same, bit for bit."""

    trial: int
    epochs: list[ReplayedEpoch]
    differences: list[str] = field(default_factory=list)
    """What is known to be other than in the run: library versions, data, source."""
    error: str | None = None
    """Why the trial could not be trained to the end again, or None."""

    @property
    def identical(self) -> bool:
        """Whether every epoch's state hash is the recorded one."""
        return self.error is None and all(epoch.identical for epoch in self.epochs)

    @property
    def first_difference(self) -> int | None:
        """Number of the first epoch whose state differs, from 0; None if none does."""
        for epoch in self.epochs:
            if not epoch.identical:
                return epoch.epoch
        return None if self.error is None else len(self.epochs)

    def __bool__(self) -> bool:
        return self.identical

    def __str__(self) -> str:
        if self.identical:
            return (
                f"trial {self.trial}: {len(self.epochs)} epochs trained again, every state "
                "identical"
            )
        lines = [f"trial {self.trial}: differs from epoch {self.first_difference} on"]
        if self.error is not None:
            lines.append(f"it could not be trained to the end: {self.error}")
        return "\n".join(lines + [f"known difference: {text}" for text in self.differences])


def replay(
    run: str | os.PathLike[str] | Result,
    trial: int | Trial,
    build: Callable[..., Any] | None = None,
    *,
    data: Any = None,
    epochs: int | None = None,
) -> Replay:
    """Train a trial of a run again, alone, in a fresh worker, and compare.

    Parameters
    ----------
    run
        The run's folder, or its result.
    trial
        The trial or its number.
    build
        The run's ``build``, where it cannot be imported again.
    data
        The run's training data, or the whole data set that it is part of, where it has
        been moved; a path will do.
    epochs
        How many epochs to train; default: all that the run has.

    Returns
    -------
    Replay
        ``identical``, ``first_difference`` and the hashes of every epoch.

    Raises
    ------
    InputError
        If the run, the trial or ``build`` cannot be found, or ``epochs`` is below 1.
    """
    result = run if isinstance(run, Result) else Result(run, build=build)
    number = trial.number if isinstance(trial, Trial) else whole_number("trial", trial, 0)
    epochs = whole_number("epochs", epochs, 1, optional=True)
    if number is None or number >= len(result.trials):
        raise InputError(
            f"{result.path} has no trial {number}: it has 0 to {len(result.trials) - 1}"
        )
    record = result.trials[number].record
    asked = whole_number("epochs", epochs, 1, optional=True)
    wanted = len(record.epochs) if asked is None else min(asked, len(record.epochs))
    if wanted == 0:
        raise InputError(
            f"trial {number} of {result.path} has finished no epoch: nothing to replay"
        )
    if isinstance(data, (str, os.PathLike)):
        data = Dataset(data)
    with tempfile.TemporaryDirectory(prefix="cerebro-replay-") as folder:
        context = result.saved.context(
            build,
            train=result.saved.view("data", data),
            validation=result.saved.view("validation", data),
            state_dir=folder,
            epoch_dir=folder,
            log_dir=folder,
            verify=False,
        )
        known = known_differences(result, context)
        replayed, error = _train(context, number, record.config, wanted)
    epochs_found = [
        ReplayedEpoch(recorded.epoch, recorded.state_hash, state_hash)
        for recorded, state_hash in zip(record.epochs, replayed, strict=False)
    ]
    return Replay(number, epochs_found, known, error)


def known_differences(result: Result, context: RunContext) -> list[str]:
    """Say what is other than in the run before anything is trained."""
    lines = environment.differences(
        result.environment, environment.describe(result.settings["threads"])
    )
    recipe = result.saved.recipe
    now = type(recipe).of(context.build)
    if recipe.source_hash is not None and now.source_hash != recipe.source_hash:
        lines.append(f"the source of build ({recipe.name}) has changed")
    elif recipe.file_hash is not None and now.file_hash != recipe.file_hash:
        lines.append(f"{recipe.file}, which defines build, has changed")
    views = {"data": context.train, "validation": context.validation}
    for name, view in views.items():
        if view is None:
            continue
        if view.checksum != result.saved.meta[f"{name}_checksum"]:
            lines.append(f"{name} {view.path} is not the data set that the run was trained on")
        for shard in range(view.num_shards):
            try:
                view.verify_shard(shard)
            except (CorruptDataError, OSError) as error:
                lines.append(str(error))
    return lines


def _train(
    context: RunContext, trial: int, config: dict[str, Any], epochs: int
) -> tuple[list[str], str | None]:
    """Train in a fresh worker; return the hashes, and why it ended early if it did."""
    hashes: list[str] = []
    executor = LocalExecutor(1, context.threads, fresh=True)
    shards = context.train.num_shards
    try:
        (worker,) = executor.start(context)
        for position in range(epochs * context.units_per_epoch):
            epoch, step = divmod(position, context.units_per_epoch)
            order = _core.visit_order(trial, epoch, shards, stagger=context.stagger)
            task = Task(
                trial=trial,
                config=config,
                epoch=epoch,
                step=step,
                shard=order[step] if step < shards else -1,
                attempt=0,
                position=position,
                keep_state=False,
            )
            executor.submit(worker, task)
            (event,) = executor.wait()
            if isinstance(event, UnitFailed):
                return hashes, event.message
            if not isinstance(event, UnitDone):
                raise RunError(f"the worker that replayed trial {trial} was lost: {event}")
            if event.state_hash is not None:
                hashes.append(event.state_hash)
    finally:
        executor.close(kill=True)
    return hashes, None
