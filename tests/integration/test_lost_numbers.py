"""Numbers that a hop loses, in configurations and after batches that the check does not try."""

from __future__ import annotations

import math
import random
import warnings

import numpy as np
import pytest

import cerebro
from cerebro.worker import lost_numbers
from cerebro.worker.contents import walk

torch = pytest.importorskip("torch")
F = torch.nn.functional


@pytest.fixture
def data(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 4)).astype("f4")
    columns = {"x": x, "y": (x[:, 0] > 0).astype("i8")}
    return cerebro.shard(columns, tmp_path / "data", shards=2, progress=False)


class Net(torch.nn.Linear):
    """A layer with a temperature, which a subclass changes."""

    def __init__(self):
        super().__init__(4, 2)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.tau, self.calls = 1.0, 0

    def forward(self, x):
        if self.training:
            self.steps += 1
            self.change(int(self.steps))
        return super().forward(x) / self.tau


class Annealed(Net):
    def change(self, step):
        self.tau *= 0.9


class Late(Net):
    """Lowers the temperature later than in the batches of the check."""

    def change(self, step):
        if step % 7 == 0:
            self.tau *= 0.5


class Counting(Net):
    """Computes its temperature from a counter, and counts something else, too."""

    def change(self, step):
        if step > 6:
            self.calls += 1
        self.tau = math.exp(-self.calls / 100)


class Computed(Net):
    """Computes the temperature from the state in each step."""

    def change(self, step):
        self.tau = 0.9**step


class Harmless(Net):
    """Counts, but nothing depends on it."""

    def change(self, step):
        if step > 6:
            self.calls += 1


class Saved(Net):
    """Has the temperature in its state."""

    def change(self, step):
        self.tau *= 0.9

    def get_extra_state(self):
        return {"tau": self.tau}

    def set_extra_state(self, state):
        self.tau = state["tau"]


def model(net, loss=F.cross_entropy):
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    return cerebro.torch.Model(net, optimizer=optimizer, loss=loss)


def build_one_of(config):
    return model({kind.__name__: kind for kind in Net.__subclasses__()}[config["kind"]]())


def build_closure(config):
    """Return a model whose loss keeps its own weight."""
    weight = {"of_norm": 0.0}

    def loss(output, y):
        if config["kind"] == "Annealed":
            weight["of_norm"] += 0.1
        return F.cross_entropy(output, y) + weight["of_norm"] * output.square().mean()

    return model(torch.nn.Linear(4, 2), loss)


def searched(data, run, *kinds, build=build_one_of, **changes):
    options = {"searcher": "grid", "epochs": 2, "batch_size": 8, "workers": 0} | changes
    space = {"kind": ["Computed", *kinds]}
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        result = cerebro.search(
            build, space, data, validation=0.25, run=run, progress=False, **options
        )
    assert [trial.status for trial in result.trials] == ["finished"] * len(space["kind"])
    return result, [str(warning.message) for warning in shown]


def text(lost):
    return (
        f"trial 1: a hop loses {lost}, which training changes: make it a buffer, or put it into "
        "state_dict"
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["Annealed", "Late"])
def test_a_warning_names_a_number_changed_outside_the_state(data, tmp_path, kind, workers):
    result, shown = searched(data, tmp_path / "run", kind, kind, workers=workers)
    assert [each.replace("trial 2", "trial 1") for each in shown] == [text("model.net.tau")]
    events = [event for event in result.events() if event["kind"] == "warning"]
    assert sorted(event["trial"] for event in events) == [1, 2]  # once for each trial
    assert "a hop loses model.net.tau" in result.trials[1].log


def test_a_warning_names_numbers_that_others_depend_on(data, tmp_path):
    _, (shown,) = searched(data, tmp_path / "run", "Counting")
    assert "a hop loses model.net.calls, model.net.tau, which training changes" in shown


def test_a_warning_names_a_number_in_a_closure(data, tmp_path):
    _, shown = searched(data, tmp_path / "run", "Annealed", build=build_closure)
    assert shown == [text("model._loss.weight['of_norm']")]


def test_saved_computed_and_harmless_numbers_cause_no_warning(data, tmp_path):
    _, shown = searched(data, tmp_path / "run", "Saved", "Computed", "Harmless")
    assert shown == []


