"""A hyperparameter that no trial reads is told, once per search."""

from __future__ import annotations

import copy
import json
import pickle
import random
import warnings

import numpy as np
import pytest

import cerebro

RNG = np.random.default_rng(5)
DATA = {"x": RNG.normal(size=(60, 3)).astype(np.float32), "y": RNG.integers(0, 2, 60)}


class Model:
    """Learns nothing."""

    def __init__(self, rate: float) -> None:
        self.w = np.full(2, rate)

    def train_batch(self, batch):
        return {"loss": float(self.w[0])}

    eval_batch = train_batch

    def state_dict(self):
        return {"w": self.w}

    def load_state_dict(self, state):
        self.w = np.array(state["w"])


class Keeping(Model):
    """Reads its configuration only while it trains."""

    def __init__(self, config):
        super().__init__(config["lr"])
        self.config = config

    def train_batch(self, batch):
        return {"loss": self.config["lr"] + self.config["rare"]}


class Packing(Keeping):
    """Has its configuration, which must be a plain dict, in its state."""

    def train_batch(self, batch):
        assert type(self.config) is type(self.config.get("part", {})) is dict
        return {"loss": self.config["lr"]}

    eval_batch = train_batch

    def state_dict(self):
        return {"w": self.w, "config": self.config}


def build_packing(config):
    return Packing(config)


def build_packing_a_part(config):
    return Packing(dict(config))


def build_closing_over(config):
    """Reads its configuration in a function that the model keeps, as steps do."""
    model = Model(config["lr"])

    def train_batch(batch):
        assert type(config) is dict
        return {"loss": config["lr"]}

    model.train_batch = train_batch
    return model


def build_random(keep):
    def build(config):
        drawn = [random.random(), np.random.random(), *torch_numbers(2)]
        model = Keeping(config) if keep else Model(config["lr"])
        model.w = np.array(drawn)
        model.train_batch = model.eval_batch = lambda batch: {"loss": drawn[0]}
        return model

    return build


def torch_numbers(count):
    torch = pytest.importorskip("torch")
    return torch.rand(count).tolist()


def build_misspelt(config):
    return Model(config["lr"] + config.get("weight_decay", 0))


def build_by_choice(config):
    """Reads the momentum only with one of the optimizers."""
    return Model(config["lr"] + (config["momentum"] if config["optimizer"] == "sgd" else 0))


def build_nested(config):
    return Model(config["optimizer"]["lr"])


def build_by_keywords(config):
    def make(lr, rare):
        return Model(lr)

    return make(**{name: value for name, value in config.items() if name != "batch_size"})


def build_keeping(config):
    return Keeping(config)


def build_copies(config):
    assert isinstance(config, dict)
    made = [copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))]
    made += [json.loads(json.dumps(config)), dict(config), config | {}]
    assert all(type(each) is dict and each == made[0] for each in made)
    return Model(made[0]["lr"])


def build_of_a_plain_dict(config):
    assert type(config) is dict, "as yaml.safe_dump needs"
    return Model(config["lr"])


