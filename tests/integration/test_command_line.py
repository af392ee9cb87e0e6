"""The command line end to end, as a user runs it: in processes of its own."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("sklearn")

# A NumPy model: starts at once, and needs no framework.
SEARCH = """
import numpy as np
import cerebro


class Line:
    framework = "numpy"

    def __init__(self, lr):
        self.lr = lr
        self.w = np.zeros(3)

    def loss(self, batch):
        return np.asarray(batch["x"]) @ self.w - np.asarray(batch["y"])

    def train_batch(self, batch):
        error = self.loss(batch)
        self.w -= self.lr * (np.asarray(batch["x"]) * error[:, None]).mean(0)
        return {"loss": float((error**2).mean())}

    def eval_batch(self, batch):
        return {"loss": float((self.loss(batch) ** 2).mean())}

    def state_dict(self):
        return {"w": self.w}

    def load_state_dict(self, state):
        self.w = np.array(state["w"])


def build(config):
    SLOWER
    return Line(config["lr"])


space = {"lr": cerebro.loguniform(0.01, 0.3)}
data = "data"
settings = dict(epochs=3, n_trials=4, validation=0.25, batch_size=16, seed=1)
"""

MAKE_DATA = """
import numpy as np, cerebro
rng = np.random.default_rng(0)
x = rng.normal(size=(200, 3))
cerebro.shard({"x": x, "y": x @ [1.0, -2.0, 0.5]}, "data", shards=4, progress=False)
"""


def cerebro(
    folder: Path, *arguments: str, status: int = 0, **env: str
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "cerebro", *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **env},
    )
    assert done.returncode == status, done.stdout + done.stderr
    if status == 1:
        lines = [line for line in done.stderr.splitlines() if not line.startswith("warning: ")]
        assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    return done


def processes_in(folder: Path) -> list[str]:
    """Command lines of the processes that work in a folder."""
    psutil = pytest.importorskip("psutil")
    found = psutil.process_iter(["cwd", "cmdline"])
    return [" ".join(p.info["cmdline"] or ["?"]) for p in found if p.info["cwd"] == str(folder)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a search file and a finished run."""
    path = tmp_path_factory.mktemp("cli")
    subprocess.run([sys.executable, "-c", MAKE_DATA], cwd=path, check=True)
    (path / "search.py").write_text(SEARCH.replace("SLOWER", "pass"))
    done = cerebro(path, "run", "search.py", "--workers", "2", "--run", "runs/first")
    assert "\x1b" not in done.stdout  # no terminal: plain lines
    assert "trial 0 epoch 3/3" in done.stdout
    assert "best: trial" in done.stdout
    assert "python -m cerebro show runs/first" in done.stdout
    return path


def test_run_again_is_refused(folder: Path) -> None:
    done = cerebro(folder, "run", "search.py", "--run", "runs/first", status=1)
    assert "runs/first exists" in done.stderr


def test_show(folder: Path) -> None:
    newest = cerebro(folder, "show").stdout
    assert newest == cerebro(folder, "show", "runs/first").stdout
    assert "finished; 4 finished" in newest
    one = cerebro(folder, "show", "runs/first", "--trial", "2").stdout
    assert one.startswith("trial 2: finished after 3 epochs")
    done = cerebro(folder, "show", "runs/first", "--trial", "9", status=1)
    assert "has trials 0 to 3" in done.stderr
    cerebro(folder, "show", "runs/none", status=1)


def test_options_override_settings(folder: Path) -> None:
    arguments = "run search.py --epochs 1 --n-trials 2 --workers 0 --run runs/small --progress none"
    done = cerebro(folder, *arguments.split())
    assert "2 finished" in done.stdout
    assert "epoch 1/1" not in done.stdout


