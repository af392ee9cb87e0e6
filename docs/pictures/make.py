"""Makes the pictures of the documentation, each from a real run.

    python docs/pictures/make.py [FOLDER]

Needs the extra ``demo``, Pillow, and Chromium for the picture of the notebook block (without it,
that one stays as it is). Takes about a minute.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import terminal
from matplotlib.figure import Figure
from PIL import Image, ImageOps

import cerebro

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LARGEST = 300_000
COLUMNS, ROWS = 100, 26
COLORS = ["#4c72b0", "#dd8452", "#55a868"]


def main() -> None:
    """Make all pictures, and check their sizes."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else HERE).absolute()
    out.mkdir(exist_ok=True)
    for make in (demo, first_search, hops):
        with tempfile.TemporaryDirectory() as name:
            os.chdir(name)  # runs and data are shown by relative paths
            make(Path(name), out)
    for path in sorted([*out.glob("*.gif"), *out.glob("*.png")]):
        size = path.stat().st_size
        print(f"{path.name}: {size:,} bytes")
        if size > LARGEST:
            raise SystemExit(f"{path} is larger than {LARGEST:,} bytes")


def demo(folder: Path, out: Path) -> None:
    """Record the demo in a terminal, and draw its run."""
    command = [sys.executable, "-m", "cerebro", "demo", "--run", "runs/demo", "--progress", "table"]
    screens = terminal.record(command, folder, COLUMNS, ROWS)
    live = [screen for screen in screens if any(map(_is_table, screen[1]))]
    ends = next(i for i, screen in enumerate(live) if any(map(_is_end, screen[1])))
    terminal.film(live[: ends + 1], out / "search.gif", COLUMNS, ROWS, seconds=12)
    middle = live[ends // 2][1]
    terminal.few_colors(terminal.draw(middle, COLUMNS, len(middle))).save(out / "terminal.png")
    result = cerebro.open("runs/demo")
    for kind in ("curves", "gantt", "parallel", "importance", "slice"):
        save_plot(result, kind, out)


def save_plot(result: cerebro.Result, kind: str, out: Path) -> None:
    """Save one plot of a result in few colors."""
    path = out / f"{kind}.png"
    result.plot(kind=kind).savefig(path, dpi=90)
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)


def _is_table(line: list[tuple[str, str, bool]]) -> bool:
    return "━" in _text(line)


def _is_end(line: list[tuple[str, str, bool]]) -> bool:
    return "finished after" in _text(line)


def _text(line: list[tuple[str, str, bool]]) -> str:
    return "".join(character for character, _, _ in line)


def first_search(folder: Path, out: Path) -> None:
    """Run README's first program, and take a picture of its run's block."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    program = folder / "first.py"
    program.write_text(readme.split("```python\n", 1)[1].split("```", 1)[0], encoding="utf-8")
    subprocess.run([sys.executable, program], check=True, capture_output=True)
    (run,) = Path("runs").iterdir()
    notebook(cerebro.open(run), folder, out / "notebook.png")


def notebook(result: cerebro.Result, folder: Path, path: Path) -> None:
    """Take a picture of a result's block as a notebook shows it."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print(f"{path.name}: not made again, because there is no Chromium")
        return
    page = folder / "block.html"
    style = "body { font: 14px sans-serif; margin: 12px }"
    body = result._repr_html_()
    page.write_text(f"<meta charset=utf-8><style>{style}</style>{body}", encoding="utf-8")
    command = [browser, "--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1000,620"]
    subprocess.run(
        [*command, f"--screenshot={path}", page.as_uri()], check=True, capture_output=True
    )
    picture = Image.open(path).convert("RGB")
    left, top, right, bottom = ImageOps.invert(picture).getbbox()
    picture.crop((0, 0, right + left, bottom + top)).quantize(64).save(path)


def hops(folder: Path, out: Path) -> None:
    """Draw three trials on two workers, unit by unit, from the record of a run."""
    sys.path.insert(0, str(ROOT / "tests" / "docs"))
    from given import build, digits

    space = {"lr": [0.01, 0.02, 0.03], "hidden": 16, "batch_size": 8}
    result = cerebro.search(
        build,
        space,
        digits("data/hops", shards=4),
        epochs=1,
        searcher="grid",
        workers=2,
        run="runs/hops",
        progress=False,
    )
    units = sorted(result.units(), key=lambda unit: unit["start"])
    figure = Figure(figsize=(9, 2.3), dpi=100, layout="constrained", facecolor="white")
    axes = figure.add_subplot()
    begin = units[0]["start"]
    for unit in units:
        start, width = 1000 * (unit["start"] - begin), 1000 * (unit["end"] - unit["start"])
        axes.broken_barh(
            [(start, width)],
            (unit["worker"] - 0.4, 0.8),
            facecolor=COLORS[unit["trial"]],
            edgecolor="white",
        )
        label = f"trial {unit['trial']}\npart {unit['part']}"
        axes.text(
            start + width / 2,
            unit["worker"],
            label,
            ha="center",
            va="center",
            color="white",
            size=7,
        )
    axes.set_yticks([0, 1], ["worker 0", "worker 1"])
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds since the first unit")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(out / "hops.png")


if __name__ == "__main__":
    main()
