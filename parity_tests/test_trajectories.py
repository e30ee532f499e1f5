"""Training side by side: a hundred steps of every system, and planted faults, which must be caught and explained."""

import json
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
import torch.nn.functional as F
from flax import nnx
from models import ATTN_RNN, BACKBONE, BLOCK, LANGUAGE_MODEL, RNN, TRANSFORMER, reference, twin

from flax_tf.errors import InputError
from flax_tf.layers import BatchNorm, LayerNorm, Linear
from flax_tf.loss import language_model_loss, sequence_loss
from flax_tf.parity.training import TrainingReport, compare_training, same_optimizer
from flax_tf.porting import torch_to_flax
from flax_tf.porting.files import torch_to_numpy
from flax_tf.training.optimizer import learning_rates, matrices
from flax_tf.training.optimizer_config import OptimizerConfig
from torch_ref import loss as torch_loss

torch.set_num_threads(1)  # threads cost more than they give on tensors of this size
STEPS = 100


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


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_a_hundred_steps_with_dropout_are_the_same(system: str, name: Any) -> None:
    report = trained(system, STEPS, **same_optimizer(OptimizerConfig(name=name), STEPS))
    assert report.ok, report.summary()
    assert len({*report.torch_losses}) == STEPS  # something happens


def test_clipping_a_decay_mask_and_a_schedule_with_momentum() -> None:
    config = OptimizerConfig(
        name="sgd", learning_rate=0.1, momentum=0.9, weight_decay=0.1, decay="matrices", schedule="cosine",
        warmup_steps=7, clip_norm=0.5,
    )  # fmt: skip
    report = trained("language_model", STEPS, **same_optimizer(config, STEPS))
    assert report.ok, report.summary()
    assert report.torch_losses[-1] < report.torch_losses[0]


def test_tied_parameters_move_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def batch(rng: np.random.Generator) -> dict[str, np.ndarray]:
        return {"source": rng.integers(1, 31, size=(3, 7)), "target": rng.integers(1, 31, size=(3, 6))}

    config = replace(TRANSFORMER, src_vocab_size=31, shared_embeddings=True)
    monkeypatch.setitem(SYSTEMS, "tied", (config, *PAIRS[:2], batch))
    report = trained("tied", 3, **same_optimizer(OptimizerConfig(clip_norm=0.5), 3))
    assert report.ok, report.summary()
    errors = {row.name: row.error for row in report.rows}
    assert errors["encoder_embedding.weight"] == errors["decoder_embedding.weight"] == errors["fc.weight"]


