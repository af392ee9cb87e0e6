"""Write a trained model for other programs: its weights to a file, or all of it to a folder.

Weights come from the kept state, without ``build`` or the data. An ONNX file contains the network
itself, which is built again and traced with rows of the run's data. A folder is for use without
Cerebro; see `cerebro.Trial.save`.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import shutil
import sys
import tempfile
import warnings
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import cerebro._core as _core
from cerebro.arguments import warn_user
from cerebro.data import Dataset, recipe
from cerebro.errors import InputError, text_of
from cerebro.machine import environment, generators
from cerebro.machine.files import path_of
from cerebro.machine.imports import import_extra
from cerebro.machine.mappings import strict_json
from cerebro.model import BaseModel, check_batch, column_names, make_getter, stored_column
from cerebro.results.outputs import describe_target
from cerebro.run.records import class_name

TORCH, JAX, SKLEARN = "cerebro.torch.Model", "cerebro.jax.Model", "cerebro.sklearn.Model"
KERAS = "cerebro.keras.Model"

_TORCH_ALSO = {"scheduler", "scaler", "loss", "partial", "metrics", "gradients", "lightning"}

# The parts of these models' states: first the required ones, then the optional ones. A model with
# four methods whose state has the same parts is exported in the same way.
_PARTS: dict[str, tuple[set[str], set[str]]] = {
    TORCH: ({"net", "optimizer"}, _TORCH_ALSO),
    JAX: ({"params", "optimizer", "step", "key"}, {"variables"}),
    SKLEARN: ({"estimator", "aliases", "attributes"}, set()),
    KERAS: ({"backend", "net", "optimizer", "metrics", "shared"}, set()),
}

_NET = "/model/net/"
"""The prefix of a network's tensor names in a state's file."""

_ONNX_ROWS = 3

_ONE_FILE_BYTES = 1_900_000_000  # an ONNX file must stay below 2 GB
"""The most bytes of weights in an ONNX file; larger weights go to a second file beside it."""


class Kept:
    """A kept state as stored in the run's file, and its model, which is built only when needed.

    `read` returns the packed state, `load` the model with this state, in host memory, and its
    training data.
    """

    def __init__(self, read: Callable[[], Any], load: Callable[[], tuple[Any, Dataset]]) -> None:
        self._read = read
        self._load = load

    @cached_property
    def packed(self) -> Any:
        return self._read()

    @cached_property
    def state(self) -> Any:
        framework: Any = "torch" if environment.is_importable("torch") else "numpy"
        return _core.unpack_state(self.packed, framework)["model"]

    @cached_property
    def model_and_data(self) -> tuple[Any, Dataset]:
        return self._load()

    @property
    def kind(self) -> str:
        if isinstance(self.state, Mapping):
            if self.state.keys() == {"steps"}:  # a pipeline's
                return SKLEARN
            for kind, (always, sometimes) in _PARTS.items():
                if always <= self.state.keys() <= always | sometimes:
                    return kind
        return "model of another kind"

    def net(self) -> Mapping[str, Any]:
        """Return the network's ``state_dict``, including the weights that partial states omit."""
        state: Mapping[str, Any] = self.state["net"]
        return self.model_and_data[0].net.state_dict() if self.is_partial else state

    @property
    def is_partial(self) -> bool:
        return bool(self.state.get("partial"))  # the state has only the trained weights


def export(path: str | os.PathLike[str], format: str, kept: Kept) -> Path:
    """Write a trial's model; see `cerebro.Trial.export`."""
    writers = {"safetensors": _write_safetensors, "torch": _write_torch, "onnx": _write_onnx}
    if format not in writers:
        raise InputError(f"format must be one of {', '.join(writers)}, not {format!r}")
    target = path_of("path", path)
    if not target.parent.is_dir():
        raise InputError(f"cannot write {target}: there is no folder {target.parent}")
    if target.is_dir():
        raise InputError(f"cannot write {target}: it is a folder; give the name of a file")
    writers[format](kept, target)
    return target


