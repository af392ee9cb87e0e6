"""The page of a run: `cerebro watch` serves it while a search runs, `cerebro report` writes it.

`view` reads a run's store, a little at each poll; `about` collects the facts that do not change
from poll to poll; `page` makes the document; `server` and `actions` serve it on this machine and
pass what its buttons ask for to `cerebro.control`. The files in the folder ``page`` are the page
itself: plain HTML, CSS and JavaScript, without a build step.
"""
