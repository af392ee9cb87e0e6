"""cerebro.torch.from_lightning: the weights, losses and metrics of Lightning's own Trainer."""

from __future__ import annotations

import copy
import logging
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import cerebro._core as _core
from cerebro.errors import InputError, StateError
from cerebro.machine import generators
from cerebro.model import Info, check_model

torch = pytest.importorskip("torch")
lightning = pytest.importorskip("lightning")
torchmetrics = pytest.importorskip("torchmetrics")
from torch.nn import functional  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402

from cerebro.integrations.lightning.model import BatchForm  # noqa: E402
from cerebro.integrations.lightning.trainer import CONSTANTS, overrides  # noqa: E402
from cerebro.torch import from_lightning  # noqa: E402

UNITS, BATCHES, ROWS, EPOCHS = 3, 3, 6, 3
STEPS = UNITS * BATCHES
INFO = Info(EPOCHS, STEPS, EPOCHS * STEPS, ROWS, 0, 3)


@pytest.fixture(autouse=True)
def quiet():
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def make_batches(seed, count):
    generator = torch.Generator().manual_seed(seed)
    rows = [ROWS - (index % 3 == 2) for index in range(count)]  # the last of a shard is shorter
    return [
        {
            "x": torch.randn(n, 5, generator=generator),
            "y": torch.randint(0, 3, (n,), generator=generator),
        }
        for n in rows
    ]


TRAIN, VALID = make_batches(100, STEPS), make_batches(200, 4)


class Classifier(lightning.LightningModule):
    """As in Lightning's tutorials."""

    def __init__(self, lr=0.1, dropout=0.3):
        super().__init__()
        self.save_hyperparameters()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(5, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.ReLU(),
            torch.nn.Dropout(dropout),
            torch.nn.Linear(8, 3),
        )
        self.train_acc = torchmetrics.Accuracy(task="multiclass", num_classes=3)
        self.val_acc = torchmetrics.Accuracy(task="multiclass", num_classes=3)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = functional.cross_entropy(logits, y)
        self.train_acc(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train_acc", self.train_acc, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_acc.update(logits, y)
        self.log_dict({"val_loss": functional.cross_entropy(logits, y)})
        self.log("val_acc", self.val_acc)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)


class Loader:
    """Batches in order; a DataLoader would draw a number from the random generator."""

    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


def by_trainer(kind, pairs=True, **options):
    """Return the module and the metrics by epoch of Lightning's own loop."""
    history = []

    class Watch(lightning.Callback):
        def on_train_epoch_end(self, trainer, module):
            pass

        def on_train_batch_start(self, trainer, module, batch, index):
            if index == 0 and trainer.current_epoch:
                history.append({k: float(v) for k, v in trainer.callback_metrics.items()})

    def loader(batches):
        return Loader([list(batch.values()) for batch in batches] if pairs else batches)

    generators.seed_all(3, True)
    module = kind()
    generators.seed_all(4, True)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[Watch()],
        **options,
    )
    trainer.fit(module, loader(TRAIN), loader(VALID) if hasattr(kind, "validation_step") else None)
    history.append({k: float(v) for k, v in trainer.callback_metrics.items()})
    return module, history


def built(kind, pairs=True, **options):
    model = from_lightning(kind(), inputs=["x", "y"] if pairs else None, **options)
    check_model(model)
    model.bind_info(INFO)
    return model


def hopped(model, build):
    """Return a fresh model with the state, as another worker makes it."""
    saved = generators.capture(True)
    carried = _core.unpack_state(_core.pack_state(model.state_dict()), "torch")
    fresh = build()
    fresh.load_state_dict(carried)
    generators.restore(saved)
    return fresh


def by_cerebro(kind, hops, pairs=True, **options):
    def build():
        generators.seed_all(3, True)
        return built(kind, pairs, **options)

    model = build()
    generators.seed_all(4, True)
    history = []
    for epoch in range(EPOCHS):
        for unit in range(UNITS):
            if unit == 0:
                model.begin_epoch(epoch)
            for batch in TRAIN[unit * BATCHES : (unit + 1) * BATCHES]:
                model.train_batch(batch)
            if hops:
                model = hopped(model, build)
        metrics = {}
        if overrides(model.net, "validation_step"):
            metrics = {f"val_{k}": v for k, v in model.evaluate(VALID).items()}
            if hops:
                model = hopped(model, build)
        metrics |= {f"train_{k}": v for k, v in model.end_epoch(epoch, metrics).items()}
        history.append(metrics)
        if hops:
            model = hopped(model, build)
    return model, history


