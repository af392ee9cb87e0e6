"""Check a run for damage, for `Result.verify` and ``python -m cerebro verify``.

Three things are compared: the data with the manifest's checksums, every kept state with the hash
that its epoch recorded, and the store with itself: rows that belong together, files that rows name,
and files that no row names. Nothing is changed, and a live run is not disturbed: it is examined
twice, and only problems found both times are reported.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import cerebro._core as _core
from cerebro.data import Dataset
from cerebro.data.manifest import FILE_NAME as MANIFEST
from cerebro.data.shards import find_damage, hash_of_file
from cerebro.errors import CerebroError, CorruptDataError
from cerebro.machine.files import LinkError
from cerebro.machine.objects import is_url
from cerebro.report.format import count_noun
from cerebro.results.saved_run import SavedRun
from cerebro.run import states
from cerebro.run.records import ENDED, TrialRecord
from cerebro.run.store import FILE, OtherVersionError, reader

PUT_BACK = "restore a copy of it, or extract the readable rows (sqlite3 run.sqlite .recover)"
MOST_OF_A_KIND = 20
"""The most problems of one kind that are listed one by one."""

LOG_FILE = re.compile(r"(\d+)\.log", re.ASCII)


@dataclass(frozen=True)
class Problem:
    """A problem: where it is, what is wrong, and how to fix it."""

    where: str
    """The path of a file, or a trial: ``"trial 3, epoch 2"``."""
    what: str
    advice: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}: {self.advice}"


@dataclass(frozen=True)
class Verification:
    """The problems that `Result.verify` found; true if there are none."""

    path: Path
    problems: list[Problem] = field(default_factory=list)
    trials: int = 0
    epochs: int = 0
    states: int = 0
    """The number of kept states that were read and hashed."""
    slots: int = 0
    """The number of trials whose slots were checked."""
    data: list[Path] = field(default_factory=list)
    """The datasets that were read."""

    def __bool__(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        if self.problems:
            return "\n".join(map(str, self.problems))
        slots = f", slots of {count_noun(self.slots, 'trial')}" if self.slots else ""
        return (
            f"{self.path}: {count_noun(self.trials, 'trial')}, {count_noun(self.epochs, 'epoch')}, "
            f"{count_noun(self.states, 'state')}{slots} and {count_noun(len(self.data), 'dataset')}"
            ", as they were written"
        )


def verify_run(path: Path) -> Verification:
    """Verify a run, finished or not; see `cerebro.Result.verify`.

    Raises InputError if the folder does not hold a run, and CorruptDataError if another version of
    Cerebro wrote the run and this one cannot read it.
    """
    hashes: dict[tuple[str, str], str | None] = {}
    result = _verify_once(path, hashes)
    if not result.problems:
        return result
    status = ""
    with contextlib.suppress(CerebroError):
        status = SavedRun(path).meta["status"]
    if status == "running":  # it may have written meanwhile
        again = {(p.where, p.what) for p in _verify_once(path, hashes).problems}
        result.problems[:] = [p for p in result.problems if (p.where, p.what) in again]
    return result


def _verify_once(path: Path, hashes: dict[tuple[str, str], str | None]) -> Verification:
    # List the files first: by then, every file in the list has its row.
    files = _list_files(path / "states") + _list_files(path / "trials")
    store = path / FILE
    problems: list[Problem] = []
    try:
        problems += _store_problems(path)
        saved = SavedRun(path)
        problems += _trial_problems(saved)
    except OtherVersionError:
        raise  # this is no damage, and the message says what to do
    except CorruptDataError as error:
        what = str(error).removeprefix(f"{store} ").removeprefix(f"{store}: ")
        return Verification(path, problems or [Problem(str(store), what, PUT_BACK)])
    problems += _state_problems(saved, hashes)
    slots = states.trials_with_slots(saved.state_dir, saved.disk) if _owns_slots(saved) else ()
    problems += _slot_problems(saved, sorted(slots))
    problems += _find_strays(saved, files)
    data, of_data = _check_data(saved)
    problems += of_data
    epochs = [epoch for record in saved.records for epoch in record.epochs]
    return Verification(
        path,
        problems=list(dict.fromkeys(problems)),
        trials=len(saved.records),
        epochs=len(epochs),
        states=sum(epoch.state_file is not None for epoch in epochs),
        slots=len(slots),
        data=data,
    )


def _list_files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _store_problems(path: Path) -> Iterator[Problem]:
    """Find damage that SQLite reports, and rows whose related rows are missing."""
    store = path / FILE
    with reader(path) as connection:
        for (text,) in connection.execute(f"PRAGMA integrity_check({MOST_OF_A_KIND})"):
            if text != "ok":
                yield Problem(str(store), f"the database is damaged ({text})", PUT_BACK)
        for what, query in LONELY_ROWS.items():
            rows = connection.execute(query).fetchall()
            for row in rows[:MOST_OF_A_KIND]:
                where = f"trial {row['trial']}, epoch {row['epoch']}"
                yield Problem(
                    where, f"{what} in {store}", "rows were deleted: restore a copy of it"
                )
            if len(rows) > MOST_OF_A_KIND:
                more = f"{len(rows) - MOST_OF_A_KIND} more like this: {what}"
                yield Problem(str(store), more, "restore a copy of it")


LONELY_ROWS = {
    "the epoch's trial has no row": "SELECT DISTINCT trial, epoch FROM epochs "
    "WHERE trial NOT IN (SELECT number FROM trials)",
    "there are metrics but no row of the epoch": "SELECT DISTINCT trial, epoch FROM metrics AS m "
    "WHERE NOT EXISTS (SELECT 1 FROM epochs AS e WHERE e.trial = m.trial AND e.epoch = m.epoch)",
    "the epoch has no metrics": "SELECT trial, epoch FROM epochs AS e "
    "WHERE NOT EXISTS (SELECT 1 FROM metrics AS m WHERE e.trial = m.trial AND e.epoch = m.epoch)",
    "a unit's trial has no row": "SELECT DISTINCT trial, epoch FROM units "
    "WHERE trial NOT IN (SELECT number FROM trials)",
}
"""What is wrong with pairs (trial, epoch), and queries for them."""


def _trial_problems(saved: SavedRun) -> Iterator[Problem]:
    """Find rows that contradict each other."""
    advice = f"rows of {saved.folder / FILE} were deleted or changed: restore a copy of it"
    for expected, record in enumerate(saved.records):
        if record.number != expected:
            yield Problem(f"trial {expected}", "it has no row", advice)
            break  # the numbers of all later trials would be shifted
    missing = -len(saved.records) % saved.trials_per_config
    if missing:
        where = f"trial {len(saved.records) - 1}"
        yield Problem(where, f"after it {missing} folds of its configuration have no row", advice)
    over = saved.meta["status"] == "finished"
    for record in saved.records:
        where = f"trial {record.number}"
        numbers = [epoch.epoch for epoch in record.epochs]
        if numbers != list(range(record.first_epoch, record.done)):
            shown = ", ".join([*map(str, numbers[:10]), *(["..."] if numbers[10:] else [])])
            yield Problem(where, f"its epochs are {shown}, not one after the other", advice)
        if record.status == "finished" and record.done < record.target_epochs:
            epochs = f"{record.done} of {record.target_epochs} epochs"
            yield Problem(where, f"it has finished, but only {epochs} are there", advice)
        if over and record.status not in ENDED:
            yield Problem(where, f"the run has finished, but the trial is {record.status}", advice)
    yield from _unit_problems(saved, advice)


def _unit_problems(saved: SavedRun, advice: str) -> Iterator[Problem]:
    """Find units that cannot belong to an epoch, and epochs with missing units."""
    parts = saved.meta["parts"]
    validates = any(saved.meta[name] is not None for name in ("validation", "folds"))
    per_epoch = parts + validates
    in_order, stagger = saved.settings["shuffle"] == "rows", saved.settings["stagger"]
    counts: dict[tuple[int, int], int] = {}
    keys = {record.number: record.key for record in saved.records}
    latest: dict[int, int] = {}
    with reader(saved.folder) as connection:
        rows = connection.execute(
            "SELECT trial, epoch, step, part FROM units ORDER BY trial, epoch"
        )
        for (trial, epoch), group in groupby(rows, key=lambda row: (row["trial"], row["epoch"])):
            order = list(range(parts))
            if not in_order:
                order = _core.visit_order(keys.get(trial, trial), epoch, parts, stagger=stagger)
            units = {(row["step"], row["part"]) for row in group}
            for step, part in sorted(units):
                what = _explain_wrong_unit(step, part, order, per_epoch)
                if what is not None:
                    yield Problem(f"trial {trial}, epoch {epoch}", what, advice)
            counts[trial, epoch] = len({step for step, _ in units})
            latest[trial] = epoch
        resumed = connection.execute("SELECT 1 FROM events WHERE kind LIKE 'resume%'").fetchone()
    for record in saved.records:
        # Units are committed with states, not with rows: an interrupted run may lack some rows.
        for number in () if resumed else (epoch.epoch for epoch in record.epochs):
            count = counts.get((record.number, number), 0)
            if count < per_epoch:
                what = f"only {count} of its {per_epoch} units are there"
                yield Problem(f"trial {record.number}, epoch {number}", what, advice)
        if latest.get(record.number, 0) > record.done:
            what = f"units of epoch {latest[record.number]}, though only {record.done} epochs are"
            yield Problem(f"trial {record.number}", f"{what} finished", advice)


def _explain_wrong_unit(step: int, part: int, order: list[int], per_epoch: int) -> str | None:
    """Return what is wrong with a unit's step in its epoch or with its part, or None."""
    if not 0 <= step < per_epoch:
        return f"unit {step} of {per_epoch}"
    if step < len(order) and part != order[step]:
        return f"unit {step} was on part {part}, out of turn"
    return None


