"""Train compiled Keras 3 models, on the PyTorch and the JAX backend.

:class:`Model` trains exactly as `keras.Model.fit` does over the same batches, bit for bit: it calls
the model's own ``train_step`` and ``test_step``. It adds what a model needs to move between
workers: a state with all variables, including those of the optimizer, the metrics and the random
generators.

The variables in a state have the names of Keras' paths, such as ``dense/kernel``. Keras numbers
layers without a name in the order of their creation. Cerebro resets the numbers before every
`build`, so equal models have equal names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import keras
import numpy as np
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from keras.src.trainers.data_adapters.data_adapter_utils import class_weight_to_sample_weights

from cerebro.arguments import KERAS_CALLBACKS, explain_keywords, list_words
from cerebro.errors import InputError, StateError
from cerebro.integrations.keras.steps import JaxSteps, TorchSteps
from cerebro.machine.devices import build_device
from cerebro.model import (
    SAME_MODEL,
    BaseModel,
    Batch,
    Columns,
    Words,
    check_batch,
    column_names,
    is_joinable,
    make_getter,
)

WORDS = list_words(
    {
        "net": "model network",
        "inputs": "input x features",
        "target": "targets label labels y",
        "weight": "sample_weight weights sample_weights",
        "class_weight": "class_weights",
        "give it to net.compile() in build": (
            "optimizer loss metrics loss_weights weighted_metrics jit_compile run_eagerly"
        ),
        KERAS_CALLBACKS: "callbacks callback",
        "search() takes it": "epochs batch_size validation_data validation_split seed verbose",
    }
)

SEED = "seed_generator_state"  # the variable with the state of a Keras random generator


class Model(BaseModel):
    """A compiled Keras model.

    Parameters
    ----------
    net
        A `keras.Model` on which ``compile`` was called: its optimizer with any schedule, clipping,
        average or accumulation, its loss, ``loss_weights``, metrics, ``weighted_metrics``,
        ``jit_compile`` and ``run_eagerly`` are used as in `fit`. ``steps_per_execution`` has no
        effect. Custom ``train_step``, ``test_step`` and ``predict_step`` are called, with the same
        ``data`` as in `fit`: ``(x, y)``, with a weight ``(x, y, weight)``, without a target ``x``.
    inputs
        The model's inputs: a column, a list of columns (a tuple of inputs) or a mapping of input
        names to columns.
    target
        The target: a column (for an autoencoder the column of `inputs`), a list, a mapping of
        output names to columns, or None if the model computes its own losses.
    weight
        A column of sample weights, used like ``sample_weight`` in `fit`: for the loss and
        ``weighted_metrics``, in training and in validation. Data without the column can still be
        evaluated, without weights.
    class_weight
        Weights of the classes by class number, as in `fit`: for training only, and not together
        with `weight`.

    Attributes
    ----------
    net
        The Keras model, with the current values of its variables between units and after
        `Trial.load`; ``net.save("best.keras")`` writes it.

    Notes
    -----
    Keras computes the metrics over all rows of an epoch, as in `fit`; their sums are part of the
    state. Evaluation changes neither statistics nor random generators, so `evaluate` returns the
    same values when called again. Validation uses the weights, not their average
    (``use_ema=True``), as in `fit`. To assign the average to the weights, as `fit` does at its end,
    call ``net.optimizer.finalize_variable_values(net.trainable_variables)``.

    Raises
    ------
    InputError
        The model is not a compiled Keras model, Keras' backend is neither PyTorch nor JAX, or an
        argument is invalid.

    Examples
    --------
    >>> def build(config):
    ...     net = keras.Sequential([keras.layers.Dense(config["units"], "relu"),
    ...                             keras.layers.Dropout(0.2), keras.layers.Dense(10)])
    ...     loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    ...     net.compile(keras.optimizers.Adam(config["lr"]), loss, metrics=["accuracy"])
    ...     return cerebro.keras.Model(net)
    """

    evaluates_whole = True
    words = Words.of_metrics("add it to net.compile(metrics=[...])")

    @explain_keywords(WORDS, name="cerebro.keras.Model")
    def __init__(
        self,
        net: Any,
        *,
        inputs: Columns = "x",
        target: Columns | None = "y",
        weight: str | None = None,
        class_weight: Mapping[int, float] | None = None,
    ) -> None:
        backend = str(keras.backend.backend())
        if backend not in ("torch", "jax"):
            raise InputError(
                f"Keras runs on {backend}, but cerebro.keras needs PyTorch or JAX: set "
                "KERAS_BACKEND=torch or KERAS_BACKEND=jax in the environment"
            )
        _check_net(net)
        self.framework, self.loads_in_place = backend, backend == "torch"
        self.net = net
        self._inputs, self._target, self._weight = inputs, target, weight
        self.columns_spared = [] if weight is None else [weight]  # by evaluation
        column_names("inputs", inputs)
        column_names("target", target)
        self._class_weight = _check_weights(weight, class_weight, target)
        self._get_inputs = make_getter(inputs)
        self._get_target = None if target is None else make_getter(target)
        self._steps: Any = TorchSteps(net) if backend == "torch" else JaxSteps(net)
        self._is_built = False
        self._logs: Any = None  # Keras' logs of the last training batch
        # Keras layers and functions without a seed share one generator of the process.
        self._shared = keras.random.SeedGenerator(name="cerebro_shared")

    def bind_info(self, info: Any) -> None:
        """Build the model for the data's shapes, as `fit` does before its first batch."""
        for batch in info.data.in_order(info.batch_size, self.framework):
            self._build(batch)
            break

    @property
    def declares_metrics(self) -> bool:  # type: ignore[override]
        """Whether ``net.compile`` fixes the names of all metrics."""
        net = self.net
        reporting = (net.train_step, net.test_step, net.compute_metrics, net.get_metrics_result)
        return all(method.__module__.startswith("keras.") for method in reporting)

    # --- training and evaluation ----------------------------------------------

    def begin_epoch(self, epoch: int) -> None:
        """Reset the metrics for a new epoch."""
        self._steps.sync()
        self._logs = None
        if self._is_built:
            self.net.reset_metrics()

    def train_batch(self, batch: Batch) -> None:
        """Train on one batch; :meth:`training_metrics` has the metrics."""
        data = self._arrange_batch(batch, training=True)
        if not self._is_built:
            self._build(batch)
        with self._use_generator():
            self._logs = self._steps.train(data)

    def end_unit(self) -> None:
        """Assign the current values to the variables of `net`."""
        self._steps.sync()

    def training_metrics(self) -> dict[str, float]:
        """Return the metrics over the training batches of the epoch so far."""
        self._steps.sync()
        logs, self._logs = self._logs, None
        return self._read_metrics(logs)

    def evaluate(self, data: Any, *, batch_size: int | None = None) -> dict[str, float]:
        """Return the loss and all metrics over all rows, as `keras.Model.evaluate` does.

        See :meth:`cerebro.torch.Model.evaluate` for the arguments.
        """
        batches = iter(self._batches(data, batch_size))
        first = next(batches, None)
        if first is None:
            raise InputError("there are no rows to evaluate")
        if not self._is_built:
            self._build(first)
        logs = None
        with self._evaluating():
            self.net.reset_metrics()
            for batch in chain([first], batches):
                logs = self._steps.measure(self._arrange_batch(batch, training=False))
            self._steps.sync()
            return self._read_metrics(logs)

    def eval_batch(self, batch: Batch) -> dict[str, Any]:
        """Return loss and metrics of one batch; the model is not changed."""
        return self.evaluate([batch])

    @property
    def inputs(self) -> Columns:
        """The columns that the network reads."""
        return self._inputs

    def predict_batch(self, batch: Batch) -> Any:
        """Return the model's outputs for a batch, in evaluation mode."""
        check_batch(batch, self._inputs, None)
        data = _pack_columns(self._place(self._get_inputs(batch)))
        with self._evaluating():
            return self._steps.predict(data)

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        """Restore at the end what evaluation changes: statistics, random generators, metrics."""
        self._steps.sync()
        net = self.net
        variables = [*net.non_trainable_variables, *_buffers_of(net), *net.metrics_variables]
        variables.append(self._shared.state)
        before = [self._steps.copy(variable) for variable in variables]
        try:
            with self._use_generator():
                yield
        finally:
            self._steps.sync()
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)

    def _read_metrics(self, logs: Any) -> dict[str, float]:
        """Return the metrics' results; as in `fit`, return `logs` instead if the names differ."""
        values = self.net.get_metrics_result()
        if isinstance(logs, Mapping) and logs.keys() != values.keys():
            values = logs
        return {name: _as_number(name, value) for name, value in _flatten_logs(values)}

    # --- state ----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state: live tensors or views of arrays, by Keras' paths.

        Its keys are ``backend``, ``net``, ``optimizer``, ``metrics`` and ``shared``, the random
        generator for everything in Keras without its own seed.
        """
        state: dict[str, Any] = {"backend": self.framework}
        for part, variables in self._variables().items():
            state[part] = {name: self._steps.value(v) for name, v in variables.items()}
        return state

    def _variables(self) -> dict[str, dict[str, Any]]:
        """Return the variables in a state by part and name, with their current values."""
        if not self._is_built:
            raise StateError(
                "the Keras model has seen no data, so its variables are not all made: train or "
                "evaluate a batch first"
            )
        self._steps.sync()
        net, optimizers = self.net, _optimizers_of(self.net).values()
        weights = [*net.trainable_variables, *net.non_trainable_variables, *_buffers_of(net)]
        return {
            "net": _name_variables(weights),
            "optimizer": _name_variables(v for each in optimizers for v in each.variables),
            "metrics": _name_variables(net.metrics_variables),
            "shared": {"seed": self._shared.state},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of an equally built model; its arrays are copied, not kept.

        Raise StateError if the state is from a different model or a different backend of Keras.
        """
        parts, backend = self._variables(), state.get("backend")
        if backend != self.framework:
            raise StateError(
                f"the state is from Keras on {backend}, but here Keras runs on "
                f"{self.framework}: set KERAS_BACKEND={backend} in the environment"
            )
        for part, variables in parts.items():
            _load(part, variables, state.get(part))

    @property
    def batch_schedule(self) -> str | None:
        """The class of a learning-rate schedule, whose place is the number of batches."""
        return next(filter(None, map(_find_schedule, _optimizers_of(self.net).values())), None)

    def load_clone(self, state: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Continue from another trial's state with this trial's hyperparameters.

        Weights, moments and the number of steps come from the parent. The learning rates of all
        optimizers and the random generators stay as `build` made them, so the clone draws different
        random numbers than its parent.
        """
        net = self._variables()["net"].values()
        own = [*(v for v in net if v.name == SEED), self._shared.state]
        for optimizer in _optimizers_of(self.net).values():
            own.extend(_rates_in(optimizer))
        values = [np.array(keras.ops.convert_to_numpy(variable.value)) for variable in own]
        self.load_state_dict(state)
        for variable, value in zip(own, values, strict=True):
            variable.assign(value)

    def __repr__(self) -> str:
        net, kind = self.net, type(self.net.optimizer).__name__
        count = f"{net.count_params():,} parameters, " if net.built else ""
        return f"cerebro.keras.Model({net.name}, {count}{kind})"

    # --- data -----------------------------------------------------------------

    def _arrange_batch(self, batch: Batch, *, training: bool) -> Any:
        """Return a batch in the form in which `fit` gives it to ``train_step``."""
        check_batch(batch, self._inputs, self._target)
        x = self._get_inputs(batch)
        y = None if self._get_target is None else self._get_target(batch)
        weight = None
        if self._weight is not None and (training or self._weight in batch):
            if self._weight not in batch:
                raise InputError(
                    f"weight names the column {self._weight!r}, but the data has {', '.join(batch)}"
                )
            weight = batch[self._weight]
        elif self._class_weight is not None and training:
            weight = class_weight_to_sample_weights(y, self._class_weight)
        return _pack_columns(*map(self._place, (x, y, weight)))

    def _place(self, tree: Any) -> Any:
        return None if tree is None else keras.tree.map_structure(self._steps.place, tree)

    def _build(self, batch: Batch) -> None:
        """Create the variables that depend on the data's shapes, as `fit` does."""
        data = self._arrange_batch(batch, training=True)
        with self._use_generator():
            self.net._symbolic_build(data_batch=data)
        for name, optimizer in _optimizers_of(self.net).items():
            if not optimizer.built:
                raise InputError(
                    f"net.{name} is not built, so its state is unknown: in build, call "
                    f"net.{name}.build(...) with the variables that it trains"
                )
        self._is_built = True
        trained_on, device = build_device(), self._steps.device()
        if trained_on is not None and device is not None and not trained_on.startswith(device):
            raise InputError(
                f"the Keras model is on {device}, but the search trains on {trained_on}: give "
                f"search(devices={device!r}), or make the model under keras.device({trained_on!r})"
            )

    @contextmanager
    def _use_generator(self) -> Iterator[None]:
        """Let Keras functions without a seed draw random numbers from this model's generator."""
        before = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, self._shared)
        try:
            yield
        finally:
            global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, before)

    def _to_host(self, output: Any) -> Any:
        return keras.tree.map_structure(keras.ops.convert_to_numpy, output)

    def _join(self, parts: list[Any]) -> Any:
        """Join the batches' outputs along their rows; return them as a list if they do not fit."""
        flat = [keras.tree.flatten(part) for part in parts]
        if not all(is_joinable(leaves) for leaves in zip(*flat, strict=True)):
            return parts
        joined = [np.concatenate(leaves) for leaves in zip(*flat, strict=True)]
        return keras.tree.pack_sequence_as(parts[0], joined)


