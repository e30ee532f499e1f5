"""What a training run is: the fields of the presets, of `--config` files and of the flags of `train_jax.py`."""

import math
from dataclasses import dataclass, field

from flax_tf.config import LanguageModelConfig
from flax_tf.data.config import TextDataConfig
from flax_tf.errors import InputError
from flax_tf.training.optimizer import OptimizerConfig

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
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise InputError(f"sample.temperature is {self.temperature}: it must be above 0")
        if self.top_k is not None and self.top_k < 1:
            raise InputError(f"sample.top_k is {self.top_k}: it must be at least 1, or null")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Settings of a run. Defaults, then the preset, then --config FILE, then flags: the later wins."""

    preset: str = "docs"
    """The preset to start from; presets are the files of flax_tf/presets."""
    run_dir: str | None = None
    """Where everything that the run writes goes. null: runs/PRESET."""
    resume: bool = False
    """Continue the run in run_dir from its newest checkpoint."""
    seed: int = 0
    """Decides the initial parameters, the order of the data, dropout and the sample."""
    steps: int | None = None
    """Number of optimizer steps. With epochs also given, whichever ends first."""
    epochs: float | None = None
    """How often to go through the training split. null: as often as steps takes."""
    batch_size: int = 32
    """Sequences in a batch B, over all devices."""
    log_interval: int = 10
    """Steps between two logged training losses, each the mean over those steps."""
    eval_interval: int = 250
    """Steps between two evaluations on the validation split."""
    eval_batches: int | None = None
    """Batches of an evaluation on the way; the last one takes the whole split. null: the whole split."""
    checkpoint_interval: int = 500
    """Steps between two checkpoints; there is always one at the end."""
    sample: SampleConfig = field(default_factory=SampleConfig)
    """The sample"""
    data: TextDataConfig = field(default_factory=TextDataConfig)
    """The data"""
    model: LanguageModelConfig = field(default_factory=LanguageModelConfig)
    """The model"""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    """The optimizer"""

    def __post_init__(self) -> None:
        for name in ("batch_size", "log_interval", "eval_interval", "checkpoint_interval"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}: it must be at least 1")
        for name in ("steps", "eval_batches"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}: it must be at least 1, or null")
        if self.epochs is not None and not (math.isfinite(self.epochs) and self.epochs > 0):
            raise InputError(f"epochs is {self.epochs}: it must be above 0, or null")
        if self.steps is None and self.epochs is None:
            raise InputError("neither steps nor epochs is set: say how long to train")
        if not 0 <= self.seed < INT32:
            raise InputError(f"seed is {self.seed}: it must be at least 0 and less than {INT32}")
        if not self.model.mask:
            raise InputError(
                "model.mask is false: a model that sees the next token learns nothing from it, set it to true"
            )

    def total_steps(self, steps_per_epoch: int) -> int:
        """The number of optimizer steps of the run."""
        epochs = math.inf if self.epochs is None else self.epochs * steps_per_epoch
        steps = min(epochs, math.inf if self.steps is None else self.steps)
        if not steps < INT32:
            raise InputError(f"the run would take {steps:.3g} steps: it must be less than {INT32}")
        return math.ceil(steps)
