"""The engine's run without Ray: requests from outside, answered by training or from the record."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from tune_models import build, build_or_fail, line_data

import cerebro
from cerebro.errors import InputError, RunError
from cerebro.integrations.ray_tune import engine as engine_module
from cerebro.integrations.ray_tune.engine import Session, Spec, Work
from cerebro.integrations.ray_tune.requests import (
    Checkpoint,
    EpochRequest,
    RequestedTrials,
    TrainedEpoch,
)
from cerebro.machine.signals import WakePipe

SECONDS = 120


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> cerebro.Dataset:
    return line_data(tmp_path_factory.mktemp("line") / "data", rows=96, shards=3)


class Engine:
    """A session with the words of a proxy."""

    def __init__(self, folder: Path, data: cerebro.Dataset, **more: Any) -> None:
        train, held_out = data.split(0.75, 0.25)
        options = {"batch_size": 16, "keep": "last", **more.pop("options", {})}
        work = Work(
            more.pop("build", build), train, held_out, more.pop("workers", 1), 1,
            more.pop("epochs", None), options,
        )  # fmt: skip
        self.folder = folder
        self.session = Session(work, folder)

    def want(
        self,
        owner: str,
        lr: float,
        target: int,
        *,
        trial: int | None = None,
        begin: Checkpoint | None = None,
    ) -> Future[TrainedEpoch | int]:
        if begin is not None:
            self.session.check(begin)
        return self.session.ask(EpochRequest(owner, {"lr": lr}, trial, begin, target))

    def get(self, *what: Any, **more: Any) -> TrainedEpoch:
        answer = self.want(*what, **more).result(SECONDS)
        if isinstance(answer, TrainedEpoch):
            self.session.flush()
            return answer
        return self.session.read_epoch(answer, what[2] - 1)

    def close(self) -> None:
        self.session.close()
        assert not self.session.is_open


def test_epochs_are_those_of_a_search(data: cerebro.Dataset, tmp_path: Path) -> None:
    rates = [0.01, 0.1, 0.05]
    engine = Engine(tmp_path / "engine", data, workers=2)
    first = [engine.want(f"t{i}", lr, 1) for i, lr in enumerate(rates)]
    points: list[list[Checkpoint]] = []
    for i, future in enumerate(first):
        answer = future.result(SECONDS)
        assert isinstance(answer, TrainedEpoch) and answer.point.trial == i
        own = [answer.point]
        for target in (2, 3):
            own.append(engine.get(f"t{i}", rates[i], target, trial=i).point)
        points.append(own)
        assert answer.metrics["lr_used"] == pytest.approx(rates[i])
        assert {"loss", "train_loss", "val_loss"} <= answer.metrics.keys()
    engine.close()
    searched = cerebro.search(
        build, {"lr": rates}, data, searcher="grid", epochs=3, validation=0.25, batch_size=16,
        workers=0, progress=False, run=tmp_path / "search", keep="all",
    )  # fmt: skip
    for trial, own in zip(searched.trials, points, strict=True):
        assert [p.state_hash for p in own] == [e["state_hash"] for e in trial.history]
    opened = cerebro.open(tmp_path / "engine", build=build)
    assert [t.state_hash for t in opened.trials] == [t.state_hash for t in searched.trials]
    assert cerebro.replay(opened.path, 1, build).identical


def test_a_repeated_request_is_answered_from_the_record(
    data: cerebro.Dataset, tmp_path: Path
) -> None:
    engine = Engine(tmp_path / "run", data)
    seen = [engine.get("a", 0.1, 1)] + [engine.get("a", 0.1, k, trial=0) for k in (2, 3)]
    # The proxy has died and begins anew, without a checkpoint: the same three epochs.
    again = [engine.get("a", 0.1, 1)] + [engine.get("a", 0.1, k, trial=0) for k in (2, 3)]
    assert again == seen
    other = engine.get("b", 0.1, 1)
    assert other.point.trial == 1  # another trial of Tune's with the same configuration
    engine.close()
    assert len(cerebro.open(tmp_path / "run").trials) == 2


def test_a_run_resumes_in_a_new_engine_for_each_epoch(
    data: cerebro.Dataset, tmp_path: Path
) -> None:
    whole = Engine(tmp_path / "whole", data)
    expected = [whole.get("a", 0.1, 1)] + [whole.get("a", 0.1, k, trial=0) for k in (2, 3, 4)]
    whole.close()
    found = []
    for target in (1, 2, 3, 4):  # each epoch in another engine
        engine = Engine(tmp_path / "broken", data)
        found.append(engine.get("a", 0.1, target, trial=0 if target > 1 else None))
        assert engine.get("a", 0.1, 1) == expected[0]
        engine.close()
        assert cerebro.open(tmp_path / "broken").status == "stopped"
    assert found == expected


def test_clones_begin_with_the_state_that_a_checkpoint_names(
    data: cerebro.Dataset, tmp_path: Path
) -> None:
    """Also when the parent has gone on, and when the engine has ended in between."""
    engine = Engine(tmp_path / "run", data)
    engine.get("a", 0.1, 1)
    kept = engine.get("a", 0.1, 2, trial=0).point
    engine.session.keep(kept)
    for target in (3, 4):
        engine.get("a", 0.1, target, trial=0)
    clone = engine.get("b", 0.02, 3, begin=kept)
    engine.close()
    engine = Engine(tmp_path / "run", data)
    assert engine.get("b", 0.02, 3, begin=kept) == clone
    later = engine.get("c", 0.03, 3, begin=kept)
    engine.get("c", 0.03, 4, trial=2)
    engine.close()
    opened = cerebro.open(tmp_path / "run", build=build)
    one, two = opened.trials[1:]
    assert (clone.point.trial, later.point.trial) == (1, 2)
    assert (one.parent, two.parent) == (0, 0)
    assert one.history[0]["epoch"] == two.history[0]["epoch"] == 2
    assert one.history[0]["metrics"]["lr_used"] == pytest.approx(0.02)
    for number in (1, 2):  # from the first ancestor, through the epoch that was kept
        assert cerebro.replay(opened.path, number, build).identical
    files = {p.name for p in (tmp_path / "run" / "states").glob("0-epoch-*")}
    assert files == {"0-epoch-1.safetensors", "0-epoch-3.safetensors"}


def test_shelved_trials_hold_no_slots(data: cerebro.Dataset, tmp_path: Path) -> None:
    engine = Engine(tmp_path / "run", data, workers=2)
    states = tmp_path / "run" / "states"
    engine.get("a", 0.1, 1)
    engine.get("b", 0.2, 1)
    assert (states / "0.a").exists()
    engine.session.shelve(0)
    engine.get("b", 0.2, 2, trial=1)  # whoever asks next makes the loop go round
    assert not (states / "0.a").exists() and (states / "1.a").exists()
    rest = [engine.get("a", 0.1, k, trial=0) for k in (2, 3)]
    engine.close()
    undisturbed = Engine(tmp_path / "other", data)
    engine = undisturbed
    engine.get("a", 0.1, 1)
    assert [engine.get("a", 0.1, k, trial=0) for k in (2, 3)] == rest
    engine.close()


def test_a_failed_trial_reports_the_reason_and_may_start_again(
    data: cerebro.Dataset, tmp_path: Path
) -> None:
    engine = Engine(tmp_path / "run", data, build=build_or_fail)
    assert engine.get("a", 0.1, 1).point.trial == 0
    for _ in range(2):
        with pytest.raises(RunError, match="failed: ValueError: too fast"):
            engine.get("b", 0.3, 1)
    assert engine.get("a", 0.1, 2, trial=0).point.epoch == 1  # others go on
    engine.close()
    assert [t.status for t in cerebro.open(tmp_path / "run").trials] == [
        "stopped", "failed", "failed",
    ]  # fmt: skip


def test_a_stop_command_ends_an_idle_engine(data: cerebro.Dataset, tmp_path: Path) -> None:
    engine = Engine(tmp_path / "run", data)
    first = engine.get("a", 0.1, 1)
    cerebro.control.pause(tmp_path / "run")
    cerebro.control.unpause(tmp_path / "run")
    cerebro.control.stop(tmp_path / "run")
    engine.session._thread.join(SECONDS)
    assert not engine.session.is_open
    assert cerebro.open(tmp_path / "run").status == "stopped"
    engine = Engine(tmp_path / "run", data)
    assert engine.get("a", 0.1, 1) == first
    assert engine.get("a", 0.1, 2, trial=0).point.epoch == 1
    engine.close()


def test_a_stopped_trial_resumes_from_its_checkpoint_as_a_clone(
    data: cerebro.Dataset, tmp_path: Path
) -> None:
    engine = Engine(tmp_path / "run", data)
    kept = engine.get("a", 0.1, 1).point
    engine.session.keep(kept)
    engine.get("a", 0.1, 2, trial=0)
    cerebro.control.stop(tmp_path / "run", trial=0)
    with pytest.raises(RunError, match="trial 0 stopped"):
        for target in range(3, 100):
            engine.get("a", 0.1, target, trial=0)
    again = engine.get("a", 0.1, 2, trial=0, begin=kept)
    assert (again.point.trial, again.point.epoch) == (1, 1)
    assert engine.get("a", 0.1, 2, trial=0, begin=kept) == again
    engine.close()


def test_a_trial_finishes_after_the_given_epochs(data: cerebro.Dataset, tmp_path: Path) -> None:
    engine = Engine(tmp_path / "run", data, epochs=2)
    engine.get("a", 0.1, 1)
    last = engine.get("a", 0.1, 2, trial=0)
    assert engine.get("a", 0.1, 2, trial=0) == last
    with pytest.raises(RunError, match="trial 0 has done its 2 epochs"):
        engine.get("a", 0.1, 3, trial=0)
    engine.close()
    assert cerebro.open(tmp_path / "run").trials[0].status == "finished"


def wants_epochs(config: dict[str, Any], info: Any) -> Any:
    assert info.batch_size == 16 and info.trial >= 0
    return build({"lr": config["lr"] / info.total_steps})


def test_a_build_that_reads_the_number_of_epochs_needs_epochs_given(
    data: cerebro.Dataset, tmp_path: Path
) -> None:
    engine = Engine(tmp_path / "run", data, build=wants_epochs)
    with pytest.raises(RunError, match="which only Tune knows: give the epochs"):
        engine.get("a", 0.1, 1)
    engine.close()
    engine = Engine(tmp_path / "known", data, build=wants_epochs, epochs=3)
    assert engine.get("a", 0.1, 1).point.epoch == 0
    engine.close()


def test_a_checkpoint_of_another_run_is_refused(data: cerebro.Dataset, tmp_path: Path) -> None:
    engine = Engine(tmp_path / "run", data)
    point = engine.get("a", 0.1, 1).point
    for wrong in (
        Checkpoint(7, 0, point.state_hash), Checkpoint(0, 5, point.state_hash),
        Checkpoint(0, 0, "0" * 32),
    ):  # fmt: skip
        with pytest.raises(InputError, match="whose state is not in"):
            engine.session.check(wrong)
    engine.close()


def test_an_error_that_ends_the_run_is_raised_for_every_request(
    data: cerebro.Dataset, tmp_path: Path
) -> None:
    engine = Engine(tmp_path / "run", data, options={"batch_size": None})
    with pytest.raises(RunError, match="batch_size is missing"):
        engine.get("a", 0.1, 1)
    with pytest.raises(RunError, match="batch_size is missing"):
        engine.get("b", 0.1, 1)
    engine.close()


OWNER = """
import sys
from pathlib import Path
from cerebro.run.owner import Owner

