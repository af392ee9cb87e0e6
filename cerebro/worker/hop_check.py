"""The hop check: train with and without packing and unpacking in between, and compare."""

from __future__ import annotations

import array
import contextlib
import functools
import re
import types
import warnings
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

import cerebro._core as _core
from cerebro.machine import generators
from cerebro.model import (
    BaseModel,
    Unchecked,
    declares_metrics,
    is_cpu_only,
    named_metrics,
    words_of,
)
from cerebro.worker.diagnosis import layout
from cerebro.worker.evaluate import end_training, evaluate_model, run_batches
from cerebro.worker.messages import CheckDone, ModelFacts
from cerebro.worker.models import Loader, end_epoch, hash_parameter_order
from cerebro.worker.own_numbers import (
    are_equal,
    as_bytes,
    attributes_of,
    has_objects,
    is_array,
    places_of,
)
from cerebro.worker.read_names import Reads
from cerebro.worker.runner import UnitRunner
from cerebro.worker.user_errors import describe

BATCHES = 2  # the number of batches before the hop, and again after it
MAX_DEPTH = 6
_FORWARD = re.compile(r"^model\._forward\.net\b")  # users know it as `model.net`
_NOT_DETERMINISTIC = "training is not deterministic: the same batches twice gave different states"
_GENERATOR = "a random generator (a model that uses PyTorch's must set framework = 'torch')"
_LISTED = re.compile(r"\.param_groups\[\d+\]\['params'\]\[\d+\]$|^model\._parameters\[\d+\]$")
"""A parameter found only in an optimizer's list, or in the model's list of all parameters:
`forward` has replaced it in the network by a new one, which is in the state.
"""


def check_hop(
    runner: UnitRunner,
    config: Mapping[str, Any],
    not_exact: Collection[str] = (),
    *,
    thorough: bool = False,
) -> CheckDone:
    """Make the hop check in a worker, and diagnose the model.

    `not_exact` names the operations that are not deterministic. If the model trains, but fails
    after a hop or in the comparison, ``error`` says why, and ``model.state_bytes`` is not 0.
    """
    runner.context.check_files()
    reads = Reads()
    straight = _CheckedModel(runner, config, reads)
    read = reads.list_names(config)
    straight.train(0)
    packed = straight.pack_state()
    straight.note_layouts()
    straight.train(1)
    straight.validate()
    model = straight.live.model
    facts = ModelFacts(
        is_cpu_only(model),
        hash_parameter_order(model),
        words_of(model),
        declares_metrics(model),
        metrics=tuple(sorted({*straight.metrics, *named_metrics(model)})),
        state_bytes=memoryview(straight.pack_state()).nbytes,
    )
    done = CheckDone(runner.worker, (), model=facts, read=read)
    try:
        hopped = straight.build_again()
        problems = _find_hop_problems(
            straight,
            hopped,
            packed,
            not_exact,
            further=thorough or runner.context.limits.epochs > 1,
        )
    except Exception as error:
        if runner.tolerates(error, set(not_exact)):
            raise  # the check runs again, without `strict`
        # The configuration can be trained, so its trial may never report this error.
        return replace(done, error=runner.describe_cause(error, config))
    from cerebro.worker.diagnosis.diagnose import diagnose  # only some workers need it

    findings = diagnose(
        hopped.live,
        functools.partial(hopped.load, packed),
        functools.partial(hopped.batch, 0),
        *runner.context.views(0),
        thorough=thorough,
    )
    if not problems and not isinstance(hopped.live.model, BaseModel):
        findings = layout.check_layouts(straight.layouts, hopped.layouts) + findings
    gain = _measure_graph_gain(straight)
    return replace(done, problems=tuple(problems), findings=tuple(findings), gain=gain)


