"""Runs units: one trial over one shard, from its committed state to the next.

A `UnitRunner` lives in every worker process, and in the coordinator's own when
``workers=0``. It keeps models alive between units; a trial that stays pays for
packing its state, not for unpacking it. What a unit does, in order:

1. take the live model, or build one and load the trial's committed state;
2. give the trial its random generators back;
3. train on the shard's batches (in C: `_core.run_unit`), or evaluate;
4. at an epoch's end call ``end_epoch`` and complete the metrics;
5. pack model, generators and progress into the slot that is not committed,
   seal it with its hash, and commit it.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import sysconfig
import time
import traceback
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from cerebro import _core, device_check, environment, generators, growth, memory
from cerebro.data import depots
from cerebro.data.batches import make_trusted
from cerebro.device_batches import MovedBatches
from cerebro.device_states import StateArena
from cerebro.device_values import BatchSource, run_batches
from cerebro.devices import building_on, is_gpu
from cerebro.environment import set_torch_flags
from cerebro.epoch_progress import EpochProgress
from cerebro.errors import (
    CorruptDataError,
    InputError,
    StateError,
    UnitCancelled,
    one_line,
    text_of,
)
from cerebro.guard import in_trial
from cerebro.protocol import Info, check_model, whole_pass
from cerebro.recipe import accepts_info
from cerebro.sources import PACKAGE
from cerebro.state_files import epoch_state_file, read_state, unpublished
from cerebro.storage import ExhaustedError, StorageError, is_full, storing
from cerebro.torch_settings import compute_settings, operations_noted
from cerebro.trial import class_name, plain
from cerebro.trial_log import append, log_path, redirected_descriptors, redirected_streams
from cerebro.trial_warnings import Watch
from cerebro.unit import (
    LIBRARIES,
    CloneOf,
    RunContext,
    Task,
    UnitDone,
    UnitFailed,
    UnitSums,
)

MAX_LIVE_MODELS = 8
MAX_OPEN_SLOTS = 64
MAX_LOADERS = 8
MAX_GPU_LOADERS = 4  # each has batches in device memory and in pinned memory
"""Of a run with folds two for each fold, if that is more."""
TRY_SECONDS = 2 * device_check.SECONDS
"""What the first use of a GPU may take: the check, and kernels that are compiled here again."""
_TORCH_TYPES = {
    "double": "float64",
    "float64": "float64",
    "float": "float32",
    "float32": "float32",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "char": "int8",
    "byte": "uint8",
}
"""Types as PyTorch's messages call them."""

_STDLIB = sysconfig.get_path("stdlib") + os.sep

Loader = _core.Loader | MovedBatches


@dataclass
class LiveModel:
    """A model in memory and the position (committed units) its state is at."""

    model: Any
    torch: bool
    cuda: bool = False
    """Whether it computes on a GPU, so that CUDA's generator belongs to its state."""
    position: int = -1
    epochs: int | None = None
    """What its ``info.epochs`` was, where it is not the run's."""
    generators: dict[str, Any] = field(default_factory=dict)
    progress: EpochProgress = field(default_factory=EpochProgress)
    state_bytes: int = 0


class Diverged(Exception):
    """A loss that is no finite number."""


