"""Train scikit-learn estimators that learn batch by batch (`partial_fit`).

:class:`Model` lets these estimators hop. The state consists of the fitted attributes, as arrays and
JSON, never a pickle. Only estimators whose fitted attributes are known to fit into such a state are
supported; for others, an error names the estimator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from sklearn.metrics import get_scorer
from sklearn.neural_network._stochastic_optimizers import AdamOptimizer, SGDOptimizer
from sklearn.preprocessing import LabelBinarizer
from sklearn.utils import check_random_state
from sklearn.utils._openmp_helpers import _openmp_effective_n_threads

from cerebro.errors import InputError, StateError
from cerebro.integrations.sklearn.steps import (
    KEPT_IN_VAIN,
    check_weighting,
    keep_rows,
    kind_of,
    learn,
    steps_of,
    string_objects,
)
from cerebro.model import SAME_MODEL, BaseModel, Batch, Words, check_batch

# Fitted attributes that no later training or prediction reads.
_SKIPPED = {
    *KEPT_IN_VAIN,
    "_loss_function_",  # created by every call of partial_fit
    "labels_",  # of the last batch
    "_n_threads",  # of this machine
    "_metadata_request",  # set by build, like the next
    "_sklearn_output_config",
}

_OPTIMIZERS = {"adam": AdamOptimizer, "sgd": SGDOptimizer}

_OBJECTS = {kind.__name__: kind for kind in (AdamOptimizer, SGDOptimizer, LabelBinarizer)}

# An optimizer's attributes, and the parameters of a neural network that set them.
_SETTINGS = {
    "adam": {name: name for name in ("learning_rate_init", "beta_1", "beta_2", "epsilon")},
    "sgd": {
        "learning_rate_init": "learning_rate_init",
        "lr_schedule": "learning_rate",
        "momentum": "momentum",
        "nesterov": "nesterovs_momentum",
        "power_t": "power_t",
    },
}

_GLOBAL_GENERATOR = np.random.mtrand._rand


class Model(BaseModel):
    """A scikit-learn estimator that learns by `partial_fit`.

    Parameters
    ----------
    estimator
        An estimator of one of the classes in :data:`SUPPORTED`, not fitted yet; or a pipeline that
        ends with one, after scalers, ``IncrementalPCA``, ``Normalizer`` or ``Binarizer``. A
        pipeline's steps learn from every batch in order, each from the batch as the previous steps
        have just transformed it.
    inputs
        A column, or a list of columns to concatenate; rows of more than one dimension are
        flattened.
    target
        The column to predict; not used by clusterers and transformers. For an `MLPClassifier`, rows
        may have several labels, each 0 or 1; the accuracy is then the share of rows whose labels
        are all right.
    classes
        All classes of the target. None: the column's class names or, if it has none, all values of
        the target in the training data.
    metrics
        A mapping of names to functions ``metric(y_true, y_pred)``, as in `sklearn.metrics`, or to
        names of scorers ("roc_auc"). In validation they are computed once on all rows, in training
        batch by batch. A metric that raises ValueError or is NaN on a training batch, as
        "neg_log_loss" or "roc_auc_ovr" may if the batch lacks a class, is left out of this batch;
        the epoch's mean is that of the others. In validation, the error fails the trial.
    loss
        ``loss(y_true, y_pred)``, a mean over rows. None: for classifiers, the log loss if they
        predict probabilities, else the share of wrong predictions; for regressors, the mean squared
        error; for clusterers, the mean squared distance to the nearest center; for transformers,
        the mean squared distance to the reconstruction.
    weight
        A column of sample weights, passed to the estimator's ``partial_fit`` (in a pipeline, to
        that of the last step). Loss and metrics are not weighted.

    Attributes
    ----------
    estimator
        The estimator.

    Notes
    -----
    The loss of a training batch is computed before the batch is learned, except for the very first
    batch. Classifiers also have the metric ``accuracy``. Steps with ``copy=False`` copy, because
    rows are used again. `MultinomialNB` and its kin count every row in each epoch: train them for
    one epoch, or `alpha` counts for less.

    Raises
    ------
    InputError
        If the estimator is not supported, or an argument does not apply to its kind.
    """

    framework = "numpy"
    cpu_only = True
    words = Words.of_metrics("add it to metrics= of cerebro.sklearn.Model")
    declares_metrics = True
    _pass_rows = 4096

    def __init__(
        self,
        estimator: Any,
        *,
        inputs: str | Sequence[str] = "x",
        target: str = "y",
        classes: Sequence[Any] | None = None,
        metrics: Mapping[str, Callable[..., Any] | str] | None = None,
        loss: Callable[[Any, Any], float] | None = None,
        weight: str | None = None,
    ) -> None:
        self.estimator = estimator
        self._kind = kind_of(estimator)
        keep_rows(estimator)
        self._inputs = [inputs] if isinstance(inputs, str) else list(inputs)
        self._target: str = target
        self._classes = None if classes is None else np.unique(np.asarray(classes))
        self._loss = loss
        self._metrics, self._scorers = _split_metrics(metrics)
        if self._kind in ("clusterer", "transformer") and (metrics or loss is not None):
            raise InputError(f"a {self._kind} has no target: leave out metrics and loss")
        if weight is not None:
            if not isinstance(weight, str):
                raise InputError(f"weight must be a column's name, not {weight!r}")
            check_weighting(estimator, "weight")
        self._weight = weight
        self.columns_spared = [] if weight is None else [weight]  # by evaluation

    def bind_info(self, info: Any) -> None:
        """Take the classes from the training data unless they were given."""
        if self._kind == "classifier" and self._classes is None:
            self._classes = _classes_of(info, self._target)

    # --- training and evaluation ----------------------------------------------

    @property
    def columns_read(self) -> list[str] | None:  # type: ignore[override]
        """The columns of `inputs`, `target` and `weight`; None for a subclass."""
        if type(self) is not Model:
            return None
        return [*self._inputs, self._target, *filter(None, [self._weight])]

    @property
    def metric_names(self) -> list[str]:
        """The metrics that may be missing on a training batch."""
        return [*self._metrics, *self._scorers]

    @property
    def inputs(self) -> list[str]:
        """The columns that the estimator reads."""
        return list(self._inputs)

    def train_batch(self, batch: Batch) -> dict[str, Any]:
        """Learn one batch and return its loss and metrics."""
        x, y = self._columns(batch)
        fitted = self._is_fitted()
        values = self._training_values(x, y) if fitted else None
        options: dict[str, Any] = {}
        if self._kind == "classifier" and not fitted:
            # With several labels per row, scikit-learn's classes are the labels' numbers.
            options["classes"] = np.arange(y.shape[1]) if y.ndim == 2 else self._known_classes()
        if self._weight is not None:
            check_batch(batch, self._weight, None)
            options["sample_weight"] = np.asarray(batch[self._weight]).reshape(-1)
        learn(self.estimator, x, *(() if y is None else (y,)), **options)
        return values if values is not None else self._training_values(x, y)

    def eval_batch(self, batch: Batch) -> dict[str, Any]:
        """Return loss and metrics of one batch."""
        means, parts = self._measure(batch)
        return {**means, **self._measure_whole(parts)} if parts else means

    @property
    def evaluates_whole(self) -> bool:
        """Whether validation needs :meth:`evaluate` rather than :meth:`eval_batch`."""
        return bool(self._metrics or self._scorers)

    def _measure(self, batch: Batch) -> tuple[dict[str, float], tuple[Any, ...]]:
        self._check_fitted()
        x, y = self._columns(batch)
        predicted = self.estimator.predict(x) if y is not None else None
        parts = (np.array(x), np.array(y), predicted) if self.evaluates_whole else ()
        return self._compute_means(x, y, predicted), parts

    def predict_batch(self, batch: Batch) -> Any:
        """Return predictions for a batch: classes, values, or a transformer's output."""
        self._check_fitted()
        x = self._features(batch)
        if self._kind == "transformer":
            return self.estimator.transform(x)
        return self.estimator.predict(x)

    def predict_probability(self, batch: Batch) -> Any:
        """Return the probability of each class, of shape (rows, classes)."""
        self._check_fitted()
        if not hasattr(self.estimator, "predict_proba"):
            raise InputError(f"{type(self.estimator).__name__} does not predict probabilities")
        return self.estimator.predict_proba(self._features(batch))

    def _training_values(self, x: Any, y: Any) -> dict[str, Any]:
        """Return a training batch's metrics, without those that cannot be computed on it."""
        predicted = self.estimator.predict(x) if y is not None else None
        values = self._compute_means(x, y, predicted)
        for name, compute in self._iterate_metrics(x, y, predicted):
            try:
                value = float(compute())
            except ValueError:  # most often, the batch lacks a class
                continue
            if not math.isnan(value):  # what some scorers return instead
                values[name] = value
        return values

    def _compute_means(self, x: Any, y: Any, predicted: Any) -> dict[str, float]:
        """Return the metrics that are means over rows."""
        own = self._loss
        loss = self._default_loss(x, y, predicted) if own is None else float(own(y, predicted))
        values = {"loss": loss}
        if self._kind == "classifier":
            right = predicted == y
            values["accuracy"] = float(np.mean(right.all(1) if right.ndim == 2 else right))
        return values

    def _measure_whole(self, parts: Sequence[Any]) -> dict[str, float]:
        x, y, predicted = parts
        values = {}
        for name, compute in self._iterate_metrics(x, y, predicted):
            try:
                values[name] = float(compute())
            except ValueError as error:
                raise InputError(
                    f"metric {name!r} cannot be computed on the {self._describe_rows(y)}: give "
                    f"other validation data, or leave the metric out ({error})"
                ) from error
        return values

    def _iterate_metrics(self, x: Any, y: Any, predicted: Any) -> Iterator[tuple[str, Any]]:
        """Yield the metrics that are not means over rows, as functions without arguments."""
        for name, metric in self._metrics.items():
            yield name, partial(metric, y, predicted)
        for name, scorer in self._scorers.items():
            yield name, partial(scorer, self.estimator, x, y)

    def _describe_rows(self, y: Any) -> str:
        """Return how many rows and classes a batch or a whole pass of validation has."""
        rows = f"{len(y)} rows given for validation"
        if self._kind != "classifier":
            return rows
        classes = steps_of(self.estimator)[-1][1].classes_
        return f"{rows}, which have {len(np.intersect1d(y, classes))} of the {len(classes)} classes"

    def _default_loss(self, x: Any, y: Any, predicted: Any) -> float:
        if self._kind == "clusterer":
            return -float(self.estimator.score(x)) / len(x)
        if self._kind == "transformer":
            rebuilt = self.estimator.inverse_transform(self.estimator.transform(x))
            return float(np.mean(np.square(x - rebuilt)))
        if self._kind == "regressor":
            return float(np.mean(np.square(np.asarray(predicted, np.float64) - y)))
        if hasattr(self.estimator, "predict_proba"):
            return _log_loss(self.estimator.predict_proba(x), y, self.estimator.classes_)
        return float(np.mean(predicted != y))

    # --- state ----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the fitted attributes as arrays (not copied) and JSON.

        The attributes of a pipeline are in ``steps``, by the steps' names.
        """
        if not self._is_pipeline():
            return _state_of(self.estimator)
        return {"steps": {name: _state_of(step) for name, step in steps_of(self.estimator)}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the fitted attributes of an estimator of the same class.

        Raises StateError for another class, or a pipeline with other steps.
        """
        states = state.get("steps", {}) if self._is_pipeline() else {"": state}
        steps = dict(steps_of(self.estimator))
        if states.keys() != steps.keys():
            raise StateError(
                f"the state has the steps {', '.join(states) or 'none'}, the pipeline "
                f"{', '.join(steps)}: {SAME_MODEL}"
            )
        for name, step in steps.items():
            _load(step, states[name])

    def load_clone(
        self,
        state: Mapping[str, Any],
        config: Mapping[str, Any],
        *,
        rebuild: Callable[[bool], Any] | None = None,
    ) -> None:
        """Continue from another trial's state with this trial's hyperparameters.

        Fitted attributes come from the parent, including the moments and the number of steps of a
        neural network's optimizer. The optimizer's settings (learning rate, momentum, ...) are
        those of the estimator that `build` made, and random generators are its own. If
        ``learning_rate="adaptive"`` has lowered the parent's learning rate, this trial's learning
        rate is lower by the same factor. If the parent has another ``solver``, the optimizer starts
        afresh.

        Raise StateError if the estimator has other sizes than the parent, which `rebuild` builds
        again: fitted attributes would keep the parent's.
        """
        steps = [step for _, step in steps_of(self.estimator)]
        if rebuild is not None:
            _check_sizes(steps, [step for _, step in steps_of(rebuild(False).estimator)])
        random_states = [getattr(step, "random_state", None) for step in steps]
        self.load_state_dict(state)
        for step, random_state in zip(steps, random_states, strict=True):
            if hasattr(step, "random_state"):
                step.random_state = random_state
            if hasattr(step, "_random_state"):
                step._random_state = check_random_state(random_state)
            if hasattr(step, "_optimizer"):
                _set_optimizer(step)

    def _is_pipeline(self) -> bool:
        return steps_of(self.estimator)[0][0] != ""

    def __repr__(self) -> str:
        return f"cerebro.sklearn.Model({self.estimator!r})"

    # --- data -----------------------------------------------------------------

    def _features(self, batch: Batch) -> Any:
        check_batch(batch, self._inputs, None)
        parts = [np.asarray(batch[name]) for name in self._inputs]
        parts = [part.reshape(len(part), -1) for part in parts]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def _columns(self, batch: Batch) -> tuple[Any, Any]:
        x = self._features(batch)
        if self._kind in ("clusterer", "transformer"):
            return x, None
        check_batch(batch, self._inputs, self._target)
        y = np.asarray(batch[self._target])
        return x, y.reshape(-1) if y.shape == (len(x), 1) else y

    def _known_classes(self) -> Any:
        if self._classes is None:
            raise InputError(
                f"a {type(self.estimator).__name__} must know all classes before it learns: give "
                "classes=, such as classes=range(10)"
            )
        return self._classes

    def _is_fitted(self) -> bool:
        return hasattr(steps_of(self.estimator)[-1][1], "n_features_in_")

    def _check_fitted(self) -> None:
        if not self._is_fitted():
            raise InputError(
                f"the {type(self.estimator).__name__} is not fitted yet: train it first"
            )


