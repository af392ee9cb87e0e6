"""Steps that are recorded on the CPU and run again: their states are those of ordinary steps."""

from __future__ import annotations

import copy
import logging
import random
import sys
from pathlib import Path

import numpy as np
import pytest

import cerebro
import cerebro._core as _core
from cerebro.errors import RunError
from cerebro.machine import generators

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402
from torch.utils._python_dispatch import _get_current_dispatch_mode  # noqa: E402

import cerebro.torch  # noqa: E402
from cerebro.torch.recorded_step import COMPARED, WARM_UP  # noqa: E402

ROWS, SHORT, BATCHES, EPOCHS = 8, 5, 9, 3
BEFORE = WARM_UP + 1 + COMPARED
HERE = Path(__file__).name


# --- networks, losses, optimizers, schedules --------------------------------------


def mlp():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def one_parameter():
    return nn.Linear(6, 3, bias=False)


def with_dropout():
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 3))


def with_batch_norm():
    return nn.Sequential(
        nn.Linear(6, 12), nn.BatchNorm1d(12), nn.GELU(), nn.LayerNorm(12), nn.Linear(12, 3)
    )


def convolutional():
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)), nn.Conv2d(1, 4, 2, padding=1), nn.BatchNorm2d(4), nn.ReLU(),
        nn.MaxPool2d(2), nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.cell = kind(2, 5, batch_first=True, **options)
        self.head = nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.cell(x.reshape(len(x), 3, 2))[0][:, -1])


def gru():
    return Recurrent(nn.GRU, num_layers=2, dropout=0.2)


def lstm():
    return Recurrent(nn.LSTM)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        return self.head(self.layer(x.unsqueeze(1) * torch.ones(1, 4, 1)).mean(1))


class Tied(nn.Module):
    """One weight in two places: its gradient is a sum."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))
        self.shift = nn.Parameter(torch.zeros(6))

    def forward(self, x):
        hidden = functional.elu(self.up(x)) * self.scale + self.shift + self.scale
        return functional.linear(hidden, self.up.weight, self.up.bias)[:, :3]


class Averaged(nn.Module):
    """Keeps an average of its weights, in the step."""

    def __init__(self):
        super().__init__()
        self.net = with_dropout()
        self.register_buffer("average", torch.zeros(16, 6))

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.average.lerp_(self.net[0].weight, 0.1)
        return self.net(x)


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, 4)
        self.head = nn.Linear(24, 3)

    def forward(self, x):
        return self.head(self.table((x.abs() * 3).long().clamp(max=9)).flatten(1))


def adam(net):
    return torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=0.01)


def amsgrad(net):
    return torch.optim.Adam(net.parameters(), lr=0.01, amsgrad=True, maximize=True)


def adamw(net):
    return torch.optim.AdamW(net.parameters(), lr=0.01)


def adamw_groups(net):
    parts = list(net.parameters())
    return torch.optim.AdamW(
        [{"params": parts[:2], "lr": 0.003, "weight_decay": 0.0}, {"params": parts[2:]}], lr=0.01
    )


def adamw_fused(net):
    return torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)


def adamw_foreach(net):
    return torch.optim.AdamW(net.parameters(), lr=0.01, foreach=True)


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.05)


def sgd_nesterov(net):
    return torch.optim.SGD(
        net.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.001
    )


def sgd_dampened(net):
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, dampening=0.1, fused=True)


def sgd_foreach(net):
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.8, foreach=True)


def two_optimizers(net):
    parts = list(net.parameters())
    return [torch.optim.AdamW(parts[:2], lr=0.01), torch.optim.SGD(parts[2:], lr=0.1, momentum=0.5)]


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=BATCHES * EPOCHS + 1)


def warm_up(optimizer):
    return lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 12))


def cosine(optimizer):
    return lr_scheduler.CosineAnnealingLR(optimizer, 10)


def label_smoothing(output, target):
    return functional.cross_entropy(output, target, label_smoothing=0.1)


def squared(output, target):
    return functional.mse_loss(output, torch.eye(3)[target])


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


NETWORKS = [
    mlp, with_dropout, with_batch_norm, convolutional, gru, lstm, Attention, Tied, Averaged,
    Embedded,
]  # fmt: skip
OPTIMIZERS = [
    adam, amsgrad, adamw, adamw_groups, adamw_fused, adamw_foreach, sgd, sgd_nesterov,
    sgd_dampened, sgd_foreach, two_optimizers,
]  # fmt: skip


def made(graph, net=mlp, optimizer=adamw, schedule=None, **options):
    torch.manual_seed(1)
    network = net()
    chosen = optimizer(network)
    if schedule is not None:
        options |= {"scheduler": schedule(chosen), "scheduler_step": "batch"}
    if "step" not in options:
        pair = {"accuracy": accuracy, "pair": lambda o, t: (accuracy(o, t), len(t))}
        options = {"loss": nn.CrossEntropyLoss(), "metrics": pair} | options
    return cerebro.torch.Model(network, optimizer=chosen, graph=graph, **options)


def batches(count=BATCHES, short=(BATCHES - 1,), seed=5):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "x": torch.randn(SHORT if i in short else ROWS, 6, generator=generator),
            "y": torch.randint(0, 3, (SHORT if i in short else ROWS,), generator=generator),
        }
        for i in range(count)
    ]


def floats(values):
    return {k: tuple(map(float, v)) if isinstance(v, tuple) else float(v)
            for k, v in values.items()}  # fmt: skip


def bits(model):
    return _core.hash_state(_core.pack_state([model.state_dict(), generators.capture(True)]))


def train(model, epochs=EPOCHS, count=BATCHES, between=None):
    """Train and evaluate; return all metrics, and the hash of every epoch's state."""
    torch.manual_seed(3)
    random.seed(3)
    found = []
    for epoch in range(epochs):
        for batch in batches(count, short=(count - 1,), seed=epoch):
            found.append(floats(model.train_batch(batch)))
        model.end_unit()
        for batch in batches(3, short=(2,), seed=100):
            found.append(floats(model.eval_batch(batch)))
        model.end_epoch(epoch, {"train_loss": 1.0})
        found.append(bits(model))
        if between is not None:
            between(model)
    return found


