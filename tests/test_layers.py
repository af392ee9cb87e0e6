"""The sources' structure: includes and imports point one way, and the core follows its rules.

Reads the files; builds and imports nothing. Add a new file to the tables below, lowest layer first,
and to csrc/README.md.
"""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = ROOT / "csrc" / "core"
CUDA = ROOT / "csrc" / "cuda"
BINDING = ROOT / "csrc" / "python"
PACKAGE = ROOT / "cerebro"

# A family is <name>.[ch] and <name>_*.[ch]; it may include its own headers and those below.
C_LAYERS = [
    ["base", "float_env", "thread"],
    [
        *("alloc", "beat", "cut", "device", "dtype", "hash", "heap", "json", "matmul", "mt19937"),
        *("optimizer_numbers", "reductions", "rng", "stream"),
    ],
    [
        *("convert", "copy", "elementwise", "fsio", "gather", "native_ops", "native_shared"),
        *("order", "regions", "runner", "uses"),
    ],
    ["npy", "optimizer_step", "pointwise", "schedule", "tensor"],
    ["native_net", "shard", "state"],
    ["slots", "transform"],
    ["batch", "kernels"],
    ["depot", "device_check", "loader", "native_kernels"],
    ["device_loader"],
    ["lanes"],
]

# Folders and files at the top of the package, from the lowest layer up. A file may import from the
# rows above its own, and from its own folder: at the top of the file, inside functions and for
# types. docs/design/README.md describes them.
PYTHON_ROWS = [
    ["errors"],
    ["machine"],
    ["arguments"],
    ["transforms", "model"],
    ["report"],
    ["space"],
    ["data"],
    ["torch", "native"],
    ["searchers"],
    ["run"],
    ["control", "callbacks"],
    ["worker"],
    ["executors"],
    ["_worker"],
    ["cluster"],
    ["results"],
    ["watch"],
    ["coordinator"],
    ["api"],
    ["ray"],
    ["integrations"],
    ["jax", "keras", "sklearn", "optuna", "dask", "spark", "testing"],
    ["cli"],
    ["__main__"],
]

# Only these may import `cerebro` itself, which collects the public names.
USE_PUBLIC_NAMES = {"cli", "__main__"}

# Words and contracts, what people look at, and other libraries: without the C core. Data, states,
# files and random numbers are the core's.
WITHOUT_CORE = {
    *("errors", "arguments", "transforms", "model", "report", "jax", "keras", "control"),
    *("callbacks", "optuna", "dask", "spark", "cli", "__main__"),
    *("integrations.loggers", "integrations.jax", "integrations.keras", "integrations.optuna"),
}
USE_CORE_THERE = {"cli.doctor"}  # says how the core was built

# Imported only inside the functions that need them, except in the folder or file dedicated to them.
OPTIONAL = {
    "torch": {
        *("torch", "integrations.lightning", "integrations.skorch", "integrations.transformers"),
    },
    "sklearn": {"integrations.sklearn"},
    "jax": {"integrations.jax"},
    "keras": {"integrations.keras"},
    "optax": set(),
    "pandas": set(),
    "pyarrow": set(),
    "PIL": set(),
    "datasets": set(),
    "matplotlib": set(),
    "IPython": set(),
    "scipy": {"integrations.sklearn"},  # which scikit-learn requires
    "jinja2": set(),
    "rich": {"report.table"},
    "lightning": set(),
    "skorch": set(),
    "torchmetrics": set(),
    "transformers": set(),
    "peft": set(),
    "optuna": {"integrations.optuna.optimize", "integrations.optuna.study_searcher"},
    "ray": {"integrations.ray_tune.trainable"},
    "zmq": set(),
    "distributed": set(),
    "pyspark": set(),
    "fsspec": set(),
    "s3fs": set(),
}

# The fence round `cerebro.integrations`, a folder or file for each library, and one
# file for those that log a search. Only these open it, to give the public names, which are imported
# on first use.
DOORS = {
    "callbacks",
    "jax",
    "keras",
    "optuna",
    "ray",
    "results.result",
    "searchers",
    "sklearn",
    "torch",
}

