"""Weights between a PyTorch state dict and a Flax model, both ways, bit for bit.

Everywhere, `rename` is {PyTorch path: Flax path} for names that differ between the two models; `rename.Rename` says how
paths are written. A path None leaves out what PyTorch has and Flax, on purpose, has not.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx

from flax_tf.errors import InputError
from flax_tf.porting.files import to_numpy
from flax_tf.porting.memory import all_to_jax
from flax_tf.porting.names import strip_wrappers
from flax_tf.porting.tree import Slot, Tree

M = TypeVar("M", bound=nnx.Module)
Renames = Mapping[str, str | None] | None


class StateDictError(InputError):
    """The keys or shapes of a state dict do not fit the model. The message lists every one of them."""


def torch_modules(module: nnx.Module, rename: Renames = None) -> Iterator[tuple[str, nnx.Module]]:
    """Every module of the tree with its PyTorch path ("" for the root), parents before children.

    A module that is shared comes under each of its paths. The modules inside a layer that is one in PyTorch, such as
    the projections of `nnx.MultiHeadAttention`, do not come. Raises InputError for a `rename` that does not fit.
    """
    return ((torch, part) for torch, _, part in Tree(module, rename).modules)


def flax_paths(module: nnx.Module, rename: Renames = None) -> dict[str, str]:
    """{PyTorch path: NNX path} of every module that `torch_modules` gives; "" is the root."""
    return {torch: flax for torch, flax, _ in Tree(module, rename).modules}


def slots(model: nnx.Module, rename: Renames = None) -> dict[str, Slot]:
    """{PyTorch key: its place in the Flax model} for every parameter and buffer of the model.

    A variable that no rule names (a bare parameter, a buffer) keeps its attribute's name and its axes. The state of
    random generators, caches and sown intermediates are no part of it. Raises InputError for a `rename` that names
    nothing of the model, or gives two things one name.
    """
    return Tree(model, rename).slots


def torch_to_flax(state_dict: Mapping[str, Any], model: M, rename: Renames = None) -> M:
    """Fills the parameters and buffers of `model` from a PyTorch state dict, in place, and returns it.

    Args:
        state_dict: {PyTorch key: tensor, or array of any shape and dtype}. bfloat16 arrays have the dtype of
            `ml_dtypes`.
        model: any Flax model, or an abstract one from `nnx.eval_shape`, which is filled a few tensors at a time.
        rename: {PyTorch path: Flax path} for names that differ.

    Every tensor keeps its dtype and its bits. Keys of one tied parameter may be all there or some of them, with the
    same bits. Nothing is changed in the model unless everything fits. Raises StateDictError that lists all missing,
    unexpected, duplicate and misshapen keys and all ties that differ, sorted, and InputError for 64-bit tensors while
    JAX would cut them to 32 bits, and for a `rename` that does not fit the model.
    """
    tree = Tree(model, rename)
    names = strip_wrappers(state_dict, expected=tree.slots)
    names = {k: name for k, name in names.items() if name not in tree.ignored and not tree.rename.leaves_out(name)}
    state_dict = {key: to_numpy(state_dict[key]) for key in names}  # views of tensors, without a copy
    _check_fit(state_dict, names, tree.slots)
    _check_width(state_dict)
    parts = [part for key, name in names.items() for part in tree.slots[name].parts(state_dict[key])]
    for (variable, _), array in zip(parts, all_to_jax(view for _, view in parts), strict=True):
        variable.set_value(array)
    _free_dtypes(model)
    return model


def _free_dtypes(model: nnx.Module) -> None:
    """Lets every embedding of the model give out the dtype of its table.

    `nnx.Embed` fixes its output's dtype to that which the table is made with, so one that is filled with float64 would
    go on looking up float32. A dtype that was asked for, other than the table's first one, stays.
    """
    for _, layer in nnx.iter_modules(model):
        if isinstance(layer, nnx.Embed) and layer.dtype == layer.param_dtype:
            layer.dtype = None


def flax_to_torch(model: nnx.Module, rename: Renames = None) -> dict[str, np.ndarray]:
    """The PyTorch state dict of a Flax model: {PyTorch key: contiguous array}, dtypes and bits as they are.

    Like PyTorch's own it has every key of a tied parameter; one array is behind them all. It serves what is not
    weights too: gradients, or an optimizer's moments, merged into the model's graph. Raises InputError for a `rename`
    that does not fit the model.
    """
    result = {}
    places = slots(model, rename)
    for names in ties(places):
        result.update(dict.fromkeys(names, places[names[0]].to_torch()))
    return {name: result[name] for name in places}


def ties(places: Mapping[str, Slot]) -> list[list[str]]:
    """The names in groups of those that the same variables stand behind, most of them alone."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for name, slot in places.items():
        groups.setdefault(tuple(map(id, slot.variables)), []).append(name)
    return list(groups.values())


def _check_fit(state_dict: Mapping[str, np.ndarray], names: dict[str, str], places: Mapping[str, Slot]) -> None:
    found = {name: tuple(state_dict[key].shape) for key, name in names.items()}
    wanted = {name: slot.torch_shape for name, slot in places.items()}
    counts = Counter(names.values())
    tied = [group for group in ties(places) if len(group) > 1]
    told = {name for group in tied if found.keys() & set(group) for name in group}  # by another key of their tie
    problems = {
        "missing from the checkpoint": [
            f"{name} {wanted[name]}{_in_flax(name, places[name])}"
            for name in sorted(wanted.keys() - found.keys() - told)
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


def _in_flax(name: str, slot: Slot) -> str:
    return "" if slot.paths == (name,) else f", in Flax {', '.join(slot.paths)}"


def _same_bits(arrays: list[np.ndarray]) -> bool:
    return all(
        one.dtype == other.dtype
        # One place in memory, which is how PyTorch keeps tied parameters, needs no copies to compare.
        and (one.__array_interface__ == other.__array_interface__ or one.tobytes() == other.tobytes())
        for one, other in pairwise(arrays)
    )


def _check_width(state_dict: Mapping[str, np.ndarray]) -> None:
    if jax.config.read("jax_enable_x64"):
        return
    wide = sorted(key for key, value in state_dict.items() if value.dtype.name in ("float64", "int64", "uint64"))
    if wide:
        raise InputError(
            f"{len(wide)} tensors are 64 bits wide (first: {wide[0]}, {state_dict[wide[0]].dtype}) and JAX would cut "
            "them to 32: set JAX_ENABLE_X64=1, or ask for dtype='float32'"
        )
