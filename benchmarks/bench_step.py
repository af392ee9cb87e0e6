"""What a recorded step takes: ``python -m benchmarks.bench_step``.

Training steps on the CPU with one thread: ``cerebro.torch.Model(graph=True)``, once it replays its
recorded step, against ``graph=False``, with the default AdamW and with ``fused=True``. Each is
measured in short bursts, in turn; the figure is the median of the bursts' ratios. Before and after,
both have trained on the same batches and must have the same weights, to the bit.

Then units as a worker runs them, with the default ``graph=None``: the proof, the recording, and the
comparison at each unit's end count. ``first``: a new model's units up to 240 batches. ``later``:
further units. No ratio may be above 1.02, also where nothing is recorded.

``--checks`` measures only what the checks of a default step take, in ordinary steps: the comparison
on a unit's last full batch, and the second and third batch of a model that takes over another
model's program: the second one binds and compares it.
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


class Counts(nn.Module):
    """A network whose step is not recorded, because it counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(64, 128, 10)()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.net(x)


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
}

IN_UNITS: dict[str, Made] = CASES | {
    "batch norm, dropout 64-128-10, batch 32": (normed, (64,), 10, 32),
    "LSTM 16-64, 16 steps, batch 32": (lstm, (16, 16), 10, 32),
    "transformer d32, 2 layers, batch 32": (Encoder, (16, 16), 10, 32),
    "MLP 784-512-10, batch 128": (mlp(784, 512, 10), (784,), 10, 128),
    "CNN on 32 x 32, batch 64": (pictures, (3, 32, 32), 10, 64),
    "MLP 64-128-10 that counts, batch 32": (Counts, (64,), 10, 32),
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


def burst(trained: cerebro.torch.Model, batches: list[dict[str, torch.Tensor]]) -> float:
    """CPU seconds per step: other programs on the machine disturb them less than the clock's."""
    start = time.process_time()
    for batch in batches:
        trained.train_batch(batch)
    return (time.process_time() - start) / len(batches)


def batches_of(name: str, count: int) -> list[dict[str, torch.Tensor]]:
    _, shape, classes, rows = IN_UNITS[name]
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "x": torch.randn(rows, *shape, generator=generator),
            "y": torch.randint(classes, (rows,), generator=generator),
        }
        for _ in range(count)
    ]


def units(
    trained: cerebro.torch.Model, batches: list[dict[str, torch.Tensor]], count: int
) -> float:
    """CPU seconds per step of whole units."""
    start = time.process_time()
    for _ in range(count):
        trained.begin_recorded_unit(len(batches), 1000, training=True)
        for batch in batches:
            trained.train_batch(batch)
        if trained.end_recorded_unit(training=True) is not None:
            raise SystemExit("a recorded step is wrong")
        trained.end_unit()
    return (time.process_time() - start) / count / len(batches)


def compare_units(bench: Bench, name: str, rounds: int, steps: int) -> None:
    make, batches = IN_UNITS[name][0], batches_of(name, steps)
    units(model(make, None, None), batches[:12], 1)  # the libraries start
    first: list[tuple[float, float]] = []
    later: list[tuple[float, float]] = []
    for _ in range(rounds):
        recorded, ordinary = model(make, None, None), model(make, False, None)
        for found in (first, later):
            pair = []
            for trained in (recorded, ordinary):
                torch.manual_seed(2)
                pair.append(units(trained, batches, 240 // steps))
            found.append((pair[0], pair[1]))
        states = [trained.net.state_dict().values() for trained in (ordinary, recorded)]
        if not all(torch.equal(one, two) for one, two in zip(*states, strict=True)):
            raise SystemExit(f"{name}: the recorded step gave other weights")
    note = recorded.recording_note()
    for part, pairs in (("first", first), ("later", later)):
        bench.add(
            f"{name}, units of {steps}, {part}",
            statistics.median(mine for mine, _ in pairs) * 1e6,
            "us",
            reference="graph=False",
            ratio=statistics.median(mine / its for mine, its in pairs),
            bar="1.02",
        )
    if note is not None:
        bench.note(f"    {note}")


def timed(work: Callable[..., object], *arguments: object, **options: object) -> float:
    """CPU seconds of a call."""
    start = time.thread_time()
    work(*arguments, **options)
    return time.thread_time() - start


def checks(bench: Bench, name: str, rounds: int) -> None:
    make, batches = IN_UNITS[name][0], batches_of(name, 60)
    units(model(make, None, None), batches, 5)  # leaves its program to the next models
    found: dict[str, list[float]] = {
        part: [] for part in ("a replay", "a unit's check", "second batch", "third batch")
    }
    for _ in range(rounds):
        ordinary, trained = model(make, False, None), model(make, None, None)
        step = statistics.median(timed(ordinary.train_batch, batch) for batch in batches)
        trained.begin_recorded_unit(len(batches), 1000, training=True, full=len(batches))
        each = [timed(trained.train_batch, batch) for batch in batches]
        replay = statistics.median(each[10:])
        # The last batch is trained and checked.
        check = each[-1] - replay + timed(trained.end_recorded_unit, training=True)
        if trained._recorded[0].replays == 0:
            bench.note(f"{name}: nothing was replayed")
            return
        for part, seconds in zip(found, (replay, check, each[1], each[2]), strict=True):
            found[part].append(seconds / step)
    for part, ratios in found.items():
        bench.add(f"{name}, {part}", statistics.median(ratios), "steps")


def compare(bench: Bench, name: str, fused: bool | None, rounds: int, steps: int) -> None:
    make, batches = CASES[name][0], batches_of(name, steps)
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
    options = parser(__doc__ or "")
    options.add_argument("--checks", action="store_true", help="measure only the checks")
    arguments = options.parse_args()
    torch.set_num_threads(1)
    bench = Bench("bench_step", arguments.json)
    rounds, steps = (1, 20) if arguments.quick else (4 * arguments.rounds, 100)
    names = list(CASES)[: 3 if arguments.quick else None]
    if arguments.checks:
        for name in names:
            checks(bench, name, rounds)
        bench.report()
        return
    for name in names:
        for fused in (None, True):
            compare(bench, name, fused, rounds, steps)
    for name in list(IN_UNITS)[: 1 if arguments.quick else None]:
        for length in (15,) if arguments.quick else (5, 15, 60):
            compare_units(bench, name, 1 if arguments.quick else arguments.rounds, length)
    bench.report()


if __name__ == "__main__":
    main()
