"""`cerebro.resume`: go on with a run that was interrupted, or train a finished one further."""

from __future__ import annotations

import contextlib
import os
import uuid
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import cerebro.environment as environment
from cerebro.conduct import Opened, conduct, run_context, same_call
from cerebro.devices import (
    CPU,
    CUBLAS_VARIABLE,
    CUBLAS_WORKSPACE,
    are_gpus,
    computing_with,
    recorded,
)
from cerebro.errors import InputError
from cerebro.executors.base import Executor
from cerebro.guard import refuse
from cerebro.keywords import RESUME, answers
from cerebro.leftovers import sweep
from cerebro.live_trial import LiveTrial
from cerebro.new_run import claim_state_dir, make_folders
from cerebro.owner import Owner
from cerebro.recorded_settings import check_trials, refuse_changes, settings_of
from cerebro.restore import Restored, Restorer
from cerebro.result import Result
from cerebro.retelling import retell
from cerebro.saved_run import SavedRun
from cerebro.searchers import make_searcher, set_up
from cerebro.searchers.base import Searcher
from cerebro.searchers.description import NoSearcher, make_again
from cerebro.settings import Settings, check_executor, devices_of, whole_number
from cerebro.space import Space
from cerebro.store import (
    FILE,
    Store,
    check_whole,
    count_said,
    read_answers,
    read_clock,
    read_unit_seconds,
    reader,
)
from cerebro.trial import EpochRecord, TrialRecord
from cerebro.unit import RunContext


@dataclass(frozen=True)
class Wish:
    """What is to be trained of a run."""

    epochs: int | None = None
    """Until so many epochs are done; None: as before."""
    trials: tuple[int, ...] | None = None
    """Only these; None: whatever is not over."""

    trials_each: int = 1
    """How many of the store's trials make one that is named here."""

    def includes(self, record: TrialRecord) -> bool:
        """Whether a trial goes on."""
        further = self.epochs is not None and self.epochs > record.done
        if self.trials is not None:
            return record.number // self.trials_each in self.trials and (
                record.status != "finished" or further
            )
        if record.status == "finished":
            return further
        return record.is_open


@answers(RESUME)
def resume(
    run: str | os.PathLike[str] | Result,
    build: Callable[..., Any] | None = None,
    *,
    data: Any = None,
    validation: Any = None,
    epochs: int | None = None,
    trials: Sequence[int] | int | None = None,
    workers: int | None = None,
    callbacks: Sequence[Any] = (),
    progress: Literal["auto", "table", "lines"] | bool = "auto",
    executor: Executor | None = None,
) -> Result:
    """Go on with a run: after Ctrl-C, a crash or a loss of power, or to train it further.

    Trials go on from their last committed unit, or, where that was lost with the power,
    from their last finished epoch. What they become is bit for bit what an undisturbed
    run would have made of them. Trials that failed or diverged stay so, unless they are
    named in `trials`. A run that is finished and has nothing left to train is returned as
    it is. Time limits count anew.

    Parameters
    ----------
    run
        The run's folder, or its result.
    build
        The run's ``build``, where it cannot be imported again.
    data, validation
        Where the run's data are now, if they have moved: data sets or paths.
    epochs
        Train until so many epochs are done; at least as many as before. ``info.epochs`` is
        this number for what is trained from now on.
    trials
        Numbers of the trials that are to go on, whatever their status; default: all that
        are not over, and with more `epochs` the finished ones.
    workers
        Worker processes, 0 for none; default: as many as the run had. Compute threads
        remain those of the run, because they change the bits.
    callbacks, progress, executor
        As for `cerebro.search`.

    Returns
    -------
    Result
        The run, as far as it got.

    Raises
    ------
    InputError
        If there is no such run, another process trains it, its data or ``build`` are not
        found or not what they were, or an argument is wrong.
    RunError, CorruptDataError
        As `cerebro.search` does.
    """
    refuse("cerebro.resume")
    if isinstance(run, Result):
        build = build or run.saved.known_build
    saved = SavedRun(run.path if isinstance(run, Result) else run, build=build)
    path = saved.path
    with Owner.take(saved.folder) as owner:
        check_whole(saved.folder)
        saved.refresh()
        wish = Wish(
            whole_number("epochs", epochs, 1, optional=True),
            check_trials(trials, len(saved.configurations)),
            saved.trials_each,
        )
        check_epochs(saved, wish)
        if is_over(saved, wish):
            tidy(saved)
            return Result(path, build=build)
        settings = settings_of(
            saved,
            build=build,
            data=data,
            validation=validation,
            workers=workers,
            callbacks=callbacks,
            progress=progress,
        )
        if executor is not None:
            wanted = "auto" if are_gpus(recorded(saved.settings)) else CPU
            settings = replace(
                settings,
                executor=check_executor(executor),
                devices=devices_of(wanted, None, executor),
            )
        return go_on(saved, owner, with_epochs(settings, wish), wish, None)


