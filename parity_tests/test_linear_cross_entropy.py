"""The fused linear layer and cross-entropy is the plain one, in every gradient, and holds no logits of all tokens."""

import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_properties import examples
from twins import float64, quick_jit  # noqa: F401

from flax_tf.kernels.linear_cross_entropy import linear_cross_entropy, tokens_at_once
from flax_tf.parity.tolerances import relative_error

# Sums of some hundred terms in float64, in another order.
SAME = 1e-12


def plain(x, kernel, bias, labels, weights, *, ignore_id, label_smoothing):
    """The definition, with all the logits."""
    logits = x @ kernel if bias is None else x @ kernel + bias[None, None]
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    real = labels != (-1 if ignore_id is None else ignore_id)
    target = jax.nn.one_hot(labels, kernel.shape[1]) * (1 - label_smoothing) + label_smoothing / kernel.shape[1]
    weights = real if weights is None else weights * real
    return -(weights[..., None] * target * log_probs).sum(), weights.sum(dtype=log_probs.dtype)


def case(seed: int, B: int, T: int, D: int, V: int, biased: bool, weighted: bool, dtype: Any = np.float64) -> tuple:
    rng = np.random.default_rng(seed)
    x, kernel, bias = rng.standard_normal((B, T, D)), rng.standard_normal((D, V)) * 2, rng.standard_normal(V)
    labels, weights = rng.integers(V, size=(B, T)), rng.random((B, T))
    return (
        *(jnp.array(array, dtype) for array in (x, kernel)),
        jnp.array(bias, dtype) if biased else None,
        jnp.array(labels),
        jnp.array(weights, dtype) if weighted else None,
    )


def value_and_gradients(function, arguments: tuple, **options: Any):
    """Of three times the mean, so that what is scaled backwards is not 1, for all that has a gradient."""
    wrt = tuple(i for i in (0, 1, 2, 4) if arguments[i] is not None)

    def mean(*arguments):
        total, count = function(*arguments, **options)
        return 3 * total / count, count

    return quick_jit(jax.value_and_grad(mean, wrt, has_aux=True))(*arguments)


@examples(16)
@given(
    st.integers(1, 5), st.integers(1, 300), st.integers(1, 7), st.integers(2, 43), st.booleans(), st.booleans(),
    st.sampled_from([None, 1, -100]), st.sampled_from([0.0, 0.1, 1.0]),
)  # fmt: skip
def test_value_and_gradients_are_those_of_the_plain_form(B, T, D, V, biased, weighted, ignore_id, smoothing) -> None:
    arguments = case(B * T, B, T, D, V, biased, weighted)
    labels = arguments[3].at[0, 0].set(0)  # one token is real
    if ignore_id == -100:
        labels = labels.at[:, 1::3].set(-100)
    arguments = (*arguments[:3], labels, arguments[4])
    options = {"ignore_id": ignore_id, "label_smoothing": smoothing}
    truth, truth_gradients = value_and_gradients(plain, arguments, **options)
    ours, gradients = value_and_gradients(linear_cross_entropy, arguments, **options)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(truth), strict=True):
        assert relative_error(np.asarray(a), np.asarray(b)) <= SAME
    for a, b in zip(gradients, truth_gradients, strict=True):
        # Where one class takes all, what is left of a gradient is the rounding of the others.
        assert np.linalg.norm(a - b) <= SAME * max(1, np.linalg.norm(b))
    total, count = linear_cross_entropy(*arguments, **options)
    assert float(3 * total / count) == pytest.approx(float(ours[0]), rel=SAME)  # also where no gradient is asked for


