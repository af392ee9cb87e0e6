"""A search over agents that dial in gives what it gives here; they may die, and others may come."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import warnings
from itertools import pairwise

import psutil
import pytest

pytest.importorskip("zmq")

import ballast
from breakable import Way
from clusters import wait_until
from dialing import Apart, AtUnit, events, left_over, run_to_the_end, same, search, strike_busiest

import cerebro
from benchmarks.peers import free_port
from cerebro import control
from cerebro.cli import main
from cerebro.cluster import agent as agent_module
from cerebro.cluster import executor as executor_module
from cerebro.cluster import hub as module
from cerebro.cluster.agent import ENDED, UNHEARD, Agent
from cerebro.cluster.engine import Engine, Processes
from cerebro.cluster.keys import Keys, Ticket, parse_key, read_key_file
from cerebro.cluster.messages import list_versions
from cerebro.errors import InputError, WorkerError
from cerebro.machine import environment
from tests.integration.steered import AtEpoch


@pytest.fixture(scope="module")
def expected(data, tmp_path_factory):
    return search(tmp_path_factory.mktemp("runs") / "here", data)


def hops(result):
    with sqlite3.connect(result.path / "run.sqlite") as connection:
        rows = connection.execute(
            "SELECT trial, hopped, state_bytes FROM units ORDER BY trial, epoch, step"
        ).fetchall()
    return [before[2] for before, (_, hopped, _) in pairwise(rows) if hopped]


def test_states_match_those_of_a_single_process_and_are_sent_once(
    data, tmp_path, expected, elsewhere
):
    executor = Apart(tmp_path)
    sharing = []

    def look():
        sharing.extend(remote.begin.workers_here for remote in executor._members.workers.values())

    result = search(tmp_path / "run", data, executor, callbacks=[AtUnit(1, look)])
    same(result, expected)
    assert sharing == [3, 3, 3]  # they are nodes of their own, but of one machine
    traffic = executor.traffic
    assert sorted(s for _, s in traffic.shards if s >= 0) == sorted([*range(6)] * 3)  # each has all
    assert set(traffic.shards.values()) == {1} and len({place for place, _ in traffic.shards}) == 3
    assert traffic.states == len(hops(result))
    assert traffic.state_bytes == sum(hops(result))
    assert {unit["worker"] for unit in result.units()} == {0, 1, 2}
    assert left_over(tmp_path) == []
    assert [list(cache.glob("scratch/*")) for cache in executor.caches] == [[], [], []]


def test_clones_and_added_trials_are_those_of_a_single_process(data, tmp_path, elsewhere):
    requests = [
        control.Clone(0, {"lr": 0.02}, after=1),
        control.Add({"lr": 0.5}),
        control.Clone(1, {"lr": 0.05}, cold=True),
    ]

    def steered(folder, executor=None):
        def ask():
            for command in requests:
                control.put(folder / control.FOLDER, command)

        return search(folder, data, executor, callbacks=[AtEpoch({(0, 1): ask})], keep="all")

    here = steered(tmp_path / "here")
    assert [trial.record.origin for trial in here.trials[3:]] == ["user"] * 3
    same(steered(tmp_path / "agents", Apart(tmp_path)), here)


def test_an_agent_that_is_killed_costs_little(data, tmp_path, expected, elsewhere):
    executor = Apart(tmp_path)
    kill = AtUnit(16, lambda: strike_busiest(executor))
    with pytest.warns(UserWarning, match="until another is started"):
        result = search(tmp_path / "run", data, executor, callbacks=[kill])
    same(result, expected)
    (lost,) = events(result, "worker lost")
    assert "is gone" in lost
    wait_until(lambda: left_over(tmp_path) == [])  # a killed agent's worker ends by itself


def test_agents_beside_a_killed_agent_keep_their_shards(data, tmp_path, expected, elsewhere):
    """Two agents for each of two caches: a cache is in use as long as one of them is left."""
    executor = Apart(tmp_path, workers=4, sharing=2)
    beside = []

    def kill():
        places = {number: remote.place for number, remote in executor._members.workers.items()}
        lost = strike_busiest(executor)
        beside.extend(n for n, place in places.items() if place == places[lost] and n != lost)

    with pytest.warns(UserWarning, match="until another is started"):
        result = search(tmp_path / "run", data, executor, callbacks=[AtUnit(8, kill)])
    same(result, expected)
    assert len(executor.traffic.shards) == 14  # 6 shards and the validation rows for each cache
    assert set(executor.traffic.shards.values()) == {1}  # nothing was sent again
    (lost,) = [event["time"] for event in result.events() if event["kind"] == "worker lost"]
    later = [unit for unit in result.units() if unit["start"] > lost and unit["kind"] == "train"]
    assert set(beside) <= {unit["worker"] for unit in later} and len(beside) == 1
    wait_until(lambda: left_over(tmp_path) == [])  # a killed agent's worker ends by itself


@pytest.mark.parametrize("strikes", [False, True])
def test_pools_are_dealt_and_states_match_those_of_a_single_process(
    many_shards, tmp_path, elsewhere, strikes
):
    """Order and states depend on the data alone, also if an agent dies and its pool moves."""
    here = search(tmp_path / "here", many_shards, shuffle="shards", n_trials=3)
    executor = Apart(tmp_path)
    callbacks = [AtUnit(8, lambda: strike_busiest(executor))] if strikes else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        result = search(
            tmp_path / "run",
            many_shards,
            executor,
            shuffle="shards",
            n_trials=3,
            callbacks=callbacks,
        )
    same(result, here)
    sent = {}
    for place, shard in executor.traffic.shards:
        sent.setdefault(place, set()).add(shard)
    pools = [{*range(33)}, {*range(33, 66)}, {*range(66, 100)}]
    dealt = [shards - {-1} for shards in sent.values()]
    assert len(dealt) == 3 and set().union(*dealt) == {*range(100)}
    for shards in dealt:
        assert all(pool <= shards or not pool & shards for pool in pools)
    if not strikes:
        assert sorted(map(len, dealt)) == [33, 33, 34]
        assert executor.traffic.states == len(hops(result)) > 0
    wait_until(lambda: left_over(tmp_path) == [])  # a killed agent's worker ends by itself


def test_a_terminated_agent_hands_over_its_states(data, tmp_path, expected, elsewhere):
    """No unit that was done is lost: each is trained once."""
    executor = Apart(tmp_path)
    leave = AtUnit(16, lambda: strike_busiest(executor, signal.SIGTERM))
    with pytest.warns(UserWarning, match="until another is started"):
        result = search(tmp_path / "run", data, executor, callbacks=[leave])
    same(result, expected)
    (left,) = events(result, "worker left")
    assert "has left: its agent was told to end" in left and not events(result, "worker lost")
    # A state that was on its way to another agent is fetched again, from the coordinator.
    assert all("; 0 unit(s)" in text for text in events(result, "state lost"))
    assert left_over(tmp_path) == []


def test_queued_units_survive_dying_processes_of_an_agent(data, tmp_path, expected, elsewhere):
    executor = Apart(tmp_path, workers=1)
    queued = []

    def queue(worker, task):
        queued.append(task)
        type(executor).queue(executor, worker, task)

    def kill():
        for remote in executor._members.workers.values():
            for worker in psutil.Process(remote.agent.pid).children():
                worker.kill()

    executor.queue = queue
    struck = [AtUnit(unit, kill) for unit in (5, 14, 20)]
    result = search(tmp_path / "run", data, executor, callbacks=struck)
    same(result, expected)
    assert len(events(result, "worker lost")) == 3
    assert events(result, "state lost") == []  # the agent has the states
    assert len(queued) > 5
    assert left_over(tmp_path) == []


def test_a_run_ends_when_the_last_agent_is_killed_and_none_can_come(
    data, tmp_path, expected, elsewhere, monkeypatch
):
    """Its own agents are not started again, so it does not wait for others."""
    monkeypatch.setattr(executor_module, "PATIENCE_SECONDS", 1e6)
    executor = Apart(tmp_path)

    def strike_all():
        for process in executor.processes.processes:
            os.kill(process.pid, signal.SIGKILL)

    with (
        pytest.warns(UserWarning, match="is gone"),
        pytest.raises(WorkerError, match="all agents have ended, with status -9, -9, -9"),
    ):
        search(tmp_path / "run", data, executor, callbacks=[AtUnit(16, strike_all)])
    wait_until(lambda: left_over(tmp_path) == [])  # a killed agent's worker ends by itself
    same(cerebro.resume(tmp_path / "run", build=ballast.build), expected)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143)])
def test_a_command_line_agent_can_replace_another_during_a_run(
    data, tmp_path, expected, monkeypatch, capfd, number, status
):
    """The run continues with the next, which finds states only if the first was asked to leave."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("CEREBRO_CACHE", str(cache))
    address, key = f"127.0.0.1:{free_port()}", tmp_path / "key"
    read_key_file(key, create=True)
    command = [sys.executable, "-m", "cerebro", "agent", "--connect", address, "--key", str(key)]
    started = [subprocess.Popen(command)]  # before the coordinator listens
    executor = cerebro.cluster.Executor(1, listen=address, key=key)

    def exchange():
        os.kill(started[0].pid, number)
        started.append(subprocess.Popen(command))

    result = search(tmp_path / "run", data, executor, callbacks=[AtUnit(10, exchange)])
    same(result, expected)
    assert [process.wait(30) for process in started] == [status, 0]
    was_killed = number == signal.SIGKILL
    assert bool(events(result, "state lost")) == was_killed
    assert len(events(result, "worker lost")) == was_killed
    assert len(events(result, "worker left")) != was_killed
    told = "cerebro agent: told to end (SIGTERM): the search has its states"
    assert capfd.readouterr().err.count(told) != was_killed
    wait_until(lambda: left_over(tmp_path) == [])  # a killed agent's worker ends by itself


