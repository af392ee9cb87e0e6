"""Arrays, tables and PyTorch datasets given where a `Dataset` is expected."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

import cerebro
from cerebro.errors import CerebroError, InputError, RunError

torch = pytest.importorskip("torch")

RNG = np.random.default_rng(3)
X = RNG.normal(size=(60, 4))
Y = (X @ [1.0, -1.0, 0.5, 2.0] > 0).astype(np.int64)
NAMES = np.array(["no", "yes"])[Y]
SPACE = {"lr": np.array([0.1, 0.5]), "batch_size": 10}


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


def build(config, info):
    net = torch.nn.Linear(4, info.num_classes("y"))
    optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"])
    loss = torch.nn.functional.cross_entropy
    return cerebro.torch.Model(net, optimizer=optimizer, loss=loss, metrics={"accuracy": accuracy})


def broken(config):
    raise ValueError("broken")


def search(data, validation, run, build=build, **given):
    given = {"epochs": 2, "searcher": "grid", "metric": "accuracy", "workers": 0} | given
    given.setdefault("progress", False)
    return cerebro.search(build, SPACE, data, validation=validation, run=run, **given)


def hashes(result):
    return [[epoch.state_hash for epoch in trial.record.epochs] for trial in result.trials]


class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, row):
        return X[row], Y[row]


def sources():
    """The same rows of columns x and y."""
    yield "pair", (X, Y)
    yield "lists", {"x": X, "y": Y.tolist()}
    yield "bunch", pytest.importorskip("sklearn.utils").Bunch(data=X, target=Y, target_names=None)
    yield "tensors", torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    yield "samples", Samples()
    yield (
        "frames",
        (pytest.importorskip("pandas").DataFrame(X), pytest.importorskip("pandas").Series(Y)),
    )


def test_any_kind_of_rows_is_trained_as_the_dataset_of_them(tmp_path):
    written = cerebro.shard({"x": X, "y": Y}, tmp_path / "d", dtypes={"x": "float32"})
    expected = search(written, 0.25, tmp_path / "expected")
    for name, source in sources():
        result = search(source, 0.25, tmp_path / name)
        assert hashes(result) == hashes(expected), name
        assert (result.path / "data" / "manifest.json").exists()


class RandomSamples(Samples):
    """Samples with a random transform, as image datasets have for augmentation."""

    def __getitem__(self, row):
        return X[row] * torch.rand(1).item(), Y[row]


def test_a_random_transform_of_a_dataset_is_told(tmp_path):
    with pytest.warns(UserWarning, match=r"RandomSamples differs when .*\(column 'x'\)"):
        search(RandomSamples(), 0.25, tmp_path / "run")


def test_rows_are_accepted_by_position_and_by_keyword(tmp_path):
    given = {"epochs": 1, "searcher": "grid", "workers": 0, "progress": False, "validation": 0.2}
    calls = [
        lambda run: cerebro.search(build, SPACE, (X, Y), run=run, **given),
        lambda run: cerebro.search(build, SPACE, data=(X, Y), run=run, **given),
        lambda run: cerebro.search(build, space=SPACE, data={"x": X, "y": Y}, run=run, **given),
        lambda run: cerebro.search(run=run, data=(X, Y), space=SPACE, build=build, **given),
        lambda run: cerebro.search(build, SPACE, data=X_and_dataset(run), run=run, **given),
    ]
    found = [hashes(call(tmp_path / f"run{n}")) for n, call in enumerate(calls)]
    assert all(each == found[0] for each in found)
    assert cerebro.check(build=build, space=SPACE, data=(X, Y), validation=(X[:9], Y[:9]))
    assert cerebro.plan(space=SPACE, data=(X, Y), epochs=1, searcher="grid").trials == 2
    with pytest.raises(TypeError, match="multiple values for argument 'data'"):
        cerebro.search(build, SPACE, (X, Y), data=(X, Y), **given)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'epochs'"):
        cerebro.search(build, SPACE, data=(X, Y))


def X_and_dataset(run):
    """A dataset beside the run that is the one that rows are written as."""
    return cerebro.shard(
        {"x": X.astype(np.float32), "y": Y}, run.with_name(f"{run.name}-data"), progress=False
    )


def test_given_rows_work_with_workers_folds_and_resume(tmp_path):
    result = search((X, Y), cerebro.KFold(3), tmp_path / "a", workers=2)
    assert hashes(result) == hashes(search((X, Y), cerebro.KFold(3), tmp_path / "b"))
    further = cerebro.resume(result, epochs=3)
    again = search((X, Y), cerebro.KFold(3), tmp_path / "b", epochs=3, if_exists="resume")
    assert hashes(further) == hashes(again)
    assert [trial.epoch for trial in further.trials] == [3, 3]
    with pytest.raises(InputError, match="made from other data"):
        search((X + 1, Y), cerebro.KFold(3), tmp_path / "b", epochs=4, if_exists="resume")
    assert hashes(cerebro.open(tmp_path / "b")) == hashes(again)


def test_a_run_that_has_moved_finds_its_rows(tmp_path):
    path = search((X, Y), (X[:20], Y[:20]), tmp_path / "a").path
    shutil.move(path, tmp_path / "elsewhere")
    result = cerebro.open(tmp_path / "elsewhere", build=build)
    assert result.best.evaluate()["accuracy"] == result.best.metrics["val_accuracy"]
    assert cerebro.replay(result, 0).identical
    assert cerebro.resume(result, epochs=3).best.epoch == 3


def test_validation_rows_are_made_like_the_training_data(tmp_path):
    data = cerebro.shard({"x": X, "y": NAMES, "id": np.arange(60)}, tmp_path / "d",
                         dtypes={"x": "float32"})  # fmt: skip
    train = data.select(range(40)).with_transforms({"x": [cerebro.transforms.Scale(2.0)]})
    rows = [i for i in range(40, 60) if NAMES[i] == "yes"]  # code 0 of their own
    assert len(rows) > 5
    given = {
        "x": X[rows],
        "y": NAMES[rows].tolist(),
        "id": np.arange(60.0)[rows],
        "more": rows,
    }
    result = search(train, given, tmp_path / "a")
    stored = np.concatenate([data.shard(shard)["id"] for shard in range(data.num_shards)])
    at = [place for place, row in enumerate(stored) if row in rows]
    same = data.select(at).with_transforms({"x": [cerebro.transforms.Scale(2.0)]})
    for trial in result.trials:
        assert trial.evaluate(same)["accuracy"] == pytest.approx(trial.evaluate()["accuracy"])
        assert trial.evaluate(given) == pytest.approx(trial.evaluate(same))
    saved = result.saved.dataset("validation")
    assert (saved.classes["y"], set(saved.columns)) == (["no", "yes"], {"x", "y", "id"})
    assert saved.columns == train.columns


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"x": X, "y": ["yes"] * 59 + ["maybe"]}, "has 'maybe' in column 'y', which the training"),
        ((X, Y), "column 'y' has numbers, but names in the training data"),
        ({"x": X[:, :3], "y": NAMES}, r"column 'x' has rows of shape \(3\), but \(4\)"),
        ({"x": X}, "validation .* lacks the training data's column.* y"),
        ({"z": X}, "has the columns z, but the training data has x, y: give the same names"),
    ],
)
def test_validation_rows_that_do_not_fit(tmp_path, rows, message):
    with pytest.raises(InputError, match=message):
        search((X, NAMES), rows, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_invalid_data_is_refused_with_the_remedy(tmp_path):
    for data, message in (
        (X, r"single array: name it, .* or give a pair \(x, y\)"),
        (3, r"data must be a cerebro.Dataset, not int: .* as \(x, y\) or by name"),
        ((X, Y, Y), r"not tuple: .* as \(x, y\)"),
    ):
        with pytest.raises(InputError, match=message):
            search(data, None, tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_refused_search_leaves_no_files(tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(InputError, match="is a tuple"):
        cerebro.search(build, {"lr": (0, 1)}, (X, Y), epochs=1, run=tmp_path / "mine")
    assert list((tmp_path / "mine").iterdir()) == []
    (tmp_path / "mine" / "data").mkdir()
    (tmp_path / "mine" / "data" / "notes").write_text("of the user")
    with pytest.raises(InputError, match="exists already"):
        search((X, Y), 0.2, tmp_path / "mine")
    with pytest.raises(CerebroError, match="is not a complete dataset"):
        search((X, Y), 0.2, tmp_path / "mine", if_exists="resume")
    assert (tmp_path / "mine" / "data" / "notes").exists()
    with pytest.raises(RunError, match="broken"):  # a run, whose data stay
        search((X, Y), 0.2, tmp_path / "b", build=broken)
    assert (tmp_path / "b" / "data").exists()
    names = [search((X, Y), 0.2, tmp_path / "b", if_exists="new").path.name for _ in range(2)]
    assert names == ["b-2", "b-3"]


def test_check_and_plan_take_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cerebro.check(build, SPACE, (X, Y), validation=(X, Y))
    data = cerebro.shard({"x": X, "y": Y}, "d", dtypes={"x": "float32"})
    settings = {"epochs": 2, "searcher": "grid", "workers": 2, "devices": "cpu"}
    planned = cerebro.plan(SPACE, (X, Y), validation=0.2, **settings)
    assert str(planned) == str(cerebro.plan(SPACE, data, validation=0.2, **settings))
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_evaluate_and_predict_take_rows(tmp_path):
    pandas = pytest.importorskip("pandas")
    best = search((X, NAMES), 0.25, tmp_path / "a").best
    whole = best.evaluate(cerebro.Dataset(best.saved.folder / "data"))
    for rows in ((X, NAMES), {"x": X, "y": NAMES}, {"x": X.tolist(), "y": NAMES.tolist()}):
        assert best.evaluate(rows) == pytest.approx(whole)
    outputs = best.predict(X.astype(np.float32))
    frame = pandas.DataFrame({"y": NAMES, "x": list(X.astype(np.float32))})
    for rows in (X, {"x": X}, (X, NAMES), frame):
        assert torch.equal(best.predict(rows), outputs)
    with pytest.raises(InputError, match="evaluate has 'perhaps' in column 'y'"):
        best.evaluate((X[:1], ["perhaps"]))
    with pytest.raises(InputError, match="evaluate needs a cerebro"):
        best.evaluate(3)


def told(build, rows, run):
    with pytest.raises(RunError) as caught:
        search(rows, 0.25, run, build=build, metric="loss")
    return str(caught.value)


def test_hints_apply_to_data_given_as_arrays(tmp_path):
    def of_images(config):
        conv, head = torch.nn.Conv2d(3, 4, 3), torch.nn.Linear(64, 2)
        net = torch.nn.Sequential(conv, torch.nn.Flatten(), head)
        optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"])
        return cerebro.torch.Model(net, optimizer=optimizer, loss=torch.nn.functional.cross_entropy)

    bytes_ = RNG.integers(0, 255, (60, 6, 6, 3)).astype("uint8")
    hint = 'cerebro.shard(rows, folder).with_transforms({"x": [Scale(1/255), ToCHW()]})'
    assert hint in told(of_images, (bytes_, Y), tmp_path / "a")
    steps = [cerebro.transforms.Scale(1 / 255), cerebro.transforms.ToCHW()]
    data = cerebro.shard((bytes_, Y), tmp_path / "d").with_transforms({"x": steps})
    assert search(data, 0.25, tmp_path / "b", of_images, metric="loss").status == "finished"
    floats = told(build_of_two, (X, Y.astype(float)), tmp_path / "c")
    assert """column 'y' is float32: give y.astype("int64")""" in floats
    assert "shard" not in floats


def build_of_two(config):
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"])
    return cerebro.torch.Model(net, optimizer=optimizer, loss=torch.nn.functional.cross_entropy)


def test_folders_without_images_are_explained(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
    with pytest.raises(InputError) as caught:
        search(str(tmp_path / "pets"), 0.25, tmp_path / "a")
    assert f"'{tmp_path / 'pets'}'" in str(caught.value)
    assert "class folders" in str(caught.value)
    with pytest.raises(InputError, match=r"without class folders of images: see cerebro\.images"):
        cerebro.shard(str(tmp_path / "pets"), tmp_path / "d")
    (tmp_path / "unfinished" / "shard-00000").mkdir(parents=True)
    with pytest.raises(CerebroError, match="is not a complete dataset"):
        search(str(tmp_path / "unfinished"), 0.25, tmp_path / "a")
