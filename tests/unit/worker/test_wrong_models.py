"""Models with a mistake: the check names each with its cure."""

from __future__ import annotations

import re
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from diagnosed import diagnosed

import cerebro
from cerebro.worker.diagnosis import check_same_outputs

torch = pytest.importorskip("torch")
F, nn = torch.nn.functional, torch.nn


class Wrong(NamedTuple):
    build: Callable[..., Any]
    code: str
    cure: str
    options: dict[str, Any]
    matters: bool


WRONG: list[Any] = []
REFUSED: list[Any] = []


def wrong(code: str, cure: str, matters: bool = True, **options: Any) -> Callable[..., Any]:
    def note(build: Any) -> Any:
        case = Wrong(build, code, cure, options, matters)
        WRONG.append(pytest.param(case, id=build.__name__))
        return build

    return note


def refused(cure: str, **options: Any) -> Callable[..., Any]:
    """A model that cannot be trained at all, and the cure in its error."""

    def note(build: Any) -> Any:
        REFUSED.append(pytest.param(build, cure, options, id=build.__name__))
        return build

    return note


def model(net: Any, loss: Any, *, lr: float = 0.01, kind: Any = None, **options: Any) -> Any:
    """A `cerebro.torch.Model` over all parameters of a network."""
    optimizer = (kind or torch.optim.Adam)(net.parameters(), lr=lr)
    return cerebro.torch.Model(net, optimizer=optimizer, loss=loss, **options)


def layers(out: int, *end: Any, width: int = 8) -> Any:
    return nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, out), *end)


class Net(nn.Module):
    """Two layers, and what a test adds."""

    def __init__(self, out: int = 3) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, out)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


class Bare:
    """A model of four methods, as users write it."""

    framework = "torch"

    def __init__(self, out: int = 1) -> None:
        self.net = nn.Sequential(
            nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, out)
        )
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)

    def loss(self, batch):
        return F.mse_loss(self.net(batch["x"]).squeeze(1), batch["value"])

    def train_batch(self, batch):
        self.net.train()
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.detach()}

    def eval_batch(self, batch):
        self.net.eval()
        with torch.no_grad():
            return {"loss": self.loss(batch)}

    def state_dict(self):
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state):
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])


# --- shapes ----------------------------------------------------------------------


@wrong("broadcast", "output.squeeze(1)")
def build_column_against_row(config):
    return model(layers(1), nn.MSELoss(), target="value")


@wrong("broadcast", "output.squeeze(1)")
def build_column_against_row_in_a_loss(config):
    return model(layers(1), lambda output, y: ((output - y) ** 2).mean(), target="value")


@wrong("broadcast", "output.squeeze(1)")
def build_row_against_column(config):
    return model(layers(1, nn.Flatten(0)), lambda o, y: (y - o).abs().mean(), target="value1")


@wrong("broadcast", "same shape")
def build_accuracy_that_broadcasts(config):
    def accuracy(output, y):
        return ((output > 0).float() == y).float().mean()

    def loss(output, y):
        return F.binary_cross_entropy_with_logits(output[:, 0], y)

    return model(layers(1), loss, target="flag", metrics={"accuracy": accuracy})


@wrong("broadcast", "same shape")
def build_step_that_broadcasts(config):
    def step(net, batch):
        return {"loss": F.l1_loss(net(batch["x"]), batch["value"])}

    net = layers(1)
    return cerebro.torch.Model(net, optimizer=torch.optim.Adam(net.parameters()), step=step)


@wrong("one-output", "an output for each class")
def build_one_output(config):
    return model(layers(1), lambda o, y: F.cross_entropy(o, torch.zeros_like(y)), target="label")


# --- outputs and losses ------------------------------------------------------------


@wrong("softmax-before-cross-entropy", "return logits")
def build_softmax_layer(config):
    return model(layers(3, nn.Softmax(1)), nn.CrossEntropyLoss(), target="label")


@wrong("softmax-before-cross-entropy", "return logits")
def build_softmax_in_forward(config):
    class Probabilities(Net):
        def forward(self, x):
            return torch.softmax(super().forward(x), dim=-1)

    return model(Probabilities(), F.cross_entropy, target="label")


