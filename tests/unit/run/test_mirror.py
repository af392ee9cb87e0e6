"""Copies of runs in object storage, here a folder of this machine through fsspec."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("fsspec")

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "integration"))

import resumable

import cerebro
import cerebro._core as _core
from cerebro.callbacks import Mirror
from cerebro.callbacks import mirror as module
from cerebro.errors import CorruptDataError, InputError
from cerebro.machine.objects import Objects, StorageError
from cerebro.run import mirror as module_of_uploads
from cerebro.run.mirror import Uploader, download, read_pointer


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(207, 3))
    y = x @ [1.0, -2.0, 0.5] + 0.1 * rng.normal(size=207)
    folder = tmp_path_factory.mktemp("data") / "set"
    return cerebro.shard({"x": x, "y": y}, folder, shards=resumable.SHARDS).path


@pytest.fixture(scope="module")
def expected(data, tmp_path_factory):
    return resumable.search(tmp_path_factory.mktemp("undisturbed") / "run", data)


@pytest.fixture
def url(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return f"file://{tmp_path}/bucket/runs/x"


class Stop:
    """Ends a search as Ctrl-C does, after some epochs."""

    def __init__(self, epochs):
        self.left = epochs

    def on_epoch_end(self, trial, metrics):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def names(url):
    return sorted(Objects(url).names())


def same(found, expected):
    assert found.status == "finished"
    assert resumable.hashes(found) == resumable.hashes(expected)
    assert [t.metrics for t in found.trials] == [t.metrics for t in expected.trials]


def test_a_copy_holds_the_whole_run(url, data, expected, tmp_path):
    found = resumable.search(tmp_path / "run", data, callbacks=[Mirror(url)])
    same(found, expected)
    kept = sorted(
        f"states/{trial.number}-epoch-{epoch['epoch']}.{epoch['state_hash']}.safetensors"
        for trial in found.trials
        for epoch in trial.history
        if (
            tmp_path / "run" / "states" / f"{trial.number}-epoch-{epoch['epoch']}.safetensors"
        ).exists()
    )
    (store,) = [name for name in names(url) if name.startswith("store/")]
    assert names(url) == sorted(["run.json", store, *kept])
    pointer = download(Objects(url), tmp_path / "copy")
    assert (pointer.store, pointer.epochs) == (store, resumable.TRIALS * resumable.EPOCHS)
    copy = cerebro.open(tmp_path / "copy", build=resumable.build)
    same(copy, expected)
    assert copy.verify().problems == []
    assert sorted(path.name for path in (tmp_path / "copy").iterdir()) == [
        "control",
        "run.sqlite",
        "states",
        "trials",
    ]
    assert copy.best.load().state_dict()["batches"] == found.best.load().state_dict()["batches"]
    assert resumable.hashes(cerebro.resume(url, resumable.build)) == resumable.hashes(expected)


@pytest.mark.parametrize("searcher", ["random", "pbt", "successive_halving"])
def test_an_interrupted_run_resumes_from_the_copy(url, data, tmp_path, searcher):
    options = {"searcher": searcher, "width": 2} if searcher != "random" else {}
    whole = resumable.search(tmp_path / "whole", data, **options)
    with pytest.raises(KeyboardInterrupt):
        resumable.search(tmp_path / "run", data, callbacks=[Mirror(url), Stop(3)], **options)
    (tmp_path / "run").rename(tmp_path / "gone")
    found = cerebro.resume(url, resumable.build, progress=False)
    same(found, whole)
    assert found.path.absolute() == tmp_path / "here" / "runs" / "x"
    assert found.verify().problems == []
    # The copy has followed, so the run can be resumed from it again, into another folder.
    again = cerebro.resume(url, resumable.build, epochs=4, progress=False)
    assert again.path.name == "x-2"
    assert {len(trial.history) for trial in again.trials} == (
        {4} if searcher == "random" else {len(trial.history) for trial in again.trials}
    )


@pytest.mark.parametrize("at", [1, 8, 23])
def test_a_killed_run_loses_at_most_the_epochs_in_progress(url, data, expected, tmp_path, at):
    """It is killed at a unit; the copy has what had been uploaded by then."""
    code = (
        "import sys, resumable, cerebro, cerebro.callbacks\n"
        f"mirror = cerebro.callbacks.Mirror({url!r})\n"
        f"strike = resumable.Strike({at})\n"
        f"resumable.search({str(tmp_path / 'run')!r}, {str(data)!r}, callbacks=[mirror, strike])\n"
    )
    tests = str(Path(resumable.__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ["PYTHONPATH"]])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    copied = read_pointer(Objects(url)).epochs
    with sqlite3.connect(tmp_path / "run" / "run.sqlite") as connection:
        (finished,) = connection.execute("SELECT count(*) FROM epochs").fetchone()
    assert 0 <= copied <= finished
    (tmp_path / "run").rename(tmp_path / "gone")
    same(cerebro.resume(url, resumable.build, progress=False), expected)


def test_every_epoch_is_in_the_copy_when_the_uploads_keep_up(url, data, tmp_path):
    """Whenever the machine is lost, only the epochs in progress are."""
    counts = []

    class Look(Mirror):
        def on_epoch_end(self, trial, metrics):
            for _ in range(500):
                pointer = read_pointer(Objects(url))
                if pointer.epochs > len(counts):
                    break
                time.sleep(0.01)
            counts.append(pointer.epochs)

    resumable.search(tmp_path / "run", data, callbacks=[Look(url)])
    assert counts == list(range(1, resumable.TRIALS * resumable.EPOCHS + 1))


class Overtakes:
    """Has the run finish more epochs in the middle of each upload, and remove states."""

    def __init__(self, monkeypatch, folder):
        self.uploaded, self.uploads = [], 0
        self.write, self.folder = Objects.write, folder
        monkeypatch.setattr(Objects, "write", lambda *given: self.slow(*given))

    def slow(self, objects, name, content):
        if name.startswith("states/") and self.uploads:
            before = self.epochs()
            end = time.monotonic() + 60
            while self.goes_on() and self.epochs() < before + 4:
                assert time.monotonic() < end
                time.sleep(0.01)
        self.write(objects, name, content)
        if name == "run.json":
            self.uploads += 1
            self.uploaded.append(json.loads(content)["epochs"])

    def goes_on(self):
        return cerebro.open(self.folder).status == "running"

    def epochs(self):
        with sqlite3.connect(self.folder / "run.sqlite") as connection:
            return connection.execute("SELECT count(*) FROM epochs").fetchone()[0]


def refuse(*_, **__):
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize("has_links", [True, False])
def test_a_copy_is_made_although_epochs_are_shorter_than_an_upload(
    url, data, tmp_path, monkeypatch, has_links
):
    """States that the run removes during an upload are uploaded all the same."""
    if not has_links:
        monkeypatch.setattr("os.link", refuse)
    overtakes = Overtakes(monkeypatch, tmp_path / "run")
    attempts = []
    upload = Uploader.upload
    monkeypatch.setattr(
        Uploader, "upload", lambda *a, **k: attempts.append(upload(*a, **k)) or attempts[-1]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = resumable.search(tmp_path / "run", data, epochs=30, callbacks=[Mirror(url)])
    total = resumable.TRIALS * 30
    assert overtakes.uploaded[-1] == total and len(overtakes.uploaded) > 3
    assert overtakes.uploaded == sorted(overtakes.uploaded)
    assert len(overtakes.uploaded) == sum(attempts)  # no attempt has failed
    assert list((tmp_path / "run" / "states").glob(".*")) == []
    download(Objects(url), tmp_path / "copy")
    same(cerebro.open(tmp_path / "copy", build=resumable.build), found)


@pytest.mark.parametrize("can_write", [True, False])
def test_an_upload_without_hard_links_needs_no_disk_space_for_states(
    url, data, tmp_path, monkeypatch, can_write
):
    """Neither in the run's folder nor, if that cannot be written, in the temporary one."""
    run = resumable.search(tmp_path / "run", data)
    monkeypatch.setattr("os.link", refuse)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    make = tempfile.TemporaryDirectory
    rooms, written, write = [], [], Objects.write

    def made(*, dir=None, **options):
        if dir is not None and not can_write:
            raise PermissionError(13, "Permission denied")
        rooms.append(make(dir=dir, **options))
        return rooms[-1]

    def watched(self, name, content):
        written.append(name)
        assert {path.name for path in Path(rooms[-1].name).iterdir()} <= {"run.sqlite"}
        write(self, name, content)

    monkeypatch.setattr(tempfile, "TemporaryDirectory", made)
    monkeypatch.setattr(Objects, "write", watched)
    for _ in range(2):
        Mirror(url).upload(run)
        assert [Path(room.name).parent for room in rooms] == [
            tmp_path / ("run/states" if can_write else "temporary")
        ] * len(rooms)
    states = [name for name in written if name.startswith("states/")]
    assert len(states) == len(set(states)) == len(list((tmp_path / "run/states").iterdir()))
    download(Objects(url), tmp_path / "copy")


