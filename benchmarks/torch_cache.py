"""Generation with a cache of keys and values, as one writes it by hand for PyTorch's model."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from torch_ref.attention import PerHeadAttention
from torch_ref.language_model import LanguageModel


def attend(
    attention: PerHeadAttention, x: Float[Tensor, "B T D"], cache: Float[Tensor, "2 B N L H"], start: int
) -> Float[Tensor, "B T D"]:
    """Attention of the positions from `start` on; their keys and values are put into the cache."""
    end = start + x.size(1)
    heads: Any = attention.attention_heads
    cache[0, :, :, start:end] = torch.stack([head.key(x) for head in heads], dim=1)
    cache[1, :, :, start:end] = torch.stack([head.value(x) for head in heads], dim=1)
    queries = torch.stack([head.query(x) for head in heads], dim=1)  # (B, N, T, H)
    keys, values = cache[:, :, :, :end]
    # Only the prompt is more than one position, and nothing is before it.
    mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=x.size(1) > 1)  # (B, N, T, H)
    return attention.linear_proj(mixed.transpose(1, 2).flatten(2))


def next_logits(
    model: LanguageModel, tokens: Int[Tensor, "B T"], caches: list[Float[Tensor, "2 B N L H"]], start: int
) -> Float[Tensor, "B V"]:
    """The logits after the last of the tokens, which stand at `start` and further; the classifier sees no other."""
    embeddings = model.transformer.embeddings
    positions = torch.arange(start, start + tokens.size(1))
    x = embeddings.layer_norm(embeddings.token_embd(tokens) + embeddings.pos_embd(positions))  # (B, T, D)
    layers: Any = model.transformer.transformer_layers
    for layer, cache in zip(layers, caches, strict=True):
        x = x + attend(layer.mha, layer.layer_norm_1(x), cache, start)
        x = x + layer.ffn(layer.layer_norm_2(x))
    return model.classifier(x[:, -1])


@torch.inference_mode()
def generate(
    model: LanguageModel,
    prompt: Int[Tensor, "B P"],
    max_tokens: int,
    greedy: bool = False,
    next_logits: Callable[..., Float[Tensor, "B V"]] = next_logits,
) -> Int[Tensor, "B L"]:
    """The prompts, each followed by `max_tokens` ids, all within the model's `max_seq_length`."""
    config, weight = model.config, model.classifier.weight
    B, P = prompt.shape
    shape = (2, B, config.num_heads, P + max_tokens, config.head_dim)
    caches = [torch.empty(shape, dtype=weight.dtype) for _ in range(config.num_layers)]
    result = torch.empty(B, P + max_tokens, dtype=prompt.dtype)
    result[:, :P] = prompt
    start = 0
    for end in range(P, P + max_tokens):
        logits = next_logits(model, result[:, start:end], caches, start)  # (B, V)
        if greedy:
            result[:, end] = logits.argmax(dim=-1)
        else:
            result[:, end] = torch.multinomial(torch.softmax(logits, dim=-1), num_samples=1)[:, 0]
        start = end
    return result
