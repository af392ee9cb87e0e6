"""The hop check, for models whose objects are unlike others: Lightning's and compiled ones."""

from __future__ import annotations

import subprocess
import sys
import warnings

import numpy as np
import pytest

import cerebro
from cerebro.errors import StateError

torch = pytest.importorskip("torch")
F = torch.nn.functional


@pytest.fixture
def data(tmp_path):
    rng = np.random.default_rng(0)
    columns = {"x": rng.normal(size=(96, 4)).astype("f4"), "y": rng.integers(0, 3, size=96)}
    return cerebro.shard(columns, tmp_path / "data", shards=2, progress=False)


def searched(build, data, run, **options):
    settings = {"searcher": "grid", "epochs": 2, "batch_size": 16, "workers": 1} | options
    return cerebro.search(build, {"lr": [0.1, 0.2]}, data, run=run, progress=False, **settings)


def hashes(result):
    return [epoch["state_hash"] for trial in result.trials for epoch in trial.history]


# --- Lightning ---------------------------------------------------------------------------


class Tracker:
    def __init__(self):
        self.steps = 1000  # larger than the numbers of which Python has one object each


def lit(kind, lr, **options):
    """Return a model of a LightningModule; `lightning` is imported in the worker only."""
    import lightning

    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 3)
            self.tracker = Tracker()
            self._steps = 0

        def training_step(self, batch, batch_idx):
            x, y = batch
            if kind == "tracker":
                self.tracker.steps += 1
            if kind == "private":
                self._steps += 1
            outputs = self.net(x)
            if kind == "softmax":
                outputs = outputs.softmax(1)
            return F.cross_entropy(outputs, y) * (1 - self._steps / 1000)

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=lr)
            if kind != "warms up":
                return optimizer
            slow = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1e-7 * step)
            return [optimizer], [{"scheduler": slow, "interval": "step"}]

    return cerebro.torch.from_lightning(Lit(), inputs=["x", "y"], **options)


def build_good(config):
    return lit("good", config["lr"])


def build_gathering(config):
    return lit("good", config["lr"], accumulate_grad_batches=3)


def build_warming_up(config):
    return lit("warms up", config["lr"])


def build_softmax(config):
    return lit("softmax", config["lr"])


def build_private(config):
    return lit("private", config["lr"])


def build_tracker(config):
    return lit("tracker", config["lr"])


@pytest.mark.filterwarnings("ignore:no validation data")
def test_a_lightning_module_is_checked_and_diagnosed(data, tmp_path):
    pytest.importorskip("lightning")
    for build in (build_good, build_gathering, build_warming_up):
        good = cerebro.check(build, {"lr": [0.1]}, data)
        assert good.problems == [] and good.metrics == ["loss", "train_loss"]
        assert good.findings == []
    softmax = cerebro.check(build_softmax, {"lr": [0.1]}, data)
    assert softmax.problems == []
    assert [finding.code for finding in softmax.findings] == ["softmax-before-cross-entropy"]
    (lost,) = cerebro.check(build_tracker, {"lr": [0.1]}, data).problems
    assert lost.endswith(".tracker.steps is lost by a hop: it is not in state_dict()")
    with pytest.raises(StateError, match=r"\.tracker\.steps is lost by a hop"):
        searched(build_tracker, data, tmp_path / "run")


@pytest.mark.filterwarnings("ignore:no validation data")
def test_a_private_counter_moves_with_a_lightning_module(data, tmp_path):
    pytest.importorskip("lightning")
    live = searched(build_private, data, tmp_path / "live", live_models=8)
    hopped = searched(build_private, data, tmp_path / "hopped", live_models=1)
    assert hashes(live) == hashes(hopped) and len(hashes(live)) == 4


# --- compiled networks -------------------------------------------------------------------


def network():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


def model(net, lr):
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    return cerebro.torch.Model(net, optimizer=optimizer, loss=F.cross_entropy)


def build_plain(config):
    return model(network(), config["lr"])


def build_compiled(config):
    return model(torch.compile(network(), backend="eager"), config["lr"])


def build_compiled_in_place(config):
    net = network()
    net.compile(backend="eager")
    return model(net, config["lr"])


def test_compiled_networks_are_searched(data, tmp_path):
    plain = searched(build_plain, data, tmp_path / "plain", validation=0.25)
    losses = [trial.metrics["loss"] for trial in plain.trials]
    for build in (build_compiled, build_compiled_in_place):
        run = tmp_path / build.__name__
        found = searched(build, data, run, validation=0.25, live_models=1)
        assert [trial.status for trial in found.trials] == ["finished", "finished"]
        assert [trial.metrics["loss"] for trial in found.trials] == losses


