"""The messages on the troubleshooting page are messages of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import cerebro

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
CITED = re.findall(r"^### `(.+)`$", PAGE, re.MULTILINE)


def texts() -> list[str]:
    """Return the texts of all sources, with a line break where a value is inserted."""
    found = []
    for source in Path(cerebro.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (v.value if isinstance(v, ast.Constant) else "\n" for v in node.values)
                found.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
    return found


TEXTS = texts()


def is_message(cited: str) -> bool:
    """Whether one text of the code has the words of a message, in their order."""
    words = [part.strip() for part in cited.split("...")]
    return any(_in_order(words, text) for text in TEXTS)


def _in_order(words: list[str], text: str) -> bool:
    at = 0
    for part in words:
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


def test_many_messages_are_explained() -> None:
    assert len(CITED) >= 35
    assert len(set(CITED)) == len(CITED)


@pytest.mark.parametrize("cited", CITED)
def test_a_cited_message_stands_in_the_code(cited: str) -> None:
    assert is_message(cited)


def test_an_invented_message_is_not_in_the_code() -> None:
    assert not is_message("the run ... has been eaten by ...")
