"""Faults in the optimizer, its schedule, the loss and what only training changes."""

from dataclasses import replace
from typing import Any

import jax
import optax
from flax import nnx
from trainings import STEP, mean, small, trained

from flax_tf.loss import language_model_loss, sequence_loss
from flax_tf.parity.training import TrainingReport, same_optimizer
from flax_tf.training.optimizer import learning_rates, matrices
from flax_tf.training.optimizer_config import OptimizerConfig
from sabotage.fault import Fault


def adamw(*, eps: float = 1e-8, eps_root: float = 0.0, b2: float = 0.999, decay: Any = None, rate: Any = STEP) -> Any:
    """The optimizer of `small`, or a wrong one."""
    adam = optax.scale_by_adam(0.9, b2, eps, eps_root)
    return optax.chain(adam, optax.add_decayed_weights(1e-2, decay), optax.scale_by_learning_rate(rate))


WARM = OptimizerConfig(learning_rate=STEP, warmup_steps=5)
COSINE = OptimizerConfig(learning_rate=STEP, schedule="cosine")
CLIPPED = OptimizerConfig(learning_rate=STEP, clip_norm=0.01)
L2 = OptimizerConfig(name="adam", learning_rate=STEP, weight_decay=1e-2)
MATRICES = OptimizerConfig(learning_rate=STEP, decay="matrices")
MOMENTUM = OptimizerConfig(name="sgd", learning_rate=STEP, momentum=0.9, weight_decay=0.0)
BY_NORM = "clipping: Flax divides by the norm, PyTorch by the norm + 1e-6: use flax_tf.training.optimizer.clip_by"
HELD = optax.masked(
    optax.set_to_zero(),
    lambda params: jax.tree.map_with_path(lambda path, _: jax.tree_util.keystr(path[:2]) == "['last']['bias']", params),
)
AT_ONCE = "(at step 1, with equal parameters and gradients)"


def halves(model: nnx.Module, batch: Any) -> Any:
    """The mean over two parts of a batch of the mean over each part's tokens."""
    parts = [{name: array[part] for name, array in batch.items()} for part in (slice(0, 1), slice(1, 3))]
    return sum(mean(language_model_loss(model, part)) for part in parts) / 2


def with_padding(model: nnx.Module, batch: Any) -> Any:
    """The loss with padding among the tokens."""
    target = batch["target"]
    total, _ = sequence_loss(model, batch)
    return total / target[:, 1:].size


