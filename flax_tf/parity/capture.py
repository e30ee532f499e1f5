"""Running one model in one precision and keeping every submodule's output and every parameter's gradient."""

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from operator import itemgetter
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
    """Runs a copy of a Flax module, jitted as a whole, in evaluation mode.

    Floating-point inputs and weights are cast to `dtype`; for float64 the caller sets `jax.enable_x64`.
    """
    module = cast_module(module, dtype)
    module.eval()
    graph, parameters, rest = nnx.split(module, nnx.Param, ...)

    @partial(jax.jit, compiler_options=compiler_options())
    def run(parameters: nnx.State, inputs: list[jax.Array], weights: list[jax.Array]) -> Any:
        def scalar(parameters: nnx.State) -> Any:
            model = nnx.merge(graph, parameters, rest)
            with recorded_calls(model) as calls:
                results = jax.tree.leaves(model(*inputs))
            return sum(jnp.vdot(result, weight) for result, weight in zip(results, weights, strict=True)), calls

        return jax.grad(scalar, has_aux=True)(parameters)

    arrays = [cast_array(array, dtype) for array in inputs]
    # Weights are arguments: as constants, XLA would spend minutes on folding those of a large vocabulary.
    shapes = jax.eval_shape(lambda *arrays: module(*arrays), *arrays)
    weights = [cast_array(cotangent(s.shape), dtype) for s in jax.tree.leaves(shapes)]
    gradients, calls = run(parameters, arrays, weights)
    capture, numbers = Capture(), Counter()
    for path, output in one_by_one(jax.tree.map(np.asarray, calls)):
        for index, leaf in enumerate(jax.tree.leaves(output)):
            capture.outputs[path, numbers[path], index] = leaf
        numbers[path] += 1
    trained = {name for name, slot in slots(module).items() if isinstance(slot.variables[0], nnx.Param)}
    for name, gradient in flax_to_torch(nnx.merge(graph, gradients, rest)).items():
        if name in trained:
            capture.gradients[name] = gradient
    return capture


@cache
def compiler_options() -> dict[str, Any]:
    """The compiler options for a single run whose float32 matrix products are as accurate as PyTorch's.

    On a CPU, XLA's default kernel adds each dot product up in one running total: at 2,048 terms its error is three
    times that of PyTorch, which adds up in blocks, as XLA's other kernel does. And LLVM's optimisation takes longer
    than it saves in one run; it changes no product.
    """
    cpu = {"xla_cpu_experimental_ynn_fusion_type": "", "xla_backend_optimization_level": 0}
    options = cpu if jax.default_backend() == "cpu" else {}
    try:
        jax.jit(lambda x: x, compiler_options=options)(0)
    except jax.errors.JaxRuntimeError:  # an XLA without that kernel, and so without the option
        return {}
    return options


@partial(jax.tree_util.register_dataclass, data_fields=["output"], meta_fields=["path"])
@dataclass(frozen=True)
class Recorded:
    """One call of a module: its PyTorch path, and what it returned."""

    path: str
    output: Any


# The calls within a `jax.lax.scan` are a list of their own, in which outputs are stacked over the steps.
Calls = list["Recorded | Calls"]


def one_by_one(calls: Calls) -> Iterator[tuple[str, Any]]:
    """(path, output) of every call in order, those of a scan step by step."""
    for entry in calls:
        if isinstance(entry, Recorded):
            yield entry.path, entry.output
        else:
            for step in range(len(jax.tree.leaves(entry)[0])):
                yield from one_by_one(jax.tree.map(itemgetter(step), entry))


@contextlib.contextmanager
def recorded_calls(module: nnx.Module) -> Generator[Calls]:
    """Yields a list that every call of a module of the tree joins when it has ended, until the block ends.

    `nnx.capture` would not do: it passes over a class that inherits its `__call__`, keeps no order, and fails within a
    `jax.lax.scan`.
    """
    paths = {id(submodule): path for path, submodule in torch_modules(module)}
    classes: set[Any] = {type(submodule) for _, submodule in torch_modules(module) if callable(submodule)}
    own: dict[Any, Any] = {cls: cls.__dict__.get("__call__") for cls in classes}
    calls: Calls = []

    def recording(cls: Any, original: Callable) -> Callable:
        def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
            output = original(self, *args, **kwargs)
            # Not when a subclass's call has come here through super(): that call is recorded itself.
            if type(self) is cls and id(self) in paths:
                calls.append(Recorded(paths[id(self)], output))
            return output

        return call

    wrapped = {cls: recording(cls, cls.__call__) for cls in classes}
    scan = jax.lax.scan
    try:
        for cls, call in wrapped.items():
            cls.__call__ = call
        jax.lax.scan = partial(_recording_scan, scan, calls)
        yield calls
    finally:
        jax.lax.scan = scan
        for cls, call in own.items():
            if call is None:
                del cls.__call__
            else:
                cls.__call__ = call


def _recording_scan(
    scan: Callable, calls: Calls, f: Callable, init: Any, *args: Any, reverse: bool = False, **kwargs: Any
) -> Any:
    """`scan(f, init, ...)`, after which the calls within `f` join the list.

    Their outputs exist within the scan alone, unless they leave it as its own do: stacked, as results of a step.
    """

    def step(carry: Any, x: Any) -> Any:
        before = len(calls)
        carry, y = f(carry, x)
        inside = calls[before:]
        del calls[before:]
        return carry, (y, inside)

    carry, (ys, inside) = scan(step, init, *args, reverse=reverse, **kwargs)
    if inside:
        calls.append(jax.tree.map(lambda stacked: jnp.flip(stacked, 0), inside) if reverse else inside)
    return carry, ys


def cast_array(array: Any, dtype: str) -> jax.Array:
    """The array in JAX; in precision `dtype` if it holds floating-point numbers."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return jnp.asarray(array)
    return jnp.asarray(np.asarray(array).astype(dtype))  # cast in NumPy: JAX would compile that for every shape


def cast_module(module: nnx.Module, dtype: str) -> nnx.Module:
    """A copy of the module with every floating-point parameter and buffer in precision `dtype`."""
    graph, state = nnx.split(module)
    return nnx.merge(graph, jax.tree.map(lambda leaf: cast_array(leaf, dtype), state))
