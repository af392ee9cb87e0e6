"""Metrics of torchmetrics in a Model: the values of a plain loop, wherever the trial hops."""

from __future__ import annotations

import warnings

import pytest

import cerebro._core as _core
from cerebro.errors import InputError, StateError
from cerebro.machine import generators
from cerebro.worker.models import LiveModel, end_epoch

torch = pytest.importorskip("torch")
torchmetrics = pytest.importorskip("torchmetrics")
from torch.nn import functional  # noqa: E402
from torchmetrics import wrappers  # noqa: E402

import cerebro.torch  # noqa: E402
from cerebro.torch.torchmetrics import extract_numbers  # noqa: E402

UNITS = 3
TASK = {"task": "multiclass", "num_classes": 3}


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "No positive samples")
        yield


def make_batches(seed, rows=(6, 6, 4)):
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "x": torch.randn(n, 5, generator=generator),
            "y": torch.randint(0, 3, (n,), generator=generator),
        }
        for n in rows
    ]


TRAIN, VALID = [make_batches(unit) for unit in range(UNITS)], make_batches(9)


def make_net():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


def accuracy():
    return torchmetrics.Accuracy(**TASK)


def scores():
    """Metrics that share a state, and one that keeps all outputs."""
    parts = [torchmetrics.F1Score(average="macro", **TASK), torchmetrics.Recall(**TASK)]
    return torchmetrics.MetricCollection([*parts, torchmetrics.AUROC(**TASK)])


def build(network=None, **options):
    network = make_net() if network is None else network
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    options.setdefault("loss", None if "step" in options else functional.cross_entropy)
    return cerebro.torch.Model(network, optimizer=optimizer, **options)


def plain_loop(metric, epochs=2):
    """Return (training, validation) values by epoch."""
    network = make_net()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    found = []
    for _ in range(epochs):
        for batch in (batch for unit in TRAIN for batch in unit):
            output = network(batch["x"])
            metric.update(output.detach(), batch["y"])
            optimizer.zero_grad()
            functional.cross_entropy(output, batch["y"]).backward()
            optimizer.step()
        training = metric.compute()
        metric.reset()
        with torch.no_grad():
            for batch in VALID:
                metric.update(network(batch["x"]), batch["y"])
        found.append((training, metric.compute()))
        metric.reset()
    return found


def trained(make, hops, epochs=2):
    """Return the metrics by epoch as (training, validation), and the last state's hash."""

    def hop(model):
        if not hops:
            return model
        carried = _core.unpack_state(_core.pack_state(model.state_dict()), "torch")
        with generators.preserve_generators(True):
            fresh = make()
        fresh.load_state_dict(carried)
        return fresh

    model, found = make(), []
    for epoch in range(epochs):
        for unit in TRAIN:
            for batch in unit:
                assert model.train_batch(batch).keys() == {"loss"}
            model.end_unit()
            model = hop(model)
            model.evaluate(VALID[:1])  # a pass in between counts for nothing
        validation = model.evaluate(VALID)
        model = hop(model)
        found.append((model.end_epoch(epoch, {}), validation))
        model = hop(model)
    return found, _core.hash_state(_core.pack_state(model.state_dict()))


@pytest.mark.parametrize("hops", [False, True])
def test_a_metric_and_a_collection_are_those_of_a_plain_loop(hops):
    found, _ = trained(lambda: build(metrics={"acc": accuracy(), "all": scores()}), hops)
    for ours, plain, together in zip(
        found, plain_loop(accuracy()), plain_loop(scores()), strict=True
    ):
        for values, one, several in zip(ours, plain, together, strict=True):
            expected = {f"all_{name}": float(value) for name, value in several.items()}
            assert values.items() >= {"acc": float(one), **expected}.items()


def test_hops_leave_no_trace():
    def make():
        return build(metrics=scores())

    assert trained(make, True) == trained(make, False)
    assert trained(make, True)[0][0][0].keys() == {
        "MulticlassF1Score", "MulticlassRecall", "MulticlassAUROC"
    }  # fmt: skip


