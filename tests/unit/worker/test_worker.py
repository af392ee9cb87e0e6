"""`UnitRunner` by itself: what it does with the states and files of trials."""

from __future__ import annotations

import contextlib
import errno
import gc
import pickle
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import cerebro
import cerebro._core as _core
from cerebro.data.manifest import shard_folder
from cerebro.executors.wire import pickle_event
from cerebro.machine import turns
from cerebro.machine.disk import Disk
from cerebro.machine.local import LOCAL, Clock, Machine
from cerebro.run.settings import Batches, Exactness, Limits
from cerebro.worker import jobs, models
from cerebro.worker.contents import is_array, walk
from cerebro.worker.messages import (
    CheckDone,
    CheckTask,
    RunContext,
    RunFolders,
    ShardTask,
    Task,
    UnitDone,
    WorkerShare,
)
from cerebro.worker.runner import UnitRunner

torch = pytest.importorskip("torch")


class Mean:
    """Learns the mean of a column, with a step for each batch."""

    framework = "numpy"

    def __init__(self):
        self.value = np.zeros(1)

    def train_batch(self, batch):
        error = self.value - batch["x"].mean()
        self.value = self.value - 0.1 * error
        return {"loss": float(error[0] ** 2)}

    eval_batch = train_batch

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = np.array(state["value"])


def build(config):
    return Mean()


@pytest.fixture
def context(tmp_path):
    x = np.random.default_rng(0).normal(size=40)
    data = cerebro.shard({"x": x}, tmp_path / "data", shards=3, progress=False)
    for name in ("states", "trials"):
        (tmp_path / name).mkdir()
    states = str(tmp_path / "states")
    return RunContext(
        build=build,
        train=data,
        batches=Batches(batch_size=4),
        limits=Limits(live_models=2),
        folders=RunFolders(states, states, str(tmp_path / "trials")),
    )


def task(position: int, dispatch: int, trial: int = 0, ended: tuple[int, ...] = ()) -> Task:
    return Task(
        trial=trial,
        config={},
        epoch=0,
        step=position,
        part=position,
        attempt=0,
        position=position,
        dispatch=dispatch,
        ended=ended,
    )


def done(runner: UnitRunner, a_task: Task) -> UnitDone:
    event = runner.run(a_task)
    assert isinstance(event, UnitDone), event
    return event


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_unit_whose_worker_died_before_answering_runs_again(context, lost):
    straight = UnitRunner(context, worker=0, machine=LOCAL)
    expected = [done(straight, task(position, position)).state.hash for position in range(3)][-1]
    straight.close()
    for file in Path(context.folders.slots).iterdir():
        file.unlink()

    dies = UnitRunner(context, worker=0, machine=LOCAL)
    for position in range(lost + 1):
        done(dies, task(position, position))
    # The answer to the last one never arrived: another worker is given the same unit.
    other = UnitRunner(context, worker=1, machine=LOCAL)
    hashes = [done(other, task(position, position + 1)).state.hash for position in range(lost, 3)]
    assert hashes[-1] == expected


class TickingClock(Clock):
    """A clock on which half a second passes at each look."""

    now = 1000.0

    def time(self):
        self.now += 0.5
        return self.now

    monotonic = perf_counter = time


class FullDisk(Disk):
    """A disk without room for slots, and with a folder that stays."""

    def open_slots(self, stem, *, create):
        raise OSError(errno.ENOSPC, "No space left on device")

    def remove_folder(self, path):
        pass


def test_the_time_of_a_unit_is_that_of_the_machine(context):
    runner = UnitRunner(context, worker=0, machine=Machine(clock=TickingClock()))
    event = done(runner, task(0, 0))
    # It is looked at twice at the start, for the check of each of three shards, and at the end.
    assert (event.started, event.seconds) == (1000.5, 2.0)


