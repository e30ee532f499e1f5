"""Recurrent sequence to sequence, plain and with Bahdanau attention. Twin: `torch_ref/recurrent.py`."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from flax_tf.attention import BahdanauAttention
from flax_tf.config import AttnRNNConfig, RNNConfig
from flax_tf.layers import GRU, Dropout, Embedding, Linear


def shift_right(target: Int[Array, "B T"], start_id: int) -> Int[Array, "B T"]:
    """The decoder's inputs under teacher forcing: at every step the target of the step before."""
    return jnp.concatenate([jnp.full_like(target[:, :1], start_id), target[:, :-1]], axis=1)


class EncoderRNN(nnx.Module):
    """A GRU over embedded source tokens. Seed 002, `EncoderRNN`."""

    def __init__(self, config: RNNConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = Embedding(config.src_token_count(), config.hidden_size, rngs=rngs)
        self.gru = GRU(config.hidden_size, config.hidden_size, rngs=rngs)
        self.dropout = Dropout(config.dropout)

    def __call__(
        self, src: Int[Array, "B S"], *, rngs: nnx.Rngs | None = None
    ) -> tuple[Float[Array, "B S H"], Float[Array, "1 B H"]]:
        """The output at every position and the last hidden state: with `mask_source`, that after the last token."""
        outputs, hidden = self.gru(self.dropout(self.embedding(src), rngs=rngs))
        if self.config.mask_source:
            last = (jnp.arange(src.shape[1])[None] * (src != self.config.pad_id)).max(axis=1)  # (B,)
            hidden = jnp.take_along_axis(outputs, last[:, None, None], axis=1)[None, :, 0]
        return outputs, hidden


class DecoderRNN(nnx.Module):
    """A GRU that starts from the encoder's hidden state and reads its last token. Seed 002, `DecoderRNN`."""

    def __init__(self, config: RNNConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = Embedding(config.tgt_token_count(), config.hidden_size, rngs=rngs)
        self.gru = GRU(config.hidden_size, config.hidden_size, rngs=rngs)
        self.out = Linear(config.hidden_size, config.tgt_token_count(), rngs=rngs)

    def forward_step(
        self, tokens: Int[Array, "B T"], hidden: Float[Array, "1 B H"]
    ) -> tuple[Float[Array, "B T H"], Float[Array, "1 B H"]]:
        """Outputs, before `out`, after each of the tokens, which follow each other; the hidden state after the last."""
        return self.gru(jax.nn.relu(self.embedding(tokens)), hidden)

    def forced(
        self, encoder_hidden: Float[Array, "1 B H"], target: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T H"], Float[Array, "1 B H"]]:
        """The outputs, before `out`, at the target's steps, each of which reads the true token before it."""
        return self.forward_step(shift_right(target, self.config.start_id), encoder_hidden)

    def __call__(
        self,
        encoder_outputs: Float[Array, "B S H"],
        encoder_hidden: Float[Array, "1 B H"],
        target: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T V"], Float[Array, "1 B H"], None]:
        """Log probabilities at every step, the last hidden state, and None where attention would return its weights.

        With a target (which does not begin with the start id) the steps are the target's, and each reads the true
        token before it. Without one there are `max_length`, and each reads the likeliest token of the step before.
        """
        if target is not None:
            outputs, hidden = self.forced(encoder_hidden, target)
            return jax.nn.log_softmax(self.out(outputs), axis=-1), hidden, None

        def step(carry, _):
            token, hidden = carry
            output, hidden = self.forward_step(token, hidden)  # (B, 1, H)
            logits = self.out(output)  # (B, 1, V)
            return (logits.argmax(axis=-1), hidden), logits[:, 0]

        start = jnp.full((encoder_outputs.shape[0], 1), self.config.start_id)
        (_, hidden), logits = jax.lax.scan(step, (start, encoder_hidden), length=self.config.max_length)
        return jax.nn.log_softmax(jnp.swapaxes(logits, 0, 1), axis=-1), hidden, None


class AttnDecoderRNN(nnx.Module):
    """A GRU over the last token joined with the context its hidden state attends to. Seed 002, `AttnDecoderRNN`."""

    def __init__(self, config: AttnRNNConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.embedding = Embedding(config.tgt_token_count(), config.hidden_size, rngs=rngs)
        self.attention = BahdanauAttention(config, rngs=rngs)
        self.gru = GRU(2 * config.hidden_size, config.hidden_size, rngs=rngs)
        self.out = Linear(config.hidden_size, config.tgt_token_count(), rngs=rngs)
        self.dropout = Dropout(config.dropout)

    def forward_step(
        self,
        embedded: Float[Array, "B 1 H"],
        hidden: Float[Array, "1 B H"],
        encoder_outputs: Float[Array, "B S H"],
        projected: Float[Array, "B S H"],
        mask: Bool[Array, "B 1 S"] | None,
    ) -> tuple[Float[Array, "B 1 H"], Float[Array, "1 B H"], Float[Array, "B 1 S"]]:
        """The output, before `out`, after one embedded token; the hidden state; the weights of attention."""
        query = jnp.swapaxes(hidden, 0, 1)  # (B, 1, H)
        context, weights = self.attention(query, encoder_outputs, projected, mask)
        output, hidden = self.gru(jnp.concatenate([embedded, context], axis=-1), hidden)
        return output, hidden, weights

    def forced(
        self,
        encoder_outputs: Float[Array, "B S H"],
        encoder_hidden: Float[Array, "1 B H"],
        target: Int[Array, "B T"],
        src_mask: Bool[Array, "B S"] | None,
        *,
        rngs: nnx.Rngs | None = None,
    ) -> tuple[Float[Array, "B T H"], Float[Array, "1 B H"], Float[Array, "B T S"]]:
        """As of `DecoderRNN`, and third the weights of attention."""
        projected = self.attention.Ua(encoder_outputs)  # (B, S, H)
        mask = None if src_mask is None else src_mask[:, None, :]  # (B, 1, S)
        tokens = shift_right(target, self.config.start_id)
        embedded = self.dropout(self.embedding(tokens), rngs=rngs)  # (B, T, H)

        def step(hidden, embedded):
            output, hidden, weights = self.forward_step(embedded[:, None], hidden, encoder_outputs, projected, mask)
            return hidden, (output[:, 0], weights[:, 0])

        hidden, (outputs, weights) = jax.lax.scan(step, encoder_hidden, jnp.swapaxes(embedded, 0, 1))
        return jnp.swapaxes(outputs, 0, 1), hidden, jnp.swapaxes(weights, 0, 1)

    def __call__(
        self,
        encoder_outputs: Float[Array, "B S H"],
        encoder_hidden: Float[Array, "1 B H"],
        target: Int[Array, "B T"] | None = None,
        src_mask: Bool[Array, "B S"] | None = None,
        *,
        rngs: nnx.Rngs | None = None,
    ) -> tuple[Float[Array, "B T V"], Float[Array, "1 B H"], Float[Array, "B T S"]]:
        """As of `DecoderRNN`, and third the weights of attention. `src_mask` is False where attention may not look."""
        if target is not None:
            outputs, hidden, weights = self.forced(encoder_outputs, encoder_hidden, target, src_mask, rngs=rngs)
            return jax.nn.log_softmax(self.out(outputs), axis=-1), hidden, weights
        projected = self.attention.Ua(encoder_outputs)  # (B, S, H)
        mask = None if src_mask is None else src_mask[:, None, :]  # (B, 1, S)

        def free(carry, key):
            token, hidden = carry
            embedded = self.dropout(self.embedding(token), rngs=key)  # (B, 1, H)
            output, hidden, weights = self.forward_step(embedded, hidden, encoder_outputs, projected, mask)
            logits = self.out(output)  # (B, 1, V)
            return (logits.argmax(axis=-1), hidden), (logits[:, 0], weights[:, 0])

        start = jnp.full((encoder_outputs.shape[0], 1), self.config.start_id)
        length = self.config.max_length
        # A stream of random numbers cannot be drawn from within the scan.
        keys = None if rngs is None else jax.random.split(rngs.dropout(), length)
        (_, hidden), (logits, weights) = jax.lax.scan(free, (start, encoder_hidden), keys, length=length)
        return jax.nn.log_softmax(jnp.swapaxes(logits, 0, 1), axis=-1), hidden, jnp.swapaxes(weights, 0, 1)


class Seq2Seq(nnx.Module):
    """`EncoderRNN` and `DecoderRNN`."""

    def __init__(self, config: RNNConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.encoder = EncoderRNN(config, rngs=rngs)
        self.decoder = DecoderRNN(config, rngs=rngs)

    def __call__(
        self, src: Int[Array, "B S"], target: Int[Array, "B T"] | None = None, *, rngs: nnx.Rngs | None = None
    ) -> tuple[Float[Array, "B T V"], Float[Array, "1 B H"], None]:
        """What the decoder returns. `rngs` feeds dropout, in training mode only."""
        encoder_outputs, encoder_hidden = self.encoder(src, rngs=rngs)
        return self.decoder(encoder_outputs, encoder_hidden, target)

    def hidden_states(
        self, src: Int[Array, "B S"], target: Int[Array, "B T"], *, rngs: nnx.Rngs | None = None
    ) -> Float[Array, "B T H"]:
        """What `decoder.out` makes the logits at the target's steps of. `rngs` as above."""
        _, encoder_hidden = self.encoder(src, rngs=rngs)
        return self.decoder.forced(encoder_hidden, target)[0]

    def begin(self, src: Int[Array, "B S"], length: int) -> tuple[tuple[()], Float[Array, "B H"]]:
        """What decoding keeps: nothing for good, and the hidden state."""
        del length
        return (), self.encoder(src)[1][0]

    def next_log_probs(
        self, memory: tuple[()], hidden: Float[Array, "B H"], token: Int[Array, "B"], position: Int[Array, ""]
    ) -> tuple[Float[Array, "B V"], Float[Array, "B H"]]:
        """The log probability of every next token after `token`, and the hidden state with it."""
        del memory, position
        output, hidden = self.decoder.forward_step(token[:, None], hidden[None])
        return jax.nn.log_softmax(self.decoder.out(output)[:, 0], axis=-1), hidden[0]


AttnMemory = tuple[Float[Array, "B S H"], Float[Array, "B S H"], Bool[Array, "B S"] | None]


class AttnSeq2Seq(nnx.Module):
    """`EncoderRNN` and `AttnDecoderRNN`."""

    def __init__(self, config: AttnRNNConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.encoder = EncoderRNN(config, rngs=rngs)
        self.decoder = AttnDecoderRNN(config, rngs=rngs)

    def source_mask(self, src: Int[Array, "B S"]) -> Bool[Array, "B S"] | None:
        """Where attention may look; None for everywhere."""
        return src != self.config.pad_id if self.config.mask_source else None

    def __call__(
        self, src: Int[Array, "B S"], target: Int[Array, "B T"] | None = None, *, rngs: nnx.Rngs | None = None
    ) -> tuple[Float[Array, "B T V"], Float[Array, "1 B H"], Float[Array, "B T S"]]:
        """What the decoder returns. `rngs` feeds dropout, in training mode only."""
        encoder_outputs, encoder_hidden = self.encoder(src, rngs=rngs)
        return self.decoder(encoder_outputs, encoder_hidden, target, self.source_mask(src), rngs=rngs)

    def hidden_states(
        self, src: Int[Array, "B S"], target: Int[Array, "B T"], *, rngs: nnx.Rngs | None = None
    ) -> Float[Array, "B T H"]:
        """What `decoder.out` makes the logits at the target's steps of. `rngs` as above."""
        encoder_outputs, encoder_hidden = self.encoder(src, rngs=rngs)
        return self.decoder.forced(encoder_outputs, encoder_hidden, target, self.source_mask(src), rngs=rngs)[0]

    def begin(self, src: Int[Array, "B S"], length: int) -> tuple[AttnMemory, Float[Array, "B H"]]:
        """What decoding keeps: the encoder's outputs, their projection and the mask for good; the hidden state."""
        del length
        encoder_outputs, hidden = self.encoder(src)
        return (encoder_outputs, self.decoder.attention.Ua(encoder_outputs), self.source_mask(src)), hidden[0]

    def next_log_probs(
        self, memory: AttnMemory, hidden: Float[Array, "B H"], token: Int[Array, "B"], position: Int[Array, ""]
    ) -> tuple[Float[Array, "B V"], Float[Array, "B H"]]:
        """The log probability of every next token after `token`, and the hidden state with it."""
        del position
        encoder_outputs, projected, mask = memory
        mask = None if mask is None else mask[:, None, :]
        embedded = self.decoder.embedding(token[:, None])
        output, hidden, _ = self.decoder.forward_step(embedded, hidden[None], encoder_outputs, projected, mask)
        return jax.nn.log_softmax(self.decoder.out(output)[:, 0], axis=-1), hidden[0]
