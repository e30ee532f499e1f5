"""Faults in models that are not of this project."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx
from models import state_arrays
from own_models import HIDDEN, IMAGES, RENAME, ImageNet, Rotary, TorchImageNet, TorchRotary

from flax_tf.parity import Report, compare
from flax_tf.porting import torch_to_flax
from sabotage.fault import Fault, found_by, with_call

FAULTS: list[Fault] = []

POSITIONS = np.random.default_rng(0).standard_normal((2, 31, 12))


def images(plant: Callable[[Any], None], **kwargs: Any) -> str | None:
    torch.manual_seed(0)
    module = TorchImageNet()
    module(torch.randn(5, 3, 9, 7))  # running statistics that are not 0 and 1
    model = torch_to_flax(state_arrays(module), ImageNet(nnx.Rngs(0)), RENAME)
    plant(model)
    return _named(compare(module, model, IMAGES, mask=HIDDEN, rename=RENAME, **kwargs))


def rotary(plant: Callable[[Any], None]) -> str | None:
    torch.manual_seed(0)
    module = TorchRotary()
    model = torch_to_flax(state_arrays(module), Rotary(rngs=nnx.Rngs(0)))
    plant(model)
    return _named(compare(module, model, POSITIONS))


def _named(report: Report) -> str | None:
    return None if report.ok else report.culprit or report.unpaired[0]


@found_by(FAULTS, "stem.0", "5")
def kernel_axes() -> str | None:
    """A convolution's kernel with height and width swapped."""

    def plant(model):
        kernel = model.conv.kernel
        kernel[...] = jnp.swapaxes(kernel[...], 0, 1)

    return images(plant)


@found_by(FAULTS, "up")
def kernel_not_flipped() -> str | None:
    """A transposed convolution's kernel that was not turned round."""

    def plant(model):
        model.up.kernel[...] = model.up.kernel[...][::-1]

    return images(plant)


@found_by(FAULTS, "stem.1")
def batch_statistics() -> str | None:
    """Batch norm that takes the batch's statistics in evaluation."""

    def call(self, x):
        x = (x - x.mean((0, 1, 2), keepdims=True)) / jnp.sqrt(x.var((0, 1, 2), keepdims=True) + self.epsilon)
        return x * self.weight[None, None, None] + self.bias[None, None, None]

    return images(lambda model: with_call(model.norm, call))


@found_by(FAULTS, "stem.1")
def running_statistics() -> str | None:
    """Batch norm's running mean left out of the port."""

    def plant(model):
        model.norm.running_mean[...] = jnp.zeros(10)

    return images(plant)


@found_by(FAULTS, "stem.1", "35")
def momentum() -> str | None:
    """Batch norm's momentum in NNX's sense, in one training step."""

    def plant(model):
        model.norm.momentum = 0.9

    return images(plant, train=True)


@found_by(FAULTS, "norm")
def number_of_groups() -> str | None:
    """Group norm with another number of groups."""

    def plant(model):
        model.group.num_groups, model.group.group_size = 5, 2

    return images(plant)


@found_by(FAULTS, "attn", "8")
def packed_projections() -> str | None:
    """Queries and keys swapped when a packed projection was taken apart."""

    def plant(model):
        model.attn.query, model.attn.key = model.attn.key, model.attn.query

    return images(plant)


@found_by(FAULTS, "attn", "21")
def mask_polarity() -> str | None:
    """A mask of PyTorch's polarity, True for "hide", handed to NNX's attention."""

    def plant(model):
        attend = type(model.attn).__call__
        with_call(model.attn, lambda self, q, k, v, mask: attend(self, q, k, v, mask=~mask))

    return images(plant)


@found_by(FAULTS, "drop", "27")
def dropout_missing() -> str | None:
    """No dropout in training mode where PyTorch has some."""
    return images(lambda model: with_call(model.drop, lambda self, x: x), train=True)


@found_by(FAULTS, "(model)", "7")
def adjacent_pairs() -> str | None:
    """Rotary positions that turn adjacent pairs instead of the two halves."""

    def rotate(self, x):
        half = x.shape[-1] // 2
        angles = jnp.arange(x.shape[-2])[:, None] / 10000 ** (jnp.arange(half) / half)
        sin, cos = jnp.sin(angles), jnp.cos(angles)
        first, second = x[..., 0::2], x[..., 1::2]
        return jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1).reshape(x.shape)

    def plant(model):
        model.__class__ = type("Rotary", (Rotary,), {"rotate": rotate})

    return rotary(plant)


@found_by(FAULTS, "norm", "2")
def rms_epsilon() -> str | None:
    """RMSNorm with epsilon 1e-6, which is Flax's default, for PyTorch's machine epsilon."""

    def plant(model):
        model.norm.epsilon = 1e-6

    return rotary(plant)


@found_by(FAULTS, "norm")
def centred() -> str | None:
    """LayerNorm's centring in an RMSNorm."""

    def plant(model):
        with_call(model.norm, lambda self, x: nnx.RMSNorm.__call__(self, x - x.mean(-1, keepdims=True)))

    return rotary(plant)


@found_by(FAULTS, "(model)")
def beside_a_fill() -> str | None:
    """A number added to scores of which some are filled with the dtype's lowest."""
    torch.manual_seed(0)
    hidden = np.arange(7)[None, :] > np.arange(5)[:, None]

    class Torch(torch.nn.Module):
        def forward(self, x):
            return x.masked_fill(torch.from_numpy(hidden), torch.finfo(x.dtype).min)

    class Flax(nnx.Module):
        def __call__(self, x):
            return jnp.where(hidden, jnp.finfo(x.dtype).min, x + 1e-3)

    return _named(compare(Torch(), Flax(), POSITIONS[:, :5, :7]))


@found_by(FAULTS, "(model)")
def not_detached() -> str | None:
    """A result whose gradient PyTorch stops, and Flax does not."""
    torch.manual_seed(0)

    class Torch(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = torch.nn.Linear(12, 5)

        def forward(self, x):
            return self.lin(x), self.lin(2 * x).detach()

    class Flax(nnx.Module):
        def __init__(self):
            self.lin = nnx.Linear(12, 5, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.lin(x), self.lin(2 * x)

    module = Torch()
    return _named(compare(module, torch_to_flax(module.state_dict(), Flax()), POSITIONS))


@found_by(FAULTS, "out")
def parameter_missing() -> str | None:
    """A bias that Flax does not have."""

    def plant(model):
        model.out = nnx.Linear(12, 12, use_bias=False, rngs=nnx.Rngs(0))

    return rotary(plant)
