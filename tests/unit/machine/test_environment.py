"""The record of what a run depends on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cerebro.cli import doctor as diagnosis
from cerebro.machine import environment, files, resources
from cerebro.machine.flags import xla_threads
from cerebro.machine.imports import install_hint
from cerebro.machine.libraries import TORCH


def test_describe_is_json_and_names_versions() -> None:
    record = environment.describe(threads=3)
    assert json.loads(json.dumps(record)) == record
    assert record["threads"] == 3
    assert record["packages"]["numpy"]
    assert record["cores"] >= 1
    assert record["cpu"]["model"]


def test_describe_does_not_import_torch() -> None:
    code = (
        "import sys; from cerebro.machine import environment; r = environment.describe(); "
        "assert 'torch' not in sys.modules; assert r['torch'] == {}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_describe_keeps_variables_that_change_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    assert environment.describe()["variables"]["ATEN_CPU_CAPABILITY"] == "default"


def test_equal_records_do_not_differ() -> None:
    record = environment.describe(threads=1)
    assert environment.list_differences(record, json.loads(json.dumps(record))) == []


def test_differences_name_what_changed() -> None:
    before = environment.describe(threads=1)
    now = json.loads(json.dumps(before))
    now["threads"] = 2
    now["packages"]["numpy"] = "0.1"
    now["cores"] = 99  # changes nothing
    assert environment.list_differences(before, now) == [
        f"packages.numpy was {before['packages']['numpy']}, is 0.1",
        "threads was 1, is 2",
    ]


def test_torch_that_was_not_imported_yet_is_no_difference() -> None:
    before = {"torch": {}, "torch_capability": None}
    now = {"torch": {"default_dtype": "float64"}, "torch_capability": "AVX2"}
    assert environment.list_differences(before, now) == []


def test_keras_that_one_side_has_not_imported_is_no_difference() -> None:
    without = {"variables": {"MKL_DYNAMIC": "1"}}
    before, now = ({"variables": {"KERAS_BACKEND": name}} for name in ("torch", "jax"))
    imported = {"variables": {"MKL_DYNAMIC": "1", "KERAS_BACKEND": "torch"}}
    assert environment.list_differences(without, imported) == []
    assert environment.list_differences(imported, without) == []
    assert environment.list_differences(before, now) == [
        "variables.KERAS_BACKEND was torch, is jax"
    ]


def test_torch_flags_can_be_captured_and_applied() -> None:
    torch = pytest.importorskip("torch")
    before = TORCH.present()
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("high")
        torch.use_deterministic_algorithms(True, warn_only=True)
        changed = TORCH.present()
        TORCH.apply(before)
        assert TORCH.present() == before
        TORCH.apply(changed)
        assert torch.get_default_dtype() is torch.float64
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert TORCH.present() == changed
    finally:
        TORCH.apply(before)


def test_torch_is_imported_only_for_non_default_flags() -> None:
    pytest.importorskip("torch")
    code = (
        "import sys; from cerebro.machine.libraries import TORCH\n"
        "first = TORCH.FIRST\n"
        "TORCH.apply(dict(first))\n"
        "assert 'torch' not in sys.modules\n"
        "TORCH.apply({**first, 'matmul_precision': 'high'})\n"
        "assert TORCH.present() == {**first, 'matmul_precision': 'high'}\n"
        "TORCH.apply(first)\n"
        "assert TORCH.present() == first"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_known_torch_defaults_are_right_and_import_nothing() -> None:
    pytest.importorskip("torch")
    code = (
        "import sys, torch; from cerebro.machine.libraries import TORCH\n"
        "before = set(sys.modules)\n"
        "assert TORCH.present() == TORCH.FIRST\n"
        "TORCH.apply(TORCH.FIRST)\n"
        "assert not {name for name in set(sys.modules) - before if name.startswith('torch')}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_precision_that_torch_does_not_tell_is_left_alone(monkeypatch) -> None:
    """As after ``torch.backends.fp32_precision = "tf32"``."""
    torch = pytest.importorskip("torch")

    def untold():
        raise RuntimeError("you have used mix of the legacy and new APIs")

    before = TORCH.present()
    monkeypatch.setattr(torch, "get_float32_matmul_precision", untold)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", None)
    assert TORCH.present() == {**before, "matmul_precision": None}
    TORCH.apply(before)


def test_no_flags_set_nothing() -> None:
    TORCH.apply({})


def test_mounts_have_any_names() -> None:
    """Blanks and their like are written in octal, other letters as they are."""
    table = (
        b"22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw\n"
        b"40 22 0:40 / /mnt/d\xc3\xa9j\xc3\xa0\\040vu rw - nfs4 server:/data rw\n"
    )
    place = os.fsdecode(b"/mnt/d\xc3\xa9j\xc3\xa0 vu")
    assert list(files.parse_mounts(table)) == [("/", "ext4"), (place, "nfs4")]


def test_file_system_of_a_path_that_is_not_there_yet(tmp_path: Path) -> None:
    assert files.file_system(tmp_path / "no" / "such") == files.file_system(tmp_path)
    if sys.platform == "linux":
        assert files.file_system("/proc") == "proc"
        assert not files.is_network_file_system("/proc")


def test_usable_cores_follow_the_affinity() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system has no CPU affinity")
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert resources.usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_is_importable_imports_nothing() -> None:
    assert environment.is_importable("json")
    assert not environment.is_importable("no_such_module_anywhere")
    assert not environment.is_importable("no_such_package.module")


def test_diagnosis_says_how_to_install_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "is_importable", lambda module: module != "matplotlib")
    text = diagnosis.report()
    assert f"plots    missing  for plots of runs: {install_hint('plots')}" in text
    assert "present  for PyTorch models" in text


def test_diagnosis_warns_of_network_file_systems(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(files, "file_system", lambda path: "nfs4")
    assert "nfs4 is a network file system" in diagnosis.report(tmp_path / "runs")


def test_differences_name_added_and_removed_cpu_features() -> None:
    before = {"cpu": {"model": "A", "features": "avx avx2 fma"}}
    now = {"cpu": {"model": "A", "features": "avx avx512f fma"}}
    lines = environment.list_differences(before, now)
    assert lines == ["cpu.features differ: now without avx2; with avx512f"]


def test_fields_missing_from_an_older_record_are_no_difference() -> None:
    now = environment.describe(threads=1)
    before = {key: now[key] for key in ("python", "threads", "packages")}
    assert environment.list_differences(before, now) == []


@pytest.mark.parametrize(("value", "kept"), [("1", {}), ("4", {"OMP_NUM_THREADS": "4"})])
def test_thread_variables_are_recorded_only_if_they_differ(
    monkeypatch: pytest.MonkeyPatch, value: str, kept: dict[str, str]
) -> None:
    for name in environment.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    variables = environment.describe(threads=1)["variables"]
    assert {k: v for k, v in variables.items() if k in environment.THREAD_VARIABLES} == kept


@pytest.mark.parametrize("own", [None, "5"])
def test_xla_gets_the_thread_count_while_a_model_is_built(
    monkeypatch: pytest.MonkeyPatch, own: str | None
) -> None:
    monkeypatch.delenv("NPROC", raising=False)
    if own is not None:
        monkeypatch.setenv("NPROC", own)
    with pytest.raises(KeyError), xla_threads(3):
        assert os.environ["NPROC"] == "3"
        raise KeyError
    assert os.environ.get("NPROC") == own


def test_libraries_built_into_torch_are_listed() -> None:
    torch = pytest.importorskip("torch")
    found = environment.torch_libraries()
    assert found
    for version in found.values():
        assert version in torch.__config__.show()


# --- what computes ------------------------------------------------------------------


class Bridge:
    """JAX's, of which it can be asked whether it has started."""

    started = True

    def backends_are_initialized(self) -> bool:
        return self.started


