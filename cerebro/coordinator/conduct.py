"""Train a new or resumed run, from starting its workers to closing it."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from cerebro.arguments import warn_user
from cerebro.coordinator.before_training import (
    check_hop,
    check_room,
    find_wrong_ranking,
    require_build,
    warn_if_reordered,
)
from cerebro.coordinator.coordinator import Coordinator
from cerebro.coordinator.failures import explain_missing_metric
from cerebro.coordinator.restore import Previous, reopen_run
from cerebro.coordinator.searcher_record import is_describable
from cerebro.coordinator.trials import make_recordable
from cerebro.coordinator.user import Hooks
from cerebro.errors import RunError, explain_interrupt, text_of
from cerebro.executors.base import Executor
from cerebro.executors.inline import InlineExecutor
from cerebro.executors.local import LocalExecutor
from cerebro.executors.seats import set_memory_shares
from cerebro.machine import resources
from cerebro.machine.devices import are_gpus, assign_devices, is_gpu, name_in_worker
from cerebro.machine.environment import hash_seed
from cerebro.machine.libraries import present_settings, recorded_settings
from cerebro.machine.local import LOCAL, Machine
from cerebro.machine.program import edited_since_import, find_stale_definitions
from cerebro.machine.resources import available_memory
from cerebro.machine.signals import TERMINATED, Terminated, defer_interrupts, raise_on_sigterm
from cerebro.report.displays import make_progress
from cerebro.report.findings import offer_graph
from cerebro.report.format import count_noun
from cerebro.results.result import Result, note_last
from cerebro.results.saved_run import SavedRun
from cerebro.run.folder import OwnedRun, make_run, sweep_states
from cerebro.run.settings import Settings
from cerebro.searchers.base import Searcher, Suggestion
from cerebro.worker.messages import ModelFacts, RunContext, RunFolders, WorkerShare
from cerebro.worker.trial_warnings import carry_filters


def conduct(
    settings: Settings,
    searcher: Searcher,
    *,
    first: Suggestion | None = None,
    previous: Previous | None = None,
    machine: Machine = LOCAL,
) -> Result:
    """Train until the searcher is done, the time is up, or the user stops the run.

    `first` is the first suggestion for a new run; `previous` is what an earlier process left of a
    resumed one. The searcher is already set up. Raise RunError if no trial can be trained. After
    the run was closed, raise KeyboardInterrupt on Ctrl-C and SystemExit with status 143 on SIGTERM,
    with a message that says how to resume it.
    """
    warn_of_edits()
    with exit_on_sigterm():
        recorded = previous.saved.environment if previous else None
        with RunSession(settings, make_run_context(settings, recorded), machine) as session:
            executor, context, progress = session.executor, session.context, session.progress
            if settings.executor is None:  # other executors copy the data to where they train
                for data in (settings.train, settings.validation):
                    if data is not None and not data.shards.are_here():
                        progress.phase("copying the data")
                        data.fetch()
            # Fail before a file is made if something cannot be sent to workers.
            workers = list(executor.start(context))
            if settings.executor is not None and getattr(executor, "workers", None) is None:
                # Only now is it known how many there are.
                settings = replace(settings, workers=len(workers))
            if previous is None:
                session.opened, restored = make_run(settings, machine), None
            else:
                # A wrong build must not turn finished trials into failed ones.
                workers = require_build(
                    executor, workers, context, previous.find_trials_to_extend()
                )
                order = previous.saved.meta.get("parameter_order")
                if order and trains_here(settings):
                    warn_if_reordered(executor, workers[0], previous.saved.records[0], order)
                session.opened, restored = reopen_run(previous, settings, context, machine)
            store = session.opened.store
            session.result = result = Result(settings.folder, build=settings.build)
            result.saved.before_reading = store.flush
            session.hooks = hooks = Hooks(settings.callbacks, result.trial_of)
            session.coordinator = coordinator = Coordinator(
                settings, context, searcher, executor, store, hooks, progress, first, restored
            )
            hooks.notify("on_run_start", result)
            store.listeners = hooks.of_commits
            starting: list[int] = []
            if first is not None:
                progress.phase("trying the first configuration")
                config = make_recordable(first.config)[0]
                elsewhere = settings.executor is not None
                tried = check_hop(executor, workers, context, config, wait_for_all=elsewhere)
                coordinator.events.note_first_warnings(tried.warned)
                coordinator.events.note_findings(find_wrong_ranking(settings.ranking))
                coordinator.events.note_findings(tried.findings_to_show())
                tried.raise_if_broken()
                coordinator.words = tried.model.words
                if tried.model.wrapped:
                    progress.advise(tried.model.wrapped)
                coordinator.events.unread.begin(config, tried.read)
                if tried.model.declares_metrics:
                    require_metrics(settings, tried.model)
                if settings.workers > 0:
                    tried.warn_if_misplaced(context.device)
                if tried.model.state_bytes:
                    check_room(settings, searcher, tried.model.state_bytes, machine.disk)
                if tried.gain is not None:
                    store.set_meta("graph_gain", list(tried.gain))
                    if is_gpu(context.device) and (offer := offer_graph(tried.gain)):
                        progress.advise(offer)  # on a CPU only a long search is worth the words
                if tried.environment is not None:  # PyTorch may not be imported yet in this process
                    store.set_meta("environment", tried.environment)
                store.set_meta("parameter_order", tried.model.parameter_order)
                workers, starting = tried.workers, tried.starting
            coordinator.run(workers, starting)
        result.refresh()
        progress.finished(coordinator.snapshot(), result)
        try:
            hooks.notify("on_run_end", result)
        finally:
            hooks.close()
        return note_last(result)


def require_metrics(settings: Settings, model: ModelFacts) -> None:
    """Raise RunError or InputError if ranking or early stopping needs another metric."""
    missing = explain_missing_metric(
        settings.ranking.metric, model.metrics, validated=settings.validates, words=model.words
    )
    if missing is not None:
        raise RunError(f"no trial can be ranked: {missing}")
    if settings.strategy.stop is not None:
        settings.strategy.stop.check_metrics(model.metrics)


def warn_of_edits() -> None:
    """Warn if the user has edited a module, but this process still has the old version."""
    edited = edited_since_import()
    if edited:
        were, them = ("was", "it") if len(edited) == 1 else ("were", "them")
        warn_user(
            f"{', '.join(edited)} {were} edited after this program imported "
            f"{them}, and the search trains what was imported: importlib.reload() or a new program "
            "takes the edited one"
        )
    older = find_stale_definitions()
    if older:
        warn_user(
            f"{'; '.join(older)} from before that was reloaded, and workers=0 trains with it: "
            "reload the first one, too, with importlib.reload()"
        )


@contextlib.contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Exit on SIGTERM in the block, with the message that Ctrl-C prints."""
    try:
        with raise_on_sigterm():
            yield
    except Terminated as error:
        text = str(error) or "terminated before any trial began; nothing was kept"
        with contextlib.suppress(OSError, ValueError):  # the terminal may be gone
            print(f"\n{text}", file=sys.stderr, flush=True)
        raise SystemExit(TERMINATED) from None


