"""Run a worker's jobs: units, checks of a configuration, imports in advance, derived shards."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from cerebro.data.manifest import shard_folder
from cerebro.errors import DeviceError, InputError, text_of
from cerebro.machine import cuda, environment
from cerebro.machine.devices import GpuMemoryError, is_gpu
from cerebro.machine.files import is_full
from cerebro.machine.imports import import_early
from cerebro.machine.libraries import TORCH, restore_settings
from cerebro.model import is_cpu_only
from cerebro.worker import lost_numbers
from cerebro.worker.clone_check import find_misfits
from cerebro.worker.hop_check import check_hop, measure_lane
from cerebro.worker.messages import (
    CheckDone,
    CheckTask,
    Event,
    Job,
    ModelFacts,
    ShardFailed,
    ShardMade,
    ShardTask,
    Task,
    UnitDone,
    UnitFailed,
    WarmTask,
)
from cerebro.worker.models import explain_unfit, hash_parameter_order
from cerebro.worker.runner import UnitRunner
from cerebro.worker.user_errors import describe, is_about_data, traceback_of


def execute(runner: UnitRunner, job: Job) -> Event:
    """Run a job and return its result; the settings that a model's build left end with the job."""
    try:
        if isinstance(job, CheckTask):
            return check(runner, job)
        if isinstance(job, ShardTask):
            return make_shard(runner, job)
        return warm(runner, job) if isinstance(job, WarmTask) else run(runner, job)
    finally:
        restore_settings(runner.context.libraries)


def run(runner: UnitRunner, task: Task) -> UnitDone | UnitFailed:
    """Run a unit; warn if it changed numbers that a hop would lose."""
    event = runner.run(task)
    warned = lost_numbers.warn_of_lost_numbers(runner, task) if isinstance(event, UnitDone) else ()
    return replace(event, warned=(*event.warned, *warned)) if warned else event


def check(runner: UnitRunner, task: CheckTask) -> CheckDone:
    """Train on a few batches with and without a hop in between; see `cerebro.check`."""
    with runner.warnings.collect(None) as warned:
        event = _check(runner, task)
    runner.free_checked_models()
    runner.warnings.forget(None)  # the next check reports its warnings again
    return replace(event, warned=tuple(warned))


def _check(runner: UnitRunner, task: CheckTask) -> CheckDone:
    runner.forget_generators()
    not_exact: set[str] = set()
    try:
        with runner.redirect_output(None):
            result = _try_model(runner, task, not_exact)
        seen = describe_environment(runner)
        return replace(result, environment=seen, not_exact=tuple(sorted(not_exact)))
    except BaseException as error:
        if not runner.is_of_the_trial(error):
            raise
        cause, seen = runner.describe_cause(error, task.config), describe_environment(runner)
        unfit = bool(explain_unfit(error, runner.loaders.unfit))
        return CheckDone(runner.worker, (), error=cause, unfit=unfit, environment=seen)


def _try_model(runner: UnitRunner, task: CheckTask, not_exact: set[str]) -> CheckDone:
    def build_or_try() -> CheckDone:
        if task.measures:
            return CheckDone(runner.worker, (), model=measure_lane(runner, task.config))
        if task.build_only:
            model = runner.build(task.number, task.config, task.epochs, stream=task.stream).model
            facts = ModelFacts(is_cpu_only(model), hash_parameter_order(model))
            return CheckDone(runner.worker, find_misfits(runner, task, model), model=facts)
        try:
            done = check_hop(runner, task.config, not_exact, thorough=task.thorough)
        except Exception:
            if not runner.sharing.find_written():
                raise
        else:
            if not runner.sharing.find_written():
                return done
        # The models compared have written to each other's weights.
        with runner.sharing.share_nothing():
            return check_hop(runner, task.config, not_exact, thorough=task.thorough)

    try:
        with runner.use_settings(not_exact, strict=True):
            return build_or_try()
    except Exception as error:
        if not runner.tolerates(error, not_exact):
            raise
    runner.free_checked_models()
    with runner.use_settings(not_exact):
        return build_or_try()


def describe_environment(runner: UnitRunner) -> dict[str, Any]:
    """Describe this worker's environment once the model has imported its libraries.

    The last ``build``'s settings are undone. Call it outside of `UnitRunner.use_settings`, whose
    settings of PyTorch are not the process's.
    """
    restore_settings(runner.context.libraries)
    device = runner.context.device
    record = environment.describe(runner.context.exactness.threads, device)
    if is_gpu(device) and "cuda" not in record:
        with contextlib.suppress(DeviceError):
            record |= {"cuda": gpu} if (gpu := cuda.describe_opened()) is not None else {}
    return record


def warm(runner: UnitRunner, task: WarmTask) -> CheckDone:
    with runner.redirect_output(None):
        import_early(task.modules)
    TORCH.apply(runner.context.libraries.get("torch", {}))
    return CheckDone(runner.worker, ())


def make_shard(runner: UnitRunner, task: ShardTask) -> ShardMade | ShardFailed:
    """Make a shard of a derived dataset; errors are returned, not raised."""
    context = runner.context
    folder = Path(context.folders.slots, shard_folder(task.shard))
    work: Any = context.build
    disk = runner.machine.disk
    try:
        with runner.redirect_output(None):
            disk.remove_folder(folder)  # of a worker that died
            if disk.exists(folder):
                raise FileExistsError(f"cannot remove folder {folder}")
            disk.make_folder(folder)
            context.train.shards.verify(task.shard)
            files = work.with_view(context.train).write(task.shard, folder)
    except BaseException as error:
        if not runner.is_of_the_trial(error):
            raise
        disk.remove_folder(folder)
        kind: Literal["error", "input", "memory", "data", "storage", "worker"] = "error"
        if is_about_data(error, context.train):
            kind = "data"
        elif isinstance(error, GpuMemoryError):
            kind = "memory"
        elif isinstance(error, InputError):
            kind = "input"
        elif is_full(error):
            kind = "storage"
        elif runner.has_lost_gpu():
            kind = "worker"
        if kind == "error":
            return ShardFailed(runner.worker, task, kind, describe(error), traceback_of(error))
        return ShardFailed(runner.worker, task, kind, text_of(error, 2000))
    return ShardMade(runner.worker, task, files)
