"""Small models in both frameworks. Sizes are prime and distinct, so that a swapped axis cannot hide."""

from typing import Any

import numpy as np
import torch

from flax_tf.config import (
    AttnRNNConfig,
    BackboneConfig,
    BlockConfig,
    Config,
    LanguageModelConfig,
    RNNConfig,
    TransformerConfig,
)
from flax_tf.porting import torch_to_flax
from flax_tf.porting.files import torch_to_numpy
from flax_tf.saving import abstract
from torch_ref.saving import build

BLOCK = BlockConfig(d_model=15, num_heads=3)
BACKBONE = BackboneConfig(vocab_size=37, max_seq_length=13, d_model=15, num_heads=3, num_layers=2, mask=False)
LANGUAGE_MODEL = LanguageModelConfig(vocab_size=37, max_seq_length=13, d_model=15, num_heads=3, num_layers=2)
TRANSFORMER = TransformerConfig(
    src_vocab_size=37, tgt_vocab_size=31, d_model=15, num_heads=3, num_layers=1, d_ff=29, max_seq_length=13
)
RNN = RNNConfig(src_vocab_size=37, tgt_vocab_size=31, hidden_size=11, max_length=5)
ATTN_RNN = AttnRNNConfig(src_vocab_size=37, tgt_vocab_size=31, hidden_size=11, max_length=5)


def reference(config: Config, seed: int = 0) -> Any:
    """A PyTorch reference in evaluation mode, with parameters from its own distributions."""
    torch.manual_seed(seed)
    return build(config).eval()


def state_arrays(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: torch_to_numpy(tensor) for name, tensor in module.state_dict().items()}


def twin(module: Any) -> Any:
    """The Flax model with the weights of a PyTorch reference, in evaluation mode."""
    model = torch_to_flax(state_arrays(module), abstract(module.config))
    model.eval()
    return model


def ids(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(LANGUAGE_MODEL.vocab_size, size=shape)
