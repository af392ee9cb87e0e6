"""A model whose proof has read the same as another's uses its program without a recording."""

from __future__ import annotations

import enum
import gc
import weakref
from functools import partial

import pytest

torch = pytest.importorskip("torch")
from test_default_recording import BATCHES, data, made, train  # noqa: E402
from test_kept_programs import CASES, Scaled, collected, narrow, pair, same, wide  # noqa: E402
from torch import nn  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402

from cerebro.torch import recorded_step  # noqa: E402
from cerebro.torch.cpu_recorder import Recording  # noqa: E402
from cerebro.torch.kept_programs import kept_programs  # noqa: E402
from cerebro.torch.proof.facts import Facts  # noqa: E402
from cerebro.torch.proof.same_program import Proof  # noqa: E402

LIMIT = 1e6


@pytest.fixture(autouse=True)
def never_timed(monkeypatch):
    for name in ("CHECK_COST", "TAKE_COST", "ADOPT_COST"):
        monkeypatch.setattr(recorded_step, name, float("-inf"))
    monkeypatch.setattr(recorded_step, "LONGEST_STEP", float("inf"))


@pytest.fixture
def recordings(monkeypatch):
    """Collect the recordings of steps."""
    return collected(monkeypatch, Recording)


def smoothed_loss(output, target):
    return nn.functional.cross_entropy(output, target, label_smoothing=0.1)


class Tied(nn.Module):
    """Two parts share a weight; the user's code chooses their order by a container's entry."""

    def __init__(self, swaps=True):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.last, self.order = nn.Linear(6, 3), {"swaps": swaps}

    def forward(self, x):
        parts = (self.second, self.first) if self.order["swaps"] else (self.first, self.second)
        for part in parts:
            x = torch.relu(part(x))
        return self.last(x)


def pooled():
    return nn.Sequential(
        *(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.MaxPool1d(2)),
        *(nn.Flatten(), nn.Linear(8, 3)),
    )


