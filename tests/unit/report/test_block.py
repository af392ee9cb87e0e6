"""The block of a notebook: its HTML and text, and when it is drawn."""

from __future__ import annotations

import math
import re
import sys
import warnings
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import pytest

from cerebro.report import displays, progress
from cerebro.report.block import CURVE_POINTS, MAX_CAUSES, MAX_SETTINGS, Block, Notebook, draw_curve
from cerebro.report.displays import in_notebook
from cerebro.report.progress import Snapshot, TrialRow

VOID = {"br", "img", "meta"}


class Checked(HTMLParser):
    """Checks that tags are closed in order, and that nothing can run or be fetched."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: list[str] = []
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        assert tag not in ("script", "style", "link", "iframe", "img")
        for name, value in attrs:
            assert not name.startswith("on") and name not in ("src", "href", "class", "id")
            assert "url(" not in (value or "")
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def row(number: int, values: tuple[float, ...] = (), **changes: Any) -> TrialRow:
    best = max(range(len(values)), key=values.__getitem__) if values else None
    fields: dict[str, Any] = {
        "number": number,
        "config": {"lr": 0.1 * (number + 1), "depth": 3},
        "status": "running",
        "epoch": len(values),
        "epochs": 8,
        "metrics": {} if best is None else {"val_accuracy": values[best]},
        "best_at": None if best is None else best + 1,
        "history": [SimpleNamespace(metrics={"val_accuracy": v}) for v in values],
    }
    return TrialRow(**{**fields, **changes})


def block(rows: list[TrialRow], **changes: Any) -> Block:
    fields: dict[str, Any] = {"title": "runs/x", "state": "running", "rows": rows}
    return Block(**{**fields, "metric": "accuracy", "mode": "max", **changes})


def snapshot(rows: list[TrialRow], **changes: Any) -> Snapshot:
    fields: dict[str, Any] = {
        "trials": rows,
        "share_done": 0.25,
        "seconds": 10.0,
        "seconds_left": 30.0,
        "busy": 0.9,
        "workers": 2,
        "best": None,
        "metric": "accuracy",
        "mode": "max",
        "path": "runs/x",
    }
    return Snapshot(**{**fields, **changes})


def test_a_block_shows_progress_trials_and_failures() -> None:
    made = block(
        [row(0, (0.5, 0.75, 0.7), rows_per_second=12345.6), row(1, (0.5,), status="finished")],
        best=0,
        facts=["25% done", "30 s left"],
        share_done=0.25,
        more="and 980 more: 980 finished",
        notes=["trial 7 failed: ValueError: no (net.py:12)"],
    )
    page = Checked(made.to_html())
    text = " ".join(page.text)
    for part in ("runs/x", "running", "25% done · 30 s left", "★ 0", "3/8", "0.7500", "12,346",
                 "best: trial 0, accuracy 0.7500 after 2 epochs", "and 980 more: 980 finished",
                 "trial 7 failed: ValueError: no (net.py:12)", "lr", "best at"):  # fmt: skip
        assert part in text
    assert "depth" not in text  # it does not differ
    assert page.tags.count("svg") == 2 and "width:25.0%" in made.to_html()
    plain = made.to_text()
    assert "★ 0" in plain and "by epoch" not in plain and "and 980 more" in plain


def test_all_text_is_escaped() -> None:
    evil = "<script>alert('1')</script>\x1b[2J&"
    rows = [
        row(0, (0.5,), config={evil: evil}, status=evil),
        row(1, (0.6,), metrics={f"val_{evil}": 0.5}, config={evil: 1}),
    ]
    made = block(rows, title=evil, state=evil, metric=evil, best=1, facts=[evil], more=evil,
                 notes=[evil])  # fmt: skip
    page = made.to_html()
    assert "\x1b" not in page + made.to_text()
    assert Checked(page).text.count(evil.replace("\x1b", "\\x1b")) >= 6


def test_many_settings_share_a_column_and_long_ones_are_cut() -> None:
    rows = [row(n, (0.5,), config={f"s{i}": n * i for i in range(30)}) for n in range(2)]
    page = Checked(block(rows).to_html())
    assert page.tags.count("th") == 6 + MAX_SETTINGS + 1
    assert "21 more" in page.text  # s0 does not differ
    page = Checked(block([row(0, (0.5,), config={"name": "x" * 5000})]).to_html())
    assert max(map(len, page.text)) < 100


def points(svg: str) -> list[tuple[float, float]]:
    found = re.search(r'points="([^"]*)"', svg)
    assert found is not None
    return [(float(x), float(y)) for x, y in (p.split(",") for p in found[1].split())]


def test_a_curve_is_on_common_axes_and_bounded() -> None:
    drawn = points(draw_curve([0.0, 0.5, 1.0], 3, 5, 0.0, 1.0))
    assert drawn == [(3.0, 17.0), (25.5, 10.0), (48.0, 3.0)]  # half of the five epochs
    assert points(draw_curve([9.0, -9.0], 1, 2, 0.0, 1.0)) == [(3.0, 3.0), (93.0, 17.0)]
    assert points(draw_curve([0.5, math.nan, None, 0.5], 1, 4, 0.5, 0.5)) == [
        (3.0, 10.0),
        (93.0, 10.0),
    ]
    assert draw_curve([math.inf, None], None, 2, 0.0, 1.0) == ""
    long = points(draw_curve([float(i) for i in range(1001)], 1001, 1001, 0.0, 1000.0))
    assert len(long) <= CURVE_POINTS + 1 and long[-1] == (93.0, 3.0)


def test_a_block_of_a_thousand_trials_is_small() -> None:
    rows = [row(n, tuple(0.5 + n / 5000 for _ in range(8)), status="finished") for n in range(1000)]
    shown = Screen(lambda: 0.0)
    shown.finished(snapshot(rows, best=999, more={"failed": 9}), SimpleNamespace(status="finished"))
    (page,) = shown.pages
    assert len(page) < 30_000
    assert "and 997 more: 988 finished, 9 failed" in page and "★ 999" in page


class Screen(Notebook):
    """Keeps what would be displayed."""

    def __init__(self, clock: Any) -> None:
        super().__init__(clock)
        self.pages: list[str] = []

    def draw(self, block: Block) -> None:
        self.pages.append(block.to_html())
        Checked(self.pages[-1])
        self._handle = self
        self._drawn = self._clock()


def test_the_block_has_every_phase_and_is_drawn_twice_a_second() -> None:
    now = [0.0]
    screen = Screen(lambda: now[0])
    screen.phase("starting 2 workers")
    screen.phase("trying the first configuration")
    assert "starting 2 workers ... trying the first configuration ..." in screen.pages[-1]
    screen.advise("use <graph=True>")
    screen.run_started(snapshot([row(0)]))
    assert "use &lt;graph=True&gt;" in screen.pages[-1]
    for _ in range(100):
        now[0] += 0.002
        screen.update(snapshot([row(0)]))
    assert len(screen.pages) == 3
    now[0] += 0.5
    screen.update(snapshot([row(0)], paused=True))
    assert ">paused<" in screen.pages[-1] and "10 s so far, 30 s left" in screen.pages[-1]
    screen.update(snapshot([row(0, worker=1)]))
    screen.finished(snapshot([row(0, status="finished")]), SimpleNamespace(status="finished"))
    assert "1 finished · 10.0 s · 2 workers 90% busy" in screen.pages[-1]
    screen.ended_early(None, ValueError())
    assert len(screen.pages) == 5


def test_failures_stay_when_their_trials_leave_the_snapshot() -> None:
    screen = Screen(lambda: 0.0)
    lost = [row(n, status="failed", error=f"ValueError: no {n % 9} (net.py:3)") for n in range(27)]
    screen.update(snapshot(lost))
    screen.update(snapshot([row(30, status="diverged", error="loss is nan")]))
    screen.ended_early(snapshot([row(31, status="stopped")]), KeyboardInterrupt())
    assert "trial 0 and 2 more failed: ValueError: no 0 (net.py:3)" in screen.pages[-1]
    assert f"no {MAX_CAUSES} " not in screen.pages[-1] and ">interrupted<" in screen.pages[-1]
    assert "and 4 for other reasons" in screen.pages[-1]
    early = Screen(lambda: 0.0)
    early.ended_early(None, ValueError())
    assert early.pages == []  # nothing was shown: the arguments were invalid
    early.phase("starting 2 workers")
    early.ended_early(None, ValueError())
    assert "starting 2 workers ..." in early.pages[-1] and ">failed<" in early.pages[-1]


def test_a_failing_display_warns_once_and_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def display(*args: object, **kwargs: object) -> None:
        calls.append(args)
        raise OSError("the front end is gone")

    module = SimpleNamespace(display=display)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=module))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    shown = Notebook()
    with pytest.warns(UserWarning, match="the search continues without it: the front end is gone"):
        shown.phase("starting 2 workers")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shown.run_started(snapshot([row(0)]))
    assert len(calls) == 1


def test_a_kernel_is_a_notebook_and_a_terminal_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def shell(made: object) -> None:
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: made))

    shell(SimpleNamespace(kernel=object()))
    assert in_notebook()
    assert isinstance(displays.make_progress("auto"), Notebook)
    assert isinstance(displays.make_progress("table"), Notebook)
    assert isinstance(displays.make_progress("lines"), progress.Lines)
    shell(SimpleNamespace())  # IPython in a terminal
    assert not in_notebook()
    shell(None)
    assert not in_notebook()
    monkeypatch.delitem(sys.modules, "IPython")
    assert not in_notebook()
    given = Notebook()
    assert displays.make_progress(given) is given
