"""The operators of a training step on the CPU: recorded, and seen from outside.

A `Recording` stores every ATen call below autograd: forward pass, backward pass and optimizer. It
keeps their memory allocated, so the same calls on the same memory repeat the step
(`cerebro.torch.cpu_program`). `Recording.refusal` names something that no program can repeat: a
number read back (``.item()``), a shape that depends on data, a change to memory that belongs
neither to the state nor to the step.

A recording is a dispatch mode. While one is active, PyTorch does not use formulas that read data to
choose, such as those of a loss with class weights and label smoothing. The recording then differs
from the ordinary step, perhaps only for rare rows. PyTorch's profiler does not affect the choice,
so a `Witness` uses it to watch an ordinary step, whose operators must be those of the recording.

A composite operator has no kernel: it is replaced by the operators that it calls. The source of
each composite operator in `COMPOSITES` was checked: it computes nothing itself, and reads no memory
without an operator. A step with any other is not recorded; the log names the operator.
"""

from __future__ import annotations

import functools
import os
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ALLOCATES = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
"""Operators that allocate memory without writing to it."""

FILLS = {"ones_like", "zeros_like", "full_like", "ones", "zeros", "full", "arange", "scalar_tensor"}
"""Operators whose results depend only on shapes and numbers, not on the values of tensors."""

READS_BACK = {"_nested_tensor_from_mask_left_aligned"}
"""Operators that read values back to Python but lack PyTorch's tag for it."""

HIDDEN_WRITES = {"native_batch_norm": (3, 4)}
"""Indices of arguments that an operator writes, but that its schema does not mark as written."""

_OURS = (str(Path(torch.__file__).parent), str(Path(__file__).parent), torch.utils.__file__)


class Facts:
    """Facts from an operator's schema, which is slow to query."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name = str(schema.name).partition("::")[2]
        self.is_of_profiler = func.namespace == "profiler"
        self.reads_data = torch.Tag.data_dependent_output in func.tags or self.name in READS_BACK
        self.shape_of_data = torch.Tag.dynamic_output_shape in func.tags
        self.is_view = torch.Tag.inplace_view in func.tags
        self.takes_generator = any("Generator" in str(a.type) for a in schema.arguments)
        self.writes = [
            (index, argument.name)
            for index, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]


facts = functools.cache(Facts)


@dataclass(slots=True)
class Call:
    """A call of an operator, with its arguments and results at the time of the call."""

    func: Any
    about: Facts
    args: list[Any]
    kwargs: dict[str, Any]
    outs: list[Any]
    section: int | None
    has_gradients: bool = field(default_factory=torch.is_grad_enabled)

    @property
    def name(self) -> str:
        return self.about.name

    def tensors(self) -> list[Any]:
        return tensors_in([self.args, self.kwargs, self.outs])


class Recording(TorchDispatchMode):  # type: ignore[misc]
    """A context that records operators; `writable` are the storages that the step may change."""

    def __init__(self, writable: Iterable[int]) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.refusal: str | None = None  # why the step cannot be repeated from these calls
        self.leaves_traces = False  # whether it changed what is not part of the state
        self.section: int | None = None  # the number of the optimizer that is stepping
        self._writable = set(writable)
        self._made: set[int] = set()
        self._lifted: set[int] = set()
        self._addresses: dict[int, tuple[Any, int]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Otherwise, PyTorch keeps `torch.compile` away from the method below at each call, which is
        # needless: a step that compiles is not recorded.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        about = facts(func)
        if about.is_of_profiler:
            return func(*args, **kwargs)
        inputs: list[tuple[Any, Any]] = []
        noted_args = copy_arguments(list(args), inputs)
        noted_kwargs = copy_arguments(dict(kwargs), inputs)
        # Copy the inputs before the operator runs, because it may change their shapes.
        before = self._note_addresses(inputs)
        out = func(*args, **kwargs)
        results: list[tuple[Any, Any]] = []
        outs = copy_arguments(as_list(out), results)
        call = Call(func, about, noted_args, noted_kwargs, outs, self.section)
        self._check_call(call, inputs, results, before)
        self._made.update(self._note_addresses(results) - before)
        if about.name == "lift_fresh":  # from torch.tensor(), which makes memory without a call
            self._lifted |= before
        self.calls.append(call)
        return out

    def is_external(self, tensor: Any) -> bool:
        """Return whether a tensor's memory existed before the step."""
        return self.address_of(tensor) not in self._made

    def address_of(self, tensor: Any) -> int:
        """Return the address of a tensor's storage; fast for the tensors of :attr:`calls`."""
        entry = self._addresses.get(id(tensor))
        return address_of(tensor) if entry is None else entry[1]

    def _note_addresses(self, pairs: Iterable[tuple[Any, Any]]) -> set[int]:
        """Note the addresses of the storages of a call's strided tensors, and return them."""
        addresses = set()
        for _, copy in pairs:
            if copy.layout == torch.strided:
                address = address_of(copy)
                self._addresses[id(copy)] = copy, address  # kept alive, so that its id is unique
                addresses.add(address)
        return addresses

    def _check_call(self, call: Call, given: list[Any], made: list[Any], before: set[int]) -> None:
        """Set `refusal` if a program cannot repeat the call; also set `leaves_traces`.

        `given` and `made` pair the call's inputs and results with their copies.
        """
        reason, about = None, call.about
        if about.name == "_local_scalar_dense":
            reason = None if self.section is not None else ".item()"
        elif about.reads_data:
            reason = f"{call.name}() reads a number back"
        elif about.shape_of_data and _depends_on_data(call):
            reason = f"{call.name}() returns a shape that depends on data"
        elif about.takes_generator and any(
            isinstance(value, torch.Generator) for value in tree_leaves([call.args, call.kwargs])
        ):
            reason = f"{call.name}() draws from a generator other than the global one"
            self.leaves_traces = True
        elif not all(type(t) in TENSORS and t.layout == torch.strided for t, _ in given):
            reason = f"{call.name}() has a tensor of a special kind"
            self.leaves_traces |= bool(about.writes)
        elif any(t.layout != torch.strided for t, _ in made):
            reason = f"{call.name}() returns a tensor of a special kind"
        elif about.writes or about.name in HIDDEN_WRITES:
            addresses = {self.address_of(t) for t in find_written_tensors(call) if t.numel()}
            others = addresses - self._writable - self._made
            if others:
                reason = f"{call.name}() changes a tensor that is not part of the state"
                self.leaves_traces |= bool(others - self._lifted)
            elif any(address_of(t) not in before for t, _ in given if t.numel()):
                reason = f"{call.name}() moves a tensor to other memory"
        if reason is not None and self.refusal is None:
            self.refusal = f"{reason}{_describe_user_line()}"