@wrong("softmax-before-cross-entropy", "return logits", thorough=False)
def build_compiled(config):
    net = torch.compile(layers(3, nn.Softmax(1)), backend="eager")
    return model(net, nn.CrossEntropyLoss(), target="label")


@wrong("log-softmax-before-cross-entropy", "nll_loss", matters=False)
def build_log_softmax(config):
    return model(layers(3, nn.LogSoftmax(1)), nn.CrossEntropyLoss(), target="label")


@wrong("sigmoid-before-cross-entropy", "leave the sigmoid out")
def build_sigmoid_and_cross_entropy(config):
    return model(layers(3, nn.Sigmoid()), nn.CrossEntropyLoss(), target="label")


@wrong("relu-before-cross-entropy", "leave the last ReLU out", matters=False)
def build_relu_at_the_end(config):
    return model(layers(3, nn.ReLU()), nn.CrossEntropyLoss(), target="label")


@wrong("sigmoid-before-logits", "return logits")
def build_sigmoid_twice(config):
    return model(layers(1, nn.Sigmoid()), nn.BCEWithLogitsLoss(), target="flag1")


@wrong("not-log-probabilities", "use cross_entropy")
def build_logits_and_nll(config):
    return model(layers(3), nn.NLLLoss(), target="label")


@wrong("not-log-probabilities", "return log_softmax")
def build_probabilities_and_nll(config):
    return model(layers(3, nn.Softmax(1)), nn.NLLLoss(), target="label")


@wrong("not-log-probabilities", "apply log_softmax")
def build_probabilities_and_kl(config):
    return model(layers(3, nn.Softmax(1)), nn.KLDivLoss(reduction="batchmean"), target="soft")


@wrong("binary-targets", "write the classes as 0 and 1")
def build_classes_one_and_two(config):
    return model(layers(1, nn.Flatten(0)), nn.BCEWithLogitsLoss(), target="flag_from_one")


@wrong("bounded-outputs", "leave out the sigmoid")
def build_sigmoid_for_large_values(config):
    return model(layers(1, nn.Flatten(0), nn.Sigmoid()), nn.MSELoss(), target="large")


@wrong("bounded-outputs", "leave out the ReLU")
def build_relu_for_negative_values(config):
    return model(layers(1, nn.ReLU()), nn.HuberLoss(), target="value1")


@wrong("negated-loss", "leave out the minus sign")
def build_negated_loss(config):
    return model(layers(3), lambda o, y: -F.cross_entropy(o, y), target="label")


@wrong("labels-out-of-range", "info.num_classes('rare')")
def build_one_output_too_few(config):
    return model(layers(3), nn.CrossEntropyLoss(), target="rare")


@wrong("loss-not-finite", "look for log(0)")
def build_log_of_zero(config):
    return model(layers(1), lambda o, y: torch.log(o.clamp(min=0) * 0).mean(), target="value")


# --- data --------------------------------------------------------------------------


@wrong("loss-not-finite", "column 'holes' has NaN")
def build_missing_values(config):
    return model(layers(3), nn.CrossEntropyLoss(), inputs="holes", target="label")


@wrong("missing-values", "fill them", matters=False)
def build_missing_values_as_0(config):
    net = nn.Sequential(Filled(), layers(3))
    return model(net, nn.CrossEntropyLoss(), inputs="holes", target="label")


class Filled(nn.Module):
    def forward(self, x):
        return x.nan_to_num()


@wrong("target-among-inputs", "leave it out")
def build_answer_among_inputs(config):
    net = layers(1, nn.Flatten(0), width=9)
    return model(net, nn.MSELoss(), inputs="with_answer", target="value")


@wrong("target-among-inputs", "leave it out")
def build_answer_as_an_input(config):
    class Two(Net):
        def forward(self, x, y):
            return super().forward(x)[:, 0] + y[:, 0]

    return model(Two(1), nn.MSELoss(), inputs=["x", "value1"], target="value")


