"""What a loss of power leaves of a folder, made from what shim.c has kept.

The picture has the names that each folder had when it was last synced, and the bytes
that each file had when it was last synced. A file that never was is empty. Disks may
also have written more than they were asked to: a *mix* takes every name that is not
settled from before or after, and every page of 4096 bytes that is not settled from the
synced bytes, from the newest, or as zeros; lengths likewise. That is harsher than file
systems with a journal are.
"""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

PAGE = 4096


@dataclass(frozen=True)
class Name:
    """An entry of a folder: what it leads to."""

    inode: int
    is_folder: bool


def begin_shadow(root: Path, shadow: Path) -> None:
    """Take all that is below `root` now as durable, and forget what was kept before."""
    shutil.rmtree(shadow, ignore_errors=True)
    for kind in ("files", "folders", "inodes"):
        (shadow / kind).mkdir(parents=True)
    for folder, _, files in os.walk(root):
        lines = []
        for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
            info = entry.stat(follow_symlinks=False)
            kind = "d" if entry.is_dir(follow_symlinks=False) else "f"
            lines.append(f"{kind} {info.st_ino} {entry.name}\n")
        (shadow / "folders" / str(Path(folder).stat().st_ino)).write_text("".join(lines))
        for name in files:
            path = Path(folder, name)
            inode = path.stat().st_ino
            shutil.copyfile(path, shadow / "files" / str(inode))
            (shadow / "inodes" / str(inode)).hardlink_to(path)


def lose_power(root: Path, shadow: Path, mix: random.Random | None) -> None:
    """Replace what is below `root` by what a loss of power leaves, and begin again from that.

    Parameters
    ----------
    root
        The folder; no process uses it any more.
    shadow
        What shim.c has kept.
    mix
        Chooses what the disk has written without being asked to; None: nothing.
    """
    made = root.with_name(root.name + ".after")
    _rebuild(root, root.stat().st_ino, made, shadow, mix)
    for entry in list(root.iterdir()):
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    for entry in list(made.iterdir()):
        entry.rename(root / entry.name)
    made.rmdir()
    begin_shadow(root, shadow)


def _rebuild(
    now: Path | None, inode: int, made: Path, shadow: Path, mix: random.Random | None
) -> None:
    """Make the folder `made` of a folder's inode; `now` is where it is now, if anywhere."""
    made.mkdir()
    kept = _names_kept(shadow / "folders" / str(inode))
    current = _names_now(now)
    for name in sorted(kept.keys() | current.keys()):
        before, after = kept.get(name), current.get(name)
        chosen = before if before == after or mix is None else mix.choice([before, after])
        if chosen is None:
            continue
        if chosen.is_folder:
            place = None if now is None or chosen != after else now / name
            _rebuild(place, chosen.inode, made / name, shadow, mix)
        else:
            newest = now / name if now is not None and chosen == after else None
            if newest is None:
                held = shadow / "inodes" / str(chosen.inode)
                newest = held if held.exists() else None
            synced = shadow / "files" / str(chosen.inode)
            data = synced.read_bytes() if synced.exists() else None
            latest = b"" if newest is None else newest.read_bytes()
            (made / name).write_bytes(content(data, latest, mix))


def _names_kept(record: Path) -> dict[str, Name]:
    names = {}
    if record.exists():
        for line in record.read_text().splitlines():
            kind, inode, name = line.split(" ", 2)
            names[name] = Name(int(inode), kind == "d")
    return names


def _names_now(folder: Path | None) -> dict[str, Name]:
    if folder is None:
        return {}
    with os.scandir(folder) as entries:
        return {
            entry.name: Name(entry.stat(follow_symlinks=False).st_ino, entry.is_dir())
            for entry in entries
        }


def content(synced: bytes | None, newest: bytes, mix: random.Random | None) -> bytes:
    """Return the bytes that are found of a file after the power is back.

    `synced` is None if it was never synced.
    """
    if mix is None:
        return synced or b""
    if synced == newest:
        return newest
    old = synced or b""
    length = mix.choice([len(old), len(newest)])
    if length > len(old) and mix.random() < 0.3:  # cut within what was added
        length = mix.randrange(len(old), length)
    whole = mix.random()  # now and then all of it, or nothing, has been written
    pages = []
    for start in range(0, length, PAGE):
        size = min(PAGE, length - start)
        sources = [old[start : start + size], newest[start : start + size]]
        if synced is None or start + size > len(old):
            sources.append(b"")  # allocated, never written
        if whole < 0.2:
            page = sources[1]
        elif whole < 0.3:
            page = sources[0]
        else:
            page = mix.choice(sources)
        pages.append(page.ljust(size, b"\0"))
    return b"".join(pages)
