"""Batches of a data set: set up the C loader with its rows, columns and transforms."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

import cerebro._core as _core
import cerebro.transforms as _transforms
from cerebro.arguments import whole_number
from cerebro.data import depots
from cerebro.data.moved import MovedBatches
from cerebro.errors import DeviceError, InputError, one_line
from cerebro.machine import cuda
from cerebro.machine.resources import usable_cores

if TYPE_CHECKING:
    from cerebro.transforms import ColumnLike, Transform

FRAMEWORKS = ("torch", "numpy", "jax", "dlpack")

MAX_THREADS = 64


class LoadableDataset(Protocol):
    """The part of a data set that a loader needs; `cerebro.data.Dataset` implements it."""

    @property
    def columns(self) -> Mapping[str, ColumnLike]: ...
    @property
    def transforms(self) -> Mapping[str, tuple[Transform, ...]]: ...
    @property
    def num_shards(self) -> int: ...
    def _parts(
        self,
    ) -> Sequence[tuple[_core.ShardReader, tuple[int, int] | NDArray[np.uint32]]]: ...
    def _first_rows(self) -> Sequence[int]: ...


def make_loader(
    dataset: LoadableDataset,
    batch_size: int,
    *,
    seed: int,
    shuffle: bool = True,
    drop_last: bool = False,
    framework: str = "torch",
    threads: int = 0,
    augment: bool = True,
    device: Any = "cpu",
    residence: str = "auto",
) -> _core.Loader:
    """Return a loader of the data set's rows; ``begin(shards, epoch)`` starts a pass.

    Parameters
    ----------
    dataset
        Its shards have the same numbers in the loader.
    augment
        False for evaluation: random crops are taken from the middle, nothing is flipped.
    batch_size, seed, shuffle, drop_last, framework, threads, device, residence
        As for `Dataset.batches`, which raises the same errors.
    """
    where = _place(device, framework, residence)
    if framework == "torch" and where != "cpu":
        cuda.start_torch()  # before the depot, whose memory is then PyTorch's
    depot = None if where == "cpu" else depots.depot(where)
    cuda.share_pool(where)
    return _core.Loader(
        dataset._parts(),
        _transforms.compile(dataset.columns, dataset.transforms, augment=augment),
        batch_size=whole_number("batch_size", batch_size, 1),
        seed=whole_number("seed", seed, 0, 2**64 - 1),
        shuffle=bool(shuffle),
        drop_last=bool(drop_last),
        framework=framework,
        threads=whole_number("threads", threads, 0, MAX_THREADS),
        first_rows=dataset._first_rows(),
        depot=depot,
        residence=residence,
    )


def _place(device: Any, framework: str, residence: str) -> str:
    """Check device, framework and residence; return the device's name."""
    if framework not in FRAMEWORKS:
        raise InputError(f"framework must be one of {', '.join(FRAMEWORKS)}, not {framework!r}")
    if residence not in depots.RESIDENCES:
        raise InputError(
            f"residence must be one of {', '.join(depots.RESIDENCES)}, not {residence!r}"
        )
    where = depots.device_name(device)
    if framework == "numpy" and where != "cpu":
        raise InputError(
            f"NumPy has no arrays on {where}: use framework='torch', 'jax' or 'dlpack' there"
        )
    return where


def make_trusted(
    dataset: LoadableDataset,
    batch_size: int,
    *,
    device: Any = "cpu",
    framework: str = "torch",
    residence: str = "auto",
    **options: Any,
) -> _core.Loader | MovedBatches:
    """Return a loader of batches on a device, made on the device if it passes its check.

    If it fails (see `cerebro.machine.device_check`), or if CUDA is usable only through PyTorch (a
    build that includes the runtime), batches are made in host memory and PyTorch moves them.

    The arguments are those of `make_loader`.

    Raises
    ------
    InputError
        As for `Dataset.batches`.
    DeviceError
        The device cannot be trusted, and `framework` is not ``"torch"``.
    """
    where = _place(device, framework, residence)
    why = "" if where == "cpu" else depots.problem(where)
    options |= {"framework": framework, "residence": residence}
    if why == "":
        try:
            return make_loader(dataset, batch_size, device=where, **options)
        except DeviceError as error:
            why = one_line(str(error))
    if framework != "torch":
        raise DeviceError(
            f"cannot make batches on {where}: {why}. `python -m cerebro doctor` tries it again; "
            "with framework='torch' PyTorch moves batches there"
        )
    return MovedBatches(make_loader(dataset, batch_size, **options), where, why)