# What integrations may import: what users may import, and what that offers.
CONTRACTS = {
    *("errors", "machine", "arguments"),
    *("model", "transforms", "space", "data", "searchers", "callbacks.observer"),
    "executors.base",
    *("api", "results.result", "results.trial"),
}

# What some import besides: Optuna's needs the record that says that build takes a trial; Ray Tune's
# starts workers as a search does, and answers from a run's store.
MORE_CONTRACTS = {
    **{name: {"torch"} for name in ("lightning", "skorch", "transformers")},
    "optuna": {"run"},
    "ray_tune": {"executors", "run", "cluster"},
}

# --- C ------------------------------------------------------------------------


def c_files(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.c"), *folder.glob("*.h")])


def family(stem: str) -> str | None:
    """Return a file's family: the longest listed name that it begins with."""
    names = [name for layer in C_LAYERS for name in layer]
    own = [name for name in names if stem == name or stem.startswith(name + "_")]
    return max(own, key=len, default=None)


def layer_of(name: str) -> int:
    return next(i for i, layer in enumerate(C_LAYERS) if name in layer)


def includes(file: Path) -> list[str]:
    return re.findall(
        r'^\s*#\s*include\s*[<"]([^">]+)[">]', file.read_text(encoding="utf-8"), re.MULTILINE
    )


def without_comments(source: str) -> str:
    """Blank comments and the contents of strings; keep line numbers."""
    pattern = re.compile(
        r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])*\'', re.DOTALL
    )

    def blank(match: re.Match[str]) -> str:
        text = match.group()
        if text[0] in "\"'":
            return text[0] * 2
        return re.sub(r"[^\n]", " ", text)

    return pattern.sub(blank, source)


def test_every_core_file_has_a_layer() -> None:
    assert [file.name for file in c_files(CORE) if family(file.stem) is None] == []


def test_core_includes_point_down() -> None:
    problems = []
    for file in c_files(CORE):
        own = family(file.stem)
        for name in includes(file):
            other = family(Path(name).stem) if (CORE / name).exists() else None
            if own and other and other != own and layer_of(other) >= layer_of(own):
                problems.append(f"{file.name} includes {name}, which is not below it")
    assert problems == []


def defined(source: str) -> set[str]:
    """The functions that a file exports; clang-format puts their names at the start of a line."""
    pattern = re.compile(r"^(?!static\b)[^\n;]*\n(\w+)\([^;{}]*\)\n\{", re.MULTILINE)
    return set(pattern.findall(without_comments(source)))


def call_graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """Map each file to the files whose functions it uses."""
    owner = {name: stem for stem, source in sources.items() for name in defined(source)}
    used = {
        stem: {owner.get(name) for name in re.findall(r"\b\w+\b", without_comments(source))}
        for stem, source in sources.items()
    }
    return {stem: {o for o in owners if o is not None} - {stem} for stem, owners in used.items()}


def call_circle(sources: dict[str, str]) -> list[str]:
    try:
        TopologicalSorter(call_graph(sources)).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("folders", [(CORE, CUDA), (BINDING,)], ids=["core", "binding"])
def test_c_files_call_in_one_direction(folders: tuple[Path, ...]) -> None:
    """`module` is left out: it registers the functions and types of every file of the binding."""
    files = [file for folder in folders for file in folder.glob("*.c") if file.stem != "module"]
    sources = {file.stem: file.read_text(encoding="utf-8") for file in files}
    assert sum(len(users) for users in call_graph(sources).values()) > 10
    assert call_circle(sources) == []


def test_a_circle_of_calls_is_found() -> None:
    """The test of the test."""
    low, up = "int\nlow(int a,\n    int b)\n{\n}\n", "int\nup(void)\n{\n    low(1, 2);\n}\n"
    circle = low.replace("{\n", "{\n    up();\n")
    assert call_graph({"low": low, "up": up}) == {"low": set(), "up": {"low"}}
    assert call_circle({"low": low, "up": up}) == []
    assert set(call_circle({"low": circle, "up": up})) == {"low", "up"}
    assert call_circle({"low": low + "/* up() */\n", "up": up}) == []
    assert call_circle({"low": circle, "up": f"static {up}"}) == []


