"""SQLite on a simulated disk: a file system for SQLite (a VFS), called by the real library.

A database is opened as ``file:/<mount>/<path>?vfs=cerebro-sim``; `MOUNTS` finds the simulated disk
of the process. No exception may cross SQLite: a failed call returns an error code, and the next
call of the disk raises what ended the process.
"""

from __future__ import annotations

import _sqlite3
import atexit
import contextlib
import ctypes
import errno
import sqlite3
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol
from urllib.parse import quote

from faults import ProcessDied
from medium import File, Folder, Place

NAME = "cerebro-sim"

OK, BUSY, FULL, CANTOPEN, NOTFOUND = 0, 5, 13, 14, 12
IOERR = 10
IOERR_READ, IOERR_SHORT_READ, IOERR_WRITE, IOERR_FSYNC = 266, 522, 778, 1034
IOERR_DIR_FSYNC, IOERR_TRUNCATE, IOERR_DELETE, IOERR_DELETE_NOENT = 1290, 1546, 2570, 5898
CREATE, DELETE_ON_CLOSE, EXCLUSIVE_OPEN = 0x4, 0x8, 0x10
JOURNALS = 0x800 | 0x4000 | 0x80000  # main journal, super journal, log
SHARED, RESERVED, PENDING, EXCLUSIVE = 1, 2, 3, 4
UNLOCK_SHARED_MEMORY, EXCLUSIVE_SHARED_MEMORY = 1, 8
HAS_MOVED = 20  # asks whether the file still has its name
POWERSAFE_OVERWRITE = 0x1000  # a lost write damages no byte beside it
JULIAN_DAY = 2461000.5


class Mount(Protocol):
    """The part of a mounted disk that SQLite's files need."""

    def call(self, kind: str, path: str) -> None: ...
    def sleep(self, seconds: float) -> None: ...
    def find(self, path: str) -> tuple[Place, Any]: ...
    def create(self, place: Place) -> File: ...
    def unlink(self, place: Place) -> None: ...
    def sync_names(self, folder: Folder) -> None: ...
    def choose_part(self, content: bytes) -> bytes: ...
    @property
    def is_dead(self) -> bool: ...

    handles: dict[int, Handle]
    failure: BaseException | None
    """What a call raised that is neither an OSError nor a death; the next call raises it."""


class _Gone:
    """The mount of a disk that is closed, for connections that are not."""

    is_dead = True
    handles: dict[int, Handle] = {}  # noqa: RUF012

    def call(self, kind: str, path: str) -> None:
        raise ProcessDied

    def find(self, path: str) -> tuple[Place, Any]:
        raise OSError(errno.EIO, "the simulated disk is closed", path)


_GONE: Any = _Gone()

MOUNTS: dict[int, Mount] = {}
"""By the number that begins a path."""


class SharedMemory:
    """The index of a log, which the processes that use the log share."""

    __slots__ = ("locks", "regions", "users")

    def __init__(self) -> None:
        self.regions: list[Any] = []
        self.locks: list[dict[Handle, bool]] = [{} for _ in range(8)]  # True: exclusive
        self.users: dict[Handle, None] = {}

    def leave(self, handle: Handle) -> None:
        self.users.pop(handle, None)
        for holders in self.locks:
            holders.pop(handle, None)


class Handle:
    """A file that a connection has open."""

    __slots__ = ("file", "flags", "mount", "path", "place", "regions", "shared", "syncs_folder")

    def __init__(
        self, mount: Mount, path: str, place: Place | None, file: File, flags: int
    ) -> None:
        self.mount = mount
        self.path = path
        self.place = place
        self.file = file
        self.flags = flags
        self.syncs_folder = False
        self.shared: SharedMemory | None = None
        self.regions: list[Any] = []  # keeps the memory, which the connection points to

    def release(self) -> None:
        self.file.locks.pop(self, None)
        if self.shared is not None:
            self.shared.leave(self)

    def abandon(self) -> None:
        """Give up all locks, as a process does that dies, and forget its disk.

        The connection may live on in what is left of the process. Only if the disk does not hold
        that, can it be collected, and is the connection closed.
        """
        self.release()
        self.mount = _GONE

    def call(self, kind: str, code: int) -> int:
        if self.place is None:  # a temporary file is the process's own
            return OK
        return _call(self.mount, kind, self.path, code)

    @property
    def is_dead(self) -> bool:
        return self.mount.is_dead


_handles: dict[int, Handle] = {}
_last: list[Mount] = []
"""The mount whose lock was refused last: only its process may sleep now."""


def _call(mount: Mount, kind: str, path: str, code: int) -> int:
    """Tell the process of a call; return an error code if it fails there."""
    try:
        mount.call(kind, path)
    except OSError as error:
        return FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else code
    except ProcessDied:
        return IOERR
    except BaseException as failure:  # of the simulation itself, or Ctrl-C
        mount.failure = failure
        return IOERR
    return OK


