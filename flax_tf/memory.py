"""What becomes of memory that is given back. What concerns glibc changes nothing where the C library is another."""

import contextlib
import ctypes
import gc
import os
from collections.abc import Generator
from typing import Any

# Of glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8
_NEVER = -1


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
        _libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


def release_memory() -> None:
    """Gives the system all memory that is free: a compiler leaves hundreds of MB."""
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


@contextlib.contextmanager
def without_collection() -> Generator[None]:
    """Python looks for no cycles meanwhile: where many objects are made that stay, it walks through all of them, and
    through those of large libraries, again and again.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


_libc: Any = ctypes.CDLL(None) if os.name == "posix" else None
