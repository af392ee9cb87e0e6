"""What the witness finds: steps that PyTorch computes otherwise while it is watched."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

import cerebro  # noqa: E402
from cerebro.torch.cpu_recorder import (  # noqa: E402
    Unavailable,
    Witness,
    find_difference,
    is_reviewed,
)
from cerebro.worker.evaluate import RecordedStepDiffers, replay_recorded_steps  # noqa: E402


class Net(torch.nn.Module):
    """A network with a function of the user's in the middle."""

    def __init__(self, middle):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 6), torch.nn.Linear(6, 5)
        self.fill = torch.nn.Parameter(torch.tensor(0.25))
        self.middle = middle

    def forward(self, x):
        return self.last(self.middle(self, self.first(x)))


def pad(net, h):
    """A product that is 0 for padding."""
    padding = torch.where(h > 2.5, 0.0, h)
    return h + padding.unflatten(1, (3, 2)).prod(2).repeat(1, 2)


def fill(net, h):
    return h.masked_fill(h > 2.5, net.fill)


def whole_maximum(net, h):
    return h + h.max()


def whole_median(net, h):
    return h * h.median()


def inverse(net, h):
    return h + torch.linalg.inv(torch.eye(2) * h[:, :1, None].clamp(-3, 3)).flatten(1).repeat(1, 2)[
        :, :6
    ].clamp(-1, 1)


def certain(net, h):
    torch._assert_async((h < 100).all())
    return h


def plain(net, h):
    return torch.relu(h)


LOSS = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2, 3, 1, 1]), label_smoothing=0.1)


def made(middle, loss=F.cross_entropy, graph=True):
    torch.manual_seed(0)
    net = Net(middle)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    return cerebro.torch.Model(net, optimizer=optimizer, loss=loss, graph=graph)


def batches(count, rare=0):
    """Batches of which the last `count - rare` are harmless: nothing is large, no label missing."""
    torch.manual_seed(1)
    found = []
    for number in range(count):
        x, y = torch.randn(16, 8).clamp(-1, 1), torch.randint(0, 5, (16,))
        if number >= count - rare:
            x[3], y[2] = 40.0, -100
        found.append({"x": x, "y": y})
    return found


def run(model, its):
    told = []
    with replay_recorded_steps(model, training=True):
        told += [model.train_batch(batch)["loss"].item() for batch in its]
    model.end_unit()
    return told, [p.detach().numpy().tobytes() for p in model.net.parameters()]


@pytest.mark.parametrize(
    ("middle", "loss", "operator"),
    [
        (pad, F.cross_entropy, "eq"),
        (fill, F.cross_entropy, "masked_select"),
        (whole_maximum, F.cross_entropy, ""),
        (whole_median, F.cross_entropy, ""),
        (plain, LOSS, "bitwise_not"),
    ],
)
def test_differing_formulas_are_refused_even_on_harmless_data(middle, loss, operator):
    """The rare row comes last, after all comparisons."""
    its = batches(20, rare=2)
    model = made(middle, loss)
    assert run(model, its) == run(made(middle, loss, graph=False), its)
    refusal = model._recorded[0].refusal
    assert refusal.startswith("PyTorch calls ") and f"{operator}()" in refusal
    assert "while the step is recorded" in refusal


@pytest.mark.parametrize("middle", [inverse, certain])
def test_calls_without_a_result_stay_in_the_program(middle):
    """A check that fails only on a rare batch fails in a replay, too."""
    model = made(middle)
    run(model, batches(20))
    assert model._recorded[0].replays > 0, model._recorded[0].refusal
    rare = batches(8)
    rare[5]["x"].fill_(1e6 if middle is certain else 0)
    if middle is inverse:
        with torch.no_grad():
            model.net.first.weight.zero_()
            model.net.first.bias.zero_()
    with pytest.raises(RecordedStepDiffers, match="it fails: "):
        run(model, rare)


def test_refusal_names_an_unreviewed_operator():
    model = made(lambda net, h: h + torch.nanmean(h))
    run(model, batches(12))
    assert "aten::nanmean, which is not known to be safe" in model._recorded[0].refusal
    assert not is_reviewed("aten::gru", "data") and is_reviewed("aten::gru", "input")


