"""Steps of Adam, AdamW and SGD in the core: the bits of PyTorch's, or PyTorch's own step."""

from __future__ import annotations

import copy
import math
import warnings

import pytest

torch = pytest.importorskip("torch")

import cerebro  # noqa: E402
from cerebro import _core  # noqa: E402
from cerebro.torch import native_calls, optimizer_step  # noqa: E402

OPTIM = torch.optim
FORMS = {
    "adamw": lambda p: OPTIM.AdamW(p, lr=1e-2),
    "adamw without decay": lambda p: OPTIM.AdamW(p, lr=1e-2, weight_decay=0),
    "adamw, large first beta": lambda p: OPTIM.AdamW(p, lr=1e-2, betas=(0.4, 0.99), eps=1e-3),
    "adam": lambda p: OPTIM.Adam(p, lr=1e-2),
    "adam with decay": lambda p: OPTIM.Adam(p, lr=1e-2, weight_decay=0.1),
    "adam, decoupled": lambda p: OPTIM.Adam(p, 1, weight_decay=0.1, decoupled_weight_decay=True),
    "sgd": lambda p: OPTIM.SGD(p, lr=0.1),
    "sgd with decay": lambda p: OPTIM.SGD(p, lr=0.1, weight_decay=0.1),
    "momentum": lambda p: OPTIM.SGD(p, lr=0.1, momentum=0.9),
    "dampened": lambda p: OPTIM.SGD(p, lr=0.1, momentum=0.9, dampening=0.2, weight_decay=0.01),
    "nesterov": lambda p: OPTIM.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
}


def in_core(monkeypatch):
    """Return a list that gets an entry for every step that the core makes."""
    made = []
    step = _core.optimizer_step

    def counted(groups):
        stepped = step(groups)
        made.extend([1] * stepped)
        return stepped

    monkeypatch.setattr(_core, "optimizer_step", counted)
    return made


def parameters(*shapes):
    torch.manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]


def gradients(number, shapes, special=()):
    torch.manual_seed(number)
    found = [torch.randn(shape) * 10.0 ** (number % 5 - 2) for shape in shapes]
    for gradient in found:
        if special and gradient.numel() > 3:
            gradient.view(-1)[: len(special)] = torch.tensor(special)
    return found


def trained(form, step, shapes, special=(), steps=12):
    its = parameters(*shapes)
    optimizer = form(its)
    for number in range(steps):
        for parameter, gradient in zip(its, gradients(number, shapes, special), strict=True):
            parameter.grad = gradient
        step(optimizer)
    return its, optimizer


def require_same(one, two):
    (mine, optimizer), (its, other) = one, two
    for a, b in zip(mine, its, strict=True):
        assert bits(a) == bits(b)
        left, right = optimizer.state.get(a, {}), other.state.get(b, {})
        assert list(left) == list(right)
        for name in left:
            assert bits(left[name]) == bits(right[name]), name


def bits(value):
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().contiguous().numpy().tobytes()


def pytorch(optimizer):
    optimizer.step()


@pytest.fixture(autouse=True)
def compared():
    """Compare every form with PyTorch's first, so that tests count only their own steps."""
    for form in FORMS.values():
        trained(form, optimizer_step.make_step, [(3,)], steps=2)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(
    "special",
    [
        (),
        (0.0, -0.0, 1e-42, -1e-42),
        (1e30, -1e30, 3e38, 1e19),
    ],
    ids=["usual", "tiny", "large"],
)
def test_steps_match_pytorch_bit_for_bit(form, special, monkeypatch):
    made = in_core(monkeypatch)
    shapes = [(7, 3), (5,), (1,), (), (40, 70), (3, 2, 5, 5)]
    mine = trained(form, optimizer_step.make_step, shapes, special)
    require_same(mine, trained(form, pytorch, shapes, special))
    assert made  # until a number is no longer finite


