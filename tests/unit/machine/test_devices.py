"""Names of devices, what is there, who works on which: by a list that says what there is."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from cerebro import arguments
from cerebro.api.settings import devices_of
from cerebro.arguments import worker_count
from cerebro.data.order import POOL, EpochOrder
from cerebro.errors import InputError
from cerebro.executors.seats import SeatedShards, fits_gpu_memory, place_pools, set_memory_shares
from cerebro.machine import cuda, devices
from cerebro.machine.devices import Device, Found, choose_devices
from cerebro.worker.messages import RunContext, RunFolders, WorkerShare

TWO = Found(
    (Device("cuda:0", "GPU A", 80, "0"), Device("cuda:1", "GPU B", 60, "1")),
)
NONE = Found(problem="no NVIDIA driver is loaded")


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ("auto", ("cuda:0", "cuda:1")),
        (None, ("cuda:0", "cuda:1")),
        (["auto"], ("cuda:0", "cuda:1")),
        ("cuda", ("cuda:0", "cuda:1")),
        ("cpu", ("cpu",)),
        (["cpu"], ("cpu",)),
        ("cuda:1", ("cuda:1",)),
        ("cuda:01", ("cuda:1",)),
        (["cuda:1", "cuda:0"], ("cuda:1", "cuda:0")),
        (("cuda:0",), ("cuda:0",)),
    ],
)
def test_devices_are_chosen_from_two_gpus(wanted, chosen):
    assert choose_devices(wanted, TWO) == chosen


def test_torch_devices_are_accepted():
    torch = pytest.importorskip("torch")
    assert choose_devices(torch.device("cuda:1"), TWO) == ("cuda:1",)
    assert choose_devices([torch.device("cuda", 0)], TWO) == ("cuda:0",)
    assert choose_devices(torch.device("cpu"), TWO) == ("cpu",)


def test_without_a_gpu_auto_is_the_cpu():
    assert choose_devices("auto", NONE) == ("cpu",)
    assert choose_devices("cpu", NONE) == ("cpu",)


@pytest.mark.parametrize("wanted", ["cuda", "cuda:0", ["cuda:0", "cuda:1"]])
def test_without_a_gpu_the_error_says_why_and_what_to_do(wanted):
    with pytest.raises(InputError, match=r"devices=.*no NVIDIA driver.*'auto' or 'cpu'.*doctor"):
        choose_devices(wanted, NONE)


def test_a_missing_gpu_is_refused():
    with pytest.raises(InputError, match=r"no 'cuda:2' here, only cuda:0, cuda:1"):
        choose_devices(["cuda:0", "cuda:2"], TWO)


@pytest.mark.parametrize(
    "wanted", ["gpu", "cuda:", "cuda:x", "cuda:-1", "", "mps", 0, 2, [0], ["cpu", "cuda:0"],
               ["auto", "cuda:0"], ["cuda", "cuda:1"], "cuda:0,cuda:1", "cpu:0", {"cuda:0"}]
)  # fmt: skip
def test_invalid_device_names_are_refused(wanted):
    with pytest.raises(InputError, match="devices must be"):
        choose_devices(wanted, TWO)


@pytest.mark.parametrize(
    ("wanted", "cure"),
    [([0], "'cuda:0'"), ((1,), "'cuda:1'"), (0, "'cuda:0'"), (2, "'cuda:2', .* a list of GPUs"),
     ("0", "'cuda:0'"), (["0"], "'cuda:0'"), ([0, 1], r"\['cuda:0', 'cuda:1'\]"),
     ("0,1", r"\['cuda:0', 'cuda:1'\]"), ("gpu", "'cuda' for all GPUs")]
)  # fmt: skip
def test_the_error_for_gpu_numbers_suggests_their_names(wanted, cure):
    with pytest.raises(InputError, match=rf"devices must be .*: give {cure}"):
        choose_devices(wanted, TWO)
    with pytest.raises(InputError) as caught:
        choose_devices([-1], TWO)
    assert "give" not in str(caught.value)


@pytest.mark.parametrize("wanted", [[], ()])
def test_an_empty_device_list_is_refused(wanted):
    with pytest.raises(
        InputError, match=r"^devices=[\[(][])] names no device: give 'auto', 'cpu', or"
    ):
        choose_devices(wanted, TWO)


@pytest.mark.parametrize("wanted", [["cuda:0", "cuda:0"], ["cuda:1", "cuda:01"]])
def test_each_device_once(wanted):
    with pytest.raises(InputError, match="each device once"):
        choose_devices(wanted, TWO)


GPUS = ("cuda:0", "cuda:1")


@pytest.mark.parametrize(
    ("workers", "each", "count"),
    [(None, None, 2), (None, 3, 6), (5, None, 5), (1, None, 1), (0, None, 0), (4, 2, 4)],
)
def test_workers_of_gpus(workers, each, count):
    assert worker_count(workers, 1, GPUS, each) == count


def test_workers_and_workers_per_device_must_agree():
    with pytest.raises(InputError, match="workers=3 and workers_per_device=2 on 2 device"):
        worker_count(3, 1, GPUS, 2)
    with pytest.raises(InputError, match="workers=0 and workers_per_device=2"):
        worker_count(0, 1, GPUS, 2)
    with pytest.raises(InputError, match="workers_per_device must be a whole number"):
        worker_count(None, 1, GPUS, 0)


def test_cpu_worker_count_ignores_workers_per_device(monkeypatch):
    monkeypatch.setattr(arguments, "usable_cores", lambda: 8)
    assert worker_count(None, 2) == 4
    assert worker_count(None, 2, ("cpu",), 3) == 4  # asked for GPUs, by a script for any machine
    assert worker_count(5, 2) == 5


def test_devices_must_fit_the_executor(monkeypatch):
    monkeypatch.setattr(devices, "lookup", lambda: TWO)
    assert devices_of("auto", 2, None) == GPUS
    assert devices_of("auto", None, object()) == ("cpu",)
    assert devices_of("cpu", None, object()) == ("cpu",)
    gpus = SimpleNamespace(devices=("cuda",))
    assert devices_of("auto", None, gpus) == devices_of("cuda", None, gpus) == ("cuda",)
    assert devices_of(None, None, gpus) == ("cuda",)
    assert devices_of("cpu", None, gpus) == ("cpu",)
    with pytest.raises(InputError, match=r"workers of executor= have no GPUs: .*{'GPU': 1}"):
        devices_of("cuda", None, object())
    for executor in (gpus, object()):
        with pytest.raises(InputError, match="executor= trains on others: give 'auto'"):
            devices_of("cuda:1", None, executor)
        with pytest.raises(InputError, match="workers_per_device is for GPUs of this machine"):
            devices_of("auto", 2, executor)
    with pytest.raises(InputError, match="workers_per_device is for GPUs"):
        devices_of("cpu", 2, None)


def test_seats_go_round_the_devices(monkeypatch):
    monkeypatch.setattr(devices, "lookup", lambda: TWO)
    a, b = TWO.devices
    assert devices.assign_devices(GPUS, 5) == [a, b, a, b, a]
    assert devices.assign_devices(("cuda:1",), 2) == [b, b]
    assert devices.assign_devices(("cpu",), 2) == [None, None]
    with pytest.raises(InputError, match="no 'cuda:7'"):
        devices.assign_devices(("cuda:7",), 1)


def test_a_run_resumes_on_its_devices_or_similar_ones(monkeypatch):
    monkeypatch.setattr(devices, "lookup", lambda: TWO)
    assert devices.choose_resume_devices(("cuda:1",)) == ("cuda:1",)
    assert devices.choose_resume_devices(("cuda:1", "cuda:5")) == ("cuda:1",)
    assert devices.choose_resume_devices(("cuda:4",)) == GPUS
    assert devices.choose_resume_devices(("cpu",)) == ("cpu",)
    monkeypatch.setattr(devices, "lookup", lambda: NONE)
    assert devices.choose_resume_devices(GPUS) == ("cpu",)


@pytest.mark.parametrize(
    ("index", "visible", "alone"),
    [(1, None, "1"), (0, "3", "3"), (1, "2, 5", "5"), (1, "GPU-a,GPU-b", "GPU-b")],
)
def test_a_worker_sees_its_gpu_alone(index, visible, alone):
    assert devices.restrict_visible(index, visible) == alone


def test_worker_variables_are_set_before_cuda_starts(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    device = Device("cuda:1", visible="7")
    assert devices.make_variables(device) == {
        "CUDA_VISIBLE_DEVICES": "7",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    }
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert devices.make_variables(device)["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_without_a_driver_no_lookup_program_starts(monkeypatch):
    monkeypatch.setattr(devices, "SIGNS_OF_A_DRIVER", ())
    monkeypatch.setattr(devices.subprocess, "run", lambda *_, **__: pytest.fail("started"))
    assert devices._lookup.__wrapped__(None) == Found(problem="no NVIDIA driver is loaded")


def test_without_visible_devices_no_lookup_program_starts(monkeypatch, tmp_path):
    monkeypatch.setattr(devices, "SIGNS_OF_A_DRIVER", (str(tmp_path),))
    monkeypatch.setattr(devices.subprocess, "run", lambda *_, **__: pytest.fail("started"))
    assert devices._lookup.__wrapped__(" ").problem == "CUDA_VISIBLE_DEVICES is empty"


@pytest.mark.parametrize(
    ("printed", "found"),
    [
        ('[[["X", 80], ["Y", 40]], ""]', [("cuda:0", "X", 80, "4"), ("cuda:1", "Y", 40, "6")]),
        ('a banner\n[[], "PyTorch finds no GPU that it can use"]', "PyTorch finds no GPU"),
        ('[[["X", 80, {"cudnn": 91300}]], ""]', [("cuda:0", "X", 80, "4")]),
        ("", "looking for GPUs failed"),
        ("nonsense", "looking for GPUs failed"),
    ],
)
def test_the_output_of_the_lookup_program_is_parsed(monkeypatch, tmp_path, printed, found):
    monkeypatch.setattr(devices, "SIGNS_OF_A_DRIVER", (str(tmp_path),))
    monkeypatch.setattr(devices, "is_importable", lambda name: True)
    monkeypatch.setattr(
        devices.subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=printed + "\n")
    )
    result = devices._lookup.__wrapped__("4,6")
    if isinstance(found, str):
        assert result.devices == () and found in result.problem
    else:
        assert result.devices == tuple(Device(*row) for row in found)
        assert result.devices[0].about == ({"cudnn": 91300} if "cudnn" in printed else {})


def test_the_lookup_program_runs_here():
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", devices.PROGRAM], capture_output=True, text=True, check=True
    )
    rows, problem = json.loads(done.stdout)
    assert rows or problem


@pytest.fixture
def cuda_torch(monkeypatch, tmp_path, cudart_standin, cudnn_standin):
    """A PyTorch for CUDA that cannot be imported; return what the lookup program prints."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('it is imported')")
    (tmp_path / "nvidia" / "cudnn" / "lib").mkdir(parents=True)
    library = tmp_path / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9"
    shutil.copy(cudnn_standin, library)
    monkeypatch.setenv(cuda.OVERRIDE, str(cudart_standin))

    def look(built_for, *, cudnn=True):
        (tmp_path / "torch" / "version.py").write_text(f"cuda = {built_for!r}")
        if not cudnn:
            library.unlink()
        path = os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]])
        done = subprocess.run(
            [sys.executable, "-c", devices.PROGRAM],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(done.stdout)

    return look


def test_gpus_are_found_without_importing_pytorch(cuda_torch):
    rows, problem = cuda_torch("13.0")
    about = {
        "device": "Stand-in 0",
        "capability": "8.6",
        "multiprocessors": 2,
        "runtime": "13.0",
        "cudnn": 91300,
    }
    assert problem == "" and rows[0] == ["Stand-in 0", 10**9, about]


@pytest.mark.parametrize(("built_for", "cudnn"), [("11.8", True), (None, True), ("13.0", False)])
def test_pytorch_itself_is_asked_if_only_it_knows(cuda_torch, built_for, cudnn):
    assert cuda_torch(built_for, cudnn=cudnn) == [[], "PyTorch cannot use it: it is imported"]


def test_the_first_devices_libraries_are_described(monkeypatch):
    known = Found((Device("cuda:0", about={"cudnn": 1}), Device("cuda:1", about={"cudnn": 2})))
    monkeypatch.setattr(devices, "lookup", lambda: known)
    assert devices.describe_device(("cuda:1", "cuda:0")) == {"cudnn": 2}
    assert devices.describe_device(("cuda:5",)) == devices.describe_device(("cuda",)) == {}


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("variable", [None, ":16:8"])
def test_cublas_started_with_other_settings_warns(monkeypatch, started, variable):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
    monkeypatch.setattr(torch.cuda, "device", lambda name: nullcontext())
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", variable or "")
    if variable is None:
        monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            with devices.use_device("cuda:0"):
                assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == (variable or ":4096:8")
        with devices.use_device("cpu"):
            pass
    texts = [str(warning.message) for warning in told]
    assert len(texts) == (1 if started and variable is None else 0)
    assert all("has started in this process without CUBLAS_WORKSPACE_CONFIG" in t for t in texts)


# --- shards at seats -------------------------------------------------------------


def test_shards_are_dealt_by_rows_and_stay_with_their_seat():
    places = SeatedShards(range(2), [10, 40, 20, 30])
    assert places.holders({0: 5, 1: 6}) == {0: [5], 1: [5], 2: [6], 3: [6]}
    assert places.holders({0: 5, 1: 9}) == {0: [5], 1: [5], 2: [9], 3: [9]}  # 9 takes 6's seat
    assert places.holders({0: 5}) == {0: [5], 1: [5], 2: [], 3: []}
    places.give(0, 3)
    assert places.holders({0: 5}) == {0: [5], 1: [5], 2: [], 3: [5]}


def test_the_workers_of_a_gpu_hold_shards_together():
    a, b = TWO.devices
    data = SimpleNamespace(nbytes=8)
    order = EpochOrder("shards", tuple(n for n in (10, 40, 20, 30) for _ in range(POOL)), 0)
    assert order.pool_rows == [POOL * n for n in (10, 40, 20, 30)]
    shared = place_pools(data, None, [a, b, a], order=order)
    assert shared.holders({0: 5, 1: 6, 2: 7}) == {0: [5, 7], 1: [5, 7], 2: [6], 3: [6]}
    assert shared.holders({1: 6, 2: 7}) == {0: [7], 1: [7], 2: [6], 3: [6]}
    one = place_pools(data, None, [a, a, a], order=order)
    assert not one.stay and one.holders({0: 5, 1: 6, 2: 7}) is None


def test_without_dealt_shards_all_read_all():
    assert SeatedShards(range(3)).holders({0: 0}) is None


def context(*, nbytes=100, shards=4 * POOL, validation=0, shuffle="shards", stagger=True):
    return SimpleNamespace(
        train=SimpleNamespace(nbytes=nbytes),
        validation=SimpleNamespace(nbytes=validation),
        order=EpochOrder(shuffle, (10,) * shards, 0, stagger),
    )


def test_workers_share_the_memory_of_their_gpus():
    a, b = TWO.devices
    plain = RunContext(print, None, RunFolders("", "", ""), share=WorkerShare(live_bytes=18))
    assert set_memory_shares(plain, [None, None]) is plain
    for seats, data, live in [([a], 40, 18), ([b], 30, 15), ([a, b, a], 30, 10), ([a, b], 30, 15)]:
        given = set_memory_shares(plain, seats)
        assert (given.share.data_bytes, given.share.live_bytes) == (data, live)


@pytest.mark.parametrize(
    ("seats", "options", "fits"),
    [
        ("ab", {}, False),  # 50 of 100 for each; half of the smaller GPU's 60 are 30
        ("ab", {"nbytes": 60}, True),
        ("ab", {"nbytes": 50, "validation": 10}, False),
        ("a", {"nbytes": 1}, False),  # one GPU reads all
        ("aa", {"nbytes": 1}, False),
        ("aabb", {"nbytes": 60}, True),
        ("aabb", {"nbytes": 40, "validation": 10}, True),  # which a GPU's workers hold once
        ("aabb", {"nbytes": 42, "validation": 10}, False),
        ("ab", {"nbytes": 1, "shards": 2 * POOL}, True),
        ("ab", {"nbytes": 1, "shards": 2 * POOL - 1}, False),  # one pool
        ("ab", {"nbytes": 1, "shuffle": "rows"}, False),  # every part reads all shards
        ("ab", {"nbytes": 1, "stagger": False}, False),
        ("--", {"nbytes": 1}, False),
    ],
)
def test_conditions_for_dealing_shards(seats, options, fits):
    known = {"a": TWO.devices[0], "b": TWO.devices[1], "-": None}
    run = context(**options)
    devices = [known[seat] for seat in seats]
    assert fits_gpu_memory(run.train, run.validation, devices, order=run.order) is fits
