"""Tests that need a GPU: ``python -m pytest -m gpu``; without one each is skipped by name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cerebro.machine import devices

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    if not ours:
        return
    found = devices.lookup()
    if found.devices:  # PyTorch looks once in a process, at the first product of matrices
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", devices.CUBLAS_WORKSPACE)
        # JAX would take three quarters of the GPU, for all tests that come after its own.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if not found.devices:
            reason = f"{item.name} needs a GPU: {found.problem}"
            item.add_marker(pytest.mark.skip(reason=reason))
