"""State dicts of `torch.optim` optimizers: whose they are, and which parameter each of their numbers means."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import optax
from flax import nnx

from flax_tf.errors import InputError
from flax_tf.porting.convert import slots
from flax_tf.porting.names import strip_wrappers


@dataclass(frozen=True)
class Kind:
    """A family of optimizers: one state in PyTorch, one in optax."""

    name: str
    settings: frozenset[str]
    """What the parameter groups of this family have, and no others."""
    node: Any
    """The class of optax's state."""
    moments: Mapping[str, str]
    """{field of optax's state: PyTorch's name}."""


KINDS = (
    # AdamW too
    Kind(
        "Adam",
        frozenset({"betas", "eps", "weight_decay", "amsgrad"}),
        optax.ScaleByAdamState,
        {"mu": "exp_avg", "nu": "exp_avg_sq"},
    ),
    Kind(
        "SGD",
        frozenset({"momentum", "dampening", "weight_decay", "nesterov"}),
        optax.TraceState,
        {"trace": "momentum_buffer"},
    ),
)
# What optax's counts, which are int32, can hold.
MOST_STEPS = 2**31 - 1
_NUMBERS = ("lr", "weight_decay", "eps", "momentum", "betas")
_HINT = (
    "give the optimizer model.named_parameters() when it is made, or pass names, in the order in which it got the "
    "parameters"
)


def kind_of(optimizer_state_dict: Mapping[str, Any]) -> Kind:
    """Which family wrote the state. Raises InputError if it, or one of its settings, has no counterpart in optax."""
    groups = _groups(optimizer_state_dict)
    kinds = [kind for kind in KINDS if all(kind.settings <= group.keys() for group in groups)]
    if len(kinds) != 1:
        raise InputError("the optimizer state is of neither Adam, AdamW nor SGD: only theirs can be carried over")
    for group in groups:
        for setting in _NUMBERS:
            if setting in group and not _are_numbers(group[setting]):
                raise InputError(
                    f"the PyTorch optimizer has {setting}={group[setting]}, which must be of finite numbers of at "
                    "least 0: set it in the optimizer's param_groups, and save its state_dict again"
                )
    for group in groups:
        for setting in ("amsgrad", "maximize"):
            if group.get(setting):
                raise InputError(f"the PyTorch optimizer has {setting}=True, which has no counterpart in optax's state")
        if group.get("momentum") and group["dampening"]:
            raise InputError(
                f"the PyTorch optimizer has dampening={group['dampening']}, and optax's momentum has none: only 0 can "
                "be carried over"
            )
    return kinds[0]


def param_groups(
    optimizer_state_dict: Mapping[str, Any],
    model: nnx.Module,
    *,
    names: Iterable[str] | None = None,
    rename: Mapping[str, str | None] | None = None,
) -> list[dict[str, Any]]:
    """The parameter groups with the parameters' keys under "params" in place of numbers; lr, betas and all else as is.

    Args:
        optimizer_state_dict: `optimizer.state_dict()` of a `torch.optim` optimizer.
        model: the Flax model of the same architecture.
        names: PyTorch's names of the parameters, in the order of `named_parameters()` or in the one in which the
            optimizer got them; the keys of the model's PyTorch state dict will do. None: the state dict holds them.
        rename: as in `torch_to_flax`.

    A state dict holds the names itself if its optimizer was given named parameters. Else it is understood where its
    groups follow `names`, or are two, of the matrices (two axes or more) and of the rest, and each follows `names`.
    The shapes of the moments must be those of the model. A tied parameter has one of its keys.
    Raises InputError if the parameters can't be told.
    """
    groups = _groups(optimizer_state_dict)
    state = optimizer_state_dict["state"]
    indices = [index for group in groups for index in group["params"]]
    unknown = [index for index in state if index not in set(indices)]
    if unknown:
        raise InputError(f"the optimizer state has moments of {unknown[0]!r}, which is in none of its param_groups")
    first, shapes = _parameters(model, rename)
    found = [_shape(state.get(index, {})) for index in indices]
    own = [name for group in groups for name in group.get("param_names", [])]
    if all(isinstance(index, str) for index in indices):  # as torch.distributed.checkpoint writes them
        own = indices
    if own:
        order = _bare(own, first)
    elif names is not None:
        order = _guess(groups, _bare(names, first), shapes, found)
    else:  # the Flax model's order is another, and queries, keys and values have one shape
        raise InputError(f"the optimizer state doesn't name its parameters: {_HINT}")
    if len(order) != len(indices):
        raise InputError(f"the optimizer has {len(indices)} parameters and the model {len(shapes)}: {_HINT}")
    for name, shape in zip(order, found, strict=True):
        if shape not in (None, shapes[name]):
            raise InputError(f"the optimizer's moments of {name} are {shape}, and the model's {shapes[name]}: {_HINT}")
    untrained = sorted(shapes.keys() - set(order))
    if untrained:
        raise InputError(
            f"the optimizer does not train {len(untrained)} of the model's parameters (first: {untrained[0]}), which "
            "optax would: only the state of an optimizer of all parameters can be carried over"
        )
    named = iter(order)
    return [{**group, "params": [next(named) for _ in group["params"]]} for group in groups]


