"""Position-wise feed-forward network. Twin: `torch_ref/feed_forward.py`."""

from flax import nnx
from jaxtyping import Array, Float

from flax_tf.config import BackboneConfig
from flax_tf.layers import GELU, Linear


class FeedForwardNetwork(nnx.Module):
    """Dropout(W₂ GELU(W₁x + b₁) + b₂) with F = 4D. Seed 001, `FeedForwardNetwork`."""

    def __init__(self, config: BackboneConfig, *, rngs: nnx.Rngs):
        self.layer1 = Linear(config.d_model, 4 * config.d_model, rngs=rngs)
        self.layer2 = Linear(4 * config.d_model, config.d_model, rngs=rngs)
        self.gelu = GELU()
        self.dropout = nnx.Dropout(config.dropout)

    def __call__(self, x: Float[Array, "B T D"], *, rngs: nnx.Rngs | None = None) -> Float[Array, "B T D"]:
        x = self.gelu(self.layer1(x))  # (B, T, F)
        return self.dropout(self.layer2(x), rngs=rngs)  # (B, T, D)
