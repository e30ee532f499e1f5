"""The forms that are written for speed, against the plain ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from models import LANGUAGE_MODEL, ids, reference, twin

from flax_tf.errors import InputError
from flax_tf.kernels import attention as kernel
from flax_tf.kernels.gelu import gelu
from flax_tf.kernels.linear import dot_general
from flax_tf.layers import Linear
from flax_tf.masks import target_mask
from flax_tf.parity.tolerances import relative_error

# Of two float64 evaluations of one formula; see parity/tolerances.py.
SAME = 1e-13


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def arrays(*shapes: tuple[int, ...]) -> list[jax.Array]:
    generator = np.random.default_rng(0)
    return [jnp.asarray(generator.standard_normal(shape)) for shape in shapes]


def assert_same(function, plain, *arguments) -> None:
    """The same values, and the same gradients for a random cotangent."""
    output, pull = jax.vjp(jax.jit(function), *arguments)
    truth, pull_truth = jax.vjp(plain, *arguments)
    assert relative_error(np.asarray(output), np.asarray(truth)) <= SAME
    (cotangent,) = arrays(output.shape)
    for ours, theirs in zip(pull(cotangent), pull_truth(cotangent), strict=True):
        assert relative_error(np.asarray(ours), np.asarray(theirs)) <= SAME


def masks(B: int, T: int, S: int) -> dict[str, jax.Array | None]:
    padded = jnp.asarray(ids(B, S) != 0).at[0, 2:].set(False)
    shared = jnp.asarray(np.random.default_rng(1).random((1, 1, T, S)) < 0.7).at[..., 0].set(True)
    found = {"none": None, "shared": shared, "padding": padded[:, None, None]}
    if T == S:  # with rows that are masked as a whole
        found["target"] = target_mask(jnp.where(padded, 1, 0), 0)
    return found


@pytest.mark.parametrize(
    ("name", "B", "T", "S", "at_once"),
    [
        ("none", 7, 11, 11, 3), ("none", 1, 5, 3, 1), ("shared", 5, 3, 13, 2), ("padding", 5, 3, 13, 1),
        ("padding", 7, 11, 11, 3), ("target", 7, 11, 11, 2), ("target", 5, 7, 7, 100),
    ],
)  # fmt: skip
def test_attention_a_few_sequences_at_a_time_is_attention(monkeypatch, name, B, T, S, at_once) -> None:
    mask = masks(B, T, S)[name]
    q, k, v = arrays((B, 3, T, 5), (B, 3, S, 5), (B, 3, S, 5))
    monkeypatch.setattr(kernel, "SCORES_AT_ONCE", at_once * 3 * T * S * 8)
    monkeypatch.setattr(kernel, "form", lambda *_, **__: "chunked")
    assert_same(lambda *x: kernel.attention(*x, mask), lambda *x: kernel.plain(*x, mask), q, k, v)


def test_chunks_begin_where_the_scores_leave_the_cache_and_hold_less() -> None:
    def scores(B: int) -> tuple[str, int]:
        q = jax.ShapeDtypeStruct((B, 8, 128, 16), jnp.float32)

        def loss(*x):
            return kernel.attention(*x, causal=True).sum()

        program = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, q, q).compile()
        return kernel.form(q, q, masked=True), program.memory_analysis().temp_size_in_bytes

    assert scores(7)[0] == "plain"
    form, held = scores(64)
    assert form == "chunked"
    assert held < 64 * 8 * 128 * 128 * 4  # the scores of all sequences, once


@pytest.mark.parametrize(
    ("B", "T"),
    [(2, 7), (2, 67), (41, 67)],
    ids=["all at once", "in halves", "chunks in halves"],
)
def test_causal_is_a_mask(B: int, T: int, monkeypatch) -> None:
    monkeypatch.setattr(kernel, "SCORES_AT_ONCE", 2**20)
    q, k, v = arrays(*[(B, 3, T, 5)] * 3)
    assert kernel.form(q, k, masked=False) == ("chunked" if B == 41 else "plain")
    causal = jnp.tril(jnp.ones((T, T), bool))[None, None]
    mask = jnp.asarray(np.random.default_rng(2).random((B, 1, T, T)) < 0.8)
    assert_same(lambda *x: kernel.attention(*x, causal=True), lambda *x: kernel.plain(*x, causal), q, k, v)
    assert_same(lambda *x: kernel.attention(*x, mask, causal=True), lambda *x: kernel.plain(*x, mask & causal), q, k, v)


@pytest.mark.parametrize("axes", [2, 3])
def test_a_mask_says_which_axes_it_has(axes: int) -> None:
    q, k, v = arrays(*[(5, 5, 5, 5)] * 3)
    with pytest.raises(InputError, match=f"the mask has {axes} axes"):
        kernel.attention(q, k, v, jnp.ones((5,) * axes, bool))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [64, 128])
def test_the_tpu_kernel_is_attention(causal: bool, width: int) -> None:
    """Interpreted, for want of a TPU. It computes in float32: 30 roundings of values of about 1."""
    q, k, v = (array.astype(jnp.float32) for array in arrays(*[(2, 3, 256, width)] * 3))
    mask = jnp.tril(jnp.ones((256, 256), bool))[None, None] if causal else None
    ours, truth = kernel._splash(q, k, v, causal, interpret=True), kernel.plain(q, k, v, mask)
    np.testing.assert_allclose(ours, truth, atol=30 * np.finfo(np.float32).eps, rtol=0)


@pytest.mark.parametrize(
    ("backend", "dtype", "shape", "masked", "form"),
    [
        ("gpu", jnp.bfloat16, (5, 3, 77, 64), False, "cudnn"),
        ("gpu", jnp.bfloat16, (5, 3, 77, 64), True, "plain"),
        ("gpu", jnp.float32, (5, 3, 77, 64), False, "plain"),
        ("gpu", jnp.bfloat16, (5, 3, 77, 136), False, "plain"),
        ("gpu", jnp.bfloat16, (5, 3, 77, 60), False, "plain"),
        ("tpu", jnp.bfloat16, (5, 3, 256, 64), False, "splash"),
        ("tpu", jnp.float32, (5, 3, 200, 64), False, "plain"),
        ("tpu", jnp.bfloat16, (5, 3, 256, 64), True, "plain"),
        ("cpu", jnp.float32, (64, 8, 99, 64), True, "chunked"),
        ("cpu", jnp.float32, (8, 8, 99, 64), True, "plain"),
    ],
)
def test_which_form_is_taken(monkeypatch, backend, dtype, shape, masked, form) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    q = jax.ShapeDtypeStruct(shape, dtype)
    assert kernel.form(q, q, masked=masked) == form


@pytest.mark.parametrize("mask", [False, True])
def test_the_heads_of_the_language_model_at_once_are_the_heads(monkeypatch, mask: bool) -> None:
    """As on a GPU; cuDNN's part is done by the same function of JAX, in its other implementation."""
    config = type(LANGUAGE_MODEL)(**{**LANGUAGE_MODEL.__dict__, "mask": mask, "dropout": 0.3})
    model, tokens = twin(reference(config)), jnp.asarray(ids(3, 7))
    model.eval()
    graph, parameters, buffers = nnx.split(model, nnx.Param, ...)
    parameters = jax.tree.map(lambda leaf: leaf.astype(jnp.float64), parameters)

    def loss(parameters: nnx.State, buffers: nnx.State) -> jax.Array:
        return (nnx.merge(graph, parameters, buffers)(tokens) ** 2).sum()

    truth = jax.value_and_grad(loss)(parameters, buffers)
    used, original = [], jax.nn.dot_product_attention

    def fused(*args, implementation: str, **options):
        used.append(implementation)
        return original(*args, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", fused)
    monkeypatch.setattr("flax_tf.attention.form", lambda *_, **__: "cudnn")
    monkeypatch.setattr(kernel, "form", lambda *_, **__: "cudnn")
    ours = jax.value_and_grad(loss)(parameters, buffers)
    assert used == ["cudnn"] * config.num_layers
    # JAX's form takes its softmax in float32.
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(truth), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5 * float(jnp.abs(other).max()))

    heads = model.transformer.transformer_layers[0].mha
    x = jnp.zeros((3, 7, config.d_model))
    assert heads._at_once(x)
    model.train()
    assert not heads._at_once(x)  # what drops out
    model.eval()
    if mask:
        head = heads.attention_heads[1]
        head.tril[...] = head.tril[...].at[2, 4].set(1)
        assert not heads._at_once(x)  # another mask than the causal