@pytest.mark.parametrize("cleaned", [True, False])
def test_adam_magnifies_the_noise_of_gradients_that_are_zero(cleaned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rule for noise, zero biases of attention's keys would fail an honest pair."""
    module = reference(TRANSFORMER)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("W_k.bias"):
                parameter.zero_()
    if not cleaned:
        monkeypatch.setattr("flax_tf.parity.training.ZERO_ROUNDINGS", 0)
    rng = np.random.default_rng(0)
    report = compare_training(
        module,
        twin(module),
        [pair_batch(rng) for _ in range(2)],
        torch_loss=PAIRS[0],
        flax_loss=PAIRS[1],
        **same_optimizer(OptimizerConfig(), 2),
    )
    assert report.ok is cleaned
    assert (
        {row.name for row in report.rows if not row.ok} == set()
        if cleaned
        else {name for name, _ in module.named_parameters() if name.endswith("W_k.bias")}
    )


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


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_a_users_own_pair(name: Any, capsys: pytest.CaptureFixture[str]) -> None:
    report = small(STEPS, config=OptimizerConfig(name=name, learning_rate=0.01))
    assert report, report.summary()
    assert {row.name for row in report.rows if row.kind == "buffer"} == {"bn.running_mean", "bn.running_var"}
    assert report.torch_losses[-1] < report.torch_losses[0]
    report.print()
    assert capsys.readouterr().out.splitlines()[-1] == report.summary()
    assert report.summary().startswith("the same training: 100 steps, 10 parameters and buffers within ")
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["same"] is True


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
FIRST_STEP = (
    "the learning rate or its schedule: every update is 1.9 times PyTorch's, or its averages start otherwise (momentum"
)
AT_ONCE = "(at step 1, with equal parameters and gradients)"


@pytest.mark.parametrize(
    ("arguments", "diagnosis"),
    [
        (
            {"flax_optimizer": adamw(eps=0.0, eps_root=1e-8)},
            "the update rule of all parameters: neither one factor nor a decay makes the updates PyTorch's, most where "
            f"gradients are small: its epsilon {AT_ONCE}",
        ),
        (
            {"config": MATRICES, "flax_optimizer": adamw()},
            "weight decay of all parameters with one axis (biases and norms) alone: Flax decays by 0.01, PyTorch by 0 "
            + AT_ONCE,
        ),
        (
            {"flax_optimizer": adamw(decay=matrices)},
            "weight decay of all parameters with one axis (biases and norms) alone: Flax decays by 0, PyTorch by 0.01 "
            + AT_ONCE,
        ),
        (
            {"flax_optimizer": optax.chain(optax.add_decayed_weights(1e-2), optax.adam(STEP))},
            f"weight decay of all parameters: Flax adds it to the gradient, PyTorch does not {AT_ONCE}",
        ),
        (
            {"config": L2, "flax_optimizer": adamw()},
            f"weight decay of all parameters: PyTorch adds it to the gradient, Flax does not {AT_ONCE}",
        ),
        (
            {"config": WARM, "flax_optimizer": adamw(rate=lambda step: learning_rates(WARM, 4)(step + 1))},
            "the learning rate or its schedule: every update is 2 times PyTorch's, or its averages start otherwise "
            f"(momentum, bias correction) {AT_ONCE}",
        ),
        (
            {"config": COSINE, "flax_optimizer": adamw()},
            "the learning rate or its schedule: every update is 1.33333333 times PyTorch's "
            "(at step 2, with equal parameters and gradients)",
        ),
        ({"config": CLIPPED, "flax_optimizer": adamw()}, "clipping: PyTorch multiplied all gradients by 0.0"),
        ({"flax_optimizer": adamw(b2=0.99)}, "the update rule of all parameters: neither"),
        ({"config": MOMENTUM, "flax_optimizer": optax.sgd(STEP, 0.9, nesterov=True)}, FIRST_STEP),
        (
            {"change": {"frozen": True}},
            "the model or the loss: at step 1, with equal parameters, the loss agrees, and gradients differ: those of "
            "3 of 8 parameters (first.weight, bn.weight, bn.bias)",  # the norm takes the shift of first.bias out
        ),
        (
            {"change": {"momentum": 0.9}},
            "the running statistics: at step 1, with equal parameters and gradients, bn.running_mean, bn.running_var "
            "differ",
        ),
        (
            {"frozen": "last.bias"},
            f"weight decay of 1 of 8 parameters (last.bias): Flax decays by 0.01, PyTorch by 0 {AT_ONCE}",
        ),
        ({"change": {"rate": 0.2}}, "drop drops 0.2, PyTorch 0.1"),
        ({"change": {"rate": 0.0}}, "(model) drops 0.1 in PyTorch, Flax does not"),
    ],
    ids=[
        "epsilon in the root", "decay on norms", "no decay on norms", "L2 for decoupled", "decoupled for L2",
        "schedule off by one", "no schedule", "no clipping", "beta", "nesterov", "stopped gradient",
        "batch norm momentum", "frozen in PyTorch", "dropout rate", "no dropout",
    ],
)  # fmt: skip
def test_a_planted_fault_is_caught_and_explained(arguments: dict[str, Any], diagnosis: str) -> None:
    report = small(**arguments)
    assert not report.ok
    assert report.summary().startswith(f"NOT the same training: {diagnosis}")
    json.dumps(report.to_dict(), allow_nan=False)


def test_gradient_accumulation_by_the_mean_of_means_is_caught() -> None:
    def halves(model, batch):
        parts = [{name: array[part] for name, array in batch.items()} for part in (slice(0, 1), slice(1, 3))]
        return sum(mean(language_model_loss(model, part)) for part in parts) / 2

    both = same_optimizer(OptimizerConfig(), 2)
    report = trained("language_model", 2, dropout=0.0, flax_loss=halves, **both)
    assert report.diagnosis is not None
    assert report.diagnosis.startswith("the model or the loss: at step 1, with equal parameters, the loss is ")


def test_a_loss_that_is_a_sum_is_named_as_a_factor() -> None:
    report = small(flax_loss=lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).sum())
    assert report.diagnosis is not None
    assert report.diagnosis.endswith("and every gradient is 33 times PyTorch's")


def test_other_weights_are_named_before_the_first_step() -> None:
    module = reference(BLOCK)
    model = twin(module)
    model.mlp_layer_norm.bias[...] = model.mlp_layer_norm.bias[...].at[2].set(1e-3)
    report = trained("block", 1, model, **same_optimizer(OptimizerConfig(), 1))
    assert report.diagnosis == "the models start from other weights: mlp_layer_norm.bias"
    assert next(row for row in report.rows if row.name == "mlp_layer_norm.bias").step == 0


def test_the_callers_models_stay_as_they_are() -> None:
    module = reference(BLOCK)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    model = twin(module)
    weights = jax.tree.map(np.array, nnx.to_pure_dict(nnx.state(model)))
    losses = 2 * (lambda model, batch: square(model(batch)),)
    batches = [np.random.default_rng(0).standard_normal((2, 7, 15))]
    both = same_optimizer(OptimizerConfig(), 1)
    report = compare_training(module, model, batches, torch_loss=losses[0], flax_loss=losses[1], **both)
    assert report.ok
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    jax.tree.map(np.testing.assert_array_equal, weights, nnx.to_pure_dict(nnx.state(model)))
    assert not module.training
    assert jax.config.read("jax_enable_x64") is False


def test_no_batches_are_refused() -> None:
    with pytest.raises(InputError, match="no batch to train on"):
        small(0)
