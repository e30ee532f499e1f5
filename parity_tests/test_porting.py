"""Weights between the frameworks: the same bits in the right places, both ways, or one error and nothing changed."""

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx
from models import BACKBONE, BLOCK, LANGUAGE_MODEL, reference, state_arrays, twin
from safetensors.numpy import save_file

from flax_tf.errors import InputError
from flax_tf.layers import Buffer, Embedding, LayerNorm, Linear
from flax_tf.porting import StateDictError, flax_to_torch, torch_to_flax
from flax_tf.porting.convert import flax_paths, slots, torch_modules
from flax_tf.porting.files import numpy_to_torch, torch_to_numpy
from flax_tf.saving import abstract

DTYPES = ("bfloat16", "float16", "float32", "float64")


def random_bits(shape: tuple[int, ...], dtype: str, seed: int) -> torch.Tensor:
    """A tensor of random bits: normal numbers, subnormals and NaNs of any payload; the special values come first."""
    info = ml_dtypes.finfo(dtype)
    unsigned = np.dtype(f"u{info.dtype.itemsize}")
    bits = np.random.default_rng(seed).integers(np.iinfo(unsigned).max, size=shape, dtype=unsigned, endpoint=True)
    one, infinity = unsigned.type(1), np.array(np.inf, info.dtype).view(unsigned)
    sign = one << unsigned.type(info.bits - 1)
    special = [
        sign,
        one,
        sign | one,
        infinity,
        sign | infinity,
        infinity | one,
        sign | infinity | one << unsigned.type(3),
    ]
    bits.ravel()[: len(special)] = special[: bits.size]
    # Bits go to torch as integers, so that nothing on the way is a floating-point operation.
    return torch.from_numpy(bits.view(f"i{info.dtype.itemsize}")).view(getattr(torch, dtype))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(width), b.contiguous().view(width))


def leaves(model: nnx.Module) -> list[Any]:
    return jax.tree.leaves(nnx.state(model))


@pytest.mark.parametrize("dtype", [*DTYPES, "mixed"])
@pytest.mark.parametrize("config", [BLOCK, BACKBONE, LANGUAGE_MODEL], ids=lambda config: config.arch)
def test_a_round_trip_keeps_every_bit(config, dtype: str) -> None:
    module = reference(config)
    tensors = {
        name: random_bits(tuple(tensor.shape), DTYPES[i % 4] if dtype == "mixed" else dtype, i)
        for i, (name, tensor) in enumerate(module.state_dict().items())
    }
    with jax.enable_x64(dtype in ("float64", "mixed")):
        model = torch_to_flax({name: torch_to_numpy(tensor) for name, tensor in tensors.items()}, abstract(config))
        back = {name: numpy_to_torch(array) for name, array in flax_to_torch(model).items()}
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same_bits(back[name], tensor), name
    module.load_state_dict(back)


def test_the_special_values_are_what_they_should_be() -> None:
    for dtype in DTYPES:
        negative_zero, tiny, _, infinity, _, *nans = random_bits((7,), dtype, 0)
        assert negative_zero == 0 and torch.signbit(negative_zero)
        assert 0 < tiny < torch.finfo(tiny.dtype).tiny
        assert infinity == torch.inf
        assert all(torch.isnan(nan) for nan in nans) and not same_bits(nans[0], nans[1])


def test_an_abstract_and_a_concrete_model_are_filled_alike() -> None:
    arrays = state_arrays(reference(BLOCK))
    filled, model = torch_to_flax(arrays, abstract(BLOCK)), twin(reference(BLOCK, seed=1))
    assert torch_to_flax(arrays, model) is model
    assert all(isinstance(leaf, jax.Array) for leaf in leaves(filled))
    assert len(leaves(filled)) == len(arrays)
    for a, b in zip(leaves(filled), leaves(model), strict=True):
        np.testing.assert_array_equal(a, b)


