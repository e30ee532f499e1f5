"""What goes into and comes out of modules: arrays somewhere within tuples, dicts and dataclasses."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_tf.porting.files import to_numpy


def is_array(leaf: Any) -> bool:
    """Whether it is an array or tensor of numbers or truth values: of NumPy, JAX or PyTorch."""
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return False
    return not (isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def map_arrays(function: Callable[[str, Any], Any], tree: Any, label: str = "") -> Any:
    """The tree with function(label, array) in place of each array, and all else as it was.

    Labels are the indices and keys that lead to an array, joined by dots; that of an array alone is "0", as if it were
    the first of a tuple: `(output, weights)` of one framework and `output` of the other have their output in common.
    """
    if is_array(tree):
        return function(label or "0", tree)

    def inner(name: Any, value: Any) -> Any:
        own = str(name).replace(".", "\\.")  # or two labels could be one
        return map_arrays(function, value, f"{label}.{own}" if label else own)

    if isinstance(tree, Mapping):
        changed = {name: inner(name, value) for name, value in tree.items()}
        return changed if type(tree) is dict else type(tree)(**changed)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(inner(index, value) for index, value in enumerate(tree)))
    if isinstance(tree, tuple | list):
        return type(tree)(inner(index, value) for index, value in enumerate(tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree) if field.init]
        return dataclasses.replace(tree, **{name: inner(name, getattr(tree, name)) for name in names})
    return tree


def results_of(tree: Any) -> dict[str, Any]:
    """`arrays_of` what a module returns, with Python's numbers and truth values as arrays among them."""
    found = arrays_of(tree)
    if isinstance(tree, Mapping):
        members = tree.items()
    elif isinstance(tree, tuple | list):
        members = enumerate(tree)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        members = vars(tree).items()  # those too that are not given to its constructor
    else:
        members = [("0", tree)]
    for name, value in members:
        if is_array(value):
            found.setdefault(str(name), value)
        elif isinstance(value, bool | int | float):
            found[str(name)] = np.asarray(value)
    return found


def arrays_of(tree: Any) -> dict[str, Any]:
    """{label: array} of all arrays in the tree, in their order."""
    found: dict[str, Any] = {}

    def keep(label: str, array: Any) -> Any:
        found[label] = array
        return array

    map_arrays(keep, tree)
    return found


def all_to_numpy(tree: Any) -> Any:
    """The tree with every array of either framework as NumPy's."""
    return map_arrays(lambda _, array: to_numpy(array), tree)
