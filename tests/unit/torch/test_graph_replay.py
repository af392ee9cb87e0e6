"""Runs of batches that the C core replays: what it is given, and that bits are those of steps."""

from __future__ import annotations

import copy

import pytest

import cerebro._core as _core
from cerebro.machine import generators

torch = pytest.importorskip("torch")
from captured import is_captured, refusal_of  # noqa: E402
from graph_fakes import (  # noqa: E402
    Again,
    Given,
    adam,
    batches,
    drive,
    floats,
    model,
    network,
    rmsprop,
    sgd,
)  # fmt: skip
from torch.optim import lr_scheduler  # noqa: E402

from cerebro.torch import graph_replay  # noqa: E402
from cerebro.torch.graph import COMPARED, WARM_UP  # noqa: E402

BEFORE = WARM_UP + COMPARED
N = 12


@pytest.fixture(autouse=True)
def core(monkeypatch):
    monkeypatch.setattr(graph_replay, "make_replay", Given)


def bits(a_model):
    return _core.hash_state(_core.pack_state([a_model.state_dict(), generators.capture(True)]))


def one_cycle(made, momentum=False):
    return lr_scheduler.OneCycleLR(made, 0.1, total_steps=4 * N, cycle_momentum=momentum)


def warm_up_then_cosine(made):
    parts = [
        lr_scheduler.LinearLR(made, 0.1, total_iters=7),
        lr_scheduler.CosineAnnealingLR(made, 9),
    ]
    return lr_scheduler.SequentialLR(made, parts, milestones=[7])


SCHEDULES = {
    "none": None,
    "step": lambda made: lr_scheduler.StepLR(made, 3, 0.1),
    "multi step": lambda made: lr_scheduler.MultiStepLR(made, [4, 8, 9], 0.3),
    "one cycle": one_cycle,
    "lambda": lambda made: lr_scheduler.LambdaLR(made, lambda i: 1 / (1 + i)),
    "in sequence": warm_up_then_cosine,
}


def two_groups(net):
    first, *rest = net.parameters()
    return torch.optim.AdamW([{"params": [first], "lr": 0.03}, {"params": rest}], lr=0.01)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", [adam, sgd, two_groups])
def test_the_core_computes_what_steps_compute(optimizer, schedule):
    graphed, ordinary = (model(r, optimizer, SCHEDULES[schedule]) for r in (Again(), None))
    for unit in range(3):
        torch.manual_seed(3)
        found, replayed = drive(graphed, batches(N, short=(2, 7)))
        torch.manual_seed(3)
        expected, none = drive(ordinary, batches(N, short=(2, 7)))
        assert found == expected and none == []
        assert bits(graphed) == bits(ordinary)
        # Full batches are replayed once they have been compared, and so are the short ones.
        few = [i for i in range(N) if i not in (2, 7)]
        assert replayed == [few[BEFORE:], few, [i for i in range(N) if i != 2]][unit]


@pytest.mark.parametrize("optimizer", [adam, sgd])
def test_rates_are_float32_even_if_numbers_of_pytorch_are_not(optimizer):
    """The core writes four bytes, and PyTorch's fused kernels read four."""
    torch.set_default_dtype(torch.float64)
    try:
        graphed, ordinary = (model(r, optimizer, SCHEDULES["step"]) for r in (Again(), None))
        for one in (graphed, ordinary):
            torch.manual_seed(3)
            one.found, one.replayed = drive(one, batches(N, short=()))
        assert graphed.replayed == [*range(BEFORE, N)] and graphed.found == ordinary.found
        assert bits(graphed) == bits(ordinary)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_schedule_that_changes_a_number_of_the_graph_ends_it():
    def step(made):
        return lr_scheduler.StepLR(made, BEFORE + 2, 0.1)

    graphed, ordinary = (model(r, rmsprop, step) for r in (Again(), None))
    torch.manual_seed(3)
    found, replayed = drive(graphed, batches(N, short=()))
    torch.manual_seed(3)
    assert found == drive(ordinary, batches(N, short=()))[0]
    assert replayed == [BEFORE, BEFORE + 1]
    assert bits(graphed) == bits(ordinary)
    assert "'lr' changes" in refusal_of(graphed)


