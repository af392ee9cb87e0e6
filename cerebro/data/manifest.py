"""``manifest.json``: the description of a dataset; writing it commits the dataset.

The manifest is one JSON object, written last. The reader checks every field's type and range, and
that no name points outside the folder. The last field is a checksum of all the others, which
exposes a truncated or altered manifest. The layout is::

    {"format": "cerebro-dataset", "version": 2, "library": "0.1.0", "rows": 1797,
     "columns": [{"name": "x", "dtype": "uint8", "shape": [8, 8], "ragged": false,
                  "classes": null}],
     "shards": [{"rows": 225, "files": {"x.npy": {"bytes": 14528, "xxh3_64": "..."}}}],
     "arguments": {"shards": 8, "columns": null, "dtypes": null, "shuffle": true, "seed": 0},
     "source": {"kind": "arrays", "fingerprint": "..."},
     "recipe": [...],
     "manifest_xxh3_128": "..."}

``arguments`` and ``source`` record how the dataset was made, and ``recipe`` how to make its columns
from raw rows (`cerebro.data.recipe`). `Manifest.checksum` leaves them out: the same rows have the
same checksum, from any source.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import cerebro._core as _core
from cerebro.data.dtypes import STORAGE
from cerebro.data.recipe import is_csv
from cerebro.errors import CorruptDataError, InputError, one_line
from cerebro.machine import durable
from cerebro.machine.environment import version
from cerebro.machine.files import load_json, read_bytes
from cerebro.machine.imports import explain_other_version

FORMAT = "cerebro-dataset"
VERSION = 2
FILE_NAME = "manifest.json"
MAX_ROWS = 2**32 - 1  # row numbers are uint32 in the row order
MAX_BYTES = 2**63 - 1
MAX_DIMENSIONS = 8  # of one row: CER_COLUMN_MAX_DIMS
MAX_NAME_BYTES = 200  # leaves room for ".offsets.npy" in a file name of 255 bytes
MAX_MANIFEST_BYTES = 256 << 20  # about a million shards

_HASH_FIELD = "manifest_xxh3_128"
_FIELDS = {
    *("format", "version", "library", "rows", "columns", "shards", "arguments", "source", "recipe"),
    _HASH_FIELD,
}


class MissingFileError(CorruptDataError, FileNotFoundError):
    """A file of a dataset is missing; caught as CorruptDataError and as FileNotFoundError."""


@dataclass(frozen=True)
class Column:
    """One column of a dataset.

    Attributes
    ----------
    name
        The column's name, which is part of its files' names.
    dtype
        The logical element type: ``"float32"``, ``"bfloat16"``, ...
    shape
        The shape of one row, or of one element of a row if the column is ragged.
    ragged
        Whether rows may differ in length, along a first dimension that `shape` leaves out.
    classes
        The class names by code, for columns made from strings or class folders.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    ragged: bool = False
    classes: tuple[str, ...] | None = None

    @property
    def item_bytes(self) -> int:
        """The bytes of one row, or of one element of a row if the column is ragged."""
        return STORAGE[self.dtype].itemsize * math.prod(self.shape)

    @property
    def file_names(self) -> tuple[str, ...]:
        """The names of the column's files in each shard's folder."""
        if self.ragged:
            return (f"{self.name}.values.npy", f"{self.name}.offsets.npy")
        return (f"{self.name}.npy",)

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class FileEntry:
    """The size in bytes and the XXH3-64 (16 hexadecimal digits) of one file."""

    bytes: int
    xxh3_64: str


@dataclass(frozen=True)
class ShardEntry:
    """The number of rows and the files of one shard."""

    rows: int
    files: Mapping[str, FileEntry]

    @property
    def nbytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


