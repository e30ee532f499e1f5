"""Weights between a PyTorch state dict and a Flax model, both ways, bit for bit."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_tf.errors import InputError
from flax_tf.porting.names import strip_wrappers
from flax_tf.porting.rules import Tensor, rule_of

M = TypeVar("M", bound=nnx.Module)


class StateDictError(InputError):
    """The keys or shapes of a state dict do not fit the model. The message lists every one of them."""


def torch_modules(module: nnx.Module, prefix: str = "") -> Iterator[tuple[str, nnx.Module]]:
    """Every module of the tree with its PyTorch path ("" for the root), parents before children.

    NNX keeps the members of a `Sequential` in an attribute `layers` that has no counterpart in PyTorch's names.
    """
    yield prefix, module
    for name, child in nnx.iter_children(module):
        if not isinstance(child, nnx.Module):  # a variable
            continue
        if isinstance(module, nnx.Sequential):
            yield from (pair for pair in torch_modules(child, prefix) if pair[1] is not child)
        else:
            yield from torch_modules(child, f"{prefix}.{name}" if prefix else str(name))


def slots(model: nnx.Module) -> dict[str, tuple[nnx.Variable, Tensor]]:
    """{PyTorch key: (Flax variable, its row in the rules)} for every parameter and buffer of the model.

    A variable that a module holds itself, outside the rules (a bare parameter, a buffer), keeps its attribute's name
    and its axes.
    """
    found = {}
    for path, module in torch_modules(model):
        rule = {row.flax: row for row in rule_of(module)}
        members = enumerate(module) if isinstance(module, nnx.List) else vars(module).items()
        for name, variable in members:
            if isinstance(variable, nnx.Variable) and not isinstance(variable, nnx.RngState):
                row = rule.get(name, Tensor(str(name), str(name)))
                found[f"{path}.{row.torch}" if path else row.torch] = (variable, row)
    return found


def torch_shape(variable: nnx.Variable, row: Tensor) -> tuple[int, ...]:
    """The shape that PyTorch gives to the tensor in this variable."""
    shape = variable.get_value().shape
    return shape if row.axes is None else tuple(shape[i] for i in np.argsort(row.axes))


def torch_to_flax(state_dict: Mapping[str, np.ndarray], model: M) -> M:
    """Fills the parameters and buffers of `model` from a PyTorch state dict, in place, and returns it.

    Args:
        state_dict: {PyTorch key: array of any shape and dtype}. bfloat16 arrays have the dtype of `ml_dtypes`.
        model: a Flax model, or an abstract one from `nnx.eval_shape`, which is filled one tensor at a time.

    Every tensor keeps its dtype and its bits. Keys of one tied parameter may be all there or some of them, with the
    same bits. Nothing is changed in the model unless everything fits. Raises StateDictError that lists all missing,
    unexpected, duplicate and misshapen keys and all ties that differ, sorted, and InputError for 64-bit tensors while
    JAX would cut them to 32 bits.
    """
    places = slots(model)
    names = strip_wrappers(state_dict, expected=places)
    _check_fit(state_dict, names, places)
    _check_width(state_dict)
    for key, name in names.items():
        variable, row = places[name]
        value = state_dict[key]
        # jnp.array copies: the value may be a view of a file or of memory that PyTorch goes on training.
        variable.set_value(jnp.array(value if row.axes is None else value.transpose(row.axes)))
    return model


def flax_to_torch(model: nnx.Module) -> dict[str, np.ndarray]:
    """The PyTorch state dict of a Flax model: {PyTorch key: contiguous array}, dtypes and bits as they are.

    Like PyTorch's own it has every key of a tied parameter; one array is behind them all.
    """
    result = {}
    places = slots(model)
    for names in ties(places):
        variable, row = places[names[0]]
        value = np.asarray(variable.get_value())
        # Not np.ascontiguousarray, which makes a vector of a scalar.
        array = np.asarray(value if row.axes is None else value.transpose(np.argsort(row.axes)), order="C")
        result.update(dict.fromkeys(names, array))
    return {name: result[name] for name in places}


def ties(places: dict[str, tuple[nnx.Variable, Tensor]]) -> list[list[str]]:
    """The names in groups of those that one variable stands behind, most of them alone."""
    groups: dict[int, list[str]] = {}
    for name, (variable, _) in places.items():
        groups.setdefault(id(variable), []).append(name)
    return list(groups.values())


def _check_fit(
    state_dict: Mapping[str, np.ndarray], names: dict[str, str], places: dict[str, tuple[nnx.Variable, Tensor]]
) -> None:
    found = {name: tuple(state_dict[key].shape) for key, name in names.items()}
    wanted = {name: torch_shape(*place) for name, place in places.items()}
    counts = Counter(names.values())
    tied = [group for group in ties(places) if len(group) > 1]
    told = {name for group in tied if found.keys() & set(group) for name in group}  # by another key of their tie
    problems = {
        "missing from the checkpoint": [
            f"{name} {wanted[name]}" for name in sorted(wanted.keys() - found.keys() - told)
        ],
        "unexpected in the checkpoint": [f"{name} {found[name]}" for name in sorted(found.keys() - wanted.keys())],
        "duplicate in the checkpoint": [
            f"{name}, from {', '.join(sorted(key for key, own in names.items() if own == name))}"
            for name in sorted(counts)
            if counts[name] > 1
        ],
        "of another shape": [
            f"{name}: checkpoint {found[name]}, model {wanted[name]}"
            for name in sorted(found.keys() & wanted.keys())
            if found[name] != wanted[name]
        ],
        "tied in the model, but different in the checkpoint": [
            ", ".join(group)
            for group in tied
            if not _same_bits([state_dict[k] for k, n in names.items() if n in group])
        ],
    }
    if any(problems.values()):
        lines = ["the checkpoint does not fit the model:"]
        for kind, entries in problems.items():
            if entries:
                lines += [f"  {kind} ({len(entries)}):", *(f"    {entry}" for entry in entries)]
        raise StateDictError("\n".join(lines))


def _same_bits(arrays: list[np.ndarray]) -> bool:
    return all(array.dtype == arrays[0].dtype and array.tobytes() == arrays[0].tobytes() for array in arrays[1:])


def _check_width(state_dict: Mapping[str, np.ndarray]) -> None:
    if jax.config.read("jax_enable_x64"):
        return
    wide = sorted(key for key, value in state_dict.items() if value.dtype.name in ("float64", "int64", "uint64"))
    if wide:
        raise InputError(
            f"{len(wide)} tensors are 64 bits wide (first: {wide[0]}, {state_dict[wide[0]].dtype}) and JAX would cut "
            "them to 32: set JAX_ENABLE_X64=1, or ask for dtype='float32'"
        )
