"""Recurrent sequence to sequence, plain and with Bahdanau attention. Twin: `flax_tf/recurrent.py`."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from torch_ref.attention import BahdanauAttention
from torch_ref.config import AttnRNNConfig, RNNConfig


def shift_right(target: Int[Tensor, "B T"], start_id: int) -> Int[Tensor, "B T"]:
    """The decoder's inputs under teacher forcing: at every step the target of the step before."""
    return torch.cat([torch.full_like(target[:, :1], start_id), target[:, :-1]], dim=1)


class EncoderRNN(nn.Module):
    """A GRU over embedded source tokens. Seed 002, `EncoderRNN`."""

    def __init__(self, config: RNNConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.src_token_count(), config.hidden_size)
        self.gru = nn.GRU(config.hidden_size, config.hidden_size, batch_first=True)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, src: Int[Tensor, "B S"]) -> tuple[Float[Tensor, "B S H"], Float[Tensor, "1 B H"]]:
        """The output at every position and the last hidden state: with `mask_source`, that after the last token."""
        outputs, hidden = self.gru(self.dropout(self.embedding(src)))
        if self.config.mask_source:
            positions = torch.arange(src.shape[1], device=src.device)
            last = (positions * (src != self.config.pad_id)).amax(dim=1)  # (B,)
            hidden = outputs.take_along_dim(last[:, None, None], dim=1)[None, :, 0]
        return outputs, hidden


class DecoderRNN(nn.Module):
    """A GRU that starts from the encoder's hidden state and reads its last token. Seed 002, `DecoderRNN`."""

    def __init__(self, config: RNNConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.tgt_token_count(), config.hidden_size)
        self.gru = nn.GRU(config.hidden_size, config.hidden_size, batch_first=True)
        self.out = nn.Linear(config.hidden_size, config.tgt_token_count())

    def forward_step(
        self, tokens: Int[Tensor, "B T"], hidden: Float[Tensor, "1 B H"]
    ) -> tuple[Float[Tensor, "B T H"], Float[Tensor, "1 B H"]]:
        """Outputs, before `out`, after each of the tokens, which follow each other; the hidden state after the last."""
        return self.gru(torch.relu(self.embedding(tokens)), hidden)

    def forced(
        self, encoder_hidden: Float[Tensor, "1 B H"], target: Int[Tensor, "B T"]
    ) -> tuple[Float[Tensor, "B T H"], Float[Tensor, "1 B H"]]:
        """The outputs, before `out`, at the target's steps, each of which reads the true token before it."""
        return self.forward_step(shift_right(target, self.config.start_id), encoder_hidden)

    def forward(
        self,
        encoder_outputs: Float[Tensor, "B S H"],
        encoder_hidden: Float[Tensor, "1 B H"],
        target: Int[Tensor, "B T"] | None = None,
    ) -> tuple[Float[Tensor, "B T V"], Float[Tensor, "1 B H"], None]:
        """Log probabilities at every step, the last hidden state, and None where attention would return its weights.

        With a target (which does not begin with the start id) the steps are the target's, and each reads the true
        token before it. Without one there are `max_length`, and each reads the likeliest token of the step before.
        """
        if target is not None:
            outputs, hidden = self.forced(encoder_hidden, target)
            return torch.log_softmax(self.out(outputs), dim=-1), hidden, None
        token = torch.full((encoder_outputs.size(0), 1), self.config.start_id, device=encoder_outputs.device)
        hidden, steps = encoder_hidden, []
        for _ in range(self.config.max_length):
            output, hidden = self.forward_step(token, hidden)  # (B, 1, H)
            logits = self.out(output)  # (B, 1, V)
            token = logits.argmax(dim=-1)
            steps.append(logits)
        return torch.log_softmax(torch.cat(steps, dim=1), dim=-1), hidden, None


