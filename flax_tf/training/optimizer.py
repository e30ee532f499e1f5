"""Optimizers and learning rates with PyTorch's arithmetic and PyTorch's defaults, built from optax."""

import jax
import jax.numpy as jnp
import optax

from flax_tf.training.muon import scale_by_muon
from flax_tf.training.optimizer_config import OptimizerConfig


def learning_rates(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """The learning rate of step k, counted from 0, in a run of `steps` steps.

    In torch: `SequentialLR` of `LinearLR` and `ConstantLR`, `CosineAnnealingLR` or `LambdaLR`. A run that is shorter
    than its warm-up ends in it.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    match config.schedule:
        case "constant":
            after = optax.constant_schedule(peak)
        case "cosine":
            last = max(1, steps - 1 - warmup)
            after = optax.cosine_decay_schedule(peak, last, alpha=config.min_learning_rate / peak)
        case "inverse_sqrt":
            after = lambda step: peak * jnp.sqrt((warmup + 1) / (step + warmup + 1))  # noqa: E731
    rising = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    schedule = optax.join_schedules([rising, after], [warmup])
    # optax divides the integer step in float32; as a float it has the widest precision that is on.
    return lambda step: schedule(jnp.asarray(step, jnp.result_type(float)))


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """`torch.nn.utils.clip_grad_norm_`: gradients times min(1, max_norm / (norm + 1e-6)).

    optax's own has no 1e-6, and so differs in the seventh digit.
    """

    def update(updates, state, params=None):
        del params
        scale = jnp.minimum(1.0, max_norm / (optax.tree.norm(updates) + 1e-6))
        return jax.tree.map(lambda update: update * scale.astype(update.dtype), updates), state

    return optax.GradientTransformation(optax.init_empty_state, update)


def matrices(params: optax.Params) -> optax.Params:
    """True for each parameter with two axes or more: kernels and embeddings."""
    return jax.tree.map(lambda param: param.ndim >= 2, params)


def build_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The update rule for a run of `steps` steps: clipping, then `config.name` with the scheduled learning rate."""
    decay = optax.add_decayed_weights(config.weight_decay, matrices if config.decay == "matrices" else None)
    adam = optax.scale_by_adam(*config.betas, config.eps)
    match config.name:
        case "adamw":
            rule = optax.chain(adam, decay)
        case "adam":
            rule = optax.chain(decay, adam)
        case "sgd":
            rule = optax.chain(decay, optax.trace(config.momentum))
        case "muon":
            muon = optax.masked(scale_by_muon(config.momentum), matrices)
            rest = optax.masked(adam, lambda params: jax.tree.map(lambda is_matrix: not is_matrix, matrices(params)))
            rule = optax.chain(muon, rest, decay)
    clip = optax.identity() if config.clip_norm is None else clip_by_global_norm(config.clip_norm)
    return optax.chain(clip, rule, optax.scale_by_learning_rate(learning_rates(config, steps)))
