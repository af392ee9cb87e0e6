"""Where an Optuna study is kept, and what is said when it cannot be used."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from cerebro.errors import CerebroError, InputError, text_of

_ADVICE = {
    "locked": (
        "another process holds it: end that process, or wait longer with "
        "RDBStorage(url, engine_kwargs={'connect_args': {'timeout': 60}})"
    ),
    "not a database": "the file is damaged or something else: give another storage=",
    "malformed": "the file is damaged: restore it, or give another storage=",
    "readonly": "make it writable, or give another storage=",
    "unable to open": "its folder must exist and be writable",
    "no such table": "it is no storage of Optuna, or its making was cut off: give another storage=",
    "table schema": "",  # Optuna says what to do
}


@contextlib.contextmanager
def storage_errors(
    optuna: Any, storage: Any, name: str, *, kind: type[CerebroError] = InputError, more: str = ""
) -> Iterator[None]:
    """Say in one line which storage cannot be used, why, and what to do.

    Parameters
    ----------
    kind
        What is raised in place of what the storage raised.
    more
        What else there is to say.
    """
    try:
        yield
    except CerebroError:
        raise
    except Exception as error:
        if not _is_of_storage(optuna, error):
            raise
        cause = _cause(error)
        advice = next((text for key, text in _ADVICE.items() if key in cause), "")
        parts = [f"the storage of the study {name!r} ({address(storage)}) fails", cause, advice]
        raise kind(": ".join(part for part in parts if part) + more) from error


def address(storage: Any) -> str:
    """A storage's URL without its password, or what it is."""
    backend = getattr(storage, "_backend", storage)
    url = backend if isinstance(backend, str) else getattr(backend, "url", None)
    if url is None:
        return type(backend).__name__
    return re.sub(r"://([^:/@]*):[^@]*@", r"://\1:***@", str(url))


def _is_of_storage(optuna: Any, error: BaseException) -> bool:
    if isinstance(error, optuna.exceptions.StorageInternalError):
        return True
    if type(error).__module__.startswith(("sqlalchemy.", "alembic.")):
        return True
    return isinstance(error, RuntimeError) and "table schema" in str(error)


def _cause(error: BaseException) -> str:
    """What the database itself says, without the statement that it was given."""
    inner: Any = error
    while inner.__cause__ is not None:
        inner = inner.__cause__
    return text_of(getattr(inner, "orig", None) or inner, 300)
