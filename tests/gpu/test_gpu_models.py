"""`cerebro.torch.Model` on a GPU: placing, graphs, states, metrics."""

from __future__ import annotations

import copy
import gc
import random
import weakref

import numpy as np
import pytest
from captured import is_captured, refusal_of

import cerebro
import cerebro._core as _core
import cerebro.data
from cerebro.data.batches import make_loader
from cerebro.machine import devices, generators
from cerebro.machine.flags import compute_settings
from cerebro.torch.graph import COMPARED, WARM_UP
from cerebro.torch.graph_recorder import CudaRecorder
from cerebro.worker.evaluate import replay_recorded_steps, run_batches
from cerebro.worker.gpu import StateArena

torch = pytest.importorskip("torch")
from torch.nn import functional  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402

GPU = "cuda:0"


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.zeros(1, device=GPU)  # starts CUDA, whose generator then is preserved, too
    with generators.preserve_generators(True), compute_settings(1, True, GPU):
        yield


def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Dropout(0.3), torch.nn.Linear(8 * 64, 5),
    )  # fmt: skip


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "plain sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}


def model(optimizer="adam", device=GPU, schedule=None, **options):
    with devices.set_build_device(device):
        net = network()
        made = OPTIMIZERS[optimizer](net.parameters())
        if schedule is not None:
            options |= {"scheduler": schedule(made), "scheduler_step": "batch"}
        return cerebro.torch.Model(
            net,
            optimizer=made,
            loss=functional.cross_entropy,
            metrics={"accuracy": accuracy},
            **options,
        )


def batches(count=14, short=(9,)):
    generator = torch.Generator().manual_seed(5)
    rows = [5 if i in short else 16 for i in range(count)]
    return [
        {
            "x": torch.randn(n, 3, 8, 8, generator=generator),
            "y": torch.randint(0, 5, (n,), generator=generator),
        }
        for n in rows
    ]


def train(a_model, some=None):
    torch.manual_seed(3)
    random.seed(3)
    return [
        {k: float(v) for k, v in a_model.train_batch(batch).items()} for batch in some or batches()
    ]


def packed(a_model):
    return bytes(
        _core.pack_state(StateArena().to_host([a_model.state_dict(), generators.capture(True)]))
    )


class Never:
    """A recorder that captures nothing."""

    def warm(self, work):
        return work()

    def run_watched(self, work):
        return work(), None

    def capture(self, work):
        raise RuntimeError("not here")


# --- placing -----------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_network_is_moved_and_its_optimizer_follows(optimizer):
    a_model = model(optimizer)
    assert {p.device for p in a_model.net.parameters()} == {torch.device(GPU)}
    before = copy.deepcopy(dict(a_model.net.named_parameters()))
    train(a_model)
    same = {n for n, p in a_model.net.named_parameters() if torch.equal(p, before[n])}
    assert same <= {"0.bias"}  # which batch norm takes out again: it has no gradient to speak of
    assert all(v.is_cuda for _, v in a_model.net.state_dict().items())


def test_a_network_that_is_already_placed_is_not_moved():
    with devices.set_build_device(GPU):
        net = network().to(GPU)
        optimizer = torch.optim.Adam(net.parameters())
        a_model = cerebro.torch.Model(net, optimizer=optimizer, loss=functional.cross_entropy)
    train(a_model)
    on_cpu = model(device="cpu")
    assert next(on_cpu.net.parameters()).device.type == "cpu"


def test_a_loss_module_is_moved_with_the_network():
    with devices.set_build_device(GPU):
        net = network()
        loss = torch.nn.CrossEntropyLoss(weight=torch.ones(5))
        optimizer = torch.optim.Adam(net.parameters())
        a_model = cerebro.torch.Model(net, optimizer=optimizer, loss=loss)
    train(a_model)
    assert loss.weight.is_cuda


