"""Searches with weighted rows and with rows drawn by class: exact, and like a plain loop."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import cerebro  # noqa: E402
from cerebro.data import Dataset  # noqa: E402

EACH = partial(torch.nn.functional.cross_entropy, reduction="none")
EPOCHS, SIZE = 2, 16


@pytest.fixture(scope="module")
def views(tmp_path_factory: pytest.TempPathFactory) -> tuple[Dataset, Dataset]:
    generator = np.random.default_rng(0)
    y = (generator.random(300) < 0.1).astype(np.int64)
    x = (generator.normal(size=(300, 4)) + y[:, None]).astype(np.float32)
    w = generator.random(300).astype(np.float32)
    folder = tmp_path_factory.mktemp("data") / "rare"
    data = cerebro.shard({"x": x, "y": y, "w": w}, folder, shards=3, progress=False)
    train, valid = data.split(0.8, 0.2, stratify="y")
    return train.with_sampling(balance="y"), valid


def network() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 2))


def build(config: Any) -> Any:
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=config["lr"])
    return cerebro.torch.Model(net, optimizer=optimizer, loss=EACH, weight="w")


def search(views: Any, folder: Path, **options: Any) -> cerebro.Result:
    train, valid = views
    options = {"epochs": EPOCHS, "workers": 2, **options}
    return cerebro.search(
        build,
        {"lr": [0.01, 0.03]},
        train,
        validation=valid,
        searcher="grid",
        batch_size=SIZE,
        progress=False,
        run=folder,
        **options,
    )


def hashes(result: cerebro.Result) -> Any:
    return [[epoch["state_hash"] for epoch in trial.history] for trial in result.trials]


@pytest.fixture(scope="module")
def inline(views: Any, tmp_path_factory: pytest.TempPathFactory) -> cerebro.Result:
    return search(views, tmp_path_factory.mktemp("inline") / "run", workers=0)


def test_a_trial_matches_a_plain_loop(views: Any, inline: cerebro.Result) -> None:
    """Trial 0 goes through the shards in the order of `Dataset.batches`, with the search's seed."""
    train, valid = views
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    for epoch in range(EPOCHS):
        total = weights = 0.0
        drawn = []
        for batch in train.batches(SIZE, seed=0, epoch=epoch):
            sum_of_weights = batch["w"].sum()
            loss = (EACH(net(batch["x"]), batch["y"]) * batch["w"]).sum() / sum_of_weights
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += float(loss.detach()) * float(sum_of_weights)
            weights += float(sum_of_weights)
            drawn += batch["y"].tolist()
        assert len(drawn) == len(train)
        assert 0.4 < np.mean(drawn) < 0.6
        found = inline.trials[0].history[epoch]["metrics"]
        assert found["train_loss"] == pytest.approx(total / weights, rel=1e-12)
    trained = inline.trials[0].load("last").net
    for ours, theirs in zip(trained.parameters(), net.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    rows = {name: [] for name in ("x", "y", "w")}  # validation takes each row once
    for batch in valid.in_order(64, "torch"):
        for name, values in rows.items():
            values.append(batch[name])
    x, y, w = (torch.cat(rows[name]) for name in ("x", "y", "w"))
    with torch.no_grad():
        expected = float((EACH(net(x), y).double() * w).sum() / w.double().sum())
    assert found["val_loss"] == pytest.approx(expected, rel=1e-6)


def test_workers_resuming_and_replay_change_nothing(
    views: Any, inline: cerebro.Result, tmp_path: Path
) -> None:
    search(views, tmp_path / "run", epochs=1, live_models=1)
    resumed = search(views, tmp_path / "run", live_models=1, if_exists="resume")
    assert hashes(resumed) == hashes(inline)
    assert cerebro.replay(resumed, 1).identical
    assert cerebro.open(tmp_path / "run").saved.dataset("data").checksum == views[0].checksum
    with pytest.raises(cerebro.errors.InputError, match="data"):
        search((views[0].with_sampling(), views[1]), tmp_path / "run", if_exists="resume")


def test_rows_without_weights_are_evaluated_without(inline: cerebro.Result, views: Any) -> None:
    """Validation and `evaluate` need the columns that the loss reads, but not that of `weight`."""
    _, valid = views
    rows = next(iter(valid.in_order(len(valid), "numpy")))
    bare = {name: rows[name] for name in ("x", "y")}
    net = inline.trials[0].load().net
    with torch.no_grad():
        losses = EACH(net(torch.from_numpy(bare["x"])), torch.from_numpy(bare["y"]))
    found = inline.trials[0].evaluate(bare)
    assert found["loss"] == pytest.approx(float(losses.double().mean()), rel=1e-6)
    with pytest.raises(cerebro.errors.InputError, match=r"column.* y"):
        inline.trials[0].evaluate({"x": rows["x"], "w": rows["w"]})
