"""The random data of seed 002: nothing to learn but by heart, and so a test of nothing but the training itself."""

import numpy as np
from jaxtyping import Int

from flax_tf.config import Seq2SeqConfig


def random_batch(config: Seq2SeqConfig, rows: int, length: int, seed: int) -> dict[str, Int[np.ndarray, "B T"]]:
    """The one batch there is: "source" and "target", int32 [rows, length], of every id but the pad id.

    Seed 002: `torch.randint(1, vocab_size, (64, max_seq_length))` for each side, with neither start nor end.
    """
    rng = np.random.default_rng(seed)

    def ids(size: int) -> np.ndarray:
        return rng.choice(np.setdiff1d(np.arange(size, dtype=np.int32), config.pad_id), (rows, length))

    return {"source": ids(config.src_token_count()), "target": ids(config.tgt_token_count())}
