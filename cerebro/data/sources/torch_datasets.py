"""PyTorch datasets: map-style, iterable, and `TensorDataset`.

A sample may be a mapping, a named tuple, or a tuple: then its items are ``x`` and ``y`` (and
``column2``, ``column3``, ... if there are more). A sample that is a single tensor is ``x``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cerebro.data.sources.arrays import ArraysSource
from cerebro.data.sources.base import Source, Table
from cerebro.data.sources.row_mappings import row_chunks


def torch_source(dataset: Any) -> Source:
    """The importer for a PyTorch dataset."""
    import torch

    if type(dataset) is torch.utils.data.TensorDataset:  # a subclass may change its samples
        tensors = dataset.tensors
        return ArraysSource({_name(place): tensor for place, tensor in enumerate(tensors)})
    return TorchSource(dataset)


class TorchSource(Source):
    """Samples one after the other: by number where the dataset has a length, else as it gives."""

    kind = "torch"

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def chunks(self, wanted: Sequence[str] | None) -> Iterator[Table]:
        return row_chunks((as_mapping(sample) for sample in self._samples()), wanted)

    def _samples(self) -> Iterator[Any]:
        import torch

        if isinstance(self.dataset, torch.utils.data.IterableDataset):
            yield from self.dataset
            return
        for index in range(len(self.dataset)):
            yield self.dataset[index]


def as_mapping(sample: Any) -> Mapping[str, Any]:
    """A sample as a row."""
    if isinstance(sample, Mapping):
        return sample
    if hasattr(sample, "_asdict"):
        return dict(sample._asdict())
    if isinstance(sample, (tuple, list)):
        return {_name(place): value for place, value in enumerate(sample)}
    return {"x": sample}


def _name(place: int) -> str:
    return ("x", "y")[place] if place < 2 else f"column{place}"
