"""cerebro.torch.Model: equal to a plain loop, with and without hops between units."""

from __future__ import annotations

import copy
import functools
import math
import os
import warnings
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

import cerebro._core as _core
import cerebro.data
from cerebro.data.batches import make_loader
from cerebro.errors import InputError, StateError
from cerebro.machine import generators
from cerebro.model import check_model, get_whole_pass
from cerebro.transforms import RandomHorizontalFlip, Scale, ToCHW

torch = pytest.importorskip("torch")
from torch.nn import functional  # noqa: E402
from torch.optim import lr_scheduler  # noqa: E402

import cerebro.torch  # noqa: E402

UNITS, BATCHES, ROWS = 4, 3, 6
STEPS = UNITS * BATCHES


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def batches(unit, columns=5, count=BATCHES):
    generator = torch.Generator().manual_seed(100 + unit)
    return [
        {
            "x": torch.randn(ROWS, columns, generator=generator),
            "y": torch.randint(0, 3, (ROWS,), generator=generator),
        }
        for _ in range(count)
    ]


def net(**options):
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 8),
        torch.nn.BatchNorm1d(8),
        torch.nn.ReLU(),
        torch.nn.Dropout(0.3),
        torch.nn.Linear(8, 3),
    ).to(**options)


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


def hop(model, build):
    """Return a fresh model with the state of `model`, whose own tensors are then spoilt."""
    carried = _core.unpack_state(_core.pack_state(model.state_dict()), "torch")
    fresh = build()
    fresh.load_state_dict(carried)
    for tensor in tensors(carried):
        tensor.fill_(7)  # as a slot that is packed into again
    return fresh


def state_hash(state):
    return _core.hash_state(_core.pack_state(state))


def tensors(state):
    if isinstance(state, torch.Tensor):
        yield state
    elif isinstance(state, dict):
        for value in state.values():
            yield from tensors(value)
    elif isinstance(state, (list, tuple)):
        for value in state:
            yield from tensors(value)


def flat(state, path=""):
    if isinstance(state, dict):
        return {k: v for key in state for k, v in flat(state[key], f"{path}/{key}").items()}
    if isinstance(state, (list, tuple)):
        return flat(dict(enumerate(state)), path) or {path: state}
    return {path: state}


def assert_same(one, two):
    one, two = flat(one), flat(two)
    assert one.keys() == two.keys()
    for path, value in one.items():
        other = two[path]
        assert type(value) is type(other), path
        if isinstance(value, torch.Tensor):
            assert value.dtype == other.dtype and torch.equal(value, other), path
        else:
            assert value == other, path


def train(build, hops, units=UNITS, data=batches):
    """Train unit after unit; with `hops`, in a fresh model with other generators each time."""
    generators.seed_all(3, True)
    model = build()
    generators.seed_all(4, True)
    losses = []
    for unit in range(units):
        if hops:
            saved = generators.capture(True)
            model = hop(model, build)
            generators.restore(saved)
        for batch in data(unit):
            losses.append(float(model.train_batch(batch)["loss"]))
        model.end_unit()
        if hops == "eval":
            with generators.preserve_generators(True, seed=unit):
                model.evaluate(data(unit + 50))
        if unit % 2:
            model.end_epoch(unit // 2, {"train_loss": 1.0, "val_loss": [0.5, 0.6, 0.7][unit // 2]})
    return losses, copy.deepcopy(model.state_dict())


def assert_hops_leave_no_trace(build, **options):
    straight = train(build, False, **options)
    for hops in (True, "eval"):
        hopped = train(build, hops, **options)
        assert hopped[0] == straight[0]
        assert_same(hopped[1], straight[1])
        assert state_hash(hopped[1]) == state_hash(straight[1])
    return straight


OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "Adam, capturable settings": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.5, fused=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "ASGD": lambda p: torch.optim.ASGD(p, t0=2),
    "Rprop": lambda p: torch.optim.Rprop(p),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_hop(name):
    def build():
        network = net()
        optimizer = OPTIMIZERS[name](network.parameters())
        return cerebro.torch.Model(network, optimizer=optimizer, loss=functional.cross_entropy)

    _, state = assert_hops_leave_no_trace(build)
    # What torch itself makes of it: the same structure, so that it can be used without us.
    again = build()
    again._optimizers[0].load_state_dict(state["optimizer"])


SCHEDULERS = {
    "OneCycleLR": ("batch", lambda o: lr_scheduler.OneCycleLR(o, 0.3, total_steps=STEPS + 1)),
    "CosineAnnealingLR": ("epoch", lambda o: lr_scheduler.CosineAnnealingLR(o, 3)),
    "WarmRestarts": ("batch", lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5)),
    "ReduceLROnPlateau": ("metric", lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0)),
    "LambdaLR": ("epoch", lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch)),
    "MultiStepLR": ("batch", lambda o: lr_scheduler.MultiStepLR(o, [2, 2, 5, 9])),
    "CyclicLR": ("batch", lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.2, step_size_up=4)),
    "ExponentialLR": ("batch", lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
    "SequentialLR": (
        "batch",
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.CosineAnnealingLR(o, 8)], [4]
        ),
    ),
    "SequentialLR to MultiStepLR": (  # whose milestones are a Counter
        "batch",
        lambda o: lr_scheduler.SequentialLR(
            o,
            [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.MultiStepLR(o, [1, 3])],
            [4],
        ),
    ),
    "ChainedScheduler": (
        "batch",
        lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.95)]
        ),
    ),
}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_hop(name, accumulate):
    when, make = SCHEDULERS[name]

    def build():
        network = net()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        return cerebro.torch.Model(
            network,
            optimizer=optimizer,
            loss=functional.cross_entropy,
            scheduler=make(optimizer),
            scheduler_step=when,
            accumulate=accumulate,
        )

    assert_hops_leave_no_trace(build)


