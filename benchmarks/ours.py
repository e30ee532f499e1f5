"""Our side of every row, by the library's public ways."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx

from benchmarks.work import Work
from benchmarks.workloads import LANGUAGE_MODEL_OPTIMIZER, TRANSFORMER_OPTIMIZER, Sizes
from flax_tf.config import Config, LanguageModelConfig, TransformerConfig
from flax_tf.generation import generate
from flax_tf.loss import language_model_loss, sequence_loss
from flax_tf.porting import torch_to_flax
from flax_tf.porting.files import read_weights
from flax_tf.saving import abstract, build
from flax_tf.training.optimizer import build_optimizer
from flax_tf.training.optimizer_config import OptimizerConfig
from flax_tf.training.sharding import data_mesh, replicate
from flax_tf.training.step import LossFunction, start
from flax_tf.training.stepper import Stepper
from flax_tf.training.task import HostBatch


def block_forward(sizes: Sizes) -> Work:
    graph, state = nnx.split(build(sizes.block))
    x = jax.random.normal(jax.random.key(0), (*sizes.block_batch, sizes.block.d_model))
    forward = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
    return Work(lambda: jax.block_until_ready(forward(state, x)))


def block_forward_backward(sizes: Sizes) -> Work:
    graph, state = nnx.split(build(sizes.block))
    x, weights = jax.random.normal(jax.random.key(0), (2, *sizes.block_batch, sizes.block.d_model))
    gradients = jax.jit(jax.value_and_grad(lambda state, x: (nnx.merge(graph, state)(x) * weights).sum(), (0, 1)))
    return Work(lambda: jax.block_until_ready(gradients(state, x))[0])


def language_model_batch(config: LanguageModelConfig, batch_size: int) -> HostBatch:
    ids = np.random.default_rng(0).integers(config.token_count(), size=(batch_size, config.max_seq_length + 1))
    return {"inputs": ids[:, :-1].astype(np.int32), "labels": ids[:, 1:].astype(np.int32)}


def transformer_batch(config: TransformerConfig, batch_size: int) -> HostBatch:
    draw = partial(np.random.default_rng(0).integers, 1, size=(batch_size, config.max_seq_length), dtype=np.int32)
    return {"source": draw(config.src_token_count()), "target": draw(config.tgt_token_count())}


def training(config: Config, optimizer: OptimizerConfig, loss: LossFunction, batch: HostBatch, steps: int = 1) -> Work:
    mesh = data_mesh(None)
    state, compiled = start(build(config), build_optimizer(optimizer, steps=1000), loss, seed=0)
    state = replicate(mesh, state)
    stepper: Stepper | None = None

    def run() -> jax.Array:
        nonlocal stepper
        stepper = stepper or Stepper(state, compiled.train, mesh, [batch])  # which compiles: a part of the first call
        for _ in range(steps):
            stepper.take([batch])
        return jax.block_until_ready(stepper.state).loss_sum

    return Work(run, steps)


def language_model_step(batch_size: int, sizes: Sizes) -> Work:
    config = sizes.language_model
    batch = language_model_batch(config, batch_size)
    return training(config, LANGUAGE_MODEL_OPTIMIZER, language_model_loss, batch)


def transformer_step(batch_size: int, sizes: Sizes) -> Work:
    config = sizes.transformer
    return training(config, TRANSFORMER_OPTIMIZER, sequence_loss, transformer_batch(config, batch_size))


def generation(batch_size: int, sizes: Sizes) -> Work:
    model = build(sizes.language_model)
    prompt = np.random.default_rng(0).integers(sizes.language_model.token_count(), size=(batch_size, sizes.prompt))
    return Work(lambda: generate(model, prompt, sizes.new_tokens, temperature=1.0))


def host_step(sizes: Sizes) -> Work:
    batch = language_model_batch(sizes.host, 1)
    return training(sizes.host, LANGUAGE_MODEL_OPTIMIZER, language_model_loss, batch, sizes.host_steps)


def host_step_nnx_jit(sizes: Sizes) -> Work:
    """The step as Flax's guide writes it."""
    model = build(sizes.host)
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3, weight_decay=1e-2), wrt=nnx.Param)
    batch = language_model_batch(sizes.host, 1)

    @nnx.jit
    def step(model, optimizer, batch):
        def mean_loss(model):
            total, tokens = language_model_loss(model, batch)
            return total / tokens

        loss, grads = nnx.value_and_grad(mean_loss)(model)
        optimizer.update(model, grads)
        return loss

    def run() -> jax.Array:
        for _ in range(sizes.host_steps):
            loss = step(model, optimizer, batch)
        return jax.block_until_ready(loss)

    return Work(run, sizes.host_steps)


def port(checkpoint: Path, sizes: Sizes) -> Work:
    import torch  # noqa: F401 - reads the file; PyTorch's side has imported it before the clock starts, too

    jax.devices()  # starts the backend

    def run() -> float:
        model = torch_to_flax(read_weights(checkpoint), abstract(sizes.checkpoint))
        arrays = jax.block_until_ready(jax.tree.leaves(nnx.state(model)))
        # A page of 4 KiB is read by its first number: what is mapped and not yet read is not loaded.
        return float(sum(np.asarray(array).reshape(-1)[::1024].sum() for array in arrays))

    return Work(run, once=True)


def works(checkpoint: Path) -> dict[tuple[str, str], Callable[[Sizes], Work]]:
    """{(what is run, side): what prepares it}."""
    return {
        ("block-forward", "ours"): block_forward,
        ("block-forward-backward", "ours"): block_forward_backward,
        ("lm-step-32", "ours"): partial(language_model_step, 32),
        ("lm-step-256", "ours"): partial(language_model_step, 256),
        ("transformer-step-8", "ours"): partial(transformer_step, 8),
        ("transformer-step-64", "ours"): partial(transformer_step, 64),
        ("generate-1", "ours"): partial(generation, 1),
        ("generate-32", "ours"): partial(generation, 32),
        ("host-step", "ours"): host_step,
        ("host-step", "nnx_jit"): host_step_nnx_jit,
        ("port-1gb", "ours"): partial(port, checkpoint),
    }
