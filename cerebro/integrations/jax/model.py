"""JAX models: a function, its parameters and an optax-like optimizer that can hop between workers.

:class:`Model` trains exactly as this loop does::

    @jax.jit
    def step(params, state, batch):
        objective = lambda params: loss_function(apply(params, batch["x"]), batch["y"])
        loss, gradients = jax.value_and_grad(objective)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

bit for bit. It adds what a model needs to move between workers: a state with everything that
further training depends on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cerebro.errors import InputError, StateError
from cerebro.integrations.jax.program import (
    Carry,
    ProgramParts,
    copy_tree,
    freeze_columns,
    from_state,
    name_leaves,
    program_of,
    to_host,
    to_state,
)
from cerebro.machine.devices import build_device
from cerebro.model import (
    SAME_MODEL,
    BaseModel,
    Batch,
    Columns,
    Words,
    check_metrics,
    column_names,
    is_joinable,
    named_functions,
)


class Model(BaseModel):
    """A function of parameters and inputs, with its optimizer and loss.

    Parameters
    ----------
    apply
        ``apply(params, *inputs) -> outputs``. If its signature names them, it also receives
        ``train=`` (a bool), ``key=`` (a random key, new in each training step) and ``variables=``
        (see below).
    params
        The trained parameters: any tree of floating-point arrays. They are copied.
    optimizer
        An object with optax's methods ``init(params)`` and ``update(gradients, state, params) ->
        (updates, state)``.
    loss
        ``loss(outputs, target) -> 0-d array``, the mean over the batch's rows. None: the outputs
        contain the loss, as ``outputs.loss`` or ``outputs["loss"]``.
    metrics, epoch_metrics, inputs, target
        As in :class:`cerebro.torch.Model`, with JAX arrays for tensors; `epoch_metrics` get NumPy
        arrays. `inputs` are those of `apply`.
    step
        ``step(params, batch) -> {"loss": ..., metric: ...}`` replaces `apply`, `inputs`, `target`,
        `loss` and `metrics`, in training and in validation. It may take ``train=``, ``key=`` and
        ``variables=``. Predictions need `apply` as well.
    variables
        Values besides the parameters that training changes, such as the statistics of batch norm:
        a tree of arrays. `apply` (or `step`) then takes them as ``variables=`` and in training
        returns ``(outputs, new variables)``; new ones returned in evaluation are ignored.
    seed
        The seed of the keys: in step ``n``, from 0, ``key=`` is ``jax.random.fold_in(
        jax.random.key(seed), n)``; in evaluation it is always ``jax.random.key(seed)``. None: the
        trial's seed, ``info.seed``.

    Notes
    -----
    A step is one compiled program, which replaces the parameters and the optimizer's state, in
    place if possible. It is compiled once per batch shape, including the shape of a shorter last
    batch. All functions are compiled, so they must be pure, as always in JAX.

    Raises
    ------
    InputError
        An argument is invalid; the message says which and why.

    Examples
    --------
    >>> def build(config, info):
    ...     net = Net()                                      # a flax.linen.Module
    ...     params = net.init(jax.random.key(info.seed), jnp.zeros((1, 64)))
    ...     optimizer = optax.adam(config["lr"])
    ...     return cerebro.jax.Model(net.apply, params, optimizer=optimizer, loss=cross_entropy)
    """

    framework = "jax"

    @property
    def words(self) -> Words:  # type: ignore[override]
        """What users call the parts of the model, for messages."""
        if self._step is not None:
            return Words("step", "step", "return it from step", "return it from step")
        return Words.of_metrics("add it to metrics= of cerebro.jax.Model")

    @property
    def declares_metrics(self) -> bool:  # type: ignore[override]
        """Whether the arguments fix the names of all metrics."""
        return self._step is None

    def __init__(
        self,
        apply: Callable[..., Any] | None,
        params: Any,
        *,
        optimizer: Any = None,
        loss: Callable[..., Any] | None = None,
        metrics: Mapping[str, Callable[..., Any]] | None = None,
        epoch_metrics: Mapping[str, Callable[..., Any]] | None = None,
        inputs: Columns = "x",
        target: Columns | None = "y",
        step: Callable[..., Mapping[str, Any]] | None = None,
        variables: Any = None,
        seed: int | None = None,
    ) -> None:
        for name, value in {"apply": apply, "loss": loss, "step": step}.items():
            if value is not None and not callable(value):
                raise InputError(f"{name} must be callable, not {value!r}")
        if apply is None and step is None:
            raise InputError("apply must be callable, not None: only step= replaces it")
        for method in ("init", "update"):
            if not callable(getattr(optimizer, method, None)):
                raise InputError(
                    "optimizer must have init(params) and update(gradients, state, params), as in "
                    f"optax; {optimizer!r} does not: give, for example, optax.adam(1e-3)"
                )
        if seed is not None and (isinstance(seed, bool) or not isinstance(seed, (int, np.integer))):
            raise InputError(f"seed must be a whole number or None, not {seed!r}")
        # The checks of a hop look for state in the user's functions here.
        self._apply, self._loss, self._step, self._optimizer = apply, loss, step, optimizer
        self._metrics = named_functions("metrics", metrics)
        self._epoch_metrics = named_functions("epoch_metrics", epoch_metrics)
        check_metrics(loss, step, self._metrics, self._epoch_metrics)
        self._inputs, self._target, self._seed = inputs, target, seed
        self._has_variables = variables is not None
        self._program = program_of(
            ProgramParts(
                apply=apply,
                step=step,
                loss=loss,
                metrics=tuple(self._metrics.items()),
                optimizer=optimizer,
                inputs=freeze_columns("inputs", inputs),
                target=freeze_columns("target", target),
                has_variables=self._has_variables,
                keeps_outputs=bool(self._epoch_metrics),
            )
        )
        self._device = _find_device()
        self._key = self._make_key(0 if seed is None else seed)
        params = copy_tree("params", params, self._device)
        _check_params(params)
        state = copy_tree("the optimizer's state", optimizer.init(params), self._device)
        variables = copy_tree("variables", variables, self._device)
        steps = jax.device_put(np.uint32(0), self._device)
        self._carry = Carry((params, state, variables, steps))

    @property
    def columns_read(self) -> list[str] | None:  # type: ignore[override]
        """The columns of `inputs` and `target`; None if `step` gets whole batches."""
        if type(self) is not Model or self._step is not None:
            return None
        return [*column_names("inputs", self._inputs), *column_names("target", self._target)]

    def _make_key(self, seed: int) -> Any:
        return jax.device_put(jax.random.key(seed), self._device)

    def bind_info(self, info: Any) -> None:
        """Use the trial's seed if none was given."""
        if self._seed is None:
            self._key = self._make_key(info.seed)

    @property
    def params(self) -> Any:
        """The current parameters, in their original structure."""
        return self._carry.lend(0)

    @property
    def optimizer_state(self) -> Any:
        """The optimizer's current state."""
        return self._carry.lend(1)

    @property
    def variables(self) -> Any:
        """The current variables; None if there are none."""
        return self._carry.lend(2)

    # --- training and evaluation ----------------------------------------------

    def train_batch(self, batch: Batch) -> dict[str, Any]:
        """Train on one batch; return the loss and the metrics.

        The batch has JAX arrays, or arrays of any type that JAX accepts, by column. The results are
        0-d arrays that may not be computed yet.
        """
        batch = self._place_batch(batch)
        tree, values = self._program.train(self._carry.take(self._device), self._key, batch)
        self._carry = Carry(tree)
        return values  # type: ignore[no-any-return]

    def eval_batch(self, batch: Batch) -> dict[str, Any]:
        """Return loss and metrics of one batch; the model is not changed."""
        return self._program.evaluate(*self._get_current(), self._place_batch(batch))  # type: ignore[no-any-return]

    def predict_batch(self, batch: Batch) -> Any:
        """Return the outputs for a batch, as `apply` gives them with ``train=False``."""
        if self._apply is None:
            raise InputError("there are no outputs to predict with: give apply as well as step")
        return self._program.predict(*self._get_current(), self._place_batch(batch))

    def _measure(self, batch: Batch) -> tuple[dict[str, Any], tuple[Any, ...]]:
        values, *parts = self._program.measure(*self._get_current(), self._place_batch(batch))
        return values, jax.tree.map(np.asarray, tuple(parts)) if self._epoch_metrics else ()

    def _get_current(self) -> tuple[Any, Any, Any]:
        params, _, variables, _ = self._carry.tree
        return params, variables, self._key

    # --- state ----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state: ``params``, ``optimizer``, ``step``, ``key`` and any ``variables``.

        Arrays are NumPy's, in nested dictionaries by name; arrays in host memory are not copied.
        """
        params, optimizer, variables, steps = self._carry.tree
        state = {
            "params": to_state(params),
            "optimizer": to_state(optimizer),
            "step": to_host(steps),
            "key": to_host(self._key),
        }
        if self._has_variables:
            state["variables"] = to_state(variables)
        return state

    def weights(self) -> dict[str, Any]:
        """Return the part of the state that prediction needs: ``params`` and any ``variables``."""
        state = self.state_dict()
        return {name: state[name] for name in ("params", "variables") if name in state}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state of an equally built model; its arrays are copied, not kept.

        Raise StateError, which names the array, if the state is from a different model. The model
        is then not changed.
        """
        expected = {"params", "optimizer", "step", "key"}
        if self._has_variables:
            expected.add("variables")
        for name in sorted(expected ^ state.keys()):
            raise StateError(
                f"the state has {'no' if name in expected else 'a'} {name!r}, unlike the model "
                f"that build made: {SAME_MODEL}"
            )

        def load(name: str, tree: Any, part: Any, retyped: bool = False) -> Any:
            return from_state(name, tree, part, self._device, retyped=retyped)

        params, optimizer, variables, steps = self._carry.tree
        scalars = {name: state[name] for name in ("step", "key")}
        scalars = load("the model", {"step": steps, "key": self._key}, scalars)
        self._carry = Carry(
            (
                load("params", params, state["params"]),
                load("optimizer", optimizer, state["optimizer"], retyped=True),
                load("variables", variables, state.get("variables")),
                scalars["step"],
            )
        )
        self._key = scalars["key"]

    @property
    def batch_schedule(self) -> str | None:
        """What optax's schedules are, if the optimizer has one: their place is a count of steps."""
        found = _has_schedule(self.state_dict()["optimizer"])
        return "one of optax's" if found else None

    def load_clone(self, state: Mapping[str, Any], config: Mapping[str, Any]) -> None:
        """Continue from another trial's state with this trial's hyperparameters.

        Parameters, moments, variables and the number of steps come from the parent. The optimizer's
        settings stay as `build` made them from `config`: in optax they are not part of the state,
        except those of `optax.inject_hyperparams`, which are not loaded. The key stays as well, so
        the clone draws different random numbers than its parent.
        """
        before = self.state_dict()
        optimizer = _keep_own_settings(state.get("optimizer", {}), before["optimizer"])
        self.load_state_dict({**state, "optimizer": optimizer, "key": before["key"]})

    def __repr__(self) -> str:
        count = sum(leaf.size for leaf in jax.tree.leaves(self._carry.tree[0]))
        function = self._apply if self._step is None else self._step
        name = getattr(function, "__qualname__", type(function).__name__)
        return f"cerebro.jax.Model({name}, {count:,} parameters)"

    # --- data -----------------------------------------------------------------

    def _floats(self, values: list[Any]) -> list[float]:
        return [float(value) for value in jax.device_get(values)]

    def _to_host(self, output: Any) -> Any:
        return jax.tree.map(np.asarray, output)

    def _join(self, parts: list[Any]) -> Any:
        """Join the batches' outputs along their rows; return them as a list if they do not fit."""
        by_batch, structures = zip(*map(jax.tree.flatten, parts), strict=True)
        by_leaf = list(zip(*by_batch, strict=True))
        if not all(map(is_joinable, by_leaf)):
            return parts
        return jax.tree.unflatten(structures[0], map(np.concatenate, by_leaf))

    def _place_batch(self, batch: Batch) -> Batch:
        """Return the batch on the model's device; return it unchanged if it is already there."""
        arrays = batch.values() if self._device.platform == "cpu" else ()
        if arrays and all(isinstance(v, jax.Array) and v.committed for v in arrays):
            return batch
        # Commit the arrays, as the loader does: otherwise each kind would compile the steps again.
        return jax.device_put(batch, self._device)  # type: ignore[no-any-return]