def _write_safetensors(kept: Kept, target: Path) -> None:
    if kept.kind in (TORCH, KERAS):
        net = kept.net()
        packed = _core.pack_state({"model": {"net": dict(net)}}) if kept.is_partial else kept.packed
        target.write_bytes(_net_file(packed, net))
        return
    # It is unknown which tensors are weights, so write the whole state, with paths as names, as in
    # the run's own files.
    weights: Any = kept.state
    if kept.kind == JAX:
        weights = {name: kept.state[name] for name in ("params", "variables") if name in kept.state}
    target.write_bytes(_core.pack_state(weights))


def _net_file(packed: Any, net: Mapping[str, Any]) -> bytes:
    """Return the network's tensors of a packed state as a safetensors file, by their own names."""
    others = [name for name, value in net.items() if not hasattr(value, "shape")]
    if others:
        raise InputError(
            f"format 'safetensors' holds only tensors, and the network's state_dict has "
            f"{', '.join(others)}: use format='torch'"
        )
    view = memoryview(packed)  # copying bytes needs no framework and keeps types that NumPy lacks
    start = 8 + int.from_bytes(view[:8], "little")
    entries = {
        name.removeprefix(_NET).replace("~1", "/").replace("~0", "~"): entry
        for name, entry in json.loads(bytes(view[8:start])).items()
        if name.startswith(_NET)
    }
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    parts: list[Any] = []
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"]):
        first, end = entry["data_offsets"]
        header[name] = {**entry, "data_offsets": [at, at + end - first]}
        parts.append(view[start + first : start + end])
        at += end - first
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return b"".join([len(text).to_bytes(8, "little"), text, *parts])


def _write_torch(kept: Kept, target: Path) -> None:
    if kept.kind == JAX:
        raise InputError("format 'torch' cannot hold JAX arrays: use format='safetensors'")
    torch = import_extra("torch", "torch", "format 'torch' needs PyTorch")

    state = OrderedDict(kept.net()) if kept.kind in (TORCH, KERAS) else kept.state
    foreign = _find_foreign(state, "")
    if foreign is not None:
        path, kind = foreign
        raise InputError(
            f"format 'torch' is for PyTorch's tensors; at {path!r} the state has a {kind}, which "
            "torch.load rejects by default: use format='safetensors'"
        )
    torch.save(state, target)


def _find_foreign(value: Any, path: str) -> tuple[str, str] | None:
    """Return path and type of a value that ``torch.load(weights_only=True)`` rejects, or None."""
    import torch

    plain = (torch.Tensor, torch.Size, bool, int, float, str, bytes, type(None))
    if isinstance(value, plain) and type(value).__module__ != "numpy":
        return None
    if type(value) in (dict, OrderedDict, Counter):
        parts = list(value.items())
    elif type(value) in (list, tuple):
        parts = list(enumerate(value))
    else:
        return path, f"{type(value).__module__}.{type(value).__qualname__}"
    rejected = (_find_foreign(part, f"{path}/{key}") for key, part in parts)
    return next((item for item in rejected if item is not None), None)


