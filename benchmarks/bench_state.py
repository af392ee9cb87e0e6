"""The cost of moving a state: ``python -m benchmarks.bench_state``.

States of 45, 135 and 500 MB (ResNet-18, the same with Adam, a wide MLP with Adam) are packed into a
slot, passed to another process and loaded into live tensors there. References: ``memcpy`` of as
many bytes between warm buffers, and ``torch.save`` and ``torch.load`` of the same state in the same
folder. A state of 600 small tensors shows the cost per tensor.

Bars: pack <= 1.1 and load <= 1.3 of memcpy; both <= 0.15 of torch.save and torch.load;
600 small tensors packed and unpacked in <= 1 ms.

Pack is ``Slots.pack``; load is ``load_into``, as in a worker that still has the model; unpack makes
new tensors, whose pages the system must clear first.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cerebro._core as _core
from benchmarks.harness import Bench, alternate, parser

State = dict[str, Any]


def resnet18() -> list[tuple[int, ...]]:
    """Shapes of ResNet-18's parameters and batch-norm buffers."""

    def conv(out: int, into: int, size: int) -> list[tuple[int, ...]]:
        return [(out, into, size, size), *[(out,)] * 4, ()]

    shapes, into = conv(64, 3, 7), 64
    for out in (64, 128, 256, 512):
        shapes += conv(out, into, 3) + conv(out, out, 3) * 3
        if out != into:
            shapes += conv(out, into, 1)
        into = out
    return [*shapes, (1000, 512), (1000,)]


def wide_mlp() -> list[tuple[int, ...]]:
    """Shapes of an MLP of 42 million parameters."""
    return [(2048, 2048), (2048,)] * 10


def make_state(size: str) -> State:
    """Return the state of that size; equal for every call."""
    generator = torch.Generator().manual_seed(0)

    def tensors(shapes: list[tuple[int, ...]]) -> dict[str, torch.Tensor]:
        return {
            f"layer{i}.weight": torch.randn(shape, generator=generator)
            for i, shape in enumerate(shapes)
        }

    if size == "600 tensors":
        return {"net": tensors([(42,)] * 600)}
    shapes = {"5 MB": [(1024, 256), (256,)] * 5, "45 MB": resnet18(), "135 MB": resnet18()}.get(
        size, wide_mlp()
    )
    state: State = {"net": tensors(shapes)}
    if size in ("135 MB", "500 MB"):
        moments = [tensors(shapes), tensors(shapes)]
        state["optimizer"] = {
            "state": {
                i: {"step": torch.tensor(7.0), "exp_avg": first, "exp_avg_sq": second}
                for i, (first, second) in enumerate(
                    zip(*(m.values() for m in moments), strict=True)
                )
            },
            "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [*range(len(shapes))]}],
        }
    return state


class Receiver:
    """Another process that has the live model and loads on request."""

    def __init__(self, stem: Path, size: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.bench_state", "--receive", str(stem), size],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.read()

    def read(self) -> None:
        assert self.process.stdout is not None
        if self.process.stdout.readline() != b"done\n":
            sys.exit("the receiving process died")

    def load(self) -> None:
        """Request a load of the newest state, and wait."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"load\n")
        self.process.stdin.flush()
        self.read()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def receive(stem: str, size: str) -> None:
    """A Receiver's process."""
    live = make_state(size)
    slots = _core.Slots(stem, False)
    print("done", flush=True)
    for _ in sys.stdin:
        if _core.load_into(slots.view(), live) is None:
            sys.exit("the state does not fit")
        print("done", flush=True)


def bench_large(bench: Bench, size: str, folder: Path, rounds: int) -> None:
    """Pack, hand over, load and unpack one state, and its references."""
    state = make_state(size)
    slots = _core.Slots(folder / size.replace(" ", ""), True)
    nbytes = 0

    def pack() -> None:
        nonlocal nbytes
        nbytes = slots.pack(state, attempt=0)

    for _ in range(2):  # allocate both slots' pages
        pack()
        slots.commit(0)
    source, target = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    file = folder / "state.pt"
    receiver = Receiver(folder / size.replace(" ", ""), size)

    def hand_over() -> None:
        pack()
        slots.commit(0)
        receiver.load()

    seconds = alternate(
        {
            "memcpy": lambda: np.copyto(target, source),
            "pack": pack,
            "load": lambda: _core.load_into(slots.view(), state),
            "hand over (pack, commit, load elsewhere)": hand_over,
            "unpack into new tensors": lambda: _core.unpack_state(slots.view()),
            "hash, part of a commit": slots.hash,
            "torch.save": lambda: torch.save(state, file),
            "torch.load": lambda: torch.load(file),
        },
        rounds,
    )
    receiver.close()
    slots.close()
    bars = {"pack": "<= 1.1", "load": "<= 1.3"}
    label = f"{nbytes / 1e6:.0f} MB: "
    for name, value in seconds.items():
        ratio = value / seconds["memcpy"]
        bench.add(
            label + name, value * 1e3, "ms", reference="memcpy", ratio=ratio, bar=bars.get(name, "")
        )
    both = seconds["pack"] + seconds["load"]
    torches = seconds["torch.save"] + seconds["torch.load"]
    bench.add(
        label + "pack + load",
        both * 1e3,
        "ms",
        reference="torch.save + torch.load",
        ratio=both / torches,
        bar="<= 0.15",
    )


def bench_small(bench: Bench, folder: Path, rounds: int) -> None:
    """Many small tensors: the cost of each."""
    state = make_state("600 tensors")
    slots = _core.Slots(folder / "small", True)
    file = folder / "small.pt"

    def hop() -> None:
        slots.pack(state, attempt=0)
        slots.commit(0)
        _core.unpack_state(slots.view())

    def torch_hop() -> None:
        torch.save(state, file)
        torch.load(file)

    seconds = alternate(
        {
            "pack": lambda: slots.pack(state, attempt=0),
            "pack + unpack": hop,
            "pack + load": lambda: _core.load_into(_core.pack_state(state), state),
            "torch.save + torch.load": torch_hop,
        },
        rounds * 10,
    )
    slots.close()
    for name, value in seconds.items():
        bench.add(
            f"0.1 MB in 600 tensors: {name}",
            value * 1e3,
            "ms",
            reference="torch.save + torch.load",
            ratio=value / seconds["torch.save + torch.load"],
            bar="<= 1 ms" if name == "pack + unpack" else "",
        )


def main() -> None:
    made = parser(__doc__.splitlines()[0])
    made.add_argument("--receive", nargs=2, help=argparse.SUPPRESS)
    made.add_argument("--folder", help="where the slots are (default: a temporary folder)")
    options = made.parse_args()
    if options.receive:
        receive(*options.receive)
        return
    bench = Bench("bench_state: moving a state", options.json)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for size in ["5 MB"] if options.quick else ["45 MB", "135 MB", "500 MB"]:
            bench_large(bench, size, Path(folder), options.rounds)
        bench_small(bench, Path(folder), options.rounds)
    bench.report()


if __name__ == "__main__":
    main()
