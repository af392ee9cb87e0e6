"""Promise 1: a trial's states depend on nothing but seed, configuration, number and data."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import cerebro  # noqa: E402

SEED = 5
EPOCHS = 3
SPACE = {
    "lr": cerebro.loguniform(1e-3, 3e-2),
    "dropout": cerebro.uniform(0.1, 0.5),
    "batch_size": [16, 24],
    "width": [16, 24],
}


def accuracy(output, target):
    return (output.argmax(1) == target).float().mean()


def make_net(config):
    return torch.nn.Sequential(
        torch.nn.Linear(20, config["width"]),
        torch.nn.BatchNorm1d(config["width"]),
        torch.nn.ReLU(),
        torch.nn.Dropout(config["dropout"]),
        torch.nn.Linear(config["width"], 4),
    )


def make_optimizer(net, config, total_steps):
    optimizer = torch.optim.AdamW(net.parameters(), lr=config["lr"], weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config["lr"], total_steps=total_steps)
    return optimizer, schedule


def build(config, info):
    net = make_net(config)
    optimizer, schedule = make_optimizer(net, config, info.total_steps)
    return cerebro.torch.Model(
        net,
        optimizer=optimizer,
        loss=torch.nn.functional.cross_entropy,
        metrics={"accuracy": accuracy},
        scheduler=schedule,
        scheduler_step="batch",
        accumulate=2,
    )


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1003, 20)).astype("float32")
    y = (x[:, :4] + 0.3 * rng.normal(size=(1003, 4))).argmax(1).astype("int64")
    return cerebro.shard({"x": x, "y": y}, tmp_path_factory.mktemp("data") / "set", shards=7)


def run_search(data, folder, workers, **options):
    train, valid = data.split(0.8, 0.2)
    return cerebro.search(
        build,
        SPACE,
        train,
        epochs=EPOCHS,
        validation=valid,
        n_trials=6,
        metric="accuracy",
        seed=SEED,
        workers=workers,
        keep="all",
        run=folder,
        progress=False,
        **options,
    )


@pytest.fixture(scope="module")
def inline(data, tmp_path_factory):
    return run_search(data, tmp_path_factory.mktemp("runs") / "inline", 0)


def hashes(result):
    return [[epoch["state_hash"] for epoch in trial.history] for trial in result.trials]


@pytest.mark.parametrize("workers", [1, 2, 7])
def test_states_do_not_depend_on_the_number_of_workers(data, inline, tmp_path, workers):
    before = torch.get_num_threads()
    result = run_search(data, tmp_path / "run", workers)
    assert [trial.status for trial in result.trials] == ["finished"] * 6
    assert hashes(result) == hashes(inline)
    assert [t.metrics for t in result.trials] == [t.metrics for t in inline.trials]
    assert result.best.number == inline.best.number
    assert torch.get_num_threads() == before


def test_the_test_data_has_unequal_shards(data):
    train, _ = data.split(0.8, 0.2)
    assert len(set(train.view.shard_rows)) > 1
    assert data.num_shards == 7


@pytest.mark.parametrize("number", range(6))
def test_a_plain_loop_gives_the_same_weights(data, inline, number):
    """Only trial_seed and Dataset.batches; the rest is plain PyTorch."""
    train, _ = data.split(0.8, 0.2)
    trial = inline.trials[number]
    config = trial.config
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        net = plain_loop(train, config, number)
    finally:
        torch.set_num_threads(threads)
    trained = trial.load("last").net.state_dict()
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, trained[name]), name


def plain_loop(train, config, number):
    seed = cerebro.trial_seed(SEED, number)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    batches = train.batches(config["batch_size"], seed=SEED)
    updates = max(1, round(len(batches) / 2))
    size, longer = divmod(len(batches), updates)
    sizes = [size + 1] * longer + [size] * (updates - longer)
    net = make_net(config)
    optimizer, schedule = make_optimizer(net, config, EPOCHS * len(batches))
    net.train()
    for epoch in range(EPOCHS):
        batches.set_epoch(epoch)
        left = iter(batches)
        for size in sizes:  # the batches of an update
            for i in range(1, size + 1):
                batch = next(left)
                loss = torch.nn.functional.cross_entropy(net(batch["x"]), batch["y"])
                (loss / size).backward()
                if i == size:
                    optimizer.step()
                    optimizer.zero_grad()
                schedule.step()
    return net


def test_replay_is_identical(inline):
    replay = cerebro.replay(inline, 2)
    assert replay.identical
    assert replay.first_difference is None
    assert [e.epoch for e in replay.epochs] == [0, 1, 2]
    assert cerebro.replay(inline.path, 0, build, epochs=1).identical


def test_shuffling_by_shards_is_exact_with_any_number_of_workers(data, tmp_path):
    runs = [run_search(data, tmp_path / f"{w}", w, shuffle="shards") for w in (0, 2, 7)]
    assert hashes(runs[1]) == hashes(runs[2]) == hashes(runs[0])
    assert cerebro.replay(runs[1], 3, epochs=2).identical
    assert not runs[2].verify().problems
    assert {unit["part"] for unit in runs[2].units()} == {0, 1, -1}  # two groups, and validation


def test_the_generators_of_the_caller_are_left_alone(data, tmp_path):
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    expected = torch.rand(3), random.random(), np.random.rand()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    run_search(data, tmp_path / "run", 0)
    assert torch.equal(torch.rand(3), expected[0])
    assert (random.random(), np.random.rand()) == expected[1:]


class Drawing:
    """Draws in each step; the first step waits until another search has begun to train, if it can.

    It cannot, because inline searches take turns; so it waits in vain.
    """

    framework = "numpy"
    first, second = threading.Event(), threading.Event()

    def __init__(self):
        self.w = np.zeros(1)

    def train_batch(self, batch):
        if not self.first.is_set():
            self.first.set()
            self.second.wait(0.2)
        else:
            self.second.set()
        self.w = self.w + np.random.normal() + random.random()
        return {"loss": 1.0}

    eval_batch = train_batch

    def state_dict(self):
        return {"w": self.w}

    def load_state_dict(self, state):
        self.w = np.array(state["w"])


@pytest.mark.filterwarnings("ignore:no validation data")
def test_inline_searches_in_threads_do_not_draw_each_others_numbers(data, tmp_path):
    def states(name):
        run = tmp_path / name
        settings = {"epochs": 1, "n_trials": 2, "batch_size": 64, "workers": 0, "progress": False}
        return hashes(cerebro.search(lambda config: Drawing(), {}, data, run=run, **settings))

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(states, ["one", "two"]))
    assert Drawing.second.is_set()
    assert found == [states("alone")] * 2