def _find_device() -> Any:
    """Return the JAX device of the trial whose model is being built, else JAX's default device."""
    kind, _, number = (build_device() or "").partition(":")
    if kind == "cpu":
        return jax.devices("cpu")[0]
    if kind == "cuda":
        try:
            return jax.devices("cuda")[int(number or 0)]
        except RuntimeError:
            pass
    return next(iter(jnp.zeros(()).devices()))


def _check_params(params: Any) -> None:
    named = name_leaves(params)
    if not named:
        raise InputError("params has no arrays: there is nothing to train")
    for path, leaf in named:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise InputError(
                f"params has {leaf.dtype} at {'/'.join(path)}, but only floating-point numbers "
                "are trained: put it into variables"
            )


def _has_schedule(state: Any) -> bool:
    """Return whether an optimizer's state has a count of steps without moments beside it."""
    if not isinstance(state, Mapping):
        return False
    return state.keys() == {"count"} or any(map(_has_schedule, state.values()))


def _keep_own_settings(state: Any, own: Any) -> Any:
    """Return an optimizer's state with the `optax.inject_hyperparams` settings of `own`."""
    if not isinstance(state, Mapping) or not isinstance(own, Mapping):
        return state
    return {
        name: own[name]
        if name == "hyperparams" and name in own
        else _keep_own_settings(value, own.get(name))
        for name, value in state.items()
    }
