"""One layer of the Transformer's encoder. Twin: `flax_tf/encoder.py`."""

from jaxtyping import Bool, Float
from torch import Tensor, nn

from torch_ref.attention import MultiHeadAttention
from torch_ref.config import TransformerConfig
from torch_ref.feed_forward import PositionWiseFeedForward


class EncoderLayer(nn.Module):
    """LayerNorm(x + Attention(x)), then LayerNorm(x + FeedForward(x)). Seed 002, `EncoderLayer`."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.self_attn = MultiHeadAttention(config)
        self.feed_forward = PositionWiseFeedForward(config)
        self.norm1 = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.norm2 = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Float[Tensor, "B S D"], mask: Bool[Tensor, "B 1 1 S"]) -> Float[Tensor, "B S D"]:
        attn_output = self.self_attn(x, x, x, mask)  # (B, S, D)
        x = self.norm1(x + self.dropout(attn_output))  # (B, S, D)
        return self.norm2(x + self.dropout(self.feed_forward(x)))  # (B, S, D)
