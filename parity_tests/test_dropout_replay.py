"""Masks of dropout, recorded in PyTorch and replayed in both frameworks."""

import copy
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from flax import nnx
from models import ATTN_RNN, BACKBONE, LANGUAGE_MODEL, RNN, TRANSFORMER, ids, reference, twin
from torch.utils.checkpoint import checkpoint
from twins import float64, quick_jit, relative_error  # noqa: F401

from flax_tf.errors import InputError
from flax_tf.parity.dropout import Mask, recording_dropout, replaying_dropout, replaying_dropout_torch

# The contract on outputs in float64: a few hundred roundings of 1e-16.
SAME = 1e-12


def dropped(config, *inputs):
    """A pair in training mode in float64, PyTorch's output and its masks."""
    module = reference(replace(config, dropout=0.3)).double()
    model = twin(module)
    module.train()
    model.train()
    with recording_dropout(module, seed=7) as masks:
        output = module(*map(torch.from_numpy, inputs))
    return module, model, output, masks


def replayed(model, masks, *inputs):
    """The output and the differences, jitted with the masks as arguments."""
    graph, state = nnx.split(model)
    found = []

    @quick_jit
    def run(state, masks, inputs):
        merged = nnx.merge(graph, state)
        with replaying_dropout(merged, masks) as differences:
            output = merged(*inputs)
        found.append(differences)
        return output

    output = run(state, masks, inputs)
    return output, found[0]


@pytest.mark.parametrize(
    ("config", "inputs"),
    [
        (BACKBONE, (ids(2, 7),)),
        (LANGUAGE_MODEL, (ids(2, 7),)),
        (TRANSFORMER, (ids(2, 7), ids(2, 5, seed=1) % 31)),
        (RNN, (ids(2, 7), ids(2, 5, seed=1) % 31)),
        (ATTN_RNN, (ids(2, 7), ids(2, 5, seed=1) % 31)),
    ],
    ids=["backbone", "language-model", "transformer", "rnn", "attn-rnn"],
)
def test_every_system_drops_the_same_values(config, inputs) -> None:
    _, model, output, masks = dropped(config, *inputs)
    again, differences = replayed(model, masks, *inputs)
    assert differences == []
    first = [leaf for leaf in (output if isinstance(output, tuple) else (output,)) if leaf is not None]
    for value, truth in zip(jax.tree.leaves(again), first, strict=True):
        assert relative_error(value, truth.detach()) <= SAME
    assert sum(not mask.keep.all() for calls in masks.values() for mask in calls) > 0
    model.eval()
    undropped = model(*map(jnp.asarray, inputs))
    assert relative_error(jax.tree.leaves(undropped)[0], first[0].detach()) > 1e-3  # dropout did something


def test_masks_replay_in_pytorch_in_another_precision() -> None:
    module, _, output, masks = dropped(LANGUAGE_MODEL, tokens := ids(2, 7))
    single = copy.deepcopy(module).float()
    with replaying_dropout_torch(single, masks):
        again = single(torch.from_numpy(tokens))
    assert relative_error(again.detach().double(), output.detach()) <= 1e-5  # a hundred roundings of 1e-7
    with pytest.raises(InputError, match="no mask was recorded for this call of"), replaying_dropout_torch(single, {}):
        single(torch.from_numpy(tokens))


def test_the_seed_makes_the_masks_and_the_global_generator_stays() -> None:
    module = torch.nn.Dropout(0.5)
    before = torch.get_rng_state()
    masks = []
    for seed in (1, 1, 2):
        with recording_dropout(module, seed) as recorded:
            module(torch.ones(3, 5))
        masks.append(recorded[""][0].keep)
    assert torch.equal(torch.get_rng_state(), before)
    assert (masks[0] == masks[1]).all()
    assert (masks[0] != masks[2]).any()
    module(torch.ones(3, 5))
    assert not torch.equal(torch.get_rng_state(), before)  # PyTorch's own dropout is back


