"""A causal pre-norm transformer block with one fused projection. Twin: `torch_ref/block.py`."""

from math import sqrt

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from flax_tf.config import BlockConfig
from flax_tf.layers import GELU, LayerNorm, Linear
from flax_tf.masks import causal_mask, masked_softmax


class Block(nnx.Module):
    """x + Attention(LayerNorm(x)), then x + MLP(LayerNorm(x)). Seed 000, `MyTransformer`."""

    def __init__(self, config: BlockConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.attention_layer_norm = LayerNorm(config.d_model, epsilon=config.layer_norm_eps, rngs=rngs)
        self.mlp_layer_norm = LayerNorm(config.d_model, epsilon=config.layer_norm_eps, rngs=rngs)
        self.kqv_projection = Linear(config.d_model, 3 * config.d_model, rngs=rngs)
        self.output_mixer_projection = Linear(config.d_model, config.d_model, rngs=rngs)
        self.embedding_mlp = nnx.Sequential(
            Linear(config.d_model, 4 * config.d_model, rngs=rngs),
            GELU(),
            Linear(4 * config.d_model, config.d_model, rngs=rngs),
        )

    def attention(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Causal multi-head attention. The fused projection holds keys, queries and values, in that order."""
        B, T, D = x.shape
        N, H = self.config.num_heads, self.config.head_dim
        kqv = self.kqv_projection(x).reshape(B, T, 3, N, H)
        k, q, v = jnp.moveaxis(kqv, (2, 3), (0, 2))  # each (B, N, T, H)
        scores = jnp.einsum("bnth,bnsh->bnts", q, k) / sqrt(H)  # (B, N, T, T)
        mixed = masked_softmax(scores, causal_mask(T)) @ v  # (B, N, T, H)
        return self.output_mixer_projection(jnp.swapaxes(mixed, 1, 2).reshape(B, T, D))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        x = x + self.attention(self.attention_layer_norm(x))  # (B, T, D)
        return x + self.embedding_mlp(self.mlp_layer_norm(x))  # (B, T, D)
