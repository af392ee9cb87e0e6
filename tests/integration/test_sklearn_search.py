"""cerebro.sklearn.SearchCV beside scikit-learn's own searches."""

from __future__ import annotations

import math
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cerebro
import cerebro._core as _core
from cerebro.control import Clone
from cerebro.errors import InputError, RunError
from cerebro.machine import generators

pytest.importorskip("sklearn")
from sklearn import config_context
from sklearn.base import clone, is_classifier, is_regressor
from sklearn.cluster import MiniBatchKMeans
from sklearn.datasets import load_digits, make_regression
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import (
    LogisticRegression,
    PassiveAggressiveClassifier,
    SGDClassifier,
    SGDRegressor,
)
from sklearn.model_selection import GridSearchCV, GroupKFold, ShuffleSplit, cross_val_score
from sklearn.naive_bayes import MultinomialNB
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import MinMaxScaler, RobustScaler, StandardScaler
from sklearn.utils import get_tags
from sklearn.utils.estimator_checks import check_estimator

from cerebro.sklearn import SearchCV

ALPHAS = {"alpha": [0.01, 1.0, 30.0]}


@pytest.fixture(scope="module")
def digits() -> tuple[Any, Any]:
    x, y = load_digits(n_class=4, return_X_y=True)
    return x[:200], y[:200]


def search_cv(estimator: Any = None, space: Any = None, **options: Any) -> SearchCV:
    options = {"searcher": "grid", "epochs": 1, "cv": 3, "workers": 0, **options}
    return SearchCV(estimator or MultinomialNB(), space or ALPHAS, **options)


