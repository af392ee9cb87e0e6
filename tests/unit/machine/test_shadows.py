"""Files that hide a module of Python are named, and others with such a name are not."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from cerebro.machine.imports import describe_shadows

NAMES = ["code", "profile", "queue", "statistics", "time", "trace"]


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A package of the user's with modules that fail when they are imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "library_with_shadows"
    folder.mkdir()
    (folder / "__init__.py").touch()
    for name in NAMES:
        (folder / f"{name}.py").write_text("{}['missing']\n")
    yield folder
    for name in [name for name in sys.modules if name.startswith(folder.name)]:
        del sys.modules[name]


def failed(module):
    with pytest.raises(KeyError) as caught:
        importlib.import_module(module)
    return caught.value


@pytest.mark.parametrize("name", NAMES)
def test_a_module_of_a_package_hides_nothing(library: Path, name: str) -> None:
    assert describe_shadows(failed(f"{library.name}.{name}")) == ""


@pytest.mark.parametrize("is_package", [True, False])
def test_the_hint_names_a_module_that_shadows_a_library(
    library: Path, is_package: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(library))
    monkeypatch.delitem(sys.modules, "profile", raising=False)
    file = library / "profile.py"
    if is_package:
        (library / "profile").mkdir()
        file = file.rename(library / "profile" / "__init__.py")
    assert describe_shadows(failed("profile")) == f"{file} hides the library profile: rename it"


def test_a_module_that_python_has_built_in_is_not_hidden(
    library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python takes its own, whatever is in the folders of the path."""
    monkeypatch.syspath_prepend(str(library))
    error = failed(f"{library.name}.time")
    assert describe_shadows(error) == ""
