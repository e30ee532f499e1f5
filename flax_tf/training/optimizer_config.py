"""The settings of an optimizer and of its learning rate; without JAX, so that `torch_ref` shares them."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from flax_tf.errors import InputError

Name = Literal["adamw", "adam", "sgd", "muon"]
Decay = Literal["all", "matrices"]
ScheduleName = Literal["constant", "cosine", "inverse_sqrt"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The update rule and its learning rate. The defaults are those of `torch.optim.AdamW`."""

    name: Name = "adamw"
    """"adamw": weight decay apart from the gradient. "adam", "sgd": added to the gradient (L2), as in torch.
    "muon": matrices move by orthogonal steps, with decay as in "adamw", which all other parameters get."""
    learning_rate: float = 1e-3
    """The learning rate; with warm-up or the cosine schedule, its peak."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of Adam's averages of the gradient and of its square."""
    eps: float = 1e-8
    """Added to the root of the averaged square in Adam's denominator."""
    momentum: float = 0.0
    """Momentum of "sgd" and "muon"; torch's default for "muon" is 0.95."""
    weight_decay: float = 1e-2
    """Weight decay. torch.optim.AdamW has 1e-2, torch.optim.Adam and SGD have 0, optax.adamw has 1e-4."""
    decay: Decay = "all"
    """What decays: "all" parameters, as in torch, or "matrices" alone (two axes or more: no biases, no norms)."""
    schedule: ScheduleName = "constant"
    """The learning rate after the warm-up: "constant"; "cosine" down to min_learning_rate at the last step; or
    "inverse_sqrt", the peak times sqrt((warmup_steps + 1) / (k + 1)) at step k, as of Vaswani et al. 2017, section 5.3,
    whose peak is (d_model * (warmup_steps + 1))^-0.5."""
    warmup_steps: int = 0
    """Steps of linear warm-up: step k, from 0, takes (k + 1) / (warmup_steps + 1) of the learning rate."""
    min_learning_rate: float = 0.0
    """Where the cosine schedule ends."""
    clip_norm: float | None = None
    """Gradients whose norm over all parameters is greater are scaled down to it. null: no clipping."""

    def __post_init__(self) -> None:
        for field, choices in (("name", Name), ("decay", Decay), ("schedule", ScheduleName)):
            if getattr(self, field) not in get_args(choices):
                raise InputError(
                    f"optimizer.{field} is {getattr(self, field)!r}: choose from {', '.join(get_args(choices))}"
                )
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise InputError(f"optimizer.learning_rate is {self.learning_rate}: it must be above 0")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise InputError(f"optimizer.betas is {list(self.betas)}: give two numbers of at least 0 and below 1")
        if not 0 <= self.momentum < 1:
            raise InputError(f"optimizer.momentum is {self.momentum}: it must be at least 0 and below 1")
        for field in ("eps", "weight_decay", "warmup_steps"):
            if not (math.isfinite(getattr(self, field)) and getattr(self, field) >= 0):
                raise InputError(f"optimizer.{field} is {getattr(self, field)}: it must be at least 0")
        if not 0 <= self.min_learning_rate <= self.learning_rate:
            raise InputError(
                f"optimizer.min_learning_rate is {self.min_learning_rate}: it must be from 0 to the learning rate"
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise InputError(f"optimizer.clip_norm is {self.clip_norm}: it must be above 0, or null for no clipping")
