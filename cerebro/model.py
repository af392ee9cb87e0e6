"""The interface of a model: its methods, columns and metrics, and the info passed to `build`.

Shared by the models of all frameworks; no framework is imported here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Protocol

import numpy as np

from cerebro.errors import InputError

FRAMEWORKS = ("torch", "numpy", "jax", "dlpack")
SAME_MODEL = "build must make the same model from the same configuration"


@dataclass(frozen=True)
class Info:
    """Facts about a trial and its search, passed to ``build`` as its second argument.

    Attributes
    ----------
    epochs
        The largest number of epochs that the trial trains.
    steps_per_epoch
        Training batches per epoch; with ``shuffle="shards"`` and shards of different sizes, of the
        longest one.
    total_steps
        Training batches of all epochs.
    batch_size
        Rows per training batch.
    trial
        The trial's number. Trials that users add to a running search count, too: take random
        numbers from `seed`, which no other trial changes.
    seed
        The seed that `random`, NumPy and torch were seeded with before `build`.
    device
        The device of PyTorch batches: "cpu", or a GPU such as "cuda:0".
    columns
        The data's columns by name.
    classes
        The class names by column; None for columns without names, such as integer labels: see
        `num_classes`.
    data
        The training data, a :class:`cerebro.Dataset`.
    fold
        The trial's fold, from 0; None in a search without folds.
    steps
        The training batches of each epoch; empty if all epochs have `steps_per_epoch`.
    """

    epochs: int
    steps_per_epoch: int
    total_steps: int
    batch_size: int
    trial: int
    seed: int
    device: str = "cpu"
    columns: Mapping[str, Any] | None = None
    classes: Mapping[str, Any] | None = None
    data: Any = None
    fold: int | None = None
    steps: Sequence[int] = ()
    # What `shared` asks; a search gives each object its own. Not a field, so it has no annotation.
    sharing = None  # type: Any

    def shared(self, name: str, make: Callable[[], Any]) -> Any:
        """Return ``make()``, which is called once per process for all models of a run.

        A `torch.nn.Module`, such as a pretrained network, is frozen (``requires_grad_(False)``).
        Each call returns another module with the same tensors as parameters and buffers of its
        own, so PEFT may change its structure. Any other value is the same object each time, and
        must not be changed.

        Parameters
        ----------
        name
            The value's name in the run. The first `make` of a name counts.
        make
            A function without arguments that always makes the same value, and does not depend on
            the trial. It has random numbers of its own, from the run's seed and `name`. Outside of
            a search, as in `cerebro.Trial.load`, it is called each time.

        Raises
        ------
        InputError
            An argument has the wrong type, or the module cannot be copied.
        """
        if not isinstance(name, str):
            raise InputError(f"info.shared: name must be a str, not {name!r}")
        if not callable(make):
            raise InputError(
                f"info.shared: make must be a function without arguments, not {make!r}"
            )
        if self.sharing is not None:
            return self.sharing.make(name, make)
        value = make()
        return value.requires_grad_(False) if hasattr(value, "named_parameters") else value

    def num_classes(self, column: str = "y") -> int:
        """Return the number of classes of a label column, with or without class names.

        See `cerebro.Dataset.num_classes`.
        """
        return int(self.data.num_classes(column))


class Model(Protocol):
    """The methods that every model has.

    A metric's value is a float or a 0-d tensor, the mean over the batch's rows, or a pair ``(mean,
    weight)``; a mean of weight 0 does not count. These attributes and methods are optional:

    ``framework``
        The framework of batches: "torch", "numpy", "jax" or "dlpack" (default).
    ``cpu_only``
        True if the model never computes on a GPU; a search with ``devices="auto"`` then uses the
        CPU.
    ``loads_in_place``
        True if a state may be loaded by copying it into the tensors that `state_dict` returns. This
        saves memory, but these tensors must belong to the model alone.
    ``overlaps``
        True if units of other trials may run in the same process between two of its batches, as
        those of the other workers of a GPU do. The model must then depend on nothing of the process
        but its random generators, and compute on PyTorch's current stream.
    ``replays_graphs``
        True if training on a GPU replays its steps as graphs, without running their Python code. If
        it also `overlaps`, a search trains several trials at once on a GPU by default.
    ``columns_read``
        The names of all columns that the model reads in training and evaluation. Batches then have
        only these columns, and the files of the others are not read. None (default): batches have
        all columns.
    ``columns_spared``
        The names of columns that evaluation can do without, such as that of the rows' weights.
    ``bind_info(info)``
        Called once, after `build`.
    ``begin_epoch(epoch)``, ``end_epoch(epoch, metrics)``
        Called before and after an epoch, numbered from 0. `end_epoch` is called after validation
        and before the epoch's state is hashed. It may return a mapping of training metrics that are
        not means over batches; they become metrics of the epoch. `begin_epoch` is called again on a
        model that was built in the middle of an epoch, before the state is loaded: it sets what
        depends on the epoch and is not in the state. An error of this call is ignored.
    ``begins_once``
        True if the state has everything that `begin_epoch` changes; it is then not called again.
    ``accumulate``
        The number of batches that one update should take, if not 1. A unit then ends with an
        update.
    ``begin_unit(updates)``
        Called before the first training batch of a unit, with a tuple of the numbers of batches of
        its updates. They are cut as evenly as batches: each has about `accumulate` batches, and
        from half to one and a half times as many unless the epoch is shorter.
    ``end_unit()``
        Called after the last training batch of a unit, before its state is saved.
    ``training_metrics() -> dict``
        Called after `end_unit`. Returns the metrics over the epoch's training batches so far; they
        replace the means of the values that `train_batch` returned.
    ``evaluate(batches) -> dict``
        Called once for a whole validation pass, instead of `eval_batch` for each batch.
    ``predict_batch(batch)``
        Returns the outputs for a batch.
    ``load_clone(state, config)``
        Called instead of `load_state_dict` if the state is from another trial. If it has the
        parameter ``epoch``, it gets the number of epochs in the state; if it has ``rebuild``, a
        function that builds the parent's configuration again, with the parent's seed or, called
        with True, the clone's.
    """

    def train_batch(self, batch: dict[str, Any]) -> Mapping[str, Any] | None:
        """Train on one batch and return its metrics."""
        ...

    def eval_batch(self, batch: dict[str, Any]) -> Mapping[str, Any]:
        """Return the metrics of one batch without changing the model."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return everything that further training depends on: tensors, arrays and JSON."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state; its tensors are copied, not kept."""
        ...


_REQUIRED = {
    "train_batch": "train_batch(batch) -> dict | None",
    "eval_batch": "eval_batch(batch) -> dict",
    "state_dict": "state_dict() -> dict",
    "load_state_dict": "load_state_dict(state)",
}


def check_model(model: object) -> None:
    """Raise InputError if `model` lacks a method that Cerebro needs."""
    if model is None:
        raise InputError(
            "build returned None; return a model, such as cerebro.torch.Model(...). A function "
            "that trains by itself, as for Ray Tune or Optuna, must return its model instead"
        )
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    if is_keras(model):
        raise InputError(f"build returned a {kind}: {NO_KERAS}, or just the compiled net")
    for name, signature in _REQUIRED.items():
        if name == "eval_batch" and callable(getattr(model, "evaluate", None)):
            continue
        if not callable(getattr(model, name, None)):
            raise InputError(
                f"build returned a {kind}, which has no {name} method: a model needs {signature}"
                f"{_find_hint(model)}"
            )
    framework = framework_of(model)
    if framework not in FRAMEWORKS:
        raise InputError(
            f"build returned a {kind} with framework={framework!r}; it must be one of "
            f"{', '.join(FRAMEWORKS)}"
        )


NO_KERAS = (
    "compile a Keras model, net.compile(optimizer, loss), and return cerebro.keras.Model(net)"
)


def has_base(value: object, name: str, *packages: str) -> bool:
    """Return whether a class of `value` has this name and is from one of these packages."""
    bases = {(kind.__module__.partition(".")[0], kind.__name__) for kind in type(value).__mro__}
    return not bases.isdisjoint((package, name) for package in packages)


def is_keras(value: object) -> bool:
    """Return whether an object's class or one of its base classes is from Keras."""
    packages = {kind.__module__.partition(".")[0] for kind in type(value).__mro__}
    return not packages.isdisjoint(("keras", "tf_keras"))


