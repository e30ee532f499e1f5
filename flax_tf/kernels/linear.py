"""The product of activations and a kernel, in a form whose gradients are fast too."""

from typing import Any

import jax
from jaxtyping import Array, Float


def dot_general(
    x: Float[Array, "*B D"], kernel: Float[Array, "D F"], dimension_numbers: Any, **options: Any
) -> Float[Array, "*B F"]:
    """What `nnx.Linear` wants of `jax.lax.dot_general`, x @ kernel, over one axis of rows.

    With several, XLA makes the kernel's gradient on a CPU through a transposed copy of the output's, at half the speed.
    """
    if x.ndim < 3:
        return jax.lax.dot_general(x, kernel, dimension_numbers, **options)
    rows = x.reshape(-1, x.shape[-1])
    return jax.lax.dot_general(rows, kernel, (((1,), (0,)), ((), ())), **options).reshape(*x.shape[:-1], -1)
