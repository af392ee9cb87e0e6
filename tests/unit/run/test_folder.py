"""What a closed run still needs stays; the rest of its states goes."""

from __future__ import annotations

from cerebro.run.folder import sweep_states
from cerebro.run.records import EpochRecord, TrialRecord
from cerebro.run.store import Store

NEEDED = {
    "0-epoch-1.safetensors",  # kept
    "1.a",
    "1.b",
    "1.slots",  # of a trial that can go on
    "2.a",
    "2.slots",  # of one that was running when its process died
    f"1-epoch-2.{32 * '0'}.safetensors.new",  # whole perhaps, its row not written
    "2-epoch-0.safetensors",  # published, its row not written
    "notes.txt",
    "0-epoch-1.safetensors.backup",
    "best.safetensors",
}
LEFT_OVER = {
    "0-epoch-0.safetensors",  # given up, not deleted
    "0-epoch-2.safetensors",  # published, its row never committed
    "0-epoch-2.safetensors.new",  # half-written
    "3-epoch-0.safetensors",  # of a trial that is not there
    f"0-epoch-3.{32 * 'a'}.safetensors.new",
    "0.a",
    "0.b",
    "0.slots",
    "0.moving.a",
}


def make_run(folder, files):
    store = Store.create(folder, {})
    for number, status in enumerate(["finished", "stopped", "running"]):
        store.add_trial(TrialRecord(number, {}, status, 3))
        store.set_status(TrialRecord(number, {}, status, resumable=number == 1))
    store.add_epoch(0, EpochRecord(0, {}, 1.0, "hash", None), None)
    store.add_epoch(0, EpochRecord(1, {}, 1.0, "hash", "0-epoch-1.safetensors"), None)
    store.close()
    for name in files:
        (folder / name).write_bytes(b"x")


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_sweep_deletes_only_unreferenced_state_files(tmp_path):
    states = tmp_path / "states"
    states.mkdir()
    make_run(tmp_path, [f"states/{name}" for name in NEEDED | LEFT_OVER])
    assert set(sweep_states(tmp_path, states)) == LEFT_OVER
    assert names(states) == NEEDED
    assert sweep_states(tmp_path, states) == []


def test_slots_in_a_separate_state_folder_are_swept_there(tmp_path):
    (tmp_path / "run" / "states").mkdir(parents=True)
    (tmp_path / "fast").mkdir()
    make_run(tmp_path / "run", ["states/0.a", "states/0-epoch-2.safetensors"])
    for name in ("0.slots", "1.slots", "0-epoch-2.safetensors"):
        (tmp_path / "fast" / name).write_bytes(b"x")
    assert sweep_states(tmp_path / "run", tmp_path / "fast") == ["0-epoch-2.safetensors", "0.slots"]
    assert names(tmp_path / "run" / "states") == {"0.a"}
    assert names(tmp_path / "fast") == {"1.slots", "0-epoch-2.safetensors"}