def test_core_needs_a_little_endian_machine() -> None:
    """On a big-endian machine, the build would write files that other machines cannot read."""
    compiler = shutil.which("gcc") or shutil.which("clang-14") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler here")
    command = [compiler, "-std=c11", "-fsyntax-only", "-x", "c", str(CORE / "base.h")]
    big = ["-U__BYTE_ORDER__", "-D__BYTE_ORDER__=__ORDER_BIG_ENDIAN__"]
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    refused = subprocess.run([*command, *big], check=False, capture_output=True, text=True)
    assert refused.returncode != 0 and "little-endian machine" in refused.stderr


def test_core_knows_no_cuda() -> None:
    """The core uses a GPU through device.h; no file needs CUDA's own headers."""
    names = {file.name for file in c_files(CUDA)}
    problems = [f"{f.name}: {n}" for f in c_files(CORE) for n in includes(f) if n in names]
    foreign = re.compile(r"(cuda|cudnn|driver_types|nv)\w*\.h")
    for file in [*c_files(CORE), *c_files(CUDA), *c_files(BINDING)]:
        problems += [
            f"{file.name}: {n}" for n in includes(file) if n not in names and foreign.match(n)
        ]
    assert problems == []


def test_core_knows_no_python() -> None:
    problems = []
    for file in [*c_files(CORE), *c_files(CUDA)]:
        foreign = ("Python", "numpy/", "py_", "module")
        problems += [f"{file.name}: {n}" for n in includes(file) if n.startswith(foreign)]
        if re.search(r"\bPy[A-Z_]\w*\(", without_comments(file.read_text(encoding="utf-8"))):
            problems.append(f"{file.name} calls Python")
    assert problems == []


FORBIDDEN = re.compile(
    r"\b(printf|fprintf|vprintf|vfprintf|puts|fputs|putchar|perror|exit|_exit|abort|assert|"
    r"atexit|signal|setlocale|strtok|rand|srand)\s*\("
)
HEAP = re.compile(r"\b(malloc|calloc|realloc|free|posix_memalign|aligned_alloc|strdup)\s*\(")


def calls(pattern: re.Pattern[str], files: list[Path]) -> list[str]:
    return [
        f"{file.name} calls {match.group(1)}"
        for file in files
        for match in pattern.finditer(without_comments(file.read_text(encoding="utf-8")))
    ]


def test_core_never_prints_or_exits() -> None:
    assert calls(FORBIDDEN, [*c_files(CORE), *c_files(CUDA)]) == []


def test_core_allocates_through_its_seam() -> None:
    files = [*c_files(CORE), *c_files(CUDA)]
    assert calls(HEAP, [file for file in files if file.stem != "alloc"]) == []


def file_scope(source: str) -> list[str]:
    """The declarations of a file outside braces, each on one line."""
    source = re.sub(r"^\s*#(?:[^\n]*\\\n)*[^\n]*", "", without_comments(source), flags=re.MULTILINE)
    depth, text = 0, []
    for character in source:
        depth -= character == "}"
        if depth == 0:
            text.append(";" if character == "}" else character)
        depth += character == "{"
    return [" ".join(part.split()) for part in "".join(text).split(";") if part.strip()]


def mutable_globals(source: str) -> list[str]:
    found = []
    for declaration in file_scope(source):
        head = declaration.split("=")[0].split("{")[0].strip()
        if re.match(r"(typedef|struct|union|enum|extern|_Static_assert|static_assert)\b", head):
            continue
        is_function = re.match(r"[^(]*\((?!\s*\*)", head)
        is_bare = re.fullmatch(r"[A-Z_0-9]+|\w+", head)
        # The object itself must be `const`, not only its target.
        pointer = head.rsplit("*", 1)[-1] if "*" in head else head
        if not is_function and not is_bare and not re.search(r"\bconst\b", pointer):
            found.append(declaration)
    body = without_comments(source)
    found += re.findall(r"^[ \t]+static\s+(?!const\b|inline\b)[^;({]*[;=]", body, re.MULTILINE)
    return found + re.findall(r"^.*\b_Thread_local\b.*$", body, re.MULTILINE)