class Batches:
    """The batches of a data set, epoch after epoch; made by `Dataset.batches`.

    Iterating gives ``dict[str, tensor]``, and iterating again gives the next epoch: a pass takes
    its epoch when its first batch is requested, so ``iter(batches)`` alone changes nothing. The
    tensors are writable and stay valid as long as they are kept; a buffer is used again when its
    tensors are gone.

    `Dataset.batches` documents the order of the rows, the arguments and the errors; `augment` is
    that of `make_loader`. Random transforms are keyed by (seed, epoch, row).
    """

    def __init__(
        self,
        dataset: LoadableDataset,
        batch_size: int,
        *,
        seed: int = 0,
        epoch: int = 0,
        shard: int | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        framework: str = "torch",
        device: Any = "cpu",
        start: int = 0,
        threads: int | None = None,
        augment: bool = True,
        residence: str = "auto",
    ) -> None:
        where = depots.device_name(device)
        self._dataset = dataset
        self._options: dict[str, Any] = {
            "batch_size": batch_size,
            "seed": seed,
            "shuffle": shuffle,
            "drop_last": drop_last,
            "framework": framework,
            "threads": idle_threads(2 if where == "cpu" else 4) if threads is None else threads,
            "augment": augment,
            "device": where,
            "residence": residence,
        }
        self._epoch = whole_number("epoch", epoch, 0, 2**32 - 1)
        self._start = whole_number("start", start, 0)
        last = max(dataset.num_shards - 1, 0)
        self._shard = whole_number("shard", shard, 0, last, optional=True)
        self._idle = [self._new_loader()]  # loaders that no pass is using
        self._process = os.getpid()
        if framework == "torch" and where != "cpu" and not cuda.start_torch():
            why = getattr(self._idle[0], "why", "")
            raise DeviceError(
                why
                or f"this PyTorch cannot compute on {where}: install one that is built for CUDA, "
                "or use framework='jax' or 'dlpack'"
            )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # Not before the first batch: Lightning and others call iter() only to check that it works.
        epoch, start = self._epoch, self._start
        self._epoch, self._start = epoch + 1, 0
        loader = self._loader()
        try:
            loader.begin(self._shards(epoch), epoch, start)
            depots.tell_note(loader)
            # Through islice: `yield from loader` would close the loader when a pass is abandoned,
            # and a loop variable would keep each batch alive while the next one is made.
            yield from islice(loader, None)
        finally:
            if self._process == os.getpid():
                self._idle.append(loader)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles: the next pass, without buffers."""
        return {**self.__dict__, "_idle": []}

    def __len__(self) -> int:
        """The number of batches in the next pass."""
        counts = (
            _core.batch_count(rows, self._options["batch_size"], bool(self._options["drop_last"]))
            for rows in self._rows()
        )
        return max(sum(counts) - self._start, 0)

    def __repr__(self) -> str:
        options = self._options
        where = "" if options["device"] == "cpu" else f", device={options['device']!r}"
        return (
            f"Batches(epoch={self._epoch}, {len(self)} batches of {options['batch_size']} rows, "
            f"framework={options['framework']!r}{where})"
        )

    @property
    def epoch(self) -> int:
        """The epoch of the next pass."""
        return self._epoch

    @property
    def sampler(self) -> Batches:
        """The object itself: Lightning looks for `set_epoch` on the sampler."""
        return self

    @property
    def batch_size(self) -> int:
        """Rows of a batch."""
        return int(self._options["batch_size"])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self._epoch = whole_number("epoch", epoch, 0, 2**32 - 1)

    def _new_loader(self) -> _core.Loader | MovedBatches:
        return make_trusted(self._dataset, **self._options)

    def _rows(self) -> list[int]:
        rows = [
            part[1] - part[0] if isinstance(part, tuple) else len(part)
            for _, part in self._dataset._parts()
        ]
        return rows if self._shard is None else [rows[self._shard]]

    def _shards(self, epoch: int) -> list[int]:
        if self._shard is not None:
            return [self._shard]
        return _core.visit_order(0, epoch, self._dataset.num_shards)

    def _loader(self) -> _core.Loader | MovedBatches:
        """A loader for one pass; concurrent passes, as in zip(batches, batches), get one each."""
        if self._process != os.getpid():  # the loaders' threads stayed in the parent process
            self._process = os.getpid()
            self._idle = []
        return self._idle.pop() if self._idle else self._new_loader()


def idle_threads(most: int = 2) -> int:
    """Return how many threads may gather beside a computing one: the other cores, up to `most`."""
    return max(0, min(usable_cores() - 1, most))
