"""A run's page as a file: complete, self-contained, escaped, and usable with many trials."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re
import shutil
import sqlite3
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import line_model
import numpy as np
import pytest

import cerebro
from cerebro.errors import InputError
from cerebro.report import summary
from cerebro.watch import about
from cerebro.watch.about import MAX_LINES
from cerebro.watch.page import MAX_TRIALS, make_report, quote_json

EVIL = "</script><script>alert(1)</script><!--\u202e"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four trials, of which the last failed and one has hostile text everywhere."""
    folder = tmp_path_factory.mktemp("page") / "run"
    rows = np.random.default_rng(0).normal(size=(48, 3)).astype(np.float32)
    data = {"x": rows, "y": rows @ np.array([1, 2, 3], np.float32)}
    cerebro.search(
        line_model.build, {"lr": [0.01, 0.1, 0.3, 1000.0]}, data, run=folder, epochs=3,
        workers=0, validation=0.25, progress=False, batch_size=8, searcher="grid",
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def evil_run(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evil") / "run"
    shutil.copytree(run, folder)
    with sqlite3.connect(folder / "run.sqlite") as store:
        config = json.dumps({"lr": EVIL, EVIL: 1})
        store.execute("UPDATE trials SET config = ? WHERE number = 0", (config,))
        store.execute("UPDATE trials SET error = ?, traceback = ? WHERE number = 3", (EVIL, EVIL))
        store.execute("INSERT INTO events VALUES (NULL, 1, 'warning', 1, ?)", (EVIL,))
    (folder / "trials" / "3.log").write_text(EVIL)
    return folder


class Reader(html.parser.HTMLParser):
    """Collects elements and links; checks that tags nest."""

    VOID = ("meta", "img", "source", "input", "circle", "path", "link")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.references: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = dict(attrs)
        assert not [name for name in found if name.startswith("on") or name == "style"]
        self.references += [v for n in ("src", "srcset", "href") if (v := found.get(n))]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page_needs_nothing_else(run: Path) -> None:
    page = make_report(cerebro.open(run))
    read = Reader(page)
    assert all(re.match(r"#|data:", reference) for reference in read.references)
    assert read.tags.count("script") == 2 and read.tags.count("link") == 1
    namespace = "http://www.w3.org/2000/svg"  # a name, which nobody fetches
    assert not re.search(r"https?:|url\((?!#clip)|@import|<iframe", page.replace(namespace, ""))


def test_only_the_pages_own_script_and_style_may_be_used(run: Path) -> None:
    page = make_report(cerebro.open(run))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None and policy[1].startswith("default-src 'none'")
    for tag, source in (("script", "script-src"), ("style", "style-src")):
        part = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert part is not None
        digest = base64.b64encode(hashlib.sha256(part[1].encode()).digest()).decode()
        assert f"{source} 'sha256-{digest}'" in policy[1]
    assert "unsafe" not in policy[1] and "connect-src 'none'" in policy[1]
    assert page.index("Content-Security-Policy") < page.index("<style>")


def test_scripts_make_elements_only_from_names_and_text() -> None:
    """Nothing in the page's scripts parses text as markup, or as a program."""
    from cerebro.watch.page import SCRIPTS, read_file

    scripts = "\n".join(map(read_file, SCRIPTS))
    for parser in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(",
                   "new Function", "DOMParser", "createContextualFragment", "srcdoc"):  # fmt: skip
        assert parser not in scripts
    assert "</script" not in scripts


def test_everything_of_the_user_stays_data(evil_run: Path) -> None:
    page = make_report(cerebro.open(evil_run))
    assert "<script>alert" not in page and "<!--" not in page.replace("<!DOCTYPE", "")
    read = Reader(page)
    assert read.tags.count("script") == 2
    data = data_of(page)
    assert data["answer"]["trials"][0]["config"] == {"lr": EVIL, EVIL: 1}
    assert any(EVIL in event[3] for event in data["answer"]["events"])
    assert EVIL in data["about"]["failures"][0]["cause"]


def test_data_in_a_page_is_plain_ascii() -> None:
    text = quote_json({"a": "<>&\u2028é"})
    assert text.isascii() and not set("<>&") & set(text)
    assert json.loads(text) == {"a": "<>&\u2028é"}


def test_the_page_has_what_the_result_has(run: Path) -> None:
    result = cerebro.open(run)
    data = data_of(make_report(result))
    rows = {row["n"]: row for row in data["answer"]["trials"]}
    assert set(rows) == {trial.number for trial in result.trials}
    for trial in result.trials:
        row = rows[trial.number]
        assert (row["status"], row["config"]) == (trial.status, trial.config)
        assert row["curves"].get("val_loss", []) == [
            entry["metrics"]["val_loss"] for entry in trial.history
        ]
    told = data["about"]
    assert told["best"]["text"] == summary.best_lines(result)[0].removeprefix("best: ")
    assert told["best"]["state_hash"] == result.best.state_hash
    assert told["best"]["sure"] and told["best"]["next"]
    assert told["failures"][0]["facts"]["trial"] == "3"
    assert told["failures"][0]["traceback"].endswith("too fast")
    assert told["data"]["Training data"]["rows"] == "36"
    assert told["settings"]["epochs"] == "3" and "python" in told["environment"]
    assert set(told["space"]) == {"lr"}
    assert data["answer"]["run"]["live"] is False


def test_the_plots_and_the_trials_can_be_chosen(run: Path) -> None:
    result = cerebro.open(run)
    data = data_of(make_report(result, kinds=["curves"], metric="val_loss", trials=[1, 2]))
    assert data["plots"] == ["curves"] and data["metric"] == "val_loss"
    assert [row["n"] for row in data["answer"]["trials"]] == [1, 2] == data["answer"]["shown"]
    assert data_of(make_report(result, kinds=[]))["plots"] == []


def test_an_unknown_metric_or_trial_is_refused_if_there_are_plots(run: Path) -> None:
    result = cerebro.open(run)
    with pytest.raises(InputError, match="metric='foo': no trial has it yet; available"):
        make_report(result, metric="foo")
    with pytest.raises(InputError, match="there is no trial 999 in this run"):
        make_report(result, trials=[0, 999])
    make_report(result, metric="foo", trials=[999], kinds=[])


def test_all_units_of_a_run_are_drawn(run: Path) -> None:
    result = cerebro.open(run)
    units = data_of(make_report(result))["answer"]["units"]
    assert units[0][3] == pytest.approx(min(u["start"] for u in result.units()), abs=1e-3)
    assert max(u[4] for u in units) == pytest.approx(
        max(u["end"] for u in result.units()), abs=1e-3
    )
    assert {u[0] for u in units} == {0, 1, 2}


def test_thousands_of_trials_stay_usable(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "run")
    with sqlite3.connect(tmp_path / "run" / "run.sqlite") as store:
        rows = [(n, json.dumps({"lr": 1 / n}), "finished", 1) for n in range(4, 2500)]
        sql = "INSERT INTO trials (number, config, status, epochs) VALUES (?, ?, ?, ?)"
        store.executemany(sql, rows)
        store.executemany(
            "INSERT INTO metrics VALUES (?, 0, 'loss', ?)", [(n, 1e3 + n) for n, *_ in rows]
        )
        store.executemany(
            "INSERT INTO epochs VALUES (?, 0, 1.0, ?, NULL)", [(n, f"{n:032x}") for n, *_ in rows]
        )
    page = make_report(cerebro.open(tmp_path / "run"))
    assert len(page) < 2_000_000
    assert MAX_TRIALS <= len(data_of(page)["answer"]["trials"]) <= MAX_TRIALS + 5


# --- facts ---------------------------------------------------------------------


def trial(number: int, values: list[float], **changes: Any) -> Any:
    history = [
        {"epoch": e, "metrics": {"val_accuracy": v}, "seconds": 0.5} for e, v in enumerate(values)
    ]
    best = max(range(len(values)), key=values.__getitem__) if values else None
    fields: dict[str, Any] = {
        "number": number, "config": {"lr": 10.0**-number, "act": "relu", "depth": 3},
        "status": "finished", "epoch": len(values), "epochs": 3, "error": None, "folds": [],
        "metrics": {} if best is None else history[best]["metrics"], "history": history,
        "best_epoch": best, "state_hash": f"{number:032x}",
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **changes})


def of(trials: list[Any], events: list[dict[str, Any]] | None = None, **changes: Any) -> Any:
    fields: dict[str, Any] = {
        "trials": trials, "path": "runs/x", "status": "finished", "metric": "accuracy",
        "mode": "max", "select": "best", "error": None,
    }  # fmt: skip
    result = SimpleNamespace(**{**fields, **changes})
    result.units = list
    result.events = lambda: events or []
    ranked = summary.rank_trials(result)
    result.best = ranked[0] if ranked else None
    return result


def test_facts_of_failures_ends_and_events() -> None:
    trials = [
        trial(0, [0.5, 0.9]),
        trial(1, [0.5, 0.7, 0.8]),
        trial(2, [0.3], status="stopped"),
        trial(3, [], status="diverged", error="the training loss became nan in epoch 0, batch 1"),
        trial(
            4, [], status="failed", error="ValueError: no (net.py:7 in build)",
            traceback="Traceback:\n  build\nValueError: no",
            log="".join(f"line {i}\n" for i in range(50)) + "Traceback:\n  build\nValueError: no\n",
            record=SimpleNamespace(raised=SimpleNamespace(place="net.py:7 in build")),
        ),
    ]  # fmt: skip
    events = [
        {"time": 2.0, "kind": "warning", "trial": 1, "text": "it is slow"},
        {"time": 3.0, "kind": "lost", "trial": None, "text": "worker 1 died"},
    ]
    told = about.describe(of(trials, events))
    assert told["facts"][0] == "2 finished, 1 stopped, 1 diverged, 1 failed"
    assert told["best"]["text"] == "trial 0, accuracy 0.9000 after 2 epochs"
    diverged, failed = told["failures"]
    assert "became nan in epoch 0, batch 1 (lr=" in diverged["trials"][0]
    assert failed["facts"]["raised at"] == "net.py:7 in build"
    # The end of the output, without the traceback that follows it.
    lines = failed["log"].splitlines()
    assert len(lines) == MAX_LINES and lines[-1] == "line 49"
    assert told["pruned"] == ["after 1 epoch: 1 trial (2), accuracy 0.3000"]
    assert told["events"] == ["trial 1: it is slow", "3.0 s: lost: worker 1 died"]
    assert json.loads(json.dumps(told)) == told


def test_a_run_without_trials_has_facts() -> None:
    told = about.describe(of([]))
    assert told["best"] is None and told["facts"][0] == "no trials"


def test_a_resumed_run_reports_its_time_with_and_without_interruptions() -> None:
    resumed = {"time": 2.0, "kind": "resumed", "trial": None, "text": "by 7, with 1 worker"}
    for events, text in (
        ([], "took 48.9 s"),
        ([resumed], "took 48.9 s with interruptions, 3.8 s without"),
    ):
        result = of([trial(0, [0.5])], events)
        result.units = lambda: [{"start": 0.2, "end": 2.0}, {"start": 2.1, "end": 3.8}]
        assert about.describe_duration(result, 48.9) == text


def test_the_date_of_a_run_is_among_its_facts(run: Path) -> None:
    result = cerebro.open(run)
    begun = time.strftime("%Y-%m-%d %H:%M", time.localtime(result.saved.meta["started"]))
    assert begun in about.describe(result)["facts"]