def _pack_columns(x: Any, y: Any = None, weight: Any = None) -> Any:
    """Return ``(x, y, weight)``, ``(x, y)`` or `x`, as `fit` gives them to custom steps."""
    if y is None and weight is not None:
        return x, None, weight  # Keras' function would silently drop the weights
    return keras.utils.pack_x_y_sample_weight(x, y, weight)


def _check_net(net: Any) -> None:
    if not isinstance(net, keras.Model):
        raise InputError(
            f"net must be a compiled keras.Model, not {net!r}"
            if not isinstance(net, type)
            else f"net is the class {net.__name__}: give {net.__name__}(...)"
        )
    if not net.compiled or net.optimizer is None:
        raise InputError(
            "net is not compiled: call net.compile(optimizer=..., loss=..., metrics=[...]) in build"
        )


def _check_weights(
    weight: Any, class_weight: Any, target: Columns | None
) -> dict[int, float] | None:
    if weight is not None and not isinstance(weight, str):
        raise InputError(f"weight must be a column's name, not {weight!r}")
    if class_weight is None:
        return None
    if weight is not None:
        raise InputError("weight and class_weight cannot be combined: leave out one of them")
    if not isinstance(target, str):
        raise InputError("class_weight needs one target column")
    if not isinstance(class_weight, Mapping):
        raise InputError(
            f"class_weight must be a mapping of class numbers to weights, not {class_weight!r}"
        )
    return dict(class_weight)