def _measure_graph_gain(checked: _CheckedModel) -> tuple[float, float] | None:
    """Return the time of a training step as it is and with ``graph=True``; see `CheckDone.gain`."""
    if not checked.live.torch:
        return None
    from cerebro.torch.step_gain import measure_gain

    with generators.preserve_generators(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return measure_gain(checked.live.model, checked.batch(0))
        except Exception:
            return None


def _find_hop_problems(
    straight: _CheckedModel,
    hopped: _CheckedModel,
    before: Any,
    not_exact: Collection[str],
    *,
    further: bool,
) -> list[str]:
    """Continue training after a hop, and compare with `straight`, trained without one.

    `before` is the state of `straight` at the hop. `further` says whether to begin a second epoch.
    """
    try:
        hopped.hop_to(before)
    except Exception as error:
        return [f"load_state_dict rejects the result of state_dict: {describe(error)}"]
    hopped.note_layouts()
    hopped.train(1)
    hopped.validate()
    context = straight.runner.context
    if not_exact or context.exactness.varies_on(context.device):
        return []  # no two runs are equal, so a hop cannot be checked
    if straight.is_of_few_batches:  # nothing was trained after the hop
        problems = _find_problems_after_epoch(straight)
    else:
        problems = find_differences(straight, hopped)
        if problems and _differs_from_itself(straight):
            return [_NOT_DETERMINISTIC]
    if further and not problems:
        return _find_problems_between_epochs(straight)
    return problems


def _differs_from_itself(straight: _CheckedModel) -> bool:
    again = straight.build_again()
    again.train(0)
    again.train(1)
    again.validate()
    return again.hash_state() != straight.hash_state()


def _find_problems_after_epoch(straight: _CheckedModel) -> list[str]:
    """Compare with a hop between two epochs, for data of few batches."""

    def train_hopped() -> _CheckedModel:
        hopped = straight.build_again()
        hopped.hop_to(before)
        hopped.train(0, epoch=1)
        hopped.validate()
        return hopped

    try:
        before = straight.pack_state()
        straight.train(0, epoch=1)
        straight.validate()
        hopped = train_hopped()
        problems = find_differences(straight, hopped)
        if problems and hopped.hash_state() != train_hopped().hash_state():
            return [_NOT_DETERMINISTIC]
        return problems
    except Exception:  # the model may have been made for one epoch
        return []


def _find_problems_between_epochs(straight: _CheckedModel) -> list[str]:
    """Begin the next epoch with and without a hop before it; return the problems."""

    def train_hopped() -> _CheckedModel:
        hopped = straight.build_again()
        hopped.load(packed)
        hopped.train(0, epoch=epoch)
        return hopped

    if not _has_own_epochs(straight.live.model):
        return []  # then the state lacks nothing here
    try:
        packed, epoch = straight.pack_state(), straight.epoch + 1
        straight.train(0, epoch=epoch)
        hopped = train_hopped()
        state_hash = hopped.hash_state()
        if state_hash == straight.hash_state():
            return []  # if a counter is lost, nothing depends on it
        if state_hash != train_hopped().hash_state():
            return []  # the epochs are not deterministic
        return find_differences(straight, hopped)
    except Exception:  # after a few batches, it may need a whole epoch
        return []


def _has_own_epochs(model: Any) -> bool:
    """Return whether a model has a ``begin_epoch`` or ``end_epoch`` that is not Cerebro's."""
    methods = [getattr(model, name, None) for name in ("begin_epoch", "end_epoch")]
    return any(
        method is not None and not str(getattr(method, "__module__", "")).startswith("cerebro.")
        for method in methods
    )


class _CheckedModel:
    """One of the two models that are compared."""

    def __init__(
        self, runner: UnitRunner, config: Mapping[str, Any], reads: Reads | None = None
    ) -> None:
        self.runner = runner
        self._config = config
        self.live = runner.build(0, config, reads=reads)
        assert self.live.own_numbers is not None
        self.own = self.live.own_numbers
        self.own_at_hop: dict[str, Any] = {}
        self._built: dict[str, Any] = {}
        with contextlib.suppress(Exception):  # after the training, a walk that fails is reported
            values = walk(self.live.model, "model")
            self._built.update((path, value) for path, value in values if not is_array(value))
        self.layouts: dict[str, layout.Layout] = {}
        self.epoch = 0
        self.metrics: dict[str, float] = {}  # of the epoch, once it is validated
        self.is_of_few_batches = False
        """Whether no batches of the epoch are left for after the hop."""

    def build_again(self) -> _CheckedModel:
        return _CheckedModel(self.runner, self._config)

    def train(self, half: int, epoch: int = 0) -> None:
        """Train on the first (`half` 0) or the second (`half` 1) `BATCHES` batches of an epoch."""
        live, runner = self.live, self.runner
        self.epoch, self.metrics = epoch, {}
        generators.restore(live.generators)
        if half == 0 and hasattr(live.model, "begin_epoch"):
            live.model.begin_epoch(epoch)
        step, device = live.model.train_batch, runner.device_of(live.model)
        result = run_batches(self._make_batches(half), step, device=device)
        end_training(live.model, result, live.progress)
        live.generators = generators.capture(live.torch, live.cuda)
        if half == 0:
            self.own_at_hop = self.own.read_with_generators()
        else:
            self.is_of_few_batches = result.batches == 0

    def _make_batches(self, half: int) -> Loader:
        runner = self.runner
        loader = runner.loaders.make(self.live.model, self._config, training=True, trial=0)
        loader.begin(runner.context.order().pass_of(0, 0), 0, half * BATCHES, BATCHES)
        return loader

    def is_numbered(self, path: str, other: _CheckedModel) -> bool:
        """Return whether a number differs in two models just built: an id, an address or a time."""
        if path in self._built and path in other._built:
            return not are_same(self._built[path], other._built[path])
        # In a mapping of addresses, the keys themselves differ.
        mapping, bracket, _ = path.rpartition("[")
        return any(
            key not in other._built and key.startswith(mapping + bracket) for key in self._built
        )

    def find_unlike_at_hop(self, hopped: _CheckedModel) -> list[str]:
        """Return the user's numbers and random generators that differed right after the hop.

        Later they may be equal again, such as a flag that the first batch sets.
        """
        return [
            path
            for path, value in self.own_at_hop.items()
            if not are_equal(value, hopped.own_at_hop.get(path))
            # A number that differs between two models just built is the number of an object.
            and are_equal(self.own.built.get(path), hopped.own.built.get(path))
        ]

    def batch(self, half: int) -> Any:
        """Return the first batch that ``train(half)`` trains on."""
        return next(self._make_batches(half))

    def pack_state(self) -> Any:
        return _core.pack_state(self.runner.copy_to_host(self.live))

    def hash_state(self) -> str:
        return _core.hash_state(self.pack_state())

    def note_layouts(self) -> None:
        state = self.live.model.state_dict()
        self.layouts = layout.read_layouts(walk(state, "state_dict()"))

    def hop_to(self, packed: Any) -> None:
        """Load a state from within the first epoch."""
        self.runner.begin_again(self.live, 0)
        self.load(packed)

    def load(self, packed: Any) -> None:
        self.runner.load_packed(self.live, packed)
        self.own_at_hop = self.own.read_with_generators()

    def validate(self) -> None:
        """Evaluate on a batch and end the epoch."""
        live, runner = self.live, self.runner
        generators.restore(live.generators)
        _, validation = runner.context.views(0)
        if validation is not None:
            size = runner.context.batches.eval_size_of(self._config)
            loader = runner.loaders.make(live.model, self._config, training=False, trial=0)
            loader.begin([find_first_shards(validation.view.shard_rows, size)], 0, 0, 1)
            with generators.preserve_generators(live.torch, seed=0):
                device = runner.device_of(live.model)
                _, metrics = evaluate_model(live.model, loader, device=device)
            live.progress.validation = metrics
        self.metrics = end_epoch(live, self.epoch)
        live.generators = generators.capture(live.torch, live.cuda)


def find_first_shards(rows: Sequence[int], size: int) -> range:
    """Return the first shards with a batch of rows; only these are copied to a GPU."""
    ends = accumulate(rows)
    return range(1 + next((shard for shard, end in enumerate(ends) if end >= size), len(rows) - 1))


def find_differences(straight: _CheckedModel, hopped: _CheckedModel) -> list[str]:
    """Return one line for each difference between a model after a hop and one that did not hop."""
    problems = []
    state = dict(walk(straight.live.model.state_dict(), "state_dict()"))  # keeps the ids unique
    differ = straight.hash_state() != hopped.hash_state()
    if differ:
        other = dict(walk(hopped.live.model.state_dict(), "state_dict()"))
        changed = [path for path in state if not are_same(state[path], other.get(path))]
        named = ", ".join(changed[:3])
        drawn, others = straight.live.generators, hopped.live.generators
        if not changed and not all(
            are_same(value, others.get(name)) for name, value in drawn.items()
        ):
            named = _GENERATOR
        if named:  # otherwise only the metrics of the epoch differ
            problems.append(f"after a hop training continued differently: {named} differs")
    straight_values = dict(walk(straight.live.model, "model"))
    hopped_values = dict(walk(hopped.live.model, "model"))
    ids = {id_of(value) for value in state.values()}
    lost = [
        path
        for path, value in straight_values.items()
        if id_of(value) not in ids
        and not are_same(value, hopped_values.get(path))
        and not (not is_array(value) and straight.is_numbered(path, hopped))
        and not (not differ and _LISTED.search(path))
    ]
    if differ and not lost:
        lost = straight.find_unlike_at_hop(hopped)
    lost = [_FORWARD.sub("model.net", path) for path in lost]
    problems += [f"{path} is lost by a hop: it is not in state_dict()" for path in lost[:5]]
    moved = layout.find_changed(straight.layouts, hopped.layouts)
    if problems and moved:
        problems.append(f"{layout.describe_change(moved)}: {layout.CURE}")
    for name, value in straight.metrics.items():
        if not problems and not are_same(value, hopped.metrics.get(name)):
            problems.append(f"after a hop the metric {name!r} differs, although the state does not")
    if differ and not problems:
        problems.append("after a hop training continued differently")
    return problems


# --- walking an object -------------------------------------------------------


def walk(root: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the path and value of every array, tensor and number in an object, each object once."""
    yield from _walk(root, name, MAX_DEPTH, {})


def _walk(value: Any, path: str, depth: int, seen: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (bool, int, float, complex)):
        yield path, value
        return
    if isinstance(value, (bytearray, array.array)):
        value = np.frombuffer(bytes(value), np.uint8)
    if isinstance(value, (str, bytes, type, types.ModuleType)) or value is None:
        return
    if id(value) in seen:
        return
    seen[id(value)] = value  # keeps the object alive, so that its id is not reused
    if is_array(value) and not has_objects(value):
        yield path, value
        return
    if depth == 0:
        return
    for part, child in iterate_children(value):
        yield from _walk(child, path + part, depth - 1, seen)


def iterate_children(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object that can hold state."""
    if has_objects(value):
        value = value.ravel().tolist()
    if isinstance(value, Mapping):
        for index, (key, child) in enumerate(list(value.items())):
            yield f"[{_format_key(key, index)}]", child
        return
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        entries = _sort_elements(value) if isinstance(value, (set, frozenset)) else value
        for index, child in enumerate(list(entries)):
            yield f"[{index}]", child
        return
    if isinstance(value, functools.partial):
        yield ".func", value.func
        yield ".args", value.args
        yield ".keywords", value.keywords
        return
    if isinstance(value, (types.MethodType, types.FunctionType)):
        for part, place in places_of(value):
            with contextlib.suppress(ValueError):  # the cell is still empty
                yield part, place.read()
        return
    module = type(value).__module__
    # Objects that only run a step are not state: a captured graph, a recorded or compiled program.
    steps = ("cerebro.torch.graph", "cerebro.torch.recorded_step")
    ours = ("cerebro._core", "cerebro.torch.parameter_order", *steps)
    numbered = ("flax.ids",)  # every flax module has a unique number
    modes = ("torch.autograd.grad_mode",)  # has the mode before its last use
    skipped = (*ours, *numbered, *modes, "builtins", "numpy.random")
    if isinstance(value, Unchecked) or module.startswith(skipped):
        return
    # A compiled network is a module of TorchDynamo; all its other objects only run a step.
    if module.startswith("torch._dynamo") and not hasattr(value, "_modules"):
        return
    for attribute, child in sorted(attributes_of(value).items()):
        # PyTorch keeps a module's parts in three mappings; users know each part by its own name.
        if attribute in ("_parameters", "_buffers", "_modules") and isinstance(child, Mapping):
            yield "", child if attribute == "_modules" else dict(child)
        elif not attribute.startswith(("__", "_torchdynamo")):
            yield f".{attribute}", child


def _sort_elements(entries: Collection[Any]) -> list[Any]:
    """Return a set's elements in the same order in two models, as far as possible."""

    def key(value: Any) -> tuple[str, Any]:
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if is_array(value) and not has_objects(value):
            return kind, as_bytes(value)
        return kind, repr(value).encode() if isinstance(value, (str, bytes, int, float)) else b""

    return sorted(entries, key=key)


def _format_key(key: Any, index: int) -> str:
    """Return a mapping's key as it is in a path; a tensor is given by its place and shape."""
    if isinstance(key, np.generic) or not is_array(key):
        return repr(key)
    return f"<{index}: {type(key).__name__} {'x'.join(map(str, key.shape))}>"


def id_of(value: Any) -> Any:
    """Return the identity of a tensor's memory, or of any other object."""
    pointer = getattr(value, "data_ptr", None)
    return ("memory", pointer()) if callable(pointer) else id(value)


def are_same(left: Any, right: Any) -> bool:
    """Return whether two leaves of nested values are equal bit for bit."""
    if is_array(left) != is_array(right):
        return False
    if not is_array(left):
        return type(left) is type(right) and (left == right or (left != left and right != right))
    if tuple(left.shape) != tuple(right.shape) or str(left.dtype) != str(right.dtype):
        return False
    return as_bytes(left) == as_bytes(right)
