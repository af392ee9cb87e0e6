"""An agent that joins after the user has edited files trains the program of the run."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys

import pytest

pytest.importorskip("zmq")

from clusters import wait_until
from dialing import AtUnit, left_over, same, search

import cerebro
from benchmarks.peers import free_port
from cerebro.cluster.keys import read_key_file

USER = """
import resumable

class Model(resumable.Model):
    def __init__(self, config, info, factor):
        super().__init__(config, info)
        self.lr *= factor

def build(config, info):
    import agents_late
    return Model(config, info, agents_late.FACTOR)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "agents_user.py").write_text(USER)
    (folder / "agents_late.py").write_text("FACTOR = 0.5\n")
    monkeypatch.syspath_prepend(folder)
    yield folder
    for name in ("agents_user", "agents_late"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("is_removed", [False, True])
def test_an_agent_joining_after_an_edit_uses_the_code_of_the_run(
    data, tmp_path, project, monkeypatch, is_removed
):
    build = importlib.import_module("agents_user").build
    expected = search(tmp_path / "here", data, build=build, workers=1)
    monkeypatch.setenv("CEREBRO_CACHE", str(tmp_path / "cache"))
    address, key = f"127.0.0.1:{free_port()}", tmp_path / "key"
    read_key_file(key, create=True)
    command = [sys.executable, "-m", "cerebro", "agent", "--connect", address, "--key", str(key)]
    started = [subprocess.Popen(command)]
    executor = cerebro.cluster.Executor(1, listen=address, key=key)

    def exchange():
        for file in project.glob("*.py"):
            if is_removed:
                file.unlink()
            else:
                file.write_text(file.read_text().replace("*= factor", "*= 3 * factor"))
        if not is_removed:
            (project / "agents_late.py").write_text("FACTOR = 1.5\n")
        os.kill(started[0].pid, signal.SIGKILL)
        started.append(subprocess.Popen(command))

    result = search(tmp_path / "run", data, executor, build=build, callbacks=[AtUnit(10, exchange)])
    same(result, expected)
    assert [process.wait(30) for process in started] == [-9, 0]
    wait_until(lambda: left_over(tmp_path) == [])  # a killed agent's worker ends by itself
