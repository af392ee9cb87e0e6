"""What a clone takes from its parent, and what from its own configuration, whoever begins it."""

from __future__ import annotations

import pytest
import torch

import cerebro
from cerebro.searchers import PBT
from tests.integration.steered import BASE, DATA, EPOCHS, MADE, build, clone_with

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def made_by(trial, at=None):
    """The trial's loss, optimizer and scheduler after an epoch, by default its last."""
    trial.load(epoch=at) if at is not None else trial.load()
    return MADE[trial.number][1:]


def own_schedule(lr, total, steps):
    """The rates and momenta of an undisturbed schedule after some steps."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=total)
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
    group = optimizer.param_groups[0]
    return group["lr"], group["momentum"]


@pytest.mark.parametrize("size", [4, 8, 32])
def test_with_another_batch_size_a_schedule_goes_on_where_its_own_epochs_would_be(tmp_path, size):
    result = clone_with(tmp_path / "run", [{"batch_size": size}])
    clone = result.trials[1]
    assert clone.status == "finished", clone.error
    per_epoch = 96 // size
    for done in (4, EPOCHS):
        _, optimizer, scheduler = made_by(clone, done - 1)
        group = optimizer.param_groups[0]
        expected = own_schedule(0.05, EPOCHS * per_epoch, done * per_epoch)
        assert (group["lr"], group["momentum"]) == expected
        assert scheduler.last_epoch == done * per_epoch
    assert cerebro.replay(result, clone).identical


def test_a_recursive_schedule_has_its_own_rate_after_a_change_of_batch_size(tmp_path):
    base = {"schedule": "cosine"}
    result = clone_with(tmp_path / "run", [{"batch_size": 8}], base=base)
    _, optimizer, scheduler = made_by(result.trials[1], 3)
    plain = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.05, momentum=0.9)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(plain, EPOCHS * 12)
    for _ in range(4 * 12):
        plain.step()
        cosine.step()
    assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    assert scheduler.last_epoch == 48


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        ({"schedule": "plateau"}, [{"lr": 0.01}, {"batch_size": 8}]),
        ({"accumulate": 2}, [{"lr": 0.01}, {"batch_size": 8}, {"accumulate": 3}]),
    ],
    ids=["plateau", "accumulate"],
)
def test_clones_replay_under_schedules_by_loss_and_with_accumulated_batches(
    tmp_path, base, changes
):
    result = clone_with(tmp_path / "run", changes, base=base)
    for clone in result.trials[1:]:
        assert clone.status == "finished", clone.error
        assert cerebro.replay(result, clone).identical
    hashes = {trial.history[-1]["state_hash"] for trial in result.trials}
    assert len(hashes) == len(result.trials)
    if base == {"schedule": "plateau"}:  # the parent's rate had fallen; a clone goes on from there
        _, optimizer, scheduler = made_by(result.trials[1], 3)
        assert scheduler.best < float("inf")
        assert optimizer.param_groups[0]["lr"] < 0.01


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"opt": "adamw"}, "the parent's optimizer is SGD, the clone's AdamW"),
        ({"width": 8}, "the configuration changes 1.weight from 4x8 to 8x8"),
    ],
)
def test_another_optimizer_or_shape_is_refused_by_name(tmp_path, changes, what):
    result = clone_with(tmp_path / "run", [changes, {"lr": 0.01}])
    assert result.trials[1].status == "failed"
    assert what in result.trials[1].error
    assert result.trials[1].history == []
    assert result.trials[2].status == "finished"


def test_a_buffer_that_has_not_moved_is_a_setting_and_statistics_are_progress(tmp_path):
    base = {"norm": True}
    result = clone_with(tmp_path / "run", [{"w1": 9.0}, {"lr": 0.01}], base=base)
    parent, weighted, other = result.trials
    assert made_by(weighted)[0].weight.tolist() == [1.0, 9.0]
    assert made_by(other)[0].weight.tolist() == [1.0, 1.0]
    before = dict(parent.load(epoch=2).net.state_dict())
    for clone in (weighted, other):
        after = clone.load(epoch=3).net.state_dict()
        # Random features decide what the parent's weights mean: they are not the clone's own.
        assert torch.equal(after["0.mix"], before["0.mix"])
        assert after["2.num_batches_tracked"] == 4 * 6
        assert before["2.num_batches_tracked"] == 3 * 6
        assert cerebro.replay(result, clone).identical
    assert weighted.history[0]["state_hash"] != other.history[0]["state_hash"]


def test_the_parents_state_is_not_changed_by_what_its_clones_change(tmp_path):
    plain = clone_with(tmp_path / "plain", [])
    cloned = clone_with(tmp_path / "cloned", [{"w1": 9.0}, {"batch_size": 8}, {"opt": "adamw"}])
    hashes = [[epoch["state_hash"] for epoch in r.trials[0].history] for r in (plain, cloned)]
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("workers", [0, 2])
def test_pbt_that_mutates_the_batch_size_has_each_clone_at_its_own_place(tmp_path, workers):
    space = {**{name: [value] for name, value in BASE.items()}, "batch_size": [8, 16, 32]}
    result = cerebro.search(
        *(build, space, DATA),
        epochs=EPOCHS,
        n_trials=4,
        validation=0.25,
        searcher=PBT(interval=2, quantile=0.5, mutate=["batch_size"]),
        workers=workers,
        keep="all",
        run=tmp_path / "run",
        progress=False,
    )
    clones = [trial for trial in result.trials if trial.parent is not None]
    sizes = {
        (result.trials[trial.parent].config["batch_size"], trial.config["batch_size"])
        for trial in clones
    }
    assert any(before != now for before, now in sizes), sizes
    for trial in result.trials:
        assert trial.status in ("finished", "stopped"), trial.error
        per_epoch = 96 // trial.config["batch_size"]
        first, last = trial.history[0]["epoch"], trial.history[-1]["epoch"]
        for at in {first, last}:
            _, optimizer, scheduler = made_by(trial, at)
            group, done = optimizer.param_groups[0], (at + 1) * per_epoch
            expected = own_schedule(0.05, EPOCHS * per_epoch, done)
            assert (group["lr"], group["momentum"]) == expected
            assert scheduler.last_epoch == done
    assert all(cerebro.replay(result, trial).identical for trial in clones[-2:])
