"""Every example runs to its end, with small settings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SMALL = {
    "digits_cnn": ["--epochs", "1", "--trials", "2", "--workers", "0"],
    "ragged_text": ["--epochs", "1", "--trials", "2", "--workers", "1"],
    "tabular": ["--epochs", "1", "--workers", "0"],
    "sklearn_partial_fit": ["--epochs", "1", "--trials", "2", "--workers", "1"],
}
NEEDS = {
    "digits_cnn": ["torch", "sklearn"],
    "ragged_text": ["torch"],
    "tabular": ["torch", "sklearn", "pandas"],
    "sklearn_partial_fit": ["sklearn"],
}


def test_every_example_is_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == SMALL.keys()


@pytest.mark.parametrize("name", SMALL)
def test_example(name: str, tmp_path: Path) -> None:
    for module in NEEDS[name]:
        pytest.importorskip(module)
    done = subprocess.run(
        [sys.executable, EXAMPLES / f"{name}.py", "--data", "data", "--run", "run", *SMALL[name]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "best: trial" in done.stdout
    assert (tmp_path / "run" / "run.sqlite").exists()


def test_notebook(tmp_path: Path) -> None:
    for module in ("torch", "sklearn", "matplotlib", "ipykernel"):
        pytest.importorskip(module)
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    notebook = nbformat.read(EXAMPLES / "digits_cnn.ipynb", as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("epochs=8", "epochs=1").replace(
            "n_trials=8", "n_trials=2"
        )
        cell.source = cell.source.replace(
            "progress=False,\n)\nresult", "workers=1, progress=False)\nresult"
        )
    client = nbclient.NotebookClient(
        notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    assert any("workers=1" in cell.source for cell in notebook.cells)
    shown = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    assert sum("image/png" in out.get("data", {}) for out in shown) == 2
    assert any("text/html" in out.get("data", {}) for out in shown)
    assert not any(out.output_type == "error" for out in shown)
