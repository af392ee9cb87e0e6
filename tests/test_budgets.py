"""What holds the size of the package: lines of each folder, fields of each class, private names.

To raise a number here is a decision: give its reason in the commit. Lower it when code has gone.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "cerebro"

LINES = {
}  # fmt: skip
"""The most lines of Python in each folder and file of the package, a little above today's."""

MOST_FIELDS = 15
MORE_FIELDS = {
}  # fmt: skip
"""Classes with more fields, and how many they may have."""

PRIVATE = {
}  # fmt: skip
"""How often a file uses private names of another folder. Everything else has none."""


@cache
def trees() -> dict[str, ast.Module]:
    """Return every module of the package, parsed, by its path in the package."""
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def place_of(path: str) -> str:
    """Return the folder or the file at the top of the package that a module belongs to."""
    return path.partition("/")[0]


def fields_of(class_: ast.ClassDef) -> set[str]:
    """Return the attributes that a class declares, or assigns to ``self`` in its methods."""
    fields = set()
    for statement in class_.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            fields.add(statement.target.id)
        for node in ast.walk(statement) if isinstance(statement, ast.FunctionDef) else ():
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id == "self":
                    fields.add(node.attr)
    return fields


def private_names(tree: ast.Module) -> set[str]:
    """Return the private names that a module defines, as names or as attributes."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
    return {name for name in names if is_private(name)}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def private_uses(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that a module imports, or reads from something other than itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cerebro"):
            yield from (alias.name for alias in node.names if is_private(alias.name))
        elif isinstance(node, ast.Attribute) and is_private(node.attr):
            of = node.value
            if not (isinstance(of, ast.Name) and of.id in ("self", "cls")):
                yield node.attr


def test_every_folder_keeps_to_its_lines() -> None:
    lines: Counter[str] = Counter()
    for path in trees():
        lines[place_of(path)] += len((PACKAGE / path).read_text(encoding="utf-8").splitlines())
    assert set(lines) == set(LINES), "give each folder and file at the top a budget, and no other"
    over = {place: count for place, count in lines.items() if count > LINES[place]}
    assert not over, f"over budget; look for lines that can go, then raise it: {over}"


def test_classes_have_few_fields() -> None:
    found = {
        f"{path}:{node.name}": len(fields_of(node))
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    over = {name: count for name, count in found.items()
            if count > MORE_FIELDS.get(name, MOST_FIELDS)}  # fmt: skip
    assert not over, f"more fields than allowed; give some of them to an object of their own: {over}"
    assert set(MORE_FIELDS) <= set(found)


def test_private_names_stay_in_their_folder() -> None:
    """Count uses of names that only other folders define."""
    defined: dict[str, set[str]] = {}
    for path, tree in trees().items():
        defined.setdefault(place_of(path), set()).update(private_names(tree))
    ours = set().union(*defined.values())
    uses: Counter[str] = Counter()
    for path, tree in trees().items():
        foreign = ours - defined[place_of(path)]
        uses[path] += sum(name in foreign for name in private_uses(tree))
    over = {path: count for path, count in uses.items() if count > PRIVATE.get(path, 0)}
    assert not over, f"private names of other folders; give them a public name or a method: {over}"
