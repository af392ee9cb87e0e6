"""Arguments that are legal but unusual do what they say; the others are refused by name."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import cerebro
from cerebro.arguments import check_real_number
from cerebro.errors import InputError


class LeastSquares:
    """A model of three weights."""

    framework = "numpy"

    def __init__(self, lr):
        self.lr = lr
        self.w = np.zeros(3)

    def train_batch(self, batch):
        error = batch["x"] @ self.w - batch["y"]
        self.w = self.w - self.lr * batch["x"].T @ error / len(error)
        return {"loss": float((error**2).mean())}

    def eval_batch(self, batch):
        return {"loss": float(((batch["x"] @ self.w - batch["y"]) ** 2).mean())}

    def predict_batch(self, batch):
        return batch["x"] @ self.w

    def state_dict(self):
        return {"w": self.w}

    def load_state_dict(self, state):
        self.w = np.array(state["w"])


def build(config):
    return LeastSquares(config["lr"])


class ByKind(LeastSquares):
    """Rows of kind 0 have no error."""

    def eval_batch(self, batch):
        return super().eval_batch(batch | {"x": batch["x"] * (batch["kind"] > 0)[:, None]})

    def predict_batch(self, batch):
        return super().predict_batch(batch) * (batch["kind"] > 0)


def build_by_kind(config):
    return ByKind(config["lr"])


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write(tmp_path_factory.mktemp("data") / "set", seed=0)


def write(path, *, seed, rows=80):
    x = np.random.default_rng(seed).normal(size=(rows, 3))
    return cerebro.shard({"x": x, "y": x @ np.array([1.0, -2.0, 3.0])}, path, shards=2)


def search(data, run, the_build=build, **settings):
    options = {
        "epochs": 2, "n_trials": 2, "validation": 0.25, "batch_size": 10, "workers": 0,
        "progress": False,
    }  # fmt: skip
    space = {"lr": cerebro.uniform(0.01, 0.1)}
    return cerebro.search(the_build, space, data, run=run, **{**options, **settings})


@pytest.fixture(scope="module")
def result(data, tmp_path_factory):
    return search(data, tmp_path_factory.mktemp("runs") / "run")


# --- paths -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda data, result: cerebro.shard({"x": [1, 2]}, None), "path"),
        (lambda data, result: cerebro.Dataset(5), "path"),
        (lambda data, result: cerebro.images(None), "folder"),
        (lambda data, result: cerebro.open(5), "run"),
        (lambda data, result: cerebro.resume(b"run"), "run"),
        (lambda data, result: cerebro.replay(5, 0), "run"),
        (lambda data, result: cerebro.replay(result, 0, data=5), "data"),
        (lambda data, result: cerebro.control.stop(5), "run"),
        (lambda data, result: search(data, 5), "run"),
        (lambda data, result: search(data, result.path.with_name("new"), state_dir=5), "state_dir"),
        (lambda data, result: result.best.export(None), "path"),
    ],
)
def test_the_error_names_an_argument_that_is_not_a_path(data, result, call, name):
    with pytest.raises(InputError, match=f"^{name} must be a path, not "):
        call(data, result)


def test_arguments_for_ray_are_checked_before_it_starts(data):
    pytest.importorskip("ray")
    with pytest.raises(InputError, match="shared_path must be a path, not 5"):
        cerebro.ray.Executor(shared_path=5)
    with pytest.raises(InputError, match="batch_size must be a whole number of at least 1"):
        cerebro.ray.trainable(build, data, batch_size=0)


# --- results -----------------------------------------------------------------


def test_trials_are_chosen_by_whole_numbers(result):
    assert [trial.number for trial in result.top(np.int64(1))] == [result.best.number]
    assert result.top(0) == []
    for wrong in (-1, None, 1.5, "a"):
        with pytest.raises(InputError, match="n must be a whole number of at least 0"):
            result.top(wrong)
    # An int that Python does not convert to text.
    with pytest.raises(InputError, match=r"n must be a whole number from 0 to .*, not one of more"):
        result.top(10**5000)
    with pytest.raises(InputError, match="lr must be at most 1, not one of more digits"):
        check_real_number("lr", Fraction(10**5000 + 1, 10**4999), most=1)


def test_plot_accepts_any_iterable_of_trials(result):
    pytest.importorskip("matplotlib")
    for trials in ([0], np.array([0]), (number for number in [0]), result.trials[:1]):
        (axes, *_) = result.plot(trials=trials).axes
        assert any("trial 0" in str(text) for text in axes.get_legend_handles_labels()[1])
    with pytest.raises(InputError, match="trials must be a list of trials' numbers, not 0"):
        result.plot(trials=0)
    with pytest.raises(InputError, match=r"trials=\[7\]: there is no trial 7 in this run"):
        result.plot(trials=[7])


# --- going on ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (5, "build must be a function that makes a model.*not int"),
        (lambda: 0, "build must take the configuration"),
    ],
)
def test_a_wrong_build_harms_no_run(data, tmp_path, wrong, message):
    folder = search(data, tmp_path / "run").path
    for call in (
        lambda: cerebro.resume(folder, wrong, epochs=3, workers=0, progress=False),
        lambda: cerebro.open(folder, build=wrong),
        lambda: cerebro.replay(folder, 0, wrong),
        lambda: cerebro.open(folder).best.load(build=wrong),
    ):
        with pytest.raises(InputError, match=message):
            call()
    assert {trial.status for trial in cerebro.open(folder).trials} == {"finished"}


def test_resuming_a_result_reuses_its_build(data, tmp_path):
    result = search(data, tmp_path / "run", lambda config: build(config))
    further = cerebro.resume(result, epochs=3, workers=0, progress=False)
    assert [trial.epoch for trial in further.trials] == [3, 3]
    assert np.array_equal(cerebro.open(further).best.load().w, further.best.load().w)


def test_resume_requires_the_rows_and_transforms_of_the_run(data, tmp_path):
    train, held_out = data.split(0.75, 0.25)
    scaled = train.with_transforms({"x": cerebro.transforms.Scale(0.5)})
    folder = search(train, tmp_path / "run", validation=held_out).path
    resume = {"epochs": 3, "workers": 0, "progress": False}
    for wrong in ({"data": held_out}, {"data": scaled}, {"validation": train}):
        with pytest.raises(InputError, match="rows or transforms are not those of the run"):
            cerebro.resume(folder, **wrong, **resume)
    for wrong in ({"data": 5}, {"validation": 0.25}):
        with pytest.raises(InputError, match=r"must be a cerebro\.Dataset or a path, not"):
            cerebro.resume(folder, **wrong, **resume)
    other = write(tmp_path / "other", seed=1, rows=20)
    with pytest.raises(InputError, match="rows have been lost, or"):
        cerebro.resume(folder, data=other, **resume)
    for right in (train, data, str(data.path)):
        further = cerebro.resume(folder, data=right, validation=held_out, **resume)
        assert [trial.epoch for trial in further.trials] == [resume["epochs"]] * 2
        resume["epochs"] += 1


def test_replay_accepts_the_dataset_given_to_search(data, tmp_path):
    """Also where a fraction of it was held out, so that the run's own data are a part of it."""
    train, held_out = data.split(0.75, 0.25)
    scaled = train.with_transforms({"x": cerebro.transforms.Scale(0.5)})
    for number, given in enumerate((data, train, scaled)):
        result = search(given, tmp_path / f"run-{number}", validation=0.5)
        assert cerebro.replay(result, 0, data=given).identical
        with pytest.warns(UserWarning, match="is not the dataset that the run was trained on"):
            assert not cerebro.replay(result, 0, data=held_out).identical


