"""A linear layer and the cross-entropy of its outputs, without ever holding these for all tokens."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def tokens_at_once() -> int:
    """How many tokens' logits are held at a time: on CPU about what its cache takes, elsewhere what fills a device."""
    return 256 if jax.default_backend() == "cpu" else 4096


def linear_cross_entropy(
    x: Float[Array, "B T D"],
    kernel: Float[Array, "D V"],
    bias: Float[Array, "V"] | None,
    labels: Int[Array, "B T"],
    weights: Float[Array, "B T"] | None = None,
    *,
    ignore_id: int | None = None,
    label_smoothing: float = 0.0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """The sum of weight * -log softmax(x @ kernel + bias)[label], in nats, and the sum of the weights (by default 1).

    Labels equal to `ignore_id`, which may lie outside the vocabulary, weigh nothing. With label smoothing a part
    `label_smoothing` of every label is spread evenly over all V classes (Szegedy et al. 2016). The quotient of the two
    is then `torch.nn.CrossEntropyLoss(ignore_index=ignore_id, label_smoothing=label_smoothing)`, and also the mean over
    several batches is the sum of losses by the sum of weights.

    Matrices are multiplied in the dtype of x and kernel, sums and the results are float32, or float64 if either is.
    A few positions of all sequences are computed at a time, about `tokens_at_once()` tokens, so the batch axis may be
    sharded. If a gradient is asked for, those of x, kernel and bias are computed along with the loss (that of the
    weights, too, is right), and logits never again: there is no forward mode.
    """
    dtype = jnp.result_type(x, kernel)
    wide = jnp.promote_types(dtype, jnp.float32)
    weights = jnp.ones(labels.shape, wide) if weights is None else weights.astype(wide)
    if ignore_id is not None:
        real = labels != ignore_id
        weights, labels = jnp.where(real, weights, 0), jnp.where(real, labels, 0)
    if bias is not None:
        # A row of the kernel whose input is 1: summing a gradient of logits over tokens costs more than this product.
        x = jnp.concatenate([x, jnp.ones_like(x[..., :1])], axis=-1)
        kernel = jnp.concatenate([kernel, bias.astype(kernel.dtype)[None]])
    return _total(x.astype(dtype), kernel.astype(dtype), labels, weights, label_smoothing), weights.sum()


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _total(x: Array, kernel: Array, labels: Array, weights: Array, label_smoothing: float) -> Array:
    def step(total, chunk):
        x, labels, weights = chunk
        losses, *_ = _losses(x, kernel, labels, label_smoothing)
        return total + (weights * losses).sum(), None

    total, _ = jax.lax.scan(step, jnp.zeros((), weights.dtype), _chunks(x, labels, weights))
    return total


def _total_and_gradients(x: Array, kernel: Array, labels: Array, weights: Array, label_smoothing: float):
    def step(carry, chunk):
        total, kernel_gradient = carry
        x, labels, weights = chunk
        losses, exps, sums = _losses(x, kernel, labels, label_smoothing)
        # Of the logits the gradient is weights / sums * these. The factor is applied to what is D wide, not V.
        hot = labels[..., None] == jnp.arange(exps.shape[-1])[None, None]  # (B, C, V), as all below never in memory
        smooth = (1 - label_smoothing) * hot + label_smoothing / exps.shape[-1]
        if x.dtype == jnp.float16:  # sums may be as large as V, which it does not hold
            scale = jnp.minimum(1, 2**15 / sums)
            exps, sums = scale * exps, scale * sums
        exps = (exps - sums * smooth).astype(x.dtype)
        factor = weights[..., None] / sums  # (B, C, 1)
        x_gradient = factor * _multiply("bcv,dv->bcd", exps, kernel)
        kernel_gradient += _multiply("bcd,bcv->dv", (factor * x).astype(x.dtype), exps)
        return (total + (weights * losses).sum(), kernel_gradient), (x_gradient.astype(x.dtype), losses)

    start = jnp.zeros((), weights.dtype), jnp.zeros(kernel.shape, weights.dtype)
    (total, kernel_gradient), per_token = jax.lax.scan(step, start, _chunks(x, labels, weights))
    x_gradient, losses = (_whole(array, x.shape[1]) for array in per_token)
    return total, (x_gradient, kernel_gradient.astype(kernel.dtype), losses)


def _scaled(label_smoothing: float, gradients: tuple[Array, Array, Array], cotangent: Array):
    del label_smoothing
    x, kernel, weights = (gradient * cotangent.astype(gradient.dtype) for gradient in gradients)
    return x, kernel, None, weights


_total.defvjp(_total_and_gradients, _scaled)


def _losses(x: Array, kernel: Array, labels: Array, label_smoothing: float) -> tuple[Array, Array, Array]:
    """Losses [B, C]; the exponentials of the logits less their maximum, [B, C, V], and their sums, [B, C, 1]."""
    logits = _multiply("bcd,dv->bcv", x, kernel)
    peak = logits.max(axis=-1, keepdims=True)
    exps = jnp.exp(logits - peak)
    sums = exps.sum(axis=-1, keepdims=True)
    target = (1 - label_smoothing) * jnp.take_along_axis(logits, labels[..., None], axis=-1)
    if label_smoothing:
        target += label_smoothing * logits.mean(axis=-1, keepdims=True)
    return (peak + jnp.log(sums) - target)[..., 0], exps, sums


def _multiply(axes: str, a: Array, b: Array) -> Array:
    return jnp.einsum(axes, a, b, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32))


def _chunks(*arrays: Array) -> tuple[Array, ...]:
    """[B, T, ...] cut along T, [chunks, B, C, ...], with zeros (so that they weigh nothing) to fill the last."""
    B, T = arrays[0].shape[:2]
    count = max(1, -(-T // max(1, tokens_at_once() // max(1, B))))
    length = -(-T // count)

    def cut(array: Array) -> Array:
        array = jnp.pad(array, [(0, 0), (0, count * length - T)] + [(0, 0)] * (array.ndim - 2))
        return jnp.moveaxis(array.reshape(B, count, length, *array.shape[2:]), 1, 0)

    return tuple(cut(array) for array in arrays)


def _whole(chunks: Array, length: int) -> Array:
    """[chunks, B, C, ...] back to the [B, T, ...] that they are of."""
    joined = jnp.moveaxis(chunks, 0, 1)  # (B, chunks, C, ...)
    B, count, C, *rest = joined.shape
    return joined.reshape(B, count * C, *rest)[:, :length]
