"""Damaged datasets: every cut, flip, swap and loss is refused by name."""

from __future__ import annotations

import errno
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cerebro.data import Dataset, shard
from cerebro.data.manifest import VERSION, checksum_of, parse_manifest, read_manifest
from cerebro.errors import CorruptDataError, InputError
from cerebro.machine.imports import update_hint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = {"x": np.arange(60.0).reshape(30, 2), "t": [[1] * (i % 3) for i in range(30)]}
    shard(source, tmp_path / "d", shards=3)
    return tmp_path / "d"


FILES = ("x.npy", "t.values.npy", "t.offsets.npy")


@pytest.mark.parametrize("name", FILES)
def test_a_cut_file_is_refused_at_opening(folder: Path, name: str) -> None:
    data = Dataset(folder)
    file = folder / "shard-00001" / name
    content = file.read_bytes()
    for size in (0, 5, 100, len(content) - 1):
        file.write_bytes(content[:size])
        for read in (lambda: Dataset(folder), data.verify, lambda: data.shards.verify(1)):
            with pytest.raises(CorruptDataError) as caught:
                read()
            assert f"shard-00001/{name}" in str(caught.value)
        data.shards.verify(0)
    file.write_bytes(content + b"\0")
    with pytest.raises(CorruptDataError, match=name):
        Dataset(folder)


@pytest.mark.parametrize("name", FILES)
def test_the_error_names_a_missing_file(folder: Path, name: str) -> None:
    (folder / "shard-00002" / name).unlink()
    with pytest.raises(CorruptDataError) as caught:
        Dataset(folder)
    assert f"shard-00002/{name}" in str(caught.value)
    assert isinstance(caught.value, FileNotFoundError)


def test_the_error_names_a_missing_shard(folder: Path) -> None:
    shutil.rmtree(folder / "shard-00001")
    with pytest.raises(CorruptDataError, match="shard-00001"):
        Dataset(folder)


@pytest.mark.parametrize("name", FILES)
def test_every_flipped_byte_is_found(folder: Path, name: str) -> None:
    file = folder / "shard-00000" / name
    good = file.read_bytes()
    for place in range(len(good)):
        bad = bytearray(good)
        bad[place] ^= 1 << (place % 8)
        file.write_bytes(bad)
        with pytest.raises(CorruptDataError) as caught:
            Dataset(folder).verify()
        assert f"shard-00000/{name}" in str(caught.value)
    file.write_bytes(good)
    Dataset(folder).verify()


def test_swapped_files_are_found(folder: Path) -> None:
    one, two = (folder / f"shard-0000{i}" / "x.npy" for i in (0, 1))
    spare = folder / "spare"
    one.rename(spare)
    two.rename(one)
    spare.rename(two)
    data = Dataset(folder)  # sizes and headers are alike
    with pytest.raises(CorruptDataError, match=r"shard-00000/x\.npy"):
        data.verify()
    data.shards.verify(2)
    with pytest.raises(CorruptDataError, match=r"shard-00001/x\.npy"):
        data.shards.verify(1)


def test_a_manifest_cut_at_any_byte_is_refused(folder: Path) -> None:
    content = (folder / "manifest.json").read_bytes()
    for size in range(len(content)):
        with pytest.raises(CorruptDataError, match=r"manifest\.json"):
            parse_manifest(content[:size], "d/manifest.json")
    parse_manifest(content, "d/manifest.json")
    (folder / "manifest.json").write_bytes(content[:50])
    with pytest.raises(CorruptDataError, match=r"manifest\.json is cut or damaged"):
        Dataset(folder)
    (folder / "manifest.json").unlink()
    with pytest.raises(CorruptDataError, match=r"manifest\.json is missing"):
        Dataset(folder)


def test_every_flipped_bit_of_a_manifest_is_refused(folder: Path) -> None:
    content = (folder / "manifest.json").read_bytes()
    for place in range(len(content)):
        bad = bytearray(content)
        bad[place] ^= 1 << (place % 7)
        try:
            parsed = parse_manifest(bytes(bad), "m")
        except CorruptDataError:
            continue
        # Only layout may change unseen: a space for a line break and the like.
        assert parsed == read_manifest(folder)
        assert bytes([content[place], bad[place]]).isspace()


def signed(content: dict[str, Any]) -> bytes:
    content.pop("manifest_xxh3_128", None)
    content["manifest_xxh3_128"] = checksum_of(content)
    return json.dumps(content).encode()


def _set(*path: Any) -> Callable[[dict[str, Any]], None]:
    """A change that puts the last item at the place that the others name."""

    def change(content: Any) -> None:
        *places, last, value = path
        for place in places:
            content = content[place]
        content[last] = value

    return change