def assert_equal_to_trainer(kind, pairs=True, **options):
    """Weights, optimizer, and every metric that both have: bit for bit, with and without hops."""
    module, expected = by_trainer(kind, pairs, **options)
    states = []
    for hops in (False, True):
        model, history = by_cerebro(kind, hops, pairs, **options)
        for name, value in module.state_dict().items():
            assert torch.equal(model.net.state_dict()[name], value), name
        optimizers = module.trainer.optimizers
        for one, two in zip(optimizers, model._optimizers, strict=True):
            assert_same_numbers(one.state_dict(), two.state_dict())
        assert model.net.global_step == module.trainer.global_step
        for ours, theirs in zip(history, expected, strict=True):
            shared = ours.keys() & theirs.keys()
            assert {k: ours[k] for k in shared} == {k: theirs[k] for k in shared}
        states.append(_core.hash_state(_core.pack_state(model.state_dict())))
    assert states[0] == states[1]
    return history, module, model


def assert_same_numbers(one, two):
    assert one.keys() == two.keys()
    for key, value in one.items():
        if isinstance(value, dict):
            assert_same_numbers(value, two[key])
        elif isinstance(value, list):
            assert_same_numbers(dict(enumerate(value)), dict(enumerate(two[key])))
        elif isinstance(value, torch.Tensor):
            assert torch.equal(value, two[key]), key
        else:
            assert value == two[key], key


def test_the_tutorials_classifier():
    history, _, model = assert_equal_to_trainer(Classifier)
    assert history[0].keys() == {"train_loss", "train_acc", "val_loss", "val_acc"}
    assert history[0]["train_loss"] > history[-1]["train_loss"]
    assert model.predict(VALID[0]["x"]).shape == (ROWS, 3)
    assert model.net.training and model.net.net[1].training


class Scheduled(Classifier):
    """Every kind of schedule, clipping, and logged values of all reductions."""

    schedule = "step"

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        if self.schedule == "lists":
            return [optimizer], [lr_scheduler.ExponentialLR(optimizer, 0.7)]
        if self.schedule == "step":
            total = self.trainer.estimated_stepping_batches
            one = lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=int(total))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": one, "interval": "step"}}
        if self.schedule == "every other":
            halved = lr_scheduler.StepLR(optimizer, 1, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": halved, "frequency": 2}}
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=0.5)
        config = {"scheduler": plateau, "monitor": self.schedule}
        return {"optimizer": optimizer, "lr_scheduler": config}

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.log("rows", len(batch[1]), on_step=False, on_epoch=True, reduce_fx="sum")
        return {"loss": loss, "more": 1}


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("lists", {}),
        ("step", {"gradient_clip_val": 0.2, "accumulate_grad_batches": 2}),
        ("every other", {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        ("val_loss", {"accumulate_grad_batches": 4, "precision": "bf16-mixed"}),
        ("train_loss_epoch", {}),
    ],
)
def test_schedules_clipping_windows_and_precision(schedule, options):
    """Windows of 2 and 4 batches cross the units of 3."""
    kind = type("Scheduled", (Scheduled,), {"schedule": schedule})
    history, module, _ = assert_equal_to_trainer(kind, **options)
    rates = [optimizer.param_groups[0]["lr"] for optimizer in module.trainer.optimizers]
    assert rates != [0.1]
    assert history[0]["train_rows"] == sum(len(batch["y"]) for batch in TRAIN)


class Windowed(Classifier):
    """Sets the window of its trainer, as callbacks of Lightning do."""

    def on_fit_start(self):
        self.trainer.accumulate_grad_batches = 2


def test_a_window_that_the_module_sets():
    assert_equal_to_trainer(Windowed)


