"""Define the searcher whose trials come from an Optuna study."""

from __future__ import annotations

import contextlib
import copy
import datetime
import math
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from cerebro.arguments import warn_user
from cerebro.errors import InputError, RunError
from cerebro.integrations.optuna.terms import ATTRIBUTE, storage_errors
from cerebro.machine import generators
from cerebro.machine.guard import guard_trial
from cerebro.model import Info
from cerebro.run.recipe import call_build
from cerebro.run.records import STUDY, Raised, class_name
from cerebro.run.store import encode
from cerebro.searchers.base import DONE, Decision, Searcher, Suggested, Suggestion
from cerebro.space import Space, json_value

if TYPE_CHECKING:
    from cerebro.results.result import Result

INTERRUPTED = "cerebro:interrupted"
"""The system attribute of a study's trials that failed because their run was interrupted."""


class Watcher:
    """The callback that ends the search after an exception that `catch` does not cover."""

    def __init__(self, searcher: StudySearcher) -> None:
        self._searcher = searcher

    def on_run_start(self, result: Result) -> None:
        """Find trials pruned in an earlier process, which may not have updated the study."""
        for trial in result.trials:
            if trial.record.origin == "searcher":
                self._searcher.note_if_pruned(trial.record.key, trial.record.raised)

    def on_trial_end(self, trial: Any) -> None:
        raised, number = trial.record.raised, trial.record.key
        if trial.record.origin == "user":
            return  # the study does not know it
        if not self._searcher.note_if_pruned(number, raised) and trial.status == "failed":
            self._searcher.refuse_failure(number, trial.error or "", raised)


class StudyOfRun:
    """A study as one run uses it: the run's trials bear its folder and their numbers in the run."""

    def __init__(
        self, study: optuna.Study, run: str, callbacks: tuple[Callable[..., None], ...]
    ) -> None:
        self.study, self.run, self._callbacks = study, run, callbacks
        self._advice = f"; the same call resumes the run {run}" if run else ""

    def explain_errors(self) -> contextlib.AbstractContextManager[None]:
        """Raise errors of the study's storage as RunError."""
        storage, name = self.study._storage, self.study.study_name
        return storage_errors(optuna, storage, name, kind=RunError, more=self._advice)

    @contextlib.contextmanager
    def enable_stop(self) -> Iterator[None]:
        """Enable ``study.stop()``, which samplers and users call, as in the study's own loop."""
        local = self.study._thread_local
        before, local.in_optimize_loop = local.in_optimize_loop, True
        try:
            yield
        finally:
            local.in_optimize_loop = before

    def mark(self, trial: optuna.Trial, name: str, value: Any) -> None:
        self.study._storage.set_trial_system_attr(trial._trial_id, name, value)

    def tell(
        self, trial: optuna.Trial | int, state: TrialState, value: float | None = None
    ) -> FrozenTrial:
        with self.enable_stop():
            return self.study.tell(trial, value, state=state)

    def finish(self, trial: optuna.Trial, state: TrialState, value: float | None = None) -> None:
        """Tell the study of a trial's end, and call the callbacks."""
        self.call_back(self.tell(trial, state, value))

    def call_back(self, frozen: FrozenTrial) -> None:
        with self.enable_stop():
            for callback in self._callbacks:
                callback(self.study, copy.deepcopy(frozen))

    def describe(self, trial: optuna.Trial) -> dict[str, Any]:
        """Return, as JSON, the attributes of a trial that its worker needs besides parameters."""
        system = self.study._storage.get_trial_system_attrs(trial._trial_id)
        return {
            "number": trial.number,
            "study": self.study.study_name,
            "direction": self.study.direction.name,
            "user_attrs": storable_items(trial.user_attrs),
            "system_attrs": storable_items(system),
        }

    # --- resuming --------------------------------------------------------

    def find_trial(
        self, trials: Mapping[int, FrozenTrial], asked: int, number: int, params: Mapping[str, Any]
    ) -> FrozenTrial:
        """Return the study's trial `asked`; raise InputError unless it is the run's `number`."""
        frozen = trials.get(asked)
        if frozen is None or mark_of(frozen).get("trial") != number:
            raise self.make_other_error(asked)
        if json_value(frozen.params, "params") != json_value(params, "params"):  # tuples are lists
            raise self.make_other_error(asked)
        return frozen

    def make_other_error(self, number: int) -> InputError:
        return InputError(
            f"the study {self.study.study_name!r} does not have trial {number} of the run "
            f"{self.run}: give the run's study, in a persistent storage "
            "(such as sqlite:///study.db)"
        )

    def begin_anew(self, frozen: FrozenTrial, number: int) -> optuna.Trial:
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
            system_attrs={**system, ATTRIBUTE: {"run": self.run, "trial": number}},
            intermediate_values=frozen.intermediate_values,
        )
        # Not enqueued: another process could take the copy, and earlier trials would come first.
        study = self.study
        return optuna.Trial(study, study._storage.create_new_trial(study._study_id, template))

    def fail_orphans(self, ours: Collection[int]) -> None:
        """Fail the run's trials that a dead process left RUNNING, except `ours`."""
        for trial in self.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            if mark_of(trial).get("run") == self.run and trial.number not in ours:
                self.tell(trial.number, TrialState.FAIL)