def momentum_later(made):
    parts = [lr_scheduler.ConstantLR(made, 1.0), one_cycle(made, momentum=True)]
    return lr_scheduler.SequentialLR(made, parts, milestones=[BEFORE + 3])


def test_only_the_batches_before_a_change_of_a_setting_are_prepared():
    graphed, ordinary = (model(r, sgd, momentum_later) for r in (Again(), None))
    torch.manual_seed(3)
    first = batches(BEFORE, short=())
    found, _ = drive(graphed, first)
    (replay,) = ready(graphed)
    before = copy.deepcopy(graphed.state_dict())
    possible = replay.prepare(N)
    assert type(possible) is int and 0 < possible < N
    assert same(graphed.state_dict(), before)
    rest = batches(N, short=())
    more, replayed = drive(graphed, rest)
    assert replayed == [*range(possible)]
    torch.manual_seed(3)
    assert found == drive(ordinary, first)[0] and more == drive(ordinary, rest)[0]
    assert bits(graphed) == bits(ordinary)
    assert "'momentum' changes" in refusal_of(graphed)
    assert replay.prepare(3) == 0


def test_a_momentum_that_always_changes_leaves_nothing_to_the_core():
    a_model = model(Again(), sgd, lambda made: one_cycle(made, momentum=True))
    assert drive(a_model, batches())[1] == []
    assert "'momentum' changes" in refusal_of(a_model)


def test_a_scheduler_fails_at_its_own_batch():
    def short_cycle(made):
        return lr_scheduler.OneCycleLR(made, 0.1, total_steps=BEFORE + 3, cycle_momentum=False)

    graphed, ordinary = (model(r, sgd, short_cycle) for r in (Again(), None))
    for one in (graphed, ordinary):
        torch.manual_seed(3)
        with pytest.raises(ValueError, match="total"):
            drive(one, batches(N, short=()))
    assert bits(graphed) == bits(ordinary)
    assert graphed._recorded[0]._capturer._recorder.replays == COMPARED + 4


@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "none"])
def test_prepared_rates_are_those_of_ordinary_steps(schedule):
    graphed, ordinary = (model(r, two_groups, SCHEDULES[schedule]) for r in (Again(), None))
    first, rest = batches(BEFORE, short=()), batches(N, short=())
    drive(graphed, first), drive(ordinary, first)
    (replay,) = ready(graphed)
    rates = replay.prepare(N)
    expected = []
    for batch in rest:
        expected.append([group["lr"] for group in ordinary._optimizers[0].param_groups])
        ordinary.train_batch(batch)
    if schedule == "step":  # 5, 6, 7, ...: changes
        assert len({tuple(row) for row in expected}) > 1
    assert rates.dtype == "float32" and rates.tolist() == torch.tensor(expected).tolist()
    assert graphed.state_dict()["scheduler"] == ordinary.state_dict()["scheduler"]
    now = [
        [group["lr"] for group in one._optimizers[0].param_groups] for one in (graphed, ordinary)
    ]
    assert now[0] == now[1]


def test_rates_that_do_not_change_are_not_given():
    a_model = model(Again(), adam, lambda made: lr_scheduler.StepLR(made, 1000))
    drive(a_model, batches(BEFORE, short=()))
    (replay,) = ready(a_model)
    assert replay.prepare(N) is None and replay.prepare(1) is None


