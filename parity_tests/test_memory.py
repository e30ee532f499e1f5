"""Memory that a process keeps from step to step, or gives back."""

import gc
import platform
import subprocess
import sys

import pytest

from flax_tf.memory import without_collection

# Calls a program with 64 MB of temporaries; prints how many pages the system had to clear for a call.
PAGES = """
import resource, sys
from flax_tf.memory import keep_memory
if sys.argv[1] == "keep":
    keep_memory()
import jax, jax.numpy as jnp
program = jax.jit(lambda x, y: (x[:, None] * x) @ y)
x, y = jnp.ones(4096), jnp.ones((4096, 3))

def cleared():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    jax.block_until_ready(program(x, y))
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(min(cleared() for _ in range(20)))  # the first ones may need more memory still
"""


def pages(how: str) -> int:
    found = subprocess.run([sys.executable, "-c", PAGES, how], capture_output=True, text=True, check=True)
    return int(found.stdout)


def test_memory_that_is_kept_is_not_cleared_again() -> None:
    kept, returned = pages("keep"), pages("return")
    # Pages are of 4 KiB or more, and a few belong to the interpreter.
    if platform.libc_ver()[0] == "glibc":
        assert kept < returned / 10
    else:
        assert abs(kept - returned) <= max(kept, returned) / 10


def test_collection_goes_on_after_a_pause() -> None:
    with pytest.raises(KeyError), without_collection():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()  # as it was
    finally:
        gc.enable()
