"""GRU and LSTM against torch.nn.GRU and torch.nn.LSTM."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from twins import assert_same, relative_error, run, state_dict
from twins import float64 as float64

from flax_tf.layers import GRU, LSTM, Dropout
from flax_tf.porting.convert import flax_to_torch, torch_to_flax

B, T, INPUT, HIDDEN = 3, 7, 5, 11
KINDS = {"gru": (torch.nn.GRU, GRU), "lstm": (torch.nn.LSTM, LSTM)}
ALL_OPTIONS = [
    {"num_layers": layers, "bidirectional": both_ways, "bias": bias}
    for layers in (1, 2)
    for both_ways in (False, True)
    for bias in (False, True)
]


def layers(kind: str, **options) -> tuple[torch.nn.Module, GRU | LSTM]:
    torch.manual_seed(0)
    torch_class, flax_class = KINDS[kind]
    reference = torch_class(INPUT, HIDDEN, batch_first=True, **options).double()
    return reference, torch_to_flax(state_dict(reference), empty(flax_class, INPUT, **options))


def empty(cls: type[GRU | LSTM], width: int, **options) -> GRU | LSTM:
    return nnx.eval_shape(lambda: cls(width, HIDDEN, rngs=nnx.Rngs(0), **options))


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape)


@pytest.mark.parametrize("kind", KINDS)
def test_long_sequences_and_gradients(kind):
    assert_same(*layers(kind, num_layers=2, bidirectional=True), random(B, 101, INPUT))


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_from_a_given_state(kind, options):
    reference, layer = layers(kind, **options)
    count = options["num_layers"] * (1 + options["bidirectional"])
    x, hidden, cell = random(B, T, INPUT), random(count, B, HIDDEN), random(count, B, HIDDEN) / 2
    state = hidden if kind == "gru" else (hidden, cell)
    expected, ends = reference(torch.from_numpy(x), jax.tree.map(torch.from_numpy, state))
    output, lasts = run(layer, x, state)
    for value, truth in zip(jax.tree.leaves((output, lasts)), jax.tree.leaves((expected, ends)), strict=True):
        # The contract for outputs: a few hundred roundings.
        assert relative_error(value, truth.detach()) <= 1e-12


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_weights_port_both_ways(kind, options):
    reference, layer = layers(kind, **options)
    ported, original = flax_to_torch(layer), state_dict(reference)
    assert ported.keys() == original.keys()
    assert all(ported[name].tobytes() == original[name].tobytes() for name in original)


@pytest.mark.parametrize("kind", KINDS)
def test_initial_values_are_pytorchs(kind):
    bound = 1 / np.sqrt(41)
    for variable in KINDS[kind][1](37, 41, rngs=nnx.Rngs(0)).__dict__.values():
        if isinstance(variable, nnx.Param):
            values = np.asarray(variable[...])
            assert np.abs(values).max() <= bound
            # The spread of U(-b, b) is b/sqrt(3); over at least 123 values it is within a fifth of that (4 sigma).
            assert values.std() == pytest.approx(bound / np.sqrt(3), rel=0.2)


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_falls_between_layers_only(kind):
    reference, layer = layers(kind, num_layers=2, dropout=0.5)
    first, second = (
        torch_to_flax(
            {name.replace(f"_l{i}", "_l0"): a for name, a in state_dict(reference).items() if name.endswith(f"_l{i}")},
            empty(KINDS[kind][1], width),
        )
        for i, width in ((0, INPUT), (1, HIDDEN))
    )
    x = jnp.asarray(random(B, T, INPUT))
    dropped = Dropout(0.5)(first(x)[0], rngs=nnx.Rngs(dropout=5))
    layer.train()
    output = layer(x, rngs=nnx.Rngs(dropout=5))[0]
    np.testing.assert_array_equal(output, second(dropped)[0])  # the same arithmetic, so the same bits
    layer.eval()
    assert not np.allclose(output, layer(x)[0])
