"""Greedy and beam search for the sequence-to-sequence models, cached and jitted. Twin: `torch_ref/decoding.py`.

A hypothesis is a row of target tokens after the start id. Its log probability is the sum of its tokens', the end id's
included. Every step extends a hypothesis by one token, up to `max_length`; the end id ends it.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from flax_tf.config import TransformerConfig
from flax_tf.errors import InputError
from flax_tf.layers import check_ids
from flax_tf.recurrent import AttnSeq2Seq, Seq2Seq
from flax_tf.transformer import Transformer

Model = Transformer | Seq2Seq | AttnSeq2Seq


class Decoded(NamedTuple):
    """Hypotheses, without the start id, with the end id where it was reached, then filled up with the pad id."""

    tokens: Int[Array, "*B T"]
    scores: Float[Array, "*B"]


def greedy_search(model: Model, src: Int[Array, "B S"] | np.ndarray, max_length: int | None = None) -> Decoded:
    """The likeliest token at every step, and the log probability of the row that they make: [B, T] and [B].

    Of tokens that are equally likely the one with the smaller id is taken. Steps end when all rows have.

    Args:
        model: decodes as in evaluation mode; its own mode stays.
        src: source ids, filled up with the pad id.
        max_length: T, the most tokens of a hypothesis; None is all that the config allows.

    Raises InputError for an empty or too long source, for ids outside the vocabulary and for a `max_length` beyond the
    table of positions.
    """
    ids, length = _checked(model, src, max_length)
    graph, state = nnx.split(model)
    return _greedy(graph, state, ids, length)


def beam_search(
    model: Model,
    src: Int[Array, "B S"] | np.ndarray,
    beam_size: int = 5,
    max_length: int | None = None,
    length_penalty: float = 0.6,
    n_best: int = 1,
) -> Decoded:
    """The n best hypotheses of a beam search and their scores, the best first: [B, n_best, T] and [B, n_best].

    The rule, for a beam of K:
    1. A step extends each of the K live hypotheses by every token and keeps the 2K likeliest rows. Of these, those that
       the end id ends are done; the K likeliest others live on. (At most K of the 2K are done, so K are left.)
    2. A hypothesis of n tokens, the end id counted, scores its log probability / ((5 + n) / 6)^length_penalty (Wu et
       al. 2016, equation 14, without coverage). The K best that are done are kept.
    3. After `max_length` steps the live ones, cut off there, are scored too and join those that are done.
    Among equals the one found first goes first: the hypothesis of the better rank, then the token with the smaller id.
    The search ends sooner if no live hypothesis could still score better than the worst of K done, which changes
    nothing. Where fewer than n hypotheses exist, the rest are padding with the score -inf.

    Args and errors as of `greedy_search`; also InputError for a `beam_size` or `n_best` out of range or a negative
    `length_penalty`.
    """
    ids, length = _checked(model, src, max_length)
    if beam_size < 1:
        raise InputError(f"beam_size must be at least 1, not {beam_size}")
    if not 1 <= n_best <= beam_size:
        raise InputError(f"n_best must be 1 to beam_size, {beam_size}, not {n_best}")
    if not 0 <= length_penalty < math.inf:
        raise InputError(f"length_penalty must be at least 0 and finite, not {length_penalty}")
    graph, state = nnx.split(model)
    return _beam(graph, state, ids, length, beam_size, length_penalty, n_best)


def _checked(
    model: Model, src: Int[Array, "B S"] | np.ndarray, max_length: int | None
) -> tuple[Int[Array, "B S"], int]:
    """The source in JAX and the length to decode to."""
    ids, config = jnp.asarray(src), model.config
    if ids.ndim != 2 or len(ids) == 0:
        raise InputError(f"the sources are of shape {ids.shape}: give [B, S], of at least one")
    if ids.shape[1] == 0:
        raise InputError("the source is empty: give at least one token")
    check_ids(ids, config.src_token_count())
    if isinstance(config, TransformerConfig):
        default = table = config.max_seq_length
    else:
        default, table = config.max_length, None
    length = default if max_length is None else max_length
    if length < 1 or (table is not None and length > table):
        raise InputError(f"max_length must be {'at least 1' if table is None else f'1 to {table}'}, not {length}")
    return ids, length


@partial(jax.jit, static_argnums=(0, 3))
def _greedy(graph: Any, state: Any, src: Int[Array, "B S"], length: int) -> Decoded:
    model = nnx.merge(graph, state)
    model.eval()
    config, B = model.config, src.shape[0]
    memory, cache = model.begin(src, length)

    def step(carry):
        t, cache, token, ended, tokens, scores = carry
        log_probs, cache = model.next_log_probs(memory, cache, token, t)
        token = jnp.where(ended, config.pad_id, log_probs.argmax(axis=-1))
        scores = scores + jnp.where(ended, 0, log_probs.max(axis=-1))
        return t + 1, cache, token, ended | (token == config.end_id), tokens.at[:, t].set(token), scores

    start = (
        jnp.array(0),
        cache,
        jnp.full((B,), config.start_id),
        jnp.zeros((B,), bool),
        jnp.full((B, length), config.pad_id),
        jnp.zeros((B,), _dtype(model, memory, cache)),
    )
    *_, tokens, scores = jax.lax.while_loop(lambda carry: (carry[0] < length) & ~carry[3].all(), step, start)
    return Decoded(tokens, scores)


@partial(jax.jit, static_argnums=(0, 3, 4, 6))
def _beam(
    graph: Any,
    state: Any,
    src: Int[Array, "B S"],
    length: int,
    K: int,
    length_penalty: Float[Array, ""],
    n_best: int,
) -> Decoded:
    model = nnx.merge(graph, state)
    model.eval()
    config, B = model.config, src.shape[0]
    # A row for every hypothesis, those of one source beside each other.
    memory, cache = jax.tree.map(lambda array: jnp.repeat(array, K, axis=0), model.begin(src, length))

    def normalised(log_probs: Float[Array, "*B"], tokens: int | Int[Array, ""]) -> Float[Array, "*B"]:
        return log_probs / ((5 + tokens) / 6) ** length_penalty

    def best(scores: Float[Array, "B M"], *arrays: Array) -> list[Array]:
        """The K best scores of every source, and the entries of arrays that belong to them."""
        scores, index = jax.lax.top_k(scores, K)  # of equals the first goes first
        return [scores, *(_pick(array, index) for array in arrays)]

    def going_on(carry) -> Array:
        t, _, _, live_log_probs, _, done_scores, _ = carry
        # Log probabilities only fall, and the divisor is greatest at full length.
        hope = normalised(live_log_probs.max(axis=1), length)
        return (t < length) & (hope > done_scores.min(axis=1)).any()

    def step(carry):
        t, cache, token, live_log_probs, live, done_scores, done = carry
        log_probs, cache = model.next_log_probs(memory, cache, token.reshape(B * K), t)  # (B * K, V)
        V = log_probs.shape[-1]
        totals = live_log_probs[:, :, None] + log_probs.reshape(B, K, V)
        totals, flat = jax.lax.top_k(totals.reshape(B, K * V), 2 * K)
        parent, token = flat // V, flat % V  # (B, 2K)
        rows = _pick(live, parent).at[:, :, t].set(token)  # (B, 2K, T)
        ended = token == config.end_id
        scores = jnp.where(ended, normalised(totals, t + 1), -jnp.inf)
        done_scores, done = best(jnp.concatenate([done_scores, scores], axis=1), jnp.concatenate([done, rows], axis=1))
        live_log_probs, live, token, parent = best(jnp.where(ended, -jnp.inf, totals), rows, token, parent)
        sources = (jnp.arange(B)[:, None] * K + parent).reshape(B * K)
        cache = jax.tree.map(lambda array: array[sources], cache)
        return t + 1, cache, token, live_log_probs, live, done_scores, done

    nothing = jnp.full((B, K), -jnp.inf, _dtype(model, memory, cache))
    padding = jnp.full((B, K, length), config.pad_id)
    # One hypothesis to start from: K equal ones would stay equal.
    start = (jnp.array(0), cache, jnp.full((B, K), config.start_id), nothing.at[:, 0].set(0), padding, nothing, padding)
    _, _, _, live_log_probs, live, scores, done = jax.lax.while_loop(going_on, step, start)
    scores, tokens = best(
        jnp.concatenate([scores, normalised(live_log_probs, length)], axis=1), jnp.concatenate([done, live], axis=1)
    )
    tokens = jnp.where(jnp.isneginf(scores)[:, :, None], config.pad_id, tokens)
    return Decoded(tokens[:, :n_best], scores[:, :n_best])


def _pick(array: Array, index: Int[Array, "B M"]) -> Array:
    """array[b, index[b, m]] for every b and m."""
    return jax.vmap(lambda row, i: row[i])(array, index)


def _dtype(model: Model, memory: object, cache: object) -> jnp.dtype:
    """That of the log probabilities."""
    token = jnp.zeros((jax.tree.leaves(cache)[0].shape[0],), int)
    return jax.eval_shape(model.next_log_probs, memory, cache, token, jnp.array(0))[0].dtype