def _find(mount: Mount, kind: str, path: str, code: int) -> tuple[int, Place | None, Any]:
    """Tell the process of a call, and find its file; without a place, return an error code."""
    failed = _call(mount, kind, path, code)
    if failed != OK:
        return failed, None, None
    try:
        return OK, *mount.find(path)
    except OSError:
        return code, None, None


def _split(name: bytes) -> tuple[Mount, str]:
    _, number, path = name.decode().split("/", 2)
    return MOUNTS.get(int(number), _GONE), "/" + path


# --- files -----------------------------------------------------------------


def _close(at: int) -> int:
    handle = _handles.pop(at)
    handle.release()
    handle.mount.handles.pop(at, None)
    return OK


def _read(at: int, to: int, count: int, begin: int) -> int:
    handle = _handles[at]
    if handle.is_dead:
        return IOERR_READ
    content = bytes(handle.file.data[begin : begin + count])
    ctypes.memmove(to, content, len(content))
    if len(content) == count:
        return OK
    ctypes.memset(to + len(content), 0, count - len(content))
    return IOERR_SHORT_READ


def _write(at: int, source: int, count: int, begin: int) -> int:
    handle = _handles[at]
    if handle.is_dead:
        return IOERR_WRITE
    content = ctypes.string_at(source, count)
    mount = handle.mount  # which a death takes away
    code = handle.call("write", IOERR_WRITE)
    if code != OK:
        content = mount.choose_part(content)
    handle.file.write(begin, content)
    return code


def _truncate(at: int, size: int) -> int:
    handle = _handles[at]
    code = handle.call("truncate", IOERR_TRUNCATE)
    if code == OK:
        handle.file.truncate(size)
    return code


def _sync(at: int, _flags: int) -> int:
    handle = _handles[at]
    code = handle.call("sync", IOERR_FSYNC)
    if code != OK:
        if not handle.is_dead:
            handle.file.drop_pending()
        return code
    handle.file.sync()
    if handle.syncs_folder and handle.place is not None:
        handle.syncs_folder = False
        if handle.call("sync_folder", IOERR_FSYNC) == OK:  # on Linux, SQLite ignores a failure
            handle.mount.sync_names(handle.place[0])
    return IOERR_FSYNC if handle.is_dead else OK


def _size(at: int, out: Any) -> int:
    handle = _handles[at]
    out[0] = handle.file.size()
    return IOERR if handle.is_dead else OK


def _control(at: int, operation: int, argument: int) -> int:
    if operation != HAS_MOVED:
        return NOTFOUND
    handle = _handles[at]
    try:
        _, file = handle.mount.find(handle.path)
    except OSError:
        file = None
    ctypes.c_int.from_address(argument).value = file is not handle.file
    return OK


def _sector_size(_at: int) -> int:
    return 4096


def _characteristics(_at: int) -> int:
    return POWERSAFE_OVERWRITE


# --- locks -------------------------------------------------------------------


def _lock(at: int, level: int) -> int:
    handle = _handles[at]
    if handle.is_dead:
        return IOERR
    locks = handle.file.locks
    own = locks.get(handle, 0)
    if own >= level:
        return OK
    others = max((held for other, held in locks.items() if other is not handle), default=0)
    most = {SHARED: RESERVED, RESERVED: SHARED, EXCLUSIVE: RESERVED}[level]
    if others > most:
        return _refuse(handle)
    if level == EXCLUSIVE and others > 0:
        locks[handle] = PENDING  # lets no new reader in
        return _refuse(handle)
    locks[handle] = level
    return OK


def _unlock(at: int, level: int) -> int:
    handle = _handles[at]
    if level == 0:
        handle.file.locks.pop(handle, None)
    elif handle in handle.file.locks:
        handle.file.locks[handle] = level
    return OK


def _check_reserved_lock(at: int, out: Any) -> int:
    out[0] = any(level >= RESERVED for level in _handles[at].file.locks.values())
    return OK


def _refuse(handle: Handle) -> int:
    _last[:] = [handle.mount]
    return BUSY


# --- shared memory -----------------------------------------------------------


def _map_shared(at: int, region: int, size: int, extend: int, out: Any) -> int:
    handle = _handles[at]
    if handle.is_dead:
        return IOERR
    if handle.shared is None:
        code = _join_shared(handle)
        if code != OK:
            return code
    while len(handle.regions) <= region:
        if not extend:
            out[0] = None
            return OK
        handle.regions.append(ctypes.create_string_buffer(size))
    out[0] = ctypes.addressof(handle.regions[region])
    return OK


