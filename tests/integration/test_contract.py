"""The public surface, as design and documentation promise it.

Signatures are compared with literals: a name, a default or a ``*`` that moves is a
change that users notice. The rest calls what other tests do not call through
`cerebro.search`: kinds of models and data, settings that shape a run, and what can
be done with a run afterwards.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import sqlite3
import struct
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import cerebro
import cerebro._core as _core
from cerebro.errors import CorruptDataError, InputError

torch = pytest.importorskip("torch")
functional = torch.nn.functional

# --- names and signatures ----------------------------------------------------

SEARCH = (
    "(build, space, data, *, epochs, n_trials=None, validation=None, searcher='random', "
    "metric='loss', mode=None, select='best', batch_size=None, eval_batch_size=None, "
    "drop_last=False, stop=None, points=(), width=None, workers=None, threads=1, "
    "devices='auto', seed=0, run=None, if_exists='error', keep='best', max_retries=3, "
    "unit_timeout=None, time_limit=None, stagger=True, asynchronous=False, "
    "live_models=None, deterministic='warn', state_dir=None, callbacks=(), "
    "progress='auto', executor=None, workers_per_device=None, shuffle=None, "
    "background=False)"
)
MODEL = (
    "(net, *, optimizer, loss=None, metrics=None, epoch_metrics=None, inputs='x', "
    "target='y', step=None, augment=None, scheduler=None, scheduler_step='epoch', "
    "clip_norm=None, accumulate=1, amp=None, graph=None, state='all'"
)
SIGNATURES = {
    "shard": "(source, path, *, shards=None, columns=None, dtypes=None, shuffle=True, seed=0, "
    "exist_ok=False, progress='auto', missing=None, unknown=None, size=None)",
    "search": SEARCH,
    "open": "(run=None, *, build=None)",
    "replay": "(run, trial, build=None, *, data=None, epochs=None)",
    "visit_order": "(trial, epoch, shards, *, stagger=True)",
    "trial_seed": "(seed, trial)",
    "uniform": "(low, high, step=None)",
    "loguniform": "(low, high)",
    "integer": "(low, high, step=1, log=False)",
    "choice": "(options)",
    "normal": "(mean, std)",
    "when": "(name, value, space)",
    "Dataset.split": "(self, *fractions, stratify=None, groups=None, seed=0)",
    "Dataset.select": "(self, rows)",
    "Dataset.with_transforms": "(self, transforms)",
    "Dataset.shard": "(self, index)",
    "Dataset.verify": "(self)",
    "Result.top": "(self, n)",
    "Result.summary": "(self)",
    "Result.to_dataframe": "(self)",
    "Result.plot": "(self, metric=None, *, trials=None, kind='curves')",
    "Trial.load": "(self, epoch='best', build=None, *, fold=None)",
    "transforms.Pad": "(value=0, max_length=None, multiple_of=1)",
}

# Parameters behind these are ours to add.
BEGINNINGS = {
    "Dataset.batches": "(self, batch_size, *, seed=0, epoch=0, shard=None, shuffle=True, "
    "drop_last=False, framework='torch', device='cpu', start=0",
    "check": "(build, space, data, *, validation=None",
    "images": "(folder, size",
    "Dataset.stats": "(self, column",
    "Trial.evaluate": "(self, data",
    "Trial.predict": "(self, data",
    "Trial.export": "(self, path, format='safetensors'",
    "EarlyStopping": "(monitor='loss', patience=3, min_delta=0.0",
    "sklearn.Model": "(estimator",
    "torch.Model": MODEL,
    "torch.Model.predict": "(self, data",
    "torch.Model.evaluate": "(self, data",
}

NAMES = """
    GridSearch RandomSearch Searcher Suggestion DONE EarlyStopping RunError Info
    Result.best Result.trials Result.path Result.status Result._repr_html_
    Trial.number Trial.config Trial.status Trial.epoch Trial.metrics Trial.history
    Trial.best_epoch Trial.state_hash Trial.parent Trial.error Trial.log
    Dataset.num_rows Dataset.num_shards Dataset.columns Dataset.classes Dataset.nbytes
    Dataset.path Dataset.checksum Dataset.__len__ Dataset._repr_html_
    Replay.identical Replay.first_difference
    transforms.Scale transforms.Normalize transforms.Cast transforms.ToCHW transforms.Pad
    transforms.RandomCrop transforms.RandomHorizontalFlip
