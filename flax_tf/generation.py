"""Continuing a text with the language model. Twin: `torch_ref/generation.py`."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from operator import index
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Integer

from flax_tf.config import LEAST_TEMPERATURE, LEAST_TOP_P
from flax_tf.errors import InputError
from flax_tf.kernels.sampling import draw
from flax_tf.language_model import LanguageModel, TextCache
from flax_tf.layers import check_ids

_INT32 = 2**31  # JAX counts in 32 bits
_FEWEST = 16  # slots; more are powers of two, so that few shapes are compiled
_AT_ONCE = 128  # tokens a call of the compiled loop
_SHOWN_AT_ONCE = 4  # the same where they are shown as they come


_Number = float | Float[Array, ""]


def filter_logits(
    logits: Float[Array, "B V"], temperature: _Number, top_k: int | None, top_p: _Number | None
) -> Float[Array, "B V"]:
    """The logits to sample from: divided by the temperature, then -inf outside the chosen tokens.

    `top_k` keeps the k largest (and ties with the k-th). `top_p` keeps the smallest set of most probable tokens whose
    probability, after top_k, reaches p (Holtzman et al. 2020, section 3.1); the most probable token always stays.
    In float32 or wider: a small temperature makes numbers that float16 does not hold.
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32)) / temperature
    if top_k is not None:
        kth = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits < kth, -jnp.inf, logits)
    if top_p is not None:
        order = jnp.argsort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities  # what the more probable tokens add up to
        keep = jnp.zeros_like(logits, dtype=bool).at[jnp.arange(len(logits))[:, None], order].set(before < top_p)
        logits = jnp.where(keep, logits, -jnp.inf)
    return logits


class _Sampling(NamedTuple):
    """How a token is drawn. As arguments of a compiled function the numbers are not compiled into it."""

    key: Array
    temperature: _Number
    top_p: _Number | None


class _Window(NamedTuple):
    """Texts but for their last tokens, from the left, cut to their last T tokens."""

    tokens: Int[Array, "B T"]
    count: Int[Array, "B"]


def generate(
    model: nnx.Module,
    prompt: Integer[np.ndarray, "B P"] | Sequence[Integer[np.ndarray, "_"]] | Sequence[Sequence[int]],
    max_tokens: int,
    *,
    greedy: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    stop_ids: Sequence[int] = (),
    on_tokens: Callable[[list[Int[np.ndarray, "_"]]], None] | None = None,
) -> list[Integer[np.ndarray, "_"]]:
    """The prompts, each followed by up to `max_tokens` generated ids.

    `greedy` takes the most probable token (the lowest id of a tie), so that every prompt is continued as it would be
    alone; else tokens are drawn with `seed`, which gives the same texts for the same prompts on every run.

    The model reads at most its `max_seq_length` last tokens, T. Up to there the keys and values of a text are kept, and
    a token costs one token's work. Past it the window slides, as in the reference: every token's position changes, so
    nothing that was kept holds, and the window is run again for every token. In a batch that starts when the longest
    text has T tokens.

    Compilations, for a number of prompts: the loop is compiled for texts of up to 16, 32, 64, ... T tokens, and once
    for the sliding window; reading the prompts, for the same lengths of prompt and text.

    Args:
        model: used in evaluation mode and left as it was.
        prompt: an array of them, or a sequence of arrays or lists whose lengths may differ.
        stop_ids: a text ends with the first of these that is generated; when all have ended, so does the loop.
        on_tokens: called with the new ids of every text, a few at a time, as soon as they are there.

    Raises InputError for an empty prompt, ids outside the vocabulary, an encoder (`mask=False`), or options out of
    range.
    """
    if not isinstance(model, LanguageModel):
        raise InputError(f"a {type(model).__name__} does not generate: it has no classifier over the vocabulary")
    prompts = [_ids(row, "a prompt") for row in prompt]
    if not prompts or any(len(row) == 0 for row in prompts):
        raise InputError("the prompt is empty: give at least one token")
    stop_ids = _ids(list(stop_ids) if np.iterable(stop_ids) else stop_ids, "stop_ids").tolist()
    max_tokens, seed, top_k = index(max_tokens), index(seed), None if top_k is None else index(top_k)
    for row in (*prompts, np.array(stop_ids, int)):
        check_ids(row, model.config.token_count())
    _check_options(max_tokens, temperature, top_k, top_p, seed)
    sampling = None if greedy else _Sampling(jax.random.key(seed), temperature, top_p)
    ended = np.zeros(len(prompts), bool)
    news: list[list[np.ndarray]] = [[] for _ in prompts]
    at_once = _AT_ONCE if on_tokens is None else _SHOWN_AT_ONCE
    for tokens in _continue(model, prompts, max_tokens, sampling, top_k, stop_ids, at_once):
        stops = np.isin(tokens, stop_ids)  # (B, n)
        kept = np.cumsum(stops, axis=1) - stops == 0
        fresh = [row[keep & ~over] for row, keep, over in zip(tokens, kept, ended, strict=True)]
        ended |= stops.any(axis=1)
        for row, new in zip(news, fresh, strict=True):
            row.append(new)
        if on_tokens is not None:
            on_tokens(fresh)
    return [np.concatenate([row, *new], dtype=row.dtype) for row, new in zip(prompts, news, strict=True)]


