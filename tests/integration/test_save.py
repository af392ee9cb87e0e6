"""Saved models: folders that work without Cerebro."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import cerebro  # noqa: E402
from cerebro import InputError  # noqa: E402
from cerebro.transforms import Normalize  # noqa: E402

ROWS = 60

WITHOUT_CEREBRO = """
import sys
sys.modules["cerebro"] = None
import numpy as np
import runpy
loaded = runpy.run_path(sys.argv[1] + "/load.py")
"""


def elsewhere(folder: Path, program: str, *arguments: Path) -> None:
    """Run a program that cannot import Cerebro; `loaded` has what load.py defines."""
    subprocess.run(
        [sys.executable, "-c", WITHOUT_CEREBRO + program, str(folder), *map(str, arguments)],
        check=True,
        cwd=folder.parent,
    )


@pytest.fixture
def data(tmp_path: Path) -> cerebro.Dataset:
    rng = np.random.default_rng(0)
    x = rng.normal(2.0, 3.0, size=(ROWS, 6)).astype(np.float32)
    tokens = [rng.integers(1, 20, size=rng.integers(2, 9)) for _ in range(ROWS)]
    y = np.array(["cat", "dog"])[rng.integers(0, 2, size=ROWS)]
    columns = {"x": x, "tokens": tokens, "y": y}
    made = cerebro.shard(columns, tmp_path / "data", shards=2, progress=False)
    return made.with_transforms({"x": Normalize(2.0, 3.0)})


def search(build: Any, data: Any, folder: Path) -> cerebro.Result:
    return cerebro.search(
        build, {"lr": cerebro.uniform(0.01, 0.1)}, data, epochs=2, batch_size=16, validation=0.25,
        n_trials=1, run=folder, workers=0, progress=False,
    )  # fmt: skip


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)
    )


def build(config: dict[str, Any]) -> Any:
    made = net()
    optimizer = torch.optim.SGD(made.parameters(), lr=config["lr"])
    return cerebro.torch.Model(made, optimizer=optimizer, loss=nn.functional.cross_entropy)


def test_a_network_predicts_without_cerebro(data: cerebro.Dataset, tmp_path: Path) -> None:
    best = search(build, data, tmp_path / "run").best
    assert best.save(tmp_path / "pets") == tmp_path / "pets"
    rows = np.stack([batch["x"] for batch in data.batches(1, shuffle=False)])[:, 0]
    np.save(tmp_path / "rows.npy", rows)
    np.save(tmp_path / "expected.npy", best.predict(data).numpy())
    elsewhere(
        tmp_path / "pets",
        "import torch\n"
        "rows, expected = map(np.load, sys.argv[2:])\n"
        "for count in (1, 7, len(rows)):\n"
        "    found = loaded['predict'](torch.from_numpy(rows[:count]))\n"
        "    torch.testing.assert_close(found, torch.from_numpy(expected[:count]))\n"
        "    for given in (rows, rows.astype('float64'), rows.tolist(), list(rows),\n"
        "                  tuple(map(torch.from_numpy, rows)), torch.from_numpy(rows).double()):\n"
        "        assert torch.equal(loaded['predict'](given[:count]), found)\n"
        "rows.flags.writeable = False\n"
        "assert torch.equal(loaded['predict'](rows), found)\n"
        "for given in ((), (rows, rows)):\n"
        "    try: loaded['predict'](*given)\n"
        "    except TypeError as error: assert 'predict takes 1 input' in str(error)\n"
        "    else: raise AssertionError(given)\n",
        tmp_path / "rows.npy",
        tmp_path / "expected.npy",
    )
    about = json.loads((tmp_path / "pets" / "model.json").read_text())
    assert about["config"] == best.config
    assert about["metrics"] == best.metrics
    assert about["classes"] == {"y": ["cat", "dog"]}
    (column,) = about["inputs"]
    assert column["column"] == "x" and column["transforms"] == ["Normalize(mean=2.0, std=3.0)"]
    train = best.saved.view("data", data)
    assert column["mean"] == train.stats("x").mean
    assert "def build(config" in (tmp_path / "pets" / "build.py").read_text()
    assert len((tmp_path / "pets" / "load.py").read_text().splitlines()) <= 60


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 4, padding_idx=0)
        self.out = nn.Linear(4, 2)

    def forward(self, *, tokens: Any, mask: Any) -> Any:
        return self.out((self.embedding(tokens) * mask[..., None]).sum(1))


def test_a_saved_network_takes_keywords_and_ragged_rows(
    data: cerebro.Dataset, tmp_path: Path
) -> None:
    def build(config: dict[str, Any]) -> Any:
        bag = Bag()
        return cerebro.torch.Model(
            bag, optimizer=torch.optim.SGD(bag.parameters(), lr=config["lr"]),
            loss=nn.functional.cross_entropy, inputs={"tokens": "tokens", "mask": "tokens_mask"},
        )  # fmt: skip

    best = search(build, data, tmp_path / "run").best
    best.save(tmp_path / "saved", build=build)
    elsewhere(
        tmp_path / "saved",
        "import torch\n"
        "tokens = torch.ones(3, 11, dtype=torch.int64)\n"
        "out = loaded['predict'](tokens=tokens, mask=tokens.bool())\n"
        "assert out.shape == (3, 2)\n"
        "for form in (tokens.numpy(), tokens.numpy().astype('int32'), tokens.tolist()):\n"
        "    assert torch.equal(out, loaded['predict'](tokens=form, mask=tokens.bool().tolist()))\n"
        "for wrong, kind in (([[0.5]], 'int64'), ([[1.0, float('nan')]], 'int64')):\n"
        "    try: loaded['predict'](tokens=wrong, mask=wrong)\n"
        "    except ValueError as error: assert kind in str(error)\n"
        "    else: raise AssertionError(wrong)\n"
        "try: loaded['predict'](tokens)\n"
        "except TypeError as error: assert 'predict takes tokens=, mask=' in str(error)\n"
        "else: raise AssertionError\n",
    )


def test_the_length_of_ragged_rows_is_an_input(data: cerebro.Dataset, tmp_path: Path) -> None:
    class Mean(Bag):
        def forward(self, tokens: Any, length: Any) -> Any:
            return self.out(self.embedding(tokens).sum(1) / length[:, None])

    def build(config: dict[str, Any]) -> Any:
        mean = Mean()
        return cerebro.torch.Model(
            mean, optimizer=torch.optim.SGD(mean.parameters(), lr=config["lr"]),
            loss=nn.functional.cross_entropy, inputs=["tokens", "tokens_length"],
        )  # fmt: skip

    best = search(build, data, tmp_path / "run").best
    best.save(tmp_path / "saved", build=build)
    about = json.loads((tmp_path / "saved" / "model.json").read_text())
    assert [each["column"] for each in about["inputs"]] == ["tokens", "tokens_length"]
    elsewhere(
        tmp_path / "saved",
        "import torch\n"
        "tokens = torch.ones(3, 11, dtype=torch.int64)\n"
        "assert loaded['predict'](tokens, torch.tensor([11, 3, 1])).shape == (3, 2)\n",
    )


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(6, 2)

    def forward(self, x: Any) -> Any:
        return self.out(x) if x.sum() > 0 else self.out(-x)


def test_a_network_that_cannot_be_exported_saves_only_its_weights(
    data: cerebro.Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def build(config: dict[str, Any]) -> Any:
        made = Branching()
        optimizer = torch.optim.SGD(made.parameters(), lr=config["lr"])
        return cerebro.torch.Model(made, optimizer=optimizer, loss=nn.functional.cross_entropy)

    best = search(build, data, tmp_path / "run").best
    with pytest.warns(UserWarning, match="cannot export the Branching .*only its weights"):
        best.save(tmp_path / "saved", build=build)
    assert "torch.ops" not in capsys.readouterr().err
    elsewhere(
        tmp_path / "saved",
        "assert loaded['weights']['out.weight'].shape == (2, 6)\n",
    )


def test_a_saved_estimator_predicts_without_cerebro(data: cerebro.Dataset, tmp_path: Path) -> None:
    linear_model = pytest.importorskip("sklearn.linear_model")

    def build(config: dict[str, Any]) -> Any:
        return cerebro.sklearn.Model(linear_model.SGDClassifier(eta0=config["lr"]))

    best = search(build, data, tmp_path / "run").best
    best.save(tmp_path / "saved", build=build)
    np.save(tmp_path / "expected.npy", best.predict(data))
    rows = np.stack([batch["x"] for batch in data.batches(1, shuffle=False)])[:, 0]
    np.save(tmp_path / "rows.npy", rows)
    elsewhere(
        tmp_path / "saved",
        "rows, expected = map(np.load, sys.argv[2:])\n"
        "for given in (rows, rows.astype('float64'), rows.tolist(), list(rows)):\n"
        "    assert (loaded['predict'](given) == expected).all()\n"
        "left, right = rows[:, :1], rows[:, 1:].reshape(len(rows), 5, 1)\n"
        "assert (loaded['predict'](left.ravel().tolist(), right) == expected).all()\n",
        tmp_path / "rows.npy",
        tmp_path / "expected.npy",
    )


def test_a_saved_transformer_works_without_cerebro(data: cerebro.Dataset, tmp_path: Path) -> None:
    decomposition = pytest.importorskip("sklearn.decomposition")

    def build(config: dict[str, Any]) -> Any:
        return cerebro.sklearn.Model(decomposition.IncrementalPCA(2), target="y", inputs="x")

    result = cerebro.search(
        build, {"seed": [0]}, data, epochs=1, searcher="grid", batch_size=16, run=tmp_path / "run",
        workers=0, progress=False,
    )  # fmt: skip
    result.best.save(tmp_path / "saved", build=build)
    np.save(tmp_path / "expected.npy", result.best.predict(data))
    rows = np.stack([batch["x"] for batch in data.batches(1, shuffle=False)])[:, 0]
    np.save(tmp_path / "rows.npy", rows)
    elsewhere(
        tmp_path / "saved",
        "rows, expected = map(np.load, sys.argv[2:])\n"
        "assert (loaded['predict'](rows.tolist()).round(4) == expected.round(4)).all()\n",
        tmp_path / "rows.npy",
        tmp_path / "expected.npy",
    )


def test_only_a_saved_model_is_replaced(data: cerebro.Dataset, tmp_path: Path) -> None:
    best = search(build, data, tmp_path / "run").best
    best.save(tmp_path / "saved")
    before = (tmp_path / "saved" / "model.json").read_text()
    best.save(tmp_path / "saved")
    assert (tmp_path / "saved" / "model.json").read_text() == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(InputError, match="is not a saved model"):
        best.save(tmp_path / "mine")
    assert (tmp_path / "mine" / "notes.txt").read_text() == "keep"
    with pytest.raises(InputError, match="there is no folder"):
        best.save(tmp_path / "none" / "saved")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
