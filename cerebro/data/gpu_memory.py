"""Recognize that a GPU is out of memory, and name it in an error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cerebro.errors import InputError, text_of
from cerebro.machine.devices import is_gpu
from cerebro.machine.whole_modules import find_whole_module


class GpuMemoryError(InputError):
    """A batch does not fit in the memory of the GPU; the cause is the library's error."""


def is_short_of_gpu_memory(error: BaseException) -> bool:
    """Return whether PyTorch, one of its libraries, or the loader ran out of GPU memory.

    A `MemoryError` counts: ask only where it must be the loader's.
    """
    torch = find_whole_module("torch")
    if isinstance(error, MemoryError):
        return True
    if torch is not None and isinstance(error, torch.cuda.OutOfMemoryError):
        return True
    # CUDA, cuBLAS and cuDNN also allocate memory outside PyTorch's allocator.
    texts = ("CUDA error: out of memory", "STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(text in str(error) for text in texts)


@contextmanager
def explain_gpu_memory_errors(device: str, batch_size: int) -> Iterator[None]:
    """Raise GpuMemoryError, which says what to do, if a GPU runs out of memory in this block.

    `device` is that of the batches. On the CPU, the block may still compute on a GPU.
    """
    try:
        yield
    except Exception as error:
        if not is_short_of_gpu_memory(error):
            raise
        if isinstance(error, MemoryError) and not (is_gpu(device) or "on cuda:" in str(error)):
            raise  # of this machine
        raise GpuMemoryError(
            f"the GPU is out of memory with batch_size={batch_size} ({text_of(error, 300)}): give "
            "a smaller batch_size=, or leave the GPU to this work alone (on a cluster: one worker "
            "for each GPU)"
        ) from error
