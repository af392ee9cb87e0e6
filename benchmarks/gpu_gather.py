"""Gathering rows in GPU memory, compared with copying as many bytes and with PyTorch.

    python -m benchmarks.gpu_gather

By row width: the kernel that makes resident batches, `torch.index_select` (with elements as wide as
the rows allow) and a plain copy from device memory to device memory, in turn. The columns are
larger than the caches and the rows in random order. Ratios compare speeds; the reference is 1.

Then whole epochs of a resident dataset of images, converted to normalized float32 with channels
first: `Dataset.batches` compared with PyTorch's operations.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import gather_kernel
from benchmarks.harness import Bench, alternate, attempt, parser
from cerebro.machine import cuda

WIDTHS = (64, 156, 256, 512, 640, 1024, 4096, 12_288, 150_528)
BAR_FROM = 512  # bytes; narrower rows have no bar
PARTS = 8  # of the column, as the shards of a dataset
REPEATS = 20  # launches timed together
MEAN, STD = (0.5, 0.45, 0.4), (0.25, 0.2, 0.3)


def measure_gather(bench: Bench, *, quick: bool = False, rounds: int = 5) -> None:
    """Add the figures of the first GPU to `bench`, or a note without a GPU.

    Parameters ---------- bench Gets two lines for each row width: gigabytes of rows per second of
    the kernel, with the ratio to a copy's, and its ratio to `index_select`. quick Small columns, to
    check that it runs. rounds Measurements per figure, which is their median.
    """
    import torch

    if not torch.cuda.is_available():
        bench.note("gather on a GPU: PyTorch finds no CUDA device")
        return
    room = torch.cuda.mem_get_info()[0] // 4
    column_bytes = 64 << 20 if quick else min(4 << 30, room // 8 * 8)
    batch_bytes = 8 << 20 if quick else 256 << 20
    column = torch.randint(0, 256, (column_bytes,), dtype=torch.uint8, device="cuda")
    out = torch.empty(batch_bytes, dtype=torch.uint8, device="cuda")
    runtime = cuda.open_runtime()
    path = runtime["path"] or f"libcudart.so.{runtime['version'] // 1000}"
    with tempfile.TemporaryDirectory() as folder:
        library = gather_kernel.build(Path(folder))
        gather = gather_kernel.GatherKernel(library, path, torch.cuda.current_device())
    for width in WIDTHS:
        _measure_width(bench, gather, width, column, out, rounds)


def _measure_width(
    bench: Bench,
    gather: gather_kernel.GatherKernel,
    width: int,
    column: Any,
    out: Any,
    rounds: int,
) -> None:
    import torch

    n = len(out) // width
    element = torch.int64 if width % 8 == 0 else torch.int32
    source = (
        column[: len(column) // width * width].view(element).view(-1, width // element.itemsize)
    )
    target = out[: n * width].view(element).view(n, -1)
    unit = PARTS * (64 // math.gcd(width, 64))  # every part begins on 64 bytes
    source = source[: len(source) // unit * unit]
    rows = torch.randperm(len(source), device="cuda")[:n]
    kernel = _kernel(gather, target, source, width, rows)
    kernel()
    if not torch.equal(target, source[rows]):
        raise RuntimeError(f"rows of {width} bytes: the kernel's are not index_select's")
    seconds = alternate(
        {
            "kernel": _timed(kernel),
            "index_select": _timed(lambda: torch.index_select(source, 0, rows, out=target)),
            "copy": _timed(lambda: target.copy_(source[:n])),
        },
        rounds,
    )
    speed = n * width * REPEATS / 1e9 / seconds["kernel"]
    bench.add(
        f"resident gather, {width:,} B rows",
        speed,
        "GB/s",
        reference="copy",
        ratio=seconds["copy"] / seconds["kernel"],
        bar=">= 0.8" if width >= BAR_FROM else "",
    )
    bench.add(
        f"  the same beside torch.index_select, {width:,} B",
        speed,
        "GB/s",
        reference="index_select",
        ratio=seconds["index_select"] / seconds["kernel"],
    )


def _kernel(
    gather: gather_kernel.GatherKernel, target: Any, source: Any, width: int, rows: Any
) -> Callable[[], object]:
    """Our gather as a function without arguments, on PyTorch's current stream.

    The source is in several parts, as are the shards of a dataset.
    """
    import torch

    size = len(source) // PARTS
    starts = [source.data_ptr() + part * size * width for part in range(PARTS)]
    parts = torch.tensor(gather_kernel.part_table(starts), device="cuda")
    # Numbers as uint32: the same bits.
    places = torch.stack([rows % size, rows // size], dim=1).to(torch.int32)
    addresses = (target.data_ptr(), parts.data_ptr(), width, places.data_ptr(), len(rows))
    stream = torch.cuda.current_stream().cuda_stream

    def run(tables: Any = (parts, places)) -> None:  # keeps the tables alive
        gather(*addresses, stream)

    return run


def _timed(run: Callable[[], object]) -> Callable[[], None]:
    import torch

    def repeated() -> None:
        for _ in range(REPEATS):
            run()
        torch.cuda.synchronize()

    return repeated


def measure_images(
    bench: Bench, *, quick: bool = False, rounds: int = 5, device: str = "cuda"
) -> None:
    """Add the time of an epoch of images of 32 x 32 x 3 bytes, and its ratio to PyTorch's.

    Parameters are those of `measure_gather`; `device` holds the data.
    """
    import torch

    import cerebro
    from cerebro.transforms import Normalize, Scale, ToCHW

    if device == "cuda" and not torch.cuda.is_available():
        return
    rows, batch = (4096, 512) if quick else (65_536, 4096)
    images = np.random.default_rng(0).integers(0, 256, (rows, 32, 32, 3), np.uint8)
    column = torch.from_numpy(images).to(device)
    mean, std = (torch.tensor(v, device=device)[:, None, None] for v in (MEAN, STD))
    chain = [Scale(1 / 255), Normalize(MEAN, STD), ToCHW()]

    def by_torch() -> None:
        for rows_of_batch in torch.randperm(rows, device=device).split(batch):
            picked = column.index_select(0, rows_of_batch).permute(0, 3, 1, 2)
            picked.float().div_(255).sub_(mean).div_(std)
        _wait(device)

    with tempfile.TemporaryDirectory() as folder:
        data = cerebro.shard({"x": images}, Path(folder) / "images", shards=1)
        batches = data.with_transforms({"x": chain}).batches(batch, device=device)

        def by_cerebro() -> None:
            for _ in batches:
                pass
            _wait(device)

        seconds = alternate({"cerebro": by_cerebro, "torch": by_torch}, rounds)
    bench.add(
        f"epoch of {rows:,} images, u8 to normalized f32 CHW, batch {batch}",
        seconds["cerebro"] * 1e3,
        "ms",
        reference="torch",
        ratio=seconds["cerebro"] / seconds["torch"],
    )


def _wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def main() -> int:
    arguments = parser(__doc__.splitlines()[0]).parse_args()
    bench = Bench("Rows gathered in a GPU's memory", arguments.json)
    options = {"quick": arguments.quick, "rounds": arguments.rounds}
    done = [
        attempt(bench, "gathering rows", lambda: measure_gather(bench, **options)),
        attempt(bench, "epochs of images", lambda: measure_images(bench, **options)),
    ]
    bench.report()
    return 0 if all(done) else 1


if __name__ == "__main__":
    sys.exit(main())
