"""Implement `cerebro.resume`: resume an interrupted run, or train a finished one further."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from cerebro.api.settings import (
    check_callbacks,
    check_executor,
    choose_worker_count,
    devices_of,
    set_up_searcher,
)
from cerebro.arguments import (
    RESUME,
    check_whole_number,
    explain_keywords,
    warn_user,
    worker_count,
)
from cerebro.callbacks import Mirror
from cerebro.control import REQUESTS, Command
from cerebro.coordinator.conduct import conduct, format_same_call, trains_here
from cerebro.coordinator.restore import Previous, ResumeRequest, has_decided_all
from cerebro.coordinator.searcher_record import NoSearcher, catch_up, make_again
from cerebro.data import Dataset
from cerebro.errors import CorruptDataError, InputError
from cerebro.executors.base import Executor
from cerebro.machine import environment
from cerebro.machine.devices import (
    CPU,
    CUBLAS_VARIABLE,
    CUBLAS_WORKSPACE,
    are_gpus,
    choose_resume_devices,
    describe_device,
)
from cerebro.machine.files import path_of
from cerebro.machine.guard import refuse
from cerebro.machine.libraries import KERAS
from cerebro.machine.local import LOCAL, Machine
from cerebro.machine.objects import Objects, is_url
from cerebro.report.displays import announce, shows_progress
from cerebro.results.result import Result, note_last
from cerebro.results.saved_run import SavedRun
from cerebro.run.folder import sweep_states
from cerebro.run.mirror import download
from cerebro.run.owner import Owner
from cerebro.run.records import Ranking
from cerebro.run.settings import Batches, Exactness, Limits, Settings, Strategy, read_group
from cerebro.run.states import remove_temporary
from cerebro.run.store import (
    FILE,
    Store,
    check_whole_store,
    decode,
    encode,
    read_actions,
    reader,
    unused_folder,
)
from cerebro.searchers import make_searcher
from cerebro.searchers.base import Searcher
from cerebro.searchers.metrics import EarlyStopping
from cerebro.space import Space


@explain_keywords(RESUME)
@shows_progress
def resume(
    run: str | os.PathLike[str] | Result,
    build: Callable[..., Any] | None = None,
    *,
    data: Any = None,
    validation: Any = None,
    epochs: int | None = None,
    trials: Sequence[int] | int | None = None,
    workers: int | None = None,
    actions: Sequence[Command] = (),
    callbacks: Sequence[Any] = (),
    progress: Literal["auto", "table", "lines"] | bool = "auto",
    executor: Executor | None = None,
) -> Result:
    """Resume a run after Ctrl-C, a crash or a power failure, or train it further.

    Trials continue from their last committed unit. If a power failure destroyed this state, they
    continue from their last finished epoch. The results are bit for bit those of an uninterrupted
    run. Failed and diverged trials are not trained again, unless `trials` names them. A finished
    run with nothing left to train is returned unchanged. Time limits start again from zero.

    Parameters
    ----------
    run
        The run's folder, or its result; or the URL of its copy in object storage, which
        `cerebro.callbacks.Mirror` makes, such as ``"s3://bucket/runs/x"``. The copy is downloaded
        into a new folder ``runs/x``, and kept up to date from then on.
    build
        The run's ``build``, if it cannot be imported again.
    data, validation
        The run's data, if it has moved: datasets or paths. The run records the new paths.
    epochs
        The new number of epochs per trial, at least as many as before. From now on ``info.epochs``
        is this number. In epochs added to a finished run, an adaptive searcher compares nothing: it
        stops no trial, and PBT copies none.
    trials
        The numbers of the trials to continue, whatever their status; those that a searcher dropped
        at a rung, or that failed on the way to one, train for the run's epochs. Default: all that
        have not ended and, if `epochs` is higher than before, also the finished ones.
    workers
        The number of worker processes, 0 for none. Default: as many as the run had. With
        `executor`, give the number to the executor. The number of compute threads does not change,
        because it affects the bits.
    actions
        Requests to carry out first: values of `cerebro.control.Clone`, `Add` and `Extend`. If one
        is refused, the run ends at once, with an InputError that says why.
    callbacks, progress, executor
        As for `cerebro.search`.

    Returns
    -------
    Result
        The run, finished or as far as it was trained.

    Raises
    ------
    InputError
        If there is no such run, if another process trains it, if its data or ``build`` is missing
        or has changed, if ``build`` fails for all finished trials that are to be trained further,
        or if an argument is invalid. The run is unchanged.
    RunError, CorruptDataError
        As for `cerebro.search`.
    """
    refuse("cerebro.resume")
    workers = choose_worker_count(workers, executor)
    if isinstance(run, str) and is_url(run):
        run, callbacks = download_run(run, callbacks)
    if isinstance(run, Result):
        build = build or run.saved.known_build
    saved = SavedRun(run.path if isinstance(run, Result) else run, build=build)
    with Owner.take_over(saved.folder) as owner:
        check_whole_store(saved.folder)
        saved.refresh()
        request = ResumeRequest(
            check_whole_number("epochs", epochs, 1, optional=True),
            check_trials(trials, len(saved.configurations)),
            saved.trials_per_config,
            check_actions(actions),
        )
        before = saved.settings
        if request.epochs is not None and request.epochs < before["epochs"]:
            raise InputError(
                f"epochs={request.epochs}, but the run trains for {before['epochs']}: give more, "
                "or leave it out"
            )
        if is_over(saved, request):
            record_new_places(saved, data, validation)
            clean_up(saved)
            return note_last(Result(saved.path, build=build))
        as_before = executor is None and workers is None
        announce(progress, before["workers"] if as_before else workers)
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
            kind = "auto" if are_gpus(before["devices"]) else CPU
            the_devices = devices_of(kind, None, executor)
            settings = replace(settings, executor=check_executor(executor), devices=the_devices)
        if request.epochs is not None and request.trials is None:  # it applies to all trials
            settings = replace(settings, limits=replace(settings.limits, epochs=request.epochs))
        result = train_rest(saved, owner, settings, request, None)
    raise_if_refused(result, request.actions)
    return result


def check_actions(actions: Any) -> tuple[Command, ...]:
    given: list[Command] = [actions] if isinstance(actions, Command) else list(actions)
    for action in given:
        if not isinstance(action, Command) or action.verb not in REQUESTS:
            raise InputError(
                "actions must be a list of cerebro.control.Clone(...), Add(...) or Extend(...), "
                f"and has {action!r}"
            )
    return tuple(given)


def raise_if_refused(result: Result, requests: Sequence[Command]) -> None:
    """Raise InputError with the reason why a request was refused."""
    if not requests:
        return
    asked = {command.request for command in requests}
    with reader(result.path) as connection:
        for action in read_actions(connection):
            if action.request in asked and not action.is_done:
                raise InputError(f"{result.path}: {action.outcome.partition(': ')[2]}")


def download_run(url: str, callbacks: Any) -> tuple[Path, Sequence[Any]]:
    """Download a run; return its folder, and the callbacks with one that updates the copy."""
    callbacks = check_callbacks(callbacks)
    objects = Objects(url)
    folder = unused_folder(Path("runs", objects.url.rpartition("/")[2]), LOCAL.disk)
    pointer = download(objects, folder)
    mirrors = [item for item in callbacks if isinstance(item, Mirror) and item.url == objects.url]
    mirror = mirrors[0] if mirrors else Mirror(url)
    mirror.continues(pointer)
    return folder, callbacks if mirrors else (*callbacks, mirror)


def resume_search(settings: Settings, searcher: Searcher) -> Result:
    """Resume the run that a search with the same arguments, but for more epochs or trials, started.

    The searcher has not been set up. Raise InputError if the settings would have produced different
    trials, if the searcher cannot add trials, or if another process trains the run.
    """
    saved = SavedRun(settings.folder, build=settings.build)
    check_same(saved, settings)  # before it is said that another process trains it
    with Owner.take_over(saved.folder) as owner:
        check_whole_store(saved.folder)
        saved.refresh()
        check_same(saved, settings)
        before = saved.settings
        epochs, n_trials = settings.limits.epochs, settings.limits.n_trials
        further = epochs if epochs != before["epochs"] else None
        more = searcher.wants_more(saved.meta.get("searcher") or {}, before["n_trials"], n_trials)
        request = ResumeRequest(further, trials_per_config=saved.trials_per_config, more=more)
        if is_over(saved, request):
            clean_up(saved)
            return note_last(Result(settings.folder, build=settings.build))
        saved.recipe.warn_if_changed(settings.build)
        return train_rest(saved, owner, settings, request, searcher)


def check_same(saved: SavedRun, settings: Settings) -> None:
    differences = list(find_differences(saved, settings))
    if differences:
        raise InputError(
            f"the run in {saved.path} started with other settings: {'; '.join(differences)}. "
            "Give the same to resume it, or start a new run with another run= or if_exists='new'"
        )


def is_over(saved: SavedRun, request: ResumeRequest) -> bool:
    goes_on = request.more or request.actions or any(map(request.includes, saved.records))
    return saved.meta["status"] == "finished" and not goes_on


def record_new_places(saved: SavedRun, data: Any, validation: Any) -> None:
    """Record where the data of a finished run is now; ignore data that is not the run's."""
    for name, places in {"data": (data,), "validation": (validation, data)}.items():
        if all(place is None for place in places):
            continue
        with contextlib.suppress(InputError):
            moved = saved.new_places({name: open_moved_view(saved, name, *places)})
            if moved:
                with contextlib.closing(Store.open(saved.folder)) as store:
                    store.set_meta(name, moved[name])


