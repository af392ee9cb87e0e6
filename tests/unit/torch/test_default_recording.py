"""By default a step is recorded only if it is the same program every time; states never differ."""

from __future__ import annotations

import random
import threading
import time
import types

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from captured import counted_comparisons  # noqa: E402
from test_recorded_step import (  # noqa: E402
    Attention,
    Averaged,
    Embedded,
    Recurrent,
    Tied,
    accuracy,
    adam,
    adamw,
    adamw_foreach,
    adamw_fused,
    adamw_groups,
    bits,
    convolutional,
    cosine,
    floats,
    gru,
    label_smoothing,
    lstm,
    mlp,
    sgd,
    sgd_nesterov,
    two_optimizers,
    warm_up,
    with_batch_norm,
    with_dropout,
)  # fmt: skip
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402

import cerebro.torch  # noqa: E402
from cerebro.torch import recorded_step  # noqa: E402
from cerebro.torch.proof.same_program import Proof  # noqa: E402
from cerebro.torch.proof.values import Unproven  # noqa: E402

ROWS, UNITS, BATCHES = 8, 3, 16


@pytest.fixture(autouse=True)
def never_timed(monkeypatch):
    """Whether recording saves time is not what these tests are about."""
    monkeypatch.setattr(recorded_step, "LEAST_UNITS_LEFT", 8)
    monkeypatch.setattr(recorded_step, "LEAST_LEFT", 256)
    monkeypatch.setattr(recorded_step, "CHECK_COST", float("-inf"))
    monkeypatch.setattr(recorded_step, "TAKE_COST", float("-inf"))
    monkeypatch.setattr(recorded_step, "LONGEST_STEP", float("inf"))


# --- more networks ------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.norm = nn.GroupNorm(2, 6)
        self.lin = nn.Linear(6, 6)
        self.shortcut = nn.Linear(6, 6) if wide else None

    def forward(self, x):
        same = x
        if self.shortcut is not None:
            same = self.shortcut(x)
        out = functional.silu(self.lin(self.norm(x)))
        out += same
        return out


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(False), Block(True)])
        self.heads = nn.ModuleDict({"one": nn.Linear(6, 3), "two": nn.Linear(6, 3)})

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = block(x) if number else block(x) * 0.5
        return torch.stack([head(x) for _, head in self.heads.items()]).mean(0)


class SelfAttention(nn.Module):
    def __init__(self, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(6, 18)
        self.out = nn.Linear(6, 3)
        self.drop = 0.1

    def forward(self, x):
        x = x.unsqueeze(1).repeat(1, 4, 1)
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        chance = self.drop if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=chance, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, length, width).mean(1))


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(6, 4), nn.Linear(6, 4)
        self.head = nn.Bilinear(4, 4, 3)

    def forward(self, a, b):
        return self.head(torch.tanh(self.left(a)), torch.sigmoid(self.right(b)))


class Own(nn.Linear):
    """A subclass of a layer of PyTorch's, with a property and a helper."""

    @property
    def factor(self):
        return 0.5 if self.in_features > 2 else 1.0

    def forward(self, x):
        return scaled(super().forward(x), by=self.factor)


def scaled(x, by=2.0):
    return x * by


def own():
    return nn.Sequential(Own(6, 8), nn.Hardswish(), Own(8, 3))


def group_norm():
    return nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 4, 2), nn.GroupNorm(2, 4), nn.Mish(),
        nn.AdaptiveAvgPool1d(2), nn.Flatten(), nn.Linear(8, 3),
    )  # fmt: skip


def encoder():
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
    return nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        nn.Flatten(), nn.Linear(6, 3),
    )  # fmt: skip


def encoder_layer():
    """PyTorch evaluates it below autocast in one call, which fails while it is recorded."""
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
    first = [nn.Unflatten(1, (3, 2)), nn.Linear(2, 6)]
    return nn.Sequential(*first, layer, nn.Flatten(), nn.Linear(18, 3))


def elman():
    return Recurrent(nn.RNN)


def decayed(net, batch):
    """A step with a penalty on all weights."""
    output = net(batch["x"])
    penalty = sum(p.square().sum() for p in net.parameters())
    loss = functional.cross_entropy(output, batch["y"]) + 1e-3 * penalty
    return {"loss": loss, "accuracy": accuracy(output, batch["y"])}


def smoothed(strength):
    def loss(output, target):
        return functional.cross_entropy(output, target, label_smoothing=strength)

    return loss


@torch.no_grad()
def top(output, target):
    return (output.argmax(dim=-1) == target).float().mean()


def one_cycle(optimizer):
    return lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=BATCHES * UNITS + 1)


def sequence(optimizer):
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 9), lr_scheduler.StepLR(optimizer, 5)]
    return lr_scheduler.SequentialLR(optimizer, parts, [9])


def squared(output, target):
    return functional.mse_loss(output.sum(1), target.float())