def test_a_terminated_agent_reports_that_it_was_in_no_search(tmp_path):
    address, key = f"127.0.0.1:{free_port()}", tmp_path / "key"
    read_key_file(key, create=True)
    line = "import sys, threading, os, signal; from cerebro.cluster import agent; "
    line += "begin = agent.Agent.run; "
    line += "stop = lambda: os.kill(os.getpid(), signal.SIGTERM); "
    line += "agent.Agent.run = lambda self, **options: (stop(), begin(self, **options))[1]; "
    line += "from cerebro.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", line, "agent", "--connect", address, "--key", str(key)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 143
    assert done.stderr == "cerebro agent: told to end (SIGTERM): it was in no search\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to start agents as another user")
@pytest.mark.parametrize("mode", [0o755, 0o777])
def test_agents_of_another_user_send_their_states(data, tmp_path, expected, monkeypatch, mode):
    """They may not write to the run's folder, or what they wrote would not be the script's."""
    reads = "+dac_read_search"  # this Python may be in root's home
    other = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    other += [f"--inh-caps={reads}", f"--ambient-caps={reads}"]
    if shutil.which("setpriv") is None:
        pytest.skip("needs setpriv")
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o777)
    cache.chmod(0o777)
    monkeypatch.setenv("CEREBRO_CACHE", str(cache))
    address, key = f"127.0.0.1:{free_port()}", tmp_path / "key"
    monkeypatch.setenv("CEREBRO_CLUSTER_KEY", (read_key_file(key, create=True)).hex())
    command = [*other, sys.executable, "-m", "cerebro", "agent", "--connect", address]
    before = os.umask(0o777 & ~mode)
    try:
        started = [subprocess.Popen(command) for _ in range(2)]
        executor = cerebro.cluster.Executor(2, listen=address, key=key)
        result = search(tmp_path / "run", data, executor)
        assert [process.wait(30) for process in started] == [0, 0]
    finally:
        os.umask(before)
        for process in started:
            process.kill()
    same(result, expected)
    assert executor.traffic.kept_bytes > 0
    owners = {file.lstat().st_uid for file in result.path.rglob("*")}
    assert owners == {os.getuid()}
    assert left_over(tmp_path) == []