class StopsTheSecond:
    """Commands the run that it is a callback of."""

    def __init__(self, run):
        self.run = run
        self.told = False

    def on_epoch_end(self, trial, metrics):
        if self.told:
            return
        self.told = True
        with pytest.raises(InputError, match="trial must be a trial's number, not 'a'"):
            cerebro.control.stop(self.run, "a")
        cerebro.control.stop(str(self.run), trial=np.int64(1))


def test_control_commands_accept_numpy_trial_numbers(data, tmp_path):
    folder = tmp_path / "run"
    result = search(data, folder, epochs=4, callbacks=[StopsTheSecond(folder)])
    assert [trial.status for trial in result.trials] == ["finished", "stopped"]


# --- data --------------------------------------------------------------------


def test_a_categorical_is_a_column_like_a_series_of_them(tmp_path):
    pandas = pytest.importorskip("pandas")
    values = pandas.Categorical(["b", "a", "b", "c"])
    own = cerebro.shard({"c": values}, tmp_path / "own", shards=1)
    series = cerebro.shard({"c": pandas.Series(values)}, tmp_path / "series", shards=1)
    assert own.classes == {"c": ["a", "b", "c"]}
    assert own.checksum == series.checksum


def test_datasets_with_conflicting_class_numbers_are_refused(data, tmp_path):
    """Datasets written apart each number the names that they have."""

    def named(folder, names):
        columns = {name: np.concatenate([data.shard(i)[name] for i in range(2)]) for name in "xy"}
        kind = [names[row % len(names)] for row in range(len(columns["y"]))]
        return cerebro.shard({**columns, "kind": kind}, tmp_path / folder, shards=2)

    train, fewer = named("train", ["a", "b", "c"]), named("fewer", ["a", "b"])
    other = named("other", ["a", "c"])
    message = "class 1 of column 'kind' is 'c' here and 'b' in the training data"
    with pytest.raises(InputError, match=message):
        search(train, tmp_path / "refused", build_by_kind, validation=other)
    result = search(train, tmp_path / "run", build_by_kind, validation=fewer)
    assert result.best.evaluate(fewer)["loss"] == result.best.metrics["loss"]
    with pytest.raises(InputError, match=message):
        result.best.evaluate(other)
    with pytest.raises(InputError, match=message):
        result.best.predict(other)
    unread = search(train, tmp_path / "unread", validation=other)  # by a model without kinds
    assert unread.best.evaluate(other)["loss"] == unread.best.metrics["loss"]