ORDINARY = {
    "mlp": {},
    "dropout, OneCycle moving beta1": {"net": with_dropout, "schedule": one_cycle},
    "batch norm": {"net": with_batch_norm},
    "convolutions": {"net": convolutional, "optimizer": sgd_nesterov},
    "group norm": {"net": group_norm},
    "GRU, clipped": {"net": gru, "clip_norm": 0.1},
    "LSTM": {"net": lstm, "schedule": cosine},
    "RNN": {"net": elman},
    "transformer layer": {"net": Attention},
    "transformer, bf16": {"net": encoder, "amp": "bf16"},
    "transformer layer, bf16": {"net": encoder_layer, "amp": "bf16"},
    "own attention": {"net": SelfAttention},
    "weight tying, clipped": {"net": Tied, "clip_norm": 0.1},
    "average of weights in the step": {"net": Averaged},
    "embedding": {"net": Embedded, "optimizer": adam},
    "residual blocks": {"net": Residual},
    "own layer": {"net": own},
    "two inputs": {"net": TwoInputs, "inputs": ["x", "x"]},
    "inputs by name": {"net": TwoInputs, "inputs": {"a": "x", "b": "x"}},
    "two optimizers": {"optimizer": two_optimizers},
    "groups": {"optimizer": adamw_groups, "schedule": warm_up},
    "fused": {"optimizer": adamw_fused, "clip_norm": 0.1},
    "foreach": {"optimizer": adamw_foreach},
    "SGD": {"optimizer": sgd, "schedule": sequence},
    "bf16": {"net": with_dropout, "amp": "bf16"},
    "gathered gradients": {"accumulate": 2, "net": Tied},
    "gathered and clipped": {"accumulate": 3, "clip_norm": 0.1},
    "label smoothing": {"loss": label_smoothing},
    "a closure": {"loss": smoothed(0.2)},
    "a lambda": {"loss": lambda output, target: functional.nll_loss(output.log_softmax(1), target)},
    "a regression": {"loss": squared, "metrics": {}},
    "weights of classes": {"loss": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))},
    "a step": {"step": decayed},
    "a metric without gradients": {"metrics": {"top": top}},
}


def adamw_by_name(net):
    return torch.optim.AdamW(net.named_parameters(), lr=1e-2)


def adamw_with_more_entries(net):
    entries = {"layers": ["first", "second"], "mask": np.arange(3)}
    return torch.optim.AdamW([{"params": list(net.parameters()), **entries}], lr=1e-2)


def made(graph, net=mlp, optimizer=adamw, schedule=None, **options):
    torch.manual_seed(1)
    network = net()
    chosen = optimizer(network)
    if schedule is not None:
        options |= {"scheduler": schedule(chosen), "scheduler_step": "batch"}
    if "step" not in options:
        options = {"loss": nn.CrossEntropyLoss(), "metrics": {"accuracy": accuracy}} | options
    return cerebro.torch.Model(network, optimizer=chosen, graph=graph, **options)


def data(seed, count=BATCHES):
    generator = torch.Generator().manual_seed(seed)
    sizes = [ROWS] * (count - 1) + [5]
    return [
        {
            "x": torch.randn(size, 6, generator=generator),
            "y": torch.randint(0, 3, (size,), generator=generator),
        }
        for size in sizes
    ]


def train(model, between=None, units=UNITS, full=None):
    """Train and evaluate as a worker does; return all metrics and states."""
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    found = []
    for unit in range(units):
        model.begin_recorded_unit(BATCHES, 1000, training=True, full=full)
        found += [floats(model.train_batch(batch)) for batch in data(unit)]
        assert model.end_recorded_unit(training=True) is None
        model.end_unit()
        found.append(bits(model))
        model.begin_recorded_unit(BATCHES, 1000, training=False)
        found += [floats(model.eval_batch(batch)) for batch in data(99)]
        assert model.end_recorded_unit(training=False) is None
        model.end_epoch(unit, {"train_loss": 1.0})
        found.append(bits(model))
        if between is not None:
            between(model, unit)
    return found


def agree(before=lambda: None, between=None, full=None, **options):
    """Train with and without recording; return the model that may record."""
    found = []
    for graph in (None, False):
        before()
        model = made(graph, **options)
        found.append((model, train(model, between, full=full)))
    (recorded, one), (_, two) = found
    assert one == two
    return recorded


@pytest.mark.parametrize("full", [None, BATCHES - 1])
@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_steps_are_recorded_with_the_same_states(name, full):
    model = agree(**ORDINARY[name], full=full)
    training, evaluation = model._recorded
    assert training.refusal is None and training.replays
    # PyTorch evaluates these by other operators while they are recorded.
    by_others = ("transformer, bf16", "transformer layer, bf16")
    assert name in by_others or evaluation.replays > BATCHES
    assert model.recording_note() is None


def test_entries_of_parameter_groups_that_the_optimizer_does_not_read():
    by_name = agree(optimizer=adamw_by_name, schedule=cosine)
    assert by_name._recorded[0].replays

    def replace(model, unit):
        model._optimizers[0].param_groups[0]["mask"] = np.arange(3)

    agree(between=replace, optimizer=adamw_with_more_entries)


@pytest.mark.parametrize(
    "loss", ["mse_loss", "smooth_l1_loss", "soft_margin_loss", "binary_cross_entropy"]
)
def test_recording_writes_nothing(loss, capfd):
    function = getattr(functional, loss)

    def of_numbers(output, target):
        return function(output[:, 0].sigmoid(), (target > 0).float())

    assert agree(loss=of_numbers, metrics={})._recorded[0].replays
    assert capfd.readouterr() == ("", "")