def test_core_has_no_mutable_globals() -> None:
    files = [*c_files(CORE), *c_files(CUDA)]
    found = {file.name: mutable_globals(file.read_text(encoding="utf-8")) for file in files}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_binding_has_no_static_objects() -> None:
    """Objects are in the module's state; types are made from specs."""
    pattern = re.compile(r"^static\s+(?:PyObject\s*\*|PyTypeObject\b)[^;({]*[;=]", re.MULTILINE)
    found = {
        f.name: pattern.findall(without_comments(f.read_text(encoding="utf-8")))
        for f in c_files(BINDING)
    }
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_only_methods_with_keywords_are_cast() -> None:
    """Methods take PyObjects; only methods with keywords are cast, through void (*)(void)."""
    problems = []
    for file in c_files(BINDING):
        source = without_comments(file.read_text(encoding="utf-8"))
        problems += re.findall(
            r"\((?:PyCFunction|[gs]etter)\)(?!\(void \(\*\)\(void\)\))\w+", source
        )
        for name in re.findall(r"\(void \(\*\)\(void\)\)(\w+)", source):
            if not re.search(rf"^{name}\(PyObject \*", source, re.MULTILINE):
                problems.append(f"{name} in {file.name} takes no PyObject")
    assert problems == []


def test_c_files_begin_with_a_comment() -> None:
    """For a pair, only the header has it."""
    files = c_files(CORE) + c_files(CUDA) + c_files(BINDING)
    heads = [file for file in files if file.suffix == ".h" or not file.with_suffix(".h").exists()]
    assert [
        file.name for file in heads if not file.read_text(encoding="utf-8").startswith("/* ")
    ] == []


def test_tour_names_every_file() -> None:
    tour = (ROOT / "csrc" / "README.md").read_text(encoding="utf-8")
    stems = {file.stem for file in c_files(CORE) + c_files(CUDA) + c_files(BINDING)}
    missing = sorted(stem for stem in stems if not re.search(rf"`{stem}(\.[ch])?`", tour))
    assert missing == [], "csrc/README.md does not name these files"


def test_tour_gives_the_layers() -> None:
    tour = (ROOT / "csrc" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d) \| (.*?) \|", tour, re.MULTILINE)
    told = {name: int(layer) for layer, names in rows for name in re.findall(r"`(\w+)`", names)}
    assert {n: layer for n, layer in told.items() if layer_of(family(n) or "base") != layer} == {}
    assert [int(layer) for layer, _ in rows] == sorted(int(layer) for layer, _ in rows)


def test_mutable_globals_are_found() -> None:
    """The test of the test."""
    assert mutable_globals("static int counter;") == ["static int counter"]
    assert mutable_globals("int table[3] = {1, 2, 3};")
    assert mutable_globals("static const char *name = 0;")
    assert mutable_globals("void f(void)\n{\n    static int n = 0;\n    n++;\n}\n")
    assert not mutable_globals("static const int table[] = {1, 2};\nint f(int x);\n")
    assert not mutable_globals("static const char *const names[] = {0};\nstruct s { int a; };")
    assert mutable_globals("int (*hook)(void);")
    assert not mutable_globals("void f(int (*hook)(void));")
    assert not mutable_globals("typedef int (*fn)(void);\nenum e { A };\nint\nf(void)\n{\n}\n")


# --- Python -------------------------------------------------------------------


def modules(package: Path = PACKAGE) -> dict[str, Path]:
    """Every file of a package by its dotted name within it; "" is the package itself."""
    named = {}
    for file in sorted(package.rglob("*.py")):
        parts = file.relative_to(package).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return named