def clean_up(saved: SavedRun, machine: Machine = LOCAL) -> None:
    """Clean up after a process that died during its own cleanup."""
    with contextlib.suppress(OSError):
        if machine.disk.exists(saved.folder / (FILE + "-wal")):
            Store.open(saved.folder, machine).close()
        remove_temporary(saved.folder / "states", machine.disk)
        sweep_states(saved.folder, saved.state_dir, machine.disk)


def train_rest(
    saved: SavedRun,
    owner: Owner,
    settings: Settings,
    request: ResumeRequest,
    searcher: Searcher | None,  # not set up
) -> Result:
    """Train the rest of a run that this process owns; without `searcher`, with the recorded one."""
    the_searcher = searcher_of(saved, settings, request, searcher)
    loop = saved.meta.get("search_loop")
    if request.more and loop:  # ask the searcher again, although it had nothing more to suggest
        saved.meta["search_loop"] = {**loop, "is_exhausted": False}
    now = environment.describe(settings.exactness.threads, settings.devices[0])
    if not trains_here(settings):  # workers get the run's seed
        now["variables"].pop(environment.HASH_SEED, None)
    if are_gpus(settings.devices):  # as in workers; CUDA does not start in this process
        now["variables"].setdefault(CUBLAS_VARIABLE, CUBLAS_WORKSPACE)
        if about := describe_device(settings.devices):
            now["cuda"] = dict(about)
    lines = environment.list_differences(saved.environment, now)
    # Workers get the settings with which the run started.
    prefixes = ("torch.", "jax.", *(f"keras.{name} " for name in KERAS.FIRST))
    lines = [line for line in lines if not line.startswith(prefixes)]
    if lines:
        warn_user(
            f"{saved.path} is resumed in a different environment, which can change its states from "
            f"now on: {'; '.join(lines)}"
        )
    return conduct(settings, the_searcher, previous=Previous(saved, owner, request, lines))


