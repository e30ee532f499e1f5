"""Generation: greedy tokens are the reference's, sampling draws from the reference's distribution."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from models import BACKBONE, LANGUAGE_MODEL, ids, reference, twin
from twins import float64 as float64
from twins import quick_jit, run

from flax_tf import generation
from flax_tf.config import LanguageModelConfig
from flax_tf.errors import InputError, TokenIdError
from flax_tf.generation import filter_logits, generate
from flax_tf.saving import build
from torch_ref.generation import filter_logits as torch_filter_logits
from torch_ref.generation import generate as torch_generate


@pytest.fixture(scope="module")
def pair():
    module = reference(LANGUAGE_MODEL, seed=3)
    return module, twin(module)


@pytest.mark.parametrize("prompt_length", [1, 11, 13, 19])
def test_greedy_tokens_are_the_references_also_past_the_trained_length(pair, prompt_length: int) -> None:
    module, model = pair
    prompt = ids(5, prompt_length)
    expected = torch_generate(module, torch.from_numpy(prompt), 29, greedy=True).numpy()
    assert np.array_equal(generate(model, prompt, 29, greedy=True), expected)


def test_a_tie_goes_to_the_lowest_id() -> None:
    model = build(LanguageModelConfig(vocab_size=7, max_seq_length=5, d_model=6, num_heads=2, num_layers=1))
    model.classifier.kernel[...] = 0 * model.classifier.kernel[...]
    model.classifier.bias[...] = np.array([0, 1, 2, 2, 2, 0, 1], np.float32)
    assert np.stack(generate(model, np.array([[6]]), 3, greedy=True)).tolist() == [[6, 2, 2, 2]]


@pytest.mark.parametrize(
    ("top_k", "top_p"),
    [(None, None), (1, None), (5, None), (99, None), (None, 1e-6), (None, 0.5), (7, 0.9), (None, 1.0)],
)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_sampling_is_from_the_references_distribution(temperature, top_k, top_p) -> None:
    logits = np.random.default_rng(0).standard_normal((5, 37)).astype(np.float32)
    ours = jax.nn.softmax(filter_logits(jnp.array(logits), temperature, top_k, top_p))
    theirs = torch.softmax(torch_filter_logits(torch.from_numpy(logits), temperature, top_k, top_p), dim=-1).numpy()
    assert np.array_equal(np.asarray(ours) > 0, theirs > 0)
    # One softmax over 37 float32 numbers: a few roundings of 6e-8.
    assert np.allclose(ours, theirs, rtol=1e-6, atol=0)


def test_top_k_keeps_ties_and_top_p_the_smallest_sufficient_set() -> None:
    logits = jnp.log(jnp.array([[0.1, 0.4, 0.1, 0.25, 0.15]]))
    kept = np.asarray(filter_logits(jnp.log(jnp.array([[3.0, 1.0, 2.0, 2.0, 1.0]])), 1.0, 2, None)) > -np.inf
    assert kept.tolist() == [[True, False, True, True, False]]
    for top_p, expected in ((0.39, {1}), (0.41, {1, 3}), (0.66, {1, 3, 4}), (0.81, {0, 1, 3, 4})):
        kept = np.asarray(filter_logits(logits, 1.0, None, top_p))[0] > -np.inf
        assert set(np.flatnonzero(kept).tolist()) == expected


def test_a_seed_gives_the_same_text_and_another_seed_another(pair) -> None:
    _, model = pair
    texts = [np.stack(generate(model, ids(2, 3), 23, seed=seed)).tolist() for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]


def test_samples_follow_the_models_probabilities(pair) -> None:
    module, model = pair
    prompt = np.repeat(ids(1, 3), 20_011, axis=0)
    drawn = np.bincount(np.stack(generate(model, prompt, 1))[:, -1], minlength=37) / len(prompt)
    with torch.no_grad():
        expected = torch.softmax(module(torch.from_numpy(prompt[:1]))[0, -1], dim=-1).numpy()
    # A frequency of 20,011 draws has a standard deviation of at most 0.5/sqrt(20,011) = 0.0035; this is over four.
    assert abs(drawn - expected).max() < 0.015


def test_dropout_is_off_and_the_model_is_left_in_training_mode() -> None:
    model = build(
        LanguageModelConfig(vocab_size=37, max_seq_length=13, d_model=14, num_heads=2, num_layers=1, dropout=0.5)
    )
    before = jax.tree.map(np.asarray, nnx.state(model))
    first, second = (np.stack(generate(model, ids(2, 3), 7, greedy=True)).tolist() for _ in range(2))
    assert first == second
    assert not model.transformer.embeddings.dropout.deterministic
    assert jax.tree.all(jax.tree.map(np.array_equal, before, jax.tree.map(np.asarray, nnx.state(model))))


def test_few_compilations_serve_prompts_of_every_length() -> None:
    config = LanguageModelConfig(vocab_size=7, max_seq_length=61, d_model=6, num_heads=2, num_layers=1)
    model = build(config)
    begin: Any = generation._begin
    loop: Any = generation._loop
    before = begin._cache_size(), loop._cache_size()
    rng = np.random.default_rng(0)
    for max_tokens in (1, 17, 40):
        for length in (1, 5, 16, 17, 31, 33, 60, 61, 83):
            rows = [rng.integers(7, size=n) for n in (length, rng.integers(1, 84))]
            options: Any = (
                {"greedy": True, "stop_ids": [3]} if length % 2 else {"temperature": 1.0 + length, "top_p": 0.5}
            )
            generate(model, rows, max_tokens, **options)
    begins, loops = begin._cache_size() - before[0], loop._cache_size() - before[1]
    # Prompts of up to 16, 32 and 61 tokens in texts of up to as many or more; the texts, and the sliding window, each
    # for greedy tokens with a stop id and for drawn ones without.
    assert begins <= 6 and loops <= 2 * 4
    assert loops > 4  # the test is of all


@pytest.mark.parametrize("lengths", [(1, 5, 11), (13, 2, 7), (3, 19, 1, 13)])
def test_ragged_prompts_are_continued_as_each_alone(pair, lengths: tuple[int, ...]) -> None:
    module, model = pair
    rows = [ids(n, seed=n) for n in lengths]
    texts = generate(model, rows, 17, greedy=True)
    for row, text in zip(rows, texts, strict=True):
        assert text.tolist() == torch_generate(module, torch.from_numpy(row[None]), 17, greedy=True)[0].tolist()


def test_a_text_ends_with_the_first_stop_id(pair) -> None:
    _, model = pair
    rows = [ids(n, seed=n) for n in (2, 7, 5, 11)]
    whole = generate(model, rows, 23, greedy=True)
    stops = [int(whole[0][8]), int(whole[1][9])]
    expected = []
    for row, text in zip(rows, whole, strict=True):
        ends = np.flatnonzero(np.isin(text[len(row) :], stops))
        expected.append(text[: len(row) + ends[0] + 1 if len(ends) else None].tolist())
    assert [text.tolist() for text in generate(model, rows, 23, greedy=True, stop_ids=stops)] == expected
    assert len({len(text) - len(row) for text, row in zip(expected, rows, strict=True)}) > 1  # of all cases


def test_the_loop_ends_when_all_texts_have() -> None:
    model = build(LanguageModelConfig(vocab_size=7, max_seq_length=5, d_model=6, num_heads=2, num_layers=1))
    model.classifier.bias[...] = np.array([0, 0, 0, 1e9, 0, 0, 0], np.float32)
    # Without an end, this many tokens would take hours.
    texts = generate(model, np.array([[6], [1]]), 2**30, stop_ids=[3])
    assert np.stack(texts).tolist() == [[6, 3], [1, 3]]


@pytest.mark.parametrize("options", [{"greedy": True}, {"seed": 5, "top_k": 7}, {"greedy": True, "stop_ids": [4, 9]}])
def test_tokens_that_are_handed_on_as_they_come_are_those_that_are_returned(pair, options: Any) -> None:
    _, model = pair
    rows = [ids(n, seed=n) for n in (2, 9, 5)]
    parts: list[list[np.ndarray]] = []
    texts = generate(model, rows, 29, on_tokens=parts.append, **options)
    joined = [np.concatenate([row, *new]) for row, new in zip(rows, zip(*parts, strict=True), strict=True)]
    assert [text.tolist() for text in joined] == [text.tolist() for text in texts]
    assert len(parts) > 2
    assert [text.tolist() for text in generate(model, rows, 29, **options)] == [text.tolist() for text in texts]


def test_cached_logits_are_the_models(float64: None) -> None:
    model = twin(reference(LANGUAGE_MODEL).double())
    lengths = np.array([3, 7, 1])
    text = jnp.array(ids(3, 13))
    graph, state = nnx.split(model)
    begin = quick_jit(lambda state: nnx.merge(graph, state).begin(text[:, :7], jnp.array(lengths), 11))
    step = quick_jit(lambda state, *args: (m := nnx.merge(graph, state)).step(m.projections(), *args))
    whole = np.asarray(run(model, text))
    cache = begin(state)
    for i in range(5):
        logits, cache = step(state, cache, text[np.arange(3), lengths - 1 + i])
        # The same sums, but for zeros that the empty slots add: a few roundings.
        np.testing.assert_allclose(logits, whole[np.arange(3), lengths - 1 + i], rtol=1e-12, atol=1e-12)


def test_a_mask_that_hides_earlier_positions_is_kept() -> None:
    module = reference(LANGUAGE_MODEL, seed=3)
    tril = module.transformer.transformer_layers[1].mha.attention_heads[2].tril
    tril[5:, :3] = 0
    expected = torch_generate(module, torch.from_numpy(ids(3, 1)), 19, greedy=True).tolist()
    assert np.stack(generate(twin(module), ids(3, 1), 19, greedy=True)).tolist() == expected


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (ids(1, 3), {"max_tokens": 0}, "max_tokens must be at least 1 and below 2147483648, not 0"),
        (ids(1, 3), {"max_tokens": 10**20}, "max_tokens must be at least 1 and below 2147483648, not 1000"),
        (ids(1, 3), {"seed": -1}, "seed must be at least 0 and below 2147483648, not -1"),
        (
            ids(1, 3),
            {"temperature": 0.0},
            "temperature must be at least 1e-06, not 0.0: for the likeliest",
        ),
        (ids(1, 3), {"temperature": float("nan")}, "temperature must be at least 1e-06, not nan"),
        (ids(1, 3), {"top_k": 0}, "top_k must be at least 1, not 0"),
        (ids(1, 3), {"top_p": 0.0}, "top_p must be from 1e-06 to 1, not 0.0"),
        (ids(1, 3), {"top_p": 1.5}, "top_p must be from 1e-06 to 1, not 1.5"),
        (ids(1, 0), {}, "the prompt is empty"),
        ([], {}, "the prompt is empty"),
        ([ids(2), ids(0)], {}, "the prompt is empty"),
        (ids(1, 3), {"stop_ids": [37]}, "token id 37 is outside the vocabulary of 37"),
        (np.array([[3, 37]]), {}, "token id 37 is outside the vocabulary of 37"),
        (np.array([[-1, 3]]), {}, "token id -1 is outside the vocabulary of 37"),
    ],
)
def test_bad_input_is_refused(pair, prompt: Any, options: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"max_tokens": 5, **options}
    with pytest.raises(InputError) as error:
        generate(pair[1], prompt, **arguments)
    assert str(error.value).startswith(message)


def test_an_encoder_does_not_generate() -> None:
    with pytest.raises(InputError, match="no classifier"):
        generate(build(BACKBONE), ids(1, 3), 5)
    encoder = build(
        LanguageModelConfig(vocab_size=7, max_seq_length=5, d_model=6, num_heads=2, num_layers=1, mask=False)
    )
    with pytest.raises(InputError, match="mask=False"):
        generate(encoder, np.array([[3]]), 5)


def test_too_many_positions_are_refused_by_the_model_itself(pair) -> None:
    module, model = pair
    with pytest.raises(IndexError):
        module(torch.from_numpy(ids(1, 14)))
    with pytest.raises(TokenIdError, match="14 positions, but the position table has 13"):
        model(jnp.array(ids(1, 14)))


def test_a_mask_that_is_not_causal_does_not_generate() -> None:
    model = twin(reference(LANGUAGE_MODEL))
    tril = model.transformer.transformer_layers[1].mha.attention_heads[2].tril
    tril[...] = tril[...].at[3, 5].set(1.0)
    with pytest.raises(InputError, match="tril lets a position attend to later ones"):
        generate(model, ids(1, 3), 5)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16, np.int64, list])
def test_a_prompt_of_any_integers_is_continued_alike(dtype) -> None:
    # Ids of the vocabulary that 8 bits do not hold.
    model = build(LanguageModelConfig(vocab_size=1009, max_seq_length=16, d_model=8, num_heads=2, num_layers=1))
    expected = generate(model, [np.array([1, 2], np.int32)], 7, greedy=True)[0]
    assert expected.max() > 255
    prompt = [1, 2] if dtype is list else np.array([1, 2], dtype)
    (text,) = generate(model, [prompt], 7, greedy=True, stop_ids=[1000])
    np.testing.assert_array_equal(text, expected)


def test_a_small_temperature_is_greedy_in_16_bits_too() -> None:
    model = build(LanguageModelConfig(vocab_size=1009, max_seq_length=16, d_model=8, num_heads=2, num_layers=1))
    graph, state = nnx.split(model)
    half = nnx.merge(graph, jax.tree.map(lambda x: x.astype(np.float16), state))
    greedy, cold = (generate(half, [[1, 2]], 7, **how) for how in ({"greedy": True}, {"temperature": 1e-6}))
    np.testing.assert_array_equal(cold[0], greedy[0])


@pytest.mark.parametrize("wrong", [[1.0, 2.0], [True], ["a"], [1, 2**70], [[1, 2]], 3])
def test_ids_are_lists_of_integers(wrong) -> None:
    with pytest.raises(InputError, match="stop_ids must be a list of token ids"):
        generation._ids(wrong, "stop_ids")
