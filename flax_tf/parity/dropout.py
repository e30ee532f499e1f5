"""Dropout with the same masks in both frameworks: drawn and recorded in PyTorch, replayed in PyTorch or in Flax."""

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_tf.errors import InputError
from flax_tf.kernels import dropout as kernel
from flax_tf.layers import Dropout
from flax_tf.porting.convert import torch_modules
from flax_tf.porting.files import numpy_to_torch

if TYPE_CHECKING:
    import torch

ROOT = "(model)"
# With at least so many axes the first two are the batch and the channels, with fewer the channels are the first.
FEATURE_DROPOUTS = {"dropout1d": 3, "dropout2d": 3, "dropout3d": 5}


@partial(jax.tree_util.register_dataclass, data_fields=["keep"], meta_fields=["rate"])
@dataclass(frozen=True)
class Mask:
    """What one call of dropout did. A pytree: within `jax.jit` the mask is an argument and the rate a constant."""

    keep: Any
    """bool, of the input's shape, or one that broadcasts to it: True where a value stays."""
    rate: float
    """The probability of a value to be dropped; those that stay are divided by 1 - rate."""


# {PyTorch path of the module that drops: its masks in the order of the calls}
Masks = dict[str, list[Mask]]
# (path of the module that drops, shape of the mask, rate) -> the mask
_Source = Callable[[str, tuple[int, ...], float], "torch.Tensor"]


@contextlib.contextmanager
def recording_dropout(module: "torch.nn.Module", seed: int) -> Generator[Masks]:
    """Yields a dict that the mask of every dropout joins, in whatever modules are in training mode, for the block.

    Recorded are `nn.Dropout`, `nn.Dropout1d` to `3d`, and their functions in `torch.nn.functional`, which belong to the
    innermost module whose forward calls them, as does the dropout of `nn.MultiheadAttention` and of
    `F.scaled_dot_product_attention`, which is computed by its definition while it drops.
    The masks come from a generator of their own with this seed; PyTorch's global one is left alone.
    Raises InputError, from within the model's call, where a module draws random numbers in any other way: for dropout
    between the layers of an `nn.GRU`, and for all noise that is no dropout. Raises it from within `backward()`, if that
    is in the block, for dropout that is computed again there, as under `torch.utils.checkpoint`.
    """
    import torch

    masks: Masks = {}
    generator = torch.Generator().manual_seed(seed)

    def draw(path: str, shape: tuple[int, ...], rate: float) -> torch.Tensor:
        keep = torch.rand(shape, generator=generator, device="cpu") >= rate
        masks.setdefault(path, []).append(Mask(keep.numpy(), rate))
        return keep

    with _torch_dropout(module, draw):
        yield masks


@contextlib.contextmanager
def replaying_dropout_torch(module: "torch.nn.Module", masks: Masks) -> Generator[None]:
    """For the block, dropout takes the recorded masks: those of the same module, or of a copy in another precision.

    Raises InputError for a dropout that the masks do not fit.
    """
    queues = {path: list(calls) for path, calls in masks.items()}

    def take(path: str, shape: tuple[int, ...], rate: float) -> "torch.Tensor":
        recorded = queues[path].pop(0) if queues.get(path) else None
        if recorded is None or recorded.keep.shape != shape or recorded.rate != rate:
            raise InputError(
                f"no mask was recorded for this call of {path or ROOT} (shape {list(shape)}, rate {rate}): "
                "record the masks with the same model and inputs of the same shape"
            )
        return numpy_to_torch(np.asarray(recorded.keep))

    with _torch_dropout(module, take):
        yield