def _flatten_logs(logs: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield names and values as in `fit`'s history, without the names of dictionaries inside."""
    for name, value in logs.items():
        if isinstance(value, Mapping):  # all metrics given to `compile`, in some custom steps
            yield from _flatten_logs(value)
        else:
            yield name, value


def _as_number(name: str, value: Any) -> float:
    shape = tuple(getattr(value, "shape", ()))
    if math.prod(shape) != 1:
        raise InputError(
            f"the metric {name!r} has shape {shape}, but a search needs one number: give the "
            "metric an average, such as average='macro'"
        )
    return float(value)


# --- variables ------------------------------------------------------------------


class _Buffer:
    """A buffer of a PyTorch module, such as a batch norm's statistics, as a Keras variable."""

    def __init__(self, path: str, module: Any, name: str) -> None:
        self.path, self.name, self._module = path, name, module

    @property
    def value(self) -> Any:
        return getattr(self._module, self.name)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)

    @property
    def dtype(self) -> str:
        return _dtype_name(self.value)

    def assign(self, value: Any) -> None:
        self.value.copy_(keras.ops.convert_to_tensor(value, dtype=self.dtype))


def _buffers_of(net: Any) -> list[Any]:
    """Return the buffers of all PyTorch modules inside a model, in a fixed order."""
    buffers = []
    for layer in net._flatten_layers():
        if isinstance(layer, keras.layers.TorchModuleWrapper):
            for place, module in layer.module.named_modules():
                path = "/".join([str(layer.path), *filter(None, place.split("."))])
                for name, _ in module.named_buffers(recurse=False):
                    buffers.append(_Buffer(f"{path}/{name}", module, name))
    return buffers


