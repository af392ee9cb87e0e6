"""Cerebro: find the best of many deep-learning models, with model hopper parallelism.

    import cerebro

    data = cerebro.shard({"x": x, "y": y}, "data/digits")
    train, valid, test = data.split(0.7, 0.15, 0.15)
    result = cerebro.search(build, space, train, epochs=10, validation=valid,
                            n_trials=16, metric="accuracy", batch_size=32)
    result.best.load().net

``cerebro.torch``, ``cerebro.sklearn`` and similar modules are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

try:
    from cerebro._core import trial_seed as trial_seed
    from cerebro._core import visit_order as visit_order
except ImportError as error:
    from cerebro.machine.imports import refuse_hidden, refuse_shadow, refuse_uncompiled

    refuse_hidden(error)
    refuse_shadow("numpy")
    refuse_uncompiled()
    raise

from cerebro.machine.imports import is_being_located, refuse_hidden

_PLACES = {
    "api.check": ("Check", "check"),
    "api.resume": ("resume",),
    "api.search": ("search",),
    "data": ("Dataset", "images", "shard"),
    "data.validation": ("KFold",),
    "errors": (
        "CerebroError",
        "CorruptDataError",
        "DeviceError",
        "InputError",
        "RunError",
        "StateError",
        "WorkerError",
    ),
    "model": ("Info",),
    "results.result": ("Result", "open"),
    "results.trial": ("Trial",),
    "searchers": (
        "ASHA",
        "PBT",
        "GridSearch",
        "Hyperband",
        "MedianStopping",
        "QuasiRandomSearch",
        "RandomSearch",
        "SuccessiveHalving",
    ),
    "searchers.base": ("DONE", "Decision", "Searcher", "Suggestion"),
    "searchers.metrics": ("EarlyStopping",),
    "space": ("Space", "choice", "integer", "loguniform", "normal", "uniform", "when"),
}
"""The public names by module. `__init__.pyi` has the same names for type checkers and editors."""
_RARE_PLACES = {
    "api.plan": ("Plan", "plan"),
    "api.retrain": ("Replay", "refit", "replay"),
    "api.run": ("Run",),
    "searchers": ("TPE", "GaussianProcess"),
}
"""Those that are imported on first use."""
_MODULES = (
    "callbacks",
    "cluster",
    "control",
    "dask",
    "data",
    "errors",
    "jax",
    "keras",
    "native",
    "optuna",
    "ray",
    "searchers",
    "sklearn",
    "space",
    "spark",
    "testing",
    "torch",
    "transforms",
)
"""The public modules; they, too, are imported on first use."""
_MODULE_OF = {
    name: module
    for places in (_PLACES, _RARE_PLACES)
    for module, names in places.items()
    for name in names
}

# Names for ``from cerebro import *``, without `open`, which would replace the built-in, without
# `last`, which changes, and without the modules that need a framework.
__all__ = sorted({*_MODULE_OF, "transforms", "trial_seed", "visit_order"} - {"open"})


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        module = importlib.import_module(f"cerebro.{_MODULE_OF[name]}")
        # In its module, `open` is Python's.
        value = getattr(module, "open_run" if name == "open" else name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"cerebro.{name}")
    if name == "last":  # not kept here: it changes
        from cerebro.results.result import last_result

        return last_result()
    if name == "__version__":
        from cerebro.machine.environment import version

        return version()
    raise AttributeError(f"module 'cerebro' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, without modules that happen to be imported."""
    return sorted({*__all__, *_MODULES, "open", "last", "__version__"})


# A command imports only what it needs, so that the demo can start its workers before the rest is
# imported. A program has most names at once: a search then begins without delay.
if not is_being_located():
    try:
        for public_names in _PLACES.values():
            for public_name in public_names:
                __getattr__(public_name)
    except (ImportError, AttributeError) as error:
        refuse_hidden(error)
        raise
