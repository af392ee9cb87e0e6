"""Run units: train one trial on one part of an epoch, from one committed state to the next.

Every worker process has a `UnitRunner`; with ``workers=0`` the coordinator's process has one. It
keeps models alive between units: the state of a trial that stays on its worker is packed but not
unpacked. A process on a GPU may have several runners, each in a thread with its own stream, whose
units overlap (`cerebro.worker.streams`). The steps of a unit:

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
import time
import traceback
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import cerebro._core as _core
from cerebro.arguments import MAX_INT32, check_whole_number
from cerebro.data import copies, depots
from cerebro.data.given_rows import was_given
from cerebro.data.order import mix_in_order
from cerebro.errors import CorruptDataError, StateError, UnitCancelled, text_of
from cerebro.machine import device_check, generators, turns
from cerebro.machine import resources as memory
from cerebro.machine.devices import is_gpu, is_short_of_gpu_memory
from cerebro.machine.files import ExhaustedError, StorageError, explain_storage_errors, is_full
from cerebro.machine.flags import (
    TORCH,
    note_operations,
)
from cerebro.machine.libraries import JAX, KERAS, apply_settings, present_settings, restore_settings
from cerebro.model import Info, read_columns
from cerebro.run.records import strip_study
from cerebro.run.states import CloneOf, epoch_state_file, read_state, unpublished_name
from cerebro.worker import growth
from cerebro.worker.aside import leave_no_trace
from cerebro.worker.diagnosis.data import find_not_finite, summarize_texts
from cerebro.worker.evaluate import end_training, evaluate_model, evaluation_seed, run_batches
from cerebro.worker.log import append_text, log_path, redirect_descriptors, redirect_streams
from cerebro.worker.messages import (
    LIBRARIES,
    MAX_LIVE_MODELS,
    MAX_LIVE_MODELS_ON_GPU,
    RunContext,
    Task,
    UnitDone,
    UnitFailed,
    UnitSums,
)
from cerebro.worker.models import (
    DROPPED,
    LiveModel,
    Loader,
    batch_device,
    begin_again,
    build_model,
    describe_left_out,
    describe_structure,
    end_epoch,
    explain_unfit,
    find_fitting_columns,
    give_back_memory,
    hint_at_unfit,
    load_or_rebuild,
    load_tree,
    make_batches,
    make_info,
    pack_tree,
)
from cerebro.worker.own_numbers import OwnNumbers
from cerebro.worker.read_names import ReadNames, Reads
from cerebro.worker.recorded_unit import RecordedStepDiffers, replay_recorded_steps
from cerebro.worker.state_arena import StateArena
from cerebro.worker.trial_warnings import Watch, warn
from cerebro.worker.user_errors import (
    bases_of,
    describe,
    describe_divergence,
    explain_channels_last,
    explain_known_mistake,
    explain_memory_shortage,
    explain_misplaced,
    explain_missing_name,
    explain_unlike_types,
    names_data,
    place_of,
    traceback_of,
)

MAX_OPEN_SLOTS = 64

MAX_TRIES = 4
"""How many states of a trial are tried because of their structure, which may grow in each unit."""

MAX_LOADERS = 8

MAX_GPU_LOADERS = 4  # each has batches in device memory and in pinned memory
"""The most loaders kept for a GPU. A run with folds may have two for each fold, if that is more."""

SIZES_SECONDS = 0.1
"""How long the sizes of a shard's files count once they have been checked."""

TRY_SECONDS = 2 * device_check.SECONDS
"""The seconds that the first use of a GPU may take: it is checked, and kernels may be compiled."""


class Diverged(Exception):
    """Raised if a training loss is not finite."""


class _Computed(NamedTuple):
    """A unit that has been computed, and is not committed yet."""

    live: LiveModel
    loaded: bool
    """Whether the model's state was loaded."""
    sums: UnitSums
    before: memory.Usage | None
    """The memory before the unit; None if other units have used some meanwhile."""
    not_exact: set[str]
    """The operations that are not deterministic."""
    unlike: str
    """How a recorded step differed from the ordinary step, after which the unit ran again."""