# --- what may do something else for another batch ----------------------------------------


class Own2(nn.Module):
    """A network around which the following ones do something special."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
        self.calls = 0

    def forward(self, x):
        return self.net(x)


class Counts(Own2):
    def forward(self, x):
        self.calls += 1
        return self.net(x * 2) if self.calls > 30 else self.net(x)


class Draws(Own2):
    def forward(self, x):
        return self.net(x) if random.random() < 0.97 else self.net(x * 2)


class DrawsOfNumpy(Own2):
    def forward(self, x):
        return self.net(x) if np.random.rand() < 0.97 else self.net(x * 2)


class ReadsClock(Own2):
    def forward(self, x):
        return self.net(x if time.time() > 0 else x * 2)


SEEN: list[int] = []
FACTOR = {"by": 1.0}
SWITCH = 1.0


class Remembers(Own2):
    def forward(self, x):
        SEEN.append(1)
        return self.net(x * 2) if len(SEEN) > 30 else self.net(x)


class ReadsGlobal(Own2):
    def forward(self, x):
        return self.net(x * SWITCH * FACTOR["by"])


class Default(Own2):
    def forward(self, x, seen=[0]):  # noqa: B006
        seen[0] += 1
        return self.net(x) * (1.0 if seen[0] < 30 else 2.0)


class Branches(Own2):
    def forward(self, x):
        return self.net(x * 2) if x.sum() > 9 else self.net(x)


class ReadsNumber(Own2):
    def forward(self, x):
        return self.net(x) * x.abs().max().item()


class ReadsMemory(Own2):
    def forward(self, x):
        return self.net(x) * float(x.numpy().max())


class ChangesInput(Own2):
    def forward(self, x):
        return self.net(x.mul_(0.5))


class NewTensor(Own2):
    def __init__(self):
        super().__init__()
        self.scale = torch.ones(())

    def forward(self, x):
        self.scale = self.scale * 0.9
        return self.net(x * self.scale)


class MakesTensor(Own2):
    def forward(self, x):
        return self.net(x * torch.tensor([0.5]))


class Seeds(Own2):
    def forward(self, x):
        torch.manual_seed(3)
        return self.net(x)


class Changing(Own2):
    @property
    def factor(self):
        return random.choice([1.0, 1.0, 2.0])

    def forward(self, x):
        return self.net(x) * self.factor


class Guesses(Own2):
    def __getattr__(self, name):
        return random.random() if name == "factor" else super().__getattr__(name)

    def forward(self, x):
        return self.net(x) * self.factor


class Sized:
    def __len__(self):
        return random.randrange(2)


class Measures(Own2):
    sized = Sized()

    def forward(self, x):
        return self.net(x) * len(self.sized)


class DrawsBeforeConstant(Own2):
    def forward(self, x):
        return self.net(x * 2) if random.random() < 2 or self.calls == 0 else self.net(x)


class Splits(Own2):
    def forward(self, x):
        return self.net(torch.tensor_split(x, SEEN_AT, dim=1)[0])


class SplitsByMethod(Own2):
    def forward(self, x):
        return self.net(x.tensor_split(SEEN_AT, dim=1)[0])


class Aligned(Own2):
    """Asks for the positions of padding, as `torch.nn.TransformerEncoder` does."""

    def forward(self, x):
        ends = torch._nested_tensor_from_mask_left_aligned(x.unsqueeze(1), x[:, :1] > -9)
        return self.net(x * 2) if ends else self.net(x)


class Inner(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * random.random()


class OwnGradient(Own2):
    def forward(self, x):
        return Inner.apply(self.net(x))


class ReplacesPart(nn.Conv1d):
    def _conv_forward(self, *arguments):
        return super()._conv_forward(*arguments) * random.random()


def replaces_part():
    return nn.Sequential(nn.Unflatten(1, (1, 6)), ReplacesPart(1, 3, 6), nn.Flatten())


def replaced_method():
    net = Own2()
    net.forward = types.MethodType(Draws.forward, net)
    return net


def replaced_activation():
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, activation=noisy)
    first = [nn.Unflatten(1, (3, 2)), nn.Linear(2, 6)]
    return nn.Sequential(*first, layer, nn.Flatten(), nn.Linear(18, 3))


def noisy(x):
    return x * random.random()


def hooked():
    net = Own2()
    net.net[0].register_forward_hook(lambda part, given, output: output * random.random())
    return net


def hooked_gradient():
    net = Own2()
    net.net[0].weight.register_hook(lambda gradient: gradient * random.random())
    return net


def parametrized():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(6, 3)))


def noisy_loss(output, target):
    return functional.cross_entropy(output, target) * random.random()


def noisy_step(net, batch):
    loss = noisy_loss(net(batch["x"]), batch["y"])
    return {"loss": loss}


class CallableLoss:
    def __init__(self):
        self.calls = 0

    def __call__(self, output, target):
        self.calls += 1
        return functional.cross_entropy(output, target) * (1 + self.calls / 100)


class Halved(torch.optim.SGD):
    pass


def halved(net):
    return Halved(net.parameters(), lr=0.1)


def forget():
    SEEN.clear()
    Default.forward.__defaults__[0][0] = 0


SEEN_AT = torch.tensor([6])


class MakesText(Own2):
    def forward(self, x):
        return self.net(x if "nan" in f"{x}" else x * 2)


class MakesTextOfNumbers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({f"layer {i}": nn.Linear(6, 6) for i in range(2)})
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        if len(x.shape) != 2:
            raise ValueError(f"not {x}")
        for number in range(2):
            x = torch.relu(self.layers[f"layer {number}"](x))
        return self.head(x)


def test_text_of_numbers_may_be_made():
    assert agree(net=MakesTextOfNumbers)._recorded[0].replays


ADVERSE = {
    "text": ({"net": MakesText}, "text of a tensor is made in test_default_recording.py:"),
    "a counter": ({"net": Counts}, "the attribute .calls is written in test_default_recording.py:"),
    "random": ({"net": Draws}, "Random.random() is called in"),
    "NumPy": ({"net": DrawsOfNumpy}, "rand() is called in test_default_recording.py:"),
    "a clock": ({"net": ReadsClock}, "time.time() is called in"),
    "a list": ({"net": Remembers}, ".append() of an object that outlives the step is called in"),
    "a default argument": ({"net": Default}, "an object that outlives the step is changed in"),
    "a branch on data": ({"net": Branches}, ".item() in"),
    "a number": ({"net": ReadsNumber}, ".item() in"),
    "indices": ({"net": Splits}, "tensor_split() is called in"),
    "indices of a method": ({"net": SplitsByMethod}, ".tensor_split() in"),
    "a mask": ({"net": Aligned}, "_nested_tensor_from_mask_left_aligned() reads a number back in"),
    "memory": ({"net": ReadsMemory}, ".numpy() in"),
    "an input": ({"net": ChangesInput}, "mul_() changes a tensor that is not part of the state"),
    "a new tensor": ({"net": NewTensor}, "the attribute .scale is written in"),
    "a tensor of each step": ({"net": MakesTensor}, "lift_fresh() has other arguments"),
    "seeds": ({"net": Seeds}, "torch.random.manual_seed() is called in"),
    "a property": ({"net": Changing}, "Random.choice() is called in"),
    "__getattr__": ({"net": Guesses}, "Guesses has a __getattr__()"),
    "a length": ({"net": Measures}, "Sized is used as data in"),
    "a condition": ({"net": DrawsBeforeConstant}, "Random.random() is called in"),
    "own gradient": ({"net": OwnGradient}, "Inner.apply is not known in"),
    "a part of a layer": ({"net": replaces_part}, "ReplacesPart replaces Conv1d._conv_forward"),
    "a method": ({"net": replaced_method}, "Own2.forward was replaced"),
    "an activation": ({"net": replaced_activation}, "Random.random() is called in"),
    "a hook": ({"net": hooked}, "Linear has hooks"),
    "a hook of a gradient": ({"net": hooked_gradient}, "Linear.weight is a tensor of a special"),
    "a parametrization": ({"net": parametrized}, "ParametrizedLinear"),
    "a loss": ({"loss": noisy_loss}, "Random.random() is called in"),
    "a loss that counts": ({"loss": CallableLoss()}, "the attribute .calls is written"),
    "a step": ({"step": noisy_step}, "Random.random() is called in"),
    "a metric": ({"metrics": {"n": lambda o, t: len(SEEN) + id(o)}}, "id() is called in"),
    "an optimizer": ({"optimizer": halved}, "there are no formulas for Halved's numbers"),
}


@pytest.mark.parametrize("name", ADVERSE)
def test_code_that_may_change_is_not_recorded(name, caplog):
    options, reason = ADVERSE[name]
    if isinstance(options.get("loss"), CallableLoss) or name == "a metric":
        model = made(None, **options)
        train(model)
    else:
        model = agree(forget, **options)
    assert model._recorded[0].replays == 0
    note = model.recording_note()
    assert note.startswith("the training step is not recorded: ") and "\n" not in note
    assert reason in note
    assert model.recording_note() is None
    assert not caplog.records


# --- lists that outlive the step ------------------------------------------------------------


class HasLists(nn.Module):
    """Its methods count the steps in a list, under another name; or they only read lists."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 3)
        self.counts, self.both, self.named = [1.0, 2.0], [[1.0], [2.0]], {"one": [1.0]}
        self.padding, self.options = [1, 1], {"pad": [0, 0], "mode": "constant"}
        self.numbers = {"number": 1}


