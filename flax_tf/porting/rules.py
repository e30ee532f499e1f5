"""The one table of how a leaf layer's tensors are named and laid out in each framework.

A row is keyed by the type of the Flax layer, never by a key's spelling or a shape, and serves both directions, so that
they cannot drift apart. To port a layer of your own, add its row: `RULES[MyLayer] = (Tensor("weight", "kernel"),)`.
"""

from dataclasses import dataclass

from flax import nnx


@dataclass(frozen=True)
class Tensor:
    """One tensor of a leaf layer: its name on either side and how the axes are ordered.

    Axis i of the Flax array is axis `axes[i]` of the PyTorch tensor; None means the same order.
    """

    torch: str
    flax: str
    axes: tuple[int, ...] | None = None


RULES: dict[type, tuple[Tensor, ...]] = {
    # torch.nn.Linear keeps [out, in], NNX keeps [in, out]; a square matrix would not show it.
    nnx.Linear: (Tensor("weight", "kernel", (1, 0)), Tensor("bias", "bias")),
    nnx.Embed: (Tensor("weight", "embedding"),),
    nnx.LayerNorm: (Tensor("weight", "scale"), Tensor("bias", "bias")),
}


def rule_of(layer: nnx.Module) -> tuple[Tensor, ...]:
    """The row for a layer's type or the nearest base class that has one; () for a module without a row."""
    return next((RULES[base] for base in type(layer).__mro__ if base in RULES), ())
