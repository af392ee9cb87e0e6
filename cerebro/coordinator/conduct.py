"""Train a run, new or resumed, from the start of its workers to its end."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from cerebro.coordinator.callbacks import Hooks
from cerebro.coordinator.coordinator import Coordinator
from cerebro.coordinator.dry_run import dry_run
from cerebro.coordinator.restore import Previous, open_again
from cerebro.coordinator.room import check_room
from cerebro.coordinator.searcher_record import is_describable
from cerebro.coordinator.trials import recordable
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
from cerebro.run.folder import OwnedRun, make_run, sweep
from cerebro.run.settings import Settings
from cerebro.searchers.base import Searcher, Suggestion
from cerebro.worker.messages import RunContext
from cerebro.worker.trial_warnings import carried_filters


def conduct(
    settings: Settings,
    searcher: Searcher,
    *,
    first: Suggestion | None = None,
    previous: Previous | None = None,
) -> Result:
    """Train until the searcher is done, the time is up or the user stops the run.

    Parameters
    ----------
    settings, searcher
        The search's settings, and its searcher, which has been set up.
    first
        The searcher's first suggestion, in a new run.
    previous
        The run as an earlier process left it, if it is resumed.

    Raises
    ------
    RunError
        If no trial can be trained.
    KeyboardInterrupt
        On Ctrl-C, when the run is closed; the message says how to resume it.
    SystemExit
        On SIGTERM, with status 143, after printing the same message.
    """
    with exit_on_sigterm():
        torch_flags = previous.saved.environment.get("torch", {}) if previous else None
        with RunSession(settings, run_context(settings, torch_flags)) as session:
            executor, context = session.executor, session.context
            # Fail before a file is made if something cannot be sent to workers.
            workers = list(executor.start(context))
            if previous is None:
                session.opened, restored = make_run(settings), None
            else:
                session.opened, restored = open_again(previous, settings, context)
            store = session.opened.store
            session.result = result = Result(settings.folder, build=settings.build)
            result.saved.before_reading = store.flush
            session.hooks = hooks = Hooks(settings.callbacks, result.trial_of)
            session.coordinator = coordinator = Coordinator(
                *(settings, context, searcher, executor, store, hooks, session.progress),
                *(first, restored),
            )
            hooks.notify("on_run_start", result)
            if first is not None:
                tried = dry_run(executor, workers, context, recordable(first.config)[0])
                coordinator.note_first_warnings(tried.warned)
                tried.raise_if_broken()
                if settings.workers > 0:
                    tried.warn_if_misplaced(context.device)
                if tried.state_bytes:
                    check_room(settings, searcher, tried.state_bytes)
                if tried.environment is not None:  # here PyTorch need not be imported yet
                    store.set_meta("environment", tried.environment)
                workers = tried.workers
            coordinator.run(workers)
        result.refresh()
        session.progress.finished(coordinator.snapshot(), result)
        hooks.notify("on_run_end", result)
        return result


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """On SIGTERM in the block, print the message of a Ctrl-C, and exit."""
    try:
        with terminable():
            yield
    except Terminated as error:
        text = str(error) or "terminated before any trial began; nothing was kept"
        print(f"\n{text}", file=sys.stderr, flush=True)
        raise SystemExit(TERMINATED) from None


class RunSession:
    """The resources that a process holds while it trains a run; closes them at the end.

    Normally, the workers end and the run gets the coordinator's status. On any exception, the
    workers are killed and all finished work is kept. In both cases the run's owner lock is released
    last.
    """

    def __init__(self, settings: Settings, context: RunContext) -> None:
        self.context = context
        self.progress = make_progress(settings.progress)
        self.executor: Executor = settings.executor or default_executor(settings)
        self.opened: OwnedRun | None = None
        self.result: Result | None = None
        self.hooks: Hooks | None = None
        self.coordinator: Coordinator | None = None

    def __enter__(self) -> RunSession:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            self._abandon(error)
            return
        try:
            self._finish()
        except BaseException as late:
            self._abandon(late)
            raise

    def _finish(self) -> None:
        assert self.opened is not None and self.coordinator is not None
        self.executor.close()
        self.opened.store.set_meta("status", self.coordinator.status)
        self.opened.store.set_meta("ended", time.time())
        close(self.opened, Path(self.context.state_dir))
        self.opened.owner.release()

    def _abandon(self, error: BaseException) -> None:
        """Close a run that ends with `error`, which gets the run as its result.

        Every step is tried, even if others fail, and none of them hides `error`.
        """
        try:
            with uninterrupted(error):
                for step in self._last_steps(error):
                    with contextlib.suppress(Exception):
                        step()
        except KeyboardInterrupt as late:
            late.args = (f"interrupted; the run had failed before: {text_of(error)}",)
            raise

    def _last_steps(self, error: BaseException) -> Iterator[Callable[[], object]]:
        yield partial(self.executor.close, kill=True)
        yield self.progress.close
        if self.opened is not None:
            record: dict[str, Any] = {"status": "stopped", "ended": time.time()}
            if not isinstance(error, KeyboardInterrupt):
                cause = self.hooks.cause_of(error) if self.hooks else text_of(error, 2000)
                record |= {"status": "failed", "error": cause}
            if self.coordinator is not None:
                yield self.coordinator.end_open_trials
            for item in record.items():
                yield partial(self.opened.store.set_meta, *item)
            yield partial(close, self.opened, Path(self.context.state_dir))
            yield self.opened.owner.release
        if self.result is not None:
            yield partial(explain, error, self.result)


def close(opened: OwnedRun, state_dir: Path) -> None:
    """Close the store, then delete state files that it no longer references."""
    opened.store.close()
    with contextlib.suppress(OSError):
        sweep(opened.store.folder, state_dir)


def explain(error: BaseException, result: Result) -> None:
    """Give an error the closed run as its result, and an interrupt the command to resume it."""
    result.refresh()
    if isinstance(error, RunError):
        error.result = result
    elif isinstance(error, KeyboardInterrupt):
        error.args = (how_to_resume(result),)


def how_to_resume(result: Result) -> str:
    """Return a message: what an interrupted run has kept, and how to resume it."""
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
        f"{path}. To resume it:\n\n  {command}"
    )


def same_call(saved: SavedRun) -> str:
    """Return the call that resumes a run whose searcher cannot be made from its record."""
    path = str(saved.path)
    if saved.recipe.takes_trial:
        return f"cerebro.optuna.optimize(...) as before, with run={path!r}"
    return f"the search as before, with run={path!r}, if_exists='resume'"


def default_executor(settings: Settings) -> Executor:
    """Return an executor that trains in workers on this machine or in this process."""
    if settings.workers == 0:
        return InlineExecutor()
    return LocalExecutor(
        settings.workers, settings.threads, seats=seats(settings.devices, settings.workers)
    )


def device_of(settings: Settings) -> str:
    """Return the device's name within a worker, which sees only its own GPU."""
    return settings.devices[0] if trains_here(settings) else in_worker(settings.devices)


def trains_here(settings: Settings) -> bool:
    """Whether this process itself trains."""
    return settings.executor is None and settings.workers == 0


def run_context(settings: Settings, torch_flags: Mapping[str, Any] | None = None) -> RunContext:
    """Return what workers need to know about the run.

    Parameters
    ----------
    torch_flags
        Those that a resumed run began with; default: those of this process.
    """
    workers = max(1, settings.workers)
    cores = resources.usable_cores()
    context = RunContext(
        **settings.training(),
        build=settings.build,
        train=settings.train,
        validation=settings.validation,
        folds=settings.folds,
        # A prefetch thread pays off only on a core that no worker uses.
        loader_threads=1 if cores > workers * settings.threads else 0,
        live_bytes=available_memory() // (2 * workers),  # plus the memory of GPUs, if any
        device=device_of(settings),
        state_dir=str(settings.state_dir.resolve()),
        epoch_dir=str((settings.folder / "states").resolve()),
        log_dir=str((settings.folder / "trials").resolve()),
        torch_flags=flags.torch_flags() if torch_flags is None else torch_flags,
        warning_filters=carried_filters(),
    )
    return with_shares(context, seats(settings.devices, 1)) if trains_here(settings) else context
