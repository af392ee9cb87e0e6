"""`cerebro.sklearn.SearchCV`: a search that follows scikit-learn's conventions.

`SearchCV` is a `GridSearchCV` for estimators that learn by batch (``partial_fit``), with the same
folds and the same fitted attributes. It runs `cerebro.search` with folds, over shards in a
folder.
"""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from scipy.sparse import issparse
from sklearn import get_config
from sklearn.base import BaseEstimator, MetaEstimatorMixin, is_classifier
from sklearn.metrics import check_scoring
from sklearn.model_selection import GridSearchCV, check_cv
from sklearn.utils import get_tags, indexable
from sklearn.utils.metadata_routing import (
    MetadataRouter,
    MethodMapping,
    get_routing_for_object,
    process_routing,
)
from sklearn.utils.metaestimators import available_if
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_feature_names,
    _check_n_features,
    _check_sample_weight,
    _num_samples,
    check_is_fitted,
    check_random_state,
    check_X_y,
    validate_data,
)

from cerebro._core import trial_seed
from cerebro.api.search import search
from cerebro.arguments import SEARCH, explain_keywords, list_words, warn_user
from cerebro.data import Dataset, shard
from cerebro.data.dtypes import is_number, not_a_number_error
from cerebro.data.validation import KFold
from cerebro.errors import InputError, RunError
from cerebro.integrations.sklearn.candidates import (
    SCORE,
    BuildEstimator,
    Originals,
    Scoring,
    accepts_weights,
    as_choices,
    balance_classes,
    check_choices,
    choose_score,
    conclude,
    configure_estimator,
    find_learning_estimator,
    has_head,
    weigh_classes,
)
from cerebro.integrations.sklearn.heads import (
    Rows,
    as_numbers,
    fit_head,
    names_of,
    rename_features,
    split_pipeline,
    take_rows,
)
from cerebro.integrations.sklearn.steps import COUNTING, check_weighting, kind_of, learn, steps_of
from cerebro.machine import generators
from cerebro.machine.files import expand_path
from cerebro.machine.guard import refuse
from cerebro.searchers import RandomSearch
from cerebro.space import Space

WEIGHT = "sample_weight"
EPOCHS = 10
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
            "leave it out: workers take units as they are free": "pre_dispatch",
            "give searcher=cerebro.SuccessiveHalving(...), whose resource is epochs": "factor "
            "resource min_resources max_resources aggressive_elimination",
            "leave it out: scikit-learn's estimators train on the CPU": "devices device gpus "
            "accelerator use_gpu",
            "fit() takes it": "X y groups fit_params sample_weight data",
        }
    ),
}


