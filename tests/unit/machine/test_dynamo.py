"""`postpone_dynamo`: TorchDynamo is imported only by code that uses it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")

TRAIN = """
import sys, torch
def train():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        net(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
    return net, optimizer
"""

POSTPONE = "from cerebro.machine import flags\nflags.postpone_dynamo()\n"


def output(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_training_does_not_import_dynamo_and_gives_the_same_bits() -> None:
    end = (
        "net, _ = train()\n"
        "print(sorted(m for m in sys.modules if m.startswith('torch._dynamo.')) == [],"
        " [p.detach().numpy().tobytes().hex() for p in net.parameters()])"
    )
    without, bits = output(POSTPONE + TRAIN + end).split(" ", 1)
    ordinary, expected = output(TRAIN + end).split(" ", 1)
    assert (without, ordinary) == ("True", "False")
    assert bits == expected


@pytest.mark.parametrize(
    "use",
    [
        "torch._dynamo.reset()",
        "import torch._dynamo.config; torch._dynamo.config.verbose",
        "from torch._dynamo.testing import CompileCounter",
        "from torch._dynamo import *",
        "torch.compile(net, backend='eager')(torch.ones(1, 3))",
    ],
)
def test_any_other_use_imports_the_real_dynamo(use: str) -> None:
    code = POSTPONE + TRAIN + f"net, optimizer = train()\n{use}\n"
    code += (
        "import types\n"
        "real = sys.modules['torch._dynamo']\n"
        "print(type(real) is types.ModuleType, torch._dynamo is real,"
        " real.__file__.rpartition('/')[2],"
        " any(type(f).__module__ == 'cerebro.machine.flags' for f in sys.meta_path))"
    )
    assert output(code) == "True True __init__.py False"


def test_functions_passed_to_disable_stay_out_of_compiled_steps() -> None:
    """A compiled step leaves the optimizer's own functions out, as without the stand-in."""
    code = TRAIN + (
        "net, optimizer = train()\n"
        "def step():\n"
        "    optimizer.zero_grad()\n"
        "    net(torch.ones(4, 3)).square().sum().backward()\n"
        "    optimizer.step()\n"
        "compiled = torch.compile(step, backend='eager')\n"
        "compiled(), compiled()\n"
        "from torch._dynamo.utils import counters\n"
        "print(sorted(counters['graph_break'].values()), counters['frames'],"
        " [p.detach().numpy().tobytes().hex() for p in net.parameters()])"
    )
    assert output(POSTPONE + code) == output(code)


def test_an_imported_dynamo_is_not_replaced() -> None:
    code = "import torch._dynamo, sys\nbefore = torch._dynamo\n" + POSTPONE
    code += "print(sys.modules['torch._dynamo'] is before,"
    code += " any(type(f).__module__ == 'cerebro.machine.flags' for f in sys.meta_path))"
    assert output(code) == "True False"
