"""Build the models of trials, make their batches, pack and load their states, drop them.

A model and the functions that train it refer to each other, so only Python's garbage collector
frees a dropped model. The collector counts objects, not bytes: weights of gigabytes are a few
objects, and on a GPU the next model would not fit beside them. Each collection looks at all objects
of the process, which takes about 0.1 s with PyTorch, so small models are left to the collector.

A state can be loaded if ``build``, and ``begin_epoch`` after it, make a model of its structure.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import cerebro._core as _core
from cerebro.data import Dataset, depots
from cerebro.data.batches import make_trusted_loader
from cerebro.data.depots import MovedBatches
from cerebro.data.order import Cut, EpochOrder
from cerebro.data.validation import UnfitDataError, find_unfit_columns
from cerebro.errors import CerebroError, InputError, StateError, text_of
from cerebro.machine import flags, generators
from cerebro.machine.devices import is_gpu, is_short_of_gpu_memory, set_build_device
from cerebro.machine.guard import guard_trial
from cerebro.machine.libraries import LIBRARIES, TORCH
from cerebro.model import BaseModel, Info, check_model, framework_of, read_columns
from cerebro.run.recipe import call_build
from cerebro.run.settings import Batches
from cerebro.worker.contents import OwnNumbers
from cerebro.worker.evaluate import convert_metrics
from cerebro.worker.gpu import StateArena
from cerebro.worker.messages import MAX_LIVE_MODELS, MAX_LIVE_MODELS_ON_GPU, RunContext
from cerebro.worker.read_names import Reads
from cerebro.worker.sharing import Sharing, Unshared
from cerebro.worker.trial_state import EpochProgress
from cerebro.worker.user_errors import describe
from cerebro.worker.wrapping import wrap

COLLECTED_BYTES = 256 << 20  # dropped models of this size together are freed at once


class DroppedModels:
    """Counts the bytes of this process's dropped models that may still be in memory."""

    def __init__(self) -> None:
        self._bytes = 0

    def add(self, nbytes: int | None) -> None:
        self._bytes += COLLECTED_BYTES if nbytes is None else nbytes

    def free(self, *, all_sizes: bool = False) -> None:
        """Free dropped models if they are large; call this where no frame refers to them."""
        if all_sizes or self._bytes >= COLLECTED_BYTES:
            gc.collect()
            self._bytes = 0


DROPPED = DroppedModels()


Loader = _core.Loader | MovedBatches

_MOST_NAMED = 5  # the most columns that a message names


