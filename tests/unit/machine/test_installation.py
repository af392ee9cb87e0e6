"""How Cerebro is installed: its name, the hints in messages, and what type checkers find."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

import cerebro
from cerebro.machine import environment, installation
from cerebro.machine.installation import DISTRIBUTION, install_hint, update_hint

PACKAGE = Path(cerebro.__file__).parent
ROOT = Path(__file__).parents[3]
TEXTS = {".cfg", ".in", ".ini", ".ipynb", ".md", ".py", ".toml", ".txt", ".yaml", ".yml"}
SKIPPED = {".git", ".venv", ".tox", "build", "dist", "runs", "data"}


def texts(root: Path) -> list[Path]:
    """The repository's texts; of the package's folder wherever it is installed."""
    found = []
    for path in sorted(root.iterdir()):
        if path.is_dir() and path.name not in SKIPPED and not path.name.endswith(".egg-info"):
            found += texts(path)
        elif path.is_file() and (path.suffix in TEXTS or path.name == "run"):
            found.append(path)
    return found


def lines_with(pattern: str, files: list[Path]) -> list[str]:
    wanted = re.compile(pattern)
    return [
        f"{file.name}:{number}: {line.strip()}"
        for file in files
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if wanted.search(line)
    ]


def test_the_project_has_the_distribution_name() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'\nname = "{DISTRIBUTION}"\n' in project
    assert DISTRIBUTION != "cerebro"  # which is an unrelated program on the package index


def test_the_command_and_the_import_are_called_cerebro() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '\n[project.scripts]\ncerebro = "cerebro.cli:main"\n' in project


def test_hints_say_how_to_install_from_a_clone() -> None:
    assert install_hint("plots") == "pip install -e '.[plots]' in the clone of Cerebro"
    assert install_hint() == "pip install -e . in the clone of Cerebro"
    assert update_hint() == "git pull && pip install -e . in the clone of Cerebro"


def test_one_switch_makes_hints_name_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "PUBLISHED", True)
    assert install_hint("torch", "plots") == "pip install 'cerebro-mop[torch,plots]'"
    assert install_hint() == "pip install cerebro-mop"
    assert update_hint() == "pip install -U cerebro-mop"


def test_no_file_suggests_installing_the_unrelated_cerebro() -> None:
    own = Path(__file__).resolve()
    files = [file for file in [*texts(ROOT), *texts(PACKAGE)] if file.resolve() != own]
    assert len(files) > 100
    name = r"(?<![\w.-])cerebro(?!-mop|[\w./])"  # not a folder, and not a file of a clone
    assert lines_with(rf"pip3? +(install|download|wheel)\b[^|;&]*[ '\"]{name}", files) == []
    assert lines_with(rf"{name}\[[a-z, ]+\]['\"`]", files) == []


def test_hints_in_the_package_come_from_one_function() -> None:
    """Texts about other programs' packages may say `pip install`."""
    files = [file for file in texts(PACKAGE) if file.name != "installation.py"]
    assert lines_with(r"pip install[^\n]*(cerebro|\.?\[)", files) == []
    assert lines_with(re.escape(DISTRIBUTION), files) == []


@pytest.mark.parametrize("file", ["README.md", "CONTRIBUTING.md", "docs"])
def test_extras_that_documentation_installs_exist(file: str) -> None:
    if not (ROOT / file).exists():
        pytest.skip(f"{file} is not beside the tests here")
    files = texts(ROOT / file) if (ROOT / file).is_dir() else [ROOT / file]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    installed = re.findall(r"pip install\b[^`\n]*?([^\s\"']*)\[([\w,]+)\]", text)
    assert installed
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = project.split("[project.optional-dependencies]")[1].split("\n[")[0]
    known = set(re.findall(r"^(\w+) = ", extras, re.MULTILINE))
    for target, names in installed:
        assert target in ({DISTRIBUTION, "."} if installation.PUBLISHED else {"."})
        assert set(names.split(",")) <= known


def test_hints_need_neither_numpy_nor_the_core() -> None:
    code = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('hints', {installation.__file__!r})\n"
        "hints = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(hints)\n"
        "print(hints.install_hint('ray'))\n"
        "assert not {'numpy', 'cerebro'} & sys.modules.keys()"
    )
    out = subprocess.run(
        [sys.executable, "-S", "-c", code], check=True, capture_output=True, text=True
    )
    assert out.stdout == install_hint("ray") + "\n"


# What raises or prints a hint, with the package that is missing and the extra that has it.
MISSING = [
    ("optuna", "optuna", "cerebro.integrations.optuna.terms.import_optuna('x')"),
    ("scipy", "search", "cerebro.searchers.quasi_random.QuasiRandomSearch()._sobol(1)"),
    ("matplotlib", "plots", "cerebro.report.plots.look.figure_class()"),
    ("sklearn", "demo", "cerebro.cli.demo.digits('nowhere')"),
    ("pyarrow", "parquet", "cerebro.shard('table.parquet', 'nowhere')"),
    ("PIL", "images", "cerebro.images('pictures')"),
    ("ray", "ray", "cerebro.ray.trainable"),
    ("zmq", "cluster", "cerebro.cluster.keys.import_zmq()"),
    ("ray", "ray", "cerebro.cluster.engines.ray_nodes.import_ray()"),
    ("ray", "ray", "cerebro.ray.fit(None, None, param_space={})"),
]


@pytest.mark.parametrize(("module", "extra", "call"), MISSING)
def test_the_error_for_a_missing_module_names_its_extra(
    module: str, extra: str, call: str, tmp_path: Path
) -> None:
    (tmp_path / "table.parquet").write_bytes(b"PAR1")
    (tmp_path / "pictures").mkdir()
    code = (
        f"import sys; sys.modules[{module!r}] = None\n"
        "import cerebro, cerebro.cli.demo, cerebro.cluster.keys\n"
        "import cerebro.cluster.engines.ray_nodes\n"
        "import cerebro.report.plots, cerebro.integrations.optuna.terms\n"
        "import cerebro.searchers.quasi_random\n"
        f"try: {call}\n"
        "except cerebro.InputError as error: print(error)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    assert install_hint(extra) in out.stdout


def test_a_store_of_a_later_version_says_how_to_update(tmp_path: Path) -> None:
    import sqlite3

    from cerebro.run.store.schema import SCHEMA_VERSION, check_version

    connection = sqlite3.connect(tmp_path / "run.sqlite")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    with pytest.raises(cerebro.CorruptDataError, match=re.escape(f"({update_hint()})")):
        check_version(connection, tmp_path / "run.sqlite")
    connection.close()


def installed() -> metadata.Distribution:
    try:
        return metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{DISTRIBUTION} is not installed here: cerebro is on the path by other means")


def test_the_version_is_that_of_the_distribution() -> None:
    version = installed().version
    assert environment.version() == version == cerebro.__version__


def test_an_editable_install_is_a_path_that_type_checkers_follow() -> None:
    """A hook in place of the path, setuptools' default, is opaque to them."""
    distribution = installed()
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if not origin.get("dir_info", {}).get("editable"):
        pytest.skip("Cerebro is installed here, but not editable")
    paths = [file for file in distribution.files or [] if file.suffix == ".pth"]
    assert len(paths) == 1
    (line,) = Path(str(paths[0].locate())).read_text(encoding="utf-8").split("\n", 1)[:1]
    assert (Path(line) / "cerebro" / "py.typed").exists()
