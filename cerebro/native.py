"""A small convolutional network in C: a model that needs no framework.

:class:`Model` implements the same protocol as every other model: a search can train it, move it
between workers, resume it and replay it. It is meant for small images, for tests, and to show that
an installation trains and reproduces its results bit for bit (``python -m cerebro doctor
--train``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

import cerebro._core as _core
from cerebro.arguments import check_real_number
from cerebro.errors import InputError, StateError
from cerebro.machine import cuda, turns
from cerebro.model import SAME_MODEL, Batch, Words

_Array = NDArray[Any]


class Model:
    """A network of two convolutions, trained by stochastic gradient descent with momentum.

    The network has two blocks, each of a 3x3 convolution with bias and padding 1, ReLU and 2x2 max
    pooling, and then a linear layer. The loss is softmax cross-entropy. Everything is computed in
    float32, in one thread or on a GPU.

    Parameters
    ----------
    shape
        The shape of an image: (channels, height, width), height and width at least 4.
    classes
        The number of classes, at least 2. In the target, they are numbered from 0.
    filters
        The number of filters of the first and the second convolution.
    lr
        The learning rate.
    momentum
        From 0 to below 1: ``m = momentum * m + gradient``, then ``value -= lr * m``.
    seed
        The seed of the initial weights. None: the weights are drawn from NumPy's global generator,
        which is seeded for every trial.
    device
        "cpu", or a GPU such as "cuda" or "cuda:1", which needs cuDNN 9 for the convolutions. In a
        search on GPUs, pass ``info.device``. Batches come from host memory in any case.
    inputs
        The column of images: float32, (rows, channels, height, width).
    target
        The column of classes: integers, (rows,).

    Notes
    -----
    Initial weights are uniform within ``sqrt(6 / inputs)`` of 0 in convolutions (He et al.,
    "Delving deep into rectifiers", 2015) and within ``1 / sqrt(inputs)`` in the linear layer;
    initial biases are 0. Metrics are ``loss`` and ``accuracy``. Sums have a fixed order, so the
    same weights and batches give the same bits in every process on machines of the same kind; on
    GPUs, the version of cuDNN must be the same, too.

    Raises
    ------
    InputError
        An argument is invalid; the message says which and why.
    DeviceError
        The GPU cannot be used, or cuDNN 9 is missing.

    Examples
    --------
    >>> def build(config):
    ...     return cerebro.native.Model((1, 16, 16), 4, lr=config["lr"])
    """

    framework = "dlpack"
    words = Words.of_metrics("this model has no others")
    declares_metrics = True
    loads_in_place = True
    overlaps = True  # on a GPU, with other units of its process; see `cerebro.machine.turns`

    def __init__(
        self,
        shape: Sequence[int],
        classes: int,
        *,
        filters: Sequence[int] = (8, 16),
        lr: float = 0.01,
        momentum: float = 0.9,
        seed: int | None = None,
        device: str = "cpu",
        inputs: str = "x",
        target: str = "y",
    ) -> None:
        self.cpu_only = device == "cpu"
        self._shape = _check_whole_numbers("shape", shape, 3)
        self._lr = check_real_number("lr", lr, least=0, finite=True)
        self._momentum = check_real_number("momentum", momentum, least=0, below=1)
        self._inputs = _check_column_name("inputs", inputs)
        self._target = _check_column_name("target", target)
        channels, height, width = self._shape
        first, second = _check_whole_numbers("filters", filters, 2)
        try:
            self._net = _core.NativeNet(
                channels, height, width, first, second, classes, *_find_device(device)
            )
        except (TypeError, ValueError) as error:
            raise InputError(f"cerebro.native.Model: {error}") from None
        self._values = self._view_parts("values")
        self._momenta = self._view_parts("momenta")
        self._draw_weights(seed)
        self._net.push()

    def _view_parts(self, kind: Any) -> dict[str, _Array]:
        return {name: np.asarray(part) for name, part in self._net.parts(kind).items()}

    def _draw_weights(self, seed: int | None) -> None:
        try:
            generator = np.random.mtrand._rand if seed is None else np.random.RandomState(seed)
        except (TypeError, ValueError) as error:
            raise InputError(f"seed: {error}") from None
        for name, value in self._values.items():
            if name.endswith("weight"):
                most = math.sqrt((6.0 if value.ndim == 4 else 1.0) / value[0].size)
                value[...] = generator.uniform(-most, most, value.shape)

    # --- training and evaluation ----------------------------------------------

    def train_batch(self, batch: Batch) -> dict[str, float]:
        """Train on one batch.

        Parameters
        ----------
        batch
            Arrays in host memory by column, of any type that NumPy accepts.

        Returns
        -------
        dict
            ``loss`` and ``accuracy`` before the step.

        Raises
        ------
        InputError
            A column is missing or unsuitable, or a class is out of range.
        """
        values = self._score_batch(self._net.differentiate, batch)
        self._net.step(self._lr, self._momentum)
        return values

    def eval_batch(self, batch: Batch) -> dict[str, float]:
        """Return ``loss`` and ``accuracy`` of one batch; the model is not changed."""
        return self._score_batch(self._net.evaluate, batch)

    def predict_batch(self, batch: Batch) -> NDArray[np.float32]:
        """Return the scores of all classes before the softmax: shape (rows, classes)."""
        return self._net.predict(self._read_images(batch))

    def _score_batch(self, function: Any, batch: Batch) -> dict[str, float]:
        pictures, labels = self._read_images(batch), self._read_labels(batch)
        if len(labels) != len(pictures):
            raise InputError(
                f"a batch has {len(pictures)} rows of {self._inputs!r}, but {len(labels)} of "
                f"{self._target!r}"
            )
        try:
            # Other units run while it waits for the GPU.
            with nullcontext() if self.cpu_only else turns.give_away():
                loss, accuracy = function(pictures, labels)
        except ValueError as error:
            raise InputError(f"target {self._target!r}: {error}") from None
        return {"loss": loss, "accuracy": accuracy}

    def _read_images(self, batch: Batch) -> _Array:
        pictures = _read_column(batch, "inputs", self._inputs)
        if pictures.dtype != np.float32:
            raise InputError(
                f"inputs: column {self._inputs!r} must be float32, not {pictures.dtype}: use "
                f"data.with_transforms({{{self._inputs!r}: [cerebro.transforms.Scale(1 / 255)]}})"
            )
        if pictures.ndim != 4 or pictures.shape[1:] != self._shape or not len(pictures):
            raise InputError(
                f"inputs: column {self._inputs!r} must have the shape (rows, "
                f"{', '.join(map(str, self._shape))}), with at least one row, not {pictures.shape}"
            )
        return np.ascontiguousarray(pictures)

    def _read_labels(self, batch: Batch) -> _Array:
        labels = _read_column(batch, "target", self._target)
        if labels.ndim != 1 or not np.can_cast(labels.dtype, np.int64):
            raise InputError(
                f"target: column {self._target!r} must be integers of shape (rows,), not "
                f"{labels.dtype} of shape {labels.shape}"
            )
        return np.ascontiguousarray(labels, dtype=np.int64)

    # --- state ----------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return ``values`` and ``momenta`` by part, as arrays in the network's memory, not copies.

        On a GPU, they are first copied to host memory.
        """
        self._net.pull()
        return {"values": dict(self._values), "momenta": dict(self._momenta)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state.

        Raises
        ------
        StateError
            The state is from a different network; the message names the part. The model is not
            changed.
        """
        pairs = _pair_arrays("values", self._values, state)
        pairs += _pair_arrays("momenta", self._momenta, state)
        for array, other in pairs:
            if array is not other:
                array[...] = other
        self._net.push()


def _pair_arrays(
    kind: str, own: Mapping[str, _Array], state: Mapping[str, Any]
) -> list[tuple[_Array, _Array]]:
    others = state.get(kind)
    if not isinstance(others, Mapping) or set(others) != set(own):
        names = ", ".join(map(str, others)) if isinstance(others, Mapping) and others else "nothing"
        raise StateError(
            f"the state has {kind} of {names}, but this cerebro.native.Model has {kind} of "
            f"{', '.join(own)}: {SAME_MODEL}"
        )
    pairs = []
    for name, array in own.items():
        other = np.asarray(others[name])
        if other.shape != array.shape or other.dtype != array.dtype:
            raise StateError(
                f"{kind} of {name}: the state has {other.dtype} of shape {other.shape}, the "
                f"network {array.dtype} of shape {array.shape}"
            )
        pairs.append((array, other))
    return pairs


def _find_device(device: str) -> tuple[_core.Device | None, str | None]:
    """Return the GPU and the path of cuDNN; None for both on the CPU."""
    if device == "cpu":
        return None, None
    if not isinstance(device, str) or not re.fullmatch(r"cuda(:\d{1,4})?", device):
        raise InputError(f"device must be 'cpu', 'cuda' or 'cuda:0' and so on, not {device!r}")
    return cuda.open_device("cuda:0" if device == "cuda" else device), cuda.cudnn_path()


def _read_column(batch: Batch, argument: str, name: str) -> _Array:
    if name not in batch:
        raise InputError(f"{argument} names the column {name!r}, but the data has {list(batch)}")
    return np.asarray(batch[name])


def _check_column_name(argument: str, name: str) -> str:
    if not isinstance(name, str):
        raise InputError(f"{argument} must be the name of a column, not {name!r}")
    return name


def _check_whole_numbers(argument: str, values: Sequence[int], count: int) -> tuple[int, ...]:
    numbers = tuple(values) if isinstance(values, Sequence) else ()
    if len(numbers) != count or not all(isinstance(n, (int, np.integer)) for n in numbers):
        raise InputError(f"{argument} must be {count} whole numbers, not {values!r}")
    return tuple(int(n) for n in numbers)
