"""Every system's training handed over at step 50 of 100: it goes on as the run that was never stopped."""

from collections.abc import Generator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from models import reference, twin
from trainings import SYSTEMS
from twins import quick_jit

from flax_tf.parity.tolerances import STEPS_FLOAT64, relative_error
from flax_tf.porting import flax_to_torch
from flax_tf.porting.optimizer import optax_to_torch, torch_to_optax
from flax_tf.training.optimizer import build_optimizer
from flax_tf.training.optimizer_config import OptimizerConfig
from flax_tf.training.step import TrainState, start
from torch_ref import optimizer as torch_optimizer

STEPS, K = 100, 50
CONFIGS = {
    "adam": OptimizerConfig(name="adam", weight_decay=0.1),
    "adamw": OptimizerConfig(
        weight_decay=0.1,
        decay="matrices",
        schedule="cosine",
        warmup_steps=61,  # handed over within the warm-up
        min_learning_rate=1e-4,
        clip_norm=0.5,
    ),
}


def packed(batch: Any) -> dict[str, np.ndarray]:
    """The batch as a training step takes it."""
    return batch if isinstance(batch, dict) else {"alone": batch}


def unpacked(batch: dict[str, Any]) -> Any:
    return batch.get("alone", batch)


@pytest.fixture(autouse=True)
def float64() -> Generator[None]:
    with jax.enable_x64(True):
        yield


class TorchRun:
    """A PyTorch run that is at step 0, or where a JAX run was at step `K`."""

    def __init__(self, system: str, config: OptimizerConfig, seed: int = 0):
        model = SYSTEMS[system][0]
        self.module = reference(model if system == "block" else replace(model, dropout=0.0), seed).double()
        self.optimizer = torch_optimizer.build_optimizer(config, self.module)
        self.scheduler = torch_optimizer.build_scheduler(config, self.optimizer, STEPS)
        self._loss, self._config = SYSTEMS[system][1], config

    def take_over(self, weights: dict[str, np.ndarray], optimizer: dict[str, Any]) -> None:
        self.module.load_state_dict({name: torch.tensor(array) for name, array in weights.items()})
        self.optimizer.load_state_dict(optimizer)
        self.scheduler = torch_optimizer.build_scheduler(self._config, self.optimizer, STEPS, step=K)

    def do(self, batch: Any) -> dict[str, np.ndarray]:
        """One step; a copy of the parameters after it."""
        self.module.zero_grad()
        self._loss(self.module, jax.tree.map(torch.from_numpy, batch)).backward()
        torch_optimizer.clip_gradients(self._config, self.module)
        self.optimizer.step()
        self.scheduler.step()
        return {name: parameter.detach().numpy().copy() for name, parameter in self.module.named_parameters()}


class FlaxRun:
    """A JAX run from the start of a PyTorch run, which goes on from wherever its state is set."""

    def __init__(self, system: str, run: TorchRun, config: OptimizerConfig):
        self.model = twin(run.module)
        mean = SYSTEMS[system][2]

        def loss(model: Any, batch: dict[str, jax.Array], *, rngs: Any = None) -> tuple[jax.Array, jax.Array]:
            return mean(model, unpacked(batch)), jnp.ones(())

        self.state, steps = start(self.model, build_optimizer(config, STEPS), loss, seed=0)
        self._train = quick_jit(steps.train)

    def take_over(self, run: TorchRun) -> None:
        nnx.update(self.model, nnx.state(twin(run.module), nnx.Param))
        opt_state = torch_to_optax(run.optimizer.state_dict(), self.model, self.state.opt_state, step=K)
        params = jax.tree.map(jnp.copy, nnx.state(self.model, nnx.Param))
        self.state: TrainState = self.state._replace(step=jnp.array(K, jnp.int32), params=params, opt_state=opt_state)

    def do(self, batch: Any) -> dict[str, np.ndarray]:
        self.state = self._train(self.state, packed(batch))
        nnx.update(self.model, self.state.params)
        return flax_to_torch(self.model)


def worst(ours: dict[str, np.ndarray], truth: dict[str, np.ndarray]) -> float:
    """Over the parameters: PyTorch's side has no buffers."""
    return max(relative_error(ours[name], truth[name]) for name in ours.keys() & truth.keys())


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("system", SYSTEMS)
def test_both_directions(system: str, name: str, record_property: Any) -> None:
    config = CONFIGS[name]
    rng = np.random.default_rng(0)
    batches = [SYSTEMS[system][3](rng) for _ in range(STEPS)]
    torch_run = TorchRun(system, config)
    flax_run = FlaxRun(system, torch_run, config)

    for batch in batches[:K]:
        weights = flax_run.do(batch)
    resumed = TorchRun(system, config, seed=5)
    resumed.take_over(
        {**resumed.module.state_dict(), **weights},
        optax_to_torch(flax_run.state.opt_state, flax_run.model, resumed.optimizer.state_dict()),
    )
    to_torch = []
    for batch in batches[K:]:
        truth = flax_run.do(batch)
        to_torch.append(worst(resumed.do(batch), truth))

    for batch in batches[:K]:
        torch_run.do(batch)
    flax_run.take_over(torch_run)
    to_flax = []
    for batch in batches[K:]:
        truth = torch_run.do(batch)
        to_flax.append(worst(flax_run.do(batch), truth))

    record_property("worst", f"{system} {name}: to Flax {max(to_flax):.1e}, to PyTorch {max(to_torch):.1e}")
    assert len(to_flax) == len(to_torch) == STEPS - K
    assert max(to_flax) <= STEPS_FLOAT64
    assert max(to_torch) <= STEPS_FLOAT64
