"""How good translations are: each score takes the translations and their targets, and gives its values by name."""

from collections.abc import Sequence

from flax_tf.errors import InputError


class ExactMatch:
    """The percentage of translations that are their targets in every character."""

    signature = ""

    def __call__(self, texts: Sequence[str], targets: Sequence[str]) -> dict[str, float]:
        hits = sum(text == target for text, target in zip(texts, targets, strict=True))
        return {"exact_match": 100 * hits / len(targets)}


class Bleu:
    """BLEU (Papineni et al. 2002) and chrF (Popović 2015) of the whole corpus, by sacrebleu with its defaults.

    Raises InputError, when made, if sacrebleu is not installed.
    """

    def __init__(self) -> None:
        try:
            from sacrebleu.metrics import BLEU, CHRF
        except ModuleNotFoundError:
            raise InputError(
                "decoding.metric bleu needs sacrebleu: pip install 'flax-tf[eval]', or choose another decoding.metric"
            ) from None
        self._metrics = {"bleu": BLEU(), "chrf": CHRF()}

    def __call__(self, texts: Sequence[str], targets: Sequence[str]) -> dict[str, float]:
        return {name: metric.corpus_score(texts, [targets]).score for name, metric in self._metrics.items()}

    @property
    def signature(self) -> str:
        """The settings of both, as sacrebleu writes them to be reported; to be read after a first score."""
        return "; ".join(f"{name} {metric.get_signature()}" for name, metric in self._metrics.items())


SCORES = {"exact_match": ExactMatch, "bleu": Bleu}
