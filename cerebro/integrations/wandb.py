"""Log a search to Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cerebro.callbacks.observer import Observer
from cerebro.machine.imports import import_extra


class WandB(Observer):
    """Log each trial as a run of Weights & Biases; the runs of a search form a group.

    Metrics are logged by epoch (from 1). A resumed search continues its runs.

    Parameters
    ----------
    project
        The project's name.
    strict
        Whether a failure of the observer ends the run.
    **settings
        Further keywords of ``wandb.init``, such as ``entity=``, ``tags=``, ``dir=`` or
        ``mode="offline"``.

    Raises
    ------
    InputError
        If the package ``wandb`` is missing.
    """

    def __init__(self, project: str = "cerebro", *, strict: bool = False, **settings: Any) -> None:
        super().__init__(strict=strict)
        self.project, self.settings = project, settings
        import_extra("wandb", "wandb", "cerebro.callbacks.WandB needs wandb")
        self._runs: dict[int, Any] = {}

    def on_run_start(self, run: Any) -> None:
        self._name = Path(run.path).name
        self._id = str(run.saved.meta["id"])[:16]
        self._runs = {}

    def on_epoch_end(self, trial: Any, metrics: Mapping[str, float]) -> None:
        self._get_run(trial).log(dict(metrics), step=trial.epoch)

    def on_trial_end(self, trial: Any) -> None:
        run = self._get_run(trial)
        run.summary.update({"status": trial.status, "error": trial.error})
        run.finish(exit_code=0 if trial.status in ("finished", "stopped") else 1)
        del self._runs[trial.number]

    def close(self) -> None:
        for run in self._runs.values():
            run.finish(exit_code=1)
        self._runs = {}

    def _get_run(self, trial: Any) -> Any:
        if trial.number not in self._runs:
            import wandb

            arguments = {
                "project": self.project,
                "group": self._name,
                "name": f"{self._name}-{trial.number}",
                "id": f"{self._id}-{trial.number}",
                "resume": "allow",
                "config": trial.config,
                "reinit": "create_new",
            }
            self._runs[trial.number] = wandb.init(**{**arguments, **self.settings})
        return self._runs[trial.number]
