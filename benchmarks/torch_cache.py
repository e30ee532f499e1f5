"""Generation with a cache of keys and values, as one writes it by hand for PyTorch's model."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from torch_ref.attention import PerHeadAttention
from torch_ref.language_model import LanguageModel


def pack(attention: PerHeadAttention) -> Float[Tensor, "3D D"]:
    """The queries', keys' and values' weights of all heads in one matrix: twelve small products become one."""
    heads: Any = attention.attention_heads
    return torch.cat([getattr(head, name).weight for name in ("query", "key", "value") for head in heads])


def attend(
    attention: PerHeadAttention,
    projection: Float[Tensor, "3D D"],
    x: Float[Tensor, "B T D"],
    cache: Float[Tensor, "2 B N L H"],
    start: int,
) -> Float[Tensor, "B T D"]:
    """Attention of the positions from `start` on; their keys and values are put into the cache."""
    B, T, _ = x.shape
    _, _, N, _, H = cache.shape
    queries, keys, values = F.linear(x, projection).view(B, T, 3, N, H).permute(2, 0, 3, 1, 4)  # each (B, N, T, H)
    cache[0, :, :, start : start + T] = keys
    cache[1, :, :, start : start + T] = values
    keys, values = cache[:, :, :, : start + T]
    # Only the prompt is more than one position, and nothing is before it.
    mixed = F.scaled_dot_product_attention(queries, keys, values, is_causal=T > 1)  # (B, N, T, H)
    return attention.linear_proj(mixed.transpose(1, 2).flatten(2))


def next_logits(
    model: LanguageModel,
    projections: list[Float[Tensor, "3D D"]],
    tokens: Int[Tensor, "B T"],
    caches: list[Float[Tensor, "2 B N L H"]],
    start: int,
) -> Float[Tensor, "B V"]:
    """The logits after the last of the tokens, which stand at `start` and further; the classifier sees no other."""
    embeddings = model.transformer.embeddings
    positions = torch.arange(start, start + tokens.size(1))
    x = embeddings.layer_norm(embeddings.token_embd(tokens) + embeddings.pos_embd(positions))  # (B, T, D)
    layers: Any = model.transformer.transformer_layers
    for layer, projection, cache in zip(layers, projections, caches, strict=True):
        x = x + attend(layer.mha, projection, layer.layer_norm_1(x), cache, start)
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
    layers: Any = model.transformer.transformer_layers
    projections = [pack(layer.mha) for layer in layers]
    result = torch.empty(B, P + max_tokens, dtype=prompt.dtype)
    result[:, :P] = prompt
    start = 0
    for end in range(P, P + max_tokens):
        logits = next_logits(model, projections, result[:, start:end], caches, start)  # (B, V)
        if greedy:
            result[:, end] = logits.argmax(dim=-1)
        else:
            result[:, end] = torch.multinomial(torch.softmax(logits, dim=-1), num_samples=1)[:, 0]
        start = end
    return result
