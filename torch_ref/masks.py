"""Attention masks. One polarity everywhere: True = may attend."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def causal_mask(length: int, device: torch.device | None = None) -> Bool[Tensor, "T T"]:
    """Row t is True at columns 0..t: a position attends to itself and to earlier ones."""
    return torch.tril(torch.ones((length, length), dtype=torch.bool, device=device))


def masked_softmax(scores: Float[Tensor, "*B T S"], mask: Bool[Tensor, "*#B T S"]) -> Float[Tensor, "*B T S"]:
    """Softmax over the last axis with the masked scores at the dtype's lowest finite value.

    After the softmax that is exactly the zero that -inf gives, and a row that is masked as a whole is uniform instead
    of NaN, in values and in gradients.
    """
    return torch.softmax(scores.masked_fill(~mask, torch.finfo(scores.dtype).min), dim=-1)
