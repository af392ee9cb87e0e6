"""A run's page: complete, self-contained, escaped, and usable with many trials."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest

from cerebro.errors import InputError
from cerebro.report import summary
from cerebro.report.page import MAX_LINES, About, render_page

EVIL = "<script>alert(1)</script>"


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


class Reader(html.parser.HTMLParser):
    """Collects elements, links, and the rows of the table of trials; checks that tags nest."""

    VOID = ("meta", "img", "source", "input", "circle", "polyline")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.references: list[str] = []
        self.rows: list[list[str | None]] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        found = dict(attrs)
        self.references += [v for n in ("src", "srcset", "href") if (v := found.get(n))]
        if tag == "tr":
            self.rows.append([])
        if tag == "td" and "data-v" in found:
            self.rows[-1].append(found["data-v"])
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def keys(self) -> list[list[str | None]]:
        return [row for row in self.rows if row]


@pytest.fixture(scope="module")
def page() -> str:
    trials = [
        trial(0, [0.5, 0.9]),
        trial(1, [0.5, 0.7, 0.8]),
        trial(2, [0.3], status="stopped"),
        trial(3, [], status="diverged", error="the training loss became nan in epoch 0, batch 1"),
        trial(
            4, [], status="failed", error=f"ValueError: {EVIL} (net.py:7 in build)",
            config={"lr": 1.0, "act": EVIL, "depth": 3},
            traceback="Traceback:\n  build\nValueError: no",
            log="".join(f"line {i}\n" for i in range(50)) + "Traceback:\n  build\nValueError: no\n",
            record=SimpleNamespace(raised=SimpleNamespace(place="net.py:7 in build")),
        ),
    ]  # fmt: skip
    events = [
        {"time": 2.0, "kind": "warning", "trial": 1, "text": f"{EVIL} is slow"},
        {"time": 3.0, "kind": "lost", "trial": None, "text": "worker 1 died"},
    ]
    about = About(
        started=time.mktime((2026, 11, 22, 9, 30, 0, 0, 0, -1)),
        ended=time.mktime((2026, 11, 22, 9, 31, 5, 0, 0, -1)),
        data=[("Training data", {"name": EVIL, "rows": "1,258", "checksum": "abc"})],
        space=[("lr", "loguniform(0.0001, 0.1)"), (EVIL, "choice([1, 2])")],
        settings={"epochs": 3, "note": EVIL},
        environment={"packages": {"torch": "2.13.0"}},
    )
    return render_page(of(trials, events, path=f"runs/{EVIL}"), about, kinds=["curves", "gantt"])


def test_the_page_needs_nothing_else(page: str) -> None:
    read = Reader(page)
    assert all(re.match(r"#|data:image/png;base64,", reference) for reference in read.references)
    assert read.tags.count("script") == 1 and "link" not in read.tags
    assert not re.search(r"https?:|url\(|@import|<iframe", page)


def test_everything_of_the_user_is_escaped(page: str) -> None:
    assert EVIL not in page and "<script>alert" not in page
    assert page.count("&lt;script&gt;alert(1)") >= 7  # path, config, error, data, space, ...
    assert " onload" not in page


def test_only_the_pages_own_script_may_run(page: str) -> None:
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)
    assert policy is not None and script is not None
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy[1]
    assert policy[1].startswith("default-src 'none'")


def test_the_page_has_all_facts_of_the_run(page: str) -> None:
    for part in (
        "2026-11-22 09:30", "took 1:05", "2 finished, 1 stopped, 1 diverged, 1 failed",
        "trial 0, accuracy 0.9000 after 2 epochs", "How reliable these numbers are",
        "What to try next",
        "raised at</th><td>net.py:7 in build", "became nan in epoch 0, batch 1 (lr=",
        "after 1 epoch: 1 trial (2), accuracy 0.3000", "worker 1 died", "1,258", "abc",
        "loguniform(0.0001, 0.1)", "packages.torch", "2.13.0", "The same in all: depth=3",
        f"{0:032x}", "prefers-color-scheme: dark",
    ):  # fmt: skip
        assert part in page
    # The end of the output, without the traceback that follows it.
    assert f"output of trial 4, its last {MAX_LINES} lines" in page
    output = page[page.index("output of trial 4") :].split("</pre>")[0]
    assert "line 49" in output and "line 30" in output and "line 29" not in output
    assert "ValueError: no" not in output


def test_plots_have_a_dark_form_or_the_reason_they_are_missing(page: str) -> None:
    pytest.importorskip("matplotlib")
    assert page.count("<img") == 1 == page.count("<picture>")
    light, dark = re.findall(r'(?:src|srcset)="(data:image/png;base64,iVBOR[^"]*)"', page)
    assert light != dark
    assert "no unit has finished yet" in page


def test_a_page_can_be_made_without_plots() -> None:
    page = render_page(of([]), kinds=[])
    assert "No trial has begun" in page and "<img" not in page
    Reader(page)


def test_cells_are_sorted_by_their_values(page: str) -> None:
    rows = Reader(page).keys()
    assert [row[0] for row in rows] == ["0", "1", "2", "3", "4"]  # best first, as in the summary
    assert [row[4] for row in rows] == ["0.9", "0.8", "0.3", "", ""]  # empty cells come last
    assert rows[1][7] == "0.1" and rows[4][-1] == EVIL


def test_a_thousand_trials_stay_usable() -> None:
    trials = [trial(n, [0.5 + (n % 97) / 200 + e / 1000 for e in range(100)]) for n in range(1000)]
    for one in trials:
        one.config = {"lr": 1 / (one.number + 1), "act": ["relu", "tanh"][one.number % 2]}
    page = render_page(of(trials), kinds=[])
    assert len(page) < 2_000_000
    assert len(Reader(page).keys()) == 1000


def test_an_unknown_metric_or_trial_is_refused_if_there_are_plots() -> None:
    result = of([trial(0, [0.5]), trial(1, [0.6])])
    with pytest.raises(InputError, match="metric='foo': no trial has it yet; available: val_acc"):
        render_page(result, metric="foo")
    with pytest.raises(InputError, match="there is no trial 999 in this run"):
        render_page(result, trials=[0, 999])
    assert "<img" not in render_page(result, metric="foo", trials=[999], kinds=[])
    early = of([trial(0, [], status="running")])  # its metrics are not known yet
    assert "no epoch has finished" in render_page(early, metric="foo", kinds=["curves"])


def test_a_resumed_run_reports_its_time_with_and_without_interruptions() -> None:
    about = About(started=1000.0, ended=1048.9)
    resumed = {"time": 2.0, "kind": "resumed", "trial": None, "text": "by 7, with 1 worker"}
    for events, text in (
        ([], "took 48.9 s · ranked"),
        ([resumed], "took 48.9 s with interruptions, 3.8 s without · ranked"),
    ):
        result = of([trial(0, [0.5])], events)
        result.units = lambda: [{"start": 0.2, "end": 2.0}, {"start": 2.1, "end": 3.8}]
        assert text in render_page(result, about, kinds=[])


def test_the_table_of_trials_has_settings_that_some_trials_lack() -> None:
    trials = [trial(0, [0.5], config={"act": None}), trial(1, [0.4], config={})]
    page = render_page(of(trials), kinds=[])
    assert "act</button>" in page and "The same in all" not in page


def test_settings_that_differ_are_not_listed_as_common() -> None:
    trials = [trial(n, [0.5], config={f"s{k}": n for k in range(60)} | {"t": 1}) for n in (0, 1)]
    page = render_page(of(trials), kinds=[])
    assert "The same in all: t=1<" in page and "s39</button>" in page


def test_the_row_of_links_wraps_on_a_narrow_screen(page: str) -> None:
    style = page[page.index("<style>") : page.index("</style>")]
    assert re.search(r"nav \{[^}]*flex-wrap: wrap", style)
    assert not re.search(r"nav[^{]*\{[^}]*nowrap", style)


def test_long_names_of_facts_leave_room_for_their_values() -> None:
    page = render_page(of([]), About(settings={"x" * 40: 1, "epochs": 3}), kinds=[])
    assert f'<th scope="row" class="long">{"x" * 40}</th><td>1</td>' in page
    assert '<th scope="row">epochs</th>' in page
