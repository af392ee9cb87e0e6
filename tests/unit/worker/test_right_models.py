"""Models without a mistake: the check says nothing about them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from diagnosed import diagnosed

import cerebro

torch = pytest.importorskip("torch")
F, nn = torch.nn.functional, torch.nn

RIGHT: list[Any] = []


def right(**options: Any) -> Callable[..., Any]:
    def note(build: Any) -> Any:
        RIGHT.append(pytest.param(build, options, id=build.__name__))
        return build

    return note


def model(net: Any, loss: Any, *, lr: float = 0.01, kind: Any = None, **options: Any) -> Any:
    optimizer = (kind or torch.optim.Adam)(net.parameters(), lr=lr)
    return cerebro.torch.Model(net, optimizer=optimizer, loss=loss, **options)


def layers(out: int, *end: Any, width: int = 8) -> Any:
    return nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, out), *end)


def accuracy(output, y):
    return (output.argmax(1) == y).float().mean()


class Wrapped(nn.Module):
    """A network with a forward of its own."""

    def __init__(self, forward: Any, **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)
        self._forward = forward

    def forward(self, *inputs):
        return self._forward(self, *inputs)


# --- tables ------------------------------------------------------------------------


@right()
def build_classes(config):
    metrics = {"accuracy": accuracy}
    return model(layers(3), nn.CrossEntropyLoss(), target="label", metrics=metrics)


@right()
def build_label_smoothing(config):
    return model(layers(3), nn.CrossEntropyLoss(label_smoothing=0.1), target="label")


@right()
def build_soft_targets(config):
    return model(layers(3), nn.CrossEntropyLoss(), target="soft")


@right()
def build_log_softmax_and_nll(config):
    return model(layers(3, nn.LogSoftmax(1)), nn.NLLLoss(), target="label")


@right()
def build_log_softmax_and_kl(config):
    loss = nn.KLDivLoss(reduction="batchmean")
    return model(layers(3, nn.LogSoftmax(1)), loss, target="soft")


@right()
def build_regression_of_columns(config):
    return model(layers(1), nn.MSELoss(), target="value1")


@right()
def build_regression_of_rows(config):
    def error(output, y):
        return (output.squeeze(1) - y).abs().mean()

    def loss(output, y):
        return F.huber_loss(output.squeeze(1), y)

    return model(layers(1), loss, target="value", metrics={"mae": error})


@right()
def build_relu_for_counts(config):
    loss = nn.PoissonNLLLoss()
    return model(layers(1, nn.Flatten(0)), loss, target="counts")


@right()
def build_gaussian_likelihood(config):
    def loss(output, y):
        mean, spread = output[:, 0], F.softplus(output[:, 1]) + 1e-3
        return F.gaussian_nll_loss(mean, y, spread)

    return model(layers(2), loss, target="value")


@right()
def build_quantiles(config):
    levels = torch.tensor([0.1, 0.5, 0.9])

    def loss(output, y):
        error = y.unsqueeze(1) - output
        return torch.maximum(levels * error, (levels - 1) * error).mean()

    return model(layers(3), loss, target="value")


@right()
def build_several_labels(config):
    return model(layers(3), nn.BCEWithLogitsLoss(), target="several")


@right()
def build_sigmoid_and_bce(config):
    return model(layers(1, nn.Sigmoid()), nn.BCELoss(), target="flag1")


@right()
def build_focal_loss(config):
    def loss(output, y):
        entropy = F.cross_entropy(output, y, reduction="none")
        return ((1 - torch.exp(-entropy)) ** 2 * entropy).mean()

    return model(layers(3), loss, target="label")


@right()
def build_binary_focal_loss(config):
    def loss(output, y):
        entropy = F.binary_cross_entropy_with_logits(output, y, reduction="none")
        p = torch.sigmoid(output)
        return ((y * (1 - p) + (1 - y) * p) ** 2 * entropy).mean()

    return model(layers(1), loss, target="flag1")


@right()
def build_hinge_loss(config):
    return model(layers(3), nn.MultiMarginLoss(), target="label")


@right()
def build_imbalanced(config):
    def loss(output, y):
        return F.cross_entropy(output, y, weight=torch.tensor([1.0, 9.0]))

    return model(layers(2), loss, lr=0.05, target="seldom", metrics={"accuracy": accuracy})


@right(batch_size=4)
def build_small_batches(config):
    return model(layers(3), nn.CrossEntropyLoss(), target="label", metrics={"accuracy": accuracy})


@right(validation=None)
def build_without_validation(config):
    return model(layers(3), nn.CrossEntropyLoss(), target="label")


@right()
def build_scaled_in_the_network(config):
    net = Wrapped(lambda self, x: self.net((x - 5000) / 1000), net=layers(3))
    return model(net, F.cross_entropy, inputs="raw", target="label")


@right()
def build_batch_norm_first(config):
    net = nn.Sequential(nn.BatchNorm1d(8), layers(3))
    return model(net, F.cross_entropy, inputs="raw", target="label")


@right()
def build_two_inputs(config):
    net = Wrapped(
        lambda self, x, ids: self.net(torch.cat([x, self.words(ids).mean(1)], 1)),
        net=layers(3, width=12),
        words=nn.Embedding(20, 4),
    )
    return model(net, F.cross_entropy, inputs=["x", "ids"], target="label")


@right()
def build_two_targets(config):
    net = Wrapped(
        lambda self, x: (self.one(x), self.two(x).squeeze(1)), one=layers(3), two=layers(1)
    )

    def loss(output, targets):
        return F.cross_entropy(output[0], targets[0]) + F.mse_loss(output[1], targets[1])

    return model(net, loss, target=["label", "value"])


@right()
def build_pairs(config):
    """A contrastive loss compares all rows with all rows, on purpose."""

    def loss(output, y):
        size = output.pow(2).sum(1, keepdim=True)
        distance = (size + size.squeeze(1) - 2 * output @ output.T).clamp(min=1e-6)
        same = y.unsqueeze(1) == y
        return torch.where(same, distance, F.relu(1 - distance.sqrt()) ** 2).mean()

    return model(layers(2), loss, target="label")


@right()
def build_ranking(config):
    def loss(output, y):
        scores = output.squeeze(1)
        return F.softplus(-torch.sign(y[:, None] - y) * (scores[:, None] - scores)).mean()

    return model(layers(1), loss, target="value")


@right()
def build_clip_loss(config):
    net = Wrapped(lambda self, x, u: (self.a(x), self.b(u)), a=layers(4), b=layers(4, width=64))

    def loss(output):
        logits = F.normalize(output[0], dim=1) @ F.normalize(output[1], dim=1).T / 0.1
        own = torch.arange(len(logits))
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2

    return model(net, loss, inputs=["x", "unit"], target=None)


@right()
def build_trained_centers(config):
    class Centers(nn.Module):
        def __init__(self):
            super().__init__()
            self.centers = nn.Parameter(torch.randn(3, 2))

        def forward(self, output, y):
            return ((output - self.centers[y]) ** 2).sum(1).mean()

    net, loss = layers(2), Centers()
    optimizer = torch.optim.Adam([*net.parameters(), *loss.parameters()], lr=0.01)
    return cerebro.torch.Model(net, optimizer=optimizer, loss=loss, target="label")


# --- networks ------------------------------------------------------------------------


@right()
def build_dropout_and_norms(config):
    net = nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2),
        nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 3),
    )  # fmt: skip
    return model(net, F.cross_entropy, target="label", metrics={"accuracy": accuracy})


@right()
def build_convolutions(config):
    net = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(),
        nn.Dropout2d(0.1), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip
    return model(net, F.cross_entropy, inputs="unit", target="label")


@right()
def build_pixels(config):
    net = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 3, 3, padding=1))
    return model(net, F.cross_entropy, inputs="unit", target="pixels")


@right()
def build_autoencoder(config):
    net = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 64), nn.Sigmoid())
    return model(net, nn.MSELoss(), inputs="unit", target="unit")


@right()
def build_variational(config):
    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(code), mean, log_variance

    def loss(output, x):
        rebuilt, mean, log_variance = output
        divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum(1).mean()
        return F.mse_loss(rebuilt, x) + 0.01 * divergence

    net = Wrapped(forward, encoder=layers(8), decoder=layers(8, width=4))
    return model(net, loss, inputs="x", target="x")


@right()
def build_gru(config):
    def forward(self, ids):
        return self.last(self.gru(self.words(ids))[0][:, -1])

    net = Wrapped(forward, words=nn.Embedding(20, 8), gru=nn.GRU(8, 8, batch_first=True),
                  last=nn.Linear(8, 3))  # fmt: skip
    return model(net, F.cross_entropy, inputs="ids", target="label")


@right()
def build_transformer(config):
    def forward(self, ids):
        return self.last(self.encoder(self.words(ids)).mean(1))

    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    net = Wrapped(forward, words=nn.Embedding(20, 8), last=nn.Linear(8, 3),
                  encoder=nn.TransformerEncoder(layer, 1))  # fmt: skip
    return model(net, F.cross_entropy, kind=torch.optim.AdamW, inputs="ids", target="label")


@right()
def build_language_model(config):
    def forward(self, ids):
        return self.last(self.gru(self.words(ids))[0])

    def loss(output, ids):
        return F.cross_entropy(output[:, :-1].flatten(0, 1), ids[:, 1:].flatten())

    net = Wrapped(forward, words=nn.Embedding(20, 8), gru=nn.GRU(8, 8, batch_first=True),
                  last=nn.Linear(8, 20, bias=False))  # fmt: skip
    net.last.weight = net.words.weight  # tied
    return model(net, loss, inputs="ids", target="ids")


@right()
def build_frozen_backbone(config):
    net = Wrapped(
        lambda self, x: self.head(self.backbone(x)),
        backbone=nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1)),
        head=nn.Linear(16, 3),
    )
    net.backbone.requires_grad_(False)
    net.backbone.eval()
    optimizer = torch.optim.Adam(net.head.parameters(), lr=0.01)
    return cerebro.torch.Model(
        net, optimizer=optimizer, loss=F.cross_entropy, target="label", state="trainable"
    )


@right()
def build_average_of_weights(config):
    net = layers(3)
    average = torch.optim.swa_utils.AveragedModel(net)

    def forward(self, x):
        return self.net(x) if self.training else self.average(x)

    whole = Wrapped(forward, net=net, average=average)
    average.requires_grad_(False)

    def step(whole, batch):
        if whole.training:
            whole.average.update_parameters(whole.net)
        return {"loss": F.cross_entropy(whole(batch["x"]), batch["label"])}

    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    return cerebro.torch.Model(whole, optimizer=optimizer, step=step)


# --- training ------------------------------------------------------------------------


@right()
def build_warmup_from_0(config):
    net = layers(3)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    warmup = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 100))
    return cerebro.torch.Model(
        net, optimizer=optimizer, loss=F.cross_entropy, target="label", scheduler=warmup,
        scheduler_step="batch", clip_norm=1.0,
    )  # fmt: skip


@right()
def build_mixed_precision(config):
    return model(layers(3), nn.CrossEntropyLoss(), target="label", amp="bf16", accumulate=2)


@right()
def build_accumulating(config):
    return model(layers(3), nn.CrossEntropyLoss(), target="label", accumulate=8)


@right()
def build_recorded(config):
    return model(layers(3), nn.CrossEntropyLoss(), target="label", graph=True)


@right()
def build_augmented(config):
    def augment(batch):
        batch["x"] += 0.1 * torch.randn_like(batch["x"])  # in place, as it may
        return batch

    return model(layers(3), F.cross_entropy, target="label", augment=augment)


@right()
def build_two_optimizers(config):
    """Two players in one step."""
    net = Wrapped(None, maker=layers(8, width=4), judge=layers(1))

    def step(net, batch):
        real = batch["x"]
        made = net.maker(torch.randn(len(real), 4))
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        judged = F.binary_cross_entropy_with_logits(net.judge(real), ones)
        judged = judged + F.binary_cross_entropy_with_logits(net.judge(made.detach()), zeros)
        fooled = F.binary_cross_entropy_with_logits(net.judge(made), ones)
        return {"loss": judged + fooled, "fooled": fooled}

    optimizers = [torch.optim.Adam(part.parameters(), lr=1e-3) for part in (net.maker, net.judge)]
    return cerebro.torch.Model(net, optimizer=optimizers, step=step)


class Players:
    """A generative adversarial network with steps of its own."""

    framework = "torch"

    def __init__(self, config: Any) -> None:
        self.maker, self.judge = layers(8, width=4), layers(1)
        self.parts = {
            "maker": self.maker,
            "judge": self.judge,
            "one": torch.optim.Adam(self.maker.parameters(), lr=1e-3),
            "two": torch.optim.Adam(self.judge.parameters(), lr=1e-3),
        }

    def losses(self, batch):
        real = batch["x"]
        made = self.maker(torch.randn(len(real), 4))
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        yield F.binary_cross_entropy_with_logits(self.judge(real), ones) + (
            F.binary_cross_entropy_with_logits(self.judge(made.detach()), zeros)
        )
        yield F.binary_cross_entropy_with_logits(self.judge(made), ones)

    def train_batch(self, batch):
        values = []
        for optimizer, loss in zip(("two", "one"), self.losses(batch), strict=True):
            self.maker.zero_grad()
            self.judge.zero_grad()
            loss.backward()
            self.parts[optimizer].step()
            values.append(loss.detach())
        return {"loss": values[0], "fooled": values[1]}

    def eval_batch(self, batch):
        with torch.no_grad():
            judged, fooled = self.losses(batch)
        return {"loss": judged, "fooled": fooled}

    def state_dict(self):
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, state):
        for name, part in self.parts.items():
            part.load_state_dict(state[name])


right()(Players)


class Trained:
    """A loop as it is in the wild, with dropout and batch norm."""

    framework = "torch"

    def __init__(self, config: Any) -> None:
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3)
        )
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)

    def train_batch(self, batch):
        self.net.train()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.net(batch["x"]), batch["label"])
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.item()}

    @torch.no_grad()
    def eval_batch(self, batch):
        self.net.eval()
        output = self.net(batch["x"])
        self.net.train()
        return {
            "loss": F.cross_entropy(output, batch["label"]),
            "accuracy": accuracy(output, batch["label"]),
        }

    def state_dict(self):
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])


right()(Trained)

# --- other frameworks ------------------------------------------------------------------


class Plain:
    """Least squares in NumPy."""

    framework = "numpy"

    def __init__(self, config: Any) -> None:
        self.weights = np.zeros(8)

    def train_batch(self, batch):
        x, y = batch["x"].astype("f8"), batch["value"]
        error = x @ self.weights - y
        self.weights = self.weights - 0.05 * x.T @ error / len(y)
        return {"loss": float(np.mean(error**2))}

    def eval_batch(self, batch):
        return {"loss": float(np.mean((batch["x"] @ self.weights - batch["value"]) ** 2))}

    def state_dict(self):
        return {"weights": self.weights}

    def load_state_dict(self, state):
        self.weights = np.array(state["weights"])


right()(Plain)


def jax_model(apply: Any, out: int, loss: Any, target: str = "label") -> Any:
    pytest.importorskip("jax")
    optax = pytest.importorskip("optax")
    rng = np.random.default_rng(0)
    params = {"w": 0.5 * rng.normal(size=(8, out)).astype("f4"), "b": np.zeros(out, "f4")}
    return cerebro.jax.Model(apply, params, optimizer=optax.adam(0.05), loss=loss, target=target)


def linear(params, x):
    return x @ params["w"] + params["b"]


@right()
def build_jax_classes(config):
    optax = pytest.importorskip("optax")

    def loss(output, y):
        return optax.softmax_cross_entropy_with_integer_labels(output, y).mean()

    return jax_model(linear, 3, loss)


@right()
def build_jax_probabilities(config):
    jax = pytest.importorskip("jax")

    def loss(output, y):
        return -jax.numpy.log(output[jax.numpy.arange(len(y)), y]).mean()

    return jax_model(lambda params, x: jax.nn.softmax(linear(params, x)), 3, loss)


@right()
def build_jax_regression(config):
    return jax_model(linear, 1, lambda o, y: ((o[:, 0] - y) ** 2).mean(), target="value")


@right()
def build_sklearn_linear(config):
    linear_model = pytest.importorskip("sklearn.linear_model")
    return cerebro.sklearn.Model(linear_model.SGDClassifier(random_state=0), target="label")


@right()
def build_sklearn_network(config):
    network = pytest.importorskip("sklearn.neural_network")
    estimator = network.MLPRegressor(
        hidden_layer_sizes=(16,), random_state=0, learning_rate_init=0.01
    )
    return cerebro.sklearn.Model(estimator, target="value")


@right()
def build_sklearn_bayes(config):
    bayes = pytest.importorskip("sklearn.naive_bayes")
    return cerebro.sklearn.Model(bayes.GaussianNB(), inputs="raw", target="label")


@right()
def build_sklearn_clusters(config):
    cluster = pytest.importorskip("sklearn.cluster")
    return cerebro.sklearn.Model(cluster.MiniBatchKMeans(3, random_state=0), inputs="x")


@right()
def build_native(config):
    return cerebro.native.Model((1, 8, 8), 3, lr=0.01, inputs="small_picture", target="label")


@right(batch_size=8)
def build_contrast_of_few(config):
    """Among rows that are alike the loss is log(rows): for 4 rows twice as large as for 2."""

    def loss(output, y):
        return F.cross_entropy(0.001 * output @ output.T, torch.arange(len(output)))

    return model(layers(4), loss, target="value", lr=0.1)


@right()
def build_weighted_rows(config):
    loss = nn.MSELoss(reduction="none")
    return model(layers(1, nn.Flatten(0)), loss, target="value", weight="flag")


@pytest.mark.parametrize("thorough", [True, False], ids=["check", "search"])
@pytest.mark.parametrize(("build", "options"), RIGHT)
def test_a_correct_model_yields_no_findings(build, options, thorough, tmp_path):
    done = diagnosed(build, tmp_path, thorough=thorough, **options)
    assert (done.error, done.problems) == (None, ())
    assert [str(finding) for finding in done.findings] == []