owner = Owner.take(Path(sys.argv[1]))
print("owns it", flush=True)
sys.stdin.read()
"""


def test_an_engine_waits_for_the_previous_owner_of_the_run_to_end(
    data: cerebro.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    engine = Engine(folder, data)
    engine.get("a", 0.1, 1)
    engine.close()
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == b"owns it\n"
        engine = Engine(folder, data)
        wanted = engine.want("a", 0.1, 2, trial=0)
        with pytest.raises(futures.TimeoutError):
            wanted.result(1)
        monkeypatch.setattr(engine_module, "OWNER_SECONDS", 0.0)
        late = Engine(folder, data)
        with pytest.raises(RunError, match="is being trained by process"):
            late.get("a", 0.1, 2, trial=0)
        late.close()
        other.kill()
    answer = wanted.result(SECONDS)
    assert isinstance(answer, TrainedEpoch) and (answer.point.trial, answer.point.epoch) == (0, 1)
    engine.close()


def test_closing_the_engine_answers_waiting_requests(data: cerebro.Dataset, tmp_path: Path) -> None:
    engine = Engine(tmp_path / "run", data)
    engine.get("a", 0.1, 1)
    waiting = [engine.want("a", 0.1, 2, trial=0), engine.want("b", 0.1, 1)]
    closer = threading.Thread(target=engine.close)
    closer.start()
    for future in waiting:  # trained in time, or told
        error = future.exception(SECONDS)
        assert error is None or "the engine was closed" in str(error)
    closer.join(SECONDS)
    assert not closer.is_alive()


def test_proxies_that_fill_the_memory_are_warned_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = [1 << 40]
    monkeypatch.setattr(engine_module, "available_memory", lambda: free[0])
    spec = Spec("name", b"", 1, None, None, str(Path.cwd()), tuple(sys.path), {})
    engine = engine_module.Engine(spec)
    for name, left in (("a", 1 << 40), ("b", 130 << 20), ("c", 130 << 20), ("d", 0)):
        free[0] = left
        asyncio.run(engine.enter(name, "folder"))
    (record,) = caplog.records
    assert record.getMessage().startswith("3 of Tune's trials are live")
    assert "TuneConfig(max_concurrent_trials=), or use cerebro.ray.fit" in record.getMessage()


def test_the_wake_pipe_is_not_signalled_for_requests_that_must_wait() -> None:
    import select

    trials = RequestedTrials(None, width=1)
    trials.ask(EpochRequest("a", {"lr": 0.1}, None, None, 1))
    assert select.select([trials.wake_pipe], [], [], 0)[0] == [trials.wake_pipe]
    assert trials.suggest() is not None
    trials.ask(EpochRequest("b", {"lr": 0.1}, None, None, 1))  # asked for when the first one rests
    assert select.select([trials.wake_pipe], [], [], 0)[0] == []
    trials.close("it is over")


def test_the_wake_pipe_stays_signalled_until_it_is_cleared() -> None:
    import select

    bell = WakePipe()
    assert select.select([bell], [], [], 0)[0] == []
    for _ in range(100_000):  # more than a pipe holds
        bell.wake()
    assert select.select([bell], [], [], 0)[0] == [bell]
    bell.clear()
    assert select.select([bell], [], [], 0)[0] == []
    bell.close()
    bell.wake()  # nobody is there