def test_a_run_that_ends_early_leaves_no_wrong_rate():
    """The core has set the rates of some batches only; then a state is loaded."""
    graphed, ordinary = (model(r, adam, SCHEDULES["lambda"]) for r in (Again(), None))
    first, rest = batches(BEFORE, short=()), batches(N, short=())
    drive(graphed, first)
    state = copy.deepcopy(graphed.state_dict())
    (replay,) = ready(graphed)
    assert len(replay.prepare(N)) == N  # and nothing runs
    last = graphed._optimizers[0].param_groups[0]["lr"]
    for one in (graphed, ordinary):
        one.load_state_dict(state)
        torch.manual_seed(3)
        drive(one, rest)
    assert bits(graphed) == bits(ordinary) and is_captured(graphed)
    assert last != state["optimizer"]["param_groups"][0]["lr"]


# --- what the core is given --------------------------------------------------------


def ready(a_model, *, training=True):
    a_model.begin_recorded_unit(training=training)
    return a_model.replays_for(a_model.train_batch if training else a_model.eval_batch)


def same(one, other):
    return bytes(_core.pack_state(one)) == bytes(_core.pack_state(other))


def test_nothing_is_given_before_it_was_compared_and_after_a_state_was_loaded():
    a_model = model(Again())
    state = copy.deepcopy(a_model.state_dict())
    given = a_model.replays_for(a_model.train_batch)
    for i, batch in enumerate(batches(BEFORE + 1, short=())):
        assert bool(given) == (i >= BEFORE)
        a_model.train_batch(batch)
    assert given is a_model.replays_for(a_model.train_batch) and len(given) == 1
    state = copy.deepcopy(a_model.state_dict())
    a_model.load_state_dict(state)
    assert given == []
    a_model.train_batch(batches()[0])
    assert len(given) == 1
    a_model._optimizers[0].state.clear()  # the next load makes new tensors
    a_model.load_state_dict(state)
    assert ready(a_model) == [] and not is_captured(a_model)


def test_tensors_that_have_moved_are_noticed_when_a_run_begins():
    a_model = model(Again())
    drive(a_model, batches(N, short=()))
    (replay,) = ready(a_model)
    state = copy.deepcopy(a_model.state_dict())
    a_model._optimizers[0].state.clear()
    a_model.load_state_dict(state)
    assert replay.prepare(3) == 0 and a_model.replays_for(a_model.train_batch) == []


def test_a_setting_that_changes_between_units_is_noticed():
    a_model = model(Again())
    drive(a_model, batches(N, short=()))
    a_model._optimizers[0].param_groups[0]["weight_decay"] = 0.1
    assert ready(a_model) == [] and "'weight_decay' changes" in refusal_of(a_model)


def test_a_learning_rate_that_changes_between_units_is_filled():
    graphed, ordinary = model(Again()), model()
    for rate in (0.01, 0.002, 0.05):
        for one in (graphed, ordinary):
            one._optimizers[0].param_groups[0]["lr"] = rate
            torch.manual_seed(3)
            drive(one, batches(N, short=()))
    assert bits(graphed) == bits(ordinary) and is_captured(graphed)


class Own(lr_scheduler.LRScheduler):
    """May read anything, such as the weights."""

    def get_lr(self):
        return [0.01 for _ in self.base_lrs]


def tensor_rate(net):
    return torch.optim.SGD(net.parameters(), lr=torch.tensor(0.01))


@pytest.mark.parametrize(
    "options",
    [
        {"augment": lambda batch: batch},
        {"schedule": Own},
        {"schedule": SCHEDULES["step"], "optimizer": tensor_rate},
    ],
    ids=["augment", "a scheduler of the user's", "a rate that is a tensor"],
)
def test_python_between_batches_leaves_nothing_to_the_core(options):
    graphed, ordinary = (model(r, **options) for r in (Again(), None))
    assert graphed.replays_for(graphed.train_batch) is None
    for _ in range(2):
        torch.manual_seed(3)
        found, replayed = drive(graphed, batches())
        torch.manual_seed(3)
        assert found == drive(ordinary, batches())[0] and replayed == []
    assert bits(graphed) == bits(ordinary) and is_captured(graphed)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("tells", [False, True])
