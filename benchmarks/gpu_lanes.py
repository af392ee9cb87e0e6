"""Many trials on one GPU: plain PyTorch's ways and Cerebro: ``python -m benchmarks.gpu_lanes``.

- ``mlp``, ``cnn``: 16 small networks at once. An eager loop, CUDA graphs on one stream and on as
  many streams as networks, networks fused by ``vmap`` and by grouped convolutions; then Cerebro
  with 1, 4 and 16 lanes. Milliseconds of a step of all networks, and seconds of the whole call: of
  plain ways, the time to build and capture and the same number of steps (computed).
- ``resnet``: ResNet-18 for CIFAR, bf16, channels_last, crops and flips: a plain loop over resident
  data, deterministic and not, a loop over a ``DataLoader``, and Cerebro without and with a graph.
- ``adapters``: 16 adapters over one random transformer of 100 million parameters, and 16 separate
  models: time and memory.

It takes about four minutes on an H200. ``--only`` selects parts, ``--tiny`` runs everything that
needs no GPU, in miniature, on the CPU. Trials with 1 and more lanes must have the same states. The
end is a table of all figures, and which of the project's bars hold.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import cerebro
from benchmarks import lane_models as models
from benchmarks.harness import Bench, attempt, parser
from benchmarks.lane_searches import Searched, Work, watch_memory
from benchmarks.lane_ways import Found, Place, Rows, Ways, have_same_bits
from cerebro.machine import devices
from cerebro.machine.flags import compute_settings
from cerebro.transforms import Normalize, RandomCrop, RandomHorizontalFlip, Scale, ToCHW

NO_GPU = 3
MEAN, STD = (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
PADDING = 4


@dataclass(frozen=True)
class Size:
    """How much is trained."""

    networks: int = 16
    lanes: tuple[int, ...] = (1, 4, 16)
    batch: int = 128
    mlp_width: int = 256
    mlp_steps: int = 400  # in an epoch
    cnn_width: int = 32
    cnn_steps: int = 100
    epochs: int = 3
    seconds: float = 1.0  # of each measurement of a plain way
    images: int = 50_000
    image_batch: int = 256
    resnet_width: int = 64
    loader_workers: int = 12
    transformer: tuple[int, int, int] = (768, 14, 1000)  # width, layers, tokens
    length: int = 128  # of a sequence
    sequences: int = 160
    sequence_batch: int = 8


QUICK = Size(mlp_steps=100, cnn_steps=40, epochs=2, seconds=0.3, images=12_800, sequences=80)
TINY = Size(
    networks=2, lanes=(1, 2), batch=4, mlp_width=4, mlp_steps=4, cnn_width=2, cnn_steps=2, epochs=2,
    seconds=0.0, images=32, image_batch=8, resnet_width=2, loader_workers=0,
    transformer=(16, 2, 10), length=4, sequences=8, sequence_batch=4,
)  # fmt: skip


@dataclass
class Session:
    """Measures parts, and keeps what the bars need."""

    bench: Bench
    place: Place
    size: Size
    folder: Path
    figures: dict[str, float] = field(default_factory=dict)
    failed: bool = False

    def add(self, name: str, value: float, unit: str, reference: str = "") -> None:
        self.figures[name] = value
        ratio = value / self.figures[reference] if reference in self.figures else None
        self.bench.add(name, value, unit, reference=reference, ratio=ratio)

    def tell(self, text: str) -> None:
        self.bench.note(text)

    def attempt(self, name: str, work: Callable[[], object]) -> None:
        self.failed |= not attempt(self.bench, name, work)
        gc.collect()
        if self.place.is_gpu:
            torch.cuda.empty_cache()

    def shard(self, name: str, columns: dict[str, Any]) -> cerebro.Dataset:
        return cerebro.shard(columns, self.folder / name, shards=2, progress=False)


# --- small networks -------------------------------------------------------------------


def run_small(session: Session, kind: str) -> None:
    """Measure the plain ways and Cerebro on as many MLPs or CNNs."""
    size, place = session.size, session.place
    is_mlp = kind == "mlp"
    width, steps = (size.mlp_width, size.mlp_steps) if is_mlp else (size.cnn_width, size.cnn_steps)
    make = partial(models.make_mlp if is_mlp else models.make_cnn, width)
    rng = np.random.default_rng(0)
    shape = (64,) if is_mlp else (3, 32, 32)
    x = rng.normal(size=(steps * size.batch, *shape)).astype(np.float32)
    y = rng.integers(0, models.CLASSES, size=len(x))
    eager = f"{kind}: eager loop, fused Adam"

    def add(name: str, found: Found) -> None:
        session.add(f"{kind}: {name}", found.step * 1e3, "ms", eager)
        whole = found.before + size.epochs * steps * found.step
        session.add(f"{kind}: {name}, whole call", whole, "s", f"{eager}, whole call")
        if not found.keeps_bits:
            session.tell(f"{kind}: {name}: other bits than each network alone")

    def measure_plain() -> None:
        resident = torch.from_numpy(x).to(place.device), torch.from_numpy(y).to(place.device)
        ways = Ways(place, make, Rows.draw(*resident, size.batch), size.networks)
        for name, measure in [*ways.measure(), *([] if is_mlp else ways.grouped(width))]:
            session.attempt(f"{kind}: {name}", lambda n=name, m=measure: add(n, m()))

    session.attempt(f"{kind}: plain ways", measure_plain)
    build = models.build_mlp if is_mlp else models.build_cnn
    data = session.shard(kind, {"x": x, "y": y})
    work = Work(build, data, size.batch, session.folder, place, size.networks, {"width": width})
    states: dict[int, list[list[str]]] = {}

    def measure_ours(lanes: int) -> None:
        found = work.search(lanes=lanes, epochs=size.epochs, graph=True)
        name = f"{kind}: Cerebro, {lanes} lane(s)"
        session.add(name, found.step * 1e3, "ms", eager)
        session.add(f"{name}, whole call", found.seconds, "s", f"{eager}, whole call")
        states[lanes] = found.hashes

    for lanes in size.lanes:
        session.attempt(f"{kind}: Cerebro, {lanes} lane(s)", partial(measure_ours, lanes))
    compare_states(session, kind, states)
    for graph in (False, True):
        name = f"{kind}: the plain loop and graph={graph}"
        session.attempt(name, partial(compare_with_loop, session, name, work, make, graph))


def compare_states(session: Session, kind: str, states: dict[int, list[list[str]]]) -> None:
    first = next(iter(states.values()), None)
    if first is None:
        return
    equal = all(hashes == first for hashes in states.values())
    session.figures[f"{kind}: equal states"] = float(equal)
    lanes = ", ".join(map(str, states))
    session.tell(f"{kind}: states with {lanes} lanes: {'equal' if equal else 'DIFFERENT'}")


def compare_with_loop(
    session: Session, name: str, work: Work, make: models.Make, graph: bool
) -> None:
    """Tell whether a search of one trial has the weights of the loop that the guide gives."""
    alone = Work(work.build, work.data, work.batch, work.folder, work.place, 1, work.config)
    found = alone.search(lanes=1, epochs=1, graph=graph)
    trial = found.result.trials[0]
    net = alone.train_by_hand(make, trial.config, 1)
    equal = have_same_bits(net, trial.load("last").net)
    session.tell(f"{name}: {'equal' if equal else 'other'} weights")


# --- ResNet-18 --------------------------------------------------------------------------


class Images(torch.utils.data.Dataset[Any]):
    """The images for a `DataLoader`, cropped and mirrored one by one."""

    def __init__(self, x: Any, y: Any) -> None:
        self._x, self._y = x, y

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        padded = np.pad(self._x[row], ((PADDING, PADDING), (PADDING, PADDING), (0, 0)))
        top, left = np.random.randint(0, 2 * PADDING + 1, size=2)
        image = padded[top : top + 32, left : left + 32]
        if np.random.random() < 0.5:
            image = image[:, ::-1]
        scaled = (image.astype(np.float32) / 255 - np.float32(MEAN)) / np.float32(STD)
        return torch.from_numpy(scaled.transpose(2, 0, 1)), int(self._y[row])


class PlainResnet:
    """ResNet-18 trained by a plain loop."""

    def __init__(self, session: Session, x: Any, y: Any) -> None:
        size, self._device = session.size, session.place.device
        self._place = session.place
        self._batch = size.image_batch
        self._kind = torch.device(self._device).type
        torch.manual_seed(0)
        self._net = models.make_resnet(size.resnet_width).to(self._device)
        self._optimizer = models.make_sgd(self._net, 0.1)
        self._x, self._y = x, y
        self._loader_workers = size.loader_workers

    def _train(self, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for x, y in batches:
            with torch.autocast(self._kind, torch.bfloat16):
                loss = functional.cross_entropy(self._net(x), y)
            loss.backward()
            self._optimizer.step()
            self._optimizer.zero_grad()

    def _seconds(self, make_batches: Callable[[], Iterable[Any]]) -> float:
        """Return the seconds of an epoch, after one that does not count."""
        self._train(make_batches())
        self._place.wait()
        begun = time.perf_counter()
        self._train(make_batches())
        self._place.wait()
        return time.perf_counter() - begun

    def resident(self) -> float:
        x, y = torch.from_numpy(self._x).to(self._device), torch.from_numpy(self._y)
        y = y.to(self._device)
        padded = functional.pad(x, (0, 0, PADDING, PADDING, PADDING, PADDING))
        mean, std = (torch.tensor(values, device=self._device) for values in (MEAN, STD))
        side = torch.arange(32, device=self._device)

        def batches() -> Iterable[Any]:
            order = torch.randperm(len(x), device=self._device)
            for rows in order.split(self._batch):
                top, left = torch.randint(
                    0, 2 * PADDING + 1, (2, len(rows), 1), device=self._device
                )
                mirrored = torch.rand(len(rows), 1, device=self._device) < 0.5
                columns = left + torch.where(mirrored, side.flip(0), side)
                images = padded[rows[:, None, None], (top + side)[:, :, None], columns[:, None]]
                scaled = (images.float() / 255 - mean) / std
                yield scaled.permute(0, 3, 1, 2), y[rows]

        return self._seconds(batches)

    def loaded(self) -> float:
        loader = torch.utils.data.DataLoader(
            Images(self._x, self._y), self._batch, shuffle=True, num_workers=self._loader_workers,
            pin_memory=self._place.is_gpu, persistent_workers=self._loader_workers > 0,
        )  # fmt: skip

        def batches() -> Iterable[Any]:
            for x, y in loader:
                there = x.to(self._device, non_blocking=True), y.to(self._device, non_blocking=True)
                yield there[0].contiguous(memory_format=torch.channels_last), there[1]

        return self._seconds(batches)


def run_resnet(session: Session) -> None:
    size, place = session.size, session.place
    rng = np.random.default_rng(0)
    x = rng.integers(0, 256, size=(size.images, 32, 32, 3), dtype=np.uint8)
    y = rng.integers(0, models.CLASSES, size=size.images)
    plain, deterministic = "resnet: plain loop, resident", "resnet: plain loop, deterministic"

    def measure(name: str, *, exact: bool, loaded: bool = False) -> None:
        with compute_settings(torch.get_num_threads(), "warn" if exact else False, place.device):
            loop = PlainResnet(session, x, y)
            session.add(name, loop.loaded() if loaded else loop.resident(), "s/epoch", plain)

    session.attempt(plain, lambda: measure(plain, exact=False))
    session.attempt(deterministic, lambda: measure(deterministic, exact=True))
    name = f"resnet: DataLoader, {size.loader_workers} workers"
    session.attempt(name, lambda: measure(name, exact=False, loaded=True))
    data = session.shard("images", {"x": x, "y": y}).with_transforms(
        {
            "x": [
                *(RandomCrop(32, padding=PADDING), RandomHorizontalFlip()),
                *(Scale(1 / 255), Normalize(MEAN, STD), ToCHW()),
            ]
        }
    )
    steps = -(-size.images // size.image_batch)

    def measure_ours(graph: bool, lanes: int) -> Searched:
        config = {"width": size.resnet_width}
        work = Work(
            models.build_resnet, data, size.image_batch, session.folder, place, lanes, config
        )
        found = work.search(lanes=lanes, epochs=2, graph=graph)
        name = f"resnet: Cerebro, graph={graph}, {lanes} lane(s)"
        reference = plain if graph else deterministic
        session.add(name, found.step * steps / lanes, "s/epoch", reference)
        session.add(f"{name}, whole call", found.seconds, "s")
        return found

    for graph, lanes in ((False, 1), (True, 1), (True, 2)):
        name = f"resnet: Cerebro, graph={graph}, {lanes} lane(s)"
        session.attempt(name, partial(measure_ours, graph, lanes))


# --- adapters ---------------------------------------------------------------------------


def run_adapters(session: Session) -> None:
    """Compare adapters of one base with separate models, in time and memory."""
    size, place = session.size, session.place
    rng = np.random.default_rng(0)
    x = rng.integers(0, size.transformer[2], size=(size.sequences, size.length))
    y = rng.integers(0, models.CLASSES, size=size.sequences)
    base = models.Transformer(*size.transformer)
    nbytes = sum(parameter.nbytes for parameter in base.parameters())
    del base
    session.tell(f"adapters: a base of {nbytes / 4e6:.1f} M parameters, {nbytes / 1e6:.0f} MB")
    separate = f"adapters: {size.networks} separate models"

    def measure_separate() -> None:
        chosen = rng.integers(0, size.sequences, size.sequence_batch)
        tokens = torch.from_numpy(x[chosen]).to(place.device)
        target = torch.from_numpy(y[chosen]).to(place.device)
        with watch_memory(place) as most:
            nets: list[tuple[nn.Module, Any]] = []
            for _ in range(size.networks):
                net = models.adapt(models.Transformer(*size.transformer)).to(place.device)
                nets.append((net, torch.optim.AdamW(models.trained(net), lr=1e-3)))

            def step() -> None:
                for net, optimizer in nets:
                    functional.cross_entropy(net(tokens), target).backward()
                    optimizer.step()
                    optimizer.zero_grad()

            seconds = place.time(step)
        session.add(separate, seconds * 1e3, "ms")
        if most[0]:
            session.add(f"{separate}, memory", most[0] / 1e6, "MB")

    session.attempt(separate, measure_separate)
    names = ("width", "layers", "tokens")
    config = dict(zip(names, size.transformer, strict=True))
    data = session.shard("tokens", {"x": x, "y": y})
    work = Work(
        models.build_adapter, data, size.sequence_batch, session.folder, place, size.networks,
        config,
    )  # fmt: skip
    states: dict[int, list[list[str]]] = {}

    def measure_ours(lanes: int) -> None:
        name = f"adapters: Cerebro, {lanes} lane(s)"
        with watch_memory(place) as most:
            found = work.search(lanes=lanes, epochs=2, graph=True if place.is_gpu else None)
        session.add(name, found.step * 1e3, "ms", separate)
        session.add(f"{name}, whole call", found.seconds, "s")
        if most[0]:
            session.add(f"{name}, memory", most[0] / 1e6, "MB", f"{separate}, memory")
        states[lanes] = found.hashes

    for lanes in (1, size.lanes[-1]):
        session.attempt(f"adapters: Cerebro, {lanes} lane(s)", partial(measure_ours, lanes))
    compare_states(session, "adapters", states)


PARTS: dict[str, Callable[[Session], None]] = {
    "mlp": partial(run_small, kind="mlp"),
    "cnn": partial(run_small, kind="cnn"),
    "resnet": run_resnet,
    "adapters": run_adapters,
}


# --- the end -----------------------------------------------------------------------------


def judge(figures: dict[str, float], networks: int = 16) -> list[tuple[str, bool | None]]:
    """Return the project's bars, and whether they hold; None: not measured."""

    def ratio(name: str, *references: str) -> float | None:
        known = [figures[reference] for reference in references if reference in figures]
        return figures[name] / min(known) if name in figures and known else None

    def at_most(bar: float, value: float | None) -> bool | None:
        return None if value is None else value <= bar

    def lanes(kind: str, count: int = networks) -> str:
        return f"{kind}: Cerebro, {count} lane(s)"

    graphs = ("a graph each, one stream", f"a graph each, {networks} streams, one thread")
    resnet = "resnet: Cerebro, graph={}, {} lane(s)".format
    equal = [value for name, value in figures.items() if name.endswith(": equal states")]
    one, two = resnet(True, 1), resnet(True, 2)
    return [
        (
            f"{networks} MLPs: at least 80 x the plain loop per step",
            at_most(1 / 80, ratio(lanes("mlp"), "mlp: eager loop, fused Adam")),
        ),
        (
            f"{networks} CNNs: within 1.15 of the best plain way that keeps bits",
            at_most(1.15, ratio(lanes("cnn"), *(f"cnn: {graph}" for graph in graphs))),
        ),
        (
            "ResNet-18, graph=True: at most 0.75 of the plain resident loop",
            at_most(0.75, ratio(one, "resnet: plain loop, resident")),
        ),
        (
            "ResNet-18, graph=False: at most 1.02 of the plain loop with the same flags",
            at_most(1.02, ratio(resnet(False, 1), "resnet: plain loop, deterministic")),
        ),
        ("ResNet-18: a second lane is not slower", at_most(1.0, ratio(two, one))),
        (
            f"{networks} adapters of one base: at most a quarter of separate models' memory",
            at_most(
                0.25,
                ratio(
                    f"{lanes('adapters')}, memory", f"adapters: {networks} separate models, memory"
                ),
            ),
        ),
        ("the same states with any number of lanes", all(equal) if equal else None),
    ]


