"""`features`: compute the outputs of a frozen network once, as an ordinary dataset.

Forward hooks copy the outputs of all layers in one pass, as soon as each layer returns: a later
layer may change them in place. After the deepest layer, the rest of the network is not run.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

import cerebro._core as _core
from cerebro.arguments import check_whole_number
from cerebro.data import Dataset
from cerebro.data.derivation import Derivation, MakesShards, check_executor, make_derivation
from cerebro.data.derive import check_budget, make_recipe, parse_budget, write
from cerebro.data.manifest import FILE_NAME, checksum_of
from cerebro.errors import InputError
from cerebro.machine.devices import IN_WORKER, explain_gpu_memory_errors, is_gpu, use_device
from cerebro.machine.files import path_of
from cerebro.machine.flags import compute_settings
from cerebro.machine.imports import module_of
from cerebro.model import Columns, column_names, make_forward, make_getter

OUTPUT = "output"  # the column of the network's own output if `layers` is a list

# If a batch is halved, a row's outputs may change by at most this share of the largest output.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3}
_COARSE = 5e-2  # for types of 16 bits


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
    return value is None or isinstance(value, (int, float, str, torch.dtype))


def _hash_source(kind: type) -> str | None:
    if kind.__module__.partition(".")[0] == "torch":
        return None
    try:
        return _core.xxh3_128(inspect.getsource(kind).encode())
    except (OSError, TypeError):
        return None


class Features(Dataset):
    """The dataset of a frozen network's outputs; made by `features`.

    This object and its views are ordinary datasets. It adds `complete`, `layers` and `same_bits`,
    which its views do not have.

    Attributes
    ----------
    layers
        The names of the layers by column.
    same_bits
        By column, whether the outputs of the first rows had the same bits in a batch of half the
        size. If so, training on the column usually gives the same bits as running the network in
        each trial.
    """

    _trunk: Trunk
    layers: dict[str, str]
    same_bits: dict[str, bool]

    def complete(self, model: Any, *, inputs: Columns | None = None) -> torch.nn.Module:
        """Return the whole network, trunk and head, for prediction and export.

        Parameters
        ----------
        model
            A `cerebro.torch.Model` that was trained on these columns, such as
            ``result.best.load()``, or its network.
        inputs
            The columns that the head takes; None: the model's `inputs`, or the only layer if
            `model` is a network.

        Returns
        -------
        torch.nn.Module
            The network in evaluation mode, with the submodules ``trunk`` and ``head``, which are
            shared, not copied. It takes the inputs of the trunk: rows of the original dataset
            after its transforms. Transforms of the computed columns, such as `Normalize`, are not
            part of the network: put them into the head.

        Raises
        ------
        InputError
            The head takes a column that is not an output of the trunk.
        """
        columns: Any = getattr(model, "inputs", None) if inputs is None else inputs
        if columns is None:
            if len(self.layers) != 1:
                raise InputError(
                    f"complete: name the head's input, inputs=..., one of {', '.join(self.layers)}"
                )
            columns = next(iter(self.layers))
        names = column_names("inputs", columns)
        for name in names:
            if name not in self.layers:
                raise InputError(
                    f"complete: the head takes the column {name!r}, which is not an output of the "
                    f"trunk: the outputs are {', '.join(self.layers)}"
                )
        head = getattr(model, "net", model)
        if not isinstance(head, torch.nn.Module):
            raise InputError(f"complete: model must be a cerebro.torch.Model, not {model!r}")
        stored = {name: getattr(torch, self.columns[name].dtype) for name in names}
        layers = {name: self.layers[name] for name in names}
        return WholeNetwork(self._trunk.net, head, layers, columns, stored).eval()


class WholeNetwork(torch.nn.Module):  # type: ignore[misc]
    """A trunk, and a head that takes outputs of the trunk's layers; see `Features.complete`."""

    def __init__(
        self,
        trunk: Any,
        head: Any,
        layers: Mapping[str, str],
        inputs: Columns,
        stored: Mapping[str, torch.dtype],
    ) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head
        self._layers, self._inputs, self._stored = dict(layers), inputs, dict(stored)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        outputs = outputs_of(self.trunk, named or inputs, self._layers)
        # Cast to the stored type, as if the outputs were read from the files.
        outputs = {
            name: value.to(self._stored[name]).to(value.dtype) for name, value in outputs.items()
        }
        return make_forward(self.head, self._inputs)(outputs)


