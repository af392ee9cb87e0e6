"""Show a run: progress, tables, plots and HTML pages.

Nothing here trains, opens or changes a run. During a run the input is a
:class:`~cerebro.report.progress.Snapshot`, afterwards a ``Result``. Only
:mod:`cerebro.report.plots` imports matplotlib, only the live table rich, and only
:mod:`cerebro.report.block` Jinja.
"""
