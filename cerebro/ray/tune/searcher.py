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
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import cerebro._core as _core
from cerebro.errors import InputError
from cerebro.machine import generators
from cerebro.ray.tune.names import Controller, TuneTrial, format_call, read_scheduler_arguments
from cerebro.searchers.base import DONE, Decision, Searcher, Suggested, Suggestion
from cerebro.space import Space, json_value


class TuneSearcher(Searcher):
    """Runs a search algorithm and a scheduler of Ray Tune.

    `algorithm` is a `Searcher` or a `BasicVariantGenerator`, `scheduler` is from `check_scheduler`.
    `num_samples` is as in `tune.TuneConfig`: the number of samples for each combination of grids,
    or of trials of a `Searcher`; -1: no limit.
    """

    def __init__(
        self, param_space: Mapping[str, Any], algorithm: Any, scheduler: Any, num_samples: int
    ) -> None:
        from ray.tune.schedulers import FIFOScheduler, HyperBandScheduler
        from ray.tune.search import BasicVariantGenerator

        self.adaptive = True
        self._mapping = dict(param_space)
        self._algorithm = algorithm
        self._scheduler = copy.deepcopy(scheduler)  # the caller's may begin another search
        self._made_with = type(scheduler).__name__, read_scheduler_arguments(scheduler)
        # If no trial waited to join, HyperBandScheduler would halve a bracket before it is full.
        self._looks_ahead = type(scheduler) is HyperBandScheduler
        # Once it has run out of new trials, it has resumed or ended paused ones instead.
        self._pauses = self._looks_ahead or getattr(scheduler, "_hard_stop", True) is False
        self._samples = math.inf if num_samples == -1 else num_samples
        self._variants: Iterator[dict[str, Any]] | None = None
        if type(algorithm) is BasicVariantGenerator:
            self._variants = iter(())
            # If neither object is adaptive, trials do not wait for each other.
            self.adaptive = type(scheduler) is not FIFOScheduler

    def __repr__(self) -> str:
        algorithm = type(self._algorithm).__name__
        return f"TuneSearcher(searcher={algorithm}, scheduler={format_call(*self._made_with)})"

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
        self._limit = math.inf if n_trials is None else n_trials
        if self._variants is None and self._samples != math.inf:
            self.total = int(min(self._samples, self._limit))
        self._controller = Controller(self._stop_idle)
        self._trials: dict[int, TuneTrial] = {}  # by number: trials that have begun and not ended
        self._made = self._begun = 0
        self._exhausted = False
        self._dropped: list[int] = []
        self._log: list[list[Any]] = []
        with generators.reserve_generators(False, seed % 2**32):
            self._random = generators.capture(False)
        with self._use_own_random():
            _set_up_scheduler(self._scheduler, metric, mode)
            if self._variants is None:
                _set_up_searcher(self._algorithm, metric, mode, self._mapping, points)
            else:
                self._variants = self._generate_variants([dict(point) for point in points])

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
        trial: TuneTrial | None = self._scheduler.choose_trial_to_run(self._controller)
        if trial is None:
            return DONE if self._exhausted and not self._controller.get_live_trials() else None
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
        if not any(trial.status == TuneTrial.PENDING for trial in self._controller.get_trials()):
            self._add_trial()

    def _add_trial(self) -> None:
        if self._exhausted or self._made >= self._limit:
            self._exhausted = True
            return
        trial_id = f"{self._made:05d}"
        config = self._next_config(trial_id)
        if config is None:
            return
        self._made += 1
        trial = TuneTrial(trial_id, json_value(config, "param_space", keep_tuples=True))
        self._controller.trials.append(trial)
        self._scheduler.on_trial_add(self._controller, trial)

    def _next_config(self, trial_id: str) -> dict[str, Any] | None:
        if self._variants is not None:
            config = next(self._variants, None)
            self._exhausted = config is None
            return config
        if self._made >= self._samples:
            self._exhausted = True
            return None
        from ray.tune.search import Searcher
        from ray.tune.utils.util import merge_dicts

        suggested = self._algorithm.suggest(trial_id)
        if suggested == Searcher.FINISHED:
            self._exhausted = True
            return None
        if suggested is None:
            return None
        merged: dict[str, Any] = merge_dicts(self._mapping, copy.deepcopy(suggested))
        return merged

    def _generate_variants(self, points: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield what Tune's `BasicVariantGenerator` would: points first, then samples by grids."""
        from ray.tune.search import variant_generator as tune

        generator = self._algorithm
        constant = generator._constant_grid_search
        state = generator._random_state
        spec = {"config": self._mapping}
        presets = [*generator._points_to_evaluate, *points]
        sample = 0
        while sample < self._samples:
            variants = (
                tune._get_preset_variants(spec, presets[sample], constant, state)
                if sample < len(presets)
                else tune.generate_variants(spec, constant, state)
            )
            for _, variant in variants:
                yield variant["config"]
            sample += 1

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
        encoded = {n: _encode_metric(v) for n, v in result.items()}
        self._log.append(["tell", trial, epoch, encoded, decision.value])
        return decision

    def _report(self, trial: TuneTrial, epoch: int, metrics: dict[str, float]) -> Decision:
        if not math.isfinite(metrics.get(self._metric, math.nan)):
            self._scheduler.on_trial_error(self._controller, trial)
            self._tell_completion(trial, error=True)
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
        answer = (
            "STOP"
            if over
            else self._scheduler.on_trial_result(self._controller, trial, dict(result))
        )
        trial.last_result = result
        if answer == "STOP":
            result["done"] = True
            self._scheduler.on_trial_complete(self._controller, trial, dict(result))
            self._tell_completion(trial, result=dict(result))
            self._end(trial, TuneTrial.TERMINATED)
            return Decision.CONTINUE if over else Decision.STOP
        if self._variants is None:
            self._algorithm.on_trial_result(trial.trial_id, dict(result))
        if answer == "PAUSE":
            trial.status = TuneTrial.PAUSED
            return Decision.PAUSE
        return Decision.CONTINUE

    def dropped(self) -> list[int]:
        """Return the paused trials that the scheduler has ended, each only once."""
        trials, self._dropped = self._dropped, []
        return trials

    def _stop_idle(self, trial: TuneTrial) -> None:
        """End a trial that is paused or has not begun; called by the scheduler."""
        if trial.is_finished():
            return
        self._scheduler.on_trial_remove(self._controller, trial)
        self._tell_completion(trial)
        if trial.number is not None:
            self._dropped.append(trial.number)
        self._end(trial, TuneTrial.TERMINATED)

    def _tell_completion(self, trial: TuneTrial, **what: Any) -> None:
        if self._variants is None:
            self._algorithm.on_trial_complete(trial.trial_id, **what)

    def _end(self, trial: TuneTrial, status: str) -> None:
        trial.status = status
        if trial.number is not None:
            del self._trials[trial.number]
        self._controller.forget_ended()

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
        self,
        state: Mapping[str, Any],
        n_trials_before: int | None,
        n_trials: int | None,
    ) -> bool:
        """Return whether `num_samples` or `n_trials` is larger than before.

        Raises InputError if `num_samples` is smaller, or if a scheduler that pauses trials would
        get more.
        """
        samples = -1 if self._samples == math.inf else self._samples
        before = state["num_samples"] if state else samples  # else nothing was suggested yet
        if self._samples < (math.inf if before == -1 else before):
            raise InputError(
                f"num_samples was {before} and is now {samples} (it can only be increased): "
                "give the same or more to resume the run, or start a new run with another run="
            )
        changed = [
            f"{name} was {was}, is {now}"
            for name, was, now in (
                ("num_samples", before, samples),
                ("n_trials", n_trials_before, n_trials),
            )
            if was != now
        ]
        if changed and self._pauses:
            raise InputError(
                f"{'; '.join(changed)}: {type(self._scheduler).__name__} pauses trials and has "
                "chosen from those that there were, so a resumed run cannot have more; give the "
                "same, or start a new run with another run="
            )
        return bool(changed)

    def state_dict(self) -> dict[str, Any]:
        calls = {"log": list(self._log)} if self.adaptive else {"begun": self._begun}
        return {
            **calls,
            "num_samples": -1 if self._samples == math.inf else self._samples,
            "scheduler": list(self._made_with),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Repeat all calls.

        Raises InputError if the scheduler or the search algorithm answers differently, or is known
        to have been made with other arguments.
        """
        if not self.adaptive:
            for _ in range(state["begun"]):
                self.suggest()
            return
        self._refuse_other_scheduler(*state["scheduler"])
        for entry in state["log"]:
            if entry[0] == "tell":
                self._tell_again(*entry[1:])
            else:
                self._ask_again(entry[1:])
        self._dropped = []

    def _refuse_other_scheduler(self, name: str, arguments: Mapping[str, Any]) -> None:
        """Raise InputError if the run's scheduler was made with other arguments."""
        its_name, now = self._made_with
        shared = arguments.keys() & now.keys()  # another version of Ray may show others
        changed = [key for key in arguments if key in shared and arguments[key] != now[key]]
        if name == its_name and not changed:
            return
        if name == its_name:
            arguments, now = ({key: values[key] for key in changed} for values in (arguments, now))
        raise InputError(
            f"scheduler was {format_call(name, arguments)}, is {format_call(its_name, now)}: make "
            "it with the same arguments to resume the run, or start a new run with another run="
        )

    def _tell_again(
        self, trial: int, epoch: int, metrics: Mapping[str, Any], decision: str
    ) -> None:
        now = self.report(trial, epoch, {n: _decode_metric(v) for n, v in metrics.items()})
        if decision != now.value:
            raise self._make_decision_error(trial, epoch)

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
                f"the search algorithm {type(self._algorithm).__name__} does not repeat its "
                f"suggestion for trial {number}: to resume a run, make it with the same "
                "arguments and a seed, such as OptunaSearch(seed=0)"
            )


