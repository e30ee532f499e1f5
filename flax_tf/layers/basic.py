"""`torch.nn`'s linear layers, embeddings and activations, and what the other layers share."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer
from jax.nn.initializers import Initializer
from jaxtyping import Array, Float, Int

from flax_tf.errors import InputError, TokenIdError
from flax_tf.kernels.gelu import gelu
from flax_tf.kernels.linear import dot_general


class Buffer(nnx.Variable):
    """A tensor that is saved with the model and never trained: `register_buffer` in PyTorch."""


def uniform(bound: float) -> Initializer:
    """U(-bound, bound), the closed form of PyTorch's `kaiming_uniform_(a=sqrt(5))` at bound = 1/sqrt(fan_in)."""

    def init(key, shape, dtype=jnp.float32, out_sharding=None):
        del out_sharding
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def last_axis(vector: Float[Array, "D"], ndim: int) -> Float[Array, "... D"]:
    """The vector as the last of `ndim` axes."""
    return vector.reshape((1,) * (ndim - 1) + (-1,))


class Linear(nnx.Linear):
    """`torch.nn.Linear`: weight and bias start from U(±1/sqrt(in_features)). The kernel is [in, out]."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, rngs: nnx.Rngs):
        init = uniform(1 / math.sqrt(in_features))
        super().__init__(
            in_features,
            out_features,
            use_bias=bias,
            kernel_init=init,
            bias_init=init,
            dot_general=dot_general,
            rngs=rngs,
        )


class Embedding(nnx.Embed):
    """`torch.nn.Embedding`: rows start from N(0, 1).

    The row `padding_idx` (from the end if negative) starts from 0 and gets no gradient from being looked up.
    """

    def __init__(self, num_embeddings: int, features: int, *, padding_idx: int | None = None, rngs: nnx.Rngs):
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise InputError(f"padding_idx is {padding_idx}: choose from 0 to {num_embeddings - 1}, or None")
            padding_idx %= num_embeddings

        def init(key, shape, dtype=jnp.float32, out_sharding=None):
            table = jax.nn.initializers.normal(1.0)(key, shape, dtype, out_sharding)
            return table if padding_idx is None else table.at[padding_idx].set(0)

        super().__init__(num_embeddings, features, embedding_init=init, rngs=rngs)
        self.padding_idx = padding_idx
        # NNX fixes the dtype of the output here, so float64 weights filled in later would be looked up as float32.
        self.dtype = None

    def __call__(self, inputs: Int[Array, "*B"], out_sharding: Any = None) -> Float[Array, "*B D"]:
        """Looks the ids up. Raises TokenIdError, an IndexError, for a concrete id outside [0, num_embeddings).

        Inside jit the values are not there to be checked; callers check on the host, before the call.
        """
        check_ids(inputs, self.num_embeddings)
        output = super().__call__(inputs, out_sharding)
        if self.padding_idx is None:
            return output
        return jnp.where((inputs == self.padding_idx)[..., None], jax.lax.stop_gradient(output), output)


class TiedLinear(nnx.Module):
    """A `torch.nn.Linear` whose weight is an embedding's matrix: one parameter, used twice, so laid out [out, in]."""

    def __init__(self, embedding: Embedding, *, rngs: nnx.Rngs):
        self.weight = embedding.embedding
        self.bias = nnx.Param(uniform(1 / math.sqrt(embedding.features))(rngs.params(), (embedding.num_embeddings,)))

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        return x @ self.weight[...].T + last_axis(self.bias[...], x.ndim)


class GELU(nnx.Module):
    """`torch.nn.GELU`: x·Φ(x) with the error function (`jax.nn.gelu` would default to the tanh approximation)."""

    def __call__(self, x: Float[Array, "*B"]) -> Float[Array, "*B"]:
        return gelu(x)


class ReLU(nnx.Module):
    """`torch.nn.ReLU`."""

    def __call__(self, x: Float[Array, "*B"]) -> Float[Array, "*B"]:
        return jax.nn.relu(x)


def check_ids(ids: Int[Array | np.ndarray, "*B"], vocab_size: int) -> None:
    """Raises TokenIdError if an id lies outside [0, vocab_size). Does nothing for tracers, which hold no values."""
    if isinstance(ids, Tracer) or ids.size == 0:
        return
    values = np.asarray(ids)  # in NumPy: under a trace, JAX would trace even what is done to a concrete array
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise TokenIdError(f"token id {wrong} is outside the vocabulary of {vocab_size}: ids are 0 to {vocab_size - 1}")
