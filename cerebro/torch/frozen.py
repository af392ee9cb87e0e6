"""Keep frozen weights of equal content once: in a process, and on the CPU in a node's memory.

A large tensor in host memory is a private mapping of a file, named by a hash of its bytes, that all
workers of a node map. A write to such a mapping changes neither the file nor other processes, but
it changes all models of this process. So `FrozenWeights.find_written` compares the content with its
fingerprint at the end of every unit. On a GPU, and for small tensors, the first model's tensor is
the one that all share.
"""

from __future__ import annotations

import contextlib
import copy
import mmap
import os
import threading
from pathlib import Path
from typing import Any
from weakref import WeakSet, WeakValueDictionary

import torch

import cerebro._core as _core
from cerebro.machine.files import open_plain
from cerebro.model import Unchecked

SMALLEST_FILE = 1 << 16
"""The fewest bytes of a tensor that is mapped: a mapping takes whole pages."""
SUFFIX = ".frozen"

_WIDTH = 1 << 14  # words in a row of `sum_bits`


Key = tuple[Any, ...]
"""The hash of a tensor's bytes, its type, shape and strides, and its device."""


class FrozenTensor(Unchecked):
    """A tensor that models share and never write to; it lives as long as one of them."""

    def __init__(self, tensor: Any, name: str, key: Key, weights: FrozenWeights) -> None:
        self.tensor = tensor
        self.name = name  # of the parameter that was shared first
        self.key = key
        self.weights = weights
        self.fingerprint = _take_fingerprint(tensor)
        self.users: WeakSet[Any] = WeakSet()  # networks, and what keeps it for later ones

    @property
    def is_unchanged(self) -> bool:
        return _take_fingerprint(self.tensor) == self.fingerprint


_by_address: WeakValueDictionary[tuple[str, int] | None, FrozenTensor] = WeakValueDictionary()


def find_shared(tensor: Any) -> FrozenTensor | None:
    """Return the shared tensor whose memory `tensor` uses, if there is one."""
    return _by_address.get(address_of(tensor))


def find_whole(parameter: Any) -> FrozenTensor | None:
    """Return the shared tensor that a parameter is; None also for a part or another view of it."""
    shared = find_shared(parameter)
    if shared is None or shared.tensor.dtype != parameter.dtype:
        return None
    return shared if shared.tensor.is_set_to(parameter.data) else None


def address_of(tensor: Any) -> tuple[str, int] | None:
    """Return where an ordinary tensor's memory is; None for others, which may have several."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return None  # its class says what its memory means: quantized, not yet made, ...
    if tensor.layout is not torch.strided or tensor.is_meta:
        return None
    return str(tensor.device), tensor.untyped_storage().data_ptr()


_handed_out: WeakValueDictionary[int, Any] = WeakValueDictionary()
"""The parameters of modules that `copy_module` has returned, by their `id`."""


def is_handed_out(tensor: Any) -> bool:
    """Return whether a tensor uses shared memory only because Cerebro has given it to it.

    Otherwise it is somebody's alias of another tensor: what trains it has to change the other, too.
    """
    return _handed_out.get(id(tensor)) is tensor and find_shared(tensor) is not None


def make_own(parameter: Any) -> None:
    """Give a parameter that uses a shared tensor a copy of it."""
    parameter.data = parameter.data.clone(memory_format=torch.preserve_format)


class FrozenWeights(Unchecked):
    """The shared tensors of a run in this process. `folder` is for files, if there may be any."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._by_key: WeakValueDictionary[Key, FrozenTensor] = WeakValueDictionary()
        self._all: WeakSet[FrozenTensor] = WeakSet()

    @property
    def nbytes(self) -> int:
        """The bytes of tensors with several users; others count as their only user's."""
        return sum(shared.tensor.nbytes for shared in list(self._all) if len(shared.users) > 1)

    def share(self, parameter: Any, name: str) -> FrozenTensor | None:
        """Let a parameter use the shared tensor of its content; return None if it cannot."""
        shared = find_whole(parameter)
        if shared is None:
            if not _is_plain(parameter):
                return None
            shared = self._find_or_add(parameter.data, name)
        parameter.data = shared.tensor
        return shared

    def move(self, parameter: Any, shared: FrozenTensor, device: Any) -> FrozenTensor:
        """Let a parameter use a shared tensor's copy on `device`, which is made once."""
        key = (*shared.key[:-1], str(device))
        moved = self._by_key.get(key)
        if moved is None:
            moved = self._add(shared.tensor.to(device), shared.name, key)
        parameter.data = moved.tensor
        return moved

    def copy_module(self, module: Any) -> tuple[Any, list[FrozenTensor]]:
        """Return a copy of a module with the same frozen tensors, and buffers of its own."""
        memo: dict[int, Any] = {}
        kept = []
        for name, parameter in module.named_parameters():
            shared = self.share(parameter, name)
            if shared is not None:
                same = torch.nn.Parameter(shared.tensor, requires_grad=False)
                vars(same).update(vars(parameter))
                memo[id(parameter)] = same
                _handed_out[id(same)] = same
                kept.append(shared)
        return copy.deepcopy(module, memo), kept

    def find_written(self) -> list[str]:
        """Return the names of shared tensors that have been written to; share them no more."""
        written = [shared for shared in list(self._all) if not shared.is_unchanged]
        for shared in written:
            self._all.discard(shared)
            self._by_key.pop(shared.key, None)
        return sorted({shared.name for shared in written})

    def _find_or_add(self, tensor: Any, name: str) -> FrozenTensor:
        content = _bytes_of(tensor)
        about = (str(tensor.dtype), tuple(tensor.shape), tensor.stride())
        key = (_core.hash_state(content.cpu().numpy()), *about, str(tensor.device))
        shared = self._by_key.get(key)
        if shared is not None and shared.is_unchanged:
            return shared
        if tensor.device.type == "cpu" and tensor.nbytes >= SMALLEST_FILE and self._folder:
            path = self._folder / f"{key[0]}{SUFFIX}"
            with contextlib.suppress(OSError):  # without a file, this process has its own copy
                mapped = _map_file(path, content.numpy(), key[0])
                tensor = mapped.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        return self._add(tensor, name, key)

    def _add(self, tensor: Any, name: str, key: Key) -> FrozenTensor:
        shared = FrozenTensor(tensor, name, key, self)
        _by_address[address_of(tensor)] = shared
        self._by_key[key] = shared
        self._all.add(shared)
        return shared