def test_an_agent_given_up_by_its_search_exits_with_an_error(data, tmp_path, expected, monkeypatch):
    """Its batch system may start another; the agent that trains to the end succeeds."""
    monkeypatch.setenv("CEREBRO_CACHE", str(tmp_path / "cache"))
    address, key = f"127.0.0.1:{free_port()}", tmp_path / "key"
    read_key_file(key, create=True)
    command = [sys.executable, "-m", "cerebro", "agent", "--connect", address, "--key", str(key)]
    agents = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    executor = cerebro.cluster.Executor(2, listen=address, key=key)
    given_up = []

    def give_up():
        remote = executor._members.workers[0]
        given_up.append(remote.agent.pid)
        executor._handle_failed_agent(remote, WorkerError("no heartbeat for 35 seconds"))

    with pytest.warns(UserWarning, match="until another is started"):
        result = search(tmp_path / "run", data, executor, callbacks=[AtUnit(10, give_up)])
    same(result, expected)
    assert len(events(result, "worker lost")) == 1  # it does not replace itself while it ends
    line = "cerebro agent: its search has given it up: no heartbeat for 35 seconds\n"
    for agent in agents:
        said = agent.communicate(timeout=30)[1]
        fails = agent.pid in given_up
        assert (agent.returncode, said) == ((1, line) if fails else (0, ""))
    assert left_over(tmp_path) == []


