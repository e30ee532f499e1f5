"""Saved directories: either framework loads what was saved, whole and in the same precision, or says what is wrong."""

import json
import mmap
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch
from flax import nnx
from models import (
    ATTN_RNN,
    BACKBONE,
    BLOCK,
    LANGUAGE_MODEL,
    RNN,
    TRANSFORMER,
    ids,
    reference,
    state_arrays,
    twin,
)
from safetensors.torch import save_file
from tokenizers import Tokenizer

import flax_tf
import torch_ref.saving
from flax_tf.config import LanguageModelConfig, config_to_dict
from flax_tf.data.tokenizer import char_tokenizer
from flax_tf.errors import InputError
from flax_tf.porting import flax_to_torch, memory, read_weights
from flax_tf.saving import MODELS, abstract, build, cast, from_pretrained, read_config, save_pretrained


def test_an_abstract_model_has_the_tree_of_a_real_one() -> None:
    """Of every kind of model: the same modules with the same settings, and variables of the same shapes and dtypes."""
    configs = [BLOCK, BACKBONE, LANGUAGE_MODEL, TRANSFORMER, RNN, ATTN_RNN]
    assert {type(config) for config in configs} == MODELS.keys()
    for config in configs:
        graph, state = nnx.split(abstract(config))
        traced_graph, traced = nnx.split(nnx.eval_shape(partial(build, config)))
        _, concrete = nnx.split(build(config))
        assert graph == traced_graph
        shapes = jax.tree.map(lambda array: (array.shape, array.dtype), [state, traced, concrete])
        assert shapes[0] == shapes[1] == shapes[2]
        assert jax.tree.leaves(state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("config", [BLOCK, BACKBONE, LANGUAGE_MODEL], ids=lambda config: config.arch)
def test_what_flax_saves_either_framework_loads(tmp_path: Path, config, dtype: torch.dtype) -> None:
    module = reference(config).to(dtype)
    save_pretrained(twin(module), tmp_path / "saved")
    loaded = torch_ref.saving.from_pretrained(tmp_path / "saved")
    assert type(loaded) is type(module) and loaded.config == config and not loaded.training
    assert loaded.state_dict().keys() == module.state_dict().keys()
    for name, tensor in module.state_dict().items():
        assert loaded.state_dict()[name].dtype == dtype
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    model = from_pretrained(tmp_path / "saved")
    assert model.config == config
    for name, array in flax_to_torch(model).items():
        assert array.dtype.name == str(dtype).removeprefix("torch.")
        np.testing.assert_array_equal(array.astype(np.float32), module.state_dict()[name].float().numpy())


def test_a_loaded_model_is_in_evaluation_mode_and_is_exported_by_the_package(tmp_path: Path) -> None:
    config = type(LANGUAGE_MODEL)(**{**LANGUAGE_MODEL.__dict__, "dropout": 0.5})
    model = twin(reference(config))
    model.train()
    flax_tf.save_pretrained(model, tmp_path)
    loaded = flax_tf.from_pretrained(tmp_path)
    model.eval()
    # The same numbers in the same program; and with dropout on, there would be no rngs to draw from.
    np.testing.assert_array_equal(nnx.jit(loaded)(ids(2, 7)), nnx.jit(model)(ids(2, 7)))


def test_each_tensor_keeps_its_own_precision(tmp_path: Path) -> None:
    module = reference(BLOCK)
    module.kqv_projection.bfloat16()
    module.embedding_mlp[0].half()
    module.mlp_layer_norm.double()
    with jax.enable_x64(True):
        save_pretrained(twin(module), tmp_path)
        again = flax_to_torch(from_pretrained(tmp_path))
    dtypes = {name: tensor.dtype for name, tensor in module.state_dict().items()}
    assert len(set(dtypes.values())) == 4
    loaded = torch_ref.saving.from_pretrained(tmp_path).state_dict()
    assert {name: tensor.dtype for name, tensor in loaded.items()} == dtypes
    for name, dtype in dtypes.items():
        assert again[name].dtype.name == str(dtype).removeprefix("torch.")


def test_pytorch_loads_strictly(tmp_path: Path) -> None:
    save_pretrained(twin(reference(BLOCK)), tmp_path)
    tensors = reference(BLOCK).state_dict()
    del tensors["kqv_projection.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RuntimeError, match=r"Missing key.*kqv_projection\.bias"):
        torch_ref.saving.from_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"kqv_projection\.bias"):
        from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("saved", "wanted", "lossy"),
    [
        ("float32", "bfloat16", True),
        ("float32", jnp.float16, True),
        ("float64", np.float32, True),
        ("float16", "bfloat16", True),  # fewer digits
        ("bfloat16", "float16", True),  # a smaller range
        ("bfloat16", "float32", False),
        ("float16", np.dtype("float32"), False),
        ("float32", "float32", False),
    ],
)
def test_a_cast_is_asked_for_and_its_loss_is_said(
    tmp_path: Path, saved: str, wanted: Any, lossy: bool, caplog: pytest.LogCaptureFixture
) -> None:
    module = reference(BLOCK)
    (tmp_path / "config.json").write_text(json.dumps({"arch": "block", "d_model": 15, "num_heads": 3}))
    stored = {name: tensor.to(getattr(torch, saved)) for name, tensor in module.state_dict().items()}
    save_file(stored, tmp_path / "model.safetensors")
    target = jnp.dtype(wanted)
    for name, array in flax_to_torch(from_pretrained(tmp_path, dtype=wanted)).items():
        assert array.dtype == target
        expected = stored[name].to(getattr(torch, target.name))
        np.testing.assert_array_equal(array.astype(np.float32), expected.float().numpy())
    said = f"cast {len(stored)} tensors to {target}, which keeps fewer digits or a smaller range"
    assert caplog.messages == ([said] if lossy else [])