def test_the_files_of_a_trial_and_a_shard_are_on_the_disk_of_the_machine(context):
    runner = UnitRunner(context, worker=0, machine=Machine(disk=FullDisk()))
    failed = runner.run(task(0, 0))
    assert (failed.kind, failed.message.split(" (")[0]) == ("storage", "No space left on device")
    assert list(Path(context.folders.slots).iterdir()) == []
    (Path(context.folders.slots) / shard_folder(2)).mkdir()
    left = jobs.make_shard(runner, ShardTask(2))
    assert "cannot remove folder" in left.message and shard_folder(2) in left.message


class Drawing(Mean):
    """Draws from the global generators when it is built, and in every step."""

    def __init__(self):
        self.value = np.random.normal(size=1)

    def train_batch(self, batch):
        self.value = self.value + np.random.normal()
        return {"loss": 0.0}


def build_drawing(config, info):
    model = Drawing()
    if info.trial == 1:
        raise ValueError("it fails after it has drawn")
    return model


def test_a_build_that_fails_does_not_move_the_generators_of_another_trial(context):
    def hashes(between):
        # As in a worker process, where only trials draw.
        runner = UnitRunner(
            replace(context, build=build_drawing), worker=0, machine=LOCAL, own_process=True
        )
        found = []
        for position in range(3):
            found.append(done(runner, task(position, position)).state.hash)
            if between:
                assert runner.run(task(0, position, trial=1)).kind == "error"
        runner.close()
        for file in Path(context.folders.slots).iterdir():
            file.unlink()
        return found

    assert hashes(between=True) == hashes(between=False)


