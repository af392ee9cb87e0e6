"""`Dataset.derive`: compute columns of a dataset once, and write a dataset with the same rows.

The derived dataset has the shards, rows and row order of its view, so splits, folds and row orders
coincide.

Unfinished work is in a folder beside the target, ``.<name>.part-<fingerprint>``, where a note lists
the files of each finished shard and their hashes. The next call with the same fingerprint reuses
the shards whose files have these hashes; it removes unfinished work of other calls. As in
`cerebro.shard`, the manifest is written last, then the folder is renamed, so the target is complete
or absent.

With an executor, its workers make the shards (`cerebro.data.derivation`), and this process checks
them and does the rest.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import os
import shutil
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import cerebro._core as _core
from cerebro.arguments import check_whole_number
from cerebro.data.derivation import (
    ARRIVING,
    Arrived,
    Derivation,
    Function,
    MakesShards,
    Order,
    ShardWork,
)
from cerebro.data.manifest import (
    FILE_NAME,
    Column,
    FileEntry,
    Manifest,
    ShardEntry,
    check_columns,
    checksum_of,
    read_manifest,
    shard_folder,
)
from cerebro.data.progress import ByteProgress
from cerebro.data.rows import Part
from cerebro.data.shards import copy_name, open_columns
from cerebro.data.unfinished import (
    LOCK,
    check_intact_shard,
    is_empty_folder,
    part_folder,
    read_finished_shard,
    real_target,
)
from cerebro.errors import CerebroError, CorruptDataError, InputError
from cerebro.machine import durable
from cerebro.machine.devices import is_gpu, lookup, name_in_worker
from cerebro.machine.environment import version
from cerebro.machine.files import path_of
from cerebro.machine.imports import module_of
from cerebro.report import format as fmt

_KIND = "derived"
_CHOOSE = "choose another path, or remove the folder unless an earlier run needs it"


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a derived dataset."""

    work: Derivation
    kept: tuple[Column, ...]  # the columns to copy from the view
    columns: tuple[Column, ...]  # all columns of the derived dataset
    arguments: Mapping[str, Any]  # the manifest's ``arguments``
    fingerprint: str  # 32 hexadecimal digits that differ if the arguments differ
    says: Mapping[str, str]
    """The text of the error if an argument differs, by the argument's name."""

    @property
    def shard_work(self) -> ShardWork:
        return ShardWork(self.work, self.kept, self.columns)

    def bytes_of(self, shard: int) -> int:
        """Return the approximate bytes of a shard: a ragged row counts as one element."""
        rows = self.work.data.view.shard_rows[shard]
        return int(rows * sum(column.item_bytes for column in self.columns))

    @property
    def nbytes(self) -> int:
        """The total bytes of the rows: of the derived columns, and of the kept ones as stored."""
        return self.nbytes_of(range(self.work.data.num_shards))

    def nbytes_of(self, shards: Iterable[int]) -> int:
        """Return the part of `nbytes` that is in some of the shards."""
        view = self.work.data.view
        new_bytes = sum(column.item_bytes for column in self.columns[len(self.kept) :])
        return int(
            sum(
                new_bytes * view.shard_rows[shard]
                + sum(view.part_bytes(column, shard) for column in self.kept)
                for shard in shards
            )
        )


def make_recipe(
    work: Derivation,
    key: Mapping[str, Any],
    *,
    keep: Collection[str] | None = None,
    says: Mapping[str, str] | None = None,
) -> Recipe:
    """Call the function for the first rows and return the `Recipe` of the derived dataset.

    `key` has names and hashes that identify the function; an error reports the first that differs,
    with its text in `says`. `keep` names the columns to copy; None: those that the function does
    not read.
    """
    probe = work.probe()
    kept_columns = tuple(_select_kept_columns(work, keep))
    names = [column.name for column in probe.columns]
    for name in work.dtypes:
        if name not in names:
            raise InputError(
                f"dtypes names the column {name!r}, but the new columns are {', '.join(names)}"
            )
    for column in kept_columns:
        if column.name in names:
            raise InputError(
                f"derive: column {column.name!r} is copied from the dataset and is also a new "
                "column: give the new one another name, or leave it out of keep="
            )
    outputs = [
        Column(copy_name(column.name, copy), column.dtype, column.shape)
        for column in probe.columns
        for copy in range(work.copies)
    ]
    columns = (*kept_columns, *probe.columns, *outputs)
    check_columns(columns)
    arguments = {
        _KIND: {
            **key,
            "data": work.data.checksum,
            "source": work.data.shards.manifest.checksum,
            "whole": work.data.view.is_whole,
            "reads": work.reads,
            "kept": [column.name for column in kept_columns],
            "batch_size": work.batch_size,
            "framework": work.framework,
            "device": work.device.partition(":")[0],
            "seed": work.seed if work.copies else None,
            "dtypes": dict(work.dtypes),
            "first_rows": probe.digest,
        },
        "outputs": [column.name for column in probe.columns],
        "copies": work.copies,
    }
    try:
        fingerprint = checksum_of(arguments)
        arguments = json.loads(json.dumps(arguments))  # as read from the file: no tuples
    except (TypeError, ValueError) as error:
        raise InputError(f"derive: key must be text or another JSON value: {error}") from None
    return Recipe(work, kept_columns, columns, arguments, fingerprint, {**_SAYS, **(says or {})})


