"""`cerebro.keras.Model` beside Keras' own `fit`, on PyTorch or the backend of KERAS_BACKEND.

`test_keras_on_jax` runs this file again with JAX.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BACKEND = os.environ.get("KERAS_BACKEND", "torch")
pytest.importorskip(BACKEND)
with pytest.MonkeyPatch.context() as patch:
    patch.setenv("KERAS_BACKEND", BACKEND)
    keras = pytest.importorskip("keras")

import cerebro  # noqa: E402
import cerebro._core as _core  # noqa: E402
from cerebro.errors import InputError, StateError  # noqa: E402
from cerebro.machine import generators  # noqa: E402
from cerebro.machine.libraries import KERAS  # noqa: E402

RNG = np.random.default_rng(0)
X = RNG.normal(size=(96, 5)).astype("float32")
Y = RNG.integers(0, 2, 96)
W = RNG.uniform(0.5, 2.0, 96).astype("float32")
EPOCHS = 2


class Noise(keras.layers.Layer):
    """Draws from a seed generator, in evaluation as well."""

    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator()

    def call(self, x):
        return x + 0.1 * keras.random.normal(keras.ops.shape(x), seed=self.seeds)


def everything():
    """Layers, an optimizer and metrics with every kind of state."""
    layers = keras.layers
    net = keras.Sequential(
        [
            layers.Dense(8),  # built by the first batch
            layers.BatchNormalization(),
            layers.ReLU(),
            # With a seed: PyTorch's data loader, in `fit`, draws from the global generator.
            layers.Dropout(0.3, seed=7),
            layers.Dense(1, activation="sigmoid", kernel_regularizer="l2"),
        ]
    )
    rate = keras.optimizers.schedules.ExponentialDecay(0.01, 5, 0.8)
    optimizer = keras.optimizers.AdamW(
        rate, clipnorm=0.5, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=4
    )
    net.compile(
        optimizer,
        "binary_crossentropy",
        metrics=["accuracy", keras.metrics.AUC(num_thresholds=10)],
        weighted_metrics=["mae"],
    )
    return net


def two_outputs():
    """A functional model with names, two losses and their weights."""
    inputs = keras.Input((5,), name="rows")
    hidden = keras.layers.Dense(4, activation="tanh")(inputs)
    net = keras.Model(
        {"rows": inputs},
        {
            "label": keras.layers.Dense(2)(hidden),
            "sums": keras.layers.Dense(1)(hidden),
        },
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(
        keras.optimizers.SGD(0.05, momentum=0.9, gradient_accumulation_steps=2),
        loss={"label": loss, "sums": "mse"},
        loss_weights={"label": 1.0, "sums": 0.3},
        metrics={"label": ["accuracy"]},
        run_eagerly=True,
    )
    return net


def made(net, **arguments):
    """A network and its model, as `build` makes them."""
    KERAS.begin_build(KERAS.present())
    random.seed(3)
    np.random.seed(3)
    if BACKEND == "torch":
        import torch

        torch.manual_seed(3)
    return cerebro.keras.Model(net(), **arguments)


def batches(data, epoch):
    return list(data.batches(16, seed=5, epoch=epoch, framework="numpy"))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "set"
    rows = {"x": X, "y": Y, "sums": X.sum(1, keepdims=True), "w": W}
    return cerebro.shard(rows, folder, shards=2, progress=False)


KINDS = {
    "everything": (everything, {"weight": "w"}),
    "two_outputs": (
        two_outputs,
        {"inputs": {"rows": "x"}, "target": {"label": "y", "sums": "sums"}},
    ),
}


def as_keras_has_it(kind, batch):
    """A batch for `fit`: NumPy's arrays, copied."""
    batch = {name: np.array(value) for name, value in batch.items()}
    if kind == "everything":
        return batch["x"], batch["y"], batch["w"]
    return {"rows": batch["x"]}, {"label": batch["y"], "sums": batch["sums"]}


def hopped(model, again):
    """The state of a model, packed, in a new one."""
    packed = _core.pack_state(model.state_dict())
    again.load_state_dict(_core.unpack_state(packed, "torch" if BACKEND == "torch" else "numpy"))
    return again