def _write_onnx(kept: Kept, target: Path) -> None:
    if kept.kind == KERAS:
        raise InputError(
            'Keras writes ONNX itself: trial.load().net.export("best.onnx", format="onnx")'
        )
    if kept.kind != TORCH:
        raise InputError(f"onnx needs a {TORCH}, not a {kept.kind}")
    for module in ("torch", "onnx", "onnxscript"):
        import_extra(module, "onnx", f"format 'onnx' needs {module}")
    import torch

    from cerebro.torch.model import Model

    model, data = kept.model_and_data
    if not isinstance(model, Model):
        raise InputError(f"onnx needs a {TORCH}, not a {class_name(type(model))}")
    net = model.net.eval()
    inputs = traced_inputs(model, data)
    nbytes = sum(tensor.nbytes for tensor in (*net.parameters(), *net.buffers()))
    with traced():
        warnings.filterwarnings("ignore", "# The axis name: ")  # of equal sizes that get one name
        try:
            program = torch.onnx.export(
                net,
                inputs.args,
                kwargs=inputs.kwargs or None,
                input_names=inputs.names,
                dynamic_shapes=inputs.shapes,
                dynamo=True,
                verbose=False,
            )
        except Exception as error:  # PyTorch and the network raise many kinds of exceptions
            raise InputError(
                f"PyTorch cannot export the {type(net).__name__} to ONNX: {cause_of(error)}"
            ) from error
    assert program is not None
    program.save(str(target), external_data=nbytes > _ONE_FILE_BYTES)


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """Run PyTorch's exporters in the block: they draw numbers, and warn about PyTorch's code."""
    import torch

    with generators.preserve_generators(True), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield


@dataclass(frozen=True)
class TracedInputs:
    """Example inputs of a network's ``forward``, and which of their sizes may vary."""

    columns: list[str]
    names: list[str]
    """The names of the columns, or the keywords if the network takes keywords."""
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: Any
    """The argument ``dynamic_shapes`` of PyTorch's exporters."""


def traced_inputs(model: Any, data: Dataset) -> TracedInputs:
    """Return the first rows of a `cerebro.torch.Model`'s data, as its network gets them."""
    columns = column_names("inputs", model.inputs)
    rows = make_getter(model.inputs)(_take_example(data, columns))
    shapes = make_getter(model.inputs)({name: _find_free_sizes(data, name) for name in columns})
    if isinstance(model.inputs, Mapping):
        return TracedInputs(columns, list(rows), (), dict(rows), shapes)
    if isinstance(model.inputs, str):
        return TracedInputs(columns, columns, (rows,), {}, (shapes,))
    return TracedInputs(columns, columns, tuple(rows), {}, shapes)


def _take_example(data: Dataset, names: list[str]) -> dict[str, Any]:
    """Return the first rows of the columns, in the form that a model gets in evaluation."""
    import torch

    batch = next(iter(data.in_order(_ONNX_ROWS, "torch")))
    check_batch(batch, names, None)
    rows = {name: batch[name] for name in names}
    # With a single row, PyTorch would treat the number of rows as a constant.
    return {n: torch.cat([r, r]) if len(r) == 1 else r.clone() for n, r in rows.items()}


def _find_free_sizes(data: Dataset, name: str) -> dict[int, Any]:
    """Return a tensor's dynamic dimensions: the rows and, for a ragged column, the length."""
    import torch

    source = data.columns.get(name) or data.columns.get(name.removesuffix("_mask"))
    free: dict[int, Any] = {0: torch.export.Dim("batch")}
    if source is not None and source.ragged:
        free[1] = torch.export.Dim.AUTO
    return free


def cause_of(error: BaseException) -> str:
    """Return the cause of a failure in PyTorch's exporter, whose own report is long."""
    while error.__cause__ is not None:
        error = error.__cause__
    return text_of(error)


# --- a folder -----------------------------------------------------------------

ABOUT = "model.json"
STATS_BYTES = 1_000_000_000
"""The size of the largest column for which statistics are computed."""