@dataclass
class LiveModel:
    """A model in memory; `position` is the number of units committed to the trial's state."""

    model: Any
    torch: bool
    cuda: bool = False  # whether CUDA's generator is part of its state
    position: int = -1
    epochs: int | None = None  # the task's `epochs`, for which the model was built
    generators: dict[str, Any] = field(default_factory=dict)
    progress: EpochProgress = field(default_factory=EpochProgress)
    state_bytes: int = 0
    libraries: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The settings of PyTorch, Keras and JAX that ``build`` left; the model computes with them."""
    structure: Structure | None = None  # of a state that a model just built can load
    own_numbers: OwnNumbers | None = None  # as ``build`` made them, in a worker
    writes: int = 0  # `Sharing.writes` when the model was built

    @property
    def held_bytes(self) -> int:
        """The bytes that the model takes, about: weights, gradients, moments, recorded steps."""
        return 3 * max(1, self.state_bytes) + int(getattr(self.model, "held_bytes", 0))


class LiveModels(dict[int, LiveModel]):
    """The models that a worker keeps between units, the least recently used first."""

    def __init__(self, context: RunContext, sharing: Sharing) -> None:
        super().__init__()
        self._context = context
        self.sharing = sharing
        self._untold: set[int] = set()  # trials whose models were dropped for another worker's unit

    def drop(self, trial: int) -> None:
        live = self.pop(trial, None)
        if live is not None:
            # Without a state, its first unit has failed.
            DROPPED.add(live.held_bytes if live.state_bytes else None)

    def close(self) -> None:
        """Drop all models, and free what they share unless other runners have it."""
        DROPPED.add(self.sharing.nbytes)
        self.clear()
        self.sharing = self.sharing.make_empty()
        DROPPED.free()

    def make_room(self) -> None:
        """Drop all models; the next `drop_least_used` returns their trials, too."""
        self._untold.update(self)
        self.clear()

    def drop_least_used(self, current: int) -> tuple[int, ...]:
        """Drop the least recently used models; return all trials whose models are gone."""
        context, gone = self._context, sorted(self._untold - {current})
        self._untold.clear()
        limit = context.limits.live_models
        if limit is None:
            most = MAX_LIVE_MODELS_ON_GPU if is_gpu(context.device) else MAX_LIVE_MODELS
            room = context.share.live_bytes - self.sharing.nbytes
            limit = max(1, min(most, room // self[current].held_bytes))
        while len(self) > limit:
            gone.append(next(iter(self)))
            self.drop(gone[-1])
        return tuple(gone)


# --- shared by the runner, replay, check and Trial.load ----------------------


def build_model(
    context: RunContext,
    config: Mapping[str, Any],
    info: Info,
    given: Callable[[Mapping[str, Any]], dict[str, Any]] = dict,
) -> tuple[Any, bool]:
    """Call the user's ``build`` with seeded generators; return the model, and if it uses PyTorch.

    If ``build`` is the first code to import PyTorch, it is called again, so that the first model is
    also built with the run's threads and flags. It is also called again if it changes the flags and
    imports modules: flags that it does not change again were changed by a module, and stay for all
    models of this process. Other flags belong to this model (`LiveModel.libraries`). Settings of
    Keras and JAX are handled likewise. `given` makes the dict that ``build`` gets of `config`.
    """
    flags.postpone_dynamo()
    changed: dict[str, Any] = {}
    for attempt in range(3):
        had_torch, modules = "torch" in sys.modules, len(sys.modules)
        settings_of = {library: context.libraries.get(library.name, {}) for library in LIBRARIES}
        begun = TORCH.of_build(settings_of[TORCH])
        for library, settings in settings_of.items():
            library.begin_build(settings)
        generators.seed_all(info.seed, had_torch)
        computing = context.exactness.compute_on(info.device)
        xla = flags.xla_threads(context.exactness.threads)
        model: Any = None
        # A build may fail without the settings of the modules that it has imported before.
        maybe = contextlib.suppress(*[Exception] * (attempt == 1 and bool(changed)))
        with maybe, computing, xla, set_build_device(info.device), guard_trial():
            model = call_build(context.build, given(config), info)
        now: dict[str, Any] = {}
        for library, settings in settings_of.items():
            if present := library.present():
                now |= present
                begun = library.of_build(settings) | begun
        if attempt == 0:
            changed = {name: new for name, new in now.items() if new != begun.get(name, new)}
            imports = len(sys.modules) > modules
            if had_torch == ("torch" in sys.modules) and not (changed and imports):
                break
        elif attempt == 1:
            again = {name for name in changed if now[name] != begun[name]}
            by_import = {name: changed[name] for name in changed.keys() - again}
            if not by_import and model is not None:
                break
            for name, value in by_import.items():
                owner = next(library for library in LIBRARIES if name in library.FIRST)
                owner.imported[name] = value
    model = wrap(model, info)
    check_model(model)
    if hasattr(model, "bind_info"):
        model.bind_info(info)
    uses_torch = generators.uses_torch(model)
    if uses_torch and is_gpu(info.device):
        # Initialize CUDA now: later, the GPU's generator would take the seed of the trial built
        # last.
        sys.modules["torch"].cuda.init()
    return model, uses_torch


def build_and_note(
    context: RunContext,
    config: Mapping[str, Any],
    info: Info,
    reads: Reads,
    output: contextlib.AbstractContextManager[None],
) -> tuple[Any, bool]:
    """Build a model and note in `reads` what ``build`` reads; see `cerebro.worker.read_names`.

    If the model is built again after it could be built, it is in `output`, as what it prints has
    been logged.
    """
    try:
        built = build_model(context, config, info, reads.note_reads)
    except Exception as error:
        if not reads.may_have_caused(error):
            raise
        output = contextlib.nullcontext()
    else:
        if not reads.is_held():
            return built
        del built
    reads.give_up()
    DROPPED.add(None)
    DROPPED.free()
    with output:
        return build_model(context, config, info)


def make_info(
    data: Any,
    order: EpochOrder,
    *,
    trial: int,
    stream: int | None = None,
    epochs: int,
    cut: Cut,
    fold: int | None = None,
    device: str = "cpu",
    sharing: Unshared | None = None,
) -> Info:
    """Return a trial's `Info` for ``build``; its steps count the batches of `order`."""
    steps = order.steps_of(epochs, cut)
    if max(steps) == 0:
        raise InputError(
            f"trial {trial}: batch_size {cut.batch_size} with drop_last leaves no batch of the "
            f"{data.num_rows} rows: choose a smaller one"
        )
    info = Info(
        epochs=epochs,
        steps_per_epoch=max(steps),
        total_steps=sum(steps),
        batch_size=cut.batch_size,
        trial=trial,
        seed=_core.trial_seed(order.seed, trial if stream is None else stream),
        device=device,
        columns=data.columns,
        classes=data.classes,
        data=data,
        fold=fold,
        steps=() if len(set(steps)) == 1 else tuple(steps),
    )
    vars(info)["sharing"] = sharing or Unshared(order.seed)
    return info