def searcher_of(
    saved: SavedRun, settings: Settings, request: ResumeRequest, searcher: Searcher | None
) -> Searcher:
    """Return the searcher as the run left it; raise InputError if it cannot be used so."""
    description = saved.meta["searcher_class"]
    over = has_decided_all(saved)
    apart = request.epochs is not None or request.trials is not None
    extends = apart or any(record.is_open for record in saved.records)
    if over and request.more and extends and description["adaptive"]:
        raise InputError(
            f"the searcher of {saved.path} decides how long each trial trains, so more epochs and "
            "more trials need two calls: first one with "
            f"epochs={settings.limits.epochs} and as many trials as before, then one with more "
            "trials"
        )
    over = over and not request.more
    if apart and description["adaptive"] and not over:
        raise InputError(
            f"{saved.path} is not finished, and its searcher decides how long each trial trains: "
            "resume it without epochs= and trials= first"
        )
    if over or request.trials is not None:
        return NoSearcher()
    the_searcher = searcher or make_again(description)
    strategy = settings.strategy
    if the_searcher is None or strategy.space_json is None:
        if not description["adaptive"] and settings.limits.n_trials == len(saved.configurations):
            return NoSearcher()
        raise InputError(
            f"the searcher {strategy.searcher_name} of {saved.path} cannot be made again from its "
            f"record: run the original script again, with {format_same_call(saved)}"
        )
    the_searcher = make_searcher(the_searcher)
    set_up_searcher(the_searcher, Space.from_json(strategy.space_json), settings)
    if "searcher" in saved.meta:
        the_searcher.load_state_dict(saved.meta["searcher"])
        catch_up(saved, the_searcher, settings.ranking, strategy.stop)
    return the_searcher


