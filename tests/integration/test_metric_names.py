"""A metric that no model reports is told with the cure, before training where it is certain."""

from __future__ import annotations

import os

import numpy as np
import pytest

import cerebro

torch = pytest.importorskip("torch")

RNG = np.random.default_rng(5)
DATA = (RNG.normal(size=(60, 3)).astype(np.float32), RNG.integers(0, 2, 60))
F = torch.nn.functional


def acc(output, target):
    return (output.argmax(1) == target).float().mean()


def parts(config):
    net = torch.nn.Linear(3, 2)
    return net, torch.optim.SGD(net.parameters(), lr=config["lr"])


def build_torch(config, metrics=None):
    net, optimizer = parts(config)
    return cerebro.torch.Model(net, optimizer=optimizer, loss=F.cross_entropy, metrics=metrics)


def build_with_acc(config):
    return build_torch(config, {"acc": acc})


def build_step(config):
    net, optimizer = parts(config)

    def step(net, batch):
        return {"loss": F.cross_entropy(net(batch["x"]), batch["y"])}

    return cerebro.torch.Model(net, optimizer=optimizer, step=step)


class Own(cerebro.torch.Model):
    """Reports what the user's method returns."""

    def eval_batch(self, batch):
        return super().eval_batch(batch)


def build_own(config):
    net, optimizer = parts(config)
    return Own(net, optimizer=optimizer, loss=F.cross_entropy)


def build_sklearn(config):
    from sklearn.linear_model import SGDClassifier

    return cerebro.sklearn.Model(SGDClassifier(eta0=config["lr"]))


def build_skorch(config):
    import skorch

    net = skorch.NeuralNetClassifier(
        torch.nn.Linear, module__in_features=3, module__out_features=2, lr=config["lr"],
        criterion=torch.nn.CrossEntropyLoss, train_split=None, callbacks=None, verbose=0,
    )  # fmt: skip
    return cerebro.torch.from_skorch(net)


def lightning_module(logs, validation=True):
    lightning = pytest.importorskip("lightning.pytorch")

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(3, 2)

        def training_step(self, batch, _):
            loss = F.cross_entropy(self.net(batch["x"]), batch["y"])
            for name in logs:
                self.log(name, loss)
            return loss

        def validation_step(self, batch, _):
            loss = F.cross_entropy(self.net(batch["x"]), batch["y"])
            for name in logs if validation else ():
                self.log(f"val_{name}", loss)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Module()


def build_gan(config):
    assert config["lr"]
    return cerebro.torch.from_lightning(lightning_module(["g_loss", "d_loss"]))


def build_unvalidated(config):
    assert config["lr"]
    return cerebro.torch.from_lightning(lightning_module(["accuracy"], validation=False))


def build_keras(config):
    import keras

    return compiled(keras.Sequential, config)


def build_keras_step(config):
    import keras

    class Net(keras.Sequential):
        def test_step(self, *arguments):
            return super().test_step(*arguments)

    return compiled(Net, config)


