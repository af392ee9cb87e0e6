"""Datasets and sources that lie: links, impossible sizes, bombs, pickles are refused by name."""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cerebro._core as _core
from cerebro.data import Dataset, manifest, shard
from cerebro.data.manifest import checksum_of, parse_manifest
from cerebro.errors import CorruptDataError, InputError
from cerebro.machine.files import LinkError, is_plain_name, load_json, open_plain, read_bytes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    source = {"x": np.arange(60.0).reshape(30, 2), "t": [[1] * (i % 3) for i in range(30)]}
    shard(source, tmp_path / "d", shards=2)
    return tmp_path / "d"


# --- links and pipes ------------------------------------------------------------


def move_away(path: Path) -> Path:
    """Put a file or folder elsewhere and a link in its place."""
    away = path.parent.parent.parent / f"away-{path.name}"
    path.rename(away)
    path.symlink_to(away)
    return away


@pytest.mark.parametrize(
    "name", ["manifest.json", "shard-00001", "shard-00001/x.npy", "shard-00000/t.offsets.npy"]
)
def test_links_within_a_dataset_are_refused(folder: Path, name: str) -> None:
    data = Dataset(folder)
    move_away(folder / name)
    with pytest.raises(CorruptDataError) as caught:
        Dataset(folder)
    assert str(folder / name) in str(caught.value)
    assert "symbolic link" in str(caught.value)
    with pytest.raises(CorruptDataError, match="symbolic link"):
        data.verify()
    if name.endswith(".npy"):
        with pytest.raises(CorruptDataError, match="symbolic link"):
            data.shards.check_sizes(int(name[10]))


def test_a_dataset_may_be_reached_by_links(folder: Path) -> None:
    away = folder.parent / "far" / "away"
    away.parent.mkdir()
    folder.rename(away)
    folder.symlink_to(away)
    Dataset(folder).verify()
    (folder.parent / "hop").symlink_to(away.parent)
    Dataset(folder.parent / "hop" / "away").verify()


@pytest.mark.parametrize("name", ["manifest.json", "shard-00000/x.npy"])
def test_pipes_are_not_waited_for(folder: Path, name: str) -> None:
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises((CorruptDataError, OSError), match=name):
        Dataset(folder)


def test_stale_temporary_folders_with_pipes_or_links_are_kept(tmp_path: Path) -> None:
    """A pipe in the place of the lock would be waited for; what is linked is not ours to remove."""
    (tmp_path / ".d.tmp-1").mkdir()
    os.mkfifo(tmp_path / ".d.tmp-1" / ".lock")
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / ".lock").touch()
    (tmp_path / ".d.tmp-2").symlink_to(victim)
    (tmp_path / ".d.tmp-3").mkdir()
    (tmp_path / ".d.tmp-3" / ".lock").symlink_to(victim / ".lock")
    shard({"x": np.zeros(4)}, tmp_path / "d", shards=1)
    assert (victim / ".lock").exists()
    assert (tmp_path / ".d.tmp-3").exists()


def test_only_plain_names_and_files_are_accepted(tmp_path: Path) -> None:
    names = ["", ".", "..", "a/b", "/a", "a\0", "x" * 256, 3, None]
    assert not any(is_plain_name(name) for name in names)
    assert all(is_plain_name(name) for name in ("a", "...", "a b", "x" * 255, "\u00e9"))
    (tmp_path / "file").write_bytes(b"abc")
    (tmp_path / "link").symlink_to("file")
    assert read_bytes(tmp_path / "file") == b"abc"
    assert read_bytes(tmp_path / "file", 3) == b"abc"
    with pytest.raises(CorruptDataError, match="file is too large"):
        read_bytes(tmp_path / "file", 2)
    for flags in (os.O_RDONLY, os.O_WRONLY | os.O_CREAT | os.O_APPEND):
        with pytest.raises(LinkError, match=r"link is a symbolic link"):
            open_plain(tmp_path / "link", flags)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "none")
    with pytest.raises((CorruptDataError, IsADirectoryError)):
        read_bytes(tmp_path)
    assert (tmp_path / "file").read_bytes() == b"abc"


