"""PyTorch's float64 results, on disk: what every other run is measured against, now or on another machine."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from safetensors import safe_open

from flax_tf.errors import InputError
from flax_tf.files import replacing
from flax_tf.parity.dropout import Mask, Masks
from flax_tf.parity.events import GRADIENT, INPUT_GRADIENT, OUTPUT, OUTPUT_GRADIENT, Call, call_of, kind_of
from flax_tf.parity.tolerances import norm
from flax_tf.porting.files import SAFETENSORS_DTYPES, read_weights

FORMAT = "flax_tf parity 1"


class Spool(Mapping[str, np.ndarray]):
    """Arrays in a temporary file: written one after the other, read one at a time, never all in memory."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._places: dict[str, tuple[np.dtype, tuple[int, ...], int]] = {}

    def put(self, name: str, array: np.ndarray) -> None:
        """Appends an array; a second one of the same name stands for the first."""
        offset = self._file.seek(0, os.SEEK_END)
        # ascontiguousarray makes a vector of a scalar, whose bytes could not be viewed.
        self._file.write(np.ascontiguousarray(array).view(np.uint8).data if array.size else b"")
        self._places[name] = (array.dtype, array.shape, offset)

    def __getitem__(self, name: str) -> np.ndarray:
        dtype, shape, offset = self._places[name]
        self._file.seek(offset)
        size = int(np.prod(shape)) * dtype.itemsize
        return np.frombuffer(self._file.read(size), dtype).reshape(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


@dataclass
class Truth:
    """What PyTorch computes in float64, and how far it is from that in other precisions."""

    arrays: Mapping[str, np.ndarray]
    """By the names of `events`: inputs, outputs and gradients of all calls, in the order of execution."""
    weights: Mapping[str, np.ndarray]
    """The state dict, as it is."""
    arguments: dict[str, Any]
    """The inputs that the model was given: `args` and `kwargs`, with NumPy arrays."""
    cotangents: dict[str, np.ndarray]
    """Of every floating-point output, by its label; none if PyTorch gives none of them a gradient."""
    layers: dict[str, str] = field(default_factory=dict)
    """The class of every submodule, by its path."""
    trained: list[str] = field(default_factory=list)
    """The keys of the parameters."""
    frozen: list[str] = field(default_factory=list)
    """The keys of those that PyTorch does not train."""
    masks: Masks | None = None
    """What dropout kept, in training mode; None in evaluation mode."""
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    """PyTorch's own errors: by precision, then by name."""
    nudged: dict[str, dict[str, float]] = field(default_factory=dict)
    """The largest of them over this run and others, whose parameters were moved by a rounding."""
    settings: dict[str, str] = field(default_factory=dict)

    @cached_property
    def calls(self) -> list[Call]:
        """Every call in the order in which they ended: children before parents."""
        return list(dict.fromkeys(call_of(name)[0] for name in self.arrays if kind_of(name) == OUTPUT))

    @cached_property
    def gradient_norm(self) -> float:
        """The norm of all parameters' gradients together."""
        names = (name for name in self.arrays if kind_of(name) == GRADIENT)
        return float(np.sqrt(sum(norm(self.arrays[name]) ** 2 for name in names)))

    @cached_property
    def call_gradient_norm(self) -> float:
        """The largest norm of a gradient that went into or out of a submodule."""
        names = (name for name in self.arrays if kind_of(name) in (INPUT_GRADIENT, OUTPUT_GRADIENT))
        return float(max((norm(self.arrays[name]) for name in names), default=0.0))


def check_suffix(path: str | os.PathLike) -> None:
    """Raises InputError for a path that names another kind of file, or a directory."""
    if Path(path).suffix != ".safetensors" or Path(path).is_dir():
        raise InputError(f"{path} is no place for what parity.record writes: name a .safetensors file")


def write_truth(truth: Truth, path: str | os.PathLike) -> None:
    """Writes one safetensors file, in one move when it is complete. Raises OSError if it can't be written."""
    leaves: dict[str, np.ndarray] = {}
    masks = None
    if truth.masks is not None:
        masks = {path: [(mask.keep, mask.rate) for mask in drawn] for path, drawn in truth.masks.items()}
    tree = _pack({"arguments": truth.arguments, "cotangents": truth.cotangents, "masks": masks}, leaves)
    groups = {"weight": truth.weights, "array": truth.arrays, "leaf": leaves}
    about = {"tree": tree} | {
        name: getattr(truth, name) for name in ("layers", "trained", "frozen", "errors", "nudged", "settings")
    }
    header: dict[str, Any] = {"__metadata__": {"format": FORMAT, "about": json.dumps(about)}}
    names = {dtype: name for name, dtype in ((n, np.dtype(d)) for n, d in SAFETENSORS_DTYPES.items())}
    offset = 0
    for group, arrays in groups.items():
        for name in arrays:
            array = arrays[name]
            end = offset + array.nbytes
            header[f"{group}:{name}"] = {
                "dtype": names[array.dtype], "shape": list(array.shape), "data_offsets": [offset, end]
            }  # fmt: skip
            offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    # Not safetensors' own save_file, which holds all tensors in memory at once.
    with replacing(path) as fresh, fresh.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for arrays in groups.values():
            for name in arrays:
                file.write(np.asarray(arrays[name], order="C").tobytes())


def read_truth(path: str | os.PathLike) -> Truth:
    """What `write_truth` wrote, mapped into memory. Raises InputError if it is another file, or not whole."""
    check_suffix(path)
    tensors = read_weights(path)
    with safe_open(path, "np") as file:
        metadata = file.metadata() or {}
    if metadata.get("format") != FORMAT:
        raise InputError(f"{path} was not recorded by parity.record: it holds other tensors")
    about = json.loads(metadata["about"])
    groups: dict[str, dict[str, np.ndarray]] = {"weight": {}, "array": {}, "leaf": {}}
    for full, array in tensors.items():
        group, name = full.split(":", 1)
        groups[group][name] = array
    tree = _unpack(about.pop("tree"), groups["leaf"])
    if tree["masks"] is not None:
        tree["masks"] = {path: [Mask(*mask) for mask in drawn] for path, drawn in tree["masks"].items()}
    return Truth(arrays=groups["array"], weights=groups["weight"], **tree, **about)


def _pack(tree: Any, leaves: dict[str, np.ndarray]) -> Any:
    """The tree as JSON, its arrays put into `leaves`. Raises InputError for what is neither."""
    if isinstance(tree, np.ndarray | np.generic):
        name = str(len(leaves))
        leaves[name] = np.asarray(tree)
        return {"array": name}
    if isinstance(tree, dict):
        return {"dict": {name: _pack(value, leaves) for name, value in tree.items()}}
    if isinstance(tree, tuple | list):
        return {"tuple" if isinstance(tree, tuple) else "list": [_pack(value, leaves) for value in tree]}
    if tree is None or isinstance(tree, bool | int | float | str):
        return {"value": tree}
    raise InputError(f"an argument of type {type(tree).__name__} can't be recorded: give arrays, numbers and strings")


def _unpack(packed: dict[str, Any], leaves: Mapping[str, np.ndarray]) -> Any:
    ((kind, value),) = packed.items()
    match kind:
        case "array":
            return leaves[value]
        case "dict":
            return {name: _unpack(inner, leaves) for name, inner in value.items()}
        case "tuple":
            return tuple(_unpack(inner, leaves) for inner in value)
        case "list":
            return [_unpack(inner, leaves) for inner in value]
    return value
