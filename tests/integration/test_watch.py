"""The server of the page: whom it answers, and that what it says is what the run's store says."""

from __future__ import annotations

import gzip
import json
import math
import re
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import line_model
import numpy as np
import pytest
from watched import Reader, ask, order, read, start_search

import cerebro
import cerebro.cli
import cerebro.watch.server
import cerebro.watch.view
from cerebro.errors import InputError
from cerebro.watch import page
from cerebro.watch.actions import PER_SECOND, Rate, TooMany
from cerebro.watch.runs import WatchedRuns
from cerebro.watch.server import MAX_BODY, MAX_CONNECTIONS, Server
from cerebro.watch.view import PAGE, View


def serve(place: Path, **settings: Any) -> Server:
    server = Server(WatchedRuns(place), **settings)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one run that has ended, of four trials; the last one failed."""
    folder = tmp_path_factory.mktemp("watch")
    rows = np.random.default_rng(0).normal(size=(48, 3)).astype(np.float32)
    data = {"x": rows, "y": rows @ np.array([1, 2, 3], np.float32)}
    cerebro.search(
        line_model.build, {"lr": [0.01, 0.1, 0.3, 1000.0]}, data, run=folder / "one", epochs=3,
        workers=0, validation=0.25, progress=False, batch_size=8, searcher="grid",
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def server(finished: Path) -> Iterator[Server]:
    with serve(finished) as server:
        yield server
        server.shutdown()


# --- whom it answers -----------------------------------------------------------


def test_the_page_and_its_files_hold_no_data(server: Server) -> None:
    status, headers, body = ask(server, "/", Authorization=None)
    assert status == 200 and b"digits" not in body and server.token.encode() not in body
    names = [*(f"/{name}" for name in page.SCRIPTS), "/page.css"]
    assert all(f'"{name}"'.encode() in body for name in names)
    for name in names:
        assert ask(server, name, Authorization=None)[0] == 200
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
    assert "frame-ancestors 'none'" in policy and "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert not [name for name in headers if name.startswith("Access-Control")]


def test_the_token_is_in_the_fragment_only(server: Server) -> None:
    assert server.url == f"http://127.0.0.1:{server.port}/#token={server.token}"
    assert len(server.token) >= 32


@pytest.mark.parametrize(
    "headers, wanted",
    [
        ({}, 200),
        ({"Authorization": None}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Bearer é"}, 401),
        ({"Authorization": "TOKEN"}, 401),
        ({"Host": "evil.example"}, 421),
        ({"Host": "127.0.0.1"}, 421),
        ({"Host": "127.0.0.1:1"}, 421),
        ({"Host": None}, 421),
        ({"Host": "localhost:PORT"}, 200),
        ({"Host": "[::1]:PORT"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:PORT"}, 403),  # of another name than the one asked
        ({"Origin": "http://127.0.0.1:PORT"}, 200),
    ],
)
def test_who_may_read(server: Server, headers: dict[str, str | None], wanted: int) -> None:
    given = {
        name: None if value is None else value.replace("PORT", str(server.port)).replace(
            "TOKEN", server.token)
        for name, value in headers.items()
    }  # fmt: skip
    for path in ("/api/runs", "/api/run/0?after=", "/api/run/0/trial/0"):
        status, told, body = ask(server, path, **given)
        assert status == wanted
        assert wanted == 200 or b"lr" not in body
        assert "Access-Control-Allow-Origin" not in told


@pytest.mark.parametrize(
    "headers, wanted",
    [
        ({"Origin": None}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Sec_Fetch_Site": "cross-site"}, 403),
        ({"Sec_Fetch_Site": "same-site"}, 403),
        ({"Authorization": None}, 401),
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content_Length": None}, 411),
        ({"Content_Length": str(MAX_BODY + 1)}, 413),
        ({"Content_Length": "-1"}, 400),
        ({"Content_Length": "1e3"}, 400),
        ({"Transfer_Encoding": "chunked"}, 411),
        ({}, 409),  # a run that has ended takes no command
    ],
)
def test_who_may_write(server: Server, headers: dict[str, str | None], wanted: int) -> None:
    body = json.dumps({"verb": "stop"}).encode()
    given = dict(headers)
    if "Content_Length" in given:
        given["Content-Length"] = given.pop("Content_Length")
    status, _, told = ask(server, "/api/run/0/action", method="POST", body=body, **given)
    assert status == wanted
    if wanted == 409:
        assert "the run is not in progress" in json.loads(told)["error"]


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"1", b"{", b'{"verb": 1}', b"[" * 60_000, b"\xff\xfe", b'{"a": NaN']
)
def test_bodies_that_are_no_request_are_refused(server: Server, body: bytes) -> None:
    time.sleep(0.25)  # five actions a second
    assert ask(server, "/api/run/0/action", method="POST", body=body)[0] in (400, 409)


@pytest.mark.parametrize(
    "request_, reason",
    [
        ({"verb": "delete"}, "verb must be one of stop, pause"),
        ({"verb": "stop", "run": "/etc"}, "stop does not take 'run'"),
        ({"verb": "stop", "trial": -1}, "trial must be a whole number"),
        ({"verb": "stop", "trial": "0"}, "trial must be a whole number"),
        ({"verb": "stop", "trial": True}, "trial must be a whole number"),
        ({"verb": "clone", "trial": 0, "changes": [1]}, "changes must be an object"),
        ({"verb": "clone", "trial": 0, "cold": 1}, "cold must be true or false"),
        ({"verb": "clone", "changes": {}}, "clone needs a trial"),
        ({"verb": "extend", "trial": 0}, "epochs is missing"),
        ({"verb": "prove"}, "prove needs a trial"),
    ],
)
def test_actions_are_checked(server: Server, request_: dict[str, Any], reason: str) -> None:
    time.sleep(0.25)
    status, told = order(server, **request_)
    assert status == 409 and reason in told["error"]


@pytest.mark.parametrize("method", ["PUT", "DELETE", "OPTIONS", "HEAD", "TRACE", "PATCH"])
def test_other_methods_are_refused(server: Server, method: str) -> None:
    assert ask(server, "/api/run/0", method=method)[0] == 501


@pytest.mark.parametrize(
    "path",
    [
        "/../pyproject.toml", "/page/page.css", "/view.py", "/api", "/api/run", "/api/run/1",
        "/api/run/-1", "/api/run/0/", "/api/run/0/trial/", "/api/run/0/trial/x", "/api/run/%2e%2e",
        "/api/run/0/log", "/api/run/0/../../etc/passwd", "/api/run/²", "http://evil.example/",
        "//evil.example/api/runs", "/api/run/9999999",
    ],
)  # fmt: skip
def test_other_paths_are_not_there(server: Server, path: str) -> None:
    target = path.encode().decode("latin-1")
    status = ask(server, target.replace("²", "%C2%B2").replace("Â", ""))[0]
    assert status == 404


def test_an_unknown_trial_is_no_trial(server: Server) -> None:
    status, _, body = ask(server, "/api/run/0/trial/99")
    assert status == 503 and "has no trial 99" in json.loads(body)["error"]


def test_an_action_is_no_answer(server: Server) -> None:
    assert ask(server, "/api/run/0/action")[0] == 405
    assert ask(server, "/api/run/0", method="POST", body=b"{}")[0] == 405


def test_read_only_refuses_all_actions(finished: Path) -> None:
    with serve(finished, read_only=True) as server:
        assert read(server, "/api/runs")["read_only"] is True
        status, told = order(server, verb="prove", trial=0)
        assert status == 403 and "--read-only" in told["error"]
        server.shutdown()


def test_many_connections_are_closed_at_once(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cerebro.watch.server, "SECONDS", 60.0)
    with serve(finished) as server:
        held = [
            socket.create_connection(("127.0.0.1", server.port)) for _ in range(MAX_CONNECTIONS)
        ]
        for connection in held:
            connection.sendall(b"GET / HTTP/1.1\r\n")  # it never ends
        while threading.active_count() < MAX_CONNECTIONS:
            time.sleep(0.01)
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as more:
            assert more.recv(1) == b""
        for connection in held:
            connection.close()
        while True:  # the others make room
            try:
                assert ask(server, "/")[0] == 200
                break
            except OSError:
                time.sleep(0.01)
        server.shutdown()


def test_a_request_must_arrive_in_time(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte now and then does not hold a connection for ever."""
    monkeypatch.setattr(cerebro.watch.server, "SECONDS", 0.5)
    with serve(finished) as server, socket.create_connection(("127.0.0.1", server.port)) as slow:
        slow.settimeout(10)
        begin = time.monotonic()
        try:
            while time.monotonic() - begin < 10:
                slow.sendall(b"G")
                slow.settimeout(0.1)
                try:
                    if slow.recv(1) == b"":
                        break
                except TimeoutError:
                    continue
        except (BrokenPipeError, ConnectionResetError):
            pass
        assert time.monotonic() - begin < 9
        server.shutdown()


