"""Data sets in DataLoaders, DataModules, dicts of splits and folders of images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cerebro
from cerebro.data.containers import unpack
from cerebro.errors import InputError

torch = pytest.importorskip("torch")
from torch.utils.data import (  # noqa: E402
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

ROWS = 24


def dataset(first: int = 0) -> Any:
    x = torch.arange(first, first + ROWS * 4, dtype=torch.float32).reshape(ROWS, 4)
    return TensorDataset(x, torch.arange(ROWS) % 2)


def build(config: dict[str, Any]) -> Any:
    net = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"])
    loss = torch.nn.functional.cross_entropy
    return cerebro.torch.Model(net, optimizer=optimizer, loss=loss, inputs="x", target="y")


def search(data: Any, run: Path, build: Any = build, **options: Any) -> cerebro.Result:
    return cerebro.search(
        build, {"lr": [1e-4]}, data, epochs=1, batch_size=8, searcher="grid", workers=0, run=run,
        **{"progress": False, **options},
    )  # fmt: skip


def values(data: cerebro.Dataset, name: str = "x") -> Any:
    """A column in the order of its values."""
    column = np.concatenate([data.shard(i)[name] for i in range(data.num_shards)])
    return column[np.argsort(column.reshape(len(column), -1)[:, 0], kind="stable")]


def written(result: cerebro.Result, name: str) -> Any:
    return values(cerebro.Dataset(result.path / name))


def test_a_loader_trains_as_its_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaders = {
        "data": DataLoader(dataset(), batch_size=5, shuffle=True, drop_last=True),
        "validation": DataLoader(dataset(7)),
    }
    taken = search(**loaders, run=tmp_path / "a", progress=True)
    given = search(dataset(), tmp_path / "b", validation=dataset(7))
    assert taken.trials[0].history[0]["state_hash"] == given.trials[0].history[0]["state_hash"]
    assert taken.best.metrics == given.best.metrics
    captured = capsys.readouterr()
    said = captured.out + captured.err
    assert (
        said.count("the DataLoader's dataset is read; its batch_size=5 and its order are not") == 1
    )
    best = taken.best
    assert best.evaluate(loaders["validation"]) == best.evaluate(dataset(7))
    assert np.array_equal(best.predict(loaders["validation"]), best.predict(dataset(7)))


def test_check_and_plan_take_a_loader() -> None:
    loader = DataLoader(dataset())
    check = cerebro.check(build, {"lr": [1e-4], "batch_size": 8}, loader, validation=0.25)
    assert not check.problems
    assert str(check).startswith("the DataLoader's dataset is read; its batch_size=1 and its order")
    plan = cerebro.plan({"lr": [1e-4]}, loader, epochs=1, searcher="grid", workers=1)
    assert plan.trials == 1


def test_a_batch_sampler_that_only_counts_is_that_of_batch_size() -> None:
    given = DataLoader(
        dataset(), batch_sampler=BatchSampler(SequentialSampler(dataset()), 8, False)
    )
    data, _, remark = unpack(given, None)
    assert data is given.dataset and "its batch_size=8 and its order are not used" in remark


def halve(rows: list[Any]) -> Any:
    return torch.utils.data.default_collate(rows)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "weights": (
        lambda: DataLoader(dataset(), sampler=WeightedRandomSampler([1.0] * ROWS, ROWS)),
        r"has the sampler WeightedRandomSampler.*with_sampling\(weights=\)",
    ),
    "subset": (
        lambda: DataLoader(dataset(), sampler=SubsetRandomSampler([0, 1])),
        r"has the sampler SubsetRandomSampler.* a subset is torch\.utils\.data\.Subset",
    ),
    "another sequence": (
        lambda: DataLoader(dataset(), sampler=SequentialSampler(range(10))),
        "has the sampler SequentialSampler",
    ),
    "replacement": (
        lambda: DataLoader(dataset(), sampler=RandomSampler(dataset(), replacement=True)),
        "has the sampler RandomSampler",
    ),
    "batches": (
        lambda: DataLoader(dataset(), batch_sampler=[[0, 1], [2]]),
        r"custom batch_sampler \(list\).* give loader\.dataset",
    ),
    "batches of some": (
        lambda: DataLoader(
            dataset(), batch_sampler=BatchSampler(SubsetRandomSampler([0, 1]), 2, False)
        ),
        "has the sampler SubsetRandomSampler",
    ),
    "no batches": (lambda: DataLoader(dataset(), batch_size=None), "batch_size=None"),
    "collate": (
        lambda: DataLoader(dataset(), collate_fn=halve),
        r"has the collate_fn halve, which would not be called: give loader\.dataset",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("place", ["data", "validation", "shard"])
def test_a_loader_that_changes_rows_is_refused(kind: str, place: str, tmp_path: Path) -> None:
    make, message = REFUSED[kind]
    with pytest.raises(InputError, match=message):
        if place == "shard":
            cerebro.shard(make(), tmp_path / "set")
        elif place == "data":
            search(make(), tmp_path / "run")
        else:
            search(dataset(), tmp_path / "run", validation=make())
    assert not list(tmp_path.iterdir())


def test_a_loader_of_a_subset_trains_the_subset(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="the DataLoader's dataset is read"):
        data = cerebro.shard(DataLoader(Subset(dataset(), [3, 5]), shuffle=True), tmp_path / "set")
    assert np.array_equal(values(data), dataset().tensors[0][[3, 5]].numpy())


def module(kind: str) -> Any:
    lightning = pytest.importorskip("lightning")
    if kind == "from_datasets":
        return lightning.LightningDataModule.from_datasets(dataset(), dataset(7), batch_size=4)
    if kind == "from_datasets without validation":
        return lightning.LightningDataModule.from_datasets(dataset(), batch_size=4)

    class Module(lightning.LightningDataModule):
        def prepare_data(self) -> None:
            self.prepared = True

        def setup(self, stage: str) -> None:
            assert self.prepared
            assert stage == "fit"
            self.train = dataset()

        def train_dataloader(self) -> Any:
            return DataLoader(self.train, batch_size=4, shuffle=True)

    class Validated(Module):
        def val_dataloader(self) -> Any:
            return [DataLoader(dataset(7))]

    return Validated() if kind == "with validation" else Module()


@pytest.mark.parametrize("kind", ["with validation", "from_datasets"])
def test_a_data_module_trains_and_validates(kind: str, tmp_path: Path) -> None:
    result = search(module(kind), tmp_path / "a")
    assert np.array_equal(written(result, "data"), dataset().tensors[0])
    assert np.array_equal(written(result, "validation"), dataset(7).tensors[0])
    result = search(module(kind), tmp_path / "b", validation=dataset(9))
    assert np.array_equal(written(result, "validation"), dataset(9).tensors[0])


@pytest.mark.parametrize("kind", ["without", "from_datasets without validation"])
def test_a_data_module_may_have_no_validation(kind: str, tmp_path: Path) -> None:
    result = search(module(kind), tmp_path / "run")
    assert np.array_equal(written(result, "data"), dataset().tensors[0])
    assert not (result.path / "validation").exists()


@pytest.mark.parametrize("hook", ["on_before_batch_transfer", "on_after_batch_transfer",
                                  "transfer_batch_to_device"])  # fmt: skip
def test_a_data_module_that_changes_batches_is_refused(hook: str, tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    changes = {
        "train_dataloader": lambda self: DataLoader(dataset()),
        hook: lambda self, batch, *place: batch,
    }
    module = type("Mine", (lightning.LightningDataModule,), changes)()
    with pytest.raises(InputError, match=f"Mine defines {hook}, which would not be called"):
        search(module, tmp_path / "run")


def test_a_data_module_has_no_trainer(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Mine(lightning.LightningDataModule):
        def setup(self, stage: str) -> None:
            self.rank = self.trainer.global_rank

    with pytest.raises(InputError, match=r"Mine reads 'global_rank' of None, .* has no Trainer"):
        search(Mine(), tmp_path / "run")


def test_an_error_of_a_data_module_stays_its_own(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Mine(lightning.LightningDataModule):
        def setup(self, stage: str) -> None:
            raise AttributeError("the archive has no images")

    with pytest.raises(AttributeError, match="the archive has no images"):
        search(Mine(), tmp_path / "run")


def splits(*names: str) -> Any:
    datasets = pytest.importorskip("datasets")
    parts = {}
    for place, name in enumerate(names):
        x, y = dataset(place).tensors
        text = [f"{name} {row}" for row in range(ROWS)]
        columns = {"x": x.tolist(), "y": y.tolist(), "text": text}
        parts[name] = datasets.Dataset.from_dict(columns).with_format("torch")
    return datasets.DatasetDict(parts)


def test_splits_train_and_validate_and_unread_text_stays(tmp_path: Path) -> None:
    data = splits("train", "validation", "test")
    result = search(data, tmp_path / "run")
    assert np.array_equal(written(result, "data"), dataset(0).tensors[0])
    assert np.array_equal(written(result, "validation"), dataset(1).tensors[0])
    assert result.status == "finished"  # though no text of the validation data was trained on


def test_a_test_split_never_validates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = search(splits("train", "test"), tmp_path / "run", progress=True)
    assert not (result.path / "validation").exists()
    captured = capsys.readouterr()
    assert "'train' trains, 'test' is not used" in captured.out + captured.err


def test_a_split_is_chosen_by_its_name(tmp_path: Path) -> None:
    data = splits("train", "validation", "holdout")
    result = search(data, tmp_path / "run", validation="holdout")
    assert np.array_equal(written(result, "validation"), dataset(2).tensors[0])


def make_images(folder: Path, broken: int) -> Path:
    image = pytest.importorskip("PIL.Image")
    for place, (name, mode) in enumerate({"ants": "L", "bees": "RGBA", "cats": "RGB"}.items()):
        (folder / name).mkdir(parents=True)
        for number in range(4):
            picture = image.new("RGB", (6 + number, 5), (50 * place,) * 3).convert(mode)
            picture.save(folder / name / f"{number}.png")
    for number in range(broken):
        (folder / "bees" / f"broken{number}.jpg").write_bytes(b"no image")
    return folder


def test_a_folder_is_a_source_with_a_size(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "pets", 0)
    data = cerebro.shard(folder, tmp_path / "a", size=(4, 3))
    other = cerebro.shard(cerebro.images(folder, size=(4, 3)), tmp_path / "b")
    assert data.classes["y"] == ["ants", "bees", "cats"]
    assert data.columns["x"].shape == (4, 3, 3)
    orders = [part.batches(5, seed=0, epoch=0) for part in (data, other)]
    assert all(torch.equal(a["x"], b["x"]) for a, b in zip(*orders, strict=True))
    with pytest.raises(InputError, match="size is for the path of a folder of images"):
        cerebro.shard({"x": [1, 2]}, tmp_path / "c", size=3)


def test_a_folder_is_trained_evaluated_and_predicted(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    for name in ("ants", "bees"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(4):
            image.new("RGB", (2, 2), (number,) * 3).save(tmp_path / "pets" / name / f"{number}.png")

    def build_net(config: dict[str, Any]) -> Any:
        net = torch.nn.Sequential(Floats(), torch.nn.Linear(12, 2))
        optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"])
        loss = torch.nn.functional.cross_entropy
        return cerebro.torch.Model(net, optimizer=optimizer, loss=loss, inputs="x", target="y")

    folder = str(tmp_path / "pets")
    best = search(folder, tmp_path / "run", build_net, validation=folder).best
    assert best.evaluate(folder)["loss"] == best.metrics["val_loss"]
    assert len(best.predict(folder)) == 8


class Floats(torch.nn.Module):
    def forward(self, x: Any) -> Any:
        return x.flatten(1).float()


def test_images_of_different_sizes_name_the_cure(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "pets", 0)
    with pytest.raises(InputError, match=r"pixels, but.* give images\(\.\.\., size="):
        search(str(folder), tmp_path / "run")


def test_broken_images_are_named_or_counted(tmp_path: Path) -> None:
    folder = make_images(tmp_path / "pets", 2)
    with pytest.raises(InputError, match=r"broken0\.jpg' is not an image or is damaged"):
        cerebro.shard(folder, tmp_path / "a", size=4)
    said = r"2 of 14 images in .* are left out: bees/broken0\.jpg, bees/broken1\.jpg$"
    with pytest.warns(UserWarning, match=said):
        data = cerebro.shard(cerebro.images(folder, 4, errors="skip"), tmp_path / "b")
    assert len(data) == 12
    (folder / "dogs").mkdir()
    for path in folder.rglob("*.png"):
        path.write_bytes(b"no image")
    with pytest.raises(InputError, match="none of the 14 images in"):
        cerebro.shard(cerebro.images(folder, 4, errors="skip"), tmp_path / "c")
