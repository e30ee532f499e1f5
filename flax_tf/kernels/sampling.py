"""Drawing tokens by inverse CDF, which asks for two random numbers a row where Gumbel's trick asks for V."""

from math import ceil, isqrt

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def draw(key: Array, logits: Float[Array, "B V"]) -> Int[Array, "B"]:
    """An id for every row, drawn with the probabilities softmax(logits); an id whose probability is 0 never comes.

    The ids are cut into about √V blocks of as many. One random number chooses a block by the sum of its probabilities,
    another an id within it. So no sum is over more than √V numbers, which keeps the error of float32 sums near 1e-6,
    and the probabilities of ids can be as fine as 2^-46, where one number of 23 random bits would cut them to
    multiples of 2^-23.

    Sums are in float32 or wider. A row may hold -inf, but not alone.
    """
    B, V = logits.shape
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    weights = jnp.exp(logits - logits.max(axis=-1, keepdims=True))
    width = isqrt(V - 1) + 1
    blocks = jnp.pad(weights, ((0, 0), (0, -V % width))).reshape(B, ceil(V / width), width)
    numbers = jax.random.uniform(key, (2, B, 1), logits.dtype)
    block = _first_above(blocks.sum(axis=-1), numbers[0])  # (B,)
    within = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]  # (B, width)
    return block * width + _first_above(within, numbers[1])


def _first_above(weights: Float[Array, "B M"], numbers: Float[Array, "B 1"]) -> Int[Array, "B"]:
    """The first entry where the running sum of the weights exceeds this part, in [0, 1), of their sum."""
    sums = jnp.cumsum(weights, axis=-1)
    above = sums > numbers * sums[:, -1:]
    # The sums, made in pairs, need not grow with every entry, nor stay where an entry is 0; such an entry is never it.
    return jnp.argmax(jnp.where(weights > 0, above.astype(jnp.int32), -1), axis=-1)
