"""Plots of names that matplotlib's own font cannot write."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("matplotlib")

import matplotlib
from matplotlib.text import Text

from cerebro.report import plots
from cerebro.report.plots import look

STIX = "STIXGeneral"  # comes with matplotlib
ONLY_STIX = "⌚"  # of these two fonts
NEITHER = "学習率"


@pytest.fixture(autouse=True)
def only_matplotlibs_fonts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(look, "FAMILIES", ("Nowhere Sans", STIX))
    look.warn_once.cache_clear()
    with matplotlib.rc_context(rc={"font.family": ["DejaVu Sans"]}):
        before = dict(matplotlib.rcParams)
        yield
        assert dict(matplotlib.rcParams) == before
    look.warn_once.cache_clear()


def drawn(name: str, kind: str) -> dict[str, list[str]]:
    """Draw trials that differ in a setting; return the families of each text."""
    trials = [
        SimpleNamespace(
            number=n,
            status="finished",
            config={name: f"{name}{n % 2}"},
            history=[{"epoch": 0, "metrics": {f"val_{name}": 0.5 + n / 10}}],
            best_epoch=0,
        )
        for n in range(4)
    ]
    result = SimpleNamespace(trials=trials, metric=name, mode="max", select="best")
    figure = plots.plot(result, kind=kind)
    for extension in ("png", "svg", "pdf"):
        figure.savefig(io.BytesIO(), format=extension)
    texts: list[Any] = figure.findobj(Text)
    return {text.get_text(): text.get_fontfamily() for text in texts}


KINDS = pytest.mark.parametrize("kind", ["curves", "parallel", "importance", "slice"])


@KINDS
def test_a_name_falls_back_to_a_font_that_has_its_characters(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        families = drawn(ONLY_STIX, kind)
    assert {tuple(families[text]) for text in families if ONLY_STIX in text} == {
        ("DejaVu Sans", STIX)
    }
    assert {tuple(families[text]) for text in families if ONLY_STIX not in text} == {
        ("DejaVu Sans",)
    }


@KINDS
def test_characters_without_a_font_warn_once(kind: str) -> None:
    with pytest.warns(UserWarning, match="no font here has") as warned:
        drawn(NEITHER, kind)
        drawn(NEITHER, kind)
    assert len(warned) == 1


def test_fonts_for_all_three_languages_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    installed = ["DejaVu Sans", "Malgun Gothic", "Yu Gothic", "Noto Sans CJK JP"]
    assert look.fallback_families(installed) == ["Noto Sans CJK JP", "Yu Gothic", "Malgun Gothic"]
    assert look.fallback_families(["DejaVu Sans"]) == []