class Interrupting:
    """A scorer during whose call with this number the user presses Ctrl-C."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, estimator: Any, x: Any, y: Any) -> float:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return float(estimator.score(x, y))


def test_an_interrupt_message_suggests_only_what_works(digits: Any, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        search_cv(scoring=Interrupting(8)).fit(*digits)
    assert str(caught.value).startswith("interrupted: nothing is kept; SearchCV(run=...)")
    with pytest.raises(KeyboardInterrupt) as caught:
        search_cv(scoring=Interrupting(8), run=tmp_path / "run").fit(*digits)
    kept, see = str(caught.value).splitlines()
    assert "are kept in" in kept and kept.endswith(", but SearchCV cannot resume them")
    assert see == f"to see them:  result = cerebro.open({str(tmp_path / 'run')!r})"
    assert vars(caught.value)["_render_traceback_"]() == [kept, see]
    assert len(cerebro.open(tmp_path / "run")) == 3


SHARED = ("mean_test_score", "std_test_score", "rank_test_score", "param_alpha")


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cv": ShuffleSplit(4, test_size=0.3, random_state=1)},
        {"cv": [(np.arange(50, 200), np.arange(50)), (np.arange(120), np.arange(120, 190))]},
        {"scoring": "neg_log_loss"},
        {"scoring": lambda estimator, x, y: float((estimator.predict(x) == y)[y > 0].mean())},
    ],
)
def test_results_match_grid_search_cv_if_batches_do_not_matter(digits: Any, options: Any) -> None:
    """Naive Bayes counts: fitted at once or by batch, in any order, it is the same."""
    x, y = digits
    options = {"cv": 3, **options}
    theirs = GridSearchCV(MultinomialNB(), ALPHAS, **options).fit(x, y)
    ours = search_cv(**options).fit(x, y)
    assert ours.n_splits_ == theirs.n_splits_
    splits = [f"split{fold}_test_score" for fold in range(ours.n_splits_)]
    exact = "scoring" not in options or callable(options["scoring"])
    for name in (*splits, *SHARED):
        tolerance = {"rtol": 0 if exact else 1e-12}
        np.testing.assert_allclose(
            np.asarray(ours.cv_results_[name], float),
            np.asarray(theirs.cv_results_[name], float),
            **tolerance,
        )
    assert ours.cv_results_["params"] == theirs.cv_results_["params"]
    assert ours.best_index_ == theirs.best_index_
    assert ours.best_params_ == theirs.best_params_
    assert ours.best_score_ == pytest.approx(theirs.best_score_, rel=1e-12)
    np.testing.assert_array_equal(
        ours.best_estimator_.feature_log_prob_, theirs.best_estimator_.feature_log_prob_
    )
    np.testing.assert_array_equal(ours.predict(x), theirs.predict(x))
    np.testing.assert_array_equal(ours.predict_proba(x), theirs.predict_proba(x))
    assert ours.score(x, y) == theirs.score(x, y)
    missing = set(theirs.cv_results_) - set(ours.cv_results_)
    assert missing == set()


@pytest.mark.parametrize("as_objects", [False, True])
def test_predictions_and_scores_use_the_callers_labels(digits: Any, as_objects: bool) -> None:
    x, y = digits
    names = np.array(["zero", "one", "two", "three"])[y]
    if as_objects:
        names = names.astype(object)
    theirs = GridSearchCV(MultinomialNB(), ALPHAS, cv=3, scoring="f1_macro").fit(x, names)
    ours = search_cv(scoring="f1_macro").fit(x, names)
    assert ours.classes_.tolist() == ["one", "three", "two", "zero"]
    assert ours.best_estimator_.classes_.tolist() == ours.classes_.tolist()
    np.testing.assert_array_equal(
        ours.cv_results_["mean_test_score"], theirs.cv_results_["mean_test_score"]
    )
    np.testing.assert_array_equal(ours.predict(x), theirs.predict(x))


def test_groups_stay_together(digits: Any) -> None:
    x, y = digits
    groups = np.arange(len(y)) // 20
    theirs = GridSearchCV(MultinomialNB(), ALPHAS, cv=GroupKFold(3)).fit(x, y, groups=groups)
    ours = search_cv(cv=GroupKFold(3)).fit(x, y, groups=groups)
    for fold in range(3):
        name = f"split{fold}_test_score"
        np.testing.assert_array_equal(ours.cv_results_[name], theirs.cv_results_[name])


def test_results_depend_on_the_seed_and_not_on_workers(digits: Any) -> None:
    """The seed decides, and the number of workers does not."""
    x, y = digits

    def scores(**options: Any) -> list[float]:
        made = search_cv(
            SGDClassifier(), {"alpha": cerebro.loguniform(1e-6, 1e-1)},
            searcher="random", n_trials=3, epochs=2, batch_size=16, **options,
        ).fit(x, y)  # fmt: skip
        results = made.cv_results_
        values = [*results["mean_test_score"], *results["param_alpha"]]
        return [float(v) for v in [*values, *made.best_estimator_.coef_.ravel()]]

    first = scores(workers=0)
    assert scores(workers=2) == first
    assert scores(random_state=1) != first
    assert scores(random_state=np.random.RandomState(7)) == scores(
        random_state=np.random.RandomState(7)
    )


def test_the_best_is_trained_on_all_rows(digits: Any, tmp_path: Path) -> None:
    """A plain loop over the same batches gives the same estimator."""
    x, y = digits
    made = search_cv(
        SGDClassifier(), {"alpha": [1e-3], "batch_size": [8, 32]},
        epochs=3, path=tmp_path / "data", random_state=4,
    ).fit(x, y)  # fmt: skip
    data = cerebro.Dataset(tmp_path / "data")
    assert len(data) == len(x)
    assert 1 <= made.best_epochs_ <= 3
    assert made.best_epochs_ == made.cv_results_["epochs"][made.best_index_]
    plain = SGDClassifier(alpha=1e-3)
    seed = _core.trial_seed(4, 0) % 2**32
    with generators.preserve_generators(False, seed):
        for epoch in range(made.best_epochs_):
            batches = data.batches(
                made.best_params_["batch_size"], seed=4, epoch=epoch, framework="numpy"
            )
            for batch in batches:
                plain.partial_fit(batch["x"], batch["y"], classes=np.arange(4))
    np.testing.assert_array_equal(made.best_estimator_.coef_, plain.coef_)
    assert made.refit_time_ > 0


def test_refit_false_leaves_no_best_estimator(digits: Any) -> None:
    x, y = digits
    made = search_cv(refit=False).fit(x, y)
    assert made.best_params_["alpha"] in ALPHAS["alpha"]
    assert not hasattr(made, "best_estimator_")
    with pytest.raises(AttributeError, match="has no attribute 'predict'") as raised:
        made.predict(x)
    assert "was made with refit=False" in str(raised.value.__cause__)
    with pytest.raises(AttributeError, match="was made with refit=False"):
        made.score(x, y)
    theirs = GridSearchCV(MultinomialNB(), ALPHAS, refit=False, cv=3)
    for one in (made, search_cv(refit=False)):
        for name in ("predict", "predict_proba", "predict_log_proba", "decision_function", "score"):
            assert hasattr(one, name) == hasattr(theirs, name), name
    chosen = search_cv(refit=lambda results: int(np.argmin(results["mean_test_score"]))).fit(x, y)
    assert chosen.best_index_ == np.argmin(chosen.cv_results_["mean_test_score"])
    assert chosen.best_estimator_.alpha == ALPHAS["alpha"][chosen.best_index_]


def test_a_regressor_works_with_an_adaptive_searcher() -> None:
    x, y = make_regression(150, 5, noise=1.0, random_state=0)
    made = search_cv(
        SGDRegressor(), {"alpha": cerebro.loguniform(1e-6, 1e-1)},
        searcher="hyperband", epochs=4, scoring="r2",
    ).fit(x, y / y.std())  # fmt: skip
    assert is_regressor(made)
    assert not is_classifier(made)
    assert made.best_score_ > 0.85
    assert not hasattr(made, "predict_proba")
    assert not hasattr(made, "classes_")
    assert set(made.cv_results_["status"]) == {"finished", "stopped"}


def test_temporary_folders_are_removed_and_given_folders_kept(
    digits: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    x, y = digits
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    made = search_cv().fit(x, y)
    assert list(tmp_path.glob("cerebro-search-*")) == []
    assert not hasattr(made, "result_")
    kept = search_cv(path=tmp_path / "data", run=tmp_path / "run").fit(x, y)
    assert kept.result_.verify()
    assert len(kept.result_.trials) == 3
    estimator = kept.result_.best.load("last", fold=0).estimator
    assert estimator.predict(x).tolist() == pytest.approx(y.tolist(), abs=3)


def test_search_cv_works_with_clone_pipelines_and_cross_validation(digits: Any) -> None:
    x, y = digits
    made = search_cv(SGDClassifier(), {"alpha": [1e-4, 1e-2]}, epochs=2)
    copy = clone(made).set_params(estimator__penalty="l1", epochs=3)
    assert copy.estimator.penalty == "l1"
    assert (made.epochs, made.estimator.penalty) == (2, "l2")
    assert made.get_params()["estimator__alpha"] == 0.0001
    scores = cross_val_score(make_pipeline(StandardScaler(), made), x, y, cv=2)
    assert scores.min() > 0.7
    with pytest.raises(NotFittedError):
        made.predict(x)


def test_feature_names_are_taken_from_a_data_frame(digits: Any) -> None:
    pandas = pytest.importorskip("pandas")
    x, y = digits
    frame = pandas.DataFrame(x, columns=[f"pixel {n}" for n in range(x.shape[1])])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made = search_cv().fit(frame, y)
        made.predict(frame)
    assert made.feature_names_in_.tolist() == list(frame.columns)
    assert made.n_features_in_ == 64


def test_a_configuration_that_fails_has_no_score(digits: Any) -> None:
    x, y = digits
    with pytest.warns(UserWarning, match="1 of 3 configurations failed, the first: .*alpha"):
        made = search_cv(space={"alpha": [0.1, -1.0, 1.0]}).fit(x, y)
    means = made.cv_results_["mean_test_score"]
    assert math.isnan(means[1])
    assert not np.isnan(means[[0, 2]]).any()
    assert made.cv_results_["rank_test_score"][1] == 3
    assert made.best_index_ != 1


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: search_cv(scoring=["accuracy", "f1_macro"]),
            InputError,
            "^refit=True does not say which of several .* best: give 'accuracy' or 'f1_macro', a",
        ),
        (
            lambda: search_cv(scoring={"a": "accuracy"}, refit="accuracy"),
            InputError,
            "^refit='accuracy' does not say .*: give 'a', a function of cv_results_, or False",
        ),
        (
            lambda: search_cv(LogisticRegression()),
            InputError,
            "LogisticRegression has no partial_fit",
        ),
        (
            lambda: search_cv(MLPClassifier(solver="lbfgs")),
            InputError,
            "^MLPClassifier has no partial_fit with solver='lbfgs'.*solver='adam' or 'sgd'",
        ),
        (
            lambda: search_cv(MLPClassifier(), {"solver": ["adam", "lbfgs"]}),
            InputError,
            "^space: solver='lbfgs': MLPClassifier has no partial_fit with solver='lbfgs'",
        ),
        (
            lambda: search_cv(
                make_pipeline(StandardScaler(), MLPClassifier()),
                {"mlpclassifier__solver": ["lbfgs"]},
            ),
            InputError,
            "^space: mlpclassifier__solver='lbfgs': step 'mlpclassifier' of the pipeline: MLP",
        ),
        (
            lambda: search_cv(MLPClassifier(), {"early_stopping": [False, True]}),
            InputError,
            "^space: early_stopping=True: .*stop=cerebro.EarlyStopping",
        ),
        (lambda: search_cv(batch_size=None), InputError, "^batch_size is missing: give batch_size"),
        (lambda: search_cv(MiniBatchKMeans()), InputError, "classifiers and regressors, not Mini"),
        (lambda: search_cv(space={"beta": [1]}), RunError, "Invalid parameter 'beta'"),
        (
            lambda: search_cv(cv=[([0, 1], [2, 999])]),
            InputError,
            "cv, fold 0: it must contain",
        ),
        (lambda: search_cv(cv=[([0, 1], [1, 2])]), InputError, "row .* is on both sides"),
        (lambda: search_cv(cv=1), ValueError, "n_splits"),
        (lambda: search_cv(epochs=0), InputError, "epochs must be"),
    ],
)
def test_invalid_searches_are_refused(digits: Any, make: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        make().fit(*digits)


@pytest.mark.parametrize(
    ("estimator", "space"),
    [
        (MLPClassifier(solver="lbfgs"), {"solver": ["adam", "sgd"]}),
        (MLPClassifier(solver="lbfgs"), {"alpha": [0.1, 0.2], "solver": "adam"}),
        (
            MLPClassifier(solver="lbfgs", early_stopping=True),
            {"alpha": [0.1, 0.2], "solver": ["adam"], "early_stopping": [False]},
        ),
        (SGDClassifier(class_weight="balanced"), {"class_weight": [None, {0: 1.0}]}),
        (
            make_pipeline(StandardScaler(), MLPClassifier(solver="lbfgs")),
            {"mlpclassifier__solver": ["adam", "sgd"]},
        ),
    ],
)
def test_the_space_replaces_a_parameter_that_cannot_be_searched(
    digits: Any, estimator: Any, space: Any
) -> None:
    found = search_cv(estimator, space).fit(*digits)
    assert set(found.cv_results_["status"]) == {"finished"}
    assert found.best_estimator_.predict(digits[0]).shape == digits[1].shape


def test_the_error_names_a_bad_choice_before_an_unsearchable_estimator(digits: Any) -> None:
    space = {"alpha": [0.1], "solver": ["lbfgs", "adam"]}
    with pytest.raises(InputError, match=r"^space: solver='lbfgs': MLPClassifier has no partial"):
        search_cv(MLPClassifier(solver="lbfgs"), space).fit(*digits)
    with pytest.raises(InputError, match=r"^MLPClassifier has no partial_fit with solver='lbfgs'"):
        search_cv(MLPClassifier(solver="lbfgs"), {"alpha": [0.1, 0.2]}).fit(*digits)


def test_a_configuration_that_fails_later_is_not_the_best(digits: Any) -> None:
    x, y = digits

    def score(estimator: Any, *_: Any) -> float:
        if estimator.alpha < 0.1 and estimator.class_count_.sum() > len(x):
            raise ValueError("in the second epoch")
        return float(1 / estimator.alpha)

    search = search_cv(scoring=score, epochs=2)
    with pytest.warns(UserWarning, match="1 of 3 configurations failed"):
        search.fit(x, y)
    assert (search.best_index_, search.best_score_) == (1, 1.0)
    assert search.cv_results_["rank_test_score"].tolist() == [3, 1, 2]


def test_messages_refer_only_to_arguments_the_user_gave(digits: Any, tmp_path: Path) -> None:
    def scoring(estimator: Any, x: Any, y: Any) -> float:
        raise ValueError("no score")

    with pytest.raises(RunError, match=r"failed.*ValueError: no score") as caught:
        search_cv(scoring=scoring).fit(*digits)
    assert "its traceback" not in str(caught.value)  # the run is gone
    with pytest.raises(RunError) as caught:
        search_cv(scoring=scoring, run=tmp_path / "run").fit(*digits)
    command = f"python -m cerebro logs {tmp_path / 'run'} --trial 0"
    assert str(caught.value).endswith(f"its traceback: {command}")
    lock = threading.Lock()
    with pytest.raises(InputError, match=r"^the estimator, the scoring or .* cannot be sent"):
        search_cv(scoring=lambda e, x, y: lock.locked(), workers=1).fit(*digits)


def test_invalid_targets_are_refused(digits: Any) -> None:
    x, y = digits
    with pytest.raises(InputError, match="only one class"):
        search_cv().fit(x, np.zeros(len(y), int))
    with pytest.raises(InputError, match="requires y to be passed"):
        search_cv().fit(x, None)
    with pytest.raises(ValueError, match="Unknown label type"):
        search_cv().fit(x, np.linspace(0, 1, len(y)))


@pytest.mark.parametrize(
    ("head", "fails"),
    [
        (None, []),
        # SGDClassifier on centred rows: no more does the pipeline alone when fitted at once.
        (StandardScaler(), ["check_classifiers_one_label_sample_weights"]),
        # A trial fails with TypeError, and SearchCV with the ValueError of scikit-learn's searches.
        (RobustScaler(), ["check_dtype_object"]),
    ],
)
def test_scikit_learns_estimator_checks_pass(head: Any, fails: list[str]) -> None:
    """The checks that scikit-learn makes of its own estimators."""
    made = SGDClassifier() if head is None else Pipeline([("head", head), ("clf", SGDClassifier())])
    space = {"alpha" if head is None else "clf__alpha": [1e-3]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = check_estimator(
            search_cv(made, space, cv=2, epochs=2), on_fail=None, on_skip=None
        )
    failed = {r["check_name"]: str(r["exception"]) for r in results if r["status"] == "failed"}
    assert list(failed) == fails, failed
    assert sum(r["status"] == "passed" for r in results) > 40


@pytest.mark.parametrize(
    "alphas", [np.logspace(-3, 0, 3), (0.001, 0.1, 1.0), range(1, 4), np.arange(1, 4)]
)
def test_arrays_ranges_and_tuples_are_choices(digits: Any, alphas: Any) -> None:
    search = search_cv(space={"alpha": alphas}).fit(*digits)
    assert [params["alpha"] for params in search.cv_results_["params"]] == list(alphas)


def test_random_search_tries_each_combination_once(digits: Any) -> None:
    space = {"alpha": [0.1, 1.0, 10.0], "fit_prior": [True, False]}
    search = search_cv(space=space, searcher="random", n_trials=20)
    with pytest.warns(UserWarning, match="only 6 configurations, fewer than n_trials=20"):
        search.fit(*digits)
    tried = [str(params) for params in search.cv_results_["params"]]
    assert len(tried) == len(set(tried)) == 6


def test_boolean_masks_may_define_folds(digits: Any) -> None:
    x, y = digits
    mask = np.arange(len(x)) % 3 == 0
    pairs = [(~mask, mask)], [(np.flatnonzero(~mask), np.flatnonzero(mask))]
    one, two = (search_cv(cv=cv).fit(x, y).cv_results_["mean_test_score"] for cv in pairs)
    assert list(one) == list(two)


def test_a_refit_index_out_of_range_is_refused(digits: Any) -> None:
    with pytest.raises(
        IndexError, match="refit returned the index -1, but there are 3 configurations"
    ):
        search_cv(refit=lambda results: -1).fit(*digits)
    with pytest.raises(TypeError, match="must return the index"):
        search_cv(refit=lambda results: "best").fit(*digits)


def test_non_finite_scores_warn(digits: Any) -> None:
    search = search_cv(scoring=lambda estimator, x, y: math.nan if estimator.alpha > 1 else 1.0)
    with pytest.warns(UserWarning, match="One or more of the test scores are non-finite"):
        search.fit(*digits)


def test_a_function_of_several_scores_needs_the_name_of_one(digits: Any) -> None:
    search = search_cv(scoring=lambda estimator, x, y: {"a": 1.0, "b": 2.0})
    with pytest.raises(RunError, match=r"refit=True does not say which .*: give 'a' or 'b'"):
        search.fit(*digits)


def test_several_labels_are_not_promised() -> None:
    assert not get_tags(search_cv(MLPClassifier())).classifier_tags.multi_label


def test_unsupported_arguments_and_estimators_are_named(digits: Any) -> None:
    x, y = digits
    with pytest.raises(InputError, match="weight to the last step, not coef_init: use"):
        search_cv().fit(x, y, coef_init=np.ones(len(x)))
    with pytest.raises(InputError, match=r"LogisticRegression has no partial_fit.*GridSearchCV"):
        search_cv(LogisticRegression()).fit(x, y)


def test_a_pipeline_is_searched_and_refitted(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 4)) * [1, 10, 100, 1000]
    y = np.where(x[:, 1] + x[:, 2] / 10 > 0, "up", "down")
    made = make_pipeline(StandardScaler(), SGDClassifier(random_state=0))
    search = search_cv(made, {"sgdclassifier__alpha": [1e-4, 10.0]}, epochs=3, batch_size=16)
    search.fit(x, y)
    assert search.best_params_ == {"sgdclassifier__alpha": 1e-4}
    assert search.score(x, y) > 0.8
    assert search.best_estimator_[0].n_samples_seen_ == 90 * search.best_epochs_
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(x, columns=list("abcd"))
    expected = list(search.predict(x))
    assert list(search.fit(frame, y).predict(frame)) == expected


def test_sample_weights_match_those_of_grid_search_cv(digits: Any) -> None:
    """Naive Bayes counts weights: by batch, it is what scikit-learn's search fits at once."""
    x, y = digits
    weights = np.where(y == 3, 5.0, np.linspace(0, 2, len(y)))
    given = {"sample_weight": weights}
    theirs = GridSearchCV(MultinomialNB(), ALPHAS, cv=3).fit(x, y, **given)
    ours = search_cv().fit(x, y, **given)
    for name in SHARED:
        np.testing.assert_allclose(  # the weights are summed in a different order
            np.asarray(ours.cv_results_[name], float),
            np.asarray(theirs.cv_results_[name], float),
            rtol=1e-12,
        )
    found, expected = (search.best_estimator_.feature_log_prob_ for search in (ours, theirs))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert not np.allclose(found, search_cv().fit(x, y).best_estimator_.feature_log_prob_)


