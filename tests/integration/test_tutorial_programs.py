"""Programs as in tutorials: two lines changed, and the weights that their framework trains."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from framework_models import make_lightning, make_rows, make_sklearn, make_skorch

import cerebro
from cerebro.machine import generators
from cerebro.run.recipe import import_file

torch = pytest.importorskip("torch")

PROGRAMS = Path(__file__).parent.parent / "programs"
NEEDED = {
    "pytorch_quickstart": "torch",
    "image_folder": "PIL",
    "passengers": "pandas",
    "lightning_classifier": "lightning",
    "keras_classifier": "keras",
    "skorch_net": "skorch",
    "sklearn_pipeline": "sklearn",
    "jax_loop": "optax",
}
SAID = {
    "lightning_classifier": "build returns a LightningModule: it trains as cerebro.torch.from_",
    "keras_classifier": "build returns a Keras model: it trains as cerebro.keras.Model(...",
    "skorch_net": "build returns a skorch net: it trains as cerebro.torch.from_skorch(...",
    "sklearn_pipeline": "build returns a scikit-learn estimator: it trains as cerebro.sklearn.",
    "pytorch_quickstart": "the DataLoader's dataset is read; its batch_size=64 and its order",
}


@pytest.mark.parametrize("name", NEEDED)
def test_a_program_runs_with_two_lines_changed(name: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDED[name])
    file = PROGRAMS / f"{name}.py"
    assert file.read_text(encoding="utf-8").count("# Cerebro") <= 2
    done = subprocess.run(
        [sys.executable, file],
        cwd=tmp_path,
        env=os.environ | {"KERAS_BACKEND": "torch"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    result = cerebro.open(run)
    assert result.status == "finished"
    assert (done.stdout + done.stderr).count(SAID.get(name, "started with")) == 1


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As in a search, whose sums would have another order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def batches_of(result: cerebro.Result, epoch: int, size: int) -> Any:
    """The batches of an epoch of the search, from the data in its run."""
    return cerebro.Dataset(result.path / "data").batches(size, seed=0, epoch=epoch)


def test_pytorch_trains_the_same_weights(tmp_path: Path, one_thread: None) -> None:
    program = import_file(PROGRAMS / "pytorch_quickstart.py", "pytorch_quickstart")
    result = cerebro.search(
        program.build, {"hidden": [16], "lr": [0.1], "batch_size": 64}, program.train_dataloader,
        epochs=2, validation=program.test_dataloader, searcher="grid", workers=0, progress=False,
        run=tmp_path / "run",
    )  # fmt: skip
    generators.seed_all(cerebro._core.trial_seed(0, 0), True)
    model = program.NeuralNetwork(16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        for batch in batches_of(result, epoch, 64):
            loss = program.loss_fn(model(batch["x"]), batch["y"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    trained = result.trials[0].load("last").net
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, trained.state_dict()[name])


def test_lightning_trains_the_same_weights(tmp_path: Path, one_thread: None) -> None:
    lightning = pytest.importorskip("lightning")
    program = import_file(PROGRAMS / "lightning_classifier.py", "lightning_classifier")
    result = cerebro.search(
        program.build, {"hidden": [16], "lr": [1e-2], "batch_size": 32}, program.Digits(),
        epochs=2, searcher="grid", metric="val_acc", workers=0, progress=False,
        run=tmp_path / "run",
    )  # fmt: skip

    class Epochs:
        """The search's batches of one epoch after the other."""

        epoch = 0

        def __iter__(self) -> Any:
            for batch in batches_of(result, self.epoch, 32):
                yield batch["x"], batch["y"]
            self.epoch += 1

    generators.seed_all(cerebro._core.trial_seed(0, 0), True)
    module = program.Classifier(16, 1e-2)
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, Epochs())
    trained = result.trials[0].load("last").net
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, trained.state_dict()[name])
    assert result.best.metrics["val_acc"] > 0.5


def test_jax_trains_the_same_weights(tmp_path: Path) -> None:
    optax = pytest.importorskip("optax")
    jax = pytest.importorskip("jax")
    program = import_file(PROGRAMS / "jax_loop.py", "jax_loop")
    result = cerebro.search(
        program.build, {"hidden": [16], "lr": [0.01], "batch_size": 64},
        (program.images, program.labels), epochs=2, searcher="grid", workers=0, progress=False,
        run=tmp_path / "run",
    )  # fmt: skip
    params = program.init_network([64, 16, 10], jax.random.key(0))
    optimizer = optax.adam(0.01)
    state = optimizer.init(params)

    @jax.jit
    def update(params: Any, state: Any, x: Any, y: Any) -> Any:
        gradients = jax.grad(lambda p: program.loss(program.predict(p, x), y))(params)
        changes, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, changes), state

    for epoch in range(2):
        for batch in batches_of(result, epoch, 64):
            x, y = (np.asarray(batch[name]) for name in ("x", "y"))
            params, state = update(params, state, x, y)
    x = program.images[:50]
    np.testing.assert_allclose(
        result.trials[0].predict(x), np.asarray(program.predict(params, x)), rtol=1e-4, atol=1e-5
    )


