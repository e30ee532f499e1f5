"""Arrays in memory of their own, in the layout that they are used in, as fast as memory allows.

A model could use the pages of its file as they are, and would load in no time. But a file that is then cut short or
overwritten in place would crash or change it, and only kernels that are not transposed could; so each array is copied,
once, and no more of the file is held than is being copied.
"""

import mmap
from typing import Any

import jax
import numpy as np
from jaxtyping import Array
from numpy.lib.array_utils import byte_bounds

_LARGE = 1 << 20  # bytes
_OWN: dict[str, Any] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
_LINE = 64  # bytes of a cache line: transposing writes whole ones, where NumPy alone would write a number of each


class FileMap(mmap.mmap):
    """A file mapped for reading."""

    def forget(self, array: np.ndarray) -> None:
        """Takes the whole pages of a view out of this process's memory. Used again, they come from the file again."""
        if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            origin = np.frombuffer(self, np.uint8).ctypes.data
            start, stop = (bound - origin for bound in byte_bounds(array))
            start, stop = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, stop // mmap.PAGESIZE * mmap.PAGESIZE
            if start < stop:
                self.madvise(mmap.MADV_DONTNEED, start, stop - start)


def to_jax(view: np.ndarray) -> Array:
    """A view (of a file, of memory that PyTorch goes on training) as an array of JAX that shares nothing with it.

    It is copied once, whatever its layout. If it is large, and on a CPU, that copy is the array itself.
    """
    if view.nbytes < _LARGE:
        copy = np.array(view, order="C")
    else:
        # NumPy's own would be huge pages: in a virtual machine these may have to come from the host, which took ten
        # times as long as the copy.
        copy = np.ndarray(view.shape, view.dtype, mmap.mmap(-1, view.nbytes, **_OWN))
        strip = view.shape[-1] if view.flags.c_contiguous else _LINE // view.itemsize
        for start in range(0, view.shape[-1], strip):
            copy[..., start : start + strip] = view[..., start : start + strip]
        _forget(view)
    return jax.device_put(copy, may_alias=True)  # jnp.array, even with copy=False, would copy again


def _forget(view: np.ndarray) -> None:
    owner: object = view
    while isinstance(owner, np.ndarray | memoryview):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    if isinstance(owner, FileMap):
        owner.forget(view)
