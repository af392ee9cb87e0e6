"""`cerebro.coordinator.restore`: where a trial stands, from nothing but the files that it left."""

from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest

import cerebro._core as _core
from cerebro.coordinator.restore import UNSEEN, Restorer
from cerebro.coordinator.searcher_record import NoSearcher, describe, make_again
from cerebro.errors import CorruptDataError, StateError
from cerebro.machine.local import LOCAL
from cerebro.run.records import EpochRecord, TrialRecord
from cerebro.run.states import (
    epoch_state_file,
    find_kept_files,
    remove_slots,
    trials_with_slots,
    unpublished_name,
)
from cerebro.searchers import DONE, GridSearch, RandomSearch
from cerebro.worker.trial_state import EpochProgress

UNITS = 3
"""Units of an epoch."""


def state_at(position):
    epoch, step = divmod(position - 1, UNITS)
    progress = EpochProgress(epoch, step, {"loss": (position * 0.1, 2.0)}, {"loss": position * 0.3})
    return {"model": {"w": np.full(5, float(position))}, "progress": progress.to_state()}


def leave_slots(folder, positions, trial=4, attempt=7):
    slots = _core.Slots(str(folder / str(trial)), True)
    for position in positions:
        slots.pack(state_at(position), attempt=attempt)
        slots.commit(position)
    slots.close()


def leave_file(folder, epoch, published=False, trial=4):
    slots = _core.Slots(str(folder / "scratch"), True)
    slots.pack(state_at((epoch + 1) * UNITS), attempt=0)
    slots.commit(0)
    state_hash = slots.hash()
    name = epoch_state_file(trial, epoch)
    slots.save(str(folder / (name if published else unpublished_name(name, state_hash))))
    slots.close()
    for file in folder.glob("scratch.*"):
        file.unlink()
    return EpochRecord(epoch, {}, 1.0, state_hash, name)


def restorer(folder, units=None):
    return Restorer(folder, folder, UNITS, units or {}, LOCAL.disk)


def record_of(*epochs):
    return TrialRecord(4, {}, target_epochs=5, epochs=list(epochs))


def names(folder):
    return {file.name for file in folder.iterdir()}


def test_slots_beyond_the_target_epochs_are_dropped(tmp_path):
    """The store has lost that the trial was to train on: it waits at its last epoch's end."""
    kept = leave_file(tmp_path, 0, published=True)
    leave_slots(tmp_path, [3, 4])
    record = record_of(kept)
    record.target_epochs = 1
    standing = restorer(tmp_path).resume_point(record)
    assert standing.position == UNITS
    assert standing.origin is not None and Path(standing.origin.file).name == kept.state_file
    assert names(tmp_path) == {kept.state_file}


def test_resume_uses_the_slots_of_the_epoch_in_progress(tmp_path):
    kept = leave_file(tmp_path, 0, published=True)
    leave_slots(tmp_path, [3, 4, 5])
    standing = restorer(tmp_path, {(4, 1, 0): 0.5, (4, 1, 1): 0.25, (4, 1, 2): 9.0}).resume_point(
        record_of(kept)
    )
    assert (standing.position, standing.attempt, standing.origin) == (5, 7 + UNSEEN, None)
    assert standing.lost == [] and standing.epoch_seconds == 0.75
    slots = _core.Slots(str(tmp_path / "4"), False)
    assert slots.committed()[:2] == (5, 6 + UNSEEN)
    assert slots.sealed()[0] == 5
    assert names(tmp_path) == {kept.state_file, "4.a", "4.slots"}


def test_a_lost_row_is_restored_from_slots_at_an_epochs_end(tmp_path):
    leave_slots(tmp_path, [5, 6])
    kept = leave_file(tmp_path, 0, published=True)
    standing = restorer(tmp_path, {(4, 1, step): 0.5 for step in range(3)}).resume_point(
        record_of(kept)
    )
    (lost,) = standing.lost
    assert (lost.epoch, lost.seconds, lost.state_file) == (1, 1.5, "4-epoch-1.safetensors")
    expected = EpochProgress.from_state(state_at(6)["progress"]).epoch_metrics()
    assert lost.metrics == expected
    file = tmp_path / unpublished_name(lost.state_file, lost.state_hash)
    assert _core.hash_state(file.read_bytes()) == lost.state_hash
    assert standing.position == 6 and standing.epoch_seconds == 0.0


def test_lost_rows_are_restored_from_files_if_the_slots_are_ahead(tmp_path):
    records = [leave_file(tmp_path, epoch, published=epoch == 1) for epoch in range(3)]
    leave_slots(tmp_path, [9, 10])
    standing = restorer(tmp_path).resume_point(record_of())
    assert [e.state_hash for e in standing.lost] == [r.state_hash for r in records]
    assert standing.position == 10 and standing.origin is None
    # All wait to be published, also the one that was renamed before its row was there.
    assert {n for n in names(tmp_path) if n.endswith(".new")} == {
        unpublished_name(r.state_file, r.state_hash) for r in records
    }


