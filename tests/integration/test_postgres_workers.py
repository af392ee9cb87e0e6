"""Sessions of a PostgreSQL server are workers: examples/postgres, with a server of this test's."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_postgres import programs

import cerebro

adbc = pytest.importorskip("adbc_driver_postgresql.dbapi")
for package in ("torch", "sklearn", "zmq"):
    pytest.importorskip(package)

EXAMPLE = Path(__file__).parents[2] / "examples" / "postgres"
MANY = 30
"""Epochs of a search that is still in progress when something happens to it."""
WORKING = "state = 'active' and query like 'select cerebro_worker%'"
RIGHTS = "+dac_read_search"
"""The server may read this Python, but not write the files of the search, which is root's."""


@pytest.fixture(scope="module")
def as_server(tmp_path_factory):
    """The beginning of commands that the server's user runs, who can execute this Python."""
    prefix = []
    if os.geteuid() == 0:  # the server refuses to run as root
        import pwd

        try:
            pwd.getpwnam("postgres")
        except KeyError:
            pytest.skip("needs a user 'postgres', because PostgreSQL does not run as root")
        if shutil.which("setpriv") is None:
            pytest.skip("needs setpriv, to be the user 'postgres' who can read this Python")
        # This Python may be in root's home.
        prefix = [
            "setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups",
            f"--inh-caps={RIGHTS}", f"--ambient-caps={RIGHTS}",
        ]  # fmt: skip
    tried = [*prefix, sys.executable, "-c", "import cerebro, zmq"]
    if subprocess.run(tried, capture_output=True, check=False).returncode:
        pytest.skip("the server's user cannot execute this Python")
    return prefix


@pytest.fixture(scope="module")
def server(as_server, tmp_path_factory):
    """A server with the function; the value is its address. Its agents' caches are in a folder."""
    binaries, folder = programs(), tmp_path_factory.mktemp("postgres")
    if as_server:
        shutil.chown(folder, "postgres", "postgres")
        for parent in folder.parents:
            if parent.is_relative_to(tmp_path_factory.getbasetemp().parent.parent):
                parent.chmod(parent.stat().st_mode | 0o011)
    environment = {**os.environ, "CEREBRO_CACHE": str(folder / "cache")}

    def run(program, *arguments):
        subprocess.run(
            [*as_server, binaries / program, "-D", folder / "data", *arguments],
            check=True, cwd=folder, stdout=subprocess.DEVNULL, env=environment,
        )  # fmt: skip

    run("initdb", "--username=test", "--auth=trust", "--no-sync", "--encoding=UTF8")
    run(
        "pg_ctl", "start", "-w", "-l", folder / "log", "-o",
        f"-c listen_addresses='' -c unix_socket_directories='{folder}' -c fsync=off",
    )  # fmt: skip
    try:
        uri = f"postgresql://test@/postgres?host={folder}"
        known = "select count(*) from pg_available_extensions where name = 'plpython3u'"
        if ask(uri, known) == 0:
            pytest.skip("needs the extension plpython3u (postgresql-plpython3-15 in Debian)")
        command = [
            binaries / "psql", "-h", folder, "-U", "test", "-d", "postgres", "-q",
            "-v", f"python={sys.executable}", "-f", EXAMPLE / "cerebro_worker.sql",
        ]  # fmt: skip
        subprocess.run(command, check=True)
        yield uri
    finally:
        run("pg_ctl", "stop", "-w", "-t", "180", "-m", "immediate")
    assert left_over(folder) == []


def ask(uri, query, *parameters):
    with adbc.connect(uri) as connection, connection.cursor() as cursor:
        cursor.execute(query, parameters or None)
        return cursor.fetchone()[0]


def left_over(folder):
    """Agents and workers of the server."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes()
            cache = f"CEREBRO_CACHE={folder}".encode()
            if b"cerebro" in command and cache in (entry / "environ").read_bytes():
                found.append(command)
    return found


def folder_of(uri):
    return Path(uri.partition("host=")[2])


def wait_until(holds, seconds=60):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, "it has not happened"
        time.sleep(0.1)


def search(folder, uri, sessions, epochs=2):
    """Start the example's program."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        listen = f"127.0.0.1:{free.getsockname()[1]}"
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_text(secrets.token_hex(32))
    command = [
        sys.executable, EXAMPLE / "search_in_postgres.py", "--uri", uri, "--listen", listen,
        "--key", key, "--sessions", str(sessions), "--data", folder / "data", "--run",
        folder / f"run-{sessions}", "--epochs", str(epochs), "--trials", "4",
    ]  # fmt: skip
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def states(folder, sessions):
    result = cerebro.open(folder / f"run-{sessions}")
    assert result.status == "finished"
    return [[epoch["state_hash"] for epoch in trial.history] for trial in result.trials]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """States of the same search in one process."""
    folder = tmp_path_factory.mktemp("local")
    text, _ = (process := search(folder, "postgresql:///nowhere", 0)).communicate(timeout=200)
    assert process.returncode == 0, text
    return states(folder, 0)


