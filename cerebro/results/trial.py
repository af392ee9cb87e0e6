"""Provide `Trial`: one configuration of a run and its results, as shown to users."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from cerebro.arguments import check_whole_number
from cerebro.errors import InputError, shorten_tracebacks
from cerebro.report import format as fmt
from cerebro.results.saved_run import SavedRun
from cerebro.run.records import EpochRecord, Status, TrialRecord, strip_study

if TYPE_CHECKING:
    from cerebro.results.trained_model import TrainedModel

OTHER_NAMES = {
    **dict.fromkeys(("params", "hyperparameters"), "config"),
    **dict.fromkeys(("value", "score"), "metrics[result.metric]"),
    **dict.fromkeys(("net", "model"), "load()"),
    "state": "status",
}
"""The names used in other libraries, with our names for the same things."""


def explain_absent_name(of: object, name: str, others: Mapping[str, str]) -> str:
    """Return the error message for a name that an object does not have."""
    kind = type(of).__name__
    text = f"{kind!r} object has no attribute {name!r}"
    return f"{text}: use {kind.lower()}.{others[name]}" if name in others else text


class Trial:
    """One configuration of a run and its results.

    A trial is a snapshot: it does not change during the run. In a search with folds it has `folds`,
    each of which is also a `Trial`. Its metrics are means over the folds, each with its standard
    deviation (``accuracy_std``), and an epoch is finished when all folds have finished it. Only the
    folds have models.
    """

    def __init__(
        self, saved: SavedRun, record: TrialRecord, whole: TrialRecord | None = None
    ) -> None:
        self.saved = saved
        """The run's folder, for internal use."""
        self.record = record
        """The trial's record in the store, for internal use."""
        self._whole = whole  # for a fold: its configuration

    if not TYPE_CHECKING:  # type checkers must still find misspelled names

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(explain_absent_name(self, name, OTHER_NAMES), name=name, obj=self)

    @property
    def number(self) -> int:
        """The trial's number, from 0.

        Folds have separate numbers: fold ``f`` of ``n`` of trial ``t`` has the number ``t * n +
        f``. Its seed is ``trial_seed(seed, t * n + f)``, and its states and its log are named by
        this number.
        """
        return self.record.number

    @property
    def folds(self) -> list[Trial]:
        """The trial's folds; empty in a search without folds."""
        return [Trial(self.saved, fold, self.record) for fold in self.record.folds]

    @property
    def fold(self) -> int | None:
        """The fold's index in its trial, from 0; None for a trial."""
        return self.record.fold

    @property
    def config(self) -> dict[str, Any]:
        """The configuration with which ``build`` was called."""
        return strip_study(self.record.config)

    @property
    def status(self) -> Status:
        """One of ``waiting running paused stopped finished diverged failed``."""
        return self.record.status

    @property
    def epoch(self) -> int:
        """The number of epochs finished so far, including those of a clone's parent."""
        return self.record.done

    @property
    def epochs(self) -> int:
        """The trial's target number of epochs, including those of a clone's parent."""
        return self.record.target_epochs

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the selected epoch: ``train_*``, ``val_*`` and short names.

        A short name (``"accuracy"``) refers to the validation metric or, without validation, to the
        training metric. Empty before the first epoch is finished.
        """
        epoch = self._select_epoch()
        return {} if epoch is None else dict(epoch.metrics)

    @property
    def history(self) -> list[dict[str, Any]]:
        """A mapping per epoch with ``epoch``, ``metrics``, ``seconds`` and ``state_hash``."""
        return [epoch.to_history() for epoch in self.record.epochs]

    @property
    def best_epoch(self) -> int | None:
        """The number of the epoch with the best metric, from 0; None before the first epoch.

        For a fold, it is the epoch with the best mean over all folds. With ``select="last"``,
        trials are ranked by their last epoch, and `metrics`, `state_hash` and `load` refer to it;
        ``load(trial.best_epoch)`` loads the state of this one, if the run kept it.
        """
        record = self.record if self._whole is None else self._whole
        return record.best_epoch(self.saved.metric, self.saved.mode)

    @property
    def state_hash(self) -> str | None:
        """The XXH3-128 of the state after the selected epoch, as 32 hexadecimal digits.

        With folds, a digest of the folds' hashes.
        """
        epoch = self._select_epoch()
        return None if epoch is None else epoch.state_hash

    @property
    def parent(self) -> int | None:
        """The number of the trial from which this one was cloned, or None."""
        return self.record.parent

    @property
    def parent_epoch(self) -> int | None:
        """For a clone, the epoch of its parent with whose state it began; else None.

        The clone's own epochs continue from there.
        """
        return self.record.parent_epoch

    @property
    def error(self) -> str | None:
        """Why the trial failed, diverged or stopped itself, in one line; else None."""
        return self.record.error

    @property
    def traceback(self) -> str | None:
        """The traceback of the user's exception, or None."""
        return self.record.traceback

    @property
    def not_exact(self) -> list[str]:
        """What makes the trial's states inexact; empty if they are exact.

        These are operations without a deterministic version, which exist only on GPUs, and a
        recorded step (``graph=True``) that was found to differ from the ordinary one.
        """
        parts = self.record.folds or [self.record]
        return sorted({name for part in parts for name in self.saved.not_exact(part.number)})

    @property
    def log(self) -> str:
        """The trial's output and logs; with folds, those of each fold."""
        if not self.record.folds:
            return self.saved.read_log(self.number)
        logs = [(fold.fold, fold.log) for fold in self.folds]
        return "".join(f"--- fold {fold}\n{log}" for fold, log in logs if log)

    @shorten_tracebacks
    def load(
        self,
        epoch: Literal["best", "last"] | int = "best",
        build: Callable[..., Any] | None = None,
        *,
        fold: int | None = None,
    ) -> Any:
        """Build the model again and load its state after an epoch.

        Parameters
        ----------
        epoch
            ``"best"``: the epoch that ranks the trial, to which `metrics` and `state_hash` refer.
            It is the epoch with the best metric or, in a search with ``select="last"``, the last
            one. ``"last"``, or the number of an epoch: any other epoch whose state was kept.
        build
            The run's ``build``, if it cannot be imported again.
        fold
            The fold whose model to load, if the trial has folds. Each fold has its own model, which
            has not seen the rows that the fold held out.

        Returns
        -------
        object
            The model that ``build`` returns. A `cerebro.torch.Model` has ``.net``, which is in
            evaluation mode and in host memory, wherever it was trained. The caller's random
            generators do not change.

        Raises
        ------
        InputError
            If no state was kept for the epoch, if ``build`` cannot be found, or if the trial has
            folds and `fold` is not one of them.
        CorruptDataError
            If the state's file is damaged.
        """
        if fold is not None:
            return self._fold(fold).load(epoch, build)
        return self._model.load(self._epoch_record(epoch), build).model

    @property
    def _model(self) -> TrainedModel:
        from cerebro.results.trained_model import TrainedModel

        return TrainedModel(self.saved, self.record)

    def state_path(self, epoch: Literal["best", "last"] | int = "best") -> Path:
        """Return the path of a kept state, a safetensors file.

        Parameters
        ----------
        epoch
            As for `load`.

        Returns
        -------
        Path
            The file.

        Raises
        ------
        InputError
            If no state was kept for the epoch.
        """
        return self.saved.state_path(self._epoch_record(epoch))

    @shorten_tracebacks
    def evaluate(
        self, data: Any = None, *, build: Callable[..., Any] | None = None
    ) -> dict[str, float]:
        """Return the model's mean metrics over a dataset, after the epoch that ranks the trial.

        The evaluation uses the same batches, threads and generators as the run, and a GPU if the
        run used one and this machine has one. For the run's validation data it returns the recorded
        metrics, bit for bit.

        Parameters
        ----------
        data
            A `cerebro.Dataset` or its path; or data in memory as for `cerebro.search`, which gets
            the types, classes and transforms of the training data. Raw rows, a frame or
            dictionaries, become columns as in `predict`. Default: the run's validation data or, for
            a fold, the rows that it held out.
        build
            The run's ``build``, if it cannot be imported again.

        Returns
        -------
        dict
            The means over all rows, under the model's names of the metrics.

        Raises
        ------
        InputError
            If `data` is not a dataset, or is None in a run without validation data; also as for
            `load`.
        """
        epoch = self._epoch_record("best")
        return self._model.evaluate(epoch, data, build, exact=not self.not_exact)

    @shorten_tracebacks
    def predict(
        self,
        data: Any,
        *,
        output: Literal["raw", "class", "probability"] = "raw",
        build: Callable[..., Any] | None = None,
    ) -> Any:
        """Return predictions for the rows of a dataset, in row order.

        The model is the one that `load` returns, after the epoch that ranks the trial.

        Parameters
        ----------
        data
            Raw rows with the names and types of those that `cerebro.shard` got: a pandas frame, the
            path of a CSV file, a list of dictionaries or one of them. They become the model's
            columns as the training data's did: stacks, codes, fill values, types, transforms. The
            target and other columns may be missing. Or a `cerebro.Dataset` or its path; a table, a
            pair ``(x, y)`` or a PyTorch dataset, as for `evaluate`; or an argument of the model's
            own ``predict``, an array or arrays by column, unless they may be rows before a
            transform.
        output
            ``"raw"``: the model's outputs. ``"class"``: the name of the most probable class, or its
            number if the target has no names. ``"probability"``: of each class, in their order.
            These need a PyTorch model whose loss is ``cross_entropy``, ``nll_loss``,
            ``binary_cross_entropy`` or ``binary_cross_entropy_with_logits``, or a function that
            calls one of them with unchanged outputs and target; a Keras model with a cross entropy;
            or a classifier of scikit-learn. ``"class"`` also takes a loss that is least for the
            class with the largest output.
        build
            The run's ``build``, if it cannot be imported again.

        Returns
        -------
        tensor or ndarray
            The result of the model's ``predict``, or the concatenated outputs of the batches, of
            shape ``(rows, ...)``. Classes are an array of shape ``(rows,)``, probabilities float64
            of shape ``(rows, classes)``.

        Raises
        ------
        InputError
            If a column is missing or a value unknown, or `output` does not fit the model. If the
            model has neither ``predict`` nor ``predict_batch``; also as for `load`.
        """
        return self._model.predict(self._epoch_record("best"), data, build, output)

    @shorten_tracebacks
    def out_of_fold(self, *, build: Callable[..., Any] | None = None) -> Any:
        """Return predictions for all rows of the run's data, by models that have not seen them.

        Every fold predicts the rows that it held out, after the epoch that ranks the configuration.

        Parameters
        ----------
        build
            The run's ``build``, if it cannot be imported again.

        Returns
        -------
        ndarray
            Shape ``(rows, ...)``, in the order of the rows in the run's dataset: first those of
            ``data.shard(0)``, then those of ``data.shard(1)``, and so on. NaN for rows that no fold
            held out, as with scikit-learn's ``TimeSeriesSplit``.

        Raises
        ------
        InputError
            If the trial has no folds, if a row is held out twice, or if the model has several
            outputs; also as for `load`.
        """
        from cerebro.results.trained_model import join_by_row

        folds = self.saved.folds()
        if folds is None or not self.record.folds:
            what = "is a fold" if self._whole is not None else "has no folds"
            raise InputError(f"trial {self.number} {what}: out_of_fold needs a trial with folds")
        views = [folds.get_views(fold.number)[1] for fold in self.folds]
        predictions = [
            fold.predict(view, build=build) for fold, view in zip(self.folds, views, strict=True)
        ]
        return join_by_row(self.saved.dataset("data"), views, predictions)

    @shorten_tracebacks
    def export(
        self,
        path: str | os.PathLike[str],
        format: Literal["safetensors", "torch", "onnx"] = "safetensors",
        *,
        epoch: Literal["best", "last"] | int = "best",
        build: Callable[..., Any] | None = None,
        data: Any = None,
    ) -> Path:
        """Write the model's weights, or for ``onnx`` the network, to a file.

        Weights come from the kept state, without ``build`` and the data. Only ``onnx``, and weights
        that states leave out (``state="trainable"``), need both.

        Parameters
        ----------
        path
            The file. An existing file is replaced.
        format
            ``"safetensors"``: for a `cerebro.torch.Model`, the entries of ``net.state_dict()`` by
            name; for a `cerebro.keras.Model`, its variables by their paths in Keras; for a
            `cerebro.jax.Model`, its parameters and variables, and for any other model, all tensors
            of its state, both by path, such as ``/params/hidden``. ``"torch"``: the ``state_dict``
            of the network (for a model with four methods, the whole state), for ``torch.load(path,
            weights_only=True)``. ``"onnx"``: the network of a `cerebro.torch.Model` in evaluation
            mode, for any number of rows. Its inputs have the names of the columns or, if ``inputs``
            is a mapping, of its keywords. Needs the extra ``onnx``.
        epoch
            As for `load`.
        build
            The run's ``build``, if it is needed and cannot be imported again.
        data
            The run's training data or a dataset that contains it, or the path of one; given if the
            data is needed and has moved.

        Returns
        -------
        Path
            The file.

        Raises
        ------
        InputError
            If the format is unknown or cannot hold the model, if a package is missing, or if
            ``build`` or the data is needed and cannot be found.
        CorruptDataError
            If the state's file is damaged.
        """
        from cerebro.results.export import export

        record, model = self._epoch_record(epoch), self._model
        with model.keep(record, lambda: model.context(build, data)) as kept:
            return export(path, format, kept)

    @shorten_tracebacks
    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        epoch: Literal["best", "last"] | int = "best",
        build: Callable[..., Any] | None = None,
        data: Any = None,
    ) -> Path:
        """Save the model as a folder for use without Cerebro.

        The folder has ``load.py``, a short program that loads the model and predicts raw rows, as
        `predict` does; ``model.json`` with the configuration, metrics, input columns with their
        statistics, class names and versions; ``build.py``, the source of ``build``; and the model:
        for PyTorch ``weights.safetensors`` and ``model.pt2`` (`torch.export`, any number of rows),
        for Keras ``weights.safetensors`` and ``model.keras``, for scikit-learn ``model.joblib``,
        for others ``weights.safetensors``, which ``load.py`` only reads.

        Parameters
        ----------
        folder
            A new folder, or a saved model to replace.
        epoch
            As for `load`.
        build
            The run's ``build``, if it cannot be imported again.
        data
            The run's training data or a dataset that contains it, or the path of one; given if the
            data has moved.

        Returns
        -------
        Path
            The folder.

        Raises
        ------
        InputError
            If the folder exists and is not a saved model, or if ``build`` or the data cannot be
            found.
        CorruptDataError
            If the state's file is damaged.
        """
        from cerebro.results.export import save

        record = self._epoch_record(epoch)
        context = self._model.context(build, data)
        about = {
            "run": str(self.saved.path),
            "trial": self.number,
            "epoch": record.epoch,
            "state_hash": record.state_hash,
            "config": self.config,
            "metrics": dict(record.metrics),
        }
        with self._model.keep(record, lambda: context) as kept:
            return save(folder, about, context.build, kept)

    def _select_epoch(self) -> EpochRecord | None:
        """Return the epoch that ranks the trial or, for a fold, its configuration; or None."""
        by = self.saved.ranked_by
        whole = None if self._whole is None else self._whole.selected(by)
        if whole is not None:
            return self.record.epochs[whole.epoch - self.record.first_epoch]
        return self.record.selected(by)

    def _fold(self, fold: int) -> Trial:
        folds = self.folds
        if not folds:
            raise InputError(f"trial {self.number} has no folds: leave out fold=")
        number = check_whole_number("fold", fold, 0)
        if number >= len(folds):
            raise InputError(
                f"trial {self.number} has no fold {fold}: it has 0 to {len(folds) - 1}"
            )
        return folds[number]

    def _epoch_record(self, epoch: Literal["best", "last"] | int) -> EpochRecord:
        folds = len(self.record.folds)
        if folds:
            raise InputError(
                f"trial {self.number} has {folds} folds, each with its own model: use one of "
                f"them, trial.folds[0] to trial.folds[{folds - 1}], or load(fold=0)"
            )
        records, selected = self.record.epochs, self._select_epoch()
        if selected is None:
            cause = f": {self.error}" if self.error else ""
            raise InputError(f"trial {self.number} has finished no epoch{cause}")
        if isinstance(epoch, str) and epoch not in ("best", "last"):
            raise InputError(f"epoch must be 'best', 'last' or an epoch's number, not {epoch!r}")
        if epoch == "last":
            number = records[-1].epoch
        elif epoch == "best":
            number = selected.epoch  # so that `metrics` and `state_hash` are those of the model
        else:
            number = check_whole_number("epoch", epoch, 0)
        record = next((r for r in records if r.epoch == number), None)
        if record is None or record.state_file is None:
            available = [str(r.epoch) for r in records if r.state_file is not None]
            raise InputError(
                f"trial {self.number} has no state of epoch {number}; kept are "
                f"{', '.join(available) or 'none'} (keep='all' keeps every epoch)"
            )
        return record

    def __repr__(self) -> str:
        shown = self.metrics.get(self.saved.metric)
        value = "" if shown is None else f", {self.saved.metric}={fmt.metric(shown)}"
        folds = f", {len(self.record.folds)} folds" if self.record.folds else ""
        fold = "" if self.fold is None else f", fold {self.fold}"
        progress = f"epoch {self.epoch}/{self.epochs}"
        return f"Trial({self.number}{fold}, {self.status}, {progress}{folds}{value})"

    def _repr_html_(self) -> str:
        from cerebro.report.block import render_trial

        return render_trial(self)