def test_five_actions_a_second() -> None:
    now = [0.0]
    rate = Rate(lambda: now[0])
    for _ in range(PER_SECOND):
        rate.count()
    with pytest.raises(TooMany):
        rate.count()
    now[0] = 1.0
    rate.count()


# --- what it says --------------------------------------------------------------


def check_against_result(reader: Reader, folder: Path) -> None:
    """Compare what a page knows of a run with its result."""
    result = cerebro.open(folder)
    assert set(reader.trials) == {trial.number for trial in result.trials}
    for trial in result.trials:
        row = reader.trials[trial.number]
        assert row["status"] == trial.status
        assert row["config"] == trial.config
        assert (row["done"], row["target"]) == (trial.epoch, trial.epochs)
        names = dict.fromkeys(name for entry in trial.history for name in entry["metrics"])
        for name in names:
            values = [entry["metrics"].get(name, math.nan) for entry in trial.history]
            told = [v if math.isfinite(v) else None for v in values]
            assert row["curves"][name] == told
        assert row["best"] == trial.best_epoch
        assert row["value"] == (trial.metrics.get(result.metric) if trial.history else None)
        assert len(row["times"]) == len(trial.history)
        assert row["times"] == sorted(row["times"])
        assert (row["error"] or "") in (trial.error or "")
    best = result.top(1)
    assert reader.run["best"] == (best[0].number if best else None)
    assert reader.run["units"] == len(result.units())
    assert [event[1:] for event in reader.events] == [
        [event["kind"], event["trial"], event["text"][:400]] for event in result.events()
    ]


