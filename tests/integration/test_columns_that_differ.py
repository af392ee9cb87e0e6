"""Data whose categories differ from the training data's: by name, or refused if they are read."""

from __future__ import annotations

import numpy as np
import pytest

import cerebro
from cerebro.errors import InputError

pd = pytest.importorskip("pandas")
torch = pytest.importorskip("torch")

CITIES = ["Athens", "Berlin", "Cairo"]
RNG = np.random.default_rng(0)
CITY = RNG.choice(CITIES, 160)
KIND = RNG.choice(["u", "v"], 160)
FRAME = pd.DataFrame(
    {
        "id": [f"u{i}" for i in range(160)],
        "city": CITY,
        "kind": KIND,
        "y": (CITY == "Cairo").astype("int64"),
        "note": [f"text of row {i}" for i in range(160)],
    }
)
TRAIN, HELD_OUT = FRAME[:120], FRAME[120:]
NEW = pd.DataFrame({"city": ["Cairo", "Berlin"], "kind": ["v", "v"]})


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.city, self.kind = torch.nn.Embedding(3, 2), torch.nn.Embedding(2, 2)

    def forward(self, city, kind):
        return self.city(city) + self.kind(kind)


def named(config):
    """A model that names its columns."""
    net = Net()
    optimizer = torch.optim.Adam(net.parameters(), 0.1)
    loss = torch.nn.functional.cross_entropy
    return cerebro.torch.Model(
        net, optimizer=optimizer, loss=loss, inputs=["city", "kind"], target="y"
    )


class Own:
    """A model that gets whole batches, of which it reads three columns."""

    framework = "torch"

    def __init__(self):
        self.net = Net()
        self.optimizer = torch.optim.Adam(self.net.parameters(), 0.1)

    def loss(self, batch):
        output = self.net(batch["city"], batch["kind"])
        return torch.nn.functional.cross_entropy(output, batch["y"])

    def train_batch(self, batch):
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item()}

    def eval_batch(self, batch):
        with torch.no_grad():
            return {"loss": self.loss(batch).item()}

    def predict_batch(self, batch):
        with torch.no_grad():
            return self.net(batch["city"], batch["kind"])

    def state_dict(self):
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])


def own(config):
    return Own()


def search(build, data, validation, run, **given):
    options = {"epochs": 3, "n_trials": 1, "batch_size": 20, "workers": 0, "progress": False}
    return cerebro.search(
        build, {"a": [1]}, data, validation=validation, run=run, **(options | given)
    )


def classes(output):
    return np.asarray(output).argmax(1).tolist()


@pytest.fixture
def written(tmp_path):
    count = iter(range(100))

    def write(frame):
        return cerebro.shard(frame, tmp_path / f"data{next(count)}", shards=2, shuffle=False)

    return write


@pytest.mark.parametrize("build", [named, own])
def test_columns_that_no_model_reads_do_not_matter(tmp_path, written, build):
    loss = search(build, TRAIN, HELD_OUT, tmp_path / "a").best.metrics["loss"]
    assert loss < 0.6
    in_workers = search(build, TRAIN, HELD_OUT, tmp_path / "b", workers=1).best
    assert in_workers.metrics["loss"] == loss
    data = written(TRAIN)
    for number, rows in enumerate([HELD_OUT, HELD_OUT.drop(columns=["id", "note"])]):
        best = search(build, data, written(rows), tmp_path / f"c{number}").best
        assert best.evaluate(written(rows)) == best.evaluate() == best.evaluate(rows)
        assert classes(best.predict(NEW.assign(id=["p", "q"]))) == [1, 0]
        assert classes(best.predict(written(HELD_OUT))) == classes(best.predict(HELD_OUT))
    assert cerebro.check(build, {"a": [1], "batch_size": [20]}, TRAIN, validation=HELD_OUT)