def agree(**options):
    """Train with and without recording; return the recorded model."""
    between = options.pop("between", None)
    one, two = made(True, **options), made(False, **options)
    assert train(one, between=between) == train(two, between=between)
    assert not two._recorded
    return one


def replays(model):
    return model._recorded[0].replays


def check_recorded(model):
    for step in model._recorded:
        assert step.refusal is None
    assert replays(model) == BATCHES * EPOCHS - EPOCHS - BEFORE
    assert model._recorded[1].replays


# --- the same states ------------------------------------------------------------------


@pytest.mark.parametrize("net", NETWORKS)
@pytest.mark.parametrize("optimizer", [adamw, sgd_nesterov])
def test_recorded_steps_match_ordinary_steps_for_each_network(net, optimizer):
    check_recorded(agree(net=net, optimizer=optimizer, schedule=one_cycle))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("schedule", [None, one_cycle, warm_up, cosine])
def test_recorded_steps_match_ordinary_steps_for_each_optimizer(optimizer, schedule):
    if optimizer is two_optimizers:
        schedule = None
    if optimizer is sgd and schedule is one_cycle:
        pytest.skip("OneCycleLR needs a momentum")
    check_recorded(agree(net=with_dropout, optimizer=optimizer, schedule=schedule))


@pytest.mark.parametrize(
    "options",
    [
        {"loss": label_smoothing},
        {"loss": squared},
        {"loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))},
        {"clip_norm": 0.1},
        {"clip_norm": 0.1, "optimizer": adamw_fused},
        {"amp": "bf16", "net": with_dropout},
        {"amp": "bf16", "net": gru, "clip_norm": 0.1},
        {"augment": lambda b: {**b, "x": b["x"] * random.random() + torch.randn_like(b["x"])}},
        {"clip_norm": 0.1, "net": Tied},
        {"clip_norm": 0.1, "net": one_parameter},
    ],
)
def test_recorded_steps_match_ordinary_steps_for_model_options(options):
    check_recorded(agree(**{"net": mlp, **options}))


@pytest.mark.parametrize("clip_norm", [None, 0.1])
@pytest.mark.parametrize("accumulate", [2, 4])
def test_gradients_are_gathered_over_batches(accumulate, clip_norm):
    model = agree(net=Tied, accumulate=accumulate, clip_norm=clip_norm, schedule=one_cycle)
    assert model._recorded[0].refusal is None and replays(model) > 0


def test_the_last_batch_of_a_shard_is_recorded_too():
    one, two = made(True, net=with_dropout), made(False, net=with_dropout)
    assert train(one, epochs=8, count=3) == train(two, epochs=8, count=3)
    assert len(one._recorded[0]._programs) == 2
    assert replays(one) == (16 - BEFORE) + (8 - BEFORE)


def test_a_hop_changes_nothing():
    def hop(model):
        packed = _core.pack_state(other.state_dict())
        model.load_state_dict(_core.unpack_state(packed, "torch"))

    other = made(False, net=with_batch_norm, schedule=cosine)
    train(other, epochs=1)
    model = agree(net=with_batch_norm, schedule=cosine, between=hop)
    check_recorded(model)  # what is loaded in place leaves the program as it is


def test_steps_are_recorded_again_when_a_load_replaces_tensors():
    def replace(model):
        state = copy.deepcopy(model.state_dict())
        model._optimizers[0].state.clear()
        model.load_state_dict(state)

    model = agree(between=replace)
    assert model._recorded[0].refusal is None
    assert replays(model) == EPOCHS * (BATCHES - 1 - BEFORE)


def load_optimizer(model, **settings):
    """Load a state into the optimizer by itself: its groups and tensors are others then."""
    (optimizer,) = model._optimizers
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0].update(settings)
    optimizer.load_state_dict(state)


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_an_optimizer_that_loads_between_two_batches(optimizer):
    found = []
    for graph in (True, False):
        model, seen = made(graph, optimizer=optimizer), []
        load_optimizer(model)
        for number, batch in enumerate(batches(20, short=())):
            if number == 10:
                load_optimizer(model, lr=0.3)
            seen.append((floats(model.train_batch(batch)), bits(model)))
        found.append(seen)
        if graph:
            assert model._recorded[0].refusal is None and replays(model) >= 20 - 2 * BEFORE
    assert found[0] == found[1]


