"""Do all nodes compute the same bits? What must be equal, and what is only noted.

Refused: another Cerebro, Python or version of a library that computes; another kind of
machine or other vector instructions, by which libraries choose their kernels; variables that
choose kernels. Noted: what is likely to make no difference, such as another model of a CPU
with the same instructions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import cerebro.environment as environment

COMPUTE = ("numpy", "torch", "jax", "jaxlib", "scikit-learn", "scipy", "mkl", "cloudpickle")
REFUSED = ("cerebro", "python", "system", "cpu.features", "blas", "variables.")
NOTED = ("cpu.model", "libc", "gpu")


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Compare a node with the coordinator's; see `cerebro.environment.describe`.

    Returns
    -------
    tuple of two lists
        What is refused and what is noted, a line each.
    """
    refused, noted = [], []
    for line in environment.differences(here, there):
        key = line.split(" ", 1)[0]
        text = line.replace(" was ", " is ", 1).replace(", is ", " here and ", 1) + " there"
        if key.removeprefix("variables.") in environment.THREAD_VARIABLES:
            continue  # worker processes are given their own
        package = key.removeprefix("packages.")
        if package in COMPUTE or key.startswith(REFUSED):
            refused.append(text)
        elif key.startswith(NOTED):
            noted.append(text)
    return refused, noted
