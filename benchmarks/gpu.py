"""All GPU benchmarks, one after the other: ``python -m benchmarks.gpu``.

Each part is a separate program (``python -m benchmarks.gpu_search``, ...), so a failure does not
affect the others. ``--parts`` selects parts; ``--quick`` and ``--json FILE`` are passed on, with
the part's name added to the file's.

Exit status: 0 if all parts ran, 1 if one failed, 3 if this machine has no GPU.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.harness import parser
from cerebro.machine import devices

PARTS = {
    "gather": "batches by kernel against copies in device memory and index_select",
    "loader": "streamed batches against pinned copies and DataLoader",
    "states": "states to and from slots against pinned copies",
    "lanes": "16 networks at once, ResNet-18 and adapters: plain PyTorch's ways and Cerebro",
    "search": "16 small CNNs: workers, graphs, processes per trial, torch.compile",
}
NO_GPU = 3


def main() -> int:
    options = parser(__doc__.splitlines()[0])
    options.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    arguments = options.parse_args()
    found = devices.lookup()
    if not found.devices:
        print(f"no GPU here: {found.problem}; nothing was measured")
        return NO_GPU
    for device in found.devices:
        print(f"{device.name}: {device.label}, {device.memory / 1e9:.0f} GB")
    failed = []
    for part in arguments.parts:
        module = f"benchmarks.gpu_{part}"
        if importlib.util.find_spec(module) is None:
            print(f"\n--- {part}: there is no {module}")
            failed.append(part)
            continue
        print(f"\n--- {part}: {PARTS[part]}", flush=True)
        command = [sys.executable, "-m", module]
        command += ["--quick"] if arguments.quick else []
        if arguments.json:
            file = Path(arguments.json)
            command += ["--json", str(file.with_stem(f"{file.stem}-{part}"))]
        begun = time.monotonic()
        status = subprocess.run(command).returncode
        print(f"--- {part}: {time.monotonic() - begun:.0f} s, status {status}", flush=True)
        if status != 0:
            failed.append(part)
    if failed:
        print(f"\nfailed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
