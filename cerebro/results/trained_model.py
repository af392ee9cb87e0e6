"""Build a trial's model again, load its state, and compute with it as the run did."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from cerebro.arguments import warn_user
from cerebro.data import Dataset
from cerebro.data.batches import make_loader
from cerebro.data.dtypes import Array
from cerebro.data.given_rows import is_rows, write_temporary
from cerebro.data.order import mix_in_order
from cerebro.data.raw_rows import is_raw, make_source
from cerebro.data.recipe import is_csv, is_frame_row
from cerebro.data.rows import Part
from cerebro.data.sources.arrays import is_bunch
from cerebro.data.validation import describe_other_numbers, find_unfit_columns
from cerebro.errors import CorruptDataError, InputError
from cerebro.machine import generators
from cerebro.machine.devices import CPU, choose_resume_devices, use_device
from cerebro.machine.libraries import present_settings, settings_of_run
from cerebro.results.export import Kept
from cerebro.results.inputs import (
    are_batches,
    as_inputs,
    as_matrix,
    find_inputs,
    has_names,
    has_sequences,
    is_one_row,
)
from cerebro.results.outputs import decode
from cerebro.results.saved_run import SavedRun
from cerebro.run.records import EpochRecord, TrialRecord, strip_study
from cerebro.run.settings import Batches, Exactness, read_group
from cerebro.worker import models
from cerebro.worker.evaluate import evaluate_model, evaluation_seed
from cerebro.worker.messages import RunContext

Build = Callable[..., Any] | None
"""The run's ``build``, if it cannot be imported again."""


