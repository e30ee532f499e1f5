"""Attention over all heads at once, in the fastest exact form for the backend and the shapes."""

from math import sqrt
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from flax_tf.errors import InputError
from flax_tf.masks import causal_mask, masked_softmax

Form = Literal["plain", "chunked", "cudnn", "splash"]

# Bytes of scores that stay in a CPU's cache: of one chunk of sequences.
SCORES_AT_ONCE = 5 << 19
# Queries from which on a causal mask is taken in two halves.
_HALVED = 64
# Rows and columns of the TPU kernel's blocks.
_BLOCK = 128


def attention(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B N S H"],
    v: Float[Array, "B N S H"],
    mask: Bool[Array, "#B #N #T S"] | None = None,
    *,
    causal: bool = False,
) -> Float[Array, "B N T H"]:
    """softmax(QKᵀ/√H)V (Vaswani et al. 2017, equation 1), over what the mask, or `causal`, lets a query see.

    Raises InputError for a mask of fewer axes, which could mean either those of heads or those of sequences.
    """
    if mask is not None and mask.ndim != 4:
        raise InputError(
            f"the mask has {mask.ndim} axes: give it the four of [B, N, T, S], of length 1 where all are alike"
        )
    match form(q, k, masked=mask is not None):
        case "cudnn":
            arrays = (jnp.swapaxes(array, 1, 2) for array in (q, k, v))
            return jnp.swapaxes(jax.nn.dot_product_attention(*arrays, is_causal=causal, implementation="cudnn"), 1, 2)
        case "splash":
            return _splash(q, k, v, causal)
        case "chunked":
            return _chunked(q, k, v, mask, causal)
    return _at_once(q, k, v, mask, causal)


def form(q: Array | jax.ShapeDtypeStruct, k: Array | jax.ShapeDtypeStruct, *, masked: bool) -> Form:
    """Which form `attention` takes for q [B, N, T, H] and k [B, N, S, H] on the backend in use.

    The kernels of accelerators know no mask but the causal one: theirs would leave a row that is masked as a whole
    undefined. cuDNN's takes 16 bits and heads of up to 128; the TPU's takes whole blocks on one device.
    """
    (B, N, T, H), S = q.shape, k.shape[2]
    match jax.default_backend():
        case "gpu" if not masked and q.dtype in (jnp.bfloat16, jnp.float16) and H % 8 == 0 and H <= 128:
            return "cudnn"
        case "tpu" if not masked and T == S and T % _BLOCK == 0 and jax.device_count() == 1:
            return "splash"
        # A loop over sequences that are spread over devices would bring them together again.
        case "cpu" if jax.device_count() == 1 and B * N * T * S * q.dtype.itemsize >= 2 * SCORES_AT_ONCE:
            return "chunked"
    return "plain"


def plain(
    q: Float[Array, "B N T H"],
    k: Float[Array, "B N S H"],
    v: Float[Array, "B N S H"],
    mask: Bool[Array, "#B #N #T S"] | None = None,
) -> Float[Array, "B N T H"]:
    """The formula as it stands, with all scores in memory."""
    return attention_weights(q, k, mask) @ v


def attention_weights(
    q: Float[Array, "B N T H"], k: Float[Array, "B N S H"], mask: Bool[Array, "#B #N #T S"] | None = None
) -> Float[Array, "B N T S"]:
    """softmax(QKᵀ/√H): how much every query attends to every key; a row sums to 1."""
    scores = jnp.einsum("bnth,bnsh->bnts", q, k) / sqrt(q.shape[-1])  # (B, N, T, S)
    return jax.nn.softmax(scores, axis=-1) if mask is None else masked_softmax(scores, mask)


def _at_once(q: Array, k: Array, v: Array, mask: Array | None, causal: bool) -> Array:
    """The plain form; of a causal mask alone, the half of the queries that no later key concerns is done without them.

    That is a quarter less work, in two chains that can run side by side.
    """
    if not causal:
        return plain(q, k, v, mask)
    T = q.shape[2]
    seen = causal_mask(T)[None, None]
    if mask is not None or T < _HALVED:
        return plain(q, k, v, seen if mask is None else mask & seen)
    half = T // 2
    first = plain(q[:, :, :half], k[:, :, :half], v[:, :, :half], seen[:, :, :half, :half])
    return jnp.concatenate([first, plain(q[:, :, half:], k, v, seen[:, :, half:])], axis=2)


def _chunked(q: Array, k: Array, v: Array, mask: Array | None, causal: bool) -> Array:
    """A few sequences at a time, and again on the way back: what stays in the cache twice is faster than what goes
    through memory once, and the scores of all are never held.
    """
    B, N, T, _ = q.shape
    each = N * T * k.shape[2] * q.dtype.itemsize
    shared = mask is None or len(mask) == 1

    @jax.checkpoint
    def one(arrays: tuple[Array, ...]) -> Array:
        q, k, v, *own = (array[None] for array in arrays)
        return _at_once(q, k, v, mask if shared else own[0], causal)[0]

    arrays = (q, k, v) if shared else (q, k, v, mask)
    return jax.lax.map(one, arrays, batch_size=min(B, max(1, SCORES_AT_ONCE // each)))


def _splash(q: Array, k: Array, v: Array, causal: bool, interpret: bool = False) -> Array:
    """The TPU's fused kernel. `interpret` runs it anywhere, slowly."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    (_, N, T, H), mask = q.shape, splash_attention_mask.CausalMask if causal else splash_attention_mask.FullMask
    kernel = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask((T, T)) for _ in range(N)]),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    return jax.vmap(kernel)(q / sqrt(H), k, v).astype(q.dtype)