class ParameterChooser:
    """Chooses a trial's parameters by calling ``define`` or, without it, ``build``."""

    def __init__(
        self, build: Callable[..., Any], define: Callable[..., Any] | None, batch_size: int | None
    ) -> None:
        self._build, self._define, self._batch_size = build, define, batch_size
        self.make_info: Callable[[int, Mapping[str, Any]], Info] | None = None
        self.seed = 0

    def choose(self, trial: optuna.Trial, number: int) -> dict[str, Any]:
        """Return the configuration of a trial that gets this number in the run."""
        extra = None
        if self._define is not None:
            extra = self._define(trial)
        else:
            info = DeferredInfo(partial(self._info_of, trial, number))
            seed = self.seed % 2**32
            with generators.reserve_generators("torch" in sys.modules, seed), guard_trial():
                call_build(self._build, trial, info)
        config = {**trial.params, **(extra if isinstance(extra, Mapping) else {})}
        return {n: json_value(value, n, keep_tuples=True) for n, value in config.items()}

    def _info_of(self, trial: optuna.Trial, number: int) -> Info:
        if self._batch_size is None and "batch_size" not in trial.params:
            raise InputError(
                "batch_size is missing: give it to optimize(batch_size=...), or suggest it before "
                "build looks at info"
            )
        assert self.make_info is not None
        return self.make_info(number, trial.params)


class DeferredInfo:
    """An `Info` that is created when ``build`` first uses it, after suggesting the batch size."""

    def __init__(self, make: Callable[[], Info]) -> None:
        self._make = make

    def __getattr__(self, name: str) -> Any:
        return getattr(self._make(), name)


