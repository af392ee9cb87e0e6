"""Make the page's document: served, with its files beside it, or whole, with a run's data inside.

Scripts and styles are those of the folder ``page``, and the content security policy allows no
others, so markup in a name or a log could not run anything even if a script took it for markup.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from cerebro.report import plots
from cerebro.watch import about
from cerebro.watch.view import View

FOLDER = Path(__file__).parent / "page"
SCRIPTS = (
    "values.js", "model.js", "hover.js", "summary.js", "curves.js", "workers.js", "events.js",
    "trials.js", "settings.js", "details.js", "dialogs.js", "about.js", "main.js",
)  # fmt: skip
"""The page's scripts, in the order in which they are read; a later one may use earlier ones."""

MAX_TRIALS = 2000  # in a report, best first; a browser sorts this many at once
KINDS = ("curves", "gantt", "parallel", "importance", "slice")

POLICY = (
    "default-src 'none'; script-src {0}; style-src {1}; img-src data:; connect-src {2}; "
    "base-uri 'none'; form-action 'none'"
)
SERVED_POLICY = POLICY.format("'self'", "'self'", "'self'") + "; frame-ancestors 'none'"


@cache
def read_file(name: str) -> str:
    return (FOLDER / name).read_text(encoding="utf-8")


def make_served() -> str:
    """Return the page without any data, with links to its files."""
    style = '<link rel="stylesheet" href="/page.css">'
    scripts = "\n".join(f'<script src="/{name}" defer></script>' for name in SCRIPTS)
    return _fill(style=style, scripts=scripts)


def make_report(
    result: Any,
    *,
    kinds: Sequence[str] = KINDS,
    metric: str | None = None,
    trials: Sequence[int] | None = None,
) -> str:
    """Return the page of a run with its data inside, which needs no other file and no network.

    `kinds` are the plots to draw, `metric` the one they show first, and `trials` those in the page.
    Raises InputError if there are plots, and `metric` or one of the `trials` is unknown.
    """
    if kinds:
        plots.check(result, metric, trials)
    view = View(result.saved.folder)
    view.refresh()
    view.status = result.status
    answer = view.answer(size=MAX_TRIALS)
    if trials is not None and kinds:
        answer["trials"] = [trial for trial in answer["trials"] if trial["n"] in set(trials)]
        answer["shown"] = [trial["n"] for trial in answer["trials"]]
    answer["run"] |= {"path": str(result.path), "live": False}
    data = {
        "answer": answer,
        "about": about.describe(result),
        "plots": list(kinds),
        "metric": metric,
    }
    style = read_file("page.css")
    script = "\n".join(map(read_file, SCRIPTS))
    policy = POLICY.format(_hash(script), _hash(style), "'none'")
    return _fill(
        policy=f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        style=f"<style>{style}</style>",
        data=f'<script type="application/json" id="data">{quote_json(data)}</script>',
        scripts=f"<script>{script}</script>",
    )


def quote_json(value: Any) -> str:
    """Return JSON that can stand inside a script element; raise ValueError for NaN or infinity."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)  # ASCII only
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
    return f"'sha256-{digest}'"


def _fill(**parts: str) -> str:
    """Return the document with its parts in place of the comments that name them."""
    document = read_file("page.html")
    for name in ("policy", "style", "data", "scripts"):
        before, after = document.split(f"<!-- {name} -->\n")
        document = f"{before}{parts[name]}\n{after}" if name in parts else before + after
    return document
