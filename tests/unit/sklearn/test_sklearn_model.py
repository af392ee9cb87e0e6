"""cerebro.sklearn.Model: every supported estimator hops without a trace."""

from __future__ import annotations

import copy
import json
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import cerebro._core as _core
import cerebro.data
from cerebro.data.batches import make_loader
from cerebro.errors import InputError, StateError
from cerebro.machine import generators
from cerebro.model import check_model, get_whole_pass
from cerebro.worker.evaluate import end_training, run_batches
from cerebro.worker.trial_state import EpochProgress

pytest.importorskip("sklearn")
from sklearn import (
    cluster,
    decomposition,
    linear_model,
    metrics,
    naive_bayes,
    neural_network,
    pipeline,
    preprocessing,
)
from sklearn.tree import DecisionTreeClassifier

import cerebro.sklearn
from cerebro.integrations.sklearn.steps import learn

UNITS, BATCHES, ROWS = 4, 2, 30

LINEAR, NEURAL = linear_model, neural_network
ESTIMATORS = {
    "SGDClassifier": lambda: LINEAR.SGDClassifier(),
    "SGDClassifier log": lambda: LINEAR.SGDClassifier(loss="log_loss", random_state=3),
    "SGDClassifier averaged": lambda: LINEAR.SGDClassifier(loss="log_loss", average=True),
    "SGDClassifier late average": lambda: LINEAR.SGDClassifier(average=100),
    "SGDClassifier adaptive": lambda: LINEAR.SGDClassifier(learning_rate="adaptive", eta0=0.1),
    "SGDClassifier own generator": lambda: LINEAR.SGDClassifier(
        random_state=np.random.RandomState(5)
    ),
    "Perceptron": lambda: LINEAR.Perceptron(),
    "PassiveAggressiveClassifier": lambda: LINEAR.PassiveAggressiveClassifier(average=True),
    "MLPClassifier": lambda: NEURAL.MLPClassifier((5,)),
    "MLPClassifier seeded": lambda: NEURAL.MLPClassifier((5, 4), random_state=2),
    "MLPClassifier own generator": lambda: NEURAL.MLPClassifier(
        (5,), random_state=np.random.RandomState(5)
    ),
    "MLPClassifier sgd": lambda: NEURAL.MLPClassifier((5,), solver="sgd", momentum=0.8),
    "GaussianNB": lambda: naive_bayes.GaussianNB(),
    "MultinomialNB": lambda: naive_bayes.MultinomialNB(),
    "ComplementNB": lambda: naive_bayes.ComplementNB(),
    "BernoulliNB": lambda: naive_bayes.BernoulliNB(binarize=0.5),
    "CategoricalNB": lambda: naive_bayes.CategoricalNB(min_categories=2),
    "SGDRegressor": lambda: LINEAR.SGDRegressor(),
    "SGDRegressor averaged": lambda: LINEAR.SGDRegressor(average=True),
    "SGDRegressor late average": lambda: LINEAR.SGDRegressor(average=100),
    "PassiveAggressiveRegressor": lambda: LINEAR.PassiveAggressiveRegressor(),
    "MLPRegressor": lambda: NEURAL.MLPRegressor(hidden_layer_sizes=(5,)),
    "MLPRegressor sgd": lambda: NEURAL.MLPRegressor(
        hidden_layer_sizes=(5,), solver="sgd", learning_rate="invscaling"
    ),
    "MiniBatchKMeans": lambda: cluster.MiniBatchKMeans(3, reassignment_ratio=0.3),
    "MiniBatchKMeans seeded": lambda: cluster.MiniBatchKMeans(3, random_state=1),
    "IncrementalPCA": lambda: decomposition.IncrementalPCA(2),
    "IncrementalPCA whitened": lambda: decomposition.IncrementalPCA(2, whiten=True),
}


@pytest.fixture(autouse=True)
def quiet_and_alone():
    # The passive-aggressive estimators are on their way out of scikit-learn.
    with generators.preserve_generators(False), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


def batches(unit, dtype=np.float64, classes=3):
    random = np.random.RandomState(100 + unit)
    result = []
    for _ in range(BATCHES):
        x = random.rand(ROWS, 6)
        result.append(
            {
                "x": x.astype(dtype),
                "y": random.randint(0, classes, ROWS),
                "r": x @ np.arange(6.0),
                "c": (x > 0.5).astype(np.int64),
            }
        )
    return result


