"""Weight files as {name: array}: `.safetensors` without torch, and PyTorch's `.pt`, `.pth` and `.bin`."""

import json
import logging
import mmap
import os
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from flax_tf.errors import InputError
from flax_tf.porting.memory import FileMap
from flax_tf.porting.torch_map import TorchMap

logger = logging.getLogger("flax_tf")

TORCH_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
INDEX = "model.safetensors.index.json"
# In the order of preference of a directory that holds several.
_DIRECTORY_FILES = ("model.safetensors", INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
# Where training scripts put the state dict within what they save.
_CONTAINERS = ("state_dict", "model_state_dict", "model", "module")
# Where they put those of an encoder and of a decoder that are modules of their own.
_PAIRS = (("encoder", "decoder"), ("encoder_state_dict", "decoder_state_dict"))
# Both torch and ml_dtypes have these, under the same names, but NumPy has not, so they cross as integers.
_THROUGH_INTEGERS = {"bfloat16": "int16", "float8_e4m3fn": "int8", "float8_e5m2": "int8"}
SAFETENSORS_DTYPES: dict[str, Any] = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8,
    "U64": np.uint64, "U32": np.uint32, "U16": np.uint16, "U8": np.uint8, "BOOL": np.bool_,
    "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
}  # fmt: skip


def read_weights(path: str | os.PathLike) -> dict[str, np.ndarray]:
    """The tensors of a weight file, a sharded index, or a directory that holds either.

    Files are mapped into memory: nothing is read until an array is used, and until then the file must not be cut short
    (the system would end the process) or changed; to replace it by another under its name is fine. PyTorch's files are
    opened with `weights_only=True`, which runs no code from the file, and need torch. bfloat16 comes as
    `ml_dtypes.bfloat16`.
    Raises InputError for a path that is missing, damaged, unsafe to open or of an unknown kind.
    """
    path = Path(path)
    if path.is_dir():
        present = [name for name in _DIRECTORY_FILES if (path / name).is_file()]
        if not present:
            raise InputError(f"{path} holds no weights: expected one of {', '.join(_DIRECTORY_FILES)}")
        path = path / present[0]
    if path.name.endswith(".index.json") and path.is_file():
        return _read_shards(path)
    return _read_file(path)


def _read_file(path: Path) -> dict[str, np.ndarray]:
    if not path.is_file():
        raise InputError(f"{path} does not exist: give a weight file or a directory that holds one")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix in TORCH_SUFFIXES:
        return _read_torch(path)
    raise InputError(f"{path} is of an unknown kind: expected .safetensors, {', '.join(TORCH_SUFFIXES)}")


