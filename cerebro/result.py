"""What a run found: `Result` and its `Trial` objects, read from the run's folder.

Everything comes from ``run.sqlite`` and the kept states, so that a result on
another day, in another process or while the run goes on is the same object.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cerebro import _core, generators
from cerebro.coordinator import best_trial
from cerebro.data import Dataset
from cerebro.environment import flags_of_run
from cerebro.errors import CorruptDataError, InputError
from cerebro.recipe import Recipe
from cerebro.settings import whole_number
from cerebro.store import FILE, decode, read_meta, reader
from cerebro.trial import EpochRecord, Status, TrialRecord, score
from cerebro.unit import RunContext

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


class Trial:
    """One configuration of a run and how it went.

    A snapshot: what it says does not change while the run goes on.
    """

    def __init__(self, result: Result, record: TrialRecord) -> None:
        self._result = result
        self._record = record

    @property
    def number(self) -> int:
        """The trial's number, from 0."""
        return self._record.number

    @property
    def config(self) -> dict[str, Any]:
        """The configuration that ``build`` was called with."""
        return dict(self._record.config)

    @property
    def status(self) -> Status:
        """``waiting running paused stopped finished diverged failed``."""
        return self._record.status

    @property
    def epoch(self) -> int:
        """Epochs finished so far."""
        return len(self._record.epochs)

    @property
    def epochs(self) -> int:
        """Epochs the trial was to train for."""
        return self._record.target_epochs

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the selected epoch: ``train_*``, ``val_*`` and short names.

        A short name (``"accuracy"``) means validation where there is one. Empty
        before the first epoch is finished.
        """
        epoch = self._selected()
        return {} if epoch is None else dict(epoch.metrics)

    @property
    def history(self) -> list[dict[str, Any]]:
        """One mapping per epoch: ``epoch``, ``metrics``, ``seconds``, ``state_hash``."""
        return [epoch.to_history() for epoch in self._record.epochs]

    @property
    def best_epoch(self) -> int | None:
        """Number of the epoch with the best metric, from 0; None before the first."""
        return self._record.best_epoch(self._result.metric, self._result.mode)

    @property
    def state_hash(self) -> str | None:
        """XXH3-128 of the state after the selected epoch, 32 hexadecimal digits."""
        epoch = self._selected()
        return None if epoch is None else epoch.state_hash

    @property
    def parent(self) -> int | None:
        """Number of the trial that this one was cloned from, or None."""
        return self._record.parent

    @property
    def error(self) -> str | None:
        """Why the trial failed or diverged, in one line; None otherwise."""
        return self._record.error

    @property
    def traceback(self) -> str | None:
        """The traceback of the user's exception, or None."""
        return self._record.traceback

    @property
    def log(self) -> str:
        """What the trial printed and logged."""
        path = self._result._folder / "trials" / f"{self.number}.log"
        try:
            return path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return ""

    def load(
        self,
        epoch: Literal["best", "last"] | int = "best",
        build: Callable[..., Any] | None = None,
    ) -> Any:
        """Build the model again and load its state after an epoch.

        Parameters
        ----------
        epoch
            ``"best"``, ``"last"`` or the number of an epoch whose state was kept.
        build
            The run's ``build``, where it cannot be imported again.

        Returns
        -------
        object
            What ``build`` returns, for `cerebro.torch.Model` with ``.net``, which is in
            evaluation mode as after any validation. The caller's random generators are
            left alone.

        Raises
        ------
        InputError
            If no state was kept for the epoch, or ``build`` cannot be found.
        CorruptDataError
            If the state's file is damaged.
        """
        from cerebro.epoch_progress import EpochProgress
        from cerebro.worker import LiveModel, build_model, load_tree, make_info

        record = self._epoch_record(epoch)
        packed = self._read_state(record)
        context = self._result._context(build)
        info = make_info(
            context.train,
            trial=self.number,
            seed=context.seed,
            epochs=context.epochs,
            batch_size=self._batch_size(),
            drop_last=context.drop_last,
        )
        with generators.preserved(_torch_imported()), flags_of_run(context.torch_flags):
            model, torch = build_model(context, self.number, self.config, info)
            load_tree(LiveModel(model, torch, progress=EpochProgress()), packed)
        # Dropout and batch norm would otherwise train on in the user's predictions;
        # train_batch goes back to training by itself.
        net: Any = getattr(model, "net", None)
        if torch and hasattr(net, "eval"):
            net.eval()
        return model

    def state_path(self, epoch: Literal["best", "last"] | int = "best") -> Path:
        """Path of a kept state, a safetensors file.

        Raises
        ------
        InputError
            If no state was kept for the epoch.
        """
        record = self._epoch_record(epoch)
        assert record.state_file is not None
        return self._result._folder / "states" / record.state_file

    def evaluate(
        self, data: Any = None, *, build: Callable[..., Any] | None = None
    ) -> dict[str, float]:
        """Return the mean metrics of the best epoch's model over a data set.

        Done as in the run (batches, threads, generators), so that for the run's
        validation data these are the recorded metrics, bit for bit.

        Parameters
        ----------
        data
            A `cerebro.Dataset` or the path of one; default: the run's validation data.
        build
            The run's ``build``, where it cannot be imported again.
        """
        from cerebro.data.batches import make_loader
        from cerebro.torch_settings import compute_settings
        from cerebro.worker import evaluate_model, evaluation_seed

        model = self.load(build=build)
        target = self._result._data_for(data)
        settings = self._result.settings
        loader = make_loader(
            target,
            settings["eval_batch_size"] or self._batch_size(),
            seed=settings["seed"],
            shuffle=False,
            framework=getattr(model, "framework", "dlpack"),
            augment=False,
        )
        epoch = self._epoch_record("best").epoch
        seed = evaluation_seed(settings["seed"], self.number, epoch)
        with (
            contextlib.closing(loader),
            generators.preserved(_torch_imported(), seed),
            flags_of_run(self._result.environment.get("torch", {})),
            compute_settings(settings["threads"], settings["deterministic"]),
        ):
            loader.begin(range(target.num_shards), 0)
            return evaluate_model(model, loader)[1]

    def predict(self, data: Any, *, build: Callable[..., Any] | None = None) -> Any:
        """Return the best epoch's predictions for a data set's rows, in row order.

        Parameters
        ----------
        data
            A `cerebro.Dataset` or the path of one, or what the model's own ``predict``
            takes.
        build
            The run's ``build``, where it cannot be imported again.

        Raises
        ------
        InputError
            If the model has neither ``predict`` nor ``predict_batch``.
        """
        from cerebro.predict import predict

        if isinstance(data, (str, os.PathLike)):
            data = Dataset(data)
        model = self.load(build=build)
        with generators.preserved(_torch_imported()):
            return predict(model, data, self._batch_size())

    def export(
        self,
        path: str | os.PathLike[str],
        format: Literal["safetensors", "torch", "onnx"] = "safetensors",
        *,
        epoch: Literal["best", "last"] | int = "best",
        build: Callable[..., Any] | None = None,
    ) -> Path:
        """Write the model's weights (for ``onnx`` the model) to a file.

        Raises
        ------
        InputError
            If the format is unknown, or the model has no ``net`` where one is needed.
        """
        from cerebro.export import export

        return export(self, path, format, epoch=epoch, build=build)

    def _batch_size(self) -> int:
        from cerebro.worker import batch_size_of

        return batch_size_of(self.config, self._result._meta["settings"]["batch_size"])

    def _selected(self) -> EpochRecord | None:
        result = self._result
        return self._record.selected(result.metric, result.mode, result.select)

    def _epoch_record(self, epoch: Literal["best", "last"] | int) -> EpochRecord:
        records = self._record.epochs
        if not records:
            cause = f": {self.error}" if self.error else ""
            raise InputError(f"trial {self.number} has finished no epoch{cause}")
        if epoch == "last":
            wanted = records[-1].epoch
        elif epoch == "best":
            best = self.best_epoch
            wanted = records[-1].epoch if best is None else best
        else:
            wanted = whole_number("epoch", epoch, 0) or 0
        found = next((r for r in records if r.epoch == wanted), None)
        if found is None or found.state_file is None:
            kept = [str(r.epoch) for r in records if r.state_file is not None]
            raise InputError(
                f"trial {self.number} has no state of epoch {wanted}; kept are "
                f"{', '.join(kept) or 'none'} (keep='all' keeps every epoch)"
            )
        return found

    def _read_state(self, record: EpochRecord) -> bytes:
        assert record.state_file is not None
        path = self._result._folder / "states" / record.state_file
        self._result._settle()  # in a callback: what was just finished
        try:
            packed = path.read_bytes()
        except FileNotFoundError as error:
            raise CorruptDataError(
                f"{path} is missing: it was deleted, or a run that goes on has replaced it by a "
                "better one (refresh() reads the run again)"
            ) from error
        if _core.hash_state(packed) != record.state_hash:
            raise CorruptDataError(
                f"{path} is not the state of trial {self.number}, epoch {record.epoch}: its "
                "checksum differs"
            )
        return packed

    def __repr__(self) -> str:
        shown = self.metrics.get(self._result.metric)
        value = "" if shown is None else f", {self._result.metric}={shown:.4g}"
        return f"Trial({self.number}, {self.status}, epoch {self.epoch}/{self.epochs}{value})"


