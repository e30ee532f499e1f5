"""The configs are shared: one definition, so that no field can differ between the frameworks."""

from flax_tf.config import BackboneConfig, BlockConfig, LanguageModelConfig

__all__ = ["BackboneConfig", "BlockConfig", "LanguageModelConfig"]