def write_weights(
    tensors: Mapping[str, np.ndarray], directory: str | os.PathLike, max_shard_size: int | str = "5GB"
) -> None:
    """Writes `model.safetensors`, or shards with an index where the tensors are more than `max_shard_size` bytes.

    An array that stands behind several names, which is how `flax_to_torch` gives tied parameters, is written once,
    under the first in the alphabet. The directory exists and is fresh: the caller moves it into place when it is
    complete. Raises OSError if the disk is full.
    """
    first: dict[int, str] = {}
    tensors = {name: array for name, array in sorted(tensors.items()) if first.setdefault(id(array), name) == name}
    split = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda array: array.nbytes,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
    for filename, names in split.filename_to_tensors.items():
        # save_file writes raw memory, so the arrays must be contiguous.
        shard = {name: np.asarray(tensors[name], order="C") for name in names}
        file = Path(directory) / filename
        file.touch()
        mode = file.stat().st_mode  # that of any new file; save_file's own can be read by nobody else
        try:
            save_file(shard, file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(str(error)) from error
        file.chmod(mode)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (Path(directory) / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    try:
        with safe_open(path, "np"):  # checks the header, and that the file is complete
            pass
    except SafetensorError as error:
        raise InputError(f"{path} is not a whole safetensors file ({error}): copy or save it again") from None
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    unknown = sorted({entry["dtype"] for entry in header.values()} - SAFETENSORS_DTYPES.keys())
    if unknown:
        raise InputError(f"{path} has tensors of dtype {', '.join(unknown)}, which cannot be ported")
    start = 8 + size
    with path.open("rb") as file:
        data = np.frombuffer(FileMap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)[start:]
    return {
        name: data[slice(*entry["data_offsets"])].view(SAFETENSORS_DTYPES[entry["dtype"]]).reshape(entry["shape"])
        for name, entry in header.items()
    }


def _read_shards(index: Path) -> dict[str, np.ndarray]:
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        shards = {shard: index.parent / shard for shard in sorted(set(weight_map.values()))}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(f"{index} is not an index of shards: it needs a weight_map of names to files") from None
    tensors: dict[str, np.ndarray] = {}
    for shard, path in shards.items():
        for name, array in _read_file(path).items():
            if weight_map.get(name) != shard:
                raise InputError(f"{path} holds {name}, which {index.name} does not place there: copy both again")
            tensors[name] = array
    absent = sorted(weight_map.keys() - tensors.keys())
    if absent:
        raise InputError(
            f"{index} names {len(absent)} tensors that its shards lack (first: {absent[0]}): copy them again"
        )
    return tensors


def load_torch(path: Path) -> Any:
    """What `torch.save` wrote, on the CPU, opened with `weights_only=True`.

    Raises InputError for a file that is missing, damaged or unsafe to open, or if PyTorch isn't installed.
    """
    if not path.is_file():
        raise InputError(f"{path} does not exist: give a file that torch.save wrote")
    try:
        import torch
    except ModuleNotFoundError:
        raise InputError(
            f"reading {path} needs PyTorch: pip install 'flax-tf[torch]', or save the weights as .safetensors"
        ) from None
    try:
        # Only the zip format, PyTorch's own since 1.6, can be mapped.
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (PermissionError, MemoryError):
        raise
    except Exception as error:  # on a damaged file torch raises whatever its bytes happen to lead to
        if found := re.search(r"GLOBAL (\S+)", str(error)):
            raise InputError(
                f"{path} holds pickled Python objects ({found[1]}), which could run code when opened: "
                "save model.state_dict() alone"
            ) from error
        raise InputError(f"{path} is not a whole PyTorch file ({_first_line(error)}): copy or save it again") from error


def _read_torch(path: Path) -> dict[str, np.ndarray]:
    try:
        tensors, taken = _map_torch(path)
    except Exception:  # an old, unusual or damaged file, or no PyTorch: load_torch says what is wrong, if anything
        tensors, taken = state_dict_in(path, load_torch(path))
    if taken:
        logger.warning(taken)
    return tensors


def _map_torch(path: Path) -> tuple[dict[str, np.ndarray], str]:
    """`state_dict_in` a file in PyTorch's zip format, as views of the mapped file. Raises whatever it leads to."""
    import torch

    file = TorchMap(path)
    found, taken = _state_dict_in(path, torch.load(path, map_location="meta", weights_only=True))
    dtypes = {tensor.dtype: torch_to_numpy(torch.empty(0, dtype=tensor.dtype)).dtype for tensor in found.values()}
    return {name: file.array(tensor, dtypes[tensor.dtype]) for name, tensor in found.items()}, taken


def state_dict_in(path: Path, loaded: Any) -> tuple[dict[str, np.ndarray], str]:
    """The model's tensors in what was loaded from `path`, and a line on what was left out, "" if nothing.

    Raises InputError if there are none.
    """
    state_dict, taken = _state_dict_in(path, loaded)
    tensors = {}
    for name, tensor in state_dict.items():
        try:
            tensors[name] = torch_to_numpy(tensor)
        except (TypeError, RuntimeError) as error:  # sparse, quantized, without data
            raise InputError(f"{name} in {path} has no counterpart in NumPy ({_first_line(error)})") from error
    return tensors, taken


def _state_dict_in(path: Path, loaded: Any) -> tuple[dict[str, Any], str]:
    found = _find_state_dict(loaded)
    if found is None:
        raise InputError(f"{path} holds no state dict: save model.state_dict()")
    return found


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _find_state_dict(loaded: Any) -> tuple[dict[str, Any], str] | None:
    """The {name: tensor} dict itself, or the one or the two that a training checkpoint keeps under well-known names.

    With a line that says so if it isn't the dict itself.
    """
    import torch

    if not isinstance(loaded, dict):
        return None
    if loaded and all(isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in loaded.items()):
        return loaded, ""
    for container in _CONTAINERS:
        if container in loaded and (inner := _find_state_dict(loaded[container])) is not None:
            return inner[0], f"took the state dict under {container!r}, and nothing else of the checkpoint"
    for names in _PAIRS:
        encoder, decoder = (_find_state_dict(loaded.get(name)) for name in names)
        if encoder is not None and decoder is not None:
            halves = {"encoder": encoder[0], "decoder": decoder[0]}
            joined = {f"{half}.{name}": tensor for half, tensors in halves.items() for name, tensor in tensors.items()}
            under = f"{names[0]!r} and {names[1]!r}"
            return joined, f"joined the state dicts under {under}, and took nothing else of the checkpoint"
    return None


def to_numpy(array: Any) -> np.ndarray:
    """A torch tensor, or an array of JAX or NumPy, as NumPy's, with the same bits."""
    return torch_to_numpy(array) if hasattr(array, "detach") else np.asarray(array)


def torch_to_numpy(tensor: Any) -> np.ndarray:
    """A torch tensor as an array with the same bits."""
    import torch

    tensor = tensor.detach().cpu()
    name = str(tensor.dtype).removeprefix("torch.")
    if name in _THROUGH_INTEGERS:
        bits = tensor.contiguous().view(getattr(torch, _THROUGH_INTEGERS[name]))
        return bits.numpy().view(getattr(ml_dtypes, name))
    return tensor.numpy()


def numpy_to_torch(array: np.ndarray) -> Any:
    """An array as a torch tensor with the same bits and memory of its own."""
    import torch

    array = np.array(array, order="C")
    name = array.dtype.name
    if name in _THROUGH_INTEGERS:
        return torch.from_numpy(array.view(_THROUGH_INTEGERS[name])).view(getattr(torch, name))
    return torch.from_numpy(array)
