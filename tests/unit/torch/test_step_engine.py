"""The engine of recorded steps: the C core's operators and the loop without Python."""

from __future__ import annotations

import logging
import math
from array import array

import numpy as np
import pytest

import cerebro._core as _core

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import cerebro  # noqa: E402
import cerebro.torch  # noqa: E402
from cerebro.torch import native_calls  # noqa: E402
from cerebro.worker.evaluate import run_batches  # noqa: E402
from cerebro.worker.models import make_batches  # noqa: E402

ROWS, EPOCHS = 8, 3


@pytest.fixture(autouse=True)
def found_again():
    native_calls.measure_rounding.cache_clear()
    yield
    native_calls.measure_rounding.cache_clear()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(0)
    columns = {
        "x": rng.normal(size=(9 * ROWS + 5, 6)).astype("float32"),
        "y": rng.integers(0, 3, 9 * ROWS + 5),
    }
    folder = tmp_path_factory.mktemp("data") / "rows"
    return cerebro.shard(columns, folder, shards=1, progress=False)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(2, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.cell(x.reshape(len(x), 3, 2))[0][:, -1])


NETWORKS = {
    "mlp": lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)),
    "dropout": lambda: nn.Sequential(
        nn.Linear(6, 1200), nn.ReLU(), nn.Dropout(0.3), nn.Linear(1200, 3)
    ),
    "batch norm": lambda: nn.Sequential(
        nn.Linear(6, 12), nn.BatchNorm1d(12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 3)
    ),
    "gru": Recurrent,
}
OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, maximize=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True, betas=(0.4, 0.3)),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "sgd nesterov": lambda p: torch.optim.SGD(
        p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.001
    ),
    "sgd dampened": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1),
}


def made(graph, net="mlp", optimizer="adamw", kind=None, **options):
    torch.manual_seed(1)
    network = NETWORKS[net]()
    options.setdefault("metrics", {"pair": lambda o, t: ((o.argmax(1) == t).float().mean(), 2)})
    return (kind or cerebro.torch.Model)(
        network,
        optimizer=OPTIMIZERS[optimizer](list(network.parameters())),
        loss=functional.cross_entropy,
        graph=graph,
        **options,
    )


def train(model, data, epochs=EPOCHS):
    """Train and evaluate as a worker does; return sums and states.

    An epoch has seven batches of `ROWS` rows, and then three with one row less.
    """
    torch.manual_seed(3)
    loaders = [
        make_batches(model, data, ROWS, "cpu", seed=0, shuffle=shuffle, threads=0)
        for shuffle in ("rows", False)
    ]
    found = []
    for epoch in range(epochs):
        for loader, step in zip(loaders, (model.train_batch, model.eval_batch), strict=True):
            loader.begin([[0]], epoch)
            result = run_batches(loader, step)
            found.append((result.rows, result.batches, result.sums, result.not_finite))
            model.end_unit()
        model.end_epoch(epoch, {})
        state = [model.state_dict(), torch.get_rng_state()]
        found.append(_core.hash_state(_core.pack_state(state)))
    for loader in loaders:
        loader.close()
    return found


def without_python(model):
    """Return the number of programs that the epoch runner can take by itself."""
    return sum(
        recorded._without_python is not None for recorded in model._recorded[0]._programs.values()
    )


@pytest.mark.parametrize("engine", ["native", "python"])
@pytest.mark.parametrize("net", NETWORKS)
def test_each_engine_matches_ordinary_steps_for_each_network(net, engine, data, monkeypatch):
    monkeypatch.setenv("CEREBRO_STEP_ENGINE", engine)
    model = made(True, net)
    assert train(model, data) == train(made(False, net), data)
    assert model._recorded[0].refusal is None and model._recorded[0].replays > 10
    program = next(iter(model._recorded[0]._programs.values())).program
    assert bool(program._blocks) == (engine == "native")
    is_drawn = [run for run, _, _ in program._calls if run is native_calls._draw_bernoulli]
    computes = [getattr(item, "compute", None) for item in program._items]
    products = sum(isinstance(compute, _core.MatMul) for compute in computes)
    assert (products > 0) == (
        engine == "native" and native_calls.find_library_function("sgemm_") != 0
    )
    sums = sum(isinstance(compute, _core.Reduction) for compute in computes)
    assert (sums > 0) == (engine == "native" and bool(native_calls._find_width()))
    draws = engine == "native" and native_calls._draws_like_pytorch()  # not on Intel's processors
    assert len(is_drawn) == (net == "dropout" and draws)


