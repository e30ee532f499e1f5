"""What a training run is: the fields of the presets, of `--config` files and of the flags of `train_jax.py`."""

import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from flax_tf.config import LEAST_TEMPERATURE, AttnRNNConfig, LanguageModelConfig, RNNConfig, TransformerConfig
from flax_tf.data.config import TextDataConfig
from flax_tf.data.pairs import PairDataConfig
from flax_tf.errors import InputError
from flax_tf.training.optimizer_config import OptimizerConfig

INT32 = 2**31  # JAX counts in 32 bits


@dataclass(frozen=True, kw_only=True)
class SampleConfig:
    """The text that the trained model writes at the end."""

    prompt: str | None = None
    """What the text begins with. null: the first token of the held-out text."""
    tokens: int = 300
    """How many tokens to write. 0: no sample."""
    temperature: float = 0.8
    """Divides the logits: below 1 closer to greedy, above 1 more varied."""
    top_k: int | None = None
    """Draw from the k most probable tokens. null: from all."""

    def __post_init__(self) -> None:
        if self.prompt == "":
            raise InputError("sample.prompt is empty: give the text to continue, or null for held-out text")
        if not 0 <= self.tokens < INT32:
            raise InputError(f"sample.tokens is {self.tokens}: it must be at least 0 and less than {INT32}")
        if not (math.isfinite(self.temperature) and self.temperature >= LEAST_TEMPERATURE):
            raise InputError(f"sample.temperature is {self.temperature}: it must be at least {LEAST_TEMPERATURE}")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"sample.top_k is {self.top_k}: it must be at least 1, or null")


Metric = Literal["none", "exact_match", "bleu"]


