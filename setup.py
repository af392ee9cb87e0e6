"""Builds the C extension ``cerebro._core``; everything else is in pyproject.toml."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CCompilerError, ExecError, PlatformError

HERE = Path(__file__).parent
NO_COMPILER = """
Cerebro's core is written in C and needs a C compiler (gcc or clang) and Python's
headers. Install them and try again:

    Debian, Ubuntu   apt-get install gcc python3-dev
    Fedora           dnf install gcc python3-devel
    macOS            xcode-select --install
"""

WARNINGS = [
    "-Wall",
    "-Wextra",
    "-Wshadow",
    "-Wstrict-prototypes",
    "-Wmissing-prototypes",
    "-Wvla",
]


def c_sources() -> list[str]:
    folders = ("core", "cuda", "python")
    files = sorted(file for folder in folders for file in HERE.glob(f"csrc/{folder}/*.c"))
    return [str(file.relative_to(HERE)) for file in files]


def c_dependencies() -> list[str]:
    """The extension's dependencies besides its sources: headers and the kernels' PTX."""
    files = [*sorted(HERE.glob("csrc/**/*.h")), HERE / "csrc/cuda/kernels.ptx"]
    return [str(file.relative_to(HERE)) for file in files]


def write_ptx_source(folder: str) -> str:
    """Write the kernels' PTX as a C file into a folder of the build; return its path."""
    file = Path(folder, "kernels_ptx.c")
    file.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, HERE / "csrc/cuda/make_ptx.py", "--c", file], check=True)
    return str(file)


def compile_side_by_side(compiler: Any) -> None:
    """Compile as many source files in parallel as there are processors."""
    compile_all = compiler.compile

    def compile_each(sources: list[str], **options: Any) -> list[str]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = pool.map(lambda source: compile_all([source], **options), sources)
            return [file for files in objects for file in files]

    compiler.compile = compile_each


class BuildExt(build_ext):
    """Adds what `CEREBRO_BUILD` asks for and explains a missing compiler.

    ``CEREBRO_BUILD`` is a comma-separated list of ``werror`` (warnings are
    errors), ``asan`` (AddressSanitizer and UBSan) and ``debug`` (-O0).
    """

    def build_extensions(self) -> None:
        options = [o for o in os.environ.get("CEREBRO_BUILD", "").split(",") if o]
        unknown = set(options) - {"werror", "asan", "debug"}
        if unknown:
            sys.exit(f"error: CEREBRO_BUILD: unknown option {', '.join(sorted(unknown))}")
        ptx_source = write_ptx_source(self.build_temp)
        for extension in self.extensions:
            extension.sources.append(ptx_source)
            if "werror" in options:
                extension.extra_compile_args.append("-Werror")
            if "debug" in options:
                extension.extra_compile_args.append("-O0")
            if "asan" in options:
                flags = ["-fsanitize=address,undefined", "-fno-omit-frame-pointer"]
                extension.extra_compile_args += flags
                extension.extra_link_args += flags
        compile_side_by_side(self.compiler)
        try:
            super().build_extensions()
        except (CCompilerError, ExecError, PlatformError) as error:
            sys.exit(f"{error}\n{NO_COMPILER}")


if sys.platform == "win32":
    sys.exit("error: Cerebro runs on Linux and macOS. On Windows, install it inside WSL.")

setup(
    ext_modules=[
        Extension(
            "cerebro._core",
            sources=c_sources(),
            depends=c_dependencies(),
            include_dirs=[
                *("csrc/core", "csrc/cuda", "csrc/python", "csrc/third_party"),
                numpy.get_include(),
            ],
            define_macros=[("_GNU_SOURCE", "1")],
            # Contraction off: fused multiply-adds would give different bits than the frameworks.
            extra_compile_args=[
                "-std=c11",
                "-O3",
                "-g",
                "-fvisibility=hidden",
                "-ffp-contract=off",
                # Raw values are read as integers of their size, as in Python's headers.
                "-fno-strict-aliasing",
                *WARNINGS,
            ],
            libraries=["m", "pthread"] + (["dl"] if sys.platform == "linux" else []),
        )
    ],
    cmdclass={"build_ext": BuildExt},
)
