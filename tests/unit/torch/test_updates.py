"""The parts of a model alone: windows of batches and schedulers, and what a unit replays."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from cerebro.torch.recorded_step import UnitReplays  # noqa: E402
from cerebro.torch.updates import Updates  # noqa: E402


class Noted:
    """Stands for a network, an optimizer and a scheduler; notes what is called."""

    def __init__(self, said):
        self.said = said

    def step(self):
        self.said.append("step")

    def drop_gradients(self):
        self.said.append("drop")

    def clip_gradients(self, norm):
        self.said.append(f"clip {norm}")


class Loss:
    def __init__(self, said, share=1):
        self.said, self.share = said, share

    def __truediv__(self, count):
        return Loss(self.said, count)

    def backward(self):
        self.said.append(f"1/{self.share}")


class Scheduler:
    def __init__(self, said):
        self.said = said

    def step(self):
        self.said.append("schedule")


def made(said, accumulate=1, *, schedulers=1, by_update=False, clip_norm=None):
    one = Noted(said)
    return Updates(
        one, [one], [Scheduler(said)] * schedulers, scheduler_step="batch",
        steps_by_update=by_update, clip_norm=clip_norm, accumulate=accumulate, scaler=None,
        in_core=False,
    )  # fmt: skip


def train(updates, said, batches):
    for _ in range(batches):
        updates.catch_up()
        phase = updates.phase
        updates.add(Loss(said), phase)
        updates.end_batch(phase)


def test_every_batch_is_an_update_by_default():
    said = []
    updates = made(said, clip_norm=0.5)
    train(updates, said, 2)
    assert said == ["1/1", "clip 0.5", "step", "drop", "schedule"] * 2
    updates.end_unit()
    assert said == ["1/1", "clip 0.5", "step", "drop", "schedule"] * 2


def test_losses_are_divided_by_the_batches_of_their_update():
    said = []
    updates = made(said, 3, schedulers=0)
    updates.begin_unit((2, 4))
    train(updates, said, 6)
    assert said == [*["1/2"] * 2, "step", "drop", *["1/4"] * 4, "step", "drop"]


def test_each_place_in_an_update_of_each_length_has_its_own_phase():
    phases = set()
    for length in (2, 3, 4):
        updates = made([], 3, schedulers=0)
        updates.begin_unit((length,))
        for _ in range(length):
            phase = updates.phase
            assert (phase == 0) == (length == 3 and not updates.pending)
            phases.add(phase)
            updates.add(Loss([]), phase)
            updates.end_batch(phase)
    assert len(phases) == 2 + 3 + 4


def test_schedulers_step_before_the_next_batch_and_after_a_pending_update():
    said = []
    updates = made(said, 2)
    train(updates, said, 3)
    updates.end_unit()
    batches = ["1/2", "schedule", "1/2", "step", "drop", "schedule", "1/2"]
    assert said == [*batches, "step", "drop", "schedule"]


def test_a_load_forgets_a_pending_update():
    """Even if the load then fails: the gradients of that update are gone."""
    said = []
    updates = made(said, 3)
    train(updates, said, 1)
    updates.forget_pending()
    updates.end_unit()
    assert said == ["1/3"]


def test_schedulers_step_once_for_each_update_if_asked():
    said = []
    updates = made(said, 2, by_update=True)
    train(updates, said, 3)
    updates.end_unit()
    assert [word for word in said if word != "drop"] == [
        "1/2", "1/2", "step", "schedule", "1/2", "step", "schedule",
    ]  # fmt: skip


class Replay:
    runs, failed = 0, False


def test_a_units_replays_are_counted_when_they_are_taken_back():
    unit, often, rare = UnitReplays(), Replay(), Replay()
    for key, replay in (("rare", rare), ("often", often), ("often", often)):
        unit.offer(key, replay)
    assert unit.ready == [rare, often]
    often.runs, rare.runs, rare.failed = 7, 1, True
    assert unit.has_failed()
    assert unit.begin() == ["often", "rare"]
    assert (unit.replays, unit.ready, often.runs, unit.has_failed()) == (8, [], 0, False)
    assert unit.begin() == []


def test_a_replay_from_python_that_fails_is_noted():
    unit = UnitReplays()
    with pytest.raises(ZeroDivisionError):
        unit.run("key", SimpleNamespace(replay=lambda batch: 1 / 0), {})
    assert unit.has_failed() and unit.replays == 1