def test_warning_filters_can_hide_the_warning_but_not_end_a_trial(data, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = cerebro.search(
            build_one_of, {"kind": ["Computed", "Annealed"]}, data, validation=0.25, epochs=1,
            batch_size=8, run=tmp_path / "ignored", progress=False, workers=1, searcher="grid",
        )  # fmt: skip
    assert [event for event in result.events() if event["kind"] == "warning"] == []
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("error")
        result = cerebro.search(
            build_one_of, {"kind": ["Computed", "Annealed"]}, data, validation=0.25, epochs=1,
            batch_size=8, run=tmp_path / "errors", progress=False, workers=1, searcher="grid",
        )  # fmt: skip
    assert [trial.status for trial in result.trials] == ["finished", "finished"]
    assert [str(warning.message) for warning in shown] == [text("model.net.tau")]


def test_the_comparison_changes_neither_states_nor_generators(data, tmp_path, monkeypatch):
    random.seed(5)
    kinds = ("Annealed", "Late", "Counting", "Harmless")
    compared, _ = searched(data, tmp_path / "with", *kinds)
    after = random.random()
    monkeypatch.setattr(lost_numbers, "warn_of_lost_numbers", lambda *_: ())
    random.seed(5)
    without, _ = searched(data, tmp_path / "without", *kinds)
    assert random.random() == after
    for one, two in zip(compared.trials, without.trials, strict=True):
        hashes = [[epoch["state_hash"] for epoch in trial.history] for trial in (one, two)]
        assert hashes[0] == hashes[1] and len(hashes[0]) == 2


# --- what the check says -----------------------------------------------------------------


class Averaged(torch.nn.Module):
    """A codebook whose averages `forward` replaces by new parameters, as many VQ-VAEs do."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = torch.nn.Linear(4, 2), torch.nn.Linear(2, 4)
        self.codes = torch.nn.Parameter(torch.randn(3, 2))

    def forward(self, x):
        encoded = self.encode(x)
        chosen = torch.cdist(encoded, self.codes).argmin(1)
        if self.training:
            sums = torch.zeros(3, 2).index_add_(0, chosen, encoded.detach())
            self.codes = torch.nn.Parameter(0.9 * self.codes + 0.1 * sums)
        quantized = self.codes[chosen].detach()
        return self.decode(encoded + (quantized - encoded).detach())


def build_averaged(config):
    net = Averaged()
    optimizer = torch.optim.Adam(net.parameters(), lr=config["lr"])
    return cerebro.torch.Model(net, optimizer=optimizer, loss=F.mse_loss, target="x")


def test_a_parameter_that_forward_replaces_is_in_the_state(data, tmp_path):
    checked = cerebro.check(build_averaged, {"lr": [0.1]}, data, validation=0.25, batch_size=8)
    assert checked.problems == []
    hashes = []
    for live_models in (1, 8):
        result = cerebro.search(
            build_averaged, {"lr": [0.1, 0.2]}, data, validation=0.25, epochs=2, batch_size=8,
            run=tmp_path / f"{live_models}", progress=False, workers=0, searcher="grid",
            live_models=live_models,
        )  # fmt: skip
        hashes.append([epoch["state_hash"] for t in result.trials for epoch in t.history])
    assert hashes[0] == hashes[1] and len(hashes[0]) == 4


def test_paths_name_tensors_briefly():
    tensors = {torch.zeros(100, 100): 1.0, torch.ones(2): 2.0}
    assert list(dict(walk(tensors, "state"))) == [
        "state[<0: Tensor 100x100>]",
        "state[<1: Tensor 2>]",
    ]


class Scaled(torch.nn.Module):
    """A layer whose scale is set from the first batch, as in an ActNorm."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 2)
        self.register_buffer("scale", torch.ones(4))
        self.initialized = False

    def forward(self, x):
        if not self.initialized:
            self.scale.copy_(1 / x.std(0))
            self.initialized = True
        return self.linear(x * self.scale)


class Noisy(torch.nn.Linear):
    """A layer that has its own random generator."""

    def __init__(self):
        super().__init__(4, 2)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        return super().forward(x + torch.randn(x.shape, generator=self.generator))


def build_scaled(config):
    return model(Scaled())


def build_noisy(config):
    return model(Noisy())


@pytest.mark.parametrize(
    ("build", "lost"),
    [(build_scaled, "model.net.initialized"), (build_noisy, "model.net.generator")],
)
def test_the_check_names_a_lost_flag_or_generator(data, build, lost):
    problems = cerebro.check(build, {"lr": [0.1]}, data, batch_size=8).problems
    assert problems[0].startswith("after a hop training continued differently: state_dict()")
    assert problems[1:] == [f"{lost} is lost by a hop: it is not in state_dict()"]
