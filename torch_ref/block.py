"""A causal pre-norm transformer block with one fused projection. Twin: `flax_tf/block.py`."""

from math import sqrt

from jaxtyping import Float
from torch import Tensor, nn

from torch_ref.config import BlockConfig
from torch_ref.masks import causal_mask, masked_softmax


class Block(nn.Module):
    """x + Attention(LayerNorm(x)), then x + MLP(LayerNorm(x)). Seed 000, `MyTransformer`."""

    def __init__(self, config: BlockConfig):
        super().__init__()
        self.config = config
        self.attention_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.mlp_layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.kqv_projection = nn.Linear(config.d_model, 3 * config.d_model)
        self.output_mixer_projection = nn.Linear(config.d_model, config.d_model)
        self.embedding_mlp = nn.Sequential(
            nn.Linear(config.d_model, 4 * config.d_model),
            nn.GELU(),
            nn.Linear(4 * config.d_model, config.d_model),
        )

    def attention(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Causal multi-head attention. The fused projection holds keys, queries and values, in that order."""
        B, T, D = x.shape
        N, H = self.config.num_heads, self.config.head_dim
        kqv = self.kqv_projection(x).reshape(B, T, 3, N, H)
        k, q, v = kqv.permute(2, 0, 3, 1, 4).unbind(0)  # each (B, N, T, H)
        scores = q @ k.transpose(-2, -1) / sqrt(H)  # (B, N, T, T)
        mixed = masked_softmax(scores, causal_mask(T, x.device)) @ v  # (B, N, T, H)
        return self.output_mixer_projection(mixed.transpose(1, 2).reshape(B, T, D))

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        x = x + self.attention(self.attention_layer_norm(x))  # (B, T, D)
        return x + self.embedding_mlp(self.mlp_layer_norm(x))  # (B, T, D)