def model_of(name, **options):
    estimator = ESTIMATORS[name]()
    kind = type(estimator).__name__
    if cerebro.sklearn.SUPPORTED[kind] == "regressor":
        options.setdefault("target", "r")
    if kind == "CategoricalNB":
        options.setdefault("inputs", "c")
    options.setdefault("classes", range(3))
    return cerebro.sklearn.Model(estimator, **options)


def train(name, hops, dtype=np.float64, classes=3):
    np.random.seed(1)
    model = model_of(name, classes=range(classes))
    values = []
    for unit in range(UNITS):
        if hops:
            saved = generators.capture(False)
            carried = _core.unpack_state(_core.pack_state(model.state_dict()))
            model = model_of(name, classes=range(classes))
            model.load_state_dict(carried)
            spoil(carried)
            generators.restore(saved)
        for batch in batches(unit, dtype, classes):
            values.append(model.train_batch(batch))
        with generators.preserve_generators(False):
            values.append(model.evaluate(batches(unit + 50, dtype, classes)))
    return values, copy.deepcopy(model.state_dict())


def spoil(state):
    for value in state.values() if isinstance(state, dict) else state:
        if isinstance(value, np.ndarray):
            value.fill(7)
        elif isinstance(value, (dict, list)):
            spoil(value)


def plain(state):
    """Return a state as JSON with every bit of its arrays."""
    return json.dumps(
        state, sort_keys=True, default=lambda a: [str(a.dtype), a.shape, a.tobytes().hex()]
    )


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators_hop(name):
    for dtype in (np.float64, np.float32):
        straight, hopped = train(name, False, dtype), train(name, True, dtype)
        assert hopped[0] == straight[0]
        assert plain(hopped[1]) == plain(straight[1])


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if "Classifier" in name])
def test_classifiers_of_two_classes_hop(name):
    straight, hopped = train(name, False, classes=2), train(name, True, classes=2)
    assert hopped[0] == straight[0]
    assert plain(hopped[1]) == plain(straight[1])


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    found = batches(0) + batches(1)
    columns = {name: np.concatenate([batch[name] for batch in found]) for name in found[0]}
    return cerebro.shard(columns, tmp_path_factory.mktemp("rows") / "set", shards=2)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_passes_the_check_of_a_search(name, rows, tmp_path):
    result = cerebro.search(
        lambda config: model_of(name), {"a": [1]}, rows, epochs=1, n_trials=1, validation=0.25,
        batch_size=10, workers=0, run=tmp_path / "run", progress=False,
    )  # fmt: skip
    assert result.best.status == "finished"


def scaled(*, final=None, **options):
    steps = [
        preprocessing.StandardScaler(),
        preprocessing.MinMaxScaler((-1, 1)),
        preprocessing.MaxAbsScaler(),
        decomposition.IncrementalPCA(4),
        preprocessing.Normalizer(),
        "passthrough",
        final or LINEAR.SGDClassifier(loss="log_loss", random_state=0, average=True),
    ]
    options.setdefault("classes", range(3))
    return cerebro.sklearn.Model(pipeline.make_pipeline(*steps), **options)


def test_a_pipeline_learns_step_by_step_and_hops():
    model, losses = scaled(weight="w"), []
    plain_loop = scaled().estimator
    *transformers, final = [step for step in plain_loop if step != "passthrough"]
    for unit in range(UNITS):
        if unit:
            packed = _core.unpack_state(_core.pack_state(model.state_dict()))
            model = scaled(weight="w")
            model.load_state_dict(packed)
            spoil(packed)
        for batch in batches(unit):
            weights = np.linspace(0.5, 2.0, ROWS)
            losses.append(model.train_batch(batch | {"w": weights})["loss"])
            x = batch["x"]
            for step in transformers:
                if not isinstance(step, preprocessing.Normalizer):
                    step.partial_fit(x)
                if isinstance(step, decomposition.IncrementalPCA):
                    step.components_ = np.ascontiguousarray(step.components_)
                x = step.transform(x)
            final.partial_fit(x, batch["y"], classes=range(3), sample_weight=weights)
    x = batches(9)[0]["x"]
    np.testing.assert_array_equal(model.predict(x), plain_loop.predict(x))
    np.testing.assert_array_equal(model.estimator.predict_proba(x), plain_loop.predict_proba(x))
    assert model.estimator[0].mean_.tobytes() == plain_loop[0].mean_.tobytes()
    assert np.isfinite(losses).all()
    with pytest.raises(StateError, match=r"the state has the steps .*incrementalpca.*the pipeline"):
        short = pipeline.make_pipeline(preprocessing.StandardScaler(), LINEAR.SGDClassifier())
        cerebro.sklearn.Model(short).load_state_dict(model.state_dict())


