"""Create, claim and describe the folder of a run, and sweep it at the end.

Sweeping usually finds nothing: a state is deleted after the row that named it, slots with their
trial. It deletes what killed workers left half-written, and what a process that died after the
commit could not delete.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from cerebro.arguments import check_one_of, warn_user
from cerebro.data.given_rows import FOLDERS, is_rows, write_given_rows
from cerebro.errors import CorruptDataError, InputError
from cerebro.machine import durable, environment
from cerebro.machine.disk import Disk
from cerebro.machine.files import path_of
from cerebro.machine.local import LOCAL, Clock, Machine
from cerebro.run.owner import FILE as OWNER_FILE
from cerebro.run.owner import NoLocksError, Owner, owner_of
from cerebro.run.recipe import Recipe
from cerebro.run.records import ENDED
from cerebro.run.settings import Settings
from cerebro.run.states import CLAIM, read_claimant, remove_frozen, remove_unneeded
from cerebro.run.store import FILE, PARTS, Store, read_meta, reader, unused_folder


def make_run(
    settings: Settings, machine: Machine, own: Callable[[Path], Owner] = Owner.take
) -> OwnedRun:
    """Create the run's folder and its store, or leave nothing behind; `own` makes it this run's."""
    folder, disk = settings.folder, machine.disk
    if gives_way(folder):
        make_way(folder)
    existed = disk.exists(folder)
    owner = None
    try:
        make_durable_folder(folder, disk)
        owner = own(folder)
        if disk.exists(folder / FILE):  # a different process has created it meanwhile
            refuse_folder(folder)
        make_folders(folder, settings.state_dir, disk)
        record = run_record(settings, machine.clock)
        claim_state_dir(settings.state_dir, folder, record["id"], disk)
        return OwnedRun(owner, Store.create(folder, record, machine))
    except BaseException as error:
        if not isinstance(error, InputError):  # else the run belongs to a different process
            remove_run(folder, disk, keep=existed)
        if owner is not None:
            owner.release()
        if isinstance(error, OSError) and not isinstance(error, NoLocksError):
            raise OSError(_explain_failure(folder, settings.state_dir, error)) from error
        raise


def _explain_failure(run: Path, state_dir: Path, error: OSError) -> str:
    what, argument = f"the run folder {run}", "run="
    folder = run.absolute()
    at = Path(str(error.filename or folder)).absolute()
    if at != folder and folder not in at.parents and at not in folder.parents:
        what, argument = f"state_dir {state_dir}", "state_dir="
    return (
        f"cannot make {what}: {error.strerror or error}: choose another {argument} that can be "
        "written and has free space"
    )


def remove_run(folder: Path, disk: Disk, *, keep: bool) -> None:
    """Remove an incomplete run; remove its folder, too, unless it existed before (`keep`)."""
    for name in PARTS:
        disk.remove_folder(folder / name)
    with contextlib.suppress(OSError):
        for name in disk.list(folder):
            if name.startswith(FILE) or name in (OWNER_FILE, BACKGROUND_LOG):
                disk.remove(folder / name)
        if not keep:
            disk.remove_empty_folder(folder)


def make_durable_folder(folder: Path, disk: Disk = LOCAL.disk) -> None:
    """Create a folder and its parents so that their names survive a power failure."""
    folder = folder.absolute()
    if not disk.exists(folder.parent):
        make_durable_folder(folder.parent, disk)
    disk.make_folder(folder)
    with contextlib.suppress(PermissionError):  # the folder may be writable, but not readable
        durable.sync_folder(folder.parent, disk)


def make_folders(run: Path, state_dir: Path, disk: Disk) -> None:
    for folder in (*(run / name for name in PARTS), state_dir):
        disk.make_folder(folder)


def claim_state_dir(state_dir: Path, folder: Path, run_id: str, disk: Disk) -> None:
    """Write the run's id to a separate slots folder; raise InputError if it has another's slots."""
    if state_dir == folder / "states":
        return
    claimed = read_claimant(state_dir, disk)
    holds_slots = any(name.endswith(".slots") for name in disk.list(state_dir))
    if claimed not in (None, run_id) and holds_slots:
        raise InputError(
            f"state_dir {state_dir} holds the states of another run: empty it if that run "
            "is over; resuming it then continues from its last finished epochs"
        )
    if claimed != run_id:
        durable.replace_file(state_dir / CLAIM, run_id.encode(), disk)


def slots_folder(
    run: Path, state_dir: str | os.PathLike[str] | None, *, goes_on: bool = False
) -> Path:
    """Return the folder for slots; raise InputError if it holds slots of a different run."""
    if state_dir is None:
        return run / "states"
    folder = path_of("state_dir", state_dir)
    if not goes_on and any(folder.glob("*.slots")):
        raise InputError(
            f"state_dir {folder} holds the states of another run: give every run its own "
            "folder, or empty it if that run is over"
        )
    return folder


def run_record(settings: Settings, clock: Clock) -> dict[str, Any]:
    """Return the description of the whole run, as the store keeps it."""
    validation, folds, strategy = settings.validation, settings.folds, settings.strategy
    exactness = settings.exactness
    return {
        "id": uuid.uuid4().hex,
        "argv": [str(argument) for argument in sys.argv],
        "status": "running",
        "started": clock.time(),
        "owner": {"pid": os.getpid(), "host": os.uname().nodename},
        "settings": settings.record(),
        "points": list(strategy.points),
        "space": strategy.space_json,
        "searcher_class": strategy.searcher_class,
        "build": asdict(Recipe.from_build(settings.build)),
        "data": settings.train.spec(),
        "own_rows": rows_in.get() == settings.folder,
        "data_checksum": settings.train.checksum,
        "validation": None if validation is None else validation.spec(),
        "validation_checksum": None if validation is None else validation.checksum,
        "folds": None if folds is None else folds.to_json(),
        "folds_checksum": None if folds is None else folds.checksum,
        "parts": settings.batches.make_order(settings.train, exactness.seed).num_parts,
        # None means inside the run's folder, which may be moved.
        "state_dir": None
        if settings.state_dir == settings.folder / "states"
        else str(settings.state_dir.resolve()),
        "environment": environment.describe(exactness.threads),
    }


def sweep_states(run: Path, state_dir: Path, disk: Disk = LOCAL.disk) -> list[str]:
    """Delete the state files that a closed run does not need; return their names."""
    remove_frozen(state_dir, disk)
    with reader(run, disk) as connection:
        sql = "SELECT state_file FROM epochs WHERE state_file IS NOT NULL"
        named = {name for (name,) in connection.execute(sql)}
        sql = f"SELECT number, resumable = 1 OR status NOT IN {ENDED} FROM trials"
        is_open = {number: bool(open) for number, open in connection.execute(sql)}
    return remove_unneeded(run / "states", state_dir, named, is_open, disk)


@dataclass
class OwnedRun:
    """A run that this process owns and has open for writing."""

    owner: Owner
    store: Store

    def __post_init__(self) -> None:
        self.store.before_commit = (self.owner.keep,)


BACKGROUND_LOG = "background.log"
"""The output of the process that trains a run in the background."""

UNFINISHED = {FILE + ".new", FILE + ".new-journal", OWNER_FILE, BACKGROUND_LOG, *PARTS, *FOLDERS}
"""The entries that a process leaves behind if it is killed while creating a run."""

rows_in: ContextVar[Path | None] = ContextVar("cerebro_rows_in", default=None)
"""The folder of the run being created, if it already holds rows passed to the search."""


def default_run_path() -> Path:
    """Return ``runs/<time>``, a folder that does not exist yet."""
    now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return unused_folder(Path("runs", now), LOCAL.disk)


def new_run_folder(run: str | os.PathLike[str] | None, if_exists: str) -> Path:
    """Return the folder of a new run without creating it."""
    check_one_of("if_exists", if_exists, ("error", "resume", "new"))
    if run is None and if_exists == "resume":
        raise InputError(
            "if_exists='resume' needs the run's folder, which differs each time by default: "
            "give run="
        )
    if run is None:
        return default_run_path()
    folder = path_of("run", run)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"run={str(run)!r} is a file: choose another run=, a folder")
    names = {entry.name for entry in folder.iterdir()} if folder.exists() else set()
    if names and folder != rows_in.get():
        if if_exists == "new":
            return unused_folder(folder, LOCAL.disk)
        if if_exists == "error" and gives_way(folder):
            return folder
        if if_exists == "error" or (FILE not in names and not names <= UNFINISHED):
            refuse_folder(folder)
    return folder


@contextlib.contextmanager
def reserve_folder(
    run: str | os.PathLike[str] | None, if_exists: str
) -> Iterator[str | os.PathLike[str] | None]:
    """Create the folder of a new run without a name; yield it, else `run`; remove it if unused."""
    if run is not None and if_exists != "new":
        yield run
        return
    while True:
        folder = new_run_folder(run, if_exists)
        parent_is_new = not folder.parent.exists()
        if run is not None and folder.exists():  # the user's empty folder
            yield folder
            return
        try:
            make_durable_folder(folder.parent)
            folder.mkdir()
            break
        except FileExistsError:  # another search has just taken this name
            continue
        except OSError:  # the search says what it cannot make
            yield run
            return
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # there is a run in it
            folder.rmdir()
            if parent_is_new:
                folder.parent.rmdir()


@contextlib.contextmanager
def write_rows(
    data: Any,
    validation: Any,
    run: Any,
    if_exists: Any,
    display: Any,
) -> Iterator[tuple[Any, Any, Any]]:
    """Choose a run's folder, write data given in memory to it, and yield the search's arguments.

    These are the data, the validation data and the folder. The data is removed at the end of the
    block if no run was created. `display` shows that the data is being written.
    """
    with reserve_folder(run, if_exists) as run:
        if not (is_rows(data) or is_rows(validation)):
            yield data, validation, run
            return
        folder = new_run_folder(run, if_exists)
        if if_exists == "error" and gives_way(folder):
            make_way(folder)
        made = [path for path in (*(folder / n for n in FOLDERS), folder) if not path.exists()]
        if not folder.exists():
            try:
                make_durable_folder(folder.parent)
                folder.mkdir()
            except FileExistsError:  # another search does so now
                refuse_folder(folder)
            except OSError:  # writing to it says what is wrong
                pass
        token = rows_in.set(folder)
        try:
            display.phase("writing the data")
            yield *write_given_rows(data, validation, folder, display.advise), folder
        finally:
            rows_in.reset(token)
            for path in () if (folder / FILE).exists() else made:
                if path.name in FOLDERS:
                    shutil.rmtree(path, ignore_errors=True)
                with contextlib.suppress(OSError):
                    path.rmdir()


def gives_way(folder: Path) -> bool:
    """Return whether a new run may replace the run in a folder, as after an early interrupt.

    It may if no process trains the run, no epoch is finished, and the folder holds nothing else.
    """
    if not (folder / FILE).is_file() or folder.is_symlink() or owner_of(folder) is not None:
        return False
    others = {entry.name for entry in folder.iterdir()} - UNFINISHED
    if any(not name.startswith(FILE) for name in others):
        return False
    try:
        with reader(folder) as connection:
            if connection.execute("SELECT 1 FROM epochs LIMIT 1").fetchone() is not None:
                return False
            # Otherwise a folder of this name belongs to the user, not to the run.
            return read_meta(connection).get("own_rows") is True or not any(
                (folder / name).exists() for name in FOLDERS
            )
    except (CorruptDataError, OSError):
        return False


def make_way(folder: Path) -> None:
    """Remove a run that `gives_way`; if it has trained units, rename its folder and warn."""
    with Owner.take_over(folder):
        with reader(folder) as connection:
            has_units = connection.execute("SELECT 1 FROM units LIMIT 1").fetchone() is not None
        if has_units:
            aside = unused_folder(folder.with_name(f"{folder.name}-unfinished"), LOCAL.disk)
            folder.rename(aside)
            warn_user(
                f"the run in {folder}, which has not finished an epoch, is now in {aside}: "
                "cerebro.resume() continues it; delete it if you do not need it"
            )
            return
        for name in FOLDERS:
            shutil.rmtree(folder / name, ignore_errors=True)
    remove_run(folder, LOCAL.disk, keep=False)


def refuse_folder(folder: Path) -> NoReturn:
    raise InputError(
        f"run folder {folder} exists already: choose another run=, delete it, open it with "
        "cerebro.open(), start a new one beside it with if_exists='new', or continue it with "
        "if_exists='resume'"
    )
