"""Batch throughput: Cerebro's loader compared with PyTorch's methods and a plain C loop.

Every candidate delivers the same shuffled rows, columns ``x`` and ``y``, from warm memory. Cerebro,
``index_select`` and the C loop use the same order (here one shard after another, permuted within),
so that caching affects them equally; a ``DataLoader`` does its own shuffling. The C loop copies
rows into a buffer per thread and does not deliver them. At the end of each kind of rows: the orders
of a search, "rows" (all shards mixed) in times of "shards" (four shards mixed).

    python -m benchmarks.bench_loader [--quick] [--json FILE]
"""

from __future__ import annotations

import ctypes
import subprocess
import sysconfig
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import cerebro._core as _core
import cerebro.data
from benchmarks import harness
from cerebro.data.batches import make_loader
from cerebro.transforms import Normalize, Scale, ToCHW

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SHARDS = 8  # cerebro.data.shard's choice for a dataset of this size
IN_TURN = [[shard] for shard in range(SHARDS)]
ORDERS = {"rows": [range(SHARDS)], "shards": [range(4), range(4, SHARDS)]}


def c_library(folder: Path) -> ctypes.CDLL:
    """Compile the reference loops."""
    compiler = (sysconfig.get_config_var("CC") or "cc").split()[0]
    source = Path(__file__).parent / "c" / "gather_loop.c"
    library = folder / "gather_loop.so"
    options = ["-std=gnu11", "-O3", "-shared", "-fPIC", "-pthread"]
    subprocess.run([compiler, *options, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


class Work:
    """A dataset, and its batches' rows in the loader's order for epoch 0."""

    def __init__(self, folder: Path, name: str, x: Any, batch_size: int) -> None:
        y = np.arange(len(x)) % 10
        self.batch_size = batch_size
        self.data = cerebro.data.shard(
            {"x": x, "y": y}, folder / name, shards=SHARDS, shuffle=False, progress=False
        )
        self.readers = [reader for reader, _ in self.data.view.loader_parts()]
        self.shards, self.rows, self.global_rows = [], [], []
        first = self.data.shards.first_rows
        for shard, reader in enumerate(self.readers):
            order = _core.permutation(reader.rows, 0, "rows", 0, shard)
            for start in range(0, reader.rows - batch_size + 1, batch_size):
                rows = order[start : start + batch_size]
                self.shards.append(shard)
                self.rows.append(rows)
                self.global_rows.append(torch.from_numpy(rows.astype(np.int64) + first[shard]))
        self.n = len(self.shards)

    def loader(
        self, threads: int, data: Any = None, framework: str = "torch", mixes: Any = IN_TURN
    ) -> Callable[[], None]:
        options: dict[str, Any] = {"seed": 0, "drop_last": True, "framework": framework}
        made = make_loader(data or self.data, self.batch_size, threads=threads, **options)

        def run() -> None:
            made.begin(mixes, 0)
            drain(made)

        return run

    def c_loop(self, library: ctypes.CDLL, threads: int) -> Callable[[], None]:
        columns = [reader.column(name) for reader in self.readers for name in ("x", "y")]
        addresses = (ctypes.c_void_p * len(columns))(*[column.ctypes.data for column in columns])
        sizes = (ctypes.c_size_t * 2)(*[column[0].nbytes for column in columns[:2]])
        shards, rows = np.array(self.shards, np.uint32), np.concatenate(self.rows)

        def run() -> None:
            library.gather_loop(
                addresses,
                sizes,
                ctypes.c_size_t(2),
                ctypes.c_void_p(shards.ctypes.data),
                ctypes.c_void_p(rows.ctypes.data),
                ctypes.c_size_t(self.n),
                ctypes.c_size_t(self.batch_size),
                ctypes.c_size_t(threads),
            )

        return run


def drain(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass


def index_select(work: Work, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    """Into reused buffers."""
    out_x = torch.empty((work.batch_size, *x.shape[1:]), dtype=x.dtype)
    out_y = torch.empty(work.batch_size, dtype=y.dtype)

    def run() -> None:
        for rows in work.global_rows:
            torch.index_select(x, 0, rows, out=out_x)
            torch.index_select(y, 0, rows, out=out_y)

    return run


class Batched(torch.utils.data.TensorDataset):
    """The batched-index idiom: one call for all rows of a batch."""

    def __getitems__(self, rows: list[int]) -> tuple[torch.Tensor, ...]:
        index = torch.tensor(rows)
        return tuple(tensor[index] for tensor in self.tensors)


def data_loader(work: Work, x: torch.Tensor, y: torch.Tensor, batched: bool, part: int) -> Any:
    """A DataLoader over the first 1/part of the rows, because the usual one is slow."""
    kind = Batched if batched else torch.utils.data.TensorDataset
    n = max(len(x) // part, work.batch_size)
    made = torch.utils.data.DataLoader(
        kind(x[:n], y[:n]),
        batch_size=work.batch_size,
        shuffle=True,
        drop_last=True,
        collate_fn=(lambda tensors: tensors) if batched else None,
    )
    return lambda: drain(made)


def add_candidates(
    bench: harness.Bench,
    name: str,
    candidates: dict[str, tuple[Callable[[], object], int]],
    reference: str,
    rounds: int,
    bars: dict[str, str],
) -> None:
    """Time candidates, each given with its number of batches; ratios are of speed."""
    seconds = harness.alternate({key: run for key, (run, _) in candidates.items()}, rounds)
    micro = {key: seconds[key] / batches * 1e6 for key, (_, batches) in candidates.items()}
    for key, value in micro.items():
        bench.add(
            f"{name}: {key}",
            value,
            "us/batch",
            reference=f"speed of {reference}",
            ratio=micro[reference] / value,
            bar=bars.get(key, ""),
        )


def plain_rows(
    bench: harness.Bench,
    folder: Path,
    library: ctypes.CDLL,
    options: Any,
    name: str,
    x: Any,
    batch_size: int,
    bars: dict[str, str],
    slow_part: int,
    order_bar: str,
) -> None:
    work = Work(folder, name.replace(" ", "-"), x, batch_size)
    y = torch.from_numpy(np.arange(len(x)) % 10)
    tensor = torch.from_numpy(x)
    candidates = {
        "C loop, 1 thread": (work.c_loop(library, 1), work.n),
        "C loop, 2 threads": (work.c_loop(library, 2), work.n),
        "Cerebro, 0 threads": (work.loader(0), work.n),
        "Cerebro, 1 thread": (work.loader(1), work.n),
        "Cerebro, 2 threads": (work.loader(2), work.n),
        "Cerebro to NumPy, 0 threads": (work.loader(0, framework="numpy"), work.n),
        "index_select(out=)": (index_select(work, tensor, y), work.n),
    }
    for key, batched, part in (("batched-index", True, 4), ("usual", False, slow_part)):
        rows = max(len(x) // part, batch_size)
        run = data_loader(work, tensor, y, batched, part)
        candidates[f"DataLoader, {key}"] = (run, rows // batch_size)
    add_candidates(bench, name, candidates, "C loop, 2 threads", options.rounds, bars)
    orders(bench, work, name, max(options.rounds, 3), order_bar)


def orders(bench: harness.Bench, work: Work, name: str, rounds: int, bar: str) -> None:
    """Time both orders of a search, without threads; the ratio is of time."""
    runs = {order: work.loader(0, mixes=mixes) for order, mixes in ORDERS.items()}
    seconds = harness.alternate(runs, rounds)
    for order, value in seconds.items():
        bench.add(
            f'{name}: order "{order}"',
            value / work.data.num_rows * 1e9,
            "ns/row",
            reference='time of "shards"',
            ratio=value / seconds["shards"],
            bar=bar if order == "rows" else "",
        )


def images(bench: harness.Bench, folder: Path, options: Any, n: int) -> None:
    """uint8 (224, 224, 3) to normalized float32 (3, 224, 224)."""
    x = np.random.default_rng(0).integers(0, 256, (n, 224, 224, 3), dtype=np.uint8)
    work = Work(folder, "images", x, 64)
    view = work.data.with_transforms({"x": [ToCHW(), Scale(1 / 255), Normalize(MEAN, STD)]})
    tensor = torch.from_numpy(x)
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))

    def convert(rows: torch.Tensor) -> torch.Tensor:
        chosen = tensor.index_select(0, rows).permute(0, 3, 1, 2)
        return ((chosen / 255 - mean) / std).contiguous()

    def by_torch() -> None:
        for rows in work.global_rows:
            convert(rows)

    loader = make_loader(view, 64, seed=0, drop_last=True)
    loader.begin([[0]], 0)
    if not torch.equal(next(loader)["x"], convert(work.global_rows[0])):
        raise SystemExit("the bits differ from PyTorch's")
    candidates: dict[str, tuple[Callable[[], object], int]] = {
        "torch": (by_torch, work.n),
        "Cerebro, 0 threads": (work.loader(0, view), work.n),
        "Cerebro, 2 threads": (work.loader(2, view), work.n),
    }
    bars = {"Cerebro, 0 threads": ">= 4 (the same bits)"}
    name = f"uint8 to normalized CHW (torch has {torch.get_num_threads()} threads)"
    add_candidates(bench, name, candidates, "torch", min(options.rounds, 3), bars)


def ragged(bench: harness.Bench, folder: Path, library: ctypes.CDLL, options: Any, n: int) -> None:
    """int32 rows of 1 to 179 values, batches of 64, padded to the longest, with a mask."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 180, n)
    flat = np.split(
        rng.integers(0, 30000, int(lengths.sum()), dtype=np.int32), np.cumsum(lengths)[:-1]
    )
    work = Work(folder, "ragged", flat, 64)
    tensors = [torch.from_numpy(row) for row in flat]
    parts = [reader.ragged("x") for reader in work.readers]
    shards = np.array(work.shards)

    def c_loop() -> None:
        for shard, (values, offsets) in enumerate(parts):
            rows = np.concatenate([work.rows[i] for i in np.flatnonzero(shards == shard)])
            library.pad_loop(
                ctypes.c_void_p(values.ctypes.data),
                ctypes.c_void_p(offsets.ctypes.data),
                ctypes.c_void_p(rows.ctypes.data),
                ctypes.c_size_t(len(rows) // 64),
                ctypes.c_size_t(64),
                ctypes.c_size_t(200),
            )

    def by_torch() -> None:
        for rows in work.global_rows:
            chosen = [tensors[row] for row in rows.tolist()]
            padded = torch.nn.utils.rnn.pad_sequence(chosen, batch_first=True)
            sizes = torch.tensor([len(row) for row in chosen])
            _ = torch.arange(padded.shape[1]) < sizes[:, None]

    candidates: dict[str, tuple[Callable[[], object], int]] = {
        "C loop, 1 thread": (c_loop, work.n),
        "Cerebro, 0 threads": (work.loader(0), work.n),
        "Cerebro, 1 thread": (work.loader(1), work.n),
        "pad_sequence and mask": (by_torch, work.n),
    }
    add_candidates(bench, "ragged int32", candidates, "C loop, 1 thread", options.rounds, {})


def main() -> None:
    options = harness.parser(__doc__.split("\n")[0]).parse_args()
    bench = harness.Bench("bench_loader: shuffled batches of two columns", options.json)
    rng = np.random.default_rng(0)

    def rows(full: int, batch_size: int) -> int:
        """The number of rows: at least one batch per shard."""
        return max(full // 20, SHARDS * batch_size) if options.quick else full

    if options.quick:
        options.rounds = 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library = c_library(folder)
        small = rng.standard_normal((rows(1_000_000, 256), 39), dtype=np.float32)
        plain_rows(
            bench,
            folder,
            library,
            options,
            "39 x float32, batch 256",
            small,
            256,
            {"Cerebro, 0 threads": "<= 8 us"},
            100,
            "<= 1.6",
        )
        del small
        large = rng.integers(0, 256, (rows(20_000, 128), 12_288), dtype=np.uint8)
        plain_rows(
            bench,
            folder,
            library,
            options,
            "12,288 x uint8, batch 128",
            large,
            128,
            {"Cerebro, 2 threads": ">= 0.95"},
            4,
            "<= 1.05",
        )
        del large
        huge = rng.integers(0, 256, (rows(4_000, 64), 150_528), dtype=np.uint8)
        plain_rows(
            bench,
            folder,
            library,
            options,
            "150,528 x uint8, batch 64",
            huge,
            64,
            {"Cerebro, 2 threads": ">= 0.95"},
            4,
            "",
        )
        del huge
        ragged(bench, folder, library, options, rows(200_000, 64))
        images(bench, folder, options, rows(1_024, 64))
    bench.report()


if __name__ == "__main__":
    main()
