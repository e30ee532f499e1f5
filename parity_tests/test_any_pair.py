"""Models as users bring them: compared with no change to the library, whatever they take, return and are made of."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from models import state_arrays
from own_models import HIDDEN, IMAGES, RENAME, ImageNet, Rotary, TorchImageNet, TorchRotary

from flax_tf.layers import BatchNorm
from flax_tf.parity import Report, compare
from flax_tf.porting import flax_to_torch, torch_to_flax
from flax_tf.porting.rules import RULES, Tensor

RNG = np.random.default_rng(0)
X = RNG.standard_normal((3, 5))
ALL_PRECISIONS = ("float32", "bfloat16")


def ported(module: torch.nn.Module, model: nnx.Module, rename: Any = None) -> Any:
    return torch_to_flax(state_arrays(module), model, rename)


def image_nets() -> tuple[TorchImageNet, ImageNet]:
    torch.manual_seed(0)
    module = TorchImageNet()
    return module, ported(module, ImageNet(nnx.Rngs(1)), RENAME)


class Torch(torch.nn.Module):
    """A module of these children and parameters, whose forward is a function of it and the inputs."""

    def __init__(self, forward: Any, **parts: Any):
        super().__init__()
        torch.manual_seed(0)
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Flax(nnx.Module):
    """Its twin."""

    def __init__(self, call: Any, **parts: Any):
        for name, part in parts.items():
            setattr(self, name, part)
        self.function = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def linears(seed: int = 0, **options: Any) -> tuple[torch.nn.Linear, nnx.Linear]:
    torch.manual_seed(seed)
    return torch.nn.Linear(5, 7), nnx.Linear(5, 7, rngs=nnx.Rngs(0), **options)


def pair(forward: Any, call: Any = None, **options: Any) -> tuple[Torch, Flax]:
    """Both with a linear layer of the same weights, and one function or two."""
    theirs, ours = linears(**options)
    module, model = Torch(forward, linear=theirs), Flax(call or forward, linear=ours)
    return module, ported(module, model)


def kinds(report: Report, kind: str) -> set[str]:
    return {row.name for row in report.rows if row.kind == kind}


# NNX's batch norm has float32 statistics in training mode, which JAX warns of in bfloat16.
@pytest.mark.parametrize("options", [{"precisions": ALL_PRECISIONS}, {"train": True}], ids=["eval", "train"])
def test_convolutions_batch_norm_and_attention(options: dict[str, Any]) -> None:
    module, model = image_nets()
    report = compare(module, model, IMAGES, mask=HIDDEN, rename=RENAME, **options)
    assert report.ok, report.summary()
    assert kinds(report, "gradient") == {*dict(module.named_parameters()), "input 1"}
    assert module.state_dict().keys() - kinds(report, "tensor") == {"stem.1.num_batches_tracked"}


def test_rotary_attention() -> None:
    torch.manual_seed(0)
    module = TorchRotary()
    model = ported(module, Rotary(rngs=nnx.Rngs(0)))
    with jax.numpy_rank_promotion("allow"):  # a user's own choice
        report = compare(module, model, RNG.standard_normal((2, 7, 12)), train=True, precisions=ALL_PRECISIONS)
    assert report.ok, report.summary()


# What they take and return


def test_images_with_the_channels_last() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Conv2d(3, 5, 3), torch.nn.BatchNorm2d(5), torch.nn.ReLU(inplace=True))
    rngs = nnx.Rngs(0)
    parts = (nnx.Conv(3, 5, (3, 3), padding="VALID", rngs=rngs), nnx.BatchNorm(5, rngs=rngs), nnx.relu)
    model = ported(module, nnx.Sequential(*parts))
    images = RNG.standard_normal((2, 3, 7, 11))
    report = compare(module, model, images, channels_last=True)
    assert report.ok, report.summary()
    assert kinds(report, "gradient") >= {"0.weight", "input 1"}


@dataclasses.dataclass
class Output:
    values: Any
    lengths: Any


class Named(dict):
    """An output as of Hugging Face's models: a dict with attributes."""