def test_an_agent_of_an_engine_given_up_by_its_search_exits_normally(data, tmp_path, expected):
    """Its task would fail, for which Spark may end the tasks of all agents."""
    executor = Apart(tmp_path, workers=2)
    ended = []

    def give_up():
        remote = executor._members.workers[0]
        executor._handle_failed_agent(remote, WorkerError("no heartbeat for 35 seconds"))
        started = executor.processes.processes
        ended.extend(p.wait(30) for p in started if p.pid == remote.agent.pid)

    with pytest.warns(UserWarning, match="missing from now on"):
        result = search(tmp_path / "run", data, executor, callbacks=[AtUnit(10, give_up)])
    same(result, expected)
    assert len(events(result, "worker lost")) == 1
    assert ended == [0]


def test_a_disconnected_agent_rejoins_as_a_new_worker(data, tmp_path, expected, monkeypatch):
    monkeypatch.setenv("CEREBRO_CACHE", str(tmp_path / "cache"))
    port, key = free_port(), tmp_path / "key"
    read_key_file(key, create=True)
    way = Way(port)
    address = ["--connect", f"127.0.0.1:{way.port}", "--key", str(key)]
    agent = subprocess.Popen([sys.executable, "-m", "cerebro", "agent", *address])
    executor = cerebro.cluster.Executor(1, listen=f"127.0.0.1:{port}", key=key)
    result = search(tmp_path / "run", data, executor, callbacks=[AtUnit(10, way.cut)])
    same(result, expected)
    assert agent.wait(30) == 0
    assert len(events(result, "worker lost")) == 1
    assert {unit["worker"] for unit in result.units()} == {0, 1}
    assert left_over(tmp_path) == []
    way.close()


def test_a_disconnected_agent_ends_if_its_coordinator_cannot_be_reached(hub, capfd):
    way = Way(hub.port)
    ticket = Ticket(f"127.0.0.1:{way.port}", hub.keys.key, listen="127.0.0.1")
    status = []
    be = threading.Thread(target=lambda: status.append(agent_module.main(ticket, 1e6)))
    be.start()
    wait_until(hub.nodes)
    way.close()
    be.join(60)
    assert status == [ENDED]
    assert "the connection was lost; reconnecting" in capfd.readouterr().err


def test_an_agent_with_a_different_environment_is_refused(data, tmp_path, monkeypatch):
    here = environment.describe(1)
    other = {**here, "packages": {**here["packages"], "numpy": "1.0"}}
    monkeypatch.setattr(environment, "describe", lambda threads=None: other)
    monkeypatch.setenv("CEREBRO_CACHE", str(tmp_path / "cache"))
    with pytest.raises(InputError, match=r"different results: packages\.numpy is 1\.0 here and"):
        search(tmp_path / "run", data, cerebro.cluster.Executor(1))
    own = {**module.list_versions(), "cerebro": "0.0.9"}
    monkeypatch.setattr(module, "list_versions", lambda: own)
    with pytest.raises(InputError, match=r"cerebro is .* there and 0\.0\.9 here.*status 1"):
        search(tmp_path / "run", data, cerebro.cluster.Executor(1))
    assert not (tmp_path / "run").exists()
    assert left_over(tmp_path) == []


