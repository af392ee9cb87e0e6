"""`Dataset.derive`: found again, interrupted, damaged, refused; columns and copies."""

from __future__ import annotations

import fcntl
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cerebro
from cerebro.data.manifest import checksum_of
from cerebro.data.placed import write_view
from cerebro.transforms import RandomCrop, RandomHorizontalFlip, Scale

ROWS, SHARDS, BATCH = 50, 4, 8


@pytest.fixture
def images(tmp_path: Path) -> cerebro.Dataset:
    rng = np.random.default_rng(0)
    data = cerebro.shard(
        {
            "x": rng.integers(0, 255, (ROWS, 4, 4), np.uint8),
            "y": rng.integers(0, 3, ROWS),
            "words": [list(range(row % 3)) for row in range(ROWS)],
        },
        tmp_path / "images",
        shards=SHARDS,
    )
    return data.with_transforms({"x": [Scale(1 / 256)]})


def sums(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {"sums": batch["x"].sum(axis=(1, 2)), "rows": batch["x"].max(axis=2)}


def derive(data: cerebro.Dataset, path: Path, function: Any = sums, **options: Any) -> Any:
    options = {"reads": ["x"], "key": "sums", "batch_size": BATCH} | options
    return data.derive(path, function, **options)


def scaled(shard: Mapping[str, Any]) -> Any:
    return shard["x"] * np.float32(1 / 256)


def test_a_derived_dataset_keeps_rows_shards_and_splits(
    images: cerebro.Dataset, tmp_path: Path
) -> None:
    sizes = []

    def counted(batch: Mapping[str, Any]) -> dict[str, Any]:
        sizes.append(len(batch["x"]))
        return sums(batch)

    made = derive(images, tmp_path / "made", counted)
    assert set(sizes) == {BATCH}  # also at the ends of shards, of 13 and 12 rows
    assert list(made.columns) == ["y", "words", "sums", "rows"]
    assert made.shards.stored_rows == images.shards.stored_rows
    made.verify()
    views = [(images, made)]
    views += zip(images.split(0.6, 0.4), made.split(0.6, 0.4), strict=True)
    stratified = (data.split(0.5, 0.5, stratify="y") for data in (images, made))
    views += zip(*stratified, strict=True)
    chosen = images.select([3, 40, 7])
    views.append((chosen, made.like(chosen)))
    for source, derived in views:
        for shard in range(SHARDS):
            there, here = source.shard(shard), derived.shard(shard)
            np.testing.assert_array_equal(here["y"], there["y"])
            np.testing.assert_array_equal(here["words"].values, there["words"].values)
            np.testing.assert_array_equal(here["sums"], scaled(there).sum(axis=(1, 2)))
            np.testing.assert_array_equal(here["rows"], scaled(there).max(axis=2))


def test_a_view_of_some_rows(images: cerebro.Dataset, tmp_path: Path) -> None:
    _, part = images.split(0.7, 0.3, stratify="y")
    made = derive(part, tmp_path / "made", keep=[], dtypes={"sums": "float16"})
    assert made.columns["sums"].dtype == "float16" and "y" not in made.columns
    for shard in range(SHARDS):
        wanted = scaled(part.shard(shard)).sum(axis=(1, 2)).astype(np.float16)
        np.testing.assert_array_equal(made.shard(shard)["sums"], wanted)
    with pytest.raises(cerebro.InputError, match="derive from the whole dataset"):
        made.like(part)
    with pytest.raises(cerebro.InputError, match=r"no rows of shard 1: derive from the whole"):
        derive(images.select([0]), tmp_path / "other")


def test_kept_columns_keep_their_transforms(images: cerebro.Dataset, tmp_path: Path) -> None:
    view = images.with_transforms({"y": [Scale(1 / 4)]})
    made = derive(view, tmp_path / "made")
    assert made.transforms == {"y": (Scale(1 / 4),)}
    again = derive(view, tmp_path / "made")
    assert again.checksum == made.checksum == cerebro.Dataset.from_spec(made.spec()).checksum
    for source, derived in zip(view.split(0.6, 0.4), made.split(0.6, 0.4), strict=True):
        there, here = (next(iter(data.batches(8, framework="numpy"))) for data in (source, derived))
        np.testing.assert_array_equal(here["y"], there["y"])
        assert here["y"].max() <= 0.5
    assert derive(view, tmp_path / "both", keep=["x"]).transforms == {"x": (Scale(1 / 256),)}
    assert cerebro.Dataset(tmp_path / "made").transforms == {}


KILLED = """
import os, signal, sys
import numpy as np
import cerebro
from cerebro.transforms import Scale
calls = 0
def function(batch):
    global calls
    calls += 1
    if calls > {calls}:
        os.kill(os.getpid(), signal.SIGKILL)
    return {{"sums": batch["x"].sum(axis=(1, 2)), "rows": batch["x"].max(axis=2)}}
data = cerebro.Dataset(sys.argv[1]).with_transforms({{"x": [Scale(1 / 256)]}})
data.derive(sys.argv[2], function, reads=["x"], key="sums", batch_size={batch})
"""


def parts_of(folder: Path) -> list[Path]:
    return sorted(folder.glob(".made.part-*"))


@pytest.mark.parametrize("damaged", [False, True])
def test_a_killed_derive_resumes_at_the_unfinished_shards(
    images: cerebro.Dataset, tmp_path: Path, damaged: bool
) -> None:
    whole = derive(images, tmp_path / "whole").checksum
    # Two calls for the first rows and two for each shard: in the second call for the third shard.
    program = KILLED.format(calls=7, batch=BATCH)
    command = [sys.executable, "-c", program, str(images.path), str(tmp_path / "made")]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert not (tmp_path / "made").exists()
    (part,) = parts_of(tmp_path)
    assert not (part / "manifest.json").exists()
    with pytest.raises(cerebro.CerebroError):
        cerebro.Dataset(part)
    if damaged:
        file = part / "shard-00001" / "sums.npy"
        file.write_bytes(file.read_bytes()[:-1] + b"!")
    calls = []

    def counted(batch: Mapping[str, Any]) -> dict[str, Any]:
        calls.append(1)
        return sums(batch)

    made = derive(images, tmp_path / "made", counted)
    assert len(calls) == 2 + 2 * (3 if damaged else 2)  # the first rows twice; the shards
    assert made.checksum == whole
    made.verify()
    assert parts_of(tmp_path) == []
    assert sorted(p.name for p in made.path.iterdir()) == [
        "manifest.json",
        *(f"shard-{shard:05d}" for shard in range(SHARDS)),
    ]


FORKS = """
import os, sys
import cerebro

def forking(batch):
    child = os.fork()
    if child == 0:
        sys.exit(0)
    os.waitpid(child, 0)
    return {{"sums": batch["x"].sum(axis=(1, 2)), "rows": batch["x"].max(axis=2)}}

data = cerebro.Dataset(sys.argv[1]).with_transforms({{"x": [cerebro.transforms.Scale(1 / 256)]}})
data.derive(sys.argv[2], forking, reads=["x"], key="sums", batch_size={batch})
"""


def test_a_function_may_fork_a_child_that_exits(images: cerebro.Dataset, tmp_path: Path) -> None:
    program = FORKS.format(batch=BATCH)
    command = [sys.executable, "-c", program, str(images.path), str(tmp_path / "forked")]
    subprocess.run(command, check=True)
    made = cerebro.Dataset(tmp_path / "forked")
    made.verify()
    assert made.checksum == derive(images, tmp_path / "made").checksum


def test_a_link_to_an_empty_folder_is_kept(images: cerebro.Dataset, tmp_path: Path) -> None:
    (tmp_path / "scratch" / "made").mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "scratch" / "made")
    parts = []

    def noting(batch: Mapping[str, Any]) -> dict[str, Any]:
        parts.append(len(parts_of(tmp_path / "scratch")))
        return sums(batch)

    made = derive(images, link, noting)
    assert parts[-1] == 1  # on the disk that the link leads to
    assert link.is_symlink() and made.path == link
    assert derive(images, link).path == link  # found again
    cerebro.Dataset(tmp_path / "scratch" / "made").verify()
    assert parts_of(tmp_path / "scratch") == []
    (tmp_path / "astray").symlink_to(tmp_path / "gone")
    with pytest.raises(cerebro.InputError, match=r"astray' is a link to '.*gone', which does not"):
        derive(images, tmp_path / "astray")