def test_dynamo_attributes_are_not_taken_for_state():
    """Run in a separate process: TorchDynamo stays imported, which prevents recorded steps."""
    code = (
        "import torch; from cerebro.worker.contents import walk\n"
        "layers = torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)\n"
        "net = torch.compile(torch.nn.Sequential(*layers), backend='eager')\n"
        "net(torch.zeros(2, 4))\n"
        "paths = [path for path, _ in walk(net, 'net')]\n"
        "print(sum('weight' in path or 'bias' in path for path in paths),\n"
        "      [path for path in paths if 'dynamo' in path])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["4", "[]"]


class Numbered(torch.nn.Linear):
    """A layer with a unique number, and a counter that is missing from its state."""

    made = 0

    def __init__(self, counts):
        super().__init__(4, 3)
        Numbered.made += 1
        self.number, self.counts, self.calls = Numbered.made, counts, 0

    def forward(self, x):
        self.calls += self.counts
        return super().forward(x)


def build_numbered(config):
    return model(Numbered(config["counts"]), config["lr"])


def test_a_unique_object_number_is_not_reported_as_lost(data):
    space = {"lr": [0.1], "counts": [False]}
    assert cerebro.check(build_numbered, space, data).problems == []
    counting = cerebro.check(build_numbered, {"lr": [0.1], "counts": [True]}, data)
    lost = [problem.split(" is lost")[0] for problem in counting.problems]
    assert lost == ["model.net.calls"]


# --- memory layouts ----------------------------------------------------------------------


class Subspace(torch.optim.Optimizer):
    """SGD with a basis for each matrix, which depends on the basis's memory layout, as products do.

    The bits of a product differ on some machines only, so a step reads the basis in memory order.
    """

    def __init__(self, params, lr, contiguous):
        super().__init__(params, {"lr": lr})
        self.contiguous = contiguous

    @torch.no_grad()
    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                basis = torch.arange(6.0).view(3, 2).t()
                state["Q"] = basis.contiguous() if self.contiguous else basis
            second = state["Q"].as_strided((1,), (1,), 1)
            parameter.add_(parameter.grad * second, alpha=-self.param_groups[0]["lr"])


def build_subspace(config):
    net = network()
    optimizer = Subspace(net.parameters(), config["lr"], config.get("contiguous", False))
    return cerebro.torch.Model(net, optimizer=optimizer, loss=F.cross_entropy)


def test_a_refusal_names_tensors_that_lost_their_memory_layout(data, tmp_path):
    with pytest.raises(StateError, match="does not survive a hop") as refused:
        searched(build_subspace, data, tmp_path / "run")
    text = str(refused.value)
    assert "memory layout of state_dict()['optimizer']['state'][0]['Q']" in text
    assert "make it contiguous where it is made" in text
    assert "put it into state_dict()" not in text  # where it already is
    good = cerebro.check(build_subspace, {"lr": [0.1], "contiguous": [True]}, data)
    assert good.problems == [] and good.findings == []


class OwnAdam(torch.optim.Adam):
    """An optimizer that loads its state itself, so that its moments come back in C order."""

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)


def build_channels_last(config):
    head = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(32, 3))
    net = torch.nn.Sequential(
        torch.nn.Unflatten(1, (4, 1, 1)), torch.nn.ConvTranspose2d(4, 8, 2), torch.nn.ReLU(), head
    ).to(memory_format=torch.channels_last)
    kind = OwnAdam if config["own"] else torch.optim.Adam
    optimizer = kind(net.parameters(), lr=config["lr"])
    return cerebro.torch.Model(net, optimizer=optimizer, loss=F.cross_entropy)


@pytest.mark.parametrize("own", [False, True])
def test_a_network_in_channels_last_has_no_findings(data, own):
    checked = cerebro.check(build_channels_last, {"lr": [0.01], "own": [own]}, data)
    assert checked.problems == [] and checked.findings == []


# --- a check that fails ------------------------------------------------------------------


class FailsOnce:
    """Fails in the first step after a state was loaded, in the hop check only."""

    framework = "numpy"
    loads = 0

    def __init__(self):
        self.w, self.fails = np.zeros(1), False

    def train_batch(self, batch):
        if self.fails:
            raise LookupError("no step after a hop")
        self.w = self.w + batch["x"].mean()
        return {"loss": float(self.w[0] ** 2)}

    eval_batch = train_batch

    def state_dict(self):
        return {"w": self.w}

    def load_state_dict(self, state):
        FailsOnce.loads += 1
        self.w, self.fails = np.array(state["w"]), FailsOnce.loads == 1