MAY_DIFFER = {
    "workers", "max_retries", "unit_timeout", "time_limit", "live_models", "devices",
    "epochs", "n_trials", "space", "searcher_name",  # compared elsewhere
}  # fmt: skip
"""Settings that may change when a script resumes its run."""


def settings_of(
    saved: SavedRun,
    *,
    build: Callable[..., Any] | None,
    data: Any,
    validation: Any,
    workers: int | None,
    callbacks: Sequence[Any],
    progress: Any,
) -> Settings:
    """Return the settings with which a run started, with data that may have moved.

    Raise InputError if the data or ``build`` is missing or has changed, and CorruptDataError if the
    record is damaged.
    """
    meta = saved.meta
    record = meta["settings"]
    the_build = saved.find_build(build)
    train: Any = open_moved_view(saved, "data", data)
    try:
        stop = None if record["stop"] is None else EarlyStopping(**record["stop"])
        groups: dict[str, Any] = {
            "ranking": read_group(Ranking, record),
            "strategy": read_group(
                Strategy,
                record,
                stop=stop,
                points=tuple(meta["points"]),
                space_json=meta["space"],
                searcher_class=meta["searcher_class"],
            ),
            "batches": read_group(Batches, record),
            "exactness": read_group(Exactness, record),
            "keep": record["keep"],
        }
        limits, before = read_group(Limits, record), record["workers"]
    except (KeyError, TypeError) as error:
        raise CorruptDataError(
            f"{saved.path}: some of its settings are not recorded: {error}"
        ) from None
    count = worker_count(before if workers is None else workers, 1)
    if count == 0:
        limits = replace(limits, unit_timeout=None)  # no process can be killed
    return Settings(
        **groups,
        limits=limits,
        build=the_build,
        train=train,
        validation=open_moved_view(saved, "validation", validation, data),
        folds=saved.folds_of(train),
        workers=count,
        devices=choose_resume_devices(record["devices"]),
        executor=None,
        folder=saved.path,
        state_dir=saved.state_dir,
        callbacks=check_callbacks(callbacks),
        progress=progress,
    )


