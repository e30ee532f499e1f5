"""Attention: a module per head, all heads in one, and additive. Twin: `flax_tf/attention.py`."""

from math import sqrt

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from torch_ref.config import BackboneConfig, RNNConfig, TransformerConfig
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


class MultiHeadAttention(nn.Module):
    """Concat of softmax(QKᵀ/√H)V over the heads, then W_o (Vaswani et al. 2017). Seed 002, `MultiHeadAttention`."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.num_heads = config.num_heads
        self.W_q = nn.Linear(config.d_model, config.d_model)
        self.W_k = nn.Linear(config.d_model, config.d_model)
        self.W_v = nn.Linear(config.d_model, config.d_model)
        self.W_o = nn.Linear(config.d_model, config.d_model)

    def split_heads(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B N T H"]:
        B, T, D = x.shape
        return x.reshape(B, T, self.num_heads, D // self.num_heads).transpose(1, 2)

    def weights(
        self,
        query: Float[Tensor, "B T D"],
        key: Float[Tensor, "B S D"],
        mask: Bool[Tensor, "#B 1 #T S"] | None,
    ) -> Float[Tensor, "B N T S"]:
        """How much every query attends to every key; a row sums to 1."""
        q, k = self.split_heads(self.W_q(query)), self.split_heads(self.W_k(key))  # (B, N, T, H), (B, N, S, H)
        scores = q @ k.transpose(-2, -1) / sqrt(q.size(-1))  # (B, N, T, S)
        return torch.softmax(scores, dim=-1) if mask is None else masked_softmax(scores, mask)

    def forward(
        self,
        query: Float[Tensor, "B T D"],
        key: Float[Tensor, "B S D"],
        value: Float[Tensor, "B S D"],
        mask: Bool[Tensor, "#B 1 #T S"] | None = None,
    ) -> Float[Tensor, "B T D"]:
        mixed = self.weights(query, key, mask) @ self.split_heads(self.W_v(value))  # (B, N, T, H)
        return self.W_o(mixed.transpose(1, 2).reshape(query.shape))


class BahdanauAttention(nn.Module):
    """softmax(Va tanh(Wa query + Ua keys)) keys, additive attention (Bahdanau et al. 2015). Seed 002, same name."""

    def __init__(self, config: RNNConfig):
        super().__init__()
        self.Wa = nn.Linear(config.hidden_size, config.hidden_size)
        self.Ua = nn.Linear(config.hidden_size, config.hidden_size)
        self.Va = nn.Linear(config.hidden_size, 1)

    def forward(
        self,
        query: Float[Tensor, "B 1 H"],
        keys: Float[Tensor, "B S H"],
        projected_keys: Float[Tensor, "B S H"] | None = None,
        mask: Bool[Tensor, "B 1 S"] | None = None,
    ) -> tuple[Float[Tensor, "B 1 H"], Float[Tensor, "B 1 S"]]:
        """The context and the weights. `projected_keys` is Ua(keys), which a decoder computes once for all steps."""
        projected_keys = self.Ua(keys) if projected_keys is None else projected_keys
        scores = self.Va(torch.tanh(self.Wa(query) + projected_keys))  # (B, S, 1)
        scores = scores.transpose(1, 2)  # (B, 1, S)
        weights = torch.softmax(scores, dim=-1) if mask is None else masked_softmax(scores, mask)
        return weights @ keys, weights