def test_a_pipeline_passes_the_check_of_a_search(rows, tmp_path):
    result = cerebro.search(
        lambda config: scaled(), {"a": [1, 2]}, rows, epochs=2, searcher="grid", validation=0.25,
        batch_size=10, workers=0, run=tmp_path / "run", progress=False,
    )  # fmt: skip
    assert [trial.status for trial in result.trials] == ["finished"] * 2
    kmeans = cluster.MiniBatchKMeans(3, random_state=1)
    clustered = scaled(final=kmeans)
    assert clustered.train_batch(batches(0)[0])["loss"] >= 0


def test_every_supported_estimator_is_tested():
    assert {name.split()[0] for name in ESTIMATORS} == set(cerebro.sklearn.SUPPORTED)


def test_training_is_that_of_the_estimator_alone():
    for name in ("SGDClassifier averaged", "MLPClassifier", "SGDRegressor", "MiniBatchKMeans"):
        np.random.seed(1)
        alone, target = ESTIMATORS[name](), "r" if "Regressor" in name else "y"
        first = {"classes": np.arange(3)} if "Classifier" in name else {}
        for unit in range(UNITS):
            for batch in batches(unit):
                y = [] if "KMeans" in name else [batch[target]]
                alone.partial_fit(batch["x"], *y, **first)
                first = {}
        state = train(name, False)[1]["attributes"]
        for attribute in ("coef_", "_average_coef", "cluster_centers_", "t_"):
            if attribute in state:
                assert np.array_equal(state[attribute], getattr(alone, attribute))
        if "MLP" in name:
            assert all(
                np.array_equal(*pair)
                for pair in zip(state["coefs_"]["items"], alone.coefs_, strict=True)
            )


def test_a_loaded_state_predicts_as_before():
    model = model_of("MLPClassifier")
    for batch in batches(0):
        model.train_batch(batch)
    fresh = model_of("MLPClassifier")
    fresh.load_state_dict(copy.deepcopy(model.state_dict()))
    x = batches(3)[0]["x"]
    assert np.array_equal(fresh.estimator.predict_proba(x), model.estimator.predict_proba(x))
    # Back to a state without anything learned.
    fresh.load_state_dict(model_of("MLPClassifier").state_dict())
    assert not hasattr(fresh.estimator, "coefs_")
    with pytest.raises(InputError, match="is not fitted yet: train it first"):
        fresh.eval_batch(batches(0)[0])


