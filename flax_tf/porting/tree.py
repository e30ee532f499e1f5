"""A Flax model as PyTorch would name it: the path of every module, and the key of every parameter and buffer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
from flax import nnx

from flax_tf.errors import InputError
from flax_tf.porting.memory import copied, to_jax
from flax_tf.porting.rename import Path, Rename, join, split
from flax_tf.porting.rules import Tensor, rule_of

# State of a run, which PyTorch does not keep in its modules.
_TRANSIENT = (nnx.RngState, nnx.Cache, nnx.Intermediate)


@dataclass(frozen=True)
class Slot:
    """Where one PyTorch tensor lives in a Flax model."""

    variables: tuple[nnx.Variable, ...]
    """Most often one; several where PyTorch packs them into one tensor."""
    paths: tuple[str, ...]
    """Theirs, as NNX has them."""
    row: Tensor

    @property
    def torch_shape(self) -> tuple[int, ...]:
        """The shape of the PyTorch tensor. The model may be abstract."""
        shapes = [self.row.torch_shape(variable.get_value().shape) for variable in self.variables]
        return shapes[0] if len(shapes) == 1 else (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def to_torch(self) -> np.ndarray:
        """The PyTorch tensor, contiguous, with the dtype and the bits of the variables."""
        parts = [self.row.to_torch(np.asarray(variable.get_value())) for variable in self.variables]
        array = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return array if array.flags.c_contiguous else copied(array)

    def parts(self, array: np.ndarray) -> Iterator[tuple[nnx.Variable, np.ndarray]]:
        """Each variable with its part, in its layout, of a PyTorch tensor of shape `torch_shape`."""
        start = 0
        for variable in self.variables:
            shape = variable.get_value().shape
            part = array
            if len(self.variables) > 1:
                stop = start + self.row.torch_shape(shape)[0]
                part, start = array[start:stop], stop
            yield variable, self.row.to_flax(part, shape)

    def fill(self, array: np.ndarray) -> None:
        """Sets the variables from a PyTorch tensor of shape `torch_shape`, whose dtype and bits they take over."""
        for variable, part in self.parts(array):
            variable.set_value(to_jax(part))


class Tree:
    """The walk through a Flax model, parents before children; one under several paths is met under each.

    Raises InputError for a `rename` that names nothing of the model, gives two things one PyTorch name, or leaves out
    what the model has.
    """

    def __init__(self, model: nnx.Module, rename: Mapping[str, str | None] | None = None):
        self.rename = Rename(rename)
        self.modules: list[tuple[str, str, nnx.Module]] = []
        """(PyTorch path, NNX path, module), without the inner modules of a layer that is one layer in PyTorch."""
        self.slots: dict[str, Slot] = {}
        """By PyTorch key."""
        self.ignored: set[str] = set()
        """PyTorch keys that have no counterpart in Flax."""
        self._inner: set[Path] = set()  # NNX paths of variables that a rule has placed, and of the modules above them
        root = self.rename.torch_path(())
        self._walk(model, () if root is None else root, ())
        self.rename.check_used()
        self._check_names()

    def _walk(self, node: Any, torch: Path, flax: Path) -> None:
        """A node is a module, or a container that has no place in PyTorch's names but its members' indices or keys."""
        if isinstance(node, nnx.Module) and flax not in self._inner:
            self.modules.append((join(torch), join(flax), node))
        for row in rule_of(node):
            self._place(node, row, torch, flax)
        for name, child in _members(node):
            path, own = (*flax, name), (*torch, name)
            # NNX keeps the members of a `Sequential` in an attribute that has no counterpart in PyTorch's names.
            if isinstance(node, nnx.Sequential) and name == "layers":
                self._inner.add(path)
                own = torch
            given = self.rename.torch_path(path)
            own = own if given is None else given
            if not isinstance(child, nnx.Variable):
                self._walk(child, own, path)
            elif path not in self._inner and not isinstance(child, _TRANSIENT):
                self._add(join(own), Slot((child,), (join(path),), Tensor(name, name)))

    def _place(self, layer: Any, row: Tensor, torch: Path, flax: Path) -> None:
        """Puts the tensor of a row where the rule says, unless `rename` says otherwise of a part of the layer."""
        if not row.places:
            self.ignored.add(join((*torch, row.torch)))
            return
        paths = [(*flax, *split(place)) for place in row.places]
        if not self._inner.isdisjoint(paths):  # placed by the rule of a layer around this one
            return
        variables: tuple[Any, ...] = tuple(reduce(_attribute, split(place), layer) for place in row.places)
        if not all(isinstance(variable, nnx.Variable) for variable in variables):
            return
        above = {path[:end] for path in paths for end in range(len(flax) + 1, len(path))}
        given = [self.rename.torch_path(path) for path in paths]
        if any(self.rename.torch_path(path) for path in above) or (len(given) > 1 and any(given)):
            return
        self._inner.update(paths, above)
        key = given[0] or (*torch, row.torch)
        self._add(join(key), Slot(variables, tuple(map(join, paths)), row))

    def _add(self, key: str, slot: Slot) -> None:
        if key in self.slots:
            _one_name(key, self.slots[key].paths[0], slot.paths[0])
        self.slots[key] = slot

    def _check_names(self) -> None:
        seen: dict[str, str] = {}
        for torch, flax, _ in self.modules:
            if torch in seen:
                _one_name(torch, seen[torch], flax)
            seen[torch] = flax
        for key, slot in self.slots.items():
            if self.rename.leaves_out(key):
                raise InputError(
                    f"rename says that Flax has no {key!r}, but it is {slot.paths[0]!r} of the Flax model: drop None"
                )


def _members(node: Any) -> Iterator[tuple[str, Any]]:
    """The variables and the nodes of the tree directly in a node, by attribute, index or key."""
    if isinstance(node, nnx.Pytree):
        pairs = vars(node).items()
    else:
        pairs = node.items() if isinstance(node, dict) else enumerate(node)
    for name, child in pairs:
        if isinstance(child, nnx.Variable | nnx.Pytree | dict | list | tuple):
            yield str(name), child


def _attribute(node: Any, name: str) -> Any:
    return getattr(node, name, None)


def _one_name(key: str, one: str, other: str) -> None:
    raise InputError(f"{one!r} and {other!r} of the Flax model would both be PyTorch's {key!r}: rename one of them")
