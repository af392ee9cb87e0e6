"""A model whose proof has read the same as another's uses its program without a recording."""

from __future__ import annotations

from functools import partial

import pytest

torch = pytest.importorskip("torch")
from test_default_recording import BATCHES, made, train  # noqa: E402
from test_kept_programs import CASES, Scaled, narrow, pair, same, wide  # noqa: E402
from torch import nn  # noqa: E402

from cerebro.torch import recorded_step  # noqa: E402
from cerebro.torch.cpu_recorder import Recording  # noqa: E402
from cerebro.torch.proof.facts import Facts  # noqa: E402

LIMIT = 1e6


@pytest.fixture(autouse=True)
def never_timed(monkeypatch):
    for name in ("CHECK_COST", "TAKE_COST", "ADOPT_COST"):
        monkeypatch.setattr(recorded_step, name, float("-inf"))
    monkeypatch.setattr(recorded_step, "LONGEST_STEP", float("inf"))


@pytest.fixture
def recordings(monkeypatch):
    """Collect the recordings of steps."""
    found = []
    make = Recording.__init__

    def count(self, *arguments):
        found.append(self)
        make(self, *arguments)

    monkeypatch.setattr(Recording, "__init__", count)
    return found


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
