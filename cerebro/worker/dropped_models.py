"""Free the memory of dropped models before much of it adds up.

A model and the functions that train it refer to each other, so only Python's garbage collector
frees a dropped model. The collector counts objects, not bytes: weights of gigabytes are a few
objects, and on a GPU the next model would not fit beside them. Each collection looks at all objects
of the process, which takes about 0.1 s with PyTorch, so small models are left to the collector.
"""

from __future__ import annotations

import gc

COLLECTED_BYTES = 256 << 20
"""Dropped models of this size together are freed at once."""


class DroppedModels:
    """Counts the bytes of this process's dropped models that may still be in memory."""

    def __init__(self) -> None:
        self._bytes = 0

    def add(self, nbytes: int | None) -> None:
        self._bytes += COLLECTED_BYTES if nbytes is None else nbytes

    def free(self, *, all_sizes: bool = False) -> None:
        """Free dropped models if they are large; call this where no frame refers to them."""
        if all_sizes or self._bytes >= COLLECTED_BYTES:
            gc.collect()
            self._bytes = 0


DROPPED = DroppedModels()
