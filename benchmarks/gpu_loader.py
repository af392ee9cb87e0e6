"""How fast streamed batches reach a GPU, compared with pinned copies and ``DataLoader``.

A pass over a dataset in host memory, in batches of random rows, to the GPU; the consumer is a
kernel that touches one value per batch. The reference copies as many bytes from pinned memory in
batch-sized pieces on one stream, at the speed of the bus. The host must gather as fast as the bus
transfers. Its threads are measured too (the CPU's loader, with as many threads); if they are
slower, the ratio shows their speed and not the bus's.

``DataLoader(pin_memory=True)`` gets the rows by whole batches (``sampler=BatchSampler``), its
fastest way, with ``non_blocking`` copies. Resident batches are shown for comparison.

Typical training images (random crop and flip, normalized floats, channels first) are compared with
the usual method, a dataset that does the same per image in as many ``DataLoader`` processes as we
have threads; and with Cerebro's CPU batches, which cross the bus as floats.

    python -m benchmarks.gpu_loader [--quick] [--json FILE] [--threads N]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import cerebro.data
from benchmarks import harness
from cerebro.data import depots
from cerebro.machine import devices
from cerebro.machine.resources import usable_cores
from cerebro.transforms import Normalize, RandomCrop, RandomHorizontalFlip, Scale, ToCHW

BAR = 0.9
NO_GPU = 3
SHARDS = 8
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PADDING = 8  # of images before they are cropped to their size again
# Name, shape and type of a row, batch size, bytes of the dataset.
WORKS: list[tuple[str, tuple[int, ...], Any, int, int]] = [
    ("156 B x 1024", (39,), np.float32, 1024, 128 << 20),
    ("12 KB x 256", (32, 32, 12), np.uint8, 256, 1 << 30),
    ("147 KB x 128", (224, 224, 3), np.uint8, 128, 2 << 30),
]


def rows_of(shape: tuple[int, ...], dtype: Any, nbytes: int) -> np.ndarray[Any, Any]:
    row = int(np.prod(shape)) * np.dtype(dtype).itemsize
    rows = nbytes // row
    if dtype == np.uint8:
        return np.random.default_rng(0).integers(0, 256, (rows, *shape), np.uint8)
    return np.random.default_rng(0).random((rows, *shape), dtype)


class Work:
    """A dataset, and ways to move all its rows to the GPU once, shuffled."""

    def __init__(self, folder: Path, name: str, x: Any, batch_size: int, threads: int) -> None:
        import torch

        self.torch = torch
        self.x = x
        self.batch_size = batch_size
        self.threads = threads
        self.data = cerebro.data.shard(
            {"x": x}, folder / name.replace(" ", ""), shards=SHARDS, shuffle=False, progress=False
        )
        self.nbytes = x.nbytes
        self._loops: dict[str, Any] = {}
        batch = torch.empty(batch_size, *x.shape[1:], dtype=torch.from_numpy(x[:1]).dtype)
        self._pinned = batch.pin_memory()
        self._target = batch.cuda()

    def close(self) -> None:
        self._loops.clear()
        depots.drop("cuda:0")
        self.torch.cuda.empty_cache()

    def loop(self, device: str, residence: str) -> Callable[[], None]:
        key = f"{device} {residence}"
        if key not in self._loops:
            self._loops[key] = self.data.batches(
                self.batch_size, device=device, residence=residence, threads=self.threads
            )
        batches = self._loops[key]

        def run() -> None:
            for batch in batches:
                if device != "cpu":
                    self.consume(batch["x"])
            self.torch.cuda.synchronize()

        return run

    def through(
        self, view: cerebro.data.Dataset, device: str, residence: str
    ) -> Callable[[], None]:
        """A pass over a view; CPU batches are copied from pinned memory."""
        batches = view.batches(
            self.batch_size, device=device, residence=residence, threads=self.threads
        )

        def run() -> None:
            for batch in batches:
                x = batch["x"]
                self.consume(x if x.is_cuda else x.pin_memory().cuda(non_blocking=True))
            self.torch.cuda.synchronize()

        return run

    def consume(self, x: Any) -> None:
        x.view(-1)[:1].add_(1)

    def pinned_copies(self) -> None:
        for start in range(0, len(self.x), self.batch_size):
            n = min(self.batch_size, len(self.x) - start)
            self._target[:n].copy_(self._pinned[:n], non_blocking=True)
            self.consume(self._target)
        self.torch.cuda.synchronize()

    def data_loader(self, workers: int) -> Callable[[], None]:
        """``DataLoader`` whose dataset takes a list of rows."""
        from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

        torch = self.torch

        class Rows(Dataset):  # type: ignore[misc]
            def __init__(self, x: Any) -> None:
                self.x = torch.from_numpy(x)

            def __len__(self) -> int:
                return len(self.x)

            def __getitem__(self, rows: list[int]) -> Any:
                return self.x[rows]

        rows = Rows(self.x)
        loader = DataLoader(
            rows,
            batch_size=None,
            sampler=BatchSampler(RandomSampler(rows), self.batch_size, drop_last=False),
            pin_memory=True,
            num_workers=workers,
            persistent_workers=workers > 0,
        )

        def run() -> None:
            for batch in loader:
                self.consume(batch.cuda(non_blocking=True))
            torch.cuda.synchronize()

        return run

    def picture_loader(self) -> Callable[[], None]:
        """``DataLoader`` whose dataset crops, flips and normalizes one image at a time."""
        from torch.utils.data import DataLoader

        loader = DataLoader(
            _pictures(self.x),
            batch_size=self.batch_size,
            shuffle=True,
            pin_memory=True,
            num_workers=self.threads,
            persistent_workers=True,
        )

        def run() -> None:
            for batch in loader:
                self.consume(batch.cuda(non_blocking=True))
            self.torch.cuda.synchronize()

        return run


def _pictures(x: Any) -> Any:
    import torch
    from torch.nn.functional import pad
    from torch.utils.data import Dataset

    class Pictures(Dataset):  # type: ignore[misc]
        def __init__(self) -> None:
            self.x = torch.from_numpy(x)
            self.mean, self.std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))

        def __len__(self) -> int:
            return len(self.x)

        def __getitem__(self, row: int) -> Any:
            picture = self.x[row].permute(2, 0, 1)
            height, width = picture.shape[1:]
            top, left = torch.randint(0, 2 * PADDING + 1, (2,)).tolist()
            padded = pad(picture, (PADDING,) * 4)
            picture = padded[:, top : top + height, left : left + width]
            if torch.rand(()) < 0.5:
                picture = picture.flip(2)
            return picture.float().div_(255).sub_(self.mean).div_(self.std)

    return Pictures()


def that_run(
    bench: harness.Bench, name: str, candidates: dict[str, Callable[[], None]]
) -> dict[str, Callable[[], None]]:
    """Keep the candidates that run: processes of a ``DataLoader`` may lack space in /dev/shm."""
    return {
        label: run
        for label, run in candidates.items()
        if harness.attempt(bench, f"{name}: {label}", run)
    }


def measure(bench: harness.Bench, work: Work, name: str, rounds: int) -> None:
    candidates = {
        "pinned copies": work.pinned_copies,
        "streamed": work.loop("cuda", "streamed"),
        "resident": work.loop("cuda", "resident"),
        "the CPU's loader alone": work.loop("cpu", "auto"),
        "DataLoader(pin_memory=True), in the process": work.data_loader(0),
        "DataLoader(pin_memory=True), 4 workers": work.data_loader(4),
    }
    seconds = harness.alternate(that_run(bench, name, candidates), rounds)
    ours = seconds["streamed"]
    for label, theirs in seconds.items():
        bench.add(f"{name}: {label}", work.nbytes / 1e9 / theirs, "GB/s")
        if label == "pinned copies":
            add_ratio(bench, f"{name}: streamed", label, theirs / ours, f">= {BAR}")
        elif label != "streamed":
            add_ratio(bench, f"{name}: streamed", label, theirs / ours)


def add_ratio(bench: harness.Bench, name: str, reference: str, ratio: float, bar: str = "") -> None:
    bench.add(f"  {name}, speed", ratio, "", reference=reference, ratio=ratio, bar=bar)


def measure_images(bench: harness.Bench, work: Work, name: str, rounds: int) -> None:
    """uint8 images to normalized floats, channels first: on the CPU, by kernel or by PyTorch."""
    torch = work.torch
    view = work.data.with_transforms({"x": [Scale(1 / 255), Normalize(MEAN, STD), ToCHW()]})
    on_gpu = [torch.tensor(values, device="cuda").view(1, 3, 1, 1) for values in (MEAN, STD)]
    raw = work.data.batches(
        work.batch_size, residence="streamed", threads=work.threads, device="cuda"
    )

    def in_pytorch() -> None:
        for batch in raw:
            x = batch["x"].permute(0, 3, 1, 2).float().div_(255)
            work.consume(x.sub_(on_gpu[0]).div_(on_gpu[1]).contiguous())
        torch.cuda.synchronize()

    reference = "streamed as bytes, normalized by PyTorch"
    seconds = harness.alternate(
        {
            reference: in_pytorch,
            "resident, by kernel": work.through(view, "cuda", "resident"),
            "streamed, by kernel": work.through(view, "cuda", "streamed"),
        },
        rounds,
    )
    add_speeds(bench, f"{name} normalized", work, seconds, reference, "PyTorch's")


def measure_training(bench: harness.Bench, work: Work, name: str, rounds: int) -> None:
    """uint8 images, randomly cropped and flipped, to normalized floats, channels first."""
    size = work.x.shape[1:3]
    moves = [RandomCrop(size, padding=PADDING), RandomHorizontalFlip()]
    view = work.data.with_transforms({"x": [*moves, Scale(1 / 255), Normalize(MEAN, STD), ToCHW()]})
    reference = f"DataLoader(pin_memory=True), {work.threads} workers"
    candidates = {
        reference: work.picture_loader(),
        "made by the CPU's loader, copied as floats": work.through(view, "cpu", "auto"),
        "streamed as bytes, made by kernel": work.through(view, "cuda", "streamed"),
        "resident, made by kernel": work.through(view, "cuda", "resident"),
    }
    seconds = harness.alternate(that_run(bench, name, candidates), rounds)
    add_speeds(bench, f"{name} cropped at random", work, seconds, reference, "DataLoader")


def add_speeds(
    bench: harness.Bench,
    name: str,
    work: Work,
    seconds: dict[str, float],
    reference: str,
    short: str,
) -> None:
    """Bytes of the dataset per second, each with the reference's."""
    for label, theirs in seconds.items():
        known = reference in seconds and label != reference
        ratio = seconds[reference] / theirs if known else None
        bench.add(
            f"{name}: {label}",
            work.nbytes / 1e9 / theirs,
            "GB/s",
            reference="" if ratio is None else short,
            ratio=ratio,
        )


def main() -> int:
    options = harness.parser(__doc__.splitlines()[0])
    options.add_argument("--threads", type=int, help="that gather; all cores but one otherwise")
    arguments = options.parse_args()
    found = devices.lookup()
    if not found.devices:
        print(f"no GPU here: {found.problem}; nothing was measured")
        return NO_GPU
    threads = arguments.threads or max(1, min(usable_cores() - 1, 16))
    bench = harness.Bench("Batches to a GPU", arguments.json)
    bench.note(f"{found.devices[0].label}, {threads} threads that gather")
    rounds = 2 if arguments.quick else arguments.rounds
    failed = False
    with tempfile.TemporaryDirectory() as folder:
        for name, shape, dtype, batch_size, nbytes in WORKS:
            x = rows_of(shape, dtype, nbytes // 16 if arguments.quick else nbytes)
            work = Work(Path(folder), name, x, batch_size, threads)
            measures = {"": measure}
            if len(shape) == 3 and shape[-1] == 3:
                measures |= {" normalized": measure_images, " cropped": measure_training}
            for kind, one in measures.items():
                what = partial(one, bench, work, name, rounds)
                failed |= not harness.attempt(bench, name + kind, what)
            work.close()
    bench.report()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
