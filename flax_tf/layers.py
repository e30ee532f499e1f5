"""PyTorch's leaf layers in NNX: same defaults, same initial distributions, same arithmetic. The twin is `torch.nn`."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.nnx.nn.attention import dot_product_attention_weights
from jax.core import Tracer
from jax.nn.initializers import Initializer
from jaxtyping import Array, Float, Int

from flax_tf.errors import InputError, TokenIdError


class Buffer(nnx.Variable):
    """A tensor that is saved with the model and never trained: `register_buffer` in PyTorch."""


def _uniform(bound: float) -> Initializer:
    """U(-bound, bound), the closed form of PyTorch's `kaiming_uniform_(a=sqrt(5))` at bound = 1/sqrt(fan_in)."""

    def init(key, shape, dtype=jnp.float32, out_sharding=None):
        del out_sharding
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def _last_axis(vector: Float[Array, "D"], ndim: int) -> Float[Array, "... D"]:
    """The vector as the last of `ndim` axes."""
    return vector.reshape((1,) * (ndim - 1) + (-1,))


class Linear(nnx.Linear):
    """`torch.nn.Linear`: weight and bias start from U(±1/sqrt(in_features)). The kernel is [in, out]."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True, rngs: nnx.Rngs):
        init = _uniform(1 / math.sqrt(in_features))
        super().__init__(in_features, out_features, use_bias=bias, kernel_init=init, bias_init=init, rngs=rngs)


class Embedding(nnx.Embed):
    """`torch.nn.Embedding`: rows start from N(0, 1)."""

    def __init__(self, num_embeddings: int, features: int, *, rngs: nnx.Rngs):
        super().__init__(num_embeddings, features, embedding_init=jax.nn.initializers.normal(1.0), rngs=rngs)
        # NNX fixes the dtype of the output here, so float64 weights filled in later would be looked up as float32.
        self.dtype = None

    def __call__(self, inputs: Int[Array, "*B"], out_sharding: Any = None) -> Float[Array, "*B D"]:
        """Looks the ids up. Raises TokenIdError, an IndexError, for a concrete id outside [0, num_embeddings).

        Inside jit the values are not there to be checked; callers check on the host, before the call.
        """
        check_ids(inputs, self.num_embeddings)
        return super().__call__(inputs, out_sharding)


class LayerNorm(nnx.LayerNorm):
    """`torch.nn.LayerNorm` over the last axis.

    The variance is taken in two passes: NNX's default, E[x²] - E[x]², loses every digit when the mean is large.
    """

    def __init__(self, num_features: int, *, epsilon: float, rngs: nnx.Rngs):
        super().__init__(num_features, epsilon=epsilon, use_fast_variance=False, rngs=rngs)


class RMSNorm(nnx.Module):
    """`torch.nn.RMSNorm` over the last axis; without an epsilon it is the machine epsilon of what is computed in."""

    def __init__(self, num_features: int, *, epsilon: float | None = None, rngs: nnx.Rngs):
        del rngs  # every layer takes it
        self.epsilon = epsilon
        self.weight = nnx.Param(jnp.ones(num_features))

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Divides by the root of the mean square, computed in float32 or wider, as PyTorch does."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        epsilon = float(jnp.finfo(wide.dtype).eps) if self.epsilon is None else self.epsilon
        normal = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + epsilon)
        return normal.astype(x.dtype) * _last_axis(self.weight[...], x.ndim)


class GroupNorm(nnx.GroupNorm):
    """`torch.nn.GroupNorm`, channels last. The variance is taken in two passes, as in `LayerNorm`."""

    def __init__(self, num_groups: int, num_channels: int, *, epsilon: float = 1e-5, rngs: nnx.Rngs):
        super().__init__(num_channels, num_groups, epsilon=epsilon, use_fast_variance=False, rngs=rngs)


class BatchNorm(nnx.Module):
    """`torch.nn.BatchNorm1d`, `2d` and `3d`, channels last.

    `nnx.BatchNorm` trains otherwise: it keeps a running mean of the biased variance, where PyTorch's is unbiased, calls
    momentum what is 1 - PyTorch's, and takes the variance in one pass. `train()` and `eval()` choose the statistics.
    """

    def __init__(self, num_features: int, *, epsilon: float = 1e-5, momentum: float = 0.1, rngs: nnx.Rngs):
        del rngs  # every layer takes it
        self.epsilon = epsilon
        self.momentum = momentum
        self.use_running_average = False  # eval() sets it
        self.weight, self.bias = nnx.Param(jnp.ones(num_features)), nnx.Param(jnp.zeros(num_features))
        self.running_mean, self.running_var = Buffer(jnp.zeros(num_features)), Buffer(jnp.ones(num_features))

    def __call__(self, x: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
        """Normalises every channel over all other axes: by the running statistics, or in training by those of the
        batch, which then join the running ones. Computed in float32 or wider.

        Raises InputError in training for one value per channel, which has no variance.
        """
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if self.use_running_average:
            mean, variance = self.running_mean[...], self.running_var[...]
        else:
            count = x.size // x.shape[-1]
            if count < 2:
                raise InputError("batch normalisation in training needs more than one value per channel: use eval()")
            axes = tuple(range(x.ndim - 1))
            mean, variance = jnp.mean(wide, axes), jnp.var(wide, axes)  # in two passes
            for running, new in ((self.running_mean, mean), (self.running_var, variance * (count / (count - 1)))):
                running[...] = (1 - self.momentum) * running[...] + self.momentum * new
        mean, scale = (_last_axis(v, x.ndim) for v in (mean, jax.lax.rsqrt(variance + self.epsilon)))
        weight, bias = (_last_axis(v, x.ndim) for v in (self.weight[...], self.bias[...]))
        return ((wide - mean) * scale * weight + bias).astype(x.dtype)


class Conv(nnx.Conv):
    """`torch.nn.Conv1d`, `2d` and `3d`, by the number of kernel sizes, channels last.

    Weight and bias start from U(±1/√fan_in). Padding, the same on both sides of an axis, is 0 (NNX: "SAME").
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sequence[int],
        *,
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: bool = True,
        rngs: nnx.Rngs,
    ):
        init = _uniform(1 / math.sqrt(in_channels // groups * math.prod(kernel_size)))
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding=padding, kernel_dilation=dilation,
            feature_group_count=groups, use_bias=bias, kernel_init=init, bias_init=init, rngs=rngs,
        )  # fmt: skip


class ConvTranspose(nnx.ConvTranspose):
    """`torch.nn.ConvTranspose1d`, `2d` and `3d`, by the number of kernel sizes, channels last, without groups.

    `padding` and `output_padding` mean what they do in PyTorch. Weight and bias start from U(±1/√fan), where the fan is
    that of PyTorch: out_channels times the kernel's size.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sequence[int],
        *,
        stride: int = 1,
        padding: int = 0,
        output_padding: int = 0,
        dilation: int = 1,
        bias: bool = True,
        rngs: nnx.Rngs,
    ):
        init = _uniform(1 / math.sqrt(out_channels * math.prod(kernel_size)))
        # Of the convolution over the input with zeros between its values, which is what JAX takes.
        edges = [dilation * (size - 1) - padding for size in kernel_size]
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding=[(edge, edge + output_padding) for edge in edges],
            kernel_dilation=dilation, use_bias=bias, transpose_kernel=True, kernel_init=init, bias_init=init, rngs=rngs,
        )  # fmt: skip


class MultiHeadAttention(nnx.MultiHeadAttention):
    """`torch.nn.MultiheadAttention(batch_first=True)`, whose keys and values may be `kdim` wide, called as NNX's is.

    Weights start from Xavier's uniform distribution over what PyTorch packs into one tensor, biases from 0.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kdim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        packed = kdim in (None, embed_dim)

        def init(key, shape, dtype=jnp.float32, out_sharding=None):
            fans = shape[0] + (3 if packed else 1) * embed_dim
            return _uniform(math.sqrt(6 / fans))(key, shape, dtype, out_sharding)

        super().__init__(
            num_heads, embed_dim, in_kv_features=kdim, use_bias=bias, dropout_rate=dropout, decode=False, rngs=rngs,
            kernel_init=init, out_kernel_init=_uniform(1 / math.sqrt(embed_dim)), attention_fn=attend,
        )  # fmt: skip


def attend(
    query: Float[Array, "*B T N H"], key: Float[Array, "*B S K H"], value: Float[Array, "*B S K H"], **options: Any
) -> Float[Array, "*B T N H"]:
    """`nnx.dot_product_attention` in the precision of its arguments; `options` are those of its keyword arguments.

    NNX's own goes to `jax.nn.dot_product_attention`, whose softmax is computed in float32 whatever it is given. K key
    heads may each serve N / K query heads.
    """
    weights = dot_product_attention_weights(query, key, **options)
    return jnp.einsum("...hqk,...khd->...qhd", weights, jnp.repeat(value, query.shape[-2] // value.shape[-2], axis=-2))


class GELU(nnx.Module):
    """`torch.nn.GELU`: x·Φ(x) with the error function (`jax.nn.gelu` would default to the tanh approximation)."""

    def __call__(self, x: Float[Array, "*B"]) -> Float[Array, "*B"]:
        return jax.nn.gelu(x, approximate=False)


class ReLU(nnx.Module):
    """`torch.nn.ReLU`."""

    def __call__(self, x: Float[Array, "*B"]) -> Float[Array, "*B"]:
        return jax.nn.relu(x)


class TiedLinear(nnx.Module):
    """A `torch.nn.Linear` whose weight is an embedding's matrix: one parameter, used twice, so laid out [out, in]."""

    def __init__(self, embedding: Embedding, *, rngs: nnx.Rngs):
        self.weight = embedding.embedding
        self.bias = nnx.Param(_uniform(1 / math.sqrt(embedding.features))(rngs.params(), (embedding.num_embeddings,)))

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        return x @ self.weight[...].T + _last_axis(self.bias[...], x.ndim)


class _Recurrent(nnx.Module):
    """What `torch.nn.GRU` and `torch.nn.LSTM` have in common: parameters, names, layers and directions.

    Weights keep PyTorch's layout, [gates * H, in]; all start from U(±1/√H). Sequences are batch first. Dropout falls on
    the outputs of every layer but the last.
    """

    gates: ClassVar[int]

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        *,
        num_layers: int = 1,
        bias: bool = True,
        dropout: float = 0.0,
        bidirectional: bool = False,
        rngs: nnx.Rngs,
    ):
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.bias = bias
        self.dropout = dropout
        self.bidirectional = bidirectional
        self.deterministic = False  # eval() sets it
        init, rows = _uniform(1 / math.sqrt(hidden_size)), self.gates * hidden_size
        for layer in range(num_layers):
            width = hidden_size * (1 + bidirectional) if layer else input_size
            for direction in self._directions():
                shapes: dict[str, tuple[int, ...]] = {"weight_ih": (rows, width), "weight_hh": (rows, hidden_size)}
                if bias:
                    shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)}
                for name, shape in shapes.items():
                    setattr(self, f"{name}_l{layer}{direction}", nnx.Param(init(rngs.params(), shape)))

    def _directions(self) -> tuple[str, ...]:
        return ("", "_reverse") if self.bidirectional else ("",)

    def _cell(self, state: tuple[Array, ...], from_input: Array, from_hidden: Array) -> tuple[Array, ...]:
        """The next state, hidden values first, from the projections [B, gates * H] of input and hidden values."""
        raise NotImplementedError

    def _start(self, x: Array) -> Array:
        return jnp.zeros((self.num_layers * (1 + self.bidirectional), x.shape[0], self.hidden_size), x.dtype)

    def _run(self, x: Array, states: tuple[Array, ...], rngs: nnx.Rngs | None) -> tuple[Array, tuple[Array, ...]]:
        """All layers and directions over a sequence. Each of `states` is [layers * directions, B, H]."""
        ends = []
        for layer in range(self.num_layers):
            if layer:
                x = nnx.Dropout(self.dropout, deterministic=self.deterministic)(x, rngs=rngs)
            outputs = []
            for direction in self._directions():
                start = tuple(state[len(ends)] for state in states)
                end, output = self._scan(x, start, f"l{layer}{direction}")
                ends.append(end)
                outputs.append(output)
            x = jnp.concatenate(outputs, axis=-1)  # (B, T, H or 2H)
        return x, tuple(jnp.stack(state) for state in zip(*ends, strict=True))

    def _scan(self, x: Array, start: tuple[Array, ...], suffix: str) -> tuple[tuple[Array, ...], Array]:
        weight_ih, weight_hh = getattr(self, f"weight_ih_{suffix}")[...], getattr(self, f"weight_hh_{suffix}")[...]
        bias_ih = getattr(self, f"bias_ih_{suffix}")[None, :] if self.bias else 0
        bias_hh = getattr(self, f"bias_hh_{suffix}")[None, :] if self.bias else 0
        # Of the whole sequence at once, (B * T, gates * H).
        from_inputs = x.reshape(-1, x.shape[-1]) @ weight_ih.T + bias_ih
        from_inputs = from_inputs.reshape(*x.shape[:2], -1)  # (B, T, gates * H)

        def step(state: tuple[Array, ...], from_input: Array) -> tuple[tuple[Array, ...], Array]:
            state = self._cell(state, from_input, state[0] @ weight_hh.T + bias_hh)
            return state, state[0]

        end, outputs = jax.lax.scan(step, start, jnp.swapaxes(from_inputs, 0, 1), reverse="reverse" in suffix)
        return end, jnp.swapaxes(outputs, 0, 1)  # (B, T, H)