@pytest.mark.parametrize("engine", ["native", "python"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_engine_matches_ordinary_steps_for_each_optimizer(
    optimizer, engine, data, monkeypatch
):
    monkeypatch.setenv("CEREBRO_STEP_ENGINE", engine)
    model = made(True, optimizer=optimizer)
    assert train(model, data) == train(made(False, optimizer=optimizer), data)
    assert model._recorded[0].refusal is None and model._recorded[0].replays > 10


def test_a_units_later_batches_run_without_python(data):
    calls = []

    model = made(True)
    take = model._train
    model._train = lambda batch: calls.append(len(batch["y"])) or take(batch)
    train(model, data, epochs=6)
    before = len(calls)
    train(model, data, epochs=1)
    assert calls[before:] == [ROWS, ROWS - 1] and without_python(model) == 2


def test_a_per_epoch_schedule_takes_effect_in_replays(data):
    def with_schedule(graph):
        torch.manual_seed(1)
        network = NETWORKS["mlp"]()
        optimizer = OPTIMIZERS["adamw"](network.parameters())
        return cerebro.torch.Model(
            network,
            optimizer=optimizer,
            loss=functional.cross_entropy,
            scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
            scheduler_step="epoch",
            graph=graph,
        )

    model = with_schedule(True)
    assert train(model, data, epochs=5) == train(with_schedule(False), data, epochs=5)
    assert without_python(model) and model._optimizers[0].param_groups[0]["lr"] < 0.001


class Counting(cerebro.torch.Model):
    def train_batch(self, batch):
        self.taken = getattr(self, "taken", 0) + 1
        return super().train_batch(batch)


@pytest.mark.parametrize(
    "options",
    [
        {"kind": Counting},
        {"augment": lambda batch: {**batch, "x": batch["x"] + torch.randn_like(batch["x"])}},
        {"accumulate": 2},
    ],
)
def test_per_batch_python_code_is_called(options, data):
    model, other = made(True, **options), made(False, **options)
    assert train(model, data) == train(other, data)
    assert model.replays_for(model.train_batch) is None
    assert model.replays_for(model.eval_batch) is not None
    if "kind" in options:
        assert model.taken == other.taken == EPOCHS * 10


def test_training_continues_from_a_loaded_state(data):
    model, other = made(True), made(False)
    saved = other.state_dict()
    packed = _core.pack_state(saved)
    for one in (model, other):
        train(one, data)
        one.load_state_dict(_core.unpack_state(packed, "torch"))
    assert train(model, data) == train(other, data)


def test_an_operator_that_pytorch_rounds_otherwise_is_left_to_it(data, monkeypatch, caplog):
    other = dict(native_calls._EXAMPLES)
    other["lerp"] = (lambda a, b, c, x: a + b * x, 2, True)
    monkeypatch.setattr(native_calls, "_EXAMPLES", other)
    with caplog.at_level(logging.INFO, "cerebro.torch"):
        model = made(True)
        assert train(model, data) == train(made(False), data)
    assert "lerp" not in native_calls.measure_rounding().names
    assert "PyTorch rounds lerp differently from the C core" in caplog.text
    assert model._recorded[0].refusal is None


def test_c_formulas_match_python_bit_for_bit():
    for t in (1.0, 2.0, 17.0, 1000.0, 123457.0):
        for beta in (0.9, 0.999, 0.95, 0.0):
            size = _core.step_number("step size", 0.003, beta, t)
            assert size == -(0.003 / (1 - beta**t))
            assert _core.step_number("correction", 0.0, beta, t) == (1 - beta**t) ** 0.5
    with pytest.raises(ValueError, match="unknown formula 'x'"):
        _core.step_number("x", 0.0, 0.0, 1.0)


def test_a_failing_call_ends_the_unit_and_leaves_autograd_on(data):
    model = made(True)
    train(model, data)
    replay = _core.Replay(
        inputs=[], calls=[(math.sqrt, (-1.0,), None)], numbers=[], metrics=[],
        context=torch._C._AutoDispatchBelowAutograd,
    )  # fmt: skip
    step = next(iter(model._recorded[0]._programs.values()))
    broken = _core.Replay(
        inputs=[
            (t.data_ptr(), str(t.dtype)[6:], tuple(t.shape), t.stride())
            for t in step.static.values()
        ],
        calls=[(math.sqrt, (-1.0,), None)], numbers=[], metrics=[],
        context=torch._C._AutoDispatchBelowAutograd,
    )  # fmt: skip
    loader = make_batches(model, data, ROWS, "cpu", seed=0, shuffle=False, threads=0)
    loader.begin([[0]], 0)
    with pytest.raises(ValueError, match="math domain error"):
        _core.run_unit(loader, model.train_batch, replays=[replay, broken])
    assert (replay.runs, broken.runs) == (0, 1)
    weight = torch.ones(2, requires_grad=True)
    assert (weight * 2).requires_grad
    loader.close()


@pytest.mark.parametrize(
    ("calls", "numbers", "error", "words"),
    [
        ([("exp", 1, 64, 64, 0, 0, -1, 0)], [0.0], ValueError, "unknown operation 'exp'"),
        ([("relu", -1, 64, 64, 0, 0, -1, 0)], [0.0], ValueError, "out of range"),
        ([("fill", 1, 64, 0, 0, 0, 1, 0)], [0.0], ValueError, "out of range"),
        ([("add", 1, 64, 64, 0, 0, 0, 0)], [0.0], ValueError, "add lacks an operand"),
        ([("copy", 2, 64, 68, 0, 0, -1, 0)], [0.0], ValueError, "overlaps"),
        ([3], [0.0], TypeError, "tuple"),
        (3, [0.0], TypeError, "calls must be a list"),
    ],
)
def test_wrong_operations_are_refused(calls, numbers, error, words):
    with pytest.raises(error, match=words):
        _core.Elementwise(calls, array("d", numbers), True, 0)


def test_a_replay_needs_tuples():
    with pytest.raises(TypeError, match="lists of tuples"):
        _core.Replay(inputs=[3], calls=[], numbers=[], metrics=[], context=object)


def test_numbers_must_be_doubles():
    with pytest.raises(TypeError, match="array of float64"):
        _core.Elementwise([], array("f", [1.0]), True, 0)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"inputs": [(0, "float31", (1,), (1,))]}, "unknown element type 'float31'"),
        ({"inputs": [(0, "float32", (1,), (1, 1))]}, "shape and strides must match"),
        ({"inputs": [(0, "float32", (1,) * 11, (1,) * 11)]}, "too many dimensions"),
        ({"numbers": [("lr", 0.1, 0.9, 0, 0, "float32")]}, "unknown formula 'lr'"),
        ({"metrics": [("loss", (0, "complex64"), None)]}, "cannot be complex"),
    ],
)
def test_wrong_replays_are_refused(changed, words):
    parts = {"inputs": [], "calls": [], "numbers": [], "metrics": [], "context": object}
    with pytest.raises(ValueError, match=words):
        _core.Replay(**parts | changed)


