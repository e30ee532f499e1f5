"""`torch.nn`'s dropout."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from flax_tf.errors import InputError
from flax_tf.kernels import dropout as kernel


class Dropout(nnx.Dropout):
    """`torch.nn.Dropout`, as `nnx.Dropout` with masks from `flax_tf.kernels.dropout`, which cost next to nothing."""

    def __init__(self, rate: float):
        super().__init__(rate)

    def __call__(
        self,
        inputs: Float[Array, "*B"],
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | Array | None = None,
    ) -> Float[Array, "*B"]:
        """In training mode zeroes each value with probability `rate` and divides the others by 1 - rate.

        `deterministic`, if given, goes before the mode. `rngs` is a stream (of several, that named `dropout`), which
        each call advances, or a key. Raises InputError if it is needed and missing.
        """
        if (self.deterministic if deterministic is None else deterministic) or self.rate == 0:
            return inputs
        if rngs is None:
            raise InputError("dropout in training mode draws random numbers: pass rngs=nnx.Rngs(dropout=0), or eval()")
        if self.rate == 1:
            return jnp.zeros_like(inputs)  # the other branch would divide by zero
        if isinstance(rngs, nnx.Rngs):
            rngs = rngs.dropout
        key = rngs if isinstance(rngs, jax.Array) else rngs()
        keep = kernel.keep_mask(key, inputs.shape, self.rate)
        return jnp.where(keep, inputs / (1 - self.rate), 0)