@pytest.mark.parametrize(
    "change",
    [
        lambda model: load_optimizer(model, lr=0.2),
        lambda model: model._optimizers[0].param_groups[0].update(betas=(0.8, 0.95)),
        lambda model: model._optimizers[0].param_groups[0].update(weight_decay=0.3, eps=1e-5),
        lambda model: model._optimizers[0].param_groups[0].update(weight_decay=0.0),
        lambda model: model._optimizers[0].param_groups[0].update(amsgrad=False, maximize=True),
        lambda model: model.net[0].bias.requires_grad_(False),
        lambda model: setattr(model.net[2].weight, "data", model.net[2].weight.data * 0.5),
    ],
)
def test_settings_that_change_between_epochs_hold(change):
    model = agree(between=change)
    assert replays(model) > 0


@pytest.mark.parametrize(
    "change",
    [
        lambda part: setattr(part, "p", part.p + 0.1),
        lambda part: setattr(part, "p", 0.0),
        lambda part: part.register_forward_hook(lambda _, given, output: output * 2),
        lambda part: part.register_forward_pre_hook(lambda _, given: (given[0] * 2,)),
    ],
)
def test_modules_that_change_between_epochs_are_recorded_again(change):
    model = agree(net=with_dropout, between=lambda model: change(model.net[2]))
    assert model._recorded[0].refusal is None
    assert 0 < replays(model) <= BATCHES * EPOCHS - EPOCHS - 2 * BEFORE


def test_a_gradient_of_ones_is_not_taken_for_a_constant():
    class Shifted(nn.Module):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(()))
            self.net = mlp()

    def step(net, batch):
        return {"loss": net.net(batch["x"]).square().mean() + net.shift}

    check_recorded(agree(net=Shifted, step=step, clip_norm=0.1, optimizer=sgd_nesterov))


def test_misaligned_or_strided_batches_run_as_ordinary_steps():
    """Kernels may add in another order where memory is not aligned, or not contiguous."""
    whole = {"x": torch.randn(400, 6), "y": torch.randint(3, (400,))}
    odd = [
        {name: t[start : start + ROWS] for name, t in whole.items()} for start in range(1, 99, 7)
    ]
    odd += [{"x": torch.randn(6, ROWS).t(), "y": whole["y"][:ROWS]} for _ in range(9)]
    one, two = made(True), made(False)
    for batch in odd:
        assert floats(one.train_batch(batch)) == floats(two.train_batch(batch))
    assert bits(one) == bits(two)
    assert replays(one) == 0 and not one._recorded[0]._programs


def test_torch_compile_is_not_recorded(monkeypatch):
    import types

    utils = types.SimpleNamespace(counters={"frames": {"ok": 1}})
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", utils)
    assert "torch.compile is in use" in agree()._recorded[0].refusal


