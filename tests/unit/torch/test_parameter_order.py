"""Parameters and groups in another order than in the state: each gets what has its name."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest

import cerebro
import cerebro._core as _core
from cerebro.errors import StateError
from cerebro.worker.models import LiveModel, load_tree, pack_tree

torch = pytest.importorskip("torch")
F = torch.nn.functional
schedulers = torch.optim.lr_scheduler

NAMES = ("a", "b", "c", "d")


class Net(torch.nn.Module):
    """Equal layers in any order; what it computes does not depend on the order."""

    def __init__(self, order):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            made = {name: torch.nn.Linear(4, 4) for name in NAMES}
        self.parts = torch.nn.ModuleDict({name: made[name] for name in order})

    def forward(self, x):
        for name in NAMES:
            x = torch.tanh(self.parts[name](x))
        return x


def shuffled(items, seed):
    items = list(items)
    if seed:
        random.Random(seed).shuffle(items)
    return items


def groups_of(net, seed):
    """Return three groups with settings of their own, and their parameters, in any order."""
    named = dict(net.named_parameters())
    kinds = {
        "bias": [n for n in named if n.endswith("bias")],
        "first": [n for n in named if n.endswith("weight") and "parts.a" in n],
        "rest": [n for n in named if n.endswith("weight") and "parts.a" not in n],
    }
    rates = {"bias": 0.05, "first": 0.02, "rest": 0.01}
    return [
        {"params": [named[n] for n in shuffled(sorted(kinds[kind]), seed)], "lr": rates[kind]}
        for kind in shuffled(sorted(kinds), seed)
    ]


def rates_of(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


def lambdas(optimizer):
    """Return a decay for each group, found by its learning rate."""
    return [lambda epoch, by=rate: (1 - by) ** epoch for rate in rates_of(optimizer)]


SCHEDULERS = {
    "none": lambda o: None,
    "exponential": lambda o: schedulers.ExponentialLR(o, 0.9),
    "lambdas": lambda o: schedulers.LambdaLR(o, lambdas(o)),
    "cyclic": lambda o: schedulers.CyclicLR(
        o, [rate / 2 for rate in rates_of(o)], [2 * rate for rate in rates_of(o)],
        step_size_up=3, cycle_momentum=False,
    ),
    "one cycle": lambda o: schedulers.OneCycleLR(o, [3 * r for r in rates_of(o)], total_steps=99),
    "sequence": lambda o: schedulers.SequentialLR(
        o,
        [schedulers.ConstantLR(o, 0.5, 2), schedulers.LambdaLR(o, lambdas(o))],
        milestones=[3],
    ),
}  # fmt: skip

OPTIMIZERS = {
    "adamw": lambda groups: torch.optim.AdamW(groups),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "adagrad": lambda groups: torch.optim.Adagrad(groups),
    "named": lambda groups: torch.optim.Adam(
        [{**g, "params": [(f"p{i}", p) for i, p in enumerate(g["params"])]} for g in groups]
    ),
}


def build(seed=0, optimizer="adamw", scheduler="none", **options):
    net = Net(shuffled(NAMES, seed))
    made = OPTIMIZERS[optimizer](groups_of(net, seed))
    return cerebro.torch.Model(
        net,
        optimizer=made,
        loss=F.mse_loss,
        scheduler=SCHEDULERS[scheduler](made),
        scheduler_step="batch",
        **options,
    )


def batch(number):
    g = torch.Generator().manual_seed(number)
    return {"x": torch.randn(8, 4, generator=g), "y": torch.randn(8, 4, generator=g)}


def train(model, numbers):
    for number in numbers:
        model.train_batch(batch(number))
    model.end_unit()


def packed(model):
    return bytes(_core.pack_state(pack_tree(LiveModel(model, True))))


def hopped(model, into):
    load_tree(LiveModel(into, True), packed(model))
    return into


def weights(model):
    return {name: value.detach() for name, value in sorted(model.net.named_parameters())}


def assert_equal(left, right):
    left, right = weights(left), weights(right)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("seed", [1, 2, 5])
def test_a_trial_resumes_with_another_parameter_order(scheduler, seed):
    straight, first = build(scheduler=scheduler), build(scheduler=scheduler)
    train(straight, range(8))
    train(first, range(4))
    second = hopped(first, build(seed, scheduler=scheduler))
    assert packed(second) == packed(first)
    train(second, range(4, 6))
    used = build(seed + 1, scheduler=scheduler)
    train(used, range(3))  # its tensors exist: the state is loaded in place
    third = hopped(second, used)
    train(third, range(6, 8))
    assert_equal(straight, third)
    assert packed(third) == packed(straight)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_moments_are_matched_by_name(optimizer):
    straight, first = build(optimizer=optimizer), build(optimizer=optimizer)
    train(straight, range(6))
    train(first, range(3))
    second = hopped(first, build(3, optimizer=optimizer))
    train(second, range(3, 6))
    assert_equal(straight, second)


def test_torch_itself_can_load_an_optimizers_state():
    model, again = build(), build()
    train(model, range(3))
    again._optimizers[0].load_state_dict(model.state_dict()["optimizer"])
    for group, other in zip(
        model._optimizers[0].param_groups, again._optimizers[0].param_groups, strict=True
    ):
        for one, two in zip(group["params"], other["params"], strict=True):
            left, right = model._optimizers[0].state[one], again._optimizers[0].state[two]
            assert torch.equal(left["exp_avg"], right["exp_avg"])


def test_a_clone_keeps_its_own_rates_in_its_own_order():
    parent, clone = build(), build(4)
    train(parent, range(3))
    own = rates_of(clone._optimizers[0])
    clone.load_clone(parent.in_fixed_order(parent.state_dict()), {})
    assert rates_of(clone._optimizers[0]) == own
    assert_equal(parent, clone)
    moments = {
        name: clone._optimizers[0].state[value]["exp_avg"]
        for name, value in clone.net.named_parameters()
    }
    for name, value in parent.net.named_parameters():
        assert torch.equal(moments[name], parent._optimizers[0].state[value]["exp_avg"])


def gan(seed):
    net = Net(shuffled(NAMES, seed))
    named = dict(net.named_parameters())
    optimizers = [
        torch.optim.Adam([named[n] for n in shuffled(sorted(named), seed) if f".{part}." in n])
        for part in NAMES
    ]

    def train_step(net, batch, *optimizers):
        loss = F.mse_loss(net(batch["x"]), batch["y"])
        loss.backward()  # the gradients gather over two batches
        if net.training and (steps := getattr(train_step, "steps", 0) + 1) % 2 == 0:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        train_step.steps = steps
        return {"loss": loss.detach()}

    return cerebro.torch.Model(net, optimizer=optimizers, loss=F.mse_loss, train_step=train_step)


def test_gradients_are_matched_by_name():
    straight, first, second = gan(0), gan(0), gan(7)
    train(straight, range(4))
    train(first, range(1))
    hopped(first, second)._train_step.steps = 1
    train(second, range(1, 4))
    assert_equal(straight, second)


class Scaled(torch.nn.Module):
    """A loss with parameters of the same shape."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4))
        self.shift = torch.nn.Parameter(torch.zeros(4))

    def forward(self, output, target):
        return ((output * self.scale + self.shift - target) ** 2).mean()