def test_weights_that_cannot_be_used_are_refused(digits: Any) -> None:
    x, y = digits
    with pytest.raises(ValueError, match="Negative values"):
        search_cv().fit(x, y, sample_weight=-np.ones(len(x)))
    with pytest.raises(ValueError, match=r"sample_weight\.shape"):
        search_cv().fit(x, y, sample_weight=np.ones(3))
    perceptron = PassiveAggressiveClassifier()
    with pytest.raises(InputError, match="partial_fit takes no sample_weight: leave out"):
        search_cv(perceptron, {"C": [1.0]}).fit(x, y, sample_weight=np.ones(len(x)))


def test_choices_that_are_tuples_stay_tuples(digits: Any) -> None:
    pandas = pytest.importorskip("pandas")
    made = make_pipeline(MinMaxScaler(), MLPClassifier(random_state=0))
    ranges, sizes = [(0, 1), (-1, 1)], ((5,), (4, 3))
    space = {
        "minmaxscaler__feature_range": ranges,
        "when": cerebro.when(
            "minmaxscaler__feature_range", [(-1, 1)], {"mlpclassifier__hidden_layer_sizes": sizes}
        ),
    }
    search = search_cv(made, space).fit(*digits)
    params = [
        {"minmaxscaler__feature_range": (0, 1)},
        *(
            {"minmaxscaler__feature_range": (-1, 1), "mlpclassifier__hidden_layer_sizes": size}
            for size in sizes
        ),
    ]
    assert search.cv_results_["params"] == params
    assert search.best_params_ == params[search.best_index_]
    assert search.best_estimator_[0].feature_range == params[search.best_index_].get(
        "minmaxscaler__feature_range"
    )
    column = search.cv_results_["param_mlpclassifier__hidden_layer_sizes"]
    assert column.mask.tolist() == [True, False, False]
    assert column[1:].tolist() == list(sizes)
    table = pandas.DataFrame(search.cv_results_)
    groups = table.groupby("param_minmaxscaler__feature_range")["mean_test_score"].count()
    assert groups.to_dict() == {(0, 1): 1, (-1, 1): 2}
    again = search_cv(made, cerebro.Space({"mlpclassifier__hidden_layer_sizes": list(sizes)}))
    assert [
        p["mlpclassifier__hidden_layer_sizes"] for p in again.fit(*digits).cv_results_["params"]
    ] == list(sizes)