def _state_problems(
    saved: SavedRun, hashes: dict[tuple[str, str], str | None]
) -> Iterator[Problem]:
    """Hash every kept state; find damaged and missing ones."""
    for record in saved.records:
        for epoch in record.epochs:
            if epoch.state_file is None:
                continue
            key = (epoch.state_file, epoch.state_hash)
            if key not in hashes or hashes[key] is not None:  # do not read intact states again
                hashes[key] = _explain_bad_state(saved.state_path(epoch), epoch.state_hash)
            what = hashes[key]
            if what is not None:
                more = [str(e.epoch) for e in record.epochs if e.state_file and e is not epoch]
                others = f"epochs {', '.join(more)} are kept too" if more else "no other is kept"
                advice = f"restore a copy, or train the trial again ({others})"
                where = f"{saved.state_path(epoch)} (trial {record.number}, epoch {epoch.epoch})"
                yield Problem(where, what, advice)
        yield from _find_missing_states(saved, record)


def _explain_bad_state(path: Path, recorded: str) -> str | None:
    try:
        if hash_of_file(path, _core.hash_state) == recorded:
            return None
    except LinkError:
        return "it is a symbolic link, and those are not followed here"
    except FileNotFoundError:
        return "it is missing"
    except OSError as error:
        return f"it cannot be read ({error.strerror or error})"
    except (CerebroError, ValueError):
        pass  # it is not even a state
    return "it is damaged: its checksum differs from the recorded one"


