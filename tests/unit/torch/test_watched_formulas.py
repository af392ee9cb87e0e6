"""The formulas that PyTorch computes otherwise while it is watched are those that are known."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import watched_formulas  # noqa: E402


def test_differing_formulas_match_the_golden_list():
    """A new version of PyTorch may add one: look at it, then write the list for that version."""
    golden = watched_formulas.golden()
    assert golden.exists(), f"no list for PyTorch {torch.__version__}: see watched_formulas.py"
    assert watched_formulas.found() == golden.read_text().splitlines()
