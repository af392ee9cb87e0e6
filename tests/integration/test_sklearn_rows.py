"""SearchCV gives each step the rows that GridSearchCV gives it, whatever the step does to them."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")
pd = pytest.importorskip("pandas")

from scipy.stats import loguniform  # noqa: E402
from sklearn.base import BaseEstimator, TransformerMixin  # noqa: E402
from sklearn.compose import ColumnTransformer  # noqa: E402
from sklearn.feature_selection import SelectFromModel  # noqa: E402
from sklearn.impute import SimpleImputer  # noqa: E402
from sklearn.linear_model import LogisticRegression, SGDClassifier  # noqa: E402
from sklearn.model_selection import GridSearchCV, TimeSeriesSplit  # noqa: E402
from sklearn.naive_bayes import GaussianNB, MultinomialNB  # noqa: E402
from sklearn.neural_network import MLPClassifier  # noqa: E402
from sklearn.pipeline import Pipeline, make_pipeline  # noqa: E402
from sklearn.preprocessing import (  # noqa: E402
    FunctionTransformer,
    OneHotEncoder,
    RobustScaler,
    StandardScaler,
)

import cerebro  # noqa: E402
from cerebro.errors import InputError  # noqa: E402
from cerebro.sklearn import SearchCV  # noqa: E402

RNG = np.random.default_rng(0)
X = RNG.normal(5.0, 3.0, (90, 3))
Y = (X[:, 0] + RNG.normal(0, 2, 90) > 5).astype(int)
SMOOTHING = {"gaussiannb__var_smoothing": [1e-9, 0.1]}  # an estimator for which batches matter not


def scores(search: Any, x: Any = X, y: Any = Y) -> Any:
    return search.fit(x, y).cv_results_["mean_test_score"]


def search_cv(estimator: Any, space: Any = SMOOTHING, **options: Any) -> SearchCV:
    return SearchCV(estimator, space, **{"epochs": 1, "workers": 0, "cv": 3, **options})


@pytest.mark.parametrize("scaler", [StandardScaler, RobustScaler])  # learns by batch; does not
def test_a_step_that_overwrites_rows_has_the_scores_of_one_that_copies(scaler: Any) -> None:
    found = []
    for copy in (True, False):
        model = make_pipeline(scaler(copy=copy), SGDClassifier(random_state=0, loss="log_loss"))
        search = search_cv(
            model, {"sgdclassifier__alpha": [1e-4, 0.1]}, epochs=3, return_train_score=True,
            scoring=["accuracy", "neg_log_loss"], refit="accuracy",
        ).fit(X.copy(), Y)  # fmt: skip
        table = search.cv_results_
        found.append([v for k, v in table.items() if "_test_" in k or "_train_" in k])
        assert search.best_estimator_[0].copy is copy
    np.testing.assert_array_equal(*found)

    def build(config: dict[str, Any]) -> Any:
        return make_pipeline(StandardScaler(copy=config["copy"]), SGDClassifier(random_state=0))

    plain, overwriting = cerebro.search(
        build, {"copy": [True, False]}, (X, Y), epochs=3, validation=0.3, searcher="grid",
        batch_size=16, workers=0, progress=False,
    ).trials  # fmt: skip
    assert plain.metrics == overwriting.metrics


PROGRAM = """
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.model_selection import GridSearchCV
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from cerebro.sklearn import SearchCV
import numpy as np


class Center(TransformerMixin, BaseEstimator):
    def fit(self, X, y=None):
        self.mean_ = X.mean(axis=0)
        return self

    def transform(self, X):
        return X - self.mean_


if __name__ == "__main__":
    x = np.random.default_rng(0).normal(size=(90, 3))
    y = (x[:, 0] > 0).astype(int)
    model = make_pipeline(FunctionTransformer(lambda x: 2 * x), Center(), GaussianNB())
    space = {"gaussiannb__var_smoothing": [1e-9, 1.0]}
    expected = GridSearchCV(model, space, cv=3).fit(x, y).cv_results_["mean_test_score"]
    for workers in (0, 1):
        found = SearchCV(model, space, epochs=1, cv=3, workers=workers).fit(x, y)
        np.testing.assert_array_equal(found.cv_results_["mean_test_score"], expected)
        np.testing.assert_array_equal(found.predict(x), found.best_estimator_.predict(x))
