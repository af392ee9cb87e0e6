"""`shard`: write any source as a dataset on disk, completely or not at all.

Everything is written into a temporary folder beside the target, which is renamed at the end: the
target is complete or absent. If the path is a link, the target is the folder that it leads to. The
temporary folder holds a file that is locked while its process lives; the next `shard` to the same
path removes a folder whose lock is free, left by a dead process (`cerebro.data.unfinished`).

A dataset in object storage is made in a folder first, then uploaded (`cerebro.data.cache`).
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import cerebro._core as _core
from cerebro.arguments import SHARD, check_whole_number, explain_keywords, warn_user
from cerebro.data.cache import Upload
from cerebro.data.columns import check_complete
from cerebro.data.containers import unpack_one
from cerebro.data.dataset import Dataset
from cerebro.data.dtypes import TEXT, parse_dtype
from cerebro.data.filling import FilledSource, check_missing, check_unknown, describe_columns
from cerebro.data.layout import Columns, OutputColumn, check_rows, lay_out, source_columns
from cerebro.data.manifest import Manifest, checksum_of, read_manifest
from cerebro.data.sources import open_source
from cerebro.data.sources.base import Source, Table
from cerebro.data.sources.image_folders import images
from cerebro.data.stats import iterate_pieces
from cerebro.data.unfinished import (
    LOCK,
    ByteProgress,
    is_empty_folder,
    real_target,
    temporary_folder,
)
from cerebro.data.writer import default_shards, spool, write_shards
from cerebro.errors import CerebroError, InputError
from cerebro.machine import durable
from cerebro.machine.files import path_of
from cerebro.machine.objects import is_url
from cerebro.model import TARGETS

_SPOOL = ".spool"
_REMOVE = "choose another path, or remove the folder unless an earlier run needs it"


@explain_keywords(SHARD)
def shard(
    source: Any,
    path: str | os.PathLike[str],
    *,
    shards: int | None = None,
    columns: Columns | None = None,
    dtypes: Mapping[str, Any] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    exist_ok: bool = False,
    progress: str | bool = "auto",
    missing: str | Mapping[str, Any] | None = None,
    unknown: str | Sequence[str] | None = None,
    size: int | tuple[int, int] | None = None,
) -> Dataset:
    """Write a dataset: rows from any source, shuffled once, in shards.

    The same rows and seed give the same bits from any source. Arrays and typed columns keep their
    type. Python's and CSV's integers become int64, floats become float64, and strings become
    categories (sorted names and int64 codes; see `Dataset.classes`). Types that declare categories
    (pandas' and Arrow's categorical types, Hugging Face's class labels) keep them all, in their
    order. A missing value (None, null, an empty cell) is NaN in a column of floats and an error in
    any other column. In a column of numbers, a cell such as "?" that is not one is an error. A
    list of sequences becomes a ragged column. Images are turned as their EXIF orientation says.
    Sources that are read row by row or in batches may be larger
    than memory; writing them takes disk space for one more copy.

    Parameters
    ----------
    source
        A mapping of column names to arrays, tensors or lists; a pandas or Arrow table or an Arrow
        record-batch reader; a Spark DataFrame; the path of an ``.npz``, ``.csv``, ``.parquet`` or
        ``.arrow`` file, or of a folder of ``.parquet`` files, which are read in the order of names;
        ``cerebro.images(folder)``, or the path of a folder with one subfolder of images per class;
        a PyTorch or Hugging Face dataset; a DataLoader, a LightningDataModule or a Hugging Face
        ``DatasetDict``, of which the training data is written; an iterable of row mappings.
    path
        The folder to make; or a URL in object storage, such as ``"s3://bucket/set"``. The files are
        made here first, in the cache folder, and the manifest is uploaded last: without it there
        is no dataset.
    shards
        The number of shards; None: 8, or more to keep each under 256 MB (64 MB for data of more
        than 4 GB, of which four are read together), but never more shards than rows. The first
        ``rows % shards`` shards have one more row than the others.
    columns
        The names of columns to keep, or a mapping of new names to a column's name or to a list of
        names. The columns in a list are stacked into one vector per row, cast to their common type.
        Declared categories are stacked as their codes; text cannot be stacked with numbers.
    dtypes
        Types by (new) column name, such as ``{"x": "float32"}``. Floats are rounded; a value that
        an integer type cannot hold is an error. ``"str"`` reads codes such as the zip code 00501 as
        text, which becomes categories. For a list column or a binary column, a type with
        a shape, such as ``("float32", (40,))``, describes each row; binary values are
        little-endian. Without a shape, a list column is ragged, even if all rows have the same
        length.
    shuffle
        Whether to permute the rows; otherwise they keep the source's order across shards.
    seed
        Keys the permutation.
    exist_ok
        Whether to return the dataset at `path` if it was made with the same arguments from the
        same source. Arrays are compared by content, files by size and content, image folders by
        names, sizes and times; other iterables cannot be compared and are assumed to be the same.
    progress
        ``"auto"`` shows a bar for large datasets on a terminal; True always, False never.
    missing
        What to put in place of missing values; None: nothing (see above). ``"category"``: in text a
        separate category, ``missing``, and in numbers the median. ``"fill"``: in text the most
        frequent name, and in numbers the median. ``"mean"`` and ``"median"``: in numbers that, and
        in text a category. Or a mapping of the source's columns to these or to constants; columns
        that it does not name are not filled. Integers and booleans with gaps become floats. It
        is computed from all rows of the source, and recorded: `Trial.predict` fills new rows
        alike. The source must be a frame, a CSV file, a mapping of columns or a list of
        dictionaries, and is read into memory. A target (a column that is ``y``, ``target``,
        ``label`` or ``labels``) is filled only if it is named; a missing one is an error.
    unknown
        Whether columns of text get a category ``unknown``, for names in new rows that the source
        lacks. ``"category"``: all do except targets; a list: the source's columns that do; None:
        none, and such names are errors. No row of the source has this category, unless it has the
        name.
    size
        ``(height, width)``, or one number for both, to which the images of a folder are resized.

    Returns
    -------
    Dataset

    Raises
    ------
    InputError
        The source or an argument is invalid, or `path` exists. No files are left behind.
    OSError
        The disk is full or not writable, or the storage refuses. Nothing is left behind, except
        for objects without a manifest; the next `shard` to the same URL removes them.
    """
    arguments = _check_arguments(shards, columns, dtypes, shuffle, seed)
    source, remark = unpack_one(source)
    if remark:
        warn_user(remark)
    if size is not None:
        if not isinstance(source, (str, os.PathLike)):
            raise InputError("size is for the path of a folder of images: leave it out")
        source = images(source, size)
    arguments |= {"missing": check_missing(missing), "unknown": check_unknown(unknown)}
    place: _Folder | Upload
    where: str | Path
    with contextlib.ExitStack() as stack:
        if isinstance(path, str) and is_url(path):
            place = stack.enter_context(contextlib.closing(Upload(path)))
            where = place.url
        else:
            where = path_of("path", path).absolute()  # the source may change the working directory
            place = _Folder(where)
        _make_dataset(source, place, path, arguments, exist_ok, progress)
        return Dataset(where)


def _make_dataset(
    source: Any,
    place: _Folder | Upload,
    path: Any,
    arguments: dict[str, Any],
    exist_ok: bool,
    progress: str | bool,
) -> None:
    """Write a dataset to a folder or a bucket, or check the one that is there."""
    exists = place.is_there()
    if exists and not exist_ok:
        _refuse_existing(place, path, arguments)
    missing, unknown = arguments["missing"], arguments["unknown"]
    is_filled = missing is not None or unknown is not None
    opened = FilledSource(source, missing, unknown) if is_filled else open_source(source)
    columns, dtypes = arguments["columns"], arguments["dtypes"] or {}
    shaped = (name for name, dtype in dtypes.items() if isinstance(dtype, list))
    opened.binary = _find_source_names(columns, shaped)
    texts = (name for name, dtype in dtypes.items() if dtype == TEXT)
    opened.text = _find_source_names(columns, texts)
    if isinstance(opened, FilledSource):
        opened.targets = _find_source_names(columns, TARGETS)
    whole: Table | None = None
    if opened.whole:
        (whole,) = opened.chunks(source_columns(columns))
        check_rows(whole)
        for name, data in whole.items():
            check_complete(name, data)
    fingerprint = opened.fingerprint() if whole is None else _content_fingerprint(whole)
    if exists:
        _check_same(place.manifest(), arguments, fingerprint, path)
        return
    with temporary_folder(place.target) as folder, ByteProgress(progress) as meter:
        if whole is None:
            whole = _spool_source(opened, columns, folder, meter)
            if opened.remark is not None:
                warn_user(opened.remark)
        outputs = lay_out(whole, columns, dtypes, opened.declaration)
        entries = _write(outputs, arguments, folder, meter)
        manifest = Manifest(
            columns=tuple(output.column for output in outputs),
            shards=tuple(entries),
            arguments=arguments,
            source={"kind": opened.kind, "fingerprint": fingerprint},
            recipe=describe_columns(outputs, columns, getattr(opened, "changes", {})),
        )
        _commit(manifest, folder, place.target)
        place.finish()


class _Folder:
    """The place of a dataset on this machine; `Upload` is one in object storage."""

    def __init__(self, path: Path) -> None:
        self._path = path  # may be a link, and stays the dataset's path
        self.target = real_target(path)

    def is_there(self) -> bool:
        return _is_there(self.target)

    def manifest(self) -> Manifest:
        return read_manifest(self._path)

    def finish(self) -> None:
        """Do nothing: renaming the folder has finished the dataset."""


def _check_arguments(
    shards: int | None,
    columns: Columns | None,
    dtypes: Mapping[str, Any] | None,
    shuffle: bool,
    seed: int,
) -> dict[str, Any]:
    """Check the arguments as far as possible without the source; return them in stored form."""
    shards = check_whole_number("shards", shards, 1, math.inf, optional=True)
    seed = check_whole_number("seed", seed, 0, 2**64 - 1)
    source_columns(columns)
    if dtypes is not None and not isinstance(dtypes, Mapping):
        raise InputError(f'dtypes is {dtypes!r}: give a mapping such as {{"x": "float32"}}')
    column_names: Any = None
    if isinstance(columns, Mapping):
        column_names = {
            name: value if isinstance(value, str) else list(value)
            for name, value in columns.items()
        }
    elif columns is not None:
        column_names = list(columns)
    types = {name: parse_dtype(dtype) for name, dtype in (dtypes or {}).items()}
    stored = {
        name: dtype if shape is None else [dtype, [*shape]]
        for name, (dtype, shape) in types.items()
    }
    return {
        "shards": shards,
        "columns": column_names,
        "dtypes": stored or None,
        "shuffle": bool(shuffle),
        "seed": seed,
    }


def _find_source_names(columns: Columns | None, names: Iterable[str]) -> frozenset[str]:
    """Return the names in the source of columns that are not stacks."""
    if not isinstance(columns, Mapping):
        return frozenset(names)
    sources = (columns.get(name) for name in names)
    return frozenset(name for name in sources if isinstance(name, str))


def _is_there(target: Path) -> bool:
    """Return whether something exists at the path; an empty folder does not count."""
    return (target.exists() or target.is_symlink()) and not is_empty_folder(target)


def _refuse_existing(place: _Folder | Upload, path: Any, arguments: Mapping[str, Any]) -> NoReturn:
    """Raise InputError, naming what exists at the path and a fix that the next call accepts."""
    try:
        different = _describe_difference(place.manifest(), arguments)
    except (CerebroError, OSError):
        different = "and is not a dataset"
    if different is None:
        raise InputError(
            f"'{path}' exists: pass exist_ok=True to use it if it has the same rows, choose "
            "another path, or remove it"
        )
    raise InputError(f"'{path}' exists, {different}: {_REMOVE}")


def _describe_difference(manifest: Manifest, arguments: Mapping[str, Any]) -> str | None:
    """Describe an argument that differs from the existing dataset's."""
    for name, value in arguments.items():
        if manifest.arguments.get(name) != value:
            return f"was made with {name}={manifest.arguments.get(name)!r}, not {value!r}"
    return None


def _check_same(
    manifest: Manifest, arguments: Mapping[str, Any], fingerprint: str | None, path: Any
) -> None:
    different = _describe_difference(manifest, arguments)
    if different is None and manifest.source["fingerprint"] != fingerprint:
        different = "was made from other data"
    if different is not None:
        raise InputError(f"'{path}' {different}: {_REMOVE}")


def _content_fingerprint(table: Table) -> str:
    content: dict[str, list[Any]] = {}
    for name, data in table.items():
        hashes = [
            _core.xxh3_128(np.ascontiguousarray(piece).reshape(-1).view(np.uint8))
            for array in (data.values, data.offsets)
            if array is not None
            for piece in iterate_pieces(array)
        ]
        ragged = data.offsets is not None
        content[name] = [data.dtype, data.values.shape, ragged, data.names, hashes]
    return f"content:{checksum_of(content)}"


def _spool_source(
    source: Source, columns: Columns | None, folder: Path, meter: ByteProgress
) -> Table:
    names = source_columns(columns)
    unpacked, free = source.unpacked_bytes(names), shutil.disk_usage(folder).free
    if unpacked is not None and unpacked > free:
        raise InputError(
            f"the source has {unpacked} bytes when unpacked, but '{folder.parent}' has room for "
            f"{free}: free some space, choose another path, or leave columns out"
        )
    (folder / _SPOOL).mkdir()
    meter.begin("reading rows")
    return spool(source.chunks(names), folder / _SPOOL, meter)


def _write(
    outputs: list[OutputColumn], arguments: Mapping[str, Any], folder: Path, meter: ByteProgress
) -> list[Any]:
    rows = outputs[0].pieces[0][0].rows
    shards = arguments["shards"]
    if shards is None:
        shards = default_shards(sum(output.nbytes for output in outputs), rows)
    if shards > rows:
        raise InputError(f"{shards} shards are more than the {rows} rows: use fewer shards")
    order = _core.permutation(rows, arguments["seed"], "write") if arguments["shuffle"] else None
    return write_shards(outputs, shards, order, folder, meter)


def _commit(manifest: Manifest, folder: Path, target: Path) -> None:
    shutil.rmtree(folder / _SPOOL, ignore_errors=True)
    manifest.write(folder)
    durable.sync_folder(folder)
    try:
        folder.rename(target)  # replaces an empty folder, and nothing else
    except OSError:
        if _is_there(target):
            raise InputError(
                f"'{target}' was made by another process in the meantime: {_REMOVE}"
            ) from None
        raise
    (target / LOCK).unlink(missing_ok=True)
    durable.sync_folder(target.parent)
