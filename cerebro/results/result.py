"""A run's results: `Result` and its `Trial` objects, read from the run's folder.

Everything comes from ``run.sqlite`` and the kept states, so a result can be opened again later, in
a different process, and during the run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import cerebro.control as control
from cerebro.arguments import whole_number
from cerebro.errors import CorruptDataError, InputError
from cerebro.machine.mappings import flatten
from cerebro.results.saved_run import SavedRun
from cerebro.results.trial import Trial
from cerebro.run.records import TrialRecord, snapshot
from cerebro.run.store import FILE, read_meta, reader

if TYPE_CHECKING:
    import optuna
    import pandas
    from matplotlib.figure import Figure

    from cerebro.results.verify import Verification


class Result:
    """All trials of a run, read from its folder.

    Parameters
    ----------
    path
        The run's folder.
    build
        The run's ``build``, where it cannot be imported again.

    Raises
    ------
    InputError
        If the folder does not hold a run.
    CorruptDataError
        If its store cannot be read.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, build: Callable[..., Any] | None = None
    ) -> None:
        self.saved = SavedRun(path, build=build)
        """The run's folder, for the library itself."""
        self._trials: list[Trial] | None = None

    def refresh(self) -> None:
        """Read the store again, to see the progress of a live run."""
        self.saved.refresh()
        self._trials = None

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self.saved.path

    @property
    def status(self) -> str:
        """``running``, ``paused``, ``finished``, ``stopped`` or ``failed``.

        A stopped run was ended by its time limit, by Ctrl-C or by `stop`.
        """
        status = str(self.saved.meta["status"])
        return "paused" if status == "running" and self.saved.meta.get("paused") else status

    @property
    def error(self) -> str | None:
        """Why the run failed, or None."""
        error = self.saved.meta.get("error")
        return None if error is None else str(error)

    @property
    def metric(self) -> str:
        """The metric that ranks trials."""
        return self.saved.metric

    @property
    def mode(self) -> str:
        """``"min"`` or ``"max"``."""
        return self.saved.mode

    @property
    def select(self) -> str:
        """The epoch that represents a trial: ``"best"`` or ``"last"``."""
        return self.saved.select

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of the search that shape its trials."""
        return self.saved.settings

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, CPU, threads and flags that the run was trained with."""
        return self.saved.environment

    @property
    def trials(self) -> list[Trial]:
        """All trials by number; with folds, the configurations."""
        if self._trials is None:
            self._trials = [Trial(self.saved, record) for record in self.saved.configurations]
        return self._trials

    @property
    def best(self) -> Trial:
        """The trial with the best metric; if several tie, the lowest number.

        Raises
        ------
        InputError
            If no trial has finished an epoch with a finite metric.
        """
        best = self.top(1)
        if not best:
            raise InputError(f"{self.path}: no trial has a finite {self.metric} yet")
        return best[0]

    def top(self, n: int) -> list[Trial]:
        """Return the `n` best trials, best first; trials without a metric are left out."""
        numbers = self.saved.ranking(whole_number("n", n, 0))
        if self.saved.holds_trials:
            return [self.trials[number] for number in numbers]
        return [Trial(self.saved, record) for record in self.saved.some(numbers)]

    # --- during the run --------------------------------------------------

    def stop(self, trial: int | None = None) -> None:
        """Stop the active run, or one of its trials: `cerebro.control.stop`."""
        self.saved.before_reading()
        control.stop(self.saved.folder, trial)

    def pause(self, trial: int | None = None) -> None:
        """Pause the run, or one of its trials, until `go_on`: `cerebro.control.pause`."""
        self.saved.before_reading()
        control.pause(self.saved.folder, trial)

    def go_on(self, trial: int | None = None) -> None:
        """Continue the paused run, or a paused trial: `cerebro.control.go_on`."""
        self.saved.before_reading()
        control.go_on(self.saved.folder, trial)

    # --- looking at it ---------------------------------------------------

    def summary(self) -> str:
        """Return a table of the trials, best first, for terminals."""
        from cerebro.report.summary import render

        return render(self)

    def to_dataframe(self) -> pandas.DataFrame:
        """Return one row per trial: number, status, epoch, configuration, metrics.

        Columns are ``number status epoch best_epoch config.* metrics.* state_hash
        error``; nested names are joined by dots. Needs pandas.
        """
        import pandas

        rows = []
        for trial in self.trials:
            row: dict[str, Any] = {
                "number": trial.number,
                "status": trial.status,
                "epoch": trial.epoch,
                "best_epoch": trial.best_epoch,
            }
            row.update(flatten(trial.config, "config."))
            row.update(flatten(trial.metrics, "metrics."))
            row["state_hash"] = trial.state_hash
            row["error"] = trial.error
            rows.append(row)
        frame: pandas.DataFrame = pandas.DataFrame(rows)
        return frame

    def to_study(self, *, storage: Any = None, study_name: str | None = None) -> optuna.Study:
        """Return the run as an Optuna study, for Optuna's plots and dashboard.

        Finished trials, and those that `EarlyStopping` ended, become complete, with the metric of
        their selected epoch. Other stopped trials and unfinished ones become pruned, with their
        last metric; failed and diverged ones become failed. Every epoch's metric is an intermediate
        value. The user attribute ``"cerebro"`` of a trial has the run, and the trial's number,
        status and state hash. Unfinished trials without an epoch are left out. Needs Optuna.

        Parameters
        ----------
        storage
            Where the study is kept, as for `optuna.create_study`; default: in memory.
        study_name
            Default: the name of the run's folder.

        Returns
        -------
        optuna.Study
            The study, with the distributions of the run's space, so that Optuna's samplers can
            continue it.

        Raises
        ------
        InputError
            If Optuna is missing, or the storage cannot be used or has a study of this name.
        """
        from cerebro.results.to_study import to_study

        return to_study(self.saved, self.trials, storage=storage, study_name=study_name)

    def plot(
        self,
        metric: str | None = None,
        *,
        trials: Sequence[int] | None = None,
        kind: Literal["curves", "parallel", "importance", "gantt"] = "curves",
    ) -> Figure:
        """Draw the run; needs matplotlib.

        Parameters
        ----------
        metric
            The metric to draw; default: the one that ranks trials.
        trials
            Numbers of the trials to draw; default: all.
        kind
            ``"curves"`` (metric over epochs), ``"parallel"`` (coordinates),
            ``"importance"`` or ``"gantt"`` (units on workers over time).

        Returns
        -------
        matplotlib.figure.Figure
            A notebook shows it; ``figure.savefig(path)`` writes it.

        Raises
        ------
        InputError
            If matplotlib is missing, no trial has the metric, or there is no such trial.
        """
        from cerebro.report import plots

        return plots.plot(self, metric, trials=trials, kind=kind)

    def units(self) -> list[dict[str, Any]]:
        """Return every unit that ran, with times in seconds since the run's start.

        One mapping each: ``trial epoch step shard kind worker attempt start end rows hopped
        state_bytes``; ``kind`` is ``"train"`` or ``"eval"``. With folds also ``fold``.
        """
        return self.saved.units()

    def events(self) -> list[dict[str, Any]]:
        """Return other events: lost workers, trials sent back, warnings of trials, commands.

        One mapping each: ``time`` (seconds since the run's start), ``kind``, ``trial`` (None: the
        run itself) and ``text``, a line for people. With folds also ``fold``.
        """
        return self.saved.events()

    def verify(self) -> Verification:
        """Check states and data against their checksums, and the store against itself.

        Changes nothing, and works during the run.

        Returns
        -------
        Verification
            True if all is well; else ``.problems``, each with ``.where`` (a file or a trial),
            ``.what`` and ``.advice``.
        """
        from cerebro.results.verify import verify_run

        self.saved.before_reading()  # in a callback: wait until the finished epoch is stored
        return verify_run(self.saved.folder)

    def trial_of(self, record: TrialRecord) -> Trial:
        """Return a trial as it is now, for callbacks."""
        return Trial(self.saved, snapshot(record))

    def _repr_html_(self) -> str:
        from cerebro.report.html import render_html

        return render_html(self)

    def __repr__(self) -> str:
        counts = self.saved.counts()
        done = counts["finished"] + counts["stopped"]
        best = ""
        for trial in self.top(1):
            best = f", best {self.metric}={trial.metrics[self.metric]:.4g} (trial {trial.number})"
        return (
            f"Result({str(self.path)!r}, {self.status}, {done} of {self.saved.trial_count} "
            f"trials done{best})"
        )


def open_run(
    run: str | os.PathLike[str] | Result | None = None,
    *,
    build: Callable[..., Any] | None = None,
) -> Result:
    """Open a run, whether finished, stopped or active. Does not train.

    Parameters
    ----------
    run
        The run's folder, or its result; default: the newest below ``runs``.
    build
        The run's ``build``, where it cannot be imported again.

    Raises
    ------
    InputError
        If the run does not exist.
    """
    if run is None:
        found = list(Path("runs").glob(f"*/{FILE}"))
        if not found:
            raise InputError("there is no run below runs/: give the run's folder")
        newest = max(found, key=_started)
        return Result(newest.parent, build=build)
    if isinstance(run, Result):
        return Result(run.path, build=build or run.saved.known_build)
    return Result(run, build=build)


def _started(file: Path) -> float:
    """Return the time of a run's start; the smallest number if the run is damaged."""
    try:
        with reader(file.parent) as connection:
            return float(read_meta(connection)["started"])
    except CorruptDataError:
        return -math.inf
