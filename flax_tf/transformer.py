"""The encoder-decoder Transformer. Twin: `torch_ref/transformer.py`."""

from math import sqrt

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from flax_tf.config import TransformerConfig
from flax_tf.decoder import Cache, DecoderLayer, KeysValues
from flax_tf.embedding import PositionalEncoding
from flax_tf.encoder import EncoderLayer
from flax_tf.layers import Dropout, Embedding, Linear, TiedLinear
from flax_tf.masks import padding_mask, target_mask

Memory = tuple[Bool[Array, "B 1 1 S"], list[KeysValues]]


class Transformer(nnx.Module):
    """Post-norm encoder and decoder with sinusoidal positions (Vaswani et al. 2017). Seed 002, `Transformer`."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.encoder_embedding = Embedding(config.src_token_count(), config.d_model, rngs=rngs)
        self.decoder_embedding = Embedding(config.tgt_token_count(), config.d_model, rngs=rngs)
        self.positional_encoding = PositionalEncoding(config)
        self.encoder_layers = nnx.List([EncoderLayer(config, rngs=rngs) for _ in range(config.num_layers)])
        self.decoder_layers = nnx.List([DecoderLayer(config, rngs=rngs) for _ in range(config.num_layers)])
        if config.shared_embeddings:
            shared = self.encoder_embedding.embedding
            shared.set_value(shared[...] / sqrt(config.d_model))  # N(0, 1/D), so that the logits start at scale 1
            self.decoder_embedding.embedding = shared
            self.fc = TiedLinear(self.decoder_embedding, rngs=rngs)
        else:
            self.fc = Linear(config.d_model, config.tgt_token_count(), rngs=rngs)
        self.dropout = Dropout(config.dropout)

    def generate_mask(
        self, src: Int[Array, "B S"], tgt: Int[Array, "B T"]
    ) -> tuple[Bool[Array, "B 1 1 S"], Bool[Array, "B 1 T T"]]:
        """What every source and every target position may attend to."""
        return padding_mask(src, self.config.pad_id), target_mask(tgt, self.config.pad_id)

    def encode(
        self, src: Int[Array, "B S"], src_mask: Bool[Array, "B 1 1 S"], *, rngs: nnx.Rngs | None = None
    ) -> Float[Array, "B S D"]:
        """Source ids to the encoder's output."""
        x = self.positional_encoding(self._scaled(self.encoder_embedding(src)))  # (B, S, D)
        x = self.dropout(x, rngs=rngs)
        for layer in self.encoder_layers:
            x = layer(x, src_mask, rngs=rngs)  # (B, S, D)
        return x

    def hidden_states(
        self, src: Int[Array, "B S"], tgt: Int[Array, "B T"], *, rngs: nnx.Rngs | None = None
    ) -> Float[Array, "B T D"]:
        """Source and target ids to the decoder's output, which `fc` makes logits of. `rngs` and errors as below."""
        src_mask, tgt_mask = self.generate_mask(src, tgt)
        enc_output = self.encode(src, src_mask, rngs=rngs)  # (B, S, D)
        x = self.positional_encoding(self._scaled(self.decoder_embedding(tgt)))  # (B, T, D)
        x = self.dropout(x, rngs=rngs)
        for layer in self.decoder_layers:
            x = layer(x, enc_output, src_mask, tgt_mask, rngs=rngs)  # (B, T, D)
        return x

    def __call__(
        self, src: Int[Array, "B S"], tgt: Int[Array, "B T"], *, rngs: nnx.Rngs | None = None
    ) -> Float[Array, "B T V"]:
        """Source and target ids to logits of the next target token at every position.

        `rngs` feeds dropout, in training mode only. Raises TokenIdError for more positions than the table has, or for a
        concrete id outside its vocabulary.
        """
        return self.fc(self.hidden_states(src, tgt, rngs=rngs))

    def _scaled(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return x * sqrt(self.config.d_model) if self.config.scale_embeddings else x

    def begin(self, src: Int[Array, "B S"], length: int) -> tuple[Memory, list[Cache]]:
        """What decoding keeps: of the source, once and for all, and an empty cache for `length` target positions."""
        src_mask = padding_mask(src, self.config.pad_id)
        enc_output = self.encode(src, src_mask)  # (B, S, D)
        memory = [layer.cross_attn.keys_values(enc_output, enc_output) for layer in self.decoder_layers]
        room = jnp.zeros((src.shape[0], self.config.num_heads, length, self.config.head_dim), enc_output.dtype)
        return (src_mask, memory), [(room, room) for _ in self.decoder_layers]

    def next_log_probs(
        self, memory: Memory, cache: list[Cache], token: Int[Array, "B"], position: Int[Array, ""]
    ) -> tuple[Float[Array, "B V"], list[Cache]]:
        """The log probability of every next token after `token` at `position`, and the cache with it.

        That of padding is -inf: within a sequence the masks would not let it be read.
        """
        src_mask, encoded = memory
        embedded = self._scaled(self.decoder_embedding(token[:, None]))
        x = self.positional_encoding(embedded, position)  # (B, 1, D)
        caches = []
        for layer, keys_values, own in zip(self.decoder_layers, encoded, cache, strict=True):
            x, own = layer.step(x, keys_values, src_mask, own, position)
            caches.append(own)
        log_probs = jax.nn.log_softmax(self.fc(x)[:, 0], axis=-1)  # (B, V)
        return log_probs.at[:, self.config.pad_id].set(-jnp.inf), caches
