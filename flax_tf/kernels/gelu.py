"""GELU with the error function, in PyTorch's formula."""

from math import pi, sqrt

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.custom_jvp
def gelu(x: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """x·Φ(x) = x/2·(1 + erf(x/√2)) (Hendrycks and Gimpel 2016), in float32 at least, as `torch.nn.functional.gelu`.

    `jax.nn.gelu` takes the complementary error function, which XLA computes in two branches: three times as slow.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * _cdf(wide)).astype(x.dtype)


@gelu.defjvp
def _derivative(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (x,), (tangent,) = primals, tangents
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    slope = _cdf(wide) + wide * jnp.exp(-0.5 * wide * wide) / sqrt(2 * pi)  # Φ(x) + x·Φ'(x)
    return gelu(x), tangent * slope.astype(x.dtype)


def _cdf(x: Array) -> Array:
    return 0.5 * (1 + jax.lax.erf(x * sqrt(0.5)))
