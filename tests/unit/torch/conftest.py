"""Every test of PyTorch models: one thread, and the random generators as they were before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cerebro.machine import generators


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    torch = pytest.importorskip("torch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with generators.preserve_generators(True):
        yield
    torch.set_num_threads(threads)