def test_steps_under_a_users_profiler_run_as_ordinary():
    model, its = made(plain), batches(24)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        told = [model.train_batch(batch)["loss"].item() for batch in its[:12]]
    assert model._recorded[0].replays == 0 and model._recorded[0].refusal is None
    assert any("addmm" in event.key for event in profile.key_averages())
    told += [model.train_batch(batch)["loss"].item() for batch in its[12:]]
    assert model._recorded[0].replays > 0
    assert told == run(made(plain, graph=False), its)[0]


def test_without_the_profiler_nothing_is_recorded(monkeypatch):
    def missing(*_):
        raise AttributeError("no such profiler")

    monkeypatch.setattr(torch.autograd, "_prepare_profiler", missing)
    model = made(plain)
    run(model, batches(12))
    assert "another profiler" in model._recorded[0].refusal
    with pytest.raises(Unavailable):
        Witness().__enter__()


def test_a_witness_sees_the_operators_that_compute():
    with Witness() as witness:
        torch.ones(3).view(3, 1).add_(1).mm(torch.zeros(1, 2).clone())
    assert [name for name, _, _ in witness.leaves] == ["aten::add", "aten::mm"]
    assert find_difference(witness.leaves, witness) is None
    assert "mm() only while the step is not recorded" in find_difference(
        witness.leaves[:1], witness
    )


# --- between units ----------------------------------------------------------------------


def rare_linear(x, weight, bias=None, *, real=F.linear):
    return torch.where(x[:, :1] > 2.5, 0.5, 1.0) * real(x, weight, bias)


class Other(torch.nn.Linear):
    def forward(self, x):
        return rare_linear(x, self.weight, self.bias)


def replace_function(model, patch):
    patch.setattr(F, "linear", rare_linear)


def change_class(model, patch):
    model.net.first.__class__ = Other


def replace_forward(model, patch):
    patch.setattr(torch.nn.Linear, "forward", Other.forward)


def own_forward(model, patch):
    first = model.net.first
    first.forward = lambda x: rare_linear(x, first.weight, first.bias)


def add_forward_hook(model, patch):
    model.net.first.register_forward_hook(lambda m, i, o: torch.where(i[0][:, :1] > 2.5, o / 2, o))


def add_gradient_hook(model, patch):
    model.net.last.weight.register_hook(lambda g: torch.where(g.abs() > 0.5, g / 2, g))


def add_accumulated_hook(model, patch):
    def halve(parameter):
        parameter.grad.mul_(0.5)

    model.net.last.weight.register_post_accumulate_grad_hook(halve)


def clamp(optimizer, *_):
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.data.clamp_(-0.9, 0.9)


def add_optimizer_hook(model, patch):
    model._optimizers[0].register_step_post_hook(clamp)


def add_global_hook(model, patch):
    from torch.optim import optimizer

    handle = optimizer.register_optimizer_step_post_hook(clamp)
    patch.setattr(torch, "_removed_after_this_test", handle, raising=False)


def replace_operator(model, patch):
    patch.setattr(torch.Tensor, "__add__", lambda a, b: torch.add(a, b) * 1.0, raising=False)


def freeze(model, patch):
    model.net.first.weight.requires_grad_(False)


def replace_builtin(model, patch):
    real = torch.relu
    patch.setattr(torch, "relu", lambda x: torch.where(x > 2.5, x / 2, real(x)))


CHANGES = [
    replace_function, change_class, replace_forward, own_forward, add_forward_hook,
    add_gradient_hook, add_accumulated_hook, add_optimizer_hook, add_global_hook, replace_operator,
    freeze, replace_builtin,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_changes_between_units_are_detected(change):
    """What the change does shows only on the rare row, which no comparison meets."""
    found = []
    for graph in (True, False):
        model, its = made(plain, graph=graph), batches(40, rare=2)
        told = run(model, its[:20])[0]
        if graph:
            assert model._recorded[0].replays > 0
        with pytest.MonkeyPatch.context() as patch:
            change(model, patch)
            its[20:] = [*its[20:36], *its[38:], *its[36:38]]
            found.append((told, run(model, its[20:])))
            handle = getattr(torch, "_removed_after_this_test", None)
            if handle is not None:
                handle.remove()
    assert found[0] == found[1]
