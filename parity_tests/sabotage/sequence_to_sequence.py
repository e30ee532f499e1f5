"""Faults in the encoder-decoder models."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from models import ATTN_RNN, RNN, TRANSFORMER, reference, state_arrays

import flax_tf.attention
import flax_tf.kernels.attention
import flax_tf.recurrent
import flax_tf.transformer
from flax_tf.layers import GRU
from flax_tf.masks import padding_mask
from flax_tf.parity import compare
from flax_tf.porting import torch_to_flax
from flax_tf.saving import abstract
from sabotage.fault import INPUTS, Fault, Patch, found_by, in_model, with_call

FAULTS: list[Fault] = []

MASKED = dataclasses.replace(ATTN_RNN, mask_source=True)
NO_SOURCE = (np.where(np.arange(3)[:, None] == 1, 0, INPUTS[type(TRANSFORMER)][0]), INPUTS[type(TRANSFORMER)][1])


@in_model(FAULTS, TRANSFORMER, "(model)", "21")
def polarity(model: Any, patch: Patch) -> None:
    """A padding mask with True for "hide"."""
    patch(flax_tf.transformer, "padding_mask", lambda ids, pad_id: ~padding_mask(ids, pad_id))


@in_model(FAULTS, TRANSFORMER, "(model)")
def no_padding_mask(model: Any, patch: Patch) -> None:
    """No mask over the source's padding."""
    patch(flax_tf.transformer, "padding_mask", lambda ids, pad_id: padding_mask(ids, -1))


@in_model(FAULTS, TRANSFORMER, "(model)")
def peeking(model: Any, patch: Patch) -> None:
    """A target mask without the causal part."""
    patch(
        flax_tf.transformer,
        "target_mask",
        lambda ids, pad_id: jnp.broadcast_to(
            (ids != pad_id)[:, None, :, None], (*ids.shape[:1], 1, ids.shape[1], ids.shape[1])
        ),
    )


@in_model(FAULTS, TRANSFORMER, "encoder_layers.0.self_attn", "19", inputs=NO_SOURCE)
def masked_rows(model: Any, patch: Patch) -> None:
    """Zeros for a row of attention that is masked as a whole, where the reference has the mean."""

    def masked_softmax(scores, mask):
        weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min), axis=-1)
        return jnp.where(mask.any(axis=-1, keepdims=True), weights, 0)

    patch(flax_tf.kernels.attention, "masked_softmax", masked_softmax)


@in_model(FAULTS, TRANSFORMER, "(model)")
def embeddings_scaled(model: Any, patch: Patch) -> None:
    """Embeddings scaled by √D, as in the paper and not in the reference."""
    patch(type(model), "_scaled", lambda self, x: x * 15**0.5)


@in_model(FAULTS, TRANSFORMER, "positional_encoding")
def sines_then_cosines(model: Any, patch: Patch) -> None:
    """A table of positions with all sines before all cosines."""
    pe = model.positional_encoding.pe
    pe[...] = jnp.concatenate([pe[..., 0::2], pe[..., 1::2]], axis=-1)


@in_model(FAULTS, TRANSFORMER, "encoder_layers.0")
def pre_norm(model: Any, patch: Patch) -> None:
    """Pre-norm where the reference is post-norm."""

    def call(self, x, mask, *, rngs=None):
        normed = self.norm1(x)
        x = x + self.self_attn(normed, normed, normed, mask)
        return x + self.feed_forward(self.norm2(x))

    with_call(model.encoder_layers[0], call)


@in_model(FAULTS, TRANSFORMER, "decoder_layers.0.norm2")
def norms_swapped(model: Any, patch: Patch) -> None:
    """Two norms swapped."""
    layer = model.decoder_layers[0]
    layer.norm2, layer.norm3 = layer.norm3, layer.norm2


@in_model(FAULTS, TRANSFORMER, "decoder_layers.0")
def values_of_the_target(model: Any, patch: Patch) -> None:
    """Cross-attention that takes its keys from the target."""
    layer = model.decoder_layers[0]

    def call(self, x, enc_output, src_mask, tgt_mask, *, rngs=None):
        x = self.norm1(x + self.self_attn(x, x, x, tgt_mask))
        x = self.norm2(x + self.cross_attn(x, x, x, tgt_mask))
        return self.norm3(x + self.feed_forward(x))

    with_call(layer, call)


@in_model(FAULTS, TRANSFORMER, "encoder_layers.0.feed_forward.relu")
def other_activation(model: Any, patch: Patch) -> None:
    """GELU for ReLU."""
    with_call(model.encoder_layers[0].feed_forward.relu, lambda self, x: jax.nn.gelu(x, approximate=False))


