"""Find hyperparameters that no trial reads: most are names that are misspelled."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from cerebro.report.findings import UNREAD, Finding
from cerebro.worker.read_names import ReadNames, names_of


class UnreadNames:
    """The names of configurations that no ``build`` has read yet.

    A name counts as unread only if no trial that has it has read it: it may depend on a choice, as
    ``momentum`` on the optimizer.
    """

    def __init__(self) -> None:
        self._known = False
        self._read: set[str] = set()
        self._unread: dict[str, None] = {}
        self._sought: set[str] = set()

    def begin(self, config: Mapping[str, Any], read: ReadNames | None) -> None:
        """Begin with what the hop check has found; None: nothing is noted in this run."""
        self._known = read is not None
        self.add(config, read)

    def add(self, config: Mapping[str, Any], read: ReadNames | None) -> None:
        """Add what ``build`` has read of a configuration; None: perhaps everything."""
        unread = () if read is None else read.unread
        self._read.update(set(names_of(config)).difference(unread))
        self._unread.update(dict.fromkeys(unread))
        self._sought.update(() if read is None else read.sought)

    def asks_about(self, config: Mapping[str, Any]) -> bool:
        """Return whether a configuration has a name that no trial is known to read."""
        return self._known and not self._read.issuperset(names_of(config))

    def make_finding(self) -> Finding | None:
        """Return the finding for a run that is over; None if every name was read."""
        names = [name for name in self._unread if name not in self._read]
        if not names:
            return None
        sought = sorted(self._sought.difference(self._read, self._unread))
        meant = [near[0] for name in names if (near := difflib.get_close_matches(name, sought, 1))]
        if meant:
            cure = f"did you mean {' and '.join(map(repr, meant))}?"
        else:
            them = "it" if len(names) == 1 else "them"
            cure = f"read {them} in build, or leave {them} out of the space"
        return Finding(UNREAD, f"no trial read {' or '.join(map(repr, names))}", cure)