def test_predictions_and_evaluation_take_data_in_host_memory():
    a_model = model()
    x = np.random.default_rng(0).normal(size=(20, 3, 8, 8)).astype(np.float32)
    y = np.arange(20) % 5
    outputs = a_model.predict(x, batch_size=8)
    assert outputs.shape == (20, 5) and outputs.device.type == "cpu"
    metrics = a_model.evaluate({"x": x, "y": y}, batch_size=8)
    expected = functional.cross_entropy(outputs, torch.as_tensor(y))
    assert metrics["loss"] == pytest.approx(float(expected), rel=1e-5)


# --- graphs ------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "plain sgd", "rmsprop"])
@pytest.mark.parametrize("scheduled", [False, True])
def test_a_graph_gives_the_bits_of_the_capturable_step(optimizer, scheduled):
    def cosine(made):
        return lr_scheduler.CosineAnnealingLR(made, 20)

    graphed = model(optimizer, schedule=cosine if scheduled else None, graph=True, clip_norm=1.0)
    plain = model(optimizer, schedule=cosine if scheduled else None, graph=True, clip_norm=1.0)
    plain.capture(Never())
    assert train(graphed) == train(plain)
    assert packed(graphed) == packed(plain)
    if optimizer == "rmsprop" and scheduled:
        assert "'lr' changes" in refusal_of(graphed)
    else:
        assert is_captured(graphed), refusal_of(graphed)
    assert refusal_of(plain) is not None


def test_a_graph_gives_the_bits_of_a_loop_by_hand():
    a_model = model("adam", graph=True)
    found = train(a_model)
    net = network().to(GPU)
    rate = torch.tensor(0.01, device=GPU)
    optimizer = torch.optim.Adam(net.parameters(), lr=rate, capturable=True)
    torch.manual_seed(3)
    for batch, values in zip(batches(), found, strict=True):
        x, y = batch["x"].to(GPU), batch["y"].to(GPU)
        loss = functional.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert float(loss) == values["loss"]
    for name, value in net.state_dict().items():
        assert torch.equal(value, a_model.net.state_dict()[name]), name


def test_mixed_precision_is_captured():
    graphed, plain = model(graph=True, amp="bf16"), model(graph=True, amp="bf16")
    plain.capture(Never())
    assert train(graphed) == train(plain)
    assert packed(graphed) == packed(plain) and is_captured(graphed)


def test_a_state_that_is_loaded_keeps_the_graph():
    graphed, plain = model(graph=True), model(graph=True)
    plain.capture(Never())
    train(graphed), train(plain)
    state = StateArena().to_host(plain.state_dict())
    kept = _core.unpack_state(_core.pack_state(state), "torch")
    train(graphed)
    graphed.load_state_dict(StateArena().to_device(kept, GPU))
    assert train(graphed) == train(plain)
    assert packed(graphed) == packed(plain) and is_captured(graphed)


def test_a_step_with_random_numbers_of_the_host_is_not_captured():
    def step(net, batch):
        keep = float(random.random() < 0.5)
        return {"loss": functional.cross_entropy(net(batch["x"] * keep), batch["y"])}

    def made():
        with devices.set_build_device(GPU):
            net = network()
            optimizer = torch.optim.Adam(net.parameters())
            return cerebro.torch.Model(net, optimizer=optimizer, step=step, graph=True)

    graphed, plain = made(), made()
    plain.capture(Never())
    assert train(graphed) == train(plain)
    assert packed(graphed) == packed(plain) and not is_captured(graphed)