LOSS = "the model or the loss: at step 1, with equal parameters, the loss is "
# (what it is, its rows of the table of traps, what the diagnosis must say, how to train)
_TRAININGS: list[tuple[str, str, str, Any]] = [
    (
        "Adam's epsilon within the root",
        "",
        "the update rule of all parameters: neither one factor nor a decay makes the updates PyTorch's, most where "
        "gradients are small: its epsilon",
        lambda: small(flax_optimizer=adamw(eps=0.0, eps_root=1e-8)),
    ),
    (
        "Another decay rate in Adam's second average",
        "",
        "the update rule of all parameters: neither",
        lambda: small(flax_optimizer=adamw(b2=0.99)),
    ),
    (
        "Weight decay on norms and biases, against the mask",
        "24",
        "weight decay of all parameters with one axis (biases and norms) alone: Flax decays by 0.01, PyTorch by 0 ",
        lambda: small(config=MATRICES, flax_optimizer=adamw()),
    ),
    (
        "No weight decay on norms and biases, against PyTorch's default",
        "24",
        "weight decay of all parameters with one axis (biases and norms) alone: Flax decays by 0, PyTorch by 0.01 ",
        lambda: small(flax_optimizer=adamw(decay=matrices)),
    ),
    (
        "Weight decay 1e-4, which is optax's default, for 1e-2",
        "24",
        "weight decay of all parameters: Flax decays by 0.0001, PyTorch by 0.01 ",
        lambda: small(flax_optimizer=optax.adamw(STEP)),
    ),
    (
        "Decay added to the gradient (L2) where it is apart",
        "24",
        f"weight decay of all parameters: Flax adds it to the gradient, PyTorch does not {AT_ONCE}",
        lambda: small(flax_optimizer=optax.chain(optax.add_decayed_weights(1e-2), optax.adam(STEP))),
    ),
    (
        "Decay apart where it is added to the gradient",
        "24",
        f"weight decay of all parameters: PyTorch adds it to the gradient, Flax does not {AT_ONCE}",
        lambda: small(config=L2, flax_optimizer=adamw()),
    ),
    (
        "Decay of a parameter that PyTorch has frozen",
        "",
        f"weight decay of 1 of 8 parameters (last.bias): Flax decays by 0.01, PyTorch by 0 {AT_ONCE}",
        lambda: small(frozen="last.bias", flax_optimizer=optax.chain(HELD, adamw())),
    ),
    (
        "Training of a parameter that PyTorch has frozen",
        "",
        "parameter last.bias is frozen in PyTorch and trained in Flax",
        lambda: small(frozen="last.bias", flax_optimizer=optax.adam(STEP), config=replace(L2, weight_decay=0.0)),
    ),
    (
        "Weight decay 1e-4 for none, at a learning rate of 1e-7",
        "24",
        f"weight decay of all parameters: Flax decays by 0.0001, PyTorch by 0 {AT_ONCE}",
        lambda: small(config=OptimizerConfig(learning_rate=1e-7, weight_decay=0.0), flax_optimizer=optax.adamw(1e-7)),
    ),
    (
        "Adam's epsilon 1e-7 for 1e-8, at a learning rate of 1e-7",
        "",
        "the update rule of ",
        lambda: small(config=OptimizerConfig(learning_rate=1e-7), flax_optimizer=adamw(eps=1e-7, rate=1e-7)),
    ),
    (
        "A learning rate schedule off by one",
        "25",
        "the learning rate or its schedule: every update is 2 times PyTorch's",
        lambda: small(config=WARM, flax_optimizer=adamw(rate=lambda step: learning_rates(WARM, 4)(step + 1))),
    ),
    (
        "No learning rate schedule",
        "25",
        "the learning rate or its schedule: every update is 1.33333333 times PyTorch's (at step 2, with equal "
        "parameters and gradients)",
        lambda: small(config=COSINE, flax_optimizer=adamw()),
    ),
    (
        "Gradients not clipped",
        "",
        "clipping: PyTorch multiplied all gradients by 0.0",
        lambda: small(config=CLIPPED, flax_optimizer=adamw()),
    ),
    (
        "Gradients clipped without PyTorch's 1e-6",
        "",
        BY_NORM,
        lambda: small(config=CLIPPED, flax_optimizer=optax.chain(optax.clip_by_global_norm(0.01), adamw())),
    ),
    (
        "Gradients clipped without PyTorch's 1e-6, for momentum",
        "",
        BY_NORM,
        lambda: small(
            config=replace(MOMENTUM, clip_norm=0.01),
            flax_optimizer=optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(STEP, 0.9)),
        ),
    ),
    (
        "Nesterov's momentum for plain momentum",
        "",
        "the learning rate or its schedule: every update is 1.9 times PyTorch's, or its averages start otherwise",
        lambda: small(config=MOMENTUM, flax_optimizer=optax.sgd(STEP, 0.9, nesterov=True)),
    ),
    (
        "A gradient stopped within the model",
        "",
        "the model or the loss: at step 1, with equal parameters, the loss agrees, and gradients differ: those of "
        "3 of 8 parameters (first.weight, bn.weight, bn.bias)",  # the norm takes the shift of first.bias out
        lambda: small(change={"frozen": True}),
    ),
    (
        "Batch norm's momentum in NNX's sense, 1 - PyTorch's",
        "",
        "the running statistics: at step 1, with equal parameters and gradients, bn.running_mean, bn.running_var "
        "differ",
        lambda: small(change={"momentum": 0.9}),
    ),
    (
        "Another dropout rate in training",
        "27",
        "drop drops 0.2, PyTorch 0.1",
        lambda: small(change={"rate": 0.2}),
    ),
    (
        "No dropout in training",
        "27",
        "(model) drops 0.1 in PyTorch, Flax does not",
        lambda: small(change={"rate": 0.0}),
    ),
    (
        "Gradient accumulation by the mean of means",
        "26",
        LOSS,
        lambda: trained("language_model", 2, dropout=0.0, flax_loss=halves, **same_optimizer(OptimizerConfig(), 2)),
    ),
    (
        "Padding counted as tokens of the loss",
        "26",
        LOSS,
        lambda: trained("transformer", 1, dropout=0.0, flax_loss=with_padding, **same_optimizer(OptimizerConfig(), 1)),
    ),
    (
        "A loss that is a sum for a mean",
        "",
        LOSS,
        lambda: small(flax_loss=lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).sum()),
    ),
]


def _fault(name: str, trap: str, place: str, train: Any) -> Fault:
    def find() -> str | None:
        report: TrainingReport = train()
        if report.ok:
            return None
        found = report.summary().removeprefix("NOT the same training: ")
        return place if found.startswith(place) else found

    return Fault(name, trap, place, find)


FAULTS = [_fault(*entry) for entry in _TRAININGS]
