"""Define a searcher that uses Ray Tune's search algorithm and scheduler.

It calls them in the same order as Tune's controller, but with trials that are only names: Cerebro
trains them, and reports come in rounds. While Tune's code runs, `random` and NumPy's global
generator have states that belong to this search. So its answers depend neither on timing nor on
other random draws in the process.

Tune's objects save themselves as pickles, which Cerebro does not read. Instead, a run's store keeps
all calls; a resumed run repeats the calls and compares the answers.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import cerebro._core as _core
from cerebro.errors import InputError
from cerebro.machine import generators
from cerebro.searchers.base import DONE, Decision, Searcher, Suggested, Suggestion
from cerebro.space import Space, json_value


class TuneTrial:
    """A trial as a scheduler sees it: its name, its status and its last result."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    TERMINATED = "TERMINATED"
    ERROR = "ERROR"

    is_saving = False

    def __init__(self, trial_id: str, config: dict[str, Any]) -> None:
        self.trial_id = trial_id
        self.config = config
        self.evaluated_params = dict(config)
        self.status = TuneTrial.PENDING
        self.last_result: dict[str, Any] = {}
        self.number: int | None = None  # Cerebro's, once the trial has begun

    def is_finished(self) -> bool:
        return self.status in (TuneTrial.TERMINATED, TuneTrial.ERROR)

    def __repr__(self) -> str:
        return f"trial_{self.trial_id}"


