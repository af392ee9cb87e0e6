"""The run store: ``run.sqlite`` in the run's folder.

One process writes; any number read, also while the run is live. The tables are
plain SQLite, readable without Cerebro:

``meta``    key, JSON value: settings, data, build, environment, status
``trials``  number, JSON configuration, status, target epochs, error, parent, origin, times
``epochs``  trial, epoch, seconds, state hash, file of the state
``metrics`` trial, epoch, name, value: ``train_*``, ``val_*`` and the short names
``units``   one row per unit that ran: where, when, how many rows
``decisions``  the decisions and suggestions of an adaptive searcher, in order
``extensions``  trials that were trained for more epochs than planned at first
``actions``  what the user asked of the running search, and what became of it
``events``  everything else: lost workers, retries, warnings

`schema` defines the tables, their version and how values are encoded, `writing` has the thread that
writes, and `reading` reads, and rejects files that only look like stores.
"""

from cerebro.run.store.reading import LastDecision as LastDecision
from cerebro.run.store.reading import check_meta as check_meta
from cerebro.run.store.reading import check_rows as check_rows
from cerebro.run.store.reading import check_whole_store as check_whole_store
from cerebro.run.store.reading import count_rows as count_rows
from cerebro.run.store.reading import read_actions as read_actions
from cerebro.run.store.reading import read_clock as read_clock
from cerebro.run.store.reading import read_decisions as read_decisions
from cerebro.run.store.reading import read_last_decisions as read_last_decisions
from cerebro.run.store.reading import read_meta as read_meta
from cerebro.run.store.reading import read_ranking as read_ranking
from cerebro.run.store.reading import read_trials as read_trials
from cerebro.run.store.reading import read_unit_seconds as read_unit_seconds
from cerebro.run.store.reading import reader as reader
from cerebro.run.store.schema import FILE as FILE
from cerebro.run.store.schema import PARTS as PARTS
from cerebro.run.store.schema import OtherVersionError as OtherVersionError
from cerebro.run.store.schema import decode as decode
from cerebro.run.store.schema import encode as encode
from cerebro.run.store.schema import unused_folder as unused_folder
from cerebro.run.store.writing import Store as Store
