"""An executor has its own number of workers: what `search` and `resume` accept, show and record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from line_model import SPACE, build

import cerebro
from cerebro.api.settings import choose_worker_count
from cerebro.errors import InputError
from cerebro.executors.inline import InlineExecutor
from cerebro.results.saved_run import SavedRun


class NotStarted(Exception):
    """Ends a call when its executor is to start workers."""


class Elsewhere:
    """An executor with a number of workers, or None, on machines that cannot be reached."""

    def __init__(self, workers: int | None) -> None:
        self.workers = workers

    def start(self, context: Any) -> list[int]:
        raise NotStarted

    def submit(self, worker: int, task: Any) -> None: ...

    def wait(self, timeout: float | None = None, wake: Any = None) -> list[Any]:
        return []

    def replace(self, worker: int) -> int:
        return worker

    def close(self, *, kill: bool = False) -> None: ...


class Stop:
    """Ends a search as Ctrl-C does."""

    def on_epoch_end(self, trial: Any, metrics: Any) -> None:
        raise KeyboardInterrupt


@pytest.fixture
def data(tmp_path: Path) -> cerebro.Dataset:
    x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    return cerebro.shard({"x": x, "y": x.sum(1)}, tmp_path / "d", shards=2, progress=False)


@pytest.fixture
def search(data: cerebro.Dataset, tmp_path: Path) -> Callable[..., cerebro.Result]:
    def searching(**more: Any) -> cerebro.Result:
        settings = {"epochs": 2, "validation": 0.25, "batch_size": 16, "progress": False, **more}
        return cerebro.search(build, SPACE, data, searcher="grid", run=tmp_path / "run", **settings)

    return searching


@pytest.fixture
def stopped(search: Callable[..., cerebro.Result]) -> Path:
    """A run that was trained in its process, and interrupted."""
    with pytest.raises(KeyboardInterrupt) as caught:
        search(workers=0, callbacks=[Stop()])
    return Path(caught.value.result.path)  # type: ignore[attr-defined]


def test_a_worker_count_that_the_executor_ignores_warns() -> None:
    assert choose_worker_count(None, None) is None
    assert choose_worker_count(0, None) == 0
    assert choose_worker_count(4, Elsewhere(4)) == choose_worker_count(None, Elsewhere(4)) == 4
    assert choose_worker_count(None, Elsewhere(None)) is None
    assert choose_worker_count(0, InlineExecutor()) == 0  # which has no number
    for own, known in ((None, "as many as fit"), (8, "8")):
        with pytest.warns(UserWarning, match=rf"workers=4 is not .* {known}: .*\(workers=4\)"):
            assert choose_worker_count(4, Elsewhere(own)) == own
        with pytest.warns(UserWarning, match=f"workers=0 is not .* {known}: leave workers= out$"):
            assert choose_worker_count(0, Elsewhere(own)) == own
    with pytest.raises(InputError, match="workers must be a whole number"):
        choose_worker_count("4", Elsewhere(None))


def test_the_ignored_worker_count_warning_names_the_callers_line(
    search: Callable[..., cerebro.Result], stopped: Path
) -> None:
    for call in (
        lambda: search(workers=3, executor=Elsewhere(2), if_exists="new"),
        lambda: cerebro.resume(stopped, build, workers=3, executor=Elsewhere(None), progress=False),
    ):
        with (
            pytest.warns(UserWarning, match="give the number to the executor") as caught,
            pytest.raises(NotStarted),
        ):
            call()
        assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("workers", "shown"),
    [
        (None, "starting workers ..."),
        (3, "starting 3 workers ..."),
        (
            8,
            "starting 8 workers (3 trials train at a time on 8 workers: 5 idle. Folds "
            "(validation=cerebro.KFold(...)) or more trials would use them) ...",
        ),
    ],
)
def test_a_search_counts_only_the_executors_workers(
    search: Callable[..., cerebro.Result],
    capsys: pytest.CaptureFixture[str],
    workers: int | None,
    shown: str,
) -> None:
    with pytest.raises(NotStarted):
        search(executor=Elsewhere(workers), n_trials=3, progress="lines")
    assert capsys.readouterr().out.splitlines()[0] == shown


@pytest.mark.parametrize(
    ("workers", "shown"), [(None, "starting workers ..."), (3, "starting 3 workers ...")]
)
def test_a_resume_counts_only_the_executors_workers(
    stopped: Path, capsys: pytest.CaptureFixture[str], workers: int | None, shown: str
) -> None:
    capsys.readouterr()
    with pytest.raises(NotStarted):
        cerebro.resume(stopped, build, executor=Elsewhere(workers), progress="lines")
    assert capsys.readouterr().out.splitlines()[0] == shown


def test_a_run_records_how_many_workers_its_executor_started(
    search: Callable[..., cerebro.Result], stopped: Path
) -> None:
    assert SavedRun(stopped).settings["workers"] == 0
    result = cerebro.resume(stopped, build, executor=InlineExecutor(), progress=False)
    assert result.status == "finished"
    assert SavedRun(stopped).settings["workers"] == 1
    (resumed,) = [event for event in result.events() if event["kind"] == "resumed"]
    assert resumed["text"].endswith("with 1 worker")
    again = search(executor=InlineExecutor(), if_exists="new")
    assert SavedRun(again.path).settings["workers"] == 1
