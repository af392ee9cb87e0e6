"""Find the syntax tree of a function in its source file, checked against its compiled code.

A file may have changed since it was imported, and a function may have been replaced by another one
at the same line. The file is therefore compiled again, and a tree is used only if its code equals
the function's code.
"""

from __future__ import annotations

import ast
import functools
import linecache
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Function = ast.FunctionDef | ast.Lambda


def tree_of(function: types.FunctionType) -> Function | None:
    """Return a function's syntax tree; None if no source compiles to the function's code."""
    code = function.__code__
    text = "".join(linecache.getlines(code.co_filename, function.__globals__))
    if not text:
        return None
    for tree, compiled in _functions(text, code.co_filename).get(_key_of(code), ()):
        if _equal(compiled, code):
            return tree
    return None


def place(function: types.FunctionType, node: ast.AST) -> str:
    """Return ``FILE:LINE`` of a part of a function's tree."""
    name = Path(function.__code__.co_filename).name
    return f"{name}:{getattr(node, 'lineno', function.__code__.co_firstlineno)}"


@functools.lru_cache(maxsize=64)
def _functions(text: str, filename: str) -> dict[Any, list[tuple[Function, types.CodeType]]]:
    """Return the functions of a file by name and first line."""
    try:
        tree = ast.parse(text)
        whole = compile(text, filename, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return {}
    trees: dict[Any, list[Function]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            line = min([node.lineno, *(part.lineno for part in node.decorator_list)])
            trees.setdefault((node.name, line), []).append(node)
        elif isinstance(node, ast.Lambda):
            trees.setdefault(("<lambda>", node.lineno), []).append(node)
    found: dict[Any, list[tuple[Function, types.CodeType]]] = {}
    for code in _codes(whole):
        nodes = trees.get(_key_of(code), [])
        if len(nodes) > 1:
            nodes = [node for node in nodes if _is_at(code, node)]
        if len(nodes) == 1:
            found.setdefault(_key_of(code), []).append((nodes[0], code))
    return found


def _key_of(code: types.CodeType) -> tuple[str, int]:
    return code.co_name, code.co_firstlineno


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)


def _is_at(code: types.CodeType, node: Function) -> bool:
    """Return whether code belongs to the lambda `node`, to distinguish lambdas on the same line.

    Always False on Python 3.10, whose code objects have no columns.
    """
    if not isinstance(node, ast.Lambda) or not hasattr(code, "co_positions"):
        return False
    body = node.body
    place = (body.lineno, body.end_lineno, body.col_offset, body.end_col_offset)
    return place in list(code.co_positions())


def _equal(one: types.CodeType, two: types.CodeType) -> bool:
    return bool(_parts(one) == _parts(two))


def _parts(code: types.CodeType) -> Any:
    constants = [
        _parts(c) if isinstance(c, types.CodeType) else (type(c), repr(c)) for c in code.co_consts
    ]
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    return code.co_name, code.co_code, constants, counts, names