class Odd(nnx.Module):
    """Every tensor but the norm's is square or a scalar, so no shape can tell which ones to transpose."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = Linear(5, 5, rngs=rngs)
        self.table = Embedding(5, 5, rngs=rngs)
        self.norm = LayerNorm(5, epsilon=1e-5, rngs=rngs)
        self.stack = nnx.Sequential(nnx.Sequential(Linear(5, 5, rngs=rngs)), Linear(5, 5, rngs=rngs))
        self.mix = nnx.Param(jnp.zeros((5, 5)))
        self.pair = nnx.List([nnx.Param(jnp.zeros((5, 5))), nnx.Param(jnp.zeros((5, 5)))])
        self.scale = nnx.Param(jnp.zeros(()))
        self.steps = Buffer(jnp.zeros((), jnp.int32))


class TorchOdd(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(5, 5)
        self.table = torch.nn.Embedding(5, 5)
        self.norm = torch.nn.LayerNorm(5)
        self.stack = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(5, 5)), torch.nn.Linear(5, 5))
        self.mix = torch.nn.Parameter(torch.randn(5, 5))
        self.pair = torch.nn.ParameterList([torch.randn(5, 5), torch.randn(5, 5)])
        self.scale = torch.nn.Parameter(torch.tensor(3.5))
        self.register_buffer("steps", torch.tensor(7, dtype=torch.int32))


def test_the_layers_type_decides_what_is_transposed() -> None:
    torch.manual_seed(0)
    module = TorchOdd()
    model = torch_to_flax(state_arrays(module), nnx.eval_shape(lambda: Odd(nnx.Rngs(0))))
    for ours, theirs in (
        (model.linear.kernel, module.linear.weight.T),
        (model.stack.layers[0].layers[0].kernel, module.stack[0][0].weight.T),
        (model.stack.layers[1].kernel, module.stack[1].weight.T),
        (model.linear.bias, module.linear.bias),
        (model.table.embedding, module.table.weight),
        (model.norm.scale, module.norm.weight),
        (model.mix, module.mix),
        (model.pair[1], module.pair[1]),
        (model.scale, module.scale),
        (model.steps, module.steps),
    ):
        np.testing.assert_array_equal(ours.get_value(), theirs.detach().numpy(), strict=True)
    back = flax_to_torch(model)
    assert all(array.flags.c_contiguous for array in back.values())
    # By hand, for PyTorch takes a vector of one element for a scalar.
    assert {name: array.shape for name, array in back.items()} == {n: t.shape for n, t in module.state_dict().items()}
    again = TorchOdd()
    again.load_state_dict({name: numpy_to_torch(array) for name, array in back.items()})
    for name, tensor in module.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


class TorchNet(torch.nn.Module):
    """Of other names than `Net`, and with a mask that `Net` does not keep."""

    def __init__(self):
        super().__init__()
        self.start = torch.nn.Parameter(torch.randn(11, 5))
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict({"attn": torch.nn.Linear(5, 5), "mlp": torch.nn.Sequential(torch.nn.Linear(5, 7))})
            for _ in range(3)
        )
        self.register_buffer("mask", torch.ones(5, 5))


class Layer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attention = Linear(5, 5, rngs=rngs)
        self.net = nnx.Sequential(Linear(5, 7, rngs=rngs))


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.positions = Embedding(11, 5, rngs=rngs)
        self.blocks = nnx.List([Layer(rngs) for _ in range(3)])


NAMES: dict[str, str | None] = {
    "start": "positions.embedding",
    "layers": "blocks",
    "layers.*.attn": "blocks.*.attention",
    "layers.*.mlp": "blocks.*.net",
    "mask": None,
}


def test_names_that_differ_are_renamed_both_ways() -> None:
    torch.manual_seed(0)
    module = TorchNet()
    arrays = state_arrays(module)
    model = torch_to_flax(arrays, nnx.eval_shape(lambda: Net(nnx.Rngs(0))), NAMES)
    np.testing.assert_array_equal(model.positions.embedding[...], arrays["start"])
    np.testing.assert_array_equal(model.blocks[2].attention.kernel[...], arrays["layers.2.attn.weight"].T)
    np.testing.assert_array_equal(model.blocks[1].net.layers[0].bias[...], arrays["layers.1.mlp.0.bias"])
    back = flax_to_torch(model, NAMES)
    assert back.keys() == arrays.keys() - {"mask"}
    for name, array in back.items():
        np.testing.assert_array_equal(array, arrays[name], strict=True)
    paths = flax_paths(model, NAMES)
    assert paths["layers.1.mlp.0"] == "blocks.1.net.layers.0" and paths[""] == "" and paths["layers"] == "blocks"
    assert (
        paths.keys() == dict(torch_modules(model, NAMES)).keys() == dict(module.named_modules()).keys() | {"positions"}
    )


def test_the_deeper_name_and_the_one_with_fewer_stars_win() -> None:
    model = Net(nnx.Rngs(0))
    names = {**NAMES, "first": "blocks.0.attention", "shift": "blocks.0.net.layers.0.bias", "layers": None}
    keys = slots(model, {**names, "rows": "blocks"})
    assert {"first.weight", "first.bias", "shift", "layers.0.mlp.0.weight", "layers.2.attn.weight"} <= keys.keys()
    assert not keys.keys() & {"layers.0.attn.weight", "layers.0.mlp.0.bias"}
    # Of what PyTorch has below `layers`, only what is named deeper has a place in Flax.
    arrays = {key: np.zeros(slot.torch_shape, np.float32) for key, slot in keys.items()}
    torch_to_flax(arrays | {"layers.3.scale": np.zeros(3)}, model, {**names, "rows": "blocks"})
    with pytest.raises(StateDictError, match=r"unexpected in the checkpoint \(1\):\n    layers.3.attn.weight \(3,\)$"):
        torch_to_flax(arrays | {"layers.3.attn.weight": np.zeros(3)}, model, {**names, "rows": "blocks"})


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ({"a.b": "blocks.3"}, "rename of 'a.b' to 'blocks.3': the Flax model has no 'blocks.3'; "),
        ({"a": "positions.weight"}, "the Flax model has no 'positions.weight'"),
        ({"layers.*.attn": "blocks.0.attention"}, "'layers.*.attn' to 'blocks.0.attention': give both as many stars"),
        ({"a": "blocks", "b": "blocks"}, "rename gives 'blocks' two PyTorch names, 'a' and 'b': keep one"),
        ({"a.*": "*.0", "b.*": "blocks.*"}, "rename gives 'blocks.0' two PyTorch names, 'a.blocks' and 'b.0'"),
        (
            {"positions.weight": None},
            "Flax has no 'positions.weight', but it is 'positions.embedding' of the Flax model",
        ),
        ({"positions": "blocks"}, "'positions' and 'blocks' of the Flax model would both be PyTorch's 'positions'"),
        ({"a.weight": "blocks.0.attention.bias", "a": "blocks.0.attention"}, "would both be PyTorch's 'a.weight'"),
    ],
)
def test_a_rename_that_does_not_fit_is_refused(names: dict[str, str | None], said: str) -> None:
    model = Net(nnx.Rngs(0))
    for port in (lambda: flax_to_torch(model, names), lambda: torch_to_flax({}, model, names)):
        with pytest.raises(InputError) as caught:
            port()
        assert said in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_missing_is_told_with_its_place_in_flax() -> None:
    arrays = state_arrays(TorchNet())
    del arrays["layers.2.mlp.0.weight"]
    with pytest.raises(StateDictError) as caught:
        torch_to_flax(arrays, Net(nnx.Rngs(0)), NAMES)
    assert str(caught.value).splitlines()[1:] == [
        "  missing from the checkpoint (1):",
        "    layers.2.mlp.0.weight (7, 5), in Flax blocks.2.net.layers.0.kernel",
    ]


class Attention(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.attn = nnx.MultiHeadAttention(3, 21, decode=False, dropout_rate=0.1, rngs=rngs)


def test_the_projections_of_an_attention_are_one_layer_unless_they_are_renamed() -> None:
    model = Attention(nnx.Rngs(0))
    packed = ["in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"]
    assert sorted(slots(model)) == sorted(f"attn.{name}" for name in packed)
    assert dict(torch_modules(model)).keys() == {"", "attn"}
    parts = {"q": "query", "k": "key", "v": "value", "o": "out"}
    names = {f"self.{short}_proj": f"attn.{name}" for short, name in parts.items()}
    assert sorted(slots(model, names)) == sorted(f"{name}.{part}" for name in names for part in ("weight", "bias"))
    assert dict(torch_modules(model, names)).keys() == {"", "attn", *names}
    linears = {name: torch.nn.Linear(21, 21) for name in names}
    arrays = {f"{name}.{key}": array for name, linear in linears.items() for key, array in state_arrays(linear).items()}
    torch_to_flax(arrays, model, names)
    x = torch.randn(2, 21)
    ours = model.attn.key(jnp.array(x.numpy())).reshape(2, 21)
    truth = linears["self.k_proj"](x).detach().numpy()
    np.testing.assert_allclose(np.asarray(ours), truth, atol=1e-5)  # float32 sums of 21 terms of order one


class Shared(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.MultiHeadAttention(3, 21, decode=False, rngs=rngs)
        self.second = self.first


def test_a_shared_layer_is_a_tie() -> None:
    model = Shared(nnx.Rngs(0))
    back = flax_to_torch(model, {"again": "second"})
    assert back["first.in_proj_weight"] is back["again.in_proj_weight"]
    half = {name: array for name, array in back.items() if name.startswith("again")}
    torch_to_flax(half, model, {"again": "second"})
    wrong = back | {"first.in_proj_bias": back["first.in_proj_bias"] + 1}
    with pytest.raises(StateDictError, match=r"different in the checkpoint \(1\):\n    first.in_proj_bias, again.in"):
        torch_to_flax(wrong, model, {"again": "second"})


class Held(nnx.Module):
    """Modules in plain containers, and state of a run, which is not PyTorch's."""

    def __init__(self, rngs: nnx.Rngs):
        self.pair = nnx.data([Linear(3, 5, rngs=rngs), {"inner": Linear(5, 7, rngs=rngs)}])
        self.named = nnx.Dict({"last": Linear(7, 2, rngs=rngs)})
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(3, 21, decode=True, rngs=rngs)
        self.attention.init_cache((2, 5, 21))
        self.seen = nnx.Intermediate(jnp.zeros(3))


