"""`torch.nn`'s attention."""

import math
from typing import Any

import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn.attention import dot_product_attention_weights
from jaxtyping import Array, Float

from flax_tf.layers.basic import uniform


class MultiHeadAttention(nnx.MultiHeadAttention):
    """`torch.nn.MultiheadAttention(batch_first=True)`, whose keys and values may be `kdim` wide, called as NNX's is.

    Weights start from Xavier's uniform distribution over what PyTorch packs into one tensor, biases from 0.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kdim: int | None = None,
        bias: bool = True,
        dropout: float = 0.0,
        rngs: nnx.Rngs,
    ):
        packed = kdim in (None, embed_dim)

        def init(key, shape, dtype=jnp.float32, out_sharding=None):
            fans = shape[0] + (3 if packed else 1) * embed_dim
            return uniform(math.sqrt(6 / fans))(key, shape, dtype, out_sharding)

        super().__init__(
            num_heads, embed_dim, in_kv_features=kdim, use_bias=bias, dropout_rate=dropout, decode=False, rngs=rngs,
            kernel_init=init, out_kernel_init=uniform(1 / math.sqrt(embed_dim)), attention_fn=attend,
        )  # fmt: skip


def attend(
    query: Float[Array, "*B T N H"], key: Float[Array, "*B S K H"], value: Float[Array, "*B S K H"], **options: Any
) -> Float[Array, "*B T N H"]:
    """`nnx.dot_product_attention` in the precision of its arguments; `options` are those of its keyword arguments.

    NNX's own goes to `jax.nn.dot_product_attention`, whose softmax is computed in float32 whatever it is given. K key
    heads may each serve N / K query heads.
    """
    weights = dot_product_attention_weights(query, key, **options)
    return jnp.einsum("...hqk,...khd->...qhd", weights, jnp.repeat(value, query.shape[-2] // value.shape[-2], axis=-2))