class TaskClock(Protocol):
    """Told what a worker's time goes into; see `cerebro._worker`."""

    def built(self) -> None:
        """A model is built, and what it needs imported."""

    def aside(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        """What is done within is not the unit's, and has this much time of its own."""


class UnitRunner:
    """Runs the units of one run; see the module's text.

    Parameters
    ----------
    context
        What the run is.
    worker
        This worker's number, repeated in every answer.
    beat
        The page shared with the coordinator: beats, and the flag that cancels.
    own_process
        Whether the process is a worker's: then what trials print is caught by
        redirecting its standard output and error, and nobody but trials uses
        its random generators.
    clock
        Hears when a model is built.
    """

    def __init__(
        self,
        context: RunContext,
        *,
        worker: int,
        beat: _core.BeatPage | None = None,
        own_process: bool = False,
        clock: TaskClock | None = None,
    ) -> None:
        self.context = context
        self.worker = worker
        self._beat = beat
        self._own_process = own_process
        self._clock = clock
        self._live: OrderedDict[int, LiveModel] = OrderedDict()
        self._slots: OrderedDict[int, _core.Slots] = OrderedDict()
        self._loaders: OrderedDict[tuple[bool, int, str, int, int | None], Loader] = OrderedDict()
        self._arena = StateArena()  # for states of models on a GPU
        self._verified: set[tuple[bool, int]] = set()
        self._last_trial: int | None = None  # whose generators are in place
        self._moved = ""  # why PyTorch moves batches to the GPU
        self._tried = False  # the GPU, if there is one
        self.warnings = Watch(context.warning_filters if own_process else ())
        set_torch_flags(context.torch_flags)

    # --- units -----------------------------------------------------------

    def run(self, task: Task) -> UnitDone | UnitFailed:
        """Run one unit; never raises for what the user's code, data or disk did."""
        with self.warnings.of(task.trial) as warned:
            event = self._run_or_fail(task)
        return replace(event, warned=tuple(warned)) if warned else event

    def _run_or_fail(self, task: Task) -> UnitDone | UnitFailed:
        try:
            with self.output_of(task.trial):
                try:
                    return self._run_with_room(task)
                except BaseException as error:
                    if not self.is_of_the_trial(error):
                        raise
                    return self._failure(task, error)
        except StorageError as error:  # not even the log can be written
            return self._failure(task, error)

    def _run_with_room(self, task: Task) -> UnitDone:
        """Run a unit; if the GPU's memory is short for it, once more without other live models."""
        try:
            return self._run(task)
        except Exception as error:
            if not (is_gpu(self.context.device) and is_short_of_gpu_memory(error)):
                raise
            traceback.clear_frames(error.__traceback__)  # they hold what is to be given back
            others = tuple(trial for trial in self._live if trial != task.trial)
            self._release((*others, task.trial))
            while self._loaders:
                self._loaders.popitem()[1].close()
            if give_back_memory(self.context.device) == 0 and not others:
                raise
        done = self._run(task)
        return replace(done, dropped=(*others, *done.dropped))

    def is_of_the_trial(self, error: BaseException) -> bool:
        """Whether the user's code raised it: inline, Ctrl-C is for the run."""
        return self._own_process or not isinstance(error, KeyboardInterrupt)

    def _failure(self, task: Task, error: BaseException) -> UnitFailed:
        """Say who is to blame: the trial, the data, or the disk that the run is on."""
        self._live.pop(task.trial, None)  # its state is somewhere in the middle
        kind: Literal["error", "diverged", "cancelled", "data", "storage", "worker"] = "error"
        if isinstance(error, UnitCancelled):
            kind = "cancelled"
        elif isinstance(error, Diverged):
            kind = "diverged"
        elif isinstance(error, CorruptDataError) or _names_data(error, self.context):
            kind = "data"
        elif self._own_process and (isinstance(error, ExhaustedError) or self._lost_gpu()):
            kind = "worker"
        elif isinstance(error, StorageError) or is_full(error):
            kind = "storage"
        bases: tuple[str, ...] = ()
        place = ""
        if kind != "error":
            cause, text = text_of(error, 2000), ""
        else:
            bases, place = bases_of(error), place_of(error)
            cause = self.cause(error, plain(task.config))
            text = traceback_of(error)
        if kind in ("error", "diverged"):
            append(log_path(self.context.log_dir, task.trial), text or cause)
        return UnitFailed(self.worker, task, kind, cause, text, (task.trial,), bases, place)

    def cause(self, error: BaseException, config: Mapping[str, Any]) -> str:
        """What went wrong in the user's code, and what helps where that is known."""
        columns = self.context.train.columns
        hints = (
            missing_name(error, config, columns),
            misplaced(error, self.context.device),
            unlike_types(error, columns),
        )
        return describe(error) + "".join(hints)

    def _lost_gpu(self) -> bool:
        """Whether the process can use its GPU no more, as after an assertion that failed there."""
        torch = sys.modules.get("torch")
        if torch is None or not is_gpu(self.context.device) or not torch.cuda.is_initialized():
            return False
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return True
        return False

    def _run(self, task: Task) -> UnitDone:
        context = self.context
        started = time.time()
        clock = time.perf_counter()
        evaluating = task.step == context.train.num_shards
        self._release(task.ended)
        slots = self._slots_of(task.trial)
        self._settle(task, slots)
        live, loaded = self._model_of(task, slots)
        before = memory.usage()
        not_exact: set[str] = set()
        with self.computing(not_exact):
            live.progress.begin_unit(task.epoch, task.step)
            if task.step == 0 and hasattr(live.model, "begin_epoch"):
                live.model.begin_epoch(task.epoch)
            result = self._evaluate(live, task) if evaluating else self._train(live, task)
            metrics = None
            if task.step == context.units_per_epoch - 1:
                metrics = live.progress.epoch_metrics()
                if hasattr(live.model, "end_epoch"):
                    # A copy: what is reported is what the state says, whoever reads it.
                    live.model.end_epoch(task.epoch, dict(metrics))
            live.generators = generators.capture(live.torch, live.cuda)
            tree = self.packable(live)
            with storing():
                live.state_bytes = slots.pack(tree, attempt=task.dispatch)
                packed_hash = slots.commit(task.position + 1)
        live.position = task.position + 1
        self._last_trial = task.trial
        after = memory.usage()
        state_hash = state_file = None
        if metrics is not None:
            state_hash = packed_hash
            if task.keep_state:
                state_file = epoch_state_file(task.trial, task.epoch)
                with storing():
                    name = unpublished(state_file, state_hash)
                    slots.save(str(Path(context.epoch_dir, name)))
        return UnitDone(
            worker=self.worker,
            task=task,
            rows=result.rows,
            batches=result.batches,
            sums=result.sums,
            started=started,
            seconds=time.perf_counter() - clock,
            loaded=loaded,
            state_bytes=live.state_bytes,
            metrics=metrics,
            state_hash=state_hash,
            state_file=state_file,
            dropped=self._shrink(task.trial),
            libraries=tuple(name for name in LIBRARIES if name in sys.modules),
            resident=0 if after is None else after.resident,
            grown=growth.unexplained(before, after, loaded=loaded, state_bytes=live.state_bytes),
            packed_hash=packed_hash,
            not_exact=tuple(sorted(not_exact)),
            moved=self._moved,
        )

    def _train(self, live: LiveModel, task: Task) -> UnitSums:
        batch_size = batch_size_of(task.config, self.context.batch_size)
        self._verify(True, task.shard)
        loader = self.loader(live.model, batch_size, training=True, trial=task.trial)
        loader.begin([task.shard], task.epoch)
        depots.tell_first_note(loader)
        step, device = live.model.train_batch, self.device_of(live.model)
        result = run_batches(loader, step, beat=self._beat, device=device)
        sums = UnitSums(result.rows, result.batches, result.sums)
        if hasattr(live.model, "end_unit"):
            live.model.end_unit()
        live.progress.add_training(sums.sums)
        loss, weight = sums.sums.get("loss", (0.0, 0.0))
        if weight and not math.isfinite(loss):
            raise Diverged(divergence(task, loss / weight, result.not_finite.get("loss")))
        return sums

    def _evaluate(self, live: LiveModel, task: Task) -> UnitSums:
        """Validate with generators of its own, so that training cannot notice."""
        context = self.context
        batch_size = context.eval_batch_size or batch_size_of(task.config, context.batch_size)
        _, validation = context.views(task.trial)
        assert validation is not None
        shards = range(validation.num_shards)
        for shard in shards:
            self._verify(False, shard)
        loader = self.loader(live.model, batch_size, training=False, trial=task.trial)
        loader.begin(shards, 0)
        depots.tell_first_note(loader)
        seed = evaluation_seed(context.seed, task.trial, task.epoch)
        with generators.preserved(live.torch, seed):
            device = self.device_of(live.model)
            result, metrics = evaluate_model(live.model, loader, self._beat, device)
        live.progress.add_validation(metrics)
        return result

    # --- models ----------------------------------------------------------

    def _model_of(self, task: Task, slots: _core.Slots) -> tuple[LiveModel, bool]:
        """Return the trial's model at the task's position, its generators restored."""
        live = self._live.pop(task.trial, None)
        if live is not None and live.epochs != task.epochs:
            live = None  # it was built for another number of epochs
        begins = task.position == 0 or task.clone_of is not None
        if live is not None and begins and live.position != task.position:
            live = None  # its states are lost, and it begins once more
        loaded = False
        if live is None:
            live = self.build(task.trial, task.config, task.epochs)
            if task.clone_of is not None:
                self._load_clone(live, task, task.clone_of)
                loaded = True
            elif task.position == 0:
                live.position = 0
        if live.position != task.position:
            with self.computing():
                self._load(live, task, slots)
            loaded = True
        if loaded or task.trial != self._last_trial or not self._own_process:
            generators.restore(live.generators)
        self._last_trial = None  # until the unit has ended well
        self._live[task.trial] = live
        return live, loaded

    def build(self, trial: int, config: Mapping[str, Any], epochs: int | None = None) -> LiveModel:
        """Build a trial's model; `epochs` is what it is told, None: the run's."""
        info = self.info_of(trial, config, epochs)
        model, torch = build_model(self.context, trial, config, info)
        if self._clock is not None:
            self._clock.built()
        if not self._tried and is_gpu(where := self.device_of(model)):
            self._try_device(where)
        self.warnings.take_filters()  # of what was imported for it
        cuda = torch and (is_gpu(self.context.device) or generators.uses_cuda(model))
        state = generators.capture(torch, cuda)
        return LiveModel(model, torch, cuda, epochs=epochs, generators=state)

    def _try_device(self, device: str) -> None:
        """Try the GPU, and have its kernels compiled, which is not the unit's time."""
        aside = contextlib.nullcontext() if self._clock is None else self._clock.aside(TRY_SECONDS)
        with aside, contextlib.suppress(MemoryError):  # the loader will say so
            depots.problem(device)
            self._tried = True

    def _settle(self, task: Task, slots: _core.Slots) -> None:
        """Shut out whoever was given this unit before, and make its state the newest.

        From here on a worker that was given up for dead cannot commit. One that
        died after its commit and before its answer has left a state that the
        coordinator never heard of: the unit is done again from the one before.
        """
        slots.fence(task.dispatch)
        if task.position == 0 or task.clone_of is not None or task.origin is not None:
            return  # it begins with a state that is not in the slots, or with none
        committed = slots.committed()
        if committed is not None and committed[0] == task.position + 1:
            slots.revert(attempt=task.dispatch, position=task.position)

    def _load(self, live: LiveModel, task: Task, slots: _core.Slots) -> None:
        if task.origin is not None:
            self.load_packed(live, read_state(task.origin))
            live.position = task.position
            return
        committed = slots.committed()
        if committed is None or committed[0] != task.position:
            at = "nothing" if committed is None else f"unit {committed[0]}"
            raise StateError(
                f"trial {task.trial}: expected the state of unit {task.position} in "
                f"{self._stem(task.trial)}, found {at}"
            )
        self.load_packed(live, slots.view())
        live.position = task.position

    def _load_clone(self, live: LiveModel, task: Task, clone_of: CloneOf) -> None:
        """Give a new trial the model of another one, but generators of its own."""
        packed = read_state(clone_of)
        state = _core.unpack_state(packed, "torch" if live.torch else "numpy")["model"]
        with self.computing():
            if hasattr(live.model, "load_clone"):
                live.model.load_clone(state, plain(task.config))
            else:
                live.model.load_state_dict(state)
        live.position = task.position

    def _shrink(self, current: int) -> tuple[int, ...]:
        """Give up the models used longest ago; return their trials."""
        context = self.context
        limit = context.live_models
        if limit is None:
            size = 3 * max(1, self._live[current].state_bytes)
            limit = max(1, min(MAX_LIVE_MODELS, context.live_bytes // size))
        dropped = []
        while len(self._live) > limit:
            trial, _ = self._live.popitem(last=False)
            dropped.append(trial)
        while len(self._slots) > MAX_OPEN_SLOTS:
            trial = next(iter(self._slots))
            self._slots.pop(trial).close()
        return tuple(dropped)

    def _release(self, ended: Sequence[int]) -> None:
        """Free the models and the slots of trials that have ended.

        Their files are deleted, but take room as long as they are mapped.
        """
        for trial in ended:
            self._live.pop(trial, None)
            self.warnings.forget(trial)
            slots = self._slots.pop(trial, None)
            if slots is not None:
                slots.close()

    def info_of(self, trial: int, config: Mapping[str, Any], epochs: int | None = None) -> Info:
        context = self.context
        return make_info(
            context.views(trial)[0],
            trial=trial,
            seed=context.seed,
            epochs=context.epochs if epochs is None else epochs,
            batch_size=batch_size_of(config, context.batch_size),
            drop_last=context.drop_last,
            fold=context.fold_of(trial),
            device=context.device,
        )

    # --- devices ---------------------------------------------------------

    def device_of(self, model: Any) -> str:
        """Where a model's batches arrive and its metrics are: of PyTorch's, the run's device."""
        return batch_device(model, self.context.device)

    @contextlib.contextmanager
    def computing(self, not_exact: set[str] | None = None) -> Iterator[None]:
        """Compute under the run's settings; note what on a GPU is not deterministic."""
        context = self.context
        with compute_settings(context.threads, context.deterministic, context.device):
            if context.device == "cpu" or context.deterministic != "warn":
                yield
                return
            with operations_noted(set() if not_exact is None else not_exact):
                yield

    def packable(self, live: LiveModel) -> dict[str, Any]:
        """Everything that a trial carries, in host memory: what is on a GPU is copied."""
        tree = pack_tree(live)
        if self.device_of(live.model) == "cpu":
            return tree
        return self._arena.to_host(tree)  # type: ignore[no-any-return]

    def load_packed(self, live: LiveModel, buffer: Any) -> None:
        """Load a packed state into a live model, wherever that is."""
        load_tree(live, buffer, self.device_of(live.model), self._arena)

    # --- data and files --------------------------------------------------

    def forget_generators(self) -> None:
        """Restore the generators of whichever trial runs next, because others are in place."""
        self._last_trial = None

    def loader(self, model: Any, batch_size: int, *, training: bool, trial: int) -> Loader:
        """Return a loader; a few are kept, because their buffers are warm."""
        context = self.context
        framework = getattr(model, "framework", "dlpack")
        train, validation = context.views(trial)
        data = train if training else validation
        assert data is not None
        key = (training, batch_size, framework, data.generation, context.fold_of(trial))
        loader = self._loaders.pop(key, None)
        if loader is None:
            loader = make_batches(
                *(model, data, batch_size, context.device),
                seed=context.seed,
                shuffle=training,
                drop_last=training and context.drop_last,
                threads=context.loader_threads,
                augment=training,
            )
            depots.limit(loader, context.data_bytes)
            self._moved = self._moved or getattr(loader, "why", "")
        self._loaders[key] = loader
        most = MAX_GPU_LOADERS if is_gpu(context.device) else MAX_LOADERS
        if len(self._loaders) > max(most, 2 * len(context.folds or ())):
            self._loaders.popitem(last=False)[1].close()
        return loader

    def _verify(self, training: bool, shard: int) -> None:
        """Check a shard's checksums at its first use in this run, its files' sizes always."""
        # Folds are validated on files of the training data.
        training = training or self.context.folds is not None
        key = (training, shard)
        data = self.context.train if training else self.context.validation
        assert data is not None
        if not self.context.verify or key in self._verified:
            data.check_sizes(shard)
            return
        data.verify_shard(shard)
        self._verified.add(key)

    def _stem(self, trial: int) -> str:
        return str(Path(self.context.state_dir, f"{trial}"))

    def _slots_of(self, trial: int) -> _core.Slots:
        slots = self._slots.pop(trial, None)
        if slots is None:
            with storing():
                slots = _core.Slots(self._stem(trial), True)
        self._slots[trial] = slots
        return slots

    @contextlib.contextmanager
    def output_of(self, trial: int | None) -> Iterator[None]:
        """Send what is printed to the trial's log; to nobody while nothing is recorded."""
        path = log_path(self.context.log_dir, trial)
        with redirected_descriptors(path) if self._own_process else redirected_streams(path):
            yield

    # --- the end ---------------------------------------------------------

    def close(self) -> None:
        """Release models, loaders and mapped files, and memory of the GPU that is kept for more."""
        self._live.clear()
        self._arena = StateArena()
        for loader in self._loaders.values():
            loader.close()
        self._loaders.clear()
        for slots in self._slots.values():
            slots.close()
        self._slots.clear()
        give_back_memory(self.context.device)


# --- what replay, check and Trial.load share with the runner -----------------


def build_model(
    context: RunContext, trial: int, config: Mapping[str, Any], info: Info
) -> tuple[Any, bool]:
    """Seed the generators and call the user's ``build``; return model and uses-torch.

    If ``build`` is the first to import PyTorch, it is called once more, so that
    the first model too is made under the run's threads and flags.
    """
    for _ in range(2):
        had_torch = "torch" in sys.modules
        generators.seed_all(info.seed, had_torch)
        settings = compute_settings(context.threads, context.deterministic, info.device)
        xla = environment.xla_threads(context.threads)
        with settings, xla, building_on(info.device), in_trial():
            model = (
                context.build(dict(config), info)
                if accepts_info(context.build)
                else context.build(dict(config))
            )
        if had_torch or "torch" not in sys.modules:
            break
        set_torch_flags(context.torch_flags)
    check_model(model)
    if hasattr(model, "bind_info"):
        model.bind_info(info)
    uses_torch = generators.uses_torch(model)
    if uses_torch and is_gpu(info.device):
        # Before another trial is built: the GPU's generator takes the seed that was given last.
        sys.modules["torch"].cuda.init()
    return model, uses_torch


def make_info(
    data: Any,
    *,
    trial: int,
    seed: int,
    epochs: int,
    batch_size: int,
    drop_last: bool,
    fold: int | None = None,
    device: str = "cpu",
) -> Info:
    """Describe the trial to ``build``; steps count batches over all shards."""

    steps = sum(_core.batch_count(rows, batch_size, drop_last) for rows in data.shard_rows())
    if steps == 0:
        raise InputError(
            f"trial {trial}: batch_size {batch_size} with drop_last leaves no batch: the largest "
            f"of {data.num_shards} shards has {max(data.shard_rows())} rows; make it smaller"
        )
    return Info(
        epochs=epochs,
        steps_per_epoch=steps,
        total_steps=steps * epochs,
        batch_size=batch_size,
        trial=trial,
        seed=_core.trial_seed(seed, trial),
        device=device,
        columns=data.columns,
        classes=data.classes,
        data=data,
        fold=fold,
    )


def batch_size_of(config: Mapping[str, Any], default: int | None) -> int:
    """Return the configuration's batch size, or the search's: it is given once.

    Raises
    ------
    InputError
        If it is given twice, nowhere, or is no batch size.
    """
    if "batch_size" in config and default is not None:
        raise InputError(
            "batch_size is given twice, to search() and in the space: leave out one of them"
        )
    value = config.get("batch_size", default)
    if value is None:
        raise InputError(
            "batch_size is missing: give it to search(batch_size=...) or put it into the space"
        )
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
        raise InputError(f"batch_size must be a whole number from 1 to {2**31 - 1}, not {value!r}")
    return value


def batch_device(model: Any, device: str) -> str:
    """Where a model's batches arrive: of PyTorch's on `device`, of others in host memory."""
    return device if getattr(model, "framework", "dlpack") == "torch" else "cpu"


def make_batches(model: Any, data: Any, batch_size: int, device: str, **options: Any) -> Loader:
    """Return a loader that gives a model its batches, where it wants them.

    On a GPU they are made there only if it can be trusted; see `make_trusted`.
    """
    options["framework"] = getattr(model, "framework", "dlpack")
    loader = make_trusted(data, batch_size, device=batch_device(model, device), **options)
    if isinstance(loader, MovedBatches):
        depots.tell(depots.moving(loader.why))
    return loader


def is_short_of_gpu_memory(error: BaseException) -> bool:
    """Whether PyTorch, one of its libraries, or the loader has found no memory on a GPU."""
    torch = sys.modules.get("torch")
    if isinstance(error, MemoryError):
        return True
    if torch is not None and isinstance(error, torch.cuda.OutOfMemoryError):
        return True
    # CUDA itself, cuBLAS and cuDNN take memory beside PyTorch's allocator.
    texts = ("CUDA error: out of memory", "STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


def give_back_memory(device: str) -> int:
    """Give back what is kept of a GPU's memory for later; return the bytes of shards among it."""
    torch = sys.modules.get("torch")
    shards = depots.drop(device) if is_gpu(device) else 0
    if is_gpu(device) and torch is not None:
        torch.cuda.empty_cache()
    return shards


def evaluation_seed(seed: int, trial: int, epoch: int) -> int:
    """The seed of a validation pass, below 2**32."""
    return int(_core.random_doubles(1, seed, "eval", trial, epoch)[0] * 2**32)


def evaluate_model(
    model: Any, loader: BatchSource, beat: _core.BeatPage | None = None, device: str = "cpu"
) -> tuple[UnitSums, dict[str, float]]:
    """Run a model over a loader's batches; return counts and mean metrics."""
    evaluate = whole_pass(model)
    if evaluate is None:
        result = run_batches(loader, model.eval_batch, beat=beat, device=device)
        sums = UnitSums(result.rows, result.batches, result.sums)
        return sums, {name: ratio(pair) for name, pair in sums.sums.items()}
    counter = CountedBatches(loader, beat)
    metrics = whole_metrics(evaluate(counter))
    weight = float(counter.rows_seen)
    pairs = {name: (value * weight, weight) for name, value in metrics.items()}
    return UnitSums(counter.rows_seen, counter.batches_seen, pairs), metrics


def whole_metrics(returned: Any) -> dict[str, float]:
    """Check what a model's ``evaluate`` returned: names that can be stored, and numbers."""
    if not isinstance(returned, Mapping):
        raise TypeError(f"evaluate must return a dict of metrics, not {type(returned).__name__}")
    metrics = {}
    for name, value in returned.items():
        if not isinstance(name, str):
            raise TypeError(f"the name of a metric must be a str, not {name!r}")
        name.encode()  # a lone surrogate cannot be stored
        try:
            metrics[name] = float(value)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"the metric {name!r} must be a number, not {type(value).__name__}"
            ) from error
    return metrics


class CountedBatches:
    """Hands on a loader's batches, counting rows, beating and minding the cancel flag."""

    def __init__(self, loader: BatchSource, beat: _core.BeatPage | None) -> None:
        self._loader = loader
        self._beat = beat
        self.rows_seen = 0
        self.batches_seen = 0

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            if self._beat is not None and self._beat.cancelled:
                raise UnitCancelled("the unit was cancelled")
            self.rows_seen += self._loader.last_rows
            self.batches_seen += 1
            yield batch


def ratio(pair: tuple[float, float]) -> float:
    """Mean of a (sum, weight) pair; NaN without weight."""
    total, weight = pair
    return total / weight if weight else math.nan


def pack_tree(live: LiveModel) -> dict[str, Any]:
    """Everything that a trial carries from unit to unit."""
    return {
        "model": live.model.state_dict(),
        "generators": live.generators,
        "progress": live.progress.to_state(),
    }


def load_tree(
    live: LiveModel, buffer: Any, device: str = "cpu", arena: StateArena | None = None
) -> None:
    """Load a packed state into a live model, which is on `device`."""
    if device != "cpu":
        tree = _core.unpack_state(buffer, "torch", copy=None)  # only read: the arena copies
        load_parts(live, (arena or StateArena()).to_device(tree, device))
        return
    framework: Literal["torch", "numpy"] = "torch" if live.torch else "numpy"
    tree = None
    if getattr(live.model, "loads_in_place", False):
        tree = _core.load_into(buffer, pack_tree(live))  # None where it does not fit
    if tree is None:
        tree = _core.unpack_state(buffer, framework)
    load_parts(live, tree)


def load_parts(live: LiveModel, tree: Mapping[str, Any]) -> None:
    """Give a live model what `pack_tree` has taken."""
    live.model.load_state_dict(tree["model"])
    live.generators = tree["generators"]
    live.progress = EpochProgress.from_state(tree["progress"])


def divergence(task: Task, mean: float, first: tuple[int, float] | None) -> str:
    """Say where a loss stopped being a finite number: epoch, shard and batch, from 0."""
    where = f"in epoch {task.epoch}, shard {task.shard}"
    if first is None:  # finite in each batch, too large together
        return f"the training loss became {mean} {where}"
    batch, value = first
    return f"the training loss became {value} {where}, batch {batch}"


def describe(error: BaseException) -> str:
    """One line: the exception's type, its text and the user's line that raised it."""
    text = text_of(error)
    if isinstance(error, InputError):
        return text
    cause = f"{type(error).__name__}: {text}" if text else type(error).__name__
    place = place_of(error)
    return f"{cause} ({place})" if place else cause


def place_of(error: BaseException) -> str:
    """The user's line that raised an exception, as ``file:line in function``; empty if none did."""
    here = str(PACKAGE) + os.sep
    frames = traceback.extract_tb(error.__traceback__)
    outside = [f for f in frames if not f.filename.startswith(here)]
    if not outside:
        return ""
    # The last line of the user's own, not where a library noticed what that line had done.
    at = [f for f in outside if not _is_library(f.filename)] or outside
    return f"{Path(at[-1].filename).name}:{at[-1].lineno} in {at[-1].name}"


def bases_of(error: BaseException) -> tuple[str, ...]:
    """Full names of an exception's class and its base classes: the class itself may not travel."""
    return tuple(class_name(kind) for kind in type(error).__mro__[:-1])


def _is_library(file: str) -> bool:
    """Whether a file is Python's own or an installed package's."""
    installed = {"site-packages", "dist-packages"} & set(Path(file).parts)
    return bool(installed) or file.startswith((_STDLIB, "<frozen ", "<__array_function__"))


def missing_name(
    error: BaseException, config: Mapping[str, Any], columns: Mapping[str, Any]
) -> str:
    """Say which names there are, if the user's code asked for one that is not."""
    if not isinstance(error, KeyError) or not error.args or not isinstance(error.args[0], str):
        return ""
    functions = {frame.name for frame in traceback.extract_tb(error.__traceback__)}
    if "build_model" in functions:
        what, names = "the configuration has", list(config)
    elif functions & {"_train", "_evaluate"}:
        what, names = "a batch has", list(columns)
    else:
        return ""
    return "" if error.args[0] in names else one_line(f"; {what} {', '.join(names) or 'nothing'}")


def misplaced(error: BaseException, device: str) -> str:
    """Say where batches are, if the user's code has found tensors on two devices."""
    if not is_gpu(device) or "on the same device" not in str(error):
        return ""
    return f"; batches arrive on info.device, {device}: put the model there, or give devices='cpu'"


def unlike_types(error: BaseException, columns: Mapping[str, Any]) -> str:
    """Say how to store columns whose types PyTorch found unlike the network's or the loss's."""
    if not isinstance(error, (RuntimeError, ValueError)):
        return ""
    text = text_of(error).lower().replace("unsigned char", "byte").replace("tensor", "")
    words = re.findall(r"[a-z0-9]+", text)
    named = [_TORCH_TYPES[word] for word in words if word in _TORCH_TYPES]
    labels = "expected target dtype to be long" in text
    if labels and named:
        found, wanted = named[-1], "int64"
    elif ("type" in text and "float64" in named) or "share same datatype" in text:
        found, wanted = "float64", "float32"
    elif "type" in text and len(others := {*named} - {"float32"}) == 1 and "float32" in named:
        found, wanted = others.pop(), "float32"
    else:
        return ""
    wrong = [name for name, column in columns.items() if column.dtype == found]
    if labels:
        wrong = [name for name in wrong if not columns[name].shape]
    if not wrong or (found != "float64" and len(wrong) > 1):  # one of them, but which?
        return ""
    whose = f"column {wrong[0]!r} is" if len(wrong) == 1 else f"columns {', '.join(wrong)} are"
    dtypes = ", ".join(f'"{name}": "{wanted}"' for name in wrong)
    return f"; {whose} {found}: give shard dtypes={{{dtypes}}}"


def traceback_of(error: BaseException) -> str:
    """An exception's traceback as text, clipped; also of one that cannot be shown."""
    try:
        return clipped("".join(traceback.format_exception(error)))
    except Exception:
        return clipped("".join(traceback.format_tb(error.__traceback__)) + describe(error))


def clipped(text: str, limit: int = 20_000) -> str:
    """Leave out the middle of a text that is too long to keep."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}\n... {len(text) - limit} characters ...\n{text[-limit // 2 :]}"


def _names_data(error: BaseException, context: RunContext) -> bool:
    """Whether an error is about a file of the run's data that is gone."""
    if not isinstance(error, FileNotFoundError):
        return False
    views = [context.train] + ([context.validation] if context.validation is not None else [])
    return any(str(view.path) in str(error) for view in views)
