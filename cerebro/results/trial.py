"""Provide `Trial`: one configuration of a run and its results, as shown to users."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from cerebro.arguments import check_whole_number, find_stacklevel
from cerebro.data import Dataset
from cerebro.data.given_rows import has_names, is_rows, narrow_arrays, write_temporary
from cerebro.data.order import mix_in_order
from cerebro.data.sources.arrays import is_bunch
from cerebro.data.validation import find_unfit_columns
from cerebro.errors import CorruptDataError, InputError, shorten_tracebacks
from cerebro.machine import generators
from cerebro.machine.devices import CPU, choose_resume_devices, read_devices, use_device
from cerebro.machine.files import path_of
from cerebro.machine.libraries import present_settings, settings_of_run
from cerebro.model import column_names, read_columns, stored_column
from cerebro.results.saved_run import SavedRun
from cerebro.run.records import EpochRecord, Status, TrialRecord, strip_study
from cerebro.run.settings import Batches, Exactness, read_group
from cerebro.worker.messages import RunContext

if TYPE_CHECKING:
    from cerebro.worker.models import LiveModel

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
        return self._load(epoch, build, CPU).model

    def _load(
        self,
        epoch: Literal["best", "last"] | int,
        build: Callable[..., Any] | None,
        device: str,
        context: RunContext | None = None,
    ) -> LiveModel:
        """Load a model on a device, with the settings in which it computes; see `load`."""
        from cerebro.worker.epoch_progress import EpochProgress
        from cerebro.worker.models import (
            LiveModel,
            batch_device,
            begin_again,
            build_model,
            load_or_rebuild,
            load_tree,
            make_info,
        )

        record = self._epoch_record(epoch)
        packed = self.saved.read_state(self.number, record)
        if context is None:
            context = self.saved.context(build)
        info = make_info(
            context.views(self.number)[0],
            context.order(self.number),
            trial=self.number,
            epochs=self.record.info_epochs(
                (record.epoch + 1) * context.units_per_epoch - 1, context.limits.epochs
            ),
            cut=context.batches.make_cut(self.config),
            fold=self.fold,
            device=device,
        )
        with (
            generators.reserve_generators(_torch_imported()),
            settings_of_run(context.libraries),
        ):

            def build_live() -> LiveModel:
                parts = build_model(context, self.number, self.record.config, info)
                return LiveModel(
                    *parts,
                    progress=EpochProgress(),
                    libraries=present_settings(),
                )

            def load(live: LiveModel) -> None:
                load_tree(live, packed, batch_device(live.model, device))

            live = build_live()
            begin_again(live.model, record.epoch)
            live = load_or_rebuild(live, load, build_live, record.epoch)
            model = live.model
        # Otherwise dropout and batch norm would stay in training mode in the user's predictions.
        # train_batch switches back to training mode by itself.
        net: Any = getattr(model, "net", None)
        if live.torch and hasattr(net, "eval"):
            net.eval()
        return live

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
        record = self._epoch_record(epoch)
        return self.saved.state_path(record)

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
            the types, classes and transforms of the training data. Default: the run's validation
            data or, for a fold, the rows that it held out.
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
        device = choose_resume_devices(read_devices(self.saved.settings))[0]
        with use_device(device), contextlib.ExitStack() as rows:
            live = self._load("best", build, device)
            target = self.saved.data_for(data, self.number, rows)
            what = "evaluate" if is_rows(data) else str(target.path)
            return self._evaluate(live, target, device, what)

    def _evaluate(
        self, live: LiveModel, target: Dataset, device: str, what: str
    ) -> dict[str, float]:
        from cerebro.worker.evaluate import evaluate_model, evaluation_seed
        from cerebro.worker.models import (
            batch_device,
            describe_left_out,
            explain_unfit_errors,
            find_fitting_columns,
            make_batches,
        )

        model, settings = live.model, self.saved.settings
        exactness = read_group(Exactness, settings)
        options: dict[str, Any] = {}
        unfit: dict[str, str] = {}
        train = self.saved.training_data()
        if train is not None:
            columns, unfit = find_fitting_columns(model, train, target, what)
            options["columns"] = columns
            if text := describe_left_out(unfit, target):
                warnings.warn(f"{what}: {text}", stacklevel=find_stacklevel())
        loader = make_batches(
            model,
            target,
            read_group(Batches, settings).eval_size_of(self.config),
            device,
            seed=exactness.seed,
            shuffle=False,
            augment=False,
            residence="streamed",  # the data is read only once
            **options,
        )
        epoch = self._epoch_record("best").epoch
        seed = evaluation_seed(exactness.seed, self.number, epoch)
        where = batch_device(model, device)

        def run_evaluation(*, strict: bool) -> dict[str, float]:
            with (
                generators.reserve_generators(_torch_imported(), seed),
                exactness.compute_on(device, strict=strict),
            ):
                loader.begin(mix_in_order(target), 0)
                return evaluate_model(model, loader, device=where)[1]

        with (
            contextlib.closing(loader),
            settings_of_run(live.libraries),
            explain_unfit_errors(unfit),
        ):
            if not self.not_exact:
                try:
                    # As in the search: PyTorch chooses accordingly.
                    return run_evaluation(strict=True)
                except Exception as error:
                    if exactness.find_inexact_operation(error, device) is None:
                        raise
            return run_evaluation(strict=False)

    @shorten_tracebacks
    def predict(self, data: Any, *, build: Callable[..., Any] | None = None) -> Any:
        """Return predictions for the rows of a dataset, in row order.

        The model is the one that `load` returns, after the epoch that ranks the trial.

        Parameters
        ----------
        data
            A `cerebro.Dataset` or its path; a table, a pair ``(x, y)`` or a PyTorch dataset, as for
            `evaluate`; or an argument of the model's own ``predict``, such as an array.
        build
            The run's ``build``, if it cannot be imported again.

        Returns
        -------
        tensor or ndarray
            The result of the model's ``predict``, or the concatenated outputs of the batches, of
            shape ``(rows, ...)``.

        Raises
        ------
        InputError
            If the model has neither ``predict`` nor ``predict_batch``; also as for `load`.
        """
        from cerebro.results.export import predict

        if isinstance(data, (str, os.PathLike)):
            data = Dataset(data)
        live = self._load("best", build, CPU)
        with (
            generators.reserve_generators(_torch_imported()),
            settings_of_run(live.libraries),
            contextlib.ExitStack() as rows,
        ):
            is_array = hasattr(data, "ndim") and not hasattr(data, "columns")
            is_columns = isinstance(data, Mapping) and not is_bunch(data)
            unfit: dict[str, str] = {}
            if is_array or (is_columns and not has_names(data, self.saved.columns())):
                data = narrow_arrays(data, self.saved.columns())
            elif is_rows(data) and not isinstance(data, list):  # which has batches
                data = rows.enter_context(
                    write_temporary(data, self.saved.dataset("data"), "predict")
                )
                unfit = self._find_unfit_columns(live.model, data, "predict")
            elif isinstance(data, Dataset):
                unfit = self._find_unfit_columns(live.model, data, str(data.path))
            size = read_group(Batches, self.saved.settings).size_of(self.config)
            return predict(live.model, data, size, unfit)

    def _find_unfit_columns(self, model: Any, data: Dataset, what: str) -> dict[str, str]:
        """Return messages about columns that the model might misread.

        Raises InputError if the model names such a column among its inputs.
        """
        train = self.saved.training_data()
        if train is None:
            return {}
        inputs = getattr(model, "_inputs", None)
        if inputs is None:
            named = read_columns(model, train.columns)  # None: the model may read any column
            columns = [name for name in data.columns if named is None or name in named]
            return find_unfit_columns(train, data, what, columns)
        read = {stored_column(name, train.columns) for name in column_names("inputs", inputs)}
        columns = [name for name in data.columns if name in read]
        for message in find_unfit_columns(train, data, what, columns).values():
            raise InputError(message)
        return {}

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
        from cerebro.results.out_of_fold import join_by_row

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

        def read() -> bytes:
            return self.saved.read_state(self.number, self._epoch_record(epoch))

        with contextlib.ExitStack() as settings:

            def load() -> tuple[Any, Dataset]:
                context = self._context(build, data)
                live = self._load(epoch, build, CPU, context)
                settings.enter_context(settings_of_run(live.libraries))
                return live.model, context.views(self.number)[0]

            return export(path, format, read, load)

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

        The folder has ``load.py``, a short program that loads the model; ``model.json`` with the
        configuration, metrics, input columns with their statistics, class names and versions;
        ``build.py``, the source of ``build``; and the model: for PyTorch ``weights.safetensors``
        and ``model.pt2`` (`torch.export`, any number of rows), for scikit-learn ``model.joblib``,
        for others ``weights.safetensors``.

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
        from cerebro.results.save import save

        record = self._epoch_record(epoch)
        context = self._context(build, data)
        about = {
            "run": str(self.saved.path),
            "trial": self.number,
            "epoch": record.epoch,
            "state_hash": record.state_hash,
            "config": self.config,
            "metrics": dict(record.metrics),
        }

        def read() -> bytes:
            return self.saved.read_state(self.number, record)

        with contextlib.ExitStack() as settings:

            def load() -> tuple[Any, Dataset]:
                live = self._load(epoch, build, CPU, context)
                settings.enter_context(settings_of_run(live.libraries))
                return live.model, context.views(self.number)[0]

            return save(folder, about, context.build, read, load)

    def _context(self, build: Callable[..., Any] | None, data: Any) -> RunContext:
        """Return the run's context, with the data at its current path."""
        if data is None:
            self._check_data()
            return self.saved.context(build)
        if not isinstance(data, Dataset):
            data = Dataset(path_of("data", data))
        train = self.saved.view("data", data)
        return self.saved.context(
            build,
            train=train,
            folds=self.saved.folds_of(train),
            validation=self.saved.view("validation", data),
        )

    def _check_data(self) -> None:
        try:
            self.saved.dataset("data")
        except (InputError, CorruptDataError) as error:
            raise InputError(
                f"the model cannot be built without the run's data ({error.__cause__ or error}): "
                "if it has been moved, give data= (on the command line: --data PATH)"
            ) from error

    def _select_epoch(self) -> EpochRecord | None:
        """Return the epoch that ranks the trial or, for a fold, its configuration; or None."""
        by = self.saved.ranked_by
        if self._whole is not None:
            whole = self._whole.selected(by)
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
        from cerebro.report import format as fmt

        shown = self.metrics.get(self.saved.metric)
        value = "" if shown is None else f", {self.saved.metric}={fmt.metric(shown)}"
        folds = f", {len(self.record.folds)} folds" if self.record.folds else ""
        fold = "" if self.fold is None else f", fold {self.fold}"
        progress = f"epoch {self.epoch}/{self.epochs}"
        return f"Trial({self.number}{fold}, {self.status}, {progress}{folds}{value})"

    def _repr_html_(self) -> str:
        from cerebro.report.html import trial_html

        return trial_html(self)


def _torch_imported() -> bool:
    return "torch" in sys.modules
