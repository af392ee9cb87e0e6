"""Progress, tables, pictures and HTML pages of a run.

Nothing here trains, opens a run or changes one. Everything is drawn from a
:class:`~cerebro.report.snapshot.Snapshot` (during a run) or from a
``Result`` (when it is over). matplotlib is imported only inside
:mod:`cerebro.report.plots`, rich only by the live table.
"""