def searched(build, space, tmp_path, **options):
    given = {"epochs": 2, "searcher": "grid", "workers": 0, "progress": False, **options}
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        result = cerebro.search(
            build, {"batch_size": 10, **space}, DATA, validation=0.2, run=tmp_path / "run", **given
        )
    assert {trial.status for trial in result.trials} == {"finished"}
    return result, [str(each.message) for each in shown]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_misspelt_name_warns_once(tmp_path, workers):
    space = {"lr": [0.1, 0.2], "weight_decy": [1.0, 2.0]}
    result, shown = searched(build_misspelt, space, tmp_path, workers=workers)
    text = "no trial read 'weight_decy': did you mean 'weight_decay'?"
    assert shown == [text]
    assert text in result.summary().splitlines()
    assert [event["text"] for event in result.events() if event["kind"] == "unread"] == [text]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("build", "space"),
    [
        (build_by_choice, {"lr": [0.1], "optimizer": ["adam", "sgd"], "momentum": [0.1]}),
        (build_by_choice, {"lr": [0.1], "optimizer": ["sgd", "adam"], "momentum": [0.1]}),
        (build_by_keywords, {"lr": [0.1, 0.2], "rare": [1]}),
        (build_keeping, {"lr": [0.1, 0.2], "rare": [1]}),
        (build_copies, {"lr": [0.1], "rare": [1], "more": {"a": [1], "b": [2]}}),
        (build_of_a_plain_dict, {"lr": [0.1], "rare": [1]}),
    ],
)
def test_a_name_that_may_have_been_read_does_not_warn(tmp_path, workers, build, space):
    assert searched(build, space, tmp_path, workers=workers)[1] == []


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("build", [build_packing, build_packing_a_part, build_closing_over])
def test_a_model_that_keeps_its_configuration_has_a_plain_dict(tmp_path, workers, build):
    """Also a later trial, whose branch of the space has names that no trial has read."""
    rest = {
        "kind": ["a", "b"],
        "more": cerebro.when("kind", "b", {"depth": [1], "part": {"size": [1]}}),
    }
    result, shown = searched(build, {"lr": [0.1], **rest}, tmp_path, workers=workers)
    assert shown == [] and len(result.trials) == 2
    config = {"batch_size": 10, "lr": 0.1, "part": {"size": 1}}
    checked = cerebro.check(build, config, DATA, validation=0.2)
    assert checked.ok, checked


def test_a_model_that_is_built_again_begins_with_the_same_numbers(tmp_path):
    def numbers(keep, name):
        (tmp_path / name).mkdir()
        result, _ = searched(build_random(keep), {"lr": [0.1, 0.2]}, tmp_path / name)
        return [trial.load().w.tolist() for trial in result.trials]

    assert numbers(True, "kept") == numbers(False, "read")


def test_a_build_that_fails_is_not_called_again_for_its_reads(tmp_path):
    calls = []

    def build(config):
        calls.append(type(config))
        raise ValueError("always")

    with pytest.raises(cerebro.RunError, match="always"):
        searched(build, {"lr": [0.1]}, tmp_path)
    assert len(calls) == 2  # in the check before the search, and in the trial


def test_unread_names_without_a_similar_name_get_other_advice(tmp_path):
    space = {"optimizer": {"lr": [0.1, 0.2], "wd": [0.0]}, "tag": "first"}
    _, shown = searched(build_nested, space, tmp_path)
    (text,) = shown
    assert text.startswith("no trial read 'optimizer.wd' or 'tag': read them in build")


def test_an_unread_name_of_only_some_trials_warns(tmp_path):
    space = {
        "lr": [0.1],
        "optimizer": ["adam", "sgd"],
        "more": cerebro.when("optimizer", "sgd", {"momentum": [0.1], "nesterov": [True]}),
    }
    _, shown = searched(build_by_choice, space, tmp_path)
    (text,) = shown
    assert text.startswith("no trial read 'nesterov'")


def test_tracking_reads_does_not_change_states(tmp_path):
    def hashes(build, name):
        space = {"lr": [0.1, 0.2], "weight_decy": [1.0]}
        result, _ = searched(build, space, tmp_path / name)
        return [[e["state_hash"] for e in trial.history] for trial in result.trials]

    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    assert hashes(build_misspelt, "a") == hashes(lambda config: Model(dict(config)["lr"]), "b")


def test_folds_warn_once_and_a_failed_search_does_not_warn(tmp_path):
    space = {"lr": [0.1, 0.2], "weight_decy": [1.0]}
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        cerebro.search(
            build_misspelt, {"batch_size": 10, **space}, DATA, validation=cerebro.KFold(2),
            epochs=1, searcher="grid", workers=0, progress=False, run=tmp_path / "folds",
        )  # fmt: skip
    assert len(shown) == 1 and "did you mean 'weight_decay'?" in str(shown[0].message)

    def fails(config):
        raise ValueError("always")

    with warnings.catch_warnings(record=True) as shown, pytest.raises(cerebro.RunError):
        warnings.simplefilter("always")
        searched(fails, space, tmp_path)
    assert shown == []  # it is not known what a build would have read
