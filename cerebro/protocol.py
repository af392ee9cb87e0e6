"""What a model is: the methods that Cerebro calls on what `build` returns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from cerebro.errors import InputError

FRAMEWORKS = ("torch", "numpy", "jax", "dlpack")


@dataclass(frozen=True)
class Info:
    """What a model may want to know about the search that trains it.

    Attributes
    ----------
    epochs
        How many epochs the trial trains at most.
    steps_per_epoch
        Training batches per epoch.
    total_steps
        Training batches in all: ``epochs * steps_per_epoch``.
    batch_size
        Rows per training batch.
    trial
        The trial's number.
    seed
        The seed that `random`, NumPy and torch were seeded with before `build`.
    device
        Where batches of PyTorch's tensors arrive: "cpu", or a GPU such as "cuda:0".
    columns
        The data's columns by name.
    classes
        The names of the classes by column; None for columns without, such as integer labels: see
        `num_classes`.
    data
        The training data, a :class:`cerebro.Dataset`.
    fold
        Which fold of its configuration the trial is, from 0; None in a search without folds.
    """

    epochs: int
    steps_per_epoch: int
    total_steps: int
    batch_size: int
    trial: int
    seed: int
    device: str = "cpu"
    columns: Mapping[str, Any] | None = None
    classes: Mapping[str, Any] | None = None
    data: Any = None
    fold: int | None = None

    def num_classes(self, column: str = "y") -> int:
        """Return how many classes a label column has, named or numbered.

        See `cerebro.Dataset.num_classes`.
        """
        return int(self.data.num_classes(column))


class Model(Protocol):
    """The methods that every model has.

    Metric values are floats or 0-d tensors, means over the batch's rows, or
    pairs ``(mean, weight)``. Optional, and called where they exist:

    ``framework``
        What batches are made of: "torch", "numpy", "jax" or "dlpack" (default).
    ``cpu_only``
        True if it never computes on a GPU: with ``devices="auto"`` a search is on the CPU then.
    ``loads_in_place``
        True if a state may be copied into the tensors that `state_dict` returns
        (they are the model's own and nobody else's), which spares new memory.
    ``bind_info(info)``
        Once, after `build`.
    ``begin_epoch(epoch)``, ``end_epoch(epoch, metrics)``
        Around an epoch (from 0); the second after validation, before the epoch's
        state is hashed.
    ``end_unit()``
        After the last training batch of a unit, before its state is taken.
    ``evaluate(batches) -> dict``
        Instead of `eval_batch` for a whole validation pass.
    ``predict_batch(batch)``
        The outputs for a batch.
    ``load_clone(state, config)``
        Instead of `load_state_dict` when the state is another trial's.
    """

    def train_batch(self, batch: dict[str, Any]) -> Mapping[str, Any] | None:
        """Train on one batch and return its metrics."""
        ...

    def eval_batch(self, batch: dict[str, Any]) -> Mapping[str, Any]:
        """Return the metrics of one batch without changing the model."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later training depends on: tensors, arrays and JSON."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state; tensors in it are copied, not kept."""
        ...


_REQUIRED = {
    "train_batch": "train_batch(batch) -> dict | None",
    "eval_batch": "eval_batch(batch) -> dict",
    "state_dict": "state_dict() -> dict",
    "load_state_dict": "load_state_dict(state)",
}


def check_model(model: object) -> None:
    """Raise InputError if `model` lacks a method that Cerebro needs.

    The message names what `build` returned and the first missing method.
    """
    if model is None:
        raise InputError(
            "build returned None; return a model, such as cerebro.torch.Model(...). A function "
            "that trains by itself, as for Ray Tune or Optuna, is to return its model instead"
        )
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    if is_keras(model):
        raise InputError(f"build returned a {kind}: {NO_KERAS}")
    for name, signature in _REQUIRED.items():
        if name == "eval_batch" and callable(getattr(model, "evaluate", None)):
            continue
        if not callable(getattr(model, name, None)):
            raise InputError(
                f"build returned a {kind}, which has no {name} method: a model needs {signature}"
                f"{_hint(model)}"
            )
    framework = framework_of(model)
    if framework not in FRAMEWORKS:
        raise InputError(
            f"build returned a {kind} with framework={framework!r}; it must be one of "
            f"{', '.join(FRAMEWORKS)}"
        )


NO_KERAS = (
    "Keras is not supported yet (its layers would not be told when they train, so that dropout did "
    "nothing): make the network with torch.nn and its optimizer with torch.optim"
)


def is_keras(value: object) -> bool:
    """Whether an object's class, or one that this is derived from, is Keras's."""
    packages = {kind.__module__.partition(".")[0] for kind in type(value).__mro__}
    return not packages.isdisjoint(("keras", "tf_keras"))


def _hint(model: object) -> str:
    if hasattr(model, "parameters") and hasattr(model, "forward"):
        return "; wrap the network: cerebro.torch.Model(net, optimizer=..., loss=...)"
    if hasattr(model, "partial_fit"):
        return "; wrap the estimator: cerebro.sklearn.Model(estimator)"
    if hasattr(model, "apply") and hasattr(model, "init"):
        return "; wrap the module: cerebro.jax.Model(net.apply, params, optimizer=..., loss=...)"
    if isinstance(model, tuple):
        return "; return one object, such as cerebro.torch.Model(net, optimizer=..., loss=...)"
    return ""


def framework_of(model: object) -> str:
    """Return what the model's batches are made of: its `framework`, "dlpack" if it has none."""
    return getattr(model, "framework", "dlpack")


def is_cpu_only(model: object) -> bool:
    """Return whether the model says that it never computes on a GPU."""
    return bool(getattr(model, "cpu_only", False))


def whole_pass(model: object) -> Callable[[Iterable[dict[str, Any]]], Mapping[str, Any]] | None:
    """Return `model.evaluate` if validation must go through it, else None.

    A model that has `evaluate` may say ``evaluates_whole = False``: batch by
    batch then gives the same metrics.
    """
    evaluate = getattr(model, "evaluate", None)
    if callable(evaluate) and getattr(model, "evaluates_whole", True):
        return evaluate  # type: ignore[no-any-return]
    return None