def reader_of(file: Path, size: int) -> _core.ShardReader:
    return _core.ShardReader(file.parent, 4, [("x", "int16", (3,), False, {file.name: size})])


def test_a_column_cut_at_any_byte_is_refused(tmp_path: Path) -> None:
    """Its size alone tells, and where the manifest lies about that, its header."""
    file = tmp_path / "x.npy"
    np.save(file, np.arange(12, dtype=np.int16).reshape(4, 3))
    content = file.read_bytes()
    for size in range(len(content)):
        file.write_bytes(content[:size])
        for said in (len(content), size):
            with pytest.raises(CorruptDataError) as caught:
                reader_of(file, said)
            assert str(caught.value).startswith(f"{file}: ")
    file.write_bytes(content)
    assert reader_of(file, len(content)).column("x").tolist()[3] == [9, 10, 11]


def test_a_header_with_any_flipped_bit_is_refused_or_equivalent(tmp_path: Path) -> None:
    """By itself, that is: before any hash is looked at."""
    file = tmp_path / "x.npy"
    np.save(file, np.arange(12, dtype=np.int16).reshape(4, 3))
    content = file.read_bytes()
    same = []
    for place in range(128):
        flipped = bytearray(content)
        flipped[place] ^= 1 << (place % 8)
        file.write_bytes(flipped)
        try:
            reader_of(file, len(content))
        except CorruptDataError as error:
            assert str(error).startswith(f"{file}: ")
        else:
            same.append(place)
    assert same == []


# --- manifests ------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1e999}',
        '{"a": -1e999}',
        '{"a": Infinity}',
        '{"a": ' + "9" * 500 + "}",
        '{"a": ' + "9" * 100_000 + "}",
        '{"a": "\udc80"}',
        "[1, 2]",
        '{"format": "cerebro-dataset", "arguments": ' + "[" * 900 + "]" * 900 + "}",
    ],
)
def test_nonstandard_json_accepted_by_python_is_refused(text: str) -> None:
    content = text.encode("utf-8", "surrogateescape")
    with pytest.raises(CorruptDataError, match=r"m\.json"):
        parse_manifest(content, "m.json")


def test_too_deeply_nested_json_is_refused(folder: Path) -> None:
    """Reading and hashing take a little more of the stack each: none may be hit unprepared."""
    content = json.loads((folder / "manifest.json").read_bytes())
    text = json.dumps(content).encode()
    here = text.index(b'"arguments": ') + len('"arguments": ')
    for depth in [*range(1, 60, 7), *range(sys.getrecursionlimit() - 120, 1100)]:
        deep = b'{"x": ' + b"[" * depth + b"]" * depth + b', "y": '
        with pytest.raises(CorruptDataError, match="m: "):
            parse_manifest(text[:here] + deep + text[here:] + b"}", "m: ")


def test_a_manifest_larger_than_any_is_not_read(folder: Path) -> None:
    """As that of 10**9 shards would be: refused by its size, with nothing read or kept."""
    os.truncate(folder / "manifest.json", manifest.MAX_MANIFEST_BYTES + 1)
    with pytest.raises(CorruptDataError, match=r"manifest\.json is too large"):
        Dataset(folder)


def test_more_shards_than_a_manifest_lists_are_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cerebro.data.manifest.MAX_MANIFEST_BYTES", 3000)
    with pytest.raises(InputError, match="40 shards of 1 columns are more"):
        shard({"x": np.zeros(40)}, tmp_path / "d", shards=40)
    assert list(tmp_path.iterdir()) == []
    shard({"x": np.zeros(40)}, tmp_path / "d", shards=2)