class Leaks(nn.Module):
    """An operator that writes into an argument and returns another tensor."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.RReLU(), nn.Linear(16, 3))

    def forward(self, x):
        return self.net(x)


def test_operators_that_write_and_return_something_else():
    check_recorded(agree(net=Leaks))


def test_results_that_the_program_does_not_compute_are_found(monkeypatch):
    """Also where all batches, and so all results, are the same."""
    from cerebro.torch import cpu_program

    left_out = cpu_program._is_left_out
    monkeypatch.setattr(
        cpu_program, "_is_left_out", lambda call: call.name == "relu" or left_out(call)
    )
    model = made(True)
    batch = {"x": torch.randn(ROWS, 6), "y": torch.zeros(ROWS).long()}
    first = [floats(model.eval_batch(batch)) for _ in range(9)]
    assert "it is not the ordinary step" in model._recorded[1].refusal
    assert len({value["loss"] for value in first}) == 1


def test_the_evaluation_of_a_transformer_is_the_ordinary_one():
    """PyTorch computes it by other operators while something watches these."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            layer = nn.TransformerEncoderLayer(6, 2, 12, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)
            self.head = nn.Linear(6, 3)

        def forward(self, x):
            return self.head(self.encoder(x.unsqueeze(1) * torch.ones(1, 4, 1)).mean(1))

    for amp in (None, "bf16"):
        assert agree(net=Encoder, amp=amp)._recorded[0].refusal is None


def test_values_outlive_the_next_replay():
    model = made(True)
    values = [model.train_batch(batch) for batch in batches(12, short=())]
    assert len({value["loss"].data_ptr() for value in values}) == len(values)


def test_programs_are_limited_and_report_their_memory():
    model = made(True)
    for rows in range(1, 15):
        for _ in range(4):
            model.train_batch({"x": torch.ones(rows, 6), "y": torch.zeros(rows).long()})
    assert len(model._recorded[0]._programs) == 8
    assert 8 * 1000 < model.held_bytes < 8 * 100_000


# --- what is refused ------------------------------------------------------------------


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        if x.sum() > 0:
            x = x * 2
        return self.net(x)


class ChangesInput(Branches):
    def forward(self, x):
        return self.net(x.mul_(0.5))


class NewTensor(Branches):
    """What it multiplies by is another tensor in every step."""

    def __init__(self):
        super().__init__()
        self.scale = torch.ones(())

    def forward(self, x):
        self.scale = self.scale * 0.9
        return self.net(x * self.scale)


class Constant(Branches):
    """A tensor that is made anew, from numbers that could be others."""

    def forward(self, x):
        return self.net(x * torch.tensor([0.5]))


class OutsideState(Branches):
    def __init__(self):
        super().__init__()
        self.count = torch.zeros(())

    def forward(self, x):
        self.count += 1
        return self.net(x * self.count)


