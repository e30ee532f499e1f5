"""One layer of the Transformer's decoder. Twin: `torch_ref/decoder.py`."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from flax_tf.attention import KeysValues, MultiHeadAttention
from flax_tf.config import TransformerConfig
from flax_tf.feed_forward import PositionWiseFeedForward
from flax_tf.layers import Dropout, LayerNorm

# L is the room for positions of the target.
Cache = tuple[Float[Array, "B N L H"], Float[Array, "B N L H"]]


class DecoderLayer(nnx.Module):
    """Causal self-attention, attention over the encoder's output and feed-forward, each LayerNorm(x + f(x)).

    Seed 002, `DecoderLayer`.
    """

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.self_attn = MultiHeadAttention(config, rngs=rngs)
        self.cross_attn = MultiHeadAttention(config, rngs=rngs)
        self.feed_forward = PositionWiseFeedForward(config, rngs=rngs)
        self.norm1 = LayerNorm(config.d_model, epsilon=config.layer_norm_eps, rngs=rngs)
        self.norm2 = LayerNorm(config.d_model, epsilon=config.layer_norm_eps, rngs=rngs)
        self.norm3 = LayerNorm(config.d_model, epsilon=config.layer_norm_eps, rngs=rngs)
        self.dropout = Dropout(config.dropout)

    def __call__(
        self,
        x: Float[Array, "B T D"],
        enc_output: Float[Array, "B S D"],
        src_mask: Bool[Array, "B 1 1 S"],
        tgt_mask: Bool[Array, "B 1 T T"],
        *,
        rngs: nnx.Rngs | None = None,
    ) -> Float[Array, "B T D"]:
        attn_output = self.self_attn(x, x, x, tgt_mask)  # (B, T, D)
        x = self.norm1(x + self.dropout(attn_output, rngs=rngs))  # (B, T, D)
        attn_output = self.cross_attn(x, enc_output, enc_output, src_mask)  # (B, T, D)
        x = self.norm2(x + self.dropout(attn_output, rngs=rngs))  # (B, T, D)
        return self.norm3(x + self.dropout(self.feed_forward(x), rngs=rngs))  # (B, T, D)

    def step(
        self,
        x: Float[Array, "B 1 D"],
        memory: KeysValues,
        src_mask: Bool[Array, "B 1 1 S"],
        cache: Cache,
        position: Int[Array, ""],
    ) -> tuple[Float[Array, "B 1 D"], Cache]:
        """One position of a call in evaluation mode.

        `memory` has the keys and values of the encoder's output, `cache` those of the positions before this one, in a
        room for all; it is returned with this one's in their place.
        """
        new = self.self_attn.keys_values(x, x)  # each (B, N, 1, H)
        k, v = (
            jax.lax.dynamic_update_slice_in_dim(room, array, position, axis=2)
            for room, array in zip(cache, new, strict=True)
        )  # each (B, N, L, H)
        filled = (jnp.arange(k.shape[2]) <= position)[None, None, None, :]
        x = self.norm1(x + self.self_attn.attend(x, k, v, filled))  # (B, 1, D)
        x = self.norm2(x + self.cross_attn.attend(x, *memory, src_mask))  # (B, 1, D)
        return self.norm3(x + self.feed_forward(x)), (k, v)