def resume_search(settings: Settings, searcher: Searcher) -> Result:
    """Go on with the run that a search with the same arguments has begun.

    Parameters
    ----------
    settings
        Those of the search that was asked for; more epochs or trials than before are
        trained too.
    searcher
        As it was made, not set up.

    Raises
    ------
    InputError
        If the settings would have given other trials, or another process trains the run.
    """
    saved = SavedRun(settings.folder, build=settings.build)
    with Owner.take(saved.folder) as owner:
        check_whole(saved.folder)
        saved.refresh()
        refuse_changes(saved, settings)
        before = saved.settings
        further = settings.epochs if settings.epochs != before["epochs"] else None
        wish = Wish(further, trials_each=saved.trials_each)
        if is_over(saved, wish) and settings.n_trials == before["n_trials"]:
            tidy(saved)
            return Result(settings.folder, build=settings.build)
        saved.recipe.warn_if_changed(settings.build)
        return go_on(saved, owner, settings, wish, searcher)


def is_over(saved: SavedRun, wish: Wish) -> bool:
    """Whether nothing is left to train."""
    return saved.meta["status"] == "finished" and not any(map(wish.includes, saved.records))


def tidy(saved: SavedRun) -> None:
    """Delete what is left by a process that died when it had nothing to do but to tidy up."""
    with contextlib.suppress(OSError):
        if (saved.folder / (FILE + "-wal")).exists():
            Store.open(saved.folder).close()
        sweep(saved.folder, saved.state_dir)


def check_epochs(saved: SavedRun, wish: Wish) -> None:
    """Epochs that were asked for are never taken back."""
    before = saved.settings["epochs"]
    if wish.epochs is not None and wish.epochs < before:
        raise InputError(
            f"epochs={wish.epochs}, but the run trains for {before}: give more, or leave it out"
        )


def with_epochs(settings: Settings, wish: Wish) -> Settings:
    """Return the settings: the run's number of epochs grows with that of all its trials."""
    if wish.epochs is None or wish.trials is not None:
        return settings
    return replace(settings, epochs=wish.epochs)


# --- going on ----------------------------------------------------------------


def go_on(
    saved: SavedRun, owner: Owner, settings: Settings, wish: Wish, searcher: Searcher | None
) -> Result:
    """Train what is left of a run that belongs to this process.

    Parameters
    ----------
    searcher
        Not set up; None: made again from the run's record.
    """
    the_searcher = searcher_of(saved, settings, wish, searcher)
    flags = saved.environment.get("torch", {})
    context = replace(run_context(settings), torch_flags=flags)
    now = environment.describe(settings.threads, settings.devices[0])
    if are_gpus(settings.devices):  # what is there and set where CUDA starts, which is not here
        now["variables"].setdefault(CUBLAS_VARIABLE, CUBLAS_WORKSPACE)
        if about := computing_with(settings.devices):
            now["cuda"] = dict(about)
    lines = environment.differences(saved.environment, now)
    # Workers are given the flags that the run was begun with.
    lines = [line for line in lines if not line.startswith("torch.")]
    if lines:
        warnings.warn(
            f"{saved.path} goes on in another environment, which can change the states from here "
            f"on: {'; '.join(lines)}",
            stacklevel=4,
        )
    return conduct(
        settings,
        context,
        the_searcher,
        partial(open_again, saved, owner, settings, context, wish, lines),
    )


def searcher_of(
    saved: SavedRun, settings: Settings, wish: Wish, searcher: Searcher | None
) -> Searcher:
    """Return the run's searcher as it was when the run was left.

    Raises
    ------
    InputError
        If it cannot be made again, or trials are to be trained further of which it has
        not decided yet.
    """
    description = saved.meta.get("searcher_class") or {}
    over = saved.meta["status"] == "finished" and settings.n_trials == saved.settings["n_trials"]
    apart = wish.epochs is not None or wish.trials is not None
    if apart and description.get("adaptive") and not over:
        raise InputError(
            f"{saved.path} is not finished, and its searcher decides which trials train how long: "
            "resume it without epochs= and trials= first"
        )
    if over or wish.trials is not None:
        return NoSearcher()
    made = searcher or (make_again(description) if description else None)
    if made is None or settings.space_json is None:
        if not description.get("adaptive") and settings.n_trials == len(saved.configurations):
            return NoSearcher()
        raise InputError(
            f"the searcher {settings.searcher_name} of {saved.path} cannot be made again from its "
            f"record: run the script that began the run again, {same_call(saved)}"
        )
    made = make_searcher(made)
    set_up(made, Space.from_json(settings.space_json), settings)
    if "searcher" in saved.meta:
        made.load_state_dict(saved.meta["searcher"])
        retell(saved, settings, made)
    return made


