"""The configs are shared: one definition, so that no field can differ between the frameworks."""

from flax_tf.config import (
    AttnRNNConfig,
    BackboneConfig,
    BlockConfig,
    LanguageModelConfig,
    RNNConfig,
    TransformerConfig,
)

__all__ = [
    "AttnRNNConfig",
    "BackboneConfig",
    "BlockConfig",
    "LanguageModelConfig",
    "RNNConfig",
    "TransformerConfig",
]
