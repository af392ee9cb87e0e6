"""What the site needs beyond the pages: the C core's README and all design notes in the menu.

Design notes are for people who change Cerebro: the site's search leaves them out.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
CORE = "csrc.md"
INTERNAL = ("design/", CORE)
FOUND_FIRST = {  # by the site's search: the page for a task before those that mention it
    "guide/diagnosis.md": 8,
    "guide/data.md": 6,
    "coming-from/dataloader.md": 8,
    "guide/": 2,
    "tutorials/": 2,
    "benchmarks.md": 0.3,
    "comparison.md": 0.3,
}
SOURCES = re.compile(r"\[([^\]]+)\]\((?:\.\./)+examples/[^)]*\)")  # links to programs
ROLES = re.compile(r":(?:attr|class|data|func|meth|mod):<code>~?")
HIDDEN = re.compile(r"^<!-- run\n(?s:.*?)^-->\n|^ *<!-- not run: .*\n", re.MULTILINE)


def on_config(config: Any) -> Any:
    """List every design note in the menu."""
    notes = sorted(path.name for path in (ROOT / "docs" / "design").glob("*.md"))
    design = next(entry["Design notes"] for entry in config["nav"] if "Design notes" in entry)
    design += [f"design/{name}" for name in notes if name != "README.md"]
    design.append({"The C core": CORE})
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add the C core's README, which lies beside its sources."""
    content = (ROOT / "csrc" / "README.md").read_text(encoding="utf-8")
    files.append(File.generated(config, CORE, content=_within(content)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links lead to pages of the site; leave out code that only tests read."""
    if page.file.src_uri.startswith(INTERNAL):
        page.meta["search"] = {"exclude": True}
    else:
        boosts = (FOUND_FIRST[at] for at in FOUND_FIRST if page.file.src_uri.startswith(at))
        page.meta["search"] = {"boost": next(boosts, 1)}
    markdown = HIDDEN.sub("", markdown)
    up = "../" * page.file.src_uri.count("/")
    markdown = re.sub(r"\]\((?:\.\./)+csrc/README\.md", f"]({up}{CORE}", markdown)
    if page.is_homepage:
        page.meta["hide"] = ["navigation", "toc"]  # it leads to all pages itself
    return SOURCES.sub(r"\1", markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Leave out the roles of docstrings, such as that of :class:`cerebro.Dataset`."""
    return ROLES.sub("<code>", html)


def _within(content: str) -> str:
    """Return the README with links to pages of the site, and none to sources."""
    content = content.replace("](../docs/", "](")
    return re.sub(r"\[([^\]]+)\]\((?!design/|guide/|#|http)[^)]*\)", r"\1", content)