def test_new_masks_do_not_compile_again() -> None:
    layer = nnx.Dropout(0.5)
    traces = []

    @jax.jit
    def run(masks):
        traces.append(1)
        with replaying_dropout(layer, masks):
            return layer(jnp.ones((2, 3)))

    for seed in range(3):
        keep = np.random.default_rng(seed).random((2, 3)) < 0.5
        np.testing.assert_array_equal(run({"": [Mask(keep, 0.5)]}), 2.0 * keep)
    assert len(traces) == 1


class Block(torch.nn.Module):
    """Dropout as functions, as a layer, of features, and within attention by both of PyTorch's ways."""

    def __init__(self, need_weights: bool):
        super().__init__()
        self.need_weights = need_weights
        self.attention = torch.nn.MultiheadAttention(6, 2, dropout=0.4, batch_first=True)
        self.features = torch.nn.Dropout1d(0.2)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=self.need_weights)[0]
        return F.dropout(self.features(x), 0.1, self.training) + F.dropout(x, 0.3, self.training, inplace=False)


class FlaxBlock(nnx.Module):
    def __init__(self, broadcast_dropout: bool = False):
        rngs = nnx.Rngs(0)
        self.attention = nnx.MultiHeadAttention(
            2,
            6,
            param_dtype=jnp.float64,
            dropout_rate=0.4,
            broadcast_dropout=broadcast_dropout,
            decode=False,
            rngs=rngs,
            keep_rngs=False,
        )
        self.features = nnx.Dropout(0.2, broadcast_dims=(2,))
        self.drop_1 = nnx.Dropout(0.1)
        self.drop_2 = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(x)
        return self.drop_1(self.features(x)) + self.drop_2(x)


def same_weights(block: Block, model: FlaxBlock) -> None:
    weights = [
        np.split(tensor.detach().numpy(), 3)
        for tensor in (block.attention.in_proj_weight, block.attention.in_proj_bias)
    ]
    for name, kernel, bias in zip(("query", "key", "value"), *weights, strict=True):
        layer = getattr(model.attention, name)
        layer.kernel[...], layer.bias[...] = kernel.T.reshape(6, 2, 3), bias.reshape(2, 3)
    model.attention.out.kernel[...] = block.attention.out_proj.weight.detach().numpy().T.reshape(2, 3, 6)
    assert model.attention.out.bias is not None
    model.attention.out.bias[...] = block.attention.out_proj.bias.detach().numpy()


@pytest.mark.parametrize("need_weights", [True, False])
def test_functions_features_and_attention(need_weights: bool) -> None:
    block, model = Block(need_weights).double(), FlaxBlock()
    model.train()
    same_weights(block, model)
    x = np.random.default_rng(0).standard_normal((5, 7, 6))
    with recording_dropout(block, seed=3) as masks:
        output = block(torch.from_numpy(x))
    assert {path: [mask.rate for mask in calls] for path, calls in masks.items()} == {
        "attention": [0.4],
        "features": [0.2],
        "": [0.1, 0.3],
    }
    with replaying_dropout(model, masks) as differences:
        again = model(jnp.asarray(x))
    assert differences == []
    assert relative_error(again, output.detach()) <= SAME
    shared = FlaxBlock(broadcast_dropout=True)
    shared.train()
    with replaying_dropout(shared, masks) as differences:
        shared(jnp.asarray(x))
    assert differences == [
        "attention drops the same weights in all heads, PyTorch does not: set broadcast_dropout=False"
    ]


def test_attention_that_drops_nothing_is_pytorchs_own() -> None:
    """The definition by which attention is computed while it drops gives the weights of PyTorch's own kernel."""
    q, k, v = (
        torch.randn(3, 4, 5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(3)
    )

    class Attention(torch.nn.Module):
        def forward(self, p):
            return F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], None, p, True, enable_gqa=True)

    all_kept = {"": [Mask(np.ones((3, 4, 5, 5), bool), 0.5)]}
    with replaying_dropout_torch(module := Attention(), all_kept):
        assert relative_error(module(0.5) * 0.5, module(0.0)) <= SAME


