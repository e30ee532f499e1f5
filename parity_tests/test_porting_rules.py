"""Every rule of the table: the ported layer is the same function with the same gradients, and the way back is exact."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx

from flax_tf import layers
from flax_tf.parity.tolerances import GRADIENT_FLOAT64, OUTPUT_FLOAT64, relative_error
from flax_tf.porting import StateDictError, flax_to_torch, torch_to_flax
from flax_tf.porting.convert import slots, torch_modules
from flax_tf.porting.files import numpy_to_torch, torch_to_numpy
from flax_tf.porting.rules import RULES, Tensor, rule_of


@dataclass(frozen=True)
class Case:
    name: str
    reference: Callable[[], torch.nn.Module]
    twin: Callable[[nnx.Rngs], nnx.Module]
    inputs: tuple[tuple[int, ...], ...]
    """Shapes, as Flax takes them."""
    channels_first: bool = False
    """Whether PyTorch has axis 1 where Flax has the last one."""

    def run_reference(self, module: torch.nn.Module, arrays: list[np.ndarray]) -> torch.Tensor:
        # Contiguous: on a channels-last view with no gradient of its own, GroupNorm's backward crashes (torch 2.13).
        tensors = [torch.from_numpy(np.moveaxis(a, -1, 1).copy() if self.channels_first else a) for a in arrays]
        result = module(*tensors)
        result = result[0] if isinstance(result, tuple) else result
        return torch.movedim(result, 1, -1) if self.channels_first else result


EPS = 1e-3  # large beside the default, so that another epsilon shows
SPATIAL = {1: (11,), 2: (11, 7), 3: (5, 7, 4)}
KERNELS = {1: (3,), 2: (3, 2), 3: (2, 3, 1)}


def conv_case(rank: int, groups: int) -> Case:
    kernel = KERNELS[rank]
    return Case(
        f"Conv{rank}d, groups {groups}",
        lambda: getattr(torch.nn, f"Conv{rank}d")(6, 10, kernel, stride=2, padding=1, groups=groups),
        lambda rngs: nnx.Conv(6, 10, kernel, 2, padding=1, feature_group_count=groups, rngs=rngs),
        ((2, *SPATIAL[rank], 6),),
        channels_first=True,
    )


def conv_transpose_case(rank: int, transpose_kernel: bool) -> Case:
    kernel = KERNELS[rank]
    return Case(
        f"ConvTranspose{rank}d, transpose_kernel {transpose_kernel}",
        lambda: getattr(torch.nn, f"ConvTranspose{rank}d")(5, 7, kernel),
        lambda rngs: nnx.ConvTranspose(5, 7, kernel, padding="VALID", transpose_kernel=transpose_kernel, rngs=rngs),
        ((2, *SPATIAL[rank], 5),),
        channels_first=True,
    )


def attention_case(name: str, shapes: tuple[tuple[int, ...], ...], kv: int = 21, bias: bool = True) -> Case:
    return Case(
        f"MultiHeadAttention, {name}",
        lambda: torch.nn.MultiheadAttention(21, 3, bias=bias, kdim=kv, vdim=kv, batch_first=True),
        # NNX's own attention function computes its softmax in float32.
        lambda rngs: nnx.MultiHeadAttention(
            3, 21, in_kv_features=kv, use_bias=bias, decode=False, attention_fn=layers.attend, rngs=rngs
        ),
        shapes,
    )


class Merged(nnx.Module):
    """A `LinearGeneral` from (2, 3) features to (5, 7) between reshapes, so that it is one from 6 to 35."""

    def __init__(self, rngs: nnx.Rngs):
        self.linear = nnx.LinearGeneral((2, 3), (5, 7), axis=(-2, -1), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear(x.reshape(*x.shape[:-1], 2, 3)).reshape(*x.shape[:-1], 35)


class TorchMerged(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(6, 35)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


CASES = [
    Case("Linear", lambda: torch.nn.Linear(5, 7), lambda rngs: nnx.Linear(5, 7, rngs=rngs), ((2, 3, 5),)),
    Case(
        "Linear without bias",
        lambda: torch.nn.Linear(5, 5, bias=False),
        lambda rngs: nnx.Linear(5, 5, use_bias=False, rngs=rngs),
        ((2, 3, 5),),
    ),
    Case("LinearGeneral", lambda: torch.nn.Linear(5, 5), lambda rngs: nnx.LinearGeneral(5, 5, rngs=rngs), ((2, 5),)),
    Case("LinearGeneral of several axes", TorchMerged, Merged, ((2, 3, 6),)),
    Case(
        "LayerNorm",
        lambda: torch.nn.LayerNorm(7, eps=EPS),
        lambda rngs: nnx.LayerNorm(7, epsilon=EPS, rngs=rngs),
        ((2, 3, 7),),
    ),
    Case(
        "LayerNorm without bias",
        lambda: torch.nn.LayerNorm(7, eps=EPS, bias=False),
        lambda rngs: nnx.LayerNorm(7, epsilon=EPS, use_bias=False, rngs=rngs),
        ((2, 3, 7),),
    ),
    Case(
        "RMSNorm",
        lambda: torch.nn.RMSNorm(7, eps=EPS),
        lambda rngs: nnx.RMSNorm(7, epsilon=EPS, rngs=rngs),
        ((2, 3, 7),),
    ),
    Case("RMSNorm of our own", lambda: torch.nn.RMSNorm(7), lambda rngs: layers.RMSNorm(7, rngs=rngs), ((2, 3, 7),)),
    Case(
        "GroupNorm",
        lambda: torch.nn.GroupNorm(3, 15, eps=EPS),
        lambda rngs: nnx.GroupNorm(15, 3, epsilon=EPS, rngs=rngs),
        ((2, 7, 4, 15),),
        channels_first=True,
    ),
    Case(
        "GroupNorm of our own",
        lambda: torch.nn.GroupNorm(3, 15),
        lambda rngs: layers.GroupNorm(3, 15, rngs=rngs),
        ((2, 7, 4, 15),),
        channels_first=True,
    ),
    Case(
        "InstanceNorm",
        lambda: torch.nn.InstanceNorm2d(5, eps=EPS, affine=True),
        lambda rngs: nnx.InstanceNorm(5, epsilon=EPS, rngs=rngs),
        ((2, 7, 4, 5),),
        channels_first=True,
    ),
    Case(
        "BatchNorm",
        lambda: torch.nn.BatchNorm2d(5, eps=EPS),
        lambda rngs: nnx.BatchNorm(5, epsilon=EPS, rngs=rngs),
        ((2, 7, 4, 5),),
        channels_first=True,
    ),
    Case(
        "BatchNorm of our own",
        lambda: torch.nn.BatchNorm2d(5),
        lambda rngs: layers.BatchNorm(5, rngs=rngs),
        ((2, 7, 4, 5),),
        channels_first=True,
    ),
    *(conv_case(rank, groups) for rank in (1, 2, 3) for groups in (1, 2)),
    Case(
        "Conv of our own",
        lambda: torch.nn.Conv2d(6, 10, (3, 2), stride=2, padding=(2, 1), dilation=(1, 3), groups=2, bias=False),
        lambda rngs: layers.Conv(
            6, 10, (3, 2), stride=2, padding=(2, 1), dilation=(1, 3), groups=2, bias=False, rngs=rngs
        ),
        ((2, 11, 7, 6),),
        channels_first=True,
    ),
    *(conv_transpose_case(rank, transpose) for rank in (1, 2, 3) for transpose in (False, True)),
    Case(
        "ConvTranspose of our own",
        lambda: torch.nn.ConvTranspose2d(5, 7, (3, 4), stride=3, padding=1, output_padding=2, dilation=2),
        lambda rngs: layers.ConvTranspose(5, 7, (3, 4), stride=3, padding=1, output_padding=2, dilation=2, rngs=rngs),
        ((2, 11, 7, 5),),
        channels_first=True,
    ),
    Case(
        "MultiHeadAttention of our own",
        lambda: torch.nn.MultiheadAttention(21, 3, batch_first=True),
        lambda rngs: layers.MultiHeadAttention(21, 3, rngs=rngs),
        ((2, 5, 21), (2, 7, 21), (2, 7, 21)),
    ),
    attention_case("packed", ((2, 5, 21),) * 3),
    attention_case("packed, without bias", ((2, 5, 21),) * 3, bias=False),
    attention_case("keys and values of another width", ((2, 5, 21), (2, 7, 11), (2, 7, 11)), kv=11),
    attention_case("of another width, without bias", ((2, 5, 21), (2, 7, 11), (2, 7, 11)), kv=11, bias=False),
]
EVERY_CASE = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def random_reference(module: torch.nn.Module, dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    """The module in evaluation mode, every tensor random: none as it starts, variances positive."""
    generator = torch.Generator().manual_seed(0)
    module = module.to(dtype).eval()
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point():
            drawn = torch.randn(tensor.shape, generator=generator, dtype=dtype)
            tensor.copy_(drawn.abs() + 0.5 if name.endswith("running_var") else drawn)
        else:
            tensor.fill_(7)
    return module


def arrays_of(module: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: torch_to_numpy(tensor) for name, tensor in module.state_dict().items()}


def abstract(twin: Callable[[nnx.Rngs], Any]) -> Any:
    return nnx.eval_shape(lambda: twin(nnx.Rngs(0)))


@EVERY_CASE
def test_the_ported_layer_is_the_same_function_with_the_same_gradients(case: Case) -> None:
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(shape) for shape in case.inputs]
    module = random_reference(case.reference())
    truth = case.run_reference(module, arrays)
    cotangent = random.standard_normal(truth.shape)
    truth.backward(torch.from_numpy(cotangent))
    with jax.enable_x64(True):
        model = torch_to_flax(arrays_of(module), abstract(case.twin))
        model.eval()
        graph, parameters, rest = nnx.split(model, nnx.Param, ...)

        def run(parameters: nnx.State) -> tuple[jax.Array, jax.Array]:
            output = nnx.merge(graph, parameters, rest)(*map(jnp.array, arrays))
            return jnp.vdot(output, cotangent), output

        gradients, output = jax.grad(run, has_aux=True)(parameters)
        ours = flax_to_torch(nnx.merge(graph, gradients, rest))
    assert output.dtype == np.float64
    assert relative_error(np.asarray(output), truth.detach().numpy()) < OUTPUT_FLOAT64
    for name, parameter in module.named_parameters():
        theirs = torch_to_numpy(parameter.grad)
        if name == "in_proj_bias":  # a key's bias shifts all scores of a query alike: its gradient is rounding alone
            ours[name], theirs = (np.delete(array, slice(21, 42)) for array in (ours[name], theirs))
        assert relative_error(ours[name], theirs) < GRADIENT_FLOAT64, name


@EVERY_CASE
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_way_back_is_exact(case: Case, dtype: str) -> None:
    module = random_reference(case.reference(), getattr(torch, dtype))
    arrays = arrays_of(module)
    back = flax_to_torch(torch_to_flax(arrays, abstract(case.twin)))
    assert back.keys() == {name for name in arrays if not name.endswith("num_batches_tracked")}
    for name, array in back.items():
        assert array.dtype == arrays[name].dtype and array.shape == arrays[name].shape, name
        assert array.flags.c_contiguous and array.tobytes() == arrays[name].tobytes(), name
    # strict, which is the default: no key is missing, for PyTorch does not insist on the number of batches
    case.reference().to(getattr(torch, dtype)).load_state_dict({n: numpy_to_torch(a) for n, a in back.items()})


@EVERY_CASE
def test_wrong_shapes_are_told_as_pytorch_has_them(case: Case) -> None:
    arrays = arrays_of(random_reference(case.reference(), torch.float32))
    right = {name: array.shape for name, array in arrays.items() if not name.endswith("num_batches_tracked")}
    wrong = {name: np.zeros((*shape[:-1], shape[-1] + 1), np.float32) for name, shape in right.items()}
    with pytest.raises(StateDictError) as caught:
        torch_to_flax(wrong, abstract(case.twin))
    assert str(caught.value).splitlines()[2:] == [
        f"    {name}: checkpoint {wrong[name].shape}, model {tuple(right[name])}" for name in sorted(right)
    ]


def test_every_rule_has_a_case() -> None:
    seen = {type(part) for case in CASES for _, part in torch_modules(abstract(case.twin))}
    covered = {base for cls in seen for base in cls.__mro__ if base in RULES}
    assert set(RULES) - covered == {nnx.Embed}  # which takes ids: the next test


def test_an_embedding_looks_up_in_the_precision_it_was_filled_with() -> None:
    module = random_reference(torch.nn.Embedding(11, 5))
    ids = np.array([[7, 2, 3], [0, 10, 2]])
    with jax.enable_x64(True):
        flax_ids = jnp.array(ids)
        model = torch_to_flax(arrays_of(module), nnx.Embed(11, 5, rngs=nnx.Rngs(0)))
        np.testing.assert_array_equal(model(flax_ids), module(torch.from_numpy(ids)).detach().numpy(), strict=True)
        chosen = torch_to_flax(arrays_of(module), nnx.Embed(11, 5, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
        assert chosen(flax_ids).dtype == jnp.bfloat16


@pytest.mark.parametrize("settings", [{"num_kv_heads": 1}, {"normalize_qk": True}])
def test_an_attention_that_pytorch_has_not_does_not_take_its_weights(settings: dict[str, Any]) -> None:
    model = nnx.MultiHeadAttention(3, 21, decode=False, **settings, rngs=nnx.Rngs(0))
    with pytest.raises(StateDictError, match="missing from the checkpoint"):
        torch_to_flax(arrays_of(torch.nn.MultiheadAttention(21, 3)), model)


def test_a_linear_layer_with_a_matrix_for_every_row_keeps_its_own_names() -> None:
    model = nnx.LinearGeneral(5, 7, batch_axis={0: 2}, rngs=nnx.Rngs(0))
    assert {key: slot.torch_shape for key, slot in slots(model).items()} == {"kernel": (2, 5, 7), "bias": (2, 7)}


class Scaled(nnx.Module):
    """A layer that the table does not know."""

    def __init__(self, rngs: nnx.Rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (3, 5)))
        self.offset = nnx.Param(jnp.zeros(5))


class Wider(Scaled):
    """One that derives from it."""


def test_a_rule_is_added_in_a_line_and_serves_derived_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Wider(nnx.Rngs(0))
    assert set(flax_to_torch(model)) == {"kernel", "offset"} and rule_of(model) == ()
    monkeypatch.setitem(RULES, Scaled, (Tensor("weight", "kernel", (1, 0)), Tensor("bias", "offset")))
    back = flax_to_torch(model)
    np.testing.assert_array_equal(back["weight"], np.asarray(model.kernel[...]).T)
    assert set(back) == {"weight", "bias"}