class TrainedModel:
    """The model of a trial without folds, at any of its kept epochs."""

    def __init__(self, saved: SavedRun, record: TrialRecord) -> None:
        self._saved = saved
        self._record = record

    @property
    def _config(self) -> Mapping[str, Any]:
        return strip_study(self._record.config)

    @property
    def _batches(self) -> Batches:
        return read_group(Batches, self._saved.settings)

    def context(self, build: Build, data: Any) -> RunContext:
        """Return the run's context, with the data at its current path, if that is given."""
        saved = self._saved
        if data is None:
            try:
                saved.dataset("data")
            except (InputError, CorruptDataError) as error:
                raise InputError(
                    "the model cannot be built without the run's data "
                    f"({error.__cause__ or error}): if it has been moved, give data= (on the "
                    "command line: --data PATH)"
                ) from error
            return saved.context(build)
        return saved.context(build, **saved.open_views(data))

    def load(
        self, epoch: EpochRecord, build: Build, device: str = CPU, context: RunContext | None = None
    ) -> models.LiveModel:
        """Load the model on a device, with the settings in which it computes."""
        number, config = self._record.number, self._record.config
        packed = self._saved.read_state(number, epoch)
        context = context or self._saved.context(build)
        end = (epoch.epoch + 1) * context.units_per_epoch - 1
        info = models.make_info(
            context.views(number)[0],
            context.order(number),
            trial=number,
            stream=self._record.stream,
            epochs=self._record.info_epochs(end, context.limits.epochs),
            cut=context.batches.make_cut(self._config),
            fold=self._record.fold,
            device=device,
        )
        with (
            generators.reserve_generators("torch" in sys.modules),
            settings_of_run(context.libraries),
        ):

            def build_live() -> models.LiveModel:
                parts = models.build_model(context, config, info)
                return models.LiveModel(*parts, libraries=present_settings())

            def load(live: models.LiveModel) -> None:
                models.load_tree(live, packed, models.batch_device(live.model, device))

            live = build_live()
            models.begin_again(live.model, epoch.epoch)
            live = models.load_or_rebuild(live, load, build_live, epoch.epoch)
        # Otherwise dropout and batch norm would stay in training mode in the user's predictions.
        # train_batch switches back to training mode by itself.
        net: Any = getattr(live.model, "net", None)
        if live.torch and hasattr(net, "eval"):
            net.eval()
        return live

    @contextlib.contextmanager
    def keep(self, epoch: EpochRecord, find_context: Callable[[], RunContext]) -> Iterator[Kept]:
        """Give an epoch's kept state, whose model is built when it is needed, in its settings."""
        with contextlib.ExitStack() as settings:

            def load() -> tuple[Any, Dataset]:
                context = find_context()
                live = self.load(epoch, None, CPU, context)
                settings.enter_context(settings_of_run(live.libraries))
                return live.model, context.views(self._record.number)[0]

            yield Kept(lambda: self._saved.read_state(self._record.number, epoch), load)

    def evaluate(
        self, epoch: EpochRecord, data: Any, build: Build, *, exact: bool
    ) -> dict[str, float]:
        """See `cerebro.Trial.evaluate`; `exact` says whether the trial's states are exact."""
        settings, number = self._saved.settings, self._record.number
        exactness = read_group(Exactness, settings)
        device = choose_resume_devices(settings["devices"])[0]
        with use_device(device), contextlib.ExitStack() as stack:
            live = self.load(epoch, build, device)
            target = self._saved.data_for(data, number, stack)
            what = "evaluate" if is_rows(data) else str(target.path)
            options: dict[str, Any] = {}
            unfit: dict[str, str] = {}
            train = self._saved.training_data()
            if train is not None:
                columns, unfit = models.find_fitting_columns(live.model, train, target, what)
                options["columns"] = columns
                texts = (
                    models.describe_left_out(unfit, target),
                    describe_other_numbers(train, target, columns or train.columns),
                )
                for text in filter(None, texts):
                    warn_user(f"{what}: {text}")
            loader = models.make_batches(
                live.model,
                target,
                self._batches.eval_size_of(self._config),
                device,
                seed=exactness.seed,
                shuffle=False,
                augment=False,
                residence="streamed",  # the data is read only once
                **options,
            )
            stack.enter_context(contextlib.closing(loader))
            stack.enter_context(settings_of_run(live.libraries))
            stack.enter_context(models.explain_unfit_errors(unfit))
            seed = evaluation_seed(exactness.seed, self._record.key, epoch.epoch)
            where = models.batch_device(live.model, device)

            def run_evaluation(*, strict: bool) -> dict[str, float]:
                with (
                    generators.reserve_generators("torch" in sys.modules, seed),
                    exactness.compute_on(device, strict=strict),
                ):
                    loader.begin(mix_in_order(target), 0)
                    return evaluate_model(live.model, loader, device=where)[1]

            if exact:
                try:
                    # As in the search: PyTorch chooses accordingly.
                    return run_evaluation(strict=True)
                except Exception as error:
                    if exactness.find_inexact_operation(error, device) is None:
                        raise
            return run_evaluation(strict=False)

    def predict(self, epoch: EpochRecord, data: Any, build: Build, output: str) -> Any:
        """See `cerebro.Trial.predict`."""
        if output not in ("raw", "class", "probability"):
            raise InputError(f"output must be 'raw', 'class' or 'probability', not {output!r}")
        if isinstance(data, (str, os.PathLike)) and not (is_csv(data) or is_rows(data)):
            data = Dataset(data)
        live = self.load(epoch, build)
        with (
            generators.reserve_generators("torch" in sys.modules),
            settings_of_run(live.libraries),
            contextlib.ExitStack() as rows,
        ):
            columns, unfit = self._saved.columns(), {}
            if isinstance(data, list) and data and isinstance(data[0], (list, tuple, int, float)):
                data = as_matrix("the rows", data)
            is_array = hasattr(data, "ndim") and not hasattr(data, "columns")
            is_columns = isinstance(data, Mapping) and not is_bunch(data)
            if is_columns and is_one_row(data, columns):
                data, is_columns = [dict(data)], False
            is_columns = is_columns and not has_sequences(data, columns)
            train = self._saved.training_data()
            made = None
            if is_frame_row(data):
                data, is_array = data.to_dict(), False
            elif type(data).__module__.startswith("pandas") and is_array:
                data = data.to_numpy()
            if train is None and is_csv(data):
                raise InputError(f"the run's data is missing, which says how to read '{data}'")
            if train is not None and is_raw(data):
                made = make_source(data, train, find_inputs(live.model, train), "predict")
            if made is not None and train is not None:
                data = rows.enter_context(write_temporary(made, train, "predict"))
            elif is_array or (is_columns and not has_names(data, columns)):
                data = as_inputs(live.model, data, train) if train is not None else data
            elif is_rows(data) and not are_batches(data, columns):
                like = self._saved.dataset("data")
                wanted = find_inputs(live.model, like)
                data = rows.enter_context(write_temporary(data, like, "predict", wanted))
                unfit = self._check_columns(live.model, data, "predict")
            elif isinstance(data, Dataset):
                unfit = self._check_columns(live.model, data, str(data.path))
            size = self._batches.size_of(self._config)
            if output == "probability" and hasattr(live.model, "predict_probability"):
                live.model.predict_batch = live.model.predict_probability
                return _predict(live.model, data, size, unfit)
            return decode(_predict(live.model, data, size, unfit), output, live.model, train)

    def _check_columns(self, model: Any, data: Dataset, what: str) -> dict[str, str]:
        """Return why the model might misread columns; warn about other numbers than in training.

        Raise InputError if the model's inputs name a column that it misreads.
        """
        train = self._saved.training_data()
        if train is None:
            return {}
        inputs = getattr(model, "_inputs", None)
        names = find_inputs(model, train)
        columns = [name for name in data.columns if names is None or name in names]
        if text := describe_other_numbers(train, data, columns):
            warn_user(f"{what}: {text}")
        unfit = find_unfit_columns(train, data, what, columns)
        if unfit and inputs is not None:
            raise InputError(next(iter(unfit.values())))
        return unfit


