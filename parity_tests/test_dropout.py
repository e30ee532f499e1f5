"""Dropout's masks: what a good generator's would pass, they pass; and they are what the key says, wherever computed."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from models import LANGUAGE_MODEL, reference, twin
from scipy import stats
from test_loss import language_batch

from flax_tf.errors import InputError
from flax_tf.kernels.dropout import keep_mask
from flax_tf.layers import Dropout
from flax_tf.loss import language_model_loss
from flax_tf.training.optimizer import build_optimizer
from flax_tf.training.optimizer_config import OptimizerConfig
from flax_tf.training.step import start

SHAPE = (64, 32, 512)  # 2^20 values, with powers of two in every axis, where weak hashes show
RATES = (0.1, 0.5)
# The probability that the masks of a perfect generator, for seeds drawn at random, fail any one of a table's tests.
FALSE_ALARM = 1e-4

Masks = Callable[[Any, tuple[int, ...], float], Any]  # (key, shape, rate) -> what is kept


# The tests. Each gives the probability, in a perfect generator's masks, of what is at least as far from the expected.


def normalised(keep: Any, rate: float) -> np.ndarray:
    """Mean 0, variance 1."""
    return (np.asarray(keep, np.float64) - (1 - rate)) / np.sqrt(rate * (1 - rate))


def two_sided(distribution: Any, value: float) -> float:
    """Too even is as wrong as too uneven."""
    return float(2 * min(distribution.cdf(value), distribution.sf(value)))


def largest(values: np.ndarray) -> float:
    """Of independent standard normal values, by the largest."""
    return float(-np.expm1(values.size * np.log1p(-2 * stats.norm.sf(np.abs(values).max()))))


def within(keep: np.ndarray, rate: float) -> Iterator[tuple[str, float]]:
    """Rate, slices, patterns, autocorrelation and spectrum of one mask."""
    z = normalised(keep, rate)
    yield "rate", two_sided(stats.norm, z.sum() / np.sqrt(z.size))
    for axis in range(z.ndim):
        others = tuple(i for i in range(z.ndim) if i != axis)
        sums = z.sum(axis=others) / np.sqrt(z.size / z.shape[axis])
        yield f"rates along axis {axis}", two_sided(stats.chi2(sums.size), (sums**2).sum())
        sums = z.sum(axis=axis) / np.sqrt(z.shape[axis])
        yield f"rates across axis {axis}", two_sided(stats.norm, ((sums**2).mean() - 1) / np.sqrt(2 / sums.size))
        # Patterns of so many neighbours that each is expected 50 times or more.
        for length in (2, 4, *([8] if rate == 0.5 else [])):
            rows = np.moveaxis(keep, axis, -1).reshape(-1, length)
            found = np.bincount(rows @ (1 << np.arange(length)), minlength=1 << length)
            kept = np.array([bin(pattern).count("1") for pattern in range(1 << length)])
            expected = len(rows) * (1 - rate) ** kept * rate ** (length - kept)
            squares = ((found - expected) ** 2 / expected).sum()
            yield f"patterns of {length} along axis {axis}", two_sided(stats.chi2((1 << length) - 1), squares)
        power = np.abs(np.fft.rfft(z, axis=axis)) ** 2
        correlation = np.fft.irfft(power, axis=axis).sum(axis=others)[1 : z.shape[axis] // 2] / np.sqrt(z.size)
        yield f"correlation along axis {axis}", largest(correlation)
    flat = np.fft.irfft(np.abs(np.fft.rfft(z.ravel())) ** 2)[1 : z.size // 2] / np.sqrt(z.size)
    yield "correlation at every distance", largest(flat)
    yield "correlation at powers of two", largest(flat[(1 << np.arange(int(np.log2(flat.size)) + 1)) - 1])
    plane = z.reshape(1 << 10, -1)
    spectrum = (np.abs(np.fft.fft2(plane)) ** 2 / plane.size)[1 : 1 << 9, 1:]  # each but once; the mean has its test
    yield "highest peak of the spectrum", float(-np.expm1(spectrum.size * np.log1p(-np.exp(-spectrum.max()))))
    yield "flatness of the spectrum", float(stats.kstest(spectrum.ravel(), stats.expon.cdf).pvalue)


def between(masks: list[np.ndarray], rate: float) -> Iterator[tuple[str, float]]:
    """Pairs of masks that should have nothing to do with each other, in place or shifted against each other."""
    z = np.stack([normalised(mask, rate).ravel() for mask in masks])
    pairs = np.triu_indices(len(z), 1)
    correlation = (z @ z.T)[pairs] / np.sqrt(z.shape[1])
    yield "correlation in place", largest(correlation)
    yield "spread of the correlations", two_sided(stats.chi2(correlation.size), (correlation**2).sum())
    spectra = np.fft.rfft(z)
    shifted = np.fft.irfft(spectra[1:] * np.conj(spectra[:-1])) / np.sqrt(z.shape[1])
    yield "correlation when shifted", largest(shifted)


def neighbours(mask: Masks) -> dict[str, list[Any]]:
    """Keys whose masks meet in one training, or that differ as little as two keys can."""
    key = jax.random.key(3)
    words = jax.random.key_data(jax.random.fold_in(key, 5))
    flipped = [words.at[word].set(words[word] ^ jnp.uint32(1 << bit)) for word in (0, 1) for bit in (0, 1, 7, 16, 31)]
    streams = [nnx.Rngs(dropout=jax.random.fold_in(key, step)) for step in range(4)]
    return {
        "sites and steps": [rngs.dropout() for rngs in streams for _ in range(4)],
        "seeds": [jax.random.key(seed) for seed in range(12)],
        "one bit": [jax.random.wrap_key_data(data) for data in [words, *flipped]],
    }


def battery(mask: Masks) -> dict[str, float]:
    """{test: probability of what is found}."""
    draw = jax.jit(mask, static_argnums=(1, 2))
    found = {}
    for rate in RATES:
        for seed in (0, 1):
            keep = np.asarray(draw(jax.random.key(seed), SHAPE, rate))
            found |= {f"rate {rate}, seed {seed}: {name}": p for name, p in within(keep, rate)}
        for which, keys in neighbours(mask).items():
            masks = [np.asarray(draw(key, (16, 32, 128), rate)) for key in keys]
            found |= {f"rate {rate}, {which}: {name}": p for name, p in between(masks, rate)}
    return found


def failures(mask: Masks) -> list[str]:
    found = battery(mask)
    return [name for name, p in found.items() if p < FALSE_ALARM / len(found)]


def test_masks_have_the_statistics_of_independent_draws() -> None:
    assert failures(keep_mask) == []


def test_the_tests_let_a_generator_known_to_be_good_pass() -> None:
    assert failures(lambda key, shape, rate: jax.random.bernoulli(key, 1 - rate, shape)) == []


def index(shape: tuple[int, ...]) -> Any:
    return jnp.arange(np.prod(shape), dtype=jnp.uint32).reshape(shape)


def congruential(key, shape, rate):
    """Knuth's multiplier on the index."""
    bits = (index(shape) + jax.random.key_data(key)[1]) * jnp.uint32(2654435761)
    return bits >= jnp.uint32(round(rate * 2**32))


