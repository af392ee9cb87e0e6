"""One process at work on a run, new or resumed, from its workers' start to its end."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from cerebro.coordinator.coordinator import Coordinator
from cerebro.coordinator.restore import RestoredRun
from cerebro.coordinator.searcher_record import is_describable
from cerebro.errors import RunError, text_of
from cerebro.executors.base import Executor
from cerebro.executors.inline import InlineExecutor
from cerebro.executors.local import LocalExecutor
from cerebro.executors.seats import with_shares
from cerebro.machine import flags, resources
from cerebro.machine.devices import in_worker, seats
from cerebro.machine.resources import available_memory
from cerebro.machine.signals import TERMINATED, Terminated, terminable, uninterrupted
from cerebro.report.progress import make_progress
from cerebro.results.result import Result
from cerebro.results.saved_run import SavedRun
from cerebro.run.folder import OwnedRun, sweep
from cerebro.run.settings import Settings
from cerebro.searchers.base import Searcher, Suggestion
from cerebro.worker.messages import RunContext, Warned
from cerebro.worker.trial_warnings import carried_filters

OpenRun = Callable[[], tuple[OwnedRun, RestoredRun | None]]
"""Makes or opens a run; returns it with what is there of it already."""

Ready = tuple[Sequence[int], "Mapping[str, Any] | None"]
"""Workers that can train, and what they compute with, where that is to be recorded."""

Prepare = Callable[[Executor, Sequence[int], RunContext, Callable[[Sequence[Warned]], None]], Ready]
"""Makes the workers ready to train; the last argument is told what the model warns of meanwhile."""


def conduct(
    settings: Settings,
    context: RunContext,
    searcher: Searcher,
    open_run: OpenRun,
    *,
    first: Suggestion | None = None,
    prepare: Prepare | None = None,
) -> Result:
    """Train until the searcher has enough, the time is over or somebody says stop.

    Parameters
    ----------
    settings, context, searcher
        What is searched, what workers are told, and who decides.
    open_run
        Makes or opens the run. It is called when workers have started: what cannot be
        sent to them is found before a file is made.
    first
        The searcher's first suggestion, where it was asked for one already.
    prepare
        What is to be done before anything is trained.

    Raises
    ------
    RunError
        If no trial can go on.
    KeyboardInterrupt
        On Ctrl-C, when the run is closed; it says how to go on.
    SystemExit
        On SIGTERM, with status 143, after printing the same.
    """
    try:
        with terminable():
            return _conduct(settings, context, searcher, open_run, first, prepare)
    except Terminated as error:
        text = str(error) or "terminated before any trial began; nothing was kept"
        print(f"\n{text}", file=sys.stderr, flush=True)
        raise SystemExit(TERMINATED) from None


def _conduct(
    settings: Settings,
    context: RunContext,
    searcher: Searcher,
    open_run: OpenRun,
    first: Suggestion | None,
    prepare: Prepare | None,
) -> Result:
    progress = make_progress(settings.progress)
    executor = settings.executor or default_executor(settings)
    run = coordinator = result = None
    try:
        workers: Sequence[int] = executor.start(context)
        run, restored = open_run()
        result = Result(settings.folder, build=settings.build)
        coordinator = Coordinator(
            *(settings, context, searcher, executor, run.store, progress, result, first),
            restored,
        )
        coordinator.tell("on_run_start", result)
        if prepare is not None:
            workers, seen = prepare(executor, workers, context, coordinator.hear_warnings)
            if seen is not None:  # of a worker: here PyTorch need not be imported yet
                run.store.set_meta("environment", seen)
        coordinator.run(workers)
        executor.close()
        run.store.set_meta("status", coordinator.status)
        run.store.set_meta("ended", time.time())
        close(run, context)
        run.owner.release()
    except BaseException as error:
        try:
            with uninterrupted(error):
                abandon(error, executor, progress, run, coordinator, context)
                if result is not None:
                    explain(error, result)
        except KeyboardInterrupt as late:
            late.args = (f"interrupted; the run had failed before: {text_of(error)}",)
            raise
        raise
    result.refresh()
    progress.finished(coordinator.snapshot(), result)
    coordinator.tell("on_run_end", result)
    return result


def close(run: OwnedRun, context: RunContext) -> None:
    """Close the store; when all of it is on disk, no file is left that it does not name."""
    run.store.close()
    with contextlib.suppress(OSError):
        sweep(run.store.folder, Path(context.state_dir))


def abandon(
    error: BaseException,
    executor: Executor,
    progress: Any,
    run: OwnedRun | None,
    coordinator: Coordinator | None,
    context: RunContext,
) -> None:
    """Leave a run that ends badly: no process stays, what is finished is kept.

    Every step is tried whatever becomes of the others, and none hides `error`. The caller sees to
    it that nothing interrupts them.
    """
    steps: list[Callable[[], object]] = [lambda: executor.close(kill=True), progress.close]
    if run is not None:
        interrupted = isinstance(error, KeyboardInterrupt)
        record = {"status": "stopped" if interrupted else "failed", "ended": time.time()}
        if not interrupted:
            cause = text_of(error, 2000)
            record["error"] = cause if coordinator is None else coordinator.cause_of(error)
        if coordinator is not None:
            steps.append(coordinator.end_open_trials)
        steps += [partial(run.store.set_meta, *item) for item in record.items()]
        steps += [partial(close, run, context), run.owner.release]
    for step in steps:
        with contextlib.suppress(Exception):
            step()


def explain(error: BaseException, result: Result) -> None:
    """Tell with the error what there is of the run, which is closed."""
    with contextlib.suppress(Exception):
        result.refresh()
        if isinstance(error, RunError):
            error.result = result
        elif isinstance(error, KeyboardInterrupt):
            error.args = (how_to_go_on(result),)


def how_to_go_on(result: Result) -> str:
    """What an interrupted run has kept, and what resumes it."""
    epochs = sum(len(trial.history) for trial in result.trials)
    path, saved = str(result.path), result.saved
    if not is_describable(saved.meta.get("searcher_class")) or saved.meta.get("space") is None:
        command = same_call(saved)
    elif saved.recipe.is_importable:
        command = f"python -m cerebro resume {shlex.quote(path)}"
    else:
        command = f"cerebro.resume({path!r}, build)"
    return (
        f"interrupted: {len(result.trials)} trials with {epochs} finished epochs are kept in "
        f"{path}. To go on:\n\n  {command}"
    )


def same_call(saved: SavedRun) -> str:
    """What goes on with a run whose searcher only the user can give again."""
    path = str(saved.path)
    if saved.recipe.takes_trial:
        return f"cerebro.optuna.optimize(...) as before, with run={path!r}"
    return f"the search as before, with run={path!r}, if_exists='resume'"


def default_executor(settings: Settings) -> Executor:
    """Workers on this machine, or this process."""
    if settings.workers == 0:
        return InlineExecutor()
    return LocalExecutor(
        settings.workers, settings.threads, seats=seats(settings.devices, settings.workers)
    )


def device_of(settings: Settings) -> str:
    """What workers call the device that they compute on: of several GPUs each sees its own."""
    return settings.devices[0] if trains_here(settings) else in_worker(settings.devices)


def trains_here(settings: Settings) -> bool:
    """Whether this process itself trains."""
    return settings.executor is None and settings.workers == 0


def run_context(settings: Settings) -> RunContext:
    """What workers are told about the run."""
    workers = max(1, settings.workers)
    cores = resources.usable_cores()
    context = RunContext(
        build=settings.build,
        train=settings.train,
        validation=settings.validation,
        folds=settings.folds,
        seed=settings.seed,
        epochs=settings.epochs,
        batch_size=settings.batch_size,
        eval_batch_size=settings.eval_batch_size,
        drop_last=settings.drop_last,
        stagger=settings.stagger,
        threads=settings.threads,
        # A prefetch thread pays only on a core that nobody computes on.
        loader_threads=1 if cores > workers * settings.threads else 0,
        deterministic=settings.deterministic,
        live_models=settings.live_models,
        live_bytes=available_memory() // (2 * workers),  # and what GPUs have, where these are
        unit_timeout=settings.unit_timeout,
        device=device_of(settings),
        state_dir=str(settings.state_dir.resolve()),
        epoch_dir=str((settings.folder / "states").resolve()),
        log_dir=str((settings.folder / "trials").resolve()),
        torch_flags=flags.torch_flags(),
        warning_filters=carried_filters(),
    )
    return with_shares(context, seats(settings.devices, 1)) if trains_here(settings) else context
