"""flax_tf and torch_ref are one architecture written twice: same files, classes, attributes, configs and keys."""

import importlib
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from models import ATTN_RNN, BACKBONE, BLOCK, LANGUAGE_MODEL, RNN, TRANSFORMER, reference, state_arrays, twin

import flax_tf
import torch_ref
from flax_tf.config import CONFIGS
from flax_tf.layers import Buffer
from flax_tf.porting.convert import torch_modules

# Rooms of flax_tf that have no twin: what surrounds the models, and the leaf layers, whose twin is torch.nn.
FLAX_ALONE = {"attention_maps", "cli", "command", "compilation", "errors", "files", "layers", "memory", "terminal"}
FLAX_ALONE |= {"text_commands", "translation", "pytest_plugin", "__main__"}
FILES = sorted({path.stem for path in Path(torch_ref.__file__).parent.glob("*.py")} - {"__init__"})
TRAINING = {"optimizer"}  # whose twins are in flax_tf/training, and tested by what they compute
SYSTEMS = pytest.mark.parametrize(
    "config", [BLOCK, BACKBONE, LANGUAGE_MODEL, TRANSFORMER, RNN, ATTN_RNN], ids=lambda config: config.arch
)


def test_the_files_are_the_same() -> None:
    ours = {path.stem for path in Path(flax_tf.__file__).parent.glob("*.py")} - {"__init__"}
    assert ours - FLAX_ALONE == set(FILES) - TRAINING


def public(module: ModuleType, kind) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(module).items()
        if kind(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }


@pytest.mark.parametrize("file", [file for file in FILES if file not in {"config", "saving", *TRAINING}])
def test_the_classes_and_functions_of_a_file_are_the_same(file: str) -> None:
    ours, theirs = importlib.import_module(f"flax_tf.{file}"), importlib.import_module(f"torch_ref.{file}")
    assert public(ours, inspect.isclass).keys() == public(theirs, inspect.isclass).keys()
    assert public(ours, inspect.isfunction).keys() >= public(theirs, inspect.isfunction).keys()


@SYSTEMS
def test_the_module_trees_are_the_same_class_for_class_and_attribute_for_attribute(config) -> None:
    module = reference(config)
    model = twin(module)
    ours, theirs = dict(torch_modules(model)), dict(module.named_modules())
    assert ours.keys() == theirs.keys()
    containers = {nnx.List: torch.nn.ModuleList}
    for path, theirs_here in theirs.items():
        expected = containers.get(type(ours[path]))
        assert type(theirs_here) is expected or type(ours[path]).__name__ == type(theirs_here).__name__, path
    for path, theirs_here in theirs.items():
        if type(theirs_here).__module__.startswith("torch_ref"):
            attributes = {*vars(theirs_here), *theirs_here._modules, *theirs_here._parameters, *theirs_here._buffers}
            own = {name for name in attributes if not name.startswith("_")} - {"training"}
            assert own == {name for name in vars(ours[path]) if not name.startswith("_")}, path


@SYSTEMS
def test_the_parameters_and_buffers_are_the_same(config) -> None:
    module = reference(config)
    model = twin(module)
    trained = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    kept = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, Buffer)))
    assert trained == sum(parameter.numel() for parameter in module.parameters())
    assert kept == sum(buffer.numel() for buffer in module.buffers())


def test_the_configs_are_the_same_objects() -> None:
    shared = importlib.import_module("torch_ref.config")
    assert {cls.__name__ for cls in CONFIGS.values()} == set(shared.__all__)
    assert all(getattr(shared, cls.__name__) is cls for cls in CONFIGS.values())


def test_the_reference_imports_no_jax_and_the_product_no_torch() -> None:
    for modules, other in (
        ([f"torch_ref.{file}" for file in FILES], ("jax", "flax")),
        ([f"flax_tf.{file}" for file in FILES if file not in TRAINING], ("torch",)),
    ):
        code = f"import sys, {', '.join(modules)}; sys.exit(any(name in sys.modules for name in {other!r}))"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0, modules


# The keys that seed 001's own classes give, for one layer and one head, and their shapes at V 37, T 13, D 15, H 5.
SEED_001 = {
    "transformer.embeddings.token_embd.weight": (37, 15),
    "transformer.embeddings.pos_embd.weight": (13, 15),
    "transformer.embeddings.layer_norm.weight": (15,),
    "transformer.embeddings.layer_norm.bias": (15,),
    "transformer.transformer_layers.0.mha.attention_heads.0.tril": (13, 13),
    "transformer.transformer_layers.0.mha.attention_heads.0.query.weight": (5, 15),
    "transformer.transformer_layers.0.mha.attention_heads.0.key.weight": (5, 15),
    "transformer.transformer_layers.0.mha.attention_heads.0.value.weight": (5, 15),
    "transformer.transformer_layers.0.mha.linear_proj.weight": (15, 15),
    "transformer.transformer_layers.0.mha.linear_proj.bias": (15,),
    "transformer.transformer_layers.0.ffn.layer1.weight": (60, 15),
    "transformer.transformer_layers.0.ffn.layer1.bias": (60,),
    "transformer.transformer_layers.0.ffn.layer2.weight": (15, 60),
    "transformer.transformer_layers.0.ffn.layer2.bias": (15,),
    "transformer.transformer_layers.0.layer_norm_1.weight": (15,),
    "transformer.transformer_layers.0.layer_norm_1.bias": (15,),
    "transformer.transformer_layers.0.layer_norm_2.weight": (15,),
    "transformer.transformer_layers.0.layer_norm_2.bias": (15,),
    "classifier.weight": (37, 15),
    "classifier.bias": (37,),
}
# Likewise of seed 000's class at D 15.
SEED_000 = {
    "attention_layer_norm.weight": (15,),
    "attention_layer_norm.bias": (15,),
    "mlp_layer_norm.weight": (15,),
    "mlp_layer_norm.bias": (15,),
    "kqv_projection.weight": (45, 15),
    "kqv_projection.bias": (45,),
    "output_mixer_projection.weight": (15, 15),
    "output_mixer_projection.bias": (15,),
    "embedding_mlp.0.weight": (60, 15),
    "embedding_mlp.0.bias": (60,),
    "embedding_mlp.2.weight": (15, 60),
    "embedding_mlp.2.bias": (15,),
}


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        (BLOCK, SEED_000),
        (LANGUAGE_MODEL, SEED_001),
        (BACKBONE, {k.removeprefix("transformer."): s for k, s in SEED_001.items() if k.startswith("transformer.")}),
    ],
    ids=lambda value: getattr(value, "arch", ""),
)
def test_the_state_dict_has_the_seeds_keys(config, keys: dict[str, tuple[int, ...]]) -> None:
    shapes = {name: array.shape for name, array in state_arrays(reference(config)).items()}
    every_layer_and_head = set()
    for key in keys:
        for layer in range(2):
            for head in range(3):
                every_layer_and_head.add(
                    key.replace("layers.0.", f"layers.{layer}.").replace("heads.0.", f"heads.{head}.")
                )
    assert shapes.keys() == every_layer_and_head
    assert {name: shapes[name] for name in keys} == keys


def test_presets_are_the_numbers_of_the_documents() -> None:
    with torch.device("meta"):
        model = reference(CONFIGS["language_model"]())
    # Seed 001 prints its size: 4.144826 M parameters.
    assert sum(parameter.numel() for parameter in model.parameters()) == 4_144_826
    assert (
        np.unique([head.query.out_features for head in model.transformer.transformer_layers[0].mha.attention_heads])
        == 16
    )
