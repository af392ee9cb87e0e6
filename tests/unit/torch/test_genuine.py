"""Functions of PyTorch that were replaced are found, also after they were checked before."""

from __future__ import annotations

import types

import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from cerebro.torch.proof.genuine import GenuineTorch, functions_of_torch  # noqa: E402
from cerebro.torch.proof.same_program import Proof  # noqa: E402
from cerebro.torch.proof.unchanged import Entries, Unchanged  # noqa: E402
from cerebro.torch.proof.values import Unproven  # noqa: E402


def other(*arguments, **options):
    return arguments[0] * 2


def test_functions_are_checked_once_while_nothing_changes(monkeypatch):
    checked = functions_of_torch()
    assert functions_of_torch() is checked
    GenuineTorch()
    assert functions_of_torch() is checked
    monkeypatch.setattr(nn.Module, "another", other, raising=False)
    again = functions_of_torch()  # a library's own method does not matter, but is looked at
    assert again is not checked and functions_of_torch() is again


@pytest.mark.parametrize(
    ("space", "name"),
    [
        (torch, "relu"),  # in C
        (torch, "norm"),
        (functional, "relu"),
        (functional, "linear"),
        (torch.Tensor, "backward"),
        (nn.Module, "__call__"),
        (nn.Module, "zero_grad"),
    ],
)
def test_a_replaced_function_is_found(space, name, monkeypatch):
    before = GenuineTorch()
    is_recorded = isinstance(vars(space)[name], types.FunctionType)
    assert before.holds()
    with monkeypatch.context() as patch:
        patch.setattr(space, name, other)
        for make in (functions_of_torch, GenuineTorch, Proof):
            with pytest.raises(Unproven, match=f"{space.__name__}.{name} was replaced"):
                make()
        assert before.holds() is not is_recorded
    assert before.holds() and Proof().holds()


def test_a_function_with_other_code_is_found(monkeypatch):
    GenuineTorch()
    with monkeypatch.context() as patch:
        patch.setattr(functional.relu, "__code__", other.__code__)
        with pytest.raises(Unproven, match=r"torch.nn.functional.relu was replaced"):
            GenuineTorch()
    GenuineTorch()


def test_a_function_that_is_deleted_is_noticed(monkeypatch):
    before, checked = GenuineTorch(), functions_of_torch()
    with monkeypatch.context() as patch:
        patch.delattr(functional, "relu")
        assert not before.of_torch.holds()
        assert functions_of_torch() is not checked
    assert before.of_torch.holds()


def test_hooks_and_modes_are_looked_at_each_time():
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with pytest.raises(Unproven, match="hooks are registered for all modules"):
            GenuineTorch()
    finally:
        handle.remove()
    with torch.overrides.BaseTorchFunctionMode(), pytest.raises(Unproven, match="a mode of"):
        GenuineTorch()
    GenuineTorch()


@pytest.mark.parametrize("keys", [[], ["a"], ["a", "b"]])
def test_entries_are_compared_by_identity(keys):
    first = [1]
    names = {"a": first, "b": 2, "c": 3}
    entries = Entries(names, keys)
    unchanged = Unchanged()
    unchanged.entries(entries)
    names["c"] = 4
    assert entries.hold() and unchanged.holds()
    names["a"] = [1]
    assert entries.hold() is unchanged.holds() is (not keys)
    names["a"] = first
    assert entries.hold()
    del names["a"]
    assert entries.hold() is (not keys)
