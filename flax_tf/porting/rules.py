"""The one table of how a layer's tensors are named and laid out in each framework.

A rule is keyed by the type of the Flax layer, never by a key's spelling or a shape, and serves both directions, so that
they cannot drift apart. To port a layer of your own, add its rule before you port:

    from flax_tf.porting.rules import RULES, Tensor

    RULES[MyLayer] = (Tensor("weight", "kernel", (1, 0)), Tensor("bias", "bias"))

A tensor that the layer does not have (`use_bias=False`) is passed over. Where the layout depends on the layer's
settings, the rule is a function of the layer that returns such a tuple. What no rule names keeps its name and axes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from flax import nnx

from flax_tf.layers import BatchNorm


@dataclass(frozen=True)
class Tensor:
    """One tensor of a PyTorch layer, and where the Flax layer keeps it."""

    torch: str
    """PyTorch's name, below the layer's path: `weight`, `out_proj.weight`."""
    flax: str | tuple[str, ...]
    """The attribute path below the Flax layer: `kernel`, `out.kernel`. Several: the PyTorch tensor is theirs, one after
    another along its first axis. None at all, (): PyTorch alone has it; passed over on the way in, absent on the way
    out."""
    axes: tuple[int, ...] | None = None
    """Axis i of the Flax array is axis `axes[i]` of the PyTorch tensor; None means the same order."""
    shape: tuple[int, ...] | None = None
    """The shape in which `axes` sees a Flax array that keeps one of PyTorch's axes as several; None means its own."""
    flip: tuple[int, ...] = ()
    """The Flax axes that run backwards in PyTorch."""

    @property
    def places(self) -> tuple[str, ...]:
        """`flax` as a tuple."""
        return (self.flax,) if isinstance(self.flax, str) else self.flax

    def to_torch(self, array: np.ndarray) -> np.ndarray:
        """A view, or where axes merge a copy, of a Flax array in PyTorch's layout."""
        array = np.flip(array if self.shape is None else array.reshape(self.shape), self.flip)
        return array if self.axes is None else array.transpose(np.argsort(self.axes))

    def to_flax(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """The inverse of `to_torch`, for a Flax array of this shape."""
        array = array if self.axes is None else array.transpose(self.axes)
        return np.flip(array, self.flip).reshape(shape)

    def torch_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape that PyTorch gives to a Flax array of this shape."""
        shape = self.shape or shape
        return shape if self.axes is None else tuple(shape[i] for i in np.argsort(self.axes))


Rows = tuple[Tensor, ...]


def _merged(layer: nnx.LinearGeneral, torch: str = "", flax: str = "") -> tuple[Tensor, Tensor]:
    """Weight and bias of a `LinearGeneral` as those of a `torch.nn.Linear` from all inputs to all outputs."""
    ins, outs = math.prod(layer.in_features), math.prod(layer.out_features)
    return (
        Tensor(f"{torch}weight", f"{flax}kernel", (1, 0), shape=(ins, outs)),
        Tensor(f"{torch}bias", f"{flax}bias", shape=(outs,)),
    )


def _linear_general(layer: nnx.LinearGeneral) -> Rows:
    return () if layer.batch_axis else _merged(layer)  # PyTorch has no layer with a matrix for every row


def _conv(layer: nnx.Conv) -> Rows:
    """PyTorch: [out, in / groups, *kernel]; NNX: [*kernel, in / groups, out]."""
    return Tensor("weight", "kernel", (*range(2, len(layer.kernel_size) + 2), 1, 0)), Tensor("bias", "bias")


def _conv_transpose(layer: nnx.ConvTranspose) -> Rows:
    """PyTorch: [in, out, *kernel]; NNX: [*kernel, out, in], or [*kernel, in, out] with the kernel backwards."""
    spatial = tuple(range(len(layer.kernel_size)))
    channels, flip = ((1, 0), ()) if layer.transpose_kernel else ((0, 1), spatial)
    return Tensor("weight", "kernel", (*(i + 2 for i in spatial), *channels), flip=flip), Tensor("bias", "bias")


def _multi_head_attention(layer: nnx.MultiHeadAttention) -> Rows:
    """`torch.nn.MultiheadAttention` packs the three projections' weights where all are of one width."""
    if layer.num_kv_heads != layer.num_heads:  # PyTorch's has as many heads for keys as for queries
        return ()
    names = ("query", "key", "value")
    kernels, biases = tuple(f"{name}.kernel" for name in names), tuple(f"{name}.bias" for name in names)
    width = layer.num_heads * layer.head_dim
    if layer.in_features == layer.in_kv_features:
        weights = (Tensor("in_proj_weight", kernels, (1, 0), shape=(layer.in_features, width)),)
    else:
        weights = tuple(
            Tensor(f"{name[0]}_proj_weight", kernel, (1, 0), shape=(getattr(layer, name).in_features[0], width))
            for name, kernel in zip(names, kernels, strict=True)
        )
    return *weights, Tensor("in_proj_bias", biases, shape=(width,)), *_merged(layer.out, "out_proj.", "out.")


# PyTorch uses its number of batches for momentum=None alone.
_COUNT = Tensor("num_batches_tracked", ())
_NORM: Rows = (Tensor("weight", "scale"), Tensor("bias", "bias"))

RULES: dict[type, Rows | Callable[..., Rows]] = {
    # torch.nn.Linear keeps [out, in], NNX keeps [in, out]; a square matrix would not show it.
    nnx.Linear: (Tensor("weight", "kernel", (1, 0)), Tensor("bias", "bias")),
    nnx.LinearGeneral: _linear_general,
    nnx.Embed: (Tensor("weight", "embedding"),),
    nnx.LayerNorm: _NORM,
    nnx.RMSNorm: _NORM,
    nnx.GroupNorm: _NORM,
    nnx.InstanceNorm: _NORM,
    nnx.BatchNorm: (*_NORM, Tensor("running_mean", "mean"), Tensor("running_var", "var"), _COUNT),
    BatchNorm: (_COUNT,),
    nnx.Conv: _conv,
    nnx.ConvTranspose: _conv_transpose,
    nnx.MultiHeadAttention: _multi_head_attention,
}  # fmt: skip


def rule_of(layer: object) -> Rows:
    """The rule for a layer's type or the nearest base class that has one; () for a module without a rule."""
    rule = next((RULES[base] for base in type(layer).__mro__ if base in RULES), ())
    return rule if isinstance(rule, tuple) else rule(layer)