def _predict(model: Any, data: Any, batch_size: int, unfit: Mapping[str, str]) -> Any:
    """Return a model's predictions, with rows in the order of the dataset.

    The model has ``predict(data)``, or ``predict_batch(batch)``, whose result has one row per row
    of the batch. `unfit` says why the model may not read some columns; batches leave these columns
    out. Raises InputError if the model has neither method or reads such a column.
    """
    if unfit and (hasattr(model, "predict") or unfit.keys() >= data.columns.keys()):
        raise InputError(next(iter(unfit.values())))
    if hasattr(model, "predict"):
        return model.predict(data)
    if not hasattr(model, "predict_batch"):
        raise InputError(
            f"{type(model).__name__} has no predict_batch(batch): add one, or use load() and "
            "your own code"
        )
    if not isinstance(data, Dataset):
        raise InputError(f"predict needs a cerebro.Dataset, not {type(data).__name__}")
    loader = make_loader(
        data,
        batch_size,
        seed=0,
        shuffle=False,
        framework=getattr(model, "framework", "dlpack"),
        augment=False,
        columns=[name for name in data.columns if name not in unfit] if unfit else None,
    )
    if text := models.describe_left_out(unfit, data):
        warn_user(f"predict: {text}")
    with contextlib.closing(loader), models.explain_unfit_errors(unfit):
        loader.begin(mix_in_order(data), 0)
        parts = [model.predict_batch(batch) for batch in loader]
        if parts and type(parts[0]).__module__.startswith("torch"):
            return sys.modules["torch"].cat(parts)
        return np.concatenate([np.asarray(part) for part in parts])


# --- out of fold -------------------------------------------------------------

_ONE_FOLD = "predict with one fold, such as trial.folds[0].predict(...)"


def join_by_row(data: Dataset, held_out: Sequence[Dataset], predictions: Sequence[Any]) -> Any:
    """Return the predictions of all folds as one array, in the order of the data's rows.

    Each fold has the rows that it held out, and the model's outputs for them. Raises InputError if
    the outputs are not arrays of one shape, a row is held out twice, or the outputs are integers
    and some rows are never held out.
    """
    outputs = [_as_array(fold, prediction) for fold, prediction in enumerate(predictions)]
    kinds = {(output.dtype, output.shape[1:]) for output in outputs}
    if len(kinds) > 1:
        shapes = " and ".join(sorted(f"{dtype} of shape {shape}" for dtype, shape in kinds))
        raise InputError(f"the folds predict rows of {shapes}: {_ONE_FOLD}")
    places = [_find_rows(data, view) for view in held_out]
    counts = np.zeros(data.num_rows, np.int64)
    for rows in places:
        counts[rows] += 1
    if counts.max() > 1:
        raise InputError(
            f"row {int(np.argmax(counts > 1))} is held out by {counts.max()} folds, so it has more "
            f"than one prediction: {_ONE_FOLD}"
        )
    result = np.zeros((data.num_rows, *outputs[0].shape[1:]), outputs[0].dtype)
    if counts.min() == 0:
        if result.dtype.kind not in "fc":
            raise InputError(
                f"{int((counts == 0).sum())} rows are held out by no fold, and predictions of type "
                f"{result.dtype} have no NaN for them: {_ONE_FOLD}"
            )
        result[counts == 0] = np.nan
    for rows, output in zip(places, outputs, strict=True):
        result[rows] = output
    return result


def _find_rows(data: Dataset, view: Dataset) -> Array:
    numbers, start = [], 0
    for whole, part in zip(data.view.parts, view.view.parts, strict=True):
        held = _as_numbers(part)
        if isinstance(whole, range):
            numbers.append(start + held - whole.start)
        else:
            order = np.argsort(whole, kind="stable")
            rows = _as_numbers(whole)[order]
            if (np.diff(rows) == 0).any():
                raise InputError(
                    "the run's data has a row twice, so predictions cannot be put in row order: "
                    f"{_ONE_FOLD}"
                )
            numbers.append(start + order[np.searchsorted(rows, held)])
        start += len(whole)
    return np.concatenate(numbers)


def _as_numbers(part: Part) -> Array:
    if isinstance(part, range):  # of which NumPy would make an int for every row
        return np.arange(part.start, part.stop)
    return np.asarray(part, np.int64)


def _as_array(fold: int, prediction: Any) -> Array:
    if isinstance(prediction, (Mapping, list, tuple)):
        raise InputError(
            f"the model of fold {fold} returns a {type(prediction).__name__} of outputs, not one "
            f"array: {_ONE_FOLD}"
        )
    if hasattr(prediction, "detach"):
        prediction = prediction.detach().cpu()
        if str(prediction.dtype) == "torch.bfloat16":  # NumPy lacks this type
            prediction = prediction.float()
        return np.asarray(prediction.numpy())
    return np.asarray(prediction)
