"""Finding a run's build function again."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import sys
import textwrap
import types

import pytest

from cerebro.errors import InputError
from cerebro.run.recipe import Recipe, StudyBuild, accepts_info, import_file


def build(config):
    return config


class Holder:
    @staticmethod
    def build(config):
        return config


@pytest.mark.parametrize("function", [build, Holder.build])
def test_importable_functions_are_found(function):
    assert Recipe(**dataclasses.asdict(Recipe.from_build(function))).find() is function


def test_lambdas_and_nested_functions_must_be_passed():
    def nested(config):
        return config

    for function in (lambda config: config, nested):
        with pytest.raises(InputError, match="pass it as build="):
            Recipe.from_build(function).find()


class Base:
    def __init__(self, act=None):
        self.act = act

    def method(self, config):
        return config

    def function(config):
        return config

    @classmethod
    def made(cls, config):
        return cls

    def __call__(self, config):
        return config


class Child(Base):
    pass


@functools.lru_cache
def cached(config):
    return config


@pytest.mark.parametrize("function", [Base.made, Child.made, Base.function, Base, cached])
def test_builds_with_a_qualified_name_are_found(function):
    assert Recipe.from_build(function).find() == function
    assert Recipe.from_build(StudyBuild(function)).name == Recipe.from_build(function).name


@pytest.mark.parametrize(
    "given", [functools.partial(build), Base("relu"), Base("relu").method, len([]).bit_length]
)
def test_a_partial_an_object_and_a_bound_method_must_be_passed(given):
    recipe = Recipe.from_build(given)
    assert not recipe.is_importable
    assert Recipe.from_build(StudyBuild(given)).name == recipe.name
    with pytest.raises(InputError, match=r"was a partial, .* method or another object.* build="):
        recipe.find()


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package whose program imports relatively, as ``python -m`` allows; the program's file."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder = tmp_path / "pkg_for_recipe" / "inner"
    folder.mkdir(parents=True)
    for file in (folder / "__init__.py", folder.parent / "__init__.py"):
        file.touch()
    (folder / "models.py").write_text("SCALE = 3\n")
    program = folder / "program.py"
    program.write_text("from .models import SCALE\ndef build(config): return SCALE\n")
    yield program
    for name in [name for name in sys.modules if name.startswith("pkg_for_recipe")]:
        del sys.modules[name]


def test_a_program_run_with_python_m_is_recorded_by_module_name(package, tmp_path, monkeypatch):
    name = "pkg_for_recipe.inner.program"
    main = types.ModuleType("__main__")
    main.__file__ = str(package)
    main.__spec__ = importlib.util.spec_from_file_location(name, package)
    exec(compile("def build(config): return 3", package, "exec"), main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    recipe = Recipe.from_build(main.build)
    assert (recipe.module, recipe.is_importable) == (name, True)
    assert recipe.find() is main.build
    assert Recipe.from_build(build).module == __name__
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    found = dataclasses.replace(recipe, source_hash=None, file_hash=None).find()
    assert found({}) == 3
    assert sys.path[:2] == [str(tmp_path), str(package.parent)]


def test_a_file_with_relative_imports_is_imported_with_its_package(package):
    module = import_file(package)
    assert module.__name__ == "pkg_for_recipe.inner.program"
    assert module.build({}) == 3
    plain = package.with_name("plain_for_recipe.py")
    plain.write_text("import models\ndef build(config): return models.SCALE\n")
    assert import_file(plain).__name__ == "plain_for_recipe"
    for name in ("models", "plain_for_recipe"):
        del sys.modules[name]


def test_a_class_of_a_program_without_a_file_has_a_recipe(monkeypatch):
    main = types.ModuleType("__main__")  # of python -c and of notebooks
    exec("class Made:\n    def __init__(self, config): pass", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    recipe = Recipe.from_build(main.Made)
    assert (recipe.qualname, recipe.file, recipe.source_hash) == ("Made", None, None)


def test_a_build_of_a_missing_module_must_be_passed():
    with pytest.raises(InputError, match="pass it as build="):
        Recipe("no_such_module", "build", None, None, None).find()


def test_a_build_of_another_script_or_notebook_must_be_passed(monkeypatch):
    program = types.ModuleType("__main__")  # a script; pytest's workers have no file
    program.__file__ = __file__
    monkeypatch.setitem(sys.modules, "__main__", program)
    with pytest.raises(InputError) as caught:
        Recipe("__main__", "build", None, None, None).find()
    assert str(caught.value) == (
        "this run's build() was defined in a script or notebook: pass it as build=... (on the "
        "command line: --build FILE)"
    )


def test_a_changed_source_warns(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "models_for_recipe.py"
    file.write_text("def build(config):\n    return 1\n")
    recipe = Recipe.from_build(importlib.import_module("models_for_recipe").build)
    recipe.find()
    file.write_text("def build(config):\n    return 2222\n")
    del sys.modules["models_for_recipe"]
    importlib.invalidate_caches()
    with pytest.warns(UserWarning, match=r"models_for_recipe:build.* has changed"):
        recipe.find()


def test_a_file_is_imported_once_by_its_path(tmp_path):
    file = tmp_path / "experiment_for_recipe.py"
    file.write_text(textwrap.dedent("count = []\ndef build(config): return config\n"))
    first = import_file(file)
    assert import_file(file) is first
    assert Recipe.from_build(first.build).find() is first.build
    del sys.modules["experiment_for_recipe"]
    assert Recipe.from_build(first.build).find().__code__.co_filename == str(file)


@pytest.mark.parametrize("name", ["json", "torch", "data_for_recipe"])
def test_a_file_called_like_another_module_does_not_take_its_place(tmp_path, monkeypatch, name):
    """One that is imported, one that could be, and one that is imported from elsewhere."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    if name == "torch":
        pytest.importorskip("torch")
    if name == "data_for_recipe":
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    else:
        importlib.import_module("json")
    before = sys.modules.get(name)
    file = tmp_path / f"{name}.py"
    file.write_text("import json\ndef build(config): return json.dumps(config)\n")
    module = import_file(file)
    assert sys.modules.get(name) is before
    assert module.build({}) == "{}"
    assert import_file(file) is module
    assert Recipe(**dataclasses.asdict(Recipe.from_build(module.build))).find() is module.build
    del sys.modules[module.__name__]
    assert Recipe.from_build(module.build).find().__code__.co_filename == str(file)
    del sys.modules[module.__name__]


