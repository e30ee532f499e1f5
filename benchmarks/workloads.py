"""What is run, in numbers that both sides share. Imports neither framework."""

from dataclasses import dataclass

from flax_tf.config import BlockConfig, LanguageModelConfig, TransformerConfig
from flax_tf.training.optimizer_config import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The shapes of every row."""

    block: BlockConfig
    block_batch: tuple[int, int]
    """Sequences and positions (B, T) of the block's input."""
    language_model: LanguageModelConfig
    transformer: TransformerConfig
    prompt: int
    """Tokens of a prompt."""
    new_tokens: int
    """Tokens that are generated after it."""
    host: LanguageModelConfig
    """So narrow that a step is host work and nothing else, with as many parameters as the language model has."""
    host_steps: int
    checkpoint: LanguageModelConfig
    seconds: float
    """How long steps are timed for in each process; at least three are."""


FULL = Sizes(
    block=BlockConfig(),
    block_batch=(8, 128),
    language_model=LanguageModelConfig(),
    transformer=TransformerConfig(),
    prompt=16,
    new_tokens=100,
    host=LanguageModelConfig(vocab_size=8, max_seq_length=4, d_model=4),
    host_steps=100,
    checkpoint=LanguageModelConfig(vocab_size=32_000, max_seq_length=256, d_model=1024, num_layers=15),  # 1 GB
    seconds=2.0,
)

TINY = Sizes(
    block=BlockConfig(d_model=8, num_heads=2),
    block_batch=(2, 5),
    language_model=LanguageModelConfig(vocab_size=37, max_seq_length=16, d_model=8, num_heads=2, num_layers=2),
    transformer=TransformerConfig(
        src_vocab_size=41, tgt_vocab_size=37, d_model=8, num_heads=2, num_layers=1, d_ff=16, max_seq_length=11
    ),
    prompt=3,
    new_tokens=5,
    host=LanguageModelConfig(vocab_size=8, max_seq_length=4, d_model=4, num_layers=1),
    host_steps=3,
    checkpoint=LanguageModelConfig(vocab_size=37, max_seq_length=16, d_model=8, num_heads=2, num_layers=2),
    seconds=0.0,
)

# Of the documents that specify the two trainings; seed 001 has AdamW as PyTorch has it.
LANGUAGE_MODEL_OPTIMIZER = OptimizerConfig()
TRANSFORMER_OPTIMIZER = OptimizerConfig(name="adam", learning_rate=1e-4, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0)
