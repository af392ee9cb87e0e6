"""`Dataset.derive`: compute columns of a dataset once, and write a dataset with the same rows.

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
from collections.abc import Collection, Mapping, Sequence
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
    Column,
    FileEntry,
    Manifest,
    ShardEntry,
    check_columns,
    checksum_of,
    read_manifest,
    shard_folder,
)
from cerebro.data.rows import Part
from cerebro.data.shards import copy_name, open_columns
from cerebro.data.unfinished import (
    LOCK,
    ByteProgress,
    check_intact_shard,
    is_empty_folder,
    part_folder,
    read_finished_shard,
    real_target,
)
from cerebro.data.view import View
from cerebro.errors import CerebroError, CorruptDataError, InputError
from cerebro.machine import durable
from cerebro.machine.devices import is_gpu, lookup, name_in_worker
from cerebro.machine.files import path_of
from cerebro.machine.imports import module_of
from cerebro.report import format as fmt

_KIND = "derived"
_CHOOSE = "choose another path, or remove the folder unless an earlier run needs it"


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a derived dataset."""

    work: ShardWork
    arguments: Mapping[str, Any]  # the manifest's ``arguments``
    fingerprint: str  # 32 hexadecimal digits that differ if the arguments differ
    says: Mapping[str, str]  # the text of the error if an argument differs, by its name

    @property
    def view(self) -> View:
        view: View = self.work.derivation.data.view
        return view

    @property
    def shards(self) -> range:
        return range(len(self.view.parts))

    def bytes_of(self, shard: int) -> int:
        """Return the bytes of a shard: of the derived columns, and of the kept ones as stored."""
        if self.view.shards.url is None:  # else the manifest alone gives the sizes
            self.view.shards.check_sizes(shard)  # before ragged columns' offsets are read
        kept, columns = self.work.kept, self.work.columns
        derived = sum(column.item_bytes for column in columns[len(kept) :])
        stored = sum(self.view.part_bytes(column, shard) for column in kept)
        return stored + derived * self.view.shard_rows[shard]

    @property
    def nbytes(self) -> int:
        return sum(map(self.bytes_of, self.shards))


def make_recipe(
    work: Derivation,
    key: Mapping[str, Any],
    *,
    keep: Collection[str] | None = None,
    says: Mapping[str, str] | None = None,
) -> Recipe:
    """Call the function for the first rows; return what determines the derived dataset.

    `key` has names and hashes that identify the function; an error reports the first that differs,
    with its text in `says`.
    """
    new_columns, digest = work.probe()
    kept_columns = tuple(_select_kept_columns(work, keep))
    names = [column.name for column in new_columns]
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
        for column in new_columns
        for copy in range(work.copies)
    ]
    columns = (*kept_columns, *new_columns, *outputs)
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
            "first_rows": digest,
        },
        "outputs": [column.name for column in new_columns],
        "copies": work.copies,
    }
    try:
        fingerprint = checksum_of(arguments)
        arguments = json.loads(json.dumps(arguments))  # as read from the file: no tuples
    except (TypeError, ValueError) as error:
        raise InputError(f"derive: key must be text or another JSON value: {error}") from None
    shard_work = ShardWork(work, kept_columns, columns)
    return Recipe(shard_work, arguments, fingerprint, {**_SAYS, **(says or {})})


def write(
    recipe: Recipe,
    path: str | os.PathLike[str],
    progress: str | bool = "auto",
    executor: MakesShards | None = None,
    threads: int = 1,
    *,
    room: bool = False,
) -> Path:
    """Write the derived dataset unless it already exists; return its folder.

    With an executor, its workers make the shards, with `threads` compute threads each. With `room`,
    the disk must have room for all missing shards before the first is made. Raises InputError,
    which says what differs, if the path holds something else.
    """
    absolute_path = path_of("path", path).absolute()
    target = real_target(absolute_path)
    if target.exists() and not is_empty_folder(target):
        _check_same(target, path, recipe)
        return absolute_path
    with part_folder(target, recipe.fingerprint) as folder, ByteProgress(progress) as meter:
        work = _Work(recipe, folder, meter)
        work.remove_arriving()
        meter.begin("deriving columns", recipe.nbytes)
        missing = [shard for shard in recipe.shards if not work.reuse(shard)]
        if room:  # only now: what is finished already has its room, and what is damaged is removed
            _check_room(recipe, missing, folder, target)
        if executor is not None and missing:
            work.write_elsewhere(executor, threads, missing, target)
            return absolute_path
        for shard in missing:
            work.write_here(shard)
        work.commit(target)
    return absolute_path


