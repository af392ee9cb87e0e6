"""Workers that share a process on a GPU, each with its own stream: the states of one worker."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
import small_cnns  # noqa: E402
from small_cnns import hashes, search  # noqa: E402


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return small_cnns.shards(tmp_path_factory.mktemp("gpu") / "data")


@pytest.fixture
def in_one_process(monkeypatch):
    monkeypatch.setenv("CEREBRO_GPU_STREAMS", "1")


@pytest.mark.parametrize("build", [small_cnns.build, small_cnns.build_graph])
def test_models_that_overlap_have_the_states_of_one_worker(data, tmp_path, monkeypatch, build):
    expected = hashes(search(tmp_path / "one", data, build))
    monkeypatch.setenv("CEREBRO_GPU_STREAMS", "1")
    for count in (2, 4):
        result = search(tmp_path / f"{count}", data, build, workers_per_device=count)
        assert hashes(result) == expected
        assert len({unit["worker"] for unit in result.saved.units()}) == count
        assert "not replayed" not in "".join(trial.log for trial in result.trials)


def test_a_process_that_is_killed_changes_nothing(data, tmp_path, in_one_process):
    flag = tmp_path / "killed"
    result = search(tmp_path / "run", data, small_cnns.dying(flag), workers_per_device=3)
    assert flag.exists()
    assert hashes(result) == hashes(search(tmp_path / "one", data))
