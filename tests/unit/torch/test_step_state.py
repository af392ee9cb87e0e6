"""What a step may change is copied, restored and compared bit for bit."""

from __future__ import annotations

import random
from operator import is_

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from cerebro.machine import generators  # noqa: E402
from cerebro.torch.step_state import Different, Gradients, StepState  # noqa: E402


class Many(nn.Module):
    """Tensors of many types and layouts."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.halves = nn.Parameter(torch.randn(5).bfloat16())
        self.turned = nn.Parameter(torch.randn(4, 6).t())
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("spread", torch.randn(12)[::3])
        self.register_buffer("complex", torch.randn(3, dtype=torch.complex64))
        self.register_buffer("nan", torch.full((2,), torch.nan))

    def forward(self, x):
        return (
            self.norm(self.linear(x)) + self.halves.sum() + self.turned.sum() + self.conv.bias[:3]
        )


def stepped(net):
    optimizer = torch.optim.Adam([p for p in net.parameters() if p is not net.conv.weight])
    net(torch.randn(4, 3)).square().sum().backward()
    optimizer.step()
    return optimizer


@pytest.fixture
def net():
    torch.manual_seed(1)
    return Many()


@pytest.fixture
def state(net):
    return StepState([net], [stepped(net)], Gradients([]))


def words(tensor):
    """Return a tensor's bytes as a copy."""
    flat = tensor.detach().contiguous().flatten()
    return flat.view(torch.uint8).clone() if flat.numel() else flat


def flip(tensor):
    """Change the last bit of a tensor."""
    with torch.no_grad():
        changed = words(tensor)
        changed[-1] ^= 1
        tensor.copy_(changed.view(tensor.dtype).view(tensor.shape))


def test_every_bit_of_every_tensor_is_compared_and_restored(state):
    with state.list_once():
        before = state.copy_values()
        named = state._tensors()
        expected = [words(tensor) for _, tensor in named]
        state.require(before)
        assert all(t is u for (_, t), u in zip(named, state._tensors_without_names(), strict=True))
        others = {named[index][0] for index in state._listing._others}
        assert {"turned", "spread"} <= others and not {"conv.weight", "nothing"} & others
        for name, tensor in named:
            if not tensor.numel():
                continue
            flip(tensor)
            with pytest.raises(Different) as raised:
                state.require(before)
            assert str(raised.value) == f"{name} of the graph differs"
            after = state.copy_values()
            with pytest.raises(Different) as raised:
                state.require_equal(before, after)
            assert str(raised.value) == f"{name} of the graph differs"
            state.restore(before)
            state.require(before)
            state.restore(after)
            state.require(after)
            state.restore(before)
        assert all(
            torch.equal(words(t), bits) for (_, t), bits in zip(named, expected, strict=True)
        )


def test_gathered_gradients_are_part_of_the_state():
    net = nn.Linear(2, 1)
    gradients = Gradients(list(net.parameters()))
    gradients.prepare()
    state = StepState([net], [], gradients)
    with state.list_once():
        before = state.copy_values()
        gradients.tensors()[1][1].fill_(1)
        with pytest.raises(Different, match="the gradient of parameter 1 of the graph differs"):
            state.require(before)


def test_step_counts_in_host_memory_are_compared_and_restored(net):
    optimizer = stepped(net)
    for number, entries in enumerate(optimizer.state.values()):
        entries["step"] = number
    state = StepState([net], [optimizer], Gradients([]))
    with state.list_once():
        before = state.copy_values()
        first = next(iter(optimizer.state.values()))
        first["step"] = 7
        with pytest.raises(Different, match="counts its steps in host memory"):
            state.require(before)
        assert state.is_as_listed()
        state.restore(before)
        assert first["step"] == 0
        first["more"] = 1
        assert not state.is_as_listed()


class Overrides(nn.Linear):
    def named_parameters(self, *arguments, **options):
        return [("weight", self.weight)]


class Hides(nn.Sequential):
    """A module whose `named_modules` leaves out all children but the first."""

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        yield from self[0].named_modules(memo, prefix, remove_duplicate)


def hiding():
    return nn.Sequential(nn.Linear(1, 2), Hides(nn.Linear(2, 2), nn.Linear(2, 1)))


def tied():
    one, two = nn.Linear(2, 2), nn.Linear(2, 2, bias=False)
    two.weight = one.weight
    return nn.Sequential(one, nn.ModuleList([one, two]), nn.BatchNorm1d(2, affine=False))


