"""cerebro.jax.Model: equal to a plain loop, with and without hops between units."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import cerebro._core as _core
import cerebro.data
from cerebro.errors import InputError, StateError
from cerebro.model import Info, check_model, get_whole_pass
from cerebro.worker.evaluate import run_batches

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")
import jax.numpy as jnp  # noqa: E402

import cerebro.jax  # noqa: E402

STEPS, ROWS = 6, 6


def batches(count=STEPS, rows=ROWS, start=0):
    made = []
    for number in range(start, start + count):
        generator = np.random.default_rng(100 + number)
        x = generator.normal(size=(rows, 4)).astype("float32")
        made.append({"x": x, "y": generator.integers(0, 3, rows).astype("int32")})
    return made


def weights(dtype="float32"):
    generator = np.random.default_rng(1)
    return (
        {
            "layers": [
                generator.normal(size=shape).astype("float32") for shape in ((4, 5), (5, 3))
            ],
            "bias": np.zeros(3, dtype="float32"),
        }
        if dtype == "float32"
        else jax.tree.map(lambda a: jnp.asarray(a, dtype), weights())
    )


def apply(params, x):
    first, second = params["layers"]
    return jax.nn.relu(x @ first) @ second + params["bias"]


def dropout(params, x, *, train, key):
    first, second = params["layers"]
    hidden = jax.nn.relu(x @ first)
    if train:
        hidden = hidden * jax.random.bernoulli(key, 0.7, hidden.shape) / 0.7
    return hidden @ second + params["bias"]


def normed(params, x, variables, train):
    mean = x.mean(0) if train else variables["norm"]["mean"]
    output = apply(params, x - mean)
    if not train:
        return output
    kept = 0.9 * variables["norm"]["mean"] + 0.1 * mean
    return output, {"norm": {"mean": kept, "count": variables["norm"]["count"] + 1}}


STATISTICS = {"norm": {"mean": np.zeros(4, dtype="float32"), "count": np.int32(0)}}


def cross_entropy(outputs, target):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, target).mean()


def accuracy(outputs, target):
    return (outputs.argmax(1) == target).mean()


@functools.cache
def adam():
    return optax.adam(1e-2)


def make(function=apply, params=None, **options):
    options = {"optimizer": adam(), "loss": cross_entropy, "seed": 7} | options
    return cerebro.jax.Model(function, weights() if params is None else params, **options)


def carried(model):
    return _core.unpack_state(_core.pack_state(model.state_dict()), "numpy")


def state_hash(model):
    return _core.hash_state(_core.pack_state(model.state_dict()))


def assert_same(one, two):
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for left, right in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert left.dtype == right.dtype
        assert np.asarray(left).tobytes() == np.asarray(right).tobytes()


def by_hand(forward, params, variables=None, optimizer=None):
    """The plain loop; `forward(params, variables, key, x)` returns outputs and new variables."""
    optimizer = optimizer or adam()

    @jax.jit
    def step(params, state, variables, number, x, y):
        key = jax.random.fold_in(jax.random.key(7), number)

        def objective(params):
            outputs, new = forward(params, variables, key, x)
            return cross_entropy(outputs, y), new

        (loss, variables), gradients = jax.value_and_grad(objective, has_aux=True)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, variables, loss

    params = jax.tree.map(jnp.asarray, params)
    state, losses = optimizer.init(params), []
    for number, batch in enumerate(batches()):
        params, state, variables, loss = step(params, state, variables, number, *batch.values())
        losses.append(float(loss))
    return params, state, variables, losses


CASES = {
    "plain": (apply, None, lambda p, v, k, x: (apply(p, x), v)),
    "dropout": (dropout, None, lambda p, v, k, x: (dropout(p, x, train=True, key=k), v)),
    "variables": (normed, STATISTICS, lambda p, v, k, x: normed(p, x, v, True)),
}


@pytest.mark.parametrize("case", CASES)
def test_training_is_bit_for_bit_the_plain_loop_with_and_without_hops(case):
    function, variables, forward = CASES[case]
    params, state, new_variables, losses = by_hand(forward, weights(), variables)
    straight = make(function, variables=variables)
    hopping = make(function, variables=variables)
    check_model(straight)
    for batch, loss in zip(batches(), losses, strict=True):
        values = straight.train_batch(batch)
        assert float(values["loss"]) == loss and values["loss"].shape == ()
        state_before = carried(hopping)
        hopping = make(function, variables=variables, seed=8)  # the key comes with the state
        hopping.load_state_dict(state_before)
        hopping.train_batch(batch)
    assert_same(straight.params, params)
    assert_same(straight.optimizer_state, state)
    assert_same(straight.variables, new_variables)
    assert state_hash(straight) == state_hash(hopping)
    assert (
        straight.predict(batches()[0]["x"]).tobytes()
        == hopping.predict(batches()[0]["x"]).tobytes()
    )


def test_keys_change_every_step_but_not_in_evaluation():
    def noise(params, x, *, key):
        return x * params["w"] + jax.random.normal(key)

    model = make(noise, {"w": np.ones(4, "float32")}, optimizer=optax.sgd(0.0))
    batch = batches(1)[0]
    losses = {float(model.train_batch(batch)["loss"]) for _ in range(4)}
    assert len(losses) == 1  # softmax does not see what is added to all
    noisy = make(
        noise,
        {"w": np.ones(4, "float32")},
        optimizer=optax.sgd(0.0),
        loss=lambda outputs, target: outputs.mean(),
    )
    assert len({float(noisy.train_batch(batch)["loss"]) for _ in range(4)}) == 4
    assert len({float(noisy.eval_batch(batch)["loss"]) for _ in range(3)}) == 1
    want = jax.random.normal(jax.random.key(7)) + batch["x"]
    np.testing.assert_allclose(noisy.predict_batch(batch), want, rtol=1e-6)


def test_the_seed_is_the_trials_where_none_is_given():
    info = Info(epochs=1, steps_per_epoch=1, total_steps=1, batch_size=1, trial=0, seed=2**32 - 5)
    told, given = make(dropout, seed=None), make(dropout, seed=2**32 - 5)
    told.bind_info(info)
    assert state_hash(told) == state_hash(given) != state_hash(make(dropout))
    given.bind_info(Info(**{**vars(info), "seed": 3}))
    assert state_hash(told) == state_hash(given)


def after_a_hop(build):
    """Train two steps, once straight and once with a hop between; return both models."""
    straight, other = build(), build()
    first, second = batches(2)
    straight.train_batch(first)
    other.load_state_dict(carried(straight))
    straight.train_batch(second)
    other.train_batch(second)
    assert state_hash(straight) == state_hash(other)
    return straight, other


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_types_survive_a_hop(dtype):
    def widened(params, x):
        return apply(jax.tree.map(lambda a: a.astype("float32"), params), x)

    optimizer = optax.sgd(0.1, momentum=0.9)
    straight, other = after_a_hop(lambda: make(widened, weights(dtype), optimizer=optimizer))
    assert straight.params["bias"].dtype == dtype
    assert_same(straight.params, other.params)


OPTIMIZERS = {
    "adamw": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2)),
    "schedule": lambda: optax.sgd(optax.cosine_decay_schedule(0.1, 10), momentum=0.9),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.01),
    "noise, with a key in its state": lambda: optax.noisy_sgd(0.1, key=jax.random.key(3)),
    "several steps": lambda: optax.MultiSteps(optax.adam(1e-2), every_k_schedule=2),
    "plateau, which looks at the loss": lambda: optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(patience=1)
    ),
    "lbfgs, which computes the loss elsewhere": lambda: optax.lbfgs(memory_size=2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_hop(name):
    after_a_hop(lambda: make(optimizer=OPTIMIZERS[name]()))


def test_a_line_search_gets_the_loss_of_its_batch_with_the_same_key():
    optimizer = optax.lbfgs(memory_size=2)

    @jax.jit
    def step(params, state, number, x, y):
        key = jax.random.fold_in(jax.random.key(7), number)

        def objective(params):
            return cross_entropy(dropout(params, x, train=True, key=key), y)

        loss, gradients = jax.value_and_grad(objective)(params)
        updates, state = optimizer.update(
            gradients, state, params, value=loss, grad=gradients, value_fn=objective
        )
        return optax.apply_updates(params, updates), state, loss

    params = jax.tree.map(jnp.asarray, weights())
    state, model = optimizer.init(params), make(dropout, optimizer=optimizer)
    for number, batch in enumerate(batches()):
        params, state, loss = step(params, state, number, *batch.values())
        assert float(model.train_batch(batch)["loss"]) == float(loss)
    assert_same(model.params, params)
    assert model.optimizer_state[-1].learning_rate == state[-1].learning_rate


def test_an_optimizer_gets_only_the_arguments_that_it_names():
    found = []

    def update(gradients, state, params=None, *, value_fn):
        found.append(value_fn(params).shape)
        return jax.tree.map(lambda g: -0.1 * g, gradients), state

    one = make(optimizer=optax.GradientTransformationExtraArgs(lambda params: (), update))
    one.train_batch(batches(1)[0])
    assert found == [()]

    def needs(gradients, state, params=None, *, hessian):
        raise AssertionError

    with pytest.raises(InputError, match=r"update requires hessian=, but .*value, grad, value_fn"):
        make(optimizer=optax.GradientTransformationExtraArgs(lambda params: (), needs))


def test_an_optimizers_state_may_change_its_types():
    """Moments of bfloat16 do, times float32 settings that are arrays."""

    def build():
        optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.01)
        params = {"w": jnp.ones((4, 3), "bfloat16"), "b": jnp.ones(3)}
        return make(lambda p, x: x @ p["w"] + p["b"], params, optimizer=optimizer)

    assert build().optimizer_state.inner_state[0].mu["w"].dtype == "bfloat16"
    straight, other = after_a_hop(build)
    assert other.optimizer_state.inner_state[0].mu["w"].dtype == "float32"
    assert_same(straight.params, other.params)


def test_shared_arrays_are_copied_before_a_step_donates_them():
    """A step gives its memory back: what others hold, or what is there twice, is copied before."""
    shared = jnp.ones(4)
    optimizer = optax.GradientTransformation(
        lambda params: {"a": shared, "b": shared},
        lambda gradients, state, params: (gradients, jax.tree.map(lambda a: a + 1, state)),
    )
    for _ in range(2):
        model = make(
            lambda params, x: x * params["left"] - params["right"],
            {"left": shared, "right": shared},
            optimizer=optimizer,
        )
        model.train_batch(batches(1)[0])
        assert model.optimizer_state["a"].tolist() == [2.0] * 4
    assert shared.tolist() == [1.0] * 4


def test_names_in_a_state_are_those_of_the_tree():
    state = make(normed, variables=STATISTICS).state_dict()
    assert list(state) == ["params", "optimizer", "step", "key", "variables"]
    assert state["params"].keys() == {"bias", "layers"}
    assert state["params"]["layers"].keys() == {"0", "1"}
    assert state["optimizer"]["0"].keys() == {"count", "mu", "nu"}
    assert state["variables"]["norm"].keys() == {"mean", "count"}
    single = make(lambda params, x: x * params, np.float32(2.0), loss=lambda o, y: o.mean())
    assert single.state_dict()["params"] == {"value": np.float32(2.0)}


def test_given_params_and_returned_states_stay_usable():
    given = jax.tree.map(jnp.asarray, weights())
    model = make(params=given)
    params, state = model.params, model.optimizer_state
    taken = model.state_dict()
    copies = jax.tree.map(np.array, (params, state, taken))
    for batch in batches(2):
        model.train_batch(batch)
    assert_same((params, state, taken), copies)
    assert_same(given, jax.tree.map(jnp.asarray, weights()))
    assert not np.array_equal(model.params["bias"], params["bias"])


def test_a_loaded_state_is_copied():
    model = make()
    model.train_batch(batches(1)[0])
    state = carried(model)
    fresh = make()
    fresh.load_state_dict(state)
    before = state_hash(fresh)
    for leaf in jax.tree.leaves(state):
        leaf[...] = 9
    assert state_hash(fresh) == before


def test_a_mismatched_state_is_refused_by_name_and_changes_nothing():
    model = make()
    before = state_hash(model)
    wider = weights()
    wider["layers"][1] = np.zeros((5, 4), "float32")
    cases = [
        (make(params=wider), r"params/layers/1: the state has float32 of shape \(5, 4\)"),
        (make(params={**weights(), "more": np.zeros(1, "float32")}), "has params/more, which"),
        (make(params={"bias": np.zeros(3, "float32")}), "has no params/layers/0"),
        (make(params=weights("bfloat16")), "params/bias: the state has bfloat16"),
        (make(optimizer=optax.sgd(0.1)), "has no optimizer/0/count"),
        (make(normed, variables=STATISTICS), "has a 'variables'"),
    ]
    for other, message in cases:
        with pytest.raises(StateError, match=message):
            model.load_state_dict(other.state_dict())
    assert state_hash(model) == before


def test_a_clone_keeps_its_settings_and_its_key():
    def build(rate, seed):
        optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=rate)
        return make(dropout, optimizer=optimizer, seed=seed)

    parent, clone = build(0.1, 1), build(0.3, 2)
    for batch in batches(2):
        parent.train_batch(batch)
    clone.load_clone(carried(parent), {"lr": 0.3})
    assert_same(clone.params, parent.params)
    assert float(clone.optimizer_state.hyperparams["learning_rate"]) == np.float32(0.3)
    assert_same(clone.optimizer_state.inner_state, parent.optimizer_state.inner_state)
    own, theirs = clone.state_dict(), parent.state_dict()
    assert own["step"] == theirs["step"] == 2
    assert own["key"].tolist() == build(0.3, 2).state_dict()["key"].tolist()


def test_evaluation_changes_nothing_and_counts_rows():
    made = [*batches(2), *batches(1, rows=3, start=2)]
    model = make(metrics={"accuracy": accuracy}, epoch_metrics={"n": lambda o, t: len(o)})
    assert get_whole_pass(model) is not None and get_whole_pass(make()) is None
    before = state_hash(model)
    found = model.evaluate(made)
    one = {name: np.concatenate([batch[name] for batch in made]) for name in ("x", "y")}
    outputs = apply(weights(), one["x"])
    assert found["n"] == 15
    assert found["accuracy"] == pytest.approx(float(accuracy(outputs, one["y"])))
    assert found["loss"] == pytest.approx(float(cross_entropy(outputs, one["y"])), rel=1e-6)
    assert model.evaluate(one, batch_size=6) == found
    assert float(model.eval_batch(made[0])["loss"]) == float(
        jax.jit(lambda x, y: cross_entropy(apply(weights(), x), y))(*made[0].values())
    )
    assert state_hash(model) == before


class Later:
    """A number that notes when it is read."""

    def __init__(self, value, events):
        self.value, self.events = value, events

    def __float__(self):
        self.events.append(f"read {self.value}")
        return float(self.value)


class Told:
    """A model that returns such numbers."""

    def __init__(self, framework, events):
        self.framework, self.events = framework, events

    def train_batch(self, batch):
        self.events.append("step")
        return {"loss": Later(batch["n"], self.events), "pair": (Later(5, []), 2.0)}


class Source:
    """Three batches of 2 rows."""

    last_rows = 2

    def __len__(self):
        return 3

    def __iter__(self):
        return iter([{"n": n} for n in range(3)])


def test_the_runner_reads_metrics_when_a_pass_is_over():
    later, at_once = [], []
    done = run_batches(Source(), Told("jax", later).train_batch)
    assert later == ["step"] * 3 + ["read 0", "read 1", "read 2"]
    assert run_batches(Source(), Told("numpy", at_once).train_batch).sums == done.sums
    assert at_once == ["step", "read 0", "step", "read 1", "step", "read 2"]
    assert done.sums == {"loss": (6.0, 6.0), "pair": (30.0, 6.0)}
    assert (done.rows, done.batches) == (6, 3)


def test_predictions_come_in_the_order_of_the_rows(tmp_path):
    x = np.random.default_rng(0).normal(size=(20, 4)).astype("float32")
    data = cerebro.data.shard({"x": x, "y": np.zeros(20, "int32")}, tmp_path / "d", shards=2)
    model = make()
    want = model.predict(x, batch_size=20)
    assert isinstance(want, np.ndarray) and want.shape == (20, 3)
    whole = np.concatenate([np.asarray(data.shard(i)["x"]) for i in range(2)])
    np.testing.assert_array_equal(
        model.predict(data, batch_size=5), model.predict(whole, batch_size=5)
    )
    np.testing.assert_allclose(model.predict({"x": x}, batch_size=7), want, rtol=1e-6)
    for given in (jnp.asarray(x), {"x": jnp.asarray(x)}):
        np.testing.assert_array_equal(model.predict(given, batch_size=20), want)


def test_inputs_and_targets_of_several_kinds():
    def two(params, left, right):
        return (left + 2 * right) @ params["w"]

    batch = {"a": np.ones((4, 2), "float32"), "b": np.full((4, 2), 3, "float32"), "y": np.ones(4)}
    params = {"w": np.ones(2, "float32")}

    def run(inputs, target, loss):
        model = make(two, params, inputs=inputs, target=target, loss=loss)
        return model.predict_batch(batch).tolist(), float(model.train_batch(batch)["loss"])

    assert run(["a", "b"], None, lambda o: o.mean()) == ([14.0] * 4, 14.0)
    named = {"left": "b", "right": "a"}
    assert run(named, ["y", "a"], lambda o, t: o.mean() + t[0][0] + t[1][0, 0]) == ([10.0] * 4, 12)
    assert run(named, {"k": "b"}, lambda o, t: o.mean() + t["k"][0, 0]) == ([10.0] * 4, 13.0)
    own = make(lambda p, x: {"loss": (x @ p["w"]).mean()}, params, inputs="a", loss=None)
    assert float(own.train_batch(batch)["loss"]) == 2.0


def test_step_replaces_apply_and_loss():
    seen = []

    def step(params, batch, *, train, key, variables):
        seen.append(train)
        loss = cross_entropy(apply(params, batch["x"]), batch["y"])
        values = {"loss": (loss, len(batch["x"])), "half": loss / 2}
        return (values, {"n": variables["n"] + 1}) if train else values

    model = make(None, step=step, loss=None, variables={"n": np.int32(0)})
    plain = make()
    for batch in batches(3):
        values, want = model.train_batch(batch), plain.train_batch(batch)
        assert [float(v) for v in values["loss"]] == [float(want["loss"]), ROWS]
    assert_same(model.params, plain.params)
    assert int(model.variables["n"]) == 3
    assert model.evaluate(batches(2))["loss"] == plain.evaluate(batches(2))["loss"]
    assert seen == [True, False]  # compiled once each
    with pytest.raises(InputError, match="no outputs to predict with"):
        model.predict_batch(batch)


def test_models_of_the_same_functions_share_compiled_steps():
    traced = []

    def counted(params, x):
        traced.append(x.shape)
        return apply(params, x)

    first, second = make(counted), make(counted)
    for model in (first, second):
        for batch in (*batches(2), *batches(1, rows=3)):
            model.train_batch(batch)
    assert traced == [(ROWS, 4), (3, 4)]
    make(counted, optimizer=optax.adam(1e-2)).train_batch(batches(1)[0])
    assert len(traced) == 3
    assert state_hash(first) == state_hash(second)


def lossless(outputs, target):
    return outputs


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"function": None}, "apply must be callable, not None"),
        ({"function": 3}, "apply must be callable, not 3"),
        ({"params": {}}, "params has no arrays"),
        ({"params": {"n": np.arange(3)}}, "params has int32 at n, .*put it into variables"),
        ({"params": {"f": [jax.nn.relu]}}, "params has a .* at f/0, which is not an array"),
        ({"optimizer": None}, r"optimizer must have init\(params\) and update"),
        ({"optimizer": optax.adam}, r"optimizer must have init\(params\) and update"),
        ({"loss": "mse"}, "loss must be callable, not 'mse'"),
        ({"metrics": [accuracy]}, "metrics must be a mapping of names to functions"),
        ({"metrics": {"loss": accuracy}}, "two metrics are called 'loss'"),
        ({"step": lambda params, batch: {}}, "step replaces loss and metrics"),
        ({"inputs": 3}, "inputs must be a column's name"),
        ({"target": []}, "target must be a column's name"),
        ({"variables": {"n": 1}}, "variables= is given, but apply has no argument of that name"),
        ({"seed": "7"}, "seed must be a whole number or None, not '7'"),
    ],
)
def test_bad_arguments(options, message):
    options = dict(options)
    function, params = options.pop("function", apply), options.pop("params", None)
    with pytest.raises(InputError, match=message):
        make(function, params, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": lossless}, r"loss must be one number, .* not an array of shape \(6, 3\)"),
        ({"loss": lambda o, t: None}, "loss must be a number, not a NoneType"),
        ({"loss": lambda o, t: t[0]}, "loss must be a floating-point number, not int32"),
        ({"loss": None}, "loss=None takes the loss from the network's output"),
        ({"metrics": {"m": lossless}}, "the metric 'm' must be one number"),
        ({"inputs": "z"}, "inputs names the column 'z', but the data has x, y"),
        ({"target": ["y", "z"]}, "target names the column 'z', but the data has x, y"),
        (
            {"function": lambda p, x, variables: apply(p, x), "variables": STATISTICS},
            r"apply must return \(outputs, new variables\) in training, not a",
        ),
        (
            {"function": lambda p, x, variables: (apply(p, x), {}), "variables": STATISTICS},
            "training changes variables: norm/count must exist both before and after a step",
        ),
        (
            {"optimizer": optax.GradientTransformation(lambda p: (), lambda g, s, p: ([], s))},
            "update must return updates with the structure of params",
        ),
        (
            {
                "optimizer": optax.GradientTransformation(
                    lambda p: {"n": jnp.zeros(1)}, lambda g, s, p: (g, {"n": jnp.zeros(2)})
                )
            },
            r"the optimizer changes its state: n is float32 of shape \(1,\) before a step",
        ),
        (
            {"function": None, "loss": None, "step": lambda params, batch: batch["x"].sum()},
            "step must return a dict with 'loss'",
        ),
    ],
)
def test_bad_functions(options, message):
    options = dict(options)
    model = make(options.pop("function", apply), **options)
    before = state_hash(model)
    with pytest.raises(InputError, match=message):
        model.train_batch(batches(1)[0])
    assert state_hash(model) == before


@jax.tree_util.register_pytree_with_keys_class
class Twins:
    def __init__(self, one, two):
        self.both = (one, two)

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("w"), each) for each in self.both], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


def test_two_arrays_of_one_name_are_refused():
    with pytest.raises(InputError, match="params has two arrays named net/w: rename one"):
        make(params={"net": Twins(np.ones(1), np.ones(1))})


def test_unusable_data_is_refused():
    model = make(inputs=["x", "y"])
    with pytest.raises(InputError, match="the model has several"):
        model.predict(np.ones((2, 4), "float32"))
    with pytest.raises(InputError, match="no rows to predict"):
        model.predict([])
    with pytest.raises(InputError, match="no rows to evaluate"):
        model.evaluate([])
    with pytest.raises(InputError, match="different numbers of rows"):
        model.evaluate({"x": np.ones((2, 4)), "y": np.ones(3)})


def test_error_for_an_unwrapped_module_explains_how_to_wrap_it():
    class Module:
        def init(self): ...
        def apply(self): ...

    with pytest.raises(InputError, match=r"wrap the module: cerebro\.jax\.Model"):
        check_model(Module())


def test_repr():
    assert repr(make()) == "cerebro.jax.Model(apply, 38 parameters)"
