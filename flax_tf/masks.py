"""Attention masks. One polarity everywhere: True = may attend."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def causal_mask(length: int) -> Bool[Array, "T T"]:
    """Row t is True at columns 0..t: a position attends to itself and to earlier ones."""
    return jnp.tril(jnp.ones((length, length), dtype=bool))


def padding_mask(ids: Int[Array, "B S"], pad_id: int) -> Bool[Array, "B 1 1 S"]:
    """False at the columns of padding, for every head and query."""
    return (ids != pad_id)[:, None, None, :]


def target_mask(ids: Int[Array, "B T"], pad_id: int) -> Bool[Array, "B 1 T T"]:
    """No peeking, and the rows of padding are False as a whole.

    Padding fills a row up at its end, so no real position sees it, being earlier. This is the reference's mask, at
    padded positions too.
    """
    return (ids != pad_id)[:, None, :, None] & causal_mask(ids.shape[1])[None, None]


def masked_softmax(scores: Float[Array, "*B T S"], mask: Bool[Array, "*#B #T S"]) -> Float[Array, "*B T S"]:
    """Softmax over the last axis with the masked scores at the dtype's lowest finite value.

    After the softmax that is exactly the zero that -inf gives, and a row that is masked as a whole is uniform instead
    of NaN, in values and in gradients.
    """
    return jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min), axis=-1)
