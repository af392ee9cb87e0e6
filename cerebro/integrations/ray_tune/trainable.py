"""Implement `cerebro.ray.trainable`: the trainable of a `ray.tune.Tuner`.

A trial of Tune is a proxy, a process that does not train: it requests epochs from the engine and
reports them. Its checkpoints are names of states, which stay in the run's folder.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import ray
from ray import tune
from ray.exceptions import RayActorError

from cerebro.api.settings import devices_of
from cerebro.arguments import check_whole_number, worker_count
from cerebro.cluster.engine import collect_variables
from cerebro.cluster.engines.ray import Executor
from cerebro.data.validation import make_validation
from cerebro.errors import InputError, RunError
from cerebro.executors.wire import pickle_context
from cerebro.integrations.ray_tune.engine import PROXY_BYTES, Spec, Work, get_engine
from cerebro.machine.devices import CPU, are_gpus, name_devices
from cerebro.machine.environment import THREAD_VARIABLES
from cerebro.machine.files import path_of
from cerebro.machine.libraries import present_settings
from cerebro.machine.resources import usable_cores
from cerebro.run.recipe import check_build
from cerebro.run.settings import MAX_THREADS
from cerebro.space import json_value

FOLDER = "cerebro"  # the name of the run's folder, in the folder of Tune's experiment
TOKEN = "cerebro.json"
ATTEMPTS = 3
LEAVE_SECONDS = 10.0
PATIENCE_SECONDS = 30.0

logger = logging.getLogger(__name__)

OPTIONS = {
    "eval_batch_size", "drop_last", "shuffle", "seed", "max_retries", "unit_timeout", "stagger",
    "live_models", "deterministic", "state_dir", "metric", "mode", "select", "keep",
}  # fmt: skip
"""The arguments of `cerebro.search` that apply to all trials and are not decided by Tune."""


def trainable(
    build: Callable[..., Any],
    data: Any,
    *,
    validation: Any = None,
    batch_size: int | None = None,
    workers: int | None = None,
    threads: int = 1,
    epochs: int | None = None,
    run: str | os.PathLike[str] | None = None,
    executor: Executor | None = None,
    devices: Any = "auto",
    workers_per_device: int | None = None,
    **options: Any,
) -> type[tune.Trainable]:
    """Return a `ray.tune.Trainable` for ``tune.Tuner(...)`` whose trials Cerebro trains.

    Schedulers, search algorithms, callbacks, loggers, `ResultGrid`, `Tuner.restore` and
    ``reuse_actors`` work unchanged. A trial is a process of about 120 MB without data or model,
    which requests 0 CPUs and this memory. For hundreds of live trials use `cerebro.ray.fit`, which
    needs no such processes. All trials share one engine on the Tuner's node; the engine has the
    workers.

    Parameters
    ----------
    build, data, validation, batch_size, threads, workers_per_device
        As for `cerebro.search`. The metrics of every epoch are reported to Tune, under their short
        names and as ``train_*`` and ``val_*``, with ``training_iteration``, ``cerebro_trial``
        (Cerebro's number of the trial) and ``state_hash``.
    workers
        The number of worker processes. Default: one per `threads` of the cores of this machine that
        Ray has, or `workers_per_device` for each GPU.
    epochs
        The number of epochs of a trial, if known: the trial ends after them, and ``info.epochs`` is
        this number. None: Tune ends trials, and ``info.epochs`` and ``info.total_steps`` raise
        InputError in ``build``.
    run
        The folder of Cerebro's run, with its states; default: ``cerebro`` in the folder of Tune's
        experiment, if that is on this machine.
    executor
        A `cerebro.ray.Executor`; its actors on the nodes of the cluster are then the workers,
        instead of processes on this machine.
    devices
        ``"auto"``: all GPUs of this machine that Ray has, or the CPU if it has none; ``"cuda"``:
        all GPUs; ``"cpu"``. Ray chooses the engine's GPUs. With `executor`, as for
        `cerebro.search`.
    options
        Further arguments of `cerebro.search`: ``seed``, ``eval_batch_size``, ``drop_last``,
        ``shuffle``, ``max_retries``, ``unit_timeout``, ``stagger``, ``live_models``,
        ``deterministic``, ``state_dir``, ``keep``; ``metric``, ``mode`` and ``select`` are for
        Cerebro's record.

    Raises
    ------
    InputError
        If an argument is invalid.

    Notes
    -----
    Trials are numbered in the order in which they request their first epoch. A trial's states are
    the same as with `cerebro.search` for this number: `cerebro.replay` of the run verifies this.
    """
    check_build(build)
    train, held_out, folds = make_validation(data, validation)
    if folds is not None:
        raise InputError(
            "validation: a trial of Tune has one model, but folds need several: give a dataset or "
            "a fraction, or use cerebro.ray.fit"
        )
    unknown = sorted(options.keys() - OPTIONS)
    if unknown:
        raise InputError(
            f"{unknown[0]}= is not an argument of cerebro.ray.trainable, which takes "
            f"{', '.join(sorted(OPTIONS))} besides its named ones: Tune decides which trials "
            "run and how long they train"
        )
    threads = check_whole_number("threads", threads, 1, MAX_THREADS)
    batch_size = check_whole_number("batch_size", batch_size, 1, optional=True)
    if executor is not None and not isinstance(executor, Executor):
        raise InputError(f"executor must be a cerebro.ray.Executor, not {executor!r}")
    if executor is not None and workers is not None:
        raise InputError("give either workers= or executor=, which has its own workers")
    epochs = check_whole_number("epochs", epochs, 1, optional=True)
    options = {"batch_size": batch_size, **options}
    check_whole_number("workers", workers, 1, optional=True)
    gpus = 0
    if executor is None:
        gpus, count = _count_gpus_and_workers(devices, workers, workers_per_device, threads)
    else:
        devices_of(devices, workers_per_device, executor)
        options["devices"], count = devices, 1
    work = Work(build, train, held_out, count, threads, epochs, options, executor, gpus)
    spec = Spec(
        name=f"cerebro-{uuid.uuid4().hex}",
        work=pickle_context(work),
        cpus=count * threads if executor is None else 0,
        epochs=epochs,
        folder=None if run is None else str(path_of("run", run).resolve()),
        cwd=str(Path.cwd()),
        path=tuple(sys.path),
        argv=tuple(sys.argv),
        variables={name: os.environ.get(name) for name in THREAD_VARIABLES} | collect_variables(),
        gpus=gpus,
        libraries=present_settings(),
    )
    title = getattr(build, "__name__", "cerebro").strip("<>")
    return type(title, (Proxy,), {"spec": spec, "__module__": __name__, "__doc__": build.__doc__})


def _count_gpus_and_workers(
    devices: Any, workers: int | None, workers_per_device: int | None, threads: int
) -> tuple[int, int]:
    """Return the numbers of GPUs and workers that the engine has."""
    names = name_devices(devices)
    if any(":" in name for name in names):
        raise InputError(
            f"devices={devices!r}: Ray chooses the GPUs of the engine of cerebro.ray.trainable: "
            "give 'auto', 'cuda' or 'cpu'"
        )
    selected = devices_of(devices, workers_per_device, None)
    if are_gpus(selected) and names == ["auto"]:
        selected = selected[: _limit_to_ray("GPU", len(selected))] or (CPU,)
    if not are_gpus(selected) and workers is None:
        workers = max(1, _limit_to_ray("CPU", usable_cores()) // threads)
    count = worker_count(workers, threads, selected, workers_per_device)
    return len(selected) if are_gpus(selected) else 0, count


def _limit_to_ray(resource: str, here: int) -> int:
    """Return `here`, or the smaller number that Ray has on this node, if Ray is initialized."""
    if not ray.is_initialized():
        return here
    return min(here, int(ray.cluster_resources().get(resource, 0)))


class Proxy(tune.Trainable):  # type: ignore[misc]
    """A trial of Tune; see the module's docstring."""

    spec: ClassVar[Spec]

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        """Request only memory, and start the engine: Tune calls this where the Tuner runs."""
        get_engine(cls.spec, owner=True)
        return tune.PlacementGroupFactory([{"CPU": 0, "memory": PROXY_BYTES}])

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        # A subclass made by `tune.with_resources` requests other resources: also start the engine
        # there.
        if (method := cls.__dict__.get("default_resource_request")) is None:
            return

        def request(cls: type[Proxy], config: dict[str, Any]) -> Any:
            get_engine(cls.spec, owner=True)
            return method.__func__(cls, config)

        cls.default_resource_request = classmethod(request)  # type: ignore[assignment]

    # --- Tune's protocol -------------------------------------------------

    def setup(self, config: dict[str, Any], **parameters: Any) -> None:
        if parameters:
            raise InputError(
                f"tune.with_parameters({', '.join(sorted(parameters))}) is not for "
                "cerebro.ray.trainable: bind them to build, as with functools.partial"
            )
        self._id = uuid.uuid4().hex
        self._config = json_value(config, "param_space", keep_tuples=True)
        self._trial: int | None = None
        self._at: dict[str, Any] | None = None  # the trial's newest state
        self._begin: dict[str, Any] | None = None  # the checkpoint to begin with
        self._engine = get_engine(self.spec, owner=False)
        self._enter()

    def step(self) -> dict[str, Any]:
        at = self._at or self._begin
        answer = self._call_engine(
            "train",
            {
                "owner": self.trial_id,
                "config": self._config,
                "trial": self._trial,
                "begin": self._begin if self._at is None else None,
                "target": 1 if at is None else at["epoch"] + 2,
            },
        )
        if "error" in answer:
            raise RunError(answer["error"])
        metrics = answer.pop("metrics")
        self._at, self._trial = answer, answer["trial"]
        done = self.spec.epochs is not None and answer["epoch"] + 1 >= self.spec.epochs
        names = {"cerebro_trial": answer["trial"], "state_hash": answer["state_hash"]}
        return {**metrics, **names, "done": done}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Write the name of the state, which stays in the run's folder."""
        token: dict[str, Any] = {"point": self._at or self._begin, "owner": None, "config": None}
        if self._at is not None:
            self._call_engine("keep", self._at)
            token |= {"owner": self.trial_id, "config": self._config}
        Path(checkpoint_dir, TOKEN).write_text(json.dumps(token))

    def load_checkpoint(self, checkpoint: str) -> None:
        """Continue the trial from its state, or start a clone from a different trial's state."""
        try:
            token = json.loads(Path(checkpoint, TOKEN).read_text())
            point, owner, config = token["point"], token["owner"], token["config"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{checkpoint} is not a checkpoint of cerebro.ray.trainable"
            ) from error
        # The token is JSON, which has no tuples.
        is_own = owner == self.trial_id and config == json_value(self._config, "param_space")
        self._at, self._begin = None, point
        self._trial = point["trial"] if is_own else None

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Run a different trial, or this one with different hyperparameters."""
        self.cleanup()
        self.setup(new_config)
        return True

    def cleanup(self) -> None:
        """Disconnect from the engine, which ends when no trial uses it; also between two trials."""
        with contextlib.suppress(Exception):  # the engine has ended
            ray.get(self._engine.leave.remote(self._id, self._trial), timeout=LEAVE_SECONDS)

    # --- the engine ------------------------------------------------------

    def _enter(self) -> None:
        """Wait for the engine; log a warning if this takes long."""
        entered = self._engine.enter.remote(self._id, self._find_run_folder())
        while not ray.wait([entered], timeout=PATIENCE_SECONDS)[0]:
            logger.warning(
                "the engine of cerebro.ray.trainable waits for %d CPUs and %d GPUs of this Ray "
                "cluster, which are in use: free them, or give fewer workers=",
                self.spec.cpus,
                self.spec.gpus,
            )
        ray.get(entered)

    def _call_engine(self, method: str, argument: dict[str, Any]) -> Any:
        """Call the engine; start a new one if it has ended."""
        for attempt in range(ATTEMPTS):
            try:
                call = getattr(self._engine, method).remote(
                    self._id, self._find_run_folder(), argument
                )
                return ray.get(call)
            except RayActorError:
                if attempt + 1 == ATTEMPTS:
                    raise
            self._engine = get_engine(self.spec, owner=False)
        raise AssertionError

    def _find_run_folder(self) -> str:
        """Return the run's folder; raise InputError if only Tune can write to it."""
        if self.spec.folder is not None:
            return self.spec.folder
        storage = self._storage
        if storage is None or storage.storage_filesystem.type_name != "local":
            raise InputError(
                "Tune stores this experiment elsewhere: give cerebro.ray.trainable(run=) a folder "
                "on this machine, where the states of trials are kept"
            )
        return str(Path(storage.experiment_fs_path, FOLDER))