def info_of(data):
    return cerebro.Info(EPOCHS, 6, 12, 16, 0, 3, data=data)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_metrics_and_weights_are_those_of_fit(kind, data):
    net, arguments = KINDS[kind]
    model = made(net, **arguments)
    model.bind_info(info_of(data))
    ours = []
    for epoch in range(EPOCHS):
        model.begin_epoch(epoch)
        for step, batch in enumerate(batches(data, epoch)):
            if step == 3:  # in the middle of an epoch, where sums of metrics matter
                model.end_unit()
                with generators.preserve_generators(BACKEND == "torch"):
                    again = made(net, **arguments)
                    again.bind_info(info_of(data))
                model = hopped(model, again)
            assert model.train_batch(batch) is None
        model.end_unit()
        trained = model.training_metrics()
        held_out = model.evaluate(data)
        assert model.evaluate(data) == held_out
        ours.append(trained | {f"val_{name}": value for name, value in held_out.items()})

    theirs = made(net, **arguments).net
    shards = [data.shard(index) for index in range(2)]
    rows = {name: np.concatenate([shard[name] for shard in shards]) for name in shards[0]}
    held_out = as_keras_has_it(kind, rows)
    for epoch in range(EPOCHS):
        rows = [as_keras_has_it(kind, batch) for batch in batches(data, epoch)]
        history = theirs.fit(
            (row for row in rows),
            steps_per_epoch=len(rows),
            initial_epoch=epoch,
            epochs=epoch + 1,
            verbose=0,
            callbacks=[Unfinished()],
        ).history
        validated = theirs.evaluate(
            *held_out[:2],
            sample_weight=(*held_out, None)[2],
            verbose=0,
            batch_size=96,
            return_dict=True,
        )
        assert {name: value for name, (value,) in history.items()} == {
            name: value for name, value in ours[epoch].items() if not name.startswith("val_")
        }
        for name, value in validated.items():
            assert ours[epoch][f"val_{name}"] == pytest.approx(value, rel=1e-6)
    for left, right in zip(model.net.get_weights(), theirs.get_weights(), strict=True):
        assert left.tobytes() == right.tobytes()


class Unfinished(keras.callbacks.Callback):
    """`fit` ends by overwriting weights with their average; here it continues in a new epoch."""

    def on_train_begin(self, logs=None):
        self.model.optimizer.finalize_variable_values = lambda variables: None


class Supervised(keras.Model):
    """Steps that unpack their data as those of Keras' guides do. JAX' steps have a state, too."""

    def train_step(self, *given):
        *state, (x, y) = given
        return super().train_step(*state, (x, y))

    def test_step(self, *given):
        *state, (x, y) = given
        return super().test_step(*state, (x, y))

    def predict_step(self, *given):
        *state, x = given
        return super().predict_step(*state, x - 0.5)  # not a tuple


class Weighted(Supervised):
    def train_step(self, *given):
        *state, (x, y, weight) = given
        return keras.Model.train_step(self, *state, (x, y, weight))

    def test_step(self, *given):
        *state, (x, y, weight) = given
        return keras.Model.test_step(self, *state, (x, y, weight))