def _slot_problems(saved: SavedRun, numbers: Iterable[int]) -> Iterator[Problem]:
    """Compare the slots of open trials with their seals."""
    for number in numbers:
        damage = states.slot_damage(saved.state_dir, number, saved.disk)
        if damage is not None:
            file, what = damage
            advice = "resume the run: the trial continues from its last finished epoch"
            yield Problem(f"{file} (trial {number})", what, advice)


def _owns_slots(saved: SavedRun) -> bool:
    """Return whether the folder of slots is this run's; a separate folder must name the run."""
    if saved.state_dir == saved.path / "states":
        return True
    try:  # it may be empty, for example after a reboot
        return bool(states.read_claimant(saved.state_dir, saved.disk) == saved.meta["id"])
    except (OSError, CorruptDataError):
        return False


def _find_missing_states(saved: SavedRun, record: TrialRecord) -> Iterator[Problem]:
    """Find epochs whose states ``keep=`` requires but whose rows name no file."""
    keep = saved.settings["keep"]
    if not record.epochs:
        return
    required: set[int | None] = {record.epochs[-1].epoch}
    if keep == "best":
        required |= {saved.best_epoch(record)}
    elif keep == "all":
        required = {epoch.epoch for epoch in record.epochs}
    for epoch in record.epochs:
        if epoch.epoch in required and epoch.state_file is None:
            yield Problem(
                f"trial {record.number}, epoch {epoch.epoch}",
                f"its state was to be kept (keep={keep!r}), but no file is named",
                "train the trial again, or use another epoch",
            )


