"""What a run looks like to people: progress, tables, pictures and HTML.

Nothing here trains, opens a run or changes one. Everything is drawn from a
:class:`~cerebro.report.snapshot.Snapshot` (while a run goes on) or from a
``Result`` (when it is over). matplotlib is imported only inside
:mod:`cerebro.report.plots`, rich only by the live table.
"""