def test_states_already_uploaded_are_not_linked_again(url, data, tmp_path, monkeypatch):
    run = resumable.search(tmp_path / "run", data)
    Mirror(url).upload(run)
    linked, link = [], os.link
    monkeypatch.setattr("os.link", lambda *a, **k: linked.append(a) or link(*a, **k))
    Mirror(url).upload(run)
    assert linked == []


def test_the_error_names_a_missing_or_damaged_state(url, data, tmp_path):
    run = resumable.search(tmp_path / "run", data)
    state = next((tmp_path / "run" / "states").glob("1-epoch-*"))
    content = state.read_bytes()
    state.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CorruptDataError, match=rf"{state.name}.* is damaged: its checksum"):
        Mirror(url).upload(run)
    state.unlink()
    with pytest.raises(CorruptDataError, match=rf"{state.name}, which the store names, is missing"):
        Mirror(url).upload(run)
    assert list((tmp_path / "run" / "states").glob(".*")) == []
    state.write_bytes(content)
    Mirror(url).upload(run)
    assert read_pointer(Objects(url)).epochs == resumable.TRIALS * resumable.EPOCHS


@pytest.mark.parametrize("has_links", [True, False])
def test_an_outdated_snapshot_is_taken_again(url, data, tmp_path, monkeypatch, has_links):
    """The first one names a state that is removed before it gets its second name, or is read."""
    run = resumable.search(tmp_path / "run", data)
    if not has_links:
        monkeypatch.setattr("os.link", refuse)
    states = module_of_uploads._read_states
    asked = []

    def outdated(connection):
        asked.append(states(connection))
        gone = {} if len(asked) > 1 else {"0-epoch-0.safetensors": "0" * 32}
        return asked[-1] | gone

    monkeypatch.setattr(module_of_uploads, "_read_states", outdated)
    Mirror(url).upload(run)
    assert len(asked) == 2
    download(Objects(url), tmp_path / "copy")


