"""Cross-entropy over the vocabulary. Twin: `flax_tf/loss.py`."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from torch_ref.language_model import LanguageModel
from torch_ref.recurrent import AttnSeq2Seq, Seq2Seq
from torch_ref.transformer import Transformer


def classifier_loss(
    classifier: nn.Linear,
    x: Float[Tensor, "B T D"],
    labels: Int[Tensor, "B T"],
    weights: Float[Tensor, "B T"] | None = None,
    *,
    ignore_id: int = -100,
    label_smoothing: float = 0.0,
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """The sum of weight * -log softmax(classifier(x))[label], in nats, and the sum of the weights (each 1 by default).

    Labels equal to `ignore_id` weigh nothing. The quotient is the mean over real tokens, also over several batches: the
    sum of losses by the sum of weights. Computed in float32, or in float64 if x is. The twin never holds the logits.
    """
    logits = classifier(x)  # (B, T, V)
    losses = F.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1), labels.flatten().long(),
        ignore_index=ignore_id, label_smoothing=label_smoothing, reduction="none",
    ).view(labels.shape)  # fmt: skip
    weights = torch.ones_like(losses) if weights is None else weights.to(losses.dtype)
    return (weights * losses).sum(), (weights * (labels != ignore_id)).sum()


def language_model_loss(model: LanguageModel, batch: dict[str, Tensor]) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """The summed loss of the next token at every position of a batch, and how many tokens count.

    A batch holds `inputs` and `labels`, int [B, T], and may hold `weights`, float [B, T].
    """
    x = model.transformer(batch["inputs"])
    return classifier_loss(model.classifier, x, batch["labels"], batch.get("weights"))


def sequence_loss(
    model: Transformer | Seq2Seq | AttnSeq2Seq, batch: dict[str, Tensor], label_smoothing: float = 0.0
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """The summed loss of the next target token at every position that is not padding, and how many there are.

    A batch holds `source`, int [B, S], and `target`, int [B, T + 1]; the decoder reads target[:, :-1], and its answers
    are target[:, 1:] (seed 002; recurrent decoders are given the answers and shift them themselves).
    """
    source, inputs, answers = batch["source"], batch["target"][:, :-1], batch["target"][:, 1:]
    if isinstance(model, Transformer):
        classifier, x = model.fc, model.hidden_states(source, inputs)  # (B, T, D)
    else:
        classifier, x = model.decoder.out, model.hidden_states(source, answers)  # (B, T, H)
    return classifier_loss(classifier, x, answers, ignore_id=model.config.pad_id, label_smoothing=label_smoothing)
