"""Search spaces: the possible configurations, and how to draw one.

A space is a mapping of names to dimensions::

    {
        "lr": loguniform(1e-4, 1e-1),
        "batch_size": [32, 256],                      # a list means choice([32, 256])
        "layers": integer(1, 4),
        "width": range(16, 65, 16),                   # or a range, or a one-dimensional array
        "optimizer": ["sgd", "adamw"],
        "if sgd": when("optimizer", "sgd", {"momentum": uniform(0.0, 0.99)}),
        "augment": {"crop": [0, 2, 4], "flip": [False, True]},   # nested
        "epochs_warm": 1,                             # a constant
    }

A key whose value is a :func:`when`, or a list of them, is only a label: it does not appear in the
configuration. If the condition holds, the entries of the conditional space are merged into the
mapping that contains the ``when``.

Every dimension draws from a separate stream, keyed by the search's seed, the trial's number and
the dimension's path. Adding, removing or moving a dimension therefore leaves the values of the
others unchanged.

Dimensions of Ray Tune, Optuna and SciPy are accepted too (`cerebro.space.foreign`).

Configurations are stored as JSON: a value is None, a bool, a finite number, a string, or a list or
mapping of these; tuples become lists. Choose among functions or classes by name. A tuple instead
of a dimension is an error, because it could mean a list or `uniform`.
"""

from cerebro.space.dimensions import (
    Choice,
    Constant,
    Dimension,
    Integer,
    LogUniform,
    Normal,
    Path,
    Uniform,
    When,
    choice,
    integer,
    json_value,
    loguniform,
    normal,
    path_name,
    uniform,
    when,
)
from cerebro.space.foreign import Quantized
from cerebro.space.search_space import (
    GRID_LIMIT,
    Node,
    Space,
    SpaceLike,
    as_space,
    iterate_leaves,
    value_at,
)

__all__ = [
    "GRID_LIMIT",
    "Choice",
    "Constant",
    "Dimension",
    "Integer",
    "LogUniform",
    "Node",
    "Normal",
    "Path",
    "Quantized",
    "Space",
    "SpaceLike",
    "Uniform",
    "When",
    "as_space",
    "choice",
    "integer",
    "iterate_leaves",
    "json_value",
    "loguniform",
    "normal",
    "path_name",
    "uniform",
    "value_at",
    "when",
]
