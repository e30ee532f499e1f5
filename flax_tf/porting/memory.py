"""Arrays in memory of their own, in the layout that they are used in, as fast as memory allows.

A model could use the pages of its file as they are, and would load in no time. But a file that is then cut short or
overwritten in place would crash or change it, and only kernels that are not transposed could; so each array is copied,
once, and no more of the file is held than is being copied, which is a few MB for each core.
"""

import mmap
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np
from jaxtyping import Array
from numpy.lib.array_utils import byte_bounds

_LARGE = 1 << 20  # bytes
_PIECE = 4 << 20  # bytes of a file that are held by each thread at a time
_OWN: dict[str, Any] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
_LINE = 64  # bytes of a cache line: transposing writes whole ones, where NumPy alone would write a number of each
_AROUND = 1 << 16  # bytes that Linux maps around a page of a file that is used


class FileMap(mmap.mmap):
    """A file mapped for reading."""

    def forget(self, array: np.ndarray) -> None:
        """Takes the pages of a view out of this process's memory. Used again, they come from the file again."""
        if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            origin = np.frombuffer(self, np.uint8).ctypes.data
            start, stop = (bound - origin for bound in byte_bounds(array))
            start, stop = start // _AROUND * _AROUND, min(-(-stop // _AROUND) * _AROUND, len(self))
            if start < stop:
                self.madvise(mmap.MADV_DONTNEED, start, stop - start)


def to_jax(view: np.ndarray) -> Array:
    """A view (of a file, of memory that PyTorch goes on training) as an array of JAX that shares nothing with it.

    It is copied once, whatever its layout. If it is large, and on a CPU, that copy is the array itself.
    """
    return _as_jax(copied(view))


def all_to_jax(views: Iterable[np.ndarray]) -> Iterator[Array]:
    """`to_jax` of each, in order. Several are copied at a time, as one core can't copy as fast as memory allows."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NumPy lets other threads run while it copies
        for copy in pool.map(copied, views):
            yield _as_jax(copy)  # in this thread: settings such as the default device hold in one thread alone


def _as_jax(copy: np.ndarray) -> Array:
    return jax.device_put(copy, may_alias=True)  # jnp.array, even with copy=False, would copy again


def copied(view: np.ndarray) -> np.ndarray:
    """A view's numbers in memory of their own, contiguous. What was mapped of a file for it is let go of."""
    if view.nbytes < _LARGE:
        copy = np.array(view, order="C")
        _forget(view)
        return copy
    # NumPy's own would be huge pages: in a virtual machine these may have to come from the host, which took ten
    # times as long as the copy.
    copy = np.ndarray(view.shape, view.dtype, mmap.mmap(-1, view.nbytes, **_OWN))
    in_order = view.flags.c_contiguous
    axis = 0 if in_order else -1  # of a transposed view the last axis is the file's first
    source, target = np.moveaxis(view, axis, 0), np.moveaxis(copy, axis, 0)
    line = _LINE // view.itemsize
    rows = max(1, _PIECE * len(source) // view.nbytes // line) * line
    strip = rows if in_order else line
    for start in range(0, len(source), rows):
        stop = min(start + rows, len(source))
        for i in range(start, stop, strip):
            target[i : min(i + strip, stop)] = source[i : min(i + strip, stop)]
        _forget(source[start:stop])
    return copy


def _forget(view: np.ndarray) -> None:
    if (file := file_of(view)) is not None:
        file.forget(view)


def file_of(view: np.ndarray) -> FileMap | None:
    """The mapped file that the array is a view of, if it is."""
    owner: object = view
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    return owner if isinstance(owner, FileMap) else None
