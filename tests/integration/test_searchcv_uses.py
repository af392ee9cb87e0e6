"""What scripts do with GridSearchCV, done with SearchCV: the scores are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cerebro
from cerebro.cli import main

pytest.importorskip("sklearn")
pytest.importorskip("pandas")
import pandas
from scipy.sparse import csr_matrix
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import PCA
from sklearn.feature_extraction.text import CountVectorizer
from sklearn.feature_selection import SelectKBest, chi2
from sklearn.impute import SimpleImputer
from sklearn.linear_model import SGDClassifier, SGDRegressor
from sklearn.model_selection import GridSearchCV
from sklearn.naive_bayes import BernoulliNB, GaussianNB, MultinomialNB
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import (
    MinMaxScaler,
    OneHotEncoder,
    PolynomialFeatures,
    RobustScaler,
    StandardScaler,
    TargetEncoder,
)
from sklearn.utils.class_weight import compute_class_weight

from cerebro.errors import InputError, RunError
from cerebro.sklearn import SearchCV


def make_frame() -> tuple[Any, Any]:
    """Return numbers with gaps, a category, and classes that are text."""
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame(
        {
            "age": rng.normal(size=120),
            "fare": rng.normal(size=120),
            "port": rng.choice(["a", "b", "c"], 120),
        }
    )
    y = np.where(frame.fare + (frame.port == "a") > 0.5, "yes", "no")
    frame.loc[::7, "age"] = np.nan
    return frame, y


FRAME, Y = make_frame()
NUMBERS = np.abs(FRAME[["age", "fare"]].fillna(0).to_numpy())
TEXTS = ["good film" if label == "yes" else "bad film with a plot" for label in Y]
COLUMNS = ColumnTransformer(
    [
        ("numbers", make_pipeline(SimpleImputer(), MinMaxScaler()), ["age", "fare"]),
        ("classes", OneHotEncoder(handle_unknown="ignore"), ["port"]),
    ]
)
ENCODED = ColumnTransformer(
    [("target", TargetEncoder(random_state=0), ["port"]), ("n", MinMaxScaler(), ["fare"])]
)

# In alphabetical order, as GridSearchCV tries them. Naive Bayes learns from batches what it learns
# at once, so that scores are equal.
USES: dict[str, tuple[Any, Any, Any]] = {
    "column transformer": (
        Pipeline([("columns", COLUMNS), ("clf", MultinomialNB())]),
        {"clf__alpha": [0.1, 9.0], "columns__numbers__simpleimputer__strategy": ["mean", "median"]},
        FRAME,
    ),
    "target encoder, which transforms training rows in another way": (
        make_pipeline(ENCODED, MultinomialNB()),
        {"multinomialnb__alpha": [0.1, 9.0]},
        FRAME,
    ),
    "selection by the target": (
        make_pipeline(PolynomialFeatures(), SelectKBest(chi2), MultinomialNB()),
        {"selectkbest__k": [1, 3]},
        NUMBERS,
    ),
    "robust scaler": (
        make_pipeline(RobustScaler(), BernoulliNB()),
        {"bernoullinb__alpha": [0.1, 9.0]},
        NUMBERS,
    ),
    "principal components": (
        make_pipeline(PCA(random_state=0), BernoulliNB()),
        {"pca__n_components": [1, 2]},
        NUMBERS,
    ),
    "text": (
        make_pipeline(CountVectorizer(), MultinomialNB()),
        {"countvectorizer__ngram_range": [(1, 1), (1, 2)]},
        TEXTS,
    ),
    "steps that are choices": (
        Pipeline([("scaler", MinMaxScaler()), ("clf", MultinomialNB())]),
        {
            "clf": [BernoulliNB(), BernoulliNB(alpha=9.0)],
            "scaler": ["passthrough", MinMaxScaler(), RobustScaler()],
        },
        NUMBERS,
    ),
    "sparse rows": (MultinomialNB(), {"alpha": [0.1, 9.0]}, csr_matrix(NUMBERS)),
}


@pytest.mark.parametrize("use", USES)
def test_the_scores_are_those_of_grid_search_cv(use: str) -> None:
    estimator, space, x = USES[use]
    theirs = GridSearchCV(estimator, space, cv=3).fit(x, Y)
    ours = SearchCV(estimator, space, cv=3, epochs=1, searcher="grid", workers=0).fit(x, Y)

    def by_params(search: Any) -> dict[str, Any]:
        names = [f"split{fold}_test_score" for fold in range(3)]
        rows = zip(*(search.cv_results_[name] for name in names), strict=True)
        return dict(zip(map(str, search.cv_results_["params"]), rows, strict=True))

    assert by_params(ours) == by_params(theirs)
    assert ours.best_score_ == theirs.best_score_
    assert str(ours.best_params_) == str(theirs.best_params_)
    expected = theirs.predict_proba(x)
    np.testing.assert_allclose(ours.predict_proba(x), expected, rtol=1e-9, atol=1e-12)


def test_results_with_a_head_do_not_depend_on_workers() -> None:
    made = Pipeline([("columns", COLUMNS), ("clf", MLPClassifier((4,), random_state=0))])
    space = {"clf__alpha": [1e-4, 1.0], "columns__numbers__minmaxscaler": ["passthrough"]}
    inline, two = (
        SearchCV(made, space, cv=3, epochs=2, workers=workers).fit(FRAME, Y) for workers in (0, 2)
    )
    for fold in range(3):
        name = f"split{fold}_test_score"
        assert list(inline.cv_results_[name]) == list(two.cv_results_[name])
    np.testing.assert_array_equal(inline.predict_proba(FRAME), two.predict_proba(FRAME))
    assert len(inline.cv_results_["params"]) == 2  # a space of lists is searched whole


def test_balanced_classes_have_the_weights_of_all_training_rows() -> None:
    classes = np.unique(Y)
    weights = compute_class_weight("balanced", classes=classes, y=Y)
    given = dict(zip(classes.tolist(), weights.tolist(), strict=True))
    cv = [(np.arange(0, 120, 2), np.arange(1, 120, 2))]
    balanced, by_hand = (
        SearchCV(
            SGDClassifier(class_weight=weight, random_state=0),
            {"alpha": [1e-3]},
            cv=cv,
            epochs=1,
            workers=0,
        ).fit(NUMBERS, Y)
        for weight in ("balanced", given)
    )
    np.testing.assert_array_equal(balanced.best_estimator_.coef_, by_hand.best_estimator_.coef_)
    assert balanced.best_estimator_.class_weight == "balanced"


def test_estimators_are_choices_of_the_last_step() -> None:
    made = Pipeline([("scaler", StandardScaler()), ("clf", GaussianNB())])
    choices = [SGDClassifier(random_state=0), GaussianNB()]
    found = SearchCV(made, {"clf": choices}, cv=3, epochs=2, workers=0).fit(NUMBERS, Y)
    kinds = [type(params["clf"]) for params in found.cv_results_["params"]]
    assert kinds == [SGDClassifier, GaussianNB]
    assert type(found.best_estimator_["clf"]) is type(found.best_params_["clf"])


def test_training_rows_may_repeat() -> None:
    rng = np.random.default_rng(0)
    drawn = [rng.choice(120, 120) for _ in range(2)]
    folds = [(rows, np.setdiff1d(np.arange(120), rows)) for rows in drawn]
    made = make_pipeline(PolynomialFeatures(), MultinomialNB())
    space = {"multinomialnb__alpha": [0.1, 9.0]}
    theirs = GridSearchCV(made, space, cv=folds).fit(NUMBERS, Y)
    ours = SearchCV(made, space, cv=folds, epochs=1, workers=0).fit(NUMBERS, Y)
    for name in ("split0_test_score", "split1_test_score"):
        assert list(ours.cv_results_[name]) == list(theirs.cv_results_[name])


def test_the_space_may_say_what_the_last_step_is() -> None:
    """As in scikit-learn, such a pipeline is no classifier yet, so its folds are not stratified."""
    made = Pipeline([("scaler", RobustScaler()), ("clf", None)])
    space = {"clf": [BernoulliNB(), BernoulliNB(alpha=9.0)]}
    options = {"cv": 3, "scoring": "accuracy"}
    theirs = GridSearchCV(made, space, **options).fit(NUMBERS, Y)
    ours = SearchCV(made, space, epochs=1, workers=0, **options).fit(NUMBERS, Y)
    for fold in range(3):
        name = f"split{fold}_test_score"
        assert list(ours.cv_results_[name]) == list(theirs.cv_results_[name])
    assert list(ours.predict(NUMBERS)) == list(theirs.predict(NUMBERS))


def test_a_search_of_classes_may_search_a_regressor_next() -> None:
    search = SearchCV(GaussianNB(), {"var_smoothing": [1e-9]}, cv=3, epochs=1, workers=0)
    search.fit(NUMBERS, Y)
    again = search.set_params(estimator=SGDRegressor(random_state=0), space={"alpha": [1e-3]})
    new = SearchCV(SGDRegressor(random_state=0), {"alpha": [1e-3]}, cv=3, epochs=1, workers=0)
    target = NUMBERS[:, 0] * 3
    np.testing.assert_array_equal(
        again.fit(NUMBERS, target).predict(NUMBERS), new.fit(NUMBERS, target).predict(NUMBERS)
    )


def test_missing_values_that_a_head_leaves_are_named() -> None:
    made = make_pipeline(RobustScaler(), GaussianNB())
    with pytest.raises(RunError, match="NaN or infinity: add a SimpleImputer"):
        SearchCV(made, {"gaussiannb__var_smoothing": [1e-9]}, cv=3, epochs=1, workers=0).fit(
            FRAME[["age", "fare"]], Y
        )


def test_solvers_without_partial_fit_are_refused_before_anything_runs() -> None:
    made = make_pipeline(RobustScaler(), MLPClassifier(solver="lbfgs"))
    with pytest.raises(InputError, match="has no partial_fit with solver='lbfgs'"):
        SearchCV(made, {"mlpclassifier__alpha": [1.0]}).fit(NUMBERS, Y)


@pytest.mark.parametrize("keeps_data", [False, True])
@pytest.mark.parametrize("scaler", [StandardScaler(), RobustScaler()])
def test_replaying_a_run_is_refused_in_one_sentence(
    keeps_data: bool, scaler: Any, tmp_path: Path, capsys: Any
) -> None:
    made = make_pipeline(scaler, SGDClassifier(random_state=0))
    options = {"run": tmp_path / "run", "path": tmp_path / "data" if keeps_data else None}
    SearchCV(made, {"sgdclassifier__alpha": [1e-3]}, cv=3, epochs=1, workers=0, **options).fit(
        NUMBERS, Y
    )
    assert main(["replay", str(tmp_path / "run"), "--trial", "0"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: SearchCV made this run, and fit() keeps neither its estimator")
    assert len(cerebro.open(tmp_path / "run").trials) == 1


def test_a_trial_whose_rows_are_gone_says_so(tmp_path: Path) -> None:
    made = make_pipeline(RobustScaler(), SGDClassifier(random_state=0))
    options = {"run": tmp_path / "run", "path": tmp_path / "data", "workers": 0}
    fitted = SearchCV(made, {"sgdclassifier__alpha": [1e-3]}, cv=3, epochs=1, **options).fit(
        NUMBERS, Y
    )
    with pytest.raises(InputError, match=r"reads rows that fit\(\) has removed at its end: use"):
        fitted.result_.best.load("last", fold=0)