def find_written_tensors(call: Call) -> list[Any]:
    """Return the tensors that a call writes, except those that it creates."""
    values = [
        call.args[index] if index < len(call.args) else call.kwargs.get(name)
        for index, name in call.about.writes
    ]
    values += [call.args[index] for index in HIDDEN_WRITES.get(call.name, ())]
    return tensors_in(values)


def _depends_on_data(call: Call) -> bool:
    if call.name not in ("index", "index_put", "index_put_", "_unsafe_index"):
        return True
    return any(t.dtype in (torch.bool, torch.uint8) for t in tensors_in([call.args[1]]))


def _describe_user_line() -> str:
    """Return `` in FILE:LINE`` for the innermost line of the user's code that is running."""
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(_OURS) and not frame.filename.startswith("<"):
            return f" in {Path(frame.filename).name}:{frame.lineno}"
    return ""


# --- nested arguments --------------------------------------------------------------

TENSORS = (torch.Tensor, torch.nn.Parameter)
LEAVES = {
    type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format,
}  # fmt: skip
"""Types of most arguments that are neither tensors nor containers."""


def address_of(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


def as_list(out: Any) -> list[Any]:
    return list(out) if isinstance(out, (tuple, list)) else [out]


def copy_arguments(value: Any, found: list[tuple[Any, Any]]) -> Any:
    """Return nested arguments with detached tensors; add pairs of tensors and copies to `found`."""

    def copy(tensor: Any) -> Any:
        is_ordinary = type(tensor) in TENSORS and tensor.layout == torch.strided
        found.append((tensor, tensor.detach() if is_ordinary else tensor))
        return found[-1][1]

    return map_tensors(value, copy)


def map_tensors(value: Any, change: Callable[[Any], Any]) -> Any:
    if type(value) in LEAVES:
        return value
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        return [map_tensors(item, change) for item in value]
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}
    return value


