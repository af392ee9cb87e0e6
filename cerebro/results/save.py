"""Save a trial's model as a folder for use without Cerebro; see `cerebro.Trial.save`."""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cerebro.arguments import find_stacklevel
from cerebro.data import Dataset
from cerebro.errors import InputError, text_of
from cerebro.machine import environment
from cerebro.machine.files import path_of
from cerebro.machine.imports import import_extra
from cerebro.machine.mappings import strict_json
from cerebro.model import stored_column
from cerebro.results.export import SKLEARN, TORCH, Kept, cause_of, export, traced, traced_inputs

ABOUT = "model.json"
STATS_BYTES = 1_000_000_000
"""The size of the largest column for which statistics are computed."""

LOAD_TORCH = '''"""Load the network that this folder holds. Needs only PyTorch."""

import pathlib

import torch

FOLDER = pathlib.Path(__file__).parent
program = torch.export.load(FOLDER / "model.pt2")
network = program.module()
examples, named_examples = program.example_inputs


def predict(*inputs, **named_inputs):
    """Return the outputs for rows: tensors, arrays or lists; model.json describes the "inputs"."""
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

LOAD_SKLEARN = '''"""Load the estimator that this folder holds. Needs only scikit-learn."""

import pathlib

import joblib
import numpy

FOLDER = pathlib.Path(__file__).parent
estimator = joblib.load(FOLDER / "model.joblib")
apply = estimator.predict if hasattr(estimator, "predict") else estimator.transform


def predict(*inputs):
    """Return the predictions for rows: arrays or lists; model.json describes the "inputs"."""
    arrays = [numpy.asarray(rows) for rows in inputs]
    return apply(numpy.hstack([rows.reshape(len(rows), -1) for rows in arrays]))
'''

LOAD_WEIGHTS = '''"""Load the weights that this folder holds. Needs only safetensors and NumPy."""

import pathlib

import safetensors.numpy

FOLDER = pathlib.Path(__file__).parent
weights = safetensors.numpy.load_file(FOLDER / "weights.safetensors")
'''


def save(
    folder: str | os.PathLike[str],
    about: Mapping[str, Any],
    build: Callable[..., Any],
    kept: Kept,
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
            form, inputs = _write_estimator(model, draft)
        else:
            export(draft / "weights.safetensors", "safetensors", kept)
            if kind == TORCH:
                form, inputs = _write_program(model, data, draft)
        (draft / "load.py").write_text(form, encoding="utf-8")
        (draft / "build.py").write_text(_read_source(build), encoding="utf-8")
        described = {**about, "inputs": [_describe_column(data, name) for name in inputs]}
        described["classes"] = {n: names for n, names in data.classes.items() if names is not None}
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


def _write_program(model: Any, data: Dataset, folder: Path) -> tuple[str, list[str]]:
    """Write the network; return the program that loads it, and its inputs."""
    import torch

    net = model.net.eval()
    inputs = traced_inputs(model, data)
    with traced():
        try:
            with _hide_graph():
                program = torch.export.export(
                    net, inputs.args, inputs.kwargs or None, dynamic_shapes=inputs.shapes
                )
        except Exception as error:  # PyTorch and the network raise many kinds of exceptions
            warnings.warn(
                f"PyTorch cannot export the {type(net).__name__} ({cause_of(error)}): the folder "
                "has only its weights, for the network that build.py makes",
                stacklevel=find_stacklevel(),
            )
            return LOAD_WEIGHTS, inputs.columns
        torch.export.save(program, folder / "model.pt2")
    return LOAD_TORCH, inputs.columns


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


def _write_estimator(model: Any, folder: Path) -> tuple[str, list[str]]:
    joblib = import_extra("joblib", "sklearn", "saving an estimator needs joblib")
    joblib.dump(model.estimator, folder / "model.joblib")
    return LOAD_SKLEARN, model.inputs


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
