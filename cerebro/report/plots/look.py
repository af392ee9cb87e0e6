"""Define the style of plots on white and on dark pages: colors, fonts, short labels."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cerebro.machine.imports import import_extra
from cerebro.report import format as fmt

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Look:
    page: str
    ink: str  # text
    dim: str  # remarks
    faint: str  # background elements, such as the curves of most trials
    grid: str
    accent: str  # the best trial
    runners_up: tuple[str, str, str, str]
    shades: tuple[float, float]  # the part of the color map that is readable on the page

    def box(self, pad: float, alpha: float) -> dict[str, Any]:
        """Return the background of a label that is drawn over lines."""
        edges = {"boxstyle": f"round,pad={pad}", "edgecolor": "none"}
        return {**edges, "facecolor": self.page, "alpha": alpha}


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


def write_legend(
    look: Look, figure: Figure, handles: Sequence[Any], columns: int, **options: Any
) -> None:
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=columns,
        fontsize=8,
        frameon=False,
        labelcolor=look.ink,
        **options,
    )


def escape_dollars(text: str) -> str:
    """Return text escaped so that matplotlib draws dollars literally, not as formulas."""
    return text.replace("$", r"\$")


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
        lambda value: fmt.cut_end(fmt.number(value, 3), width),
        lambda value: cut_middle(str(value), width),
        lambda value: cut_middle(repr(value), width),
    )
    for write in writers:
        labels = [write(value) for value in values]
        if len(set(labels)) == len(labels):
            return labels
    return [repr(value) for value in values]


FAMILIES = (
    "Noto Sans CJK JP", "Noto Sans CJK SC", "Noto Sans CJK TC", "Noto Sans CJK KR",
    "Source Han Sans", "Source Han Sans SC", "Source Han Sans KR", "WenQuanYi Micro Hei",
    "WenQuanYi Zen Hei", "Droid Sans Fallback", "Arial Unicode MS", "Hiragino Sans", "PingFang SC",
    "PingFang HK", "Heiti TC", "Apple SD Gothic Neo", "Noto Sans JP", "Noto Sans SC",
    "Noto Sans KR", "Yu Gothic", "Microsoft YaHei", "Malgun Gothic", "IPAexGothic",
    "Noto Serif CJK JP", "SimHei", "NanumGothic",
)  # fmt: skip
"""Fonts of Linux, macOS and Windows; those with the characters of all three languages first."""


def fallback_families(installed: Collection[str]) -> list[str]:
    """Return the families among `installed` that have Chinese, Japanese or Korean characters."""
    return [family for family in FAMILIES if family in installed]


def complete_fonts(figure: Any) -> None:
    """Let a figure's texts fall back to other fonts, and warn if none has their characters."""
    from matplotlib.font_manager import FontProperties, findfont, fontManager, get_font
    from matplotlib.text import Text

    @functools.cache
    def has(family: str, char: str) -> bool:
        return bool(get_font(findfont(FontProperties(family=[family]))).get_char_index(ord(char)))

    def lacks(text: Text) -> bool:
        chars = {char for char in text.get_text() if not char.isascii()}
        return any(not any(has(family, char) for family in text.get_fontfamily()) for char in chars)

    incomplete = [text for text in figure.findobj(Text) if lacks(text)]
    fallback = fallback_families(fontManager.get_font_names()) if incomplete else []
    for text in incomplete:
        text.set_fontfamily([*text.get_fontfamily(), *fallback])
    figure.lacks_glyphs = any(map(lacks, incomplete))
    if figure.lacks_glyphs:
        warn_once()


@functools.cache
def warn_once() -> None:
    """Warn, once in a process, that some characters are drawn as boxes."""
    from matplotlib import get_cachedir

    warnings.warn(
        "a plot has characters that no font here has, so they are drawn as boxes: install a font, "
        f"such as Noto Sans CJK, and remove {get_cachedir()}/fontlist-*.json, matplotlib's list "
        "of fonts",
        stacklevel=4,
    )
