"""Several scores, training scores, lists of grids and metadata: SearchCV beside GridSearchCV."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn")
pytest.importorskip("pandas")
import pandas
from sklearn import config_context
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import SGDClassifier
from sklearn.metrics import accuracy_score, f1_score, get_scorer, make_scorer
from sklearn.model_selection import GridSearchCV, GroupKFold, cross_validate
from sklearn.naive_bayes import BernoulliNB, MultinomialNB
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import MinMaxScaler, OneHotEncoder, PolynomialFeatures, StandardScaler

from cerebro.errors import InputError
from cerebro.sklearn import SearchCV

RNG = np.random.default_rng(0)
FRAME = pandas.DataFrame(
    {"age": RNG.normal(size=90), "fare": RNG.random(90), "port": RNG.choice(["a", "b"], 90)}
)
Y = pandas.Series((FRAME.fare + (FRAME.port == "a") > 0.9).astype(int), name="alive")
FRAME.loc[::7, "age"] = np.nan
NUMBERS = FRAME[["fare"]].assign(port=FRAME.port == "a", more=RNG.random(90)).to_numpy(float)
WEIGHTS = np.linspace(0, 2, 90) ** 2
OTHERS = np.linspace(3, 1, 90)
GROUPS = np.arange(90) // 6
ALPHAS = {"alpha": [0.1, 30.0]}
NUMERIC = make_pipeline(SimpleImputer(), MinMaxScaler())
COLUMNS = ColumnTransformer([("n", NUMERIC, ["age", "fare"]), ("port", OneHotEncoder(), ["port"])])
PIPELINE = Pipeline([("columns", COLUMNS), ("clf", MultinomialNB())])


def compare(estimator: Any, space: Any, x: Any, *fit: Any, **options: Any) -> tuple[Any, Any]:
    """Search with both; naive Bayes learns by batch what it learns at once: all must be equal."""
    options = {"cv": 3, **options}
    given = fit[0] if fit else {}
    theirs = GridSearchCV(estimator, space, **options).fit(x, Y, **given)
    ours = SearchCV(estimator, space, epochs=1, workers=0, **options).fit(x, Y, **given)
    found, expected = ours.cv_results_, theirs.cv_results_
    assert set(found) - set(expected) == {"epochs", "status"}
    for name, values in expected.items():
        if name.endswith("_time"):
            continue
        if name.startswith(("param", "rank")):
            assert str(found[name]) == str(values), name
        else:  # the sums of naive Bayes have another order
            np.testing.assert_allclose(found[name], values, rtol=1e-12, err_msg=name)
    for name in ("best_index_", "best_params_", "multimetric_", "scorer_", "n_splits_"):
        assert str(getattr(ours, name, None)) == str(getattr(theirs, name, None)), name
    assert hasattr(ours, "best_score_") == hasattr(theirs, "best_score_")
    assert getattr(ours, "best_score_", 0) == pytest.approx(getattr(theirs, "best_score_", 0))
    assert hasattr(ours, "best_estimator_") == hasattr(theirs, "best_estimator_")
    return theirs, ours


def two_scores(estimator: Any, x: Any, y: Any) -> dict[str, float]:
    return {"right": estimator.score(x, y), "share": float(np.mean(estimator.predict(x)))}


@pytest.mark.parametrize(
    "options",
    [
        {"scoring": ["accuracy", "f1", "neg_log_loss"], "refit": "f1"},
        {"scoring": ("accuracy", "f1"), "refit": "f1", "return_train_score": True},
        {"scoring": {"score": "accuracy", "loss": "neg_log_loss", "a b": "f1"}, "refit": "loss"},
        {"scoring": {"accuracy": "f1"}, "refit": "accuracy", "return_train_score": True},
        {"scoring": ["accuracy", "f1"], "refit": False},
        {"scoring": ["accuracy", "f1"], "refit": lambda table: table["rank_test_f1"].argmax()},
        {"scoring": two_scores, "refit": "share", "return_train_score": True},
        {"scoring": two_scores, "refit": False},
        {"scoring": "f1", "refit": "f1", "return_train_score": True},
        {"scoring": {"one": make_scorer(f1_score), "own": get_scorer("accuracy")}, "refit": "own"},
    ],
)
def test_scores_are_those_of_grid_search_cv(options: Any) -> None:
    theirs, ours = compare(MultinomialNB(), ALPHAS, NUMBERS, **options)
    if isinstance(options["refit"], str):
        assert ours.score(NUMBERS, Y) == pytest.approx(theirs.score(NUMBERS, Y), rel=1e-12)
    elif options["refit"]:
        with pytest.raises(InputError, match="score does not know which of several scores"):
            ours.score(NUMBERS, Y)


def test_of_several_scores_the_one_of_refit_chooses_the_epoch() -> None:
    """It is also the one that searchers and stop rules see."""
    made = SearchCV(
        SGDClassifier(random_state=0), {"alpha": [1e-4]}, cv=2, epochs=4, workers=0,
        scoring={"first": lambda e, x, y: -e.t_, "last": lambda e, x, y: e.t_}, refit="last",
    ).fit(NUMBERS, Y)  # fmt: skip
    assert made.best_epochs_ == made.cv_results_["epochs"][0] == 4
    again = made.set_params(refit="first", return_train_score=True).fit(NUMBERS, Y)
    table = again.cv_results_
    assert again.best_epochs_ == 1 and table["mean_test_first"] == -table["mean_test_last"]
    assert table["mean_train_last"] == table["mean_test_last"] > 0  # of the same epoch


@pytest.mark.filterwarnings("ignore")
def test_of_several_scores_one_may_fail() -> None:
    def rich(estimator: Any, x: Any, y: Any) -> float:
        if estimator.alpha > 1:
            raise ValueError("no such thing")
        return 1.0

    scoring = {"a": "accuracy", "b": rich}
    compare(MultinomialNB(), ALPHAS, NUMBERS, scoring=scoring, refit="a", return_train_score=True)
    made = SearchCV(MultinomialNB(), ALPHAS, scoring=scoring, refit="b", epochs=1, workers=0)
    with pytest.warns(UserWarning, match=r"1 of 2 .* failed.*: 'b' failed: ValueError: no such"):
        made.fit(NUMBERS, Y)
    assert made.best_index_ == 0


def test_training_scores_are_of_the_epoch_that_counts_and_change_nothing_else() -> None:
    options = {"cv": 3, "epochs": 3, "workers": 0, "scoring": "neg_log_loss"}
    made = make_pipeline(StandardScaler(), SGDClassifier(loss="log_loss", random_state=0))
    space = {"sgdclassifier__alpha": [1e-3, 1e-1]}
    plain = SearchCV(made, space, **options).fit(NUMBERS, Y)
    with_train = SearchCV(made, space, return_train_score=True, **options).fit(NUMBERS, Y)
    for name in ("split0_test_score", "mean_test_score", "epochs"):
        np.testing.assert_allclose(plain.cv_results_[name], with_train.cv_results_[name], 1e-12)
    np.testing.assert_array_equal(plain.predict_proba(NUMBERS), with_train.predict_proba(NUMBERS))
    assert (with_train.cv_results_["mean_train_score"] > -1).all()


@pytest.mark.parametrize("options", [{}, {"scoring": ["accuracy", "f1"], "refit": "f1"}])
def test_training_scores_of_a_pipeline_are_those_of_grid_search_cv(options: Any) -> None:
    compare(PIPELINE, {"clf__alpha": [0.1, 30.0]}, FRAME, return_train_score=True, **options)


@pytest.mark.parametrize(
    "grids",
    [
        [{"clf__alpha": [30.0, 0.1]}, {"clf": [BernoulliNB()], "clf__alpha": [1.0, 2.0]}],
        [{"columns__n__simpleimputer__strategy": ["median"], "clf__fit_prior": [True, False]}, {}],
        [{"clf__alpha": [0.1], "columns__port": ["drop"]}],
    ],
)
def test_lists_of_grids_are_searched_one_after_the_other(grids: Any) -> None:
    compare(PIPELINE, grids, FRAME)


def test_lists_that_are_no_grids_are_refused() -> None:
    for space, message in (
        ([{"batch_size": [8]}, {"alpha": [1.0]}], "give batch_size in each grid of the list, or"),
        ([], r"the space must be a mapping of names to dimensions, not \[\]"),
        ([{}, 3], r"the space must be a mapping of names to dimensions, not \[\{\}, 3\]"),
    ):
        with pytest.raises(InputError, match=message):
            SearchCV(MultinomialNB(), space, workers=0).fit(NUMBERS, Y)


def test_random_search_draws_from_lists_of_spaces() -> None:
    grids = [{"clf__alpha": [0.1, 1.0]}, {"clf": [BernoulliNB()], "clf__binarize": [0.0, 0.1, 0.2]}]
    made = SearchCV(PIPELINE, grids, n_trials=4, cv=2, epochs=1, workers=0).fit(FRAME, Y)
    drawn = [str(sorted(params)) for params in made.cv_results_["params"]]
    assert len(drawn) == 4 and set(drawn) == {"['clf', 'clf__binarize']", "['clf__alpha']"}


def first_rows(estimator: Any, x: Any, y: Any) -> float:
    """A score that depends on the order of rows, on names, and on the other columns."""
    assert list(estimator.feature_names_in_) == list(x.columns) == ["age", "fare", "port"]
    assert "port" in estimator.named_steps["columns"].named_transformers_
    assert y.name == "alive" and (x.index == y.index).all()
    rich = x.fare[:20] > 0.5
    return float((estimator.predict(x)[:20] == y[:20])[rich].mean())


def test_scorers_see_the_whole_pipeline_and_the_rows_as_given() -> None:
    theirs, ours = compare(PIPELINE, {"clf__alpha": [0.1, 30.0]}, FRAME, scoring=first_rows)
    assert ours.score(FRAME, Y) == theirs.score(FRAME, Y)
    frame = FRAME[["fare"]].assign(port=FRAME.port == "a")

    def names(estimator: Any, x: Any, y: Any) -> float:
        return float(list(estimator.feature_names_in_) == list(x.columns) == ["fare", "port"])

    compare(MultinomialNB(), ALPHAS, frame, scoring=names)
    compare(make_pipeline(MinMaxScaler(), BernoulliNB()), {}, frame, scoring=names)


def test_several_scores_do_not_depend_on_workers() -> None:
    options = {"scoring": two_scores, "refit": "right", "return_train_score": True, "epochs": 2}
    made = make_pipeline(PolynomialFeatures(), SGDClassifier(random_state=0))
    space = [{"sgdclassifier__alpha": [1e-3, 1e-2]}, {"polynomialfeatures__degree": [1]}]
    inline, two = (
        SearchCV(made, space, cv=2, workers=workers, **options).fit(NUMBERS, Y)
        for workers in (0, 2)
    )
    for name in inline.cv_results_:
        if name.startswith("split"):
            assert list(inline.cv_results_[name]) == list(two.cv_results_[name])


# --- metadata ---------------------------------------------------------------------

ACCURACY, F1 = make_scorer(accuracy_score), make_scorer(f1_score)


@pytest.mark.parametrize(
    "scoring",
    [None, "f1", ["accuracy", "f1"], lambda e, x, y, sample_weight=(0,): sample_weight[-1]],
)
def test_weights_reach_the_scorers_that_take_them(scoring: Any) -> None:
    refit = "f1" if isinstance(scoring, list) else True
    options = {"scoring": scoring, "refit": refit, "return_train_score": True}
    compare(MultinomialNB(), ALPHAS, NUMBERS, {"sample_weight": WEIGHTS}, **options)


@pytest.mark.skipif(
    not hasattr(GridSearchCV, "_check_scorers_accept_sample_weight"),
    reason="this version of scikit-learn gives scorers no weights",
)
def test_scorers_that_take_no_weights_are_named() -> None:
    plain = make_scorer(lambda y, predicted: float(np.mean(y == predicted)))
    scoring = {"plain": plain, "f1": "f1"}
    made = SearchCV(MultinomialNB(), ALPHAS, scoring=scoring, refit="f1", epochs=1, workers=0)
    with pytest.warns(UserWarning, match="^plain does not support sample_weight: it counts all"):
        made.fit(NUMBERS, Y, sample_weight=WEIGHTS)


def test_weights_of_a_step_do_not_reach_the_scorer() -> None:
    made = make_pipeline(MinMaxScaler(), MultinomialNB())
    compare(made, {}, NUMBERS, {"multinomialnb__sample_weight": WEIGHTS}, scoring=F1)


@pytest.fixture
def routing() -> Iterator[None]:
    with config_context(enable_metadata_routing=True):
        yield


def requests(weighted: Any, scored: Any = None) -> Any:
    made = MultinomialNB().set_fit_request(sample_weight=weighted)
    return made if scored is None else made.set_score_request(sample_weight=scored)


def test_requests_are_honoured(routing: None) -> None:
    weights = {"sample_weight": WEIGHTS}
    both = {"sample_weight": WEIGHTS, "other": OTHERS}
    accuracy = ACCURACY.set_score_request(sample_weight=True)
    f1 = F1.set_score_request(sample_weight="other")
    for given, options in (
        (both, {"scoring": {"a": accuracy, "b": f1}, "refit": "a", "return_train_score": True}),
        (both, {"scoring": f1}),
        (weights, {"scoring": accuracy}),
    ):
        compare(requests(True), ALPHAS, NUMBERS, given, **options)
    compare(requests(False, True), ALPHAS, NUMBERS, weights)
    compare(requests("other", False), ALPHAS, NUMBERS, {"other": OTHERS})
    theirs, ours = compare(
        requests(True, True), ALPHAS, NUMBERS, {**weights, "groups": GROUPS}, cv=GroupKFold(3)
    )
    assert str(ours.get_metadata_routing()) == str(theirs.get_metadata_routing())
    scores = [each.score(NUMBERS, Y, sample_weight=OTHERS) for each in (theirs, ours)]
    assert scores[0] == pytest.approx(scores[1]) != theirs.score(NUMBERS, Y)
    made = make_pipeline(PolynomialFeatures(), requests(True))
    compare(made, {"multinomialnb__alpha": [0.1, 30.0]}, NUMBERS, weights, scoring=accuracy)


@pytest.mark.parametrize("routed", [False, True])
def test_cross_validate_passes_weights_on(routed: bool) -> None:
    with config_context(enable_metadata_routing=routed):
        made = requests(True, True) if routed else MultinomialNB()
        theirs, ours = (
            cross_validate(search, NUMBERS, Y, params={"sample_weight": WEIGHTS}, cv=2)
            for search in (
                GridSearchCV(made, ALPHAS, cv=2),
                SearchCV(made, ALPHAS, cv=2, epochs=1, workers=0),
            )
        )
    np.testing.assert_allclose(ours["test_score"], theirs["test_score"], rtol=1e-12)


def test_metadata_that_cannot_be_passed_are_refused_by_name(routing: None) -> None:
    scaler = StandardScaler().set_fit_request(sample_weight=True)
    choices = [requests(True), BernoulliNB().set_fit_request(sample_weight=False)]
    made = Pipeline([("scaler", scaler), ("clf", requests(True))])
    accuracy = ACCURACY.set_score_request(sample_weight=False)
    for estimator, space, message in (
        (made, {}, "to the last step, not scaler__sample_weight: use"),
        (Pipeline(made.steps[1:]), {"clf": choices}, "does not request sample_weight as"),
        (MultinomialNB(), {}, "explicitly set as requested or not requested for MultinomialNB.fit"),
    ):
        search = SearchCV(estimator, space, scoring=accuracy, workers=0)
        with pytest.raises(ValueError, match=message):
            search.fit(NUMBERS, Y, sample_weight=WEIGHTS)
    with pytest.raises(TypeError, match=r"unexpected argument.*'groups'"):
        SearchCV(MultinomialNB(), {}).fit(NUMBERS, Y, groups=GROUPS)


def test_score_takes_metadata_with_routing_only() -> None:
    ours = SearchCV(MultinomialNB(), ALPHAS, cv=2, epochs=1, workers=0).fit(NUMBERS, Y)
    with pytest.raises(InputError, match=r"score takes sample_weight only with .*routing=True"):
        ours.score(NUMBERS, Y, sample_weight=WEIGHTS)
