"""What the command lines share: strict parsing, one clear line for wrong input, and the exit codes."""

import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
import yaml
from jsonargparse import ArgumentParser

from flax_tf.compilation import keep_programs
from flax_tf.errors import InputError

OK, DIFFERENT, WRONG_INPUT, INTERRUPTED = 0, 1, 2, 130


class Parser(ArgumentParser):
    """An argument parser whose errors are InputErrors of one line, without the usage text."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        del ex
        raise InputError(" ".join(message.split()))


def wrong_value(error: InputError) -> tuple[str, str] | None:
    """The name and the value of the argument that a parser's error is about, if it is about one."""
    found = re.search(r'Parser key "([\w.]+)":.*(?:Got|Given) value: (.*)$', str(error))
    return (found[1], found[2]) if found else None


class _Loader(yaml.SafeLoader):
    """Reads 1e-5 as a number, as YAML 1.2 and jsonargparse do."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def read_yaml(file: Path) -> dict[str, Any]:
    """The settings in a YAML or JSON file; {} if it is empty. Raises InputError if it is missing or holds others."""
    try:
        content = yaml.load(file.read_text(encoding="utf-8"), _Loader)
    except OSError as error:
        raise InputError(f"config file {file}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or " ".join(str(error).split())[:200]
        raise InputError(f"{file}{where}: not YAML: {reason}") from None
    if not isinstance(content, dict | None):
        raise InputError(f"{file}: it must hold settings, one `name: value` a line")
    return content or {}


def enable_wide(tensors: Mapping[str, np.ndarray]) -> None:
    """Turns JAX's 64-bit types on if a checkpoint holds any: nothing is cast without being asked."""
    if any(array.dtype.itemsize == 8 for array in tensors.values()):
        jax.config.update("jax_enable_x64", True)


def run(name: str, command: Callable[[], int]) -> int:
    """Runs a command and returns its exit code; wrong input is one line on stderr and exit code 2, never a traceback.

    What the library logs (stripped prefixes, lossy casts) is printed on stderr as well.
    """
    logging.basicConfig(format=f"{name}: %(message)s", stream=sys.stderr, level=logging.WARNING)
    keep_programs()
    try:
        code = command()
        sys.stdout.flush()  # while it can still be told that the pipe is closed or the disk full
        return code
    except InputError as error:
        return _complain(name, error)
    except MemoryError:
        return _complain(name, "out of memory: use a smaller model or batch")
    except BrokenPipeError:  # the reader of our output (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return OK
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        return _complain(name, f"{where}{error.strerror or error}")
    except KeyboardInterrupt:
        _complain(name, "interrupted")
        return INTERRUPTED


def _complain(name: str, message: Any) -> int:
    # A name from a file may be in it: its control characters are shown, not sent to the terminal.
    shown = "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in str(message))
    print(f"{name}: error: {shown}", file=sys.stderr)
    return WRONG_INPUT