@wrong("validation-is-training", "data.split", validation="training")
def build_validated_on_training_rows(config):
    return model(layers(3), nn.CrossEntropyLoss(), target="label")


@wrong("other-transforms", "validation.with_transforms", validation="unscaled")
def build_validated_on_unscaled_pictures(config):
    net = nn.Sequential(nn.Flatten(), layers(3, width=64))
    return model(net, nn.CrossEntropyLoss(), inputs="picture", target="label")


@wrong("repeated-rows", "groups=", matters=False)
def build_repeated_rows(config):
    return model(layers(3), nn.CrossEntropyLoss(), inputs="copies", target="half")


@wrong("constant-column", "leave it out", matters=False)
def build_constant_column(config):
    class Two(Net):
        def forward(self, x, same):
            return super().forward(x) + same

    return model(Two(3), nn.CrossEntropyLoss(), inputs=["x", "same"], target="label")


@wrong("unscaled-inputs", "Normalize", matters=False)
def build_pictures_to_255(config):
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 3))
    return model(net, nn.CrossEntropyLoss(), lr=1e-4, inputs="picture", target="label")


@wrong("majority-class", "balanced accuracy", matters=False)
def build_majority_class(config):
    def accuracy(output, y):
        return (output.argmax(1) == y).float().mean()

    net = nn.Linear(8, 2)
    nn.init.constant_(net.bias[:1], 3.0)
    return model(net, F.cross_entropy, lr=0.003, target="seldom", metrics={"accuracy": accuracy})


# --- training ----------------------------------------------------------------------


@wrong("learning-rate-0", "positive lr")
def build_learning_rate_0(config):
    return model(layers(3), nn.CrossEntropyLoss(), lr=0.0, target="label")


@wrong("large-learning-rate", "0.001", matters=False)
def build_large_learning_rate(config):
    return model(layers(3), nn.CrossEntropyLoss(), lr=0.6, target="label")


@wrong("exploding-loss", "smaller learning rate")
def build_exploding(config):
    net = nn.Sequential(nn.Linear(8, 1), nn.Flatten(0))
    return model(net, nn.MSELoss(), lr=0.6, kind=torch.optim.SGD, target="value")


@wrong("loss-does-not-fall", "larger learning rate", matters=False)
def build_tiny_learning_rate(config):
    return model(layers(3), nn.CrossEntropyLoss(), lr=3e-8, target="label")


@wrong("constant-metric", "which axis", matters=False)
def build_constant_metric(config):
    def accuracy(output, y):
        return (output.argmax(1) == y + 10).float().mean()

    metrics = {"accuracy": accuracy}
    return model(layers(3), F.cross_entropy, lr=0.1, target="label", metrics=metrics)


@wrong("nothing-trains", "the parameters that the loss depends on")
def build_optimizer_of_an_unused_part(config):
    net = Net()
    net.other = nn.Linear(3, 3)
    optimizer = torch.optim.Adam(net.other.parameters())
    return cerebro.torch.Model(net, optimizer=optimizer, loss=F.cross_entropy, target="label")


@wrong("nothing-trains", "the parameters that the loss depends on")
def build_constant_loss(config):
    return model(layers(3), lambda output, y: 1 + 0 * output.sum(), target="label")


@wrong("unused-parameters", "use them in forward", matters=False)
def build_unused_parameters(config):
    net = Net()
    net.other = nn.Linear(3, 3)
    return model(net, F.cross_entropy, target="label")


@wrong("not-in-optimizer", "net.parameters()", matters=False)
def build_forgotten_parameters(config):
    net = Net()
    optimizer = torch.optim.Adam(net.last.parameters())
    return cerebro.torch.Model(net, optimizer=optimizer, loss=F.cross_entropy, target="label")


@wrong("frozen-in-optimizer", "trainable parameters only", matters=False)
def build_frozen_in_optimizer(config):
    net = Net()
    net.first.requires_grad_(False)
    return model(net, F.cross_entropy, target="label")


