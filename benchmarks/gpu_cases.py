"""The trainings that `gpu.py` measures, and how many operations their models ask for."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
from flax import nnx
from jaxtyping import Array, Float

from benchmarks.ours import language_model_batch, transformer_batch
from benchmarks.workloads import FULL, LANGUAGE_MODEL_OPTIMIZER, TINY, TRANSFORMER_OPTIMIZER
from flax_tf.config import LanguageModelConfig, TransformerConfig
from flax_tf.loss import language_model_loss, sequence_loss
from flax_tf.training.optimizer_config import OptimizerConfig
from flax_tf.training.step import Batch, LossFunction
from flax_tf.training.task import HostBatch


@dataclass(frozen=True)
class Case:
    """A training; tokens are those that a loss is computed of."""

    name: str
    config: LanguageModelConfig | TransformerConfig
    batch_size: int
    loss: LossFunction
    optimizer: OptimizerConfig
    bar: str
    """What docs and project hold it to; "" for nothing."""

    def batch(self) -> HostBatch:
        if isinstance(self.config, LanguageModelConfig):
            return language_model_batch(self.config, self.batch_size)
        return transformer_batch(self.config, self.batch_size)

    def tokens(self) -> int:
        """Tokens of a step."""
        length = self.config.max_seq_length
        return self.batch_size * (length if isinstance(self.config, LanguageModelConfig) else length - 1)

    def operations(self, params: nnx.State) -> float:
        """Floating-point operations of a step: 6 a token for each weight of a matrix product, and attention.

        Attention counts 12 T D a token and layer, as if no key were masked (the convention of Chowdhery et al. 2022,
        appendix B). Embeddings are looked up and count nothing, and nothing that is computed twice counts twice.
        """
        weights = sum(
            leaf.size for path, leaf in jax.tree.leaves_with_path(params) if "kernel" in jax.tree_util.keystr(path)
        )
        products = 6 * weights * self.tokens()
        attention = 12 * self.config.max_seq_length * self.config.d_model * self.config.num_layers * self.tokens()
        if isinstance(self.config, LanguageModelConfig):
            return products + attention
        # An encoder layer attends once and a decoder layer twice; source and target are of one length, but for one.
        return products + 3 * attention


def in_bfloat16(loss: LossFunction) -> LossFunction:
    """The loss with every parameter rounded to bfloat16; gradients, optimizer and the weights that stay are float32."""

    def rounded(model: nnx.Module, batch: Batch, **options) -> tuple[Float[Array, ""], Float[Array, ""]]:
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        params = jax.tree.map(lambda param: param.astype(jax.numpy.bfloat16), params)
        return loss(nnx.merge(graph, params, rest), batch, **options)

    return rounded


GPT2 = LanguageModelConfig(vocab_size=50_257, max_seq_length=1024, d_model=768, num_heads=12, num_layers=12)


def cases(tiny: bool, batch_size: int) -> list[Case]:
    """The three trainings; `batch_size` is that of GPT-2's shape."""
    sizes = TINY if tiny else FULL
    gpt2 = replace(sizes.language_model, num_layers=3) if tiny else GPT2
    language_model = (language_model_loss, LANGUAGE_MODEL_OPTIMIZER)
    return [
        Case("GPT-2 124M shape", gpt2, batch_size, *language_model, "utilisation of at least 45%, aim 60%"),
        Case("language model", sizes.language_model, 256, *language_model, "at least 60 steps/s, aim 150"),
        Case("Transformer", sizes.transformer, 64, sequence_loss, TRANSFORMER_OPTIMIZER, ""),
    ]


def peak_rate(size: int, repeats: int, clock: Callable[[], float]) -> float:
    """Operations a second of bfloat16 matrix products of this size, one after the other on the device."""
    a, b = jax.random.normal(jax.random.key(0), (2, size, size), jax.numpy.bfloat16)

    @jax.jit
    def products(a, b):
        return jax.lax.fori_loop(0, repeats, lambda _, x: x @ b / size, a)

    best = 0.0
    products(a, b).block_until_ready()
    for _ in range(3):
        start = clock()
        products(a, b).block_until_ready()
        best = max(best, 2 * size**3 * repeats / (clock() - start))
    return best
