"""Log a search to MLflow, TensorBoard or Weights & Biases, each imported on first use."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cerebro.callbacks.observer import Observer
from cerebro.machine.files import path_of
from cerebro.machine.imports import import_extra
from cerebro.machine.mappings import flatten

ENDED = {"finished": "FINISHED", "stopped": "FINISHED", "failed": "FAILED", "diverged": "FAILED"}
RUN, SEARCH, TRIAL = "cerebro.run", "cerebro.search", "cerebro.trial"
"""Tags of the runs: `RUN` of all, `SEARCH` of the search's own, `TRIAL` of a trial's."""


class MLflow(Observer):
    """Log a search as an MLflow run, with a child run for each trial.

    A child run has the configuration as parameters, and metrics by epoch (from 1). The search's run
    has its settings and, at the end, the best trial's metrics, also by epoch. A resumed search
    continues its runs.

    Parameters
    ----------
    tracking_uri
        Where MLflow stores runs, such as ``"http://server:5000"`` or ``"sqlite:///mlflow.db"``;
        None: as configured in MLflow.
    experiment
        The name of the experiment, which is created if it does not exist.
    strict
        Whether a failure of the observer ends the run.

    Raises
    ------
    InputError
        If the package ``mlflow`` is missing.
    """

    def __init__(
        self, tracking_uri: str | None = None, experiment: str = "cerebro", *, strict: bool = False
    ) -> None:
        super().__init__(strict=strict)
        self.tracking_uri, self.experiment = tracking_uri, experiment
        import_extra("mlflow", "mlflow", "cerebro.callbacks.MLflow needs mlflow")
        self._parent: str | None = None
        self._children: dict[int, str] = {}

    def on_run_start(self, run: Any) -> None:
        import mlflow

        self._client = mlflow.MlflowClient(self.tracking_uri)
        experiment = self._client.get_experiment_by_name(self.experiment)
        if experiment is None:
            self._experiment = self._client.create_experiment(self.experiment)
        else:
            self._experiment = experiment.experiment_id
        self._id = str(run.saved.meta["id"])
        self._name = Path(run.path).name
        self._metric = run.metric
        self._children = {}
        self._parent = self._get_run({SEARCH: self._id}, self._name)
        self._log_params(self._parent, run.settings)
        self._client.set_tag(self._parent, "cerebro.path", os.fspath(Path(run.path).absolute()))

    def on_trial_start(self, trial: Any) -> None:
        self._get_child_run(trial)

    def on_epoch_end(self, trial: Any, metrics: Mapping[str, float]) -> None:
        self._log_metrics(self._get_child_run(trial), metrics, trial.epoch)

    def on_trial_end(self, trial: Any) -> None:
        child = self._get_child_run(trial)
        self._client.set_tag(child, "cerebro.status", trial.status)
        if trial.error:
            self._client.set_tag(child, "cerebro.error", str(trial.error)[:5000])
        self._client.set_terminated(child, ENDED.get(trial.status, "KILLED"))
        del self._children[trial.number]

    def on_run_end(self, result: Any) -> None:
        assert self._parent is not None
        for best in result.top(1):
            by_last = result.select == "last" or best.best_epoch is None
            step = best.epoch if by_last else best.best_epoch + 1
            # MLflow shows the value at the highest step, which an earlier end of the search set.
            before = self._client.get_metric_history(self._parent, self._metric)
            step = max([step, *(value.step for value in before)])
            self._log_metrics(self._parent, best.metrics, step)
            self._client.set_tag(self._parent, "cerebro.best_trial", str(best.number))
        self._client.set_terminated(self._parent, "FINISHED")
        self._parent = None

    def close(self) -> None:
        for run in [*self._children.values(), *filter(None, [self._parent])]:
            self._client.set_terminated(run, "KILLED")
        self._parent, self._children = None, {}

    def _get_child_run(self, trial: Any) -> str:
        if trial.number not in self._children:
            tags = {TRIAL: str(trial.number), "mlflow.parentRunId": str(self._parent)}
            run = self._get_run(tags, f"{self._name}-{trial.number}")
            self._children[trial.number] = run
            self._log_params(run, trial.config)
        return self._children[trial.number]

    def _get_run(self, tags: Mapping[str, str], name: str) -> str:
        """Return the id of the run with these tags, which may exist since before a resume."""
        tags = {RUN: self._id, **tags}
        for run in self._find_runs(tags):
            self._client.update_run(run.info.run_id, status="RUNNING")
            return str(run.info.run_id)
        new_run = self._client.create_run(self._experiment, tags=tags, run_name=name)
        return str(new_run.info.run_id)

    def _find_runs(self, tags: Mapping[str, str]) -> Iterator[Any]:
        """Yield the runs with these tags, newest first; MLflow returns them in pages."""
        query = " and ".join(f"tags.`{tag}` = '{value}'" for tag, value in tags.items())
        token = None
        while True:
            page = self._client.search_runs([self._experiment], query, page_token=token)
            yield from page
            token = page.token
            if not token:
                return

    def _log_params(self, run: str, values: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        flat = {name: str(value)[:500] for name, value in flatten(values).items()}
        logged = self._client.get_run(run).data.params
        new = [Param(name, value) for name, value in flat.items() if name not in logged]
        for start in range(0, len(new), 100):  # MLflow's limit for one call
            self._client.log_batch(run, params=new[start : start + 100])

    def _log_metrics(self, run: str, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        values = [Metric(name, value, now, step) for name, value in metrics.items()]
        self._client.log_batch(run, metrics=values)


class TensorBoard(Observer):
    """Write event files for TensorBoard, which shows each trial as a run.

    Metrics are scalars by epoch (from 1); the configuration is in the HParams tab. A resumed run
    continues the curves. To view them: ``tensorboard --logdir RUN/tensorboard``.

    Parameters
    ----------
    folder
        The folder that gets a subfolder per trial; None: ``tensorboard`` in the run's folder.
    strict
        Whether a failure of the observer ends the run.

    Raises
    ------
    InputError
        If the package ``tensorboard`` is missing.
    """

    def __init__(
        self, folder: str | os.PathLike[str] | None = None, *, strict: bool = False
    ) -> None:
        super().__init__(strict=strict)
        self.folder = None if folder is None else path_of("folder", folder)
        need = "cerebro.callbacks.TensorBoard needs tensorboard"
        import_extra("tensorboard", "tensorboard", need)
        self._writers: dict[int, Any] = {}

    def on_run_start(self, run: Any) -> None:
        self._target = Path(run.path) / "tensorboard" if self.folder is None else self.folder
        self._writers = {}

    def on_epoch_end(self, trial: Any, metrics: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in metrics.items()]
        writer = self._writer(trial)
        writer.add_event(_event(trial.epoch, summary=Summary(value=values)))
        writer.flush()

    def on_trial_end(self, trial: Any) -> None:
        if trial.number in self._writers:
            self._writers.pop(trial.number).close()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()
        self._writers = {}

    def _writer(self, trial: Any) -> Any:
        """Return a trial's writer; it replaces earlier events from this epoch on."""
        if trial.number not in self._writers:
            from tensorboard.compat.proto.event_pb2 import SessionLog
            from tensorboard.plugins.hparams import summary_v2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            writer = EventFileWriter(str(self._target / f"trial-{trial.number:04}"))
            self._writers[trial.number] = writer
            again = SessionLog(status=SessionLog.START)
            writer.add_event(_event(trial.epoch, session_log=again))
            config = {
                name: value if isinstance(value, (bool, int, float, str)) else repr(value)
                for name, value in flatten(trial.config).items()
            }
            writer.add_event(_event(0, summary=summary_v2.hparams_pb(config)))
        return self._writers[trial.number]


def _event(step: int, **content: Any) -> Any:
    from tensorboard.compat.proto.event_pb2 import Event

    return Event(wall_time=time.time(), step=step, **content)


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
