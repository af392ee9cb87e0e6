"""Small disks that can fill up or become read-only, in a private mount namespace."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
MS_RDONLY, MS_REMOUNT, MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE = 1, 32, 4096, 8192, 16384, 1 << 18

_libc = ctypes.CDLL(None, use_errno=True)


def enter_namespace() -> str | None:
    """Give this process private mounts; return why that is impossible, or None.

    Root does so directly, others as root of a new user namespace. Later mounts end with the
    processes.
    """
    if not sys.platform.startswith("linux"):
        return "not on this system"
    uid, gid = os.getuid(), os.getgid()
    flags = CLONE_NEWNS if os.geteuid() == 0 else CLONE_NEWNS | CLONE_NEWUSER
    if _libc.unshare(flags) != 0 and (
        flags & CLONE_NEWUSER or _libc.unshare(flags | CLONE_NEWUSER) != 0
    ):
        return f"unshare: {os.strerror(ctypes.get_errno())}"
    try:
        if os.geteuid() != 0:
            Path("/proc/self/setgroups").write_text("deny")
            Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
            Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
        _mount("none", "/", None, MS_REC | MS_PRIVATE)
    except OSError as error:
        return f"mount: {error.strerror}"
    return None


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    done = _libc.mount(
        source.encode(), target.encode(), kind.encode() if kind else None, flags, options.encode()
    )
    if done != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), target)


class SmallDisk:
    """A memory file system of a few megabytes, mounted at a folder."""

    def __init__(self, folder: Path, nbytes: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        _mount("cerebro-faults", str(folder), "tmpfs", 0, f"size={nbytes},mode=0755")

    def fill(self, leave: int) -> None:
        """Fill all but about `leave` bytes; others may be writing."""
        with (self.folder / ".ballast").open("wb") as file:
            while True:
                info = os.statvfs(self.folder)
                nbytes = info.f_bavail * info.f_frsize - leave
                if nbytes < info.f_frsize:
                    return
                with contextlib.suppress(OSError):  # other writers took some meanwhile
                    os.posix_fallocate(file.fileno(), os.fstat(file.fileno()).st_size, nbytes)

    def empty(self) -> None:
        """Free the space that `fill` took."""
        (self.folder / ".ballast").unlink(missing_ok=True)

    def set_read_only(self, folder: Path, read_only: bool) -> None:
        """Make a folder of the disk read-only, or writable again.

        Files open for writing stay writable, as after an administrator's remount of a bind mount.
        """
        if read_only:
            # The mount becomes read-only before it takes the folder's place: in use, it could not
            # (EBUSY) if a file were opened for writing between the two calls.
            aside = self.folder.with_name(f"{self.folder.name}.read-only")
            aside.mkdir(exist_ok=True)
            _mount(str(folder), str(aside), None, MS_BIND)
            _mount("none", str(aside), None, MS_REMOUNT | MS_BIND | MS_RDONLY)
            _mount(str(aside), str(folder), None, MS_MOVE)
        elif _libc.umount2(str(folder).encode(), 2) != 0:  # lazily, once unused
            raise OSError(ctypes.get_errno(), "cannot unmount", str(folder))

    def close(self) -> None:
        _libc.umount2(str(self.folder).encode(), 2)
