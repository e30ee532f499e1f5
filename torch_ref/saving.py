"""Models in directories, as `flax_tf` writes them. Twin: `flax_tf/saving.py`."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor, nn

from flax_tf.config import Config, config_from_dict
from torch_ref.block import Block
from torch_ref.config import (
    AttnRNNConfig,
    BackboneConfig,
    BlockConfig,
    LanguageModelConfig,
    RNNConfig,
    TransformerConfig,
)
from torch_ref.language_model import Backbone, LanguageModel
from torch_ref.recurrent import AttnSeq2Seq, Seq2Seq
from torch_ref.transformer import Transformer

MODELS: dict[type, type[nn.Module]] = {
    BlockConfig: Block,
    BackboneConfig: Backbone,
    LanguageModelConfig: LanguageModel,
    TransformerConfig: Transformer,
    RNNConfig: Seq2Seq,
    AttnRNNConfig: AttnSeq2Seq,
}


def build(config: Config) -> nn.Module:
    """A model with fresh parameters, in training mode (call `.eval()` to leave it)."""
    return MODELS[type(config)](config)


def from_pretrained(path: str | os.PathLike) -> nn.Module:
    """The PyTorch model in a directory that `flax_tf.save_pretrained` wrote, loaded strictly, dtypes as
    they were saved, in evaluation mode."""
    directory = Path(path)
    config = config_from_dict(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    model = build(config)
    # One file, or the shards of one model.
    tensors = {k: v for file in sorted(directory.glob("model*.safetensors")) for k, v in load_file(file).items()}
    load(model, tensors)
    return model.eval()


def load(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Assigns a state dict strictly, but for one thing: one name of a tied parameter will do for all."""
    tied: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied.setdefault(parameter, []).append(name)
    told = {name: tensors[own] for names in tied.values() for name in names for own in names if own in tensors}
    model.load_state_dict({**told, **tensors}, assign=True)
    if isinstance(model, Transformer) and model.config.shared_embeddings:
        model.tie_weights()  # assigning undoes it
