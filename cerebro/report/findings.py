"""Describe likely mistakes in a model or its data: the findings of the hop check."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

UNREAD = "unread"  # the kind of the event that no trial has read a hyperparameter
WORTH = 0.75  # share of an ordinary step's time; replayed steps are offered if they take less


def offer_graph(gain: tuple[float, float] | None) -> str:
    """Return a line that says what ``graph=True`` would bring; empty if it is not worth much.

    `gain` has the seconds of an ordinary training step and of a replayed one; None: not measured.
    """
    if gain is None or gain[1] > WORTH * gain[0]:
        return ""
    ordinary, replayed = gain
    return (
        f"graph=True would make a training step {ordinary / replayed:.1f} times as fast "
        f"({replayed * 1e3:.2g} instead of {ordinary * 1e3:.2g} ms, measured on one batch), if the "
        "step's code does the same for every batch"
    )


@dataclass(frozen=True)
class Finding:
    """A likely mistake, in one line, with a fix.

    Attributes
    ----------
    code
        The finding's name, such as ``"broadcast"``; the guide lists all names.
    message
        What was found.
    cure
        What to do, in the imperative.
    severity
        ``"matters"``: almost certainly a mistake; a search also shows it. ``"hint"``: often a
        mistake; only `cerebro.check` shows it.
    place
        The line of the user's code, as ``path:line``; empty if unknown.
    """

    code: str
    message: str
    cure: str
    severity: Literal["matters", "hint"] = "matters"
    place: str = ""

    @property
    def matters(self) -> bool:
        """Whether the finding is almost certainly a mistake, not a hint."""
        return self.severity == "matters"

    def __str__(self) -> str:
        at = f" ({PurePath(self.place).name})" if self.place else ""
        return f"{self.message}{at}: {self.cure}"