def test_the_state_of_an_mlp_does_not_grow():
    model = model_of("MLPClassifier")
    sizes = set()
    for unit in range(6):
        for batch in batches(unit):
            model.train_batch(batch)
        sizes.add(len(plain(model.state_dict())) // 100)
    assert len(model.estimator.loss_curve_) == 1
    assert len(sizes) <= 2


def test_losses_by_kind():
    batch = batches(0)[0]

    def fitted(name, **options):
        model = model_of(name, **options)
        model.train_batch(batch)
        return model

    model = fitted("SGDClassifier log")
    values = model.eval_batch(batch)
    proba = model.estimator.predict_proba(batch["x"])
    assert np.isclose(values["loss"], metrics.log_loss(batch["y"], proba))
    assert values["accuracy"] == model.estimator.score(batch["x"], batch["y"])
    model = fitted("Perceptron")
    values = model.eval_batch(batch)
    assert np.isclose(values["loss"], 1 - values["accuracy"])
    model = fitted("SGDRegressor")
    predicted = model.estimator.predict(batch["x"])
    assert set(values := model.eval_batch(batch)) == {"loss"}
    assert np.isclose(values["loss"], metrics.mean_squared_error(batch["r"], predicted))
    model = fitted("MiniBatchKMeans")
    assert np.isclose(
        model.eval_batch(batch)["loss"],
        model.estimator.transform(batch["x"]).min(1).__pow__(2).mean(),
    )
    model = fitted("IncrementalPCA")
    assert 0 < model.eval_batch(batch)["loss"] < batch["x"].var()
    assert model.predict(batch["x"]).shape == (ROWS, 2)
    model = fitted("SGDRegressor", loss=metrics.mean_absolute_error)
    assert model.eval_batch(batch)["loss"] == metrics.mean_absolute_error(
        batch["r"], model.estimator.predict(batch["x"])
    )


def test_rows_may_have_several_labels():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 4))
    y = (x[:, :3] > 0).astype("int64")

    def make():
        return neural_network.MLPClassifier((5,), alpha=0.0, random_state=0)

    model, alone = cerebro.sklearn.Model(make(), metrics={"f1": "f1_macro"}), make()
    for start in range(0, 60, 20):
        rows = slice(start, start + 20)
        state = _core.unpack_state(_core.pack_state(model.state_dict()), "numpy")
        model = cerebro.sklearn.Model(make(), metrics={"f1": "f1_macro"})
        model.load_state_dict(state)
        values = model.train_batch({"x": x[rows], "y": y[rows]})
        alone.partial_fit(x[rows], y[rows], classes=np.arange(3))
        if start:  # the loss of the first batch is that after the step
            assert values["loss"] == pytest.approx(alone.loss_)
    for mine, its in zip(model.estimator.coefs_, alone.coefs_, strict=True):
        np.testing.assert_array_equal(mine, its)
    assert model.evaluate({"x": x, "y": y})["accuracy"] == alone.score(x, y)
    np.testing.assert_array_equal(model.predict({"x": x}), alone.predict(x))


def test_unknown_classes_cost_as_much_as_can_be():
    model = model_of("GaussianNB")
    model.train_batch(batches(0)[0])
    batch = batches(0)[0]
    for strange in (7, -1):
        loss = model.eval_batch({**batch, "y": np.full(ROWS, strange)})["loss"]
        assert np.isclose(loss, -np.log(np.finfo(float).eps))


def dataset(path, columns):
    return cerebro.data.shard(columns, path / "data", shards=2, shuffle=False, progress=False)


def test_a_whole_pass_computes_metrics_once(tmp_path):
    model = model_of(
        "SGDClassifier log",
        metrics={"f1": lambda t, p: metrics.f1_score(t, p, average="macro"), "auc": "roc_auc_ovr"},
    )
    check_model(model)
    assert get_whole_pass(model) is not None and get_whole_pass(model_of("GaussianNB")) is None
    model.train_batch(batches(0)[0])
    together = {k: np.concatenate([b[k] for b in batches(1)]) for k in ("x", "y")}
    predicted = model.estimator.predict(together["x"])
    for data in (batches(1), together, dataset(tmp_path, together)):
        got = model.evaluate(data, batch_size=7)
        assert got["f1"] == metrics.f1_score(together["y"], predicted, average="macro")
        assert got["auc"] == metrics.roc_auc_score(
            together["y"], model.estimator.predict_proba(together["x"]), multi_class="ovr"
        )
        assert np.isclose(got["accuracy"], np.mean(predicted == together["y"]))
        assert np.array_equal(model.predict(data, batch_size=7), predicted)
    assert set(model.eval_batch(batches(1)[0])) == {"loss", "accuracy", "f1", "auc"}
    for call in (model.evaluate, model.predict):
        with pytest.raises(InputError, match="no rows"):
            call([])
        with pytest.raises(InputError, match="not a dataset"):
            call(3)