class Result:
    """All trials of a run, read from its folder.

    Parameters
    ----------
    path
        The run's folder.
    build
        The run's ``build``, where it cannot be imported again.

    Raises
    ------
    InputError
        If the folder holds no run.
    CorruptDataError
        If its store cannot be read.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, build: Callable[..., Any] | None = None
    ) -> None:
        self._path = Path(path)
        self._folder = self._path.absolute()  # the working directory may change
        self._build = build
        self._data: dict[str, Dataset] = {}
        self._trials: list[Trial] | None = None
        self._settle: Callable[[], None] = lambda: None
        self.refresh()

    def refresh(self) -> None:
        """Read the store again; useful while the run goes on."""
        self._settle()
        with reader(self._folder) as connection:
            meta = read_meta(connection)
            # Whatever is read later is looked for now, where a loss is told as damage.
            _ = [meta[key] for key in ("status", "build", "data", "environment", "num_shards")]
            _ = [meta["settings"][key] for key in ("metric", "mode", "select")]
            self._meta = meta
            self._records = read_trials(connection)
        self._trials = None

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self._path

    @property
    def status(self) -> str:
        """``running``, ``finished``, ``stopped`` (by time or Ctrl-C) or ``failed``."""
        return str(self._meta["status"])

    @property
    def error(self) -> str | None:
        """Why the run failed, or None."""
        error = self._meta.get("error")
        return None if error is None else str(error)

    @property
    def metric(self) -> str:
        """What ranks trials."""
        return str(self._meta["settings"]["metric"])

    @property
    def mode(self) -> str:
        """``"min"`` or ``"max"``."""
        return str(self._meta["settings"]["mode"])

    @property
    def select(self) -> str:
        """Which epoch stands for a trial: ``"best"`` or ``"last"``."""
        return str(self._meta["settings"]["select"])

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments of the search that shape its trials."""
        return dict(self._meta["settings"])

    @property
    def environment(self) -> dict[str, Any]:
        """Versions, CPU, threads and flags that the run was trained with."""
        return dict(self._meta["environment"])

    @property
    def trials(self) -> list[Trial]:
        """All trials by number."""
        if self._trials is None:
            self._trials = [Trial(self, record) for record in self._records]
        return self._trials

    @property
    def best(self) -> Trial:
        """The trial with the best metric; of equals the lowest number.

        Raises
        ------
        InputError
            If no trial has finished an epoch with a finite metric.
        """
        number = best_trial(self._records, self.metric, self.mode, self.select)
        if number is None:
            raise InputError(f"{self._path}: no trial has a finite {self.metric} yet")
        return self.trials[number]

    def top(self, n: int) -> list[Trial]:
        """Return the `n` best trials, best first; trials without a metric are left out."""
        scores = [score(t.metrics, self.metric, self.mode) for t in self.trials]
        ranked = sorted((s, number) for number, s in enumerate(scores) if s is not None)
        return [self.trials[number] for _, number in ranked[:n]]

    def summary(self) -> str:
        """Return a table of the trials, best first, for terminals."""
        from cerebro.report.summary import render

        return render(self)

    def to_dataframe(self) -> pandas.DataFrame:
        """Return one row per trial: number, status, epoch, configuration, metrics.

        Columns are ``number status epoch best_epoch config.* metrics.* state_hash
        error``; nested names are joined by dots. Needs pandas.
        """
        import pandas

        rows = []
        for trial in self.trials:
            row: dict[str, Any] = {
                "number": trial.number,
                "status": trial.status,
                "epoch": trial.epoch,
                "best_epoch": trial.best_epoch,
            }
            row.update(_flat("config", trial.config))
            row.update(_flat("metrics", trial.metrics))
            row["state_hash"] = trial.state_hash
            row["error"] = trial.error
            rows.append(row)
        frame: pandas.DataFrame = pandas.DataFrame(rows)
        return frame

    def plot(
        self,
        metric: str | None = None,
        *,
        trials: Sequence[int] | None = None,
        kind: Literal["curves", "parallel", "importance", "gantt"] = "curves",
    ) -> Figure:
        """Draw the run; needs matplotlib.

        Parameters
        ----------
        metric
            What to draw; default: what ranks trials.
        trials
            Numbers of the trials to draw; default: all.
        kind
            ``"curves"`` (metric over epochs), ``"parallel"`` (coordinates),
            ``"importance"`` or ``"gantt"`` (units on workers over time).
        """
        from cerebro.report import plots

        return plots.plot(self, metric, trials=trials, kind=kind)

    def verify(self) -> list[str]:
        """Check every kept state against its checksum and the data against its manifest.

        Returns
        -------
        list of str
            One line per file that was checked.

        Raises
        ------
        CorruptDataError
            Naming the first file that is damaged or missing.
        """
        lines = []
        for trial in self.trials:
            for record in trial._record.epochs:
                if record.state_file is None:
                    continue
                path = self._folder / "states" / record.state_file
                trial._read_state(record)
                lines.append(f"{path}: trial {trial.number}, epoch {record.epoch}")
        for name in ("data", "validation"):
            if self._meta[name] is not None:
                data = self._dataset(name)
                data.verify()
                lines.append(f"{data.path}: {name}, {data.num_shards} shards")
        return lines

    def _repr_html_(self) -> str:
        from cerebro.report.html import render_html

        return render_html(self)

    def __repr__(self) -> str:
        done = sum(r.status in ("finished", "stopped") for r in self._records)
        number = best_trial(self._records, self.metric, self.mode, self.select)
        best = ""
        if number is not None:
            trial = self.trials[number]
            best = f", best {self.metric}={trial.metrics[self.metric]:.4g} (trial {number})"
        return (
            f"Result({str(self._path)!r}, {self.status}, {done} of {len(self._records)} "
            f"trials done{best})"
        )

    # --- for the library itself ------------------------------------------

    def _trial_of(self, record: TrialRecord) -> Trial:
        """Return a trial as it is now; the record goes on."""
        return Trial(self, replace(record, epochs=[replace(epoch) for epoch in record.epochs]))

    def _units(self) -> list[dict[str, Any]]:
        """Every unit that ran; times in seconds since the run's start."""
        with reader(self._folder) as connection:
            rows = connection.execute("SELECT * FROM units ORDER BY started, id").fetchall()
        shards = self._meta["num_shards"]
        return [
            {
                "trial": row["trial"],
                "epoch": row["epoch"],
                "step": row["step"],
                "shard": row["shard"],
                "kind": "train" if row["step"] < shards else "eval",
                "worker": row["worker"],
                "attempt": row["attempt"],
                "start": row["started"],
                "end": row["started"] + row["seconds"],
                "rows": row["rows"],
                "hopped": bool(row["hopped"]),
                "state_bytes": row["state_bytes"],
            }
            for row in rows
        ]

    def _recipe(self) -> Recipe:
        return Recipe.from_json(self._meta["build"])

    def _find_build(self, build: Callable[..., Any] | None) -> Callable[..., Any]:
        if build is not None:
            self._recipe().warn_if_changed(build)
            return build
        if self._build is None:
            self._build = self._recipe().find()
        return self._build

    def _dataset(self, name: str) -> Dataset:
        if name not in self._data:
            self._data[name] = Dataset.from_spec(self._meta[name])
        return self._data[name]

    def _view(self, name: str, moved: Dataset | None) -> Dataset | None:
        """The run's data, or what now stands in its place; `moved` says where it is.

        Of a whole data set the rows that the run trained on are taken: what was given
        to `search` with a fraction to validate on can be given here.
        """
        spec = self._meta[name]
        if spec is None:
            return None
        if moved is not None:
            if name == "data":
                if not moved._is_whole():
                    return moved
                transforms = moved.spec()["transforms"] or spec["transforms"]
                spec = {**spec, "path": str(moved.path), "transforms": transforms}
            elif spec["path"] == self._meta["data"]["path"]:
                spec = {**spec, "path": str(moved.path)}
        return Dataset.from_spec(spec, check=False)

    def _data_for(self, data: Any) -> Dataset:
        """The data set to evaluate on: the given one, or the run's validation data."""
        if isinstance(data, (str, os.PathLike)):
            return Dataset(data)
        if isinstance(data, Dataset):
            return data
        if data is not None:
            raise InputError(
                f"evaluate needs a cerebro.Dataset, not {type(data).__name__}: write one with "
                "cerebro.shard(arrays, folder), or use load() and your own code"
            )
        if self._meta["validation"] is None:
            raise InputError("the run has no validation data: give data=")
        return self._dataset("validation")

    def _context(self, build: Callable[..., Any] | None, **changes: Any) -> RunContext:
        """The run's context, as its workers had it, with some values changed."""
        settings: Mapping[str, Any] = self._meta["settings"]
        values: dict[str, Any] = {
            "build": self._find_build(build),
            "seed": settings["seed"],
            "epochs": settings["epochs"],
            "batch_size": settings["batch_size"],
            "eval_batch_size": settings["eval_batch_size"],
            "drop_last": settings["drop_last"],
            "stagger": settings["stagger"],
            "threads": settings["threads"],
            "loader_threads": 0,
            "deterministic": settings["deterministic"],
            "live_models": 1,
            "live_bytes": 0,
            "state_dir": str(self._folder / "states"),
            "epoch_dir": str(self._folder / "states"),
            "log_dir": str(self._folder / "trials"),
            "torch_flags": self._meta["environment"].get("torch", {}),
        }
        if "train" not in changes:
            has_validation = self._meta["validation"] is not None
            values["train"] = self._dataset("data")
            values["validation"] = self._dataset("validation") if has_validation else None
        return RunContext(**values | changes)