class Gan(lightning.LightningModule):
    """Manual optimization: two optimizers, toggled; gradients gathered over two batches."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = torch.nn.Linear(2, 5), torch.nn.Linear(5, 1)

    def training_step(self, batch, batch_idx):
        for_generator, for_discriminator = self.optimizers()
        x = batch["x"]
        noise = torch.randn(len(x), 2)
        self.toggle_optimizer(for_generator)
        loss = functional.softplus(-self.discriminator(self.generator(noise))).mean()
        for_generator.zero_grad()
        self.manual_backward(loss)
        for_generator.step()
        self.untoggle_optimizer(for_generator)
        with for_discriminator.toggle_model():
            real = functional.softplus(-self.discriminator(x)).mean()
            fake = functional.softplus(self.discriminator(self.generator(noise).detach())).mean()
            self.manual_backward((real + fake) / 2)
            if batch_idx % 2:
                for_discriminator.step()
                for_discriminator.zero_grad()
        self.log_dict({"g_loss": loss, "d_loss": real + fake}, on_epoch=True)
        if self.trainer.is_last_batch:
            for scheduler in self.lr_schedulers():
                scheduler.step()

    def configure_optimizers(self):
        both = [
            torch.optim.Adam(part.parameters(), lr=0.01, betas=(0.5, 0.999))
            for part in (self.generator, self.discriminator)
        ]
        return both, [lr_scheduler.ExponentialLR(item, 0.5) for item in both]


def test_manual_optimization():
    history, module, _ = assert_equal_to_trainer(Gan, pairs=False)
    assert history[0].keys() == {"train_g_loss", "train_d_loss"}
    assert module.trainer.optimizers[0].param_groups[0]["lr"] == 0.01 * 0.5**EPOCHS


class Gathering(lightning.LightningModule):
    """Manual optimization that gathers four batches: the ninth leaves gradients at the end."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.net = torch.nn.Linear(5, 3)

    def training_step(self, batch, batch_idx):
        self.manual_backward(functional.cross_entropy(self.net(batch[0]), batch[1]) / 4)
        if batch_idx % 4 == 3:
            self.optimizers().step()
            self.optimizers().zero_grad()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def test_leftover_gradients_are_dropped_by_validation():
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", functional.cross_entropy(self.net(batch[0]), batch[1]))

    validated = type("Validated", (Gathering,), {"validation_step": validation_step})
    ends = []
    for kind in (Gathering, validated):
        _, module, model = assert_equal_to_trainer(kind)
        assert bool(model.state_dict()["gradients"]) == (kind is Gathering)
        ends.append(module.net.weight)
    assert not torch.equal(*ends)