def test_counts_of_steps_are_added_up_by_the_core():
    call = torch.ops.aten._foreach_add_.Scalar
    counts = [torch.tensor(3.0), torch.tensor(7.0)]
    found = native_calls.make_operations(call, [counts, 1], {})
    if "add_number" in native_calls.measure_rounding().names:
        native_calls.Block(found, native_calls.measure_rounding()).run()
        assert [count.item() for count in counts] == [4.0, 8.0]
    # A setting may change, and other tensors are not counts.
    assert native_calls.make_operations(call, [counts, 0.5], {}) is None
    assert native_calls.make_operations(call, [[torch.zeros(2)], 1], {}) is None


# --- random draws ---------------------------------------------------------------------


@pytest.fixture
def generators():
    """Two generators in the same state."""
    return torch.Generator().manual_seed(5), torch.Generator().manual_seed(5)


def drawn(generator, out, p):
    _core.draw_bernoulli(generator.get_state, generator.set_state, out.data_ptr(), out.numel(), p)
    return out


@pytest.mark.parametrize("shape", [(), (1,), (313,), (3, 7, 5), (64, 130)])
def test_draws_match_pytorch_bit_for_bit(shape, generators):
    if not native_calls._draws_like_pytorch():
        pytest.skip("on this processor, PyTorch draws with another library")
    mine, its = generators
    for p in (0.8, 0.0, 1e-12, 1.0, 0.3):
        expected = torch.empty(shape).bernoulli_(p, generator=its)
        assert torch.equal(drawn(mine, torch.full(shape, math.nan), p), expected)
        for generator in generators:  # one more number, also of the normal distribution's pairs
            torch.rand(1, generator=generator), torch.randn(1, generator=generator)
        assert torch.equal(mine.get_state(), its.get_state())


