"""Runs the code blocks of pages of the documentation, each page as one program.

Reads the path of a page per line of its standard input, and answers with a line of JSON: seconds
and, if a block failed, the traceback, whose line numbers are the page's. All pages share a process,
so that they also share its workers; each has a `__main__` and a working directory of its own.

    echo docs/start.md | python tests/docs/kernel.py
"""

from __future__ import annotations

import json
import linecache
import os
import re
import sys
import tempfile
import time
import traceback
import types
from pathlib import Path

# A block of Python, or a comment with code that a reader does not see.
BLOCK = re.compile(
    r"(?P<not_run><!-- not run: [^\n]+ -->\n+ *)?"
    r"(?:^(?P<indent> *)```python[^\n]*\n(?P<shown>.*?)^ *```$|^<!-- run\n(?P<hidden>.*?)^-->$)",
    re.MULTILINE | re.DOTALL,
)


def script(text: str) -> str:
    """Return a page's code with every line where the page has it."""
    lines = [""] * (text.count("\n") + 1)
    for block in BLOCK.finditer(text):
        if block["not_run"]:
            continue
        part = "hidden" if block["shown"] is None else "shown"
        first = text.count("\n", 0, block.start(part))
        width = len(block["indent"] or "")
        for number, line in enumerate(block[part].splitlines(), first):
            lines[number] = line[width:]
    return "\n".join(lines)


def run(page: Path) -> dict[str, object]:
    """Run a page's code in an empty folder, as the program `__main__`."""
    began = time.perf_counter()
    home, main, path = Path.cwd(), sys.modules["__main__"], list(sys.path)
    with tempfile.TemporaryDirectory(prefix=f"{page.stem}-", ignore_cleanup_errors=True) as folder:
        program = Path(folder, f"page_{page.stem}.py".replace("-", "_"))
        program.write_text(script(page.read_text(encoding="utf-8")), encoding="utf-8")
        module = types.ModuleType("__main__")
        vars(module).update(__file__=str(program), __builtins__=__builtins__)
        sys.modules["__main__"], sys.argv = module, [str(program)]
        os.chdir(folder)
        error = None
        try:
            code = program.read_text(encoding="utf-8")
            exec(compile(code, str(program), "exec"), vars(module))
        except BaseException:
            error = traceback.format_exc()
        finally:
            if "ray" in sys.modules:  # its processes lie in the folder that is about to go
                sys.modules["ray"].shutdown()
            sys.modules["__main__"], sys.path[:] = main, path
            os.chdir(home)
            linecache.checkcache()
    return {"page": str(page), "seconds": time.perf_counter() - began, "error": error}


def serve() -> None:
    """Answer on the standard output; what pages print goes to the standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(run(Path(line.strip()).absolute())), file=answers, flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    serve()
