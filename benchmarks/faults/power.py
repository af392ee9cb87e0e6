"""Simulate a power loss of a folder, from the shadow kept by shim.c.

The result has each folder's names and each file's bytes as of their last sync. A file that was
never synced is empty. Disks may also have written more than requested. A *mix* takes every unsynced
name from before or after, and every unsynced page of 4096 bytes from the synced bytes, from the
newest, or as zeros; lengths likewise. That is harsher than journaling file systems.
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
    """The target of a folder's entry."""

    inode: int
    is_folder: bool


def begin_shadow(root: Path, shadow: Path) -> None:
    """Treat everything below `root` as durable now, and discard the previous shadow."""
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
    """Replace the contents of `root` with the result of a power loss, and restart the shadow from
    it.

    Parameters ---------- root The folder; no process may use it. shadow The shadow kept by shim.c.
    mix Chooses the disk's unrequested writes; None: no such writes.
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
    """Rebuild the folder of an inode at `made`; `now` is its present path, if any."""
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
    """Return a file's bytes after the power loss.

    `synced` is None if it was never synced.
    """
    if mix is None:
        return synced or b""
    if synced == newest:
        return newest
    old = synced or b""
    length = mix.choice([len(old), len(newest)])
    if length > len(old) and mix.random() < 0.3:  # cut within the added part
        length = mix.randrange(len(old), length)
    whole = mix.random()  # sometimes all or nothing was written
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
