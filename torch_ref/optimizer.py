"""Optimizers, clipping and learning rates of the shared settings. Twin: `flax_tf/training/optimizer.py`."""

import math

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from flax_tf.errors import InputError
from flax_tf.training.optimizer_config import OptimizerConfig


def build_optimizer(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of a model's parameters, which it knows by name; weights that don't decay are a second group.

    Raises InputError for "muon", which torch splits into two optimizers.
    """
    named = list(model.named_parameters())
    decayed = [(name, param) for name, param in named if config.decay == "all" or param.ndim >= 2]
    rest = [(name, param) for name, param in named if config.decay == "matrices" and param.ndim < 2]
    groups = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    lr, betas, eps = config.learning_rate, config.betas, config.eps
    match config.name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps)
        case "adam":
            return torch.optim.Adam(groups, lr=lr, betas=betas, eps=eps)
        case "sgd":
            return torch.optim.SGD(groups, lr=lr, momentum=config.momentum)
    raise InputError(f"optimizer.name {config.name} is no single optimizer of PyTorch: train with adamw, adam or sgd")


def learning_rate(config: OptimizerConfig, steps: int, step: int) -> float:
    """The learning rate of a step, counted from 0, in a run of `steps` steps."""
    peak, floor, warmup = config.learning_rate, config.min_learning_rate, config.warmup_steps
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    match config.schedule:
        case "cosine":
            done = min(1.0, (step - warmup) / max(1, steps - 1 - warmup))
            return floor + (peak - floor) * (1 + math.cos(math.pi * done)) / 2
        case "inverse_sqrt":
            return peak * math.sqrt((warmup + 1) / (step + 1))
        case "constant":
            return peak
    raise ValueError(config.schedule)


def build_scheduler(config: OptimizerConfig, optimizer: torch.optim.Optimizer, steps: int, step: int = 0) -> LambdaLR:
    """Sets the learning rate of the next step, which is `step` at first; call its `.step()` after the optimizer's.

    An optimizer that goes on at a `step` above 0 must have loaded its state, which holds the peak as `initial_lr`.
    """
    return LambdaLR(optimizer, lambda k: learning_rate(config, steps, k) / config.learning_rate, last_epoch=step - 1)


def clip_gradients(config: OptimizerConfig, model: nn.Module) -> None:
    """Scales the gradients down to the setting's norm, if there is one and theirs is greater."""
    if config.clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
