"""What a recorded step takes: ``python -m benchmarks.bench_step``.

Training steps on the CPU with one thread: ``cerebro.torch.Model(graph=True)``, once it replays its
recorded step, against ``graph=False``, with the default AdamW and with ``fused=True``. Each is
measured in short bursts, in turn; the figure is the median of the bursts' ratios. Before and after,
both have trained on the same batches and must have the same weights, to the bit.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import cerebro
from benchmarks.harness import Bench, parser

Made = tuple[Callable[[], nn.Module], tuple[int, ...], int, int]


class Recurrent(nn.Module):
    """A GRU over the rows of a picture, and a linear layer over its last output."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(16, 64, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x)[0][:, -1])


def mlp(*widths: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        parts: list[nn.Module] = []
        for before, after in itertools.pairwise(widths):
            parts += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*parts[:-1])

    return make


def digits() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


# Network, shape of a row, classes, rows per batch.
CASES: dict[str, Made] = {
    "MLP 64-128-10, batch 32": (mlp(64, 128, 10), (64,), 10, 32),
    "MLP 39-64-64-2, batch 256": (mlp(39, 64, 64, 2), (39,), 2, 256),
    "MLP 128-96-96-2, batch 256": (mlp(128, 96, 96, 2), (128,), 2, 256),
    "CNN on digits (8 x 8), batch 32": (digits, (1, 8, 8), 10, 32),
    "GRU 16-64, 16 steps, batch 32": (Recurrent, (16, 16), 10, 32),
}


def model(make: Callable[[], nn.Module], graph: bool, fused: bool | None) -> cerebro.torch.Model:
    torch.manual_seed(0)
    net = make()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=fused)
    return cerebro.torch.Model(
        net, optimizer=optimizer, loss=nn.functional.cross_entropy, graph=graph
    )


def burst(trained: cerebro.torch.Model, batches: list[dict[str, torch.Tensor]]) -> float:
    """CPU seconds per step: other programs on the machine disturb them less than the clock's."""
    start = time.process_time()
    for batch in batches:
        trained.train_batch(batch)
    return (time.process_time() - start) / len(batches)


def compare(bench: Bench, name: str, fused: bool | None, rounds: int, steps: int) -> None:
    make, shape, classes, rows = CASES[name]
    generator = torch.Generator().manual_seed(1)
    batches = [
        {
            "x": torch.randn(rows, *shape, generator=generator),
            "y": torch.randint(classes, (rows,), generator=generator),
        }
        for _ in range(steps)
    ]
    ordinary, recorded = model(make, False, fused), model(make, True, fused)
    for trained in (ordinary, recorded):
        burst(trained, batches[:10])
    pairs = [(burst(recorded, batches), burst(ordinary, batches)) for _ in range(rounds)]
    states = [trained.net.state_dict().values() for trained in (ordinary, recorded)]
    if not all(torch.equal(one, two) for one, two in zip(*states, strict=True)):
        raise SystemExit(f"{name}: the recorded step gave other weights")
    if recorded._recorded[0].replays == 0:
        raise SystemExit(f"{name}: {recorded._recorded[0].refusal}")
    how = "fused=True" if fused else "default"
    bench.add(
        f"{name}, {how}",
        statistics.median(mine for mine, _ in pairs) * 1e6,
        "us",
        reference="ordinary",
        ratio=statistics.median(mine / its for mine, its in pairs),
    )


def main() -> None:
    arguments = parser(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    bench = Bench("bench_step", arguments.json)
    rounds, steps = (3, 40) if arguments.quick else (4 * arguments.rounds, 100)
    for name in CASES:
        for fused in (None, True):
            compare(bench, name, fused, rounds, steps)
    bench.report()


if __name__ == "__main__":
    main()