@pytest.mark.parametrize("shape", [(13,), (5, 13), (2, 3, 13), (2, 3, 5, 13)])
def test_the_product_over_one_axis_of_rows_is_the_product(shape: tuple[int, ...]) -> None:
    x, kernel_ = arrays(shape, (13, 7))
    assert_same(lambda x, kernel: dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ()))), jnp.matmul, x, kernel_)


def test_the_kernels_gradient_takes_no_transposed_copy() -> None:
    """XLA's own form of it on a CPU, from activations of three axes, begins with one of the output's gradient."""
    layer = Linear(31, 37, rngs=nnx.Rngs(0))
    x, g = (array.astype(jnp.float32) for array in arrays((5, 7, 31), (5, 7, 37)))

    def text(product) -> str:
        def gradient(kernel, x, g):
            return jax.vjp(lambda kernel: product(x, kernel), kernel)[1](g)[0]

        return jax.jit(gradient).lower(layer.kernel[...], x, g).compile().as_text()

    assert layer.dot_general is dot_general
    assert "f32[37,35]" not in text(lambda x, kernel: dot_general(x, kernel, (((2,), (0,)), ((), ()))))
    assert "f32[37,35]" in text(jnp.matmul)


def test_gelu_is_pytorchs() -> None:
    x = np.concatenate([np.linspace(-40, 40, 997), [0.0, -0.0, 1e-300]])
    tensor = torch.from_numpy(x).requires_grad_()
    truth = torch.nn.functional.gelu(tensor)
    truth.sum().backward()
    assert relative_error(np.asarray(gelu(jnp.asarray(x))), truth.detach().numpy()) <= SAME
    assert relative_error(np.asarray(jax.vmap(jax.grad(gelu))(jnp.asarray(x))), tensor.grad.numpy()) <= SAME
    _, tangent = jax.jvp(gelu, (jnp.asarray(x),), (jnp.ones(len(x)),))  # forwards too
    assert relative_error(np.asarray(tangent), tensor.grad.numpy()) <= SAME


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_gelu_below_float64_is_as_accurate_as_pytorchs(precision: str) -> None:
    x = torch.linspace(-6, 6, 9973, dtype=torch.float64).to(getattr(torch, precision))
    truth = torch.nn.functional.gelu(x.double()).numpy()
    theirs = relative_error(torch.nn.functional.gelu(x).double().numpy(), truth)
    ours = gelu(jnp.asarray(x.double().numpy(), precision))
    assert ours.dtype == precision
    assert relative_error(np.asarray(ours, np.float64), truth) <= 2 * theirs