def test_schedulers_inside_schedulers_keep_their_containers():
    def build():
        network = net()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        steps = lr_scheduler.MultiStepLR(optimizer, [1, 1, 3], 0.5)
        warm = lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), steps], [2]
        )
        scheduler = lr_scheduler.ChainedScheduler(
            [warm, lr_scheduler.ExponentialLR(optimizer, 0.9)]
        )
        return cerebro.torch.Model(
            network, optimizer=optimizer, loss=functional.cross_entropy, scheduler=scheduler
        )

    model = hop(build(), build)
    steps = model._schedulers[0]._schedulers[0]._schedulers[1]
    assert type(steps.milestones) is Counter
    assert list(steps.milestones.elements()) == [1, 1, 3]


class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = torch.nn.GRU(1, 6, num_layers=2, batch_first=True, dropout=0.2)
        self.head = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(6, 3))
        self.norm = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(6, 6))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        if self.training:
            self.seen = self.seen + len(x)  # a buffer that is replaced, not changed
        return self.head(self.norm(self.gru(x[..., None])[0][:, -1]))


def test_recurrent_networks_hop():
    def build():
        torch.manual_seed(2)
        network = Recurrent()
        optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
        return cerebro.torch.Model(network, optimizer=optimizer, loss=functional.cross_entropy)

    _, state = assert_hops_leave_no_trace(build)
    assert state["net"]["seen"] == STEPS * ROWS


def plain_loop(accumulate, clip, per_batch, units=UNITS):
    """The loop that a user would write, knowing nothing of Cerebro."""
    generators.seed_all(3, True)
    network = net()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.05)
    scheduler = (
        lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1)
        if per_batch
        else lr_scheduler.StepLR(optimizer, 1, 0.5)
    )
    generators.seed_all(4, True)
    losses = []
    for unit in range(units):
        network.train()
        window = batches(unit)
        for number, batch in enumerate(window, 1):
            loss = functional.cross_entropy(network(batch["x"]), batch["y"])
            (loss / accumulate).backward()
            if number % accumulate == 0 or number == len(window):
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(network.parameters(), clip)
                optimizer._opt_called = True
                optimizer.step()
                optimizer.zero_grad()
            if per_batch:
                optimizer._opt_called = True
                scheduler.step()
            losses.append(loss.item())
        if not per_batch and unit % 2:
            scheduler.step()
    return losses, network.state_dict(), optimizer


@pytest.mark.parametrize("per_batch", [True, False])
@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("accumulate", [1, 2, 3, 5])
def test_training_is_bit_for_bit_the_plain_loop(accumulate, clip, per_batch):
    def build():
        network = net()
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.05)
        return cerebro.torch.Model(
            network,
            optimizer=optimizer,
            loss=functional.cross_entropy,
            metrics={"accuracy": accuracy},
            scheduler=lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1)
            if per_batch
            else lr_scheduler.StepLR(optimizer, 1, 0.5),
            scheduler_step="batch" if per_batch else "epoch",
            clip_norm=clip,
            accumulate=accumulate,
        )

    losses, weights, optimizer = plain_loop(accumulate, clip, per_batch)
    for hops in (False, "eval"):
        got, state = train(build, hops)
        assert got == losses
        assert_same(state["net"], dict(weights))
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        assert [
            {k: v for k, v in g.items() if k != "params"}
            for g in state["optimizer"]["param_groups"]
        ] == groups


def test_taking_a_state_ends_an_open_window():
    def build():
        network = net()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        return cerebro.torch.Model(
            network, optimizer=optimizer, loss=functional.cross_entropy, accumulate=4
        )

    one, two = build(), build()
    for model in (one, two):
        generators.seed_all(1, True)
        for batch in batches(0):
            model.train_batch(batch)
    before = copy.deepcopy(dict(one.net.state_dict()))
    one.end_unit()
    one.end_unit()
    assert_same(one.state_dict(), two.state_dict())
    assert not torch.equal(before["0.weight"], one.net[0].weight)
    assert all(parameter.grad is None for parameter in one.net.parameters())


def test_float32_moments_of_bfloat16_parameters_keep_their_bits():
    class Precise(torch.optim.Optimizer):
        """SGD in float32 over parameters of any type."""

        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.05})

        @torch.no_grad()
        def step(self):
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    if not state:
                        state["master"] = parameter.float()
                        state["steps"] = 0
                    state["master"] -= group["lr"] * parameter.grad.float()
                    state["steps"] += 1
                    parameter.copy_(state["master"])

    def build():
        network = net(dtype=torch.bfloat16)
        return cerebro.torch.Model(
            network, optimizer=Precise(network.parameters()), loss=functional.cross_entropy
        )

    def data(unit):
        return [{"x": b["x"].bfloat16(), "y": b["y"]} for b in batches(unit)]

    _, state = assert_hops_leave_no_trace(build, data=data)
    assert state["optimizer"]["state"][0]["master"].dtype == torch.float32
    assert state["optimizer"]["state"][0]["steps"] == STEPS


def test_custom_optimizer_state_methods_are_called():
    class Counting(torch.optim.SGD):
        count = 0

        def step(self, closure=None):
            self.count += 1
            return super().step(closure)

        def state_dict(self):
            return {**super().state_dict(), "count": self.count}

        def load_state_dict(self, state):
            self.count = state["count"]
            super().load_state_dict({k: v for k, v in state.items() if k != "count"})

    def build():
        network = net()
        optimizer = Counting(network.parameters(), lr=0.1, momentum=0.9)
        return cerebro.torch.Model(network, optimizer=optimizer, loss=functional.cross_entropy)

    _, state = assert_hops_leave_no_trace(build)
    assert state["optimizer"]["count"] == STEPS


