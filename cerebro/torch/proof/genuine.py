"""Decide which functions, operators, modules, optimizers and modes are PyTorch's own.

PyTorch's code is known, so the proof does not read it, but checks that nothing has replaced it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import sys
import textwrap
import types
from operator import attrgetter, is_
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from torch.nn.modules import module as torch_module

from cerebro.torch.proof.unchanged import MISSING, Entries, Unchanged
from cerebro.torch.proof.values import Unproven

_FOLDER = str(Path(torch.__file__).parent) + os.sep
_LIBRARY = str(Path(ast.__file__).parent)
_OPERATORS = torch._C._VariableFunctions

READS_MEMORY = {"from_numpy", "frombuffer", "from_file", "asarray"}
"""Operators that return tensors over memory that belongs to other objects."""

READS_NUMBERS = {"tensor_split", "_pack_padded_sequence"}
"""Operators that read indices or lengths from a tensor, which a recording does not notice."""

CONTEXTS = (torch.no_grad, torch.enable_grad, torch.autocast, torch.amp.autocast)

GLOBAL_HOOKS = tuple(
    name
    for name in ("_global_backward_pre_hooks", "_global_backward_hooks",
                 "_global_forward_pre_hooks", "_global_forward_hooks")
    if hasattr(torch_module, name)
)  # fmt: skip


class GenuineTorch:
    """Check that parts of PyTorch have not been replaced, and record them.

    Attributes
    ----------
    unchanged
        The values that the step's own code reads.
    of_torch
        The values that PyTorch's functions read.
    given
        What else decides which operators the step calls: functions and settings that Cerebro's own
        code of the step uses.
    """

    def __init__(self) -> None:
        self.unchanged = Unchanged()
        self.of_torch = Unchanged()
        self.given: Any = None
        self._genuine: set[int] = set()
        self._check_torch()

    def holds(self) -> bool:
        """Return whether everything that was read is unchanged."""
        return self.unchanged.holds() and self.of_torch.holds()

    def _check_torch(self) -> None:
        """Check that PyTorch's functions have not been replaced, and record them."""
        for entries in functions_of_torch().functions:
            self.of_torch.entries(entries)
        for name in GLOBAL_HOOKS:
            hooks = vars(torch_module)[name]
            if hooks:
                raise Unproven("hooks are registered for all modules")
            self.of_torch.size(hooks)
        if torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack():
            raise Unproven("a mode of PyTorch's functions is active")

    def _check_class_of_torch(self, kind: type) -> None:
        for part in kind.__mro__:
            if id(part) in self._genuine or part is object:
                continue
            self._genuine.add(id(part))
            # All functions of Module have been checked with those of other namespaces.
            names = ["forward"] if part is torch.nn.Module else list(vars(part))
            for name in names:
                value = vars(part).get(name)
                if isinstance(value, types.FunctionType):
                    if not is_of_torch(value) and defines(part, name):
                        raise Unproven(f"{part.__name__}.{name} was replaced")
                    if name == "forward":
                        self.unchanged.cell(vars(part), name, value)

    def optimizer(self, optimizer: Any) -> None:
        """Check that ``optimizer.step`` is PyTorch's own.

        Which algorithms can be recorded is decided in `cerebro.torch.optimizer_numbers`.
        """
        step = vars(optimizer).get("step")  # wrapped by PyTorch's schedulers to count calls
        if not is_of_torch(type(optimizer).step) or (
            step is not None and not is_of_torch(getattr(step, "__func__", step))
        ):
            raise Unproven(f"{type(optimizer).__name__}.step was replaced")
        self.unchanged.cell(vars(optimizer), "step", MISSING if step is None else step)


class FunctionsOfTorch:
    """PyTorch's functions, none of which was replaced.

    Attributes
    ----------
    functions
        The functions of each namespace.

    Raises
    ------
    Unproven
        A function was replaced.
    """

    def __init__(self) -> None:
        self.functions: list[Entries] = []
        self._spaces: list[tuple[Any, list[str], Entries]] = []
        for space, names in (
            (torch, [name for name in vars(torch) if hasattr(_OPERATORS, name)]),
            (functional, list(vars(functional))),
            (torch.Tensor, list(vars(torch.Tensor))),
            (torch.nn.Module, list(vars(torch.nn.Module))),
        ):
            keys, entries = list(vars(space)), Entries(vars(space), names)
            found = []
            for name, value in zip(names, entries.values, strict=False):
                if isinstance(value, types.FunctionType):
                    if not is_of_torch(value) and value.__module__ != "typing":
                        if not defines(space, name):
                            continue
                        raise Unproven(f"{space.__name__}.{name} was replaced")
                    found.append(name)
            self._spaces.append((vars(space), keys, entries))
            self.functions.append(Entries(vars(space), found))
        self._functions = [
            value
            for _, _, entries in self._spaces
            for value in entries.values
            if isinstance(value, types.FunctionType)
        ]
        self._codes = list(map(_code_of, self._functions))

    def hold(self) -> bool:
        """Return whether checking everything again would find the same."""
        return all(
            list(names) == keys and entries.hold() for names, keys, entries in self._spaces
        ) and all(map(is_, map(_code_of, self._functions), self._codes))


_code_of = attrgetter("__code__")
_functions: FunctionsOfTorch | None = None


def functions_of_torch() -> FunctionsOfTorch:
    """Return PyTorch's functions; they are checked only if something has changed since last time.

    Raises
    ------
    Unproven
        A function was replaced.
    """
    global _functions
    found = _functions
    if found is None or not found.hold():
        found = _functions = FunctionsOfTorch()
    return found


@functools.cache
def _own_names(space: Any) -> set[str]:
    """Return all names defined anywhere in the source of a PyTorch module or class."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(space)))
    except (OSError, TypeError, SyntaxError):
        return set(vars(space))
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
    return names


def defines(space: Any, name: str) -> bool:
    """Return whether PyTorch itself defines a name.

    Names that other libraries add, such as ``Module.smart_apply``, do not count, because PyTorch
    does not call them. Names that only a base class defines count, because PyTorch may call them.
    """
    if space is torch or name in _own_names(space):
        return True
    bases = space.__mro__[1:] if isinstance(space, type) else ()
    return any(name in vars(base) for base in bases)


def is_of_torch(function: Any) -> bool:
    return bool(function.__code__.co_filename.startswith(_FOLDER))


def is_of_python(function: Any) -> bool:
    """Return whether a function belongs to Python's standard library."""
    file = Path(function.__code__.co_filename)
    return file.is_relative_to(_LIBRARY) and "site-packages" not in file.parts


def is_operator(function: Any) -> bool:
    """Return whether a function calls an operator of PyTorch and does nothing else."""
    name = function.__name__
    owner = getattr(function, "__self__", None)
    if isinstance(owner, types.ModuleType):
        parts = ("_nn", "_fft", "_linalg", "_special", "_nested")
        return owner.__name__ in {f"torch._C.{part}" for part in parts}
    genuine = hasattr(_OPERATORS, name) and function.__module__ in ("torch", None)
    return owner is None and genuine and name not in READS_MEMORY | READS_NUMBERS


def is_module_of_torch(kind: type) -> bool:
    """Return whether a class belongs to ``torch.nn``; a user's subclass does not."""
    there = getattr(sys.modules.get(kind.__module__), kind.__name__, None)
    return (
        kind.__module__.startswith("torch.nn.modules.")
        and kind is not torch.nn.Module
        and there is kind
    )
