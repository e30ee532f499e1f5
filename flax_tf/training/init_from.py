"""Starting a run from PyTorch: from weights alone, or where a half-trained run stopped."""

import dataclasses
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_tf.errors import InputError
from flax_tf.porting.convert import StateDictError, slots, torch_to_flax
from flax_tf.porting.files import TORCH_SUFFIXES, load_torch, read_weights, state_dict_in
from flax_tf.porting.names import strip_wrappers
from flax_tf.porting.optimizer import torch_to_optax
from flax_tf.porting.param_groups import MOST_STEPS, has_names, kind_of, param_groups
from flax_tf.porting.recognise import UnknownArchitectureError, told_fields
from flax_tf.saving import model_directory
from flax_tf.training.optimizer import learning_rates
from flax_tf.training.optimizer_config import OptimizerConfig
from flax_tf.training.step import TrainState

log = logging.getLogger(__name__)

# Where training scripts put the optimizer's state dict (Lightning: a list of one), and the number of steps done.
_OPTIMIZERS = ("optimizer", "optimizer_state_dict", "optimizer_state", "optim", "optim_state_dict", "optimizer_states")
_STEPS = ("step", "global_step", "iter", "iteration", "iter_num")
# The settings of a run that can go on with the state of each kind of optimizer.
_NAMES = {"Adam": ("adamw", "adam"), "SGD": ("sgd",)}
# Of a learning rate that two programs computed, and of settings that were written down in decimals.
_SAME = 1e-6
_SCHEDULE = "the schedule, the warm-up and the --steps that it had"
_NO_FLAG = "no setting, as its parameter groups differ"


@dataclasses.dataclass(frozen=True)
class Source:
    """What a run starts from."""

    path: str
    weights: dict[str, np.ndarray]
    optimizer: Mapping[str, Any] | None = None
    """The state dict of a `torch.optim` optimizer. None: there are weights alone."""
    step: int | None = None
    """Steps done. None: what the optimizer counted."""

    @property
    def about(self) -> str:
        """It in a line."""
        if self.optimizer is None:
            return f"{self.path}: weights alone, the run starts at step 0 with a fresh optimizer"
        return f"{self.path}: weights and the state of the optimizer, the run goes on at step {self.step}"


def read_source(path: str | os.PathLike) -> Source:
    """Reads weights, or a training checkpoint that `torch.save` wrote, which is opened with `weights_only=True`.

    A directory, or the run or the model in it, has weights alone. Raises InputError for what can't be read, or for an
    optimizer that doesn't tell its step.
    """
    file = Path(path)
    if file.is_dir() or file.suffix not in TORCH_SUFFIXES:
        return Source(str(path), read_weights(model_directory(file)))
    loaded = load_torch(file)
    weights, _ = state_dict_in(file, loaded)
    optimizer = _optimizer_in(file, loaded)
    if optimizer is None:
        return Source(str(path), weights)
    steps = [_told_step(path, name, loaded[name]) for name in _STEPS if name in loaded]
    known = [step for step in steps if step is not None] + _counted(optimizer)
    if not known:
        raise InputError(f"{path} does not tell how many steps were done: save it under 'step'")
    return Source(str(path), weights, optimizer, known[0])


def fill(model: nnx.Module, source: Source) -> None:
    """Fills the model with the source's weights.

    Raises InputError if they don't fit: of another architecture or of other sizes in one line, else with a list.
    """
    try:
        torch_to_flax(source.weights, model)
    except StateDictError as error:
        raise InputError(_other_model(source, model) or f"{source.path}: {error}") from None


def take_over(
    source: Source, state: TrainState, model: nnx.Module, config: OptimizerConfig, total_steps: int
) -> TrainState:
    """The state of a run that goes on where the source's stopped, from a fresh one that has the source's weights.

    A source without an optimizer leaves it at step 0. Settings of the optimizer that the run would change are logged.
    Raises InputError if the run's optimizer can't go on from the source's, or the run would be over.
    """
    if source.optimizer is None or source.step is None:
        return state
    if source.step >= total_steps:
        raise InputError(f"{source.path} has done {source.step} steps, and the run takes {total_steps}: raise --steps")
    try:
        kind = kind_of(source.optimizer)
        groups = param_groups(source.optimizer, model, names=source.weights)
        if config.name not in _NAMES[kind.name]:
            told = "AdamW" if any(group.get("decoupled_weight_decay") for group in groups) else kind.name
            raise InputError(
                f"its optimizer is {told}, which {config.name} can't go on from: give --optimizer.name "
                f"{' or '.join(_NAMES[kind.name])}, or a file of weights alone"
            )
        if any(group.get("nesterov") for group in groups):
            raise InputError("its optimizer has nesterov=True, which no run has: give a file of weights alone")
        assumed = _assumed_order(source.optimizer, groups, model)
        opt_state = torch_to_optax(source.optimizer, model, state.opt_state, names=source.weights, step=source.step)
    except InputError as error:
        raise InputError(f"{source.path}: {error}") from None
    if assumed:
        log.warning("%s %s", source.path, assumed)
    for line in _differences(source, groups, model, config, total_steps):
        log.warning("%s %s", source.path, line)
    return state._replace(step=jnp.asarray(source.step, state.step.dtype), opt_state=opt_state)


