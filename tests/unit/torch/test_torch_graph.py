"""Steps that are captured and replayed, with a recorder in the place of CUDA graphs.

The recorder does the work again when it replays, into the tensors that the capture has returned,
with the host's random numbers as they were when it captured: what Python decided stays decided.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import random
from types import SimpleNamespace

import numpy as np
import pytest

import cerebro._core as _core
import cerebro.data
from cerebro.machine import generators

torch = pytest.importorskip("torch")
from captured import is_captured, refusal_of  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402

import cerebro.torch  # noqa: E402
from cerebro.report import findings  # noqa: E402
from cerebro.torch import arguments, diagnosis, graph_recorder, graph_replay  # noqa: E402
from cerebro.torch.graph import COMPARED, MOST_GRAPHS, WARM_UP  # noqa: E402
from cerebro.torch.graph_recorder import Captured, CudaRecorder  # noqa: E402

ROWS, SHORT = 6, 4
HELD = 12_345  # bytes of a recorded step
BEFORE = WARM_UP + COMPARED


@pytest.fixture(autouse=True)
def core(monkeypatch):
    """Stands for `_core.GraphReplay`, which needs a GPU: what the core would be given."""
    monkeypatch.setattr(graph_replay, "make_replay", Given)


class Given:
    """A graph as the core gets it."""

    runs, failed = 0, False

    def __init__(self, device, launch, static, values, rates, prepare):
        self.launch, self.prepare, self.rates = launch, prepare, rates
        self.inputs = [graph_replay.describe_input(value) for value in static.values()]
        self.metrics = [graph_replay.describe_metric(*item) for item in values.items()]


class Again:
    """Stands for a recorder of CUDA graphs."""

    def __init__(self):
        self.replays = self.captures = 0

    def warm(self, work):
        return work()

    def run_watched(self, work):
        return self.warm(work), None

    def capture(self, work):
        self.captures += 1
        host = random.getstate(), np.random.get_state()
        static = work()

        def replay():
            self.replays += 1
            now = random.getstate(), np.random.get_state()
            random.setstate(host[0])
            np.random.set_state(host[1])
            for name, value in work().items():
                fill(static[name], value)
            random.setstate(now[0])
            np.random.set_state(now[1])

        return Captured(static, replay, HELD, None)

    def bind(self, replay):
        return replay


def fill(static, value):
    if isinstance(static, tuple):
        for one, other in zip(static, value, strict=True):
            fill(one, other)
    elif isinstance(static, torch.Tensor):
        static.copy_(value)


class Refuses(Again):
    """A device on which nothing can be captured."""

    def capture(self, work):
        work()
        raise RuntimeError("operation not permitted when stream is capturing\nCUDA error")


class Waits(Again):
    """A device that is waited for in every step."""

    def run_watched(self, work):
        return self.warm(work), "loss.py:3"


class Wrong(Again):
    """A graph that gives something else, from the given replay on."""

    def __init__(self, parameter, at):
        super().__init__()
        self.parameter, self.at = parameter, at

    def capture(self, work):
        captured = super().capture(work)

        def wrong():
            captured.replay()
            if self.replays >= self.at:
                with torch.no_grad():
                    self.parameter[0].add_(1e-6)

        return Captured(captured.values, wrong, HELD, None)


def network():
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Dropout(0.3),
        torch.nn.Linear(8, 3),
    )  # fmt: skip


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


def adam(net):
    return torch.optim.Adam(net.parameters(), lr=0.01)


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def rmsprop(net):
    return torch.optim.RMSprop(net.parameters(), lr=0.01)


def model(recorder=None, optimizer=adam, schedule=None, **options):
    """A model whose steps are recorded; by None: captured nowhere."""
    net = options.pop("net", None) or network()
    made = optimizer(net)
    if schedule is not None:
        options |= {"scheduler": schedule(made), "scheduler_step": "batch"}
    result = cerebro.torch.Model(
        net,
        optimizer=made,
        loss=functional.cross_entropy,
        metrics={"accuracy": accuracy, "pair": lambda o, t: (accuracy(o, t), len(t))},
        graph=True,
        **options,
    )
    result.capture(Refuses() if recorder is None else recorder)
    return result


def batches(count=12, short=(7,)):
    generator = torch.Generator().manual_seed(5)
    return [
        {
            "x": torch.randn(SHORT if i in short else ROWS, 5, generator=generator),
            "y": torch.randint(0, 3, (SHORT if i in short else ROWS,), generator=generator),
        }
        for i in range(count)
    ]


def train(a_model, some=None):
    torch.manual_seed(3)
    random.seed(3)
    return [a_model.train_batch(batch) for batch in (some or batches())]


def bits(a_model):
    return _core.hash_state(_core.pack_state([a_model.state_dict(), generators.capture(True)]))


def floats(values):
    return [{k: tuple(map(float, v)) if isinstance(v, tuple) else float(v) for k, v in one.items()}
            for one in values]  # fmt: skip


@pytest.mark.parametrize("optimizer", [adam, sgd, rmsprop])
@pytest.mark.parametrize(
    "schedule", [None, lambda made: lr_scheduler.ExponentialLR(made, 0.9)], ids=["", "schedule"]
)
def test_replayed_steps_match_ordinary_steps_bit_for_bit(optimizer, schedule):
    recorder = Again()
    graphed, ordinary = (model(r, optimizer, schedule) for r in (recorder, None))
    assert floats(train(graphed)) == floats(train(ordinary))
    assert bits(graphed) == bits(ordinary)
    if optimizer is rmsprop and schedule is not None:  # its rate is a number of the graph's
        assert "'lr' changes" in refusal_of(graphed)
    else:
        assert is_captured(graphed)
        assert recorder.replays == 12 - 1 - WARM_UP  # all of full size but the first
    assert refusal_of(ordinary) is not None


def test_steps_of_adam_are_those_of_a_plain_loop():
    a_model = model(Again(), clip_norm=0.5)
    train(a_model)
    torch.manual_seed(3)
    net = network()
    torch.manual_seed(3)
    optimizer = torch.optim.Adam(net.parameters(), lr=torch.tensor(0.01))
    for batch in batches():
        functional.cross_entropy(net(batch["x"]), batch["y"]).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    for name, value in net.state_dict().items():
        assert torch.equal(value, a_model.net.state_dict()[name]), name


def test_short_batches_are_ordinary_steps():
    recorder = Again()
    a_model = model(recorder)
    train(a_model, batches(10, short=()))
    replays = recorder.replays
    train(a_model, batches(1, short=(0,)))
    assert recorder.replays == replays and is_captured(a_model)


def test_the_learning_rate_in_the_state_is_a_float():
    a_model = model(Again(), schedule=lambda made: lr_scheduler.StepLR(made, 3, 0.1))
    train(a_model)
    (group,) = a_model.state_dict()["optimizer"]["param_groups"]
    assert group["lr"] == pytest.approx(0.01 * 0.1**4) and type(group["lr"]) is float


def test_values_outlive_the_next_replay():
    a_model, ordinary = model(Again()), model()
    values = train(a_model)
    assert len({value["loss"].data_ptr() for value in values}) == len(values)
    assert floats(values) == floats(train(ordinary))


def test_a_capture_that_is_refused_says_why(caplog):
    a_model = model(Refuses())
    with caplog.at_level(logging.WARNING, "cerebro.torch"):
        train(a_model)
    (record,) = caplog.records
    assert "not replayed as a CUDA graph: it cannot be captured: RuntimeError: operation not" in (
        record.getMessage()
    )
    assert "\n" not in record.getMessage()


def test_a_step_that_waits_for_the_gpu_is_not_captured():
    a_model, ordinary = model(Waits()), model()
    assert floats(train(a_model)) == floats(train(ordinary))
    assert bits(a_model) == bits(ordinary)
    assert refusal_of(a_model) == "it waits for the GPU at loss.py:3"


def test_a_capture_that_fails_before_the_update_leaves_no_gradients():
    class Within(Again):
        def capture(self, work):
            (optimizer,) = a_model._optimizers
            step, optimizer.step = optimizer.step, lambda: 1 / 0
            try:
                return super().capture(work)
            finally:
                optimizer.step = step

    a_model, ordinary = model(Within()), model()
    assert floats(train(a_model)) == floats(train(ordinary))
    assert bits(a_model) == bits(ordinary)
    assert "ZeroDivisionError" in refusal_of(a_model)


@pytest.mark.parametrize("at", range(1, COMPARED + 1))
def test_a_graph_that_differs_is_given_up_without_a_trace(caplog, at):
    net = network()
    a_model = model(Wrong(net[4].bias, at), net=net)
    ordinary = model()
    assert floats(train(a_model)) == floats(train(ordinary))
    assert bits(a_model) == bits(ordinary)
    assert refusal_of(a_model) == "it is not the ordinary step: 4.bias of the graph differs"


def test_random_numbers_of_the_host_cannot_be_replayed():
    def step(net, batch):
        keep = random.random() < 0.5
        return {"loss": functional.cross_entropy(net(batch["x"] * keep), batch["y"])}

    def made(recorder):
        net = network()
        a_model = cerebro.torch.Model(net, optimizer=adam(net), step=step, graph=True)
        a_model.capture(recorder)
        return a_model

    a_model, ordinary = made(Again()), made(Refuses())
    assert floats(train(a_model)) == floats(train(ordinary))
    assert bits(a_model) == bits(ordinary)
    assert not is_captured(a_model) and refusal_of(a_model)


def test_a_metric_that_python_counts_cannot_be_replayed():
    calls = []

    def count(output, target):
        calls.append(1)
        return float(len(calls))

    net = network()
    a_model = cerebro.torch.Model(
        net, optimizer=adam(net), loss=functional.cross_entropy, metrics={"n": count}, graph=True
    )
    a_model.capture(Again())
    train(a_model)
    assert refusal_of(a_model) == (
        "it is not the ordinary step: the metric 'n' of the graph differs"
    )


def test_a_setting_that_changes_ends_the_graph():
    def cycle(made):
        return lr_scheduler.OneCycleLR(made, 0.1, total_steps=40)

    a_model, ordinary = model(Again(), sgd, cycle), model(None, sgd, cycle)
    assert floats(train(a_model)) == floats(train(ordinary))
    assert bits(a_model) == bits(ordinary)
    assert "'momentum' changes while the model trains" in refusal_of(a_model)


def test_a_one_cycle_schedule_of_the_rate_alone_is_replayed():
    def cycle(made):
        return lr_scheduler.OneCycleLR(made, 0.1, total_steps=40, cycle_momentum=False)

    a_model, ordinary = model(Again(), sgd, cycle), model(None, sgd, cycle)
    assert floats(train(a_model)) == floats(train(ordinary))
    assert bits(a_model) == bits(ordinary) and is_captured(a_model)


def test_a_state_that_is_loaded_in_place_keeps_the_graph():
    recorder = Again()
    a_model, ordinary = model(recorder), model()
    train(a_model)
    train(ordinary)
    state = copy.deepcopy(ordinary.state_dict())
    train(a_model)
    a_model.load_state_dict(state)
    replays = recorder.replays
    assert floats(train(a_model)) == floats(train(ordinary))
    assert bits(a_model) == bits(ordinary)
    assert recorder.replays > replays and is_captured(a_model)


def test_the_graph_is_captured_again_when_a_load_replaces_tensors():
    recorder = Again()
    a_model, ordinary = model(recorder), model()
    train(a_model)
    train(ordinary)
    state = copy.deepcopy(ordinary.state_dict())
    a_model._optimizers[0].state.clear()
    a_model.load_state_dict(state)
    before = recorder.captures
    assert floats(train(a_model)) == floats(train(ordinary))
    assert bits(a_model) == bits(ordinary)
    assert recorder.captures == before + 1 and is_captured(a_model)


def test_an_optimizer_that_loads_by_itself_is_captured_again():
    recorder = Again()
    a_model, ordinary = model(recorder), model()
    for one in (a_model, ordinary):
        train(one)
        (optimizer,) = one._optimizers
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    before = recorder.captures
    assert floats(train(a_model)) == floats(train(ordinary))
    assert bits(a_model) == bits(ordinary)
    assert recorder.captures == before + 1 and is_captured(a_model)


def test_a_hop_changes_nothing():
    parts = [batches(12), batches(12, short=(3,))]
    straight, first, second = model(Again()), model(Again()), model(Again())
    train(straight, parts[0])
    train(straight, parts[1])
    train(first, parts[0])
    packed = _core.pack_state(first.state_dict())
    second.load_state_dict(_core.unpack_state(packed, "torch"))
    train(second, parts[1])
    assert bits(second) == bits(straight)


def test_graph_has_no_effect_on_the_cpu():
    net = network()
    a_model = cerebro.torch.Model(
        net, optimizer=adam(net), loss=functional.cross_entropy, graph=True
    )
    assert not is_captured(a_model)
    train(a_model)
    plain = network()
    other = cerebro.torch.Model(plain, optimizer=adam(plain), loss=functional.cross_entropy)
    train(other)
    assert bits(a_model) == bits(other)


def test_a_state_of_a_gpu_trains_on_the_cpu():
    """Where the optimizer keeps its counts is the model's affair, not the state's."""
    net = network()
    a_model = cerebro.torch.Model(net, optimizer=adam(net), loss=functional.cross_entropy)
    train(a_model)
    state = copy.deepcopy(a_model.state_dict())
    (group,) = state["optimizer"]["param_groups"]
    group |= {"capturable": True, "fused": True}
    a_model.load_state_dict(state)
    train(a_model)
    (group,) = a_model.state_dict()["optimizer"]["param_groups"]
    assert not group["capturable"] and not group["fused"]


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_no_garbage_is_collected_during_a_capture(monkeypatch, enabled, fails):
    """It may hold an older graph, whose end on a GPU makes the capture invalid."""
    cuda = torch.cuda
    for name in ("CUDAGraph", "graph_pool_handle", "synchronize", "set_stream", "Stream"):
        monkeypatch.setattr(cuda, name, lambda *_: SimpleNamespace(replay=None))
    monkeypatch.setattr(cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):  # with CUDA they are there
        monkeypatch.setattr(torch._C, name, None, raising=False)
    monkeypatch.setattr(graph_recorder, "_streams", {})
    monkeypatch.setattr(graph_recorder, "_pools", {})
    reserved = iter((5_000, 7_000))
    monkeypatch.setattr(cuda, "memory_reserved", lambda _: next(reserved))
    monkeypatch.setattr(cuda, "graph", lambda *_, **__: contextlib.nullcontext())
    seen = []

    def work():
        seen.append(gc.isenabled())
        if fails:
            raise ValueError("in a step")
        return {}

    monkeypatch.setattr(torch, "zeros", lambda *_, **__: seen.append(gc.isenabled()))
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ValueError, match="in a step") if fails else contextlib.nullcontext():
            _, _, held = CudaRecorder(torch.device("cpu")).capture(work)
            assert held == 2_000
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
    assert seen == [False] * (1 + fails)


def test_graph_memory_counts_as_held_bytes():
    a_model = model(Again())
    assert a_model.held_bytes == 0
    train(a_model)
    assert is_captured(a_model) and a_model.held_bytes == HELD
    refused = model(Refuses())
    train(refused)
    assert refused.held_bytes == 0


# --- what graph=True would bring on a GPU -------------------------------------------------


class Gpu:
    """The clock of a host, and of a GPU that works through what the host launches.

    `launch` and `work` are the milliseconds that a step keeps the host and the GPU.
    """

    def __init__(self, monkeypatch):
        self.host = self.free = 0.0
        clock = SimpleNamespace(perf_counter=lambda: self.host / 1000)
        monkeypatch.setattr(diagnosis, "time", clock)
        monkeypatch.setattr(diagnosis, "_wait_for_gpu", self.wait)

    def wait(self, _):
        self.host = max(self.host, self.free)

    def model(self, launch, work, recorder=None, graph=None):
        def augment(batch):
            self.host += launch
            self.free = max(self.free, self.host) + work
            return batch

        net = network()
        made = cerebro.torch.Model(
            net, optimizer=adam(net), loss=functional.cross_entropy, augment=augment, graph=graph
        )
        if recorder is not None:
            made._train = made._compile_graphed_step(recorder)
        return made


def gain_on(gpu, ordinary, graphed):
    return diagnosis.measure_on_gpu(gpu.model(*ordinary), batches(1)[0], graphed)


def test_a_gpu_that_waits_for_the_host_is_measured_with_a_graph(monkeypatch):
    gpu = Gpu(monkeypatch)
    found = gain_on(gpu, (0.9, 0.3), lambda: gpu.model(0.05, 0.25, Again()))
    ordinary, replayed = found
    assert ordinary == pytest.approx(0.9e-3, rel=0.05)  # the last one's work ends later
    assert replayed == pytest.approx(0.25e-3, rel=0.05)
    assert findings.offer_graph(found).startswith("graph=True would make a training step 3.7")


@pytest.mark.parametrize("step", [(0.1, 0.9), (30.0, 30.0)], ids=["busy", "long"])
def test_without_need_nothing_is_built_to_be_measured(monkeypatch, step):
    assert gain_on(Gpu(monkeypatch), step, pytest.fail) is None


@pytest.mark.parametrize(
    ("recorder", "graph"), [(Refuses(), None), (Waits(), None), (None, None), (Again(), False)]
)
def test_a_step_that_is_not_replayed_has_no_gain(monkeypatch, recorder, graph):
    """It cannot be captured, waits for the GPU, is not a GPU's; or the user has decided."""
    gpu = Gpu(monkeypatch)
    assert gain_on(gpu, (0.9, 0.3), lambda: gpu.model(0.1, 0.3, recorder, graph)) is None


def test_only_models_that_leave_graph_open_are_built_with_it(monkeypatch):
    gpu = Gpu(monkeypatch)
    with arguments.set_open_graph() as opened:
        assert gpu.model(0, 0)._recorded and len(opened) == 1
        assert not gpu.model(0, 0, graph=False)._recorded and len(opened) == 1
        with pytest.raises(cerebro.errors.InputError, match="amp='fp16'"):
            net = network()
            cerebro.torch.Model(net, optimizer=adam(net), loss=functional.mse_loss, amp="fp16")
    assert not gpu.model(0, 0)._recorded