@pytest.mark.parametrize("build", [named, own])
def test_columns_that_a_model_reads_are_refused(tmp_path, written, build):
    fewer, unknown = TRAIN[TRAIN.city != "Cairo"], "has 'Cairo' in column 'city', which the train"
    other = HELD_OUT[HELD_OUT.city != "Athens"]
    numbered = "class 0 of column 'city' is 'Berlin' here and 'Athens' in the training data"
    for data, validation, message in (
        (fewer, HELD_OUT, unknown),
        (written(fewer), written(HELD_OUT), unknown),
        (written(fewer), HELD_OUT, unknown),
        (written(TRAIN), written(other), numbered),
        (written(TRAIN), written(HELD_OUT.drop(columns="kind")), r"lacks .* column\(s\) kind"),
        (TRAIN, HELD_OUT.assign(y=["no"] * 40), r"column 'y' has names \('no' in row 0\)"),
    ):
        with pytest.raises(InputError, match=message):
            search(build, data, validation, tmp_path / "a")
        assert not (tmp_path / "a").exists()
        with pytest.raises(InputError, match=message):
            cerebro.check(build, {"a": [1], "batch_size": [20]}, data, validation=validation)
    with pytest.raises(InputError, match=unknown):
        search(build, fewer, HELD_OUT, tmp_path / "a", workers=1)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("build", [named, own])
def test_new_rows_are_mapped_by_name_and_datasets_refused(tmp_path, written, build):
    best = search(build, TRAIN, HELD_OUT, tmp_path / "a").best
    columns = {name: list(values) for name, values in NEW.items()}
    assert classes(best.predict(NEW)) == classes(best.predict(columns)) == [1, 0]
    assert classes(best.predict({name: np.array(v) for name, v in columns.items()})) == [1, 0]
    assert classes(best.predict(NEW[::-1].astype("category"))) == [0, 1]
    labelled = NEW.assign(y=[1, 0])
    assert best.evaluate(labelled) == best.evaluate(labelled[::-1])
    message = "class 0 of column 'city' is 'Berlin' here and 'Athens' in the training data"
    with pytest.raises(InputError, match=message):
        best.predict(written(NEW))
    with pytest.raises(InputError, match=message):
        best.evaluate(written(labelled))
    second = pd.DataFrame({"city": CITIES, "kind": ["v"] * 3})
    with pytest.raises(InputError, match="class 0 of column 'kind' is 'v' here and 'u' in"):
        best.predict(written(second))
    assert classes(best.predict(written(second.assign(kind=["u", "v", "u"])))) == [0, 0, 1]
    more = pd.DataFrame({"city": [*CITIES, "Oslo"], "kind": ["u"] * 4})
    with pytest.raises(InputError, match="has 'Oslo' in column 'city', which the training data"):
        best.predict(written(more))
    with pytest.raises(InputError, match="predict has 'Oslo' in column 'city'"):
        best.predict(more)
    with pytest.raises(InputError, match="evaluate has 'Oslo' in column 'city'"):
        best.evaluate(more.assign(y=0))
    assert classes(best.predict(written(more).select([0, 1, 2]))) == [0, 0, 1]


def test_models_of_folds(tmp_path, written):
    trial = search(named, FRAME, cerebro.KFold(2), tmp_path / "a").best
    for fold in trial.folds:
        assert classes(fold.predict(NEW)) == [1, 0]
        with pytest.raises(InputError, match="class 0 of column 'city'"):
            fold.predict(written(NEW))


def test_numbers_are_not_codes(tmp_path, written):
    """Text where the training data has measurements."""
    frame = pd.DataFrame({"x": np.arange(40.0), "y": np.arange(40) % 2})

    def build(config):
        net = torch.nn.Sequential(torch.nn.Unflatten(0, (-1, 1)), torch.nn.Linear(1, 2))
        optimizer = torch.optim.SGD(net.parameters(), 1e-4)
        return cerebro.torch.Model(net, optimizer=optimizer, loss=torch.nn.functional.cross_entropy)

    best = search(build, frame, 0.25, tmp_path / "a").best
    text = pd.DataFrame({"x": ["low", "high"], "y": [0, 1]})
    for use in (best.predict, best.evaluate):
        with pytest.raises(InputError, match="has names in column 'x'"):
            use(written(text))
        with pytest.raises(InputError, match=r"column 'x' has names \('low' in row 0\), but num"):
            use(text)
