"""Attention: a module per head, all heads in one, and additive. Twin: `torch_ref/attention.py`."""

from math import sqrt

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from flax_tf.config import BackboneConfig, RNNConfig, TransformerConfig
from flax_tf.kernels.attention import attention, attention_weights, form, plain
from flax_tf.layers import Buffer, Dropout, Linear
from flax_tf.masks import masked_softmax

KeysValues = tuple[Float[Array, "B N S H"], Float[Array, "B N S H"]]


class AttentionHead(nnx.Module):
    """softmax(QKᵀ/√H)V of one head, without biases (Vaswani et al. 2017, equation 1). Seed 001, `AttentionHead`."""

    def __init__(self, config: BackboneConfig, *, rngs: nnx.Rngs):
        self.mask = config.mask
        self.query = Linear(config.d_model, config.head_dim, bias=False, rngs=rngs)
        self.key = Linear(config.d_model, config.head_dim, bias=False, rngs=rngs)
        self.value = Linear(config.d_model, config.head_dim, bias=False, rngs=rngs)
        self.tril = Buffer(jnp.tril(jnp.ones((config.max_seq_length, config.max_seq_length))))
        self.dropout = Dropout(config.dropout)

    def __call__(self, x: Float[Array, "B T D"], *, rngs: nnx.Rngs | None = None) -> Float[Array, "B T H"]:
        length = x.shape[-2]
        q, k, v = self.query(x), self.key(x), self.value(x)  # each (B, T, H)
        weights = jnp.einsum("bth,bsh->bts", q, k) / sqrt(q.shape[-1])  # (B, T, T)
        if self.mask:
            weights = masked_softmax(weights, self.tril[:length, :length] != 0)  # (B, T, T)
        else:
            weights = jax.nn.softmax(weights, axis=-1)  # (B, T, T)
        return self.dropout(weights, rngs=rngs) @ v  # (B, T, H)


class PerHeadAttention(nnx.Module):
    """The heads side by side, then one biased projection. Seed 001, `MultiHeadAttention`."""

    def __init__(self, config: BackboneConfig, *, rngs: nnx.Rngs):
        self.attention_heads = nnx.List([AttentionHead(config, rngs=rngs) for _ in range(config.num_heads)])
        self.linear_proj = Linear(config.d_model, config.d_model, rngs=rngs)

    def __call__(self, x: Float[Array, "B T D"], *, rngs: nnx.Rngs | None = None) -> Float[Array, "B T D"]:
        if self._at_once(x):
            heads = [(head.query(x), head.key(x), head.value(x)) for head in self.attention_heads]
            q, k, v = (jnp.stack(arrays, axis=1) for arrays in zip(*heads, strict=True))  # each (B, N, T, H)
            mixed = attention(q, k, v, causal=self.attention_heads[0].mask)
            return self.linear_proj(jnp.swapaxes(mixed, 1, 2).reshape(x.shape))
        heads = [head(x, rngs=rngs) for head in self.attention_heads]  # N times (B, T, H)
        return self.linear_proj(jnp.concatenate(heads, axis=-1))  # (B, T, D)

    def _at_once(self, x: Float[Array, "B T D"]) -> bool:
        """Whether an accelerator's kernel computes what the heads do: nothing drops out, and no mask but the causal."""
        head = self.attention_heads[0]
        q = jax.ShapeDtypeStruct((x.shape[0], len(self.attention_heads), x.shape[1], head.query.out_features), x.dtype)
        if form(q, q, masked=False) not in ("cudnn", "splash"):
            return False
        if not (head.dropout.deterministic or head.dropout.rate == 0):
            return False
        return not head.mask or all(_is_causal(head.tril[...], x.shape[1]) for head in self.attention_heads)

    def keys_values(self, x: Float[Array, "B T D"]) -> KeysValues:
        """What later tokens attend to."""
        heads = self.attention_heads
        return jnp.stack([head.key(x) for head in heads], 1), jnp.stack([head.value(x) for head in heads], 1)

    def projection(self) -> Float[Array, "D 3*D"]:
        """The kernels of all heads' queries, then keys, then values, side by side: one product for a token."""
        kernels = [getattr(head, name) for name in ("query", "key", "value") for head in self.attention_heads]
        return jnp.concatenate([each.kernel[...] for each in kernels], axis=1)

    def step(
        self,
        x: Float[Array, "B 1 D"],
        projection: Float[Array, "D 3*D"],
        cache: KeysValues,
        slot: Int[Array, ""],
        seen: Bool[Array, "B L"],
    ) -> tuple[Float[Array, "B 1 D"], KeysValues]:
        """The attention of one token of every row, whose key and value go to `slot` of the cache first.

        `seen` is True at the slots of the row's text, this one included.
        """
        B, N = len(x), len(self.attention_heads)
        q, k, v = jnp.moveaxis((x @ projection).reshape(B, 3, N, 1, -1), 1, 0)  # each (B, N, 1, H)
        keys, values = (
            jax.lax.dynamic_update_slice_in_dim(room, array, slot, axis=2)
            for room, array in zip(cache, (k, v), strict=True)
        )  # each (B, N, L, H)
        mixed = plain(q, keys, values, seen[:, None, None])  # (B, N, 1, H)
        return self.linear_proj(mixed.reshape(x.shape)), (keys, values)