class FitError(RunError, ValueError):
    """Every configuration failed, for which scikit-learn's searches raise ValueError."""


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
        A mapping of the estimator's parameters to their values, or a list of such mappings, each
        searched by itself. Lists, tuples, ranges and arrays are choices, as in scikit-learn, also
        of estimators; `cerebro.loguniform(...)`, SciPy's distributions and similar are as in
        `cerebro.search`. A choice may be a tuple (``hidden_layer_sizes``) or a mapping
        (``class_weight``). ``batch_size`` may be one of the names.
    epochs
        Passes over the data per configuration, at most. Default: 10, or 1 for a naive Bayes
        classifier that counts rows, whose `alpha` would count for less with each pass.
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
        None (the estimator's ``score``), the name of a scorer, or ``scorer(estimator, X, y)``. For
        several scores, a list of names, a mapping of names to scorers, or a function that returns
        a mapping. A scorer that is not a name gets the whole pipeline and the rows as given.
    batch_size
        Rows per batch, unless the space has it.
    shuffle, workers, progress
        As for `cerebro.search`.
    stop
        A `cerebro.EarlyStopping` rule, applied to the mean over folds.
    refit
        Whether to train the best configuration on all rows, for its best number of epochs; or a
        function that takes `cv_results_` and returns the index of the configuration to train. Of
        several scores, the name of the one that says which epoch and configuration are best.
    shards
        The number of shards of the data; default: one for every 10,000 rows, at most 8.
    path
        A folder for the data, which must not exist; default: a temporary one, removed after `fit`.
    run
        A folder for the run, which is kept; default: a temporary one, removed after `fit`. After
        Ctrl-C, `cerebro.open` shows the trials so far; `fit` cannot resume them.
    random_state
        An int, a ``RandomState``, or None for a different seed each time.
    return_train_score
        Whether to score each fold's training rows, too.

    Attributes
    ----------
    best_estimator_
        The best estimator, trained on all rows, if `refit`.
    best_index_, best_params_, best_score_, best_epochs_
        The best configuration, its mean score over the folds, and the epochs after which it had
        that score.
    cv_results_
        Arrays, one value per configuration: ``params``, ``param_*``, ``split0_test_score`` ...,
        ``mean_test_score``, ``std_test_score``, ``rank_test_score`` (with several scores,
        ``mean_test_<name>``, ...), ``split0_train_score`` ..., ``epochs`` (trained at the
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
        In `fit`, if every configuration failed. Here it is a subclass of ``ValueError``, too.

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
        epochs: int | None = None,
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
        return_train_score: bool = False,
    ) -> None:
        self.estimator, self.space, self.searcher = estimator, space, searcher
        self.epochs, self.n_trials, self.stop, self.refit = epochs, n_trials, stop, refit
        self.cv, self.scoring, self.batch_size, self.shuffle = cv, scoring, batch_size, shuffle
        self.shards, self.path, self.run = shards, path, run
        self.workers, self.random_state, self.progress = workers, random_state, progress
        self.return_train_score = return_train_score

    def fit(self, X: Any, y: Any = None, **params: Any) -> SearchCV:
        """Search, and train the best configuration on all rows.

        Parameters
        ----------
        X
            Rows of numbers, dense or sparse, of shape ``(rows, features)``; anything that the first
            step of a pipeline takes, if its steps are fitted on all training rows of a fold.
        y
            The target: classes of any kind, or numbers.
        **params
            ``groups``, the group of each row, for splitters that keep groups together;
            ``sample_weight``, or in a pipeline also ``<last step>__sample_weight``, the weight of
            each row: passed to the estimator's ``partial_fit`` (in a pipeline, to that of the last
            step) and, as in `GridSearchCV`, ``sample_weight`` to scorers that take it. With
            scikit-learn's metadata routing, what the estimator, the scorers and the splitter
            request; the estimator may request only ``sample_weight``.
        """
        refuse(f"{type(self).__name__}.fit")
        self._check_paths()
        X, y = indexable(X, y)
        space, originals = as_choices(self.space)
        learning = find_learning_estimator(self.estimator, space, originals)
        has_heads = has_head(self.estimator, originals) or (issparse(X) and _has_steps(self))
        for_estimator, for_splitter, for_scorers = self._route(params)
        weights = self._find_weights(for_estimator, learning, originals)
        x, target = self._validate_rows(X, y, has_heads, is_classifier(learning))
        check_choices(learning, space, originals)
        scoring = self._scoring()
        by_row = has_heads or issparse(X) or scoring.takes_rows or scoring.train or for_scorers
        columns = {"x": np.arange(len(target)).reshape(-1, 1) if by_row else x, "y": target}
        if weights is not None:
            columns["w"] = _check_sample_weight(weights, columns["x"], ensure_non_negative=True)
        seed = _seed_of(self.random_state)
        order = np.random.RandomState(seed).permutation(len(target))
        pairs, splitter = self._folds(X, len(order), y, for_splitter)
        labels = self.classes_ if is_classifier(learning) else None
        place = np.argsort(order)  # where each row is stored
        folds = KFold(KnownFolds([(place[a], place[b]) for a, b in pairs], splitter))
        with tempfile.TemporaryDirectory(prefix="cerebro-search-") as temporary:
            rows = None
            if by_row:
                rows = Rows(
                    Path(temporary, "rows"),
                    X,
                    y,
                    metadata=for_scorers,
                    matrix=None if has_heads else x,
                    folds=pairs,
                    names=getattr(self, "feature_names_in_", None),
                    seed=seed,
                )
            of_folds = [*(target[train] for train, _ in pairs), target]
            build = BuildEstimator(
                self.estimator,
                scoring,
                labels,
                "w" if "w" in columns else None,
                originals,
                [] if labels is None else [weigh_classes(labels[codes]) for codes in of_folds],
                rows,
                keeps_run=self.run is not None,
            )
            data = shard(
                {name: column[order] for name, column in columns.items()},
                Path(temporary, "data") if self.path is None else self.path,
                shards=self.shards or max(1, min(MAX_SHARDS, len(order) // ROWS_PER_SHARD)),
                shuffle=False,
                progress=False,
            )
            try:
                result = search(
                    build,
                    space,
                    data,
                    epochs=self._epochs_of(learning, originals),
                    n_trials=self._trials_of(space),
                    validation=folds,
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
            except RunError as error:
                raise FitError(str(error), error.result) from None
            self.__dict__.update(conclude(result, originals, self.refit))
            if self.refit:
                config = result.trials[self.best_index_].config
                self._refit(build, data, seed, config, X, y)
        if self.run is not None:
            self.result_ = result
        return self

    def get_metadata_routing(self) -> MetadataRouter:
        """Return who gets the metadata of `fit` and `score`, as in `GridSearchCV`."""
        scorer = check_scoring(self.estimator, scoring=self.scoring)
        to_fit, to_score, to_split = MethodMapping(), MethodMapping(), MethodMapping()
        to_score.add(caller="score", callee="score")
        for mapping, callee in ((to_fit, "fit"), (to_score, "score"), (to_split, "split")):
            mapping.add(caller="fit", callee=callee)
        router = MetadataRouter(owner=self)
        router.add(estimator=self.estimator, method_mapping=to_fit)
        router.add(scorer=scorer, method_mapping=to_score)
        return router.add(splitter=self.cv, method_mapping=to_split)

    def _scoring(self) -> Scoring:
        """Return the scorers, and store them as scikit-learn's searches do."""
        scorer = check_scoring(self.estimator, scoring=self.scoring, raise_exc=False)
        self.scorer_ = getattr(scorer, "_scorers", scorer)  # a dictionary, if there are several
        if isinstance(self.scorer_, dict):
            choose_score(self.refit, [*self.scorer_])
        given = self.scoring
        names = [given] if given is None or callable(given) or isinstance(given, str) else given
        names = names.values() if isinstance(names, Mapping) else names
        takes_rows = not all(name is None or isinstance(name, str) for name in names)
        return Scoring(scorer, self.refit, takes_rows=takes_rows, train=self.return_train_score)

    def _route(self, params: dict[str, Any]) -> tuple[Any, Any, Any]:
        """Return the metadata for the estimator, the splitter and the scorers."""
        params = {name: value for name, value in params.items() if value is not None}
        if get_config()["enable_metadata_routing"]:
            routed = process_routing(self, "fit", **params)
            return routed.estimator.fit, routed.splitter.split, routed.scorer.score
        groups = params.pop("groups", None)
        # Older versions of scikit-learn's searches give scorers no weights.
        if WEIGHT not in params or not hasattr(GridSearchCV, "_check_scorers_accept_sample_weight"):
            return params, {"groups": groups}, {}
        scorer = check_scoring(self.estimator, scoring=self.scoring)
        accept = {
            name: accepts_weights(each)
            for name, each in getattr(scorer, "_scorers", {"scoring": scorer}).items()
        }
        for name in (name for name, accepts in accept.items() if not accepts):
            warn_user(f"{name} does not support sample_weight: it counts all rows alike")
        return params, {"groups": groups}, {WEIGHT: params[WEIGHT]} if any(accept.values()) else {}

    def _find_weights(self, params: dict[str, Any], learning: Any, originals: Originals) -> Any:
        """Return the weights of rows for `partial_fit`; refuse all other metadata."""
        last, final = steps_of(self.estimator)[-1]
        if params and get_config()["enable_metadata_routing"] and last:  # a pipeline's
            routed = process_routing(self.estimator, "fit", **params)
            params = {
                f"{step}__{name}": value
                for step, methods in routed.items()
                for values in methods.values()
                for name, value in values.items()
            }
            for option in originals.get(last, {}).values() if params else ():
                if _request_of(option) != _request_of(final):
                    raise InputError(
                        f"{option!r} does not request sample_weight as {final!r} does: call "
                        "set_fit_request on each estimator in the space"
                    )
        weight = f"{last}__sample_weight" if f"{last}__sample_weight" in params else WEIGHT
        others = sorted(params.keys() - {weight})
        if others:
            raise InputError(
                f"SearchCV.fit passes sample_weight to the last step, not {', '.join(others)}: use "
                "cerebro.search with your own model, or GridSearchCV"
            )
        if kind_of(learning, whole=True) not in ("classifier", "regressor"):
            raise InputError(
                f"SearchCV takes classifiers and regressors, not {type(self.estimator).__name__}: "
                "use cerebro.search with cerebro.sklearn.Model"
            )
        if weight in params:
            check_weighting(learning, "sample_weight")
        return params.get(weight)

    def _folds(self, x: Any, count: int, y: Any, params: Any) -> tuple[list[Any], str]:
        """Return the numbers of each fold's training and validation rows, and the splitter."""
        splitter = check_cv(self.cv, y, classifier=is_classifier(self.estimator))
        pairs = [
            (_find_row_numbers(train, count, fold), _find_row_numbers(test, count, fold))
            for fold, (train, test) in enumerate(splitter.split(x, y, **params))
        ]
        self.n_splits_ = len(pairs)
        return pairs, repr(splitter)

    def _epochs_of(self, learning: Any, originals: Originals) -> int:
        """Return `epochs` or its default; warn about estimators that count rows in each epoch."""
        last, final = steps_of(learning)[-1]
        kinds = [type(each).__name__ for each in originals.get(last, {}).values() or [final]]
        counting = [kind for kind in kinds if kind in COUNTING]
        default = 1 if len(counting) == len(kinds) else EPOCHS
        epochs: int = default if self.epochs is None else self.epochs
        if counting and isinstance(epochs, (int, np.integer)) and epochs > 1:
            warn_user(
                f"{counting[0]} counts every row in each epoch, so that after {epochs} epochs "
                "alpha counts for less: give epochs=1"
            )
        return epochs

    def _check_paths(self) -> None:
        """Raise InputError for a folder in use, for which `search` would name its own arguments."""
        for name in ("path", "run"):
            given = getattr(self, name)
            if isinstance(given, (str, os.PathLike)):
                folder = Path(expand_path(os.fspath(given)))
                if folder.is_dir() and any(folder.iterdir()):
                    raise InputError(f"{name}: '{given}' has files already: give a new folder")

    def _searcher_of(self, space: Space) -> Any:
        """Return the searcher; without one and `n_trials`, a space of lists is searched whole."""
        if self.searcher is not None:
            return self.searcher
        return "grid" if self.n_trials is None and space.is_finite else "random"

    def _trials_of(self, space: Space) -> int | None:
        """Return `n_trials`; for random search, at most the number of configurations."""
        searcher = self._searcher_of(space)
        is_random = searcher == "random" or isinstance(searcher, RandomSearch)
        if self.n_trials is None and searcher == "random":
            raise InputError("give n_trials=, the number of configurations that are tried")
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

    def _validate_rows(self, X: Any, y: Any, has_heads: bool, classifier: bool) -> tuple[Any, Any]:
        """Return rows, unless heads take them, and target as numbers; store the classes."""
        if y is None:
            raise InputError(
                f"{type(self).__name__} requires y to be passed, but the target y is None"
            )
        checks: dict[str, Any] = {"multi_output": not classifier, "y_numeric": not classifier}
        try:
            if has_heads:  # which check the cells
                numbers = np.arange(_num_samples(X)).reshape(-1, 1)
                x, target = check_X_y(numbers, y, dtype=np.int64, **checks)
                _check_feature_names(self, X, reset=True)
                _check_n_features(self, X, reset=True)
            else:
                checks |= {"dtype": [np.float64, np.float32], "accept_sparse": "csr"}
                x, target = validate_data(self, X, y, **checks)
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
        if labels.dtype.kind in "mM":
            raise InputError("y has dates, which cannot be classes here: make them text")
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

        `rows` and `target` are as given.
        """
        begun = time.perf_counter()
        estimator = configure_estimator(build.estimator, config, build.originals)
        size = int(config.get("batch_size", self.batch_size))
        labels = build.labels
        head, tail, matrix = None, estimator, None
        if build.rows is not None and build.rows.has_heads:
            head, tail = split_pipeline(estimator)
            made = fit_head(head, rows, target, seed)
            matrix, names = as_numbers(made), names_of(made)
        elif build.rows is not None:
            matrix = build.rows.matrix("matrix")
        final = steps_of(tail)[-1][1]
        balance = getattr(final, "class_weight", None)
        balance_classes(tail, build.balances, None)
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
                rename_features(tail, names)
        elif hasattr(self, "feature_names_in_"):
            rename_features(estimator, self.feature_names_in_)
        self.best_estimator_ = estimator
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

    def score(self, X: Any, y: Any = None, **params: Any) -> float:
        """Return the best estimator's score, by the search's scorer; of several, by `refit`'s.

        `params` are metadata for the scorer, with scikit-learn's metadata routing.
        """
        best, scorer = self._best(), self.scorer_
        if params and not get_config()["enable_metadata_routing"]:
            raise InputError(
                f"score takes {', '.join(params)} only with "
                "sklearn.set_config(enable_metadata_routing=True)"
            )
        if self.multimetric_ and not isinstance(self.refit, str):
            raise InputError(
                "score does not know which of several scores to return: give refit the name of one"
            )
        if params:
            params = process_routing(self, "score", **params).scorer["score"]
        if isinstance(scorer, dict):
            scorer = scorer[self.refit]
        score = scorer(best, X, y, **params)
        return float(score[self.refit] if isinstance(score, Mapping) else score)

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
        # Sparse batches are made dense, but not for heads.
        tags.input_tags.sparse = inner.input_tags.sparse or not hasattr(self.estimator, "steps")
        tags.array_api_support = False
        return tags


def _has_steps(search: Any) -> bool:
    """Return whether the estimator is a pipeline of several steps."""
    return len(getattr(search.estimator, "steps", ())) > 1


def _request_of(estimator: Any) -> Any:
    return get_routing_for_object(estimator).fit.requests.get(WEIGHT)


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
