"""The state of an optimizer between `torch.optim` and optax, both ways: moments, counts of steps, learning rate."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from flax_tf.errors import InputError
from flax_tf.porting.convert import flax_to_torch, slots
from flax_tf.porting.files import numpy_to_torch, to_numpy
from flax_tf.porting.param_groups import MOST_STEPS, Kind, kind_of, param_groups

Rename = Mapping[str, str | None]


def torch_to_optax(
    optimizer_state_dict: Mapping[str, Any],
    model: nnx.Module,
    opt_state: Any,
    *,
    names: Iterable[str] | None = None,
    rename: Rename | None = None,
    step: int | None = None,
) -> Any:
    """An optax state that goes on where a `torch.optim` Adam, AdamW or SGD stopped.

    Args:
        optimizer_state_dict: `optimizer.state_dict()`, of tensors or NumPy arrays.
        model: the Flax model of the same architecture; it may be abstract.
        opt_state: a fresh state for `nnx.state(model, nnx.Param)`, or that of an `nnx.Optimizer`: any tree of `chain`,
            `masked`, `multi_transform`, `inject_hyperparams` and `MultiSteps`. It stays as it is; to go on with an
            `nnx.Optimizer`, `nnx.update(optimizer.opt_state, nnx.state(filled))`.
        names, rename: as in `param_groups`.
        step: the number of steps done, which schedules count. None: Adam's own count; PyTorch's SGD has none.

    A moment takes the dtype of its place in `opt_state`, and keeps its bits if it is the same. An injected learning
    rate is set. Momentum that SGD has not yet is zero, which is PyTorch's meaning. Nesterov's momentum has the same
    state as the other: that both sides have the same is for the caller to see.
    Raises InputError for what has no counterpart: other optimizers, amsgrad, maximize, dampening, and counts of steps
    that differ between parameters (optax has one); and for a state that is incomplete or of another model.
    """
    kind = kind_of(optimizer_state_dict)
    groups = param_groups(optimizer_state_dict, model, names=names, rename=rename)
    state = _by_name(optimizer_state_dict, groups)
    count = _adam_count(state) if kind.name == "Adam" else None
    if not _nodes(opt_state, kind) and any(group.get("momentum", 1) for group in groups):
        raise InputError(f"the PyTorch state is of {kind.name}, and the optax state has no {kind.node.__name__}")
    rates = {float(group["lr"]) for group in groups}
    fill = _Filling(
        kind=kind,
        moments={field: _moments(model, rename, state, kind, name) for field, name in kind.moments.items()},
        count=count,
        step=count if step is None else step,
        rate=rates.pop() if len(rates) == 1 else None,
    )
    return fill(opt_state)


def optax_to_torch(
    opt_state: Any,
    model: nnx.Module,
    optimizer_state_dict: Mapping[str, Any],
    *,
    names: Iterable[str] | None = None,
    rename: Rename | None = None,
) -> dict[str, Any]:
    """A state dict with which a `torch.optim` Adam, AdamW or SGD goes on where optax stopped.

    Args:
        opt_state: as in `torch_to_optax`, of a run of `model`.
        model: the Flax model.
        optimizer_state_dict: that of the optimizer that shall go on, fresh or not: its groups and settings are kept,
            except that an injected learning rate of optax is set.
        names, rename: as in `param_groups`.

    Moments keep their dtypes and bits; counts of steps are float32, as PyTorch's. Raises InputError where one side's
    optimizer isn't the other's, or optax is in the middle of an accumulated step.
    """
    kind = kind_of(optimizer_state_dict)
    groups = param_groups(optimizer_state_dict, model, names=names, rename=rename)
    if any(int(_scalar(node.mini_step)) for node in _find(opt_state, optax.MultiStepsState)):
        raise InputError("optax is in the middle of an accumulated step, which PyTorch can't finish: stop after it")
    nodes = _nodes(opt_state, kind)
    keeps = [kind.name == "Adam" or bool(group["momentum"]) for group in groups]
    if any(keeps) and not nodes:
        raise InputError(f"the PyTorch optimizer is of {kind.name}, and the optax state has no {kind.node.__name__}")
    counts = {int(_scalar(node.count)) for node in nodes} if kind.name == "Adam" else set()
    if len(counts) > 1:
        raise InputError(f"the parts of the optax state have done different numbers of steps: {sorted(counts)}")
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    moments = {}
    for field, name in kind.moments.items() if nodes else ():
        leaves = _joined([getattr(node, field) for node in nodes])
        tree = jax.tree.unflatten(jax.tree.structure(params), leaves)
        moments[name] = flax_to_torch(nnx.merge(graph, tree, rest), rename)
    result = copy.deepcopy(dict(optimizer_state_dict))
    result["state"] = {}
    for group, named, kept in zip(result["param_groups"], groups, keeps, strict=True):
        for node in _find(opt_state, optax.InjectStatefulHyperparamsState):
            if "learning_rate" in node.hyperparams:
                group["lr"] = _scalar(node.hyperparams["learning_rate"])
        for index, key in zip(group["params"], named["params"], strict=True) if kept else ():
            result["state"][index] = {name: numpy_to_torch(arrays[key]) for name, arrays in moments.items()}
            if kind.name == "Adam":
                result["state"][index]["step"] = numpy_to_torch(np.array(max(counts), np.float32))
    return result


@dataclass(frozen=True)
class _Filling:
    """Puts moments and counts into the states in a tree of optax's."""

    kind: Kind
    moments: Mapping[str, Sequence[jax.Array]]
    """{field: in the order of the leaves of the parameters}."""
    count: int | None
    """Adam's."""
    step: int | None
    """That of schedules."""
    rate: float | None
    """The learning rate, if it is one."""

    def __call__(self, tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(self._node, tree, is_leaf=self._is_known)

    def _is_known(self, node: Any) -> bool:
        known = (self.kind.node, optax.InjectStatefulHyperparamsState, optax.MultiStepsState)
        return isinstance(node, known) or _only_counts(node)

    def _node(self, path: Any, node: Any) -> Any:
        if isinstance(node, self.kind.node):
            node = node._replace(**{field: _put(getattr(node, field), new) for field, new in self.moments.items()})
            return node if self.count is None else node._replace(count=_set(node.count, self.count))
        if isinstance(node, optax.InjectStatefulHyperparamsState):
            hyperparams = dict(node.hyperparams)
            if "learning_rate" in hyperparams:
                if self.rate is None:
                    raise InputError("the PyTorch groups have different learning rates, and the optax state has one")
                hyperparams["learning_rate"] = _set(hyperparams["learning_rate"], self.rate)
            return node._replace(
                count=self._counted(node.count),
                hyperparams=hyperparams,
                hyperparams_states=self(node.hyperparams_states),
                inner_state=self(node.inner_state),
            )
        if isinstance(node, optax.MultiStepsState):
            return node._replace(
                gradient_step=self._counted(node.gradient_step), inner_opt_state=self(node.inner_opt_state)
            )
        if _only_counts(node):
            return node._replace(count=self._counted(node.count))
        place = jax.tree_util.keystr(path)
        raise InputError(f"{place} of the optax state has no counterpart in the PyTorch state of {self.kind.name}")

    def _counted(self, tree: Any) -> Any:
        if self.step is None:
            raise InputError("PyTorch's SGD doesn't count its steps, and the optax state does: pass step, their number")
        return _set(tree, self.step)


def _by_name(optimizer_state_dict: Mapping[str, Any], groups: list[dict[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """{key: what PyTorch keeps for the parameter}."""
    state = optimizer_state_dict["state"]
    return {
        key: state.get(index, {})
        for group, named in zip(optimizer_state_dict["param_groups"], groups, strict=True)
        for index, key in zip(group["params"], named["params"], strict=True)
    }


def _adam_count(state: Mapping[str, Mapping[str, Any]]) -> int:
    """The number of steps, which must be one; PyTorch has no state for parameters that never got a gradient."""
    never = [key for key, entry in state.items() if not entry]
    if never and len(never) < len(state):
        raise InputError(
            f"the PyTorch state has nothing for {len(never)} of {len(state)} parameters (first: {never[0]}), which "
            "never got a gradient: their Adam is at step 0, and optax has one count for all parameters"
        )
    told = {key: float(_entry(key, entry, "step")) for key, entry in state.items() if entry}
    for key, count in told.items():
        if not 0 <= count <= MOST_STEPS:
            raise InputError(f"PyTorch's Adam is at step {count} for {key}, which is no number of steps")
    counts = {key: int(count) for key, count in told.items()}
    for key, count in counts.items():
        if count != max(counts.values()):
            raise InputError(
                f"PyTorch's Adam is at step {count} for {key} and at {max(counts.values())} for others, and optax has "
                "one count for all parameters"
            )
    return max(counts.values(), default=0)


def _entry(key: str, entry: Mapping[str, Any], name: str) -> Any:
    if name not in entry:
        raise InputError(
            f"the PyTorch state of {key} has no {name}: it is incomplete, save optimizer.state_dict() again"
        )
    return entry[name]


def _moments(
    model: nnx.Module, rename: Rename | None, state: Mapping[str, Mapping[str, Any]], kind: Kind, name: str
) -> list[jax.Array]:
    """One moment of every parameter with Flax's axes, in the order of the parameters' leaves."""
    room: Any = nnx.eval_shape(lambda model: model, model)
    for key, slot in slots(room, rename).items():
        if key in state:
            entry = state[key]
            value = _entry(key, entry, name) if entry and kind.name == "Adam" else entry.get(name)
            slot.fill(np.zeros(slot.torch_shape, np.float32) if value is None else to_numpy(value))
    return jax.tree.leaves(nnx.state(room, nnx.Param))


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _put(tree: Any, values: Sequence[jax.Array]) -> Any:
    """The tree with other leaves, whose dtypes stay; masked places stay."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_masked)
    fits = len(leaves) == len(values)
    if not fits or any(not _is_masked(a) and a.shape != b.shape for a, b in zip(leaves, values, strict=True)):
        raise InputError(
            "the optax state is not that of the model's parameters: init it with nnx.state(model, nnx.Param)"
        )
    new = [a if _is_masked(a) else b.astype(a.dtype) for a, b in zip(leaves, values, strict=True)]
    return jax.tree.unflatten(structure, new)


def _joined(trees: Sequence[Any]) -> list[Any]:
    """The leaves of trees of which each masks what is in the others."""
    rows = zip(*(jax.tree.leaves(tree, is_leaf=_is_masked) for tree in trees), strict=True)
    found = [[leaf for leaf in row if not _is_masked(leaf)] for row in rows]
    if any(len(row) != 1 for row in found):
        raise InputError("the optax state does not have each moment of every parameter once")
    return [row[0] for row in found]


def _set(tree: Any, value: float) -> Any:
    """The scalar, within what may be wrapped around it."""
    return jax.tree.map(lambda leaf: jnp.asarray(value, leaf.dtype), tree)


def _scalar(tree: Any) -> Any:
    return np.asarray(jax.tree.leaves(tree)[0]).item()


def _only_counts(node: Any) -> bool:
    """A schedule's state."""
    return getattr(node, "_fields", None) == ("count",)


def _find(tree: Any, kind: Any) -> list[Any]:
    """The outermost nodes of a class."""
    is_kind: Callable[[Any], bool] = lambda node: isinstance(node, kind)  # noqa: E731
    return [node for node in jax.tree.leaves(tree, is_leaf=is_kind) if is_kind(node)]


def _nodes(opt_state: Any, kind: Kind) -> list[Any]:
    return _find(opt_state, kind.node)
