"""When a worker is given up, when a trial is, and when memory grows: the rules by themselves."""

from __future__ import annotations

import pytest

from cerebro.coordinator.failures import MAX_START_LOSSES, LostWorkers, failure_kind
from cerebro.data import Column
from cerebro.executors.local import TaskWatch
from cerebro.machine import resources as memory
from cerebro.machine.resources import Usage
from cerebro.run.records import Raised, TrialRecord
from cerebro.worker.messages import Task, WorkerLost
from cerebro.worker.trial_warnings import Growth, measure_growth
from cerebro.worker.user_errors import (
    explain_channels_last,
    explain_known_mistake,
    explain_memory_shortage,
    explain_unlike_types,
)

# --- failures that are alike -----------------------------------------------------


def failed(error, bases=(), place=""):
    return TrialRecord(0, {}, "failed", error=error, raised=Raised(bases, place))


def test_failures_are_alike_by_type_and_place_not_by_text():
    bases = ("m.Mine", "builtins.ValueError", "builtins.Exception")
    first = failed("Mine: lr 0.1 (of (2)) (a.py:3 in build)", bases, "a.py:3 in build")
    assert failure_kind(first) == failure_kind(failed("Mine: other", bases, "a.py:3 in build"))
    assert failure_kind(first) != failure_kind(failed(first.error, bases, "a.py:4 in build"))
    others = ("other.Mine", *bases[1:])
    assert failure_kind(first) != failure_kind(failed(first.error, others, "a.py:3 in build"))


def test_failures_without_a_place_are_alike_by_text_whatever_its_numbers():
    died = [failed(f"the worker died in epoch {n} (where it was: trials/{n}.log)") for n in (1, 2)]
    assert failure_kind(died[0]) == failure_kind(died[1])
    assert failure_kind(died[0]) != failure_kind(failed("the worker hung in epoch 1"))


# --- silence and time ---------------------------------------------------------


def looks(watch, pairs):
    """What a look finds, for pairs of (the worker's beats, our own)."""
    return [watch.is_silent(beats, own) for beats, own in pairs]


def test_silence_is_measured_in_the_watchers_own_beats():
    watch = TaskWatch(10.0, None)
    assert looks(watch, [(50, 1000), (50, 1079), (50, 1080)]) == [False, False, True]


def test_any_beat_resets_the_silence():
    watch = TaskWatch(10.0, None)
    assert looks(watch, [(50, 1000), (50, 1079), (51, 1100), (51, 1179)]) == [False] * 4
    assert watch.is_silent(51, 1180)


def test_no_worker_is_silent_while_the_watcher_stalls():
    watch = TaskWatch(2.0, None)
    assert not any(looks(watch, [(7, 33)] * 1000))


def test_a_worker_that_has_not_beaten_yet_has_two_minutes():
    watch = TaskWatch(2.0, None)
    assert looks(watch, [(0, 5), (0, 1204), (0, 1205)]) == [False, False, True]
    watch = TaskWatch(300.0, None)
    assert looks(watch, [(0, 5), (0, 3004), (0, 3005)]) == [False, False, True]


def test_a_worker_is_looked_at_five_times_before_it_is_given_up():
    assert TaskWatch(10.0, None).seconds_to_next_look(None) == 2.0
    assert TaskWatch(10.0, None).seconds_to_next_look(9999.0) == 2.0


@pytest.mark.parametrize(
    ("seconds", "late", "patience"),
    [(None, False, 1.5), (-20.0, False, 2.0), (0.25, False, 1.25), (1.5, True, 0.0), (9, True, 0)],
)
def test_a_task_is_late_when_its_time_is_over(seconds, late, patience):
    watch = TaskWatch(10.0, 1.5)
    assert watch.is_late(seconds) is late
    assert watch.seconds_to_next_look(seconds) == patience
    assert not TaskWatch(10.0, None).is_late(seconds)


# --- losses -------------------------------------------------------------------


def task(trial=3, epoch=1, step=2, attempt=0):
    part = -1 if step == 4 else step + 1
    return Task(trial, {}, epoch, step, part, attempt, position=6)