@pytest.mark.parametrize("size", [1, 7, 8, 9, 31, 1023, 1024, 1025, 2049, 70_001])
@pytest.mark.parametrize("name", ["adamw", "adam with decay", "nesterov"])
def test_sizes_at_block_and_vector_boundaries_match_pytorch(name, size, monkeypatch):
    made = in_core(monkeypatch)
    mine = trained(FORMS[name], optimizer_step.make_step, [(size,)], steps=4)
    require_same(mine, trained(FORMS[name], pytorch, [(size,)], steps=4))
    assert len(made) >= 3


@pytest.mark.parametrize("special", [(math.nan, 1.0), (math.inf, 1.0)])
def test_nan_falls_back_to_pytorchs_step(special, monkeypatch):
    """Its bits depend on the order of operands, which is PyTorch's; infinity leads to it."""
    made = in_core(monkeypatch)
    mine = trained(FORMS["adamw"], optimizer_step.make_step, [(6,)], special)
    require_same(mine, trained(FORMS["adamw"], pytorch, [(6,)], special))
    assert made == []


def test_groups_schedules_and_changed_settings(monkeypatch):
    made = in_core(monkeypatch)
    shapes = [(5, 4), (5,), (3, 5)]

    def run(step):
        its = parameters(*shapes)
        optimizer = OPTIM.AdamW([{"params": its[:1]}, {"params": its[1:], "lr": 3}], lr=1e-2)
        scheduler = OPTIM.lr_scheduler.OneCycleLR(optimizer, 0.1, 30)
        for number in range(20):
            for parameter, gradient in zip(its, gradients(number, shapes), strict=True):
                parameter.grad = gradient
            if number % 3 == 2:
                its[1].grad = None  # has taken fewer steps than the others from then on
            if number == 9:
                optimizer.param_groups[0]["weight_decay"] = 0.0
            step(optimizer)
            scheduler.step()
        return its, optimizer

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # the scheduler must see that the optimizer has stepped
        mine = run(optimizer_step.make_step)
    require_same(mine, run(pytorch))
    assert len(made) == 19


@pytest.mark.parametrize("layout", ["transposed", "channels last"])
def test_transposed_and_channels_last_layouts_match_pytorch(layout, monkeypatch):
    made = in_core(monkeypatch)

    def run(step):
        torch.manual_seed(0)
        if layout == "transposed":
            data = torch.randn(6, 4).t()
        else:
            data = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
        parameter = torch.nn.Parameter(data)
        optimizer = OPTIM.AdamW([parameter], lr=0.1)
        for number in range(5):
            torch.manual_seed(number)
            parameter.grad = torch.randn_like(parameter)
            step(optimizer)
        return [parameter], optimizer

    require_same(run(optimizer_step.make_step), run(pytorch))
    assert len(made) == 4


# --- steps that PyTorch makes -----------------------------------------------------------


class Mine(OPTIM.AdamW):
    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] *= 0.5
        return super().step(closure)


def with_hook(p):
    made = OPTIM.SGD(p, lr=0.1)
    made.register_step_post_hook(lambda opt, *_: [q.data.clamp_(-0.5, 0.5) for q in p])
    return made


def with_own_step(p):
    made = OPTIM.SGD(p, lr=0.1)
    step = made.step

    def halved():
        for q in p:
            q.grad.mul_(0.5)
        step()

    made.step = halved
    return made


PYTORCHS = {
    "amsgrad": lambda p: OPTIM.AdamW(p, lr=0.1, amsgrad=True),
    "maximize": lambda p: OPTIM.SGD(p, lr=0.1, maximize=True),
    "foreach": lambda p: OPTIM.SGD(p, lr=0.1, foreach=True),
    "fused": lambda p: OPTIM.AdamW(p, lr=0.1, fused=True),
    "rate in a tensor": lambda p: OPTIM.AdamW(p, lr=torch.tensor(0.1)),
    "subclass": lambda p: Mine(p, lr=0.1),
    "hook": with_hook,
    "own step": with_own_step,
    "rmsprop": lambda p: OPTIM.RMSprop(p, lr=0.1),
}


