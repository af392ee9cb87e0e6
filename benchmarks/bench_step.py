"""What a training step takes on the CPU: ``python -m benchmarks.bench_step``.

Whole units, as a worker runs them, with one thread and AdamW: ``graph=False`` (PyTorch's own step,
the reference), the same with ``fused=True``, the default (the optimizer's arithmetic in the core)
and ``graph=True`` (a recorded step; its comparison at each unit's end counts). They take turns; a
figure is the median of the ratios. All but ``fused=True`` must have the same weights, to the bit.

"kept" is the part of the gain of ``graph=True`` that the default has without recording anything.
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


class Encoder(nn.Module):
    """A transformer over the rows of a picture."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.up = nn.Linear(16, 32)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.up(x)).mean(1))


def lstm() -> nn.Module:
    made = Recurrent()
    made.cell = nn.LSTM(16, 64, batch_first=True)
    return made


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, 128), nn.BatchNorm1d(128), nn.GELU(), nn.Dropout(0.2), nn.Linear(128, 10)
    )


def pictures() -> nn.Module:
    parts: list[nn.Module] = []
    for before, after in ((3, 16), (16, 32), (32, 64)):
        parts += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
        parts.append(nn.MaxPool2d(2))
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(1024, 10))


# Network, shape of a row, classes, rows per batch.
CASES: dict[str, Made] = {
    "MLP 64-128-10, batch 32": (mlp(64, 128, 10), (64,), 10, 32),
    "MLP 39-64-64-2, batch 256": (mlp(39, 64, 64, 2), (39,), 2, 256),
    "MLP 128-96-96-2, batch 256": (mlp(128, 96, 96, 2), (128,), 2, 256),
    "CNN on digits (8 x 8), batch 32": (digits, (1, 8, 8), 10, 32),
    "GRU 16-64, 16 steps, batch 32": (Recurrent, (16, 16), 10, 32),
    "batch norm, dropout 64-128-10, batch 32": (normed, (64,), 10, 32),
    "LSTM 16-64, 16 steps, batch 32": (lstm, (16, 16), 10, 32),
    "transformer d32, 2 layers, batch 32": (Encoder, (16, 16), 10, 32),
    "MLP 784-512-10, batch 128": (mlp(784, 512, 10), (784,), 10, 128),
    "CNN on 32 x 32, batch 64": (pictures, (3, 32, 32), 10, 64),
}


def model(
    make: Callable[[], nn.Module], graph: bool | None, fused: bool | None
) -> cerebro.torch.Model:
    torch.manual_seed(0)
    net = make()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, fused=fused)
    return cerebro.torch.Model(
        net, optimizer=optimizer, loss=nn.functional.cross_entropy, graph=graph
    )


def batches_of(name: str, count: int) -> list[dict[str, torch.Tensor]]:
    _, shape, classes, rows = CASES[name]
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(rows, *shape, generator=generator),
            "y": torch.randint(classes, (rows,), generator=generator),
        }
        for _ in range(count)
    ]


def unit(trained: cerebro.torch.Model, batches: list[dict[str, torch.Tensor]]) -> float:
    """CPU seconds per step of a whole unit: other programs disturb them less than the clock's."""
    start = time.process_time()
    trained.begin_recorded_unit(training=True)
    for batch in batches:
        trained.train_batch(batch)
    if trained.end_recorded_unit(training=True) is not None:
        raise SystemExit("a recorded step is wrong")
    trained.end_unit()
    return (time.process_time() - start) / len(batches)


WAYS: dict[str, tuple[bool | None, bool | None]] = {
    "graph=False": (False, None),
    "fused=True": (False, True),
    "default": (None, None),
    "graph=True": (True, None),
}
"""The settings of `graph` and of the optimizer's `fused`, the reference first."""


def compare(bench: Bench, name: str, rounds: int, steps: int) -> None:
    """Measure units of `steps` batches in all ways."""
    make, batches = CASES[name][0], batches_of(name, steps)
    models = {way: model(make, *settings) for way, settings in WAYS.items()}
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way, trained in models.items():
            torch.manual_seed(number)
            seconds = unit(trained, batches)
            if number > 0:  # the first unit records
                found[way].append(seconds)
    states = {way: list(its.net.state_dict().values()) for way, its in models.items()}
    for way in ("default", "graph=True"):
        if not all(map(torch.equal, states["graph=False"], states[way])):
            raise SystemExit(f"{name}: {way} gave other weights")
    reference, *others = WAYS
    ratio = {
        way: statistics.median(a / b for a, b in zip(found[way], found[reference], strict=True))
        for way in others
    }
    for way in others:
        bench.add(
            f"{name}, {way}",
            statistics.median(found[way]) * 1e6,
            "us",
            reference=reference,
            ratio=ratio[way],
        )
    kept = (1 - ratio["default"]) / (1 - ratio["graph=True"])
    refusal = models["graph=True"]._recorded[0].refusal
    bench.note(f"    kept: {kept:.0%}" if refusal is None else f"    graph=True: {refusal}")


def main() -> None:
    arguments = parser(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    bench = Bench("bench_step", arguments.json)
    rounds = 2 if arguments.quick else 8 * arguments.rounds
    for name in list(CASES)[: 3 if arguments.quick else None]:
        compare(bench, name, rounds, 20 if arguments.quick else 60)
    bench.report()


if __name__ == "__main__":
    main()