def _is_causal(tril: Float[Array, "L L"], length: int) -> bool:
    """Whether the buffer is known, and is the causal mask: a checkpoint may hold another."""
    return not isinstance(tril, Tracer) and np.array_equal(
        np.asarray(tril)[:length, :length] != 0, np.tri(length, dtype=bool)
    )


class MultiHeadAttention(nnx.Module):
    """Concat of softmax(QKᵀ/√H)V over the heads, then W_o (Vaswani et al. 2017). Seed 002, `MultiHeadAttention`."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.num_heads = config.num_heads
        self.W_q = Linear(config.d_model, config.d_model, rngs=rngs)
        self.W_k = Linear(config.d_model, config.d_model, rngs=rngs)
        self.W_v = Linear(config.d_model, config.d_model, rngs=rngs)
        self.W_o = Linear(config.d_model, config.d_model, rngs=rngs)

    def split_heads(self, x: Float[Array, "B T D"]) -> Float[Array, "B N T H"]:
        B, T, D = x.shape
        return jnp.swapaxes(x.reshape(B, T, self.num_heads, D // self.num_heads), 1, 2)

    def keys_values(self, key: Float[Array, "B S D"], value: Float[Array, "B S D"]) -> KeysValues:
        """What later queries attend to: a decoder keeps it from step to step."""
        return self.split_heads(self.W_k(key)), self.split_heads(self.W_v(value))

    def weights(
        self, query: Float[Array, "B T D"], k: Float[Array, "B N S H"], mask: Bool[Array, "#B 1 #T S"] | None
    ) -> Float[Array, "B N T S"]:
        """How much every query attends to every key; a row sums to 1."""
        return attention_weights(self.split_heads(self.W_q(query)), k, mask)

    def attend(
        self,
        query: Float[Array, "B T D"],
        k: Float[Array, "B N S H"],
        v: Float[Array, "B N S H"],
        mask: Bool[Array, "#B 1 #T S"] | None = None,
    ) -> Float[Array, "B T D"]:
        """The attention over keys and values that `keys_values` made."""
        mixed = attention(self.split_heads(self.W_q(query)), k, v, mask)  # (B, N, T, H)
        return self.W_o(jnp.swapaxes(mixed, 1, 2).reshape(query.shape))

    def __call__(
        self,
        query: Float[Array, "B T D"],
        key: Float[Array, "B S D"],
        value: Float[Array, "B S D"],
        mask: Bool[Array, "#B 1 #T S"] | None = None,
    ) -> Float[Array, "B T D"]:
        k, v = self.keys_values(key, value)  # each (B, N, S, H)
        return self.attend(query, k, v, mask)


class BahdanauAttention(nnx.Module):
    """softmax(Va tanh(Wa query + Ua keys)) keys, additive attention (Bahdanau et al. 2015). Seed 002, same name."""

    def __init__(self, config: RNNConfig, *, rngs: nnx.Rngs):
        self.Wa = Linear(config.hidden_size, config.hidden_size, rngs=rngs)
        self.Ua = Linear(config.hidden_size, config.hidden_size, rngs=rngs)
        self.Va = Linear(config.hidden_size, 1, rngs=rngs)

    def __call__(
        self,
        query: Float[Array, "B 1 H"],
        keys: Float[Array, "B S H"],
        projected_keys: Float[Array, "B S H"] | None = None,
        mask: Bool[Array, "B 1 S"] | None = None,
    ) -> tuple[Float[Array, "B 1 H"], Float[Array, "B 1 S"]]:
        """The context and the weights. `projected_keys` is Ua(keys), which a decoder computes once for all steps."""
        projected_keys = self.Ua(keys) if projected_keys is None else projected_keys
        scores = self.Va(jnp.tanh(self.Wa(query) + projected_keys))  # (B, S, 1)
        scores = jnp.swapaxes(scores, 1, 2)  # (B, 1, S)
        weights = jax.nn.softmax(scores, axis=-1) if mask is None else masked_softmax(scores, mask)
        return weights @ keys, weights