@wrong("foreign-parameters", "after the network is complete")
def build_optimizer_of_a_replaced_part(config):
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    net.last = nn.Linear(16, 3)
    return cerebro.torch.Model(net, optimizer=optimizer, loss=F.cross_entropy, target="label")


@wrong("same-output", "weights that begin at 0")
def build_dead(config):
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    nn.init.constant_(net[0].bias, -1000)
    return model(net, F.cross_entropy, target="label")


@wrong("same-output", "unused inputs")
def build_that_ignores_inputs(config):
    class Ignores(Net):
        def forward(self, x):
            return super().forward(torch.zeros_like(x))

    return model(Ignores(), F.cross_entropy, target="label")


@wrong("stale-gradients", "zero_grad")
def build_without_zero_grad(config):
    class Forgets(Bare):
        def train_batch(self, batch):
            self.net.train()
            loss = self.loss(batch)
            loss.backward()
            self.optimizer.step()
            return {"loss": loss.detach()}

    return Forgets()


class Halves:
    """A NumPy model that halves an array in column-major order."""

    framework = "numpy"
    shape: tuple[int, ...] = (8, 3)

    def __init__(self) -> None:
        self.W = np.ones(self.shape, "f4", order="F")

    def train_batch(self, batch):
        self.W *= 0.5
        return self.eval_batch(batch)

    def eval_batch(self, batch):
        return {"loss": float(self.W.flat[0])}

    def state_dict(self):
        return {"W": self.W}

    def load_state_dict(self, state):
        self.W = state["W"].copy()


@wrong("changed-layout", "self.W[...] = state['W']")
def build_that_keeps_a_row_major_copy(config):
    return Halves()


@wrong("changed-layout", "contiguous", matters=False)
def build_that_keeps_a_copy_of_more_dimensions(config):
    class Deep(Halves):
        shape = (2, 3, 4)

    return Deep()


# --- modes -------------------------------------------------------------------------


@wrong("evaluates-in-training-mode", "training=self.training")
def build_dropout_in_evaluation(config):
    class Drops(Net):
        def forward(self, x):
            return self.last(F.dropout(torch.tanh(self.first(x)), 0.5))

    return model(Drops(), F.cross_entropy, target="label")


@wrong("evaluates-in-training-mode", "net.eval()")
def build_attention_with_dropout(config):
    class Attends(Net):
        def forward(self, x):
            words = self.first(x).view(-1, 4, 4)
            seen = F.scaled_dot_product_attention(words, words, words, dropout_p=0.1)
            return self.last(seen.flatten(1))

    return model(Attends(), F.cross_entropy, target="label")


@wrong("evaluates-in-training-mode", "net.eval()")
def build_without_eval(config):
    class Forgets(Bare):
        def eval_batch(self, batch):
            with torch.no_grad():
                return {"loss": self.loss(batch)}

    return Forgets()


@wrong("trains-in-evaluation-mode", "net.train()")
def build_eval_in_forward(config):
    class Evaluates(nn.Sequential):
        def forward(self, x):
            self.eval()
            return super().forward(x)

    return model(Evaluates(nn.Linear(8, 9), nn.Dropout(), nn.Linear(9, 3)), F.cross_entropy,
                 target="label")  # fmt: skip


@wrong("trains-in-evaluation-mode", "net.train()")
def build_without_train(config):
    class Forgets(Bare):
        def train_batch(self, batch):
            self.optimizer.zero_grad()
            loss = self.loss(batch)
            loss.backward()
            self.optimizer.step()
            return {"loss": loss.detach()}

    return Forgets()


@wrong("evaluation-changes-model", "eval_batch")
def build_trains_in_evaluation(config):
    class Trains(Bare):
        def eval_batch(self, batch):
            self.net.eval()
            self.optimizer.zero_grad()
            loss = self.loss(batch)
            loss.backward()
            self.optimizer.step()
            return {"loss": loss.detach()}

    return Trains()


@wrong("changed-batch", "x = x / 255")
def build_changed_target(config):
    class Scales(Net):
        def forward(self, x):
            x /= 10
            return super().forward(x)

    return model(Scales(8), nn.MSELoss(), target="x")