def test_a_run_that_has_ended(server: Server, finished: Path) -> None:
    reader = Reader()
    reader.take(read(server, "/api/run/0"))
    check_against_result(reader, finished / "one")
    assert reader.run["status"] == "finished" and reader.run["share"] == 1.0
    assert reader.run["counts"] == {"finished": 3, "failed": 1}
    assert [run["name"] for run in read(server, "/api/runs")["runs"]] == ["one"]


def test_a_run_with_folds(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(30, 3)).astype(np.float32)
    data = {"x": rows, "y": rows @ np.array([1, 2, 3], np.float32)}
    cerebro.search(
        line_model.build, line_model.SPACE, data, run=tmp_path / "folds", epochs=2,
        workers=0, validation=cerebro.KFold(3), progress=False, batch_size=4,
        searcher="grid",
    )  # fmt: skip
    with serve(tmp_path / "folds") as server:
        reader = Reader()
        reader.take(read(server, "/api/run/0"))
        check_against_result(reader, tmp_path / "folds")
        told = read(server, "/api/run/0/trial/0")
        assert told["log"].count("a rate of 0.01") == 3
        server.shutdown()


def test_a_search_is_watched_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Increments of many polls add up to the result; the last poll has nothing new."""
    monkeypatch.setattr(cerebro.watch.view, "POLL_SECONDS", 0.02)
    process = start_search(tmp_path, seconds=0.004, trials=6, epochs=5)
    try:
        with serve(tmp_path) as server:
            while not read(server, "/api/runs")["runs"]:
                time.sleep(0.02)
            reader, seen = Reader(), set()
            while True:
                answer = json.loads(ask(server, f"/api/run/0?after={reader.cursor}")[2])
                if "error" in answer:  # the store is being made
                    continue
                reader.take(answer)
                seen.add(reader.run["status"])
                if not reader.run["live"] and process.poll() is not None:
                    break
                time.sleep(0.02)
            assert seen == {"running", "finished"}
            assert reader.answers > 5
            last = read(server, f"/api/run/0?after={reader.cursor}")
            assert last["same"] is True and "trials" not in last
            check_against_result(reader, tmp_path / "run")
            whole = Reader()
            whole.take(read(server, "/api/run/0"))
            for number, row in whole.trials.items():
                assert {**row, "from": 0} == {**reader.trials[number], "from": 0}
            server.shutdown()
    finally:
        process.kill()
        process.wait()


def test_a_run_whose_process_is_gone_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cerebro.watch.view, "OWNER_SECONDS", 0.0)
    monkeypatch.setattr(cerebro.watch.view, "POLL_SECONDS", 0.0)
    process = start_search(tmp_path, seconds=0.05, epochs=50)
    try:
        while not (tmp_path / "run" / "run.sqlite").exists():
            time.sleep(0.02)
        view = View(tmp_path / "run")
        while not view.lines:
            view.refresh()
        assert view.answer()["run"]["status"] == "running"
    finally:
        process.kill()
        process.wait()
    while not view.refresh():
        time.sleep(0.02)
    answer = view.answer()
    assert answer["run"]["status"] == "interrupted"
    assert "running" not in {trial["status"] for trial in answer["trials"]}


def set_status(folder: Path, status: str) -> None:
    with sqlite3.connect(folder / "run.sqlite") as store:
        store.execute("UPDATE meta SET value = ? WHERE key = 'status'", (json.dumps(status),))


def test_a_run_that_ends_while_it_is_read_is_finished(
    tmp_path: Path, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process ends between the reading of the store and the question who trains it."""
    folder = shutil.copytree(finished / "one", tmp_path / "one")
    set_status(folder, "running")

    def end(_: Path) -> None:
        set_status(folder, "finished")

    monkeypatch.setattr(cerebro.watch.view, "owner_of", end)
    view = View(folder)
    view.refresh(now=0.0)
    assert view.status == "finished"
    set_status(folder, "running")
    monkeypatch.setattr(cerebro.watch.runs, "owner_of", end)
    assert WatchedRuns(folder).describe()[0]["status"] == "finished"