def test_metrics_that_a_training_batch_does_not_define_are_left_out():
    names = {"nll": "neg_log_loss", "auc": "roc_auc_ovr", "f1": "f1_macro"}
    whole = batches(0)[0]
    chosen = whole["y"] != 2
    two = {name: column[chosen] for name, column in whole.items()}
    learned, scored = model_of("SGDClassifier log"), model_of("SGDClassifier log", metrics=names)
    for batch, wanted in ((two, {"f1"}), (two, {"f1"}), (whole, set(names))):
        expected = learned.train_batch(batch)
        values = scored.train_batch(batch)
        assert values.keys() == {"loss", "accuracy", *wanted}
        assert {name: values[name] for name in expected} == expected
    assert plain(scored.state_dict()) == plain(learned.state_dict())
    rows = rf"metric 'nll' .* the {len(two['y'])} rows given for validation, which have 2 of the 3"
    for call in (scored.eval_batch, lambda batch: scored.evaluate([batch])):
        with pytest.raises(InputError, match=rows) as caught:
            call(two)
        assert isinstance(caught.value.__cause__, ValueError)
    assert scored.eval_batch(whole).keys() == {"loss", "accuracy", *names}


def test_metrics_that_are_nan_on_a_training_batch_are_left_out():
    def precision(truth, predicted):
        return np.nan if len(set(truth)) < 3 else 0.5

    def error(truth, predicted):
        raise ValueError("too few")

    batch = batches(0)[0]
    single = {**batch, "y": np.zeros(ROWS, np.int64)}
    model = model_of("GaussianNB", metrics={"precision": precision})
    assert model.train_batch(batch)["precision"] == 0.5
    assert model.train_batch(single).keys() == {"loss", "accuracy"}
    assert np.isnan(model.eval_batch(single)["precision"])
    model = model_of("SGDRegressor", metrics={"error": error})
    assert model.train_batch(batch).keys() == {"loss"}
    with pytest.raises(
        InputError, match=r"'error' .* the 30 rows given .*leave the metric out \(too few\)"
    ):
        model.evaluate([batch])


def test_epoch_means_skip_batches_where_a_metric_is_undefined(tmp_path):
    """Weighted by their rows, over all units of the epoch."""
    seen = []

    def mean(truth, predicted):
        if truth[0] == 0:
            raise ValueError("a class is missing")
        seen.append((float(truth.mean()), len(truth)))
        return seen[-1][0]

    random = np.random.RandomState(3)
    columns = {"x": random.rand(46, 6), "y": random.randint(0, 3, 46)}
    data = dataset(tmp_path, columns)
    loader = make_loader(
        data,
        7,
        seed=0,
        shuffle=False,
        framework=cerebro.sklearn.Model.framework,
    )
    model = model_of("SGDClassifier log", metrics={"mean": mean})
    progress = EpochProgress()
    for shard in range(2):
        loader.begin([[shard]], 0)
        end_training(model, run_batches(loader, model.train_batch), progress)
    # 23 rows of each shard are batches of 8, 8 and 7.
    batches = [part for s in range(2) for part in np.split(data.shard(s)["y"], [8, 16])]
    expected = [len(batch) for batch in batches if batch[0] != 0]
    assert [rows for _, rows in seen] == expected and 7 in expected and len(expected) < 6
    rows, total = 0, 0.0
    for value, count in seen:
        rows, total = rows + count, total + value * count
    assert progress.training["mean"] == (pytest.approx(total, rel=1e-12), rows)
    assert progress.training["accuracy"][1] == 46
    assert progress.epoch_metrics()["train_mean"] == pytest.approx(total / rows, rel=1e-12)


def test_classes_come_from_the_data(tmp_path):
    def build(info, **options):
        model = cerebro.sklearn.Model(naive_bayes.GaussianNB(), **options)
        model.bind_info(info)
        return model

    data = dataset(tmp_path, batches(0)[0])
    named = SimpleNamespace(classes={"y": ["a", "b", "c", "d"]}, data=None)
    plain_info = SimpleNamespace(classes=data.classes, data=data)
    batch = {**batches(0)[0], "y": np.zeros(ROWS, np.int64)}
    for info, wanted in ((named, 4), (plain_info, 3)):
        model = build(info)
        with np.errstate(divide="ignore"):  # classes that it has not met yet
            model.train_batch(batch)
        assert list(model.estimator.classes_) == list(range(wanted))
    given = build(named, classes=[5, 0, 2])
    with np.errstate(divide="ignore"):
        given.train_batch(batch)
    assert list(given.estimator.classes_) == [0, 2, 5]
    with pytest.raises(InputError, match="must know all classes"):
        build(SimpleNamespace(classes={}, data=None)).train_batch(batch)
    with pytest.raises(InputError, match="has fractions"):
        build(plain_info, target="r")