FORMS = {
    "tuple": lambda y: (y, 2 * y),
    "list": lambda y: [y, (2 * y, 3 * y)],
    "dict": lambda y: {"logits": y, "hidden": {"last": 2 * y}},
    "own dict": lambda y: Named(logits=y, hidden=2 * y),
    "dataclass": lambda y: Output(y, 2 * y),
    "with others": lambda y: (y, None, "name", 3),
}


@pytest.mark.parametrize("form", FORMS)
def test_outputs_in_any_form(form: str) -> None:
    module, model = pair(lambda self, x: FORMS[form](self.linear(x)))
    report = compare(module, model, X)
    assert report.ok, report.summary()
    # A fault in the last part alone is seen.
    wrong = Flax(lambda self, x: FORMS[form](self.linear(x)), linear=model.linear)
    wrong.linear.bias[...] += 1e-3
    assert compare(module, wrong, X).culprit == "linear"


def test_an_output_that_is_wrong_in_one_part() -> None:
    module, model = pair(lambda self, x: FORMS["dict"](self.linear(x)))
    model.function = lambda self, x: {"logits": (y := self.linear(x)), "hidden": {"last": 2.001 * y}}
    assert compare(module, model, X).culprit == "(model)"


def add_all(self, pair: Any, *, more: Any, times: int = 1, flag: bool = False) -> Any:
    assert flag is True
    return (self.linear(pair[0]) + pair[1]["bias"]) * times + self.linear(more["x"][0])


@pytest.mark.parametrize("of", [torch.tensor, jnp.asarray, np.asarray], ids=["torch", "jax", "numpy"])
def test_inputs_of_any_framework_in_any_container(of: Any) -> None:
    module, model = pair(add_all)
    x, bias = of(X.astype(np.float32)), of(RNG.standard_normal((3, 7)).astype(np.float32))
    report = compare(module, model, (x, {"bias": bias}), more={"x": [2 * x, None]}, times=3, flag=True)
    assert report.ok, report.summary()
    assert kinds(report, "gradient") == {"linear.weight", "linear.bias", "input 1", "input 2", "input 3"}


def test_integers_and_truth_values_are_taken_as_they_are() -> None:
    torch.manual_seed(0)
    table = torch.nn.Embedding(11, 5)

    def call(self, ids, mask):
        return self.table(ids) * mask[..., None]

    module, model = Torch(call, table=table), Flax(call, table=nnx.Embed(11, 5, rngs=nnx.Rngs(0)))
    ids = RNG.integers(11, size=(2, 7))
    report = compare(module, ported(module, model), ids, mask=ids > 3, precisions=ALL_PRECISIONS)
    assert report.ok, report.summary()
    assert report.notes == ()
    assert kinds(report, "gradient") == {"table.weight"}


# What one side alone has


def test_what_has_no_partner_is_reported() -> None:
    def forward(self, x):
        return {"y": self.linear(x), "theirs": self.more(x)}

    def call(self, x):
        return {"y": self.linear(x), "ours": self.other(x)}

    theirs, ours = linears()
    module = Torch(forward, linear=theirs, more=torch.nn.Linear(5, 2))
    module.register_buffer("offset", torch.ones(2))
    model = Flax(call, linear=ours, other=nnx.Linear(5, 3, rngs=nnx.Rngs(0)), statistic=nnx.BatchStat(jnp.ones(3)))
    torch_to_flax(state_arrays(theirs), model.linear)
    report = compare(module, model, X)
    assert not report.ok
    assert set(report.unpaired) == {
        "buffer offset is in PyTorch alone",
        "parameter more.weight is in PyTorch alone",
        "parameter more.bias is in PyTorch alone",
        "parameter other.weight (other.kernel) is in Flax alone",
        "parameter other.bias is in Flax alone",
        "buffer statistic is in Flax alone",
        "result theirs is in PyTorch alone",
        "result ours is in Flax alone",
    }
    assert set(report.notes) == {
        "output of more (Linear) is in PyTorch alone",
        "output of other (Linear) is in Flax alone",
    }
    assert all(row.ok for row in report.rows if row.module == "linear")
    # On purpose: no reason to fail.
    leave_out = compare(module, model, X, rename={"more": None, "offset": None})
    assert "more" not in " ".join(leave_out.unpaired) and "offset" not in " ".join(leave_out.unpaired)