def _optimizers_of(net: Any) -> dict[str, Any]:
    """Return the optimizers of a model by attribute; a custom ``train_step`` may use several."""
    others = {
        name: value
        for name, value in sorted(vars(net).items())
        if isinstance(value, keras.optimizers.Optimizer) and value is not net.optimizer
    }
    return {"optimizer": net.optimizer, **others}


def _name_variables(variables: Iterable[Any]) -> dict[str, Any]:
    """Return variables by path; repetitions of a path become ``path#1``, ``path#2``, ..."""
    by_path: dict[str, Any] = {}
    counts: dict[str, int] = {}
    for variable in variables:
        path = str(variable.path)
        count = counts.get(path, 0)
        counts[path] = count + 1
        by_path[f"{path}#{count}" if count else path] = variable
    return by_path


def _load(part: str, variables: Mapping[str, Any], state: Any) -> None:
    """Copy a state's part into variables; raise StateError, before any change, if they differ."""
    values = state if isinstance(state, Mapping) else {}
    for name in sorted(variables.keys() ^ values.keys()):
        has, lacks = ("model", "state") if name in variables else ("state", "model")
        raise StateError(
            f"the {has} has the variable {part}/{name}, the {lacks} does not: {SAME_MODEL}"
        )
    for name, variable in variables.items():
        shape, dtype = tuple(values[name].shape), _dtype_name(values[name])
        if shape != tuple(variable.shape) or dtype != variable.dtype:
            raise StateError(
                f"{part}/{name} is {dtype} of shape {shape} in the state and {variable.dtype} of "
                f"shape {tuple(variable.shape)} in the model: {SAME_MODEL}"
            )
    for name, variable in variables.items():
        value = values[name]
        if value is not variable.value:  # otherwise a live tensor, already loaded
            variable.assign(np.array(value) if isinstance(value, np.ndarray) else value)


def _dtype_name(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")


def _rates_in(optimizer: Any) -> Iterator[Any]:
    """Yield the learning rates of an optimizer and of those that it wraps."""
    for each in _walk_wrapped(optimizer):
        rate = getattr(each, "_learning_rate", None)
        if isinstance(rate, keras.Variable):  # not a schedule
            yield rate


def _find_schedule(optimizer: Any) -> str | None:
    """Return the class of the first schedule of an optimizer and of those that it wraps."""
    schedules = keras.optimizers.schedules.LearningRateSchedule
    rates = (getattr(each, "_learning_rate", None) for each in _walk_wrapped(optimizer))
    return next((type(rate).__name__ for rate in rates if isinstance(rate, schedules)), None)


def _walk_wrapped(optimizer: Any) -> Iterator[Any]:
    yield optimizer
    # The rate of a LossScaleOptimizer or a MultiOptimizer itself is not used, only those inside.
    inner = getattr(optimizer, "inner_optimizer", None)
    for wrapped in getattr(optimizer, "optimizers", ()) if inner is None else (inner,):
        yield from _walk_wrapped(wrapped)
