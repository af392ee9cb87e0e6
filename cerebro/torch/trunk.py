"""A frozen network: its identity, and the outputs of its layers.

Forward hooks copy the outputs of all layers in one pass, as soon as each layer returns: a later
layer may change them in place. After the deepest layer, the rest of the network is not run.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

import cerebro._core as _core
from cerebro.data import Dataset
from cerebro.data.derivation import Derivation, make_derivation
from cerebro.data.manifest import checksum_of
from cerebro.errors import InputError
from cerebro.machine.devices import IN_WORKER, is_gpu
from cerebro.machine.flags import compute_settings
from cerebro.machine.imports import module_of
from cerebro.model import Columns, column_names, make_getter

OUTPUT = "output"  # the column of the network's own output if `layers` is a list

_PLAIN = (bool, int, float, str, type(None))


class _Enough(BaseException):
    """Ends a forward pass when all layers have returned; user code must not catch it."""


class Trunk:
    """A network in evaluation mode, without gradients; for `layers`, see `features`."""

    def __init__(
        self, net: Any, layers: Sequence[str] | Mapping[str, str], inputs: Columns, threads: int
    ) -> None:
        if not isinstance(net, torch.nn.Module):
            raise InputError(f"net must be a torch.nn.Module, not {net!r}")
        self.net = net
        self.layers = _columns_of(net, layers)
        self.inputs = inputs
        self.threads = threads
        self.order: list[str] = []  # columns in the order of the last full pass
        self.seconds: dict[str, float] = {}  # since the start of the last timed pass
        self._get = make_getter(inputs)

    def __getstate__(self) -> dict[str, Any]:
        """Return what is sent to a worker, with the network in host memory."""
        if not is_gpu(self.device):
            return vars(self)
        return {**vars(self), "net": copy.deepcopy(self.net).cpu(), "_is_sent": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if vars(self).pop("_is_sent", False):
            self.net.to(IN_WORKER)

    @property
    def device(self) -> str:
        parameter = next(self.net.parameters(), None)
        return "cpu" if parameter is None else str(parameter.device)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the layers' outputs by column; stop after the deepest layer."""
        with self._evaluation_mode():
            return self._run(self._get(dict(batch)), whole=not self.order)

    def derive(self, images: Dataset, batch_size: int, **options: Any) -> Derivation:
        """Return the computation of the layers for all rows; see `make_derivation`."""
        return make_derivation(
            images,
            self,
            reads=column_names("inputs", self.inputs),
            batch_size=batch_size,
            framework="torch",
            device=self.device,
            **options,
        )

    def wait(self) -> None:
        """Wait until the network's GPU has finished all work."""
        if is_gpu(self.device):
            torch.cuda.synchronize(self.device)

    def measure(self, batch: Mapping[str, Any], *, timed: bool = False) -> dict[str, Any]:
        """Run a full pass, set `order`, and return the outputs; with `timed`, also set `seconds`.

        Raise InputError unless each layer runs once and returns a row for each row of the batch.
        """
        with self._evaluation_mode():
            outputs = self._run(self._get(dict(batch)), whole=True, timed=timed)
        self.check_rows(outputs, len(next(iter(batch.values()))))
        return outputs

    def check_rows(self, outputs: Mapping[str, Any], rows: int) -> None:
        """Raise InputError unless the outputs have a row for each row of their batch."""
        for column, value in outputs.items():
            if value.dim() == 0 or len(value) != rows:
                raise InputError(
                    f"layers: {self.layers[column]!r} returns a tensor of the shape "
                    f"{tuple(value.shape)} for a batch of {rows} rows: choose a layer whose first "
                    "dimension is that of the batch"
                )

    @contextlib.contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        training = {part: part.training for part in self.net.modules()}
        with compute_settings(self.threads, "warn", self.device), torch.no_grad():
            self.net.eval()
            try:
                yield
            finally:
                for part, was in training.items():
                    part.training = was

    def _run(self, given: Any, *, whole: bool, timed: bool = False) -> dict[str, Any]:
        counts: dict[str, int] = {}  # in the order of the layers' first returns
        if timed:
            self.seconds = {}
            self.wait()  # earlier work of the GPU does not belong to the pass
        start = time.perf_counter()

        def enough(column: str) -> bool:
            counts[column] = counts.get(column, 0) + 1
            if timed:
                self.wait()  # a layer returns when its kernels are launched, not finished
                self.seconds[column] = time.perf_counter() - start
            return not whole and len(counts) == len(self.layers)

        outputs = outputs_of(self.net, given, self.layers, enough)
        if whole:
            for column, name in self.layers.items():
                if counts.get(column, 0) != 1:
                    raise InputError(
                        f"layers: {name!r} runs {counts.get(column, 0)} times in a forward pass: "
                        "choose layers that run once"
                    )
            self.order = list(counts)
        return {column: outputs[column] for column in self.layers}

    def identity(self) -> dict[str, Any]:
        """Return names and hashes that identify the trunk and the code that it runs."""
        return {
            "layers": self.layers,
            "inputs": self.inputs,
            "weights": _hash_of_tensors(self.net),
            "code": checksum_of(
                [_describe_module(name, part) for name, part in self.net.named_modules()]
            ),
            "torch": torch.__version__,
            "cpu": torch.backends.cpu.get_cpu_capability(),
            "threads": self.threads,
        }


