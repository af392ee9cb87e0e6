"""`cerebro.sklearn.SearchCV`: a search that follows scikit-learn's conventions.

`SearchCV` is a `GridSearchCV` for estimators that learn by batch (``partial_fit``), with the same
folds and the same fitted attributes. It runs `cerebro.search` with folds, over shards in a
folder.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from scipy.sparse import issparse
from sklearn.base import BaseEstimator, MetaEstimatorMixin, is_classifier
from sklearn.metrics import check_scoring
from sklearn.model_selection import check_cv
from sklearn.utils import get_tags
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_feature_names,
    _check_n_features,
    _check_sample_weight,
    _num_samples,
    check_consistent_length,
    check_is_fitted,
    check_random_state,
    check_X_y,
    validate_data,
)

from cerebro._core import trial_seed
from cerebro.api.search import search
from cerebro.arguments import SEARCH, explain_keywords, list_words
from cerebro.data import Dataset, shard
from cerebro.data.dtypes import is_number, not_a_number_error
from cerebro.data.validation import KFold
from cerebro.errors import InputError
from cerebro.integrations.sklearn.candidates import (
    SCORE,
    BuildEstimator,
    as_choices,
    balance_classes,
    check_choices,
    conclude,
    configure_estimator,
    find_learning_estimator,
    has_head,
)
from cerebro.integrations.sklearn.heads import (
    Heads,
    as_numbers,
    fit_head,
    split_pipeline,
    take_rows,
)
from cerebro.integrations.sklearn.steps import check_weighting, kind_of, learn, steps_of
from cerebro.machine import generators
from cerebro.machine.guard import refuse
from cerebro.searchers import RandomSearch
from cerebro.space import Space

WEIGHT = "sample_weight"
ROWS_PER_SHARD = 10_000
MAX_SHARDS = 8

_SHARED = ("workers", "progress", "n_trials", "run")

WORDS = {
    **{other: word for other, word in SEARCH.items() if word in _SHARED},
    **list_words(
        {
            "n_trials": "n_candidates",
            "random_state": "seed random_seed",
            "space": "param_grid param_distributions search_spaces search_space params parameters "
            "grid param_space",
            "epochs": "max_epochs num_epochs n_epochs max_iter max_iters",
            "cv": "folds n_splits kfold validation validation_split",
            "scoring": "metric score scorer metrics",
            "estimator": "model build clf pipeline",
            "searcher": "sampler search_optimization algorithm method strategy",
            "stop": "early_stopping patience",
            "leave it out: the score of a configuration that fails is NaN": "error_score",
            "leave it out: scores are of validation rows only; with run=, result_ has the losses "
            "in training": "return_train_score",
            "leave it out: workers take units as they are free": "pre_dispatch",
            "give searcher=cerebro.SuccessiveHalving(...), whose resource is epochs": "factor "
            "resource min_resources max_resources aggressive_elimination",
            "leave it out: scikit-learn's estimators train on the CPU": "devices device gpus "
            "accelerator use_gpu",
            "fit() takes it": "X y groups fit_params sample_weight data",
        }
    ),
}


class KnownFolds:
    """A splitter with predetermined row numbers."""

    def __init__(self, pairs: list[tuple[Any, Any]], name: str) -> None:
        self._pairs, self._name = pairs, name

    def get_n_splits(self) -> int:
        return len(self._pairs)

    def split(self, *_: Any) -> Iterator[tuple[Any, Any]]:
        return iter(self._pairs)

    def __repr__(self) -> str:
        return self._name


Method = TypeVar("Method", bound=Callable[..., Any])


def _if_best_has(name: str) -> Callable[[Method], Method]:
    """Return a decorator: the method exists if the best estimator has the method `name`."""

    def check(self: Any) -> bool:
        self._check_refit()
        # Before `fit`, the given estimator decides.
        getattr(getattr(self, "best_estimator_", self.estimator), name)
        return True

    decorate: Callable[[Method], Method] = available_if(check)
    return decorate


class SearchCV(MetaEstimatorMixin, BaseEstimator):  # type: ignore[misc]
    """Search over the parameters of an estimator with `partial_fit`, by cross-validation.

    It is like scikit-learn's `GridSearchCV`, but for estimators that learn in passes over batches.
    Every configuration trains for `epochs` passes in every fold, models hop between workers, and
    all folds share one copy of the data. Then the best configuration is trained on all rows.

    Parameters
    ----------
    estimator
        One of `cerebro.sklearn.SUPPORTED` that is a classifier or a regressor, or a pipeline that
        ends with one. If a step before the last one cannot learn by batch (`ColumnTransformer`,
        `PCA`, ...), all of them are fitted on each fold's training rows, once for each setting of
        their parameters. ``class_weight="balanced"`` counts all training rows of a fold.
    space
        A mapping of the estimator's parameters to their values. Lists, tuples, ranges and arrays
        are choices, as in scikit-learn, also of estimators; `cerebro.loguniform(...)`, SciPy's
        distributions and similar are as in `cerebro.search`. A choice may be a tuple
        (``hidden_layer_sizes``) or a mapping (``class_weight``). ``batch_size`` may be one of the
        names.
    epochs
        Passes over the data per configuration, at most.
    n_trials
        The number of configurations, for searchers that have no limit of their own. Random search
        over lists tries each combination at most once, and warns if there are fewer combinations
        than `n_trials`.
    searcher
        ``"grid"``, ``"random"``, ``"hyperband"``, ..., as for `cerebro.search`; default: random
        search, or the whole grid if the space has lists only and `n_trials` is not given.
    cv
        As for scikit-learn's `check_cv`: a number of folds (stratified for classifiers), a
        splitter, or an iterable of pairs of row numbers or boolean masks.
    scoring
        None (the estimator's ``score``), the name of a scorer, or ``scorer(estimator, X, y)``.
    batch_size
        Rows per batch, unless the space has it.
    shuffle, workers, progress
        As for `cerebro.search`.
    stop
        A `cerebro.EarlyStopping` rule, applied to the mean over folds.
    refit
        Whether to train the best configuration on all rows, for its best number of epochs; or a
        function that takes `cv_results_` and returns the index of the configuration to train.
    shards
        The number of shards of the data; default: one for every 10,000 rows, at most 8.
    path
        A folder for the data, which must not exist; default: a temporary one, removed after `fit`.
    run
        A folder for the run, which is kept; default: a temporary one, removed after `fit`. After
        Ctrl-C, `cerebro.open` shows the trials so far; `fit` cannot resume them.
    random_state
        An int, a ``RandomState``, or None for a different seed each time.

    Attributes
    ----------
    best_estimator_
        The best estimator, trained on all rows, if `refit`.
    best_index_, best_params_, best_score_, best_epochs_
        The best configuration, its mean score over the folds, and the epochs after which it had
        that score.
    cv_results_
        Arrays, one value per configuration: ``params``, ``param_*``, ``split0_test_score`` ...,
        ``mean_test_score``, ``std_test_score``, ``rank_test_score``, ``epochs`` (trained at the
        time of the scores), ``mean_fit_time``, ``mean_score_time`` (seconds) and their ``std_*``.
    n_splits_, refit_time_, scorer_, n_features_in_, feature_names_in_, classes_, multimetric_
        As in scikit-learn.
    result_
        The run, a `cerebro.Result`, if `run` was given.

    Raises
    ------
    InputError
        In `fit`, if arguments, data or folds are invalid. It is a subclass of ``ValueError``.
    RunError
        In `fit`, if every configuration failed.

    Notes
    -----
    The result depends on the data, the arguments and `random_state`, not on the number of workers.
    The scores are those of the epoch with the best mean score.
    """

    @explain_keywords(WORDS, name="SearchCV")
    def __init__(
        self,
        estimator: Any,
        space: Any,
        *,
        epochs: int = 10,
        n_trials: int | None = None,
        searcher: Any = None,
        cv: Any = 5,
        scoring: Any = None,
        batch_size: int | None = 64,
        shuffle: Any = None,
        stop: Any = None,
        refit: bool | Callable[[Mapping[str, Any]], int] = True,
        shards: int | None = None,
        path: Any = None,
        run: Any = None,
        workers: int | None = None,
        random_state: Any = 0,
        progress: Any = False,
    ) -> None:
        self.estimator, self.space, self.searcher = estimator, space, searcher
        self.epochs, self.n_trials, self.stop, self.refit = epochs, n_trials, stop, refit
        self.cv, self.scoring, self.batch_size, self.shuffle = cv, scoring, batch_size, shuffle
        self.shards, self.path, self.run = shards, path, run
        self.workers, self.random_state, self.progress = workers, random_state, progress

    def fit(self, X: Any, y: Any, groups: Any = None, **fit_params: Any) -> SearchCV:
        """Search, and train the best configuration on all rows.

        Parameters
        ----------
        X
            Rows of numbers, dense or sparse, of shape ``(rows, features)``; anything that the first
            step of a pipeline takes, if its steps are fitted on all training rows of a fold.
        y
            The target: classes of any kind, or numbers.
        groups
            The group of each row, for splitters that keep groups together.
        **fit_params
            ``sample_weight``, or in a pipeline also ``<last step>__sample_weight``, the weight of
            each row: passed to the estimator's ``partial_fit`` (in a pipeline, to that of the last
            step) and, as in `GridSearchCV`, to scorers that take it.
        """
        refuse(f"{type(self).__name__}.fit")
        space, originals = as_choices(self.space)
        learning = find_learning_estimator(self.estimator, space, originals)
        by_row = issparse(X) or has_head(self.estimator, originals)
        columns = self._columns(X, y, fit_params, learning, by_row)
        check_choices(learning, space, originals)
        self.scorer_ = check_scoring(self.estimator, scoring=self.scoring)
        self.multimetric_ = False
        seed = _seed_of(self.random_state)
        order = np.random.RandomState(seed).permutation(len(columns["x"]))
        pairs, splitter = self._folds(X, len(order), y, groups)
        labels = getattr(self, "classes_", None)
        weight = "w" if "w" in columns else None
        place = np.argsort(order)  # where each row is stored
        target = columns["y"] if labels is None else labels[columns["y"]]
        with tempfile.TemporaryDirectory(prefix="cerebro-search-") as temporary:
            train = [rows for rows, _ in pairs]
            heads = Heads(Path(temporary, "heads"), X, target, train, seed) if by_row else None
            build = BuildEstimator(
                self.estimator,
                self.scorer_,
                labels,
                weight,
                originals,
                [] if labels is None else [_balance(target[rows]) for rows in [*train, ...]],
                heads,
                keeps_run=self.run is not None,
            )
            data = shard(
                {name: column[order] for name, column in columns.items()},
                Path(temporary, "data") if self.path is None else self.path,
                shards=self.shards or max(1, min(MAX_SHARDS, len(order) // ROWS_PER_SHARD)),
                shuffle=False,
                progress=False,
            )
            result = search(
                build,
                space,
                data,
                epochs=self.epochs,
                n_trials=self._trials_of(space),
                validation=KFold(KnownFolds([(place[a], place[b]) for a, b in pairs], splitter)),
                searcher=self._searcher_of(space),
                metric=SCORE,
                mode="max",
                batch_size=None if "batch_size" in space.sample(0, 0) else self.batch_size,
                shuffle=self.shuffle,
                stop=self.stop,
                workers=self.workers,
                devices="cpu",
                seed=seed,
                keep="last",
                run=Path(temporary, "run") if self.run is None else self.run,
                progress=self.progress,
            )
            self.__dict__.update(conclude(result, originals, self.refit))
            if self.refit:
                config = result.trials[self.best_index_].config
                self._refit(build, data, seed, config, X if by_row else None, target)
        if self.run is not None:
            self.result_ = result
        return self

    def _columns(
        self, X: Any, y: Any, fit_params: dict[str, Any], learning: Any, by_row: bool
    ) -> dict[str, Any]:
        """Check all arguments and return the rows as columns; `learning` learns by batch.

        If rows go through a pipeline's head first, the column "x" has their numbers.
        """
        last = steps_of(self.estimator)[-1][0]
        weight = f"{last}__sample_weight" if f"{last}__sample_weight" in fit_params else WEIGHT
        sample_weight = fit_params.pop(weight, None)
        if fit_params:
            raise InputError(
                f"SearchCV.fit takes X, y, groups and sample_weight, not "
                f"{', '.join(sorted(fit_params))}: scikit-learn's other metadata are not "
                "supported. Use cerebro.search with your own model, or GridSearchCV"
            )
        if kind_of(learning, whole=True) not in ("classifier", "regressor"):
            raise InputError(
                f"SearchCV takes classifiers and regressors, not {type(self.estimator).__name__}: "
                "use cerebro.search with cerebro.sklearn.Model"
            )
        x, target = self._validate_rows(X, y, by_row)
        columns = {"x": x, "y": target}
        if sample_weight is not None:
            check_weighting(learning, "sample_weight")
            columns["w"] = _check_sample_weight(sample_weight, x, ensure_non_negative=True)
        if callable(getattr(self.scoring, "keys", None)) or isinstance(self.scoring, (list, tuple)):
            raise InputError("scoring must be one scorer, not several: search by one of them")
        return columns

    def _folds(self, x: Any, count: int, y: Any, groups: Any) -> tuple[list[Any], str]:
        """Return the numbers of each fold's training and validation rows, and the splitter."""
        splitter = check_cv(self.cv, y, classifier=is_classifier(self.estimator))
        pairs = [
            (_find_row_numbers(train, count, fold), _find_row_numbers(test, count, fold))
            for fold, (train, test) in enumerate(splitter.split(x, y, groups))
        ]
        self.n_splits_ = len(pairs)
        return pairs, repr(splitter)

    def _searcher_of(self, space: Space) -> Any:
        """Return the searcher; without one and `n_trials`, a space of lists is searched whole."""
        if self.searcher is not None:
            return self.searcher
        return "grid" if self.n_trials is None and space.is_finite else "random"

    def _trials_of(self, space: Space) -> int | None:
        """Return `n_trials`; for random search, at most the number of configurations."""
        searcher = self._searcher_of(space)
        is_random = searcher == "random" or isinstance(searcher, RandomSearch)
        if self.n_trials is None or not is_random or not space.is_finite:
            return self.n_trials
        try:
            most = len(space.grid())
        except InputError:  # too many to count
            return self.n_trials
        if most < self.n_trials:
            warnings.warn(
                f"the space has only {most} configurations, fewer than n_trials={self.n_trials}: "
                "each is tried once",
                stacklevel=3,
            )
        return min(most, self.n_trials)

    def _validate_rows(self, X: Any, y: Any, by_row: bool) -> tuple[Any, Any]:
        """Return rows, or their numbers, and target as numbers; store the classes."""
        if y is None:
            raise InputError(
                f"{type(self).__name__} requires y to be passed, but the target y is None"
            )
        classifier = is_classifier(self.estimator)
        checks: dict[str, Any] = {"multi_output": not classifier, "y_numeric": not classifier}
        try:
            if by_row:  # the head checks the cells
                check_consistent_length(X, y)
                numbers = np.arange(_num_samples(X)).reshape(-1, 1)
                x, target = check_X_y(numbers, y, dtype=np.int64, **checks)
                _check_feature_names(self, X, reset=True)
                _check_n_features(self, X, reset=True)
            else:
                x, target = validate_data(self, X, y, dtype=[np.float64, np.float32], **checks)
        except ValueError as error:
            if str(error).startswith("could not convert string"):
                _name_bad_cell("X", X)
                _name_bad_cell("y", y)
            raise
        if not classifier:
            if target.dtype.kind in "US":
                _name_bad_cell("y", y)
                target = target.astype(np.float64)
            return x, target
        check_classification_targets(target)
        labels, codes = np.unique(target, return_inverse=True)
        # A state cannot hold objects, and pandas' strings are objects.
        self.classes_ = labels.astype(str) if labels.dtype.kind == "O" else labels
        if len(labels) < 2:
            raise InputError(f"y has only one class, {labels[0]!r}: there is nothing to learn")
        return x, codes

    def _refit(
        self,
        build: BuildEstimator,
        data: Dataset,
        seed: int,
        config: Mapping[str, Any],
        rows: Any,
        target: Any,
    ) -> None:
        """Train on all rows, exactly like trial 0 of a search without folds.

        `rows` are those that go through a pipeline's head first, or None.
        """
        begun = time.perf_counter()
        estimator = configure_estimator(build.estimator, config, build.originals)
        size = int(config.get("batch_size", self.batch_size))
        labels = build.labels
        head, tail = (None, estimator) if rows is None else split_pipeline(estimator)
        final = steps_of(tail)[-1][1]
        balance = getattr(final, "class_weight", None)
        balance_classes(tail, build.balances, None)
        if head is not None:
            rows = fit_head(head, rows, target, seed)
            names = getattr(rows, "columns", None)
        matrix = None if rows is None else as_numbers(rows)
        classes = {} if labels is None else {"classes": labels}
        with generators.preserve_generators(False, trial_seed(seed, 0) % 2**32):
            for epoch in range(self.best_epochs_):
                for batch in data.batches(
                    size, seed=seed, epoch=epoch, shuffle=self.shuffle, framework="numpy"
                ):
                    x = batch["x"] if matrix is None else take_rows(matrix, batch["x"])
                    y = batch["y"] if labels is None else labels[batch["y"]]
                    weights = {} if build.weight is None else {"sample_weight": batch["w"]}
                    learn(tail, x, y, **classes, **weights)
        if balance is not None:
            final.set_params(class_weight=balance)
        if head is not None:
            estimator.steps[:-1] = head.steps
            if names is not None:
                tail.feature_names_in_ = np.asarray(names, object)
        self.best_estimator_ = estimator
        if head is None and hasattr(self, "feature_names_in_"):
            _rename_features(estimator, self.feature_names_in_)
        self.refit_time_ = time.perf_counter() - begun

    # --- methods of the best estimator ---------------------------------------

    def _check_refit(self) -> None:
        if not self.refit:
            raise AttributeError(
                f"this {type(self).__name__} was made with refit={self.refit}: it has the best "
                "parameters, best_params_, but no estimator that was trained with them"
            )

    def _best(self) -> Any:
        self._check_refit()
        check_is_fitted(self, "best_estimator_")
        return self.best_estimator_

    @_if_best_has("predict")
    def predict(self, X: Any) -> Any:
        """Return the best estimator's predictions."""
        return self._best().predict(X)

    @_if_best_has("predict_proba")
    def predict_proba(self, X: Any) -> Any:
        """Return the best estimator's probabilities."""
        return self._best().predict_proba(X)

    @_if_best_has("predict_log_proba")
    def predict_log_proba(self, X: Any) -> Any:
        """Return the logarithms of the best estimator's probabilities."""
        return self._best().predict_log_proba(X)

    @_if_best_has("decision_function")
    def decision_function(self, X: Any) -> Any:
        """Return the best estimator's decision function."""
        return self._best().decision_function(X)

    def score(self, X: Any, y: Any) -> float:
        """Return the best estimator's score, by the search's scorer."""
        best = self._best()
        return float(self.scorer_(best, X, y))

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "cv_results_")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        inner = get_tags(self.estimator)
        tags.estimator_type = inner.estimator_type
        tags.classifier_tags = deepcopy(inner.classifier_tags)
        if tags.classifier_tags is not None:
            tags.classifier_tags.multi_label = False
        tags.regressor_tags = deepcopy(inner.regressor_tags)
        tags.target_tags = deepcopy(inner.target_tags)
        tags.target_tags.required = True
        tags.input_tags.sparse = True
        tags.array_api_support = False
        return tags


