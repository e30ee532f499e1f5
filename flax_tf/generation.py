"""Continuing a text with the language model. Twin: `torch_ref/generation.py`."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from flax_tf.errors import InputError
from flax_tf.language_model import LanguageModel
from flax_tf.layers import check_ids

_INT32 = 2**31  # JAX counts in 32 bits
_SMALLEST = 1e-6  # of a temperature or top_p: much less would underflow in float32


def filter_logits(
    logits: Float[Array, "B V"], temperature: float, top_k: int | None, top_p: float | None
) -> Float[Array, "B V"]:
    """The logits to sample from: divided by the temperature, then -inf outside the chosen tokens.

    `top_k` keeps the k largest (and ties with the k-th). `top_p` keeps the smallest set of most probable tokens whose
    probability, after top_k, reaches p (Holtzman et al. 2020, section 3.1); the most probable token always stays.
    """
    logits = logits / temperature
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


def generate(
    model: nnx.Module,
    prompt: Int[np.ndarray, "B P"],
    max_tokens: int,
    *,
    greedy: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> Int[np.ndarray, "B L"]:
    """The prompts, each followed by `max_tokens` generated ids (L = P + max_tokens).

    The model reads at most its `max_seq_length` last tokens: past that the window slides, as in the reference.
    `greedy` takes the most probable token (the lowest id of a tie); else a token is drawn with `seed`, which gives the
    same text on every run. One compiled loop with fixed shapes serves all prompts of up to `max_seq_length` tokens.
    The model is used in evaluation mode and left as it was.

    Raises InputError for an empty prompt, ids outside the vocabulary, an encoder (`mask=False`), or options out of
    range.
    """
    if not isinstance(model, LanguageModel):
        raise InputError(f"a {type(model).__name__} does not generate: it has no classifier over the vocabulary")
    prompt = np.asarray(prompt)
    _check_options(model, prompt, max_tokens, temperature, top_k, top_p, seed)
    length = model.config.max_seq_length
    window = np.zeros((len(prompt), length), np.int32)
    start = min(prompt.shape[1], length)
    window[:, :start] = prompt[:, prompt.shape[1] - start :]
    graph, state = nnx.split(nnx.clone(model))
    sampling = None if greedy else (temperature, top_k, top_p)
    tokens = _continue(graph, state, window, start, jax.random.key(seed), max_tokens, sampling)
    return np.concatenate([prompt, np.asarray(tokens, prompt.dtype)], axis=1)


@partial(jax.jit, static_argnames=("graph", "max_tokens", "sampling"))
def _continue(graph, state, window, start, key, max_tokens, sampling) -> Int[Array, "B L"]:
    """`window` holds the last tokens from the left; `start` of them are real. A causal model ignores what follows."""
    model = nnx.merge(graph, state)
    model.eval()

    def step(carry, key):
        window, count = carry
        hidden = model.transformer(window)[:, count - 1]  # (B, D)
        logits = model.classifier(hidden)  # (B, V)
        if sampling is None:
            token = jnp.argmax(logits, axis=-1)
        else:
            token = jax.random.categorical(key, filter_logits(logits, *sampling))
        token = token.astype(window.dtype)
        full = count == window.shape[1]
        window = jnp.where(full, jnp.roll(window, -1, axis=1), window)
        count = jnp.where(full, count, count + 1)
        return (window.at[:, count - 1].set(token), count), token

    _, tokens = jax.lax.scan(step, (window, start), jax.random.split(key, max_tokens))
    return tokens.T


def _check_options(model, prompt, max_tokens, temperature, top_k, top_p, seed) -> None:
    if not model.config.mask:
        raise InputError("an encoder (mask=False) does not generate: every position has seen what follows it")
    heads = (head for layer in model.transformer.transformer_layers for head in layer.mha.attention_heads)
    if any(np.triu(np.asarray(head.tril[...]) != 0, 1).any() for head in heads):
        raise InputError("a buffer tril lets a position attend to later ones: such a model does not generate")
    if prompt.ndim != 2 or prompt.shape[1] == 0:
        raise InputError("the prompt is empty: give at least one token")
    check_ids(prompt, model.config.token_count())
    if not 1 <= max_tokens < _INT32:
        raise InputError(f"max_tokens must be at least 1 and below {_INT32}, not {max_tokens}")
    if not 0 <= seed < _INT32:
        raise InputError(f"seed must be at least 0 and below {_INT32}, not {seed}")
    if not temperature >= _SMALLEST:
        raise InputError(
            f"temperature must be at least {_SMALLEST}, not {temperature}: for the most probable token use greedy"
        )
    if top_k is not None and top_k < 1:
        raise InputError(f"top_k must be at least 1, not {top_k}")
    if top_p is not None and not _SMALLEST <= top_p <= 1:
        raise InputError(f"top_p must be from {_SMALLEST} to 1, not {top_p}")