SAYS = {
    "weights": "was made with another trunk: its parameters or buffers differ",
    "code": "was made with another trunk: its modules, their settings or their source differ",
}


def check_images(images: Any) -> None:
    if not isinstance(images, Dataset):
        raise InputError(
            f"images must be a cerebro.Dataset, not {type(images).__name__}: write arrays with "
            "cerebro.shard first"
        )


def outputs_of(net: Any, given: Any, layers: Mapping[str, str], enough: Any = None) -> Any:
    """Run a forward pass and return copies of the outputs of layers, by column.

    `given` is the network's input: a tensor, a tuple of inputs, or a dict of keywords. The pass
    ends when ``enough(column)``, called after each column, returns true.
    """
    outputs: dict[str, Any] = {}
    hooks = []

    def make_hook(column: str, name: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            if not isinstance(output, torch.Tensor):
                raise InputError(
                    f"layers: {name!r} returns {type(output).__name__}, not a tensor: choose a "
                    "layer inside it or after it"
                )
            outputs[column] = output.clone()
            if enough is not None and enough(column):
                raise _Enough

        return hook

    try:
        for column, name in layers.items():
            hooks.append(net.get_submodule(name).register_forward_hook(make_hook(column, name)))
        if isinstance(given, dict):
            net(**given)
        else:
            net(*(given if isinstance(given, tuple) else (given,)))
    except _Enough:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return outputs


def _columns_of(net: Any, layers: Any) -> dict[str, str]:
    if isinstance(layers, Mapping):
        named = dict(layers)
    elif isinstance(layers, str) or not isinstance(layers, Sequence):
        raise InputError(f'layers={layers!r}: give a list of names, such as ["{layers}"]')
    else:
        named = {name or OUTPUT: name for name in layers}
    modules = dict(net.named_modules())
    if not named:
        raise InputError("layers is empty: name at least one module of the network")
    for name in named.values():
        if name not in modules:
            some = ", ".join(repr(part) for part in modules if part) or 'only its own output, ""'
            raise InputError(f"layers: the network has no module {name!r}: it has {some}")
    return named


def _hash_of_tensors(net: Any) -> str:
    """Return a hash of all parameters and buffers, including those that are not saved."""
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    return _core.hash_state(_core.pack_state(state))


def _describe_module(name: str, part: Any) -> list[Any]:
    """Return a module's name, class, settings and source, except PyTorch's source."""
    kind = type(part)
    settings = {
        key: repr(value)
        for key, value in sorted(vars(part).items())
        if key != "training" and _is_plain(value)
    }
    functions = {
        key: getattr(value, "__qualname__", "")
        for key, value in sorted(vars(part).items())
        if inspect.isroutine(value)
    }
    sources = [_hash_source(base) for base in kind.__mro__ if base is not object]
    return [name, f"{module_of(kind)}.{kind.__qualname__}", part.extra_repr(), settings,
            functions, sources]  # fmt: skip


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, (*_PLAIN, torch.dtype, torch.Size))


def _hash_source(kind: type) -> str | None:
    if kind.__module__.partition(".")[0] == "torch":
        return None
    try:
        return _core.xxh3_128(inspect.getsource(kind).encode())
    except (OSError, TypeError):
        return None
