"""Small models of sequence to sequence with tokenizers, in float64."""

import functools
from pathlib import Path
from typing import Any

from twins import twins

from flax_tf.config import AttnRNNConfig, RNNConfig, TransformerConfig
from flax_tf.data.tokenizer import char_tokenizer
from flax_tf.saving import save_pretrained

SPECIAL = ["<pad>", "<s>", "</s>"]
SOURCE = char_tokenizer(["abcdefghi "], SPECIAL)  # 13 ids
TARGET = char_tokenizer(["abcdefgh"], SPECIAL)  # 11 ids

TRANSFORMER = TransformerConfig(
    src_vocab_size=13, tgt_vocab_size=11, d_model=10, num_heads=2, num_layers=1, d_ff=17, max_seq_length=19
)
PLAIN = RNNConfig(src_vocab_size=13, tgt_vocab_size=11, hidden_size=7, max_length=9, start_id=1, end_id=2)
ATTENTION = AttnRNNConfig(
    src_vocab_size=13, tgt_vocab_size=11, hidden_size=7, max_length=9, start_id=1, end_id=2, mask_source=True
)


@functools.cache
def translator(config: Any) -> tuple[Any, Any]:
    """Twins whose outputs differ from source to source."""
    scale, seed = {"transformer": (2.0, 3), "rnn": (2.0, 1), "attn_rnn": (3.0, 0)}[config.arch]
    return twins(config, scale, seed)


def saved(config: Any, path: Path) -> Path:
    save_pretrained(translator(config)[1], path, SOURCE, TARGET)
    return path
