"""The operators of an ordinary step, as PyTorch's profiler sees them.

A recording is a dispatch mode. While one is active, PyTorch does not use formulas that read data to
choose, such as those of a loss with class weights and label smoothing. The recording then differs
from the ordinary step, perhaps only for rare rows. The profiler does not affect the choice. So it
watches an ordinary step, whose operators must be those of the recording (`find_difference`).

A composite operator has no kernel: it is replaced by the operators that it calls. The source of
each composite operator listed below was checked: it computes nothing itself, and reads no memory
without an operator. A step with any other is not recorded; the log names the operator.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import torch

from cerebro.torch.cpu_program import ALLOCATES, FILLS
from cerebro.torch.cpu_recorder import Recording

WITHOUT_BITS = (
    ALLOCATES | FILLS | {"new_zeros", "new_ones", "new_full", "zero_", "clone", "copy_", "detach_"}
)
"""Allocations, constants and copies: they may differ, because they compute no bits."""

SAME = {"aten::_index_put_impl": "aten::index_put"}
"""Different names of the same operator."""

Leaf = tuple[str, str, bool]
"""An operator's name and overload, and whether an optimizer calls it."""


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
                self.leaves.append((_form_of(event.name), event.overload_name, steps))
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
    for mine, its in zip(recorded, witness.leaves, strict=False):
        if mine != its:
            return (
                f"PyTorch calls {_text_of(its)} in the ordinary step, but {_text_of(mine)} while "
                "the step is recorded"
            )
    if len(recorded) != len(witness.leaves):
        longer = max(recorded, witness.leaves, key=len)
        place = min(len(recorded), len(witness.leaves))
        which = "is recorded" if longer is recorded else "is not recorded"
        return f"PyTorch calls {_text_of(longer[place])} only while the step {which}"
    return None


def leaves_of(recording: Recording) -> list[Leaf]:
    """Return a recording's operators that compute, in order."""
    leaves = []
    for call in recording.calls:
        schema = call.func._schema
        if _kind_of(f"{schema.name}@{schema.overload_name}") == "leaf":
            leaves.append((_form_of(schema.name), schema.overload_name, call.section is not None))
    return leaves


@functools.cache
def _kind_of(full: str) -> str | None:
    """Return what an event is.

    "leaf" is an operator that computes, "view" one that does not, "composite" one that calls
    others, None is not an operator.
    """
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
    if name.partition("::")[2] in WITHOUT_BITS:
        return "view"
    aliases = [value.alias_info for value in schema.returns]
    is_view = aliases and all(alias is not None and not alias.is_write for alias in aliases)
    return "view" if is_view else "leaf"


def _form_of(name: str) -> str:
    """Return the name without the underscore of in-place operators."""
    short = name if name.endswith("__") else name.rstrip("_")
    return SAME.get(short, short)


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

UNSAFE_OVERLOADS = frozenset(
    {
        "gru@data",
        "lstm@data",
        "rnn_relu@data",
        "rnn_tanh@data",
        "tensor_split@tensor_indices_or_sections",
    }
)
"""Their overloads that read lengths or indices from the memory of a tensor."""


def is_reviewed(name: str, overload: str) -> bool:
    """Return whether a composite operator, such as ``aten::linear``, may be in a recorded step."""
    short = name.removeprefix("aten::")
    return short in COMPOSITES and f"{short}@{overload}" not in UNSAFE_OVERLOADS