@pytest.mark.parametrize("B", [tokens_at_once() - 1, tokens_at_once() + 1])
def test_a_batch_of_more_sequences_than_tokens_at_once_is_computed_too(B: int) -> None:
    arguments = case(0, B, 3, 5, 7, True, True)
    options = {"ignore_id": None, "label_smoothing": 0.1}
    truth = value_and_gradients(plain, arguments, **options)
    ours = value_and_gradients(linear_cross_entropy, arguments, **options)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(truth), strict=True):
        assert relative_error(np.asarray(a), np.asarray(b)) <= SAME


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignore_id", [-100, 0])
def test_it_is_pytorchs(smoothing: float, ignore_id: int) -> None:
    x, kernel, bias, labels, _ = case(0, 3, 211, 5, 37, True, False)
    labels = labels.at[1, 7:].set(ignore_id)
    tensors = [torch.tensor(np.asarray(array), requires_grad=True) for array in (x, kernel, bias)]
    criterion = torch.nn.CrossEntropyLoss(ignore_index=ignore_id, label_smoothing=smoothing)
    logits = tensors[0] @ tensors[1] + tensors[2]
    truth = criterion(logits.flatten(0, 1), torch.tensor(np.asarray(labels)).flatten())
    truth.backward()
    options = {"ignore_id": ignore_id, "label_smoothing": smoothing}
    (mean, count), gradients = value_and_gradients(linear_cross_entropy, (x, kernel, bias, labels, None), **options)
    assert float(mean) == pytest.approx(3 * truth.item(), rel=SAME)
    assert int(count) == int((labels != ignore_id).sum())
    for gradient, tensor in zip(gradients, tensors, strict=True):
        assert tensor.grad is not None
        assert relative_error(np.asarray(gradient), 3 * tensor.grad.numpy()) <= SAME


def test_a_tied_kernel_is_given_transposed() -> None:
    x, kernel, bias, labels, _ = case(0, 3, 11, 5, 37, True, False)
    embedding = kernel.T

    def loss(embedding, function):
        return function(x, embedding.T, bias, labels, None, ignore_id=None, label_smoothing=0.0)[0]

    truth, ours = (jax.grad(loss)(embedding, function) for function in (plain, linear_cross_entropy))
    assert relative_error(np.asarray(ours), np.asarray(truth)) <= SAME


def test_low_precision_is_summed_in_float32() -> None:
    arguments = case(0, 3, 211, 16, 499, True, True, jnp.bfloat16)
    options = {"ignore_id": None, "label_smoothing": 0.1}
    (ours, count), gradients = value_and_gradients(linear_cross_entropy, arguments, **options)
    assert ours.dtype == count.dtype == jnp.float32
    exact = tuple(array.astype(np.float64) if array.dtype == jnp.bfloat16 else array for array in arguments)
    (truth, _), truth_gradients = value_and_gradients(plain, exact, **options)
    # Products of the bfloat16 values are exact in float32; its sums of 633 losses are good to some 1e-7.
    assert float(ours) == pytest.approx(float(truth), rel=1e-6)
    for gradient, truth_gradient, argument in zip(
        gradients, truth_gradients, (*arguments[:3], arguments[4]), strict=True
    ):
        assert gradient.dtype == argument.dtype
        # Exponentials and what is handed back are rounded to 8 bits; sums in bfloat16 would lose a digit more.
        assert relative_error(np.asarray(gradient, np.float64), np.asarray(truth_gradient)) <= 2**-8


def test_large_logits_do_not_overflow() -> None:
    x, kernel, bias, labels, _ = case(0, 2, 3, 5, 7, True, False)
    (mean, _), gradients = value_and_gradients(
        linear_cross_entropy, (x * 1e4, kernel, bias, labels, None), ignore_id=None, label_smoothing=0.0
    )
    assert np.isfinite(mean) and all(np.isfinite(gradient).all() for gradient in gradients)