def check_place(
    model: Any, batches: Batches, before: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
    """Raise StateError if a clone's schedule would go on in the wrong place.

    That is so with another batch size if the schedule counts batches and the model cannot convert
    their number.
    """
    schedule = getattr(model, "batch_schedule", None)
    sizes = [batches.make_cut(config).batch_size for config in (before, now)]
    if schedule is not None and sizes[0] != sizes[1]:
        raise StateError(
            f"another batch size ({sizes[1]} instead of {sizes[0]}) would move the clone's "
            f"schedule, {schedule}, which counts batches, to another place"
        )


def load_clone(
    model: Any, state: Mapping[str, Any], config: Mapping[str, Any], **about_parent: Any
) -> None:
    """Load another trial's state; the model gets what its method takes of `about_parent`."""
    load = getattr(model, "load_clone", None)
    if load is None:
        model.load_state_dict(state)
        return
    taken = inspect.signature(load).parameters
    load(state, config, **{name: value for name, value in about_parent.items() if name in taken})


def batch_device(model: Any, device: str) -> str:
    """Return the device of a model's batches: `device` for PyTorch, else host memory."""
    return device if framework_of(model) == "torch" else "cpu"


def make_batches(model: Any, data: Any, batch_size: int, device: str, **options: Any) -> Loader:
    """Return a loader of batches in a model's framework and on the model's device.

    The loader gathers the columns that the model reads, and images in the layout in which it
    computes. It makes batches on a GPU only if that GPU is trusted; see `make_trusted_loader`.
    """
    options.setdefault("columns", read_columns(model, data.columns))
    options["framework"] = framework_of(model)
    if options["framework"] == "numpy" and isinstance(model, BaseModel):
        data = data.without_bfloat16()
    is_torch = options["framework"] == "torch"
    options["channels_last"] = is_torch and getattr(model, "channels_last", False)
    loader = make_trusted_loader(data, batch_size, device=batch_device(model, device), **options)
    if isinstance(loader, MovedBatches):
        depots.warn_once(depots.explain_moving(loader.why))
    return loader


def find_fitting_columns(
    model: Any, train: Dataset, data: Dataset, what: str
) -> tuple[list[str] | None, dict[str, str]]:
    """Return the columns of batches for evaluation, and messages about columns that do not fit.

    The columns are None for all. A model may read whole batches. Then it is unknown whether it
    reads a column that does not fit the training data: batches are made without it, which the
    caller tells with `describe_left_out`, and `explain_unfit` and `hint_at_unfit` explain the
    model's errors.
    Raise UnfitDataError if the model names a column that does not fit.
    """
    read = read_columns(model, train.columns)
    spared = set(getattr(model, "columns_spared", ())) - data.columns.keys()
    needed = [name for name in read or train.columns if name not in spared]
    unfit = find_unfit_columns(train, data, what, needed)
    if not unfit:
        return read_columns(model, data.columns), {}
    fitting = [name for name in data.columns if name not in unfit]
    if read is not None or not fitting:
        raise UnfitDataError(next(iter(unfit.values())))
    return fitting, unfit


def explain_unfit(error: BaseException, unfit: Mapping[str, str]) -> str:
    """Return why an error is about a column that `find_fitting_columns` left out, or ""."""
    if isinstance(error, UnfitDataError):
        return str(error)
    text = text_of(error)
    return next((message for name, message in unfit.items() if repr(name) in text), "")


def describe_left_out(unfit: Iterable[str], data: Dataset) -> str:
    """Return a warning about columns of `data` that `find_fitting_columns` left out; "" if none."""
    names = [name for name in unfit if name in data.columns]
    if not names:
        return ""
    return (
        f"its batches lack the column(s) {join_names(names)}, whose categories are not those of "
        "the training data: if the model reads them, write all rows as one dataset and split that; "
        "if not, set columns_read of the model to the columns that it reads"
    )


def hint_at_unfit(unfit: Mapping[str, str]) -> str:
    """Return what to add to any error of a model whose batches lack columns; "" if none do."""
    if not unfit:
        return ""
    return f"; its batches lack the column(s) {join_names(unfit)}: {next(iter(unfit.values()))}"


def join_names(columns: Iterable[str]) -> str:
    names = [*map(repr, columns)]
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


@contextlib.contextmanager
def explain_unfit_errors(unfit: Mapping[str, str]) -> Iterator[None]:
    """Raise InputError for a model's error if its batches lack columns that do not fit."""
    try:
        yield
    except Exception as error:
        if reason := explain_unfit(error, unfit):
            raise InputError(reason) from None
        if unfit and not isinstance(error, CerebroError):
            raise InputError(describe(error) + hint_at_unfit(unfit)) from error
        raise


def give_back_memory(device: str) -> int:
    """Free GPU memory of dropped models, shards and caches; return the bytes, without caches."""
    if not is_gpu(device):
        return 0
    torch = sys.modules.get("torch")
    shards = depots.drop(device)
    if torch is None:
        return shards
    before = torch.cuda.memory_allocated(device)
    DROPPED.free(all_sizes=True)
    models = before - torch.cuda.memory_allocated(device)
    torch.cuda.empty_cache()
    return shards + max(0, int(models))


@contextlib.contextmanager
def preserve_keras_seeds() -> Iterator[None]:
    """Keep Keras's shared random generator, which each build discards."""
    state: Any = sys.modules.get("keras.src.backend.common.global_state")
    seeds: Any = sys.modules.get("keras.src.random.seed_generator")
    if state is None or seeds is None:
        yield
        return
    shared = state.get_global_attribute(seeds.GLOBAL_SEED_GENERATOR)
    try:
        yield
    finally:
        state.set_global_attribute(seeds.GLOBAL_SEED_GENERATOR, shared)


def begin_again(model: Any, epoch: int) -> None:
    """Call ``begin_epoch`` on a model into which a state from within that epoch is then loaded.

    This sets what depends on the epoch and is not in the state, such as a factor of the loss. It
    may fail, because it needs the state of its epochs: such models do not need this call.
    """
    if hasattr(model, "begin_epoch") and not getattr(model, "begins_once", False):
        with contextlib.suppress(Exception):
            model.begin_epoch(epoch)


def load_or_rebuild(
    live: LiveModel, load: Callable[[LiveModel], None], rebuild: Callable[[], LiveModel], epoch: int
) -> LiveModel:
    """Load a state of `epoch` into a model; if it does not fit, into a new one; return the model.

    A model may change its structure in training: gradual unfreezing adds parameter groups, growing
    networks add layers. So epochs up to `epoch` (-1: none) begin on the new model before the state
    is loaded.
    """
    try:
        load(live)
        return live
    except Exception as error:
        if epoch < 0 or not hasattr(live.model, "begin_epoch") or is_short_of_gpu_memory(error):
            raise
        misfit = error
    again = rebuild()
    try:
        for begun in range(epoch + 1):
            again.model.begin_epoch(begun)
        load(again)
    except Exception:
        raise misfit from None
    return again


def end_epoch(live: LiveModel, epoch: int) -> dict[str, float]:
    """End a model's epoch; return its metrics, including those computed only at the end."""
    metrics = live.progress.epoch_metrics()
    if not hasattr(live.model, "end_epoch"):
        return metrics
    # Pass a copy, so that the model cannot change the reported metrics.
    computed = live.model.end_epoch(epoch, dict(metrics))
    if not isinstance(computed, Mapping) or not computed:
        return metrics
    # These are of the whole epoch, and not means over batches.
    live.progress.training |= {n: (value, 1.0) for n, value in convert_metrics(computed).items()}
    return live.progress.epoch_metrics()


def pack_tree(live: LiveModel) -> dict[str, Any]:
    """Return the state that a trial carries from one unit to the next."""
    state = live.model.state_dict()
    if hasattr(live.model, "in_fixed_order"):  # so that it has the same hash in every process
        state = live.model.in_fixed_order(state)
    return {"model": state, "generators": live.generators, "progress": live.progress.to_state()}


def load_tree(
    live: LiveModel, buffer: Any, device: str = "cpu", arena: StateArena | None = None
) -> None:
    """Load a packed state into a live model on `device`."""
    tree: Any = None
    if device != "cpu":
        tree = _core.unpack_state(buffer, "torch", copy=None)  # only read: the arena makes the copy
        tree = (arena or StateArena()).to_device(tree, device)
    elif getattr(live.model, "loads_in_place", False):
        tree = _core.load_into(buffer, pack_tree(live))  # None if the states' layouts differ
    if tree is None:
        tree = _core.unpack_state(buffer, "torch" if live.torch else "numpy")
    live.model.load_state_dict(tree["model"])
    live.structure = describe_structure(tree["model"])
    live.generators = tree["generators"]
    live.progress = EpochProgress.from_state(tree["progress"])


Structure = frozenset[tuple[str, tuple[int, ...]]]
"""The paths of a state's arrays with their shapes, and of the parameters of its optimizers."""

_NAMES = "parameter_names"  # see `cerebro.torch.parameter_order`
_VARYING = ("gradients", "lightning", "metrics")  # parts of a state that a batch may change


def describe_structure(state: Any) -> Structure:
    """Return the structure of a model's state, which is made of dicts, lists and arrays."""
    if isinstance(state, Mapping):
        state = {key: part for key, part in state.items() if key not in _VARYING}
    return frozenset(_list_parts(state, ""))


def hash_parameter_order(model: Any) -> str:
    """Return a hash of the order of a network's parameters; empty if the model has no network.

    It differs if ``build`` makes layers in the order of a set, in a process with another hash seed.
    """
    net: Any = getattr(model, "net", None)
    if not hasattr(net, "named_parameters"):
        return ""
    names = "\n".join(name for name, _ in net.named_parameters())
    return hashlib.sha256(names.encode(errors="surrogatepass")).hexdigest()[:32]


def _list_parts(value: Any, path: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    if isinstance(value, (Mapping, list, tuple)):
        for key, child in value.items() if isinstance(value, Mapping) else enumerate(value):
            if key == _NAMES:
                yield f"{path}: {sorted(sorted(map(str, names)) for names in child)}", ()
            elif isinstance(child, (Mapping, list, tuple)) or hasattr(child, "shape"):
                yield from _list_parts(child, f"{path}/{key}")
    elif hasattr(value, "shape"):
        yield path, tuple(value.shape)