class StudySearcher(Searcher):
    adaptive = True
    repeatable = False  # the study's own storage keeps the reports
    exact_metrics = True

    def __init__(
        self,
        study: StudyOfRun,
        chooser: ParameterChooser,
        *,
        n_trials: int | None,
        epochs: int,
        metric: str,
        timeout: float | None,
        catch: tuple[type[Exception], ...],
    ) -> None:
        self._study, self._chooser = study, chooser
        self._wanted, self._epochs, self._metric = n_trials, epochs, metric
        self._timeout, self._deadline = timeout, math.inf
        self._catch, self.expects_failures = catch, bool(catch)
        self.cut_short = False  # whether `timeout` passed before all trials had started
        self._count = 0
        self._lost = 0  # trials without training: pruned, or failed and caught
        self._open: dict[int, optuna.Trial] = {}  # asked, not yet told; by number in the run
        self._told: dict[int, FrozenTrial] = {}  # told, not yet stored in the run
        self._pruned: set[int] = set()  # raised TrialPruned, not yet told

    def bind_run(self, folder: Path, make_info: Callable[[int, Mapping[str, Any]], Info]) -> None:
        self._study.run = str(folder)
        self._chooser.make_info = make_info

    def setup(self, space: Space, *, seed: int, **_: Any) -> None:
        self._chooser.seed = seed
        self._count, self._lost, self._open, self._told, self._pruned = 0, 0, {}, {}, set()
        self._study.study._stop_flag = self.cut_short = False
        self._deadline = math.inf if self._timeout is None else time.monotonic() + self._timeout

    # --- asking ----------------------------------------------------------

    def suggest(self) -> Suggested:
        """Ask the study for a trial, whose parameters `build` or `define` then suggests."""
        with self._study.explain_errors():
            while not self._study.study._stop_flag and not self._has_all_trials():
                if time.monotonic() >= self._deadline:
                    self.cut_short = True
                    return None  # not DONE: the same call resumes the run
                with self._study.enable_stop():
                    trial = self._study.study.ask()
                    config = self._choose_config(trial)
                if config is None:
                    self._lost += 1
                    continue
                number = self._count
                self._study.mark(trial, ATTRIBUTE, {"run": self._study.run, "trial": number})
                self._open[number] = trial
                self._count += 1
                return Suggestion(config, self._epochs)
            return DONE

    def _choose_config(self, trial: optuna.Trial) -> dict[str, Any] | None:
        """Return a trial's configuration; None if defining it raised a caught exception."""
        try:
            config = self._chooser.choose(trial, self._count)
        except optuna.TrialPruned:
            self._study.finish(trial, TrialState.PRUNED)
            return None
        except BaseException as error:
            frozen = self._study.tell(trial, TrialState.FAIL)
            if not isinstance(error, self._catch):
                raise
            self._study.call_back(frozen)
            return None
        return {**config, STUDY: self._study.describe(trial)}

    def _has_all_trials(self) -> bool:
        """Return whether the run has added `n_trials` trials to the study, trained or not."""
        return self._wanted is not None and self._count + self._lost >= self._wanted

    def trials_to_come(self) -> int | None:
        return None if self._wanted is None else self._wanted - self._count - self._lost

    def wants_more(
        self, state: Mapping[str, Any], n_trials_before: int | None, n_trials: int | None
    ) -> bool:
        """Return whether `optimize` asks for more trials than before; warn if for fewer."""
        # The search's `n_trials` is None: it does not count trials without training.
        if not state:  # nothing was suggested yet
            return False
        added = int(state["count"]) + int(state["lost"])
        target = math.inf if self._wanted is None else self._wanted
        if target < added:
            warn_user(
                f"n_trials={target}, but the run {self._study.run} has added {added} trials to the "
                "study and adds no more; give another run= to add more"
            )
        return target > added and bool(self._wanted != state["wanted"])

    # --- reporting -------------------------------------------------------

    def report(self, trial: int, epoch: int, metrics: Mapping[str, float]) -> Decision:
        """Report an epoch to the study, ask its pruner, and tell the study if the trial ends."""
        with self._study.explain_errors():
            if trial in self._told:
                return self._answer_again(trial, epoch)
            asked = self._open[trial]
            value = metrics.get(self._metric)
            if value is None:  # the trial has ended without this epoch
                state = TrialState.PRUNED if trial in self._pruned else TrialState.FAIL
                self._pruned.discard(trial)
                self._study.finish(self._open.pop(trial), state)
                return Decision.STOP
            asked.report(value, step=epoch)
            if epoch + 1 < self._epochs:
                if not asked.should_prune():
                    return Decision.CONTINUE
                self._study.finish(self._open.pop(trial), TrialState.PRUNED)
                return Decision.STOP
            if math.isnan(value):
                self._study.finish(self._open.pop(trial), TrialState.FAIL)
            else:
                self._study.finish(self._open.pop(trial), TrialState.COMPLETE, value)
            return Decision.CONTINUE

    def _answer_again(self, trial: int, epoch: int) -> Decision:
        """Return the decision of a dead process that told the study but did not store it."""
        frozen = self._told[trial]
        if epoch < (frozen.last_step or 0) and frozen.state is not TrialState.FAIL:
            return Decision.CONTINUE
        del self._told[trial]
        return Decision.CONTINUE if frozen.state is TrialState.COMPLETE else Decision.STOP

    def note_if_pruned(self, number: int, raised: Raised) -> bool:
        """Return whether a trial's exception was `optuna.TrialPruned`, and remember it."""
        pruned = is_caught(raised, (optuna.TrialPruned,))
        if pruned:
            self._pruned.add(number)
        return pruned

    def refuse_failure(self, number: int, error: str, raised: Raised) -> None:
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
            self._study.mark(trial, INTERRUPTED, True)
            self._study.tell(trial, TrialState.FAIL)
        self._open = {}

    # --- resuming --------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the counters and the open trials: those without a result in the study."""
        return {
            "count": self._count,
            "lost": self._lost,
            "wanted": self._wanted,
            "open": [[number, trial.number, trial.params] for number, trial in self._open.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume the study's trials; restart those that ended after the state was saved."""
        with self._study.explain_errors():
            self._count = int(state["count"])
            self._lost = int(state["lost"])
            study = self._study
            trials = {trial.number: trial for trial in study.study.get_trials(deepcopy=False)}
            numbers = {mark_of(trial).get("trial") for trial in trials.values()}
            missing = [number for number in range(self._count) if number not in numbers]
            if missing and not self._has_all_trials():  # it would add trials to another study
                raise study.make_other_error(missing[0])
            for number, asked, params in state["open"]:
                frozen = study.find_trial(trials, asked, number, params)
                if frozen.state is TrialState.RUNNING:
                    self._open[number] = optuna.Trial(study.study, frozen._trial_id)
                elif INTERRUPTED in frozen.system_attrs:
                    self._open[number] = study.begin_anew(frozen, number)
                else:
                    self._told[number] = frozen
            study.fail_orphans({trial.number for trial in self._open.values()})


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