@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("raise SystemExit(2)", r"it ends the process: sys\.exit\(2\)"),
        ("exit('usage: x\\ny')", r"it ends the process: sys\.exit\(usage: x.*y\)"),
        ("int('x')", "ValueError: invalid literal.*"),
        ("{}['x']", "KeyError: 'x'"),
        ("import no_such_module_at_all", "No module named 'no_such_module_at_all'"),
    ],
)
def test_a_module_that_cannot_be_imported_any_more_must_be_passed(
    tmp_path, monkeypatch, statement, why
):
    monkeypatch.syspath_prepend(str(tmp_path))
    file = tmp_path / "gone_wrong_for_recipe.py"
    file.write_text(f"import sys\nfrom sys import exit\n{statement}\ndef build(config): pass\n")
    recipe = dataclasses.replace(Recipe.from_build(build), module=file.stem, file=str(file))
    with pytest.raises(InputError, match=rf"cannot be imported here \({why}\): pass it as build="):
        recipe.find()


def test_a_file_that_fails_leaves_no_module(tmp_path):
    file = tmp_path / "broken_for_recipe.py"
    file.write_text("raise RuntimeError('no')\n")
    with pytest.raises(RuntimeError):
        import_file(file)
    assert "broken_for_recipe" not in sys.modules


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda config: 0, False),
        (lambda config, info: 0, True),
        (lambda config, info=None: 0, True),
        (lambda config, depth=3: 0, False),
        (lambda *args: 0, True),
    ],
)
def test_info_is_passed_only_to_builds_that_accept_it(function, expected):
    assert accepts_info(function) is expected


def test_a_build_without_parameters_is_refused():
    with pytest.raises(InputError, match="must take the configuration"):
        accepts_info(lambda: 0)
