"""What becomes of the memory that programs give back, where the C library is glibc. Elsewhere nothing is changed."""

import ctypes
import os
from typing import Any

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_ALL = 2**31 - 1  # the largest number that mallopt takes


def keep_memory() -> None:
    """From here on, memory that was used once is used again, and not given back to the system.

    The temporaries of a compiled program are one block. glibc returns a block of over 32 MB when it is free, and the
    system clears each of its pages when the next call takes it: 0.6 s per GB in a virtual machine. Kept blocks that do
    not fit exactly are joined by others, so that up to three times the temporaries may be held. To be called before
    threads are, which would have heaps of their own.
    """
    if hasattr(_libc, "mallopt"):
        _libc.mallopt(_M_ARENA_MAX, 1)  # of the other heaps none may be larger than 64 MB
        _libc.mallopt(_M_MMAP_MAX, 0)
        _libc.mallopt(_M_TRIM_THRESHOLD, _ALL)


def release_memory() -> None:
    """Gives the system all memory that is free: a compiler leaves hundreds of MB."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


_libc: Any = ctypes.CDLL(None) if os.name == "posix" else None
