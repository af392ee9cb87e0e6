"""States between a GPU and their slots: ``python -m benchmarks.gpu_states``.

Weights and moments like those of a ResNet, 45 and 500 MB. Packing (from the GPU through the pinned
arena into the slot) and loading (from the slot into GPU tensors) are compared with one copy of as
many bytes between the GPU and a pinned block: 1 is the speed of the bus. Hashing, once per unit at
the commit, is measured separately.
"""

from __future__ import annotations

import sys
import tempfile
from functools import partial
from pathlib import Path

import torch

import cerebro._core as _core
from benchmarks.harness import Bench, attempt, paired_ratio, parser
from cerebro.machine import devices
from cerebro.worker.gpu import StateArena

SIZES = {"45 MB in 122 tensors": (45e6, 122), "500 MB in 300 tensors": (500e6, 300)}
DEVICE = "cuda:0"


def state(nbytes: float, tensors: int) -> dict[str, object]:
    """Half of the tensors are large, half small, like weights and norms."""
    large = int(nbytes / 4 / (tensors // 2) / 1.002)
    sizes = [large if i % 2 == 0 else max(1, large // 512) for i in range(tensors)]
    return {
        "model": {f"{i:03}": torch.randn(size, device=DEVICE) for i, size in enumerate(sizes)},
        "step": 7,
    }


def measure(bench: Bench, name: str, nbytes: float, tensors: int, rounds: int) -> None:
    tree, arena = state(nbytes, tensors), StateArena()
    with tempfile.TemporaryDirectory() as folder:
        slots = _core.Slots(str(Path(folder, "0")), True)
        size = slots.pack(arena.to_host(tree), attempt=0)
        slots.commit(1)
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        flat = torch.empty(size, dtype=torch.uint8, device=DEVICE)
        live = {key: torch.empty_like(value) for key, value in tree["model"].items()}

        def copy(to: torch.Tensor, source: torch.Tensor) -> None:
            to.copy_(source, non_blocking=True)
            torch.cuda.synchronize()

        def pack() -> None:
            slots.pack(arena.to_host(tree), attempt=0)

        def load() -> None:
            found = _core.unpack_state(slots.view(), "torch", copy=None)
            for key, value in arena.to_device(found, DEVICE)["model"].items():
                live[key].copy_(value)
            torch.cuda.synchronize()

        pairs = {
            "pack": (pack, lambda: copy(pinned, flat)),
            "copy from the GPU alone": (
                lambda: arena.to_host(tree),
                lambda: copy(pinned, flat),
            ),
            "load": (load, lambda: copy(flat, pinned)),
            "hash": (lambda: _core.hash_state(slots.view()), lambda: copy(pinned, flat)),
        }
        for what, (ours, reference) in pairs.items():
            ratio, seconds, theirs = paired_ratio(ours, reference, rounds)
            line = f"{name}: {what} ({size / theirs / 1e9:.1f} GB/s pinned)"
            bench.add(line, seconds * 1e3, "ms", reference="pinned copy", ratio=ratio)
        assert all(torch.equal(live[key], value) for key, value in tree["model"].items())
        slots.close()


def main() -> int:
    arguments = parser(__doc__.splitlines()[0]).parse_args()
    found = devices.lookup()
    if not found.devices:
        print(f"no GPU here: {found.problem}; nothing was measured")
        return 3
    bench = Bench(f"States between a {found.devices[0].label} and slots", arguments.json)
    scale, rounds = 20 if arguments.quick else 1, arguments.rounds
    done = [
        attempt(bench, name, partial(measure, bench, name, nbytes / scale, tensors, rounds))
        for name, (nbytes, tensors) in SIZES.items()
    ]
    bench.report()
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