@dataclass(frozen=True)
class Manifest:
    """The content of a ``manifest.json``."""

    columns: tuple[Column, ...]
    shards: tuple[ShardEntry, ...]
    arguments: Mapping[str, Any]
    source: Mapping[str, Any]
    recipe: Sequence[Mapping[str, Any]] = ()
    library: str = dataclasses.field(default_factory=version)

    @cached_property
    def rows(self) -> int:
        return sum(shard.rows for shard in self.shards)

    @cached_property
    def checksum(self) -> str:
        """The XXH3-128 of columns, row counts and file hashes: equal for equal data."""
        shards = [
            [shard.rows, {name: entry.xxh3_64 for name, entry in shard.files.items()}]
            for shard in self.shards
        ]
        return checksum_of([[column.to_json() for column in self.columns], shards])

    def to_bytes(self) -> bytes:
        """Return the file's content. It ends with the closing brace, so truncation is noticed."""
        content: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "library": self.library,
            "rows": self.rows,
            "columns": [column.to_json() for column in self.columns],
            "shards": [
                {
                    "rows": shard.rows,
                    "files": {name: dict(vars(entry)) for name, entry in shard.files.items()},
                }
                for shard in self.shards
            ],
            "arguments": dict(self.arguments),
            "source": dict(self.source),
            "recipe": list(self.recipe),
        }
        content[_HASH_FIELD] = checksum_of(content)
        return json.dumps(content, indent=1, allow_nan=False).encode()

    def write(self, folder: Path) -> None:
        """Write the file into a dataset's folder; raise InputError if it is too large to read."""
        content = self.to_bytes()
        if len(content) > MAX_MANIFEST_BYTES:
            raise InputError(
                f"{len(self.shards)} shards of {len(self.columns)} columns are more than a "
                "manifest can list: use fewer shards"
            )
        durable.replace_file(folder / FILE_NAME, content)


def shard_folder(index: int) -> str:
    """Return the name of a shard's folder: ``shard-00000``, ``shard-00001``, ..."""
    return f"shard-{index:05d}"