class Images(Supervised):
    """As in an autoencoder, the data are the inputs, and the loss is the model's own."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        errors = keras.ops.mean((y_pred - y) ** 2, axis=1)
        return keras.ops.mean(errors if sample_weight is None else errors * sample_weight)

    def train_step(self, *given):
        *state, images = given
        return keras.Model.train_step(self, *state, (images, images + 0.5))

    def test_step(self, *given):
        *state, images = given
        return keras.Model.test_step(self, *state, (images, images + 0.5))


OWN_STEPS = {
    "x": (Images, {"target": None}, 5),
    "x_y": (Supervised, {}, 1),
    "x_y_weight": (Weighted, {"weight": "w"}, 1),
}
if BACKEND == "torch":
    import torch

    class ByHand(keras.Model):
        """All of a training step and of a test step, as a guide of Keras has them for PyTorch."""

        def train_step(self, data):
            x, y = data
            self.zero_grad()
            outputs = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=outputs)
            loss.backward()
            weights = list(self.trainable_weights)
            with torch.no_grad():
                self.optimizer.apply([weight.value.grad for weight in weights], weights)
            return self.measured(loss, y, outputs)

        def test_step(self, data):
            x, y = data
            outputs = self(x, training=False)
            return self.measured(self.compute_loss(y=y, y_pred=outputs), y, outputs)

        def measured(self, loss, y, outputs):
            for metric in self.metrics:
                values = (loss,) if metric.name == "loss" else (y, outputs)
                metric.update_state(*values)
            return {metric.name: metric.result() for metric in self.metrics}

    OWN_STEPS["by_hand"] = (ByHand, {}, 1)


@pytest.mark.parametrize("kind", OWN_STEPS)
def test_own_steps_get_the_data_of_fit(kind, data):
    steps, arguments, units = OWN_STEPS[kind]

    def net():
        inputs = keras.Input((5,))
        hidden = keras.layers.Dropout(0.3, seed=7)(keras.layers.Dense(8, "relu")(inputs))
        net = steps(inputs, keras.layers.Dense(units)(hidden))
        supervised = {"loss": "mse", "metrics": ["mae"], "weighted_metrics": ["mse"]}
        net.compile(keras.optimizers.Adam(0.01), **(supervised if units == 1 else {}))
        return net

    def given(rows):
        """Arguments for `fit` and `evaluate`."""
        target, weight = arguments.get("target", "y"), arguments.get("weight")
        own = {"x": rows["x"], "y": target and rows[target], "sample_weight": weight and rows["w"]}
        return own | {"verbose": 0, "shuffle": False}

    model = made(net, **arguments)
    model.bind_info(info_of(data))
    theirs = made(net, **arguments).net
    for epoch in range(EPOCHS):
        of_epoch = batches(data, epoch)
        model.begin_epoch(epoch)
        for batch in of_epoch:
            model.train_batch(batch)
        model.end_unit()
        rows = {name: np.concatenate([batch[name] for batch in of_epoch]) for name in of_epoch[0]}
        history = theirs.fit(**given(rows), batch_size=16).history
        assert model.training_metrics() == {name: value for name, (value,) in history.items()}
    for left, right in zip(model.net.get_weights(), theirs.get_weights(), strict=True):
        assert left.tobytes() == right.tobytes()
    rows = {"x": X, "y": Y, "w": W}
    held_out = {name: value for name, value in given(rows).items() if name != "shuffle"}
    assert model.evaluate(rows, batch_size=16) == theirs.evaluate(
        **held_out, batch_size=16, return_dict=True
    )
    predicted = theirs.predict(X, batch_size=16, verbose=0)
    np.testing.assert_array_equal(model.predict({"x": X}, batch_size=16), predicted)


def test_weights_without_a_target_are_not_lost():
    class Own(Images):
        def train_step(self, *given):
            *state, (x, _, weight) = given
            return keras.Model.train_step(self, *state, (x, x, weight))

    def net():
        inputs = keras.Input((5,))
        net = Own(inputs, keras.layers.Dense(5)(inputs))
        net.compile("sgd")
        return net

    losses = []
    for target in ("x", None):
        model = made(net, target=target, weight="w")
        model.begin_epoch(0)
        model.train_batch({"x": X, "w": W})
        model.end_unit()
        losses.append(model.training_metrics())
    assert losses[0] == losses[1]


def test_evaluation_and_prediction_change_nothing(data):
    def net():
        made = keras.Sequential([Noise(), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
        made.compile("sgd", "mse", metrics=["mae"])
        return made

    model = made(net)
    batch = batches(data, 0)[0]
    model.begin_epoch(0)
    model.train_batch(batch)
    model.end_unit()
    before = _core.hash_state(_core.pack_state(model.state_dict()))
    assert model.evaluate(data) == model.evaluate(data)
    assert model.eval_batch(batch) == model.eval_batch(batch)
    first = model.predict({"x": X})
    assert isinstance(first, np.ndarray) and first.shape == (96, 1)
    for given in (X, keras.ops.convert_to_tensor(X)):
        np.testing.assert_array_equal(first, model.predict(given))
    assert _core.hash_state(_core.pack_state(model.state_dict())) == before


@pytest.mark.skipif(BACKEND != "torch", reason="PyTorch's modules need its backend")
def test_buffers_of_pytorch_modules_move(data):
    """Statistics of PyTorch's batch norm, which are no variables of Keras."""

    class Normed(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(8)  # Keras wraps it

        def call(self, x, training=None):
            return self.norm(x, training=training)

    def net():
        first = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8))
        layers = [keras.layers.TorchModuleWrapper(first), Normed(), keras.layers.Dense(1)]
        made = keras.Sequential(layers)
        made.compile("sgd", "mse")
        return made

    model, again = made(net), made(net)
    for one in (model, again):
        one.bind_info(info_of(data))
    model.begin_epoch(0)
    for batch in batches(data, 0):
        model.train_batch(batch)
    state = model.state_dict()["net"]
    names = [name for name in state if name.endswith("/running_mean")]
    assert len(names) == 2 and all(float(state[name].abs().sum()) > 0 for name in names)
    evaluated = model.evaluate(data)
    assert hopped(model, again).evaluate(data) == evaluated
    assert _core.hash_state(_core.pack_state(again.state_dict())) == _core.hash_state(
        _core.pack_state(model.state_dict())
    )