TARGETS = ("y", "target", "label", "labels")  # names by which a column is taken as the target


def _find_hint(model: object) -> str:
    if has_base(model, "PreTrainedModel", "transformers") or has_base(model, "PeftModel", "peft"):
        return "; convert it: cerebro.torch.from_transformers(model, args=...)"
    if hasattr(model, "parameters") and hasattr(model, "forward"):
        return "; wrap the network: cerebro.torch.Model(net, optimizer=..., loss=...)"
    if hasattr(model, "partial_fit"):
        return "; make it a sklearn.base.BaseEstimator, or give it these methods"
    if hasattr(model, "apply") and hasattr(model, "init"):
        return "; wrap the module: cerebro.jax.Model(net.apply, params, optimizer=..., loss=...)"
    if isinstance(model, tuple):
        return "; return one object, such as cerebro.torch.Model(net, optimizer=..., loss=...)"
    return ""


def framework_of(model: object) -> str:
    """Return the framework of the model's batches: its `framework`, or "dlpack"."""
    return getattr(model, "framework", "dlpack")


@dataclass(frozen=True)
class Words:
    """The terms that messages use for a model's methods; the defaults fit users' own classes."""

    train: str = "train_batch"
    evaluate: str = "eval_batch"
    report: str = "return it from train_batch and eval_batch"
    """How to report a metric of a search without validation, or of both."""
    report_in_validation: str = "return it from eval_batch too"
    """How to report in validation a metric that is reported in training."""
    keep: str = "put it into state_dict() and load_state_dict(), or into the net as a buffer"
    """How to keep a value through a hop."""
    by_step: bool = False
    """Whether a metric is reported in training or in validation, not in both by one argument."""

    @classmethod
    def of_metrics(cls, where: str) -> Words:
        """Return the words for a model whose metrics, in training and validation, are `where`."""
        return cls("training step", "validation", where, where)


