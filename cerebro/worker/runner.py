"""Run units: train one trial on one part of an epoch, from one committed state to the next.

Every worker process has a `UnitRunner`; with ``workers=0`` the coordinator's process has one. It
keeps models alive between units: the state of a trial that stays on its worker is packed but not
unpacked. A process on a GPU may have several runners, each in a thread with its own stream, whose
units overlap (`cerebro.worker.gpu`). The steps of a unit:

1. take the live model, or build one, begin the epoch and load the trial's committed state;
2. restore the trial's random generators;
3. train on the part's batches (in C: `_core.run_unit`), or evaluate;
4. at the end of an epoch, call ``end_epoch`` and complete the metrics;
5. pack the model, the generators and the progress into the uncommitted slot, seal it with its hash,
and commit it.
"""

from __future__ import annotations

import contextlib
import math
import sys
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import cerebro._core as _core
from cerebro.arguments import MAX_INT32, check_whole_number
from cerebro.data import depots
from cerebro.data.order import mix_in_order
from cerebro.errors import StateError, UnitCancelled, text_of
from cerebro.machine import flags, generators, turns
from cerebro.machine import resources as memory
from cerebro.machine.cuda import CHECK_SECONDS
from cerebro.machine.devices import is_gpu, is_short_of_gpu_memory
from cerebro.machine.files import ExhaustedError, StorageError, explain_storage_errors, is_full
from cerebro.machine.libraries import TORCH, apply_settings, begin_run, present_settings
from cerebro.machine.local import Machine
from cerebro.run.records import strip_study
from cerebro.run.states import CloneOf, read_state
from cerebro.worker import models, user_errors
from cerebro.worker.clock import TaskClock
from cerebro.worker.contents import OwnNumbers
from cerebro.worker.evaluate import (
    RecordedStepDiffers,
    end_training,
    evaluate_model,
    evaluation_seed,
    replay_recorded_steps,
    run_batches,
)
from cerebro.worker.gpu import StateArena
from cerebro.worker.loaders import Loaders
from cerebro.worker.log import append_text, log_path, redirect_descriptors, redirect_streams
from cerebro.worker.messages import (
    LIBRARIES,
    CommittedState,
    ProcessNotes,
    RunContext,
    StepNotes,
    Task,
    UnitDone,
    UnitFailed,
    UnitSums,
)
from cerebro.worker.models import DROPPED, LiveModel, LiveModels
from cerebro.worker.read_names import ReadNames, Reads
from cerebro.worker.sharing import SharedWeightsWritten, Sharing
from cerebro.worker.trial_state import TrialSlots
from cerebro.worker.trial_warnings import Watch, measure_growth, warn

MAX_TRIES = 4  # states of a trial that are tried because their structure is new
ASIDE_SECONDS = 60.0  # for a comparison of models, in addition to the unit's own limit
TRY_SECONDS = 3 * CHECK_SECONDS
"""For the first use of a GPU: the check of another process, the own one, and compiling kernels."""


class Diverged(Exception):
    """Raised if a training loss is not finite."""


class _Computed(NamedTuple):
    """A unit that has been computed, and is not committed yet."""

    live: LiveModel
    loaded: bool  # whether the model's state was loaded
    total: UnitSums
    before: memory.Usage | None  # memory before the unit; None if others have used some
    not_exact: set[str]  # the operations that are not deterministic
    unlike: str  # how a recorded step differed, after which the unit ran again


@dataclass
class TrialNotes:
    """What a worker notes about a trial until the trial ends."""

    is_ordinary: bool = False  # a recorded step gave wrong results: the trial takes ordinary ones
    is_inexact: bool = False  # whether the trial has operations that are not deterministic
    shares: bool = True  # False: it has written to shared weights, and has its own now
    tries: int = 0  # how many states of a new structure have been tried
    examined: dict[str, list[int]] = field(default_factory=dict)
    """By path, the positions of looks; see `cerebro.worker.lost_numbers`."""
    read: ReadNames | None = None  # what ``build`` has read in this unit, if that was asked for