def test_transforms_must_be_a_mapping(data):
    for wrong in (None, [cerebro.transforms.Scale()]):
        with pytest.raises(InputError, match="with_transforms needs a mapping such as"):
            data.with_transforms(wrong)


# --- spaces, searchers, rules ------------------------------------------------


def test_a_condition_needs_a_space():
    for wrong in (None, [1]):
        with pytest.raises(InputError, match=r"when\('a', 1, .*its space must be a mapping"):
            cerebro.Space({"a": [1, 2], "if": cerebro.when("a", 1, wrong)})


def test_early_stopping_accepts_any_number_type_and_names_invalid_values(data, tmp_path):
    rule = cerebro.EarlyStopping("loss", np.int64(1), np.float32(0.5))
    assert rule == cerebro.EarlyStopping("loss", 1, 0.5)
    assert search(data, tmp_path / "run", stop=rule).status == "finished"
    for wrong, name in (
        ({"patience": 1.5}, "patience must be a whole number"),
        ({"min_delta": "a"}, "min_delta must be a number"),
        ({"monitor": "quality"}, "monitor: unknown metric 'quality'"),
    ):
        with pytest.raises(InputError, match=f"EarlyStopping: {name}"):
            cerebro.EarlyStopping(**wrong)


@pytest.mark.parametrize(
    "make",
    [
        lambda one: cerebro.Hyperband(one, 3 * one),
        lambda one: cerebro.SuccessiveHalving(one),
        lambda one: cerebro.ASHA(one),
        lambda one: cerebro.MedianStopping(one, one),
        lambda one: cerebro.PBT(one, one / 4, population=4 * one),
    ],
)
def test_searchers_take_numpy_numbers(data, tmp_path, make):
    first = search(data, tmp_path / "numpy", searcher=make(np.int64(1)), epochs=3, n_trials=4)
    second = search(data, tmp_path / "python", searcher=make(1), epochs=3, n_trials=4)
    assert [trial.state_hash for trial in first.trials] == [
        trial.state_hash for trial in second.trials
    ]
    further = cerebro.resume(first, epochs=4, workers=0, progress=False)
    assert further.best.epoch == 4


def test_invalid_pbt_options_are_named_in_the_error():
    for wrong, message in (
        ({"quantile": "a"}, "quantile must be a number, not 'a'"),
        ({"resample": None}, "resample must be a number, not None"),
        ({"factors": 5}, "factors must be two numbers, such as"),
        ({"factors": (1, "a")}, "factors must be a number, not 'a'"),
    ):
        with pytest.raises(InputError, match=message):
            cerebro.PBT(**wrong)


class Doubling:
    """A searcher of the protocol's four methods and nothing more."""

    def __init__(self):
        self.rates = [0.01, 0.02, 0.04, 0.08, 0.16]
        self.heard = []

    def suggest(self):
        return cerebro.Suggestion({"lr": self.rates.pop(0)}) if self.rates else cerebro.DONE

    def report(self, trial, epoch, metrics):
        self.heard.append([trial, epoch])
        return cerebro.Decision.STOP if trial == 1 else cerebro.Decision.CONTINUE

    def state_dict(self):
        return {"rates": self.rates, "heard": self.heard}

    def load_state_dict(self, state):
        self.rates, self.heard = list(state["rates"]), list(state["heard"])


def test_four_methods_make_a_searcher(data, tmp_path):
    searcher = Doubling()
    result = search(data, tmp_path / "run", searcher=searcher, n_trials=3)
    assert [trial.config["lr"] for trial in result.trials] == [0.01, 0.02, 0.04]
    assert [(trial.status, trial.epoch) for trial in result.trials] == [
        ("finished", 2), ("stopped", 1), ("finished", 2),
    ]  # fmt: skip
    assert searcher.heard == [[0, 0], [1, 0], [2, 0], [0, 1], [2, 1]]
    plan = cerebro.plan({"lr": [0.1]}, data, epochs=2, searcher=Doubling(), n_trials=3)
    assert plan.trials == 3
    further = search(data, tmp_path / "run", searcher=Doubling(), n_trials=4, if_exists="resume")
    assert [trial.status for trial in further.trials].count("finished") == 3


def test_accumulate_may_be_a_numpy_number():
    torch = pytest.importorskip("torch")
    net = torch.nn.Linear(1, 1)
    model = {"optimizer": torch.optim.SGD(net.parameters(), lr=0.1), "loss": torch.nn.MSELoss()}
    cerebro.torch.Model(net, accumulate=np.int64(2), **model)
    wrong = "accumulate must be a whole number of at least 1, not True"
    with pytest.raises(InputError, match=wrong):
        cerebro.torch.Model(net, accumulate=True, **model)


def test_a_path_may_be_a_string_or_a_path(data, tmp_path):
    assert search(data, str(tmp_path / "run")).path == Path(tmp_path / "run")
