"""Observers, against the real packages, which write locally."""

from __future__ import annotations

import csv
import struct
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from line_model import SPACE, Line, build

import cerebro
from cerebro.callbacks import CSV, MLflow, Observer, TensorBoard, WandB
from cerebro.errors import RunError


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> cerebro.Dataset:
    x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    folder = tmp_path_factory.mktemp("line") / "data"
    return cerebro.shard({"x": x, "y": x.sum(1)}, folder, shards=2, progress=False)


def search(data: cerebro.Dataset, run: Path, *callbacks: Any, **more: Any) -> cerebro.Result:
    settings: dict[str, Any] = {"epochs": 3, "workers": 0, "progress": False, **more}
    return cerebro.search(
        build, SPACE, data, searcher="grid", validation=0.25, batch_size=16, run=run,
        callbacks=callbacks, **settings,
    )  # fmt: skip


class StopAfter:
    """Ends a search as Ctrl-C does."""

    def __init__(self, epochs: int) -> None:
        self.left = epochs

    def on_epoch_end(self, trial: Any, metrics: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def interrupted(data: cerebro.Dataset, run: Path, *callbacks: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        search(data, run, *callbacks, StopAfter(3))


# --- fenced -------------------------------------------------------------------


class Broken(Observer):
    calls = closed = 0

    def on_epoch_end(self, trial: Any, metrics: Any) -> None:
        self.calls += 1
        raise ConnectionError("the network is unreachable")

    def close(self) -> None:
        self.closed += 1


def test_a_failing_observer_is_dropped_with_a_warning(
    data: cerebro.Dataset, tmp_path: Path
) -> None:
    broken, whole = Broken(), CSV()
    with pytest.warns(UserWarning, match="the observer Broken failed in on_epoch_end") as warned:
        result = search(data, tmp_path / "run", broken, whole)
    text = str(warned[0].message)
    assert "ConnectionError: the network is unreachable" in text and "strict=True" in text
    assert len([w for w in warned if "observer" in str(w.message)]) == 1
    assert (broken.calls, broken.closed) == (1, 1)
    assert result.status == "finished"
    assert len(rows_of(tmp_path / "run" / "metrics.csv")) == 6


def test_a_strict_observer_ends_the_run(data: cerebro.Dataset, tmp_path: Path) -> None:
    broken = Broken(strict=True)
    with pytest.raises(ConnectionError, match="unreachable"):
        search(data, tmp_path / "run", broken)
    assert (broken.calls, broken.closed) == (1, 1)
    error = cerebro.open(tmp_path / "run").error
    assert error is not None and "callback Broken failed in on_epoch_end" in error


def test_an_observer_is_closed_after_an_interrupt(data: cerebro.Dataset, tmp_path: Path) -> None:
    class Watching(Observer):
        closed = 0

        def on_epoch_end(self, trial: Any, metrics: Any) -> None: ...

        def close(self) -> None:
            self.closed += 1
            raise OSError("disk full")

    watching = Watching()
    with pytest.warns(UserWarning, match="failed in close"):
        interrupted(data, tmp_path / "run", watching)
    assert watching.closed == 1
    assert cerebro.open(tmp_path / "run").status == "stopped"


# --- CSV ----------------------------------------------------------------------


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as opened:
        return list(csv.DictReader(opened))


def expected(result: cerebro.Result) -> list[tuple[str, ...]]:
    return sorted(
        (str(t.number), str(e["epoch"]), str(e["metrics"]["loss"]), e["state_hash"])
        for t in result.trials
        for e in t.history
    )


def written(file: Path) -> list[tuple[str, ...]]:
    return sorted((r["trial"], r["epoch"], r["loss"], r["state_hash"]) for r in rows_of(file))


def test_csv(data: cerebro.Dataset, tmp_path: Path) -> None:
    result = search(data, tmp_path / "run", CSV(), workers=2)
    rows = rows_of(tmp_path / "run" / "metrics.csv")
    assert written(tmp_path / "run" / "metrics.csv") == expected(result)
    assert {row["config.lr"] for row in rows} == {"0.01", "0.1"}
    assert {"train_loss", "val_loss", "seconds"} <= rows[0].keys()


def test_a_run_without_epochs_is_replaced_despite_its_csv_file(
    data: cerebro.Dataset, tmp_path: Path
) -> None:
    def broken(config: Any) -> Any:
        raise ValueError("a mistake")

    def run(model: Any) -> cerebro.Result:
        return cerebro.search(
            model, SPACE, data, searcher="grid", epochs=1, batch_size=16, validation=0.25,
            workers=0, callbacks=[CSV()], run=tmp_path / "run", progress=False,
        )  # fmt: skip

    with pytest.raises(cerebro.RunError, match="a mistake"):
        run(broken)
    result = run(build)
    assert written(tmp_path / "run" / "metrics.csv") == expected(result)


def test_csv_of_a_resumed_run(data: cerebro.Dataset, tmp_path: Path) -> None:
    interrupted(data, tmp_path / "run", CSV(tmp_path / "log.csv"))
    assert len(rows_of(tmp_path / "log.csv")) == 3
    result = cerebro.resume(
        tmp_path / "run", build, callbacks=[CSV(tmp_path / "log.csv")], progress=False
    )
    assert written(tmp_path / "log.csv") == expected(result)


def test_csv_with_settings_of_only_some_trials(data: cerebro.Dataset, tmp_path: Path) -> None:
    space = {"lr": [0.01, 0.1], "more": cerebro.when("lr", 0.1, {"decay": [0.5]})}
    file = tmp_path / "log.csv"
    cerebro.search(
        build, space, data, searcher="grid", epochs=1, batch_size=16, validation=0.25, workers=0,
        callbacks=[CSV(file)], run=tmp_path / "run", progress=False,
    )  # fmt: skip
    decays = {row["config.lr"]: row["config.decay"] for row in rows_of(file)}
    assert decays == {"0.01": "", "0.1": "0.5"}


# --- TensorBoard ----------------------------------------------------------------


def scalars(folder: Path, tag: str) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars(tag)]


def losses(result: cerebro.Result, trial: int) -> list[tuple[int, float]]:
    history = result.trials[trial].history
    return [(e["epoch"] + 1, float(np.float32(e["metrics"]["loss"]))) for e in history]


def test_tensorboard(data: cerebro.Dataset, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    interrupted(data, tmp_path / "run", TensorBoard())
    result = cerebro.resume(tmp_path / "run", build, callbacks=[TensorBoard()], progress=False)
    folder = tmp_path / "run" / "tensorboard"
    for number in (0, 1):
        assert scalars(folder / f"trial-000{number}", "loss") == losses(result, number)
        assert len(scalars(folder / f"trial-000{number}", "train_loss")) == 3


def test_tensorboard_shows_the_configuration(data: cerebro.Dataset, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    search(data, tmp_path / "run", TensorBoard(tmp_path / "logs"), epochs=1)
    found = EventAccumulator(str(tmp_path / "logs" / "trial-0001"))
    found.Reload()
    content = found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    start = plugin_data_pb2.HParamsPluginData.FromString(content).session_start_info
    assert start.hparams["lr"].number_value == 0.1


# --- MLflow -----------------------------------------------------------------------


@pytest.fixture
def mlflow_uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow's own, of its dependencies
        yield f"sqlite:///{tmp_path / 'mlflow.db'}"


def test_mlflow(data: cerebro.Dataset, tmp_path: Path, mlflow_uri: str) -> None:
    import mlflow

    interrupted(data, tmp_path / "run", MLflow(mlflow_uri, "lines"))
    client = mlflow.MlflowClient(mlflow_uri)
    experiment = client.get_experiment_by_name("lines").experiment_id
    before = client.search_runs([experiment])
    assert {run.info.status for run in before} <= {"KILLED", "FAILED", "FINISHED"}
    result = cerebro.resume(
        tmp_path / "run", build, callbacks=[MLflow(mlflow_uri, "lines")], progress=False
    )
    runs = client.search_runs([experiment])
    (parent,) = [run for run in runs if "cerebro.trial" not in run.data.tags]
    children = {int(r.data.tags["cerebro.trial"]): r for r in runs if r is not parent}
    assert parent.info.status == "FINISHED"
    assert parent.data.tags["cerebro.best_trial"] == str(result.best.number)
    assert children.keys() == {0, 1, 2}
    assert (
        children[2].info.status == "FAILED" and "too fast" in children[2].data.tags["cerebro.error"]
    )
    for number in (0, 1):
        child = children[number]
        assert child.data.params["lr"] == str(SPACE["lr"][number])
        assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
        history = client.get_metric_history(child.info.run_id, "loss")
        points = {(point.step, point.value) for point in history}
        assert points == {
            (e["epoch"] + 1, e["metrics"]["loss"]) for e in result.trials[number].history
        }


def test_mlflow_continues_the_searchs_run_from_a_later_page(
    data: cerebro.Dataset,
    tmp_path: Path,
    mlflow_uri: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import mlflow

    every = mlflow.MlflowClient.search_runs

    def one_each_page(client: Any, *given: Any, **more: Any) -> Any:
        return every(client, *given, **more, max_results=1)

    observer = MLflow(mlflow_uri, "lines")
    interrupted(data, tmp_path / "run", observer)
    client = mlflow.MlflowClient(mlflow_uri)
    experiment = client.get_experiment_by_name("lines").experiment_id
    before = client.search_runs([experiment])
    (parent,) = [run for run in before if "cerebro.trial" not in run.data.tags]
    assert len(before) > 1
    with monkeypatch.context() as small:
        small.setattr(mlflow.MlflowClient, "search_runs", one_each_page)
        cerebro.resume(tmp_path / "run", build, callbacks=[observer], progress=False)
    runs = client.search_runs([experiment])
    (same,) = [run for run in runs if "cerebro.trial" not in run.data.tags]
    assert same.info.run_id == parent.info.run_id
    assert same.data.tags["cerebro.search"] == same.data.tags["cerebro.run"]
    children = [run for run in runs if run is not same]
    assert sorted(run.data.tags["cerebro.trial"] for run in children) == ["0", "1", "2"]
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert all("cerebro.search" not in run.data.tags for run in children)


class Dip(Line):
    """A model whose loss is lowest after `lr` epochs, and then equals `lr`."""

    batches = 0

    def train_batch(self, batch: Any) -> dict[str, float]:
        self.batches += 1
        return {}

    def eval_batch(self, batch: Any) -> dict[str, float]:
        epochs = self.batches / 3
        return {"loss": self.lr + abs(epochs - self.lr)}

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]


def build_dip(config: dict[str, Any]) -> Dip:
    return Dip(config["best_at"])


@pytest.mark.parametrize(("select", "point"), [("best", (2, 2.0)), ("last", (4, 4.0))])
def test_mlflow_logs_the_best_metrics_at_their_epoch(
    data: cerebro.Dataset, tmp_path: Path, mlflow_uri: str, select: str, point: tuple[int, float]
) -> None:
    """Also if the search goes on with a trial that is better after fewer epochs."""
    import mlflow

    client = mlflow.MlflowClient(mlflow_uri)
    for best_at, points in (([2], [point]), ([4, 2], [(4, 4.0), (4, point[1])])):
        run = tmp_path / f"{len(best_at)}"
        for n_trials in range(1, len(best_at) + 1):
            cerebro.search(
                build_dip, {"best_at": best_at}, data, searcher="grid", n_trials=n_trials, epochs=4,
                validation=0.25, batch_size=16, workers=0, progress=False, select=select, run=run,
                if_exists="resume", callbacks=[MLflow(mlflow_uri, run.name)],
            )  # fmt: skip
        experiment = client.get_experiment_by_name(run.name).experiment_id
        (parent,) = client.search_runs([experiment], "tags.`cerebro.search` != ''")
        history = client.get_metric_history(parent.info.run_id, "loss")
        assert [(value.step, value.value) for value in history] == points
        assert parent.data.metrics["loss"] == points[-1][1]


# --- Weights & Biases ---------------------------------------------------------------


def wandb_records(file: Path) -> Iterator[bytes]:
    """Read the records of a .wandb file: LevelDB's log format behind a header of 7 bytes."""
    content = file.read_bytes()
    place, parts = 7, b""
    while place < len(content):
        left = 32768 - place % 32768  # a record's header does not cross a block
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_wandb(data: cerebro.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    observer = WandB("lines", mode="offline", dir=str(tmp_path))
    result = search(data, tmp_path / "run", observer)
    wandb.teardown()
    found: dict[str, list[float]] = {}
    configs: dict[str, dict[str, str]] = {}
    codes: dict[str, int] = {}
    for file in (tmp_path / "wandb").glob("offline-run-*/run-*.wandb"):
        trial = file.stem.rpartition("-")[2]
        for content in wandb_records(file):
            record = wandb_internal_pb2.Record.FromString(content)
            kind = record.WhichOneof("record_type")
            if kind == "run":
                assert (record.run.run_group, record.run.project) == ("run", "lines")
                configs[trial] = {item.key: item.value_json for item in record.run.config.update}
            elif kind == "exit":
                codes[trial] = record.exit.exit_code
            elif kind == "history":
                items = {(i.key or i.nested_key[0]): i.value_json for i in record.history.item}
                found.setdefault(trial, []).append(float(items["loss"]))
    assert configs["1"]["lr"] == "0.1"
    assert codes == {"0": 0, "1": 0, "2": 1}
    for number in (0, 1):
        history = result.trials[number].history
        assert found[str(number)] == [epoch["metrics"]["loss"] for epoch in history]


def test_the_error_names_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    for observer, package in ((TensorBoard, "tensorboard"), (MLflow, "mlflow"), (WandB, "wandb")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(cerebro.InputError, match=f"needs {package}.*{package}"):
            observer()


def test_an_error_of_the_search_closes_observers(data: cerebro.Dataset, tmp_path: Path) -> None:
    def broken(config: dict[str, Any]) -> Line:
        raise ValueError("no model")

    with pytest.raises(RunError):
        cerebro.search(
            broken, SPACE, data, searcher="grid", epochs=1, batch_size=16, validation=0.25,
            workers=0, callbacks=[CSV(tmp_path / "log.csv")], run=tmp_path / "run", progress=False,
        )  # fmt: skip
    assert rows_of(tmp_path / "log.csv") == []