def of_loss(order):
    loss, net = Scaled(), Net(NAMES)
    own = {"scale": loss.scale, "shift": loss.shift}
    made = torch.optim.Adam([*(own[name] for name in order), *net.parameters()], lr=0.05)
    return cerebro.torch.Model(net, optimizer=made, loss=loss)


def test_loss_parameters_are_matched_by_name():
    straight, first = of_loss(["scale", "shift"]), of_loss(["scale", "shift"])
    train(straight, range(6))
    train(first, range(3))
    second = hopped(first, of_loss(["shift", "scale"]))
    train(second, range(3, 6))
    assert_equal(straight, second)
    assert torch.equal(straight._objective._loss.shift, second._objective._loss.shift)


class Tied(torch.nn.Module):
    """A parameter with two names, the first of which depends on the order."""

    def __init__(self, order):
        super().__init__()
        torch.manual_seed(1)
        one, two = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
        two.weight = one.weight
        made = {"one": one, "two": two}
        self.parts = torch.nn.ModuleDict({name: made[name] for name in order})

    def forward(self, x):
        return self.parts["two"](torch.tanh(self.parts["one"](x)))


def test_a_tied_parameter_has_one_name():
    def tied(order):
        net = Tied(order)
        return cerebro.torch.Model(
            net, optimizer=torch.optim.Adam(net.parameters(), lr=0.05), loss=F.mse_loss
        )

    straight, first = tied(["one", "two"]), tied(["one", "two"])
    train(straight, range(6))
    train(first, range(3))
    second = hopped(first, tied(["two", "one"]))
    train(second, range(3, 6))
    for name, value in straight.net.named_parameters(remove_duplicate=False):
        assert torch.equal(value, dict(second.net.named_parameters(remove_duplicate=False))[name])


# --- what cannot be found by name ---------------------------------------------------