def _ids(ids: Any, what: str) -> Integer[np.ndarray, "_"]:
    """The ids in an array, of 32 bits at least, so that it holds those that follow too."""
    array = np.asarray(ids)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InputError(
            f"{what} must be a list of token ids, integers, not {array.ndim} axes of {array.dtype}: give [5, 3], or "
            "[[5, 3]] where several prompts may come"
        )
    return array if array.dtype.kind in "iu" and array.dtype.itemsize >= 4 else array.astype(np.int32)


def _continue(
    model: LanguageModel,
    texts: list[Integer[np.ndarray, "_"]],
    max_tokens: int,
    sampling: _Sampling | None,
    top_k: int | None,
    stop_ids: Sequence[int],
    at_once: int,
) -> Iterator[Int[np.ndarray, "B n"]]:
    """The tokens that follow the texts, some at a time. Those of a text that has ended have no meaning."""
    length = model.config.max_seq_length
    graph, state = nnx.split(model)
    texts = [row[-length:].astype(np.int32) for row in texts]
    longest = max(map(len, texts))
    memory: TextCache | _Window
    left = 0  # slots of the cache
    if _is_causal(model):
        left = length - longest + 1
        memory = _begin(graph, state, *_rows(texts, _slots(longest, length)), _slots(longest + max_tokens, length))
    token, ended = jnp.array([row[-1] for row in texts]), jnp.zeros(len(texts), bool)
    stops, done = jnp.array(stop_ids, jnp.int32), 0
    while done < max_tokens and not ended.all():
        if not left:
            memory = _Window(*_rows([row[-length - 1 : -1] for row in texts], length))
        steps = min(max_tokens - done, at_once, left or max_tokens)
        memory, token, ended, tokens, count = _loop(
            graph, state, memory, token, ended, stops, sampling, done, steps, top_k
        )
        tokens = np.asarray(tokens)[:, : int(count)]
        texts = [np.concatenate([row, new])[-length - 1 :] for row, new in zip(texts, tokens, strict=True)]
        done, left = done + steps, max(left - steps, 0)
        yield tokens


def _slots(tokens: int, length: int) -> int:
    return min(max(_FEWEST, 1 << (tokens - 1).bit_length()), length)


def _rows(texts: list[Int[np.ndarray, "_"]], width: int) -> tuple[Int[Array, "B P"], Int[Array, "B"]]:
    """The texts from the left of rows of this width, and their lengths."""
    rows = np.zeros((len(texts), width), np.int32)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text
    return jnp.array(rows), jnp.array([len(text) for text in texts], jnp.int32)


@partial(jax.jit, static_argnames=("graph", "slots"))
def _begin(graph, state, texts, lengths, slots: int) -> TextCache:
    model = nnx.merge(graph, state)
    model.eval()
    return model.begin(texts, lengths, slots)