class TaskClock(Protocol):
    """Measures the time of a unit alone; see `cerebro._worker`."""

    def note_built(self) -> None:
        """Note that a model has been built and its libraries have been imported."""

    def stop_clock(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        """Return a context whose time, at most `seconds`, does not count towards the unit."""

    def await_hearing(self, answer: int) -> None:
        """Wait until the coordinator has heard an answer; this time does not count, either.

        Raise UnitCancelled if the unit is cancelled meanwhile.
        """


class UnitRunner:
    """Runs the units of one run; see the module's docstring.

    `own_process` says whether this is a worker process: only there do trials have the random
    generators and file descriptors 1 and 2 to themselves. `together` are the runners of all workers
    of this process, if it has several.
    """

    def __init__(
        self,
        context: RunContext,
        *,
        worker: int,
        beat: _core.BeatPage | None = None,
        own_process: bool = False,
        clock: TaskClock | None = None,
        together: Sequence[UnitRunner] = (),
    ) -> None:
        self.context = context
        self.worker = worker
        self._beat = beat
        self._own_process = own_process
        self._clock = clock
        self._together = together
        self._untold: set[int] = set()  # trials whose models another worker's unit has dropped
        self._live: OrderedDict[int, LiveModel] = OrderedDict()
        self._slots: OrderedDict[int, _core.Slots] = OrderedDict()
        self._loaders: OrderedDict[tuple[Any, ...], Loader] = OrderedDict()
        self._orders = _core.Orders()
        self._arena = StateArena()  # for the states of models on a GPU
        self._verified: set[tuple[bool, int]] = set()
        self._sized: dict[tuple[bool, int], float] = {}  # when sizes of files were checked
        self._ordinary: set[int] = set()  # trials whose recorded steps gave wrong results
        self._not_exact: set[int] = set()  # trials with operations that are not deterministic
        self._last_trial: int | None = None  # the trial whose generators are in place
        self._tries: dict[int, int] = {}  # by trial: tried states of a new structure
        self._usage: memory.Usage | None = None  # memory at the end of the last unit
        self._moved = ""  # why PyTorch moves batches to the GPU
        self._tried = False  # whether the GPU, if any, has been tried
        self._bad_columns: dict[tuple[Any, ...], dict[str, str]] = {}  # see `_find_cause_in_data`
        self._unfit: dict[str, str] = {}  # columns that the last loader leaves out
        self._fits: dict[tuple[str, ...] | None, tuple[list[str] | None, dict[str, str]]] = {}
        self._read: ReadNames | None = None  # by `build` in this unit, if that was asked for
        self.examined: dict[int, dict[str, list[int]]] = {}
        """By trial and path, the positions of looks; see `cerebro.worker.lost_numbers`."""
        self.warnings = Watch(context.warning_filters if own_process else ())
        TORCH.imported.clear()  # those of an earlier run are among this run's, or were undone
        if not own_process:  # in a worker process, modules are not imported again
            KERAS.imported.clear()
            JAX.imported.clear()
        TORCH.apply(context.libraries.get("torch", {}))

    # --- units -----------------------------------------------------------

    def run(self, task: Task) -> UnitDone | UnitFailed:
        """Run one unit; errors of the user's code, data or disk are returned, not raised."""
        self._unfit = {}
        with self.warnings.collect(task.trial) as warned:
            event = self._run_or_fail(task)
        if self._read is not None:
            event, self._read = replace(event, read=self._read), None
        return replace(event, warned=tuple(warned)) if warned else event

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
            others = tuple(trial for trial in self._live if trial != task.trial)
            self._release((*others, task.trial))
            self._close_loaders()
            # Units that overlap this one hold memory until they end.
            overlapped = turns.wait_until_alone()
            for runner in self._together:
                if runner is not self:
                    runner.make_room()
            if give_back_memory(self.context.device) == 0 and not others and not overlapped:
                raise
        done = self._run(task)
        return replace(done, dropped=(*others, *done.dropped))

    def make_room(self) -> None:
        """Give up the memory kept between units; no unit of this runner may be under way."""
        self._untold.update(self._live)
        self._live.clear()
        self._close_loaders()

    def is_of_the_trial(self, error: BaseException) -> bool:
        """Return whether an error belongs to the trial; in the coordinator, Ctrl-C does not."""
        return self._own_process or not isinstance(error, KeyboardInterrupt)

    def _make_failure(self, task: Task, error: BaseException) -> UnitFailed:
        """Return the failure with its cause: the trial, the data, or the run's disk."""
        self._drop_model(task.trial)  # its state is inconsistent
        kind: Literal["error", "diverged", "cancelled", "data", "storage", "worker"] = "error"
        if isinstance(error, UnitCancelled):
            kind = "cancelled"
        elif isinstance(error, Diverged):
            kind = "diverged"
        elif isinstance(error, CorruptDataError) or names_data(
            error, self.context.train, self.context.validation
        ):
            kind = "data"
        elif self._own_process and (isinstance(error, ExhaustedError) or self.has_lost_gpu()):
            kind = "worker"
        elif isinstance(error, StorageError) or is_full(error):
            kind = "storage"
        bases: tuple[str, ...] = ()
        place = ""
        if kind != "error":
            cause, text = text_of(error, 2000), ""
        else:
            bases, place = bases_of(error), place_of(error)
            cause = self.describe_cause(error, strip_study(task.config))
            text = traceback_of(error)
        if kind in ("error", "diverged"):
            append_text(log_path(self.context.folders.logs, task.trial), text or cause)
        return UnitFailed(self.worker, task, kind, cause, text, (task.trial,), bases, place)

    def describe_cause(self, error: BaseException, config: Mapping[str, Any]) -> str:
        """Describe an error in the user's code, with a hint if there is one."""
        columns = self.context.train.columns
        if unfit := self.explain_unfit(error):
            return unfit
        given = was_given(self.context.train)
        hints = (
            explain_missing_name(error, config, columns),
            explain_misplaced(error, self.context.device),
            explain_unlike_types(error, columns, given=given),
            explain_channels_last(error, columns, given=given),
            explain_memory_shortage(error, self.context.device),
        )
        hint = "".join(hints) or explain_known_mistake(error, given=given)
        return describe(error) + hint + hint_at_unfit(self._unfit)

    def explain_unfit(self, error: BaseException) -> str:
        """If an error is about validation columns that do not fit, say why; else return ""."""
        return explain_unfit(error, self._unfit)

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
        started = time.time()
        clock = time.perf_counter()
        self._release(task.ended)
        self._ordinary.difference_update(task.ended)
        self._not_exact.difference_update(task.ended)
        slots = self._slots_of(task.trial)
        self._settle_commit(task, slots)
        unit = self._compute_exactly(task, slots)
        live = unit.live
        metrics, packed_hash = self._commit(task, slots, unit)
        untold, self._untold = self._untold - {task.trial}, set()
        after = self._usage = memory.read_usage()
        ends_epoch = metrics is not None
        state_file = self._save_epoch(task, slots, packed_hash) if ends_epoch else None
        return UnitDone(
            worker=self.worker,
            task=task,
            rows=unit.sums.rows,
            batches=unit.sums.batches,
            sums=unit.sums.sums,
            started=started,
            seconds=time.perf_counter() - clock,
            loaded=unit.loaded,
            state_bytes=live.state_bytes,
            metrics=metrics,
            state_hash=packed_hash if ends_epoch else None,
            state_file=state_file,
            dropped=(*sorted(untold), *self._drop_least_used(task.trial)),
            libraries=tuple(name for name in LIBRARIES if name in sys.modules),
            resident=0 if after is None else after.resident,
            grown=growth.measure_unexplained(
                unit.before, after, loaded=unit.loaded, state_bytes=live.state_bytes
            ),
            packed_hash=packed_hash,
            not_exact=tuple(sorted(unit.not_exact)),
            moved=self._moved,
            unlike=unit.unlike,
        )

    def _compute_exactly(self, task: Task, slots: _core.Slots) -> _Computed:
        """Train or evaluate; start again after a wrong recorded step or an inexact operation."""
        last, self._usage = self._usage, None  # stays None unless the unit succeeds
        live, loaded, built = self._take_model(task, slots)
        # A worker process does not grow between units.
        before = last if self._own_process and not built and not loaded else memory.read_usage()
        if turns.is_shared():
            before = None  # the process also grows by other units
            self._allow_overlap(task, live)
        not_exact: set[str] = set()
        unlike = ""
        while True:
            try:
                strict = task.trial not in self._not_exact
                with self.use_settings(not_exact, strict=strict):
                    sums = self._compute(live, task)
                break
            except RecordedStepDiffers as error:
                unlike = self._note_unlike(task, error)
            except Exception as error:
                if not (strict and self.tolerates(error, not_exact)):
                    raise
                self._not_exact.add(task.trial)
                self._drop_model(task.trial)
            del live  # no caller has it, either: memory may have room for only one such model
            DROPPED.free(all_sizes=True)
            live, loaded, _ = self._take_model(task, slots)
        return _Computed(live, loaded, sums, before, not_exact, unlike)

    def _allow_overlap(self, task: Task, live: LiveModel) -> None:
        # A unit that was lost before runs alone, to find out which unit costs the process. A unit
        # whose `build` changed PyTorch's settings runs alone, because others must not see them.
        begun = TORCH.of_build(self.context.libraries.get("torch", {}))
        alike = live.libraries.get("torch", {}) in ({}, begun)
        overlaps = alike and getattr(live.model, "overlaps", False)
        turns.allow_giving_away(task.attempt == 0 and overlaps)

    def _commit(
        self, task: Task, slots: _core.Slots, unit: _Computed
    ) -> tuple[dict[str, float] | None, str]:
        """Commit a unit; return the metrics, if the epoch is over, and the hash of the state."""
        live = unit.live
        with self.use_settings(unit.not_exact):
            metrics = None
            if task.step == self.context.units_per_epoch - 1:
                metrics = end_epoch(live, task.epoch)
            live.generators = generators.capture(live.torch, live.cuda)
            tree = self.copy_to_host(live)
            if self._try_structure(live, task, tree):
                # The state of a GPU, in the memory that the trial has just used.
                tree = self.copy_to_host(live)
            if task.after is not None and self._clock is not None:
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
        structure = describe_structure(tree["model"])
        last, live.structure = live.structure, structure
        tries = self._tries.get(task.trial, 0)
        has_room = 2 * live.held_bytes <= self.context.share.live_bytes
        if last in (None, structure) or tries >= MAX_TRIES or not has_room:
            return False
        self._tries[task.trial] = tries + 1
        packed = _core.pack_state(tree)
        try:
            with leave_no_trace(self):
                other = self.build(task.trial, task.config, task.epochs)
                if task.step < self.context.units_per_epoch - 1:
                    self.begin_again(other, task.epoch)
                other = self.load_anew(other, task, packed, task.epoch)
                if describe_structure(pack_tree(other)["model"]) != structure:
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

    def _save_epoch(self, task: Task, slots: _core.Slots, state_hash: str) -> str | None:
        """Save the state of an epoch's end, if the task asks for it; return its file."""
        if not task.keep_state:
            return None
        state_file = epoch_state_file(task.trial, task.epoch)
        with explain_storage_errors():
            name = unpublished_name(state_file, state_hash)
            slots.save(str(Path(self.context.folders.states, name)))
        return state_file

    def _compute(self, live: LiveModel, task: Task) -> UnitSums:
        """Train or evaluate the model for a task; return the metrics as sums."""
        live.progress.begin_unit(task.epoch, task.step)
        if task.step == 0 and hasattr(live.model, "begin_epoch"):
            live.model.begin_epoch(task.epoch)
        return self._evaluate(live, task) if task.part < 0 else self._train(live, task)

    def _note_unlike(self, task: Task, error: RecordedStepDiffers) -> str:
        """Drop a model whose recorded step was wrong; its trial then takes ordinary steps."""
        self._ordinary.add(task.trial)
        self._drop_model(task.trial)
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
            self._verify(True, shard)
        loader = self.make_loader(
            live.model, cut.batch_size, training=True, trial=task.trial, epoch=task.epoch
        )
        loader.begin([part.mix], task.epoch, part.start, part.count)
        depots.tell_first_note(loader)
        step, device = live.model.train_batch, self.device_of(live.model)
        if hasattr(live.model, "begin_unit"):
            live.model.begin_unit(part.updates)
        with replay_recorded_steps(live.model, training=True):
            result = run_batches(loader, step, beat=self._beat, device=device)
        sums = end_training(live.model, result, live.progress)
        loss, weight = sums.sums.get("loss", (0.0, 0.0))
        if weight and not math.isfinite(loss):
            before = order.batches_before(task.trial, task.epoch, task.step, cut)
            first = result.not_finite.get("loss")
            cause = self._find_cause_in_data(live.model, task.trial, training=True)
            raise Diverged(describe_divergence(task.epoch, before, loss / weight, first) + cause)
        return sums

    def _evaluate(self, live: LiveModel, task: Task) -> UnitSums:
        """Validate with separate random generators, so that training is not affected."""
        context = self.context
        batch_size = context.batches.eval_size_of(task.config)
        _, validation = context.views(task.trial)
        assert validation is not None
        for shard in range(validation.num_shards):
            self._verify(False, shard)
        loader = self.make_loader(live.model, batch_size, training=False, trial=task.trial)
        loader.begin(mix_in_order(validation), 0)
        depots.tell_first_note(loader)
        seed = evaluation_seed(context.exactness.seed, task.trial, task.epoch)
        with generators.preserve_generators(live.torch, seed):
            device = self.device_of(live.model)
            with replay_recorded_steps(live.model, training=False):
                result, metrics = evaluate_model(live.model, loader, self._beat, device)
        live.progress.add_validation(metrics)
        loss, weight = result.sums.get("loss", (0.0, 0.0))
        if weight and not math.isfinite(loss):
            cause = self._find_cause_in_data(live.model, task.trial, training=False)
            warn(f"the validation loss is {loss / weight}{cause}")  # the trial is not ranked
        return result

    def _find_cause_in_data(self, model: Any, trial: int, *, training: bool) -> str:
        """Return a phrase about columns that may make a loss NaN or infinite; "" if none do."""
        train, validation = self.context.views(trial)
        data = train if training else validation
        assert data is not None
        names = read_columns(model, data.columns) or [*data.columns]
        reasons = self._bad_columns.setdefault((training, self.context.fold_of(trial)), {})
        new = [name for name in names if name not in reasons]
        reasons.update(dict.fromkeys(new, ""))  # each column is looked at once
        # If reading the data fails, for example for lack of memory, the message is only about the
        # loss.
        with _stop_clock(self._clock, TRY_SECONDS), contextlib.suppress(Exception):
            reasons.update(find_not_finite(data, new))
        bad = summarize_texts({name: reasons[name] for name in names if reasons[name]})
        return f"; {bad}, which may be the cause: fill them, or drop these rows" if bad else ""

    # --- models ----------------------------------------------------------

    def _take_model(self, task: Task, slots: _core.Slots) -> tuple[LiveModel, bool, bool]:
        """Return the trial's model, whether its state was loaded, and whether it was built.

        The random generators are restored, and the PyTorch settings that its ``build`` left.
        """
        # No trial's generators are in place until the unit succeeds: a failing build also moves
        # them.
        last, self._last_trial = self._last_trial, None
        live = self._live.get(task.trial)
        if live is not None and live.epochs != task.epochs:
            live = None  # the model was built for a different number of epochs
        begins = task.position == 0 or task.clone_of is not None
        if live is not None and begins and live.position != task.position:
            live = None  # the trial's states are lost: it starts again
        loaded, built = False, live is None
        try:
            if live is None:
                self._drop_model(task.trial)
                DROPPED.free()
                live = self._build_for(task)
                if task.clone_of is not None:
                    live = self._load_clone(live, task, task.clone_of)
                    loaded = True
                elif task.position == 0:
                    live.position = 0
            else:
                apply_settings(live.libraries)
            self._live.pop(task.trial, None)  # until its state is right
            if live.position != task.position:
                with self.use_settings():
                    if task.step > 0 and (built or live.progress.epoch != task.epoch):
                        self.begin_again(live, task.epoch)
                    live = self._load(live, task, slots)
                loaded = True
        except BaseException:
            DROPPED.add(None)
            raise
        others = turns.is_shared() or not self._own_process  # they also use the generators
        if loaded or task.trial != last or others:
            generators.restore(live.generators)
        self._live[task.trial] = live
        return live, loaded, built

    def _build_for(self, task: Task) -> LiveModel:
        reads = Reads() if task.notes_reads else None
        live = self.build(task.trial, task.config, task.epochs, reads)
        if reads is not None:
            self._read = reads.list_names(task.config)
        live.own_numbers = OwnNumbers(live.model)
        return live

    def build(
        self,
        trial: int,
        config: Mapping[str, Any],
        epochs: int | None = None,
        reads: Reads | None = None,
    ) -> LiveModel:
        """Build a trial's model for `epochs`; note in `reads` what ``build`` reads."""
        info = self.make_info(trial, config, epochs)
        if reads is None:
            model, torch = build_model(self.context, trial, config, info)
        else:
            model, torch = self._build_noting(trial, config, info, reads)
        if self._clock is not None:
            self._clock.note_built()
        if not self._tried and is_gpu(where := self.device_of(model)):
            self._try_device(where)
        if trial in self._ordinary and hasattr(model, "stop_recording"):
            model.stop_recording()
        self.warnings.take_filters()  # build may have imported the filters' categories
        cuda = torch and (is_gpu(self.context.device) or generators.uses_cuda(model))
        state = generators.capture(torch, cuda)
        return LiveModel(
            model,
            torch,
            cuda,
            epochs=epochs,
            generators=state,
            libraries=present_settings(),
        )

    def _build_noting(
        self, trial: int, config: Mapping[str, Any], info: Info, reads: Reads
    ) -> tuple[Any, bool]:
        """Build a model while noting what ``build`` reads; see `cerebro.worker.read_names`."""
        output: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        try:
            built = build_model(self.context, trial, config, info, reads.note_reads)
        except Exception as error:
            if not reads.may_have_caused(error):
                raise
        else:
            if not reads.is_held():
                return built
            del built
            output = self.redirect_output(None)  # the first build's output has been logged
        reads.give_up()
        DROPPED.add(None)
        DROPPED.free()
        with output:
            return build_model(self.context, trial, config, info)

    def begin_again(self, live: LiveModel, epoch: int) -> None:
        """Call ``begin_epoch`` before a state is loaded; its output has been logged before."""
        with self.redirect_output(None):
            begin_again(live.model, epoch)

    def _try_device(self, device: str) -> None:
        """Try the GPU and compile its kernels without counting the time towards the unit."""
        aside = _stop_clock(self._clock, TRY_SECONDS)
        with aside, contextlib.suppress(MemoryError):  # the loader will raise it
            depots.find_problem(device)
            self._tried = True

    def _settle_commit(self, task: Task, slots: _core.Slots) -> None:
        """Fence off earlier workers of this unit, and undo a commit that was not reported.

        If a worker died between its commit and its answer, the coordinator does not know the
        committed state, so the unit runs again from the state before it.
        """
        slots.fence(task.dispatch)
        if task.position == 0 or task.clone_of is not None or task.origin is not None:
            return  # the unit does not start from a state in the slots
        committed = slots.committed()
        if committed is not None and committed[0] == task.position + 1:
            slots.revert(attempt=task.dispatch, position=task.position)

    def _load(self, live: LiveModel, task: Task, slots: _core.Slots) -> LiveModel:
        """Load a trial's state; return its model, which is a new one if the state did not fit."""
        if task.origin is not None:
            packed = read_state(task.origin)
        else:
            packed = self._read_committed(task, slots)
        live = self.load_anew(live, task, packed, task.epoch if task.step > 0 else task.epoch - 1)
        live.position = task.position
        return live

    def load_anew(self, live: LiveModel, task: Task, packed: Any, epoch: int) -> LiveModel:
        """Load a state of `epoch` into a trial's model; see `load_or_rebuild`."""

        def rebuild() -> LiveModel:
            with self.redirect_output(None):
                return self._build_for(task)

        return load_or_rebuild(live, lambda model: self.load_packed(model, packed), rebuild, epoch)

    def _read_committed(self, task: Task, slots: _core.Slots) -> Any:
        committed = slots.committed()
        if committed is None or committed[0] != task.position:
            at = "nothing" if committed is None else f"unit {committed[0]}"
            raise StateError(
                f"trial {task.trial}: expected the state of unit {task.position} in "
                f"{self._path_of_slots(task.trial)}, found {at}"
            )
        return slots.view()

    def _load_clone(self, live: LiveModel, task: Task, clone_of: CloneOf) -> LiveModel:
        """Load the model state of another trial into a new trial, but not its generators."""
        packed = read_state(clone_of)
        state = _core.unpack_state(packed, "torch" if live.torch else "numpy")["model"]

        def load(live: LiveModel) -> None:
            if hasattr(live.model, "load_clone"):
                live.model.load_clone(state, strip_study(task.config))
            else:
                live.model.load_state_dict(state)

        with self.use_settings():
            live = load_or_rebuild(live, load, lambda: self._build_for(task), task.epoch - 1)
        live.position = task.position
        return live

    def _drop_least_used(self, current: int) -> tuple[int, ...]:
        """Release the least recently used models; return the numbers of their trials."""
        context = self.context
        limit = context.limits.live_models
        if limit is None:
            live = self._live[current]
            size = live.held_bytes
            most = MAX_LIVE_MODELS_ON_GPU if is_gpu(context.device) else MAX_LIVE_MODELS
            limit = max(1, min(most, context.share.live_bytes // size))
        dropped = []
        while len(self._live) > limit:
            trial = next(iter(self._live))
            self._drop_model(trial)
            dropped.append(trial)
        while len(self._slots) > MAX_OPEN_SLOTS:
            trial = next(iter(self._slots))
            self._slots.pop(trial).close()
        return tuple(dropped)

    def _drop_model(self, trial: int) -> None:
        live = self._live.pop(trial, None)
        if live is not None:
            # Without a state, its first unit has failed.
            DROPPED.add(live.held_bytes if live.state_bytes else None)

    def free_checked_models(self) -> None:
        """Free the models of a check on a GPU, where room for others may be short."""
        if is_gpu(self.context.device):
            DROPPED.free(all_sizes=True)

    def _release(self, ended: Sequence[int]) -> None:
        for trial in ended:
            self._drop_model(trial)
            self.warnings.forget(trial)
            self.examined.pop(trial, None)
            self._tries.pop(trial, None)
            slots = self._slots.pop(trial, None)
            if slots is not None:  # a deleted file occupies the disk as long as it is mapped
                slots.close()

    def make_info(self, trial: int, config: Mapping[str, Any], epochs: int | None = None) -> Info:
        context = self.context
        return make_info(
            context.views(trial)[0],
            context.order(trial),
            trial=trial,
            epochs=context.limits.epochs if epochs is None else epochs,
            cut=context.batches.make_cut(config),
            fold=context.fold_of(trial),
            device=context.device,
        )

    # --- devices ---------------------------------------------------------

    def device_of(self, model: Any) -> str:
        """Return the device of a model's batches and metrics: for PyTorch, the run's device."""
        return batch_device(model, self.context.device)

    @contextlib.contextmanager
    def use_settings(
        self, not_exact: set[str] | None = None, *, strict: bool = False
    ) -> Iterator[None]:
        """Compute with the run's settings; add the non-deterministic operations to `not_exact`.

        With `strict`, such an operation raises an error for `tolerates`.
        """
        context = self.context
        with context.exactness.compute_on(context.device, strict=strict):
            if not context.exactness.may_be_inexact_on(context.device):
                yield
                return
            with note_operations(set() if not_exact is None else not_exact):
                yield

    def tolerates(self, error: BaseException, not_exact: set[str]) -> bool:
        """Return whether the work may run again without `strict`; add the operation's name."""
        name = self.context.exactness.find_inexact_operation(error, self.context.device)
        if name is not None:
            not_exact.add(name)
        return name is not None

    def copy_to_host(self, live: LiveModel) -> dict[str, Any]:
        """Return a trial's state in host memory; tensors on a GPU are copied."""
        tree = pack_tree(live)
        if self.device_of(live.model) == "cpu":
            return tree
        return self._arena.to_host(tree)  # type: ignore[no-any-return]

    def load_packed(self, live: LiveModel, buffer: Any) -> None:
        """Load a packed state into a live model, on the model's device."""
        load_tree(live, buffer, self.device_of(live.model), self._arena)

    # --- the process's settings -------------------------------------------

    def end_settings(self) -> None:
        """Undo the settings of PyTorch, Keras and JAX that a model's ``build`` left."""
        restore_settings(self.context.libraries)

    # --- for the comparison of a trial with one after a hop ---------------

    def live_model(self, trial: int) -> LiveModel | None:
        return self._live.get(trial)

    def committed_state(self, trial: int) -> Any:
        return self._slots_of(trial).view()

    def hash_of(self, live: LiveModel) -> str:
        return _core.hash_state(_core.pack_state(self.copy_to_host(live)))

    def is_not_exact(self, trial: int) -> bool:
        return trial in self._not_exact

    def forget_usage(self) -> None:
        """Make the next unit measure the memory again, because other work has used some."""
        self._usage = None

    def stop_clock(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        return _stop_clock(self._clock, seconds)

    # --- data and files --------------------------------------------------

    def forget_generators(self) -> None:
        """Make the next unit restore its generators, even if the trial is the same."""
        self._last_trial = None

    def make_loader(
        self, model: Any, batch_size: int, *, training: bool, trial: int, epoch: int = 0
    ) -> Loader:
        """Return a loader. A few loaders are kept, because their buffers are warm."""
        context = self.context
        framework = getattr(model, "framework", "dlpack")
        train, validation = context.views(trial)
        data = train if training else validation
        assert data is not None
        last = getattr(model, "channels_last", False)
        columns, self._unfit = read_columns(model, data.columns), {}
        if not training and context.folds is None:  # folds are views of the training data
            columns = self._find_fitting_columns(model, columns)
        copy = epoch % copies.count_copies(data) if training else 0
        key = (
            training,
            batch_size,
            framework,
            last,
            data._generation,
            context.fold_of(trial),
            copy,
            None if columns is None else tuple(columns),
        )
        loader = self._loaders.pop(key, None)
        if loader is None:
            loader = make_batches(
                model,
                data,
                batch_size,
                context.device,
                columns=columns,
                seed=context.exactness.seed,
                shuffle=training and context.batches.shuffle,
                orders=self._orders,
                drop_last=training and context.batches.drop_last,
                threads=context.share.loader_threads,
                augment=training,
                copy=copy,
            )
            depots.set_limit(loader, context.share.data_bytes)
            self._moved = self._moved or getattr(loader, "why", "")
        self._loaders[key] = loader
        most = MAX_GPU_LOADERS if is_gpu(context.device) else MAX_LOADERS
        if len(self._loaders) > max(most, 2 * len(context.folds or ())):
            self._loaders.popitem(last=False)[1].close()
        return loader

    def _find_fitting_columns(self, model: Any, read: list[str] | None) -> list[str] | None:
        """Return the columns of validation batches; see `find_fitting_columns`."""
        train, validation = self.context.train, self.context.validation
        assert validation is not None
        key = None if read is None else tuple(read)
        if key not in self._fits:
            what = f"validation ({validation.path})"
            self._fits[key] = find_fitting_columns(model, train, validation, what)
            if text := describe_left_out(self._fits[key][1], validation):
                warn(f"validation: {text}")
        columns, self._unfit = self._fits[key]
        return columns

    def _close_loaders(self) -> None:
        while self._loaders:
            self._loaders.popitem()[1].close()

    def _verify(self, training: bool, shard: int) -> None:
        """Check a shard's file sizes, and before the first use in a run, its checksums."""
        # Folds are validated on files of the training data.
        training = training or self.context.folds is not None
        key = (training, shard)
        data = self.context.train if training else self.context.validation
        assert data is not None
        now = time.monotonic()
        if self.context.verify and key not in self._verified:
            data._verify_shard(shard)
            self._verified.add(key)
        # Short units use all shards each, so recent checks still count.
        elif now - self._sized.get(key, -math.inf) < SIZES_SECONDS:
            data._pull([shard])
            return
        else:
            data._check_sizes(shard)
        self._sized[key] = now

    def _path_of_slots(self, trial: int) -> str:
        return f"{self.context.folders.slots}/{trial}"

    def _slots_of(self, trial: int) -> _core.Slots:
        slots = self._slots.pop(trial, None)
        if slots is None:
            with explain_storage_errors():
                slots = _core.Slots(self._path_of_slots(trial), True)
        self._slots[trial] = slots
        return slots

    @contextlib.contextmanager
    def redirect_output(self, trial: int | None) -> Iterator[None]:
        """Redirect output to the trial's log; without a trial, discard it."""
        path = log_path(self.context.folders.logs, trial)
        with redirect_descriptors(path) if self._own_process else redirect_streams(path):
            yield

    # --- the end ---------------------------------------------------------

    def close(self) -> None:
        """Release models, loaders, mapped files and cached GPU memory."""
        self._live.clear()
        self._arena = StateArena()
        self._close_loaders()
        for slots in self._slots.values():
            slots.close()
        self._slots.clear()
        give_back_memory(self.context.device)


def _stop_clock(clock: Any, seconds: float) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext() if clock is None else clock.stop_clock(seconds)