def rows_of_source(derived: Manifest, view: Any) -> list[Part]:
    """Return the rows of `view`, a view of the dataset that `derived` was made from whole."""
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


def _check_same(target: Path, path: Any, recipe: Recipe) -> None:
    """Raise InputError, saying what differs, unless the path holds the dataset of this recipe."""
    try:
        manifest = read_manifest(target)
    except CerebroError as error:
        raise InputError(
            f"'{path}' exists, and is not a complete dataset ({error}): {_CHOOSE}"
        ) from None
    if manifest.source["fingerprint"] == recipe.fingerprint:
        return
    recorded = manifest.arguments.get(_KIND)
    if manifest.source["kind"] != _KIND or not isinstance(recorded, Mapping):
        raise InputError(f"'{path}' exists, and was not derived from a dataset: {_CHOOSE}")
    flat = {**manifest.arguments, **recorded}
    for name, value in {**recipe.arguments[_KIND], **recipe.arguments}.items():
        if name != _KIND and flat.get(name) != value:
            text = f"was derived with {name}={flat.get(name)!r}, not {value!r}"
            raise InputError(f"'{path}' {recipe.says.get(name, text)}: {_CHOOSE}")
    raise InputError(f"'{path}' was derived by a different version of Cerebro: {_CHOOSE}")


_SAYS = {
    "data": "was derived from other data, rows or transforms",
    "source": "was derived from other data",
    "first_rows": "has other values than the function computes now for the first rows (its code, a "
    "setting of the framework, or the machine has changed)",
}


# --- shard by shard ---------------------------------------------------------------


class _Work:
    """The unfinished dataset in a folder, and the shards of it that are finished."""

    def __init__(self, recipe: Recipe, folder: Path, meter: ByteProgress) -> None:
        self._recipe = recipe
        self._folder = folder
        self._meter = meter
        self._entries: dict[int, ShardEntry] = {}

    def reuse(self, shard: int) -> bool:
        """Return whether an earlier call has made a shard; remove one that is not intact."""
        recipe, place, note = self._recipe, *self._paths(shard)
        rows = recipe.view.shard_rows[shard]
        entry = read_finished_shard(place, note, rows, recipe.work.columns, recipe.fingerprint)
        if entry is None:
            note.unlink(missing_ok=True)
            shutil.rmtree(place, ignore_errors=True)
            return False
        self._entries[shard] = entry
        self._meter.advance(recipe.bytes_of(shard))
        return True

    def write_here(self, shard: int) -> None:
        place, _ = self._paths(shard)
        self._recipe.view.shards.verify(shard)  # features of damaged rows would look valid
        place.mkdir()
        files = self._recipe.work.write(shard, place, self._meter.advance)
        durable.sync_folder(place)
        self._finish(shard, files)

    def write_elsewhere(
        self, executor: MakesShards, threads: int, missing: Sequence[int], target: Path
    ) -> None:
        """Have an executor's workers make the missing shards, and commit the dataset."""
        recipe, device = self._recipe, name_in_worker(executor.devices)
        nbytes = list(map(recipe.bytes_of, recipe.shards))
        derivation = recipe.work.derivation
        gpu = _find_gpu_kind(derivation.device) if is_gpu(device) else ""
        order = Order(derivation.data, recipe.work, self._folder, nbytes, threads, device, gpu)
        compared: set[int] = set()
        try:
            with executor.shard_makers(order) as makers:
                for arrived in makers.make(missing):
                    self._accept(arrived, compare=arrived.worker not in compared)
                    compared.add(arrived.worker)
                    self._meter.advance(nbytes[arrived.shard])
                self.remove_arriving()  # before the folder gets its name
                makers.keep(self.commit(target).to_bytes())
        finally:
            self.remove_arriving()

    def _accept(self, arrived: Arrived, *, compare: bool) -> None:
        """Check a shard that a worker has made, compare its first rows, and give it its name."""
        shard, recipe = arrived.shard, self._recipe
        rows = recipe.view.shard_rows[shard]
        entry = check_intact_shard(arrived.folder, arrived.files, rows, recipe.work.columns)
        if entry is None:
            raise CorruptDataError(
                f"derive: shard {shard} from node {arrived.node} is damaged: call again, and the "
                "shards that are finished are used"
            )
        if compare:
            _compare_first(recipe, arrived, entry)
        place, _ = self._paths(shard)
        place.mkdir()
        durable.publish((arrived.folder / name, place / name) for name in entry.files)
        arrived.folder.rmdir()
        self._finish(shard, entry.files)

    def remove_arriving(self) -> None:
        """Remove half-received shards of lost workers and interrupted calls."""
        for unfinished in self._folder.glob(f"{ARRIVING}*"):
            shutil.rmtree(unfinished, ignore_errors=True)

    def commit(self, target: Path) -> Manifest:
        """Write the manifest, and give the folder its name; remove the notes."""
        kept = {column.name for column in self._recipe.work.kept}
        made = self._recipe.view.shards.manifest.recipe
        manifest = Manifest(
            columns=self._recipe.work.columns,
            shards=tuple(self._entries[shard] for shard in self._recipe.shards),
            arguments=self._recipe.arguments,
            source={"kind": _KIND, "fingerprint": self._recipe.fingerprint},
            recipe=[column for column in made if column["name"] in kept],
        )
        manifest.write(self._folder)
        durable.sync_folder(self._folder)
        try:
            self._folder.rename(target)  # replaces an empty folder, and nothing else
        except OSError as error:
            raise InputError(
                f"cannot rename {self._folder} to {target}: {error.strerror}: {_CHOOSE}"
            ) from None
        for shard in self._recipe.shards:
            (target / f"{shard_folder(shard)}.json").unlink(missing_ok=True)
        (target / LOCK).unlink(missing_ok=True)
        durable.sync_folder(target.parent)
        return manifest

    def _finish(self, shard: int, files: Mapping[str, FileEntry]) -> None:
        """Note that a shard's files are complete."""
        content = {
            "fingerprint": self._recipe.fingerprint,
            "files": {name: [entry.bytes, entry.xxh3_64] for name, entry in files.items()},
        }
        durable.replace_file(self._paths(shard)[1], json.dumps(content).encode())
        self._entries[shard] = ShardEntry(self._recipe.view.shard_rows[shard], files)

    def _paths(self, shard: int) -> tuple[Path, Path]:
        """Return a shard's folder, and the note that its files are complete."""
        name = shard_folder(shard)
        return self._folder / name, self._folder / f"{name}.json"