def test_resume_removes_leftovers_of_a_killed_upload(url, data, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        resumable.search(tmp_path / "run", data, callbacks=[Stop(3)])
    left = tmp_path / "run" / "states" / ".mirror-abc"
    left.mkdir()
    (left / "state").touch()
    (problem,) = cerebro.open(tmp_path / "run").verify().problems
    assert problem.where == str(left)
    cerebro.resume(tmp_path / "run", resumable.build, progress=False)
    assert not left.exists()


def test_states_that_are_no_longer_kept_are_removed(url, data, tmp_path):
    resumable.search(tmp_path / "run", data, callbacks=[Mirror(url)], keep="last")
    states = [name for name in names(url) if name.startswith("states/")]
    assert len(states) == resumable.TRIALS
    assert len([name for name in names(url) if name.startswith("store/")]) == 1


def test_rows_given_to_the_search_are_copied(url, tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(90, 3))
    rows = {"x": x, "y": x.sum(1)}

    def search(run, *callbacks):
        return cerebro.search(
            resumable.build, {"lr": [0.1, 0.01]}, rows, searcher="grid", epochs=3, batch_size=16,
            validation=rows, workers=0, run=run, callbacks=callbacks, progress=False,
        )  # fmt: skip

    whole = search(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path / "run", Mirror(url), Stop(2))
    (tmp_path / "run").rename(tmp_path / "gone")
    (tmp_path / "whole" / "data").rename(tmp_path / "elsewhere")
    found = cerebro.resume(url, resumable.build, progress=False)
    assert resumable.hashes(found) == resumable.hashes(whole)
    assert found.verify().problems == []


# --- failures -----------------------------------------------------------------------


def test_a_storage_that_fails_does_not_stop_the_search(url, data, expected, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.0)
    write, failures = Objects.write, []

    class ComeBack:
        left = 12

        def on_epoch_end(self, trial, metrics):
            self.left -= 1

    back = ComeBack()

    def failing(self, name, content):
        if back.left > 0:
            failures.append(name)
            raise StorageError("the storage is away")
        write(self, name, content)

    monkeypatch.setattr(Objects, "write", failing)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        same(resumable.search(tmp_path / "run", data, callbacks=[Mirror(url), back]), expected)
    (told,) = [str(w.message) for w in caught if "cannot be copied" in str(w.message)]
    assert told.startswith(f"the run cannot be copied to {url}: the storage is away.")
    assert failures
    same(cerebro.resume(url, resumable.build), expected)


def test_a_search_warns_at_its_end_if_the_storage_stays_unreachable(
    url, data, expected, tmp_path, monkeypatch
):
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.0)
    write = Objects.write

    def failing(self, name, content):
        raise StorageError("the storage is away")

    monkeypatch.setattr(Objects, "write", failing)
    mirror = Mirror(url)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = resumable.search(tmp_path / "run", data, callbacks=[mirror])
    same(found, expected)
    first, last = [str(w.message) for w in caught if "cannot be copied" in str(w.message)]
    assert "includes what is missing" in first and "call upload(run) to make it" in last
    assert names(url) == []
    monkeypatch.setattr(Objects, "write", write)
    mirror.upload(found)
    same(cerebro.resume(url, resumable.build), expected)