class WithMetric(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = make_net()
        self.accuracy = accuracy()

    def forward(self, x):
        return self.layers(x)


def multioutput():
    def of_classes(target):
        return functional.one_hot(target, 3).float()

    inner = wrappers.MultioutputWrapper(torchmetrics.MeanSquaredError(), 3)
    each = wrappers.ClasswiseWrapper(inner, labels=["a", "b", "c"])
    return wrappers.LambdaInputTransformer(each, transform_target=of_classes)


WRAPPERS = {
    "MinMaxMetric": lambda: wrappers.MinMaxMetric(accuracy()),
    "BootStrapper": lambda: wrappers.BootStrapper(accuracy(), num_bootstraps=3),
    "Running": lambda: wrappers.Running(accuracy(), window=2),
    "Running, all batches": lambda: wrappers.Running(accuracy(), window=20),
    "ClasswiseWrapper": lambda: wrappers.ClasswiseWrapper(
        torchmetrics.Accuracy(average="none", **TASK)
    ),
    "MultioutputWrapper": multioutput,
    "a collection": lambda: torchmetrics.MetricCollection(
        {"a": wrappers.MinMaxMetric(accuracy()), "b": wrappers.Running(accuracy(), window=2)}
    ),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_wrappers_are_computed_like_other_metrics(name):
    if name == "MultioutputWrapper" and not hasattr(wrappers, "LambdaInputTransformer"):
        pytest.skip("this version of torchmetrics has no LambdaInputTransformer")

    def make():
        return build(metrics={"m": WRAPPERS[name]()})

    found, last = trained(make, False)
    assert trained(make, True) == (found, last)
    for ours, plain in zip(found, plain_loop(WRAPPERS[name]()), strict=True):
        for values, expected in zip(ours, plain, strict=True):
            if name == "BootStrapper":  # the passes in between draw random numbers, too
                assert {"m_mean", "m_std"} <= values.keys()
                continue
            flat = extract_numbers("m", expected)
            for key, value in flat.items():
                # The minimum and the maximum are those since the last reset.
                key_of_value = key.replace("_max", "_raw").replace("_min", "_raw")
                assert values[key] == flat[key_of_value] if key_of_value in flat else value


def test_a_wrapper_that_a_step_computes_moves_with_the_trial():
    """The smallest and the largest value of a batch, since the epoch began."""

    class WithWrapper(WithMetric):
        def __init__(self):
            super().__init__()
            self.accuracy = wrappers.MinMaxMetric(accuracy())

    def forward_step(net, batch):
        output = net(batch["x"])
        net.accuracy(output.detach(), batch["y"])
        return {"loss": functional.cross_entropy(output, batch["y"]), "acc": net.accuracy}

    def make():
        return build(WithWrapper(), step=forward_step)

    found = trained(make, False)
    assert trained(make, True) == found
    for values, _ in found[0]:
        assert values["acc_min"] < values["acc_max"]


def test_a_wrapper_over_whole_passes_starts_anew_in_each():
    model = build(epoch_metrics={"m": wrappers.MinMaxMetric(accuracy())})
    first = model.evaluate(VALID)
    for batch in TRAIN[0] * 5:
        model.train_batch(batch)
    second = model.evaluate(VALID)
    assert first["m_raw"] != second["m_raw"]
    for values in (first, second):
        assert values["m_raw"] == values["m_min"] == values["m_max"]


def test_a_wrapper_that_training_does_not_update_has_no_training_value():
    def update(net, batch, optimizer):
        optimizer.zero_grad()
        functional.cross_entropy(net(batch["x"]), batch["y"]).backward()
        optimizer.step()

    metrics = {"m": WRAPPERS["ClasswiseWrapper"]()}
    model = build(loss=functional.cross_entropy, train_step=update, metrics=metrics)
    model.train_batch(VALID[0])
    assert "m_multiclassaccuracy_0" in model.evaluate(VALID)
    assert model.end_epoch(0, {}) == {}


def step(net, batch):
    output = net(batch["x"])
    net.accuracy.update(output.detach(), batch["y"])
    return {"loss": functional.cross_entropy(output, batch["y"]), "acc": net.accuracy}


def test_a_metric_in_the_network_is_returned_by_a_step():
    expected = [tuple(map(float, pair)) for pair in plain_loop(accuracy())]
    for hops in (False, True):
        found, _ = trained(lambda: build(WithMetric(), step=step), hops)
        assert [(one["acc"], two["acc"]) for one, two in found] == expected

    def strange(net, batch):
        return {**step(net, batch), "acc": accuracy()}

    with pytest.raises(InputError, match="returned a MulticlassAccuracy as 'acc', which is not a"):
        build(WithMetric(), step=strange).train_batch(VALID[0])


def test_eval_batch_leaves_accumulated_metrics_alone():
    model = build(metrics={"acc": accuracy()})
    model.train_batch(TRAIN[0][0])
    before = _core.hash_state(_core.pack_state(model.state_dict()))
    with torch.no_grad():
        output = model.net(VALID[0]["x"])
    expected = float((output.argmax(1) == VALID[0]["y"]).float().mean())
    assert model.eval_batch(VALID[0])["acc"] == pytest.approx(expected, abs=1e-7)
    assert _core.hash_state(_core.pack_state(model.state_dict())) == before


def test_schedulers_follow_a_training_metric():
    network = make_net()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, mode="max", patience=0)
    model = cerebro.torch.Model(
        network,
        optimizer=optimizer,
        loss=functional.cross_entropy,
        metrics={"acc": accuracy()},
        scheduler=plateau,
        scheduler_step="metric:acc",
    )
    model.train_batch(VALID[0])
    value = model.end_epoch(0, {"train_loss": 1.0})["acc"]
    assert plateau.best == value


def test_whole_passes_take_collections_too():
    model = build(epoch_metrics={"all": scores()})
    found = model.evaluate(VALID)
    assert found.keys() == {"loss", "all_MulticlassF1Score", "all_MulticlassRecall",
                            "all_MulticlassAUROC"}  # fmt: skip
    assert model.evaluate(VALID) == found
    assert (
        build(epoch_metrics=scores()).evaluate(VALID)["MulticlassRecall"]
        == (found["all_MulticlassRecall"])
    )


def test_non_scalar_metrics_are_refused():
    matrix = torchmetrics.ConfusionMatrix(**TASK)
    with pytest.raises(InputError, match=r"'all' computes a tensor of shape \(3, 3\)"):
        build(metrics={"all": matrix}).evaluate(VALID)
    with pytest.raises(InputError, match=r"graph=True cannot count the batches of metrics\.acc"):
        build(metrics={"acc": accuracy()}, graph=True)


def test_states_of_other_metrics_are_refused():
    state = build(metrics={"acc": accuracy()}).state_dict()
    with pytest.raises(StateError, match=r"the metric metrics\.acc is only in the state"):
        build(metrics={"other": accuracy()}).load_state_dict(state)
    with pytest.raises(StateError, match="has a 'metrics'"):
        build().load_state_dict(state)


def test_the_epochs_metrics_include_the_values_of_end_epoch():
    class Ends:
        def end_epoch(self, epoch, metrics):
            assert metrics == {"train_loss": 2.0, "loss": 2.0}
            return {"auc": torch.tensor(0.75)}

    live = LiveModel(Ends(), torch=True)
    live.progress.add_training({"loss": (4.0, 2.0)})
    expected = {"train_loss": 2.0, "train_auc": 0.75, "loss": 2.0, "auc": 0.75}
    assert end_epoch(live, 0) == expected
    # Also for a reader of the packed state, should the answer be lost.
    packed = _core.pack_state({"progress": live.progress.to_state()})
    assert type(live.progress).from_packed(packed).epoch_metrics() == expected


def gan_loss(net, real, noise):
    fake = net["generator"](noise)
    loss_d = functional.softplus(-net["discriminator"](real)).mean()
    return loss_d + functional.softplus(net["discriminator"](fake.detach())).mean(), fake


def gan_step(net, batch, optimizer_d, optimizer_g):
    """Updates as in the DCGAN tutorial; the discriminator gathers gradients over two batches."""
    noise = torch.randn(len(batch["x"]), 2)
    loss_d, fake = gan_loss(net, batch["x"], noise)
    loss_d.backward()
    net.batches += 1
    if net.batches % 2 == 0:
        optimizer_d.step()
        net["discriminator"].zero_grad()
    net["generator"].zero_grad()
    loss_g = functional.softplus(-net["discriminator"](fake)).mean()
    loss_g.backward(inputs=list(net["generator"].parameters()))
    optimizer_g.step()
    return {"loss": loss_g, "loss_d": loss_d}


def build_gan(**options):
    torch.manual_seed(1)
    net = torch.nn.ModuleDict(
        {"generator": torch.nn.Linear(2, 5), "discriminator": torch.nn.Linear(5, 1)}
    )
    net.register_buffer("batches", torch.tensor(0))
    optimizers = [
        torch.optim.Adam(net[name].parameters(), lr=0.01) for name in ("discriminator", "generator")
    ]
    return cerebro.torch.Model(net, optimizer=optimizers, train_step=gan_step, **options)


def test_a_custom_train_step_matches_a_plain_loop():
    """Units of three batches cut windows of two: the open gradients move with the trial."""
    found = []
    for hops in (False, True):
        model = build_gan()
        generators.seed_all(4, True)
        losses = []
        for unit in TRAIN:
            losses += [model.train_batch(batch) for batch in unit]
            model.end_unit()
            if hops:
                carried = _core.unpack_state(_core.pack_state(model.state_dict()), "torch")
                model = build_gan_with_generators_kept()
                model.load_state_dict(carried)
        found.append((model, losses))
    plain = build_gan()
    generators.seed_all(4, True)
    optimizers = plain._optimizers
    for batch, *losses in zip(
        (batch for unit in TRAIN for batch in unit), *(losses for _, losses in found), strict=True
    ):
        values = gan_step(plain.net, batch, *optimizers)
        for each in losses:
            assert each.keys() == {"loss", "loss_d"} and not each["loss"].requires_grad
            assert all(torch.equal(each[name], values[name].detach()) for name in each)
    for model, _ in found:
        for name, value in plain.net.state_dict().items():
            assert torch.equal(model.net.state_dict()[name], value), name


def build_gan_with_generators_kept():
    with generators.preserve_generators(True):
        return build_gan()


def test_custom_train_steps_are_checked():
    with pytest.raises(InputError, match="train_step only trains: give step= or loss="):
        build_gan().evaluate(VALID)
    for option in ({"clip_norm": 1.0}, {"accumulate": 2}, {"amp": "bf16"}, {"graph": True}):
        with pytest.raises(InputError, match=f"its own updates: leave out {next(iter(option))}"):
            build_gan(**option)

    def validate(net, batch):
        return {"loss": net["discriminator"](batch["x"]).mean()}

    assert build_gan(step=validate).evaluate(VALID).keys() == {"loss"}
    silent = build(train_step=lambda net, batch, optimizer: None)
    assert silent.train_batch(VALID[0]) == {}
    with pytest.raises(InputError, match="train_step must return a dict of metrics, not 3"):
        build(train_step=lambda net, batch, optimizer: 3).train_batch(VALID[0])


def test_error_for_a_step_that_calls_backward_names_train_step():
    def tutorial(net, batch):
        loss = functional.cross_entropy(net(batch["x"]), batch["y"])
        loss.backward()
        return {"loss": loss}

    with pytest.raises(InputError, match=r"step has called backward.*as train_step="):
        build(step=tutorial).train_batch(VALID[0])


def computed(metric, of_classes):
    outputs = torch.tensor([[0.1, 0.8, 0.1], [0.7, 0.2, 0.1], [0.2, 0.2, 0.6], [0.5, 0.3, 0.2]])
    target = torch.tensor([1, 0, 2, 2])
    metric.update(*((outputs, target) if of_classes else (outputs[:, 0], (target == 0).int())))
    return metric.compute()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PrecisionAtFixedRecall", {"min_recall": 0.5}),
        ("RecallAtFixedPrecision", {"min_precision": 0.5}),
        ("SensitivityAtSpecificity", {"min_specificity": 0.5}),
        ("SpecificityAtSensitivity", {"min_sensitivity": 0.5}),
    ],
)
def test_a_threshold_is_reported_too(kind, options):
    metric = getattr(torchmetrics.classification, f"Binary{kind}")(**options)
    value, threshold = map(float, computed(metric, False))
    assert extract_numbers("m", metric.compute(), metric) == {"m": value, "m_threshold": threshold}
    both = torchmetrics.MetricCollection([metric])
    found = extract_numbers("all", both.compute(), both)
    assert found == {f"all_Binary{kind}": value, f"all_Binary{kind}_threshold": threshold}
    network = torch.nn.Linear(5, 1)
    model = cerebro.torch.Model(
        network,
        optimizer=torch.optim.SGD(network.parameters(), lr=0.1),
        loss=lambda output, y: output.square().mean(),
        epoch_metrics={"m": lambda output, y: metric(output.sigmoid()[:, 0], (y > 0).int())},
    )
    assert model.evaluate(VALID).keys() == {"loss", "m"}  # a function's pair is a value and weight


