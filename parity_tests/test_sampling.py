"""Drawing by inverse CDF: the distribution, what has no probability, and the ends of the unit interval."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from twins import float64 as float64

from flax_tf.kernels import sampling
from flax_tf.kernels.sampling import draw

ROWS = 200_003


def frequencies(logits: np.ndarray, seed: int) -> np.ndarray:
    """How often each id came in ROWS rows of the same logits."""
    drawn = jax.jit(draw)(jax.random.key(seed), jnp.broadcast_to(jnp.array(logits)[None], (ROWS, len(logits))))
    return np.bincount(np.asarray(drawn), minlength=len(logits))


def probabilities(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()


@pytest.mark.parametrize("V", [1, 2, 3, 37, 101, 121, 122])
@pytest.mark.parametrize("scale", [0.0, 1.0, 4.0])
def test_ids_come_as_often_as_they_are_probable(V: int, scale: float) -> None:
    logits = (scale * np.random.default_rng(V).standard_normal(V)).astype(np.float32)
    expected = ROWS * probabilities(logits)
    found = frequencies(logits, V)
    rare = expected < 10  # together, so that the statistic is distributed as chi-square
    observed, wanted = (np.append(a[~rare], a[rare].sum()) for a in (found, expected))
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    statistic = ((observed - wanted) ** 2 / wanted).sum()
    degrees = len(wanted) - 1
    # Wilson and Hilferty's normal form of chi-square: beyond 4.3 by chance once in 100,000; the seeds are fixed.
    if degrees:
        normal = ((statistic / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / np.sqrt(2 / (9 * degrees))
        assert normal < 4.3
    assert found.sum() == ROWS


def test_the_statistic_would_find_a_small_error() -> None:
    """The power of the test above: an id that is a tenth too rare is found."""
    logits = np.zeros(37, np.float32)
    wrong = logits.copy()
    wrong[5] = np.log(0.9)
    found = frequencies(wrong, 0)
    assert ((found - ROWS / 37) ** 2 / (ROWS / 37)).sum() > 36 + 4.3 * np.sqrt(2 * 36)


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-23], ids=["0", "almost 1"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_has_no_probability_never_comes(number: float, dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """At both ends of the interval that the random numbers are from, where an error by a rounding would show."""
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((1009, 1201)) * 5
    logits[rng.random(logits.shape) < rng.random((1009, 1))] = -np.inf
    logits[np.arange(1009), rng.integers(1201, size=1009)] = 3.0
    logits[0], logits[1], logits[2] = -np.inf, -np.inf, -1e30
    logits[0, -1], logits[1, 0], logits[2, 600] = -1e30, 7.0, 0.0
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape, dtype: jnp.full(shape, number, dtype))
    drawn = np.asarray(draw(jax.random.key(0), jnp.array(logits, dtype)))
    assert (drawn >= 0).all() and (drawn < 1201).all()
    given = np.asarray(jnp.array(logits, dtype).astype(jnp.float32))
    assert (np.exp(given - given.max(axis=-1, keepdims=True))[np.arange(1009), drawn] > 0).all()
    assert drawn[:3].tolist() == [1200, 0, 600]


def test_entries_of_weight_0_are_passed_over_even_where_running_sums_round() -> None:
    rng = np.random.default_rng(0)
    weights = rng.random((4001, 183), np.float32) * (rng.random((4001, 183)) < 0.3)
    weights[:, 91] += 0.1
    for number in (0.0, 0.3, 0.9, 1 - 2.0**-23):
        chosen = np.asarray(sampling._first_above(jnp.array(weights), jnp.full((4001, 1), number, jnp.float32)))
        assert (weights[np.arange(4001), chosen] > 0).all()


def test_the_error_of_float32_sums_is_small() -> None:
    """Numbers on a grid stand for random ones: what part of the interval leads to each block, against float64."""
    V = 30_011
    logits = (3 * np.random.default_rng(0).standard_normal(V)).astype(np.float32)
    width = 174
    weights = np.exp(logits - logits.max())
    blocks = np.pad(weights, (0, -V % width)).reshape(-1, width)
    exact = np.cumsum(blocks.astype(np.float64).sum(axis=1))
    sums = np.asarray(jnp.cumsum(jnp.array(blocks).sum(axis=1)))
    # √V numbers a sum, whose roundings of 6e-8 add up at random: about 13 of them.
    assert abs(sums / sums[-1] - exact / exact[-1]).max() < 1e-6


def test_the_dtype_is_kept_wide(float64: None) -> None:
    logits = jnp.array(np.random.default_rng(0).standard_normal((3, 37)))
    assert logits.dtype == jnp.float64
    assert jax.eval_shape(draw, jax.random.key(0), logits).shape == (3,)
    text = str(jax.make_jaxpr(draw)(jax.random.key(0), logits))
    assert "f64[3,6]" in text and "f32" not in text
