"""Running a Flax module in one precision and telling every submodule's inputs, outputs and gradients."""

import contextlib
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from functools import partial
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from flax_tf.parity.casting import cast_array, cast_module, compiler_options, computing_in
from flax_tf.parity.dropout import Masks, replaying_dropout
from flax_tf.parity.events import (
    BUFFER,
    GRADIENT,
    INPUT,
    INPUT_GRADIENT,
    OUTPUT,
    OUTPUT_GRADIENT,
    Call,
    Listener,
    call_name,
    key_name,
)
from flax_tf.parity.tree import arrays_of, map_arrays, results_of
from flax_tf.porting.convert import Renames, flax_to_torch, slots, torch_modules


def run_flax(
    module: nnx.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    dtype: str,
    listener: Listener,
    cotangents: Mapping[str, np.ndarray],
    *,
    masks: Masks | None = None,
    rename: Renames = None,
    nudge: int | None = None,
) -> list[str]:
    """Runs a copy of a Flax module forwards and backwards, jitted as a whole. Returns how its dropout differs.

    Floating-point arrays of the arguments (NumPy's, in any containers) and weights are cast to `dtype`; for float64
    the caller sets `jax.enable_x64`. Names are PyTorch's. The gradients are those of the scalar Σ output · cotangent.
    With `masks` the module is in training mode and drops what they say, else in evaluation mode. `nudge` is a seed:
    every parameter is moved by one rounding, up or down.
    Every array leaves the compiled program when it is computed, and none is kept.
    """
    module = cast_module(module, dtype, nudge)
    module.eval() if masks is None else module.train()
    graph, parameters, rest = nnx.split(module, nnx.Param, ...)
    arrays = {label: cast_array(array, dtype) for label, array in arrays_of((args, dict(kwargs))).items()}
    differences: list[str] = []
    # Weights are arguments: as constants, XLA would spend minutes on folding those of a large vocabulary.
    weights = {label: cast_array(weight, dtype) for label, weight in cotangents.items()}

    @partial(jax.jit, donate_argnums=0, compiler_options=compiler_options())
    def run(parameters: nnx.State, arrays: dict[str, jax.Array], weights: dict[str, jax.Array]) -> Any:
        def scalar(parameters: nnx.State, probe: jax.Array) -> tuple[jax.Array, nnx.State]:
            # A copy, or what training mode changes would leak out of the trace.
            model = nnx.merge(graph, parameters, rest, copy=True)
            given_args, given_kwargs = map_arrays(lambda label, _: arrays[label], (args, dict(kwargs)))
            # Where a gradient turns wrong is found in float64.
            inner = dtype == "float64"
            with (
                computing_in(dtype),
                _dropping(model, masks, rename, differences),
                recorded_calls(model, listener, rename, probe=probe, inner_gradients=inner),
            ):
                outputs = arrays_of(model(*given_args, **given_kwargs))
            # Only what both sides return: what one returns alone is reported.
            pairs = [(outputs[label], _placed(weights[label], outputs[label])) for label in weights if label in outputs]
            total = sum((jnp.vdot(*pair) for pair in pairs if pair[0].shape == pair[1].shape), jnp.zeros((), dtype))
            return total, nnx.split(model, nnx.Param, ...)[2]

        return jax.grad(scalar, argnums=(0, 1), has_aux=True)(parameters, jnp.zeros(()))

    (gradients, _), after = jax.block_until_ready(run(parameters, arrays, weights))
    jax.effects_barrier()
    if masks is not None:  # training mode, which changes buffers
        for key, slot in slots(nnx.merge(graph, gradients, after), rename).items():
            if not any(isinstance(variable, nnx.Param) for variable in slot.variables):
                listener(key_name(BUFFER, key), slot.to_torch())
    trained = {
        key for key, slot in slots(module, rename).items() if all(isinstance(v, nnx.Param) for v in slot.variables)
    }
    for key, gradient in flax_to_torch(nnx.merge(graph, gradients, rest), rename).items():
        if key in trained:
            listener(key_name(GRADIENT, key), gradient)
    return differences


def _placed(weight: jax.Array, output: jax.Array) -> jax.Array:
    """The cotangent in the layout of Flax's output, which may have the channels last."""
    return weight if weight.shape == output.shape or weight.ndim < 3 else jnp.moveaxis(weight, 1, -1)


@contextlib.contextmanager
def _dropping(model: nnx.Module, masks: Masks | None, rename: Renames, differences: list[str]) -> Generator[None]:
    """Training mode's dropout for the block, if there are masks; what differs joins the list."""
    if masks is None:
        yield
        return
    with replaying_dropout(model, masks, rename) as lines:
        yield
    differences.extend(lines)