def _optimizer_in(path: Path, loaded: Mapping[str, Any]) -> Mapping[str, Any] | None:
    for name in _OPTIMIZERS:
        found = loaded.get(name)
        states = found if isinstance(found, list) else [found]
        if len(states) > 1:
            raise InputError(f"{path} holds {len(states)} optimizers under {name!r}: only one can be carried over")
        if states and isinstance(states[0], Mapping):
            return states[0]
    return None


def _whole(value: Any) -> int | None:
    """A count of steps, as a number or in a tensor."""
    number = value.item() if getattr(value, "ndim", None) == 0 else value
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    return int(number) if is_number and 0 <= number <= MOST_STEPS and number % 1 == 0 else None


def _told_step(path: str | os.PathLike, name: str, value: Any) -> int | None:
    """The step under a name. None if there is something else than a number, such as an iterator's state."""
    number = value.item() if getattr(value, "ndim", None) == 0 else value
    step = _whole(number)
    if step is None and isinstance(number, int | float):
        raise InputError(f"{path} says {name} {number}, which is no number of steps: save that under 'step'")
    return step


def _other_model(source: Source, model: Any) -> str | None:
    """A line on the architecture or the sizes in which the source is another than the model, if shapes tell."""
    names = strip_wrappers(source.weights)
    try:
        told = told_fields({names[key]: array.shape for key, array in source.weights.items()})
    except UnknownArchitectureError:
        return None
    arch = told.pop("arch")
    if arch != model.config.arch:
        return (
            f"{source.path} holds a {arch}, and this run trains a {model.config.arch}: give a file or --preset of one"
        )
    flags = [f"--model.{name} {value}" for name, value in told.items() if getattr(model.config, name) != value]
    return f"{source.path} holds a {arch} of other sizes than the run's: give {' '.join(flags)}" if flags else None


def _assumed_order(optimizer: Mapping[str, Any], groups: Sequence[Mapping[str, Any]], model: nnx.Module) -> str | None:
    """A line if parameters may have been taken for others, as nothing but the order tells those of one shape apart.

    Raises InputError for groups without names other than one, or two of the matrices and of the rest.
    """
    if has_names(optimizer):
        return None
    advice = "torch.optim's optimizers save names when they are made with model.named_parameters()"
    places = slots(model)
    kinds = [{len(places[key].torch_shape) >= 2 for key in group["params"]} for group in groups]
    if len(groups) > 1 and sorted(map(tuple, kinds)) != [(False,), (True,)]:
        raise InputError(
            f"its optimizer has {len(groups)} groups of parameters without names, and not one of the matrices and one "
            f"of the rest, so which is which can't be told: {advice}"
        )
    first: dict[tuple[int, ...], str] = {}
    for key in (key for group in groups for key in group["params"]):
        other = first.setdefault(places[key].torch_shape, key)
        if other != key:
            return (
                f"has an optimizer without names of its parameters, which are taken to be in the model's order; no "
                f"shape would tell if they weren't, as {other} and {key} have the same: {advice}"
            )
    return None


def _counted(optimizer: Mapping[str, Any]) -> list[int]:
    """The steps that an optimizer counted: none, or the most of any parameter."""
    state = optimizer.get("state")
    entries = state.values() if isinstance(state, Mapping) else ()
    counts = [_whole(entry["step"]) for entry in entries if isinstance(entry, Mapping) and "step" in entry]
    return [max(count for count in counts if count is not None)] if any(count is not None for count in counts) else []