LOAD_TORCH = '''"""Load the network in this folder. Needs only PyTorch and NumPy."""

import json
import pathlib
import runpy

import torch

FOLDER = pathlib.Path(__file__).parent
program = torch.export.load(FOLDER / "model.pt2")
network = program.module()
examples, named_examples = program.example_inputs
about = json.loads((FOLDER / "model.json").read_text())
recipe = runpy.run_path(str(FOLDER / "recipe.py"))


def predict(*inputs, output="raw", **named_inputs):
    """Return the outputs for rows: raw rows (a frame, a CSV file, dictionaries), or the inputs of
    model.json as tensors, arrays or lists. The output is "raw", "class" or "probability"."""
    if len(inputs) == 1 and not named_inputs and recipe["is_rows"](inputs[0]):
        inputs = recipe["make_inputs"](about, inputs[0])
        if about["keywords"]:
            named_inputs, inputs = dict(zip(about["keywords"], inputs)), ()
    return recipe["decode"](run(*inputs, **named_inputs), output, about["target"])


def run(*inputs, **named_inputs):
    """Return the network's outputs for tensors, arrays or lists."""
    if len(inputs) != len(examples) or set(named_inputs) != set(named_examples):
        names = ", ".join(f"{name}=" for name in named_examples)
        raise TypeError(f"predict takes {names or f'{len(examples)} input(s)'}: see model.json")
    rows = map(tensor, inputs, examples)
    named = {name: tensor(named_inputs[name], named_examples[name]) for name in named_inputs}
    with torch.no_grad():
        return network(*rows, **named)


def tensor(rows, example):
    """Return rows as a tensor of the type that the network takes, such as float32."""
    if isinstance(rows, (list, tuple)) and len(rows) and hasattr(rows[0], "shape"):
        rows = torch.stack([torch.as_tensor(row) for row in rows])
    found = rows if isinstance(rows, torch.Tensor) else torch.tensor(rows)
    made = found.to(example.dtype)
    if not made.is_floating_point() and not torch.equal(made.to(found.dtype), found):
        raise ValueError(f"the network takes {example.dtype}, which cannot hold {found.dtype}")
    return made
'''

LOAD_KERAS = '''"""Load the Keras model in this folder. Needs only Keras, its backend and NumPy."""

import json
import os
import pathlib
import runpy

FOLDER = pathlib.Path(__file__).parent
about = json.loads((FOLDER / "model.json").read_text())
os.environ.setdefault("KERAS_BACKEND", about["backend"])

import keras

network = keras.saving.load_model(FOLDER / "model.keras", compile=False)
recipe = runpy.run_path(str(FOLDER / "recipe.py"))


def predict(*inputs, output="raw", **named_inputs):
    """Return the outputs for rows: raw rows (a frame, a CSV file, dictionaries), or the inputs of
    model.json as arrays or lists. The output is "raw", "class" or "probability"."""
    if len(inputs) == 1 and not named_inputs and recipe["is_rows"](inputs[0]):
        inputs = recipe["make_inputs"](about, inputs[0])
        if about["keywords"]:
            named_inputs = dict(zip(about["keywords"], inputs))
    arrays = [keras.ops.convert_to_numpy(part) for part in inputs]
    named = {name: keras.ops.convert_to_numpy(part) for name, part in named_inputs.items()}
    outputs = network.predict_on_batch(named or (arrays[0] if len(arrays) == 1 else arrays))
    return recipe["decode"](outputs, output, about["target"])
'''

LOAD_SKLEARN = '''"""Load the estimator that this folder holds. Needs only scikit-learn."""

import json
import pathlib
import runpy

import joblib
import numpy

FOLDER = pathlib.Path(__file__).parent
estimator = joblib.load(FOLDER / "model.joblib")
apply = estimator.predict if hasattr(estimator, "predict") else estimator.transform
about = json.loads((FOLDER / "model.json").read_text())
recipe = runpy.run_path(str(FOLDER / "recipe.py"))


def predict(*inputs, output="raw"):
    """Return the predictions for rows: raw rows (a frame, a CSV file, dictionaries), or the inputs
    of model.json as arrays or lists. The output is "raw", "class" or "probability"."""
    if len(inputs) == 1 and recipe["is_rows"](inputs[0]):
        inputs = recipe["make_inputs"](about, inputs[0])
    arrays = [numpy.asarray(part) for part in inputs]
    x = numpy.hstack([part.reshape(len(part), -1) for part in arrays])
    if output == "probability":
        return estimator.predict_proba(x)
    return recipe["decode"](apply(x), output, about["target"])
'''

