"""Define the style of plots on white and on dark pages."""

from __future__ import annotations

import contextlib
import functools
import io
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cerebro.machine.imports import import_extra

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Look:
    """The colors of a plot."""

    page: str
    ink: str  # text
    dim: str  # remarks
    faint: str  # background elements, such as the curves of most trials
    grid: str
    accent: str  # the best trial
    runners_up: tuple[str, str, str, str]
    shades: tuple[float, float]  # the part of the color map that is readable on the page


LIGHT = Look(
    page="#ffffff",
    ink="#1f2933",
    dim="#66717d",
    faint="#c3cad3",
    grid="#e6e9ed",
    accent="#d1495b",
    runners_up=("#2e6f9e", "#3f9e8c", "#8a63b0", "#c58a2b"),
    shades=(0.05, 0.9),
)
DARK = Look(
    page="#14181d",
    ink="#e4e8ed",
    dim="#9aa5b1",
    faint="#4a5561",
    grid="#272e36",
    accent="#ff6b7d",
    runners_up=("#62a9dd", "#55c2ad", "#b995e2", "#e0ab55"),
    shades=(0.25, 1.0),
)


@functools.cache
def figure_class() -> type[Figure]:
    """Return a class of figures that a notebook shows; raise InputError without matplotlib."""
    import_extra("matplotlib", "plots", "plots need matplotlib")
    from matplotlib.figure import Figure

    class Plot(Figure):
        """A figure that a notebook shows whether or not pyplot was imported."""

        lacks_glyphs = False  # if true, a warning has said so, and matplotlib need not

        def draw(self, renderer: Any) -> None:
            with warnings.catch_warnings() if self.lacks_glyphs else contextlib.nullcontext():
                if self.lacks_glyphs:
                    warnings.filterwarnings("ignore", "Glyph .* missing from")
                super().draw(renderer)

        def _repr_png_(self) -> bytes:
            out = io.BytesIO()
            self.savefig(out, format="png")
            return out.getvalue()

    return Plot


def is_style_dark() -> bool:
    """Return whether matplotlib's current style is dark; raise InputError without matplotlib."""
    import_extra("matplotlib", "plots", "plots need matplotlib")
    from matplotlib import rcParams
    from matplotlib.colors import to_rgb

    return sum(to_rgb(rcParams["figure.facecolor"])) < 1.5


def empty_figure(look: Look, width: float, height: float) -> Figure:
    """Return a figure without axes; `width` and `height` are in inches."""
    return figure_class()(
        figsize=(width, height), dpi=120, layout="constrained", facecolor=look.page
    )


def figure_of(look: Look, width: float, height: float) -> tuple[Figure, Axes]:
    figure = empty_figure(look, width, height)
    axes = figure.add_subplot()
    clean_axes(look, axes)
    return figure, axes


def clean_axes(look: Look, axes: Axes) -> None:
    axes.set_facecolor(look.page)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(look.faint)
    axes.tick_params(which="both", colors=look.ink, labelsize=9, length=3, color=look.faint)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_fontsize(10)  # names are cut to fit at this size, whatever the user's style is
    axes.grid(True, color=look.grid, linewidth=0.8)
    axes.set_axisbelow(True)


def write_title(look: Look, axes: Axes, text: str, detail: str = "") -> None:
    """Write a title above axes, with a note on the right."""
    axes.set_title(text, loc="left", fontsize=11, fontweight="bold", color=look.ink, pad=10)
    if detail:
        axes.set_title(detail, loc="right", fontsize=9, color=look.dim, pad=10)
