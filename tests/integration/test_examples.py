"""Every example runs to its end, with small settings."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
SMALL = {
    "digits_cnn": ["--epochs", "1", "--trials", "2", "--workers", "0"],
    "ragged_text": ["--epochs", "1", "--trials", "2", "--workers", "1"],
    "tabular": ["--epochs", "1", "--workers", "0"],
    "weighted_digits": ["--epochs", "1", "--trials", "1", "--workers", "0"],
    "sklearn_partial_fit": ["--epochs", "1", "--trials", "2", "--workers", "1"],
    "jax_digits": ["--epochs", "1", "--trials", "2", "--workers", "1"],
    "lightning_digits": ["--epochs", "1", "--trials", "1", "--workers", "0"],
    "gan_digits": ["--epochs", "1", "--trials", "1", "--workers", "0"],
    "frozen_trunk": ["--epochs", "1", "--trials", "3", "--workers", "0"],
    "skorch_digits": ["--epochs", "1", "--trials", "1", "--workers", "0"],
    "transformers_lora": ["--epochs", "1", "--trials", "1", "--workers", "0"],
    "keras_digits": ["--epochs", "1", "--trials", "2", "--workers", "1"],
    "cloud/search": ["--epochs", "1", "--trials", "2", "--workers", "0"],
    "optuna/pruned_mlp": ["--epochs", "3", "--trials", "8", "--workers", "1"],
    "optuna/sampled_lstm": ["--epochs", "1", "--trials", "5", "--workers", "1"],
    "optuna/resumed": ["--epochs", "2", "--trials", "3", "--workers", "1"],
}
NEEDS = {
    "digits_cnn": ["torch", "sklearn"],
    "ragged_text": ["torch"],
    "tabular": ["torch", "sklearn", "pandas"],
    "weighted_digits": ["torch", "sklearn"],
    "sklearn_partial_fit": ["sklearn"],
    "jax_digits": ["jax", "optax", "sklearn"],
    "lightning_digits": ["lightning", "torchmetrics", "sklearn"],
    "gan_digits": ["torch", "sklearn"],
    "frozen_trunk": ["torch", "sklearn"],
    "skorch_digits": ["skorch", "sklearn"],
    "transformers_lora": ["transformers", "peft"],
    "keras_digits": ["keras", "torch", "sklearn"],
    "cloud/search": ["torch", "sklearn"],
    "optuna/pruned_mlp": ["optuna", "torch", "sklearn"],
    "optuna/sampled_lstm": ["optuna", "torch", "sklearn", "scipy"],
    "optuna/resumed": ["optuna", "torch", "sklearn", "sqlalchemy"],
}


def test_every_example_is_tested() -> None:
    found = {path.relative_to(EXAMPLES).with_suffix("") for path in EXAMPLES.rglob("*.py")}
    # Those of Ray Tune's kind run on a cluster: tests/tune/test_programs.py. That in PostgreSQL
    # needs a server: test_postgres_workers.py.
    elsewhere = {"ray", "postgres"}
    assert {path.as_posix() for path in found if path.parts[0] not in elsewhere} == SMALL.keys()


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
    if "cerebro.replay" in (EXAMPLES / f"{name}.py").read_text(encoding="utf-8"):
        assert done.stdout.endswith("trained again, every state identical\n")
    assert (tmp_path / "run" / "run.sqlite").exists()


def readme_example() -> str:
    """The first program of README.md, as printed."""
    text = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    return text.split("```python\n", 1)[1].split("```", 1)[0]


def test_the_readme_runs_as_printed_and_again(tmp_path: Path) -> None:
    """In a clean folder, with float64 data, as a script: nothing to remove in between."""
    for module in ("torch", "sklearn"):
        pytest.importorskip(module)
    script = tmp_path / "first.py"
    script.write_text(readme_example() + "print(type(net).__name__, len(result.trials))\n")
    runs: set[str] = set()
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, script.name],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.endswith("\nSequential 16\n")
        now = {path.name for path in (tmp_path / "runs").iterdir()}
        assert len(now) == len(runs) + 1
        runs = now
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "data",
        "digits-model",
        "first.py",
        "runs",
    ]


def test_the_readme_without_dtypes_says_which_to_give(tmp_path: Path) -> None:
    """What fails with float64 data is told with what mends it, and so is what that meets next."""
    for module in ("torch", "sklearn"):
        pytest.importorskip(module)
    script = tmp_path / "first.py"
    right = readme_example().replace("n_trials=16", "n_trials=3, workers=0")
    wrong = right.replace('dtypes={"x": "float32"}, ', "")
    assert wrong != right
    for text, message in (
        (wrong, """column 'x' is float64: give shard dtypes={"x": "float32"}"""),
        (
            right,
            "with dtypes=None, not {'x': 'float32'}: choose another path, or remove the folder",
        ),
        (right.replace(", exist_ok=True", ""), "exists, was made with dtypes=None, not {'x': "),
    ):
        script.write_text(text)
        done = subprocess.run(
            [sys.executable, script.name], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 1
        assert message in done.stderr.splitlines()[-1]


def test_the_resume_example_continues_after_a_kill(tmp_path: Path) -> None:
    """As its text says: begun, killed while it trains, and called again."""
    for module in NEEDS["optuna/resumed"]:
        pytest.importorskip(module)
    command = [
        *[sys.executable, EXAMPLES / "optuna" / "resumed.py", "--data", "data", "--run", "run"],
        *["--epochs", "6", "--trials", "8", "--workers", "1"],
    ]
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as begun:
        assert begun.stdout is not None
        assert any(" epoch " in line for line in begun.stdout)
        begun.kill()
    assert begun.returncode == -signal.SIGKILL
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n8 complete\nbest: trial" in done.stdout


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
