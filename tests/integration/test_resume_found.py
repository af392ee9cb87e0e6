"""What the fault campaign has found, each by itself."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing

import numpy as np
import pytest
from adaptive_searchers import Halving, Population, decisions_of
from resumable import build, hashes, search

import cerebro
from cerebro.executors.inline import InlineExecutor
from cerebro.machine import durable
from cerebro.run.store import Store


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    x = np.random.default_rng(0).normal(size=(230, 3))
    folder = tmp_path_factory.mktemp("data") / "set"
    cerebro.shard({"x": x, "y": x.sum(1)}, folder, shards=4, progress=False)
    return folder


WRITE_AND_DIE = """
import os, sqlite3, sys
store = sqlite3.connect(sys.argv[1])
store.execute("UPDATE meta SET value = '1' WHERE key = 'ended'")
store.commit()
os._exit(0)
"""


class Interrupt:
    """Ctrl-C after so many units."""

    def __init__(self, at):
        self.left = at

    def on_unit_end(self, trial, metrics):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def test_a_run_killed_during_its_creation_is_created_again(data, tmp_path):
    """Killed within SQLite's first transaction: its journal is left too."""
    run = tmp_path / "run"
    for name in ("states", "trials", "control"):
        (run / name).mkdir(parents=True)
    (run / "owner.lock").write_text("")
    (run / "run.sqlite.new").write_bytes(b"half of a store")
    (run / "run.sqlite.new-journal").write_bytes(b"half of a journal")
    result = search(run, data, if_exists="resume", n_trials=1, epochs=1)
    assert result.status == "finished"
    assert not list(run.glob("run.sqlite.new*"))


