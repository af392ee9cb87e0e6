"""The dataset of a PyTorch DataLoader, if the loader only makes batches of its rows."""

from __future__ import annotations

from typing import Any

from cerebro.data.sources.base import is_instance
from cerebro.errors import InputError


def is_loader(value: Any) -> bool:
    """Return whether a value is a PyTorch DataLoader."""
    return is_instance(value, "torch.utils.data", "DataLoader")


def dataset_of(loader: Any) -> Any:
    """Return the dataset of a DataLoader; raise InputError if the loader changes its rows."""
    from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, default_collate

    if type(loader.batch_sampler) not in (BatchSampler, type(None)):
        raise InputError(
            "the DataLoader has a custom batch_sampler "
            f"({type(loader.batch_sampler).__name__}), which a search cannot honour: "
            "give loader.dataset if every epoch may see all rows once"
        )
    if loader.batch_sampler is None:
        raise InputError(
            "the DataLoader has batch_size=None, so its dataset makes batches: give rows"
        )
    sampler = loader.batch_sampler.sampler  # that of the loader, if it made the batch_sampler
    is_stream = is_instance(loader.dataset, "torch.utils.data", "IterableDataset")
    ordinary = is_stream or (
        type(sampler) in (SequentialSampler, RandomSampler)
        and not getattr(sampler, "replacement", False)
        and len(sampler) == len(loader.dataset)
    )
    if not ordinary:
        raise InputError(
            f"the DataLoader has the sampler {type(sampler).__name__}, and in a search every epoch "
            "sees all rows once: give loader.dataset; rows by weight are "
            "cerebro.shard(...).with_sampling(weights=), a subset is torch.utils.data.Subset"
        )
    if loader.collate_fn is not default_collate and not _is_converting(loader.collate_fn):
        name = getattr(loader.collate_fn, "__qualname__", type(loader.collate_fn).__name__)
        raise InputError(
            f"the DataLoader has the collate_fn {name}, which would not be called: give "
            "loader.dataset; do in the dataset what is done for each row, and in "
            "the model what needs a batch. Sequences of different lengths are padded by cerebro"
        )
    return loader.dataset


def _is_converting(function: Any) -> bool:
    # The default of a loader whose samples are not stacked.
    return getattr(function, "__module__", "").startswith("torch.utils.data._utils")
