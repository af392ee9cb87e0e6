"""Estimators that learn batch by batch: alone, or as the steps of a pipeline.

A pipeline learns in one pass. Each batch goes through its steps in order: a transformer first
learns from the batch (`partial_fit`), then transforms it for the next step; the last step learns
from the result.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import numpy as np
from sklearn.pipeline import Pipeline

from cerebro.arguments import list_words
from cerebro.errors import InputError

#: Estimators whose state survives a hop bit for bit, and their kinds.
SUPPORTED = list_words(
    {
        "classifier": "SGDClassifier Perceptron PassiveAggressiveClassifier MLPClassifier "
        "GaussianNB MultinomialNB ComplementNB BernoulliNB CategoricalNB",
        "regressor": "SGDRegressor PassiveAggressiveRegressor MLPRegressor",
        "clusterer": "MiniBatchKMeans",
        "transformer": "IncrementalPCA",
    }
)

#: Steps of a pipeline before the last one.
TRANSFORMERS = ("StandardScaler", "MinMaxScaler", "MaxAbsScaler", "IncrementalPCA")

KEPT_IN_VAIN = ("_best_coefs", "_best_intercepts")
"""Attributes with weights for early stopping: unused by `partial_fit` and left out of states."""

STATELESS = ("Normalizer", "Binarizer")  # transformers that learn nothing

COUNTING = ("MultinomialNB", "ComplementNB", "BernoulliNB", "CategoricalNB")
"""Estimators that count rows, in each epoch again, so that several epochs make `alpha` smaller."""

# For steps that cannot learn batch by batch: replacements that can.
_INSTEAD = list_words(
    {
        "IncrementalPCA": "PCA TruncatedSVD",
        "MiniBatchKMeans": "KMeans",
        "StandardScaler": "RobustScaler PowerTransformer QuantileTransformer",
        "SGDClassifier(loss='log_loss')": "LogisticRegression LogisticRegressionCV",
        "SGDClassifier": "SVC LinearSVC RidgeClassifier",
        "SGDRegressor": "LinearRegression Ridge SVR LinearSVR",
        "SGDRegressor(penalty='l1')": "Lasso",
        "SGDRegressor(penalty='elasticnet')": "ElasticNet",
    }
)


def steps_of(estimator: Any) -> list[tuple[str, Any]]:
    """Return a pipeline's named steps without no-op steps; for other estimators, one step."""
    if not isinstance(estimator, Pipeline):
        return [("", estimator)]
    return [(name, step) for name, step in estimator.steps if step not in (None, "passthrough")]


def kind_of(estimator: Any, *, whole: bool = False) -> str:
    """Return an estimator's kind; raise InputError if it, or a pipeline's step, is unsupported.

    If the caller has the `whole` data, the steps before the last one and the balance of classes
    need not be learned by batch.
    """
    if not isinstance(estimator, Pipeline):
        return _check_kind(estimator, "", whole=whole)
    *transformers, (last, final) = steps_of(estimator) or [("", None)]
    for name, step in transformers:
        if not learns_by_batch(step) and not (whole and hasattr(step, "transform")):
            raise InputError(
                _explain_unable(step, _name_step(name))
                if not hasattr(step, "partial_fit")
                else f"{_name_step(name)}{type(step).__name__} is not supported before the last "
                f"step of a pipeline. Supported are {', '.join((*TRANSFORMERS, *STATELESS))}"
            )
    return _check_kind(final, _name_step(last), whole=whole)


def learns_by_batch(step: Any) -> bool:
    """Return whether a step before a pipeline's last one learns by batch, or learns nothing."""
    return _is_of_sklearn(step) and type(step).__name__ in (*TRANSFORMERS, *STATELESS)