def test_a_cast_leaves_integers_alone(caplog: pytest.LogCaptureFixture) -> None:
    arrays = {"ids": np.arange(3), "mask": np.array([True]), "weight": np.ones(5, np.float32)}
    result = cast(arrays, "bfloat16")
    assert {name: array.dtype for name, array in result.items()} == {
        "ids": np.int64,
        "mask": np.bool_,
        "weight": ml_dtypes.bfloat16,
    }
    assert caplog.messages == ["cast 1 tensors to bfloat16, which keeps fewer digits or a smaller range"]


@pytest.mark.parametrize("dtype", ["int32", "half a float", "complex64", np.bool_])
def test_an_impossible_dtype_is_refused(tmp_path: Path, dtype: Any) -> None:
    save_pretrained(twin(reference(BLOCK)), tmp_path)
    with pytest.raises(InputError, match="choose float64, float32, bfloat16 or float16"):
        from_pretrained(tmp_path, dtype=dtype)


def test_float64_is_refused_while_jax_would_cut_it(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        save_pretrained(twin(reference(BLOCK).double()), tmp_path)
    with pytest.raises(InputError, match="JAX_ENABLE_X64=1, or ask for dtype='float32'"):
        from_pretrained(tmp_path)
    assert flax_to_torch(from_pretrained(tmp_path, dtype="float32"))["kqv_projection.bias"].dtype == np.float32


def test_the_tokenizer_is_saved_with_the_model(tmp_path: Path) -> None:
    tokenizer = char_tokenizer(["grüße, 世界\n"])
    save_pretrained(twin(reference(BLOCK)), tmp_path / "saved", tokenizer)
    loaded = Tokenizer.from_file(str(tmp_path / "saved" / "tokenizer.json"))
    assert loaded.to_str() == tokenizer.to_str()
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }


def test_shards_are_saved_and_loaded_by_both(tmp_path: Path) -> None:
    module = reference(LANGUAGE_MODEL)
    save_pretrained(twin(module), tmp_path / "saved", max_shard_size=10_000)
    assert len(list((tmp_path / "saved").glob("model-*-of-*.safetensors"))) > 2
    loaded = torch_ref.saving.from_pretrained(tmp_path / "saved").state_dict()
    ported = flax_to_torch(from_pretrained(tmp_path / "saved"))
    for name, tensor in module.state_dict().items():
        assert torch.equal(loaded[name], tensor)
        np.testing.assert_array_equal(ported[name], tensor)


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_a_saved_model_is_replaced_as_a_whole(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "saved"
    save_pretrained(twin(reference(LANGUAGE_MODEL)), out, char_tokenizer(["ab"]), max_shard_size=10_000)
    module = reference(BLOCK, seed=1)
    save_pretrained(twin(module), out)
    assert names(out) == {"config.json", "model.safetensors"}  # no shard, index or tokenizer of the old one
    assert names(out.parent) == {"saved"}
    assert read_config(out) == BLOCK
    np.testing.assert_array_equal(read_weights(out)["kqv_projection.bias"], module.kqv_projection.bias.detach())
    loaded = from_pretrained(out)
    save_pretrained(loaded, out)  # over the file that it was read from
    np.testing.assert_array_equal(read_weights(out)["kqv_projection.bias"], module.kqv_projection.bias.detach())


def test_nothing_but_a_saved_model_is_replaced(tmp_path: Path) -> None:
    model = twin(reference(BLOCK))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds other files \(such as notes.txt\): give a new or empty directory"):
        save_pretrained(model, tmp_path)
    assert names(tmp_path) == {"notes.txt"}
    with pytest.raises(InputError, match=r"notes.txt is a file"):
        save_pretrained(model, tmp_path / "notes.txt")
    with pytest.raises(InputError, match=r"notes.txt/saved cannot be written"):
        save_pretrained(model, tmp_path / "notes.txt" / "saved")
    assert (tmp_path / "notes.txt").read_text() == "mine"

    save_pretrained(model, tmp_path / "saved")
    shutil.move(tmp_path / "notes.txt", tmp_path / "saved")
    with pytest.raises(InputError, match=r"holds other files \(such as notes.txt\)"):
        save_pretrained(model, tmp_path / "saved")
    assert names(tmp_path / "saved") == {"config.json", "model.safetensors", "notes.txt"}


@pytest.mark.parametrize("config", ['{"model_type": "gpt2"}', "{", None])
def test_another_programs_model_is_not_replaced(tmp_path: Path, config: str | None) -> None:
    (tmp_path / "model.safetensors").write_text("theirs")
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(InputError, match="give a new or empty directory"):
        save_pretrained(twin(reference(BLOCK)), tmp_path)
    assert (tmp_path / "model.safetensors").read_text() == "theirs"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"arch": "block", "d_model": 15, "num_head": 3}', "unknown field 'num_head' .* did you mean 'num_heads'?"),
        ('{"arch": "block", "d_model": 15, "num_heads": 4}', "num_heads 4 does not divide d_model 15"),
        ('{"arch": "block", "d_model": "15"}', "d_model must be a whole number"),
        (
            '{"arch": "perceiver"}',
            "unknown architecture 'perceiver': known are attn_rnn, backbone, block, language_model, rnn, transformer",
        ),
        ('{"d_model": 15}', "unknown architecture None"),
        ('{"arch": "block", "d_mod', "is not JSON"),
        ("", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        ("[15, 3]", "must hold one JSON object"),
    ],
)
def test_a_wrong_config_is_refused_by_its_path(tmp_path: Path, content: str | bytes, message: str) -> None:
    save_pretrained(twin(reference(BLOCK)), tmp_path)
    (tmp_path / "config.json").write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InputError, match=message) as caught:
        from_pretrained(tmp_path)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{tmp_path}/config.json")


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"is not a saved model: it has no config\.json"):
        from_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"is not a saved model: it has no config\.json"):
        from_pretrained(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text('{"arch": "block", "d_model": 15, "num_heads": 3}')
    with pytest.raises(InputError, match="holds no weights"):
        from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"arch": "language_model", "vocab_size": null}')
    save_file({}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match="vocab_size is null"):
        from_pretrained(tmp_path)


