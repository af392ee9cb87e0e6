"""The commands that need build find it in the script that the run has recorded."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest

import cerebro
from cerebro.errors import InputError

SCRIPT = """
import sys
import numpy as np
import cerebro

SCALE = float(sys.argv[1])

class Model(dict):
    framework = "numpy"

    def __init__(self, config):
        self["w"] = config["lr"] * SCALE

    def train_batch(self, batch):
        self["w"] += float(batch["x"].sum()) / 100 + np.random.normal()
        return {"loss": self["w"] ** 2}

    def eval_batch(self, batch):
        return {"loss": self["w"] ** 2}

    def state_dict(self):
        return dict(self)

    def load_state_dict(self, state):
        self.update(state)

def build(config):
    return Model(config)

data = cerebro.shard({"x": np.arange(40.0)}, "data", shards=4, exist_ok=True, progress=False)
print("searching")
cerebro.search(
    build, {"lr": [0.1, 0.2]}, data, epochs=2, searcher="grid", batch_size=4, validation=0.25,
    progress=False, workers=0, run="runs/x",
)
"""


def python(folder, *arguments):
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )


def command(folder, *arguments):
    return python(folder, "-m", "cerebro", *arguments)


@pytest.fixture
def trained(tmp_path):
    """A folder in which a script, whose name no import takes, has searched."""
    (tmp_path / "my first-try.py").write_text(SCRIPT)
    done = python(tmp_path, "-W", "ignore", "my first-try.py", "3")
    assert done.returncode == 0, done.stderr
    return tmp_path


def test_the_script_of_a_run_is_found(trained):
    for arguments in (
        ("replay", "runs/x", "--trial", "1"),
        ("replay", str(trained / "runs" / "x"), "--trial", "0"),
        ("resume", "runs/x", "--epochs", "3", "--workers", "0"),
        ("resume", "runs/x", "--epochs", "4", "--workers", "2"),
        ("replay", "runs/x", "--trial", "0"),
        ("export", "runs/x"),
    ):
        done = command(trained, *arguments)
        assert done.returncode == 0, (arguments, done.stderr)
        assert "changed" not in done.stderr and done.stdout.count("runs") < 9
    onnx = command(trained, "export", "runs/x", "--format", "onnx")
    assert "onnx needs a cerebro.torch.Model" in onnx.stderr
    other = "import cerebro; print(cerebro.open('runs/x').best.load()['w'])"
    done = python(trained, "-W", "ignore", "-c", f"import sys; sys.argv.append('3'); {other}")
    assert done.returncode == 0, done.stderr
    (trained / "elsewhere.py").write_text(
        "import sys; sys.argv.append('3')\n"
        "def build(config): raise SystemExit('not this one')\n"
        f"{other}\n"
        "print(bool(cerebro.replay('runs/x', 0)))\n"
    )
    done = python(trained, "-W", "ignore", "elsewhere.py")
    assert done.stdout.endswith("True\n"), done.stderr


INTERRUPTED = SCRIPT.replace(
    '        self["w"] +=',
    """        if Path("then").exists() and self["w"] == 0.2 * SCALE:
            if Path("then").read_text() == "edit":
                Path(__file__).write_text(Path(__file__).read_text() + "# another idea")
            raise KeyboardInterrupt
        self["w"] +=""",
).replace("import sys", "import sys\nfrom pathlib import Path")
"""Is interrupted in its second trial, and perhaps edited before, while there is a file `then`."""


@pytest.mark.parametrize("then", ["stop", "edit"])
def test_an_interrupted_script_prints_the_resume_command(tmp_path, then):
    """The script is named only if the run would not find `build` in it."""
    (tmp_path / "my train.py").write_text(INTERRUPTED)
    (tmp_path / "then").write_text(then)
    done = python(tmp_path, "-W", "ignore", "my train.py", "3")
    (told,) = re.findall(r"python -m cerebro resume (.*)", done.stderr)
    assert told == ("runs/x" if then == "stop" else "runs/x --build 'my train.py'")
    assert "cerebro.resume('runs/x', build)" in done.stderr
    (tmp_path / "then").unlink()
    done = command(tmp_path, "resume", *shlex.split(told))
    assert done.returncode == 0, done.stderr
    assert cerebro.open(tmp_path / "runs" / "x").status == "finished"


def test_the_error_names_a_changed_or_missing_script(trained):
    script = trained / "my first-try.py"
    script.write_text(SCRIPT.replace("print", "# another idea\nprint"))
    for arguments in (
        ("replay", "runs/x", "--trial", "1"), ("resume", "runs/x", "--epochs", "3"),
    ):  # fmt: skip
        done = command(trained, *arguments)
        assert done.returncode == 1
        assert f"build() was defined in {script}, which has changed since" in done.stderr
        assert f"--build '{script}'" in done.stderr
    with pytest.raises(InputError, match=re.escape(f"in {script}, which has changed since")):
        cerebro.open(trained / "runs" / "x").best.load()
    done = command(trained, "replay", "runs/x", "--trial", "1", "--build", str(script))
    assert done.returncode == 0 and "which defines build, has changed" in done.stderr
    script.write_text(SCRIPT)  # it was put back
    assert command(trained, "replay", "runs/x", "--trial", "1").returncode == 0
    script.unlink()
    done = command(trained, "replay", "runs/x", "--trial", "1")
    assert f"build() was defined in {script}, which is not there any more: pass" in done.stderr


def test_a_script_that_cannot_be_imported_says_why(trained, monkeypatch):
    script = trained / "my first-try.py"
    monkeypatch.setattr(sys, "argv", ["another program", "text"])
    said = f"{script}, which cannot be imported here (ValueError: could not convert string to float"
    with pytest.raises(InputError, match=re.escape(said)):
        cerebro.open(trained / "runs" / "x").best.load()


@pytest.mark.parametrize("as_module", [True, False])
def test_a_script_that_ends_the_process_says_how_to_pass_build(tmp_path, as_module):
    """As `argparse` does without a required option; a library call does not end the program."""
    options = "import argparse\nparser = argparse.ArgumentParser()\n"
    options += "parser.add_argument('--scale', type=float, required=True)\n"
    script = tmp_path / "options_for_build.py"
    script.write_text(SCRIPT.replace("float(sys.argv[1])", "parser.parse_args().scale").replace(
        "SCALE =", f"{options}SCALE =", 1
    ))  # fmt: skip
    program = ["-m", script.stem] if as_module else [script.name]
    done = python(tmp_path, "-W", "ignore", *program, "--scale", "3")
    assert done.returncode == 0, done.stderr
    where = (
        f"build(), {script.stem}:build," if as_module else f"build() was defined in {script}, which"
    )
    said = (
        f"this run's {where} cannot be imported here (it ends the process: sys.exit(2)): pass it "
        "as build=... (on the command line: --build FILE)"
    )
    for call in ("cerebro.open('runs/x').best.load()", "cerebro.replay('runs/x', 0)"):
        code = f"import cerebro\ntry: {call}\nexcept cerebro.errors.InputError as e: print(e)"
        (tmp_path / "other.py").write_text(code)
        assert python(tmp_path, "-W", "ignore", "other.py").stdout.splitlines()[-1] == said
    own = "import cerebro; cerebro.open('runs/x', build=dict).best.load()"
    assert "options_for_build" not in python(tmp_path, "-c", own).stderr
    # The command line gives the script the run's arguments.
    assert command(tmp_path, "replay", "runs/x", "--trial", "0").returncode == 0
