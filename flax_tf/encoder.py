"""One layer of the Transformer's encoder. Twin: `torch_ref/encoder.py`."""

from flax import nnx
from jaxtyping import Array, Bool, Float

from flax_tf.attention import MultiHeadAttention
from flax_tf.config import TransformerConfig
from flax_tf.feed_forward import PositionWiseFeedForward
from flax_tf.layers import Dropout, LayerNorm


class EncoderLayer(nnx.Module):
    """LayerNorm(x + Attention(x)), then LayerNorm(x + FeedForward(x)). Seed 002, `EncoderLayer`."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.self_attn = MultiHeadAttention(config, rngs=rngs)
        self.feed_forward = PositionWiseFeedForward(config, rngs=rngs)
        self.norm1 = LayerNorm(config.d_model, epsilon=config.layer_norm_eps, rngs=rngs)
        self.norm2 = LayerNorm(config.d_model, epsilon=config.layer_norm_eps, rngs=rngs)
        self.dropout = Dropout(config.dropout)

    def __call__(
        self, x: Float[Array, "B S D"], mask: Bool[Array, "B 1 1 S"], *, rngs: nnx.Rngs | None = None
    ) -> Float[Array, "B S D"]:
        attn_output = self.self_attn(x, x, x, mask)  # (B, S, D)
        x = self.norm1(x + self.dropout(attn_output, rngs=rngs))  # (B, S, D)
        return self.norm2(x + self.dropout(self.feed_forward(x), rngs=rngs))  # (B, S, D)