def _rename_features(estimator: Any, names: Any) -> None:
    """Name the features of an estimator that has learned from rows without names."""
    steps = [step for _, step in steps_of(estimator)]
    steps[0].feature_names_in_ = names
    for previous, step in pairwise(steps):
        if hasattr(step, "feature_names_in_"):  # it has names that the previous step made up
            step.feature_names_in_ = previous.get_feature_names_out()


def _balance(target: Any) -> dict[Any, float]:
    """Return the weights of ``class_weight="balanced"``."""
    classes = np.unique(target)
    weights = compute_class_weight("balanced", classes=classes, y=target)
    return dict(zip(classes.tolist(), weights.tolist(), strict=True))


def _seed_of(random_state: Any) -> int:
    if isinstance(random_state, (int, np.integer)) and not isinstance(random_state, bool):
        return int(random_state)
    return int(check_random_state(random_state).randint(2**31))


def _name_bad_cell(name: str, given: Any) -> None:
    """Raise InputError for the first non-numeric text cell, searching column by column."""
    labels = [str(label) for label in getattr(given, "columns", ())]
    cells = np.asarray(given, object)
    for at, column in enumerate(cells.reshape(len(cells), -1).T):
        label = labels[at] if at < len(labels) else f"{name}[:, {at}]" if cells.ndim > 1 else name
        for row, cell in enumerate(column):
            if isinstance(cell, str) and not is_number(cell):
                raise not_a_number_error(label, row, cell)


def _find_row_numbers(rows: Any, count: int, fold: int) -> Any:
    """Return row numbers; a boolean mask gives the positions of its true values."""
    rows = np.asarray(rows)
    numbers = np.flatnonzero(rows) if rows.dtype == bool else rows
    # NumPy would take negative ones.
    if numbers.dtype.kind not in "iu" or (numbers < 0).any() or (numbers >= count).any():
        raise InputError(f"cv, fold {fold}: it must contain row numbers from 0 to {count - 1}")
    return numbers