"""
FIELDS_OF_INFO = (
    "epochs steps_per_epoch total_steps batch_size trial seed device columns classes data fold "
    "steps"
)


def found(name):
    value = cerebro
    for part in name.split("."):
        value = getattr(value, part)
    return value


def plain_signature(function):
    """The signature without annotations."""
    signature = inspect.signature(function)
    empty = inspect.Parameter.empty
    parameters = [p.replace(annotation=empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=empty))


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_as_promised(name):
    assert plain_signature(found(name)) == SIGNATURES[name]


@pytest.mark.parametrize("name", BEGINNINGS)
def test_signatures_begin_as_promised(name):
    assert plain_signature(found(name)).startswith(BEGINNINGS[name])


def test_every_public_name_exists():
    for name in NAMES.split():
        found(name)
    fields = list(cerebro.Info.__dataclass_fields__)
    assert fields == FIELDS_OF_INFO.split()


def test_frameworks_are_not_imported_with_the_package():
    others = {"torch", "sklearn", "jax", "ray", "optuna", "scipy"}
    code = f"import sys, cerebro; print(sorted({others} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


def environment():
    return {**os.environ, "PYTHONPATH": str(Path(cerebro.__file__).parent.parent)}


# --- models --------------------------------------------------------------------


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


def build_torch(config, info):
    net = torch.nn.Sequential(
        torch.nn.Linear(6, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.25),
        torch.nn.Linear(8, 2),
    )
    optimizer = torch.optim.AdamW(net.parameters(), lr=config["lr"])
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config["lr"], total_steps=info.total_steps
    )
    return cerebro.torch.Model(
        net,
        optimizer=optimizer,
        loss=functional.cross_entropy,
        metrics={"accuracy": accuracy},
        scheduler=schedule,
        scheduler_step="batch",
    )


class Linear:
    """Least squares through the bare protocol, in any framework."""

    def __init__(self, framework, rate):
        if framework is not None:
            self.framework = framework
        self.rate = rate
        self.w = np.zeros(6)

    def train_batch(self, batch):
        x, y = self.arrays(batch)
        error = x @ self.w - y
        self.w = self.w - self.rate * x.T @ error / len(y)
        return {"loss": np.mean(error**2), "weighted": (np.abs(error).mean(), len(y))}

    def eval_batch(self, batch):
        x, y = self.arrays(batch)
        return {"loss": np.mean((x @ self.w - y) ** 2), "rows": float(len(y))}

    def predict_batch(self, batch):
        return self.arrays(batch)[0] @ self.w

    def arrays(self, batch):
        kind = type(batch["x"])
        name = f"{kind.__module__}.{kind.__name__}"
        expected = {
            "numpy": "numpy.ndarray",
            "torch": "torch.Tensor",
            "jax": "jaxlib",
            "dlpack": "cerebro._core.Tensor",
        }
        assert name.startswith(expected[getattr(self, "framework", "dlpack")]), name
        return tuple(np.from_dlpack(batch[c]).astype(np.float64) for c in ("x", "y"))

    def state_dict(self):
        return {"w": self.w, "notes": {"step": 1, "kind": "least squares"}}

    def load_state_dict(self, state):
        assert state["notes"] == {"step": 1, "kind": "least squares"}
        self.w = state["w"]


def build_numpy(config):
    return Linear("numpy", config["lr"])


class Probe(Linear):
    """Reports where and how it computes, as metrics."""

    def train_batch(self, batch):
        deterministic = torch.are_deterministic_algorithms_enabled()
        return {
            **super().train_batch(batch),
            "threads": float(torch.get_num_threads()),
            "deterministic": float(deterministic),
            "draw": random.random() + np.random.random() + float(torch.rand(())),
        }


def build_probe(config):
    return Probe("torch", config["lr"])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(213, 6)).astype(np.float32)
    y = (x.sum(axis=1) > 0).astype(np.int64)
    return cerebro.shard({"x": x, "y": y}, tmp_path_factory.mktemp("set") / "data", shards=5)


SPACE = {"lr": cerebro.loguniform(1e-3, 1e-1)}


def run(data, folder, build=build_numpy, **settings):
    settings = {
        "epochs": 2,
        "validation": 0.25,
        "n_trials": 3,
        "batch_size": 16,
        "seed": 5,
        "workers": 0,
        "progress": False,
        **settings,
    }
    return cerebro.search(build, settings.pop("space", SPACE), data, run=folder, **settings)


def hashes(result):
    return [[epoch["state_hash"] for epoch in trial.history] for trial in result.trials]


@pytest.fixture(scope="module")
def result(data, tmp_path_factory):
    """A PyTorch run with states kept."""
    folder = tmp_path_factory.mktemp("runs") / "torch"
    return run(data, folder, build_torch, metric="accuracy", keep="all")


# --- a run afterwards ------------------------------------------------------------


def test_a_loaded_torch_model_predicts_evaluates_and_trains(result, data):
    trial, valid = result.best, data.split(0.75, 0.25)[1]
    model = trial.load()
    assert isinstance(model, cerebro.torch.Model)
    assert not model.net.training
    x = np.concatenate([valid.shard(i)["x"] for i in range(5)])
    y = np.concatenate([valid.shard(i)["y"] for i in range(5)])
    predicted = trial.predict(valid)
    assert torch.allclose(predicted, model.net(torch.from_numpy(x)))
    assert torch.equal(predicted, trial.predict(valid))
    measured = trial.evaluate(valid)
    assert measured["accuracy"] == pytest.approx(float(accuracy(predicted, torch.tensor(y))))
    assert measured == {name: trial.metrics[f"val_{name}"] for name in ("loss", "accuracy")}
    assert trial.evaluate() == measured
    model = trial.load(0)
    model.train_batch(next(iter(data.batches(8))))
    assert model.net.training


def test_any_kept_epoch_can_be_loaded(result):
    trial = result.trials[0]
    first, last = trial.load(0).net, trial.load(epoch="last").net
    assert not torch.equal(first[0].weight, last[0].weight)
    assert torch.equal(trial.load(1).net[0].weight, last[0].weight)
    with pytest.raises(InputError, match="no state of epoch 7; kept are 0, 1"):
        trial.load(7)


def test_invalid_load_evaluate_and_replay_calls_are_refused(data, tmp_path):
    result = run(data, tmp_path / "run", n_trials=1)
    with pytest.raises(InputError, match="'best', 'last' or an epoch's number, not 'first'"):
        result.best.load("first")
    with pytest.raises(InputError, match=r"evaluate needs a cerebro\.Dataset, not int"):
        result.best.evaluate(3)
    with pytest.raises(InputError, match="trial must be a whole number of at least 0, not 'a'"):
        cerebro.replay(result, "a")
    with pytest.raises(InputError, match="has no trial 1: it has 0 to 0"):
        cerebro.replay(result, 1)
    result.best.state_path().unlink()
    with pytest.raises(CorruptDataError, match=r"0-epoch-1\.safetensors is missing"):
        result.best.load()


def test_exports_open_without_cerebro(result, tmp_path):
    weights = result.best.load().net.state_dict()
    safetensors = pytest.importorskip("safetensors.torch")
    result.best.export(tmp_path / "net.safetensors")
    result.best.export(str(tmp_path / "net.pt"), format="torch")
    for loaded in (
        safetensors.load_file(tmp_path / "net.safetensors"),
        torch.load(tmp_path / "net.pt", weights_only=True),
    ):
        assert loaded.keys() == weights.keys()
        assert all(torch.equal(loaded[name], value) for name, value in weights.items())
    with pytest.raises(InputError, match="format must be one of"):
        result.best.export(tmp_path / "net", format="pickle")


def test_paths_work_where_datasets_do(data, result, tmp_path):
    valid = data.split(0.75, 0.25)[1]
    a = run(str(data.path), tmp_path / "a", validation=valid, n_trials=1)
    b = run(data.path, str(tmp_path / "b"), validation=data.path, n_trials=1)
    assert set(a.best.metrics) == set(b.best.metrics)
    assert len(result.best.predict(data.path)) == len(result.best.predict(str(data.path))) == 213
    assert result.best.evaluate(data.path) == result.best.evaluate(data)
    assert cerebro.replay(
        str(result.path), np.int64(0), data=data.path, epochs=np.int64(1)
    ).identical


def test_a_run_as_a_table(result):
    frame = result.to_dataframe()
    assert list(frame["number"]) == [0, 1, 2]
    assert list(frame["config.lr"]) == [trial.config["lr"] for trial in result.trials]
    assert list(frame["metrics.accuracy"]) == [t.metrics["val_accuracy"] for t in result.trials]
    assert list(frame["state_hash"]) == [trial.state_hash for trial in result.trials]
    assert f"best: trial {result.best.number}" in result.summary()
    for html in (result._repr_html_(), result.best._repr_html_()):
        assert "<table" in html
        assert "<script" not in html
    assert result.top(3)[0].number == result.best.number


@pytest.mark.parametrize("kind", ["curves", "parallel", "importance", "gantt"])
def test_every_kind_of_plot_is_drawn(result, kind, tmp_path):
    figure_module = pytest.importorskip("matplotlib.figure")
    figure = result.plot("loss", trials=[0, 2], kind=kind)
    assert isinstance(figure, figure_module.Figure)
    figure.savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000


def test_the_store_can_be_read_with_sqlite_alone(result):
    connection = sqlite3.connect(result.path / "run.sqlite")
    tables = {n for (n,) in connection.execute("SELECT name FROM sqlite_master WHERE type='table'")}
    stored = connection.execute(
        "SELECT name, value FROM metrics WHERE trial = 1 AND epoch = 0"
    ).fetchall()
    meta = dict(connection.execute("SELECT key, value FROM meta"))
    (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
    connection.close()
    assert tables == {
        "meta", "trials", "epochs", "metrics", "units", "decisions", "extensions", "events",
        "actions",
    }  # fmt: skip
    assert dict(stored) == result.trials[1].history[0]["metrics"]
    recipe = json.loads(meta["build"])
    assert recipe["qualname"] == "build_torch"
    assert recipe["file"] == str(Path(__file__).resolve())
    assert json.loads(meta["environment"])["threads"] == 1
    assert mode == "wal"


def test_a_state_is_a_safetensors_file_without_holes(result):
    packed = result.best.state_path().read_bytes()
    (size,) = struct.unpack("<Q", packed[:8])
    header = json.loads(packed[8 : 8 + size])
    json.loads(header.pop("__metadata__")["cerebro"])
    assert list(header) == sorted(header)
    assert {"/model/net/0.weight", "/generators/torch"} <= header.keys()
    places = sorted(entry["data_offsets"] for entry in header.values())
    ends = [0, *(end for _, end in places)]
    assert [start for start, _ in places] == ends[:-1]
    assert len(packed) == 8 + size + ends[-1]
    assert _core.xxh3_128(packed) == result.best.state_hash


def test_the_run_folder_holds_what_it_should(result):
    assert {p.name for p in result.path.iterdir()} >= {"run.sqlite", "states", "trials", "control"}
    states = {p.name for p in (result.path / "states").iterdir()}
    assert states == {f"{t}-epoch-{e}.safetensors" for t in range(3) for e in range(2)}


# --- kinds of models ---------------------------------------------------------------


@pytest.mark.parametrize("framework", [None, "numpy", "torch", "jax", "dlpack"])
def test_models_get_the_batches_they_ask_for(data, tmp_path, framework):
    if framework == "jax":
        pytest.importorskip("jax")

    def build(config):
        return Linear(framework, config["lr"])

    result = run(data, tmp_path / "run", build, n_trials=1, eval_batch_size=20)
    valid = data.split(0.75, 0.25)[1]
    predicted = result.best.predict(valid)
    x = np.concatenate([valid.shard(i)["x"] for i in range(5)])
    assert np.array_equal(predicted, x.astype(np.float64) @ result.best.load().w)
    assert result.best.evaluate()["loss"] == result.best.metrics["val_loss"]
    # The 53 rows of validation, in batches of even sizes.
    assert result.best.metrics["rows"] == pytest.approx(sum(n * n for n in (18, 18, 17)) / 53)
    target = result.best.export(tmp_path / "model.safetensors")
    safetensors = pytest.importorskip("safetensors.numpy")
    assert np.array_equal(safetensors.load_file(target)["/w"], result.best.load().w)


def test_scikit_learn_models_train_evaluate_export_and_replay(data, tmp_path):
    linear = pytest.importorskip("sklearn.linear_model")

    def build(config):
        estimator = linear.SGDClassifier(loss="log_loss", alpha=config["alpha"])
        return cerebro.sklearn.Model(estimator)

    space = {"alpha": cerebro.loguniform(1e-5, 1e-2)}
    result = run(data, tmp_path / "run", build, space=space, metric="accuracy")
    valid = data.split(0.75, 0.25)[1]
    model = result.best.load()
    x = np.concatenate([valid.shard(i)["x"] for i in range(5)])
    y = np.concatenate([valid.shard(i)["y"] for i in range(5)])
    assert np.array_equal(result.best.predict(valid), model.estimator.predict(x))
    measured = result.best.evaluate(valid)
    assert measured["accuracy"] == pytest.approx(np.mean(model.estimator.predict(x) == y))
    result.best.export(tmp_path / "model.safetensors")
    assert cerebro.replay(result, result.best, build).identical


def test_ragged_rows_and_random_transforms_give_the_same_states_anywhere(tmp_path):
    rng = np.random.default_rng(0)
    tokens = [rng.integers(1, 20, size=rng.integers(1, 9)) for _ in range(90)]
    images = rng.integers(0, 256, size=(90, 6, 6, 3), dtype=np.uint8)
    columns = {"tokens": tokens, "image": images, "y": rng.integers(0, 2, size=90)}
    kinds = cerebro.transforms
    data = cerebro.shard(columns, tmp_path / "data", shards=3).with_transforms(
        {
            "tokens": [kinds.Pad(max_length=6, multiple_of=2)],
            "image": [
                kinds.RandomCrop(4, padding=1),
                kinds.RandomHorizontalFlip(),
                kinds.Scale(1 / 255),
                kinds.Normalize(0.5, 0.25),
                kinds.ToCHW(),
            ],
        }
    )

    def build(config):
        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.words = torch.nn.Embedding(20, 4, padding_idx=0)
                self.pixels = torch.nn.Conv2d(3, 4, 3)
                self.head = torch.nn.Linear(8, 2)

            def forward(self, words, mask, image):
                assert words.shape == mask.shape
                assert image.shape[1:] == (3, 4, 4)
                means = (self.words(words) * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
                return self.head(torch.cat([means, self.pixels(image).amax((2, 3))], 1))

        net = Net()
        return cerebro.torch.Model(
            net,
            optimizer=torch.optim.SGD(net.parameters(), lr=config["lr"]),
            loss=functional.cross_entropy,
            inputs={"words": "tokens", "mask": "tokens_mask", "image": "image"},
        )

    runs = [run(data, tmp_path / f"run{w}", build, workers=w, n_trials=2) for w in (0, 2)]
    assert hashes(runs[0]) == hashes(runs[1])
    assert runs[1].best.predict(data).shape == (90, 2)


def test_a_table_with_class_names_and_a_whole_pass_metric(tmp_path):
    pandas = pytest.importorskip("pandas")
    metrics = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    frame = pandas.DataFrame(
        {
            "age": rng.normal(size=160),
            "fare": rng.normal(size=160),
            "port": pandas.Categorical(rng.choice(["a", "b"], 160)),
        }
    )
    frame["lived"] = np.where(frame["age"] + frame["fare"] > 0, "yes", "no")
    data = cerebro.shard(
        frame,
        tmp_path / "data",
        columns={"x": ["age", "fare", "port"], "y": "lived"},
        dtypes={"x": "float32"},
    )
    assert data.classes == {"x": None, "y": ["no", "yes"]}
    counts = data.stats("y").counts

    def build(config, info):
        assert info.classes["y"] == ["no", "yes"]
        weights = torch.tensor([1.0 / counts[name] for name in info.classes["y"]])
        net = torch.nn.Linear(*info.columns["x"].shape, len(weights))
        return cerebro.torch.Model(
            net,
            optimizer=torch.optim.Adam(net.parameters(), lr=0.05),
            loss=torch.nn.CrossEntropyLoss(weight=weights),
            epoch_metrics={"auc": lambda out, y: metrics.roc_auc_score(y, out[:, 1] - out[:, 0])},
        )

    result = run(data, tmp_path / "run", build, space={}, n_trials=1, metric="auc")
    assert result.best.metrics["auc"] > 0.8
    assert result.best.evaluate()["auc"] == result.best.metrics["val_auc"]


# --- settings -------------------------------------------------------------------


def plain_weights(train, config, trial, epochs, stagger):
    """What a loop by hand gives."""
    model = Linear("numpy", config["lr"])
    for epoch in range(epochs):
        options = {"shuffle": "shards", "trial": trial if stagger else None}
        for batch in train.batches(16, seed=5, epoch=epoch, framework="numpy", **options):
            model.train_batch(batch)
    return model.w


def test_without_stagger_two_groups_are_open_and_only_the_order_differs(tmp_path):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(213, 6)).astype(np.float32)
    rows = {"x": x, "y": (x.sum(axis=1) > 0).astype(np.int64)}
    data = cerebro.shard(rows, tmp_path / "data", shards=14)  # four groups
    train = data.split(0.75, 0.25)[0]
    together = run(data, tmp_path / "inline", stagger=False, n_trials=4)
    done = Counter()
    for unit in together.units():
        if unit["kind"] == "eval":
            continue
        position = unit["epoch"] * 4 + unit["step"]
        assert unit["part"] == unit["step"]
        assert done[unit["trial"]] == position
        assert position <= min(done[trial] for trial in range(4)) + 1
        done[unit["trial"]] += 1
    apart = run(data, tmp_path / "apart", shuffle="shards", n_trials=4)
    for unit in apart.units():
        visits = [*cerebro.visit_order(unit["trial"], unit["epoch"], 4), -1]
        assert unit["part"] == visits[unit["step"]]
    for trial in range(4):
        for result, stagger in ((together, False), (apart, True)):
            expected = plain_weights(train, result.trials[trial].config, trial, 2, stagger)
            assert np.array_equal(result.trials[trial].load("last").w, expected)
    assert hashes(run(data, tmp_path / "two", stagger=False, n_trials=4, workers=2)) == hashes(
        together
    )


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_are_per_worker_and_workers_do_not_matter(data, tmp_path, threads):
    before = torch.get_num_threads()
    settings = {"threads": threads, "n_trials": 2, "deterministic": True}
    runs = [run(data, tmp_path / f"{w}", build_probe, workers=w, **settings) for w in (0, 2)]
    assert hashes(runs[0]) == hashes(runs[1])
    for result in runs:
        for trial in result.trials:
            assert trial.metrics["train_threads"] == threads
            assert trial.metrics["train_deterministic"] == 1.0
    assert torch.get_num_threads() == before
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("workers", [0, 1])
def test_the_callers_torch_settings_hold_in_the_run_and_afterwards(data, tmp_path, workers):
    class Flags(Linear):
        def eval_batch(self, batch):
            wide = torch.get_default_dtype() == torch.float64
            precise = torch.get_float32_matmul_precision() == "high"
            return {"loss": 0.0, "flags": 2.0 * wide + precise}

    def build(config):
        model = Flags("torch", 0.1)
        model.dtype = torch.zeros(1).dtype
        return model

    precision = torch.get_float32_matmul_precision()
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("high")
    try:
        wide = run(data, tmp_path / "wide", build, workers=workers, n_trials=1)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision(precision)
    usual = run(data, tmp_path / "usual", build, workers=workers, n_trials=1)
    assert (wide.best.metrics["flags"], usual.best.metrics["flags"]) == (3.0, 0.0)
    assert (wide.best.evaluate()["flags"], usual.best.evaluate()["flags"]) == (3.0, 0.0)
    assert (wide.best.load().dtype, usual.best.load().dtype) == (torch.float64, torch.float32)
    assert (torch.get_default_dtype(), torch.get_float32_matmul_precision()) == (
        torch.float32,
        precision,
    )


def test_the_callers_generators_and_folder_are_left_alone(data, tmp_path):
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = random.random(), np.random.random(), float(torch.rand(()))
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    result = run(data, tmp_path / "run", build_probe, n_trials=2)
    result.best.load()
    result.best.evaluate()
    result.best.predict(data)
    assert (random.random(), np.random.random(), float(torch.rand(()))) == expected


def test_workers_are_used_again_by_the_next_search(data, tmp_path):
    class Named(Linear):
        def eval_batch(self, batch):
            return {"loss": float(os.getpid())}

    def build(config):
        return Named("numpy", config["lr"])

    runs = [run(data, tmp_path / f"{n}", build, workers=1, n_trials=1) for n in range(2)]
    first, second = (result.best.metrics["loss"] for result in runs)
    assert first == second != os.getpid()


def test_live_models_state_dir_and_numpy_numbers_change_no_state(data, tmp_path):
    seen = set()

    class Watch:
        def on_unit_end(self, trial, metrics):
            seen.update(path.name for path in (tmp_path / "slots").iterdir())

    usual = run(data, tmp_path / "usual", keep="last")
    other = run(
        data,
        tmp_path / "other",
        epochs=np.int64(2),
        n_trials=np.int32(3),
        batch_size=np.int64(16),
        seed=np.uint8(5),
        workers=np.int64(0),
        validation=np.float64(0.25),
        live_models=1,
        state_dir=tmp_path / "slots",
        keep="last",
        callbacks=[Watch()],
    )
    assert hashes(usual) == hashes(other)
    assert {"0.a", "0.b", "2.a", "2.b"} <= seen
    assert [path.name for path in (tmp_path / "slots").iterdir()] == ["cerebro-run"]
    names = {path.name for path in (other.path / "states").iterdir()}
    assert names == {f"{trial}-epoch-1.safetensors" for trial in range(3)}
    # One worker unpacks states that it had to drop, but nothing hops.
    assert not any(unit["hopped"] for unit in other.units())


def test_select_last_ranks_by_the_last_epoch(data, tmp_path):
    class Worsening(Linear):
        epoch = 0

        def begin_epoch(self, epoch):
            self.epoch = epoch

        def eval_batch(self, batch):
            # The trial with the high rate is best at first and worst at last.
            return {"loss": self.rate * self.epoch - self.rate}

        def state_dict(self):
            return {**super().state_dict(), "epoch": self.epoch}

        def load_state_dict(self, state):
            super().load_state_dict(state)
            self.epoch = state["epoch"]

    def build(config):
        return Worsening("numpy", config["lr"])

    settings = {"space": {"lr": [0.25, 0.5]}, "searcher": "grid", "n_trials": None, "epochs": 3}
    best = run(data, tmp_path / "best", build, **settings)
    last = run(data, tmp_path / "last", build, select="last", **settings)
    assert (best.best.number, best.best.metrics["loss"], best.best.best_epoch) == (1, -0.5, 0)
    assert (last.best.number, last.best.metrics["loss"], last.best.best_epoch) == (0, 0.25, 0)
    assert [trial.number for trial in last.top(5)] == [0, 1]
    assert last.best.state_hash == last.best.history[2]["state_hash"]


def test_points_come_first_and_the_rest_is_as_without_them(data, tmp_path):
    space = {"lr": cerebro.loguniform(1e-4, 1e-1), "deep": {"n": cerebro.integer(1, 9)}}
    plain = run(data, tmp_path / "plain", space=space, epochs=1)
    points = [{"lr": np.float64(0.03)}]
    begun = run(data, tmp_path / "begun", space=space, epochs=1, points=points)
    assert begun.trials[0].config == {"lr": 0.03, "deep": plain.trials[0].config["deep"]}
    assert [t.config for t in begun.trials[1:]] == [t.config for t in plain.trials[1:]]


def test_configurations_reach_build_as_they_were_drawn(data, tmp_path):
    seen = []

    def build(config):
        seen.append(config)
        return Linear("numpy", config["lr"])

    space = {
        "lr": cerebro.uniform(0.01, 0.02),
        "n": cerebro.integer(1, 5),
        "z": cerebro.normal(0, 1),
        "name": cerebro.choice(["a", None, True, 2, 2.5]),
        "sizes": [[8], [8, 8]],
        "fixed": "sgd",
        "nested": {"p": cerebro.uniform(0, 1)},
    }
    result = run(data, tmp_path / "run", build, space=space, n_trials=8, epochs=1)
    expected = [cerebro.Space(space).sample(5, trial) for trial in range(8)]
    assert [trial.config for trial in cerebro.open(result.path).trials] == expected
    assert all(config in expected for config in seen)
    assert {type(c["n"]) for c in seen} == {int}
    assert {type(c["lr"]) for c in seen} == {float}


def test_drop_last_and_info_agree_about_steps(data, tmp_path):
    infos = []

    def build(config, info):
        infos.append(info)
        return Linear("numpy", config["lr"])

    train = data.split(0.75, 0.25)[0]
    for drop_last in (True, False):
        infos.clear()
        result = run(data, tmp_path / str(drop_last), build, n_trials=2, drop_last=drop_last)
        batches = list(train.batches(16, drop_last=drop_last, framework="numpy"))
        info = infos[-1]
        assert (info.steps_per_epoch, info.total_steps) == (len(batches), 2 * len(batches))
        rows = sum(len(batch["y"]) for batch in batches)
        units = [u for u in result.units() if u["kind"] == "train" and u["epoch"] == 0]
        assert sum(u["rows"] for u in units if u["trial"] == 1) == rows
        assert (info.epochs, info.batch_size, info.device) == (2, 16, "cpu")
        assert info.seed == cerebro.trial_seed(5, info.trial)
        assert info.data.num_rows == len(train) == 160


def test_without_a_name_a_run_goes_below_runs(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = run(data, None, n_trials=1, epochs=1)
    second = run(data, None, n_trials=1, epochs=1)
    assert Path(first.path).resolve().parent == Path(second.path).resolve().parent
    assert Path(first.path).resolve().parent == tmp_path / "runs"
    assert first.path != second.path
    assert cerebro.open().path.resolve() == second.path.resolve()


def test_run_accepts_an_empty_folder_and_refuses_an_existing_run(data, tmp_path):
    (tmp_path / "empty").mkdir()
    made = run(data, tmp_path / "empty", n_trials=1, epochs=1)
    with pytest.raises(InputError, match="exists"):
        run(data, tmp_path / "empty", n_trials=1, epochs=1)
    again = run(data, tmp_path / "empty", n_trials=1, epochs=1, if_exists="resume")
    assert again.trials[0].history == made.trials[0].history


def test_an_early_stop_depends_on_the_trial_alone(data, tmp_path):
    stop = cerebro.EarlyStopping("val_loss", patience=2, min_delta=1e-3)
    runs = [
        run(data, tmp_path / f"{w}", epochs=8, stop=stop, workers=w, n_trials=4) for w in (0, 2)
    ]
    assert [(t.status, t.epoch) for t in runs[0].trials] == [
        (t.status, t.epoch) for t in runs[1].trials
    ]
    assert {t.status for t in runs[0].trials} <= {"stopped", "finished"}
    assert hashes(runs[0]) == hashes(runs[1])


# --- while it runs ------------------------------------------------------------------


def test_callbacks_can_load_what_was_just_finished(data, tmp_path):
    seen = []

    class Loads:
        def on_run_start(self, run):
            self.run = run

        def on_epoch_end(self, trial, metrics):
            seen.append((trial, trial.epoch, trial.load("last").w, metrics["loss"]))

        def on_run_end(self, result):
            self.run.refresh()
            seen.append(self.run.status)

    result = run(data, tmp_path / "run", n_trials=1, keep="all", callbacks=[Loads()])
    assert seen.pop() == "finished"
    for number, (trial, epoch, weights, loss) in enumerate(seen):
        assert trial.epoch == epoch == number + 1  # a snapshot
        assert np.array_equal(weights, result.trials[0].load(number).w)
        assert loss == result.trials[0].history[number]["metrics"]["val_loss"]


def test_a_run_can_be_opened_while_another_process_trains_it(data, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import sys
            sys.path.insert(0, {str(Path(__file__).parent)!r})
            import cerebro
            from test_contract import build_numpy

            class Wait:
                def on_epoch_end(self, trial, metrics):
                    if trial.epoch == 1:
                        trial.load("last")  # so that it is on disk
                        print("ready", flush=True)
                        sys.stdin.readline()

            cerebro.search(
                build_numpy, {{"lr": [0.1]}}, {str(data.path)!r}, epochs=2, validation=0.25,
                n_trials=1, batch_size=16, workers=0, run="run", progress=False, callbacks=[Wait()],
            )
            """
        )
    )
    with subprocess.Popen(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout.readline() == "ready\n"
        result = cerebro.open(tmp_path / "run")
        assert result.status == "running"
        assert (result.trials[0].status, result.trials[0].epoch) == ("running", 1)
        assert result.best.load("last").w.shape == (6,)
        assert "running" in result.summary()
        process.stdin.write("\n")
        process.stdin.close()
        assert process.wait(60) == 0
    assert (result.status, result.trials[0].epoch) == ("running", 1)
    result.refresh()
    assert (result.status, result.trials[0].status) == ("finished", "finished")