def test_a_store_that_has_not_changed_is_not_opened(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    view = View(finished / "one")
    assert view.refresh(now=0.0)

    def refuse(folder: Path) -> Any:
        raise AssertionError("the store was opened")

    monkeypatch.setattr(cerebro.watch.view, "reader", refuse)
    assert not view.refresh(now=100.0)


def test_a_run_that_is_resumed_goes_on(tmp_path: Path, finished: Path) -> None:
    shutil.copytree(finished / "one", tmp_path / "one")
    view, reader = View(tmp_path / "one"), Reader()
    view.refresh(now=0.0)
    reader.take(view.answer())
    cerebro.resume(tmp_path / "one", line_model.build, epochs=5, workers=0, progress=False)
    view.refresh(now=100.0)
    reader.take(view.answer(reader.cursor))
    check_against_result(reader, tmp_path / "one")


def test_an_epoch_that_is_trained_again_is_sent_anew(tmp_path: Path, finished: Path) -> None:
    shutil.copytree(finished / "one", tmp_path / "one")
    view, reader = View(tmp_path / "one"), Reader()
    view.refresh(now=0.0)
    reader.take(view.answer())
    with sqlite3.connect(tmp_path / "one" / "run.sqlite") as store:
        rows = store.execute("SELECT * FROM metrics WHERE trial = 1 AND epoch = 1").fetchall()
        new = [(*row[:3], 0.5) for row in rows]
        store.executemany("INSERT OR REPLACE INTO metrics VALUES (?, ?, ?, ?)", new)
    view.refresh(now=100.0)
    answer = view.answer(reader.cursor)
    assert answer["full"] is True
    reader.take(answer)
    check_against_result(reader, tmp_path / "one")


def test_another_run_in_the_same_folder_is_sent_anew(tmp_path: Path, finished: Path) -> None:
    shutil.copytree(finished / "one", tmp_path / "one")
    view = View(tmp_path / "one")
    view.refresh(now=0.0)
    before = view.answer()
    with sqlite3.connect(tmp_path / "one" / "run.sqlite") as store:
        store.execute("UPDATE meta SET value = '\"another\"' WHERE key = 'id'")
        store.execute("DELETE FROM trials WHERE number > 1")
    view.refresh(now=100.0)
    answer = view.answer(before["cursor"])
    assert answer["full"] is True and answer["shown"] == [0, 1]


def test_answers_are_compressed_for_those_who_ask(server: Server) -> None:
    _, headers, body = ask(server, "/api/run/0", Accept_Encoding="gzip")
    assert headers["Content-Encoding"] == "gzip"
    zipped, plain = json.loads(gzip.decompress(body)), read(server, "/api/run/0")
    assert zipped["trials"] == plain["trials"]


def test_a_trial_in_full(server: Server, finished: Path) -> None:
    result = cerebro.open(finished / "one")
    told = read(server, "/api/run/0/trial/3")
    assert told["error"] == result[3].error and told["traceback"] == result[3].traceback
    told = read(server, "/api/run/0/trial/1")
    assert told["log"] == result[1].log and "a rate of 0.1" in told["log"]
    assert told["state_hash"] == result[1].history[-1]["state_hash"]
    assert told["kept"] == [result[1].best_epoch + 1]


def test_a_log_that_is_a_link_is_not_read(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "one", tmp_path / "one")
    (tmp_path / "secret").write_text("secret")
    log = tmp_path / "one" / "trials" / "1.log"
    log.unlink()
    log.symlink_to(tmp_path / "secret")
    with serve(tmp_path) as server:
        assert read(server, "/api/run/0/trial/1")["log"] == ""
        server.shutdown()


EVIL = "</script><script>alert(1)</script>\u202e\u0000"


def make_hostile(folder: Path) -> None:
    """Write markup, marks that turn text around and endless lines into a run's store."""
    with sqlite3.connect(folder / "run.sqlite") as store:
        config = json.dumps({"lr": EVIL + "x" * 1_000_000, EVIL: 1})
        store.execute("UPDATE trials SET config = ? WHERE number = 0", (config,))
        store.execute("UPDATE trials SET error = ? WHERE number = 3", (EVIL + "y" * 1_000_000,))
        store.execute("UPDATE metrics SET name = ? WHERE name = 'train_loss'", (EVIL,))
        store.execute("INSERT INTO events VALUES (NULL, 1, ?, 1, ?)", (EVIL, EVIL * 50_000))
    (folder / "trials" / "1.log").write_text(EVIL * 100_000)


def test_hostile_runs_stay_text_and_small(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "one", tmp_path / "one")
    make_hostile(tmp_path / "one")
    with serve(tmp_path) as server:
        _, headers, body = ask(server, "/api/run/0")
        assert headers["Content-Type"].startswith("application/json") and len(body) < 100_000
        answer = json.loads(body)
        assert answer["trials"][3]["error"].startswith(EVIL)
        assert len(ask(server, "/api/run/0/trial/1")[2]) < 10 * (64 << 10)
        server.shutdown()


# --- many trials ---------------------------------------------------------------


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory, finished: Path) -> Path:
    """A run with 3,000 trials; the value of trial n is n."""
    folder = tmp_path_factory.mktemp("many") / "run"
    shutil.copytree(finished / "one", folder)
    with sqlite3.connect(folder / "run.sqlite") as store:
        config = json.dumps({"lr": 0.1})
        rows = [(n, config, "finished", 1) for n in range(4, 3000)]
        store.executemany(
            "INSERT INTO trials (number, config, status, epochs) VALUES (?, ?, ?, ?)", rows
        )
        store.execute("DELETE FROM metrics")
        store.executemany(
            "INSERT INTO metrics VALUES (?, 0, 'loss', ?)", [(n, float(n)) for n in range(3000)]
        )
        store.execute("UPDATE trials SET status = 'running' WHERE number = 2500")
        store.execute("UPDATE meta SET value = '\"stopped\"' WHERE key = 'status'")
    return folder


