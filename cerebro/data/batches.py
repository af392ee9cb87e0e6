"""Batches of a dataset: set up the C loader with its rows, columns and transforms."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Any, Literal, Protocol

import cerebro._core as _core
import cerebro.transforms as _transforms
from cerebro.arguments import check_whole_number
from cerebro.data import depots
from cerebro.data.depots import MovedBatches
from cerebro.data.order import Cut, Mix, Shuffle, make_order, mix_in_order, resolve_shuffle
from cerebro.data.shards import copy_name
from cerebro.data.stats import check_shards
from cerebro.data.view import View
from cerebro.errors import DeviceError, InputError, one_line
from cerebro.machine import cuda
from cerebro.machine.resources import usable_cores

FRAMEWORKS = ("torch", "numpy", "jax", "dlpack")

MAX_THREADS = 64


class LoadableDataset(Protocol):
    """A `cerebro.data.Dataset`, of which a loader needs the view."""

    @property
    def view(self) -> View: ...


def make_loader(
    dataset: LoadableDataset,
    batch_size: int,
    *,
    seed: int,
    shuffle: Shuffle | Literal[False] = "rows",
    drop_last: bool = False,
    framework: str = "torch",
    threads: int = 0,
    augment: bool = True,
    channels_last: bool = False,
    columns: Collection[str] | None = None,
    copy: int = 0,
    device: Any = "cpu",
    residence: str = "auto",
    orders: _core.Orders | None = None,
) -> _core.Loader:
    """Return a loader of the dataset's rows; ``begin(mixes, epoch)`` starts a pass.

    The arguments and errors are those of `Dataset.batches`, with these differences:

    - `shuffle`: False: rows in order. Otherwise the rows of a mix are shuffled, or drawn from all
      shards (``"rows"``) or from each (``"shards"``).
    - `orders`: the orders of rows that this process's loaders of the same data share.
    - `augment`: False for evaluation: random crops are taken from the middle, nothing is flipped.
    - `channels_last`: images with the transform `ToCHW` get the memory format ``channels_last``;
      only for PyTorch and DLPack.
    - `copy`: the stored copy of augmented columns to gather; see `Shards.copied`. Evaluation
      gathers the values without augmentation.
    """
    where = _check_place(device, framework, residence)
    if framework == "torch" and where != "cpu":
        cuda.start_torch()  # before the depot, so that PyTorch allocates its memory
    depot = None if where == "cpu" else depots.depot(where)
    cuda.share_pool(where)
    view = dataset.view
    plan = _transforms.compile(
        view.shards.columns, view.transforms, augment=augment, channels_last=channels_last
    )
    copies = view.shards.copy_names
    plan = [entry for entry in plan if entry["name"] not in copies]
    if columns is not None:
        plan = [entry for entry in plan if entry["name"] in columns]
    for entry in plan:
        if augment and entry["name"] in view.shards.copied:
            entry["source"] = copy_name(entry["name"], copy)
    parts: Sequence[tuple[Any, ...]] = view.loader_parts()
    across = shuffle == "rows"
    sums = view.weight_sums(across=across) if shuffle else None
    if sums is not None:
        parts = [(*part, *of_part) for part, of_part in zip(parts, sums, strict=True)]
    return _core.Loader(
        parts,
        plan,
        batch_size=check_whole_number("batch_size", batch_size, 1),
        seed=check_whole_number("seed", seed, 0, 2**64 - 1),
        shuffle=shuffle is not False,
        drop_last=bool(drop_last),
        framework=framework,
        threads=check_whole_number("threads", threads, 0, MAX_THREADS),
        first_rows=view.shards.first_rows,
        depot=depot,
        residence=residence,
        orders=orders,
        draw_across=across,
    )


def _check_place(device: Any, framework: str, residence: str) -> str:
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


def make_trusted_loader(
    dataset: LoadableDataset,
    batch_size: int,
    *,
    device: Any = "cpu",
    framework: str = "torch",
    residence: str = "auto",
    **options: Any,
) -> _core.Loader | MovedBatches:
    """Return a loader of batches on a device; the arguments and errors are those of `make_loader`.

    If the device fails its check (`cuda.find_problem`), or only PyTorch can use CUDA (a
    build that includes the runtime), batches are made in host memory and PyTorch moves them. Raises
    DeviceError for other frameworks.
    """
    where = _check_place(device, framework, residence)
    why = "" if where == "cpu" else depots.find_problem(where)
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
    """The batches of a dataset, epoch after epoch; made by `Dataset.batches`.

    Iterating yields ``dict[str, tensor]``; iterating again yields the next epoch. A pass takes its
    epoch when its first batch is requested, so ``iter(batches)`` alone changes nothing. The tensors
    are writable and stay valid as long as they are referenced; a buffer is reused once its tensors
    are freed.

    `Dataset.batches` documents the order of the rows, the arguments and the errors, `make_loader`
    the argument `augment`. Random transforms are keyed by (seed, epoch, row).
    """

    def __init__(
        self,
        dataset: LoadableDataset,
        batch_size: int,
        *,
        seed: int = 0,
        epoch: int = 0,
        shard: int | None = None,
        shuffle: bool | Shuffle | None = True,
        drop_last: bool = False,
        framework: str = "torch",
        device: Any = "cpu",
        start: int = 0,
        threads: int | None = None,
        augment: bool = True,
        residence: str = "auto",
        columns: Collection[str] | None = None,
        trial: int | None = 0,
    ) -> None:
        where = depots.device_name(device)
        self._dataset = dataset
        kind: Shuffle | Literal[False] = False
        if shuffle is not False:
            if shuffle not in (True, None, "rows", "shards"):
                raise InputError(
                    f'shuffle must be True, False, "rows", "shards" or None, not {shuffle!r}'
                )
            kind = resolve_shuffle(None if shuffle is True else shuffle, dataset)
        if kind == "shards":
            check_shards(dataset)
        seed = check_whole_number("seed", seed, 0, 2**64 - 1)
        batch_size = check_whole_number("batch_size", batch_size, 1)
        self._order = make_order(dataset, kind or "rows", seed, stagger=trial is not None)
        self._cut = Cut(batch_size, bool(drop_last))
        self._trial = check_whole_number("trial", trial, 0, 2**32 - 1, optional=True) or 0
        self._options: dict[str, Any] = {
            "batch_size": batch_size,
            "seed": seed,
            "shuffle": kind,
            "drop_last": drop_last,
            "framework": framework,
            "threads": idle_threads(2 if where == "cpu" else 4) if threads is None else threads,
            "augment": augment,
            "device": where,
            "residence": residence,
            "columns": _check_columns(dataset, columns),
        }
        # The number of stored copies that passes read in turn; 1 without augmented copies.
        self._copies = dataset.view.shards.copies if augment else 1
        self._epoch = check_whole_number("epoch", epoch, 0, 2**32 - 1)
        self._start = check_whole_number("start", start, 0)
        last = max(len(dataset.view.parts) - 1, 0)
        self._shard = check_whole_number("shard", shard, 0, last, optional=True)
        if kind == "rows" and self._shard is not None:
            _check_weights(dataset, self._shard)
        copy = self._epoch % self._copies
        self._idle = [(copy, self._new_loader(copy))]  # loaders that no pass is using
        self._process = os.getpid()
        if framework == "torch" and where != "cpu" and not cuda.start_torch():
            why = getattr(self._idle[0][1], "why", "")
            raise DeviceError(
                why
                or f"this PyTorch cannot compute on {where}: install one that is built for CUDA, "
                "or use framework='jax' or 'dlpack'"
            )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        # A generator: nothing runs before the first batch is requested. Lightning and others call
        # iter() only to check that it works.
        epoch, start = self._epoch, self._start
        self._epoch, self._start = epoch + 1, 0
        copy = epoch % self._copies
        loader = self._loader(copy)
        try:
            loader.begin(self._mixes(epoch), epoch, start)
            depots.tell_note(loader)
            # islice, because `yield from loader` would close the loader when a pass is abandoned,
            # and a loop variable would keep each batch alive while the next one is made.
            yield from islice(loader, None)
        finally:
            if self._process == os.getpid():
                self._idle.append((copy, loader))

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles: the next pass, without buffers."""
        return {**self.__dict__, "_idle": []}

    def __len__(self) -> int:
        """The number of batches in the next pass."""
        batches = self._order.count_batches(self._mixes(self._epoch), self._cut)
        return max(batches - self._start, 0)

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
        """This object, because Lightning looks for `set_epoch` on the sampler."""
        return self

    @property
    def batch_size(self) -> int:
        """Rows of a batch."""
        return int(self._options["batch_size"])

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass."""
        self._epoch = check_whole_number("epoch", epoch, 0, 2**32 - 1)

    def _new_loader(self, copy: int) -> _core.Loader | MovedBatches:
        return make_trusted_loader(self._dataset, copy=copy, **self._options)

    def _mixes(self, epoch: int) -> list[Mix]:
        if self._shard is not None:
            return [(self._shard,)]
        if self._options["shuffle"] is False:
            return mix_in_order(self._dataset)
        return self._order.pass_of(self._trial, epoch)

    def _loader(self, copy: int) -> _core.Loader | MovedBatches:
        """Return a loader for a pass; concurrent passes, as in zip(batches, batches), need two."""
        if self._process != os.getpid():  # the loaders' threads stayed in the parent process
            self._process = os.getpid()
            self._idle = []
        for place in reversed(range(len(self._idle))):
            if self._idle[place][0] == copy:
                return self._idle.pop(place)[1]
        return self._new_loader(copy)


def _check_columns(dataset: LoadableDataset, columns: Collection[str] | None) -> list[str] | None:
    if columns is None:
        return None
    if isinstance(columns, str) or not isinstance(columns, Collection) or not columns:
        raise InputError(f'columns is {columns!r}: give a list of names such as ["x", "y"]')
    shards = dataset.view.shards
    available = [name for name in shards.columns if name not in shards.copy_names]
    for name in columns:
        if name not in available:
            raise InputError(f"columns: no column {name!r}: batches have {', '.join(available)}")
    return list(columns)


def _check_weights(dataset: LoadableDataset, shard: int) -> None:
    """Raise InputError if rows are drawn by weights that are all 0 in a shard."""
    sums = dataset.view.weight_sums(across=True)
    if sums is None:
        return
    of_shard, before = sums[shard]
    if of_shard is not None and len(of_shard) and of_shard[-1] <= before:
        raise InputError(
            f"all weights in shard {shard} are 0, so no row can be drawn there: leave out shard="
        )


def idle_threads(most: int = 2) -> int:
    """Return the number of threads for gathering while one computes: free cores, up to `most`."""
    return max(0, min(usable_cores() - 1, most))