def test_states_match_those_of_a_single_process(server, tmp_path, expected):
    process = search(tmp_path, server, 2)
    text, _ = process.communicate(timeout=250)
    assert process.returncode == 0, text
    assert text.count("a session has returned 0: the search has ended") == 2
    assert states(tmp_path, 2) == expected
    units = cerebro.open(tmp_path / "run-2").units()
    assert {unit["worker"] for unit in units} == {0, 1}
    assert left_over(folder_of(server)) == []


def test_a_search_continues_after_a_session_is_terminated(server, tmp_path):
    here = search(tmp_path, server, 0, epochs=MANY)
    text, _ = here.communicate(timeout=250)
    assert here.returncode == 0, text
    process = search(tmp_path, server, 2, epochs=MANY)
    run = tmp_path / "run-2"
    wait_until(lambda: (run / "run.sqlite").exists() and len(cerebro.open(run).units()) > 50)
    query = f"select pg_terminate_backend(min(pid)) from pg_stat_activity where {WORKING}"
    assert ask(server, query)
    text, _ = process.communicate(timeout=250)
    assert process.returncode == 0, text
    assert text.count("a session has failed: ") == 1
    assert text.count("a session has returned 0: the search has ended") == 1
    assert states(tmp_path, 2) == states(tmp_path, 0)
    kinds = [event["kind"] for event in cerebro.open(run).events()]
    assert kinds.count("worker left") == 1 and not {"worker lost", "state lost"} & {*kinds}
    assert left_over(folder_of(server)) == []


def test_a_search_whose_sessions_have_all_failed_ends(server, tmp_path):
    """The function is not in this database; nobody waits for agents until they are late."""
    process = search(tmp_path, server.replace("/postgres?", "/template1?"), 2)
    text, _ = process.communicate(timeout=100)
    assert process.returncode == 1
    assert text.count("a session has failed: ") == 2 and "cerebro_worker" in text
    assert text.endswith("all sessions have failed, as said above\n")


def test_the_function_is_not_made_without_its_language(server, tmp_path):
    """What cannot be done ends the script, whose status says so."""
    script = tmp_path / "worker.sql"
    script.write_text((EXAMPLE / "cerebro_worker.sql").read_text().replace("plpython3u", "plno3u"))
    command = [programs() / "psql", server, "-q", "-v", "python=python", "-f", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert done.stderr.count("ERROR") == 1 and "plno3u" in done.stderr


@pytest.mark.parametrize(
    ("function", "failure"),
    [("pg_cancel_backend", "canceling statement"), ("pg_terminate_backend", "terminating")],
)
def test_a_session_can_be_ended(server, function, failure):
    """Although its Python waits for the agent, which ends too."""
    process = call_nobody(server)
    wait_until(lambda: left_over(folder_of(server)))
    query = f"select {function}(pid) from pg_stat_activity where {WORKING}"
    assert ask(server, query)
    text, _ = process.communicate(timeout=60)
    assert failure in text
    wait_until(lambda: left_over(folder_of(server)) == [])
    assert ask(server, "select 1") == 1


def test_an_agent_ends_when_its_server_process_is_killed(server):
    """All other sessions end, too: the reason for a warning."""
    process = call_nobody(server)
    wait_until(lambda: left_over(folder_of(server)))
    with adbc.connect(server) as other, other.cursor() as cursor:
        cursor.execute(f"select pid from pg_stat_activity where {WORKING}")
        os.kill(cursor.fetchone()[0], 9)
        process.communicate(timeout=60)
        wait_until(lambda: left_over(folder_of(server)) == [])
        with pytest.raises(adbc.Error):
            cursor.execute("select 1")
            cursor.fetchone()

    def answers():
        with contextlib.suppress(adbc.Error):
            return ask(server, "select 1") == 1
        return False

    wait_until(answers)


def call_nobody(uri):
    """A session whose agent waits for a search that does not begin."""
    call = f"select cerebro_worker('127.0.0.1:1', '{secrets.token_hex(32)}')"
    return subprocess.Popen(
        [programs() / "psql", uri, "-c", call],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def test_the_function_returns_a_failure_without_a_search(server):
    assert ask(server, "select cerebro_worker($1, $2)", "nowhere", "00").startswith("1: ")


def test_other_roles_may_not_call_the_function(server):
    with adbc.connect(server) as connection, connection.cursor() as cursor:
        cursor.execute("create role somebody")
        cursor.execute("set role somebody")
        with pytest.raises(adbc.Error, match="permission denied for function cerebro_worker"):
            cursor.execute("select cerebro_worker('127.0.0.1:1', '00')")
            cursor.fetchone()
