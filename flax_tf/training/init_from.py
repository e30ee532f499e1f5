"""Starting a run from PyTorch: from weights alone, or where a half-trained run stopped."""

import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from flax_tf.errors import InputError
from flax_tf.porting.convert import slots
from flax_tf.porting.files import TORCH_SUFFIXES, load_torch, read_weights, state_dict_in
from flax_tf.porting.optimizer import torch_to_optax
from flax_tf.porting.param_groups import kind_of, param_groups
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
_NO_FLAG = "no setting, as its parameter groups differ"


@dataclass(frozen=True)
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
    steps = [_whole(loaded[name]) for name in _STEPS if name in loaded]
    known = [step for step in steps if step is not None] + _counted(optimizer)
    if not known:
        raise InputError(f"{path} does not tell how many steps were done: save it under 'step'")
    return Source(str(path), weights, optimizer, known[0])


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
            raise InputError(
                f"its optimizer is {kind.name}, which {config.name} can't go on from: give --optimizer.name "
                f"{' or '.join(_NAMES[kind.name])}, or a file of weights alone"
            )
        if any(group.get("nesterov") for group in groups):
            raise InputError("its optimizer has nesterov=True, which no run has: give a file of weights alone")
        opt_state = torch_to_optax(source.optimizer, model, state.opt_state, names=source.weights, step=source.step)
    except InputError as error:
        raise InputError(f"{source.path}: {error}") from None
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
    return int(number) if is_number and number >= 0 and float(number).is_integer() else None


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
    schedule = learning_rates(config, total_steps)
    # Some scripts set the rate before a step, and so save that of the step before.
    ours = [np.asarray(schedule(k)).item() for k in (step, max(0, step - 1))]
    if all(any(math.isclose(rate, own, rel_tol=_SAME) for own in ours) for rate in rates):
        return
    peaks = {_plain(group.get("initial_lr", group["lr"])) for group in groups}
    if len(rates) > 1:
        flag = _NO_FLAG
    elif not math.isclose(peak := peaks.pop(), config.learning_rate, rel_tol=_SAME):
        flag = f"--optimizer.learning_rate {peak}"
    else:
        flag = "the schedule, the warm-up and the --steps that it had"
    yield _changed(f"learning_rate of step {step}", sorted(rates)[0], ours[0], flag)


def _changed(name: str, before: Any, now: Any, flag: str) -> str:
    return f"was trained with {name} {before}, and this run has {now}: it goes on as it was with {flag}"


def _plain(value: Any) -> Any:
    """A setting as Python's: PyTorch may keep numbers in tensors, and pairs in lists."""
    if isinstance(value, list | tuple):
        return tuple(_plain(each) for each in value)
    return value.item() if hasattr(value, "item") else value
