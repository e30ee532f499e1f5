"""Position-wise feed-forward networks. Twin: `torch_ref/feed_forward.py`."""

from flax import nnx
from jaxtyping import Array, Float

from flax_tf.config import BackboneConfig, TransformerConfig
from flax_tf.layers import GELU, Dropout, Linear, ReLU


class FeedForwardNetwork(nnx.Module):
    """Dropout(W₂ GELU(W₁x + b₁) + b₂) with F = 4D. Seed 001, `FeedForwardNetwork`."""

    def __init__(self, config: BackboneConfig, *, rngs: nnx.Rngs):
        self.layer1 = Linear(config.d_model, 4 * config.d_model, rngs=rngs)
        self.layer2 = Linear(4 * config.d_model, config.d_model, rngs=rngs)
        self.gelu = GELU()
        self.dropout = Dropout(config.dropout)

    def __call__(self, x: Float[Array, "B T D"], *, rngs: nnx.Rngs | None = None) -> Float[Array, "B T D"]:
        x = self.gelu(self.layer1(x))  # (B, T, F)
        return self.dropout(self.layer2(x), rngs=rngs)  # (B, T, D)


class PositionWiseFeedForward(nnx.Module):
    """W₂ max(0, W₁x + b₁) + b₂ (Vaswani et al. 2017, equation 2). Seed 002, `PositionWiseFeedForward`."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        self.fc1 = Linear(config.d_model, config.d_ff, rngs=rngs)
        self.fc2 = Linear(config.d_ff, config.d_model, rngs=rngs)
        self.relu = ReLU()

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return self.fc2(self.relu(self.fc1(x)))  # (B, T, F), then (B, T, D)
