"""Examine a PyTorch model: probable mistakes in it, and what ``graph=True`` would bring.

Everything here runs on a model that is discarded afterwards. One batch is trained and one is
evaluated, and the calls of both are observed (see :mod:`cerebro.torch.watched_calls`), to find
mistakes in its loss, modes, gradients and optimizer.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from cerebro.model import column_names
from cerebro.report.findings import Finding
from cerebro.torch.arguments import set_open_graph
from cerebro.torch.model import Model
from cerebro.torch.optimizer_step import groups_of
from cerebro.torch.parameter_order import join_names
from cerebro.torch.step_state import copy_values
from cerebro.torch.watched_calls import Calls, LossCall, is_scripted

UNSCALED = 20.0  # inputs of such a mean absolute value or standard deviation are not scaled
MOST_COMPARED = 16 * 1024 * 1024  # bytes of a column that is compared before and after a step
MEASURED_STEPS = 8
LONGEST_STEP = 0.005  # seconds; longer ordinary steps are mostly arithmetic, and not measured
LONGEST_GPU_STEP = 0.05  # the same on a GPU, where ordinary steps of large models are short
WAITING = 0.8  # a GPU waits for the host if launching takes this share of the time of a step

# Functions that may end a network, by the name of their autograd node, with their ranges.
_ENDS = {
    "SoftmaxBackward0": ("softmax", 0.0, 1.0),
    "LogSoftmaxBackward0": ("log_softmax", -torch.inf, 0.0),
    "SigmoidBackward0": ("sigmoid", 0.0, 1.0),
    "TanhBackward0": ("tanh", -1.0, 1.0),
    "ReluBackward0": ("ReLU", 0.0, torch.inf),
}
_RESHAPES = (
    "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Select", "Slice", "Index",
    "T", "Transpose", "Permute", "ToCopy", "Alias", "Clone", "Expand",
)  # fmt: skip


def diagnose(model: Any, batch: Mapping[str, Any]) -> tuple[list[Finding], list[LossCall]]:
    """Return findings about a PyTorch model, and the calls of loss functions.

    `model` is a `cerebro.torch.Model`, or any model whose attributes are modules. It is changed;
    `batch`, a training batch, is not.
    """
    nets = find_networks(model)
    if not nets or any(map(is_scripted, nets)):
        return [], []
    if isinstance(model, Model):
        return _diagnose_model(model, batch)
    evaluated = Calls((), {})
    if hasattr(model, "eval_batch"):
        evaluated = _watch(nets, batch, model.eval_batch)
    trained = _watch(nets, batch, model.train_batch)
    return [*_check_modes(trained, evaluated), *_check_calls(trained, evaluated)], trained.losses


def find_networks(model: Any) -> list[Any]:
    """Return the modules among a model's attributes that have parameters to train."""
    parts = [model.net] if isinstance(model, Model) else getattr(model, "__dict__", {}).values()
    modules = [part for part in parts if isinstance(part, torch.nn.Module)]
    return [net for net in modules if any(p.requires_grad for p in net.parameters())]


def uses_old_gradients(model: Any, train: Any, load: Any) -> bool:
    """Return whether a step adds to old gradients; ``load()`` loads the same state each time."""
    if isinstance(model, Model):
        return False
    parameters = [p for net in find_networks(model) for p in net.parameters() if p.requires_grad]
    load()
    for parameter in parameters:
        parameter.grad = None
    train()
    if not any(_has_gradient(parameter) for parameter in parameters):
        return False
    before = [
        (p.detach().clone(), None if p.grad is None else 1 + 2 * p.grad.detach())
        for p in parameters
    ]
    load()
    for parameter, (_, gradient) in zip(parameters, before, strict=True):
        parameter.grad = gradient
    train()
    return any(not torch.equal(now, old) for now, (old, _) in zip(parameters, before, strict=True))


def _has_gradient(parameter: Any) -> bool:
    return parameter.grad is not None and bool(parameter.grad.any())


# --- cerebro.torch.Model ---------------------------------------------------------


