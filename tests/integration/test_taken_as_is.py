"""What `build` returns is trained as its own framework trains it, wherever a model is built."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from framework_models import make_lightning, make_rows, make_sklearn, make_skorch

import cerebro
import cerebro._core as _core
from cerebro.errors import CerebroError
from cerebro.machine import generators

torch = pytest.importorskip("torch")
BACKEND = os.environ.get("KERAS_BACKEND", "torch")
with pytest.MonkeyPatch.context() as patch, contextlib.suppress(ImportError):
    patch.setenv("KERAS_BACKEND", BACKEND)
    import keras

EPOCHS = 2
SIZE = 12


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Compute by hand with as many threads as a search does, which decides the last bits."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return cerebro.shard(make_rows(), tmp_path_factory.mktemp("data") / "set", shards=3)


def search(build: Any, data: Any, folder: Path, **options: Any) -> cerebro.Result:
    arguments = {
        "epochs": EPOCHS, "batch_size": SIZE, "searcher": "grid", "progress": False, "run": folder,
        "workers": 0,
    }  # fmt: skip
    return cerebro.search(build, {"lr": [0.1, 0.01]}, data, **arguments | options)


def batches_of(data: Any, framework: str = "torch") -> Iterator[list[dict[str, Any]]]:
    """Yield the batches of each epoch of a search."""
    for epoch in range(EPOCHS):
        yield list(data.batches(SIZE, seed=0, epoch=epoch, framework=framework))


def make_keras(config: dict[str, Any]) -> Any:
    net = keras.Sequential([keras.layers.Dense(6, "relu"), keras.layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(keras.optimizers.Adam(config["lr"]), loss, metrics=["accuracy"])
    return net


MAKERS = {
    "keras": make_keras,
    "lightning": make_lightning,
    "skorch": make_skorch,
    "sklearn": make_sklearn,
}


@pytest.fixture(params=MAKERS)
def build(request: pytest.FixtureRequest) -> Any:
    pytest.importorskip(request.param)
    if request.param == "keras" and BACKEND != "torch":
        pytest.skip("a program of JAX is compiled for every search")
    return MAKERS[request.param]


def states_of(result: cerebro.Result) -> list[Any]:
    assert result.status == "finished"
    return [[epoch["state_hash"] for epoch in trial.history] for trial in result.trials]


# --- exact -------------------------------------------------------------------------


def test_keras_models_have_the_weights_of_fit(data: Any, tmp_path: Path) -> None:
    pytest.importorskip("keras")
    result = search(make_keras, data, tmp_path / "run")
    generators.seed_all(_core.trial_seed(0, 1), True)
    net = make_keras({"lr": 0.01})
    net.build((None, 4))
    for epoch, batches in enumerate(batches_of(data, BACKEND)):
        rows = [(batch["x"], batch["y"]) for batch in batches]
        given = {"initial_epoch": epoch, "epochs": epoch + 1, "verbose": 0}
        net.fit((row for row in rows), steps_per_epoch=len(rows), **given)
    trained = result.trials[1].load("last").net
    for left, right in zip(trained.get_weights(), net.get_weights(), strict=True):
        assert left.tobytes() == right.tobytes()


def test_skorch_nets_have_the_weights_of_skorch(data: Any, tmp_path: Path) -> None:
    pytest.importorskip("skorch")
    result = search(make_skorch, data, tmp_path / "run")
    generators.seed_all(_core.trial_seed(0, 1), True)
    net = make_skorch({"lr": 0.01}).initialize()
    for batches in batches_of(data):
        for batch in batches:
            net.train_step((batch["x"], batch["y"]))
    trained = result.trials[1].load("last").net.state_dict()
    for name, value in net.module_.state_dict().items():
        assert torch.equal(trained[name], value)


def test_pipelines_have_the_coefficients_of_partial_fit(data: Any, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    result = search(make_sklearn, data, tmp_path / "run")
    scaler, classifier = (step for _, step in make_sklearn({"lr": 0.01}).steps)
    for batches in batches_of(data, "numpy"):
        for batch in batches:
            x = scaler.partial_fit(batch["x"]).transform(batch["x"])
            classifier.partial_fit(x, batch["y"], classes=[0, 1, 2])
    trained = result.trials[1].load("last").estimator[-1]
    assert trained.coef_.tobytes() == classifier.coef_.tobytes()
    assert trained.intercept_.tobytes() == classifier.intercept_.tobytes()


# --- everywhere --------------------------------------------------------------------


def test_runs_resume(build: Any, data: Any, tmp_path: Path) -> None:
    whole = search(build, data, tmp_path / "whole")
    search(build, data, tmp_path / "part", epochs=1)
    further = cerebro.resume(tmp_path / "part", build, epochs=EPOCHS, workers=0, progress=False)
    assert states_of(further) == states_of(whole)


def test_folds_refits_and_predictions(build: Any, data: Any, tmp_path: Path) -> None:
    options = {"epochs": 1, "n_trials": 1, "validation": cerebro.KFold(2)}
    result = search(build, data, tmp_path / "run", **options)
    assert result.status == "finished"
    again = cerebro.refit(result, build=build, workers=0, progress=False, folder=tmp_path / "all")
    rows = {"x": make_rows()["x"][:5]}
    assert len(again.best.predict(rows, build=build)) == 5


# --- what is said ------------------------------------------------------------------


def test_one_line_says_once_what_is_wrapped(
    data: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("sklearn")
    search(make_sklearn, data, tmp_path / "run", progress="lines")
    said = "".join(capsys.readouterr())
    assert said.count("build returns a scikit-learn estimator: it trains as") == 1
    assert "cerebro.sklearn.Model(..., inputs='x', target='y')" in said


def uncompiled(config: dict[str, Any]) -> Any:
    return keras.Sequential([keras.layers.Dense(3)])


def bare(config: dict[str, Any]) -> Any:
    return torch.nn.Linear(4, 3)


def unable(config: dict[str, Any]) -> Any:
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression()


def unsolved(config: dict[str, Any]) -> Any:
    from sklearn.neural_network import MLPClassifier

    return MLPClassifier(solver="lbfgs")


REFUSED = {
    "uncompiled": (uncompiled, r"Sequential: compile a Keras model, net\.compile\("),
    "bare": (bare, r"Linear, which has no .*wrap the network: cerebro\.torch\.Model\("),
    "unable": (unable, r"LogisticRegression has no partial_fit.*use SGDClassifier\("),
    "unsolved": (unsolved, r"no partial_fit with solver='lbfgs'.*give solver='adam'"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_wrapped_is_refused_with_the_cure(
    kind: str, data: Any, tmp_path: Path
) -> None:
    pytest.importorskip("keras" if kind == "uncompiled" else "sklearn")
    build, message = REFUSED[kind]
    with pytest.raises(CerebroError, match=message):
        search(build, data, tmp_path / "run")


def test_a_target_before_the_inputs_is_not_unpacked_as_an_input(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    rows = {"y": make_rows()["y"], "x": make_rows()["x"]}
    with pytest.raises(CerebroError, match="whose first column is the target 'y': name the col"):
        search(make_lightning, rows, tmp_path / "run")


@pytest.mark.parametrize("kind", ["skorch", "sklearn"])
def test_a_missing_target_is_refused_with_the_columns(kind: str, tmp_path: Path) -> None:
    pytest.importorskip(kind)
    rows = {"x": make_rows()["x"], "outcome": make_rows()["y"]}
    with pytest.raises(CerebroError, match=r"has the columns 'x', 'outcome': say which it reads"):
        search(MAKERS[kind], rows, tmp_path / "run")


def test_inputs_of_functional_keras_models_are_found_by_name(tmp_path: Path) -> None:
    pytest.importorskip("keras")

    def build(config: dict[str, Any]) -> Any:
        inputs = [keras.Input((4,), name=name) for name in ("left", "right")]
        outputs = keras.layers.Dense(3)(keras.layers.concatenate(inputs))
        net = keras.Model(inputs, outputs)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        net.compile(keras.optimizers.SGD(config["lr"]), loss)
        return net

    x, y = make_rows().values()
    result = search(build, {"y": y, "right": x, "left": -x}, tmp_path / "run", epochs=1)
    assert result.status == "finished"


def test_the_output_of_a_functional_keras_model_may_name_the_target(tmp_path: Path) -> None:
    """Keras refuses a dictionary of a single target for a loss that is given by its name."""
    pytest.importorskip("keras")

    def build(config: dict[str, Any]) -> Any:
        given = keras.Input((4,), name="x")
        net = keras.Model(given, keras.layers.Dense(3, "softmax", name="kind")(given))
        net.compile(keras.optimizers.SGD(config["lr"]), "sparse_categorical_crossentropy")
        return net

    def build_by_name(config: dict[str, Any]) -> Any:
        return cerebro.keras.Model(build(config), inputs="x", target="kind")

    x, y = make_rows().values()
    data = {"kind": y, "x": x}
    found, named = (
        search(make, data, tmp_path / make.__name__, epochs=1).best
        for make in (build, build_by_name)
    )
    assert found.metrics == named.metrics


@pytest.mark.parametrize("as_dict", [False, True])
def test_a_functional_keras_model_gets_its_input_in_its_own_form(
    as_dict: bool, tmp_path: Path
) -> None:
    pytest.importorskip("keras")

    def build(config: dict[str, Any]) -> Any:
        given = keras.Input((4,), name="x")
        net = keras.Model({"x": given} if as_dict else given, keras.layers.Dense(3)(given))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        net.compile(keras.optimizers.SGD(config["lr"]), loss)
        return net

    with warnings.catch_warnings():
        warnings.filterwarnings("error", "The structure of `inputs`")
        assert search(build, make_rows(), tmp_path / "run", epochs=1).status == "finished"
