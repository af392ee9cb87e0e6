"""Train the trials of an Optuna study with Cerebro: `cerebro.optuna.optimize`.

The study keeps its sampler, pruner, storage and callbacks. The order of ``ask`` and ``tell`` does
not depend on timing (see `cerebro.coordinator.rounds`), so a seeded sampler gives the same study
with any number of workers. ``build(trial)`` is the first half of an objective: it suggests
hyperparameters and returns a model instead of training it.

    def build(trial):
        net = make_net(trial.suggest_int("layers", 1, 3))
        lr = trial.suggest_float("lr", 1e-4, 1e-1, log=True)
        return cerebro.torch.Model(net, optimizer=torch.optim.Adam(net.parameters(), lr=lr), ...)

    study = optuna.create_study(direction="maximize")
    result = cerebro.optuna.optimize(study, build, train, epochs=10, n_trials=50,
                                     validation=valid, metric="accuracy", batch_size=64)
    study.best_trial.params
"""

from __future__ import annotations

import contextlib
import copy
import datetime
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import optuna
from optuna.trial import FrozenTrial, TrialState

from cerebro.api.search import search
from cerebro.arguments import (
    OPTIMIZE,
    check_real_number,
    check_whole_number,
    explain_keywords,
    find_stacklevel,
)
from cerebro.coordinator.failures import asks_to_stop
from cerebro.data.given_rows import is_rows
from cerebro.data.order import Cut, EpochOrder, Shuffle, make_order, resolve_shuffle
from cerebro.data.validation import make_validation
from cerebro.errors import InputError, RunError
from cerebro.machine import generators
from cerebro.machine.files import path_of
from cerebro.machine.guard import guard_trial, refuse
from cerebro.model import Info
from cerebro.results.result import Result
from cerebro.run.folder import write_rows
from cerebro.run.recipe import StudyBuild, call_build, check_build
from cerebro.run.records import STUDY, Raised, class_name
from cerebro.run.store import encode
from cerebro.searchers.base import DONE, Decision, Searcher, Suggested, Suggestion
from cerebro.searchers.metrics import metric_mode
from cerebro.searchers.optuna_terms import ATTRIBUTE, storage_errors
from cerebro.space import Space, json_value
from cerebro.worker.models import make_info

if TYPE_CHECKING:
    from cerebro.data import Dataset

__all__ = ["optimize"]

INTERRUPTED = "cerebro:interrupted"
"""The system attribute of a study's trials that failed because their run was interrupted."""


