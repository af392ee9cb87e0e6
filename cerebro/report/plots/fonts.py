"""Find fonts for characters that matplotlib's own font lacks: Chinese, Japanese and Korean ones."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Collection
from typing import Any

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
    """Let texts of a figure fall back to other fonts, and warn if no font has their characters.

    Only the texts that need it change, not matplotlib's settings.
    """
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
