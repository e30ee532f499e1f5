"""Token and position embeddings, learned and sinusoidal. Twin: `torch_ref/embedding.py`."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from flax_tf.config import BackboneConfig, TransformerConfig
from flax_tf.errors import TokenIdError
from flax_tf.layers import Buffer, Dropout, Embedding, LayerNorm


class Embeddings(nnx.Module):
    """Dropout(LayerNorm(token embedding + learned position embedding)). Seed 001, `Embeddings`."""

    def __init__(self, config: BackboneConfig, *, rngs: nnx.Rngs):
        self.token_embd = Embedding(config.token_count(), config.d_model, rngs=rngs)
        self.pos_embd = Embedding(config.max_seq_length, config.d_model, rngs=rngs)
        self.dropout = Dropout(config.dropout)
        self.layer_norm = LayerNorm(config.d_model, epsilon=config.layer_norm_eps, rngs=rngs)

    def __call__(self, x: Int[Array, "B T"], *, rngs: nnx.Rngs | None = None) -> Float[Array, "B T D"]:
        """Raises TokenIdError for more positions than the table has, or for a concrete id outside the vocabulary."""
        length = x.shape[-1]
        if length > self.pos_embd.num_embeddings:
            raise TokenIdError(
                f"{length} positions, but the position table has {self.pos_embd.num_embeddings}: give shorter sequences"
            )
        x = self.token_embd(x) + self.pos_embd(jnp.arange(length))[None]  # (B, T, D)
        return self.dropout(self.layer_norm(x), rngs=rngs)  # (B, T, D)

    def step(self, token: Int[Array, "B"], position: Int[Array, "B"]) -> Float[Array, "B 1 D"]:
        """One token of every row, each at a position of its own."""
        return self.layer_norm(self.token_embd(token) + self.pos_embd(position))[:, None]


class PositionalEncoding(nnx.Module):
    """x + pe, with pe(t, 2i) = sin(t / 10000^(2i/D)) and pe(t, 2i+1) = cos of the same. Seed 002, `PositionalEncoding`.

    The table of Vaswani et al. 2017, section 3.5, is saved and never trained. An odd D ends with a sine.
    """

    def __init__(self, config: TransformerConfig):
        D, length = config.d_model, config.max_seq_length
        position = jnp.arange(length, dtype=jnp.float32)[:, None]
        angle = position * jnp.exp(jnp.arange(0, D, 2, dtype=jnp.float32) * -(math.log(10000.0) / D))[None, :]
        pe = jnp.zeros((length, D), jnp.float32).at[:, 0::2].set(jnp.sin(angle))
        self.pe = Buffer(pe.at[:, 1::2].set(jnp.cos(angle[:, : D // 2]))[None])  # (1, max_seq_length, D)

    def __call__(self, x: Float[Array, "B T D"], start: int | Int[Array, ""] = 0) -> Float[Array, "B T D"]:
        """`start` is the position of the first column of x. Raises TokenIdError for more columns than the table has."""
        length, positions = x.shape[1], self.pe.shape[1]
        if length > positions:
            raise TokenIdError(f"{length} positions, but the position table has {positions}: give shorter sequences")
        return x + jax.lax.dynamic_slice_in_dim(self.pe[...], start, length, axis=1)
