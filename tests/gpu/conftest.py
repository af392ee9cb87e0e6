"""Tests that need a GPU: ``python -m pytest -m gpu``; without a GPU, each is skipped by name.

On a machine with a GPU they run by themselves: ``python -m pytest`` alone hides it.
"""

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
    if found.devices:  # PyTorch reads it once per process, at the first matrix product
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", devices.CUBLAS_WORKSPACE)
        # JAX would take three quarters of the GPU for all later tests.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    problem = found.problem
    if devices.has_driver() and os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        problem = "run such tests by themselves, with -m gpu"
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if not found.devices:
            reason = f"{item.name} needs a GPU: {problem}"
            item.add_marker(pytest.mark.skip(reason=reason))