"""


def test_steps_may_be_classes_and_functions_of_the_users_script(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PROGRAM)
    ended = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr


class Columns(TransformerMixin, BaseEstimator):
    """Learns nothing, not even how many features there are."""

    def __init__(self, names: Any = ("a",)) -> None:
        self.names = names

    def fit(self, x: Any, y: Any = None) -> Columns:
        return self

    def transform(self, x: Any) -> Any:
        return x[list(self.names)].to_numpy()


def test_a_step_that_learns_nothing_may_be_just_before_the_estimator() -> None:
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    model, space = make_pipeline(Columns(), GaussianNB()), {"columns__names": [("a",), ("b", "c")]}
    expected = scores(GridSearchCV(model, space, cv=3), frame)
    np.testing.assert_array_equal(scores(search_cv(model, space), frame), expected)


def test_rows_that_a_fold_leaves_out_reach_no_step() -> None:
    frame = pd.DataFrame({"c": ["a", "b"] * 44 + ["new", "new"], "v": X[:, 0]})
    folds = [(np.arange(50), np.arange(50, 80)), (np.arange(40, 80), np.arange(40))]
    encoder = ColumnTransformer([("c", OneHotEncoder(), ["c"])], remainder="passthrough")
    model, options = make_pipeline(encoder, GaussianNB()), {"cv": folds, "refit": False}
    expected = scores(GridSearchCV(model, SMOOTHING, **options), frame)
    np.testing.assert_array_equal(scores(search_cv(model, **options), frame), expected)

    def standardize(x: Any) -> Any:  # by the rows that it gets
        return (x - x.mean(0)) / x.std(0)

    model = make_pipeline(FunctionTransformer(standardize), GaussianNB())
    drifting, splits = X[:, :1] + np.arange(90)[:, None] * 0.1, TimeSeriesSplit(4)
    expected = scores(GridSearchCV(model, SMOOTHING, cv=splits), drifting)
    np.testing.assert_array_equal(scores(search_cv(model, cv=splits), drifting), expected)


def test_naive_bayes_counts_each_row_once_by_default() -> None:
    counts = RNG.poisson(0.3, (90, 40))
    target = (counts[:, :5].sum(1) > 1).astype(int)
    space = {"alpha": [100.0, 20.0, 2.0]}
    expected = scores(GridSearchCV(MultinomialNB(), space, cv=3), counts, target)
    search = SearchCV(MultinomialNB(), space, cv=3, workers=0)
    np.testing.assert_array_equal(scores(search, counts, target), expected)
    assert search.best_estimator_.class_count_.sum() == 90
    assert SearchCV(SGDClassifier(), {}, workers=0, cv=3).fit(X, Y).best_epochs_ > 1
    with pytest.warns(UserWarning, match="MultinomialNB counts every row .* give epochs=1"):
        search_cv(MultinomialNB(), space, epochs=2).fit(counts, target)
    both = Pipeline([("same", FunctionTransformer()), ("last", SGDClassifier())])
    kinds = {"last": [SGDClassifier(random_state=0), MultinomialNB()]}
    with pytest.warns(UserWarning, match="MultinomialNB counts every row .* after 10 epochs"):
        search_cv(both, kinds, epochs=None).fit(counts, target)


def test_parameters_without_effect_are_named() -> None:
    with pytest.warns(UserWarning, match="max_iter has no effect, because partial_fit"):
        search_cv(SGDClassifier(), {"max_iter": [1, 5]}).fit(X, Y)
    with pytest.warns(UserWarning, match="sgdclassifier__tol has no effect"):
        search_cv(
            make_pipeline(StandardScaler(), SGDClassifier()), {"sgdclassifier__tol": [1e-3, None]}
        ).fit(X, Y)
    with warnings.catch_warnings():  # which decides when an adaptive learning rate falls
        warnings.simplefilter("error", UserWarning)
        search_cv(MLPClassifier((2,), batch_size=8), {"tol": [1e-3]}, refit=False).fit(X, Y)


def test_choices_may_be_infinite_missing_or_long() -> None:
    chosen = SelectFromModel(LogisticRegression(), max_features=2)
    model, space = make_pipeline(chosen, GaussianNB()), {"selectfrommodel__threshold": [-np.inf, 0]}
    search = search_cv(model, space)
    np.testing.assert_array_equal(scores(search), scores(GridSearchCV(model, space, cv=3)))
    assert search.cv_results_["params"] == [{"selectfrommodel__threshold": v} for v in (-np.inf, 0)]
    model = make_pipeline(SimpleImputer(), GaussianNB())
    space = {"simpleimputer__missing_values": [np.nan, -1]}
    np.testing.assert_array_equal(
        scores(search_cv(model, space)), scores(GridSearchCV(model, space, cv=3))
    )
    wide = pd.DataFrame(RNG.normal(size=(90, 60)), columns=[f"c{i}" for i in range(60)])
    few, many = (ColumnTransformer([("s", RobustScaler(), [*wide][:n])]) for n in (35, 50))
    assert str(few) == str(many)  # scikit-learn shortens long lists
    model, space = Pipeline([("columns", few), ("nb", GaussianNB())]), {"columns": [few, many]}
    expected = scores(GridSearchCV(model, space, cv=3), wide)
    np.testing.assert_array_equal(scores(search_cv(model, space), wide), expected)


def test_errors_name_arguments_of_search_cv(tmp_path: Path) -> None:
    space = {"var_smoothing": loguniform(1e-9, 1)}
    with pytest.raises(InputError, match="give n_trials=, the number of configurations"):
        search_cv(GaussianNB(), space).fit(X, Y)
    folders = {"path": tmp_path / "data", "run": tmp_path / "run"}
    search = search_cv(GaussianNB(), space, n_trials=2, **folders).fit(X, Y)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file: choose another"):
        search.set_params(path=None, run=tmp_path / "file").fit(X, Y)
    for name in folders:
        with pytest.raises(InputError, match=f"{name}: .* has files already: give a new folder"):
            search.set_params(**{**folders, "path": None, "run": None, name: folders[name]})
            search.fit(X, Y)
    with pytest.raises(InputError, match="y has dates, which cannot be classes here"):
        search_cv(GaussianNB(), space, n_trials=1).fit(X, np.array(Y, "datetime64[D]"))


def test_numbers_of_columns_are_no_names() -> None:
    model = make_pipeline(FunctionTransformer(), GaussianNB())  # gives the frame on
    search = search_cv(model).fit(pd.DataFrame(X), Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        search.predict(pd.DataFrame(X))
