"""Provide a run's results: `Result` and its `Trial` objects, read from the run's folder.

Everything comes from ``run.sqlite`` and the kept states, so a result can be opened again later, in
a different process, and during the run.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

import cerebro.control as control
from cerebro.arguments import check_whole_number
from cerebro.errors import CorruptDataError, InputError, shorten_tracebacks
from cerebro.machine.mappings import flatten
from cerebro.report import format as fmt
from cerebro.results.saved_run import SavedRun
from cerebro.results.trial import Trial, explain_absent_name
from cerebro.results.verify import Verification, verify_run
from cerebro.run.records import ENDED, OPEN, TrialRecord, copy_record
from cerebro.run.store import FILE, read_meta, reader

if TYPE_CHECKING:
    import optuna
    import pandas
    from matplotlib.figure import Figure

OTHER_NAMES = {
    **dict.fromkeys(("best_params", "best_config", "best_params_"), "best.config"),
    **dict.fromkeys(("best_value", "best_score", "best_score_"), "best.metrics[result.metric]"),
    **dict.fromkeys(("best_trial", "best_result", "get_best_result"), "best"),
    **dict.fromkeys(("best_model", "best_net", "best_estimator_"), "best.load()"),
    **dict.fromkeys(("dataframe", "df", "trials_dataframe", "get_dataframe"), "to_dataframe()"),
    "study": "to_study()",
}
"""The names used in other libraries, with our names for the same things."""


class Result:
    """All trials of a run, read from its folder.

    ``len(result)``, ``result[0]`` and ``for trial in result`` refer to `trials`. A copied or
    unpickled result reads the run's folder again; a pickle contains only the path of the folder.

    Parameters
    ----------
    path
        The run's folder.
    build
        The run's ``build``, if it cannot be imported again.

    Raises
    ------
    InputError
        If the folder does not hold a run.
    CorruptDataError
        If the run's store cannot be read.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, build: Callable[..., Any] | None = None
    ) -> None:
        self.saved = SavedRun(path, build=build)
        """The run's folder, for the library itself."""
        self._trials: list[Trial] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return Result, (self.saved.folder,)

    def __copy__(self) -> Result:
        return Result(self.path, build=self.saved.known_build)

    def __deepcopy__(self, memo: object) -> Result:
        return self.__copy__()

    def __len__(self) -> int:
        return self.saved.trial_count

    def __iter__(self) -> Iterator[Trial]:
        return iter(self.trials)

    @overload
    def __getitem__(self, number: int) -> Trial: ...

    @overload
    def __getitem__(self, number: slice) -> list[Trial]: ...

    def __getitem__(self, number: int | slice) -> Trial | list[Trial]:
        return self.trials[number]

    if not TYPE_CHECKING:  # type checkers must still find misspelled names

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(explain_absent_name(self, name, OTHER_NAMES), name=name, obj=self)

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
        return self.saved.ranked_by.select

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of the search that affect its trials."""
        return self.saved.settings

    @property
    def environment(self) -> dict[str, Any]:
        """The versions, CPU, threads and flags with which the run was trained."""
        return self.saved.environment

    @property
    def trials(self) -> list[Trial]:
        """All trials by number; with folds, the configurations."""
        if self._trials is None:
            self._trials = [Trial(self.saved, record) for record in self.saved.configurations]
        return self._trials

    @property
    def best(self) -> Trial:
        """The trial with the best metric; if several tie, the one with the lowest number.

        Every trial counts with the epochs that it has finished, also one that was stopped, failed
        or diverged later: the model of its best epoch is a model like any other. Its ``status``
        says how it ended. Optuna, `to_study` and `cerebro.sklearn.SearchCV` rank no failed trials.

        Raises
        ------
        InputError
            If no trial has finished an epoch with a finite metric.
        """
        best = self.top(1)
        if not best:
            yet = " yet" if self.status in ("running", "paused") else ""
            raise InputError(f"{self.path}: no trial has a finite {self.metric}{yet}")
        return best[0]

    def top(self, n: int) -> list[Trial]:
        """Return the `n` best trials, best first, as `best` ranks them.

        Trials without a finite metric are left out.
        """
        numbers = self.saved.ranking(check_whole_number("n", n, 0))
        if self.saved.holds_trials:
            return [self.trials[number] for number in numbers]
        return [Trial(self.saved, record) for record in self.saved.read_some(numbers)]

    # --- during the run --------------------------------------------------

    def stop(self, trial: int | None = None) -> None:
        """Stop the live run, or one of its trials; see `cerebro.control.stop`."""
        self.saved.before_reading()
        control.stop(self.saved.folder, trial)

    def pause(self, trial: int | None = None) -> None:
        """Pause the run, or one of its trials, until `unpause`; see `cerebro.control.pause`."""
        self.saved.before_reading()
        control.pause(self.saved.folder, trial)

    def unpause(self, trial: int | None = None) -> None:
        """Continue the paused run, or a paused trial; see `cerebro.control.unpause`."""
        self.saved.before_reading()
        control.unpause(self.saved.folder, trial)

    # --- looking at it ---------------------------------------------------

    def summary(self) -> str:
        """Return the result as text for terminals: the trials, best first, and how reliable it is.

        Below the table are the best configuration; the noise of its metric; the trials that cannot
        be distinguished from it; its best and its last epoch; the expected gain of more trials;
        failures and warnings; and what to try next.

        The standard error of an accuracy over ``n`` rows is ``sqrt(p (1 - p) / n)``, and its
        interval is Wilson's (1927). Trials are called inseparable if McNemar's exact test (1947)
        cannot reach 5% whichever rows they differ in, which is the case for a difference of up to
        five rows. Over ``k`` folds the standard error is ``s sqrt(1/k + n_test/n_train)`` (Nadeau
        and Bengio, 2003). A loss has no standard error, because the run does not record the losses
        of single rows. After a random search, ``m`` more trials find a new best with a probability
        of at most ``m / (n + m)``, and their average gain is at most that of the last ``m`` trials
        (Tang et al., 2020).
        """
        from cerebro.report.summary import render

        return render(self)

    def to_dataframe(self) -> pandas.DataFrame:
        """Return a table with one row per trial: number, status, epoch, configuration, metrics.

        The columns are ``number status epoch best_epoch config.* metrics.* state_hash error``;
        nested names are joined by dots. Needs pandas.
        """
        import pandas

        rows = [
            {
                "number": trial.number,
                "status": trial.status,
                "epoch": trial.epoch,
                "best_epoch": trial.best_epoch,
                **flatten(trial.config, "config."),
                **flatten(trial.metrics, "metrics."),
                "state_hash": trial.state_hash,
                "error": trial.error,
            }
            for trial in self.trials
        ]
        frame: pandas.DataFrame = pandas.DataFrame(rows)
        return frame

    def to_study(self, *, storage: Any = None, study_name: str | None = None) -> optuna.Study:
        """Return the run as an Optuna study, for Optuna's plots and dashboard.

        Finished trials and those ended by `EarlyStopping` become complete, with the metric of their
        selected epoch. Other stopped trials and unfinished ones become pruned, with their last
        metric. Failed and diverged trials become failed. Every epoch's metric is an intermediate
        value. A trial's user attribute ``"cerebro"`` has the run and the trial's number, status and
        state hash. Unfinished trials without an epoch are left out. Needs Optuna.

        Parameters
        ----------
        storage
            Where to keep the study, as for `optuna.create_study`; default: in memory.
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
            If Optuna is missing, if the storage cannot be used, or if it already has a study with
            this name.
        """
        from cerebro.integrations.optuna.terms import to_study

        return to_study(self, storage=storage, study_name=study_name)

    @shorten_tracebacks
    def register(self, name: str, *, alias: str | None = None, example: Any = None) -> str:
        """Register the best trial's network in MLflow's model registry, as a new version.

        The registry is the one that MLflow is set up with (``mlflow.set_tracking_uri``). The
        network is stored as `torch.export` writes it, in evaluation mode and for any number of
        rows; there are no pickles, and ``build`` is not needed to load it. The version's tags are
        ``cerebro.state_hash``, ``cerebro.data_checksum`` (of the training rows), ``cerebro.trial``,
        ``cerebro.epoch``, ``cerebro.run`` (the run's id, as in the runs of
        `cerebro.callbacks.MLflow`) and ``cerebro.path``. Needs mlflow.

        Parameters
        ----------
        name
            The registered model, which is created if it does not exist.
        alias
            An alias to move to the new version, such as ``"champion"``.
        example
            Rows as the network gets them, to trace it with: an array or a tensor, or a list of
            them for several inputs. Default: the first rows of the run's data.

        Returns
        -------
        str
            ``"models:/NAME/VERSION"``, for ``mlflow.pytorch.load_model``.

        Raises
        ------
        InputError
            If the model is not a `cerebro.torch.Model` or has inputs by keyword, PyTorch cannot
            export its network, mlflow is missing or too old, or the registry cannot be reached.
        """
        from cerebro.results.register import register

        return register(self.best, name, alias, example)

    def plot(
        self,
        metric: str | None = None,
        *,
        trials: Sequence[int] | None = None,
        kind: Literal["curves", "gantt", "parallel", "importance", "slice"] = "curves",
    ) -> Figure:
        """Draw the run; needs matplotlib.

        The plot is dark if matplotlib's style is, as after
        ``matplotlib.style.use("dark_background")``.

        Parameters
        ----------
        metric
            The metric to draw; default: the one that ranks trials.
        trials
            The numbers of the trials to draw; default: all.
        kind
            ``"curves"``: the metric over epochs. ``"gantt"``: units on workers over time.
            ``"parallel"``: configurations as lines across the settings. ``"importance"``: the share
            of the metric's variance that each setting explains, with its 90% range. ``"slice"``:
            the metric over each setting, one panel for each.

        Returns
        -------
        matplotlib.figure.Figure
            A notebook shows it; ``figure.savefig(path)`` writes it to a file.

        Raises
        ------
        InputError
            If matplotlib is missing, if no trial has the metric, or if a trial in `trials` does not
            exist.
        """
        from cerebro.report import plots

        return plots.plot(self, metric, trials=trials, kind=kind)

    def units(self) -> list[dict[str, Any]]:
        """Return every unit that ran, with times in seconds since the run's start.

        Each unit is a mapping with ``trial epoch step shard kind worker attempt start end rows
        hopped state_bytes``; ``kind`` is ``"train"`` or ``"eval"``. With folds, it also has
        ``fold``.
        """
        return self.saved.units()

    def events(self) -> list[dict[str, Any]]:
        """Return all other events: lost workers, trials that were rewound, warnings, commands.

        Each event is a mapping with ``time`` (seconds since the run's start), ``kind``, ``trial``
        (None for the run itself) and ``text``, a readable line. With folds, it also has ``fold``.
        """
        return self.saved.events()

    def verify(self) -> Verification:
        """Check states and data against their checksums, and the store for consistency.

        This changes nothing, and works during the run.

        Returns
        -------
        Verification
            True if there are no problems; else ``.problems``, each with ``.where`` (a file or a
            trial), ``.what`` and ``.advice``.
        """
        self.saved.before_reading()  # in a callback, wait until the finished epoch is stored
        return verify_run(self.saved.folder)

    def trial_of(self, record: TrialRecord) -> Trial:
        """Return a trial as it is now, for callbacks."""
        return Trial(self.saved, copy_record(record))

    def _repr_html_(self) -> str:
        from cerebro.report.block import render_result

        return render_result(self)

    def __repr__(self) -> str:
        counts = self.saved.counts()
        order = dict.fromkeys(("finished", *ENDED, *OPEN))
        trials = fmt.states({status: counts[status] for status in order}) or "no trials"
        best = ""
        for trial in self.top(1):
            value = fmt.metric(fmt.metric_value(trial.metrics, self.metric))
            best = f", best {self.metric}={value} (trial {trial.number})"
        return f"Result({str(self.path)!r}, {self.status}, {trials}{best})"


_last: list[Result] = []
"""The result of the last search of this process; empty before."""


def note_last(result: Result) -> Result:
    """Remember a result as `cerebro.last`, and return it."""
    _last[:] = [result]
    return result


def last_result() -> Result | None:
    """Return the result of this process's last search, also one that was interrupted or failed."""
    return _last[0] if _last else None


@shorten_tracebacks
def open_run(
    run: str | os.PathLike[str] | Result | None = None,
    *,
    build: Callable[..., Any] | None = None,
) -> Result:
    """Open a finished, stopped or live run, without training it.

    Parameters
    ----------
    run
        The run's folder, or its result; default: the newest run in ``runs``.
    build
        The run's ``build``, if it cannot be imported again.

    Raises
    ------
    InputError
        If the run does not exist.
    """
    if run is None:
        files = list(Path("runs").glob(f"*/{FILE}"))
        if not files:
            raise InputError("there is no run below runs/: give the run's folder")
        newest = max(files, key=_read_start)
        return Result(newest.parent, build=build)
    if isinstance(run, Result):
        return Result(run.path, build=build or run.saved.known_build)
    return Result(run, build=build)


def _read_start(file: Path) -> float:
    """Return the start time of a run; negative infinity if the run is damaged or unreadable."""
    try:
        with reader(file.parent) as connection:
            return float(read_meta(connection)["started"])
    except (CorruptDataError, OSError):
        return -math.inf
