"""Draws docs/design/map.svg: the folders of the package, their purposes and their imports.

    python docs/design/map.py draw the picture python docs/design/map.py --check fail if the picture
    does not match the imports

A box is on the lowest floor above everything it imports. Implied lines are left out: if `api`
imports `coordinator` and `coordinator` imports `run`, no line is drawn from `api` to `run`.
"""

from __future__ import annotations

import ast
import sys
from html import escape
from pathlib import Path

HERE = Path(__file__).resolve().parent
PACKAGE = HERE.parent.parent / "cerebro"
PICTURE = HERE / "map.svg"

BOX, GAP, LINE, FLOOR = 214, 26, 14, 96
LEFT_OUT = {"", "__main__"}  # importable from everywhere; only starts the command line
LOW_DOORS = {
    "callbacks",
    "ray",
    "results",
    "searchers",
    "torch",
}  # open `integrations` when a name is first used


def top_of(file: Path) -> str:
    """Return a file's top-level folder in the package, or its own name."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return "" if parts == ("__init__",) else parts[0]


def imports() -> dict[str, set[str]]:
    """Map each folder to its imports: at the top of files, inside functions and for types."""
    files = sorted(PACKAGE.rglob("*.py"))
    names = {top_of(file) for file in files} - LEFT_OUT
    found: dict[str, set[str]] = {name: set() for name in names}
    for file in files:
        if (own := top_of(file)) in LEFT_OUT:
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            for module in modules:
                parts = module.split(".")
                if parts[1:2] == ["integrations"] and own in LOW_DOORS:
                    continue
                if parts[0] == "cerebro" and len(parts) > 1 and parts[1] in names - {own}:
                    found[own].add(parts[1])
    found["cli"] |= {
        "api",
        "cluster",
        "optuna",
        "ray",
        "sklearn",
        "testing",
    }  # by their public names
    return found


def floors(found: dict[str, set[str]]) -> dict[str, int]:
    """The floor of each box; the ground floor is 0."""
    level: dict[str, int] = {}

    def of(name: str) -> int:
        if name not in level:
            level[name] = 1 + max((of(other) for other in found[name]), default=-1)
        return level[name]

    for name in sorted(found):
        of(name)
    return level


def reduced(found: dict[str, set[str]]) -> list[tuple[str, str]]:
    """The lines that are not implied by others."""
    below: dict[str, set[str]] = {}

    def all_below(name: str) -> set[str]:
        if name not in below:
            below[name] = found[name].union(*(all_below(other) for other in found[name]))
        return below[name]

    return sorted(
        (name, other)
        for name in found
        for other in found[name]
        if not any(other in all_below(third) for third in found[name] - {other})
    )


def sentence(name: str) -> str:
    """The first sentence of a folder's or file's docstring."""
    folder = PACKAGE / name / "__init__.py"
    file = folder if folder.exists() else PACKAGE / f"{name}.py"
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split()).split(". ")[0].rstrip(".")


def wrapped(text: str, width: int = 35, most: int = 3) -> list[str]:
    lines = [""]
    for word in text.replace("`", "").split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    if len(lines) > most:
        lines = [*lines[: most - 1], lines[most - 1] + " ..."]
    return lines


def picture() -> str:
    found = imports()
    level = floors(found)
    rows: list[list[str]] = [[] for _ in range(max(level.values()) + 1)]
    for name in sorted(level):
        rows[level[name]].append(name)
    width = max(len(row) for row in rows) * (BOX + GAP) + 2 * GAP
    height = len(rows) * FLOOR + GAP
    place = {}
    for floor, row in enumerate(rows):
        # Single boxes alternate sides, so that lines past them are visible.
        shift = (0 if len(row) > 1 else (-1, 0, 1, 0)[floor % 4]) * (BOX + GAP) * 0.8
        left = (width - len(row) * (BOX + GAP) + GAP) / 2 + shift
        for column, name in enumerate(row):
            place[name] = (left + column * (BOX + GAP), height - (floor + 1) * FLOOR)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" font-family="sans-serif">',
        "<title>The folders of cerebro, and what imports what</title>",
        f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>',
    ]
    box_height = FLOOR - 34
    for name, other in reduced(found):
        (x, y), (u, v) = place[name], place[other]
        x, u, y = x + BOX / 2, u + BOX / 2, y + box_height
        middle = (y + v) / 2
        parts.append(
            f'<path d="M{x:.0f} {y:.0f} C{x:.0f} {middle:.0f} {u:.0f} {middle:.0f} {u:.0f} {v:.0f}"'
            " "
            'fill="none" stroke="#8a94a6" stroke-width="1.2"/>'
        )
    for name, (x, y) in sorted(place.items()):
        is_folder = (PACKAGE / name / "__init__.py").exists()
        parts.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{BOX}" height="{box_height}" rx="5" '
            f'fill="{"#e8eef8" if is_folder else "#f6f3ea"}" stroke="#5b6b84"/>'
        )
        title = name + ("/" if is_folder else ".py")
        parts.append(
            f'<text x="{x + 10:.0f}" y="{y + 17:.0f}" font-size="13" font-weight="bold" '
            f'fill="#16202e">{escape(title)}</text>'
        )
        for line, text in enumerate(wrapped(sentence(name))):
            parts.append(
                f'<text x="{x + 10:.0f}" y="{y + 31 + line * LINE * 0.92:.0f}" font-size="10.5" '
                f'fill="#3b4656">{escape(text)}</text>'
            )
    return "\n".join([*parts, "</svg>", ""])


def main(arguments: list[str]) -> int:
    drawn = picture()
    if arguments == ["--check"]:
        if not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != drawn:
            print(f"{PICTURE} is out of date: run python docs/design/map.py", file=sys.stderr)
            return 1
        return 0
    PICTURE.write_text(drawn, encoding="utf-8")
    print(PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
