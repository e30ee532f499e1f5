"""The language model, and its backbone alone. Twin: `torch_ref/language_model.py`."""

from flax import nnx
from jaxtyping import Array, Float, Int

from flax_tf.attention import PerHeadAttention
from flax_tf.config import BackboneConfig, LanguageModelConfig
from flax_tf.embedding import Embeddings
from flax_tf.feed_forward import FeedForwardNetwork
from flax_tf.layers import LayerNorm, Linear


class TransformerBlock(nnx.Module):
    """x + Attention(LayerNorm(x)), then x + FeedForward(LayerNorm(x)). Seed 001, `TransformerBlock`."""

    def __init__(self, config: BackboneConfig, *, rngs: nnx.Rngs):
        self.mha = PerHeadAttention(config, rngs=rngs)
        self.ffn = FeedForwardNetwork(config, rngs=rngs)
        self.layer_norm_1 = LayerNorm(config.d_model, epsilon=config.layer_norm_eps, rngs=rngs)
        self.layer_norm_2 = LayerNorm(config.d_model, epsilon=config.layer_norm_eps, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], *, rngs: nnx.Rngs | None = None) -> Float[Array, "B T D"]:
        x = x + self.mha(self.layer_norm_1(x), rngs=rngs)  # (B, T, D)
        return x + self.ffn(self.layer_norm_2(x), rngs=rngs)  # (B, T, D)


class Backbone(nnx.Module):
    """Embeddings and transformer layers; causal, or an encoder with `mask=False`. Seed 001, `Transformer`."""

    def __init__(self, config: BackboneConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embeddings = Embeddings(config, rngs=rngs)
        self.transformer_layers = nnx.List([TransformerBlock(config, rngs=rngs) for _ in range(config.num_layers)])

    def __call__(self, x: Int[Array, "B T"], *, rngs: nnx.Rngs | None = None) -> Float[Array, "B T D"]:
        """Token ids to contextual embeddings. There is no final norm. `rngs` feeds dropout, in training mode only."""
        x = self.embeddings(x, rngs=rngs)  # (B, T, D)
        for layer in self.transformer_layers:
            x = layer(x, rngs=rngs)  # (B, T, D)
        return x


class LanguageModel(nnx.Module):
    """The backbone with a linear classifier over the vocabulary. Seed 001, `LanguageModel`."""

    def __init__(self, config: LanguageModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.transformer = Backbone(config, rngs=rngs)
        self.classifier = Linear(config.d_model, config.token_count(), rngs=rngs)

    def __call__(self, x: Int[Array, "B T"], *, rngs: nnx.Rngs | None = None) -> Float[Array, "B T V"]:
        """Token ids to logits of the next token at every position. `rngs` feeds dropout, in training mode only."""
        return self.classifier(self.transformer(x, rngs=rngs))