def test_several_optimizers_and_schedulers():
    def build():
        network = net()
        halves = [network[0].parameters(), [*network[1].parameters(), *network[4].parameters()]]
        optimizers = [
            torch.optim.SGD(halves[0], lr=0.1, momentum=0.9),
            torch.optim.AdamW(halves[1], lr=0.01),
        ]
        schedulers = [lr_scheduler.ExponentialLR(optimizer, 0.9) for optimizer in optimizers]
        return cerebro.torch.Model(
            network,
            optimizer=optimizers,
            loss=functional.cross_entropy,
            scheduler=schedulers,
            scheduler_step="batch",
        )

    _, state = assert_hops_leave_no_trace(build)
    assert list(state["optimizer"]) == ["0", "1"] == list(state["scheduler"])
    with pytest.raises(StateError, match="2 optimizers"):
        build().load_state_dict({**state, "optimizer": state["optimizer"]["0"]})


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_mixed_precision_hops(amp):
    def build():
        network = net()
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
        return cerebro.torch.Model(
            network, optimizer=optimizer, loss=functional.cross_entropy, amp=amp, clip_norm=1.0
        )

    _, state = assert_hops_leave_no_trace(build)
    assert ("scaler" in state) == (amp == "fp16")
    model = build()
    output = model.predict_batch(batches(0)[0])
    assert output.dtype == {"bf16": torch.bfloat16, "fp16": torch.float16}[amp]


def frozen_net(value):
    network = net()
    with torch.no_grad():
        network[0].weight.fill_(value)
    network[0].requires_grad_(False)
    network[1].requires_grad_(False)
    return network


def test_a_frozen_backbone_can_stay_out_of_the_state():
    def build(value=0.5, state="trainable"):
        network = frozen_net(value)
        trained = [p for p in network.parameters() if p.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=0.01)
        return cerebro.torch.Model(
            network, optimizer=optimizer, loss=functional.cross_entropy, state=state
        )

    _, state = assert_hops_leave_no_trace(build)
    assert set(state["net"]) == {
        "4.weight",
        "4.bias",
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }
    assert state["net"]["1.num_batches_tracked"] == STEPS
    whole = build(state="all").state_dict()["net"]
    assert set(whole) == set(net().state_dict())
    with pytest.raises(StateError, match=r"misses 4\.bias"):
        build().load_state_dict(
            {**state, "net": {k: v for k, v in state["net"].items() if k != "4.bias"}}
        )


@pytest.mark.parametrize("state", ["all", "trainable"])
def test_frozen_weights_are_memory_of_the_model(state):
    """Those in the state count with it; those that are left out take as much memory."""
    network = frozen_net(0.5)
    frozen = sum(p.nbytes for p in network.parameters() if not p.requires_grad)
    trained = [p for p in network.parameters() if p.requires_grad]
    model = cerebro.torch.Model(
        network,
        optimizer=torch.optim.Adam(trained, lr=0.01),
        loss=functional.cross_entropy,
        state=state,
    )
    assert frozen > 0
    assert model.held_bytes >= frozen if state == "trainable" else model.held_bytes == 0


def test_batch_norm_frozen_by_build_stays_frozen():
    def build():
        network = net()
        network[1].eval()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        return cerebro.torch.Model(network, optimizer=optimizer, loss=functional.cross_entropy)

    _, state = assert_hops_leave_no_trace(build)
    assert state["net"]["1.num_batches_tracked"] == 0
    pretrained = net().eval()
    model = cerebro.torch.Model(
        pretrained, optimizer=torch.optim.SGD(pretrained.parameters(), lr=0.1)
    )
    assert all(module.training for module in model.net.modules())


def simple(network=None, **options):
    network = network or net()
    options.setdefault("loss", functional.cross_entropy)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    return cerebro.torch.Model(network, optimizer=optimizer, **options)


def test_evaluation_changes_nothing():
    model = simple(metrics={"accuracy": accuracy})
    check_model(model)
    generators.seed_all(0, True)
    model.train_batch(batches(0)[0])
    before, random_before = copy.deepcopy(model.state_dict()), generators.capture(True)
    one = model.eval_batch(batches(1)[0])
    two = model.eval_batch(batches(1)[0])
    assert float(one["loss"]) == float(two["loss"]) and not one["loss"].requires_grad
    assert 0 <= float(one["accuracy"]) <= 1
    model.predict_batch(batches(1)[0])
    assert_same(model.state_dict(), before)
    for key, value in generators.capture(True).items():
        assert np.array_equal(value, random_before[key])


def test_metrics_of_training_are_those_before_the_update():
    model = simple(metrics={"accuracy": accuracy, "top": lambda o, t: (accuracy(o, t), 2 * len(t))})
    reference = net()
    batch = batches(0)[0]
    generators.seed_all(0, True)
    with torch.no_grad():
        output = reference(batch["x"])
    generators.seed_all(0, True)
    values = model.train_batch(batch)
    assert values["loss"].ndim == 0 and not values["loss"].requires_grad
    assert values["loss"] == functional.cross_entropy(output, batch["y"])
    assert values["accuracy"] == accuracy(output, batch["y"])
    assert values["top"] == (accuracy(output, batch["y"]), 2 * ROWS)


