"""The language model, and its backbone alone. Twin: `torch_ref/language_model.py`."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from flax_tf.attention import KeysValues, PerHeadAttention
from flax_tf.config import BackboneConfig, LanguageModelConfig
from flax_tf.embedding import Embeddings
from flax_tf.feed_forward import FeedForwardNetwork
from flax_tf.layers import LayerNorm, Linear

# The keys and values of each layer, of texts whose last tokens share a slot (a shorter text begins in a later one);
# the slot of each text's first token; the slot that the next token goes to.
TextCache = tuple[list[KeysValues], Int[Array, "B"], Int[Array, ""]]


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

    def step(
        self,
        x: Float[Array, "B 1 D"],
        projection: Float[Array, "D 3*D"],
        cache: KeysValues,
        slot: Int[Array, ""],
        seen: Bool[Array, "B L"],
    ) -> tuple[Float[Array, "B 1 D"], KeysValues]:
        """One token of every row; the arguments are those of `PerHeadAttention.step`."""
        mixed, cache = self.mha.step(self.layer_norm_1(x), projection, cache, slot, seen)
        x = x + mixed  # (B, 1, D)
        return x + self.ffn(self.layer_norm_2(x)), cache


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

    def begin(self, texts: Int[Array, "B P"], lengths: Int[Array, "B"], slots: int) -> TextCache:
        """A cache with room for `slots` tokens that holds the texts; `step` takes their last tokens first.

        Args:
            texts: from the left; what follows the `lengths` tokens of a row is not read.
            lengths: at least 1.
        """
        x = self.transformer.embeddings(texts)  # (B, P, D)
        longest = lengths.max()
        first = longest - lengths  # (B,)
        source = jnp.arange(slots)[None] - first[:, None]  # (B, S): the position that each slot holds
        source = jnp.clip(source, 0, texts.shape[1] - 1)[:, None, :, None]  # slots out of the text are never seen
        layers: list[KeysValues] = []
        for layer in self.transformer.transformer_layers:
            k, v = layer.mha.keys_values(layer.layer_norm_1(x))  # each (B, N, P, H)
            layers.append((jnp.take_along_axis(k, source, axis=2), jnp.take_along_axis(v, source, axis=2)))
            x = layer(x)  # (B, P, D)
        return layers, first, longest - 1

    def projections(self) -> list[Float[Array, "D 3*D"]]:
        """What `step` needs of every layer's heads, side by side: made once for many steps."""
        return [layer.mha.projection() for layer in self.transformer.transformer_layers]

    def step(
        self, projections: list[Float[Array, "D 3*D"]], cache: TextCache, token: Int[Array, "B"]
    ) -> tuple[Float[Array, "B V"], TextCache]:
        """The logits of what follows `token`, the next of every text, and the cache with it."""
        caches, first, slot = cache
        slots = jnp.arange(caches[0][0].shape[2])[None]
        seen = (slots >= first[:, None]) & (slots <= slot)  # (B, S)
        x = self.transformer.embeddings.step(token, slot - first)  # (B, 1, D)
        layers: list[KeysValues] = []
        for layer, projection, own in zip(self.transformer.transformer_layers, projections, caches, strict=True):
            x, own = layer.step(x, projection, own, slot, seen)
            layers.append(own)
        return self.classifier(x[:, 0]), (layers, first, slot + 1)