def test_class_weights_are_those_of_fit(data):
    def net():
        made = keras.Sequential([keras.layers.Dense(2, activation="softmax")])
        made.compile("sgd", "sparse_categorical_crossentropy")
        return made

    model = made(net, class_weight={0: 1.0, 1: 7.0})
    theirs = made(net).net
    for batch in batches(data, 0)[:2]:
        model.begin_epoch(0)
        model.train_batch(batch)
        loss = theirs.train_on_batch(
            np.array(batch["x"]), np.array(batch["y"]), class_weight={0: 1.0, 1: 7.0}
        )
        model.end_unit()
        assert model.training_metrics()["loss"] == float(np.asarray(loss))
    unweighted = made(net)
    assert unweighted.evaluate({"x": X, "y": Y}) == made(net, class_weight={1: 7.0}).evaluate(
        {"x": X, "y": Y}
    )


def test_names_do_not_depend_on_earlier_models():
    first, second = made(everything), made(everything)
    for model in (first, second):
        model.evaluate({"x": X, "y": Y})
    assert first.state_dict()["net"].keys() == second.state_dict()["net"].keys()
    assert "auc" in second.evaluate({"x": X, "y": Y})
    assert "sequential/dense_1/kernel" in second.state_dict()["net"]


def sgd(rate):
    return keras.optimizers.SGD(rate, momentum=0.9)


def per_layer(rate):
    pattern = {".*/kernel": sgd(10 * rate)}
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(sgd(rate), pattern))


def scaled(rate):
    return keras.optimizers.LossScaleOptimizer(sgd(rate), initial_scale=8.0)


OPTIMIZERS = {
    "sgd": (sgd, lambda net: [net.optimizer]),
    "scaled": (scaled, lambda net: [net.optimizer, net.optimizer.inner_optimizer]),
}
if hasattr(keras.optimizers, "MultiOptimizer"):  # not in older versions of Keras
    OPTIMIZERS["per_layer"] = (per_layer, lambda net: net.optimizer.optimizers)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_clone_keeps_its_learning_rates_and_its_random_numbers(kind):
    optimizer, in_use = OPTIMIZERS[kind]

    def net(rate):
        def build():
            layers = [keras.layers.Dropout(0.5, seed=int(rate * 10)), keras.layers.Dense(1)]
            made = keras.Sequential([keras.Input((5,)), *layers])
            made.compile(optimizer(rate), "mse")
            made.d_optimizer, made.g_optimizer = sgd(2 * rate), scaled(3 * rate)
            for each in (made.d_optimizer, made.g_optimizer):
                each.build(made.trainable_variables)
            return made

        return build

    def rates(model):
        used = [*in_use(model.net), model.net.d_optimizer, model.net.g_optimizer]
        return [float(each.learning_rate) for each in used]

    parent, clone = made(net(0.1)), made(net(0.2))
    for model in (parent, clone):
        model.begin_epoch(0)
        model.train_batch({"x": X[:8], "y": Y[:8]})
        model.end_unit()
    seeds = [
        np.array(v.numpy() if BACKEND == "torch" else v.value)
        for v in clone.net.non_trainable_variables
    ]
    own, moments = rates(clone), [np.array(v) for v in arrays_of(parent, "momentum")]
    clone.load_clone(parent.state_dict(), {})
    assert rates(clone) == own != rates(parent)
    assert own[-2:] == pytest.approx([0.4, 0.6])
    assert moments and any(moment.any() for moment in moments)
    for moment, array in zip(moments, arrays_of(clone, "momentum"), strict=True):
        np.testing.assert_array_equal(array, moment)
    np.testing.assert_array_equal(clone.net.get_weights()[-2], parent.net.get_weights()[-2])
    for seed, variable in zip(seeds, clone.net.non_trainable_variables, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable.value), seed)


def arrays_of(model, name):
    """The variables of the optimizer whose name contains `name`."""
    state = model.state_dict()["optimizer"]
    return [np.asarray(value) for path, value in state.items() if name in path]