class RunSession:
    """Holds the resources of a process that trains a run, and closes them, the owner's lock last.

    On an exception, the workers are killed, and all finished work is kept.
    """

    def __init__(self, settings: Settings, context: RunContext, machine: Machine) -> None:
        self.context = context
        self._machine = machine
        self.progress = make_progress(settings.progress)
        self.executor: Executor = settings.executor or make_executor(settings, machine)
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
        self.opened.store.set_meta("ended", self._machine.clock.time())
        close_store(self.opened, Path(self.context.folders.slots))
        self.opened.owner.release()
        assert self.hooks is not None
        self.hooks.notify_closed()

    def _abandon(self, error: BaseException) -> None:
        """Close a run that ends with `error`: try every step, let no failure hide `error`."""
        try:
            with defer_interrupts(error):
                for step in self._list_last_steps(error):
                    with contextlib.suppress(Exception):
                        step()
        except KeyboardInterrupt as late:
            late.args = (f"interrupted; the run had failed before: {text_of(error)}",)
            raise

    def _list_last_steps(self, error: BaseException) -> Iterator[Callable[[], object]]:
        yield partial(self.executor.close, kill=True)
        if self.opened is not None:
            record: dict[str, Any] = {"status": "stopped", "ended": self._machine.clock.time()}
            if not isinstance(error, KeyboardInterrupt):
                cause = self.hooks.cause_of(error) if self.hooks else text_of(error, 2000)
                record |= {"status": "failed", "error": cause}
            if self.coordinator is not None:
                yield self.coordinator.end_open_trials
                shown = self.coordinator.snapshot
                yield lambda: self.progress.ended_early(shown(), error)
            for item in record.items():
                yield partial(self.opened.store.set_meta, *item)
            yield partial(close_store, self.opened, Path(self.context.folders.slots))
            yield self.opened.owner.release
            if self.hooks is not None:
                yield self.hooks.notify_closed
        yield self.progress.close
        if self.result is not None:
            yield partial(complete_error, error, self.result)
        if self.hooks is not None:
            yield self.hooks.close


def close_store(opened: OwnedRun, state_dir: Path) -> None:
    """Close the store, then delete state files that it no longer references."""
    opened.store.close()
    with contextlib.suppress(OSError):
        sweep_states(opened.store.folder, state_dir, opened.store.disk)