def one_round(key, shape, rate):
    """A multiplication and a shift."""
    bits = (index(shape) ^ jax.random.key_data(key)[0] ^ jax.random.key_data(key)[1]) * jnp.uint32(0x7FEB352D)
    return (bits ^ (bits >> 16)) >= jnp.uint32(round(rate * 2**32))


def key_by_addition(key, shape, rate):
    """Good bits, but the next key has those of the next place."""
    bits = index(shape) + jax.random.key_data(key)[0] + jax.random.key_data(key)[1]
    for multiplier, shift in ((0x7FEB352D, 16), (0x846CA68B, 15)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(multiplier)
    return (bits ^ (bits >> 16)) >= jnp.uint32(round(rate * 2**32))


@pytest.mark.parametrize(
    ("mask", "by"), [(congruential, "spectrum"), (one_round, "patterns"), (key_by_addition, "shifted")]
)
def test_the_tests_find_bad_hashes(mask: Masks, by: str) -> None:
    assert any(by in name for name in failures(mask))


# The layer


def test_the_rate_is_exact() -> None:
    """Of all 2^32 bits those below the threshold drop: even rates that a float32 could not tell from 0 or 1 do."""
    assert np.asarray(keep_mask(jax.random.key(0), (1000, 1000), 1e-9)).all()
    dropped = 1e6 - np.asarray(keep_mask(jax.random.key(0), (1000, 1000), 1 - 1e-5)).sum()
    # 10 kept values are expected, and 40 or more in one of 10^12 cases.
    assert 0 < 1e6 - dropped < 40
    assert not np.asarray(keep_mask(jax.random.key(0), (1000,), 1 - 1e-12)).any()


@pytest.mark.parametrize("shape", [(), (5,), (3, 5), (2, 3, 5, 7)])
def test_every_rank_has_a_mask(shape: tuple[int, ...]) -> None:
    mask = keep_mask(jax.random.key(0), shape, 0.5)
    assert mask.shape == shape and mask.dtype == bool
    assert np.array_equal(mask, plain_mask(jax.random.key(0), shape, 0.5))


def test_values_are_kept_and_scaled_as_in_pytorch_and_gradients_have_the_same_mask() -> None:
    layer, key = Dropout(0.3), jax.random.key(0)
    x = jnp.array(np.random.default_rng(0).standard_normal((31, 37)))
    keep = keep_mask(key, x.shape, 0.3)
    output, backwards = jax.vjp(lambda x: layer(x, rngs=key), x)
    for value, given in ((output, x), (backwards(x)[0], x)):
        # A division and the product with the inverse differ by a rounding of float32.
        np.testing.assert_allclose(value, np.where(keep, given / np.float32(0.7), 0), rtol=2**-22, atol=0)
    layer.eval()
    assert layer(x) is x
    assert np.array_equal(Dropout(1.0)(x, rngs=key), np.zeros_like(x))


def test_missing_random_numbers_are_named() -> None:
    with pytest.raises(InputError, match=r"pass rngs=nnx\.Rngs\(dropout=0\), or eval\(\)"):
        Dropout(0.3)(jnp.ones(3))


def test_a_stream_gives_every_call_another_mask() -> None:
    rngs, layer = nnx.Rngs(dropout=0), Dropout(0.5)
    first, second = (layer(jnp.ones(1000), rngs=rngs) for _ in range(2))
    assert not np.array_equal(first, second)
    assert np.array_equal(first, layer(jnp.ones(1000), rngs=nnx.Rngs(dropout=0)))


def plain_mask(key: Any, shape: tuple[int, ...], rate: float) -> Any:
    """The definition, in NumPy."""
    if isinstance(key, jax.core.Tracer):
        result = jax.ShapeDtypeStruct(shape, bool)
        return jax.pure_callback(lambda data: _plain_mask(data, shape, rate), result, jax.random.key_data(key))
    return _plain_mask(jax.random.key_data(key), shape, rate)


def _plain_mask(data: Any, shape: tuple[int, ...], rate: float) -> np.ndarray:
    words = np.uint64(2**32)  # products of two words fit into 64 bits

    def mixed(bits):
        for multiplier, shift in ((0x7FEB352D, 16), (0x846CA68B, 15)):
            bits = (bits ^ bits >> np.uint64(shift)) * np.uint64(multiplier) % words
        return bits ^ bits >> np.uint64(16)

    first, second = np.asarray(data).astype(np.uint64)
    second = mixed((second + np.uint64(0x9E3779B9)) % words)
    first = mixed(first ^ second)
    second = mixed(second ^ first)
    row, *others = np.indices(shape, np.uint64) if shape else [np.uint64(0)]
    column = np.zeros(shape, np.uint64)
    for size, place in zip(shape[1:], others, strict=True):
        column = column * np.uint64(size) + place
    return mixed(mixed(column ^ first) ^ (row + second) % words) >= rate * 2**32


class PlainDropout(nnx.Module):
    def __init__(self, rate: float):
        self.rate = rate

    def __call__(self, x, *, rngs):
        return x * plain_mask(rngs.dropout(), x.shape, self.rate) / (1 - self.rate)


def test_fifty_steps_have_the_losses_of_the_plain_form() -> None:
    runs = []
    with jax.enable_x64(True):
        for plain in (False, True):
            model = twin(reference(replace(LANGUAGE_MODEL, dropout=0.2, num_layers=1)).double())
            if plain:
                for _, module in list(nnx.iter_modules(model)):
                    for name, child in list(vars(module).items()):
                        if isinstance(child, Dropout):
                            setattr(module, name, PlainDropout(child.rate))
            optimizer = build_optimizer(OptimizerConfig(learning_rate=1e-3), 50)
            state, steps = start(model, optimizer, language_model_loss, seed=0)
            rng, sums = np.random.default_rng(0), []
            for _ in range(50):
                state = steps.train(state, language_batch(rng))
                sums.append(float(state.loss_sum))
            runs.append(sums)
    # float64: roundings of 1e-16, which 50 steps of Adam at a rate of 1e-3 may make larger.
    np.testing.assert_allclose(*runs, rtol=1e-10)


def test_masks_do_not_depend_on_the_number_of_devices() -> None:
    """Needs more devices than a test process has."""
    code = """
import re
import jax, jax.numpy as jnp, numpy as np
from flax_tf.layers import Dropout
from flax_tf.training.sharding import data_mesh, shard

layer, key, x = Dropout(0.3), jax.random.key(0), jnp.ones((56, 13, 5))
drop = jax.jit(lambda x: layer(x, rngs=key))
mesh = data_mesh(56)
assert mesh.size == 8
parts = shard(mesh, x)
assert np.array_equal(drop(parts), drop(x))
assert drop(parts).sharding.is_equivalent_to(parts.sharding, 3)
text = drop.lower(parts).compile().as_text()
assert "f32[7,13,5]" in text and not re.search("all-|collective", text)
"""
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=flags, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
