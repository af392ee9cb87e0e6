"""Chains of transforms for the tests that compare device batches with CPU batches."""

from __future__ import annotations

from typing import Any

from cerebro.transforms import Cast, Normalize, Pad, RandomCrop, RandomHorizontalFlip, Scale, ToCHW


def chains(
    *, moved: tuple[int, int], last: int, trained: tuple[int, int]
) -> dict[str, dict[str, Any]]:
    """Return the chains by name; `moved`, `last` and `trained` are the crop sizes of three of
    them."""
    return {
        "plain": {},
        "images": {
            "x": [Scale(1 / 255), Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)), ToCHW()],
            "v": [Cast("float16"), Scale(3.0)],
            "t": [Pad(value=-1, max_length=5, multiple_of=4)],
        },
        "moves": {
            "x": [RandomCrop(moved, padding=2), RandomHorizontalFlip(), ToCHW(), Scale(1 / 255)],
            "v": [Cast("bfloat16")],
            "y": [Cast("float32")],
        },
        "last": {
            "x": [RandomHorizontalFlip(0.3), RandomCrop(last), Cast("float16")],
            "v": [Normalize(1.5, 2.5), Cast("float64")],
            "t": [Cast("float32"), Scale(0.1)],
        },
        "training": {
            "x": [
                RandomCrop(trained, padding=2),
                RandomHorizontalFlip(),
                Scale(1 / 255),
                Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)),
                ToCHW(),
            ],
            "t": [Pad(value=-1, max_length=6), Cast("float64")],
        },
        "on the CPU": {
            "v": [
                step for _ in range(10) for step in (Cast("float64"), Scale(1.01), Cast("float32"))
            ]
        },
    }