@pytest.mark.parametrize(
    ("wait", "refusal"),
    [
        (lambda output: float(output.detach().sum()), "it waits for the GPU at test_gpu_models"),
        (lambda output: torch.cuda.synchronize(), "it cannot be captured"),
    ],
    ids=["seen before", "refused by CUDA"],
)
def test_a_wait_in_the_step_refuses_the_capture_and_the_device_stays_usable(wait, refusal):
    def loss(output, target):
        wait(output)
        return functional.cross_entropy(output, target)

    graphed, plain = model(graph=True), model(graph=True)
    for a_model, recorder in ((graphed, CudaRecorder(torch.device(GPU))), (plain, Never())):
        a_model._objective._loss = loss
        a_model.capture(recorder)
    current = torch.cuda.current_stream()
    assert train(graphed) == train(plain)
    assert refusal_of(graphed).startswith(refusal)
    assert packed(graphed) == packed(plain)
    assert torch.cuda.current_stream() == current
    another = model(graph=True)  # captures well afterwards
    train(another)
    assert is_captured(another), refusal_of(another)


def test_collecting_an_older_graph_during_a_capture_changes_nothing():
    """Models and their graphs are in cycles: Python's collector destroys them when it likes."""
    older, graphed, plain = model(graph=True), model(graph=True), model(graph=True)
    plain.capture(Never())
    train(older)
    assert is_captured(older)
    thresholds = gc.get_threshold()
    captures = []

    class Collecting(CudaRecorder):
        def capture(self, work):
            def collecting():
                nonlocal older
                captures.append(weakref.ref(older))
                older = None
                gc.set_threshold(1, 1, 1)  # a collection of everything after a few objects
                return work()

            return super().capture(collecting)

    graphed.capture(Collecting(torch.device(GPU)))
    try:
        assert train(graphed) == train(plain)
    finally:
        gc.set_threshold(*thresholds)
    gc.collect()
    assert len(captures) == 1 and captures[0]() is None
    assert packed(graphed) == packed(plain)
    assert is_captured(graphed), refusal_of(graphed)


def of_sizes(*sizes):
    generator = torch.Generator().manual_seed(5)
    return [
        {"x": torch.randn(n, 3, 8, 8, generator=generator), "y": torch.arange(n) % 5} for n in sizes
    ]


def evaluate(a_model, some):
    return [{k: float(v) for k, v in a_model.eval_batch(batch).items()} for batch in some]


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_each_shape_of_batch_has_a_graph(optimizer):
    graphed, plain = model(optimizer, graph=True), model(optimizer, graph=True)
    plain.capture(Never())
    some = of_sizes(*[16, 15, 7] * (WARM_UP + COMPARED + 4))
    assert train(graphed, some) == train(plain, some)
    assert packed(graphed) == packed(plain)
    assert graphed._recorded[0].replays == 3 * 4, refusal_of(graphed)


def test_evaluation_is_captured_and_changes_nothing():
    graphed, plain = model(graph=True), model(graph=True)
    plain.capture(Never())
    some = of_sizes(*[16, 15] * (WARM_UP + COMPARED + 4))
    for _ in range(2):
        before = packed(graphed)
        assert evaluate(graphed, some) == evaluate(plain, some)
        assert packed(graphed) == before
        assert train(graphed) == train(plain)
    assert packed(graphed) == packed(plain)
    assert graphed._recorded[1].replays > 0, refusal_of(graphed, training=False)


def test_graphs_that_share_memory_do_not_disturb_each_other():
    """Several models, shapes, training and evaluation, in turn on one stream."""
    kinds = ("adam", "sgd", "adamw")
    some = of_sizes(*[16, 9] * (WARM_UP + COMPARED + 6))
    expected = []
    for kind in kinds:
        plain = model(kind, graph=True)
        plain.capture(Never())
        expected.append([(train(plain, [b]), evaluate(plain, [b])) for b in some])
    models = [model(kind, graph=True) for kind in kinds]
    found = [[] for _ in kinds]
    for batch in some:
        for one, values in zip(models, found, strict=True):
            values.append((train(one, [batch]), evaluate(one, [batch])))
    assert found == expected
    for one in models:
        assert is_captured(one) and is_captured(one, training=False)


