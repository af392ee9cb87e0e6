"""Write the metrics of trials for TensorBoard."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cerebro.callbacks.observer import Observer
from cerebro.machine.files import path_of
from cerebro.machine.imports import import_extra
from cerebro.machine.mappings import flatten


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