def _differences(
    source: Source,
    groups: Sequence[Mapping[str, Any]],
    model: nnx.Module,
    config: OptimizerConfig,
    total_steps: int,
) -> Iterator[str]:
    """A line for each setting that the run changes, with the flags that would keep it."""
    now: dict[str, Any] = {"momentum": config.momentum} if config.name == "sgd" else {}
    if config.name != "sgd":
        now = {"betas": config.betas, "eps": config.eps}
    for name, value in now.items():
        before = {_plain(group[name]) for group in groups}
        if not all(np.allclose(old, value, rtol=_SAME, atol=0) for old in before):
            old = before.pop()
            flag = f"--optimizer.{name} {list(old) if isinstance(old, tuple) else old}".replace(", ", ",")
            yield _changed(name, old, value, _NO_FLAG if before else flag)
    yield from _decay_differences(groups, model, config)
    yield from _rate_differences(source, groups, config, total_steps)
    counted = _counted(source.optimizer or {})
    if counted and counted[0] != source.step:
        yield f"says step {source.step}, and its optimizer counted {counted[0]}: each keeps its own"


def _decay_differences(
    groups: Sequence[Mapping[str, Any]], model: nnx.Module, config: OptimizerConfig
) -> Iterator[str]:
    before = {key: _plain(group["weight_decay"]) for group in groups for key in group["params"]}
    matrices = {key for key, slot in slots(model).items() if len(slot.torch_shape) >= 2}
    values = set(before.values())
    decoupled = groups[0].get("decoupled_weight_decay")
    name = config.name if decoupled is None or config.name == "sgd" else "adamw" if decoupled else "adam"
    if name != config.name and any({*values, config.weight_decay}):
        yield _changed("name", name, config.name, f"--optimizer.name {name}")

    def fits(value: float, decay: str) -> bool:
        return all(
            math.isclose(old, value if decay == "all" or key in matrices else 0.0, rel_tol=_SAME)
            for key, old in before.items()
        )

    if not fits(config.weight_decay, config.decay):
        value = max(values)
        flags = [
            f"--optimizer.weight_decay {value} --optimizer.decay {d}" for d in ("all", "matrices") if fits(value, d)
        ]
        now = f"{config.weight_decay} of {config.decay}"
        yield _changed("weight_decay", ", ".join(map(str, sorted(values))), now, flags[0] if flags else _NO_FLAG)


def _rate_differences(
    source: Source, groups: Sequence[Mapping[str, Any]], config: OptimizerConfig, total_steps: int
) -> Iterator[str]:
    step = source.step or 0
    rates = {_plain(group["lr"]) for group in groups}
    ours = _rates_at(step, config, total_steps)
    if all(any(math.isclose(rate, own, rel_tol=_SAME) for own in ours) for rate in rates):
        return
    yield _changed(f"learning_rate of step {step}", min(rates), ours[0], _rate_flags(groups, config, total_steps, step))


def _rates_at(step: int, config: OptimizerConfig, total_steps: int) -> list[float]:
    """The run's rate, and that of the step before, as some scripts set the rate before a step and so save that."""
    schedule = learning_rates(config, total_steps)
    return [np.asarray(schedule(k)).item() for k in (step, max(0, step - 1))]


def _rate_flags(groups: Sequence[Mapping[str, Any]], config: OptimizerConfig, total_steps: int, step: int) -> str:
    """The flags with which a run has the groups' learning rate at a step."""
    rates = {_plain(group["lr"]) for group in groups}
    if len(rates) > 1:
        return _NO_FLAG
    rate = rates.pop()
    peak = _plain(groups[0].get("initial_lr", rate))
    if peak > 0 and peak >= config.min_learning_rate:
        ours = _rates_at(step, dataclasses.replace(config, learning_rate=peak), total_steps)
        if any(math.isclose(rate, own, rel_tol=_SAME) for own in ours):
            return f"--optimizer.learning_rate {peak}"
    if rate == 0:  # the end of a schedule; no run can have it throughout
        return _SCHEDULE
    flags = f"--optimizer.schedule constant --optimizer.warmup_steps 0 --optimizer.learning_rate {rate}"
    if config.min_learning_rate > rate:
        flags += " --optimizer.min_learning_rate 0"
    return flags if peak == rate else f"{flags}, or with {_SCHEDULE}"


def _changed(name: str, before: Any, now: Any, flag: str) -> str:
    return f"was trained with {name} {before}, and this run has {now}: it goes on as it was with {flag}"


def _plain(value: Any) -> Any:
    """A setting as Python's: PyTorch may keep numbers in tensors, and pairs in lists."""
    if isinstance(value, list | tuple):
        return tuple(_plain(each) for each in value)
    return value.item() if hasattr(value, "item") else value
