"""Faults in the decoder-only models."""

from math import sqrt
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from models import BLOCK, LANGUAGE_MODEL

import flax_tf.attention
import flax_tf.block
import flax_tf.kernels.attention
from flax_tf.masks import causal_mask, masked_softmax
from sabotage.fault import INPUTS, Fault, Patch, in_model, with_call

FAULTS: list[Fault] = []

HEAD = "transformer.transformer_layers.0.mha.attention_heads.0"


@in_model(FAULTS, BLOCK, "kqv_projection", "6")
def queries_and_keys_swapped(model: Any, patch: Patch) -> None:
    """Queries and keys swapped in a fused projection."""
    kernel = model.kqv_projection.kernel[...]
    model.kqv_projection.kernel[...] = jnp.concatenate([kernel[:, 15:30], kernel[:, :15], kernel[:, 30:]], axis=1)


@in_model(FAULTS, BLOCK, "kqv_projection", "6")
def interleaved(model: Any, patch: Patch) -> None:
    """Fused projection read head by head instead of keys, queries, values."""
    kernel = model.kqv_projection.kernel[...].reshape(15, 3, 3, 5)
    model.kqv_projection.kernel[...] = jnp.swapaxes(kernel, 1, 2).reshape(15, 45)


@in_model(FAULTS, BLOCK, "output_mixer_projection", "5")
def square_kernel_transposed(model: Any, patch: Patch) -> None:
    """A square kernel transposed."""
    model.output_mixer_projection.kernel[...] = model.output_mixer_projection.kernel[...].T


@in_model(FAULTS, BLOCK, "mlp_layer_norm", "2")
def epsilon(model: Any, patch: Patch) -> None:
    """LayerNorm with epsilon 1e-6, which is Flax's default, for 1e-5."""
    model.mlp_layer_norm.epsilon = 1e-6


@in_model(FAULTS, BLOCK, "attention_layer_norm", "3", inputs=(1e4 + INPUTS[type(BLOCK)][0],))
def one_pass_variance(model: Any, patch: Patch) -> None:
    """Variance in one pass, E[x²] - E[x]², of inputs around 10,000."""
    model.attention_layer_norm.use_fast_variance = True


@in_model(FAULTS, BLOCK, "embedding_mlp.1", "1")
def tanh_gelu(model: Any, patch: Patch) -> None:
    """GELU in its tanh form, which is JAX's default."""
    with_call(model.embedding_mlp.layers[1], lambda self, x: jax.nn.gelu(x))


@in_model(FAULTS, BLOCK, "embedding_mlp.2")
def bias_dropped(model: Any, patch: Patch) -> None:
    """A bias left at zero."""
    model.embedding_mlp.layers[2].bias[...] = jnp.zeros(15)


@in_model(FAULTS, BLOCK, "(model)")
def mask_off_by_one(model: Any, patch: Patch) -> None:
    """A causal mask that lets every position see the next."""
    patch(flax_tf.kernels.attention, "causal_mask", lambda length: jnp.tril(jnp.ones((length, length), bool), 1))


@in_model(FAULTS, BLOCK, "(model)")
def no_self(model: Any, patch: Patch) -> None:
    """A causal mask without the diagonal."""
    patch(
        flax_tf.kernels.attention,
        "causal_mask",
        lambda length: jnp.tril(jnp.ones((length, length), bool), -1).at[0, 0].set(True),
    )


@in_model(FAULTS, BLOCK, "(model)")
def heads_not_swapped_back(model: Any, patch: Patch) -> None:
    """Heads merged without moving their axis back behind the positions."""

    def attention(self, x):
        B, T, D = x.shape
        k, q, v = jnp.moveaxis(self.kqv_projection(x).reshape(B, T, 3, 3, 5), (2, 3), (0, 2))
        scores = masked_softmax(jnp.einsum("bnth,bnsh->bnts", q, k) / sqrt(5), causal_mask(T))
        return self.output_mixer_projection((scores @ v).reshape(B, T, D))

    patch(flax_tf.block.Block, "attention", attention)


@in_model(FAULTS, BLOCK, "(model)")
def residual_dropped(model: Any, patch: Patch) -> None:
    """A residual connection left out."""

    def call(self, x):
        x = self.attention(self.attention_layer_norm(x))
        return x + self.embedding_mlp(self.mlp_layer_norm(x))

    with_call(model, call)


@in_model(FAULTS, BLOCK, "(model)")
def post_norm(model: Any, patch: Patch) -> None:
    """Post-norm where the reference is pre-norm."""

    def call(self, x):
        x = self.attention_layer_norm(x + self.attention(x))
        return self.mlp_layer_norm(x + self.embedding_mlp(x))

    with_call(model, call)


@in_model(FAULTS, BLOCK, "kqv_projection")
def one_weight_moved(model: Any, patch: Patch) -> None:
    """One weight moved by 1e-6."""
    model.kqv_projection.kernel[...] = model.kqv_projection.kernel[...].at[3, 5].add(1e-6)


