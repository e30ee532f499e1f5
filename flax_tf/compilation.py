"""Compiled programs are kept, so that the next process begins where this one began to compute."""

import errno
import hashlib
import logging
import os
import platform
import warnings
from pathlib import Path
from typing import Any

import jax

from flax_tf.errors import InputError
from flax_tf.files import cache_directory

# The least recently used make room beyond this.
_MOST_BYTES = 2 << 30

log = logging.getLogger(__name__)


def keep_programs() -> None:
    """Turns JAX's persistent compilation cache on, in `compiled` of the cache directory.

    A directory that the user has set (`JAX_COMPILATION_CACHE_DIR`, or in `jax.config`) stays; an empty one is none.
    Where nothing can be written, programs are compiled anew, without a word on each.
    """
    config: Any = jax.config  # whose settings its annotations do not know
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or config.jax_compilation_cache_dir:
        return
    try:
        directory = cache_directory() / "compiled" / _processor()
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), directory)
    except (OSError, InputError) as error:
        reason = f"{error.filename} can't be written" if isinstance(error, OSError) else error
        log.warning("%s: programs will be compiled anew by every process", reason)
        return
    # A full disk, or a damaged entry: the program is compiled, as without a cache.
    warnings.filterwarnings("ignore", message="Error (reading|writing) persistent compilation cache entry")
    config.update("jax_compilation_cache_dir", str(directory))
    config.update("jax_compilation_cache_max_size", _MOST_BYTES)
    config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def _processor() -> str:
    """A name for the processor's instructions: home directories are shared by machines that differ in them."""
    about = platform.machine()
    cpuinfo = Path("/proc/cpuinfo")  # Linux
    if cpuinfo.is_file():
        about += next((line for line in cpuinfo.read_text().splitlines() if line.startswith(("flags", "Features"))), "")
    return hashlib.sha256(about.encode()).hexdigest()[:8]
