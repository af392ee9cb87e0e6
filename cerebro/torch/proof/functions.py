"""Read a user's function: its arguments, its statements and its return value."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Sequence
from typing import Any

from cerebro.torch.proof.calls import CallReader
from cerebro.torch.proof.expressions import Follower, word_of
from cerebro.torch.proof.genuine import CONTEXTS
from cerebro.torch.proof.syntax import Function
from cerebro.torch.proof.values import DATA, NOTHING, Arguments, Each, Row, Value, known

STATEMENTS = (
    ast.Expr, ast.Pass, ast.Break, ast.Continue, ast.Return, ast.Assign, ast.AnnAssign,
    ast.AugAssign, ast.If, ast.While, ast.For, ast.Assert, ast.Raise, ast.With, ast.Import,
    ast.ImportFrom,
)  # fmt: skip


class FunctionReader(CallReader):
    """Read a function's syntax tree for given arguments."""

    def __init__(
        self, proof: Follower, function: types.FunctionType, tree: Function, arguments: Arguments
    ) -> None:
        super().__init__(proof, function, tree)
        self._tree = tree
        self._result = NOTHING
        self._bind(arguments)

    def result(self) -> Value:
        """Return the possible return values of the function.

        The body is read repeatedly until no variable gets a new possible value.
        """
        body = self._tree.body
        while True:
            before = {name: value.key for name, value in self._variables.items()}
            if isinstance(self._tree, ast.Lambda):
                self._result = self.value(body)
            else:
                self._result = NOTHING
                self._statements(body)
            if before == {name: value.key for name, value in self._variables.items()}:
                if self._last:
                    break
                self._last = True
        if isinstance(self._tree, ast.FunctionDef) and not self._result.objects:
            return DATA  # the function returns None
        return self._result

    def _bind(self, given: Arguments) -> None:
        spec, function = self._tree.args, self._function
        names = [argument.arg for argument in (*spec.posonlyargs, *spec.args)]
        defaults = dict(zip(reversed(names), reversed(function.__defaults__ or ()), strict=False))
        defaults |= function.__kwdefaults__ or {}
        positional, named = list(given.positional), dict(given.named)
        for name in [*names, *(argument.arg for argument in spec.kwonlyargs)]:
            value = NOTHING
            if positional and name in names:
                value = positional.pop(0)
            elif name in named:
                value = named.pop(name)
            else:
                if name in defaults:
                    value = self._proof.noted(defaults[name], self.where(self._tree))
                value = value.joined(given.rest)
            self._set(name, value)
        if spec.vararg is not None:
            more = _any_of([*positional, given.rest])
            self._set(
                spec.vararg.arg,
                known(Each(more)) if given.may_be_more else known(Row(positional)),
            )
        if spec.kwarg is not None:
            for value in (*named.values(), given.rest):
                self._proof.stored(value, self.where(self._tree))
            self._set(spec.kwarg.arg, DATA)

    # --- statements --------------------------------------------------------

    def _statements(self, nodes: Any) -> None:
        for node in nodes:
            method = getattr(self, f"_{type(node).__name__.lower()}", None)
            if not isinstance(node, STATEMENTS) or method is None:
                raise self.refuse(f"'{word_of(node)}' is not supported", node)
            method(node)

    def _expr(self, node: Any) -> None:
        self.value(node.value)

    def _pass(self, node: Any) -> None:
        pass

    _break = _continue = _pass

    def _return(self, node: Any) -> None:
        value = DATA if node.value is None else self.value(node.value)
        self._result = self._result.joined(value)

    def _assign(self, node: Any) -> None:
        value = self.value(node.value)
        for target in node.targets:
            self._assigned(target, value)

    def _annassign(self, node: Any) -> None:
        if node.value is not None:
            self._assigned(node.target, self.value(node.value))

    def _augassign(self, node: Any) -> None:
        self._proof.copied(self.value(node.value), self.where(node))
        if not isinstance(node.target, ast.Name):
            self._assigned(node.target, DATA)
            return
        value = self._variables.get(node.target.id, NOTHING)
        if any(not isinstance(item, Row) for item in value.objects):
            raise self.refuse(f"{node.target.id!r} is changed", node)
        self._proof.copied(value, self.where(node))
        self._set(node.target.id, DATA)

    def _if(self, node: Any) -> None:
        decided = self._decided(node.test)
        if decided is None:
            self._truth(node.test)
        if decided is not False:
            self._statements(node.body)
        if decided is not True:
            self._statements(node.orelse)

    def _while(self, node: Any) -> None:
        self._truth(node.test)
        self._statements(node.body)
        self._statements(node.orelse)

    def _for(self, node: Any) -> None:
        self._assigned(node.target, self._proof.iterated(self.value(node.iter), self.where(node)))
        self._statements(node.body)
        self._statements(node.orelse)

    def _assert(self, node: Any) -> None:
        self._truth(node.test)

    def _raise(self, node: Any) -> None:
        pass  # an exception ends the trial

    def _with(self, node: Any) -> None:
        for item in node.items:
            call = item.context_expr
            target = self.value(call.func) if isinstance(call, ast.Call) else DATA
            if (
                target.data
                or item.optional_vars is not None
                or not all(context in CONTEXTS for context in target.objects)
            ):
                what = "'with' something other than a mode of PyTorch's, such as torch.no_grad(),"
                raise self.refuse(f"{what} is not supported", node)
            for argument in (*call.args, *(word.value for word in call.keywords)):
                self._data(argument)
        self._statements(node.body)

    def _import(self, node: Any) -> None:
        for alias in node.names:
            name = alias.name if alias.asname else alias.name.partition(".")[0]
            self._imported(name, alias.asname or name, node)

    def _importfrom(self, node: Any) -> None:
        for alias in node.names:
            if node.level or alias.name == "*" or node.module not in sys.modules:
                raise self.refuse("an import is not supported", node)
            module = sys.modules[node.module]
            value = self._proof.attribute(known(module), alias.name, self.where(node))
            self._set(alias.asname or alias.name, value)

    def _imported(self, name: str, under: str, node: Any) -> None:
        if name not in sys.modules:
            raise self.refuse("an import is not supported", node)
        self._proof.unchanged.cell(sys.modules, name, sys.modules[name])
        self._set(under, known(sys.modules[name]))


def _any_of(values: Sequence[Value]) -> Value:
    found = NOTHING
    for value in values:
        found = found.joined(value)
    return found