class GRU(_Recurrent):
    """`torch.nn.GRU(batch_first=True)`: gates r, z, n; two biases; r multiplies the projected hidden values.

    `nnx.GRUCell` is another function: it has no hidden bias within the product with r, and none can be folded into it.
    """

    gates = 3

    def _cell(self, state: tuple[Array, ...], from_input: Array, from_hidden: Array) -> tuple[Array, ...]:
        (hidden,) = state
        (input_r, input_z, input_n), (hidden_r, hidden_z, hidden_n) = (
            jnp.split(projected, self.gates, axis=-1) for projected in (from_input, from_hidden)
        )
        r, z = jax.nn.sigmoid(input_r + hidden_r), jax.nn.sigmoid(input_z + hidden_z)
        n = jnp.tanh(input_n + r * hidden_n)
        return ((1 - z) * n + z * hidden,)

    def __call__(
        self, x: Float[Array, "B T I"], hidden: Float[Array, "L B H"] | None = None, *, rngs: nnx.Rngs | None = None
    ) -> tuple[Float[Array, "B T O"], Float[Array, "L B H"]]:
        """The outputs of the last layer (O is H, or 2H in two directions) and the last hidden values of each of the
        L = layers * directions. `hidden` is what they start from, zero by default."""
        output, (hidden,) = self._run(x, (self._start(x) if hidden is None else hidden,), rngs)
        return output, hidden


