"""The hop check: train with and without packing and unpacking in between, and compare.

A packed state has every tensor in C order. A model that keeps what it loads therefore continues
with row-major copies of its column-major tensors, and a product of them may have other last bits.
So the memory layouts of a state's tensors before and after a hop are compared, too.
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np

import cerebro._core as _core
from cerebro.machine import generators
from cerebro.model import (
    BaseModel,
    declares_metrics,
    is_cpu_only,
    named_metrics,
    shares_gpu,
    words_of,
)
from cerebro.report.findings import Finding
from cerebro.worker import gpu
from cerebro.worker.contents import are_equal, are_same, id_of, is_array, walk
from cerebro.worker.evaluate import end_training, evaluate_model, run_batches
from cerebro.worker.messages import CheckDone, ModelFacts
from cerebro.worker.models import Loader, end_epoch, hash_parameter_order
from cerebro.worker.read_names import Reads
from cerebro.worker.runner import UnitRunner
from cerebro.worker.user_errors import describe

BATCHES = 2  # the number of batches before the hop, and again after it
LAYOUT_CURE = (
    "make it contiguous where it is made, or copy the loaded tensor into the model's own, as in "
    "self.W[...] = state['W']"
)
_FORWARD = re.compile(r"^model\._forward\.net\b")  # users know it as `model.net`
Layout = tuple[tuple[int, int], ...]
"""The size and the stride, in elements, of each dimension of more than one element."""

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
    facts = straight.train_measured()
    packed = straight.pack_state()
    straight.note_layouts()
    straight.train(1)
    straight.validate()
    model = straight.live.model
    facts = replace(
        facts,
        words=words_of(model),
        wrapped=getattr(model, "wrapped", ""),
        declares_metrics=declares_metrics(model),
        metrics=tuple(sorted({*straight.metrics, *named_metrics(model)})),
        state_bytes=memoryview(straight.pack_state()).nbytes,
    )
    done = CheckDone(runner.worker, (), model=facts, read=read)
    try:
        hopped = straight.build_again()
        further = thorough or runner.context.limits.epochs > 1
        problems = _find_hop_problems(straight, hopped, packed, not_exact, further=further)
    except Exception as error:
        if runner.tolerates(error, set(not_exact)):
            raise  # the check runs again, without `strict`
        # The configuration can be trained, so its trial may never report this error.
        return replace(done, error=runner.describe_cause(error, config))
    from cerebro.worker.diagnosis import diagnose  # only some workers need it

    findings = diagnose(
        hopped.live,
        functools.partial(hopped.load, packed),
        hopped.make_first_batch,
        *runner.context.views(0),
        thorough=thorough,
        clock=runner.machine.clock,
    )
    if not problems and not isinstance(hopped.live.model, BaseModel):
        findings = _check_layouts(straight, hopped) + findings
    gain = _measure_graph_gain(straight)
    return replace(done, problems=tuple(problems), findings=tuple(findings), gain=gain)


def measure_lane(runner: UnitRunner, config: Mapping[str, Any]) -> ModelFacts:
    """Build a model; if trials of it may share a GPU, train it a little to measure its memory."""
    tried = _CheckedModel(runner, config)
    return tried.train_measured() if shares_gpu(tried.live.model) else tried.facts


def _measure_graph_gain(checked: _CheckedModel) -> tuple[float, float] | None:
    """Return the time of a training step as it is and with ``graph=True``; see `CheckDone.gain`."""
    if not checked.live.torch:
        return None
    from cerebro.torch.diagnosis import measure_gain

    with generators.preserve_generators(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            batch = checked.make_first_batch()
            return measure_gain(checked.live.model, batch, lambda: checked.build_again().live.model)
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
        problems = _find_problems_of_next_epoch(straight, of_few_batches=True)
    else:
        problems = find_differences(straight, hopped)
        if problems and _differs_from_itself(straight):
            return [_NOT_DETERMINISTIC]
    # Only a model that defines epoch hooks itself can lose anything more between epochs.
    if further and not problems and _has_own_epochs(straight.live.model):
        return _find_problems_of_next_epoch(straight, of_few_batches=False)
    return problems


def _differs_from_itself(straight: _CheckedModel) -> bool:
    again = straight.build_again()
    again.train(0)
    again.train(1)
    again.validate()
    return again.hash_state() != straight.hash_state()


def _find_problems_of_next_epoch(straight: _CheckedModel, *, of_few_batches: bool) -> list[str]:
    """Train in the next epoch with and without a hop before it, and compare.

    For data of few batches this is the only comparison, so the epoch is also validated, and lost
    values count even if nothing depends on them yet.
    """

    def train(model: _CheckedModel) -> _CheckedModel:
        model.train(0, epoch=epoch)
        if of_few_batches:
            model.validate()
        return model

    def train_hopped() -> _CheckedModel:
        hopped = straight.build_again()
        if of_few_batches:
            hopped.hop_to(packed)
        else:
            hopped.load(packed)
        return train(hopped)

    try:
        packed, epoch = straight.pack_state(), straight.epoch + 1
        train(straight)
        hopped = train_hopped()
        state_hash = hopped.hash_state()
        if not of_few_batches and state_hash == straight.hash_state():
            return []  # if a counter is lost, nothing depends on it
        problems = find_differences(straight, hopped)
        if problems and state_hash != train_hopped().hash_state():
            return [_NOT_DETERMINISTIC] if of_few_batches else []
        return problems
    except Exception:  # the model may have been made for one epoch, or need whole epochs
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
        device = runner.context.device
        before = gpu.allocated_bytes(device)
        self.live = runner.build(0, config, reads=reads)
        self._built_bytes = max(0, gpu.allocated_bytes(device) - before)  # of a GPU
        assert self.live.own_numbers is not None
        self.own = self.live.own_numbers
        self.own_at_hop: dict[str, Any] = {}
        self._built: dict[str, Any] = {}
        with contextlib.suppress(Exception):  # after the training, a walk that fails is reported
            values = walk(self.live.model, "model")
            self._built.update((path, value) for path, value in values if not is_array(value))
        self.layouts: dict[str, Layout] = {}
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

    @property
    def facts(self) -> ModelFacts:
        model = self.live.model
        return ModelFacts(is_cpu_only(model), hash_parameter_order(model))

    def train_measured(self) -> ModelFacts:
        """Train on the first batches; return what is known of the model, with its memory."""
        if not shares_gpu(self.live.model):
            self.train(0)
            return self.facts
        device = self.runner.device_of(self.live.model)
        self.make_first_batch()  # the shards that it reads stay in memory, for all models
        usable = gpu.usable_bytes(device)
        step = gpu.measure_peak(device, lambda: self.train(0))
        # A graph keeps the memory of a step to itself, besides that of the first, ordinary steps.
        taken = max(self._built_bytes + 2 * step, memoryview(self.pack_state()).nbytes)
        return replace(self.facts, shares_gpu=True, lane_bytes=taken, usable_bytes=usable)

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

    def make_first_batch(self) -> Any:
        return next(self._make_batches(0))

    def pack_state(self) -> Any:
        return _core.pack_state(self.runner.copy_to_host(self.live))

    def hash_state(self) -> str:
        return _core.hash_state(self.pack_state())

    def note_layouts(self) -> None:
        state = self.live.model.state_dict()
        self.layouts = _read_layouts(walk(state, "state_dict()"))

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
    moved = _find_changed_layouts(straight, hopped)
    if problems and moved:
        problems.append(f"{_describe_layouts(moved)}: {LAYOUT_CURE}")
    for name, value in straight.metrics.items():
        if not problems and not are_same(value, hopped.metrics.get(name)):
            problems.append(f"after a hop the metric {name!r} differs, although the state does not")
    if differ and not problems:
        problems.append("after a hop training continued differently")
    return problems


# --- memory layouts ------------------------------------------------------------


def _read_layouts(leaves: Iterable[tuple[str, Any]]) -> dict[str, Layout]:
    layouts = {}
    for path, value in leaves:
        strides = _read_strides(value)
        if strides and 0 not in value.shape:
            pairs = zip(value.shape, strides, strict=True)
            layouts[path] = tuple((size, stride) for size, stride in pairs if size != 1)
    return layouts


def _read_strides(value: Any) -> tuple[int, ...]:
    """Return an array's strides in elements; empty if the framework chooses the layout."""
    if isinstance(value, np.ndarray):
        return tuple(stride // value.itemsize for stride in value.strides)
    stride = getattr(value, "stride", None)
    return tuple(stride()) if callable(stride) else ()


def _find_changed_layouts(straight: _CheckedModel, hopped: _CheckedModel) -> list[str]:
    """Return the paths of the tensors that have the same sizes in another layout."""
    return [
        path
        for path, layout in straight.layouts.items()
        if (other := hopped.layouts.get(path, layout)) != layout
        and [size for size, _ in other] == [size for size, _ in layout]
    ]


def _describe_layouts(paths: list[str]) -> str:
    return f"a hop changes the memory layout of {', '.join(paths[:3])}"


def _check_layouts(straight: _CheckedModel, hopped: _CheckedModel) -> list[Finding]:
    """Return a finding if tensors have changed their layout, although training continued equally.

    Tensors of more than two dimensions are often moments of an optimizer, which are computed
    element by element: they give only a hint.
    """
    sizes = {path: len(layout) for path, layout in straight.layouts.items()}
    paths = [path for path in _find_changed_layouts(straight, hopped) if sizes[path] > 1]
    matrices = [path for path in paths if sizes[path] == 2]
    if not paths:
        return []
    return [
        Finding(
            "changed-layout",
            f"{_describe_layouts(matrices or paths)}, so that products may have other last bits",
            LAYOUT_CURE,
            "matters" if matrices else "hint",
        )
    ]
