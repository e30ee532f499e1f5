"""The mask of dropout as a function of a key and of the place of each value, which fuses into what is around it."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Key, UInt32


def keep_mask(key: Key[Array, ""], shape: tuple[int, ...], rate: float) -> Bool[Array, "*shape"]:
    """True where a value stays: each with probability 1 - rate, to 2^-32, independently of all others.

    The bits of a value are a hash of the key, of its index along the first axis and of its index within the rest (below
    2^32 each). So they do not depend on the other values, nor on how the array is spread over devices. This is no
    generator for any other use than masks; the tests say what its statistics hold.
    """
    first, second = jax.random.key_data(key).reshape(-1)[:2]
    # So that the next key has not the bits of the next row or column; mixing alone would leave 0 as it is.
    second = _mixed(second + jnp.uint32(0x9E3779B9))
    first = _mixed(first ^ second)
    second = _mixed(second ^ first)
    row = jax.lax.broadcasted_iota(jnp.uint32, shape, 0) if shape else jnp.uint32(0)
    column = jnp.zeros(shape, jnp.uint32)
    for axis in range(1, len(shape)):
        stride = jnp.uint32(math.prod(shape[axis + 1 :]))
        column += stride * jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
    bits = _mixed(_mixed(column ^ first) ^ (row + second))
    return bits >= jnp.uint32(min(round(rate * 2**32), 2**32 - 1))


def _mixed(bits: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """A permutation of the 32-bit numbers, in which every bit changes every other half the time.

    `lowbias32` of Wellons (2018, https://nullprogram.com/blog/2018/07/31/).
    """
    bits = (bits ^ (bits >> 16)) * jnp.uint32(0x7FEB352D)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(0x846CA68B)
    return bits ^ (bits >> 16)