def write(
    made: Recipe,
    path: str | os.PathLike[str],
    progress: str | bool = "auto",
    executor: MakesShards | None = None,
    threads: int = 1,
    *,
    room: bool = False,
) -> Path:
    """Write the derived dataset unless it already exists; return its folder.

    With an executor, its workers make the shards, with `threads` compute threads each. With `room`,
    the disk must have room for all missing shards before the first is made.

    Raises InputError if there is too little room, or if the path holds something else; the message
    says what differs.
    """
    absolute_path = path_of("path", path).absolute()
    target = real_target(absolute_path)
    if target.exists() and not is_empty_folder(target):
        _check_same(target, path, made)
        return absolute_path
    work, columns = made.work, made.columns
    with part_folder(target, made.fingerprint) as folder, ByteProgress(progress) as meter:
        _remove_arriving(folder)
        rows = work.data.num_rows
        meter.begin("deriving columns", rows * sum(column.item_bytes for column in columns))
        finished = {
            shard: _reuse_shard(made, shard, folder, meter) for shard in range(work.data.num_shards)
        }
        entries = {shard: entry for shard, entry in finished.items() if entry is not None}
        missing = [shard for shard in finished if shard not in entries]
        if room:  # only now: what is finished already has its room, and what is damaged is removed
            _check_room(made, missing, folder, target)
        if executor is not None and missing:
            _write_elsewhere(made, executor, threads, folder, target, meter, entries, missing)
            return absolute_path
        for shard in missing:
            entries[shard] = _write_here(made, shard, folder, meter)
        _commit(_make_manifest(made, entries), folder, target)
    return absolute_path


def rows_of_source(derived: Manifest, view: Any) -> list[Part]:
    """Return the rows of `view`, a view of the dataset that `derived` was made from.

    Raises InputError if `derived` was made from another dataset, or from only some of its rows.
    """
    recorded = derived.arguments.get(_KIND)
    if derived.source["kind"] != _KIND or not isinstance(recorded, Mapping):
        raise InputError("like: this dataset was not derived from another")
    if recorded.get("source") != view.shards.manifest.checksum:
        raise InputError(
            f"like: this dataset was not derived from '{view.path}': give a "
            "view of the one that it was derived from"
        )
    if recorded.get("whole") is not True:
        raise InputError(
            "like: this dataset was derived from some rows of another: derive from the whole "
            "dataset, and then use like"
        )
    return list(view.view.parts)


def _select_kept_columns(work: Derivation, keep: Collection[str] | None) -> list[Column]:
    columns = work.data.columns
    if keep is None:
        reads = columns if work.reads is None else work.reads
        return [column for name, column in columns.items() if name not in reads]
    if isinstance(keep, str):
        raise InputError(f'keep={keep!r}: give a list of columns, such as ["{keep}"]')
    names = {work.data.view.column(name).name for name in keep}
    return [column for name, column in columns.items() if name in names]


# --- an existing dataset ---------------------------------------------------------


def _check_same(target: Path, path: Any, made: Recipe) -> None:
    """Raise InputError, saying what differs, unless the path holds the dataset of this recipe."""
    try:
        manifest = read_manifest(target)
    except CerebroError as error:
        raise InputError(
            f"'{path}' exists, and is not a complete dataset ({error}): {_CHOOSE}"
        ) from None
    if manifest.source["fingerprint"] == made.fingerprint:
        return
    recorded = manifest.arguments.get(_KIND)
    if manifest.source["kind"] != _KIND or not isinstance(recorded, Mapping):
        raise InputError(f"'{path}' exists, and was not derived from a dataset: {_CHOOSE}")
    flat = {**manifest.arguments, **recorded}
    for name, value in {**made.arguments[_KIND], **made.arguments}.items():
        if name != _KIND and flat.get(name) != value:
            text = made.says.get(name, f"was derived with {name}={flat.get(name)!r}, not {value!r}")
            raise InputError(f"'{path}' {text}: {_CHOOSE}")
    raise InputError(f"'{path}' was derived by a different version of Cerebro: {_CHOOSE}")