def test_an_agent_ends_when_its_starter_closes_its_input(tmp_path):
    """So do all when the coordinator is killed, and those that an engine has started."""
    engine = Processes([{"CEREBRO_CACHE": str(tmp_path)}])
    engine.start(Ticket("127.0.0.1:1", bytes(32)))
    (agent,) = engine.processes
    wait_until(lambda: left_over(tmp_path))
    agent.stdin.close()
    assert agent.wait(30) == 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"listen": "0.0.0.0:7070"}, "belong together"),
        ({"key": "cluster.key"}, "belong together"),
        ({"listen": "7070", "key": "k"}, "'host:port'"),
        ({"listen": "a:99999", "key": "k"}, "'host:port'"),
        ({"listen": "tcp://a:1", "key": "k"}, "'host:port'"),
    ],
)
def test_bad_arguments_are_refused(options, match):
    with pytest.raises(InputError, match=match):
        cerebro.cluster.Executor(**options)


def test_keys_are_files_that_only_their_owner_reads(tmp_path):
    file = tmp_path / "key"
    key = read_key_file(file, create=True)
    assert read_key_file(file, create=True) == key and len(key) == 32
    assert file.stat().st_mode & 0o777 == 0o600
    assert key.hex() not in repr(Ticket("h:1", key))
    file.chmod(0o644)
    with pytest.warns(UserWarning, match="others can read or replace the key in .*: chmod 600"):
        read_key_file(file)
    file.chmod(0o640)
    file.write_text("not a key")
    with pytest.raises(InputError, match=r"is not a key: .*openssl") as caught:
        read_key_file(file)
    assert str(caught.value).count("not a key") == 1  # and the text in the file is not shown
    with pytest.raises(InputError, match="cannot read the key"):
        read_key_file(tmp_path / "none")
    with pytest.raises(InputError, match=r"cannot create the key: .*No such file"):
        read_key_file(tmp_path / "none" / "key", create=True)
    with pytest.raises(InputError):
        parse_key("zz" * 32, "it")


@pytest.mark.parametrize("text", ["a", "a:", ":1", "a:0", "a:65536", "http://a:1", "a:²"])
def test_an_agent_refuses_what_is_no_address_at_once(text, capsys):
    assert main(["agent", "--connect", text]) == 1
    assert "is not an address: give 'host:port'" in capsys.readouterr().err


def test_an_agent_gives_up_on_a_port_of_another_protocol(capfd):
    """It is refused before it says hello, which would wait for a connection forever."""
    import zmq

    with socket.create_server(("127.0.0.1", 0)) as server:
        agent = Agent(Ticket(f"127.0.0.1:{server.getsockname()[1]}", bytes(32)), patience=0)
        with server.accept()[0] as connection:
            connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n" * 10)
            wait_until(lambda: not agent._socket._socket.poll(0, zmq.POLLOUT))
            assert agent.run() == UNHEARD
    agent.close()
    assert "no coordinator with this key answers at" in capfd.readouterr().err


def test_an_agent_says_at_once_that_a_host_is_unknown(tmp_path, capfd):
    key = tmp_path / "key"
    read_key_file(key, create=True)
    command = ["agent", "--connect", "search.invalid:7070", "--key", str(key), "--patience", "1"]
    assert main(command) == UNHEARD
    first, second = capfd.readouterr().err.splitlines()
    assert re.fullmatch(
        r".* cannot resolve the host 'search\.invalid' \(.+\); retrying for 1 s", first
    )
    assert "no coordinator with this key answers at search.invalid:7070" in second


HELLO = {"id": "x", "host": "x", "machine": "x", "pid": 1, "states": 5}


