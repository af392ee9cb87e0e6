"""The operators of an ordinary step, as PyTorch's profiler sees them.

A recording is a dispatch mode. While one is active, PyTorch does not use formulas that read data to
choose, such as those of a loss with class weights and label smoothing. The recording then differs
from the ordinary step, perhaps only for rare rows. The profiler does not affect the choice. So it
watches an ordinary step, whose operators must be those of the recording (`find_difference`).

A composite operator is replaced by the operators that it calls; it must be in
`cerebro.torch.composites`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import Any

import torch

from cerebro.torch.composites import is_reviewed
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