def _diagnose_model(model: Model, batch: Mapping[str, Any]) -> tuple[list[Finding], list[LossCall]]:
    network = model._network
    batch = network.place_batch(dict(batch))
    evaluated = _watch([model.net], batch, model._measure, model)
    network.set_training_mode()
    augmented = dict(batch)
    if model._augment is not None:
        augmented = model._augment(copy_values(augmented))
    tensors = {n: v for n, v in augmented.items() if isinstance(v, torch.Tensor)}
    before = {n: v.clone() for n, v in tensors.items() if v.nbytes <= MOST_COMPARED}
    with Calls([model.net], _find_targets(model, augmented)) as trained:
        _, loss, _, _ = model._objective(augmented)
    findings = [*_check_modes(trained, evaluated), *_check_calls(trained, evaluated, loss)]
    findings += _check_batch_unchanged(model, before, augmented)
    network.drop_gradients()
    loss.backward()
    if "one-output" not in {item.code for item in findings}:  # the gradients of one output are 0
        findings += _check_optimizers(model)
    findings += _check_inputs(trained)
    network.drop_gradients()
    return findings, trained.losses


def _watch(nets: Sequence[Any], batch: Mapping[str, Any], step: Any, model: Any = None) -> Calls:
    copied = copy_values(batch)
    calls = Calls(nets, _find_targets(model, copied))
    with calls:
        step(copied)
    return calls


