"""Random honest pairs: every system with random sizes, settings, weights and inputs. None may be called different."""

from typing import Any

import numpy as np
import torch
from flax import nnx
from models import reference, state_arrays, twin
from own_models import RENAME, ImageNet, Rotary, TorchImageNet, TorchRotary

from flax_tf.config import (
    AttnRNNConfig,
    BackboneConfig,
    BlockConfig,
    LanguageModelConfig,
    RNNConfig,
    TransformerConfig,
)
from flax_tf.parity import Report, compare
from flax_tf.porting import torch_to_flax


def honest(seed: int) -> tuple[str, Report]:
    """The pair of this number: what it is, and the report on it. A third of them are in training mode."""
    rng = np.random.default_rng([1, seed])
    torch.manual_seed(seed)
    train = bool(rng.random() < 1 / 3)
    system = ["block", "backbone", "language_model", "transformer", "rnn", "attn_rnn", "images", "rotary"][seed % 8]
    if system in ("images", "rotary"):
        return system, (_images if system == "images" else _rotary)(rng, train, seed)
    config = _config(system, rng)
    module = reference(config, seed)
    with torch.no_grad():  # norms and biases too, and some models far from their initial scale
        scale = float(rng.choice([0.5, 1.0, 2.0]))
        for parameter in module.parameters():
            parameter.mul_(scale).add_(0.1 * torch.randn(parameter.shape))
    report = compare(module, twin(module), *_inputs(config, rng), train=train, seed=seed)
    return f"{config}, scale {scale}, {'training' if train else 'evaluation'}", report


def false_alarm(seed: int) -> str | None:
    """A line on the pair of this number if it is called different."""
    what, report = honest(seed)
    return None if report.ok else f"{seed}: {what}: {report.summary()}"


def _config(system: str, rng: np.random.Generator) -> Any:
    heads, width, layers = int(rng.integers(1, 5)), int(rng.integers(2, 8)), int(rng.integers(1, 4))
    vocab, other, length = (int(n) for n in rng.integers([11, 11, 3], [97, 97, 23]))
    eps, dropout = float(rng.choice([1e-6, 1e-5, 1e-3])), float(rng.choice([0.0, 0.1, 0.5]))
    # Not 2: a norm over two numbers is ±1 whatever they are, and what is left of its float32 gradient is rounding.
    sizes: dict[str, Any] = {"d_model": max(heads * width, 3), "num_heads": heads, "layer_norm_eps": eps}
    match system:
        case "block":
            return BlockConfig(**sizes)
        case "backbone" | "language_model":
            kind = BackboneConfig if system == "backbone" else LanguageModelConfig
            mask = bool(rng.random() < 0.5)
            return kind(vocab_size=vocab, max_seq_length=length, num_layers=layers, mask=mask, dropout=dropout, **sizes)
        case "transformer":
            shared = bool(rng.random() < 0.3)
            return TransformerConfig(
                src_vocab_size=vocab, tgt_vocab_size=vocab if shared else other, shared_embeddings=shared,
                num_layers=layers, d_ff=int(rng.integers(3, 40)), max_seq_length=length, dropout=dropout, **sizes,
            )  # fmt: skip
    kind, fields = (RNNConfig, {}) if system == "rnn" else (AttnRNNConfig, {"mask_source": bool(rng.random() < 0.5)})
    return kind(
        src_vocab_size=vocab, tgt_vocab_size=other, hidden_size=int(rng.integers(2, 24)), max_length=length,
        dropout=dropout, **fields,
    )  # fmt: skip


def _inputs(config: Any, rng: np.random.Generator) -> list[np.ndarray]:
    rows = int(rng.integers(1, 5))
    if isinstance(config, BlockConfig):
        return [rng.standard_normal((rows, int(rng.integers(1, 40)), config.d_model)) * rng.choice([0.1, 1.0, 10.0])]
    if isinstance(config, BackboneConfig):
        return [rng.integers(config.token_count(), size=(rows, int(rng.integers(1, config.max_seq_length + 1))))]
    longest = config.max_seq_length if isinstance(config, TransformerConfig) else config.max_length
    pair = []
    for vocabulary in (config.src_token_count(), config.tgt_token_count()):
        ids = rng.integers(vocabulary, size=(rows, int(rng.integers(1, longest + 1))))
        ids[0, int(rng.integers(1, longest + 1)) :] = config.pad_id
        pair.append(ids)
    return pair


def _images(rng: np.random.Generator, train: bool, seed: int) -> Report:
    module = TorchImageNet()
    module(torch.randn(5, 3, 9, 7))
    model = torch_to_flax(state_arrays(module), ImageNet(nnx.Rngs(0)), RENAME)
    images = rng.standard_normal((int(rng.integers(2, 5)), 3, int(rng.integers(5, 15)), int(rng.integers(5, 15))))
    return compare(module, model, images, rename=RENAME, train=train, seed=seed)


def _rotary(rng: np.random.Generator, train: bool, seed: int) -> Report:
    heads, width = int(rng.integers(1, 5)), 2 * int(rng.integers(1, 6))
    module = TorchRotary(heads * width, heads)
    model = torch_to_flax(state_arrays(module), Rotary(heads * width, heads, rngs=nnx.Rngs(0)))
    x = rng.standard_normal((int(rng.integers(1, 4)), int(rng.integers(1, 60)), heads * width))
    return compare(module, model, x, train=train, seed=seed)