def test_a_whole_evaluation_weights_by_rows():
    def f1(outputs, targets):
        predicted = outputs.argmax(1)
        hits = ((predicted == 1) & (targets == 1)).sum()
        return 2 * hits / ((predicted == 1).sum() + (targets == 1).sum())

    model = simple(metrics={"accuracy": accuracy, "half": lambda o, t: (0.5, 3)})
    assert get_whole_pass(model) is None
    model = simple(
        metrics={"accuracy": accuracy, "half": lambda o, t: (0.5, 3)},
        epoch_metrics={"f1": f1, "mean": lambda o, t: (o.mean(), 1)},
    )
    assert get_whole_pass(model) is not None
    uneven = [batches(0)[0], {k: v[:2] for k, v in batches(1)[0].items()}]
    together = {k: torch.cat([b[k] for b in uneven]) for k in ("x", "y")}
    got, wanted = model.evaluate(uneven), model.eval_batch(together)
    output = model.predict_batch(together)
    assert math.isclose(got["loss"], float(wanted["loss"]), rel_tol=1e-6)
    assert math.isclose(got["accuracy"], float(wanted["accuracy"]), rel_tol=1e-6)
    assert got["half"] == 0.5
    assert got["f1"] == float(f1(output, together["y"]))
    assert math.isclose(got["mean"], float(output.mean()), rel_tol=1e-5)
    assert model.evaluate(together, batch_size=6).keys() == got.keys()
    with pytest.raises(InputError, match="no rows"):
        model.evaluate([])


def test_the_runner_measures_what_evaluate_does(tmp_path):
    random = np.random.RandomState(0)
    columns = {"x": random.rand(50, 5).astype(np.float32), "y": random.randint(0, 3, 50)}
    dataset = cerebro.data.shard(columns, tmp_path / "data", shards=3, progress=False)
    metrics = {"accuracy": accuracy, "double": lambda o, t: (o.mean(), 2.0 * len(t))}
    model = simple(metrics=metrics)
    loader = make_loader(dataset, 16, seed=0, shuffle=False)
    loader.begin([range(3)], 0)
    unit = _core.run_unit(loader, model.eval_batch)
    assert unit.rows == 50
    means = {name: total / weight for name, (total, weight) in unit.sums.items()}
    assert means == model.evaluate(dataset, batch_size=16)


def test_predictions_come_in_the_order_of_the_rows(tmp_path):
    model = simple()
    x = torch.randn(600, 5)
    columns = {"x": x, "y": np.zeros(600, np.int64)}
    dataset = cerebro.data.shard(columns, tmp_path / "d", shards=7, shuffle=False, progress=False)
    wanted = model.predict_batch({"x": x})
    for data in (x, x.numpy(), {"x": x}, dataset, [{"x": x[:7]}, {"x": x[7:]}]):
        assert torch.allclose(model.predict(data, batch_size=100), wanted, atol=1e-6)
    assert not model.predict(x).requires_grad
    assert set(model.evaluate(dataset)) == {"loss"}
    with pytest.raises(InputError, match="different numbers of rows"):
        model.predict({"x": x, "y": x[:5]})
    with pytest.raises(InputError, match="no rows"):
        model.predict({"x": x[:0]})
    with pytest.raises(InputError, match="not a dataset"):
        model.predict(3)


def test_predictions_are_made_without_random_transforms(tmp_path):
    columns = {"x": np.arange(40, dtype=np.uint8).reshape(10, 2, 2, 1), "y": np.zeros(10, np.int64)}
    dataset = cerebro.data.shard(columns, tmp_path / "d", shards=2, shuffle=False, progress=False)
    flipped = dataset.with_transforms({"x": [RandomHorizontalFlip(1.0), ToCHW(), Scale(1.0)]})
    network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(4, 1))
    with torch.no_grad():  # integers, which have the same sums in batches of any size
        network[1].weight.copy_(torch.arange(4.0))
        network[1].bias.fill_(3)
    predicted = simple(network).predict(flipped)
    x = torch.arange(40.0).reshape(10, 4)
    assert torch.equal(predicted, network(x).detach())


class TwoInputs(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.one, self.two, self.kind = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3), kind

    def forward(self, first, second, labels=None):
        logits = self.one(first) - self.two(second)
        if self.kind == "tensor":
            return logits
        loss = None if labels is None else functional.cross_entropy(logits, labels)
        return (
            SimpleNamespace(loss=loss, logits=logits)
            if self.kind == "object"
            else {
                "loss": loss,
                "logits": logits,
            }
        )


def test_inputs_by_position_and_by_keyword():
    def build(inputs, kind="tensor", **options):
        torch.manual_seed(1)
        return simple(TwoInputs(kind), inputs=inputs, **options)

    batch = {**batches(0)[0], "z": batches(1)[0]["x"]}
    values = [
        build(["x", "z"]),
        build({"second": "z", "first": "x"}),
        build(
            {"first": "x", "second": "z", "labels": "y"},
            "object",
            loss=None,
            metrics={"accuracy": lambda output, y: accuracy(output.logits, y)},
        ),
        build({"first": "x", "second": "z", "labels": "y"}, "dict", loss=None),
    ]
    losses = {float(model.train_batch(batch)["loss"]) for model in values}
    assert len(losses) == 1
    assert "accuracy" in values[2].eval_batch(batch)
    predicted = values[3].predict({"x": batch["x"], "z": batch["z"], "y": batch["y"]})
    assert set(predicted) == {"loss", "logits"} and predicted["logits"].shape == (ROWS, 3)
    with pytest.raises(InputError, match="network's output, but a Tensor has none"):
        build(["x", "z"], loss=None).train_batch(batch)
    one = torch.nn.Linear(5, 3)
    assert simple(one, inputs=["x"]).predict(batch).shape == (ROWS, 3)
    with pytest.raises(InputError, match="mapping of columns"):
        build(["x", "z"]).predict(batch["x"])


