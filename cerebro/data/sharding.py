"""`shard`: write any source as a data set on disk, completely or not at all.

Everything is written into a temporary folder beside the target, which is renamed at the end: the
target is complete or absent. The temporary folder holds a file that is locked while its process
lives; the next `shard` to the same path removes a folder whose lock is free, left by a dead
process.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import cerebro._core as _core
from cerebro.arguments import SHARD, answers, whole_number
from cerebro.data.columns import ColumnData, settled
from cerebro.data.dataset import Dataset
from cerebro.data.dtypes import dtype_name
from cerebro.data.layout import Columns, OutputColumn, check_rows, lay_out, source_columns
from cerebro.data.manifest import (
    FILE_NAME,
    MAX_MANIFEST_BYTES,
    Manifest,
    checksum_of,
    read_manifest,
)
from cerebro.data.progress import ByteProgress
from cerebro.data.sources import open_source
from cerebro.data.sources.base import Source, Table
from cerebro.data.spool import spool
from cerebro.data.writer import default_shards, write_shards
from cerebro.errors import CerebroError, InputError
from cerebro.machine import durable
from cerebro.machine.environment import version
from cerebro.machine.files import open_plain, path_of

_LOCK = ".lock"
_SPOOL = ".spool"
_PIECE_BYTES = 8 << 20
_REMOVE = "choose another path, or remove the folder unless an earlier run needs it"


@answers(SHARD)
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
) -> Dataset:
    """Write a data set: rows from any source, shuffled once, in shards.

    The same rows and seed give the same bits from any source. Arrays and typed columns keep their
    type; Python's and CSV's integers become int64, floats float64, strings categories (sorted
    names, int64 codes; see `Dataset.classes`). A missing value (None, null, an empty cell) is NaN
    in a column of floats and an error in any other. A list of sequences is a ragged column. Sources
    that are read row by row or in batches may be larger than memory; writing them takes disk space
    for one more copy.

    Parameters
    ----------
    source
        A mapping of column names to arrays, tensors or lists; a pandas or Arrow table or an Arrow
        record-batch reader; the path of an ``.npz``, ``.csv``, ``.parquet`` or ``.arrow`` file;
        ``cerebro.images(folder)``; a PyTorch or Hugging Face dataset; an iterable of row mappings.
    path
        The folder to make.
    shards
        The number of shards; None: 8, or more to keep each under 256 MB, but never more than rows.
        The first ``rows % shards`` have one more row.
    columns
        Names to keep, or a mapping of new names to a name or to a list of names that are stacked
        into one vector per row, cast to their common type (categories as their codes).
    dtypes
        Types by (new) column name, such as ``{"x": "float32"}``. Floats are rounded; a value that
        an integer type cannot hold is an error.
    shuffle
        Whether the rows are permuted; if not, they keep the source's order across shards.
    seed
        Keys the permutation.
    exist_ok
        Return the data set at `path` if it was made with the same arguments from the same source.
        Arrays are compared by content, files by size and content, image folders by names, sizes
        and times; other iterables cannot be compared and count as the same.
    progress
        ``"auto"`` shows a bar for large sets on a terminal; True always, False never.

    Returns
    -------
    Dataset

    Raises
    ------
    InputError
        The source or an argument is invalid, or `path` exists. Nothing is left behind.
    OSError
        The disk is full or not writable. Nothing is left behind.
    """
    target = path_of("path", path).absolute()
    arguments = _arguments(shards, columns, dtypes, shuffle, seed)
    there = _is_there(target)
    if there and not exist_ok:
        _refuse_existing(target, path, arguments)
    opened = open_source(source)
    whole = _whole_table(opened, columns)
    fingerprint = opened.fingerprint() if whole is None else _content_fingerprint(whole)
    origin = {"kind": opened.kind, "fingerprint": fingerprint}
    if there:
        _check_same(read_manifest(target), arguments, fingerprint, path)
        return Dataset(target)
    with _temporary_folder(target) as folder, ByteProgress(progress) as meter:
        if whole is None:
            whole = _spooled(opened, columns, folder, meter)
            if (remark := opened.remark()) is not None:
                warnings.warn(remark, stacklevel=2)
        outputs = lay_out(whole, columns, dtypes)
        entries = _write(outputs, arguments, folder, meter)
        manifest = Manifest(
            columns=tuple(output.column for output in outputs),
            shards=tuple(entries),
            arguments=arguments,
            source=origin,
            library=version(),
        )
        _commit(manifest, folder, target)
    return Dataset(target)


def _arguments(
    shards: int | None,
    columns: Columns | None,
    dtypes: Mapping[str, Any] | None,
    shuffle: bool,
    seed: int,
) -> dict[str, Any]:
    """Check the arguments that do not need the source; return them as they are stored."""
    shards = whole_number("shards", shards, 1, math.inf, optional=True)
    seed = whole_number("seed", seed, 0, 2**64 - 1)
    source_columns(columns)
    if dtypes is not None and not isinstance(dtypes, Mapping):
        raise InputError(f'dtypes is {dtypes!r}: give a mapping such as {{"x": "float32"}}')
    chosen: Any = None
    if isinstance(columns, Mapping):
        chosen = {
            name: value if isinstance(value, str) else list(value)
            for name, value in columns.items()
        }
    elif columns is not None:
        chosen = list(columns)
    return {
        "shards": shards,
        "columns": chosen,
        "dtypes": {name: dtype_name(dtype) for name, dtype in (dtypes or {}).items()} or None,
        "shuffle": bool(shuffle),
        "seed": seed,
    }


def _is_there(target: Path) -> bool:
    """Whether something exists at the path; an empty folder does not count."""
    if not target.exists() and not target.is_symlink():
        return False
    return not (target.is_dir() and not any(target.iterdir()))


def _refuse_existing(target: Path, path: Any, arguments: Mapping[str, Any]) -> NoReturn:
    """Raise InputError, naming what exists at the path and a cure that the next call accepts."""
    try:
        different = _difference(read_manifest(target), arguments)
    except (CerebroError, OSError):
        different = "and is not a data set"
    if different is None:
        raise InputError(
            f"'{path}' exists: pass exist_ok=True to use it if it has the same rows, choose "
            "another path, or remove it"
        )
    raise InputError(f"'{path}' exists, {different}: {_REMOVE}")


def _difference(manifest: Manifest, arguments: Mapping[str, Any]) -> str | None:
    """Describe an argument that differs from the existing data set's; None if all are the same."""
    for name, value in arguments.items():
        if manifest.arguments.get(name) != value:
            return f"was made with {name}={manifest.arguments.get(name)!r}, not {value!r}"
    return None