@explain_keywords(OPTIMIZE, search, ("run_callbacks",), "cerebro.optuna.optimize")
def optimize(
    study: optuna.Study,
    build: Callable[..., Any],
    data: Any,
    *,
    define: Callable[[optuna.Trial], Mapping[str, Any]] | None = None,
    n_trials: int | None = None,
    epochs: int,
    validation: Any = None,
    metric: str = "loss",
    width: int = 8,
    workers: int | None = None,
    threads: int = 1,
    batch_size: int | None = None,
    timeout: float | None = None,
    catch: type[Exception] | Sequence[type[Exception]] = (),
    callbacks: Sequence[Callable[[optuna.Study, FrozenTrial], None]] = (),
    run: str | os.PathLike[str] | None = None,
    progress: Literal["auto", "table", "lines"] | bool = "auto",
    shuffle: Shuffle | None = None,
    **options: Any,
) -> Result:
    """Train the trials of an Optuna study by model hopper parallelism.

    Parameters
    ----------
    study
        A study with one objective. Its sampler, pruner, storage and direction are used.
    build
        ``build(trial)`` or ``build(trial, info)``: suggests hyperparameters and returns a model. It
        is called once per trial in this process, in the order of the trials' numbers, with the
        study's trial. Workers call it again with an `optuna.trial.FixedTrial` of the same values,
        number and attributes, whose ``study`` has a name, a direction, and a ``stop()`` that does
        nothing.
    data, epochs, validation, metric, width, workers, threads, batch_size, shuffle, run, progress
        As for `cerebro.search`; `batch_size` may be suggested under that name instead.
    define
        ``define(trial)`` makes the suggestions that `build` will make, so that no model is
        built in this process. It returns a mapping to add to the configuration, or None.
    n_trials
        Trials that the run adds to the study, including pruned and failed ones. None: until
        `timeout`, or until a callback stops the study. If `run` exists and has fewer, the same call
        with a larger number adds the difference.
    timeout
        Seconds after which no new trial starts; active trials are trained to completion. To
        interrupt these too, pass `cerebro.search`'s argument ``time_limit=``.
    catch
        Exceptions, including their subclasses, that fail only their trial: its state becomes FAIL,
        and the study continues. Any other exception ends the study, as in `optuna.Study.optimize`.
        `optuna.TrialPruned`, raised in `build` or during training, makes its trial PRUNED. A run
        whose trials have all failed still ends with a RunError.
    callbacks
        Called with the study and each finished trial, in the order of rounds and, within a round,
        of trial numbers. They may call ``study.stop()``.
    options
        More arguments of `cerebro.search`, such as ``seed`` or ``keep``.

    Returns
    -------
    Result
        The run. In the study, ``trial.system_attrs["cerebro"]`` has the run's folder and the
        trial's number in the run.

    Raises
    ------
    InputError
        If the study has several objectives, its storage cannot be written, or the run belongs to a
        different study.
    RunError
        If a trial raises an exception that is not in `catch`.

    Notes
    -----
    If `run` exists, it is resumed: active trials continue from their last committed unit, and no
    trial of a dead process remains RUNNING in the study. A finished run with `n_trials` trials is
    returned unchanged; to add as many again, give another `run`.

    Every epoch's metric is reported as an intermediate value, with the epoch, from 0, as its step;
    the value of a trial is the metric of its last epoch. The pruner is called after every epoch but
    the last. Metrics that are not finite are handled as in Optuna: pruners prune NaN, infinity is a
    valid value, and a trial whose value is NaN fails.
    """
    refuse("cerebro.optuna.optimize")
    check_whole_number("epochs", epochs, 1)
    n_trials = check_whole_number("n_trials", n_trials, 1, optional=True)
    timeout = check_real_number("timeout", timeout, above=0, optional=True)
    check_study(study, metric, epochs)
    check_build(build)
    if define is not None and not callable(define):
        raise InputError(f"define must be a function, not {define!r}")
    observers = _check_several("callbacks", callbacks, callable, "functions")
    caught = _check_several("catch", catch, _is_exception, "exceptions' classes")
    if_exists: Literal["error", "resume"] = "error" if run is None else "resume"
    rows = is_rows(data) or is_rows(validation)
    written = write_rows(data, validation, run, if_exists) if rows else None
    with written or contextlib.nullcontext((data, validation, run)) as (data, validation, run):
        train, held_out, folds = make_validation(data, validation)
        folder = None if run is None else path_of("run", run)
        stagger = bool(options.get("stagger", True))
        order = resolve_shuffle(shuffle, train, stagger=stagger)
        first = train if folds is None else folds.get_views(0)[0]
        searcher = StudySearcher(
            study, build, first, make_order(first, order, 0, stagger=stagger),
            drop_last=bool(options.get("drop_last", False)),
            define=define, n_trials=n_trials, epochs=epochs, metric=metric, batch_size=batch_size,
            timeout=timeout, catch=caught, callbacks=observers, run=str(folder or ""),
        )  # fmt: skip
        try:
            result = search(
                StudyBuild(build, 1 if folds is None else len(folds)),
                {},
                train,
                epochs=epochs,
                n_trials=None,
                validation=held_out if folds is None else folds,
                searcher=searcher,
                metric=metric,
                mode="min" if study.direction is optuna.study.StudyDirection.MINIMIZE else "max",
                select="last",
                batch_size=batch_size,
                shuffle=order,
                width=width,
                workers=workers,
                threads=threads,
                run=run,
                if_exists=if_exists,
                progress=progress,
                callbacks=[searcher.watcher, *options.pop("run_callbacks", ())],
                **options,
            )
        except BaseException:
            with contextlib.suppress(Exception):  # the storage may be what has failed
                searcher.close()
            raise
        searcher.close()
        return result