def words_of(model: object) -> Words:
    """Return a model's words; a subclass that reports metrics by itself gets the defaults."""
    evaluate = "eval_batch" if hasattr(model, "eval_batch") else "evaluate"
    if all(_is_ours(getattr(type(model), name, None)) for name in ("train_batch", evaluate)):
        return getattr(model, "words", Words())
    return Words(
        evaluate=evaluate,
        report=f"return it from train_batch and {evaluate}",
        report_in_validation=f"return it from {evaluate} too",
    )


def named_metrics(model: object) -> list[str]:
    """Return the full names of the metrics that a model may leave out of a batch."""
    names = list(getattr(model, "metric_names", ()))
    return [*names, *(f"train_{name}" for name in names)]


_REPORTING = ("train_batch", "eval_batch", "evaluate", "training_metrics", "end_epoch")
"""The methods whose results are metrics."""


def declares_metrics(model: object) -> bool:
    """Return whether the arguments of a model fix the names of all metrics that it reports."""
    # A user's method may report a metric in some batches or epochs only.
    ours = all(_is_ours(getattr(model, name)) for name in _REPORTING if hasattr(model, name))
    return ours and bool(getattr(model, "declares_metrics", False))


def _is_ours(method: object) -> bool:
    """Return whether Cerebro defines a method, not a user's class."""
    return str(getattr(method, "__module__", "")).startswith("cerebro.")


def is_cpu_only(model: object) -> bool:
    """Return whether the model declares that it never computes on a GPU."""
    return bool(getattr(model, "cpu_only", False))


def shares_gpu(model: object) -> bool:
    """Return whether several such models are trained faster at once on a GPU than one by one.

    They must overlap. If every step runs Python code, they would wait for each other's.
    """
    return bool(getattr(model, "overlaps", False) and getattr(model, "replays_graphs", False))