def mapped(folder: str) -> set[str]:
    """Names of the files below a folder that this process has mapped, deleted or not."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = [line.partition("/")[2].removesuffix(" (deleted)") for line in lines]
    return {Path(path).name for path in paths if f"/{path}".startswith(folder)}


def test_models_and_slots_of_trials_that_have_ended_are_released(context):
    runner = UnitRunner(context, worker=0, machine=LOCAL)
    done(runner, task(0, 0, trial=0))
    done(runner, task(0, 0, trial=1))
    assert set(runner.models) == {0, 1}
    if Path("/proc/self/maps").exists():
        assert "0.slots" in mapped(context.folders.slots)
    event = done(runner, task(0, 0, trial=2, ended=(0, 7)))
    assert set(runner.models) == {1, 2}
    if Path("/proc/self/maps").exists():
        assert {name.split(".")[0] for name in mapped(context.folders.slots)} == {"1", "2"}
    assert event.dropped == ()  # the coordinator knows that it has ended


def test_each_unit_seals_its_state_and_the_last_ones_hash_is_the_epochs(context):
    runner = UnitRunner(context, worker=0, machine=LOCAL)
    for position in range(3):
        event = done(runner, task(position, position))
        slots = _core.Slots(str(Path(context.folders.slots, "0")), False)
        sealed = slots.sealed()
        assert sealed is not None and sealed[:2] == (position + 1, position)
        slots.close()
    assert event.state.hash == _core.hash_state(sealed[2])
    runner.close()


# --- on a GPU, with host memory in its place --------------------------------------


class Cyclic(Mean):
    """Like a network and what trains it: only a collection frees it."""

    def __init__(self):
        super().__init__()
        self.itself = self
        there.add(self)


there: weakref.WeakSet[Cyclic] = weakref.WeakSet()


class ShortOfMemory(Cyclic):
    """Of trial 1 the first unit finds no memory as long as another model is there."""

    shown = 0
    fit = 1  # models in memory
    error: Exception = torch.cuda.OutOfMemoryError("CUDA out of memory")

    def __init__(self, trial, runner):
        super().__init__()
        self.trial, self.runner = trial, runner

    def train_batch(self, batch):
        if self.trial == 1 and len(there) > self.fit:
            ShortOfMemory.shown += 1
            raise self.error
        return super().train_batch(batch)


def gpu_runner(context):
    runners: list[UnitRunner] = []

    def build(config, info):
        return ShortOfMemory(info.trial, runners)

    runners.append(
        UnitRunner(replace(context, build=build, device="cuda:0"), worker=0, machine=LOCAL)
    )
    return runners[0]


@pytest.fixture
def no_collections():
    """Only what the runner itself collects is freed."""
    there.clear()
    models.DROPPED.free(all_sizes=True)
    gc.disable()
    yield
    gc.enable()


def test_large_models_that_were_dropped_are_freed(context, monkeypatch, no_collections):
    runner = UnitRunner(
        replace(context, build=lambda config: Cyclic(), limits=Limits()), worker=0, machine=LOCAL
    )
    for trial in range(3):
        done(runner, task(0, 0, trial=trial))
    assert len(there) == 3  # small ones are left to Python
    monkeypatch.setattr(models, "COLLECTED_BYTES", 1)
    for trial in range(3, 6):
        done(runner, task(0, 0, trial=trial))
        assert len(there) == 2  # the one before is dropped after the new one's unit
    runner.close()
    gc.collect()


@pytest.mark.parametrize(("device", "most"), [("cpu", 2), ("cuda:0", 4)])
def test_more_models_stay_on_a_gpu_if_memory_allows(context, monkeypatch, device, most):
    monkeypatch.setattr(models, "MAX_LIVE_MODELS", 2)
    monkeypatch.setattr(models, "MAX_LIVE_MODELS_ON_GPU", 4)
    limits, share = Limits(live_models=None), WorkerShare(live_bytes=10**9)
    context = replace(context, device=device, limits=limits, share=share)
    runner = UnitRunner(context, worker=0, machine=LOCAL)
    for trial in range(6):
        done(runner, task(0, 0, trial=trial))
    assert list(runner.models) == list(range(6 - most, 6))
    runner.close()
    monkeypatch.setattr(Mean, "held_bytes", 10**9, raising=False)
    runner = UnitRunner(context, worker=0, machine=LOCAL)
    for trial in range(2):
        done(runner, task(0, 0, trial=trial))
    assert list(runner.models) == [1]
    runner.close()


@pytest.mark.usefixtures("no_collections")
@pytest.mark.parametrize(
    "error",
    [
        torch.cuda.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
        MemoryError("cuda:0: no memory"),
    ],
    ids=["PyTorch", "cuBLAS", "CUDA", "loader"],
)
def test_models_that_are_alive_make_room_for_a_unit(context, monkeypatch, error):
    monkeypatch.setattr(ShortOfMemory, "error", error)
    monkeypatch.setattr(ShortOfMemory, "shown", 0)
    runner = gpu_runner(context)
    assert isinstance(runner.run(task(0, 0, trial=0)), UnitDone)
    done = runner.run(task(0, 0, trial=1))
    assert isinstance(done, UnitDone), done.message
    assert ShortOfMemory.shown == 1
    assert done.dropped == (0,) and list(runner.models) == [1]
    alone = UnitRunner(replace(context, build=lambda config: Mean()), worker=0, machine=LOCAL)
    assert alone.run(task(0, 1, trial=1)).state.hash == done.state.hash
    after = runner.run(task(1, 1, trial=0))  # from its slot
    assert isinstance(after, UnitDone) and after.loaded


@pytest.mark.usefixtures("no_collections")
def test_models_of_the_other_workers_of_a_process_make_room(context, monkeypatch):
    monkeypatch.setattr(turns, "wait_until_alone", lambda: True)  # as in a process of two workers
    monkeypatch.setattr(ShortOfMemory, "shown", 0)
    together: list[UnitRunner] = []

    def build(config, info):
        return ShortOfMemory(info.trial, together)

    on_gpu = replace(context, build=build, device="cuda:0", limits=Limits(live_models=4))
    for worker in range(2):
        together.append(UnitRunner(on_gpu, worker=worker, machine=LOCAL, together=together))
    first, second = together
    for trial in (0, 2):
        assert isinstance(first.run(task(0, 0, trial=trial)), UnitDone)
    done = second.run(task(0, 0, trial=1))
    assert isinstance(done, UnitDone), done.message
    assert (ShortOfMemory.shown, done.dropped) == (1, ())
    assert list(first.models) == [] and list(second.models) == [1]
    again = first.run(task(1, 1, trial=0))  # from its slot; the other model is missing
    assert isinstance(again, UnitDone) and again.loaded and again.dropped == (2,)
    more = first.run(task(1, 1, trial=2))
    assert isinstance(more, UnitDone) and more.loaded and more.dropped == ()


class Putting(Mean):
    """Has an operation without a deterministic version in its second batch."""

    warn_only: list[bool] = []  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.batches = 0

    def train_batch(self, batch):
        self.batches += 1
        self.warn_only.append(torch.is_deterministic_algorithms_warn_only_enabled())
        if self.batches == 2:
            torch.zeros(2).put_(torch.tensor([1]), torch.tensor([2.0]))
        return super().train_batch(batch)


def test_a_trial_is_strict_until_an_operation_has_no_deterministic_version(context, monkeypatch):
    """Attention's gradients are deterministic only if no operation may be otherwise."""
    monkeypatch.setattr(Putting, "warn_only", [])
    context = replace(context, build=lambda config, info: (Putting, Mean)[info.trial]())
    runner = UnitRunner(replace(context, device="cuda:0"), worker=0, machine=LOCAL)
    first = done(runner, task(0, 0))
    assert first.steps.not_exact == ("put_",)
    assert Putting.warn_only[:2] == [False, False]  # and then all of the unit once more
    assert Putting.warn_only[2:] == [True] * first.total.batches
    alone = UnitRunner(context, worker=0, machine=LOCAL)
    assert first.state.hash == done(alone, task(0, 1)).state.hash
    del Putting.warn_only[:]
    done(runner, task(1, 1))
    assert Putting.warn_only and all(Putting.warn_only)
    assert done(runner, task(0, 0, trial=1)).steps.not_exact == ()
    assert not torch.are_deterministic_algorithms_enabled()
    runner.close(), alone.close()


