"""Prove from its source code that a step is the same program for every batch.

A recorded step repeats the operators that ran once. It may replace later steps only if the code
around the operators takes the same path every time. The proof follows the code of network, loss and
metrics, and everything that they call:

- The behavior of PyTorch's modules, losses and functions is known.
- The user's functions are read as syntax trees. Every name is resolved to the object that it refers
  to now; every call must lead to known or proven code. Branches and loops are allowed: they depend
  either on constants or on tensors, and a recording is rejected if it reads the value of a tensor.
  Code may write only local variables. It must not read clocks, generators or files; functions that
  do so are not known, so calls of them are rejected.
- Everything else that the code reads must be plain values. They are recorded in an `Unchanged` and
  compared before each unit.

The proof rejects everything that it does not know, and names the line in the user's code.
"""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.modules import container

from cerebro.torch.proof.functions import FunctionReader
from cerebro.torch.proof.genuine import (
    CONTEXTS,
    GenuineTorch,
    is_module_of_torch,
    is_of_python,
    is_of_torch,
    is_operator,
)
from cerebro.torch.proof.syntax import tree_of
from cerebro.torch.proof.unchanged import CONTAINERS, MISSING, is_hooked, is_plain
from cerebro.torch.proof.values import (
    DATA,
    NOTHING,
    SOME,
    Arguments,
    Each,
    Row,
    Super,
    Unproven,
    Value,
    known,
    name_of,
)

MOST_OBJECTS = 20_000
"""The maximum number of functions and modules that a proof follows."""

TENSORS = (torch.Tensor, torch.nn.Parameter)
_DECORATES = torch.no_grad()(lambda: None).__code__.co_filename

ATTRIBUTES = {
    "H", "L", "LU", "Q", "R", "S", "T", "U", "V", "Vh", "data", "device", "dtype", "eigenvalues",
    "eigenvectors", "grad", "imag", "indices", "is_cuda", "is_floating_point", "layout", "mH", "mT",
    "max", "min", "ndim", "nbytes", "itemsize", "names", "pivots", "real", "requires_grad", "shape",
    "type", "values", "eps", "tiny", "start", "stop", "step",
}  # fmt: skip
"""Attributes of tensors, of the tuples that operators return, and of PyTorch's numeric types."""

BUILTINS = {
    abs, all, any, bool, dict, divmod, float, int, len, list, max, min, pow, range, round, slice,
    str, sum, tuple,
}  # fmt: skip

RETURN_MEMBERS = {dict, list, max, min, slice, sum, tuple}
"""Those that return members of their arguments, or arguments."""

PYTHON_OF_TORCH = ("torch.functional", "torch.nn.functional")
"""PyTorch's Python modules whose functions are the same program for equal arguments."""

OWN_NAMES = {
    "__init__", "__module__", "__doc__", "__qualname__", "__annotations__", "__constants__",
    "__firstlineno__", "__static_attributes__", "__parameters__", "__repr__", "__annotate__",
    "__annotate_func__", "__annotations_cache__",
    "extra_repr", "forward", "reset_parameters", "training",
}  # fmt: skip
"""Names that a subclass of a PyTorch module may define without changing how the module works."""

OF_PARAMETERS = (container.ParameterList, container.ParameterDict)
"""Containers that cannot be called."""

