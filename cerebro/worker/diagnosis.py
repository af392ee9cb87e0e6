"""Diagnose a model: observe a batch, train a few steps on it, check outputs and rows.

The hop check before a search takes `FEW` steps on one batch; `cerebro.check` takes more steps and
also evaluates. A time limit also bounds the number of steps, which affects only the findings. The
model is discarded afterwards, so the trial's states, generators and results do not depend on the
diagnosis. If a part fails, it has no findings: the trial itself reports the error.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from cerebro.data import Dataset
from cerebro.data.dtypes import Array
from cerebro.machine import flags, generators
from cerebro.machine.local import Clock
from cerebro.model import BaseModel, Words, column_names, get_whole_pass, words_of
from cerebro.report.findings import Finding
from cerebro.worker import data_diagnosis as data
from cerebro.worker.data_diagnosis import LabelUse
from cerebro.worker.evaluate import convert_metrics
from cerebro.worker.models import LiveModel

LEAST_STEPS = 4
GROWTH = 1000.0  # if the loss on one batch grows by this factor, training has diverged
HUGE = 1e12  # if the loss is above this value, training diverged in an earlier batch
LEAST_FALL = 1e-5  # a loss has not fallen unless it falls by at least this share of its value
SIZES = (1, 2, 4)  # how often a few rows are repeated, to see how the loss depends on their number
SIZE_TOLERANCE = 0.01
SMALL = 1e-6  # a loss of less than this says nothing about how it depends on the number of rows
LEAST_OUTPUTS = 4  # the fewest rows whose outputs are compared with each other or with the loss


def check_losses(losses: Sequence[float], *, opaque: bool) -> Iterator[Finding]:
    """Check the losses of steps on one batch; an `opaque` loss may be a share or a count."""
    if len(losses) < LEAST_STEPS or not all(map(math.isfinite, losses)):
        return  # `check_infinite` reports the cause
    first = losses[0]
    if all(loss == first for loss in losses):
        yield Finding(
            "constant-loss",
            f"the loss is {first:.6g} in each of {len(losses)} training steps on one batch",
            "raise the learning rate, or check that the loss depends on the optimizer's parameters",
            "hint" if opaque or first == 0 else "matters",
        )
    elif max(losses) > HUGE or losses[-1] > GROWTH * max(abs(first), 0.1):
        yield Finding(
            "exploding-loss",
            f"the loss goes from {first:.4g} to {losses[-1]:.4g} in {len(losses)} training steps "
            "on one batch",
            "choose a smaller learning rate, scale inputs and targets, or give clip_norm",
            "hint" if opaque and max(losses) <= HUGE else "matters",
        )


def check_infinite(losses: Sequence[float], columns: str) -> Iterator[Finding]:
    """Report a loss that is not finite; `columns` describes columns with such values, if any."""
    bad = next((loss for loss in losses if not math.isfinite(loss)), None)
    if bad is None:
        return
    message = f"the loss is {bad} in the first training steps"
    cure = "look for log(0), a division by 0, or a square root of 0 in the loss"
    if math.isfinite(losses[0]):
        cure = "choose a smaller learning rate, scale inputs and targets, or give clip_norm"
    if columns:  # which the model may handle
        cure = f"{columns}, which may be the cause: fill them, or drop these rows; or {cure}"
    yield Finding("loss-not-finite", message, cure)


def check_fall(
    losses: Sequence[float], before: float | None, after: float | None
) -> Iterator[Finding]:
    """Report if many steps on one batch did not lower its loss, in training or evaluation."""
    if len(losses) < 5 * LEAST_STEPS or not all(map(math.isfinite, losses)):
        return
    first, last = losses[0], sum(losses[-3:]) / 3
    if first - last > LEAST_FALL * abs(first) or all(loss == first for loss in losses):
        return
    if before is not None and after is not None and before - after > LEAST_FALL * abs(before):
        return
    said, cure = "rose", "choose a smaller learning rate, and see the sign of the loss"
    if abs(last - first) <= LEAST_FALL * abs(first):
        said = "did not fall"
        cure = "choose a larger learning rate, or see what the loss depends on"
    yield Finding(
        "loss-does-not-fall",
        f"{len(losses)} training steps on one batch: the loss {said}, "
        f"from {first:.4g} to {last:.4g}",
        cure,
        "hint",
    )


def check_metrics(
    before: Mapping[str, float], after: Mapping[str, float], losses: Sequence[float]
) -> Iterator[Finding]:
    """Report metrics that stay the same while the loss of the batch falls by half."""
    if len(losses) < LEAST_STEPS or not 0 <= 2 * losses[-1] < losses[0]:
        return
    for name, value in before.items():
        if name != "loss" and value == after.get(name) and value != 1:
            yield Finding(
                "constant-metric",
                f"the metric {name!r} stays at {value:.6g} while the loss falls from "
                f"{losses[0]:.4g} to {losses[-1]:.4g}",
                "check what it compares, and along which axis",
                "hint",
            )


def compare_evaluations(
    first: Mapping[str, float], second: Mapping[str, float], words: Words
) -> Iterator[Finding]:
    """Report a metric that differs between two evaluations of a batch with the same generators."""
    for name, value in first.items():
        other = second.get(name, math.nan)
        if not math.isclose(value, other, rel_tol=1e-4, abs_tol=1e-6) and value == value:
            yield Finding(
                "evaluation-changes-model",
                f"two evaluations of the same batch differ: {name!r} is {value:.6g}, then "
                f"{other:.6g}",
                f"leave out all that {words.evaluate} changes in the model, such as batch norm in "
                "training mode",
            )
            return


def repeat_rows(batch: Any) -> list[dict[str, Any]]:
    """Return batches with the same few rows of a batch, repeated as often as in `SIZES`.

    The list is empty unless the batch has only columns with one entry for each row. The largest
    batch has as many rows as `batch`, or up to four.
    """
    columns = batch if isinstance(batch, Mapping) else {}
    if not columns or not all(hasattr(column, "shape") for column in columns.values()):
        return []
    counts = {column.shape[0] if len(column.shape) else 0 for column in columns.values()}
    if len(counts) != 1 or 0 in counts:
        return []
    few = max(1, counts.pop() // SIZES[-1])
    return [
        {name: column[np.tile(np.arange(few), times)] for name, column in columns.items()}
        for times in SIZES
    ]


def check_sizes(losses: Sequence[float]) -> Iterator[Finding]:
    """Report a loss that grows with the rows: `losses` are of the same, repeated as in `SIZES`."""
    if len(losses) != len(SIZES) or not abs(losses[0]) > SMALL:
        return
    grown = [loss / losses[0] for loss in losses]
    if all(math.isclose(*pair, rel_tol=SIZE_TOLERANCE) for pair in zip(grown, SIZES, strict=True)):
        yield Finding(
            "summed-loss",
            "the loss is a sum over the rows, so it grows with the batch size",
            "divide it by the number of rows",
        )


def check_same_outputs(outputs: Any, inputs: list[Array]) -> Iterator[Finding]:
    """Report if all rows of a batch have the same output although their inputs differ."""
    if not _is_rows(outputs) or not any(bool((x[1:] != x[:1]).any()) for x in inputs):
        return
    if len(outputs) >= LEAST_OUTPUTS and bool(np.all(outputs == outputs[:1])):
        yield Finding(
            "same-output",
            f"all {len(outputs)} rows of a batch have the same output",
            "look for ReLUs that are always 0, weights that begin at 0, or unused inputs",
        )


def check_majority(outputs: Any, target: Array, share: float) -> Iterator[Finding]:
    """Report if a classifier predicts the same class for all rows of imbalanced data."""
    if not _is_rows(outputs) or share < 0.8 or len(np.unique(target)) < 2:
        return
    if outputs.ndim > 1 and outputs.shape[1] > 1 and len(np.unique(outputs.argmax(1))) == 1:
        yield Finding(
            "majority-class",
            f"all rows get the same class, which gives an accuracy of {share:.0%}, the share "
            "of that class",
            "rank trials by balanced accuracy, F1 or AUC (epoch_metrics=), or weight the loss",
            "hint",
        )


def check_loss(outputs: Any, target: Array, loss: float) -> Iterator[Finding]:
    """Compare the reported loss with the losses that correct and incorrect use would give."""
    if not _is_rows(outputs) or len(outputs) != len(target) or len(outputs) < LEAST_OUTPUTS:
        return
    values, targets = outputs.astype(np.float64), target.astype(np.float64)
    if values.shape[1:] == (1,) and targets.ndim == 1:
        yield from _check_broadcast(values, targets, loss)
        if loss == 0 and target.dtype.kind in "iu":
            yield Finding(
                "one-output",
                "cross entropy over one output is always 0",
                "give the network an output for each class, or use a binary cross entropy",
            )
    if is_cross_entropy(outputs, target, loss):
        inside = values.min() >= 0 and values.max() <= 1
        if inside and bool(np.all(np.abs(values.sum(1) - 1) < 1e-3)):
            yield Finding(
                "softmax-before-cross-entropy",
                "the outputs are probabilities, and the loss applies softmax again",
                "leave softmax out of the network: return logits",
            )


def is_cross_entropy(outputs: Any, target: Array, loss: float) -> bool:
    """Return whether a loss is the softmax cross entropy of outputs of shape (rows, classes)."""
    if not _is_rows(outputs) or outputs.ndim != 2 or outputs.shape[1] < 2:
        return False
    if target.dtype.kind not in "iu" or target.shape != outputs.shape[:1]:
        return False
    valid = (target >= 0) & (target < outputs.shape[1])
    if not valid.all():
        return False
    logits = outputs.astype(np.float64)
    logits = logits - logits.max(1, keepdims=True)
    log_sums = np.log(np.exp(logits).sum(1))
    rows = np.arange(len(logits))
    entropy = float(np.mean(log_sums - logits[rows, target]))
    with np.errstate(all="ignore"):
        likelihood = float(-np.mean(np.log(outputs[rows, target])))  # if they are probabilities
    return _is_near(entropy, loss) and not _is_near(likelihood, loss)


def _check_broadcast(outputs: Array, target: Array, loss: float) -> Iterator[Finding]:
    spread, right = outputs - target, outputs[:, 0] - target
    for norm in (np.square, np.abs):
        wrong, meant = float(norm(spread).mean()), float(norm(right).mean())
        if _is_near(wrong, loss) and not _is_near(meant, loss):
            n = len(target)
            yield Finding(
                "broadcast",
                f"shapes ({n},1) and ({n},) are compared, which gives {n} x {n} numbers",
                "make outputs and targets the same shape: outputs[:, 0], or target[:, None]",
            )
            return


def _is_rows(outputs: Any) -> bool:
    return isinstance(outputs, np.ndarray) and outputs.ndim > 0 and outputs.dtype.kind == "f"


def _is_near(left: float, right: float) -> bool:
    return abs(left - right) <= 1e-3 * max(abs(left), abs(right), 1e-6)


FEW, FEW_SECONDS = 5, 0.3
MANY, MANY_SECONDS = 40, 5.0


class Columns(NamedTuple):
    """The columns that a model names; empty if the user's code chooses the columns."""

    inputs: tuple[str, ...] = ()
    target: str | None = None


