"""Steps that are captured and replayed, with a recorder in the place of CUDA graphs."""

from __future__ import annotations

import copy
import logging
import random
import types

import pytest

import cerebro._core as _core
import cerebro.data
from cerebro.machine import generators

torch = pytest.importorskip("torch")
from captured import is_captured, refusal_of  # noqa: E402
from graph_fakes import (  # noqa: E402
    HELD,
    Again,
    Given,
    Refuses,
    adam,
    batches,
    drive,
    floats,
    model,
    network,
    rmsprop,
    sgd,
    train,
)  # fmt: skip
from torch.nn import functional  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402

import cerebro.torch  # noqa: E402
from cerebro.report import findings  # noqa: E402
from cerebro.torch import arguments, diagnosis, graph_replay  # noqa: E402
from cerebro.torch.graph import COMPARED, MOST_GRAPHS, WARM_UP  # noqa: E402
from cerebro.torch.graph_recorder import Captured  # noqa: E402

BEFORE = WARM_UP + COMPARED  # batches of one shape, of which none is replayed without comparison


@pytest.fixture(autouse=True)
def core(monkeypatch):
    monkeypatch.setattr(graph_replay, "make_replay", Given)


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


def bits(a_model):
    return _core.hash_state(_core.pack_state([a_model.state_dict(), generators.capture(True)]))


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


def of_sizes(*sizes):
    generator = torch.Generator().manual_seed(5)
    return [
        {
            "x": torch.randn(n, 5, generator=generator),
            "y": torch.randint(3, (n,), generator=generator),
        }
        for n in sizes
    ]


def test_each_shape_of_batch_gets_its_own_graph():
    recorder = Again()
    graphed, ordinary = model(recorder), model()
    some = of_sizes(*[6, 4] * (BEFORE + 3))
    assert floats(train(graphed, some)) == floats(train(ordinary, some))
    assert bits(graphed) == bits(ordinary)
    assert recorder.captures == 2 and recorder.replays == 2 * (1 + COMPARED + 3) - 2
    assert graphed.held_bytes == 2 * HELD


def test_further_shapes_take_ordinary_steps():
    recorder = Again()
    graphed, ordinary = model(recorder), model()
    some = of_sizes(*[n for n in range(2, 4 + MOST_GRAPHS) for _ in range(WARM_UP + 2)])
    assert floats(train(graphed, some)) == floats(train(ordinary, some))
    assert bits(graphed) == bits(ordinary)
    assert recorder.captures == MOST_GRAPHS and refusal_of(graphed) is None


class Shared(Again):
    """Graphs that share memory: each replay overwrites the results of all others."""

    def __init__(self):
        super().__init__()
        self.results = []

    def capture(self, work):
        captured = super().capture(work)
        self.results.append(captured)

        def replay():
            for other in self.results:
                for value in other.values.values() if other is not captured else ():
                    for tensor in value if isinstance(value, tuple) else (value,):
                        if isinstance(tensor, torch.Tensor):
                            tensor.fill_(float("nan"))
            again()

        again, captured.replay = captured.replay, replay
        self.handles[captured.handle] = replay
        return captured


@pytest.mark.parametrize("run", [train, lambda *a: drive(*a)[0]], ids=["Python", "the core"])
def test_results_are_read_before_another_graph_overwrites_them(run):
    graphed, ordinary = model(Shared()), model()
    some = of_sizes(*[6, 4] * (BEFORE + 3))
    for _ in range(2):
        torch.manual_seed(3)
        found = floats(run(graphed, some))
        torch.manual_seed(3)
        assert found == floats(run(ordinary, some))
        assert floats(measure(graphed, some)) == floats(measure(ordinary, some))
    assert bits(graphed) == bits(ordinary)
    assert is_captured(graphed) and is_captured(graphed, training=False)


# --- evaluation --------------------------------------------------------------------


def measure(a_model, some=None):
    return [a_model.eval_batch(batch) for batch in some or batches()]


def test_evaluation_is_captured_and_compared():
    recorder = Again()
    graphed, ordinary = model(recorder), model()
    before = bits(graphed)
    assert floats(measure(graphed)) == floats(measure(ordinary))
    assert bits(graphed) == bits(ordinary) == before
    assert recorder.replays == 12 - 1 - WARM_UP
    assert is_captured(graphed, training=False) and not is_captured(graphed)
    train(graphed), train(ordinary)
    assert floats(measure(graphed)) == floats(measure(ordinary))
    assert graphed.held_bytes == 2 * HELD


def test_an_evaluation_by_a_graph_that_differs_is_ordinary(caplog):
    class Off(Again):
        def capture(self, work):
            captured = super().capture(work)
            replay = captured.replay
            captured.replay = lambda: (replay(), captured.values["loss"].add_(1e-6))
            return captured

    graphed, ordinary = model(Off()), model()
    with caplog.at_level(logging.INFO, "cerebro.torch"):
        assert floats(measure(graphed)) == floats(measure(ordinary))
    assert "the evaluation is not replayed as a CUDA graph" in caplog.text
    assert refusal_of(graphed, training=False) == (
        "it is not the ordinary step: the metric 'loss' of the graph differs"
    )
    assert refusal_of(graphed) is None


class Counts(torch.nn.Linear):
    """Counts batches, in evaluation too, and keeps what it has seen last."""

    def __init__(self):
        super().__init__(5, 3)
        self.register_buffer("count", torch.zeros(()))
        self.last = None

    def forward(self, x):
        self.count.add_(1)
        self.last = super().forward(x)
        return self.last


def test_an_evaluation_that_changes_the_state_is_not_captured():
    graphed, ordinary = (model(r, net=Counts()) for r in (Again(), None))
    for one in (graphed, ordinary):
        with torch.no_grad():
            one.net.weight.fill_(0.1), one.net.bias.zero_()
    assert floats(measure(graphed)) == floats(measure(ordinary))
    assert float(graphed.net.count) == 12
    assert refusal_of(graphed, training=False) == "it changes count"


def test_a_tensor_that_a_module_keeps_is_not_one_of_the_capture():
    """It would have no values before the first replay, and lie in memory that graphs share."""

    class Looks(Again):
        def capture(self, work):
            before = a_model.net.last
            captured = super().capture(work)
            assert a_model.net.last is before
            return captured

    a_model = model(Looks(), net=Counts())
    train(a_model)
    assert is_captured(a_model)


def test_a_layer_that_is_frozen_between_units_is_captured_again():
    recorder = Again()
    graphed, ordinary = model(recorder), model()
    for _ in range(2):
        torch.manual_seed(3)
        found, _ = drive(graphed, batches())
        torch.manual_seed(3)
        assert found == drive(ordinary, batches())[0]
        for one in (graphed, ordinary):
            one.net[0].weight.requires_grad = False
    assert bits(graphed) == bits(ordinary)
    assert recorder.captures == 2 and is_captured(graphed)


# --- what is given up --------------------------------------------------------------


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
        clock = types.SimpleNamespace(perf_counter=lambda: self.host / 1000)
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
            made.capture(recorder)
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
    ("recorder", "graph"), [(Refuses(), None), (Waits(), None), (Again(), False)]
)
def test_a_step_that_is_not_replayed_has_no_gain(monkeypatch, recorder, graph):
    """It cannot be captured, or waits for the GPU; or the user has decided."""
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