def test_slots_are_not_used_if_an_epoch_before_them_is_missing(tmp_path):
    first = leave_file(tmp_path, 0)
    missing = leave_file(tmp_path, 1)
    (tmp_path / unpublished_name(missing.state_file, missing.state_hash)).unlink()
    leave_slots(tmp_path, [7, 8])
    standing = restorer(tmp_path).resume_point(record_of())
    assert standing.position == 3 and len(standing.lost) == 1
    assert standing.origin.state_hash == first.state_hash
    assert Path(standing.origin.file).name == first.state_file  # where it will be
    assert standing.attempt == 7 + UNSEEN  # above the late writers of the slots that were given up
    assert not trials_with_slots(tmp_path, LOCAL.disk)


def test_a_trial_without_states_starts_from_the_beginning(tmp_path):
    standing = restorer(tmp_path).resume_point(record_of())
    assert (standing.position, standing.attempt, standing.origin) == (0, 0, None)


def test_epochs_with_missing_states_are_trained_again(tmp_path):
    kept = leave_file(tmp_path, 1, published=True)
    gone = EpochRecord(2, {}, 1.0, "0" * 32, "4-epoch-2.safetensors")
    retired = EpochRecord(0, {}, 1.0, "1" * 32, None)
    record = record_of(retired, kept, gone)
    standing = restorer(tmp_path).resume_point(record)
    assert standing.position == 6 and standing.origin.state_hash == kept.state_hash
    assert record.epochs == [retired, kept]
    kept_file = tmp_path / kept.state_file
    kept_file.unlink()
    record = record_of(retired, kept)
    assert restorer(tmp_path).resume_point(record).position == 0 and record.epochs == []


def test_an_epoch_that_a_clone_may_need_is_trained_again(tmp_path):
    """A damaged log: the store went back to before the reports that let the state be deleted."""
    first, second = (leave_file(tmp_path, epoch, published=True) for epoch in range(2))
    leave_file(tmp_path, 2, published=True)
    leave_slots(tmp_path, [10])
    (tmp_path / second.state_file).unlink()
    record = record_of(first, EpochRecord(1, {}, 1.0, second.state_hash, None))
    standing = restorer(tmp_path).resume_point(record, reported=0)
    assert (standing.position, standing.lost) == (UNITS, []) and record.epochs == [first]
    assert standing.origin.state_hash == first.state_hash
    assert names(tmp_path) == {first.state_file}


def test_an_epoch_that_no_clone_needs_stays(tmp_path):
    retired = EpochRecord(0, {}, 1.0, "1" * 32, None)
    kept = leave_file(tmp_path, 1, published=True)
    record = record_of(retired, kept)
    assert restorer(tmp_path).resume_point(record, reported=1).position == 2 * UNITS
    assert record.epochs == [retired, kept]
    assert restorer(tmp_path).resume_point(record).position == 2 * UNITS  # no searcher that listens
    assert restorer(tmp_path).resume_point(record, reported=0).position == 0


@pytest.mark.parametrize("position", [4, 6, 9])
def test_slots_that_contradict_their_state_are_not_used(tmp_path, position):
    """A page of one trial beside the states of another, say."""
    slots = _core.Slots(str(tmp_path / "4"), True)
    slots.pack(state_at(5), attempt=0)
    slots.commit(position)
    slots.close()
    assert restorer(tmp_path).resume_point(record_of()).position == 0


class Killed(BaseException):
    pass


def stand_until(folder, step):
    """Stand, but be killed before the step-th renaming or deletion of a file that is there."""
    left = [step]

    def counted(real):
        def operation(path, *arguments, **keywords):
            left[0] -= Path(path).exists()
            if left[0] == 0:
                raise Killed
            return real(path, *arguments, **keywords)

        return operation

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", counted(os.replace))
        patch.setattr(os, "unlink", counted(os.unlink))
        restorer(folder).resume_point(record_of())


@pytest.mark.parametrize("positions", [[1, 2], [1, 1, 2]], ids=["newest is b", "newest is a"])
def test_moving_slots_survives_a_kill_at_any_step(tmp_path, positions):
    for step in (1, 2, 3, 4):
        remove_slots(tmp_path, 4, LOCAL.disk)
        leave_slots(tmp_path, positions)
        try:
            stand_until(tmp_path, step)
        except Killed:
            assert step < 4
        else:
            assert step == 4  # the page, .a and .b
        standing = restorer(tmp_path).resume_point(record_of())
        assert standing.position == 2
        assert names(tmp_path) == {"4.a", "4.slots"}