# --- other frameworks ----------------------------------------------------------------


def jax_model(apply: Any, out: int, loss: Any, lr: float = 0.05, target: str = "label") -> Any:
    pytest.importorskip("jax")
    optax = pytest.importorskip("optax")
    rng = np.random.default_rng(0)
    params = {"w": 0.5 * rng.normal(size=(8, out)).astype("f4"), "b": np.zeros(out, "f4")}
    return cerebro.jax.Model(apply, params, optimizer=optax.sgd(lr), loss=loss, target=target)


def linear(params, x):
    return x @ params["w"] + params["b"]


def jax_cross_entropy(output, y):
    import optax

    return optax.softmax_cross_entropy_with_integer_labels(output, y).mean()


@wrong("softmax-before-cross-entropy", "return logits")
def build_jax_softmax(config):
    jax = pytest.importorskip("jax")
    return jax_model(lambda p, x: jax.nn.softmax(4 * linear(p, x)), 3, jax_cross_entropy)


@wrong("broadcast", "outputs[:, 0]")
def build_jax_broadcast(config):
    return jax_model(linear, 1, lambda output, y: ((output - y) ** 2).mean(), target="value")


@wrong("constant-loss", "raise the learning rate")
def build_jax_learning_rate_0(config):
    return jax_model(linear, 3, jax_cross_entropy, lr=0.0)


@wrong("labels-out-of-range", "info.num_classes('rare')")
def build_jax_label_too_large(config):
    return jax_model(linear, 3, jax_cross_entropy, target="rare")


@wrong("exploding-loss", "scale inputs")
def build_sklearn_on_raw_inputs(config):
    linear_model = pytest.importorskip("sklearn.linear_model")
    estimator = linear_model.SGDRegressor(random_state=0, eta0=1e-4, penalty=None)
    return cerebro.sklearn.Model(estimator, inputs="raw", target="value")


# --- refused by their framework ----------------------------------------------------


@refused("number the classes from 0")
def build_labels_from_one(config):
    return model(layers(3), nn.CrossEntropyLoss(), target="from_one")


@refused("target.squeeze(1)")
def build_labels_with_two_dimensions(config):
    return model(layers(3), lambda o, y: F.cross_entropy(o, y[:, None]), target="label")


@refused("float32")
def build_double_inputs(config):
    return model(layers(3), nn.CrossEntropyLoss(), inputs="double", target="label")


@refused("does not depend on a trainable parameter")
def build_detached_loss(config):
    return model(layers(3), lambda o, y: F.cross_entropy(o.detach(), y), target="label")


@refused("binary_cross_entropy_with_logits")
def build_logits_and_bce(config):
    return model(layers(1), nn.BCELoss(), target="flag1")


@refused("larger batch_size", batch_size=1)
def build_batch_norm_of_one_row(config):
    return model(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), F.cross_entropy, target="label")


@refused("num_embeddings")
def build_small_embedding(config):
    net = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(24, 3))
    return model(net, F.cross_entropy, inputs="ids", target="label")


@refused("output.squeeze(1)")
def build_bce_with_other_shapes(config):
    return model(layers(1), nn.BCEWithLogitsLoss(), target="flag")


@refused("int64")
def build_float_labels(config):
    return model(layers(3), nn.CrossEntropyLoss(), target="flag")


@refused("float32")
def build_whole_targets(config):
    return model(layers(1, nn.Flatten(0)), nn.BCEWithLogitsLoss(), target="flag_int")


@refused("network's parameters")
def build_optimizer_of_another_network(config):
    optimizer = torch.optim.Adam(layers(3).parameters())
    return cerebro.torch.Model(layers(3), optimizer=optimizer, loss=F.cross_entropy, target="label")


# --- sums over the rows ------------------------------------------------------------