@in_model(FAULTS, TRANSFORMER, "encoder_layers.0.self_attn")
def heads_of_the_other_axis(model: Any, patch: Patch) -> None:
    """Heads split as [H, N] instead of [N, H]."""

    def split_heads(self, x):
        B, T, D = x.shape
        return jnp.moveaxis(x.reshape(B, T, D // self.num_heads, self.num_heads), 3, 1)

    patch(flax_tf.attention.MultiHeadAttention, "split_heads", split_heads)


@found_by(FAULTS, "fc", "10")
def untied() -> str | None:
    """Three tables that PyTorch ties are three parameters in Flax."""
    tied = dataclasses.replace(TRANSFORMER, tgt_vocab_size=37, shared_embeddings=True)
    module = reference(tied)
    model = torch_to_flax(state_arrays(module), abstract(dataclasses.replace(tied, shared_embeddings=False)))
    report = compare(module, model, *INPUTS[type(TRANSFORMER)])
    return None if report.ok else report.culprit


@in_model(FAULTS, RNN, "encoder.gru", "4")
def gates_in_another_order(model: Any, patch: Patch) -> None:
    """A GRU's gates in the order z, r, n."""
    weight = model.encoder.gru.weight_ih_l0
    r, z, n = jnp.split(weight[...], 3)
    weight[...] = jnp.concatenate([z, r, n])


@in_model(FAULTS, RNN, "encoder.gru", "4")
def hidden_bias_outside(model: Any, patch: Patch) -> None:
    """A GRU's reset gate applied before the hidden projection, as in the first paper."""

    def cell(self, state, from_input, from_hidden):
        (hidden,) = state
        (ir, iz, i_n), (hr, hz, _) = (jnp.split(projected, 3, axis=-1) for projected in (from_input, from_hidden))
        r, z = jax.nn.sigmoid(ir + hr), jax.nn.sigmoid(iz + hz)
        weight, bias = (getattr(self, name)[...] for name in ("weight_hh_l0", "bias_hh_l0"))
        n = jnp.tanh(i_n + (r * hidden) @ weight[22:].T + bias[None, 22:])
        return ((1 - z) * n + z * hidden,)

    patch(GRU, "_cell", cell)


@in_model(FAULTS, RNN, "encoder.gru", "4")
def update_gate_reversed(model: Any, patch: Patch) -> None:
    """A GRU's update gate with its sense reversed."""
    cell = GRU._cell

    def reversed_cell(self, state, from_input, from_hidden):
        flipped = []
        for projected in (from_input, from_hidden):
            r, z, n = jnp.split(projected, 3, axis=-1)
            flipped.append(jnp.concatenate([r, -z, n], axis=-1))
        return cell(self, state, *flipped)

    patch(GRU, "_cell", reversed_cell)


@in_model(FAULTS, RNN, "decoder")
def start_token(model: Any, patch: Patch) -> None:
    """Another token to start from."""
    shift_right = flax_tf.recurrent.shift_right
    patch(flax_tf.recurrent, "shift_right", lambda target, start_id: shift_right(target, start_id + 1))


@in_model(FAULTS, RNN, "decoder")
def logits_for_log_probabilities(model: Any, patch: Patch) -> None:
    """Logits where the reference returns log probabilities."""
    patch(flax_tf.recurrent.jax.nn, "log_softmax", lambda logits, axis: logits)


@in_model(FAULTS, ATTN_RNN, "decoder.attention")
def no_tanh(model: Any, patch: Patch) -> None:
    """Additive attention without its tanh."""

    def call(self, query, keys, projected_keys=None, mask=None):
        scores = jnp.swapaxes(self.Va(self.Wa(query) + projected_keys), 1, 2)
        weights = jax.nn.softmax(scores, axis=-1)
        return weights @ keys, weights

    with_call(model.decoder.attention, call)


@in_model(FAULTS, ATTN_RNN, "decoder.attention.Ua")
def query_and_key_swapped(model: Any, patch: Patch) -> None:
    """Additive attention's projections of query and keys swapped."""
    attention = model.decoder.attention
    attention.Wa, attention.Ua = attention.Ua, attention.Wa


@in_model(FAULTS, MASKED, "(model)")
def source_mask_ignored(model: Any, patch: Patch) -> None:
    """Attention over the source's padding, against its config."""
    patch(type(model), "source_mask", lambda self, src: None)


@in_model(FAULTS, ATTN_RNN, "decoder")
def context_last(model: Any, patch: Patch) -> None:
    """Input and context joined in the wrong order."""

    def forward_step(self, embedded, hidden, encoder_outputs, projected, mask):
        query = jnp.swapaxes(hidden, 0, 1)
        context, weights = self.attention(query, encoder_outputs, projected, mask)
        output, hidden = self.gru(jnp.concatenate([context, embedded], axis=-1), hidden)
        return output, hidden, weights

    patch(type(model.decoder), "forward_step", forward_step)


@in_model(FAULTS, ATTN_RNN, "decoder")
def teacher_not_shifted(model: Any, patch: Patch) -> None:
    """A decoder that reads the very token it must tell."""
    patch(flax_tf.recurrent, "shift_right", lambda target, start_id: target)
