"""Token and position embeddings. Twin: `torch_ref/embedding.py`."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from flax_tf.config import BackboneConfig
from flax_tf.errors import TokenIdError
from flax_tf.layers import Embedding, LayerNorm


class Embeddings(nnx.Module):
    """Dropout(LayerNorm(token embedding + learned position embedding)). Seed 001, `Embeddings`."""

    def __init__(self, config: BackboneConfig, *, rngs: nnx.Rngs):
        self.token_embd = Embedding(config.token_count(), config.d_model, rngs=rngs)
        self.pos_embd = Embedding(config.max_seq_length, config.d_model, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout)
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
