"""Token and position embeddings. Twin: `flax_tf/embedding.py`."""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from torch_ref.config import BackboneConfig


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