def in_a_dict(self, x):
    found = {"counts": self.counts}
    found["counts"][0] += 1
    return self.net(x) * self.counts[0]


def in_a_copied_dict(self, x):
    found = {**self.named, "two": 1}
    found["one"][0] += 1
    return self.net(x) * self.named["one"][0]


def in_a_new_dict(self, x):
    dict(self.named, counts=self.counts)["counts"].append(1.0)
    return self.net(x) * len(self.counts)


def in_a_dict_of_each(self, x):
    found = {number: self.both[number] for number in range(1)}
    found[0].append(1.0)
    return self.net(x) * len(self.both[0])


def assigned_to_a_dict(self, x):
    found = {}
    found["counts"] = self.counts
    found["counts"].append(1.0)
    return self.net(x) * len(self.counts)


def put_into_a_list(self, x):
    found = []
    found.append(self.counts)
    found[0].append(1.0)
    return self.net(x) * len(self.counts)


def added_to_a_list(self, x):
    found = [x]
    found += self.both
    found[1].append(1.0)
    return self.net(x) * len(self.both[0])


def in_a_sum(self, x):
    found = self.both * 2
    found[2].append(1.0)
    return self.net(x) * len(self.both[0])


def in_a_starred_list(self, x):
    found = [x, *self.both]
    found[1].append(1.0)
    return self.net(x) * len(self.both[0])