def test_an_agent_that_hangs_up_during_a_call_fails_the_call_once(monkeypatch):
    hub = module.Hub(Keys.generate(), Engine(), "127.0.0.1")
    try:
        line = module.RemoteAgent(hub, "x")
        line.connect(b"x", -1, "127.0.0.1", HELLO)
        with monkeypatch.context() as patched:
            patched.setattr(hub._socket, "send", lambda frames: hub._drop_agent(line))
            during = line.call("ping")
        for call in (during, line.call("ping")):
            with pytest.raises(module.AgentError, match="closed the connection"):
                call.result(0)
    finally:
        hub.close()


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("10.0.0.2", "10.0.0.2:5"),
        ("::ffff:10.0.0.2", "10.0.0.2:5"),
        ("fd00::2", "[fd00::2]:5"),
        ("::ffff:127.0.0.1", ":5"),
        ("::1", ":5"),
    ],
)
def test_states_are_fetched_from_where_the_agent_dialed(peer, address):
    line = module.RemoteAgent(None, "x")
    before = line.states.make(1)
    line.connect(b"", 1, peer, HELLO)
    assert before.address == line.states.make(2).address == address


@pytest.fixture
def hub():
    hub = module.Hub(Keys.generate(), Engine(), "127.0.0.1")
    yield hub
    hub.close()


def yet_to_come(hub):
    """The line of an agent that has yet to connect, and the agent, with its own thread."""
    line = module.RemoteAgent(hub, "known")
    hub.expect(line)
    ticket = Ticket(f"127.0.0.1:{hub.port}", hub.keys.key, listen="127.0.0.1")
    agent = Agent(ticket, 20.0, number="known")
    return line, threading.Thread(target=run_to_the_end, args=[agent])


def test_calls_made_before_an_agent_connects_are_sent_in_order(hub):
    line, thread = yet_to_come(hub)
    calls = [line.call("mark_agent_lost", "a"), line.call("ping"), line.call("run", None, None)]
    assert not any(call.done() for call in calls)
    thread.start()
    assert [call.result(30) for call in calls[:2]] == [None, os.getpid()]
    with pytest.raises(module.AgentError, match="the worker has not been started"):
        calls[2].result(30)
    assert [known.id for known in hub.nodes()] == ["known"]
    hub.end(line)
    thread.join(30)


def test_an_agent_that_never_connects_fails_its_calls(hub):
    line, _ = yet_to_come(hub)
    call = line.call("ping")
    hub.mark_lost(line, module.AgentError("its actor has died"))
    for failed in (call, line.call("ping")):
        with pytest.raises(module.AgentError):
            failed.result(0)
    assert not hub.nodes()


def test_an_expected_agent_of_another_version_fails_its_calls(hub, monkeypatch):
    line, thread = yet_to_come(hub)
    monkeypatch.setattr(agent_module, "list_versions", lambda: {**list_versions(), "python": "2.7"})
    call = line.call("ping")
    thread.start()
    with pytest.raises(module.AgentError, match=r"is refused: python is 2\.7 there and 3"):
        call.result(30)
    thread.join(30)


@pytest.mark.parametrize("host", ["::1", "::"])
def test_agents_dial_in_by_ipv6(data, tmp_path, elsewhere, host):
    """Each has a part of the shards, so states must travel."""
    try:
        socket.create_server((host, 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    key, address = tmp_path / "key", f"[{host}]:{free_port()}"
    read_key_file(key, create=True)
    dialed = address.replace("[::]", "[::1]")
    command = [sys.executable, "-m", "cerebro", "agent", "--connect", dialed, "--key", str(key)]
    agents = [
        subprocess.Popen(command, env={**os.environ, "CEREBRO_CACHE": str(tmp_path / f"cache-{i}")})
        for i in range(2)
    ]
    executor = cerebro.cluster.Executor(2, listen=address, key=key)
    result = search(tmp_path / "run", data, executor)
    assert result.status == "finished" and executor.traffic.states == len(hops(result)) > 0
    assert [agent.wait(30) for agent in agents] == [0, 0]