def test_search_cv_prints_what_grid_search_cv_prints(tmp_path: Path) -> None:
    """Naive Bayes learns by batch what it learns at once."""
    pytest.importorskip("sklearn")
    ours = (PROGRAMS / "sklearn_gridsearch.py").read_text(encoding="utf-8")
    assert ours.count("# Cerebro") == 2
    theirs = ours.replace(
        "cerebro.sklearn import", "sklearn.model_selection import GridSearchCV as"
    )
    printed = []
    for name, text in (("ours", ours), ("theirs", theirs.replace("epochs=1", "n_jobs=-1"))):
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        command = [sys.executable, f"{name}.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        printed.append(done.stdout)
    assert printed[0] == printed[1]
    assert printed[0].startswith("iris.csv\n0.63")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ours.py", "theirs.py"]


def hashes(build: Any, data: Any, folder: Path, **options: Any) -> list[Any]:
    result = cerebro.search(
        build, {"lr": [0.1, 0.01]}, data, epochs=2, batch_size=16, validation=0.25,
        searcher="grid", progress=False, run=folder, **options,
    )  # fmt: skip
    assert result.status == "finished"
    return [[epoch["state_hash"] for epoch in trial.history] for trial in result.trials]


def look_up(config: dict[str, Any]) -> Any:
    return make_lightning(config, unpacks=False)


WRAPPED = {
    "skorch": (make_skorch, lambda made: cerebro.torch.from_skorch(made)),
    "sklearn": (make_sklearn, lambda made: cerebro.sklearn.Model(made)),
    "lightning": (look_up, lambda made: cerebro.torch.from_lightning(made)),
}


@pytest.mark.parametrize("kind", WRAPPED)
@pytest.mark.parametrize("workers", [0, 2])
def test_a_model_is_wrapped_as_by_hand(kind: str, workers: int, tmp_path: Path) -> None:
    pytest.importorskip(kind)
    make, wrap = WRAPPED[kind]
    taken = hashes(make, make_rows(), tmp_path / "taken", workers=workers)
    assert taken == hashes(
        lambda config: wrap(make(config)), make_rows(), tmp_path / "by hand", workers=0
    )
    if workers:
        assert cerebro.replay(tmp_path / "taken", trial=1, build=make).identical
        best = cerebro.open(tmp_path / "taken").best
        assert len(best.predict({"x": make_rows()["x"][:3]}, build=make)) == 3


def test_columns_are_found_by_the_names_of_targets(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    x, y = make_rows().values()
    split = {"left": x[:, :2], "right": x[:, 2:], "label": y}
    taken = hashes(make_sklearn, split, tmp_path / "run", workers=0)
    assert taken == hashes(make_sklearn, make_rows(), tmp_path / "x and y", workers=0)


def test_columns_that_cannot_be_told_apart_are_named(tmp_path: Path) -> None:
    pytest.importorskip("skorch")
    x, y = make_rows().values()
    split = {"left": x[:, :2], "right": x[:, 2:], "label": y}
    message = (
        r"build returned a skorch net, and the data has the columns 'left', 'right', 'label': "
        r"say which it reads, return cerebro\.torch\.from_skorch\(NeuralNetClassifier\("
    )
    with pytest.raises(cerebro.CerebroError, match=message):
        hashes(make_skorch, split, tmp_path / "run", workers=0)


def test_a_step_that_unpacks_other_columns_is_explained(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    program = import_file(PROGRAMS / "lightning_classifier.py", "lightning_classifier")
    digits = program.load_digits()
    data = {"x": digits.data.astype("f4"), "y": digits.target, "id": np.arange(len(digits.target))}
    with pytest.raises(
        cerebro.CerebroError, match=r"unpacks its batch, which has .* 'x', 'y', 'id'"
    ):
        cerebro.search(
            program.build, {"hidden": [4], "lr": [0.1]}, data, epochs=1, batch_size=32,
            validation=0.2, metric="val_acc", searcher="grid", workers=0, progress=False,
            run=tmp_path / "run",
        )  # fmt: skip


def test_check_says_what_is_wrapped() -> None:
    pytest.importorskip("sklearn")
    checked = cerebro.check(make_sklearn, {"lr": [0.1]}, make_rows(), validation=0.25)
    assert str(checked).startswith(
        "build returns a scikit-learn estimator: it trains as cerebro.skl"
    )
