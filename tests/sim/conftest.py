"""The simulated disk of a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from disk import SimulatedDisk
from scripted import make_disk


@pytest.fixture
def real(tmp_path: Path) -> Path:
    return tmp_path / "real"


@pytest.fixture
def disk(real: Path) -> Iterator[SimulatedDisk]:
    made = make_disk(0, real)
    yield made
    made.close()