LARGE = LanguageModelConfig(vocab_size=20_011, max_seq_length=17, d_model=30, num_heads=2, num_layers=1)


@pytest.mark.parametrize("spoil", ["cut short", "overwritten", "replaced"])
def test_a_model_is_independent_of_the_file_that_it_was_loaded_from(tmp_path: Path, spoil: str) -> None:
    """Of the tables and kernels, the embedding and the classifier are large; the second is transposed."""
    module = reference(LARGE)
    expected = state_arrays(module)
    save_file(module.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config_to_dict(LARGE)))
    assert expected["classifier.weight"].nbytes > memory._LARGE
    model = from_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    if spoil == "cut short":
        os.truncate(file, 0)
    elif spoil == "overwritten":
        with file.open("r+b") as stream:
            stream.write(bytes(file.stat().st_size))
    else:
        save_pretrained(build(LARGE, seed=1), tmp_path)
    found = flax_to_torch(model)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert np.array_equal(found[name], array), name


def test_large_arrays_are_copied_once_and_shared_with_nothing() -> None:
    rng = np.random.default_rng(0)
    base = rng.random((3, 1009, 1013), np.float32)
    views = [
        base,
        base[0].T,
        base.transpose(1, 2, 0),
        base[:, ::-1],
        base[1, 1:, :5],
        np.float32(-0.0)[None],
        base[:, :0],
    ]
    views += [base.astype(ml_dtypes.bfloat16).transpose(2, 0, 1), base.astype(np.float16)]
    expected = [view.copy() for view in views]
    arrays = [memory.to_jax(view) for view in views] + list(memory.all_to_jax(views))
    base[:] = 0
    for array, copy in zip(arrays, expected * 2, strict=True):
        assert array.dtype == copy.dtype and array.shape == copy.shape
        assert np.asarray(array).tobytes() == copy.tobytes()
    array = memory.to_jax(expected[0])
    doubled = jax.jit(lambda x: x + x, donate_argnums=0)(array)  # the memory is JAX's to reuse
    assert np.array_equal(doubled, expected[0] + expected[0])


def test_what_was_copied_from_a_file_is_let_go_of_and_can_be_read_again(tmp_path: Path) -> None:
    data = np.random.default_rng(0).random(3_000_017, np.float32)
    (tmp_path / "file").write_bytes(b"12345678" + data.tobytes())
    with (tmp_path / "file").open("rb") as file:
        mapped = memory.FileMap(file.fileno(), 0, access=mmap.ACCESS_READ)
    view = np.frombuffer(mapped, np.uint8)[8:].view(np.float32)[5:].reshape(4, -1)
    for _ in range(2):
        assert np.array_equal(memory.to_jax(view.T), data[5:].reshape(4, -1).T)
    for array in memory.all_to_jax([view, view.T, view[1:, 3:], view.T[::-1]]):  # at a time, from the same pages
        assert sorted(array.shape)[0] in (3, 4) and np.isin(array, data).all()