class Reading(Classifier):
    """Hooks at the end of an epoch read its values, as in Lightning's guide to optimization."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.automatic_optimization = False
        self.best, self.seen = 9.0, []

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(float(self.trainer.callback_metrics["train_loss_step"]))

    def on_validation_epoch_end(self):
        self.best = min(self.best, float(self.trainer.callback_metrics["val_loss"]))
        self.log("val_best", self.best)
        self.seen.append(float(self.trainer.callback_metrics["val_best"]))
        self.seen.append(float(self.trainer.callback_metrics["val_acc"]))

    def on_train_epoch_end(self):
        read = self.trainer.callback_metrics
        self.seen += [float(read[name]) for name in ("train_loss", "train_loss_epoch", "val_loss")]
        self.lr_schedulers().step(read["train_loss"])

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5)
        return [optimizer], [lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9)]


def test_epoch_end_hooks_read_the_epochs_metrics():
    history, module, model = assert_equal_to_trainer(Reading)
    assert model.net.seen == module.seen and len(module.seen) == EPOCHS * (STEPS + 5)
    assert model.net.best == module.best == min(metrics["val_loss"] for metrics in history)
    assert module.trainer.optimizers[0].param_groups[0]["lr"] < 0.5


class Recorder(Classifier):
    """State of many kinds: outputs in a list, counters, a best value, frozen parts, hparams."""

    def __init__(self):
        super().__init__()
        self.outputs = []
        self.order = []
        self.seen = 0
        self.best = torchmetrics.MinMetric()

    def setup(self, stage):
        self.order.append(stage)

    def on_train_start(self):
        self.order.append("train start")
        self.best.reset()

    def on_train_epoch_start(self):
        self.order.append(f"epoch {self.current_epoch} step {self.global_step}")
        if self.current_epoch == 1:
            self.net[0].requires_grad_(False)
            self.net[1].eval()
        self.hparams.lr = 0.1 / (1 + self.current_epoch)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return [batch[0] + 0.01 * torch.randn_like(batch[0]), batch[1]] if self.training else batch

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.outputs.append(loss.detach())
        self.seen += len(batch[1])
        return None if batch_idx == 4 else loss * self.hparams.lr

    def on_before_optimizer_step(self, optimizer):
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("norm", sum(norms, torch.tensor(0.0)))

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 4:  # warm-up, as in Lightning's documentation
            for group in optimizer.param_groups:
                group["lr"] = 0.02 * (1 + self.trainer.global_step)

    def on_train_epoch_end(self):
        self.log("spread", torch.stack(self.outputs).std())
        self.outputs.clear()

    def on_validation_epoch_end(self):
        self.best(self.val_acc.compute())
        self.log("val_best", self.best.compute())


def test_hooks_attributes_and_metrics_persist_across_epochs():
    history, module, model = assert_equal_to_trainer(Recorder)
    # The hooks of the beginning run where a model is built, so they are noted once in its state.
    assert model.net.order == module.order
    assert model.net.seen == module.seen == EPOCHS * sum(len(batch["y"]) for batch in TRAIN)
    assert not model.net.net[0].weight.requires_grad and not model.net.net[1].training
    assert model.net.hparams.lr == module.hparams.lr == pytest.approx(0.1 / 3)
    assert {"train_spread", "val_best", "train_norm"} <= history[0].keys()


class Zeroing(Classifier):
    """Sets gradients to 0, not to None; momentum still moves a part without a gradient."""

    def __init__(self):
        super().__init__()
        self.extra = torch.nn.Linear(5, 3)

    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        optimizer.zero_grad(set_to_none=False)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        if batch_idx % 4 == 1:  # in the first batch of an epoch, it has no gradient
            logits = logits + self.extra(x)
        return functional.cross_entropy(logits, y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def test_zeroed_gradients_move_with_the_state():
    _, _, model = assert_equal_to_trainer(Zeroing)
    assert model.state_dict()["gradients"] == {}  # dropped by the validation, as in a Trainer
    model.begin_epoch(EPOCHS)
    model.train_batch(TRAIN[0])
    assert model.state_dict()["gradients"]
    assert built(Scheduled).state_dict()["gradients"] == {}


class Scaled(torch.nn.Module):
    """A plain submodule with state in its attributes."""

    def __init__(self):
        super().__init__()
        self.calls, self._scale = 0, np.ones(2, "f4")
        self.drop = torch.nn.Dropout(0.5)
        self.normed = torch.nn.utils.weight_norm(torch.nn.Linear(3, 3))

    def forward(self, x):
        if self.training:
            self.calls += 1
            self._scale = self._scale * np.float32(0.9)
        return self.normed(self.drop(x)) * float(self._scale.mean())


class Private(Classifier):
    """State in attributes with an underscore, of submodules, and of PyTorch's layers."""

    def __init__(self):
        super().__init__()
        self._seen, self._last, self.__mine, self._shape = 0, None, [1.0], (0, "none")
        self.scaled = Scaled()

    def forward(self, x):
        return self.scaled(self.net(x))

    def on_train_epoch_start(self):
        self.scaled.drop.p = 0.5 / (1 + self.current_epoch)

    def training_step(self, batch, batch_idx):
        self._seen += 1
        loss = super().training_step(batch, batch_idx)
        if self._last is not None:
            loss = loss * (1 - self._seen / 1000) + 0.1 * self._last * self.__mine[-1]
        self._last = loss.detach()
        self.__mine.append(1 / self._seen)
        self._shape = (self._seen, "some")
        return loss


def test_private_and_submodule_attributes_move_with_the_state():
    _, module, model = assert_equal_to_trainer(Private)
    attributes = model.state_dict()["lightning"]["attributes"]
    assert {name: list(found) for name, found in attributes.items()} == {
        "": ["_seen", "_last", "_Private__mine", "_shape"],
        "scaled": ["calls", "_scale"],
        "scaled.drop": ["p"],
    }
    net = model.net
    assert net._seen == net.scaled.calls == module._seen == EPOCHS * STEPS
    assert net._shape == (EPOCHS * STEPS, "some")
    assert isinstance(net.scaled._scale, np.ndarray)
    assert np.array_equal(net.scaled._scale, module.scaled._scale)
    assert net.scaled.drop.p == module.scaled.drop.p == pytest.approx(0.5 / 3)
    # A state without them resets them to what build made.
    state = copy.deepcopy(model.state_dict())
    state["lightning"]["attributes"] = {}
    model.load_state_dict(state)
    assert (net._seen, net._last, net._Private__mine, net._shape) == (0, None, [1.0], (0, "none"))
    assert (net.scaled.calls, net.scaled.drop.p) == (0, 0.5)
    assert model.state_dict()["lightning"]["attributes"] == {}