def the_larger_one(self, x):
    max(self.counts, [0.0]).append(1.0)
    return self.net(x) * len(self.counts)


def in_a_default(self, x):
    {}.get("counts", self.counts).append(1.0)
    return self.net(x) * len(self.counts)


def counted(counts):
    counts.append(1.0)
    return len(counts)


def counted_by_name(**named):
    return counted(named["counts"])


def passed_by_name(self, x):
    return self.net(x) * counted_by_name(counts=self.counts)


def passed_with_a_star(self, x):
    return self.net(x) * counted(*self.both[:1])


def passed_with_two_stars(self, x):
    return self.net(x) * counted(**{"counts": 0, **self.named})


def read_lists(self, x):
    sizes = [*self.padding, 2] + self.padding * 2
    found = {"sizes": sizes, "first": self.both[0][0], **self.numbers}
    found["sizes"][0] = found["first"]
    sizes.append(max(self.counts) + sum(self.counts, 0.0))
    options = dict(self.numbers, mode=self.options["mode"])
    options.pop("number")
    x = functional.pad(x, **self.options) + functional.pad(x, self.padding)[:, 1:-1]
    x = functional.pad(x, pad=self.padding, **options)[:, 1:-1]
    return self.net(x) * sum(sizes) * scaled(*self.counts)


@pytest.mark.parametrize(
    "forward",
    [
        in_a_dict, in_a_copied_dict, in_a_new_dict, in_a_dict_of_each, assigned_to_a_dict,
        put_into_a_list, added_to_a_list, in_a_sum, in_a_starred_list, the_larger_one,
        in_a_default, passed_by_name, passed_with_a_star, passed_with_two_stars,
    ],
)  # fmt: skip
def test_a_list_that_outlives_the_step_is_found_under_another_name(forward):
    net = type("Net", (HasLists,), {"forward": forward})
    with pytest.raises(Unproven, match="that outlives the step"):
        made(None, net=net)._prove()


def test_a_list_in_a_dict_that_counts_steps():
    model = agree(net=type("Net", (HasLists,), {"forward": in_a_dict}))
    assert model._recorded[0].replays == 0


def test_lists_may_be_read():
    model = agree(net=type("Net", (HasLists,), {"forward": read_lists}))
    assert model._recorded[0].replays


# --- what changes between steps and units ---------------------------------------------------


def lowered(model, unit):
    model.net.net[2].p = 0.2 + unit / 10


def switched(model, unit):
    global SWITCH
    SWITCH = 1.0 + unit


def refilled(model, unit):
    FACTOR["by"] = 1.0 - unit / 10


def back():
    global SWITCH
    SWITCH, FACTOR["by"] = 1.0, 1.0


def late_hook(model, unit):
    if unit == 0:
        model.net.net[0].register_forward_hook(lambda part, given, output: output * 2)


def late_method(model, unit):
    if unit == 0:
        model.net.forward = types.MethodType(ReadsClock.forward, model.net)


@pytest.mark.parametrize("between", [lowered, switched, refilled])
def test_what_changes_between_units_is_recorded_again(between):
    model = agree(back, between, net=ReadsGlobal)
    assert model._recorded[0].refusal is None and model._recorded[0].replays


class InContainers(nn.Module):
    """It reads numbers in PyTorch's containers, and how many members one of them has."""

    def __init__(self):
        super().__init__()
        self.net, self.limits = nn.Linear(6, 3), nn.ParameterDict({"above": [9.0]})
        self.again, self.part = nn.ModuleList(), nn.Identity()

    def forward(self, x):
        x = self.net(x).clamp(max=self.limits["above"][0])
        x = x * 2 if self.again else x
        return x * (1 + len(self.again))


def tightened(model, unit):
    model.net.limits["above"][0] = 0.1 / (1 + unit)


def extended(model, unit):
    model.net.again.append(model.net.part)


@pytest.mark.parametrize("between", [tightened, extended])
def test_containers_of_torch_that_change_are_noticed(between):
    model = agree(between=between, net=InContainers)
    assert model._recorded[0].refusal is None and model._recorded[0].replays


@pytest.mark.parametrize("between", [late_hook, late_method])
def test_hooks_and_methods_that_come_later_end_recording(between):
    model = agree(back, between, net=ReadsGlobal)
    assert "it may do something else" in model._recorded[0].refusal
    assert model._recorded[0].replays


