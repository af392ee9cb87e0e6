"""Files of one's own that are found in the place of a library: a ``torch.py``, say.

Python looks for modules in the folder of the script first. What then goes wrong, goes wrong
deep inside of something else; so the file is named.
"""

from __future__ import annotations

import importlib.util
import sys

LIBRARIES = (
    *("cloudpickle", "jax", "matplotlib", "numpy", "optuna", "pandas", "PIL", "pyarrow", "ray"),
    *("optax", "rich", "safetensors", "scipy", "sklearn", "torch", "torchvision"),
)
"""All of them packages: a single file is something else."""


def refuse_shadow(library: str) -> None:
    """Raise ImportError if a file would be imported in the place of a library."""
    spec = importlib.util.find_spec(library)
    if spec is not None and spec.submodule_search_locations is None:
        raise ImportError(_said(str(spec.origin), library))


def imported_shadows() -> str:
    """Name the files that were imported in the place of libraries; empty if none was."""
    said = []
    for library in LIBRARIES:
        module = sys.modules.get(library)
        file = getattr(module, "__file__", None)
        if file is not None and not hasattr(module, "__path__"):
            said.append(_said(file, library))
    return "; ".join(said)


def _said(file: str, library: str) -> str:
    return f"{file} is found in the place of the library {library}: rename it"