@pytest.mark.parametrize("named", [False, True])
def test_class_weights_are_choices(digits: Any, named: bool, tmp_path: Path) -> None:
    x, y = digits
    target = np.array(["zero", "one", "two", "three"])[y] if named else y
    labels = np.unique(target)
    weights = [None, dict.fromkeys(labels, 1.0), dict(zip(labels, [50.0, 1, 1, 1], strict=True))]
    made = SGDClassifier(random_state=0)
    space = {"class_weight": weights, "alpha": [1e-3]}
    search = search_cv(made, space, run=tmp_path / "run").fit(x, target)
    assert [params["class_weight"] for params in search.cv_results_["params"]] == weights
    assert search.cv_results_["param_class_weight"].tolist() == weights
    scores = search.cv_results_["mean_test_score"]
    assert scores[0] == scores[1] != scores[2]
    alone = search_cv(made.set_params(class_weight=weights[2]), {"alpha": [1e-3]}, refit=False)
    assert (
        search_cv(SGDClassifier(random_state=0), {"class_weight": weights[2:], "alpha": [1e-3]})
        .fit(x, target)
        .best_score_
        == alone.fit(x, target).best_score_
    )
    # Tables of the run show the weights, not a number.
    names = ["one", "three", "two", "zero"] if named else [0, 1, 2, 3]
    stored = [trial.config["class_weight"] for trial in search.result_.trials]
    assert stored[1] == str(dict.fromkeys(names, 1.0))