def test_columns_are_put_side_by_side():
    model = cerebro.sklearn.Model(naive_bayes.GaussianNB(), inputs=["a", "b"], classes=[0, 1])
    batch = {
        "a": np.random.rand(8, 2, 3),
        "b": np.random.rand(8),
        "y": np.array([[0], [1]] * 4),
    }
    model.train_batch(batch)
    assert model.estimator.n_features_in_ == 7
    with pytest.raises(InputError, match="inputs names the column 'b', but the data has a, y"):
        model.train_batch({k: batch[k] for k in ("a", "y")})
    with pytest.raises(InputError, match="target names the column 'y', but the data has a, b"):
        model.train_batch({k: batch[k] for k in ("a", "b")})


class Tuned(naive_bayes.GaussianNB):
    """A user's own estimator."""


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: cerebro.sklearn.Model(DecisionTreeClassifier()),
            "DecisionTreeClassifier has no partial_fit",
        ),
        (
            lambda: cerebro.sklearn.Model(
                pipeline.make_pipeline(decomposition.PCA(2), LINEAR.SGDClassifier())
            ),
            "step 'pca' of the pipeline: PCA has no partial_fit.*use IncrementalPCA or scikit",
        ),
        (
            lambda: cerebro.sklearn.Model(
                pipeline.make_pipeline(preprocessing.StandardScaler(), DecisionTreeClassifier())
            ),
            "step 'decisiontreeclassifier' of the pipeline: DecisionTreeClassifier has no partial",
        ),
        (
            lambda: cerebro.sklearn.Model(LINEAR.LogisticRegression()),
            r"LogisticRegression has no partial_fit.*use SGDClassifier\(loss='log_loss'\) or",
        ),
        (
            lambda: cerebro.sklearn.Model(
                pipeline.make_pipeline(naive_bayes.GaussianNB(), LINEAR.SGDClassifier())
            ),
            "GaussianNB is not supported before the last step",
        ),
        (lambda: model_of("Perceptron", weight=3), "weight must be a column's name"),
        (
            lambda: model_of("PassiveAggressiveClassifier", weight="w"),
            "PassiveAggressiveClassifier.partial_fit takes no sample_weight",
        ),
        (lambda: cerebro.sklearn.Model(cluster.Birch()), "Birch is not supported"),
        (lambda: cerebro.sklearn.Model(Tuned()), "Tuned is not supported"),
        (lambda: cerebro.sklearn.Model(3), "int has no partial_fit"),
        (
            lambda: cerebro.sklearn.Model(linear_model.SGDClassifier(early_stopping=True)),
            "early_stopping",
        ),
        (lambda: model_of("GaussianNB", metrics=[1]), "mapping of names"),
        (lambda: model_of("GaussianNB", metrics={"a": "nope"}), "metric 'a'"),
        (lambda: model_of("GaussianNB", metrics={"a": 3}), "function or a scorer"),
        (lambda: model_of("GaussianNB", metrics={"loss": "accuracy"}), "named 'loss'"),
        (lambda: model_of("IncrementalPCA", metrics={"a": "r2"}), "has no target"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_a_batch_of_no_weight_is_refused_with_its_cure():
    """By estimators that refuse it: which ones do depends on scikit-learn's version."""

    class Strict:
        def partial_fit(self, x, sample_weight=None):
            if not np.all(sample_weight > 0):
                raise ValueError("a weight is not positive")

    rows = np.zeros((3, 2))
    learn(Strict(), rows, sample_weight=np.ones(3))
    with pytest.raises(InputError, match=r"Strict\.partial_fit takes no batch .* leave out rows"):
        learn(Strict(), rows, sample_weight=np.zeros(3))
    for weights in ([1.0, 0.0, 1.0], [1.0, np.nan, 1.0]):
        with pytest.raises(ValueError, match="a weight is not positive"):
            learn(Strict(), rows, sample_weight=np.array(weights))


def test_states_of_other_estimators_are_refused():
    with pytest.raises(StateError, match="of a GaussianNB, but build made a Perceptron"):
        model_of("Perceptron").load_state_dict(model_of("GaussianNB").state_dict())
    model = model_of("GaussianNB")
    model.estimator.strange_ = object()
    with pytest.raises(StateError, match="strange_ is a object"):
        model.state_dict()


def test_class_names_may_be_strings():
    model = cerebro.sklearn.Model(naive_bayes.GaussianNB(), classes=["cat", "dog"])
    batch = {"x": np.random.rand(6, 2), "y": np.array(["dog", "cat"] * 3)}
    model.train_batch(batch)
    fresh = cerebro.sklearn.Model(naive_bayes.GaussianNB(), classes=["cat", "dog"])
    fresh.load_state_dict(copy.deepcopy(model.state_dict()))
    assert fresh.eval_batch(batch) == model.eval_batch(batch)
    assert repr(fresh) == "cerebro.sklearn.Model(GaussianNB())"


SGD = {"solver": "sgd", "learning_rate_init": 0.1, "momentum": 0.9, "nesterovs_momentum": True}
CLONES = {
    "sgd": (
        SGD,
        {"learning_rate_init": 0.5, "momentum": 0.3, "nesterovs_momentum": False},
        {"learning_rate_init": 0.5, "learning_rate": 0.5, "momentum": 0.3, "nesterov": False},
    ),
    "adaptive, lowered once": (
        {**SGD, "learning_rate": "adaptive", "tol": 1e9, "n_iter_no_change": 1},
        {"learning_rate_init": 0.4},
        {"learning_rate_init": 0.4, "learning_rate": 0.1 / 5 * (0.4 / 0.1)},
    ),
    "adaptive after constant": (
        SGD,
        {"learning_rate": "adaptive", "learning_rate_init": 0.4},
        {"lr_schedule": "adaptive", "learning_rate_init": 0.4, "learning_rate": 0.4},
    ),
    "invscaling": (
        {**SGD, "learning_rate": "invscaling"},
        {"learning_rate_init": 0.4, "power_t": 0.25},
        {
            "learning_rate_init": 0.4,
            "power_t": 0.25,
            "learning_rate": 0.4 / (2 * BATCHES * ROWS + 1) ** 0.25,
        },
    ),
    "adam": (
        {"learning_rate_init": 0.1},
        {"learning_rate_init": 0.2, "beta_1": 0.5, "beta_2": 0.9, "epsilon": 1e-3},
        {"learning_rate_init": 0.2, "beta_1": 0.5, "beta_2": 0.9, "epsilon": 1e-3},
    ),
}


def learned(model):
    """Return a state without random generators, which are a clone's own."""
    attributes = model.state_dict()["attributes"]
    return plain({name: v for name, v in attributes.items() if "random_state" not in name})


def network(**options):
    made = NEURAL.MLPClassifier((5,), random_state=2, **options)
    return cerebro.sklearn.Model(made, classes=range(3))


@pytest.mark.parametrize("case", CLONES)
def test_a_clone_trains_with_its_own_settings(case):
    before, changes, expected = CLONES[case]
    parent = network(**before)
    for batch in batches(0) + batches(2):
        parent.train_batch(batch)
    packed = _core.unpack_state(_core.pack_state(parent.state_dict()))
    clone = network(**{**before, **changes})
    clone.load_clone(packed, {})
    spoil(packed)
    by_hand = copy.deepcopy(parent.estimator).set_params(**changes)
    vars(by_hand._optimizer).update(expected)
    assert learned(clone) == learned(cerebro.sklearn.Model(by_hand))
    for batch in batches(1):
        clone.train_batch(batch)
        parent.train_batch(batch)
        by_hand.partial_fit(batch["x"], batch["y"])
    np.testing.assert_array_equal(clone.estimator.coefs_[0], by_hand.coefs_[0])
    assert not np.allclose(clone.estimator.coefs_[0], parent.estimator.coefs_[0])


def test_a_clone_with_its_parents_settings_equals_its_parent():
    for name in ESTIMATORS:
        np.random.seed(1)
        parent, clone = model_of(name), model_of(name)
        for batch in batches(0):
            parent.train_batch(batch)
        clone.load_clone(_core.unpack_state(_core.pack_state(parent.state_dict())), {})
        assert learned(clone) == learned(parent)


def test_a_clone_with_another_solver_has_a_new_optimizer():
    parent, clone = network(), network(**SGD)
    parent.train_batch(batches(0)[0])
    clone.load_clone(copy.deepcopy(parent.state_dict()), {})
    clone.train_batch(batches(0)[1])
    optimizer = clone.estimator._optimizer
    assert type(optimizer).__name__ == "SGDOptimizer"
    assert (optimizer.learning_rate, optimizer.momentum) == (0.1, 0.9)


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: NEURAL.MLPClassifier((5,), random_state=np.random.RandomState(seed)),
        lambda seed: cluster.MiniBatchKMeans(3, random_state=seed),
        lambda seed: pipeline.make_pipeline(
            preprocessing.StandardScaler(),
            LINEAR.SGDClassifier(random_state=np.random.RandomState(seed)),
        ),
    ],
)
def test_a_clone_draws_from_its_own_generator(make):
    """What the parent drew does not matter, and the clone draws what it would have drawn first."""
    parent, clone = (cerebro.sklearn.Model(make(seed), classes=range(3)) for seed in (1, 7))
    parent.train_batch(batches(0)[0])
    clone.load_clone(_core.unpack_state(_core.pack_state(parent.state_dict())), {})
    final = clone.estimator[-1] if hasattr(clone.estimator, "steps") else clone.estimator
    for name in ("random_state", "_random_state"):
        generator = vars(final).get(name)
        if isinstance(generator, np.random.RandomState):
            state = generator.get_state()
            np.testing.assert_array_equal(state[1], np.random.RandomState(7).get_state()[1])
            assert state[2] == np.random.RandomState(7).get_state()[2]
    assert clone.train_batch(batches(1)[0])["loss"] > 0