@pytest.mark.parametrize("form", PYTORCHS.values(), ids=PYTORCHS)
def test_unsupported_optimizers_fall_back_to_pytorchs_step(form, monkeypatch):
    made = in_core(monkeypatch)
    shapes = [(4, 3), (5,)]
    require_same(trained(form, optimizer_step.make_step, shapes), trained(form, pytorch, shapes))
    assert made == []


def test_float64_falls_back_to_pytorchs_step(monkeypatch):
    made = in_core(monkeypatch)
    parameter = torch.nn.Parameter(torch.randn(5, dtype=torch.float64))
    optimizer = OPTIM.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones(5, dtype=torch.float64)
    before = parameter.detach().clone()
    optimizer_step.make_step(optimizer)
    assert torch.equal(parameter, before - 0.1) and made == []


def test_a_global_hook_or_replaced_step_falls_back_to_pytorchs_step(monkeypatch):
    made = in_core(monkeypatch)
    its, optimizer = trained(FORMS["sgd"], optimizer_step.make_step, [(4,)], steps=1)
    assert len(made) == 1
    from torch.optim.optimizer import register_optimizer_step_post_hook

    handle = register_optimizer_step_post_hook(lambda *_: its[0].data.zero_())
    optimizer_step.make_step(optimizer)
    handle.remove()
    assert not its[0].any() and len(made) == 1
    monkeypatch.setattr(OPTIM.SGD, "step", lambda self: its[0].data.fill_(2.0))
    optimizer_step.make_step(optimizer)
    assert (its[0] == 2).all() and len(made) == 1


def test_overlapping_tensors_fall_back_to_pytorchs_step(monkeypatch):
    made = in_core(monkeypatch)

    def run(step):
        memory = torch.linspace(0, 1, 9)
        parameter = torch.nn.Parameter(memory[:8])
        optimizer = OPTIM.SGD([parameter], lr=0.1, weight_decay=0.5)
        parameter.grad = memory[1:]
        step(optimizer)
        return memory

    assert bits(run(optimizer_step.make_step)) == bits(run(pytorch))
    assert made == []


def test_autograd_notices_that_a_parameter_has_changed():
    """As after PyTorch's step: a graph from before it cannot be used."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = OPTIM.SGD([parameter], lr=0.1)
    loss = (parameter * parameter).sum()
    loss.backward(retain_graph=True)
    optimizer_step.make_step(optimizer)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_another_default_type_changes_nothing(monkeypatch):
    """The comparison with PyTorch's step at the first use makes tensors, too."""
    made = in_core(monkeypatch)
    expected = trained(FORMS["momentum"], pytorch, [(5,)])
    torch.set_default_dtype(torch.float64)
    try:
        optimizer_step._has_same_bits.cache_clear()
        native_calls.measure_rounding.cache_clear()
        its = [parameter.to(torch.float32) for parameter in expected[0]]
        assert optimizer_step._has_same_bits(OPTIM.SGD, (True, False, False, True, False))
    finally:
        torch.set_default_dtype(torch.float32)
    require_same(trained(FORMS["momentum"], optimizer_step.make_step, [(5,)]), expected)
    assert made and its[0].dtype == torch.float32


# --- models -----------------------------------------------------------------------------


def test_models_step_in_the_core_by_default(monkeypatch):
    made = in_core(monkeypatch)
    states = []
    for graph in (None, False):
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 2)
        model = cerebro.torch.Model(
            net, optimizer=OPTIM.AdamW(net.parameters()), loss=torch.nn.CrossEntropyLoss(),
            graph=graph,
        )  # fmt: skip
        batch = {"x": torch.randn(8, 4), "y": torch.arange(8) % 2}
        for _ in range(5):
            model.train_batch(batch)
        states.append(_core.hash_state(_core.pack_state(copy.deepcopy(model.state_dict()))))
        assert len(made) == 4  # the first step makes the optimizer's state
    assert states[0] == states[1]