def _check_kind(estimator: Any, step: str, *, whole: bool) -> str:
    name = type(estimator).__name__
    if not _is_of_sklearn(estimator) or name not in SUPPORTED:
        if not hasattr(estimator, "partial_fit"):
            raise InputError(_explain_unable(estimator, step))
        raise InputError(
            f"{step}{name} is not supported: Cerebro does not know how to store its state as "
            f"arrays and JSON. Supported are {', '.join(SUPPORTED)}; for others write the four "
            "methods of the model protocol"
        )
    if not hasattr(estimator, "partial_fit"):  # scikit-learn hides it for these solvers
        raise InputError(
            f"{step}{name} has no partial_fit with solver={estimator.solver!r}, so it cannot learn "
            "batch by batch: give solver='adam' or 'sgd', or use scikit-learn's GridSearchCV"
        )
    if getattr(estimator, "early_stopping", False):
        raise InputError(
            f"{step}early_stopping=True does not work with partial_fit: leave it out, "
            "and give the search stop=cerebro.EarlyStopping(...)"
        )
    if not whole and getattr(estimator, "class_weight", None) == "balanced":
        raise InputError(
            f"{step}class_weight='balanced' does not work with partial_fit, which does not see all "
            "rows: give a dict of weights, as sklearn.utils.class_weight.compute_class_weight("
            "'balanced', ...) computes them; or draw all classes equally often, with "
            "with_sampling(balance=...) on the training data"
        )
    return SUPPORTED[name]


def _name_step(name: str) -> str:
    return f"step {name!r} of the pipeline: "


def _explain_unable(estimator: Any, step: str) -> str:
    name = type(estimator).__name__
    instead = f"{_INSTEAD[name]} or " if name in _INSTEAD else ""
    return (
        f"{step}{name} has no partial_fit, so it cannot learn batch by batch: use {instead}"
        "scikit-learn's GridSearchCV"
    )


def _is_of_sklearn(estimator: Any) -> bool:
    return type(estimator).__module__.partition(".")[0] == "sklearn"


def keep_rows(estimator: Any) -> None:
    """Let no step overwrite the rows that it gets (``copy=False``): they are used again."""
    named = estimator.get_params().items()
    names = [n for n, value in named if n.rpartition("__")[2] == "copy" and value is False]
    estimator.set_params(**dict.fromkeys(names, True))


def learn(estimator: Any, x: Any, *arguments: Any, **options: Any) -> None:
    """Call `partial_fit` of an estimator, or of each step of a pipeline in order."""
    *transformers, (_, final) = steps_of(estimator)  # which takes `arguments` and `options`
    for _, step in transformers:
        if type(step).__name__ not in STATELESS:
            step.partial_fit(x)
            _settle_attributes(step)
        elif hasattr(x, "columns") and not hasattr(step, "n_features_in_"):
            step.fit(x)  # learns the names of columns, without which it warns of them
            _settle_attributes(step)
        x = step.transform(x)
    try:
        final.partial_fit(x, *arguments, **options)
    except ValueError as error:
        if np.any(options.get("sample_weight", 1)):
            raise
        raise InputError(
            f"{type(final).__name__}.partial_fit takes no batch whose weights are all 0: leave out "
            "rows of weight 0, or choose a larger batch_size"
        ) from error
    _settle_attributes(final)


def _settle_attributes(estimator: Any) -> None:
    """Convert the fitted attributes to the form that they have after a hop."""
    curve = getattr(estimator, "loss_curve_", None)
    if curve is not None:
        del curve[:-1]  # grows with every batch, but only its end is read
    for name in KEPT_IN_VAIN:
        vars(estimator).pop(name, None)
    if "feature_names_in_" in vars(estimator):
        estimator.feature_names_in_ = string_objects(estimator.feature_names_in_)
    if type(estimator).__name__ == "IncrementalPCA":
        # A strided view: later products would have different bits than with a contiguous copy.
        estimator.components_ = np.ascontiguousarray(estimator.components_)


def string_objects(strings: Any) -> Any:
    """Return strings as an array of objects, as pandas and scikit-learn store names of columns."""
    # The hop check compares the bytes of arrays, here addresses: equal strings must be one object.
    return np.array([sys.intern(str(item)) for item in strings], dtype=object)


def check_weighting(estimator: Any, argument: str) -> None:
    """Raise InputError if `partial_fit` of an estimator's last step takes no ``sample_weight``."""
    final = steps_of(estimator)[-1][1]
    if "sample_weight" not in inspect.signature(final.partial_fit).parameters:
        name = type(final).__name__
        raise InputError(f"{name}.partial_fit takes no sample_weight: leave out {argument}")
