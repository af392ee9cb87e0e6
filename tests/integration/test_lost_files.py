"""Files of a run are removed while it is trained: nobody else may train it, and no row is lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
from resumable import hashes, search

import cerebro
import cerebro.cli as cli
from cerebro.errors import InputError
from cerebro.run.store import Store, writing
from cerebro.run.store.writing import EVENT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs abstract sockets")

FIRST = """
import sys
sys.path.insert(0, sys.argv[3])
import resumable
class Wait:
    left = 9
    def on_unit_end(self, trial, metrics):
        self.left -= 1
        if self.left == 0:
            print("reached", flush=True)
            sys.stdin.readline()
result = resumable.search(sys.argv[1], sys.argv[2], workers=1, callbacks=[Wait()])
print(resumable.hashes(result))
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(320, 3))
    folder = tmp_path_factory.mktemp("lost") / "data"
    cerebro.shard({"x": x, "y": x @ [1.0, -2.0, 0.5]}, folder, shards=4)
    return folder


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, data):
    return hashes(search(tmp_path_factory.mktemp("lost") / "run", data))


def program(code, *arguments, **variables):
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)],
        env=os.environ | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("locks", [None, "granted"])
def test_a_second_process_is_refused_although_the_locks_file_is_removed(
    tmp_path, data, undisturbed, locks, locks_shim
):
    run = tmp_path / "run"
    variables = {} if locks is None else {"LD_PRELOAD": str(locks_shim), "LOCKS": locks}
    here = Path(__file__).parent
    with program(FIRST, run, data, here, **variables) as first:
        assert first.stdout.readline() == "reached\n"
        for file in run.glob("*.lock"):
            file.unlink()
        refused = subprocess.run(
            [sys.executable, "-m", "cerebro", "resume", run],
            env=os.environ
            | {"PYTHONPATH": f"{here}:{os.environ.get('PYTHONPATH', '')}"}
            | variables,
            capture_output=True,
            text=True,
        )
        assert refused.returncode != 0
        assert f"is being trained by process {first.pid} on" in refused.stderr
        first.stdin.write("\n")
        first.stdin.flush()
        assert first.stdout.read().strip() == str(undisturbed)
    assert (run / "owner.lock").read_text() == ""  # made again, and released


def remove(file):
    file.unlink(missing_ok=True)


class Remove:
    def __init__(self, run, *names, at=(9,), by=remove):
        self.run, self.names, self.at, self.by = run, names, at, by
        self.units = 0

    def on_unit_end(self, trial, metrics):
        self.units += 1
        if self.units in self.at:
            for name in self.names:
                self.by(self.run / name)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "names",
    [
        ["run.sqlite"],
        ["run.sqlite-wal"],
        ["run.sqlite-shm"],
        ["run.sqlite", "run.sqlite-wal", "run.sqlite-shm"],
    ],
    ids=len,
)
def test_a_store_that_is_removed_is_written_again(tmp_path, data, undisturbed, names, workers):
    run = tmp_path / "run"
    with pytest.warns(UserWarning, match=f"{names[0]}.* was removed or replaced during the run"):
        result = search(run, data, workers=workers, callbacks=[Remove(run, *names, at=(9, 30))])
    assert hashes(result) == undisturbed == hashes(cerebro.open(run))
    events = [event for event in result.events() if event["kind"] == EVENT]
    assert len(events) in (1, 2)  # both may be noticed at one commit
    assert names[0] in events[0]["text"]
    assert cli.main(["verify", str(run)]) == 0
    assert not [file.name for file in run.glob("run.sqlite?*")]


def test_a_removed_store_without_a_wal_is_written_again(tmp_path, data, undisturbed, monkeypatch):
    monkeypatch.setattr(writing, "journal_mode", lambda folder, disk: "DELETE")
    run = tmp_path / "run"
    with pytest.warns(UserWarning, match=r"run\.sqlite was removed"):
        result = search(run, data, callbacks=[Remove(run, "run.sqlite")])
    assert hashes(result) == undisturbed