def open_moved_view(saved: SavedRun, name: str, *given: Any) -> Dataset | None:
    """Return the run's ``"data"`` or ``"validation"``, from its new path if it has moved.

    `given` has datasets, paths or None: for this data, then for the training data, which may be
    another part of the same dataset. Raise InputError if it is missing, or is not the run's.
    """
    spec = saved.meta[name]
    if spec is None:
        return None
    moved, *others = given
    place = moved
    if place is None and others and spec["path"] == saved.meta["data"]["path"]:
        place = others[0]
    if isinstance(place, Dataset):
        place = place.shards.place
    if place is not None and not isinstance(place, (str, os.PathLike)):
        raise InputError(f"{name} must be a cerebro.Dataset or a path, not {place!r}")
    if place is not None and not is_url(str(place)):
        place = path_of(name, place)
    path = spec["path"] if place is None else place
    try:
        view = Dataset.from_spec({**spec, "path": str(path)})
        if isinstance(moved, Dataset) and not moved.view.holds(view.view):
            raise InputError("its rows or transforms are not those of the run")
        return view
    except InputError as error:
        if not is_url(path) and not Path(path).exists():
            raise InputError(
                f"the run's {name} are not at {path}: give their new path with {name}="
            ) from error
        raise InputError(
            f"{error}; a run resumes only with the {name} that it started with: give them with "
            f"{name}="
        ) from error


def find_differences(saved: SavedRun, settings: Settings) -> Iterator[str]:
    """Yield how settings differ that would have produced different trials."""
    recorded = saved.meta["settings"]
    now = round_trip(settings.record())
    missing = sorted(now.keys() - recorded.keys())
    if missing:
        raise CorruptDataError(
            f"{saved.path}: some of its settings are not recorded: {', '.join(missing)}"
        )
    adaptive = saved.meta["searcher_class"]["adaptive"]
    may_differ = MAY_DIFFER if adaptive else {*MAY_DIFFER, "width"}
    for name in now:
        if name not in may_differ and recorded[name] != now[name]:
            yield f"{name} was {recorded[name]!r}, is {now[name]!r}"
    for name in ("epochs", "n_trials"):  # None is more than any number
        if (now[name] or math.inf) < (recorded[name] or math.inf):
            yield f"{name} was {recorded[name]!r}, is {now[name]!r} (it can only be increased)"
    for name, before, value in (
        ("points", saved.meta["points"], list(settings.strategy.points)),
        ("space", saved.meta["space"], settings.strategy.space_json),
    ):
        if before != round_trip(value):
            yield f"{name} has changed"
    was, current = saved.meta["searcher_class"], round_trip(settings.strategy.searcher_class)
    if any(was.get(key) != current.get(key) for key in ("class", "parameters", "adaptive")):
        yield f"searcher was {_describe_searcher(was)}, is {_describe_searcher(current)}"
    views = {"data": settings.train, "validation": settings.validation}
    for name, view in views.items():
        if (None if view is None else view.checksum) != saved.meta[f"{name}_checksum"]:
            yield f"{name} is a different dataset, or has different rows or transforms"
    folds = settings.folds
    if (None if folds is None else folds.checksum) != saved.meta["folds_checksum"]:
        yield "validation has different folds, or none"


def _describe_searcher(value: Mapping[str, Any]) -> str:
    name = value["class"].rpartition(":")[2]
    if value["parameters"] is None:
        return str(value.get("text", f"{name}(...)"))
    return f"{name}({', '.join(f'{k}={v!r}' for k, v in value['parameters'].items())})"


def round_trip(value: Any) -> Any:
    """Return a value as it is after being stored and read back."""
    return decode(encode(value))


def check_trials(trials: Any, count: int) -> tuple[int, ...] | None:
    if trials is None:
        return None
    if isinstance(trials, int) and not isinstance(trials, bool):
        trials = (trials,)
    try:
        numbers = [check_whole_number("trials", number, 0) for number in trials]
    except TypeError:
        raise InputError(f"trials must be a list of trials' numbers, not {trials!r}") from None
    if not numbers:
        raise InputError("trials is empty: name the trials to continue, or leave it out")
    for number in numbers:
        if number >= count:
            raise InputError(f"there is no trial {number}: the run has 0 to {count - 1}")
    return tuple(sorted(set(numbers)))