def _find_targets(model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a batch that may be targets; with `step`, all columns."""
    names = list(batch)
    if isinstance(model, Model) and model._step is None:
        names = column_names("target", model._target)
    return {n: batch[n] for n in names if isinstance(batch.get(n), torch.Tensor)}


# --- modes -------------------------------------------------------------------------


def _check_modes(trained: Calls, evaluated: Calls) -> Iterator[Finding]:
    for kind, name in (("dropout", "F.dropout"), ("batch norm", "F.batch_norm")):
        wrong = [mode for mode in evaluated.modes if mode.kind == kind and mode.trains]
        if wrong:
            yield Finding(
                "evaluates-in-training-mode",
                f"{kind} is in training mode while the model is evaluated",
                f"call net.eval() before evaluation and net.train() before training, and pass "
                f"training=self.training to {name}",
                place=wrong[0].place,
            )
        modes = [mode for mode in trained.modes if mode.kind == kind]
        if modes and not any(mode.trains or mode.net_trains for mode in modes):
            yield Finding(
                "trains-in-evaluation-mode",
                f"{kind} is in evaluation mode while the model is trained",
                "call net.train() before each training step, and leave net.eval() out of forward",
                place=modes[0].place,
            )


# --- losses ------------------------------------------------------------------------


def _check_calls(trained: Calls, evaluated: Calls, loss: Any = None) -> Iterator[Finding]:
    for broadcast in [*trained.broadcasts, *evaluated.broadcasts][:1]:
        left, right = (str(shape).replace(" ", "") for shape in broadcast.shapes)
        rows = max(broadcast.shapes[0])
        yield Finding(
            "broadcast",
            f"shapes {left} and {right} are compared, which gives {rows} x {rows} numbers",
            "make outputs and targets the same shape: output.squeeze(1), or target.unsqueeze(1)",
            place=broadcast.place,
        )
    for call in trained.losses:
        if call.input.requires_grad:
            for finding in chain(_OF_LOSS[call.name](call), _check_sign(call, loss)):
                yield replace(finding, place=call.place)


def _check_sign(call: LossCall, loss: Any) -> Iterator[Finding]:
    if loss is not None and call.result.ndim == 0 and loss.ndim == 0:
        value = float(loss.detach())
        if value != 0 and value == -float(call.result.detach()):
            yield Finding(
                "negated-loss",
                f"the loss is -{call.name}: training makes {call.name} larger",
                "leave out the minus sign: optimizers minimize",
            )


_BEFORE_CROSS_ENTROPY = {
    "softmax": Finding(
        "softmax-before-cross-entropy",
        "the outputs are probabilities, and cross_entropy applies softmax again",
        "leave softmax out of the network: return logits",
    ),
    "sigmoid": Finding(
        "sigmoid-before-cross-entropy",
        "the outputs end in a sigmoid, and cross_entropy applies softmax to them",
        "leave the sigmoid out of the network, or use binary_cross_entropy for several labels",
    ),
    "log_softmax": Finding(
        "log-softmax-before-cross-entropy",
        "the outputs are log-probabilities, and cross_entropy applies log_softmax again",
        "leave log_softmax out of the network, or use nll_loss",
        "hint",
    ),
    "ReLU": Finding(
        "relu-before-cross-entropy",
        "the outputs end in a ReLU, so that no logit is negative",
        "leave the last ReLU out of the network",
        "hint",
    ),
}


def _check_cross_entropy(call: LossCall) -> Iterator[Finding]:
    outputs = call.input.detach()
    axis = 1 if outputs.ndim > 1 else 0
    end = _find_last_function(call.input)
    if end is None and _is_distribution(outputs, axis):
        end = "softmax"
    if end in _BEFORE_CROSS_ENTROPY:
        yield _BEFORE_CROSS_ENTROPY[end]
    if outputs.shape[axis] == 1:
        yield Finding(
            "one-output",
            "cross_entropy over one output is always 0",
            "give the network an output for each class, or use binary_cross_entropy_with_logits",
        )


def _check_log_probabilities(call: LossCall) -> Iterator[Finding]:
    outputs = call.input.detach().float()
    if float(outputs.max()) <= 1e-3:
        return
    message = "kl_div expects log-probabilities as its input, but some are above 0"
    cure = "apply log_softmax to the outputs"
    if call.name == "nll_loss":
        axis = 1 if outputs.ndim > 1 else 0
        kind, cure = "logits", f"use cross_entropy, or apply log_softmax(dim={axis}) first"
        if _is_distribution(outputs, axis):
            kind, cure = "probabilities", "return log_softmax, not softmax"
        message = f"nll_loss expects log-probabilities, but the outputs are {kind}"
    yield Finding("not-log-probabilities", message, cure)


def _check_binary(call: LossCall) -> Iterator[Finding]:
    end = _find_last_function(call.input)
    if call.name.endswith("with_logits") and end in ("sigmoid", "softmax"):
        yield Finding(
            "sigmoid-before-logits",
            f"the outputs end in a {end}, and {call.name} applies a sigmoid again",
            f"leave the {end} out of the network: return logits",
        )
    low, high = float(call.target.min()), float(call.target.max())
    if low < 0 or high > 1:
        yield Finding(
            "binary-targets",
            f"{call.name} expects targets from 0 to 1, but they reach from {low:g} to {high:g}",
            "write the classes as 0 and 1",
        )


def _check_regression(call: LossCall) -> Iterator[Finding]:
    end, target = _find_last_function(call.input), call.target.detach().float()
    if end is None or end not in ("sigmoid", "tanh", "softmax", "ReLU"):
        return
    low, high = next((low, high) for name, low, high in _ENDS.values() if name == end)
    margin = 0.05
    outside = float(((target < low - margin) | (target > high + margin)).float().mean())
    if outside >= 0.1:
        bounds = f"are at least {low:g}" if high == torch.inf else f"are from {low:g} to {high:g}"
        yield Finding(
            "bounded-outputs",
            f"the outputs end in a {end} and {bounds}, but {outside:.0%} of the targets are not",
            f"leave out the {end} at the end of the network, or scale the targets",
        )


_OF_LOSS = {
    "cross_entropy": _check_cross_entropy,
    **dict.fromkeys(("nll_loss", "kl_div"), _check_log_probabilities),
    **dict.fromkeys(("binary_cross_entropy", "binary_cross_entropy_with_logits"), _check_binary),
    **dict.fromkeys(("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss"), _check_regression),
}


def _find_last_function(tensor: Any) -> str | None:
    """Return the last function that computed the outputs, ignoring reshapes."""
    node = tensor.grad_fn
    while node is not None:
        name = node.name()
        if name in _ENDS:
            return _ENDS[name][0]
        if name.removesuffix("Backward0").removesuffix("Backward1") not in _RESHAPES:
            return None
        node = node.next_functions[0][0]
    return None


def _is_distribution(values: Any, axis: int) -> bool:
    if values.shape[axis] < 2 or values.numel() < 4:
        return False
    inside = bool((values >= 0).all()) and bool((values <= 1).all())
    return inside and bool(((values.float().sum(axis) - 1).abs() < 1e-3).all())


# --- network, gradients, optimizers --------------------------------------------------


def _check_batch_unchanged(
    model: Model, before: Mapping[str, Any], after: Mapping[str, Any]
) -> Iterator[Finding]:
    targets = set() if model._step is not None else set(column_names("target", model._target))
    for name, column in before.items():
        if name in after and not _are_equal(column, after[name]):
            yield Finding(
                "changed-batch",
                f"a training step changes the column {name!r} of its batch in place",
                "compute a new tensor in forward: x = x / 255 instead of x /= 255",
                "matters" if name in targets else "hint",
            )


def _are_equal(left: Any, right: Any) -> bool:
    if left.is_floating_point():
        left, right = left.nan_to_num(), right.nan_to_num()
    return bool(torch.equal(left, right))


def _check_optimizers(model: Model) -> Iterator[Finding]:
    """Compare the optimizers' parameters with the network's, after a step that leaves gradients."""
    taken = {id(p): p for group in groups_of(model._optimizers) for p in group["params"]}
    if not any(map(_has_gradient, taken.values())):
        yield Finding(
            "nothing-trains",
            "no parameter of the optimizer has a gradient other than 0",
            "give the optimizer the parameters that the loss depends on",
        )
        return
    yield from _check_learning_rates(model)
    named = dict(model.net.named_parameters())
    yield from _check_gradients(named, taken)
    yield from _check_other_parameters(model, named, taken)


def _check_learning_rates(model: Model) -> Iterator[Finding]:
    if not any(float(group.get("lr", 1)) for group in groups_of(model._optimizers)):
        scheduled = bool(model._schedulers)
        yield Finding(
            "learning-rate-0",
            f"the learning rate is 0{' in the first epoch' if scheduled else ''}",
            "let the schedule begin above 0" if scheduled else "give the optimizer a positive lr",
            "hint" if scheduled else "matters",
        )
    for optimizer in model._optimizers:
        kind = type(optimizer).__name__
        rate = max((float(group.get("lr", 0)) for group in optimizer.param_groups), default=0.0)
        if "Adam" in kind and rate >= 0.5:
            yield Finding(
                "large-learning-rate",
                f"the learning rate of {kind} is {rate:g}",
                "try 0.001: each step changes every weight by about the learning rate",
                "hint",
            )


def _check_gradients(named: Mapping[str, Any], taken: Mapping[int, Any]) -> Iterator[Finding]:
    """Find parameters without a gradient or an optimizer; `taken` are the optimizers', by `id`."""
    unused = [n for n, p in named.items() if id(p) in taken and p.requires_grad and p.grad is None]
    if unused:
        yield Finding(
            "unused-parameters",
            f"the loss does not depend on {join_names(unused)}",
            "use them in forward, or leave them out of the network",
            "hint",
        )
    lost = [n for n, p in named.items() if id(p) not in taken and p.grad is not None]
    if lost:
        yield Finding(
            "not-in-optimizer",
            f"{join_names(lost)} {'have' if len(lost) > 1 else 'has'} gradients, but no optimizer",
            "give all of net.parameters() to the optimizer, or freeze with requires_grad_(False)",
            "hint",
        )
    frozen = [n for n, p in named.items() if id(p) in taken and not p.requires_grad]
    if frozen:
        yield Finding(
            "frozen-in-optimizer",
            f"the optimizer has {join_names(frozen)}, which cannot be trained "
            "(requires_grad=False)",
            "give it the trainable parameters only, or unfreeze them",
            "hint",
        )


def _check_other_parameters(
    model: Model, named: Mapping[str, Any], taken: Mapping[int, Any]
) -> Iterator[Finding]:
    """Find parameters of the optimizers that are not, or no longer, the network's."""
    network = model._network
    ids = {id(p) for part in network.parts for p in part.parameters()}
    old = [p for key, p in taken.items() if key not in ids]
    new = {n: p for n, p in named.items() if not any(p is built for built in network.parameters)}
    if old and new:
        matters = any(map(_has_gradient, [*old, *new.values()]))
        yield Finding(
            "replaced-parameters",
            f"forward replaces {join_names(list(new))} by a new parameter, which no optimizer has",
            "write into it in place: parameter.data.copy_(values)",
            "matters" if matters else "hint",
        )
    foreign = len(old) - len(new)
    if foreign > 0:
        yield Finding(
            "foreign-parameters",
            f"the optimizer has {foreign} parameters that are not the network's",
            "make the optimizer from net.parameters(), after the network is complete",
        )


def _check_inputs(trained: Calls) -> Iterator[Finding]:
    values = trained.first_input
    if values is None or not values.is_floating_point() or values.numel() < 2:
        return
    size, spread = float(values.abs().mean()), float(values.float().std())
    if max(size, spread) > UNSCALED:
        low, high = float(values.min()), float(values.max())
        yield Finding(
            "unscaled-inputs",
            f"the first layer gets values from {low:.4g} to {high:.4g} (mean magnitude {size:.3g})",
            "scale inputs to mean 0 and standard deviation 1, as with cerebro.transforms.Normalize",
            "hint",
        )


# --- what ``graph=True`` would bring -------------------------------------------------


def measure_gain(
    model: Any, batch: Mapping[str, Any], build_again: Callable[[], Any]
) -> tuple[float, float] | None:
    """Return the seconds of an ordinary step and of a replayed step.

    The model is changed, the batch is not. Return None if the user has chosen `graph`, if the step
    cannot be recorded, or if a GPU does not wait for the host. ``build_again()`` makes the model
    that replays on a GPU, where ``graph=True`` decides how the optimizer is made.
    """
    if type(model) is not Model:
        return None
    measure = _measure_on_cpu
    if model._network.device.type == "cuda":
        measure = functools.partial(measure_on_gpu, build_again=build_again)
    log = logging.getLogger("cerebro.torch")
    before, log.disabled = log.disabled, True  # do not report a refusal
    try:
        return measure(model, batch)
    finally:
        log.disabled = before


def _measure_on_cpu(model: Model, batch: Mapping[str, Any]) -> tuple[float, float] | None:
    if not model.may_be_recorded:
        return None
    model.train_batch(dict(batch))
    ordinary = _time_steps(model, batch, 1)
    if ordinary > LONGEST_STEP:
        return None
    ordinary = min(ordinary, _time_steps(model, batch, MEASURED_STEPS))
    model.record()
    for _ in range(MEASURED_STEPS):
        model.train_batch(dict(batch))
    return (ordinary, _time_steps(model, batch, MEASURED_STEPS)) if model.replays else None


def measure_on_gpu(
    model: Model, batch: Mapping[str, Any], build_again: Callable[[], Model]
) -> tuple[float, float] | None:
    """Do as `measure_gain` for a model on a GPU, which has trained on such batches before."""
    first, _ = _time_steps_on_gpu(model, batch, 1)
    if first > LONGEST_GPU_STEP:
        return None
    ordinary, launched = _time_steps_on_gpu(model, batch, MEASURED_STEPS)
    if launched < WAITING * ordinary:
        return None
    with set_open_graph() as opened:
        graphed = build_again()
    if not opened:
        return None
    for _ in range(MEASURED_STEPS):  # these include the capture and its comparison
        graphed.train_batch(dict(batch))
    if not graphed.replays:
        return None
    replayed, _ = _time_steps_on_gpu(graphed, batch, MEASURED_STEPS)
    return ordinary, replayed


def _time_steps_on_gpu(model: Model, batch: Mapping[str, Any], count: int) -> tuple[float, float]:
    """Return the mean seconds of `count` steps, and those until the host has launched them."""
    _wait_for_gpu(model._network.device)
    begun = time.perf_counter()
    for _ in range(count):
        model.train_batch(dict(batch))
    launched = time.perf_counter()
    _wait_for_gpu(model._network.device)
    return (time.perf_counter() - begun) / count, (launched - begun) / count


def _wait_for_gpu(device: Any) -> None:
    torch.cuda.current_stream(device).synchronize()


def _time_steps(model: Model, batch: Mapping[str, Any], count: int) -> float:
    """Return the CPU seconds of the fastest of `count` steps."""
    best = float("inf")
    for _ in range(count):
        begun = time.thread_time()
        model.train_batch(dict(batch))
        best = min(best, time.thread_time() - begun)
    return best
