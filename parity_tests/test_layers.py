"""The leaf layers against `torch.nn`: starting distributions, arithmetic, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from scipy import stats

from flax_tf.errors import TokenIdError
from flax_tf.layers import GELU, Embedding, LayerNorm, Linear
from flax_tf.parity.tolerances import OUTPUT_FLOAT64, relative_error

# With two honest samples a Kolmogorov-Smirnov p-value is below this once in 10,000 draws; the seeds are fixed.
SAME_DISTRIBUTION = 1e-4


@pytest.mark.parametrize("tensor", ["weight", "bias"])
def test_linear_starts_from_pytorchs_distribution(tensor: str) -> None:
    torch.manual_seed(0)
    theirs = [getattr(torch.nn.Linear(17, 211), tensor).detach().numpy().ravel() for _ in range(7)]
    ours_name = {"weight": "kernel", "bias": "bias"}[tensor]
    ours = [np.ravel(getattr(Linear(17, 211, rngs=nnx.Rngs(seed)), ours_name)[...]) for seed in range(7)]
    assert stats.ks_2samp(np.concatenate(ours), np.concatenate(theirs)).pvalue > SAME_DISTRIBUTION
    assert abs(np.concatenate(ours)).max() <= 1 / np.sqrt(17)


def test_embedding_starts_from_pytorchs_distribution() -> None:
    torch.manual_seed(0)
    theirs = torch.nn.Embedding(211, 17).weight.detach().numpy().ravel()
    ours = np.ravel(Embedding(211, 17, rngs=nnx.Rngs(0)).embedding[...])
    assert stats.ks_2samp(ours, theirs).pvalue > SAME_DISTRIBUTION


def test_the_distribution_test_would_catch_flaxs_own_default() -> None:
    torch.manual_seed(0)
    theirs = torch.nn.Linear(17, 211).weight.detach().numpy().ravel()
    flax_default = np.ravel(nnx.Linear(17, 211, rngs=nnx.Rngs(0)).kernel[...])
    assert stats.ks_2samp(flax_default, theirs).pvalue < SAME_DISTRIBUTION


@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_layer_norm_variance_is_taken_in_two_passes(offset: float) -> None:
    x = (offset + np.array([[0.0, 1.0, 2.0, 3.0, 5.0]])).astype(np.float32)
    truth = torch.nn.LayerNorm(5)(torch.from_numpy(x)).detach().numpy()
    ours = np.asarray(LayerNorm(5, epsilon=1e-5, rngs=nnx.Rngs(0))(x))
    # At 10,000 a float32 resolves 1e-3, so the mean of five such values is itself off by some 1e-4 of their spread; the
    # one-pass formula is off by a factor of hundreds.
    assert relative_error(ours, truth) < 1e-3
    one_pass = np.asarray(nnx.LayerNorm(5, epsilon=1e-5, rngs=nnx.Rngs(0))(x))
    assert (relative_error(one_pass, truth) > 1) == (offset > 0)


@pytest.mark.parametrize("epsilon", [1e-5, 1e-3])
def test_layer_norm_uses_the_epsilon_it_was_given(epsilon: float) -> None:
    with jax.enable_x64(True):
        x = np.random.default_rng(0).standard_normal((3, 7)) * 1e-2
        truth = torch.nn.LayerNorm(7, eps=epsilon, dtype=torch.float64)(torch.from_numpy(x)).detach().numpy()
        ours = LayerNorm(7, epsilon=epsilon, rngs=nnx.Rngs(0))(x)
        assert relative_error(np.asarray(ours), truth) < OUTPUT_FLOAT64


def test_gelu_is_the_error_function_form() -> None:
    with jax.enable_x64(True):
        x = np.linspace(-7, 7, 211)
        assert (
            relative_error(np.asarray(GELU()(jnp.array(x))), torch.nn.GELU()(torch.from_numpy(x)).numpy()) < 1e-15 * 10
        )
        tanh_form = torch.nn.GELU(approximate="tanh")(torch.from_numpy(x)).numpy()
        assert relative_error(np.asarray(GELU()(jnp.array(x))), tanh_form) > 1e-6


def test_embedding_keeps_the_precision_of_weights_that_are_filled_in() -> None:
    with jax.enable_x64(True):
        layer = nnx.eval_shape(lambda: Embedding(11, 3, rngs=nnx.Rngs(0)))
        table = np.random.default_rng(0).standard_normal((11, 3))
        layer.embedding.set_value(jnp.array(table))
        assert np.array_equal(layer(jnp.array([7, 2])), table[[7, 2]])


@pytest.mark.parametrize("wrong", [11, -1])
def test_embedding_refuses_ids_outside_the_table_as_pytorch_does(wrong: int) -> None:
    with pytest.raises(IndexError):
        torch.nn.Embedding(11, 3)(torch.tensor([0, wrong]))
    with pytest.raises(TokenIdError, match=f"token id {wrong} is outside the vocabulary of 11"):
        Embedding(11, 3, rngs=nnx.Rngs(0))(jnp.array([0, wrong]))


def test_embedding_takes_concrete_ids_within_a_trace() -> None:
    layer, ids = Embedding(11, 3, rngs=nnx.Rngs(0)), jnp.array([7, 2])
    assert np.array_equal(jax.jit(lambda: layer(ids))(), layer(ids))