@in_model(FAULTS, BLOCK, "kqv_projection", "12")
def through_bfloat16(model: Any, patch: Patch) -> None:
    """A weight that passed through bfloat16."""
    kernel = model.kqv_projection.kernel
    kernel[...] = kernel[...].astype(jnp.bfloat16).astype(jnp.float32)


@in_model(FAULTS, BLOCK, "mlp_layer_norm")
def a_nan(model: Any, patch: Patch) -> None:
    """One NaN in a bias."""
    model.mlp_layer_norm.bias[...] = model.mlp_layer_norm.bias[...].at[2].set(jnp.nan)


@in_model(FAULTS, BLOCK, "embedding_mlp.1")
def gradient_stopped(model: Any, patch: Patch) -> None:
    """A right output whose gradient is stopped on its way."""
    with_call(model.embedding_mlp.layers[1], lambda self, x: jax.lax.stop_gradient(jax.nn.gelu(x, approximate=False)))


@in_model(FAULTS, BLOCK, "embedding_mlp.0", "17")
def low_precision_product(model: Any, patch: Patch) -> None:
    """A matrix product in bfloat16 when the rest is in float32, as accelerators do by default."""

    def call(self, x):
        if x.dtype != jnp.float32:
            return nnx.Linear.__call__(self, x)
        product = x.astype(jnp.bfloat16) @ self.kernel[...].astype(jnp.bfloat16)
        return product.astype(jnp.float32) + self.bias[None, None, :]

    with_call(model.embedding_mlp.layers[0], call)


@in_model(FAULTS, LANGUAGE_MODEL, "transformer.embeddings")
def positions_off_by_one(model: Any, patch: Patch) -> None:
    """Positions counted from 1."""
    embeddings = model.transformer.embeddings

    def call(self, x, *, rngs=None):
        x = self.token_embd(x) + self.pos_embd(jnp.arange(1, x.shape[-1] + 1))[None]
        return self.dropout(self.layer_norm(x), rngs=rngs)

    with_call(embeddings, call)


@in_model(FAULTS, LANGUAGE_MODEL, HEAD)
def scale_of_the_width(model: Any, patch: Patch) -> None:
    """Scores divided by √D instead of √H."""
    patch(flax_tf.attention, "sqrt", lambda width: sqrt(3 * width))


@in_model(FAULTS, LANGUAGE_MODEL, "transformer.transformer_layers.1.mha.attention_heads.2")
def stale_buffer(model: Any, patch: Patch) -> None:
    """A mask in a buffer that was not loaded."""
    tril = model.transformer.transformer_layers[1].mha.attention_heads[2].tril
    tril[...] = jnp.ones_like(tril[...])


@in_model(FAULTS, LANGUAGE_MODEL, "transformer.transformer_layers.1.mha.attention_heads.0.query")
def heads_swapped(model: Any, patch: Patch) -> None:
    """Two heads swapped."""
    heads = model.transformer.transformer_layers[1].mha.attention_heads
    heads[0], heads[1] = heads[1], heads[0]


@in_model(FAULTS, LANGUAGE_MODEL, "transformer.transformer_layers.0.mha")
def heads_in_reverse(model: Any, patch: Patch) -> None:
    """Heads joined in the reverse order."""

    def call(self, x, *, rngs=None):
        heads = [head(x, rngs=rngs) for head in self.attention_heads]
        return self.linear_proj(jnp.concatenate(heads[::-1], axis=-1))

    with_call(model.transformer.transformer_layers[0].mha, call)


@in_model(FAULTS, LANGUAGE_MODEL, "transformer")
def layer_missing(model: Any, patch: Patch) -> None:
    """The last layer is never called."""

    def call(self, x, *, rngs=None):
        x = self.embeddings(x, rngs=rngs)
        for layer in list(self.transformer_layers)[:-1]:
            x = layer(x, rngs=rngs)
        return x

    with_call(model.transformer, call)


@in_model(FAULTS, LANGUAGE_MODEL, "transformer.transformer_layers.0.layer_norm_1")
def layers_swapped(model: Any, patch: Patch) -> None:
    """Two layers swapped."""
    layers = model.transformer.transformer_layers
    layers[0], layers[1] = layers[1], layers[0]


@in_model(FAULTS, LANGUAGE_MODEL, HEAD)
def softmax_over_queries(model: Any, patch: Patch) -> None:
    """Softmax over the queries instead of the keys."""
    patch(
        flax_tf.attention,
        "masked_softmax",
        lambda scores, mask: jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-2),
    )


@in_model(FAULTS, LANGUAGE_MODEL, HEAD, "20")
def weak_fill(model: Any, patch: Patch) -> None:
    """Masked scores filled with -10, which lets some attention through."""
    patch(
        flax_tf.attention,
        "masked_softmax",
        lambda scores, mask: jax.nn.softmax(jnp.where(mask, scores, -10.0), axis=-1),
    )


@in_model(FAULTS, LANGUAGE_MODEL, "transformer.embeddings.dropout", "27", train=True)
def dropout_rate(model: Any, patch: Patch) -> None:
    """Dropout at another rate, in training mode."""
    model.transformer.embeddings.dropout.rate = 0.2
