"""Cross-entropy over the vocabulary. Twin: `flax_tf/loss.py`."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from torch_ref.language_model import LanguageModel
from torch_ref.recurrent import AttnSeq2Seq, Seq2Seq
from torch_ref.transformer import Transformer


def cross_entropy(
    logits: Float[Tensor, "*B V"], labels: Int[Tensor, "*B"], weights: Float[Tensor, "*B"] | None = None
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """The sum of weight * -log softmax(logits)[label], in nats, and the sum of the weights (each 1 by default).

    Their quotient is the mean over real tokens, also over several batches: the sum of losses by the sum of tokens.
    Computed in float32, or in float64 if the logits are.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(logits.flatten(0, -2), labels.flatten().long(), reduction="none").view(labels.shape)
    weights = torch.ones_like(losses) if weights is None else weights.to(losses.dtype)
    return (weights * losses).sum(), weights.sum()


def linear_cross_entropy(
    classifier: nn.Linear,
    x: Float[Tensor, "B T D"],
    labels: Int[Tensor, "B T"],
    weights: Float[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """`cross_entropy(classifier(x), labels, weights)`. The twin computes it a few positions at a time."""
    return cross_entropy(classifier(x), labels, weights)


def language_model_loss(model: LanguageModel, batch: dict[str, Tensor]) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """The summed loss of the next token at every position of a batch, and how many tokens count.

    A batch holds `inputs` and `labels`, int [B, T], and may hold `weights`, float [B, T].
    """
    x = model.transformer(batch["inputs"])
    return linear_cross_entropy(model.classifier, x, batch["labels"], batch.get("weights"))


def sequence_cross_entropy(
    logits: Float[Tensor, "B T V"], targets: Int[Tensor, "B T"], pad_id: int, label_smoothing: float = 0.0
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """The summed cross-entropy of the targets that are not padding, in nats, and how many these are.

    The quotient is `torch.nn.CrossEntropyLoss(ignore_index=pad_id, label_smoothing=label_smoothing)`.
    """
    loss = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=pad_id, label_smoothing=label_smoothing, reduction="sum"
    )
    return loss, (targets != pad_id).sum(dtype=loss.dtype)


def sequence_loss(
    model: Transformer | Seq2Seq | AttnSeq2Seq, batch: dict[str, Tensor], label_smoothing: float = 0.0
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """The summed loss of the next target token at every position that is not padding, and how many there are.

    A batch holds `source`, int [B, S], and `target`, int [B, T + 1]; the decoder reads target[:, :-1], and its answers
    are target[:, 1:] (seed 002; recurrent decoders are given the answers and shift them themselves).
    """
    source, target = batch["source"], batch["target"]
    # Log probabilities of a recurrent model, which softmax leaves as they are.
    logits = model(source, target[:, :-1]) if isinstance(model, Transformer) else model(source, target[:, 1:])[0]
    return sequence_cross_entropy(logits, target[:, 1:], model.config.pad_id, label_smoothing)