def test_a_function_of_torch_that_is_replaced_ends_recording(monkeypatch):
    relu = functional.relu
    monkeypatch.setattr(functional, "relu", relu)

    def restore():
        functional.relu = relu

    def replace(model, unit):
        if unit == 0:
            functional.relu = lambda x, inplace=False: relu(x) * 2

    model = agree(restore, replace)
    assert model._recorded[0].replays
    assert "torch.nn.functional.relu was replaced" in model._recorded[0].refusal


class LowersDropout:
    """A scheduler of the user's own that touches the network."""

    def __init__(self, net):
        self.net, self.steps = net, 0

    def step(self):
        self.steps += 1
        if self.steps % 20 == 0:
            self.net.net[2].p += 0.1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def test_a_scheduler_that_touches_dropout():
    nets = []

    def net():
        nets.append(Own2())
        return nets[-1]

    model = agree(net=net, schedule=lambda optimizer: LowersDropout(nets[-1]))
    assert model._recorded[0]._looks_always


def test_a_schedule_whose_function_touches_dropout():
    nets = []

    def net():
        nets.append(Own2())
        return nets[-1]

    def schedule(optimizer):
        dropout = nets[-1].net[2]

        def factor(step):
            dropout.p = 0.2 if step < 21 else 0.5
            return 1.0

        return lr_scheduler.LambdaLR(optimizer, factor)

    model = agree(net=net, schedule=schedule)
    assert model._recorded[0]._looks_always and model._recorded[0].replays


def test_augmentation_that_touches_the_network():
    nets = []

    def net():
        nets.append(Own2())
        return nets[-1]

    def augment(batch):
        nets[-1].calls += 1
        if nets[-1].calls % 20 == 0:
            nets[-1].net[2].p = 0.5 - nets[-1].net[2].p / 2
        return {**batch, "x": batch["x"] + torch.randn_like(batch["x"]) * random.random()}

    agree(net=net, augment=augment)


class Own3(cerebro.torch.Model):
    steps = 0

    def train_batch(self, batch):
        self.steps += 1
        if self.steps == 25:
            self.net[0].weight.data = self.net[0].weight.data * 0.5  # in other memory
        return super().train_batch(batch)


def test_a_model_whose_train_batch_touches_the_network(monkeypatch):
    monkeypatch.setattr(cerebro.torch, "Model", Own3)
    assert agree()._recorded[0].replays


class Own4(cerebro.torch.Model):
    def _update(self):
        super()._update()


def test_a_model_that_replaces_parts_of_the_step(monkeypatch):
    monkeypatch.setattr(cerebro.torch, "Model", Own4)
    assert "Own4 replaces cerebro.torch.Model._update" in agree()._recorded[0].refusal


def test_outside_of_units_nothing_is_recorded_by_default():
    """Nothing says what runs between two steps there."""
    model, other = made(None, net=Own2), made(False, net=Own2)
    for number, batch in enumerate(data(1) * 3):
        for each in (model, other):
            torch.manual_seed(number)
            each.net.net[2].p = number / 100
            each.train_batch(batch)
    assert bits(model) == bits(other)
    assert model._recorded[0].replays == 0 and not model._recorded[0]._seen


def test_short_units_are_not_recorded():
    model = made(None)
    for _ in range(20):
        model.begin_recorded_unit(5, 1000, training=True)
        for batch in data(1, 5):
            model.train_batch(batch)
        assert model.end_recorded_unit(training=True) is None
    assert not model._recorded[0]._seen and model.recording_note() is None


@pytest.mark.parametrize("left", [BATCHES * 15, BATCHES * 16])
def test_a_step_is_recorded_at_once_if_the_trial_has_enough_batches_left(left, monkeypatch):
    """But not the shorter last batch of a unit: the trial has only as many as units."""
    monkeypatch.setattr(recorded_step, "LEAST_UNITS_LEFT", 64)
    model = made(None)
    model.begin_recorded_unit(BATCHES, left, training=True)
    for batch in data(0)[: recorded_step.WARM_UP + 1]:
        model.train_batch(batch)
    programs = model._recorded[0]._programs
    assert len(programs) == (left >= recorded_step.LEAST_LEFT)
    for batch in data(0)[recorded_step.WARM_UP + 1 :]:
        model.train_batch(batch)
    assert model.end_recorded_unit(training=True) is None
    for unit in range(1, 4):
        model.begin_recorded_unit(BATCHES, left, training=True)
        for batch in data(unit)[-1:]:
            model.train_batch(batch)
        assert model.end_recorded_unit(training=True) is None
    assert len(programs) == (left >= recorded_step.LEAST_LEFT)


def test_short_trials_are_not_recorded():
    model = made(None)
    for unit in range(4):
        model.begin_recorded_unit(BATCHES, BATCHES * (4 - unit), training=True)
        for batch in data(unit):
            model.train_batch(batch)
        assert model.end_recorded_unit(training=True) is None
    assert not model._recorded[0]._programs and model.recording_note() is None