def get_whole_pass(model: object) -> Callable[[Iterable[dict[str, Any]]], Mapping[str, Any]] | None:
    """Return `model.evaluate` if validation must use it instead of `eval_batch`, else None."""
    evaluate = getattr(model, "evaluate", None)
    if callable(evaluate) and getattr(model, "evaluates_whole", True):
        return evaluate  # type: ignore[no-any-return]
    return None


Batch = dict[str, Any]

Columns = str | Sequence[str] | Mapping[str, str]


def column_names(what: str, columns: Any) -> list[str]:
    """Return the column names in the argument `what`; raise InputError if it is invalid."""
    if isinstance(columns, str):
        return [columns]
    if columns is None and what == "target":
        return []
    names: list[Any] = []
    if isinstance(columns, Mapping):
        names = list(columns.values())
    elif isinstance(columns, (list, tuple)):
        names = list(columns)
    if not names or not all(isinstance(name, str) for name in names):
        raise InputError(f"{what} must be a column's name, a list or a mapping, not {columns!r}")
    return names


def read_columns(model: Any, columns: Mapping[str, Any]) -> list[str] | None:
    """Return the stored columns that a model reads, in the dataset's order; None: all."""
    named = getattr(model, "columns_read", None)
    if named is None:
        return None
    stored = {stored_column(name, columns) for name in named}
    if not stored <= columns.keys():
        return None  # the model's error then lists all columns
    return [name for name in columns if name in stored]


def stored_column(name: str, columns: Mapping[str, Any]) -> str:
    """Return the stored column of the batch entry `name`; a ragged column has three entries."""
    for suffix in ("_mask", "_length"):
        whole = name.removesuffix(suffix)
        if name not in columns and whole != name and getattr(columns.get(whole), "ragged", False):
            return whole
    return name


def make_getter(columns: Columns) -> Callable[[Batch], Any]:
    """Return a function that gets `columns` from a batch: one column, a tuple, or a dict."""
    if isinstance(columns, str):
        return itemgetter(columns)
    if isinstance(columns, Mapping):
        pairs = list(columns.items())
        return lambda batch: {key: batch[column] for key, column in pairs}
    names = list(columns)
    if len(names) == 1:
        return lambda batch: (batch[names[0]],)
    return itemgetter(*names)


def make_forward(net: Callable[..., Any], inputs: Columns) -> Callable[[Batch], Any]:
    """Return the function that calls a network with its columns of a batch."""
    if isinstance(inputs, str):
        return lambda batch: net(batch[inputs])
    get = make_getter(inputs)
    if isinstance(inputs, Mapping):
        return lambda batch: net(**get(batch))
    return lambda batch: net(*get(batch))


def check_batch(batch: Any, inputs: Columns, target: Columns | None) -> None:
    """Raise InputError if a batch lacks a column that a model's arguments name."""
    for what, columns in (("inputs", inputs), ("target", target)):
        for name in column_names(what, columns):
            if isinstance(batch, Mapping) and name not in batch:
                raise InputError(
                    f"{what} names the column {name!r}, but the data has {', '.join(batch)}"
                ) from None


def loss_of(output: Any) -> Any:
    """Return the loss that a network computed: ``output.loss`` or ``output["loss"]``."""
    loss = getattr(output, "loss", None)
    if loss is None and isinstance(output, Mapping):
        loss = output.get("loss")
    if loss is None:
        raise InputError(
            f"loss=None takes the loss from the network's output, but a {type(output).__name__} "
            "has none: give loss, or make the network compute it (a Hugging Face model does if the "
            "batch has labels, in a column named labels or label)"
        )
    return loss


def named_functions(what: str, functions: Any) -> dict[str, Callable[..., Any]]:
    """Check a mapping of names to functions and return it as a dict; None means no functions."""
    if functions is None:
        return {}
    if not isinstance(functions, Mapping) or not all(callable(f) for f in functions.values()):
        raise InputError(f"{what} must be a mapping of names to functions, not {functions!r}")
    return dict(functions)