class Autoencoder(nn.Module):
    """A variational autoencoder, whose noise differs from row to row."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(64, 8), nn.Linear(4, 64)

    def forward(self, x):
        mean, log_variance = self.encode(x).chunk(2, dim=1)
        noise = torch.randn_like(mean)
        decoded = torch.sigmoid(self.decode(mean + noise * (log_variance / 2).exp()))
        return decoded, mean, log_variance


def of_autoencoder(output, x):
    decoded, mean, log_variance = output
    divergence = -0.5 * (1 + log_variance - mean**2 - log_variance.exp()).sum()
    return F.binary_cross_entropy(decoded, x, reduction="sum") + divergence


# With more rows the noise is less, in comparison.
@wrong("summed-loss", "divide it by the number of rows", batch_size=64)
def build_summed_autoencoder(config):
    return model(Autoencoder(), of_autoencoder, inputs="unit", target="unit")


@wrong("summed-loss", "divide it by the number of rows", thorough=False)
def build_sum_before_a_search(config):
    loss = nn.MSELoss(reduction="sum")
    return model(layers(1, nn.Flatten(0)), loss, target="value", lr=1e-4)


class Summing(Bare):
    def loss(self, batch):
        return 0.001 * (self.net(batch["x"]).squeeze(1) - batch["value"]).square().sum()


@wrong("summed-loss", "divide it by the number of rows")
def build_bare_sum(config):
    return Summing()


# --- parameters that forward replaces ----------------------------------------------


class Clamped(nn.Module):
    """A network that clamps its weights by a new parameter in each step."""

    def __init__(self, trained: bool) -> None:
        super().__init__()
        self.last, self.trained = nn.Linear(8, 3), trained
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x):
        if self.training:
            self.scale = nn.Parameter(self.scale.clamp(0.5, 2))
        return self.last(x * (self.scale if self.trained else self.scale.detach()))


@wrong("replaced-parameters", "in place")
def build_replaced_parameter(config):
    return model(Clamped(True), F.cross_entropy, target="label")


@wrong("replaced-parameters", "in place", matters=False)
def build_replaced_average(config):
    return model(Clamped(False), F.cross_entropy, target="label")


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_model_yields_its_finding_with_a_fix(case, tmp_path):
    if "jax" in case.build.__name__:  # in the check itself, a skip would be the model's error
        pytest.importorskip("jax")
        pytest.importorskip("optax")
    done = diagnosed(case.build, tmp_path, **case.options)
    assert done.error is None
    found = {finding.code: finding for finding in done.findings}
    assert case.code in found, [str(finding) for finding in done.findings]
    assert case.cure in str(found[case.code])
    assert found[case.code].matters == case.matters
    # Of all that a search would show, nothing is beside the point.
    assert {f.code for f in done.findings if f.matters} <= {case.code}


@pytest.mark.parametrize(("build", "cure", "options"), REFUSED)
def test_the_error_of_a_failing_model_suggests_a_fix(build, cure, options, tmp_path):
    done = diagnosed(build, tmp_path, **options)
    assert done.error is not None and cure in done.error


def test_the_guide_lists_every_finding():
    root = Path(cerebro.__file__).parent
    sources = [*root.glob("worker/*.py"), root / "torch/diagnosis.py"]
    sources.append(root / "coordinator/before_training.py")
    texts = [source.read_text(encoding="utf-8") for source in sources]
    codes = {code for text in texts for code in re.findall(r'Finding\(\s*"([\w-]+)"', text)}
    guide = (root.parent / "docs/guide/diagnosis.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| (?:\*\*)?`([\w-]+)`", guide, re.MULTILINE)
    assert set(listed) == codes and len(listed) == len(codes)
    tested = {case.values[0].code for case in WRONG}
    assert codes - tested == {"wrong-mode", "unchecked-hop"}  # of a search, not of a model


def test_wide_rows_are_compared_without_copies():
    """Rows of an image or a scan: a type with a field for each value would take gigabytes."""
    rows = np.zeros((4, 2**20), np.float32)
    rows[3, -1] = 1.0
    tracemalloc.start()
    try:
        found = list(check_same_outputs(np.zeros((4, 2), np.float32), [rows]))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [finding.code for finding in found] == ["same-output"]
    assert peak < 2 * rows.nbytes
    assert not list(check_same_outputs(np.zeros((4, 2), np.float32), [rows[:3]]))