def test_a_graph_that_draws_is_replayed_by_pytorch(dropout, tells):
    """Which moves the generator on; others are launched by their address, if it is known."""
    a_model = model(Again(tells=tells), net=network(dropout))
    drive(a_model, batches(N, short=()))
    drive(a_model, batches(N, short=()), training=False)
    (training,), (evaluation,) = ready(a_model), ready(a_model, training=False)
    assert callable(training.launch) == (dropout > 0 or not tells)
    assert callable(evaluation.launch) == (not tells)


def test_graphs_of_one_step_belong_together():
    a_model = model(Again(), adam, SCHEDULES["step"])
    for _ in range(3):
        drive(a_model, batches(N, short=(2, 7)))
    one, two = ready(a_model)
    assert one.prepare is two.prepare and one.rates == two.rates and len(one.rates) == 1
    assert [name for name, _, _ in one.metrics] == [name for name, _, _ in two.metrics]
    drive(a_model, batches(N, short=()), training=False)
    (other,) = ready(a_model, training=False)
    assert other.prepare is not one.prepare and other.rates == []


def test_inputs_and_metrics_have_the_order_of_the_batch_and_the_step():
    a_model = model(Again())
    some = [{"y": batch["y"], "x": batch["x"]} for batch in batches(N, short=())]
    drive(a_model, some)
    (replay,) = ready(a_model)
    forms = [form[1:] for form in replay.inputs]
    assert forms == [("int64", (6,), (1,)), ("float32", (6, 5), (5, 1))]
    assert [name for name, _, _ in replay.metrics] == ["loss", "accuracy", "pair"]
    weights = [weight for _, _, weight in replay.metrics]
    assert weights == [None, None, 6.0]


def test_a_metric_that_the_core_cannot_read_stays_in_python():
    one_number = {"count": lambda o, t: (o.argmax(1) == t).sum() * torch.ones(1, 1)}
    assert len(ready_after(model(Again(), metrics=one_number))) == 1
    a_model = model(Again(), metrics={"rows": lambda o, t: o.mean(1)})
    assert ready_after(a_model) == [] and is_captured(a_model)


def ready_after(a_model):
    for batch in batches(BEFORE + 1, short=()):
        a_model.train_batch(batch)
    return a_model.replays_for(a_model.train_batch)


# --- evaluation --------------------------------------------------------------------


def test_the_core_evaluates_as_eval_batch_does():
    graphed, ordinary = model(Again()), model()
    for one in (graphed, ordinary):
        torch.manual_seed(3)
        drive(one, batches())
    before = bits(graphed)
    for unit in range(2):
        found, replayed = drive(graphed, batches(), training=False)
        assert found == drive(ordinary, batches(), training=False)[0]
        assert bits(graphed) == before and not graphed.net.training
        full = [i for i in range(N) if i != 7]
        assert replayed == [full[BEFORE:], full][unit]
    torch.manual_seed(3)
    found, replayed = drive(graphed, batches())
    torch.manual_seed(3)
    assert found == drive(ordinary, batches())[0] and len(replayed) == N - 1
    assert bits(graphed) != before and bits(graphed) == bits(ordinary)


def test_prepare_puts_the_network_into_the_mode_of_the_unit():
    a_model = model(Again())
    drive(a_model, batches())
    a_model.eval_batch(batches()[0])
    assert not a_model.net.training
    a_model.train_batch(batches()[0])
    (replay,) = a_model.replays_for(a_model.train_batch)
    a_model.eval_batch(batches()[0])
    assert replay.prepare(2) is None and a_model.net.training


def test_a_run_in_python_is_that_of_the_core():
    by_core, by_hand = model(Again(), adam, one_cycle), model(Again(), adam, one_cycle)
    for _ in range(2):
        torch.manual_seed(3)
        found, _ = drive(by_core, batches())
        torch.manual_seed(3)
        assert found == floats([by_hand.train_batch(batch) for batch in batches()])
    assert bits(by_core) == bits(by_hand)