@pytest.mark.usefixtures("no_collections")
def test_a_model_is_freed_before_it_is_rebuilt(context):
    present = []

    class Once(Putting, Cyclic):
        def train_batch(self, batch):
            present.append(len(there))
            return super().train_batch(batch)

    runner = UnitRunner(
        replace(context, build=lambda config: Once(), device="cuda:0"), worker=0, machine=LOCAL
    )
    assert done(runner, task(0, 0)).steps.not_exact == ("put_",)
    assert set(present) == {1}
    runner.close()
    del present[:]
    assert jobs.check(runner, CheckTask({})).not_exact == ("put_",)
    assert max(present) == 2 and len(there) == 0  # two that are compared
    runner.close()


@pytest.mark.usefixtures("no_collections")
def test_a_check_that_failed_leaves_no_models_on_a_gpu(context):
    class Broken(Cyclic):
        def train_batch(self, batch):
            raise ValueError("in a step")

    runner = UnitRunner(
        replace(context, build=lambda config: Broken(), device="cuda:0"), worker=0, machine=LOCAL
    )
    assert "in a step" in str(jobs.check(runner, CheckTask({})).error)
    assert len(there) == 0
    runner.close()


@pytest.mark.usefixtures("no_collections")
def test_a_trial_that_failed_makes_room_for_one_that_fits_alone(context, monkeypatch):
    class Failing(Cyclic):
        def __init__(self, trial):
            super().__init__()
            self.trial = trial

        def train_batch(self, batch):
            if len(there) > 1:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")
            return super().train_batch(batch) if self.trial else {"loss": float("nan")}

    def build(config, info):
        return Failing(info.trial)

    runner = UnitRunner(replace(context, build=build, device="cuda:0"), worker=0, machine=LOCAL)
    assert runner.run(task(0, 0, trial=0)).kind == "diverged"
    assert isinstance(runner.run(task(0, 0, trial=1)), UnitDone)
    runner.close()
    # A model that nothing has counted is freed when memory runs short.
    monkeypatch.setattr(models.DroppedModels, "add", lambda self, _: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: len(there))
    there.clear(), gc.collect()
    runner = UnitRunner(replace(context, build=build, device="cuda:0"), worker=0, machine=LOCAL)
    assert runner.run(task(0, 0, trial=0)).kind == "diverged"
    assert isinstance(runner.run(task(0, 0, trial=2)), UnitDone)
    runner.close()