def test_an_interrupted_upload_leaves_the_copy_as_it_was(url, data, tmp_path, monkeypatch):
    """Whichever object it does not write."""
    with pytest.raises(KeyboardInterrupt):
        resumable.search(tmp_path / "run", data, callbacks=[Mirror(url), Stop(2)])
    cerebro.resume(tmp_path / "run", resumable.build, progress=False)
    before = read_pointer(Objects(url))
    write = Objects.write
    for budget in range(100):
        left = [budget]

        def failing(self, name, content, left=left):
            left[0] -= 1
            if left[0] < 0:
                raise StorageError("the storage is away")
            write(self, name, content)

        monkeypatch.setattr(Objects, "write", failing)
        try:
            Uploader(Objects(url), tmp_path / "run").upload(whole=True)
            break
        except StorageError:
            assert read_pointer(Objects(url)) == before
            download(Objects(url), tmp_path / f"copy-{budget}")
            assert len(list((tmp_path / f"copy-{budget}").glob("states/*"))) >= 1
    assert budget >= 3 and read_pointer(Objects(url)).epochs == 12


def test_cut_and_altered_objects_are_refused_by_name(url, data, tmp_path):
    resumable.search(tmp_path / "run", data, callbacks=[Mirror(url)], epochs=1)
    objects = Objects(url)
    for name in names(url):
        whole = objects.read(name)
        altered = whole[:-9] + b"!" + whole[-8:]
        for content in (whole[:-1], None if name == "run.json" else altered, None):
            if content is None:
                objects.remove([name])
            else:
                objects.write(name, content)
            is_gone = (name, content) == ("run.json", None)
            kind = InputError if is_gone else CorruptDataError
            with pytest.raises(kind) as error:
                download(objects, tmp_path / "copy")
            assert (url if is_gone else f"{url}/{name}") in str(error.value)
            assert not (tmp_path / "copy").exists()
            assert list(tmp_path.glob(".copy*")) == []
        objects.write(name, whole)
    download(objects, tmp_path / "copy")


