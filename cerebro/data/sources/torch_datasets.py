"""PyTorch datasets: map-style, iterable, and `TensorDataset`.

A sample may be a mapping, a named tuple, a tuple or a single tensor. The items of a tuple become
the columns ``x``, ``y``, ``column2``, ``column3``, ...; a single tensor becomes ``x``. An item that
is itself a tuple, as in ``((a, b), y)``, is one column, so its parts must have one shape; parts of
different shapes need a mapping with a name for each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cerebro.data.columns import from_rows
from cerebro.data.sources.arrays import ArraysSource
from cerebro.data.sources.base import Source, Table
from cerebro.data.sources.row_mappings import row_chunks
from cerebro.errors import InputError
from cerebro.machine import generators


def torch_source(dataset: Any) -> Source:
    import torch

    if type(dataset) is torch.utils.data.TensorDataset:  # a subclass may change its samples
        tensors = dataset.tensors
        return ArraysSource({_name_column(place): tensor for place, tensor in enumerate(tensors)})
    return TorchSource(dataset)


READ_TWICE = 32
"""The number of samples read twice. A flip with probability 1/2 is missed once in 2**32 times."""


class TorchSource(Source):
    """The samples of a dataset, read by index if it has a length, otherwise by iteration."""

    kind = "torch"

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._remark: str | None = None

    def chunks(self, wanted: Sequence[str] | None) -> Iterator[Table]:
        return row_chunks(self._samples(wanted), wanted)

    def remark(self) -> str | None:
        return self._remark

    def _samples(self, wanted: Sequence[str] | None) -> Iterator[Mapping[str, Any]]:
        import torch

        if isinstance(self.dataset, torch.utils.data.IterableDataset):
            yield from map(as_mapping, self.dataset)
            return
        if not hasattr(self.dataset, "__len__"):
            raise InputError(
                f"the {type(self.dataset).__name__} has no length: give it the method __len__, or "
                "make it a torch.utils.data.IterableDataset"
            )
        count = len(self.dataset)
        step = max(1, count // READ_TWICE)
        seen: dict[int, dict[str, Any]] = {}
        for index in range(count):
            sample = as_mapping(self.dataset[index])
            if index % step == 0 and len(seen) < READ_TWICE:
                seen[index] = _read_contents(sample, wanted)
            yield sample
        self._read_again(seen, wanted)

    def _read_again(self, seen: Mapping[int, Mapping[str, Any]], wanted: Any) -> None:
        """Find random columns by reading samples again; done last, as a dataset may count reads."""
        with generators.preserve_generators(True), contextlib.suppress(Exception):
            for index, before in seen.items():
                after = _read_contents(as_mapping(self.dataset[index]), wanted)
                changed = [name for name in before if after.get(name) != before[name]]
                if changed:
                    named = ", ".join(repr(name) for name in changed)
                    self._remark = (
                        f"sample {index} of the {type(self.dataset).__name__} differs when "
                        f"it is read again (column {named}): one draw of a random transform would "
                        "be stored for every epoch. Leave it out of the dataset, and give "
                        "cerebro.transforms.RandomCrop and RandomHorizontalFlip to "
                        "with_transforms, or augment= to cerebro.torch.Model"
                    )
                    return


def _read_contents(sample: Mapping[str, Any], wanted: Sequence[str] | None) -> dict[str, Any]:
    """Return the contents of a sample's columns, without values that cannot be a column."""
    contents: dict[str, Any] = {}
    for name in sample if wanted is None else wanted:
        with contextlib.suppress(Exception):
            column = from_rows(name, [sample[name]], 0)
            contents[name] = (column.dtype, column.values.tobytes(), column.names)
    return contents


def as_mapping(sample: Any) -> Mapping[str, Any]:
    if isinstance(sample, Mapping):
        return sample
    if hasattr(sample, "_asdict"):
        return dict(sample._asdict())
    if isinstance(sample, (tuple, list)):
        return {_name_column(place): value for place, value in enumerate(sample)}
    return {"x": sample}


def _name_column(place: int) -> str:
    return ("x", "y")[place] if place < 2 else f"column{place}"