def _find_strays(saved: SavedRun, files: list[Path]) -> Iterator[Problem]:
    """Find files in the run's folders that no row names and no open trial needs."""
    epoch_dir, state_dir = saved.path / "states", saved.state_dir
    if state_dir != epoch_dir and _owns_slots(saved):
        files = files + [path for path in _list_files(state_dir) if path.name != states.CLAIM]
    named = {e.state_file for record in saved.records for e in record.epochs}
    by_number = {record.number: record for record in saved.records}
    status = saved.meta["status"]

    def is_known(number: int) -> bool:
        """Return whether the trial may exist: in a live run, its row may not be written yet."""
        return number in by_number or status == "running"

    def is_needed(path: Path) -> bool:
        if path.parent == epoch_dir and path.name in named:
            return True
        if log := LOG_FILE.fullmatch(path.name):
            return is_known(int(log[1]))
        if path.name.startswith(states.HELD):
            return bool(status == "running")  # it may be uploaded now
        state = states.state_file(path)
        if state is None:
            return False
        record = by_number.get(state.trial)
        if record is None or status != "finished":
            return is_known(state.trial)
        return record.is_open  # it may still train: its slots and unpublished states are needed

    for path in files:
        if not is_needed(path):
            yield Problem(str(path), "nothing in the run names this file", "delete it")


def _check_data(saved: SavedRun) -> tuple[list[Path], list[Problem]]:
    """Compare the datasets with their manifests and the run's record; return those read, too."""
    paths: list[Path] = []
    problems: list[Problem] = []
    gone: set[Path] = set()
    restore = "restore the dataset of the run"
    for name in ("data", "validation"):
        spec: Any = saved.meta[name]
        if spec is None:
            continue
        if is_url(spec["path"]):
            try:
                data = Dataset.from_spec(spec)
                if data.path not in paths:
                    paths.append(data.path)
                    data.verify()
            except (CerebroError, OSError) as error:
                problems.append(
                    Problem(spec["path"], f"the run's {name} cannot be used ({error})", restore)
                )
            continue
        path = Path(spec["path"])
        if path in gone:
            continue
        if not path.exists():
            gone.add(path)
            advice = f"move it back, or give its new path as {name}= when you resume the run"
            problems.append(Problem(str(path / MANIFEST), "no dataset is there any more", advice))
            continue
        if path not in paths:
            paths.append(path)
            advice = "write the data again, or restore a copy"
            problems += [Problem(str(d.path), d.what, advice) for d in find_damage(path)]
        try:
            Dataset.from_spec(spec)
        except CerebroError as error:
            title = "validation data" if name == "validation" else name
            problems.append(Problem(str(path), f"the run's {title} has changed ({error})", restore))
    try:
        if paths:
            saved.folds()
    except CerebroError as error:
        what = f"the run's folds do not fit its data ({error})"
        problems.append(Problem(str(saved.folder / FILE), what, "restore a copy of it"))
    return paths, problems
