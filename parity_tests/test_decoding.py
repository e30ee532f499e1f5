"""Greedy and beam search against the reference, a plain oracle and the uncached model."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from twins import float64 as float64
from twins import quick_jit, relative_error, run, twins

from flax_tf import decoding
from flax_tf.config import AttnRNNConfig, RNNConfig, TransformerConfig
from flax_tf.decoding import beam_search, greedy_search
from flax_tf.errors import InputError, TokenIdError
from torch_ref import decoding as reference_decoding

TRANSFORMER = TransformerConfig(
    src_vocab_size=13, tgt_vocab_size=11, d_model=10, num_heads=2, num_layers=1, d_ff=17, max_seq_length=9
)
PLAIN = RNNConfig(src_vocab_size=13, tgt_vocab_size=11, hidden_size=7, max_length=9)
ATTENTION = AttnRNNConfig(
    src_vocab_size=13, tgt_vocab_size=11, hidden_size=7, max_length=9, start_id=1, end_id=2, mask_source=True
)
ALL = pytest.mark.parametrize("config", [TRANSFORMER, PLAIN, ATTENTION], ids=lambda config: config.arch)
LENGTH, BEAM, PENALTY = 9, 3, 0.6


def sources(rows: int = 200) -> np.ndarray:
    """Random sentences of 1 to 5 tokens, filled up with padding."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 6, size=rows)
    return np.where(np.arange(5) < lengths[:, None], rng.integers(1, 13, size=(rows, 5)), 0)


@functools.cache
def models(config):
    """Twins whose next token depends on the source and on what came before."""
    scale, seed = {"transformer": (2.0, 3), "rnn": (2.0, 1), "attn_rnn": (3.0, 0)}[config.arch]
    return twins(config, scale, seed)


@functools.cache
def beams(config) -> decoding.Decoded:
    """All hypotheses of the beams of 200 sources."""
    return beam_search(models(config)[1], sources(), BEAM, LENGTH, PENALTY, BEAM)


def is_filled_up(tokens: np.ndarray, config) -> bool:
    after = np.cumsum(tokens == config.end_id, axis=-1) - (tokens == config.end_id) > 0
    return bool((tokens[after] == config.pad_id).all())


@ALL
def test_greedy_equals_the_reference(config):
    reference, model = models(config)
    tokens, scores = greedy_search(model, sources(), LENGTH)
    expected = reference_decoding.greedy_search(reference, torch.from_numpy(sources()), LENGTH)
    np.testing.assert_array_equal(tokens, expected.tokens)
    # A sum of up to 9 numbers that agree to a few hundred roundings.
    assert relative_error(scores, expected.scores) <= 1e-12
    ended = (np.asarray(tokens) == config.end_id).any(axis=-1)
    assert 0 < ended.sum() < 200 and len(np.unique(tokens, axis=0)) > 20  # the test is of all cases
    assert is_filled_up(np.asarray(tokens), config)


@ALL
def test_beam_equals_the_reference(config):
    reference, _ = models(config)
    tokens, scores = beams(config)
    expected = reference_decoding.beam_search(reference, torch.from_numpy(sources()), BEAM, LENGTH, PENALTY, BEAM)
    np.testing.assert_array_equal(tokens, expected.tokens)
    # As of greedy search.
    assert relative_error(scores, expected.scores) <= 1e-12
    ended = (np.asarray(tokens) == config.end_id).any(axis=-1)
    assert 0 < ended.sum() < 600 and len(np.unique(tokens.reshape(600, -1), axis=0)) > 20
    assert is_filled_up(np.asarray(tokens), config)


def oracle(
    next_log_probs: Callable[[list[list[int]]], list[list[float]]], config, beam: int, length: int, penalty: float
) -> list[tuple[float, list[int]]]:
    """The rule in plain Python, on lists, without stopping early."""

    def score(log_prob: float, tokens: list[int]) -> float:
        return log_prob / ((5 + len(tokens)) / 6) ** penalty

    live: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[tuple[float, list[int]]] = []
    for _ in range(length):
        steps = next_log_probs([[config.start_id, *tokens] for _, tokens in live])
        longer = [
            (total + log_prob, [*tokens, token])
            for (total, tokens), step in zip(live, steps, strict=True)
            for token, log_prob in enumerate(step)
        ]
        longer = sorted(longer, key=lambda pair: -pair[0])[: 2 * beam]
        done += [(score(*pair), pair[1]) for pair in longer if pair[1][-1] == config.end_id]
        live = [pair for pair in longer if pair[1][-1] != config.end_id][:beam]
    done += [(score(*pair), pair[1]) for pair in live]
    return sorted(done, key=lambda pair: -pair[0])[:beam]


@ALL
def test_beam_equals_a_plain_oracle(config):
    reference, _ = models(config)
    src = sources()
    tokens, scores = beams(config)
    for row in range(3):
        source = torch.from_numpy(src[row : row + 1])
        with torch.no_grad():
            expected = oracle(
                lambda prefixes, source=source: reference.next_log_probs(
                    source.expand(len(prefixes), -1), torch.tensor(prefixes)
                ).tolist(),
                config,
                BEAM,
                LENGTH,
                PENALTY,
            )
        for rank, (score, hypothesis) in enumerate(expected):
            assert tokens[row, rank, : len(hypothesis)].tolist() == hypothesis
            assert (tokens[row, rank, len(hypothesis) :] == config.pad_id).all()
            # As of greedy search.
            assert float(scores[row, rank]) == pytest.approx(score, rel=1e-12)