def check_study(study: optuna.Study, metric: str, epochs: int) -> None:
    """Raise InputError for a study that cannot be optimized; warn of likely mistakes."""
    if not isinstance(study, optuna.Study):
        raise InputError(
            f"study must be an optuna.Study, not {study!r}: make one with optuna.create_study(...)"
        )
    if len(study.directions) != 1:
        raise InputError(
            f"the study {study.study_name!r} has several objectives, but Cerebro optimizes one: "
            "create it with direction= instead of directions="
        )
    if study._thread_local.in_optimize_loop:
        raise InputError(
            f"the study {study.study_name!r} is being optimized: optimize() cannot be called for "
            "it in its own build or callbacks"
        )
    least, most = (getattr(study.pruner, f"_{end}_resource", None) for end in ("min", "max"))
    if isinstance(least, int) and isinstance(most, int) and most < least:
        raise InputError(
            f"the pruner's max_resource={most} is below its min_resource={least}, so it would "
            f"never prune: give max_resource={epochs}, the epochs, and a smaller min_resource"
        )
    if isinstance(least, int) and least > epochs:
        warnings.warn(
            f"the pruner's min_resource={least} is above epochs={epochs}: it will prune nothing",
            stacklevel=find_stacklevel(),
        )
    direction = study.direction.name.lower()
    with contextlib.suppress(InputError):  # for a metric that is not well known
        usual = "minimize" if metric_mode(metric) == "min" else "maximize"
        if direction != usual:
            warnings.warn(
                f"the study {study.study_name!r} is to {direction} {metric}: if that is not meant, "
                f"create it with direction={usual!r}",
                stacklevel=find_stacklevel(),
            )


def _check_several(
    name: str, given: Any, fits: Callable[[Any], bool], kind: str
) -> tuple[Any, ...]:
    """Return one value or an iterable of them as a tuple; raise InputError if any is invalid."""
    values = tuple(given) if hasattr(given, "__iter__") else (given,)
    if not all(map(fits, values)):
        raise InputError(f"{name} must be a list of {kind}, not {given!r}")
    return values


def _is_exception(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Exception)


class Watcher:
    """The callback that ends the search after an exception that `catch` does not cover."""

    def __init__(self, searcher: StudySearcher) -> None:
        self._searcher = searcher

    def on_run_start(self, result: Result) -> None:
        """Find trials pruned in an earlier process, which may not have updated the study."""
        for trial in result.trials:
            if asks_to_stop(trial.record.raised):
                self._searcher.note_pruned(trial.number)

    def on_trial_end(self, trial: Any) -> None:
        if asks_to_stop(trial.record.raised):
            self._searcher.note_pruned(trial.number)
        elif trial.status == "failed":
            self._searcher.note_failure(trial.number, trial.error or "", trial.record.raised)