def test_frozen_parameters() -> None:
    module, model = pair(lambda self, x: self.linear(x))
    module.linear.weight.requires_grad = False
    report = compare(module, model, X)
    assert report.ok, report.summary()
    assert kinds(report, "gradient") == {"linear.bias", "input 1"}
    # A variable that Flax does not train stands for a frozen parameter, and not for a trained one.
    frozen = pair(lambda self, x: self.linear(x))[1]
    frozen.linear.kernel = nnx.BatchStat(frozen.linear.kernel[...])
    assert compare(module, frozen, X).ok
    module.linear.weight.requires_grad = True
    assert compare(module, frozen, X).unpaired == ("parameter linear.weight is trained in PyTorch alone",)


def test_a_module_without_parameters() -> None:
    class TorchTanh(torch.nn.Module):
        def forward(self, x):
            return torch.tanh(x)

    class Tanh(nnx.Module):
        def __call__(self, x):
            return jnp.tanh(x)

    report = compare(TorchTanh(), Tanh(), X, precisions=ALL_PRECISIONS)
    assert report.ok, report.summary()
    assert kinds(report, "gradient") == {"input 1"}


def test_shared_modules_and_tied_parameters() -> None:
    torch.manual_seed(0)
    square, again = torch.nn.Linear(5, 5), nnx.Linear(5, 5, rngs=nnx.Rngs(0))

    def call(self, x):
        return self.second(self.first(x)) + self.first(x)

    module, model = Torch(call, first=square, second=square), Flax(call, first=again, second=again)
    report = compare(module, ported(module, model), X, precisions=ALL_PRECISIONS)
    assert report.ok, report.summary()
    assert kinds(report, "gradient") >= {"first.weight", "second.weight"}
    # The tie undone: the same outputs, and the gradient of one use alone.
    untied = ported(module, Flax(call, **{n: nnx.Linear(5, 5, rngs=nnx.Rngs(0)) for n in ("first", "second")}))
    report = compare(module, untied, X)
    assert next(row.ok for row in report.rows if row.name == "(model)")
    assert not any(row.ok for row in report.rows if row.name in ("first.weight", "second.weight") and row.low)


# What they are made of


def test_a_relu_in_place() -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.ReLU(inplace=True), torch.nn.Linear(5, 7), torch.nn.ReLU(inplace=True))

    class ReLU(nnx.Module):
        def __call__(self, x):
            return nnx.relu(x)

    model = ported(module, nnx.Sequential(ReLU(), nnx.Linear(5, 7, rngs=nnx.Rngs(0)), ReLU()))
    before = X.copy()
    report = compare(module, model, X)
    assert report.ok, report.summary()
    assert {"0", "1", "2", "(model)"} == kinds(report, "output")
    np.testing.assert_array_equal(X, before)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_layer_that_was_given_a_dtype_computes_in_each_precision(dtype: Any) -> None:
    module, model = pair(lambda self, x: self.linear(x), dtype=dtype)
    report = compare(module, model, X, precisions=ALL_PRECISIONS)
    assert report.ok, report.summary()
    assert report.notes == ()
    assert model.linear.dtype == dtype


def test_code_that_fixes_a_dtype_is_noted() -> None:
    module, model = pair(lambda self, x: self.linear(x), lambda self, x: self.linear(x.astype(jnp.float32)))
    report = compare(module, model, X)
    assert not report.ok
    module, model = pair(lambda self, x: self.linear(x), lambda self, x: self.linear(x).astype(jnp.float32))
    (line,) = compare(module, model, X).notes
    assert line == "output of (model) is float32 in the float64 run: the code of the Flax module fixes its dtype"


def test_a_users_own_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    class TorchScaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.matrix = torch.nn.Parameter(torch.arange(35.0).reshape(7, 5) / 35)
            self.gain = torch.nn.Parameter(torch.ones(7) / 3)

        def forward(self, x):
            return x @ self.matrix.T * self.gain

    class Scaled(nnx.Module):
        def __init__(self):
            self.kernel, self.scale = nnx.Param(jnp.zeros((5, 7))), nnx.Param(jnp.zeros(7))

        def __call__(self, x):
            return x @ self.kernel[...] * self.scale[...][None]

    monkeypatch.setitem(RULES, Scaled, (Tensor("matrix", "kernel", (1, 0)), Tensor("gain", "scale")))
    module = TorchScaled()
    model = ported(module, Scaled())
    report = compare(module, model, X)
    assert report.ok, report.summary()
    assert kinds(report, "gradient") == {"matrix", "gain", "input 1"}
    assert all(np.array_equal(flax_to_torch(model)[name], array) for name, array in state_arrays(module).items())


