"""Training side by side: a hundred steps of every system, and a user's own pair. Faults are in `sabotage`."""

import json
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from models import BLOCK, TRANSFORMER, reference, twin
from trainings import PAIRS, SYSTEMS, pair_batch, small, square, trained

from flax_tf.errors import InputError
from flax_tf.parity.training import compare_training, same_optimizer
from flax_tf.training.optimizer_config import OptimizerConfig

STEPS = 100


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


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_small_updates_may_be_as_inaccurate_as_their_parameters_rounding(name: Any) -> None:
    """At a learning rate of 1e-9 an update has seven digits, and the parameters' errors say nothing of it."""
    report = small(4, config=OptimizerConfig(name=name, learning_rate=1e-9))
    assert report.ok, report.summary()
    assert report.torch_losses[-1] != report.torch_losses[0]


def test_a_parameter_that_both_sides_freeze_is_no_difference() -> None:
    def others(params: Any) -> Any:
        return jax.tree.map_with_path(lambda path, _: jax.tree_util.keystr(path[:2]) != "['last']['bias']", params)

    rule = optax.masked(optax.adam(1e-3), others)
    held = optax.masked(optax.set_to_zero(), lambda params: jax.tree.map(lambda other: not other, others(params)))
    config = OptimizerConfig(name="adam", weight_decay=0.0, learning_rate=1e-3)
    report = small(config=config, frozen="last.bias", flax_optimizer=optax.chain(rule, held))
    assert report.ok, report.summary()
    assert small(config=config, frozen="last.bias").unpaired == (
        "parameter last.bias is frozen in PyTorch and trained in Flax",
    )


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
