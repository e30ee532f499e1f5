"""The language model, and its backbone alone. Twin: `flax_tf/language_model.py`."""

from jaxtyping import Float, Int
from torch import Tensor, nn

from torch_ref.attention import PerHeadAttention
from torch_ref.config import BackboneConfig, LanguageModelConfig
from torch_ref.embedding import Embeddings
from torch_ref.feed_forward import FeedForwardNetwork


class TransformerBlock(nn.Module):
    """x + Attention(LayerNorm(x)), then x + FeedForward(LayerNorm(x)). Seed 001, `TransformerBlock`."""

    def __init__(self, config: BackboneConfig):
        super().__init__()
        self.mha = PerHeadAttention(config)
        self.ffn = FeedForwardNetwork(config)
        self.layer_norm_1 = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)
        self.layer_norm_2 = nn.LayerNorm(config.d_model, eps=config.layer_norm_eps)

    def forward(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        x = x + self.mha(self.layer_norm_1(x))  # (B, T, D)
        return x + self.ffn(self.layer_norm_2(x))  # (B, T, D)


class Backbone(nn.Module):
    """Embeddings and transformer layers; causal, or an encoder with `mask=False`. Seed 001, `Transformer`."""

    def __init__(self, config: BackboneConfig):
        super().__init__()
        self.config = config
        self.embeddings = Embeddings(config)
        self.transformer_layers = nn.ModuleList([TransformerBlock(config) for _ in range(config.num_layers)])

    def forward(self, x: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """Token ids to contextual embeddings. There is no final norm."""
        x = self.embeddings(x)  # (B, T, D)
        for layer in self.transformer_layers:
            x = layer(x)  # (B, T, D)
        return x


class LanguageModel(nn.Module):
    """The backbone with a linear classifier over the vocabulary. Seed 001, `LanguageModel`."""

    def __init__(self, config: LanguageModelConfig):
        super().__init__()
        self.config = config
        self.transformer = Backbone(config)
        self.classifier = nn.Linear(config.d_model, config.token_count())

    def forward(self, x: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
        """Token ids to logits of the next token at every position."""
        return self.classifier(self.transformer(x))
