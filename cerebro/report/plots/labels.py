"""Shorten names and values so that they fit into a plot."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from cerebro.report import format as fmt


def escape_dollars(text: str) -> str:
    """Return text escaped so that matplotlib draws dollars literally, not as formulas."""
    return text.replace("$", r"\$")


def cut_end(text: str, width: int) -> str:
    """Shorten text at its end."""
    return text if len(text) <= width else f"{text[: width - 1]}…"


def cut_middle(text: str, width: int) -> str:
    """Shorten text in its middle, because many names differ only at their ends."""
    if len(text) <= width:
        return text
    end = (width - 1) // 2
    return f"{text[: width - 1 - end]}…{text[len(text) - end :]}"


def wrap(text: str, width: int, most: int) -> str:
    """Break a name after underscores, dots and the like, into at most `most` lines."""
    text = cut_middle(text, width * most)
    lines = [""]
    for part in re.split(r"(?<=[-_./ ])", text):
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part
    if len(lines) > most or max(map(len, lines)) > width:
        lines = [text[at : at + width] for at in range(0, len(text), width)]
    return escape_dollars("\n".join(line.strip() for line in lines))


def tick_labels(values: Sequence[Any], width: int) -> list[str]:
    """Write distinct values as distinct labels, as short as possible."""
    writers: tuple[Callable[[Any], str], ...] = (
        lambda value: cut_end(fmt.number(value, 3), width),
        lambda value: cut_middle(str(value), width),
        lambda value: cut_middle(repr(value), width),
    )
    for write in writers:
        labels = [write(value) for value in values]
        if len(set(labels)) == len(labels):
            return labels
    return [repr(value) for value in values]
