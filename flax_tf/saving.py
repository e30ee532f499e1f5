"""Models in directories: `config.json`, `model.safetensors` in PyTorch's names, tokenizer. Twin in `torch_ref`."""

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from tokenizers import Tokenizer

from flax_tf.block import Block
from flax_tf.config import (
    AttnRNNConfig,
    BackboneConfig,
    BlockConfig,
    Config,
    LanguageModelConfig,
    RNNConfig,
    TransformerConfig,
    config_from_dict,
    config_to_dict,
)
from flax_tf.errors import InputError
from flax_tf.files import replacing
from flax_tf.language_model import Backbone, LanguageModel
from flax_tf.memory import without_collection
from flax_tf.porting.convert import flax_to_torch, torch_to_flax
from flax_tf.porting.files import read_weights, write_weights
from flax_tf.recurrent import AttnSeq2Seq, Seq2Seq
from flax_tf.transformer import Transformer

logger = logging.getLogger("flax_tf")

# What `save_pretrained` writes, and so what it may replace.
_SAVED_FILES = re.compile(
    r"(config|tokenizer|target_tokenizer|model\.safetensors\.index)\.json|model(-\d+-of-\d+)?\.safetensors"
)

MODELS: dict[type, Callable[..., nnx.Module]] = {
    BlockConfig: Block,
    BackboneConfig: Backbone,
    LanguageModelConfig: LanguageModel,
    TransformerConfig: Transformer,
    RNNConfig: Seq2Seq,
    AttnRNNConfig: AttnSeq2Seq,
}


def build(config: Config, seed: int = 0) -> Any:
    """A model with fresh parameters from PyTorch's distributions, in training mode (call `.eval()` to leave it)."""
    return MODELS[type(config)](config, rngs=nnx.Rngs(seed))


class _OneKey(nnx.RngStream):
    """Always the same key: shapes don't depend on it, and to trace a count of keys costs more than all the rest."""

    def __call__(self) -> jax.Array:
        return self.key[...]


def abstract(config: Config) -> Any:
    """The model's tree with shapes and dtypes in place of arrays, for `torch_to_flax` to fill."""

    def model() -> nnx.Module:
        rngs: Any = nnx.Rngs()
        rngs.default = _OneKey(0, tag="default")
        return MODELS[type(config)](config, rngs=rngs)

    with without_collection():
        return nnx.eval_shape(model)


def model_directory(path: str | os.PathLike) -> Path:
    """The path itself; of a training run's directory, its export."""
    path = Path(path)
    return path / "export" if not (path / "config.json").is_file() and (path / "export").is_dir() else path


def read_config(directory: str | os.PathLike) -> Config:
    """The config in a saved directory. Raises InputError if there is none, or it is not one of ours."""
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise InputError(f"{directory} is not a saved model: it has no config.json (run flax-tf port first)")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON ({error})") from None
    if not isinstance(fields, dict):
        raise InputError(f"{path} must hold one JSON object")
    try:
        return config_from_dict(fields)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def from_pretrained(path: str | os.PathLike, dtype: Any = None) -> Any:
    """The Flax model in a directory that `save_pretrained` wrote (either framework's), in evaluation mode.

    The directory of a training run stands for its export.
    `dtype` (a name or a NumPy dtype) casts every floating-point tensor; None keeps each as it was saved. A cast that
    loses digits is logged. Raises InputError for a directory that is missing, incomplete or does not fit its config.
    """
    path = model_directory(path)
    model = abstract(read_config(path))
    tensors: Mapping[str, np.ndarray] = read_weights(path)
    if dtype is not None:
        tensors = cast(tensors, dtype)
    model = torch_to_flax(tensors, model)
    model.eval()
    return model


def cast(tensors: Mapping[str, np.ndarray], dtype: Any) -> dict[str, np.ndarray]:
    """The floating-point tensors in another precision, the rest as they are. Logs how many lost digits."""
    try:
        target = jnp.dtype(dtype)
    except TypeError:
        target = None
    if target is None or not jnp.issubdtype(target, jnp.floating):
        raise InputError(f"dtype {dtype!r} is not a floating-point type: choose float64, float32, bfloat16 or float16")
    finfo = ml_dtypes.finfo
    result, lossy = {}, 0
    for name, array in tensors.items():
        if jnp.issubdtype(array.dtype, jnp.floating):
            lossy += finfo(target).nmant < finfo(array.dtype).nmant or finfo(target).maxexp < finfo(array.dtype).maxexp
            array = array.astype(target)
        result[name] = array
    if lossy:
        logger.warning("cast %d tensors to %s, which keeps fewer digits or a smaller range", lossy, target)
    return result


def save_pretrained(
    model: Any,
    path: str | os.PathLike,
    tokenizer: Tokenizer | None = None,
    target_tokenizer: Tokenizer | None = None,
    *,
    max_shard_size: int | str = "5GB",
) -> None:
    """Writes a directory that PyTorch reads as it is: `config.json`, `model.safetensors`, `tokenizer.json`.

    A model with two vocabularies also has a `target_tokenizer`, written to `target_tokenizer.json`; `tokenizer` is then
    the source's. Without one, `tokenizer` is of both sides.

    A saved model at `path` is replaced, in one move, when the new one is complete. Raises InputError, with nothing
    changed, if `path` is a file or a directory that holds anything else.
    """
    _check_replaceable(Path(path))
    with replacing(path) as fresh:
        fresh.mkdir()
        write_weights(flax_to_torch(model), fresh, max_shard_size)
        (fresh / "config.json").write_text(json.dumps(config_to_dict(model.config), indent=2) + "\n", encoding="utf-8")
        for name, each in (("tokenizer", tokenizer), ("target_tokenizer", target_tokenizer)):
            if each is not None:
                # Not tokenizer.save, which raises no OSError when the disk is full.
                (fresh / f"{name}.json").write_text(each.to_str(pretty=True), encoding="utf-8")


def _check_replaceable(target: Path) -> None:
    """Raises InputError unless `target` is new, an empty directory, or a saved model and nothing else."""
    if target.exists() and not target.is_dir():
        raise InputError(f"{target} is a file: give a directory to save into")
    present = sorted(entry.name for entry in target.iterdir()) if target.is_dir() else []
    foreign = [name for name in present if not _SAVED_FILES.fullmatch(name)]
    if foreign:
        raise InputError(f"{target} holds other files (such as {foreign[0]}): give a new or empty directory")
    if present:
        try:
            read_config(target)
        except InputError as error:
            raise InputError(f"{error}: give a new or empty directory") from None
