"""Multi-head self-attention with a separate module per head. Twin: `torch_ref/attention.py`."""

from math import sqrt

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from flax_tf.config import BackboneConfig
from flax_tf.layers import Buffer, Linear
from flax_tf.masks import masked_softmax


class AttentionHead(nnx.Module):
    """softmax(QKᵀ/√H)V of one head, without biases (Vaswani et al. 2017, equation 1). Seed 001, `AttentionHead`."""

    def __init__(self, config: BackboneConfig, *, rngs: nnx.Rngs):
        self.mask = config.mask
        self.query = Linear(config.d_model, config.head_dim, bias=False, rngs=rngs)
        self.key = Linear(config.d_model, config.head_dim, bias=False, rngs=rngs)
        self.value = Linear(config.d_model, config.head_dim, bias=False, rngs=rngs)
        self.tril = Buffer(jnp.tril(jnp.ones((config.max_seq_length, config.max_seq_length))))
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x: Float[Array, "B T D"], *, rngs: nnx.Rngs | None = None) -> Float[Array, "B T H"]:
        length = x.shape[-2]
        q, k, v = self.query(x), self.key(x), self.value(x)  # each (B, T, H)
        weights = jnp.einsum("bth,bsh->bts", q, k) / sqrt(q.shape[-1])  # (B, T, T)
        if self.mask:
            weights = masked_softmax(weights, self.tril[:length, :length] != 0)  # (B, T, T)
        else:
            weights = jax.nn.softmax(weights, axis=-1)  # (B, T, T)
        return self.dropout(weights, rngs=rngs) @ v  # (B, T, H)


class PerHeadAttention(nnx.Module):
    """The heads side by side, then one biased projection. Seed 001, `MultiHeadAttention`."""

    def __init__(self, config: BackboneConfig, *, rngs: nnx.Rngs):
        self.attention_heads = nnx.List([AttentionHead(config, rngs=rngs) for _ in range(config.num_heads)])
        self.linear_proj = Linear(config.d_model, config.d_model, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], *, rngs: nnx.Rngs | None = None) -> Float[Array, "B T D"]:
        heads = [head(x, rngs=rngs) for head in self.attention_heads]  # N times (B, T, H)
        return self.linear_proj(jnp.concatenate(heads, axis=-1))  # (B, T, D)