def test_a_bare_mapping_in_the_space_is_refused(digits: Any) -> None:
    space = {"class_weight": {0: 1.0, 1: 20.0}}
    with pytest.raises(
        InputError,
        match=r"space: 'class_weight' is a mapping, .*: give \[\{0: 1\.0, 1: 20\.0\}\] for a",
    ):
        search_cv(SGDClassifier(), space).fit(*digits)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("everywhere", [False, True])
def test_steps_may_have_pandas_output(workers: int, everywhere: bool) -> None:
    pandas = pytest.importorskip("pandas")
    x, y = make_regression(90, 4, random_state=0)
    frame = pandas.DataFrame(x, columns=list("abcd"))
    made = make_pipeline(StandardScaler(), MinMaxScaler(), SGDRegressor(random_state=0))
    if not everywhere:
        made.set_output(transform="pandas")
    with config_context(transform_output="pandas" if everywhere else "default"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            search = search_cv(
                made, {"sgdregressor__alpha": [1e-4, 1e-2]}, workers=workers, scoring=_reads_names
            ).fit(frame, y)
            search.predict(frame)
        names = [list(step.feature_names_in_) for step in search.best_estimator_]
    assert names == [list("abcd")] * 3
    # Batches have no names, but scorers see those of the frame.
    assert list(search.cv_results_["mean_test_score"]) == [4.0, 4.0]


def _reads_names(estimator: Any, x: Any, y: Any) -> float:
    assert list(estimator[-1].feature_names_in_) == list(x.columns) == list("abcd")
    return float(len(estimator[:-1].transform(x).columns))


def test_a_warm_clone_with_other_sizes_is_refused(tmp_path):
    def build(config):
        estimator = MLPClassifier((config["width"],), learning_rate_init=config["lr"])
        return cerebro.sklearn.Model(estimator)

    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4))
    result = cerebro.search(
        build,
        {"lr": [0.01], "width": [8]},
        (x, (x[:, 0] > 0).astype(int)),
        epochs=1,
        batch_size=20,
        searcher="grid",
        workers=0,
        run=tmp_path / "run",
        progress=False,
    )
    with pytest.raises(cerebro.InputError, match=r"width changes .*from \(8,\) to \(4,\): clone"):
        cerebro.resume(result, build, actions=[Clone(0, {"width": 4}, epochs=2)])
    result = cerebro.resume(result, build, actions=[Clone(0, {"lr": 0.1}, epochs=2)])
    assert [trial.status for trial in result.trials] == ["finished"] * 2
    result = cerebro.resume(result, build, actions=[Clone(0, {"width": 4}, cold=True)])
    assert len(result.trials[2].load().estimator.coefs_[1]) == 4
