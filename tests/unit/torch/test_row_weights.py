"""cerebro.torch.Model(weight=): a plain loop's weighted mean, bit for bit, recorded or not."""

from __future__ import annotations

import functools

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

import cerebro._core as _core  # noqa: E402
import cerebro.torch  # noqa: E402
from cerebro.data.placed import PlacedDataset  # noqa: E402
from cerebro.errors import InputError  # noqa: E402
from cerebro.model import Info  # noqa: E402
from cerebro.torch.objective import check_column  # noqa: E402
from cerebro.transforms import Scale  # noqa: E402

BATCHES, ROWS = 16, 8
EACH = functools.partial(functional.cross_entropy, reduction="none")


def batches(seed, count=BATCHES):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "x": torch.randn(ROWS, 5, generator=generator),
            "y": torch.randint(0, 3, (ROWS,), generator=generator),
            "w": torch.rand(ROWS, generator=generator),
        }
        for _ in range(count)
    ]


def made(loss=EACH, **options):
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = options.pop("optimizer", torch.optim.AdamW)(net.parameters(), lr=0.01)
    return cerebro.torch.Model(net, optimizer=optimizer, loss=loss, **{"weight": "w", **options})


def bits(model):
    return _core.hash_state(_core.pack_state(model.state_dict()))


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("amp", [None, "bf16"])
def test_weighted_training_matches_a_plain_loop(amp, accumulate):
    model, plain = (made(amp=amp, accumulate=accumulate, graph=False) for _ in range(2))
    net, (optimizer,) = plain.net, plain._optimizers
    for number, batch in enumerate(batches(0)):
        values = model.train_batch(batch)
        with torch.autocast("cpu", torch.bfloat16, enabled=amp is not None):
            losses = EACH(net(batch["x"]), batch["y"])
            loss = (losses * batch["w"]).sum() / batch["w"].sum()
        (loss / accumulate).backward()
        if number % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(values["loss"][0], loss.detach())
        assert torch.equal(values["loss"][1], batch["w"].sum())
    assert bits(model) == bits(plain)


def test_means_weight_batches_by_their_weights():
    log_loss = pytest.importorskip("sklearn.metrics").log_loss
    model, some = made(), batches(1)
    whole = {name: torch.cat([batch[name] for batch in some]) for name in "xyw"}
    scores = model.predict(whole).double().softmax(1).numpy()
    expected = log_loss(whole["y"], scores, sample_weight=whole["w"])
    for size in (7, 50, len(whole["y"])):
        assert model.evaluate(whole, batch_size=size)["loss"] == pytest.approx(expected, rel=1e-6)
    # In training, too: the epoch's mean is that of C, over the pairs.
    still = made(optimizer=functools.partial(torch.optim.SGD, momentum=0))
    for group in still._optimizers[0].param_groups:
        group["lr"] = 0.0
    still.net.load_state_dict(model.net.state_dict())

    class Source(list):
        last_rows = ROWS

    total, weight = _core.run_unit(Source(some), still.train_batch).sums["loss"]
    assert weight == pytest.approx(float(whole["w"].double().sum()), rel=1e-6)
    assert total / weight == pytest.approx(expected, rel=1e-6)


def test_a_dataset_provides_the_weight_column(tmp_path):
    """A model asks for the columns that it reads; without weights, the loss would be a mean."""
    model, some = made(), batches(7)
    whole = {name: torch.cat([batch[name] for batch in some]) for name in "xyw"}
    columns = {**{name: value.numpy() for name, value in whole.items()}, "other": whole["y"]}
    data = cerebro.shard(columns, tmp_path / "data", shards=2, shuffle=False, progress=False)
    assert model.columns_read == ["x", "y", "w"]
    assert made(nn.CrossEntropyLoss(), weight=None).columns_read == ["x", "y"]
    expected = model.evaluate(whole)["loss"]
    assert model.evaluate(data)["loss"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0, 2.0, -0.5, 1.0], "column 'w', shard 1, row 0: -0.5 is not a weight"),
        ([1.0, float("nan"), 1.0, 1.0], "column 'w', shard 0, row 1: nan is not a weight"),
        ([[1.0], [2.0], [3.0], [float("inf")]], "column 'w', shard 1, row 1: inf is not a weight"),
        ([0, 0, 0, 0], "all weights are 0"),
        ([0, 0, 0, 3], None),
        ([False, False, True, True], None),
    ],
)
def test_a_search_checks_the_weights(tmp_path, weights, message):
    rows = {"x": np.zeros((4, 5), np.float32), "y": np.zeros(4, np.int64), "w": np.array(weights)}
    data = cerebro.shard(rows, tmp_path / "data", shards=2, shuffle=False, progress=False)
    about = {"epochs": 1, "steps_per_epoch": 2, "total_steps": 2, "batch_size": 2}
    info = Info(**about, trial=0, seed=0, data=data)
    for _ in range(2):
        if message is None:
            made().bind_info(info)
        else:
            with pytest.raises(InputError, match=message):
                made().bind_info(info)
    made(nn.CrossEntropyLoss(), weight=None).bind_info(info)
    signs = data.with_transforms({"w": [Scale(-1.0)]})  # batches do not have the stored values
    made().bind_info(Info(**about, trial=0, seed=0, data=signs))