HOOKS = (
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip


class Proof(GenuineTorch):
    """Follow the code of a step, and record in `unchanged` what the code reads."""

    def __init__(self) -> None:
        super().__init__()
        self._results: dict[Any, Value | None] = {}
        self._modules: dict[int, Any] = {}
        self._kept: list[Any] = []

    # --- modules -----------------------------------------------------------

    def module(self, module: Any, arguments: Arguments = SOME) -> Value:
        """Follow a call of a module.

        Raises
        ------
        Unproven
            The module may do something else for another batch.
        """
        kind = type(module)
        self._check_structure(module)
        if not is_module_of_torch(kind):
            return self.call(self._attribute(module, "forward", name_of(module)), arguments, "")
        if kind is torch.nn.Sequential:
            for child in module._modules.values():
                arguments = Arguments([self.call(known(child), arguments, name_of(module))])
            return arguments.positional[0] if arguments.positional else DATA
        for child in module.children():
            self.data(self.call(known(child), SOME, name_of(module)), name_of(module))
        for value in arguments.all():
            self.data(value, f"an argument of {kind.__name__}")
        return DATA

    def _check_structure(self, module: Any) -> None:
        """Check everything about a module except its ``forward``, and record its attributes."""
        if id(module) in self._modules:
            return
        self._modules[id(module)] = module
        if len(self._modules) > MOST_OBJECTS:
            raise Unproven("it has too many modules")
        kind, attributes, name = type(module), vars(module), name_of(module)
        if not isinstance(module, torch.nn.Module):
            raise Unproven(f"{name} is not a module")
        own = is_module_of_torch(kind)
        base = next((part for part in kind.__mro__ if is_module_of_torch(part)), None)
        if kind.__call__ is not torch.nn.Module.__call__ and kind not in OF_PARAMETERS:
            raise Unproven(f"{name} has a __call__() other than PyTorch's")
        self._check_class(kind)
        self.unchanged.size(attributes)
        for key in HOOKS:
            if attributes.get(key):
                raise Unproven(f"{name} has hooks")
            self.unchanged.size(attributes[key])
        for key in ("_parameters", "_buffers"):
            self.unchanged.size(attributes[key])
            for entry, tensor in attributes[key].items():
                self.unchanged.cell(attributes[key], entry, tensor)
                if tensor is None:
                    continue
                if type(tensor) not in TENSORS or is_hooked(tensor):
                    raise Unproven(f"{name}.{entry} is a tensor of a special kind, or has hooks")
                self.unchanged.tensor(tensor)
        self.unchanged.size(attributes["_modules"])
        for entry, child in attributes["_modules"].items():
            self.unchanged.cell(attributes["_modules"], entry, child)
        for key, value in attributes.items():
            if key == "forward" or (base is not None and callable(getattr(base, key, None))):
                raise Unproven(f"{name}.{key} was replaced")
            if is_plain(value):
                self.unchanged.cell(attributes, key, value)
            elif own and not key.startswith(("_backward", "_forward", "_state", "_load")):
                self._check_attribute(attributes, key, value, name)

    def _check_class(self, kind: type) -> None:
        bases = [part for part in kind.__mro__ if is_module_of_torch(part)]
        if bases:
            self._check_class_of_torch(bases[0])
        for part in kind.__mro__:
            if part in bases or part in (object, torch.nn.Module):
                continue
            for name in ("__getattr__", "__getattribute__", "_call_impl", "_wrapped_call_impl"):
                if name in vars(part):
                    raise Unproven(f"{part.__name__} has a {name}()")
            self.unchanged.size(vars(part))
            for name in vars(part) if bases else ():
                if name not in OWN_NAMES and hasattr(bases[0], name):
                    raise Unproven(f"{part.__name__} replaces {bases[0].__name__}.{name}")

    def _check_attribute(self, attributes: Any, key: str, value: Any, name: str) -> None:
        """Check an attribute of a PyTorch module that is not a plain value."""
        self.unchanged.cell(attributes, key, value)
        if key in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            return
        if key in ("_flat_weights", "_flat_weight_refs", "_all_weights", "_flat_weights_names"):
            return  # in recurrent networks: a second list of their parameters
        if isinstance(value, CONTAINERS):
            self.data(self.noted(value, f"{name}.{key}"), f"{name}.{key}")
        elif (isinstance(value, types.FunctionType) and is_of_torch(value)) or (
            isinstance(value, types.BuiltinFunctionType) and is_operator(value)
        ):
            return
        elif isinstance(value, types.FunctionType):
            self.data(self.call(known(value), SOME, name), name)
        elif type(value) not in TENSORS:
            raise Unproven(f"{name}.{key} has the unsupported type {type(value).__name__}")

    # --- values ------------------------------------------------------------

    def data(self, value: Value, where: str) -> None:
        """Raise `Unproven` unless a value can only be data."""
        for item in value.objects:
            if isinstance(item, Row):
                for member in item.members:
                    self.data(member, where)
            elif isinstance(item, Each):
                self.data(item.member, where)
            elif isinstance(item, CONTAINERS):
                self.data(self._elements(item), where)
            elif not (isinstance(item, type) and item in (int, float, bool)):
                raise Unproven(f"{name_of(item)} is used as data in {where}")

    def stored(self, value: Value, where: str) -> None:
        """Raise `Unproven` unless a value may become a member of a local container.

        Local containers are data. So no list that outlives the step may be in one: the code could
        change it there.
        """
        self.data(value, where)
        for item in value.objects:
            if isinstance(item, (list, dict, set)):
                raise Unproven(
                    f"a {type(item).__name__} that outlives the step becomes a member of another "
                    f"object in {where}"
                )
            if isinstance(item, (Row, Each, tuple, frozenset)):
                self.stored(self._elements(item), where)

    def all_stored(self, arguments: Arguments, where: str) -> None:
        """Do what :meth:`stored` does for all arguments."""
        for value in (*arguments.all(), arguments.rest):
            self.stored(value, where)

    def copied(self, value: Value, where: str) -> None:
        """Raise `Unproven` unless the members of a value may become members of a local one."""
        self.data(value, where)
        self.stored(self.members(value, where), where)

    def members(self, value: Value, where: str) -> Value:
        """Return the possible members of containers, and of dicts the values."""
        found = Value(data=value.data)
        for item in value.objects:
            if isinstance(item, (Row, Each, *CONTAINERS)):
                found = found.joined(self._elements(item))
            else:
                self.data(known(item), where)
        return found

    def noted(self, item: Any, where: str) -> Value:
        """Record an object that a name refers to, and return it as a `Value`."""
        if is_plain(item) or type(item) in TENSORS:
            if isinstance(item, torch.Tensor) and is_hooked(item):
                raise Unproven(f"a tensor has hooks in {where}")
            return DATA
        if isinstance(item, CONTAINERS):
            if type(item) not in CONTAINERS:
                raise Unproven(f"{name_of(item)} is a container of a special kind in {where}")
            self.unchanged.container(item)
        self._kept.append(item)
        return known(item)

    def _elements(self, item: Any) -> Value:
        """Return the possible values of an object's members."""
        found = NOTHING
        if isinstance(item, Row):
            for member in item.members:
                found = found.joined(member)
            return found
        if isinstance(item, Each):
            return item.member
        if isinstance(item, torch.nn.Module):
            kind = type(item)
            if isinstance(item, container.ModuleDict) or kind in OF_PARAMETERS:
                self._check_structure(item)
                return DATA
            sequence = (container.Sequential, container.ModuleList)
            if not isinstance(item, sequence) or not any(
                kind.__iter__ is base.__iter__ and kind.__getitem__ is base.__getitem__
                for base in sequence
            ):
                raise Unproven(f"{name_of(item)} is iterated over")
            self._check_structure(item)
            return Value([child for child in item._modules.values() if child is not None])
        if isinstance(item, dict):
            item = list(item.values())
        if isinstance(item, CONTAINERS):
            for member in item:
                found = found.joined(self.noted(member, name_of(item)))
            return found if item else DATA
        raise Unproven(f"{name_of(item)} is iterated over")

    def iterated(self, value: Value, where: str) -> Value:
        """Return the possible values of a loop variable that iterates over `value`."""
        found = Value(data=value.data)
        for item in value.objects:
            found = found.joined(DATA if isinstance(item, dict) else self._elements(item))
        return found

    # --- attributes --------------------------------------------------------

    def attribute(self, value: Value, name: str, where: str) -> Value:
        """Return the possible values of an attribute."""
        found = NOTHING
        if value.data:
            if name not in ATTRIBUTES:
                raise Unproven(f".{name} is read in {where}")
            found = DATA
        for item in value.objects:
            found = found.joined(self._attribute(item, name, where))
        return found

    def _attribute(self, item: Any, name: str, where: str) -> Value:
        if isinstance(item, types.ModuleType):
            if type(item) is not types.ModuleType or name not in vars(item):
                raise Unproven(f"{item.__name__}.{name} is not known in {where}")
            self.unchanged.cell(vars(item), name, vars(item)[name])
            return self.noted(vars(item)[name], where)
        if isinstance(item, Super):
            kinds = type(item.owner).__mro__
            kinds = kinds[kinds.index(item.after) + 1 :]
            return self._bound(item.owner, self._of_class(kinds, name), where)
        if isinstance(item, type):
            raw = self._of_class(item.__mro__, name)
            special = type(item) is not type or item.__module__.startswith("torch")
            if special or isinstance(raw, (classmethod, property)):
                raise Unproven(f"{item.__name__}.{name} is not known in {where}")
            return self.noted(raw.__func__ if isinstance(raw, staticmethod) else raw, where)
        functions = (types.FunctionType, functools.partial)
        if isinstance(item, functions) or not isinstance(getattr(item, "__dict__", None), dict):
            raise Unproven(f"{name_of(item)}.{name} is not known in {where}")
        return self._of_object(item, name, where)

    def _of_object(self, item: Any, name: str, where: str) -> Value:
        kind, attributes = type(item), vars(item)
        if isinstance(item, torch.nn.Module):
            self._check_structure(item)
        else:
            self._check_class(kind)
            self.unchanged.size(attributes)
        raw = self._of_class(kind.__mro__, name)
        if isinstance(raw, property):
            if not isinstance(raw.fget, types.FunctionType):
                raise Unproven(f"{name_of(item)}.{name} is not known in {where}")
            return self.call(known(types.MethodType(raw.fget, item)), Arguments(), where)
        if raw is not MISSING and hasattr(type(raw), "__set__"):
            raise Unproven(f"{name_of(item)}.{name} is not known in {where}")
        if name in attributes:
            self.unchanged.cell(attributes, name, attributes[name])
            return self.noted(attributes[name], where)
        if raw is not MISSING:
            return self._bound(item, raw, where)
        if isinstance(item, torch.nn.Module):
            for part in ("_parameters", "_buffers", "_modules"):
                if name in attributes[part]:
                    return self.noted(attributes[part][name], where)
        raise Unproven(f"{name_of(item)}.{name} is not known in {where}")

    def _of_class(self, kinds: Sequence[type], name: str) -> Any:
        for kind in kinds:
            if name in vars(kind):
                self.unchanged.cell(vars(kind), name, vars(kind)[name])
                return vars(kind)[name]
        return MISSING

    def _bound(self, owner: Any, raw: Any, where: str) -> Value:
        if isinstance(raw, types.FunctionType):
            return known(types.MethodType(raw, owner))
        if isinstance(raw, staticmethod):
            return self.noted(raw.__func__, where)
        if raw is MISSING or hasattr(type(raw), "__get__"):
            raise Unproven(f"an attribute of {name_of(owner)} is not known in {where}")
        return self.noted(raw, where)

    # --- calls -------------------------------------------------------------

    def call(self, value: Value, arguments: Arguments, where: str) -> Value:
        """Follow a call, and return its result."""
        if value.data:
            raise Unproven(f"it is not known what is called in {where}")
        found = NOTHING
        for item in value.objects:
            found = found.joined(self._call(item, arguments, where))
        return found

    def _call(self, item: Any, arguments: Arguments, where: str) -> Value:
        if isinstance(item, torch.nn.Module):
            return self.module(item, arguments)
        if isinstance(item, types.MethodType):
            if is_of_torch(item.__func__) and isinstance(item.__self__, torch.nn.Module):
                return self._method_of_torch(item, arguments, where)
            return self._call(item.__func__, arguments.after(known(item.__self__)), where)
        if isinstance(item, types.FunctionType):
            if item.__code__.co_filename == _DECORATES:  # @torch.no_grad()
                return self._decorated(item, arguments, where)
            if is_of_python(item):
                raise Unproven(f"{name_of(item)}() is called in {where}")
            if not is_of_torch(item):
                return self._function(item, arguments, where)
            if item.__module__ in PYTHON_OF_TORCH or item in (torch.is_tensor,):
                return self._known(arguments, where)
        if isinstance(item, functools.partial):
            if type(item) is not functools.partial:
                raise Unproven(f"{name_of(item)} is called in {where}")
            self.unchanged.container(item.keywords)
            first = [self.noted(value, where) for value in item.args]
            named = {key: self.noted(value, where) for key, value in item.keywords.items()}
            named |= arguments.named
            return self._call(
                item.func, Arguments([*first, *arguments.positional], named, arguments.rest), where
            )
        if isinstance(item, types.BuiltinFunctionType) and (
            is_operator(item) or getattr(item, "__self__", None) is math
        ):
            return self._known(arguments, where)
        if isinstance(item, (types.BuiltinFunctionType, type)) and item in BUILTINS:
            if item in RETURN_MEMBERS:
                self._members_returned(item, arguments, where)
            return self._known(arguments, where)
        if item in (torch.finfo, torch.iinfo, torch.Size, torch.device):
            return self._known(arguments, where)
        if isinstance(item, (type, types.BuiltinFunctionType)):
            raise Unproven(f"{name_of(item)}() is called in {where}")
        if not isinstance(item, types.FunctionType):
            method = self._of_class(type(item).__mro__, "__call__")
            if isinstance(method, types.FunctionType) and not isinstance(item, (Row, Each, Super)):
                return self._call(method, arguments.after(known(item)), where)
        raise Unproven(f"{name_of(item)}() is called in {where}")

    def _decorated(self, item: Any, arguments: Arguments, where: str) -> Value:
        cells = dict(zip(item.__code__.co_freevars, item.__closure__ or (), strict=True))
        mode = getattr(cells["ctx_factory"].cell_contents, "__self__", None)
        if {"func", "ctx_factory"} - set(cells) or type(mode) not in CONTEXTS:
            raise Unproven(f"{name_of(item)}() is called in {where}")
        for cell in cells.values():
            self.unchanged.closure(cell)
        return self._call(cells["func"].cell_contents, arguments, where)

    def _known(self, arguments: Arguments, where: str) -> Value:
        for value in arguments.all():
            self.data(value, where)
        return DATA

    def _members_returned(self, item: Any, arguments: Arguments, where: str) -> None:
        """Check that a built-in function returns nothing that outlives the step."""
        first, others = arguments.positional[:1], arguments.positional[1:]
        for value in first:
            self.copied(value, where)
        if others and item in (max, min, slice):
            others += first
        self.all_stored(Arguments(others, arguments.named, arguments.rest), where)

    def _method_of_torch(self, method: Any, arguments: Arguments, where: str) -> Value:
        """Follow a call of a method that PyTorch defines for a module."""
        module, name = method.__self__, method.__func__.__name__
        self._check_structure(module)
        if name in ("parameters", "named_parameters", "buffers", "named_buffers"):
            for part in module.modules():
                self._check_structure(part)
            return self._known(arguments, where)
        if name in ("children", "modules"):
            for part in module.modules():
                self._check_structure(part)
            return known(Each(Value(tuple(getattr(module, name)()))))
        if isinstance(module, container.ModuleDict) and name in ("items", "values", "keys"):
            children = Value(tuple(module._modules.values()))
            if name == "keys":
                return DATA
            return known(Each(children if name == "values" else known(Row([DATA, children]))))
        if name == "forward" and is_module_of_torch(_owner_of(method)):
            for child in module.children():
                self.data(self.call(known(child), SOME, where), where)
            for key, value in vars(module).items():
                if not is_plain(value) and not key.startswith("_"):
                    self._check_attribute(vars(module), key, value, name_of(module))
            return self._known(arguments, where)
        raise Unproven(f"{name_of(module)}.{name}() is called in {where}")

    def _function(self, function: types.FunctionType, arguments: Arguments, where: str) -> Value:
        """Read a user's function with these arguments; return its possible return values."""
        key = (id(function), arguments.key)
        if key in self._results:
            result = self._results[key]
            if result is None:
                raise Unproven(f"{function.__name__}() calls itself in {where}")
            return result
        if len(self._results) > MOST_OBJECTS:
            raise Unproven("it calls too many functions")
        self._results[key] = None
        self._kept.append((function, arguments))
        self.unchanged.function(function)
        tree = tree_of(function)
        if tree is None:
            raise Unproven(f"the source of {function.__name__}() is not known")
        try:
            result = FunctionReader(self, function, tree, arguments).result()
        except RecursionError:
            raise Unproven(f"{function.__name__}() is nested too deeply") from None
        self._results[key] = result
        return result


def _owner_of(method: Any) -> type:
    for kind in type(method.__self__).__mro__:
        if method.__func__ in vars(kind).values():
            return kind
    return object