class AttnDecoderRNN(nn.Module):
    """A GRU over the last token joined with the context its hidden state attends to. Seed 002, `AttnDecoderRNN`."""

    def __init__(self, config: AttnRNNConfig):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.tgt_token_count(), config.hidden_size)
        self.attention = BahdanauAttention(config)
        self.gru = nn.GRU(2 * config.hidden_size, config.hidden_size, batch_first=True)
        self.out = nn.Linear(config.hidden_size, config.tgt_token_count())
        self.dropout = nn.Dropout(config.dropout)

    def forward_step(
        self,
        embedded: Float[Tensor, "B 1 H"],
        hidden: Float[Tensor, "1 B H"],
        encoder_outputs: Float[Tensor, "B S H"],
        projected: Float[Tensor, "B S H"],
        mask: Bool[Tensor, "B 1 S"] | None,
    ) -> tuple[Float[Tensor, "B 1 H"], Float[Tensor, "1 B H"], Float[Tensor, "B 1 S"]]:
        """The output, before `out`, after one embedded token; the hidden state; the weights of attention."""
        query = hidden.transpose(0, 1)  # (B, 1, H)
        context, weights = self.attention(query, encoder_outputs, projected, mask)
        output, hidden = self.gru(torch.cat([embedded, context], dim=-1), hidden)
        return output, hidden, weights

    def forced(
        self,
        encoder_outputs: Float[Tensor, "B S H"],
        encoder_hidden: Float[Tensor, "1 B H"],
        target: Int[Tensor, "B T"],
        src_mask: Bool[Tensor, "B S"] | None,
    ) -> tuple[Float[Tensor, "B T H"], Float[Tensor, "1 B H"], Float[Tensor, "B T S"]]:
        """As of `DecoderRNN`, and third the weights of attention."""
        projected = self.attention.Ua(encoder_outputs)  # (B, S, H)
        mask = None if src_mask is None else src_mask[:, None, :]  # (B, 1, S)
        hidden, steps, weights = encoder_hidden, [], []
        embedded = self.dropout(self.embedding(shift_right(target, self.config.start_id)))  # (B, T, H)
        for x in embedded.split(1, dim=1):
            output, hidden, row = self.forward_step(x, hidden, encoder_outputs, projected, mask)
            steps.append(output)
            weights.append(row)
        return torch.cat(steps, dim=1), hidden, torch.cat(weights, dim=1)

    def forward(
        self,
        encoder_outputs: Float[Tensor, "B S H"],
        encoder_hidden: Float[Tensor, "1 B H"],
        target: Int[Tensor, "B T"] | None = None,
        src_mask: Bool[Tensor, "B S"] | None = None,
    ) -> tuple[Float[Tensor, "B T V"], Float[Tensor, "1 B H"], Float[Tensor, "B T S"]]:
        """As of `DecoderRNN`, and third the weights of attention. `src_mask` is False where attention may not look."""
        if target is not None:
            outputs, hidden, weights = self.forced(encoder_outputs, encoder_hidden, target, src_mask)
            return torch.log_softmax(self.out(outputs), dim=-1), hidden, weights
        projected = self.attention.Ua(encoder_outputs)  # (B, S, H)
        mask = None if src_mask is None else src_mask[:, None, :]  # (B, 1, S)
        hidden, steps, weights = encoder_hidden, [], []
        token = torch.full((encoder_outputs.size(0), 1), self.config.start_id, device=encoder_outputs.device)
        for _ in range(self.config.max_length):
            x = self.dropout(self.embedding(token))  # (B, 1, H)
            output, hidden, row = self.forward_step(x, hidden, encoder_outputs, projected, mask)
            logits = self.out(output)  # (B, 1, V)
            token = logits.argmax(dim=-1)
            steps.append(logits)
            weights.append(row)
        return torch.log_softmax(torch.cat(steps, dim=1), dim=-1), hidden, torch.cat(weights, dim=1)


class Seq2Seq(nn.Module):
    """`EncoderRNN` and `DecoderRNN`."""

    def __init__(self, config: RNNConfig):
        super().__init__()
        self.config = config
        self.encoder = EncoderRNN(config)
        self.decoder = DecoderRNN(config)

    def forward(
        self, src: Int[Tensor, "B S"], target: Int[Tensor, "B T"] | None = None
    ) -> tuple[Float[Tensor, "B T V"], Float[Tensor, "1 B H"], None]:
        """What the decoder returns."""
        encoder_outputs, encoder_hidden = self.encoder(src)
        return self.decoder(encoder_outputs, encoder_hidden, target)

    def hidden_states(self, src: Int[Tensor, "B S"], target: Int[Tensor, "B T"]) -> Float[Tensor, "B T H"]:
        """What `decoder.out` makes the logits at the target's steps of."""
        _, encoder_hidden = self.encoder(src)
        return self.decoder.forced(encoder_hidden, target)[0]

    def next_log_probs(self, src: Int[Tensor, "B S"], prefix: Int[Tensor, "B T"]) -> Float[Tensor, "B V"]:
        """The log probability of every next token after a prefix, the whole model run anew."""
        return self(src, prefix.roll(-1, dims=1))[0][:, -1]  # of the target, all but the last is read


class AttnSeq2Seq(nn.Module):
    """`EncoderRNN` and `AttnDecoderRNN`."""

    def __init__(self, config: AttnRNNConfig):
        super().__init__()
        self.config = config
        self.encoder = EncoderRNN(config)
        self.decoder = AttnDecoderRNN(config)

    def source_mask(self, src: Int[Tensor, "B S"]) -> Bool[Tensor, "B S"] | None:
        """Where attention may look; None for everywhere."""
        return src != self.config.pad_id if self.config.mask_source else None

    def forward(
        self, src: Int[Tensor, "B S"], target: Int[Tensor, "B T"] | None = None
    ) -> tuple[Float[Tensor, "B T V"], Float[Tensor, "1 B H"], Float[Tensor, "B T S"]]:
        """What the decoder returns."""
        encoder_outputs, encoder_hidden = self.encoder(src)
        return self.decoder(encoder_outputs, encoder_hidden, target, self.source_mask(src))

    def hidden_states(self, src: Int[Tensor, "B S"], target: Int[Tensor, "B T"]) -> Float[Tensor, "B T H"]:
        """What `decoder.out` makes the logits at the target's steps of."""
        encoder_outputs, encoder_hidden = self.encoder(src)
        return self.decoder.forced(encoder_outputs, encoder_hidden, target, self.source_mask(src))[0]

    def next_log_probs(self, src: Int[Tensor, "B S"], prefix: Int[Tensor, "B T"]) -> Float[Tensor, "B V"]:
        """The log probability of every next token after a prefix, the whole model run anew."""
        return self(src, prefix.roll(-1, dims=1))[0][:, -1]  # of the target, all but the last is read