def test_an_error_of_the_function_leaves_nothing_finished(
    images: cerebro.Dataset, tmp_path: Path
) -> None:
    calls = []

    def failing(batch: Mapping[str, Any]) -> dict[str, Any]:
        calls.append(1)
        if len(calls) > 5:
            raise ZeroDivisionError
        return sums(batch)

    with pytest.raises(ZeroDivisionError):
        derive(images, tmp_path / "made", failing)
    assert not (tmp_path / "made").exists()
    (part,) = parts_of(tmp_path)
    derive(images, tmp_path / "made", key="another")  # another function: that work is of no use
    assert not part.exists() and parts_of(tmp_path) == []


def test_a_second_concurrent_derive_is_refused(images: cerebro.Dataset, tmp_path: Path) -> None:
    refused = []

    def second(batch: Mapping[str, Any]) -> dict[str, Any]:
        part = parts_of(tmp_path)
        if part and not refused:
            with (part[0] / ".lock").open("rb") as lock, pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with pytest.raises(cerebro.InputError, match="being made by another process: wait"):
                derive(images, tmp_path / "made")
            refused.append(True)
        return sums(batch)

    derive(images, tmp_path / "made", second)
    assert refused


def test_found_again_or_refused(images: cerebro.Dataset, tmp_path: Path) -> None:
    path = tmp_path / "made"
    made = derive(images, path)
    stamp = (path / "manifest.json").stat().st_mtime_ns
    assert derive(images, path).checksum == made.checksum
    assert (path / "manifest.json").stat().st_mtime_ns == stamp
    whole = cerebro.Dataset(images.path)

    def refuse(match: str, data: cerebro.Dataset = images, **options: Any) -> None:
        with pytest.raises(cerebro.InputError, match=match):
            derive(data, path, **options)

    refuse(r"made' was derived with key='sums', not 'other': choose another path", key="other")
    refuse("from other data, rows or transforms", whole)
    refuse("from other data, rows or transforms", images.select(slice(0, 49)))
    refuse("with batch_size=8, not 4", batch_size=4)
    refuse(r"with kept=\['y', 'words'\], not \['y'\]", keep=["y"])
    refuse(r"dtypes={}, not {'sums': 'float64'}", dtypes={"sums": "float64"})
    refuse("other values than the function computes now", function=lambda batch: {
        "sums": batch["x"].sum(axis=(1, 2)) + 1, "rows": batch["x"].max(axis=2)})  # fmt: skip
    with pytest.raises(cerebro.InputError, match="exists, and was not derived"):
        derive(images, images.path)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(cerebro.InputError, match="exists, and is not a complete dataset"):
        derive(images, tmp_path / "other")