def all_tensors(value: Any) -> list[Any]:
    found: list[Any] = []
    map_tensors(value, found.append)
    return found


def tensors_in(value: Any) -> list[Any]:
    """Return the strided tensors among nested arguments."""
    return [tensor for tensor in all_tensors(value) if tensor.layout == torch.strided]


def pair_leaves(left: Any, right: Any, path: Any = ()) -> Iterable[tuple[Any, Any, Any]]:
    """Yield the corresponding leaves of two nested arguments, with their paths."""
    if type(left) is type(right) and isinstance(left, (list, dict)):
        keys, theirs = (list(v) if isinstance(v, dict) else range(len(v)) for v in (left, right))
        if keys == theirs:
            for key in keys:
                yield from pair_leaves(left[key], right[key], (*path, key))
            return
    yield path, left, right


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def form_of(tensor: Any) -> Any:
    return tensor.shape, tensor.stride(), tensor.dtype


# --- the operators of an ordinary step ----------------------------------------------

_WITHOUT_BITS = (
    ALLOCATES | FILLS | {"new_zeros", "new_ones", "new_full", "zero_", "clone", "copy_", "detach_"}
)
"""Allocations, constants and copies: they may differ, because they compute no bits."""

_SAME = {"aten::_index_put_impl": "aten::index_put"}  # two names of one operator

Leaf = tuple[str, str, bool]  # name, overload, and whether an optimizer calls it


class Unavailable(Exception):
    """The profiler cannot be used; the message says why."""


class Witness:
    """A context that notes the operators called in it; entering it may raise `Unavailable`."""

    def __init__(self) -> None:
        self.leaves: list[Leaf] = []  # the operators that compute, in order
        self.unknown: str | None = None  # the first composite operator that was not reviewed

    def __enter__(self) -> Witness:
        if torch.autograd._profiler_enabled():
            raise Unavailable("a profiler is running")
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it prints on its first use
        try:
            profiler = torch._C._profiler
            options = profiler._ExperimentalConfig(capture_overload_names=True)
            config = profiler.ProfilerConfig(
                profiler.ProfilerState.KINETO, False, False, False, False, False, options
            )
            activities = {profiler.ProfilerActivity.CPU}
            torch.autograd._prepare_profiler(config, activities)
            torch.autograd._enable_profiler(config, activities)
        except (AttributeError, TypeError) as error:
            raise Unavailable(f"this version of PyTorch has another profiler: {error}") from error
        return self

    def __exit__(self, *error: Any) -> None:
        events = torch.autograd._disable_profiler().experimental_event_tree()
        operator = torch._C._profiler._EventType.TorchOp
        stack = [(event, False) for event in reversed(events)]
        while stack:
            event, steps = stack.pop()
            if event.tag != operator:
                continue
            kind = _kind_of(f"{event.name}@{event.overload_name}")
            if kind == "leaf":
                self.leaves.append((_strip_underscore(event.name), event.overload_name, steps))
            elif kind == "composite" and self.unknown is None:
                if not is_reviewed(event.name, event.overload_name):
                    self.unknown = event.name
            elif kind is None and event.name.startswith("Optimizer.step#"):
                steps = True
            if kind in ("composite", None):
                stack += [(child, steps) for child in reversed(event.children)]


def find_difference(recorded: Sequence[Leaf], witness: Witness) -> str | None:
    """Return how recorded operators differ from those that a witness has seen, or None."""
    if witness.unknown is not None:
        return f"it calls {witness.unknown}, which is not known to be safe to record"
    for mine, its in zip_longest(recorded, witness.leaves):
        if mine is None:
            return f"PyTorch calls {_text_of(its)} only while the step is not recorded"
        if its is None:
            return f"PyTorch calls {_text_of(mine)} only while the step is recorded"
        if mine != its:
            return (
                f"PyTorch calls {_text_of(its)} in the ordinary step, but {_text_of(mine)} while "
                "the step is recorded"
            )
    return None


def leaves_of(recording: Recording) -> list[Leaf]:
    """Return a recording's operators that compute, in order."""
    leaves = []
    for call in recording.calls:
        schema = call.func._schema
        if _kind_of(f"{schema.name}@{schema.overload_name}") == "leaf":
            is_of_optimizer = call.section is not None
            leaves.append((_strip_underscore(schema.name), schema.overload_name, is_of_optimizer))
    return leaves


