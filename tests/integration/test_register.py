"""The best model in MLflow's model registry, which keeps it in a SQLite database."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

import cerebro
from cerebro.errors import InputError

torch = pytest.importorskip("torch")
mlflow = pytest.importorskip("mlflow")

pytestmark = pytest.mark.filterwarnings("ignore")  # MLflow's own, of its dependencies


def build(config):
    net = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2)
    )
    optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"])
    return cerebro.torch.Model(net, optimizer=optimizer, loss=torch.nn.functional.cross_entropy)


class Pair(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 2)

    def forward(self, x, scale):
        return self.layer(x) * scale[:, None]


def pair(config, inputs):
    net = Pair()
    optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"])
    loss = torch.nn.functional.cross_entropy
    return cerebro.torch.Model(net, optimizer=optimizer, loss=loss, inputs=inputs)


def build_pair(config):
    return pair(config, ["x", "scale"])


def build_named(config):
    return pair(config, {"x": "x", "scale": "scale"})


def build_worsening(config):
    net = torch.nn.Linear(6, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"], maximize=True)
    return cerebro.torch.Model(net, optimizer=optimizer, loss=torch.nn.functional.cross_entropy)


class Mean:
    framework = "numpy"

    def train_batch(self, batch):
        return {"loss": 1.0}

    eval_batch = train_batch

    def state_dict(self):
        return {"w": np.zeros(2)}

    def load_state_dict(self, state):
        pass


def build_mean(config):
    return Mean()


@pytest.fixture(scope="module", autouse=True)
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mlflow")
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.chdir(folder)
        patch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{folder / 'mlflow.db'}")
        yield mlflow.MlflowClient()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(120, 6)).astype(np.float32)
    rows = {"x": x, "y": (x.sum(1) > 0).astype(np.int64), "scale": x[:, 0] ** 2}
    return cerebro.shard(rows, tmp_path_factory.mktemp("set") / "data", shards=2)


def search(data, folder, the_build=build, folds=None, **settings):
    train, valid = data.split(0.75, 0.25)
    return cerebro.search(
        the_build, {"lr": cerebro.loguniform(1e-3, 1e-1)}, train, epochs=2, n_trials=2,
        validation=folds or valid, batch_size=16, workers=0, run=folder, progress=False, **settings,
    )  # fmt: skip


@pytest.fixture(scope="module")
def result(data, tmp_path_factory):
    return search(data, tmp_path_factory.mktemp("runs") / "net")


def rows_of(data, name="x"):
    return torch.from_numpy(np.concatenate([data.shard(i)[name] for i in range(2)]))


def test_a_registered_model_predicts_the_same(data, result, client):
    before = torch.get_rng_state()
    assert result.register("digits") == "models:/digits/1"
    assert torch.equal(torch.get_rng_state(), before)
    best, x = result.best, rows_of(data)
    loaded = mlflow.pytorch.load_model("models:/digits/1")
    with torch.no_grad():
        expected = best.load().net(x)
        assert torch.equal(loaded(x), expected)
        assert torch.equal(loaded(x[:5]), best.load().net(x[:5]))  # any number of rows
    as_function = mlflow.pyfunc.load_model("models:/digits/1")
    assert np.array_equal(as_function.predict(x.numpy()), expected.numpy())


def test_a_registered_version_records_its_origin(data, result, client):
    address = result.register("tagged", alias="champion")
    version = client.get_model_version_by_alias("tagged", "champion")
    assert address == f"models:/tagged/{version.version}"
    best = result.best
    assert version.tags == {
        "cerebro.run": result.saved.meta["id"],
        "cerebro.path": str(result.path.absolute()),
        "cerebro.trial": str(best.number),
        "cerebro.epoch": str(best.best_epoch),
        "cerebro.state_hash": best.state_hash,
        "cerebro.data_checksum": data.split(0.75, 0.25)[0].checksum,
    }
    assert mlflow.models.get_model_info(address).metadata == version.tags
    result.register("tagged", alias="champion")
    assert result.register("tagged") == "models:/tagged/3"
    assert int(client.get_model_version_by_alias("tagged", "champion").version) == 2


def test_the_last_epoch_is_registered_if_it_ranks_trials(data, tmp_path, client):
    result = search(data, tmp_path / "worsening", build_worsening, select="last")
    best, x = result.best, rows_of(data)
    assert best.best_epoch == 0 and best.epoch == 2
    address = result.register("worsening")
    with torch.no_grad():
        expected = best.load("last").net(x)
        assert torch.equal(mlflow.pytorch.load_model(address)(x), expected)
    tags = client.get_model_version("worsening", "1").tags
    assert tags["cerebro.epoch"] == "1"
    assert tags["cerebro.state_hash"] == best.history[1]["state_hash"]


def test_nothing_is_pickled(result, client):
    source = mlflow.artifacts.download_artifacts(result.register("files"))
    names = {path.name for path in Path(source).rglob("*") if path.is_file()}
    assert "model.pt2" in names
    assert not [name for name in names if name.endswith((".pth", ".pkl", ".pickle"))]


def test_a_model_with_several_inputs_and_example_rows_is_registered(data, tmp_path, client):
    result = search(data, tmp_path / "pair", build_pair)
    x, scale = rows_of(data), rows_of(data, "scale")
    expected = result.best.load().net(x, scale)
    for example in (None, [x[:4].numpy(), scale[:4]], (x[:1], scale[:1])):
        loaded = mlflow.pytorch.load_model(result.register("pair", example=example))
        assert torch.equal(loaded(x, scale), expected)


def test_unregistrable_models_and_arguments_are_refused(data, result, tmp_path, client):
    with pytest.raises(InputError, match=r"needs a cerebro\.torch\.Model.*test_register\.Mean"):
        search(data, tmp_path / "mean", build_mean).register("mean")
    with pytest.raises(InputError, match="positional inputs"):
        search(data, tmp_path / "named", build_named).register("named")
    with pytest.raises(InputError, match="has 2 folds"):
        search(data, tmp_path / "folds", folds=cerebro.KFold(2)).register("folds")
    with pytest.raises(InputError, match="models:/aliased/1 is registered, but not as 'latest'"):
        result.register("aliased", alias="latest")
    with pytest.raises(InputError, match="name must be a string, not ''"):
        result.register("")
    with pytest.raises(InputError, match="alias must be a string, not 3"):
        result.register("digits", alias=3)
    with pytest.raises(InputError, match="example has no rows"):
        result.register("digits", example=np.zeros((0, 6), np.float32))
    with pytest.raises(InputError, match="example must be rows"):
        result.register("digits", example="rows")
    with pytest.raises(InputError, match=r"cannot register the Sequential of trial \d as 'wide'"):
        result.register("wide", example=np.zeros((4, 7), np.float32))
    assert {model.name for model in client.search_registered_models()}.isdisjoint(
        {"mean", "named", "folds", "wide"}
    )