@ALL
def test_cached_equals_uncached(config):
    _, model = models(config)
    src = jnp.asarray(sources(5))
    prefix = np.random.default_rng(1).integers(3, 11, size=(5, LENGTH))
    prefix[:, 0] = config.start_id
    if config is TRANSFORMER:
        whole = jax.nn.log_softmax(run(model, src, prefix), axis=-1)
        whole = whole.at[:, :, config.pad_id].set(-jnp.inf)
    else:
        whole = run(model, src, np.roll(prefix, -1, axis=1))[0]
    graph, state = nnx.split(model)
    memory, cache = quick_jit(lambda state: nnx.merge(graph, state).begin(src, LENGTH))(state)
    step = quick_jit(lambda state, *args: nnx.merge(graph, state).next_log_probs(memory, *args))
    for t in range(LENGTH):
        log_probs, cache = step(state, cache, jnp.asarray(prefix[:, t]), jnp.array(t))
        # The same sums, but for zeros that padding of the cache adds: a few roundings.
        np.testing.assert_allclose(log_probs, whole[:, t], rtol=1e-12)


def test_greedy_search_is_the_models_own_free_running():
    for config in (PLAIN, ATTENTION):
        _, model = models(config)
        own = np.asarray(run(model, sources())[0].argmax(axis=-1))
        tokens = np.asarray(greedy_search(model, sources()).tokens)
        until_end = np.cumsum(own == config.end_id, axis=-1) - (own == config.end_id) == 0
        np.testing.assert_array_equal(tokens, np.where(until_end, own, config.pad_id))


def test_more_length_penalty_prefers_longer_hypotheses():
    _, model = models(ATTENTION)
    lengths = [
        (np.asarray(beam_search(model, sources(), BEAM, LENGTH, penalty, BEAM).tokens[:, 0]) != 0).sum()
        for penalty in (0.0, 3.0)
    ]
    assert lengths[0] < lengths[1]


def test_fewer_hypotheses_than_asked_for_are_padding():
    _, model = models(dataclasses.replace(PLAIN, tgt_vocab_size=2))
    tokens, scores = beam_search(model, sources(3), 5, 1, n_best=5)
    # Of one token there are two.
    assert np.isfinite(scores[:, :2]).all() and np.isneginf(scores[:, 2:]).all()
    assert (np.asarray(tokens)[:, 2:] == 0).all()
    total = np.exp(np.asarray(scores[:, :2])).sum(axis=-1)
    np.testing.assert_allclose(total, 1, rtol=1e-12)  # the length penalty of one token is 1


@ALL
def test_padding_is_never_made_by_the_transformer(config):
    tokens = np.asarray(beams(config).tokens)
    ended = np.cumsum(tokens == config.end_id, axis=-1) > 0
    inside = (tokens == 0) & ~ended
    assert not inside.any() if config is TRANSFORMER else inside.any()


def test_decoding_is_as_in_evaluation_mode_and_leaves_the_mode_alone():
    _, model = twins(PLAIN)
    expected = greedy_search(model, sources())
    model.train()
    np.testing.assert_array_equal(greedy_search(model, sources()).tokens, expected.tokens)
    assert not model.encoder.dropout.deterministic


def test_one_compilation_serves_models_of_one_shape():
    before = decoding._greedy._cache_size()
    _, model = models(dataclasses.replace(PLAIN, hidden_size=5))
    greedy_search(model, sources(5))
    model.decoder.out.bias.set_value(model.decoder.out.bias[...] + 1)
    greedy_search(model, sources(5) % 7)
    assert decoding._greedy._cache_size() == before + 1


@pytest.mark.parametrize(
    ("src", "options", "message"),
    [
        (np.zeros((1, 0), int), {}, "the source is empty"),
        (np.zeros((0, 3), int), {}, "the sources are of shape"),
        (np.ones(3, int), {}, "the sources are of shape"),
        (np.ones((1, 10), int), {}, "10 positions, but the position table has 9"),
        (np.full((1, 2), 13), {}, "token id 13 is outside the vocabulary of 13"),
        (np.ones((1, 2), int), {"max_length": 10}, "max_length must be 1 to 9, not 10"),
        (np.ones((1, 2), int), {"beam_size": 0}, "beam_size must be at least 1"),
        (np.ones((1, 2), int), {"beam_size": 2, "n_best": 3}, "n_best must be 1 to beam_size, 2, not 3"),
        (np.ones((1, 2), int), {"length_penalty": -1.0}, "length_penalty must be at least 0"),
        (np.ones((1, 2), int), {"length_penalty": math.nan}, "length_penalty must be at least 0"),
    ],
)
def test_bad_input_is_one_clear_line(src, options, message):
    _, model = models(TRANSFORMER)
    with pytest.raises(InputError, match=message) as caught:
        beam_search(model, src, **options)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, TokenIdError) == ("position" in message or "token id" in message)


def test_penalty_is_that_of_the_formula():
    _, model = models(PLAIN)
    free, normalised = (beam_search(model, sources(20), 1, LENGTH, penalty) for penalty in (0.0, 1.5))
    same = (np.asarray(free.tokens) == np.asarray(normalised.tokens)).all(axis=-1)[:, 0]
    ends = np.asarray(free.tokens)[:, 0] == PLAIN.end_id
    lengths = np.where(ends.any(axis=-1), ends.argmax(axis=-1) + 1, LENGTH)
    assert same.sum() >= 5
    for row in np.flatnonzero(same):
        expected = float(free.scores[row, 0]) / math.pow((5 + lengths[row]) / 6, 1.5)
        assert float(normalised.scores[row, 0]) == pytest.approx(expected, rel=1e-13)  # one power and one quotient