@partial(jax.jit, static_argnames=("graph", "top_k"), donate_argnames=("memory",))
def _loop(
    graph,
    state,
    memory: TextCache | _Window,
    token: Int[Array, "B"],
    ended: Bool[Array, "B"],
    stop_ids: Int[Array, "_"],
    sampling: _Sampling | None,
    done: Int[Array, ""],
    steps: Int[Array, ""],
    top_k: int | None,
):
    """Up to `steps` tokens, at most _AT_ONCE, after `token`, the last of every text: what to go on with, the tokens
    [B, _AT_ONCE], and how many there are. `done` tokens came before, which chooses the random numbers."""
    model = nnx.merge(graph, state)
    model.eval()
    projections = model.projections()

    def step(carry):
        i, memory, token, ended, tokens = carry
        if isinstance(memory, _Window):
            logits, memory = _slide(model, memory, token)
        else:
            logits, memory = model.step(projections, memory, token)
        if sampling is None:
            token = jnp.argmax(logits, axis=-1)
        else:
            key = jax.random.fold_in(sampling.key, done + i)
            token = draw(key, filter_logits(logits, sampling.temperature, top_k, sampling.top_p))
        token = token.astype(tokens.dtype)
        ended = ended | (token[:, None] == stop_ids[None]).any(axis=1)
        return i + 1, memory, token, ended, tokens.at[:, i].set(token)

    start = (jnp.array(0, jnp.int32), memory, token, ended, jnp.zeros((len(token), _AT_ONCE), token.dtype))
    count, memory, token, ended, tokens = jax.lax.while_loop(
        lambda carry: (carry[0] < steps) & ~carry[3].all(), step, start
    )
    return memory, token, ended, tokens, count


def _slide(model: LanguageModel, window: _Window, token: Int[Array, "B"]) -> tuple[Float[Array, "B V"], _Window]:
    """The logits of what follows `token`, from the whole window, and the window with it."""
    tokens, count = window
    full = count == tokens.shape[1]
    tokens = jnp.where(full[:, None], jnp.roll(tokens, -1, axis=1), tokens)
    last = jnp.where(full, count - 1, count)
    rows = jnp.arange(len(token))
    tokens = tokens.at[rows, last].set(token)
    hidden = model.transformer(tokens)[rows, last]  # (B, D); a causal model ignores what follows
    return model.classifier(hidden), _Window(tokens, last + 1)


def _is_causal(model: LanguageModel) -> bool:
    """Whether every position attends to all before it, and not to fewer. Raises InputError if one attends to later."""
    if not model.config.mask:
        raise InputError("an encoder (mask=False) does not generate: every position has seen what follows it")
    expected, usual = np.tri(model.config.max_seq_length, dtype=bool), True
    for layer in model.transformer.transformer_layers:
        for head in layer.mha.attention_heads:
            seen = np.asarray(head.tril[...]) != 0
            if (seen & ~expected).any():
                raise InputError("a buffer tril lets a position attend to later ones: such a model does not generate")
            usual &= bool((seen == expected).all())
    return usual


def _check_options(max_tokens, temperature, top_k, top_p, seed) -> None:
    if not 1 <= max_tokens < _INT32:
        raise InputError(f"max_tokens must be at least 1 and below {_INT32}, not {max_tokens}")
    if not 0 <= seed < _INT32:
        raise InputError(f"seed must be at least 0 and below {_INT32}, not {seed}")
    if not temperature >= LEAST_TEMPERATURE:
        raise InputError(
            f"temperature must be at least {LEAST_TEMPERATURE}, not {temperature}: for the likeliest token use greedy"
        )
    if top_k is not None and top_k < 1:
        raise InputError(f"top_k must be at least 1, not {top_k}")
    if top_p is not None and not LEAST_TOP_P <= top_p <= 1:
        raise InputError(f"top_p must be from {LEAST_TOP_P} to 1, not {top_p}")
