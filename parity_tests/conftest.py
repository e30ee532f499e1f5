"""Strictness for every test: shapes in signatures are checked, and JAX promotes no rank by itself."""

import tempfile
from collections.abc import Generator

from jaxtyping import install_import_hook

# The files with array functions. Not the configs: what they refuse, they refuse in their own words.
_MODELS = ("masks", "embedding", "attention", "feed_forward", "block", "language_model", "generation", "loss")
_SEQ2SEQ = ("encoder", "decoder", "transformer", "recurrent", "decoding")
_CHECKED = [f"{package}.{file}" for package in ("flax_tf", "torch_ref") for file in (*_MODELS, *_SEQ2SEQ)]
_CHECKED += [
    "flax_tf.kernels.dropout",
    "flax_tf.kernels.linear_cross_entropy",
    "flax_tf.layers",
    "flax_tf.data.batches",
    "flax_tf.training.step",
]
install_import_hook(_CHECKED, "beartype.beartype")

import jax  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

torch.set_num_threads(1)  # more would get in the way of the other test processes

# A broadcast that nobody wrote is how a wrong shape hides.
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session", autouse=True)
def compile_once() -> Generator[None]:
    """Many tests compile the same small program again; within one session that is done once."""
    with tempfile.TemporaryDirectory() as directory:
        jax.config.update("jax_compilation_cache_dir", directory)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        yield
