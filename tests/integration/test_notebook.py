"""Searches in the kernel of a notebook: the block, an interrupt, a restart, and cells run again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ipykernel")
nbformat = pytest.importorskip("nbformat")
jupyter_client = pytest.importorskip("jupyter_client")

SECONDS = 60  # far more than a cell takes

DEFINE = """
import time
import numpy as np, cerebro
x = np.random.default_rng(0).normal(size=(80, 3)).astype("f4")
y = x @ np.array([1.0, -2.0, 3.0], "f4")

class Model:
    framework = "numpy"

    def __init__(self, config):
        self.config, self.w = config, np.zeros(3)
        if config["lr"] == 9:
            raise ValueError("lr <too> large")

    def train_batch(self, batch):
        time.sleep(self.config.get("wait", 0))
        error = batch["x"] @ self.w - batch["y"]
        self.w = self.w - self.config["lr"] * batch["x"].T @ error / len(error)
        return {"loss": float((error**2).mean())}

    def eval_batch(self, batch):
        return {"loss": float(((batch["x"] @ self.w - batch["y"]) ** 2).mean())}

    def state_dict(self):
        return {"w": self.w}

    def load_state_dict(self, state):
        self.w = np.array(state["w"])
"""

BUILD = """
def build(config):
    return Model(config)
"""

SEARCH = """
result = cerebro.search(build, {"lr": [0.1, 0.3, 9]}, (x, y), epochs=2, validation=0.2,
                        searcher="grid", batch_size=16, workers=1, run="runs/a")
"""

SLOW = """
cerebro.search(build, {"lr": [0.1, 0.3], "wait": 0.05}, (x, y), epochs=400, validation=0.2,
               searcher="grid", batch_size=16, workers=1, run="runs/slow")
"""

SAY_WHEN_IT_WAITS = """
import sys, threading, time
def say_when_it_waits(thread=threading.get_ident()):
    def names(frame):
        while frame is not None:
            yield frame.f_code.co_name
            frame = frame.f_back
    while "_wait" not in list(names(sys._current_frames()[thread])):
        time.sleep(.01)
    print("waits", flush=True)
threading.Thread(target=say_when_it_waits).start()
"""


class Kernel:
    """A notebook: a kernel, and the outputs of its cells as they would be saved."""

    def __init__(self, folder: Path) -> None:
        self.manager, self.client = jupyter_client.manager.start_new_kernel(cwd=str(folder))
        self.cells: list[Any] = []
        self.displays: dict[str, list[Any]] = {}

    def run(self, source: str, until: Callable[[Any], bool] | None = None) -> Any:
        """Run a cell, and return it; with `until`, interrupt it at the first message like that."""
        cell = nbformat.v4.new_code_cell(source)
        self.cells.append(cell)
        self.messages: list[tuple[float, Any]] = []
        begun = time.monotonic()
        request = self.client.execute(source)
        while True:
            message = self.client.get_iopub_msg(timeout=SECONDS)
            if message["parent_header"].get("msg_id") != request:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                return cell
            self.messages.append((time.monotonic() - begun, message))
            if kind == "update_display_data":
                for output in self.displays[content["transient"]["display_id"]]:
                    output["data"] = content["data"]
            elif kind in ("display_data", "execute_result", "stream", "error"):
                output = nbformat.v4.output_from_msg(message)
                cell.outputs.append(output)
                shown = content.get("transient", {}).get("display_id")
                self.displays.setdefault(shown, []).append(output)
            if until is not None and until(message):
                until = None
                self.manager.interrupt_kernel()

    def value(self, expression: str) -> str:
        """Return the text of an expression's value."""
        cell = self.run(expression)
        assert [output.output_type for output in cell.outputs] == ["execute_result"], cell.outputs
        return str(cell.outputs[0]["data"]["text/plain"])

    def restart(self) -> None:
        self.manager.restart_kernel(now=True)
        self.client.wait_for_ready(timeout=SECONDS)

    def notebook(self) -> Any:
        return nbformat.v4.new_notebook(cells=self.cells)


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    made = Kernel(tmp_path_factory.mktemp("notebook"))
    try:
        yield made
    finally:
        made.client.stop_channels()
        with contextlib.suppress(Exception):
            made.manager.shutdown_kernel(now=True)