class TuneSearcher(Searcher):
    """Runs a search algorithm and a scheduler of Ray Tune, which takes it for Tune's controller.

    `algorithm` is a `Searcher` or a `BasicVariantGenerator`, `scheduler` is from `check_scheduler`.
    `num_samples` is as in `tune.TuneConfig`: the number of samples for each combination of grids,
    or of trials of a `Searcher`; -1: no limit.
    """

    def __init__(
        self, param_space: Mapping[str, Any], algorithm: Any, scheduler: Any, num_samples: int
    ) -> None:
        from ray.tune.schedulers import FIFOScheduler, HyperBandScheduler
        from ray.tune.search import BasicVariantGenerator

        kind = Variants if type(algorithm) is BasicVariantGenerator else Source
        self._num_samples = num_samples
        samples = math.inf if num_samples == -1 else num_samples
        self._source = kind(dict(param_space), algorithm, samples)
        # If neither object is adaptive, trials do not wait for each other.
        self.adaptive = self._source.adaptive or type(scheduler) is not FIFOScheduler
        self._scheduler = copy.deepcopy(scheduler)  # the caller's may begin another search
        self._made_with = type(scheduler).__name__, read_scheduler_arguments(scheduler)
        # If no trial waited to join, HyperBandScheduler would halve a bracket before it is full.
        self._looks_ahead = type(scheduler) is HyperBandScheduler

    def __repr__(self) -> str:
        scheduler = format_call(*self._made_with)
        return f"TuneSearcher(searcher={self._source.name}, scheduler={scheduler})"

    def setup(
        self,
        space: Space,
        *,
        seed: int,
        epochs: int,
        n_trials: int | float | None,
        metric: str,
        mode: str,
        points: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self._epochs, self._metric = epochs, metric
        self._live: list[TuneTrial] = []  # not ended, in order of creation
        self._trials: dict[int, TuneTrial] = {}  # by number: those of them that have begun
        self._begun = 0
        self._dropped: list[int] = []
        self._log: list[list[Any]] = []
        with generators.reserve_generators(False, seed % 2**32):
            self._random = generators.capture(False)
        with self._use_own_random():
            unset = find_unset("scheduler", self._scheduler, "_", metric, mode)
            self._scheduler.set_search_properties(*unset)
            self._source.set_up(metric, mode, points, math.inf if n_trials is None else n_trials)
        self.total = self._source.total

    # --- asking ----------------------------------------------------------

    def suggest(self) -> Suggested:
        """Return the trial that the scheduler runs next."""
        with self._use_own_random():
            suggestion = self._suggest()
        if suggestion is not None and suggestion is not DONE and self.adaptive:
            self._log.append(["ask", *_identify(suggestion)])
        return suggestion

    def _suggest(self) -> Suggested:
        self._queue_trial()
        trial: TuneTrial | None = self._scheduler.choose_trial_to_run(self)
        if trial is None:
            is_over = self._source.exhausted and not self._live
            return DONE if is_over else None
        paused = trial.status == TuneTrial.PAUSED
        trial.status = TuneTrial.RUNNING
        if paused:
            return Suggestion({}, self._epochs, trial=trial.number)
        trial.number = self._begun
        self._begun += 1
        self._trials[trial.number] = trial
        if self._looks_ahead:
            self._queue_trial()
        return Suggestion(trial.config, self._epochs)

    def _queue_trial(self) -> None:
        """Queue a trial if none is pending and the algorithm has one."""
        if any(trial.status == TuneTrial.PENDING for trial in self._live):
            return
        made = self._source.make_config()
        if made is not None:
            trial_id, config = made
            trial = TuneTrial(trial_id, json_value(config, "param_space", keep_tuples=True))
            self._live.append(trial)
            self._scheduler.on_trial_add(self, trial)

    # --- reporting -------------------------------------------------------

    def report(self, trial: int, epoch: int, metrics: Mapping[str, float]) -> Decision:
        """Report an epoch to the scheduler and the search algorithm; return their decision.

        Raises InputError if a resumed run's scheduler has ended the trial, but had not before.
        """
        if not self.adaptive:
            return Decision.CONTINUE
        if trial not in self._trials:
            raise self._make_decision_error(trial, epoch)
        result = dict(metrics)
        with self._use_own_random():
            decision = self._report(self._trials[trial], epoch, result)
        encoded = {n: v if math.isfinite(v) else repr(float(v)) for n, v in result.items()}
        self._log.append(["tell", trial, epoch, encoded, decision.value])
        return decision

    def _report(self, trial: TuneTrial, epoch: int, metrics: dict[str, float]) -> Decision:
        if not math.isfinite(metrics.get(self._metric, math.nan)):
            self._scheduler.on_trial_error(self, trial)
            self._source.report_end(trial.trial_id, error=True)
            self._end(trial, TuneTrial.ERROR)
            return Decision.STOP
        result = {
            **metrics,
            "training_iteration": epoch + 1,
            "trial_id": trial.trial_id,
            "config": trial.config,
            "done": False,
        }
        over = epoch + 1 >= self._epochs
        answer = "STOP"
        if not over:
            answer = self._scheduler.on_trial_result(self, trial, dict(result))
        trial.last_result = result
        if answer == "STOP":
            result["done"] = True
            self._scheduler.on_trial_complete(self, trial, dict(result))
            self._source.report_end(trial.trial_id, result=dict(result))
            self._end(trial, TuneTrial.TERMINATED)
            return Decision.CONTINUE if over else Decision.STOP
        self._source.report(trial.trial_id, dict(result))
        if answer == "PAUSE":
            trial.status = TuneTrial.PAUSED
            return Decision.PAUSE
        return Decision.CONTINUE

    def dropped(self) -> list[int]:
        """Return the paused trials that the scheduler has ended, each only once."""
        trials, self._dropped = self._dropped, []
        return trials

    def _end(self, trial: TuneTrial, status: str) -> None:
        trial.status = status
        if trial.number is not None:
            del self._trials[trial.number]
        self._live = [other for other in self._live if other is not trial]

    # --- what schedulers call ---------------------------------------------

    def get_trials(self) -> list[TuneTrial]:
        return self._live

    get_live_trials = get_trials  # the same here, where ended trials are forgotten

    def stop_trial(self, trial: TuneTrial) -> None:
        """End a trial that is paused or has not begun."""
        if trial.is_finished():
            return
        self._scheduler.on_trial_remove(self, trial)
        self._source.report_end(trial.trial_id)
        if trial.number is not None:
            self._dropped.append(trial.number)
        self._end(trial, TuneTrial.TERMINATED)

    # --- randomness ------------------------------------------------------

    @contextlib.contextmanager
    def _use_own_random(self) -> Iterator[None]:
        """Let Tune's code use global generators that belong only to this search."""
        with generators.reserve_generators(False):
            generators.restore(self._random)
            try:
                yield
            finally:
                self._random = generators.capture(False)

    # --- resuming --------------------------------------------------------

    def wants_more(
        self, state: Mapping[str, Any], n_trials_before: int | None, n_trials: int | None
    ) -> bool:
        """Return whether `num_samples` or `n_trials` is larger than before.

        Raises InputError if `num_samples` is smaller, or if a scheduler that pauses trials would
        get more.
        """
        samples = self._num_samples
        before = state["num_samples"] if state else samples  # else nothing was suggested yet
        if self._source.samples < (math.inf if before == -1 else before):
            raise InputError(
                f"num_samples was {before} and is now {samples} (it can only be increased): "
                "give the same or more to resume the run, or start a new run with another run="
            )
        numbers = {"num_samples": (before, samples), "n_trials": (n_trials_before, n_trials)}
        changed = [f"{n} was {was}, is {now}" for n, (was, now) in numbers.items() if was != now]
        # Once it has run out of new trials, it has resumed or ended paused ones instead.
        pauses = self._looks_ahead or getattr(self._scheduler, "_hard_stop", True) is False
        if changed and pauses:
            raise InputError(
                f"{'; '.join(changed)}: {self._made_with[0]} pauses trials and has chosen from "
                "those that there were, so a resumed run cannot have more; give the same, or start "
                "a new run with another run="
            )
        return bool(changed)

    def state_dict(self) -> dict[str, Any]:
        calls = {"log": list(self._log)} if self.adaptive else {"begun": self._begun}
        return {**calls, "num_samples": self._num_samples, "scheduler": list(self._made_with)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Repeat all calls; raise InputError if an answer or the scheduler's arguments differ."""
        if not self.adaptive:
            for _ in range(state["begun"]):
                self.suggest()
            return
        self._refuse_other_scheduler(*state["scheduler"])
        for entry in state["log"]:
            if entry[0] == "ask":
                self._ask_again(entry[1:])
                continue
            _, trial, epoch, metrics, decision = entry
            now = self.report(trial, epoch, {n: float(v) for n, v in metrics.items()})
            if now.value != decision:
                raise self._make_decision_error(trial, epoch)
        self._dropped = []

    def _refuse_other_scheduler(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Raise InputError if the run's scheduler was made with other arguments."""
        its_name, now = self._made_with
        # Another version of Ray may show other arguments.
        changed = [key for key in arguments if key in now and arguments[key] != now[key]]
        if name == its_name and not changed:
            return
        if name == its_name:
            arguments, now = ({key: values[key] for key in changed} for values in (arguments, now))
        raise InputError(
            f"scheduler was {format_call(name, arguments)}, is {format_call(its_name, now)}: make "
            "it with the same arguments to resume the run, or start a new run with another run="
        )

    def _make_decision_error(self, trial: int, epoch: int) -> InputError:
        return InputError(
            f"the scheduler {self._made_with[0]} does not repeat its decision about trial {trial} "
            f"until epoch {epoch}: to resume a run, make it with the same arguments"
        )

    def _ask_again(self, said: list[Any]) -> None:
        number = self._begun if said[0] is None else said[0]
        suggestion = self.suggest()
        now = _identify(suggestion) if isinstance(suggestion, Suggestion) else []
        if now != said:
            raise InputError(
                f"the search algorithm {self._source.name} does not repeat its suggestion for "
                f"trial {number}: to resume a run, make it with the same arguments and a seed, "
                "such as OptunaSearch(seed=0)"
            )


def _identify(suggestion: Suggestion) -> list[Any]:
    """Return what distinguishes suggestions: a resumed trial, or a new configuration."""
    text = json.dumps(suggestion.config, sort_keys=True)
    return [suggestion.trial, _core.xxh3_64(text.encode())]


def read_scheduler_arguments(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's arguments that its attributes show, without metric and mode."""
    values = {name.removeprefix("_"): value for name, value in vars(scheduler).items()}
    if "eta" in values:  # HyperBandScheduler
        values |= {"max_t": values["max_t_attr"], "reduction_factor": values["eta"]}
    if "brackets" in values:  # ASHAScheduler; a rung is a milestone and its results, the last first
        first, _ = values["brackets"][0]._rungs[-1]
        values |= {"brackets": len(values["brackets"]), "grace_period": first}
    arguments = {name: values.get(name) for name in inspect.signature(type(scheduler)).parameters}
    return {
        name: value
        for name, value in arguments.items()
        if isinstance(value, (bool, int, float, str)) and name not in ("metric", "mode")
    }


def format_call(name: str, arguments: Mapping[str, Any]) -> str:
    """Return the call that makes an object, for messages."""
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


# --- the configurations of search algorithms ---------------------------------------


class Source:
    """The configurations that a `Searcher` suggests, at most `samples`; it learns from results."""

    adaptive = True

    def __init__(self, mapping: dict[str, Any], algorithm: Any, samples: float) -> None:
        self.samples = samples
        self.name = type(algorithm).__name__
        self._mapping = mapping
        self._algorithm = algorithm

    def set_up(self, metric: str, mode: str, points: Sequence[Any], limit: float) -> None:
        """Begin anew; make at most `limit` configurations, whatever the number of samples."""
        self.exhausted, self._made, self._limit = False, 0, limit
        is_known = self.adaptive and self.samples != math.inf  # grids multiply the samples
        self.total = int(min(self.samples, limit)) if is_known else None
        self._begin(metric, mode, points)

    def make_config(self) -> tuple[str, dict[str, Any]] | None:
        """Return the next trial's name and configuration; None if no trial is due now."""
        if self.exhausted or self._made >= self._limit:
            self.exhausted = True
            return None
        trial_id = f"{self._made:05d}"
        config = self._next(trial_id)
        if config is None:
            return None
        self._made += 1
        return trial_id, config

    def report(self, trial_id: str, result: dict[str, Any]) -> None:
        if self.adaptive:
            self._algorithm.on_trial_result(trial_id, result)

    def report_end(self, trial_id: str, **outcome: Any) -> None:
        if self.adaptive:
            self._algorithm.on_trial_complete(trial_id, **outcome)

    def _begin(self, metric: str, mode: str, points: Sequence[Any]) -> None:
        from ray.tune.search.variant_generator import _has_unresolved_values

        if points:
            raise InputError(
                "points are not for a search algorithm of Ray Tune: give it points_to_evaluate "
                "instead"
            )
        unset = find_unset("searcher", self._algorithm, "", metric, mode)
        is_set = self._algorithm.set_search_properties(*unset, self._mapping)
        if not is_set and _has_unresolved_values(self._mapping):
            raise InputError(
                f"param_space: {self.name} was made with its own space: leave only constants in "
                "param_space"
            )

    def _next(self, trial_id: str) -> dict[str, Any] | None:
        from ray.tune.search import Searcher
        from ray.tune.utils.util import merge_dicts

        suggested = Searcher.FINISHED
        if self._made < self.samples:
            suggested = self._algorithm.suggest(trial_id)
        self.exhausted = suggested == Searcher.FINISHED
        if self.exhausted or suggested is None:
            return None
        merged: dict[str, Any] = merge_dicts(self._mapping, copy.deepcopy(suggested))
        return merged


class Variants(Source):
    """The samples of a `BasicVariantGenerator`, each with all combinations of grids."""

    adaptive = False

    def _begin(self, metric: str, mode: str, points: Sequence[Any]) -> None:
        self._configs = self._generate([dict(point) for point in points])

    def _next(self, trial_id: str) -> dict[str, Any] | None:
        config = next(self._configs, None)
        self.exhausted = config is None
        return config

    def _generate(self, points: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield what Tune's `BasicVariantGenerator` would: points first, then samples by grids."""
        from ray.tune.search import variant_generator as tune

        generator = self._algorithm
        constant = generator._constant_grid_search
        state = generator._random_state
        spec = {"config": self._mapping}
        presets = [*generator._points_to_evaluate, *points]
        sample = 0
        while sample < self.samples:
            variants = (
                tune._get_preset_variants(spec, presets[sample], constant, state)
                if sample < len(presets)
                else tune.generate_variants(spec, constant, state)
            )
            for _, variant in variants:
                yield variant["config"]
            sample += 1


def find_unset(what: str, target: Any, prefix: str, metric: str, mode: str) -> list[str | None]:
    """Return metric and mode, each None if a Tune object has it; raise InputError if it differs."""
    unset: list[str | None] = []
    for name, value in (("metric", metric), ("mode", mode)):
        had = getattr(target, prefix + name, None)
        if had is not None and had != value:
            raise InputError(
                f"{name}={value!r}, but the {what} was made with {name}={had!r}: give the same, "
                "or omit it there"
            )
        unset.append(None if had else value)
    return unset
