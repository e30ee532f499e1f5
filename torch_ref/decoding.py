"""Greedy and beam search, the model run anew on every prefix. Twin: `flax_tf/decoding.py`, which has the rule."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torch_ref.recurrent import AttnSeq2Seq, Seq2Seq
from torch_ref.transformer import Transformer

Model = Transformer | Seq2Seq | AttnSeq2Seq


class Decoded(NamedTuple):
    """Hypotheses, without the start id, with the end id where it was reached, then filled up with the pad id."""

    tokens: Int[Tensor, "*B T"]
    scores: Float[Tensor, "*B"]


@torch.no_grad()
def greedy_search(model: Model, src: Int[Tensor, "B S"], max_length: int) -> Decoded:
    """The likeliest token at every step, and the log probability of the row that they make: [B, T] and [B]."""
    config = model.config
    prefix = torch.full_like(src[:, :1], config.start_id)
    ended = torch.zeros(len(src), dtype=torch.bool, device=src.device)
    scores = torch.zeros(len(src), dtype=next(model.parameters()).dtype, device=src.device)
    for _ in range(max_length):
        log_probs, token = model.next_log_probs(src, prefix).max(dim=-1)
        scores = scores + log_probs.masked_fill(ended, 0)
        token = token.masked_fill(ended, config.pad_id)
        ended = ended | (token == config.end_id)
        prefix = torch.cat([prefix, token[:, None]], dim=1)
    return Decoded(prefix[:, 1:], scores)


@torch.no_grad()
def beam_search(
    model: Model,
    src: Int[Tensor, "B S"],
    beam_size: int,
    max_length: int,
    length_penalty: float = 0.6,
    n_best: int = 1,
) -> Decoded:
    """The n best hypotheses of a beam search and their scores, the best first: [B, n_best, T] and [B, n_best]."""
    config, B, K = model.config, len(src), beam_size
    sources = src.repeat_interleave(K, dim=0)
    live = src.new_full((B, K, 1), config.start_id)
    log_probs = torch.full((B, K), -torch.inf, dtype=next(model.parameters()).dtype, device=src.device)
    log_probs[:, 0] = 0
    done = live.new_full((B, 0, 1 + max_length), config.pad_id)
    scores = log_probs[:, :0]

    def best(scores: Tensor, count: int, *arrays: Tensor) -> list[Tensor]:
        scores, index = scores.sort(dim=1, descending=True, stable=True)  # of equals the first goes first
        rows = torch.arange(B, device=src.device)[:, None]
        return [scores[:, :count], *(array[rows, index[:, :count]] for array in arrays)]

    def join(rows: Tensor, totals: Tensor) -> tuple[Tensor, Tensor]:
        """The K best of those that are done and of rows that are done now."""
        length = rows.size(2) - 1
        filled = torch.nn.functional.pad(rows, (0, max_length - length), value=config.pad_id)
        normalised = totals / ((5 + length) / 6) ** length_penalty
        joined = best(torch.cat([scores, normalised], dim=1), K, torch.cat([done, filled], dim=1))
        return joined[0], joined[1]

    for _ in range(max_length):
        steps = model.next_log_probs(sources, live.flatten(0, 1)).unflatten(0, (B, K))  # (B, K, V)
        V = steps.size(-1)
        parent = torch.arange(K, device=src.device).repeat_interleave(V).expand(B, -1)
        token = torch.arange(V, device=src.device).repeat(K).expand(B, -1)
        totals, parent, token = best((log_probs[:, :, None] + steps).flatten(1), 2 * K, parent, token)  # each (B, 2K)
        rows = torch.cat([live.gather(1, parent[:, :, None].expand(-1, -1, live.size(2))), token[:, :, None]], dim=2)
        ended = token == config.end_id
        scores, done = join(rows, totals.masked_fill(~ended, -torch.inf))
        log_probs, live = best(totals.masked_fill(ended, -torch.inf), K, rows)
    scores, done = join(live, log_probs)
    done = done.masked_fill(scores.isneginf()[:, :, None], config.pad_id)
    return Decoded(done[:, :n_best, 1:], scores[:, :n_best])
