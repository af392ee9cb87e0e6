"""Updates of several batches: their number of batches, and a search that equals a plain loop."""

from __future__ import annotations

import epoch_batches
import numpy as np
import pytest

import cerebro

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import cerebro.torch  # noqa: E402
from cerebro.data.order import Cut, make_order  # noqa: E402

ROWS, SHARDS, EPOCHS, SEED = 403, 6, 4, 5


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(0)
    columns = {
        "x": rng.normal(size=(ROWS, 6)).astype("float32"),
        "y": rng.integers(0, 3, ROWS),
    }
    return cerebro.shard(columns, tmp_path_factory.mktemp("data") / "rows", shards=SHARDS)


def parts():
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
    return net, torch.optim.AdamW(net.parameters(), lr=0.01)


def build(config):
    net, optimizer = parts()
    return cerebro.torch.Model(
        *(net,), optimizer=optimizer, loss=functional.cross_entropy,
        accumulate=config["accumulate"], graph=config["graph"],
    )  # fmt: skip


def plain_loop(data, shuffle, batch_size, accumulate):
    """Train in a loop that divides each loss by the number of batches of its update."""
    net, optimizer = parts()
    order = make_order(data, shuffle, SEED)
    for epoch in range(EPOCHS):
        batches = iter(data.batches(batch_size, seed=SEED, epoch=epoch, shuffle=shuffle))
        for mix in order.pass_of(0, epoch):
            rows = sum(len(data.shard(shard)["y"]) for shard in mix)
            count = len(epoch_batches.sizes(rows, batch_size))
            for window in epoch_batches.sizes(count, accumulate):
                optimizer.zero_grad()
                for _ in range(window):
                    batch = next(batches)
                    loss = functional.cross_entropy(net(batch["x"]), batch["y"])
                    (loss / window).backward()
                optimizer.step()
        assert next(batches, None) is None
    return net.state_dict()


@pytest.mark.parametrize("graph", [False, None, True])
@pytest.mark.parametrize("shuffle", ["rows", "shards"])
@pytest.mark.parametrize(
    ("batch_size", "accumulate"),
    [
        (8, 1),
        (8, 4),  # 50 batches are 12 updates, of four and of five batches
        (9, 7),  # 45 batches are 6 updates, of seven and of eight
        (270, 4),  # one batch: all units but one have none
    ],
)
def test_a_search_with_accumulation_matches_a_plain_loop(
    tmp_path, data, batch_size, accumulate, shuffle, graph
):
    result = cerebro.search(
        build, {"accumulate": [accumulate], "graph": [graph]}, data, searcher="grid",
        epochs=EPOCHS, batch_size=batch_size, seed=SEED, shuffle=shuffle, workers=0,
        run=tmp_path / "run", progress=False, select="last",
    )  # fmt: skip
    expected = plain_loop(data, shuffle, batch_size, accumulate)
    (trial,) = result.trials
    found = trial.load().net.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def updates_of(model, batches):
    """Return the numbers of the batches after which the model has made an update."""
    made = []
    at = 0
    handle = model._optimizers[0].register_step_post_hook(lambda *_: made.append(at))
    for at in range(1, batches + 1):  # noqa: B007
        model.train_batch({"x": torch.ones(2, 6), "y": torch.zeros(2, dtype=torch.int64)})
    handle.remove()
    return made


def test_updates_of_a_unit_have_the_given_batch_counts():
    model = build({"accumulate": 3, "graph": False})
    assert updates_of(model, 7) == [3, 6]
    model.end_unit()  # makes the last one
    for updates in ((4, 3, 2), (3,), (2,), (1,), (4, 4)):
        model.begin_unit(updates)
        assert updates_of(model, sum(updates)) == np.cumsum(updates).tolist()
        model.end_unit()
    model.begin_unit(())  # a unit without batches
    model.end_unit()
    assert updates_of(model, 6) == [3, 6]  # the earlier units are forgotten
    single = build({"accumulate": 1, "graph": False})
    single.begin_unit((1, 1))
    assert updates_of(single, 3) == [1, 2, 3]


@pytest.mark.parametrize("graph", [False, True])
def test_a_loss_is_divided_by_the_batches_of_its_update(graph):
    """Updates of different lengths alternate, each of which is recorded by itself."""
    net, optimizer = parts()
    model = build({"accumulate": 2, "graph": graph})
    random = torch.Generator().manual_seed(2)
    for unit in range(12):
        updates = (3, 2, 2) if unit % 2 else (2, 1, 3)
        model.begin_unit(updates)
        for window in updates:
            for _ in range(window):
                batch = {
                    "x": torch.randn(8, 6, generator=random),
                    "y": torch.randint(0, 3, (8,), generator=random),
                }
                model.train_batch(batch)
                (functional.cross_entropy(net(batch["x"]), batch["y"]) / window).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.end_unit()
        found, expected = model.net.state_dict(), net.state_dict()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    if graph:
        assert model._recorded[0].replays > 0


def test_an_epochs_updates_are_even(data):
    """However its units are cut, an epoch has the updates of one even cut."""
    order = make_order(data, "rows", SEED)
    for size in (3, 8, 20, 100):
        for accumulate in (1, 2, 3, 7, 1000):
            cut = Cut(size, accumulate=accumulate)
            updates = [
                window
                for part in range(order.num_parts)
                for window in order.part(part, 2, cut).updates
            ]
            batches = len(epoch_batches.sizes(ROWS, size))
            assert updates == epoch_batches.sizes(batches, accumulate)
