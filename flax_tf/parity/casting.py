"""What a Flax module needs to compute in one precision, as it is told and no other."""

import contextlib
import math
from collections.abc import Generator
from functools import cache
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_tf.layers import RMSNorm
from flax_tf.parity.tree import is_array


@cache
def compiler_options() -> dict[str, Any]:
    """The compiler options for a single run whose float32 matrix products are as accurate as PyTorch's.

    On a CPU, XLA's default kernel adds each dot product up in one running total: at 2,048 terms its error is three
    times that of PyTorch, which adds up in blocks, as XLA's other kernel does. And what makes
    other programs fast takes longer here than it saves in one run; it changes no product.
    """
    cpu = {
        "xla_cpu_experimental_ynn_fusion_type": "",
        "xla_backend_optimization_level": 0,
        "xla_cpu_use_fusion_emitters": False,
        "xla_cpu_enable_concurrency_optimized_scheduler": False,
    }
    options = cpu if jax.default_backend() == "cpu" else {}
    try:
        jax.jit(lambda x: x, compiler_options=options)(0)
    except jax.errors.JaxRuntimeError:  # an XLA without that kernel, and so without the option
        return {}
    return options


def cast_array(array: Any, dtype: str) -> jax.Array:
    """The array in JAX; in precision `dtype` if it holds floating-point numbers."""
    if not (is_array(array) and jnp.issubdtype(array.dtype, jnp.floating)):
        return jnp.asarray(array)
    return jnp.asarray(np.asarray(array).astype(dtype))  # cast in NumPy: JAX would compile that for every shape


def cast_module(module: nnx.Module, dtype: str, nudge: int | None = None) -> nnx.Module:
    """A copy of the module with every floating-point parameter and buffer in precision `dtype`, to compute in it.

    A layer that was told a dtype to compute in, or fixed one when it was made, as `nnx.Embed` does, is told this one.
    `nudge` is a seed: every parameter is moved by one rounding, up or down.
    """
    graph, parameters, rest = nnx.split(module, nnx.Param, ...)
    parameters, rest = jax.tree.map(lambda leaf: cast_array(leaf, dtype), (parameters, rest))
    if nudge is not None:
        generator = np.random.default_rng(nudge)
        parameters = jax.tree.map(lambda leaf: _nudged(leaf, generator), parameters)
    copy = nnx.merge(graph, parameters, rest)
    for (_, submodule), (_, original) in zip(nnx.iter_modules(copy), nnx.iter_modules(module), strict=True):
        _compute_in(dtype, submodule, original)
    return copy


def _nudged(parameter: jax.Array, generator: np.random.Generator) -> jax.Array:
    if not jnp.issubdtype(parameter.dtype, jnp.floating):
        return parameter
    signs = generator.choice([-1, 1], size=parameter.shape)
    factors = 1 + signs * float(jnp.finfo(parameter.dtype).eps)
    return jnp.asarray(np.asarray(parameter) * factors.astype(parameter.dtype))


def _compute_in(dtype: str, submodule: Any, original: Any) -> None:
    """Frees a layer of what would keep it from computing in `dtype`, or as the original."""
    own = vars(submodule).get("dtype")
    if own is not None and jnp.issubdtype(own, jnp.floating):
        submodule.dtype = jnp.dtype(dtype)
    if isinstance(submodule, RMSNorm) and submodule.epsilon is None:
        # That of the precision it computes in: of the model's own, which must not change with this run's.
        precision = jnp.promote_types(original.weight.get_value().dtype, jnp.float32)
        submodule.epsilon = float(jnp.finfo(precision).eps)


@contextlib.contextmanager
def computing_in(dtype: str) -> Generator[None]:
    """For the block, `jax.nn.dot_product_attention` is computed in float64 if that is the dtype.

    JAX's own takes its softmax in float32 whatever it is given, and so differs from the formula by 1e-7. With arguments
    of sequence lengths or windows it stays JAX's.
    """
    original: Any = jax.nn.dot_product_attention

    def attention(
        query: Any,
        key: Any,
        value: Any,
        bias: Any = None,
        mask: Any = None,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        implementation: Any = None,
        **others: Any,
    ) -> jax.Array:
        if query.ndim != 4 or any(given is not None and given is not False for given in others.values()):
            options = {"scale": scale, "is_causal": is_causal, "implementation": implementation, **others}
            return original(query, key, value, bias, mask, **options)
        repeats = query.shape[2] // key.shape[2]
        key, value = jnp.repeat(key, repeats, axis=2), jnp.repeat(value, repeats, axis=2)
        scores = jnp.einsum("btnh,bsnh->bnts", query, key)
        scores *= 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        scores = scores if bias is None else scores + bias
        T, S = scores.shape[-2:]
        if is_causal:
            causal = jnp.tril(jnp.ones((T, S), bool))[None, None]
            mask = causal if mask is None else mask & causal
        if mask is not None:
            scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, axis=-1), value)

    if dtype != "float64":
        yield
        return
    with mock.patch.object(jax.nn, "dot_product_attention", attention):
        yield