def build_failing_once(config):
    assert config["lr"]  # a name that nobody reads is told in a warning
    return FailsOnce()


def test_a_search_warns_if_the_check_fails_after_the_model_has_trained(data, tmp_path):
    FailsOnce.loads = 0
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        result = searched(build_failing_once, data, tmp_path / "run", validation=0.25, workers=0)
    text = "the model trains, but the check of a hop failed: LookupError: no step after a hop"
    (warning,) = [str(each.message) for each in shown]
    assert warning.startswith(f"trial 0: {text} (test_hop_check.py:")
    assert "cerebro.replay" in warning
    assert result.status == "finished"
    assert [trial.status for trial in result.trials] == ["finished", "finished"]
    assert text in str(result.summary())
    with pytest.raises(cerebro.InputError, match="no step after a hop"):
        cerebro.check(build_failing_once, {"lr": [0.1]}, data)


# --- object arrays -----------------------------------------------------------------------


class Named(FailsOnce):
    """A model with an object array: names and a number, which `counts` increases in each step."""

    def __init__(self, counts):
        self.w, self.fails, self.counts = np.zeros(1), False, counts
        self.objects = np.array([*(f"class {i}" for i in range(3)), 1000.5], dtype=object)

    def train_batch(self, batch):
        self.objects[-1] += self.counts
        return super().train_batch(batch)

    def load_state_dict(self, state):
        self.w = np.array(state["w"])


def build_named(config):
    return Named(config["counts"])


@pytest.mark.filterwarnings("ignore:no validation data")
def test_object_arrays_are_compared_by_their_values(data):
    assert cerebro.check(build_named, {"counts": [0]}, data).problems == []
    (lost,) = cerebro.check(build_named, {"counts": [1]}, data).problems
    assert lost == "model.objects[3] is lost by a hop: it is not in state_dict()"


# --- few batches ---------------------------------------------------------------------------


class Drawing(FailsOnce):
    """A model with noise from a generator of NumPy's: its own, the global one, or a new one."""

    def __init__(self, kind):
        self.w, self.fails = np.zeros(1), False
        seeded = np.random.default_rng(0)  # a hop loses how often it was drawn from
        self.draw = {
            "own": seeded.normal,
            "global": np.random.normal,
            "new": lambda: np.random.default_rng().normal(),
        }[kind]

    def train_batch(self, batch):
        self.w = self.w + self.draw()
        return {"loss": 1.0}

    def load_state_dict(self, state):
        self.w = np.array(state["w"])


class Averaged(Drawing):
    """Evaluates with an average of its weights, which a hop loses."""

    def __init__(self):
        super().__init__("global")
        self.mean = np.zeros(1)

    def train_batch(self, batch):
        self.mean = 0.9 * self.mean + 0.1 * self.w
        return super().train_batch(batch)

    def eval_batch(self, batch):
        return {"loss": float(self.mean[0])}


class Begun(Drawing):
    """Counts the epochs it has begun, on which nothing depends."""

    def begin_epoch(self, epoch):
        self.begun = getattr(self, "begun", 1000) + 1


@pytest.mark.filterwarnings("ignore:no validation data")
@pytest.mark.parametrize(("batch_size", "batches"), [(48, 2), (24, 4)])
def test_data_with_few_batches_is_checked_fully(data, batch_size, batches):
    def problems(make, **options):
        found = cerebro.check(lambda config: make(), {}, data, batch_size=batch_size, **options)
        return found.problems

    assert sum(1 for _ in data.batches(batch_size, framework="numpy")) == batches
    assert problems(lambda: Drawing("global"), validation=0.25) == []
    (lost,) = problems(lambda: Drawing("own"))
    assert lost == "after a hop training continued differently: state_dict()['w'] differs"
    (unequal,) = problems(lambda: Drawing("new"))
    assert unequal.startswith("training is not deterministic")
    (lost,) = problems(Averaged, validation=data)
    assert lost == "model.mean is lost by a hop: it is not in state_dict()"
    assert problems(lambda: Begun("global"), validation=data) == []


@pytest.mark.parametrize("batch_size", [96, 16])
def test_a_lightning_module_is_searched_with_few_batches(data, batch_size):
    pytest.importorskip("lightning")
    found = cerebro.check(build_good, {"lr": [0.1]}, data, batch_size=batch_size)
    assert found.problems == []
