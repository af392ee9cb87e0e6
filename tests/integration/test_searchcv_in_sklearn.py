"""Uses that scripts make of GridSearchCV: SearchCV gives what GridSearchCV gives.

Naive Bayes learns by batch what it learns at once, so all values are equal up to the order of sums.
The last uses are refused, by name and with the cure.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("pandas")
import joblib
import pandas
import sklearn.model_selection as ms
from scipy.sparse import csr_matrix
from sklearn import config_context
from sklearn.base import clone, is_classifier
from sklearn.calibration import CalibratedClassifierCV
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor, make_column_transformer
from sklearn.decomposition import PCA
from sklearn.ensemble import BaggingClassifier, StackingClassifier, VotingClassifier
from sklearn.feature_selection import (
    RFE,
    RFECV,
    SelectFromModel,
    SelectKBest,
    SequentialFeatureSelector,
    chi2,
)
from sklearn.impute import SimpleImputer
from sklearn.inspection import partial_dependence, permutation_importance
from sklearn.linear_model import LogisticRegression, SGDClassifier, SGDRegressor
from sklearn.metrics import fbeta_score, make_scorer
from sklearn.multiclass import OneVsOneClassifier, OneVsRestClassifier
from sklearn.multioutput import ClassifierChain, MultiOutputClassifier
from sklearn.naive_bayes import BernoulliNB, MultinomialNB
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import (
    FunctionTransformer,
    MinMaxScaler,
    OneHotEncoder,
    PolynomialFeatures,
    RobustScaler,
    StandardScaler,
)
from sklearn.utils import estimator_html_repr

from cerebro.errors import InputError
from cerebro.sklearn import SearchCV


@pytest.fixture(scope="module", autouse=True)
def no_process_of_joblib_outlives_the_tests() -> Any:
    yield
    joblib.externals.loky.get_reusable_executor().shutdown(wait=True)


RNG = np.random.default_rng(0)
X = RNG.poisson(2.0, (60, 4)).astype(float)
Y = (X[:, 0] + RNG.poisson(1.0, 60) > X[:, 1] + 1).astype(int)
THREE = np.digitize(X[:, 0] - X[:, 1], [-1, 1])
WORDS = np.array(["bad", "fair", "good"])[THREE]
GROUPS = np.arange(60) // 5
FRAME = pandas.DataFrame(X, columns=list("abcd"))
MIXED = FRAME.assign(port=RNG.choice(["x", "y"], 60), d=FRAME.d.where(FRAME.d > 0))
NAIVE, ALPHAS = MultinomialNB(), {"alpha": [0.1, 20.0]}
LOG = "best_estimator_.feature_log_prob_"
Make = Callable[..., Any]
"""Makes a search, of the estimator, its space and options."""


def theirs(estimator: Any = NAIVE, space: Any = ALPHAS, **options: Any) -> Any:
    return ms.GridSearchCV(estimator, space, **{"cv": 2, **options})


def ours(estimator: Any = NAIVE, space: Any = ALPHAS, **options: Any) -> Any:
    return SearchCV(estimator, space, epochs=1, workers=0, **{"cv": 2, **options})


def scores(search: Any, x: Any = X, y: Any = Y, **fit: Any) -> Any:
    """Fit, and return what a script reads."""
    found = search.fit(x, y, **fit)
    table = {k: v for k, v in found.cv_results_.items() if "_test_" in k or "_train_" in k}
    return [table, str(found.cv_results_["params"]), str(found.best_params_), found.predict(x)]


def split_by(cv: Any, **fit: Any) -> Callable[[Make], Any]:
    return lambda make: scores(make(cv=cv), **fit)


def score_by(scoring: Any) -> Callable[[Make], Any]:
    return lambda make: scores(make(scoring=scoring))


def inside(estimator: Any, space: Any, x: Any = X, **options: Any) -> Callable[[Make], Any]:
    return lambda make: scores(make(estimator, space, **options), x)


def around(wrap: Callable[[Any], Any], y: Any = Y) -> Callable[[Make], Any]:
    """Fit a meta-estimator that has a search."""
    return lambda make: wrap(make()).fit(X, y).predict(X)


def changed(made: Any) -> Any:
    copy = clone(made).set_params(estimator__fit_prior=False, cv=3)
    return [copy.get_params()["estimator__fit_prior"], made.cv, scores(copy)]


def written_and_read(made: Any, x: Any = X) -> Any:
    stream = io.BytesIO()
    joblib.dump(made.fit(x, Y), stream)
    stream.seek(0)
    return [joblib.load(stream).predict(x), pickle.loads(pickle.dumps(made)).predict_proba(x)]


def with_pandas_output(make: Make) -> Any:
    made = make_pipeline(MinMaxScaler(), make()).set_output(transform="pandas").fit(FRAME, Y)
    return [list(made[-1].feature_names_in_), made.predict(FRAME)]


def attributes(made: Any) -> Any:
    made.fit(FRAME, WORDS)
    names = [*made.feature_names_in_, *made.classes_, made.n_splits_, made.n_features_in_]
    return [*names, made.multimetric_, str(made.scorer_), made.best_index_, is_classifier(made)]


def regress(make: Make) -> float:
    made = make(SGDRegressor(random_state=0), {"alpha": [1e-4, 1e-3]})
    whole = make_pipeline(StandardScaler(), TransformedTargetRegressor(made, func=np.log1p,
                          inverse_func=np.expm1))  # fmt: skip
    return float(whole.fit(X, X[:, 0] + 1).predict(X).shape[0])


def balance(make: Make) -> Any:
    made = make(SGDClassifier(class_weight="balanced", random_state=0), {"alpha": [1e-2]})
    return [made.fit(X, Y).best_estimator_.class_weight, made.predict(X).shape]


def route(make: Make) -> Any:
    with config_context(enable_metadata_routing=True):
        made = make(MultinomialNB().set_fit_request(sample_weight=True)
                    .set_score_request(sample_weight=True))  # fmt: skip
        return ms.cross_validate(made, X, Y, params={"sample_weight": X[:, 3]})["test_score"]


STEPS = Pipeline([("scaler", MinMaxScaler()), ("clf", NAIVE)])
TABULAR = make_pipeline(
    ColumnTransformer(
        [
            ("n", make_pipeline(SimpleImputer(), MinMaxScaler()), ["a", "b", "d"]),
            ("c", OneHotEncoder(), ["port"]),
        ]
    ),
    NAIVE,
)
DEEP = {"multinomialnb__alpha": [0.1, 20.0]}
GRIDS = [{"clf__alpha": [1.0]}, {"clf": [BernoulliNB()], "clf__binarize": [0.1, 0.5]}]
HALVES = [(np.arange(30), np.arange(30, 60)), (np.arange(30, 60), np.arange(30))]

USES: dict[str, Callable[[Make], Any]] = {
    # parameters, results
    "clone and set_params": lambda make: changed(make()),
    "attributes": lambda make: attributes(make()),
    "cv_results_": lambda make: scores(make()),
    "fit twice": lambda make: [scores(made := make()), scores(made, X[:50], WORDS[:50])],
    "refit=False": lambda make: [
        hasattr(made := make(refit=False).fit(X, Y), "predict"),
        made.best_params_,
    ],
    "refit is a function": lambda make: scores(make(refit=lambda table: 1)),
    "refit is a name": lambda make: scores(make(scoring="f1", refit="f1")),
    "score and decision": lambda make: [
        (made := make().fit(X, THREE)).score(X, THREE),
        made.predict_proba(X),
        made.predict_log_proba(X),
        hasattr(made, "decision_function"),
    ],
    "joblib and pickle": lambda make: written_and_read(make()),
    "a picture in a notebook": lambda make: "MultinomialNB" in estimator_html_repr(make()),
    # inside other tools of scikit-learn
    "cross_val_score": lambda make: ms.cross_val_score(make(), X, Y, cv=3),
    "cross_val_score, n_jobs=2": lambda make: ms.cross_val_score(make(), X, Y, cv=2, n_jobs=2),
    "cross_val_predict": lambda make: ms.cross_val_predict(
        make(), X, THREE, cv=2, method="predict_proba"
    ),
    "cross_validate": lambda make: [
        ms.cross_validate(make(), X, Y, cv=2, scoring=["f1", "accuracy"])[f"test_{name}"]
        for name in ("f1", "accuracy")
    ],
    "nested in GridSearchCV": lambda make: scores(
        ms.GridSearchCV(make(), {"estimator__fit_prior": [True, False]}, cv=2)
    ),
    "end of a pipeline": lambda make: make_pipeline(MinMaxScaler(), make()).fit(X, Y).predict(X),
    "behind a ColumnTransformer": lambda make: (
        make_pipeline(make_column_transformer((MinMaxScaler(), ["a", "b"])), make())
        .fit(FRAME, Y)
        .predict(FRAME)
    ),
    "voting": around(lambda made: VotingClassifier([("a", made), ("b", BernoulliNB())])),
    "stacking": around(lambda made: StackingClassifier([("a", made)], LogisticRegression(), cv=2)),
    "bagging": around(lambda made: BaggingClassifier(made, 2, random_state=0)),
    "one versus rest": around(OneVsRestClassifier, WORDS),
    "one versus one": around(OneVsOneClassifier, WORDS),
    "several outputs": around(MultiOutputClassifier, np.column_stack([Y, X[:, 2] > 1])),
    "chain": around(ClassifierChain, np.column_stack([Y, X[:, 2] > 1])),
    "calibration": around(lambda made: CalibratedClassifierCV(made, cv=2), THREE),
    "tuned threshold": around(lambda made: ms.TunedThresholdClassifierCV(made, cv=2)),
    "transformed target": regress,
    "recursive elimination": lambda make: RFE(make(), importance_getter=LOG).fit(X, Y).ranking_,
    "recursive elimination with folds": lambda make: (
        RFECV(make(), importance_getter=LOG, cv=2).fit(X, Y).cv_results_["mean_test_score"]
    ),
    "select from model": lambda make: (
        SelectFromModel(make(), importance_getter=LOG).fit(X, Y).get_support()
    ),
    "sequential selection": lambda make: (
        SequentialFeatureSelector(make(), n_features_to_select=1, cv=2).fit(X, Y).get_support()
    ),
    "learning curve": lambda make: ms.learning_curve(make(), X, Y, cv=2, train_sizes=[0.5, 1.0])[2],
    "validation curve": lambda make: ms.validation_curve(
        make(), X, Y, param_name="estimator__fit_prior", param_range=[True, False], cv=2
    )[1],
    "permutation importance": lambda make: (
        permutation_importance(make().fit(X, Y), X, Y, random_state=0).importances_mean
    ),
    "permutation test": lambda make: ms.permutation_test_score(
        make(), X, Y, cv=2, n_permutations=2, random_state=0
    )[1],
    "partial dependence": lambda make: partial_dependence(make().fit(X, Y), X, [0])["average"],
    # rows
    "frame and series": lambda make: scores(make(), FRAME, pandas.Series(WORDS)),
    "set_output": with_pandas_output,
    "sparse rows": lambda make: scores(make(), csr_matrix(X)),
    "lists": lambda make: scores(make(), X.tolist(), WORDS.tolist()),
    "sample_weight": lambda make: scores(make(), sample_weight=X[:, 3] + 0.5),
    # folds
    "cv=StratifiedKFold": split_by(ms.StratifiedKFold(3, shuffle=True, random_state=0)),
    "cv=ShuffleSplit": split_by(ms.ShuffleSplit(3, random_state=0)),
    "cv=GroupKFold": split_by(ms.GroupKFold(3), groups=GROUPS),
    "cv=TimeSeriesSplit": split_by(ms.TimeSeriesSplit(3)),
    "cv=RepeatedKFold": split_by(ms.RepeatedKFold(n_splits=2, n_repeats=2, random_state=0)),
    "cv=PredefinedSplit": split_by(ms.PredefinedSplit(np.where(np.arange(60) < 40, -1, 0))),
    "cv=pairs": split_by(HALVES),
    # scores
    "scoring='f1_macro'": score_by("f1_macro"),
    "scoring='roc_auc'": score_by("roc_auc"),
    "scoring=make_scorer": score_by(make_scorer(fbeta_score, beta=2)),
    "scoring=function": score_by(lambda estimator, x, y: float(estimator.predict(x)[y == 1][0])),
    "several scores": lambda make: scores(make(scoring=["accuracy", "f1"], refit="f1")),
    "training scores": lambda make: scores(make(return_train_score=True)),
    "metadata routing": route,
    # what is searched
    "ColumnTransformer, SimpleImputer, OneHotEncoder": inside(TABULAR, DEEP, MIXED),
    "steps that are choices": inside(
        STEPS, {"scaler": ["passthrough", MinMaxScaler()], "clf": [NAIVE, BernoulliNB()]}
    ),
    "lists of grids": inside(STEPS, GRIDS),
    "PolynomialFeatures, SelectKBest": inside(
        make_pipeline(PolynomialFeatures(), SelectKBest(chi2), MultinomialNB()),
        {"polynomialfeatures__degree": [1, 2], "selectkbest__k": [2, 3]},
    ),
    "PCA, RobustScaler, FunctionTransformer": inside(
        make_pipeline(FunctionTransformer(np.sqrt), RobustScaler(), PCA(2), BernoulliNB()),
        {"pca__whiten": [True, False]},
    ),
    "class_weight='balanced'": balance,
}


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return all(same(found[name], expected[name]) for name in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(same, found, expected))
    if getattr(expected, "dtype", np.dtype(object)).kind == "f" or isinstance(expected, float):
        return bool(np.allclose(found, expected, rtol=1e-9, atol=1e-12))
    return bool(np.array_equal(found, expected))


@pytest.mark.parametrize("use", USES)
@pytest.mark.filterwarnings("ignore")
def test_a_use_gives_what_grid_search_cv_gives(use: str) -> None:
    found, expected = USES[use](ours), USES[use](theirs)
    assert same(found, expected), f"{found}\n{expected}"


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "error_score, verbose, pre_dispatch": (
        lambda: ours(error_score="raise"),
        "does not take error_score=: leave it out: the score of a configuration that fails is NaN",
    ),
    "a solver without partial_fit": (
        lambda: ours(MLPClassifier(solver="lbfgs"), ALPHAS).fit(X, Y),
        "has no partial_fit with solver='lbfgs'.* give solver='adam' or 'sgd', or use",
    ),
    "early_stopping=True": (
        lambda: ours(MLPClassifier(early_stopping=True), ALPHAS).fit(X, Y),
        r"early_stopping=True does not work.*: leave it out, .* stop=cerebro.EarlyStopping",
    ),
}


@pytest.mark.parametrize("use", REFUSED)
def test_a_use_is_refused_with_the_cure(use: str) -> None:
    run, message = REFUSED[use]
    with pytest.raises((InputError, TypeError), match=message):
        run()