def test_a_step_that_is_not_faster_is_not_replayed(monkeypatch):
    monkeypatch.setattr(recorded_step, "CHECK_COST", float("inf"))
    model = agree()
    assert model._recorded[0].replays == 0 and model.held_bytes == 0
    note = "the training step is not recorded: that would not save time"
    assert model.recording_note() == note
    recorded = made(None)  # a model like it knows that, and is not even proven
    train(recorded, None)
    assert recorded.recording_note() == note
    assert recorded._recorded[0]._proof is None


def test_a_long_step_is_not_recorded(monkeypatch):
    monkeypatch.setattr(recorded_step, "LONGEST_STEP", 0.0)
    model = agree()
    assert "almost all of its time is spent in operators" in model.recording_note()


# --- the comparison at a unit's end -----------------------------------------------------------


class Later(Own2):
    """Takes another way from step 20 on; what it reads is part of the state."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.steps.add_(1)
        return self.net(x * 2) if self.steps.numpy() > 20 else self.net(x)


@pytest.mark.parametrize("accumulate", [1, 2, 3])
def test_a_program_that_becomes_wrong_is_found_at_the_end_of_the_unit(accumulate, monkeypatch):
    model = made(None, net=Later, accumulate=accumulate)
    for step in model._recorded:
        step._prove = Proof  # one that accepts everything
    torch.manual_seed(3)
    model.begin_recorded_unit(BATCHES, 1000, training=True)
    for batch in data(0):
        model.train_batch(batch)
    pending, gradients = model._pending, [p.grad is None for p in model._parameters]
    assert model.end_recorded_unit(training=True) is None
    assert model._pending == pending
    assert gradients == [p.grad is None for p in model._parameters]
    model.end_unit()
    model.begin_recorded_unit(BATCHES, 1000, training=True)
    for batch in data(1):
        model.train_batch(batch)
    assert model._recorded[0].replays
    assert "it is not the ordinary step any more" in model.end_recorded_unit(training=True)
    assert model._recorded[0].refusal is not None and not model._recorded[0]._programs


# --- the comparison on a unit's last full batch --------------------------------------------------


class LaterThan(Later):
    """Takes another way from a step on that is given later."""

    last = 10**9

    def forward(self, x):
        self.steps.add_(1)
        return self.net(x * 2) if self.steps.numpy() > self.last else self.net(x)


@pytest.fixture
def checks(monkeypatch):
    return counted_comparisons(monkeypatch)


def in_units(model, units, full, *, short=True):
    """Train in units; return what the last one's end says, and the metrics."""
    how, found = None, []
    for unit in range(units):
        assert how is None
        batches = data(unit)[: BATCHES - (not short)]
        model.begin_recorded_unit(len(batches), 1000, training=True, full=full)
        found += [model.train_batch(batch) for batch in batches]
        how = model.end_recorded_unit(training=True)
        model.end_unit()
    return how, found


def promised(**options):
    """Return a model with a proof that accepts everything."""
    model = made(None, **options)
    for step in model._recorded:
        step._prove = Proof
    return model


FULL = BATCHES - 1


@pytest.mark.parametrize("short", [True, False])
def test_the_last_full_batch_is_trained_once(short, checks):
    found = []
    for graph in (None, False):
        model = made(graph, net=with_dropout)
        torch.manual_seed(3)
        how, values = in_units(model, 4, FULL, short=short)
        assert how is None
        found.append(
            (bits(model), [floats(each) for each in values], torch.get_rng_state().tolist())
        )
        steps = {int(entry["step"]) for entry in model._optimizers[0].state.values()}
        assert steps == {4 * (FULL + short)}
    assert found[0] == found[1]
    # The short batch is replayed in no unit so far.
    assert checks == {"_checked": 4, "_compared_once_more": 0}


@pytest.mark.parametrize("short", [True, False])
def test_another_way_at_the_last_full_batch_is_found(short, checks):
    model = promised(net=LaterThan)
    assert in_units(model, 1, FULL, short=short)[0] is None
    model.net.last = int(model.net.steps) + FULL - 1
    model.begin_recorded_unit(FULL + short, 1000, training=True, full=FULL)
    values = [model.train_batch(batch) for batch in data(7)[: FULL + short]]
    assert model._recorded[0].replays and all(values[: FULL - 1])
    assert not any(values[FULL - 1 :])  # nothing is computed until the unit runs again
    assert "it is not the ordinary step any more" in model.end_recorded_unit(training=True)
    assert model._recorded[0].refusal is not None and not model._recorded[0]._programs
    assert model.train_batch(data(8)[0])
    assert checks["_compared_once_more"] == 0


def test_another_way_at_a_replayed_short_batch_is_found(checks):
    model = promised(net=LaterThan)
    in_units(model, 10, FULL)
    shapes = {key[0] for key in model._recorded[0]._programs}
    assert len(shapes) == 2  # the short batch is replayed, too
    before = dict(checks)
    model.net.last = int(model.net.steps) + FULL
    assert "it is not the ordinary step any more" in in_units(model, 1, FULL)[0]
    assert checks["_checked"] == before["_checked"]
    assert checks["_compared_once_more"] == before["_compared_once_more"] + 1


def test_another_way_at_an_ordinary_short_batch_is_taken():
    found = []
    for kind in (promised, lambda **options: made(False, **options)):
        model = kind(net=LaterThan)
        in_units(model, 2, FULL)
        model.net.last = int(model.net.steps) + FULL
        assert in_units(model, 1, FULL)[0] is None
        found.append(bits(model))
    assert found[0] == found[1]


