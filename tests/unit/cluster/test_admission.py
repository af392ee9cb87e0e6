"""Tokens show whether a node sees the run's folder; killed coordinators leave theirs."""

from __future__ import annotations

import os
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

from cerebro.cluster.admission import (
    OLD_TOKEN_SECONDS,
    Admission,
    make_run_token,
    remove_old_tokens,
)
from cerebro.cluster.hub import AgentError
from cerebro.errors import InputError
from cerebro.machine.local import LOCAL

LEFT = ".cerebro-" + 32 * "a"


def test_a_token_exists_only_while_nodes_are_probed(tmp_path):
    with make_run_token(tmp_path / "run" / "states", LOCAL.disk) as token:
        assert Path(token).parent == tmp_path and list(Path(token).iterdir()) == []
    assert list(tmp_path.iterdir()) == []


def test_tokens_of_a_killed_coordinator_are_removed_from_the_runs_folder(tmp_path):
    (tmp_path / LEFT).mkdir()
    (tmp_path / LEFT / "of-an-agent").write_text("")
    (tmp_path / "trial-0000.state").write_text("")
    remove_old_tokens(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["trial-0000.state"]


def test_only_old_tokens_are_removed_beside_the_runs_folder(tmp_path):
    """The others may be those of runs that are beginning."""
    with make_run_token(tmp_path / "other", LOCAL.disk) as token:
        left = tmp_path / LEFT
        left.mkdir()
        before = left.stat().st_mtime - OLD_TOKEN_SECONDS - 1.0
        os.utime(left, (before, before))
        remove_old_tokens(tmp_path / "run" / "states")
        assert [file.name for file in tmp_path.iterdir()] == [Path(token).name]


# --- agents that are lost while a search starts ---------------------------------------


class Asked:
    """An agent that reports its name, hangs up, or fails."""

    def __init__(self, name, error=None, is_gone=False):
        self.id = self.address = name
        self.is_gone = is_gone
        self._error = error

    def call(self, method, *arguments):
        answer = Future()
        if self._error is None:
            answer.set_result(self.id)
        else:
            answer.set_exception(self._error)
        return answer


def collect(folder, *agents, dials_in=True):
    """The names of the agents with which a search starts."""
    context = SimpleNamespace(
        folders=SimpleNamespace(states=folder), exactness=SimpleNamespace(threads=1), device="cpu"
    )
    hub = SimpleNamespace(dials_in=dials_in, wait_for_calls=lambda calls, seconds: None)
    supply = SimpleNamespace(list_data_paths=lambda node: [])
    admission = Admission(hub, supply, context, None)
    return [report for _, _, report in admission._collect_reports([(a, a) for a in agents])]


HUNG_UP = AgentError("it has closed the connection")


def test_a_search_starts_without_an_agent_that_has_hung_up(tmp_path):
    lost = Asked("lost", HUNG_UP, is_gone=True)
    assert collect(tmp_path, Asked("a"), lost, Asked("b")) == ["a", "b"]
    with pytest.raises(InputError, match=r"node lost .* is gone: it has closed the connection"):
        collect(tmp_path, lost)


@pytest.mark.parametrize(
    ("agent", "dials_in"),
    [
        (Asked("lost", HUNG_UP, is_gone=True), False),  # Ray would have started it
        (Asked("broken", AgentError("no room", OSError("no room")), is_gone=True), True),
    ],
)
def test_an_agent_that_cannot_start_is_refused(tmp_path, agent, dials_in):
    with pytest.raises(InputError, match=r"cannot start a worker: .*CEREBRO_CACHE"):
        collect(tmp_path, Asked("a"), agent, dials_in=dials_in)