def html_of(cell: Any) -> list[str]:
    return [
        "".join(output["data"]["text/html"])
        for output in cell.outputs
        if "text/html" in output.get("data", {})
    ]


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.found.append(tag)


def tags(page: str) -> list[str]:
    parser = Tags()
    parser.feed(page)
    return parser.found


def test_a_search_has_one_block_which_is_saved(kernel: Kernel) -> None:
    kernel.run(DEFINE + BUILD)
    cell = kernel.run(SEARCH)
    kinds = [message["msg_type"] for _, message in kernel.messages]
    assert kinds.count("display_data") == 1
    assert kinds.count("update_display_data") >= 3  # each phase, and the end
    first = next(m for _, m in kernel.messages if m["msg_type"] == "display_data")
    assert "writing the data ..." in first["content"]["data"]["text/html"]
    said = [m["content"]["data"]["text/plain"] for _, m in kernel.messages if "display" in
            m["msg_type"]]  # fmt: skip
    assert any("starting 1 worker ... trying the first configuration ..." in text for text in said)
    (block,) = html_of(cell)
    assert "runs/a" in block and ">finished<" in block and "best: trial 1" in block
    assert block.count("<svg") == 2 and "★ 1" in block
    assert "trial 2 failed: ValueError: lr &lt;too&gt; large (cell:12 in __init__)" in block
    assert "script" not in tags(block) and "style" not in tags(block)
    assert "best: trial 1" in cell.outputs[0]["data"]["text/plain"]
    assert not [output for output in cell.outputs if output.output_type != "display_data"]


def test_the_block_of_a_result_and_its_model_are_found_by_name(kernel: Kernel) -> None:
    opened = kernel.run("cerebro.open('runs/a')")
    (block,) = html_of(opened)
    assert "best: trial 1" in block and block.count("<svg") == 2
    assert kernel.value("cerebro.open('runs/a').best.load().config['lr']") == "0.3"
    assert kernel.value("len(result), result[0].number, [t.number for t in result]") == (
        "(3, 0, [0, 1, 2])"
    )


def test_errors_show_only_the_users_line_and_the_message(kernel: Kernel) -> None:
    cell = kernel.run("a = 1\n" + SEARCH.replace('"runs/a"', "'runs/c', metric='acuracy'"))
    lines = "\n".join(cell.outputs[-1]["traceback"]).splitlines()
    assert "did you mean 'accuracy'" in lines[-1]
    assert len(lines) < 14 and not any("cerebro/api" in line for line in lines)
    assert any("cerebro" in line and "search" in line for line in lines)


def test_an_interrupt_is_three_lines_and_the_run_is_resumed(kernel: Kernel) -> None:
    def trains(message: Any) -> bool:
        return "1/400" in message["content"].get("data", {}).get("text/html", "")

    cell = kernel.run(SLOW, until=trains)
    (error,) = (output for output in cell.outputs if output.output_type == "error")
    assert error["ename"] == "KeyboardInterrupt"
    kept, see, resume = error["traceback"]
    assert kept.startswith("interrupted: 2 trials with ") and kept.endswith("kept in runs/slow")
    assert see.endswith("result = cerebro.open('runs/slow')")
    assert resume.endswith("result = cerebro.resume('runs/slow')")
    (block,) = html_of(cell)
    assert ">interrupted<" in block
    assert kernel.value("import sys; sys.last_value.result.status") == "'stopped'"
    assert kernel.value("cerebro.last.status, cerebro.last is sys.last_value.result") == (
        "('stopped', True)"
    )

    kernel.restart()
    cell = kernel.run("import cerebro; cerebro.open('runs/a').best.load()")
    (error,) = cell.outputs
    assert "run the cell that defines it, or pass it as build=" in error["evalue"]
    kernel.run(DEFINE + BUILD)
    changed = DEFINE.replace("time.sleep(self.config.get('wait', 0))", "pass")
    kernel.run(changed + BUILD)  # workers get the definitions of now
    stop = "run = cerebro.resume('runs/slow', workers=0, callbacks=[Stop()], progress='table')"
    kernel.run(
        "class Stop:\n def on_epoch_end(self, trial, metrics): trial.epoch > 1 and "
        "cerebro.open('runs/slow').stop()"
    )
    cell = kernel.run(stop)
    assert [output.output_type for output in cell.outputs] == ["display_data"], cell.outputs
    assert ">stopped<" in html_of(cell)[0]
    changed = BUILD.replace("    return", "    config = dict(config)\n    return")
    cell = kernel.run(changed + "model = cerebro.open('runs/a').best.load()")
    (warning,) = cell.outputs
    assert "the source of build (__main__:build) has changed" in warning["text"]


