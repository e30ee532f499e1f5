"""Attention masks. One polarity everywhere: True = may attend."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def causal_mask(length: int) -> Bool[Array, "T T"]:
    """Row t is True at columns 0..t: a position attends to itself and to earlier ones."""
    return jnp.tril(jnp.ones((length, length), dtype=bool))


def masked_softmax(scores: Float[Array, "*B T S"], mask: Bool[Array, "*#B T S"]) -> Float[Array, "*B T S"]:
    """Softmax over the last axis with the masked scores at the dtype's lowest finite value.

    After the softmax that is exactly the zero that -inf gives, and a row that is masked as a whole is uniform instead
    of NaN, in values and in gradients.
    """
    return jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min), axis=-1)
