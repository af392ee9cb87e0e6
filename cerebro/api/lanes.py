"""Choose how many trials a GPU trains at once: its *lanes*, the workers of one process.

Their number changes no bits, only the time: kernels of small networks run side by side, so a GPU
trains several in nearly the time of one. Where every step runs Python code, lanes wait for each
other's, so there is one.
"""

from __future__ import annotations

from collections.abc import Sequence

from cerebro.machine.devices import are_gpus, memory_of
from cerebro.worker.messages import ModelFacts

MOST_LANES = 16
MODEL_SHARE = 0.5  # of a GPU's memory for the models of its lanes; shards may take the rest


def choose_lanes(model: ModelFacts, usable: int, trials: int | None) -> int:
    """Return the default number of lanes of each GPU.

    It is the smallest of `MOST_LANES`, the number of `trials` that a GPU trains at a time (None:
    unknown), and the number of such models that fit in half of the `usable` bytes of its memory,
    but at least 1. It is 1 for a model whose trials gain nothing from sharing a GPU
    (`cerebro.model.shares_gpu`), or whose memory is unknown.
    """
    if not model.shares_gpu or model.lane_bytes <= 0:
        return 1
    fitting = int(MODEL_SHARE * usable) // model.lane_bytes
    return max(1, min(MOST_LANES, fitting, MOST_LANES if trials is None else trials))


def usable_memory(model: ModelFacts, devices: Sequence[str]) -> int:
    """Return the bytes of each GPU for a search: what a worker saw on one, at most the smallest."""
    whole = memory_of(devices)
    return min(whole, model.usable_bytes or whole)


def describe_lanes(workers: int, devices: Sequence[str]) -> str | None:
    """Return how many lanes the GPUs have; None if no GPU has several."""
    if not are_gpus(devices) or workers <= len(devices):
        return None
    most, rest = -(-workers // len(devices)), workers % len(devices)
    return f"{'up to ' if rest else ''}{most} lanes on {'each' if devices[1:] else 'the'} GPU"
