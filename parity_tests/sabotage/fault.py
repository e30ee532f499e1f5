"""What a planted fault is, and how one is planted."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from models import ATTN_RNN, BACKBONE, BLOCK, LANGUAGE_MODEL, RNN, TRANSFORMER, reference, twin

from flax_tf.config import Config
from flax_tf.parity import compare

# Replaces an attribute, most often a function of a module of the product, until the comparison is over.
Patch = Callable[[Any, str, Any], None]


@dataclass(frozen=True)
class Fault:
    """One fault: what it is, where the report must place it, and how to try it."""

    name: str
    trap: str
    """Its row of docs/differences.md; "" for none."""
    place: str
    """What the report must name."""
    find: Callable[[], str | None]
    """Plants it, compares, and returns what the report names; None if it found no difference."""


_rng = np.random.default_rng(0)
_SOURCE, _TARGET = _rng.integers(3, 37, (3, 7)), _rng.integers(3, 31, (3, 5))
_SOURCE[1, 4:] = _SOURCE[2, 2:] = _TARGET[1, 3:] = 0  # padding

INPUTS: dict[type, tuple[np.ndarray, ...]] = {
    type(BLOCK): (_rng.standard_normal((2, 7, 15)),),
    type(BACKBONE): (_SOURCE,),
    type(LANGUAGE_MODEL): (_SOURCE,),
    type(TRANSFORMER): (_SOURCE, _TARGET),
    type(RNN): (_SOURCE, _TARGET),
    type(ATTN_RNN): (_SOURCE, _TARGET),
}


def pair(config: Config, seed: int = 0) -> tuple[torch.nn.Module, Any]:
    """An honest pair in which no two parameters are alike: norms and biases are random too."""
    module = reference(config, seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    return module, twin(module)


def in_model(
    faults: list[Fault],
    config: Config,
    place: str,
    trap: str = "",
    inputs: tuple[np.ndarray, ...] | None = None,
    **kwargs: Any,
):
    """Registers a function that plants a fault in a Flax model of this config; its docstring says what it does."""

    def register(plant: Callable[[Any, Patch], None]) -> Callable[[Any, Patch], None]:
        def find() -> str | None:
            module, model = pair(config)
            given = INPUTS[type(config)] if inputs is None else inputs
            with contextlib.ExitStack() as planted:
                plant(model, lambda *what: planted.enter_context(mock.patch.object(*what)))
                report = compare(module, model, *given, **kwargs)
            return None if report.ok else report.culprit or report.summary()

        faults.append(Fault(_described(plant), trap, place, find))
        return plant

    return register


def found_by(faults: list[Fault], place: str, trap: str = ""):
    """Registers a function that plants a fault, compares, and returns what the report names, or None."""

    def register(find: Callable[[], str | None]) -> Callable[[], str | None]:
        faults.append(Fault(_described(find), trap, place, find))
        return find

    return register


def with_call(layer: Any, call: Callable[..., Any]) -> None:
    """Makes a module compute something else."""
    layer.__class__ = type(type(layer).__name__, (type(layer),), {"__call__": call})


def _described(function: Callable[..., Any]) -> str:
    return (function.__doc__ or "").strip().rstrip(".")
