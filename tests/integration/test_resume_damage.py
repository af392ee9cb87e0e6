"""What a crash or a loss of power leaves of a run's files, and what becomes of the run."""

from __future__ import annotations

import signal
import sqlite3
from pathlib import Path

import numpy as np
import pytest
from resumable import SHARDS, UNITS, hashes, search, struck

import cerebro
import cerebro._core as _core
from cerebro.errors import CorruptDataError
from cerebro.run.states import unpublished_name

PER_EPOCH = SHARDS + 1


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    x = np.random.default_rng(0).normal(size=(230, 3))
    folder = tmp_path_factory.mktemp("data") / "set"
    cerebro.shard({"x": x, "y": x.sum(1)}, folder, shards=SHARDS, progress=False)
    return folder


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    return search(tmp_path_factory.mktemp("runs") / "whole", data)


def stop(folder, data, at, **options):
    """Leave a run whose rows are all written: trials stand where it was stopped."""
    struck(folder, data, at=at, number=signal.SIGTERM, **options)
    return {trial.number: trial for trial in cerebro.open(folder).trials}


def go_on(folder, whole, trained_again=0, at=None):
    before = len(cerebro.open(folder).saved.units())
    result = cerebro.resume(folder, progress=False)
    assert result.status == "finished" and hashes(result) == hashes(whole)
    names = sorted(file.name for file in (folder / "states").iterdir())
    assert names == sorted(file.name for file in (whole.path / "states").iterdir())
    assert result.verify(), str(result.verify())
    if at is not None:
        assert len(result.saved.units()) - before == UNITS - at + trained_again
    return result


def slots_of(states):
    return sorted(int(file.stem) for file in states.glob("*.slots"))


def change(file, at=-1, bits=1):
    content = bytearray(file.read_bytes())
    content[at] ^= bits
    file.write_bytes(content)


def test_trials_with_lost_slots_continue_from_their_last_epoch(data, whole, tmp_path):
    """Trials go on from their last finished epochs, or from the beginning."""
    stop(tmp_path / "run", data, at=33)
    lost = 0
    for file in (tmp_path / "run" / "states").glob("*.slots"):
        slots = _core.Slots(str(file.with_suffix("")), False)
        lost += slots.committed()[0] % PER_EPOCH
        slots.close()
        file.unlink()
    assert lost > 0
    go_on(tmp_path / "run", whole, lost, at=33)


@pytest.mark.parametrize("part", ["state", "record", "seal", "head", "cut", "zeros", "page"])
def test_a_torn_slot_is_never_taken_for_whole(data, whole, tmp_path, part):
    """The one before it is; if both are torn, the last finished epoch."""
    stop(tmp_path / "run", data, at=34)
    states = tmp_path / "run" / "states"
    torn = 0
    for number in slots_of(states):
        slots = _core.Slots(str(states / str(number)), False)
        position = slots.committed()[0]
        slots.close()
        page = states / f"{number}.slots"
        newest = (page.read_bytes()[64] & 3) - 1
        state = states / f"{number}.{'ab'[newest]}"
        if part == "state":
            change(state)
        elif part == "record":
            change(page, 128 + 64 * newest + 8)
        elif part == "seal":
            change(page, 128 + 64 * newest + 40)
        elif part == "cut":
            state.write_bytes(state.read_bytes()[:-1])
        elif part == "zeros":
            state.write_bytes(bytes(len(state.read_bytes())))
        elif part == "page":
            page.write_bytes(bytes(4096))
        if part == "head":  # as it was a commit ago: both slots are whole
            change(page, 64, 3)
        elif part == "page":
            torn += position % PER_EPOCH
        else:
            # An epoch's end is in a row already; else the unit before it is there.
            torn += min(1, position % PER_EPOCH)
    go_on(tmp_path / "run", whole, torn, at=34)


def test_slots_older_than_the_rows_are_ignored(data, whole, tmp_path):
    """Slots that are older than the rows: the last finished epoch counts."""
    folder = tmp_path / "run"
    stop(folder, data, at=8)
    old = {file.name: file.read_bytes() for file in (folder / "states").iterdir()}
    stop(folder, data, at=30, resume=True, workers=0)
    for file in [*(folder / "states").glob("[0-9].*")]:
        if file.name in old:
            file.write_bytes(old[file.name])
    go_on(folder, whole)


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("slots", [True, False])
def test_rows_that_were_lost_are_written_from_the_states(data, whole, tmp_path, epoch, slots):
    """The store's thread hangs at an epoch, the trials train on, then everything is killed."""
    folder = tmp_path / "run"
    at = UNITS - 7
    struck(folder, data, at=at, block_rows=epoch)
    left = cerebro.open(folder)
    assert all(trial.epoch <= epoch for trial in left.trials)
    assert list((folder / "states").glob("*.new"))
    positions = []
    for number in slots_of(folder / "states"):
        found = _core.Slots(str(folder / "states" / str(number)), False)
        positions.append(found.committed()[0])
        found.close()
    if not slots:
        for file in (folder / "states").glob("[0-9].*"):
            file.unlink()
    recorded = len(left.saved.units())
    result = go_on(folder, whole)
    trained = len(result.saved.units()) - recorded
    # No unit of an epoch that was over is trained again: at most those of the one in progress.
    again = 0 if slots else sum(position % PER_EPOCH for position in positions)
    assert trained == UNITS - at + again


def test_an_epoch_whose_state_and_row_are_lost_is_trained_again(data, whole, tmp_path):
    """The slots are beyond it, but a row must not be missing."""
    folder = tmp_path / "run"
    struck(folder, data, at=UNITS - 7, block_rows=1)
    lost = list((folder / "states").glob("*-epoch-1.*.new"))
    assert lost
    change(lost[0])
    go_on(folder, whole)