def test_targets_of_several_kinds():
    batch = batches(0)[0]
    reference = float(simple().eval_batch(batch)["loss"])
    several = [
        simple(target=["y", "x"], loss=lambda o, t: functional.cross_entropy(o, t[0])),
        simple(target=["y"], loss=lambda o, t: functional.cross_entropy(o, *t)),
        simple(target={"a": "y"}, loss=lambda o, t: functional.cross_entropy(o, t["a"])),
    ]
    assert {float(model.eval_batch(batch)["loss"]) for model in several} == {reference}
    alone = simple(target=None, loss=lambda o: o.pow(2).mean(), metrics={"max": lambda o: o.max()})
    assert set(alone.train_batch({"x": batch["x"]})) == {"loss", "max"}
    outer = simple(
        target=None, loss=lambda o: o.pow(2).mean(), epoch_metrics={"m": lambda outs: outs.max()}
    )
    assert set(outer.evaluate([batch])) == {"loss", "m"}


def test_counts_of_steps_stay_where_optimizers_read_them():
    """On another device, here one without memory, too; a parameter may be a single number."""
    number = torch.zeros((), device="meta")
    count, moment = torch.tensor(3.0), torch.tensor(0.5)
    placed = cerebro.torch.state._parameter_state
    assert placed(number, "step", None, count, False).device.type == "cpu"
    assert placed(number, "step", None, count, True).device.type == "meta"
    assert placed(number, "exp_avg", None, moment, False).device.type == "meta"


def test_step_replaces_inputs_target_and_loss():
    def step(network, batch):
        output = network(batch["x"])
        loss = functional.cross_entropy(output, batch["y"])
        return {"loss": loss, "accuracy": accuracy(output, batch["y"]), "rows": (1.0, len(output))}

    def build():
        network = net()
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.05)
        scheduler = lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=STEPS + 1)
        return cerebro.torch.Model(
            network, optimizer=optimizer, step=step, scheduler=scheduler, scheduler_step="batch"
        )

    losses, state = assert_hops_leave_no_trace(build)
    plain = plain_loop(1, None, True)
    assert losses == plain[0]
    assert_same(state["net"], dict(plain[1]))
    values = build().train_batch(batches(0)[0])
    assert not values["loss"].requires_grad and values["rows"] == (1.0, ROWS)
    weighted = cerebro.torch.Model(
        (network := net()),
        optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        step=lambda n, b: {"loss": (step(n, b)["loss"], 3)},
    )
    assert weighted.train_batch(batches(0)[0])["loss"][1] == 3
    with pytest.raises(InputError, match="step must return a dict with 'loss'"):
        cerebro.torch.Model(
            (network := net()),
            optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
            step=lambda n, b: n(b["x"]).sum(),
        ).train_batch(batches(0)[0])
    floats = cerebro.torch.Model(
        (network := net()),
        optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        step=lambda n, b: {"loss": n(b["x"]).sum().item()},
    )
    assert isinstance(floats.eval_batch(batches(0)[0])["loss"], float)
    with pytest.raises(InputError, match=r"a loss of type float.*the tensor itself"):
        floats.train_batch(batches(0)[0])


def test_augmentation_is_for_training_and_repeatable():
    def augment(batch):
        return {**batch, "x": batch["x"] + np.random.rand() + torch.rand(())}

    def build():
        return simple(augment=augment)

    assert_hops_leave_no_trace(build)
    batch = batches(0)[0]
    assert build().eval_batch(batch)["loss"] == simple().eval_batch(batch)["loss"]


def test_a_loss_with_parameters_belongs_to_the_state():
    class Margin(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(3))

        def forward(self, output, target):
            return functional.cross_entropy(output * self.scale, target)

    def build():
        network, margin = net(), Margin()
        optimizer = torch.optim.Adam([*network.parameters(), *margin.parameters()], lr=0.1)
        return cerebro.torch.Model(network, optimizer=optimizer, loss=margin, clip_norm=1.0)

    _, state = assert_hops_leave_no_trace(build)
    assert not torch.equal(state["loss"]["scale"], torch.ones(3))


def test_gradients_outside_the_optimizer_do_not_pile_up():
    network = net()
    optimizer = torch.optim.SGD(network[4].parameters(), lr=0.1)
    model = cerebro.torch.Model(
        network, optimizer=optimizer, loss=functional.cross_entropy, clip_norm=0.1
    )
    model.train_batch(batches(0)[0])
    assert all(parameter.grad is None for parameter in network.parameters())


def test_a_state_is_loaded_in_place_where_it_fits():
    network = net()
    optimizer = torch.optim.Adam(network.parameters(), lr=torch.tensor(0.1))
    model = cerebro.torch.Model(network, optimizer=optimizer, loss=functional.cross_entropy)
    model.train_batch(batches(0)[0])
    saved = copy.deepcopy(model.state_dict())
    model.train_batch(batches(1)[0])
    live = list(tensors(model.state_dict()["optimizer"]))
    pointers = [tensor.data_ptr() for tensor in live]
    model.load_state_dict(saved)
    assert_same(model.state_dict(), saved)
    assert [t.data_ptr() for t in tensors(model.state_dict()["optimizer"])] == pointers
    model.train_batch(batches(2)[0])
    filled = _core.load_into(_core.pack_state(saved), model.state_dict())
    model.load_state_dict(filled)
    assert_same(model.state_dict(), saved)
    assert [t.data_ptr() for t in tensors(model.state_dict()["optimizer"])] == pointers
    untrained = net()
    optimizer = torch.optim.Adam(untrained.parameters(), lr=torch.tensor(0.1))
    state = cerebro.torch.Model(untrained, optimizer=optimizer).state_dict()
    model.load_state_dict(state)
    assert_same(model.state_dict(), state)