def test_name_and_source_identify_a_function(images: cerebro.Dataset, tmp_path: Path) -> None:
    derive(images, tmp_path / "made", key=None)
    assert derive(images, tmp_path / "made", key=None).num_rows == ROWS

    def sums(batch: Mapping[str, Any]) -> dict[str, Any]:
        return {"sums": batch["x"].sum(axis=(1, 2)), "rows": batch["x"].max(axis=2)}

    with pytest.raises(cerebro.InputError, match="was derived with function="):
        derive(images, tmp_path / "made", sums, key=None)


def test_a_truncated_ragged_column_is_named_before_its_offsets_are_read(tmp_path: Path) -> None:
    """They are mapped: what is beyond the end of the file would end the process."""
    rows = {"x": np.arange(4_000), "words": [[1]] * 4_000}
    data = cerebro.shard(rows, tmp_path / "data", shards=2)
    file = data.path / "shard-00001" / "words.offsets.npy"
    with file.open("r+b") as opened:
        opened.truncate(200)
    with pytest.raises(cerebro.CorruptDataError, match=r"words\.offsets\.npy: has 200 bytes"):
        derive(data, tmp_path / "derived", lambda batch: {"twice": 2 * batch["x"]})


def test_the_error_names_the_damaged_file(images: cerebro.Dataset, tmp_path: Path) -> None:
    made = derive(images, tmp_path / "made")
    file = tmp_path / "made" / "shard-00002" / "rows.npy"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    with pytest.raises(cerebro.CorruptDataError, match=r"shard-00002/rows\.npy is damaged"):
        made.verify()
    source = images.path / "shard-00001" / "x.npy"
    source.write_bytes(source.read_bytes()[:-1] + b"!")
    with pytest.raises(cerebro.CorruptDataError, match=r"images/shard-00001/x\.npy is damaged"):
        derive(images, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def random_rows(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {"z": np.random.default_rng().random(len(batch["x"]))}


@pytest.mark.parametrize(
    ("function", "options", "match"),
    [
        (lambda batch: batch["x"], {}, "must return a mapping"),
        (lambda batch: {"z": 1.0}, {}, "one row of numbers for each row"),
        (lambda batch: {"z": batch["x"][1:]}, {}, "one row of numbers for each row"),
        (lambda batch: {"y": batch["x"]}, {}, "column 'y' is copied .* another name"),
        (random_rows, {}, "'z' differs when it is computed again"),
        (None, {}, "function must be callable"),
        (lambda batch: {1: batch["x"]}, {}, "must use strings as column names, not 1"),
        (sums, {"reads": ["q"]}, "no column 'q'"),
        (sums, {"reads": "x"}, r"reads='x': give a list of columns, such as \["),
        (sums, {"dtypes": {"sum": "float16"}}, "column 'sum', but the new columns are sums, rows"),
        (sums, {"keep": "y"}, "give a list of columns"),
        (sums, {"copies": 2}, "no random transforms, so all copies would be equal"),
        (sums, {"framework": "caffe"}, "framework must be one of"),
        (sums, {"batch_size": 0}, "batch_size must be"),
        (sums, {"key": {1j}}, "key must be text or another JSON value"),
    ],
)
def test_bad_arguments(
    images: cerebro.Dataset,
    tmp_path: Path,
    function: Callable[..., Any],
    options: dict[str, Any],
    match: str,
) -> None:
    with pytest.raises(cerebro.InputError, match=match):
        derive(images, tmp_path / "made", function, **options)
    assert not (tmp_path / "made").exists()


def test_a_bad_path_is_refused_before_the_function_is_called(images: cerebro.Dataset) -> None:
    calls = []

    def counted(batch: Mapping[str, Any]) -> dict[str, Any]:
        calls.append(1)
        return sums(batch)

    for path, match in (
        ("s3://bucket/made", "path must be a path on this machine, not the URL 's3://bucket/made'"),
        (7, "path must be a path, not 7"),
    ):
        with pytest.raises(cerebro.InputError, match=match):
            images.derive(path, counted, reads=["x"])  # type: ignore[arg-type]
    assert calls == []


# --- copies -----------------------------------------------------------------------


def unchanged(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {"z": batch["x"]}


def test_each_epoch_reads_its_copy(images: cerebro.Dataset, tmp_path: Path) -> None:
    steps = [RandomCrop(3), RandomHorizontalFlip(), Scale(1 / 256)]
    view = images.with_transforms({"x": steps})
    with pytest.raises(cerebro.InputError, match=r"copies=4 stores four.*copies=0 stores"):
        derive(view, tmp_path / "made", unchanged)
    made = derive(view, tmp_path / "made", unchanged, copies=2, seed=7)
    train, _ = made.split(0.8, 0.2)
    source, _ = view.split(0.8, 0.2)
    for epoch in range(4):  # the augmentation of the search's epochs 0, 1, 0, 1
        options: dict[str, Any] = {"shuffle": False, "framework": "numpy", "shard": 1}
        (there,) = source.batches(100, seed=7, epoch=epoch % 2, **options)
        (here,) = train.batches(100, seed=7, epoch=epoch, **options)
        assert set(here) == {"y", "words", "words_mask", "words_length", "z"}
        np.testing.assert_array_equal(here["z"], there["x"])
    passes = train.batches(100, framework="numpy", shard=0, shuffle=False)
    first, second, again = ([batch["z"].sum() for batch in passes] for _ in range(3))
    assert first == again != second
    plain = [batch["z"] for batch in made.in_order(100, "numpy")]
    center = [batch["x"] for batch in view.in_order(100, "numpy")]
    np.testing.assert_array_equal(np.concatenate(plain), np.concatenate(center))
    with pytest.raises(cerebro.InputError, match="columns: no column 'z@0': batches have y, words"):
        made.batches(8, framework="numpy", columns=["z@0"])
    (tmp_path / "written").mkdir()
    written = write_view(made.split(0.8, 0.2)[1], tmp_path / "written")  # as for a cluster's nodes
    assert list(written.columns) == ["y", "words", "z"]
    only = derive(view, tmp_path / "only", unchanged, copies=0)
    np.testing.assert_array_equal(only.shard(0)["z"], made.shard(0)["z"])
    with pytest.raises(cerebro.InputError, match="derive from its source"):
        derive(made, tmp_path / "third", unchanged, reads=["z"])


@pytest.mark.parametrize("copies", [3, "2", 10**9])
def test_an_invalid_number_of_copies_is_refused(
    images: cerebro.Dataset, tmp_path: Path, copies: Any
) -> None:
    view = images.with_transforms({"x": [RandomHorizontalFlip()]})
    derive(view, tmp_path / "made", unchanged, copies=2)
    file = tmp_path / "made" / "manifest.json"
    content = json.loads(file.read_text())
    del content["manifest_xxh3_128"]
    content["arguments"]["copies"] = copies
    content["manifest_xxh3_128"] = checksum_of(content)
    file.write_text(json.dumps(content))
    with pytest.raises(cerebro.CorruptDataError, match=r"manifest.json: field 'arguments.copies'"):
        cerebro.Dataset(tmp_path / "made").batches(8, framework="numpy")


# --- columns that are read --------------------------------------------------------


def test_batches_of_some_columns(images: cerebro.Dataset) -> None:
    whole = list(images.batches(BATCH, framework="numpy"))
    some = list(images.batches(BATCH, framework="numpy", columns=["y"]))
    assert [set(batch) for batch in some] == [{"y"}] * len(whole)
    for all_columns, one in zip(whole, some, strict=True):
        np.testing.assert_array_equal(one["y"], all_columns["y"])
    (ragged,) = images.batches(100, shard=0, framework="numpy", columns=["words"])
    assert set(ragged) == {"words", "words_mask", "words_length"}
    with pytest.raises(cerebro.InputError, match="columns: no column 'q'"):
        images.batches(BATCH, columns=["q"])
    with pytest.raises(cerebro.InputError, match="give a list of names"):
        images.batches(BATCH, columns="y")
