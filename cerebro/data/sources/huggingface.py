"""Hugging Face datasets, mapped or streaming.

Columns of numbers, strings and lists are read directly from Arrow data; images and other features
that must be decoded are read row by row. A ``ClassLabel`` column keeps its codes and names; its
code -1 is a missing value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cerebro.data.columns import add_classes
from cerebro.data.sources.arrow_tables import read_tables
from cerebro.data.sources.base import Source, Table, choose_columns
from cerebro.data.sources.row_mappings import row_chunks
from cerebro.errors import InputError

BATCH_ROWS = 4096


def is_huggingface(source: Any) -> bool:
    """Return whether `source` is a dataset, or a dict of several, of the ``datasets`` package."""
    kind = type(source)
    return kind.__module__.partition(".")[0] == "datasets" and hasattr(source, "with_format")


class HuggingFaceSource(Source):
    kind = "huggingface"
    declaration = "dataset.class_encode_column({})"

    def __init__(self, dataset: Any) -> None:
        if isinstance(dataset, dict):
            raise InputError(
                f"the dataset has the splits {', '.join(dataset)}: shard one of them, such as "
                f"dataset[{next(iter(dataset))!r}]"
            )
        if (getattr(dataset, "format", None) or {}).get("type") == "custom":
            raise InputError(
                "the dataset has a transform (set_transform), which shard does not apply: apply it "
                "with dataset.map, or remove it with dataset.reset_format()"
            )
        self.dataset = dataset

    def fingerprint(self) -> str | None:
        fingerprint = getattr(self.dataset, "_fingerprint", None)
        return f"huggingface:{fingerprint}" if isinstance(fingerprint, str) else None

    def chunks(self, wanted: Sequence[str] | None) -> Iterator[Table]:
        features = self.dataset.features
        if features is None:  # a stream whose columns are not known in advance
            yield from row_chunks(iter(self.dataset.with_format(None)), wanted)
            return
        names = choose_columns(features, wanted)
        classes = {
            name: features[name].names
            for name in names
            if type(features[name]).__name__ == "ClassLabel"
        }
        dataset = self.dataset.select_columns(names)
        if all(_is_plain(features[name]) for name in names):
            arrow = dataset.with_format("arrow").iter(BATCH_ROWS)
            batches = (batch for table in arrow for batch in table.combine_chunks().to_batches())
            first = 0
            for table in read_tables(batches, names, self.binary):
                for name, labels in classes.items():
                    table[name] = add_classes(name, table[name], labels, first)
                yield table
                first += next(iter(table.values())).rows
        else:
            yield from row_chunks(iter(dataset.with_format(None)), names, classes)


def _is_plain(feature: Any) -> bool:
    """Return whether a feature is stored as is: numbers, strings, labels, or lists of them."""
    inner = getattr(feature, "feature", None)
    if inner is not None:
        return _is_plain(inner)
    return type(feature).__name__ in ("Value", "ClassLabel")