def test_moments_take_the_memory_format_of_their_parameter():
    def build():
        torch.manual_seed(0)
        network = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        optimizer = torch.optim.Adam(network.parameters())
        return cerebro.torch.Model(network, optimizer=optimizer, target=None, loss=torch.mean)

    model = build()
    model.train_batch({"x": torch.randn(2, 3, 5, 5)})
    state = copy.deepcopy(model.state_dict())
    entry = state["optimizer"]["state"][0]
    entry["exp_avg"] = entry["exp_avg"].contiguous()
    fresh = build()
    fresh.load_state_dict(state)
    moment = fresh._optimizers[0].state[fresh.net.weight]["exp_avg"]
    assert moment.is_contiguous(memory_format=torch.channels_last)
    assert_same(fresh.state_dict(), model.state_dict())


def test_arrays_in_a_state_are_taken_as_tensors():
    model = simple()
    model.train_batch(batches(0)[0])
    state = model.state_dict()
    arrays = {**state, "net": {k: v.numpy().copy() for k, v in state["net"].items()}}
    fresh = simple()
    fresh.load_state_dict(arrays)
    assert_same(fresh.state_dict(), state)


def test_a_mismatched_state_is_refused():
    state = simple().state_dict()
    for other, message in [
        (torch.nn.Linear(5, 3), "misses weight|misses bias"),
        (torch.nn.Sequential(torch.nn.Linear(5, 9)), "does not fit the network"),
    ]:
        with pytest.raises(StateError, match=message):
            simple(other).load_state_dict(state)
    with pytest.raises(StateError, match="has no 'optimizer'"):
        simple().load_state_dict({"net": state["net"]})
    network = net()
    optimizer = torch.optim.SGD([{"params": network[0].parameters()}], lr=0.1)
    model = cerebro.torch.Model(network, optimizer=optimizer)
    with pytest.raises(StateError, match="parameter groups"):
        model.load_state_dict(state)


def test_a_clone_takes_weights_and_progress_but_keeps_its_settings():
    def build(lr, decay=0.0, scheduler=True):
        network = net()
        optimizer = torch.optim.AdamW(network.parameters(), lr=lr, weight_decay=decay)
        return cerebro.torch.Model(
            network,
            optimizer=optimizer,
            loss=functional.cross_entropy,
            scheduler=lr_scheduler.ExponentialLR(optimizer, 0.5) if scheduler else None,
        )

    for scheduler in (True, False):
        parent = build(0.1, scheduler=scheduler)
        for epoch in range(2):
            parent.train_batch(batches(epoch)[0])
            parent.end_epoch(epoch, {})
        state = copy.deepcopy(parent.state_dict())
        clone = build(0.4, 0.3, scheduler=scheduler)
        clone.load_clone(state, {"lr": 0.4})
        got = clone.state_dict()
        assert_same(got["net"], state["net"])
        assert_same(got["optimizer"]["state"], state["optimizer"]["state"])
        group = got["optimizer"]["param_groups"][0]
        assert group["weight_decay"] == 0.3
        assert group["lr"] == (0.1 if scheduler else 0.4)
        if scheduler:
            assert clone._schedulers[0].base_lrs == [0.4]
            clone.end_epoch(2, {})
            assert math.isclose(clone.state_dict()["optimizer"]["param_groups"][0]["lr"], 0.05)


def made(name, optimizer, config):
    """A scheduler, its settings from the configuration."""
    lr, steps = config["lr"], config["steps"]
    return {
        "step": lambda: lr_scheduler.StepLR(optimizer, steps, gamma=config["gamma"]),
        "steps": lambda: lr_scheduler.MultiStepLR(optimizer, [1, steps + 1], config["gamma"]),
        "cosine": lambda: lr_scheduler.CosineAnnealingLR(optimizer, 9),
        "one cycle": lambda: lr_scheduler.OneCycleLR(optimizer, lr, total_steps=9),
        "lambda": lambda: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
        "warm up": lambda: lr_scheduler.SequentialLR(
            optimizer,
            [
                lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4),
                lr_scheduler.CosineAnnealingLR(optimizer, 9),
            ],
            [4],
        ),
        "warm up to steps": lambda: lr_scheduler.SequentialLR(
            optimizer,
            [
                lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
                lr_scheduler.MultiStepLR(optimizer, [1, steps], config["gamma"]),
            ],
            [4],
        ),
        "restarts": lambda: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 3),
    }[name]()


@pytest.mark.parametrize(
    "name",
    ["step", "steps", "cosine", "one cycle", "lambda", "warm up", "warm up to steps", "restarts"],
)
def test_a_clones_schedule_starts_at_the_parents_epoch(name):
    """After the clone its learning rates are those of a trial that always had its configuration."""

    def build(config):
        network = net()
        optimizer = torch.optim.SGD(network.parameters(), lr=config["lr"])
        return cerebro.torch.Model(
            network,
            optimizer=optimizer,
            loss=functional.cross_entropy,
            scheduler=made(name, optimizer, config),
        )

    def rates(model, epochs):
        found = []
        for epoch in epochs:
            found.append(model.state_dict()["optimizer"]["param_groups"][0]["lr"])
            model.train_batch(batches(epoch)[0])
            model.end_epoch(epoch, {})
        return found

    theirs = {"lr": 0.1, "steps": 3, "gamma": 0.5}
    ours = {"lr": 0.4, "steps": 3, "gamma": 0.5}
    always = rates(build(ours), range(8))
    parent = build(theirs)
    rates(parent, range(2))
    state = copy.deepcopy(parent.state_dict())
    clone = build(ours)
    clone.load_clone(state, ours)
    assert_same(clone.state_dict()["net"], state["net"])
    assert rates(clone, range(2, 8)) == pytest.approx(always[2:], rel=1e-6)
    if name in ("step", "steps"):
        clone = build({**ours, "gamma": 0.1})
        clone.load_clone(state, {})
        found = rates(clone, range(2, 5))
        assert found[-1] == pytest.approx(found[0] * 0.1)