def has_names(optimizer_state_dict: Mapping[str, Any]) -> bool:
    """Whether the state dict says which parameters are meant, so that no order needs to be assumed."""
    groups = _groups(optimizer_state_dict)
    return any(group.get("param_names") for group in groups) or all(
        isinstance(index, str) for group in groups for index in group["params"]
    )


def _are_numbers(setting: Any) -> bool:
    """Whether a setting is a number, in a tensor perhaps, or a pair of these, and they are finite and at least 0."""
    values = setting if isinstance(setting, list | tuple) else [setting]
    numbers = [value.item() if math.prod(getattr(value, "shape", (0,))) == 1 else value for value in values]
    return all(isinstance(number, int | float) and math.isfinite(number) and number >= 0 for number in numbers)


def _groups(optimizer_state_dict: Any) -> Sequence[Mapping[str, Any]]:
    """The parameter groups of a state dict that has the form of one."""
    content = optimizer_state_dict if isinstance(optimizer_state_dict, Mapping) else {}
    state, groups = content.get("state"), content.get("param_groups")
    if not (
        isinstance(state, Mapping)
        and all(isinstance(entry, Mapping) for entry in state.values())
        and isinstance(groups, list | tuple)
        and groups
        and all(isinstance(group, Mapping) and {"params", "lr"} <= group.keys() for group in groups)
    ):
        raise InputError(
            "this is not the state_dict of a torch.optim optimizer, which has state and param_groups: save "
            "optimizer.state_dict()"
        )
    return groups


def _parameters(model: nnx.Module, rename: Mapping[str, str | None] | None) -> tuple[dict[str, str], dict]:
    """{key: first key of the same parameter, which ties give several}, and {first key: PyTorch's shape}."""
    first, shapes, seen = {}, {}, {}
    for key, slot in slots(model, rename).items():
        if all(isinstance(variable, nnx.Param) for variable in slot.variables):
            first[key] = seen.setdefault(tuple(map(id, slot.variables)), key)
            shapes.setdefault(first[key], slot.torch_shape)
    return first, shapes


def _bare(names: Iterable[str], first: Mapping[str, str]) -> list[str]:
    """Those of the names that are the model's parameters, without wrappers, each parameter once."""
    bare = strip_wrappers(names, expected=first).values()
    return list(dict.fromkeys(first[name] for name in bare if name in first))


def _shape(moments: Mapping[str, Any]) -> tuple[int, ...] | None:
    """That of a parameter's moments; None if it has none."""
    shapes = {
        tuple(moments[name].shape)
        for kind in KINDS
        for name in kind.moments.values()
        if hasattr(moments.get(name), "shape")
    }
    if len(shapes) > 1:
        raise InputError(f"the optimizer state has moments of one parameter with the shapes {sorted(shapes)}")
    return shapes.pop() if shapes else None


def _guess(
    groups: Sequence[Mapping[str, Any]], names: list[str], shapes: Mapping[str, tuple], found: list[tuple | None]
) -> list[str]:
    """The order of the optimizer's parameters: the first usual one that agrees with the sizes and the shapes found."""
    sizes = [len(group["params"]) for group in groups]
    matrices = [name for name in names if len(shapes[name]) >= 2]
    rest = [name for name in names if len(shapes[name]) < 2]
    splits = [[names]] if len(groups) == 1 else [[matrices, rest], [rest, matrices], [names]]
    for split in splits:
        order = [name for part in split for name in part]
        fits = sizes == [len(part) for part in split] or (len(split) == 1 and sum(sizes) == len(order))
        if fits and all(shape in (None, shapes[name]) for name, shape in zip(order, found, strict=True)):
            return order
    raise InputError(
        f"the optimizer's {sum(sizes)} parameters, in {len(groups)} group(s), can't be told from their shapes and "
        f"order: {_HINT}"
    )