def test_unchanged_attributes_stay_out_of_the_state():
    """Layers whose attributes PyTorch derives from their parameters."""
    utils = torch.nn.utils

    class Derived(Classifier):
        def __init__(self):
            super().__init__()
            self.lstm = torch.nn.LSTM(5, 5, batch_first=True)
            self.net = torch.nn.Sequential(
                utils.weight_norm(torch.nn.Linear(5, 6)),
                utils.spectral_norm(torch.nn.Linear(6, 6)),
                utils.parametrizations.weight_norm(torch.nn.Linear(6, 6)),
                torch.nn.Linear(6, 3),
            )
            utils.prune.l1_unstructured(self.net[3], "weight", 0.5)

        def forward(self, x):
            return self.net(self.lstm(x[:, None])[0][:, 0])

    _, _, model = assert_equal_to_trainer(Derived)
    lightning_state = model.state_dict()["lightning"]
    assert (lightning_state["attributes"], lightning_state["modes"]) == ({}, {})


def test_lbfgs_has_its_closure():
    class Closed(Classifier):
        def __init__(self):
            super().__init__(dropout=0.0)

        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    assert_equal_to_trainer(Closed)


def refused(match, kind, **options):
    with pytest.raises(InputError, match=match):
        built(kind, **options)


@pytest.mark.parametrize(
    ("name", "cure"),
    [
        ("configure_callbacks", "give callbacks= and stop= to search"),
        ("train_dataloader", "shard the data with cerebro.shard"),
        ("val_dataloader", "give validation= to search"),
        ("on_train_end", "on_trial_end"),
        ("teardown", "on_trial_end"),
    ],
)
def test_overrides_that_a_search_never_calls_are_refused_by_name(name, cure):
    kind = type("Mine", (Classifier,), {name: lambda self, *arguments: None})
    refused(f"Mine overrides {name}, which a search does not call: .*{cure}", kind)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "configure_optimizers returned None: return an optimizer"),
        ({"optim": 1}, "a dict with the keys optim: it takes optimizer"),
        ([3], "returned 3, which is not a torch.optim.Optimizer"),
    ],
)
def test_invalid_configure_optimizers_results_are_refused(returned, message):
    refused(message, type("Mine", (Classifier,), {"configure_optimizers": lambda self: returned}))


def test_schedules_are_checked():
    def with_schedule(make, several=1):
        def configure(self):
            made = [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(several)]
            return {"optimizer": made[0], "lr_scheduler": make(made[0])} if several == 1 else made

        return type("Mine", (Classifier,), {"configure_optimizers": configure})

    refused("ReduceLROnPlateau needs a metric", with_schedule(lr_scheduler.ReduceLROnPlateau))
    step = lr_scheduler.ExponentialLR
    wrong = {"interval": "batch"}
    refused(
        "must be 'epoch' or 'step'", with_schedule(lambda o: {"scheduler": step(o, 1), **wrong})
    )
    refused(
        "has the keys scheduler, freq, monitor",
        with_schedule(lambda o: {"scheduler": step(o, 1), "freq": 1}),
    )
    refused("several optimizers: set self.automatic_optimization", with_schedule(None, 2))
    refused("gradient_clip_val needs automatic", Gan, gradient_clip_val=1.0)