def test_a_clone_with_a_scheduler_needs_a_parent_with_one():
    network = net()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    schedule = lr_scheduler.ExponentialLR(optimizer, 0.5)
    model = cerebro.torch.Model(
        network, optimizer=optimizer, loss=functional.cross_entropy, scheduler=schedule
    )
    with pytest.raises(StateError, match="has no 'scheduler'"):
        model.load_clone(simple().state_dict(), {})


def test_a_clones_own_kind_of_scheduler_keeps_its_base_rates():
    class Halving(lr_scheduler.LRScheduler):
        seen = 0

        def get_lr(self):
            self.seen += 1
            return [rate * 0.5**self.last_epoch for rate in self.base_lrs]

    def build(lr):
        network = net()
        optimizer = torch.optim.SGD(network.parameters(), lr=lr)
        schedule = Halving(optimizer)
        return cerebro.torch.Model(
            network, optimizer=optimizer, loss=functional.cross_entropy, scheduler=schedule
        )

    parent, clone = build(0.1), build(0.4)
    for epoch in range(3):
        parent.train_batch(batches(epoch)[0])
        parent.end_epoch(epoch, {})
    clone.load_clone(copy.deepcopy(parent.state_dict()), {})
    assert clone._schedulers[0].seen == 4
    clone.end_epoch(3, {})
    assert clone.state_dict()["optimizer"]["param_groups"][0]["lr"] == 0.4 * 0.5**4


def test_common_loss_mistakes_are_explained():
    with pytest.raises(InputError, match=r"loss is the class MSELoss: give MSELoss\(\)"):
        simple(loss=torch.nn.MSELoss)
    model = simple(loss=torch.nn.CrossEntropyLoss(reduction="none"))
    with pytest.raises(InputError, match="the loss must be a mean over the batch's rows"):
        model.train_batch(batches(0)[0])


def test_plateau_follows_the_metric_it_names():
    def build(step, mode):
        network = net()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, mode, patience=0)
        return cerebro.torch.Model(
            network,
            optimizer=optimizer,
            loss=functional.cross_entropy,
            scheduler=scheduler,
            scheduler_step=step,
        )

    def rate(model):
        return model.state_dict()["optimizer"]["param_groups"][0]["lr"]

    model = build("metric:accuracy", "max")
    for value in (0.5, 0.6, 0.55):
        assert rate(model) == 0.1
        model.end_epoch(0, {"train_loss": 1.0, "val_accuracy": value, "train_accuracy": 0.9})
    assert math.isclose(rate(model), 0.01)
    model = build("metric", "min")
    for value in (1.0, 1.1):
        model.end_epoch(0, {"train_loss": value})
    assert math.isclose(rate(model), 0.01)
    with pytest.raises(InputError, match="needs the metric 'loss', but the epoch has train_mse"):
        model.end_epoch(0, {"train_mse": 1.0})
    with pytest.raises(InputError, match="scheduler_step='metric:accuracy'"):
        build("metric", "max")
    with pytest.raises(InputError, match="follows a metric"):
        build("epoch", "min")


def test_only_schedulers_that_need_a_metric_get_it():
    class Falls:
        """A user's own scheduler; ordinary ones name their optional argument otherwise."""

        def __init__(self):
            self.seen = []

        def step(self, value):
            self.seen.append(value)

        def state_dict(self):
            return {"seen": self.seen}

        def load_state_dict(self, state):
            self.seen = state["seen"]

    class Optional(Falls):
        def step(self, metrics=None):
            self.seen.append(metrics)

    class Subclass(lr_scheduler.ReduceLROnPlateau):
        def step(self, *arguments):
            super().step(*arguments)

    def build(*makes, step="metric"):
        network = net()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        return cerebro.torch.Model(
            network,
            optimizer=optimizer,
            loss=functional.cross_entropy,
            scheduler=[make(optimizer) for make in makes],
            scheduler_step=step,
        )

    def halving(optimizer):
        return lr_scheduler.StepLR(optimizer, 1, 0.5)

    def plateau(optimizer):
        return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)

    model = build(halving, plateau, lambda _: Falls(), lambda _: Optional(), Subclass)
    rates = []
    for epoch, value in enumerate([2.5, 2.25, 2.25, 2.0]):
        model.end_epoch(epoch, {"val_loss": value})
        rates.append(model._optimizers[0].param_groups[0]["lr"])
    assert rates == pytest.approx([0.05, 0.025, 0.00125, 0.000625], rel=1e-12)
    halved, followed, falls, optional, subclass = model._schedulers
    assert halved.last_epoch == 4
    assert followed.best == subclass.best == 2.0
    assert falls.seen == optional.seen == [2.5, 2.25, 2.25, 2.0]
    for step in ("metric", "metric:accuracy"):
        with pytest.raises(InputError, match=f"'{step}'.* but StepLR, StepLR takes none: give"):
            build(halving, halving, step=step)
    simple(scheduler_step="metric").end_epoch(0, {"val_loss": 1.0})  # of a trial without one


