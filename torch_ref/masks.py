"""Attention masks. One polarity everywhere: True = may attend."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def causal_mask(length: int, device: torch.device | None = None) -> Bool[Tensor, "T T"]:
    """Row t is True at columns 0..t: a position attends to itself and to earlier ones."""
    return torch.tril(torch.ones((length, length), dtype=torch.bool, device=device))


def padding_mask(ids: Int[Tensor, "B S"], pad_id: int) -> Bool[Tensor, "B 1 1 S"]:
    """False at the columns of padding, for every head and query."""
    return (ids != pad_id)[:, None, None, :]


def target_mask(ids: Int[Tensor, "B T"], pad_id: int) -> Bool[Tensor, "B 1 T T"]:
    """No peeking, and the rows of padding are False as a whole.

    Padding fills a row up at its end, so no real position sees it, being earlier.
    """
    return (ids != pad_id)[:, None, :, None] & causal_mask(ids.size(1), ids.device)


def masked_softmax(scores: Float[Tensor, "*B T S"], mask: Bool[Tensor, "*#B #T S"]) -> Float[Tensor, "*B T S"]:
    """Softmax over the last axis with the masked scores at the dtype's lowest finite value.

    After the softmax that is exactly the zero that -inf gives, and a row that is masked as a whole is uniform instead
    of NaN, in values and in gradients.
    """
    return torch.softmax(scores.masked_fill(~mask, torch.finfo(scores.dtype).min), dim=-1)