def test_the_block_of_a_background_search_follows_its_store(kernel: Kernel) -> None:
    kernel.run(DEFINE + BUILD)
    background = SLOW.replace("cerebro.search(build", "run = cerebro.search(build")
    background = background.replace('"runs/slow"', '"runs/far", background=True')
    cell = kernel.run(background)
    assert [output.output_type for output in cell.outputs] == ["display_data"], cell.outputs
    wait = "import time\nwhile run.is_running and not len(cerebro.open(run.folder)): time.sleep(.1)"
    kernel.run(wait + "\ntime.sleep(2.5)")  # the block of the other cell is drawn meanwhile
    (block,) = html_of(cell)
    assert ">running<" in block and " so far" in block and block.count("<tr") == 3
    cell = kernel.run(SAY_WHEN_IT_WAITS + "run.result()", until=lambda m: m["msg_type"] == "stream")
    assert cell.outputs[-1]["traceback"] == [
        f"stopped waiting: the search goes on in {folder_of(kernel)}/runs/far",
        "to wait again:  run.result()",
        "to stop it:     run.stop()",
    ]
    kernel.restart()
    kernel.run("import cerebro; run = cerebro.Run('runs/far')")
    assert kernel.value("run.is_running") == "True"
    (block,) = html_of(kernel.run("run"))
    assert ">running<" in block and "% done · " in block
    assert kernel.value("run.stop(); run.result(60).status, cerebro.last.status") == (
        "('stopped', 'stopped')"
    )
    wrong = kernel.run(DEFINE + BUILD + SEARCH.replace('"runs/a"', '"runs/d", background=True,'
                       'metric="acuracy"'))  # fmt: skip
    lines = "\n".join(wrong.outputs[-1]["traceback"]).splitlines()
    assert "did you mean 'accuracy'" in lines[-1] and len(lines) < 14


def folder_of(kernel: Kernel) -> str:
    return kernel.value("__import__('os').getcwd()").strip("'")


def test_a_cell_is_run_again(kernel: Kernel) -> None:
    kernel.run(DEFINE + BUILD)
    broken = SEARCH.replace("[0.1, 0.3, 9]", "[9]").replace("runs/a", "runs/b")
    cell = kernel.run(broken)
    assert cell.outputs[-1]["ename"] == "RunError"
    cell = kernel.run(SEARCH.replace("runs/a", "runs/b"))  # it had no finished epoch
    assert ">finished<" in html_of(cell)[0] and len(cell.outputs) == 1
    refused = kernel.run(SEARCH.replace("runs/a", "runs/b"))
    assert "if_exists='new'" in refused.outputs[-1]["evalue"]
    kernel.run(
        SEARCH.replace("'runs/a'", "'runs/b'").replace('"runs/a"', '"runs/b", if_exists="new"')
    )
    assert kernel.value("result.path.name") == "'b-2'"


def test_nbconvert_keeps_the_blocks(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the other tests: their cells are the notebook."""
    nbconvert = pytest.importorskip("nbconvert")
    # Next to the package, if this environment borrows it from another one.
    monkeypatch.setenv("JUPYTER_PATH", str(Path(nbconvert.__file__).parents[4] / "share/jupyter"))
    exporter = nbconvert.HTMLExporter()
    cells = nbformat.from_dict(nbformat.reads(nbformat.writes(kernel.notebook()), as_version=4))
    page, _ = exporter.from_notebook_node(cells)
    blocks = [block for cell in kernel.cells for block in html_of(cell)]
    assert len(blocks) > 4
    assert tags(page).count("polyline") == sum(block.count("<polyline") for block in blocks) > 4
    assert page.count(">runs/a</b>") == sum(block.count(">runs/a</b>") for block in blocks) == 2
    assert "trial 2 failed: ValueError: lr &lt;too&gt; large (cell:12 in __init__)" in page