class Fails(LaterThan):
    def forward(self, x):
        if self.steps.numpy() >= self.last:
            raise OSError("too late")
        return super().forward(x)


def test_a_step_that_fails_in_the_comparison(checks):
    model = promised(net=Fails)
    in_units(model, 1, FULL)
    model.net.last = int(model.net.steps) + FULL - 1
    how, values = in_units(model, 1, FULL)
    assert how == "the ordinary step fails: OSError: too late" and values[-2:] == [{}, {}]
    assert checks == {"_checked": 2, "_compared_once_more": 0}


def test_a_unit_that_is_not_ended_after_the_comparison_failed():
    model = promised(net=LaterThan)
    in_units(model, 1, FULL)
    model.net.last = int(model.net.steps) + FULL - 1
    model.begin_recorded_unit(BATCHES, 1000, training=True, full=FULL)
    assert [model.train_batch(batch) for batch in data(1)][FULL - 1 :] == [{}, {}]
    model.begin_recorded_unit(BATCHES, 1000, training=True, full=FULL)
    assert all(model.train_batch(batch) for batch in data(2))
    assert model._recorded[0].refusal is not None and not model._recorded[0]._programs
    assert model.end_recorded_unit(training=True) is None


class Replaces(LaterThan):
    def forward(self, x):
        if self.steps.numpy() >= self.last:
            self.net[0].weight.data = self.net[0].weight.data.clone()
        return super().forward(x)


class ChangesBatch(LaterThan):
    def forward(self, x):
        if self.steps.numpy() >= self.last:
            x.mul_(0.25)
        return super().forward(x)


@pytest.mark.parametrize(
    ("net", "found"),
    [
        (Replaces, "the step replaces its tensors"),
        (ChangesBatch, "it is not the ordinary step any more"),
    ],
)
def test_a_step_that_does_something_else_in_the_comparison(net, found):
    model = promised(net=net)
    in_units(model, 1, FULL)
    model.net.last = int(model.net.steps) + FULL - 1
    assert found in in_units(model, 1, FULL)[0]


@pytest.mark.parametrize(
    ("full", "expected"),
    [
        (None, {"_checked": 0, "_compared_once_more": 3}),
        (0, {"_checked": 0, "_compared_once_more": 3}),
        (3, {"_checked": 2, "_compared_once_more": 3}),  # others are replayed after it
        (FULL + 1, {"_checked": 0, "_compared_once_more": 3}),
    ],
)
def test_a_wrong_number_of_full_batches_does_no_harm(full, expected, checks):
    found = []
    for graph in (None, False):
        model = made(graph, net=with_dropout)
        torch.manual_seed(3)
        in_units(model, 3, full)
        found.append(bits(model))
    assert found[0] == found[1]
    assert checks == expected


def test_gathered_gradients_are_compared_after_the_unit(checks):
    model = made(None, accumulate=3)
    in_units(model, 3, FULL, short=False)
    assert checks["_checked"] == 0 and checks["_compared_once_more"]


@pytest.mark.parametrize(("rows", "full"), [(ROWS, 1), (5, 0)])
def test_a_unit_with_one_batch(rows, full, checks):
    found = []
    for graph in (True, False):
        model = made(graph, net=with_dropout)
        torch.manual_seed(3)
        for unit in range(9):
            (batch,) = ({name: value[:rows] for name, value in b.items()} for b in data(unit)[:1])
            model.begin_recorded_unit(1, 1000, training=True, full=full)
            model.train_batch(batch)
            assert model.end_recorded_unit(training=True) is None
            model.end_unit()
        found.append((bits(model), torch.get_rng_state().tolist()))
        assert {int(e["step"]) for e in model._optimizers[0].state.values()} == {9}
    assert found[0] == found[1]
    assert checks == {"_checked": 4 if full else 0, "_compared_once_more": 0 if full else 4}


def test_what_another_thread_changes_after_the_comparison_is_found():
    model = made(None, net=Own2)
    in_units(model, 1, FULL, short=False)
    model.begin_recorded_unit(FULL, 1000, training=True, full=FULL)
    for batch in data(1)[:FULL]:
        model.train_batch(batch)
    model.net.net[2].p = 0.4
    how = model.end_recorded_unit(training=True)
    assert how == "something that the step reads was changed within a unit"


# --- changes from elsewhere ----------------------------------------------------------------------


def test_what_another_thread_changes_within_a_unit_is_found():
    model = made(None, net=Own2)
    for unit in range(2):
        model.begin_recorded_unit(BATCHES, 1000, training=True)
        for number, batch in enumerate(data(unit)):
            if unit == 1 and number == 9:
                thread = threading.Thread(target=setattr, args=(model.net.net[2], "p", 0.4))
                thread.start()
                thread.join()
            model.train_batch(batch)
        how = model.end_recorded_unit(training=True)
    assert how == "something that the step reads was changed within a unit"


def test_a_method_that_another_library_adds_does_not_matter(monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "smart_apply", lambda self: self, raising=False)
    assert agree(net=Own2)._recorded[0].replays