class StudySearcher(Searcher):
    """A searcher whose trials come from an Optuna study."""

    adaptive = True
    repeatable = False  # the study's own storage keeps the reports
    exact_metrics = True

    def __init__(
        self,
        study: optuna.Study,
        build: Callable[..., Any],
        data: Dataset,
        order: EpochOrder,
        *,
        drop_last: bool,
        define: Callable[..., Any] | None,
        n_trials: int | None,
        epochs: int,
        metric: str,
        batch_size: int | None,
        timeout: float | None,
        catch: tuple[type[Exception], ...],
        callbacks: tuple[Callable[..., None], ...],
        run: str,
    ) -> None:
        self.watcher = Watcher(self)
        self._study = study
        self._build = build
        self._data = data
        self._order = order
        self._drop_last = drop_last
        self._define = define
        self._wanted = n_trials
        self._epochs = epochs
        self._metric = metric
        self._batch_size = batch_size
        self._catch = catch
        self._callbacks = callbacks
        self._run = run
        self._seed = 0
        self._count = 0
        self._lost = 0  # trials without training: pruned, or failed and caught
        self._timeout = timeout
        self._deadline = math.inf
        self.expects_failures = bool(catch)
        self.cut_short = False
        """Whether `timeout` passed before all trials had started."""
        self._open: dict[int, optuna.Trial] = {}  # asked, not yet told; by number in the run
        self._told: dict[int, FrozenTrial] = {}  # told, not yet stored in the run
        self._pruned: set[int] = set()  # raised TrialPruned, not yet told

    def setup(self, space: Space, *, seed: int, **_: Any) -> None:
        self._seed = seed
        self._count, self._lost, self._open, self._told, self._pruned = 0, 0, {}, {}, set()
        self._study._stop_flag = self.cut_short = False
        self._deadline = math.inf if self._timeout is None else time.monotonic() + self._timeout

    # --- asking ----------------------------------------------------------

    def suggest(self) -> Suggested:
        """Ask the study for a trial, whose parameters `build` or `define` then suggests."""
        with self._storage_errors():
            return self._suggest()

    def _suggest(self) -> Suggested:
        while not self._study._stop_flag and not self._has_all_trials():
            if time.monotonic() >= self._deadline:
                self.cut_short = True
                return None  # not DONE: the same call resumes the run
            with self._enable_stop():
                trial = self._study.ask()
                config = self._choose_config(trial)
            if config is None:
                self._lost += 1
                continue
            number = self._count
            self._set_system_attr(trial, ATTRIBUTE, self._mark(number))
            self._open[number] = trial
            self._count += 1
            return Suggestion(config, self._epochs)
        return DONE

    def _has_all_trials(self) -> bool:
        """Return whether the run has added `n_trials` trials to the study, trained or not."""
        return self._wanted is not None and self._count + self._lost >= self._wanted

    def trials_to_come(self) -> int | None:
        """Return how many more trials to ask the study for; None if `n_trials` is None."""
        return None if self._wanted is None else self._wanted - self._count - self._lost

    def wants_more(
        self,
        state: Mapping[str, Any],
        n_trials_before: int | None,
        n_trials: int | None,
    ) -> bool:
        """Return whether `optimize` asks for more trials than before; warn if for fewer."""
        # The search's `n_trials` is None: it does not count trials without training.
        if not state:  # nothing was suggested yet
            return False
        added = int(state["count"]) + int(state["lost"])
        target = math.inf if self._wanted is None else self._wanted
        if target < added:
            warnings.warn(
                f"n_trials={target}, but the run {self._run} has added {added} trials to the study "
                "and adds no more; give another run= to add more",
                stacklevel=find_stacklevel(),
            )
        return target > added and bool(self._wanted != state["wanted"])

    def _choose_config(self, trial: optuna.Trial) -> dict[str, Any] | None:
        """Return a trial's configuration; None if defining it raised a caught exception."""
        try:
            extra = self._call(trial)
            config = {**trial.params, **(extra if isinstance(extra, Mapping) else {})}
            config = {n: json_value(value, n, keep_tuples=True) for n, value in config.items()}
        except optuna.TrialPruned:
            self._finish(trial, TrialState.PRUNED)
            return None
        except BaseException as error:
            frozen = self._tell(trial, TrialState.FAIL)
            if not isinstance(error, self._catch):
                raise
            self._call_back(frozen)
            return None
        return {**config, STUDY: self._describe_trial(trial)}

    def _describe_trial(self, trial: optuna.Trial) -> dict[str, Any]:
        """Return, as JSON, the attributes of a trial that its worker needs besides parameters."""
        system = self._study._storage.get_trial_system_attrs(trial._trial_id)
        return {
            "number": trial.number,
            "study": self._study.study_name,
            "direction": self._study.direction.name,
            "user_attrs": storable_items(trial.user_attrs),
            "system_attrs": storable_items(system),
        }

    @contextlib.contextmanager
    def _enable_stop(self) -> Iterator[None]:
        """Enable ``study.stop()``, which samplers and users call, as in the study's own loop."""
        local = self._study._thread_local
        before, local.in_optimize_loop = local.in_optimize_loop, True
        try:
            yield
        finally:
            local.in_optimize_loop = before

    def _mark(self, number: int) -> dict[str, Any]:
        return {"run": self._run, "trial": number}

    def _set_system_attr(self, trial: optuna.Trial, name: str, value: Any) -> None:
        self._study._storage.set_trial_system_attr(trial._trial_id, name, value)

    def _call(self, trial: optuna.Trial) -> Any:
        if self._define is not None:
            return self._define(trial)
        seed = self._seed % 2**32
        with generators.reserve_generators("torch" in sys.modules, seed), guard_trial():
            call_build(self._build, trial, DeferredInfo(self._make_info, trial, self._count))
        return None

    def _make_info(self, trial: optuna.Trial, number: int) -> Info:
        size = self._batch_size or trial.params.get("batch_size")
        if size is None:
            raise InputError(
                "batch_size is missing: give it to optimize(batch_size=...), or suggest it before "
                "build looks at info"
            )
        return make_info(
            self._data,
            replace(self._order, seed=self._seed),
            trial=number,
            epochs=self._epochs,
            cut=Cut(size, self._drop_last),
        )

    # --- reporting -------------------------------------------------------

    def report(self, trial: int, epoch: int, metrics: Mapping[str, float]) -> Decision:
        """Report an epoch to the study, ask its pruner, and tell the study if the trial ends."""
        with self._storage_errors():
            return self._report(trial, epoch, metrics)

    def _report(self, trial: int, epoch: int, metrics: Mapping[str, float]) -> Decision:
        if trial in self._told:
            return self._answer_again(trial, epoch)
        asked = self._open[trial]
        value = metrics.get(self._metric)
        if value is None:  # the trial has ended without this epoch
            state = TrialState.PRUNED if trial in self._pruned else TrialState.FAIL
            self._pruned.discard(trial)
            self._finish(self._open.pop(trial), state)
            return Decision.STOP
        asked.report(value, step=epoch)
        if epoch + 1 < self._epochs:
            if not asked.should_prune():
                return Decision.CONTINUE
            self._finish(self._open.pop(trial), TrialState.PRUNED)
            return Decision.STOP
        if math.isnan(value):
            self._finish(self._open.pop(trial), TrialState.FAIL)
        else:
            self._finish(self._open.pop(trial), TrialState.COMPLETE, value)
        return Decision.CONTINUE

    def _answer_again(self, trial: int, epoch: int) -> Decision:
        """Return the decision of a dead process that told the study but did not store it."""
        frozen = self._told[trial]
        if epoch < (frozen.last_step or 0) and frozen.state is not TrialState.FAIL:
            return Decision.CONTINUE
        del self._told[trial]
        return Decision.CONTINUE if frozen.state is TrialState.COMPLETE else Decision.STOP

    def _storage_errors(self) -> contextlib.AbstractContextManager[None]:
        study = self._study
        more = f"; the same call resumes the run {self._run}" if self._run else ""
        return storage_errors(optuna, study._storage, study.study_name, kind=RunError, more=more)

    def _finish(self, trial: optuna.Trial, state: TrialState, value: float | None = None) -> None:
        self._call_back(self._tell(trial, state, value))

    def _tell(
        self, trial: optuna.Trial | int, state: TrialState, value: float | None = None
    ) -> FrozenTrial:
        with self._enable_stop():
            return self._study.tell(trial, value, state=state)

    def _call_back(self, frozen: FrozenTrial) -> None:
        with self._enable_stop():
            for callback in self._callbacks:
                callback(self._study, copy.deepcopy(frozen))

    def note_pruned(self, number: int) -> None:
        self._pruned.add(number)

    def note_failure(self, number: int, error: str, raised: Raised) -> None:
        """Raise RunError if `catch` does not cover a trial's exception, which ends the search."""
        if not is_caught(raised, self._catch):
            asked = self._open.get(number)
            which = f"trial {number}"
            if asked is not None and asked.number != number:
                which = f"trial {asked.number} of the study, {number} of the run,"
            raise RunError(f"{which} failed: {error} (catch=(...) continues after such failures)")

    def close(self) -> None:
        """Fail the study's trials that are RUNNING but no longer trained."""
        for trial in self._open.values():
            self._set_system_attr(trial, INTERRUPTED, True)
            self._tell(trial, TrialState.FAIL)
        self._open = {}

    # --- resuming --------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the run's trials whose results the study does not have yet."""
        return {
            "count": self._count,
            "lost": self._lost,
            "wanted": self._wanted,
            "open": [[number, trial.number, trial.params] for number, trial in self._open.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume the study's trials; restart those that ended after the state was saved."""
        with self._storage_errors():
            self._load(state)

    def _load(self, state: Mapping[str, Any]) -> None:
        self._count = int(state["count"])
        self._lost = int(state["lost"])
        trials = {trial.number: trial for trial in self._study.get_trials(deepcopy=False)}
        self._check_study(trials.values())
        for number, asked, params in state["open"]:
            frozen = trials.get(asked)
            if frozen is None or not self._is_ours(frozen, number, params):
                raise self._other_study_error(asked)
            if frozen.state is TrialState.RUNNING:
                self._open[number] = optuna.Trial(self._study, frozen._trial_id)
            elif INTERRUPTED in frozen.system_attrs:
                self._open[number] = self._begin_anew(frozen, number)
            else:
                self._told[number] = frozen
        self._fail_orphans()

    def _check_study(self, trials: Iterable[FrozenTrial]) -> None:
        """Raise InputError if trials would be added to a study that lacks those of the run."""
        there = {mark_of(trial).get("trial") for trial in trials}
        missing = [number for number in range(self._count) if number not in there]
        if missing and not self._has_all_trials():
            raise self._other_study_error(missing[0])

    def _other_study_error(self, number: int) -> InputError:
        return InputError(
            f"the study {self._study.study_name!r} does not have trial {number} of the run "
            f"{self._run}: give the run's study, in a persistent storage "
            "(such as sqlite:///study.db)"
        )

    def _is_ours(self, frozen: FrozenTrial, number: int, params: Mapping[str, Any]) -> bool:
        """Return whether `frozen` is the run's trial `number`; storages return tuples as lists."""
        same = json_value(frozen.params, "params") == json_value(params, "params")
        return same and mark_of(frozen).get("trial") == number

    def _begin_anew(self, frozen: FrozenTrial, number: int) -> optuna.Trial:
        """Add a running copy of `frozen`, which has already failed, to the study."""
        ours = (ATTRIBUTE, INTERRUPTED)
        system = {name: value for name, value in frozen.system_attrs.items() if name not in ours}
        template = FrozenTrial(
            number=-1,  # the storage chooses the number and the identifier
            trial_id=-1,
            state=TrialState.RUNNING,
            value=None,
            datetime_start=datetime.datetime.now(),
            datetime_complete=None,
            params=frozen.params,
            distributions=frozen.distributions,
            user_attrs=dict(frozen.user_attrs),
            system_attrs={**system, ATTRIBUTE: self._mark(number)},
            intermediate_values=frozen.intermediate_values,
        )
        # Not enqueued: another process could take the copy, and earlier trials would come first.
        study = self._study
        return optuna.Trial(study, study._storage.create_new_trial(study._study_id, template))

    def _fail_orphans(self) -> None:
        """Fail trials that a dead process of this run left RUNNING."""
        ours = {trial.number for trial in self._open.values()}
        for trial in self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if mark_of(trial).get("run") == self._run and trial.number not in ours:
                self._tell(trial.number, TrialState.FAIL)


class DeferredInfo:
    """An `Info` that is created when ``build`` first uses it, after suggesting the batch size."""

    def __init__(
        self, make: Callable[[optuna.Trial, int], Info], trial: optuna.Trial, number: int
    ) -> None:
        self._make = make
        self._trial = trial
        self._number = number

    def __getattr__(self, name: str) -> Any:
        return getattr(self._make(self._trial, self._number), name)


def mark_of(frozen: FrozenTrial) -> Mapping[str, Any]:
    """Return the run and the number of a study's trial; empty if Cerebro did not create it."""
    mark = frozen.system_attrs.get(ATTRIBUTE)
    return mark if isinstance(mark, Mapping) else {}


def storable_items(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a trial's attributes that a run can store; an in-memory study allows any value."""
    storable = {}
    for name, value in attributes.items():
        with contextlib.suppress(Exception):
            encode(value)
            storable[name] = value
    return storable


def is_caught(raised: Raised, catch: Sequence[type[Exception]]) -> bool:
    """Return whether `catch` covers a trial's failure."""
    # A failure without an exception, such as the loss of workers, counts as an `Exception`.
    names = raised.bases or (class_name(Exception),)
    return any(class_name(kind) in names for kind in catch)
