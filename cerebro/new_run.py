"""The folder of a new run: what is made of it, and what it says about the run."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import cerebro.environment as environment
from cerebro import durable
from cerebro.conduct import Opened
from cerebro.errors import InputError
from cerebro.owner import FILE as OWNER_FILE
from cerebro.owner import Owner
from cerebro.plain_files import path_of, read_bytes
from cerebro.recipe import Recipe
from cerebro.settings import Settings, refuse_folder
from cerebro.state_files import CLAIM
from cerebro.store import FILE, Store

MADE = ("states", "trials", "control")
"""Folders of a run."""


def make_run(settings: Settings) -> Opened:
    """Make the run's folder and its store; if that fails, nothing is left of them."""
    folder = settings.folder
    existed = folder.exists()
    owner = None
    try:
        make_durable_folder(folder)
        owner = Owner.take(folder)
        if (folder / FILE).exists():  # somebody else has made it meanwhile
            refuse_folder(folder)
        make_folders(settings)
        record = run_record(settings)
        claim_state_dir(settings, record["id"])
        return Opened(owner, Store.create(folder, record))
    except BaseException as error:
        if isinstance(error, InputError):  # it is another's
            if owner is not None:
                owner.release()
            raise
        remove_run(folder, keep=existed)
        if owner is not None:
            owner.release()
        if isinstance(error, OSError):
            raise OSError(_why_not_made(settings, error)) from error
        raise


def _why_not_made(settings: Settings, error: OSError) -> str:
    what, argument = f"the run folder {settings.folder}", "run="
    folder = settings.folder.absolute()
    at = Path(str(error.filename or folder)).absolute()
    if at != folder and folder not in at.parents and at not in folder.parents:
        what, argument = f"state_dir {settings.state_dir}", "state_dir="
    return (
        f"cannot make {what}: {error.strerror or error}: choose another {argument} that can be "
        "written and has room"
    )


def remove_run(folder: Path, *, keep: bool) -> None:
    """Remove what was made of a run, and its folder unless it was there before."""
    for name in MADE:
        shutil.rmtree(folder / name, ignore_errors=True)
    with contextlib.suppress(OSError):
        for file in (*folder.glob("run.sqlite*"), folder / OWNER_FILE):
            file.unlink(missing_ok=True)
        if not keep:
            folder.rmdir()


def make_durable_folder(folder: Path) -> None:
    """Make a folder, and those that it is in, so that their names outlive a loss of power."""
    folder = folder.absolute()
    if not folder.parent.exists():
        make_durable_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    with contextlib.suppress(PermissionError):  # a folder that may be written, but not read
        durable.sync_folder(folder.parent)


def make_folders(settings: Settings) -> None:
    """Make the folders of a run that are not there."""
    for folder in (*(settings.folder / name for name in MADE), settings.state_dir):
        folder.mkdir(parents=True, exist_ok=True)


def claim_state_dir(settings: Settings, run: str) -> None:
    """Note in a folder for states that is not the run's own whose they are.

    Raises
    ------
    InputError
        If they are another run's.
    """
    if settings.state_dir == settings.folder / "states":
        return
    file = settings.state_dir / CLAIM
    try:
        claimed = read_bytes(file, 100).decode("utf-8", "replace")
    except FileNotFoundError:
        claimed = None
    if claimed not in (None, run) and any(settings.state_dir.glob("*.slots")):
        raise InputError(
            f"state_dir {settings.state_dir} holds the states of another run: empty it if that run "
            "is over; a run that is resumed goes on from its last finished epochs then"
        )
    if claimed != run:
        durable.replace_file(file, run.encode())


def slots_folder(
    run: Path, state_dir: str | os.PathLike[str] | None, *, goes_on: bool = False
) -> Path:
    """Where live trials keep their states; not where another run has left some."""
    if state_dir is None:
        return run / "states"
    folder = path_of("state_dir", state_dir)
    if not goes_on and any(folder.glob("*.slots")):
        raise InputError(
            f"state_dir {folder} holds the states of another run: give every run a folder of "
            "its own, or empty it if that run is over"
        )
    return folder


def run_record(settings: Settings) -> dict[str, Any]:
    """What the store keeps about the run as a whole."""
    validation = settings.validation
    return {
        "id": uuid.uuid4().hex,
        "argv": [str(argument) for argument in sys.argv],
        "status": "running",
        "started": time.time(),
        "owner": {"pid": os.getpid(), "host": os.uname().nodename},
        "settings": settings.record(),
        "points": list(settings.points),
        "space": settings.space_json,
        "searcher_class": settings.searcher_class,
        "build": Recipe.of(settings.build).to_json(),
        "data": settings.train.spec(),
        "data_checksum": settings.train.checksum,
        "validation": None if validation is None else validation.spec(),
        "validation_checksum": None if validation is None else validation.checksum,
        "folds": None if settings.folds is None else settings.folds.to_json(),
        "folds_checksum": None if settings.folds is None else settings.folds.checksum,
        "num_shards": settings.train.num_shards,
        # None: in the run's own folder, wherever that will be.
        "state_dir": None
        if settings.state_dir == settings.folder / "states"
        else str(settings.state_dir.resolve()),
        "environment": environment.describe(settings.threads),
    }