def test_error_messages_escape_and_shorten_manifest_names(folder: Path) -> None:
    content = json.loads((folder / "manifest.json").read_bytes())
    content["\x1b[31m\n" + "x" * 10_000] = 1
    content["manifest_xxh3_128"] = ""
    with pytest.raises(CorruptDataError) as caught:
        parse_manifest(json.dumps(content).encode(), "m.json")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 1000


HOSTILE_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(["", "..", "../x", "/etc/passwd", "x" * 300, "\ud800", "|O", "float99"]),
    st.text(max_size=5),
    st.lists(st.integers(-5, 2**63), max_size=12),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything in a JSON value."""
    found = [path] if path else []
    items: Any = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        found += places(item, (*path, key))
    return found


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_change_of_a_manifest_is_refused_or_harmless(folder: Path, data: Any) -> None:
    """Also one that is signed anew: its files do not fit it, or it says the same as before."""
    good = (folder / "manifest.json").read_bytes()
    content = json.loads(good)
    for _ in range(data.draw(st.integers(1, 2))):
        *path, last = data.draw(st.sampled_from(places(content)))
        target = content
        for key in path:
            target = target[key]
        if data.draw(st.booleans()):
            target[last] = data.draw(HOSTILE_VALUES)
        elif isinstance(target, dict):
            del target[last]
        else:
            target.append(target[last])
    content.pop("manifest_xxh3_128", None)
    content["manifest_xxh3_128"] = checksum_of(content)
    text = json.dumps(content).encode()
    try:
        (folder / "manifest.json").write_bytes(text)
        opened = Dataset(folder)
        opened.verify()
        assert opened.num_rows == 30
        repr(opened), opened.stats("x")
    except CorruptDataError as error:
        assert str(folder) in str(error)
        assert "\n" not in str(error)
    finally:
        (folder / "manifest.json").write_bytes(good)


@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=60) | st.text(max_size=60).map(lambda text: text.encode("utf-8", "replace"))
)
def test_any_bytes_as_json(content: bytes) -> None:
    try:
        value = load_json(content, "file.json")
    except CorruptDataError as error:
        assert str(error).startswith("file.json is cut or damaged")
    else:
        assert json.loads(content) == value


# --- npz files --------------------------------------------------------------------


def npy(header: str, data: bytes = b"") -> bytes:
    text = header.encode("latin-1").ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def header(shape: object, dtype: str = "<f8", order: bool = False) -> str:
    return f"{{'descr': '{dtype}', 'fortran_order': {order}, 'shape': {shape}, }}"


def write_npz(path: Path, compression: int = zipfile.ZIP_STORED, **members: bytes) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


LYING: dict[str, tuple[bytes, str]] = {
    "more rows than there are": (npy(header((10**6,)), bytes(80)), "has 80 bytes, but"),
    "fewer rows than there are": (npy(header((3,)), bytes(80)), "has 80 bytes, but"),
    "rows without end": (npy(header((10**18, 0))), "a header with the impossible shape"),
    "a product that overflows": (npy(header((2, 2**62, 4))), "a header with the impossible shape"),
    "hidden behind a zero": (
        npy(header((3, 0, 2**62, 2**62))),
        "a header with the impossible shape",
    ),
    "a negative size": (npy(header((-5,))), "a header with the impossible shape"),
    "a negative size within": (
        npy(header((4, -2)), bytes(8)),
        "a header with the impossible shape",
    ),
    "elements of nothing": (npy(header((10**9,), "|S0")), "has dtype"),
    "a type with a shape": (
        npy("{'descr': ('<f8', (2,)), 'fortran_order': False, 'shape': (1,), }", bytes(16)),
        "has dtype",
    ),
    "no shape": (npy(header(())), "single value"),
    "no header": (b"\x93NUMPY\x01\x00\xff", "is damaged"),
    "no magic": (b"PK\x03\x04", "is damaged"),
    "nothing": (b"", "is damaged"),
    "a call for a header": (npy("__import__('os').system('touch owned')"), "is damaged"),
    "brackets without end": (npy("(" * 100), "is damaged"),
    "a pickle": (npy(header((1,), "|O"), b"cos\nsystem\n(S'touch owned'\ntR."), "be unpickled"),
    "a pickle in a structure": (
        npy("{'descr': [('a', '|O')], 'fortran_order': False, 'shape': (1,), }", b"N."),
        "be unpickled",
    ),
    "in Fortran order": (npy(header((2, 10**6), order=True), bytes(16)), "has 16 bytes, but"),
}


@pytest.mark.parametrize("name", LYING)
@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_npz_members_with_false_headers_are_refused(
    tmp_path: Path, name: str, compression: int
) -> None:
    content, message = LYING[name]
    file = write_npz(tmp_path / "x.npz", compression, x=content)
    with pytest.raises(InputError, match=message) as caught:
        shard(file, tmp_path / "d", shards=1)
    assert "'x'" in str(caught.value) or "x.npz" in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.npz"]


def test_a_bomb_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros are a thousandth of their size when packed: there must be room before they unfold."""
    array = npy(header((200_000, 10))) + bytes(16_000_000)
    file = write_npz(tmp_path / "bomb.npz", zipfile.ZIP_DEFLATED, x=array)
    assert file.stat().st_size < 30_000
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        "cerebro.data.sharding.shutil.disk_usage", lambda _: usage._replace(free=15_000_000)
    )
    with pytest.raises(InputError, match=r"has 16000128 bytes when unpacked.*room for 15000000"):
        shard(file, tmp_path / "d", shards=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bomb.npz"]
    small = write_npz(tmp_path / "fine.npz", zipfile.ZIP_DEFLATED, x=array, y=array[:128])
    with pytest.raises(InputError, match="bytes when unpacked"):
        shard(small, tmp_path / "d", shards=1, columns=["x"])


def patched(file: Path, old: bytes, new: bytes) -> None:
    content = file.read_bytes()
    assert old in content
    file.write_bytes(content.replace(old, new))


def test_a_directory_that_lies_about_sizes(tmp_path: Path) -> None:
    """The archive promises less than its member unpacks to: no more than promised is taken."""
    array = npy(header((100,)), np.arange(100.0).tobytes())
    for promised in (len(array) - 8, len(array) + 8, 0, 2**31):
        file = write_npz(tmp_path / "x.npz", zipfile.ZIP_DEFLATED, x=array)
        patched(file, struct.pack("<I", len(array)), struct.pack("<I", promised))
        with pytest.raises(InputError, match=r"'x'|x\.npz"):
            shard(file, tmp_path / "d", shards=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.npz"]


def test_encrypted_unsupported_and_damaged_archives_are_refused(tmp_path: Path) -> None:
    bz2 = pytest.importorskip("bz2")
    pytest.importorskip("lzma")
    good = npy(header((2,)), bytes(16))
    encrypted = write_npz(tmp_path / "encrypted.npz", x=good)
    content = bytearray(encrypted.read_bytes())
    content[6] |= 1  # the local header's flags, and the directory's
    content[content.index(b"PK\x01\x02") + 8] |= 1
    encrypted.write_bytes(content)
    unknown = write_npz(tmp_path / "unknown.npz", x=good)
    content = bytearray(unknown.read_bytes())
    content[8] = 99
    content[content.index(b"PK\x01\x02") + 10] = 99
    unknown.write_bytes(content)
    damaged = write_npz(tmp_path / "damaged.npz", zipfile.ZIP_BZIP2, x=good)
    packed = bz2.compress(good)
    patched(damaged, packed[:20], bytes(20))
    lzma = write_npz(tmp_path / "lzma.npz", zipfile.ZIP_LZMA, x=good)
    content = bytearray(lzma.read_bytes())
    content[45:60] = b"\xff" * 15
    lzma.write_bytes(content)
    for file in (encrypted, unknown, damaged, lzma):
        with pytest.raises(InputError, match=file.name):
            shard(file, tmp_path / "d", shards=1)


def test_names_in_archives(tmp_path: Path) -> None:
    good = npy(header((2,)), bytes(16))
    with pytest.raises(InputError, match="begins with a dot"):
        shard(write_npz(tmp_path / "x.npz", **{"../../x": good}), tmp_path / "d", shards=1)
    with pytest.raises(InputError, match="contains '/'"):
        shard(write_npz(tmp_path / "x.npz", **{"/tmp/x": good}), tmp_path / "d", shards=1)
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("x.npy", good)
        archive.writestr("x", good)
    with pytest.raises(InputError, match="two columns named 'x'"):
        shard(tmp_path / "x.npz", tmp_path / "d", shards=1)


def test_an_npz_cut_or_flipped_anywhere(tmp_path: Path) -> None:
    """There is a dataset of whole rows or an InputError, and nothing between."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, x=np.arange(6.0), y=np.arange(6))
    good = buffer.getvalue()
    file = tmp_path / "x.npz"
    broken = [good[:size] for size in range(0, len(good), 3)]
    for place in range(0, len(good), 3):
        flipped = bytearray(good)
        flipped[place] ^= 1 << (place % 8)
        broken.append(bytes(flipped))
    taken = 0
    for content in broken:
        file.write_bytes(content)
        try:
            shard(file, tmp_path / "d", shards=1)
        except InputError as error:
            assert not (tmp_path / "d").exists()
            assert "\n" not in str(error)
        else:
            taken += 1  # a date or the like
            assert Dataset(tmp_path / "d").num_rows == 6
            shutil.rmtree(tmp_path / "d")
    assert taken < len(broken) // 4


# --- others -----------------------------------------------------------------------


def test_csv_files_with_nul(tmp_path: Path) -> None:
    for text in ("a,b\n1,2\n\0,3\n", "a\0,b\n1,2\n", 'a,b\n1,"x\0y"\n'):
        (tmp_path / "x.csv").write_bytes(text.encode())
        with pytest.raises(InputError, match=r"x\.csv"):
            shard(tmp_path / "x.csv", tmp_path / "d", shards=1)
        assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("name", ["x.arrow", "x.parquet"])
def test_pyarrow_versions_that_unpickle_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pa = pytest.importorskip("pyarrow")
    (tmp_path / name).touch()
    monkeypatch.setattr(pa, "__version__", "14.0.0")
    with pytest.raises(InputError, match=r"needs pyarrow 15 or later, not 14\.0\.0"):
        shard(tmp_path / name, tmp_path / "d", shards=1)


def test_torch_and_pickle_files_are_refused(tmp_path: Path) -> None:
    for name in ("x.pt", "x.pth", "x.pkl", "x.npy", "x.safetensors"):
        (tmp_path / name).write_bytes(b"\x80\x04N.")
        with pytest.raises(InputError, match="unsupported file type"):
            shard(tmp_path / name, tmp_path / "d", shards=1)


SPECS: list[Callable[[dict[str, Any]], None]] = [
    lambda spec: spec.update(rows=[[0, 16], [0, 16]]),
    lambda spec: spec.update(rows=[[-1, 3], [0, 3]]),
    lambda spec: spec.update(rows=[[3, 1], [0, 3]]),
    lambda spec: spec.update(rows=["AAAA", [0, 3]]),
    lambda spec: spec.update(rows=[[0, 3]]),
    lambda spec: spec.update(rows=[[0, 2**70], [0, 3]]),
    lambda spec: spec.update(rows=[{}, None]),
]


@pytest.mark.parametrize("change", SPECS)
def test_rows_of_a_spec_stay_within_their_shards(
    folder: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    spec = Dataset(folder).spec()
    change(spec)
    with pytest.raises(InputError, match=r"has changed|does not fit"):
        Dataset.from_spec(spec)