def test_a_difference_in_the_gradient_alone_is_located() -> None:
    @jax.custom_vjp
    def identity(x):
        return x

    identity.defvjp(lambda x: (x, None), lambda _, gradient: (1.001 * gradient,))

    class TorchSame(torch.nn.Module):
        def forward(self, x):
            return x.clone()

    class Same(nnx.Module):
        def __call__(self, x):
            return identity(x)

    def call(self, x):
        return self.last(self.same(self.linear(x)))

    torch.manual_seed(0)
    module = Torch(call, linear=torch.nn.Linear(5, 7), same=TorchSame(), last=torch.nn.Linear(7, 3))
    rngs = nnx.Rngs(0)
    model = Flax(call, linear=nnx.Linear(5, 7, rngs=rngs), same=Same(), last=nnx.Linear(7, 3, rngs=rngs))
    report = compare(module, ported(module, model), X)
    assert {row.name for row in report.rows if not row.ok} == {"linear.weight", "linear.bias", "input 1"}
    assert report.culprit == "same"


class Stateful(nnx.Module):
    """With a stream of random numbers inside, running statistics, and a counter."""

    def __init__(self):
        self.rngs = nnx.Rngs(0)
        self.bn = BatchNorm(5, rngs=self.rngs)
        self.drop = nnx.Dropout(0.3, rngs=self.rngs)
        self.linear = nnx.Linear(5, 7, rngs=self.rngs)

    def __call__(self, x):
        return self.linear(self.drop(self.bn(x)))


@pytest.mark.parametrize("train", [False, True])
def test_a_module_with_state_of_its_own(train: bool) -> None:
    torch.manual_seed(0)
    parts = {"bn": torch.nn.BatchNorm1d(5), "drop": torch.nn.Dropout(0.3), "linear": torch.nn.Linear(5, 7)}
    module = Torch(lambda self, x: self.linear(self.drop(self.bn(x))), **parts)
    model = ported(module, Stateful())
    model.train()
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey))))
    torch_before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    report = compare(module, model, X, train=train)
    assert report.ok, report.summary()
    # The statistics and the random numbers of both are where they were.
    jax.tree.map(np.testing.assert_array_equal, before, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey))))
    assert all(torch.equal(tensor, torch_before[name]) for name, tensor in module.state_dict().items())


def test_everything_of_the_caller_stays_as_it_was() -> None:
    module, model = image_nets()
    module.stem.eval()  # flags that differ within a model
    module.head.bfloat16().requires_grad_(False)
    model.drop.deterministic = True
    flags = {name: part.training for name, part in module.named_modules()}
    weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    inputs = IMAGES.copy()
    torch.manual_seed(5)
    torch_numbers, numpy_numbers = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
    count = int(model.attn.rngs.count[...]) if model.attn.rngs else 0
    torch.set_float32_matmul_precision("medium")
    try:
        with jax.default_matmul_precision("bfloat16"):
            compare(module, model, IMAGES, rename=RENAME, train=True)
            assert jax.config.jax_default_matmul_precision == "bfloat16"
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert {name: part.training for name, part in module.named_modules()} == flags
    for name, tensor in module.state_dict().items():
        assert tensor.dtype == weights[name].dtype and torch.equal(tensor, weights[name])
    assert not any(parameter.requires_grad for parameter in module.head.parameters())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert not module._forward_hooks and not module._forward_pre_hooks
    assert model.drop.deterministic and not model.attn.deterministic
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype("float32")}
    assert (int(model.attn.rngs.count[...]) if model.attn.rngs else 0) == count
    assert jax.config.read("jax_enable_x64") is False and jnp.zeros(1).dtype == jnp.float32
    assert torch.equal(torch.get_rng_state(), torch_numbers)
    np.testing.assert_array_equal(np.random.get_state()[1], numpy_numbers[1])  # noqa: NPY002
    np.testing.assert_array_equal(IMAGES, inputs)