class Activated(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.net, self.function = nn.Linear(6, 3), function

    def forward(self, x):
        return self.function(self.net(x))


class Mode(enum.Enum):
    BOUNDED = 1
    FREE = 2


BOUNDED = Mode.BOUNDED


class Moded(nn.Module):
    """It reads a property, calls a static method, and compares a member of an enumeration."""

    def __init__(self, limit=1e6, mode=Mode.BOUNDED):
        super().__init__()
        self.net, self.limits, self.mode = nn.Linear(6, 3), [limit], mode

    @property
    def limit(self):
        return self.limits[0]

    @staticmethod
    def doubled(x):
        return x * 2

    def forward(self, x):
        x = self.doubled(self.net(x))
        if self.mode is BOUNDED:
            x = x.clamp(max=self.limit)
        return x


SAME = {
    **{
        name: lambda options=options: options
        for name, options in CASES.items()
        if name != "foreach"  # makes a constant in each step
    },
    "a function as loss": lambda: {"loss": smoothed_loss},
    "a module as loss": lambda: {"loss": nn.CrossEntropyLoss(label_smoothing=0.2)},
    "a partial as loss": lambda: {
        "loss": partial(nn.functional.cross_entropy, label_smoothing=0.2)
    },
    "tied weights": lambda: {"net": Tied},
    "pooling": lambda: {"net": pooled},
    "a function as attribute": lambda: {"net": lambda: Activated(torch.tanh)},
    "a property": lambda: {"net": Moded},
    "modules by name": lambda: {"net": lambda: Named("ab")},
}


@pytest.mark.parametrize("name", SAME)
def test_the_second_trial_is_not_recorded(name, recordings):
    train(made(None, **SAME[name]()), units=3)
    first = len(recordings)
    assert first
    one, two = pair(**SAME[name]())
    same(one, two, units=3)
    assert len(recordings) == first
    # It replays from its third batch on. Two programs are compared for each unit's shorter last
    # batch, the full batches' once.
    assert one._recorded[0].replays == 3 * BATCHES - 1 - 1 - 3


def limited(limit):
    return lambda output, target: nn.functional.cross_entropy(output.clamp(max=limit), target)


def limited_by_default(limit):
    def loss(output, target, limit=limit):
        return nn.functional.cross_entropy(output.clamp(max=limit), target)

    return loss


class Limited(nn.Module):
    """Its limit has no effect on results. So only what the proof has read tells two of them."""

    def __init__(self, limit):
        super().__init__()
        self.net, self.limit = nn.Linear(6, 3), limit

    def forward(self, x):
        return self.net(x).clamp(max=self.limit)


class Named(nn.Module):
    """Two modules without tensors, of which it uses the one with a name."""

    def __init__(self, names):
        super().__init__()
        self.net, self.chosen = nn.Linear(6, 3), "a"
        limits = zip(names, (1e6, 2e6), strict=True)
        self.parts = nn.ModuleDict({name: nn.Hardtanh(-9, limit) for name, limit in limits})

    def forward(self, x):
        return self.parts[self.chosen](self.net(x))


class NamedInLoop(Named):
    def forward(self, x):
        x = self.net(x)
        for name in self.parts:
            if name == self.chosen:
                x = self.parts[name](x)
        return x


class Repeated(nn.Module):
    """A list that has a module once or twice: all modules and their attributes are the same."""

    def __init__(self, times):
        super().__init__()
        self.net, self.part = nn.Linear(6, 3), nn.Identity()
        self.parts = nn.ModuleList([self.part] * times)

    def forward(self, x):
        return self.net(x).clamp(max=1e6 * len(self.parts))


class OrEmpty(Repeated):
    def forward(self, x):
        x = self.net(x)
        return x.clamp(max=1e6) if self.parts else x


class Inside(nn.Module):
    """Its limit is a number in a container of PyTorch's for parameters."""

    def __init__(self, parts, key):
        super().__init__()
        self.net, self.parts, self.key = nn.Linear(6, 3), parts, key

    def forward(self, x):
        return self.net(x).clamp(max=self.parts[self.key][0])


class InTurn(nn.Module):
    def __init__(self, numbers):
        super().__init__()
        self.net, self.numbers = nn.Linear(6, 3), numbers

    def forward(self, x):
        x = self.net(x)
        for number in self.numbers:
            x = x.clamp(max=1e6 + number)
        return x


def keyword(output, target, limit):
    return nn.functional.cross_entropy(output.clamp(max=limit), target)


def bounded(function):
    return lambda: Activated(function)


def two_groups(first):
    """The first `first` parameters have another rate of decay than the rest."""

    def optimizer(net):
        parameters = list(net.parameters())
        groups = [{"params": parameters[:first]}, {"params": parameters[first:]}]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    return optimizer


def relu_less_than(limit):
    return partial(torch.clamp, max=limit)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"clip_norm": 1e6}, {"clip_norm": 2e6}),
        ({"loss": limited(1e6)}, {"loss": limited(2e6)}),
        ({"loss": limited_by_default(1e6)}, {"loss": limited_by_default(2e6)}),
        ({"loss": partial(keyword, limit=1e6)}, {"loss": partial(keyword, limit=2e6)}),
        ({"net": lambda: Limited(1e6)}, {"net": lambda: Limited(2e6)}),
        ({"net": lambda: Limited(1e6)}, {"net": lambda: Limited(1000000)}),
        ({"net": bounded(relu_less_than(1e6))}, {"net": bounded(relu_less_than(2e6))}),
        ({"net": bounded(torch.tanh)}, {"net": bounded(torch.sin)}),
        ({"net": Tied}, {"net": lambda: Tied(False)}),
        ({"net": lambda: Named("ab")}, {"net": lambda: Named("ba")}),
        ({"net": lambda: NamedInLoop("ab")}, {"net": lambda: NamedInLoop("ba")}),
        ({"net": lambda: Repeated(1)}, {"net": lambda: Repeated(2)}),
        ({"net": lambda: OrEmpty(1)}, {"net": lambda: OrEmpty(0)}),
        (
            {"net": lambda: Inside(nn.ParameterDict({"limit": [1e6]}), "limit")},
            {"net": lambda: Inside(nn.ParameterDict({"limit": [2e6]}), "limit")},
        ),
        (
            {"net": lambda: Inside(nn.ParameterList([[1e6]]), 0)},
            {"net": lambda: Inside(nn.ParameterList([[2e6]]), 0)},
        ),
        ({"net": lambda: InTurn({0, 8})}, {"net": lambda: InTurn({8, 0})}),  # in another order
        ({"net": Moded}, {"net": lambda: Moded(2e6)}),
        ({"net": Moded}, {"net": lambda: Moded(mode=Mode.FREE)}),
        ({"net": lambda: Scaled(1.5)}, {"net": lambda: Scaled(0.5)}),
        ({"net": narrow}, {"net": wide}),
        ({"optimizer": two_groups(1)}, {"optimizer": two_groups(3)}),
        ({"loss": nn.CrossEntropyLoss()}, {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)}),
    ],
)
def test_a_trial_that_reads_something_else_is_recorded(one, two, recordings):
    train(made(None, **one), units=2)
    first = len(recordings)
    same(*pair(**two), units=2)
    assert len(recordings) > first


def globally_limited(output, target):
    return nn.functional.cross_entropy(output.clamp(max=LIMIT), target)


def test_a_global_that_has_changed_between_two_trials(recordings, monkeypatch):
    train(made(None, loss=globally_limited), units=2)
    first = len(recordings)
    monkeypatch.setitem(globals(), "LIMIT", 2e6)
    same(*pair(loss=globally_limited), units=2)
    assert len(recordings) > first


def test_a_step_that_reads_a_tensor_of_its_own_is_recorded(recordings):
    def loss_with(weights):
        return lambda output, target: nn.functional.cross_entropy(output, target, weights)

    for factor in (1.0, 2.0):
        before = len(recordings)
        weights = torch.tensor([1.0, 2.0, 3.0]) * factor
        same(*pair(loss=loss_with(weights)), units=2)
        assert len(recordings) > before