def test_a_place_with_another_run_is_refused_before_training(url, data, tmp_path):
    resumable.search(tmp_path / "run", data, callbacks=[Mirror(url)], epochs=1)
    before = read_pointer(Objects(url))
    with pytest.raises(InputError, match="holds a different run: choose another URL"):
        resumable.search(tmp_path / "other", data, callbacks=[Mirror(url)])
    assert read_pointer(Objects(url)) == before


def test_an_old_folder_does_not_replace_a_newer_copy(url, data, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        resumable.search(tmp_path / "run", data, callbacks=[Mirror(url), Stop(2)])
    cerebro.resume(url, resumable.build, progress=False)
    with pytest.raises(InputError, match=r"has 12 finished epochs .* continue it with"):
        cerebro.resume(tmp_path / "run", resumable.build, callbacks=[Mirror(url)], progress=False)


def test_a_process_that_was_taken_over_leaves_the_copy_alone(url, data, expected, tmp_path):
    """As a pod that was believed to be lost."""

    class TakeOver:
        left = 3

        def on_epoch_end(self, trial, metrics):
            self.left -= 1
            if self.left == 0:
                for _ in range(1000):  # until the thread has nothing to do
                    if read_pointer(Objects(url)).epochs == 3:
                        break
                    time.sleep(0.01)
                Mirror(url).upload(tmp_path / "run")

    with pytest.warns(UserWarning, match="another process has resumed the run"):
        same(
            resumable.search(tmp_path / "run", data, callbacks=[TakeOver(), Mirror(url)]), expected
        )
    assert read_pointer(Objects(url)).epochs < 12


def test_bad_arguments(tmp_path, url):
    with pytest.raises(InputError, match="Mirror needs a URL such as"):
        Mirror(str(tmp_path))
    with pytest.raises(InputError, match=f"no copy of a run at '{url}'"):
        cerebro.resume(url)
    assert not Path("runs/x").exists()
    assert pickle.loads(pickle.dumps(Mirror(url))).url == url
    for version, of in ((0, "an earlier"), (9, "a newer")):
        pointer = {"format": "cerebro-run", "version": version}
        Objects(url).write("run.json", json.dumps(pointer).encode())
        with pytest.raises(
            CorruptDataError, match=f"run.json has mirror version {version}, of {of} "
        ):
            cerebro.resume(url)


def test_the_error_for_a_copy_of_another_version_names_its_url(url, data, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        resumable.search(tmp_path / "run", data, callbacks=[Mirror(url), Stop(2)])
    objects = Objects(url)
    pointer = json.loads(objects.read("run.json"))
    (tmp_path / "store").write_bytes(objects.read(pointer["store"]))
    with contextlib.closing(sqlite3.connect(tmp_path / "store")) as store:
        store.execute("PRAGMA user_version = 3")
    content = (tmp_path / "store").read_bytes()
    objects.write(pointer["store"], content)
    pointer["store_hash"] = _core.xxh3_128(content)
    objects.write("run.json", json.dumps(pointer).encode())
    with pytest.raises(CorruptDataError) as caught:
        cerebro.resume(url)
    assert str(caught.value).startswith(
        f"{objects.url_of(pointer['store'])} has store version 3, of an earlier Cerebro"
    )


def test_the_command_line_resumes_from_a_url(url, data, expected, tmp_path, capsys):
    from cerebro.cli import main

    with pytest.raises(KeyboardInterrupt):
        resumable.search(tmp_path / "run", data, callbacks=[Mirror(url), Stop(2)])
    assert main(["resume", url, "--progress", "none"]) == 0
    assert "The run is in runs/x" in capsys.readouterr().out
    same(cerebro.open("runs/x"), expected)
