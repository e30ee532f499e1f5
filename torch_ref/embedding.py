"""Token and position embeddings, learned and sinusoidal. Twin: `flax_tf/embedding.py`."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from flax_tf.errors import TokenIdError
from torch_ref.config import BackboneConfig, TransformerConfig


class Embeddings(nn.Module):
    """Dropout(LayerNorm(token embedding + learned position embedding)). Seed 001, `Embeddings`."""

    def __init__(self, config: BackboneConfig):
        super().__init__()
        self.token_embd = nn.Embedding(config.token_count(), config.d_model)
        self.pos_embd = nn.Embedding(config.max_seq_length, config.d_model)
        self.dropout = nn.Dropout(config.dropout)
        self.layer_norm = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(self, x: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """Raises IndexError for more positions than the table has, or for an id outside the vocabulary."""
        x = self.token_embd(x) + self.pos_embd(torch.arange(x.size(-1), device=x.device))  # (B, T, D)
        return self.dropout(self.layer_norm(x))  # (B, T, D)


class PositionalEncoding(nn.Module):
    """x + pe, with pe(t, 2i) = sin(t / 10000^(2i/D)) and pe(t, 2i+1) = cos of the same. Seed 002, `PositionalEncoding`.

    The table of Vaswani et al. 2017, section 3.5, is saved and never trained. An odd D ends with a sine.
    """

    pe: Tensor

    def __init__(self, config: TransformerConfig):
        super().__init__()
        D, length = config.d_model, config.max_seq_length
        position = torch.arange(length, dtype=torch.float32)[:, None]
        angle = position * torch.exp(torch.arange(0, D, 2, dtype=torch.float32) * -(math.log(10000.0) / D))
        pe = torch.zeros(length, D)
        pe[:, 0::2] = torch.sin(angle)
        pe[:, 1::2] = torch.cos(angle[:, : D // 2])
        self.register_buffer("pe", pe[None])  # (1, max_seq_length, D)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        """Raises TokenIdError, an IndexError, for more positions than the table has."""
        length, positions = x.size(1), self.pe.size(1)
        if length > positions:
            raise TokenIdError(f"{length} positions, but the position table has {positions}: give shorter sequences")
        return x + self.pe[:, :length]