def check_metrics(
    loss: Any, step: Any, metrics: Mapping[str, Any], whole: Mapping[str, Any]
) -> None:
    """Raise InputError if metrics lack the outputs that they need, or if two have the same name."""
    if step is not None and (loss is not None or metrics):
        raise InputError("step replaces loss and metrics: return them from step instead")
    if step is not None and whole:
        raise InputError("epoch_metrics need outputs, which step does not return: give loss")
    common = metrics.keys() & whole.keys()
    if common or "loss" in {**metrics, **whole}:
        raise InputError(f"two metrics are called {next(iter(common), 'loss')!r}: rename one")


class Means:
    """Means of metrics over batches, summed in float64 in the order of the batches."""

    def __init__(self, floats: Callable[[list[Any]], list[float]]) -> None:
        self._floats = floats  # called after the last batch, with numbers on any device
        self._pairs: dict[str, list[tuple[Any, Any]]] = {}

    def add(self, batch: Batch, values: Mapping[str, Any]) -> None:
        """Add a batch's metrics: means over its rows, or ``(mean, weight)``."""
        rows = len(next(iter(batch.values())))
        for name, value in values.items():
            pair = value if isinstance(value, tuple) else (value, rows)
            self._pairs.setdefault(name, []).append(pair)

    def take(self) -> dict[str, float]:
        """Return the means by name; raise InputError if there was no batch."""
        if not self._pairs:
            raise InputError("there are no rows to evaluate")
        return {name: self._mean(pairs) for name, pairs in self._pairs.items()}

    def _mean(self, pairs: Sequence[tuple[Any, Any]]) -> float:
        total = weights = 0.0
        means, counts = (self._floats(list(numbers)) for numbers in zip(*pairs, strict=True))
        for value, weight in zip(means, counts, strict=True):
            if weight != 0:  # a mean over nothing is often NaN, as 0 / 0
                total += value * weight
                weights += weight
        return total / weights if weights else math.nan


class Unchecked:
    """An object that the checks of a hop ignore: the state has its values, or it has none."""


class Part:
    """An object whose attributes the checks of a hop treat as the model's own."""