def test_mistakes_are_explained():
    with pytest.raises(InputError, match=r"unpacks its batch, which has the columns 'x', 'y', 'z'"):
        built(Classifier, pairs=False).train_batch({**TRAIN[0], "z": TRAIN[0]["y"]})
    with pytest.raises(InputError, match="needs a LightningModule, not"):
        from_lightning(torch.nn.Linear(1, 1))
    with pytest.raises(InputError, match=r"give Classifier\(...\)"):
        from_lightning(Classifier)
    with pytest.raises(TypeError, match="takes gradient_clip_val=, not clip_norm="):
        from_lightning(Classifier(), clip_norm=1.0)
    with pytest.raises(TypeError, match=r"search\(\) takes epochs="):
        from_lightning(Classifier(), max_epochs=3)

    class Clash(Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

    model = built(Clash)
    model.begin_epoch(0)
    model.train_batch(TRAIN[0])
    with pytest.raises(InputError, match="'train_loss' and 'loss', which are both 'loss'"):
        model.end_epoch(0, {})

    class Stopper(Classifier):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.trainer.should_stop = True

    with pytest.raises(InputError, match=r"should_stop: a trial ends by search\(stop="):
        built(Stopper).train_batch(TRAIN[0])

    class Saver(Classifier):
        def on_train_epoch_end(self):
            self.trainer.save_checkpoint("x")

    with pytest.raises(AttributeError, match=r"trainer.save_checkpoint does not exist.*trial.load"):
        built(Saver).end_epoch(0, {})
    with pytest.raises(InputError, match="Gan has no validation_step"):
        built(Gan, pairs=False).evaluate(VALID)


@pytest.mark.parametrize(
    ("inputs", "for_steps", "for_forward"),
    [
        (None, {"x": 1, "y": 2}, (({"x": 1, "y": 2},), {})),
        ("x", 1, ((1,), {})),
        (["x", "y"], [1, 2], ((1,), {})),
        (["y"], [2], ((2,), {})),
        ({"a": "y"}, {"a": 2}, ((), {"a": 2})),
    ],
)
def test_inputs_give_the_form_of_batches(inputs, for_steps, for_forward):
    form, batch = BatchForm(inputs, None), {"x": 1, "y": 2}
    assert form.arrange(batch) == for_steps
    assert form.call(lambda *args, **kwargs: (args, kwargs), batch) == for_forward


def test_a_whole_batch_is_looked_up_or_unpacked():
    batch = BatchForm(None, None).arrange({"x": 1, "y": 2})
    x, y = batch
    assert (x, y) == (1, 2) == (batch["x"], batch["y"]) == (batch[0], batch[1])
    assert dict(**batch) == {"x": 1, "y": 2} and "x" in batch and isinstance(batch, dict)
    with pytest.raises(KeyError):
        batch["z"]


@pytest.mark.parametrize(
    ("forward", "columns"),
    [
        (lambda x: x, {"x": "x"}),
        (lambda images: images, "x"),
        (lambda batch: batch, None),
        (lambda **inputs: inputs, None),
        (lambda x, y, mask=None: x, {"x": "x", "y": "y"}),
        (lambda x, y=None: x, {"x": "x"}),  # with its target, it would return a loss
    ],
)
@pytest.mark.parametrize("order", [["x", "y"], ["y", "x"]])
def test_forward_gets_columns_by_its_signature(forward, columns, order):
    form = BatchForm(None, None)
    form.bind_columns(SimpleNamespace(forward=forward), order)
    assert form.forward == columns


@pytest.mark.parametrize(
    ("forward", "columns", "names"),
    [
        (lambda images: images, ["id", "x", "y"], "'id', 'x', 'y'"),
        (lambda images: images, ["y"], "'y'"),
        (lambda x, other: x, ["x", "y"], "'x', 'y'"),
    ],
)
def test_forward_is_not_given_columns_by_guess(forward, columns, names):
    form = BatchForm(None, None)
    form.bind_columns(SimpleNamespace(forward=forward), columns)
    with pytest.raises(InputError, match=f"does not tell which of the columns {names} it reads"):
        form.call(forward, dict.fromkeys(columns, 1))


def test_constants_are_those_of_lightnings_trainer():
    theirs = lightning.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
    names = CONSTANTS.keys() - {"precision_plugin", "log_dir"}
    assert {name: CONSTANTS[name] for name in names} == {n: getattr(theirs, n) for n in names}


def test_states_of_other_modules_are_refused():
    model = built(Classifier)
    model.train_batch(TRAIN[0])
    state = copy.deepcopy(model.state_dict())
    assert set(state) == {"net", "optimizer", "metrics", "gradients", "lightning"}
    with pytest.raises(StateError, match="metric"):
        built(Recorder).load_state_dict(state)


def test_only_trained_weights_travel():
    class Frozen(Classifier):
        def __init__(self):
            super().__init__()
            self.net[0].requires_grad_(False)

    model = built(Frozen, state="trainable")
    assert "net.0.weight" not in model.state_dict()["net"]
    model.train_batch(TRAIN[0])
    generators.seed_all(3, True)
    assert_same_numbers(
        dict(hopped(model, lambda: built(Frozen, state="trainable")).state_dict()["net"]),
        dict(model.state_dict()["net"]),
    )


@pytest.mark.parametrize(("kind", "found"), [("step", "OneCycleLR"), ("lists", None)])
def test_a_scheduler_by_step_counts_batches(kind, found):
    class Chosen(Scheduled):
        schedule = kind

    assert built(Chosen).batch_schedule == found
