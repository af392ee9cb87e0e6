"""Whether a node computes the same bits as the coordinator's machine.

A node is rejected if it has another version of Cerebro, Python or a library that computes, another
architecture or other vector instructions, or other environment variables by which libraries choose
kernels. Differences that are unlikely to matter are noted, such as another CPU model with the same
instructions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cerebro.machine import environment

COMPUTE = ("numpy", "torch", "jax", "jaxlib", "scikit-learn", "scipy", "mkl", "cloudpickle")

REFUSED = ("cerebro", "python", "system", "cpu.features", "blas", "variables.")

NOTED = ("cpu.model", "libc", "gpu")


def find_differences(
    here: Mapping[str, Any], there: Mapping[str, Any]
) -> tuple[list[str], list[str]]:
    """Compare a node with the coordinator's; see `cerebro.machine.environment.describe`.

    Returns the differences that are rejected and those that are noted, one line each.
    """
    refused, noted = [], []
    for line in environment.list_differences(here, there):
        key = line.split(" ", 1)[0]
        text = line.replace(" was ", " is ", 1).replace(", is ", " here and ", 1) + " there"
        if key.removeprefix("variables.") in environment.THREAD_VARIABLES:
            continue  # worker processes get their own
        package = key.removeprefix("packages.")
        if package in COMPUTE or key.startswith(REFUSED):
            refused.append(text)
        elif key.startswith(NOTED):
            noted.append(text)
    return refused, noted
