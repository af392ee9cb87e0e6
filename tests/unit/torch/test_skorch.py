"""cerebro.torch.from_skorch: the losses and weights of skorch's own loop."""

from __future__ import annotations

import warnings

import pytest

from cerebro.errors import InputError
from cerebro.machine import generators

torch = pytest.importorskip("torch")
skorch = pytest.importorskip("skorch")
from skorch.callbacks import EarlyStopping, GradientNormClipping  # noqa: E402
from skorch.hf import AccelerateMixin  # noqa: E402

from cerebro.torch import from_skorch  # noqa: E402

ROWS, BATCH = 20, 6


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Module(torch.nn.Module):
    def __init__(self, hidden=4, outputs=3, softmax=True):
        super().__init__()
        parts = [
            torch.nn.Linear(5, hidden),
            torch.nn.Dropout(0.3),
            torch.nn.Linear(hidden, outputs),
        ]
        self.layers = torch.nn.Sequential(*parts, *[torch.nn.Softmax(-1)] * softmax)

    def forward(self, x):
        return self.layers(x)


def arrays(kind):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS, 5, generator=generator)
    if kind is skorch.NeuralNetRegressor:
        return x, x[:, :1] * 2
    classes = 2 if kind is skorch.NeuralNetBinaryClassifier else 3
    y = torch.randint(0, classes, (ROWS,), generator=generator)
    return x, y.float() if classes == 2 else y


NETS = [
    (skorch.NeuralNetClassifier, {"criterion__weight": torch.tensor([1.0, 2.0, 0.5])}),
    (skorch.NeuralNetRegressor, {"module__outputs": 1, "module__softmax": False}),
    (skorch.NeuralNetBinaryClassifier, {"module__outputs": 1, "module__softmax": False}),
]


@pytest.mark.parametrize(("kind", "options"), NETS)
def test_losses_and_weights_are_those_of_skorch(kind, options):
    def make():
        return kind(
            Module,
            module__hidden=8,
            optimizer=torch.optim.SGD,
            optimizer__momentum=0.9,
            lr=0.05,
            batch_size=BATCH,
            max_epochs=2,
            train_split=None,
            verbose=0,
            **options,
        )

    x, y = arrays(kind)
    generators.seed_all(3, True)
    net = make().initialize()
    losses = []
    for _ in range(2):
        for start in range(0, ROWS, BATCH):
            rows = slice(start, start + BATCH)
            step = net.train_step((x[rows], y[rows]))
            losses.append(float(step["loss"]))

    generators.seed_all(3, True)
    given = make()
    model = from_skorch(given)
    assert not given.initialized_
    batches = [
        {"x": x[start : start + BATCH], "y": y[start : start + BATCH]}
        for start in range(0, ROWS, BATCH)
    ]
    found = [model.train_batch(batch) for _ in range(2) for batch in batches]
    assert [float(values["loss"]) for values in found] == losses
    for name, value in net.module_.state_dict().items():
        assert torch.equal(model.net.state_dict()[name], value)
    evaluated = model.evaluate(batches)
    if kind is skorch.NeuralNetRegressor:
        assert evaluated.keys() == {"loss"}
    else:
        expected = (net.predict(x.numpy()) == y.numpy()).mean()
        assert evaluated["accuracy"] == pytest.approx(expected)


def net(kind=skorch.NeuralNetClassifier, **options):
    return kind(Module, **options)