def imported(file: Path, *, top_level_only: bool = False) -> list[str]:
    """Return the full names that a file imports.

    With `top_level_only`, only imports that run with the file's own: not those in functions or
    under `if TYPE_CHECKING`.
    """
    return _imported(file.read_text(encoding="utf-8"), file.name, top_level_only)


@cache
def _imported(source: str, name: str, top_level_only: bool) -> list[str]:
    return list(_find_imports(ast.parse(source).body, name, top_level_only))


def _find_imports(body: list[ast.stmt], file: str, top_level_only: bool) -> Iterator[str]:
    nodes = _at_once(body) if top_level_only else (n for node in body for n in ast.walk(node))
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports name the whole path"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _at_once(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a file is imported."""
    for node in body:
        yield node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _at_once(node.orelse)
            continue
        for field in ("body", "orelse", "finalbody"):
            yield from _at_once(getattr(node, field, []))
        for handler in getattr(node, "handlers", []):
            yield from _at_once(handler.body)


def arrows(package: Path = PACKAGE) -> set[tuple[str, str]]:
    """Map each file of a package to the files it imports, without the C core."""
    named, found = modules(package), set()
    for module, file in named.items():
        for name in imported(file):
            top, _, inner = name.partition(".")
            if top != "cerebro" or inner.split(".")[0] == "_core":
                continue
            while inner and inner not in named:
                inner = inner.rpartition(".")[0]
            if inner != module:
                found.add((module, inner))
    return found


def row_of(module: str) -> int:
    """Return a module's row in PYTHON_ROWS."""
    top = module.partition(".")[0]
    return next(i for i, row in enumerate(PYTHON_ROWS) if top in row)


def within(module: str, places: Collection[str]) -> bool:
    """Return whether a module is one of these places or inside one."""
    return any(module == place or module.startswith(place + ".") for place in places)


def through_walls(package: Path = PACKAGE) -> set[tuple[str, str]]:
    """Imports, except those of integrations by their doors, which follow when a name is used."""
    return {
        (module, other)
        for module, other in arrows(package)
        if not (module in DOORS and within(other, ["integrations"]))
    }


def upward(package: Path = PACKAGE) -> list[str]:
    """Imports of modules that are not in a row above."""
    problems = []
    for module, other in sorted(through_walls(package)):
        top, other_top = module.partition(".")[0], other.partition(".")[0]
        if not module or top == other_top or (not other and top in USE_PUBLIC_NAMES):
            continue
        if not other or row_of(other) >= row_of(module):
            problems.append(f"{module} imports {other or 'cerebro'}, which is not above it")
    return problems


def circles(package: Path = PACKAGE) -> list[set[str]]:
    """Groups of files that import each other, directly or indirectly."""
    reached: dict[str, set[str]] = {}
    direct: dict[str, set[str]] = {}
    for module, other in through_walls(package):
        direct.setdefault(module, set()).add(other)

    def reach(module: str) -> set[str]:
        if module not in reached:
            found, waiting = set(), [module]
            while waiting:
                for other in direct.get(waiting.pop(), ()):
                    if other not in found:
                        found.add(other)
                        waiting.append(other)
            reached[module] = found
        return reached[module]

    groups = {frozenset(m for m in reach(n) if n in reach(m)) for n in direct if n in reach(n)}
    return [set(group) for group in sorted(groups, key=sorted)]


def test_every_top_level_module_is_in_the_import_table() -> None:
    tops = {module.partition(".")[0] for module in modules() if module}
    assert tops == {name for row in PYTHON_ROWS for name in row}


def test_imports_point_up_the_table() -> None:
    assert upward() == []


def test_no_files_import_each_other() -> None:
    assert circles() == []


def test_only_public_doors_open_the_integrations() -> None:
    """The names of modules count too, in texts from which a door imports them."""
    doors = {
        module
        for module, file in modules().items()
        if "cerebro.integrations" in file.read_text(encoding="utf-8")
        and not within(module, ["integrations"])
    }
    assert doors == DOORS


