"""The documentation: links lead somewhere, code blocks are Python, the reference is complete."""

from __future__ import annotations

import ast
import doctest
import re
import textwrap
from pathlib import Path

import pytest

import cerebro

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path
    for path in [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        ROOT / "csrc" / "README.md",
    ]
    if path.name != "CHANGELOG.md"
)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """Return a page's headings as GitHub and MkDocs link them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_have_targets(page: Path) -> None:
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_code_blocks_are_python(page: Path) -> None:
    for _, language, code in FENCE.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            code = textwrap.dedent(code)
            session = doctest.DocTestParser().get_examples(code)
            ast.parse("".join(each.source for each in session) if session else code)


def test_the_reference_has_every_public_name() -> None:
    pages = (ROOT / "docs" / "api").glob("*.md")
    listed = re.findall(r"^::: (\S+)$", "\n".join(page.read_text() for page in pages), re.M)
    covered = set(listed) | {name.rpartition(".")[0] for name in listed}
    errors = {name for name in cerebro.__all__ if name in vars(cerebro.errors)}
    values = {"__version__", "last"}
    wanted = {f"cerebro.{name}" for name in {*dir(cerebro), "open"} - errors - values}
    modules = {"cerebro.data", "cerebro.searchers", "cerebro.space"}  # their names are above
    assert wanted - covered - modules == set()
