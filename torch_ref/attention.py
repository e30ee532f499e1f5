"""Multi-head self-attention with a separate module per head. Twin: `flax_tf/attention.py`."""

from math import sqrt

import torch
from jaxtyping import Float
from torch import Tensor, nn

from torch_ref.config import BackboneConfig
from torch_ref.masks import masked_softmax


class AttentionHead(nn.Module):
    """softmax(QKᵀ/√H)V of one head, without biases (Vaswani et al. 2017, equation 1). Seed 001, `AttentionHead`."""

    tril: Tensor

    def __init__(self, config: BackboneConfig):
        super().__init__()
        self.mask = config.mask
        self.query = nn.Linear(config.d_model, config.head_dim, bias=False)
        self.key = nn.Linear(config.d_model, config.head_dim, bias=False)
        self.value = nn.Linear(config.d_model, config.head_dim, bias=False)
        self.register_buffer("tril", torch.tril(torch.ones(config.max_seq_length, config.max_seq_length)))
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T H"]:
        length = x.size(-2)
        q, k, v = self.query(x), self.key(x), self.value(x)  # each (B, T, H)
        weights = q @ k.transpose(-2, -1) / sqrt(q.size(-1))  # (B, T, T)
        if self.mask:
            weights = masked_softmax(weights, self.tril[:length, :length] != 0)  # (B, T, T)
        else:
            weights = torch.softmax(weights, dim=-1)  # (B, T, T)
        return self.dropout(weights) @ v  # (B, T, H)


class PerHeadAttention(nn.Module):
    """The heads side by side, then one biased projection. Seed 001, `MultiHeadAttention`."""

    def __init__(self, config: BackboneConfig):
        super().__init__()
        self.attention_heads = nn.ModuleList([AttentionHead(config) for _ in range(config.num_heads)])
        self.linear_proj = nn.Linear(config.d_model, config.d_model)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        heads = [head(x) for head in self.attention_heads]  # N times (B, T, H)
        return self.linear_proj(torch.concat(heads, dim=-1))  # (B, T, D)
