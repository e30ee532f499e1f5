"""The losses of the models equal PyTorch's, and training holds the logits of a few tokens at a time."""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from models import LANGUAGE_MODEL, TRANSFORMER, ids, reference, twin
from twins import float64, relative_error  # noqa: F401

from flax_tf.kernels.linear_cross_entropy import tokens_at_once
from flax_tf.loss import classifier_loss, language_model_loss, sequence_loss
from flax_tf.parity.tolerances import OUTPUT_FLOAT64
from flax_tf.saving import build
from flax_tf.training.optimizer import build_optimizer
from flax_tf.training.optimizer_config import OptimizerConfig
from flax_tf.training.step import start
from torch_ref import loss as torch_loss

B, T, V = 3, 11, 37
WEIGHTS = np.array([[1.0] * T, [1.0] * 4 + [0.0] * 7, [0.5] * T])


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("weights", "ignore_id", "smoothing"), [(None, 0, 0.1), (WEIGHTS, None, 0.0)])
def test_the_loss_of_a_classifier_is_torchs(tied: bool, weights: Any, ignore_id: int | None, smoothing: float) -> None:
    module = reference(replace(TRANSFORMER, src_vocab_size=V, tgt_vocab_size=V, shared_embeddings=tied)).double()
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((B, T, TRANSFORMER.d_model)), ids(B, T)
    options: Any = {"label_smoothing": smoothing} | ({} if ignore_id is None else {"ignore_id": ignore_id})
    ours = classifier_loss(
        twin(module).fc, jnp.array(x), jnp.array(labels), None if weights is None else jnp.array(weights), **options
    )
    theirs = torch_loss.classifier_loss(
        module.fc, torch.tensor(x), torch.tensor(labels), None if weights is None else torch.tensor(weights), **options
    )
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == np.float64
        assert relative_error(a, b.detach()) <= OUTPUT_FLOAT64


def test_the_mean_is_over_real_tokens_also_across_batches() -> None:
    """The mean of two batches' means would be another number wherever padding differs between them."""
    module = reference(LANGUAGE_MODEL).double()
    tokens = ids(B, T + 1)
    whole = {"inputs": tokens[:, :-1], "labels": tokens[:, 1:], "weights": WEIGHTS}
    parts = [{name: jnp.array(array[row]) for name, array in whole.items()} for row in (slice(0, 1), slice(1, 2))]
    sums = [language_model_loss(twin(module), part) for part in parts]
    mean = sum(total for total, _ in sums) / sum(count for _, count in sums)
    real = WEIGHTS[:2] > 0
    logits = module(torch.tensor(tokens[:2, :-1]))[torch.tensor(real)]
    truth = torch.nn.functional.cross_entropy(logits, torch.tensor(tokens[:2, 1:][real]))
    assert relative_error(mean, truth.detach()) <= OUTPUT_FLOAT64


def test_language_model_loss_is_torchs() -> None:
    module = reference(LANGUAGE_MODEL).double()
    tokens = ids(B, T + 1)
    batch = {"inputs": jnp.array(tokens[:, :-1]), "labels": jnp.array(tokens[:, 1:]), "weights": jnp.array(WEIGHTS)}
    ours = language_model_loss(twin(module), batch)
    torch_batch = {name: torch.tensor(np.asarray(array)) for name, array in batch.items()}
    theirs = torch_loss.language_model_loss(module, torch_batch)
    for a, b in zip(ours, theirs, strict=True):
        assert relative_error(a, b.detach()) <= OUTPUT_FLOAT64


def plain_language_model_loss(model, batch, rngs=None):
    logits = model(batch["inputs"], rngs=rngs)
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["labels"][..., None], axis=-1)
    return losses.sum(), jnp.full((), losses.size, losses.dtype)


def plain_sequence_loss(model, batch, rngs=None, smoothing=0.1):
    answers = batch["target"][:, 1:]
    log_probs = jax.nn.log_softmax(model(batch["source"], batch["target"][:, :-1], rngs=rngs))
    at_label = jnp.take_along_axis(log_probs, answers[..., None], axis=-1)[..., 0]
    losses = -(1 - smoothing) * at_label - smoothing * log_probs.mean(axis=-1)
    real = answers != model.config.pad_id
    return jnp.where(real, losses, 0).sum(), real.sum(dtype=losses.dtype)


def smoothed_sequence_loss(model, batch, rngs=None):
    return sequence_loss(model, batch, 0.1, rngs=rngs)


def language_batch(rng, rows: int = B, length: int = T) -> dict[str, np.ndarray]:
    tokens = rng.integers(V, size=(rows, length + 1))
    return {"inputs": tokens[:, :-1], "labels": tokens[:, 1:]}


def pair_batch(rng, rows: int = B, length: int = T) -> dict[str, np.ndarray]:
    batch = {"source": rng.integers(1, 37, size=(rows, 7)), "target": rng.integers(1, 31, size=(rows, length + 1))}
    batch["target"][1, 4:] = 0
    return batch


@pytest.mark.parametrize(
    ("config", "losses", "batch"),
    [
        (LANGUAGE_MODEL, (language_model_loss, plain_language_model_loss), language_batch),
        (TRANSFORMER, (smoothed_sequence_loss, plain_sequence_loss), pair_batch),
    ],
    ids=["language model", "transformer"],
)
def test_fifty_steps_have_the_losses_of_the_plain_form(config, losses, batch) -> None:
    """Dropout included, which draws the same masks in both."""
    runs = []
    for loss in losses:
        model = twin(reference(replace(config, dropout=0.1)).double())
        state, steps = start(model, build_optimizer(OptimizerConfig(learning_rate=1e-3), 50), loss, seed=0)
        rng, sums = np.random.default_rng(0), []
        for _ in range(50):
            before = float(state.loss_sum)
            state = steps.train(state, batch(rng))
            sums.append(float(state.loss_sum) - before)
        runs.append(sums)
    # float64: roundings of 1e-16, which 50 steps of Adam at a rate of 1e-3 may make larger.
    np.testing.assert_allclose(*runs, rtol=1e-10)


@pytest.mark.parametrize("system", ["language model", "transformer"])
def test_training_and_evaluation_hold_no_logits_of_all_tokens(system: str) -> None:
    vocab_size, rows, length = 997, 8, 128  # as many tokens as 4 times those at once
    rng = np.random.default_rng(0)
    if system == "language model":
        config: Any = replace(LANGUAGE_MODEL, vocab_size=vocab_size, max_seq_length=length)
        losses, batch = (language_model_loss, plain_language_model_loss), language_batch(rng, rows, length)
    else:
        config = replace(TRANSFORMER, tgt_vocab_size=vocab_size, max_seq_length=length)
        losses, batch = (smoothed_sequence_loss, plain_sequence_loss), pair_batch(rng, rows, length)
    most = []
    for loss in losses:
        state, steps = start(build(config), build_optimizer(OptimizerConfig(), 50), loss, seed=0)
        for step, of in ((steps.train, state), (steps.evaluate, state.params)):
            text = step.lower(of, batch).compile().as_text()
            with_vocabulary = re.findall(rf"\w+\[([\d,]*)\b{vocab_size}\b([\d,]*)\]", text)
            tokens = [
                int(np.prod([int(size) for size in (a + b).strip(",").replace(",,", ",").split(",") if size]))
                for a, b in with_vocabulary
            ]
            most.append(max(tokens))
    fused, plain = most[:2], most[2:]
    assert max(fused) <= tokens_at_once()
    assert min(plain) >= rows * length
