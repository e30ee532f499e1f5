"""The loss equals PyTorch's, also where it is computed a few positions at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from models import LANGUAGE_MODEL, ids, reference, twin

from flax_tf.layers import Linear
from flax_tf.loss import cross_entropy, language_model_loss, linear_cross_entropy
from flax_tf.parity.tolerances import OUTPUT_FLOAT64, relative_error
from torch_ref import loss as torch_loss

B, T, D, V = 3, 11, 5, 37
RNG = np.random.default_rng(0)
LOGITS = RNG.standard_normal((B, T, V)) * 5
LABELS = jnp.array(RNG.integers(V, size=(B, T)), jnp.int32)
WEIGHTS = np.array([[1.0] * T, [1.0] * 4 + [0.0] * 7, [0.5] * T])


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["all tokens", "weighted"])
def test_cross_entropy_is_torchs(weights: np.ndarray | None) -> None:
    with jax.enable_x64(True):
        ours = cross_entropy(jnp.array(LOGITS), LABELS, None if weights is None else jnp.array(weights))
    theirs = torch_loss.cross_entropy(
        torch.tensor(LOGITS), torch.tensor(np.array(LABELS)), None if weights is None else torch.tensor(weights)
    )
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == np.float64
        assert relative_error(np.asarray(a), b.numpy()) <= OUTPUT_FLOAT64


def test_the_mean_is_over_real_tokens_also_across_batches() -> None:
    """The mean of two batches' means would be another number wherever padding differs between them."""
    rows = (slice(0, 1), slice(1, 2))
    parts = [cross_entropy(jnp.array(LOGITS[row]), LABELS[row], jnp.array(WEIGHTS[row])) for row in rows]
    mean = sum(total for total, _ in parts) / sum(count for _, count in parts)
    real = WEIGHTS[:2] > 0
    truth = torch.nn.functional.cross_entropy(
        torch.tensor(LOGITS[:2][real]), torch.tensor(np.array(LABELS)[:2][real]).long()
    )
    # float32 has 24 bits: the sum of 15 losses is right to a few units of the last place.
    np.testing.assert_allclose(mean, truth, rtol=1e-6)


def test_low_precision_logits_are_summed_in_float32() -> None:
    logits = jnp.array(LOGITS, jnp.bfloat16)
    total, count = cross_entropy(logits, LABELS)
    assert total.dtype == count.dtype == jnp.float32
    with jax.enable_x64(True):
        truth, _ = cross_entropy(jnp.array(np.asarray(logits, np.float64)), LABELS)
    # float32 over the 33 losses of the same rounded logits; bfloat16 sums would be wrong in the third digit.
    np.testing.assert_allclose(total, truth, rtol=1e-6)


@pytest.mark.parametrize("positions", [1, 2, 4, 11, 100])
@pytest.mark.parametrize("weighted", [False, True])
def test_in_chunks_it_is_the_same_loss_with_the_same_gradients(positions: int, weighted: bool) -> None:
    with jax.enable_x64(True):
        classifier = twin(reference(LANGUAGE_MODEL).double()).classifier
        graph, _ = nnx.split(classifier)
        x = jnp.array(RNG.standard_normal((B, T, LANGUAGE_MODEL.d_model)))
        weights = jnp.array(WEIGHTS) if weighted else None

        def plain(kernel, bias, x, weights):
            total, count = cross_entropy(x @ kernel + bias.reshape(1, 1, -1), LABELS, weights)
            return total / count

        def chunked(kernel, bias, x, weights):
            layer = nnx.merge(graph, nnx.State({"kernel": nnx.Param(kernel), "bias": nnx.Param(bias)}))
            total, count = linear_cross_entropy(layer, x, LABELS, weights, B * V * positions)
            return total / count

        arguments = (classifier.kernel[...], classifier.bias[...], x, weights)
        wrt = (0, 1, 2, 3) if weighted else (0, 1, 2)
        truth, truth_grads = jax.value_and_grad(plain, wrt)(*arguments)
        value, grads = jax.value_and_grad(chunked, wrt)(*arguments)
        assert relative_error(np.asarray(value), np.asarray(truth)) <= OUTPUT_FLOAT64
        for grad, truth_grad in zip(grads, truth_grads, strict=True):
            assert relative_error(np.asarray(grad), np.asarray(truth_grad)) <= OUTPUT_FLOAT64


def test_the_logits_of_a_large_vocabulary_are_never_held_whole() -> None:
    batch, length, width, vocab_size = 8, 64, 16, 30_522
    classifier = Linear(width, vocab_size, rngs=nnx.Rngs(0))
    x, labels = jnp.ones((batch, length, width)), jnp.zeros((batch, length), jnp.int32)

    def loss(x):
        return linear_cross_entropy(classifier, x, labels, None, batch * vocab_size * 4)[0]

    memory = jax.jit(jax.grad(loss)).lower(x).compile().memory_analysis()
    whole = batch * length * vocab_size * 4
    # 4 of 64 positions at a time, with a few copies of theirs in flight.
    assert memory.temp_size_in_bytes < whole / 2


def test_language_model_loss_and_gradients_are_torchs() -> None:
    module = reference(LANGUAGE_MODEL).double()
    tokens = ids(3, 12)
    with jax.enable_x64(True):
        model = twin(module)
        batch = {"inputs": jnp.array(tokens[:, :-1]), "labels": jnp.array(tokens[:, 1:]), "weights": jnp.array(WEIGHTS)}
        ours = language_model_loss(model, batch)
    torch_batch = {name: torch.tensor(np.asarray(array)) for name, array in batch.items()}
    theirs = torch_loss.language_model_loss(module, torch_batch)
    for a, b in zip(ours, theirs, strict=True):
        assert relative_error(np.asarray(a), b.detach().numpy()) <= OUTPUT_FLOAT64