def _join_shared(handle: Handle) -> int:
    path = handle.path + "-shm"
    code = _call(handle.mount, "open", path, CANTOPEN)
    if code != OK:
        return code
    try:
        place, file = handle.mount.find(path)
    except OSError:
        return CANTOPEN
    if file is None:
        file = handle.mount.create(place)
    if file.shared is None:
        file.shared = SharedMemory()
    shared = handle.shared = file.shared
    if not shared.users:  # what a dead process has left is not used
        shared.regions = []
    handle.regions = shared.regions
    shared.users[handle] = None
    return OK


def _lock_shared(at: int, first: int, count: int, flags: int) -> int:
    handle = _handles[at]
    if handle.shared is None:
        return IOERR
    slots = handle.shared.locks[first : first + count]
    if flags & UNLOCK_SHARED_MEMORY:
        for holders in slots:
            holders.pop(handle, None)
        return OK
    if handle.is_dead:
        return IOERR
    exclusive = bool(flags & EXCLUSIVE_SHARED_MEMORY)
    for holders in slots:
        for other, is_exclusive in holders.items():
            if other is not handle and (exclusive or is_exclusive):
                return _refuse(handle)
    for holders in slots:
        holders[handle] = exclusive
    return OK


def _barrier(_at: int) -> None:
    pass


def _unmap_shared(at: int, delete: int) -> int:
    handle = _handles[at]
    shared, handle.shared = handle.shared, None
    if shared is None:
        return OK
    shared.leave(handle)
    if delete and not shared.users and not handle.is_dead:
        try:
            place, file = handle.mount.find(handle.path + "-shm")
        except OSError:
            return OK
        is_same = file is not None and file.shared is shared
        if is_same and _call(handle.mount, "remove", handle.path + "-shm", IOERR) == OK:
            handle.mount.unlink(place)
    return OK


# --- names -------------------------------------------------------------------


def _open(_vfs: int, name: bytes | None, at: int, flags: int, out: Any) -> int:
    ctypes.c_void_p.from_address(at).value = None  # SQLite closes only what has methods
    if name is None:  # a temporary file, which no other process sees
        handle = Handle(_last_mount(), "temporary", None, File(0), flags)
    else:
        mount, path = _split(name)
        code, place, file = _find(mount, "open", path, CANTOPEN)
        if place is None:
            return code
        handle = Handle(mount, path, place, file, flags)
        if file is None:
            if not flags & CREATE:
                return CANTOPEN
            handle.file = mount.create(place)
            handle.syncs_folder = bool(flags & JOURNALS)
        elif flags & EXCLUSIVE_OPEN or not isinstance(file, File):
            return CANTOPEN
        _last[:] = [mount]
    _handles[at] = handle
    handle.mount.handles[at] = handle
    ctypes.c_void_p.from_address(at).value = ctypes.addressof(_methods)
    if out:
        out[0] = flags
    return OK


def _last_mount() -> Mount:
    return _last[0]


def _delete(_vfs: int, name: bytes, sync_folder: int) -> int:
    mount, path = _split(name)
    code, place, file = _find(mount, "remove", path, IOERR_DELETE)
    if place is None:
        return code
    if file is None:
        return IOERR_DELETE_NOENT
    mount.unlink(place)
    if sync_folder:
        code = _call(mount, "sync_folder", path, IOERR_DIR_FSYNC)
        if code == OK:
            mount.sync_names(place[0])
    return code


def _access(_vfs: int, name: bytes, flags: int, out: Any) -> int:
    mount, path = _split(name)
    if mount.is_dead:
        return IOERR
    try:
        _, file = mount.find(path)
    except OSError:
        file = None
    # As on Linux, SQLite asks whether a file exists that is not empty.
    out[0] = file is not None and (flags != 0 or not isinstance(file, File) or file.size() > 0)
    return OK


def _full_path(_vfs: int, name: bytes, count: int, to: int) -> int:
    if len(name) >= count:
        return CANTOPEN
    ctypes.memmove(to, name, len(name) + 1)
    return OK


def _randomness(_vfs: int, count: int, to: int) -> int:
    ctypes.memset(to, 7, count)
    return count


def _sleep(_vfs: int, microseconds: int) -> int:
    mount = _last_mount()
    if not mount.is_dead:
        try:
            mount.sleep(microseconds / 1e6)
        except ProcessDied:
            pass  # the next call of its files fails
        except BaseException as failure:
            mount.failure = failure
    return microseconds


def _current_time(_vfs: int, out: Any) -> int:
    out[0] = JULIAN_DAY
    return OK


def _last_error(_vfs: int, _count: int, _to: int) -> int:
    return 0


# --- SQLite's structures -------------------------------------------------------

_POINTER, _INT, _LONG, _TEXT = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_char_p
_OUT_INT = ctypes.POINTER(_INT)
_OUT_LONG = ctypes.POINTER(_LONG)
_OUT_POINTER = ctypes.POINTER(_POINTER)
_OUT_DOUBLE = ctypes.POINTER(ctypes.c_double)

