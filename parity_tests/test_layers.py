"""The leaf layers against `torch.nn`: starting distributions, arithmetic, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from scipy import stats

from flax_tf.errors import InputError, TokenIdError
from flax_tf.layers import (
    GELU,
    BatchNorm,
    Conv,
    ConvTranspose,
    Embedding,
    GroupNorm,
    LayerNorm,
    Linear,
    MultiHeadAttention,
    RMSNorm,
    attend,
)
from flax_tf.parity.tolerances import GRADIENT_FLOAT64, OUTPUT_FLOAT64, OUTPUT_FLOOR, low_limit, relative_error
from flax_tf.porting import flax_to_torch, torch_to_flax
from flax_tf.porting.files import torch_to_numpy

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


DRAWN = {
    "Conv": (lambda: torch.nn.Conv2d(6, 40, (3, 5), groups=2), lambda rngs: Conv(6, 40, (3, 5), groups=2, rngs=rngs)),
    "ConvTranspose": (lambda: torch.nn.ConvTranspose1d(40, 7, 3), lambda rngs: ConvTranspose(40, 7, (3,), rngs=rngs)),
    "MultiHeadAttention": (
        lambda: torch.nn.MultiheadAttention(21, 3, batch_first=True),
        lambda rngs: MultiHeadAttention(21, 3, rngs=rngs),
    ),
    "MultiHeadAttention, keys of another width": (
        lambda: torch.nn.MultiheadAttention(21, 3, kdim=40, vdim=40, batch_first=True),
        lambda rngs: MultiHeadAttention(21, 3, kdim=40, rngs=rngs),
    ),
}


@pytest.mark.parametrize("kind", DRAWN)
def test_convolution_and_attention_start_from_pytorchs_distributions(kind: str) -> None:
    reference, layer = DRAWN[kind]
    torch.manual_seed(0)
    theirs = [{name: p.detach().numpy() for name, p in reference().named_parameters()} for _ in range(11)]
    ours = [flax_to_torch(layer(nnx.Rngs(seed))) for seed in range(11)]
    assert ours[0].keys() == theirs[0].keys()
    for name in ours[0]:
        mine, truth = (np.concatenate([drawn[name].ravel() for drawn in side]) for side in (ours, theirs))
        assert stats.ks_2samp(mine, truth).pvalue > SAME_DISTRIBUTION, name


def test_group_norm_variance_is_taken_in_two_passes() -> None:
    x = (1e4 + np.random.default_rng(0).standard_normal((2, 7, 15))).astype(np.float32)
    truth = torch.nn.GroupNorm(3, 15)(torch.from_numpy(x).double().movedim(-1, 1).float()).movedim(1, -1)
    ours = np.asarray(GroupNorm(3, 15, rngs=nnx.Rngs(0))(jnp.array(x)))
    # At 10,000 a float32 resolves 1e-3; the mean of 35 such values is off by less than that part of their spread.
    assert relative_error(ours, truth.detach().numpy()) < 1e-3
    one_pass = np.asarray(nnx.GroupNorm(15, 3, epsilon=1e-5, rngs=nnx.Rngs(0))(jnp.array(x)))
    assert relative_error(one_pass, truth.detach().numpy()) > 1


@pytest.mark.parametrize("epsilon", [None, 1e-5])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_rms_norm_takes_pytorchs_default_epsilon(dtype: str, epsilon: float | None) -> None:
    # Values so small that every epsilon from 1e-16 to 1e-2 gives another result.
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 7)) * 1e-7).to(getattr(torch, dtype))
    truth = torch_to_numpy(torch.nn.RMSNorm(7, eps=epsilon, dtype=x.dtype)(x))
    with jax.enable_x64(True):
        layer = torch_to_flax({"weight": np.ones(7, truth.dtype)}, RMSNorm(7, epsilon=epsilon, rngs=nnx.Rngs(0)))
        ours = np.asarray(layer(jnp.array(torch_to_numpy(x))))
    assert ours.dtype == truth.dtype
    # Two roundings of the dtype; that of the input is common to both.
    assert relative_error(ours, truth) < 2 * float(jnp.finfo(truth.dtype).eps)


RANKS = pytest.mark.parametrize("shape", [(13, 5), (2, 7, 5), (2, 7, 3, 5), (2, 3, 4, 7, 5)], ids=str)
BATCH_NORMS = {2: torch.nn.BatchNorm1d, 3: torch.nn.BatchNorm1d, 4: torch.nn.BatchNorm2d, 5: torch.nn.BatchNorm3d}


@RANKS
def test_batch_norm_trains_as_pytorchs_does(shape: tuple[int, ...]) -> None:
    """Outputs, gradients and running statistics over several batches, then the running statistics in use."""
    random = np.random.default_rng(0)
    module = BATCH_NORMS[len(shape)](5, eps=1e-3, momentum=0.3, dtype=torch.float64)
    with torch.no_grad():
        for tensor in (module.weight, module.bias):
            tensor.copy_(torch.from_numpy(random.standard_normal(5)))
    with jax.enable_x64(True):
        arrays = {name: torch_to_numpy(tensor) for name, tensor in module.state_dict().items()}
        layer = torch_to_flax(arrays, BatchNorm(5, epsilon=1e-3, momentum=0.3, rngs=nnx.Rngs(0)))
        for train in (True, True, True, False):
            module.train(train)
            layer.train() if train else layer.eval()
            x, cotangent = 3 + 2 * random.standard_normal(shape), random.standard_normal(shape)
            theirs = torch.from_numpy(np.moveaxis(x, -1, 1).copy()).requires_grad_()
            truth = module(theirs)
            module.zero_grad()
            truth.backward(torch.from_numpy(np.moveaxis(cotangent, -1, 1).copy()))
            assert theirs.grad is not None

            @nnx.jit
            def step(layer: BatchNorm, x: jax.Array, cotangent: jax.Array):
                def scalar(layer: BatchNorm, x: jax.Array):
                    output = layer(x)
                    return jnp.vdot(output, cotangent), output

                return nnx.grad(scalar, argnums=(0, 1), has_aux=True)(layer, x)

            (gradients, of_input), output = step(layer, jnp.array(x), jnp.array(cotangent))
            assert relative_error(np.asarray(output), truth.detach().movedim(1, -1).numpy()) < OUTPUT_FLOAT64
            assert relative_error(np.asarray(of_input), torch_to_numpy(theirs.grad.movedim(1, -1))) < GRADIENT_FLOAT64
            for name in ("weight", "bias"):
                gradient = np.asarray(gradients[name][...])
                assert relative_error(gradient, getattr(module, name).grad.numpy()) < GRADIENT_FLOAT64, name
            for name, array in flax_to_torch(layer).items():
                assert relative_error(array, torch_to_numpy(module.state_dict()[name])) < OUTPUT_FLOAT64, name


LARGE_MEANS = {
    "BatchNorm": (lambda: torch.nn.BatchNorm1d(24), lambda rngs: BatchNorm(24, rngs=rngs)),
    "GroupNorm": (lambda: torch.nn.GroupNorm(3, 24), lambda rngs: GroupNorm(3, 24, rngs=rngs)),
    "LayerNorm": (lambda: torch.nn.LayerNorm(24), lambda rngs: LayerNorm(24, epsilon=1e-5, rngs=rngs)),
    "RMSNorm": (lambda: torch.nn.RMSNorm(24, eps=1e-5), lambda rngs: RMSNorm(24, epsilon=1e-5, rngs=rngs)),
}


@pytest.mark.parametrize("mean", [0, 1, 3, 10, 100, 1000])
@pytest.mark.parametrize("kind", LARGE_MEANS)
def test_norms_are_as_accurate_as_pytorchs_where_the_mean_is_large(kind: str, mean: int) -> None:
    reference, make = LARGE_MEANS[kind]
    layout = (0, 2, 1) if kind in ("BatchNorm", "GroupNorm") else (0, 1, 2)  # its own inverse
    for seed in range(5):
        x = (mean + np.random.default_rng(seed).standard_normal((4, 211, 24))).astype(np.float32)
        given = torch.from_numpy(x.transpose(layout).copy())
        single, truth = (
            module(given.to(dtype)).detach().numpy().transpose(layout)
            for module, dtype in ((reference(), torch.float32), (reference().double(), torch.float64))
        )
        ours = np.asarray(nnx.jit(lambda layer, x: layer(x))(make(nnx.Rngs(0)), jnp.array(x)))
        assert relative_error(ours, truth) <= low_limit(relative_error(single, truth), "float32", OUTPUT_FLOOR)


def test_nnxs_batch_norm_would_not_do() -> None:
    x = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    module, other = torch.nn.BatchNorm1d(5, momentum=0.1), nnx.BatchNorm(5, momentum=0.9, rngs=nnx.Rngs(0))
    module(torch.from_numpy(x))
    other(jnp.array(x))
    truth = {name: torch_to_numpy(tensor) for name, tensor in module.state_dict().items()}
    assert relative_error(np.asarray(other.mean[...]), truth["running_mean"]) < 1e-6  # float32
    # Of three values the biased variance is two thirds of the unbiased one, and it counts for a tenth.
    assert relative_error(np.asarray(other.var[...]), truth["running_var"]) > 1e-2


def test_batch_norm_refuses_a_single_value_in_training_as_pytorch_does() -> None:
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        torch.nn.BatchNorm1d(5)(torch.zeros(1, 5))
    layer = BatchNorm(5, rngs=nnx.Rngs(0))
    with pytest.raises(InputError, match="more than one value per channel"):
        layer(jnp.zeros((1, 5)))
    layer.eval()
    assert layer(jnp.zeros((1, 5))).shape == (1, 5)


@pytest.mark.parametrize("key_heads", [1, 3, 6])
def test_attention_is_nnxs_own_without_its_float32_softmax(key_heads: int) -> None:
    random = np.random.default_rng(0)
    with jax.enable_x64(True):
        query = jnp.array(random.standard_normal((2, 5, 6, 7)))
        key, value = (jnp.array(random.standard_normal((2, 11, key_heads, 7))) for _ in range(2))
        mask = jnp.array(random.random((2, 1, 5, 11)) < 0.8)
        keys, values = (jnp.repeat(array, 6 // key_heads, axis=2) for array in (key, value))
        tensors = (torch.from_numpy(np.array(array)).movedim(1, 2) for array in (query, keys, values))
        truth = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=torch.from_numpy(np.array(mask)))
        truth = truth.movedim(1, 2).numpy()
        assert relative_error(np.asarray(attend(query, key, value, mask=mask)), truth) < OUTPUT_FLOAT64
        own = relative_error(np.asarray(nnx.dot_product_attention(query, key, value, mask=mask)), truth)
        assert OUTPUT_FLOAT64 < own < 1e-6


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


@pytest.mark.parametrize("padding_idx", [None, 0, 3, -1])
def test_embedding_of_padding_is_as_pytorchs(padding_idx: int | None) -> None:
    """The row starts from 0 and is looked up like any other, but gets no gradient."""
    fresh = Embedding(11, 3, padding_idx=padding_idx, rngs=nnx.Rngs(0))
    theirs = torch.nn.Embedding(11, 3, padding_idx=padding_idx)
    assert np.array_equal(~np.asarray(fresh.embedding[...]).any(1), (theirs.weight == 0).all(1).numpy())
    random = np.random.default_rng(0)
    table, cotangent = (random.standard_normal(shape).astype(np.float32) for shape in ((11, 3), (2, 5, 3)))
    ids = np.array([[0, 3, 10, 7, 3], [10, 0, 1, 10, 0]])
    layer = torch_to_flax({"weight": table}, fresh)
    theirs.load_state_dict({"weight": torch.from_numpy(table)})
    output = theirs(torch.from_numpy(ids))
    output.backward(torch.from_numpy(cotangent))
    assert theirs.weight.grad is not None
    gradient = nnx.grad(lambda layer: jnp.vdot(layer(jnp.array(ids)), cotangent))(layer).embedding[...]
    np.testing.assert_array_equal(layer(jnp.array(ids)), output.detach())
    np.testing.assert_allclose(gradient, theirs.weight.grad, rtol=1e-6)  # of at most three float32 terms


@pytest.mark.parametrize("wrong", [11, -12])
def test_embedding_refuses_a_padding_row_that_is_not_there(wrong: int) -> None:
    with pytest.raises(InputError, match=f"padding_idx is {wrong}: choose from 0 to 10"):
        Embedding(11, 3, padding_idx=wrong, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("wrong", [11, -1])
def test_embedding_refuses_ids_outside_the_table_as_pytorch_does(wrong: int) -> None:
    with pytest.raises(IndexError):
        torch.nn.Embedding(11, 3)(torch.tensor([0, wrong]))
    with pytest.raises(TokenIdError, match=f"token id {wrong} is outside the vocabulary of 11"):
        Embedding(11, 3, rngs=nnx.Rngs(0))(jnp.array([0, wrong]))


def test_embedding_takes_concrete_ids_within_a_trace() -> None:
    layer, ids = Embedding(11, 3, rngs=nnx.Rngs(0)), jnp.array([7, 2])
    assert np.array_equal(jax.jit(lambda: layer(ids))(), layer(ids))
