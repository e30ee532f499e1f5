"""Trainings of both frameworks side by side: every system, and a user's own pair."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import torch
import torch.nn.functional as F
from flax import nnx
from models import ATTN_RNN, BACKBONE, BLOCK, LANGUAGE_MODEL, RNN, TRANSFORMER, reference, twin

from flax_tf.layers import BatchNorm, LayerNorm, Linear
from flax_tf.loss import language_model_loss, sequence_loss
from flax_tf.parity.training import TrainingReport, compare_training, same_optimizer
from flax_tf.porting import torch_to_flax
from flax_tf.porting.files import torch_to_numpy
from flax_tf.training.optimizer_config import OptimizerConfig
from torch_ref import loss as torch_loss


def mean(total_and_count) -> Any:
    return total_and_count[0] / total_and_count[1]


def square(output) -> Any:
    """A loss for models without one, with a gradient everywhere."""
    return ((output - 0.5) ** 2).mean()


def language_batch(rng: np.random.Generator) -> dict[str, np.ndarray]:
    tokens = rng.integers(37, size=(3, 8))
    return {"inputs": tokens[:, :-1], "labels": tokens[:, 1:], "weights": rng.random((3, 7))}


def pair_batch(rng: np.random.Generator) -> dict[str, np.ndarray]:
    batch = {"source": rng.integers(2, 37, size=(3, 7)), "target": rng.integers(2, 31, size=(3, 6))}
    batch["source"][1, 4:] = batch["target"][1, 3:] = 0  # padding
    return batch


LANGUAGE = (
    lambda model, batch: mean(torch_loss.language_model_loss(model, batch)),
    lambda model, batch: mean(language_model_loss(model, batch)),
    language_batch,
)
PAIRS = (
    lambda model, batch: mean(torch_loss.sequence_loss(model, batch)),
    lambda model, batch: mean(sequence_loss(model, batch)),
    pair_batch,
)
SYSTEMS = {
    "block": (
        BLOCK,
        *2 * (lambda model, batch: square(model(batch)),),
        lambda rng: rng.standard_normal((2, 7, 15)),
    ),
    "backbone": (
        replace(BACKBONE, num_layers=1),
        *2 * (lambda model, batch: square(model(batch)),),
        lambda rng: rng.integers(37, size=(2, 7)),
    ),
    "language_model": (replace(LANGUAGE_MODEL, num_layers=1), *LANGUAGE),
    "transformer": (TRANSFORMER, *PAIRS),
    "rnn": (RNN, *PAIRS),
    "attn_rnn": (ATTN_RNN, *PAIRS),
}


def trained(system: str, steps: int, model: Any = None, *, dropout: float = 0.1, **arguments: Any) -> TrainingReport:
    """A system and its twin, or the model given, over a number of steps."""
    config, their_loss, our_loss, batch = SYSTEMS[system]
    module = reference(config if system == "block" else replace(config, dropout=dropout))
    rng = np.random.default_rng(0)
    batches = [batch(rng) for _ in range(steps)]
    losses: dict[str, Any] = {"torch_loss": their_loss, "flax_loss": our_loss}
    return compare_training(module, twin(module) if model is None else model, batches, **{**losses, **arguments})


class Small(torch.nn.Module):
    """A user's model, with names, a norm with running statistics and dropout that Flax has otherwise."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(5, 7)
        self.bn = torch.nn.BatchNorm1d(7)
        self.norm = torch.nn.LayerNorm(7)
        self.last = torch.nn.Linear(7, 3)

    def forward(self, x):
        x = F.dropout(F.relu(self.bn(self.first(x))), 0.1, self.training)
        return self.last(self.norm(x))


class FlaxSmall(nnx.Module):
    def __init__(self, *, rate: float = 0.1, momentum: float = 0.1, frozen: bool = False):
        rngs = nnx.Rngs(0)
        self.dense = Linear(5, 7, rngs=rngs)
        self.bn = BatchNorm(7, momentum=momentum, rngs=rngs)
        self.norm = LayerNorm(7, epsilon=1e-5, rngs=rngs)
        self.last = Linear(7, 3, rngs=rngs)
        self.drop = nnx.Dropout(rate)
        self.frozen = frozen

    def __call__(self, x):
        x = self.drop(jax.nn.relu(self.bn(self.dense(x))))
        x = jax.lax.stop_gradient(x) if self.frozen else x
        return self.last(self.norm(x))


RENAME = {"first": "dense"}
STEP = 1e-3


def small(
    steps: int = 4, change: Any = None, config: OptimizerConfig | None = None, frozen: str = "", **arguments: Any
) -> TrainingReport:
    """Training of the small pair; the Flax model is made with `change`, and PyTorch leaves `frozen` as it is."""
    torch.manual_seed(0)
    module = Small()
    for name, parameter in module.named_parameters():
        parameter.requires_grad = name != frozen
    state = {name: torch_to_numpy(tensor) for name, tensor in module.state_dict().items()}
    model = torch_to_flax(state, FlaxSmall(**(change or {})), RENAME)
    rng = np.random.default_rng(0)
    batches = [{"x": rng.standard_normal((11, 5)), "y": rng.standard_normal((11, 3))} for _ in range(steps)]
    losses = 2 * (lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean(),)
    own: dict[str, Any] = {"torch_loss": losses[0], "flax_loss": losses[1], "rename": RENAME}
    both = same_optimizer(config or OptimizerConfig(learning_rate=STEP), steps)
    return compare_training(module, model, batches, **{**own, **both, **arguments})