class Jax:
    @staticmethod
    def default_backend() -> str:
        return "gpu"


def test_jax_is_asked_only_when_it_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    bridge = Bridge()
    monkeypatch.setitem(sys.modules, "jax", Jax)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", bridge)  # type: ignore[arg-type]
    assert environment.jax_backend() == environment.describe()["jax_backend"] == "gpu"
    assert environment.uses_gpu(environment.describe())
    bridge.started = False
    assert environment.jax_backend() is None
    assert "jax_backend" not in environment.describe()
    monkeypatch.delitem(sys.modules, "jax._src.xla_bridge")
    assert environment.jax_backend() is None


def test_the_real_jax_reports_its_backend() -> None:
    pytest.importorskip("jax")
    program = """
import json, jax
from cerebro.machine import environment
found = [environment.jax_backend()]
jax.numpy.zeros(1)
print(json.dumps([*found, environment.jax_backend(), jax.default_backend()]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    before, after, said = json.loads(done.stdout)
    assert before is None and after == said


@pytest.mark.parametrize(
    ("record", "uses"),
    [({}, False), ({"cuda": {}}, True), ({"jax_backend": "cpu"}, False),
     ({"jax_backend": "gpu"}, True)],
)  # fmt: skip
def test_uses_gpu(record: dict[str, object], uses: bool) -> None:
    assert environment.uses_gpu(record) is uses


def test_nvidia_package_versions_are_recorded_only_for_gpu_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {"nvidia-cublas-cu12": "12.8.4.1", "nvidia-cudnn-cu12": "9.10.2"}
    monkeypatch.setattr(environment, "package_version", known.get)
    assert environment.describe(1, "cuda:0")["cuda_packages"] == known
    assert "cuda_packages" not in environment.describe(1)
    before = {"cuda_packages": {"nvidia-cublas-cu12": "12.8.3.1"}}
    assert environment.list_differences(before, environment.describe(1, "cuda:0")) == [
        "cuda_packages.nvidia-cublas-cu12 was 12.8.3.1, is 12.8.4.1",
        "cuda_packages.nvidia-cudnn-cu12 was absent, is 9.10.2",
    ]
    assert environment.list_differences(before, environment.describe(1)) == []


def run_program(text: str) -> str:
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_jax_is_imported_only_for_non_default_settings() -> None:
    pytest.importorskip("jax")
    run_program(
        "import os, sys; from cerebro.machine.environment import describe\n"
        "from cerebro.machine.libraries import JAX\n"
        "from cerebro.machine.libraries import _first_settings\n"
        "first = _first_settings()\n"
        "assert JAX.present() == {} and 'jax' not in describe()\n"
        "JAX.apply({}); JAX.apply(first)\n"
        "with JAX.of_run(first): pass\n"
        "assert 'jax' not in sys.modules\n"
        "os.environ['JAX_DEBUG_NANS'] = '1'  # JAX would begin with it\n"
        "JAX.apply(first)\n"
        "assert JAX.present() == describe()['jax'] == first"
    )


def test_jax_settings_are_applied_and_restored() -> None:
    pytest.importorskip("jax")
    run_program(
        "from cerebro.machine.libraries import JAX\n"
        "other = {'enable_x64': True, 'default_prng_impl': 'rbg', 'debug_nans': True,\n"
        "         'threefry_partitionable': False,\n"
        "         'default_matmul_precision': 'highest', 'numpy_dtype_promotion': 'strict',\n"
        "         'numpy_rank_promotion': 'raise'}\n"
        "with JAX.of_run({**other, 'of_another_version': 1}): assert JAX.present() == other\n"
        "first = JAX.present()\n"
        "assert not first.items() & other.items()\n"
        "JAX.begin_process(other)\n"
        "assert JAX.present() == other\n"
        "JAX.begin_process({})\n"
        "assert JAX.present() == first\n"
        "import jax\n"
        "JAX.begin_process(first)\n"
        "jax.config.update('jax_enable_x64', True)  # as a module does that is imported once\n"
        "JAX.begin_process(first)\n"
        "assert jax.config.jax_enable_x64"
    )


def test_a_jax_setting_fixed_by_a_with_block_is_refused() -> None:
    pytest.importorskip("jax")
    run_program(
        "import jax; from cerebro import InputError\n"
        "from cerebro.machine.libraries import JAX\n"
        "before = JAX.present()\n"
        "with jax.debug_nans(True):\n"
        "    try: JAX.apply({**before, 'enable_x64': True})\n"
        "    except InputError as error: text = str(error)\n"
        "assert 'debug_nans is True here because of a with block' in text, text\n"
        "assert JAX.present() == before"
    )


def test_a_process_without_keras_does_not_import_it_for_default_settings() -> None:
    program = (
        "import sys; sys.modules['keras'] = None\n"
        "from cerebro.machine.libraries import KERAS\n"
        "KERAS.apply({'version': '3', 'backend': 'torch', **KERAS.FIRST})\n"
        "try:\n"
        "    KERAS.apply({'backend': 'torch', **KERAS.FIRST, 'floatx': 'float16'})\n"
        "except ImportError:\n"
        "    print('imported')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("imported\n", 0), done.stderr