def targetless(output):
    return {"mse": output.square().mean()}


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (lambda o, t: (functional.cross_entropy(o, t), o), {}, "<lambda> returned .* type tuple"),
        (targetless, {"target": None}, "targetless returned .* type dict"),
        (
            functools.partial(targetless),
            {"target": None},
            "targetless returned .* type dict: return the tensor itself; .* use step=",
        ),
        (lambda o, t: functional.cross_entropy(o, t).item(), {}, "returned a value of type float"),
        (None, {}, "loss=None takes the loss from .* not a value of type float: give loss="),
        (None, {"target": None}, "loss=None takes the loss .* not a value of type float"),
    ],
)
def test_a_loss_that_is_not_a_tensor_is_refused(loss, options, message):
    class Own(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) if loss is not None else {"loss": 0.5}

    model = simple(Own(5, 3), loss=loss, **options)
    for call in (model.train_batch, model.eval_batch):
        with pytest.raises(InputError, match=message):
            call(batches(0)[0])


def test_errors_name_missing_columns():
    model = simple(inputs="pixels")
    for call in (model.train_batch, model.eval_batch, model.predict_batch):
        with pytest.raises(InputError, match=r"inputs names the column 'pixels', .* has x, y"):
            call(batches(0)[0])
    with pytest.raises(InputError, match="target names the column 'label'"):
        simple(target="label").train_batch(batches(0)[0])

    class Broken(torch.nn.Linear):
        def forward(self, x):
            return {}["lost"]

    with pytest.raises(KeyError, match="lost"):
        simple(Broken(5, 3)).train_batch(batches(0)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"net": 3}, "net must be a torch.nn.Module"),
        ({"optimizer": 3}, "must be a torch.optim.Optimizer"),
        ({"optimizer": []}, "empty list"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=1)}, "none of the network's"),
        ({"optimizer": "lbfgs"}, "LBFGS .* closure"),
        ({"scheduler": 3}, "must be a learning-rate scheduler"),
        ({"scheduler": "other"}, "a different optimizer"),
        ({"scheduler_step": "step"}, "'epoch', 'batch', 'metric'"),
        ({"clip_norm": 0}, "clip_norm must be above 0"),
        ({"accumulate": 0}, "whole number of at least 1"),
        ({"accumulate": 1.5}, "whole number of at least 1"),
        ({"amp": "int8"}, "'bf16' or 'fp16'"),
        ({"graph": True, "amp": "fp16"}, "use amp='bf16'"),
        ({"state": "some"}, "'all' or 'trainable'"),
        ({"metrics": [accuracy]}, "mapping of names to functions"),
        ({"metrics": {"loss": accuracy}}, "two metrics are called 'loss'"),
        ({"metrics": {"a": accuracy}, "epoch_metrics": {"a": accuracy}}, "called 'a'"),
        ({"step": accuracy, "loss": accuracy}, "step replaces"),
        ({"step": accuracy, "epoch_metrics": {"a": accuracy}}, "epoch_metrics need outputs"),
        ({"augment": 3}, "augment must be callable"),
        ({"loss": "mse"}, "loss must be callable"),
        ({"inputs": None}, "inputs must be"),
        ({"inputs": []}, "inputs must be"),
        ({"target": [3]}, "target must be"),
    ],
)
def test_bad_arguments(options, message):
    network = net()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    if options.get("optimizer") == "lbfgs":
        options = {"optimizer": torch.optim.LBFGS(network.parameters())}
    if options.get("scheduler") == "other":
        other = torch.optim.SGD(network.parameters(), lr=0.1)
        options = {"scheduler": lr_scheduler.ExponentialLR(other, 0.9)}
    with pytest.raises(InputError, match=message):
        cerebro.torch.Model(**{"net": network, "optimizer": optimizer, **options})


def test_repr():
    assert repr(simple()) == "cerebro.torch.Model(Sequential, 91 parameters, SGD)"


# --- what belongs to other libraries ---------------------------------------------


@pytest.fixture(scope="module")
def keras():
    before = os.environ.get("KERAS_BACKEND")
    os.environ["KERAS_BACKEND"] = "torch"
    try:
        return pytest.importorskip("keras")
    finally:
        if before is None:
            del os.environ["KERAS_BACKEND"]


def keras_net(keras, compiled):
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), keras.layers.Dense(3)])
    if compiled:
        made.compile(optimizer="adam", loss="mse")
    return made


@pytest.mark.parametrize("compiled", [False, True])
def test_keras_models_are_refused_by_name(keras, compiled):
    made = keras_net(keras, compiled)
    assert isinstance(made, torch.nn.Module)  # PyTorch would take it
    with pytest.raises(InputError, match=r"Sequential: compile a Keras .* cerebro\.keras\.Model"):
        check_model(made)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    for network, what in (
        (made, "net is a Keras Sequential: compile a Keras model, "),
        (torch.nn.Sequential(torch.nn.Flatten(), made), "net.1 is a Keras Sequential"),
    ):
        with pytest.raises(InputError, match=what):
            cerebro.torch.Model(network, optimizer=optimizer, loss=functional.mse_loss)


def test_keras_optimizers_are_refused_by_name(keras):
    with pytest.raises(InputError, match="optimizer is a Keras Adam: compile a Keras model"):
        cerebro.torch.Model(net(), optimizer=keras.optimizers.Adam(), loss=functional.cross_entropy)


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_epoch_metrics_are_given_single_precision(amp):
    seen = []

    def metric(outputs, targets):
        seen.append((outputs.dtype, outputs.numpy().dtype.name, targets.dtype))
        return 1.0

    network = net()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    model = cerebro.torch.Model(
        network,
        optimizer=optimizer,
        loss=functional.cross_entropy,
        epoch_metrics={"m": metric},
        amp=amp,
    )
    assert model.evaluate(batches(0))["m"] == 1.0
    assert seen == [(torch.float32, "float32", torch.int64)]