LOAD_WEIGHTS = '''"""Load the weights that this folder holds. Needs only safetensors and NumPy."""

import pathlib

import safetensors.numpy

FOLDER = pathlib.Path(__file__).parent
weights = safetensors.numpy.load_file(FOLDER / "weights.safetensors")
'''


def save(
    folder: str | os.PathLike[str], about: Mapping[str, Any], build: Callable[..., Any], kept: Kept
) -> Path:
    """Save a model; see `cerebro.Trial.save`."""
    target = path_of("folder", folder)
    if not target.absolute().parent.is_dir():
        raise InputError(f"cannot write {target}: there is no folder {target.absolute().parent}")
    if target.exists() and not (target / ABOUT).is_file():
        raise InputError(f"{target} exists and is not a saved model: choose another folder")
    draft = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.absolute().parent))
    try:
        kind = kept.kind
        model, data = kept.model_and_data
        form, inputs = LOAD_WEIGHTS, list(data.columns)
        if kind == SKLEARN:
            joblib = import_extra("joblib", "sklearn", "saving an estimator needs joblib")
            joblib.dump(model.estimator, draft / "model.joblib")
            form, inputs = LOAD_SKLEARN, model.inputs
        else:
            export(draft / "weights.safetensors", "safetensors", kept)
            if kind == TORCH:
                form, inputs = _write_program(model, data, draft)
            if kind == KERAS:
                form, inputs = _write_keras(model, draft)
                about = {**about, "backend": model.framework}
        (draft / "load.py").write_text(form, encoding="utf-8")
        if form != LOAD_WEIGHTS:
            if own := _find_own_prediction(model):
                warn_user(f"the folder's predict returns the network's outputs, not those of {own}")
            (draft / "recipe.py").write_text(inspect.getsource(recipe), encoding="utf-8")
        (draft / "build.py").write_text(_read_source(build), encoding="utf-8")
        described = {**about, "inputs": [_describe_column(data, name) for name in inputs]}
        described["classes"] = {n: names for n, names in data.classes.items() if names is not None}
        given = model.inputs if form in (LOAD_TORCH, LOAD_KERAS) else None
        described["keywords"] = list(given) if isinstance(given, Mapping) else None
        described["recipe"] = _find_recipe(data, inputs)
        described["target"] = describe_target(model, data, _predict_example(model, data))
        described["environment"] = environment.describe()["packages"]
        (draft / ABOUT).write_text(f"{strict_json(described)}\n", encoding="utf-8")
        draft.chmod(0o755)
        if target.exists():
            shutil.rmtree(target)
        draft.rename(target)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    return target


def _find_own_prediction(model: Any) -> str | None:
    """Return the method of the user with which the model predicts; None: it calls its network."""
    if isinstance(model, BaseModel) and getattr(model, "_inputs", None) is None:
        return "predict_step"  # of a LightningModule
    for name in ("predict", "predict_batch"):
        method = getattr(type(model), name, None)
        if method is not None and not method.__module__.startswith("cerebro."):
            return name
    return None


def _predict_example(model: Any, data: Dataset) -> Any:
    """Return a model's outputs for the first rows; None if it does not predict them."""
    with contextlib.suppress(Exception):
        return model.predict_batch(next(iter(data.in_order(_ONNX_ROWS, model.framework))))
    return None


def _find_recipe(data: Dataset, inputs: list[str]) -> list[dict[str, Any]] | None:
    """Return how the inputs are made from raw rows, with transforms; None: they cannot be."""
    known = {made["name"]: dict(made) for made in data.shards.manifest.recipe}
    found = [known[name] for name in inputs if name in known]
    for made in found:
        made["transforms"] = [step.to_json() for step in data.transforms.get(made["name"], ())]
        if not all(map(recipe.has_step, made["transforms"])):
            return None
    return found if len(found) == len(inputs) else None


