"""How figures and tables are written on the page."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

NONE = "-"


def number(value: float | None, digits: int = 3) -> str:
    """Write a figure with a few digits."""
    if value is None:
        return NONE
    if value == 0 or abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}"


def megabytes(value: float | None) -> str:
    """Write bytes as megabytes."""
    return NONE if value is None else number(value / 1e6)


def spread(known: Sequence[float], write: Callable[[float], str] = number) -> str:
    """Write a median, and the least and the most if they differ."""
    if not known:
        return NONE
    text = write(statistics.median(known))
    if len(known) > 1 and write(min(known)) != write(max(known)):
        text += f" ({write(min(known))} to {write(max(known))})"
    return text


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