def test_a_trial_that_continues_replays_from_its_second_batch_on(recordings):
    one, two = pair()
    same(one, two, units=2)
    first = len(recordings)
    other = made(None)
    other.load_state_dict(one.state_dict())
    same(other, two, units=1, full=BATCHES - 1)
    assert len(recordings) == first
    # Without the first full batch and the last, which are compared, and the shorter one.
    assert other._recorded[0].replays == BATCHES - 3


def test_an_adopted_program_that_is_wrong_is_replaced_by_a_recorded_one(recordings, monkeypatch):
    train(made(None, net=narrow), units=2)
    first = len(recordings)
    describe = Facts.__init__

    def the_same(self, *arguments):
        describe(self, *arguments)
        self.key = None

    for kept in recorded_step.kept_programs._order.values():
        kept[1].origin.facts.key = None
    monkeypatch.setattr(Facts, "__init__", the_same)
    # Dropout of another probability: the comparison finds that its bits differ.
    same(*pair(net=wide), units=2)
    assert len(recordings) > first


class Columns(dict):
    """A mapping whose entries are not attributes."""


@pytest.mark.parametrize(
    "hidden", [Columns(a="x"), [].append, object(), {object()}, type("Mixed", (str,), {})("x")]
)
def test_what_has_more_than_attributes_is_not_shared(hidden):
    assert not Facts((), hidden, []).are_shareable


def test_bound_methods_are_not_kept_alive():
    tensor = torch.zeros(3)
    facts, reference = Facts((), (tensor.add, "x"), []), weakref.ref(tensor)
    del tensor
    gc.collect()
    assert not facts.are_shareable and reference() is None


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(6),
        torch.zeros(2, 3).t(),
        torch.zeros(2, 3, dtype=torch.int32),
        torch.zeros(2, 3, requires_grad=True),
        torch.zeros(2, 3, dtype=torch.complex64).conj(),
    ],
)
def test_tensors_of_another_form_are_other_facts(other):
    def key(tensor):
        return Facts((), (), [tensor]).key

    plain = torch.zeros(2, 3, dtype=other.dtype) if other.is_complex() else torch.zeros(2, 3)
    assert key(plain) == key(torch.zeros_like(plain)) != key(other)


def test_a_function_of_torch_that_was_replaced_by_another_of_torch(recordings, monkeypatch):
    def net():
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    train(made(None, net=net), units=2)
    first = len(recordings)
    monkeypatch.setattr(nn.functional, "relu", nn.functional.relu6)  # differs from 6 on
    same(*pair(net=net), units=2)
    assert len(recordings) > first


class Gradient(nn.Module):
    """It reads a tensor that nothing lists: the gradient that the user gave to a buffer."""

    def __init__(self, limit):
        super().__init__()
        self.net = nn.Linear(6, 3)
        self.register_buffer("limit", torch.zeros(()))
        self.limit.grad = torch.tensor(limit)

    def forward(self, x):
        return torch.minimum(self.net(x), self.limit.grad)


def test_a_program_with_a_tensor_outside_of_the_state_is_not_shared(recordings):
    train(made(None, net=lambda: Gradient(1e6)), units=2)
    first = len(recordings)
    same(*pair(net=lambda: Gradient(2e6)), units=2)
    assert len(recordings) > first


def uneven(net):
    """One parameter has taken a step more than the others."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    one = next(net.parameters())
    one.grad = torch.ones_like(one)
    optimizer.step()
    one.grad = None
    return optimizer


def late(optimizer):
    """Nothing is learned in the batches in which a program is compared."""
    return lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step < 4 else 1.0)


def test_different_counts_of_steps_do_not_take_a_program_over():
    def adamw(net):
        return torch.optim.AdamW(net.parameters(), lr=0.1)

    train(made(None, optimizer=adamw, schedule=late), units=2)
    first = made(False, optimizer=uneven, schedule=late)
    first.train_batch(data(0)[0])
    one, two = pair(optimizer=adamw, schedule=late)
    one.load_state_dict(first.state_dict())
    two.load_state_dict(first.state_dict())
    assert train(one, units=2) == train(two, units=2)
    assert "numbers of steps" in one._recorded[0].refusal


def origins():
    return [kept.origin is not None for _, kept in kept_programs._order.values()]


def test_a_program_that_became_wrong_is_not_taken_over_unrecorded(recordings, monkeypatch):
    model = made(None)
    train(model, units=2)
    assert origins() == [True, True]
    # What no proof finds: the loss has become another one.
    before, cross_entropy = len(recordings), nn.functional.cross_entropy

    def other(*arguments, **options):
        return cross_entropy(*arguments, **options) * 2

    model.begin_recorded_unit(BATCHES, 1000, training=True)
    for batch in data(2)[:-1]:
        model.train_batch(batch)
    with monkeypatch.context() as changed:
        changed.setattr(nn.functional, "cross_entropy", other)
        changed.setattr(Proof, "holds", lambda self: True)
        assert "not the ordinary step" in model.end_recorded_unit(training=True)
    model.end_unit()
    assert origins() == [False, True]  # that of the evaluation is as it was
    same(*pair(), units=2)
    assert len(recordings) > before