def _write_program(model: Any, data: Dataset, folder: Path) -> tuple[str, list[str]]:
    """Write the network; return the program that loads it, and its inputs."""
    import torch

    net = model.net.eval()
    try:
        inputs = traced_inputs(model, data)
    except InputError as error:  # a LightningModule whose forward does not tell its columns
        warn_user(f"the folder has only the weights, for the network that build.py makes: {error}")
        return LOAD_WEIGHTS, list(data.columns)
    with traced():
        try:
            with _hide_graph():
                program = torch.export.export(
                    net, inputs.args, inputs.kwargs or None, dynamic_shapes=inputs.shapes
                )
        except Exception as error:  # PyTorch and the network raise many kinds of exceptions
            warn_user(
                f"PyTorch cannot export the {type(net).__name__} ({cause_of(error)}): the folder "
                "has only its weights, for the network that build.py makes"
            )
            return LOAD_WEIGHTS, inputs.columns
        torch.export.save(program, folder / "model.pt2")
    return LOAD_TORCH, inputs.columns


def _write_keras(model: Any, folder: Path) -> tuple[str, list[str]]:
    """Write a Keras model; return the program that loads it, and its inputs."""
    import keras

    names = column_names("inputs", model.inputs)
    try:
        model.net.save(folder / "model.keras")
        with zipfile.ZipFile(folder / "model.keras") as file:
            config = json.loads(file.read("config.json"))
        config.pop("compile_config", None)  # which `load.py` does not read
        own = next(_find_own_code(config), None)
        if own is not None:
            raise TypeError(f"{own} is not of Keras")
        keras.saving.load_model(folder / "model.keras", compile=False)
    except Exception as error:  # Keras and the layers raise many kinds of exceptions
        (folder / "model.keras").unlink(missing_ok=True)
        warn_user(
            f"another program cannot load the {type(model.net).__name__} ({cause_of(error)}): the "
            "folder has only its weights, for the network that build.py makes"
        )
        return LOAD_WEIGHTS, names
    return LOAD_KERAS, names


def _find_own_code(config: Any) -> Iterator[str]:
    """Yield the names of classes and functions that a Keras model's configuration needs."""
    if isinstance(config, list):
        for part in config:
            yield from _find_own_code(part)
    if isinstance(config, dict):
        if not str(config.get("module") or "keras").startswith("keras"):
            named = config.get("registered_name")
            yield str(config["config"] if named == "function" else config.get("class_name"))
        for part in config.values():
            yield from _find_own_code(part)


@contextlib.contextmanager
def _hide_graph() -> Iterator[None]:
    """Leave out the graph of a network that cannot be exported, which PyTorch prints twice."""
    printed, graph = io.StringIO(), None
    try:
        with contextlib.redirect_stderr(printed):
            yield
    except Exception as error:
        graph = getattr(error, "partial_fx_graph", None)
        raise
    finally:
        text = printed.getvalue()
        sys.stderr.write(text if graph is None else text.replace(f"{graph}\n", ""))


def _read_source(build: Callable[..., Any]) -> str:
    """Return the file that defines ``build``, its source, or a note that neither is available."""
    try:
        file = inspect.getsourcefile(build)
        if file is not None and Path(file).is_file():
            return Path(file).read_text(encoding="utf-8")
        return inspect.getsource(build)
    except (OSError, TypeError, UnicodeDecodeError) as error:
        return f"# The source of build is not available: {text_of(error)}\n"


def _describe_column(data: Dataset, name: str) -> dict[str, Any]:
    """Describe a column as the model gets it, and its values in the training data."""
    stored = data.columns[stored_column(name, data.columns)]
    facts: dict[str, Any] = {
        "column": name,
        "stored_dtype": stored.dtype,
        "stored_shape": list(stored.shape),
        "transforms": [repr(step) for step in data.transforms.get(stored.name, ())],
    }
    if data.nbytes <= STATS_BYTES and stored.name == name:
        try:
            stats = data.stats(name)
        except InputError:  # a column without numbers
            return facts
        facts |= {key: float(stats[key]) for key in ("mean", "std", "min", "max")}
    return facts
