"""Cross-entropy over the vocabulary. Twin: `torch_ref/loss.py`."""

from jaxtyping import Array, Float, Int

from flax_tf.kernels.linear_cross_entropy import linear_cross_entropy
from flax_tf.language_model import LanguageModel
from flax_tf.layers import Linear, TiedLinear
from flax_tf.recurrent import AttnSeq2Seq, Seq2Seq
from flax_tf.transformer import Transformer


def classifier_loss(
    classifier: Linear | TiedLinear,
    x: Float[Array, "B T D"],
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"] | None = None,
    *,
    ignore_id: int | None = None,
    label_smoothing: float = 0.0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The summed cross-entropy of `classifier(x)` and the sum of the weights, by `kernels.linear_cross_entropy`."""
    kernel = classifier.weight[...].T if isinstance(classifier, TiedLinear) else classifier.kernel[...]
    bias = None if classifier.bias is None else classifier.bias[...]
    return linear_cross_entropy(
        x, kernel, bias, labels, weights, ignore_id=ignore_id, label_smoothing=label_smoothing
    )  # fmt: skip


def language_model_loss(
    model: LanguageModel, batch: dict[str, Array], **kwargs
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The summed loss of the next token at every position of a batch, and how many tokens count.

    A batch holds `inputs` and `labels`, int [B, T], and may hold `weights`, float [B, T]. Keyword arguments (`rngs`)
    go to the backbone.
    """
    x = model.transformer(batch["inputs"], **kwargs)
    return classifier_loss(model.classifier, x, batch["labels"], batch.get("weights"))


def sequence_loss(
    model: Transformer | Seq2Seq | AttnSeq2Seq, batch: dict[str, Array], label_smoothing: float = 0.0, **kwargs
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The summed loss of the next target token at every position that is not padding, and how many there are.

    A batch holds `source`, int [B, S], and `target`, int [B, T + 1], whose first tokens no loss asks for: the decoder
    reads [:, :-1], and its answers are [:, 1:] (seed 002; recurrent decoders are given the answers and shift them
    themselves). Keyword arguments (`rngs`) go to the model.
    """
    source, inputs, answers = batch["source"], batch["target"][:, :-1], batch["target"][:, 1:]
    if isinstance(model, Transformer):
        classifier, x = model.fc, model.hidden_states(source, inputs, **kwargs)  # (B, T, D)
    else:
        classifier, x = model.decoder.out, model.hidden_states(source, answers, **kwargs)  # (B, T, H)
    return classifier_loss(classifier, x, answers, ignore_id=model.config.pad_id, label_smoothing=label_smoothing)