def test_plain_containers_are_walked_and_state_of_a_run_is_left_out() -> None:
    model = Held(nnx.Rngs(0))
    modules = dict(torch_modules(model))
    assert modules.keys() == {"", "pair.0", "pair.1.inner", "named", "named.last", "dropout", "attention"}
    assert {key.rpartition(".")[0] for key in flax_to_torch(model)} == {
        "pair.0", "pair.1.inner", "named.last", "attention", "attention.out_proj",
    }  # fmt: skip


def test_the_model_has_memory_of_its_own() -> None:
    module = reference(BLOCK)
    model = twin(module)
    before = {name: array.copy() for name, array in flax_to_torch(model).items()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    for name, array in flax_to_torch(model).items():
        np.testing.assert_array_equal(array, before[name])


def test_one_error_lists_all_that_does_not_fit() -> None:
    arrays = state_arrays(reference(BLOCK))
    for name in ("mlp_layer_norm.weight", "attention_layer_norm.bias"):
        del arrays[name]
    arrays["zebra.weight"], arrays["aardvark"] = np.zeros((2, 3)), np.zeros(())
    arrays["output_mixer_projection.weight"] = np.zeros((15, 16), np.float32)
    arrays["embedding_mlp.0.weight"] = arrays["embedding_mlp.0.weight"].T
    arrays["module._orig_mod.kqv_projection.bias"] = arrays["module.kqv_projection.bias"] = np.zeros(45, np.float32)
    with pytest.raises(StateDictError) as caught:
        torch_to_flax(arrays, abstract(BLOCK))
    assert isinstance(caught.value, InputError)
    assert str(caught.value).splitlines() == [
        "the checkpoint does not fit the model:",
        "  missing from the checkpoint (2):",
        "    attention_layer_norm.bias (15,)",
        "    mlp_layer_norm.weight (15,), in Flax mlp_layer_norm.scale",
        "  unexpected in the checkpoint (2):",
        "    aardvark ()",
        "    zebra.weight (2, 3)",
        "  duplicate in the checkpoint (1):",
        "    kqv_projection.bias, from kqv_projection.bias, module._orig_mod.kqv_projection.bias, "
        "module.kqv_projection.bias",
        "  of another shape (2):",
        "    embedding_mlp.0.weight: checkpoint (15, 60), model (60, 15)",
        "    output_mixer_projection.weight: checkpoint (15, 16), model (15, 15)",
    ]


def lose_a_key(arrays: dict[str, np.ndarray]) -> None:
    arrays.popitem()


def add_a_key(arrays: dict[str, np.ndarray]) -> None:
    arrays["extra"] = np.zeros(3)


def double_a_key(arrays: dict[str, np.ndarray]) -> None:
    arrays["module.kqv_projection.bias"] = arrays["kqv_projection.bias"]


def misshape_a_tensor(arrays: dict[str, np.ndarray]) -> None:
    arrays["kqv_projection.bias"] = np.zeros((45, 1))


def widen_a_float(arrays: dict[str, np.ndarray]) -> None:
    arrays["kqv_projection.bias"] = np.zeros(45, np.float64)


def widen_an_integer(arrays: dict[str, np.ndarray]) -> None:
    arrays["kqv_projection.bias"] = np.zeros(45, np.int64)


@pytest.mark.parametrize(
    "spoil", [lose_a_key, add_a_key, double_a_key, misshape_a_tensor, widen_a_float, widen_an_integer]
)
def test_an_error_leaves_the_model_as_it_was(spoil) -> None:
    arrays = state_arrays(reference(BLOCK))
    spoil(arrays)
    model = twin(reference(BLOCK, seed=1))
    before = leaves(model)
    with pytest.raises(InputError):
        torch_to_flax(arrays, model)
    assert all(a is b for a, b in zip(leaves(model), before, strict=True))


def test_64_bit_tensors_are_not_cut_to_32() -> None:
    arrays = state_arrays(reference(BLOCK).double())
    with pytest.raises(InputError) as caught:
        torch_to_flax(arrays, abstract(BLOCK))
    assert str(caught.value) == (
        f"{len(arrays)} tensors are 64 bits wide (first: attention_layer_norm.bias, float64) and JAX would cut them "
        "to 32: set JAX_ENABLE_X64=1, or ask for dtype='float32'"
    )
    with jax.enable_x64(True):
        model = torch_to_flax(arrays, abstract(BLOCK))
    assert {leaf.dtype for leaf in leaves(model)} == {jnp.dtype("float64")}


@pytest.mark.parametrize(
    ("prefix", "said"),
    [
        ("module.", ["module."]),
        ("_orig_mod.", ["_orig_mod."]),
        ("module._orig_mod.", ["_orig_mod.", "module."]),
        ("_orig_mod.module.", ["_orig_mod.", "module."]),
        ("model.", ["model."]),
        ("model.model.", ["model."]),
        ("_fsdp_wrapped_module._checkpoint_wrapped_module.", ["_checkpoint_wrapped_module.", "_fsdp_wrapped_module."]),
    ],
)
def test_wrapper_prefixes_are_stripped_and_said(prefix: str, said: list[str], caplog: pytest.LogCaptureFixture) -> None:
    arrays = state_arrays(reference(LANGUAGE_MODEL))
    model = torch_to_flax({prefix + name: array for name, array in arrays.items()}, abstract(LANGUAGE_MODEL))
    for name, array in flax_to_torch(model).items():
        np.testing.assert_array_equal(array, arrays[name])
    count = len(arrays)
    assert caplog.messages == [f"stripped the wrapper prefix '{p}' from {count} of {count} keys" for p in said]


def test_a_wrapper_within_the_path_is_stripped(caplog: pytest.LogCaptureFixture) -> None:
    arrays = state_arrays(reference(LANGUAGE_MODEL))
    wrapped = {
        name.replace("transformer_layers.1.", "transformer_layers.1._orig_mod."): array
        for name, array in arrays.items()
    }
    model = torch_to_flax(wrapped, abstract(LANGUAGE_MODEL))
    for name, array in flax_to_torch(model).items():
        np.testing.assert_array_equal(array, arrays[name])
    inside = sum(name.startswith("transformer.transformer_layers.1.") for name in arrays)
    assert caplog.messages == [f"stripped the wrapper prefix '_orig_mod.' from {inside} of {len(arrays)} keys"]


def test_pytorchs_own_wrapper_is_stripped() -> None:
    wrapper = torch.nn.DataParallel(module := reference(BLOCK))
    assert wrapper.state_dict().keys().isdisjoint(module.state_dict())
    model = torch_to_flax(state_arrays(wrapper), abstract(BLOCK))
    np.testing.assert_array_equal(model.kqv_projection.kernel.get_value().T, module.kqv_projection.weight.detach())


@pytest.mark.parametrize("attribute", ["model", "module"])
def test_an_attribute_with_a_wrappers_name_is_kept(attribute: str, caplog: pytest.LogCaptureFixture) -> None:
    class Named(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            setattr(self, attribute, Linear(3, 5, rngs=rngs))

    arrays = {f"{attribute}.weight": np.ones((5, 3), np.float32), f"{attribute}.bias": np.ones(5, np.float32)}
    model = torch_to_flax(arrays, Named(nnx.Rngs(0)))
    assert flax_to_torch(model).keys() == arrays.keys()
    assert caplog.messages == []
    other = {"model": "module", "module": "model"}[attribute]
    torch_to_flax({f"{other}.{name}": array for name, array in arrays.items()}, model)
    assert caplog.messages == [f"stripped the wrapper prefix '{other}.' from 2 of 2 keys"]


FILL_AND_MEASURE = """
import resource, sys
import jax, numpy as np
from flax import nnx
from flax_tf.layers import Linear
from flax_tf.porting import read_weights, torch_to_flax

WIDTH, COUNT = 724, 48  # 48 matrices of 2.1 MB

class Stack(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Linear(WIDTH, WIDTH, bias=False, rngs=rngs) for _ in range(COUNT)])

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

model = nnx.eval_shape(lambda: Stack(nnx.Rngs(0)))
jax.numpy.array(np.ones((3, 5)).T)  # what JAX takes to start is not counted
tensors = read_weights(sys.argv[1])
before = peak()
torch_to_flax(tensors, model)
jax.block_until_ready(nnx.state(model))
print((peak() - before) * (1 if sys.platform == "darwin" else 1024))
"""


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_filling_a_model_takes_the_memory_of_the_model(tmp_path, suffix: str) -> None:
    file = tmp_path / f"model.{suffix}"
    save = {"safetensors": save_file, "pt": lambda arrays, file: torch.save(as_tensors(arrays), file)}[suffix]
    save({f"layers.{i}.weight": np.ones((724, 724), np.float32) for i in range(48)}, file)
    # Through a shell, because Linux lets a process inherit the peak of the one that started it.
    run = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", FILL_AND_MEASURE, str(file)]
    grown = int(subprocess.run(run, check=True, stdout=subprocess.PIPE, text=True).stdout)
    # Once for the model's arrays, and for each core a piece of the file of one matrix, 1/48. With the pages of the file
    # kept, or one more copy, it would be twice and more.
    assert 0.9 * file.stat().st_size < grown < 1.5 * file.stat().st_size


def as_tensors(arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    return {name: numpy_to_torch(array) for name, array in arrays.items()}


def test_settings_of_the_callers_thread_hold() -> None:
    arrays = state_arrays(reference(LANGUAGE_MODEL).double())
    with jax.enable_x64(True):
        model = torch_to_flax(arrays, abstract(LANGUAGE_MODEL))
    assert model.classifier.kernel.dtype == np.float64
