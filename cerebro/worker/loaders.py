"""Make the batches of a worker's units, and look at the data that they come from."""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import cerebro._core as _core
from cerebro.data import Dataset, depots
from cerebro.machine.devices import is_gpu
from cerebro.machine.local import Clock
from cerebro.model import framework_of, read_columns
from cerebro.worker.data_diagnosis import find_not_finite, summarize_texts
from cerebro.worker.messages import RunContext
from cerebro.worker.models import Loader, describe_left_out, find_fitting_columns, make_batches
from cerebro.worker.trial_warnings import warn

MAX_LOADERS = 8
MAX_GPU_LOADERS = 4  # each has batches in device memory and in pinned memory
"""The most loaders kept for a GPU. A run with folds may have two for each fold, if that is more."""

SIZES_SECONDS = 0.1  # how long the sizes of a shard's files count once they have been checked


class Loaders:
    """The loaders of a worker. A few are kept, because their buffers are warm."""

    def __init__(self, context: RunContext, clock: Clock) -> None:
        self._context = context
        self._clock = clock
        self._kept: OrderedDict[tuple[Any, ...], Loader] = OrderedDict()
        self._orders = _core.Orders()
        self._verified: set[tuple[bool, int]] = set()
        self._sized: dict[tuple[bool, int], float] = {}  # when sizes of files were checked
        self._fits: dict[tuple[str, ...] | None, tuple[list[str] | None, dict[str, str]]] = {}
        self._bad_columns: dict[tuple[Any, ...], dict[str, str]] = {}  # see `find_cause`
        self.unfit: dict[str, str] = {}
        """The columns that the last loader leaves out; see `find_fitting_columns`."""
        self.moved = ""
        """Why PyTorch moves batches to the GPU; empty if they are made there."""

    def make(
        self, model: Any, config: Mapping[str, Any], *, training: bool, trial: int, epoch: int = 0
    ) -> Loader:
        context = self._context
        batches = context.batches
        batch_size = batches.size_of(config) if training else batches.eval_size_of(config)
        data = self._data_of(trial, training)
        columns, self.unfit = read_columns(model, data.columns), {}
        if not training and context.folds is None:  # folds are views of the training data
            columns = self._find_fitting_columns(model, columns)
        copy = epoch % data.shards.copies if training else 0
        key = (
            training,
            batch_size,
            framework_of(model),
            getattr(model, "channels_last", False),
            data.shards.generation,
            context.fold_of(trial),
            copy,
            None if columns is None else tuple(columns),
        )
        loader = self._kept.pop(key, None)
        if loader is None:
            loader = make_batches(
                model,
                data,
                batch_size,
                context.device,
                columns=columns,
                seed=context.exactness.seed,
                shuffle=training and context.batches.shuffle,
                orders=self._orders,
                drop_last=training and context.batches.drop_last,
                threads=context.share.loader_threads,
                augment=training,
                copy=copy,
            )
            depots.set_limit(loader, context.share.data_bytes)
            self.moved = self.moved or getattr(loader, "why", "")
        self._kept[key] = loader
        most = MAX_GPU_LOADERS if is_gpu(context.device) else MAX_LOADERS
        if len(self._kept) > max(most, 2 * len(context.folds or ())):
            self._kept.popitem(last=False)[1].close()
        return loader

    def _data_of(self, trial: int, training: bool) -> Dataset:
        train, validation = self._context.views(trial)
        data = train if training else validation
        assert data is not None
        return data

    def _find_fitting_columns(self, model: Any, read: list[str] | None) -> list[str] | None:
        train, validation = self._context.train, self._context.validation
        assert validation is not None
        key = None if read is None else tuple(read)
        if key not in self._fits:
            what = f"validation ({validation.path})"
            self._fits[key] = find_fitting_columns(model, train, validation, what)
            if text := describe_left_out(self._fits[key][1], validation):
                warn(f"validation: {text}")
        columns, self.unfit = self._fits[key]
        return columns

    def verify(self, training: bool, shard: int) -> None:
        """Check a shard's file sizes, and before the first use in a run, its checksums."""
        # Folds are validated on files of the training data.
        training = training or self._context.folds is not None
        key = (training, shard)
        data = self._context.train if training else self._context.validation
        assert data is not None
        now = self._clock.monotonic()
        if self._context.verify and key not in self._verified:
            data.shards.verify(shard)
            self._verified.add(key)
        # Short units use all shards each, so recent checks still count.
        elif now - self._sized.get(key, -math.inf) < SIZES_SECONDS:
            data.shards.pull([shard])
            return
        else:
            data.shards.check_sizes(shard)
        self._sized[key] = now

    def find_cause(self, model: Any, trial: int, *, training: bool) -> str:
        """Return a phrase about columns that may make a loss NaN or infinite; "" if none do."""
        data = self._data_of(trial, training)
        names = read_columns(model, data.columns) or [*data.columns]
        reasons = self._bad_columns.setdefault((training, self._context.fold_of(trial)), {})
        new = [name for name in names if name not in reasons]
        reasons.update(dict.fromkeys(new, ""))  # each column is looked at once
        # If reading the data fails, for example for lack of memory, the message is only about the
        # loss.
        with contextlib.suppress(Exception):
            reasons.update(find_not_finite(data, new))
        bad = summarize_texts({name: reasons[name] for name in names if reasons[name]})
        return f"; {bad}, which may be the cause: fill them, or drop these rows" if bad else ""

    def close(self) -> None:
        while self._kept:
            self._kept.popitem()[1].close()
