"""A PyTorch model, its Flax twin with the same weights in float64, and what both compute."""

from collections.abc import Generator
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
import torch
from flax import nnx

from flax_tf.config import Config
from flax_tf.porting.convert import flax_to_torch, torch_to_flax
from flax_tf.porting.files import torch_to_numpy
from flax_tf.saving import abstract
from torch_ref.saving import build


@pytest.fixture(autouse=True, scope="module")
def float64() -> Generator[None]:
    """For every test, and every fixture, of a module that imports it."""
    before = jax.config.read("jax_enable_x64")
    with jax.enable_x64(True):
        yield
    jax.config.update("jax_enable_x64", before)  # the command turns it on for a process


# LLVM's optimisation takes longer than it saves in a test, and changes no formula.
quick_jit = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def state_dict(model: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: torch_to_numpy(tensor) for name, tensor in model.state_dict().items()}


def twins(config: Config, scale: float = 1.0, seed: int = 0) -> tuple[Any, Any]:
    """Both in evaluation mode; a scale above 1 makes the outputs of random weights more varied."""
    torch.manual_seed(seed)
    reference = build(config).double().eval()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter *= scale
    model = torch_to_flax(state_dict(reference), abstract(config))
    model.eval()
    return reference, model


def relative_error(value: Any, truth: Any) -> float:
    value, truth = np.asarray(value), torch_to_numpy(truth)
    assert value.shape == truth.shape and np.isfinite(value).all() and np.isfinite(truth).all()
    return float(np.linalg.norm(value - truth) / np.linalg.norm(truth))


def assert_same(reference: torch.nn.Module, model: Any, *inputs: np.ndarray) -> None:
    """Outputs and the gradient of every parameter, of the sum of the outputs with fixed random weights."""
    expected = [leaf for leaf in _leaves(reference(*map(torch.from_numpy, inputs))) if leaf is not None]
    weights = [np.random.default_rng(0).standard_normal(leaf.shape) for leaf in expected]
    sum((leaf * torch.from_numpy(weight)).sum() for leaf, weight in zip(expected, weights, strict=True)).backward()
    graph, parameters, rest = nnx.split(model, nnx.Param, ...)

    def scalar(parameters, rest, inputs, weights):
        outputs = jax.tree.leaves(nnx.merge(graph, parameters, rest)(*inputs))
        return sum((leaf * weight).sum() for leaf, weight in zip(outputs, weights, strict=True)), outputs

    gradients, outputs = quick_jit(jax.grad(scalar, has_aux=True))(parameters, rest, inputs, weights)
    for value, truth in zip(outputs, expected, strict=True):
        # The contract: a few hundred roundings of 1e-16.
        assert relative_error(value, truth) <= 1e-12
    gradients = flax_to_torch(nnx.merge(graph, gradients, rest))
    whole = np.sqrt(sum(p.grad.norm().item() ** 2 for p in reference.parameters() if p.grad is not None))
    for name, parameter in reference.named_parameters():
        truth = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        # Where exact arithmetic has zero (biases that softmax takes out), 1e-14 of the whole is rounding.
        if truth.norm() > 1e-14 * whole:
            assert relative_error(gradients[name], truth) <= 1e-10, name
        else:
            assert np.linalg.norm(gradients[name]) <= 1e-14 * whole, name


def run(model: Any, *inputs: Any) -> Any:
    """The model's output, jitted."""
    graph, state = nnx.split(model)
    return _run(graph, state, inputs, {})


def run_with_dropout(model: Any, *inputs: Any, seed: int) -> Any:
    """As `run`, with the random numbers that a model in training mode drops values by."""
    graph, state = nnx.split(model)
    return _run(graph, state, inputs, {"dropout": jax.random.key(seed)})


@partial(quick_jit, static_argnums=0)
def _run(graph: Any, state: Any, inputs: tuple[Any, ...], keys: dict[str, Any]) -> Any:
    return nnx.merge(graph, state)(*inputs, rngs=nnx.Rngs(**keys) if keys else None)


def _leaves(output: Any) -> list[Any]:
    return [leaf for part in output for leaf in _leaves(part)] if isinstance(output, tuple) else [output]


class FixedMask(nnx.Module):
    """Stands for dropout: the same zeros and scales in both frameworks, so that its places can be compared."""

    def __call__(self, x: Any, *, rngs: Any = None) -> Any:
        return x * fixed_mask(x.shape)


class TorchFixedMask(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.from_numpy(fixed_mask(x.shape))


def fixed_mask(shape: tuple[int, ...]) -> np.ndarray:
    # Over the last axis alone: one call for a sequence and a call for every step get the same.
    return np.broadcast_to(1.5 * (np.arange(shape[-1]) % 3 > 0), shape).copy()


def with_fixed_masks(reference: torch.nn.Module, model: Any) -> None:
    for module in list(reference.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Dropout):
                setattr(module, name, TorchFixedMask())
    for _, module in list(nnx.iter_graph(model)):
        if isinstance(module, nnx.Module):
            for name, child in list(vars(module).items()):
                if isinstance(child, nnx.Dropout):
                    setattr(module, name, FixedMask())