@contextlib.contextmanager
def _torch_dropout(module: "torch.nn.Module", source: _Source) -> Generator[None]:
    """For the block, dropout in PyTorch takes its masks from `source`."""
    import torch
    import torch.nn.functional as F

    paths = {id(submodule): path for path, submodule in module.named_modules()}
    stack = [""]
    call = torch.nn.Module.__call__
    attention = F.scaled_dot_product_attention

    def tracked_call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        stack.append(paths.get(id(self), stack[-1]))
        before = torch.get_rng_state()
        try:
            output = call(self, *args, **kwargs)
            if not torch.equal(before, torch.get_rng_state()):
                raise InputError(
                    f"{stack[-1] or ROOT} ({type(self).__name__}) draws random numbers that cannot be recorded: "
                    "set the dropout of recurrent layers to 0, and write other dropout as nn.Dropout"
                )
            return output
        finally:
            stack.pop()

    def apply(mask_shape: Callable[[torch.Tensor], tuple[int, ...]], original: Callable) -> Callable:
        def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
            if not training or not 0 < p < 1:
                return original(input, p, training, inplace)
            if torch._C._current_graph_task_id() != -1:
                raise InputError(
                    f"{stack[-1] or ROOT} drops values again backwards, where masks cannot be replayed: "
                    "compare without torch.utils.checkpoint, which changes no result"
                )
            keep = source(stack[-1], mask_shape(input), p).to(input.device, input.dtype)
            scale = keep / (1 - p)  # as in PyTorch's kernel
            return input.mul_(scale) if inplace else input * scale

        return dropout

    def feature_shape(least: int, input: torch.Tensor) -> tuple[int, ...]:
        drawn = 2 if input.ndim >= least else 1
        return (*input.shape[:drawn], *[1] * (input.ndim - drawn))

    def attention_with_dropout(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if not dropout_p:
            return attention(query, key, value, attn_mask, 0.0, *args, **kwargs)
        # Of values that are the unit vectors, what comes out are the weights of attention.
        one_hot = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device).expand(*value.shape[:-1], -1)
        weights = attention(query, key, one_hot, attn_mask, 0.0, *args, **kwargs)
        if kwargs.get("enable_gqa"):
            value = value.repeat_interleave(query.shape[-3] // value.shape[-3], dim=-3)
        return F.dropout(weights, dropout_p) @ value

    patches = {"dropout": apply(lambda input: tuple(input.shape), F.dropout)}
    for name, least in FEATURE_DROPOUTS.items():
        patches[name] = apply(partial(feature_shape, least), getattr(F, name))
    patches["scaled_dot_product_attention"] = attention_with_dropout
    with contextlib.ExitStack() as restored:
        for name, patch in patches.items():
            _patch(restored, F, name, patch)
        _patch(restored, torch.nn.Module, "__call__", tracked_call)
        yield


@contextlib.contextmanager
def replaying_dropout(
    module: nnx.Module, masks: Mapping[str, Sequence[Mask]], rename: Mapping[str, str | None] | None = None
) -> Generator[list[str]]:
    """For the block, every `nnx.Dropout` (ours too) and `nnx.MultiHeadAttention` of the tree drops by PyTorch's masks.

    A layer takes the masks of its own path; where PyTorch has none under it, those of its parent's path, as the
    counterpart of a function called by the parent's forward. It keeps its own rate and arithmetic and needs no `rngs`.
    Masks are served with the axes as they are, or with the second axis last, where Flax has channels.

    Yields a list of the differences, complete at the end of the block: layers that drop at another rate, without a
    recorded mask or values of another shape (these drop nothing), and masks that no layer took. Within `jax.jit`, where
    the masks may be arguments, it is filled when the function is traced.
    Raises InputError, from within the model's call, for dropout within a `jax.lax.scan`, and in a layer that is not of
    the tree, such as the copies that `nnx.remat` works on.
    """
    paths: dict[int, str] = {}
    for path, submodule in torch_modules(module, rename):
        paths.setdefault(id(submodule), path)
    queues = {path: list(calls) for path, calls in masks.items()}
    differences: list[str] = []
    layers: list[Any] = []  # those that are being called, from the outside in
    scans = [0]
    bernoulli, keep_mask, scan = jax.random.bernoulli, kernel.keep_mask, jax.lax.scan

    def note(line: str) -> None:
        if line not in differences:
            differences.append(line)

    def tracked(call: Callable) -> Callable:
        def tracked_call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
            layers.append(self)
            try:
                # A stream of its own: one from outside could not be advanced within a transformation.
                return call(self, *args, **{**kwargs, "rngs": nnx.Rngs(dropout=0)})
            finally:
                layers.pop()

        return tracked_call

    def recorded_mask(key: jax.Array, p: Any = 0.5, shape: Any = None, *args: Any, **kwargs: Any) -> jax.Array:
        if not layers:
            return bernoulli(key, p, shape, *args, **kwargs)
        layer, shape = layers[-1], tuple(shape)
        rate = layer.rate if isinstance(layer, nnx.Dropout) else layer.dropout_rate
        if id(layer) not in paths:
            raise InputError(
                f"{type(layer).__name__} of rate {rate} drops values in a copy of the model, where masks cannot be "
                "replayed: compare without nnx.remat, which changes no result"
            )
        path = paths[id(layer)]
        name = path or ROOT
        if scans[0]:
            raise InputError(
                f"{name} drops values within a jax.lax.scan, where masks cannot be replayed: unroll the loop"
            )
        owner = path if path in queues else path.rpartition(".")[0]
        if not queues.get(owner):
            note(f"{name} drops {rate}, PyTorch " + ("does so less often" if owner in queues else "does not"))
            return jnp.ones(shape, bool)
        mask = queues[owner].pop(0)
        if mask.rate != rate:
            note(f"{name} drops {rate}, PyTorch {mask.rate}")
        if getattr(layer, "broadcast_dropout", False):
            note(f"{name} drops the same weights in all heads, PyTorch does not: set broadcast_dropout=False")
            return jnp.reshape(mask.keep, (-1, layer.num_heads, *shape[-2:]))
        keep = _fitting(jnp.asarray(mask.keep), shape, isinstance(layer, nnx.MultiHeadAttention))
        if keep is None:
            note(f"{name} drops values of shape {list(shape)}, PyTorch of shape {list(mask.keep.shape)}")
            return jnp.ones(shape, bool)
        return keep

    def our_recorded_mask(key: jax.Array, shape: tuple[int, ...], rate: float) -> jax.Array:
        return recorded_mask(key, 1 - rate, shape) if layers else keep_mask(key, shape, rate)

    def counted_scan(*args: Any, **kwargs: Any) -> Any:
        scans[0] += 1
        try:
            return scan(*args, **kwargs)
        finally:
            scans[0] -= 1

    with contextlib.ExitStack() as restored:
        for cls in (nnx.Dropout, Dropout, nnx.MultiHeadAttention):
            _patch(restored, cls, "__call__", tracked(cls.__call__))
        _patch(restored, jax.random, "bernoulli", recorded_mask)
        _patch(restored, kernel, "keep_mask", our_recorded_mask)
        _patch(restored, jax.lax, "scan", counted_scan)
        yield differences
    for path, left in queues.items():
        if left:
            often = "does not" if len(left) == len(masks[path]) else "does so less often"
            note(f"{path or ROOT} drops {left[0].rate} in PyTorch, Flax {often}")


def _fitting(keep: jax.Array, shape: tuple[int, ...], heads_apart: bool) -> jax.Array | None:
    """The mask in the shape that the layer asks for; None if it does not fit."""
    if keep.shape == shape:
        return keep
    if keep.ndim > 2 and jnp.moveaxis(keep, 1, -1).shape == shape:
        return jnp.moveaxis(keep, 1, -1)
    if heads_apart and keep.size == prod(shape) and keep.shape[-2:] == shape[-2:]:
        return keep.reshape(shape)  # PyTorch may have batch and heads in one axis
    return None


def _patch(restored: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    """Sets an attribute until the stack is closed."""
    restored.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)