def _split_metrics(metrics: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    if metrics is None:
        return {}, {}
    if not isinstance(metrics, Mapping):
        raise InputError(f"metrics must be a mapping of names to functions, not {metrics!r}")
    functions, scorers = {}, {}
    for name, metric in metrics.items():
        if name == "loss":
            raise InputError("a metric is named 'loss', which is reserved for the loss")
        if isinstance(metric, str):
            try:
                scorers[name] = get_scorer(metric)
            except ValueError as error:
                raise InputError(f"metric {name!r}: {error}") from None
        elif callable(metric):
            functions[name] = metric
        else:
            raise InputError(f"metric {name!r} must be a function or a scorer's name")
    return functions, scorers


# Classes by (checksum of the data, column), cached because every build in a worker needs them.
_classes_seen: dict[tuple[str, str], Any] = {}


def _classes_of(info: Any, target: str) -> Any:
    """Return the classes of the training data's target; None if the target has no classes."""
    names = (info.classes or {}).get(target)
    if names is not None:
        return np.arange(len(names))
    data = info.data
    if data is None or not hasattr(data, "num_shards"):
        return None
    key = (f"{data.path}:{data.checksum}", target)
    if key not in _classes_seen:
        shards = [np.asarray(data.shard(index)[target]) for index in range(data.num_shards)]
        values = np.unique(np.concatenate([np.unique(shard) for shard in shards]))
        if values.dtype.kind == "f" and not np.array_equal(values, np.round(values)):
            raise InputError(
                f"the target {target!r} has fractions, so it is not a class: use a regressor"
            )
        _classes_seen[key] = values
    return _classes_seen[key]


def _log_loss(probabilities: Any, y: Any, classes: Any) -> float:
    """Return the mean of -log p(y), summed over the labels of a row; p of unknown classes is 0."""
    if y.ndim == 2:
        right = np.where(y != 0, probabilities, 1 - probabilities).astype(np.float64)
        return float(-np.mean(np.log(np.maximum(right, np.finfo(np.float64).eps)).sum(1)))
    columns = np.searchsorted(classes, y)
    columns = np.minimum(columns, len(classes) - 1)
    right = probabilities[np.arange(len(y)), columns].astype(np.float64)
    right = np.where(classes[columns] == y, right, 0.0)
    return float(-np.mean(np.log(np.maximum(right, np.finfo(np.float64).eps))))


def _state_of(estimator: Any) -> dict[str, Any]:
    parameters = set(estimator.get_params(deep=False))
    arrays = {
        name: value
        for name, value in vars(estimator).items()
        if _belongs_to_state(name, value, parameters)
    }
    aliases = _find_aliases(arrays)
    random_state = getattr(estimator, "random_state", None)
    return {
        "estimator": type(estimator).__name__,
        "aliases": aliases,
        "attributes": {
            name: _encode(value, name, None if name == "random_state" else random_state)
            for name, value in arrays.items()
            if name not in aliases
        },
    }


def _load(estimator: Any, state: Mapping[str, Any]) -> None:
    kind = type(estimator).__name__
    if state.get("estimator") != kind:
        raise StateError(
            f"the state is of a {state.get('estimator')}, but build made a {kind}: {SAME_MODEL}"
        )
    loaded, parameters = state["attributes"], set(estimator.get_params(deep=False))
    for name, value in list(vars(estimator).items()):
        if _belongs_to_state(name, value, parameters) and name not in loaded:
            delattr(estimator, name)
    if "random_state" in loaded:
        estimator.random_state = _decode(loaded["random_state"], None)
    random_state = getattr(estimator, "random_state", None)
    for name, value in loaded.items():
        if name != "random_state":
            setattr(estimator, name, _decode(value, random_state))
    for name, (source, shape) in state["aliases"].items():
        setattr(estimator, name, getattr(estimator, source).reshape(shape))
    if kind == "MiniBatchKMeans":
        estimator._n_threads = _openmp_effective_n_threads()


def _check_sizes(steps: Sequence[Any], of_parent: Sequence[Any]) -> None:
    for step, before in zip(steps, of_parent, strict=False):
        for name in ("hidden_layer_sizes", "n_clusters", "n_components"):
            sizes = [getattr(each, name, None) for each in (before, step)]
            if sizes[0] != sizes[1]:
                raise StateError(f"the configuration changes {name} from {sizes[0]} to {sizes[1]}")


def _set_optimizer(estimator: Any) -> None:
    """Give the optimizer of a neural network the settings of the estimator's parameters."""
    optimizer, solver = estimator._optimizer, estimator.solver
    if type(optimizer) is not _OPTIMIZERS.get(solver):
        del estimator._optimizer  # the next batch makes one, as the first batch does
        return
    before = dict(vars(optimizer))
    for name, parameter in _SETTINGS[solver].items():
        setattr(optimizer, name, getattr(estimator, parameter))
    if solver == "adam":
        return  # which computes its learning rate in every step
    rate = float(optimizer.learning_rate_init)
    if optimizer.lr_schedule == before["lr_schedule"] == "adaptive":
        rate = before["learning_rate"] * (rate / before["learning_rate_init"])
    optimizer.learning_rate = rate
    optimizer.iteration_ends(estimator.t_)  # "invscaling" computes its learning rate here


def _belongs_to_state(name: str, value: Any, parameters: set[str]) -> bool:
    if name == "random_state":
        return isinstance(value, np.random.RandomState)
    return name not in parameters and name not in _SKIPPED


def _find_aliases(attributes: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the attributes that are views of others, as name -> [base, shape]."""
    # In averaging linear models, ``coef_`` is a view of ``_average_coef``; copies would diverge.
    arrays = {
        name: value
        for name, value in sorted(attributes.items())
        if isinstance(value, np.ndarray) and value.size
    }
    aliases: dict[str, list[Any]] = {}
    for name, value in arrays.items():
        start = value.__array_interface__["data"]
        for source, other in arrays.items():
            same = source < name and source not in aliases and other.size == value.size
            if same and other.__array_interface__["data"] == start:
                aliases[name] = [source, list(value.shape)]
                break
    return aliases


def _encode(value: Any, name: str, own: Any) -> Any:
    """Return an attribute as arrays and JSON; `own` is the estimator's ``random_state``."""
    if value is None or isinstance(value, (bool, int, str)) or type(value) is float:
        return value
    dtype = value.dtype.kind if isinstance(value, (np.ndarray, np.generic)) else "none"
    if dtype in "biuf":
        return np.asarray(value, order="C")
    if dtype == "U":
        return {"kind": "strings", "values": value.tolist()}
    if dtype == "O" and value.ndim == 1 and all(type(item) is str for item in value):
        return {"kind": "string objects", "values": value.tolist()}  # such as names of columns
    if isinstance(value, (list, tuple)):
        items = [_encode(item, name, own) for item in value]
        return {"kind": type(value).__name__, "items": items}
    if value is _GLOBAL_GENERATOR:  # saved and restored with the trial's generators
        return {"kind": "global generator"}
    if isinstance(value, np.random.RandomState):
        if value is own:
            return {"kind": "own generator"}
        return {"kind": "RandomState", "state": value.get_state(legacy=False)}
    kind = type(value).__name__
    if _OBJECTS.get(kind) is type(value):
        attributes = {k: _encode(v, f"{name}.{k}", own) for k, v in vars(value).items()}
        return {"kind": kind, "attributes": attributes}
    raise StateError(f"the estimator's {name} is a {kind}, which is neither array nor JSON")


def _decode(value: Any, own: Any) -> Any:
    """Decode a value from :func:`_encode`; arrays are copied."""
    if hasattr(value, "__array__"):
        array = np.array(value, order="C")
        return array[()] if array.ndim == 0 else array
    if not isinstance(value, Mapping):
        return value
    kind = value["kind"]
    if kind == "strings":
        return np.array(value["values"])
    if kind == "string objects":
        return string_objects(value["values"])
    if kind in ("list", "tuple"):
        items = [_decode(item, own) for item in value["items"]]
        return items if kind == "list" else tuple(items)
    if kind == "global generator":
        return _GLOBAL_GENERATOR
    if kind == "own generator":
        return own
    if kind == "RandomState":
        generator = np.random.RandomState()
        generator.set_state(value["state"])
        return generator
    instance = _OBJECTS[kind].__new__(_OBJECTS[kind])
    for name, item in value["attributes"].items():
        setattr(instance, name, _decode(item, own))
    return instance