def _compare_first(recipe: Recipe, arrived: Arrived, entry: ShardEntry) -> None:
    """Compare a worker's first rows with those that this process computes now."""
    shard = arrived.shard
    stored = open_columns(arrived.folder, entry.rows, recipe.work.columns, entry.files)
    for name, (array, _) in next(recipe.work.derivation.results(shard, None)).items():
        theirs = np.ascontiguousarray(stored.column(name)[: len(array)])
        if theirs.tobytes() != array.tobytes():
            recipe.view.shards.verify(shard)  # only one of the two may have read damaged rows
            raise InputError(
                f"derive: node {arrived.node} computes other values of column {name!r} than this "
                f"process for the first rows of shard {shard}: the function depends on more than "
                "its batch, such as the number of threads (torch.set_num_threads), the kind of "
                "GPU, a file or a variable: set it inside the function, or leave out executor="
            )


def _find_gpu_kind(device: str) -> str:
    """Return the kind of the GPU that this process computes on; empty if it has none."""
    kinds = {entry.name: entry.label for entry in lookup().devices}
    if device in kinds:
        return kinds[device]
    return next(iter(kinds.values()), "")


# --- sizes and keys -----------------------------------------------------------------


def check_budget(nbytes: int, budget: int | None) -> None:
    if budget is not None and nbytes > budget:
        raise InputError(
            f"the columns take {fmt.size(nbytes)}, more than the budget of {fmt.size(budget)}: "
            "choose fewer or deeper layers (cerebro.torch.plan_features compares them), store "
            "them with dtypes='float16', or raise the budget"
        )


def _check_room(recipe: Recipe, missing: Sequence[int], folder: Path, target: Path) -> None:
    nbytes, free = sum(map(recipe.bytes_of, missing)), shutil.disk_usage(folder).free
    if nbytes <= free:
        return
    some = len(missing) < len(recipe.shards)
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