class Counts(Branches):
    """A number in Python that is another one in every step."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.net(x * (1 + self.calls / 100))


class Draws(Branches):
    def forward(self, x):
        return self.net(x * random.random())


class DrawsItself(Branches):
    def __init__(self):
        super().__init__()
        self.drawer = torch.Generator().manual_seed(1)

    def forward(self, x):
        return self.net(x + torch.randn(x.shape, generator=self.drawer))


class Chooses(Branches):
    def forward(self, x):
        return self.net(x) + x[x > 0].mean()


def line_of(text):
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.strip() == text]
    return f"{HERE}:{number}"


def rmsprop(net):
    return torch.optim.RMSprop(net.parameters(), lr=0.01)


def tensor_rate(net):
    return torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.01), foreach=False)


class Halved(torch.optim.SGD):
    """Whose numbers are not those of SGD."""


def halved(net):
    return Halved(net.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"net": Branches}, f".item() in {line_of('if x.sum() > 0:')}"),
        (
            {"net": ChangesInput},
            "mul_() changes a tensor that is not part of the state in "
            + line_of("return self.net(x.mul_(0.5))"),
        ),
        ({"net": Constant}, "lift_fresh() has other arguments than before"),
        ({"net": NewTensor}, "mul() has other arguments than before"),
        (
            {"net": OutsideState},
            f"changes a tensor that is not part of the state in {line_of('self.count += 1')}",
        ),
        ({"net": Counts}, "mul() has other arguments than before"),
        ({"net": Draws}, "it is not the ordinary step: the step draws from a random generator"),
        (
            {"net": DrawsItself},
            "randn() draws from a generator other than the global one in "
            + line_of("return self.net(x + torch.randn(x.shape, generator=self.drawer))"),
        ),
        (
            {"net": Chooses},
            "index() returns a shape that depends on data in "
            + line_of("return self.net(x) + x[x > 0].mean()"),
        ),
        ({"optimizer": rmsprop}, "there are no formulas for RMSprop's numbers"),
        ({"optimizer": halved}, "there are no formulas for Halved's numbers"),
        ({"optimizer": tensor_rate}, "a setting of AdamW is a tensor"),
    ],
)
def test_steps_that_cannot_be_repeated_are_ordinary_ones(options, reason, caplog):
    with caplog.at_level(logging.WARNING, "cerebro.torch"):
        model = agree(**options)
    assert replays(model) == 0
    assert reason in model._recorded[0].refusal
    about = [r.getMessage() for r in caplog.records if "training step" in r.getMessage()]
    assert about == [f"graph=True: the training step is not recorded: {model._recorded[0].refusal}"]


RECORDED = []


class FailsIfRecorded(nn.Module):
    """Fails halfway through a recorded step, from its given recording on."""

    first = 1

    def __init__(self):
        super().__init__()
        self.net, self.noise, self.norm = mlp(), nn.Dropout(0.3), nn.BatchNorm1d(3)

    def forward(self, x):
        output = self.norm(self.noise(self.net(x)))
        if self.training and _get_current_dispatch_mode() is not None:
            RECORDED.append(1)
            if len(RECORDED) >= self.first:
                raise OSError("somebody watches")
        return output


class FailsLater(FailsIfRecorded):
    first = 2


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if _get_current_dispatch_mode() is not None:
            raise OSError("somebody watches")
        return gradient


class FailsAfterTheHead(nn.Module):
    """Fails when the last layer has its gradients and the others have none."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(FailsInBackward.apply(self.first(x).relu()))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("net", [FailsIfRecorded, FailsLater, FailsAfterTheHead])
def test_a_step_that_fails_only_when_recorded_runs_as_ordinary(net, accumulate):
    RECORDED.clear()
    model = agree(net=net, accumulate=accumulate)
    assert replays(model) == 0
    expected = "it cannot be recorded: OSError: somebody watches"
    assert model._recorded[0].refusal == expected


def test_a_failing_step_raises_the_same_error_as_without_recording():
    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.calls = mlp(), 0

        def forward(self, x):
            self.calls += 1
            if self.calls > WARM_UP:
                raise OSError("broken")
            return self.net(x)

    model = made(True, net=Fails)
    batch = batches(1, short=())[0]
    for _ in range(WARM_UP):
        model.train_batch(batch)
    with pytest.raises(OSError, match="broken") as caught:
        model.train_batch(batch)
    assert caught.value.__context__ is None
    assert model._recorded[0].refusal is None


class Multiplies(nn.Module):
    """PyTorch computes the gradient of a product by other operators while these are recorded."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(1, 3)

    def forward(self, x):
        found = self.first(x)
        if found.sum() > 0:
            found = found * 1
        return self.head(found.prod(1, keepdim=True))


class UsesAnotherLayer(nn.Module):
    """Trains another layer from the recorded step on, so that the optimizer gets more entries."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(1, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls.add_(1)
        chosen = self.second if self.calls.numpy() > WARM_UP else self.first
        return self.head(chosen(x).prod(1, keepdim=True))


@pytest.mark.parametrize("net", [Multiplies, UsesAnotherLayer])
def test_a_refused_recording_does_not_affect_training(net):
    model = agree(net=net)
    assert replays(model) == 0 and model._recorded[0].refusal is not None


