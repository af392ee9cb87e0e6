"""Read the calls in a function: methods, built-in functions, and other ways to run code."""

from __future__ import annotations

import ast
import types
from typing import Any

import torch

from cerebro.torch.proof.expressions import ExpressionReader
from cerebro.torch.proof.genuine import is_module_of_torch
from cerebro.torch.proof.unchanged import CONTAINERS
from cerebro.torch.proof.values import DATA, NOTHING, Arguments, Each, Row, Super, Value, known

REFUSED_METHODS = {
    "apply_", "data_ptr", "is_pinned", "is_shared", "item", "map2_", "map_", "numpy", "pin_memory",
    "record_stream", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_",
    "resize_", "resize_as_", "retain_grad", "set_", "share_memory_", "storage",
    "tensor_split", "tolist", "untyped_storage",
}  # fmt: skip
"""Methods of tensors that read or change something other than the tensors' values."""

PYTHON_METHODS = {"norm", "split", "stft", "istft", "unflatten", "unique", "dim_order"}
"""Methods of tensors that PyTorch implements in Python."""

CONTAINER_METHODS = {
    "append", "copy", "count", "extend", "format", "get", "index", "insert", "items", "join",
    "keys", "pop", "reverse", "startswith", "endswith", "update", "values",
}  # fmt: skip
"""Methods of local lists, dicts and strings."""

STORES = {"append", "get", "insert", "pop"}
"""Those after which an argument may be a member, or the result."""

COPIES = {"extend", "update"}
"""Those after which the members of an argument, or a named one, may be members."""


class CallReader(ExpressionReader):
    """Read the expressions of a function's tree, including calls."""

    def _call(self, node: Any) -> Value:
        if isinstance(node.func, ast.Attribute):
            owner = self.value(node.func.value)
            arguments = self._arguments(node)
            found = NOTHING
            if owner.data:
                self._method_of_data(node.func.attr, arguments, node)
                found = DATA
            for item in owner.objects:
                found = found.joined(self._method(item, node, arguments))
            return found
        target = self.value(node.func)
        special = self._special(target, node)
        if special is not None:
            return special
        return self._proof.call(target, self._arguments(node), self.where(node))

    def _method_of_data(self, name: str, arguments: Arguments, node: Any) -> None:
        of_tensors = isinstance(
            getattr(torch._C.TensorBase, name, None), types.MethodDescriptorType
        )
        fine = (of_tensors and not name.startswith("_")) or name in PYTHON_METHODS
        if name in REFUSED_METHODS or not (fine or name in CONTAINER_METHODS):
            raise self.refuse(f".{name}()", node)
        where = self.where(node)
        for value in arguments.all():
            self._proof.data(value, where)
        if name in STORES:
            self._proof.all_stored(arguments, where)
        elif name in COPIES:
            for value in arguments.positional:
                self._proof.copied(value, where)
            self._proof.all_stored(Arguments([], arguments.named, arguments.rest), where)

    def _method(self, item: Any, node: Any, arguments: Arguments) -> Value:
        name, where = node.func.attr, self.where(node)
        if isinstance(item, (Row, Each)):
            if name not in ("index", "count", "copy"):
                raise self.refuse(f".{name}() of a list of objects is called", node)
            return DATA
        if isinstance(item, dict):
            members = self._proof._elements(item)
            if name == "keys":
                return DATA
            if name in ("values", "items"):
                return known(Each(members if name == "values" else known(Row([DATA, members]))))
            if name == "get":
                return members.joined(DATA)
        if isinstance(item, CONTAINERS) and name in ("index", "count"):
            return DATA
        if isinstance(item, CONTAINERS):
            raise self.refuse(f".{name}() of an object that outlives the step is called", node)
        value = self._proof._attribute(item, name, where)
        if isinstance(item, types.ModuleType):
            special = self._special(value, node)
            if special is not None:
                return special
        return self._proof.call(value, arguments, where)

    def _arguments(self, node: Any) -> Arguments:
        positional: list[Value] = []
        named: dict[str, Value] = {}
        rest = NOTHING
        for part in node.args:
            if not isinstance(part, ast.Starred):
                value = self.value(part)
                if rest is NOTHING:
                    positional.append(value)
                else:
                    rest = rest.joined(value)
                continue
            value = self.value(part.value)
            rows = [item for item in value.objects if isinstance(item, Row)]
            if rest is NOTHING and not value.data and len(value.objects) == len(rows) == 1:
                positional += rows[0].members
            else:
                rest = rest.joined(self._proof.iterated(value, self.where(part)))
        for word in node.keywords:
            if word.arg is None:
                rest = rest.joined(self._proof.members(self.value(word.value), self.where(word)))
            else:
                named[word.arg] = self.value(word.value)
        self._proof.data(rest, self.where(node))
        return Arguments(positional, named, rest)

    def _special(self, target: Value, node: Any) -> Value | None:
        """Return the result of a built-in function that takes objects; None for other functions."""
        if target.data or len(target.objects) != 1:
            return None
        function = target.objects[0]
        if function is super and not node.args and not node.keywords:
            cells = dict(
                zip(
                    self._function.__code__.co_freevars, self._function.__closure__ or (),
                    strict=True,
                )
            )  # fmt: skip
            first = next(iter(self._variables.values()), NOTHING)
            if "__class__" not in cells or first.data or len(first.objects) != 1:
                raise self.refuse("super() is not known", node)
            return known(Super(cells["__class__"].cell_contents, first.objects[0]))
        plain = not node.keywords and not any(isinstance(a, ast.Starred) for a in node.args)
        if function is getattr and len(node.args) == 2:
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                return self._proof.attribute(self.value(node.args[0]), name.value, self.where(node))
        if function is isinstance:
            for part in node.args[:1]:
                self.value(part)
            return DATA if _is_simple_type(self.value(node.args[1])) else None
        if function is len and plain:
            for item in self.value(node.args[0]).objects:
                if not isinstance(item, (Row, Each, *CONTAINERS)) and not is_module_of_torch(
                    type(item)
                ):
                    return None
                if isinstance(item, torch.nn.Module):
                    self._proof._elements(item)
            return DATA
        if function in (enumerate, zip, reversed, list, tuple, iter) and node.args:
            if not plain and function is not enumerate:
                self._data_arguments(node)
                return DATA
            members = [self._proof.iterated(self.value(a), self.where(node)) for a in node.args]
            if function is enumerate:
                return known(Each(known(Row([DATA, members[0]]))))
            if function is zip:
                return known(Each(known(Row(members))))
            return known(Each(members[0])) if members[0].objects else DATA
        return None

    def _data_arguments(self, node: Any) -> None:
        arguments = self._arguments(node)
        for value in (*arguments.all(), arguments.rest):
            self._proof.copied(value, self.where(node))


def _is_simple_type(value: Value) -> bool:
    """Return whether ``isinstance`` with these types runs without calling user code."""
    flat: list[Any] = []
    for item in value.objects:
        flat += item.members if isinstance(item, Row) else [known(item)]
    return not value.data and all(
        all(type(kind) in (type, torch._C._TensorMeta) or kind is torch.Tensor or
            kind is torch.nn.Parameter for kind in part.objects) and not part.data
        for part in flat
    )  # fmt: skip
