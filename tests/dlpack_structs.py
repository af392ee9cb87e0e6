"""DLPack's structs, as in its header, for ctypes: to read capsules and to make them."""

from __future__ import annotations

import ctypes
from typing import Any

I64 = ctypes.c_int64
Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

capsule_name = ctypes.pythonapi.PyCapsule_GetName
capsule_name.restype, capsule_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
capsule_pointer.restype = ctypes.c_void_p
capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(I64)),
        ("strides", ctypes.POINTER(I64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Legacy(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", Deleter))


class Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


def describe(capsule: object) -> tuple[Any, DLTensor]:
    """Return a capsule's managed tensor and its tensor, valid while the capsule lives."""
    name = capsule_name(capsule)
    kind = Legacy if name == b"dltensor" else Versioned
    managed = ctypes.cast(capsule_pointer(capsule, name), ctypes.POINTER(kind)).contents
    return managed, managed.tensor