def test_unsupported_skorch_options_are_refused_by_name():
    class Mine(skorch.NeuralNetClassifier):
        def train_step_single(self, batch, **fit_params):
            return super().train_step_single(batch, **fit_params)

    class Scaled(skorch.dataset.Dataset):
        def transform(self, X, y):
            return X * 100, y

    class Iterating(skorch.NeuralNetClassifier):
        def get_iterator(self, dataset, training=False):
            return super().get_iterator(dataset, training)

    class Accelerated(AccelerateMixin, skorch.NeuralNetClassifier):
        """Its steps are skorch's own, but not those of its nets."""

    rows = torch.utils.data.TensorDataset(torch.zeros(2, 5))
    weights = torch.utils.data.WeightedRandomSampler([1.0, 2.0], 2)
    for given, message in (
        (net(Iterating), "Iterating overrides get_iterator"),
        (net(Accelerated, accelerator=None), "AccelerateMixin overrides train_step"),
        (net(iterator_train__sampler=weights), "has iterator_train__sampler.*with_sampling"),
        (net(iterator_valid__collate_fn=list), "has iterator_valid__collate_fn"),
        (net(iterator_train__drop_last=True), r"has iterator_train__drop_last: give search\("),
        (net(callbacks=[EarlyStopping()]), "callback EarlyStopping.*use search.stop="),
        (net(callbacks=[("clip", GradientNormClipping)]), "GradientNormClipping.*use clip_norm="),
        (net(warm_start=True), "has warm_start=True"),
        (net(dataset=Scaled), "has dataset=Scaled, which .* not use: .* Dataset.with_transforms"),
        (net(dataset=rows), "has dataset=TensorDataset"),
        (net(dataset=skorch.dataset.Dataset(torch.zeros(2, 5))), "has dataset=Dataset"),
        (net(Mine), "Mine overrides train_step_single.*train_step="),
        (skorch.NeuralNetClassifier, "needs a net such as"),
        (Module(), "needs a net such as"),
    ):
        with pytest.raises(InputError, match=message):
            from_skorch(given)
    with pytest.raises(TypeError, match="takes make_scheduler=, not scheduler="):
        from_skorch(net(), scheduler=1)


def test_error_names_a_criterion_that_returns_several_values():
    class Several(torch.nn.NLLLoss):
        def forward(self, output, target):
            return super().forward(output, target), output

    class Plain(skorch.NeuralNetClassifier):
        def get_loss(self, output, target, *arguments, **options):
            return self.criterion_(output, target)

    x, y = arrays(skorch.NeuralNetClassifier)
    with pytest.raises(InputError, match=r"loss must .*, but Several returned .* type tuple"):
        from_skorch(net(Plain, criterion=Several)).train_batch({"x": x, "y": y})


def test_a_loss_of_ones_own_may_pass_rows_on_but_not_read_them():
    class Passing(skorch.NeuralNetClassifier):
        def get_loss(self, output, target, X=None, training=False):
            return 2 * super().get_loss(output, target, X=X, training=training)

    class Reading(skorch.NeuralNetClassifier):
        def get_loss(self, output, target, X=None, training=False):
            loss = super().get_loss(output, target, X=X, training=training)
            return loss if X is None else loss * (1 + X.mean())

    class Comparing(skorch.NeuralNetClassifier):
        def get_loss(self, output, target, X=None, training=False):
            return (X == 0).any() * output.mean()

    class Squaring(skorch.NeuralNetClassifier):
        def get_loss(self, output, target, X=None, training=False):
            return (X**2).mean()

    x, y = arrays(skorch.NeuralNetClassifier)
    losses = []
    for kind in (skorch.NeuralNetClassifier, Passing):
        generators.seed_all(3, True)
        losses.append(float(from_skorch(net(kind)).train_batch({"x": x, "y": y})["loss"]))
    assert losses[1] == 2 * losses[0]
    for kind in (Reading, Squaring, Comparing):
        with pytest.raises(InputError, match="get_loss reads X, which a search does not pass"):
            from_skorch(net(kind)).train_batch({"x": x, "y": y})


def test_the_accuracy_of_several_outputs_is_that_of_the_first():
    class Pair(Module):
        def forward(self, x):
            return super().forward(x), x

    class First(skorch.NeuralNetClassifier):
        def get_loss(self, output, target, X=None, training=False):
            return super().get_loss(output[0], target, training=training)

    x, y = arrays(skorch.NeuralNetClassifier)
    model = from_skorch(First(Pair))
    expected = (model.net.eval()(x)[0].argmax(1) == y).float().mean()
    assert model.evaluate([{"x": x, "y": y}])["accuracy"] == pytest.approx(float(expected))


def test_schedules_and_clipping_replace_callbacks():
    model = from_skorch(
        net(lr=1.0),
        make_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        clip_norm=0.1,
    )
    model.end_epoch(0, {})
    assert model._optimizers[0].param_groups[0]["lr"] == 0.5
