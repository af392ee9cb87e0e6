"""Data whose categories differ from the training data's: by name, or refused if they are read."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import cerebro
from cerebro.data.given_rows import write
from cerebro.errors import InputError, RunError

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
def test_differing_columns_that_no_model_reads_are_ignored(tmp_path, written, build):
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
def test_differing_columns_that_a_model_reads_are_refused(tmp_path, written, build):
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
    with pytest.raises(
        InputError, match=r"predict(: column 'city')? has 'Oslo' in (row 3|column 'city')"
    ):
        best.predict(more)
    with pytest.raises(InputError, match="evaluate has 'Oslo' in column 'city'"):
        best.evaluate(more.assign(y=0))
    assert classes(best.predict(written(more).select([0, 1, 2]))) == [0, 0, 1]


class Maybe:
    """A model that reads whole batches, and uses the column `name` only if it is there."""

    framework = "numpy"

    def __init__(self, needs):
        self.needs = needs

    def train_batch(self, batch):
        return {"loss": float("name" in batch)}

    def eval_batch(self, batch):
        name = batch.get("name")
        return {"loss": float(name.shape[0] if self.needs else "name" in batch)}

    def predict_batch(self, batch):
        return self.eval_batch(batch)["loss"] + np.zeros(len(batch["x"]))

    def state_dict(self):
        return {"w": np.zeros(1)}

    def load_state_dict(self, state):
        pass


def differing(written):
    """Return training and validation data whose column `name` has other categories."""
    frame = pd.DataFrame({"x": np.arange(40.0), "name": ["a", "b"] * 20, "id": ["i"] * 40})
    return written(frame), written(frame.assign(name="b"))


REASON = "validation .* has other categories: class 0 of column 'name' is 'b' here and 'a' in"
LACK = r"its batches lack the column\(s\) 'name'"


@pytest.mark.parametrize("workers", [0, 1])
def test_a_warning_names_omitted_columns(tmp_path, written, workers):
    train, held_out = differing(written)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("error")
        result = search(lambda config: Maybe(False), train, held_out, tmp_path / "a",
                        workers=workers, n_trials=3)  # fmt: skip
    texts = [str(each.message) for each in seen if "its batches lack" in str(each.message)]
    assert len(texts) == 1 and "validation: its batches lack the column(s) 'name', " in texts[0]
    assert len(result.trials) == 3 and result.best.metrics["loss"] == 0
    for use in (result.best.evaluate, result.best.predict):
        with pytest.warns(UserWarning, match=LACK):
            use(held_out, build=lambda config: Maybe(False))

    def naming(config):
        model = Maybe(False)
        model.columns_read = ["x", "id"]
        model.train_batch = lambda batch: {"loss": 1.0}
        return model

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        search(naming, train, held_out, tmp_path / "b", workers=workers)
    assert not any("its batches lack" in str(each.message) for each in seen)


@pytest.mark.parametrize("workers", [0, 1])
def test_evaluation_errors_name_omitted_columns(tmp_path, written, workers):
    train, held_out = differing(written)

    def build(config):
        model = Maybe(config["whole"])
        if not config["whole"]:
            model.columns_read = ["x"]
            model.train_batch = lambda batch: {"loss": 1.0}
        return model

    said = f"'NoneType' object has no attribute 'shape'.*; {LACK}: {REASON}"
    with pytest.raises(RunError, match=said):
        cerebro.search(build, {"whole": [True]}, train, validation=held_out, run=tmp_path / "a",
                       batch_size=20, epochs=1, n_trials=1, workers=workers,
                       progress=False)  # fmt: skip
    result = cerebro.search(build, {"whole": [True, False], "n": [0, 1]}, train, epochs=1,
                            validation=held_out, run=tmp_path / "b", batch_size=20,
                            searcher="grid", workers=workers,
                            progress=False)  # fmt: skip
    failed = [trial for trial in result.trials if trial.config["whole"]]
    assert len(failed) == 2 and all(trial.status == "failed" for trial in failed)
    for trial in failed:
        assert "; its batches lack the column(s) 'name': validation" in trial.error
    best = result.best
    assert not best.config["whole"]

    def needing(config):
        return Maybe(True)

    for use in (best.evaluate, best.predict):
        with pytest.raises(InputError, match=f"has no attribute 'shape'.*; {LACK}: .* 'name' is"):
            use(held_out, build=needing)


def test_training_errors_do_not_name_omitted_columns(tmp_path, written):
    train, held_out = differing(written)

    def build(config):
        model = Maybe(False)
        steps = iter(range(100))

        def train_batch(batch):
            if next(steps) >= config["a"]:
                raise ValueError("bad step")
            return {"loss": 1.0}

        model.train_batch = train_batch
        return model

    with pytest.raises(RunError) as caught:
        cerebro.search(build, {"a": [20]}, train, validation=held_out, run=tmp_path / "a",
                       batch_size=4, epochs=9, n_trials=1, workers=0, progress=False)  # fmt: skip
    assert "bad step" in str(caught.value) and "lack" not in str(caught.value)


def test_predict_checks_only_columns_in_columns_read(tmp_path, written):
    train, held_out = differing(written)

    def build(config):
        model = Maybe(False)
        model.columns_read = config["reads"]
        model.train_batch = lambda batch: {"loss": 1.0}
        model.predict = lambda data: np.concatenate([b["x"] for b in data.in_order(10, "numpy")])
        return model

    frame = pd.DataFrame({"x": [3.0, 4.0], "name": ["c", "b"]})
    reading = cerebro.search(build, {"reads": cerebro.choice([["x"]])}, train, run=tmp_path / "a",
                             batch_size=20, epochs=1, n_trials=1, workers=0,
                             progress=False).best  # fmt: skip
    assert reading.predict(held_out).tolist() == list(range(40))
    assert reading.predict(frame).tolist() == [3.0, 4.0]
    both = cerebro.search(build, {"reads": cerebro.choice([["x", "name"]])}, train,
                          run=tmp_path / "b", batch_size=20, epochs=1, n_trials=1, workers=0,
                          progress=False).best  # fmt: skip
    with pytest.raises(InputError, match="class 0 of column 'name' is 'b' here"):
        both.predict(held_out)
    with pytest.raises(InputError, match="column 'name' has 'c' in row 0"):
        both.predict(frame)


def test_fold_models_map_new_rows_by_name(tmp_path, written):
    trial = search(named, FRAME, cerebro.KFold(2), tmp_path / "a").best
    for fold in trial.folds:
        assert classes(fold.predict(NEW)) == [1, 0]
        with pytest.raises(InputError, match="class 0 of column 'city'"):
            fold.predict(written(NEW))


def test_arrow_dictionary_labels_are_mapped_by_name(tmp_path):
    """The order of labels in an Arrow dictionary is that of their first rows."""
    pa = pytest.importorskip("pyarrow")

    def table(labels, kind=None):
        column = pa.array(labels).dictionary_encode()
        return pa.table({"y": column.cast(kind) if kind else column})

    labels, others = ["mid", "low", "high"], ["low", "high", "mid"]
    made = []
    for number, kind in enumerate([None, pa.string()]):
        train = cerebro.shard(table(labels, kind), tmp_path / f"train{number}")
        rows = write(
            table(others, kind), tmp_path / f"rows{number}", train, shards=1, shuffle=False
        )
        names = train.classes["y"]
        assert [names[code] for code in rows.shard(0)["y"]] == others
        held_out = cerebro.shard(table(others, kind), tmp_path / f"held_out{number}")
        made.append((train, held_out))
    assert made[0][0].classes["y"] == labels
    assert made[0][1].classes["y"] == others  # which a search refuses
    assert made[1][0].classes == made[1][1].classes


def test_text_in_a_numeric_column_is_refused(tmp_path, written):
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
        with pytest.raises(InputError, match=r"column 'x' has .*'low' in row 0\)?, but num"):
            use(text)
