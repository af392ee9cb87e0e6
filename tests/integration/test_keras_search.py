"""Keras models in a search: in this process and in workers, replayed, loaded and exported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings

import numpy as np
import pytest

BACKEND = os.environ.get("KERAS_BACKEND", "torch")
pytest.importorskip(BACKEND)
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("KERAS_BACKEND", BACKEND)
    keras = pytest.importorskip("keras")

from resumable import hashes  # noqa: E402

import cerebro  # noqa: E402
from cerebro.control import Clone  # noqa: E402
from cerebro.machine.libraries import KERAS  # noqa: E402


def build(config):
    layers = keras.layers
    net = keras.Sequential(
        [layers.Dense(6), layers.BatchNormalization(), layers.Dropout(0.3), layers.Dense(3)]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metrics = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name=None)]
    net.compile(keras.optimizers.Adam(config["lr"]), loss, metrics=metrics)
    return cerebro.keras.Model(net, weight="w")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(0)
    rows = {
        "x": rng.normal(size=(96, 4)).astype("float32"),
        "y": rng.integers(0, 3, 96),
        "w": rng.uniform(0.5, 1.5, 96).astype("float32"),
    }
    return cerebro.shard(rows, tmp_path_factory.mktemp("data") / "set", shards=2, progress=False)


def searched(data, folder, workers):
    return cerebro.search(
        *(build, {"lr": [0.1, 0.01]}, data),
        epochs=2,
        validation=0.25,
        searcher="grid",
        batch_size=12,
        metric="accuracy",
        workers=workers,
        run=folder,
        progress=False,
    )


def test_a_search_is_exact_and_its_models_are_those_of_keras(data, tmp_path):
    inline, result = (searched(data, tmp_path / str(count), count) for count in (0, 2))
    assert result.status == "finished"
    assert hashes(inline) == hashes(result)
    if BACKEND == "torch":  # a program of JAX would be compiled again
        assert cerebro.replay(result, 1, build).identical
    best = result.best
    assert {"loss", "accuracy", "sparse_top_k_categorical_accuracy"} <= best.metrics.keys()
    recorded = {name: best.metrics[name] for name in best.evaluate()}
    assert best.evaluate() == recorded

    model = best.load()
    assert isinstance(model.net, keras.Model)
    rows = data.shard(0)["x"][:5]
    expected = model.net.predict(np.array(rows), verbose=0)
    np.testing.assert_allclose(best.predict(rows), expected, rtol=1e-5)
    model.net.save(tmp_path / "best.keras")
    again = keras.saving.load_model(tmp_path / "best.keras")
    np.testing.assert_allclose(again.predict(np.array(rows), verbose=0), expected, rtol=1e-5)

    load_file = pytest.importorskip("safetensors.numpy").load_file
    weights = load_file(best.export(tmp_path / "best.safetensors"))
    kernel = weights["sequential/dense/kernel"]
    np.testing.assert_array_equal(kernel, keras.ops.convert_to_numpy(model.net.layers[0].kernel))
    with pytest.raises(cerebro.InputError, match="Keras writes ONNX itself"):
        best.export(tmp_path / "best.onnx", "onnx")


def test_python_state_of_a_layer_is_found(data):
    class Counting(keras.layers.Layer):
        count = 0

        def call(self, x):
            self.count += 1
            return x * (1 + self.count / 10)

    def build(config):
        net = keras.Sequential([Counting(), keras.layers.Dense(3)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        net.compile("sgd", loss, run_eagerly=True)
        return cerebro.keras.Model(net)

    problems = cerebro.check(build, {}, data, batch_size=12, validation=0.25).problems
    assert any("count is lost by a hop" in problem for problem in problems), problems


def test_a_resumed_run_keeps_its_settings_without_a_warning(data, tmp_path):
    keras.config.set_epsilon(1e-5)
    try:
        whole, part = (searched(data, tmp_path / name, 1) for name in ("whole", "part"))
    finally:
        keras.config.set_epsilon(1e-7)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        further = cerebro.resume(part.path, build, epochs=3, workers=1, progress=False)
    keras.config.set_epsilon(1e-5)
    try:
        again = cerebro.resume(whole.path, build, epochs=3, workers=1, progress=False)
    finally:
        keras.config.set_epsilon(1e-7)
    assert hashes(further) == hashes(again)


def build_some_in_bfloat16(config):
    if config["policy"] is not None:
        keras.config.set_dtype_policy(config["policy"])
        keras.config.set_epsilon(1e-3)
    net = keras.Sequential([keras.layers.Dense(4, "relu"), keras.layers.Dense(3, "softmax")])
    net.compile(keras.optimizers.Adam(0.1), "sparse_categorical_crossentropy")
    return cerebro.keras.Model(net)


def test_keras_settings_made_in_build_apply_to_its_trial_only(data, tmp_path):
    before = KERAS.present()

    def ran(workers, epochs=2):
        return cerebro.search(
            *(build_some_in_bfloat16, {"policy": ["mixed_bfloat16", None, None]}, data),
            epochs=epochs,
            validation=0.25,
            searcher="grid",
            batch_size=12,
            workers=workers,
            run=tmp_path / f"{workers}-{epochs}",
            progress=False,
        )

    inline, result, part = ran(0), ran(2), ran(0, epochs=1)
    assert KERAS.present() == before
    assert hashes(inline) == hashes(result)
    kinds = [trial.load().net.layers[0].compute_dtype for trial in inline]
    assert kinds == ["bfloat16", "float32", "float32"]
    for trial in inline:
        measured = trial.evaluate()
        assert measured == {name: trial.metrics[name] for name in measured}
    resumed = cerebro.resume(part.path, build_some_in_bfloat16, epochs=2, workers=0, progress=False)
    assert hashes(resumed) == hashes(inline)
    assert KERAS.present() == before


def test_a_clone_with_another_batch_size_is_refused_where_a_schedule_counts_batches(data, tmp_path):
    def build(config):
        net = keras.Sequential([keras.layers.Dense(3)])
        rate = config["lr"]
        if config["decay"]:
            rate = keras.optimizers.schedules.CosineDecay(rate, 20)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        net.compile(keras.optimizers.SGD(rate), loss)
        return cerebro.keras.Model(net)

    result = cerebro.search(
        *(build, {"lr": [0.1], "decay": [True, False], "batch_size": [16]}, data),
        epochs=1,
        searcher="grid",
        workers=0,
        run=tmp_path / "run",
        progress=False,
    )
    decaying, steady = sorted(result.trials, key=lambda trial: not trial.config["decay"])
    clones = [Clone(trial.number, {"batch_size": 8}, epochs=2) for trial in (decaying, steady)]
    with pytest.raises(cerebro.InputError, match=r"8 instead of 16.* move .*CosineDecay"):
        cerebro.resume(result, build, actions=clones[:1])
    assert cerebro.resume(result, build, actions=clones[1:]).trials[2].status == "finished"


ELSEWHERE = """
import json, runpy, sys
sys.modules["cerebro"] = None
predict = runpy.run_path(sys.argv[1] + "/load.py")["predict"]
rows = json.loads(sys.argv[2])
print(json.dumps([predict(rows, output=o).tolist() for o in ("raw", "class", "probability")]))
"""
ROWS = [
    {"a": float(row), "b": None if row % 5 == 0 else -row / 9, "city": "AB"[row % 2],
     "y": ["no", "yes"][row % 2]}
    for row in range(40)
]  # fmt: skip


def two_inputs(logits):
    x, city = keras.layers.Input((2,), name="x"), keras.layers.Input((), name="city")
    code = keras.layers.Reshape((1,))(city)
    hidden = keras.layers.Concatenate()([x, code])
    net = keras.Model([x, city], keras.layers.Dense(2, None if logits else "softmax")(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=logits)
    net.compile("sgd", loss if logits else "sparse_categorical_crossentropy")
    return net


def search_rows(build, folder):
    data = cerebro.shard(ROWS, folder / "d", columns={"x": ["a", "b"], "city": "city", "y": "y"},
                         dtypes={"x": "float32"}, missing="category", progress=False)  # fmt: skip
    options = {"epochs": 1, "batch_size": 8, "searcher": "grid", "workers": 0, "progress": False}
    return cerebro.search(build, {"lr": [0.1]}, data, run=folder / "run", **options).best


@pytest.mark.parametrize("logits", [True, False])
def test_a_saved_folder_predicts_raw_rows_without_cerebro(logits, tmp_path):
    best = search_rows(lambda config: two_inputs(logits), tmp_path)
    raw = keras.ops.convert_to_numpy(best.predict(ROWS))
    x = np.array([[r["a"], np.median([q["b"] for q in ROWS if q["b"] is not None])
                   if r["b"] is None else r["b"]] for r in ROWS], np.float32)  # fmt: skip
    city = np.array([r["city"] == "B" for r in ROWS], np.int64)
    by_hand = best.load().net.predict({"x": x, "city": city}, verbose=0)
    np.testing.assert_allclose(raw, by_hand, rtol=1e-6)
    share = np.exp(raw) / np.exp(raw).sum(1, keepdims=True) if logits else raw
    np.testing.assert_allclose(best.predict(ROWS, output="probability"), share, rtol=1e-5)
    names = np.array(["no", "yes"])[raw.argmax(1)].tolist()
    assert best.predict(ROWS, output="class").tolist() == names
    best.save(tmp_path / "model")
    command = [sys.executable, "-c", ELSEWHERE, str(tmp_path / "model"), json.dumps(ROWS)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    np.testing.assert_allclose(found[0], raw, rtol=1e-6)
    assert found[1] == names
    np.testing.assert_allclose(found[2], share, rtol=1e-5)


def test_a_saved_folder_with_an_own_layer_has_its_weights(tmp_path):
    class Twice(keras.layers.Layer):
        def call(self, x):
            return 2 * x

    def build(config):
        net = keras.Sequential([keras.layers.Input((2,)), Twice(), keras.layers.Dense(2)])
        net.compile("sgd", "sparse_categorical_crossentropy")
        return cerebro.keras.Model(net, inputs="x", target="y")

    best = search_rows(build, tmp_path)
    with pytest.warns(UserWarning, match="cannot load the Sequential .Twice is not of Keras"):
        best.save(tmp_path / "model")
    files = {path.name for path in (tmp_path / "model").iterdir()}
    assert files == {"build.py", "load.py", "model.json", "weights.safetensors"}


@keras.saving.register_keras_serializable()
def shifted(x):
    return keras.ops.relu(x) - 0.5


def test_a_function_of_the_program_is_not_in_the_folder(tmp_path):
    def build(config):
        layers = [keras.layers.Input((2,)), keras.layers.Dense(2, activation=shifted)]
        net = keras.Sequential(layers)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        net.compile("sgd", [loss])
        return cerebro.keras.Model(net, inputs="x", target="y")

    best = search_rows(build, tmp_path)
    assert best.predict(ROWS, output="probability").shape == (len(ROWS), 2)
    with pytest.warns(UserWarning, match="cannot load the Sequential .*shifted is not of Keras"):
        best.save(tmp_path / "model")


def test_outputs_that_are_no_probabilities_are_refused(tmp_path):
    def build(config):  # the loss expects probabilities, and gets logits
        net = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2)])
        net.compile("sgd", "sparse_categorical_crossentropy")
        return cerebro.keras.Model(net, inputs="x", target="y")

    best = search_rows(build, tmp_path)
    with pytest.raises(cerebro.InputError, match="the outputs are not probabilities"):
        best.predict(ROWS, output="class")