def test_each_node_checks_only_its_own_weights(tmp_path):
    weights = np.array([0.0, 0.0, -1.0, 2.0])
    rows = {"x": np.zeros((4, 5), np.float32), "w": weights}
    data = cerebro.shard(rows, tmp_path / "data", shards=2, shuffle=False, progress=False)
    elsewhere = (tmp_path / "data" / "shard-00001").rename(tmp_path / "elsewhere")
    check_column(PlacedDataset.from_spec(data.spec()), "w")
    elsewhere.rename(tmp_path / "data" / "shard-00001")
    placed = PlacedDataset.from_spec(data.spec())
    with pytest.raises(InputError, match=r"shard 1, row 0: -1\.0 is not a weight"):
        check_column(placed, "w")
    file = tmp_path / "data" / "shard-00001" / "w.npy"
    file.write_bytes(file.read_bytes()[:-8])
    check_column(placed, "w")  # the unit that reads it names the file


def test_weights_by_class_are_those_of_torch():
    """A column with the weight of each row's class is CrossEntropyLoss(weight=)."""
    by_class = torch.tensor([0.5, 1.0, 4.0])
    weighted, other = made(), made(nn.CrossEntropyLoss(by_class), weight=None)
    for batch in batches(2):
        found = weighted.train_batch({**batch, "w": by_class[batch["y"]]})["loss"][0]
        assert float(found) == pytest.approx(float(other.train_batch(batch)["loss"]), rel=1e-5)


def test_rows_of_no_weight_count_for_nothing():
    model = made(optimizer=torch.optim.SGD)
    before, (batch,) = bits(model), batches(3, 1)
    values = model.train_batch({**batch, "w": torch.zeros(ROWS)})["loss"]
    assert [float(value) for value in values] == [0.0, 0.0]
    assert bits(model) == before
    half = {name: value[:4] for name, value in batch.items()}
    kept = {**batch, "w": torch.cat([half["w"], torch.zeros(4)])}
    assert model.evaluate([kept])["loss"] == pytest.approx(model.evaluate([half])["loss"])


def test_losses_and_weights_of_other_shapes():
    (batch,) = batches(4, 1)
    squares = functools.partial(functional.mse_loss, reduction="none")
    several = made(squares, target="t")
    column = {**batch, "t": torch.randn(ROWS, 3), "w": torch.arange(ROWS)[:, None]}  # int64
    expected = np.average(
        ((several.predict(batch) - column["t"]) ** 2).mean(1), weights=np.arange(ROWS)
    )
    assert several.evaluate([column])["loss"] == pytest.approx(expected, rel=1e-6)
    wrong = made(lambda output, target: output.argmax(1) != target)  # of validation alone
    expected = np.average(wrong.predict(batch).argmax(1) != batch["y"], weights=batch["w"])
    assert wrong.evaluate([batch])["loss"] == pytest.approx(expected, rel=1e-6)
    alone = made(lambda output: output.square().mean(1), target=None)
    expected = np.average(alone.predict(batch).square().mean(1), weights=batch["w"])
    assert alone.evaluate([batch])["loss"] == pytest.approx(expected, rel=1e-6)


def test_data_without_the_column_may_be_evaluated():
    model, (batch,) = made(metrics={"n": lambda output, target: (1.0, len(target))}), batches(5, 1)
    plain = {"x": batch["x"], "y": batch["y"]}
    expected = float(functional.cross_entropy(model.predict(plain), batch["y"]))
    assert model.evaluate([plain])["loss"] == pytest.approx(expected, rel=1e-6)
    with pytest.raises(InputError, match="weight names the column 'w', but the data has x, y"):
        model.train_batch(plain)
    dropped = made(augment=lambda _: plain)
    with pytest.raises(InputError, match="weight names the column 'w'"):
        dropped.train_batch(batch)


@pytest.mark.parametrize("graph", [None, True])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"amp": "bf16"}])
def test_all_settings_of_graph_give_the_same_bits(graph, options):
    found = []
    for how in (graph, False):
        model, seen = made(graph=how, **options), []
        for unit in range(3):
            for training, step in ((True, model.train_batch), (False, model.eval_batch)):
                model.begin_recorded_unit(training=training)
                for batch in batches(unit):
                    seen.append([float(value) for value in step(batch)["loss"]])
                assert model.end_recorded_unit(training=training) is None
            model.end_unit()
            seen.append(bits(model))
        found.append(seen)
        if how is True:
            assert [recorded.refusal for recorded in model._recorded] == [None, None]
            assert all(recorded.replays > 0 for recorded in model._recorded)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": nn.CrossEntropyLoss()}, r"use CrossEntropyLoss\(reduction='none'\)"),
        ({"loss": None}, "weight needs loss="),
        ({"step": lambda net, batch: {}, "loss": None}, "return the loss as .weighted mean"),
        ({"weight": 3}, "weight must be a column's name"),
        ({"sample_weight": "w"}, "weight"),
        ({"class_weight": {0: 1.0}}, "CrossEntropyLoss"),
    ],
)
def test_options_that_conflict_with_weights_are_refused(options, message):
    with pytest.raises((InputError, TypeError), match=message):
        made(**options)


def test_a_loss_that_is_one_number_is_refused():
    (batch,) = batches(6, 1)
    with pytest.raises(InputError, match=r"loss is one number: .*functools\.partial"):
        made(functional.cross_entropy).train_batch(batch)
    with pytest.raises(InputError, match=r"8 rows, but the loss is \(3,\)"):
        made(lambda output, target: output.mean(0)).train_batch(batch)
    with pytest.raises(InputError, match=r"'w' must have one weight .* rows of shape \(2,\)"):
        made().train_batch({**batch, "w": torch.ones(ROWS, 2)})
