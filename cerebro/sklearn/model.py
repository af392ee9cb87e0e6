"""Models in scikit-learn: estimators that learn batch by batch (`partial_fit`).

:class:`Model` lets these estimators hop. The state consists of the fitted attributes, as arrays
and JSON, never a pickle. So only estimators whose fitted attributes are all known here are
supported; others are rejected by name.

`SearchCV` is a whole search, with folds, as a scikit-learn estimator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from sklearn.metrics import get_scorer
from sklearn.neural_network import _stochastic_optimizers
from sklearn.preprocessing import LabelBinarizer
from sklearn.utils._openmp_helpers import _openmp_effective_n_threads

from cerebro.errors import InputError, StateError
from cerebro.model import BaseModel, Batch, check_batch

#: Estimators whose state survives a hop bit for bit, and their kinds.
SUPPORTED = {
    "SGDClassifier": "classifier",
    "Perceptron": "classifier",
    "PassiveAggressiveClassifier": "classifier",
    "MLPClassifier": "classifier",
    "GaussianNB": "classifier",
    "MultinomialNB": "classifier",
    "ComplementNB": "classifier",
    "BernoulliNB": "classifier",
    "CategoricalNB": "classifier",
    "SGDRegressor": "regressor",
    "PassiveAggressiveRegressor": "regressor",
    "MLPRegressor": "regressor",
    "MiniBatchKMeans": "clusterer",
    "IncrementalPCA": "transformer",
}

# Weights for early stopping, which partial_fit does not use: dropped.
_KEPT_IN_VAIN = ("_best_coefs", "_best_intercepts")

# Fitted attributes that no later training or prediction reads.
_SKIPPED = {
    *_KEPT_IN_VAIN,
    "_loss_function_",  # created by every call of partial_fit
    "labels_",  # of the last batch
    "_n_threads",  # of this machine
}

_OBJECTS = {
    "AdamOptimizer": _stochastic_optimizers.AdamOptimizer,
    "SGDOptimizer": _stochastic_optimizers.SGDOptimizer,
    "LabelBinarizer": LabelBinarizer,
}

_GLOBAL_GENERATOR = np.random.mtrand._rand


class Model(BaseModel):
    """A scikit-learn estimator that learns by `partial_fit`.

    Parameters
    ----------
    estimator
        An estimator of one of the classes in :data:`SUPPORTED`, not fitted yet.
    inputs
        A column, or a list of columns that are put side by side; rows of more
        than one dimension are flattened.
    target
        The column to predict; not used by clusterers and transformers.
    classes
        All classes of the target. None: the data's classes, or else all values
        that the training data's target has.
    metrics
        By name, a function ``metric(y_true, y_pred)`` as in `sklearn.metrics`, or
        the name of a scorer ("roc_auc"). In validation they are computed once on
        all rows, in training batch by batch.
    loss
        ``loss(y_true, y_pred)``, a mean over rows. None: the log loss where the
        estimator gives probabilities, otherwise the share of wrong predictions;
        the mean squared error for regressors, the mean squared distance to the
        nearest center for clusterers, to the reconstruction for transformers.

    Attributes
    ----------
    estimator
        The estimator.

    Notes
    -----
    Losses of training batches are those before the batch is learned, except for
    the very first batch. Classifiers also have the metric ``accuracy``.

    Raises
    ------
    InputError
        If the estimator is not one whose state is known, or an argument is of no use.
    """

    framework = "numpy"
    cpu_only = True
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
    ) -> None:
        self.estimator = estimator
        self._kind = kind_of(estimator)
        self._inputs = [inputs] if isinstance(inputs, str) else list(inputs)
        self._target: str = target
        self._classes = None if classes is None else np.unique(np.asarray(classes))
        self._loss = loss
        self._metrics, self._scorers = _split_metrics(metrics)
        if self._kind in ("clusterer", "transformer") and (metrics or loss is not None):
            raise InputError(f"a {self._kind} has no target: leave out metrics and loss")
        self._parameters = set(estimator.get_params(deep=False))

    def bind_info(self, info: Any) -> None:
        """Take the classes from the training data unless they were given."""
        if self._kind == "classifier" and self._classes is None:
            self._classes = _classes_of(info, self._target)

    # --- training and evaluation ----------------------------------------------

    def train_batch(self, batch: Batch) -> dict[str, Any]:
        """Learn one batch and return its loss and metrics."""
        x, y = self._columns(batch)
        fitted = self._is_fitted()
        values = self._values(x, y) if fitted else None
        if self._kind == "classifier" and not fitted:
            self.estimator.partial_fit(x, y, classes=self._known_classes())
        elif y is None:
            self.estimator.partial_fit(x)
        else:
            self.estimator.partial_fit(x, y)
        self._settle()
        return values if values is not None else self._values(x, y)

    def _settle(self) -> None:
        """Bring the fitted attributes into the form that they have after a hop."""
        curve = getattr(self.estimator, "loss_curve_", None)
        if curve is not None:
            del curve[:-1]  # grows with every batch; only its end is read
        for name in _KEPT_IN_VAIN:
            vars(self.estimator).pop(name, None)
        if self._kind == "transformer":
            # A strided view, with which later products would have other bits than with a copy.
            self.estimator.components_ = np.ascontiguousarray(self.estimator.components_)

    def eval_batch(self, batch: Batch) -> dict[str, Any]:
        """Return loss and metrics of one batch."""
        self._check_fitted()
        return self._values(*self._columns(batch))

    @property
    def evaluates_whole(self) -> bool:
        """Whether validation needs :meth:`evaluate` rather than :meth:`eval_batch`."""
        return bool(self._metrics or self._scorers)

    def _measure(self, batch: Batch) -> tuple[dict[str, float], tuple[Any, ...]]:
        self._check_fitted()
        x, y = self._columns(batch)
        predicted = self.estimator.predict(x) if y is not None else None
        parts = (np.array(x), np.array(y), predicted) if self.evaluates_whole else ()
        return self._means(x, y, predicted), parts

    def predict_batch(self, batch: Batch) -> Any:
        """Return predictions for a batch: classes, values, or a transformer's output."""
        self._check_fitted()
        x = self._features(batch)
        if self._kind == "transformer":
            return self.estimator.transform(x)
        return self.estimator.predict(x)

    def _values(self, x: Any, y: Any) -> dict[str, Any]:
        predicted = self.estimator.predict(x) if y is not None else None
        return {**self._means(x, y, predicted), **self._whole((x, y, predicted))}

    def _means(self, x: Any, y: Any, predicted: Any) -> dict[str, float]:
        """Return the metrics that are means over rows."""
        if self._loss is not None:
            values = {"loss": float(self._loss(y, predicted))}
        else:
            values = {"loss": self._default_loss(x, y, predicted)}
        if self._kind == "classifier":
            values["accuracy"] = float(np.mean(predicted == y))
        return values

    def _whole(self, parts: Sequence[Any]) -> dict[str, float]:
        x, y, predicted = parts
        values = {name: float(metric(y, predicted)) for name, metric in self._metrics.items()}
        for name, scorer in self._scorers.items():
            values[name] = float(scorer(self.estimator, x, y))
        return values

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
        """Return the fitted attributes as arrays (not copied) and JSON."""
        arrays = {
            name: value
            for name, value in vars(self.estimator).items()
            if self._belongs(name, value)
        }
        aliases = _aliases(arrays)
        own = getattr(self.estimator, "random_state", None)
        return {
            "estimator": type(self.estimator).__name__,
            "aliases": aliases,
            "attributes": {
                name: _encoded(value, name, None if name == "random_state" else own)
                for name, value in arrays.items()
                if name not in aliases
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the fitted attributes of an estimator of the same class.

        Raises
        ------
        StateError
            If the state is from an estimator of a different class.
        """
        kind = type(self.estimator).__name__
        if state.get("estimator") != kind:
            raise StateError(
                f"the state is of a {state.get('estimator')}, but build made a {kind}: build must "
                "make the same model from the same configuration"
            )
        loaded, estimator = state["attributes"], self.estimator
        for name, value in list(vars(estimator).items()):
            if self._belongs(name, value) and name not in loaded:
                delattr(estimator, name)
        if "random_state" in loaded:
            estimator.random_state = _decoded(loaded["random_state"], None)
        own = getattr(estimator, "random_state", None)
        for name, value in loaded.items():
            if name != "random_state":
                setattr(estimator, name, _decoded(value, own))
        for name, (source, shape) in state["aliases"].items():
            setattr(estimator, name, getattr(estimator, source).reshape(shape))
        if kind == "MiniBatchKMeans":
            estimator._n_threads = _openmp_effective_n_threads()

    def _belongs(self, name: str, value: Any) -> bool:
        """Return whether an attribute is part of the state."""
        if name == "random_state":
            return isinstance(value, np.random.RandomState)
        return name not in self._parameters and name not in _SKIPPED

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
        return hasattr(self.estimator, "n_features_in_")

    def _check_fitted(self) -> None:
        if not self._is_fitted():
            raise InputError(f"the {type(self.estimator).__name__} has not learned anything yet")


def kind_of(estimator: Any) -> str:
    """Return a supported estimator's kind, as in `SUPPORTED`; raise InputError for others."""
    kind = type(estimator)
    if kind.__module__.partition(".")[0] != "sklearn" or kind.__name__ not in SUPPORTED:
        if not hasattr(estimator, "partial_fit"):
            scaled = (
                "; for a pipeline give its last estimator, and scale the columns before, as with "
                "data.with_transforms"
                if hasattr(estimator, "steps")
                else ""
            )
            raise InputError(
                f"{kind.__name__} has no partial_fit, so it cannot learn batch by batch: use "
                f"scikit-learn's GridSearchCV{scaled}"
            )
        raise InputError(
            f"{kind.__name__} is not supported: its state is not known to survive as arrays and "
            f"JSON. Supported are {', '.join(SUPPORTED)}; for others write the four methods of "
            "the model protocol"
        )
    if getattr(estimator, "early_stopping", False):
        raise InputError(
            "early_stopping=True does not work with partial_fit: use cerebro.search(..., stop=)"
        )
    return SUPPORTED[kind.__name__]


def _split_metrics(metrics: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    if metrics is None:
        return {}, {}
    if not isinstance(metrics, Mapping):
        raise InputError(f"metrics must be a mapping of names to functions, not {metrics!r}")
    functions, scorers = {}, {}
    for name, metric in metrics.items():
        if name == "loss":
            raise InputError("a metric is called 'loss', which is the loss's name")
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


# Classes by (checksum of the data, column): every build in a worker asks again.
_classes_seen: dict[tuple[str, str], Any] = {}


def _classes_of(info: Any, target: str) -> Any:
    """Return the classes of the training data's target, None if it has none."""
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
                f"the target {target!r} has fractions, so it names no classes: use a regressor"
            )
        _classes_seen[key] = values
    return _classes_seen[key]


def _log_loss(probabilities: Any, y: Any, classes: Any) -> float:
    """Return the mean of -log p(y); rows of classes that were never named count as p = 0."""
    columns = np.searchsorted(classes, y)
    columns = np.minimum(columns, len(classes) - 1)
    right = probabilities[np.arange(len(y)), columns].astype(np.float64)
    right = np.where(classes[columns] == y, right, 0.0)
    return float(-np.mean(np.log(np.maximum(right, np.finfo(np.float64).eps))))


def _aliases(attributes: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the arrays that are views of other arrays: name -> [base, shape].

    Averaging linear models have ``coef_`` as a view of ``_average_coef``; two
    copies of it would drift apart.
    """
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


def _encoded(value: Any, name: str, own: Any) -> Any:
    """Return an attribute as arrays and JSON; NumPy scalars become arrays without dimensions.

    `own` is the estimator's ``random_state``, which attributes may share.
    """
    if value is None or isinstance(value, (bool, int, str)) or type(value) is float:
        return value
    if isinstance(value, np.generic):
        return np.asarray(value)
    if isinstance(value, np.ndarray) and value.dtype.kind == "U":
        return {"kind": "strings", "values": value.tolist()}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return np.asarray(value, order="C")
    if isinstance(value, (list, tuple)):
        items = [_encoded(item, name, own) for item in value]
        return {"kind": type(value).__name__, "items": items}
    if isinstance(value, np.random.RandomState):
        return _encoded_generator(value, own)
    kind = type(value).__name__
    if _OBJECTS.get(kind) is type(value):
        attributes = {k: _encoded(v, f"{name}.{k}", own) for k, v in vars(value).items()}
        return {"kind": kind, "attributes": attributes}
    raise StateError(f"the estimator's {name} is a {kind}, which is neither array nor JSON")


def _encoded_generator(generator: Any, own: Any) -> dict[str, Any]:
    if generator is _GLOBAL_GENERATOR:  # saved and restored with the trial's generators
        return {"kind": "global generator"}
    if generator is own:
        return {"kind": "own generator"}
    _, key, position, has_gauss, gauss = generator.get_state()
    return {
        "kind": "RandomState",
        "key": key,
        "position": int(position),
        "gauss": float(gauss) if has_gauss else None,
    }


def _decoded(value: Any, own: Any) -> Any:
    """Decode a value from :func:`_encoded`; arrays are copied."""
    if hasattr(value, "__array__"):
        array = np.array(value, order="C")
        return array[()] if array.ndim == 0 else array
    if not isinstance(value, Mapping):
        return value
    kind = value["kind"]
    if kind == "strings":
        return np.array(value["values"])
    if kind in ("list", "tuple"):
        items = [_decoded(item, own) for item in value["items"]]
        return items if kind == "list" else tuple(items)
    if kind == "global generator":
        return _GLOBAL_GENERATOR
    if kind == "own generator":
        return own
    if kind == "RandomState":
        generator = np.random.RandomState()
        gauss = value["gauss"]
        key = np.array(value["key"])
        generator.set_state(("MT19937", key, value["position"], int(gauss is not None), gauss or 0))
        return generator
    made = _OBJECTS[kind].__new__(_OBJECTS[kind])
    for name, item in value["attributes"].items():
        setattr(made, name, _decoded(item, own))
    return made