def diagnose(
    live: LiveModel,
    load: Callable[[], None],
    make_batch: Callable[[], Any],
    train: Dataset,
    validation: Dataset | None,
    *,
    thorough: bool,
    clock: Clock,
) -> list[Finding]:
    """Return the likely mistakes in a model and its data, the most certain first.

    `load` loads the model's state after a few batches, and `make_batch` returns one of them.
    `thorough` says whether to look at more rows and to train and evaluate on more batches.
    """
    with generators.preserve_generators(live.torch), warnings.catch_warnings(), flags.force_eager():
        warnings.simplefilter("ignore")  # warnings of the training itself were noted before
        try:
            diagnosis = _Diagnosis(live, load, make_batch(), train, validation, thorough, clock)
            findings = diagnosis.findings()
        except Exception:
            return []
    return sorted(dict.fromkeys(findings), key=lambda finding: not finding.matters)


@dataclass
class _Diagnosis:
    _live: LiveModel
    _load: Callable[[], None]
    _batch: Any
    _train_data: Dataset
    _validation: Dataset | None
    _thorough: bool
    _clock: Clock

    def __post_init__(self) -> None:
        self._model = self._live.model
        self._columns = read_columns(self._model)
        self._found: list[Finding] = []

    def findings(self) -> list[Finding]:
        uses: list[LabelUse] = []
        if self._live.torch:
            self._run_check(lambda: self._check_torch(uses))
        self._run_check(self._check_sizes)
        self._run_check(self._check_steps)
        self._run_check(lambda: self._check_outputs(uses))
        train, validation, thorough = self._train_data, self._validation, self._thorough
        for use in uses:
            self._run_check(partial(data.check_labels, use, train, validation, thorough))
        self._run_check(lambda: data.check_columns(train, validation, *self._columns, thorough))
        return self._found

    def _run_check(self, find: Callable[[], Iterable[Finding]]) -> None:
        with contextlib.suppress(Exception):
            for finding in find():  # each is noted at once, because later checks look at them
                self._found.append(finding)

    @property
    def _is_ill(self) -> bool:
        return any(finding.matters for finding in self._found)

    def _restore(self) -> None:
        self._load()
        generators.restore(self._live.generators)

    def _check_torch(self, uses: list[LabelUse]) -> Iterable[Finding]:
        from cerebro.torch import diagnosis

        self._restore()
        findings, losses = diagnosis.diagnose(self._model, self._batch)
        for call in losses:
            of_classes = call.name in ("cross_entropy", "nll_loss") and call.input.ndim > 1
            if of_classes and call.column and not call.target.is_floating_point():
                classes = int(call.input.shape[1])
                uses.append(LabelUse(call.column, classes, call.ignored, call.place))
        yield from findings
        if "gradients" in self._model.state_dict():
            return  # the model itself gathers them over several steps, as Lightning does
        if diagnosis.uses_old_gradients(self._model, self._train_step, self._restore):
            yield Finding(
                "stale-gradients",
                "a training step adds its gradients to those of the step before",
                f"call optimizer.zero_grad() in each {words_of(self._model).train}",
            )

    def _check_sizes(self) -> Iterable[Finding]:
        """Evaluate the same few rows once, twice and four times in one batch."""
        if not self._live.torch and not self._thorough:
            return  # JAX would have to compile for each size
        if hasattr(self._model, "estimator"):
            return  # its library computes the loss
        batches = repeat_rows(self._batch)
        self._restore()
        metrics = [self._evaluate(batch) for batch in batches]
        yield from check_sizes([float((m or {}).get("loss", np.nan)) for m in metrics])

    def _check_steps(self) -> Iterable[Finding]:
        self._restore()
        before = self._evaluate_thoroughly()
        if before is not None and not self._is_ill:
            again = self._evaluate_thoroughly() or before
            yield from compare_evaluations(before, again, words_of(self._model))
        self._restore()
        losses = self._train_steps()
        columns = ""
        if losses and not np.isfinite(losses).all():
            names = [*self._columns.inputs, *filter(None, [self._columns.target])]
            names = names or list(self._train_data.columns)  # the user's code chooses
            columns = data.summarize_texts(data.find_not_finite(self._train_data, names))
        yield from check_infinite(losses, columns)
        if self._is_ill:
            return
        # A loss of another class or library may be an error rate or the like, which need not fall.
        opaque = not isinstance(self._model, BaseModel) or hasattr(self._model, "estimator")
        yield from check_losses(losses, opaque=opaque)
        if self._thorough and not self._is_adversarial():
            after = self._evaluate_thoroughly()
            pair = ((before or {}).get("loss"), (after or {}).get("loss"))
            if not self._is_warming_up():
                yield from check_fall(losses, *pair)
            if before is not None and after is not None:
                yield from check_metrics(before, after, losses)

    def _check_outputs(self, uses: list[LabelUse]) -> Iterable[Finding]:
        model, names = self._model, self._columns
        framework = getattr(model, "framework", "dlpack")
        if not hasattr(model, "predict_batch") or hasattr(model, "estimator"):
            return
        if framework != "torch" and not self._thorough:
            return  # JAX would have to compile this
        predictions = model.predict_batch(copy_batch(self._batch))
        is_precise = str(getattr(predictions, "dtype", "")).endswith(("float32", "float64"))
        outputs_of_batch = as_numpy(predictions)
        batch = {name: as_numpy(value) for name, value in self._batch.items()}
        columns = [batch.get(name) for name in names.inputs]
        inputs = [column for column in columns if column is not None]
        if is_precise and not self._is_ill and not self._is_warming_up():
            yield from check_same_outputs(outputs_of_batch, inputs)
        target = batch.get(names.target or "")
        if not self._thorough or target is None or outputs_of_batch is None:
            return
        metrics = self._evaluate_thoroughly() or {}
        if framework != "torch":
            loss = metrics.get("loss", float("nan"))
            yield from check_loss(outputs_of_batch, target, loss)
            if is_cross_entropy(outputs_of_batch, target, loss):
                uses.append(LabelUse(str(names.target), outputs_of_batch.shape[1]))
        if metrics.keys() == {"loss", "accuracy"}:
            share = data.measure_majority_share(self._train_data, str(names.target))
            yield from check_majority(outputs_of_batch, target, share)

    def _train_steps(self) -> list[float]:
        count, seconds = (MANY, MANY_SECONDS) if self._thorough else (FEW, FEW_SECONDS)
        if hasattr(self._model, "begin_unit"):
            self._model.begin_unit((1,) * count)  # each batch makes an update
        end = self._clock.perf_counter() + seconds
        losses = []
        for _ in range(count):
            loss = self._train_step()
            if loss is None:
                return []
            losses.append(loss)
            if self._clock.perf_counter() > end or not np.isfinite(loss):
                break
        return losses

    def _train_step(self) -> float | None:
        """Train on the batch; return its loss, or None if the model reports none that counts."""
        values = self._model.train_batch(copy_batch(self._batch))
        if not isinstance(values, Mapping) or "loss" not in values:
            return None
        loss = values["loss"]
        mean, weight = loss if isinstance(loss, tuple) else (loss, 1)
        return float(mean) if weight != 0 else None

    def _evaluate_thoroughly(self) -> dict[str, float] | None:
        """Return the evaluation metrics of the batch; None in the hop check before a search."""
        return self._evaluate(self._batch) if self._thorough else None

    def _evaluate(self, batch: Any) -> dict[str, float] | None:
        """Return the evaluation metrics of a batch; None if it cannot be evaluated."""
        try:
            with generators.preserve_generators(self._live.torch, seed=0):
                evaluate = get_whole_pass(self._model)
                if evaluate is not None:
                    return convert_metrics(evaluate([copy_batch(batch)]))
                values = self._model.eval_batch(copy_batch(batch))
                return {k: float(v[0] if isinstance(v, tuple) else v) for k, v in values.items()}
        except Exception:  # such as an AUC over a single class
            return None

    def _is_warming_up(self) -> bool:
        """Return whether a per-batch schedule may keep the first learning rates small."""
        configs = getattr(self._model, "_configs", ())  # of a LightningModule
        if any(getattr(config, "interval", "") == "step" for config in configs):
            return True
        updates = getattr(self._model, "_updates", None)  # of a `cerebro.torch.Model`
        return updates is not None and updates.by_batch

    def _is_adversarial(self) -> bool:
        """Return whether several optimizers may oppose each other, so that no loss must fall."""
        attributes = getattr(self._model, "__dict__", {})
        optimizers = [value for value in attributes.values() if hasattr(value, "param_groups")]
        return len(optimizers) > 1 or len(attributes.get("_optimizers", ())) > 1


def read_columns(model: Any) -> Columns:
    """Return the columns that a model of this package names as its inputs and target."""
    if not isinstance(model, BaseModel) or getattr(model, "_step", None) is not None:
        return Columns()
    if not hasattr(model, "_target"):
        return Columns()  # the steps of a LightningModule choose them
    has_target = getattr(model, "_kind", "") not in ("clusterer", "transformer")
    targets = column_names("target", model._target) if has_target else []
    inputs = tuple(column_names("inputs", model._inputs))
    return Columns(inputs, targets[0] if len(targets) == 1 else None)


def copy_batch(batch: Any) -> Any:
    """Return a copy of a batch for a model that may modify it; JAX arrays cannot be modified."""
    if not isinstance(batch, Mapping):
        return batch
    return {name: _copy_value(value) for name, value in batch.items()}


def _copy_value(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    return value.clone() if hasattr(value, "clone") else value


def as_numpy(value: Any) -> Array | None:
    """Return any framework's array as a NumPy array; None for everything else."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        return np.asarray((value.float() if value.is_floating_point() else value).numpy())
    if isinstance(value, np.ndarray):  # also masked ones
        return value
    return np.asarray(value) if hasattr(value, "__array__") else None
