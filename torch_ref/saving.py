"""Models in directories, as `flax_tf` writes them. Twin: `flax_tf/saving.py`."""

import json
import os
from pathlib import Path

from safetensors.torch import load_file
from torch import nn

from flax_tf.config import Config, config_from_dict
from torch_ref.block import Block
from torch_ref.config import BackboneConfig, BlockConfig, LanguageModelConfig
from torch_ref.language_model import Backbone, LanguageModel

MODELS: dict[type, type[nn.Module]] = {
    BlockConfig: Block,
    BackboneConfig: Backbone,
    LanguageModelConfig: LanguageModel,
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
    model.load_state_dict(tensors, assign=True)
    return model.eval()