def with_others(count, seed, order=None):
    net = Net(NAMES)
    others = [torch.nn.Parameter(torch.full((4,), float(at))) for at in range(count)]
    taken = order(list(net.parameters())) if order else list(net.parameters())
    made = torch.optim.Adam([*taken, *others])

    def step(net, batch):
        return {"loss": F.mse_loss(net(batch["x"]) + sum(others), batch["y"])}

    return cerebro.torch.Model(net, optimizer=made, step=step)


@pytest.mark.parametrize("count", [1, 2])
def test_an_unnamed_parameter_is_matched_by_position(count):
    first, second = with_others(count, 0), with_others(count, 1)
    train(first, range(3))
    hopped(first, second)
    for at in range(1, count + 1):
        one, two = (m._optimizers[0].param_groups[0]["params"][-at] for m in (first, second))
        left, right = first._optimizers[0].state[one], second._optimizers[0].state[two]
        assert torch.equal(left["exp_avg"], right["exp_avg"])


def test_parameters_without_names_in_another_order_are_refused():
    first = with_others(2, 0)
    train(first, range(3))
    with pytest.raises(StateError, match=r"cannot be told apart \(2 of them .* sorted list"):
        hopped(first, with_others(2, 0, order=lambda taken: taken[::-1]))


class Counting(torch.optim.SGD):
    """An optimizer whose state has a part that may be in the parameters' order."""

    def state_dict(self):
        return {**super().state_dict(), "counts": [1, 2]}

    def load_state_dict(self, state):
        super().load_state_dict({k: v for k, v in state.items() if k != "counts"})


def test_a_custom_optimizer_state_is_refused_in_another_order():
    def counting(seed):
        net = Net(shuffled(NAMES, seed))
        made = Counting(net.parameters(), lr=0.1, momentum=0.9)
        return cerebro.torch.Model(net, optimizer=made, loss=F.mse_loss)

    first = counting(0)
    train(first, range(3))
    assert_equal(first, hopped(first, counting(0)))
    with pytest.raises(StateError, match="the state of Counting has a form of its own"):
        hopped(first, counting(3))


class Listing(schedulers.LRScheduler):
    """A scheduler with a list for the groups of which only it knows."""

    def __init__(self, optimizer):
        self.factors = [0.9 for _ in optimizer.param_groups]
        super().__init__(optimizer)

    def get_lr(self):
        return [g["lr"] * f for g, f in zip(self.optimizer.param_groups, self.factors, strict=True)]


def test_a_scheduler_with_its_own_lists_is_refused_in_another_order():
    def listing(seed):
        net = Net(NAMES)
        made = torch.optim.SGD(groups_of(net, seed), lr=0.1, momentum=0.9)
        return cerebro.torch.Model(net, optimizer=made, loss=F.mse_loss, scheduler=Listing(made))

    first = listing(0)
    train(first, range(3))
    assert_equal(first, hopped(first, listing(0)))
    with pytest.raises(StateError, match="parameter groups in another order"):
        hopped(first, listing(1))


def test_other_groups_are_refused():
    def of(parts):
        net = Net(NAMES)
        named = dict(net.named_parameters())
        groups = [{"params": [named[n] for n in sorted(named) if n[6] in part]} for part in parts]
        return cerebro.torch.Model(net, optimizer=torch.optim.Adam(groups), loss=F.mse_loss)

    first = of(["ab", "cd"])
    train(first, range(2))
    assert_equal(first, hopped(first, of(["cd", "ab"])))
    with pytest.raises(StateError, match=r"has a parameter group of parts\.a\.bias"):
        hopped(first, of(["ac", "bd"]))
    with pytest.raises(StateError, match=r"groups of \[4, 4\] tensors, build's has \[2, 6\]"):
        hopped(first, of(["a", "bcd"]))


# --- processes ------------------------------------------------------------------------

PROGRAM = """
import sys
import torch, cerebro, cerebro._core as core
from cerebro.worker.models import LiveModel, load_tree, pack_tree
net = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(6)])
named = dict(net.named_parameters())
for value in named.values():
    torch.nn.init.constant_(value, 0.1)
slim = {name for name in named if name.endswith("bias")}
rest = set(named) - slim
groups = [{"params": [named[n] for n in rest]}, {"params": [named[n] for n in slim], "lr": 0.5}]
made = torch.optim.AdamW(groups, lr=0.1)
model = cerebro.torch.Model(net, optimizer=made, loss=torch.nn.functional.mse_loss)
model.train_batch({"x": torch.ones(2, 4), "y": torch.zeros(2, 4)})
print(core.hash_state(core.pack_state(pack_tree(LiveModel(model, True)))))
"""


def test_states_have_the_same_hash_in_every_process():
    hashes = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(hashes) == 1