class Looked(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(4, 6), nn.Linear(6, 3)

    def forward(self, x, index):
        return self.head(x + self.table(index))


def searched(folder, graph, schedule, *, wrong, index=2):
    """Train a trial whose dataset has one index that may be too large."""
    generator = np.random.default_rng(3)
    columns = {
        "x": generator.standard_normal((320, 6)).astype("float32"),
        "index": generator.integers(0, 4, 320),
        "y": generator.integers(0, 3, 320),
    }
    good = cerebro.shard(columns, folder / "good", shards=2, progress=False)
    columns["index"][index] = 4
    bad = cerebro.shard(columns, folder / "bad", shards=2, progress=False)

    def build(config):
        return made(graph, net=Looked, schedule=schedule, inputs=["x", "index"], metrics={})

    settings = {"workers": 0, "epochs": 1, "seed": 2, "batch_size": 8, "eval_batch_size": 8}
    try:
        result = cerebro.search(
            build, {}, bad if wrong == "training" else good, n_trials=1, run=folder / "run",
            validation=bad if wrong == "validation" else good, progress=False, **settings,
        )  # fmt: skip
    except RunError as error:  # its only trial has failed
        result = error.result
    return result.trials[0]


@pytest.mark.filterwarnings("ignore:.*the validation rows are the training rows")
@pytest.mark.parametrize("schedule", [None, cosine])  # replayed without Python, and with it
@pytest.mark.parametrize("wrong", ["training", "validation"])
def test_an_error_in_a_replayed_step_names_the_users_line(wrong, schedule, tmp_path):
    trial = searched(tmp_path, True, schedule, wrong=wrong, index=-3)
    assert line_of("return self.head(x + self.table(index))") in trial.error
    assert "ran again with ordinary steps" in trial.log and "it fails: IndexError" in trial.log


@pytest.mark.filterwarnings("ignore:.*the validation rows are the training rows")
def test_after_a_replay_that_fails_the_unit_runs_again(tmp_path, monkeypatch):
    from cerebro.torch.cpu_program import RecordedProgram

    replay, calls, failed = RecordedProgram.replay, [], []

    def broken(self, batch):
        calls.append(self.compared)
        if calls[-12:] == [COMPARED] * 12 and not failed:  # not in the hop check
            failed.append(1)
            raise OSError("out of luck")
        return replay(self, batch)

    monkeypatch.setattr(RecordedProgram, "replay", broken)
    one, two = (
        searched(tmp_path / str(graph), graph, cosine, wrong=None) for graph in (True, False)
    )
    assert "it fails: OSError: out of luck" in one.log
    assert one.state_hash == two.state_hash is not None


def test_optimizer_hooks_prevent_recording():
    model = made(True)
    model._optimizers[0].register_step_pre_hook(lambda *_: None)
    train(model)
    assert model._recorded[0].refusal == "AdamW has hooks"


def test_a_metric_that_counts_in_python_is_refused():
    calls = []

    def count(output, target):
        calls.append(1)
        return float(len(calls))

    model = made(True, metrics={"n": count})
    train(model, epochs=1)
    assert model._recorded[0].refusal == "it is not the ordinary step: the metric 'n' differs"
    assert len(calls) == BATCHES + 1 + 3  # one batch was trained on twice


def test_the_users_code_runs_twice_for_recorded_batches_alone():
    seen = []

    def look(output, target):
        seen.append(len(target))
        return accuracy(output, target)

    model = made(True, metrics={"accuracy": look})
    for index, batch in enumerate(batches(BEFORE + 3, short=()), 1):
        model.train_batch(batch)
        recorded = min(2, max(0, index - WARM_UP))
        assert len(seen) == min(index, BEFORE) + recorded


@pytest.mark.parametrize("formula", ["step size", "1 - lr * weight_decay", "-lr", "momentum"])
def test_a_number_without_formula_is_refused(formula, monkeypatch):
    """A recorder that bakes the learning rate in."""
    from cerebro.torch import optimizer_numbers

    kind = torch.optim.SGD if formula in ("-lr", "momentum") else torch.optim.AdamW
    full = optimizer_numbers.FORMULAS[kind]

    def less(group, count):
        return {key: value for key, value in full(group, count).items() if key != formula}

    monkeypatch.setitem(optimizer_numbers.FORMULAS, kind, less)
    model = agree(optimizer=adamw if kind is torch.optim.AdamW else sgd_nesterov)
    assert "no formula gives a number of" in model._recorded[0].refusal


def test_a_program_that_computes_something_else_is_given_up(monkeypatch):
    from cerebro.torch.cpu_program import Program

    run = Program.run

    def wrong(self):
        run(self)
        with torch.no_grad():
            if self._blocks:
                weight, _, _ = self._blocks[-1]._memory[-1]
                weight.add_(1e-3)

    monkeypatch.setattr(Program, "run", wrong)
    model = agree()
    assert "it is not the ordinary step" in model._recorded[0].refusal


def test_without_recording_nothing_is_held():
    net = mlp()
    model = cerebro.torch.Model(net, optimizer=adamw(net), loss=nn.CrossEntropyLoss(), graph=False)
    assert model._recorded == () and model.held_bytes == 0