class BaseModel:
    """Evaluation and prediction over all rows; a subclass has `_measure` and `predict_batch`."""

    framework: str
    columns_read: list[str] | None = None
    wrapped = ""
    """What `build` returned, if it was wrapped in this model; see `cerebro.worker.wrapping`."""
    words = Words()
    declares_metrics = False
    """See the function `declares_metrics`."""
    _inputs: Columns
    # Only the default methods of this class read these two.
    _target: Columns | None
    _epoch_metrics: Mapping[str, Callable[..., Any]]
    _pass_rows = 256

    @property
    def evaluates_whole(self) -> bool:
        """Whether validation needs :meth:`evaluate` rather than :meth:`eval_batch`."""
        return bool(self._epoch_metrics)

    @property
    def _keeps_outputs(self) -> bool:
        """Whether an evaluation pass keeps the arrays of its batches for `_measure_whole`."""
        return self.evaluates_whole

    def evaluate(self, data: Any, *, batch_size: int | None = None) -> dict[str, float]:
        """Return the loss and all metrics over all rows.

        Parameters
        ----------
        data
            A :class:`cerebro.Dataset`, a mapping of columns to arrays, or an iterable of batches.
        batch_size
            Rows per batch, unless `data` is an iterable of batches; None: 256, or 4096 for
            scikit-learn models.

        Returns
        -------
        dict
            Means weighted by rows, or by the weights that a metric returns, summed in float64.
            Metrics that are not means over batches are computed once, on all rows.

        Raises
        ------
        InputError
            If `data` has no rows, or is of a different type.
        """
        means = Means(self._floats)
        outputs: list[tuple[Any, ...]] = []
        for batch in self._batches(data, batch_size):
            values, parts = self._measure(batch)
            means.add(batch, values)
            if self._keeps_outputs:
                outputs.append(parts)
        result = means.take()
        if outputs:
            whole = [self._join(list(pieces)) for pieces in zip(*outputs, strict=True)]
            result.update(self._measure_whole(whole))
        return result

    def predict_batch(self, batch: Batch) -> Any:
        """Return the outputs for a batch, in evaluation mode."""
        raise NotImplementedError

    def predict(self, data: Any, *, batch_size: int | None = None) -> Any:
        """Return the outputs for all rows, in the order of the rows.

        Parameters
        ----------
        data
            A :class:`cerebro.Dataset`, a mapping of columns to arrays, an array of the input
            column, or an iterable of batches.
        batch_size
            As in :meth:`evaluate`.

        Returns
        -------
        array
            The outputs in host memory, of shape (rows, ...): a tensor if the model is of PyTorch,
            otherwise a NumPy array. Several outputs keep their structure. If the batches' outputs
            differ in more than the number of rows, as for sequences padded per batch, they are
            returned as a list.

        Raises
        ------
        InputError
            As in :meth:`evaluate`.
        """
        batches = self._batches(data, batch_size)
        outputs = [self._to_host(self.predict_batch(batch)) for batch in batches]
        if not outputs:
            raise InputError("there are no rows to predict")
        return self._join(outputs)

    def _batches(self, data: Any, batch_size: int | None) -> Iterable[Batch]:
        rows = self._pass_rows if batch_size is None else batch_size
        if hasattr(data, "__dlpack__"):  # an array, of whichever library
            names = [] if self._inputs is None else column_names("inputs", self._inputs)
            if not names:
                raise InputError(
                    "the model does not say which column it reads: give a mapping of columns to "
                    "arrays"
                )
            if len(names) > 1:
                raise InputError(
                    "the model has several inputs: give a mapping of columns to arrays"
                )
            data = {names[0]: data}
        if isinstance(data, Mapping):
            return self._slice_batches(data, rows)
        if hasattr(data, "in_order"):
            columns = read_columns(self, data.columns)
            batches: Iterable[Batch] = data.in_order(rows, self.framework, columns)
            return batches
        if not isinstance(data, Iterable):
            raise InputError(f"{data!r} is not a dataset, mapping of arrays or iterable of batches")
        return data

    def _slice_batches(self, columns: Mapping[str, Any], batch_size: int) -> Iterator[Batch]:
        arrays = {name: self._as_array(column) for name, column in columns.items()}
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            raise InputError(f"the columns have different numbers of rows: {lengths}")
        for start in range(0, max(lengths.values(), default=0), batch_size):
            yield {name: array[start : start + batch_size] for name, array in arrays.items()}

    # --- what differs between frameworks ----------------------------------------

    def _measure(self, batch: Batch) -> tuple[Mapping[str, Any], tuple[Any, ...]]:
        """Return a batch's metrics, and the arrays that `_measure_whole` needs, if any."""
        raise NotImplementedError

    def _measure_whole(self, parts: Sequence[Any]) -> dict[str, float]:
        """Return metrics over a whole pass from its arrays, by default outputs and targets."""
        arguments = parts[:1] if self._target is None else parts
        values = {name: self._call(f, *arguments) for name, f in self._epoch_metrics.items()}
        return {name: float(v[0] if isinstance(v, tuple) else v) for name, v in values.items()}

    def _call(self, metric: Callable[..., Any], *arguments: Any) -> Any:
        return metric(*arguments)

    def _as_array(self, column: Any) -> Any:
        return np.asarray(column)

    def _floats(self, values: list[Any]) -> list[float]:
        return [float(value) for value in values]

    def _to_host(self, output: Any) -> Any:
        return output

    def _join(self, parts: list[Any]) -> Any:
        """Join the batches' outputs along their rows."""
        return np.concatenate(parts)


def is_joinable(arrays: Sequence[Any]) -> bool:
    """Return whether arrays differ in their number of rows only."""
    first = arrays[0]
    return first.ndim > 0 and all(array.shape[1:] == first.shape[1:] for array in arrays)
