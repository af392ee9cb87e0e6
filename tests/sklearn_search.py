"""Run scikit-learn's own tests of its searches with SearchCV for GridSearchCV; count what fails.

    python tests/sklearn_search.py [arguments of pytest]

scikit-learn's tests search mostly over SVC and the like, which learn from all rows at once and
which SearchCV refuses. So that the search is tested, stand-ins that learn by batch take their
place: they have the same names of parameters. Tests that make no GridSearchCV are left out.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import sklearn.linear_model
import sklearn.model_selection
import sklearn.naive_bayes
import sklearn.svm

from cerebro.sklearn import SearchCV

TESTS = "sklearn.model_selection.tests.test_search"

# Patterns of a test's name or of its error, in this order.
REASONS = {
    "callbacks of scikit-learn 1.9": r"set_callbacks",
    "an estimator learns from all rows at once": r"no partial_fit",
    "an estimator is not scikit-learn's own": r"Cerebro does not know how to store",
    "metadata of the estimator other than sample_weight": r"passes sample_weight to the last",
    "a text of an error or a warning differs": r"Regex pattern did not match|`refit=False`. pred",
    "verbose= prints nothing": r"verbose_3",
    "cv_results_ has two more keys, epochs and status": r"'epochs', 'mean_fit_time'",
    "a value that is no list is a constant": r"bad_param_grid",
    "a scorer that fails leaves no score": r"fake_score_func\(\) takes 2",
    "the stand-in does not do what SVC or the mock does": r"dual_coef_|precomputed|pairwise|"
    r"weight_equivalence|tie_breaking|correct_score|proba_disabled|transform|test_grid_search$",
}


class GridSearchCV(SearchCV):
    """SearchCV with the arguments of GridSearchCV; it learns in one pass, in one process."""

    used = False
    epochs, batch_size, workers, random_state = 1, 10_000, 0, 0
    searcher, n_trials, stop, shuffle, shards, path, run, progress = "grid", *[None] * 7

    def __init__(
        self,
        estimator: Any,
        param_grid: Any,
        *,
        scoring: Any = None,
        n_jobs: Any = None,
        refit: Any = True,
        cv: Any = None,
        verbose: Any = 0,
        pre_dispatch: Any = "2*n_jobs",
        error_score: Any = np.nan,
        return_train_score: bool = False,
    ) -> None:
        self.estimator, self.param_grid, self.scoring = estimator, param_grid, scoring
        self.n_jobs = n_jobs
        self.refit, self.cv, self.verbose, self.pre_dispatch = refit, cv, verbose, pre_dispatch
        self.error_score, self.return_train_score = error_score, return_train_score

        GridSearchCV.used = True

    @property
    def space(self) -> Any:
        return self.param_grid

    def fit(self, *args: Any, **params: Any) -> Any:
        GridSearchCV.used = True
        return super().fit(*args, **params)


class SGDClassifier(sklearn.linear_model.SGDClassifier):
    """A linear classifier with the parameters of SVC, LinearSVC and LogisticRegression."""

    __module__ = "sklearn.linear_model"  # so that SearchCV takes it for scikit-learn's

    def __init__(
        self,
        C: float = 1.0,
        kernel: str = "linear",
        degree: int = 3,
        gamma: Any = "scale",
        probability: bool = False,
        dual: Any = "auto",
        solver: Any = None,
        max_iter: int = 1000,
        loss: str = "log_loss",
        random_state: Any = 0,
        tol: Any = 1e-3,
        class_weight: Any = None,
    ) -> None:
        super().__init__(
            loss=loss, random_state=random_state, class_weight=class_weight, tol=tol,
            max_iter=max_iter,
        )  # fmt: skip
        self.C, self.kernel, self.degree, self.gamma = C, kernel, degree, gamma
        self.probability, self.dual, self.solver = probability, dual, solver

    @property
    def alpha(self) -> float:
        return 1e-3 / self.C

    @alpha.setter
    def alpha(self, value: float) -> None:
        pass


class GaussianNB(sklearn.naive_bayes.GaussianNB):
    """What the tests call MockClassifier: its score is that of its parameter."""

    __module__ = "sklearn.naive_bayes"

    def __init__(self, foo_param: Any = 0) -> None:
        self.foo_param = foo_param

    def fit(self, X: Any, Y: Any) -> Any:
        return self.partial_fit(X, Y, classes=np.unique(Y))

    def partial_fit(self, X: Any, Y: Any, classes: Any = None) -> Any:
        assert len(X) == len(Y)
        self.n_features_in_ = 1
        self.classes_ = self.classes_ if classes is None else np.asarray(classes)
        return self

    def predict(self, T: Any) -> Any:
        return np.full(len(T), self.classes_[0])

    decision_function = transform = inverse_transform = predict

    def predict_proba(self, T: Any) -> Any:
        return np.full((len(T), len(self.classes_)), 1 / len(self.classes_))

    def score(self, X: Any = None, Y: Any = None) -> float:
        return 1.0 if self.foo_param > 1 else 0.0


class Counts:
    """A plugin of pytest that swaps the names and counts outcomes."""

    def __init__(self) -> None:
        self.outcomes: dict[str, list[str]] = defaultdict(list)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        for item in items:
            item.module.MockClassifier = GaussianNB

    def pytest_runtest_setup(self) -> None:
        GridSearchCV.used = False

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and GridSearchCV.used:
            self.outcomes[_reason(report)].append(report.nodeid.partition("::")[2])


def _reason(report: Any) -> str:
    if not report.failed:
        return str(report.outcome)
    name = report.nodeid.partition("::")[2]
    for reason, pattern in REASONS.items():
        if re.search(pattern, name) or re.search(pattern, report.longreprtext):
            return reason
    return "other"


def main() -> None:
    sklearn.model_selection.GridSearchCV = GridSearchCV
    sklearn.svm.SVC = sklearn.svm.LinearSVC = SGDClassifier
    sklearn.linear_model.LogisticRegression = SGDClassifier
    sklearn.naive_bayes.GaussianNB = GaussianNB  # so that it pickles
    counts = Counts()
    options = ["-q", "-p", "no:cacheprovider", "-W", "ignore", "--pyargs", TESTS, *sys.argv[1:]]
    pytest.main(options, plugins=[counts])
    for reason, names in sorted(counts.outcomes.items(), key=lambda item: -len(item[1])):
        print(f"{len(names):4} {reason}: {', '.join(names) if reason != 'passed' else ''}")


if __name__ == "__main__":
    main()