@pytest.mark.parametrize(
    "make", [tied, Many, hiding, lambda: Overrides(2, 2), lambda: nn.LSTM(2, 3)]
)
def test_named_and_unnamed_listings_hold_the_same_tensors(make):
    net, second = make(), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = StepState([net, second], [optimizer], Gradients([]))
    named, unnamed = state._tensors(), state._tensors_without_names()
    assert all(one is two for (_, one), two in zip(named, unnamed, strict=True))
    assert state.places() == [tensor.data_ptr() for tensor in unnamed]


def replace_parameter(net):
    net.halves = nn.Parameter(net.halves.detach().clone())


def replace_data(net):
    net.halves.data = net.halves.data.clone()


def turn_in_place(net):
    net.linear.weight.t_()


def reinterpret(net):
    net.halves.data = net.halves.data.view(torch.float16)


def add_buffer(net):
    net.register_buffer("more", torch.zeros(1))


@pytest.mark.parametrize(
    "change", [replace_parameter, replace_data, turn_in_place, reinterpret, add_buffer]
)
def test_replaced_tensors_are_detected(change, net, state):
    with state.list_once():
        assert state.is_as_listed()
        with torch.no_grad():
            change(net)
        assert not state.is_as_listed()
    with state.list_once():
        assert state.is_as_listed()


@pytest.mark.parametrize(
    "change", [replace_parameter, replace_data, turn_in_place, reinterpret, add_buffer]
)
def test_the_last_list_is_used_again_only_for_the_same_tensors(change, net, state):
    def listing():
        with state.list_once():
            return state._listing

    first = listing()
    assert listing() is first
    with torch.no_grad():
        change(net)
    second = listing()
    assert second is not first and listing() is second
    assert all(map(is_, second.tensors, state._tensors_without_names()))


def test_memory_that_a_tensor_has_left_is_not_touched(net, state):
    with state.list_once():
        before, expected = state.copy_values(), words(net.halves)
        left = net.halves.data
        net.halves.data = torch.zeros(5).bfloat16()
        left.fill_(3)
        for wrong in (state.copy_values, lambda: state.require(before)):
            with pytest.raises(Different, match="the step replaces its tensors"):
                wrong()
        flip(net.conv.weight)
        state.restore(before)
        assert torch.equal(words(net.halves), expected) and bool((left == 3).all())
    with state.list_once():
        assert state._listing.find_difference(before.tensors) is None


DRAWS = {
    "python": random.random,
    "python_gauss": lambda: random.gauss(0, 1),
    "numpy": np.random.standard_normal,
    "torch": lambda: torch.rand(1).item(),
}


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("name", DRAWS)
def test_generators_are_compared_and_restored(name, in_memory, state, monkeypatch):
    if not in_memory:
        monkeypatch.setattr(generators, "find_memory", lambda: None)
    draw = DRAWS[name]
    with state.list_once():
        before = state.copy_values()
        expected = draw()
        after = state.copy_values()
        with pytest.raises(Different, match=r"draws from a random generator of the host \("):
            state.require(before)
        state.require(after)
        for drawn in (after, None):
            state.restore(before, drawn)
            state.require(before)
            assert draw() == expected


def test_generators_that_have_not_drawn_are_left_alone(state, monkeypatch):
    with state.list_once():
        before = state.copy_values()
        monkeypatch.setattr(generators, "restore", lambda state: pytest.fail("nothing was drawn"))
        state.restore(before, state.copy_values())


def test_a_cached_normal_number_set_between_comparisons_is_restored(state):
    np.random.seed(1)
    with state.list_once():
        state.copy_values()
    words = np.random.get_state(legacy=False)
    np.random.set_state({**words, "has_gauss": 1, "gauss": 0.25})
    with state.list_once():
        before = state.copy_values()
        assert np.random.standard_normal() == 0.25
        state.restore(before, state.copy_values())
        assert np.random.standard_normal() == 0.25


def test_a_cached_normal_number_is_compared_and_restored(state):
    """Drawing it moves nothing but itself."""
    np.random.seed(1)
    np.random.standard_normal()
    with state.list_once():
        before = state.copy_values()
        expected = np.random.standard_normal()
        after = state.copy_values()
        with pytest.raises(Different, match="a random generator of the host \\(numpy_gauss"):
            state.require(before)
        state.require(after)
        state.restore(before, after)
        with pytest.raises(Different, match="a random generator of the host \\(numpy_gauss"):
            state.require(after)
        state.require(before)
        assert np.random.standard_normal() == expected