def _identify(suggestion: Suggestion) -> list[Any]:
    """Return what distinguishes suggestions: a resumed trial, or a new configuration."""
    text = json.dumps(suggestion.config, sort_keys=True)
    return [suggestion.trial, _core.xxh3_64(text.encode())]


def _encode_metric(value: float) -> float | str:
    return value if math.isfinite(value) else repr(float(value))


def _decode_metric(value: float | str) -> float:
    return float(value)


def _set_up_scheduler(scheduler: Any, metric: str, mode: str) -> None:
    """Set a scheduler's metric and mode, unless they are already set."""
    settings = getattr(scheduler, "_metric", None), getattr(scheduler, "_mode", None)
    _refuse_other("scheduler", settings, (metric, mode))
    scheduler.set_search_properties(
        *(None if had else said for had, said in zip(settings, (metric, mode), strict=True))
    )


def _set_up_searcher(
    algorithm: Any, metric: str, mode: str, mapping: dict[str, Any], points: Sequence[Any]
) -> None:
    from ray.tune.search.variant_generator import _has_unresolved_values

    if points:
        raise InputError(
            "points are not for a search algorithm of Ray Tune: give it points_to_evaluate instead"
        )
    settings = getattr(algorithm, "metric", None), getattr(algorithm, "mode", None)
    _refuse_other("searcher", settings, (metric, mode))
    said = (None if had else said for had, said in zip(settings, (metric, mode), strict=True))
    if not algorithm.set_search_properties(*said, mapping) and _has_unresolved_values(mapping):
        raise InputError(
            f"param_space: {type(algorithm).__name__} was made with its own space: leave only "
            "constants in param_space"
        )


def _refuse_other(what: str, given: tuple[Any, Any], asked: tuple[str, str]) -> None:
    for name, had, value in zip(("metric", "mode"), given, asked, strict=True):
        if had is not None and had != value:
            raise InputError(
                f"{name}={value!r}, but the {what} was made with {name}={had!r}: give the same, "
                "or omit it there"
            )