def open_again(
    saved: SavedRun,
    owner: Owner,
    settings: Settings,
    context: RunContext,
    wish: Wish,
    differences: Sequence[str],
) -> tuple[Opened, Restored]:
    """Open the store for writing and find out where every trial stands."""
    run_id = saved.meta.get("id") or uuid.uuid4().hex
    make_folders(settings)
    claim_state_dir(settings, run_id)
    store = Store.open(saved.folder)
    try:
        restored = restore(saved, store, settings, context, wish)
        process = owner.process
        text = f"by {process}, with {settings.workers} workers"
        with store.group():
            store.add_event(restored.seconds, "resumed", "; ".join([text, *differences]))
            for key, value in (
                ("id", run_id),
                ("status", "running"),
                ("error", None),
                ("paused", False),
                ("owner", {"pid": process.pid, "host": process.host}),
                ("settings", settings.record()),
            ):
                store.set_meta(key, value)
        store.flush()
    except BaseException:
        store.close()
        raise
    return Opened(owner, store), restored


def restore(
    saved: SavedRun, store: Store, settings: Settings, context: RunContext, wish: Wish
) -> Restored:
    """Bring all trials back: those that go on with their positions, the others at rest."""
    with reader(saved.folder) as connection:
        clock = read_clock(connection)
        restorer = Restorer(
            Path(context.epoch_dir),
            Path(context.state_dir),
            context.units_per_epoch,
            read_unit_seconds(connection),
        )
        restored = Restored(
            seconds=clock,
            loop=saved.meta.get("search_loop"),
            answers=read_answers(connection),
            partly=wish.trials is not None and not _has_suggested_all(saved),
            said=count_said(connection),
        )
    before = saved.settings["epochs"]
    restorer.clear_unknown(len(saved.records))
    with store.group():
        for record in saved.records:
            if (wish.trials is None and record.is_open) or wish.includes(record):
                trial, lost = _reopen(record, store, restorer, wish, before)
                restored.lost[record.number] = lost
            else:
                trial = _rest(record, store, restorer)
                if settings.epochs != before:
                    _remember_epochs(record, store, before)
            restored.trials.append(trial)
    saved.forget_trials()
    return restored


def _has_suggested_all(saved: SavedRun) -> bool:
    """Whether the searcher of the run has nothing more to suggest."""
    loop = saved.meta.get("search_loop") or {}
    return saved.meta["status"] == "finished" or bool(loop.get("is_exhausted"))


def _reopen(
    record: TrialRecord, store: Store, restorer: Restorer, wish: Wish, before: int
) -> tuple[LiveTrial, list[EpochRecord]]:
    """Let a trial go on; return it and its epochs that have lost their rows."""
    if wish.epochs is not None and wish.epochs > record.target_epochs:
        record.target_epochs = wish.epochs
        store.set_epochs(record.number, wish.epochs)
    recorded = {epoch.epoch: epoch.state_hash for epoch in record.epochs}
    standing = restorer.stand(record)
    info_epochs = record.info_epochs(standing.position, before)
    if wish.epochs is not None and wish.epochs != info_epochs:
        _remember_epochs(record, store, before)
        info_epochs = wish.epochs
        record.extensions += ((standing.position, info_epochs),)
        store.add_extension(record.number, standing.position, info_epochs)
    # A rule that had stopped it begins anew: somebody wants it to go on.
    anew = record.status == "stopped" and not record.resumable
    record.status, record.resumable = "waiting", False
    record.error = record.traceback = None
    store.set_status(record.number, "waiting")
    trial = LiveTrial(
        record,
        position=standing.position,
        first_position=record.first_epoch * restorer.units_per_epoch,
        dispatches=standing.attempt,
        epoch_seconds=standing.epoch_seconds,
        origin=standing.origin,
        info_epochs=info_epochs,
        expected={e: h for e, h in recorded.items() if e >= record.done},
        history=[] if anew else [epoch.to_history() for epoch in record.epochs],
    )
    return trial, standing.lost


def _remember_epochs(record: TrialRecord, store: Store, epochs: int) -> None:
    """Write down what ``info.epochs`` has been so far, because the run's number changes."""
    if not record.extensions:
        record.extensions = ((0, epochs),)
        store.add_extension(record.number, 0, epochs)


def _rest(record: TrialRecord, store: Store, restorer: Restorer) -> LiveTrial:
    """Leave a trial as it is; one that is not over can go on another time."""
    if record.is_open:
        record.status, record.resumable = "stopped", True
        store.set_status(record.number, "stopped", resumable=True)
    else:
        restorer.clear(record)
    # One that was stopped early may still stand for its last metrics: the rule is asked again.
    stopped = record.status == "stopped"
    return LiveTrial(record, history=[e.to_history() for e in record.epochs] if stopped else [])