def test_many_trials_come_by_page(many: Path) -> None:
    view = View(many)
    view.refresh()
    first = view.answer(pins=[2000, 99_999])
    assert first["run"]["trials"] == 3000 and first["run"]["ranked"] == 3000
    assert first["shown"] == [*range(PAGE), 2000, 2500]
    second = view.answer(page=1)
    assert second["shown"] == [*range(5), *range(PAGE, 2 * PAGE), 2500]
    assert view.answer(page=500)["shown"] == [0, 1, 2, 3, 4, 2500]
    again = view.answer(after=first["cursor"], pins=[2000, 99_999])
    assert again["trials"] == []


def test_a_place_without_a_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such folder"):
        WatchedRuns(tmp_path / "absent")
    with serve(tmp_path) as server:
        assert read(server, "/api/runs")["runs"] == []
        assert ask(server, "/api/run/0")[0] == 404
        server.shutdown()


def test_a_damaged_run_is_told(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "one", tmp_path / "one")
    (tmp_path / "one" / "run.sqlite").write_bytes(b"nothing" * 1000)
    with serve(tmp_path) as server:
        for _ in range(2):
            status, _, body = ask(server, "/api/run/0")
            assert status == 503 and "run.sqlite" in json.loads(body)["error"]
        assert read(server, "/api/runs")["runs"][0]["status"] == "unreadable"
        server.shutdown()