def test_a_unit_is_retried_up_to_the_limit():
    losses = LostWorkers(2)
    for worker in range(2):
        loss = losses.add(WorkerLost(worker, "it died"), task(attempt=worker))
        assert loss.error is None
        assert loss.text == f"it died in trial 3, epoch 1, unit 2, attempt {worker}"
    assert losses.add(WorkerLost(2, "it died"), task()).error == (
        "it died in epoch 1, unit 2, 3 times"
    )


def test_a_success_resets_the_death_count_of_a_unit():
    losses = LostWorkers(0)
    losses.unit_done(0, task())
    other = losses.add(WorkerLost(1, "it died", traced=True), task(step=4))
    assert other.error == "it died in epoch 1, validation, once (where it was: trials/3.log)"
    losses = LostWorkers(1)
    losses.add(WorkerLost(1, "it died"), task())
    losses.unit_done(2, task())
    assert losses.add(WorkerLost(3, "it died"), task()).error is None


def test_a_unit_that_never_began_is_not_blamed():
    losses = LostWorkers(0)
    loss = losses.add(WorkerLost(0, "it died", began=False), task())
    assert loss.error is None
    assert loss.text == "it died, before it began trial 3, epoch 1, unit 2"
    assert losses.add(WorkerLost(1, "it died"), None).text == "it died, without a unit"


def test_workers_are_not_replaced_after_repeated_start_failures():
    losses = LostWorkers(0)
    for worker in range(MAX_START_LOSSES):
        assert losses.may_replace
        losses.add(WorkerLost(worker, "it died", began=False), task())
    assert not losses.may_replace
    losses.unit_done(1, task())  # an old one: says nothing of new ones
    assert not losses.may_replace
    losses.unit_done(9, task())
    assert losses.may_replace


# --- memory -------------------------------------------------------------------

MB = 1 << 20


