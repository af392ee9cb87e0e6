"""Objects in object storage, such as S3 or Google Cloud Storage, through fsspec.

An object is written as a whole or not at all, and its name is visible only when it is complete.
There are no renames, no locks and no partial writes. fsspec and the package of the provider are
imported at the first use.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from cerebro.errors import InputError, one_line
from cerebro.machine.imports import import_extra, install_hint

MAX_TEXT = 300
"""The longest cause, in characters, in a message."""


class StorageError(OSError):
    """The object storage refused, or was not reached."""


class MissingObjectError(StorageError, FileNotFoundError):
    """There is no object of this name."""


def is_url(value: object) -> bool:
    """Whether a path is the URL of a folder in object storage, such as ``s3://bucket/set``."""
    return isinstance(value, str) and "://" in value


class Objects:
    """The objects below a URL; their names are relative to it, with slashes.

    fsspec must know the URL: ``s3://bucket/folder``, ``gs://...``, ``az://...``. Credentials and
    endpoints come from the environment, as the provider's package reads them. Raises InputError if
    fsspec or the package is missing, or the URL is not one that they know.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        fsspec = import_extra("fsspec", "storage", f"{url} needs fsspec")
        try:
            # Listings must be current: a different process may have written.
            self._system, self._root = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        except ImportError as error:
            raise InputError(
                f"{url} needs a package that is not installed ({error}): {install_hint('storage')} "
                "for s3://, or install the provider's package"
            ) from error
        except ValueError as error:
            raise InputError(f"{url} is not a URL of object storage: {error}") from error

    def read(self, name: str) -> bytes:
        """Return an object's content; raise MissingObjectError or StorageError if this fails."""
        with self._explain_errors(f"cannot read {self.url_of(name)}"):
            return bytes(self._system.cat_file(self._path(name)))

    def get(self, name: str, file: Path) -> None:
        with self._explain_errors(f"cannot read {self.url_of(name)}"):
            self._system.get_file(self._path(name), os.fspath(file))

    def write(self, name: str, content: bytes) -> None:
        """Write an object, which appears complete; raise StorageError if this fails."""
        with self._place_for(name) as path:
            self._system.pipe_file(path, content)

    def put(self, file: Path, name: str) -> None:
        """Write a local file, like `write`; raise FileNotFoundError if it does not exist."""
        if not file.is_file():
            raise FileNotFoundError(os.fspath(file))
        with self._place_for(name) as path:
            self._system.put_file(os.fspath(file), path)

    def names(self) -> set[str]:
        """Return the names of all objects below the URL, or an empty set."""
        with (
            contextlib.suppress(MissingObjectError),
            self._explain_errors(f"cannot list {self.url}"),
        ):
            paths = self._system.find(self._root)
            prefix = self._root.rstrip("/") + "/"
            # Some tools mark a folder by an empty object with its name.
            return {name.removeprefix(prefix) for name in paths if name.startswith(prefix)} - {""}
        return set()

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; one that does not exist is no error."""
        for name in names:
            with (
                contextlib.suppress(MissingObjectError),
                self._explain_errors(f"cannot remove {self.url_of(name)}"),
            ):
                self._system.rm_file(self._path(name))

    def url_of(self, name: str) -> str:
        return f"{self.url}/{name}"

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    @contextlib.contextmanager
    def _place_for(self, name: str) -> Iterator[str]:
        """Give the path to write an object to; on a disk, it gets its name when it is complete."""
        path, protocols = self._path(name), self._system.protocol
        with self._explain_errors(f"cannot write {self.url_of(name)}"):
            if "file" not in ((protocols,) if isinstance(protocols, str) else protocols):
                yield path
                return
            self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
            temporary = f"{path}.{uuid.uuid4().hex}.tmp"
            try:
                yield temporary
                os.replace(temporary, path)  # noqa: PTH105
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary)  # noqa: PTH108

    @contextlib.contextmanager
    def _explain_errors(self, what: str) -> Iterator[None]:
        """Turn the exceptions of a provider's package, which are of any type, into ours."""
        try:
            yield
        except FileNotFoundError as error:
            raise MissingObjectError(f"{what}: there is no such object or bucket") from error
        except Exception as error:
            cause = one_line(str(error) or type(error).__name__, MAX_TEXT)
            raise StorageError(f"{what}: {cause}") from error