def test_leftover_files_do_not_disturb_a_resume(data, whole, tmp_path):
    folder = tmp_path / "run"
    trials = stop(folder, data, at=33)
    states = folder / "states"
    going = next(t for t in trials.values() if t.status == "stopped" and t.epoch)
    kept = states / going.record.epochs[-1].state_file
    for name in (
        unpublished_name(f"{going.number}-epoch-2.safetensors", "0" * 32),  # torn
        f"{going.number}-epoch-2.safetensors.new",  # of another version
        f"{going.number}-epoch-2.safetensors",  # published, but not the end of an epoch
        f"{going.number}.moving.a",
        f"{going.number}.moving.slots",
        "9-epoch-0.safetensors",
        "9.a",
        "9.slots",
    ):
        (states / name).write_bytes(kept.read_bytes()[:-3] if "moving" not in name else b"?")
    go_on(folder, whole, at=33)


def test_an_epoch_published_without_its_row_is_not_trained_again(data, whole, tmp_path):
    """Killed between the rename and the commit."""
    folder = tmp_path / "run"
    struck(folder, data, at=UNITS - 7, block_rows=1)
    for file in (folder / "states").glob("*-epoch-1.*.new"):
        file.rename(file.with_name(file.name.split(".")[0] + ".safetensors"))
    recorded = len(cerebro.open(folder).saved.units())
    result = go_on(folder, whole)
    assert len(result.saved.units()) - recorded == 7


def test_a_damaged_kept_state_is_refused_by_name_and_can_be_trained_again(data, whole, tmp_path):
    folder = tmp_path / "run"
    trials = stop(folder, data, at=33)
    states = folder / "states"
    for file in states.glob("[0-9].*"):
        file.unlink()
    going = next(t for t in trials.values() if t.status == "stopped" and t.epoch)
    kept = states / going.record.epochs[-1].state_file
    change(kept)
    with pytest.raises(CorruptDataError, match=f"{kept.name} is damaged.*Delete it"):
        cerebro.resume(folder, progress=False)
    assert cerebro.open(folder).status == "failed"
    kept.unlink()
    go_on(folder, whole)


def test_resume_refuses_store_damage_that_reading_does_not_reveal(data, whole, tmp_path):
    """An index is written to and seldom read: the run would go on and spoil it further."""
    folder = tmp_path / "run"
    stop(folder, data, at=33)
    store = folder / "run.sqlite"
    before = store.read_bytes()
    with sqlite3.connect(store) as connection:
        (page,) = connection.execute("PRAGMA page_size").fetchone()
        (root,) = connection.execute(
            "SELECT rootpage FROM sqlite_master WHERE name = 'sqlite_autoindex_metrics_1'"
        ).fetchone()
    connection.close()
    change(store, at=root * page - 1, bits=0xFF)
    assert [trial.epoch for trial in cerebro.open(folder).trials]  # can be read
    with pytest.raises(CorruptDataError, match=r"run\.sqlite is damaged .*restore a copy"):
        cerebro.resume(folder, progress=False)
    with pytest.raises(CorruptDataError, match=r"run\.sqlite is damaged .*restore a copy"):
        search(folder, data, if_exists="resume")
    store.write_bytes(before)
    go_on(folder, whole, at=33)


def test_an_epoch_that_differs_when_trained_again_warns(data, whole, tmp_path):
    folder = tmp_path / "run"
    trials = stop(folder, data, at=33)
    going = next(t for t in trials.values() if t.status == "stopped" and t.epoch)
    for file in (folder / "states").glob(f"{going.number}[.-]*"):
        file.unlink()
    connection = sqlite3.connect(folder / "run.sqlite")
    connection.execute(
        "UPDATE epochs SET state_hash = ? WHERE trial = ? AND epoch = 0", ("0" * 32, going.number)
    )
    connection.commit()
    connection.close()
    text = f"trial {going.number}: epoch 0 was trained again and gave a different state"
    with pytest.warns(UserWarning, match=text):
        cerebro.resume(folder, progress=False)
    assert hashes(cerebro.open(folder)) == hashes(whole)


def test_a_run_resumes_after_its_external_state_dir_is_lost(data, whole, tmp_path):
    folder, fast = tmp_path / "run", tmp_path / "fast"
    stop(folder, data, at=33, state_dir=str(fast))
    assert slots_of(fast)
    for file in fast.iterdir():
        file.unlink()
    fast.rmdir()
    go_on(folder, whole)
    assert [file.name for file in fast.iterdir()] == ["cerebro-run"]


def test_a_state_dir_that_another_run_uses_now_is_refused(data, tmp_path):
    fast = tmp_path / "fast"
    stop(tmp_path / "one", data, at=13, state_dir=str(fast))
    for file in fast.iterdir():
        file.unlink()
    stop(tmp_path / "two", data, at=13, state_dir=str(fast))
    with pytest.raises(cerebro.InputError, match="holds the states of another run"):
        cerebro.resume(tmp_path / "one", progress=False)
    assert cerebro.resume(tmp_path / "two", progress=False).status == "finished"
    assert cerebro.resume(tmp_path / "one", progress=False).status == "finished"


def test_a_moved_run_resumes(data, whole, tmp_path):
    stop(tmp_path / "run", data, at=33)
    Path(tmp_path / "run").rename(tmp_path / "other")
    go_on(tmp_path / "other", whole, at=33)
    assert not (tmp_path / "run").exists()
