"""Sums and losses of a recorded step have PyTorch's bits, or PyTorch computes them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import cerebro._core as _core  # noqa: E402
from cerebro.torch import native_calls  # noqa: E402
from cerebro.torch.native_calls import make_native_call  # noqa: E402

ATEN = torch.ops.aten
LOSS, GRADIENT = ATEN.nll_loss_forward.output, ATEN.nll_loss_backward.grad_input


@pytest.fixture
def sums():
    if not native_calls._find_width():
        pytest.skip("this PyTorch adds columns up in another order")


@pytest.fixture
def losses():
    if not native_calls._adds_losses():
        pytest.skip("this PyTorch adds losses up in another order")


def numbers(*shape):
    generator = torch.Generator().manual_seed(sum(shape))
    found = torch.randn(shape, generator=generator)
    return found * torch.exp2(torch.randint(-9, 9, shape, generator=generator).float())


def same(one, two):
    return torch.equal(one.view(torch.int32), two.view(torch.int32))


def computed(func, args, **outs):
    """Whether the core takes a call, and writes what PyTorch writes."""
    found = make_native_call(func, func, args, outs)
    if found is None:
        return False
    func(*args, **outs)
    expected = [out.clone() for out in outs.values()]
    for out in outs.values():
        out.fill_(torch.nan)
    found.compute()
    assert all(map(same, outs.values(), expected))
    return True


@pytest.mark.parametrize("rows", [1, 3, 4, 16, 17, 33, 256, 1000, 4097, 65_536])
@pytest.mark.parametrize("columns", [2, 3, 21, 31, 32, 33, 64, 96, 130])
def test_columns_are_added_up_in_pytorchs_order(sums, rows, columns):
    matrix = numbers(rows, columns)
    assert computed(ATEN.sum.IntList_out, [matrix, [0]], out=torch.empty(columns))
    assert computed(ATEN.sum.IntList_out, [matrix, [0], True], out=torch.empty(1, columns))


@pytest.mark.parametrize("reduction", [1, 2])
@pytest.mark.parametrize("rows", [1, 2, 16, 17, 100, 256, 5000])
@pytest.mark.parametrize("classes", [1, 2, 10, 100])
def test_losses_are_added_up_in_pytorchs_order(losses, rows, classes, reduction):
    likelihoods = torch.log_softmax(numbers(rows, classes), 1)
    target = torch.arange(rows) * 7 % classes
    target[3::5] = -100
    given = [likelihoods, target, None, reduction, -100]
    loss, count, gradient = torch.empty(()), torch.empty(()), torch.empty(rows, classes)
    assert computed(LOSS, given, output=loss, total_weight=count)
    assert computed(GRADIENT, [loss, *given, count], grad_input=gradient)


def test_other_sums_are_left_to_pytorch():
    matrix = numbers(8, 6)
    wide = numbers(70_000, 2)
    for args, out in [
        ([matrix, [1]], torch.empty(8)),
        ([matrix, [0, 1]], torch.empty(())),
        ([matrix.t(), [0]], torch.empty(8)),
        ([matrix[:, :1], [0]], torch.empty(1)),
        ([matrix[:, :4], [0]], torch.empty(4)),
        ([numbers(8, 7), [0]], torch.empty(7)),
        ([matrix.double(), [0]], torch.empty(6).double()),
        ([matrix[None], [0]], torch.empty(8, 6)),
        ([wide, [0]], torch.empty(2)),
    ]:
        assert not computed(ATEN.sum.IntList_out, args, out=out)


def test_other_losses_are_left_to_pytorch():
    likelihoods = torch.log_softmax(numbers(8, 3), 1)
    target = torch.arange(8) % 3
    weight, total = torch.ones(3), torch.empty(())
    assert not computed(
        LOSS, [likelihoods, target, weight, 1, -100], output=torch.empty(()), total_weight=total
    )
    assert not computed(
        LOSS, [likelihoods, target, None, 0, -100], output=torch.empty(8), total_weight=total
    )


def test_a_target_that_is_no_class_is_refused_as_by_pytorch(losses):
    likelihoods, target = torch.log_softmax(numbers(8, 3), 1), torch.arange(8) % 3
    outs = {"output": torch.empty(()), "total_weight": torch.empty(())}
    found = make_native_call(LOSS, LOSS, [likelihoods, target, None, 1, -100], outs).compute
    gradient = torch.full((8, 3), 5.0)
    args = [outs["output"], likelihoods, target, None, 1, -100, outs["total_weight"]]
    back = make_native_call(GRADIENT, GRADIENT, args, {"grad_input": gradient}).compute
    for wrong in (3, -1, 2**62):
        target[4] = wrong
        with pytest.raises(IndexError, match=rf"Target {wrong} is out of bounds"):
            LOSS(likelihoods, target, None, 1, -100, **outs)
        for compute in (found, back):
            with pytest.raises(IndexError, match=rf"Target {wrong} is out of bounds"):
                compute()


def test_reductions_are_left_to_a_pytorch_with_another_order(monkeypatch):
    monkeypatch.setattr(native_calls, "have_same_floats", lambda one, two: False)
    assert native_calls._find_width.__wrapped__() == 0
    assert not native_calls._adds_losses.__wrapped__()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("other", (2, 2), (64, 0, 64)), "no reduction 'other'"),
        (("sum_columns", (0, 2), (64, 0, 64), 32), "empty"),
        (("sum_columns", (2, 2), (0, 0, 64), 32), "empty"),
        (("sum_columns", (2, 2), (64, 0, 64)), "needs a block"),
        (("sum_columns", (70_000, 2), (64, 0, 64), 32), "fewer rows"),
        (("nll_loss", (2, 2), (64, 64, 64)), "needs targets"),
        (("nll_loss", (2, 2), (64, 0, 64), 0, (64, -100, True)), "a count"),
        (("nll_loss", (2**62, 2**62), (64, 64, 64), 0, (64, -100, True)), "empty"),
    ],
)
def test_wrong_reductions_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        _core.Reduction(*given)