@functools.cache
def _kind_of(full: str) -> str | None:
    """Return "leaf" if an event computes, "composite" if it calls others, else "view" or None."""
    name, _, overload = full.partition("@")
    if "::" not in name:
        return None
    try:
        schema = torch._C._get_schema(name, overload)
    except RuntimeError:
        return None
    dotted = f"{name}.{overload}" if overload else name
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    if has_kernel(dotted, "CompositeImplicitAutograd") and not has_kernel(dotted, "CPU"):
        return "composite"
    if name.partition("::")[2] in _WITHOUT_BITS:
        return "view"
    aliases = [value.alias_info for value in schema.returns]
    is_view = aliases and all(alias is not None and not alias.is_write for alias in aliases)
    return "view" if is_view else "leaf"


def _strip_underscore(name: str) -> str:
    short = name if name.endswith("__") else name.rstrip("_")
    return _SAME.get(short, short)


def _text_of(leaf: Leaf) -> str:
    return f"{leaf[0].partition('::')[2]}()"


COMPOSITES = frozenset(
    """
    _batch_norm_impl_index _batch_norm_impl_index_backward _convolution_double_backward
    _convolution_mode _pad_enum _scaled_dot_product_attention_math
    _thnn_differentiable_gru_cell_backward _thnn_differentiable_lstm_cell_backward _weight_norm
    _weight_norm_differentiable_backward absolute adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d adaptive_max_pool1d affine_grid_generator_backward alpha_dropout
    atleast_1d atleast_2d atleast_3d avg_pool1d batch_norm bilinear broadcast_tensors
    broadcast_to chunk clip clip_ column_stack concat concatenate contiguous conv1d conv2d
    conv3d conv_transpose1d conv_transpose2d conv_transpose3d cosine_embedding_loss
    cosine_similarity cross_entropy_loss cudnn_is_acceptable cummaxmin_backward cumprod_backward
    diff divide divide_ dropout dropout_ dstack einsum embedding_backward embedding_bag
    expand_as feature_alpha_dropout feature_dropout flatten fliplr flipud gather_backward ger
    greater greater_equal group_norm gru gru_cell hinge_embedding_loss hsplit hstack
    index_select_backward infinitely_differentiable_gelu_backward inner instance_norm isfinite
    isreal item kl_div kron l1_loss layer_norm less less_equal linalg_matmul linalg_matrix_norm
    linalg_multi_dot linalg_norm linear log_sigmoid log_softmax logdet lstm lstm_cell mH mT
    margin_ranking_loss masked_select_backward matmul max_pool1d max_pool1d_with_indices
    max_pool2d max_pool3d meshgrid moveaxis movedim multiply multiply_ narrow negative nll_loss
    nll_loss2d nll_loss_nd not_equal numpy_T outer pad pairwise_distance poisson_nll_loss prelu
    ravel relu6 relu6_ reshape reshape_as rms_norm rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell
    rrelu rrelu_ scaled_dot_product_attention selu selu_ softmax square square_ std std_mean
    subtract subtract_ sum_to_size swapaxes swapaxes_ swapdims tensor_split tensordot to
    trace_backward trapezoid trapz triplet_margin_loss true_divide type_as unflatten
    unsafe_chunk upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d
    upsample_nearest2d upsample_nearest3d upsample_trilinear3d
    value_selecting_reduction_backward var var_mean view_as vsplit vstack where
    inverse linalg_inv linalg_solve linalg_det det slogdet linalg_slogdet linalg_matrix_power
    """.split()  # noqa: SIM905
)
"""Names without ``aten::``."""

UNSAFE_OVERLOADS = {
    *("gru@data", "lstm@data", "rnn_relu@data", "rnn_tanh@data"),
    "tensor_split@tensor_indices_or_sections",
}
"""Their overloads that read lengths or indices from the memory of a tensor."""


def is_reviewed(name: str, overload: str) -> bool:
    """Return whether a composite operator, such as ``aten::linear``, may be in a recorded step."""
    short = name.removeprefix("aten::")
    return short in COMPOSITES and f"{short}@{overload}" not in UNSAFE_OVERLOADS