def test_a_file_in_place_of_the_store_is_kept_aside(tmp_path, data, undisturbed):
    run = tmp_path / "run"

    def replace(file):
        (run / "other").write_text("of somebody else")
        (run / "other").rename(file)

    with pytest.warns(UserWarning, match="was removed or replaced"):
        result = search(run, data, callbacks=[Remove(run, "run.sqlite", by=replace)])
    assert hashes(result) == undisturbed
    assert (run / "run.sqlite.replaced").read_text() == "of somebody else"


def test_a_run_whose_store_was_written_again_can_be_killed_and_resumed(tmp_path, data, undisturbed):
    run = tmp_path / "run"
    code = FIRST.replace(
        "self.left -= 1",
        "self.left -= 1\n"
        "        if self.left == 3: import os; os.unlink(sys.argv[1] + '/run.sqlite')",
    )
    with program(code, run, data, Path(__file__).parent) as first:
        assert first.stdout.readline() == "reached\n"
        while not (run / "run.sqlite").exists():
            assert first.poll() is None
        first.kill()
    import resumable

    assert hashes(cerebro.resume(run, resumable.build, progress=False)) == undisturbed


def remove_folder(run):
    while run.exists():  # the store may write into it meanwhile
        shutil.rmtree(run, ignore_errors=True)


@pytest.mark.parametrize("lose", [remove_folder, lambda run: run.rename(run.with_name("other"))])
def test_a_run_whose_folder_is_removed_or_renamed_says_so(tmp_path, data, lose):
    run = tmp_path / "run"
    with pytest.raises(OSError, match=rf"^{run} is gone: the run's folder was deleted or renamed"):
        search(run, data, callbacks=[Remove(tmp_path, "run", by=lose)])
    assert not run.exists()


def test_a_store_is_found_removed_when_it_is_closed(tmp_path):
    store = Store.create(tmp_path, {"a": 1})
    store.set_meta("b", 2)
    store.flush()
    (tmp_path / "run.sqlite").unlink()
    with pytest.warns(UserWarning, match=r"run\.sqlite was removed"):
        store.close()
    assert (tmp_path / "run.sqlite").stat().st_size > 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_the_error_for_a_user_without_write_access_says_what_to_do(tmp_path):
    code = """
import os, sys, cerebro
from pathlib import Path
from cerebro.run.owner import Owner
os.chdir(sys.argv[1])
os.setresuid(65534, 65534, 65534)
try:
    Owner.take_over(Path("run"))
except PermissionError as error:
    print(error)
"""
    tmp_path.chmod(0o755)
    (tmp_path / "run").mkdir()
    for is_new in (True, False):
        if not is_new:
            (tmp_path / "run" / "owner.lock").touch(0o644)
        with program(code, tmp_path) as process:
            text = process.stdout.read()
        assert "this user cannot write run/owner.lock" in text
        assert "have its owner resume it" in text


def test_a_run_on_a_file_system_without_locks_is_refused_with_the_reason(
    tmp_path, data, locks_shim
):
    code = "import sys, cerebro\ntry:\n    cerebro.open(sys.argv[1])\n"
    code += "except cerebro.errors.CerebroError as error:\n    print(error)"
    run = tmp_path / "run"
    search(run, data)
    with program(code, run, LD_PRELOAD=str(locks_shim), LOCKS="37") as process:
        assert "has no locks, which a run needs" in process.stdout.read()
    with (
        warnings.catch_warnings(),
        program(
            FIRST,
            tmp_path / "new",
            data,
            Path(__file__).parent,
            LD_PRELOAD=str(locks_shim),
            LOCKS="37",
        ) as process,
    ):
        assert process.stdout.read() == ""
    assert not (tmp_path / "new").exists()


def test_one_process_may_not_train_a_run_twice(tmp_path, data):
    run = tmp_path / "run"

    def resume(file):
        file.unlink()
        with pytest.raises(InputError, match="is being trained by this process"):
            cerebro.resume(run, progress=False)

    search(run, data, callbacks=[Remove(run, "owner.lock", by=resume)])