def test_a_large_vocabulary_does_not_overflow_float16() -> None:
    V = 70_001  # a sum of exponentials may reach it, and float16 ends at 65,504
    rng = np.random.default_rng(0)
    x, kernel = rng.standard_normal((2, 3, 5)) / 8, rng.standard_normal((5, V)) / 8
    x, kernel = (jnp.array(array, jnp.float16) for array in (x, kernel))
    arguments = (x, kernel, None, jnp.array(rng.integers(V, size=(2, 3))), None)
    options = {"ignore_id": None, "label_smoothing": 0.0}
    _, gradients = value_and_gradients(linear_cross_entropy, arguments, **options)
    exact = tuple(None if array is None else array.astype(np.float64) for array in arguments[:2])
    _, truth = value_and_gradients(plain, (*exact, *arguments[2:]), **options)
    for gradient, true in zip(gradients, truth, strict=True):
        # Most entries of the kernel's gradient are below float16's smallest normal number, 6e-5.
        assert relative_error(np.asarray(gradient, np.float64), np.asarray(true)) <= 2**-6


@pytest.mark.parametrize(("B", "T"), [(0, 3), (2, 0)])
def test_no_tokens_have_no_loss(B: int, T: int) -> None:
    x, kernel, bias, labels, _ = case(0, B, T, 5, 7, True, False)
    total, count = linear_cross_entropy(x, kernel, bias, labels)
    gradient = jax.grad(lambda kernel: linear_cross_entropy(x, kernel, bias, labels)[0])(kernel)
    assert (float(total), float(count), float(abs(gradient).max())) == (0, 0, 0)


def largest_array(function, *arguments: Any) -> int:
    """How many values the largest array of the compiled program has."""
    text = jax.jit(function).lower(*arguments).compile().as_text()
    shapes = re.findall(r"\w+\[([\d,]+)\]", text)
    return max(int(np.prod([int(size) for size in shape.split(",")])) for shape in shapes)


def test_no_array_has_the_logits_of_all_tokens() -> None:
    B, T, D, V = 4, 509, 5, 251
    x, kernel, bias, labels, _ = case(0, B, T, D, V, True, False)
    options: Any = {"ignore_id": 0, "label_smoothing": 0.1}

    def evaluation(function):
        return lambda x, kernel, bias: function(x, kernel, bias, labels, None, **options)[0]

    for function, most in ((linear_cross_entropy, tokens_at_once() * V), (plain, None)):
        for of_inputs in (evaluation(function), jax.grad(evaluation(function), (0, 1, 2))):
            found = largest_array(of_inputs, x, kernel, bias)
            assert found <= most if most else found >= B * T * V


def test_over_devices_it_is_the_same_and_the_tokens_stay_where_they_are() -> None:
    """Needs more devices than a test process has."""
    code = """
import re
import jax, jax.numpy as jnp, numpy as np
from flax_tf.kernels.linear_cross_entropy import linear_cross_entropy
from flax_tf.training.sharding import data_mesh, replicate, shard

B, T, D, V = 56, 13, 5, 37
rng = np.random.default_rng(0)
x, labels = rng.standard_normal((B, T, D)), rng.integers(V, size=(B, T))
kernel, bias = rng.standard_normal((D, V)), rng.standard_normal(V)
function = jax.jit(jax.value_and_grad(lambda x, kernel, bias: linear_cross_entropy(
    x, kernel, bias, labels, ignore_id=3, label_smoothing=0.1)[0], (0, 1, 2)))
mesh = data_mesh(B)
assert mesh.size == 8
parts = shard(mesh, x), replicate(mesh, kernel), replicate(mesh, bias)
for ours, truth in zip(*map(jax.tree.leaves, (function(*parts), function(x, kernel, bias))), strict=True):
    # The contract: a few hundred roundings of 1e-16.
    assert np.linalg.norm(np.asarray(ours) - np.asarray(truth)) <= 1e-12 * np.linalg.norm(truth)
assert function(*parts)[1][0].sharding.is_equivalent_to(parts[0].sharding, 3)
text = function.lower(*parts).compile().as_text()
assert "all-reduce" in text and not re.search("all-gather|all-to-all|collective-permute", text)
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=flags, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
