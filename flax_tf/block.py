"""A causal pre-norm transformer block with one fused projection. Twin: `torch_ref/block.py`."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from flax_tf.config import BlockConfig
from flax_tf.kernels.attention import attention
from flax_tf.layers import GELU, LayerNorm, Linear


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
        kqv = jnp.split(self.kqv_projection(x), 3, axis=-1)
        k, q, v = (jnp.swapaxes(each.reshape(B, T, N, H), 1, 2) for each in kqv)  # each (B, N, T, H)
        mixed = attention(q, k, v, causal=True)  # (B, N, T, H)
        return self.output_mixer_projection(jnp.swapaxes(mixed, 1, 2).reshape(B, T, D))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        x = x + self.attention(self.attention_layer_norm(x))  # (B, T, D)
        return x + self.embedding_mlp(self.mlp_layer_norm(x))  # (B, T, D)