def test_memory_of_dropped_models_is_used_again():
    def captured(n=1):
        models = [model(graph=True) for _ in range(n)]
        for one in models:
            train(one)
            assert is_captured(one), refusal_of(one)
        return models

    def reserved():
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved()

    captured()
    first = reserved()
    for _ in range(3):
        kept = captured(3)
        plain, graphed = model(graph=True), kept[1]
        plain.capture(Never())
        assert train(graphed) is not None  # the pool's first graphs are still there
        del kept, graphed, plain
        assert reserved() <= first + 2**22


class Caches(torch.nn.Linear):
    """Makes a mask when the number of rows changes, and keeps it."""

    mask = None

    def forward(self, x):
        if self.mask is None or len(self.mask) != len(x):
            self.mask = torch.arange(len(x), device=x.device)[:, None] % 2 + 0.5
        return super().forward(x) * self.mask


def test_a_tensor_that_a_module_keeps_does_not_lie_in_shared_memory():
    def made():
        with devices.set_build_device(GPU):
            torch.manual_seed(1)
            net = torch.nn.Sequential(torch.nn.Flatten(), Caches(192, 5))
            optimizer = torch.optim.Adam(net.parameters())
            return cerebro.torch.Model(
                net, optimizer=optimizer, loss=functional.cross_entropy, graph=True
            )

    graphed, plain, other = made(), made(), model(graph=True)
    plain.capture(Never())
    some = of_sizes(*[16, 9] * (WARM_UP + COMPARED + 6))
    for batch in some:
        assert train(graphed, [batch]) == train(plain, [batch])
        train(other, [batch])
        assert evaluate(graphed, [batch]) == evaluate(plain, [batch])
    assert packed(graphed) == packed(plain)


@pytest.mark.parametrize("dropout", [0.0, 0.3], ids=["by its address", "by PyTorch"])
@pytest.mark.parametrize("scheduled", [False, True])
def test_the_core_replays_a_unit_with_the_bits_of_steps(tmp_path, dropout, scheduled):
    def one_cycle(made):
        return lr_scheduler.OneCycleLR(made, 0.1, total_steps=400, cycle_momentum=False)

    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(400, 3, 8, 8)).astype(np.float32), np.arange(400) % 5
    data = cerebro.data.shard({"x": x, "y": y}, tmp_path / "d", shards=2)

    def made():
        a_model = model(schedule=one_cycle if scheduled else None, graph=True)
        a_model.net[4].p = dropout
        return a_model

    def run(a_model, epoch, training):
        loader = make_loader(data, 17, seed=5, shuffle="rows" if training else False, device=GPU)
        loader.begin([[0, 1]], epoch)
        step = a_model.train_batch if training else a_model.eval_batch
        with replay_recorded_steps(a_model, training=training):
            result = run_batches(loader, step, device=GPU)
        if training:
            a_model.end_unit()
        return result.sums

    graphed, plain = made(), made()
    plain.capture(Never())
    for epoch in range(4):
        for training in (True, False):
            torch.manual_seed(epoch)
            found = run(graphed, epoch, training)
            torch.manual_seed(epoch)
            assert found == run(plain, epoch, training)
        assert packed(graphed) == packed(plain)
    assert is_captured(graphed) and is_captured(graphed, training=False)
    given = graphed.replays_for(graphed.eval_batch)
    graphed.begin_recorded_unit(training=False)
    assert given, "the core was given no graph"


# --- states and metrics --------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_gpu_state_packs_to_the_same_bytes_as_a_host_state(optimizer):
    a_model = model(optimizer)
    train(a_model)
    tree = a_model.state_dict()
    by_hand = _to_cpu(tree)
    assert bytes(_core.pack_state(StateArena().to_host(tree))) == bytes(_core.pack_state(by_hand))


