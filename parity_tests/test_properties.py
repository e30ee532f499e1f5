"""Properties of random cases: every system is its twin, and tensors survive the way there and back.

A failing case is made small by hypothesis and printed. `PARITY_EXAMPLES=100 pytest parity_tests/test_properties.py`
tries so many random cases of every property in place of a few fixed ones.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from models import reference, twin

from flax_tf import layers
from flax_tf.config import (
    AttnRNNConfig,
    BackboneConfig,
    BlockConfig,
    Config,
    LanguageModelConfig,
    RNNConfig,
    TransformerConfig,
)
from flax_tf.parity import compare
from flax_tf.porting import flax_to_torch, torch_to_flax
from flax_tf.porting.convert import slots
from flax_tf.porting.files import numpy_to_torch, torch_to_numpy

EXAMPLES = os.environ.get("PARITY_EXAMPLES")
# Making a failing case small takes hypothesis up to 5 minutes, beyond the limit of other tests.
pytestmark = pytest.mark.timeout(0 if EXAMPLES else 600)


def examples(few: int) -> settings:
    """So many, always the same; or PARITY_EXAMPLES random ones."""
    return settings(
        max_examples=int(EXAMPLES or few),
        derandomize=EXAMPLES is None,
        database=None,
        deadline=None,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )


@dataclass(frozen=True)
class Case:
    """A model, its weights and inputs."""

    config: Config
    inputs: tuple[Any, ...]
    """Shapes of a stream, or rows of ids."""
    dtype: str
    """Of the weights."""
    scale: float
    """By which weights are larger than PyTorch's initial ones."""
    norms: bool
    """Whether norms and biases are random too."""
    train: bool
    low: tuple[str, ...]
    seed: int

    def arrays(self) -> list[np.ndarray]:
        if isinstance(self.config, BlockConfig):
            return [np.random.default_rng(self.seed).standard_normal((*self.inputs, self.config.d_model))]
        return [np.array(rows) for rows in self.inputs]

    def module(self) -> Any:
        module = reference(self.config, self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for parameter in module.parameters():
                if self.norms and parameter.ndim < 2:
                    parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
                parameter *= self.scale
        return module.to(getattr(torch, self.dtype))


def ids(draw: DrawFn, rows: int, length: int, vocab_size: int, pad_id: int) -> np.ndarray:
    """Random ids; a row may end in padding, or be nothing else."""
    tokens = np.random.default_rng(draw(st.integers(0, 99))).integers(vocab_size, size=(rows, length))
    for row in tokens:
        row[draw(st.just(length) | st.integers(0, length)) :] = pad_id
    return tokens


def lengths(longest: int) -> SearchStrategy[int]:
    return st.sampled_from([1, longest]) | st.integers(1, longest)


@st.composite
def cases(draw: DrawFn, config_class: type[Config]) -> Case:
    # A norm over fewer than three numbers is a step function, whose gradient is lost in its roundings.
    heads, head_dim = draw(st.sampled_from([(1, 3), (1, 7), (2, 3), (3, 1), (3, 5), (5, 2)]))
    sizes: dict[str, Any] = {"d_model": heads * head_dim, "num_heads": heads}
    epsilon = {"layer_norm_eps": draw(st.sampled_from([1e-5, 1e-6, 1e-3, 0.1]))}
    layers = {"num_layers": draw(st.integers(1, 2)), "dropout": draw(st.sampled_from([0.0, 0.1, 0.5]))}
    rows, vocab_size = draw(st.integers(1, 3)), draw(st.integers(3, 13))
    longest = draw(st.integers(1, 7))
    train = draw(st.booleans())
    free = False
    if config_class is BlockConfig:
        config: Config = BlockConfig(**sizes, **epsilon)
        inputs: tuple[Any, ...] = (rows, draw(lengths(longest)))
    elif issubclass(config_class, BackboneConfig):
        config = config_class(
            vocab_size=vocab_size, max_seq_length=longest, mask=draw(st.booleans()), **sizes, **layers, **epsilon
        )
        inputs = (ids(draw, rows, draw(lengths(longest)), vocab_size, 0),)
    else:
        shared = config_class is TransformerConfig and draw(st.booleans())
        vocabularies = vocab_size, vocab_size if shared else draw(st.integers(3, 13))
        special = dict(zip(("pad_id", "start_id", "end_id"), draw(st.permutations([0, 1, 2])), strict=True))
        common: dict[str, Any] = {"src_vocab_size": vocabularies[0], "tgt_vocab_size": vocabularies[1], **special}
        if config_class is TransformerConfig:
            options = {"shared_embeddings": shared, "scale_embeddings": draw(st.booleans())}
            widths = {"d_ff": draw(st.integers(1, 13)), "max_seq_length": longest}
            config = TransformerConfig(**common, **options, **widths, **sizes, **layers, **epsilon)
        else:
            hidden = {"hidden_size": draw(st.integers(1, 11)), "dropout": layers["dropout"], "max_length": longest}
            config = config_class(**common, **hidden, mask_source=draw(st.booleans()))
            free = draw(st.booleans())
        inputs = tuple(ids(draw, rows, draw(lengths(longest)), size, config.pad_id) for size in vocabularies)
    if free:
        # Dropout in a loop can't be replayed, and in low precision the likeliest token may be another.
        inputs, train = inputs[:1], False
    return Case(
        config,
        tuple(part.tolist() if isinstance(part, np.ndarray) else part for part in inputs),
        dtype=draw(st.sampled_from(["float32", "float64", "bfloat16", "float16"])),
        scale=draw(st.sampled_from([1.0, 0.3, 3.0])),  # 3: a softmax that takes one place alone
        norms=draw(st.booleans()),
        train=train,
        low=() if free else draw(st.sampled_from([("float32",), (), ("float32", "bfloat16")])),
        seed=draw(st.integers(0, 99)),
    )


SYSTEMS = (BlockConfig, BackboneConfig, LanguageModelConfig, TransformerConfig, RNNConfig, AttnRNNConfig)


@pytest.mark.parametrize("system", SYSTEMS, ids=lambda system: system.arch)
@examples(3)
@given(data=st.data())
def test_every_system_is_its_twin(system: type[Config], data: st.DataObject) -> None:
    case = data.draw(cases(system))
    module = case.module()
    with jax.enable_x64(True):
        model = twin(module)
    report = compare(module, model, *case.arrays(), train=case.train, precisions=case.low, seed=case.seed)
    for row in report.differences():
        note(str(row))
    assert report.ok, report.summary()


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Any number of the dtype: zeros of both signs, infinities, subnormal numbers, and NaN of every payload."""
    return np.frombuffer(rng.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype).reshape(shape)


KINDS: dict[str, Any] = {
    "linear": lambda i, o, n, k, bias, flag, rngs: nnx.Linear(i, o, use_bias=bias, rngs=rngs),
    "general": lambda i, o, n, k, bias, flag, rngs: nnx.LinearGeneral(
        (i, n), (o, *k), axis=(-2, -1), use_bias=bias, rngs=rngs
    ),
    "embed": lambda i, o, n, k, bias, flag, rngs: nnx.Embed(i, o, rngs=rngs),
    "layer norm": lambda i, o, n, k, bias, flag, rngs: nnx.LayerNorm(i, use_bias=bias, use_scale=flag, rngs=rngs),
    "rms norm": lambda i, o, n, k, bias, flag, rngs: nnx.RMSNorm(i, rngs=rngs),
    "group norm": lambda i, o, n, k, bias, flag, rngs: nnx.GroupNorm(i * n, n, use_bias=bias, rngs=rngs),
    "batch norm": lambda i, o, n, k, bias, flag, rngs: nnx.BatchNorm(i, use_bias=bias, use_scale=flag, rngs=rngs),
    "conv": lambda i, o, n, k, bias, flag, rngs: nnx.Conv(
        i * n, o * n, k, feature_group_count=n, use_bias=bias, rngs=rngs
    ),
    "conv transpose": lambda i, o, n, k, bias, flag, rngs: nnx.ConvTranspose(
        i, o, k, use_bias=bias, transpose_kernel=flag, rngs=rngs
    ),
    "attention": lambda i, o, n, k, bias, flag, rngs: nnx.MultiHeadAttention(
        n, i * n, in_kv_features=o if flag else i * n, use_bias=bias, decode=False, rngs=rngs
    ),
    "gru": lambda i, o, n, k, bias, flag, rngs: layers.GRU(
        i, o, num_layers=n, bias=bias, bidirectional=flag, rngs=rngs
    ),
    "lstm": lambda i, o, n, k, bias, flag, rngs: layers.LSTM(
        i, o, num_layers=n, bias=bias, bidirectional=flag, rngs=rngs
    ),
}


def assert_same_bits(ours: Mapping[str, np.ndarray], theirs: Mapping[str, np.ndarray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (array.dtype, array.shape), name
        assert ours[name].tobytes() == array.tobytes(), name


DTYPES = (np.float32, np.float64, ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn, np.int64, np.uint8)


SIZES = st.integers(1, 7)
LAYERS = st.tuples(
    st.sampled_from([*KINDS]), SIZES, SIZES, st.integers(1, 3), st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.booleans(), st.booleans(),
)  # fmt: skip


@examples(50)
@given(st.lists(LAYERS, min_size=1, max_size=3), st.sampled_from(DTYPES), st.integers(0, 99))
def test_every_bit_survives_the_way_there_and_back(specs: list[Any], dtype: Any, seed: int) -> None:
    model = nnx.eval_shape(lambda: nnx.List([KINDS[kind](*rest, nnx.Rngs(0)) for kind, *rest in specs]))
    rng = np.random.default_rng(seed)
    with jax.enable_x64(True):
        state = {name: random_bits(rng, slot.torch_shape, dtype) for name, slot in slots(model).items()}
        back = flax_to_torch(torch_to_flax(state, model))
    assert_same_bits(back, state)
    # And as PyTorch has it in memory.
    assert_same_bits({name: torch_to_numpy(numpy_to_torch(array)) for name, array in back.items()}, state)


class Node(nnx.Module):
    """A module of parameters and modules."""

    def __init__(self, members: dict[str, Any]):
        for name, member in members.items():
            setattr(self, name, nnx.Param(jnp.zeros(member)) if isinstance(member, int) else Node(member))


NAMES = st.sampled_from(["a", "b", "c", "attn", "mlp"])
TREES = st.recursive(st.integers(1, 5), lambda inner: st.dictionaries(NAMES, inner, min_size=1, max_size=3))


def paths_of(tree: Any, above: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Every path below the root, of a module or a parameter: its members, or its size."""
    found = {}
    for name, member in tree.items():
        found[*above, name] = member
        if isinstance(member, dict):
            found |= paths_of(member, (*above, name))
    return found


@examples(50)
@given(TREES.filter(lambda tree: isinstance(tree, dict)), st.data())
def test_renamed_trees_come_back(tree: dict[str, Any], data: st.DataObject) -> None:
    paths = paths_of(tree)
    chosen = data.draw(st.lists(st.sampled_from(sorted(paths)), unique=True))
    # Fresh names at any depth: they hit none of the others.
    torch = {path: (*data.draw(st.just(()) | st.just(path[:1])), f"new{number}") for number, path in enumerate(chosen)}
    rename: Any = {".".join(torch[path]): ".".join(path) for path in chosen}

    def key(path: tuple[str, ...]) -> str:
        """That of the deepest renamed path above, and what is below it."""
        ends = [end for end in range(len(path), 0, -1) if path[:end] in torch]
        return ".".join(torch[path[: ends[0]]] + path[ends[0] :] if ends else path)

    rng = np.random.default_rng(0)
    state = {key(path): random_bits(rng, (size,), np.float32) for path, size in paths.items() if isinstance(size, int)}
    model = torch_to_flax(state, Node(tree), rename)
    assert_same_bits(flax_to_torch(model, rename), state)
    for path, size in paths.items():
        if isinstance(size, int):
            value = reduce(getattr, path, model).get_value()
            assert np.asarray(value).tobytes() == state[key(path)].tobytes()
    left_out = {**state, "unknown.weight": np.zeros(3, np.float32)}
    torch_to_flax(left_out, Node(tree), {**rename, "unknown": None})


@examples(20)
@given(st.integers(1, 3), st.integers(1, 3))
def test_a_pattern_renames_as_the_paths_that_it_stands_for(depth: int, heads: int) -> None:
    places = [(f"n{i}", f"h{j}") for i in range(depth) for j in range(heads)]
    model = Node({"blocks": {f"n{i}": {"attention": {f"h{j}": 3 for j in range(heads)}} for i in range(depth)}})
    pattern = {"layers.*.*.attn": "blocks.*.attention.*"}
    spelled = {f"layers.{block}.{head}.attn": f"blocks.{block}.attention.{head}" for block, head in places}
    assert slots(model, pattern).keys() == slots(model, spelled).keys() == spelled.keys()
    assert [slot.paths for slot in slots(model, pattern).values()] == [(path,) for path in spelled.values()]