def grow(trial_growth, epochs):
    """What is told after each of so many epochs of two units each."""
    watch = Growth()
    told = []
    for epoch in range(epochs):
        for _ in range(2):
            watch.add(7, trial_growth(epoch) // 2)
        told.append(watch.end_epoch(7, epoch, 900_000_000))
    return told


def test_memory_growth_of_a_trial_is_reported_once():
    told = grow(lambda epoch: 100 * MB, 8)
    assert [text is not None for text in told] == [False] * 3 + [True] + [False] * 4
    assert told[3].startswith(
        "trial 7 keeps about 105 MB more memory with every epoch (its process"
    )
    assert "holds 900 MB after epoch 3" in told[3]


@pytest.mark.parametrize(
    "trial_growth",
    [
        lambda epoch: 7 * MB,  # too little
        lambda epoch: 900 * MB if epoch == 0 else 0,  # the first epoch fills caches
        lambda epoch: 900 * MB if epoch % 3 else -1600 * MB,  # taken and freed
        lambda epoch: 20 * MB if epoch < 4 else 0,  # not enough together
        lambda epoch: -100 * MB,
    ],
)
def test_harmless_memory_changes_are_not_reported(trial_growth):
    assert grow(trial_growth, 12) == [None] * 12


def test_slow_memory_growth_is_reported_when_it_adds_up():
    told = grow(lambda epoch: 10 * MB, 8)
    assert told[:7] == [None] * 7
    assert told[7] is not None


def test_forget_resets_the_growth_of_a_trial():
    watch = Growth()
    for epoch in range(3):
        watch.add(1, 100 * MB)
        watch.end_epoch(1, epoch, 0)
    watch.forget(1)
    watch.add(1, 100 * MB)
    assert watch.end_epoch(1, 3, 0) is None


def test_a_unit_that_loaded_its_model_may_keep_some_memory():
    before, after = Usage(0, 100 * MB), Usage(0, 400 * MB)
    of = measure_growth
    assert of(before, after, loaded=False, state_bytes=MB) == 300 * MB
    assert of(after, before, loaded=False, state_bytes=MB) == -300 * MB
    assert of(before, after, loaded=True, state_bytes=50 * MB) == (300 - 150 - 32) * MB
    assert of(before, after, loaded=True, state_bytes=99 * MB) == 0
    assert of(None, after, loaded=False, state_bytes=MB) == 0


# --- what the system says -----------------------------------------------------

OOM = {
    "version 2": ("0::/a/b\n", "cgroup/a/b/memory.events", "low 0\noom 4\noom_kill 3\n"),
    "version 1": ("4:memory:/a\n1:cpu:/\n", "cgroup/memory/a/memory.oom_control", "oom_kill 3\n"),
    "the host's path": ("4:memory:/x\n", "cgroup/memory/memory.oom_control", "oom_kill 3\n"),
    "no group": ("0::/\n", "proc/vmstat", "nr_free_pages 1\noom_kill 3\n"),
    "no groups at all": (None, "proc/vmstat", "oom_kill 3\n"),
}


@pytest.mark.parametrize("name", OOM)
def test_out_of_memory_kills_are_read_from_the_cgroup(tmp_path, name):
    group, file, text = OOM[name]
    (tmp_path / "proc/self").mkdir(parents=True)
    if group is not None:
        (tmp_path / "proc/self/cgroup").write_text(group)
    assert memory.count_kills(tmp_path / "cgroup", tmp_path / "proc") == 0
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    assert memory.count_kills(tmp_path / "cgroup", tmp_path / "proc") == 3


def test_memory_of_this_process():
    used = memory.read_usage()
    if used is None:
        pytest.skip("the system does not say what a process uses")
    kept = bytearray(b"x" * (64 * MB))
    more = memory.read_usage()
    assert more.private - used.private > 60 * MB
    assert more.resident - used.resident > 60 * MB
    del kept
    assert memory.read_usage("no such process") is None


# --- types that do not fit ------------------------------------------------------

COLUMNS = {
    "x": Column("x", "float64", (3,)),
    "y": Column("y", "float64"),
    "c": Column("c", "int32"),
    "b": Column("b", "bool"),
    "image": Column("image", "uint8", (3, 4)),
}
WIDE = """; columns x, y are float64: give shard dtypes={"x": "float32", "y": "float32"}"""


def dtype_failures(torch):
    """What people's networks and losses say, and what is to be added."""
    nn, f = torch.nn, torch.nn.functional
    wide = torch.zeros(2, 3, 4, dtype=torch.float64)
    out = nn.Linear(2, 3)(torch.zeros(2, 2))
    return [
        (lambda: nn.Linear(4, 2)(wide), WIDE),
        (lambda: nn.Conv1d(3, 2, 1)(wide), WIDE),
        (lambda: nn.LSTM(4, 2)(wide), WIDE),
        (lambda: nn.LayerNorm(4)(wide), WIDE),
        (lambda: f.binary_cross_entropy(out.sigmoid(), wide[:, :, 0]).backward(), WIDE),
        (
            lambda: f.cross_entropy(out, torch.zeros(2, dtype=torch.int32)),
            """; column 'c' is int32: give shard dtypes={"c": "int64"}""",
        ),
        (
            lambda: f.cross_entropy(out, torch.zeros(2, dtype=torch.bool)),
            """; column 'b' is bool: give shard dtypes={"b": "int64"}""",
        ),
        (
            lambda: f.cross_entropy(out, wide[:, 0, 0]),
            """; column 'y' is float64: give shard dtypes={"y": "int64"}""",
        ),
        (
            lambda: nn.Conv1d(3, 2, 1)(wide.to(torch.uint8)),
            """; column 'image' is uint8: give shard dtypes={"image": "float32"}""",
        ),
        (lambda: nn.Linear(4, 2)(wide.float().half()), ""),  # which no column is
        (lambda: nn.Linear(5, 2)(wide.float()), ""),
    ]


def test_hints_on_dtypes_pytorch_refuses_name_the_column():
    torch = pytest.importorskip("torch")
    for call, hint in dtype_failures(torch):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            call()
        assert explain_unlike_types(caught.value, COLUMNS) == hint, caught.value
    assert explain_unlike_types(KeyError("double float type"), COLUMNS) == ""
    assert explain_unlike_types(RuntimeError("double trouble"), COLUMNS) == ""


def test_hints_on_rows_in_memory_do_not_name_shard():
    torch = pytest.importorskip("torch")
    for call, hint in dtype_failures(torch):
        with pytest.raises((RuntimeError, ValueError)) as caught:
            call()
        given = explain_unlike_types(caught.value, COLUMNS, given=True)
        assert (given == "") == (hint == "") and "shard" not in given
    label = ValueError("expected target dtype to be Long or Byte, but got Double")
    told = explain_unlike_types(label, COLUMNS, given=True)
    assert told == """; column 'y' is float64: give y.astype("int64")"""
    odd = {"my label": Column("my label", "float64")}
    assert explain_unlike_types(label, odd, given=True).endswith(
        """give data['my label'].astype("int64")"""
    )
    assert explain_known_mistake(label).endswith("give shard dtypes= with 'int64' for the column")
    assert explain_known_mistake(label, given=True).endswith("""the column with .astype("int64")""")


@pytest.mark.parametrize(
    ("shape", "steps"),
    [
        ((16, 16, 3), "Scale(1/255), ToCHW()"),
        ((28, 28), "Scale(1/255), ToCHW()"),
        ((28, 28, 1), "Scale(1/255), ToCHW()"),
        ((3, 16, 16), "Scale(1/255)"),
    ],
)
def test_hints_on_images_of_bytes_name_the_transforms(shape, steps):
    torch = pytest.importorskip("torch")
    columns = {"x": Column("x", "uint8", shape), "y": Column("y", "int64")}
    with pytest.raises(RuntimeError) as caught:
        torch.nn.Conv2d(3, 4, 3)(torch.zeros(2, 3, 16, 16, dtype=torch.uint8))
    chain = f'with_transforms({{"x": [{steps}]}}), from cerebro.transforms'
    told = explain_unlike_types(caught.value, columns)
    assert told == f"; column 'x' is uint8: train on data.{chain}"
    told = explain_unlike_types(caught.value, columns, given=True)
    assert told == f"; column 'x' is uint8: train on cerebro.shard(rows, folder).{chain}"


def test_a_hint_explains_channels_last_images():
    torch = pytest.importorskip("torch")
    columns = {"x": Column("x", "float32", (16, 16, 3)), "y": Column("y", "int64")}
    with pytest.raises(RuntimeError) as caught:
        torch.nn.Conv2d(3, 4, 3)(torch.zeros(2, 16, 16, 3))
    assert explain_channels_last(caught.value, columns) == (
        """; column 'x' has the channels last: train on data.with_transforms({"x": [ToCHW()]}), """
        "from cerebro.transforms"
    )
    first = {"x": Column("x", "float32", (5, 16, 16))}
    assert explain_channels_last(caught.value, first) == ""
    assert explain_channels_last(RuntimeError("something else"), columns) == ""


@pytest.mark.parametrize(
    ("error", "device", "where"),
    [
        (MemoryError("Unable to allocate 2 TiB"), "cpu", "this machine"),
        (MemoryError("Unable to allocate 2 TiB"), "cuda:0", "this machine"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ..."), "cpu",
         "this machine"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "cuda:0", "this machine"),
        (RuntimeError("DefaultCPUAllocator: not enough memory"), "cpu", "this machine"),
        (OSError(12, "Cannot allocate memory"), "cpu", "this machine"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes"), "cpu",
         "this machine"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "cuda:0", "the GPU"),
        (RuntimeError("CUDA error: out of memory"), "cuda:0", "the GPU"),
        (RuntimeError("cuBLAS: CUBLAS_STATUS_ALLOC_FAILED"), "cuda:0", "the GPU"),
    ],
)  # fmt: skip
def test_a_lack_of_memory_gets_a_cure(error, device, where):
    hint = explain_memory_shortage(error, device)
    assert hint.startswith(f"; {where} is out of memory: give a smaller batch_size")
    assert ("fewer workers" in hint) == (where == "this machine")


@pytest.mark.parametrize(
    "error", [RuntimeError("shape mismatch"), ValueError("out of memory"), OSError(2, "no file")]
)
def test_other_errors_are_no_lack_of_memory(error):
    assert explain_memory_shortage(error, "cpu") == ""