def _is_plain(parameter: Any) -> bool:
    """Return whether a parameter is an ordinary tensor that has its memory to itself."""
    if address_of(parameter) is None:
        return False
    data = parameter.data
    if data.is_quantized or data.is_conj() or data.is_neg() or data.nbytes == 0:
        return False
    return bool(data.untyped_storage().nbytes() == data.nbytes and data.storage_offset() == 0)


def _bytes_of(tensor: Any) -> Any:
    """Return a view of a tensor's memory as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _take_fingerprint(tensor: Any) -> str:
    content = _bytes_of(tensor)
    return _core.hash_state(content.numpy() if content.device.type == "cpu" else sum_bits(content))


def sum_bits(content: Any) -> Any:
    """Return sums of bytes as 64-bit words, by row and by column of a grid, in host memory.

    This takes little memory on a GPU. A change of one word, or an exchange of two, changes a sum.
    """
    words = content[: content.numel() // 8 * 8].view(torch.int64)
    rest = content[words.numel() * 8 :].long()
    grid = words[: words.numel() // _WIDTH * _WIDTH].view(-1, _WIDTH)
    parts = (grid.sum(0), grid.sum(1), words[grid.numel() :], rest)
    return torch.cat(parts).cpu().numpy()


def _map_file(path: Path, content: Any, content_hash: str) -> Any:
    """Map a file of the node with this content, which is written if there is none."""
    with contextlib.suppress(FileNotFoundError):
        mapped = _open_mapping(path, content.nbytes)
        if mapped is not None and _core.hash_state(mapped.numpy()) == content_hash:
            return mapped
        path.unlink()  # of a process that was lost with its machine
    new = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}")
    fd = open_plain(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL)  # others may map a left one
    try:
        with open(fd, "wb") as file:  # noqa: PTH123
            file.write(content)
        with contextlib.suppress(FileExistsError):  # another worker was faster: use its file
            os.link(new, path)
    finally:
        new.unlink()
    mapped = _open_mapping(path, content.nbytes)
    if mapped is None or _core.hash_state(mapped.numpy()) != content_hash:
        raise OSError(f"{path} does not hold what was written")
    return mapped


def _open_mapping(path: Path, nbytes: int) -> Any:
    """Map a file of this size privately, as bytes; return None if it has another size."""
    fd = open_plain(path, os.O_RDONLY)
    try:
        if os.fstat(fd).st_size != nbytes:
            return None
        access = mmap.PROT_READ | mmap.PROT_WRITE  # torch has no read-only tensors
        return torch.frombuffer(
            mmap.mmap(fd, nbytes, flags=mmap.MAP_PRIVATE, prot=access), dtype=torch.uint8
        )
    finally:
        os.close(fd)
