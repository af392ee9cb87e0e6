"""Probable mistakes, as `cerebro.check` and a search show them."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest

import cerebro

torch = pytest.importorskip("torch")
F = torch.nn.functional


def build_twice_softmaxed(config):
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Softmax(1))
    optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"])
    return cerebro.torch.Model(net, optimizer=optimizer, loss=torch.nn.CrossEntropyLoss())


def build_right(config):
    net = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"])
    return cerebro.torch.Model(net, optimizer=optimizer, loss=F.cross_entropy)


def loss_of_probabilities(output, y):
    return F.cross_entropy(torch.softmax(output, 1), y)


def build_with_a_loss_of_its_own(config):
    net = torch.nn.Linear(4, 3)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.7)
    return cerebro.torch.Model(net, optimizer=optimizer, loss=loss_of_probabilities)


SOFTMAX = "the outputs are probabilities, and cross_entropy applies softmax again"


@pytest.fixture
def data(tmp_path):
    rng = np.random.default_rng(0)
    columns = {"x": rng.normal(size=(90, 4)).astype("f4"), "y": rng.integers(0, 3, size=90)}
    return cerebro.shard(columns, tmp_path / "data", shards=3, progress=False)


def searched(build, data, tmp_path, action="default", **changes):
    arguments = {"epochs": 2, "searcher": "grid", "batch_size": 8, "progress": False}
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter(action)
        space = {"lr": [0.1, 0.2]}
        result = cerebro.search(
            build, space, data, validation=0.3, run=tmp_path / "run", **arguments | changes
        )
    return result, shown


@pytest.mark.parametrize("workers", [0, 1])
def test_a_search_warns_once_of_an_important_finding(data, tmp_path, workers):
    result, shown = searched(build_twice_softmaxed, data, tmp_path, workers=workers)
    (warning,) = shown
    text = f"{SOFTMAX}: leave softmax out of the network: return logits"
    assert str(warning.message) == f"trial 0: {text}"
    assert warning.filename == __file__  # at `build`, if no line of the user's calls the loss
    assert warning.lineno == build_twice_softmaxed.__code__.co_firstlineno
    assert [e["text"] for e in result.events() if e["kind"] == "warning"] == [text]
    assert f"before the search: {SOFTMAX}" in str(result.summary())
    assert result.status == "finished"


def test_warnings_turned_into_errors_do_not_end_a_search(data, tmp_path):
    result, shown = searched(build_twice_softmaxed, data, tmp_path, action="error", workers=0)
    assert result.status == "finished"
    assert [SOFTMAX in str(warning.message) for warning in shown] == [True]


def test_ignored_warnings_hide_the_finding(data, tmp_path):
    result, shown = searched(build_twice_softmaxed, data, tmp_path, action="ignore", workers=0)
    assert (result.status, shown) == ("finished", [])


def test_states_do_not_depend_on_the_diagnosis(data, tmp_path, monkeypatch):
    import cerebro.worker.diagnosis as diagnosis

    with_it, _ = searched(build_right, data, tmp_path / "with", workers=0)
    monkeypatch.setattr(diagnosis, "diagnose", lambda *_, **__: [])
    without, _ = searched(build_right, data, tmp_path / "without", workers=0)
    assert [t.state_hash for t in with_it.trials] == [t.state_hash for t in without.trials]
    assert [t.history for t in with_it.trials] != []


def test_a_check_with_findings_and_hints_still_passes(data):
    found = cerebro.check(build_with_a_loss_of_its_own, {}, data, validation=0.3)
    assert found and found.problems == []
    assert [finding.code for finding in found.findings] == [
        "softmax-before-cross-entropy", "large-learning-rate",
    ]  # fmt: skip
    matters, hint = found.findings
    assert (matters.severity, hint.severity) == ("matters", "hint")
    line = loss_of_probabilities.__code__.co_firstlineno + 1
    assert matters.place == f"{__file__}:{line}"
    lines = str(found).splitlines()
    assert lines[0].startswith("the state survives a hop")
    assert lines[1].startswith(f"{SOFTMAX} (test_findings.py:{line}): ")
    assert lines[2].startswith("the learning rate of Adam is 0.7: ")


def test_a_right_model_has_no_findings(data):
    found = cerebro.check(build_right, {"lr": [0.1]}, data, validation=0.3)
    assert found and found.findings == []


def test_a_metric_ranked_the_wrong_way_round_is_shown(data, tmp_path):
    _, shown = searched(build_right, data, tmp_path, workers=0, metric="loss", mode="max")
    (warning,) = shown
    assert "mode='max' ranks trials with the largest 'loss' first" in str(warning.message)


def test_a_search_does_not_repeat_pytorchs_own_warnings(data, tmp_path):
    def build(config):
        net = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"])
        loss = torch.nn.MSELoss()
        return cerebro.torch.Model(net, optimizer=optimizer, loss=lambda o, y: loss(o, y.float()))

    _, shown = searched(build, data, tmp_path, workers=0)
    assert shown and all("Using a target size" in str(each.message) for each in shown)
    assert [finding.code for finding in cerebro.check(build, {"lr": [0.1]}, data).findings] == [
        "broadcast"
    ]


# --- what graph=True would bring -----------------------------------------------------------


def build_small(config):
    net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    loss = torch.nn.functional.cross_entropy
    return cerebro.torch.Model(net, optimizer=optimizer, loss=loss, graph=config.get("graph"))


def test_the_check_reports_the_speedup_of_graph(data, monkeypatch):
    found = cerebro.check(build_small, {}, data, validation=0.3)
    assert found and re.fullmatch(
        r"graph=True would make a training step \d+\.\d times as fast \(\S+ instead of \S+ ms, "
        r"measured on one batch\), if the step's code does the same for every batch",
        str(found).splitlines()[-1],
    )
    for graph in (True, False):
        chosen = cerebro.check(build_small, {"graph": [graph]}, data, validation=0.3)
        assert chosen and "graph" not in str(chosen)


def test_the_summary_suggests_graph_if_it_saves_enough_time(data, tmp_path, monkeypatch):
    result = cerebro.search(
        build_small, {}, data, epochs=1, batch_size=8, validation=0.3, run=tmp_path / "run",
        workers=0, progress=False, n_trials=1,
    )  # fmt: skip
    trained = sum(entry["seconds"] for entry in result.trials[0].history)
    for gain, least, is_offered in (
        ((0.004, 0.001), 0.74 * trained, True),
        ((0.004, 0.001), 0.76 * trained, False),
        ((0.004, 0.0039), 0.0, False),
    ):
        monkeypatch.setitem(result.saved.meta, "graph_gain", gain)
        monkeypatch.setattr("cerebro.report.summary.LEAST_SAVED", least)
        offer = "- graph=True would make a training step 4.0 times as fast (1 instead of 4 ms"
        summary = result.summary()
        assert (offer in summary) == ("graph=True" in summary) == is_offered


@pytest.mark.parametrize("is_gpu", [True, False])
def test_a_search_on_a_gpu_begins_with_what_graph_would_bring(
    data, tmp_path, monkeypatch, capsys, is_gpu
):
    monkeypatch.setattr("cerebro.coordinator.conduct.is_gpu", lambda _: is_gpu)
    monkeypatch.setattr("cerebro.torch.diagnosis.measure_gain", lambda *_: (0.009, 0.003))
    cerebro.search(
        build_small, {}, data, epochs=1, batch_size=8, validation=0.3, run=tmp_path / "run",
        workers=0, progress="lines", n_trials=1,
    )  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    offers = [number for number, line in enumerate(lines) if line.startswith("graph=True")]
    assert len(offers) == is_gpu
    if is_gpu:
        assert "3.0 times as fast (3 instead of 9 ms" in lines[offers[0]]
        assert lines[offers[0] + 1].startswith("started with")
