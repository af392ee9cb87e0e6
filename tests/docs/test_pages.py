"""Every code block of the documentation runs: each page is a program."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

from pages import PAGES, ROOT, WITH_RAY, Kernel, check, kernel

# Four blocks need a GPU, one needs three JAX libraries, one waits for agents of other machines,
# five need Java and one a database server (tests of their own run these), one is a server that
# answers until it is ended, and one is in examples/ as a whole program.
NOT_RUN = 16
NEEDS = {
    "docs/guide/keras.md": ["keras"],
    "docs/coming-from/keras-tuner.md": ["keras"],
    "docs/guide/optuna.md": ["optuna", "matplotlib", "grpc", "google.protobuf"],
    "docs/coming-from/optuna.md": ["optuna"],
    "docs/coming-from/lightning.md": ["lightning"],
    "docs/guide/models.md": ["lightning", "skorch", "torchmetrics", "jax", "optax"],
    "docs/guide/results.md": ["onnxscript", "onnxruntime", "matplotlib", "safetensors"],
    "docs/guide/logging.md": ["tensorboard", "mlflow"],
    "docs/guide/storage.md": ["s3fs", "moto", "flask"],
    "docs/tutorials/table.md": ["pandas"],
    "docs/tutorials/kaggle.md": ["pandas"],
    "docs/guide/predict.md": ["pandas"],
    "docs/guide/plots.md": ["matplotlib"],
    "docs/coming-from/cerebro-dl.md": ["pandas"],
    "docs/tutorials/image-folder.md": ["PIL"],
    "docs/start.md": ["matplotlib"],
}


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with kernel(tmp_path_factory.mktemp("pages")) as started:
        yield started


@pytest.mark.parametrize("name", [name for name in PAGES if name not in WITH_RAY])
def test_a_page_runs(process: Kernel, name: str) -> None:
    for package in NEEDS.get(name, []):
        # Not imported: Keras would ask for the backend of this process.
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    check(process, name)


def test_few_blocks_do_not_run_and_each_says_why() -> None:
    marks = [
        mark
        for page in PAGES.values()
        for mark in re.findall(r"<!-- not run: (.+) -->\n+ *```python", page.read_text())
    ]
    assert len(marks) == NOT_RUN, marks


def test_every_block_is_found() -> None:
    """A block whose fence the kernel does not recognize would not run, and nobody would know."""
    from kernel import BLOCK

    for name, page in PAGES.items():
        text = page.read_text()
        fences = len(re.findall(r"^ *```python", text, re.MULTILINE))
        hidden = len(re.findall(r"^<!-- run$", text, re.MULTILINE))
        found = [block["shown"] is None for block in BLOCK.finditer(text)]
        assert (found.count(False), found.count(True)) == (fences, hidden), name


def test_a_wrong_block_is_reported_with_its_line(tmp_path: Path, process: Kernel) -> None:
    page = tmp_path / "wrong.md"
    page.write_text("# Wrong\n\n```python\na = 1\n```\n\n  ```python\n  a.missing\n  ```\n")
    PAGES["wrong"] = page
    try:
        error = process.run("wrong")["error"]
    finally:
        del PAGES["wrong"]
    assert 'page_wrong.py", line 8, in <module>' in error
    assert "'int' object has no attribute 'missing'" in error
    assert ROOT.is_dir()