class UnitRunner:
    """Runs the units of one run; see the module's docstring.

    `own_process` says whether this is a worker process: only there do trials have the random
    generators and file descriptors 1 and 2 to themselves. `machine` gives the time and the disk.
    `together` are the runners of all workers of this process, if it has several.
    """

    def __init__(
        self,
        context: RunContext,
        *,
        worker: int,
        machine: Machine,
        own_process: bool = False,
        clock: TaskClock | None = None,
        together: Sequence[UnitRunner] = (),
    ) -> None:
        self.context = context
        self.worker = worker
        self.machine = machine
        new = Sharing(context.exactness.seed, context.folders.slots)
        self.models = LiveModels(context, together[0].sharing if together else new)
        self.slots = TrialSlots(context.folders.slots, machine.disk)
        self.loaders = Loaders(context, machine.clock)
        self.notes: defaultdict[int, TrialNotes] = defaultdict(TrialNotes)
        self._own_process = own_process
        self._clock = clock or TaskClock()
        self._together = together
        self._arena = StateArena()  # for the states of models on a GPU
        self._last_trial: int | None = None  # the trial whose generators are in place
        self._usage: memory.Usage | None = None  # memory at the end of the last unit
        self._tried = False  # whether the GPU, if any, has been tried
        self.warnings = Watch(context.warning_filters if own_process else ())
        begin_run(context.libraries, own_process=own_process)

    @property
    def sharing(self) -> Sharing:
        """What the models of this process share."""
        return self.models.sharing

    def run(self, task: Task) -> UnitDone | UnitFailed:
        """Run one unit; errors of the user's code, data or disk are returned, not raised."""
        self.loaders.unfit = {}
        with self.warnings.collect(task.trial) as warned:
            event = self._run_or_fail(task)
        notes = self.notes[task.trial]
        read, notes.read = notes.read, None
        return replace(event, warned=tuple(warned), read=read) if warned or read else event

    def _run_or_fail(self, task: Task) -> UnitDone | UnitFailed:
        try:
            with self.redirect_output(task.trial):
                try:
                    return self._run_with_room(task)
                except BaseException as error:
                    if not self.is_of_the_trial(error):
                        raise
                    return self._make_failure(task, error)
        except StorageError as error:  # the log cannot be written either
            return self._make_failure(task, error)

    def _run_with_room(self, task: Task) -> UnitDone:
        """Run a unit; if the GPU is out of memory, run it again without other live models."""
        try:
            return self._run(task)
        except Exception as error:
            if not (is_gpu(self.context.device) and is_short_of_gpu_memory(error)):
                raise
            traceback.clear_frames(error.__traceback__)  # the frames hold memory to be freed
            others = tuple(trial for trial in self.models if trial != task.trial)
            for trial in (*others, task.trial):
                self.models.drop(trial)
                self.slots.close(trial)
            self.loaders.close()
            # Units that overlap this one hold memory until they end.
            overlapped = turns.wait_until_alone()
            for runner in self._together:
                if runner is not self:
                    runner.make_room()
            if models.give_back_memory(self.context.device) == 0 and not others and not overlapped:
                raise
        done = self._run(task)
        return replace(done, dropped=(*others, *done.dropped))

    def make_room(self) -> None:
        """Give up the memory kept between units; no unit of this runner may be under way."""
        self.models.make_room()
        self.loaders.close()

    def is_of_the_trial(self, error: BaseException) -> bool:
        """Return whether an error belongs to the trial; in the coordinator, Ctrl-C does not."""
        return self._own_process or not isinstance(error, KeyboardInterrupt)

    def _make_failure(self, task: Task, error: BaseException) -> UnitFailed:
        """Return the failure with its cause: the trial, the data, or the run's disk."""
        self.models.drop(task.trial)  # its state is inconsistent
        kind: Literal["error", "diverged", "cancelled", "data", "storage", "worker"] = "error"
        if isinstance(error, UnitCancelled):
            kind = "cancelled"
        elif isinstance(error, Diverged):
            kind = "diverged"
        elif user_errors.is_about_data(error, self.context.train, self.context.validation):
            kind = "data"
        elif self._own_process and (isinstance(error, ExhaustedError) or self.has_lost_gpu()):
            kind = "worker"
        elif isinstance(error, StorageError) or is_full(error):
            kind = "storage"
        bases: tuple[str, ...] = ()
        text = place = ""
        if kind != "error":
            cause = text_of(error, 2000)
        else:
            bases, place = user_errors.bases_of(error), user_errors.place_of(error)
            cause = self.describe_cause(error, strip_study(task.config))
            text = user_errors.traceback_of(error)
        if kind in ("error", "diverged"):
            append_text(log_path(self.context.folders.logs, task.trial), text or cause)
        return UnitFailed(self.worker, task, kind, cause, text, (task.trial,), bases, place)

    def describe_cause(self, error: BaseException, config: Mapping[str, Any]) -> str:
        if unfit := models.explain_unfit(error, self.loaders.unfit):
            return unfit
        cause = user_errors.describe_cause(error, config, self.context.train, self.context.device)
        return cause + models.hint_at_unfit(self.loaders.unfit)

    def has_lost_gpu(self) -> bool:
        """Return whether this process has lost the use of its GPU, as after a failed assertion."""
        torch = sys.modules.get("torch")
        if torch is None or not is_gpu(self.context.device) or not torch.cuda.is_initialized():
            return False
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return True
        return False

    def _run(self, task: Task) -> UnitDone:
        clock = self.machine.clock
        started, began = clock.time(), clock.perf_counter()
        for trial in task.ended:
            self.models.drop(trial)
            self.slots.close(trial)
            self.warnings.forget(trial)
            self.notes.pop(trial, None)
        self.slots.settle(task)
        unit, metrics, state_hash = self._compute_and_commit(task)
        live = unit.live
        after = self._usage = memory.read_usage()
        file = None
        if metrics is not None:
            file = self.slots.save(task, self.context.folders.states, state_hash)
        grown = measure_growth(unit.before, after, loaded=unit.loaded, state_bytes=live.state_bytes)
        libraries = tuple(name for name in LIBRARIES if name in sys.modules)
        return UnitDone(
            worker=self.worker,
            task=task,
            total=unit.total,
            started=started,
            seconds=clock.perf_counter() - began,
            loaded=unit.loaded,
            state=CommittedState(live.state_bytes, state_hash, file),
            metrics=metrics,
            dropped=self.models.drop_least_used(task.trial),
            process=ProcessNotes(libraries, 0 if after is None else after.resident, grown),
            steps=StepNotes(tuple(sorted(unit.not_exact)), self.loaders.moved, unit.unlike),
        )

    def _compute_and_commit(self, task: Task) -> tuple[_Computed, dict[str, float] | None, str]:
        """Compute and commit a unit; do it again if weights that models share have changed."""
        while True:
            try:
                unit = self._compute_exactly(task)
                return unit, *self._commit(task, unit)
            except SharedWeightsWritten as error:
                names = error.names
            except UnitCancelled:
                raise
            except Exception:
                names, live = self.sharing.find_written(), self.models.get(task.trial)
                if not names and (live is None or live.writes == self.sharing.writes):
                    raise
            if names:
                self._note_written(task, names)
            self.models.drop(task.trial)  # all others are built again when they are next used
            DROPPED.free(all_sizes=True)

    def _note_written(self, task: Task, names: list[str]) -> None:
        """Give a trial weights of its own from now on."""
        self.notes[task.trial].shares = False
        warn(
            f"epoch {task.epoch}, unit {task.step}: the unit ran again, and the trial has its own "
            "frozen weights now, because it has written to weights that all trials share: "
            f"{models.join_names(names)}. States leave frozen weights out, so what is written "
            "there is lost when the trial moves: use state='all', or write to a copy"
        )

    def _compute_exactly(self, task: Task) -> _Computed:
        """Train or evaluate; start again after a wrong recorded step or an inexact operation."""
        last, self._usage = self._usage, None  # stays None unless the unit succeeds
        live, loaded, built = self._take_model(task)
        # A worker process does not grow between units.
        before = last if self._own_process and not built and not loaded else memory.read_usage()
        if turns.is_shared():
            before = None  # the process also grows by other units
            self._allow_overlap(task, live)
        not_exact: set[str] = set()
        unlike = ""
        while True:
            try:
                strict = not self.notes[task.trial].is_inexact
                with self.use_settings(not_exact, strict=strict):
                    total = self._compute(live, task)
                break
            except RecordedStepDiffers as error:
                unlike = self._note_unlike(task, error)
            except Exception as error:
                if not (strict and self.tolerates(error, not_exact)):
                    raise
                self.notes[task.trial].is_inexact = True
                self.models.drop(task.trial)
            del live  # no caller has it, either: memory may have room for only one such model
            DROPPED.free(all_sizes=True)
            live, loaded, _ = self._take_model(task)
        return _Computed(live, loaded, total, before, not_exact, unlike)

    def _allow_overlap(self, task: Task, live: LiveModel) -> None:
        # A unit that was lost before runs alone, to find out which unit costs the process. A unit
        # whose `build` changed PyTorch's settings runs alone, because others must not see them.
        begun = TORCH.of_build(self.context.libraries.get("torch", {}))
        alike = live.libraries.get("torch", {}) in ({}, begun)
        overlaps = alike and getattr(live.model, "overlaps", False)
        turns.allow_giving_away(task.attempt == 0 and overlaps)

    def _commit(self, task: Task, unit: _Computed) -> tuple[dict[str, float] | None, str]:
        """Commit a unit; return the metrics, if the epoch is over, and the hash of the state."""
        live, slots = unit.live, self.slots.open(task.trial)
        with self.use_settings(unit.not_exact):
            metrics = None
            if task.step == self.context.units_per_epoch - 1:
                metrics = models.end_epoch(live, task.epoch)
            names = self.sharing.find_written()
            if live.writes != self.sharing.writes:  # also if another unit of this process found it
                raise SharedWeightsWritten(names)
            live.generators = generators.capture(live.torch, live.cuda)
            tree = self.copy_to_host(live)
            if self._try_structure(live, task, tree):
                # The state of a GPU, in the memory that the trial has just used.
                tree = self.copy_to_host(live)
            if task.after is not None:
                # The pack overwrites the state before the last unit. That unit may have to run
                # again as long as the coordinator has not heard that it is done.
                self._clock.await_hearing(task.number_before)
            with explain_storage_errors():
                live.state_bytes = slots.pack(tree, attempt=task.dispatch)
                packed_hash = slots.commit(task.position + 1)
        live.position = task.position + 1
        self._last_trial = task.trial
        return metrics, packed_hash

    def _try_structure(self, live: LiveModel, task: Task, tree: Mapping[str, Any]) -> bool:
        """Load a state of a new structure into a model just built; return whether it was tried.

        Otherwise a trial might be lost at its next hop, or leave states that cannot be loaded.
        Raise StateError if the state cannot be loaded.
        """
        structure = models.describe_structure(tree["model"])
        last, live.structure = live.structure, structure
        notes = self.notes[task.trial]
        has_room = 2 * live.held_bytes <= self.context.share.live_bytes
        if last in (None, structure) or notes.tries >= MAX_TRIES or not has_room:
            return False
        notes.tries += 1
        packed = _core.pack_state(tree)
        try:
            with self.leave_no_trace():
                other = self.build(task.trial, task.config, task.epochs, stream=task.stream)
                if task.step < self.context.units_per_epoch - 1:
                    self.begin_again(other, task.epoch)
                other = self.load_anew(other, task, packed, task.epoch)
                if models.describe_structure(models.pack_tree(other)["model"]) != structure:
                    raise StateError("a part of the state is not loaded")
        except MemoryError:
            return True
        except Exception as error:
            if is_short_of_gpu_memory(error):
                return True
            raise StateError(
                f"structure changes at epoch {task.epoch}: make it depend on the epoch alone in "
                f"begin_epoch, because a model just built cannot load the state ({text_of(error)})"
            ) from error
        return True

    def _compute(self, live: LiveModel, task: Task) -> UnitSums:
        live.progress.begin_unit(task.epoch, task.step)
        if task.step == 0 and hasattr(live.model, "begin_epoch"):
            live.model.begin_epoch(task.epoch)
        return self._evaluate(live, task) if task.part < 0 else self._train(live, task)

    def _note_unlike(self, task: Task, error: RecordedStepDiffers) -> str:
        """Drop a model whose recorded step was wrong; its trial then takes ordinary steps."""
        self.notes[task.trial].is_ordinary = True
        self.models.drop(task.trial)
        text = (
            f"epoch {task.epoch}, unit {task.step}: the unit ran again with ordinary steps, and so "
            f"does the rest of the trial, because a recorded step is wrong: {error}"
        )
        append_text(log_path(self.context.folders.logs, task.trial), text)
        return text

    def _train(self, live: LiveModel, task: Task) -> UnitSums:
        order = self.context.order(task.trial)
        accumulate = live.model.accumulate if hasattr(live.model, "begin_unit") else 1
        cut = self.context.batches.make_cut(
            task.config, check_whole_number("accumulate", accumulate, 1, MAX_INT32)
        )
        part = order.part(task.part, task.epoch, cut)
        for shard in part.mix:
            self.loaders.verify(True, shard)
        loader = self.loaders.make(
            live.model, task.config, training=True, trial=task.trial, epoch=task.epoch
        )
        loader.begin([part.mix], task.epoch, part.start, part.count)
        depots.tell_first_note(loader)
        step, device = live.model.train_batch, self.device_of(live.model)
        if hasattr(live.model, "begin_unit"):
            live.model.begin_unit(part.updates)
        with replay_recorded_steps(live.model, training=True):
            result = run_batches(loader, step, beat=self._clock.beat, device=device)
        sums = end_training(live.model, result, live.progress)
        loss, weight = sums.sums.get("loss", (0.0, 0.0))
        if weight and not math.isfinite(loss):
            before = order.batches_before(task.key, task.epoch, task.step, cut)
            first = result.not_finite.get("loss")
            cause = self._find_cause_in_data(live, task, training=True)
            what = user_errors.describe_divergence(task.epoch, before, loss / weight, first)
            raise Diverged(what + cause)
        return sums

    def _evaluate(self, live: LiveModel, task: Task) -> UnitSums:
        """Validate with separate random generators, so that training is not affected."""
        _, validation = self.context.views(task.trial)
        assert validation is not None
        for shard in range(validation.num_shards):
            self.loaders.verify(False, shard)
        loader = self.loaders.make(live.model, task.config, training=False, trial=task.trial)
        loader.begin(mix_in_order(validation), 0)
        depots.tell_first_note(loader)
        seed = evaluation_seed(self.context.exactness.seed, task.key, task.epoch)
        with generators.preserve_generators(live.torch, seed):
            device = self.device_of(live.model)
            with replay_recorded_steps(live.model, training=False):
                result, metrics = evaluate_model(live.model, loader, self._clock.beat, device)
        live.progress.validation = metrics
        loss, weight = result.sums.get("loss", (0.0, 0.0))
        if weight and not math.isfinite(loss):
            cause = self._find_cause_in_data(live, task, training=False)
            warn(f"the validation loss is {loss / weight}{cause}")  # the trial is not ranked
        return result

    def _find_cause_in_data(self, live: LiveModel, task: Task, *, training: bool) -> str:
        with self._clock.stop_clock(TRY_SECONDS):
            return self.loaders.find_cause(live.model, task.trial, training=training)

    def _take_model(self, task: Task) -> tuple[LiveModel, bool, bool]:
        """Return the trial's model, with its generators, and if it was loaded and built."""
        # No trial's generators are in place until the unit succeeds: a failing build also moves
        # them.
        last, self._last_trial = self._last_trial, None
        live = self.models.get(task.trial)
        begins = task.position == 0 or task.clone_of is not None
        # A model may have been built for another number of epochs. If the trial's states are lost,
        # it starts again.
        if live is not None and (
            live.epochs != task.epochs
            or (begins and live.position != task.position)
            or live.writes != self.sharing.writes
        ):
            live = None
        loaded, built = False, live is None
        try:
            if live is None:
                self.models.drop(task.trial)
                DROPPED.free()
                live = self._build_for(task)
                if task.clone_of is not None:
                    live = self._load_clone(live, task, task.clone_of)
                    loaded = True
                elif task.position == 0:
                    live.position = 0
            else:
                apply_settings(live.libraries)
            self.models.pop(task.trial, None)  # until its state is right
            if live.position != task.position:
                with self.use_settings():
                    if task.step > 0 and (built or live.progress.epoch != task.epoch):
                        self.begin_again(live, task.epoch)
                    live = self._load(live, task)
                loaded = True
        except BaseException:
            DROPPED.add(None)
            raise
        others = turns.is_shared() or not self._own_process  # they also use the generators
        if loaded or task.trial != last or others:
            generators.restore(live.generators)
        self.models[task.trial] = live
        return live, loaded, built

    def _build_for(self, task: Task) -> LiveModel:
        reads = Reads() if task.notes_reads else None
        live = self.build(task.trial, task.config, task.epochs, reads, task.stream)
        if reads is not None:
            self.notes[task.trial].read = reads.list_names(task.config)
        return live

    def build(
        self,
        trial: int,
        config: Mapping[str, Any],
        epochs: int | None = None,
        reads: Reads | None = None,
        stream: int | None = None,
    ) -> LiveModel:
        """Build a trial's model for `epochs` (None: the run's); note in `reads` what it reads."""
        context = self.context
        info = models.make_info(
            context.views(trial)[0],
            context.order(trial),
            trial=trial,
            stream=stream,
            epochs=context.limits.epochs if epochs is None else epochs,
            cut=context.batches.make_cut(config),
            fold=context.fold_of(trial),
            device=context.device,
            sharing=self.sharing.for_build(shares=self.notes[trial].shares),
        )
        if reads is None:
            model, torch = models.build_model(context, config, info)
        else:
            silent = self.redirect_output(None)
            model, torch = models.build_and_note(context, config, info, reads, silent)
        self._clock.note_built()
        if not self._tried and is_gpu(where := self.device_of(model)):
            self._try_device(where)
        if self.notes[trial].is_ordinary and hasattr(model, "stop_recording"):
            model.stop_recording()
        self.warnings.take_filters()  # build may have imported the filters' categories
        cuda = torch and (is_gpu(self.context.device) or generators.uses_cuda(model))
        return LiveModel(
            model,
            torch,
            cuda,
            epochs=epochs,
            generators=generators.capture(torch, cuda),
            libraries=present_settings(),
            own_numbers=OwnNumbers(model),
            writes=self.sharing.writes,
        )

    def begin_again(self, live: LiveModel, epoch: int) -> None:
        """Call ``begin_epoch`` before a state is loaded; its output has been logged before."""
        with self.redirect_output(None):
            models.begin_again(live.model, epoch)

    def _try_device(self, device: str) -> None:
        """Try the GPU and compile its kernels without counting the time towards the unit."""
        # The loader will raise a MemoryError.
        with self._clock.stop_clock(TRY_SECONDS), contextlib.suppress(MemoryError):
            depots.find_problem(device)
            self._tried = True

    def _load(self, live: LiveModel, task: Task) -> LiveModel:
        """Load a trial's state; return its model, which is a new one if the state did not fit."""
        packed = self.slots.read(task)
        live = self.load_anew(live, task, packed, task.epoch if task.step > 0 else task.epoch - 1)
        live.position = task.position
        return live

    def load_anew(self, live: LiveModel, task: Task, packed: Any, epoch: int) -> LiveModel:
        """Load a state of `epoch` into a trial's model; see `load_or_rebuild`."""

        def rebuild() -> LiveModel:
            with self.redirect_output(None):
                return self._build_for(task)

        return models.load_or_rebuild(
            live, lambda model: self.load_packed(model, packed), rebuild, epoch
        )

    def _load_clone(self, live: LiveModel, task: Task, clone_of: CloneOf) -> LiveModel:
        """Load the model state of another trial into a new trial, but not its generators."""
        packed = read_state(clone_of, self.machine.disk)
        state = _core.unpack_state(packed, "torch" if live.torch else "numpy")["model"]

        def rebuild_parent(with_own_seed: bool) -> Any:
            parent, stream = clone_of, task.key if with_own_seed else clone_of.stream
            try:
                with self.redirect_output(None):
                    built = self.build(parent.trial, parent.config, parent.epochs, stream=stream)
                    return built.model
            finally:
                DROPPED.add(None)
                apply_settings(live.libraries)

        def load(live: LiveModel) -> None:
            config = strip_study(task.config)
            models.check_place(live.model, self.context.batches, clone_of.config, config)
            models.load_clone(live.model, state, config, epoch=task.epoch, rebuild=rebuild_parent)

        with self.use_settings():
            live = models.load_or_rebuild(live, load, lambda: self._build_for(task), task.epoch - 1)
        live.position = task.position
        return live

    def free_checked_models(self) -> None:
        """Free the models of a check on a GPU, where room for others may be short."""
        if is_gpu(self.context.device):
            DROPPED.free(all_sizes=True)

    def device_of(self, model: Any) -> str:
        """Return the device of a model's batches and metrics: for PyTorch, the run's device."""
        return models.batch_device(model, self.context.device)

    @contextlib.contextmanager
    def use_settings(
        self, not_exact: set[str] | None = None, *, strict: bool = False
    ) -> Iterator[None]:
        """Compute with the run's settings; add the non-deterministic operations to `not_exact`.

        With `strict`, such an operation raises an error for `tolerates`.
        """
        exactness, device = self.context.exactness, self.context.device
        with exactness.compute_on(device, strict=strict):
            if not exactness.may_be_inexact_on(device):
                yield
                return
            with flags.note_operations(set() if not_exact is None else not_exact):
                yield

    def tolerates(self, error: BaseException, not_exact: set[str]) -> bool:
        """Return whether the work may run again without `strict`; add the operation's name."""
        name = self.context.exactness.find_inexact_operation(error, self.context.device)
        if name is not None:
            not_exact.add(name)
        return name is not None

    def copy_to_host(self, live: LiveModel) -> dict[str, Any]:
        """Return a trial's state in host memory; tensors on a GPU are copied."""
        tree = models.pack_tree(live)
        return tree if self.device_of(live.model) == "cpu" else dict(self._arena.to_host(tree))

    def load_packed(self, live: LiveModel, buffer: Any) -> None:
        models.load_tree(live, buffer, self.device_of(live.model), self._arena)

    @contextlib.contextmanager
    def leave_no_trace(self) -> Iterator[None]:
        """Compute beside a trial's units, without output, warnings and random numbers of it."""
        turns.allow_giving_away(False)
        with (
            self._clock.stop_clock(ASIDE_SECONDS),
            self.redirect_output(None),
            self.sharing.share_nothing(),
            self.use_settings(),
            generators.preserve_generators("torch" in sys.modules),
            models.preserve_keras_seeds(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            try:
                yield
            finally:
                self._usage = None  # the next unit measures the memory again
                self.free_checked_models()

    def forget_generators(self) -> None:
        """Make the next unit restore its generators, even if the trial is the same."""
        self._last_trial = None

    def redirect_output(self, trial: int | None) -> contextlib.AbstractContextManager[None]:
        """Redirect output to the trial's log; without a trial, discard it."""
        path = log_path(self.context.folders.logs, trial)
        return redirect_descriptors(path) if self._own_process else redirect_streams(path)

    def close(self) -> None:
        """Release models, loaders, mapped files and cached GPU memory."""
        self.make_room()
        self.models.close()
        self._arena = StateArena()
        self.slots.close_all()
        models.give_back_memory(self.context.device)
