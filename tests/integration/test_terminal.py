"""A search in a real terminal: what it says first, and what an interrupt leaves."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from typing import Any

import cerebro

SEARCH = """
import sys, time
import numpy as np
import cerebro

class Model:
    cpu_only = True
    def train_batch(self, batch):
        time.sleep(0.01)
        return {"loss": 1.0}
    eval_batch = train_batch
    def state_dict(self):
        return {"weights": np.zeros(1)}
    def load_state_dict(self, state):
        pass

x = np.zeros((40, 1), "f4")
cerebro.search(lambda config: Model(), {}, (x, x[:, 0]), epochs=1000, n_trials=4, batch_size=4,
               validation=0.2, workers=int(sys.argv[2]), run=sys.argv[1] + "/run")
"""


def test_an_interrupt_leaves_the_terminal_as_it_was(tmp_path: Any) -> None:
    master, slave = pty.openpty()
    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 70, 0, 0))
    before = termios.tcgetattr(slave)
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SEARCH, str(tmp_path), "0"],
        stdin=slave, stdout=slave, stderr=slave, env={**os.environ, "TERM": "xterm-256color"},
    )  # fmt: skip
    text = ""
    while not re.search(r"running.* left\b", text, re.DOTALL):  # the table is there
        text += os.read(master, 65536).decode()
        fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 60, 0, 0))
    process.send_signal(signal.SIGINT)
    process.wait(60)
    assert termios.tcgetattr(slave) == before
    os.close(slave)
    while True:
        try:
            text += os.read(master, 65536).decode()
        except OSError:  # all is read
            break
    os.close(master)
    words = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert words.split("...")[0].strip() == "writing the data"
    assert "trying the first configuration" in words
    lines = words.splitlines()
    bar = max(at for at, line in enumerate(lines) if "━" in line)
    assert re.search(r" 0% done   interrupted   \d+ s so far$", lines[bar])
    assert "interrupted: 4 trials with " in "".join(lines[bar + 1 :])  # below the table
    assert words.splitlines()[-1].endswith("cerebro.resume('" + f"{tmp_path}/run', build)")
    assert words.endswith("\n")
    assert set(re.findall(r"\x1b\[[0-9;?]*([A-Za-z])", text)) <= set("AKJm")  # nothing to restore


def test_a_search_outlives_its_terminal(tmp_path: Any) -> None:
    master, slave = pty.openpty()
    program = SEARCH.replace("epochs=1000", "epochs=20")
    process = subprocess.Popen(
        [sys.executable, "-c", f"{program}\nprint('the end', file=sys.stderr)", str(tmp_path), "0"],
        stdin=slave, stdout=slave, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(slave)
    text = ""
    while "running" not in text:
        text += os.read(master, 65536).decode()
    os.close(master)  # a process that is not in the terminal's session gets no SIGHUP
    _, errors = process.communicate()
    assert errors.count("the display failed, so the search continues without it") == 1
    assert "the end" in errors
    assert cerebro.open(tmp_path / "run").status == "finished"


def test_a_breakpoint_in_a_unit_talks_to_the_terminal(tmp_path: Any) -> None:
    """With ``workers=0``, although what the unit prints goes to its log."""
    program = SEARCH.replace("time.sleep(0.01)", "stop()").replace("epochs=1000", "epochs=1")
    program = program.replace("class Model", "stops = []\nclass Model").replace(
        "x = np", "def stop():\n    stops or (stops.append(1), breakpoint())\n\nx = np"
    )
    # Ray sets the variable, which chooses another debugger.
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONBREAKPOINT"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(tmp_path), "0"],
        env=variables, input="p 6 * 7\nc\n", capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "(Pdb) 42\n" in done.stdout
