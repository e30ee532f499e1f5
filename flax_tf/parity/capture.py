"""Running one model in one precision and keeping every submodule's output and every parameter's gradient."""

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_tf.porting.convert import flax_to_torch, slots, torch_modules
from flax_tf.porting.files import numpy_to_torch, torch_to_numpy

if TYPE_CHECKING:
    import torch

# (PyTorch path of the submodule, "" for the root; number of the call, from 0; number of the array in its output)
Call = tuple[str, int, int]


@dataclass(frozen=True)
class Capture:
    """What one run of a model left, in PyTorch's names and layout."""

    outputs: dict[Call, np.ndarray] = field(default_factory=dict)
    """Every submodule's output, in the order in which the calls ended: children before parents."""
    inputs: dict[tuple[str, int], tuple[Any, ...]] = field(default_factory=dict)
    """The positional arguments of every call, by path and number of the call."""
    gradients: dict[str, np.ndarray] = field(default_factory=dict)
    """By parameter, of the scalar Σ output · cotangent."""


def cotangent(shape: Sequence[int]) -> np.ndarray:
    """The fixed random weights that make a scalar of an output: every entry counts, each differently."""
    return np.random.default_rng(0).standard_normal(shape)


def capture_torch(module: "torch.nn.Module", inputs: Sequence[np.ndarray], dtype: str) -> Capture:
    """Runs a copy of a PyTorch module in evaluation mode; floating-point inputs and weights are cast to `dtype`."""
    import torch

    precision = getattr(torch, dtype)
    module = copy.deepcopy(module).to(precision).eval()
    capture, calls = Capture(), Counter()

    def hook_for(path: str):
        def hook(_module, args, output):
            number = calls[path]
            calls[path] += 1
            for index, leaf in enumerate(jax.tree.leaves(output)):
                capture.outputs[path, number, index] = torch_to_numpy(leaf)
            capture.inputs[path, number] = args

        return hook

    for path, submodule in module.named_modules():
        submodule.register_forward_hook(hook_for(path))
    tensors = [numpy_to_torch(array) for array in inputs]
    result = module(*(tensor.to(precision) if tensor.is_floating_point() else tensor for tensor in tensors))
    leaves = jax.tree.leaves(result)
    torch.autograd.backward(leaves, [numpy_to_torch(cotangent(leaf.shape)).to(precision) for leaf in leaves])
    for name, parameter in module.named_parameters(remove_duplicate=False):
        used = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        capture.gradients[name] = torch_to_numpy(used)
    return capture


def capture_flax(module: nnx.Module, inputs: Sequence[np.ndarray], dtype: str) -> Capture:
    """Runs a copy of a Flax module, jitted if it can be, in evaluation mode.

    Floating-point inputs and weights are cast to `dtype`; for float64 the caller sets `jax.enable_x64`.
    """
    module = cast_module(module, dtype)
    module.eval()
    graph, parameters, rest = nnx.split(module, nnx.Param, ...)
    capture, order = Capture(), []

    @partial(jax.jit, compiler_options=accurate_sums())
    def run(parameters: nnx.State, inputs: list[jax.Array], weights: list[jax.Array]) -> Any:
        def scalar(parameters: nnx.State) -> Any:
            model, calls, outputs = nnx.merge(graph, parameters, rest), Counter(), []

            def on_call(path: str, output: Any) -> None:
                for index, leaf in enumerate(jax.tree.leaves(output)):
                    order.append((path, calls[path], index))
                    outputs.append(leaf)
                calls[path] += 1

            with recorded_calls(model, on_call):
                results = jax.tree.leaves(model(*inputs))
            return sum(jnp.vdot(result, weight) for result, weight in zip(results, weights, strict=True)), outputs

        return jax.grad(scalar, has_aux=True)(parameters)

    arrays = [cast_array(array, dtype) for array in inputs]
    # Weights are arguments: as constants, XLA would spend minutes on folding those of a large vocabulary.
    shapes = jax.eval_shape(lambda *arrays: module(*arrays), *arrays)
    weights = [cast_array(cotangent(s.shape), dtype) for s in jax.tree.leaves(shapes)]
    try:
        gradients, outputs = run(parameters, arrays, weights)
    except jax.errors.UnexpectedTracerError:
        # What modules return within a scan exists outside of it only where the scan runs as a loop in Python.
        order.clear()
        with jax.disable_jit():
            gradients, outputs = run(parameters, arrays, weights)
    capture.outputs.update(zip(order, map(np.asarray, outputs), strict=True))
    trained = {name for name, (variable, _) in slots(module).items() if isinstance(variable, nnx.Param)}
    for name, gradient in flax_to_torch(nnx.merge(graph, gradients, rest)).items():
        if name in trained:
            capture.gradients[name] = gradient
    return capture


@cache
def accurate_sums() -> dict[str, str]:
    """The compiler options under which XLA's float32 matrix products are as accurate as PyTorch's.

    On a CPU, XLA's default kernel adds each dot product up in one running total: at 2,048 terms its error is three
    times that of PyTorch, which adds up in blocks, as XLA's other kernel does.
    """
    options = {"xla_cpu_experimental_ynn_fusion_type": ""} if jax.default_backend() == "cpu" else {}
    try:
        jax.jit(lambda x: x, compiler_options=options)(0)
    except jax.errors.JaxRuntimeError:  # an XLA without that kernel, and so without the option
        return {}
    return options


@contextlib.contextmanager
def recorded_calls(module: nnx.Module, on_call: Callable[[str, Any], None]) -> Generator[None]:
    """Within the block, `on_call(path, output)` follows the call of every module of the tree.

    `nnx.capture` would not do: it passes over a class that inherits its `__call__`, and keeps no order.
    """
    paths = {id(submodule): path for path, submodule in torch_modules(module)}
    classes: set[Any] = {type(submodule) for _, submodule in torch_modules(module) if callable(submodule)}
    own: dict[Any, Any] = {cls: cls.__dict__.get("__call__") for cls in classes}

    def recording(cls: Any, original: Callable) -> Callable:
        def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
            output = original(self, *args, **kwargs)
            # Not when a subclass's call has come here through super(): that call is recorded itself.
            if type(self) is cls and id(self) in paths:
                on_call(paths[id(self)], output)
            return output

        return call

    wrapped = {cls: recording(cls, cls.__call__) for cls in classes}
    try:
        for cls, call in wrapped.items():
            cls.__call__ = call
        yield
    finally:
        for cls, call in own.items():
            if call is None:
                del cls.__call__
            else:
                cls.__call__ = call


def cast_array(array: Any, dtype: str) -> jax.Array:
    """The array in JAX; in precision `dtype` if it holds floating-point numbers."""
    array = jnp.asarray(array)
    return array.astype(dtype) if jnp.issubdtype(array.dtype, jnp.floating) else array


def cast_module(module: nnx.Module, dtype: str) -> nnx.Module:
    """A copy of the module with every floating-point parameter and buffer in precision `dtype`."""
    graph, state = nnx.split(module)
    return nnx.merge(graph, jax.tree.map(lambda leaf: cast_array(leaf, dtype), state))