def test_a_run_killed_during_its_cleanup_is_cleaned_up_on_resume(data, tmp_path):
    """Killed after the last row and before the log and the last files were gone."""
    run, slots = tmp_path / "run", tmp_path / "slots"
    result = search(run, data, n_trials=2, epochs=2, keep="last", state_dir=slots)
    before = sorted(path.name for path in (run / "states").iterdir())
    (run / "states" / "0-epoch-0.safetensors").write_bytes(b"not deleted in time")
    (slots / "1.a").write_bytes(b"nor this")
    for name in (f".cerebro-{'0' * 32}", ".mirror-12345678"):
        (run / "states" / name).mkdir()
    code = f"import os, sqlite3; c = sqlite3.connect({str(run / 'run.sqlite')!r})\n"
    code += (
        "c.execute(\"UPDATE meta SET value = '1' WHERE key = 'ended'\"); c.commit(); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (run / "run.sqlite-wal").exists()
    again = cerebro.resume(run, build, progress=False)
    assert again.status == "finished" and hashes(again) == hashes(result)
    assert sorted(path.name for path in (run / "states").iterdir()) == before
    assert not list(run.glob("run.sqlite-*")) and not (slots / "1.a").exists()


def test_the_parent_folders_of_a_new_run_are_synced(data, tmp_path, monkeypatch):
    synced = []

    def sync(folder, *disk):
        present = sorted(entry.name for entry in tmp_path.rglob("*") if entry.is_dir())
        synced.append((str(folder), present))
        fsync(folder, *disk)

    fsync = durable.sync_folder
    monkeypatch.setattr(durable, "sync_folder", sync)
    search(tmp_path / "a" / "b", data, n_trials=1, epochs=1)
    assert (str(tmp_path), ["a"]) in synced
    assert (str(tmp_path / "a"), ["a", "b"]) in synced
    # Also if the folder was made by a process that was killed before it could do so.
    synced.clear()
    shutil.rmtree(tmp_path / "a" / "b")
    (tmp_path / "a" / "b").mkdir()
    search(tmp_path / "a" / "b", data, n_trials=1, epochs=1)
    assert (str(tmp_path / "a"), ["a", "b"]) in synced


def test_a_trial_is_in_the_store_before_its_first_unit(data, tmp_path, monkeypatch):
    """Also one that is suggested later: its slots would be nobody's."""
    known, unwritten = set(), set()

    def add_trial(store, record):
        unwritten.add(record.number)
        real_add(store, record)

    def flush(store):
        real_flush(store)
        known.update(unwritten)

    def submit(executor, worker, task):
        assert getattr(task, "trial", None) in {None, *known}
        real_submit(executor, worker, task)

    real_add, real_flush, real_submit = Store.add_trial, Store.flush, InlineExecutor.submit
    monkeypatch.setattr(Store, "add_trial", add_trial)
    monkeypatch.setattr(Store, "flush", flush)
    monkeypatch.setattr(InlineExecutor, "submit", submit)
    result = search(tmp_path / "run", data, searcher=Population(), epochs=4)
    assert len(result.trials) > 4  # there were clones
    assert known == set(range(len(result.trials)))


def test_a_trials_epoch_target_is_in_the_store_before_it_trains_on(data, tmp_path, monkeypatch):
    """A trial that was paused and is to go on: its slots would be beyond its epochs."""
    known, unwritten = {}, {}

    def add_trial(store, record):
        unwritten[record.number] = record.target_epochs
        real_add(store, record)

    def set_epochs(store, number, epochs):
        unwritten[number] = epochs
        real_set(store, number, epochs)

    def flush(store):
        real_flush(store)
        known.update(unwritten)

    def submit(executor, worker, task):
        if hasattr(task, "trial"):
            assert known[task.trial] > task.epoch
        real_submit(executor, worker, task)

    real_add, real_set, real_flush = Store.add_trial, Store.set_epochs, Store.flush
    real_submit = InlineExecutor.submit
    monkeypatch.setattr(Store, "add_trial", add_trial)
    monkeypatch.setattr(Store, "set_epochs", set_epochs)
    monkeypatch.setattr(Store, "flush", flush)
    monkeypatch.setattr(InlineExecutor, "submit", submit)
    search(tmp_path / "run", data, searcher=Halving(), epochs=4)
    assert len(set(known.values())) > 1  # some went further than others


@pytest.mark.parametrize("kind", [Halving, Population])
@pytest.mark.parametrize("at", [1, 7, 18, 24, 31, 40])
def test_resume_does_not_report_results_to_a_searcher_twice(data, tmp_path, kind, at):
    """A resumed trial knows what was reported of it, and whether it is paused."""
    whole = search(tmp_path / "whole", data, searcher=kind(), epochs=4)
    with pytest.raises(KeyboardInterrupt):
        search(
            tmp_path / "run", data, searcher=kind(), epochs=4, callbacks=[Interrupt(at)], workers=1
        )
    result = cerebro.resume(tmp_path / "run", build, workers=0, progress=False)
    assert result.status == "finished"
    assert decisions_of(result) == decisions_of(whole)
    assert hashes(result) == hashes(whole)
    assert [trial.status for trial in result.trials] == [trial.status for trial in whole.trials]


class Lag(Interrupt):
    """What is written from some unit on is lost: the disk was slow, and the process was killed.

    States are not: nothing is deleted before the row is written that says so, hence ``keep="all"``.
    """

    def __init__(self, folder, at, units):
        super().__init__(at + units)
        self.folder, self.units = folder, units

    def on_unit_end(self, trial, metrics):
        if self.left == self.units + 1:
            store = sqlite3.connect(self.folder / "run.sqlite")
            copy = sqlite3.connect(self.folder.with_name("copy"))
            with closing(store), closing(copy):
                store.backup(copy)
        super().on_unit_end(trial, metrics)

    def lose(self):
        for file in self.folder.glob("run.sqlite*"):
            file.unlink()
        shutil.move(self.folder.with_name("copy"), self.folder / "run.sqlite")


@pytest.mark.parametrize("kind", [Halving, Population])
@pytest.mark.parametrize("at", [6, 11, 17, 26])
@pytest.mark.parametrize("units", [3, 7, 12])
def test_a_run_resumes_if_its_store_lags_behind_the_trials(data, tmp_path, kind, at, units):
    """Trials may be epochs beyond what the searcher is known to have said."""
    whole = search(tmp_path / "whole", data, searcher=kind(), epochs=4, keep="all")
    lag = Lag(tmp_path / "run", at, units)
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path / "run", data, searcher=kind(), epochs=4, keep="all", callbacks=[lag])
    lag.lose()
    result = cerebro.resume(tmp_path / "run", build, workers=0, progress=False)
    assert result.status == "finished"
    assert decisions_of(result) == decisions_of(whole)
    assert hashes(result) == hashes(whole)
