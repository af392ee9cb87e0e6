"""A search in a process that multiprocessing has started anew is that of the program itself."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, multiprocessing, sys
from concurrent.futures import ProcessPoolExecutor
import numpy as np
import cerebro

class Missing(ValueError):
    pass

class Model(dict):
    framework = "numpy"

    def __init__(self, config, scale):
        self["w"] = config["lr"] * scale

    def train_batch(self, batch):
        self["w"] += float(batch["x"].sum()) / 100 + np.random.normal()
        return {"loss": self["w"] ** 2}

    def eval_batch(self, batch):
        return {"loss": self["w"] ** 2}

    def state_dict(self):
        return dict(self)

    def load_state_dict(self, state):
        self.update(state)

class Builders:
    @staticmethod
    def build(config):
        if config["lr"] == 0.4:
            raise Missing("no such rate")
        return Model(config, scale=FACTOR)

FACTOR = 2.0
build = Builders.build

def work(workers, run):
    data = cerebro.shard({"x": np.arange(40.0)}, "data", shards=4, exist_ok=True, progress=False)
    options = dict(epochs=2, batch_size=4, validation=0.25, progress=False, workers=workers)
    result = cerebro.search(
        build, {"lr": [0.1, 0.2, 0.4]}, data, searcher="grid", run=run, **options
    )
    facts = dict(
        hashes=[[e["state_hash"] for e in trial.history] for trial in result.trials],
        errors=[trial.error for trial in result.trials],
        raised=result.trials[2].record.raised.bases,
        build=result.saved.meta["build"],
        loaded=result.best.load()["w"],
        replayed=cerebro.replay(result.path, 0).identical,
    )
    further = cerebro.resume(result.path, epochs=3, workers=workers, progress=False)
    facts["further"] = further.trials[0].state_hash
    print("FACTS", json.dumps(facts), flush=True)

def main():
    how, workers, run = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if how == "directly":
        return work(workers, run)
    context = multiprocessing.get_context(how.removesuffix("-pool"))
    if how.endswith("-pool"):
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            return pool.submit(work, workers, run).result()
    child = context.Process(target=work, args=(workers, run))
    child.start()
    child.join()
    sys.exit(child.exitcode)

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """Run the program in some way; return what its search was."""
    folder = tmp_path_factory.mktemp("program")
    (folder / "pkg").mkdir()
    (folder / "pkg" / "__init__.py").touch()
    for file in (folder / "train.py", folder / "pkg" / "train.py"):
        file.write_text(PROGRAM)

    def run(program, how, workers):
        name = f"run-{len(list(folder.glob('run-*')))}"
        command = [sys.executable, "-W", "ignore", *program, how, str(workers), name]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("FACTS ")]
        return json.loads(line.removeprefix("FACTS "))

    return run


@pytest.mark.parametrize("program", [["train.py"], ["-m", "pkg.train"]], ids=["file", "module"])
def test_a_search_in_a_spawned_process_matches_the_program_itself(facts, program):
    expected = facts(program, "directly", 0)
    assert expected["replayed"] and expected["errors"][2].startswith("Missing: no such rate")
    assert facts(program, "spawn", 2) == expected
    assert facts(program, "forkserver", 0) == expected
    assert facts(program, "spawn-pool", 1) == expected
