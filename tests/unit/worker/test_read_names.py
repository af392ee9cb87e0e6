"""The dict that notes what ``build`` reads of a configuration."""

from __future__ import annotations

import copy
import json
import operator
import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from cerebro.worker.read_names import ReadNames, Reads

CONFIG = {"lr": 0.1, "batch_size": 8, "optimizer": {"name": "sgd", "momentum": 0.9}, "sizes": [1]}
NAMES = ("lr", "optimizer.name", "optimizer.momentum", "sizes")


def read_by(build: Callable[[Any], object]) -> ReadNames:
    reads = Reads()
    kept = build(reads.note_reads(CONFIG))
    if reads.is_held():
        reads.give_up()
    del kept
    return reads.list_names(CONFIG)


def take(**given: Any) -> object:
    return given["lr"]


def in_a_circle(config: Any) -> object:
    def walk(depth: int) -> object:
        return walk(depth - 1) if depth else config["lr"]

    return walk(2)


def match(config: Any) -> object:
    return "{lr}".format_map(config), eval("lr * 2", {}, config), operator.itemgetter("lr")(config)


@pytest.mark.parametrize(
    ("build", "unread"),
    [
        (lambda c: None, NAMES),
        (lambda c: c["lr"], NAMES[1:]),
        (lambda c: c.get("lr"), NAMES[1:]),
        (lambda c: "lr" in c, NAMES[1:]),
        (lambda c: c.pop("lr"), NAMES[1:]),
        (lambda c: c.setdefault("lr", 1), NAMES[1:]),
        (match, NAMES[1:]),
        (in_a_circle, NAMES[1:]),  # a function that refers to itself and to the configuration
        (lambda c: c["optimizer"]["name"], ("lr", "optimizer.momentum", "sizes")),
        (lambda c: take(**c["optimizer"], lr=1), ("lr", "sizes")),
        (lambda c: dict(c)["optimizer"]["name"], ("optimizer.momentum",)),
        (lambda c: take(**c), NAMES[1:3]),
        (lambda c: list(c), NAMES[1:3]),
        (lambda c: list(c.values()) and None, NAMES[1:3]),
        (lambda c: {**c} and None, NAMES[1:3]),
        (lambda c: c | {} and None, NAMES[1:3]),
        (lambda c: {} | c and None, NAMES[1:3]),
        (lambda c: c.copy() and None, NAMES[1:3]),
        (lambda c: json.dumps(c), ()),
        (lambda c: json.dumps(c, indent=1), ()),
        (lambda c: pickle.dumps(c), ()),
        (lambda c: copy.deepcopy(c), ()),
        (lambda c: c, ()),  # kept: it may be read later
        (lambda c: SimpleNamespace(hparams=c), ()),
        (lambda c: lambda: c["lr"], ()),
        (lambda c: c["optimizer"], ()),
        (lambda c: iter(c), ()),
        (repr, NAMES),  # printing it is no use
        (len, NAMES),
    ],
)
def test_unread_lists_the_names_build_never_reads(
    build: Callable[[Any], object], unread: tuple[str, ...]
) -> None:
    assert read_by(build).unread == unread


def test_missing_names_that_build_seeks_are_listed() -> None:
    def build(config: Any) -> None:
        config.get("weight_decay", 0)
        assert "dropout" not in config["optimizer"]
        with pytest.raises(KeyError):
            config["learning_rate"]

    assert read_by(build).sought == ("learning_rate", "optimizer.dropout", "weight_decay")


def every_way(config: Any) -> Iterator[Any]:
    yield copy.copy(config)
    yield copy.deepcopy(config)
    yield config.copy()
    yield dict(config)
    yield {**config}
    yield config | {}
    yield {} | config
    yield json.loads(json.dumps(config))
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        yield pickle.loads(pickle.dumps(config, protocol))


def test_a_tracked_configuration_behaves_as_a_dict() -> None:
    given = Reads().note_reads(CONFIG)
    assert isinstance(given, dict) and given == CONFIG
    assert repr(given) == repr(CONFIG) and len(given) == 4 and bool(given)
    assert list(given) == list(CONFIG) == list(given.keys()) and next(reversed(given)) == "sizes"
    for made in every_way(given):
        assert made == CONFIG and type(made) is dict
    for made in (copy.deepcopy(given), pickle.loads(pickle.dumps(given))):
        assert type(made["optimizer"]) is dict
        assert made["sizes"] is not CONFIG["sizes"]
    given |= {"lr": 1}
    given.update(lr=2)
    given["more"] = 3
    del given["sizes"]
    assert given.pop("none", 5) == 5 and given.popitem() == ("more", 3)
    assert given == {"lr": 2, "batch_size": 8, "optimizer": CONFIG["optimizer"]}
    for made in (type(given)(lr=1), type(given)({"lr": 1}), type(given).fromkeys(["lr"], 1)):
        assert type(made) is dict and made == {"lr": 1}
    with pytest.raises(AttributeError):
        given.lr = 3  # type: ignore[attr-defined]


def test_the_configuration_itself_is_not_changed() -> None:
    before = copy.deepcopy(CONFIG)
    given = Reads().note_reads(CONFIG)
    given["optimizer"]["name"] = "adam"
    given.clear()
    assert before == CONFIG


def test_give_up_clears_the_unread_names() -> None:
    reads = Reads()
    reads.note_reads(CONFIG)
    reads.give_up()
    assert reads.list_names(CONFIG) == ReadNames()


def raised(act: Callable[[Any], object]) -> bool:
    """Return whether an error that `act` raises may be due to the dict that it gets."""
    reads = Reads()
    try:
        act(reads.note_reads(CONFIG))
    except Exception as error:
        return reads.may_have_caused(error)
    pytest.fail("nothing was raised")


def fail(error: Exception) -> None:
    raise error


def fail_because(config: Any) -> None:
    try:
        fail(TypeError("not a dict"))
    except TypeError as error:
        raise ValueError("no model") from error


@pytest.mark.parametrize(
    ("act", "expected"),
    [
        (lambda c: c + 1, True),
        (lambda c: c.lr, True),
        (fail_because, True),
        (lambda c: fail(ValueError(f"want a dict, not {type(c)}")), True),
        (lambda c: fail(ValueError("cannot represent", c)), True),  # as yaml.safe_dump
        (lambda c: fail(ValueError(f"cannot represent {c['optimizer']}")), True),
        (lambda c: fail(ValueError("always")), False),
        (lambda c: c["rate"], False),
        (lambda c: 1 / 0, False),
    ],
)
def test_errors_due_to_the_dict_are_recognized(
    act: Callable[[Any], object], expected: bool
) -> None:
    assert raised(act) == expected
