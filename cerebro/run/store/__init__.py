"""The run store: ``run.sqlite`` in the run's folder.

One process writes; any number read, also while the run is live. The tables are
plain SQLite, readable without Cerebro:

``meta``    key, JSON value: settings, data, build, environment, status
``trials``  number, JSON configuration, status, target epochs, error, parent
``epochs``  trial, epoch, seconds, state hash, file of the state
``metrics`` trial, epoch, name, value: ``train_*``, ``val_*`` and the short names
``units``   one row per unit that ran: where, when, how many rows
``decisions``  the decisions and suggestions of an adaptive searcher, in order
``extensions``  trials that were trained for more epochs than planned at first
``events``  everything else: lost workers, retries, warnings

`encoding` encodes values, `schema` defines the tables and their version,
`writing` has the thread that writes and `transaction` the rows that it commits together,
`reading` reads, and `checking` rejects files that only look like stores.
"""

from cerebro.run.store.checking import check_meta, check_rows
from cerebro.run.store.reading import (
    LastDecision,
    check_whole_store,
    count_decisions,
    read_clock,
    read_decisions,
    read_last_decisions,
    read_meta,
    read_ranking,
    read_trials,
    read_unit_seconds,
    reader,
)
from cerebro.run.store.schema import (
    FILE,
    PARTS,
    SCHEMA_VERSION,
    OtherVersionError,
    decode,
    default_run_path,
    encode,
    unused_folder,
)
from cerebro.run.store.writing import Store

__all__ = [
    "FILE", "PARTS", "SCHEMA_VERSION", "LastDecision", "OtherVersionError", "Store", "check_meta",
    "check_rows", "check_whole_store", "count_decisions", "decode", "default_run_path", "encode",
    "read_clock", "read_decisions", "read_last_decisions", "read_meta", "read_ranking",
    "read_trials", "read_unit_seconds", "reader", "unused_folder",
]  # fmt: skip