def conclude(session: Session) -> None:
    """Print all figures as one table, and the bars."""
    print(f"\n{'':<64}{'':>12}  relative", flush=True)
    for line in session.bench.lines:
        ratio = line["ratio"]
        relative = f"{ratio:9.3f} x {line['reference']}" if isinstance(ratio, float) else ""
        print(f"{line['name']:<64}{line['value']:>12.4g} {line['unit']:<8}{relative}")
    print()
    words = {True: "holds", False: "does not hold", None: "not measured"}
    for bar, holds in judge(session.figures, session.size.networks):
        session.tell(f"{words[holds]:<14} {bar}")


def main() -> int:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    options.add_argument("--tiny", action="store_true", help="in miniature, on the CPU")
    arguments = options.parse_args()
    found = devices.lookup()
    if not found.devices and not arguments.tiny:
        print(f"no GPU here: {found.problem}; nothing was measured (--tiny runs on the CPU)")
        return NO_GPU
    size = TINY if arguments.tiny else QUICK if arguments.quick else Size()
    if arguments.tiny:
        print("in miniature, on the CPU: the figures say nothing about a GPU")
    place = Place("cpu" if arguments.tiny else "cuda:0", size.seconds)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as in workers, for equal bits
    where = "the CPU" if arguments.tiny else f"one {found.devices[0].label}"
    bench = Bench(f"Many trials on {where}, PyTorch {torch.__version__}", arguments.json)
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        session = Session(bench, place, size, Path(folder))
        for part in arguments.only:
            started = time.perf_counter()
            PARTS[part](session)
            session.tell(f"{part}: {time.perf_counter() - started:.0f} s")
    conclude(session)
    session.tell(f"{time.perf_counter() - begun:.0f} s in all")
    bench.report()
    return 1 if session.failed else 0


if __name__ == "__main__":
    sys.exit(main())