def test_a_wrapped_nondeterminism_error_is_recognized(context):
    class Wrapped(Putting):
        def train_batch(self, batch):
            try:
                return super().train_batch(batch)
            except RuntimeError as error:
                raise ValueError("in a step") from error

    runner = UnitRunner(
        replace(context, build=lambda config: Wrapped(), device="cuda:0"), worker=0, machine=LOCAL
    )
    assert done(runner, task(0, 0)).steps.not_exact == ("put_",)
    runner.close()


def test_an_operation_that_a_search_rejects_is_an_error(context):
    exactness = Exactness(deterministic=True)
    context = replace(context, build=lambda config: Putting(), device="cuda:0", exactness=exactness)
    runner = UnitRunner(context, worker=0, machine=LOCAL)
    failed = runner.run(task(0, 0))
    runner.close()
    assert failed.kind == "error" and "put_ does not have a deterministic" in failed.message


@pytest.mark.parametrize("thorough", [False, True])
def test_a_check_names_a_nondeterministic_operation(context, thorough):
    context = replace(context, build=lambda config: Putting(), device="cuda:0")
    runner = UnitRunner(context, worker=0, machine=LOCAL)
    found = jobs.check(runner, CheckTask({}, thorough=thorough))
    runner.close()
    assert (found.error, found.problems, found.not_exact) == (None, (), ("put_",))


def test_an_error_event_reports_exception_bases_and_place(context, monkeypatch):
    class Mine(ValueError):
        pass

    def raise_mine(model, batch):
        raise Mine("bad (really)")

    monkeypatch.setattr(Mean, "train_batch", raise_mine)
    runner = UnitRunner(context, worker=0, machine=LOCAL)
    event = runner.run(Task(0, {}, epoch=0, step=0, part=0, attempt=0, position=0))
    runner.close()
    assert event.kind == "error"
    first, *others = event.bases
    assert first == f"{__name__}.{Mine.__qualname__}"
    assert others == ["builtins.ValueError", "builtins.Exception", "builtins.BaseException"]
    line = raise_mine.__code__.co_firstlineno + 1
    assert event.place == f"test_worker.py:{line} in raise_mine"
    assert event.message == f"Mine: bad (really) ({event.place})"


@pytest.mark.usefixtures("no_collections")
def test_a_trial_fails_when_no_model_can_make_room(context, monkeypatch):
    monkeypatch.setattr(ShortOfMemory, "fit", 0)
    monkeypatch.setattr(ShortOfMemory, "shown", 0)
    runner = gpu_runner(context)
    failed = runner.run(task(0, 0, trial=1))
    assert failed.kind == "error" and "CUDA out of memory" in failed.message
    assert ShortOfMemory.shown == 1


def test_a_worker_that_has_lost_its_gpu_is_given_up(context, monkeypatch):
    def broken(*_):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    monkeypatch.setattr(Mean, "train_batch", broken)
    for own_process, kind in ((True, "worker"), (False, "error")):
        runner = UnitRunner(
            replace(context, device="cuda:0"), worker=0, machine=LOCAL, own_process=own_process
        )
        with monkeypatch.context() as patch:
            patch.setattr(
                "cerebro.worker.runner.redirect_descriptors",
                lambda path: contextlib.nullcontext(),
            )
            failed = runner.run(task(0, 0))
        assert failed.kind == kind
        assert "device-side assert" in failed.message


def test_tensors_on_two_devices_are_explained(context, monkeypatch):
    def elsewhere(self, batch):
        raise RuntimeError("Expected all tensors to be on the same device, but got cuda:0 and cpu")

    monkeypatch.setattr(Mean, "train_batch", elsewhere)
    failed = UnitRunner(replace(context, device="cuda:0"), worker=0, machine=LOCAL).run(task(0, 0))
    assert failed.message.endswith(
        "; batches arrive on info.device, cuda:0: put the model there, or give devices='cpu'"
    )
    failed = UnitRunner(context, worker=0, machine=LOCAL).run(task(0, 1))
    assert "info.device" not in failed.message


