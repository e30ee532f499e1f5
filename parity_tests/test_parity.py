"""Every system against its PyTorch reference, and what a comparison reports. Planted faults are in `sabotage`."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from models import BACKBONE, BLOCK, LANGUAGE_MODEL, ids, reference, state_arrays, twin

import flax_tf.attention
import flax_tf.block
from flax_tf.config import BackboneConfig, LanguageModelConfig
from flax_tf.errors import InputError
from flax_tf.layers import Linear
from flax_tf.parity import compare, tolerances
from flax_tf.parity.casting import cast_module
from flax_tf.parity.check import check
from flax_tf.parity.events import call_of, kind_of
from flax_tf.parity.flax_side import recorded_calls
from flax_tf.parity.report import Low, Row
from flax_tf.parity.tolerances import GRADIENT_FLOOR, OUTPUT_FLOOR, eps, relative_error
from flax_tf.porting import torch_to_flax

PADDED = ids(3, 13)
PADDED[1] = 0  # a row that is nothing but one id
PADDED[2, 5:] = 0

HEAD = "transformer.transformer_layers.0.mha.attention_heads.0"


@pytest.mark.parametrize(
    ("config", "inputs"),
    [
        (LANGUAGE_MODEL, ids(2, 7)),
        (LANGUAGE_MODEL, PADDED),
        (LANGUAGE_MODEL, ids(5, 1)),
        (LanguageModelConfig(**{**LANGUAGE_MODEL.__dict__, "mask": False}), PADDED),
        (BACKBONE, ids(2, 7)),
        (BackboneConfig(**{**BACKBONE.__dict__, "mask": True, "dropout": 0.3, "layer_norm_eps": 1e-3}), ids(2, 7)),
        (BLOCK, np.random.default_rng(0).standard_normal((2, 7, 15))),
        (BLOCK, np.random.default_rng(0).standard_normal((3, 1, 15))),
        (BLOCK, np.random.default_rng(0).standard_normal((1, 257, 15))),
    ],
    ids=[
        "causal",
        "padded",
        "single",
        "not-causal",
        "backbone",
        "backbone-causal",
        "block",
        "block-single",
        "block-long",
    ],
)
def test_the_twin_is_the_same_model(config, inputs: np.ndarray) -> None:
    report = compare(module := reference(config), twin(module), inputs)
    assert report.ok, report.summary()
    called = {path for path, m in module.named_modules() if not isinstance(m, torch.nn.ModuleList)}
    assert {row.name for row in report.rows if row.kind == "output"} == {path or "(model)" for path in called}
    assert {row.name for row in report.rows if row.kind == "gradient"} - {"input 1"} == dict(
        module.named_parameters()
    ).keys()


def test_a_long_sequence_of_the_language_model() -> None:
    config = LanguageModelConfig(vocab_size=37, max_seq_length=521, d_model=14, num_heads=2, num_layers=1)
    report = compare(module := reference(config), twin(module), ids(2, 521))
    assert report.ok, report.summary()


def test_a_fault_between_layers_is_laid_on_the_module_that_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = twin(module := reference(LANGUAGE_MODEL))
    monkeypatch.setattr(flax_tf.attention, "sqrt", lambda width: (width + 1) ** 0.5)
    report = compare(module, model, ids(2, 7))
    # The dropout after the softmax is the first whose output differs, but on the same input it is right.
    assert next(row.name for row in report.rows if not row.ok) == f"{HEAD}.dropout"
    assert report.culprit == HEAD


def test_a_wrong_gradient_with_right_outputs_is_caught() -> None:
    class Stopped(nnx.Module):
        def __init__(self, inner):
            self.inner = inner

        def __call__(self, x):
            return jax.lax.stop_gradient(self.inner(x))

    class Named(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x)

    module = reference(BLOCK)
    report = compare(Named(module), Stopped(twin(module)), np.random.default_rng(0).standard_normal((2, 7, 15)))
    assert all(row.ok for row in report.rows if row.kind == "output")
    assert not any(row.ok for row in report.rows if row.kind == "gradient")
    assert not report


def test_what_only_one_side_has_is_reported() -> None:
    module = reference(BLOCK)
    module.embedding_mlp.append(torch.nn.Linear(15, 15))
    model = twin(reference(BLOCK))
    model.scale = nnx.Param(jnp.ones(3))
    report = compare(module, model, np.random.default_rng(0).standard_normal((2, 7, 15)))
    assert report.unpaired == (
        "parameter embedding_mlp.3.weight is in PyTorch alone",
        "parameter embedding_mlp.3.bias is in PyTorch alone",
        "parameter scale is in Flax alone",
    )
    assert report.notes == ("output of embedding_mlp.3 (Linear) is in PyTorch alone",)
    assert not report


def test_a_call_without_parameters_that_one_side_alone_makes_is_noted() -> None:
    module = reference(BLOCK)
    module.embedding_mlp.append(torch.nn.Identity())
    report = compare(module, twin(reference(BLOCK)), np.random.default_rng(0).standard_normal((2, 7, 15)))
    assert report.notes == ("output of embedding_mlp.3 (Identity) is in PyTorch alone",)
    assert report.ok, report.summary()


def told(model: nnx.Module, *inputs: np.ndarray) -> list[tuple[str, str, np.ndarray]]:
    """(kind, path, array) of all that a run with gradients tells."""
    events = []
    graph, parameters = nnx.split(model)

    def scalar(parameters, inputs):
        model = nnx.merge(graph, parameters)
        with recorded_calls(model, lambda name, array: events.append((kind_of(name), call_of(name), array))):
            return sum(leaf.sum() for leaf in jax.tree.leaves(model(*inputs)))

    jax.jit(jax.grad(scalar, argnums=(0, 1)))(parameters, inputs)
    jax.effects_barrier()
    return events


def test_calls_of_a_class_that_inherits_its_call_are_recorded_once() -> None:
    class Inner(nnx.Linear):
        pass

    class Outer(nnx.Module):
        def __init__(self):
            self.plain = nnx.Linear(3, 5, rngs=nnx.Rngs(0))
            self.heir = Inner(5, 2, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.heir(self.plain(x))

    events = told(model := Outer(), np.ones((7, 3), np.float32))
    model(jnp.ones((7, 3)))  # after the block nothing is recorded
    seen = [(kind, call[0].path, array.shape) for kind, call, array in events]
    assert seen == [
        ("input", "", (7, 3)),
        ("input", "plain", (7, 3)),
        ("output", "plain", (7, 5)),
        ("input", "heir", (7, 5)),
        ("output", "heir", (7, 2)),
        ("output", "", (7, 2)),
        ("output gradient", "", (7, 2)),
        ("output gradient", "heir", (7, 2)),
        ("input gradient", "heir", (7, 5)),
        ("output gradient", "plain", (7, 5)),
        ("input gradient", "plain", (7, 3)),
        ("input gradient", "", (7, 3)),
    ]


class Doubling(nnx.Module):
    def __call__(self, x):
        return 2 * x


class Scanned(nnx.Module):
    def __init__(self, reverse: bool):
        self.reverse = reverse
        self.inner = Doubling()
        self.outer = Doubling()

    def __call__(self, x):
        def step(carry, x):
            carry, _ = jax.lax.scan(lambda carry, x: (self.inner(carry) + x, None), carry, x)
            return self.outer(self.outer(carry)), None

        return jax.lax.scan(step, jnp.ones(3), x, reverse=self.reverse)[0]


@pytest.mark.parametrize("reverse", [False, True])
def test_calls_within_a_scan_are_numbered_step_by_step_in_both_directions(reverse: bool) -> None:
    x = np.random.default_rng(0).standard_normal((5, 2, 3)).astype(np.float32)
    expected, gradients, carry = [], [], np.ones(3)
    number = {"inner": 0, "outer": 0}

    def call(path: str, value: np.ndarray) -> np.ndarray:
        expected.append((path, number[path], 2 * value))
        number[path] += 1
        return 2 * value

    for row in x[::-1] if reverse else x:
        for column in row:
            carry = call("inner", carry) + column
        carry = call("outer", call("outer", carry))
    slope = 1.0  # all that follows a call doubles
    for path, count, _ in reversed(expected):
        gradients.append((path, count, np.full(3, slope)))
        slope *= 2
    events = told(Scanned(reverse), x)
    for kind, wanted in (("output", expected), ("output gradient", gradients)):
        seen = [(call[0].path, call[0].number, array) for k, call, array in events if k == kind and call[0].path]
        assert [entry[:2] for entry in seen] == [entry[:2] for entry in wanted]
        for (_, _, array), (_, _, value) in zip(seen, wanted, strict=True):
            # A score of sums in float32, each within half a rounding of 1.2e-7.
            np.testing.assert_allclose(array, value, rtol=1e-5)


def test_models_are_left_as_they_were() -> None:
    module = reference(LANGUAGE_MODEL).train()
    model = twin(module)
    model.train()
    torch.set_float32_matmul_precision("medium")
    try:
        compare(module, model, ids(2, 3))
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert module.training and all(p.dtype == torch.float32 and p.grad is None for p in module.parameters())
    assert not model.transformer.embeddings.dropout.deterministic
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))} == {jnp.dtype("float32")}
    assert jnp.zeros(1).dtype == jnp.float32


def test_check_uses_the_full_trained_length_and_merges_the_worse() -> None:
    tensors = {name: tensor.numpy() for name, tensor in reference(LANGUAGE_MODEL).state_dict().items()}
    other = {name: array.copy() for name, array in tensors.items()}
    # Only the last position of a full-length sequence can see this.
    other["transformer.embeddings.pos_embd.weight"][12, 3] += 1e-3
    assert check(tensors, tensors, LANGUAGE_MODEL).ok
    assert check(tensors, other, LANGUAGE_MODEL).culprit == "transformer.embeddings.pos_embd"


def test_check_refuses_parameters_that_nothing_computes_with() -> None:
    tensors = state_arrays(reference(LANGUAGE_MODEL))
    tensors["classifier.bias"] = tensors["classifier.bias"].astype(np.int32)
    with pytest.raises(InputError, match=r"classifier\.bias is int32"):
        check(tensors, tensors, LANGUAGE_MODEL)


@pytest.mark.parametrize("value", [100.0, float("nan")])
def test_check_compares_rows_of_the_vocabulary_that_no_input_holds(value: float) -> None:
    config = LanguageModelConfig(vocab_size=997, max_seq_length=5, d_model=14, num_heads=2, num_layers=1)
    tensors = state_arrays(reference(config))
    other = {name: array.copy() for name, array in tensors.items()}
    other["transformer.embeddings.token_embd.weight"][991, 3] += value  # seed 0 draws 46 other ids
    sides = (tensors, other) if value == value else (other, other)
    report = check(*sides, config)
    assert all(row.ok for row in report.rows if row.kind == "output")
    assert not report
    assert report.culprit == "transformer.embeddings.token_embd"


def test_relative_error_lets_no_nan_infinity_or_shape_pass() -> None:
    one = np.ones((2, 3))
    assert relative_error(one, one) == 0.0
    assert relative_error(one * (1 + 1e-3), one) == pytest.approx(1e-3)  # by definition, to pytest's 1e-6
    for bad in (np.nan, np.inf):
        wrong = one.copy()
        wrong[1, 2] = bad
        assert relative_error(wrong, one) == relative_error(one, wrong) == relative_error(wrong, wrong) == np.inf
    assert relative_error(one, one[:1]) == np.inf
    assert relative_error(one, np.zeros((2, 3))) == np.inf


def test_long_sums_in_float32_are_as_accurate_as_pytorchs() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(4099, 7)
    model = nnx.eval_shape(lambda: nnx.Linear(4099, 7, rngs=nnx.Rngs(0)))
    torch_to_flax(state_arrays(linear), model)
    x = np.random.default_rng(0).standard_normal((31, 4099))
    report = compare(linear, model, x)
    assert report.ok, report.summary()
    # XLA's default on a CPU is not.
    ours = np.asarray(jax.jit(model)(jnp.array(x, jnp.float32)))
    truth = linear.double()(torch.from_numpy(x)).detach().numpy()
    (output,) = (row for row in report.rows if row.kind == "output")
    assert output.ok
    assert relative_error(ours, truth) >= output.low["float32"].flax


def test_low_precision_is_measured_by_pytorchs_own_error() -> None:
    for kind, units in (("output", OUTPUT_FLOOR), ("gradient", GRADIENT_FLOOR)):
        for precision in ("float32", "bfloat16"):
            floor, inf = units * eps(precision), float("inf")
            for error, torch_error, ok in (
                (20 * floor, 10 * floor, True),
                (21 * floor, 10 * floor, False),
                (floor, 0.0, True),
                (1.1 * floor, 0.0, False),
                (inf, inf, False),
            ):
                assert Row(kind, "x", "x", "", 0.0, {precision: Low(error, torch_error)}).ok == ok


def test_a_nudge_moves_every_parameter_by_one_rounding_and_no_buffer() -> None:
    model = twin(reference(LANGUAGE_MODEL))
    plain, nudged = (nnx.to_flat_state(nnx.state(cast_module(model, "float32", nudge))) for nudge in (None, 3))
    for (path, before), (_, after) in zip(plain, nudged, strict=True):
        is_parameter = isinstance(before, nnx.Param)
        before, after = np.asarray(before[...], np.float64), np.asarray(after[...], np.float64)
        if is_parameter:
            # The product with 1 ± eps is itself rounded, by up to half an eps.
            moved, rounding = np.abs(after - before), np.abs(before) * float(eps("float32"))
            assert (moved >= 0.5 * rounding).all(), path
            assert (moved <= 1.5 * rounding).all(), path
        else:
            np.testing.assert_array_equal(after, before)


@pytest.mark.parametrize("unlucky", [range(1), range(2)])
def test_bad_luck_in_one_run_of_flax_is_no_difference_and_a_fault_of_every_run_is(monkeypatch, unlucky: range) -> None:
    """A run that is a hundred roundings off, and then, with weights moved by a rounding, none or as much again."""
    monkeypatch.setattr(tolerances, "OWN_NUDGES", 1)
    module = torch.nn.Linear(13, 7)
    model = torch_to_flax(state_arrays(module), Linear(13, 7, rngs=nnx.Rngs(0)))
    runs = iter(range(3))  # float64, float32, float32 nudged
    original = sys.modules["flax_tf.parity.compare"].run_flax

    def run(module: Any, args, kwargs, precision: str, *others, **options):
        number = next(runs)
        if number - 1 in unlucky:
            module = nnx.clone(module)
            module.kernel[...] = module.kernel[...] * (1 + 100 * float(eps("float32")))
        return original(module, args, kwargs, precision, *others, **options)

    monkeypatch.setattr(sys.modules["flax_tf.parity.compare"], "run_flax", run)
    report = compare(module, model, np.random.default_rng(0).standard_normal((5, 13)))
    assert report.ok == (len(unlucky) == 1), report.summary()
    assert next(runs, None) is None
