"""Memory that a process keeps from step to step, or gives back."""

import platform
import subprocess
import sys

# Calls a program with 64 MB of temporaries; prints how many pages the system had to clear for five calls.
PAGES = """
import resource, sys
from flax_tf.memory import keep_memory
if sys.argv[1] == "keep":
    keep_memory()
import jax, jax.numpy as jnp
program = jax.jit(lambda x, y: (x[:, None] * x) @ y)
x, y = jnp.ones(4096), jnp.ones((4096, 3))
for _ in range(5):
    jax.block_until_ready(program(x, y))
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    jax.block_until_ready(program(x, y))
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
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
