"""NaN and infinite values in the data are named wherever a loss becomes NaN or infinite."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import cerebro
from cerebro.errors import InputError, RunError
from cerebro.machine.objects import StorageError
from cerebro.worker.data_diagnosis import find_not_finite, summarize_texts

torch = pytest.importorskip("torch")

ROWS = 300
SPACE = {"batch_size": [32]}


def build(config):
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.01)
    return cerebro.torch.Model(net, optimizer=optimizer, loss=torch.nn.functional.cross_entropy)


def rows(at=None, value=np.nan):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 4)).astype("float32")
    if at is not None:
        x[at, 3] = value
    return x, rng.integers(0, 2, ROWS)


def search(data, run, **given):
    options = {"epochs": 1, "n_trials": 2, "validation": 0.2, "workers": 0, "progress": False}
    return cerebro.search(build, SPACE, data, run=run, **(options | given))


def held_out(tmp_path):
    """Return a row that validation=0.2 holds out, and one that it does not, by the source."""
    data = cerebro.shard({"row": np.arange(ROWS)}, tmp_path / "numbers")
    train, validation = data.split(0.8, 0.2)
    return [next(iter(part.in_order(1, "numpy")))["row"][0] for part in (validation, train)]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_training_error_names_the_column_with_nan(tmp_path, workers):
    _, row = held_out(tmp_path)
    named = rf"column 'x' has NaN \(1 value in 240 rows, first in row {row}\), which may be the ca"
    with pytest.raises(RunError, match=rf"loss became nan in epoch 0, batch \d+; {named}"):
        search(rows(row), tmp_path / "a", workers=workers)
    assert f"first in row {row})" in str(cerebro.check(build, SPACE, rows(row), validation=0.2))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_validation_warning_names_the_column_with_nan(tmp_path, workers):
    row, _ = held_out(tmp_path)
    named = rf"column 'x' has NaN \(1 value in 60 rows, first in row {row}\)"
    with pytest.warns(UserWarning, match=f"the validation loss is nan; {named}") as seen:
        result = search(rows(row), tmp_path / "a", workers=workers)
    assert sum("validation loss" in str(each.message) for each in seen) == 1
    assert result.status == "finished"
    with pytest.raises(InputError, match=r"no trial has a finite loss$"):
        _ = result.best
    said = str(cerebro.check(build, SPACE, rows(row), validation=0.2))
    assert f"in validation, column 'x' has NaN (1 value in 60 rows, first in row {row})" in said


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_non_finite_validation_loss_warns_once_under_error_filters(tmp_path, workers, value):
    def build_wrong(config):
        model = build(config)
        model.eval_batch = lambda batch: {"loss": value, "acc": 0.5}
        return model

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("error")
        result = cerebro.search(build_wrong, SPACE, rows(), run=tmp_path / "a", epochs=1,
                                n_trials=2, validation=0.2, workers=workers, metric="acc",
                                progress=False)  # fmt: skip
    assert [trial.status for trial in result.trials] == ["finished"] * 2
    assert sum(f"the validation loss is {value}" in str(each.message) for each in seen) == 1
    assert result.best.metrics["acc"] == 0.5


def test_infinity_and_separate_validation_data(tmp_path):
    x, y = rows()
    bad, _ = rows([5, 7], np.inf)
    named = r"column 'x' has infinity \(2 values in 300 rows, first in row 5\)"
    with pytest.raises(RunError, match=f"loss became nan .*; {named}"):
        search((bad, y), tmp_path / "a", validation=(x, y))
    bad[9, 0] = np.nan
    named = r"column 'x' has NaN and infinity \(3 values in 300 rows, first in row 5\)"
    with pytest.warns(UserWarning, match=f"the validation loss is nan; {named}"):
        search((x, y), tmp_path / "b", validation=(bad, y))


def test_nan_in_a_target_is_reported_with_a_loss_and_with_a_step(tmp_path):
    def regression(config):
        net = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)

        def loss(output, target):
            return torch.nn.functional.mse_loss(output[:, 0], target)

        return cerebro.torch.Model(net, optimizer=optimizer, loss=loss)

    def stepping(config):
        net = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.01)

        def step(net, batch):
            return {"loss": torch.nn.functional.mse_loss(net(batch["x"])[:, 0], batch["y"])}

        return cerebro.torch.Model(net, optimizer=optimizer, step=step)

    y = np.arange(ROWS, dtype="float32") / ROWS
    y[[250, 30]] = np.nan
    named = r"column 'y' has NaN \(2 values in 300 rows, first in row 30\)"
    for number, make in enumerate([regression, stepping]):
        with pytest.raises(RunError, match=f"loss became nan .*; {named}"):
            cerebro.search(make, {"batch_size": [300]}, (rows()[0], y), epochs=1, n_trials=1,
                           workers=0, run=tmp_path / f"{number}", progress=False)  # fmt: skip
        said = cerebro.check(make, {"batch_size": [300]}, (rows()[0], y))
        assert "column 'y' has NaN (2 values in 300 rows, first in row 30)" in str(said)


def test_a_non_finite_loss_on_finite_data_names_no_column(tmp_path):
    def wrong(config):
        model = build(config)
        model.eval_batch = lambda batch: {"loss": float("inf")}
        return model

    with pytest.warns(UserWarning, match="trial 0: the validation loss is inf$"):
        cerebro.search(wrong, SPACE, rows(), epochs=1, n_trials=1, validation=0.2, workers=0,
                       run=tmp_path / "a", progress=False)  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        search(rows(), tmp_path / "b")


@pytest.mark.parametrize("error", [MemoryError("no room"), StorageError("not reached")])
def test_a_failed_data_scan_leaves_the_loss_error(tmp_path, monkeypatch, error):
    looks = []

    def failing(data, names):
        looks.append(names)
        raise error

    def build_wrong(config):
        model = build(config)
        if config["bad"]:
            model.train_batch = lambda batch: {"loss": float("inf")}
        return model

    monkeypatch.setattr("cerebro.worker.loaders.find_not_finite", failing)
    result = cerebro.search(build_wrong, {"bad": [True, False], "n": [0, 1]}, rows(), epochs=1,
                            searcher="grid", run=tmp_path / "a", validation=0.2, workers=0,
                            batch_size=32, progress=False)  # fmt: skip
    bad = [trial for trial in result.trials if trial.config["bad"]]
    assert [trial.status for trial in bad] == ["diverged"] * 2
    assert all(trial.error.endswith("became inf in epoch 0, batch 0") for trial in bad)
    assert looks[0] == ["x", "y"] and not any(looks[1:])  # each column once in a process
    assert result.best.status == "finished"


def test_nan_that_the_model_handles_is_only_a_possible_cause(tmp_path):
    def diverging(config):
        net = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), 1e6)

        def step(net, batch):
            output = net(torch.nan_to_num(batch["x"]))
            return {"loss": torch.nn.functional.mse_loss(output[:, 0], batch["y"].float())}

        return cerebro.torch.Model(net, optimizer=optimizer, step=step)

    said = (
        r"column 'x' has NaN \(1 value in 300 rows, first in row 7\), which may be the cause: fill"
    )
    with pytest.raises(RunError, match=rf"the training loss became .*; {said}"):
        cerebro.search(diverging, SPACE, rows(7), epochs=9, n_trials=1, workers=0,
                       run=tmp_path / "a", progress=False)  # fmt: skip
    found = cerebro.check(diverging, SPACE, rows(7)).findings
    (finding,) = [each for each in found if each.code == "loss-not-finite"]
    assert str(finding).endswith("or choose a smaller learning rate, scale inputs and targets, or "
                                 "give clip_norm")  # fmt: skip
    assert "which may be the cause" in str(finding)


def test_columns_share_the_limit_of_bytes_read(tmp_path, monkeypatch):
    wide = np.zeros((50, 6), "float32")
    wide[[3, 40]] = np.nan
    source = {"a": wide, "b": wide[:, 0], "l": [[0.0], [np.nan]] * 25, "n": np.arange(50)}
    data = cerebro.shard(source, tmp_path / "d", shards=2, shuffle=False)
    assert "in 50 rows, first in row 3" in find_not_finite(data, "ab")["b"]
    monkeypatch.setattr("cerebro.worker.data_diagnosis.READ_BYTES", 10 * (24 + 4))
    assert find_not_finite(data, "ab") == {
        "a": "column 'a' has NaN (6 values in 10 rows, first in row 3)",
        "b": "column 'b' has NaN (1 value in 10 rows, first in row 3)",
    }
    assert "in 10 rows" not in find_not_finite(data, "b")["b"]
    ragged = find_not_finite(data, "bl")["l"]
    assert "first in row 1)" in ragged and "in 50 rows" not in ragged


def test_the_message_names_at_most_three_columns():
    found = {name: f"column {name!r} has NaN" for name in "abcde"}
    assert summarize_texts({}) == ""
    assert summarize_texts({"a": found["a"]}) == "column 'a' has NaN"
    assert summarize_texts(found).endswith(
        "'b' has NaN; column 'c' has NaN; so have 2 more columns"
    )


def test_messages_number_rows_as_in_the_source(tmp_path):
    """Rows are numbered as in the source, by views, by shards, in ragged and other columns."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(50, 2, 3))
    x[[40, 12], 1, 2] = np.nan
    lists = [rng.normal(size=1 + row % 3) for row in range(50)]
    lists[33][0] = -np.inf
    source = {"x": x, "list": lists, "b": torch.tensor(x[:, 0, 0]).bfloat16(), "n": np.arange(50)}
    for shuffle in (False, True):
        data = cerebro.shard(source, tmp_path / f"{shuffle}", shards=3, shuffle=shuffle)
        found = find_not_finite(data, [*data.columns, "unknown"])
        assert found == {
            "x": "column 'x' has NaN (2 values in 50 rows, first in row 12)",
            "list": "column 'list' has infinity (1 value in 50 rows, first in row 33)",
        }
        stored = np.concatenate([data.shard(i)["n"] for i in range(3)])
        view = data.select(np.flatnonzero(stored >= 30)[::-1])
        assert find_not_finite(view, ["x"]) == {
            "x": "column 'x' has NaN (1 value in 20 rows, first in row 40)"
        }