_SAYS = {
    "data": "was derived from other data, rows or transforms",
    "source": "was derived from other data",
    "first_rows": "has other values than the function computes now for the first rows (its code, a "
    "setting of the framework, or the machine has changed)",
}


# --- shard by shard ---------------------------------------------------------------


def _write_here(made: Recipe, shard: int, folder: Path, meter: ByteProgress) -> ShardEntry:
    """Write a shard in this process; return its entry."""
    place = folder / shard_folder(shard)
    made.work.data.shards.verify(shard)  # features of damaged rows would look valid
    place.mkdir()
    files = made.shard_work.write(shard, place, meter.advance)
    durable.sync_folder(place)
    _write_note(made, shard, folder, files)
    return ShardEntry(made.work.data.view.shard_rows[shard], files)


def _reuse_shard(made: Recipe, shard: int, folder: Path, meter: ByteProgress) -> ShardEntry | None:
    """Return the entry of a shard that an earlier call has made; remove one that is not intact."""
    place, note = folder / shard_folder(shard), folder / f"{shard_folder(shard)}.json"
    rows = made.work.data.view.shard_rows[shard]
    done = read_finished_shard(place, note, rows, made.columns, made.fingerprint)
    if done is None:
        note.unlink(missing_ok=True)
        shutil.rmtree(place, ignore_errors=True)
    else:
        meter.advance(made.bytes_of(shard))
    return done


def _write_note(made: Recipe, shard: int, folder: Path, files: Mapping[str, FileEntry]) -> None:
    content = {
        "fingerprint": made.fingerprint,
        "files": {name: [entry.bytes, entry.xxh3_64] for name, entry in files.items()},
    }
    durable.replace_file(folder / f"{shard_folder(shard)}.json", json.dumps(content).encode())


# --- by the workers of an executor --------------------------------------------------


def _write_elsewhere(
    made: Recipe,
    executor: MakesShards,
    threads: int,
    folder: Path,
    target: Path,
    meter: ByteProgress,
    entries: dict[int, ShardEntry],
    missing: Sequence[int],
) -> None:
    """Have workers make the missing shards, add them to `entries`, and commit the dataset."""
    nbytes = [made.bytes_of(shard) for shard in range(made.work.data.num_shards)]
    device = name_in_worker(executor.devices)
    gpu = _find_gpu_kind(made.work.device) if is_gpu(device) else ""
    order = Order(made.work.data, made.shard_work, folder, nbytes, threads, device, gpu)
    compared: set[int] = set()
    try:
        with executor.shard_makers(order) as makers:
            for arrived in makers.make(missing):
                is_new = arrived.worker not in compared
                entries[arrived.shard] = _accept_shard(made, arrived, folder, compare=is_new)
                compared.add(arrived.worker)
                meter.advance(nbytes[arrived.shard])
            _remove_arriving(folder)  # before the folder gets its name
            manifest = _make_manifest(made, entries)
            _commit(manifest, folder, target)
            makers.keep(manifest.to_bytes())
    finally:
        _remove_arriving(folder)


def _find_gpu_kind(device: str) -> str:
    """Return the kind of the GPU that this process computes on; empty if it has none."""
    devices = lookup().devices
    labels = [entry.label for entry in devices if entry.name == device]
    return next(iter([*labels, *(entry.label for entry in devices)]), "")


def _accept_shard(made: Recipe, arrived: Arrived, folder: Path, *, compare: bool) -> ShardEntry:
    """Check a shard that a worker has made, and give it its name.

    With `compare`, its first rows are computed here, too, and compared. Raises CorruptDataError if
    the files are not those that the worker reports, and InputError if its values differ.
    """
    shard = arrived.shard
    rows = made.work.data.view.shard_rows[shard]
    entry = check_intact_shard(arrived.folder, arrived.files, rows, made.columns)
    if entry is None:
        raise CorruptDataError(
            f"derive: shard {shard} from node {arrived.node} is damaged: call again, and the "
            "shards that are finished are used"
        )
    if compare:
        _compare_first(made, arrived, entry)
    place = folder / shard_folder(shard)
    place.mkdir()
    durable.publish((arrived.folder / name, place / name) for name in entry.files)
    arrived.folder.rmdir()
    _write_note(made, shard, folder, entry.files)
    return entry


