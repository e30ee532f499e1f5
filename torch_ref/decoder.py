"""One layer of the Transformer's decoder. Twin: `flax_tf/decoder.py`."""

from jaxtyping import Bool, Float
from torch import Tensor, nn

from torch_ref.attention import MultiHeadAttention
from torch_ref.config import TransformerConfig
from torch_ref.feed_forward import PositionWiseFeedForward


class DecoderLayer(nn.Module):
    """Causal self-attention, attention over the encoder's output and feed-forward, each LayerNorm(x + f(x)).

    Seed 002, `DecoderLayer`.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.self_attn = MultiHeadAttention(config)
        self.cross_attn = MultiHeadAttention(config)
        self.feed_forward = PositionWiseFeedForward(config)
        self.norm1 = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.norm2 = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.norm3 = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        enc_output: Float[Tensor, "B S D"],
        src_mask: Bool[Tensor, "B 1 1 S"],
        tgt_mask: Bool[Tensor, "B 1 T T"],
    ) -> Float[Tensor, "B T D"]:
        attn_output = self.self_attn(x, x, x, tgt_mask)  # (B, T, D)
        x = self.norm1(x + self.dropout(attn_output))  # (B, T, D)
        attn_output = self.cross_attn(x, enc_output, enc_output, src_mask)  # (B, T, D)
        x = self.norm2(x + self.dropout(attn_output))  # (B, T, D)
        return self.norm3(x + self.dropout(self.feed_forward(x)))  # (B, T, D)