def features(
    images: Dataset,
    net: Any,
    *,
    layers: Sequence[str] | Mapping[str, str],
    path: str | os.PathLike[str] | None = None,
    inputs: Columns = "x",
    keep: Collection[str] | None = None,
    budget: int | str | None = None,
    dtypes: Any = None,
    batch_size: int = 256,
    threads: int = 1,
    copies: int | None = None,
    seed: int = 0,
    progress: str | bool = "auto",
    executor: MakesShards | None = None,
) -> Features:
    """Compute the outputs of a frozen network's layers once, as a dataset with the same rows.

    Each layer becomes a column; all are computed in one pass. A trial chooses a column with
    ``cerebro.torch.Model(head, inputs=config["layer"])``, and the others are not read. The network
    is in evaluation mode, without gradients. Repeating an interrupted call continues where it
    stopped; finished features are found by a hash of the data, transforms, network, layers and
    versions. See `Dataset.derive`.

    Parameters
    ----------
    images
        The data, with the transforms that the network needs. It may be a view of some rows; but
        `split` and `like` select the same rows of both datasets only if it is a whole dataset.
    net
        A `torch.nn.Module`; it computes on its current device.
    layers
        Names of submodules (``net.named_modules()``), which become the columns' names, or a mapping
        of column names to submodules' names. ``""`` is the network's own output; in a list, its
        column is named ``output``.
    path
        The folder to make, on a disk of this machine; None: beside `images`, named by the hash. It
        is required if `images` are in object storage: beside their copy is the node's cache.
    inputs
        The network's inputs: a column, a list of columns or a mapping of keywords to columns.
    keep
        Columns of `images` to copy, with their transforms; None: all but the network's inputs.
    budget
        The maximum disk space: bytes, or a string such as ``"20GB"``. `plan_features` chooses
        layers that fit a budget.
    dtypes
        The type to store, ``"float16"`` or ``"bfloat16"``, or a mapping of columns to types; None:
        the computed type. If the head is float32, transform these columns with
        ``cerebro.transforms.Cast("float32")``.
    batch_size
        Rows per forward pass. It may affect the last bits, so it is part of the hash.
    threads
        Compute threads, as in `cerebro.search`. They may affect the last bits, so their number is
        part of the hash.
    copies, seed, progress
        As for `Dataset.derive`.
    executor
        The executor of a cluster, such as ``cerebro.cluster.Executor(workers=4)``: its workers
        compute the shards on the nodes that hold them, each with `threads` compute threads, and
        the files are those that this process would write. If the workers have GPUs (``gpus=1``, or
        ``resources={"GPU": 1}`` on Ray), they compute there, and `net` must be on a GPU of this
        process of the same kind; else it must be on the CPU. See `Dataset.derive`.

    Returns
    -------
    Features
        A dataset with ``complete(model)``.

    Raises
    ------
    InputError
        An argument is invalid, such as a `path` that is a URL, or None with `images` in object
        storage; the outputs of a row depend on other rows of its batch; the budget or the disk is
        too small; or `path` holds something else, such as features of another network. The message
        says what differs. With an executor, also as for `Dataset.derive`.
    CorruptDataError
        A file of `images` is damaged.
    """
    trunk = Trunk(net, layers, inputs, check_whole_number("threads", threads, 1))
    column_names("inputs", inputs)
    check_images(images)
    if path is None and images.url is not None:
        # Beside their copy, the cache would remove the features to make room.
        raise InputError(
            f"path=None: the images are in object storage ({images.url}), and features cannot be "
            "made beside their copy in the cache: give path=, a folder on a disk of this machine"
        )
    folder = None if path is None else path_of("path", path)
    limit = parse_budget(budget)
    check_executor(executor, "features(executor=...)", trunk.device)
    if dtypes is not None and not isinstance(dtypes, Mapping):
        dtypes = dict.fromkeys(trunk.layers, dtypes)
    # Workers with GPUs have a variable that cuBLAS reads; this process computes the same rows.
    with contextlib.nullcontext() if executor is None else use_device(trunk.device):
        work = trunk.derive(images, batch_size, copies=copies, seed=seed, dtypes=dtypes)
        with explain_gpu_memory_errors(trunk.device, work.batch_size):
            same_bits = _compare_halves(trunk, next(iter(work.batches(images.view.parts, 0, None))))
        plan = make_recipe(work, trunk.identity(), keep=keep, says=SAYS)
        name = f"{images.path.name}-features-{plan.fingerprint[:12]}"
        target = images.path.with_name(name) if folder is None else folder
        if not (target / FILE_NAME).exists():
            check_budget(plan.nbytes, limit)
        result = Features(write(plan, target, progress, executor, trunk.threads, room=True))
    result.view = result.view.keep_transforms(images.view, plan.work.kept)
    result._trunk, result.layers, result.same_bits = trunk, dict(trunk.layers), same_bits
    return result


def _compare_halves(trunk: Trunk, batch: Mapping[str, Any]) -> dict[str, bool]:
    """Return, by column, whether outputs keep their bits if the batch is halved.

    Raise InputError if they differ by more than rounding errors.
    """
    whole = trunk.measure(batch)
    rows = len(next(iter(batch.values())))
    half = rows // 2
    if half == 0:
        return dict.fromkeys(whole, True)
    parts = trunk({name: value[:half] for name, value in batch.items()})
    trunk.check_rows(parts, half)
    same = {}
    for name, value in whole.items():
        first, again = value[:half], parts[name]
        if first.shape != again.shape:
            raise InputError(
                f"layers: rows of {trunk.layers[name]!r} have the shape {tuple(first.shape[1:])} "
                f"in a batch of {rows} rows and {tuple(again.shape[1:])} in one of {half}: choose "
                "a layer whose first dimension is that of the batch"
            )
        same[name] = _are_equal(first, again)
        rounding = _ROUNDING.get(value.dtype, _COARSE if value.is_floating_point() else 0.0)
        x, y = first.double(), again.double()
        finite = x.isfinite() & y.isfinite()
        scale = float(x[finite].abs().max()) if finite.any() else 0.0
        apart = float((x - y)[finite].abs().max()) if finite.any() else 0.0
        alike = _are_equal(x[~finite], y[~finite])
        if not same[name] and not (alike and apart <= rounding * scale):
            raise InputError(
                f"layers: a row's output of {trunk.layers[name]!r} depends on the other rows of "
                f"its batch (by up to {apart:.3g}): leave out what mixes rows, such as batch norm "
                "without running statistics"
            )
    return same


def _are_equal(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Return whether two tensors are equal; NaN is equal to NaN."""
    return bool(((one == two) | ((one != one) & (two != two))).all())
