"""The comparison: its page and README's chart say what its record says."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import pytest

from benchmarks.comparison import claims, page, papers, pictures, record
from benchmarks.comparison.formats import number
from benchmarks.comparison.measures import bits, bound, figures
from benchmarks.comparison.rivals import LOOP, OURS, RECORDED, RIVALS
from benchmarks.comparison.watch import Cell

README = Path(__file__).parents[1] / "README.md"
TUNERS = page.PAGE.parent / "comparison" / "tuners.svg"


@pytest.fixture(scope="module")
def found() -> record.Record:
    return record.load()


def test_the_page_is_made_from_the_record(found: record.Record) -> None:
    assert page.PAGE.read_text(encoding="utf-8") == page.page(found)


def test_the_chart_of_the_readme_has_the_records_figures(found: record.Record) -> None:
    readme = README.read_text(encoding="utf-8")
    assert "](docs/comparison/tuners.svg)" in readme
    drawn = re.findall(r">([^<]+)</text>", TUNERS.read_text(encoding="utf-8"))
    for workload in pictures.MODELS:
        for name in pictures.TUNERS:
            ratio = record.median(found, name, workload, "ratio")
            assert ratio is not None
            assert number(ratio) in drawn


def test_the_readme_is_short_and_leaves_figures_to_the_page() -> None:
    prose = re.sub(r"^```.*?^```", "", README.read_text(encoding="utf-8"), flags=re.M | re.S)
    assert len(prose.split()) <= 600
    assert not re.findall(r"[Mm]easured:|\b\d+\.\d+ of |\b\d+ (?:ms|us|MB|times)\b", prose)
    different = prose.partition("## What is different\n")[2].partition("\n![")[0]
    lines = re.findall(r"^- .*$", different, re.M)
    assert len(lines) == 8
    assert not [line for line in lines if re.search(r" \(|\d", line)]


def test_a_changed_figure_changes_the_page_and_its_summary(found: record.Record) -> None:
    other = copy.deepcopy(found)
    other.update(size="full", note="")
    before = page.page(other), claims.in_short(other)
    new = {"rival": OURS, "workload": "equal", "round": 9, "kill": False, "why": "", "whole": True,
           "bits": None, "ratio": 7.77, "trials": 16, "of": 16}  # fmt: skip
    cells = [c for c in other["cells"] if (c["rival"], c["workload"]) != (OURS, "equal")]
    other["cells"] = [*cells, new]
    assert "7.77 for 16 configurations" in claims.in_short(other)
    assert page.page(other) != before[0]
    assert claims.in_short(other) != before[1]
    other["note"] = "not fit"
    assert "7.77" not in claims.in_short(other)


def test_cells_that_did_not_run_are_summed_up_by_round(found: record.Record) -> None:
    other = copy.deepcopy(found)
    cell = {"rival": LOOP, "workload": "three", "round": 1, "kill": False}
    other["cells"] = [cell]
    other["left"] = [f"{OURS}, three, round 2", f"{LOOP}, nine, round 2", f"{OURS}, nine, round 2",
                     f"{LOOP}, three, round 3, a worker killed"]  # fmt: skip
    assert page.left_out(other) == (
        f"round 2 (9); round 3, a worker killed (3); {OURS} on 3 in round 2"
    )


def test_the_page_says_where_whole_recorded_steps_are_slower(found: record.Record) -> None:
    other = copy.deepcopy(found)
    figures = {
        "round": 0,
        "kill": False,
        "whole": True,
        "why": "",
        "trials": 3,
        "of": 3,
        "bits": None,
    }
    other["cells"] = [
        dict(figures, rival=rival, workload=workload, ratio=ratio)
        for rival, workload, ratio in [
            (OURS, "clicks", 1.0), (RECORDED, "clicks", 1.5), (OURS, "three", 1.0),
            (RECORDED, "three", 0.5),
        ]
    ]  # fmt: skip
    assert page.losses(other) == "- **Makespan with `graph=True`.** clicks: 1.50 of the default's."


def test_every_picture_of_the_page_is_there() -> None:
    shown = re.findall(r"!\[[^]]+\]\((\S+)\)", page.PAGE.read_text(encoding="utf-8"))
    assert len(shown) == 4
    for name in shown:
        assert (page.PAGE.parent / name).read_text(encoding="utf-8").count("<svg") == 1


def test_every_rival_is_measured_or_named(found: record.Record) -> None:
    measured = {cell["rival"] for cell in found["cells"]}
    named = {name.partition(", equal")[0] for name in found["left"]} | set(found["absent"])
    assert set(RIVALS) <= measured | named
    for cell in found["cells"]:
        assert cell["whole"] or cell["why"] or cell["trials"] < cell["of"]


def test_the_simulated_table_is_that_of_the_record(found: record.Record) -> None:
    case = papers.schedules(papers.CONFIGS, papers.WORKERS, papers.EPOCHS)
    assert case == found["papers"][0]
    assert case["hours"]["Cerebro"] < case["hours"]["MOP"]


def test_the_formulas_give_the_papers_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """20 epochs and models of 1 GB, 10 workers, 1 TB, 100,000 batches: 4 TB, 8 TB, 80 PB, 72 PB."""
    monkeypatch.setattr(papers, "MODEL", 1.0)
    monkeypatch.setattr(papers, "DATA", 1000.0)
    monkeypatch.setattr(papers, "BATCHES", 100_000)
    assert papers.network(configs=20, workers=10, epochs=20) == {
        "parameter server, async": 80e6,
        "Horovod": 72e6,
        "model averaging": 8000,
        "task-parallel (Celery)": 10_000,
        "MOP": 4020,
    }


def test_the_figures_of_a_cell_are_computed_from_its_log() -> None:
    """Two trials of one epoch, 2 s and 4 s: at least 4 s on two cores."""
    lines = [
        [10.0, "begin", 0, 0, 7], [12.0, "epoch", 0, 0, 7, 0.5], [12.0, "final", 0, "aa"],
        [12.0, "begin", 1, 0, 7], [16.0, "epoch", 1, 0, 7, 0.75], [16.0, "final", 1, "bb"],
    ]  # fmt: skip
    loop = Cell(LOOP, "three", 0, False, began=9.0, seconds=7.5, log=lines)
    assert bound(loop) == 4.0
    made = figures(loop, loop, "tiny")
    assert (made["trials"], made["of"], made["whole"]) == (2, 3, False)
    lines.append([16.0, "final", 2, "cc"])
    made = figures(loop, loop, "tiny")
    assert (made["makespan"], made["ratio"], made["first"], made["reached"]) == (6.0, 1.5, 3.0, 7.0)
    assert made["curve"] == [[3.0, 0.5], [7.0, 0.75]]
    assert made["bits"] == bits(list(reversed(lines)))