def complete_error(error: BaseException, result: Result) -> None:
    """Add the run's result to the error that ended it or, after Ctrl-C, how to resume the run."""
    result.refresh()
    note_last(result)
    if isinstance(error, RunError):
        error.result = result
    elif isinstance(error, KeyboardInterrupt):
        # A build that the user has not written says what can be done without it.
        lines_for = getattr(result.saved.known_build, "lines_on_interrupt", None)
        if lines_for is None:
            explain_interrupt(error, *explain_resuming(result), result)
        else:
            lines = lines_for(describe_kept(result), str(result.path))
            explain_interrupt(error, lines, "\n".join(lines), result)


def explain_resuming(result: Result) -> tuple[list[str], str]:
    """Return what an interrupted run has kept, and how to resume it, for notebooks and others."""
    path, saved = str(result.path), result.saved
    # A notebook can find a `build` that has a name again.
    in_notebook = f"result = cerebro.resume({path!r}{'' if saved.recipe.has_name else ', build'})"
    if not is_describable(saved.meta["searcher_class"]):
        command = in_notebook = format_same_call(saved)
    elif saved.recipe.is_importable:
        command = f"python -m cerebro resume {shlex.quote(path)}"
    else:
        command = f"cerebro.resume({path!r}, build)"
        script = find_own_script(saved)
        if script is not None:  # only it has build, and it would start the search again
            by_name = f"python -m cerebro resume {shlex.quote(path)}"
            if not saved.recipe.script_is_unchanged:
                by_name += f" --build {shlex.quote(script)}"
            command = f"{by_name}\n\nor, where build is defined:\n\n  {command}"
    kept = describe_kept(result)
    seen = f"to see it:     result = cerebro.open({path!r})"
    lines = [kept, seen, f"to resume it:  {in_notebook}"]
    return lines, f"{kept}. To resume it:\n\n  {command}"


def find_own_script(saved: SavedRun) -> str | None:
    """Return the path of the running script if it defines the run's ``build``."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    defines = saved.recipe.module == "__main__" and "<" not in saved.recipe.qualname
    if not defines or file is None or not Path(file).is_file():
        return None
    there = Path(file).absolute()
    return os.fspath(there.relative_to(Path.cwd()) if Path.cwd() in there.parents else there)


def describe_kept(result: Result) -> str:
    trials, epochs = len(result.trials), sum(len(trial.history) for trial in result.trials)
    if trials == 0:
        return f"interrupted before the first trial began; the search is kept in {result.path}"
    return (
        f"interrupted: {count_noun(trials, 'trial')} with {count_noun(epochs, 'finished epoch')} "
        f"{'is' if trials == 1 else 'are'} kept in {result.path}"
    )


def format_same_call(saved: SavedRun) -> str:
    """Return the call that resumes a run whose searcher cannot be recreated from its record."""
    path = str(saved.path)
    if saved.recipe.takes_trial:
        return f"cerebro.optuna.optimize(...) as before, with run={path!r}"
    return f"the search as before, with run={path!r}, if_exists='resume'"


def make_executor(settings: Settings, machine: Machine) -> Executor:
    if settings.workers == 0:
        return InlineExecutor(machine)
    seats, threads = assign_devices(settings.devices, settings.workers), settings.exactness.threads
    return LocalExecutor(settings.workers, threads, seats=seats, clock=machine.clock)


def trains_here(settings: Settings) -> bool:
    return settings.executor is None and settings.workers == 0


def make_run_context(settings: Settings, recorded: Mapping[str, Any] | None = None) -> RunContext:
    """Return what workers need of a run; `recorded` is the environment in which it began."""
    workers, devices = max(1, settings.workers), settings.devices
    # A prefetch thread pays off only on a core that no worker uses. The lanes of a GPU take turns.
    processes = min(workers, len(devices)) if are_gpus(devices) else workers
    has_idle_cores = resources.usable_cores() > processes * settings.exactness.threads
    folders = (settings.state_dir, settings.folder / "states", settings.folder / "trials")
    context = RunContext(
        build=settings.build,
        train=settings.train,
        validation=settings.validation,
        folds=settings.folds,
        folders=RunFolders(*(str(folder.resolve()) for folder in folders)),
        batches=settings.batches,
        exactness=settings.exactness,
        limits=settings.limits,
        share=WorkerShare(
            loader_threads=int(has_idle_cores),
            live_bytes=available_memory() // (2 * workers),  # GPUs add their own memory
        ),
        # A worker process sees only its own GPU.
        device=devices[0] if trains_here(settings) else name_in_worker(devices),
        libraries=present_settings() if recorded is None else recorded_settings(recorded),
        hash_seed=hash_seed(None if recorded is None else recorded.get("variables", {})),
        warning_filters=carry_filters(),
    )
    if trains_here(settings):
        return set_memory_shares(context, assign_devices(devices, 1))
    return context
