"""Write HTML by Jinja templates: a run's and a trial's view in a notebook, and a run's page.

Every value is escaped, unless its template marks it as safe.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cerebro.errors import escape_unprintable

if TYPE_CHECKING:
    from jinja2 import Environment

FOLDER = Path(__file__).parent


def fill_template(name: str, **values: Any) -> str:
    return _environment().get_template(name).render(values)


@functools.cache
def _environment() -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def write(value: Any) -> Any:
        return value if isinstance(value, Markup) else escape_unprintable(str(value))

    return Environment(
        loader=FileSystemLoader(FOLDER),
        undefined=StrictUndefined,
        autoescape=True,
        finalize=write,
        trim_blocks=True,
        lstrip_blocks=True,
    )