_FILE_CALLS: list[tuple[str, Callable[..., Any], tuple[Any, ...]]] = [
    ("xClose", _close, ()),
    ("xRead", _read, (_POINTER, _INT, _LONG)),
    ("xWrite", _write, (_POINTER, _INT, _LONG)),
    ("xTruncate", _truncate, (_LONG,)),
    ("xSync", _sync, (_INT,)),
    ("xFileSize", _size, (_OUT_LONG,)),
    ("xLock", _lock, (_INT,)),
    ("xUnlock", _unlock, (_INT,)),
    ("xCheckReservedLock", _check_reserved_lock, (_OUT_INT,)),
    ("xFileControl", _control, (_INT, _POINTER)),
    ("xSectorSize", _sector_size, ()),
    ("xDeviceCharacteristics", _characteristics, ()),
    ("xShmMap", _map_shared, (_INT, _INT, _INT, _OUT_POINTER)),
    ("xShmLock", _lock_shared, (_INT, _INT, _INT)),
    ("xShmBarrier", _barrier, ()),
    ("xShmUnmap", _unmap_shared, (_INT,)),
]
_VFS_CALLS: list[tuple[str, Callable[..., Any] | None, tuple[Any, ...]]] = [
    ("xOpen", _open, (_TEXT, _POINTER, _INT, _OUT_INT)),
    ("xDelete", _delete, (_TEXT, _INT)),
    ("xAccess", _access, (_TEXT, _INT, _OUT_INT)),
    ("xFullPathname", _full_path, (_TEXT, _INT, _POINTER)),
    ("xDlOpen", None, ()),
    ("xDlError", None, ()),
    ("xDlSym", None, ()),
    ("xDlClose", None, ()),
    ("xRandomness", _randomness, (_INT, _POINTER)),
    ("xSleep", _sleep, (_INT,)),
    ("xCurrentTime", _current_time, (_OUT_DOUBLE,)),
    ("xGetLastError", _last_error, (_INT, _POINTER)),
]


def _type_of(function: Callable[..., Any] | None, arguments: tuple[Any, ...]) -> Any:
    if function is None:
        return _POINTER
    result = None if function is _barrier else _INT
    return ctypes.CFUNCTYPE(result, _POINTER, *arguments)  # first the file, or the VFS


class _Methods(ctypes.Structure):
    _fields_ = [
        ("iVersion", _INT),
        *((name, _type_of(function, arguments)) for name, function, arguments in _FILE_CALLS),
    ]


class _Vfs(ctypes.Structure):
    _fields_ = [
        ("iVersion", _INT),
        ("szOsFile", _INT),
        ("mxPathname", _INT),
        ("pNext", _POINTER),
        ("zName", _TEXT),
        ("pAppData", _POINTER),
        *((name, _type_of(function, arguments)) for name, function, arguments in _VFS_CALLS),
    ]


def _fill(structure: Any, calls: list[Any]) -> Any:
    for name, function, arguments in calls:
        if function is not None:
            setattr(structure, name, _type_of(function, arguments)(function))
    return structure


_methods = _fill(_Methods(2), _FILE_CALLS)
_vfs = _fill(_Vfs(1, ctypes.sizeof(_POINTER), 512, None, NAME.encode()), _VFS_CALLS)
_registered: list[bool] = []


def register() -> bool:
    """Register the VFS with the SQLite of the module `sqlite3`; return whether that is possible.

    It is not if SQLite is built into the module, so that its functions cannot be called from here.
    """
    if not _registered:
        try:
            library = ctypes.CDLL(_sqlite3.__file__)  # finds what the module depends on
            call = library.sqlite3_vfs_register
        except (AttributeError, OSError):
            _registered.append(False)
        else:
            call.argtypes = [_POINTER, _INT]
            _registered.append(call(ctypes.addressof(_vfs), 0) == OK)
    return _registered[0]


class Connection(sqlite3.Connection):
    """A connection of a simulated process."""  # with weak references, unlike its base


def connect(mount: int, file: str, access: str, seconds: float) -> Connection:
    if not register():
        raise RuntimeError("this Python's sqlite3 has its own SQLite, which takes no VFS")
    uri = f"file:/{mount}{quote(file)}?{access}&vfs={NAME}"
    connection = sqlite3.connect(uri, uri=True, timeout=seconds, factory=Connection)
    _open_connections.add(connection)
    return connection


def close_all(connections: Iterable[Connection]) -> None:
    for connection in list(connections):
        with contextlib.suppress(sqlite3.Error):
            connection.close()


_open_connections: weakref.WeakSet[Connection] = weakref.WeakSet()
# Later, the functions above no longer exist, which SQLite would call.
atexit.register(close_all, _open_connections)
