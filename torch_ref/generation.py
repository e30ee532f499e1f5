"""Continuing a text with the language model. Twin: `flax_tf/generation.py`."""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torch_ref.language_model import LanguageModel


def filter_logits(
    logits: Float[Tensor, "B V"], temperature: float, top_k: int | None, top_p: float | None
) -> Float[Tensor, "B V"]:
    """The logits to sample from: divided by the temperature, then -inf outside the chosen tokens.

    `top_k` keeps the k largest (and ties with the k-th). `top_p` keeps the smallest set of most probable tokens whose
    probability, after top_k, reaches p (Holtzman et al. 2020, section 3.1); the most probable token always stays.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    if top_k is not None:
        kth = torch.topk(logits, min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p is not None:
        ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
        probabilities = torch.softmax(ordered, dim=-1)
        before = torch.cumsum(probabilities, dim=-1) - probabilities  # what the more probable tokens add up to
        drop = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, before >= top_p)
        logits = logits.masked_fill(drop, float("-inf"))
    return logits


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt: Int[Tensor, "B P"],
    max_tokens: int,
    *,
    greedy: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Int[Tensor, "B L"]:
    """The prompts, each followed by `max_tokens` generated ids (L = P + max_tokens). The model is in evaluation mode.

    Seed 001's loop, re-running the text for every token, with the text cut to its last `max_seq_length` tokens.
    """
    tokens = prompt
    for _ in range(max_tokens):
        logits = model(tokens[:, -model.config.max_seq_length :])[:, -1]  # (B, V)
        if greedy:
            token = logits.argmax(dim=-1, keepdim=True)
        else:
            probabilities = torch.softmax(filter_logits(logits, temperature, top_k, top_p), dim=-1)
            token = torch.multinomial(probabilities, num_samples=1)
        tokens = torch.cat([tokens, token], dim=1)
    return tokens