def build_on_a_frozen_base(config):
    base = torch.nn.Linear(1, 1 << 18).requires_grad_(False)  # 2 MiB
    head = torch.nn.Linear(1, 1)
    return cerebro.torch.Model(
        torch.nn.Sequential(torch.nn.Sequential(base, torch.nn.AdaptiveAvgPool1d(1)), head),
        optimizer=torch.optim.SGD(head.parameters(), lr=0.01),
        loss=torch.nn.functional.mse_loss,
        state="trainable",
    )


def test_models_with_frozen_bases_that_do_not_fit_are_dropped(context, tmp_path):
    rows = np.ones((12, 1), "float32")
    data = cerebro.shard({"x": rows, "y": rows}, tmp_path / "ones", shards=3, progress=False)
    context = replace(
        context,
        build=build_on_a_frozen_base,
        train=data,
        limits=Limits(live_models=None),
        share=WorkerShare(live_bytes=5 << 20),
    )
    runner = UnitRunner(context, worker=0, machine=LOCAL)
    for trial in range(4):
        done(runner, task(0, 0, trial=trial))
    assert list(runner.models) == [2, 3]
    runner.close()


# --- a check of the model ------------------------------------------------------


def build_frozen_trunk(config):
    """A trained head on a trunk in evaluation mode, which is made alike every time."""
    blocks = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)) for _ in range(8)]
    trunk = torch.nn.Sequential(*blocks).requires_grad_(False).eval()
    head = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    net = torch.nn.Sequential(trunk, head)
    loss = torch.nn.functional.mse_loss
    return cerebro.torch.Model(net, optimizer=optimizer, loss=loss, state="trainable")


def test_a_model_with_a_frozen_trunk_passes_every_check(context, tmp_path):
    rng = np.random.default_rng(0)
    columns = {"x": rng.normal(size=(40, 4)).astype("f4"), "y": rng.normal(size=(40, 1))}
    data = cerebro.shard(columns, tmp_path / "frozen", dtypes={"y": "float32"}, progress=False)
    with torch.random.fork_rng():
        runner = UnitRunner(
            replace(context, train=data, build=build_frozen_trunk), worker=0, machine=LOCAL
        )
        found = [jobs.check(runner, CheckTask({})) for _ in range(40)]
        runner.close()
    assert [(done.error, done.problems) for done in found] == [(None, ())] * 40


def test_a_walk_meets_every_tensor_below_an_object():
    net = torch.nn.Sequential(*[torch.nn.BatchNorm1d(4) for _ in range(16)])
    expected = {value.data_ptr() for value in (*net.parameters(), *net.buffers())}
    for _ in range(40):
        assert expected <= {v.data_ptr() for _, v in walk(net, "net") if torch.is_tensor(v)}


class Answering:
    """Has every attribute, as Lightning's DummyLogger; `error`: raises one that is not usual."""

    def __init__(self, error=None):
        self.error, self.count = error, 7

    def __getattr__(self, name):
        if self.error:
            raise self.error
        return lambda *arguments: None


def test_an_object_that_has_every_attribute_is_no_array():
    both = [Answering(), Answering(RuntimeError("not yet"))]
    assert not any(map(is_array, both))
    assert is_array(np.float32(1)) and is_array(torch.zeros(())) and is_array(np.zeros(2))
    assert dict(walk(both, "both")) == {"both[0].count": 7, "both[1].count": 7}


def test_an_event_may_hold_an_object_of_the_users_code() -> None:
    class Local(str):
        """As a name that a metric was given in a notebook."""

    event = CheckDone(3, (Local("lost"),))
    back = pickle.loads(pickle_event(event))
    assert (back.worker, back.problems) == (3, ("lost",))
