"""The encoder-decoder Transformer. Twin: `flax_tf/transformer.py`."""

from math import sqrt

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from torch_ref.config import TransformerConfig
from torch_ref.decoder import DecoderLayer
from torch_ref.embedding import PositionalEncoding
from torch_ref.encoder import EncoderLayer
from torch_ref.masks import padding_mask, target_mask


class Transformer(nn.Module):
    """Post-norm encoder and decoder with sinusoidal positions (Vaswani et al. 2017). Seed 002, `Transformer`."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        self.encoder_embedding = nn.Embedding(config.src_token_count(), config.d_model)
        self.decoder_embedding = nn.Embedding(config.tgt_token_count(), config.d_model)
        self.positional_encoding = PositionalEncoding(config)
        self.encoder_layers = nn.ModuleList([EncoderLayer(config) for _ in range(config.num_layers)])
        self.decoder_layers = nn.ModuleList([DecoderLayer(config) for _ in range(config.num_layers)])
        self.fc = nn.Linear(config.d_model, config.tgt_token_count())
        self.dropout = nn.Dropout(config.dropout)
        if config.shared_embeddings:
            # N(0, 1/D), so that the logits start at scale 1.
            nn.init.normal_(self.encoder_embedding.weight, std=1 / sqrt(config.d_model))
            self.tie_weights()

    def tie_weights(self) -> None:
        """Makes the encoder embedding's matrix that of the decoder embedding and of the output projection."""
        self.decoder_embedding.weight = self.encoder_embedding.weight
        self.fc.weight = self.encoder_embedding.weight

    def generate_mask(
        self, src: Int[Tensor, "B S"], tgt: Int[Tensor, "B T"]
    ) -> tuple[Bool[Tensor, "B 1 1 S"], Bool[Tensor, "B 1 T T"]]:
        """What every source and every target position may attend to."""
        return padding_mask(src, self.config.pad_id), target_mask(tgt, self.config.pad_id)

    def encode(self, src: Int[Tensor, "B S"], src_mask: Bool[Tensor, "B 1 1 S"]) -> Float[Tensor, "B S D"]:
        """Source ids to the encoder's output."""
        x = self.positional_encoding(self._scaled(self.encoder_embedding(src)))  # (B, S, D)
        x = self.dropout(x)
        for layer in self.encoder_layers:
            x = layer(x, src_mask)  # (B, S, D)
        return x

    def hidden_states(self, src: Int[Tensor, "B S"], tgt: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """Source and target ids to the decoder's output, which `fc` makes logits of. Errors as below."""
        src_mask, tgt_mask = self.generate_mask(src, tgt)
        enc_output = self.encode(src, src_mask)  # (B, S, D)
        x = self.positional_encoding(self._scaled(self.decoder_embedding(tgt)))  # (B, T, D)
        x = self.dropout(x)
        for layer in self.decoder_layers:
            x = layer(x, enc_output, src_mask, tgt_mask)  # (B, T, D)
        return x

    def forward(self, src: Int[Tensor, "B S"], tgt: Int[Tensor, "B T"]) -> Float[Tensor, "B T V"]:
        """Source and target ids to logits of the next target token at every position.

        Raises IndexError for more positions than the table has, or for an id outside its vocabulary.
        """
        return self.fc(self.hidden_states(src, tgt))

    def _scaled(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return x * sqrt(self.config.d_model) if self.config.scale_embeddings else x

    def next_log_probs(self, src: Int[Tensor, "B S"], prefix: Int[Tensor, "B T"]) -> Float[Tensor, "B V"]:
        """The log probability of every next token after a prefix, the whole model run anew.

        That of padding is -inf: within a sequence the masks would not let it be read.
        """
        log_probs = torch.log_softmax(self(src, prefix)[:, -1], dim=-1)  # (B, V)
        log_probs[:, self.config.pad_id] = -torch.inf
        return log_probs