def checksum_of(value: object) -> str:
    """Return the XXH3-128 of a JSON value's canonical text (sorted keys, no spaces, ASCII)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return _core.xxh3_128(text.encode())


def find_name_fault(name: object) -> str | None:
    """Return why `name` cannot be a column name; None if it can."""
    if not isinstance(name, str):
        return "is not a string"
    if not name:
        return "is empty"
    if name.startswith("."):
        return "begins with a dot"
    if "/" in name or any(ord(c) < 32 for c in name):
        return "contains '/' or a control character"
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "is not valid Unicode text"
    return f"is longer than {MAX_NAME_BYTES} bytes" if size > MAX_NAME_BYTES else None


def check_columns(columns: tuple[Column, ...]) -> None:
    """Raise InputError if column names are invalid or would clash on disk or in a batch."""
    taken: dict[str, str] = {}
    for column in columns:
        fault = find_name_fault(column.name)
        if fault is not None:
            raise InputError(f"column name {column.name!r} {fault}: rename it with columns={{...}}")
        keys = [column.name, *column.file_names]
        if column.ragged:
            keys += [f"{column.name}_mask", f"{column.name}_length"]
        for key in keys:
            if key in taken:
                raise InputError(
                    f"columns {taken[key]!r} and {column.name!r} would both need the name "
                    f"{key!r}: rename one with columns={{...}}"
                )
            taken[key] = column.name


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """Read and check ``folder/manifest.json``.

    Raises InputError if the folder does not exist, and CorruptDataError, naming the field or the
    version, for a bad manifest.
    """
    path = Path(folder) / FILE_NAME
    try:
        content = read_bytes(path, MAX_MANIFEST_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        if not Path(folder).is_dir():
            frame = f", or give its rows, pandas.read_csv('{folder}')" if is_csv(folder) else ""
            raise InputError(
                f"no dataset at '{folder}': make one with cerebro.shard(source, path){frame}"
            ) from None
        names = [child.name for child in Path(folder).iterdir() if child.is_dir()]
        if names and not any(name.startswith((*"._", "shard-")) for name in names):
            raise InputError(
                f"'{folder}' is a folder, not a dataset: for class folders use "
                f"cerebro.images('{folder}')"
            ) from None
        raise MissingFileError(
            f"'{folder}' is not a complete dataset: {FILE_NAME} is missing; make it again with "
            "cerebro.shard"
        ) from None
    return parse_manifest(content, str(path))


def parse_manifest(content: bytes, path: str) -> Manifest:
    """Parse and check a manifest; raise CorruptDataError, naming `path`, if it is invalid."""
    value = load_json(content, path)
    if not isinstance(value, dict):
        raise CorruptDataError(f"{path} is damaged: not a JSON object")
    top = _Fields(path, "", value)
    if top.value.get("format") != FORMAT:
        top.fail("format", f"must be {FORMAT!r}")
    version = top.integer("version", 0, 2**31)
    if version != VERSION:
        again = "make the dataset again with cerebro.shard"
        raise CorruptDataError(explain_other_version(path, "dataset", version, VERSION, again))
    top.check_fields(_FIELDS)
    recorded = top.hexadecimal(_HASH_FIELD, 32)
    try:
        checksum = checksum_of({name: value[name] for name in value if name != _HASH_FIELD})
    except (ValueError, RecursionError) as error:  # nested too deeply
        raise CorruptDataError(f"{path} is cut or damaged: {error}") from None
    if recorded != checksum:
        top.fail(_HASH_FIELD, "does not match the content: the file was altered or damaged")
    columns = tuple(_parse_column(fields) for fields in top.objects("columns"))
    try:
        check_columns(columns)
    except InputError as error:
        top.fail("columns", str(error))
    shards = tuple(_parse_shard(fields, columns) for fields in top.objects("shards"))
    manifest = Manifest(
        columns=columns,
        shards=shards,
        arguments=top.object("arguments").value,
        source=_parse_source(top.object("source")),
        recipe=_parse_recipe(top, {column.name for column in columns}),
        library=top.text("library"),
    )
    if top.integer("rows", 1, MAX_ROWS) != manifest.rows:
        top.fail("rows", f"is not the sum over the shards, {manifest.rows}")
    return manifest


def _parse_column(fields: _Fields) -> Column:
    fields.check_fields({"name", "dtype", "shape", "ragged", "classes"})
    name = fields.text("name")
    fault = find_name_fault(name)
    if fault is not None:
        fields.fail("name", fault)
    dtype = fields.text("dtype")
    if dtype not in STORAGE:
        fields.fail("dtype", f"{dtype!r} is unknown")
    shape = tuple(fields.integers("shape", MAX_DIMENSIONS))
    if math.prod(shape) * STORAGE[dtype].itemsize > MAX_BYTES:
        fields.fail("shape", "is too large")
    classes = fields.value.get("classes")
    if classes is not None and (
        not isinstance(classes, list) or not all(isinstance(name, str) for name in classes)
    ):
        fields.fail("classes", "must be null or a list of strings")
    return Column(
        name=name,
        dtype=dtype,
        shape=shape,
        ragged=fields.boolean("ragged"),
        classes=None if classes is None else tuple(classes),
    )


def _parse_shard(fields: _Fields, columns: tuple[Column, ...]) -> ShardEntry:
    fields.check_fields({"rows", "files"})
    rows = fields.integer("rows", 1, MAX_ROWS)
    files = fields.object("files")
    files.check_fields({name for column in columns for name in column.file_names})
    entries = {}
    for column in columns:
        for name in column.file_names:
            entry = files.object(name)
            entry.check_fields({"bytes", "xxh3_64"})
            payload = 0 if column.ragged else rows * column.item_bytes
            size = entry.integer("bytes", payload, MAX_BYTES)
            entries[name] = FileEntry(size, entry.hexadecimal("xxh3_64", 16))
    return ShardEntry(rows, entries)


def _parse_source(fields: _Fields) -> dict[str, Any]:
    fields.check_fields({"kind", "fingerprint"})
    fingerprint = fields.value.get("fingerprint")
    if fingerprint is not None and not isinstance(fingerprint, str):
        fields.fail("fingerprint", "must be null or a string")
    return {"kind": fields.text("kind"), "fingerprint": fingerprint}


def _parse_recipe(top: _Fields, names: set[str]) -> tuple[dict[str, Any], ...]:
    """Return how columns are made from raw rows; see `cerebro.data.recipe`."""
    for fields in top.objects("recipe", least=0):
        fields.check_fields({"name", "dtype", "stacked", "sources"})
        if fields.text("name") not in names or fields.text("dtype") not in STORAGE:
            fields.fail("name", "is not a column of this dataset, or its dtype is unknown")
        fields.boolean("stacked")
        for source in fields.objects("sources"):
            source.check_fields({"name", "categories", "fill", "unknown"})
            source.text("name")
            categories, unknown = source.value["categories"], source.value["unknown"]
            known = categories or []
            if not isinstance(known, list) or not all(isinstance(name, str) for name in known):
                source.fail("categories", "must be null or a list of strings")
            kinds = (str, type(None)) if categories is not None else (bool, int, float, type(None))
            if not isinstance(source.value["fill"], kinds):
                source.fail("fill", "is not a value of this column")
            if unknown is not None:
                source.integer("unknown", 0, len(known) - 1)
    return tuple(top.value["recipe"])


class _Fields:
    """Typed access to one JSON object; every error names the file and the field."""

    def __init__(self, path: str, where: str, value: dict[str, Any]) -> None:
        self.path = path
        self.where = where
        self.value = value

    def fail(self, field: str, fault: str) -> NoReturn:
        complaint = one_line(f"field '{self.where}{field}' {fault}")
        raise CorruptDataError(f"{self.path}: {complaint}")

    def check_fields(self, allowed: set[str]) -> None:
        for field in self.value.keys() - allowed:
            self.fail(field, "is unknown")
        for field in allowed - self.value.keys():
            self.fail(field, "is missing")

    def _get(self, field: str, kind: type, text: str) -> Any:
        value = self.value.get(field)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            self.fail(field, f"must be {text}" if field in self.value else "is missing")
        return value

    def text(self, field: str) -> str:
        return str(self._get(field, str, "a string"))

    def boolean(self, field: str) -> bool:
        return bool(self._get(field, bool, "true or false"))

    def integer(self, field: str, low: int, high: int) -> int:
        value = int(self._get(field, int, "an integer"))
        if not low <= value <= high:
            self.fail(field, f"is {value}, not from {low} to {high}")
        return value

    def integers(self, field: str, most: int) -> list[int]:
        values = self._get(field, list, "a list")
        if len(values) > most:
            self.fail(field, f"has more than {most} dimensions")
        for value in values:
            if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_BYTES:
                self.fail(field, f"holds {value!r}, which is not a size")
        return list(values)

    def hexadecimal(self, field: str, digits: int) -> str:
        value = self.text(field)
        if re.fullmatch(f"[0-9a-f]{{{digits}}}", value) is None:
            self.fail(field, f"must be {digits} hexadecimal digits")
        return value

    def object(self, field: str) -> _Fields:
        value = self._get(field, dict, "an object")
        return _Fields(self.path, f"{self.where}{field}.", value)

    def objects(self, field: str, least: int = 1) -> list[_Fields]:
        values = self._get(field, list, "a list")
        if len(values) < least:
            self.fail(field, "is empty")
        objects = []
        for index, value in enumerate(values):
            if not isinstance(value, dict):
                self.fail(f"{field}[{index}]", "must be an object")
            objects.append(_Fields(self.path, f"{self.where}{field}[{index}].", value))
        return objects