def fence_breaks(package: Path = PACKAGE) -> list[str]:
    """Imports of integrations that are neither of contracts nor of themselves."""
    problems = []
    for module, other in sorted(arrows(package)):
        if within(module, ["integrations"]) and module != "integrations":
            own = module.split(".")[1]
            allowed = {f"integrations.{own}", *CONTRACTS, *MORE_CONTRACTS.get(own, ())}
            if not within(other, allowed):
                problems.append(f"{module} imports {other}, which is not a contract")
    return problems


def test_integrations_import_contracts_only() -> None:
    assert fence_breaks() == []


def test_integrations_import_no_private_names() -> None:
    problems = [
        f"{module} imports {name}"
        for module, file in modules().items()
        for name in imported(file)
        if within(module, ["integrations"])
        and name.startswith("cerebro.")
        and re.search(r"\._(?!core\b)", name)
    ]
    assert problems == []


def test_the_top_of_the_package_is_small() -> None:
    """Only the listed files are at the top; all others are in a folder."""
    files = [file.name for file in PACKAGE.glob("*.py")]
    folders = [f.name for f in PACKAGE.iterdir() if f.is_dir() and (f / "__init__.py").exists()]
    assert (len(files), len(folders)) <= (16, 18)


def test_each_package_folder_has_a_docstring() -> None:
    silent = [
        module
        for module, file in modules().items()
        if file.name == "__init__.py"
        and not ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert silent == []


@pytest.mark.parametrize(
    ("file", "source", "find"),
    [
        ("machine/files.py", "import cerebro.worker.runner as runner\n", upward),
        ("machine/files.py", "def f():\n    from cerebro.worker import runner\n", upward),
        (
            "machine/files.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
            "    from cerebro.worker.runner import UnitRunner\n",
            upward,
        ),
        ("machine/files.py", "import cerebro\n", upward),
        ("torch/model.py", "from cerebro.jax import Model\n", upward),
        ("worker/messages.py", "from cerebro.worker.runner import UnitRunner\n", circles),
        ("integrations/loggers.py", "import cerebro.worker.messages\n", fence_breaks),
        ("integrations/loggers.py", "import cerebro.integrations.keras\n", fence_breaks),
    ],
)
def test_a_planted_import_is_found(
    tmp_path: Path, file: str, source: str, find: Callable[[Path], list[object]]
) -> None:
    """The test of the tests, on a copy of the package."""
    copy = tmp_path / "cerebro"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    assert find(copy) == []
    planted = copy / file
    planted.write_text(planted.read_text(encoding="utf-8") + source, encoding="utf-8")
    assert find(copy)


def test_the_core_is_imported_by_its_full_name() -> None:
    """`from cerebro import _core` would count as an import of the file that imports everything."""
    problems = [
        module
        for module, file in modules().items()
        if module and any(n == "cerebro._core" for n in _from_imports(file))
    ]
    assert problems == []


def _from_imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "cerebro":
            yield from (f"cerebro.{alias.name}" for alias in node.names)


def test_optional_packages_are_imported_late() -> None:
    problems = []
    for module, file in modules().items():
        for name in imported(file, top_level_only=True):
            allowed = OPTIONAL.get(name.split(".")[0])
            if allowed is not None and not within(module, allowed):
                problems.append(f"{module} imports {name} when it is imported")
    assert problems == []


def test_contracts_and_displays_do_not_use_the_core() -> None:
    users = {
        module
        for module, file in modules().items()
        if within(module, WITHOUT_CORE)
        and any(name.startswith("cerebro._core") for name in imported(file))
    }
    assert users == USE_CORE_THERE


def test_importing_cerebro_is_light() -> None:
    code = "import sys, cerebro; print(*sorted({n.split('.')[0] for n in sys.modules}))"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert set(out.stdout.split()) & OPTIONAL.keys() == set()


def test_the_map_is_drawn_from_the_imports() -> None:
    drawing = [sys.executable, str(ROOT / "docs" / "design" / "map.py"), "--check"]
    done = subprocess.run(drawing, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