def _check_same(
    manifest: Manifest, arguments: Mapping[str, Any], fingerprint: str | None, path: Any
) -> None:
    """Raise InputError unless the existing data set was made from the same arguments and source."""
    different = _difference(manifest, arguments)
    if different is None and manifest.source["fingerprint"] != fingerprint:
        different = "was made from other data"
    if different is not None:
        raise InputError(f"'{path}' {different}: {_REMOVE}")


def _whole_table(source: Source, columns: Columns | None) -> Table | None:
    if not source.whole:
        return None
    (table,) = source.chunks(source_columns(columns))
    check_rows(table)
    return {name: settled(name, data) for name, data in table.items()}


def _content_fingerprint(table: Table) -> str:
    """Return a hash of the columns' values, names and types."""
    content = {name: _column_fingerprint(data) for name, data in table.items()}
    return f"content:{checksum_of(content)}"


def _column_fingerprint(data: ColumnData) -> list[Any]:
    hashes = []
    for array in (data.values, data.offsets):
        if array is not None:
            step = max(1, _PIECE_BYTES // max(1, array[:1].nbytes))
            for start in range(0, len(array), step):
                piece = np.ascontiguousarray(array[start : start + step])
                hashes.append(_core.xxh3_128(piece.reshape(-1).view(np.uint8)))
    names = None if data.names is None else list(data.names)
    return [data.dtype, list(data.values.shape), data.offsets is not None, names, hashes]


def _spooled(source: Source, columns: Columns | None, folder: Path, meter: ByteProgress) -> Table:
    """Read a source in chunks into temporary files."""
    wanted = source_columns(columns)
    unpacked, free = source.unpacked_bytes(wanted), shutil.disk_usage(folder).free
    if unpacked is not None and unpacked > free:
        raise InputError(
            f"the source has {unpacked} bytes when unpacked, but '{folder.parent}' has room for "
            f"{free}: free some, choose another path, or leave columns out"
        )
    (folder / _SPOOL).mkdir()
    meter.begin("reading rows")
    return spool(source.chunks(wanted), folder / _SPOOL, meter)


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
    """Write the manifest, then rename the folder to its final name."""
    shutil.rmtree(folder / _SPOOL, ignore_errors=True)
    content = manifest.to_bytes()
    if len(content) > MAX_MANIFEST_BYTES:
        raise InputError(
            f"{len(manifest.shards)} shards of {len(manifest.columns)} columns are more than a "
            "manifest can list: use fewer shards"
        )
    durable.replace_file(folder / FILE_NAME, content)
    durable.sync_folder(folder)
    try:
        folder.rename(target)  # replaces an empty folder, and nothing else
    except OSError:
        if _is_there(target):
            raise InputError(f"'{target}' was meanwhile made by another process") from None
        raise
    (target / _LOCK).unlink(missing_ok=True)
    durable.sync_folder(target.parent)


@contextlib.contextmanager
def _temporary_folder(target: Path) -> Iterator[Path]:
    """Make a folder beside the target; remove it at the end unless it was renamed."""
    folder = target.with_name(f"{_prefix(target)}{secrets.token_hex(8)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target)
        folder.mkdir()
    except OSError as error:
        reason = f"cannot make {target}: {error.strerror or error}: choose another path"
        raise OSError(error.errno, reason) from error
    try:
        with (folder / _LOCK).open("wb") as lock:
            with contextlib.suppress(OSError):  # the file system has no locks: never cleaned up
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
    finally:
        if folder.exists():
            shutil.rmtree(folder, ignore_errors=True)


def _prefix(target: Path) -> str:
    return f".{target.name}.tmp-"


def _remove_stale(target: Path) -> None:
    """Remove temporary folders of this target whose processes are dead."""
    for folder in target.parent.iterdir():
        if not folder.name.startswith(_prefix(target)):
            continue
        try:
            lock = open_plain(folder / _LOCK, os.O_RDONLY)
        except OSError:  # being made right now, or not ours to remove
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # in use
            continue
        finally:
            os.close(lock)