def test_channels_may_be_last() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 5, 7))
    for layer, flax in (
        (torch.nn.Dropout(0.5), nnx.Dropout(0.5)),
        (torch.nn.Dropout2d(0.5), nnx.Dropout(0.5, broadcast_dims=(1, 2))),
    ):
        with recording_dropout(layer, seed=0) as masks:
            output = layer(torch.from_numpy(x))
        with replaying_dropout(flax, masks) as differences:
            again = flax(jnp.asarray(x.transpose(0, 2, 3, 1)))
        assert differences == []
        assert relative_error(np.asarray(again).transpose(0, 3, 1, 2), output) <= SAME


@pytest.mark.parametrize(
    ("masks", "line"),
    [
        ({"0": [Mask(np.ones((2, 3), bool), 0.2)]}, "0 drops 0.5, PyTorch 0.2"),
        ({"0": [Mask(np.ones((3, 2), bool), 0.5)]}, "0 drops values of shape [2, 3], PyTorch of shape [3, 2]"),
        ({}, "0 drops 0.5, PyTorch does not"),
        ({"0": []}, "0 drops 0.5, PyTorch does so less often"),
        ({"0": 2 * [Mask(np.ones((2, 3), bool), 0.5)]}, "0 drops 0.5 in PyTorch, Flax does so less often"),
        (
            {"": [Mask(np.ones((2, 3), bool), 0.5)], "1": [Mask(np.ones((2, 3), bool), 0.1)]},
            "1 drops 0.1 in PyTorch, Flax does not",
        ),
    ],
)
def test_every_difference_is_named(masks, line: str) -> None:
    model = nnx.Sequential(nnx.Dropout(0.5))
    with replaying_dropout(model, masks) as differences:
        model(jnp.ones((2, 3)))
    assert differences == [line]


def test_random_numbers_that_cannot_be_recorded_are_refused() -> None:
    class Noisy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.ModuleDict({"gru": torch.nn.GRU(3, 5, num_layers=2, dropout=0.5)})

        def forward(self, x):
            return self.inner["gru"](x)

    module = Noisy()
    with recording_dropout(module, 0), pytest.raises(InputError, match=r"^inner.gru \(GRU\) draws random numbers"):
        module(torch.ones(7, 2, 3))
    module.eval()
    with recording_dropout(module, 0) as masks:
        module(torch.ones(7, 2, 3))
    assert masks == {}


def test_dropout_within_a_scan_is_refused_in_one_line() -> None:
    model = nnx.Dropout(0.5)
    masks = {"": 5 * [Mask(np.ones(3, bool), 0.5)]}
    with replaying_dropout(model, masks), pytest.raises(InputError, match=r"within a jax\.lax\.scan"):
        jax.lax.scan(lambda carry, x: (carry, model(x)), 0, jnp.ones((5, 3)))


def test_dropout_that_is_computed_again_in_pytorch_is_refused() -> None:
    inner = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5), torch.nn.Tanh())
    module = torch.nn.Sequential(inner)
    with recording_dropout(module, 0):
        output = checkpoint(inner, torch.ones(2, 3), use_reentrant=False)
        with pytest.raises(InputError, match=r"^0\.1 drops values again backwards, .* without torch.utils.checkpoint"):
            output.sum().backward()


def test_dropout_in_a_copy_of_a_flax_model_is_refused() -> None:
    model = nnx.Dropout(0.5)
    masks = {"": [Mask(np.ones(3, bool), 0.5)]}
    message = "^Dropout of rate 0.5 drops values in a copy of the model, .* without nnx.remat"
    with replaying_dropout(model, masks), pytest.raises(InputError, match=message):
        nnx.remat(lambda layer, x: layer(x))(model, jnp.ones(3))