def compiled(kind, config):
    import keras

    net = kind([keras.layers.Input((3,)), keras.layers.Dense(2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(optimizer=keras.optimizers.SGD(config["lr"]), loss=loss)
    return cerebro.keras.Model(net)


def build_jax(config, **options):
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")

    def apply(params, x):
        return x @ params

    def loss(output, target):
        return optax.softmax_cross_entropy_with_integer_labels(output, target).mean()

    options = options or {"loss": loss}
    params = jax.numpy.zeros((3, 2))
    return cerebro.jax.Model(apply, params, optimizer=optax.sgd(config["lr"]), **options)


def build_jax_step(config):
    return build_jax(config, step=lambda params, batch: {"loss": (batch["x"] @ params).mean()})


def search(build, folder, **options):
    given = {"epochs": 3, "searcher": "grid", "batch_size": 10, "workers": 0, "validation": 0.2}
    space = {"lr": [0.1, 0.2, 0.3, 0.4]}
    return cerebro.search(build, space, DATA, run=folder, progress=False, **{**given, **options})


@pytest.mark.parametrize(
    ("build", "metric", "cure"),
    [
        (build_with_acc, "accuracy", "did you mean metric='acc'?"),
        (build_with_acc, "val_accuracy", "did you mean metric='val_acc'?"),
        (build_torch, "accuracy", "add it to metrics= of cerebro.torch.Model, or give metric="),
        (build_sklearn, "f1", "add it to metrics= of cerebro.sklearn.Model, or give metric="),
        (build_skorch, "f1", "add it to metrics= of from_skorch, or give metric='accuracy'"),
        (build_jax, "accuracy", "add it to metrics= of cerebro.jax.Model, or give metric='loss'"),
        (build_keras, "accuracy", "add it to net.compile(metrics=[...]), or give metric='loss'"),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_an_unknown_metric_is_refused_before_training(
    tmp_path, monkeypatch, build, metric, cure, workers
):
    if workers and build is not build_with_acc:
        pytest.skip("the same in workers")
    for part in build.__name__.split("_"):
        if part in ("keras", "sklearn", "skorch"):
            monkeypatch.setenv("KERAS_BACKEND", os.environ.get("KERAS_BACKEND", "torch"))
            pytest.importorskip(part)
    with pytest.raises(cerebro.RunError) as caught:
        search(build, tmp_path / "run", metric=metric, workers=workers)
    said = str(caught.value)
    assert said.startswith(f"no trial can be ranked: the model reports no metric {metric!r}")
    assert cure in said
    assert caught.value.result.units() == []  # nothing was trained
    assert "_batch" not in said


@pytest.mark.parametrize(
    ("build", "metric", "cure"),
    [
        (build_step, "accuracy", "return it from step, or give metric='loss'"),
        (build_jax_step, "accuracy", "return it from step, or give metric='loss'"),
        (build_keras_step, "accuracy", "add it to net.compile(metrics=[...]), or give metric="),
        (build_own, "accuracy", "return it from train_batch and eval_batch, or give metric="),
        (build_gan, "loss", "log it in validation_step with self.log, or rank by metric='d_loss'"),
        (
            build_unvalidated,
            "accuracy",
            "in validation: log it in validation_step with self.log, or rank by metric=",
        ),
    ],
)
def test_an_unknown_metric_of_a_custom_step_fails_in_training(
    tmp_path, monkeypatch, build, metric, cure
):
    """It may report the metric in other batches or epochs."""
    if build is build_keras_step:
        monkeypatch.setenv("KERAS_BACKEND", os.environ.get("KERAS_BACKEND", "torch"))
        pytest.importorskip("keras")
    with pytest.raises(cerebro.RunError) as caught:
        search(build, tmp_path / "run", metric=metric)
    failed = caught.value.result.trials[0]
    assert failed.status == "failed"
    assert failed.error.startswith(f"the model reports no metric {metric!r}")
    assert cure in failed.error


class OfSomeBatches:
    """Reports a recall, under a name of its configuration, of batches that have a positive row."""

    def __init__(self, config):
        self.w = np.zeros(1)
        self.name = config.get("name", "recall")

    def train_batch(self, batch):
        self.w += 1
        return {"loss": float(self.w[0])}

    def eval_batch(self, batch):
        return {"loss": 1.0, **({self.name: 0.5} if np.asarray(batch["y"]).any() else {})}

    def state_dict(self):
        return {"w": self.w}

    def load_state_dict(self, state):
        self.w = np.array(state["w"])


class OfSomeEpochs(OfSomeBatches):
    """Reports its metric at the end of the second epoch."""

    def eval_batch(self, batch):
        return {"loss": 1.0}

    def end_epoch(self, epoch, metrics):
        return {"probe": 1.0} if epoch == 1 else {}


class StepOfTheUser(cerebro.torch.Model):
    """The same with a subclass, whose words are those of its framework otherwise."""

    def __init__(self, config):
        net, optimizer = parts({"lr": 0.1})
        super().__init__(net, optimizer=optimizer, loss=F.cross_entropy)

    def end_epoch(self, epoch, metrics):
        return {**super().end_epoch(epoch, metrics), **({"probe": 1.0} if epoch else {})}


POSITIVE_LATE = (DATA[0], np.arange(60) >= 55)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_metric_reported_in_some_batches_ranks_trials(tmp_path, workers):
    x, y = POSITIVE_LATE
    result = cerebro.search(
        OfSomeBatches, {"lr": [0.1, 0.2]}, (x, y), validation=(x + 1, y), epochs=3, batch_size=10,
        searcher="grid", metric="recall", mode="max", workers=workers, progress=False,
        run=tmp_path / "run", stop=cerebro.EarlyStopping("recall", patience=1, mode="max"),
    )  # fmt: skip
    assert [trial.status for trial in result.trials] == ["stopped"] * 2
    assert result.best.history[0]["metrics"]["recall"] == 0.5


def test_only_trials_that_do_not_report_the_metric_fail(tmp_path):
    x, y = POSITIVE_LATE
    result = cerebro.search(
        OfSomeBatches, {"name": ["recall_", "recall"]}, (x, y), validation=(x + 1, y), epochs=1,
        searcher="grid", metric="recall", mode="max", workers=0, progress=False, batch_size=10,
        run=tmp_path / "run",
    )  # fmt: skip
    assert [trial.status for trial in result.trials] == ["failed", "finished"]
    assert "did you mean metric='recall_'?" in result.trials[0].error


@pytest.mark.parametrize("build", [OfSomeEpochs, StepOfTheUser])
def test_a_metric_missing_from_some_epochs_fails_its_trial(tmp_path, build):
    with pytest.raises(cerebro.RunError) as caught:
        search(build, tmp_path / "run", metric="probe", mode="max")
    assert "no metric 'probe'" in caught.value.result.trials[0].error


def test_an_unknown_metric_without_validation_is_refused(tmp_path):
    with pytest.raises(cerebro.RunError, match=r"did you mean metric='acc'\?"):
        search(build_with_acc, tmp_path / "run", metric="accuracy", validation=None)


def test_early_stopping_on_an_unknown_metric_is_refused(tmp_path):
    stop = cerebro.EarlyStopping("val_accuracy", patience=1)
    with pytest.raises(cerebro.InputError, match=r"did you mean monitor='val_acc'\?"):
        search(build_with_acc, tmp_path / "run", metric="acc", stop=stop)


def test_a_metric_that_some_batches_lack_is_accepted(tmp_path):
    """In small batches one class may be missing, so that the hop check does not see the metric."""
    pytest.importorskip("sklearn")
    rows = np.zeros(60, np.int64)
    rows[::20] = 1
    given = {"epochs": 2, "searcher": "grid", "batch_size": 2, "workers": 0, "progress": False}
    result = cerebro.search(
        build_scored,
        {"alpha": [0.1]},
        (DATA[0], rows),
        metric="roc_auc",
        run=tmp_path / "run",
        **given,
    )
    assert result.status == "finished"


def build_scored(config):
    from sklearn.linear_model import SGDClassifier

    estimator = SGDClassifier(alpha=config["alpha"], loss="log_loss")
    return cerebro.sklearn.Model(estimator, metrics={"roc_auc": "roc_auc"})
