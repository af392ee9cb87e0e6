"""Libraries that another thread has begun to import count as not imported."""

from __future__ import annotations

import importlib.machinery
import sys
import threading
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cerebro.data import depots
from cerebro.machine import devices, environment, flags, generators
from cerebro.machine.imports import find_whole_module
from cerebro.machine.libraries import present_settings, settings_of_run
from cerebro.worker import contents


class NumpyModel:
    def __init__(self) -> None:
        self.weights = np.zeros(3)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}


@pytest.fixture(params=["torch", "keras", "jax"])
def begun(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a library whose import has only begun."""
    module = types.ModuleType(request.param)
    module.__spec__ = importlib.machinery.ModuleSpec(request.param, None)
    module.__spec__._initializing = True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, request.param, module)
    return str(request.param)


def test_a_unit_does_not_use_a_library_before_it_is_whole(begun: str) -> None:
    assert find_whole_module(begun) is None
    assert present_settings()[begun] == {}
    with flags.compute_settings(1, True), settings_of_run({}):
        pass
    flags.keep_choices()()
    if begun == "torch":
        assert not generators.uses_torch(NumpyModel())
        assert contents._may_be_lost(np.zeros(3))
        assert environment.cuda() is None and environment.torch_libraries() == {}
        assert depots.device_name("cuda") == "cuda:0"
        assert not devices.is_short_of_gpu_memory(ValueError())
        generators.seed_anew()


def test_a_library_is_used_once_its_import_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "slow_library.py").write_text(
        "import sys, threading\n"
        "begun, end = sys.modules['slow_library_events'].events\n"
        "begun.set()\n"
        "end.wait()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    events = types.ModuleType("slow_library_events")
    begun, end = threading.Event(), threading.Event()
    events.events = begun, end  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "slow_library_events", events)
    assert find_whole_module("slow_library") is None
    importing = threading.Thread(target=__import__, args=("slow_library",))
    importing.start()
    try:
        assert begun.wait(60)
        assert "slow_library" in sys.modules and find_whole_module("slow_library") is None
    finally:
        end.set()
        importing.join()
    assert find_whole_module("slow_library") is sys.modules["slow_library"]
    del sys.modules["slow_library"]