def test_steps_with_names_of_features_hop(rows, tmp_path):
    pytest.importorskip("pandas")

    def make():
        model = scaled()
        model.estimator.set_output(transform="pandas")
        return model

    model, straight = make(), make()
    for unit in range(UNITS):
        packed = _core.unpack_state(_core.pack_state(model.state_dict()))
        model = make()
        model.load_state_dict(packed)
        for batch in batches(unit):
            assert model.train_batch(batch) == straight.train_batch(batch)
    assert plain(model.state_dict()) == plain(straight.state_dict())
    names = model.estimator[1].feature_names_in_
    assert names.dtype == object
    assert names.tolist() == [f"x{column}" for column in range(6)]
    names = model.estimator[-1].feature_names_in_  # the normalizer, too, passes names on
    assert names.tolist() == [f"incrementalpca{column}" for column in range(4)]
    result = cerebro.search(
        lambda config: make(), {"a": [1]}, rows, epochs=2, searcher="grid", validation=0.25,
        batch_size=10, workers=0, run=tmp_path / "run", progress=False,
    )  # fmt: skip
    assert result.best.status == "finished"


def test_objects_that_are_not_strings_are_refused():
    model = model_of("GaussianNB")
    model.estimator.strange_ = np.array(["a", 1], dtype=object)
    with pytest.raises(StateError, match="strange_ is a ndarray"):
        model.state_dict()