def open_run(
    run: str | os.PathLike[str] | None = None, *, build: Callable[..., Any] | None = None
) -> Result:
    """Open a run: finished, stopped or still going on. Trains nothing.

    Parameters
    ----------
    run
        The run's folder; default: the newest below ``runs``.
    build
        The run's ``build``, where it cannot be imported again.

    Raises
    ------
    InputError
        If there is no such run.
    """
    if run is None:
        found = list(Path("runs").glob(f"*/{FILE}"))
        if not found:
            raise InputError("there is no run below runs/: give the run's folder")
        newest = max(found, key=_started)
        return Result(newest.parent, build=build)
    return Result(run, build=build)


def _started(file: Path) -> float:
    """When a run began; a damaged one is the newest only where there is no other."""
    try:
        with reader(file.parent) as connection:
            return float(read_meta(connection)["started"])
    except CorruptDataError:
        return -math.inf


def read_trials(connection: Any) -> list[TrialRecord]:
    """Read all trials with their epochs."""
    records = {}
    for row in connection.execute("SELECT * FROM trials ORDER BY number"):
        records[row["number"]] = TrialRecord(
            number=row["number"],
            config=decode(row["config"]),
            status=row["status"],
            target_epochs=row["epochs"],
            parent=row["parent"],
            error=row["error"],
            traceback=row["traceback"],
        )
    metrics: dict[tuple[int, int], dict[str, float]] = {}
    for row in connection.execute("SELECT * FROM metrics ORDER BY rowid"):
        value = math.nan if row["value"] is None else row["value"]
        metrics.setdefault((row["trial"], row["epoch"]), {})[row["name"]] = value
    for row in connection.execute("SELECT * FROM epochs ORDER BY trial, epoch"):
        records[row["trial"]].epochs.append(
            EpochRecord(
                epoch=row["epoch"],
                metrics=metrics.get((row["trial"], row["epoch"]), {}),
                seconds=row["seconds"],
                state_hash=row["state_hash"],
                state_file=row["state_file"],
            )
        )
    return list(records.values())


def _flat(prefix: str, mapping: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in mapping.items():
        if isinstance(value, Mapping):
            flat.update(_flat(f"{prefix}.{name}", value))
        else:
            flat[f"{prefix}.{name}"] = value
    return flat


def _torch_imported() -> bool:
    return "torch" in sys.modules