def _compare_first(made: Recipe, arrived: Arrived, entry: ShardEntry) -> None:
    """Compare the first rows of a worker's shard with those that this process computes.

    A function may depend on what is not compared before, such as the number of threads.
    """
    shard = arrived.shard
    stored = open_columns(arrived.folder, entry.rows, made.columns, entry.files)
    for name, (array, _) in next(made.work.results(shard, None)).items():
        theirs = np.ascontiguousarray(stored.column(name)[: len(array)])
        if theirs.tobytes() != array.tobytes():
            made.work.data.shards.verify(shard)  # only one of the two may have read damaged rows
            raise InputError(
                f"derive: node {arrived.node} computes other values of column {name!r} than this "
                f"process for the first rows of shard {shard}: the function depends on more than "
                "its batch, such as the number of threads (torch.set_num_threads), the kind of "
                "GPU, a file or a variable: set it inside the function, or leave out executor="
            )


def _remove_arriving(folder: Path) -> None:
    """Remove half-received shards of lost workers and interrupted calls."""
    for unfinished in folder.glob(f"{ARRIVING}*"):
        shutil.rmtree(unfinished, ignore_errors=True)


# --- the end ------------------------------------------------------------------------


def _make_manifest(made: Recipe, entries: Mapping[int, ShardEntry]) -> Manifest:
    return Manifest(
        columns=made.columns,
        shards=tuple(entries[shard] for shard in sorted(entries)),
        arguments=made.arguments,
        source={"kind": _KIND, "fingerprint": made.fingerprint},
        library=version(),
    )


def _commit(manifest: Manifest, folder: Path, target: Path) -> None:
    """Write the manifest, then rename the folder to its final name."""
    durable.replace_file(folder / FILE_NAME, manifest.to_bytes())
    durable.sync_folder(folder)
    try:
        folder.rename(target)  # replaces an empty folder, and nothing else
    except OSError as error:
        raise InputError(
            f"cannot rename {folder} to {target}: {error.strerror}: {_CHOOSE}"
        ) from None
    for shard in range(len(manifest.shards)):  # remove the notes, which are no longer needed
        (target / f"{shard_folder(shard)}.json").unlink(missing_ok=True)
    (target / LOCK).unlink(missing_ok=True)
    durable.sync_folder(target.parent)


def check_budget(nbytes: int, budget: int | None) -> None:
    """Raise InputError if `nbytes` are more than the budget."""
    if budget is not None and nbytes > budget:
        raise InputError(
            f"the columns take {fmt.size(nbytes)}, more than the budget of {fmt.size(budget)}: "
            "choose fewer or deeper layers (cerebro.torch.plan_features compares them), store "
            "them with dtypes='float16', or raise the budget"
        )


def _check_room(made: Recipe, missing: Sequence[int], folder: Path, target: Path) -> None:
    """Raise InputError if the missing shards take more than the disk's free space."""
    nbytes, free = made.nbytes_of(missing), shutil.disk_usage(folder).free
    if nbytes <= free:
        return
    some = len(missing) < made.work.data.num_shards
    if not some:
        shutil.rmtree(folder, ignore_errors=True)  # it has nothing for the next call
    raise InputError(
        f"{'the shards that are missing' if some else 'the columns'} take {fmt.size(nbytes)}, but "
        f"'{target.parent}' has room for {fmt.size(free)}: free some space, choose another path, "
        "or choose fewer layers"
    )


def parse_budget(budget: Any) -> int | None:
    """Return a budget in bytes: a number of bytes, or text such as ``"20GB"``; None stays None."""
    if budget is None:
        return None
    if isinstance(budget, str):
        text = budget.replace(" ", "").upper()
        for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "KB"), (0, "B")):
            if text.endswith(unit):
                with contextlib.suppress(ValueError):
                    number = float(text.removesuffix(unit)) * 1000**power
                    if math.isfinite(number) and number >= 0:
                        return int(number)
                break
        raise InputError(
            f"budget={budget!r}: give a number of bytes, or a string such as '20GB' or '500 MB'"
        )
    return check_whole_number("budget", budget, 0, math.inf)


def key_of(function: Function, key: Any) -> dict[str, Any]:
    """Return what identifies a function: `key`, or its name and a hash of its source."""
    if key is not None:
        return {"key": key}
    name = getattr(function, "__qualname__", type(function).__qualname__)
    try:
        source = _core.xxh3_128(inspect.getsource(function).encode())
    except (OSError, TypeError):
        source = None
    return {"function": f"{module_of(function)}:{name}", "code": source}