def test_bfloat16_arrives_as_numbers_not_as_bits(tmp_path):
    rng = np.random.default_rng(0)
    rows = {"x": rng.normal(size=(40, 3)).astype("f4"), "y": rng.integers(0, 2, size=40)}
    exact = cerebro.data.shard(rows, tmp_path / "exact", shards=1)
    halves = cerebro.data.shard(rows, tmp_path / "halves", shards=1, dtypes={"x": "bfloat16"})
    values = (halves.shard(0)["x"].astype("u4") << 16).view("f4")

    def trained(data, name):
        result = cerebro.search(
            lambda config: cerebro.sklearn.Model(LINEAR.SGDClassifier(random_state=0)),
            {}, data, epochs=2, n_trials=1, validation=0.25, batch_size=8, metric="accuracy",
            workers=0, run=tmp_path / name, progress=False,
        )  # fmt: skip
        return result.best

    stored = trained(halves, "stored")
    cast = trained(exact.with_transforms({"x": [cerebro.transforms.Cast("bfloat16")]}), "cast")
    assert stored.metrics == cast.metrics
    scores = stored.load().evaluate({"x": values, "y": halves.shard(0)["y"]})
    assert stored.evaluate(halves) == stored.load().evaluate(halves) == scores
    assert np.array_equal(stored.predict(halves), stored.load().predict(values))
