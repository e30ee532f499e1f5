"""Writing files and directories so that a reader sees the old one or the new one, never half of one."""

import contextlib
import os
import tempfile
from collections.abc import Generator
from pathlib import Path

from flax_tf.errors import InputError


def cache_directory() -> Path:
    """Where what can be made again is kept: $FLAX_TF_CACHE, or $XDG_CACHE_HOME/flax_tf, or ~/.cache/flax_tf.

    Raises InputError if the user has no home.
    """
    try:
        if own := os.environ.get("FLAX_TF_CACHE"):
            return Path(own).expanduser()
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flax_tf"
    except RuntimeError:
        raise InputError("there is no home directory for a cache (set FLAX_TF_CACHE)") from None


def check_file(path: str | os.PathLike) -> None:
    """Raises InputError if there is a directory in the way of a file to write."""
    if Path(path).is_dir():
        raise InputError(f"{path} is a directory: name a file to write")


def check_writable(path: str | os.PathLike) -> None:
    """Raises InputError if a file can't be written at `path`: before the long work, not after it."""
    check_file(path)
    try:
        try_to_write(Path(path).absolute().parent)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror or error}): name another") from None


def try_to_write(directory: Path) -> None:
    """Raises OSError if nothing can be written in the directory or, if there is none, in the nearest one above it."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    with tempfile.TemporaryFile(dir=directory):
        pass


@contextlib.contextmanager
def replacing(path: str | os.PathLike) -> Generator[Path]:
    """Yields a temporary path beside `path`; what the caller writes there takes `path`'s place when the block ends.

    The caller may write a file or make a directory. If the block raises, the temporary is removed and `path` is as it
    was. A directory that is in the way of another is swapped out first and removed last, so no moment loses both.
    Raises InputError if something cannot be written, a directory is in the way of a file, or `path` is the current
    directory or above it.
    """
    target = Path(path).resolve()
    if Path.cwd().is_relative_to(target):
        raise InputError(f"{path} holds the current directory and cannot be replaced: name another")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as room:
            fresh = Path(room) / target.name
            yield fresh
            if fresh.is_file():
                check_file(path)
            if target.is_dir():
                target.replace(Path(room) / "old")
            fresh.replace(target)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror or error}): nothing was changed") from error
