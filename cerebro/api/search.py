"""Implement `cerebro.search`: train many configurations and find the best."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from cerebro.api.background import may_return_run, start_search
from cerebro.api.check import ask_worker
from cerebro.api.lanes import choose_lanes, describe_lanes, usable_memory
from cerebro.api.resume import resume_search
from cerebro.api.settings import (
    check_callbacks,
    check_executor,
    check_points,
    check_stop,
    choose_worker_count,
    devices_of,
    eval_rows,
    idle_advice,
    seconds_per_unit,
    set_up_searcher,
)
from cerebro.arguments import (
    SEARCH,
    check_one_of,
    check_optional_real,
    check_whole_number,
    explain_keywords,
    warn_user,
    worker_count,
)
from cerebro.coordinator.conduct import conduct, make_run_context
from cerebro.coordinator.searcher_record import describe
from cerebro.coordinator.trials import make_recordable
from cerebro.data.order import Shuffle, resolve_shuffle
from cerebro.data.stats import check_shards
from cerebro.data.validation import UnfitDataError, make_validation
from cerebro.errors import InputError
from cerebro.executors.base import Executor
from cerebro.executors.process import warm_workers
from cerebro.machine.devices import (
    CPU,
    are_gpus,
    choose_resume_devices,
    describe_mixed_kinds,
    name_devices,
)
from cerebro.machine.guard import refuse
from cerebro.report.displays import announce, shows_progress
from cerebro.results.result import Result
from cerebro.results.saved_run import SavedRun
from cerebro.run.folder import gives_way, make_way, new_run_folder, slots_folder, write_rows
from cerebro.run.recipe import check_build
from cerebro.run.records import Ranking
from cerebro.run.settings import (
    MAX_SEED,
    MAX_THREADS,
    Batches,
    Exactness,
    Limits,
    Settings,
    Strategy,
)
from cerebro.run.store import FILE
from cerebro.searchers import make_searcher
from cerebro.searchers.base import DONE, Searcher, expected_trials, suggestion_problem
from cerebro.searchers.metrics import EarlyStopping, metric_mode
from cerebro.space import Space, as_space
from cerebro.worker.messages import CheckDone, CheckTask, RunFolders


@may_return_run
@explain_keywords(SEARCH)
@shows_progress
def search(
    build: Callable[..., Any],
    space: Any,
    data: Any,
    *,
    epochs: int,
    n_trials: int | None = None,
    validation: Any = None,
    searcher: str | Searcher = "random",
    metric: str = "loss",
    mode: Literal["min", "max"] | None = None,
    select: Literal["best", "last"] = "best",
    batch_size: int | None = None,
    eval_batch_size: int | None = None,
    drop_last: bool = False,
    stop: EarlyStopping | None = None,
    points: Sequence[Mapping[str, Any]] = (),
    width: int | None = None,
    workers: int | None = None,
    threads: int = 1,
    devices: Any = "auto",
    seed: int = 0,
    run: str | os.PathLike[str] | None = None,
    if_exists: Literal["error", "resume", "new"] = "error",
    keep: Literal["best", "last", "all"] = "best",
    max_retries: int = 3,
    unit_timeout: float | None = None,
    time_limit: float | None = None,
    stagger: bool = True,
    asynchronous: bool = False,
    live_models: int | None = None,
    deterministic: Literal["warn"] | bool = "warn",
    state_dir: str | os.PathLike[str] | None = None,
    callbacks: Sequence[Any] = (),
    progress: Literal["auto", "table", "lines"] | bool = "auto",
    executor: Executor | None = None,
    workers_per_device: int | None = None,
    shuffle: Shuffle | None = None,
    background: bool = False,
) -> Result:
    """Train many configurations over one dataset and find the best.

    Every trial (a configuration being trained) sees every row once per epoch, in
    a new random order; models hop between workers while the data stays where it
    is (model hopper parallelism: Nakandala, Zhang and Kumar, "Cerebro: A Data
    System for Optimized Deep Learning Model Selection", VLDB 2020). A trial's
    states depend only on the seed, its configuration, its number and the data:
    they are bit for bit the same with any number of workers, and those of a plain
    loop over ``data.batches(batch_size, seed=seed, epoch=epoch)``.

    Everyday
    --------
    What most searches give.

    Parameters
    ----------
    build
        ``build(config)`` or ``build(config, info)``. Returns a model with ``train_batch``,
        ``eval_batch``, ``state_dict`` and ``load_state_dict`` (`cerebro.torch.Model` for PyTorch).
        Runs in the worker.
    space
        The search space: a mapping of names to dimensions such as `cerebro.uniform`, lists (a
        choice), constants and nested mappings.
    data
        A `cerebro.Dataset` or its path. Small data may also be passed in memory: ``(x, y)``, a
        mapping of names to arrays, a pandas or Arrow table, a PyTorch or Hugging Face dataset. It
        is then written into the run's folder, with floats as float32 (`cerebro.shard` keeps
        float64).
    epochs
        The number of epochs per trial, at least 1.
    n_trials
        The number of trials to run. Required for searchers that never end, unless `time_limit` is
        given.
    validation
        A `Dataset`, a fraction of `data` (the last rows of each shard), data in memory as for
        `data` (which gets its types, classes and transforms), a `cerebro.KFold` or a scikit-learn
        splitter. None ranks trials by training metrics, with a warning. With folds every
        configuration is trained once per fold, and the folds advance together, epoch by epoch. Its
        metrics are the means (``accuracy``) and standard deviations (``accuracy_std``) over the
        folds.
    searcher
        The strategy that decides which configurations are trained, and for how long: ``"random"``,
        ``"quasirandom"``, ``"grid"``, ``"successive_halving"``, ``"hyperband"``, ``"asha"``,
        ``"median"``, ``"pbt"``, ``"tpe"``, ``"gp"``; or, with options,
        `cerebro.searchers.RandomSearch`, `QuasiRandomSearch`, `GridSearch`, `SuccessiveHalving`,
        `Hyperband`, `ASHA`, `MedianStopping`, `PBT`, `TPE`, `GaussianProcess`; or any object with
        the methods of `cerebro.searchers.Searcher`.
    metric, mode
        The metric that ranks trials, and whether less (``"min"``) or more (``"max"``) is better.
        Well-known metrics need no mode.
    batch_size
        The number of rows per batch. Give it either here or in the space. Batches have even sizes:
        an epoch of n rows has ``round(n / batch_size)`` of them, which differ by one row at most.
    points
        Configurations to try before the searcher's own, or trials of an earlier run, such as
        ``cerebro.open("runs/a").top(3)``. Values for names that they omit come from the searcher.
    stop
        A `cerebro.EarlyStopping` rule.
    time_limit
        The seconds after which no new unit is started.
    seed
        The seed of all random numbers, at least 0.
    run
        The run's folder; default ``runs/<time>``.
    if_exists
        What to do if the run's folder exists. ``"resume"`` resumes the run, as `cerebro.resume`
        does. Arguments that affect its trials must be the same; only `epochs` and `n_trials` may
        increase (not `n_trials` of population-based training, the size of its population).
        ``"new"`` starts a new run in a different folder: ``<run>-2``, ``<run>-3`` and so on.
    progress
        ``"table"``, ``"lines"``, False, or ``"auto"``, which chooses by the kind of output.

    Resources
    ---------
    What the search runs on. Of these, only `threads` and the kind of device change the bits.

    Parameters
    ----------
    workers
        The number of workers; 0 trains in this process. Default: one process per `threads` cores,
        or `workers_per_device` for each GPU. With `executor`, give the number to the executor.
    threads
        The number of compute threads per worker, even with ``workers=0``. It changes the bits of
        the states.
    devices
        Where models are trained: ``"cpu"``; ``"cuda"``, all GPUs; ``"cuda:1"``; a list of GPUs; or
        ``"auto"``: all GPUs that PyTorch can use here, or the CPU if there are none or the model is
        ``cpu_only``, as scikit-learn models are. ``build`` finds its device in ``info.device``;
        `cerebro.torch.Model` moves its network there. With `executor`, ``"auto"`` uses the GPUs of
        its workers, and ``"cpu"`` does not.
    workers_per_device
        The number of trials that each GPU trains at once: its *lanes*, which share one process and
        one copy of the data. Default: up to 16 for models whose steps are replayed as graphs
        (`cerebro.torch.Model` with ``graph=True``), as many as there are trials and as fit in half
        of the GPU's free memory; 1 for all other models. It does not change the states.
    executor
        Runs the units on other machines, such as `cerebro.ray.Executor`.
    live_models
        The number of models that a worker keeps in memory between units. Default: as many as memory
        allows.
    background
        Search in a separate process, which keeps running when this one ends, and return a
        `cerebro.Run` once training has begun; mistakes raise before that. The process gets copies
        of the arguments: callbacks and a searcher's object here do not change. Its output is in
        ``background.log`` in the run's folder. With ``if_exists="resume"``, a run that is live is
        returned as it is.

    Durability
    ----------
    What is kept, and what happens if a worker fails.

    Parameters
    ----------
    keep
        The epochs whose states stay on disk. The state of the last epoch always stays.
    state_dir
        A folder for the states of live trials, such as one on a local disk or in a memory file
        system. No other run may use it. Default: in the run's folder.
    max_retries
        How often a unit is retried after its worker died, was stopped, or ran out of memory. After
        that, its trial fails.
    unit_timeout
        The seconds that a unit (a trial over one part of an epoch) may take. A worker that takes
        longer is killed and the unit retried, at most `max_retries` times. Starting a worker
        process does not count, nor do up to 30 s of the first `build` in it, which imports
        libraries. Not available with ``workers=0``.

    Expert
    ------
    Details of ranking, order, batches and exactness; the defaults suit most searches.

    Parameters
    ----------
    select
        The epoch by which a trial is ranked: its best or its last.
    width
        The number of trials that train at the same time, for adaptive searchers.
    asynchronous
        Report every epoch to an adaptive searcher as soon as it is over, not in rounds. No trial
        then waits for others, but which trials run depends on timing.
    shuffle
        ``"rows"`` draws a new order of all rows in each epoch, as a PyTorch ``DataLoader`` with
        ``shuffle=True`` does. ``"shards"`` reads one group of four shards after another, in random
        order, for data larger than memory or spread over a cluster; the groups are drawn anew in
        each epoch, and rows are shuffled within them. None: "rows" for data up to 4 GB, else
        "shards", also with ``stagger=False``. The choice depends on the data alone and is recorded.
    drop_last
        Whether all batches have exactly `batch_size` rows; the rows left over, a different few in
        each epoch, are left out.
    eval_batch_size
        The number of rows per validation batch. Default: 256; the trial's batch size for rows of
        more than 65,536 values and for sequences of tokens (ragged columns, more than 16 integers
        in a row), whose validation may take more memory than training.
    stagger
        False starts all trials at the same group of shards and keeps at most two groups open, for
        data larger than memory.
    deterministic
        True rejects operations that have no deterministic version on a GPU; ``"warn"`` allows them
        and marks the trial (`Trial.not_exact`). With either value, PyTorch uses the deterministic
        version of all other operations. False lets it choose the fastest.
    callbacks
        Objects with any of ``on_run_start(run)``, ``on_trial_start(trial)``,
        ``on_unit_end(trial, metrics)``, ``on_epoch_end(trial, metrics)``, ``on_trial_end(trial)``
        and ``on_run_end(result)``, called in this process. They receive each trial as a `Trial`, a
        copy of its current state, and the run as a `Result`. An exception in a callback ends the
        run, unless the callback is a `cerebro.callbacks.Observer`.

    Returns
    -------
    Result
        The run's result, with the best trial and all others; `cerebro.open` opens it again later.
        With ``background=True``, a `cerebro.Run`, whose ``result()`` waits for it.

    Raises
    ------
    InputError
        If arguments are invalid or contradict each other.
    StateError
        If the model has state that does not survive a hop; the message names it.
    RunError
        If the first trials all fail for the same reason, or every trial fails.
    CorruptDataError
        If a data file does not match its manifest.
    """
    arguments = dict(locals())
    refuse("cerebro.search")
    show: Any = progress  # a display, from `shows_progress`
    if background:
        started: Any = start_search(arguments, show)
        return started  # type: ignore[no-any-return]  # see `may_return_run`
    with write_rows(data, validation, run, if_exists, show) as (data, validation, run):
        check_build(build)
        check_one_of("select", select, ("best", "last"))
        check_one_of("keep", keep, ("best", "last", "all"))
        check_one_of("deterministic", deterministic, ("warn", True, False))
        train, held_out, folds = make_validation(data, validation)
        folder = new_run_folder(run, if_exists)
        goes_on = if_exists == "resume" and (folder / FILE).exists()
        the_space, the_searcher = as_space(space), make_searcher(searcher)
        the_threads = check_whole_number("threads", threads, 1, MAX_THREADS)
        workers = choose_worker_count(workers, executor)
        is_known = executor is None or workers is not None
        the_devices = devices_of(devices, workers_per_device, executor)
        by_itself = executor is None and name_devices(devices) == ["auto"]
        before = SavedRun(folder).settings if goes_on else None
        if before is not None and by_itself and are_gpus(the_devices):
            # The devices on which the run started.
            the_devices = choose_resume_devices(before["devices"])
        counted = the_devices if executor is None else (CPU,)  # an executor counts its own workers
        the_workers = worker_count(workers, the_threads, counted, workers_per_device)
        is_counted = (workers, workers_per_device) != (None, None)
        if before is not None and not is_counted and are_gpus(counted):
            the_workers = before["workers"] if are_gpus(before["devices"]) else the_workers
        eval_size = check_whole_number("eval_batch_size", eval_batch_size, 1, optional=True)
        settings = Settings(
            build=build,
            train=train,
            validation=held_out,
            folds=folds,
            ranking=Ranking(metric, metric_mode(metric, mode), select),
            strategy=Strategy(
                searcher_name=searcher if isinstance(searcher, str) else type(searcher).__name__,
                width=check_whole_number("width", 8 if width is None else width, 1),
                asynchronous=bool(asynchronous),
                stop=check_stop(stop),
                space=repr(space),
                points=check_points(points),
                space_json=the_space.to_json(),
                searcher_class=describe(the_searcher),
            ),
            limits=Limits(
                epochs=check_whole_number("epochs", epochs, 1),
                n_trials=check_whole_number("n_trials", n_trials, 1, optional=True),
                max_retries=check_whole_number("max_retries", max_retries, 0),
                unit_timeout=seconds_per_unit(unit_timeout, the_workers, executor),
                time_limit=check_optional_real("time_limit", time_limit, above=0),
                live_models=check_whole_number("live_models", live_models, 1, optional=True),
            ),
            batches=Batches(
                batch_size=check_whole_number("batch_size", batch_size, 1, optional=True),
                eval_batch_size=eval_size or eval_rows(train),
                drop_last=bool(drop_last),
                shuffle=resolve_shuffle(shuffle, train, stagger=bool(stagger)),
                stagger=bool(stagger),
            ),
            exactness=Exactness(
                seed=check_whole_number("seed", seed, 0, MAX_SEED),
                threads=the_threads,
                deterministic=deterministic,
            ),
            workers=the_workers,
            devices=the_devices,
            executor=check_executor(executor),
            folder=folder,
            state_dir=slots_folder(folder, state_dir, goes_on=goes_on),
            keep=keep,
            callbacks=check_callbacks(callbacks),
            progress=progress,
        )
        if settings.batches.shuffle == "shards":
            check_shards(train)
            for fold in range(0 if folds is None else len(folds)):
                make_validation(train, folds).get_views(fold)[0].view.weight_sums(across=False)
        advice = _idle_advice(settings, the_searcher) if is_known and not goes_on else None
        chooses = are_gpus(counted) and not is_counted and not goes_on  # once it knows the model
        notes = (None if chooses else describe_lanes(the_workers, counted), advice)
        shown = the_workers if is_known and not chooses else None
        announce(progress, shown, "; ".join(filter(None, notes)))
        if executor is None and the_devices == (CPU,):  # let workers start during the preparation
            loaded = [name for name in ("torch",) if name in sys.modules]
            warm_workers.start_early(the_threads, [None] * the_workers, loaded)
        if goes_on:
            _warn_if_mixed(the_devices)
            return resume_search(settings, the_searcher)
        chosen_for = None
        if by_itself and workers_per_device is None:
            chosen_for = worker_count(workers, the_threads)
        return run_search(settings, the_space, the_searcher, chosen_for, is_counted=is_counted)


def _count_at_once(settings: Settings, searcher: Searcher, trials: int | None) -> int | None:
    """Return the most of `trials` that train at a time, counting each fold; None if unknown."""
    if trials is not None and searcher.adaptive:
        trials = min(trials, settings.strategy.width)
    return None if trials is None else trials * settings.trials_per_config


def _idle_advice(settings: Settings, searcher: Searcher) -> str | None:
    """Return advice on idle workers; None if all are busy or the number of trials is unknown."""
    return idle_advice(
        _count_at_once(settings, searcher, settings.limits.n_trials),
        settings.workers,
        settings.exactness.threads,
        folds=None if settings.folds is None else len(settings.folds),
        devices=settings.devices,
        elsewhere=settings.executor is not None,
    )


def run_search(
    settings: Settings,
    space: Space,
    the_searcher: Searcher,
    cpu_workers: int | None = None,
    *,
    is_counted: bool = True,
) -> Result:
    """Run a search whose arguments are checked.

    A ``cpu_only`` model trains on `cpu_workers`; `is_counted` says whether the user has given the
    number of workers.
    """
    set_up_searcher(the_searcher, space, settings)
    first = the_searcher.suggest()
    if first is None or first is DONE:
        raise InputError(f"the searcher {settings.strategy.searcher_name} suggests no trial")
    problem = suggestion_problem(first)
    if problem is None and (first.trial, first.parent) != (None, None):
        problem = f"begins with {first!r}: there is no trial yet to resume or clone"
    if problem is not None:
        raise InputError(f"the searcher {settings.strategy.searcher_name} {problem}")
    config = make_recordable(first.config)[0]  # a value that cannot be stored fails only its trial
    settings.batches.size_of(config)  # a wrong one in a later trial fails only that trial
    if not settings.validates:
        warn_user("no validation data: trials are ranked by training metrics (give validation=)")
    if cpu_workers is not None or not is_counted:
        settings = _settle_workers(settings, the_searcher, config, cpu_workers, is_counted)
    _warn_if_mixed(settings.devices)
    try:
        return conduct(settings, the_searcher, first=first)
    except UnfitDataError:  # nothing was trained: leave nothing behind
        if gives_way(settings.folder):
            make_way(settings.folder)
        raise


def _settle_workers(
    settings: Settings,
    searcher: Searcher,
    config: Mapping[str, Any],
    cpu_workers: int | None,
    is_counted: bool,
) -> Settings:
    """Return the settings with the devices and the number of workers that suit the model.

    The model is built in a worker, which stays warm. The arguments are those of `run_search`;
    without `cpu_workers` the devices stay.
    """
    devices = settings.devices
    if settings.executor is not None or not are_gpus(devices) or settings.workers == 0:
        return settings
    with tempfile.TemporaryDirectory(prefix="cerebro-check-") as folder:
        folders = RunFolders(folder, folder, folder)
        context = replace(make_run_context(settings), folders=folders)
        task = CheckTask(config, build_only=True, measures=not is_counted)
        event = ask_worker(context, devices[0], task)
    if not isinstance(event, CheckDone):
        return settings
    if event.model.cpu_only and cpu_workers is not None:
        return replace(settings, devices=(CPU,), workers=cpu_workers)
    if is_counted:
        return settings
    trials = expected_trials(searcher, settings.limits.n_trials)
    at_once = _count_at_once(settings, searcher, trials)
    each = None if at_once is None else -(-at_once // len(devices))
    lanes = choose_lanes(event.model, usable_memory(event.model, devices), each)
    workers = lanes * len(devices)
    announce(settings.progress, workers, describe_lanes(workers, devices))
    return replace(settings, workers=workers)


def _warn_if_mixed(devices: Sequence[str]) -> None:
    if (text := describe_mixed_kinds(devices)) is not None:
        warn_user(text)
