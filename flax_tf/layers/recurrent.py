"""`torch.nn`'s GRU and LSTM."""

import math
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from flax_tf.layers.basic import uniform
from flax_tf.layers.dropout import Dropout


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
        init, rows = uniform(1 / math.sqrt(hidden_size)), self.gates * hidden_size
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
            if layer and not self.deterministic:
                x = Dropout(self.dropout)(x, rngs=rngs)
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