@pytest.mark.parametrize(
    ("kind", "options", "cure"),
    [
        ("MulticlassROC", {}, "summary of the curve, such as AUROC"),
        ("MulticlassPrecisionRecallCurve", {}, "summary of the curve, such as AUROC"),
        ("MulticlassROC", {"thresholds": 5}, "summary of the curve, such as AUROC"),
        ("BinaryROC", {}, "summary of the curve, such as AUROC"),
        ("MulticlassConfusionMatrix", {}, "summary of the matrix, such as MatthewsCorrCoef"),
        ("BinaryConfusionMatrix", {}, "summary of the matrix, such as MatthewsCorrCoef"),
        ("BinaryStatScores", {}, "such as Accuracy, Precision or Recall"),
        ("MulticlassStatScores", {"average": None}, "such as Accuracy, Precision or Recall"),
        ("MulticlassAccuracy", {"average": None}, "such as average='macro'"),
        ("MulticlassRecallAtFixedPrecision", {"min_precision": 0.5}, "report one of its numbers"),
    ],
)
def test_error_for_a_non_scalar_metric_suggests_a_working_fix(kind, options, cure):
    of_classes = kind.startswith("Multiclass")
    if of_classes:
        options = {"num_classes": 3, **options}
    metric = getattr(torchmetrics.classification, kind)(**options)
    value = computed(metric, of_classes)
    text = f"the metric 'm' computes a .*, which is not a number: .*{cure}"
    with pytest.raises(InputError, match=text):
        extract_numbers("m", value, metric)
    both = torchmetrics.MetricCollection([metric])
    with pytest.raises(InputError, match=f"'all_{kind}' computes .*{cure}"):
        extract_numbers("all", {kind: value}, both)


@pytest.mark.parametrize("value", [[1.0, 2.0], (1.0, 2.0, 3.0), torch.ones(2), None])
def test_a_function_that_computes_no_number(value):
    with pytest.raises(InputError, match=r"'m' computes a .*: report one of its numbers"):
        extract_numbers("m", value)


def test_a_function_may_return_a_number_and_its_weight():
    assert extract_numbers("m", (torch.tensor(0.5), 3)) == {"m": 0.5}