def _remove(*path: Any) -> Callable[[dict[str, Any]], None]:
    def change(content: Any) -> None:
        *places, last = path
        for place in places:
            content = content[place]
        del content[last]

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_set("format", "other"), "'format'"),
        (
            _set("version", VERSION - 1),
            f"manifest.json has dataset version {VERSION - 1}, of an earlier Cerebro, and this one "
            f"reads only version {VERSION}: make the dataset again with cerebro.shard",
        ),
        (
            _set("version", VERSION + 1),
            f"manifest.json has dataset version {VERSION + 1}, of a newer Cerebro, and this one "
            rf"reads only version {VERSION}: update Cerebro \({re.escape(update_hint())}\)",
        ),
        (_set("version", True), "'version' must be an integer"),
        (_set("extra", 1), "'extra' is unknown"),
        (_remove("library"), "'library' is missing"),
        (_set("library", 1), "'library' must be a string"),
        (_set("rows", 31), "'rows' is not the sum"),
        (_set("rows", -1), "'rows' is -1"),
        (_set("rows", 2**80), "'rows' is"),
        (_set("rows", 30.0), "'rows' must be an integer"),
        (_set("columns", []), "'columns' is empty"),
        (_set("columns", 3), "'columns' must be a list"),
        (_set("columns", 0, 3), r"'columns\[0\]' must be an object"),
        (_set("columns", 0, "name", "../x"), r"'columns\[0\].name' begins with a dot"),
        (_set("columns", 0, "name", "a/x"), r"contains '/'"),
        (_set("columns", 0, "name", "a\0"), r"control character"),
        (_set("columns", 0, "name", ""), r"is empty"),
        (_set("columns", 0, "name", "t"), r"would both need the name"),
        (_set("columns", 0, "name", "z" * 300), "longer than 200"),
        (_set("columns", 0, "name", "\ud800"), "not valid Unicode"),
        (_set("columns", 0, "dtype", "float99"), "'float99' is unknown"),
        (_set("columns", 0, "shape", [-1]), "holds -1"),
        (_set("columns", 0, "shape", [True]), "holds True"),
        (_set("columns", 0, "shape", [1] * 9), "more than 8 dimensions"),
        (_set("columns", 0, "shape", [2**40, 2**40]), "is too large"),
        (_set("columns", 0, "ragged", 1), "must be true or false"),
        (_set("columns", 0, "classes", [1]), "list of strings"),
        (_set("shards", []), "'shards' is empty"),
        (_set("shards", 0, "rows", 0), r"'shards\[0\].rows' is 0"),
        (_set("shards", 0, "files", "y.npy", {}), r"'shards\[0\].files.y.npy' is unknown"),
        (_remove("shards", 0, "files", "x.npy"), r"'shards\[0\].files.x.npy' is missing"),
        (_set("shards", 0, "files", "x.npy", "bytes", 159), "is 159, not from 160"),
        (_set("shards", 0, "files", "x.npy", "bytes", 2**64), "is 18446744073709551616"),
        (_set("shards", 0, "files", "x.npy", "xxh3_64", "12"), "16 hexadecimal digits"),
        (_set("arguments", []), "'arguments' must be an object"),
        (_set("source", "kind", None), "'source.kind' must be a string"),
        (_set("source", "fingerprint", 3), "null or a string"),
    ],
)
def test_every_field_is_checked(
    folder: Path, change: Callable[[dict[str, Any]], None], message: str
) -> None:
    content = json.loads((folder / "manifest.json").read_bytes())
    change(content)
    (folder / "manifest.json").write_bytes(signed(content))
    with pytest.raises(CorruptDataError, match=message) as caught:
        Dataset(folder)
    assert "manifest.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "null", '{"a": NaN}', '{"a": 1, "a": 2}', "[" * 100_000, "1" * 10_000, "\xff{}"],
)
def test_a_manifest_of_invalid_json_is_refused(text: str) -> None:
    with pytest.raises(CorruptDataError, match=r"manifest\.json"):
        parse_manifest(text.encode("latin-1"), "manifest.json")


def test_a_manifest_that_lies_about_headers_is_refused(folder: Path) -> None:
    content = json.loads((folder / "manifest.json").read_bytes())
    content["columns"][0]["dtype"] = "int64"
    (folder / "manifest.json").write_bytes(signed(content))
    with pytest.raises(CorruptDataError, match=r"shard-00000/x\.npy"):
        Dataset(folder)


def test_an_edited_manifest_is_refused(folder: Path) -> None:
    text = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(text.replace('"seed": 0', '"seed": 1'))
    with pytest.raises(CorruptDataError, match="altered or damaged"):
        Dataset(folder)


def test_no_dataset_at_all(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no dataset at"):
        Dataset(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="no dataset at"):
        Dataset(tmp_path / "file")


def test_too_many_mappings_are_not_reported_as_out_of_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot_map(*_: object) -> None:
        raise OSError(errno.ENOMEM, "cannot map x.npy: Cannot allocate memory")

    monkeypatch.setattr("cerebro.data.shards._core.ShardReader", cannot_map)
    with pytest.raises(OSError, match=r"cannot map x\.npy.*max_map_count.*fewer shards") as error:
        next(iter(Dataset(folder).batches(2)))
    assert error.value.errno == errno.ENOMEM
