"""Rows, and the check of a model in this process, for the tests of wrong and of right models."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import cerebro
from cerebro.machine.local import LOCAL
from cerebro.run.settings import Batches
from cerebro.transforms import Scale
from cerebro.worker.jobs import check
from cerebro.worker.messages import CheckDone, CheckTask, RunContext, RunFolders
from cerebro.worker.runner import UnitRunner

ROWS = 300


@functools.cache
def rows() -> dict[str, Any]:
    """Columns of many kinds, in which `x` decides about the others."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(ROWS, 8)).astype("f4")
    scores = x @ rng.normal(size=(8, 3))
    label = scores.argmax(1)
    value = (scores[:, 0] + 0.1 * rng.normal(size=ROWS)).astype("f4")
    rare = label.copy()
    rare[-1] = 3  # not in the first batches
    picture = rng.integers(0, 256, size=(ROWS, 1, 8, 8)).astype("f4")
    picture[:, 0, 0, 0] = np.arange(ROWS) % 256
    holes = x.copy()
    holes[::3, 2] = np.nan
    copies = x.copy()
    copies[ROWS // 2 :] = copies[: ROWS - ROWS // 2]
    return {
        "x": x,
        "label": label,
        "rare": rare,
        "from_one": label + 1,
        "value": value,
        "value1": value[:, None],
        "large": 100 * value,
        "flag": (value > 0).astype("f4"),
        "flag1": (value > 0).astype("f4")[:, None],
        "flag_from_one": ((value > 0) + 1).astype("f4"),
        "flag_int": (value > 0).astype("i8"),
        "seldom": (np.arange(ROWS) % 10 == 3).astype("i8"),
        "several": (scores > 0).astype("f4"),
        "soft": (np.exp(scores) / np.exp(scores).sum(1, keepdims=True)).astype("f4"),
        "counts": rng.poisson(3, size=ROWS).astype("f4"),
        "picture": picture,
        "unit": (picture.reshape(ROWS, 64) / 255).astype("f4"),
        "small_picture": picture / 255,
        "pixels": rng.integers(0, 3, size=(ROWS, 8, 8)),
        "ids": rng.integers(0, 20, size=(ROWS, 6)),
        "raw": (1000 * x + 5000).astype("f4"),
        "with_answer": np.concatenate([x, value[:, None]], axis=1),
        "same": np.full((ROWS, 1), 4.0, "f4"),
        "holes": holes,
        "copies": copies,
        "half": (copies[:, 0] > 0).astype("i8"),
        "double": x.astype("f8"),
    }


@functools.cache
def data() -> Any:
    folder = tempfile.mkdtemp(prefix="cerebro-diagnosed-")
    return cerebro.shard(
        rows(), Path(folder) / "data", shards=1, shuffle=False, progress=False,
        dtypes={"double": "float64"},
    )  # fmt: skip


def diagnosed(
    build: Any,
    folder: Path,
    *,
    thorough: bool = True,
    batch_size: int = 32,
    validation: str | None = "part",
) -> CheckDone:
    """Check the model that `build` makes; `validation`: "part", "training", "unscaled", or None."""
    train, held_out = data().split(0.8, 0.2)
    validations = {"part": held_out, "unscaled": held_out, "training": train, None: None}
    if validation == "unscaled":
        train = train.with_transforms({"picture": [Scale(1 / 255)]})
    context = RunContext(
        build=build,
        train=train,
        validation=validations[validation],
        batches=Batches(batch_size=batch_size),
        folders=RunFolders(*[str(folder)] * 3),
    )
    runner = UnitRunner(context, worker=0, machine=LOCAL)
    try:
        return check(runner, CheckTask({}, thorough=thorough))
    finally:
        runner.close()