def test_draws_fill_dense_tensors_in_memory_order(generators):
    mine, its = generators
    for order in ((1, 0, 2), (2, 1, 0), (0, 2, 1)):
        expected = torch.empty(4, 5, 6).permute(order).bernoulli_(0.5, generator=its)
        found = drawn(mine, torch.empty(4, 5, 6).permute(order), 0.5)
        assert torch.equal(found, expected) == native_calls._draws_like_pytorch()


def test_a_call_with_a_generator_or_another_type_is_left_to_pytorch():
    call = torch.ops.aten.bernoulli_.float
    out = torch.empty(8)
    taken = native_calls.choose_draw(call, [out, 0.5], {"generator": None})
    assert (taken is not None) == native_calls._draws_like_pytorch()
    assert native_calls.choose_draw(call, [out, 0.5], {"generator": torch.Generator()}) is None
    assert native_calls.choose_draw(call, [out.double(), 0.5], {}) is None
    assert native_calls.choose_draw(call, [out[::2], 0.5], {}) is None
    assert native_calls.choose_draw(call, [out, math.nan], {}) is None
    assert native_calls.choose_draw(torch.ops.aten.uniform_.default, [out], {}) is None


def test_draws_refuse_invalid_arguments(generators):
    out = torch.full((4,), 7.0)
    given = generators[0]
    with pytest.raises(ValueError, match="not a probability"):
        drawn(given, out, 1.5)
    with pytest.raises(ValueError, match="not the state of PyTorch's generator"):
        _core.draw_bernoulli(
            lambda: torch.zeros(16, dtype=torch.uint8), print, out.data_ptr(), 4, 0.5
        )
    with pytest.raises(AttributeError):
        _core.draw_bernoulli(dict, print, out.data_ptr(), 4, 0.5)
    with pytest.raises(ValueError, match="negative"):
        _core.draw_bernoulli(given.get_state, given.set_state, out.data_ptr(), -1, 0.5)
    assert out.tolist() == [7.0] * 4


def test_a_processor_on_which_draws_differ_leaves_them_to_pytorch(monkeypatch):
    real = _core.draw_bernoulli

    def differs(get_state, set_state, address, n, p):
        real(get_state, set_state, address, n, p / 2)

    monkeypatch.setattr(native_calls._core, "draw_bernoulli", differs)
    assert not native_calls._draws_like_pytorch.__wrapped__()


# --- whole units ------------------------------------------------------------------------


def test_a_later_unit_runs_no_step_from_python(data, monkeypatch):
    model = made(True, net="dropout")
    train(model, data, epochs=8)
    called = []
    monkeypatch.setattr(model, "_train", called.append)
    loader = make_batches(model, data, ROWS, "cpu", seed=0, shuffle="rows", threads=0)
    loader.begin([[0]], 7)
    before = model._recorded[0].replays
    model.begin_recorded_unit(training=True)
    result = run_batches(loader, model.train_batch)
    assert model.end_recorded_unit(training=True) is None
    loader.close()
    assert called == [] and model._recorded[0].replays - before == result.batches == 10
