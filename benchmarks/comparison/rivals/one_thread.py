"""Each process of a rival computes with one thread, so that two of them use two cores."""

from __future__ import annotations

import torch


def one_thread() -> None:
    """Compute with one thread in this process."""
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)
