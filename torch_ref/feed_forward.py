"""Position-wise feed-forward networks. Twin: `flax_tf/feed_forward.py`."""

from jaxtyping import Float
from torch import Tensor, nn

from torch_ref.config import BackboneConfig, TransformerConfig


class FeedForwardNetwork(nn.Module):
    """Dropout(W₂ GELU(W₁x + b₁) + b₂) with F = 4D. Seed 001, `FeedForwardNetwork`."""

    def __init__(self, config: BackboneConfig):
        super().__init__()
        self.layer1 = nn.Linear(config.d_model, 4 * config.d_model)
        self.layer2 = nn.Linear(4 * config.d_model, config.d_model)
        self.gelu = nn.GELU()
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        x = self.gelu(self.layer1(x))  # (B, T, F)
        return self.dropout(self.layer2(x))  # (B, T, D)


class PositionWiseFeedForward(nn.Module):
    """W₂ max(0, W₁x + b₁) + b₂ (Vaswani et al. 2017, equation 2). Seed 002, `PositionWiseFeedForward`."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.fc1 = nn.Linear(config.d_model, config.d_ff)
        self.fc2 = nn.Linear(config.d_ff, config.d_model)
        self.relu = nn.ReLU()

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return self.fc2(self.relu(self.fc1(x)))  # (B, T, F), then (B, T, D)
