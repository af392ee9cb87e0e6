"""Search with models: Optuna's samplers TPE and Gaussian processes.

Only the sampler is Optuna's, on a study in memory. Trials are Cerebro's, trained in rounds, so the
same seed gives the same trials with any number of workers. A sampler's random state cannot be
stored; a resumed run replays the log of suggestions and reports from its store.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any

from cerebro.arguments import check_whole_number
from cerebro.integrations.optuna.terms import Parameters, import_optuna, quiet
from cerebro.machine.flags import compute_settings
from cerebro.searchers.base import (
    DONE,
    AdaptiveSearcher,
    Decision,
    Suggested,
    Suggestion,
    decode_value,
    decode_values,
    encode_value,
    encode_values,
)


class SamplerSearch(AdaptiveSearcher):
    """Asks an Optuna sampler for configurations; every trial trains to the end."""

    _shown = ("startup_trials",)

    def __init__(self, startup_trials: int = 10, earlier: Any = ()) -> None:
        self._startup_trials = check_whole_number("startup_trials", startup_trials, 0, math.inf)
        self._earlier = list(earlier) if isinstance(earlier, (list, tuple)) else [earlier]

    @abstractmethod
    def _sampler(self, optuna: Any, seed: int) -> Any:
        """Return the sampler."""

    def _prepare(self) -> None:
        """Begin with an empty log, and a study of the earlier runs' trials."""
        optuna = import_optuna(self._endless)
        self._parameters = Parameters(optuna, self._space)
        with quiet(optuna):
            sampler = self._sampler(optuna, self._seed % 2**32)
            self._study = optuna.create_study(sampler=sampler, direction="minimize")
            for result in self._earlier:
                self._learn(optuna, result)
        self._asked: dict[int, Any] = {}
        self._best: dict[int, float] = {}
        self._log: list[list[Any]] = []  # ["ask"] or ["tell", trial, value]

    def _learn(self, optuna: Any, result: Any) -> None:
        """Report the trials of an earlier run to the study."""
        states = optuna.trial.TrialState
        for trial in result.trials:
            failed = trial.status in ("failed", "diverged")
            value = None if failed else trial.metrics.get(self._metric, math.nan) * self._sign
            params, kinds = self._parameters.of_config(trial.config)
            if params and (value is None or math.isfinite(value)):
                state = states.PRUNED if failed else states.COMPLETE
                facts = {"params": params, "distributions": kinds, "state": state, "value": value}
                self._study.add_trial(optuna.trial.create_trial(**facts))

    def suggest(self) -> Suggested:
        if self._next >= self._limit:
            return DONE
        self._log.append(["ask"])
        return self._ask()

    def _ask(self) -> Suggestion:
        parameters = self._parameters
        trial = self._next
        point = self._points[trial] if trial < len(self._points) else {}
        with quiet(import_optuna(self._endless)):
            params = parameters.of_config(point)[0]
            self._study.enqueue_trial(params)
            asked = self._study.ask()
            config = self._space.fill(point, partial(parameters.suggest, asked))
            for node in self._space.nodes:  # the sampler also receives the point's values
                if node.varies and node.applies(config) and parameters.name(node) in params:
                    parameters.suggest(asked, node)
        self._asked[trial] = asked
        self._next += 1
        return Suggestion(config, self._epochs)

    def _decide(self, trial: int, epoch: int, value: float) -> Decision:
        self._best[trial] = min(value, self._best.get(trial, math.inf))
        over = not math.isfinite(value)
        if over or epoch + 1 == self._epochs:
            best = self._best.pop(trial)
            result = value if over or self.select == "last" else best
            self._log.append(["tell", trial, encode_value(result)])
            self._tell(trial, result)
        return Decision.STOP if over else Decision.CONTINUE

    def _tell(self, trial: int, value: float) -> None:
        optuna = import_optuna(self._endless)
        asked = self._asked.pop(trial, None)
        if asked is None:
            return
        with quiet(optuna):
            if math.isfinite(value):
                self._study.tell(asked, value)
            else:
                self._study.tell(asked, state=optuna.trial.TrialState.PRUNED)

    def _state(self) -> dict[str, Any]:
        return {"log": [list(entry) for entry in self._log], "best": encode_values(self._best)}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._prepare()
        self._next = 0
        for entry in state["log"]:
            if entry[0] == "ask":
                self._ask()
            else:
                self._tell(entry[1], decode_value(entry[2]))
        self._log = [list(entry) for entry in state["log"]]
        self._best = decode_values(state["best"])


class TPE(SamplerSearch):
    """Tree-structured Parzen estimator (Bergstra et al., "Algorithms for Hyper-Parameter
    Optimization", NeurIPS 2011), from Optuna; trials in progress count as bad ones.

    It learns the metric of the epoch that ranks a trial: the best or, with ``select="last"``, the
    last. A trial that fails or diverges counts as worse than all others.

    Parameters
    ----------
    startup_trials
        The number of random trials before the model is used.
    earlier
        Results of earlier runs of the same space to learn from (warm start).
    """

    _endless = "TPE"

    def _sampler(self, optuna: Any, seed: int) -> Any:
        return optuna.samplers.TPESampler(
            seed=seed, n_startup_trials=self._startup_trials, constant_liar=True
        )


class GaussianProcess(SamplerSearch):
    """Bayesian optimization with a Gaussian process, from Optuna; needs SciPy and PyTorch.

    It learns the metric of the epoch that ranks a trial: the best or, with ``select="last"``, the
    last. It leaves out trials that fail or diverge.

    Parameters
    ----------
    startup_trials, earlier
        As for `TPE`.
    """

    _endless = "searcher='gp'"

    def _ask(self) -> Suggestion:
        with compute_settings(1, "warn"):  # the same numbers on any number of cores
            return super()._ask()

    def _sampler(self, optuna: Any, seed: int) -> Any:
        return optuna.samplers.GPSampler(seed=seed, n_startup_trials=self._startup_trials)