def test_states_of_other_models_and_backends_are_refused():
    model = made(everything)
    with pytest.raises(StateError, match="has seen no data"):
        model.state_dict()
    model.evaluate({"x": X, "y": Y})
    state = model.state_dict()
    other = "jax" if BACKEND == "torch" else "torch"
    with pytest.raises(StateError, match=f"Keras on {other}.*set KERAS_BACKEND={other}"):
        model.load_state_dict({**state, "backend": other})
    fewer = {name: value for name, value in state["net"].items() if "dense_1" not in name}
    with pytest.raises(StateError, match="the model has the variable net/sequential/dense_1/bias"):
        model.load_state_dict({**state, "net": fewer})
    name = "sequential/dense/kernel"
    with pytest.raises(StateError, match=rf"net/{name} is float32 of shape \(4, 8\) in the state"):
        model.load_state_dict({**state, "net": state["net"] | {name: state["net"][name][:4]}})


def test_bad_arguments_are_explained():
    def net():
        return keras.Sequential([keras.layers.Dense(1)])

    for arguments, message in (
        (((net()),), "net is not compiled: call net.compile"),
        ((keras.Sequential,), "net is the class Sequential"),
        ((3,), "net must be a compiled keras.Model, not 3"),
    ):
        with pytest.raises(InputError, match=message):
            cerebro.keras.Model(*arguments)
    with pytest.raises(TypeError, match="callbacks=: callbacks of Keras cannot follow"):
        cerebro.keras.Model(everything(), callbacks=[])
    with pytest.raises(TypeError, match="takes weight=, not sample_weight="):
        cerebro.keras.Model(everything(), sample_weight="w")
    with pytest.raises(InputError, match="cannot be combined"):
        cerebro.keras.Model(everything(), weight="w", class_weight={0: 1})
    with pytest.raises(InputError, match="inputs names the column 'z', but the data has x, y"):
        cerebro.keras.Model(everything(), inputs="z").evaluate({"x": X, "y": Y})
    with pytest.raises(InputError, match="weight names the column 'w', but the data has x, y"):
        cerebro.keras.Model(everything(), weight="w").train_batch({"x": X, "y": Y})
    with pytest.raises(InputError, match="EarlyStopping is a Keras callback"):
        cerebro.search(
            lambda config: None, {}, {"x": X}, epochs=1, callbacks=[keras.callbacks.EarlyStopping()]
        )


def test_a_metric_of_several_numbers_is_refused():
    net = keras.Sequential([keras.layers.Dense(3, activation="softmax")])
    net.compile("sgd", "categorical_crossentropy", metrics=[keras.metrics.F1Score()])
    with pytest.raises(InputError, match=r"'f1_score' has shape \(3,\).*average='macro'"):
        cerebro.keras.Model(net).evaluate({"x": X, "y": np.eye(3, dtype="float32")[Y]})


def test_a_second_optimizer_must_be_built():
    net = everything()
    net.second = keras.optimizers.Adam()
    with pytest.raises(InputError, match=r"net\.second is not built"):
        cerebro.keras.Model(net).evaluate({"x": X, "y": Y})
    net.second.build(net.trainable_variables)
    model = cerebro.keras.Model(net)
    model.evaluate({"x": X, "y": Y})
    assert any(name.startswith("adam/") for name in model.state_dict()["optimizer"])


def test_settings_of_keras_are_carried():
    settings = KERAS.present()
    assert settings["backend"] == BACKEND
    with KERAS.of_run({}):
        KERAS.apply({**settings, "floatx": "float64", "dtype_policy": "mixed_bfloat16"})
        assert keras.config.floatx() == "float64"
        assert keras.config.dtype_policy().name == "mixed_bfloat16"
    assert KERAS.present() == settings


def test_a_build_starts_from_default_settings_if_the_script_has_none(tmp_path, monkeypatch):
    """As where only `build` imports Keras: in a worker, settings of other trials do not stay."""
    (tmp_path / "keras.json").write_text('{"epsilon": 1e-05}')
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    with KERAS.of_run({}):
        KERAS.apply({"dtype_policy": "mixed_bfloat16", "floatx": "float64"})
        KERAS.begin_build({})
        found = KERAS.present()
        assert (found["dtype_policy"], found["floatx"]) == ("float32", "float32")
        assert found["epsilon"] == 1e-5


@pytest.mark.skipif(BACKEND != "torch", reason="once is enough")
def test_keras_on_jax(tmp_path):
    """The same with JAX: a process cannot change its backend."""
    pytest.importorskip("jax")
    searches = Path(__file__).parents[2] / "integration" / "test_keras_search.py"
    files = [__file__, str(searches)]
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-n",
            "0",
            "-p",
            "no:cacheprovider",
            *files,
            "-k",
            "everything or is_exact or own_steps or a_clone",
        ],
        env={**os.environ, "KERAS_BACKEND": "jax", **cache},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