@pytest.mark.parametrize("kind", ["pipe", "disk"])
def test_a_search_outlives_its_output(folder: Path, kind: str) -> None:
    """The reader of the output is gone, as after ``| head``, or the disk of the log is full."""
    if kind == "disk":
        out = os.open("/dev/full", os.O_WRONLY)
    else:
        read, out = os.pipe()
        os.close(read)
    run = f"runs/{kind}"
    done = subprocess.run(
        [sys.executable, "-m", "cerebro", "run", "search.py", "--run", run, "--workers", "1"],
        cwd=folder, stdout=out, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    os.close(out)
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("warning: the display failed, so the search continues without it")
    assert "finished; 4 finished" in cerebro(folder, "show", run).stdout


@pytest.mark.parametrize(
    ("command", "status"), [("show runs/first", 141), ("--help", 141), ("nonsense", 1)]
)
def test_a_command_ends_quietly_when_its_reader_leaves(
    folder: Path, command: str, status: int
) -> None:
    for both in (False, True):
        read, out = os.pipe()
        os.close(read)
        done = subprocess.run(
            [sys.executable, "-m", "cerebro", *command.split()],
            cwd=folder, stdout=out, stderr=out if both else subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONUNBUFFERED": ""},
        )  # fmt: skip
        os.close(out)
        assert done.returncode == status
        assert not done.stderr or (status == 1 and done.stderr.startswith("error:"))


def test_text_is_written_in_any_encoding(folder: Path) -> None:
    text = SEARCH.replace("SLOWER", "pass").replace('"lr"', '"größe"')
    (folder / "names.py").write_text(text.replace("validation=0.25", "validation=cerebro.KFold(2)"))
    ascii_only = {"PYTHONIOENCODING": "ascii"}
    done = cerebro(folder, "run", "names.py", "--run", "runs/names", **ascii_only)
    assert " \\xb1 " in done.stdout and "gr\\xf6\\xdfe" in done.stdout
    for arguments in (["show"], ["show", "--trial", "0"], ["compare", "runs/first"]):
        assert "gr\\xf6\\xdfe" in cerebro(folder, *arguments, "runs/names", **ascii_only).stdout


def test_replay(folder: Path) -> None:
    done = cerebro(folder, "replay", "runs/first", "--trial", "1")
    assert "identical" in done.stdout


def test_replay_names_the_first_difference(folder: Path) -> None:
    arguments = "run search.py --workers 1 --n-trials 1 --run runs/forged --progress none"
    cerebro(folder, *arguments.split())
    with sqlite3.connect(folder / "runs" / "forged" / "run.sqlite") as connection:
        connection.execute("UPDATE epochs SET state_hash = ? WHERE epoch = 1", ("0" * 32,))
    done = subprocess.run(
        [sys.executable, "-m", "cerebro", "replay", "runs/forged", "--trial", "0"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "differs from epoch 1 on" in done.stdout


def test_verify(folder: Path) -> None:
    cerebro(folder, "verify", "data")
    arguments = "run search.py --workers 1 --n-trials 1 --run runs/damaged --progress none"
    cerebro(folder, *arguments.split())
    cerebro(folder, "verify", "runs/damaged")
    state = next((folder / "runs" / "damaged" / "states").glob("*.safetensors"))
    content = bytearray(state.read_bytes())
    content[-1] ^= 1
    state.write_bytes(content)
    done = cerebro(folder, "verify", "runs/damaged", status=1)
    assert state.name in done.stderr


def test_plot(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    for kind in ("curves", "gantt", "importance"):
        done = cerebro(folder, "plot", "runs/first", "--kind", kind, "--trials", "0,1")
        picture = folder / done.stdout.strip()
        assert picture.read_bytes().startswith(b"\x89PNG")
    cerebro(folder, "plot", "runs/first", "--metric", "auc", status=1)
    assert not (folder / "runs" / "first" / "auc.png").exists()


def test_plot_writes_the_file_that_it_prints(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    assert cerebro(folder, "plot", "runs/first", "--out", "picture").stdout == "picture.png\n"
    assert (folder / "picture.png").read_bytes().startswith(b"\x89PNG")
    (folder / "pictures").mkdir()
    done = cerebro(folder, "plot", "runs/first", "--out", "pictures", status=1)
    assert "pictures is a folder" in done.stderr
    assert not (folder / "pictures.png").exists()


def test_plot_as_a_page(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    cerebro(folder, "plot", "runs/first", "--out", "page.html")
    page = (folder / "page.html").read_text()
    assert page.count('src="data:image/png;base64,iVBOR') == 5
    assert "<td" in page and "<title>runs/first</title>" in page
    assert not [word for word in ("http:", "https:", "<link", "url(") if word in page]
    cerebro(folder, "plot", "runs/first", "--kind", "gantt", "--out", "one.html")
    assert (folder / "one.html").read_text().count("<img") == 1
    done = cerebro(folder, "plot", "runs/first", "--out", "page.bmpx", status=1)
    assert "page.bmpx" in done.stderr


def test_export(folder: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    done = cerebro(folder, "export", "runs/first")
    best = done.stdout.strip()
    assert best.startswith("runs/first/trial-") and best.endswith(".safetensors")
    assert safetensors.load_file(folder / best)["/w"].shape == (3,)
    options = ["--trial", "0", "--epoch", "last", "--out", "weights.safetensors"]
    cerebro(folder, "export", "runs/first", *options)
    last = safetensors.load_file(folder / "weights.safetensors")
    import cerebro as package

    trial = package.open(folder / "runs" / "first").trials[0]
    state = safetensors.load_file(trial.state_path("last"))
    assert last["/w"].tobytes() == state["/model/w"].tobytes()
    for arguments, cause in {
        "--trial 9": "trials 0 to 3",
        "--epoch 77": "no state of epoch 77",
        "--out w.npz": ".safetensors, .pt, .onnx",
        "--build nothing.py": "nothing.py",
        "--out no/such/w.pt": "no/such",
    }.items():
        done = cerebro(folder, "export", "runs/first", *arguments.split(), status=1)
        assert cause in done.stderr


def test_build_that_raises(folder: Path) -> None:
    text = SEARCH.replace("SLOWER", 'raise ValueError("no such layer")')
    (folder / "broken.py").write_text(text)
    arguments = "run broken.py --workers 2 --run runs/broken --progress none"
    done = cerebro(folder, *arguments.split(), status=1)
    assert "no such layer" in done.stderr
    assert processes_in(folder) == []


def test_model_without_state_dict(folder: Path) -> None:
    text = SEARCH.replace("SLOWER", "pass").replace("def state_dict", "def other_name")
    (folder / "stateless.py").write_text(text)
    arguments = "run stateless.py --workers 1 --run runs/stateless --progress none"
    done = cerebro(folder, *arguments.split(), status=1)
    assert "state_dict" in done.stderr


def test_ctrl_c_keeps_what_is_finished(folder: Path) -> None:
    (folder / "long.py").write_text(SEARCH.replace("SLOWER", "pass"))
    process = subprocess.Popen(
        [sys.executable, "-m", "cerebro", "run", "long.py", "--workers", "2", "--run", "runs/long",
         "--epochs", "1000000"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    assert process.stdout is not None
    for line in process.stdout:
        if " epoch " in line:
            break
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130, err
    assert "are kept in runs/long" in err
    assert "python -m cerebro resume runs/long" in err
    assert "Traceback" not in err
    assert processes_in(folder) == []
    shown = cerebro(folder, "show", "runs/long").stdout
    assert "stopped" in shown


def test_demo_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    done = cerebro(tmp_path, "demo", "--quick", "--workers", "2", "--run", "runs/demo")
    assert "1,797 handwritten digits" in done.stdout
    assert "no trial saw: accuracy 0." in done.stdout
    assert "result = cerebro.open('runs/demo')" in done.stdout
    folders = {path.name for path in (tmp_path / "data").iterdir()}
    assert folders == {"demo"}  # not that of README's first search, which follows in this folder
    for name in ("curves.png", "gantt.png"):
        assert (tmp_path / "runs" / "demo" / name).read_bytes().startswith(b"\x89PNG")
    lines = done.stdout.split("in Python:")[1].split("or from here:")[0]
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec("\n".join(line.strip() for line in lines.splitlines()), names)
    assert type(names["net"]).__name__ == "Sequential"
    assert names["result"].best.evaluate()["accuracy"] > 0.5


# --- files that are called like libraries --------------------------------------------


SHADOW = "raise SystemExit('this is not the library')"

TORCH_SEARCH = """
import cerebro, helper, torch


def build(config):
    net = torch.nn.Linear(3, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"])
    return cerebro.torch.Model(net, optimizer=optimizer, loss=helper.loss)


space = {"lr": [0.01, 0.1]}
data = "../data"
settings = dict(epochs=1, n_trials=2, validation=0.25, batch_size=16)
"""

HELPER = """
def loss(output, target):
    return ((output[:, 0] - target) ** 2).mean()
"""


@pytest.fixture
def shadowed(folder: Path, tmp_path: Path) -> Path:
    """A working directory with a torch.py, data, and beside it a folder with a search."""
    shutil.copytree(folder / "data", tmp_path / "data")
    shutil.copytree(folder / "runs", tmp_path / "work" / "runs")
    (tmp_path / "work" / "torch.py").write_text(SHADOW)
    (tmp_path / "search").mkdir()
    (tmp_path / "search" / "search.py").write_text(TORCH_SEARCH)
    (tmp_path / "search" / "helper.py").write_text(HELPER)
    # Another module of that name, where the working directory is.
    (tmp_path / "work" / "helper.py").write_text(SHADOW)
    return tmp_path / "work"


def test_a_file_of_the_working_directory_is_not_taken_for_a_library(shadowed: Path) -> None:
    assert "this is not" not in cerebro(shadowed, "doctor").stdout
    assert "4 finished" in cerebro(shadowed, "show", "runs/first").stdout
    for workers in ("0", "1"):
        run = f"runs/torch-{workers}"
        cerebro(shadowed, "run", "../search/search.py", "--workers", workers, "--run", run)
        assert "identical" in cerebro(shadowed, "replay", run, "--trial", "1").stdout
        out = f"best-{workers}.pt"
        cerebro(shadowed, "export", run, "--format", "torch", "--out", out)


def test_a_module_of_the_working_directory_is_found_by_name(shadowed: Path) -> None:
    (shadowed / "models.py").write_text(SEARCH.replace("SLOWER", "pass").replace("data =", "d ="))
    script = (
        "import cerebro, models; cerebro.search(models.build, models.space, '../data', epochs=1, "
        "n_trials=1, batch_size=16, validation=0.2, workers=1, run='runs/named', progress=False)"
    )
    subprocess.run([sys.executable, "-P" if sys.version_info >= (3, 11) else "-u", "-c",
                    "import sys; sys.path.append(''); " + script],
                   cwd=shadowed, check=True)  # fmt: skip
    assert "identical" in cerebro(shadowed, "replay", "runs/named", "--trial", "0").stdout


def test_the_error_names_a_file_that_shadows_a_library(shadowed: Path) -> None:
    search = shadowed.parent / "search"
    (search / "torch.py").write_text("")  # beside the script it comes first, as for `python FILE`
    done = cerebro(search, "run", "search.py", "--run", "run", status=1)
    assert f"{search}/torch.py hides the library torch" in done.stderr


def test_the_error_names_a_file_that_shadows_numpy(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "cerebro", "doctor"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    said = f"ImportError: {tmp_path}/numpy.py hides the library numpy: rename it"
    assert done.stderr.splitlines()[-1] == said


@pytest.mark.parametrize("name", ["random", "statistics"])
@pytest.mark.parametrize("is_program", [True, False])
def test_the_error_names_a_file_that_shadows_a_standard_module(
    tmp_path: Path, name: str, is_program: bool
) -> None:
    """Beside a script, or as the script: also if it would have the names that are looked for."""
    (tmp_path / f"{name}.py").write_text("import cerebro\n" if is_program else "")
    (tmp_path / "train.py").write_text("import cerebro\n")
    program = f"{name}.py" if is_program else "train.py"
    done = subprocess.run(
        [sys.executable, program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    said = f"ImportError: {tmp_path}/{name}.py hides the library {name}: rename it"
    assert done.returncode == 1 and done.stderr.splitlines()[-1] == said


def test_a_file_that_hides_nothing_is_not_blamed(tmp_path: Path) -> None:
    """The package has the name of one of Python's, but another import has failed."""
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "__init__.py").touch()
    (tmp_path / "train.py").write_text(
        "import sys, test\nsys.modules['cerebro.api.search'] = sys\nimport cerebro\n"
    )
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert "has no attribute 'search'" in done.stderr.splitlines()[-1]


def test_workers_do_not_look_in_the_working_directory_first(folder: Path, tmp_path: Path) -> None:
    """A script elsewhere does not either."""
    for name in ("numpy.py", "random.py", "torch.py"):
        (tmp_path / name).write_text(SHADOW)
    (tmp_path / "away").mkdir()
    script = tmp_path / "away" / "script.py"
    script.write_text(
        SEARCH.replace("SLOWER", "pass")
        + f"settings['run'] = 'run'\ncerebro.search(build, space, {str(folder / 'data')!r}, "
        "workers=1, progress=False, **settings)\n"
    )
    subprocess.run([sys.executable, str(script)], cwd=tmp_path, check=True)
    assert (tmp_path / "run" / "run.sqlite").exists()
