"""Tokens show whether a node sees the run's folder; killed coordinators leave theirs."""

from __future__ import annotations

import os
from pathlib import Path

from cerebro.cluster.admission import OLD_TOKEN_SECONDS, make_run_token, remove_old_tokens

LEFT = ".cerebro-" + 32 * "a"


def test_a_token_exists_only_while_nodes_are_probed(tmp_path):
    with make_run_token(tmp_path / "run" / "states") as token:
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
    with make_run_token(tmp_path / "other") as token:
        left = tmp_path / LEFT
        left.mkdir()
        before = left.stat().st_mtime - OLD_TOKEN_SECONDS - 1.0
        os.utime(left, (before, before))
        remove_old_tokens(tmp_path / "run" / "states")
        assert [file.name for file in tmp_path.iterdir()] == [Path(token).name]
