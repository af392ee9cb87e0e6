"""Read the expressions of a function: find their possible values, and what they read.

Names are resolved to the objects that they refer to now, and these are recorded in the proof. Calls
are read in `cerebro.torch.proof.calls`.
"""

from __future__ import annotations

import ast
import builtins
import types
from typing import Any, Protocol

import torch
from torch.nn.modules import container

from cerebro.torch.proof.genuine import is_module_of_torch
from cerebro.torch.proof.syntax import Function, place
from cerebro.torch.proof.unchanged import CONTAINERS, MISSING, Unchanged, is_plain
from cerebro.torch.proof.values import (
    DATA,
    NOTHING,
    Arguments,
    Each,
    Row,
    Unproven,
    Value,
    known,
    name_of,
)


class Follower(Protocol):
    """The methods of `cerebro.torch.proof.same_program.Proof` that reading a function needs."""

    unchanged: Unchanged

    def call(self, value: Value, arguments: Arguments, where: str) -> Value: ...

    def data(self, value: Value, where: str) -> None: ...

    def stored(self, value: Value, where: str) -> None: ...

    def all_stored(self, arguments: Arguments, where: str) -> None: ...

    def copied(self, value: Value, where: str) -> None: ...

    def members(self, value: Value, where: str) -> Value: ...

    def noted(self, item: Any, where: str) -> Value: ...

    def iterated(self, value: Value, where: str) -> Value: ...

    def attribute(self, value: Value, name: str, where: str) -> Value: ...

    def _attribute(self, item: Any, name: str, where: str) -> Value: ...

    def _elements(self, item: Any) -> Value: ...