class _Numbers:
    """Numbers the calls as they happen: within a `jax.lax.scan`, one traced call happens many times.

    A site is one traced call. Backwards, its calls come in reverse.
    """

    def __init__(self, listener: Listener):
        self._listener = listener
        self._count: Counter[str] = Counter()
        self._happened: dict[int, list[Call]] = {}
        self._ahead: dict[tuple[int, str], list[Call]] = {}

    def begin(self, site: int, path: str, *arrays: Any) -> None:
        if self._ahead:  # rematerialised on the way back: told already
            return
        self._happened.setdefault(site, []).append(Call(path, self._count[path]))
        self._count[path] += 1
        self._tell(INPUT, self._happened[site][-1], [str(index) for index in range(len(arrays))], arrays)

    def end(self, site: int, labels: list[str], *arrays: Any) -> None:
        if not self._ahead:
            self._tell(OUTPUT, self._happened[site][-1], labels, arrays)

    def back(self, site: int, what: str, labels: list[str], *arrays: Any) -> None:
        ahead = self._ahead.setdefault((site, what), list(self._happened[site]))
        self._tell(what, ahead.pop(), labels, arrays)

    def _tell(self, what: str, call: Call, labels: list[str], arrays: tuple[Any, ...]) -> None:
        for label, array in zip(labels, arrays, strict=True):
            self._listener(call_name(what, call, label), np.asarray(array))


@contextlib.contextmanager
def recorded_calls(
    module: nnx.Module,
    listener: Listener,
    rename: Renames = None,
    *,
    probe: jax.Array | None = None,
    inner_gradients: bool = True,
) -> Generator[None]:
    """Tells the inputs, outputs and gradients of every call of a module of the tree, until the block ends.

    Gradients are told under `jax.grad`: those on the way to what it differentiates, or, if `probe` is among that, all;
    without `inner_gradients`, only those of the whole model's inputs and outputs.

    `nnx.capture` would not do: it passes over a class that inherits its `__call__`, keeps no order and no gradients,
    and fails within a `jax.lax.scan`. What is told is told when it is computed, also under jit, grad and scan.
    """
    paths: dict[int, str] = {}
    for path, submodule in torch_modules(module, rename):
        paths.setdefault(id(submodule), path)
    classes: set[Any] = {type(submodule) for _, submodule in torch_modules(module) if callable(submodule)}
    own: dict[Any, Any] = {cls: cls.__dict__.get("__call__") for cls in classes}
    numbers, sites = _Numbers(listener), count()

    def recording(cls: Any, original: Callable) -> Callable:
        def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
            # Not when a subclass's call has come here through super(): that call is recorded itself.
            if type(self) is not cls or id(self) not in paths:
                return original(self, *args, **kwargs)
            site = next(sites)
            inputs = list(arrays_of((args, kwargs)).values())
            compiled = probe is not None or any(isinstance(array, Tracer) for array in inputs)
            _when_computed(partial(numbers.begin, site, paths[id(self)]), inputs, compiled)
            labels = [str(index) for index in range(len(inputs))]
            told = inner_gradients or self is module
            if told:
                args, kwargs = _tapped((args, kwargs), labels, partial(numbers.back, site, INPUT_GRADIENT), probe)
            output = original(self, *args, **kwargs)
            outputs = results_of(output)
            _when_computed(partial(numbers.end, site, list(outputs)), list(outputs.values()), compiled)
            if told:
                output = _tapped(output, list(arrays_of(output)), partial(numbers.back, site, OUTPUT_GRADIENT), probe)
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


def _when_computed(tell: Callable[..., None], arrays: list[Any], compiled: bool) -> None:
    """Tells the arrays: now, or, in a program that is being compiled, when it comes to them."""
    if compiled:
        jax.debug.callback(tell, *arrays, ordered=True)
    else:
        tell(*arrays)


def _tapped(tree: Any, labels: list[str], tell: Callable[..., None], probe: jax.Array | None) -> Any:
    """The tree, whose floating-point arrays tell their gradients on the way back; an array that comes twice, once.

    A scalar `probe` that is differentiated goes in too, or nothing would be told where no other input depends on what
    is differentiated, as after a `stop_gradient`.
    """
    arrays, names = {}, {}
    for label, array in zip(labels, arrays_of(tree).values(), strict=True):
        if jnp.issubdtype(array.dtype, jnp.floating) and id(array) not in arrays:
            arrays[id(array)], names[id(array)] = array, label
    if not arrays:
        return tree

    @jax.custom_vjp
    def tap(arrays: list[jax.Array], probe: jax.Array | None) -> list[jax.Array]:
        return arrays

    def forward(arrays: list[jax.Array], probe: jax.Array | None) -> tuple[list[jax.Array], None]:
        return arrays, None

    def backward(_: None, gradients: list[jax.Array]) -> tuple[list[jax.Array], jax.Array | None]:
        jax.debug.callback(partial(tell, list(names.values())), *gradients, ordered=True)
        return gradients, None if probe is None else jnp.zeros_like(probe)

    tap.defvjp(forward, backward)
    aliases = dict(zip(arrays, tap(list(arrays.values()), probe), strict=True))
    return map_arrays(lambda _, array: aliases.get(id(array), array), tree)