# --- the command ---------------------------------------------------------------


def test_the_command_prints_the_address_and_ends_on_ctrl_c(finished: Path) -> None:
    command = [sys.executable, "-m", "cerebro", "watch", str(finished), "--read-only"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r".*: http://127\.0\.0\.1:(\d+)/#token=(\S+)\n", line)
        assert found is not None
        address = SimpleNamespace(port=int(found[1]), token=found[2])
        told = read(address, "/api/runs")
        assert [run["name"] for run in told["runs"]] == ["one"] and told["read_only"] is True
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_ctrl_c_while_a_request_begins_ends_the_page(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request may have ended before the thread that started it hears of the signal."""
    start = threading.Thread.start

    def start_and_interrupt(thread: threading.Thread) -> None:
        start(thread)
        if "process_request_thread" in thread.name:
            thread.join()
            raise KeyboardInterrupt

    with Server(WatchedRuns(finished)) as server:
        client = threading.Thread(target=read, args=(server, "/api/runs"))
        client.start()
        monkeypatch.setattr(threading.Thread, "start", start_and_interrupt)
        with pytest.raises(KeyboardInterrupt):
            server.handle_request()
        client.join()


def test_mistakes_of_the_command(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for words, reason in (
            ([str(finished), "--port", port], f"--port {port}: "),
            ([str(finished), "--port", "70000"], "--port 70000: give a port from 1 to 65535"),
            ([str(finished / "absent")], "there is no such folder"),
        ):
            assert cerebro.cli.main(["watch", *words]) == 1
            assert reason in capsys.readouterr().err
