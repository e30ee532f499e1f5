"""Cross-entropy over the vocabulary. Twin: `torch_ref/loss.py`."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from flax_tf.language_model import LanguageModel
from flax_tf.layers import Linear
from flax_tf.recurrent import AttnSeq2Seq, Seq2Seq
from flax_tf.transformer import Transformer

LOGITS_AT_ONCE = 1 << 25  # 128 MiB of float32; the (B, T, V) logits of a large vocabulary are never held whole


def cross_entropy(
    logits: Float[Array, "*B V"], labels: Int[Array, "*B"], weights: Float[Array, "*B"] | None = None
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The sum of weight * -log softmax(logits)[label], in nats, and the sum of the weights (each 1 by default).

    Their quotient is the mean over real tokens, also over several batches: the sum of losses by the sum of tokens.
    Computed in float32, or in float64 if the logits are.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    at_label = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - at_label  # (*B)
    weights = jnp.ones_like(losses) if weights is None else weights.astype(losses.dtype)
    return (weights * losses).sum(), weights.sum()


def linear_cross_entropy(
    classifier: Linear,
    x: Float[Array, "B T D"],
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"] | None = None,
    logits_at_once: int = LOGITS_AT_ONCE,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """`cross_entropy(classifier(x), labels, weights)`, a few positions at a time.

    At most `logits_at_once` logits (or those of one position of the batch, if that is more) are held at any moment;
    the backward pass computes them again.
    """
    B, T = labels.shape
    length = max(1, logits_at_once // (B * classifier.out_features))
    if length >= T:
        return cross_entropy(classifier(x), labels, weights)
    if weights is None:
        weights = jnp.ones((B, T), x.dtype)
    # The batch axis stays whole, so that it may be sharded; positions that fill the last chunk weigh nothing.
    padded = -(-T // length) * length

    def chunks(array: Array) -> Array:
        array = jnp.pad(array, [(0, 0), (0, padded - T)] + [(0, 0)] * (array.ndim - 2))
        return jnp.moveaxis(array.reshape(B, -1, length, *array.shape[2:]), 1, 0)  # (chunks, B, length, ...)

    @jax.checkpoint
    def step(total, chunk):
        x, labels, weights = chunk
        return total + cross_entropy(classifier(x), labels, weights)[0], None

    start = jnp.zeros((), jnp.promote_types(x.dtype, jnp.float32))
    total, _ = jax.lax.scan(step, start, (chunks(x), chunks(labels), chunks(weights)))
    return total, weights.astype(total.dtype).sum()


def language_model_loss(
    model: LanguageModel, batch: dict[str, Array], **kwargs
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The summed loss of the next token at every position of a batch, and how many tokens count.

    A batch holds `inputs` and `labels`, int [B, T], and may hold `weights`, float [B, T]. Keyword arguments (`rngs`)
    go to the backbone.
    """
    x = model.transformer(batch["inputs"], **kwargs)
    return linear_cross_entropy(model.classifier, x, batch["labels"], batch.get("weights"))


def sequence_cross_entropy(
    logits: Float[Array, "B T V"], targets: Int[Array, "B T"], pad_id: int, label_smoothing: float = 0.0
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The summed cross-entropy of the targets that are not padding, in nats, and how many these are.

    The quotient is `torch.nn.CrossEntropyLoss(ignore_index=pad_id, label_smoothing=label_smoothing)`: of the label
    a part `label_smoothing` is spread evenly over all V classes (Szegedy et al. 2016). Log probabilities may stand for
    the logits. Computed in float32, or in float64 if the logits are.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    V = logits.shape[-1]
    # One pass over the vocabulary, where a gather's gradient would take another array of the logits' size.
    labels = (1 - label_smoothing) * jax.nn.one_hot(targets, V, dtype=logits.dtype) + label_smoothing / V  # (B, T, V)
    losses = jax.nn.logsumexp(logits, axis=-1) - (labels * logits).sum(axis=-1)  # (B, T)
    real = targets != pad_id
    return jnp.where(real, losses, 0).sum(), real.sum(dtype=losses.dtype)


def sequence_loss(
    model: Transformer | Seq2Seq | AttnSeq2Seq, batch: dict[str, Array], label_smoothing: float = 0.0, **kwargs
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The summed loss of the next target token at every position that is not padding, and how many there are.

    A batch holds `source`, int [B, S], and `target`, int [B, T + 1], whose first tokens no loss asks for: the decoder
    reads [:, :-1], and its answers are [:, 1:] (seed 002; recurrent decoders are given the answers and shift them
    themselves). Keyword arguments (`rngs`) go to the model.
    """
    source, target = batch["source"], batch["target"]
    if isinstance(model, Transformer):
        logits = model(source, target[:, :-1], **kwargs)  # (B, T, V)
    else:  # log probabilities, which softmax leaves as they are
        logits, *_ = model(source, target[:, 1:], **kwargs)  # (B, T, V)
    return sequence_cross_entropy(logits, target[:, 1:], model.config.pad_id, label_smoothing)
