"""`torch.nn`'s normalisations, channels last."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from flax_tf.errors import InputError
from flax_tf.layers.basic import Buffer, last_axis


class LayerNorm(nnx.LayerNorm):
    """`torch.nn.LayerNorm` over the last axis.

    The variance is taken in two passes: NNX's default, E[x²] - E[x]², loses every digit when the mean is large.
    """

    def __init__(self, num_features: int, *, epsilon: float, rngs: nnx.Rngs):
        super().__init__(num_features, epsilon=epsilon, use_fast_variance=False, rngs=rngs)


class RMSNorm(nnx.Module):
    """`torch.nn.RMSNorm` over the last axis; without an epsilon it is the machine epsilon of what is computed in."""

    def __init__(self, num_features: int, *, epsilon: float | None = None, rngs: nnx.Rngs):
        del rngs  # every layer takes it
        self.epsilon = epsilon
        self.weight = nnx.Param(jnp.ones(num_features))

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """Divides by the root of the mean square, computed in float32 or wider, as PyTorch does."""
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        epsilon = float(jnp.finfo(wide.dtype).eps) if self.epsilon is None else self.epsilon
        normal = wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + epsilon)
        return normal.astype(x.dtype) * last_axis(self.weight[...], x.ndim)


def _near_zero(x: Array, axes: tuple[int, ...], where: Array | None = None) -> tuple[Array, Array]:
    """x less its mean over the axes, and that mean, with the axes kept and constant for gradients; float32 or wider.

    Large values round their sum, which PyTorch takes in float64. Statistics of what this returns are as good as that.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = jax.lax.stop_gradient(jnp.mean(wide, axes, keepdims=True, where=where))
    return wide - mean, mean


class GroupNorm(nnx.GroupNorm):
    """`torch.nn.GroupNorm`, channels last. The variance is taken in two passes, as in `LayerNorm`."""

    def __init__(self, num_groups: int, num_channels: int, *, epsilon: float = 1e-5, rngs: nnx.Rngs):
        super().__init__(num_channels, num_groups, epsilon=epsilon, use_fast_variance=False, rngs=rngs)

    def __call__(self, x: Float[Array, "B *S C"], *, mask: Array | None = None) -> Float[Array, "B *S C"]:
        """Normalises every group over its channels and all axes but the first; `mask` as in `nnx.GroupNorm`."""
        assert self.scale is not None
        groups = x.reshape(*x.shape[:-1], self.num_groups, -1)
        where = None if mask is None else mask.reshape(*mask.shape[:-1], self.num_groups, -1)
        near, _ = _near_zero(groups, (*range(1, x.ndim - 1), -1), where)
        dtype = jnp.result_type(x, self.scale[...])
        return super().__call__(near.reshape(x.shape), mask=mask).astype(dtype)


class BatchNorm(nnx.Module):
    """`torch.nn.BatchNorm1d`, `2d` and `3d`, channels last.

    `nnx.BatchNorm` trains otherwise: it keeps a running mean of the biased variance, where PyTorch's is unbiased, calls
    momentum what is 1 - PyTorch's, and takes the variance in one pass. `train()` and `eval()` choose the statistics.
    """

    def __init__(self, num_features: int, *, epsilon: float = 1e-5, momentum: float = 0.1, rngs: nnx.Rngs):
        del rngs  # every layer takes it
        self.epsilon = epsilon
        self.momentum = momentum
        self.use_running_average = False  # eval() sets it
        self.weight, self.bias = nnx.Param(jnp.ones(num_features)), nnx.Param(jnp.zeros(num_features))
        self.running_mean, self.running_var = Buffer(jnp.zeros(num_features)), Buffer(jnp.ones(num_features))

    def __call__(self, x: Float[Array, "*B C"]) -> Float[Array, "*B C"]:
        """Normalises every channel over all other axes: by the running statistics, or in training by those of the
        batch, which then join the running ones. Computed in float32 or wider.

        Raises InputError in training for one value per channel, which has no variance.
        """
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if self.use_running_average:
            mean, variance = self.running_mean[...], self.running_var[...]
        else:
            count = x.size // x.shape[-1]
            if count < 2:
                raise InputError("batch normalisation in training needs more than one value per channel: use eval()")
            axes = tuple(range(x.ndim - 1))
            wide, first = _near_zero(x, axes)
            mean, variance = jnp.mean(wide, axes), jnp.var(wide, axes)  # in two passes
            news = (first.reshape(-1) + mean, variance * (count / (count - 1)))
            for running, new in zip((self.running_mean, self.running_var), news, strict=True):
                running[...] = (1 - self.momentum) * running[...] + self.momentum * new
        mean, scale = (last_axis(v, x.ndim) for v in (mean, jax.lax.rsqrt(variance + self.epsilon)))
        weight, bias = (last_axis(v, x.ndim) for v in (self.weight[...], self.bias[...]))
        return ((wide - mean) * scale * weight + bias).astype(x.dtype)