@dataclass(frozen=True, kw_only=True)
class DecodingConfig:
    """How held-out sources are translated to measure and to show what was learned."""

    metric: Metric = "exact_match"
    """"exact_match": the share of targets hit in every character. "bleu": BLEU and chrF by sacrebleu (the extra
    `eval`). "none": nothing is decoded."""
    beam_size: int = 5
    """Beams at the end of the run; on the way decoding is greedy. 1: always greedy."""
    length_penalty: float = 0.6
    """A finished hypothesis of n tokens is ranked by its log probability / ((5 + n) / 6)^length_penalty."""
    max_length: int | None = None
    """The most tokens of a translation, the end token included. null: all that the model allows."""
    samples: int = 5
    """How many translations are shown at the end."""

    def __post_init__(self) -> None:
        if self.metric not in get_args(Metric):
            raise InputError(f"decoding.metric is {self.metric!r}: choose from {', '.join(get_args(Metric))}")
        for name, least in (("beam_size", 1), ("max_length", 1), ("samples", 0), ("length_penalty", 0)):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value >= least):
                raise InputError(f"decoding.{name} is {value}: it must be at least {least}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What the settings of all runs have in common."""

    preset: str = "docs"
    """The preset to start from; presets are the files of flax_tf/presets."""
    run_dir: str | None = None
    """Where everything that the run writes goes. null: runs/PRESET."""
    resume: bool = False
    """Continue the run in run_dir from its newest checkpoint."""
    init_from: str | None = None
    """Weights to start from, a file or a directory; or a PyTorch training checkpoint (model, optimizer and step), whose
    run goes on at its step. null: fresh parameters."""
    seed: int = 0
    """Decides the initial parameters, the order of the data, dropout and the sample."""
    steps: int | None = None
    """Number of optimizer steps. With epochs also given, whichever ends first."""
    epochs: float | None = None
    """How often to go through the training split. null: as often as steps takes."""
    batch_size: int = 32
    """Sequences in a batch B, over all devices (for pairs, unless data.tokens_per_batch is set)."""
    steps_per_call: int = 1
    """Steps that are one call of the device, where their batches have one shape: more are faster for models so small
    that the device waits for the host. Calls end wherever a loss is logged, so best a divisor of log_interval. An
    interruption waits for the end of the call."""
    keep_memory: bool = False
    """Keep the memory of a step for the next one, on Linux: up to a fifth faster on a CPU, where the system otherwise
    takes it back and clears it every time; the run may then hold twice or three times what a step needs."""
    log_interval: int = 10
    """Steps between two logged training losses, each the mean over those steps."""
    eval_interval: int = 250
    """Steps between two evaluations on the validation split."""
    eval_batches: int | None = None
    """Batches of an evaluation on the way; the last one takes the whole split. null: the whole split."""
    checkpoint_interval: int = 500
    """Steps between two checkpoints; there is always one at the end."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer"""

    def __post_init__(self) -> None:
        for name in ("batch_size", "steps_per_call", "log_interval", "eval_interval", "checkpoint_interval"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}: it must be at least 1")
        for name in ("log_interval", "eval_interval", "checkpoint_interval"):
            if getattr(self, name) < self.steps_per_call:
                raise InputError(
                    f"steps_per_call is {self.steps_per_call}: it must be at most {name}, {getattr(self, name)}, where "
                    "a call ends"
                )
        for name in ("steps", "eval_batches"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}: it must be at least 1, or null")
        if self.epochs is not None and not (math.isfinite(self.epochs) and self.epochs > 0):
            raise InputError(f"epochs is {self.epochs}: it must be above 0, or null")
        if self.steps is None and self.epochs is None:
            raise InputError("neither steps nor epochs is set: say how long to train")
        if not 0 <= self.seed < INT32:
            raise InputError(f"seed is {self.seed}: it must be at least 0 and less than {INT32}")

    @property
    def fixed_batch_size(self) -> int | None:
        """`batch_size`, or None where batches have as many rows as make so many tokens."""
        return self.batch_size

    def total_steps(self, steps_per_epoch: int) -> int:
        """The number of optimizer steps of the run."""
        epochs = math.inf if self.epochs is None else self.epochs * steps_per_epoch
        steps = min(epochs, math.inf if self.steps is None else self.steps)
        if not steps < INT32:
            raise InputError(f"the run would take {steps:.3g} steps: it must be less than {INT32}")
        return math.ceil(steps)


@dataclass(frozen=True, kw_only=True)
class LanguageModelRun(RunConfig):
    """Settings of a language model's run. Defaults, then the preset, then --config FILE, then flags: the later wins."""

    arch: Literal["language_model"] = "language_model"
    """What is trained: language_model, transformer, rnn or attn_rnn. The settings of data and model depend on it."""
    sample: SampleConfig = field(default_factory=SampleConfig)
    """The sample"""
    data: TextDataConfig = field(default_factory=TextDataConfig)
    """The data"""
    model: LanguageModelConfig = field(default_factory=LanguageModelConfig)
    """The model"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model.mask:
            raise InputError(
                "model.mask is false: a model that sees the next token learns nothing from it, set it to true"
            )


@dataclass(frozen=True, kw_only=True)
class TranslationRun(RunConfig):
    """What the settings of sequence-to-sequence runs have in common."""

    label_smoothing: float = 0.0
    """The part of each label that is spread evenly over the vocabulary, in training alone (Szegedy et al. 2016)."""
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    """The decoding"""
    data: PairDataConfig = field(default_factory=PairDataConfig)
    """The data"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.label_smoothing < 1:
            raise InputError(f"label_smoothing is {self.label_smoothing}: it must be at least 0 and below 1")

    @property
    def fixed_batch_size(self) -> int | None:
        return self.batch_size if self.data.tokens_per_batch is None else None


@dataclass(frozen=True, kw_only=True)
class TransformerRun(TranslationRun):
    """Settings of an encoder-decoder Transformer's run. Defaults, preset, --config FILE, flags: the later wins."""

    arch: Literal["transformer"] = "transformer"
    """What is trained: language_model, transformer, rnn or attn_rnn. The settings of data and model depend on it."""
    model: TransformerConfig = field(default_factory=TransformerConfig)
    """The model"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, length in (("data", self.data.max_length), ("decoding", self.decoding.max_length)):
            if length is not None and length > self.model.max_seq_length:
                raise InputError(
                    f"{name}.max_length is {length}, and the model's table has {self.model.max_seq_length} positions: "
                    f"lower it, or raise model.max_seq_length"
                )


@dataclass(frozen=True, kw_only=True)
class RNNRun(TranslationRun):
    """Settings of a recurrent sequence-to-sequence run. Defaults, preset, --config FILE, flags: the later wins."""

    arch: Literal["rnn"] = "rnn"
    """What is trained: language_model, transformer, rnn or attn_rnn. The settings of data and model depend on it."""
    model: RNNConfig = field(default_factory=RNNConfig)
    """The model"""


@dataclass(frozen=True, kw_only=True)
class AttnRNNRun(TranslationRun):
    """Settings of a run with Bahdanau attention. Defaults, preset, --config FILE, flags: the later wins."""

    arch: Literal["attn_rnn"] = "attn_rnn"
    """What is trained: language_model, transformer, rnn or attn_rnn. The settings of data and model depend on it."""
    model: AttnRNNConfig = field(default_factory=AttnRNNConfig)
    """The model"""


RUNS: dict[str, type[RunConfig]] = {
    "language_model": LanguageModelRun,
    "transformer": TransformerRun,
    "rnn": RNNRun,
    "attn_rnn": AttnRNNRun,
}