class ExpressionReader:
    """Read the expressions of a function's syntax tree.

    The order of assignments is ignored: a variable may have any value that the function assigns.
    """

    def __init__(self, proof: Follower, function: types.FunctionType, tree: Function) -> None:
        self._proof = proof
        self._function = function
        self._variables: dict[str, Value] = {}
        self._last = False
        self._locals = _local_names(self, tree)

    def where(self, node: ast.AST) -> str:
        return place(self._function, node)

    def refuse(self, what: str, node: ast.AST) -> Unproven:
        return Unproven(f"{what} in {self.where(node)}")

    def value(self, node: Any) -> Value:
        """Return the possible values of an expression."""
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if not isinstance(node, EXPRESSIONS) or method is None:
            raise self.refuse(f"'{word_of(node)}' is not supported", node)
        return method(node)  # type: ignore[no-any-return]

    def _data(self, node: Any) -> Value:
        if node is not None:
            self._proof.data(self.value(node), self.where(node))
        return DATA

    def _truth(self, node: Any) -> None:
        for item in self.value(node).objects:
            simple = (Row, Each, *CONTAINERS, types.FunctionType, types.BuiltinFunctionType)
            special = any(
                name in vars(kind)
                for kind in type(item).__mro__
                for name in ("__bool__", "__len__")
                if not is_module_of_torch(kind)
            )
            if not isinstance(item, simple) and special:
                raise self.refuse(f"whether {name_of(item)} is true is not known", node)
            if isinstance(item, torch.nn.Module) and hasattr(type(item), "__len__"):
                self._proof._elements(item)  # an empty list of modules is false

    def _constant(self, node: Any) -> Value:
        return DATA

    def _name(self, node: Any) -> Value:
        name = node.id
        if name in self._locals:
            value = self._variables.get(name, NOTHING)
            if self._last and not value.objects and not value.data:
                raise self.refuse(f"{name!r} has no value", node)
            return value
        function, unchanged = self._function, self._proof.unchanged
        free = function.__code__.co_freevars
        if name in free:
            cell = (function.__closure__ or ())[free.index(name)]
            try:
                item = cell.cell_contents
            except ValueError:
                raise self.refuse(f"{name!r} has no value", node) from None
            unchanged.closure(cell)
            return self._proof.noted(item, self.where(node))
        names: dict[str, Any] = function.__globals__
        if name in names:
            unchanged.cell(names, name, names[name])
            return self._proof.noted(names[name], self.where(node))
        if not hasattr(builtins, name):
            raise self.refuse(f"{name!r} has no value", node)
        unchanged.cell(names, name, MISSING)
        unchanged.cell(vars(builtins), name, getattr(builtins, name))
        return known(getattr(builtins, name))

    def _attribute(self, node: Any) -> Value:
        name = node.attr
        if name.startswith("__") and not name.endswith("__"):
            mangled = [n for n in self._function.__code__.co_names if n.endswith(name)]
            if len(mangled) != 1:
                raise self.refuse(f"the attribute .{name} is not known", node)
            name = mangled[0]
        return self._proof.attribute(self.value(node.value), name, self.where(node))

    def _binop(self, node: Any) -> Value:
        for part in (node.left, node.right):
            self._proof.copied(self.value(part), self.where(node))
        return DATA

    def _unaryop(self, node: Any) -> Value:
        if isinstance(node.op, ast.Not):
            self._truth(node.operand)
            return DATA
        return self._data(node.operand)

    def _boolop(self, node: Any) -> Value:
        found = NOTHING
        for part in node.values:
            self._truth(part)
            found = found.joined(self.value(part))
        return found

    def _compare(self, node: Any) -> Value:
        identity = all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops)
        for part in (node.left, *node.comparators):
            value = self.value(part)
            if not identity:
                self._proof.data(value, self.where(node))
        return DATA

    def _ifexp(self, node: Any) -> Value:
        decided = self._decided(node.test)
        if decided is not None:
            return self.value(node.body if decided else node.orelse)
        self._truth(node.test)
        return self.value(node.body).joined(self.value(node.orelse))

    def _decided(self, node: Any) -> bool | None:
        """Return the truth of a condition on constants; None if it depends on anything else."""
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self._decided(node.operand)
            return None if inner is None else not inner
        if isinstance(node, ast.BoolOp):
            ends = isinstance(node.op, ast.Or)
            for part in node.values:  # later operands are not evaluated
                decided = self._decided(part)
                if decided is None or decided is ends:
                    return decided
            return not ends
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            left, right = self._fixed(node.left), self._fixed(node.comparators[0])
            if left is MISSING or right is MISSING:
                return None
            if isinstance(node.ops[0], (ast.Is, ast.IsNot)) and right is None:
                return (left is None) is isinstance(node.ops[0], ast.Is)
            if isinstance(node.ops[0], (ast.Eq, ast.NotEq)) and is_plain(left) and is_plain(right):
                return bool(left == right) is isinstance(node.ops[0], ast.Eq)
            return None
        value = self._fixed(node)
        return bool(value) if value is not MISSING and is_plain(value) else None

    def _fixed(self, node: Any) -> Any:
        """Return the value of a constant, global or attribute; `MISSING` for other expressions."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name) and node.id not in self._locals:
            self.value(node)
            free = self._function.__code__.co_freevars
            if node.id in free:
                return (self._function.__closure__ or ())[free.index(node.id)].cell_contents
            return self._function.__globals__.get(node.id, MISSING)
        if isinstance(node, ast.Attribute):
            owner = self.value(node.value)
            if owner.data or len(owner.objects) != 1:
                return MISSING
            item = owner.objects[0]
            self._proof.attribute(owner, node.attr, self.where(node))
            if isinstance(item, torch.nn.Module):
                for names in (vars(item), item._modules, item._parameters, item._buffers):
                    if node.attr in names:
                        return names[node.attr]
        return MISSING

    def _tuple(self, node: Any) -> Value:
        members: list[Value] = []
        for part in node.elts:
            if isinstance(part, ast.Starred):
                value = self.value(part.value)
                rows = [item for item in value.objects if isinstance(item, Row)]
                if value.data or len(rows) != len(value.objects) or len(rows) != 1:
                    self._proof.copied(value, self.where(part))
                    return DATA
                members += rows[0].members
            else:
                members.append(self.value(part))
        if all(value.data and not value.objects for value in members):
            return DATA
        return known(Row(members))

    _list = _tuple

    def _dict(self, node: Any) -> Value:
        for key, part in zip(node.keys, node.values, strict=True):
            self._data(key)
            value = self.value(part)
            if key is None:  # **value
                self._proof.copied(value, self.where(part))
            else:
                self._proof.stored(value, self.where(part))
        return DATA

    def _starred(self, node: Any) -> Value:
        return self._data(node.value)

    def _comprehension(self, node: Any) -> None:
        for part in node.generators:
            if part.is_async:
                raise self.refuse("'async' is not supported", node)
            self._assigned(
                part.target, self._proof.iterated(self.value(part.iter), self.where(node))
            )
            for test in part.ifs:
                self._truth(test)

    def _listcomp(self, node: Any) -> Value:
        self._comprehension(node)
        value = self.value(node.elt)
        return DATA if not value.objects else known(Each(value))

    _generatorexp = _listcomp

    def _dictcomp(self, node: Any) -> Value:
        self._comprehension(node)
        self._data(node.key)
        self._proof.stored(self.value(node.value), self.where(node))
        return DATA

    def _joinedstr(self, node: Any) -> Value:
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self._data(part.value)
        return DATA

    def _namedexpr(self, node: Any) -> Value:
        value = self.value(node.value)
        self._set(node.target.id, value)
        return value

    def _slice(self, node: Any) -> Value:
        for part in (node.lower, node.upper, node.step):
            self._data(part)
        return DATA

    def _subscript(self, node: Any) -> Value:
        self._data(node.slice)
        value = self.value(node.value)
        found = Value(data=value.data)
        for item in value.objects:
            one = self._chosen(item, node.slice)
            if one is not None:
                found = found.joined(one)
                continue
            members = self._proof._elements(item)
            if isinstance(item, container.ModuleDict):
                members = Value(tuple(item._modules.values()))
            if isinstance(node.slice, ast.Slice) and members.objects:
                members = known(Each(members))
            found = found.joined(members)
        return found

    def _chosen(self, item: Any, index: Any) -> Value | None:
        """Return the member at a constant index; None if the index is not a constant."""
        sign = 1
        if isinstance(index, ast.UnaryOp) and isinstance(index.op, ast.USub):
            sign, index = -1, index.operand
        if not isinstance(index, ast.Constant):
            return None
        if isinstance(item, torch.nn.Module):
            self._proof._elements(item)
            named = isinstance(item, container.ModuleDict)
            members: Any = item._modules if named else list(item._modules.values())
        elif isinstance(item, Row):
            members = item.members
        elif isinstance(item, (list, tuple, dict)):
            members = item
        else:
            return None
        wanted: Any = index.value
        try:
            member = members[-wanted if sign == -1 else wanted]
        except (LookupError, TypeError):
            return None
        return member if isinstance(member, Value) else self._proof.noted(member, self.where(index))

    # --- assignments -------------------------------------------------------

    def _set(self, name: str, value: Value) -> None:
        self._variables[name] = self._variables.get(name, NOTHING).joined(value)

    def _assigned(self, target: Any, value: Value) -> None:
        if isinstance(target, ast.Name):
            self._set(target.id, value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            for index, part in enumerate(target.elts):
                if isinstance(part, ast.Starred):
                    self._assigned(part.value, known(Each(self._proof.iterated(value, ""))))
                else:
                    self._assigned(part, self._member(value, index, len(target.elts)))
        elif isinstance(target, ast.Subscript):
            self._data(target.slice)
            into = self.value(target.value)
            if into.objects or not into.data:
                raise self.refuse("an object that outlives the step is changed", target)
            self._proof.stored(value, self.where(target))
        elif isinstance(target, ast.Attribute):
            raise self.refuse(f"the attribute .{target.attr} is written", target)
        else:
            raise self.refuse("this kind of assignment is not supported", target)

    def _member(self, value: Value, index: int, count: int) -> Value:
        found = Value(data=value.data)
        for item in value.objects:
            if isinstance(item, Row) and len(item.members) == count:
                found = found.joined(item.members[index])
            else:
                found = found.joined(self._proof.iterated(known(item), ""))
        return found


def _local_names(reader: ExpressionReader, tree: Function) -> set[str]:
    """Return the names of a function's variables, including those of its comprehensions."""
    spec = tree.args
    given = [*spec.posonlyargs, *spec.args, *spec.kwonlyargs, spec.vararg, spec.kwarg]
    outside = {argument.arg for argument in given if argument is not None}
    inside: set[str] = set()
    read: set[str] = set()

    def visit(node: ast.AST, within: bool) -> None:
        if isinstance(node, (ast.ListComp, ast.GeneratorExp, ast.DictComp)):
            within = True
        if isinstance(node, ast.Name):
            if isinstance(node.ctx, ast.Load):
                if not within:
                    read.add(node.id)
            elif isinstance(node.ctx, ast.Del):
                raise reader.refuse("'del' is not supported", node)
            else:
                (inside if within else outside).add(node.id)
        elif isinstance(node, ast.NamedExpr):
            outside.add(node.target.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            outside.update((a.asname or a.name.partition(".")[0]) for a in node.names)
        for child in ast.iter_child_nodes(node):
            visit(child, within)

    for part in tree.body if isinstance(tree, ast.FunctionDef) else [tree.body]:
        visit(part, False)
    both = (inside - outside) & read
    if both:
        raise reader.refuse(f"{min(both)!r} is the name of two variables", tree)
    return outside | inside


def word_of(node: Any) -> str:
    return WORDS.get(type(node), type(node).__name__.lower())


EXPRESSIONS = (
    ast.Constant, ast.Name, ast.Attribute, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare,
    ast.IfExp, ast.Tuple, ast.List, ast.Dict, ast.Starred, ast.ListComp, ast.GeneratorExp,
    ast.DictComp, ast.JoinedStr, ast.NamedExpr, ast.Slice, ast.Subscript, ast.Call,
)  # fmt: skip

WORDS: dict[type, str] = {
    ast.FunctionDef: "def", ast.ClassDef: "class", ast.AsyncFunctionDef: "async def",
    ast.AsyncFor: "async for", ast.AsyncWith: "async with", ast.Delete: "del",
}  # fmt: skip