def test_a_late_writer_does_not_change_the_restored_slots(tmp_path):
    late = _core.Slots(str(tmp_path / "4"), True)  # of a worker that was stopped
    for position in (1, 2):
        late.pack(state_at(position), attempt=7)
        late.commit(position)
    restorer(tmp_path).resume_point(record_of())
    before = {name: (tmp_path / name).read_bytes() for name in ("4.a", "4.slots")}
    with pytest.raises(StateError, match="attempt 7 may not pack"):
        late.pack(state_at(3), attempt=7)
        late.commit(3)
    for position in (3, 4):  # even past the fence
        late.pack(state_at(position), attempt=7 + UNSEEN)
        late.commit(position)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_a_unit_that_was_sent_before_the_end_is_rejected_in_the_restored_slots(tmp_path):
    """Its worker opens the slots by their name, only now, with a number that they had not seen."""
    leave_slots(tmp_path, [1, 2], attempt=7)
    standing = restorer(tmp_path).resume_point(record_of())
    late = _core.Slots(str(tmp_path / "4"), True)
    for attempt in (8, 9):  # the unit in flight, and the one queued behind it
        with pytest.raises(StateError, match=f"attempt {attempt} may not pack"):
            late.pack(state_at(3), attempt=attempt)
        with pytest.raises(StateError, match=f"attempt {attempt} "):
            late.revert(attempt=attempt, position=1)
    late.fence(standing.attempt)
    assert late.committed()[0] == standing.position == 2


def test_files_of_unknown_trials_are_deleted(tmp_path):
    leave_slots(tmp_path, [1], trial=4)
    leave_slots(tmp_path, [1], trial=9)
    leave_file(tmp_path, 0, trial=9)
    (tmp_path / "notes.txt").write_text("x")
    restorer(tmp_path).clear_unknown(5)
    assert names(tmp_path) == {"4.a", "4.slots", "notes.txt"}


def test_kept_files_are_recognized_by_name(tmp_path):
    state_hash = "ab" * 16
    for name in (
        "3-epoch-7.safetensors",
        unpublished_name("3-epoch-7.safetensors", state_hash),
        "3-epoch-8.safetensors.new",
        "3-epoch-8.safetensors.old",
        "03.a.bak",
        "12.moving.slots",
    ):
        (tmp_path / name).touch()
    files = find_kept_files(tmp_path, LOCAL.disk)
    assert [(f.epoch, f.state_hash) for f in files[3]] == [(7, state_hash), (8, ""), (7, None)]
    assert set(files) == {3} and trials_with_slots(tmp_path, LOCAL.disk) == {12}
    gone = tmp_path / "gone"
    assert find_kept_files(gone, LOCAL.disk) == {} and trials_with_slots(gone, LOCAL.disk) == set()


def test_only_the_progress_is_read_from_a_packed_state(tmp_path):
    progress = EpochProgress(
        3, 4, {"loss": (math.nan, 2.0), "$": (1.5, 1.0), "a": (math.inf, 1e300)}, {"auc": 0.1 + 0.2}
    )
    tree = {
        "model": {"w": np.zeros(5), 3: [1, (2, b"x")]},
        "generators": {"numpy_gauss": None},
        "progress": progress.to_state(),
    }
    slots = _core.Slots(str(tmp_path / "0"), True)
    slots.pack(tree, attempt=0)
    slots.commit(1)
    assert repr(EpochProgress.from_packed(slots.view())) == repr(progress)
    whole = bytes(slots.view())
    for length in (0, 7, 8, 100, len(whole) - 1):
        with pytest.raises(CorruptDataError):
            EpochProgress.from_packed(whole[:length])


class Custom(RandomSearch):
    def __init__(self, depth, names=("a",), *, scale=1.0):
        super().__init__()
        self.depth, self._names, self.scale = depth, list(names), scale


class Forgetful(RandomSearch):
    def __init__(self, depth):
        super().__init__()


def test_searchers_are_recreated_from_their_description():
    for searcher in (GridSearch(), RandomSearch(), Custom(3, ["x"], scale=0.5)):
        description = describe(searcher)
        again = make_again(description)
        assert type(again) is type(searcher)
        assert describe(again) == description
    made = make_again(describe(Custom(3, ["x"], scale=0.5)))
    assert (made.depth, made._names, made.scale) == (3, ["x"], 0.5)


@pytest.mark.parametrize(
    "searcher",
    [Forgetful(3), Custom(object()), Custom((1, 2), [(1, 2)]), type("Local", (Custom,), {})(1)],
)
def test_a_searcher_that_cannot_be_recreated_is_none(searcher):
    if type(searcher).__name__ == "Local":
        assert make_again(describe(searcher)) is None  # no module has it
    else:
        made = make_again(describe(searcher))
        assert made is None or describe(made) == describe(searcher)
    gone = {"class": "no.such.module:Kind", "parameters": {}, "adaptive": False}
    assert make_again(gone) is None


def test_no_searcher_suggests_nothing_and_stops_no_trial():
    searcher = NoSearcher()
    assert searcher.suggest() is DONE
    assert searcher.report(0, 0, {}).value == "continue"
    assert searcher.state_dict() == {} and not searcher.adaptive
