"""The rows of the table: who is compared in what, and the bar that each has to reach."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flax_tf.errors import InputError

EAGER, COMPILE = "torch_eager", "torch_compile"


@dataclass(frozen=True)
class Bar:
    """A ratio that a row has to reach."""

    what: str
    ratio: Callable[[Mapping[str, Any]], float]
    """Of the fields of a row. Raises TypeError where a field is None, because a side could not run."""
    least: float
    aim: float
    at_most: bool = False
    """The smaller, the better."""


@dataclass(frozen=True)
class Row:
    """One comparison. `sides` run in this order, and in turn, a fresh process each."""

    name: str
    about: str
    bars: tuple[Bar, ...]
    sides: tuple[str, ...] = ("ours", EAGER, COMPILE)
    work: str = ""
    """The name of what is run, if not the row's own."""
    compile_time: bool = False
    """The time is what the first call takes more than a later one, and every round starts without any cache."""
    checkpoint: bool = False
    """A checkpoint is written first, that all sides read."""
    keep_memory: bool = False
    """All sides keep memory from step to step, as `train_jax.py --keep_memory true` does."""


def faster_than(what: str, sides: tuple[str, ...], least: float, aim: float) -> Bar:
    """How many times as fast as the fastest of the sides that ran."""

    def ratio(row: Mapping[str, Any]) -> float:
        return min(row[f"{side}_s"] for side in sides if row[f"{side}_s"] is not None) / row["ours_s"]

    return Bar(f"times as fast as {what}", ratio, least, aim)


def part_of(what: str, ours: str, other: str, least: float, aim: float) -> Bar:
    """Our field as a part of the other's."""
    return Bar(what, lambda row: row[ours] / row[other], least, aim, at_most=True)


def better(least: float, aim: float) -> Bar:
    return faster_than("the better PyTorch", (EAGER, COMPILE), least, aim)


def memory(least: float, aim: float) -> Bar:
    return part_of("peak memory, as a part of eager's", "ours_peak_mb", "torch_eager_peak_mb", least, aim)


_BLOCK = "block of the first document, batch 8, 128 positions, width 512"
_LM = "training step of the second document's language model at its own config"
_TRANSFORMER = "training step of the third document's Transformer at its own config, dropout 0.1"
_GENERATE = "100 sampled tokens after 16, the second document's model; PyTorch with a cache of keys and values"
_KEPT = "; all sides keep memory from step to step"
_COMPILED = "torch.compile"
_CACHE = "a PyTorch cache"

ROWS = {
    row.name: row
    for row in (
        Row("block-forward", f"{_BLOCK}: forward{_KEPT}", (better(1.05, 1.12),), keep_memory=True),
        Row(
            "block-forward-backward",
            f"{_BLOCK}: forward and backward{_KEPT}",
            (better(0.95, 1.05),),
            keep_memory=True,
        ),
        Row(
            "lm-step-32",
            f"{_LM}, batch 32",
            (faster_than("eager", (EAGER,), 2.0, 2.5), faster_than(_COMPILED, (COMPILE,), 1.4, 1.7), memory(0.5, 0.42)),
        ),
        Row("lm-step-256", f"{_LM}, batch 256", (faster_than(_COMPILED, (COMPILE,), 1.5, 2.0), memory(0.2, 0.16))),
        Row("transformer-step-8", f"{_TRANSFORMER}, batch 8{_KEPT}", (better(1.0, 1.1),), keep_memory=True),
        Row("transformer-step-64", f"{_TRANSFORMER}, batch 64{_KEPT}", (better(0.9, 1.0),), keep_memory=True),
        Row("generate-1", f"{_GENERATE}, batch 1", (faster_than(_CACHE, (EAGER, COMPILE), 1.5, 2.4),)),
        Row("generate-32", f"{_GENERATE}, batch 32", (faster_than(_CACHE, (EAGER, COMPILE), 2.5, 4.6),)),
        Row(
            "compile",
            "compilation of the step of lm-step-32, with empty caches and with what an earlier process left in them",
            (part_of("compilation, as a part of torch.compile's", "ours_s", "torch_compile_s", 1 / 5, 1 / 10),),
            sides=("ours", COMPILE, "ours_cached", "torch_compile_cached"),
            work="lm-step-32",
            compile_time=True,
        ),
        Row(
            "host-step",
            "training step of a language model of 94 parameter arrays, so narrow that it is host work alone",
            (part_of("time, as a part of nnx.jit's", "ours_s", "nnx_jit_s", 1 / 4, 1 / 7),),
            sides=("ours", "nnx_jit"),
        ),
        Row(
            "port-1gb",
            "a file of 1 GB that torch.save wrote into a model on the device, every page of it read",
            (
                faster_than("torch.load", (EAGER,), 1.5, 3.0),
                part_of("extra memory, as a part of the file", "ours_extra_mb", "file_mb", 1.15, 1.05),
            ),
            sides=("ours", EAGER, "torch_mmap"),
            checkpoint=True,
        ),
    )
}  # fmt: skip


def choose(names: list[str]) -> list[Row]:
    """The rows of these names, all for none. Raises InputError for a name that there is not."""
    for name in names:
        if name not in ROWS:
            raise InputError(f"there is no row {name}: choose from {', '.join(ROWS)}")
    return [row for row in ROWS.values() if not names or row.name in names]