class LSTM(_Recurrent):
    """`torch.nn.LSTM(batch_first=True)`: gates i, f, g, o; two biases."""

    gates = 4

    def _cell(self, state: tuple[Array, ...], from_input: Array, from_hidden: Array) -> tuple[Array, ...]:
        i, f, g, o = jnp.split(from_input + from_hidden, self.gates, axis=-1)
        cell = jax.nn.sigmoid(f) * state[1] + jax.nn.sigmoid(i) * jnp.tanh(g)
        return jax.nn.sigmoid(o) * jnp.tanh(cell), cell

    def __call__(
        self,
        x: Float[Array, "B T I"],
        state: tuple[Float[Array, "L B H"], Float[Array, "L B H"]] | None = None,
        *,
        rngs: nnx.Rngs | None = None,
    ) -> tuple[Float[Array, "B T O"], tuple[Float[Array, "L B H"], Float[Array, "L B H"]]]:
        """As of `GRU`; the state is a pair, hidden values and cell values."""
        output, (hidden, cell) = self._run(x, (self._start(x), self._start(x)) if state is None else state, rngs)
        return output, (hidden, cell)


def check_ids(ids: Int[Array | np.ndarray, "*B"], vocab_size: int) -> None:
    """Raises TokenIdError if an id lies outside [0, vocab_size). Does nothing for tracers, which hold no values."""
    if isinstance(ids, Tracer) or ids.size == 0:
        return
    values = np.asarray(ids)  # in NumPy: under a trace, JAX would trace even what is done to a concrete array
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= vocab_size:
        wrong = low if low < 0 else high
        raise TokenIdError(f"token id {wrong} is outside the vocabulary of {vocab_size}: ids are 0 to {vocab_size - 1}")
