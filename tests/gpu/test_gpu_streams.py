"""Workers of a GPU, which share a process, each with its own stream: the states of one worker."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
import small_cnns  # noqa: E402
from small_cnns import hashes, search  # noqa: E402


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small_cnns.shards(tmp_path_factory.mktemp("gpu") / "data")


@pytest.mark.parametrize("build", [small_cnns.build, small_cnns.build_graph])
def test_models_that_overlap_have_the_states_of_one_worker(data, tmp_path, build):
    expected = hashes(search(tmp_path / "one", data, build, workers_per_device=1))
    for count in (2, 4):
        result = search(tmp_path / f"{count}", data, build, workers_per_device=count)
        assert hashes(result) == expected
        assert len({unit["worker"] for unit in result.saved.units()}) == count
        assert "not replayed" not in "".join(trial.log for trial in result.trials)


def test_by_default_trials_with_graphs_are_trained_at_once(data, tmp_path):
    result = search(tmp_path / "graphs", data, small_cnns.build_graph)
    assert result.saved.settings["workers"] == len(result.trials)
    one = search(tmp_path / "one", data, small_cnns.build_graph, workers_per_device=1)
    assert hashes(result) == hashes(one)
    ordinary = search(tmp_path / "ordinary", data, small_cnns.build)
    assert ordinary.saved.settings["workers"] == 1


def test_a_process_that_is_killed_changes_nothing(data, tmp_path):
    flag = tmp_path / "killed"
    result = search(tmp_path / "run", data, small_cnns.dying(flag), workers_per_device=3)
    assert flag.exists()
    assert hashes(result) == hashes(search(tmp_path / "one", data))
