"""Importers: each makes a `Source` from one kind of object."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from cerebro.data.sources.arrays import ArraysSource, PandasSource, bunch_source, is_bunch, is_pair
from cerebro.data.sources.arrow_tables import ArrowFileSource, ArrowSource, ParquetSource
from cerebro.data.sources.base import Source, is_instance
from cerebro.data.sources.files import CsvSource, NpzSource
from cerebro.data.sources.image_folders import holds_class_folders, images
from cerebro.data.sources.loaders import dataset_of, is_loader
from cerebro.data.sources.row_by_row import (
    HuggingFaceSource,
    RowsSource,
    is_huggingface,
    torch_source,
)
from cerebro.errors import InputError
from cerebro.machine.files import expand_path

_FILES: dict[str, Callable[[Path], Source]] = {
    ".npz": NpzSource,
    ".csv": CsvSource,
    ".tsv": CsvSource,
    ".parquet": ParquetSource,
    ".arrow": ArrowFileSource,
    ".feather": ArrowFileSource,
}
_ACCEPTED = (
    "a mapping of column names to arrays, a pair (x, y), a pandas or Arrow table, the path of a "
    ".npz, .csv, .parquet or .arrow file or of a folder of .parquet files or of class folders, "
    "cerebro.images(folder), a PyTorch dataset or DataLoader, a Hugging Face dataset, or an "
    "iterable of row mappings"
)


def open_source(source: Any) -> Source:
    """Return the importer for the user's source."""
    if isinstance(source, Source):
        return source
    if isinstance(source, (str, os.PathLike)):
        return _open_file(Path(expand_path(os.fspath(source))))
    if is_loader(source):
        source = dataset_of(source)
    if is_huggingface(source):
        return HuggingFaceSource(source)
    if is_pair(source):
        return ArraysSource({"x": source[0], "y": source[1]})
    if is_bunch(source):
        return bunch_source(source)
    if isinstance(source, Mapping):
        return ArraysSource(source)
    if is_torch(source):
        return torch_source(source)
    if is_instance(source, "pandas", "DataFrame"):
        return PandasSource(source)
    if _is_arrow(source):
        return ArrowSource(source)
    if hasattr(source, "dtype") or hasattr(source, "__array__"):
        names = getattr(getattr(source, "dtype", None), "names", None)
        if names:  # a structured array
            return ArraysSource({name: source[name] for name in names})
        raise InputError(
            'the source is a single array: name it, such as {"x": array}, or give a pair (x, y)'
        )
    if isinstance(source, Iterable) and not isinstance(source, (bytes, bytearray)):
        return RowsSource(source)
    raise InputError(f"cannot shard a {type(source).__name__}: give {_ACCEPTED}")


def _open_file(path: Path) -> Source:
    if path.is_dir():
        if any(part.suffix.lower() == ".parquet" for part in path.rglob("*")):
            return ParquetSource(path)
        if holds_class_folders(path):
            return images(path)
        raise InputError(
            f"'{path}' is a folder without .parquet files, and without class folders of images: "
            "see cerebro.images"
        )
    opener = _FILES.get(path.suffix.lower())
    if opener is None:
        raise InputError(f"'{path}': unsupported file type; use {_ACCEPTED}")
    if not path.is_file():
        raise InputError(f"no file '{path}'")
    return opener(path)


def is_torch(source: Any) -> bool:
    return is_instance(source, "torch.utils.data", "Dataset")


def _is_arrow(source: Any) -> bool:
    # Tables, readers, other libraries' frames; a series has one type.
    if hasattr(source, "__arrow_c_stream__") and not hasattr(source, "dtype"):
        return True
    return is_instance(source, "pyarrow", "RecordBatch") or is_instance(
        source, "pyarrow.dataset", "Dataset"
    )