def test_a_state_leaves_in_few_copies_with_every_bit():
    """Of small and large tensors, in each layout, with bits that arithmetic would change."""
    bits = torch.arange(2**16, dtype=torch.int32, device=GPU).to(torch.int16)
    tree = {
        "bfloat16": bits.view(torch.bfloat16),
        "float16": bits.view(torch.float16),
        "float32": torch.full((5,), 0x7F800001, dtype=torch.int32, device=GPU).view(torch.float32),
        "channels": torch.randn(8, 6, 3, 3, device=GPU).to(memory_format=torch.channels_last),
        "large": torch.randn(700, 700, device=GPU).t(),
        "flags": torch.tensor([True, False, True], device=GPU),
        "nothing": torch.zeros(0, 3, device=GPU),
        "many": [torch.full((n,), n, device=GPU) for n in range(1, 300)],
    }
    by_hand = _to_cpu(tree)
    arena = StateArena()
    with torch.profiler.profile() as profile:
        hosted = arena.to_host(tree)
    assert bytes(_core.pack_state(hosted)) == bytes(_core.pack_state(by_hand))
    copies = [event for event in profile.events() if event.name.startswith("Memcpy DtoH")]
    assert len(copies) == 2  # one is of the large tensor


def test_a_state_is_packed_after_the_work_on_its_stream():
    stream, value = torch.cuda.Stream(GPU), torch.zeros(1000, device=GPU)
    arena = StateArena()
    stream.wait_stream(torch.cuda.current_stream(GPU))
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.cuda._sleep(10_000_000)
            value += 1
        hosted = arena.to_host({"a": value, "b": value.half()})
    assert hosted["a"].eq(3).all() and hosted["b"].eq(3).all()


def _to_cpu(value):
    if isinstance(value, dict):
        return {key: _to_cpu(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_to_cpu, value))
    return value.cpu() if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_hop_changes_nothing(optimizer, graph):
    straight, first = model(optimizer, graph=graph), model(optimizer, graph=graph)
    train(straight), train(first)
    buffer = _core.pack_state(StateArena().to_host(first.state_dict()))
    second = model(optimizer, graph=graph)
    arena = StateArena()
    second.load_state_dict(arena.to_device(_core.unpack_state(buffer, "torch", copy=None), GPU))
    arena.to_host({"a": torch.full((10**6,), 7.0, device=GPU)})  # the arena is used again
    assert train(straight) == train(second)
    assert packed(straight) == packed(second)


@pytest.mark.parametrize("graph", [False, True])
def test_a_gpu_state_can_be_trained_further_on_the_cpu(graph):
    a_model = model(graph=graph)
    train(a_model)
    buffer = _core.pack_state(StateArena().to_host(a_model.state_dict()))
    on_cpu = model(device="cpu", graph=graph)
    on_cpu.load_state_dict(_core.unpack_state(buffer, "torch"))
    for name, value in on_cpu.net.state_dict().items():
        assert torch.equal(value, a_model.net.state_dict()[name].cpu()), name
    train(on_cpu)


class Source:
    last_rows = 4

    def __len__(self):
        return 50

    def __iter__(self):
        yield from range(50)


def test_metrics_are_summed_as_if_read_at_once():
    values = torch.randn(50, device=GPU)

    def step(i):
        return {"loss": values[i], "pair": (values[i].double() ** 2, i), "host": 0.1 * i}

    later = run_batches(Source(), step, device=GPU)
    now = run_batches(
        Source(),
        lambda i: {
            name: tuple(map(float, value)) if isinstance(value, tuple) else float(value)
            for name, value in step(i).items()
        },
    )
    assert later.sums == now.sums


# --- what graph=True would bring ---------------------------------------------------------


def build_small(config):
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 5))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    loss = functional.cross_entropy
    return cerebro.torch.Model(net, optimizer=optimizer, loss=loss, graph=config.get("graph"))


def test_the_check_offers_graph_where_the_gpu_waits():
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=(400, 8)).astype("f4"), "y": rng.integers(0, 5, size=400)}
    found = cerebro.check(build_small, {}, data, devices=GPU)
    assert found and found.offer.startswith("graph=True would make a training step ")
    assert not cerebro.check(build_small, {"graph": [False]}, data, devices=GPU).offer
